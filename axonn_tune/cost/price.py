"""Price of one layout with every term, for explanations, launch configs, traces and published steps; and its parts.

It replays in numbers what a ranking replays in columns, and gets the same bits. All frameworks share the program and
the schedule.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial, reduce
from typing import TYPE_CHECKING

import numpy as np

from axonn_tune.cost.collectives import Line, Term, lines, route, sending
from axonn_tune.cost.compute import ComputeClock, ComputeRates, compute_rates, contended_s, exposed_s
from axonn_tune.cost.replay import Batch, ChunkTimes, Recorder, Replay, StageWork, TermKey, exposed_by_term, term_key
from axonn_tune.cost.uncertainty import NUDGE, Floats, half_width, outside, slopes_of, spread, with_software
from axonn_tune.frameworks import software_on, step_on
from axonn_tune.frameworks.step import NATURAL_IMBALANCE, StepOptions
from axonn_tune.grid import ALL_AXES
from axonn_tune.job import Job, Layout
from axonn_tune.program.dimensions import (
    executed_flops,
    logged_flops,
    model_flops,
    padded_alignment,
    step_tokens,
    symbol_values,
    table_alignment,
)
from axonn_tune.program.memory import KnownSizes, Memory, memory_limit_bytes, price_memory
from axonn_tune.program.operations import PLAIN, Collective, Sent
from axonn_tune.program.schedule import StepSchedule, build_schedule
from axonn_tune.program.step import (
    MIDDLE,
    ONLY,
    Contents,
    Stage,
    StepProgram,
    as_runs,
    blocks_by_type,
    blocks_in,
    build_step,
    chunks_of,
    contents_of,
    counted_blocks,
    kept_by_kind,
    stages_alike,
)
from axonn_tune.recompute import modules_of
from axonn_tune.specs.machine import Machine, Software
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.units import TERA, seconds, show_bytes, show_seconds

if TYPE_CHECKING:
    from axonn_tune.cost.pipeline import StageKind, StageTimes

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
        """Tokens of all GPUs together."""
        return step_tokens(self.job.workload) / self.iteration_s

    @property
    def mfu(self) -> float:
        """Model FLOPs over the peak."""
        return model_flops(self.job.model, self.job.workload) / (self.iteration_s * self.grid.world * self._peak)

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
        job = self.job
        logged = logged_flops(job.framework, job.model, job.workload, grid=self.grid, recompute=self.recompute)
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
        merged = self.job.framework.step.expert_overlap and self.grid.expert > 1 and self.dispatcher != "allgather"
        repeats = self.recompute == "full" or "moe" in modules_of(self.recompute)
        return merged and not repeats and (self.pipeline == 1 or self.chunks > 1)

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
        known, learned = with_software(self.job.machine, self.job.framework).learned, None
        if known is not None:
            learned = spread(self.slopes("iteration"), known, ranks=self.grid.world)
        times = {"compute_s": self.compute_s + self.bubble_s, "iteration_s": self.iteration_s}
        return half_width(self.job, self, learned=learned, of_imbalance=self._of_imbalance(), **times)

    def _of_imbalance(self) -> float:
        """Slope of the step's logarithm over that of the token imbalance of natural routing; 0 where it is given."""
        framework, step, learned = self.job.framework, self.job.framework.step, self.job.machine.learned
        natural = step.imbalance == NATURAL_IMBALANCE and not step.capacity_factor and self.grid.expert > 1
        if not natural or any(number.path == "imbalance" for number in (learned.numbers if learned else ())):
            return 0.0
        own = step_on(framework, self.job.machine, self.job.workload.precision).imbalance
        more = replace(self.job, framework=framework.with_step(imbalance=own * math.exp(NUDGE)))
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
    record: Callable[[], tuple[Batch, ...]] = field(default=tuple, compare=False, repr=False)

    @cached_property
    def awaited(self) -> tuple[Term, ...]:
        """`terms` of the stage with the most computation, whose waits are those of the step."""
        return self.terms if self.busiest == self.stage else self.awaiting()

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
    def batches(self) -> tuple[Batch, ...]:
        """Every operation of the schedule, from a second replay, since few callers need it."""
        return self.record()


def price(job: Job, layout: Layout, *, software: Software | None = None) -> Detail:
    """Price one layout by the alpha-beta model.

    software: numbers of kernels and host, those of the framework unless given. The layout must satisfy the
    divisibility constraints; the caller checks whether it fits into memory.
    """
    return Pricer(job, layout, software).price()


_SIZES = ("layers", "hidden", "heads", "ffn", "vocab", "max_sequence_length")
_SYMBOLIC_MODEL = dict.fromkeys(_SIZES, 1) | {"name": "", "description": "", "source": "", "defaults": None}
_SYMBOLIC_WORKLOAD = {"global_batch": 1, "sequence_length": 1}
"""Model and workload without the fields that no program depends on."""


@lru_cache(maxsize=256)
def _program(
    model: Model,
    workload: Workload,
    recompute: Recompute,
    options: StepOptions,
    *,
    some: bool,
    context: bool,
    lone_context: bool,
    alignment: int,
) -> tuple[StepProgram, StepSchedule]:
    """Program and schedule, built once for all candidates that share them: sizes and batch are symbols in both."""
    program = build_step(
        model,
        workload,
        recompute=recompute,
        options=options,
        some=some,
        context=context,
        lone_context=lone_context,
        table_alignment=alignment,
    )
    stages = tuple(Stage(first, last) for first in (True, False) for last in (True, False))
    schedule = build_schedule(program, overlaps=workload.overlaps, split=workload.split_micro_batch, stages=stages)
    return program, schedule


class Pricer:
    """Prices one layout.

    call_s: software overhead per collective and message; parts: blocks of each model part, chunk c of stage s at
    c·p + s; clock: that of the first stage that is replayed, which the others share, as other splits of the layers do;
    known: sizes in memory that all stages of all splits have in common.
    """

    def __init__(self, job: Job, layout: Layout, software: Software | None = None) -> None:
        self.job, self.layout, self.grid = job, layout, layout.grid
        self.model, self.workload, self.framework = job.model, job.workload, job.framework
        self.machine = job.machine.placing(self.grid.world)
        software = software_on(self.framework, self.machine) if software is None else software
        options = step_on(self.framework, self.machine, self.workload.precision)
        if self.model.has_experts:
            options = replace(options, dispatcher=job.dispatcher_on(self.grid))
        self.options = options.staged(layout.chunks) if self.grid.pipeline > 1 else options
        self.rates = compute_rates(
            *(self.machine.accelerator, self.workload.precision, software),
            multiplied=job.gemm_format,
            cuda_graphs=options.cuda_graphs,
            quantizes_in_gemm=options.quantizes_in_gemm,
        )
        self.call_s = seconds(software.collective_us)
        self.element = self.workload.element_sizes.compute
        alignment = padded_alignment(self.model, self.options, element=self.element)
        if self.options.vocabulary_multiple == 0:
            rows = self._symbols(ONLY)["V"]
            alignment = table_alignment(rows, split=self.grid.x * self.grid.y, element=self.element)
        self.parts: tuple[int, ...] = (self.model.layers,)
        if self.grid.pipeline > 1:
            # Imported here: most searches have no pipeline, and start-up time is theirs.
            from axonn_tune.cost.pipeline import parts_of

            self.parts = parts_of(job, self.grid.pipeline, layout.chunks, layout.parts)
        self.contents = contents_of(self.model, self.parts, layout.mtp_part)
        self.repeated, most = layout.recompute_layers, max(map(blocks_in, self.contents))
        self.program, self.schedule = _program(
            self.model if self.model.mixed else self.model.model_copy(update=_SYMBOLIC_MODEL),
            self.workload.model_copy(update=_SYMBOLIC_WORKLOAD),
            layout.recompute,
            # The token imbalance is a symbol, too.
            replace(self.options, imbalance=1.0),
            some=layout.recompute != "none" and self.repeated is not None and self.repeated < most,
            context=self.grid.context > 1,
            lone_context="context" in self.framework.axes and self.grid.context == 1,
            alignment=alignment,
        )
        tiers, world = self.machine.tiers, self.grid.world
        self.routes = {
            axes: route(self.grid.group_shape(axes, self.options.folding), tiers, world) for axes in self.program.groups
        }
        self._lines: dict[tuple[Sent, str], tuple[Line, ...]] = {}
        self.clock: ComputeClock | None = None
        self.known = KnownSizes()
        self._chunks: dict[tuple[Stage, Contents, bool], ChunkTimes] = {}
        self._replays: dict[bool, Replay] = {}
        self._updates: dict[tuple[Stage, tuple[Contents, ...]], float] = {}

    def _symbols(self, stage: Stage, chunks: Sequence[Contents] | None = None) -> dict[str, float]:
        return symbol_values(
            self.model,
            self.workload,
            self.grid,
            micro_batch=self.layout.micro_batch,
            options=self.options,
            stage=stage,
            layers=None if chunks is None else blocks_by_type(self.model, chunks),
        )

    def replay(self, values: dict[str, float], stage: Stage) -> Replay:
        """The replay of a stage, for given symbols."""
        others = None if self.clock is None else (self.clock, None)
        clock = ComputeClock(self.rates, float(self.element), values, PLAIN, others=others)
        self.clock = self.clock or clock
        runs = as_runs(self.contents[0]) if stage == ONLY else None
        return Replay(
            StageWork(clock, self.program, self.schedule, stage, runs),
            streams={axes: path.outermost for axes, path in self.routes.items()},
            lines=lambda kind, axes: tuple(
                (line.latency_s, line.bandwidth_bytes_per_s) for line in self.lines(kind, axes)
            ),
            several=lambda axes: float(self.routes[axes].outermost >= 0),
            tiers=len(self.machine.tiers),
        )

    def chunk(self, part: Stage, contents: Contents, *, kept: bool) -> ChunkTimes:
        """One micro-batch through a chunk of a stage, as if no layer or, with `kept`, every one were kept whole after
        its forward pass, and the stage's end as if it had all layers. Splits of the layers share it."""
        key = part, contents, kept
        if key not in self._chunks:
            if kept not in self._replays:
                self._replays[kept] = self._model_replay(kept=kept)
            self._chunks[key] = self._replays[kept].chunk(part, as_runs(contents))
        return self._chunks[key]

    def update_s(self, stage: Stage, contents: tuple[Contents, ...]) -> float:
        """A stage's end of the step, without waits for gradient buckets, s; contents: of its chunks."""
        key = stage, tuple(sorted(contents))
        if key not in self._updates:
            self._updates[key] = float(self.replay(self._counted(stage, contents, kept=0.0), stage).update_s)
        return self._updates[key]

    def _model_replay(self, *, kept: bool) -> Replay:
        blocks = float(sum(self.model.counts))
        return self.replay(self._counted(ONLY, (self.model.runs,), kept=kept * blocks), MIDDLE)

    def _counted(
        self, stage: Stage, contents: Sequence[Contents], held: Sequence[float] = (), *, kept: float | None = None
    ) -> dict[str, float]:
        """All symbols of a stage with such chunks; held: micro-batches that each has in flight, one as a default."""
        chunks = list(zip(map(as_runs, contents), held or [1.0] * len(contents), strict=True))
        values, again = self._symbols(stage, contents), float(self.repeated or 0.0)
        found = counted_blocks(self.program, values, chunks, repeated=again, kept=kept, arithmetic=PLAIN)
        found["held"] = sum(count * blocks_in(one) for one, (_, count) in zip(contents, chunks, strict=True))
        return {name: float(value) for name, value in found.items()}

    def lines(self, sent: Sent, axes: str) -> tuple[Line, ...]:
        """Lines of all algorithms and protocols of a collective."""
        if (sent, axes) not in self._lines:
            self._lines[sent, axes] = lines(sent, self.routes[axes], self.machine, call_s=self.call_s)
        return self._lines[sent, axes]

    def price(self) -> Detail:
        """Everything of the layout: each kind of stage replayed once, and several joined by their schedule."""
        stages, settled = self.grid.pipeline, self._settled
        of = {number: kind for kind in self.kinds for number in kind.numbers}
        joined = self._joined(of) if stages > 1 else _Joined(of[0].scheduled_s)
        shown, busiest = of[joined.most], of[joined.slowest]
        terms = (*self._terms(shown), *joined.sends(joined.most))
        communication_s = reduce(lambda total, term: total + term.seconds, terms, 0.0)
        busy_s = joined.step_s - joined.bubble_s
        lost_s = float(contended_s(communication_s, busiest.compute_s, busy_s, contention=self.rates.contention))
        return Detail(
            **{each.name: getattr(self.layout, each.name) for each in fields(Layout)},
            job=self.job,
            communication_s=communication_s,
            compute_s=busiest.compute_s + lost_s,
            iteration_s=joined.step_s + lost_s,
            bubble_s=joined.bubble_s,
            contended_s=lost_s,
            memory_bytes=float(self.memory.total_bytes),
            memory=self.memory,
            terms=terms,
            executed_flops=sum(of[number].flops for number in range(stages)) / stages,
            values=settled[joined.most][0],
            program=self.program,
            rates=self.rates,
            host_s=busiest.host_s,
            stages=tuple(
                StagePrediction(
                    sum(map(blocks_in, of[number].blocks)),
                    of[number].compute_s,
                    *joined.seconds[number],
                    settled[number][1],
                    tuple(
                        (sum(self.parts[:part]), self.parts[part]) for part in range(number, len(self.parts), stages)
                    ),
                    settled[number][0]["held"],
                )
                for number in range(len(joined.seconds))
            ),
            stage=joined.most,
            busiest=joined.slowest,
            awaiting=partial(self._awaited, busiest, joined),
            times=joined.times,
            computing=(busiest.replay.work.stage, settled[joined.slowest][0]) if stages > 1 else None,
            record=shown.record,
        )

    def _awaited(self, busiest: Kind, joined: _Joined) -> tuple[Term, ...]:
        return (*self._terms(busiest), *joined.sends(joined.slowest))

    @cached_property
    def kinds(self) -> list[Kind]:
        """Stages that are alike, replayed."""
        found = []
        for (stage, blocks), numbers in stages_alike(self.contents, self.grid.pipeline).items():
            found.append(Kind(self, stage, blocks, numbers, self._settled[numbers[0]][0]))
        return found

    def _joined(self, of: Mapping[int, Kind]) -> _Joined:
        """Pipeline stages joined by 1F1B or interleaved 1F1B."""
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.cost.pipeline import Pipelines, overlapped

        message, size_bytes, one_s = self.send
        pipeline = Pipelines(
            stages=len(of),
            chunks=self.layout.chunks,
            micro_batches=np.array([int(of[0].values["A"])]),
            kinds=tuple(kind.priced for kind in self.kinds),
            send_s=np.array([one_s]),
            overlapped=overlapped(self.framework.schedule, self.layout.chunks),
            contention=self.rates.contention,
        )
        time, slowest, bubble_s = pipeline.price(0)
        sent_s = {number: float(pipeline.sent_s(kind.priced)[0]) for number, kind in of.items()}
        communication_s = [of[number].communication_s + sent_s[number] for number in range(len(of))]
        most = max(of, key=communication_s.__getitem__)
        tier, senders = sending(stages=self.grid.group_shape("pipeline"), machine=self.machine, world=self.grid.world)
        bandwidth = tier.bandwidth_bytes_per_s / senders
        # Of a message whose shares are gathered over x where it arrives, that gather is in the fixed time.
        line = Line("direct", "simple", max(one_s - size_bytes / bandwidth, 0.0), bandwidth)
        key, formula = term_key(message), str(message.size_bytes)

        def sends(number: int) -> tuple[Term, ...]:
            calls, exposed_s = time.sends[number], min(time.exposed_send_s[number], sent_s[number])
            term = Term(*key, calls, size_bytes, 2, tier.name, sent_s[number], exposed_s, formula, line, message)
            return (term,) if calls else ()

        seconds = tuple(zip(communication_s, time.bubble_s, strict=True))
        return _Joined(time.step_s, most, slowest, bubble_s, sends, seconds, pipeline.times(0))

    def settled_stage(self, number: int, *, kept: float | None = None) -> tuple[dict[str, float], Memory]:
        """Values of all symbols of a stage, and its memory, which decides how many blocks keep their gathered weights.

        kept: that number, where other stages decide it.
        """
        stages = self.grid.pipeline
        stage, contents = Stage(number == 0, number == stages - 1), self.contents[number::stages]
        held = [1.0]
        if stages > 1:
            # Imported here: most searches have no pipeline stages, and start-up time is theirs.
            from axonn_tune.program.pipeline import held_of_chunks

            blocks, batches = tuple(map(blocks_in, contents)), int(self._symbols(stage, contents)["A"])
            more = int(self.options.expert_overlap and len(blocks) > 1)
            held = [
                *map(float, held_of_chunks(number, stages=stages, micro_batches=batches, weights=blocks, more=more))
            ]
        chunks, values = list(zip(map(as_runs, contents), held, strict=True)), self._counted(stage, contents, held)
        asked = self.layout.kept_layers if kept is None else kept
        memory = price_memory(
            self.program,
            values,
            limit_bytes=memory_limit_bytes(self.machine.accelerator),
            arithmetic=PLAIN,
            kept_layers=None if asked is None else min(float(asked), values["L"]),
            stage=stage,
            known=self.known,
        )
        found = kept_by_kind(self.program, chunks, values, float(memory.kept_layers), arithmetic=PLAIN)
        return values | {name: float(count) for name, count in found.items()}, memory

    @cached_property
    def _settled(self) -> list[tuple[dict[str, float], Memory]]:
        """Every stage, with as many layers not resharded as all have memory for; of those alike the first has least."""
        stages, kept = self.grid.pipeline, self.layout.kept_layers
        if stages > 1 and kept is None:
            blocks = [sum(map(blocks_in, self.contents[number::stages])) for number in range(stages)]
            firsts = [numbers[0] for numbers in stages_alike(self.contents, stages).values()]
            alone = {number: self.settled_stage(number)[1].kept_layers for number in firsts}
            fewer = [float(found) for number, found in alone.items() if found < blocks[number]]
            return [self.settled_stage(number, kept=min([float(max(blocks)), *fewer])) for number in range(stages)]
        return [self.settled_stage(number) for number in range(stages)]

    @property
    def memory(self) -> Memory:
        """Memory of the stage that needs most."""
        return max((memory for _, memory in self._settled), key=lambda memory: float(memory.total_bytes))

    @cached_property
    def send(self) -> tuple[Collective, float, float]:
        """A message to another stage, its bytes, and its time, s."""
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.cost.pipeline import gathers_messages, message_s

        values, grid = self._symbols(ONLY), self.grid
        whole, message = (self.program.send(scattered=one) for one in (False, self.framework.schedule.scattered))
        whole_bytes, size_bytes = (float(one.size_bytes.evaluate(values)) for one in (whole, message))
        sent_s = message_s(
            size_bytes,
            whole_bytes,
            stages=grid.group_shape("pipeline"),
            over_x=grid.group_shape("x") if gathers_messages(self.framework) else None,
            machine=self.machine,
            world=grid.world,
            call_s=self.call_s,
            arithmetic=PLAIN,
        )
        return message, size_bytes, float(sent_s)

    def _terms(self, shown: Kind) -> tuple[Term, ...]:
        """Every collective with more than one rank, in program order, with the waits for it."""
        found, replay, exposed = [], shown.replay, exposed_by_term(shown.recorders)
        hidden = dict.fromkeys(term_key(one) for one, _ in replay.work.terms if one.routing is not None)
        waited_s = sum(exposed.get(key, 0.0) for key in hidden)
        left = 1.0 - min(shown.saved_s / waited_s, 1.0) if waited_s and shown.saved_s else 1.0
        exposed = {key: spent_s * left if key in hidden else spent_s for key, spent_s in exposed.items()}
        terms = [(one, float(replay.value(times))) for one, times in replay.work.terms]
        terms = [(one, calls) for one, calls in terms if calls and self.routes[one.axis].outermost >= 0]
        # Layers of several runs share a key: each waits in proportion to its time.
        whole_s: dict[TermKey, float] = defaultdict(float)
        for one, calls in terms:
            whole_s[term_key(one)] += calls * float(replay.call_s(one))
        for one, calls in terms:
            path, size_bytes = self.routes[one.axis], float(replay.value(one.size_bytes))
            spent_s = calls * float(replay.call_s(one))
            lines, tier = self.lines(one.sent, one.axis), self.machine.tiers[path.outermost].name
            line = min(lines, key=lambda line: line.latency_s + size_bytes / line.bandwidth_bytes_per_s)
            key, formula = term_key(one), str(one.size_bytes)
            waited_s = exposed.get(key, 0.0) * (spent_s / whole_s[key] if whole_s[key] else 1.0)
            found.append(Term(*key, int(calls), size_bytes, path.size, tier, spent_s, waited_s, formula, line, one))
        return tuple(found)


@dataclass(frozen=True)
class _Joined:
    """A step of one stage, or of several: the stages with the most communication and the most computation, the wait of
    the latter, sends by stage, communication and wait of each stage, s, and durations of all."""

    step_s: float
    most: int = 0
    slowest: int = 0
    bubble_s: float = 0.0
    sends: Callable[[int], tuple[Term, ...]] = lambda _: ()
    seconds: tuple[tuple[float, float], ...] = ()
    times: StageTimes | None = None


class Kind:
    """Stages of one candidate that are alike, replayed; each chunk once, of those with equal blocks and ends.

    scheduled_s: end of the step, where this is its only stage. saved_s: by passes that run beside each other.
    """

    def __init__(
        self, pricer: Pricer, stage: Stage, blocks: tuple[Contents, ...], numbers: list[int], values: dict[str, float]
    ) -> None:
        self.pricer, self.blocks, self.numbers, self.values = pricer, blocks, numbers, values
        self.replay = pricer.replay(values, stage)
        self.chunks, self.recorders, self.scheduled_s, self.host_s = self._replay(intervals=False)
        self.communication_s = float(self.replay.communication_s())
        self.saved_s = float(self.replay.saved_s)
        if len(self.chunks) > 1:
            batches, stages = values["A"], values["pipeline"]
            self.saved_s = max(batches - stages, 0.0) * sum(float(one.saved_s) for one in self.chunks)
        self.compute_s = float(self.replay.work.compute_s) + self.host_s
        self.flops = float(executed_flops(pricer.program, values, stage))

    def _replay(self, *, intervals: bool) -> tuple[list[ChunkTimes], list[Recorder], float, float]:
        """Times and waits of each chunk, or those of the whole step."""
        work = self.replay.work
        if work.stage == ONLY:
            recorder = self._recording(intervals=intervals)
            step_s, host_s = self.replay.step_s()
            return [], [recorder], float(step_s), float(host_s)
        chunks, known = list(chunks_of(work.stage, self.blocks)), dict[Hashable, tuple[Recorder, ChunkTimes]]()
        for part, contents in dict.fromkeys(chunks):
            known[part, contents] = (
                self._recording(intervals=intervals),
                self.replay.chunk(part, as_runs(contents)),
            )
        found = [known[one][1] for one in chunks]
        return found, [known[one][0] for one in chunks], 0.0, float(sum(one.host_s for one in found))

    def _recording(self, *, intervals: bool) -> Recorder:
        """A new recorder for what is replayed next: of waits, and of every interval on request."""
        names, clock = tuple(tier.name for tier in self.pricer.machine.tiers), self.replay.work.clock
        recorder = self.replay.recorder = Recorder(self.pricer.schedule, names, clock.run_s if intervals else None)
        return recorder

    @cached_property
    def priced(self) -> StageKind:
        """Its seconds as columns of one row."""
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.cost.pipeline import StageKind

        times = tuple(ChunkTimes(*map(np.atleast_1d, one)) for one in self.chunks)
        return StageKind(self.numbers, np.array([self.communication_s]), np.array([self.compute_s]), times)

    def record(self) -> tuple[Batch, ...]:
        """Every interval, from another replay."""
        return tuple(batch for recorder in self._replay(intervals=True)[1] for batch in recorder.batches)
