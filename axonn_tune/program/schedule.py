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
- GEMMs of shared experts run beside dispatch and combine, on demand;
- on demand a layer forward runs beside one backward, of another micro-batch (`MicroBatch.merged`);
- with the micro-batch split in two, one half's output reduction runs behind the other half's work,
  and each block ends with both halves done; pipelined with its GEMM, it runs beside that.

With an overlap off, the wait directly follows the issue; nothing else changes.

A finished schedule consists of numbers, which a replay follows for one candidate or for many: each distinct run,
collective and handle has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from axonn_tune.frameworks.step import StepOptions
from axonn_tune.program.context import CORE
from axonn_tune.program.inputs import ADAPTER, EXPERTS, PARTS, WHOLE_BLOCK
from axonn_tune.program.operations import (
    ONCE,
    Collective,
    Computation,
    Kernel,
    MatMul,
    Measured,
    Operation,
    captured_layers,
    is_captured,
)
from axonn_tune.program.step import ONLY, Behind, Section, Stage, StepProgram
from axonn_tune.vocabulary import Overlap

RUN, WAIT, SYNC, ISSUE = range(4)

Instructions: TypeAlias = tuple[tuple[int, int, int], ...]
"""`(code, number, handle)`: number of a run, of a handle to wait for, or of a collective and its handle if issued."""


SHARED = "moe.shared_"
"""In the layers of shared experts."""


class Emitted(NamedTuple):
    """An instruction before it is numbered: what runs or is sent, and the handle to issue it to or to wait for."""

    code: int
    operation: Operation | None = None
    slot: str = ""


Gather: TypeAlias = tuple[tuple[Kernel, Collective], ...]
"""One link of the gather chain: the kernel that prepares it, and the collective; those of a whole block and of its
experts are one, and those of a block's adapters and of the weight behind them."""


class Following(NamedTuple):
    """What a section issues for the next: the first gather of its chain, and those of its experts, a block ahead."""

    gather: Gather | None = None
    experts: tuple[Collective, ...] = ()


_NOTHING = Following()


Pending: TypeAlias = tuple[Kernel, tuple[Collective, ...]]
"""What follows a running reduce-scatter: adding its result, then sending the completed bucket."""


class MicroBatch:
    """Instructions of one micro-batch, each made when it is first asked for.

    buckets: sections of data-parallel buckets that are sent in it (`head`, `block`, `table`). parameters: it also
    gathers new weights, as the first micro-batch of a step does: which one does, changes no step's time. Layer types
    and kinds of block go by their numbers. What has gathers issues the first of the section after it in the chain; a
    block without anything after it, at the end of a chunk, has None there.
    """

    def __init__(self, compiler: _Compiler, *, buckets: tuple[str, ...], parameters: bool = False) -> None:
        self._compiler, self._buckets, self._gathers_weights = compiler, buckets, parameters
        self._known: dict[tuple[object, ...], Instructions] = {}

    def _made(self, key: tuple[object, ...], instructions: Callable[[], Iterable[Emitted]]) -> Instructions:
        if key not in self._known:
            self._known[key] = self._compiler.numbered(instructions())
        return self._known[key]

    def embedding(self, following: int | None) -> Instructions:
        """The embedding before a block of this type."""
        operations = self._compiler.program.embedding.operations

        def made() -> list[Emitted]:
            after = self._compiler.forward_gather(following)
            looked_up = self._compiler.section(operations, following=after, opens=True)
            return [*self._compiler.start(_following(operations).gather), *looked_up, *self._new_weights(following)]

        return self._made(("embedding", following), made)

    def enter(self, following: int | None, *, head: bool = False) -> Instructions:
        """Begin of a chunk's forward pass without an embedding, with a block of this type, or with the LM head."""
        after, section = self._compiler.forward_gather(following, head=head), self._compiler.section
        return self._made(
            ("enter", following, head),
            lambda: [*section((), following=after, opens=True), *self._new_weights(following)],
        )

    def forward(self, of_type: int, following: int | None, *, head: bool = False) -> Instructions:
        """A block forward, before one of the type `following`, or before the LM head."""

        def made() -> list[Emitted]:
            operations = self._compiler.program.blocks[self._compiler.kind(of_type)].forward.operations
            after = self._compiler.forward_gather(following, head=head)
            waited = [Emitted(WAIT, slot="parameters")] if self._new_weights(of_type) else []
            gathered = self._new_weights(following, head=head) if waited else ()
            return [*waited, *gathered, *self._compiler.section(operations, following=after)]

        return self._made(("forward", of_type, following, head), made)

    def head(self, following: int | None) -> Instructions:
        """LM head and loss, before the backward pass of a kind of block; None: no block gathers again."""

        def made() -> list[Emitted]:
            compiler = self._compiler
            waited = [Emitted(WAIT, slot="parameters")] if self._new_weights(None, head=True) else []
            operations, bucket = compiler.program.head.operations, self._bucket(compiler.program.head_bucket, "head")
            after = compiler.backward_gather(following)
            return [*waited, *compiler.section(operations, following=after, bucket=bucket, flush=True, opens=True)]

        return self._made(("head", following), made)

    def enter_backward(self, following: int | None) -> Instructions:
        """Begin of a chunk's backward pass without an LM head before it."""
        gather, section = self._compiler.backward_gather, self._compiler.section
        return self._made(("enter backward", following), lambda: section((), following=gather(following), opens=True))

    def backward(self, before: int | None, block: Behind, following: int | None) -> Instructions:
        """A block backward, after one of the type `before`, and before the kind `following` that gathers next."""
        following = None if block.kept else following

        def made() -> list[Emitted]:
            one = self._compiler.program.blocks[block.kind]
            operations = _without_gathers(one.backward.operations) if block.kept else one.backward.operations
            return self._compiler.section(
                operations,
                following=self._compiler.backward_gather(following),
                pending=self._pending(before),
                bucket=self._bucket(one.bucket, "block"),
            )

        return self._made(("backward", before, block, following), made)

    def merged(self, of_type: int, block: Behind) -> Instructions:
        """A block forward beside one of its type backward, of another micro-batch: dispatch and combine of each run
        behind the computation of the other (`--overlap-moe-expert-parallel-comm`)."""

        def made() -> list[Emitted]:
            compiler, one = self._compiler, self._compiler.program.blocks[block.kind]
            back = _without_gathers(one.backward.operations) if block.kept else one.backward.operations
            forward = compiler.program.blocks[compiler.kind(of_type)].forward.operations
            steps = _beside(forward, back, delayed=compiler.options.delayed_weight_gradients)
            bucket = self._bucket(one.bucket, "block")
            return compiler.section(steps, following=_following(steps), pending=self._pending(of_type), bucket=bucket)

        return self._made(("merged", of_type, block), made)

    def flush(self, before: int | None) -> Instructions:
        """Backward pass of the embedding, after a block of the type `before`."""
        program = self._compiler.program
        operations, bucket = program.embedding_backward.operations, self._bucket(program.table_buckets, "table")
        return self._made(
            ("flush", before),
            lambda: self._compiler.section(operations, pending=self._pending(before), bucket=bucket, flush=True),
        )

    def leave(self, before: int | None) -> Instructions:
        """End of a chunk's backward pass without embedding, after a block of the type `before`."""
        return self._made(
            ("leave", before), lambda: self._compiler.section((), pending=self._pending(before), flush=True)
        )

    def _bucket(self, section: Section, name: str) -> tuple[Collective, ...]:
        """Collectives of a bucket section, none unless it is sent in this micro-batch."""
        found = section.operations if name in self._buckets else ()
        return tuple(step for step in found if isinstance(step, Collective))

    def _pending(self, before: int | None) -> Pending | None:
        """What the last block leaves to be done once its reduce-scatter has ended, which experts alone have not."""
        if before is None:
            return None
        block = self._compiler.program.blocks[self._compiler.kind(before)]
        added = [step for step in block.backward.operations if isinstance(step, Kernel) and step.accumulates]
        nothing = Kernel("backward", EXPERTS, ONCE * 0.0, accumulates=True)
        return (added or [nothing])[-1], self._bucket(block.bucket, "block")

    def _new_weights(self, of_type: int | None, *, head: bool = False) -> tuple[Emitted, ...]:
        """Gathers of new weights, a block ahead: of a block, or of the LM head."""
        program = self._compiler.program
        if not self._gathers_weights or (of_type is None and not head):
            return ()
        section = (
            program.head_parameters if of_type is None else program.blocks[self._compiler.kind(of_type)].parameters
        )
        return tuple(Emitted(ISSUE, step, "parameters") for step in section.operations)


HANDLES = (
    *("gather", "output0", "output1", "input_gradient", "input_gather", "keys", "pipelined", "pipelined output"),
    *("weight_gradient", "data", "parameters", "experts", "experts back", "experts gather", "counts"),
)
"""What a collective is waited for by, each with its number in instructions."""

_GATHER_HANDLES = "gather", "experts gather"
"""Those of a link of the gather chain, in order."""


@dataclass(frozen=True)
class StepSchedule:
    """One step: all micro-batches but the last, the last with its data-parallel buckets, the end for each stage.

    runs, collectives: what the numbers of instructions stand for, which grow with the instructions that are asked for;
    issued: of each kind of block, how many operations of its forward and of its backward pass the host issues:
    computations by the symbol that counts them or "", collectives by group of axes; replicas: groups that buckets are
    reduced over.
    """

    runs: list[tuple[Computation, ...]]
    collectives: list[Collective]
    micro_batch: MicroBatch
    last_micro_batch: MicroBatch
    ends: Mapping[Stage, Instructions]
    issued: tuple[tuple[Mapping[str, float], Mapping[str, float]], ...]
    replicas: tuple[str, ...]


def build_schedule(
    program: StepProgram, *, overlaps: tuple[Overlap, ...], split: bool, stages: tuple[Stage, ...] = (ONLY,)
) -> StepSchedule:
    """Schedule of a program with the given overlaps; `split`: two-batch overlap."""
    options = program.given.options
    used = frozenset(overlaps) & frozenset(options.overlaps) - ({"data_parallel"} if options.splits_backward else set())
    compiler, last = _Compiler(program, used, split=split), ("head", "block", "table")
    # At the end everything is in order, nothing overlaps.
    plain = [(step, Emitted(SYNC if isinstance(step, Collective) else RUN, step)) for step in program.end.operations]
    ends = {
        stage: compiler.numbered([Emitted(WAIT, slot="data"), *(one for step, one in plain if stage.has(step))])
        for stage in stages
    }
    return StepSchedule(
        runs=compiler.runs,
        collectives=compiler.collectives,
        micro_batch=MicroBatch(compiler, buckets=last if options.reduce_each_micro_batch else ()),
        last_micro_batch=MicroBatch(compiler, buckets=last, parameters=True),
        ends=ends,
        issued=tuple(
            (_issued(one.forward.operations, options), _issued(one.backward.operations, options))
            for one in program.blocks
        ),
        replicas=(program.given.data_axes, program.given.replication(EXPERTS)[0]),
    )


_BARE = 2.0 * (26.85 / 7.0) / 150.0
"""Host time of an operator of torch's over that of an operation of the program, a module with its Python: 7 of them
take 26.85 µs where few rows are computed (ROCm/aiter PR 4249), twice that with autograd; the others about 150 µs
(frameworks/software.csv)."""


def _issued(operations: Iterable[Operation], options: StepOptions) -> dict[str, float]:
    """Operations that the host launches, by the symbol that counts them: none of what CUDA graphs capture."""
    captured = captured_layers(options.cuda_graphs)
    found = dict[str, float]()
    for step in operations:
        if is_captured(step.layer, captured):
            continue
        if isinstance(step, Collective):
            found[step.axis] = found.get(step.axis, 0.0) + 1.0
            continue
        counts = ("softmax", "softmax_back", "alone", "shared", "grouped", "exchanged", "joined")
        symbol = next((name for name, _ in step.calls.powers if name in counts), "")
        # Of each expert of the rank.
        symbol = symbol or ("1/expert" if ("expert", -1) in step.calls.powers else "")
        if options.quantizes_in_gemm and isinstance(step, Kernel) and step.quantizes:
            # Weights are quantized once a step; scheduling a linear layer in FP8 takes twice that in BF16, however many
            # kernels quantize its input (NVIDIA/TransformerEngine issue 761).
            found[""] = found.get("", 0.0) + float(("A", -1) not in step.calls.powers)
        elif symbol or not isinstance(step, Kernel) or step.size_bytes.coefficient:
            launches = step.launches if isinstance(step, Measured) else 1.0
            launches *= _BARE if isinstance(step, Kernel) and step.bare else 1.0
            found[symbol] = found.get(symbol, 0.0) + launches * step.calls.coefficient
    return found


_Cut: TypeAlias = tuple[list[Operation], Collective, list[Operation], Collective, list[Operation]]


def _beside(
    forward: Iterable[Operation], backward: Iterable[Operation], *, delayed: bool
) -> tuple[Operation | Emitted, ...]:
    """Operations of both passes of a layer with experts, in the order of Megatron-Core's combined 1F1B.

    Forward's attention runs beside the dispatch of gradients, backward's experts beside forward's dispatch, and so on.
    delayed: weight gradients of experts run beside the combine of gradients. Source: NVIDIA/Megatron-LM@d98e8a64,
    megatron/core/models/common/model_chunk_schedule_plan.py.
    """
    (ahead, sent, inside, home, after), (before, sent_back, within, home_back, rest) = map(_cut, (forward, backward))
    late = [step for step in within if delayed and isinstance(step, MatMul) and step.layout == "TN"]
    own, other = "experts", "experts back"
    return (
        *(*before, Emitted(ISSUE, sent_back, other)),
        *(*ahead, Emitted(ISSUE, sent, own), Emitted(WAIT, slot=other)),
        *(*(step for step in within if step not in late), Emitted(ISSUE, home_back, other), *late),
        *(Emitted(WAIT, slot=own), *inside, Emitted(ISSUE, home, own)),
        *(Emitted(WAIT, slot=other), *rest, Emitted(WAIT, slot=own), *after),
    )


def _cut(operations: Iterable[Operation]) -> _Cut:
    """Operations before, between and after a dispatch and a combine, with those."""
    every = list(operations)
    first, second = (place for place, step in enumerate(every) if getattr(step, "routing", None))
    sent, home = (one for one in (every[first], every[second]) if isinstance(one, Collective))
    return every[:first], sent, every[first + 1 : second], home, every[second + 1 :]


def _gathers(operations: Iterable[Operation | Emitted]) -> list[Gather]:
    """The gather chain through a section."""
    chain, prepare = list[Gather](), None
    for step in operations:
        if isinstance(step, Kernel) and step.prepares_gather:
            prepare = step
        elif isinstance(step, Collective) and step.role == "weight":
            assert prepare is not None, "every weight gather follows the kernel that prepares it"
            before = chain[-1][-1][1].layer if chain and len(chain[-1]) < len(_GATHER_HANDLES) else ""
            with_block = step.layer.endswith(EXPERTS) and before.endswith(WHOLE_BLOCK)
            if with_block or (before.endswith(ADAPTER) and not step.layer.endswith(ADAPTER)):
                chain[-1] = (*chain[-1], (prepare, step))
            else:
                chain.append(((prepare, step),))
    return chain


def _issued_gather(gather: Gather) -> Iterator[Emitted]:
    """A link of the gather chain, each of its collectives behind a handle of its own."""
    for (prepare, step), slot in zip(gather, _GATHER_HANDLES, strict=False):
        yield Emitted(RUN, prepare)
        yield Emitted(ISSUE, step, slot)


def _without_gathers(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Those of a block that is not resharded after forward: without gathers and their kernels."""
    return tuple(
        step for step in operations if getattr(step, "role", "") != "weight" and not getattr(step, "with_gather", False)
    )


class _Compiler:
    """Turns sections into instructions, and numbers what they are about.

    runs, collectives: by number.
    """

    def __init__(self, program: StepProgram, overlaps: frozenset[Overlap], *, split: bool) -> None:
        self.program = program
        self.options = program.given.options
        self.overlaps = overlaps
        self.split = split and "output" in overlaps
        self.runs: list[tuple[Computation, ...]] = []
        self.collectives: list[Collective] = []
        self._numbers: dict[Collective, int] = {}
        self._known: dict[tuple[int, ...], int] = {}

    def kind(self, of_type: int) -> int:
        """A kind of block of a layer type: all have one forward pass, one bucket and one accumulation."""
        return self.program.kind(of_type, repeats=True)

    def forward_gather(self, of_type: int | None, *, head: bool = False) -> Following:
        """The first gathers of a type's forward pass, or of the LM head."""
        if of_type is not None:
            return _following(self.program.blocks[self.kind(of_type)].forward.operations)
        return _following(self.program.head.operations if head else ())

    def backward_gather(self, kind: int | None) -> Following:
        """The first gathers of a kind's backward pass."""
        return _following(() if kind is None else self.program.blocks[kind].backward.operations)

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
            handle = HANDLES.index(step.slot) if step.slot else 0
            if isinstance(step.operation, Collective):
                if step.operation not in self._numbers:
                    self._numbers[step.operation] = len(self.collectives)
                    self.collectives.append(step.operation)
                found.append((step.code, self._numbers[step.operation], handle))
            else:
                found.append((WAIT, handle, 0))
        return tuple(found)

    def start(self, gather: Gather | None) -> tuple[Emitted, ...]:
        """The first gather of a chain, which is exposed."""
        if gather is None or not _prefetched(gather, self.overlaps, self.options):
            return ()
        return tuple(_issued_gather(gather))

    def section(
        self,
        operations: Sequence[Operation | Emitted],
        *,
        following: Following = _NOTHING,
        pending: Pending | None = None,
        bucket: tuple[Collective, ...] = (),
        flush: bool = False,
        opens: bool = False,
    ) -> list[Emitted]:
        """Instructions of one section.

        following: the gathers after the section's last, issued at its start if it has none; pending: what
        follows a reduce-scatter that the section before left running; bucket: collectives to issue after this section's
        last gradient; flush: issue them inside the section; opens: a pass begins after it, whose first experts are
        gathered when they are needed.
        """
        chain = [*_gathers(operations), following.gather]
        ahead = following.experts if "gather_prefetch" in self.overlaps else ()
        emitter = _Emitter(self.overlaps, self.options, chain, pending, bucket)
        if len(chain) == 1:
            emitter.output += self.start(following.gather)
        if opens:
            emitter.output += [Emitted(SYNC, step) for step in ahead]
        elif any(getattr(step, "role", "") == "ahead" for step in operations):
            emitter.experts = ahead
        else:
            emitter.output += [Emitted(ISSUE, step, "experts gather") for step in ahead]
        plain = [step for step in operations if not isinstance(step, Emitted)]
        halved = self.split and len(plain) == len(operations) and plain and plain[0].phase != "backward"
        for step in _halves(plain) if halved else operations:
            emitter.add(step)
        return emitter.finish(flush=flush)


def _following(operations: Iterable[Operation | Emitted]) -> Following:
    """The first gathers of a section."""
    steps = list(operations)
    experts = tuple(step for step in steps if isinstance(step, Collective) and step.role == "ahead")
    return Following(next(iter(_gathers(steps)), None), experts)


def _prefetched(gather: Gather, overlaps: frozenset[Overlap], options: StepOptions) -> bool:
    """Whether a gather is issued one ahead in the chain."""
    phases = {"recompute": options.prefetch_recompute, "backward": options.prefetch_backward}
    return "gather_prefetch" in overlaps and phases.get(gather[0][1].phase, True)


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
        self.experts: tuple[Collective, ...] = ()
        self.linked = 0
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
        if "keys" in self.owed and (not step.layer.endswith(CORE) or isinstance(step, Collective)):
            self._settle("keys")
        if "experts" in self.owed and SHARED not in step.layer:
            self._settle("experts")
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
        if step.role == "ahead" and "gather_prefetch" in self.overlaps:
            following = [Emitted(ISSUE, one, "experts gather") for one in self.experts if one.phase == step.phase]
            self.output += [Emitted(WAIT, slot="experts gather"), *following]
        elif step.role == "weight":
            # Others of a link come with its first.
            if self.linked:
                self.linked -= 1
            else:
                self._gather()
        elif step.role == "input_gradient" and "input_gradient" in self.overlaps:
            self.output.append(Emitted(ISSUE, step, "input_gradient"))
            self.owed_input_gradient = step.layer
        elif step.role == "weight_gradient" and self.deferred:
            self._finish_pending()
            self.output.append(Emitted(ISSUE, step, "weight_gradient"))
        elif (step.role in ("keys", "counts") and self.overlaps) or (
            step.role == "input_gather" and "input_gradient" in self.overlaps
        ):
            self._issue(step, step.role)
        elif step.routing is not None and self.options.shared_expert_overlap:
            self._issue(step, "experts")
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
        self.linked = len(here) - 1
        prefetched = _prefetched(here, self.overlaps, self.options)
        for (prepare, step), slot in zip(here, _GATHER_HANDLES, strict=False):
            self.output += [Emitted(WAIT, slot=slot)] if prefetched else [Emitted(RUN, prepare), Emitted(SYNC, step)]
        if following is not None and _prefetched(following, self.overlaps, self.options):
            self.output += _issued_gather(following)

    def _finish_pending(self) -> None:
        if self.pending is not None:
            accumulate, bucket = self.pending
            self.output += [Emitted(WAIT, slot="weight_gradient"), Emitted(RUN, accumulate)]
            self._send(bucket)
            self.pending = None

    def _send(self, bucket: tuple[Collective, ...]) -> None:
        overlapped = "data_parallel" in self.overlaps
        self.output += [Emitted(ISSUE, step, "data") if overlapped else Emitted(SYNC, step) for step in bucket]
