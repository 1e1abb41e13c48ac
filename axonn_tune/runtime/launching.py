"""Starting a rank: its place in the world, process groups, the run directory, and how every end is told.

Whatever ends a rank, all others end within seconds, with the same exit code, and one of them says why.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_tune.errors import AxonnTuneError, EnvironmentProblem, TrainingFailedError, UsageError
from axonn_tune.files import write_text_atomically
from axonn_tune.grid import AXES
from axonn_tune.runtime.checkpoint import Checkpointer, Run
from axonn_tune.runtime.data import batches
from axonn_tune.runtime.ledger import compare
from axonn_tune.runtime.loop import START_TIMEOUT_S, Loop
from axonn_tune.runtime.mesh import Mesh, build_mesh
from axonn_tune.runtime.metrics import Metrics, program_of, resident_bytes
from axonn_tune.runtime.trace import Tracer
from axonn_tune.runtime.trainer import Trainer, require_runnable
from axonn_tune.runtime.watch import Failure, Watch
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.results import differences_name, remove_outcome, run_directory

SAVED_ON_A_SIGNAL, INTERRUPTED = 75, 130
_ROOT_CAUSE_S = 6.0
"""How long a rank whose connection broke waits to hear which rank was lost, before it names itself."""


@dataclass(frozen=True)
class Place:
    """This process among all: as torchrun says it, else as Slurm does, else alone."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    address: str = "localhost"
    port: int = 0


@dataclass(frozen=True)
class Options:
    """What the command line adds to a launch config."""

    steps: int | None = None
    resume: bool = False
    directory: Path | None = None
    trace_steps: int = 0
    trace_all: bool = False


def place_of(environment: Mapping[str, str]) -> Place:
    """Where this process stands; UsageError if the environment says it half."""
    if "RANK" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_PROCID" in environment and int(environment.get("SLURM_NTASKS", "1")) > 1:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    else:
        return Place()
    missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise UsageError(f"{names[0]} is set, so {', '.join(missing)} must be too, as under torchrun")
    rank, world, local_rank = (int(environment[name]) for name in names)
    return Place(rank, world, local_rank, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))


def require_world(launch: Launch, world: int) -> None:
    """UsageError, with the arithmetic, unless there are as many ranks as the grid has."""
    grid = launch.grid.grid()
    if grid.world != world:
        product = "·".join(str(grid.axis_size(axis)) for axis in AXES)
        ranks = "1 rank was" if world == 1 else f"{world} ranks were"
        raise UsageError(f"the grid x·y·z·data = {product} needs {grid.world} ranks, but {ranks} started")


def device_of(backend: str, place: Place) -> torch.device:
    """This rank's GPU under nccl, the CPU under gloo; EnvironmentProblem without such a GPU."""
    if backend == "gloo":
        return torch.device("cpu")
    found = torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0
    if place.local_rank >= found:
        raise EnvironmentProblem(
            f"rank {place.rank} needs GPU {place.local_rank} of its host for backend nccl, but torch finds {found}; "
            "on CPUs the backend is gloo, as `backend` in a launch config or as --backend of calibrate"
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


@dataclass
class Rank:
    """One rank's run, from joining the world to its exit code."""

    launch: Launch
    options: Options
    place: Place
    directory: Path | None = None
    watch: Watch | None = None

    def run(self) -> int:
        """Train; the exit code. Every error is told and turned into one."""
        try:
            return self._ended(self._train(), "")
        except KeyboardInterrupt:
            return self._ended(INTERRUPTED, "interrupted")
        except AxonnTuneError as error:
            return self._ended(error.exit_code, str(error))
        except Exception as error:
            return self._broken(error)

    def _train(self) -> int:
        launch, place = self.launch, self.place
        require_world(launch, place.world)
        require_runnable(launch)
        self._be_deterministic()
        device = device_of(launch.backend, place)
        mesh = self._join(device)
        assert self.directory is not None, "joining settles it"
        steps, base_bytes = self.options.steps or launch.steps, resident_bytes(device)
        trainer = Trainer(launch, mesh, device=device, source=batches(launch, mesh))
        checkpointer = self._resume(trainer)
        metrics = Metrics(launch, mesh, device, self.directory, steps, base_bytes)
        tracer = self._tracer(device)
        loop = self._loop(trainer, metrics, checkpointer, tracer)
        # Every rank times the traced steps, so that a traced one is no slower than the others.
        trainer.model.communicator.timer.start(device, traced_steps=self.options.trace_steps)
        before = trainer.optimizer.steps_done
        completed = loop.run(steps)
        self._require_program(trainer, steps=trainer.optimizer.steps_done - before)
        metrics.close()
        if tracer is not None:
            tracer.close()
        if completed:
            return 0
        if checkpointer is None:
            raise TrainingFailedError(
                f"stopped by a signal after step {trainer.optimizer.steps_done}; "
                "nothing is saved, because the launch config has no checkpoint.directory"
            )
        return SAVED_ON_A_SIGNAL

    def _loop(
        self, trainer: Trainer, metrics: Metrics, checkpointer: Checkpointer | None, tracer: Tracer | None
    ) -> Loop:
        if self.watch is not None:
            self.watch.issued = lambda: trainer.ledger.issued
        every_steps = self.launch.checkpoint.every_steps
        return Loop(
            trainer, metrics, self.watch, checkpointer, every_steps, lambda: self._be_strict(trainer.mesh), tracer
        )

    def _join(self, device: torch.device) -> Mesh:
        """Process groups, the run directory that rank 0 chooses, and the watch."""
        place = self.place
        if place.world == 1:
            self.directory = self._make_directory()
            return build_mesh(self.launch.grid.grid())
        dist.init_process_group(
            self.launch.backend,
            init_method=f"tcp://{place.address}:{place.port}" if "TORCHELASTIC_RUN_ID" not in os.environ else "env://",
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=max(START_TIMEOUT_S, self.launch.hang_timeout_s)),
        )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.watch = Watch(place.rank, place.world, self._end_for_another)
        # One message from rank 0 before training; it is not part of a step, so not in the ledger.
        shared: list[object] = [None, None, None]
        if place.rank == 0:
            port, accept = self.watch.serve()
            token = secrets.token_hex(16)
            shared = [str(self._make_directory()), port, token]
            dist.broadcast_object_list(shared, src=0)
            accept(token)
        else:
            dist.broadcast_object_list(shared, src=0)
            self.watch.join((place.address, int(str(shared[1]))), str(shared[2]))
        self.directory = Path(str(shared[0]))
        self.directory.mkdir(parents=True, exist_ok=True)
        return build_mesh(self.launch.grid.grid())

    def _make_directory(self) -> Path:
        """The run's folder, as asked or `runs/<time>-<name>`, without what an earlier run has left in it."""
        folder = self.options.directory or run_directory(self.launch)
        folder.mkdir(parents=True, exist_ok=True)
        remove_outcome(folder)
        return folder

    def _resume(self, trainer: Trainer) -> Checkpointer | None:
        """A checkpointer with the newest checkpoint loaded; None where the launch config saves nothing."""
        wanted = self.launch.checkpoint
        if wanted.directory is None:
            if self.options.resume:
                raise UsageError("--resume: the launch config has no checkpoint.directory to resume from")
            return None
        checkpointer = Checkpointer(
            wanted.directory,
            keep=wanted.keep,
            mesh=trainer.mesh,
            optimizer=trainer.optimizer,
            run=Run.of(self.launch),
        )
        found = checkpointer.load_latest()
        if found is None and self.options.resume:
            raise UsageError(f"--resume: there is no checkpoint in {wanted.directory!r}")
        if found is not None and self.place.rank == 0:
            say_why(f"after step {found}, from {wanted.directory}", label="Resuming")
        return checkpointer

    def _tracer(self, device: torch.device) -> Tracer | None:
        """For the ranks that write a trace."""
        options = self.options
        if not options.trace_steps or (self.place.rank and not options.trace_all):
            return None
        assert self.directory is not None, "joining settles it"
        return Tracer(options.trace_steps, self.directory, self.place.rank, self.launch.name, device)

    def _require_program(self, trainer: Trainer, *, steps: int) -> None:
        """Every collective was one the program has, or there is a mistake in one of them."""
        different = compare(trainer.ledger, *program_of(self.launch), steps=steps) if steps else []
        if different and self.directory is not None:
            text = json.dumps({"rank": self.place.rank, "differs": different}, ensure_ascii=False)
            write_text_atomically(self.directory / differences_name(self.place.rank), text + "\n")
        if different and self.place.rank == 0:
            print("The collectives sent differ from the program:", *different, sep="\n  ", file=sys.stderr)

    def _be_deterministic(self) -> None:
        if self.launch.deterministic:
            # cuBLAS reads it when it starts.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def _be_strict(self, mesh: Mesh) -> None:
        """From the second step on, a collective that takes longer than the launch config allows ends the run.

        Under NCCL that would abort ranks that wait, before anybody could say for whom; there the watch counts.
        """
        if self.launch.backend == "nccl":
            return
        # torch has no public way to change it after a group is made.
        set_timeout = dist.distributed_c10d._set_pg_timeout
        for group in {id(group): group for group in mesh.groups.values() if group is not None}.values():
            set_timeout(timedelta(seconds=self.launch.hang_timeout_s), group)

    def _broken(self, error: Exception) -> int:
        """An error nobody foresaw, or a connection that another rank's end has broken."""
        reason = f"{type(error).__name__}: {error}"
        if is_timeout(error) and self.watch is not None:
            self.watch.fail(f"a collective took longer than {self._timeout_s():g} s", code=6, timed_out=True)
            time.sleep(_ROOT_CAUSE_S)
        elif is_broken_connection(error):
            # Who was lost is about to be told, and ends this process.
            time.sleep(_ROOT_CAUSE_S)
        else:
            print(f"rank {self.place.rank}:\n{''.join(traceback.format_exception(error))}", file=sys.stderr)
        code = EnvironmentProblem.exit_code if isinstance(error, OSError) else TrainingFailedError.exit_code
        return self._ended(code, reason)

    def _timeout_s(self) -> float:
        return self.launch.hang_timeout_s

    def _ended(self, code: int, reason: str) -> int:
        """Tell the others, the run directory and, on rank 0, the user."""
        if self.watch is not None:
            if code in (0, SAVED_ON_A_SIGNAL):
                self.watch.finish()
            else:
                self.watch.fail(f"rank {self.place.rank}: {reason}", code=code)
        if reason and (self.place.rank == 0 or self.watch is None):
            say_why(reason)
        if code == SAVED_ON_A_SIGNAL and self.place.rank == 0:
            say_why("by a signal; the state is saved, and the next run goes on from it", label="Stopped")
        return code

    def _end_for_another(self, failure: Failure) -> None:
        """Another rank has failed: end at once, whatever the main thread waits for."""
        reason = failure.reason if failure.reason.startswith("rank ") else f"rank {failure.rank}: {failure.reason}"
        if not failure.told:
            say_why(reason)
        end_process(failure.code)


def say_why(reason: str, *, label: str = "Error") -> None:
    """One line for people, in one write, so that ranks do not mix theirs."""
    sys.stderr.write(f"{label}: {reason}\n")
    sys.stderr.flush()


def end_process(code: int) -> None:
    """End now: threads of torch that wait for a lost rank would hold up an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def is_timeout(error: Exception) -> bool:
    """Whether a collective has waited too long; torch says it in words only."""
    return isinstance(error, RuntimeError) and "imed out" in str(error)


def is_broken_connection(error: Exception) -> bool:
    """Whether another rank went away in a collective; torch says it in words only."""
    words = ("Connection closed by peer", "Connection reset", "Broken pipe", "Socket", "NCCL", "gloo")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
