"""The order of one step on a compute stream and on communication streams, as instructions for an interpreter.

Computation runs in order on one stream. A collective runs on the stream of the outermost tier its group
crosses; streams are first in, first out. `ISSUE` puts a collective on its stream; `WAIT`
stops the compute stream until the collective behind a handle has ended; `SYNC` is both at once. What overlaps:

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

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

from axonn_tune.frameworks.description import StepOptions
from axonn_tune.program.context import CORE
from axonn_tune.program.layers import PARTS
from axonn_tune.program.operations import ONCE, Collective, Computation, Kernel, MatMul, Operation
from axonn_tune.program.step import ONLY, Stage, StepProgram
from axonn_tune.specs.workload import Overlap

RUN, WAIT, SYNC, ISSUE = range(4)

Instructions: TypeAlias = tuple[tuple[int, int, int], ...]
"""`(code, number, handle)`: number of a run, of a handle to wait for, or of a collective and its handle if issued."""


class Emitted(NamedTuple):
    """An instruction before it is numbered: what runs or is sent, and the handle to issue it to or to wait for."""

    code: int
    operation: Operation | None = None
    slot: str = ""


Gather: TypeAlias = tuple[Kernel, Collective]
"""One link of the gather chain: the kernel that prepares it, and the collective."""

Pending: TypeAlias = tuple[Kernel, tuple[Collective, ...]]
"""What follows a running reduce-scatter: adding its result, then sending the completed bucket."""


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

    runs, collectives, handles: what the numbers of instructions stand for; issued: how many operations of a block's
    forward and of its backward pass the host issues: computations by the symbol that counts them or "", collectives by
    group of axes; replicas: group that buckets are reduced over.
    """

    runs: tuple[tuple[Computation, ...], ...]
    collectives: tuple[Collective, ...]
    handles: tuple[str, ...]

    micro_batch: MicroBatch
    last_micro_batch: MicroBatch
    ends: Mapping[Stage, Instructions]
    issued: tuple[Mapping[str, float], Mapping[str, float]]
    replicas: str


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
    # At the end everything is in order, nothing overlaps.
    plain = [(step, Emitted(SYNC if isinstance(step, Collective) else RUN, step)) for step in program.end.operations]
    ends = {
        stage: compiler.numbered([Emitted(WAIT, slot="data"), *(one for step, one in plain if stage.has(step))])
        for stage in stages
    }
    return StepSchedule(
        runs=tuple(compiler.runs),
        collectives=tuple(compiler.collectives),
        handles=tuple(compiler.handles),
        micro_batch=micro_batch,
        last_micro_batch=last_micro_batch,
        ends=ends,
        issued=(_issued(program.block.operations), _issued(program.block_backward.operations)),
        replicas=program.given.data_axes,
    )


def _issued(operations: Iterable[Operation]) -> dict[str, float]:
    found = dict[str, float]()
    for step in operations:
        if isinstance(step, Collective):
            found[step.axis] = found.get(step.axis, 0.0) + 1.0
            continue
        counts = ("softmax", "softmax_back", "alone", "shared", "grouped")
        symbol = next((name for name, _ in step.calls.powers if name in counts), "")
        if symbol or not isinstance(step, Kernel) or step.size_bytes.coefficient:
            found[symbol] = found.get(symbol, 0.0) + step.calls.coefficient
    return found


def _gathers(operations: Iterable[Operation]) -> list[Gather]:
    """The gather chain through a section."""
    chain, prepare = list[Gather](), None
    for step in operations:
        if isinstance(step, Kernel) and step.prepares_gather:
            prepare = step
        elif isinstance(step, Collective) and step.role == "weight":
            assert prepare is not None, "every weight gather follows the kernel that prepares it"
            chain.append((prepare, step))
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
        backward = program.block_backward.operations
        self.block_accumulate = [step for step in backward if isinstance(step, Kernel) and step.accumulates][-1]
        self.runs: list[tuple[Computation, ...]] = []
        self.collectives: dict[Collective, int] = {}
        self.handles: dict[str, int] = {}
        self._known: dict[tuple[int, ...], int] = {}

    def numbered(self, instructions: Iterable[Emitted]) -> Instructions:
        """Instructions in numbers, neighbouring runs joined; a run's number is by the identities of its operations."""
        found: list[tuple[int, int, int]] = []
        joined: list[Computation] = []
        for step in (*instructions, None):
            if step is not None and isinstance(step.operation, Computation):
                joined.append(step.operation)
                continue
            if joined:
                key = tuple(map(id, joined))
                if key not in self._known:
                    self._known[key] = len(self.runs)
                    self.runs.append(tuple(joined))
                found.append((RUN, self._known[key], 0))
                joined.clear()
            if step is None:
                break
            handle = self.handles.setdefault(step.slot, len(self.handles)) if step.slot else 0
            if isinstance(step.operation, Collective):
                found.append((step.code, self.collectives.setdefault(step.operation, len(self.collectives)), handle))
            else:
                found.append((WAIT, handle, 0))
        return tuple(found)

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
        block_bucket, tables = self._bucket("block", buckets), self._bucket("table", buckets)
        pending = self.block_accumulate, block_bucket
        first, following, last, before_head = self._parameters() if parameters else ((), (), (), ())
        forward, numbered = program.block.operations, self.numbered
        head_section = partial(self._section, program.head.operations, bucket=head_bucket, flush=True)
        looked_up = self._section(program.embedding.operations, following=_first(block))
        blocks = self._backward_blocks(_first(backward), pending)
        return MicroBatch(
            embedding=numbered([*self._start(_first(embedding)), *looked_up, *first]),
            enter=numbered([*self._start(_first(block)), *first]),
            block=numbered([*following, *self._section(forward, following=_first(block))]),
            last_block=numbered([*last, *self._section(forward, following=_first(head))]),
            alone=numbered([*following[:1], *self._section(forward)]),
            head=numbered([*before_head, *head_section(following=_first(backward))]),
            head_all_kept=numbered([*before_head, *head_section()]),
            enter_backward=numbered(self._start(_first(backward))),
            **{name: numbered(part) for name, part in blocks.items()},
            flush=numbered(
                self._section(program.embedding_backward.operations, pending=pending, bucket=tables, flush=True)
            ),
            leave=numbered(self._section((), pending=pending, flush=True)),
        )

    def _parameters(self) -> tuple[tuple[Emitted, ...], ...]:
        """Gathers of new weights a block ahead: before the first block, between blocks, at the last, at the LM head."""

        block, head = (
            tuple(Emitted(ISSUE, step, "parameters") for step in section.operations)
            for section in (self.program.parameters, self.program.head_parameters)
        )
        wait = (Emitted(WAIT, slot="parameters"),)
        return block, (*wait, *block) if block else (), (*wait, *head) if block else (), wait if head else ()

    def _bucket(self, name: str, buckets: tuple[str, ...]) -> tuple[Collective, ...]:
        """Collectives of one bucket section, none unless it is sent in this micro-batch."""
        program = self.program
        section = {"head": program.head_bucket, "block": program.block_bucket, "table": program.table_buckets}
        found = section[name].operations if name in buckets else ()
        return tuple(step for step in found if isinstance(step, Collective))

    def _backward_blocks(self, following: Gather | None, pending: Pending) -> dict[str, list[Emitted]]:
        """A block's backward pass, by place; those not resharded have no gathers and no kernels that prepare them."""
        every, bucket = self.program.block_backward.operations, pending[1]
        gathers = (getattr(step, "role", "") == "weight" or getattr(step, "prepares_gather", False) for step in every)
        kept = tuple(step for step, gathering in zip(every, gathers, strict=True) if not gathering)
        return {
            "first": self._section(every, following=following, bucket=bucket),
            "middle": self._section(every, following=following, pending=pending, bucket=bucket),
            "last": self._section(every, pending=pending, bucket=bucket),
            "only": self._section(every, bucket=bucket),
            "kept_first": self._section(kept, bucket=bucket),
            "kept_middle": self._section(kept, pending=pending, bucket=bucket),
        }

    def _start(self, gather: Gather | None) -> tuple[Emitted, ...]:
        """The first gather of a chain, which is exposed."""
        if gather is None or not _prefetched(gather, self.overlaps, self.options):
            return ()
        return Emitted(RUN, gather[0]), Emitted(ISSUE, gather[1], "gather")

    def _section(
        self,
        operations: tuple[Operation, ...],
        *,
        following: Gather | None = None,
        pending: Pending | None = None,
        bucket: tuple[Collective, ...] = (),
        flush: bool = False,
    ) -> list[Emitted]:
        """Instructions of one section.

        following: the gather after the section's last in the chain, issued at its start if it has none; pending: what
        follows a reduce-scatter that the section before left running; bucket: collectives to issue after this section's
        last gradient; flush: issue them inside the section.
        """
        chain = [*_gathers(operations), following]
        emitter = _Emitter(self.overlaps, self.options, chain, pending, bucket)
        if len(chain) == 1:
            emitter.output += self._start(following)
        halved = self.split and operations and operations[0].phase != "backward"
        for step in _halves(operations) if halved else operations:
            emitter.add(step)
        return emitter.finish(flush=flush)


def _first(chain: list[Gather]) -> Gather | None:
    """The first gather of a section, None where it gathers nothing."""
    return chain[0] if chain else None


def _prefetched(gather: Gather, overlaps: frozenset[Overlap], options: StepOptions) -> bool:
    """Whether a gather is issued one ahead in the chain."""
    phases = {"recompute": options.prefetch_recompute, "backward": options.prefetch_backward}
    return "gather_prefetch" in overlaps and phases.get(gather[1].phase, True)


def _halves(operations: Iterable[Operation]) -> Iterator[Operation | Emitted]:
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


def _stage_halves(stage: list[Operation], reduce: Collective | None) -> Iterator[Operation | Emitted]:
    """Both halves of one stage; without an all-reduce at its end, both halves end with it."""
    for half in (0, 1):
        yield Emitted(WAIT, slot=f"output{half}")
        for step in stage:
            if step.calls == PARTS:
                yield replace(step, calls=ONCE)
            elif half == 0:
                yield step
        if reduce is not None:
            yield Emitted(ISSUE, replace(reduce, calls=ONCE), f"output{half}")


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
        self.output: list[Emitted] = []
        self.owed_input_gradient: str | None = None
        self.owed: list[str] = []

    def add(self, step: Operation | Emitted) -> None:
        """Emit one operation, after the waits that it requires."""
        if isinstance(step, Emitted):
            self.output.append(step)
            return
        if self.owed_input_gradient and not self._belongs_to_weight_gradient(step):
            self._settle_input_gradient()
        if "keys" in self.owed and (step.layer != CORE or isinstance(step, Collective)):
            self._settle("keys")
        if isinstance(step, MatMul) and step.layout == "TN":
            self._settle("input_gather")
        if isinstance(step, Collective):
            self._communicate(step)
        elif isinstance(step, Kernel) and step.accumulates and self.deferred:
            self.pending = step, ()
        elif not (isinstance(step, Kernel) and step.prepares_gather):
            self.output.append(Emitted(RUN, step))
            if isinstance(step, MatMul):
                self._settle("pipelined")

    def finish(self, *, flush: bool) -> list[Emitted]:
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
            self.output.append(Emitted(ISSUE, step, "input_gradient"))
            self.owed_input_gradient = step.layer
        elif step.role == "weight_gradient" and self.deferred:
            self._finish_pending()
            self.output.append(Emitted(ISSUE, step, "weight_gradient"))
        elif step.role == "keys" or (step.role == "input_gather" and "input_gradient" in self.overlaps):
            self._issue(step, step.role)
        elif step.role == "output" and self.options.pipelined_tensor:
            self._pipeline(step)
        else:
            self.output.append(Emitted(SYNC, step))

    def _pipeline(self, step: Collective) -> None:
        """Run a forward collective beside its GEMM: a gather beside the one after it, a reduction the one before."""
        if step.kind == "all_gather":
            self._issue(step, "pipelined")
            return
        if self.output and isinstance(self.output[-1].operation, MatMul):
            self.output.insert(len(self.output) - 1, Emitted(ISSUE, step, "pipelined output"))
            self.output.append(Emitted(WAIT, slot="pipelined output"))
        else:
            self.output.append(Emitted(SYNC, step))

    def _issue(self, step: Collective, slot: str) -> None:
        self.output.append(Emitted(ISSUE, step, slot))
        self.owed.append(slot)

    def _settle(self, slot: str) -> None:
        if slot in self.owed:
            self.owed.remove(slot)
            self.output.append(Emitted(WAIT, slot=slot))

    def _belongs_to_weight_gradient(self, step: Operation) -> bool:
        same = step.layer == self.owed_input_gradient and step.phase == "backward"
        return same and (not isinstance(step, Collective) or step.role == "weight_gradient")

    def _settle_input_gradient(self) -> None:
        if self.owed_input_gradient:
            self.output.append(Emitted(WAIT, slot="input_gradient"))
            self.owed_input_gradient = None

    def _gather(self) -> None:
        """Wait for this gather and issue the next of the chain; without prefetch, a blocking gather."""
        here, following = self.chain[0], self.chain[1]
        del self.chain[0]
        assert here is not None, "the chain holds every gather of the section"
        if _prefetched(here, self.overlaps, self.options):
            self.output.append(Emitted(WAIT, slot="gather"))
        else:
            self.output += [Emitted(RUN, here[0]), Emitted(SYNC, here[1])]
        if following is not None and _prefetched(following, self.overlaps, self.options):
            self.output += [Emitted(RUN, following[0]), Emitted(ISSUE, following[1], "gather")]

    def _finish_pending(self) -> None:
        if self.pending is not None:
            accumulate, bucket = self.pending
            self.output += [Emitted(WAIT, slot="weight_gradient"), Emitted(RUN, accumulate)]
            self._send(bucket)
            self.pending = None

    def _send(self, bucket: tuple[Collective, ...]) -> None:
        overlapped = "data_parallel" in self.overlaps
        self.output += [Emitted(ISSUE, step, "data") if overlapped else Emitted(SYNC, step) for step in bucket]
