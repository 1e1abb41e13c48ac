"""One transformer block on one rank: two branches beside the residual stream, forward, repeated and backward.

Letters as in `axonn_tune.program.layers`: M tokens of this rank's micro-batch, or of one half of it where that is
split. Backward is explicit, so that every collective is issued where the schedule has it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import torch

from axonn_tune.runtime.communicator import WeightGather, WeightGathers, WeightGradients
from axonn_tune.runtime.experts import ExpertBranch
from axonn_tune.runtime.modules import (
    Activation,
    Dropout,
    LocalFunction,
    Middles,
    Norm,
    ParallelLinear,
    Result,
    interleave,
)
from axonn_tune.runtime.saved import GatheredWeights, Linear, LocalOutput, SavedActivations


@dataclass
class BlockContext:
    """What backward of a block needs of a micro-batch; parts: the whole, or both halves if it is split.

    Of each part, the activations of the attention branch and of the MLP branch.
    """

    parts: list[tuple[SavedActivations, SavedActivations]]
    weights: GatheredWeights


@dataclass
class ResidualBranch:
    """`x + dropout(output(local(input(norm(x)))))`: the attention half of a block, or its MLP half.

    name: of the local function, as the program has it; repeated: layers that the backward pass repeats.
    """

    norm: Norm
    input: ParallelLinear
    local: LocalFunction
    output: ParallelLinear
    dropout: Dropout
    repeated: frozenset[str]
    name: str

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In forward order."""
        return self.input, self.output

    def forward(
        self, saved: SavedActivations, normal: torch.Tensor, weights: GatheredWeights, *, last: bool, save: bool
    ) -> Generator[None, None, torch.Tensor]:
        """From the norm's output to the branch's, before dropout; `last`: of those that use the weights.

        save: of a part what the backward pass does not repeat.
        """
        middles: Middles = {}
        hidden = yield from self.input.forward(normal, weights.take(self.input, last=last), "forward", middles)
        local = self.local(hidden, "forward")
        output = yield from self.output.forward(local[0], weights.take(self.output, last=last), "forward", middles)
        if not save:
            return output
        saved.middles = {layer: kept for layer, kept in middles.items() if layer not in self.repeated}
        if self.norm.name not in self.repeated and (self.input.needs_input or self.input.layer in self.repeated):
            saved.normal = normal
        if self.name not in self.repeated:
            saved.local = self._needed(local)
        elif self.input.layer not in self.repeated:
            saved.hidden = hidden
        return output

    def recompute(self, saved: SavedActivations, weights: GatheredWeights) -> Generator[None, None, torch.Tensor]:
        """Recompute the forward pass of one part, from its input up to the local function, whose output it returns."""
        normal = self.norm.apply(_present(saved.x), saved.statistics) if saved.normal is None else saved.normal
        weight = weights.take(self.input, last=False)
        hidden = yield from self.input.forward(normal, weight, "recompute", saved.middles)
        saved.normal = normal if self.input.needs_input else None
        if isinstance(self.local, Activation) and self.name not in self.repeated and not self.output.needs_input:
            saved.local = self.local.unread(hidden)
            return saved.local[0]
        local = self.local(hidden, "recompute")
        saved.local = self._needed(local)
        return local[0]

    def _needed(self, local: LocalOutput) -> LocalOutput:
        """What a backward pass needs of it: the output only where the layer behind it does."""
        return local if self.output.needs_input else (local[0].new_empty(0), local[1])

    def keep_for(self, saved: SavedActivations, end: ParallelLinear | None) -> None:
        """Let go of what a backward pass does not need that ends in a layer of this branch, or before it comes here."""
        again = end is self.output and self.input.layer in self.repeated
        if end is None:
            saved.local, saved.middles = None, {}
        if end is self.output and saved.local is not None:
            saved.local = saved.local[0], _unreached
        if end is not self.input and not again:
            saved.normal = None
        if end is None:
            saved.hidden = None
        if saved.normal is not None or not (again or end is self.input):
            saved.x = None

    def _take_local(self, saved: SavedActivations) -> LocalOutput:
        """The local function's output and backward pass, saved or made now; no longer saved afterwards."""
        found = saved.local or self.local(_present(saved.hidden), "recompute")
        saved.local = saved.hidden = None
        return found

    def backward(
        self,
        parts: Sequence[SavedActivations],
        output_gradients: Sequence[torch.Tensor],
        weights: GatheredWeights,
        gradients: WeightGradients,
        end: ParallelLinear | None = None,
    ) -> list[torch.Tensor]:
        """Gradient of the residual stream that the branch reads, of each part; none if the pass ends in a layer of it,
        of which only adapters have gradients then."""
        weight = weights.take(self.output, last=True)
        values, backwards = map(list, zip(*(self._take_local(part) for part in parts), strict=True))
        part_gradients = [self.dropout(one, part.tokens) for one, part in zip(output_gradients, parts, strict=True)]
        middles = [part.middles for part in parts]
        if end is self.output:
            self.output.adapters_backward(values, part_gradients, middles)
            return []
        part_gradients = self.output.backward(values, weight, part_gradients, gradients, middles)
        # Freed after the last read: an MLP's arrays are the largest.
        del values, weight
        part_gradients = [backwards.pop(0)(part_gradients.pop(0)) for _ in parts]
        weight = weights.take(self.input, last=True)
        normals = [
            self.norm.apply(_present(part.x), part.statistics) if part.normal is None else part.normal
            for part in parts
            if self.input.needs_input
        ]
        if end is self.input:
            self.input.adapters_backward(normals, part_gradients, middles)
            return []
        inputs = [(_present(part.x), part.statistics) for part in parts]
        part_gradients = self.input.backward(normals, weight, part_gradients, gradients, middles)
        return [
            self.norm.backward(*read, gradient, one)
            for one, read, gradient in zip(output_gradients, inputs, part_gradients, strict=True)
        ]


@dataclass
class TransformerBlock:
    """One transformer block.

    full: the backward pass begins with the whole forward pass, up to the activation. end: the first layer with adapters
    of the first block that has some, whose input has no gradient.
    """

    number: int
    attention: ResidualBranch
    mlp: ResidualBranch | ExpertBranch
    full: bool
    end: ParallelLinear | None = None
    kept: GatheredWeights | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """In forward order."""
        return *self.attention.linears, *self.mlp.linears

    @property
    def repeats_mlp(self) -> bool:
        """Whether the backward pass begins with the MLP, whose first gathered weight stays."""
        return isinstance(self.mlp, ResidualBranch) and self.mlp.input.layer in self.mlp.repeated

    def backward_gathers(self) -> Iterator[WeightGather]:
        """Weight gathers of the backward pass, in order."""
        first = self.mlp.linears[0]
        again = [one for one in self.linears if self.full or (self.repeats_mlp and one is first)]
        yield from ((one.weight, "recompute", one.layer) for one in again)
        held = {one.layer for one in again}
        begin = 0 if self.end is None else self.linears.index(self.end)
        yield from ((one.weight, "backward", one.layer) for one in self.linears[begin:][::-1] if one.layer not in held)

    def forward(
        self,
        parts: Sequence[torch.Tensor],
        tokens: Sequence[torch.Tensor],
        gathers: WeightGathers,
        *,
        keep_weights: bool,
    ) -> tuple[list[torch.Tensor], BlockContext]:
        """`[M, H_y] → [M, H_y]` of each part, and what backward needs. `tokens`: numbers `[M]` of each part's."""
        weights = GatheredWeights(gathers)
        passes = [
            self._forward(x, numbers, weights, last=number == len(parts) - 1 and not keep_weights)
            for number, (x, numbers) in enumerate(zip(parts, tokens, strict=True))
        ]
        outputs, saved = zip(*interleave(passes), strict=True)
        if isinstance(self.mlp, ExpertBranch):
            self.mlp.count([mlp for _, mlp in saved])
        if keep_weights:
            if self.kept is None or not self.kept.users:
                self.kept = weights
            else:
                # Earlier micro-batches' own copies go.
                self.kept.held = weights.held
                self.kept.users += 1
            weights = self.kept
        return list(outputs), BlockContext(list(saved), weights)

    def _forward(
        self, x: torch.Tensor, tokens: torch.Tensor, weights: GatheredWeights, *, last: bool
    ) -> Generator[None, None, tuple[torch.Tensor, tuple[SavedActivations, SavedActivations]]]:
        """One part; `last`: of those that use the weights."""
        first, second = self.attention, self.mlp
        _, normal, statistics = first.norm.forward(x)
        attention = SavedActivations(tokens, statistics, x)
        output = yield from first.forward(attention, normal, weights, last=last, save=not self.full)
        middle, mlp_normal, statistics = second.norm.forward(first.dropout(output, tokens), x)
        del output  # The norm may have returned the sum in another tensor.
        mlp = SavedActivations(tokens, statistics)
        mlp.x = None if self.full else middle
        down = yield from second.forward(mlp, mlp_normal, weights, last=last, save=not self.full)
        if self.end is not None and not self.full and isinstance(second, ResidualBranch):
            reached = self.end in second.linears
            first.keep_for(attention, None if reached else self.end)
            if reached:
                second.keep_for(mlp, self.end)
        return second.dropout(down, tokens).add_(middle), (attention, mlp)

    def _recompute(
        self, part: tuple[SavedActivations, SavedActivations], weights: GatheredWeights
    ) -> Generator[None, None, None]:
        """Recompute the forward pass of one part up to the activation; the gathered weights stay for backward."""
        attention, mlp = part
        core = yield from self.attention.recompute(attention, weights)
        weight = weights.take(self.attention.output, last=False)
        output = yield from self.attention.output.forward(core, weight, "recompute", attention.middles)
        mlp.x = self.attention.dropout(output, attention.tokens).add_(_present(attention.x))
        product = yield from self.mlp.recompute(mlp, weights)
        if isinstance(self.mlp, ResidualBranch) and self.mlp.output.adapters:
            mlp.middles[self.mlp.output.layer] = self.mlp.output.middles_of(product)
        weights.take(self.mlp.linears[-1], last=False)

    def backward(
        self, context: BlockContext, output_gradients: Sequence[torch.Tensor], gradients: WeightGradients
    ) -> list[torch.Tensor]:
        """Gradient of each part's input; none where it has none."""
        weights = context.weights
        if self.full:
            interleave([self._recompute(part, weights) for part in context.parts])
        elif self.repeats_mlp:
            interleave([self.mlp.recompute(saved, weights) for _, saved in context.parts])
        attention, mlp = zip(*context.parts, strict=True)
        if isinstance(self.mlp, ResidualBranch):
            middle = self.mlp.backward(mlp, output_gradients, weights, gradients, self.end)
        else:
            middle = self.mlp.backward(mlp, output_gradients, weights, gradients)
        result = self.attention.backward(attention, middle, weights, gradients, self.end) if middle else []
        weights.users -= 1
        return result


def _unreached(gradient: torch.Tensor) -> torch.Tensor:
    """In place of a function's backward pass."""
    raise AssertionError("a backward pass ends before it")


def _present(saved: Result | None) -> Result:
    """The saved or recomputed array."""
    assert saved is not None, "saved in forward, or just recomputed"
    return saved
