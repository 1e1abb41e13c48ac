"""Price of one Megatron-LM layout: the slowest stage's computation, traffic and waiting, and its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from axonn_tune.baselines import stretches
from axonn_tune.baselines.gradients import exchange_gradients
from axonn_tune.baselines.layout import CURRENT, Layout, Software
from axonn_tune.baselines.memory import (
    Item,
    padded_vocabulary,
    peak_memory,
    stage_parameters,
    total_bytes,
)
from axonn_tune.baselines.network import Network, Traffic
from axonn_tune.baselines.pipeline import pipeline_time
from axonn_tune.baselines.stretches import Block, Stretches
from axonn_tune.cost.arithmetic import PLAIN
from axonn_tune.cost.compute import compute_rates, kernel_time_s
from axonn_tune.cost.durations import Clock
from axonn_tune.program.dimensions import constants
from axonn_tune.program.operations import Attention, MatMul
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload


@dataclass(frozen=True)
class Duration:
    """Time of a part of the step on one rank, and the FLOPs of its products and attention."""

    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    flops: float = 0.0

    @property
    def total_s(self) -> float:
        """Computation and the communication nothing hides."""
        return self.compute_s + self.exposed_s

    def __add__(self, other: Duration) -> Duration:
        return Duration(
            self.compute_s + other.compute_s,
            self.communication_s + other.communication_s,
            self.exposed_s + other.exposed_s,
            self.flops + other.flops,
        )

    def times(self, count: float) -> Duration:
        """The part done `count` times."""
        return Duration(
            count * self.compute_s, count * self.communication_s, count * self.exposed_s, count * self.flops
        )


@dataclass(frozen=True)
class MegatronPrice:
    """Everything predicted of one layout, per step; memory and seconds of the fullest and the slowest rank."""

    layout: Layout
    micro_batches: int
    compute_s: float
    traffic: tuple[Traffic, ...]
    bubble_s: float
    memory: tuple[Item, ...]
    executed_flops: float

    @property
    def communication_s(self) -> float:
        """All communication, hidden or not."""
        return sum(part.seconds for part in self.traffic)

    @property
    def exposed_communication_s(self) -> float:
        """Communication during which nothing is computed."""
        return sum(part.exposed_s for part in self.traffic)

    @property
    def iteration_s(self) -> float:
        """Time of a step."""
        return self.compute_s + self.exposed_communication_s + self.bubble_s

    @property
    def memory_bytes(self) -> float:
        """Memory of the fullest rank."""
        return total_bytes(self.memory)


@dataclass(frozen=True)
class Parts:
    """Durations of one micro-batch: one block forward and backward, the embedding and the head both ways."""

    forward: Duration
    backward: Duration
    embedding: Duration
    head: Duration

    def stages(self, blocks: float, pipeline: int) -> tuple[Duration, ...]:
        """One micro-batch on each stage that differs: all of it, or the first, the last and those between."""
        middle = (self.forward + self.backward).times(blocks)
        if pipeline == 1:
            return (middle + self.embedding + self.head,)
        return (middle + self.embedding, *(middle for _ in range(pipeline - 2)), middle + self.head)


class MegatronPricer:
    """Prices layouts of one model on one machine; parts of a micro-batch are priced once."""

    def __init__(
        self, model: Model, machine: Machine, workload: Workload, *, gpus: int, software: Software = CURRENT
    ) -> None:
        self.model, self.workload, self.software = model, workload, software
        self.network = Network(machine, gpus)
        self.rates = compute_rates(machine.accelerator, workload.precision)
        self._parts = lru_cache(maxsize=None)(self._price_parts)

    def parts(self, layout: Layout) -> Parts:
        """Durations of what a micro-batch consists of under a layout."""
        return self._parts(_of_a_micro_batch(layout))

    def price(self, layout: Layout) -> MegatronPrice:
        """Price a layout that Megatron-LM accepts; whether it fits is for the caller to judge."""
        m = layout.micro_batches(self.workload)
        blocks = self.model.layers / layout.pipeline
        parts = self.parts(layout)
        stages = parts.stages(blocks, layout.pipeline)
        send = self._sends(layout, parts)
        times_s = tuple(stage.total_s + send.exposed_s for stage in stages)
        steady = pipeline_time(times_s, micro_batches=m, interleave=layout.interleave)
        slowest = max(stages, key=lambda stage: stage.total_s).times(m)
        end = self._step_end_s(layout)
        return MegatronPrice(
            layout=layout,
            micro_batches=m,
            compute_s=slowest.compute_s + end,
            traffic=(
                Traffic("tensor", slowest.communication_s, slowest.exposed_s),
                Traffic("pipeline", m * send.communication_s, m * send.exposed_s),
                *exchange_gradients(
                    self.model,
                    self.workload,
                    layout,
                    network=self.network,
                    software=self.software,
                    forward_s=parts.forward.total_s,
                    backward_s=parts.backward.total_s,
                ),
            ),
            bubble_s=steady.bubble_s,
            memory=peak_memory(self.model, self.workload, layout, software=self.software),
            executed_flops=m * sum(stage.flops for stage in stages) / layout.pipeline,
        )

    def _price_parts(self, layout: Layout) -> Parts:
        block = Block(self.model, self.workload.element_sizes, self.software, layout.sequence_parallel)
        values = constants(self.model, self.workload) | {
            "x": float(layout.tensor),
            "b": float(layout.micro_batch),
            "V": float(padded_vocabulary(self.model, tensor=layout.tensor)),
        }
        clock = Clock(self.rates, float(self.workload.element_sizes.compute), values, PLAIN)
        return Parts(
            forward=self._duration(stretches.block_forward(block), layout, clock),
            backward=self._duration(stretches.block_backward(block, recompute=layout.recompute), layout, clock),
            embedding=self._duration(stretches.embedding(block), layout, clock),
            head=self._duration(stretches.head(block), layout, clock),
        )

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

    def _sends(self, layout: Layout, parts: Parts) -> Duration:
        """Sends of one micro-batch between stages: v forward and v backward.

        Each of the t ranks sends its share of `[M, H]` (scatter/gather, arXiv 2104.04473, section 4.1), and
        gathers the whole again unless the sequence stays split.
        """
        if layout.pipeline == 1:
            return Duration()
        size = float(self.workload.element_sizes.compute * layout.micro_batch * self.workload.sequence_length)
        size *= self.model.hidden
        sent_s = self.network.transfer_s(layout.tensor * layout.data, size / layout.tensor)
        if not layout.sequence_parallel:
            sent_s += self.network.collective_s("all_gather", layout.tensor_group, size)
        hidden = self.software.pipeline_overlap and layout.interleave > 1
        chunk = self.model.layers / layout.pipeline / layout.interleave
        exposed_s = sum(
            max(0.0, sent_s - chunk * part.total_s) if hidden else sent_s for part in (parts.forward, parts.backward)
        )
        return Duration(0.0, 2.0 * layout.interleave * sent_s, layout.interleave * exposed_s)

    def _step_end_s(self, layout: Layout) -> float:
        """Gradient norm and AdamW over what the rank's optimizer holds, as in the 4D program."""
        parameters = stage_parameters(self.model, layout, stage=0)
        if layout.distributed_optimizer:
            parameters /= layout.data
        main = self.workload.element_sizes.main
        norm_s = float(kernel_time_s(main * parameters, self.rates))
        return norm_s + float(kernel_time_s(7.0 * main * parameters, self.rates))


def _of_a_micro_batch(layout: Layout) -> Layout:
    """What the durations of one micro-batch's parts depend on."""
    return Layout(
        tensor=layout.tensor,
        micro_batch=layout.micro_batch,
        recompute=layout.recompute,
        sequence_parallel=layout.sequence_parallel,
    )


def _flops(part: stretches.Stretch, clock: Clock) -> float:
    counted = (step for step in part.computation if isinstance(step, MatMul | Attention))
    return sum(float(step.calls.evaluate(clock.values)) * float(step.flops.evaluate(clock.values)) for step in counted)


def best_of(layouts: Iterable[Layout], pricer: MegatronPricer, *, limit_bytes: float) -> MegatronPrice | None:
    """The fastest layout that fits into memory; on a tie the one with less memory. None if none fits."""
    model, workload, software = pricer.model, pricer.workload, pricer.software
    fitting = (
        layout
        for layout in layouts
        if total_bytes(peak_memory(model, workload, layout, software=software)) <= limit_bytes
    )
    return min(
        (pricer.price(layout) for layout in fitting),
        key=lambda price: (price.iteration_s, price.memory_bytes),
        default=None,
    )
