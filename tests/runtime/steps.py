"""What a rank does in a test: train one case, and hold it against the serial run, its own twin and the program."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import step_values
from axonn_tune.program.pipeline import messages, model_parts
from axonn_tune.program.step import Stage, build_step
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger, RankProgram, compare
from axonn_tune.runtime.mesh import Mesh, build_mesh
from axonn_tune.runtime.modules import Dropout
from axonn_tune.runtime.optimizer import AdamW, learning_rate
from axonn_tune.runtime.parameters import Matrix, Parameter
from axonn_tune.runtime.philox import key_of
from axonn_tune.runtime.trainer import PipelineStage
from axonn_tune.runtime.transformer import MicroBatch, Transformer
from axonn_tune.specs.workload import OVERLAPS, Overlap
from tests.runtime.cases import BATCH, SEQUENCE, STEPS, Case, Training
from tests.runtime.lateness import Late
from tests.runtime.reference import Batch, Record, Tensors, train

SEED = 3
GRADIENTS, PARAMETERS, SCALARS = 1e-12, 1e-10, 1e-12
"""Largest deviations: of gradients and parameters relative to the largest element of the tensor."""
COMPARED_GRADIENTS = (0, STEPS - 1)
"""Steps whose gradients are held against the serial run's."""


@dataclass
class Report:
    """What one rank found: problems in words, and the largest deviation of each kind."""

    problems: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)

    def hold(self, kind: str, name: str, deviation: float, most: float) -> None:
        """Note a deviation, and complain where it is too large."""
        self.worst[kind] = max(self.worst.get(kind, 0.0), deviation)
        if not deviation <= most:
            self.problems.append(f"{kind} of {name} deviates by {deviation:.2e}, more than {most:.0e}")


def batches(vocab: int) -> list[Batch]:
    """Each step's, over all ranks."""
    tokens = torch.randint(0, vocab, (STEPS, BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(1))
    numbers = torch.arange(STEPS * BATCH).view(STEPS, BATCH)
    return [(step[:, :-1], step[:, 1:], named) for step, named in zip(tokens, numbers, strict=True)]


def transformer(case: Case, communicator: Communicator, overlaps: Collection[Overlap]) -> Transformer:
    """The case's model on this rank, in fp64."""
    wide, device = torch.float64, torch.device("cpu")
    settings = RuntimeSettings(
        *(wide, wide, wide, frozenset(overlaps), case.recompute, case.kept_layers, device),
        parts=2 if case.split else 1,
        shard_master=case.sharded,
        dropout=case.training.dropout,
    )
    parts = model_parts(case.training.model.layers, stages=case.grid.pipeline, chunks=case.chunks, given=case.parts)
    return Transformer(case.training.model, communicator, settings, sequence=SEQUENCE, seed=SEED, parts=parts)


def forward_backward(
    model: Transformer, tokens: torch.Tensor, targets: torch.Tensor, *, scale: float, last: bool
) -> torch.Tensor:
    """One micro-batch `[b, S]` through a model without pipeline stages; loss · scale summed."""
    loss, context = model.forward(0, MicroBatch(tokens, targets), None, scale=scale, last=last)
    model.backward(0, context, None, last=last)
    return loss


def accumulate(model: Transformer, case: Case, batch: Batch) -> torch.Tensor:
    """Gradients of one step of this rank's part of a batch, complete; its share of the loss."""
    mesh = model.communicator.mesh
    place = mesh.coordinate("data") * mesh.grid.z + mesh.coordinate("z")
    mine = (whole.chunk(mesh.grid.z * mesh.grid.data)[place] for whole in batch)
    parts = [MicroBatch(*part) for part in zip(*(whole.split(case.micro_batch) for whole in mine), strict=True)]
    stage = PipelineStage(model, case.micro_batch, 1 / (BATCH * SEQUENCE))
    return stage.gradients(parts.__getitem__, count=len(parts))


def serial(training: Training) -> Record:
    """The serial run, from the weights that the runtime begins with on one rank."""
    one = Case(training, Grid(), micro_batch=BATCH, recompute="none", kept_layers=0)
    store = transformer(one, Communicator(build_mesh(Grid()), Ledger()), ()).store
    weights = {parameter.name: parameter.value for parameter in (*store.matrices, *store.vectors)}
    rates = [learning_rate(training.optimizer, step) for step in range(STEPS)]
    masks = partial(dropout_mask, training)
    return train(training.model, weights, batches(training.model.vocab), training.optimizer, rates=rates, masks=masks)


def dropout_mask(training: Training, sequences: torch.Tensor, layer: str) -> torch.Tensor:
    """What the runtime's dropout does to ones `[b, S, H]`, on one rank."""
    hidden = training.model.hidden
    tokens = (sequences[:, None] * SEQUENCE + torch.arange(SEQUENCE)).flatten()
    ones = torch.ones(len(tokens), hidden, dtype=torch.float64)
    dropout = Dropout(training.dropout, torch.tensor(key_of(SEED, f"dropout.{layer}")), range(hidden), hidden)
    return dropout(ones, tokens).view(-1, SEQUENCE, hidden)


def check(case: Case, record_path: Path) -> Report:
    """Train a case on this rank's place in its grid, with every overlap, and compare all there is to compare."""
    record: Record = torch.load(record_path, mmap=True, weights_only=False)
    mesh, report = build_mesh(case.grid, chunks=case.chunks), Report()
    try:
        model = transformer(case, Communicator(mesh, Ledger()), OVERLAPS)
        optimizer = AdamW(model.store, model.communicator, case.training.optimizer)
        twin = without_overlap(model, case, report)
        for step, batch in enumerate(batches(case.training.model.vocab)):
            loss = accumulate(model, case, batch)
            if step == 0:
                report.problems += differences(model, loss, twin)
            if step in COMPARED_GRADIENTS:
                compare_tensors(report, case, whole_gradients(model), record.gradients[step], record.norms[step])
            result = optimizer.step(loss)
            report.hold("loss", f"step {step}", relative(result.loss, record.losses[step]), SCALARS)
            report.hold("norm", f"step {step}", relative(result.gradient_norm, record.norms[step]), SCALARS)
        values = [(parameter, parameter.value) for parameter in parameters(model)]
        compare_tensors(report, case, values, record.parameters, None)
        report.problems += sent_otherwise(case, model.communicator.ledger, steps=STEPS, stage=mesh.stage)
    finally:
        leave(mesh)
    return report


def without_overlap(model: Transformer, case: Case, report: Report) -> Tensors:
    """Loss and gradients of the first step with every wait directly after its issue; leaves the model as it was."""
    ledger = model.communicator.ledger
    # The same model with the same settings, so that weights are made once.
    object.__setattr__(model.settings, "overlaps", frozenset())
    loss = accumulate(model, case, batches(case.training.model.vocab)[0])
    object.__setattr__(model.settings, "overlaps", frozenset(OVERLAPS))
    report.problems += [
        f"without overlap: {said}"
        for said in sent_otherwise(case, ledger, steps=1, stage=model.communicator.mesh.stage)
    ]
    ledger.counts.clear()
    found = {parameter.name: parameter.gradient.clone() for parameter in parameters(model)}
    for parameter in parameters(model):
        parameter.gradient.zero_()
    return {**found, "the loss": loss}


def late_network(case: Case) -> list[str]:
    """What changes when every collective happens as late as overlap allows, against no overlap at all."""
    mesh, report = build_mesh(case.grid, chunks=case.chunks), Report()
    try:
        model = transformer(case, Late(mesh, Ledger()), OVERLAPS)
        twin = without_overlap(model, case, report)
        loss = accumulate(model, case, batches(case.training.model.vocab)[0])
        return [*report.problems, *differences(model, loss, twin)]
    finally:
        leave(mesh)


def differences(model: Transformer, loss: torch.Tensor, twin: Tensors) -> list[str]:
    """Names of gradients, or the loss, that are not those of the twin bit for bit."""
    mine = {parameter.name: parameter.gradient for parameter in parameters(model)} | {"the loss": loss}
    assert mine.keys() == twin.keys()
    return [
        f"with overlap {name} is not what it is without" for name in mine if not torch.equal(mine[name], twin[name])
    ]


def parameters(model: Transformer) -> list[Parameter]:
    """Everything a rank stores."""
    return [*model.store.matrices, *model.store.vectors]


def whole_gradients(model: Transformer) -> list[tuple[Parameter, torch.Tensor]]:
    """Complete gradients of this rank's shards, of which each rank has its part where optimizer state is split."""
    mesh, found = model.communicator.mesh, list[tuple[Parameter, torch.Tensor]]()
    for bucket in model.store.buckets:
        gradient, begin = bucket.gradient, 0
        if bucket.split:
            gradient = Communicator(mesh, Ledger()).all_gather(bucket.own_gradient, "data", "step", "test").wait()
        for one in bucket.parameters:
            found.append((one, gradient[begin : begin + one.value.numel()].view_as(one.value)))
            begin += one.value.numel()
    return found


def compare_tensors(
    report: Report, case: Case, tensors: list[tuple[Parameter, torch.Tensor]], expected: Tensors, norm: float | None
) -> None:
    """Hold shards against the serial run's tensors: gradients with the norm of all, or parameters if there is none.

    Key biases of a model without rotary positions change nothing, so what they have is rounding: their
    gradients are held against the norm, their values against the learning rate.
    """
    kind, most = ("parameter", PARAMETERS) if norm is None else ("gradient", GRADIENTS)
    rounding = case.training.optimizer.learning_rate if norm is None else norm
    for parameter, tensor in tensors:
        name = parameter.name
        whole = expected[name]
        for part, columns, scale in _parts(case, name, whole, rounding):
            mine, theirs = _overlap(parameter, tensor, whole)
            chosen = columns[parameter.elements.start : parameter.elements.stop] if part else slice(None)
            if theirs.numel() and theirs[chosen].numel():
                deviation = float((mine[chosen] - theirs[chosen]).abs().max()) / scale
                report.hold(kind, f"{name}{part}", deviation, most)
        if isinstance(parameter, Matrix):
            padding = tensor[len(_overlap(parameter, tensor, whole)[1]) :]
            report.hold("padding", name, float(padding.abs().sum()), 0.0)


def _parts(case: Case, name: str, whole: torch.Tensor, rounding: float) -> Iterator[tuple[str, torch.Tensor, float]]:
    """`(what, which columns, scale)`: a tensor as it is, or qkv biases as keys and others."""
    model, every = case.training.model, torch.ones(0)
    if name.endswith("qkv.bias") and model.learned_positions:
        each = model.heads // model.kv_heads
        keys = torch.arange(len(whole)) // model.head_dim % (each + 2) == each
        yield " (keys)", keys, rounding
        yield " (queries, values)", ~keys, float(whole[~keys].abs().max())
    else:
        yield "", every, float(whole.abs().max())


def _overlap(parameter: Parameter, tensor: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of a shard that is no padding, and the same part of the whole tensor."""
    if not isinstance(parameter, Matrix):
        return tensor, whole[parameter.elements.start : parameter.elements.stop]
    rows, columns = parameter.row_range, parameter.column_range
    theirs = whole[rows.start : rows.stop, columns.start : columns.stop]
    return tensor[: len(theirs)], theirs


def sent_otherwise(case: Case, ledger: Ledger, *, steps: int, stage: int) -> list[str]:
    """Where a ledger differs from the program; without optimizer there is no gradient norm."""
    training = case.training
    stages, parts = (
        case.grid.pipeline,
        model_parts(training.model.layers, stages=case.grid.pipeline, chunks=case.chunks, given=case.parts),
    )
    place = Stage(first=stage == 0, last=stage == stages - 1)
    values = step_values(
        training.model,
        case.workload,
        case.grid,
        micro_batch=case.micro_batch,
        kept_layers=case.kept_layers,
        stage=place,
        layers=sum(parts[stage::stages]),
    )
    assert values["A"] == case.accumulation, "the test's own arithmetic"
    program = build_step(training.model, case.workload, recompute=case.recompute)
    sent = messages(stage, stages=stages, chunks=case.chunks, micro_batches=case.accumulation)
    found = compare(ledger, RankProgram(program, values, place, sent), steps=steps)
    return (
        found
        if steps > 1
        else [said for said in found if "gradient_norm" not in said and "all_gather over data" not in said]
    )


def leave(mesh: Mesh) -> None:
    """Destroy the process groups of a mesh, but not the world's."""
    for group in mesh.process_groups():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def relative(value: float, expected: float) -> float:
    """Deviation relative to what is expected."""
    return abs(value - expected) / abs(expected)
