"""The predicted schedule as bars on lanes: one layer as it stands among others, and the whole step drawn coarsely.

`cost.spans` has every operation of a step, for traces; a page has room for what can be seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from axonn_tune.cost.breakdown import CONTENDED, kind_of
from axonn_tune.cost.prediction import Pricing
from axonn_tune.cost.timeline import Batch, Interval, Stretch
from axonn_tune.program.operations import Collective
from axonn_tune.specs.traces import COMPUTE_LANE, communication_lane, term_name, wait_name

SEVERAL, WAITING = "several in turn", "waiting"
_LAYERS_BEFORE = 4
"""Collectives of so many layers may still be under way when the next one begins."""


@dataclass(frozen=True)
class Bar:
    """Something on a lane. what: what it is coloured by; busy_s: how much of it the lane is in use, s."""

    lane: str
    what: str
    name: str
    start_s: float
    end_s: float
    busy_s: float

    def moved(self, by_s: float) -> Bar:
        """The same at another time."""
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)

    def within(self, start_s: float, end_s: float) -> Bar:
        """The part of it between two times; none if its end does not come after its start."""
        cut = max(self.start_s, start_s), min(self.end_s, end_s)
        return replace(self, start_s=cut[0], end_s=cut[1], busy_s=cut[1] - cut[0])


def bar(interval: Interval) -> Bar:
    """An interval of the schedule, on the lane that a trace has for it; computation by its kind."""
    operation, times = interval.operation, (interval.start_s, interval.end_s, interval.end_s - interval.start_s)
    if isinstance(operation, Collective):
        name = term_name(operation.kind, operation.axis, operation.phase, operation.layer)
        if interval.pause:
            return Bar(COMPUTE_LANE, WAITING, wait_name(name), *times)
        return Bar(communication_lane(operation.axis), f"{operation.kind} over {operation.axis}", name, *times)
    kind = kind_of(operation)
    return Bar(COMPUTE_LANE, kind, f"{kind}: {operation.layer}, {operation.phase}", *times)


def phase_bar(stretch: Stretch) -> Bar:
    """The computation of a part of the step as one bar: forward, head and loss, backward, or the end."""
    computed = [one for one in stretch.intervals if one.lane == COMPUTE_LANE and not one.pause]
    phase = stretch.names[0].rpartition(", ")[2]
    busy_s = sum(one.end_s - one.start_s for one in computed)
    return Bar(COMPUTE_LANE, phase, phase, stretch.start_s, stretch.end_s, busy_s)


def layer_bars(pricing: Pricing) -> tuple[list[Bar], list[Bar]]:
    """One block forward and one backward, from time 0 each: the kind there is most of, of the last micro-batch."""
    stretches = pricing.batches[-1].stretches
    return _layer(stretches, "forward"), _layer(stretches, "backward")


def _layer(stretches: Iterable[Stretch], phase: str) -> list[Bar]:
    """The longest run of equal blocks; with what earlier ones have sent, if there are earlier ones."""
    blocks = [one for one in stretches if one.names[0].startswith("block ") and one.names[0].endswith(phase)]
    chosen = max(blocks, key=lambda one: len(one.names))
    lasts_s = chosen.end_s - chosen.start_s
    before = _LAYERS_BEFORE if len(chosen.names) > 1 else 1
    shifts_s = [chosen.shifts_s(-number) for number in range(before)]
    bars = [bar(one).moved(by_s(one.lane) - chosen.start_s) for by_s in shifts_s for one in chosen.intervals]
    if len(chosen.names) > 1:
        bars = [one.within(0.0, lasts_s) for one in bars]
    return [one for one in bars if one.end_s > one.start_s]


def step_bars(pricing: Pricing, *, finest_s: float) -> list[Bar]:
    """The whole step; what is shorter than `finest_s`, or less than that apart, is drawn as one."""
    found: list[Bar] = []
    start_s = 0.0
    for batch in pricing.batches:
        one_batch = merged(_batch_bars(batch), finest_s=finest_s)
        found += [one.moved(start_s + time * batch.every_s) for time in range(batch.times) for one in one_batch]
        start_s += batch.times * batch.every_s
    if pricing.contended_s:
        end_s = pricing.iteration_s
        found.append(Bar(COMPUTE_LANE, CONTENDED, CONTENDED, end_s - pricing.contended_s, end_s, pricing.contended_s))
    return merged(found, finest_s=finest_s)


def _batch_bars(batch: Batch) -> Iterator[Bar]:
    """Everything in one micro-batch: computation by its parts, and every collective."""
    for stretch in batch.stretches:
        sent = [interval for interval in stretch.intervals if interval.lane != COMPUTE_LANE]
        for time in range(len(stretch.names)):
            by_s = stretch.shifts_s(time)
            yield phase_bar(stretch).moved(by_s(COMPUTE_LANE))
            yield from (bar(interval).moved(by_s(interval.lane)) for interval in sent)


def merged(bars: Iterable[Bar], *, finest_s: float) -> list[Bar]:
    """Bars of a lane joined where they are of one kind, or too short to see, and less than `finest_s` apart."""
    found: list[Bar] = []
    for one in sorted(bars, key=lambda one: (one.lane, one.start_s)):
        if one.end_s <= one.start_s:
            continue
        before = found[-1] if found else None
        if before and before.lane == one.lane and _joins(before, one, finest_s):
            what = before.what if before.what == one.what else SEVERAL
            name = before.name if before.name == one.name else what
            busy_s = before.busy_s + one.busy_s
            found[-1] = Bar(one.lane, what, name, before.start_s, max(before.end_s, one.end_s), busy_s)
        else:
            found.append(one)
    return found


def _joins(before: Bar, one: Bar, finest_s: float) -> bool:
    """Whether two neighbours on a lane are drawn as one."""
    if one.start_s - before.end_s >= finest_s:
        return False
    short = max(one.end_s - one.start_s, before.end_s - before.start_s) < finest_s
    return short or before.what == one.what
