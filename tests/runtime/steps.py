"""What a rank does in a test: train one case, and hold it against the serial run, its own twin and the program."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.pipeline import messages, model_parts
from axonn_tune.program.step import Stage, blocks_by_type, blocks_of, build_step, bundled, contents_of
from axonn_tune.runtime import adapters
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger, RankProgram, compare
from axonn_tune.runtime.mesh import Mesh, build_mesh
from axonn_tune.runtime.modules import Dropout, dropped
from axonn_tune.runtime.optimizer import ShardedOptimizer, learning_rate
from axonn_tune.runtime.parameters import Matrix, Parameter
from axonn_tune.runtime.philox import key_of
from axonn_tune.runtime.trainer import PipelineStage
from axonn_tune.runtime.transformer import MicroBatch, Transformer
from axonn_tune.vocabulary import OVERLAPS, Overlap
from tests.runtime.cases import ADAPTER_SCALE, BATCH, BIAS_RATE, STEPS, Case, Training
from tests.runtime.lateness import Late
from tests.runtime.reference import Batch, Record, Tensors, train

SEED = 3
GRADIENTS, PARAMETERS, SCALARS = 1e-12, 1e-10, 1e-12
"""Largest deviations: of gradients and parameters relative to the largest element of the tensor."""
COMPARED_GRADIENTS = (0, STEPS - 1)
"""Steps whose gradients are held against the serial run's."""


def batches(training: Training) -> list[Batch]:
    """Each step's, over all ranks."""
    shape, vocab = (STEPS, BATCH, training.sequence + 1), training.model.vocab
    tokens = torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(1))
    numbers = torch.arange(STEPS * BATCH).view(STEPS, BATCH)
    return [(step[:, :-1], step[:, 1:], named) for step, named in zip(tokens, numbers, strict=True)]


def layers_of_parts(case: Case) -> tuple[int, ...]:
    """Of each model part."""
    layers, stages = case.training.model.layers, case.grid.pipeline
    return model_parts(layers, stages=stages, chunks=case.chunks, given=case.parts)


def transformer(case: Case, communicator: Communicator, overlaps: Collection[Overlap]) -> Transformer:
    """The case's model on this rank, in fp64."""
    wide, device = torch.float64, torch.device("cpu")
    settings = RuntimeSettings(
        *(wide, wide, wide, frozenset(overlaps), case.recompute, case.kept_layers, device),
        recompute_layers=case.recompute_layers,
        parts=2 if case.split else 1,
        shard_master=case.sharded,
        dropout=case.training.dropout,
        balance=case.training.balance / (BATCH * case.training.sequence),
        bias_rate=BIAS_RATE,
        adapter_scale=ADAPTER_SCALE,
    )
    parts = layers_of_parts(case)
    sequence = case.training.sequence
    # B is not zero, or the first gradient of A were.
    with mock.patch.object(adapters, "UP_DEVIATION", 0.1):
        return Transformer(case.training.model, communicator, settings, sequence=sequence, seed=SEED, parts=parts)


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
    shares = mesh.grid.z * mesh.grid.data
    mine = (whole.split(case.micro_batch)[place::shares] for whole in batch)
    parts = [MicroBatch(*part) for part in zip(*mine, strict=True)]
    stage = PipelineStage(model, case.micro_batch, 1 / (BATCH * model.sequence), case.order)
    return stage.gradients(parts.__getitem__, count=len(parts))


def serial(training: Training, accumulation: int = 1) -> Record:
    """The serial run in so many micro-batches, from the weights that the runtime begins with on one rank."""
    one = Case(training, Grid(), micro_batch=BATCH, recompute="none", kept_layers=0)
    model = transformer(one, Communicator(build_mesh(Grid()), Ledger()), ())
    weights = {parameter.name: parameter.value for parameter in parameters(model)}
    rates = [learning_rate(training.optimizer, step) for step in range(STEPS)]
    masks = partial(dropout_mask, training)
    return train(
        training.model,
        weights,
        batches(training),
        training.optimizer,
        rates=rates,
        masks=masks,
        accumulation=accumulation,
        balance=training.balance,
        bias_rate=BIAS_RATE,
        adapter_scale=ADAPTER_SCALE,
    )


def dropout_mask(training: Training, sequences: torch.Tensor, layer: str) -> torch.Tensor:
    """What the runtime's dropout does to ones `[b, S, H]`, on one rank."""
    hidden, sequence = training.model.hidden, training.sequence
    tokens = (sequences[:, None] * sequence + torch.arange(sequence)).flatten()
    ones = torch.ones(len(tokens), hidden, dtype=torch.float64)
    dropout = Dropout(training.dropout, torch.tensor(key_of(SEED, f"dropout.{layer}")), range(hidden), hidden, dropped)
    return dropout(ones, tokens).view(-1, sequence, hidden)


def check(case: Case, record_path: Path) -> list[str]:
    """Train a case on this rank's place in its grid, with every overlap; what is not as it should be, in words.

    In the first step each collective happens as late as overlap allows.
    """
    record: Record = torch.load(record_path, mmap=True, weights_only=False)
    mesh, problems = build_mesh(case.grid, chunks=case.chunks), list[str]()

    def hold(what: str, deviation: float, most: float) -> None:
        if not deviation <= most:
            problems.append(f"{what} deviates by {deviation:.2e}, more than {most:.0e}")

    try:
        communicator = Late(mesh, Ledger())
        model = transformer(case, communicator, OVERLAPS)
        optimizer = ShardedOptimizer(model.store, communicator, case.training.optimizer)
        twin = without_overlap(model, case)
        for step, batch in enumerate(batches(case.training)):
            object.__setattr__(communicator, "late", step == 0)
            loss, norm = accumulate(model, case, batch), record.norms[step]
            if step == 0:
                mine = {one.name: one.gradient for one in parameters(model)} | {"the loss": loss}
                assert mine.keys() == twin.keys()
                changed = [name for name in mine if not torch.equal(mine[name], twin[name])]
                problems += [f"with overlap {name} is not what it is without" for name in changed]
            if step in COMPARED_GRADIENTS:
                for parameter, gradient in whole_gradients(model):
                    deviation = deviation_of(case, parameter, gradient, record.gradients[step], rounding=norm)
                    hold(f"gradient of {parameter.name} in step {step}", deviation, GRADIENTS)
            result = optimizer.step(loss)
            hold(f"loss of step {step}", abs(result.loss / record.losses[step] - 1.0), SCALARS)
            hold(f"norm of step {step}", abs(result.gradient_norm / norm - 1.0), SCALARS)
        rate = case.training.optimizer.learning_rate
        for one in parameters(model):
            hold(one.name, deviation_of(case, one, one.value, record.parameters, rounding=rate), PARAMETERS)
        problems += sent_otherwise(case, communicator.ledger, stage=mesh.stage)
    finally:
        leave(mesh)
    return problems


def repeats_to_the_bit(case: Case) -> list[str]:
    """Loss and gradients of a first step that are not those of the same step without recompute, in words."""
    mesh, batch, found = build_mesh(case.grid, chunks=case.chunks), batches(case.training)[0], []
    try:
        for one in (case, replace(case, recompute="none", recompute_layers=None)):
            model = transformer(one, Communicator(mesh, Ledger()), OVERLAPS)
            loss = accumulate(model, one, batch)
            found.append({parameter.name: parameter.gradient for parameter in parameters(model)} | {"the loss": loss})
    finally:
        leave(mesh)
    again, plain = found
    return [f"with {case.recompute} {name} is another" for name in plain if not torch.equal(again[name], plain[name])]


def without_overlap(model: Transformer, case: Case) -> Tensors:
    """Loss and gradients of the first step with every wait directly after its issue; leaves the model as it was."""
    # The same model with the same settings, so that weights are made once.
    object.__setattr__(model.settings, "overlaps", frozenset())
    loss = accumulate(model, case, batches(case.training)[0])
    object.__setattr__(model.settings, "overlaps", frozenset(OVERLAPS))
    model.communicator.ledger.counts.clear()
    found = {parameter.name: parameter.gradient.clone() for parameter in parameters(model)}
    for parameter in parameters(model):
        parameter.gradient.zero_()
    return {**found, "the loss": loss}


def parameters(model: Transformer) -> list[Parameter]:
    """Everything a rank stores."""
    return [*model.store.matrices, *model.store.vectors]


def whole_gradients(model: Transformer) -> list[tuple[Parameter, torch.Tensor]]:
    """Complete gradients of this rank's shards, of which each rank has its part where optimizer state is split."""
    mesh, found = model.communicator.mesh, list[tuple[Parameter, torch.Tensor]]()
    for bucket in model.store.buckets:
        gradient, begin = bucket.gradient, 0
        if bucket.split:
            gradient = Communicator(mesh, Ledger()).all_gather(bucket.own_gradient, bucket.axes, "step", "test").wait()
        for one in bucket.parameters:
            found.append((one, gradient[begin : begin + one.value.numel()].view_as(one.value)))
            begin += one.value.numel()
    return found


def deviation_of(
    case: Case, parameter: Parameter, tensor: torch.Tensor, expected: Tensors, *, rounding: float
) -> float:
    """Largest deviation of a shard from the serial run's tensor, relative to its largest element; infinite of padding.

    Key biases of a model without rotary positions change nothing, so what they have is rounding, of something as large
    as `rounding`.
    """
    model, whole, name = case.training.model, expected[parameter.name], parameter.name
    # Biases that do not train stay zero.
    scale = torch.full_like(whole, float(whole.abs().max()) or 1.0)
    if name.endswith("qkv.bias") and model.learned_positions:
        each = model.heads // model.kv_heads
        keys = torch.arange(len(whole)) // model.head_dim % (each + 2) == each
        scale = torch.where(keys, rounding, float(whole[~keys].abs().max()) or 1.0)
    if isinstance(parameter, Matrix):
        rows, columns = parameter.row_range, parameter.column_range
        place = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        padding = tensor[len(whole[place]) :]
        if padding.any():
            return float("inf")
    else:
        place = slice(parameter.elements.start, parameter.elements.stop)
    deviations = (tensor[: len(whole[place])] - whole[place]).abs() / scale[place]
    return float(deviations.max()) if deviations.numel() else 0.0


def sent_otherwise(case: Case, ledger: Ledger, *, stage: int) -> list[str]:
    """Where the ledger of a run differs from the program."""
    training, stages = case.training, case.grid.pipeline
    place = Stage(first=stage == 0, last=stage == stages - 1)
    chunks, some = contents_of(training.model, layers_of_parts(case))[stage::stages], case.recompute_layers
    how = {"micro_batch": case.micro_batch, "stage": place, "layers": blocks_by_type(training.model, chunks)}
    options = bundled(compiled=True, balanced=training.balance > 0, optimizer=training.by)
    values = symbol_values(training.model, case.workload, case.grid, options=options, **how)
    assert values["A"] == case.accumulation, "the test's own arithmetic"
    how = {"recompute": case.recompute, "some": some is not None, "context": case.grid.context > 1}
    program = build_step(training.model, case.workload, options=options, **how)
    values |= blocks_of(program, chunks, kept=case.kept_layers, repeated=some or 0)
    sent = messages(stage, stages=stages, chunks=case.chunks, micro_batches=case.accumulation)
    return compare(ledger, RankProgram(program, values, place, sent, training.model.has_experts), steps=STEPS)


def leave(mesh: Mesh) -> None:
    """Destroy the process groups of a mesh, but not the world's."""
    for group in mesh.process_groups():
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
