"""One transformer block: forward and backward of every part, in the order the program lists them.

Letters as in `axonn_tune.program.layers`: M tokens of this rank's micro-batch, or of one half of it
where that is split, `A[M, K_y]` a tensor whose dim K is split over axis y. Backward is explicit, so that
every collective is issued where the schedule has it; only the attention core and the activation use
autograd, on local tensors.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch

from axonn_tune.runtime.chains import Gathers, Gradients
from axonn_tune.runtime.linear import Linear, Result, together
from axonn_tune.runtime.local import Attention, Dropout, Function, Local
from axonn_tune.runtime.norm import Norm
from axonn_tune.runtime.settings import Settings


@dataclass
class Weights:
    """Gathered weights of one block in one micro-batch: gathered when first asked for, held until last asked for."""

    gathers: Gathers
    held: dict[str, torch.Tensor] = field(default_factory=dict)

    def take(self, linear: Linear, *, last: bool) -> torch.Tensor:
        """The gathered block of a layer's weight."""
        if linear.layer not in self.held:
            self.held[linear.layer] = self.gathers.take(linear.weight)
        return self.held.pop(linear.layer) if last else self.held[linear.layer]


@dataclass
class Saved:
    """What one part of a micro-batch keeps of a block from forward to backward.

    x, middle: residual stream `[M, H_y]` at the start and after attention; tokens: their numbers `[M]`, for dropout;
    first, second: statistics of the norms; norms: their outputs `[M, H_y]`; qkv: `[M, N_x]`; up: `[M, G_x]`.
    """

    x: torch.Tensor
    tokens: torch.Tensor
    first: tuple[torch.Tensor, torch.Tensor]
    second: tuple[torch.Tensor, torch.Tensor] | None = None
    middle: torch.Tensor | None = None
    qkv: torch.Tensor | None = None
    up: torch.Tensor | None = None
    attention: Local | None = None
    activation: Local | None = None
    norms: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass
class Passed:
    """What a block keeps of a micro-batch from forward to backward."""

    parts: list[Saved]
    weights: Weights


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
    activation: Function
    dropouts: tuple[Dropout, Dropout]
    settings: Settings

    @property
    def linears(self) -> tuple[Linear, Linear, Linear, Linear]:
        """In forward order."""
        return self.qkv, self.output, self.up, self.down

    def forward(
        self, parts: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor], gathers: Gathers, *, keep_weights: bool
    ) -> tuple[list[torch.Tensor], Passed]:
        """`[M, H_y] → [M, H_y]` of each part, and what backward needs. `tokens`: numbers `[M]` of each part's."""
        weights = Weights(gathers)
        passes = [
            self._forward(x, numbers, weights, last=number == len(parts) - 1 and not keep_weights)
            for number, (x, numbers) in enumerate(zip(parts, tokens, strict=True))
        ]
        outputs, saved = zip(*together(passes), strict=True)
        return list(outputs), Passed(list(saved), weights)

    def _forward(
        self, x: torch.Tensor, tokens: torch.Tensor, weights: Weights, *, last: bool
    ) -> Generator[None, None, tuple[torch.Tensor, Saved]]:
        """One part; `last`: of those that use the weights."""
        inner, first = self.norms[0].forward(x)
        saved = Saved(x, tokens, first)
        qkv = yield from self.qkv.forward(inner, weights.take(self.qkv, last=last), "forward")
        attention = Local.run(self.attention, qkv)
        output = yield from self.output.forward(attention.value, weights.take(self.output, last=last), "forward")
        middle = self.dropouts[0](output, tokens).add_(x)
        outer, saved.second = self.norms[1].forward(middle)
        up = yield from self.up.forward(outer, weights.take(self.up, last=last), "forward")
        activation = Local.run(self.activation, up)
        down = yield from self.down.forward(activation.value, weights.take(self.down, last=last), "forward")
        if self.settings.recompute != "full":
            saved.middle, saved.qkv, saved.up = middle, qkv, up
        if self.settings.recompute == "none":
            saved.attention, saved.activation, saved.norms = attention, activation, (inner, outer)
        return self.dropouts[1](down, tokens).add_(middle), saved

    def _recompute(self, saved: Saved, weights: Weights) -> Generator[None, None, None]:
        """The forward pass of one part again up to the activation; the gathered weights stay for backward."""
        inner = self.norms[0].apply(saved.x, saved.first)
        saved.qkv = yield from self.qkv.forward(inner, weights.take(self.qkv, last=False), "recompute")
        saved.attention = Local.run(self.attention, saved.qkv)
        weight = weights.take(self.output, last=False)
        output = yield from self.output.forward(saved.attention.value, weight, "recompute")
        saved.middle = self.dropouts[0](output, saved.tokens).add_(saved.x)
        assert saved.second is not None, "statistics are always saved"
        outer = self.norms[1].apply(saved.middle, saved.second)
        saved.up = yield from self.up.forward(outer, weights.take(self.up, last=False), "recompute")
        saved.activation = Local.run(self.activation, saved.up)
        saved.norms = (inner, outer)
        weights.take(self.down, last=False)

    def backward(
        self, passed: Passed, output_gradients: Sequence[torch.Tensor], gradients: Gradients
    ) -> list[torch.Tensor]:
        """Gradient of each part's input."""
        weights = passed.weights
        if self.settings.recompute == "full":
            together([self._recompute(part, weights) for part in passed.parts])
        middle = self._mlp_backward(passed.parts, output_gradients, weights, gradients)
        return self._attention_backward(passed.parts, middle, weights, gradients)

    def _mlp_backward(
        self, parts: list[Saved], output_gradients: Sequence[torch.Tensor], weights: Weights, gradients: Gradients
    ) -> list[torch.Tensor]:
        """Gradient of what the second half of the block begins with."""
        weight = weights.take(self.down, last=True)
        activations = [part.activation or Local.run(self.activation, _present(part.up)) for part in parts]
        part_gradients = [self.dropouts[1](one, part.tokens) for one, part in zip(output_gradients, parts, strict=True)]
        part_gradients = self.down.backward([one.value for one in activations], weight, part_gradients, gradients)
        part_gradients = [one.backward(gradient) for one, gradient in zip(activations, part_gradients, strict=True)]
        weight = weights.take(self.up, last=True)
        middles = [(_present(part.middle), _present(part.second)) for part in parts]
        outers = [
            part.norms[1] if part.norms else self.norms[1].apply(*middle)
            for part, middle in zip(parts, middles, strict=True)
        ]
        part_gradients = self.up.backward(outers, weight, part_gradients, gradients)
        return [
            self.norms[1].backward(*middle, gradient).add_(one)
            for one, middle, gradient in zip(output_gradients, middles, part_gradients, strict=True)
        ]

    def _attention_backward(
        self, parts: list[Saved], output_gradients: Sequence[torch.Tensor], weights: Weights, gradients: Gradients
    ) -> list[torch.Tensor]:
        """Gradient of what the block begins with."""
        weight = weights.take(self.output, last=True)
        attentions = [part.attention or Local.run(self.attention, _present(part.qkv)) for part in parts]
        part_gradients = [self.dropouts[0](one, part.tokens) for one, part in zip(output_gradients, parts, strict=True)]
        part_gradients = self.output.backward([one.value for one in attentions], weight, part_gradients, gradients)
        part_gradients = [one.backward(gradient) for one, gradient in zip(attentions, part_gradients, strict=True)]
        weight = weights.take(self.qkv, last=True)
        inners = [part.norms[0] if part.norms else self.norms[0].apply(part.x, part.first) for part in parts]
        part_gradients = self.qkv.backward(inners, weight, part_gradients, gradients)
        return [
            self.norms[0].backward(part.x, part.first, gradient).add_(one)
            for one, part, gradient in zip(output_gradients, parts, part_gradients, strict=True)
        ]


def _present(saved: Result | None) -> Result:
    """What forward has saved, or recomputation just made."""
    assert saved is not None, "saved in forward, or just recomputed"
    return saved
