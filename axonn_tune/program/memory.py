"""Memory of one rank at the peak of a step, item by item, in bytes, by the lifetimes of the program's arrays.

Operations name the arrays that they allocate and free. Arrays of a block's forward pass live until its backward pass,
unless they are recomputed. The peak is in the LM head or in the backward pass of a block, while the activations of all
blocks in flight are alive. Persistent state and communication buffers add to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce
from itertools import chain
from operator import add
from typing import Literal, NamedTuple, TypeAlias

from axonn_tune.frameworks.optimizers import optimizers
from axonn_tune.frameworks.step import HOST_BYTES
from axonn_tune.program.count import counted
from axonn_tune.program.inputs import EXPERTS, JOINED, WHOLE_BLOCK, LayerInputs, Z
from axonn_tune.program.nodes import kept_arrays, residual_gradient
from axonn_tune.program.operations import (
    PLAIN,
    PLAIN_BLOCKS,
    REPEATING,
    Arithmetic,
    Array,
    Collective,
    HostWork,
    Operation,
    Role,
    Size,
    Value,
    symbol,
)
from axonn_tune.program.step import ONLY, Block, Stage, StepProgram
from axonn_tune.program.types import experts
from axonn_tune.program.update import update_of, updates
from axonn_tune.specs.machine import Accelerator
from axonn_tune.units import GIB

_PARAMETERS, _VECTORS, _EXPERTS = map(symbol, ("parameters", "vectors", "expert_parameters"))

Items: TypeAlias = tuple[tuple[str, Value], ...]

Holding: TypeAlias = Literal["F", "B", "I"]
"""Kinds of operation of a pipeline whose backward passes are split in which a stage may hold most: W only frees."""
During: TypeAlias = Holding | None
"""The kind of operation; None where backward passes are whole."""

Held: TypeAlias = tuple[tuple[str, Size], ...]
"""Sizes by kind of array."""


def memory_limit_bytes(accelerator: Accelerator) -> float:
    """Memory limit of a step: the GPU's memory minus the reserve for context, communicators and allocator."""
    return accelerator.memory_gib * GIB - accelerator.reserved_memory_gib * GIB


Room: TypeAlias = Literal["fits", "tight", "does not fit"]
TIGHT = 0.03
"""Free share of the limit below which memory is tight: three times the largest error on one H200 (docs/gpu.md)."""


def room_of(needed_bytes: float, limit_bytes: float) -> Room:
    """Whether a GPU has so much memory."""
    if needed_bytes > limit_bytes:
        return "does not fit"
    return "tight" if needed_bytes > (1.0 - TIGHT) * limit_bytes else "fits"


def persistent_items(given: LayerInputs) -> Held:
    """Weights, gradients and optimizer state, with what the data-parallel ranks split of them (ZeRO-1, ZeRO-2)."""
    sizes, options = given.elements, given.options
    copied = given.sharded or not options.master_shards
    master = options.master_shards or sizes.main != sizes.compute
    # Where weights are not copied, the master weights are the weights.
    moved = {name: float(name in options.offloaded) for name in ("weights", "gradients", "moments", "master")}
    kept = {name: 1.0 - share * options.offloaded_states for name, share in moved.items()}
    main = kept["master"] if copied else 1.0 - moved["weights"]
    held, vectors = list[tuple[str, Size]](), update_of(given, vectors=True)
    has_frozen = any(one.trained is not None for one in counted(given.model))
    for of, elements, replicas in (
        ("", _PARAMETERS, given.replicas),
        *([(" of experts", _EXPERTS, given.replication(EXPERTS)[1])] if given.model.has_experts else []),
    ):
        frozen = symbol("frozen_expert_parameters" if of else "frozen_parameters")
        updated = updates(given, routed=bool(of))
        if master and main:
            held += [(f"master weights{of}", main * one.update.master * one.elements) for one in updated]
        moments = [
            (f"optimizer moments{of}", kept["moments"] * one.update.state_bytes * one.elements) for one in updated
        ]
        held += moments if kept["moments"] else []
        shares = replicas if options.shard_gradients else Size(1.0)
        held += [] if moved["gradients"] else [(f"gradients{of}", given.gradient_bytes * elements / shares)]
        if whole := float(options.whole_gradient_bytes):
            held.append((f"whole gradients{of}", whole * elements * Z))
        if not of:
            each = vectors.master + vectors.state_bytes + sizes.main
            held += [("replicated vectors", float(each) * _VECTORS)]
        held += [(f"compute weights{of}", 1.0 * sizes.compute * elements)] if copied and not moved["weights"] else []
        if has_frozen and not moved["weights"]:
            # Without states: as ranks have weights to compute with, or as shards that are gathered.
            name, element = ("compute", float(sizes.compute)) if copied else ("master", float(vectors.master))
            if given.tuning is not None:
                name, element = "frozen", given.tuning.base_bytes if given.tuning.quantized else float(sizes.compute)
                held += [] if of else [("frozen weights", 1.0 * sizes.compute * symbol("frozen_tables"))]
            held.append((f"{name} weights{of}", element * frozen))
            held += [] if of else [("replicated vectors", float(sizes.main) * symbol("frozen_vectors"))]
    return tuple(held)


@lru_cache(maxsize=64)
def host_sizes(program: StepProgram) -> tuple[Size, ...]:
    """What a rank keeps on the host, bytes, to be added up: of an element that is updated there weight, gradient and
    moments in FP32; and weights and saved activations that are there and not on the GPU."""
    plain = replace(program.given.options, offloaded=(), offloaded_layers=0.0)
    ends = (one for one in program.end.operations if isinstance(one, HostWork))
    sizes = [HOST_BYTES * size for one in ends for size in one.updated]
    for sign, options in ((-1.0, program.given.options), (1.0, plain)):
        blocks = (replace(one, given=replace(one.given, options=options)) for one in program.blocks)
        items = [*persistent_items(replace(program.given, options=options)), *chain.from_iterable(map(_saved, blocks))]
        sizes += [sign * size for name, size in items if name.startswith(("saved", "compute weights"))]
    return tuple(sizes)


def host_bytes(program: StepProgram, values: Mapping[str, Value], ranks: Value) -> Value:
    """The same of all ranks of a node that have as much."""
    kept: Value = sum(size.evaluate(values) for size in host_sizes(program))
    return ranks * kept


MESSAGES = 3.0
"""Messages per neighbour: one in each direction being received, or two being sent."""


def saved_arrays(block: Block) -> tuple[Array, ...]:
    """Saved activations of one block and micro-batch (`kept_arrays`)."""
    whole = block.recompute == "full" and block.given.options.recompute_whole_block
    return kept_arrays(block.forward.operations, block.backward.operations, whole=whole)


def temporaries(
    operations: Iterable[Operation], *, first: tuple[Array, ...] = (), saved: tuple[Array, ...] = ()
) -> tuple[Held, ...]:
    """Live temporaries at each point of some operations that no other point dominates.

    saved: arrays of one block that count as saved throughout; one freed before a point counts negative.
    """
    alive, kept = {array.name: array for array in first}, {array.name: array for array in saved}
    points: list[dict[tuple[str, Size], float]] = []
    for step in operations:
        if step.makes:
            alive |= {array.name: array for array in step.makes}
            points.append(_by_kind(alive.values()))
        for name in step.frees:
            if alive.pop(name, None) is None and name in kept:
                gone = kept.pop(name)
                alive[f"no {name}"] = Array(name, f"saved {gone.kind}", -1.0 * gone.size_bytes)
    points = points or [_by_kind(alive.values())]
    distinct = [point for number, point in enumerate(points) if point not in points[:number]]

    def outdone(one: Mapping[tuple[str, Size], float], other: Mapping[tuple[str, Size], float]) -> bool:
        """Whether another point holds at least as much of everything."""
        return all(one.get(key, 0.0) <= other.get(key, 0.0) for key in (*one, *other))

    largest = [one for one in distinct if not any(outdone(one, other) for other in distinct if other is not one)]
    return tuple(tuple((kind, count * size) for (kind, size), count in point.items()) for point in largest)


def _by_kind(arrays: Iterable[Array]) -> dict[tuple[str, Size], float]:
    """Arrays of one kind and shape as one, with the sum of their sizes."""
    found: dict[tuple[str, Size], float] = {}
    for array in arrays:
        key = (array.kind, Size(1.0, array.size_bytes.powers))
        found[key] = found.get(key, 0.0) + array.size_bytes.coefficient
    return found


@dataclass(frozen=True)
class Peak:
    """Live memory in one part of a step, besides persistent state and saved activations.

    points: sets of arrays alive together; gathers, reductions: sets of gathered weights and of unreduced gradients
    alive together; kept_gathers: gathers beside the weights of layers that are not resharded. freed: what is freed
    before any of the points, negative.
    """

    points: tuple[Held, ...]
    gathers: tuple[tuple[Size, ...], ...]
    kept_gathers: tuple[tuple[Size, ...], ...]
    reductions: tuple[tuple[Size, ...], ...]
    freed: Held = ()


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of a program as sizes: throughout the step, per block in flight, and in parts with a possible peak.

    kept_layers: gathered weights of a block of each type, which one not resharded after forward holds until its
    backward.
    """

    given: LayerInputs
    kept_layers: tuple[tuple[Size, ...], ...]
    persistent: Held
    saved: Held
    peaks: tuple[Peak, ...]

    @cached_property
    def sums(self) -> Sums:
        """Everything that is summed up for a total."""
        sizes, links = dict[Size, int](), dict[tuple[int, int], int]()

        def summed(several: Iterable[Size]) -> int:
            found = 0
            for size in several:
                link = found, sizes.setdefault(size, len(sizes))
                found = links.setdefault(link, len(links) + 1)
            return found

        kept_layers = tuple(map(summed, self.kept_layers))
        peaks = [
            (
                tuple(summed(size for _, size in point) for point in peak.points),
                *(tuple(map(summed, several)) for several in (peak.gathers, peak.kept_gathers, peak.reductions)),
            )
            for peak in self.peaks
        ]
        apart = [name for size in sizes for name, _ in size.powers if name.partition(".")[0] in _OF_STAGE]
        assert not apart, "layouts have the same in all their stages"
        return Sums(tuple(sizes), tuple(links), kept_layers, peaks)

    def held_bytes(self, names: Iterable[str], values: Mapping[str, Value]) -> list[Value]:
        """Bytes of saved activations that one more of each symbol adds (`step.held_by_chunk`), for given values of all
        others: they are linear in these symbols."""
        found: dict[str, Value] = dict.fromkeys(names, 0.0)
        values = dict(_longest(values)) | dict.fromkeys(found, 1.0)
        for _, size in self.saved:
            for name in found.keys() & {name for name, _ in size.powers}:
                found[name] += size.evaluate(values)
        return [*found.values()]


_OF_STAGE = {"L", "held", "freed", "repeated", "kept", "unkept"} | {
    name.powers[0][0] for name in (_PARAMETERS, _VECTORS, _EXPERTS, symbol("head_norms"))
}
"""Symbols that differ between the stages of one layout."""


@dataclass(frozen=True)
class Sums:
    """Left folds of sizes: each size once, and each fold as the one without its last size, and that size; 0 is nothing.

    kept_layers: folds of the weights of a block; peaks: of each its points, gathers, gathers beside layers not
    resharded, and reductions.
    """

    sizes: tuple[Size, ...]
    folds: tuple[tuple[int, int], ...]
    kept_layers: tuple[int, ...]
    peaks: list[tuple[tuple[int, ...], ...]]

    def evaluate(self, values: Mapping[str, Value], known: dict[Size, Value], arithmetic: Arithmetic) -> Largest:
        """The largest of the folds; known: bytes of sizes, to which these are added."""
        for size in self.sizes:
            if size not in known:
                known[size] = size.evaluate(values)
        found = list[Value]([0.0])
        for before, number in self.folds:
            found.append(found[before] + known[self.sizes[number]])

        def largest(folds: tuple[int, ...]) -> Value:
            return _largest_of((found[fold] for fold in folds), arithmetic)

        # Sums never decrease with what is added to, so the largest point has the largest of them, to the last bit.
        of_peaks = [
            (reduce(arithmetic.larger, (found[point] for point in points)), *map(largest, several))
            for points, *several in self.peaks
        ]
        return Largest(largest(self.kept_layers), of_peaks)


class Largest(NamedTuple):
    """Bytes of the weights of a layer, and of each peak its largest point, gathers, gathers beside layers not resharded
    and reductions."""

    per_layer: Value
    peaks: list[tuple[Value, ...]]


@dataclass(frozen=True)
class KnownSizes:
    """What all stages of the same layouts have in common: bytes of sizes, and the largest by their plans."""

    sizes: dict[Size, Value] = field(default_factory=dict)
    largest: dict[int, tuple[MemoryPlan, Largest]] = field(default_factory=dict)

    def __reduce__(self) -> tuple[type[KnownSizes], tuple[()]]:
        # Worked out anew, columns are there sooner than read.
        return KnownSizes, ()

    def of(self, plan: MemoryPlan, values: Mapping[str, Value], arithmetic: Arithmetic) -> Largest:
        """The largest of a plan, worked out once."""
        if id(plan) not in self.largest:
            self.largest[id(plan)] = plan, plan.sums.evaluate(values, self.sizes, arithmetic)
        return self.largest[id(plan)][1]


@lru_cache(maxsize=256)
def memory_plan(program: StepProgram, stage: Stage = ONLY, during: During = None) -> MemoryPlan:
    """Sizes of one stage of a program; one in the middle of a pipeline has two neighbours to exchange messages with.

    during: the operation at a possible peak, where backward passes are split.
    """
    messages = list[tuple[str, Size]]()
    if stage != ONLY:
        neighbours = 1.0 if stage.first or stage.last else 2.0
        messages = [("messages between stages", neighbours * MESSAGES * program.send(scattered=False).size_bytes)]
    saved = [one for block in program.blocks for one in _saved(block)]
    given = program.given
    if during is not None:
        # Imported here: most searches split no backward pass, and start-up time is theirs.
        from axonn_tune.program.split import waiting_arrays

        saved += waiting_arrays(program, last=stage.last)
    # LM head: the last block's output, its weight with the first gather of the backward pass, and its gradient.
    operations, last = program.head.operations, program.blocks[-1]
    gathers = (*_sizes(given, operations, "weight"), *_backward_gathers(last)[:1])
    points = temporaries(operations, first=(given.stream("last output", "residual stream"),))
    blocks = [block for block in program.blocks if block.backward.operations]
    head = Peak(points, (gathers,), (gathers,), (_sizes(given, operations, "weight_gradient"),))
    return MemoryPlan(
        given=given,
        kept_layers=tuple(dict.fromkeys(_weights(block.given) for block in program.blocks)),
        persistent=(*persistent_items(given), *_quantized_weights(program), *_expert_buffers(program), *messages),
        saved=tuple(saved),
        peaks=(
            *([head] if stage.last and during in (None, "F") else []),
            *(peak(program, one, last=stage.last) for one in blocks for peak in _PEAKS[during]),
            *(_update_peak(given, saved) if during in (None, "I") else []),
        ),
    )


def _update_peak(given: LayerInputs, saved: Sequence[tuple[str, Size]]) -> Iterator[Peak]:
    """The bundled runtime's update of whole matrices, when activations are gone."""
    if given.options.muon_gathered and optimizers()[given.options.optimizer].whole is not None:
        # Imported here: most searches are of AdamW, and start-up time is theirs.
        from axonn_tune.program.whole import live_matrices

        freed = tuple((kind, -1.0 * size) for kind, size in saved)
        yield Peak(tuple(live_matrices(given)), ((),), ((),), ((),), freed)


def _saved(block: Block) -> Iterator[tuple[str, Size]]:
    """Saved activations of a kind of block.

    Of inputs of modules that are offloaded one block's is there: the last layer's stays, and others come back one by
    one. Source: NVIDIA/Megatron-LM@d98e8a64, megatron/core/pipeline_parallel/fine_grained_activation_offload.py.
    """
    options, counted = block.given.options, dict[tuple[str, Size], float]()
    held = (1.0 - options.offloaded_layers) * block.given.held
    for array in saved_arrays(block):
        away = block.given.moved_share(array.name)
        for share, of in ((1.0 - away, held), (away, Size(1.0))):
            size = of * array.size_bytes
            key = array.kind, Size(1.0, size.powers)
            counted[key] = counted.get(key, 0.0) + share * size.coefficient
    for (kind, one), count in counted.items():
        if count:
            yield f"saved {kind}", count * one


def _quantized_weights(program: StepProgram) -> Held:
    """Copies of the weights of linear layers and experts in their number format, where they serve all micro-batches."""
    if program.given.format is None or not program.given.options.keeps_quantized:
        return ()
    found = list[tuple[str, Size]]()
    for block in program.blocks:
        given, primary = block.given, block.given.format is not None and block.given.options.primary_weights
        routed = [(" of experts", experts.weights(given))] if given.own.experts else []
        for of, elements in (("", given.block), *routed):
            held = given.blocks * elements / given.sharding(EXPERTS if of else WHOLE_BLOCK)[1]
            # A transposed copy of what does not train lasts no longer than its gradient: in MLPerf's LoRA of Llama 2
            # 70B one of 69 GB fits on 8 H200 with CP 2, two do not (mlcommons/training_results_v5.1@441d65f4).
            once = given.format if given.tuning is not None else None
            copies = once.operand_bytes if once else given.weight_copies_bytes
            found.append(("quantized weights", copies * held))
            # They are all that there is of these.
            found += [(f"compute weights{of}", -1.0 * given.element * held)] if primary else []
    return tuple(found)


def _expert_buffers(program: StepProgram) -> Held:
    """Buffers of gathered experts and of their unreduced gradients, which stay: those of two blocks in turn.

    Both passes gather into the same ones, but for quantized weights, of which each has its own layout. Source:
    NVIDIA/Megatron-LM@d98e8a64, megatron/core/tensor_parallel/generalized_tensor_parallelism.py, _get_cache_key.
    """
    found = dict[tuple[str, Size], None]()
    for block in program.blocks if program.given.options.gathers_experts else ():
        given = block.given
        if given.own.experts is not None:
            element, gradient = given.weight_element(EXPERTS, copies=1), given.options.shard_gradient_bytes
            passes = 2.0 if given.narrow and given.options.primary_weights else 1.0
            held, trained = 2.0 * JOINED, counted(given.model)[block.type].trains.each
            found["gathered weights of experts", passes * element * held * experts.weights(given)] = None
            reduced = (gradient or given.element) * held * experts.weights(given, trained)
            found |= {("unreduced weight gradients of experts", reduced): None} if trained else {}
    return tuple(found)


def _weights(given: LayerInputs) -> tuple[Size, ...]:
    """Gathered weights of a block, and of its routed experts where they are gathered."""
    elements = (given.block, *([experts.weights(given)] if given.own.experts and given.options.expert_shards else []))
    return tuple((given.options.gather_bytes or given.weight_element(WHOLE_BLOCK, copies=1)) * one for one in elements)


@lru_cache(maxsize=512)
def _backward_peak(program: StepProgram, block: Block, *, last: bool) -> Peak:
    """A block's backward pass: one gather ahead and one reduction behind, of the block, its neighbours and the LM head,
    where the stage is the last.

    With full recompute the gathered weights of a block live through its backward pass; that of fc1, the first to be
    gathered where the MLP is repeated, until its own. An LM head of the bundled runtime waits for its own reduction.
    """
    given, operations = block.given, block.backward.operations
    gathers, reductions = _backward_gathers(block), _sizes(given, operations, "weight_gradient")
    held = not given.options.gather_after_recompute
    whole = block.recompute == "full" and held
    repeated = (one for one in operations if one.phase == "recompute")
    again = held and not whole and any(getattr(one, "role", "") == "weight" for one in repeated)
    behind = () if not given.options.loss_chunks or not last else program.head.operations
    head = _sizes(given, behind, "weight_gradient")
    return Peak(
        points=_backward_points(block),
        gathers=((*gathers, *gathers[:1]),) if whole else (*_pairs(gathers), *([gathers[:3]] if again else [])),
        kept_gathers=(gathers[:1],),
        reductions=(*_pairs(reductions), (*head, *reductions[:1])),
        freed=_freed(program) if given.repeating == REPEATING else (),
    )


@lru_cache(maxsize=512)
def _input_peak(program: StepProgram, block: Block, *, last: bool) -> Peak:
    """A block's backward pass whose weight gradients wait.

    It is that of the last block of its chunk, of which nothing counts as waiting yet; so is nothing of the LM head's
    weight gradient, of as many micro-batches.
    """
    # Imported here: most searches split no backward pass, and start-up time is theirs.
    from axonn_tune.program.split import OPERANDS, head_waits, kept_bytes, without_frees

    operations, element = block.backward.operations, float(block.given.element)
    gradient, saved = residual_gradient("residual gradient", block.given), saved_arrays(block)
    points = temporaries(without_frees(operations, (gradient, *saved), element), first=(gradient,), saved=saved)
    head = kept_bytes(program.head.operations, element) if last and head_waits(program) else []
    whole = _backward_peak(program, block, last=last)
    return replace(whole, points=points, reductions=((),), freed=tuple((OPERANDS, size) for size in head))


def _weight_peak(program: StepProgram, block: Block, *, last: bool) -> Peak:
    """Weight gradients that follow a backward pass at once, of which the last block's operands wait by then, too."""
    # Imported here: most searches split no backward pass, and start-up time is theirs.
    from axonn_tune.program.split import OPERANDS, kept_bytes

    operands = kept_bytes(block.backward.operations, float(block.given.element))
    arrays = [Array("", f"saved {one.kind}", -1.0 * one.size_bytes) for one in saved_arrays(block)]
    arrays += [Array("", OPERANDS, size) for size in operands]
    freed = tuple((kind, count * size) for (kind, size), count in _by_kind(arrays).items())
    return Peak(((),), ((),), ((),), _backward_peak(program, block, last=last).reductions, freed)


@lru_cache(maxsize=512)
def _backward_points(block: Block) -> tuple[Held, ...]:
    """Temporaries of a block's backward pass."""
    gradient = residual_gradient("residual gradient", block.given)
    return temporaries(block.backward.operations, first=(gradient,), saved=saved_arrays(block))


_PEAKS: dict[During, tuple[Callable[..., Peak], ...]] = {
    None: (_backward_peak,),
    "B": (_backward_peak,),
    "I": (_input_peak, _weight_peak),
    "F": (),
}
"""Of each block, by the kind of operation."""


def _freed(program: StepProgram) -> Held:
    """Activations of a chunk's blocks that do not repeat, which come after those that do: theirs are freed before."""
    plain = (block for block in program.blocks if block.given.repeating == PLAIN_BLOCKS)
    return tuple(
        (f"saved {kind}", -count * block.given.freed * size)
        for block in plain
        for (kind, size), count in _by_kind(saved_arrays(block)).items()
    )


def _backward_gathers(block: Block) -> tuple[Size, ...]:
    return _sizes(block.given, block.backward.operations, "weight")


def _sizes(given: LayerInputs, operations: Iterable[Operation], role: Role) -> tuple[Size, ...]:
    """Of the collectives over shards with a role, in order; buffers of experts that stay are none of them."""
    axes = given.shard_axes, *(() if given.options.gathers_experts else ("expert_z",))
    sent = (one for one in operations if isinstance(one, Collective) and one.axis in axes and one.role == role)
    return tuple(one.size_bytes for one in sent)


def _pairs(sizes: tuple[Size, ...]) -> tuple[tuple[Size, ...], ...]:
    """Each with the one after it, the last with the first of the next block."""
    return tuple(dict.fromkeys(zip(sizes, (*sizes[1:], *sizes[:1]), strict=True)))


@dataclass(frozen=True)
class Memory:
    """Memory of one rank, for one candidate or a column of them, in bytes.

    total_bytes: of persistent state and saved activations, with the largest of the temporaries at each point that may
    be the peak; kept_layers: blocks whose gathered weights are not resharded after forward, of `held_bytes`. values: of
    the symbols; buffers: of each peak, gathered weights and unreduced gradients.
    """

    plan: MemoryPlan = field(repr=False, compare=False)
    values: Mapping[str, Value] = field(repr=False)
    buffers: list[tuple[Value, Value]] = field(repr=False)
    held_bytes: Value
    total_bytes: Value
    kept_layers: Value

    @property
    def items(self) -> Items:
        """Items at the peak of a single candidate, without empty ones."""
        points = list[Items]()
        for peak, (gathered, reduced) in zip(self.plan.peaks, self.buffers, strict=True):
            buffers = ("gathered weights", gathered), ("unreduced weight gradients", reduced)
            points += [(*self._priced((*point, *peak.freed)), *buffers) for point in peak.points]
        found, held = dict[str, Value](), ("gathered weights of whole blocks", self.held_bytes)
        lasting = (*self._priced(self.plan.persistent), *self._priced(self.plan.saved))
        largest = max(points, key=lambda items: reduce(add, (size_bytes for _, size_bytes in items), 0.0))
        for name, size_bytes in (*lasting, *([held] if self.held_bytes else []), *largest):
            found[name] = found.get(name, 0.0) + size_bytes
        return tuple(found.items())

    def _priced(self, items: Held) -> Items:
        return tuple((name, size.evaluate(self.values)) for name, size in items)


def price_memory(
    program: StepProgram,
    values: Mapping[str, Value],
    *,
    limit_bytes: float,
    arithmetic: Arithmetic,
    kept_layers: Value | None = None,
    stage: Stage = ONLY,
    known: KnownSizes | None = None,
    during: During = None,
) -> Memory:
    """Memory with as many layers not resharded as fit (or with just `kept_layers`).

    values: with `held`, the blocks whose saved activations are alive together; known: of other stages; during: as of
    `memory_plan`. A candidate that does not fit even that reshards all has `total_bytes` above `limit_bytes` and keeps
    none.
    """
    plan = memory_plan(program, stage, during)
    values = _longest(values)
    needed = _gathers(plan.given, values, arithmetic=arithmetic)
    per_layer, peaks = (known or KnownSizes()).of(plan, values, arithmetic)
    none_kept: Value = 0.0
    some_kept: Value = 0.0
    buffers = list[tuple[Value, Value, Value]]()
    for peak, (largest, *several) in zip(plan.peaks, peaks, strict=True):
        gathers, kept_gathers, reductions = (needed * one for one in several)
        buffers.append((gathers, kept_gathers, reductions))
        largest = reduce(add, (size.evaluate(values) for _, size in peak.freed), largest)
        none_kept = arithmetic.larger(none_kept, largest + gathers + reductions)
        some_kept = arithmetic.larger(some_kept, largest + kept_gathers + reductions)
    lasting = (size.evaluate(values) for _, size in (*plan.persistent, *plan.saved))
    lasting_bytes: Value = reduce(add, lasting, 0.0)
    room = (limit_bytes - lasting_bytes - some_kept) / per_layer
    kept: Value = 0.0 * room
    if kept_layers is not None:
        kept = kept + kept_layers
    elif plan.given.options.reshard == "never":
        kept = kept + values["L"]
    elif plan.given.options.reshard == "fit":
        kept = arithmetic.smaller(arithmetic.larger(arithmetic.floor(room), 0.0), values["L"])
    held: Value = kept * (per_layer * needed)
    more = arithmetic is PLAIN and bool(some_kept + held > none_kept)
    total: Value = lasting_bytes + arithmetic.larger(none_kept, some_kept + held)
    chosen = [(one[more], one[2]) for one in buffers]
    return Memory(plan, values, chosen, held if more else 0.0, total, kept)


def _longest(values: Mapping[str, Value]) -> Mapping[str, Value]:
    """Where sequences differ in length, the same of the micro-batch that has most."""
    return {**values, "S": values["longest"]} if "longest" in values else values


def _gathers(given: LayerInputs, values: Mapping[str, Value], *, arithmetic: Arithmetic) -> Value:
    """1.0 where weights are sharded over z, 0.0 where a rank has them whole, in the type that it computes with."""
    if given.options.master_shards and given.tuning is None:
        return 1.0
    split: Value = arithmetic.smaller(given.shards.evaluate(values) - 1.0, 1.0)
    return split


def _largest_of(values: Iterable[Value], arithmetic: Arithmetic) -> Value:
    largest: Value = 0.0
    for value in values:
        largest = arithmetic.larger(largest, value)
    return largest
