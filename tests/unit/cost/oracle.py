"""One step spelled out in plain numbers: every block of every micro-batch, with a loop of its own.

It shares prices of single operations with the package (they have tests of their own), and the schedule's instructions.
The loop, the blocks and what joins micro-batches are written again: no part stands for another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from axonn_tune.cost.collectives import lines, route
from axonn_tune.cost.compute import ComputeClock
from axonn_tune.cost.pricer import Pricer
from axonn_tune.cost.recorder import TermKey
from axonn_tune.program.operations import PLAIN, Collective, Computation
from axonn_tune.program.schedule import ISSUE, RUN, SYNC, WAIT, Instructions, MicroBatch
from axonn_tune.program.step import ONLY, Behind, Stage


@dataclass
class Streams:
    """Clocks from idle: of the compute stream, of a tier's stream by its number, of a handle with its collective."""

    now_s: float = 0.0
    busy_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    handles: dict[int, tuple[float, Collective]] = field(default_factory=dict)
    waits_s: dict[TermKey, float] = field(default_factory=lambda: defaultdict(float))


class SpelledOut:
    """A stage of one candidate, each part of its schedule played as often as it occurs."""

    def __init__(self, pricer: Pricer, number: int = 0) -> None:
        self.pricer, self.schedule = pricer, pricer.schedule
        self.values = pricer.settled_stage(number)[0]
        self.clock = ComputeClock(pricer.rates, float(pricer.element), self.values, PLAIN)

    def computed_s(self, step: Computation) -> float:
        """Its calls in a row; a kernel that prepares a gather is called once."""
        calls = 1.0 if getattr(step, "prepares_gather", False) else float(step.calls.evaluate(self.values))
        return calls * float(self.clock.call_s(step))

    def sent_s(self, one: Collective) -> tuple[int, float]:
        """The tier it goes over, and its calls in a row; -1 where a rank is alone."""
        pricer = self.pricer
        path = route(pricer.grid.group_shape(one.axis), pricer.machine.tiers, pricer.grid.world)
        size_bytes = float(one.size_bytes.evaluate(self.values))
        chosen = lines(one.kind, path, pricer.machine, call_s=pricer.call_s)
        calls = 1.0 if one.role == "weight" else float(one.calls.evaluate(self.values))
        times = [line.latency_s + size_bytes / line.bandwidth_bytes_per_s for line in chosen]
        return path.outermost, calls * min(times, default=0.0)

    def play(self, parts: Iterable[Instructions], streams: Streams) -> float:
        """Follow instructions; returns how long they took."""
        begun_s = streams.now_s
        for code, number, handle in (step for part in parts for step in part):
            if code == RUN:
                streams.now_s += sum(self.computed_s(step) for step in self.schedule.runs[number])
            elif code == WAIT:
                self._wait(streams, *streams.handles.get(number, (0.0, None)))
            else:
                collective = self.schedule.collectives[number]
                tier, takes_s = self.sent_s(collective)
                if tier < 0:
                    continue
                streams.busy_s[tier] = max(streams.busy_s[tier], streams.now_s) + takes_s
                if code == ISSUE:
                    streams.handles[handle] = streams.busy_s[tier], collective
                else:
                    assert code == SYNC
                    self._wait(streams, streams.busy_s[tier], collective)
        return streams.now_s - begun_s

    def _wait(self, streams: Streams, until_s: float, one: Collective | None) -> None:
        if one is not None and until_s > streams.now_s:
            streams.waits_s[one.kind, one.axis, one.phase, one.layer] += until_s - streams.now_s
            streams.now_s = until_s

    def forward(self, batch: MicroBatch, layers: int, *, head: bool) -> list[Instructions]:
        """Every block forward, with or without an LM head after the last."""
        return [*[batch.forward(0, 0)] * (layers - 1), batch.forward(0, None, head=head)]

    def backward(self, batch: MicroBatch, layers: int, kept: int) -> list[Instructions]:
        """Every block backward: first those that are not resharded after forward."""
        kinds = [Behind(0, kept=number < kept) for number in range(layers)]
        after = [0 if number + 1 < layers else None for number in range(layers)]
        return [
            batch.backward(0 if number else None, kind, following)
            for number, (kind, following) in enumerate(zip(kinds, after, strict=True))
        ]

    def host_s(self, layers: int, blocks_s: float) -> float:
        """How long so many blocks, with the waits for what they sent, wait for the host in a micro-batch."""
        several = {axes: float(path.outermost >= 0) for axes, path in self.pricer.routes.items()}
        times = {"": 1.0, **self.values, **several}
        issued = sum(count * times[name] for one in self.schedule.issued[0] for name, count in one.items())
        return max(0.0, self.pricer.rates.dispatch_s * issued * layers - blocks_s)

    def step(self) -> tuple[float, dict[TermKey, float]]:
        """End of a step without pipeline stages, and the waits for each collective, s."""
        step_s, waits_s, times = 0.0, dict[TermKey, float](), int(self.values["A"])
        for number in range(times):
            last, streams = number == times - 1, Streams()
            entered, forward, head, backward, left = self._micro_batch(last=last)
            for part in (entered, forward, head, backward, left):
                self.play(part, streams)
            alone_s = sum(self.play(part, Streams()) for part in (entered, head, left))
            host_s = self.host_s(int(self.values["L"]), streams.now_s - alone_s)
            self.play([self.schedule.ends[ONLY]] if last else [], streams)
            step_s += streams.now_s + host_s
            for key, wait_s in streams.waits_s.items():
                waits_s[key] = waits_s.get(key, 0.0) + wait_s
        return step_s, waits_s

    def parts(self) -> Iterator[Instructions]:
        """Every part of a step without pipeline stages, in order."""
        times = int(self.values["A"])
        for number in range(times):
            yield from chain.from_iterable(self._micro_batch(last=number == times - 1))
        yield self.schedule.ends[ONLY]

    def _micro_batch(self, *, last: bool) -> tuple[list[Instructions], ...]:
        """Its parts: embedding, blocks forward, LM head, blocks backward, and what is left."""
        layers, kept = int(self.values["L"]), int(self.values["kept"])
        batch = self.schedule.last_micro_batch if last else self.schedule.micro_batch
        head = batch.head(None if kept == layers else 0)
        forward, backward = self.forward(batch, layers, head=True), self.backward(batch, layers, kept)
        return [batch.embedding(0)], forward, [head], backward, [batch.flush(0)]

    def chunk(self, part: Stage, layers: int, kept: int, batch: MicroBatch) -> tuple[float, float]:
        """A forward and a backward pass of a chunk, from idle streams, without waits for the host."""
        ahead, behind = Streams(), Streams()
        enter = batch.embedding(0) if part.first else batch.enter(0)
        forward = [enter, *self.forward(batch, layers, head=part.last)]
        self.play([*forward, *([batch.head(None)] if part.last else [])], ahead)
        enter, leave = () if kept else batch.enter_backward(0), batch.flush(0) if part.first else batch.leave(0)
        self.play([enter, *self.backward(batch, layers, kept), leave], behind)
        return ahead.now_s, behind.now_s
