"""One transformer block: forward and backward of every part, in the order the program lists them.

Letters as in `axonn_tune.program.layers`: M tokens of this rank's micro-batch, `A[M, K_y]` a tensor
whose dim K is split over axis y. Backward is explicit, so that every collective is issued where the
schedule has it; only the attention core and the activation use autograd, on local tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from axonn_tune.runtime.chains import Gathers, Gradients
from axonn_tune.runtime.linear import Linear
from axonn_tune.runtime.local import Attention, Local, activate
from axonn_tune.runtime.norm import Norm
from axonn_tune.runtime.settings import Settings


@dataclass
class Saved:
    """What one block keeps from forward to backward."""

    x: torch.Tensor
    first: tuple[torch.Tensor, torch.Tensor]
    second: tuple[torch.Tensor, torch.Tensor]
    middle: torch.Tensor | None = None
    qkv: torch.Tensor | None = None
    up: torch.Tensor | None = None
    attention: Local | None = None
    activation: Local | None = None
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    blocks: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Block:
    """One transformer block."""

    number: int
    norms: tuple[Norm, Norm]
    qkv: Linear
    output: Linear
    up: Linear
    down: Linear
    attention: Attention
    gated: bool
    settings: Settings

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """In forward order."""
        return self.qkv, self.output, self.up, self.down

    def _act(self, x: torch.Tensor) -> torch.Tensor:
        return activate(x, gated=self.gated)

    def forward(self, x: torch.Tensor, gathers: Gathers, *, keep_weights: bool) -> tuple[torch.Tensor, Saved]:
        """`[M, H_y] → [M, H_y]`, and what backward needs."""
        recompute, blocks = self.settings.recompute, {}

        def take(linear: Linear) -> torch.Tensor:
            block = gathers.take(linear.weight)
            if keep_weights:
                blocks[linear.layer] = block
            return block

        first = self.norms[0].statistics(x)
        inner = self.norms[0].apply(x, first)
        qkv = self.qkv.forward(inner, take(self.qkv), "forward")
        attention = Local.run(self.attention, qkv)
        middle = x + self.output.forward(attention.value, take(self.output), "forward")
        second = self.norms[1].statistics(middle)
        outer = self.norms[1].apply(middle, second)
        up = self.up.forward(outer, take(self.up), "forward")
        activation = Local.run(self._act, up)
        result = middle + self.down.forward(activation.value, take(self.down), "forward")
        saved = Saved(x, first, second, blocks=blocks)
        if recompute != "full":
            saved.middle, saved.qkv, saved.up = middle, qkv, up
        if recompute == "none":
            saved.attention, saved.activation, saved.norms = attention, activation, (inner, outer)
        return result, saved

    def _recompute(self, saved: Saved, take: Callable[[Linear], torch.Tensor]) -> None:
        """The forward pass again up to the activation; the gathered weights stay for backward."""
        inner = self.norms[0].apply(saved.x, saved.first)
        saved.qkv = self.qkv.forward(inner, take(self.qkv), "recompute")
        saved.attention = Local.run(self.attention, saved.qkv)
        saved.middle = saved.x + self.output.forward(saved.attention.value, take(self.output), "recompute")
        outer = self.norms[1].apply(saved.middle, saved.second)
        saved.up = self.up.forward(outer, take(self.up), "recompute")
        saved.activation = Local.run(self._act, saved.up)
        saved.norms = (inner, outer)
        take(self.down)

    def backward(self, saved: Saved, gradient: torch.Tensor, gathers: Gathers, gradients: Gradients) -> torch.Tensor:
        """Gradient of the block's input."""

        def take(linear: Linear) -> torch.Tensor:
            if linear.layer not in saved.blocks:
                saved.blocks[linear.layer] = gathers.take(linear.weight)
            return saved.blocks[linear.layer]

        if self.settings.recompute == "full":
            self._recompute(saved, take)
        assert saved.middle is not None, "saved in forward, or just recomputed"
        assert saved.qkv is not None, "saved in forward, or just recomputed"
        assert saved.up is not None, "saved in forward, or just recomputed"
        weight = take(self.down)
        activation = saved.activation or Local.run(self._act, saved.up)
        step = activation.backward(self.down.backward(activation.value, weight, gradient, gradients))
        weight = take(self.up)
        outer = saved.norms[1] if saved.norms else self.norms[1].apply(saved.middle, saved.second)
        step = self.up.backward(outer, weight, step, gradients)
        gradient = gradient + self.norms[1].backward(saved.middle, saved.second, step)
        weight = take(self.output)
        attention = saved.attention or Local.run(self.attention, saved.qkv)
        step = attention.backward(self.output.backward(attention.value, weight, gradient, gradients))
        weight = take(self.qkv)
        inner = saved.norms[0] if saved.norms else self.norms[0].apply(saved.x, saved.first)
        step = self.qkv.backward(inner, weight, step, gradients)
        return gradient + self.norms[0].backward(saved.x, saved.first, step)
