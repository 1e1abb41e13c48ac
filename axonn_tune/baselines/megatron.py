"""Price of one Megatron-LM layout: the slowest stage's computation, traffic and waiting, and its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from axonn_tune.baselines.gradients import exchange_gradients
from axonn_tune.baselines.layout import CURRENT, Layout, Software
from axonn_tune.baselines.memory import (
    Item,
    peak_memory,
    stage_parameters,
    total_bytes,
)
from axonn_tune.baselines.network import Network, Traffic
from axonn_tune.baselines.parts import Duration, Parts, PartsPricer
from axonn_tune.baselines.pipeline import pipeline_time
from axonn_tune.cost.compute import compute_rates, kernel_time_s
from axonn_tune.cost.utilisation import lost_s
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.units import seconds


@dataclass(frozen=True)
class MegatronPrice:
    """Everything predicted of one layout, per step; memory and seconds of the fullest and the slowest rank.

    compute_s: with what the accelerator waits for its host, and with `contended_s`, what computation loses to
    communication beside it.
    """

    layout: Layout
    micro_batches: int
    compute_s: float
    contended_s: float
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


class MegatronPricer:
    """Prices layouts of one model on one machine; parts of a micro-batch are priced once."""

    def __init__(
        self,
        model: Model,
        machine: Machine,
        workload: Workload,
        *,
        gpus: int,
        software: Software = CURRENT,
        known: dict[object, Parts] | None = None,
    ) -> None:
        """`known`: parts shared with pricers that differ in layers and batch alone."""
        self.model, self.workload, self.software = model, workload, software
        self.network = Network(machine, gpus, call_s=seconds(software.kernels.collective_us))
        self.rates = compute_rates(machine.accelerator, workload.precision, software.kernels)
        self._pricer = PartsPricer(model, workload, software, self.network, self.rates)
        self._known: dict[object, Parts] = {} if known is None else known

    def parts(self, layout: Layout) -> Parts:
        """Durations of what a micro-batch consists of under a layout."""
        key = _of_a_micro_batch(layout)
        if key not in self._known:
            self._known[key] = self._pricer.price(layout)
        return self._known[key]

    def price(self, layout: Layout) -> MegatronPrice:
        """Price a layout that Megatron-LM accepts; whether it fits is for the caller to judge."""
        m = layout.micro_batches(self.workload)
        parts = self.parts(layout)
        stages = parts.stages(layout.blocks_of_stages(self.model.layers))
        send = self._sends(layout, parts)
        times_s = tuple(stage.total_s + send.exposed_s for stage in stages)
        steady = pipeline_time(times_s, micro_batches=m, interleave=layout.interleave)
        slowest = max(stages, key=lambda stage: stage.total_s).times(m)
        traffic = (
            Traffic("tensor", slowest.communication_s, slowest.exposed_s),
            Traffic("pipeline", m * send.communication_s, m * send.exposed_s),
            *self._gradients(layout, parts),
        )
        hidden_s = sum(part.seconds - part.exposed_s for part in traffic)
        busy_s = slowest.compute_s + slowest.idle_s + self._step_end_s(layout)
        contended_s = float(lost_s(hidden_s, busy_s, contention=self.rates.contention))
        return MegatronPrice(
            layout=layout,
            micro_batches=m,
            compute_s=busy_s + contended_s,
            contended_s=contended_s,
            traffic=traffic,
            bubble_s=steady.bubble_s,
            memory=peak_memory(self.model, self.workload, layout, software=self.software),
            executed_flops=m * sum(stage.flops for stage in stages) / layout.pipeline,
        )

    def _gradients(self, layout: Layout, parts: Parts) -> tuple[Traffic, ...]:
        return exchange_gradients(
            self.model,
            self.workload,
            layout,
            network=self.network,
            software=self.software,
            forward_s=parts.forward.total_s,
            backward_s=parts.backward.total_s,
        )

    def _sends(self, layout: Layout, parts: Parts) -> Duration:
        """Sends of one micro-batch between stages: v forward and v backward.

        Each of the t ranks sends its share of `[M, H]` (scatter/gather, arXiv 2104.04473, section 4.1), and
        gathers the whole again unless the sequence stays split.
        """
        if layout.pipeline == 1:
            return Duration()
        size = float(self.workload.element_sizes.compute * layout.micro_batch * self.workload.sequence_length)
        size *= self.model.hidden / layout.context
        sent_s = self.network.transfer_s(layout.tensor * layout.context * layout.data, size / layout.tensor)
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
        parameters = stage_parameters(self.model, layout, software=self.software, stage=0)
        if layout.distributed_optimizer:
            parameters /= layout.data * layout.context
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
        context=layout.context,
    )


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
