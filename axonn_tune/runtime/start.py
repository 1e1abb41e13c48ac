"""Start of a run: one rank's, from joining the world to its exit code, and that of all ranks of this host.

If a rank ends, all others end within seconds with the same exit code, and one of them reports the reason. Ranks that
torchrun or srun starts import torch each; those of one host alone are forks of a process that has, which takes 0.3 s
for eight. So nothing imported here may start a thread.
"""

from __future__ import annotations

import json
import os
import resource
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# What autograd imports, sympy with it, at the first gradient of an array: here it is once for all forks of a host.
import torch.fx.experimental.symbolic_shapes

from axonn_tune.errors import (
    AxonnTuneError,
    EnvironmentProblem,
    NothingFeasibleError,
    TrainingFailedError,
    UsageError,
    count_in,
)
from axonn_tune.files import write_text_atomically
from axonn_tune.processes import end_process, exit_code_of, fork_ranks
from axonn_tune.program.count import parameters
from axonn_tune.runtime.checkpoint import Checkpointer, load_frozen
from axonn_tune.runtime.devices import device_of, require_free_memory, require_gpus, resident_bytes, use_device
from axonn_tune.runtime.ledger import compare, program_of, routed
from axonn_tune.runtime.mesh import (
    FlightRecorder,
    Mesh,
    WorldGroup,
    build_mesh,
    is_broken_connection,
    is_timeout,
    require_world,
)
from axonn_tune.runtime.metrics import Metrics
from axonn_tune.runtime.tokens import batches
from axonn_tune.runtime.trainer import START_TIMEOUT_S, STOP_SIGNALS, Trainer, TrainingLoop, require_runnable
from axonn_tune.runtime.watch import LOST_CODE, RankFailure, Watch
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import (
    LAUNCH_HEADER,
    LAUNCH_NAME,
    differences_name,
    remove_outcome,
    routed_name,
    run_directory,
)
from axonn_tune.units import show_bytes

SAVED_ON_A_SIGNAL, INTERRUPTED = 75, 130
DESCRIPTORS_EACH, DESCRIPTORS_BESIDE = 4, 256
"""Open files of rank 0: per rank of the world, and fixed."""
MOST_LAYERS, MOST_TOKENS, MOST_BYTES = 2_000, 1 << 24, 1 << 44
"""Limits of one rank: blocks and tokens of a micro-batch, which take time to build; bytes of memory."""
_ROOT_CAUSE_S = 6.0
"""How long a rank whose connection broke waits for the name of the lost rank before it reports itself."""
_REPORTED_WITHIN_S = 20.0
"""How long a rank that leaves an error to another to report waits: the first to end takes all others with it."""


@dataclass(frozen=True)
class RankEnvironment:
    """This process in the world: from torchrun's variables, else from Slurm's, else alone.

    local_world: ranks of this host, if the environment says so.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int | None = None
    address: str = "localhost"
    init_method: str = "env://"


@dataclass(frozen=True)
class RunOptions:
    """Options of the command line besides the launch config."""

    steps: int | None = None
    resume: bool = False
    resume_from: str | None = None
    directory: Path | None = None
    trace_steps: int = 0
    trace_all: bool = False


def rank_environment(environment: Mapping[str, str]) -> RankEnvironment:
    """This process' rank and world; UsageError if only some of the variables are set."""
    if "RANK" in environment:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif "SLURM_PROCID" in environment and count_in(environment, "SLURM_NTASKS", "1") > 1:
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
    else:
        return RankEnvironment()
    missing = [name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if name not in environment]
    if missing:
        raise UsageError(f"{names[0]} is set, so {', '.join(missing)} must be too, as under torchrun")
    rank, world, local_rank = (count_in(environment, name) for name in names)
    address, port = environment["MASTER_ADDR"], count_in(environment, "MASTER_PORT")
    if rank >= world:
        raise UsageError(f"{names[0]} is {rank}, but {names[1]} is {world}: ranks are numbered from 0")
    # torchrun serves a store already, which `env://` joins; else rank 0 serves one at this address.
    method = "env://" if "TORCHELASTIC_RUN_ID" in environment else f"tcp://{address}:{port}"
    local_world = count_in(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else None
    return RankEnvironment(rank, world, local_rank, local_world, address, method)


def least_bytes(launch: Launch) -> int:
    """Least memory of the largest rank: an equal share of master weights, their gradients and both moments."""
    return 4 * launch.workload.element_sizes.main * parameters(launch.model) // launch.grid.world


def require_size(launch: Launch) -> None:
    """NothingFeasibleError for a model that no rank can hold; building it, even for a dry run, would take hours."""
    layers, tokens = launch.model.layers, launch.micro_batch * launch.workload.sequence_length
    if layers > MOST_LAYERS or tokens > MOST_TOKENS:
        raise NothingFeasibleError(
            f"{layers:,} layers and micro-batches of {tokens:,} tokens: a rank is built for at most {MOST_LAYERS:,} "
            f"and {MOST_TOKENS:,}"
        )
    limit_bytes = min(launch.predicted.memory_limit_bytes or MOST_BYTES, MOST_BYTES)
    if least_bytes(launch) > limit_bytes:
        raise NothingFeasibleError(
            f"master weights, gradients and moments of a rank need {show_bytes(least_bytes(launch))} or more, above "
            f"the {show_bytes(limit_bytes)} that it may use"
        )


def require_descriptors(world: int) -> None:
    """Raise the limit of open files to what a world needs; EnvironmentProblem, with the numbers, if it cannot be.

    A rank connects to every other for checkpoints, and rank 0 twice more: for the store and for the watch.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DESCRIPTORS_EACH * world + DESCRIPTORS_BESIDE
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise EnvironmentProblem(
            f"{world} ranks need {needed:,} open files each, but the hard limit here is {hard:,} (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed if hard == resource.RLIM_INFINITY else hard, hard))


def use_interfaces(environment: MutableMapping[str, str], backend: str) -> None:
    """Have Gloo, which checkpoints use besides NCCL, use NCCL's network interface, if one is named.

    NCCL_SOCKET_IFNAME lists prefixes, after = whole names, after ^ those to avoid; Gloo's lists whole names.
    EnvironmentProblem if this host has none of the interfaces that a variable names.
    """
    here = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        told, of_gloo = environment.get(variable, ""), variable.startswith("GLOO")
        if not told or told.startswith("^"):
            continue
        wanted, whole = told.removeprefix("=").split(","), of_gloo or told.startswith("=")
        found = [name for one in wanted for name in here if name == one or (not whole and one and name.startswith(one))]
        if found:
            environment.setdefault("GLOO_SOCKET_IFNAME", found[0])
        elif of_gloo or backend == "nccl":
            raise EnvironmentProblem(
                f"{variable} is {told!r}, but this host has no such network interface, only {', '.join(here)}"
            )


@dataclass
class Rank:
    """One rank's run, from joining the world to its exit code."""

    launch: Launch
    options: RunOptions
    place: RankEnvironment
    directory: Path | None = None
    watch: Watch | None = None
    recorder: FlightRecorder | None = None
    base: str = "seed"

    def run(self) -> int:
        """Train; the exit code. Every error is reported and mapped to an exit code."""
        try:
            return self._finish(self._train(), "")
        except KeyboardInterrupt:
            return self._finish(INTERRUPTED, "interrupted")
        except AxonnTuneError as error:
            return self._finish(error.exit_code, str(error))
        except Exception as error:
            return self._broken(error)

    def _train(self) -> int:
        launch, place = self.launch, self.place
        require_runnable(launch)
        self._require_host()
        if launch.deterministic:
            # cuBLAS reads it when it starts.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        device = device_of(launch.backend, rank=place.rank, local_rank=place.local_rank, kind=launch.device)
        if device.type == "cuda" or place.local_rank == 0:
            # On a GPU each rank looks at its own, on CPUs one looks for all of a host.
            needed_bytes = max(launch.predicted.memory_bytes or 0, least_bytes(launch))
            require_free_memory(device, each_bytes=needed_bytes, ranks=self._host_ranks)
        mesh = self._join(device)
        assert self.directory is not None, "joining sets it"
        options, base_bytes = self.options, resident_bytes(device)
        steps = options.steps or launch.steps
        trainer = Trainer(launch, mesh, device=device, source=batches(launch, mesh))
        if launch.checkpoint.base is not None:
            self.base = load_frozen(launch.checkpoint.base, trainer.model.store)
        checkpointer = self._resume(trainer)
        traced = options.trace_steps if options.trace_all or not place.rank else 0
        metrics = Metrics(launch, mesh, device, self.directory, steps, base_bytes, traced)
        if self.watch is not None:
            # In collectives of the first pipeline stage, so that stages compare.
            first, mine = (sum(program_of(launch, stage=one).collectives().values()) for one in (0, mesh.stage))
            self.watch.issued = lambda: trainer.ledger.issued * first // max(mine, 1)
        loop = TrainingLoop(trainer, metrics, self.watch, checkpointer, lambda: self._be_strict(mesh))
        # Every rank times the traced steps, so that a traced one is no slower than the others.
        trainer.model.communicator.timer.start(device, traced_steps=options.trace_steps)
        before = trainer.optimizer.steps_done
        completed = loop.run(steps)
        self._require_program(trainer, steps=trainer.optimizer.steps_done - before)
        metrics.close()
        if completed:
            return 0
        if checkpointer is None:
            raise TrainingFailedError(
                f"stopped by a signal after step {trainer.optimizer.steps_done}; "
                "nothing is saved, because the launch config has no checkpoint.directory"
            )
        return SAVED_ON_A_SIGNAL

    @property
    def _host_ranks(self) -> int:
        return self.place.local_world or min(self.launch.ranks_per_node, self.place.world)

    def _require_host(self) -> None:
        """Checks of the host before ranks join; one rank reports errors."""
        launch, place = self.launch, self.place
        try:
            require_world(launch.grid.grid(), place.world)
            require_size(launch)
            require_gpus(launch.backend, ranks=self._host_ranks)
            if place.world > 1:
                require_descriptors(place.world)
                use_interfaces(os.environ, launch.backend)
        except AxonnTuneError as error:
            if place.local_rank:
                time.sleep(_REPORTED_WITHIN_S)
                raise type(error)() from error
            raise

    def _join(self, device: torch.device) -> Mesh:
        """Create process groups, the run directory that rank 0 chooses, and the watch."""
        place = self.place
        if place.world == 1:
            self.directory = self._make_directory()
            return build_mesh(self.launch.grid.grid())
        if self.launch.backend == "nccl":
            self.recorder = FlightRecorder(os.environ, place.rank)
        timeout = timedelta(seconds=max(START_TIMEOUT_S, self.launch.hang_timeout_s))
        dist.init_process_group(
            self.launch.backend,
            init_method=place.init_method,
            rank=place.rank,
            world_size=place.world,
            timeout=timeout,
        )
        use_device(device)
        watch = self.watch = Watch(place.rank, place.world, self._end_for_another)
        # One message from rank 0 before training; it is not part of a step, so not in the ledger.
        self.directory, port, token = WorldGroup(dist.group.WORLD).from_rank_0(
            lambda: (self._make_directory(), watch.listen(), secrets.token_hex(16))
        )
        if place.rank == 0:
            watch.accept(token)
        else:
            watch.join((place.address, port), token)
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.recorder is not None:
            self.recorder.into(self.directory)
        connected = device if self.launch.backend == "nccl" else None
        return build_mesh(self.launch.grid.grid(), chunks=self.launch.chunks, timeout=timeout, device=connected)

    def _make_directory(self) -> Path:
        """The run's folder, as asked or `runs/<time>-<name>`, with the launch config, without an earlier run's results.

        UsageError if it holds another launch config that no run has written there.
        """
        folder = self.options.directory or run_directory(self.launch)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_outcome(folder)
        except OSError as error:
            raise EnvironmentProblem(f"cannot write the run's folder {str(folder)!r}: {error.strerror}") from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise EnvironmentProblem(f"cannot write the run's folder {str(folder)!r}")
        path = folder / LAUNCH_NAME
        if not path.is_file() or path.read_bytes().startswith(f"# {LAUNCH_HEADER}".encode()):
            write_text_atomically(path, to_yaml(self.launch, header=[LAUNCH_HEADER]))
        elif load_document(path, schema=Launch) != self.launch:
            raise UsageError(f"{str(path)!r} is another launch config: name another folder with --directory")
        return folder

    def _resume(self, trainer: Trainer) -> Checkpointer | None:
        """A checkpointer with the newest checkpoint loaded, or the one named; None where the config saves nothing."""
        settings = self.launch.checkpoint
        if settings.directory is None:
            if self.options.resume or self.options.resume_from:
                raise UsageError("--resume: the launch config has no checkpoint.directory to resume from")
            return None
        checkpointer = Checkpointer(
            settings.directory,
            keep=settings.keep,
            mesh=trainer.mesh,
            optimizer=trainer.optimizer,
            run={
                "global_batch": self.launch.workload.global_batch,
                "sequence_length": self.launch.workload.sequence_length,
                "seed": self.launch.seed,
                "data_seed": self.launch.data.seed,
                "optimizer": self.launch.optimizer.name,
                **_routing(self.launch.model),
                **self._adapting(),
            },
        )
        found = checkpointer.load(self.options.resume_from)
        if found is None and self.options.resume:
            raise UsageError(f"--resume: there is no checkpoint in {settings.directory!r}")
        if found is not None and self.place.rank == 0:
            print_message(f"after step {found}, from {settings.directory}", label="Resuming")
        return checkpointer

    def _adapting(self) -> dict[str, str]:
        """What adapters stand beside, and their scale, which no tensor tells; nothing where all weights train."""
        scale = f"{self.launch.adapter_scale:g}"
        return {"base": self.base, "adapter_scale": scale} if self.launch.model.tuning is not None else {}

    def _require_program(self, trainer: Trainer, *, steps: int) -> None:
        """Report collectives that differ from the program: an internal error in one of the two."""
        program = program_of(self.launch, stage=trainer.mesh.stage)
        different = compare(trainer.ledger, program, steps=steps) if steps else []
        if program.natural and steps and self.directory is not None:
            sent = {"rank": self.place.rank, "routed": routed(trainer.ledger, program, steps=steps)}
            write_text_atomically(self.directory / routed_name(self.place.rank), json.dumps(sent) + "\n")
        if different and self.directory is not None:
            text = json.dumps({"rank": self.place.rank, "differs": different}, ensure_ascii=False)
            write_text_atomically(self.directory / differences_name(self.place.rank), text + "\n")
        if different and self.place.rank == 0:
            print("The collectives issued differ from the program:", *different, sep="\n  ", file=sys.stderr)

    def _be_strict(self, mesh: Mesh) -> None:
        """From the second step on, a collective that takes longer than the launch config allows ends the run.

        Under NCCL that would abort waiting ranks before the late rank is known; there the watch does this.
        """
        if self.launch.backend == "nccl":
            return
        limit = timedelta(seconds=self.launch.hang_timeout_s)
        for group in mesh.process_groups():
            if hasattr(group, "set_timeout"):
                group.set_timeout(limit)
            else:  # Older versions have no public way.
                dist.distributed_c10d._set_pg_timeout(limit, group)

    def _broken(self, error: Exception) -> int:
        """An unexpected error, or a connection that another rank's end has broken."""
        reason = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        if is_timeout(error) and self.watch is not None:
            self.watch.fail(
                f"a collective took longer than {self.launch.hang_timeout_s:g} s", code=LOST_CODE, timed_out=True
            )
            time.sleep(_ROOT_CAUSE_S)
        elif is_broken_connection(error):
            # The watch is about to report the lost rank, which ends this process.
            time.sleep(_ROOT_CAUSE_S)
        elif isinstance(error, OSError) and error.strerror:
            # A full or lost disk; the position in the program does not matter.
            reason = f"cannot write or read{f' {error.filename!r}' if error.filename else ''}: {error.strerror}"
        else:
            print(f"rank {self.place.rank}:\n{''.join(traceback.format_exception(error))}", file=sys.stderr)
        code = EnvironmentProblem.exit_code if isinstance(error, OSError) else TrainingFailedError.exit_code
        return self._finish(code, reason)

    def _finish(self, code: int, reason: str) -> int:
        """Tell the other ranks and, on rank 0, the user; the exit code."""
        if self.watch is not None:
            if code in (0, SAVED_ON_A_SIGNAL):
                self.watch.finish()
            else:
                self.watch.fail(f"rank {self.place.rank}: {reason}", code=code)
        if self.recorder is not None:
            self.recorder.close()
        if reason and (self.place.rank == 0 or self.watch is None):
            print_message(reason)
        if code == SAVED_ON_A_SIGNAL and self.place.rank == 0:
            print_message("by a signal; the state is saved, and the next run resumes from it", label="Stopped")
        return code

    def _end_for_another(self, failure: RankFailure) -> None:
        """Another rank has failed: exit now, even if the main thread waits."""
        reason = failure.reason if failure.reason.startswith("rank ") else f"rank {failure.rank}: {failure.reason}"
        if not failure.told:
            print_message(reason)
        if self.recorder is not None:
            if failure.code == LOST_CODE:
                self.recorder.write()
            self.recorder.close()
        end_process(failure.code)


def run_rank(launch_path: str, options: RunOptions, *, export: bool = False) -> int:
    """Run the rank that the environment names; its exit code. export: set the launch config's variables first."""
    place = None
    try:
        place = rank_environment(os.environ)
        launch = load_document(launch_path, schema=Launch)
    except AxonnTuneError as error:
        # All ranks find the same in a file, but not in their variables.
        if place is None or place.rank == 0:
            print_message(str(error))
        else:
            time.sleep(_REPORTED_WITHIN_S)
        return error.exit_code
    for variable in launch.environment if export else ():
        os.environ.setdefault(variable.name, variable.value)
    return Rank(launch, options, place).run()


def run_all_ranks(launch_path: str, options: RunOptions) -> int:
    """Run all ranks of a launch config on this host; one exit code for all."""
    try:
        world = load_document(launch_path, schema=Launch).grid.world
    except AxonnTuneError as error:
        print_message(str(error))
        return error.exit_code
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    here = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "localhost", "MASTER_PORT": port}

    def run(rank: int) -> int:
        for name, value in ({"RANK": rank, "LOCAL_RANK": rank} | here).items():
            os.environ[name] = str(value)
        return run_rank(launch_path, options)

    try:
        return exit_code_of(fork_ranks(world, run, passed_on=STOP_SIGNALS))
    except KeyboardInterrupt:
        return INTERRUPTED


def train(launch_path: str, options: Mapping[str, Any], log: str | None = None) -> NoReturn:
    """Be the rank that the environment names, in a fork, and end with its exit code.

    options: those of `RunOptions`, by name. log: a file that standard error is appended to.
    """
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    torch.set_num_threads(1)
    sys.exit(run_rank(launch_path, RunOptions(**options), export=True))


def print_message(reason: str, *, label: str = "Error") -> None:
    """One line on standard error, in one write, so that lines of several ranks do not mix."""
    sys.stderr.write(f"{label}: {reason}\n")
    sys.stderr.flush()


def _routing(model: Model) -> dict[str, str]:
    """How tokens choose experts, which no tensor's size tells; nothing of a dense model."""
    experts = [one.experts for one in model.types if one.experts is not None]
    names = ("per_token", "score", "normalized", "scaling", "groups", "chosen_groups") if experts else ()
    return {f"experts.{name}": ", ".join(str(getattr(one, name)) for one in experts) for name in names}
