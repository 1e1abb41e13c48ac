"""Replays of runs of equal blocks from idle streams: what bounds of pipeline stages are made of (`cost.paces`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from axonn_tune.cost.paces import FIRST_PART, INNER_PART, LAST_PART, PaceKey, Paces, Span, run_of
from axonn_tune.cost.recorder import State
from axonn_tune.cost.replay import Replay
from axonn_tune.program.operations import Collective, Value
from axonn_tune.program.schedule import RUN, Instructions
from axonn_tune.program.step import Behind, Block


class BlockRuns:
    """Runs of blocks in the chunks of pipeline stages, of the candidates of a replay."""

    def __init__(self, replay: Replay) -> None:
        self._replay, self._batch, self._blocks = replay, replay.schedule.micro_batch, replay.work.program.blocks
        self._types = range(len({block.type for block in self._blocks}))

    def paces(self, *, first: int, last: int, kept: bool) -> Paces:
        """Runs of blocks in the chunks of pipeline stages; first, last: layer types at the ends of the model; kept: as
        if no layer were resharded, which takes least where some are not."""
        batch, free = self._batch, self._replay.idle

        def entered(of_type: int) -> State:
            return self._replay.after(free, batch.enter(of_type))

        found = dict[PaceKey, Sequence[Value]]()
        for one in self._types:
            found["forward", None, one] = self._run_forward(free, one)
            found["opening", INNER_PART, one] = self._run_forward(entered(one), one)
        found["opening", FIRST_PART, first] = self._run_forward(self._replay.after(free, batch.embedding(first)), first)
        found["opening", LAST_PART, last] = self._run_forward(entered(last), last, head=batch.head(None))
        for kind, block in enumerate(self._blocks):
            behind, one = Behind(kind, kept), block.type
            several = ends = self._backward_states(free, one, behind)
            if not kept:
                ends = self._backward_states(self._replay.after(free, batch.enter_backward(kind)), one, behind)
            found["backward", None, kind] = self._spans(*several)
            found["begun", None, kind] = self._spans(*ends)
            found["closing", INNER_PART, kind] = self._spans(*ends, leaving=batch.leave(one))
            if one == first:
                found["closing", FIRST_PART, kind] = self._spans(*ends, leaving=batch.flush(one))
        found["head", None, 0] = (self._replay.alone_s(batch.head(None)),)
        for one in self._types:
            found["flush", None, one] = (self._replay.alone_s(batch.flush(one)),)
            found["leave", None, one] = (self._replay.alone_s(batch.leave(one)),)
        return self._paces_with(found, last=last, kept=kept)

    def idle_paces(self, *, first: int, last: int, kept: bool) -> Paces:
        """As of `paces`, with blocks that take as long as one from idle streams: no run takes less, and this is found
        without a run."""
        batch, alone_s = self._batch, self._replay.alone_s
        alone = [
            (batch.forward(block.type, None), batch.backward(None, Behind(kind, kept), None))
            for kind, block in enumerate(self._blocks)
        ]
        ahead = {block.type: alone_s(forward) for block, (forward, _) in zip(self._blocks, alone, strict=True)}
        turned_s = alone_s(batch.forward(last, None, head=True)) - alone_s(batch.forward(last, None))
        found: dict[PaceKey, Sequence[Value]] = {("forward", None, one): _run_of(ahead[one]) for one in self._types}
        found["opening", FIRST_PART, first] = _run_of(ahead[first], alone_s(batch.embedding(first)))
        headed_s = ahead[last] + turned_s
        ended = Span(headed_s + alone_s(batch.head(None)), headed_s)
        found["opening", LAST_PART, last] = run_of([ended], Span(ahead[last], ahead[last]))
        for kind, block in enumerate(self._blocks):
            found["backward", None, kind] = _run_of(alone_s(alone[kind][1]))
            if block.type == first:
                found["closing", FIRST_PART, kind] = _run_of(alone_s(alone[kind][1]), alone_s(batch.flush(first)))
        return self._paces_with(found, last=last, kept=kept)

    def _paces_with(self, found: dict[PaceKey, Sequence[Value]], *, last: int, kept: bool) -> Paces:
        """Runs of blocks with what does not depend on what is around them."""
        batch, program = self._batch, self._replay.work.program
        for kind, block in enumerate(self._blocks):
            behind = Behind(kind, kept)
            alone = batch.forward(block.type, block.type), batch.backward(block.type, behind, kind)
            found["issued", None, kind] = self._issued_s(kind)
            found["saved", None, kind] = (self._replay.block_saves_s(batch, block.type, behind),)
            found["sent", None, kind] = (self._communicated_s(block, kept=kept),)
            found["computed", None, kind] = (self._computed_s(*alone),)
        headed, plain = batch.forward(last, None, head=True), batch.forward(last, None)
        found["ends", None, 0] = (
            self._computed_s(batch.embedding(None), batch.flush(None)),
            self._computed_s(headed, batch.head(None)) - self._computed_s(plain),
        )
        return Paces.of(
            found, [(program.kind(one, repeats=True), program.kind(one, repeats=False)) for one in self._types]
        )

    def _run_forward(self, start: State, of_type: int, *, head: Instructions | None = None) -> list[Value]:
        """Equal blocks forward from a state; head: the LM head behind them."""
        batch = self._batch
        middle, last = batch.forward(of_type, of_type), batch.forward(of_type, None, head=head is not None)
        states = [start, self._replay.after(start, middle)]
        states.append(self._replay.after(states[-1], middle))
        ended, every_s = [self._replay.after(state, last) for state in states], states[2][0] - states[1][0]
        return self._spans(start, ended, every_s, leaving=head or ())

    def _backward_states(self, start: State, of_type: int, block: Behind) -> tuple[State, list[State], Value]:
        """Equal blocks backward from a state, the first of a chunk: that state, those after one to three or four
        blocks, and what each more takes."""
        backward, own = self._batch.backward, block.kind
        opened, middle = backward(None, block, own), backward(of_type, block, own)
        states = [self._replay.after(start, opened)]
        states.append(self._replay.after(states[-1], middle))
        states.append(self._replay.after(states[-1], middle))
        every_s = states[2][0] - states[1][0]
        if block.kept:
            return start, states, every_s
        last = backward(of_type, block, None)
        single = self._replay.after(start, backward(None, block, None))
        return start, [single, *(self._replay.after(state, last) for state in states)], every_s

    def _spans(
        self, start: State, ended: Sequence[State], every_s: Value, *, leaving: Instructions = ()
    ) -> list[Value]:
        """Of one to three or four blocks from a state, with what follows them; every_s: what each more takes."""
        whole_s = [self._replay.after(state, leaving)[0] if leaving else state[0] for state in ended]
        others_s = start[0] + self._replay.alone_s(leaving)
        spans = [Span(one_s, one_s - others_s) for one_s in whole_s]
        return run_of(spans, Span(every_s, every_s))

    def _computed_s(self, *parts: Instructions) -> Value:
        """Computation of some parts, s."""
        total: Value = 0.0
        for code, number, _ in chain(*parts):
            total = total + (self._replay.duration_s(number) if code == RUN else 0.0)
        return total

    def _issued_s(self, kind: int) -> tuple[Value, Value, Value]:
        """The host's time to issue a block forward, backward, and in which it waits for counts of tokens, s."""
        dispatch_s = self._replay.work.clock.rates.dispatch_s
        if not dispatch_s:
            return 0.0, 0.0, 0.0
        (ahead, behind), sent_s = self._replay.issued(kind), self._replay.sent_tokens_s(kind)
        return dispatch_s * ahead, dispatch_s * behind, 0.0 if sent_s is None else sent_s

    def _communicated_s(self, block: Block, *, kept: bool) -> Value:
        """Communication of a block in a step, s; kept: without what is gathered again."""
        total: Value = 0.0
        for section in (block.forward, block.backward, block.bucket, block.parameters):
            for step in section.operations:
                again = isinstance(step, Collective) and step.role == "weight" and step.phase != "forward"
                if isinstance(step, Collective) and not (again and kept):
                    total = total + self._replay.value(section.repeats / block.given.blocks) * self._replay.calls_s(
                        step
                    )
        return total


def _run_of(block_s: Value, more_s: Value = 0.0) -> list[Value]:
    """A run whose blocks take equally long; more_s: what comes to it."""
    return run_of([Span(block_s + more_s, block_s)], Span(block_s, block_s))
