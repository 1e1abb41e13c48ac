"""Matrices that an optimizer orthogonalizes as wholes: which, on which ranks, by which GEMMs and collectives.

Letters: m rows and n columns of a matrix, s and b the short and the long side of what a rank iterates on, k iterations.
Newton-Schulz takes X·Xᵀ, its square and their product with X: k·(4·s²·b + 2·s³) FLOPs, in BF16. Embedding, LM head,
vectors and biases are AdamW's. Where states are sharded over replicas, each matrix has one owner among these: by
longest processing time first on b·s², as Megatron-Core's layer-wise optimizer packs its buffers, here all at once.
Ranks that have shards of a matrix do as `OptimizerOptions.muon_tp_mode` says.

Sources: NVIDIA-NeMo/Emerging-Optimizers@fd772926, orthogonalized_optimizers/muon_utils.py (newton_schulz_tp);
NVIDIA/Megatron-LM@d98e8a64, megatron/core/optimizer/emerging_optimizers.py (TensorParallelMuon),
layer_wise_optimizer.py; of Gram matrices deepspeedai/DeepSpeed@edaa7221, runtime/zero/muon/original_muon.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.frameworks.optimizers import Whole, optimizers
from axonn_tune.frameworks.step import OptimizerOptions, StepOptions
from axonn_tune.grid import ALL_AXES
from axonn_tune.program.adapters import part_widths
from axonn_tune.program.block import block_nodes
from axonn_tune.program.count import type_constants
from axonn_tune.program.inputs import EXPERTS, LayerInputs, Y, suffixes
from axonn_tune.program.nodes import Gemm
from axonn_tune.program.operations import ONCE, Collective, Kernel, MatMul, Operation, OpKind, Size, Value, symbol
from axonn_tune.program.types.experts import Grouped
from axonn_tune.specs.model import Layer, Model
from axonn_tune.specs.workload import ELEMENT_SIZES

LAYER = "muon"
"""Layer of all that is done to whole matrices."""
_GRAM = 2.0
"""Bytes of an element of a Gram matrix that is summed."""


@dataclass(frozen=True)
class Matrix:
    """A matrix of a block: m outputs, n inputs, and which of them x splits; routed: one of each routed expert."""

    layer: str
    rows: float
    columns: float
    cut: Literal["", "rows", "columns"]
    routed: bool = False

    @property
    def elements(self) -> float:
        """m·n."""
        return self.rows * self.columns

    @property
    def cost(self) -> float:
        """s²·b, by which owners are chosen."""
        return self.elements * min(self.rows, self.columns)


@lru_cache(maxsize=64)
def matrices_of(model: Model, *, sequence_parallel: bool, apart_gate: bool) -> tuple[tuple[Matrix, ...], ...]:
    """Those of a block of each layer type: queries, keys and values apart, gate and up projection only if asked for."""
    options = StepOptions(sequence_parallel=sequence_parallel, muon_apart_gate=apart_gate)
    inputs = (LayerInputs(model, ELEMENT_SIZES["bf16"], options, layer=layer) for layer in model.types)
    return tuple(tuple(_matrices(given)) for given in inputs)


def _matrices(given: LayerInputs) -> Iterator[Matrix]:
    nodes, own = block_nodes(given), given.own
    for node in nodes.forward:
        if isinstance(node, Gemm) and node.trains:
            linear, widths = node.linear, part_widths(node.linear, given)
            whole = widths.pop("")
            gate = linear.layer.endswith("fc1")
            parts = [whole] if not widths or (gate and not given.options.muon_apart_gate) else [*widths.values()]
            cut: Literal["", "rows", "columns"] = _cut(
                rows="x" in dict(linear.n.powers), columns="x" in dict(linear.k.powers)
            )
            yield from (Matrix(linear.layer, _number(one, own), _number(linear.k, own), cut) for one in parts)
        elif isinstance(node, Grouped) and node.trains:
            number = own.ups if node.layer.endswith("fc1") and given.options.muon_apart_gate else 1
            width, split = (
                float(node.width),
                [dict(one.powers).keys() & {"x", "expert_tensor"} for one in (node.n, node.k)],
            )
            one = Matrix(
                node.layer, width / number, node.each / width, _cut(rows=bool(split[0]), columns=bool(split[1])), True
            )
            yield from [one] * number
        elif node.trains and node.matrix.coefficient:
            cut = _cut(rows="x" in dict(node.matrix.powers), columns=False)
            yield Matrix(node.layer, _number(node.matrix, own) / own.hidden, float(own.hidden), cut)
        for adapter in node.adapters:
            rank = float(adapter.tuning.rank)
            sizes = ((rank, _number(adapter.linear.k, own)), (_number(adapter.n, own), rank))
            shards = ["x" in dict(one.powers) for one in (adapter.down, adapter.up)]
            yield from (
                Matrix(adapter.layer, *size, _cut(rows=split, columns=False), adapter.each)
                for size, split in zip(sizes, shards, strict=True)
            )


def _cut(*, rows: bool, columns: bool) -> Literal["", "rows", "columns"]:
    return "rows" if rows else "columns" if columns else ""


def _number(size: Size, layer: Layer) -> float:
    """A size on one rank that has everything."""
    ones = dict.fromkeys(ALL_AXES, 1.0)
    return float(size.evaluate({**ones, "H": float(layer.hidden), **type_constants(layer)}))


def gemms(form: str, iterations: int, *, square: bool) -> tuple[int, int, int]:
    """How often X·Xᵀ, products of s × s matrices, and such a product with X are there.

    On the Gram matrix R alone the iteration takes R², that with what is applied to X, and two for the next R; a
    restart behind the second iteration applies it, and so does the end. A square X has nothing to save.
    """
    if form == "standard" or square:
        return iterations, iterations, iterations
    parts = 1 + (iterations > 2)
    return parts, iterations + 3 * (iterations - parts), parts


class Work(NamedTuple):
    """What the rank with most of it does to matrices of one kind: values of the symbols, by their names; mean: those
    that ranks own in the mean."""

    small: float
    large: float
    entries: float
    owned: float
    updated: float
    gathers_x: float = 0.0
    gathers_y: float = 0.0
    gathers_z: float = 0.0
    turns: float = 0.0
    last: float = 0.0
    left: float = 0.0
    at_once: float = 0.0
    grams_x: float = 0.0
    grams_z: float = 0.0
    products: float = 0.0
    squares: float = 0.0
    applied: float = 0.0
    mean: float = 0.0


Counted: TypeAlias = tuple[tuple[Matrix, int], ...]
Types: TypeAlias = tuple[tuple[Matrix, ...], ...]
"""Matrices of a block of each layer type."""


@lru_cache(maxsize=65536)
def work_of(
    counts: Counted, options: OptimizerOptions, *, x: int, z: int, replicas: int, y: int = 1
) -> tuple[tuple[Work, ...], float]:
    """Work of so many matrices of each kind, and most elements of them that a rank has states of.

    x, z: ranks that split, and that shard them; y: that split each along its other side; replicas: ranks of which each
    has states of some.
    """
    if not counts:
        return (), 0.0
    by_elements = options.muon_cut or options.muon_gathered
    every = 1 if options.muon_gathered else replicas
    updated = (_touched if options.muon_cut else _packed)(counts, every)
    owned = _packed(counts, replicas * x * z) if options.muon_tp_mode == "layer_sharded" else updated
    owned = _in_turn(counts, z) if options.muon_tp_mode == "in_turn" else owned
    cost = np.array([matrix.cost for matrix, _ in counts])
    most, first = (found[:, np.argmax(cost @ found)] for found in (updated, owned))
    found = [
        _work(
            *(matrix, options, count),
            x=x if matrix.cut else 1,
            y=y,
            z=z,
            owned=float(own),
            updated=states * every / replicas,
        )
        for (matrix, count), own, states in zip(counts, first, most, strict=True)
    ]
    found = [one._replace(mean=count / owned.shape[1]) for one, (_, count) in zip(found, counts, strict=True)]
    local = np.array([matrix.elements / (y * z * (x if matrix.cut else 1)) for matrix, _ in counts])
    if by_elements:
        return tuple(found), float(local @ [count for _, count in counts]) / replicas
    return tuple(found), float((local @ updated).max())


def _in_turn(counts: Counted, ranks: int) -> NDArray[np.int64]:
    """The same where ranks take them in turn, each kind from where the one before has ended."""
    ends = np.cumsum([0, *(count for _, count in counts)])
    return np.stack([np.bincount(np.arange(begin, end) % ranks, minlength=ranks) for begin, end in pairwise(ends)])


def _work(
    matrix: Matrix, options: OptimizerOptions, count: int, *, x: int, y: int, z: int, owned: float, updated: float
) -> Work:
    """Of so many of one kind, which x ranks split."""
    rows, columns, mode = matrix.rows, matrix.columns, options.muon_tp_mode
    counts = gemms(options.muon_form, options.muon_num_ns_steps, square=rows == columns)
    found = Work(0.0, 0.0, matrix.elements, owned, updated, **dict(zip(_GEMMS, map(float, counts), strict=True)))
    if mode == "distributed" and max(x, z) > 1:
        # Over the larger group, along the side that it splits; the smaller one gathers before. z shards rows.
        over, gathered, sums = z >= x, owned * (min(x, z) > 1), owned * counts[0]
        by_rows, cut = over or matrix.cut == "rows", z if over else x
        kept, split = (columns, rows) if by_rows else (rows, columns)
        found = found._replace(small=kept, large=split / cut)
        return (
            found._replace(gathers_x=gathered, grams_z=sums)
            if over
            else found._replace(gathers_z=gathered, grams_x=sums)
        )
    if mode == "blockwise":
        rows, columns = rows / (z * x if matrix.cut == "rows" else z), columns / (x if matrix.cut == "columns" else 1)
    elif mode == "duplicated":
        calls = {f"gathers_{axis}": owned * (size > 1) for axis, size in (("x", x), ("y", y), ("z", z))}
        found = found._replace(**calls)
    elif mode == "in_turn":
        turns, left = divmod(count, z)
        every = float(turns + (left > 0))
        found = found._replace(gathers_x=every * (x > 1), gathers_y=every * (y > 1))
        last = 2.0 * (left > 0)
        found = found._replace(
            turns=2.0 * turns * (z > 1), last=last, left=float(left), at_once=min(count, z) * (z > 1.0)
        )
    return found._replace(small=min(rows, columns), large=max(rows, columns))


_GEMMS = ("products", "squares", "applied")
_GROUPS = ("x", "z", "replicas", "expert_x", "expert_z", "expert_replicas", "expert", "y")


def _packed(counts: Counted, ranks: int) -> NDArray[np.int64]:
    """Matrices of each kind on each rank, `[kinds, ranks]`, by longest processing time first.

    One by one, each goes to the rank that has least. Of n alike ones with cost c these are the n least of all
    `load + j·c`, j = 0, 1, ...
    """
    found, loads = np.zeros((len(counts), ranks), dtype=np.int64), np.zeros(ranks)
    for kind in sorted(range(len(counts)), key=lambda kind: -counts[kind][0].cost):
        matrix, count = counts[kind]
        most = min(count, count // ranks + 1 + int((loads.max() - loads.min()) / matrix.cost) + 1)
        places = (loads + matrix.cost * np.arange(most)[:, None]).ravel()
        chosen = np.argsort(places, kind="stable")[:count] % ranks
        found[kind] = np.bincount(chosen, minlength=ranks)
        loads = loads + matrix.cost * found[kind]
    return found


def _touched(counts: Counted, ranks: int) -> NDArray[np.int64]:
    """The same where each rank has as many elements of all, one matrix after the other, and iterates on each matrix of
    which it has a part; layers are in their order, so that kinds take turns."""
    kinds = np.repeat(np.arange(len(counts)), [count for _, count in counts])
    turns = np.concatenate([(np.arange(count) + 0.5) / max(count, 1) for _, count in counts])
    kinds = kinds[np.argsort(turns, kind="stable")]
    ends = np.cumsum(np.array([matrix.elements for matrix, _ in counts])[kinds])
    edges = np.linspace(0.0, ends[-1] if len(ends) else 0.0, ranks + 1)
    first, last = np.searchsorted(ends, edges[:-1], side="right"), np.searchsorted(ends, edges[1:], side="left")
    ranges = (kinds[start : stop + 1] for start, stop in zip(first, last, strict=True))
    return np.stack([np.bincount(own, minlength=len(counts)) for own in ranges], axis=1)


def whole_values(
    model: Model,
    options: StepOptions,
    counts: Sequence[Value],
    axes: Mapping[str, Value],
    ranks: Sequence[Value],
    parameters: Value,
) -> dict[str, Value]:
    """Values of the symbols of whole matrices.

    counts: blocks of each layer type; ranks: that shard a matrix, and that share its states; the same of an expert's,
    of which there are 0 where each has all states.
    """
    shards, share, expert_z, copies = ranks
    copies = copies * axes["context"] if options.copies_over_context else copies
    tensor = axes["expert_tensor"] if options.sequence_parallel else axes["x"]
    sizes = axes["x"], shards, share, tensor, expert_z, copies, axes["expert"], axes["y"]
    groups = dict(zip(_GROUPS, sizes, strict=True))
    types = matrices_of(model, sequence_parallel=options.sequence_parallel, apart_gate=options.muon_apart_gate)
    experts = tuple(layer.experts.count if layer.experts else 0 for layer in model.types)
    given = np.array(np.broadcast_arrays(*map(np.atleast_1d, [*groups.values(), *counts])))
    layouts, places = np.unique(given, axis=1, return_inverse=True)
    known = _known(types, experts, options.of_optimizer)
    for row in layouts.T:
        if row.tobytes() not in known:
            known[row.tobytes()] = _values_of(types, experts, options.of_optimizer, row.tolist())
    columns = np.array([known[row.tobytes()] for row in layouts.T]).T[:, places.ravel()]
    keys = (
        f"{name}.{at}{of}"
        for of, several in zip(suffixes(model), types, strict=True)
        for at in range(len(several))
        for name in Work._fields
    )
    alone = not any(isinstance(one, np.ndarray) for one in (*groups.values(), *counts))
    found: dict[str, Value] = dict(zip((*keys, *_SUMS), columns[:, 0].tolist() if alone else columns, strict=True))
    return found | {"elementwise": parameters - found.pop("held")}


_SUMS = ("orthogonal", "orthogonal_experts", "held")


@lru_cache(maxsize=64)
def _known(types: Types, experts: tuple[int, ...], own: OptimizerOptions) -> dict[bytes, list[float]]:
    """Values of layouts, by the bytes of their groups and blocks."""
    return {}


def _values_of(types: Types, experts: tuple[int, ...], own: OptimizerOptions, layout: Sequence[float]) -> list[float]:
    """Work of each matrix of each layer type in turn, then elements with states, and those that a rank holds of all
    but routed experts'; experts: of a block of each type."""
    ranks, blocks = dict(zip(_GROUPS, (max(int(one), 1) for one in layout), strict=False)), layout[len(_GROUPS) :]
    works, sums, held = dict[tuple[int, int], Work](), list[float](), 0.0
    for routed, before in ((False, ""), (True, "expert_")):
        x, z, replicas = (ranks[f"{before}{axis}"] for axis in ("x", "z", "replicas"))
        places = [
            (of, at) for of, several in enumerate(types) for at, one in enumerate(several) if one.routed == routed
        ]
        each = [count / ranks["expert"] if routed else 1.0 for count in experts]
        counted = tuple((types[of][at], round(blocks[of] * each[of])) for of, at in places)
        found, states = work_of(counted, own, x=x, y=ranks["y"], z=z, replicas=replicas)
        works |= dict(zip(places, found, strict=True))
        sums.append(states)
        if not routed:
            held = sum(count * one.elements / (ranks["y"] * z * (x if one.cut else 1)) for one, count in counted)
    of_matrices = (value for of, several in enumerate(types) for at in range(len(several)) for value in works[of, at])
    return [*of_matrices, *sums, held]


def whole_operations(given: LayerInputs, *, written: float) -> Iterator[Operation]:
    """What the rank with most matrices does to them; written: bytes of a new weight beside its master weight."""
    options = given.options
    whole = optimizers()[options.optimizer].whole
    assert whole is not None, "asked before"
    types = matrices_of(given.model, sequence_parallel=options.sequence_parallel, apart_gate=options.muon_apart_gate)
    for several, of in zip(types, suffixes(given.model), strict=True):
        yield from chain.from_iterable(
            _operations(given, matrix, f"{number}{of}", whole, written) for number, matrix in enumerate(several)
        )


def live_matrices(given: LayerInputs) -> Iterator[tuple[tuple[str, Size], ...]]:
    """What the bundled runtime holds while it updates: momenta of a bucket that are gathered over data; shards of
    matrices that ranks take in turn, with its own one; that before and after the cast to the compute type, or before
    and after a step with its Gram matrix and their product."""
    main, compute = float(given.elements.main), float(given.elements.compute)
    types = matrices_of(given.model, sequence_parallel=given.options.sequence_parallel, apart_gate=False)
    for several, of in zip(types, suffixes(given.model), strict=True):
        for number, matrix in enumerate(several):
            small, entries = symbol(f"small.{number}{of}"), symbol(f"entries.{number}{of}")
            bucket = symbol(f"{'expert' if matrix.routed else 'block'}_bucket{of}")
            if given.sharded:
                yield (("momenta", main * bucket),)
            shards = given.sharding(EXPERTS if matrix.routed else "")[1]
            own = entries / ((symbol("x") if matrix.cut else ONCE) * Y)
            at_once = main * symbol(f"at_once.{number}{of}") / shards * own
            yield ("momenta", at_once), ("whole matrix", main * own)
            yield (("whole matrix", (main + compute * (main != compute)) * entries),)
            yield ("whole matrix", 2.0 * compute * entries), ("Gram matrices", 2.0 * compute * small * small)


def _operations(given: LayerInputs, matrix: Matrix, key: str, whole: Whole, written: float) -> Iterator[Operation]:
    """Of matrices of one kind, one after the other, or all at once; their sizes are symbols."""
    options, layer = given.options, f"{LAYER}.{matrix.layer}"

    def of(name: str) -> Size:
        return symbol(f"{name}.{key}")

    small, large, owned, updated, entries = map(of, ("small", "large", "owned", "updated", "entries"))
    split = "expert_tensor" if matrix.routed and options.sequence_parallel else "x"
    shard_axes, shards = given.sharding(EXPERTS if matrix.routed else "")
    cut, one = symbol(split) if matrix.cut else ONCE, ONCE
    local, sent = entries / (cut * Y * shards), [(shard_axes, "z"), *([(split, "x")] if matrix.cut else [])]
    for kind, axis, size, calls in _momenta_sent(options.muon_tp_mode, of, local, cut, shards, dict(sent)):
        yield Collective(kind, axis, "step", layer, float(given.elements.main) * size, calls=calls)
    for size_bytes, launches, times in (
        ((whole.update_bytes + written) * local, whole.update_kernels, updated),
        (whole.around_bytes * small * large, whole.around_kernels, owned),
    ):
        at_once, calls = (times, one) if options.muon_batched else (one, times)
        yield Kernel("step", "optimizer", size_bytes / float(launches) * at_once, calls=float(launches) * calls)
    at_once, calls = (owned, one) if options.muon_batched else (one, owned)
    gemm = partial(MatMul, "step", layer, groups=at_once)
    yield gemm(small, small, large, "NT", calls * of("products"))
    yield gemm(small, small, small, "NN", calls * of("squares"))
    yield gemm(small, large, small, "NN", calls * of("applied"))
    if options.muon_tp_mode == "distributed":
        for axis, name in sent:
            yield Collective("all_reduce", axis, "step", layer, _GRAM * small * small, calls=of(f"grams_{name}"))


def _momenta_sent(
    mode: str, of: Callable[[str], Size], local: Size, cut: Size, shards: Size, sent: Mapping[str, str]
) -> Iterator[tuple[OpKind, str, Size, Size]]:
    """Collectives of a mode before, or around, the iteration: over which axes, elements and calls.

    local: elements of a shard; cut, shards: ranks that split a matrix over x and over z; sent: axes with shards, and
    whether they are x or z.
    """
    shard_axes, entries = next(iter(sent)), of("entries")
    if mode == "in_turn":
        # As many matrices of a kind as ranks, then those that are left.
        yield "all_to_all", shard_axes, local * shards, of("turns")
        yield "all_to_all", shard_axes, local * of("left"), of("last")
    if mode == "layer_sharded":
        yield from (("all_to_all", axis, local * of("updated"), 2.0 * ONCE) for axis in sent)
    elif mode != "blockwise":
        size = {
            "z": entries / (cut * Y),
            "y": entries / cut,
            "x": entries / (shards if mode == "distributed" else ONCE),
        }
        over_y = {"y": "y"} if mode != "distributed" else {}
        for axis, name in {shard_axes: sent[shard_axes], **over_y, **sent}.items():
            yield "all_gather", axis, size[name], of(f"gathers_{name}")
