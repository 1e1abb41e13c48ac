"""AdamW and others on each rank's shards, with the gradient norm of the whole model.

Weight decay acts on every matrix, embeddings included (as in nanoGPT and Megatron-LM), and on no vector.
Padded rows start at zero, get no gradient and so stay zero.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from math import prod

import torch
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from axonn_tune.errors import TrainingFailedError
from axonn_tune.frameworks.optimizers import ADAMW, optimizers
from axonn_tune.grid import WORLD as WORLD_AXES
from axonn_tune.grid import axes_of_ranks
from axonn_tune.program.inputs import EXPERTS
from axonn_tune.program.whole import LAYER
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.orthogonal import Orthogonalizer
from axonn_tune.runtime.parameters import Bucket, Matrix, Parameter, ParameterStore, Vector
from axonn_tune.specs import launch


@dataclass(frozen=True)
class StepResult:
    """Numbers of one optimizer step: mean loss, gradient norm before clipping, learning rate."""

    loss: float
    gradient_norm: float
    learning_rate: float


def learning_rate(options: launch.Optimizer, step: int) -> float:
    """Rate of a step, counted from 0: linear from 0 to the peak at the last warm-up step, then half a cosine."""
    done = step + 1
    if done <= options.warmup_steps:
        return options.learning_rate * done / options.warmup_steps
    lowest, span = options.minimum_learning_rate, options.decay_steps - options.warmup_steps
    progress = min((done - options.warmup_steps) / span, 1.0) if span > 0 else 1.0
    return lowest + 0.5 * (1.0 + math.cos(math.pi * progress)) * (options.learning_rate - lowest)


def replicas(parameter: Parameter, bucket: Bucket, mesh: Mesh) -> int:
    """How many ranks of the world update the same elements of a parameter."""
    split = bucket.split_axes(parameter)
    return bucket.copies * prod(mesh.size(axis) for axis in axes_of_ranks(split) if axis not in split)


def nesterov_(gradient: torch.Tensor, momentum: torch.Tensor, options: launch.Optimizer) -> torch.Tensor:
    """The gradient on its way to its running mean, which takes it in (torch.optim.Muon)."""
    momentum.lerp_(gradient, 1.0 - options.momentum)
    return gradient.lerp_(momentum, options.momentum)


def heavy_ball(gradient: torch.Tensor, momentum: torch.Tensor, options: launch.Optimizer) -> torch.Tensor:
    """Of SGD: the sum of gradients, each step before counting less."""
    return momentum.mul_(options.momentum).add_(gradient)


def signs(gradient: torch.Tensor, momentum: torch.Tensor, options: launch.Optimizer) -> torch.Tensor:
    """Of Lion (arXiv 2302.06675, algorithm 2): signs of the gradient on its way to its running mean."""
    first, second = options.betas
    update = gradient.lerp(momentum, first).sign_()
    momentum.lerp_(gradient, 1.0 - second)
    return update


UPDATES = {"sgd": heavy_ball, "lion": signs}
"""What an optimizer of one state subtracts, from gradient and state."""
MUON = "muon"
BLOCKS = ("block", EXPERTS)
"""Buckets with matrices of blocks."""


class ShardedOptimizer:
    """An optimizer over a store's buckets; gradients are read from them and zeroed after each step.

    One that takes matrices of blocks as wholes leaves all else to AdamW; its iterations are in the type `compute`.
    """

    def __init__(
        self,
        store: ParameterStore,
        communicator: Communicator,
        options: launch.Optimizer,
        *,
        compute: torch.dtype | None = None,
    ) -> None:
        self._communicator, self._options, self._compute = communicator, options, compute or store.dtype
        self.buckets, self.device = store.buckets, store.device
        self._steps_done = 0
        known = optimizers()
        for bucket in self.buckets:
            whole = known[options.name].whole is not None and bucket.layer not in BLOCKS
            bucket.rule = ADAMW if whole else options.name
            bucket.states = tuple(torch.zeros_like(bucket.master) for _ in known[bucket.rule].states)

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far, counted on the host: asking the device would hold it up."""
        return self._steps_done

    @steps_done.setter
    def steps_done(self, steps: int) -> None:
        self._steps_done = steps
        for bucket in self.buckets:
            bucket.count.fill_(steps)

    def step(self, loss: torch.Tensor) -> StepResult:
        """Combine loss and gradient norm, clip, update, zero the gradients.

        `loss` is the sum of this rank's micro-batches, equal on all ranks of a group over x and y.
        TrainingFailedError, on all ranks and before anything is changed, if either is not finite.
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
            for bucket in self.buckets:
                bucket.own_gradient.mul_(limit / norm)
        rate = learning_rate(self._options, step)
        self._move_biases()
        self._update(rate=rate)
        self._steps_done += 1
        for bucket in self.buckets:
            bucket.gradient.zero_()
        self.publish()
        return StepResult(mean_loss, norm, rate)

    def _move_biases(self) -> None:
        """Move routers' biases towards experts that got fewer tokens than the mean (arXiv 2408.15664, algorithm 1)."""
        for one in (one for bucket in self.buckets for one in bucket.parameters):
            if isinstance(one, Vector) and one.rate is not None:
                one.value.add_((one.gradient.mean() - one.gradient).sign_(), alpha=one.rate)
                # AdamW leaves it as it is.
                one.gradient.zero_()

    @torch.no_grad()
    def _update(self, *, rate: float) -> None:
        """Update master weights and states."""
        self.update_matrices(rate=rate)
        for vectors in (False, True):
            decay = 0.0 if vectors else self._options.weight_decay
            same = [one for one in self.buckets if isinstance(one.parameters[0], Vector) is vectors]
            self._by_adamw([one for one in same if one.rule == ADAMW], rate=rate, weight_decay=decay)
            for one in same:
                if one.rule in UPDATES:
                    update = UPDATES[one.rule](one.own_gradient, one.states[0], self._options)
                    one.master.mul_(1.0 - rate * decay).sub_(update, alpha=rate)

    @torch.no_grad()
    def update_matrices(self, *, rate: float) -> None:
        """Update what is taken as wholes: by orthogonalized momenta, which take the place of gradients."""
        options, communicator = self._options, self._communicator
        buckets = [one for one in self.buckets if one.rule == MUON]
        for bucket in buckets:
            momentum = nesterov_(bucket.own_gradient, bucket.states[0], options)
            if bucket.split:
                whole = communicator.all_gather(momentum, bucket.axes, "step", f"{LAYER}.{bucket.layer}").wait()
                bucket.gradient.copy_(whole)
                del whole
        matrices = [one for bucket in buckets for one in bucket.parameters if isinstance(one, Matrix)]
        Orthogonalizer(communicator, options.iterations, self._compute).run(matrices)
        for bucket in buckets:
            bucket.master.mul_(1.0 - rate * options.weight_decay).sub_(bucket.own_gradient, alpha=rate)

    def _by_adamw(self, buckets: list[Bucket], *, rate: float, weight_decay: float) -> None:
        """By torch's function and not its class, which imports torch's compiler: two seconds of every rank's start."""
        if not buckets:
            return
        beta1, beta2 = self._options.betas
        adamw(
            [bucket.master for bucket in buckets],
            [bucket.own_gradient for bucket in buckets],
            [bucket.states[0] for bucket in buckets],
            [bucket.states[1] for bucket in buckets],
            [],
            [bucket.count for bucket in buckets],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=rate,
            weight_decay=weight_decay,
            eps=self._options.eps,
            maximize=False,
        )

    def sums(self, loss: torch.Tensor) -> torch.Tensor:
        """Squared norm of the whole gradient, and the mean loss, float64 `[2]`.

        One sum over all ranks; what several ranks update is divided by their number.
        """
        mesh, alike = self._communicator.mesh, defaultdict[int, list[torch.Tensor]](list)
        for bucket in self.buckets:
            if isinstance(bucket.parameters[0], Vector):
                # Unlike matrices of a bucket, they are split over different axes.
                for one in bucket.parameters:
                    if not (isinstance(one, Vector) and one.rate is not None):
                        alike[replicas(one, bucket, mesh)].append(one.gradient)
            else:
                alike[replicas(bucket.parameters[0], bucket, mesh)].append(bucket.own_gradient)
        squares = [get_total_norm(gradients).double() ** 2 / count for count, gradients in alike.items()]
        both = torch.stack([torch.stack(squares).sum(), loss.double() / (mesh.size("x") * mesh.size("y"))])
        return self._communicator.all_reduce(both, WORLD_AXES, "step", "gradient_norm").wait()

    def publish(self, *, in_step: bool = True) -> None:
        """All-gather updated weights over data, in the compute type, where master weights are sharded over it.

        in_step: so recorded in its ledger; not after a checkpoint was loaded.
        """
        communicator = self._communicator if in_step else replace(self._communicator, ledger=Ledger())
        for bucket in self.buckets:
            if bucket.split:
                mine, axes = bucket.master.to(bucket.value.dtype), bucket.axes
                bucket.value.copy_(communicator.all_gather(mine, axes, "step", bucket.layer).wait())
