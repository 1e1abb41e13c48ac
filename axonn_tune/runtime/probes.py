"""One rank of a calibration, and starting one: `python -m axonn_tune.runtime.probes --ranks N PLAN POINTS`.

Rank 0 chooses the next probe and writes each point; all ranks measure at the same time, as they compute and communicate
at the same time in training. The plan repeats while time is left. Local calls run for a fixed time, so that all ranks
are busy to its end; for collective calls the slowest rank's time counts. On GPUs batches of calls are timed by events,
behind work that keeps the GPU busy until the host has issued them: neither the host's clock nor its rate of issue
counts. Collectives go through the runtime's own `Communicator`, attention and steps through its own code, so the
measured code is that of training.

Under torchrun, srun, or whatever else sets RANK and WORLD_SIZE, this process is one rank, and only rank 0 needs the
plan. Otherwise it imports torch once and forks the ranks, in a tenth of the time that starting each would take.
Progress goes to a separate descriptor, one JSON document per line, because libraries print to standard output.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_tune.errors import AxonnTuneError, EnvironmentProblem, TrainingFailedError
from axonn_tune.grid import Grid
from axonn_tune.processes import die_with, end_process, exit_code_of, fork_ranks, processor_name
from axonn_tune.program.operations import GROUP_AXES
from axonn_tune.runtime.clocks import DeviceClock, HostClock
from axonn_tune.runtime.communicator import CollectiveHandle, Communicator
from axonn_tune.runtime.devices import DTYPES, device_of, settings_of, synchronize
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import Mesh, WorldGroup, is_broken_connection, is_timeout
from axonn_tune.runtime.modules import attention_on, rotary_positions
from axonn_tune.runtime.start import INTERRUPTED, RankEnvironment, print_message, rank_environment
from axonn_tune.runtime.tokens import batches
from axonn_tune.runtime.trainer import Trainer
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.points import (
    AttentionProbe,
    CollectiveProbe,
    CopyProbe,
    MatmulProbe,
    Plan,
    Point,
    PointLog,
    Probe,
    RankPlace,
    Setting,
    StepProbe,
)
from axonn_tune.vocabulary import VERSION

ProbeWork = Callable[[], object]

_AXIS = "y"
"""Probes of a group shape use a grid whose y is the group, and whose x is everything inside it."""


class Bench:
    """Makes the work of probes, with the process groups and the tensors it needs."""

    def __init__(self, plan: Plan, *, rank: int, world: int, device: torch.device) -> None:
        self._plan, self._rank, self._world, self._device = plan, rank, world, device
        self._dtype = DTYPES[plan.precision][0]
        self._communicators: dict[tuple[int, int], Communicator] = {}
        self._trainer: Trainer | None = None

    def work(self, probe: Probe) -> ProbeWork:
        """The work of a probe on this rank, which the method of its kind makes."""
        match probe:
            case CollectiveProbe():
                return self.collective(probe)
            case MatmulProbe():
                return self.matmul(probe)
            case CopyProbe():
                return self.copy(probe)
            case AttentionProbe():
                return self.attention(probe)
            case StepProbe():
                return self.step(probe)

    def collective(self, probe: CollectiveProbe) -> ProbeWork:
        """One call over all groups of the shape at once; all ranks must call this together."""
        communicator = self._communicator(probe.group, probe.stride)
        elements = max(probe.group, probe.size_bytes // self._dtype.itemsize)
        full = torch.zeros(elements // probe.group * probe.group, dtype=self._dtype, device=self._device)
        shard = full[: len(full) // probe.group]

        def run() -> CollectiveHandle:
            if probe.op == "all_gather":
                return communicator.all_gather(shard, _AXIS, "forward", "probe")
            if probe.op == "reduce_scatter":
                return communicator.reduce_scatter(full, _AXIS, "forward", "probe")
            if probe.op == "all_to_all":
                each = [len(shard)] * probe.group
                return communicator.exchange(full, (each, each), "all_to_all", "forward", "probe")
            return communicator.all_reduce(full, _AXIS, "forward", "probe")

        return lambda: run().wait()

    def matmul(self, probe: MatmulProbe) -> ProbeWork:
        """The GEMM as the runtime writes it: `x @ w`, `g @ w.t()`, `x.t() @ g`."""
        m, n, k = probe.m, probe.n, probe.k
        left = self._normal(*((k, m) if probe.layout == "TN" else (m, k)))
        right = self._normal(*((n, k) if probe.layout == "NT" else (k, n)))
        if probe.layout == "TN":
            return lambda: left.t() @ right
        if probe.layout == "NT":
            return lambda: left @ right.t()
        return lambda: left @ right

    def copy(self, probe: CopyProbe) -> ProbeWork:
        """A copy of one tensor into another."""
        source = self._normal(max(1, probe.size_bytes // self._dtype.itemsize))
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def attention(self, probe: AttentionProbe) -> ProbeWork:
        """The attention core that trains the plan's first model, with all its heads."""
        launch = self._plan.launches[0]
        model, sequence = launch.model, launch.workload.sequence_length
        settings = settings_of(launch, self._device)
        turns = rotary_positions(model, settings, torch.arange(sequence, device=self._device), model.head_dim)
        attention = attention_on(model, settings, sequence=sequence, shares=1, turns=turns)
        layer = model.plain
        qkv = self._normal(probe.sequences * sequence, layer.qkv_width)
        if not probe.backward:
            return lambda: attention(qkv)
        gradient = self._normal(probe.sequences * sequence, layer.query_width)
        return lambda: attention(qkv)[1](gradient)

    def step(self, probe: StepProbe) -> ProbeWork:
        """One training step of this rank alone."""
        launch: Launch = self._plan.launches[probe.launch]
        alone = Mesh(Grid(), 0, dict.fromkeys(GROUP_AXES))
        source = batches(launch, alone)
        if self._trainer is None:
            self._trainer = Trainer(launch, alone, device=self._device, source=source)
        trainer = self._trainer

        def run() -> None:
            # Launch configs of one plan differ in the size of the batch alone.
            trainer.source = source
            trainer.step(0)

        return run

    def _communicator(self, group: int, stride: int) -> Communicator:
        """The groups of a shape, made once: all ranks make all of them, in the same order."""
        if (group, stride) not in self._communicators:
            grid = Grid(x=stride, y=group, z=self._world // (group * stride))
            groups: dict[str, dist.ProcessGroup | None] = {_AXIS: dist.group.WORLD if group == self._world else None}
            for members in grid.groups(_AXIS) if group < self._world else ():
                made = dist.new_group(list(members))
                if self._rank in members:
                    groups[_AXIS] = made
            groups["expert"] = groups[_AXIS]
            self._communicators[group, stride] = Communicator(Mesh(grid, self._rank, groups), Ledger())
        return self._communicators[group, stride]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device).to(self._dtype)


MOST_ROUNDS = 15
"""Largest number of repeats of the plan: more do not improve the median."""

ProgressListener = Callable[[int, float, str], None]
"""Called after each sample with points so far, seconds so far, and what comes next in words."""

_LONGEST_SHARE = 0.0025
"""A call expected to take more than this share of the budget is skipped: many short ones are more informative."""
_WINDOWS_PER_BUDGET = 4.0
"""Samples are so long that the plan is gone through about this often within the budget."""
_WINDOW_RANGE_S = (0.01, 0.25)
_MOST_CALLS = 300


@dataclass(frozen=True)
class ProbeTask:
    """The next sample: the number of its probe; calls: how many, where ranks call together."""

    number: int
    calls: int
    window_s: float


@dataclass
class Agenda:
    """Rank 0's record of the samples of each probe, which decides the next one."""

    plan: Plan
    samples: dict[int, list[float]] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    _position: int = 0
    _round: int = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began_s

    @property
    def window_s(self) -> float:
        """How long a sample should be."""
        shortest, longest = _WINDOW_RANGE_S
        return min(longest, max(shortest, self.plan.budget_s / _WINDOWS_PER_BUDGET / len(self.plan.probes)))

    def next(self) -> ProbeTask | None:
        """The next sample to take; None when time is up or all probes have enough."""
        while self._round < MOST_ROUNDS:
            if self.elapsed_s >= self.plan.budget_s and (self._round or self._position >= self.plan.essential):
                return None
            if self._position == len(self.plan.probes):
                self._position, self._round = 0, self._round + 1
                continue
            number, self._position = self._position, self._position + 1
            if len(self.samples.get(number, ())) > self._round:
                continue
            expected_s, probe = self._expected_s(number), self.plan.probes[number]
            takes_long = expected_s is not None and expected_s > self.plan.budget_s * _LONGEST_SHARE
            if takes_long and isinstance(probe, CollectiveProbe) and number >= self.plan.essential:
                continue
            calls = 3 if expected_s is None else min(_MOST_CALLS, max(1, round(self.window_s / expected_s)))
            return ProbeTask(number, calls, self.window_s)
        return None

    def load(self, points: Iterable[Point]) -> None:
        """Remember what an earlier calibration of the same plan has measured."""
        numbers = {probe: number for number, probe in enumerate(self.plan.probes)}
        for point in points:
            if point.probe in numbers:
                self.record(numbers[point.probe], point.seconds)

    def record(self, number: int, seconds: float) -> None:
        """Remember a sample."""
        self.samples.setdefault(number, []).append(seconds)

    def _expected_s(self, number: int) -> float | None:
        """Time of one call, by its last sample, else by that of the same probe with fewer bytes."""
        if number in self.samples:
            return self.samples[number][-1]
        probe = self.plan.probes[number]
        if not isinstance(probe, CollectiveProbe):
            return None
        found = [
            (other.size_bytes, self.samples[index][-1])
            for index, other in enumerate(self.plan.probes)
            if index in self.samples
            and isinstance(other, CollectiveProbe)
            and other.model_copy(update={"size_bytes": probe.size_bytes}) == probe
            and other.size_bytes < probe.size_bytes
        ]
        largest = max(found, default=None)
        return None if largest is None else largest[1] * probe.size_bytes / largest[0]


Ahead = Callable[[float], None]
"""Gives the device work for so many seconds, and returns before it has ended."""
_MARGIN = 1.5
"""By how much that work is longer than issuing a batch has taken."""
_LONGEST_AHEAD_S = 0.1
"""A batch that takes longer to issue waits for the device itself, as steps do."""


class Filler:
    """GEMMs that keep a GPU busy."""

    def __init__(self, device: torch.device) -> None:
        self._factor = torch.zeros(4096, 4096, dtype=torch.bfloat16, device=device)
        clock = DeviceClock(device)
        self._fill(2)
        start = clock.mark()
        self._fill(10)
        end = clock.mark()
        synchronize(device)
        self._each_s = clock.between_s(start, end) / 10

    def __call__(self, seconds: float) -> None:
        """Give it work for so long."""
        self._fill(math.ceil(seconds / self._each_s))

    def _fill(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._factor, self._factor)


@dataclass
class Prober:
    """Takes the samples on one rank. clock, ahead: how batches are timed on a GPU; on a CPU the host's clock is."""

    bench: Bench
    ranks: WorldGroup
    device: torch.device
    clock: HostClock = field(default_factory=HostClock)
    ahead: Ahead | None = None

    @classmethod
    def on(cls, device: torch.device, bench: Bench, ranks: WorldGroup) -> Prober:
        """That of a device: GPUs have events, and something to do meanwhile."""
        if device.type != "cuda":
            return cls(bench, ranks, device)
        return cls(bench, ranks, device, DeviceClock(device), Filler(device))

    def sample(self, probe: Probe, task: ProbeTask) -> tuple[float, int]:
        """Seconds of one call and calls counted, the same on all ranks."""
        work = self.bench.work(probe)
        # A barrier, as is the next.
        self._over_ranks(0.0, dist.ReduceOp.SUM)
        work()
        synchronize(self.device)
        self._over_ranks(0.0, dist.ReduceOp.SUM)
        if isinstance(probe, CollectiveProbe):
            seconds, calls = self._counted(work, task.calls)
            return self._over_ranks(seconds, dist.ReduceOp.MAX), calls
        seconds, calls = self._timed(work, task.window_s)
        world = 1 if self.ranks.group is None else dist.get_world_size()
        return world / self._over_ranks(1.0 / seconds, dist.ReduceOp.SUM), calls

    def _counted(self, work: ProbeWork, calls: int) -> tuple[float, int]:
        if self.ahead is not None:
            return self._batch(work, calls, self.ahead)
        began_s = time.perf_counter()
        for _ in range(calls):
            work()
        return (time.perf_counter() - began_s) / calls, calls

    def _timed(self, work: ProbeWork, window_s: float) -> tuple[float, int]:
        """At least two calls, and until the window is over."""
        if self.ahead is not None:
            seconds, _ = self._batch(work, 2, self.ahead)
            return self._batch(work, min(_MOST_CALLS, max(2, round(window_s / max(seconds, 1e-9)))), self.ahead)
        began_s, calls, elapsed_s = time.perf_counter(), 0, 0.0
        while calls < 2 or elapsed_s < window_s:
            work()
            calls += 1
            elapsed_s = time.perf_counter() - began_s
        return elapsed_s / calls, calls

    def _batch(self, work: ProbeWork, calls: int, ahead: Ahead) -> tuple[float, int]:
        """Calls one after the other on the device; they are issued while it still has other work."""
        began_s = time.perf_counter()
        for _ in range(calls):
            work()
        issuing_s = time.perf_counter() - began_s
        synchronize(self.device)
        ahead(min(_MARGIN * issuing_s, _LONGEST_AHEAD_S))
        start = self.clock.mark()
        for _ in range(calls):
            work()
        end = self.clock.mark()
        synchronize(self.device)
        return self.clock.between_s(start, end) / calls, calls

    def _over_ranks(self, number: float, operation: dist.ReduceOp.RedOpType) -> float:
        if self.ranks.group is None:
            return number
        tensor = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(tensor, op=operation, group=self.ranks.group)
        return float(tensor)


def probe_world(
    plan: Plan | None, log: PointLog | None, *, device: torch.device, resume: bool, progress: ProgressListener
) -> None:
    """Measure on every rank of the world; rank 0 has the plan, and the log that points go to.

    UsageError, on all ranks, if the log exists and is not to be resumed, or was measured elsewhere.
    """
    ranks = WorldGroup.of_the_world()
    plan = ranks.from_rank_0(lambda: plan)
    assert plan is not None, "rank 0 has one"
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    setting = _setting(plan, device, ranks)
    prober = Prober.on(device, Bench(plan, rank=rank, world=world, device=device), ranks)
    agenda = Agenda(plan)
    ranks.from_rank_0(lambda: None if log is None else agenda.load(log.open(setting, resume=resume)))
    while (task := ranks.from_rank_0(agenda.next)) is not None:
        probe = plan.probes[task.number]
        seconds, calls = prober.sample(probe, task)
        if log is not None:
            agenda.record(task.number, seconds)
            log.add(Point(probe=probe, seconds=seconds, calls=calls))
            progress(sum(map(len, agenda.samples.values())), agenda.elapsed_s, probe.what)
    if log is not None:
        log.close()


def _setting(plan: Plan, device: torch.device, ranks: WorldGroup) -> Setting:
    """Hardware and software of the measurement, on all ranks."""
    own = RankPlace(
        host=socket.gethostname(),
        network=str(Path("/proc/self/ns/net").readlink()),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        threads=torch.get_num_threads(),
        node_ranks=int(os.environ["LOCAL_WORLD_SIZE"]) if os.environ.get("LOCAL_WORLD_SIZE") else None,
    )
    library = f"Gloo of torch {torch.__version__}"
    if plan.backend == "nccl":
        library = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if device.type == "cuda":
        memory_bytes = int(torch.cuda.get_device_properties(device).total_memory)
    return Setting(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=VERSION,
        torch_version=str(torch.__version__),
        library=library,
        backend=plan.backend,
        precision=plan.precision,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes,
        ranks=tuple(ranks.on_all(lambda: own)),
        launches=plan.launches,
    )


_TIMEOUT = timedelta(seconds=120)
"""A collective that takes longer means that a rank is lost."""


class Options(argparse.Namespace):
    """Options of every rank; `plan`, `points` and `progress`, a descriptor, are rank 0's alone."""

    plan: Path
    points: Path
    ranks: int | None
    backend: str
    resume: bool
    progress: int | None
    parent: int | None


def main(arguments: list[str] | None = None) -> int:
    """Measure; the exit code of all ranks started, or of this one."""
    parser = argparse.ArgumentParser(prog="python -m axonn_tune.runtime.probes", description=__doc__)
    parser.add_argument("plan", type=Path, help="what to measure, as JSON; read by rank 0")
    parser.add_argument("points", type=Path, help="file that rank 0 writes points to")
    parser.add_argument("--ranks", type=int, metavar="N", help="start this many here; absent: join as the rank it is")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--resume", action="store_true", help="continue a file of points")
    parser.add_argument(
        "--progress", type=int, metavar="FD", help="file descriptor that rank 0 reports its progress to"
    )
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process, which started this one")
    chosen = parser.parse_args(arguments, namespace=Options())
    if chosen.parent is not None:
        die_with(chosen.parent)
    if chosen.ranks is None:
        try:
            return rank_main(rank_environment(os.environ), chosen)
        except AxonnTuneError as error:
            print_message(str(error))
            return error.exit_code
    # The ranks are forks of this process, and communicate over loopback.
    ranks = chosen.ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory(prefix="axonn-tune-") as folder:

        def run(rank: int) -> int:
            return rank_main(RankEnvironment(rank, ranks, rank, init_method=f"file://{folder}/meeting"), chosen)

        try:
            return exit_code_of(fork_ranks(ranks, run))
        except KeyboardInterrupt:
            return INTERRUPTED


def rank_main(place: RankEnvironment, job: Options) -> int:
    """One rank's calibration with these options; the exit code. Plan, points and progress are rank 0's alone."""
    first = place.rank == 0

    def report(points: int, elapsed_s: float, what: str) -> None:
        said = json.dumps({"points": points, "elapsed_s": round(elapsed_s, 2), "what": what})
        if job.progress is not None:
            os.write(job.progress, f"{said}\n".encode())

    try:
        device = device_of(job.backend, rank=place.rank, local_rank=place.local_rank)
        if place.world > 1:
            dist.init_process_group(
                job.backend, init_method=place.init_method, rank=place.rank, world_size=place.world, timeout=_TIMEOUT
            )
        Plan.prepare()
        plan = Plan.model_validate_json(job.plan.read_bytes()) if first else None
        log = PointLog(job.points) if first else None
        probe_world(plan, log, device=device, resume=job.resume, progress=report)
    except KeyboardInterrupt:
        return INTERRUPTED
    except AxonnTuneError as error:
        # Before ranks have joined each other, the first to end takes the others with it.
        if first or not dist.is_initialized():
            print_message(str(error))
        return error.exit_code
    except Exception as error:
        if is_timeout(error) or is_broken_connection(error):
            if first:
                lost = "another rank was lost while measuring; the points so far are saved, pass --resume to continue"
                print_message(lost)
            return TrainingFailedError.exit_code
        print(f"rank {place.rank}:\n{''.join(traceback.format_exception(error))}", file=sys.stderr)
        return EnvironmentProblem.exit_code if isinstance(error, OSError) else TrainingFailedError.exit_code
    return 0


if __name__ == "__main__":
    end_process(main())
