"""One rank of a calibration: goes through the plan again and again while time is left.

Rank 0 decides what comes next and writes each point as it comes; all ranks do it at the same time. Calls
that ranks do alone are counted for a fixed time, so that all are busy to its end; calls they do together
are counted, and the slowest rank's time is taken.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_tune import __version__
from axonn_tune.runtime.probe_work import Bench, Work, work_of
from axonn_tune.runtime.together import Ranks
from axonn_tune.specs.points import (
    CollectiveProbe,
    Plan,
    Point,
    PointLog,
    Probe,
    RankPlace,
    Setting,
    TransferProbe,
    collective_or_message,
)

MOST_ROUNDS = 15
"""Times the whole plan is gone through at most: the median of more is no better."""

Progress = Callable[[int, float, str], None]
"""Told after each sample: points so far, seconds so far, what comes next in words."""

_LONGEST_SHARE = 0.0025
"""A call expected to take more than this share of the budget is left out: many short ones teach more."""
_WINDOWS_PER_BUDGET = 4.0
"""Samples are as long as lets the plan be gone through about this often in the budget."""
_WINDOW_RANGE_S = (0.01, 0.25)
_MOST_CALLS = 300


@dataclass(frozen=True)
class Task:
    """What comes next: a probe by its number; calls: how often, for what ranks do together."""

    number: int
    calls: int
    window_s: float


@dataclass
class Agenda:
    """What rank 0 knows: the samples of each probe, and the time left."""

    plan: Plan
    samples: dict[int, list[float]] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)
    _position: int = 0
    _round: int = 0

    @property
    def elapsed_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self.began_s

    @property
    def window_s(self) -> float:
        """How long a sample should be."""
        shortest, longest = _WINDOW_RANGE_S
        return min(longest, max(shortest, self.plan.budget_s / _WINDOWS_PER_BUDGET / len(self.plan.probes)))

    def next(self) -> Task | None:
        """The next sample to take; None when time is up or there is enough of all."""
        while self._round < MOST_ROUNDS and (self.elapsed_s < self.plan.budget_s or self._owes()):
            if self._position == len(self.plan.probes):
                self._position, self._round = 0, self._round + 1
                continue
            number, self._position = self._position, self._position + 1
            if len(self.samples.get(number, ())) > self._round:
                continue
            expected_s = self._expected_s(number)
            if expected_s is not None and expected_s > self.plan.budget_s * _LONGEST_SHARE and self._may_go(number):
                continue
            calls = 3 if expected_s is None else min(_MOST_CALLS, max(1, round(self.window_s / expected_s)))
            return Task(number, calls, self.window_s)
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
        if not isinstance(probe, CollectiveProbe | TransferProbe):
            return None
        found = [
            (other.size_bytes, self.samples[index][-1])
            for index, other in enumerate(self.plan.probes)
            if index in self.samples
            and isinstance(other, CollectiveProbe | TransferProbe)
            and other.model_copy(update={"size_bytes": probe.size_bytes}) == probe
            and other.size_bytes < probe.size_bytes
        ]
        largest = max(found, default=None)
        return None if largest is None else largest[1] * probe.size_bytes / largest[0]

    def _owes(self) -> bool:
        """Whether something essential is still to come in the first round."""
        return self._round == 0 and self._position < self.plan.essential

    def _may_go(self, number: int) -> bool:
        """Whether a probe may be left out for taking long."""
        return collective_or_message(self.plan.probes[number]) and number >= self.plan.essential


@dataclass
class Prober:
    """Takes the samples on one rank."""

    bench: Bench
    ranks: Ranks
    device: torch.device

    def sample(self, probe: Probe, task: Task) -> tuple[float, int]:
        """Seconds of one call and calls counted, the same on all ranks."""
        work = work_of(probe, self.bench)
        self._barrier()
        work()
        self._synchronize()
        self._barrier()
        if collective_or_message(probe):
            seconds, calls = self._counted(work, task.calls)
            return self._over_ranks([seconds], dist.ReduceOp.MAX)[0], calls
        seconds, calls = self._timed(work, task.window_s)
        rate = self._over_ranks([1.0 / seconds], dist.ReduceOp.SUM)[0]
        return self._world() / rate, calls

    def _counted(self, work: Work, calls: int) -> tuple[float, int]:
        began_s = time.perf_counter()
        for _ in range(calls):
            work()
        self._synchronize()
        return (time.perf_counter() - began_s) / calls, calls

    def _timed(self, work: Work, window_s: float) -> tuple[float, int]:
        """At least two calls, and until the window is over."""
        began_s, calls, elapsed_s = time.perf_counter(), 0, 0.0
        while calls < 2 or elapsed_s < window_s:
            work()
            self._synchronize()
            calls += 1
            elapsed_s = time.perf_counter() - began_s
        return elapsed_s / calls, calls

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _world(self) -> int:
        return 1 if self.ranks.group is None else dist.get_world_size()

    def _barrier(self) -> None:
        self._over_ranks([0.0], dist.ReduceOp.SUM)

    def _over_ranks(self, numbers: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.ranks.group is None:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(tensor, op=operation, group=self.ranks.group)
        return [float(number) for number in tensor]


def probe_world(
    plan: Plan | None, log: PointLog | None, *, device: torch.device, resume: bool, progress: Progress
) -> None:
    """Measure on every rank of the world; rank 0 has the plan, and the log that points go to.

    UsageError, on all ranks, if the log is there already and not to be resumed, or was measured elsewhere.
    """
    ranks = Ranks.of_the_world()
    plan = ranks.from_first(lambda: plan)
    assert plan is not None, "rank 0 has one"
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    setting = _setting(plan, device, ranks)
    prober = Prober(Bench(plan, rank=rank, world=world, device=device), ranks, device)
    agenda = Agenda(plan)
    ranks.from_first(lambda: None if log is None else agenda.load(log.open(setting, resume=resume)))
    while (task := ranks.from_first(agenda.next)) is not None:
        probe = plan.probes[task.number]
        seconds, calls = prober.sample(probe, task)
        if log is not None:
            agenda.record(task.number, seconds)
            log.add(Point(probe=probe, seconds=seconds, calls=calls))
            progress(sum(map(len, agenda.samples.values())), agenda.elapsed_s, probe.what)
    if log is not None:
        log.close()


def _setting(plan: Plan, device: torch.device, ranks: Ranks) -> Setting:
    """Where and with what is measured; the places of all ranks."""
    own = RankPlace(
        host=socket.gethostname(),
        network=str(Path("/proc/self/ns/net").readlink()),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        threads=torch.get_num_threads(),
        node_ranks=int(os.environ["LOCAL_WORLD_SIZE"]) if os.environ.get("LOCAL_WORLD_SIZE") else None,
    )
    places: list[RankPlace | None] = [own]
    if ranks.group is not None:
        places = [None] * dist.get_world_size()
        dist.all_gather_object(places, own, group=ranks.group)
    return Setting(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        torch_version=str(torch.__version__),
        library=_library(plan.backend),
        backend=plan.backend,
        precision=plan.precision,
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(device),
        ranks=tuple(place for place in places if place is not None),
        launches=plan.launches,
    )


def _library(backend: str) -> str:
    """The collective library and its version; Gloo has none of its own."""
    if backend == "nccl":
        return "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return f"Gloo of torch {torch.__version__}"


def _processor() -> str:
    """The CPU's name as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
