"""Candidates whose layers are not split over stages yet: what no split of them is below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from axonn_tune.cost.columns import SLAB_ROWS, distinct
from axonn_tune.program.operations import Floats, Integers
from axonn_tune.ranking.bound import (
    Layers,
    Parts,
    Shape,
    any_order_s,
    any_split_s,
    contended,
    parts_within,
    sent_of_mean_s,
)
from axonn_tune.ranking.space import Problem


@dataclass(frozen=True)
class Unsplit:
    """Candidates whose layers are not split yet, as columns: of several pools, of the same number format and model.

    layers: of those that differ; alike: which of these each one is; updates_s: what blocks of each type add to the end
    of a step; the others as of `bound.Shape`.
    """

    problem: Problem
    layers: Layers
    alike: Integers
    stages: Integers
    batches: Floats
    repeated: Integers
    sends_s: Floats
    contention: Floats
    updates_s: Floats

    @staticmethod
    def joined(several: Sequence[Unsplit]) -> Unsplit:
        """One after the other; the problem of the first."""
        first, ahead = several[0], np.cumsum([0, *(len(one.layers) for one in several)])
        names = ("stages", "batches", "repeated", "sends_s", "contention", "updates_s")
        return Unsplit(
            problem=first.problem,
            layers=Layers.joined([one.layers for one in several]),
            alike=np.concatenate([one.alike + start for one, start in zip(several, ahead.tolist(), strict=False)]),
            **{name: np.concatenate([getattr(one, name) for one in several]) for name in names},
        )

    def least_sent_s(self, chunks: Integers) -> Floats:
        """Communication of the mean stage of each, s: some stage has no less; chunks: of each."""
        sent_s = self.layers.sent_s[self.alike]
        return sent_of_mean_s(sent_s, self.batches * self.sends_s, stages=self.stages, chunks=chunks)

    def least_s(self, rows: Integers | None = None, chunks: Integers | None = None) -> Floats:
        """Least step of some over all splits of their layers, s, of all as a default; chunks: of each row, of any
        number as a default. Without pipeline stages that of the only stage."""
        rows = np.arange(len(self.alike)) if rows is None else rows
        found, model = np.empty(len(rows)), self.problem.model
        for at, stages in _groups(self.stages[rows], chunks):
            own = rows[at]
            layers, batches, contention = self.layers.taken(self.alike[own]), self.batches[own], self.contention[own]
            if stages == 1:
                # Blocks of all micro-batches one after the other, with embedding and LM head.
                whole_s, computed_s = batches * layers.whole_s(1.0 / batches), batches * layers.computed_s
                found[at] = contended(whole_s, computed_s, layers.sent_s, contention=contention)
                continue
            if self.problem.framework.step.splits_backward:
                found[at] = any_order_s(layers, stages, batches, contention=contention)
                continue
            cut, parts, end_s = None, Parts(0, model.layers, 0, 0), np.zeros(1)
            if chunks is not None:
                cut, parts = chunks[at], _parts(self.problem, stages, chunks[at])
                # The first stage has so many blocks at least, and no more of the rarer types than there are.
                most = int(np.argmax(model.counts))
                least = cut * parts.shortest - (sum(model.counts) - model.counts[most])
                end_s = np.maximum(least, 0) * self.updates_s[own, most]
            shape = Shape(stages, cut, batches, self.repeated[own], parts, self.sends_s[own], end_s)
            found[at] = any_split_s(layers, shape, schedule=self.problem.framework.schedule, contention=contention)
        return found


def _groups(stages: Integers, chunks: Integers | None) -> Iterator[tuple[Integers, int]]:
    """Candidates with as many stages, those with one chunk and those with several, by their places, at
    most `SLAB_ROWS` and fewer of many stages."""
    single = np.zeros(len(stages), dtype=np.int64) if chunks is None else 1 * (chunks == 1)
    for code in distinct(2 * stages + single)[0].tolist():
        rows, most = np.flatnonzero(2 * stages + single == code), 4 * SLAB_ROWS // max(code // 2, 4)
        for start in range(0, len(rows), most):
            yield rows[start : start + most], code // 2


def _parts(problem: Problem, stages: int, chunks: Integers) -> Parts:
    """Limits of the splits of candidates."""
    # Imported here: most searches have no pipeline stages, and start-up time is theirs.
    from axonn_tune.cost.pipeline import parts_of

    numbers, _, number = distinct(chunks)
    searched, alike = problem.splits, len(problem.model.decoder_runs) == 1
    own = [parts_of(problem, stages, one, problem.parts) for one in numbers.tolist()]
    limits = np.array([parts_within(one, stages, searched=searched, alike=alike) for one in own])
    shortest, longest, last, common = limits[number].T
    # Where it is not in the last part, multi-token prediction counts to the blocks of its part.
    return Parts(shortest, longest + problem.model.mtp_layers * (problem.mtp_part is not None), last, common)
