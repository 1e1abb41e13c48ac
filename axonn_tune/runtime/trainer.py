"""One rank's model, optimizer and data, and a training step with them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from axonn_tune.errors import UsageError
from axonn_tune.program.constraints import constraints
from axonn_tune.runtime.communicate import Communicator
from axonn_tune.runtime.data import Batches, share_of
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.optimizer import AdamW, StepResult
from axonn_tune.runtime.settings import Settings
from axonn_tune.runtime.tensorboard import require_tensorboard
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.workload import Precision

DTYPES: dict[Precision, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    "bf16": (torch.bfloat16, torch.float32, torch.float32),
    "fp32": (torch.float32, torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64, torch.float64),
}
"""Compute, main and statistics type of each precision the runtime has."""


def require_runnable(launch: Launch) -> None:
    """UsageError with all that this runtime cannot execute of a launch config; EnvironmentProblem as by its sinks."""
    require_tensorboard(launch)
    workload, model, grid = launch.workload, launch.model, launch.grid.grid()
    found = []
    if workload.split_micro_batch and launch.micro_batch % 2:
        found.append(f"workload.split_micro_batch: micro_batch is {launch.micro_batch}, which has no two equal halves")
    if workload.precision not in DTYPES:
        found.append(
            f"workload.precision: {workload.precision} needs loss scaling, which this runtime does not have; "
            f"{', '.join(DTYPES)} run"
        )
    if model.learned_positions and workload.sequence_length > model.max_sequence_length:
        found.append(
            f"workload.sequence_length ({workload.sequence_length}) is more than "
            f"model.max_sequence_length ({model.max_sequence_length})"
        )
    sizes = {axis: grid.axis_size(axis) for axis in ("x", "y", "z", "data")}
    for one in constraints(model, workload):
        product = 1
        for axis in one.axes:
            product *= sizes[axis]
        if product > one.value if one.at_least else one.value % product:
            found.append(f"grid: {one.explain(sizes)}")
    if found:
        raise UsageError("this launch config cannot run:\n" + "\n".join(f"  {line}" for line in found))


def settings_of(launch: Launch, device: torch.device) -> Settings:
    """Number formats, overlaps and recomputation of a launch config."""
    compute, main, statistics = DTYPES[launch.workload.precision]
    return Settings(
        compute=compute,
        main=main,
        statistics=statistics,
        overlaps=frozenset(launch.workload.overlaps),
        recompute=launch.recompute,
        kept_layers=launch.kept_layers,
        device=device,
        parts=2 if launch.workload.split_micro_batch else 1,
        split_main=launch.workload.shard_optimizer_over_data,
        dropout=launch.dropout,
        compile=launch.compile,
    )


class Trainer:
    """One rank's model, optimizer and data."""

    def __init__(self, launch: Launch, mesh: Mesh, *, device: torch.device, source: Batches) -> None:
        self.launch, self.mesh, self.device, self.source = launch, mesh, device, source
        self.ledger = Ledger()
        communicator = Communicator(mesh, self.ledger)
        sequence = launch.workload.sequence_length
        self.model = Transformer(
            launch.model, communicator, settings_of(launch, device), sequence=sequence, seed=launch.seed
        )
        self.optimizer = AdamW(self.model.store, communicator, launch.optimizer)
        self._share = share_of(launch, mesh)
        self._scale = 1.0 / (launch.workload.global_batch * sequence)

    def gradients(self, step: int) -> torch.Tensor:
        """Forward and backward of all micro-batches of a step, counted from 0; this rank's loss."""
        last = self.launch.grad_accumulation - 1
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for micro_step in range(last + 1):
            tokens, targets = (part.to(self.device) for part in self.source.batch(step, micro_step))
            sequences = self._sequences(step, micro_step) if self.launch.dropout else None
            loss += self.model.micro_batch(
                tokens, targets, scale=self._scale, last=micro_step == last, sequences=sequences
            )
        self.model.finish_gradients()
        return loss

    def _sequences(self, step: int, micro_step: int) -> torch.Tensor:
        """Numbers `[b]` of a micro-batch's sequences, which dropout goes by."""
        return torch.from_numpy(self._share.sequences(step, micro_step)).to(self.device)

    def step(self, step: int, *, before_end: Callable[[int], None] = lambda step: None) -> StepResult:
        """One optimizer step; `before_end` runs before the collective that every rank needs to end it."""
        loss = self.gradients(step)
        before_end(step)
        return self.optimizer.step(loss)

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
