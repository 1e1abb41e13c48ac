"""Shapes: grids with a micro-batch and chunks of a stage, as columns, and what their pipeline stages have.

Only micro-batches that divide are listed. Memory depends on shapes, and not on rank orders.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from operator import add
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import distinct
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import step_on
from axonn_tune.grid import ALL_AXES, BATCH_AXES, divisors
from axonn_tune.program.dimensions import dimensions, loss_chunks
from axonn_tune.program.feasibility import CHUNKS, EXPERT_OVERLAP, MICRO_BATCH
from axonn_tune.program.memory import During, KnownSizes
from axonn_tune.program.operations import COLUMNS, PLAIN_BLOCKS, REPEATING, Floats, Integers, Value
from axonn_tune.program.step import (
    FIRST,
    LAST,
    MIDDLE,
    Contents,
    Stage,
    StepProgram,
    blocks_in,
    contents_of,
    stages_alike,
)
from axonn_tune.ranking.space import Grids, Problem
from axonn_tune.vocabulary import FOLDED, PipelineOrder

HeldChunks: TypeAlias = tuple[tuple[Contents, int, int, int], ...]
"""Blocks of each chunk of a stage, of how many micro-batches it holds activations when the stage holds most, and for
how many its weight gradients wait then; and 1 where one of these is in the backward pass of its last block."""


@dataclass(frozen=True, eq=False)
class InFlight:
    """Chunks of a stage with the micro-batches that each holds; its sums are worked out once for all shapes that have
    such a stage."""

    chunks: HeldChunks

    @cached_property
    def most(self) -> int:
        """Blocks of its largest chunk."""
        # Most chunks are alike.
        return max(map(blocks_in, {one for one, *_ in self.chunks}))

    @cached_property
    def blocks(self) -> int:
        """Its blocks of all layer types."""
        return sum(blocks_in(one) for one, *_ in self.chunks)

    @cached_property
    def together(self) -> int:
        """Blocks of all micro-batches whose activations are held together."""
        return sum(held * blocks_in(one) + (ending if one else 0) for one, held, _, ending in self.chunks)

    @cached_property
    def waiting(self) -> InFlight:
        """The same with what waits in the place of what holds activations."""
        return InFlight.of(tuple((contents, later, 0, -ending) for contents, _, later, ending in self.chunks))

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(chunks: HeldChunks) -> InFlight:
        """That of such chunks: one for all that have and hold the same."""
        return InFlight(chunks)


@dataclass(frozen=True)
class StageRows:
    """One stage of every shape with several: its place, and by number of a shape of a pipeline what is in it.

    which: that number of each shape; types: number of layer types; during: the kind of operation in which a stage holds
    that, where backward passes are split; source: rows that these are some of.
    """

    stage: Stage
    chunks: tuple[InFlight, ...]
    which: Integers
    types: int
    during: During = None
    source: StageRows | None = None

    @cached_property
    def waiting(self) -> StageRows:
        """The same with what waits in the place of what holds activations."""
        return StageRows(self.stage, tuple(one.waiting for one in self.chunks), self.which, self.types)

    @cached_property
    def most(self) -> Integers:
        """Blocks of its largest chunk."""
        return np.array([one.most for one in self.chunks], dtype=np.int64)

    @cached_property
    def _first(self) -> tuple[Floats, Floats, Floats]:
        """Of the first k blocks of each chunk, k from 0: how many there are of each layer type, how many with
        activations held together, and how many others the chunk has that has fewest of them, `[shapes of pipelines, k,
        layer types]`."""
        if self.source is not None:
            return self.source._first
        width = int(self.most.max(initial=0)) + 1
        each = [_first_of(chunks, width, self.types) for chunks in self.chunks]
        blocks, together, others = np.array(each).reshape(-1, 3, width, self.types).swapaxes(0, 1)
        return blocks, together, others

    @cached_property
    def _sums(self) -> Floats:
        """Blocks of all layer types, and those with activations held together, `[2, shapes of pipelines]`."""
        return np.array([(one.blocks, one.together) for one in self.chunks], dtype=float).T

    def taken(self, rows: Integers) -> StageRows:
        """Of some shapes, with what is known of the contents."""
        found = replace(self, which=self.which[rows], source=self.source or self)
        vars(found).update({"most": self.most, "_sums": self._sums})
        if "waiting" in vars(self):
            vars(found)["waiting"] = self.waiting.taken(rows)
        return found

    def blocks(self, repeated: Integers | None = None) -> tuple[Floats, ...]:
        """Blocks of each layer type: all, or only those that are among the first `repeated` of their chunk."""
        if repeated is None and self.types == 1:
            return (self._sums[0][self.which],)
        return self._taken(self._first[0], repeated)

    def held(self, repeated: Integers | None = None) -> tuple[Floats, ...]:
        """The same of blocks whose activations are held together."""
        if repeated is None and self.types == 1:
            return (self._sums[1][self.which],)
        return self._taken(self._first[1], repeated)

    def _taken(self, table: Floats, repeated: Integers | None) -> tuple[Floats, ...]:
        most = table.shape[1] - 1
        place = most if repeated is None else np.minimum(repeated, most)
        return tuple(table[self.which, place].T)

    def kinds(self, program: StepProgram, repeated: Integers | None) -> dict[str, Value]:
        """Symbols of the kinds of block of a program; repeated: where only some blocks repeat, of each chunk."""
        found = self._kinds(program, repeated)
        if program.given.options.splits_backward:
            later = self.waiting._kinds(program, repeated)
            found |= {name.replace("held", "waiting"): value for name, value in later.items() if "held" in name}
            heads = [float(later - ending) for *_, (_, _, later, ending) in (one.chunks for one in self.chunks)]
            found["waiting_head"] = np.array(heads)[self.which]
        return found

    def _kinds(self, program: StepProgram, repeated: Integers | None) -> dict[str, Value]:
        found: dict[str, Value] = {"held": reduce(add, self.held())}
        if len(program.blocks) == 1:
            return found
        for symbol, counts in (("L", self.blocks), ("held", self.held)):
            every, first = counts(), counts(repeated)
            for block in program.blocks:
                own, again = every[block.type], first[block.type]
                kind = {"": own, REPEATING: again, PLAIN_BLOCKS: own - again}[block.given.repeating]
                found[f"{symbol}{block.given.counted}"] = kind
        if program.some:
            others = self._taken(self._first[2], repeated)
            plain = (block for block in program.blocks if block.given.repeating == PLAIN_BLOCKS)
            found |= {f"freed{block.given.counted}": others[block.type] for block in plain}
        return found


@dataclass(frozen=True)
class Shapes:
    """Grids with a micro-batch and chunks of a stage: the grid each belongs to, and its symbols as columns."""

    problem: Problem
    grid: Integers
    micro_batch: Integers
    chunks: Integers
    values: dict[str, Value]

    def __len__(self) -> int:
        return len(self.grid)

    def sizes(self, axis: str) -> Integers:
        """Sizes of an axis."""
        return np.broadcast_to(np.asarray(self.values[axis]), len(self)).astype(np.int64)

    @cached_property
    def stages(self) -> Integers:
        """Pipeline stages."""
        return self.sizes("pipeline")

    @cached_property
    def piped(self) -> Integers:
        """Rows with more than one stage."""
        return np.flatnonzero(self.stages > 1)

    @cached_property
    def known(self) -> KnownSizes:
        """Sizes in memory that all stages of those rows have in common, as far as they were worked out."""
        return KnownSizes()

    @cached_property
    def stage_rows(self) -> tuple[StageRows, ...]:
        """The stages that can need most memory or time: the first, the one after it, the last; where chunks differ in
        layers, also the first one with more layers than that after the first. Of a given layout, all."""
        # Imported here: most searches have no pipeline, and start-up time is theirs.
        from axonn_tune.cost.pipeline import parts_of

        layers, less = self.problem.model.layers, self.problem.framework.step.less
        stages, chunks = self.stages[self.piped], self.chunks[self.piped]
        batches = np.asarray(self.values["A"])[self.piped].astype(np.int64)
        # More micro-batches than in two rounds after the longest warm-up hold no more (`held_of_chunks`).
        counted = np.minimum(batches, 4 * stages)
        _, _, which = distinct((stages * (layers + 1) + chunks) * (4 * layers + 1) + counted)
        _, first, _ = distinct(which)
        given = self.problem.parts
        every = given is not None or len(self.problem.model.types) > 1

        def stages_of(row: int) -> tuple[InFlight, ...]:
            count = int(stages[row])
            split = parts_of(self.problem, count, int(chunks[row]), given)
            parts = contents_of(self.problem.model, split, self.problem.mtp_part)
            ahead = int(self.problem.framework.step.expert_overlap and chunks[row] > 1)
            return _stage_chunks(parts, count, int(counted[row]), ahead, every=every)

        if (order := self.problem.framework.step.pipeline_order) != "1f1b":
            return self._ordered_rows(order, first, which, counted)
        several = any(less) or bool((layers % (stages * chunks))[chunks > 1].any())
        listed = [stages_of(row) for row in first.tolist()]
        wide = max(map(len, listed), default=3) if every else 3 + several
        shown = (FIRST, MIDDLE, LAST, *[MIDDLE] * (wide - 3))
        # Where there are fewer, the last of them again.
        found = list(zip(*((*one, *one[-1:] * wide)[:wide] for one in listed), strict=True)) or [()] * len(shown)
        types = len(self.problem.model.types)
        return tuple(StageRows(stage, found[place], which, types) for place, stage in enumerate(shown))

    def _ordered_rows(
        self, order: PipelineOrder, first: Integers, which: Integers, batches: Integers
    ) -> tuple[StageRows, ...]:
        """The same of an order of passes that splits them: every kind of stage with all that it may hold at most.

        first: rows of shapes that differ, of those with stages; which: of these each one is like."""
        # Imported here: most searches split no backward pass, and start-up time is theirs.
        from axonn_tune.cost.pipeline import parts_of

        problem, types = self.problem, len(self.problem.model.types)
        stages, chunks = self.stages[self.piped], self.chunks[self.piped]
        listed = list[dict[tuple[Stage, During], list[InFlight]]]()
        for row in first.tolist():
            count = int(stages[row])
            split = parts_of(problem, count, int(chunks[row]), problem.parts)
            parts = contents_of(problem.model, split, problem.mtp_part)
            listed.append(_ordered_stages(parts, count, int(batches[row]), order))
        found = list[StageRows]()
        for stage, during in dict.fromkeys(one for each in listed for one in each):
            # Where there are fewer, or none of these stages, others again.
            each = [
                one.get((stage, during)) or next(held for (_, kind), held in one.items() if kind == during)
                for one in listed
            ]
            wide = max(map(len, each))
            columns = zip(*((*one, *one[-1:] * wide)[:wide] for one in each), strict=True)
            found += [StageRows(stage, column, which, types, during) for column in columns]
        return tuple(found)

    @cached_property
    def priced_stages(self) -> tuple[tuple[StageRows, dict[str, Value]], ...]:
        """Those stages with their symbols, which are the same for all kinds of recompute, and of stages that differ in
        nothing but what they hold."""
        every, known = np.arange(len(self.piped)), dict[Hashable, dict[str, Value]]()
        found = list[tuple[StageRows, dict[str, Value]]]()
        for one in self.stage_rows:
            blocks = one.blocks()
            key = one.stage, *(each.tobytes() for each in blocks)
            if key not in known:
                known[key] = self.stage_values(one.stage, blocks, every)
            found.append((one, {**known[key], "held": reduce(add, one.held())}))
        return tuple(found)

    def taken(self, rows: Integers, *, chunks: Integers | None = None) -> Shapes:
        """The shapes of some rows, with other chunks if given: symbols of a rank with all blocks do not depend on them,
        but what stages have does."""
        values = {name: _taken(value, rows) for name, value in self.values.items()}
        own = self.chunks[rows] if chunks is None else chunks
        found = Shapes(self.problem, self.grid[rows], self.micro_batch[rows], own, values)
        if chunks is None and "stage_rows" in vars(self):
            place = np.zeros(len(self), dtype=np.int64)
            place[self.piped] = np.arange(len(self.piped))
            vars(found)["stage_rows"] = tuple(one.taken(place[rows[found.piped]]) for one in self.stage_rows)
        return found

    def of(self, problem: Problem) -> Shapes:
        """The same of another problem, whose stages hold other micro-batches."""
        return Shapes(problem, self.grid, self.micro_batch, self.chunks, self.values)

    def with_more(self, more: Shapes) -> Shapes:
        """These and then others."""

        def joined(one: Any, other: Any) -> Any:  # noqa: ANN401 - a number or column
            return one if isinstance(one, float) else np.concatenate((one, other))

        values = {name: joined(value, more.values[name]) for name, value in self.values.items()}
        names = ("grid", "micro_batch", "chunks")
        grid, micro_batch, chunks = (joined(getattr(self, name), getattr(more, name)) for name in names)
        return Shapes(self.problem, grid, micro_batch, chunks, values)

    def stage_values(self, stage: Stage, layers: tuple[Floats, ...], among: Integers) -> dict[str, Value]:
        """Symbols of one stage of shapes with several, given its blocks of each type; among: which of those shapes."""
        rows = self.piped[among]
        axes = {axis: _taken(self.values[axis], rows) for axis in (*ALL_AXES, "b")}
        # That symbol is of all ranks that shard experts, those of the folding, too; the axis itself is never searched.
        axes["expert_z"] = float(self.problem.request.axes.get("expert_z", 1))
        return dimensions(
            self.problem.model,
            self.problem.workload,
            axes,
            chunks=_taken(self.values["C"], rows),
            arithmetic=COLUMNS,
            options=step_on(self.problem.framework, self.problem.machine, self.problem.workload.precision),
            stage=stage,
            layers=layers,
        )


MOST_CANDIDATES = 10_000_000
"""Candidates of one search, each of which takes some 350 bytes."""


def require_searchable(candidates: int) -> None:
    """UsageError for more candidates than are held in memory at once."""
    if candidates > MOST_CANDIDATES:
        raise UsageError(
            f"there are {candidates:,} candidates or more, and up to {MOST_CANDIDATES:,} are searched: pin axes, the "
            "micro-batch, --recompute or --order, or give a batch with fewer divisors"
        )


def list_shapes(grids: Grids, problem: Problem) -> Shapes:
    """Every sound grid with every micro-batch that divides its share of the batch (and what is pinned); only even
    micro-batches with two-batch overlap."""
    request, sound = problem.request, grids.sound_as_asked(problem)
    share, chosen = _micro_batches(grids, problem, sound)
    counts = np.array([len(sizes) for sizes in chosen], dtype=np.int64)
    require_searchable(int(counts.sum()) * len(problem.tried(every=False)))
    grid = np.repeat(sound, counts)
    micro_batch = np.array([size for sizes in chosen for size in sizes], dtype=np.int64)
    chunks = np.ones(len(grid), dtype=np.int64)
    if problem.parts is not None:
        grid, micro_batch, chunks = _with_layout(grids, problem, grid, micro_batch, np.repeat(share, counts))
    elif "pipeline" in grids.axes:
        grid, micro_batch, chunks = _with_chunks(grids, problem, grid, micro_batch, np.repeat(share, counts))
    elif request.chunks not in (None, 1):
        grid, micro_batch, chunks = grid[:0], micro_batch[:0], chunks[:0]
    shapes = Shapes(problem, grid, micro_batch, chunks, _values(grids, problem, grid, micro_batch))
    kept = as_asked(shapes)
    kept[divisible(shapes)] = True
    return shapes if kept.all() else shapes.taken(np.flatnonzero(kept))


def _micro_batches(grids: Grids, problem: Problem, rows: Integers) -> tuple[Integers, list[list[int]]]:
    """Share of the batch of some grids, and the micro-batches that are tried of each."""
    step, asked = 2 if problem.workload.split_micro_batch else 1, problem.request.micro_batch
    if problem.workload.lengths is not None and problem.workload.lengths.packing == "packed":
        asked = 1 if problem.framework.packs_alone else asked
    shares = np.prod([grids.column(axis)[rows] for axis in BATCH_AXES if axis in grids.axes], axis=0, dtype=np.int64)
    share = problem.workload.global_batch // shares
    options = {
        count: [size for size in divisors(count) if size % step == 0 and asked in (None, size)]
        for count in distinct(share)[0].tolist()
    }
    return share, [options[count] for count in share.tolist()]


def without_shape(grids: Grids, problem: Problem, rows: Integers) -> dict[str, Integers]:
    """Of some grids that have no shape those that have none for each reason."""
    divided = np.array([len(sizes) > 0 for sizes in _micro_batches(grids, problem, rows)[1]], dtype=np.bool_)
    free = problem.request.chunks in (None, 1) and problem.parts is None
    asked = divided & (not (free and problem.framework.step.expert_overlap))
    return {MICRO_BATCH: rows[~divided], CHUNKS: rows[asked], EXPERT_OVERLAP: rows[divided & ~asked]}


def _values(grids: Grids, problem: Problem, grid: Integers, micro_batch: Integers) -> dict[str, Value]:
    """Symbols of a rank that has all blocks; those of a pipeline stage follow from them."""
    axes: dict[str, Value] = {axis: 1.0 for axis in ALL_AXES if axis not in grids.axes}
    axes |= {axis: grids.column(axis)[grid].astype(np.float64) for axis in grids.axes}
    axes["b"] = micro_batch.astype(np.float64)
    chunks: Value = float(problem.framework.step.loss_chunks)
    if not chunks:
        tokens = micro_batch * problem.workload.sequence_length // np.asarray(axes["context"]).astype(np.int64)
        lengths, _, inverse = distinct(tokens)
        chunks = np.array([loss_chunks(int(length)) for length in lengths], dtype=np.float64)[inverse]
    options = step_on(problem.framework, problem.machine, problem.workload.precision)
    return dimensions(problem.model, problem.workload, axes, chunks=chunks, arithmetic=COLUMNS, options=options)


_MOST_CHUNKS = 8
"""Chunks of a stage that are tried for models of several layer types."""


def _with_chunks(
    grids: Grids, problem: Problem, grid: Integers, micro_batch: Integers, share: Integers
) -> tuple[Integers, Integers, Integers]:
    """Every shape with every number of chunks per stage that is asked for, or that makes chunks of as many layers;
    `with_uneven_chunks` has the others. Interleaved micro-batches go in groups."""
    asked, step, model = problem.request.chunks, problem.framework.step, problem.model
    counted, most = model.layers + sum(step.less), step.most_parts(len(model.starts))
    stages, batches = grids.column("pipeline")[grid], share // micro_batch
    kept = [np.arange(len(grid) if asked in (None, 1) else 0)]
    counts = [np.ones(len(kept[0]), dtype=np.int64)]
    if problem.framework.schedule.interleaved:
        several = len(model.types) > 1 and not problem.framework.schedule.equal_chunks
        for chunks in divisors(counted)[1:] * (not several) if asked is None else [asked] * (asked > 1):
            equal = asked is None or bool(problem.framework.schedule.equal_chunks)
            cut = (counted % (stages * chunks) == 0) | (not equal)
            fits = (stages > 1) & cut & (stages * chunks <= most) & (batches % stages == 0)
            kept.append(np.flatnonzero(fits))
            counts.append(np.full(len(kept[-1]), chunks, dtype=np.int64))
    rows = np.concatenate(kept)
    return grid[rows], micro_batch[rows], np.concatenate(counts)


def _with_layout(
    grids: Grids, problem: Problem, grid: Integers, micro_batch: Integers, share: Integers
) -> tuple[Integers, Integers, Integers]:
    """Shapes with the chunks that make the parts of the layout that is asked for."""
    layout, asked = problem.pipeline_layout, problem.request.chunks
    assert layout is not None, "asked before"
    count, stages, batches = len(layout.parts), grids.column("pipeline")[grid], share // micro_batch
    chunks = count // stages
    fits = ((chunks == asked) | (asked is None)) & ((chunks == 1) | (batches % stages == 0))
    # MTP layers are in the last chunk of their stage.
    rows = np.flatnonzero(fits & ((count if layout.mtp_part is None else layout.mtp_part) >= count - stages))
    return grid[rows], micro_batch[rows], chunks[rows]


def with_all_chunks(shapes: Shapes) -> Shapes:
    """Shapes, and those of one chunk a stage cut into several that differ in layers, where the search may choose."""
    rows = divisible(shapes)
    return shapes.with_more(with_uneven_chunks(shapes, rows)[0]) if len(rows) else shapes


def as_asked(shapes: Shapes) -> NDArray[np.bool_]:
    """Shapes that run as it is asked: expert overlap needs interleaved stages where there are several."""
    step, single = shapes.problem.framework.step, shapes.stages == 1
    if step.splits_backward:
        batches, pipes = np.broadcast_to(np.asarray(shapes.values["A"]), len(shapes)), shapes.stages
        enough = batches >= pipes * (1 + (step.pipeline_order == "dualpipe-v"))
        least, most = (2, 2) if step.pipeline_order in FOLDED else shapes.problem.framework.schedule.zb1p_chunks
        cut = (shapes.chunks >= least) & (shapes.chunks <= most)
        return np.asarray(~single & enough & cut)
    found: NDArray[np.bool_] = single | (shapes.chunks > 1) | (not step.expert_overlap)
    return found


def divisible(shapes: Shapes) -> Integers:
    """Shapes of one chunk a stage that the search may cut into several that differ in layers."""
    problem, rows = shapes.problem, shapes.piped
    schedule, layers = problem.framework.schedule, problem.framework.step.most_parts(len(problem.model.starts))
    given = problem.request.chunks is not None or problem.parts is not None
    if given or not schedule.interleaved or schedule.equal_chunks:
        return rows[:0]
    stages, batches = shapes.stages[rows], np.broadcast_to(np.asarray(shapes.values["A"]), len(shapes))[rows]
    found: Integers = rows[(shapes.chunks[rows] == 1) & (layers // stages > 1) & (batches % stages == 0)]
    return found


def with_uneven_chunks(shapes: Shapes, rows: Integers) -> tuple[Shapes, Integers]:
    """Shapes of one chunk a stage with every number of chunks as of `uneven_chunks`; and which of `rows` each was."""
    whole, chunks = uneven_chunks(shapes, rows)
    return shapes.taken(rows[whole], chunks=chunks), whole


def uneven_chunks(shapes: Shapes, rows: Integers) -> tuple[Integers, Integers]:
    """Numbers of chunks that differ in layers, of several layer types all, of shapes of one chunk a stage: which of
    `rows` each is of, and the number."""
    layers, stages, step = shapes.problem.model.layers, shapes.stages[rows], shapes.problem.framework.step
    most, several = step.most_parts(len(shapes.problem.model.starts)), len(shapes.problem.model.types) > 1
    counts = np.maximum(most // stages - 1, 0)
    counts = np.minimum(counts, _MOST_CHUNKS - 1) if several else counts
    chunks = 2 + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    uneven = np.flatnonzero((layers + sum(step.less)) % (np.repeat(stages, counts) * chunks) + several)
    return np.repeat(np.arange(len(rows)), counts)[uneven], chunks[uneven]


@lru_cache(maxsize=4096)
def _stage_chunks(
    parts: tuple[Contents, ...], stages: int, micro_batches: int, ahead: int = 0, *, every: bool = False
) -> tuple[InFlight, ...]:
    """A first stage, the one after it, the last, and the first one between that has more layers than that.

    Later ones of as many layers hold no more. every: where stages are not that alike, instead of the last of these the
    first between with each contents: later ones of the same hold no more. ahead: forwards beyond the warm-up.
    """
    # Imported here: most searches have no pipeline stages, and start-up time is theirs.
    from axonn_tune.program.pipeline import held_of_chunks

    each = [parts[stage::stages] for stage in range(stages)]
    counts = [tuple(map(blocks_in, chunks)) for chunks in each]
    after = min(1, stages - 1)
    more = next((stage for stage in range(1, stages - 1) if sum(counts[stage]) > sum(counts[after])), after)
    others = [stage for stage in range(2, stages - 1) if each[stage] not in each[1:stage]] if every else [more]

    def chunks_of(stage: int) -> InFlight:
        held = held_of_chunks(stage, stages=stages, micro_batches=micro_batches, weights=counts[stage], more=ahead)
        return InFlight.of(tuple((one, batches, 0, 0) for one, batches in zip(each[stage], held, strict=True)))

    return tuple(map(chunks_of, (0, after, stages - 1, *(others or [after]))))


@lru_cache(maxsize=4096)
def _first_of(stage: InFlight, width: int, types: int) -> Floats:
    """Of the first k blocks of each chunk of a stage, as of `StageRows`, `[3, k, layer types]`."""
    blocks, together, others = found = np.zeros((3, width, types))
    others += np.inf
    alike = dict[Contents, list[int]]()
    for contents, held, _, ending in stage.chunks:
        alike.setdefault(contents, []).append(held)
        if contents:
            together[1:, contents[0][0]] += ending
    for contents, each in alike.items():
        of_type = np.repeat(*np.array(contents, dtype=np.int64).reshape(-1, 2).T)
        first = np.zeros((width, types))
        first[1 : len(of_type) + 1] = of_type[:, None] == np.arange(types)
        first = first.cumsum(axis=0)
        blocks += len(each) * first
        together += sum(each) * first
        np.minimum(others, first[-1] - first, out=others)
    return found


@lru_cache(maxsize=4096)
def _ordered_stages(
    parts: tuple[Contents, ...], stages: int, micro_batches: int, order: PipelineOrder
) -> dict[tuple[Stage, During], list[InFlight]]:
    """What stages hold at most in an order of passes, by their places and the kind of operation: of alike ones what
    none holds more of."""
    # Imported here: most searches split no backward pass, and start-up time is theirs.
    from axonn_tune.program.schedules import stage_held, undominated

    found = dict[tuple[Stage, During], list[InFlight]]()
    for (stage, contents), numbers in stages_alike(parts, stages, order).items():
        shape = {"stages": stages, "chunks": len(contents), "micro_batches": micro_batches}
        every = undominated(one for number in numbers for one in stage_held(order, number, **shape))
        for one in every:
            if one.kind != "F" or stage.last:
                chunks = tuple(zip(contents, one.whole, one.waiting, one.ending, strict=True))
                found.setdefault((stage, one.kind), []).append(InFlight.of(chunks))
    return found


def _taken(value: Value, rows: Integers) -> Value:
    return value if isinstance(value, float) else value[rows]


def pairs_of(shapes: Shapes) -> tuple[Integers, Integers]:
    """A shape of each pair of grid and micro-batch, and the pair of each shape, by its number."""
    _, first, number = distinct(pair_keys(shapes))
    return first, number


def pair_keys(shapes: Shapes) -> Integers:
    """Grid and micro-batch of each shape as one number, in the order of pairs."""
    return np.asarray(shapes.grid << 32 | shapes.micro_batch)
