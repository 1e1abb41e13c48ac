"""How long runs of equal blocks take in a chunk of a pipeline stage: what splits of the layers are compared by.

A chunk enters, plays runs of equal blocks, and leaves. Its clocks are sums and maxima of earlier ones, so what starts
later ends later by no less: a run takes nowhere less than from idle streams, and its blocks from the fifth on take the
pace of the repeat before at least, since every stream advances at that pace or slower. So times of a chunk are never
above those of its replay, and they equal them for a chunk of one run, up to streams that fall behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from axonn_tune.program.operations import Value
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
    """Spans of a run of one to four equal blocks, and what each more adds."""

    one: Span
    two: Span
    three: Span
    four: Span
    more: Span

    def of(self, count: int) -> Span:
        """Of so many blocks, one at least."""
        return self[count - 1] if count <= 4 else self.four.longer(self.more, count - 4.0)


class ChunkPaces(NamedTuple):
    """Both passes of one micro-batch through a chunk, what two micro-batches save beside each other, what of both is
    waits for the host, and the backward pass of the step's last micro-batch, s."""

    forward_s: Value
    backward_s: Value
    saved_s: Value
    waited_s: Value
    last_s: Value


@dataclass(frozen=True)
class Paces:
    """Runs of blocks: forward of each layer type, backward of each kind of block; columns over candidates, or numbers.

    forward, backward: from idle streams. opening, closing: of a chunk of one run, by its place, with what is before and
    after its blocks; of several runs those that have nothing behind them: `opening` forward, `begun` backward. head,
    flush, leave: from idle streams, forward with the head's own backward pass, and after the last block of a type.
    issued: the host's time to issue a block of each kind, forward and
    backward, and in which it waits for counts of tokens, s. saved_s: of each kind by two
    micro-batches beside each other. sent_s: communication of each kind in a step; computed_s: computation in one
    micro-batch; ends_s: that of embedding and head. kinds: of each layer type, with repeats and without.
    """

    forward: Sequence[Run]
    backward: Sequence[Run]
    opening: Mapping[tuple[Stage, int], Run]
    closing: Mapping[tuple[Stage, int], Run]
    begun: Sequence[Run]
    head_s: Value
    flush_s: Sequence[Value]
    leave_s: Sequence[Value]
    issued: Sequence[tuple[Value, Value, Value]]
    saved_s: Sequence[Value]
    sent_s: Sequence[Value]
    computed_s: Sequence[Value]
    ends_s: tuple[Value, Value]
    kinds: Sequence[tuple[int, int]]

    def taken(self, rows: NDArray[np.int64]) -> Paces:
        """Of some candidates."""
        return self._mapped(lambda value: value[rows] if isinstance(value, np.ndarray) else value)

    @staticmethod
    def joined(several: Sequence[Paces], lengths: Sequence[int]) -> Paces:
        """Candidates one after the other, given how many each are; kinds of blocks as of the first."""

        def joined(*values: Value) -> Value:
            if all(isinstance(one, float) and one == values[0] for one in values):
                return values[0]
            pairs = zip(values, lengths, strict=True)
            return np.concatenate([np.broadcast_to(np.asarray(one), count) for one, count in pairs])

        return several[0]._mapped(joined, *several[1:])

    def _mapped(self, change: Callable[..., Value], *others: Paces) -> Paces:
        """With a change of all columns, which takes those of others in the same place, too."""
        names = [each.name for each in fields(self) if each.name != "kinds"]
        changed = {name: _changed(change, *(getattr(one, name) for one in (self, *others))) for name in names}
        return replace(self, **changed)

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
            sum((count * column[kind] for count, kind in each), 0.0) for column in (self.computed_s, self.sent_s)
        )
        return computed_s, sent_s

    def chunk(self, part: Stage, contents: Contents, repeated: int) -> ChunkPaces:
        """A chunk with embedding or LM head; repeated: the first of its blocks, where only some repeat."""
        if not contents:
            return ChunkPaces(self.head_s if part.last else 0.0, 0.0, 0.0, 0.0, 0.0)
        forward, backward = self._forward(part, contents), self._backward(part, contents, repeated)
        several = [(count, kind) for kind, _, count in self.kinds_of(contents, repeated)]
        ahead_s, behind_s, asked_s = (
            sum(count * self.issued[kind][part] for count, kind in several) for part in range(3)
        )
        saved_s = sum(count * self.saved_s[kind] for count, kind in several)
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
        if not others and (part, first) in self.opening:
            return self.opening[part, first].of(count)
        found = self.opening[FIRST_PART if part.first else INNER_PART, first].of(count)
        for of_type, several in others:
            found = found.longer(self.forward[of_type].of(several))
        return found._replace(whole_s=found.whole_s + self.head_s) if part.last else found

    def _backward(self, part: Stage, contents: Contents, repeated: int) -> Span:
        (first, of_type, count), *others = self.kinds_of(contents, repeated)
        if not others:
            return self.closing[FIRST_PART if part.first else INNER_PART, first].of(count)
        found = self.begun[first].of(count)
        for kind, of_type, several in others:  # noqa: B007 - that of the last one
            found = found.longer(self.backward[kind].of(several))
        return found._replace(whole_s=found.whole_s + (self.flush_s if part.first else self.leave_s)[of_type])


def _changed(change: Callable[..., Value], value: Any, *others: Any) -> Any:  # noqa: ANN401 - columns in containers
    if isinstance(value, dict):
        return {key: _changed(change, one, *(other[key] for other in others)) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        found = [_changed(change, *ones) for ones in zip(value, *others, strict=True)]
        return type(value)(*found) if hasattr(value, "_fields") else found
    return change(value, *others)
