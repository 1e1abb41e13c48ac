"""AdamW on each rank's shards, with the gradient norm of the whole model.

Weight decay acts on every matrix, tables included (as in nanoGPT and Megatron-LM), and on no vector.
Padded rows start at zero, get no gradient and so stay zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import prod

import torch

from axonn_tune.errors import TrainingFailedError
from axonn_tune.grid import AXES
from axonn_tune.program.tables import WORLD_AXES
from axonn_tune.runtime.communicate import Communicator
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.parameters import Matrix, Store, Vector
from axonn_tune.specs import launch

Parameter = Matrix | Vector


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step saw: mean loss, gradient norm before clipping, learning rate."""

    loss: float
    gradient_norm: float
    learning_rate: float


@dataclass(frozen=True)
class Moments:
    """AdamW's state of one parameter: running means of its gradient and of the gradient's square."""

    first: torch.Tensor
    second: torch.Tensor


def learning_rate(options: launch.Optimizer, step: int) -> float:
    """Rate of a step, counted from 0: linear from 0 to the peak at the last warm-up step, then half a cosine."""
    done = step + 1
    if done <= options.warmup_steps:
        return options.learning_rate * done / options.warmup_steps
    lowest, span = options.minimum_learning_rate, options.decay_steps - options.warmup_steps
    progress = min((done - options.warmup_steps) / span, 1.0) if span > 0 else 1.0
    return lowest + 0.5 * (1.0 + math.cos(math.pi * progress)) * (options.learning_rate - lowest)


def parameter_name(parameter: Parameter) -> str:
    """The same on every grid."""
    return parameter.layout.name if isinstance(parameter, Matrix) else parameter.name


def copies(parameter: Parameter, mesh: Mesh) -> int:
    """How many ranks of the world hold the same elements of a parameter."""
    split: set[str | None] = {parameter.axis} if isinstance(parameter, Vector) else {"z", parameter.layout.column_axis}
    if isinstance(parameter, Matrix):
        split |= set(parameter.layout.row_axes)
    return prod(mesh.size(axis) for axis in AXES if axis not in split)


class AdamW:
    """AdamW over a store; gradients are read from the store and zeroed after each step."""

    def __init__(self, store: Store, communicator: Communicator, options: launch.Optimizer) -> None:
        self._communicator, self._options = communicator, options
        self.parameters: list[Parameter] = [*store.matrices, *store.vectors]
        self._copies = [copies(parameter, communicator.mesh) for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.main.grad = parameter.gradient
        groups = [
            {"params": [one.main for one in store.matrices], "weight_decay": options.weight_decay},
            {"params": [one.main for one in store.vectors], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(
            groups,
            lr=options.learning_rate,
            betas=options.betas,
            eps=options.eps,
            fused=store.device.type == "cuda",
            foreach=store.device.type == "cpu",
        )
        self._prepare_state()

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far."""
        first = self._adam.state[self.parameters[0].main]["step"]
        return int(first.item())

    @steps_done.setter
    def steps_done(self, steps: int) -> None:
        for parameter in self.parameters:
            self._adam.state[parameter.main]["step"].fill_(steps)

    def moments(self, parameter: Parameter) -> Moments:
        """The moments of a parameter: the tensors themselves, to save or to load into."""
        state = self._adam.state[parameter.main]
        return Moments(state["exp_avg"], state["exp_avg_sq"])

    def step(self, loss: torch.Tensor) -> StepResult:
        """Combine loss and gradient norm, clip, update, zero the gradients.

        `loss` is the sum of this rank's micro-batches, equal on all ranks of a group over x and y.
        TrainingFailedError, on all ranks alike and before anything is changed, if either is not finite.
        """
        step = self.steps_done
        square, mean_loss = self.sums(loss).tolist()
        norm = math.sqrt(square) if square >= 0.0 else math.nan
        if not (math.isfinite(mean_loss) and math.isfinite(norm)):
            raise TrainingFailedError(
                f"step {step + 1}: loss {mean_loss}, gradient norm {norm}; the weights are those of step {step}"
            )
        limit = self._options.gradient_clip_norm
        if limit is not None and norm > limit:
            torch._foreach_mul_([parameter.gradient for parameter in self.parameters], limit / norm)
        rate = learning_rate(self._options, step)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        torch._foreach_zero_([parameter.gradient for parameter in self.parameters])
        return StepResult(mean_loss, norm, rate)

    def sums(self, loss: torch.Tensor) -> torch.Tensor:
        """Squared norm of the whole gradient, and the mean loss, float64 `[2]`.

        One sum over all ranks; what several of them hold is divided by how many.
        """
        squares = [
            torch.linalg.vector_norm(parameter.gradient, dtype=torch.float64) ** 2 / held
            for parameter, held in zip(self.parameters, self._copies, strict=True)
        ]
        mesh = self._communicator.mesh
        both = torch.stack([torch.stack(squares).sum(), loss.double() / (mesh.size("x") * mesh.size("y"))])
        return self._communicator.all_reduce(both, WORLD_AXES, "step", "gradient_norm").wait()

    def _prepare_state(self) -> None:
        """Make the moments now, where torch would at the first step: a checkpoint can then be loaded into them."""
        for parameter in self.parameters:
            main = parameter.main
            # A fused step wants its counter on the device, the others on the host.
            device = main.device if main.device.type == "cuda" else torch.device("cpu")
            self._adam.state[main] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(main),
                "exp_avg_sq": torch.zeros_like(main),
            }
