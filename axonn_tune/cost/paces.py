"""How long runs of equal blocks take in a chunk of a pipeline stage: what splits of the layers are compared by.

A chunk enters, plays runs of equal blocks, and leaves. Its clocks are sums and maxima of earlier ones, so what starts
later ends later by no less: a run takes nowhere less than from idle streams, and its blocks from the fifth on take the
pace of the repeat before at least, since every stream advances at that pace or slower. So times of a chunk are never
above those of its replay, and they equal them for a chunk of one run, up to streams that fall behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.program.operations import Floats, Value
from axonn_tune.program.step import Contents, Stage

FIRST_PART, INNER_PART, LAST_PART = Stage(True, False), Stage(False, False), Stage(False, True)


class Span(NamedTuple):
    """A pass through a chunk, s: whole, and of that the blocks."""

    whole_s: Value
    blocks_s: Value

    def longer(self, more: Span, times: float = 1.0) -> Span:
        """With some times another one behind it."""
        return Span(self.whole_s + times * more.whole_s, self.blocks_s + times * more.blocks_s)


class Run(NamedTuple):
    """Spans of a run of one to four equal blocks, and what each more adds, s, `[2 × 5, candidates]`: whole and blocks
    of each in turn."""

    values: Floats

    def of(self, count: int) -> Span:
        """Of so many blocks, one at least."""
        if count <= 4:
            return Span(self.values[2 * count - 2], self.values[2 * count - 1])
        more = count - 4.0
        return Span(self.values[6] + more * self.values[8], self.values[7] + more * self.values[9])

    @property
    def least_s(self) -> Floats:
        """What each block takes at least."""
        values = self.values
        found: Floats = np.minimum.reduce([values[1], values[3] / 2, values[5] / 3, values[7] / 4, values[9]])
        return found

    def added_s(self, each_s: Floats) -> Floats:
        """What comes to blocks that take so long at least."""
        found = np.minimum.reduce([self.values[2 * number] - (number + 1) * each_s for number in range(4)])
        return np.asarray(np.maximum(found, 0.0))


def run_of(spans: Sequence[Span], more: Span) -> list[Value]:
    """The values of a run, given those of its first blocks and what each more adds."""
    four = list(spans)
    while len(four) < 4:
        four.append(four[-1].longer(more))
    return [value for span in (*four, more) for value in span]


class ChunkPaces(NamedTuple):
    """Both passes of one micro-batch through a chunk, what two micro-batches save beside each other, what of both is
    waits for the host, and the backward pass of the step's last micro-batch, s."""

    forward_s: Value
    backward_s: Value
    saved_s: Value
    waited_s: Value
    last_s: Value


Part: TypeAlias = Literal["forward", "backward", "opening", "closing", "begun"]
"""Runs of `Paces`, by layer type or kind of block."""
Other: TypeAlias = Literal["head", "flush", "leave", "issued", "saved", "sent", "computed", "ends"]
"""What else they have."""
PaceKey: TypeAlias = tuple[Part | Other, Stage | None, int]
"""What of, where in the model, and which layer type or kind of block; 0 where there is one."""


@dataclass(frozen=True)
class Paces:
    """Runs of blocks: forward of each layer type, backward of each kind of block.

    table: all of it, s, `[values, candidates]`; places: where in it each begins; kinds: of each layer type, with
    repeats and without. Forward, backward: runs from idle streams. Opening, closing: of a chunk of one run, by its
    place, with what is before and after its blocks; of several runs those that have nothing behind them: `opening`
    forward, `begun` backward. Head, flush, leave: from idle streams, forward with the head's own backward pass, and
    after the last block of a type. Issued: the host's time to issue a block of each kind, forward and backward, and
    in which it waits for counts of tokens. Saved: of each kind by two micro-batches beside each other. Sent:
    communication of each kind in a step; computed: computation in one micro-batch; ends: that of embedding and
    head.
    """

    table: Floats
    places: Mapping[PaceKey, int]
    kinds: Sequence[tuple[int, int]]

    @staticmethod
    def of(values: Mapping[PaceKey, Sequence[Value]], kinds: Sequence[tuple[int, int]]) -> Paces:
        """Of values of each, columns or numbers."""
        each = [value for several in values.values() for value in several]
        table = np.empty((len(each), max(np.size(value) for value in each)))
        for row, value in zip(table, each, strict=True):
            row[:] = value
        ends = np.cumsum([len(several) for several in values.values()]).tolist()
        places = dict(zip(values, [0, *ends[:-1]], strict=True))
        return Paces(table, places, kinds)

    def run(self, part: Part, number: int, place: Stage | None = None) -> Run:
        """One of its runs."""
        first = self.places[part, place, number]
        return Run(self.table[first : first + 10])

    def value(self, part: Other, number: int = 0, at: int = 0) -> Floats:
        """One of its other values."""
        found: Floats = self.table[self.places[part, None, number] + at]
        return found

    def taken(self, rows: NDArray[np.int64]) -> Paces:
        """Of some candidates."""
        return Paces(self.table[:, rows], self.places, self.kinds)

    @staticmethod
    def joined(several: Sequence[Paces]) -> Paces:
        """Candidates one after the other; kinds of blocks as of the first."""
        return Paces(np.concatenate([one.table for one in several], axis=1), several[0].places, several[0].kinds)

    def kinds_of(self, contents: Contents, repeated: int) -> list[tuple[int, int, int]]:
        """Blocks of a chunk that are alike, in the order of their backward passes: kind, layer type, count."""
        found, left = list[tuple[int, int, int]](), sum(count for _, count in contents)
        for of_type, count in reversed(contents):
            left -= count
            again, (repeats, plain) = min(max(repeated - left, 0), count), self.kinds[of_type]
            each = ((plain, count - again), (repeats, again)) if repeats != plain else ((plain, count),)
            found += [(kind, of_type, number) for kind, number in each if number]
        return found

    def sums(self, contents: Contents, repeated: int) -> tuple[Value, Value]:
        """Computation of the blocks of a chunk in one micro-batch, and their communication in a step, s."""
        each = [(count, kind) for kind, _, count in self.kinds_of(contents, repeated)]
        computed_s, sent_s = (
            sum((count * self.value(part, kind) for count, kind in each), 0.0) for part in ("computed", "sent")
        )
        return computed_s, sent_s

    def chunk(self, part: Stage, contents: Contents, repeated: int) -> ChunkPaces:
        """A chunk with embedding or LM head; repeated: the first of its blocks, where only some repeat."""
        if not contents:
            return ChunkPaces(self.value("head") if part.last else 0.0, 0.0, 0.0, 0.0, 0.0)
        forward, backward = self._forward(part, contents), self._backward(part, contents, repeated)
        several = [(count, kind) for kind, _, count in self.kinds_of(contents, repeated)]
        ahead_s, behind_s, asked_s = (
            sum(count * self.value("issued", kind, at) for count, kind in several) for at in range(3)
        )
        saved_s = sum(count * self.value("saved", kind) for count, kind in several)
        blocks_s, issued_s = forward.blocks_s + backward.blocks_s, ahead_s + behind_s + asked_s
        waited_s = np.maximum(issued_s - blocks_s, 0.0)
        share = ahead_s / np.maximum(ahead_s + behind_s, 1e-30)
        behind_s = backward.whole_s + (1.0 - share) * waited_s
        return ChunkPaces(
            forward.whole_s + share * waited_s,
            behind_s,
            np.minimum(saved_s, np.maximum(blocks_s - issued_s, 0.0)),
            waited_s,
            behind_s,
        )

    def _forward(self, part: Stage, contents: Contents) -> Span:
        (first, count), *others = contents
        if not others and ("opening", part, first) in self.places:
            return self.run("opening", first, part).of(count)
        found = self.run("opening", first, FIRST_PART if part.first else INNER_PART).of(count)
        for of_type, several in others:
            found = found.longer(self.run("forward", of_type).of(several))
        return found._replace(whole_s=found.whole_s + self.value("head")) if part.last else found

    def _backward(self, part: Stage, contents: Contents, repeated: int) -> Span:
        (first, of_type, count), *others = self.kinds_of(contents, repeated)
        if not others:
            return self.run("closing", first, FIRST_PART if part.first else INNER_PART).of(count)
        found = self.run("begun", first).of(count)
        for kind, of_type, several in others:  # noqa: B007 - that of the last one
            found = found.longer(self.run("backward", kind).of(several))
        left = self.value("flush" if part.first else "leave", of_type)
        return found._replace(whole_s=found.whole_s + left)
