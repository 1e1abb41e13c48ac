"""`axonn-tune export`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from axonn_tune.grid import Grid
from axonn_tune.runtime.shards import shards_of
from tests.cli.running import good
from tests.runtime import saving


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a run."""
    folder = tmp_path_factory.mktemp("run")
    for step in (2, 10):
        saving.save_marked(Grid(), folder, step)
    return folder


def expected() -> dict[str, torch.Tensor]:
    """What a marked model holds, without padding."""
    buckets = saving.marked(Grid()).optimizer.buckets
    return {
        one.name: shards_of(one, bucket, bucket.master)[0].values for bucket in buckets for one in bucket.parameters
    }


@pytest.mark.parametrize("which", ["", "step-2"])
def test_another_program_reads_the_whole_model(which: str, run_folder: Path, tmp_path: Path) -> None:
    """Guards the format, the names, every value, and which checkpoint is taken."""
    out = tmp_path / "model.safetensors"
    finished = good(f"export {run_folder / which} -o {out}")
    found, wanted = load_file(out), expected()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    count = sum(one.numel() for one in wanted.values())
    assert finished.out == f"wrote {out}: {count:,} parameters of {run_folder / (which or 'step-10')}\n"
    with safe_open(out, "pt") as file:
        assert file.metadata()["step"] == (which or "step-10").removeprefix("step-")


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_other_number_formats(name: str, run_folder: Path, tmp_path: Path) -> None:
    """Guards offsets and rounding."""
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    good(f"export {run_folder} -o {tmp_path / 'model'} --dtype {name}")
    found = load_file(tmp_path / "model")
    assert all(torch.equal(found[key], value.to(kind)) for key, value in expected().items())
