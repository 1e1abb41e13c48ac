"""Checkpoints: any grid to any grid, whole or not there."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from axonn_tune.errors import EnvironmentProblem, TrainingFailedError
from axonn_tune.grid import AXES, Grid
from axonn_tune.program.operations import GROUP_AXES
from axonn_tune.runtime import checkpoint
from axonn_tune.runtime.checkpoint import CheckpointFolder
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.shards import names_to_write, shards_of
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model
from tests.runtime import saving
from tests.runtime.pool import Pools

SERIAL = Grid()
# By number of ranks, so that ranks are started once a number.
STAGES = (*AXES, "pipeline")
SAVED_ON = [
    SERIAL,
    Grid(3, 1, 1, 1),
    Grid(2, 1, 2, 1),
    Grid(1, 2, 1, 2, order=("data", "z", "y", "x")),
    Grid(1, 1, 1, 2, pipeline=2, order=STAGES),
    Grid(1, 1, 2, 1, context=2, order=("context", *AXES)),
]
LOADED_ON = [
    *(SERIAL, Grid(1, 1, 2, 1), Grid(1, 1, 3, 1), Grid(2, 2, 1, 1), Grid(1, 1, 2, 2), Grid(2, 1, 1, 2)),
    *(Grid(2, 1, 1, 1, context=2, order=(*AXES, "context")), Grid(pipeline=3, order=STAGES)),
    Grid(2, 1, 1, 1, pipeline=2, order=("pipeline", *AXES)),
]

DAILY = [SERIAL, LOADED_ON[1], LOADED_ON[3], LOADED_ON[-1]]


def listed(folder: Path) -> list[str]:
    """Names in a folder of checkpoints, but for that of its lock."""
    return sorted(one.name for one in folder.iterdir() if one.name != ".lock")


def name(grid: Grid) -> str:
    """Axis sizes."""
    context, stages = (f"x{size}{word}" * (size > 1) for size, word in ((grid.context, "c"), (grid.pipeline, "p")))
    return "x".join(map(str, grid.sizes[:4])) + context + stages


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, pools: Pools) -> dict[str, Path]:
    """A checkpoint of the same values from each of several grids."""
    folders = {}
    for number, grid in enumerate(SAVED_ON):
        folders[name(grid)] = tmp_path_factory.mktemp(name(grid))
        pools(grid.world).run(saving.save_marked, grid, folders[name(grid)], number + 1)
    return folders


@pytest.mark.parametrize(
    "grid", [pytest.param(one, marks=[] if one in DAILY else pytest.mark.nightly) for one in LOADED_ON], ids=name
)
def test_any_grid_loads_what_any_other_saved(grid: Grid, saved: dict[str, Path], pools: Pools) -> None:
    """Guards every element's place, moments and steps, bit for bit, and that padding stays zero."""
    for folder in saved.values():
        if grid == SERIAL:
            # It never starts torch.distributed.
            assert saving.differs_after_loading(grid, folder) == []
        else:
            assert pools(grid.world).run(saving.differs_after_loading, grid, folder) == [[]] * grid.world


@pytest.mark.parametrize(
    ("grid", "other"),
    [
        (Grid(1, 1, 2, 2), Grid(2, 1, 1, 2)),
        (Grid(1, 1, 1, 2, context=2, order=(*AXES, "context")), Grid(1, 1, 1, 4)),
        pytest.param(Grid(1, 1, 1, 3), Grid(1, 1, 1, 4), marks=pytest.mark.nightly),
    ],
)
def test_stretches_of_optimizer_state_load_anywhere(grid: Grid, other: Grid, tmp_path: Path, pools: Pools) -> None:
    """Guards state split over data, whose ranges begin and end within rows: saved as shards, read as other shards."""
    pools(grid.world).run(saving.save_marked, grid, tmp_path, 1, True)
    assert saving.differs_after_loading(SERIAL, tmp_path) == []
    for split in (False, True):
        assert pools(other.world).run(saving.differs_after_loading, other, tmp_path, split) == [[]] * other.world


@pytest.mark.parametrize(
    ("grid", "other", "split"),
    [
        (Grid(1, 1, 2, 1, expert=2), Grid(1, 2, 1, 1), False),
        (Grid(1, 1, 2, 2, expert=2), Grid(2, 1, 1, 2, expert=2, order=("data", "x", "y", "z")), True),
        pytest.param(Grid(1, 1, 4, 1, expert=2), Grid(1, 1, 1, 4, expert=2), True, marks=pytest.mark.nightly),
    ],
)
def test_experts_load_on_any_grid(grid: Grid, other: Grid, split: bool, tmp_path: Path, pools: Pools) -> None:
    """Guards every element of each expert, wherever it lies, and that of its moments."""
    pools(grid.world).run(saving.save_marked, grid, tmp_path, 1, split, saving.MIXED)
    assert saving.differs_after_loading(SERIAL, tmp_path, False, saving.MIXED) == []
    found = pools(other.world).run(saving.differs_after_loading, other, tmp_path, split, saving.MIXED)
    assert found == [[]] * other.world


@pytest.mark.parametrize("split", [False, True])
def test_delta_nets_load_on_any_grid(split: bool, tmp_path: Path, pools: Pools) -> None:
    """Guards filters and decays of each rank's heads, and gates of attention."""
    grid, other = Grid(2, 1, 1, 2), Grid(1, 2, 2, 1)
    pools(grid.world).run(saving.save_marked, grid, tmp_path, 1, split, saving.DELTA)
    assert saving.differs_after_loading(SERIAL, tmp_path, False, saving.DELTA) == []
    found = pools(other.world).run(saving.differs_after_loading, other, tmp_path, split, saving.DELTA)
    assert found == [[]] * other.world


@pytest.mark.parametrize("split", [False, True])
def test_adapters_load_on_any_grid(split: bool, tmp_path: Path, pools: Pools) -> None:
    """Guards adapters, which z replicates and x or y splits, and that a checkpoint holds nothing else."""
    grid, other = Grid(2, 1, 1, 2), Grid(1, 2, 2, 1)
    pools(grid.world).run(saving.save_marked, grid, tmp_path, 1, split, saving.LORA)
    place = checkpoint.checkpoint_at(tmp_path)
    names = checkpoint.read_metadata(place, checkpoint.read_marker(place).sizes)
    assert {name.rpartition(".")[2] for name in names} == {"lora_a", "lora_b"}
    assert saving.differs_after_loading(SERIAL, tmp_path, False, saving.LORA) == []
    found = pools(other.world).run(saving.differs_after_loading, other, tmp_path, split, saving.LORA)
    assert found == [[]] * other.world


def test_adapters_merge_with_their_base(tmp_path: Path, pools: Pools) -> None:
    """Guards adapters beside a checkpoint's weights, on a grid, and both as one model: its loss is the same."""
    saving.save_base(tmp_path)
    (loss, *_) = pools(4).run(saving.train_adapters, Grid(2, 1, 2, 1), tmp_path)
    launch = SimpleNamespace(model=saving.LORA, adapter_scale=1.0)
    add = checkpoint.merged(checkpoint.checkpoint_at(tmp_path / "adapters"), launch)
    whole = saving.trainee(SERIAL, model=saving.WHOLE)
    saver = whole.checkpoints(tmp_path / "base")
    saver.load()
    saver.close()
    for one in whole.model.store.matrices:
        add(one.name, one.value)
    whole.optimizer.steps_done = 3
    assert whole.step().loss == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize(
    "grid",
    [
        Grid(2, 1, 2, 2),
        Grid(1, 1, 2, 2, context=2, order=(*AXES, "context")),
        Grid(1, 3, 1, 2, order=("data", "z", "y", "x")),
    ],
    ids=name,
)
def test_copies_share_the_writing(grid: Grid, split: bool) -> None:
    """Guards that each element is written by exactly one rank, and none by much more of them than another."""
    model = load_model("nano").document
    single = torch.float32
    settings = RuntimeSettings(single, single, single, frozenset(), "none", 0, torch.device("meta"), shard_master=split)
    written: Counter[str] = Counter()
    by_rank = []
    for rank in range(grid.world):
        mesh = Mesh(grid, rank, dict.fromkeys(GROUP_AXES))
        buckets = Transformer(model, Communicator(mesh, Ledger()), settings, sequence=64, seed=0).store.buckets
        shards = {one.name: shards_of(one, bucket, bucket.master) for bucket in buckets for one in bucket.parameters}
        chosen = names_to_write(buckets, mesh)
        sizes = {name: sum(shard.values.numel() for shard in shards[name]) for name in chosen}
        written.update(sizes)
        by_rank.append(sum(sizes.values()))
    whole = {name: torch.Size(found[0].size).numel() for name, found in shards.items()}
    assert written == whole
    assert whole["embedding"] == model.vocab * model.hidden, "padding is never written"
    assert max(by_rank) < 1.1 * sum(by_rank) / grid.world


def test_torchs_own_programs_read_what_is_saved(saved: dict[str, Path], tmp_path: Path) -> None:
    """Guards the layout of the files: torch.distributed.checkpoint finds every tensor of a whole model in them."""
    folder, grid = tmp_path / "whole.pt", SAVED_ON[2]
    dcp_to_torch_save(saved[name(grid)] / "step-3", folder)
    found = torch.load(folder, weights_only=True)
    whole = saving.marked(SERIAL)
    for bucket, kind in ((one, kind) for one in whole.optimizer.buckets for kind in ("parameters", "first_moments")):
        flat = bucket.master if kind == "parameters" else bucket.states[0]
        for parameter in bucket.parameters:
            (shard,) = shards_of(parameter, bucket, flat)
            assert torch.equal(found[f"{kind}.{parameter.name}"], shard.values)


@pytest.mark.parametrize("by", ["adamw", "muon"])
def test_resumed_equals_uninterrupted(by: str, tmp_path: Path, pools: Pools) -> None:
    """Guards parameters, moments, schedule and data: to the bit on the same grid, within rounding on another.

    The second grid splits its optimizer state. What another optimizer has saved is refused by name.
    """
    whole = saving.losses(SERIAL, tmp_path / "whole", 4, False, False, by)
    first = saving.losses(SERIAL, tmp_path / "same", 2, False, False, by)
    assert first + saving.losses(SERIAL, tmp_path / "same", 2, True, False, by) == whole
    saver = saving.trainee(SERIAL, by="sgd").checkpoints(tmp_path / "same", run=saving.RUN | {"optimizer": "sgd"})
    with pytest.raises(TrainingFailedError, match=f"optimizer is {by} there and sgd here"):
        saver.load()
    saver.close()
    first = pools(4).run(saving.losses, Grid(2, 1, 2, 1), tmp_path / "parts", 2, False, False, by)[0]
    rest = pools(4).run(saving.losses, Grid(1, 2, 1, 2), tmp_path / "parts", 2, True, True, by)[3]
    for one, other in zip(whole, first + rest, strict=True):
        assert astuple(one) == pytest.approx(astuple(other), rel=1e-12)


def test_full_disk_on_one_rank(tmp_path: Path, pools: Pools) -> None:
    """Guards that all ranks say so, that nothing truncated is left, and that the last good checkpoint still loads."""
    grid = Grid(2, 1, 2, 1)
    pools(4).run(saving.save_marked, grid, tmp_path, 7)
    for said in pools(4).run(saving.save_without_room, grid, tmp_path, 2):
        assert said.startswith(f"5 cannot save step 9 in {str(tmp_path)!r}: the disk, or a quota on it, is full")
        assert said.endswith("the last good checkpoint is that of step 7")
    assert listed(tmp_path) == ["step-7"]
    assert pools(4).run(saving.differs_after_loading, grid, tmp_path) == [[]] * 4


def test_too_little_space_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the numbers in the message."""
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage)
    saver = saving.trainee(SERIAL).checkpoints(tmp_path)
    saver.save()
    with pytest.raises(EnvironmentProblem, match=r"step 0 needs 0\.\d+ GB, but .* 1e-06 GB free; no checkpoint was"):
        saver.close()
    assert listed(tmp_path) == []


def test_a_rank_lost_during_a_save_is_no_fault_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the exit code: the run ends with the lost rank's name, which its watch has, and not with the folder's."""
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3129")

    def broken(*given: object) -> None:
        raise lost

    monkeypatch.setattr(checkpoint, "write", broken)
    saver = saving.trainee(SERIAL).checkpoints(tmp_path)
    saver.save()
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        saver.close()
    assert listed(tmp_path) == []


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    """Guards the disk, numeric order, saving a step again, and what a killed run leaves behind."""
    trainee = saving.trainee(SERIAL)
    saver = trainee.checkpoints(tmp_path, keep=2)
    for step in (8, 9, 10, 10):
        (tmp_path / f"step-{step}.tmp" / "deep").mkdir(parents=True)
        trainee.optimizer.steps_done = step
        saver.save()
        saver.wait()
    saver.close()
    assert listed(tmp_path) == ["step-10", "step-9"]
    assert CheckpointFolder(tmp_path).steps() == [9, 10]


def test_a_kill_between_two_names_loses_nothing(tmp_path: Path) -> None:
    """Guards the only checkpoint while a step is saved again: the old one has lost its name, the new has none yet."""
    saving.save_marked(SERIAL, tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-1.old.tmp")
    (tmp_path / "step-1").rename(tmp_path / "step-1.tmp")
    assert saving.differs_after_loading(SERIAL, tmp_path) == []
    (tmp_path / "step-1").rename(tmp_path / "step-1.tmp")
    CheckpointFolder(tmp_path).begin(2)
    assert listed(tmp_path) == ["step-1", "step-2.tmp"]


def test_another_model_or_run_is_refused(saved: dict[str, Path], pools: Pools) -> None:
    """Guards the sizes in the message, of parameters and once each, the data's position, and stages.

    No stage knows all layers: a deeper model's checkpoint is not read in part.
    """
    folder = saved[name(SERIAL)]
    other = saving.MODEL.model_copy(update={"ffn": 24, "vocab": 59, "max_sequence_length": 18})
    saver = saving.trainee(SERIAL, model=other).checkpoints(folder)
    with pytest.raises(TrainingFailedError) as caught:
        saver.load()
    saver.close()
    message = str(caught.value)
    assert "is of another model: embedding is 61 × 48 there and 59 × 48 here" in message
    assert "blocks.0.mlp.fc1.weight is 48 × 96 there and 48 × 24 here" in message
    assert message.endswith("more")
    assert "moments" not in message
    saver = saving.trainee(SERIAL).checkpoints(folder, run=saving.RUN | {"global_batch": 24})
    with pytest.raises(TrainingFailedError, match="is of another run: global_batch is 12 there and 24 here"):
        saver.load()
    saver.close()
    for said in pools(2).run(saving.error_of_loading, Grid(pipeline=2, order=STAGES), folder, 2):
        assert "is of another model: blocks.2." in said
