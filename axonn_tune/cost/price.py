"""Price of one layout with every term, for explanations, launch configs, traces and published steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, reduce
from itertools import chain
from operator import add
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from axonn_tune.cost.collectives import Term
from axonn_tune.cost.compute import ATTENTION, ComputeClock, ComputeRates, contended_s, exposed_s, seconds_by_kind
from axonn_tune.cost.pricer import Pricer
from axonn_tune.cost.recorder import Batch
from axonn_tune.cost.uncertainty import DEVIATIONS, NUDGE, half_width, jitter, outside, slopes_of, spread, with_software
from axonn_tune.frameworks import step_on
from axonn_tune.grid import ALL_AXES
from axonn_tune.job import Job, Layout
from axonn_tune.program.dimensions import logged_flops, model_flops
from axonn_tune.program.lengths import batched_tokens, own_tokens, padding, step_spread
from axonn_tune.program.memory import Memory, memory_limit_bytes
from axonn_tune.program.operations import PLAIN, Floats, captured_layers, is_captured
from axonn_tune.program.step import ONLY, Stage, StepProgram, blocks_in, parts_at
from axonn_tune.specs.machine import Machine, Software
from axonn_tune.units import TERA, show_bytes, show_seconds
from axonn_tune.vocabulary import PipelineOrder

if TYPE_CHECKING:
    from axonn_tune.cost.pipeline import StageTimes

METRICS = {"communication": "communication_s", "exposed": "exposed_communication_s", "iteration": "iteration_s"}
"""Prices that rank layouts, by ranking criterion."""


@dataclass(frozen=True)
class StagePrediction:
    """One pipeline stage: its blocks, seconds of a step, and memory of a rank.

    parts: of each chunk the number of its first block and how many it has; held: blocks whose saved activations are
    alive together, of all micro-batches in flight.
    """

    blocks: int
    compute_s: float
    communication_s: float
    bubble_s: float
    memory: Memory
    parts: tuple[tuple[int, int], ...] = ()
    held: float = 0.0


@dataclass(frozen=True, kw_only=True, repr=False)
class PricedLayout(Layout):
    """A layout with its prices, by any cost model: a row of every table. Seconds and bytes per step and rank.

    communication_s: None where the cost model does not know it; overlapped or not. bubble_s: waiting for other pipeline
    stages. executed_flops: recompute and padding included, of pipeline stages their mean. rank: from 1; None for a
    layout that is not ranked. tie: within model error of the first of the ranking. shortest_step_s: of all candidates
    of its grid.
    """

    job: Job
    communication_s: float | None
    compute_s: float
    iteration_s: float
    bubble_s: float
    memory_bytes: float
    executed_flops: float
    rank: int | None = None
    tie: bool = False
    shortest_step_s: float | None = None
    terms: tuple[Term, ...] = field(default=(), repr=False)
    stages: tuple[StagePrediction, ...] = field(default=(), repr=False)

    def __repr__(self) -> str:
        """Layout, step and memory, in a line."""
        sizes = self.job.framework.layout({**self.grid.by_axis, "chunks": self.chunks})
        grid = " ".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "one GPU"
        rank = f"#{self.rank}: " if self.rank else ""
        memory = f"{show_bytes(self.memory_bytes)} of {show_bytes(self.memory_limit_bytes)}"
        layout = f"{grid}, micro-batch {self.micro_batch}, recompute {self.recomputed}"
        return f"<{rank}{layout}: {show_seconds(self.iteration_s)} a step, MFU {self.mfu:.1%}, {memory}>"

    @property
    def layout(self) -> Layout:
        """The layout without its prices."""
        return Layout(**{each.name: getattr(self, each.name) for each in fields(Layout)})

    @property
    def framework(self) -> str:
        """Name of the framework."""
        return self.job.framework.name

    @property
    def accumulation(self) -> int:
        """Gradient accumulation steps."""
        return self.job.workload.global_batch // (self.grid.batch_shares * self.micro_batch)

    @property
    def exposed_communication_s(self) -> float:
        """Exposed communication of the step, the bubble excluded, s."""
        return float(exposed_s(self.iteration_s - self.bubble_s, self.compute_s))

    @property
    def memory_limit_bytes(self) -> float:
        """Memory that a rank can use."""
        return memory_limit_bytes(self.job.machine.accelerator)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all GPUs together, without pads."""
        return own_tokens(self.job.workload, self.multiple) / self.iteration_s

    @property
    def multiple(self) -> int:
        """Multiple that sequences are padded to where they differ in length."""
        return padding(self.grid.x, self.grid.context, self.job.framework.step)

    @property
    def batched_tokens_per_s(self) -> float:
        """Tokens of all GPUs together, with pads."""
        return batched_tokens(self.job.workload, self.micro_batch, self.multiple) / self.iteration_s

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak."""
        needed = model_flops(self.job.model, self.job.workload, multiple=self.multiple)
        return needed / (self.iteration_s * self.grid.world * self._peak)

    @property
    def hfu(self) -> float:
        """Executed FLOPs over the peak."""
        return self.executed_flops / (self.iteration_s * self._peak)

    @property
    def _peak(self) -> float:
        return self.job.peak_flops_per_s

    @property
    def logged_tflops_per_gpu(self) -> float | None:
        """What the framework's own log will print, by its own count of FLOPs; None if it prints none."""
        job, workload = self.job, self.job.workload
        if workload.lengths is not None and not (job.logged and job.logged.samples):
            # Logs count what stands in the batch, as if each pack or row were one sequence.
            length = self.batched_tokens_per_s * self.iteration_s / workload.global_batch
            workload = workload.model_copy(update={"lengths": None, "sequence_length": round(length)})
        logged = logged_flops(job.framework, job.model, workload, grid=self.grid, recompute=self.recompute)
        return None if logged is None else logged / (self.iteration_s * self.grid.world * TERA)

    @property
    def outside(self) -> tuple[str, ...]:
        """What of it no published step validates."""
        return outside(self.job, self)

    @property
    def context_exchange(self) -> str | None:
        """The exchange of context parallelism, of a hierarchy with the ranks inside: `hierarchical 8`; None without."""
        step = self.job.framework.step
        inner = f" {step.context_inside}" if step.context_exchange == "hierarchical" else ""
        return f"{step.context_exchange}{inner}" if self.grid.context > 1 else None

    @property
    def dispatcher(self) -> str | None:
        """How tokens reach their experts; None where a rank has them all, unless an all-gather permutes them."""
        several = self.grid.expert * self.grid.expert_tensor > 1
        found = self.job.dispatcher_on(self.grid) if self.job.model.has_experts else None
        return found if several or found == "allgather" else None

    @property
    def expert_overlap(self) -> bool:
        """Whether passes of two micro-batches run beside each other, dispatch and combine behind computation."""
        return self.job.overlaps_experts(self)

    @property
    def pipeline_order(self) -> PipelineOrder:
        """The order of passes of its stages."""
        return self.job.framework.step.pipeline_order if self.pipeline > 1 else "1f1b"

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that are searched."""
        return self.job.framework.searched_axes(pipeline=self.pipeline > 1)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> int:
            """Size of an axis, or chunks, by the framework's name in any case, `.tp` or `.dp_shard`; context, too."""
            axis = None if name.startswith("_") or "job" not in vars(self) else self.job.framework.axis(name)
            if axis is None and name not in ALL_AXES:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return self.size(axis or name) if axis != "chunks" else self.chunks

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of `axes`."""
        return tuple(map(self.size, self.axes))

    @property
    def feasible(self) -> bool:
        """True: what is rejected is a `Rejected`."""
        return True

    @property
    def low_s(self) -> float:
        """Lower end of the step's 80% interval, s."""
        return self.iteration_s * math.exp(-self.half_width)

    @property
    def high_s(self) -> float:
        """Upper end of the step's 80% interval, s."""
        return self.iteration_s * math.exp(self.half_width)

    @cached_property
    def half_width(self) -> float:
        """Half of the 80% interval of the step's logarithm."""
        known, of_imbalance = with_software(self.job.machine, self.job.framework).learned, self._of_imbalance()
        of_lengths = DEVIATIONS * self._of_lengths()
        if known is not None:
            learned = spread(self.slopes("iteration"), known, ranks=self.grid.world)
            return math.hypot(DEVIATIONS * learned, jitter(self.pipeline, of_imbalance), of_lengths)
        times = {"compute_s": self.compute_s + self.bubble_s, "iteration_s": self.iteration_s}
        computed_s = self.detail.computed_s
        issued = self.detail.issued_share
        width = half_width(self.job, self, computed_s=computed_s, of_imbalance=of_imbalance, issued=issued, **times)
        return math.hypot(width, of_lengths)

    def _of_lengths(self) -> float:
        """Standard deviation of the step's logarithm by lengths of sequences: of what the rank with most computes."""
        if self.job.workload.lengths is None:
            return 0.0
        tokens, pairs = step_spread(self.job.workload, self.micro_batch, self.grid.batch_shares, self.multiple)
        computed_s = self.detail.computed_s
        attention = computed_s.get(ATTENTION, 0.0) / sum(computed_s.values())
        return (attention * pairs + (1.0 - attention) * tokens) * self.compute_s / self.iteration_s

    def _of_imbalance(self) -> float:
        """Slope of the step's logarithm over that of the token imbalance of natural routing; 0 where it is given."""
        framework, step, learned = self.job.framework, self.job.framework.step, self.job.machine.learned
        natural = step.imbalance is None and not step.capacity_factor and self.grid.expert > 1
        if not natural or any(number.path == "imbalance" for number in (learned.numbers if learned else ())):
            return 0.0
        own = step_on(framework, self.job.machine, self.job.workload.precision).natural_imbalance
        more = replace(self.job, framework=framework.with_step(natural_imbalance=own * math.exp(NUDGE)))
        return math.log(price(more, self).iteration_s / self.iteration_s) / NUDGE

    @cached_property
    def detail(self) -> Detail:
        """Everything that the alpha-beta model predicts of the layout."""
        if isinstance(self, Detail):
            return self
        found = price(self.job, self.layout)
        return replace(found, rank=self.rank, tie=self.tie, shortest_step_s=self.shortest_step_s)

    def slopes(self, metric: str) -> Floats:
        """Slopes of the logarithm of a ranking criterion over those of the numbers that the profile has learned."""

        def price_s(machine: Machine) -> float:
            found: float = getattr(price(replace(self.job, machine=machine), self), METRICS[metric])
            return found

        return slopes_of(price_s, with_software(self.job.machine, self.job.framework))


@dataclass(frozen=True, kw_only=True, repr=False)
class Detail(PricedLayout):
    """Everything predicted of one layout by the alpha-beta model.

    For a pipeline it is the stage with the most communication, `stage`; memory is that of the largest stage, with
    layers not resharded as found. Computation includes host_s, the accelerator's wait for its host, and contended_s,
    the slowdown from overlap. The bubble is that of the stage with the most computation, `busiest`, to which
    `computing` belongs: its kind, and the values of its symbols. times: of all stages, None without a pipeline.
    host_bytes: what the ranks of a node of one stage keep on their host, of the stage with most.
    """

    communication_s: float
    memory: Memory
    contended_s: float
    values: dict[str, float]
    program: StepProgram
    rates: ComputeRates
    host_s: float = 0.0
    stage: int = 0
    busiest: int = 0
    awaiting: Callable[[], tuple[Term, ...]] = field(default=tuple, compare=False, repr=False)
    computing: tuple[Stage, dict[str, float]] | None = field(default=None, compare=False, repr=False)
    times: StageTimes | None = field(default=None, compare=False, repr=False)
    host_bytes: float = 0.0
    record: Callable[[], tuple[Batch, ...]] = field(default=tuple, compare=False, repr=False)

    @cached_property
    def awaited(self) -> tuple[Term, ...]:
        """`terms` of the stage with the most computation, whose waits are those of the step."""
        return self.terms if self.busiest == self.stage else self.awaiting()

    @cached_property
    def computed_s(self) -> dict[str, float]:
        """Computation by its kind, s; for a pipeline of the stage that computes most."""
        clock, stage = self.clock
        return seconds_by_kind(self.program, clock, stage)

    @property
    def issued_share(self) -> float:
        """Of the operations of blocks, those that the host issues: none of what CUDA graphs capture."""
        captured, parts = captured_layers(self.job.framework.step.cuda_graphs), ("forward", "backward")
        every = [getattr(block, part).operations for block in self.program.blocks for part in parts]
        return fmean(not is_captured(step.layer, captured) for step in chain(*every))

    @property
    def clock(self) -> tuple[ComputeClock, Stage]:
        """Prices the computation of the step; for a pipeline of the stage that computes most, which it names."""
        stage, values = self.computing or (ONLY, self.values)
        return ComputeClock(self.rates, float(self.job.workload.element_sizes.compute), values, PLAIN), stage

    @cached_property
    def in_bf16(self) -> Detail | None:
        """The same layout in BF16, with the work of the same pipeline stage; None of a format of 16 bits or more."""
        workload = self.job.workload
        if not workload.format:
            return None
        plain = price(replace(self.job, workload=workload.model_copy(update={"precision": "bf16"})), self.layout)
        return replace(plain, computing=self.computing)

    @cached_property
    def without_expert_overlap(self) -> Detail | None:
        """The same layout with no pass beside another; None where none is."""
        if not self.expert_overlap:
            return None
        return price(replace(self.job, framework=self.job.framework.with_step(expert_overlap=False)), self.layout)

    @cached_property
    def without_offload(self) -> Detail | None:
        """The same layout with nothing on the host; None where nothing is."""
        if not self.job.framework.step.offloads:
            return None
        return price(
            replace(self.job, framework=self.job.framework.with_step(offloaded=(), offloaded_layers=0.0)), self.layout
        )

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """Every operation of the schedule, from a second replay, since few callers need it."""
        return self.record()


def price(job: Job, layout: Layout, *, software: Software | None = None) -> Detail:
    """Price one layout by the alpha-beta model.

    software: numbers of kernels and host, those of the framework unless given. The layout must satisfy the
    divisibility constraints; the caller checks whether it fits into memory.
    """
    return detail_of(Pricer(job, layout, software))


class Prices(NamedTuple):
    """What a layout is ranked by, s, and its memory, bytes; lost_s: of computation and step, to overlap."""

    communication_s: float
    compute_s: float
    iteration_s: float
    bubble_s: float
    memory_bytes: float
    lost_s: float


def prices_of(pricer: Pricer) -> Prices:
    """Those of a layout: each kind of stage replayed once, and several joined by their schedule."""
    joined = pricer.step
    shown, busiest = pricer.kind_of[joined.most], pricer.kind_of[joined.slowest]
    sent = (*pricer.spent_s(shown), *(term.seconds for term in joined.sends(joined.most)))
    communication_s = reduce(add, sent, 0.0)
    busy_s = joined.step_s - joined.bubble_s
    lost_s = float(contended_s(communication_s, busiest.compute_s, busy_s, contention=pricer.rates.contention))
    took_s = busiest.compute_s + lost_s, joined.step_s + lost_s, joined.bubble_s
    return Prices(communication_s, *took_s, float(pricer.memory.total_bytes), lost_s)


def detail_of(pricer: Pricer) -> Detail:
    """Everything of a layout: its prices, and what its stages and collectives take."""
    stages, settled = pricer.grid.pipeline, pricer.settled
    of, joined, prices = pricer.kind_of, pricer.step, prices_of(pricer)
    shown, busiest = of[joined.most], of[joined.slowest]
    return Detail(
        **{each.name: getattr(pricer.layout, each.name) for each in fields(Layout)},
        job=pricer.job,
        communication_s=prices.communication_s,
        compute_s=prices.compute_s,
        iteration_s=prices.iteration_s,
        bubble_s=prices.bubble_s,
        contended_s=prices.lost_s,
        memory_bytes=prices.memory_bytes,
        memory=pricer.memory,
        terms=(*pricer.terms(shown), *joined.sends(joined.most)),
        executed_flops=sum(of[number].flops for number in range(stages)) / stages,
        values=settled[joined.most][0],
        program=pricer.program,
        rates=pricer.rates,
        host_s=busiest.host_s,
        stages=tuple(
            StagePrediction(
                sum(map(blocks_in, of[number].blocks)),
                of[number].compute_s,
                *joined.seconds[number],
                settled[number][1],
                tuple(
                    (sum(pricer.parts[:part]), pricer.parts[part])
                    for part in parts_at(number, stages, len(pricer.parts), pricer.order)
                ),
                settled[number][0]["held"],
            )
            for number in range(len(joined.seconds))
        ),
        stage=joined.most,
        busiest=joined.slowest,
        awaiting=lambda: (*pricer.terms(busiest), *joined.sends(joined.slowest)),
        times=joined.times,
        host_bytes=pricer.host_bytes,
        computing=(busiest.replay.work.stage, settled[joined.slowest][0]) if stages > 1 else None,
        record=shown.record,
    )
