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
    adapter_scale: float = 1.0,
) -> Record:
    """Train on batches, one step each, in so many micro-batches, at the given learning rates; balance: coefficient of
    the load-balancing loss.

    Gradients are recorded before clipping, those of routers' biases as counts of tokens. Decay is for matrices alone.
    """
    module, record = Reference(model, adapter_scale).double(), Record([], [], [], {})
    module.load(weights)
    own = {runtime_name(name): parameter for name, parameter in module.named_parameters()}
    groups = [
        {"params": [one for one in own.values() if one.dim() == 2], "weight_decay": optimizer.weight_decay},
        {"params": [one for one in own.values() if one.dim() == 1], "weight_decay": 0.0},
    ]
    adam, momenta = torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps), Tensors()
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
        trained = {name: one for name, one in own.items() if id(one) not in biases and one.grad is not None}
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
        for name, one in own.items() if optimizer.name != "adamw" else ():
            update_otherwise(name, one, momenta, optimizer, rate=rate, model=model)
        adam.step()
    record.parameters.update({name: as_stored(name, one.detach()).clone() for name, one in own.items()})
    return record


@torch.no_grad()
def update_otherwise(
    name: str, weight: Any, momenta: Tensors, optimizer: Optimizer, *, rate: float, model: Model
) -> None:
    """What SGD, Lion and Muon do to a whole tensor, which AdamW is then kept from; all but matrices of blocks is
    AdamW's with Muon."""
    if optimizer.name == "muon" and not (name.startswith("blocks.") and weight.dim() == 2):
        return
    gradient, weight.grad = weight.grad, None
    decay = optimizer.weight_decay if weight.dim() == 2 else 0.0
    before, share = momenta.get(name, torch.zeros_like(gradient)), optimizer.momentum
    if optimizer.name == "sgd":
        update = momenta[name] = share * before + gradient
    elif optimizer.name == "lion":
        first, second = optimizer.betas
        update = torch.sign(first * before + (1 - first) * gradient)
        momenta[name] = second * before + (1 - second) * gradient
    else:
        momenta[name] = share * before + (1 - share) * gradient
        ahead = share * momenta[name] + (1 - share) * gradient
        update = torch.empty_like(ahead)
        for rows in parts_of(name, model, len(weight)):
            update[rows] = orthogonal(ahead[rows], optimizer.iterations)
    weight.copy_(weight - rate * decay * weight - rate * update)


def parts_of(name: str, model: Model, rows: int) -> list[torch.Tensor]:
    """Rows of queries with their gates, of keys and of values, where a weight has all of them."""
    if not name.endswith("attention.qkv.weight"):
        return [torch.arange(rows)]
    layer = next(one for one in model.types if one.attention)
    of_group = torch.arange(rows) % (rows // layer.kv_heads) // layer.head_dim - layer.heads // layer.kv_heads
    keys, values = of_group == 0, of_group == 1
    return [torch.nonzero(mask).flatten() for mask in (~(keys | values), keys, values)]


def orthogonal(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """By singular values, each of which an iteration maps to a polynomial of itself; of AdamW's size."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / matrix.norm()
    for _ in range(iterations):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return 0.2 * max(matrix.shape) ** 0.5 * (left * values) @ right


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
