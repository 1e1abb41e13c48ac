"""The kinds of node that a block is a list of: norms, GEMMs, functions with kernels of their own, additions.

A layer type (`program.types`) names its nodes in the order of the forward pass, with the arrays that each makes;
`program.block` derives a block's passes from them, one rule each. A node says what it is: the array that its output is
saved in, the gradient that comes back, and where its input comes from, if that is not the node before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from axonn_tune.program import layers
from axonn_tune.program.inputs import PARTS, H, LayerInputs, Linear, Y
from axonn_tune.program.operations import ONCE, Array, Arrays, Kernel, Operation, Phase, Size, Traffic

if TYPE_CHECKING:
    from axonn_tune.program.adapters import Adapter

Pass: TypeAlias = Callable[[LayerInputs, Phase], Iterable[Operation]]
"""Operations of a node's forward pass, or of the same once more in the backward pass."""


class Behind(NamedTuple):
    """What a node's backward pass is given: the gradient of its input, which it makes, names of the arrays that it is
    the last to need, how it gathers a weight by itself, and whether its weight has a gradient, too."""

    made: Array | None
    frees: tuple[str, ...]
    gather: Callable[[Linear], Iterable[Operation]]
    trains: bool = True

    @property
    def gradient(self) -> Array:
        """Of a node whose input has one."""
        assert self.made is not None, "its input is an array with a gradient"
        return self.made


class Adaptable(NamedTuple):
    """A linear layer that may have adapters; rows: of routed experts, in a half micro-batch, and the most of one;
    experts: how many of these a rank has."""

    linear: Linear
    rows: tuple[Size, Size] | None = None
    experts: Size = ONCE


class Vectors(NamedTuple):
    """Elements of norms, biases and attention sinks that y splits, that x splits, and that each rank has whole.

    heads: of `whole` norms of queries and keys; scores: biases of scores, which have no gradient, beside all these.
    """

    over_y: int = 0
    over_x: int = 0
    whole: int = 0
    heads: int = 0
    scores: int = 0

    def __add__(self, other: tuple[object, ...]) -> Vectors:
        assert isinstance(other, Vectors)
        return Vectors(*(one + another for one, another in zip(self, other, strict=True)))


def names(arrays: Iterable[Array]) -> tuple[str, ...]:
    """Names of some arrays."""
    return tuple(array.name for array in arrays)


_NO_MATRIX, _NO_VECTORS = Size(0.0), Vectors()


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """A step of a block.

    makes: its output, saved until the backward pass of the node that reads it; where it `keeps` it, until its own.
    gradient: of its output, made by the node that reads it. reads: the node whose output is its input, if that is not
    the one before; needs: others whose output must be there before its gradients; joins: others whose output is added
    to its own. modules: further names by which
    recompute repeats it, all nodes of one name at once. partly: names by which it is repeated alone, or a part of it,
    with the weights that are there; inside: of these, what it keeps for itself, but not its output.
    matrix: elements on one rank, before z shards them, of matrices that are no linear layer's; vectors: those of its
    vectors beside a norm of the stream and biases. trains: whether all these have gradients and optimizer states.
    detached: its input gets no gradient of it, and all ranks of x see every token, so have the same of its matrix.
    """

    layer: str
    makes: Arrays = ()
    gradient: Array | None = None
    keeps: bool = False
    reads: Node | None = None
    needs: tuple[Node, ...] = ()
    joins: tuple[Node, ...] = ()
    modules: tuple[str, ...] = ()
    partly: Mapping[str, Callable[[LayerInputs], Iterable[Operation]]] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    matrix: Size = _NO_MATRIX
    vectors: Vectors = _NO_VECTORS
    trains: bool = True
    detached: bool = False

    @property
    def matrix_elements(self) -> Size:
        """Elements of its matrix on one rank, if it has one and is not of routed experts."""
        return self.matrix

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Matrices beside its own, which train in place of these."""
        return ()

    def adaptable(self, given: LayerInputs) -> Adaptable | None:
        """What adapters may stand beside, if it has such a matrix."""
        return None

    @property
    def needs_input(self) -> bool:
        """Whether its gradients need its input, not only that of its output."""
        return True

    @property
    def alone(self) -> tuple[str, ...]:
        """Names by which recompute repeats it alone."""
        return (self.layer, *self.partly)

    def gather(self, given: LayerInputs, phase: Phase) -> list[Operation]:
        """Gather of its weight before a pass, where weights are gathered one by one."""
        return []

    def forward(self, given: LayerInputs, phase: Phase) -> Iterable[Operation]:
        """Its operations forward, or repeated."""
        raise NotImplementedError

    def backward(self, given: LayerInputs, behind: Behind) -> Iterable[Operation]:
        """Its gradients."""
        raise NotImplementedError


BLOCK_INPUT = "block input"
"""The residual stream in front of a block."""


def stream_before(layer: str, given: LayerInputs, *, first: bool) -> Array:
    """The residual stream before a norm, which may be the first of its block."""
    name = BLOCK_INPUT if first else f"{layer} input"
    return given.stream(name, "residual stream", float(given.streams) * H / Y)


def residual_gradient(name: str, given: LayerInputs) -> Array:
    """Gradient of the residual stream, or of all."""
    return given.stream(name, "residual gradients", float(given.streams) * H / Y)


@dataclass(frozen=True, eq=False, kw_only=True)
class Norm(Node):
    """A norm of the residual stream. added: the layer by whose kernel the gradients of several that read it are added,
    where that is a kernel of its own; weighted: it has a weight, and is a kernel; quantizes: for the linear
    layer behind it, in whose module it is."""

    added: str = ""
    weighted: bool = True
    quantizes: bool = False

    def forward(self, given: LayerInputs, phase: Phase) -> list[Operation]:
        """Its output once more; what a forward pass has before that, the block adds (`after`)."""
        again = layers.norm_recompute(self.layer, given, makes=self.makes, quantizes=self.quantizes)
        return [*_mixed(self.layer, given, phase), *again]

    def after(self, given: LayerInputs, *, makes: Arrays, summed: Traffic | None) -> list[Operation]:
        """Forward, with what it reads of the stream in `makes`; summed: an addition to that, in the same kernel."""
        ahead = partial(
            layers.norm_forward, self.layer, given, tokens=given.part, calls=PARTS, quantizes=self.quantizes
        )
        if given.streams > 1:
            return [*_mixed(self.layer, given, "forward", makes=makes), *ahead(makes=self.makes)]
        return ahead(makes=(*makes, *self.makes), summed=summed)

    def backward(self, given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        """Its gradient, added to that of the residual stream."""
        made, frees = residual_gradient("new residual gradient", given), list(behind.frees)
        own = self.gradient.name if self.gradient else ""
        if self.added:
            others = tuple(name for name in frees if name.startswith(f"{own} by "))
            elements, frees = given.outside(given.part) * H / Y, [name for name in frees if name not in others]
            yield layers.moves("backward", self.added, Traffic(1, 3), elements, given, calls=PARTS, frees=others)
        back = partial(layers.norm_backward, self.layer, given, tokens=given.part, calls=PARTS)
        if given.streams == 1:
            yield from back(makes=(made,), frees=(*frees, made.name))
            return
        one = given.stream(f"{self.layer} mixed gradient", "residual gradients")
        stream, *left = frees
        yield from back(makes=(one,), frees=(*left, _mixed_of(self.layer, given).name), summed=False)
        last = (stream, one.name, made.name)
        yield layers.mixed_streams(given, self.layer, "backward", ahead=True, back=True, makes=(made,), frees=last)


def _mixed_of(layer: str, given: LayerInputs) -> Array:
    """One stream of several, before a norm."""
    return given.stream(f"{layer} mixed", "branch inputs")


def _mixed(layer: str, given: LayerInputs, phase: Phase, *, makes: Arrays = ()) -> list[Operation]:
    """The kernel that makes it, where there are several."""
    made = (*makes, _mixed_of(layer, given))
    return [layers.mixed_streams(given, layer, phase, ahead=True, makes=made)] if given.streams > 1 else []


@dataclass(frozen=True, eq=False, kw_only=True)
class Unnormed(Norm):
    """The residual stream itself, where a branch is normed behind it alone; what reads it saves it."""

    weighted: bool = False

    @property
    def alone(self) -> tuple[str, ...]:
        """None: it is there."""
        return ()

    def forward(self, given: LayerInputs, phase: Phase) -> list[Operation]:
        """Nothing once more."""
        return []

    def after(self, given: LayerInputs, *, makes: Arrays, summed: Traffic | None) -> list[Operation]:
        """No kernel."""
        return [Kernel("forward", self.layer, ONCE * 0.0, makes=makes)]

    def backward(self, given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        """The sum of gradients of the stream and of those that read it."""
        made = residual_gradient("new residual gradient", given)
        moved, elements, freed = Traffic(1, 3), given.outside(given.part) * H / Y, (*behind.frees, made.name)
        yield layers.moves("backward", self.layer, moved, elements, given, calls=PARTS, makes=(made,), frees=freed)


def norm(
    layer: str,
    given: LayerInputs,
    *,
    element: float,
    added: str = "",
    modules: tuple[str, ...] = (),
    first: bool = False,
    quantizes: bool = False,
) -> Norm:
    """A norm of the residual stream whose output is saved in elements of so many bytes; first: of its block;
    quantizes: for the linear layer behind it.

    modules: names by which recompute repeats it alone, after which linear layers quantize the whole output once more
    (NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/transformer_layer.py, set_save_original_input).
    """
    if given.own.norms == "post":
        stream, gradient = (
            stream_before(layer, given, first=first),
            given.stream(f"{layer} gradient", "residual gradients"),
        )
        return Unnormed(layer=layer, makes=(stream,), gradient=gradient, added=added)
    output = given.stream(f"{layer} output", "norm outputs", element=element)
    repeated = given.stream(f"{layer} output", "norm outputs", element=given.element)
    once_more = partial(layers.norm_recompute, layer, makes=(repeated,))
    return Norm(
        layer=layer,
        makes=(output,),
        gradient=given.stream(f"{layer} gradient", "residual gradients"),
        partly={
            **dict.fromkeys((layer, *modules), lambda given: once_more(given=given)),
            **({"mhc": lambda given: _mixed(layer, given, "recompute")} if given.streams > 1 else {}),
        },
        added=added,
        quantizes=quantizes,
    )


@dataclass(frozen=True, eq=False)
class Operand:
    """What the input of a GEMM goes through first, in the same layer: the array that it becomes, with its gradient."""

    array: Array
    gradient: Array
    forward: Pass
    backward: Callable[[LayerInputs, Behind], Iterable[Operation]]


@dataclass(frozen=True, eq=False, kw_only=True)
class Gemm(Node):
    """A linear layer."""

    layer: str = field(init=False)
    linear: Linear
    operand: Operand | None = None
    adapters: tuple[Adapter, ...] = ()

    def __post_init__(self) -> None:
        """Go by the name of the layer."""
        object.__setattr__(self, "layer", self.linear.layer)

    def adaptable(self, given: LayerInputs) -> Adaptable:
        """Its linear layer."""
        return Adaptable(self.linear)

    @property
    def matrix_elements(self) -> Size:
        """Of its weight."""
        return self.linear.weight

    @property
    def needs_input(self) -> bool:
        """For its weight's gradient, for those of its operand, or for an adapter's."""
        return self.trains or self.operand is not None or any(one.shares_input for one in self.adapters)

    def gather(self, given: LayerInputs, phase: Phase) -> list[Operation]:
        """Gather of its weight."""
        return gathered(self.linear, given, phase)

    def forward(self, given: LayerInputs, phase: Phase) -> Iterator[Operation]:
        """Its operand, the GEMM and the reduction of the output."""
        if self.operand is not None:
            yield from self.operand.forward(given, phase)
        yield from layers.dequantized(phase, self.linear, given)
        own = {"trains": self.trains, "adapted": bool(self.adapters)}
        yield from layers.linear_forward(self.linear, given, phase=phase, makes=self.makes, **own)
        for one in self.adapters:
            yield from one.forward(given, phase)

    def backward(self, given: LayerInputs, behind: Behind) -> Iterator[Operation]:
        """Those of its adapters, both gradients, to which theirs are added, and those of its operand."""
        back = partial(layers.linear_backward, self.linear, given, trains=self.trains)
        if behind.made is None:
            yield from _of_adapters(self, given, behind)
            return
        for one in reversed(self.adapters):
            yield from one.backward(given)
        wide = layers.dequantized("backward", self.linear, given)
        yield from wide
        inputs = (made for one in self.adapters for made in one.input_gradient(given))
        added = *names(inputs), *names(one.makes[0] for one in wide)
        if self.operand is None:
            yield from back(makes=behind.gradient, frees=(*behind.frees, *added))
            return
        own = self.gradient.name if self.gradient else ""
        used = tuple(name for name in behind.frees if name != own)
        frees = (self.operand.array.name, *([own] if own else []), *added)
        yield from back(makes=self.operand.gradient, frees=frees)
        after = behind._replace(frees=(*used, self.operand.gradient.name))
        yield from self.operand.backward(given, after)


def _of_adapters(node: Gemm, given: LayerInputs, behind: Behind) -> Iterator[Operation]:
    """Gradients of adapters alone, where the input has none."""
    own, frees = {node.gradient.name} if node.gradient else set[str](), behind.frees
    if node.operand is not None:
        # What it is made of is not needed, but itself.
        frees = (*(name for name in frees if name in own), node.operand.array.name)
    *others, last = reversed(node.adapters)
    for one in others:
        yield from one.backward(given, passes=False)
    yield from last.backward(given, passes=False, frees=frees)


@dataclass(frozen=True, eq=False, kw_only=True)
class Own(Node):
    """A function with kernels or exchanges of its own, which says what they are."""

    ahead: Pass
    back: Callable[[LayerInputs, Behind], Iterable[Operation]]

    def forward(self, given: LayerInputs, phase: Phase) -> Iterable[Operation]:
        """As it says."""
        return self.ahead(given, phase)

    def backward(self, given: LayerInputs, behind: Behind) -> Iterable[Operation]:
        """As it says."""
        return self.back(given, behind)


@dataclass(frozen=True, eq=False, kw_only=True)
class Exchange(Own):
    """A collective of its own, under the name of the layer that it serves, which is repeated without it.

    beside: nodes that run beside it, some in each exchange of a pass.
    """

    back: Callable[[LayerInputs, Behind], Iterable[Operation]] = lambda *_: ()
    beside: tuple[Node, ...] = ()

    @property
    def alone(self) -> tuple[str, ...]:
        """None, only modules."""
        return ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Add(Node):
    """The addition of a branch to the residual stream, with dropout before it."""

    @property
    def alone(self) -> tuple[str, ...]:
        """None: only whole blocks are repeated with it."""
        return ()

    def forward(self, given: LayerInputs, phase: Phase) -> list[Operation]:
        """The sum, and the mask."""
        return layers.residual(self.layer, given, phase=phase, makes=self.makes)

    def backward(self, given: LayerInputs, behind: Behind) -> list[Operation]:
        """The gradient through the mask."""
        return layers.dropout_backward(self.layer, given)


class Branch(NamedTuple):
    """What a branch makes before it is added to the residual stream: arrays, their gradient, and nodes behind it."""

    makes: Arrays
    gradient: Array | None
    added: list[Node | Branches]


def branch(layer: str, given: LayerInputs) -> Branch:
    """Of the layer that a branch ends with: the norm of its output, where blocks have one there, and the addition."""
    if given.own.norms in ("pre", "parallel") and given.streams == 1:
        return Branch((), None, [Add(layer=layer)])
    name = f"{layer.partition('.')[0]}.post_norm"
    output = given.stream(f"{layer} output", "branch outputs")
    gradient = given.stream(f"{layer} output gradient", "backward temporaries")
    statistics = Array(
        f"{name} statistics", "norm statistics", given.norm_statistics * given.elements.statistics * given.tokens
    )

    def forward(given: LayerInputs, phase: Phase) -> list[Operation]:
        if phase == "recompute":
            return layers.norm_recompute(name, given, makes=(statistics,))
        steps = layers.norm_forward(name, given, tokens=given.part, calls=PARTS)
        return [*steps[:-1], replace(steps[-1], makes=(statistics,))]

    def backward(given: LayerInputs, behind: Behind) -> list[Operation]:
        made, freed = (behind.gradient,), (*behind.frees, statistics.name)
        return layers.norm_backward(name, given, tokens=given.part, calls=PARTS, makes=made, frees=freed, summed=False)

    if given.streams > 1:
        return Branch((output,), gradient, [_joined(layer, given), Add(layer=layer)])
    vectors = Vectors(over_y=given.own.hidden * (1 if given.own.rms else 2))
    return Branch(
        (output,), gradient, [Own(layer=name, vectors=vectors, ahead=forward, back=backward), Add(layer=layer)]
    )


def _joined(layer: str, given: LayerInputs) -> Own:
    """A branch's output put onto several residual streams, with the coefficients of both of its sites."""
    name, count = f"{layer.partition('.')[0]}.hyper", layers.coefficients(given.streams)

    def backward(given: LayerInputs, behind: Behind) -> list[Operation]:
        made = (behind.gradient,)
        return [layers.mixed_streams(given, name, "backward", ahead=False, back=True, makes=made, frees=behind.frees)]

    return Own(
        layer=name,
        vectors=Vectors(over_y=count * given.streams * given.own.hidden, whole=count + 3),
        ahead=lambda given, phase: [layers.mixed_streams(given, name, phase, ahead=False)],
        back=backward,
    )


def parallel(listed: Nodes) -> Nodes:
    """The nodes of a block of attention and MLP of which both read attention's norm, whose gradients a kernel adds."""
    *_, one, other = (place for place, node in enumerate(listed) if isinstance(node, Norm))
    normed, reader = listed[one], listed[other + 1]
    assert isinstance(normed, Norm), "attention begins with one"
    assert isinstance(reader, Gemm), "behind its norm an MLP begins with one"
    both = replace(normed, added=reader.layer)
    return [*listed[:one], both, *listed[one + 1 : other], replace(reader, reads=both), *listed[other + 2 :]]


class Branches(NamedTuple):
    """Branches of one input, each in stages: forward goes through them stage by stage, backward one after another."""

    branches: tuple[tuple[tuple[Node, ...], ...], ...]


Nodes: TypeAlias = list[Node | Branches]
"""Of a layer type, in the order of the forward pass."""


def tuned(listed: Nodes, given: LayerInputs) -> Nodes:
    """The same nodes where the model trains whole; otherwise nodes of which only adapters train."""
    if given.tuning is None:
        return listed
    # Imported here: most models train whole, and start-up time is theirs.
    from axonn_tune.program.adapters import adapters_of

    known = dict[Node, Node]()
    # Norms whose output an adapter reads, too, which is not quantized.
    behind = ((one, other) for one, other in pairwise(listed) if isinstance(one, Norm) and isinstance(other, Gemm))
    whole = {one for one, other in behind if other.linear.normed and adapters_of(other.linear, given)}

    def of(node: Node) -> Node:
        if node not in known:
            changes: dict[str, object] = {"trains": False}
            changes |= {"needs": tuple(map(of, node.needs)), "joins": tuple(map(of, node.joins))}
            if node.reads is not None:
                changes["reads"] = of(node.reads)
            if node in whole:
                changes["quantizes"] = False
            if isinstance(node, Exchange):
                changes["beside"] = tuple(map(of, node.beside))
            if (adaptable := node.adaptable(given)) is not None:
                changes["adapters"] = adapters_of(adaptable.linear, given, adaptable.rows, adaptable.experts)
            known[node] = replace(node, **changes)  # type: ignore[arg-type]
        return known[node]

    def through(one: Node | Branches) -> Node | Branches:
        if isinstance(one, Branches):
            return Branches(tuple(tuple(tuple(map(of, stage)) for stage in branch) for branch in one.branches))
        return of(one)

    return list(map(through, listed))


def gathered(linear: Linear, given: LayerInputs, phase: Phase) -> list[Operation]:
    """Gather of one weight, where weights are gathered one by one."""
    if given.options.gather_unit == "block":
        return []
    return layers.gather_weight(linear.layer, linear.weight, given, phase=phase, calls=given.gathered_share(phase))


def kept_arrays(forward: Iterable[Operation], backward: Sequence[Operation], *, whole: bool) -> tuple[Array, ...]:
    """Saved activations of one block and micro-batch: arrays that its gradients need and that are not recomputed.

    whole: the block is repeated as a whole, of which only its input is saved (arXiv 2205.05198, table 2).
    """
    made = [array for step in forward for array in step.makes]
    if whole:
        return tuple(array for array in made if array.name == BLOCK_INPUT and backward)
    again = {array.name for step in backward if step.phase == "recompute" for array in step.makes}
    needed = {name for step in backward for name in step.frees}
    return tuple(array for array in made if array.name not in again and array.name in needed)
