"""The order of one step on a compute lane and on communication lanes, as instructions any interpreter can follow.

Computation runs in order on one lane. A collective runs on the lane of the outermost tier its group
crosses; lanes are first in, first out. `Issue` hands a collective to its lane and goes on; `Wait`
stops the compute lane until the collective in a slot has ended; `Sync` is both at once. What overlaps:

- weight gathers form a chain: when one is waited for, the next is issued (forward, recompute and
  backward; kept layers are not in the backward chain);
- the input gradient's all-reduce is waited for after the weight gradient's product;
- a weight gradient's reduce-scatter is waited for one layer later, then its data-parallel bucket may go;
- buckets are waited for before the optimizer;
- with the micro-batch split in two, one half's output all-reduce runs behind the other half's work,
  and each block ends with both halves done.

With an overlap switched off the wait follows its issue directly; nothing else changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from axonn_tune.program.layers import PARTS
from axonn_tune.program.operations import ONCE, Collective, Computation, Kernel, Operation
from axonn_tune.program.step import Section, StepProgram
from axonn_tune.specs.workload import Overlap


@dataclass(frozen=True, eq=False)
class Run:
    """Computation, back to back. Equal by identity: interpreters keep durations by it."""

    operations: tuple[Computation, ...]


@dataclass(frozen=True, eq=False)
class Issue:
    """Hand a collective to its lane; its end is kept in `slot`."""

    collective: Collective
    slot: str


@dataclass(frozen=True)
class Wait:
    """Stop until what `slot` holds has ended; nothing if it holds nothing."""

    slot: str


@dataclass(frozen=True, eq=False)
class Sync:
    """A collective the compute lane waits for at once."""

    collective: Collective


Instruction: TypeAlias = Run | Issue | Wait | Sync
Instructions: TypeAlias = tuple[Instruction, ...]


@dataclass(frozen=True)
class Gather:
    """One link of the gather chain: the kernel that prepares it, and the collective."""

    prepare: Kernel
    collective: Collective


@dataclass(frozen=True)
class BackwardBlocks:
    """Backward pass over the blocks: the first block, then repeated ones, then the last.

    Blocks whose weights are kept come first in backward order. Each part is a run of equal blocks.
    """

    first: Instructions
    middle: Instructions
    last: Instructions
    only: Instructions
    kept_first: Instructions
    kept_middle: Instructions


@dataclass(frozen=True)
class MicroBatch:
    """Instructions of one micro-batch; `head` holds the chain's next gather unless all layers are kept."""

    embedding: Instructions
    block: Instructions
    last_block: Instructions
    head: Instructions
    head_all_kept: Instructions
    backward: BackwardBlocks
    flush: Instructions


@dataclass(frozen=True)
class StepSchedule:
    """One step: all micro-batches but the last, the last with its data-parallel buckets, the end."""

    micro_batch: MicroBatch
    last_micro_batch: MicroBatch
    end: Instructions


def build_schedule(program: StepProgram, *, overlaps: tuple[Overlap, ...], split: bool) -> StepSchedule:
    """Schedule of a program with the given overlaps on; `split`: the micro-batch runs as two halves."""
    compiler = _Compiler(program, frozenset(overlaps), split=split)
    return StepSchedule(
        micro_batch=compiler.micro_batch(buckets=()),
        last_micro_batch=compiler.micro_batch(buckets=("head", "block", "table")),
        end=(Wait("data"), *_plain(program.end.operations)),
    )


def _plain(operations: Iterable[Operation]) -> Instructions:
    """Everything in order, nothing overlapped."""
    return merged(Sync(step) if isinstance(step, Collective) else Run((step,)) for step in operations)


def merged(instructions: Iterable[Instruction]) -> Instructions:
    """Join neighbouring runs."""
    joined: list[Instruction] = []
    for instruction in instructions:
        previous = joined[-1] if joined else None
        if isinstance(instruction, Run) and isinstance(previous, Run):
            joined[-1] = Run(previous.operations + instruction.operations)
        else:
            joined.append(instruction)
    return tuple(joined)


def _gathers(operations: Iterable[Operation]) -> list[Gather]:
    """The gather chain through a section."""
    chain, prepare = [], None
    for step in operations:
        if isinstance(step, Kernel) and step.prepares_gather:
            prepare = step
        elif isinstance(step, Collective) and step.role == "weight":
            assert prepare is not None, "every weight gather follows the kernel that prepares it"
            chain.append(Gather(prepare, step))
    return chain


class _Compiler:
    """Turns sections into instructions; holds what they share, no state of a compilation."""

    def __init__(self, program: StepProgram, overlaps: frozenset[Overlap], *, split: bool) -> None:
        self.program = program
        self.overlaps = overlaps
        self.split = split and "output" in overlaps
        self.block_accumulate = [
            step for step in program.block_backward.operations if isinstance(step, Kernel) and step.accumulates
        ][-1]

    def micro_batch(self, *, buckets: tuple[str, ...]) -> MicroBatch:
        """One micro-batch; `buckets` names the sections of data-parallel buckets sent in it."""
        program = self.program
        embedding, block, head, backward = (
            _gathers(part.operations)
            for part in (program.embedding, program.block, program.head, program.block_backward)
        )
        head_bucket = self._bucket("head", buckets)
        start = self._start(embedding[0])
        return MicroBatch(
            embedding=merged([*start, *self._section(program.embedding, following=block[0])]),
            block=self._section(program.block, following=block[0]),
            last_block=self._section(program.block, following=head[0]),
            head=self._section(program.head, following=backward[0], bucket=head_bucket, flush=True),
            head_all_kept=self._section(program.head, bucket=head_bucket, flush=True),
            backward=self._backward_blocks(backward, bucket=self._bucket("block", buckets)),
            flush=self._flush(buckets),
        )

    def _bucket(self, name: str, buckets: tuple[str, ...]) -> tuple[Collective, ...]:
        """Collectives of one bucket section, none unless it is sent in this micro-batch."""
        program = self.program
        section = {"head": program.head_bucket, "block": program.block_bucket, "table": program.table_buckets}
        found = section[name].operations if name in buckets else ()
        return tuple(step for step in found if isinstance(step, Collective))

    def _backward_blocks(self, chain: list[Gather], *, bucket: tuple[Collective, ...]) -> BackwardBlocks:
        program = self.program.block_backward
        kept = Section(program.name, program.repeats, tuple(_without_gathers(program.operations)))
        pending = Pending(self.block_accumulate, bucket)
        return BackwardBlocks(
            first=self._section(program, following=chain[0], bucket=bucket),
            middle=self._section(program, following=chain[0], pending=pending, bucket=bucket),
            last=self._section(program, pending=pending, bucket=bucket),
            only=self._section(program, bucket=bucket),
            kept_first=self._section(kept, bucket=bucket),
            kept_middle=self._section(kept, pending=pending, bucket=bucket),
        )

    def _start(self, gather: Gather) -> Instructions:
        """The first gather of a chain, issued with nothing to hide behind."""
        if "gather_prefetch" not in self.overlaps:
            return ()
        return Run((gather.prepare,)), Issue(gather.collective, "gather")

    def _section(
        self,
        section: Section,
        *,
        following: Gather | None = None,
        pending: Pending | None = None,
        bucket: tuple[Collective, ...] = (),
        flush: bool = False,
    ) -> Instructions:
        """Instructions of one section.

        following: the gather after the section's last in the chain; pending: what the section before
        left running; bucket: what goes out when this section's last gradient is there; flush: see to
        that inside the section.
        """
        emitter = _Emitter(self.overlaps, [*_gathers(section.operations), following], pending, bucket)
        for step in _halves(section.operations) if self.split else section.operations:
            emitter.add(step)
        return merged(emitter.finish(flush=flush))

    def _flush(self, buckets: tuple[str, ...]) -> Instructions:
        """After the last block: its reduce-scatter and bucket, then the backward pass of the embedding."""
        deferred = "weight_gradient" in self.overlaps
        pending = Pending(self.block_accumulate, self._bucket("block", buckets)) if deferred else None
        emitter = _Emitter(self.overlaps, [None], pending, self._bucket("table", buckets))
        for step in self.program.embedding_backward.operations:
            emitter.add(step)
        return merged(emitter.finish(flush=True))


def _halves(operations: Iterable[Operation]) -> Iterator[Operation | Issue | Wait]:
    """Interleave the two halves of a split micro-batch in the forward and recompute part of a section.

    A stage is what leads up to an output all-reduce. Each half runs a stage once its previous
    all-reduce is there, then issues its own; weight gathers happen once, with the first half.
    """
    rest = list(operations)
    stage: list[Operation] = []
    while rest and rest[0].phase != "backward":
        step = rest.pop(0)
        if isinstance(step, Collective) and step.role == "output":
            yield from _stage_halves(stage, step)
            stage = []
        else:
            stage.append(step)
    yield from _stage_halves(stage, None)
    yield from rest


def _stage_halves(stage: list[Operation], reduce: Collective | None) -> Iterator[Operation | Issue | Wait]:
    """Both halves of one stage; without an all-reduce at its end, both halves end with it."""
    for half in (0, 1):
        yield Wait(f"output{half}")
        for step in stage:
            if step.calls == PARTS:
                yield replace(step, calls=ONCE)
            elif half == 0:
                yield step
        if reduce is not None:
            yield Issue(replace(reduce, calls=ONCE), f"output{half}")


def _without_gathers(operations: Iterable[Operation]) -> Iterator[Operation]:
    """A section of kept layers: no gathers and no kernels that prepare them."""
    for step in operations:
        gathers = isinstance(step, Collective) and step.role == "weight"
        if not gathers and not (isinstance(step, Kernel) and step.prepares_gather):
            yield step


@dataclass(frozen=True)
class Pending:
    """Owed for a running reduce-scatter: adding its result, then sending the bucket that completes."""

    accumulate: Kernel
    bucket: tuple[Collective, ...] = ()


class _Emitter:
    """Emits the instructions of one section, moving waits to where the overlaps allow."""

    def __init__(
        self,
        overlaps: frozenset[Overlap],
        chain: list[Gather | None],
        pending: Pending | None,
        bucket: tuple[Collective, ...],
    ) -> None:
        self.overlaps = overlaps
        self.chain = chain
        self.deferred = "weight_gradient" in overlaps
        self.pending = pending if self.deferred else None
        self.bucket = bucket
        self.output: list[Instruction] = []
        self.owed_input_gradient: str | None = None

    def add(self, step: Operation | Issue | Wait) -> None:
        """Emit one operation, and before it the waits that can be put off no longer."""
        if isinstance(step, Issue | Wait):
            self.output.append(step)
            return
        if self.owed_input_gradient and not self._belongs_to_weight_gradient(step):
            self._settle_input_gradient()
        if isinstance(step, Collective):
            self._communicate(step)
        elif isinstance(step, Kernel) and step.accumulates and self.deferred:
            self.pending = Pending(step)
        elif not (isinstance(step, Kernel) and step.prepares_gather):
            self.output.append(Run((step,)))

    def finish(self, *, flush: bool) -> list[Instruction]:
        """Settle what the section owes; with `flush` its last reduce-scatter too. Returns all instructions."""
        self._settle_input_gradient()
        if flush:
            self._finish_pending()
        if flush or not self.deferred:
            self._send(self.bucket)
        return self.output

    def _communicate(self, step: Collective) -> None:
        if step.role == "weight":
            self._gather()
        elif step.role == "input_gradient" and "input_gradient" in self.overlaps:
            self.output.append(Issue(step, "input_gradient"))
            self.owed_input_gradient = step.layer
        elif step.role == "weight_gradient" and self.deferred:
            self._finish_pending()
            self.output.append(Issue(step, "weight_gradient"))
        else:
            self.output.append(Sync(step))

    def _belongs_to_weight_gradient(self, step: Operation) -> bool:
        same = step.layer == self.owed_input_gradient and step.phase == "backward"
        return same and (not isinstance(step, Collective) or step.role == "weight_gradient")

    def _settle_input_gradient(self) -> None:
        if self.owed_input_gradient:
            self.output.append(Wait("input_gradient"))
            self.owed_input_gradient = None

    def _gather(self) -> None:
        """Wait for this gather and issue the next of the chain; or, without prefetch, gather at once."""
        here, following = self.chain[0], self.chain[1]
        del self.chain[0]
        assert here is not None, "the chain holds every gather of the section"
        if "gather_prefetch" not in self.overlaps:
            self.output += [Run((here.prepare,)), Sync(here.collective)]
            return
        self.output.append(Wait("gather"))
        if following is not None:
            self.output += [Run((following.prepare,)), Issue(following.collective, "gather")]

    def _finish_pending(self) -> None:
        if self.pending is not None:
            self.output += [Wait("weight_gradient"), Run((self.pending.accumulate,))]
            self._send(self.pending.bucket)
            self.pending = None

    def _send(self, bucket: tuple[Collective, ...]) -> None:
        overlapped = "data_parallel" in self.overlaps
        self.output += [Issue(step, "data") if overlapped else Sync(step) for step in bucket]
