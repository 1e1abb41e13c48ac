"""The runtime's GPT and Llama as ordinary modules, the way a PyTorch user would write them.

M tokens are `[b, S]`; the parallel wrappers of torch may split any module's parameters, so widths are read
from tensors. Columns of qkv are grouped by key head (queries, key, value), gate and up alternate: a split over
output columns then gives each rank whole heads and whole pairs, as it does in the runtime.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as functional
from torch import nn

from axonn_tune.program.pipeline import split_layers
from axonn_tune.program.types.gdn import GatedDeltaNet
from axonn_tune.specs.model import Layer, Model
from axonn_tune.specs.sections import Experts
from axonn_tune.specs.tuning import Tuning

EPSILON = 1e-5


class Attention(nn.Module):
    """Causal softmax attention."""

    def __init__(self, model: Model, layer: Layer) -> None:
        super().__init__()
        self.model, self.layer = model, layer
        dim = model.head_dim
        self.q_norm, self.k_norm = (nn.RMSNorm(dim, eps=EPSILON) if layer.qk_norms else None for _ in range(2))
        self.qkv = nn.Linear(model.hidden, layer.qkv_width + layer.gate_width, bias=model.biases)
        self.output = nn.Linear(layer.query_width, model.hidden, bias=model.biases)

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
        """`[b, S, H] → [b, S, H]`; turn: cosines and sines of rotary positions, `[2, S, head_dim / 2]`."""
        dim, each = self.model.head_dim, self.model.heads // self.model.kv_heads
        projected = self.qkv(x).view(*x.shape[:2], self.model.kv_heads, -1)
        grouped, gates = projected[..., : (each + 2) * dim], projected[..., (each + 2) * dim :]
        grouped = grouped.reshape(*x.shape[:2], -1, each + 2, dim).transpose(1, 2)
        queries, keys, values = torch.split(grouped, [each, 1, 1], dim=-2)
        queries, keys, values = queries.transpose(2, 3).flatten(1, 2), keys.squeeze(-2), values.squeeze(-2)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if turn is not None:
            queries, keys = rotate(queries, turn), rotate(keys, turn)
        if x.device.type == "cpu" and x.dtype == torch.bfloat16:
            # As the runtime has it: bf16's backward pass is five times slower on CPUs.
            queries, keys, values = queries.float(), keys.float(), values.float()
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=each > 1)
        attended = attended.transpose(1, 2).flatten(2).to(x.dtype)
        if self.layer.gate_width:
            split = attended.view(*x.shape[:2], self.layer.gate_width, -1)
            attended = (split * gates.reshape(*split.shape[:3], 1).sigmoid()).flatten(2)
        found: torch.Tensor = self.output(attended)
        return found


class DeltaNet(nn.Module):
    """A gated delta net, token by token: S ← a·S, then S ← S + β·k·(v - Sᵀk)ᵀ and o = Sᵀq (arXiv 2412.06464).

    Columns are grouped by key head: query, key, values, gates, then β and decay of each value head.
    """

    def __init__(self, model: Model, given: GatedDeltaNet) -> None:
        super().__init__()
        self.given = given
        self.into = nn.Linear(model.hidden, given.projected, bias=False)
        self.filters = nn.Parameter(torch.zeros(given.convolved * given.conv))
        self.rates, self.steps = (nn.Parameter(torch.zeros(given.value_heads)) for _ in range(2))
        self.gated = nn.RMSNorm(given.value_dim, eps=EPSILON)
        self.out = nn.Linear(given.values, model.hidden, bias=False)

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
        """`[b, S, H] → [b, S, H]`; positions are those of the recurrence."""
        found: torch.Tensor = self.out(self.mix(self.into(x)))
        return found

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        """From one projection to the other, `[b, S, N] → [b, S, V]`."""
        given, length = self.given, x.shape[1]
        key, value, each = given.key_dim, given.value_dim, given.value_heads // given.key_heads
        grouped = x.view(*x.shape[:2], given.key_heads, -1)
        mixed, gates, betas, decays = torch.split(grouped, [2 * key + each * value, each * value, each, each], dim=-1)
        channels = functional.pad(mixed.flatten(2).transpose(1, 2), (given.conv - 1, 0))
        filters = self.filters.view(-1, 1, given.conv)
        mixed = functional.silu(functional.conv1d(channels, filters, groups=len(filters))).transpose(1, 2)
        mixed = mixed.reshape(*x.shape[:2], given.key_heads, -1)
        queries, keys, values = torch.split(mixed, [key, key, each * value], dim=-1)
        queries, keys = (
            (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6)).repeat_interleave(each, dim=2)
            for one in (queries, keys)
        )
        values = values.reshape(*x.shape[:2], given.value_heads, value)
        betas = betas.flatten(2).sigmoid()
        decays = torch.exp(-self.rates.exp() * functional.softplus(decays.flatten(2) + self.steps))
        state, found = x.new_zeros(len(x), given.value_heads, key, value), []
        for token in range(length):
            state = state * decays[:, token, :, None, None]
            new = values[:, token] - torch.einsum("bhkv,bhk->bhv", state, keys[:, token])
            state = state + torch.einsum("bhk,bhv->bhkv", keys[:, token], new * betas[:, token, :, None])
            found.append(torch.einsum("bhkv,bhk->bhv", state, queries[:, token]) / key**0.5)
        gated: torch.Tensor = self.gated(torch.stack(found, dim=1)) * functional.silu(gates).reshape(values.shape)
        return gated.flatten(2)


class Perceptron(nn.Module):
    """GELU between two linear layers, or SiLU(gate) · up for Llama."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gated = model.gated
        self.fc1 = nn.Linear(model.hidden, model.plain.up_width, bias=model.biases)
        self.fc2 = nn.Linear(model.ffn, model.hidden, bias=model.biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[b, S, H] → [b, S, H]`."""
        up = self.fc1(x)
        if self.gated:
            gate, up = up.unflatten(-1, (-1, 2)).unbind(-1)
            up = functional.silu(gate) * up
        else:
            up = functional.gelu(up)
        found: torch.Tensor = self.fc2(up)
        return found


class Mixture(nn.Module):
    """Experts in place of a perceptron: each token goes to the best of its scores; shared ones see all tokens."""

    def __init__(self, model: Model, given: Experts) -> None:
        super().__init__()
        self.given = given
        # The bias is for the choice alone, and moved by who counts tokens.
        self.router = nn.Linear(model.hidden, given.count, bias=bool(given.score_bias))
        for parameter in self.router.parameters():
            parameter.requires_grad_(parameter.dim() == 2)
        one = model.model_copy(update={"ffn": given.width})
        self.experts = nn.ModuleList(Perceptron(one) for _ in range(given.count))
        wide = model.model_copy(update={"ffn": given.shared_width})
        self.shared = Perceptron(wide) if given.shared_width else None
        self.counts = torch.zeros(given.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[b, S, H] → [b, S, H]`."""
        logits = functional.linear(x, self.router.weight)
        scores = logits.softmax(-1) if self.given.score == "softmax" else logits.sigmoid()
        ranked = scores + self.router.bias if self.given.score_bias else scores
        best = ranked.topk(self.given.per_token).indices
        shares = scores.gather(-1, best)
        means = (scores / scores.sum(-1, keepdim=True)).mean((0, 1))
        # Until someone sets them to zero; the balance is added to the loss by who wants it.
        self.counts = self.counts.to(x) + torch.nn.functional.one_hot(best, self.given.count).sum((0, 1, 2))
        self.balance = (self.counts / self.counts.sum() * means).sum() * self.given.count
        shares = shares / shares.sum(-1, keepdim=True) if self.given.normalized else shares
        total = torch.zeros_like(x) if self.shared is None else self.shared(x)
        for number, expert in enumerate(self.experts):
            share = torch.where(best == number, shares, 0.0).sum(-1, keepdim=True)
            total = total + share * (self.given.scaling or 1.0) * expert(x)
        return total


class Block(nn.Module):
    """Attention, or a gated delta net, and perceptron, each behind a norm and beside a residual."""

    def __init__(self, model: Model, layer: Layer) -> None:
        super().__init__()
        delta = layer.mixer if isinstance(layer.mixer, GatedDeltaNet) else None
        self.mixer = "gdn" if delta else "attention"
        self.add_module(f"{self.mixer}_norm", _norm(model))
        self.add_module(self.mixer, DeltaNet(model, delta) if delta else Attention(model, layer))
        self.mlp_norm = _norm(model)
        self.mlp = Perceptron(model) if layer.experts is None else Mixture(model, layer.experts)

    def forward(self, x: torch.Tensor, turn: torch.Tensor | None) -> torch.Tensor:
        """`[b, S, H] → [b, S, H]`."""
        norm, mixer = self.get_submodule(f"{self.mixer}_norm"), self.get_submodule(self.mixer)
        x = x + mixer(norm(x), turn)
        found: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return found


class Adapter(nn.Module):
    """`scale · B · A` of some outputs of a linear layer, as a hook that adds it; columns: which these are."""

    def __init__(self, linear: nn.Linear, columns: torch.Tensor, rank: int, scale: float) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.randn(rank, linear.in_features))
        self.lora_b = nn.Parameter(torch.zeros(rank, len(columns)))
        self.columns, self.scale = columns, scale

    def add(self, _: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """The layer's output with its own."""
        own = self.scale * (given[0] @ self.lora_a.t()) @ self.lora_b
        return output.index_add(-1, self.columns, own)


def adapt(block: nn.Module, layer: Layer, tuning: Tuning, scale: float) -> None:
    """Put adapters beside the linear layers of a block of attention and a perceptron."""
    heads, dim = layer.kv_heads, layer.head_dim
    each = layer.heads // heads
    grouped = torch.arange(heads * (each + 2) * dim).view(heads, each + 2, dim)
    parts = {"q": grouped[:, :each], "k": grouped[:, each], "v": grouped[:, each + 1]}
    alternating = torch.arange(layer.up_width).view(-1, layer.ups)
    parts |= {name: alternating[:, place] for place, name in enumerate(("gate", "up")[-layer.ups :])}
    for name in ("attention.qkv", "attention.output", "mlp.fc1", "mlp.fc2"):
        linear = block.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        for part in tuning.parts(name):
            columns = parts[part] if part else torch.arange(linear.out_features)
            made = Adapter(linear, columns.flatten(), tuning.rank, scale)
            linear.add_module(part or "whole", made)
            linear.register_forward_hook(made.add)


class Reference(nn.Module):
    """The whole model, from tokens to their loss."""

    def __init__(self, model: Model, adapter_scale: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.embedding = nn.Embedding(model.vocab, model.hidden)
        learned = model.learned_positions
        self.position = nn.Embedding(model.max_sequence_length, model.hidden) if learned else None
        layers = (model.types[number] for number, count in model.runs for _ in range(count))
        self.blocks = nn.ModuleList(Block(model, layer) for layer in layers)
        self.norm = _norm(model)
        self.head = nn.Linear(model.hidden, model.vocab, bias=False)
        self.tie()
        if model.tuning is not None:
            self.requires_grad_(requires_grad=False)
            types = (model.types[number] for number, count in model.runs for _ in range(count))
            for block, layer in zip(self.blocks, types, strict=True):
                adapt(block, layer, model.tuning, adapter_scale)

    def tie(self) -> None:
        """Make embedding and head one parameter where the model says so; again after they were wrapped."""
        if self.model.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of tokens `[b, S]`, in single precision at least."""
        x, turn = self.embedding(tokens), None
        places = torch.arange(tokens.shape[1], device=tokens.device)
        if self.position is not None:
            x = x + self.position(places)
        else:
            turn = turns(places, self.model).to(x.dtype)
        for block in self.blocks:
            x = block(x, turn)
        logits = self.head(self.norm(x)).flatten(0, 1)
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return functional.cross_entropy(wide, targets.flatten())

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy the runtime's parameters, by their names there, into these; matrices are stored transposed here."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(_stored(name, weights[runtime_name(name)]))


class ReferenceStage(nn.Module):
    """An even share of the model's blocks; the first stage with the embedding, the last with norm and head."""

    def __init__(self, whole: Reference, stage: int, stages: int) -> None:
        super().__init__()
        self.model, self.stage = whole.model, stage
        self.first, self.last = stage == 0, stage == stages - 1
        parts = split_layers(whole.model.layers, parts=stages)
        self.blocks = whole.blocks[sum(parts[:stage]) : sum(parts[: stage + 1])]
        self.embedding: nn.Embedding | None = whole.embedding if self.first else None
        self.position: nn.Embedding | None = whole.position if self.first else None
        self.norm: nn.Module | None = whole.norm if self.last else None
        self.head: nn.Linear | None = whole.head if self.last else None

    def shared_table(self) -> torch.Tensor | None:
        """This stage's copy of a tied table."""
        if not self.model.tied_embeddings:
            return None
        holder = self.embedding or self.head
        return None if holder is None else holder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens `[b, S]` or activations `[b, S, H]` to activations, or to logits `[b, S, V]`."""
        places = torch.arange(x.shape[1], device=x.device)
        if self.embedding is not None:
            x = self.embedding(x)
            x = x if self.position is None else x + self.position(places)
        turn = None if self.model.learned_positions else turns(places, self.model).to(x.dtype)
        for block in self.blocks:
            x = block(x, turn)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))

    @staticmethod
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy, in single precision at least."""
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return functional.cross_entropy(wide.flatten(0, 1), targets.flatten())


def runtime_name(name: str) -> str:
    """What the runtime calls a parameter of this model: `blocks.0.mlp.fc1.weight`, `embedding`, `head.norm.bias`."""
    if name in ("embedding.weight", "position.weight", "head.weight"):
        return name.removesuffix(".weight")
    if name.startswith("norm."):
        return f"head.{name}"
    for experts, stored in (("router", "router"), ("experts.", "experts."), ("shared.fc", "shared_fc")):
        name = name.replace(f"mlp.{experts}", f"moe.{stored}")
    for norm in ("attention", "gdn", "mlp"):
        name = name.replace(f"{norm}_norm", f"{norm}.norm")
    return name.replace("gdn.into", "gdn.in").replace(".whole.lora", ".lora")


def _stored(name: str, value: torch.Tensor) -> torch.Tensor:
    """Linear layers keep their weights output first; tables are rows in both."""
    linear = name.startswith("blocks.") and value.dim() == 2
    return value.t() if linear else value


def _norm(model: Model) -> nn.Module:
    kind = nn.LayerNorm if model.family == "gpt" else nn.RMSNorm
    return kind(model.hidden, eps=EPSILON)


def turns(places: torch.Tensor, model: Model) -> torch.Tensor:
    """Cosines and sines of rotary positions, base 10,000, float64 `[2, S, head_dim / 2]`; of the pairs the first turn,
    as many as all layers with attention say."""
    (share,) = {layer.rotary_share for layer in model.types if layer.attention}
    dim = model.head_dim
    rotated = round((1.0 if share is None else share) * dim / 2)
    places = places.double()[:, None]
    angle = places * 10000.0 ** (-torch.arange(rotated, dtype=torch.float64, device=places.device) / max(rotated, 1))
    angle = functional.pad(angle, (0, dim // 2 - rotated))
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Turn the pairs (i, i + dim / 2) of `[.., S, dim]`."""
    first, second = x.chunk(2, dim=-1)
    cosine, sine = turn
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
