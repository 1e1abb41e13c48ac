"""When each collective of a step was issued, done and waited for: time per term without a profiler, and a timeline.

Three times describe a call: *issued*, when the rank issued it and its input was ready; *done*, when its result was
there; and from *halted* to *resumed*, when computation waited for it. A call is charged from its issue, or from when
the one before it in the same process group was done, because collectives of a group run one after the other.

On CPUs the end comes from the work's future, which the thread that did the work completes, so it is correct before
anyone waits. On GPUs all marks are events: a separate stream for each group waits for the collective and records its
end, which blocks neither the host nor the computation.

A trace, for Perfetto, is made of the same marks, so it costs no more. On a GPU torch's profiler records the kernels
of the same steps into a separate file.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from axonn_tune import __version__
from axonn_tune.files import write_text_atomically
from axonn_tune.runtime.ledger import LedgerEntry
from axonn_tune.runtime.mesh import Edge
from axonn_tune.specs.traces import (
    COMPUTE_LANE,
    TRACE_SCHEMA,
    Process,
    Span,
    communication_lane,
    step_name,
    term_name,
    trace_text,
    wait_name,
)

Mark: TypeAlias = Any
"""A point in time as a clock has it: seconds, or a CUDA event."""

EVERY_STEPS = {"cpu": 1, "cuda": 10}
"""Which steps are timed: on a GPU each call takes four events, some microseconds of the host's time."""


class HostClock:
    """The host's clock: makes marks and measures the time between two of them.

    shared: all processes of a host read the same.
    """

    shared = True

    def mark(self) -> Mark:
        """The present time of the computation."""
        return time.perf_counter()

    def mark_end(self, work: dist.Work, group: dist.ProcessGroup, note: Callable[[Mark], None]) -> None:
        """Note a mark when the work of a group is done, in the thread that does it, before it wakes a waiting one."""
        work.get_future().add_done_callback(lambda future: note(time.perf_counter()))

    def between_s(self, start: Mark, end: Mark) -> float:
        """Seconds from one mark to another."""
        return float(end - start)


class DeviceClock(HostClock):
    """Events of a GPU, which must have completed before the time between them is asked for."""

    shared = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._observers: dict[int, torch.cuda.Stream] = {}

    def mark(self) -> Mark:
        """When the current stream reaches this point."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def mark_end(self, work: dist.Work, group: dist.ProcessGroup, note: Callable[[Mark], None]) -> None:
        """Recorded by a stream that only waits for the group's work."""
        key = id(group)
        if key not in self._observers:
            self._observers[key] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._observers[key]):
            work.wait()
            note(self.mark())

    def between_s(self, start: Mark, end: Mark) -> float:
        """Seconds from one event to another."""
        return float(start.elapsed_time(end)) / 1e3


@dataclass(slots=True)
class Call:
    """One collective in flight, with its marks."""

    entry: LedgerEntry
    group: dist.ProcessGroup
    clock: HostClock
    issued: Mark
    edge: Edge | None = None
    done: Mark = None
    halted: Mark = None
    resumed: Mark = None

    def sent(self, work: dist.Work) -> None:
        """It has been issued."""
        self.clock.mark_end(work, self.group, partial(setattr, self, "done"))

    def halt(self) -> None:
        """The computation begins to wait for it."""
        self.halted = self.clock.mark()

    def resume(self) -> None:
        """The computation continues."""
        self.resumed = self.clock.mark()


@dataclass(frozen=True)
class TimedCall:
    """A collective in seconds from the start of its step; `began_s`: issued, and its group free."""

    entry: LedgerEntry
    began_s: float
    done_s: float
    halted_s: float
    resumed_s: float
    edge: Edge | None = None

    @property
    def seconds(self) -> float:
        """Time it took: until it was done, plus handing over the result in `wait`."""
        return max(self.done_s - self.began_s, 0.0) + max(self.resumed_s - max(self.done_s, self.halted_s), 0.0)

    @property
    def exposed_s(self) -> float:
        """Exposed time: the computation waited for it."""
        return self.resumed_s - self.halted_s


@dataclass(frozen=True)
class ComputeSpan:
    """A part of the computation, such as the forward pass of one block, in seconds from the start of the step."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True)
class StepTimes:
    """Every collective of one step of one rank, in the order of issue, which is the same on all ranks.

    unix_s: when the step began; parts: of the computation, in a traced step; host_s: its begin by the
    clock that all processes of a host share, None on a GPU.
    """

    calls: tuple[TimedCall, ...]
    unix_s: float = 0.0
    parts: tuple[ComputeSpan, ...] = ()
    host_s: float | None = None

    @property
    def traced(self) -> bool:
        """Whether this step is part of a trace."""
        return bool(self.parts)

    @property
    def exposed_s(self) -> float:
        """Exposed communication time of the step."""
        return sum(call.exposed_s for call in self.calls)

    def terms(self) -> list[dict[str, Any]]:
        """Calls grouped by name and size, in order of their first, named as in the program.

        `seconds` includes waiting for late ranks.
        """
        found: dict[LedgerEntry, list[TimedCall]] = defaultdict(list)
        for call in self.calls:
            found[call.entry].append(call)
        return [
            {
                "op": entry.op,
                "axis": entry.axis,
                "phase": entry.phase,
                "layer": entry.layer,
                "count": len(calls),
                "bytes": entry.size_bytes,
                "seconds": sum(one.seconds for one in calls),
                "exposed_s": sum(one.exposed_s for one in calls),
            }
            for entry, calls in found.items()
        ]


@dataclass
class Timer:
    """Times the collectives of every `every_steps`th step, and of the first `traced_steps` with their parts.

    Without a clock, none.
    """

    clock: HostClock | None = None
    every_steps: int = 1
    traced_steps: int = 0
    _on: bool = False
    _traced: bool = False
    _start: Mark = None
    _unix_s: float = 0.0
    _calls: list[Call] = field(default_factory=list)
    _parts: list[tuple[str, Mark]] = field(default_factory=list)

    def start(self, device: torch.device, *, traced_steps: int = 0) -> None:
        """Begin to time."""
        self.clock = DeviceClock(device) if device.type == "cuda" else HostClock()
        self.every_steps, self.traced_steps = EVERY_STEPS[device.type], traced_steps

    def begin_step(self, number: int) -> None:
        """A step begins; its number decides whether it is timed, so all ranks time the same ones."""
        self._traced = self.clock is not None and 0 <= number < self.traced_steps
        # The step that follows a trace waits for the profiler to end.
        since = number - self.traced_steps - 1 if self.traced_steps else number
        self._on = self._traced or (self.clock is not None and since % self.every_steps == 0)
        if self.clock is not None and self._on:
            self._start, self._unix_s = self.clock.mark(), time.time()

    def end_step(self) -> StepTimes | None:
        """The times of a step, once the device has finished it; None if it was not timed."""
        calls, self._calls = self._calls, []
        parts, self._parts = self._parts, []
        if self.clock is None or not self._on:
            return None
        self._on = self._traced = False
        timed = tuple(self._timed(self.clock, calls))
        host_s = self._start if self.clock.shared else None
        return StepTimes(timed, self._unix_s, tuple(self._named(self.clock, parts)), host_s)

    def part(self, name: str) -> None:
        """A part of the computation begins and the previous one ends; an empty name begins none."""
        if self.clock is not None and self._traced:
            self._parts.append((name, self.clock.mark()))

    def issue(self, entry: LedgerEntry, group: dist.ProcessGroup, *, edge: Edge | None = None) -> Call | None:
        """A collective, or a message on an edge, is about to be issued; None if it is not timed."""
        if self.clock is None or not self._on:
            return None
        call = Call(entry, group, self.clock, self.clock.mark(), edge)
        self._calls.append(call)
        return call

    def _named(self, clock: HostClock, parts: list[tuple[str, Mark]]) -> Iterator[ComputeSpan]:
        for (name, start), (_, end) in pairwise(parts):
            if name:
                yield ComputeSpan(name, clock.between_s(self._start, start), clock.between_s(self._start, end))

    def _timed(self, clock: HostClock, calls: list[Call]) -> Iterator[TimedCall]:
        free_s: dict[int, float] = {}
        for call in calls:
            assert call.resumed is not None, f"{call.entry} was never waited for"
            issued_s, done_s, halted_s, resumed_s = (
                clock.between_s(self._start, mark) for mark in (call.issued, call.done, call.halted, call.resumed)
            )
            began_s = max(issued_s, free_s.get(id(call.group), issued_s))
            free_s[id(call.group)] = max(began_s, done_s)
            yield TimedCall(call.entry, began_s, done_s, halted_s, resumed_s, call.edge)


@dataclass
class Tracer:
    """Keeps the times of the first `steps` steps after the warm-up, and writes them at the end of the run."""

    steps: int
    directory: Path
    rank: int
    run: str
    device: torch.device
    _kept: list[tuple[int, StepTimes]] = field(default_factory=list)
    _profile: torch.profiler.profile | None = None

    def before_step(self, number: int) -> None:
        """A step is about to begin, counted from 0 after the warm-up."""
        if number == 0 and self.device.type == "cuda":
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.start()

    def after_step(self, number: int, step: int, times: StepTimes | None) -> None:
        """A step has ended, which was step `step` of the run, from 1."""
        if times is not None and 0 <= number < self.steps:
            self._kept.append((step, times))
        if self._profile is not None and number == self.steps - 1:
            self._profile.stop()

    def close(self) -> None:
        """Write `trace-rank<N>.json`, and `kernels-rank<N>.json` on a GPU."""
        if not self._kept:
            return
        spans = [span for step, times in self._kept for span in step_spans(step, times)]
        text = trace_text([Process(f"measured rank {self.rank}", self.rank, spans)], notes=self._notes())
        write_text_atomically(self.directory / f"trace-rank{self.rank}.json", text)
        if self._profile is not None:
            if len(self._kept) < self.steps:
                self._profile.stop()
            self._profile.export_chrome_trace(str(self.directory / f"kernels-rank{self.rank}.json"))

    def _notes(self) -> dict[str, object]:
        return {
            "schema": TRACE_SCHEMA,
            "tool_version": __version__,
            "run": self.run,
            "host": socket.gethostname(),
            "rank": self.rank,
            "steps": [step for step, _ in self._kept],
        }


def step_spans(step: int, times: StepTimes) -> Iterator[Span]:
    """One step: its parts and waits on the compute track, each collective on its axis' track."""
    end_s = max([part.end_s for part in times.parts] + [call.resumed_s for call in times.calls], default=0.0)
    at_s = times.unix_s
    yield Span(COMPUTE_LANE, step_name(step), at_s, at_s + end_s)
    for part in times.parts:
        yield Span(COMPUTE_LANE, part.name, at_s + part.start_s, at_s + part.end_s)
    for call in times.calls:
        name, details = term_name(*call.entry.term), {"bytes": call.entry.size_bytes}
        yield Span(COMPUTE_LANE, wait_name(name), at_s + call.halted_s, at_s + call.resumed_s)
        yield Span(communication_lane(call.entry.axis), name, at_s + call.began_s, at_s + call.done_s, details)
