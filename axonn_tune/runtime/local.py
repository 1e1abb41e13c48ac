"""What a rank computes alone between two collectives: attention on its heads, the activation, dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as functional

from axonn_tune.runtime import initial
from axonn_tune.runtime.settings import Settings
from axonn_tune.specs.model import Model

Function: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Compiled = TypeVar("Compiled", bound=Callable[..., object])


def compiled(function: Compiled, settings: Settings) -> Compiled:
    """The function by torch.compile, if the settings want that: what it does element by element becomes one kernel."""
    return cast(Compiled, torch.compile(function, dynamic=False)) if settings.compile else function


@dataclass
class Local:
    """A local function with its own small graph, for its gradient."""

    inputs: torch.Tensor
    output: torch.Tensor

    @classmethod
    def run(cls, function: Function, x: torch.Tensor) -> Local:
        """Run a function of one tensor and keep its graph."""
        with torch.enable_grad():
            inputs = x.detach().requires_grad_()
            return cls(inputs, function(inputs))

    @property
    def value(self) -> torch.Tensor:
        """The output, without its graph."""
        return self.output.detach()

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient of the input; the graph is gone afterwards."""
        (found,) = torch.autograd.grad(self.output, self.inputs, gradient)
        return found


@dataclass
class Attention:
    """Softmax attention on this rank's heads; qkv columns are grouped by key head: queries, key, value.

    core: what turns queries, keys and values `[b, heads, S, head_dim]` into outputs; turn: rotary positions.
    """

    model: Model
    heads: int
    kv_heads: int
    sequence: int
    core: Callable[..., torch.Tensor] = functional.scaled_dot_product_attention
    turn: Function = field(default_factory=lambda: rotate)

    def __call__(self, qkv: torch.Tensor) -> torch.Tensor:
        """`[M, N_x] → [M, Q_x]`, causal within each sequence."""
        dim, each = self.model.head_dim, self.heads // self.kv_heads
        grouped = qkv.view(-1, self.sequence, self.kv_heads, each + 2, dim).transpose(1, 2)
        grouped_queries, keys, values = torch.split(grouped, [each, 1, 1], dim=-2)
        queries = grouped_queries.transpose(2, 3).reshape(-1, self.heads, self.sequence, dim)
        keys, values = keys.squeeze(-2), values.squeeze(-2)
        if not self.model.learned_positions:
            queries, keys = self.turn(queries), self.turn(keys)
        if each > 1:
            keys, values = (one.repeat_interleave(each, dim=1) for one in (keys, values))
        output = self.core(queries, keys, values, is_causal=True)
        return output.transpose(1, 2).reshape(-1, self.heads * dim)


def attention_on(model: Model, settings: Settings, *, sequence: int, shares: int) -> Attention:
    """Attention on one of `shares` equal shares of the heads, as training has it."""
    return Attention(
        *(model, model.heads // shares, model.kv_heads // shares, sequence),
        core=attention_core(settings),
        turn=compiled(rotate, settings),
    )


def attention_core(settings: Settings) -> Callable[..., torch.Tensor]:
    """Scaled dot-product attention; on CPUs at least in fp32, since bf16's backward pass is five times slower there."""
    if settings.device.type == "cpu" and settings.compute.itemsize < torch.float32.itemsize:
        return _wide_core
    return functional.scaled_dot_product_attention


def _wide_core(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, is_causal: bool) -> torch.Tensor:
    wide = functional.scaled_dot_product_attention(queries.float(), keys.float(), values.float(), is_causal=is_causal)
    return wide.to(queries.dtype)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions on `[.., S, head_dim]`, halves paired, base 10,000 (Su et al. 2021, arXiv 2104.09864)."""
    sequence, dim = x.shape[-2:]
    frequency = 10000.0 ** (-torch.arange(0, dim, 2, device=x.device, dtype=torch.float64) / dim)
    angle = torch.arange(sequence, device=x.device, dtype=torch.float64)[:, None] * frequency
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


@dataclass
class Dropout:
    """Sets a share of elements to zero and scales the others up; which ones follows from their place in the run.

    key: two words that name the stream, a tensor because the compiler would make a kernel for each pair of numbers, on
    the device because copying it there would hold up the host; columns: those of the tensor's hidden dim, `width` wide,
    that this rank has. Element (token, feature) comes from counter `token · width + feature`, tokens being counted
    through the whole run: the same on every grid, in recomputation and in backward, and nothing is kept.
    """

    share: float
    key: torch.Tensor
    columns: range
    width: int
    scaled: Callable[..., torch.Tensor] = field(default_factory=lambda: dropped)

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """`[M, H_y]` of the given token numbers `[M]`; its own gradient, too, as it only scales."""
        if not self.share:
            return x
        return self.scaled(x, tokens, self.key, self.share, self.columns.start, self.width)


def dropped(
    x: torch.Tensor, tokens: torch.Tensor, key: torch.Tensor, share: float, start: int, width: int
) -> torch.Tensor:
    """Elements of `x[M, columns]` times 0 or `1 / (1 - share)`, by Philox of their counters under `key[2]`."""
    columns = torch.arange(start, start + x.shape[1], device=x.device, dtype=torch.int64)
    word, _ = initial.philox(tokens[:, None] * width + columns, (key[0], key[1]))
    keep = (word >= int(share * 2.0**32)).to(x.dtype)
    return x * keep / (1.0 - share)


def activation(settings: Settings, *, gated: bool) -> Function:
    """The MLP's activation of `[M, G_x]`."""
    return compiled(partial(activate, gated=gated), settings)


def activate(x: torch.Tensor, *, gated: bool) -> torch.Tensor:
    """GELU, or SiLU(gate) · up with gate and up alternating along the columns."""
    if not gated:
        return functional.gelu(x)
    pairs = x.view(x.shape[0], -1, 2)
    return functional.silu(pairs[..., 0]) * pairs[..., 1]
