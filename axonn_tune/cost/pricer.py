"""Parts of one layout's price: its program, routes and symbols, and its stages, replayed and joined.

It replays in numbers what a ranking replays in columns, and gets the same bits. All frameworks share the program and
the schedule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from axonn_tune.cost.collectives import Line, Term, lines, route, sending
from axonn_tune.cost.compute import ComputeClock, compute_rates, host_rates
from axonn_tune.cost.recorder import Batch, Recorder, TermKey, exposed_by_term, term_key
from axonn_tune.cost.replay import ChunkTimes, Replay, StageWork
from axonn_tune.frameworks import software_on, step_on
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.job import Job, Layout
from axonn_tune.program.dimensions import executed_flops, padded_alignment, symbol_values, table_alignment
from axonn_tune.program.memory import (
    During,
    KnownSizes,
    Memory,
    host_bytes,
    memory_limit_bytes,
    memory_plan,
    price_memory,
)
from axonn_tune.program.operations import PLAIN, Collective, Floats, Sent
from axonn_tune.program.schedule import StepSchedule, build_schedule
from axonn_tune.program.step import (
    BOTH_ENDS,
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
    held_by_chunk,
    kept_by_kind,
    stages_alike,
    stages_of,
)
from axonn_tune.specs.machine import Software
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.units import seconds
from axonn_tune.vocabulary import PipelineOrder

if TYPE_CHECKING:
    from axonn_tune.cost.pipeline import StageKind, StageTimes

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
    return program, _schedule(program, workload)


def _schedule(program: StepProgram, workload: Workload) -> StepSchedule:
    stages = (*(Stage(first, last) for first in (True, False) for last in (True, False)), BOTH_ENDS)
    return build_schedule(program, overlaps=workload.overlaps, split=workload.split_micro_batch, stages=stages)


@lru_cache(maxsize=64)
def _without_weight_gradients(program: StepProgram, workload: Workload) -> tuple[StepProgram, StepSchedule]:
    """The program of backward passes whose weight gradients wait, and its schedule."""
    # Imported here: most schedules split no backward pass, and start-up time is theirs.
    from axonn_tune.program.split import without_weight_gradients

    rest = without_weight_gradients(program)
    return rest, _schedule(rest, workload)


class Together(NamedTuple):
    """What a stage holds at one time, by symbol (`step.held_by_chunk`), and the kind of operation in which that is,
    where backward passes are split."""

    counts: dict[str, float]
    kind: During = None


_ROUNDING = 2.0**-20
"""Of what is held: totals that differ by less than that share of it may be in another order by rounding."""


class StageSeconds(NamedTuple):
    """The end of a stage's step, without waits for gradient buckets, and its computation and communication, s."""

    update_s: float
    compute_s: float
    communication_s: float


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
            quantizes_in_gemm=options.in_format(self.workload.precision).quantizes_in_gemm,
            host=host_rates(self.machine, self.grid.world),
        )
        self.call_s = seconds(software.collective_us)
        self._known_symbols: dict[tuple[Stage, tuple[int, ...] | None], dict[str, float]] = {}
        self.element = self.workload.element_sizes.compute
        alignment = padded_alignment(self.model, self.options, element=self.element)
        if self.options.vocabulary_multiple == 0:
            rows = self._symbols(ONLY)["V"]
            alignment = table_alignment(rows, split=self.grid.x * self.grid.y, element=self.element)
        self._cut()
        self.repeated, most = layout.recompute_layers, max(map(blocks_in, self.contents))
        self.program, self.schedule = _program(
            self.model if self.model.opening or self.model.mixed else self.model.model_copy(update=_SYMBOLIC_MODEL),
            self.workload.model_copy(update=_SYMBOLIC_WORKLOAD),
            layout.recompute,
            # The token imbalance is a symbol, too.
            replace(self.options, imbalance=1.0, natural_imbalance=1.0),
            some=layout.recompute != "none" and self.repeated is not None and self.repeated < most,
            context=self.grid.context > 1,
            lone_context="context" in self.framework.axes and self.grid.context == 1,
            alignment=alignment,
        )
        tiers, world = self.machine.tiers, self.grid.world
        self.routes = {
            axes: route(self.grid.group_shape(axes, self.options.folding), tiers, world) for axes in self.program.groups
        }
        # What replays hold of it does not lead back here, so that all is freed without a search for cycles.
        machine, routes, call_s = self.machine, self.routes, self.call_s
        self.lines: Callable[[Sent, str], tuple[Line, ...]] = cache(
            lambda sent, axes: lines(sent, routes[axes], machine, call_s=call_s)
        )
        """Lines of all algorithms and protocols of a collective."""
        self.clock: ComputeClock | None = None
        self.known = KnownSizes()
        self._held_bytes: dict[bool, Floats] = {}
        self._chunks: dict[tuple[Stage, Contents, bool], ChunkTimes] = {}
        self._replays: dict[bool, Replay] = {}
        self._stages: dict[tuple[Stage, Hashable], StageSeconds] = {}
        self._settled_stages: dict[tuple[int, float | None], tuple[dict[str, float], Memory]] = {}

    def _cut(self) -> None:
        """The layers of each model part, by the split of the layout."""
        stages, layout = self.grid.pipeline, self.layout
        self.parts: tuple[int, ...] = (self.model.layers,)
        if stages > 1:
            # Imported here: most searches have no pipeline, and start-up time is theirs.
            from axonn_tune.cost.pipeline import parts_of

            self.parts = parts_of(self.job, stages, layout.chunks, layout.parts)
        self.contents = contents_of(self.model, self.parts, layout.mtp_part)
        self.order: PipelineOrder = self.options.pipeline_order if stages > 1 else "1f1b"
        self.stages = stages_of(self.contents, stages, self.order)

    def _symbols(self, stage: Stage, chunks: Sequence[Contents] | None = None) -> dict[str, float]:
        key = stage, None if chunks is None else blocks_by_type(self.model, chunks)
        if key not in self._known_symbols:
            self._known_symbols[key] = symbol_values(
                self.model,
                self.workload,
                self.grid,
                micro_batch=self.layout.micro_batch,
                options=self.options,
                stage=stage,
                layers=key[1],
            )
        return self._known_symbols[key]

    def replay(self, values: dict[str, float], stage: Stage, *, whole: bool = True) -> Replay:
        """The replay of a stage, for given symbols; whole: with weight gradients in backward passes."""
        made = self.program, self.schedule
        if not whole:
            made = _without_weight_gradients(self.program, self.workload.model_copy(update=_SYMBOLIC_WORKLOAD))
        others = None if self.clock is None else (self.clock, None)
        clock = ComputeClock(self.rates, float(self.element), values, PLAIN, others=others)
        self.clock = self.clock or clock
        runs, routes, lines_of = as_runs(self.contents[0]) if stage == ONLY else None, self.routes, self.lines
        return Replay(
            StageWork(clock, *made, stage, runs),
            streams={axes: (path.outermost,) * (path.outermost >= 0) for axes, path in routes.items()},
            lines=lambda sent, axes: tuple(
                (line.latency_s, line.bandwidth_bytes_per_s) for line in lines_of(sent, axes)
            ),
            several=lambda axes: float(routes[axes].outermost >= 0),
            tiers=len(self.machine.tiers),
        )

    def chunk(self, part: Stage, contents: Contents, *, kept: bool) -> ChunkTimes:
        """One micro-batch through a chunk of a stage, as if no layer or, with `kept`, every one were kept whole after
        its forward pass, and the stage's end as if it had all layers. Splits of the layers share it."""
        key = part, contents, kept
        if key not in self._chunks:
            if kept not in self._replays:
                blocks = float(sum(self.model.counts))
                self._replays[kept] = self.replay(self._counted(ONLY, (self.model.runs,), kept=kept * blocks), MIDDLE)
            self._chunks[key] = self._replays[kept].chunk(part, as_runs(contents))
        return self._chunks[key]

    def stage_s(self, stage: Stage, contents: tuple[Contents, ...]) -> StageSeconds:
        """A stage whose layers are all resharded; contents: of its chunks."""
        # It has so many blocks of each kind, however they are cut.
        key = stage, tuple(sorted(contents)) if self.program.some else blocks_by_type(self.model, contents)
        if key not in self._stages:
            replay = self.replay(self._counted(stage, contents, kept=0.0), stage)
            each = replay.update_s, replay.work.compute_s, replay.communication_s()
            self._stages[key] = StageSeconds(*map(float, each))
        return self._stages[key]

    def _counted(self, stage: Stage, contents: Sequence[Contents], *, kept: float | None = None) -> dict[str, float]:
        """All symbols of a stage with such chunks, each of which has one micro-batch in flight."""
        values, again = self._symbols(stage, contents), float(self.repeated or 0.0)
        chunks = [(as_runs(one), 1.0) for one in contents]
        found = counted_blocks(self.program, values, chunks, repeated=again, kept=kept, arithmetic=PLAIN)
        found["held"] = sum(map(blocks_in, contents))
        return {name: float(value) for name, value in found.items()}

    @cached_property
    def kinds(self) -> list[Kind]:
        """Stages that are alike, replayed."""
        found = []
        for (stage, blocks), numbers in stages_alike(self.contents, self.grid.pipeline, self.order).items():
            found.append(Kind(self, stage, blocks, numbers, self.settled_stage(numbers[0], kept=self.kept)[0]))
        return found

    @cached_property
    def kind_of(self) -> dict[int, Kind]:
        """That of each stage, by its number."""
        return {number: kind for kind in self.kinds for number in kind.numbers}

    @cached_property
    def step(self) -> Joined:
        """The step of the only stage, or of stages joined by their schedule."""
        of = self.kind_of
        if len(of) == 1:
            return Joined(of[0].scheduled_s)
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.cost.pipeline import Pipelines, overlapped

        message, size_bytes, one_s = self.send
        pipeline = Pipelines(
            stages=len(of),
            chunks=self.layout.chunks,
            micro_batches=np.array([int(of[0].values["A"])]),
            kinds=tuple(kind.priced for kind in self.kinds),
            send_s=np.array([one_s]),
            overlapped=overlapped(self.framework.schedule, self.layout.chunks, self.order),
            order=self.order,
            contention=self.rates.contention,
        )
        time, slowest, bubble_s = pipeline.price(0)
        sent_s = {number: float(pipeline.sent_s(kind.priced)[0]) for number, kind in of.items()}
        communication_s = [of[number].communication_s + sent_s[number] for number in range(len(of))]
        most = max(of, key=communication_s.__getitem__)
        tier, _, bandwidth = sending(
            stages=self.grid.group_shape("pipeline"), machine=self.machine, world=self.grid.world
        )
        # Of a message whose shares are gathered over x where it arrives, that gather is in the fixed time.
        line = Line("direct", "simple", max(one_s - size_bytes / bandwidth, 0.0), bandwidth)
        key, formula = term_key(message), str(message.size_bytes)

        def sends(number: int) -> tuple[Term, ...]:
            calls, exposed_s = time.sends[number], min(time.exposed_send_s[number], sent_s[number])
            term = Term(*key, calls, size_bytes, 2, tier.name, sent_s[number], exposed_s, formula, line, message)
            return (term,) if calls else ()

        seconds = tuple(zip(communication_s, time.bubble_s, strict=True))
        return Joined(time.step_s, most, slowest, bubble_s, sends, seconds, pipeline.times(0))

    def split(self, layout: Layout) -> Pricer:
        """The same with another split of the layers, into as many chunks or, where there are several, into more or
        fewer; it shares what does not depend on that: all kinds of blocks."""
        found = copy(self)
        found.layout = layout
        found._cut()
        for name in ("kinds", "kind_of", "step", "settled", "firsts", "kept"):
            vars(found).pop(name, None)
        found._settled_stages = {}
        return found

    def fits(self, limit_bytes: float) -> bool:
        """Whether every stage fits into memory."""
        kept = self.layout.kept_layers
        return all(self.settled_stage(one, kept=kept)[1].total_bytes <= limit_bytes for one in self.largest)

    @cached_property
    def firsts(self) -> list[int]:
        """The first of the stages that are alike."""
        return [numbers[0] for numbers in stages_alike(self.contents, self.grid.pipeline, self.order).values()]

    @property
    def largest(self) -> Sequence[int]:
        """The stages of which one needs most memory: of those alike the first has most micro-batches in flight, where
        their backward passes are whole."""
        return self.firsts if self.order == "1f1b" else range(self.grid.pipeline)

    def settled_stage(self, number: int, *, kept: float | None = None) -> tuple[dict[str, float], Memory]:
        """Values of all symbols of a stage, and its memory, which decides how many blocks keep their gathered weights.

        kept: that number, where other stages decide it.
        """
        asked = self.layout.kept_layers if kept is None else kept
        if (number, asked) not in self._settled_stages:
            values, several = self._counted(*self.stages[number]), self._held(number)
            found = [self._settled(number, values | one.counts, one.kind, kept=asked) for one in several]
            least = min(float(memory.kept_layers) for _, memory in found)
            if any(float(memory.kept_layers) > least for _, memory in found):
                found = [self._settled(number, values | one.counts, one.kind, kept=least) for one in several]
            self._settled_stages[number, asked] = max(found, key=lambda one: float(one[1].total_bytes))
        return self._settled_stages[number, asked]

    def _settled(
        self, number: int, values: dict[str, float], during: During, *, kept: float | None
    ) -> tuple[dict[str, float], Memory]:
        """The same at one time."""
        stage, contents = self.stages[number]
        memory = price_memory(
            self.program,
            values,
            limit_bytes=memory_limit_bytes(self.machine.accelerator),
            arithmetic=PLAIN,
            kept_layers=None if kept is None else min(float(kept), values["L"]),
            stage=stage,
            known=self.known,
            during=during,
        )
        chunks = [(as_runs(one), 1.0) for one in contents]
        found = kept_by_kind(self.program, chunks, values, float(memory.kept_layers), arithmetic=PLAIN)
        return values | {name: float(count) for name, count in found.items()}, memory

    def _held(self, number: int) -> list[Together]:
        """What a stage holds at the times at which it may hold most."""
        (stage, contents), stages = self.stages[number], len(self.stages)
        if stages == 1:
            return [Together({})]
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.program.pipeline import held_of_chunks

        blocks, batches = tuple(map(blocks_in, contents)), int(self._symbols(stage, contents)["A"])
        names, each = held_by_chunk(self.program, contents, self.repeated or 0)
        if self.order == "1f1b":
            more = int(self.options.expert_overlap and len(blocks) > 1)
            held = held_of_chunks(number, stages=stages, micro_batches=batches, weights=blocks, more=more)
            counts = (np.array(held) @ each[: len(held)]).tolist()
            return [Together({name: one for name, one in zip(names, counts, strict=True) if "waiting" not in name})]
        # Imported here: most schedules split no backward pass, and start-up time is theirs.
        from axonn_tune.program.schedules import stage_states

        shape = {"stages": stages, "chunks": len(blocks), "micro_batches": batches}
        found = list[Together]()
        for kind, states in stage_states(self.order, number, **shape).items():
            if kind != "F" or stage.last:
                found += self._most(stage, kind, names, states @ each)
        return found

    def _most(self, stage: Stage, during: During, names: tuple[str, ...], counts: Floats) -> list[Together]:
        """Of the states of a stage in one kind of operation those that may need most memory, beyond rounding.

        All that differs between them is the sum of what is held, which is linear in these counts. Of a larger sum no
        more layers fit that are not resharded, and for as many of these the total is larger, too.
        """
        if stage.last not in self._held_bytes:
            plan, values = memory_plan(self.program, stage, during), self._symbols(stage, self.contents)
            self._held_bytes[stage.last] = np.array(plan.held_bytes(names, values))
        held_bytes = counts @ self._held_bytes[stage.last]
        most = counts[held_bytes >= (1.0 - _ROUNDING) * held_bytes.max()].tolist()
        return [Together(dict(zip(names, one, strict=True)), during) for one in dict.fromkeys(map(tuple, most))]

    @cached_property
    def kept(self) -> float | None:
        """Layers that are not resharded on every stage, as many as all have memory for: of those alike the first has
        least."""
        stages, kept = self.grid.pipeline, self.layout.kept_layers
        if stages == 1 or kept is not None:
            return kept
        blocks = [sum(map(blocks_in, contents)) for _, contents in self.stages]
        alone = {number: self.settled_stage(number)[1].kept_layers for number in self.firsts}
        fewer = [float(found) for number, found in alone.items() if found < blocks[number]]
        return min([float(max(blocks)), *fewer])

    @cached_property
    def settled(self) -> list[tuple[dict[str, float], Memory]]:
        """Every stage, with those layers not resharded."""
        return [self.settled_stage(number, kept=self.kept) for number in range(self.grid.pipeline)]

    @property
    def memory(self) -> Memory:
        """Memory of the stage that needs most."""
        each = (self.settled_stage(number, kept=self.kept)[1] for number in self.largest)
        return max(each, key=lambda memory: float(memory.total_bytes))

    @property
    def host_bytes(self) -> float:
        """What a node's ranks keep on their host, of the stage that keeps most."""
        if not self.options.offloads:
            return 0.0
        ranks = min(self.grid.world, self.machine.launcher.ranks_per_node)
        return max(float(host_bytes(self.program, values, ranks)) for values, _ in self.settled)

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

    def spent_s(self, shown: Kind) -> list[float]:
        """Seconds of each of `terms`, which need no record of waits."""
        return [spent_s for _, _, spent_s in self._called(shown)]

    def _called(self, shown: Kind) -> list[tuple[Collective, float, float]]:
        """Every collective with more than one rank, its calls in a step, and what they take, s."""
        replay = shown.replay
        called = ((one, float(replay.value(times))) for one, times in replay.work.terms)
        some = ((one, calls) for one, calls in called if calls and self.routes[one.axis].outermost >= 0)
        return [(one, calls, calls * float(replay.call_s(one))) for one, calls in some]

    def terms(self, shown: Kind) -> tuple[Term, ...]:
        """Every collective with more than one rank, in program order, with the waits for it."""
        found, replay, exposed = [], shown.replay, exposed_by_term(shown.recorders)
        hidden = dict.fromkeys(term_key(one) for one, _ in replay.work.terms if one.routing is not None)
        waited_s = sum(exposed.get(key, 0.0) for key in hidden)
        left = 1.0 - min(shown.saved_s / waited_s, 1.0) if waited_s and shown.saved_s else 1.0
        exposed = {key: spent_s * left if key in hidden else spent_s for key, spent_s in exposed.items()}
        terms = self._called(shown)
        # Layers of several runs share a key: each waits in proportion to its time.
        whole_s: dict[TermKey, float] = defaultdict(float)
        for one, _, spent_s in terms:
            whole_s[term_key(one)] += spent_s
        for one, calls, spent_s in terms:
            path, size_bytes = self.routes[one.axis], float(replay.value(one.size_bytes))
            lines, tier = self.lines(one.sent, one.axis), self.machine.tiers[path.outermost].name
            line = min(lines, key=lambda line: line.latency_s + size_bytes / line.bandwidth_bytes_per_s)
            key, formula = term_key(one), str(one.size_bytes)
            waited_s = exposed.get(key, 0.0) * (spent_s / whole_s[key] if whole_s[key] else 1.0)
            found.append(Term(*key, int(calls), size_bytes, path.size, tier, spent_s, waited_s, formula, line, one))
        return tuple(found)


@dataclass(frozen=True)
class Joined:
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

    scheduled_s: end of the step, where this is its only stage. saved_s: by passes that run beside each other. Waits are
    recorded when they are asked for, by another replay: most candidates of a search need none.
    """

    def __init__(
        self, pricer: Pricer, stage: Stage, blocks: tuple[Contents, ...], numbers: list[int], values: dict[str, float]
    ) -> None:
        self.blocks, self.numbers, self.values, self.schedule = blocks, numbers, values, pricer.schedule
        self.tiers, self.autograd = pricer.machine.tiers, pricer.framework.schedule.autograd
        self.replay = pricer.replay(values, stage)
        self.inputs = pricer.replay(values, stage, whole=False) if pricer.order != "1f1b" else None
        only = stage == ONLY
        self.chunks, self._recorders, self.scheduled_s, self.host_s = self._replay(recording=only)
        self.communication_s = float(self.replay.communication_s())
        self.saved_s = float(self.replay.saved_s)
        if len(self.chunks) > 1:
            batches, stages = values["A"], values["pipeline"]
            self.saved_s = max(batches - stages, 0.0) * sum(float(one.saved_s) for one in self.chunks)
        self.compute_s = float(self.replay.work.compute_s) + self.host_s
        self.flops = float(executed_flops(pricer.program, values, stage))

    def _replay(
        self, *, recording: bool, intervals: bool = False
    ) -> tuple[list[ChunkTimes], list[Recorder], float, float]:
        """Times and, on request, waits of each chunk, or those of the whole step."""
        work, recorders = self.replay.work, list[Recorder]()

        def begin() -> None:
            recorders.extend([self._recording(intervals=intervals)] * recording)

        self.replay.recorder = None
        if work.stage == ONLY:
            begin()
            step_s, host_s = self.replay.step_s()
            return [], recorders, float(step_s), float(host_s)
        chunks, known = list(chunks_of(work.stage, self.blocks)), dict[Hashable, ChunkTimes]()
        several = list(dict.fromkeys(chunks))
        for part, contents in several:
            begin()
            times = self.replay.chunk(part, as_runs(contents))
            known[part, contents] = times if self.inputs is None else self._halved(part, contents, times)
        found, recorded = [known[one] for one in chunks], dict(zip(several, recorders, strict=False))
        return found, [recorded[one] for one in chunks if recorded], 0.0, float(sum(one.host_s for one in found))

    def _halved(self, part: Stage, contents: Contents, times: ChunkTimes) -> ChunkTimes:
        """A chunk with its backward pass in halves: what the LM head takes for its weight is in the second one.

        That takes no less than the whole pass has beside the first, where the host issues it or a collective hid
        behind it. Torch's autograd has nothing to do for the first part before its weights (`_PipelineStageBase`).
        """
        assert self.inputs is not None, "asked before"
        rest, waiting_s = self.inputs.chunk(part, as_runs(contents)), self.replay.weights_s(as_runs(contents))
        head_s = times.forward_s - rest.forward_s
        backward_s, last_s = times.backward_s + head_s, times.last_backward_s + head_s
        halves = rest.backward_s, max(waiting_s + head_s, backward_s - rest.backward_s)
        if part.first and self.autograd:
            halves = 0.0, backward_s
        return times._replace(
            forward_s=rest.forward_s,
            backward_s=backward_s,
            last_backward_s=last_s,
            input_s=halves[0],
            weight_s=halves[1],
        )

    def _recording(self, *, intervals: bool) -> Recorder:
        """A new recorder for what is replayed next: of waits, and of every interval on request."""
        names, clock = tuple(tier.name for tier in self.tiers), self.replay.work.clock
        recorder = self.replay.recorder = Recorder(self.schedule, names, clock.run_s if intervals else None)
        return recorder

    @property
    def recorders(self) -> list[Recorder]:
        """Waits of each chunk, or of the whole step."""
        if not self._recorders:
            self._recorders = self._replay(recording=True)[1]
        return self._recorders

    @cached_property
    def priced(self) -> StageKind:
        """Its seconds as columns of one row."""
        # Imported here: most searches have no pipeline stages, and start-up time is theirs.
        from axonn_tune.cost.pipeline import StageKind

        times = tuple(ChunkTimes(*map(np.atleast_1d, one)) for one in self.chunks)
        return StageKind(self.numbers, np.array([self.communication_s]), np.array([self.compute_s]), times)

    def record(self) -> tuple[Batch, ...]:
        """Every interval, from another replay."""
        return tuple(
            batch for recorder in self._replay(recording=True, intervals=True)[1] for batch in recorder.batches
        )
