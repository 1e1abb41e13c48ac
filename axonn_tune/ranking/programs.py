"""What candidates are priced with: programs of recompute sets, exchanges, dispatchers, and pools of what fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from axonn_tune.cost.columns import ColumnPricer, RouteTable, distinct, route_table
from axonn_tune.cost.compute import compute_rates, host_rates
from axonn_tune.frameworks import software_on, step_on
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.program.dimensions import padded_alignment, table_alignment
from axonn_tune.program.operations import MATRIX_ALIGNMENT, Integers
from axonn_tune.program.schedule import build_schedule
from axonn_tune.program.step import FIRST, LAST, MIDDLE, ONLY, StepProgram, build_step
from axonn_tune.ranking.fit import Fitting
from axonn_tune.ranking.placements import Placements, list_candidates
from axonn_tune.ranking.pools import Pool
from axonn_tune.ranking.shapes import Shapes
from axonn_tune.ranking.space import Grids, Problem, Variant, dispatcher_grids, exchange_grids
from axonn_tune.units import seconds
from axonn_tune.vocabulary import PipelineOrder


class Programs(Mapping[Variant, StepProgram]):
    """Programs of all recompute sets that may be tried, each made when it is first asked for."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._known = problem, dict[tuple[Variant, int, int], StepProgram]()

    def __getitem__(self, kind: Variant) -> StepProgram:
        return self.made(kind)

    def made(self, kind: Variant, *, alignment: int = MATRIX_ALIGNMENT, chunks: int = 0) -> StepProgram:
        """The program of a variant; alignment: of rows of logits, bytes; chunks: of a pipeline stage with one or, as 2,
        several, where it is of one."""
        key, problem = (kind, alignment, chunks), self._problem
        if key not in self._known and chunks:
            whole = self.made(kind, alignment=alignment)
            own = whole.given.options.staged(chunks)
            same = own == whole.given.options
            self._known[key] = whole if same else step_program(problem, own, kind, alignment=alignment)
        elif key not in self._known:
            options = step_on(problem.framework, problem.machine, problem.workload.precision)
            self._known[key] = step_program(problem, options, kind, alignment=alignment)
        return self._known[key]

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._problem.variants)

    def __len__(self) -> int:
        return len(self._problem.variants)


@dataclass(frozen=True, eq=False)
class Exchange:
    """The search with one exchange of context parallelism and one dispatcher: for which grids, all if None, and its
    programs; merged: with expert overlap."""

    problem: Problem
    grids: NDArray[np.bool_] | None
    programs: Programs
    merged: bool = False

    def of(self, shapes: Shapes) -> Integers:
        """The shapes that have it."""
        return np.arange(len(shapes)) if self.grids is None else np.flatnonzero(self.grids[shapes.grid])

    def taken(self, shapes: Shapes, fitting: Fitting) -> Fitting:
        """Those of some shapes that fit."""
        return fitting if self.grids is None else fitting.among(self.of(shapes))

    def merging(self, experts: NDArray[np.bool_]) -> Exchange:
        """The same with expert overlap; experts: grids with expert parallelism."""
        problem, grids = self.problem.with_expert_overlap, experts if self.grids is None else experts & self.grids
        return replace(self, problem=problem, grids=grids, programs=Programs(problem), merged=True)

    def ordered(self, order: PipelineOrder, staged: NDArray[np.bool_]) -> Exchange:
        """The same with another order of passes; staged: grids with pipeline stages."""
        # Imported here: most searches compare no orders, and start-up time is theirs.
        from axonn_tune.ranking.orders import in_order

        problem, grids = in_order(self.problem, order), staged if self.grids is None else staged & self.grids
        return replace(self, problem=problem, grids=grids, programs=Programs(problem))

    @property
    def mode(self) -> tuple[bool, PipelineOrder]:
        """Whether it has expert overlap, and the order of passes of stages: what memory and bounds depend on."""
        return self.merged, self.problem.framework.step.pipeline_order

    @property
    def dispatcher(self) -> str:
        """Its dispatcher."""
        return self.problem.framework.step.dispatcher


def exchanges_of(problem: Problem, grids: Grids, shapes: Shapes, programs: Programs) -> list[Exchange]:
    """The exchanges that are compared, each with the grids that it can have; the first has those without context, too;
    and the dispatchers that are tried.

    No exchange or dispatcher needs other memory, so each candidate is priced with every one, and ranked with the best.
    Those that can have expert overlap come with it, too, where that is compared, and those with stages in each order of
    passes.
    """
    used = np.zeros(len(grids.sizes), dtype=np.bool_)
    used[shapes.grid] = True
    several = len(problem.by_exchange) > 1
    wide = used & (grids.column("context") > 1) if several else used
    several = several and bool(wide.any())
    if not several and len(problem.by_dispatcher) == 1:
        return _with_overlap(problem, grids, [Exchange(problem.by_dispatcher[0], None, programs)])
    found, by_exchange = list[Exchange](), problem.by_exchange if several else (problem,)
    for one in by_exchange:
        with_exchange = exchange_grids(one, grids) & wide if several else used
        for two in one.by_dispatcher:
            having = with_exchange if one is not by_exchange[0] or not several else with_exchange | ~wide
            if len(one.by_dispatcher) > 1:
                having = having & dispatcher_grids(one, grids, two.framework.step.dispatcher)
            if not found or having.any():
                found.append(Exchange(two, having, Programs(two) if found else programs))
    return _with_overlap(problem, grids, found)


def _with_overlap(problem: Problem, grids: Grids, exchanges: list[Exchange]) -> list[Exchange]:
    found = list(exchanges)
    if problem.compares_expert_overlap:
        # Gathers of weights over z share buffers, which passes beside each other would both have.
        experts = (grids.column("expert") > 1) & (grids.column("z") == 1)
        found += [one.merging(experts) for one in exchanges if one.dispatcher != "allgather"]
    for order in problem.compared_orders:
        found += [one.ordered(order, grids.column("pipeline") > 1) for one in exchanges]
    return found


def step_program(
    problem: Problem, options: StepOptions, kind: Variant, *, alignment: int = MATRIX_ALIGNMENT
) -> StepProgram:
    """The program of a variant; alignment: of rows of logits, bytes."""
    return build_step(
        problem.model,
        problem.within(kind.precision).workload,
        recompute=kind.recompute,
        some=kind.some,
        options=options,
        context="context" in problem.axes,
        table_alignment=alignment,
    )


def by_alignment(
    shapes: Shapes, kind: Variant, programs: Programs, fitting: Fitting
) -> Iterator[tuple[StepProgram, Fitting]]:
    """Programs and fittings by the alignment of rows of logits, which differs where the vocabulary is not padded."""
    if not len(fitting.rows):
        return
    options = programs[kind].given.options
    problem, splits = shapes.problem, shapes.sizes("x") * shapes.sizes("y")
    element = problem.workload.element_sizes.compute
    if options.vocabulary_multiple != 0:
        alignment = padded_alignment(problem.model, options, element=element)
        yield programs.made(kind, alignment=alignment), fitting
        return
    pairs = list(zip(shapes.sizes("V").tolist(), splits.tolist(), strict=True))
    aligned = {(rows, split): table_alignment(rows, split=split, element=element) for rows, split in set(pairs)}
    found = np.array([aligned[pair] for pair in pairs], dtype=np.int64)
    for alignment in distinct(found)[0].tolist():
        rows = fitting.rows[found[fitting.rows] == alignment]
        yield programs.made(kind, alignment=alignment), replace(fitting, rows=rows)


def _routes(problem: Problem, placements: Placements, program: StepProgram) -> RouteTable:
    """Price every route for all collectives of a program."""
    steps = (step for stage in (ONLY, FIRST) for step, _ in program.collectives(stage))
    sent = frozenset((step.sent, step.axis) for step in steps)
    software, machine = software_on(problem.framework, problem.machine), problem.machine.placing(problem.gpus)
    call_s = seconds(software.collective_us)
    key = program.groups, sent, call_s
    if key not in placements.tables:
        used = {axes: placements.routes[axes] for axes in program.groups}
        table = route_table(placements.shapes, used, machine, problem.gpus, sent=sent, call_s=call_s)
        placements.tables[key] = table
    return placements.tables[key]


_schedule = lru_cache(maxsize=128)(build_schedule)


def pooled(
    problem: Problem,
    shapes: Shapes,
    placements: Placements,
    programs: Programs,
    kind: Variant,
    program: StepProgram,
    fitting: Fitting,
    *,
    cut: bool = False,
) -> Iterator[tuple[Pool, Integers, Integers]]:
    """All candidates of one variant that fit into memory, without and with pipeline stages; each with the shape and the
    placement of its candidates. cut: for bounds of any number of chunks, as if stages had several, with blocks from
    idle streams."""
    workload, options = problem.workload, program.given.options
    rates = compute_rates(
        problem.machine.accelerator,
        workload.precision,
        software_on(problem.framework, problem.machine),
        multiplied=problem.gemm_format,
        cuda_graphs=problem.framework.step.cuda_graphs,
        quantizes_in_gemm=options.quantizes_in_gemm,
        host=host_rates(problem.machine, problem.gpus),
    )
    several, looped = shapes.stages[fitting.rows] > 1, (shapes.chunks[fitting.rows] > 1) | cut
    if not options.expert_overlap:
        looped = np.zeros_like(several)
    # Where some layers are not resharded, bounds are as if none were.
    kept = (fitting.kept_layers[fitting.rows] > 0) & several
    kinds = ((False, 1, ~several), (True, 1, several & ~looped), (True, 2, several & looped))
    for (staged, chunks, of), held in product(kinds, (False, True)):
        if not len(rows := fitting.rows[of & (kept == held)]):
            continue
        stages, alignment = (FIRST, MIDDLE, LAST) if staged else (ONLY,), program.given.table_alignment
        one = programs.made(kind, alignment=alignment, chunks=chunks) if staged else program
        schedule = _schedule(one, overlaps=workload.overlaps, split=workload.split_micro_batch, stages=stages)
        element_bytes = float(workload.element_sizes.compute)
        some, own = shapes.taken(rows), fitting.taken(rows)
        candidates, placement = list_candidates(some, np.arange(len(rows)), placements, one.groups)
        table = _routes(problem, placements, one)
        pricer = ColumnPricer(one, schedule, rates=rates, element_bytes=element_bytes, table=table)
        yield (
            Pool(problem, some, own, pricer, candidates, placements.shapes, rates.contention, staged, cut),
            rows[candidates.shape],
            placement,
        )
