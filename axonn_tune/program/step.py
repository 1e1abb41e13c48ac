"""One training step, described once: the cost model prices it, the memory model sizes it, the runtime must match it.

A step is `A` micro-batches, each forward through embedding, L blocks and the LM head, then backward; the
data-parallel buckets go out during the last backward pass, or after it as one buffer; then the optimizer. Sections
list one rank's operations in the order they are issued when nothing overlaps. With pipeline stages, L are the blocks of
one stage, the first of which has the embedding and the last of which the LM head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np

from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.optimizers import ADAMW
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.program import block, tables, update
from axonn_tune.program.block import BlockNodes, block_nodes
from axonn_tune.program.count import counted, trains_experts
from axonn_tune.program.inputs import (
    ADAPTER,
    COPY,
    EXPERTS,
    POSITIONS,
    TABLE,
    WHOLE_BLOCK,
    H,
    LayerInputs,
    X,
    Y,
    counted_suffix,
    suffixes,
)
from axonn_tune.program.operations import (
    MATRIX_ALIGNMENT,
    ONCE,
    PLAIN,
    PLAIN_BLOCKS,
    REPEATING,
    Arithmetic,
    Collective,
    Floats,
    Operation,
    Size,
    Value,
    symbol,
)
from axonn_tune.program.types import prediction
from axonn_tune.program.update import Bucket
from axonn_tune.recompute import modules_of
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.vocabulary import FOLDED, PipelineOrder

BUNDLED = AXONN_TUNE.step
"""Options of the bundled runtime."""


def bundled(*, compiled: bool, balanced: bool = False, optimizer: str = ADAMW) -> StepOptions:
    """The same with or without compiled kernels, and a load-balancing loss."""
    kernels = BUNDLED.kernels if compiled else "eager"
    return replace(BUNDLED, kernels=kernels, balancing_loss=balanced, optimizer=optimizer)


ACCUMULATION = symbol("A")


@dataclass(frozen=True)
class Stage:
    """Whether a pipeline stage is the first, which has the embedding, or the last, which has the LM head; or both, as
    the only one has, and of several the one where a pipeline that is folded begins and ends."""

    first: bool = True
    last: bool = True
    folded: bool = False

    def has(self, operation: Operation) -> bool:
        """Whether an operation of the end of a step is one of this stage."""
        if isinstance(operation, Collective) and operation.axis == "ends":
            return self.first != self.last
        copy = self.last and not self.first
        held = {"embedding": self.first, "position": self.first, "head": self.last, COPY: copy}
        return held.get(operation.layer, True)


ONLY, FIRST, MIDDLE, LAST = Stage(), Stage(True, False), Stage(False, False), Stage(False, True)
"""The stage of a step without pipeline stages, and those of one with several."""
BOTH_ENDS = Stage(folded=True)
"""That with both ends of the model, of several."""


Contents: TypeAlias = tuple[tuple[int, int], ...]
"""Blocks of a chunk in forward order: numbers of layer types, and how many in a row."""


def contents_of(model: Model, parts: Sequence[int], mtp_part: int | None = None) -> tuple[Contents, ...]:
    """What is in each model part, given the number of its blocks, and the one with the MTP layers: None, the last."""
    runs = tuple(model.decoder_runs) if model.pattern or model.opening else ((0, sum(parts)),)
    found = _contents(runs, tuple(parts))
    if not model.mtp_layers:
        return found
    last = len(found) - 1 if mtp_part is None else mtp_part
    return (*found[:last], found[last] + tuple(model.predicting_runs), *found[last + 1 :])


@lru_cache(maxsize=4096)
def _contents(decoder_runs: tuple[tuple[int, int], ...], parts: tuple[int, ...]) -> tuple[Contents, ...]:
    """The same of decoder blocks alone."""
    runs = [[of_type, count] for of_type, count in decoder_runs]
    found = list[Contents]()
    for count in parts:
        here = list[tuple[int, int]]()
        while count:
            taken = min(count, runs[0][1])
            here.append((runs[0][0], taken))
            count, runs[0][1] = count - taken, runs[0][1] - taken
            runs = runs if runs[0][1] else runs[1:]
        found.append(tuple(here))
    return tuple(found)


def as_runs(contents: Contents) -> tuple[tuple[int, float], ...]:
    """The same with numbers of blocks as floats, as the replay takes them."""
    return tuple((of_type, float(count)) for of_type, count in contents)


def blocks_in(contents: Contents) -> int:
    """Number of blocks of a chunk."""
    return sum(count for _, count in contents)


def blocks_by_type(model: Model, chunks: Iterable[Contents]) -> tuple[int, ...]:
    """Number of blocks of each layer type in some chunks."""
    found = [0] * len(model.types)
    for of_type, count in chain.from_iterable(chunks):
        found[of_type] += count
    return tuple(found)


def parts_at(number: int, stages: int, count: int, order: PipelineOrder = "1f1b") -> Sequence[int]:
    """Model parts of a stage, of so many: chunk c of stage s is part c·p + s, and of two that are folded the second is
    2p - 1 - s."""
    return (number, count - 1 - number) if order in FOLDED and stages > 1 else range(number, count, stages)


def stages_of(
    parts: tuple[Contents, ...], stages: int, order: PipelineOrder = "1f1b"
) -> list[tuple[Stage, tuple[Contents, ...]]]:
    """Each stage's place and the blocks of its chunks; parts: of the model."""
    folded, found = order in FOLDED and stages > 1, list[tuple[Stage, tuple[Contents, ...]]]()
    for number in range(stages):
        ends = Stage(number == 0, number == stages - 1)
        place = ends if not folded else MIDDLE if number else BOTH_ENDS
        found.append((place, tuple(parts[one] for one in parts_at(number, stages, len(parts), order))))
    return found


def stages_alike(
    parts: tuple[Contents, ...], stages: int, order: PipelineOrder = "1f1b"
) -> dict[tuple[Stage, tuple[Contents, ...]], list[int]]:
    """Stages that are alike: their place and the blocks of their chunks, with their numbers."""
    found: dict[tuple[Stage, tuple[Contents, ...]], list[int]] = {}
    for number, one in enumerate(stages_of(parts, stages, order)):
        found.setdefault(one, []).append(number)
    return found


def chunks_of(stage: Stage, blocks: tuple[Contents, ...]) -> Iterator[tuple[Stage, Contents]]:
    """Each chunk of a stage: what it has beside blocks, embedding or LM head, and its blocks."""
    for number, contents in enumerate(blocks):
        yield Stage(stage.first and number == 0, stage.last and number == len(blocks) - 1), contents


@dataclass(frozen=True)
class Section:
    """Operations done one after the other, `repeats` times a step."""

    name: str
    repeats: Size
    operations: tuple[Operation, ...]


@dataclass(frozen=True, eq=False)
class Block:
    """Blocks of one kind: a layer type that repeats its activations in the backward pass, or one that does not.

    type: number of the layer type; given: what its operations were made from, with the names of its symbols.
    parameters: gathers of new weights behind the forward pass. Sections without operations are empty.
    """

    type: int
    given: LayerInputs
    recompute: Recompute
    forward: Section
    backward: Section
    bucket: Section
    parameters: Section

    @cached_property
    def merges(self) -> bool:
        """Whether it has experts, with dispatch and combine in both passes: a backward pass may end before."""
        return sum(bool(getattr(step, "routing", None)) for step in self.backward.operations) == 2


@dataclass(frozen=True, eq=False)
class StepProgram:
    """All sections of one step, for one model, workload, kind of recompute and set of options. Equal by identity.

    blocks: of each layer type one kind, or two where only some blocks repeat: those first. head_parameters: as of
    blocks; bucket sections are empty where gradients are reduced at the end of the step.
    """

    recompute: Recompute
    given: LayerInputs
    embedding: Section
    blocks: tuple[Block, ...]
    head: Section
    embedding_backward: Section
    head_bucket: Section
    table_buckets: Section
    head_parameters: Section
    end: Section

    @property
    def some(self) -> bool:
        """Whether only some blocks repeat."""
        return any(block.given.repeating for block in self.blocks)

    @property
    def merges(self) -> bool:
        """Whether passes of two micro-batches run beside each other: not where dispatch and combine are repeated."""
        asked = self.given.options.expert_overlap and self.given.options.dispatcher != "allgather"
        return asked and self.recompute != "full" and "moe" not in modules_of(self.recompute)

    def kind(self, of_type: int, *, repeats: bool) -> int:
        """Number of a kind of block."""
        return 2 * of_type + (not repeats) if self.some else of_type

    def sections(self, stage: Stage = ONLY) -> tuple[Section, ...]:
        """Every section of a stage, in program order: the order in which totals are summed."""
        end = Section(self.end.name, self.end.repeats, tuple(step for step in self.end.operations if stage.has(step)))
        return (
            *([self.embedding] if stage.first else []),
            *(block.forward for block in self.blocks),
            *([self.head] if stage.last else []),
            *(block.backward for block in self.blocks),
            *([self.embedding_backward] if stage.first else []),
            *([self.head_bucket] if stage.last else []),
            *(block.bucket for block in self.blocks),
            *([self.table_buckets] if stage.first else []),
            *(block.parameters for block in self.blocks),
            *([self.head_parameters] if stage.last else []),
            end,
        )

    def calls(self, stage: Stage = ONLY) -> tuple[tuple[Operation, Size], ...]:
        """Each operation with how often one rank does it a step."""
        if stage not in self._calls:
            self._calls[stage] = tuple(
                (operation, section.repeats * operation.calls)
                for section in self.sections(stage)
                for operation in section.operations
            )
        return self._calls[stage]

    @cached_property
    def _calls(self) -> dict[Stage, tuple[tuple[Operation, Size], ...]]:
        """Cache of `calls`."""
        return {}

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Every group of axes it communicates over, stages of all kinds together."""
        every = (*self.sections(ONLY), self.end)
        axes = (step.axis for section in every for step in section.operations if isinstance(step, Collective))
        return tuple(dict.fromkeys(axes))

    def send(self, *, scattered: bool) -> Collective:
        """An activation or a gradient on its way to another stage, `[M, H_y]`.

        scattered: each rank of x sends its share, which is gathered again where it arrives (arXiv 2104.04473,
        section 4.1); where the residual stream is split over x there is no more than a share.
        """
        whole = self.given.element * float(self.given.streams) * self.given.tokens * H / Y
        shared = scattered or self.given.options.sequence_parallel
        return Collective("send", "pipeline", "forward", "stage", whole / X if shared else whole)

    def collectives(self, stage: Stage = ONLY) -> Iterator[tuple[Collective, Size]]:
        """Yield each collective with its calls per step and rank; axes of size 1 included."""
        for operation, count in self.calls(stage):
            if isinstance(operation, Collective):
                yield operation, count


class Behind(NamedTuple):
    """A kind of block in the backward pass; kept: not resharded after forward, so it gathers nothing again."""

    kind: int
    kept: bool = False


Runs: TypeAlias = Sequence[tuple[int, Value]]
"""Equal blocks in a row, in forward order: number of the layer type, and how many."""


class Segment(NamedTuple):
    """Blocks in a row that are alike in the backward pass, and their layer type."""

    block: Behind
    of_type: int
    blocks: Value


def segments(
    program: StepProgram, runs: Runs, *, kept: Value, repeated: Value, arithmetic: Arithmetic
) -> list[Segment]:
    """Blocks of a chunk in the order of their backward passes; of no blocks, too.

    kept: how many are not resharded after forward, the last ones; repeated: how many repeat where only some do, the
    first ones.
    """
    left: Value = 0.0
    after: Value = 0.0
    found = list[Segment]()
    for _, count in runs:
        left = left + count
    for of_type, count in reversed(runs):
        left = left - count
        held = arithmetic.smaller(arithmetic.larger(kept - after, 0.0), count)
        after = after + count
        again = arithmetic.smaller(arithmetic.larger(repeated - left, 0.0), count) if program.some else 0.0
        both = arithmetic.larger(held + again - count, 0.0)
        plain, repeats = (program.kind(of_type, repeats=one) for one in (False, True))
        found.append(Segment(Behind(plain, kept=True), of_type, held - both))
        found.append(Segment(Behind(plain), of_type, count - again - (held - both)))
        if program.some:
            found += [
                Segment(Behind(repeats, kept=True), of_type, both),
                Segment(Behind(repeats), of_type, again - both),
            ]
    return found


def blocks_of(program: StepProgram, chunks: Sequence[Contents], *, kept: int, repeated: int) -> dict[str, float]:
    """Symbols that count a stage's blocks: of each kind, and those of it that are not resharded after forward.
    `imbalance` is that of balanced experts.

    chunks: blocks of each; kept: of the stage's last blocks; repeated: of the first of each chunk, where only some do.
    """
    kinds = [block.given.counted for block in program.blocks]
    # A stage may lack a layer type.
    found = dict.fromkeys((f"{name}{of}" for of in kinds for name in ("L", "kept", "unkept")), 0.0) | {"imbalance": 1.0}
    left = float(kept)
    for contents in reversed(chunks):
        held = min(left, float(blocks_in(contents)))
        left -= held
        for one in segments(program, as_runs(contents), kept=held, repeated=float(repeated), arithmetic=PLAIN):
            of = program.blocks[one.block.kind].given.counted
            for name in ("L", "kept" if one.block.kept else "unkept"):
                found[f"{name}{of}"] += float(one.blocks)
    return found


Chunks: TypeAlias = Sequence[tuple[Runs, Value]]
"""Blocks of each chunk of a stage, and of how many micro-batches it holds activations when a stage holds most."""


def blocks_by_kind(
    program: StepProgram, chunks: Chunks, *, repeated: Value, arithmetic: Arithmetic
) -> dict[str, Value]:
    """Symbols of each kind of block: `L`, how many a stage has, and `held`, those with activations alive together.

    repeated: blocks of each chunk that repeat, where only some do; then with `freed` of kinds that do not: blocks of
    the chunk that has fewest of them.
    """
    kinds = [block.given.counted for block in program.blocks]
    found: dict[str, Value] = {f"{symbol}{of}": 0.0 for symbol in ("L", "held") for of in kinds}
    for number, (runs, in_flight) in enumerate(chunks):
        here: dict[str, Value] = dict.fromkeys(kinds, 0.0)
        for one in segments(program, runs, kept=0.0, repeated=repeated, arithmetic=arithmetic):
            of = program.blocks[one.block.kind].given.counted
            here[of] = here[of] + one.blocks
            for name, count in ((f"L{of}", one.blocks), (f"held{of}", in_flight * one.blocks)):
                found[name] = found[name] + count
        for of, count in here.items():
            if of.endswith(PLAIN_BLOCKS):
                name = f"freed{of}"
                found[name] = arithmetic.smaller(found[name], count) if number else count
    return found


@lru_cache(maxsize=4096)
def held_by_chunk(
    program: StepProgram, contents: tuple[Contents, ...], repeated: int
) -> tuple[tuple[str, ...], Floats]:
    """Symbols of what a stage of v chunks holds, and by how much one micro-batch of a chunk raises each,
    `[3·v, symbols]`.

    The first v rows are of a micro-batch whose activations are whole, the next v of one whose weight gradients wait,
    the last v what changes where one is in its last block's backward pass: that block is whole and does not wait.
    contents: of each chunk; repeated: as of `blocks_by_kind`. Symbols: `held` and `waiting` of each kind of block,
    `held` of all together, and micro-batches for which the LM head's weight gradient waits.
    """
    kinds = [block.given.counted for block in program.blocks]

    def blocks(several: Iterable[Contents]) -> Floats:
        each = (
            blocks_by_kind(program, [(as_runs(one), 1.0)], repeated=float(repeated), arithmetic=PLAIN)
            for one in several
        )
        return np.array([[counts[f"L{of}"] for of in kinds] for counts in each])

    all_, last = blocks(contents), blocks(tuple((of_type, 1) for of_type, _ in one[:1]) for one in contents)
    none, head = np.zeros_like(last), np.zeros((3, len(contents)))
    head[1:, -1] = 1.0, -1.0
    held, waiting = np.concatenate([all_, none, last]), np.concatenate([none, all_, -last])
    names = [*(f"held{of}" for of in kinds), *(f"waiting{of}" for of in kinds), "waiting_head"]
    columns = [held, waiting, head.ravel()]
    if len(kinds) > 1:
        names, columns = [*names, "held"], [*columns, held.sum(axis=1)]
    return tuple(names), np.column_stack(columns)


def kept_by_kind(
    program: StepProgram, chunks: Chunks, values: Mapping[str, Value], kept: Value, *, arithmetic: Arithmetic
) -> dict[str, Value]:
    """Symbols of a stage and of each kind of block: `kept`, how many are not resharded after forward, and `unkept`.

    values: with `L`, also of each kind, and, where only some blocks repeat, `repeated`.
    """
    found: dict[str, Value] = {"kept": kept, "unkept": values["L"] - kept}
    if len(program.blocks) == 1:
        return found
    of_kinds: dict[str, Value] = {block.given.counted: 0.0 for block in program.blocks}
    for runs, _ in chunks:
        share, repeated = kept_share(runs, kept, values["L"], arithmetic), values.get("repeated", 0.0)
        for one in segments(program, runs, kept=share, repeated=repeated, arithmetic=arithmetic):
            of = program.blocks[one.block.kind].given.counted
            of_kinds[of] = of_kinds[of] + one.blocks * float(one.block.kept)
    found |= {f"kept{of}": count for of, count in of_kinds.items()}
    return found | {f"unkept{of}": values[f"L{of}"] - count for of, count in of_kinds.items()}


def kept_share(runs: Runs, kept: Value, layers: Value, arithmetic: Arithmetic) -> Value:
    """Blocks of a chunk that are not resharded after forward, of those of a stage with so many blocks."""
    here: Value = 0.0
    for _, count in runs:
        here = here + count
    found: Value = arithmetic.floor(kept * here / arithmetic.larger(layers, 1.0))
    return found


def counted_blocks(
    program: StepProgram,
    values: Mapping[str, Value],
    chunks: Chunks,
    *,
    repeated: Value,
    kept: Value | None = None,
    arithmetic: Arithmetic,
) -> dict[str, Value]:
    """Symbols of a stage, with those that count its blocks; `held` as if each had one micro-batch in flight.

    repeated: as of `blocks_by_kind`; kept: how many are not resharded, where that is known.
    """
    found = {**values, "held": values["L"]}
    if len(program.blocks) > 1:
        found["repeated"] = repeated
        found |= blocks_by_kind(program, chunks, repeated=repeated, arithmetic=arithmetic)
    if kept is not None:
        found |= kept_by_kind(program, chunks, found, kept, arithmetic=arithmetic)
    return found


def build_step(
    model: Model,
    workload: Workload,
    *,
    recompute: Recompute,
    options: StepOptions = BUNDLED,
    some: bool = False,
    context: bool = False,
    lone_context: bool = False,
    table_alignment: int = MATRIX_ALIGNMENT,
) -> StepProgram:
    """The program of one step; the grid, the micro-batch and what follows from them stay symbols.

    some: only the first blocks of each chunk repeat, others do not. context, lone_context: the framework has a context
    axis, of any size or of one rank; table_alignment: bytes at whose multiples rows of logits start.
    """
    options = options.in_format(workload.precision)
    sharded = workload.shard_optimizer_over_data or options.distributed_optimizer
    # Weights have their gradients last where backward passes are split.
    if "data_parallel" not in set(workload.overlaps) & set(options.overlaps) or options.splits_backward:
        options = replace(options, reduction=options.blocking_reduction or options.reduction, parameter_overlap=False)
    sizes, narrow = workload.element_sizes, workload.format
    given = LayerInputs(model, sizes, options, sharded, context, table_alignment, lone_context, format=narrow)
    given = replace(given, lengths=workload.lengths is not None)
    kinds = list(_kinds(given, some=some))
    of_tables = _table_buckets(given)
    buckets = [*chain.from_iterable(_block_buckets(one, number) for one, number in kinds), *of_tables]
    buckets += [(ADAPTER, elements, ONCE) for _, elements in update.adapters_by_axis(given)]
    times = ACCUMULATION if options.reduce_each_micro_batch else ONCE
    summed = chain.from_iterable(_summed_over_x(one) for one, _ in kinds)
    unsent = (*_unsent(given, kinds), *update.adapters_end(given), *summed)
    return StepProgram(
        recompute=recompute,
        given=given,
        embedding=Section("embedding", ACCUMULATION, tuple(tables.embedding_forward(given))),
        blocks=tuple(
            _block(one, number, recompute="none" if one.repeating == PLAIN_BLOCKS else recompute, times=times)
            for one, number in kinds
        ),
        head=Section("head", ACCUMULATION, (*prediction.heads(given), *tables.head(given))),
        embedding_backward=Section("embedding_backward", ACCUMULATION, tuple(tables.embedding_backward(given))),
        head_bucket=_bucket_section("head_bucket", of_tables, ("head",), given, times=times),
        table_buckets=_bucket_section("table_buckets", of_tables, ("embedding", "position"), given, times=times),
        head_parameters=_parameter_section("head_parameters", of_tables, ("head",), given),
        end=Section("end", ONCE, tuple(update.step_end(given, buckets=tuple(buckets), unsent=unsent))),
    )


def _kinds(given: LayerInputs, *, some: bool) -> Iterator[tuple[LayerInputs, int]]:
    """Inputs of each kind of block, with the number of its layer type."""
    model = given.model
    for number, (layer, of) in enumerate(zip(model.types, suffixes(model), strict=True)):
        for repeating in (REPEATING, PLAIN_BLOCKS) if some else ("",):
            own = None if layer.in_bf16 else given.format
            yield replace(given, layer=layer, of=of, repeating=repeating, format=own), number


def _block(given: LayerInputs, number: int, *, recompute: Recompute, times: Size) -> Block:
    """Sections of one kind of block; times: of a step, that its gradients are reduced."""
    if given.own.opens and recompute == "full" and given.tuning and given.tuning.input_gradients:
        given = replace(given, layer=replace(given.own, opens=False))
    repeats, buckets, passes = given.blocks * ACCUMULATION, _block_buckets(given, number), _passes(given)
    backward = tuple(block.backward(passes.nodes, recompute=recompute)) if given.passes_gradients else ()
    unneeded = frozenset(array.name for node in passes.nodes.unneeded for array in node.makes)
    if backward and not passes.nodes.ends:
        block.check_arrays(passes.forward.operations, backward, unneeded=unneeded)
    forward, backward = passes.forward, _named(given, backward)
    if given.options.offloads:
        # Imported here: most searches offload nothing, and start-up time is theirs.
        from axonn_tune.program.offload import with_copies

        whole, sizes = recompute == "full" and given.options.recompute_whole_block, [one[:2] for one in buckets]
        both = with_copies(given, forward.operations, backward, whole=whole, buckets=sizes)
        forward, backward = replace(forward, operations=both[0]), both[1]
    return Block(
        type=number,
        given=given,
        recompute=recompute,
        forward=forward,
        backward=Section("block_backward", repeats, backward),
        bucket=_bucket_section("block_bucket", buckets, (WHOLE_BLOCK, EXPERTS), given, times=times),
        parameters=_parameter_section("parameters", buckets, (WHOLE_BLOCK, EXPERTS), given),
    )


class _Passes(NamedTuple):
    """Nodes of one kind of block, and its forward pass, which is the same whatever is recomputed."""

    nodes: BlockNodes
    forward: Section


@lru_cache(maxsize=64)
def _passes(given: LayerInputs) -> _Passes:
    nodes = block_nodes(given)
    return _Passes(nodes, Section("block", given.blocks * ACCUMULATION, _named(given, block.forward(nodes))))


def _named(given: LayerInputs, operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Operations of a layer type, with its name before those of their layers where there are several types."""
    of = given.of.removeprefix(".")

    def named(step: Operation) -> Operation:
        # As `replace`, which takes most of a program's time.
        found = object.__new__(type(step))
        vars(found).update(vars(step), layer=f"{of}.{step.layer}")
        return found

    return tuple(map(named, operations) if of else operations)


def _bucket_section(
    name: str, buckets: list[Bucket], of: tuple[str, ...], given: LayerInputs, *, times: Size
) -> Section:
    """Reductions over data of the named layers, where gradients are reduced bucket by bucket."""
    chosen = [bucket for bucket in buckets if bucket[0] in of and given.options.reduction == "buckets"]
    operations = tuple(update.data_bucket(layer, elements, given) for layer, elements, _ in chosen)
    return Section(name, times * chosen[0][2] if chosen else ONCE, operations)


def _parameter_section(name: str, buckets: list[Bucket], of: tuple[str, ...], given: LayerInputs) -> Section:
    """Gathers of new weights behind the forward pass, block by block, then the LM head's; others are needed first."""
    chosen = [bucket for bucket in buckets if bucket[0] in of]
    if not (given.sharded and given.options.parameter_overlap and chosen):
        return Section(name, ONCE, ())
    gathers = (update.parameter_gather(layer, elements, given, phase="forward") for layer, elements, _ in chosen)
    return Section(name, chosen[0][2], tuple(gathers))


def _unsent(given: LayerInputs, kinds: list[tuple[LayerInputs, int]]) -> tuple[Collective, ...]:
    """Gradients that are reduced over data after the last backward pass: in one buffer, or one call a parameter."""
    if given.options.reduction == "buckets":
        return ()
    if given.options.reduction == "whole":
        experts = update.data_bucket(EXPERTS, symbol("expert_parameters"), given)
        return (
            update.data_bucket("gradients", symbol("parameters"), given),
            *([experts] if trains_experts(given.model) else []),
        )
    weights = [(linear.layer, linear.weight, one.blocks) for one, _ in kinds for linear in _passes(one).nodes.linears]
    whole_tables = [(table, elements, ONCE) for table, elements in tables.tables(given)]
    whole = given.shard_axes + given.data_axes
    return tuple(
        Collective(
            "all_reduce",
            whole if given.replicated(layer) else given.data_axes,
            "step",
            layer,
            given.reduced_bytes * elements / given.table_shards(layer),
            "data",
            calls,
        )
        for layer, elements, calls in (*weights, *whole_tables)
    )


def _summed_over_x(given: LayerInputs) -> list[Collective]:
    """Sum of the gradients of matrices that each rank of x has whole, and of which it has those of its tokens: of
    routers and projections to latents (NVIDIA/Megatron-LM@d98e8a64, megatron/core/distributed/finalize_model_grads.py).
    """
    duplicated = _passes(given).nodes.duplicated
    if not duplicated or not given.options.sequence_parallel or given.repeating == PLAIN_BLOCKS:
        return []
    blocks = symbol(f"L{counted_suffix(given.model, given.of)}")
    size = given.gradient_bytes * duplicated * H * blocks / (Y * given.shards)
    return [Collective("all_reduce", "x", "step", "duplicated", size)]


def _block_buckets(given: LayerInputs, number: int) -> list[Bucket]:
    """Data-parallel buckets of what trains in a block, `(layer, elements, how many a step)`: that of its routed experts
    is apart."""
    if given.replicates_adapters:
        return []
    trained = counted(given.model)[number].trains
    experts = EXPERTS, symbol(f"expert_bucket{given.of}"), given.blocks
    bucket = WHOLE_BLOCK, symbol(f"block_bucket{given.of}"), given.blocks
    return [*([bucket] if trained.splits else []), *([experts] if trained.each else [])]


def _table_buckets(given: LayerInputs) -> list[Bucket]:
    """Data-parallel buckets of the tables, one each."""

    def table(name: str, shard: Size, whole: Size) -> Bucket:
        return name, whole if given.replicated(name) else shard, ONCE

    found = [] if given.model.tied_embeddings else [table("head", symbol("table_bucket"), TABLE)]
    found.append(table("embedding", symbol("table_bucket"), TABLE))
    if given.model.learned_positions:
        found.append(table("position", symbol("position_bucket"), POSITIONS))
    return [one for one in found if given.trains_table(one[0])]
