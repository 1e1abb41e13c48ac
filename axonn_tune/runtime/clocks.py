"""When the operations of a step ran on one rank: clocks, marks and what follows of them.

Three times describe a call of a collective: *issued*, when the rank issued it and its input was ready; *done*, when its
result was there; and from *halted* to *resumed*, when computation waited for it. A call is charged from its issue, or
from when the one before it in the same process group was done, because collectives of a group run one after the other.
On CPUs the end comes from the work's future, which the thread that did the work completes, so it is correct before
anyone waits. On GPUs all marks are events: a separate stream for each group waits for the collective and records its
end, which blocks neither the host nor the computation. A trace, for Perfetto, is made of the same marks, so it costs no
more. On a GPU torch's profiler records the kernels of the same steps into a separate file.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from axonn_tune.runtime.ledger import LedgerEntry
from axonn_tune.runtime.mesh import Edge
from axonn_tune.specs.traces import Span, communication_lane, step_name, term_name, wait_name
from axonn_tune.vocabulary import COMPUTE_LANE

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
        """Recorded by a stream that only waits for the group's work.

        Over Gloo the host waits, perhaps for what this rank has yet to send: there the end is that of the wait.
        """
        if dist.get_backend(group) == "gloo":
            return
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
    """One collective in flight, with its marks; the computation waits for it from `halted` to `resumed`.

    counted: False for parts of a collective but the first.
    """

    entry: LedgerEntry
    group: dist.ProcessGroup
    clock: HostClock
    issued: Mark
    edge: Edge | None = None
    counted: bool = True
    done: Mark = None
    halted: Mark = None
    resumed: Mark = None


@dataclass(frozen=True)
class TimedCall:
    """A collective in seconds from the start of its step; `began_s`: issued, and its group free."""

    entry: LedgerEntry
    began_s: float
    done_s: float
    halted_s: float
    resumed_s: float
    edge: Edge | None = None
    counted: bool = True

    @property
    def seconds(self) -> float:
        """Time it took: until it was done, plus handing over the result in `wait`."""
        return max(self.done_s - self.began_s, 0.0) + max(self.resumed_s - max(self.done_s, self.halted_s), 0.0)

    @property
    def exposed_s(self) -> float:
        """Exposed time: the computation waited for it."""
        return self.resumed_s - self.halted_s


@dataclass(frozen=True)
class StepTimes:
    """Every collective of one step of one rank, in the order of issue, which is the same on all ranks.

    unix_s: when the step began; parts: of the computation of a traced step, in seconds from then, none of another step;
    host_s: its begin by the clock that all processes of a host share, None on a GPU.
    """

    calls: tuple[TimedCall, ...]
    unix_s: float = 0.0
    parts: tuple[Span, ...] = ()
    host_s: float | None = None

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
                "count": sum(call.counted for call in calls),
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
        since = partial(self.clock.between_s, self._start)
        free_s, timed = dict[int, float](), list[TimedCall]()
        for call in calls:
            assert call.resumed is not None, f"{call.entry} was never waited for"
            issued_s, done_s, halted_s, resumed_s = map(since, (call.issued, call.done, call.halted, call.resumed))
            began_s = max(issued_s, free_s.get(id(call.group), issued_s))
            free_s[id(call.group)] = max(began_s, done_s)
            timed.append(TimedCall(call.entry, began_s, done_s, halted_s, resumed_s, call.edge, call.counted))
        spans = [
            Span(COMPUTE_LANE, name, since(start), since(end)) for (name, start), (_, end) in pairwise(parts) if name
        ]
        return StepTimes(tuple(timed), self._unix_s, tuple(spans), self._start if self.clock.shared else None)

    def part(self, name: str) -> None:
        """A part of the computation begins and the previous one ends; an empty name begins none."""
        if self.clock is not None and self._traced:
            self._parts.append((name, self.clock.mark()))

    def issue(
        self, entry: LedgerEntry, group: dist.ProcessGroup, *, edge: Edge | None = None, counted: bool = True
    ) -> Call | None:
        """A collective, or a message on an edge, is about to be issued; None if it is not timed."""
        if self.clock is None or not self._on:
            return None
        call = Call(entry, group, self.clock, self.clock.mark(), edge, counted)
        self._calls.append(call)
        return call


def step_spans(step: int, times: StepTimes) -> Iterator[Span]:
    """One step: its parts and waits on the compute track, each collective on its axis' track."""
    end_s = max([part.end_s for part in times.parts] + [call.resumed_s for call in times.calls], default=0.0)
    at_s = times.unix_s
    yield Span(COMPUTE_LANE, step_name(step), at_s, at_s + end_s)
    for part in times.parts:
        yield replace(part, start_s=at_s + part.start_s, end_s=at_s + part.end_s)
    for call in times.calls:
        name, details = term_name(*call.entry.term), {"bytes": call.entry.size_bytes}
        yield Span(COMPUTE_LANE, wait_name(name), at_s + call.halted_s, at_s + call.resumed_s)
        yield Span(communication_lane(call.entry.axis), name, at_s + call.began_s, at_s + call.done_s, details)
