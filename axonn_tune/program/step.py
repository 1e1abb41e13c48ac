"""One training step, described once: the cost model prices it, the memory model sizes it, the runtime must match it.

A step is `A` micro-batches, each forward through embedding, L blocks and the LM head, then backward; the
data-parallel buckets go out during the last backward pass, or after it as one buffer; then the optimizer. Sections
list one rank's operations in the order they are issued when nothing overlaps. With pipeline stages, L are the blocks of
one stage, the first of which has the embedding and the last of which the LM head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import TypeAlias

from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import StepOptions
from axonn_tune.program import experts, latent, layers, mamba, prediction
from axonn_tune.program.experts import Gathering, Repeating
from axonn_tune.program.layers import EXPERTS, PARTS, POSITIONS, TABLE, WHOLE_BLOCK, Bucket, H, LayerInputs, X, Y
from axonn_tune.program.operations import (
    MATRIX_ALIGNMENT,
    ONCE,
    PLAIN_BLOCKS,
    REPEATING,
    Collective,
    MatMul,
    Operation,
    Phase,
    Size,
    symbol,
)
from axonn_tune.recompute import modules_of
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload

BUNDLED = AXONN_TUNE.step
"""Options of the bundled runtime."""


def bundled(*, compiled: bool, balanced: bool = False) -> StepOptions:
    """The same with or without compiled kernels, and a load-balancing loss."""
    return replace(BUNDLED, kernels=BUNDLED.kernels if compiled else "eager", balancing_loss=balanced)


ACCUMULATION = symbol("A")


@dataclass(frozen=True)
class Stage:
    """Whether a pipeline stage is the first, which has the embedding, or the last, which has the LM head; or both."""

    first: bool = True
    last: bool = True

    def has(self, operation: Operation) -> bool:
        """Whether an operation of the end of a step is one of this stage."""
        if isinstance(operation, Collective) and operation.axis == "ends":
            return self.first != self.last
        copy = self.last and not self.first
        held = {"embedding": self.first, "position": self.first, "head": self.last, layers.COPY: copy}
        return held.get(operation.layer, True)


ONLY, FIRST, MIDDLE, LAST = Stage(), Stage(True, False), Stage(False, False), Stage(False, True)
"""The stage of a step without pipeline stages, and those of one with several."""


def suffixes(model: Model) -> tuple[str, ...]:
    """What stands behind the symbols of each layer type of a model: nothing if there is but one."""
    types = model.types
    return tuple(f".{layer.name}" for layer in types) if len(types) > 1 else ("",)


Contents: TypeAlias = tuple[tuple[int, int], ...]
"""Blocks of a chunk in forward order: numbers of layer types, and how many in a row."""


def contents_of(model: Model, parts: Sequence[int], mtp_part: int | None = None) -> tuple[Contents, ...]:
    """What is in each model part, given the number of its blocks, and the one with the MTP layers: None, the last."""
    runs = [[of_type, count] for of_type, count in (model.decoder_runs if model.pattern else [(0, sum(parts))])]
    found = list[Contents]()
    for count in parts:
        here = list[tuple[int, int]]()
        while count:
            taken = min(count, runs[0][1])
            here.append((runs[0][0], taken))
            count, runs[0][1] = count - taken, runs[0][1] - taken
            runs = runs if runs[0][1] else runs[1:]
        found.append(tuple(here))
    if model.mtp_layers:
        found[len(found) - 1 if mtp_part is None else mtp_part] += model.predicting_runs
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


def stages_alike(parts: tuple[Contents, ...], stages: int) -> dict[tuple[Stage, tuple[Contents, ...]], list[int]]:
    """Stages that are alike: their place and the blocks of their chunks, with their numbers.

    parts: blocks of each model part, chunk c of stage s at c·p + s.
    """
    found: dict[tuple[Stage, tuple[Contents, ...]], list[int]] = {}
    for number in range(stages):
        stage = Stage(number == 0, number == stages - 1)
        found.setdefault((stage, parts[number::stages]), []).append(number)
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
        whole = self.given.element * self.given.tokens * H / Y
        shared = scattered or self.given.options.sequence_parallel
        return Collective("send", "pipeline", "forward", "stage", whole / X if shared else whole)

    def collectives(self, stage: Stage = ONLY) -> Iterator[tuple[Collective, Size]]:
        """Yield each collective with its calls per step and rank; axes of size 1 included."""
        for operation, count in self.calls(stage):
            if isinstance(operation, Collective):
                yield operation, count


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
    if "data_parallel" not in set(workload.overlaps) & set(options.overlaps):
        options = replace(options, reduction=options.blocking_reduction or options.reduction, parameter_overlap=False)
    sizes, narrow = workload.element_sizes, workload.format
    given = LayerInputs(model, sizes, options, sharded, context, table_alignment, lone_context, format=narrow)
    kinds = list(_kinds(given, some=some))
    tables = _table_buckets(given)
    buckets = [*chain.from_iterable(_block_buckets(one) for one, _ in kinds), *tables]
    times = ACCUMULATION if options.reduce_each_micro_batch else ONCE
    unsent = (*_unsent(given, kinds), *chain.from_iterable(latent.summed(one) for one, _ in kinds))
    return StepProgram(
        recompute=recompute,
        given=given,
        embedding=Section("embedding", ACCUMULATION, tuple(layers.embedding_forward(given))),
        blocks=tuple(
            _block(one, number, recompute="none" if one.repeating == PLAIN_BLOCKS else recompute, times=times)
            for one, number in kinds
        ),
        head=Section("head", ACCUMULATION, (*prediction.heads(given), *layers.head(given))),
        embedding_backward=Section("embedding_backward", ACCUMULATION, tuple(layers.embedding_backward(given))),
        head_bucket=_bucket_section("head_bucket", tables, ("head",), given, times=times),
        table_buckets=_bucket_section("table_buckets", tables, ("embedding", "position"), given, times=times),
        head_parameters=_parameter_section("head_parameters", tables, ("head",), given),
        end=Section("end", ONCE, tuple(layers.step_end(given, buckets=tuple(buckets), unsent=unsent))),
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
    repeats, buckets = given.blocks * ACCUMULATION, _block_buckets(given)
    return Block(
        type=number,
        given=given,
        recompute=recompute,
        forward=_forward(given),
        backward=Section("block_backward", repeats, _named(given, _block_backward(given, recompute=recompute))),
        bucket=_bucket_section("block_bucket", buckets, (WHOLE_BLOCK, EXPERTS), given, times=times),
        parameters=_parameter_section("parameters", buckets, (WHOLE_BLOCK, EXPERTS), given),
    )


@lru_cache(maxsize=64)
def _forward(given: LayerInputs) -> Section:
    """The forward pass of one kind of block, of all kinds of recompute."""
    return Section("block", given.blocks * ACCUMULATION, _named(given, _block_forward(given)))


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
    operations = tuple(layers.data_bucket(layer, elements, given) for layer, elements, _ in chosen)
    return Section(name, times * chosen[0][2] if chosen else ONCE, operations)


def _parameter_section(name: str, buckets: list[Bucket], of: tuple[str, ...], given: LayerInputs) -> Section:
    """Gathers of new weights behind the forward pass, block by block, then the LM head's; others are needed first."""
    chosen = [bucket for bucket in buckets if bucket[0] in of]
    if not (given.sharded and given.options.parameter_overlap and chosen):
        return Section(name, ONCE, ())
    gathers = (layers.parameter_gather(layer, elements, given, phase="forward") for layer, elements, _ in chosen)
    return Section(name, chosen[0][2], tuple(gathers))


def _unsent(given: LayerInputs, kinds: list[tuple[LayerInputs, int]]) -> tuple[Collective, ...]:
    """Gradients that are reduced over data after the last backward pass: in one buffer, or one call a parameter."""
    if given.options.reduction == "buckets":
        return ()
    if given.options.reduction == "whole":
        experts = layers.data_bucket(EXPERTS, symbol("expert_parameters"), given)
        return (
            layers.data_bucket("gradients", symbol("parameters"), given),
            *([experts] if given.model.has_experts else []),
        )
    weights = [
        (linear.layer, linear.weight, one.blocks) for one, _ in kinds for linear in (*one.linears, *mamba.linears(one))
    ]
    tables = [(table, elements, ONCE) for table, elements in layers.tables(given)]
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
        for layer, elements, calls in (*weights, *tables)
    )


def _block_buckets(given: LayerInputs) -> list[Bucket]:
    """Data-parallel buckets of a block, `(layer, elements, how many a step)`: that of its routed experts is apart."""
    experts = EXPERTS, symbol(f"expert_bucket{given.of}"), given.blocks
    bucket = WHOLE_BLOCK, symbol(f"block_bucket{given.of}"), given.blocks
    return [bucket, *([experts] if given.own.experts else [])]


def _table_buckets(given: LayerInputs) -> list[Bucket]:
    """Data-parallel buckets of the tables, one each."""

    def table(name: str, shard: Size, whole: Size) -> Bucket:
        return name, whole if given.replicated(name) else shard, ONCE

    found = [] if given.model.tied_embeddings else [table("head", symbol("table_bucket"), TABLE)]
    found.append(table("embedding", symbol("table_bucket"), TABLE))
    if given.model.learned_positions:
        found.append(table("position", symbol("position_bucket"), POSITIONS))
    return found


def _gather(linear: layers.Linear, given: LayerInputs, *, phase: Phase, calls: Size = ONCE) -> list[Operation]:
    """Gather of one weight, where weights are gathered one by one."""
    if given.options.gather_unit == "block":
        return []
    return layers.gather_weight(linear.layer, linear.weight, given, phase=phase, calls=calls)


def _gather_block(given: LayerInputs, *, phase: Phase, calls: Size = ONCE) -> list[Operation]:
    """Gather of all weights of a block at once, where they are."""
    if given.options.gather_unit == "weight":
        return []
    gathers = layers.gather_weight(WHOLE_BLOCK, given.block, given, phase=phase, calls=calls)
    return [*gathers, *layers.gather_experts(given, phase=phase, unit="block", calls=calls)]


def _block_forward(given: LayerInputs, *, phase: Phase = "forward") -> Iterator[Operation]:
    """Norm, attention, norm, MLP, each followed by its addition to the residual stream; or one of both.

    Mamba-2 stands in place of attention.
    """
    yield from _gather_block(given, phase=phase)
    if given.own.predicts:
        yield from prediction.forward(given, lambda linear: _gather(linear, given, phase=phase), phase=phase)
    if given.own.mamba:
        yield from mamba.forward(given, partial(_gather, given=given, phase=phase), phase=phase)
        if not given.computes:
            yield from layers.residual(mamba.OUT, given, phase=phase)
    if given.own.attention:
        yield from _attention_forward(given, phase=phase)
    if given.computes:
        yield from _mlp_forward(given, phase=phase)


def _attention_forward(given: LayerInputs, *, phase: Phase) -> Iterator[Operation]:
    """Norm and attention; before an MLP without the addition, which may be in that one's norm."""
    stream = given.stream
    saved = (
        stream("block input", "residual stream"),
        stream("attention.norm output", "norm outputs", element=given.attention_element),
    )
    yield from layers.norm_forward("attention.norm", given, tokens=given.part, calls=PARTS, makes=saved)
    if given.own.latent is None:
        yield from _gather(given.qkv, given, phase=phase)
        heads = stream("qkv", "qkv", given.N / X, inside=True, element=given.heads_element)
        yield from layers.linear_forward(given.qkv, given, phase=phase, makes=(heads,))
        yield from () if given.launched else layers.head_norms(given, phase=phase)
    else:
        yield from latent.forward(given, lambda linear: _gather(linear, given, phase=phase), phase=phase)
    yield from layers.attention_core(given, phase=phase)
    yield from _gather(given.attention_output, given, phase=phase)
    yield from layers.linear_forward(given.attention_output, given, phase=phase)
    if not given.computes:
        yield from layers.residual("attention.output", given, phase=phase)


def _mlp_forward(given: LayerInputs, *, phase: Phase) -> Iterator[Operation]:
    """The addition of attention's output, norm and MLP, or experts in its place."""
    stream, mixer = given.stream, mamba.OUT if given.own.mamba else "attention.output"
    middle = stream("middle of block", "residual stream")
    normed = stream("mlp.norm output", "norm outputs", element=given.normed_element)
    if not given.own.attention and not given.own.mamba:
        made = stream("block input", "residual stream"), normed
        yield from layers.norm_forward("mlp.norm", given, tokens=given.part, calls=PARTS, makes=made)
    elif given.kernels.sum.kernels or phase == "recompute":
        yield from layers.residual(mixer, given, phase=phase, makes=(middle,))
        yield from layers.norm_forward("mlp.norm", given, tokens=given.part, calls=PARTS, makes=(normed,))
    else:
        summed, made = given.kernels.sum, (middle, normed)
        yield from layers.norm_forward("mlp.norm", given, tokens=given.part, calls=PARTS, makes=made, summed=summed)
    yield from experts.forward(given, phase=phase) if given.own.experts else _dense_forward(given, phase=phase)
    yield from layers.residual("mlp.fc2", given, phase=phase)


def _dense_forward(given: LayerInputs, *, phase: Phase) -> Iterator[Operation]:
    """A dense MLP."""
    yield from _gather(given.fc1, given, phase=phase)
    yield from layers.linear_forward(given.fc1, given, phase=phase, makes=layers.up_projections(given))
    yield from layers.activation(given, phase=phase)
    yield from _gather(given.fc2, given, phase=phase)
    yield from layers.linear_forward(given.fc2, given, phase=phase)


def _recompute_full(given: LayerInputs) -> Iterator[Operation]:
    """The block's forward pass again; unless the whole of it, up to the activation: backward needs no output of fc2.

    Where it stops there, norm statistics are always saved, so nothing is gathered for the norms. The gathered weights
    stay for the backward pass. Blocks not resharded gather nothing.
    """
    whole = given.options.recompute_whole_block
    last = given.last_layers if given.computes or given.own.attention else (mamba.OUT,)
    for step in _block_forward(given, phase="recompute"):
        if step.layer in ("attention.norm", "mlp.norm", mamba.NORM):
            made = {array.name: array for array in step.makes}
            if f"{step.layer} output" in made:
                yield from layers.norm_recompute(step.layer, given, makes=(made[f"{step.layer} output"],))
        elif getattr(step, "role", "") == "weight" or getattr(step, "with_gather", False):
            yield replace(step, calls=given.unkept_share)
        elif whole or step.layer not in last:
            yield step


def _block_backward(given: LayerInputs, *, recompute: Recompute) -> Iterator[Operation]:
    """Recompute, then the gradients of the block, last layer first; an MLP that is repeated is so before them."""
    left, options = list(given.repeated_layers(recompute)), given.options
    gathers = recompute != "full" or options.gather_after_recompute
    repeats_mlp = given.own.ffn > 0 and given.fc1.layer in left

    def gather(linear: layers.Linear) -> list[Operation]:
        held = linear.layer == given.fc1.layer and repeats_mlp and not options.gather_after_recompute
        return _gather(linear, given, phase="backward", calls=given.unkept_share) if gathers and not held else []

    def again(*names: str) -> Iterator[Operation]:
        for name in [one for one in names if one in left]:
            left.remove(name)
            yield from _recompute_layer(name, given)

    if recompute == "full":
        yield from _recompute_full(given)
    if gathers:
        yield from _gather_block(given, phase="backward", calls=given.unkept_share)
    if given.computes:
        if repeats_mlp:
            yield from again("mlp.norm", given.fc1.layer, "mlp.activation", given.fc2.layer)
        yield from _mlp_backward(given, gather, again, held=not gathers)
    if given.own.attention or given.own.mamba:
        yield from mamba.backward(given, gather) if given.own.mamba else _attention_backward(given, gather, again)
    yield from prediction.backward(given, gather) if given.own.predicts else ()
    if options.gather_unit == "block":
        yield from layers.reduce_weight_gradient(WHOLE_BLOCK, given.block, given)
        yield from layers.reduce_experts(given, unit="block")


def _mlp_backward(given: LayerInputs, gather: Gathering, again: Repeating, *, held: bool) -> Iterator[Operation]:
    """Gradients of norm and MLP; gather: of a weight; again: layers that are repeated here, if they are; held: weights
    are there, gathered for recompute."""
    behind = ("middle of block", "mlp.norm gradient", "mlp.norm statistics")
    if given.own.experts:
        yield from layers.dropout_backward("mlp.fc2", given)
        yield from experts.backward(given, gather, again, held=held)
        yield from _norm_backward("mlp.norm", given, frees=(*behind, "shared gradient"))
        return
    yield from gather(given.fc2)
    yield from again("mlp.up", "mlp.activation")
    yield from layers.dropout_backward("mlp.fc2", given)
    made = given.stream("activation gradient", "backward temporaries", given.F / X, inside=True)
    yield from layers.linear_backward(given.fc2, given, makes=made, frees=("activation",))
    yield from layers.activation_backward(given)
    yield from gather(given.fc1)
    yield from again("mlp.norm")
    made = given.stream("mlp.norm gradient", "residual gradients")
    yield from layers.linear_backward(given.fc1, given, makes=made, frees=("mlp.norm output", "up gradient"))
    yield from _norm_backward("mlp.norm", given, frees=behind)


def _attention_backward(given: LayerInputs, gather: Gathering, again: Repeating) -> Iterator[Operation]:
    """Gradients of norm and attention, with parameters as of `_mlp_backward`."""
    yield from gather(given.attention_output)
    yield from again("attention.core", "attention.output")
    yield from layers.dropout_backward("attention.output", given)
    made = given.stream("attention gradient", "backward temporaries", given.values / X, inside=True)
    yield from layers.linear_backward(given.attention_output, given, makes=made, frees=())
    yield from again("attention.q_up", "attention.kv_up", "attention.scores")
    yield from layers.attention_core_backward(given)
    yield from () if given.launched else layers.head_norms(given, phase="backward")
    if given.own.latent is None:
        yield from gather(given.qkv)
        yield from again("attention.norm")
        made = given.stream("attention.norm gradient", "residual gradients")
        yield from layers.linear_backward(given.qkv, given, makes=made, frees=("attention.norm output", "qkv gradient"))
    else:
        yield from latent.backward(given, gather, again)
    yield from _norm_backward("attention.norm", given, frees=("attention.norm gradient",))


def _recompute_layer(layer: str, given: LayerInputs) -> Iterator[Operation]:
    """One layer's forward again. The gathered weight of fc1 stays for its backward pass, or is gathered once more."""
    if layer in experts.REPEATED:
        yield from experts.REPEATED[layer](given, phase="recompute")
    elif layer in latent.UP:
        yield from latent.repeated(layer, given)
    elif layer in (given.fc1.layer, given.fc2.layer):
        linear = given.fc1 if layer == given.fc1.layer else given.fc2
        made = layers.up_projections(given) if layer == given.fc1.layer else ()
        yield from _gather(linear, given, phase="recompute", calls=given.unkept_share)
        yield from layers.linear_forward(linear, given, phase="recompute", makes=made)
    elif layer == "mlp.activation":
        yield from layers.activation(given, phase="recompute")
    elif layer == "attention.core":
        yield from layers.attention_core(given, phase="recompute")
    elif layer in ("attention.output", "mlp.up"):
        # Of a gated MLP the half of fc1 that is not gated.
        linear, n, made = given.fc1, given.F / X, layers.up_projections(given)[:1]
        if layer == "attention.output":
            linear, n, made = given.attention_output, given.attention_output.n, ()
        yield MatMul("recompute", linear.layer, given.part, n, linear.k, "NN", PARTS, narrow=given.narrow, makes=made)
    elif layer == "attention.scores":
        for step in layers.attention_core(given, phase="recompute"):
            yield replace(step, makes=tuple(array for array in step.makes if array.name != "attention output"))
    else:
        element = given.normed_element if layer == "mlp.norm" else given.saved_element
        output = given.stream(f"{layer} output", "norm outputs", element=element)
        yield from layers.norm_recompute(layer, given, makes=(output,))


def _norm_backward(layer: str, given: LayerInputs, *, frees: tuple[str, ...]) -> list[Operation]:
    """Gradient of a norm, added to that of the residual stream."""
    made = given.stream("new residual gradient", "residual gradients")
    frees = (*frees, "new residual gradient")
    return layers.norm_backward(layer, given, tokens=given.part, calls=PARTS, makes=(made,), frees=frees)
