"""The 3D-parallel linear layer, forward and backward written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from axonn_tune.program.operations import Phase
from axonn_tune.runtime.chains import Gradients
from axonn_tune.runtime.communicate import Communicator
from axonn_tune.runtime.parameters import Matrix, Vector
from axonn_tune.runtime.settings import Settings


@dataclass
class Linear:
    """`O[M, n] = Σ_output_axis I[M, k] · W[k, n]`, with an optional bias added after the sum."""

    layer: str
    output_axis: str
    input_axis: str
    weight: Matrix
    bias: Vector | None
    communicator: Communicator
    settings: Settings
    after: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor, block: torch.Tensor, phase: Phase) -> torch.Tensor:
        """Product, all-reduce, bias."""
        output = self.communicator.all_reduce(x @ block, self.output_axis, phase, self.layer).wait()
        return output if self.bias is None else output + self.bias.main.to(output.dtype)

    def backward(
        self, x: torch.Tensor, block: torch.Tensor, gradient: torch.Tensor, gradients: Gradients
    ) -> torch.Tensor:
        """Gradient of the input; the weight's is under way when this returns."""
        before = self.communicator.all_reduce(gradient @ block.t(), self.input_axis, "backward", self.layer)
        if "input_gradient" not in self.settings.overlaps:
            before.wait()
        weight_gradient = x.t() @ gradient
        if self.bias is not None:
            self.bias.gradient += gradient.to(self.bias.gradient.dtype).sum(0)
        gradients.reduce(self.weight, weight_gradient, self.layer, self.after)
        return before.wait()
