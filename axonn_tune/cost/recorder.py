"""What a replay notes of one candidate: waits of the compute stream and, on request, every interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from axonn_tune.program.operations import Collective, Computation
from axonn_tune.program.schedule import StepSchedule
from axonn_tune.vocabulary import COMPUTE_LANE, END

TermKey = tuple[str, str, str, str]
"""op, axis, phase, layer."""

FORWARD, BACKWARD = "forward", "backward"
"""Parts of a step that are blocks; the other parts go by their names in a trace."""

State: TypeAlias = list[Any]
"""Clock of the compute stream, of each tier's stream, then of each handle; None before first use."""


@dataclass(frozen=True)
class Interval:
    """One operation on a stream (`COMPUTE_LANE` or a tier's name), in seconds from the start of its micro-batch.

    A collective on the compute stream is a wait until it has ended.
    """

    lane: str
    operation: Computation | Collective
    start_s: float
    end_s: float

    @property
    def pause(self) -> bool:
        """Whether this is a wait of the compute stream for a collective."""
        return self.lane == COMPUTE_LANE and isinstance(self.operation, Collective)


@dataclass(frozen=True)
class Stretch:
    """A repeated part of a micro-batch, each repeat like the first: one name per repeat.

    start_s, end_s: of the first on the compute stream; the others follow without a gap. lane_every_s: period on a
    communication stream, longer where it is overloaded.
    """

    names: tuple[str, ...]
    start_s: float
    end_s: float
    intervals: tuple[Interval, ...]
    lane_every_s: Mapping[str, float] = field(default_factory=dict)

    def shifts_s(self, time: int) -> Callable[[str], float]:
        """Offset of a repeat, from 0, on a stream, s."""
        every_s = self.end_s - self.start_s
        return lambda lane: time * self.lane_every_s.get(lane, every_s)


@dataclass(frozen=True)
class Batch:
    """Equal micro-batches in a row, `times` of `every_s` each; the last one has the end of the step with it."""

    times: int
    every_s: float
    stretches: tuple[Stretch, ...]


@dataclass
class Recorder:
    """Notes one candidate's replay: waits of the compute stream and, where `run_s` is given, every interval.

    lanes: names of the tiers; run_s: time of a computation. waits: the collective, number of such waits in a step, s of
    each, and whether it is at the end of the step.
    """

    schedule: StepSchedule
    lanes: tuple[str, ...]
    run_s: Callable[[Computation], Any] | None = None
    waits: list[tuple[Collective, float, float, bool]] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    _stretches: list[Stretch] = field(default_factory=list)
    _intervals: list[Interval] = field(default_factory=list)
    _part: tuple[str, tuple[str, ...], float] = ("", (), 0.0)
    _micro_batches: float = 1.0
    _number_of_waits: float = 1.0
    _blocks: int = 0
    _issued: dict[int, Collective] = field(default_factory=dict)

    def begin_batch(self, times: float) -> None:
        """What follows is one of so many equal micro-batches."""
        self._micro_batches, self._blocks = times, 0

    def end_batch(self, every_s: float, *, before: bool) -> None:
        """The micro-batch is complete; it takes so long; before: it comes before what is recorded."""
        if self.run_s and self._micro_batches:
            one = Batch(int(self._micro_batches), every_s, tuple(self._stretches))
            self.batches.insert(0 if before else len(self.batches), one)
        self._stretches.clear()

    def begin(self, phase: str, times: float, now_s: float) -> None:
        """A part starts that is done so many times: of blocks, from the first forward or from the last backward."""
        names: tuple[str, ...] = (phase,)
        self._number_of_waits = self._micro_batches * times
        if phase in (FORWARD, BACKWARD) and self.run_s:
            # Imported here: searches write no trace, and start-up time is theirs.
            from axonn_tune.specs.traces import block_backward, block_forward

            step, name = (1, block_forward) if phase == FORWARD else (-1, block_backward)
            first = self._blocks - (phase == BACKWARD)
            names = tuple(name(first + step * number) for number in range(int(times)))
            self._blocks += step * int(times)
        self._part = phase, names, now_s

    def end(self, now_s: float) -> None:
        """The part has ended."""
        if self.run_s:
            _, names, begun_s = self._part
            self._stretches.append(Stretch(names, begun_s, now_s, tuple(self._intervals)))
            self._intervals.clear()

    def repeated(self, once: State, twice: State) -> None:
        """The last part is repeated, and its communication at the pace between two states."""
        if not self.run_s:
            return
        every_s, lanes = twice[0] - once[0], zip(self.lanes, once[1:], twice[1:], strict=False)
        periods = {
            name: every_s if early is None else max(late - early, every_s)
            for name, early, late in lanes
            if late is not None
        }
        self._stretches[-1] = replace(self._stretches[-1], lane_every_s=periods)

    def run(self, number: int, now_s: float) -> None:
        """Computation, back to back."""
        if self.run_s is None:
            return
        total_s = 0.0
        for operation in self.schedule.runs[number]:
            start_s = now_s + total_s
            total_s = total_s + self.run_s(operation)
            self._intervals.append(Interval(COMPUTE_LANE, operation, start_s, now_s + total_s))

    def sent(self, number: int, handle: int | None, lane: int, start_s: Any, end_s: Any, *, now_s: Any) -> None:  # noqa: ANN401
        """A collective goes out; handle: by which it is waited for, None where the compute stream waits at once."""
        collective = self.schedule.collectives[number]
        if self.run_s:
            self._intervals.append(Interval(self.lanes[lane], collective, start_s, end_s))
        if handle is None:
            self._wait(collective, now_s, end_s)
        else:
            self._issued[handle] = collective

    def wait(self, handle: int, now_s: float, until_s: float) -> None:
        """The compute stream waits for the collective of a handle."""
        self._wait(self._issued[handle], now_s, until_s)

    def _wait(self, collective: Collective, now_s: float, until_s: float) -> None:
        if until_s > now_s:
            self.waits.append((collective, self._number_of_waits, until_s - now_s, self._part[0] == END))
            if self.run_s:
                self._intervals.append(Interval(COMPUTE_LANE, collective, now_s, until_s))


def term_key(one: Collective) -> TermKey:
    """The term of a collective."""
    return one.kind, one.axis, one.phase, one.layer


def exposed_by_term(recorders: Sequence[Recorder]) -> dict[TermKey, float]:
    """Waits for each collective, s: of all chunks of a stage, those at the end of the step of the first alone."""
    found: dict[TermKey, float] = {}
    for number, recorder in enumerate(recorders):
        for one, count, wait_s, at_end in recorder.waits:
            if not (at_end and number):
                key = term_key(one)
                found[key] = found.get(key, 0.0) + count * wait_s
    return found
