"""Elements of a model, as sums over the nodes of its blocks: parameters, those that a token meets, those of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from axonn_tune.frameworks.step import StepOptions
from axonn_tune.program.block import BlockNodes, block_nodes
from axonn_tune.program.inputs import LayerInputs, X, Y
from axonn_tune.program.layers import closing_elements
from axonn_tune.program.nodes import Gemm, Node, Norm, Vectors
from axonn_tune.program.operations import Size, Value
from axonn_tune.program.types.experts import ROUTER, Grouped
from axonn_tune.specs.model import Layer, Model
from axonn_tune.specs.workload import ELEMENT_SIZES

if TYPE_CHECKING:
    from axonn_tune.program.adapters import Adapter


@dataclass(frozen=True)
class TypeCount:
    """Elements of a block of one layer type.

    split: of matrices that x and y split; over_y, over_x: of those that only one of them splits. each, each_biases: of
    one routed expert, of which it has `routed`, and a token meets `chosen`; router: of its matrix, in `split`. trained:
    the same of what has gradients and optimizer states, if that is not all; passed: of what has input gradients, and
    mixes whether what mixes its tokens has.
    """

    split: float
    over_y: float
    over_x: float
    each: int
    each_biases: int
    routed: int
    chosen: int
    router: int
    vectors: Vectors
    trained: TypeCount | None = None
    passed: TypeCount | None = None
    mixes: bool = True

    @property
    def trains(self) -> TypeCount:
        """The same of what trains."""
        return self.trained or self

    @property
    def passes(self) -> TypeCount:
        """The same of what has input gradients."""
        return self.passed or self

    def stored(self, x: Value, y: Value) -> Value:
        """W: x·y times the elements of a block on one rank but those of routed experts."""
        if not (self.over_x or self.over_y):
            return self.split
        found: Value = self.split + self.over_y * x + self.over_x * y
        return found

    def _matrices(self, experts: int) -> int:
        return int(self.split + self.over_y + self.over_x) + experts * self.each

    @property
    def splits(self) -> bool:
        """Whether it has matrices beside those of routed experts."""
        return self.split + self.over_y + self.over_x > 0.0

    @property
    def weights(self) -> int:
        """Elements of all its matrices."""
        return self._matrices(self.routed)

    @property
    def active_weights(self) -> int:
        """Elements of the matrices that a token meets."""
        return self._matrices(self.chosen)

    def vectors_of(self, experts: int) -> int:
        """Elements of norms, biases and attention sinks, with those of so many experts."""
        found = self.vectors
        return found.over_y + found.over_x + found.whole + experts * self.each_biases


def type_constants(layer: Layer) -> dict[str, float]:
    """Widths of a layer type, by their letters."""
    widths = {"Q": layer.query_width, "N": layer.qkv_width, "F": layer.ffn, "G": layer.up_width}
    return {name: float(width) for name, width in widths.items()}


@lru_cache(maxsize=64)
def counted(model: Model, *, sequence_parallel: bool = False) -> tuple[TypeCount, ...]:
    """Elements of a block of each layer type; sequence_parallel: each rank of x has a whole router for its tokens."""
    options = StepOptions(sequence_parallel=sequence_parallel)
    found = list[TypeCount]()
    for layer in model.types:
        nodes = block_nodes(given := LayerInputs(model, ELEMENT_SIZES["bf16"], options, layer=layer))
        frozen = len(nodes.trained) < len(nodes.forward)
        added = [one for node in nodes.forward for one in node.adapters]
        trained = _counted(given, nodes.trained, added) if frozen else None
        whole = replace(_counted(given, nodes.forward, added), trained=trained)
        found.append(_ending(whole, given, nodes) if nodes.ends else whole)
    return tuple(found)


def _ending(whole: TypeCount, given: LayerInputs, nodes: BlockNodes) -> TypeCount:
    """With what has input gradients of a block in which the backward pass ends: of adapters there B alone."""
    passing = [node for node in nodes.backward if not nodes.stops(node)]
    ends = [one.up for node in nodes.backward if nodes.stops(node) for one in node.adapters]
    passed = _counted(given, passing, [one for node in passing for one in node.adapters], ends)
    return replace(whole, passed=passed, mixes=any(node.layer.endswith(_MIXING) for node in passing))


_MIXING = ".core", ".scan"
"""How names of nodes end that mix tokens."""


def _counted(
    given: LayerInputs, nodes: Sequence[Node], added: Sequence[Adapter], others: Sequence[Size] = ()
) -> TypeCount:
    """Of some nodes, and of adapters beside them; others: elements of further matrices."""
    layer, experts = given.own, given.own.experts
    sizes = {"H": float(layer.hidden), "x": 1.0, "y": 1.0, "expert_tensor": 1.0, **type_constants(layer)}
    by_split = {"split": 0.0, "over_y": 0.0, "over_x": 0.0}
    router, vectors = 0, Vectors()
    for node in nodes:
        vectors += _vectors(node, given, sizes)
    own = [(node.layer, node.matrix_elements) for node in nodes]
    own += [("", one) for one in (*(one for adapter in added for one in adapter.elements), *others)]
    for adapter in added:
        vectors += Vectors(**{"over_x" if adapter.column else "over_y": int(adapter.magnitudes.evaluate(sizes))})
    for name, matrix in own:
        if not matrix.coefficient:
            continue
        whole = matrix * X * Y
        duplicated = "".join(name for name, _ in whole.powers if name in "xy")
        elements = float(whole.evaluate(sizes))
        # Neither splits what adapters of experts have; y has one rank wherever there are adapters.
        by_split[{"": "split", "x": "over_y", "y": "over_x", "xy": "over_y"}[duplicated]] += elements
        router += int(elements) if name == ROUTER else 0
    grouped = [node for node in nodes if isinstance(node, Grouped)]
    return TypeCount(
        split=by_split["split"],
        over_y=by_split["over_y"],
        over_x=by_split["over_x"],
        each=sum(node.each for node in grouped) + sum(_of_expert(one, sizes) for one in added if one.each),
        each_biases=layer.biases * sum(node.width for node in grouped),
        routed=experts.count if experts else 0,
        chosen=experts.per_token if experts else 0,
        router=router,
        vectors=vectors,
    )


def _of_expert(adapter: Adapter, sizes: dict[str, float]) -> int:
    """Elements of the adapter of one expert."""
    return sum(int(size.evaluate(sizes)) for size in (adapter.down, adapter.up))


def _vectors(node: Node, given: LayerInputs, sizes: dict[str, float]) -> Vectors:
    """Those of a node, and of a norm of the hidden state or a bias, where it has one."""
    layer = given.own
    if isinstance(node, Norm) and node.weighted:
        return node.vectors + Vectors(over_y=layer.hidden * (1 if layer.rms else 2))
    if isinstance(node, Gemm) and layer.biases:
        width, axis = int(node.linear.n.evaluate(sizes)), node.linear.split_output
        return node.vectors + Vectors(**{f"over_{axis}" if axis else "whole": width})
    return node.vectors


def trains_experts(model: Model) -> bool:
    """Whether routed experts of a layer type train."""
    return any(one.trains.each for one in counted(model))


def adapter_parameters(model: Model) -> int:
    """Elements of adapters."""
    types = zip(counted(model), model.counts, strict=True)
    own = (count * (one.trains.weights + one.trains.vectors_of(0)) for one, count in types)
    return sum(own) if model.tuning else 0


def adapted(model: Model) -> tuple[str, ...]:
    """Linear layers and parts of them that have an adapter, as `Tuning.targets` has them."""
    found = dict[str, None]()
    for layer in model.types:
        nodes = block_nodes(LayerInputs(model, ELEMENT_SIZES["bf16"], layer=layer)).forward
        found |= dict.fromkeys(one.target for node in nodes for one in node.adapters)
    return tuple(found)


def parameters(model: Model) -> int:
    """All elements, adapters included, vocabulary unpadded."""
    h = model.hidden
    types = zip(counted(model), model.counts, strict=True)
    blocks = sum(count * (one.weights + one.vectors_of(one.routed)) for one, count in types)
    positions = model.max_sequence_length * h if model.learned_positions else 0
    return blocks + model.vocab * h * (1 if model.tied_embeddings else 2) + positions + closing_vectors(model)


def closing_vectors(model: Model) -> int:
    """Elements behind the last block: its norm, and what makes one stream of several."""
    norm = (1 if model.family == "llama" else 2) * model.hidden
    return norm + closing_elements(model.residual_streams or 1, model.hidden)


def active_parameters(model: Model) -> int:
    """Those that a token meets in training: of the routed experts its own."""
    idle = (
        count * (one.routed - one.chosen) * (one.each + one.each_biases)
        for one, count in zip(counted(model), model.counts, strict=True)
    )
    return parameters(model) - sum(idle)
