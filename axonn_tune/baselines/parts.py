"""Durations of the parts of one micro-batch under Megatron-LM: a block both ways, embedding, head."""

from __future__ import annotations

import math
from dataclasses import dataclass

from axonn_tune.baselines import stretches
from axonn_tune.baselines.layout import Layout, Software
from axonn_tune.baselines.memory import rows_of_table
from axonn_tune.baselines.network import Network
from axonn_tune.baselines.stretches import Block, Stretch, Stretches
from axonn_tune.cost.compute import ComputeRates
from axonn_tune.program.dimensions import constants
from axonn_tune.program.operations import MATRIX_ALIGNMENT, Attention, MatMul
from axonn_tune.program.size import PLAIN
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload


@dataclass(frozen=True)
class Duration:
    """Time of a part of the step on one rank, and the FLOPs of its products and attention.

    idle_s: time in which the accelerator waits for its host to issue work.
    """

    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    flops: float = 0.0
    idle_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Computation, the communication nothing hides, and waiting for the host."""
        return self.compute_s + self.exposed_s + self.idle_s

    def __add__(self, other: Duration) -> Duration:
        return Duration(
            self.compute_s + other.compute_s,
            self.communication_s + other.communication_s,
            self.exposed_s + other.exposed_s,
            self.flops + other.flops,
            self.idle_s + other.idle_s,
        )

    def times(self, count: float) -> Duration:
        """The part done `count` times."""
        return Duration(
            count * self.compute_s,
            count * self.communication_s,
            count * self.exposed_s,
            count * self.flops,
            count * self.idle_s,
        )


@dataclass(frozen=True)
class Parts:
    """Durations of one micro-batch: one block forward and backward, the embedding and the head both ways."""

    forward: Duration
    backward: Duration
    embedding: Duration
    head: Duration

    def stages(self, blocks: tuple[int, ...]) -> tuple[Duration, ...]:
        """One micro-batch on each stage, by its blocks; the first has the embedding, the last the head."""
        block = self.forward + self.backward
        stages = [block.times(count) for count in blocks]
        stages[0] += self.embedding
        stages[-1] += self.head
        return tuple(stages)


@dataclass(frozen=True)
class PartsPricer:
    """Prices the parts of a micro-batch for one model, machine and software."""

    model: Model
    workload: Workload
    software: Software
    network: Network
    rates: ComputeRates

    def price(self, layout: Layout) -> Parts:
        """Durations under a layout; its pipeline, data and interleaving do not matter."""
        rows = layout.micro_batch * self.model.heads // layout.tensor
        block = Block(
            self.model,
            self.workload.element_sizes,
            self.software,
            layout.sequence_parallel,
            stretches.fused_softmax_takes(sequence_length=self.workload.sequence_length, rows=rows),
            math.gcd(self._table_rows(layout) // layout.tensor * self.workload.element_sizes.compute, MATRIX_ALIGNMENT),
        )
        clock = Clock(self.rates, float(self.workload.element_sizes.compute), self._values(layout), PLAIN)
        forward = stretches.block_forward(block)
        backward = stretches.block_backward(block, recompute=layout.recompute)
        again = 1.0 if layout.recompute == "none" else 2.0
        passes = self._duration(forward, layout, clock), self._duration(backward, layout, clock)
        issued = [_issued(part, layout) for part in (forward, backward)]
        # A block lasts as long as issuing it at least.
        idle_s = max(0.0, sum(issued) * self.rates.dispatch_s - sum(one.total_s for one in passes))
        waiting = [Duration(idle_s=idle_s * share / sum(issued)) for share in issued]
        return Parts(
            forward=passes[0] + waiting[0] + self._context_exchange(layout, clock, again),
            backward=passes[1] + waiting[1] + self._context_exchange(layout, clock, 1.0, passes=2.0),
            embedding=self._duration(stretches.embedding(block), layout, clock),
            head=self._duration(stretches.head(block), layout, clock),
        )

    def _table_rows(self, layout: Layout) -> int:
        return rows_of_table(self.model, tensor=layout.tensor, software=self.software)

    def _values(self, layout: Layout) -> dict[str, float]:
        return constants(self.model, self.workload) | {
            "x": float(layout.tensor),
            "b": layout.micro_batch / layout.context,
            "V": float(self._table_rows(layout)),
        }

    def _duration(self, parts: Stretches, layout: Layout, clock: Clock) -> Duration:
        """Stretches one after the other; communication beside computation is exposed as far as it outlasts it."""
        total = Duration()
        for part in parts:
            compute_s = sum(float(clock.run_s(step)) for step in part.computation)
            sent_s = sum(
                self.network.collective_s(step.kind, layout.tensor_group, float(step.size_bytes.evaluate(clock.values)))
                for step in part.communication
            )
            exposed_s = max(0.0, sent_s - compute_s) if part.beside else sent_s
            total += Duration(compute_s, sent_s, exposed_s, _flops(part, clock))
        return total

    def _context_exchange(self, layout: Layout, clock: Clock, times: float, *, passes: float = 1.0) -> Duration:
        """Keys and values of the other context ranks, all-gathered beside attention; their gradients are reduced."""
        if layout.context == 1:
            return Duration()
        widths = 2.0 * self.model.kv_heads * self.model.head_dim / layout.tensor
        size = self.workload.element_sizes.compute * layout.micro_batch * self.workload.sequence_length * widths
        sent_s = passes * times * self.network.collective_s("all_gather", layout.context_group, size)
        core_s = sum(
            float(clock.run_s(step))
            for step in stretches.attention_core(
                Block(self.model, self.workload.element_sizes, self.software, True), "forward"
            )
            if isinstance(step, Attention)
        )
        return Duration(0.0, sent_s, max(0.0, sent_s - passes * times * core_s))


def _flops(part: Stretch, clock: Clock) -> float:
    counted = (step for step in part.computation if isinstance(step, MatMul | Attention))
    return sum(float(step.calls.evaluate(clock.values)) * float(step.flops.evaluate(clock.values)) for step in counted)


def _issued(parts: Stretches, layout: Layout) -> int:
    """Operations the host issues for a pass through a block."""
    return sum(len(part.computation) + len(part.communication) * (layout.tensor > 1) for part in parts)
