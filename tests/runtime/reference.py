"""The same training written a second time, on one rank, with torch's own autograd and AdamW.

Shares nothing with the runtime's forward and backward: only the initial weights come from its store.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as functional

from axonn_tune.specs.launch import Optimizer
from axonn_tune.specs.model import Model

Tensors = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens and targets `[B, S]`, and the numbers `[B]` of the sequences."""
Masks = Callable[[torch.Tensor, str], torch.Tensor]
"""What dropout multiplies `[b, S, H]` with, of sequences by their numbers, in a layer."""


@dataclass(frozen=True)
class Record:
    """What a training run leaves: by step, and the parameters after the last; `weights` are those it began with."""

    losses: list[float]
    norms: list[float]
    gradients: list[Tensors]
    parameters: Tensors


@dataclass(frozen=True)
class Reference:
    """A serial model over named weights."""

    model: Model
    weights: Tensors
    masks: Masks

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of `[b, S]` tokens; `sequences`: their numbers `[b]`."""
        model, weights, masks = self.model, self.weights, partial(self.masks, sequences)
        hidden = weights["embedding"][tokens]
        if model.family == "gpt":
            hidden = hidden + weights["position"][: tokens.shape[1]]
        hidden = hidden * masks("embedding")
        for number in range(model.layers):
            block = f"blocks.{number}"
            inner = self._linear(self._norm(hidden, f"{block}.attention.norm"), f"{block}.attention.qkv")
            output = self._linear(self._attention(inner), f"{block}.attention.output")
            hidden = hidden + output * masks(f"{block}.attention.output")
            inner = self._linear(self._norm(hidden, f"{block}.mlp.norm"), f"{block}.mlp.fc1")
            hidden = hidden + self._linear(self._activation(inner), f"{block}.mlp.fc2") * masks(f"{block}.mlp.fc2")
        table = weights["embedding" if model.tied_embeddings else "head"][: model.vocab]
        logits = self._norm(hidden, "head.norm") @ table.t()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        product = x @ self.weights[f"{name}.weight"]
        return product + self.weights[f"{name}.bias"] if self.model.biases else product

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        if self.model.family == "gpt":
            return functional.layer_norm(x, (x.shape[-1],), weight, self.weights[f"{name}.bias"], eps=1e-5)
        return functional.rms_norm(x, (x.shape[-1],), weight, eps=1e-5)

    def _activation(self, x: torch.Tensor) -> torch.Tensor:
        if self.model.family == "gpt":
            return functional.gelu(x)
        return functional.silu(x[..., 0::2]) * x[..., 1::2]

    def _attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """Head by head, with the scores written out: `[b, S, N] → [b, S, Q]`."""
        model = self.model
        each, dim, length = model.heads // model.kv_heads, model.head_dim, qkv.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        outputs = []
        for group in qkv.split((each + 2) * dim, dim=-1):
            *queries, key, value = group.split(dim, dim=-1)
            for query in queries:
                scores = self._turn(query) @ self._turn(key).transpose(1, 2) / math.sqrt(dim)
                outputs.append(scores.masked_fill(future, -math.inf).softmax(-1) @ value)
        return torch.cat(outputs, dim=-1)

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary positions as a product of complex numbers; none for GPT."""
        if self.model.family == "gpt":
            return x
        half, places = x.shape[-1] // 2, torch.arange(x.shape[-2], dtype=torch.float64)
        angle = places[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([turned.real, turned.imag], dim=-1)


def train(
    model: Model,
    weights: Tensors,
    batches: list[Batch],
    optimizer: Optimizer,
    *,
    rates: list[float],
    masks: Masks,
) -> Record:
    """Train on batches, one step each, at the given learning rates.

    Gradients are recorded before clipping. Decay is for matrices alone.
    """
    own = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    reference, record = Reference(model, own, masks), Record([], [], [], {})
    groups = [
        {"params": [weight for weight in own.values() if weight.dim() == 2], "weight_decay": optimizer.weight_decay},
        {"params": [weight for weight in own.values() if weight.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps)
    for batch, rate in zip(batches, rates, strict=True):
        adam.zero_grad()
        loss = reference.loss(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        record.losses.append(loss.item())
        record.gradients.append({name: weight.grad.clone() for name, weight in own.items() if weight.grad is not None})
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in record.gradients[-1].values()))
        record.norms.append(norm)
        clip(own, norm, optimizer.gradient_clip_norm)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
    record.parameters.update({name: weight.detach().clone() for name, weight in own.items()})
    return record


def clip(weights: Tensors, norm: float, most: float | None) -> None:
    """Scale all gradients together where their norm exceeds `most`."""
    if most is not None and norm > most:
        for weight in weights.values():
            assert weight.grad is not None
            weight.grad *= most / norm
