"""What a search is asked for: its problem, and the grids that satisfy every constraint."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import distinct
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.grid import ALL_AXES, AXES, EXPERT_AXES, RANK_AXES, divisors, factorizations
from axonn_tune.job import Job
from axonn_tune.program.constraints import Constraint
from axonn_tune.program.feasibility import constraints
from axonn_tune.program.operations import Integers
from axonn_tune.recompute import RECOMPUTES, Recompute, lacked_by, modules_of
from axonn_tune.request import NO_REQUEST, RankBy, Request
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import AUTO, PipelineOrder, Precision

if TYPE_CHECKING:
    from axonn_tune.stages import PipelineLayout


class Variant(NamedTuple):
    """A recompute set on all blocks, or on as few of the first blocks of each chunk as memory needs; and the number
    format, where several are compared."""

    recompute: Recompute
    some: bool = False
    precision: Precision | None = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Problem(Job):
    """A job and what of its layouts is searched.

    request: its pins restrict the layouts. rank_by, pipeline: the criterion, and whether pipeline stages are part of
    the search, as decided where the request leaves them to the framework, or another search is made of the same.
    compares_expert_overlap: whether layouts with expert overlap are compared with those without. compared_orders: of
    the passes of stages, beside the framework's own. machine_assumed: nobody named the machine.
    """

    gpus: int
    request: Request = NO_REQUEST
    rank_by: RankBy = "communication"
    pipeline: bool = False
    compares_expert_overlap: bool = False
    compared_orders: tuple[PipelineOrder, ...] = ()
    machine_assumed: bool = False

    @cached_property
    def variants(self) -> tuple[Variant, ...]:
        """Recompute sets to try, those with a GEMM first on some blocks, where the framework can say so: what others
        repeat takes little time. Whole blocks are not tried where CUDA graphs capture layers, which excludes it."""
        request, found = self.request, list[Variant]()
        asked = request.recompute_layers
        sets = [one for one in self.framework.recompute_sets if not lacked_by(one, self.model.parts)]
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
        searched = self.pipeline and self.rank_by == "iteration"
        return searched and self.framework.schedule.free and self.parts is None

    @property
    def mtp_part(self) -> int | None:
        """Its part with the MTP layers; None: the last."""
        return self.pipeline_layout and self.pipeline_layout.mtp_part

    @cached_property
    def by_exchange(self) -> tuple[Problem, ...]:
        """The problem with each exchange of context parallelism that the search compares, the framework's own first.

        An all-gather sends as much as a ring and overlaps with nothing: it is there where windows or indexers
        forbid the ring. Of hierarchies there is one a size of the inner groups (`exchange_grids`).
        """
        framework, pinned = self.framework, self.request.axes.get("context") == 1
        if not framework.exchanges or pinned or "context" not in self.axes:
            return (self,)
        windowed, node = any(layer.reach for layer in self.model.types), self.machine.tiers[0].ranks or 1
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
        """Rows of the grids with the pinned axis sizes, with weights to gather where layers are not resharded, and with
        stages that have the parts of the given layout."""
        rows, parts, schedule = self.sound, problem.parts, problem.framework.schedule
        for axis, size in problem.request.axes.items():
            if axis in self.axes:
                rows = rows[self.column(axis)[rows] == size]
        if problem.request.kept_layers and not problem.framework.step.master_shards:
            rows = rows[self.column("z")[rows] > 1]
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
