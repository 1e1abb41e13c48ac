"""Multi-token prediction (MTP): what one of its layers does before a decoder layer, and its pass of the LM head.

Embedding of the next token and hidden state `[T, H_y]` are normed and, side by side, projected `[M, 2H_y] → [M, H_x]`,
which is gathered over x. The stage has a copy of the embedding; the LM head is that of the model, with logits and a
loss of their own. Sources: DeepSeek-V3, arXiv 2412.19437, section 2.2; NVIDIA/Megatron-LM@d98e8a64,
megatron/core/transformer/multi_token_prediction.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from axonn_tune.program import layers, tables
from axonn_tune.program.inputs import CHUNKS, PARTS, WIDE_LOGITS, H, LayerInputs, Linear, X, Y
from axonn_tune.program.layers import moves
from axonn_tune.program.nodes import Behind, Exchange, Gemm, Nodes, Own, Vectors
from axonn_tune.program.operations import Array, Collective, Kernel, Operation, Phase, Traffic
from axonn_tune.program.tables import LOSSES
from axonn_tune.program.types import FRONT, LayerKind

NORM, EMBEDDING, PROJECTION = "mtp.norm", "mtp.embedding", "mtp.projection"
_BOTH = "embedding", "hidden state"


def nodes(given: LayerInputs) -> Nodes:
    """Embedding, both norms, projection and its gather; nothing of a layer type that predicts no further token."""
    if not given.own.predicts:
        return []
    return [
        Own(layer=EMBEDDING, ahead=_looked_up, back=_looked_up_backward),
        Own(
            layer=NORM,
            makes=tuple(_normed(given, name) for name in _BOTH),
            gradient=given.stream("MTP gradient", "residual gradients", 2.0 * H / Y),
            # With that in front of its pass of the LM head.
            vectors=Vectors(over_y=3 * given.own.hidden * (1 if given.own.rms else 2)),
            ahead=_norms,
            back=_norms_backward,
        ),
        Gemm(linear=Linear(PROJECTION, 2.0 * H / Y, H / X, "y", "x")),
        Exchange(layer=PROJECTION, ahead=_whole, back=lambda given, _: _whole(given, "backward")),
    ]


KIND = LayerKind(place=FRONT, nodes=nodes)


def _looked_up(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    """The next token's embedding, which is not looked up again."""
    for step in _without_weights(tables.embedding_forward(given)) if phase != "recompute" else ():
        yield replace(step, layer=EMBEDDING)


def _looked_up_backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
    for step in _without_weights(tables.embedding_backward(given)):
        yield replace(step, layer=EMBEDDING)


def _normed(given: LayerInputs, name: str) -> Array:
    return given.stream(f"MTP {name} output", "norm outputs", element=given.saved_element)


def _norms(given: LayerInputs, phase: Phase) -> Iterator[Operation]:
    """Of the embedding and of the hidden state `[T, H_y]`."""
    for name in _BOTH:
        made: tuple[Array, ...] = (_normed(given, name),)
        if phase == "recompute":
            yield from layers.norm_recompute(NORM, given, makes=made)
        else:
            made = given.stream(f"MTP {name}", "residual stream"), *made
            yield from layers.norm_forward(NORM, given, tokens=given.part, calls=PARTS, makes=made)


def _norms_backward(given: LayerInputs, behind: Behind) -> Iterator[Operation]:
    """Gradients of both; those of the LM head are added to the hidden state's."""
    for name, freed in zip(_BOTH, ((), behind.frees), strict=True):
        frees = (f"MTP {name}", layers.statistics_of(_normed(given, name)), *freed)
        yield from layers.norm_backward(NORM, given, tokens=given.part, calls=PARTS, frees=frees, summed=False)
    yield moves("backward", NORM, Traffic(1, 3), given.outside(given.part) * H / Y, given, calls=PARTS)


def heads(given: LayerInputs) -> Iterator[Operation]:
    """A norm, the LM head and a loss for each MTP layer, whose statistics of logits stay until its backward pass.

    Its weight is there for the main loss, and its gradient is reduced behind that.
    """
    # What stays from forward to backward: a softmax, its logarithm or a gradient in FP32, else logits.
    kept = given.elements.statistics if LOSSES[given.options.loss].wide else given.element
    for number in range(1, given.model.mtp_layers + 1):
        for step in _without_weights(tables.head(given)):
            made = []
            for array in step.makes:
                size = array.size_bytes
                if array.name == "logits":
                    size = kept * given.tokens / CHUNKS * tables.words_of_loss(given)
                if array.kind != WIDE_LOGITS and (array.name != "logits" or given.options.loss_chunks == 1):
                    made.append(Array(f"{array.name} of MTP {number}", f"{array.kind} of MTP", size))
            yield replace(step, makes=tuple(made))


def _whole(given: LayerInputs, phase: Phase) -> list[Operation]:
    """Gather of the projection's output over x, or of its gradient."""
    size = given.element * given.part * H
    return [Collective("all_gather", "x", phase, PROJECTION, size, calls=PARTS)]


def _without_weights(operations: Iterable[Operation]) -> Iterator[Operation]:
    """What is done for a table that is there already, and whose gradient goes with another's."""
    for step in operations:
        gathers = isinstance(step, Collective) and step.role in ("weight", "weight_gradient")
        if not gathers and not (isinstance(step, Kernel) and (step.with_gather or step.accumulates)):
            yield step
