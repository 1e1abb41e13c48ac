"""What a rank does in a test of checkpoints."""

from __future__ import annotations

import resource
import zlib
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from axonn_tune.errors import AxonnTuneError
from axonn_tune.grid import Grid
from axonn_tune.program.pipeline import split_layers
from axonn_tune.runtime.checkpoint import Checkpointer, load_frozen
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import Mesh, build_mesh
from axonn_tune.runtime.optimizer import ShardedOptimizer, StepResult
from axonn_tune.runtime.parameters import Bucket
from axonn_tune.runtime.shards import shards_of
from axonn_tune.runtime.tokens import BatchShard, SyntheticTokens
from axonn_tune.runtime.trainer import PipelineStage
from axonn_tune.runtime.transformer import MicroBatch, Transformer
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Optimizer
from axonn_tune.specs.model import LayerType, Model
from axonn_tune.specs.tuning import Tuning

BATCH, SEQUENCE = 12, 16
RUN: dict[str, Any] = {"global_batch": BATCH, "sequence_length": SEQUENCE, "seed": 5, "data_seed": 7}
SMALL = {"layers": 3, "hidden": 48, "heads": 12, "kv_heads": 12, "head_dim": 4, "ffn": 96}
# Neither divides by anything, so tables are padded on every grid but one of a single rank.
MODEL = load_model("nano").document.model_copy(update={**SMALL, "vocab": 61, "max_sequence_length": 19})


_MOE = load_model("nano-moe").document
EXPERTS = {"count": 12, "width": 48, "shared_width": 24}
MIXED = _MOE.model_copy(
    update={
        **SMALL,
        **{"layers": 2, "vocab": 61, "max_sequence_length": 19},
        "layer_types": {
            name: one.model_copy(
                update={"qk_norms": True, "experts": one.experts and one.experts.model_copy(update=EXPERTS)}
            )
            for name, one in _MOE.layer_types.items()
        },
    }
)
"""One of its layers with experts; norms of queries and keys."""
_DELTA = load_model("nano-delta").document
DELTA = _DELTA.model_copy(
    update={
        **SMALL,
        **{"layers": 2, "vocab": 61, "max_sequence_length": 19},
        "layer_types": _DELTA.layer_types
        | {
            "delta": LayerType.model_validate(
                {"attention": False, "gdn": {"key_heads": 4, "value_heads": 8, "key_dim": 4, "value_dim": 6}}
            )
        },
    }
)
"""One of its layers with a gated delta net, the other with gated attention."""


_LLAMA = load_model("nano-llama").document.model_copy(
    update={**SMALL, "layers": 2, "kv_heads": 6, "vocab": 61, "max_sequence_length": 19}
)
WHOLE = _LLAMA.tuned(None)
LORA = _LLAMA.tuned(
    Tuning(mode="lora", rank=5, targets=("attention.qkv/q", "attention.output", "mlp.fc1/up", "mlp.fc2"), dtype="fp32")
)
"""The same model, of which only adapters train."""


@dataclass
class Trainee:
    """A model in training on this rank."""

    mesh: Mesh
    model: Transformer
    optimizer: ShardedOptimizer
    source: SyntheticTokens

    def step(self) -> StepResult:
        """The next step."""
        batch = MicroBatch(*self.source.batch(self.optimizer.steps_done, 0))
        stage = PipelineStage(self.model, len(batch.tokens), 1 / (BATCH * SEQUENCE))
        return self.optimizer.step(stage.gradients(lambda number: batch, count=1))

    def checkpoints(self, folder: Path, *, keep: int = 3, run: dict[str, int | str] = RUN) -> Checkpointer:
        """Its checkpoints."""
        return Checkpointer(folder, keep=keep, mesh=self.mesh, optimizer=self.optimizer, run=run)

    def names(self) -> list[str]:
        """Of all parameters."""
        return [parameter.name for bucket in self.optimizer.buckets for parameter in bucket.parameters]

    def tensors(self) -> list[tuple[Bucket, torch.Tensor]]:
        """Everything a checkpoint holds, padding included, laid out as buckets are."""
        return [(one, tensor) for one in self.optimizer.buckets for tensor in (one.master, *one.states)]


def trainee(
    grid: Grid, *, seed: int = RUN["seed"], model: Model = MODEL, split: bool = False, by: str = "adamw"
) -> Trainee:
    """A fresh one, in fp64; `split`: master weights over data."""
    mesh = build_mesh(grid)
    communicator, wide = Communicator(mesh, Ledger()), torch.float64
    settings = RuntimeSettings(wide, wide, wide, frozenset(), "none", 0, torch.device("cpu"), shard_master=split)
    parts = split_layers(model.layers, parts=grid.pipeline)
    transformer = Transformer(model, communicator, settings, sequence=SEQUENCE, seed=seed, parts=parts)
    options = Optimizer.model_validate({"name": by, "learning_rate": 1e-2, "warmup_steps": 1, "decay_steps": 10})
    place = mesh.coordinate("data") * grid.z + mesh.coordinate("z")
    share = BatchShard(BATCH, BATCH // (grid.data * grid.z), 1, place)
    source = SyntheticTokens(model.vocab, RUN["data_seed"], SEQUENCE, share)
    return Trainee(mesh, transformer, ShardedOptimizer(transformer.store, communicator, options), source)


def marked(grid: Grid, *, split: bool = False, model: Model = MODEL) -> Trainee:
    """One whose every element tells the tensor and the place it belongs to, on any grid; padding stays zero."""
    found = trainee(grid, split=split, model=model)
    numbers = {name: 3 * (zlib.crc32(name.encode()) % 10_000) for name in found.names()}
    for kind, (bucket, tensor) in zip(cycle(range(3)), found.tensors(), strict=False):
        tensor.zero_()
        for parameter in bucket.parameters:
            for shard in shards_of(parameter, bucket, tensor):
                index, shape = torch.zeros(shard.values.shape, dtype=torch.float64), shard.values.shape
                for dim, (start, width) in enumerate(zip(shard.start, (*shard.size[1:], 1), strict=True)):
                    places = torch.arange(start, start + shape[dim]).double() * width
                    index += places.view(-1, *[1] * (len(shape) - 1 - dim))
                shard.values.copy_(index + 1e6 * (numbers[parameter.name] + kind))
    found.optimizer.publish(in_step=False)
    return found


def save_marked(grid: Grid, folder: Path, steps: int, split: bool = False, model: Model = MODEL) -> None:
    """Save a marked model; what changes while it is being written must not be in it."""
    found = marked(grid, split=split, model=model)
    found.optimizer.steps_done = steps
    saver = found.checkpoints(folder)
    saver.save()
    for _, tensor in found.tensors():
        tensor.zero_()
    saver.close()


def differs_after_loading(grid: Grid, folder: Path, split: bool = False, model: Model = MODEL) -> list[str]:
    """Tensors of this rank that a loaded checkpoint of a marked model gets wrong; padding counts."""
    expected = marked(grid, split=split, model=model)
    found = trainee(grid, seed=RUN["seed"] + 1, split=split, model=model)
    saver = found.checkpoints(folder)
    step = saver.load()
    saver.close()
    pairs = zip(expected.tensors(), found.tensors(), strict=True)
    wrong = [f"tensor {number}" for number, (a, b) in enumerate(pairs) if not torch.equal(a[1], b[1])]
    values = zip(expected.optimizer.buckets, found.optimizer.buckets, strict=True)
    wrong += [f"weights of {a.layer}" for a, b in values if not torch.equal(a.value, b.value)]
    return wrong + [f"step {step}"] * (found.optimizer.steps_done != step)


def losses(
    grid: Grid, folder: Path, steps: int, resume: bool, split: bool = False, by: str = "adamw"
) -> list[StepResult]:
    """Train some steps and save after the last; `resume` begins from a checkpoint, with other initial weights."""
    found = trainee(grid, seed=RUN["seed"] + resume, split=split, by=by)
    saver = found.checkpoints(folder, run=RUN | {"optimizer": by})
    if resume:
        assert saver.load() is not None, "there is one"
    results = [found.step() for _ in range(steps)]
    saver.save()
    saver.close()
    return results


def save_without_room(grid: Grid, folder: Path, without_room: int) -> str:
    """Save while one rank may not write large files; the error."""
    found = marked(grid)
    found.optimizer.steps_done = 9
    saver = found.checkpoints(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if found.mesh.rank == without_room:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        saver.save()
        saver.close()
    except AxonnTuneError as error:
        return f"{error.exit_code} {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "saved"


def error_of_loading(grid: Grid, folder: Path, layers: int = SMALL["layers"]) -> str:
    """Load the newest checkpoint into a model of so many layers; the error."""
    saver = trainee(grid, model=MODEL.model_copy(update={"layers": layers})).checkpoints(folder)
    try:
        saver.load()
    except AxonnTuneError as error:
        return f"{error.exit_code} {error}"
    finally:
        saver.close()
    return "loaded"


def save_base(folder: Path) -> None:
    """A checkpoint of all weights after a step."""
    found = trainee(Grid(), model=WHOLE)
    found.step()
    saver = found.checkpoints(folder / "base")
    saver.save()
    saver.close()


def train_adapters(grid: Grid, folder: Path) -> float:
    """Three steps beside the weights of a checkpoint, saved; the loss after them, of the batch behind these."""
    found = trainee(grid, seed=RUN["seed"] + 1, model=LORA)
    load_frozen(folder / "base", found.model.store)
    for _ in range(3):
        found.step()
    saver = found.checkpoints(folder / "adapters")
    saver.save()
    saver.close()
    return found.step().loss
