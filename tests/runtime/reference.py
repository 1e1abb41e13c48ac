"""The serial run: the benchmark's ordinary module on one rank, with torch's own autograd and AdamW.

Shares nothing with the runtime's forward and backward: only the initial weights come from its store, and what dropout
drops from its counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from axonn_tune.specs.launch import Optimizer
from axonn_tune.specs.model import Model
from benchmarks.reference_model import Mixture, Reference, runtime_name

Tensors = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Tokens and targets `[B, S]`, and the numbers `[B]` of the sequences."""
Masks = Callable[[torch.Tensor, str], torch.Tensor]
"""What dropout multiplies `[b, S, H]` with, of sequences by their numbers, in a layer."""


@dataclass(frozen=True)
class Record:
    """What a training run leaves: by step, and the parameters after the last."""

    losses: list[float]
    norms: list[float]
    gradients: list[Tensors]
    parameters: Tensors


def train(
    model: Model,
    weights: Tensors,
    batches: list[Batch],
    optimizer: Optimizer,
    *,
    rates: list[float],
    masks: Masks,
    accumulation: int = 1,
    balance: float = 0.0,
    bias_rate: float = 0.0,
) -> Record:
    """Train on batches, one step each, in so many micro-batches, at the given learning rates; balance: coefficient of
    the load-balancing loss.

    Gradients are recorded before clipping, those of routers' biases as counts of tokens. Decay is for matrices alone.
    """
    module, record = Reference(model).double(), Record([], [], [], {})
    module.load(weights)
    own = {runtime_name(name): parameter for name, parameter in module.named_parameters()}
    groups = [
        {"params": [one for one in own.values() if one.dim() == 2], "weight_decay": optimizer.weight_decay},
        {"params": [one for one in own.values() if one.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps)
    mixtures = [block.mlp for block in module.blocks if isinstance(block.mlp, Mixture)]
    for batch, rate in zip(batches, rates, strict=True):
        adam.zero_grad()
        total = 0.0
        for one in mixtures:
            one.counts = torch.zeros(one.given.count)
        for tokens, targets, sequences in zip(*(part.chunk(accumulation) for part in batch), strict=True):
            hooks = drop(module, lambda layer, sequences=sequences: masks(sequences, layer))
            loss = module(tokens, targets)
            for hook in hooks:
                hook.remove()
            ((loss + balance * sum(one.balance for one in mixtures)) / accumulation).backward()
            total += loss.item() / accumulation
        biases = {id(one.router.bias): one for one in mixtures if one.router.bias is not None}
        trained = {name: one for name, one in own.items() if id(one) not in biases}
        record.losses.append(total)
        found = {name: as_stored(name, one.grad).clone() for name, one in trained.items()}
        record.norms.append(math.sqrt(sum(float((one**2).sum()) for one in found.values())))
        record.gradients.append(
            found | {name: biases[id(one)].counts for name, one in own.items() if id(one) in biases}
        )
        for one in biases.values():
            one.router.bias += bias_rate * torch.sign(one.counts.mean() - one.counts)
        most = optimizer.gradient_clip_norm
        for one in trained.values() if most is not None and record.norms[-1] > most else ():
            one.grad *= most / record.norms[-1]
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
    record.parameters.update({name: as_stored(name, one.detach()).clone() for name, one in own.items()})
    return record


def drop(module: Reference, mask: Callable[[str], torch.Tensor]) -> list[Any]:
    """Apply the masks of layers where the runtime has dropout; the hooks, to be removed."""
    hooks = [module.blocks[0].register_forward_pre_hook(lambda _, given: (given[0] * mask("embedding"), *given[1:]))]
    for number, block in enumerate(module.blocks):
        mixer = block.get_submodule(block.mixer), "gdn.out" if block.mixer == "gdn" else "attention.output"
        for part, layer in (mixer, (block.mlp, "mlp.fc2")):
            name = f"blocks.{number}.{layer}"
            hooks.append(part.register_forward_hook(lambda _, given, output, name=name: output * mask(name)))
    return hooks


def as_stored(name: str, value: Any) -> torch.Tensor:
    """A tensor of the module as the runtime stores it: weights of blocks input first."""
    return value.t() if name.startswith("blocks.") and value.dim() == 2 else value
