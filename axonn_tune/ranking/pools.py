"""Candidates of one recompute set, exchange and dispatcher: least steps of all, and prices of those that are asked for.

A least step is a sum of the parts of a micro-batch, each from idle streams, along one chain of stages, for a few NumPy
calls a layer type. Shared streams, what is late, and the order of passes only add to it. For a price, stages and chunks
are replayed, each kind once for all candidates that have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from axonn_tune.cost.columns import Candidates, ColumnPricer, Floats, Integers, distinct
from axonn_tune.cost.compute import ROUNDING, ComputeClock, contended_s
from axonn_tune.cost.replay import ChunkTimes, LeastTimes, StageWork
from axonn_tune.frameworks import software_on
from axonn_tune.grid import GroupShape
from axonn_tune.program.operations import COLUMNS, Value
from axonn_tune.program.schedule import Runs, blocks_by_kind, kept_by_kind
from axonn_tune.program.step import (
    MIDDLE,
    ONLY,
    Contents,
    Stage,
    StepProgram,
    as_runs,
    blocks_by_type,
    blocks_in,
    chunks_of,
    contents_of,
    stages_alike,
)
from axonn_tune.ranking.space import Fitting, Shapes, values_of_all
from axonn_tune.units import seconds

if TYPE_CHECKING:
    from axonn_tune.cost.pipeline import Pipelines, StageKind


class Seconds(NamedTuple):
    """Prices of some candidates of a pool, by their places in it; group: of those with pipeline stages, whose steps are
    bounds."""

    places: Integers
    communication_s: Floats
    compute_s: Floats
    iteration_s: Floats
    bubble_s: Floats
    group: Pipelines | None = None


_SLAB = 16384
"""Candidates whose least steps are worked out at once: their columns stay in the second-level cache."""


@dataclass(frozen=True)
class Pool:
    """Candidates of one program, of shapes that fit: all without pipeline stages, or all with several.

    routes: the group shapes that routes of candidates number; contention: as of `contended_s`.
    """

    shapes: Shapes
    fitting: Fitting
    pricer: ColumnPricer
    candidates: Candidates
    routes: Sequence[GroupShape]
    contention: float
    staged: bool

    def __len__(self) -> int:
        return len(self.candidates)

    @cached_property
    def _sends_s(self) -> Floats:
        return _sends_s(self.shapes, self.pricer.program, self.candidates, self.routes)

    def least_s(self, *, exchanged: tuple[bool, ...] = (True,)) -> Floats:
        """Least step of every candidate, of the same stages cut into any number of chunks, of these or one stage with
        expert overlap, and if all stages took as long as their mean, s, `[exchanged, 4, candidates]`; exchanged: with
        exchanges of context parallelism, and without."""
        if len(self) > _SLAB:
            slabs = np.array_split(np.arange(len(self)), -(-len(self) // _SLAB))
            return np.concatenate([self._among(rows).least_s(exchanged=exchanged) for rows in slabs], axis=2)
        first, alike = self.pricer.distinct(self.candidates)
        values = values_of_all(self.shapes, self.pricer.program, self.fitting.repeated, self.fitting.kept_layers)
        work = self.pricer.work(values, MIDDLE if self.staged else ONLY)
        kept = bool(self.fitting.kept_layers.any())
        each = self.pricer.least(self.candidates.taken(first), work, exchanged=exchanged, kept=kept)
        groups = list(_groups(self.shapes, self.candidates))
        return np.array([self._least_of(parts, groups, alike) for parts in each])

    def _least_of(self, parts: LeastTimes, groups: list[tuple[Integers, int, int]], alike: Integers) -> Floats:
        """Least steps by the parts of those candidates that differ; alike: which of these each one is."""
        distinct_rows = int(alike.max()) + 1

        def column(value: Value) -> Floats:
            found: Floats = np.broadcast_to(np.asarray(value, dtype=np.float64), distinct_rows)[alike]
            return found

        kinds = np.array([[*map(column, each)] for each in parts[:4]])
        ends = np.array([[*map(column, each)] for each in (parts.first, parts.last)])
        batches = np.asarray(self.shapes.values["A"])[self.candidates.shape]
        floor, cut, merged = np.empty((3, len(self)))
        uneven = np.zeros(len(self))
        for rows, stages, chunks in groups:
            blocks, issued, computed, sent = self._of_parts(kinds, rows, stages, chunks)
            part_s, times = np.array([np.maximum(blocks, issued), computed]), batches[rows][:, None]
            part_s[..., 0] += ends[0, :, rows].T
            part_s[..., -1] += ends[1, :, rows].T
            part_s = part_s.reshape(2, len(rows), chunks, stages)
            (busy, computed), sent = part_s.sum(axis=2), sent.reshape(len(rows), chunks, stages).sum(axis=1)
            computed = times * computed
            if not self.staged:
                least_s, cut[rows] = (times * busy)[:, 0] + column(parts.end)[rows], np.inf
                merged[rows] = self._contended(computed[:, 0], computed[:, 0], sent[:, 0])
            else:
                mixed = len(self.shapes.problem.model.types) > 1
                every = (times * busy, computed, sent)
                cut_s, *each = (one.mean(axis=1) if mixed else one.max(axis=1) for one in every)
                cut[rows], merged[rows] = self._contended(cut_s, *each), self._contended(each[0], *each)
                uneven[rows] = (times * busy).max(axis=1) - (times * busy).mean(axis=1)
                least_s = self._along_stages(part_s[0, :, 0], busy, times, self._sends_s[rows][:, None], chunks)
            floor[rows] = self._contended(least_s, computed.max(axis=1), sent.max(axis=1))
        return np.array([floor, cut, merged, floor - uneven])

    def _contended(self, least_s: Floats, computed_s: Floats, sent_s: Floats) -> Floats:
        """Least steps with the least slowdown from overlap, s, of which each second more in a step takes less than one
        back: contention is below 1."""
        lost_s = contended_s(sent_s, computed_s, least_s, contention=min(self.contention, 1.0))
        return np.asarray(least_s + (1.0 - ROUNDING) * lost_s)

    def _along_stages(self, first: Floats, busy: Floats, batches: Floats, send_s: Floats, chunks: int) -> Floats:
        """The longest chain of a step, s: to a stage and back, both passes of the first chunk of each before it, and
        all passes of its own. `[candidates, stages]`; first: passes of the first chunk."""
        from axonn_tune.cost.pipeline import overlapped

        stages = first.shape[1]
        if not overlapped(self.shapes.problem.framework.schedule, chunks):
            sent = np.full(stages, 2.0 * chunks)
            sent[[0, -1]] -= 1.0
            busy = busy + sent * send_s
        way = np.cumsum(first, axis=1) - first + 2.0 * np.arange(stages) * send_s
        found: Floats = (batches * busy + way).max(axis=1)
        return found

    def _of_parts(self, kinds: Floats, rows: Integers, stages: int, chunks: int) -> Floats:
        """Sums over the blocks of each part, `[quantities, candidates, parts]`; kinds: of a block of each kind."""
        problem, program = self.shapes.problem, self.pricer.program
        parts: tuple[Contents, ...] = (problem.model.runs,)
        if self.staged:
            from axonn_tune.cost.pipeline import parts_of

            parts = contents_of(problem.model, parts_of(problem, stages, chunks, problem.parts), problem.mtp_part)
        first = _first_blocks(parts, len(problem.model.types))
        each = np.moveaxis(kinds[..., rows], 1, -1)
        if not program.some:
            return np.asarray(each @ first[-1].T)
        again, once = each[..., 0::2], each[..., 1::2]
        repeated = np.minimum(self.fitting.repeated[self.candidates.shape[rows]], len(first) - 1)
        return np.asarray(once @ first[-1].T + np.einsum("rpt,qrt->qrp", first[repeated], again - once))

    def priced(self, places: Integers) -> Iterator[Seconds]:
        """Prices of some candidates: exact without pipeline stages, with them bounds and what is exact on demand."""
        part = self._among(places)
        if not self.staged:
            yield Seconds(places, *part._whole())
            return
        for rows, group in part._pipelines():
            step_s, lost_s, bubble_s = group.bound_s()
            yield Seconds(places[rows], group.communication_s, group.alone_s + lost_s, step_s, bubble_s, group)

    def _among(self, places: Integers) -> Pool:
        """Some candidates, with only their shapes."""
        used, _, shape = distinct(self.candidates.shape[places])
        some = replace(self.candidates.taken(places), shape=shape)
        shapes = self.shapes.taken(used, chunks=self.shapes.chunks[used])
        return replace(self, shapes=shapes, fitting=self.fitting.taken(used), candidates=some)

    def _whole(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Prices of all candidates without pipeline stages."""
        program, model = self.pricer.program, self.shapes.problem.model
        first, representative = self.pricer.distinct(self.candidates)
        values = values_of_all(self.shapes, program, self.fitting.repeated, self.fitting.kept_layers)
        runs = as_runs(model.runs) if model.mixed else ((0, values["L"]),)
        prices = self.pricer.price(self.candidates.taken(first), values, runs)
        communication, compute, iteration = prices[:, representative]
        return communication, compute, iteration, np.zeros(len(self))

    def _pipelines(self) -> Iterator[tuple[Integers, Pipelines]]:
        """All candidates, each kind of stage replayed once for all that have it; those with as many stages and chunks
        go together, with their rows."""
        # Imported here: most searches have no pipeline, and start-up time is theirs.
        from axonn_tune.cost.pipeline import Pipelines, overlapped

        shapes, candidates = self.shapes, self.candidates
        batches = np.asarray(shapes.values["A"])[candidates.shape].astype(np.int64)
        first, representative = self.pricer.distinct(candidates)
        parts = _Parts(shapes, self.fitting, self.pricer, candidates.taken(first))
        groups = list(_groups(shapes, candidates))
        for rows, stages, chunks in groups:
            parts.expect(distinct(representative[rows])[0], stages, chunks)
        for rows, stages, chunks in groups:
            yield (
                rows,
                Pipelines(
                    stages=stages,
                    chunks=chunks,
                    micro_batches=batches[rows],
                    kinds=tuple(parts.kinds(representative[rows], stages, chunks)),
                    send_s=self._sends_s[rows],
                    overlapped=overlapped(shapes.problem.framework.schedule, chunks),
                    contention=self.contention,
                    mixed=len(shapes.problem.model.types) > 1,
                ),
            )


def _groups(shapes: Shapes, candidates: Candidates) -> Iterator[tuple[Integers, int, int]]:
    """Candidates with as many stages and chunks, by their places, with both numbers."""
    stages, chunks = shapes.stages[candidates.shape], shapes.chunks[candidates.shape]
    for count in distinct(stages)[0].tolist():
        for several in distinct(chunks[stages == count])[0].tolist():
            yield np.flatnonzero((stages == count) & (chunks == several)), count, several


@lru_cache(maxsize=512)
def _first_blocks(parts: tuple[Contents, ...], types: int) -> Floats:
    """How many of the first k blocks of each part are of each layer type, k from 0 to the most, `[k, parts, types]`."""
    found = np.zeros((max(map(blocks_in, parts)) + 1, len(parts), types))
    for number, contents in enumerate(parts):
        of_type = np.repeat(*np.array(contents, dtype=np.int64).reshape(-1, 2).T)
        found[1 : len(of_type) + 1, number] = of_type[:, None] == np.arange(types)
    return np.asarray(found.cumsum(axis=0))


# Stages of pipelines.


class _Blocks(NamedTuple):
    """Kind of stage: its place, and the blocks of each chunk."""

    stage: Stage
    contents: tuple[Contents, ...]


class _Chunk(NamedTuple):
    """Chunks of the stages in one place that are replayed together: with embedding or LM head, and the same layer types
    in order; number: of those in one stage that differ in numbers of blocks."""

    part: Stage
    stage: Stage
    types: tuple[int, ...]
    number: int


class _Worked(NamedTuple):
    """Stages in one place, which are worked out together: the candidates that have them, and sizes of their shapes.

    places, shapes: of each kind, the rows of its candidates with the place of the first, and its places among shapes.
    """

    candidates: Candidates
    work: StageWork
    places: dict[_Blocks, tuple[Integers, int]]
    shapes: dict[_Blocks, slice]


@dataclass(frozen=True)
class _Parts:
    """Stages and chunks of all candidates, each replayed once; `candidates` number the shapes with stages.

    Stages in one place are worked out together, and of their chunks those with the same layer types, whatever their
    numbers.
    """

    shapes: Shapes
    fitting: Fitting
    pricer: ColumnPricer
    candidates: Candidates
    _rows: dict[_Blocks, list[Integers]] = field(default_factory=dict)
    _counts: dict[_Chunk, dict[_Blocks, Contents]] = field(default_factory=dict)
    _worked: dict[Stage, _Worked] = field(default_factory=dict)
    _sums: dict[Stage, tuple[Floats, Floats]] = field(default_factory=dict)
    _chunks: dict[_Chunk, dict[_Blocks, ChunkTimes]] = field(default_factory=dict)

    def expect(self, rows: Integers, stages: int, chunks: int) -> None:
        """Collect the candidates of each kind of stage, before any is replayed."""
        for some, of_stage, _ in self._alike(stages, chunks):
            self._rows.setdefault(some, []).append(rows)
            for part, contents in of_stage:
                self._numbered(some, part, contents)

    def kinds(self, rows: Integers, stages: int, chunks: int) -> Iterator[StageKind]:
        """Every kind of stage of the candidates in `rows`, all with as many stages and chunks."""
        from axonn_tune.cost.pipeline import StageKind

        for some, of_stage, numbers in self._alike(stages, chunks):
            mine, start = self._work(some.stage).places[some]
            at = np.searchsorted(mine, rows)
            communication, compute = (column[start + at] for column in self._stage(some.stage))
            each = (self._chunk(self._numbered(some, part, contents))[some] for part, contents in of_stage)
            times = tuple(one.taken(at) for one in each)
            host = sum(one.host_s for one in times)
            yield StageKind(numbers, communication, compute + host, times)

    def _numbered(self, some: _Blocks, part: Stage, contents: Contents) -> _Chunk:
        """What a chunk is replayed with: in one kind of stage no two that differ in numbers of blocks."""
        types, number = tuple(of_type for of_type, _ in contents), 0
        while True:
            chunk = _Chunk(part, some.stage, types, number)
            if self._counts.setdefault(chunk, {}).setdefault(some, contents) == contents:
                return chunk
            number += 1

    def _alike(self, stages: int, chunks: int) -> Iterator[tuple[_Blocks, list[tuple[Stage, Contents]], list[int]]]:
        """Each kind of stage with its chunks in their order, and the numbers of its stages."""
        from axonn_tune.cost.pipeline import parts_of

        problem = self.shapes.problem
        split = parts_of(problem, stages, chunks, problem.parts)
        alike = stages_alike(contents_of(problem.model, split, problem.mtp_part), stages)
        for (stage, contents), numbers in alike.items():
            yield _Blocks(stage, contents), list(chunks_of(stage, contents)), numbers

    def _stage(self, stage: Stage) -> tuple[Floats, Floats]:
        """Communication and computation of the stages in a place, of the candidates that are expected to have them."""
        if stage not in self._sums:
            worked = self._work(stage)
            self._sums[stage] = self.pricer.sums(worked.candidates, worked.work)
        return self._sums[stage]

    def _chunk(self, chunk: _Chunk) -> dict[_Blocks, ChunkTimes]:
        """A chunk, of the candidates that are expected to have its stages, by kind of stage."""
        if chunk not in self._chunks:
            worked, counts = self._work(chunk.stage), self._counts[chunk]
            columns = np.zeros((len(chunk.types), sum(one.stop - one.start for one in worked.shapes.values())))
            for some, contents in counts.items():
                columns[:, worked.shapes[some]] = np.array([count for _, count in contents])[:, None]
            same = len(set(counts.values())) == 1
            numbers = [float(count) for _, count in next(iter(counts.values()))] if same else list(columns)
            runs: Runs = tuple(zip(chunk.types, numbers, strict=True))
            lengths = [(some, *worked.places[some]) for some in counts]
            rows = np.concatenate([np.arange(start, start + len(mine)) for _, mine, start in lengths])
            times = self.pricer.chunk(worked.candidates.taken(rows), worked.work, chunk.part, runs=runs)
            ends = np.cumsum([len(mine) for _, mine, _ in lengths]).tolist()
            self._chunks[chunk] = {
                some: times.taken(np.arange(end - len(mine), end))
                for (some, mine, _), end in zip(lengths, ends, strict=True)
            }
        return self._chunks[chunk]

    def _work(self, stage: Stage) -> _Worked:
        """The stages in a place, of the candidates that are expected to have them."""
        if stage not in self._worked:
            places, shapes = dict[_Blocks, tuple[Integers, int]](), dict[_Blocks, slice]()
            sizes, found, start, first = list[tuple[dict[str, Value], int]](), list[Candidates](), 0, 0
            every_shape = list[Integers]()
            for some in [one for one in self._rows if one.stage == stage]:
                rows = distinct(np.concatenate(self._rows[some]))[0]
                candidates = self.candidates.taken(rows)
                among = distinct(candidates.shape)[0]
                places[some], shapes[some] = (rows, start), slice(first, first + len(among))
                found.append(replace(candidates, shape=first + np.searchsorted(among, candidates.shape)))
                sizes.append((self._values_of(some, among), len(among)))
                every_shape.append(self.shapes.piped[among])
                start, first = start + len(rows), first + len(among)
            routes = {axes: np.concatenate([one.routes[axes] for one in found]) for axes in found[0].routes}
            every = Candidates(np.concatenate([one.shape for one in found]), routes)
            clock = self.pricer.clock(_stacked(sizes), (self._clock, np.concatenate(every_shape)))
            work = self.pricer.work(clock, stage)
            self._worked[stage] = _Worked(every, work, places, shapes)
        return self._worked[stage]

    @cached_property
    def _clock(self) -> ComputeClock:
        """The clock of all shapes, whatever the stage."""
        return self.pricer.clock(self.shapes.values)

    def _values_of(self, some: _Blocks, among: Integers) -> dict[str, Value]:
        """Symbols of a kind of stage, of some shapes."""
        program, rows = self.pricer.program, self.shapes.piped[among]
        counts = blocks_by_type(self.shapes.problem.model, some.contents)
        columns = tuple(np.full(len(rows), float(count)) for count in counts)
        values, chunks = (
            self.shapes.stage_values(some.stage, columns, among),
            [(as_runs(one), 1.0) for one in some.contents],
        )
        again = values["repeated"] = self.fitting.repeated[rows].astype(np.float64)
        values |= blocks_by_kind(program, chunks, repeated=again, arithmetic=COLUMNS)
        kept = np.minimum(self.fitting.kept_layers[rows], values["L"])
        return values | kept_by_kind(program, chunks, values, kept, arithmetic=COLUMNS)


def _stacked(sizes: Sequence[tuple[dict[str, Value], int]]) -> dict[str, Value]:
    """Symbols of some shapes and then of others, given how many each are."""
    if len(sizes) == 1:
        return sizes[0][0]

    def joined(name: str) -> Value:
        columns = [values[name] for values, _ in sizes]
        if all(isinstance(one, float) and one == columns[0] for one in columns):
            return columns[0]
        return np.concatenate([np.broadcast_to(np.asarray(values[name]), count) for values, count in sizes])

    return {name: joined(name) for name in sizes[0][0]}


def _sends_s(shapes: Shapes, program: StepProgram, candidates: Candidates, routes: Sequence[GroupShape]) -> Floats:
    """Time of one message between stages of every candidate, s."""
    from axonn_tune.cost.pipeline import gathers_messages, message_s

    problem, over_x, orders = shapes.problem, candidates.routes["x"], shapes.problem.orders
    inside = [order[: order.index("pipeline")] == order[:-1] for order in orders]
    assert all(inside) or len(orders) == 1, "orders that are tried have the pipeline outermost"
    strides = np.ones(len(candidates), dtype=np.int64)
    for axis in orders[0][: orders[0].index("pipeline")]:
        strides *= shapes.sizes(axis)[candidates.shape]
    whole, size = (
        np.broadcast_to(np.asarray(program.send(scattered=one).size_bytes.evaluate(shapes.values)), len(shapes))
        for one in (False, problem.framework.schedule.scattered)
    )
    gathered, call_s = (
        gathers_messages(problem.framework),
        seconds(software_on(problem.framework, problem.machine).collective_us),
    )
    stages = shapes.stages[candidates.shape]
    ways, firsts, way = distinct((strides * (problem.gpus + 1) + stages) * len(routes) + (over_x if gathered else 0))
    found = np.empty(len(candidates))
    for number, first in zip(range(len(ways)), firsts.tolist(), strict=True):
        mine = way == number
        shape = candidates.shape[mine]
        found[mine] = message_s(
            size[shape],
            whole[shape],
            stages=GroupShape(((int(stages[first]), int(strides[first])),)),
            over_x=routes[over_x[first]] if gathered else None,
            machine=problem.machine.placing(problem.gpus),
            world=problem.gpus,
            call_s=call_s,
            arithmetic=COLUMNS,
        )
    return found
