"""The search space: grids, then shapes (grid with micro-batch and chunks), then candidates (with rank order).

Grids that violate a constraint are rejected first, and only micro-batches that divide are listed. Memory is checked
before rank orders, since it does not depend on them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import Candidates, Floats, Integers, RouteTable, distinct
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import step_on
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.grid import (
    ALL_AXES,
    AXES,
    BATCH_AXES,
    EXPERT_AXES,
    EXPERT_GROUPS,
    RANK_AXES,
    WORLD,
    Folding,
    GroupShape,
    distinct_orders,
    divisors,
    expert_levels,
    factorizations,
    level_of,
    merged_shape,
    split_axes,
)
from axonn_tune.job import Job
from axonn_tune.program.dimensions import (
    CHUNKS,
    EXPERT_OVERLAP,
    MICRO_BATCH,
    Constraint,
    constraints,
    dimensions,
    loss_chunks,
)
from axonn_tune.program.memory import KnownSizes, Memory, memory_limit_bytes, price_memory
from axonn_tune.program.operations import COLUMNS, PLAIN_BLOCKS, REPEATING, Sent, Value
from axonn_tune.program.schedule import blocks_by_kind, kept_by_kind
from axonn_tune.program.step import (
    FIRST,
    LAST,
    MIDDLE,
    Contents,
    Stage,
    StepProgram,
    as_runs,
    blocks_in,
    contents_of,
)
from axonn_tune.recompute import RECOMPUTES, Recompute, modules_of, needed_by
from axonn_tune.request import NO_REQUEST, RankBy, Request
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import AUTO, Precision

if TYPE_CHECKING:
    from axonn_tune.stages import PipelineLayout


@dataclass(frozen=True, kw_only=True, repr=False)
class Problem(Job):
    """A job and what of its layouts is searched.

    request: its pins restrict the layouts. rank_by, pipeline: the criterion, and whether pipeline stages are part of
    the search, as decided where the request leaves them to the framework, or another search is made of the same.
    compares_expert_overlap: whether layouts with expert overlap are compared with those without. machine_assumed:
    nobody named the machine.
    """

    gpus: int
    request: Request = NO_REQUEST
    rank_by: RankBy = "communication"
    pipeline: bool = False
    compares_expert_overlap: bool = False
    machine_assumed: bool = False

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """Recompute sets to try, those with a GEMM first on some blocks, where the framework can say so: what others
        repeat takes little time. Whole blocks are not tried where CUDA graphs capture layers, which excludes it."""
        request, found = self.request, list[Variant]()
        asked = request.recompute_layers
        sets = [one for one in self.framework.recompute_sets if {*needed_by(one)} <= {*self.model.parts}]
        named = sets if request.recompute is None else (request.recompute,)
        for precision, recompute in itertools.product(self.formats or (None,), named):
            if request.recompute is None and recompute == "full" and request.graphed_layers:
                continue
            costly = recompute == "full" or "mlp" in modules_of(recompute)
            costly = costly and self.framework.searches_some
            tried = recompute != "none" if asked else costly and request.recompute is None
            if tried and not self.framework.cannot_recompute(recompute, 1):
                found.append(Variant(recompute, some=True, precision=precision))
            if asked is None or recompute == "none":
                found.append(Variant(recompute, precision=precision))
        return tuple(found)

    @cached_property
    def formats(self) -> tuple[Precision, ...]:
        """Number formats that the search compares, BF16 first; none where one is given."""
        if self.request.precision != AUTO:
            return ()
        peaks = self.machine.accelerator.peak_tflops
        left_out = self.framework.older_formats
        return ("bf16", *(name for name in self.framework.formats if name in peaks and name not in left_out))

    def within(self, precision: Precision | None) -> Problem:
        """The problem in one of them."""
        if precision in (None, self.workload.precision):
            return self
        return replace(self, workload=self.workload.model_copy(update={"precision": precision}))

    def tried(self, *, every: bool) -> list[Variant]:
        """Recompute sets that are tried on every shape; every: of a search that lists all candidates."""
        return [one for one in self.variants if every or self.tries_always(one)]

    def tries_always(self, variant: Variant) -> bool:
        """Whether a recompute set is tried on every shape, and not only where no less fits."""
        asked = self.request.recompute is not None or self.request.graphed_layers
        first = variant.precision in (None, *self.formats[:1])
        return first and not variant.some and (asked or variant.recompute in RECOMPUTES)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes that are searched."""
        return self.framework.searched_axes(pipeline=self.pipeline)

    @cached_property
    def pipeline_layout(self) -> PipelineLayout | None:
        """The layout that is asked for; UsageError if it is none of the model with the pinned stages."""
        text, model = self.request.pipeline_layout, self.model
        if text is None:
            return None
        # Imported here: most searches are given none, and start-up time is theirs.
        from axonn_tune.stages import parse_layout

        return parse_layout(text, stages=self.request.axes.get("pipeline"), layers=model.layers, mtp=model.mtp_layers)

    @property
    def parts(self) -> tuple[int, ...] | None:
        """Layers of each model part of the layout that is asked for."""
        return self.pipeline_layout and self.pipeline_layout.parts

    @property
    def splits(self) -> bool:
        """Whether splits of the layers by time are searched: the framework can be told one, and is not yet."""
        schedule, searched = self.framework.schedule, self.pipeline and self.rank_by == "iteration"
        free = schedule.layouts and schedule.uneven and not schedule.equal_chunks
        return searched and free and self.parts is None

    @property
    def mtp_part(self) -> int | None:
        """Its part with the MTP layers; None: the last."""
        return self.pipeline_layout and self.pipeline_layout.mtp_part

    @cached_property
    def by_exchange(self) -> tuple[Problem, ...]:
        """The problem with each exchange of context parallelism that the search compares, the framework's own first.

        An all-gather sends as much as a ring and overlaps with nothing: it is there where windows forbid the ring. Of
        hierarchies there is one a size of the inner groups (`exchange_grids`).
        """
        framework, pinned = self.framework, self.request.axes.get("context") == 1
        if not framework.exchanges or pinned or "context" not in self.axes:
            return (self,)
        windowed, node = any(layer.window for layer in self.model.types), self.machine.tiers[0].ranks or 1
        names = [name for name in framework.exchanges if name != "all_gather" or windowed]
        steps = [
            framework.with_step(context_exchange=name, context_inside=count)
            for name in dict.fromkeys((framework.step.context_exchange, *names))
            for count in (divisors(node)[1:] if name == "hierarchical" else (framework.step.context_inside,))
        ]
        return tuple(replace(self, framework=one) for one in steps)

    @cached_property
    def by_dispatcher(self) -> tuple[Problem, ...]:
        """The problem with each dispatcher that some grid is tried with (`dispatcher_grids`)."""
        if not self.framework.dispatchers or "expert" not in self.axes:
            return (self,)
        domain, some = self.machine.tiers[0].ranks, ((1, 1), (1, self.gpus), (self.gpus, 1))
        each = (self.framework.compared_dispatchers(*sizes, domain) for sizes in some)
        names = dict.fromkeys(itertools.chain.from_iterable(each))
        return tuple(replace(self, framework=self.framework.with_step(dispatcher=name)) for name in names)

    @property
    def with_expert_overlap(self) -> Problem:
        """The problem with expert overlap."""
        return replace(self, framework=self.framework.with_step(expert_overlap=True))

    @cached_property
    def orders(self) -> tuple[tuple[str, ...], ...]:
        """Every rank order that may be tried, each of all axes; pipeline stages are outermost."""
        if self.request.order is not None:
            named = self.request.order
            return ((*named, *(axis for axis in self.axes if axis in RANK_AXES and axis not in named)),)
        if self.framework.permuted:
            inner, outer = permuted_axes(self.axes)
            return tuple((*order, *outer) for order in itertools.permutations(inner))
        axes = [axis for axis in self.axes if axis in RANK_AXES]
        order = tuple(axis for axis in self.framework.axes if axis in axes)
        return ((*order, *(axis for axis in axes if axis not in order)),)


def permuted_axes(axes: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Axes whose ranks may be in any order, and those outside them: pipeline stages."""
    ranked = [axis for axis in axes if axis in RANK_AXES]
    outer = tuple(axis for axis in ranked if axis == "pipeline")
    return tuple(axis for axis in ranked if axis not in outer), outer


@dataclass(frozen=True)
class Grids:
    """Every ordered factorization `sizes[n, axes]`, and its violated constraints `broken[n, constraints]`."""

    axes: tuple[str, ...]
    sizes: Integers
    constraints: tuple[Constraint, ...]
    broken: NDArray[np.bool_]

    @property
    def sound(self) -> Integers:
        """Rows of the grids without violations."""
        return np.flatnonzero(~self.broken.any(axis=1))

    def sound_as_asked(self, problem: Problem) -> Integers:
        """Rows of the grids with the pinned axis sizes, and with stages that have the parts of the given layout."""
        rows, parts, schedule = self.sound, problem.parts, problem.framework.schedule
        for axis, size in problem.request.axes.items():
            if axis in self.axes:
                rows = rows[self.column(axis)[rows] == size]
        if parts is not None:
            stages = self.column("pipeline")[rows]
            looped = schedule.interleaved and not (schedule.equal_chunks and len(set(parts)) > 1)
            rows = rows[(stages == len(parts)) | ((stages > 1) & (len(parts) % stages == 0) & looped)]
        return rows

    def column(self, axis: str) -> Integers:
        """Sizes of one axis."""
        return self.sizes[:, self.axes.index(axis)]


def exchange_grids(problem: Problem, grids: Grids) -> NDArray[np.bool_]:
    """Grids for which the search compares the exchange of `problem`, those with context parallelism.

    All-to-alls are compared where they send less than a ring or an all-gather, 2·(N + O) bytes a token and 3·(N - Q) a
    rank: those overlap, or take no longer a byte. Of a hierarchy they fill a node, and a ring goes across nodes
    (arXiv 2603.07685, section 6.3).
    """
    columns, step = {axis: grids.column(axis) for axis in grids.axes}, problem.framework.step
    context = columns["context"]
    found: NDArray[np.bool_] = (context > 1) & ~list_grids(problem).broken.any(axis=1)
    if step.context_exchange in ("all_to_all", "hierarchical"):
        layers = [layer for layer in problem.model.types if layer.attention]
        swapped = [2.0 * (one.qkv_width + one.value_width) / (one.qkv_width - one.query_width) for one in layers]
        found &= 3.0 * context > min(swapped, default=math.inf)
    if step.context_exchange == "hierarchical":
        order = problem.orders[0]
        ranks = np.prod([columns[axis] for axis in order[: order.index("context")]], axis=0, dtype=np.int64)
        found &= (ranks * step.context_inside == problem.machine.tiers[0].ranks) & (context > step.context_inside)
    return found


def dispatcher_grids(problem: Problem, grids: Grids, dispatcher: str) -> NDArray[np.bool_]:
    """Grids that are tried with a dispatcher."""
    experts, domain = grids.column("expert"), problem.machine.tiers[0].ranks
    tensor = grids.column("expert_tensor") if "expert_tensor" in grids.axes else np.ones_like(experts)
    _, first, number = distinct(experts << 32 | tensor)
    several = zip(experts[first].tolist(), tensor[first].tolist(), strict=True)
    compared = [problem.framework.compared_dispatchers(*sizes, domain) for sizes in several]
    return np.array([dispatcher in names for names in compared])[number]


def sound_sizes(gpus: int, model: Model, workload: Workload) -> Integers:
    """Sizes `[n, 4]` of the 4D grids of a GPU count that break no divisibility constraint."""
    sizes = factorizations(gpus)
    columns = dict.fromkeys(ALL_AXES, np.ones(len(sizes), dtype=np.int64)) | dict(zip(AXES, sizes.T, strict=True))
    broken = [check.broken(columns) for check in constraints(model, workload, AXONN_TUNE)]
    found: Integers = sizes[~np.any(broken, axis=0)]
    return found


def list_grids(problem: Problem) -> Grids:
    """All grids of a GPU count, with the divisibility constraints applied."""
    had = tuple(axis for axis in problem.axes if axis in problem.framework.axes and axis not in EXPERT_AXES)
    found = factorizations(problem.gpus, axes=len(had))
    sizes = np.ones((len(found), len(problem.axes)), dtype=np.int64)
    sizes[:, [problem.axes.index(axis) for axis in had]] = found
    if "expert" in problem.axes:
        sizes = _with_experts(problem, sizes)
    columns = dict(zip(problem.axes, sizes.T, strict=True))
    columns |= {axis: np.ones(len(sizes), dtype=np.int64) for axis in ALL_AXES if axis not in columns}
    checks = constraints(problem.model, problem.workload, problem.framework)
    broken = np.stack([check.broken(columns) for check in checks], axis=1)
    return Grids(problem.axes, sizes, checks, broken)


def _with_experts(problem: Problem, sizes: Integers) -> Integers:
    """Grids with every size of the axes of experts: each divisor of the experts, each expert whole or split over x.

    Those that the ranks cannot be folded into are left out, unless asked for. Where every rank of x has all tokens, x
    splits experts as it does other matrices.
    """
    folding, pins, model = problem.framework.step.folding, problem.request.axes, problem.model
    experts = math.gcd(*(layer.experts.count for layer in model.types if layer.experts is not None))
    each = np.array([pins["expert"]] if "expert" in pins else divisors(experts), dtype=np.int64)
    x = sizes[:, problem.axes.index("x")]
    splits = [np.ones_like(x)]
    if "expert_tensor" in pins:
        splits = [np.full_like(x, pins["expert_tensor"])]
    elif problem.framework.step.sequence_parallel:
        splits = [np.ones_like(x), np.where(x > 1, x, 0)]
    alone = problem.framework.tensor_without_expert and "expert_tensor" not in pins
    over = [problem.axes.index(axis) for axis in (*folding.shards, *folding.replicas) if axis in problem.axes]
    found = []
    for split in splits:
        rows, count = np.repeat(sizes, len(each), axis=0), np.tile(each, len(sizes))
        tensor = np.repeat(split, len(each))
        for axis, column in (("expert", count), ("expert_tensor", tensor)):
            if axis in problem.axes:
                rows[:, problem.axes.index(axis)] = column
        shards = pins.get("expert_z", 1)
        if "expert_z" in problem.axes:
            rows[:, problem.axes.index("expert_z")] = shards
        fits = rows[:, over].prod(axis=1) % np.maximum(count * tensor * shards, 1) == 0
        possible = ((count > 1) != (tensor > 1)) | (np.repeat(x, len(each)) == 1) | (not alone)
        asked = "expert" in pins or (not fits.any() and not pins.keys().isdisjoint(EXPERT_AXES))
        found.append(rows[(tensor > 0) & possible & (fits | asked)])
    return np.concatenate(found)


class Variant(NamedTuple):
    """A recompute set on all blocks, or on as few of the first blocks of each chunk as memory needs; and the number
    format, where several are compared."""

    recompute: Recompute
    some: bool = False
    precision: Precision | None = None


InFlight: TypeAlias = tuple[tuple[Contents, int], ...]
"""Blocks of each chunk of a stage, and of how many micro-batches it holds activations when the stage holds most."""


@dataclass(frozen=True)
class StageRows:
    """One stage of every shape with several: its place, and by number of a shape of a pipeline what is in it.

    which: that number of each shape; types: number of layer types.
    """

    stage: Stage
    chunks: tuple[InFlight, ...]
    which: Integers
    types: int

    @cached_property
    def most(self) -> Integers:
        """Blocks of its largest chunk."""
        return np.array([max(blocks_in(one) for one, _ in chunks) for chunks in self.chunks], dtype=np.int64)

    @cached_property
    def _first(self) -> tuple[Floats, Floats, Floats]:
        """Of the first k blocks of each chunk, k from 0: how many there are of each layer type, how many with
        activations held together, and how many others the chunk has that has fewest of them, `[shapes of pipelines, k,
        layer types]`."""
        blocks, together = np.zeros((2, len(self.chunks), int(self.most.max(initial=0)) + 1, self.types))
        others = np.full_like(blocks, np.inf)
        firsts = dict[Contents, Floats]()
        for number, chunks in enumerate(self.chunks):
            alike = dict[Contents, list[int]]()
            for contents, held in chunks:
                alike.setdefault(contents, []).append(held)
            for contents, each in alike.items():
                if contents not in firsts:
                    of_type = np.repeat(*np.array(contents, dtype=np.int64).reshape(-1, 2).T)
                    counts = np.zeros((blocks.shape[1], self.types))
                    counts[1 : len(of_type) + 1] = of_type[:, None] == np.arange(self.types)
                    firsts[contents] = counts.cumsum(axis=0)
                first = firsts[contents]
                blocks[number] += len(each) * first
                together[number] += sum(each) * first
                others[number] = np.minimum(others[number], first[-1] - first)
        return blocks, together, others

    def taken(self, rows: Integers) -> StageRows:
        """Of some shapes, with what is known of the contents."""
        found = replace(self, which=self.which[rows])
        vars(found).update({"most": self.most, "_first": self._first})
        return found

    def blocks(self, repeated: Integers | None = None) -> tuple[Floats, ...]:
        """Blocks of each layer type: all, or only those that are among the first `repeated` of their chunk."""
        return self._taken(self._first[0], repeated)

    def held(self, repeated: Integers | None = None) -> tuple[Floats, ...]:
        """The same of blocks whose activations are held together."""
        return self._taken(self._first[1], repeated)

    def _taken(self, table: Floats, repeated: Integers | None) -> tuple[Floats, ...]:
        most = table.shape[1] - 1
        place = most if repeated is None else np.minimum(repeated, most)
        return tuple(table[self.which, place].T)

    def kinds(self, program: StepProgram, repeated: Integers | None) -> dict[str, Value]:
        """Symbols of the kinds of block of a program; repeated: where only some blocks repeat, of each chunk."""
        found: dict[str, Value] = {"held": _sum(self.held())}
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


def _sum(columns: Sequence[Floats]) -> Floats:
    total = columns[0]
    for column in columns[1:]:
        total = total + column
    return total


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
        # More micro-batches than in two rounds after the longest warm-up hold no more (`program.pipeline.in_flight`).
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

        several = any(less) or bool((layers % (stages * chunks))[chunks > 1].any())
        listed = [stages_of(row) for row in first.tolist()]
        wide = max(map(len, listed), default=3) if every else 3 + several
        shown = (FIRST, MIDDLE, LAST, *[MIDDLE] * (wide - 3))
        # Where there are fewer, the last of them again.
        found = list(zip(*((*one, *one[-1:] * wide)[:wide] for one in listed), strict=True)) or [()] * len(shown)
        types = len(self.problem.model.types)
        return tuple(StageRows(stage, found[place], which, types) for place, stage in enumerate(shown))

    @cached_property
    def priced_stages(self) -> tuple[tuple[StageRows, dict[str, Value]], ...]:
        """Those stages with their symbols, which are the same for all kinds of recompute."""
        every = np.arange(len(self.piped))
        return tuple(
            (one, {**self.stage_values(one.stage, one.blocks(), every), "held": _sum(one.held())})
            for one in self.stage_rows
        )

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
    asked, step, layers = problem.request.chunks, problem.framework.step, problem.model.layers
    counted = layers + sum(step.less)
    stages, batches = grids.column("pipeline")[grid], share // micro_batch
    kept = [np.arange(len(grid) if asked in (None, 1) else 0)]
    counts = [np.ones(len(kept[0]), dtype=np.int64)]
    if problem.framework.schedule.interleaved:
        several = len(problem.model.types) > 1 and not problem.framework.schedule.equal_chunks
        for chunks in divisors(counted)[1:] * (not several) if asked is None else [asked] * (asked > 1):
            equal = asked is None or bool(problem.framework.schedule.equal_chunks)
            cut = (counted % (stages * chunks) == 0) | (not equal)
            fits = (stages > 1) & cut & (stages * chunks <= step.most_parts(layers)) & (batches % stages == 0)
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
    overlap = shapes.problem.framework.step.expert_overlap
    found: NDArray[np.bool_] = (shapes.stages == 1) | (shapes.chunks > 1) | (not overlap)
    return found


def divisible(shapes: Shapes) -> Integers:
    """Shapes of one chunk a stage that the search may cut into several that differ in layers."""
    problem, rows = shapes.problem, shapes.piped
    schedule, layers = problem.framework.schedule, problem.framework.step.most_parts(problem.model.layers)
    given = problem.request.chunks is not None or problem.parts is not None
    if given or not schedule.interleaved or schedule.equal_chunks:
        return rows[:0]
    stages, batches = shapes.stages[rows], np.broadcast_to(np.asarray(shapes.values["A"]), len(shapes))[rows]
    found: Integers = rows[(shapes.chunks[rows] == 1) & (layers // stages > 1) & (batches % stages == 0)]
    return found


def with_uneven_chunks(shapes: Shapes, rows: Integers) -> tuple[Shapes, Integers]:
    """Shapes of one chunk a stage with every number of chunks that differ in layers, of several layer types all; and
    which of `rows` each was."""
    layers, stages, step = shapes.problem.model.layers, shapes.stages[rows], shapes.problem.framework.step
    counts, several = np.maximum(step.most_parts(layers) // stages - 1, 0), len(shapes.problem.model.types) > 1
    counts = np.minimum(counts, _MOST_CHUNKS - 1) if several else counts
    chunks = 2 + np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    uneven = np.flatnonzero((layers + sum(step.less)) % (np.repeat(stages, counts) * chunks) + several)
    whole = np.repeat(np.arange(len(rows)), counts)[uneven]
    return shapes.taken(rows[whole], chunks=chunks[uneven]), whole


@lru_cache(maxsize=4096)
def _stage_chunks(
    parts: tuple[Contents, ...], stages: int, micro_batches: int, ahead: int = 0, *, every: bool = False
) -> tuple[InFlight, ...]:
    """A first stage, the one after it, the last, and the first one between that has more layers than that.

    Later ones of as many layers hold no more. every: where stages are not that alike, instead of the last of these the
    first between with each contents: later ones of the same hold no more. ahead: forwards beyond the warm-up.
    """
    from axonn_tune.program.pipeline import held_of_chunks

    each = [parts[stage::stages] for stage in range(stages)]
    counts = [tuple(map(blocks_in, chunks)) for chunks in each]
    after = min(1, stages - 1)
    more = next((stage for stage in range(1, stages - 1) if sum(counts[stage]) > sum(counts[after])), after)
    others = [stage for stage in range(2, stages - 1) if each[stage] not in each[1:stage]] if every else [more]

    def chunks_of(stage: int) -> InFlight:
        held = held_of_chunks(stage, stages=stages, micro_batches=micro_batches, weights=counts[stage], more=ahead)
        return tuple(zip(each[stage], held, strict=True))

    return tuple(map(chunks_of, (0, after, stages - 1, *(others or [after]))))


def _taken(value: Value, rows: Integers) -> Value:
    return value if isinstance(value, float) else value[rows]


@dataclass(frozen=True)
class Fitting:
    """Memory of every shape under one recompute set, and the rows that fit.

    kept_layers: of pipeline stages, of each of them. repeated: blocks of each chunk that repeat, 0 for all.
    """

    total_bytes: Floats
    kept_layers: Floats
    repeated: Integers
    rows: Integers
    limit_bytes: float

    def among(self, rows: Integers) -> Fitting:
        """The same of which only some rows are tried."""
        return replace(self, rows=self.rows[np.isin(self.rows, rows)])

    def taken(self, rows: Integers) -> Fitting:
        """Of some shapes that fit."""
        total, kept, repeated = self.total_bytes[rows], self.kept_layers[rows], self.repeated[rows]
        return Fitting(total, kept, repeated, np.arange(len(rows)), self.limit_bytes)

    def spread(self, rows: Integers, count: int) -> Fitting:
        """Of so many shapes, of which these are some; no other one fits."""
        columns = np.full(count, np.inf), np.zeros(count), np.zeros(count, dtype=np.int64)
        for column, own in zip(columns, (self.total_bytes, self.kept_layers, self.repeated), strict=True):
            column[rows] = own
        return Fitting(*columns, rows[self.rows], self.limit_bytes)

    def with_more(self, more: Fitting) -> Fitting:
        """Of these shapes and then others."""
        names = ("total_bytes", "kept_layers", "repeated")
        columns = {name: np.concatenate((getattr(self, name), getattr(more, name))) for name in names}
        rows = np.concatenate((self.rows, more.rows + len(self.total_bytes)))
        return Fitting(**columns, rows=rows, limit_bytes=self.limit_bytes)


def without_larger(shapes: Shapes, programs: Mapping[Variant, StepProgram]) -> Shapes:
    """Shapes without those with a larger micro-batch than one that does not fit however much is recomputed: memory
    grows with it. The smallest ones stay, whether they fit or not."""
    if shapes.problem.request.recompute_layers or not len(shapes):
        return shapes
    most = [programs[kind] for kind in {kind.precision: kind for kind in programs if not kind.some}.values()]
    limit_bytes = memory_limit_bytes(shapes.problem.machine.accelerator)
    same = shapes.grid * (int(shapes.chunks.max()) + 1) + shapes.chunks
    order = np.lexsort((shapes.micro_batch, same))

    def fit(some: Shapes) -> NDArray[np.bool_]:
        totals = [fit_memory(some, program, keeps=False).total_bytes for program in most]
        found: NDArray[np.bool_] = np.min(totals, axis=0) <= limit_bytes
        return found

    smallest = np.diff(same[order], prepend=-1) != 0
    kept = smallest | _of_first(same[order], lambda places: fit(shapes.taken(order[places])))
    # In several chunks stages have others, and hold more micro-batches where there are more: each is asked.
    left = np.intersect1d(order[~kept], divisible(shapes))
    cut, number = with_uneven_chunks(shapes, left)
    if len(cut):
        kept[np.isin(order, left[number[fit(cut)]])] = True
    return shapes.taken(np.sort(order[kept]))


def _of_first(groups: Integers, holds: Callable[[Integers], NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Whether a condition holds at each place; in each group, which stand together, it holds up to some place."""
    first = np.flatnonzero(np.diff(groups, prepend=-1))
    counts = np.diff(first, append=len(groups))
    low = holds(first).astype(np.int64)
    high = np.where(low, counts, 0)
    while len(open_ := np.flatnonzero(low < high)):
        middle = (low[open_] + high[open_] + 1) // 2
        held = holds(first[open_] + middle - 1)
        low[open_[held]], high[open_[~held]] = middle[held], middle[~held] - 1
    found: NDArray[np.bool_] = np.arange(len(groups)) - np.repeat(first, counts) < np.repeat(low, counts)
    return found


def fits_at_all(shapes: Shapes, programs: Sequence[StepProgram]) -> Integers:
    """Shapes that fit with some recompute set, of which the last one needs least memory; all where it is not asked of
    all blocks."""
    if not len(shapes) or not programs or shapes.problem.request.recompute_layers:
        return np.arange(len(shapes))
    return fit_memory(shapes, programs[-1], keeps=False).rows


def least_bytes_of(
    shapes: Shapes, programs: Mapping[Variant, StepProgram], grids: int
) -> tuple[list[Floats], Integers]:
    """Of shapes as of `without_larger`: least memory of each grid in each number format, infinite without shapes; and
    the shapes that fit with some recompute, as they are or in several chunks."""
    formats, asked = dict.fromkeys(kind.precision for kind in programs), shapes.problem.request.recompute_layers
    least_bytes = [np.full(grids, np.inf) for _ in formats]
    if not len(shapes):
        return least_bytes, np.arange(0)
    # Memory grows with the micro-batch: what is kept beside the smallest one fits.
    same = shapes.grid * (int(shapes.chunks.max()) + 1) + shapes.chunks
    ordered = np.lexsort((shapes.micro_batch, same))
    _, first, group = distinct(same[ordered])
    some = shapes if asked else shapes.taken(ordered[first])
    cut, number = with_uneven_chunks(some, divisible(some))
    every, of_row = some.with_more(cut), np.concatenate([np.arange(len(some)), number])
    least = np.full(len(some), np.inf)
    for precision, of_grid in zip(formats, least_bytes, strict=True):
        kinds = [one for one in programs if one.precision == precision and (asked or not one.some)]
        for one in kinds if asked else kinds[-1:]:
            repeated = np.full(len(every), asked) if one.some else None
            total_bytes = fit_memory(every, programs[one], repeated, keeps=False).total_bytes
            total_bytes = np.where(as_asked(every), total_bytes, np.inf)
            np.minimum.at(of_grid, every.grid, total_bytes)
            np.minimum.at(least, of_row, total_bytes)
    fits = least <= memory_limit_bytes(shapes.problem.machine.accelerator)
    return least_bytes, np.flatnonzero(fits) if asked else np.sort(ordered[fits[group]])


def fit_all(shapes: Shapes, programs: Mapping[Variant, StepProgram], *, every: bool = False) -> dict[Variant, Fitting]:
    """Memory of each shape under each variant; without `every` not of what fits with less recompute, which is as good
    by every criterion.

    Less recompute is less computation and no more collectives, unless it leaves room for fewer layers that are not
    resharded: then that is asked of sets on all blocks that are always tried. What is exposed may shrink behind more
    computation. Of a set on some blocks only the same set on all is more: another may repeat less on all than it on
    some.
    """
    if len(shapes) > _SLAB:
        # What is the same for all of them is worked out once a slab.
        slabs = [fit_all(slab, programs, every=every) for slab in _slabs(shapes)]
        return {one: reduce(Fitting.with_more, (slab[one] for slab in slabs)) for one in slabs[0]}
    problem, found = shapes.problem, dict[Variant, Fitting]()
    step, asked = (
        step_on(problem.framework, problem.machine, problem.workload.precision),
        problem.request.recompute_layers,
    )
    every = every or step.reshard == "fit" or problem.rank_by == "exposed"
    last, taken = np.arange(len(shapes)), shapes
    for one, program in programs.items():
        fits = np.zeros(len(shapes), dtype=np.bool_)
        for less, own in found.items():
            dominates = less.recompute == "none" if every else not less.some or less.recompute == one.recompute
            if dominates and less.precision == one.precision and not (every and problem.tries_always(one)):
                fits[own.rows] = True
        rows = np.flatnonzero(~fits)
        # What is known of the same shapes serves several sets.
        last, taken = (last, taken) if np.array_equal(rows, last) else (rows, shapes.taken(rows))
        if one.some and not asked:
            fitting = _fewest_repeated(taken, program)
        else:
            fitting = fit_memory(taken, program, np.full(len(rows), asked) if one.some else None)
        found[one] = fitting.spread(rows, len(shapes))
    return found


_SLAB = 16384
"""Shapes whose memory is worked out at once: their columns stay in the second-level cache."""


def _slabs(shapes: Shapes) -> Iterator[Shapes]:
    for rows in np.array_split(np.arange(len(shapes)), -(-len(shapes) // _SLAB)):
        yield shapes.taken(rows)


def fit_memory(
    shapes: Shapes, program: StepProgram, repeated: Integers | None = None, *, keeps: bool = True
) -> Fitting:
    """Memory of each shape, and its number of layers that are not resharded: none, unless asked for, without `keeps`,
    and of pipeline stages where only some blocks repeat."""
    if len(shapes) > _SLAB:
        places, parts = 0, list[Fitting]()
        for slab in _slabs(shapes):
            mine = None if repeated is None else repeated[places : places + len(slab)]
            parts.append(fit_memory(slab, program, mine, keeps=keeps))
            places += len(slab)
        return reduce(Fitting.with_more, parts)
    limit_bytes = memory_limit_bytes(shapes.problem.machine.accelerator)
    asked = shapes.problem.request.kept_layers
    kept_layers = (None if keeps else 0.0) if asked is None else float(asked)
    total, kept = np.empty((2, len(shapes)))
    if len(whole := np.flatnonzero(shapes.stages == 1)):
        some = shapes.taken(whole)
        memory = price_memory(
            program,
            values_of_all(some, program, None if repeated is None else repeated[whole]),
            limit_bytes=limit_bytes,
            arithmetic=COLUMNS,
            kept_layers=kept_layers,
        )
        total[whole], kept[whole] = memory.total_bytes, memory.kept_layers
    if len(shapes.piped):
        staged = None if repeated is None else repeated[shapes.piped]
        own = 0.0 if program.some and asked is None else kept_layers
        total[shapes.piped], kept[shapes.piped] = _fit_stages(shapes, program, limit_bytes, own, staged)
    none = np.zeros(len(shapes), dtype=np.int64)
    return Fitting(
        total, kept, none if repeated is None else repeated, np.flatnonzero(total <= limit_bytes), limit_bytes
    )


def values_of_all(
    shapes: Shapes, program: StepProgram, repeated: Integers | None, kept: Floats | None = None
) -> dict[str, Value]:
    """Symbols of a rank that has all blocks; kept: how many are not resharded, where that is known."""
    runs, values = as_runs(shapes.problem.model.runs), {**shapes.values, "held": shapes.values["L"]}
    if len(program.blocks) > 1:
        again = values["repeated"] = 0.0 if repeated is None else repeated.astype(np.float64)
        values |= blocks_by_kind(program, [(runs, 1.0)], repeated=again, arithmetic=COLUMNS)
    if kept is not None:
        values |= kept_by_kind(program, [(runs, 1.0)], values, kept, arithmetic=COLUMNS)
    return values


def most_blocks(shapes: Shapes) -> Integers:
    """Blocks of the largest chunk of each shape."""
    found = np.full(len(shapes), sum(shapes.problem.model.counts))
    if len(shapes.piped):
        found[shapes.piped] = np.maximum.reduce([one.most[one.which] for one in shapes.stage_rows])
    return found


def _fewest_repeated(shapes: Shapes, program: StepProgram) -> Fitting:
    """The fewest blocks that must repeat, fewer than all, by bisection: more never need more memory."""
    high = most_blocks(shapes)
    low, limit_bytes = np.zeros_like(high), memory_limit_bytes(shapes.problem.machine.accelerator)
    for _ in range(int(high.max(initial=1)).bit_length()):
        middle = np.maximum((low + high) // 2, 1)
        fits = fit_memory(shapes, program, middle, keeps=False).total_bytes <= limit_bytes
        high, low = np.where(fits, middle, high), np.where(fits, low, middle)
    found = fit_memory(shapes, program, high)
    return found.among(np.flatnonzero(high < most_blocks(shapes)))


def _fit_stages(
    shapes: Shapes, program: StepProgram, limit_bytes: float, asked: float | None, repeated: Integers | None
) -> tuple[Floats, Floats]:
    """Memory of the largest stage of each shape with several, and the layers not resharded on every stage."""
    stages = [(one, {**values, **one.kinds(program, repeated)}) for one, values in shapes.priced_stages]

    def priced(one: StageRows, values: dict[str, Value], kept: Floats | float | None) -> Memory:
        return price_memory(
            *(program, values),
            limit_bytes=limit_bytes,
            arithmetic=COLUMNS,
            kept_layers=kept,
            stage=one.stage,
            known=shapes.known,
        )

    alone = [priced(one, values, asked) for one, values in stages]
    layers = [_sum(one.blocks()) for one, _ in stages]
    kept = np.maximum.reduce(layers)
    # Of two stages none is between.
    between = shapes.stages[shapes.piped] > 2
    for (one, _), memory, blocks in zip(stages, alone, layers, strict=True):
        fitting = np.asarray(memory.kept_layers)
        decides = (fitting < blocks) & (between | (one.stage != MIDDLE))
        kept = np.where(decides, np.minimum(kept, fitting), kept)
    largest = np.zeros(len(shapes.piped))
    for (one, values), memory, blocks in zip(stages, alone, layers, strict=True):
        here = np.minimum(kept, blocks)
        same = np.array_equal(here, np.asarray(memory.kept_layers))
        total = (memory if same else priced(one, values, here)).total_bytes
        largest = np.maximum(largest, np.where(between | (one.stage != MIDDLE), total, 0.0))
    return largest, kept


class Routes(dict[str, Integers]):
    """Numbers of the group shapes of some placements, by group of axes: worked out when first asked for.

    shapes: what they number, more with every group.
    """

    def __init__(self, levels: Mapping[str, tuple[Integers, Integers]], problem: Problem, rows: int) -> None:
        super().__init__()
        self._levels, self._problem, self._rows = levels, problem, rows
        self.shapes = dict[GroupShape, int]()

    def __missing__(self, axes: str) -> Integers:
        folding, world = self._problem.framework.step.folding, self._problem.gpus
        self[axes] = _routes(axes, self._levels, self.shapes, folding, rows=self._rows, world=world)
        return self[axes]


@dataclass(frozen=True)
class Placements:
    """Distinct rank orders of the grids in use: for each placement its grid, number of its order, and routes; tables of
    these, by groups, what is sent over them and the time that a call takes the software."""

    grid: Integers
    order: Integers
    orders: tuple[tuple[str, ...], ...]
    routes: Routes
    of_grid: dict[int, Integers]
    tables: dict[tuple[tuple[str, ...], frozenset[tuple[Sent, str]], float], RouteTable] = field(default_factory=dict)

    @property
    def shapes(self) -> tuple[GroupShape, ...]:
        """What the routes number so far."""
        return tuple(self.routes.shapes)


def list_placements(grids: Grids, used: Integers, problem: Problem) -> Placements:
    """Every distinct rank order of each grid in `used`."""
    order_numbers = _orders_by_width(problem)
    wide = _width(grids, used)
    counts = np.array([len(order_numbers[int(mask)]) for mask in wide], dtype=np.int64)
    grid = np.repeat(used, counts)
    order = np.array([number for mask in wide for number in order_numbers[int(mask)]], dtype=np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)))
    of_grid = {int(number): np.arange(starts[i], starts[i + 1]) for i, number in enumerate(used)}
    levels = {axis: _level(axis, grids, grid, order, problem.orders) for axis in problem.axes}
    return Placements(grid, order, problem.orders, Routes(levels, problem, len(grid)), of_grid)


def pairs_of(shapes: Shapes) -> tuple[Integers, Integers]:
    """A shape of each pair of grid and micro-batch, and the pair of each shape, by its number."""
    most = int(shapes.micro_batch.max(initial=0)) + 1
    _, first, number = distinct(shapes.grid * most + shapes.micro_batch)
    return first, number


def count_orders(problem: Problem, grids: Grids, rows: Integers) -> int:
    """Distinct rank orders of some grids, of each as often as it is there."""
    numbers = _orders_by_width(problem)
    return int(np.array([len(numbers[mask]) for mask in range(len(numbers))])[_width(grids, rows)].sum())


def _width(grids: Grids, rows: Integers) -> Integers:
    """Axes wider than 1 of each grid in `rows`, as a bit mask."""
    numbered = [place for place, axis in enumerate(grids.axes) if axis in RANK_AXES]
    mask: Integers = (grids.sizes[rows][:, numbered] > 1) @ (1 << np.arange(len(numbered)))
    return mask


def _orders_by_width(problem: Problem) -> Mapping[int, tuple[int, ...]]:
    """Numbers of the distinct orders, for each set of axes wider than 1 (as a bit mask)."""
    axes, orders = tuple(axis for axis in problem.axes if axis in RANK_AXES), problem.orders
    masks = range(1 << len(axes))
    if len(orders) == 1:
        return dict.fromkeys(masks, (0,))
    inner, outer = permuted_axes(axes)
    found, number = {}, {order: place for place, order in enumerate(orders)}
    for mask in masks:
        sizes = tuple(2 if mask >> position & 1 else 1 for position in range(len(inner)))
        found[mask] = tuple(number[*order, *outer] for order in distinct_orders(sizes, axes=inner))
    return found


def _level(
    axis: str, grids: Grids, grid: Integers, order: Integers, orders: tuple[tuple[str, ...], ...]
) -> tuple[Integers, Integers]:
    """Size and stride of an axis for each placement; an axis of size 1 has stride 1."""
    sizes = grids.sizes[grid]
    if axis in EXPERT_AXES:
        return sizes[:, grids.axes.index(axis)], np.ones(len(grid), dtype=np.int64)
    numbered = [other for other in grids.axes if other in RANK_AXES]
    inside = np.array([[names.index(other) < names.index(axis) for other in numbered] for names in orders])
    ranks = sizes[:, [grids.axes.index(other) for other in numbered]]
    stride = np.where(inside[order], ranks, 1).prod(axis=1)
    size = sizes[:, grids.axes.index(axis)]
    return size, np.where(size > 1, stride, 1)


def _routes(
    axes: str,
    level: Mapping[str, tuple[Integers, Integers]],
    known: dict[GroupShape, int],
    folding: Folding,
    *,
    rows: int,
    world: int,
) -> Integers:
    """Number of each placement's group shape over `axes`; new shapes are added to `known`."""
    if axes == WORLD:
        return np.full(rows, known.setdefault(merged_shape([(world, 1)]), len(known)))
    alone = np.ones(rows, dtype=np.int64), np.ones(rows, dtype=np.int64)
    if axes in EXPERT_GROUPS:
        levels = expert_levels(axes, dict.fromkeys(ALL_AXES, alone) | dict(level), folding)
    else:
        levels = [level.get(axis, alone) for axis in split_axes(axes)]
    if axes not in EXPERT_GROUPS and len(levels) == 1:
        levels = [level_of(axes, *levels[0])]
    code = np.zeros(rows, dtype=np.int64)
    found = [(alone[0] * size, alone[0] * stride) for size, stride in levels]
    for size, stride in found:
        values, _, number = distinct(size << 32 | stride)
        code = code * len(values) + number
    _, first, inverse = distinct(code)
    numbers = []
    for row in first.tolist():
        pairs = sorted(((int(size[row]), int(stride[row])) for size, stride in found), key=lambda pair: pair[1])
        numbers.append(known.setdefault(merged_shape(pairs), len(known)))
    return np.array(numbers, dtype=np.int64)[inverse]


def list_candidates(
    shapes: Shapes, rows: Integers, placements: Placements, groups: Sequence[str]
) -> tuple[Candidates, Integers]:
    """Every placement of every shape in `rows`, with its routes over some groups; also the placement of each."""
    chosen = [placements.of_grid[int(grid)] for grid in shapes.grid[rows]]
    placement = np.concatenate(chosen) if chosen else np.empty(0, dtype=np.int64)
    shape = np.repeat(rows, [len(found) for found in chosen])
    routes = {axes: placements.routes[axes][placement] for axes in (*groups, "x")}
    return Candidates(shape, routes), placement
