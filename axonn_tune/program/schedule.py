"""The order of one step on a compute stream and on communication streams, as instructions for an interpreter.

Computation runs in order on one stream. A collective runs on the stream of the outermost tier its group
crosses; streams are first in, first out. `Issue` puts a collective on its stream; `Wait`
stops the compute stream until the collective behind a handle has ended; `Sync` is both at once. What overlaps:

- weight gathers form a chain: when one is waited for, the next is issued (forward, recompute and
  backward; layers not resharded are not in the backward chain);
- the input gradient's reduction is waited for after the weight gradient's GEMM, a column-parallel layer's input is
  gathered again beside the input gradient's GEMM;
- a weight gradient's reduce-scatter is waited for one layer later, then its data-parallel bucket may go;
- buckets are waited for before the optimizer; new weights are gathered behind the next forward pass;
- keys and values of other context ranks overlap with attention;
- with the micro-batch split in two, one half's output reduction runs behind the other half's work,
  and each block ends with both halves done; pipelined with its GEMM, it runs beside that.

With an overlap off, the wait directly follows the issue; nothing else changes.

A finished schedule consists of numbers, which a replay follows for one candidate or for many: each distinct run,
collective and handle has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from axonn_tune.frameworks.description import StepOptions
from axonn_tune.program.layers import CORE, PARTS
from axonn_tune.program.operations import ONCE, Collective, Computation, Kernel, MatMul, Operation
from axonn_tune.program.step import ONLY, Section, Stage, StepProgram
from axonn_tune.specs.workload import Overlap


@dataclass(frozen=True)
class Run:
    """Computation, back to back."""

    operations: tuple[Computation, ...]


@dataclass(frozen=True)
class Issue:
    """Put a collective on its stream; `slot` is the handle of its end."""

    collective: Collective
    slot: str


@dataclass(frozen=True)
class Wait:
    """Wait for the collective of the handle `slot`; no-op if it is empty."""

    slot: str


@dataclass(frozen=True)
class Sync:
    """A blocking collective: issue and wait."""

    collective: Collective


Instruction: TypeAlias = Run | Issue | Wait | Sync
Emitted: TypeAlias = tuple[Instruction, ...]

RUN, WAIT, SYNC, ISSUE = range(4)

Instructions: TypeAlias = tuple[tuple[int, int, int], ...]
"""`(code, number, handle)`: number of a run, of a handle to wait for, or of a collective and its handle if issued."""


@dataclass(frozen=True)
class Gather:
    """One link of the gather chain: the kernel that prepares it, and the collective."""

    prepare: Kernel
    collective: Collective


@dataclass(frozen=True)
class MicroBatch:
    """Instructions of one micro-batch; `head` has the chain's next gather unless all layers are not resharded.

    Backward pass over the blocks: the first, then repeated ones, then the last; or the only one. Blocks that are not
    resharded after forward come first. Of pipeline stages: enter, enter_backward begin a pass of a chunk with no
    embedding or LM head before it; alone is the last block of a chunk with no LM head after it; leave ends the backward
    pass of a chunk without embedding.
    """

    embedding: Instructions
    enter: Instructions
    block: Instructions
    last_block: Instructions
    alone: Instructions
    head: Instructions
    head_all_kept: Instructions
    enter_backward: Instructions
    first: Instructions
    middle: Instructions
    last: Instructions
    only: Instructions
    kept_first: Instructions
    kept_middle: Instructions
    flush: Instructions
    leave: Instructions


@dataclass(frozen=True)
class StepSchedule:
    """One step: all micro-batches but the last, the last with its data-parallel buckets, the end for each stage.

    runs, collectives, handles: what the numbers of instructions stand for; issued: operations of a block's forward and
    backward pass that the host issues; replicas: group that buckets are reduced over.
    """

    runs: tuple[tuple[Computation, ...], ...]
    collectives: tuple[Collective, ...]
    handles: tuple[str, ...]

    micro_batch: MicroBatch
    last_micro_batch: MicroBatch
    ends: Mapping[Stage, Instructions]
    issued: tuple[HostOperations, HostOperations]
    replicas: str


@dataclass(frozen=True)
class HostOperations:
    """Operations the host issues in one pass of a block: so many computations, by the symbol that counts them or "",
    and collectives by group of axes."""

    computations: Mapping[str, float]
    collectives: Mapping[str, float]

    def count(self, sent: Callable[[str], Any], value: Callable[[str], Any]) -> Any:  # noqa: ANN401 - number or column
        """All of them; `sent` is 1.0 for groups that have several members, else 0.0; `value` is that of a symbol."""
        parts = [kernels * value(symbol) if symbol else kernels for symbol, kernels in self.computations.items()]
        return sum([*parts, *(calls * sent(axes) for axes, calls in self.collectives.items())])


def build_schedule(
    program: StepProgram, *, overlaps: tuple[Overlap, ...], split: bool, stages: tuple[Stage, ...] = (ONLY,)
) -> StepSchedule:
    """Schedule of a program with the given overlaps; `split`: two-batch overlap."""
    options = program.given.options
    used = frozenset(overlaps) & frozenset(options.overlaps)
    compiler = _Compiler(program, used, split=split)
    every = ("head", "block", "table") if options.reduce_each_micro_batch else ()
    last = ("head", "block", "table")
    micro_batch = compiler.micro_batch(buckets=every)
    last_micro_batch = compiler.micro_batch(buckets=last, parameters=True)
    ends = {stage: compiler.numbered([Wait("data"), *_plain(_end_of(program, stage))]) for stage in stages}
    return StepSchedule(
        runs=tuple(compiler.runs),
        collectives=tuple(compiler.collectives),
        handles=tuple(compiler.handles),
        micro_batch=micro_batch,
        last_micro_batch=last_micro_batch,
        ends=ends,
        issued=(_issued(program.block), _issued(program.block_backward)),
        replicas=program.given.data_axes,
    )


def _end_of(program: StepProgram, stage: Stage) -> Iterator[Operation]:
    return (step for step in program.end.operations if stage.has(step))


_COUNTS = ("softmax", "softmax_back", "alone", "shared", "grouped")


def _issued(section: Section) -> HostOperations:
    computations, collectives = dict[str, float](), dict[str, float]()
    for step in section.operations:
        if isinstance(step, Collective):
            collectives[step.axis] = collectives.get(step.axis, 0.0) + 1.0
            continue
        symbol = next((name for name, _ in step.calls.powers if name in _COUNTS), "")
        if symbol or not isinstance(step, Kernel) or step.size_bytes.coefficient:
            computations[symbol] = computations.get(symbol, 0.0) + step.calls.coefficient
    return HostOperations(computations, collectives)


def _plain(operations: Iterable[Operation]) -> Iterator[Instruction]:
    """Everything in order, nothing overlapped."""
    return (Sync(step) if isinstance(step, Collective) else Run((step,)) for step in operations)


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
    """Turns sections into instructions, and numbers what they are about.

    runs: by number; collectives, handles: with their numbers.
    """

    def __init__(self, program: StepProgram, overlaps: frozenset[Overlap], *, split: bool) -> None:
        self.program = program
        self.options = program.given.options
        self.overlaps = overlaps
        self.split = split and "output" in overlaps
        self.block_accumulate = [
            step for step in program.block_backward.operations if isinstance(step, Kernel) and step.accumulates
        ][-1]
        self.runs: list[tuple[Computation, ...]] = []
        self.collectives: dict[Collective, int] = {}
        self.handles: dict[str, int] = {}
        self._known: dict[tuple[int, ...], int] = {}

    def numbered(self, instructions: Iterable[Instruction]) -> Instructions:
        """Instructions in numbers, neighbouring runs joined."""
        found: list[tuple[int, int, int]] = []
        joined: list[Computation] = []
        for step in (*instructions, None):
            if isinstance(step, Run):
                joined += step.operations
                continue
            if joined:
                found.append((RUN, self._run(tuple(joined)), 0))
                joined.clear()
            if isinstance(step, Wait):
                found.append((WAIT, self._handle(step), 0))
            elif step is not None:
                number = self.collectives.setdefault(step.collective, len(self.collectives))
                found.append((ISSUE, number, self._handle(step)) if isinstance(step, Issue) else (SYNC, number, 0))
        return tuple(found)

    def _handle(self, step: Issue | Wait) -> int:
        return self.handles.setdefault(step.slot, len(self.handles))

    def _run(self, operations: tuple[Computation, ...]) -> int:
        """Number of a run, by the identities of its operations."""
        key = tuple(map(id, operations))
        if key not in self._known:
            self._known[key] = len(self.runs)
            self.runs.append(operations)
        return self._known[key]

    def micro_batch(self, *, buckets: tuple[str, ...], parameters: bool = False) -> MicroBatch:
        """One micro-batch; `buckets` names the sections of data-parallel buckets sent in it.

        parameters: it also gathers new weights, as the first micro-batch of a step does: which one does, changes no
        step's time.
        """
        program = self.program
        embedding, block, head, backward = (
            _gathers(part.operations)
            for part in (program.embedding, program.block, program.head, program.block_backward)
        )
        head_bucket = self._bucket("head", buckets)
        first, following, last, before_head = self._parameters() if parameters else ((), (), (), ())
        numbered, head_section = self.numbered, partial(self._section, program.head, bucket=head_bucket, flush=True)
        looked_up = self._section(program.embedding, following=_first(block))
        blocks = self._backward_blocks(backward, bucket=self._bucket("block", buckets))
        return MicroBatch(
            embedding=numbered([*self._start(_first(embedding)), *looked_up, *first]),
            enter=numbered([*self._start(_first(block)), *first]),
            block=numbered([*following, *self._section(program.block, following=_first(block))]),
            last_block=numbered([*last, *self._section(program.block, following=_first(head))]),
            alone=numbered([*following[:1], *self._section(program.block)]),
            head=numbered([*before_head, *head_section(following=_first(backward))]),
            head_all_kept=numbered([*before_head, *head_section()]),
            enter_backward=numbered(self._start(_first(backward))),
            **{name: numbered(part) for name, part in blocks.items()},
            flush=numbered(self._flush(buckets)),
            leave=numbered(self._leave(buckets)),
        )

    def _parameters(self) -> tuple[Emitted, Emitted, Emitted, Emitted]:
        """Gathers of new weights a block ahead: before the first block, between blocks, at the last, at the LM head."""

        def issued(section: Section) -> Emitted:
            return tuple(Issue(step, "parameters") for step in section.operations if isinstance(step, Collective))

        block, head = issued(self.program.parameters), issued(self.program.head_parameters)
        wait = (Wait("parameters"),)
        return block, (*wait, *block) if block else (), (*wait, *head) if block else (), wait if head else ()

    def _bucket(self, name: str, buckets: tuple[str, ...]) -> tuple[Collective, ...]:
        """Collectives of one bucket section, none unless it is sent in this micro-batch."""
        program = self.program
        section = {"head": program.head_bucket, "block": program.block_bucket, "table": program.table_buckets}
        found = section[name].operations if name in buckets else ()
        return tuple(step for step in found if isinstance(step, Collective))

    def _backward_blocks(self, chain: list[Gather], *, bucket: tuple[Collective, ...]) -> dict[str, list[Instruction]]:
        program = self.program.block_backward
        kept = Section(program.name, program.repeats, tuple(_without_gathers(program.operations)))
        pending = Pending(self.block_accumulate, bucket)
        return {
            "first": self._section(program, following=_first(chain), bucket=bucket),
            "middle": self._section(program, following=_first(chain), pending=pending, bucket=bucket),
            "last": self._section(program, pending=pending, bucket=bucket),
            "only": self._section(program, bucket=bucket),
            "kept_first": self._section(kept, bucket=bucket),
            "kept_middle": self._section(kept, pending=pending, bucket=bucket),
        }

    def _start(self, gather: Gather | None) -> Emitted:
        """The first gather of a chain, which is exposed."""
        if gather is None or not _prefetched(gather, self.overlaps, self.options):
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
    ) -> list[Instruction]:
        """Instructions of one section.

        following: the gather after the section's last in the chain, issued at its start if it has none; pending:
        collectives that the section before left running; bucket: collectives to issue after this section's last
        gradient; flush: issue them inside the section.
        """
        chain = [*_gathers(section.operations), following]
        emitter = _Emitter(self.overlaps, self.options, chain, pending, bucket)
        if len(chain) == 1:
            emitter.output += self._start(following)
        for step in _halves(section.operations) if self.split else section.operations:
            emitter.add(step)
        return emitter.finish(flush=flush)

    def _flush(self, buckets: tuple[str, ...]) -> list[Instruction]:
        """After the last block: its reduce-scatter and bucket, then the backward pass of the embedding."""
        deferred = "weight_gradient" in self.overlaps
        pending = Pending(self.block_accumulate, self._bucket("block", buckets)) if deferred else None
        emitter = _Emitter(self.overlaps, self.options, [None], pending, self._bucket("table", buckets))
        for step in self.program.embedding_backward.operations:
            emitter.add(step)
        return emitter.finish(flush=True)

    def _leave(self, buckets: tuple[str, ...]) -> list[Instruction]:
        """The same without an embedding."""
        pending = Pending(self.block_accumulate, self._bucket("block", buckets))
        return _Emitter(self.overlaps, self.options, [None], pending, ()).finish(flush=True)


def _first(chain: list[Gather]) -> Gather | None:
    """The first gather of a section, None where it gathers nothing."""
    return chain[0] if chain else None


def _prefetched(gather: Gather, overlaps: frozenset[Overlap], options: StepOptions) -> bool:
    """Whether a gather is issued one ahead in the chain."""
    phases = {"recompute": options.prefetch_recompute, "backward": options.prefetch_backward}
    return "gather_prefetch" in overlaps and phases.get(gather.collective.phase, True)


def _halves(operations: Iterable[Operation]) -> Iterator[Operation | Issue | Wait]:
    """Interleave the two halves of a split micro-batch in the forward and recompute part of a section.

    A stage ends with an output all-reduce. Each half runs a stage after its previous all-reduce has ended, then issues
    its own; weights are gathered once, with the first half.
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
    """A section of layers not resharded: no gathers and no kernels that prepare them."""
    for step in operations:
        gathers = isinstance(step, Collective) and step.role == "weight"
        if not gathers and not (isinstance(step, Kernel) and step.prepares_gather):
            yield step


@dataclass(frozen=True)
class Pending:
    """Pending work of a running reduce-scatter: adding its result, then sending the completed bucket."""

    accumulate: Kernel
    bucket: tuple[Collective, ...] = ()


class _Emitter:
    """Emits the instructions of one section, moving waits to where the overlaps allow."""

    def __init__(
        self,
        overlaps: frozenset[Overlap],
        options: StepOptions,
        chain: list[Gather | None],
        pending: Pending | None,
        bucket: tuple[Collective, ...],
    ) -> None:
        self.overlaps = overlaps
        self.options = options
        self.chain = chain
        self.deferred = "weight_gradient" in overlaps
        self.pending = pending if self.deferred else None
        self.bucket = bucket
        self.output: list[Instruction] = []
        self.owed_input_gradient: str | None = None
        self.owed: list[str] = []

    def add(self, step: Operation | Issue | Wait) -> None:
        """Emit one operation, after the waits that it requires."""
        if isinstance(step, Issue | Wait):
            self.output.append(step)
            return
        if self.owed_input_gradient and not self._belongs_to_weight_gradient(step):
            self._settle_input_gradient()
        if "keys" in self.owed and step.layer != CORE:
            self._settle("keys")
        if isinstance(step, MatMul) and step.layout == "TN":
            self._settle("input_gather")
        if isinstance(step, Collective):
            self._communicate(step)
        elif isinstance(step, Kernel) and step.accumulates and self.deferred:
            self.pending = Pending(step)
        elif not (isinstance(step, Kernel) and step.prepares_gather):
            self.output.append(Run((step,)))
            if isinstance(step, MatMul):
                self._settle("pipelined")

    def finish(self, *, flush: bool) -> list[Instruction]:
        """Emit the pending work of the section; with `flush` its last reduce-scatter too. Returns all instructions."""
        self._settle_input_gradient()
        for slot in tuple(self.owed):
            self._settle(slot)
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
        elif step.role == "keys" or (step.role == "input_gather" and "input_gradient" in self.overlaps):
            self._issue(step, step.role)
        elif step.role == "output" and self.options.pipelined_tensor:
            self._pipeline(step)
        else:
            self.output.append(Sync(step))

    def _pipeline(self, step: Collective) -> None:
        """Run a forward collective beside its GEMM: a gather beside the one after it, a reduction the one before."""
        if step.kind == "all_gather":
            self._issue(step, "pipelined")
            return
        before = self.output[-1] if self.output else None
        if isinstance(before, Run) and isinstance(before.operations[-1], MatMul):
            self.output.insert(len(self.output) - 1, Issue(step, "pipelined output"))
            self.output.append(Wait("pipelined output"))
        else:
            self.output.append(Sync(step))

    def _issue(self, step: Collective, slot: str) -> None:
        self.output.append(Issue(step, slot))
        self.owed.append(slot)

    def _settle(self, slot: str) -> None:
        if slot in self.owed:
            self.owed.remove(slot)
            self.output.append(Wait(slot))

    def _belongs_to_weight_gradient(self, step: Operation) -> bool:
        same = step.layer == self.owed_input_gradient and step.phase == "backward"
        return same and (not isinstance(step, Collective) or step.role == "weight_gradient")

    def _settle_input_gradient(self) -> None:
        if self.owed_input_gradient:
            self.output.append(Wait("input_gradient"))
            self.owed_input_gradient = None

    def _gather(self) -> None:
        """Wait for this gather and issue the next of the chain; without prefetch, a blocking gather."""
        here, following = self.chain[0], self.chain[1]
        del self.chain[0]
        assert here is not None, "the chain holds every gather of the section"
        if _prefetched(here, self.overlaps, self.options):
            self.output.append(Wait("gather"))
        else:
            self.output += [Run((here.prepare,)), Sync(here.collective)]
        if following is not None and _prefetched(following, self.overlaps, self.options):
            self.output += [Run((following.prepare,)), Issue(following.collective, "gather")]

    def _finish_pending(self) -> None:
        if self.pending is not None:
            self.output += [Wait("weight_gradient"), Run((self.pending.accumulate,))]
            self._send(self.pending.bucket)
            self.pending = None

    def _send(self, bucket: tuple[Collective, ...]) -> None:
        overlapped = "data_parallel" in self.overlaps
        self.output += [Issue(step, "data") if overlapped else Sync(step) for step in bucket]
