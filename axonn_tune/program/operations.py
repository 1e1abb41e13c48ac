"""The operations that a training step is made of, and their sizes as symbols.

Sizes are products and quotients of named quantities, such as `2·H·N/(x·y)`: array sizes, byte counts and call counts
of a step. A size is a value that can be compared and used as a key; evaluated with numbers it is exact as long as the
products stay below 2^53, with numpy columns it gives one value per candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.frameworks.step import KernelKind
from axonn_tune.grid import ALL_AXES, AXES, EXPERT_GROUPS, WORLD
from axonn_tune.specs.formats import Copies
from axonn_tune.specs.machine import CollectiveKind, MatmulLayout
from axonn_tune.specs.workload import ElementSizes
from axonn_tune.vocabulary import CudaGraphs

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Value: TypeAlias = float | Floats
"""A quantity of one candidate, or of many: one float64 each."""


@dataclass(frozen=True)
class Arithmetic:
    """Formulas evaluated on columns of candidates (numpy) or on one candidate (plain Python).

    Formulas use `+ - * /` and these functions, all of which IEEE 754 defines exactly, so both readings give the
    same bits.
    """

    smaller: Callable[[Any, Any], Any]
    larger: Callable[[Any, Any], Any]
    floor: Callable[[Any], Any]


def _floor(value: float) -> float:
    return float(math.floor(value))


COLUMNS = Arithmetic(smaller=np.minimum, larger=np.maximum, floor=np.floor)
PLAIN = Arithmetic(smaller=min, larger=max, floor=_floor)

MODEL_SYMBOLS = ("L", "H", "Q", "N", "F", "G", "W", "trained", "S", "grouped", "halved", "span", "padded")
"""Constants of one search: layers, hidden, query, qkv, ffn and up widths, weights of a block, those of them that train,
sequence length.

span: positions that a token attends to, the masked half included, with a window or an indexer; padded: heads of a rank
as kernels of sparse attention pad them.

grouped, halved: 1 where keys have several queries each, and where micro-batches are split, else 0.
"""

CANDIDATE_SYMBOLS = (
    *AXES,
    *("b", "A", "C", "parts", "kept", "unkept", "V", "P"),
    *("block_bucket", "table_bucket", "position_bucket", "parameters", "vectors"),
    *(axis for axis in ALL_AXES if axis not in AXES),
    *("scores", "scores_back", "softmax", "softmax_back", "alone", "shared", "held"),
    *("expert_data", "expert_parameters", "expert_bucket", "imbalance", "fullest", "freed"),
    *("exchanged", "joined", "head_norms", "scattered", "divided", "ring_calls", "merged"),
    *("frozen_parameters", "frozen_vectors", "frozen_expert_parameters", "frozen_tables"),
    *("seen", "longest"),
    *("elementwise", "orthogonal", "orthogonal_experts", "small", "large", "entries", "owned", "updated"),
    *(
        "gathers_x",
        "gathers_y",
        "gathers_z",
        "turns",
        "last",
        "left",
        "at_once",
        "grams_x",
        "grams_z",
        "products",
        "squares",
        "applied",
    ),
    *("adapters_over_y", "adapters_over_x"),
    *("waiting", "waiting_head"),
)
"""What differs between candidates.

b: micro-batch (sequences of one rank); A: accumulation steps; C: chunks of the loss; parts: halves of a split micro-
batch; kept, unkept: layers not resharded after forward, and the others; V, P: padded rows of the vocabulary and
position tables; *_bucket: elements of one data-parallel bucket; parameters, vectors: elements of split and of
replicated parameters one rank stores that train, frozen_*: of others. alone, shared: 1 where a rank has the whole
hidden dim and where y splits it, else 0. expert_z, expert_data: ranks that shard and that replicate the weights of an
expert; expert_parameters, expert_bucket: as parameters and *_bucket, of routed experts. imbalance: tokens of the rank
with most over the mean; fullest: that at the upper end of its 80% interval, which memory must hold. freed: blocks of a
chunk that do not repeat, whose backward passes are over when those of blocks that repeat begin. exchanged, joined: 1
where ranks of `expert` exchange tokens, and where shards of experts' weights are gathered and joined, else 0.
scattered, divided: 1 where z has shards of weights, and where x splits them, else 0. head_norms: elements of norms of
queries and keys, of which each rank of x has the gradients of its heads. ring_calls, merged: calls of attention that a
query is in around a ring of all ranks of context, and those of them whose results are added to others'. seen: where
sequences differ in length, positions that a token attends to without a window, the masked half included; longest:
tokens of a sequence in the micro-batch that has most, which memory must hold.
query is in around a ring of all ranks of context, and those of them whose results are added to others'.
elementwise: elements of `parameters` that an optimizer of whole matrices leaves to AdamW; orthogonal,
orthogonal_experts: of the others those with states on the rank that has most. Of each matrix of a block
(`program.whole`) entries: its elements; small, large: sides of what a rank iterates on; owned, updated: matrices that
it iterates on, and whose states it has a shard of; gathers_*, grams_*: gathers of matrices and sums of Gram matrices
over an axis; turns, last: exchanges of as many matrices as ranks, and of those that are `left`; at_once: in one;
products, squares, applied: GEMMs of a matrix, X·Xᵀ, of s × s matrices, and of such a one with X.
waiting: blocks whose weight gradients wait, waiting_head: micro-batches for which the LM head's does.
"""

_ORDER = {name: position for position, name in enumerate((*MODEL_SYMBOLS, *CANDIDATE_SYMBOLS))}

REPEATING, PLAIN_BLOCKS = ".again", ".once"
"""Behind the symbols that count blocks, where only some repeat their activations: of those, and of the others."""


@lru_cache(maxsize=1024)
def _place(name: str) -> tuple[int, str]:
    """Place of a symbol in the canonical order, without what it is of; KeyError for a name that is not in it."""
    return _ORDER[name.partition(".")[0]], name


@lru_cache(maxsize=4096)
def _joined_powers(
    powers: tuple[tuple[str, int], ...], others: tuple[tuple[str, int], ...], sign: int
) -> tuple[tuple[str, int], ...]:
    """Powers of a product or quotient."""
    found = dict(powers)
    for name, power in others:
        found[name] = found.get(name, 0) + sign * power
    return tuple(sorted(((name, power) for name, power in found.items() if power), key=lambda item: _place(item[0])))


@lru_cache(maxsize=4096)
def _folds(powers: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Factors of the numerator and of the denominator."""
    numerator, denominator = (tuple(name for name, power in powers for _ in range(sign * power)) for sign in (1, -1))
    return numerator, denominator


class Size(NamedTuple):
    """`coefficient · Π symbol^power`; powers sorted by the canonical order of symbols, none zero."""

    coefficient: float
    powers: tuple[tuple[str, int], ...] = ()

    def __mul__(self, other: Size | float) -> Size:  # type: ignore[override]
        # Most factors are numbers; products of sizes take most of a program's time.
        if not isinstance(other, Size):
            return Size(self.coefficient * other, self.powers)
        powers = _joined_powers(self.powers, other.powers, 1) if other.powers else self.powers
        return Size(self.coefficient * other.coefficient, powers)

    def __rmul__(self, other: float) -> Size:  # type: ignore[override]
        return Size(self.coefficient * other, self.powers)

    def __truediv__(self, other: Size | float) -> Size:
        if not isinstance(other, Size):
            return Size(self.coefficient / other, self.powers)
        powers = _joined_powers(self.powers, other.powers, -1) if other.powers else self.powers
        return Size(self.coefficient / other.coefficient, powers)

    def evaluate(self, values: Mapping[str, Value]) -> Value:
        """Value for given symbols: the left fold of the numerator, then of the denominator.

        Both folds run in the canonical order, so numbers and columns give the same bits.
        """
        numerator, denominator = _folds(self.powers)
        result: Value = self.coefficient
        for name in numerator:
            result = result * values[name]
        if not denominator:
            return result
        divisor: Value = 1.0
        for name in denominator:
            divisor = divisor * values[name]
        return result / divisor

    def __str__(self) -> str:
        number = f"{self.coefficient:.12g}"
        factors = [name if power == 1 else f"{name}^{power}" for name, power in self.powers if power > 0]
        if self.coefficient != 1 or not factors:
            factors.insert(0, number)
        under = [name if power == -1 else f"{name}^{-power}" for name, power in self.powers if power < 0]
        above = "·".join(factors)
        return above if not under else f"{above}/{under[0]}" if len(under) == 1 else f"{above}/({'·'.join(under)})"


def as_size(value: Size | float) -> Size:
    """A number as a size; a size as it is."""
    return value if isinstance(value, Size) else Size(float(value))


def symbol(name: str) -> Size:
    """A single named quantity; KeyError for a name outside the canonical list."""
    _place(name)
    return Size(1.0, ((name, 1),))


# Operations.

Phase: TypeAlias = Literal["forward", "recompute", "backward", "step"]

MATRIX_ALIGNMENT = 16
"""Alignment of rows, in bytes, for the full rate of tensor cores."""

ONCE = as_size(1)

GROUP_AXES = ("x", "y", "z", "data", "xy", "context", "contextdata", "zdata", "zcontextdata", *EXPERT_GROUPS, WORLD)
"""Every group of axes that the bundled runtime communicates over."""

Role: TypeAlias = (
    Literal["weight", "output", "input_gather", "input_gradient", "weight_gradient", "data", "parameters", "keys"]
    | Literal["counts", "ahead", "other"]
)
"""Role of a collective, which decides what it may overlap with:

weight: gather of a weight over z; output: forward reduction of a GEMM's output, exposed unless the micro-batch is split
or it is pipelined with its GEMM; input_gather: a column-parallel layer's input again, overlapped with the
input-gradient GEMM; input_gradient: dI reduction, overlapped with the weight-gradient GEMM; weight_gradient: dW
reduce-scatter over z, finished one layer later; data: gradient bucket over data, overlapped with the rest of the
backward pass; parameters: new weights over data, overlapped with the next forward pass; keys: keys and values of other
context ranks, overlapped with attention; counts: tokens of each expert, overlapped with the rest of their layer; ahead:
gather of weights of experts, issued a block before theirs; other: not overlappable.
"""

OpKind: TypeAlias = CollectiveKind | Literal["send", "dispatch", "combine"]
"""Collectives of a profile, sends, and tokens on their way to experts and back, which are priced by their routing
(`cost.collectives.dispatch_line`) where all-to-alls were not measured."""


@dataclass(frozen=True)
class Array:
    """An array of one rank, alive from the operation that allocates it to the one that frees it; `kind`: in tables."""

    name: str
    kind: str
    size_bytes: Size


Arrays: TypeAlias = tuple[Array, ...]


@dataclass(frozen=True)
class Routing:
    """How tokens of a layer find their experts: E experts, K a token, out of `chosen` of so many equal groups of
    experts (node-limited routing; one group is no limit); and the dispatcher that sends them."""

    experts: int
    per_token: int
    groups: int = 1
    chosen: int = 1
    dispatcher: str = "alltoall"


Sent: TypeAlias = OpKind | tuple[OpKind, Routing]
"""What a collective is priced by beside its group and size: its kind, of a dispatch or combine also its routing."""


@dataclass(frozen=True)
class Collective:
    """A collective. `size_bytes`: the full (gathered or reduced) buffer of one of its `calls`; of a dispatch or combine
    what a rank sends of all its tokens: a copy for each expert, or each token once
    (`cost.collectives.dispatch_line`)."""

    kind: OpKind
    axis: str
    phase: Phase
    layer: str
    size_bytes: Size
    role: Role = "other"
    calls: Size = ONCE
    makes: Arrays = field(default=(), compare=False, repr=False)
    frees: tuple[str, ...] = field(default=(), compare=False, repr=False)
    routing: Routing | None = None

    @property
    def sent(self) -> Sent:
        """What its time depends on beside group and size."""
        return self.kind if self.routing is None else (self.kind, self.routing)


@dataclass(frozen=True)
class MatMul:
    """A GEMM `O[m, n] = A[m, k] · B[k, n]` on one rank, done `calls` times.

    alignment: alignment of rows in bytes, capped; batched: many narrow GEMMs; groups: as many of them in one launch;
    narrow: operands are in the number format of linear layers. padded: rows that its alignment adds to a group, in the
    mean. added_bytes: of an element of the sum that the output is added to in place.
    """

    phase: Phase
    layer: str
    m: Size
    n: Size
    k: Size
    layout: MatmulLayout
    calls: Size = ONCE
    alignment: int = MATRIX_ALIGNMENT
    batched: bool = False
    groups: Size = ONCE
    narrow: bool = False
    padded: float = 0.0
    added_bytes: int = 0
    makes: Arrays = field(default=(), compare=False, repr=False)
    frees: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @cached_property
    def flops(self) -> Size:
        """2·m·n·k, of all groups of one call."""
        return 2.0 * self.m * self.n * self.k * self.groups


@dataclass(frozen=True)
class Attention:
    """Fused attention core; `flops` with the masked half counted as work; keys: of a query in one call;
    narrow: in 8 bits; width: of a head, the mean over its GEMMs; ordered: gradients are summed in one order;
    unequal: heads of values have another width than those of queries (MLA)."""

    phase: Phase
    layer: str
    flops: Size
    keys: Size
    backward: bool = False
    narrow: bool = False
    width: float = 128.0
    ordered: bool = False
    unequal: bool = False
    calls: Size = ONCE
    makes: Arrays = field(default=(), compare=False, repr=False)
    frees: tuple[str, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Measured:
    """A function whose time follows from measurements of its kernels (`cost.kernels`), and its FLOPs for counting.

    kernel: its name there; work: of one call, in the unit that is counted there; backward: its gradients, not the
    function, in whatever phase; launches: kernels of one call.
    """

    phase: Phase
    layer: str
    kernel: str
    work: Size
    flops: Size
    backward: bool = False
    launches: int = 1
    calls: Size = ONCE
    makes: Arrays = field(default=(), compare=False, repr=False)
    frees: tuple[str, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Kernel:
    """An element-wise or reduction kernel; `size_bytes`: bytes read and written (0: not launched).

    A kernel that `prepares_gather` goes with the weight gather after it, one that `accumulates` with
    the reduce-scatter before it, wherever overlap moves those; one that `copies_gather` is where there is that gather
    before it; one that `quantizes` makes operands of GEMMs: which
    copies. One that `turns` transposes what x gathers; a lone rank writes both copies at once, half as many bytes more.
    One that is `bare` is an operator of torch's, without what the software adds to a module's.
    """

    phase: Phase
    layer: str
    size_bytes: Size
    calls: Size = ONCE
    prepares_gather: bool = False
    copies_gather: bool = False
    accumulates: bool = False
    quantizes: Copies | None = None
    turns: bool = False
    bare: bool = False
    makes: Arrays = field(default=(), compare=False, repr=False)
    frees: tuple[str, ...] = field(default=(), compare=False, repr=False)

    @property
    def with_gather(self) -> bool:
        """Whether it is there only where weights are gathered."""
        return self.prepares_gather or self.copies_gather


@dataclass(frozen=True)
class HostWork:
    """What the host does for a rank that keeps some of its state there, and the copies over the link between them.

    to_host, from_host: bytes of copies each way, which are added up. updated: elements that Adam updates on the host;
    vectorized: by DeepSpeed's kernels on all cores, otherwise by torch's in the rank's own process. pipelined: copies
    and updates of other parameters run beside each other. beside: operations whose computation copies run behind.
    """

    phase: Phase
    layer: str
    to_host: tuple[Size, ...] = ()
    from_host: tuple[Size, ...] = ()
    updated: tuple[Size, ...] = ()
    vectorized: bool = False
    pipelined: bool = False
    beside: tuple[Operation, ...] = field(default=(), compare=False, repr=False)
    calls: Size = ONCE
    makes: Arrays = field(default=(), compare=False, repr=False)
    frees: tuple[str, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class Traffic:
    """What a function moves an element in all its `kernels`: so many activations, numbers in the statistics type, and
    conversions from one to the other, which are none where both are one type."""

    kernels: float = 0.0
    narrow: float = 0.0
    wide: float = 0.0
    casts: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        narrow, wide = self.narrow + other.narrow, self.wide + other.wide
        return Traffic(self.kernels + other.kernels, narrow, wide, self.casts + other.casts)

    def __mul__(self, times: float) -> Traffic:
        return Traffic(self.kernels * times, self.narrow * times, self.wide * times, self.casts * times)

    def size_bytes(self, sizes: ElementSizes) -> float:
        """Bytes an element, all kernels together."""
        cast = sizes.compute + sizes.statistics if sizes.compute != sizes.statistics else 0
        return self.narrow * sizes.compute + self.wide * sizes.statistics + self.casts * cast


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """Bytes per element of each function of a block and of the loss; kernels of vectors count too.

    norm, again, back, back_sum: of a norm's forward pass, its output once more, its backward pass and the addition
    of the residual gradient, where a rank has the whole hidden dim and where y splits it. sum: the addition before
    the norm of the MLP, no kernel of its own where that has it inside. turned, turned_back: of queries and keys,
    beyond the copy of heads. heads: norms of these, forward and backward. activation, activation_back: of F. loss:
    of a logit. bias, bias_gradient: of a bias, and of what it is added to. looked_up, scattered: of the embedding's
    output and its gradient. Of experts: routed, routed_back, of the router's input and its gradient; dispatched,
    combined, of a token that is copied and summed, and of each copy; weighted, weighted_back, of an activation and
    its probability; expert_gradient, of a weight.
    """

    norm: tuple[Traffic, Traffic]
    again: tuple[Traffic, Traffic]
    back: tuple[Traffic, Traffic]
    back_sum: tuple[Traffic, Traffic] = (Traffic(), Traffic())
    sum: Traffic = Traffic(1, 3)
    turned: Traffic = Traffic()
    turned_back: Traffic = Traffic()
    heads: tuple[Traffic, Traffic]
    activation: Traffic
    activation_back: Traffic
    loss: Traffic
    bias: Traffic = Traffic(1, casts=1)
    bias_gradient: Traffic = Traffic(2, 1)
    looked_up: Traffic = Traffic(13, 4)
    scattered: Traffic = Traffic(9, 3)
    routed: Traffic = Traffic(1, casts=1)
    routed_back: Traffic = Traffic(2, 2, 1, 1)
    dispatched: tuple[Traffic, Traffic] = (Traffic(1), Traffic(0, 2))
    combined: tuple[Traffic, Traffic] = (Traffic(1, 1), Traffic(0, 1))
    weighted: Traffic = Traffic(1, 2)
    weighted_back: Traffic = Traffic(2, 5)
    expert_gradient: Traffic = Traffic(1, 2)


def kernel_set(kind: KernelKind, *, rms: bool, gated: bool, fused_norms: bool = True) -> KernelSet:
    """The kernels of a kind; rms: RMSNorm, not LayerNorm; gated: SwiGLU, not GELU."""
    if kind == "ideal":
        return _ideal(stepwise=rms and not fused_norms, gated=gated)
    return _compiled(rms=rms, gated=gated) if kind == "compiled" else _eager(rms=rms, gated=gated)


def _ideal(*, stepwise: bool, gated: bool) -> KernelSet:
    """One kernel a function; `stepwise` an RMSNorm goes step by step in FP32.

    That is forward to FP32, square, mean, scale, back, weight (torch 2.5, nn.RMSNorm; the kernel of one number a token
    is not counted), and backward the gradients of these.
    """
    norm, again = (Traffic(6, 4, 7), Traffic(6, 4, 7)) if stepwise else (Traffic(1, 3), Traffic(1, 2))
    back = Traffic(12, 9, 15) if stepwise else Traffic(1, 4)
    return KernelSet(
        norm=(norm, norm),
        again=(again, again),
        back=(back, back),
        heads=(norm, back),
        activation=Traffic(1, 3 if gated else 2),
        activation_back=Traffic(1, 5 if gated else 3),
        loss=Traffic(1, 5),
        bias=Traffic(),
        bias_gradient=Traffic(1, 1),
        looked_up=Traffic(1, 2),
        scattered=Traffic(1, 3),
        routed=Traffic(),
        routed_back=Traffic(1, 3),
        dispatched=(Traffic(1, 1), Traffic(0, 1)),
        weighted=Traffic(),
        weighted_back=Traffic(),
        expert_gradient=Traffic(),
    )


def _compiled(*, rms: bool, gated: bool) -> KernelSet:
    """The bundled runtime's compiled functions: sums over rows are kernels of their own, all else is one a function."""
    vectors = 1 if rms else 2
    return KernelSet(
        norm=(Traffic(1, 2), Traffic(3, 3)),
        again=(Traffic(1, 2), Traffic(1, 2)),
        back=(Traffic(2 + vectors, 5), Traffic(4 + vectors, 7)),
        back_sum=(Traffic(0, 1), Traffic(0, 1)),
        sum=Traffic(0, 2),
        # In the kernels that separate and join heads, but for sums over tokens.
        heads=(Traffic(), Traffic(1, 3)),
        activation=Traffic(1, 3 if gated else 2),
        activation_back=Traffic(1, 5 if gated else 3),
        loss=Traffic(38, 3),
    )


def _eager(*, rms: bool, gated: bool) -> KernelSet:
    """The bundled runtime operator by operator: LayerNorm is torch's kernel unless y splits it."""
    added = Traffic(1, 1, 2)
    norm, again = (Traffic(8, 2, 3, 1), Traffic(10, 2, 3, 1)), (Traffic(3, 1, 3, 1), Traffic(3, 1, 3, 1))
    back, back_sum = (Traffic(13, 4, 14, 1), Traffic(14, 4, 14, 1)), (added, added)
    heads = norm[0], back[0] + Traffic(6, 3)
    if not rms:
        norm = Traffic(3, 2), Traffic(18, 1, 6, 2)
        again = Traffic(3, 2), Traffic(4, 1, 5, 1)
        back = Traffic(5, 3), Traffic(21, 6, 22, 1)
        back_sum = Traffic(1, 3), added
    return KernelSet(
        norm=norm,
        again=again,
        back=back,
        back_sum=back_sum,
        turned=Traffic(4, 2, 3, 1),
        turned_back=Traffic(5, 4, 3, 1),
        heads=heads,
        activation=Traffic(2, 5) if gated else Traffic(1, 2),
        activation_back=Traffic(5, 15) if gated else Traffic(1, 3),
        loss=Traffic(164, 4, 6),
        routed_back=Traffic(3, 2, 3, 1),
        combined=(Traffic(2, 1), Traffic(0, 3)),
        weighted=Traffic(2, 2, 2),
        weighted_back=Traffic(7, 8, 4),
    )


_OF_BLOCKS, _BESIDE_BLOCKS = "*", ("embedding", "position", "head", "loss", "mtp.")
_CAPTURED: Mapping[CudaGraphs, tuple[str, ...]] = {
    "full": (_OF_BLOCKS,),
    "attn": ("attention.", "gdn."),
    "mlp": ("mlp.",),
    "mamba": ("mamba.",),
    "moe_router": ("mlp.norm", "moe.router", "moe.shared"),
    "moe_preprocess": (),
    "full_iteration": ("",),
}


def captured_layers(scopes: Iterable[CudaGraphs]) -> tuple[str, ...]:
    """How names of layers begin that CUDA graphs of some scopes capture; what a dispatcher prepares is not priced."""
    return tuple(start for scope in scopes for start in _CAPTURED[scope])


def is_captured(layer: str, captured: tuple[str, ...]) -> bool:
    """Whether a layer begins with one of these, behind the name of its layer type, or is of blocks and those are."""
    if not captured:
        return False
    name = ".".join(layer.split(".")[-2:])
    return name.startswith(captured) or (_OF_BLOCKS in captured and not name.startswith(_BESIDE_BLOCKS))


Computation: TypeAlias = MatMul | Attention | Measured | Kernel | HostWork
Operation: TypeAlias = Collective | Computation
