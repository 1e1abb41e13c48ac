"""How the arrays of a cross-entropy live: copies of the logits `[M, V_xy]` that are there together, at most.

A copy is in the compute type (BF16), or in FP32. Sources: [TT] pytorch/torchtitan, torchtitan/components/loss.py of
0.1.0 to 0.2.2, and torch 2.13, torch/distributed/tensor/parallel/loss.py; [M] NVIDIA/Megatron-LM@d98e8a64,
megatron/core/tensor_parallel/cross_entropy.py and core/fusions/fused_cross_entropy.py; [TE]
NVIDIA/TransformerEngine@d0067d0d, transformer_engine/pytorch/triton/cross_entropy.py.
"""

from __future__ import annotations

from typing import NamedTuple

from axonn_tune.frameworks.description import LossKind


class Loss(NamedTuple):
    """Copies of the logits: in the compute type, in FP32, and further ones in FP32 where x splits the vocabulary."""

    narrow: float
    wide: float
    over_x: float = 0.0


LOSSES: dict[LossKind, Loss] = {
    # The gradient overwrites the logits: a chunk of the bundled runtime; [TE] up to 2.17, which [M] pins, and where
    # --cross-entropy-fusion-impl te asks for it.
    "in_place": Loss(1, 0),
    # One graph: logits are saved, and their gradient is written. With loss_parallel, whose all-reduces end fusion, the
    # gradient is saved in FP32 (AOT graphs of [TT]'s loss). llm-foundry's fused loss and XLA take as much.
    "fused": Loss(2, 0, over_x=0.5),
    # FP32 logits become softmax and gradient in place, which is then cast: [M] since 2024-06, fused by its JIT or not;
    # [TE] from 2.18 on, which writes an FP32 gradient beside the logits.
    "softmax": Loss(1, 1),
    # Logits cast to FP32 and shifted into a second copy: [M] before that.
    "copied": Loss(1, 2),
    # Operator by operator, as `cross_entropy(logits.float(), …)` of [TT] without a compiler and of transformers: in the
    # backward pass log-probabilities, the gradient of nll_loss and that of log_softmax; loss_parallel has their
    # exponential, too. The logits are gone by then, but these copies do not fit into the hole that they leave.
    "eager": Loss(1, 3, over_x=1),
}
"""By the name that `step.loss` takes."""
