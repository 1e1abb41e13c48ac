"""The 3D-parallel linear layer, forward and backward written out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from axonn_tune.program.operations import Phase
from axonn_tune.runtime.chains import Gradients
from axonn_tune.runtime.communicate import Communicator
from axonn_tune.runtime.parameters import Matrix, Vector
from axonn_tune.runtime.settings import Settings

Result = TypeVar("Result")


@dataclass
class Linear:
    """`O[M, n] = Σ_output_axis I[M, k] · W[k, n]`, with an optional bias added after the sum.

    Backward takes the parts of a micro-batch together: their weight gradients are one.
    """

    layer: str
    output_axis: str
    input_axis: str
    weight: Matrix
    bias: Vector | None
    communicator: Communicator
    settings: Settings
    after: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor, block: torch.Tensor, phase: Phase) -> Generator[None, None, torch.Tensor]:
        """`I[M, k] → O[M, n]`: product, all-reduce, bias.

        Yields while the all-reduce is under way, so that another part may go on.
        """
        pending = self.communicator.all_reduce(x @ block, self.output_axis, phase, self.layer)
        if "output" not in self.settings.overlaps:
            pending.wait()
        yield
        output = pending.wait()
        return output if self.bias is None else output.add_(self.bias.value)

    def backward(
        self,
        inputs: Sequence[torch.Tensor],
        block: torch.Tensor,
        output_gradients: Sequence[torch.Tensor],
        gradients: Gradients,
    ) -> list[torch.Tensor]:
        """`dI[M, k] = Σ_input_axis dO · Wᵀ` of each part, from its `I[M, k]` and `dO[M, n]`.

        `dW[k, n] = Iᵀ · dO` of all parts together is under way when this returns.
        """
        before = []
        for gradient in output_gradients:
            pending = self.communicator.all_reduce(gradient @ block.t(), self.input_axis, "backward", self.layer)
            if "input_gradient" not in self.settings.overlaps:
                pending.wait()
            before.append(pending)
        weight_gradient = inputs[0].t() @ output_gradients[0]
        for x, gradient in zip(inputs[1:], output_gradients[1:], strict=True):
            weight_gradient.addmm_(x.t(), gradient)
        if self.bias is not None:
            for gradient in output_gradients:
                self.bias.gradient += gradient.sum(0, dtype=self.bias.gradient.dtype)
        gradients.reduce(self.weight, weight_gradient, self.layer, self.after)
        return [pending.wait() for pending in before]


def together(passes: Sequence[Generator[None, None, Result]]) -> list[Result]:
    """Results of passes that run in turn: each goes on until it yields, then the next."""
    results: dict[int, Result] = {}
    while len(results) < len(passes):
        for number, one in enumerate(passes):
            if number in results:
                continue
            try:
                next(one)
            except StopIteration as end:
                results[number] = end.value
    return [results[number] for number in range(len(passes))]
