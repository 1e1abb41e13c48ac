"""The benchmark's contenders: they must train the runtime's model, or their times say nothing.

That the ordinary module is that model, `test_equivalence` checks: it is what grids are held against.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

DENSE = (
    *("FSDP2 2", "DTensor TP 2 + FSDP2 1", "torch pipelining, 1F1B, 8 micro-batches"),
    "torch pipelining, ZBVZeroBubble of 2 parts a rank, 8 micro-batches",
)
EXPERTS = "FSDP2, experts by all-to-all", "runtime 1·1·2·1, EP 2, kept"


@pytest.fixture
def four_layers(tmp_path: Path) -> str:
    """`nano` with a layer for each of two parts on two ranks: with fewer, contenders of two parts drop out."""
    nano = (files("axonn_tune.shipped_configs") / "nano.yaml").read_text()
    assert "\nlayers: 2\n" in nano
    written = tmp_path / "nano-4.yaml"
    written.write_text(nano.replace("\nlayers: 2\n", "\nlayers: 4\n").replace("\nname: nano\n", "\nname: nano-4\n"))
    return str(written)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "options", "contenders"),
    [("four layers", ("--grid", "1,1,2,1"), DENSE), ("nano-moe", ("--ranks", "2"), EXPERTS)],
    ids=["dense", "experts"],
)
def test_contenders_train_the_same_model(
    model: str, options: tuple[str, ...], contenders: tuple[str, ...], four_layers: str
) -> None:
    """Guards `make bench`: on two ranks all contenders start, and their first losses agree."""
    model = four_layers if model == "four layers" else model
    asked = ["--model", model, *options, "--precision", "fp32", "--runs", "1", "--format", "json"]
    command = [sys.executable, "-m", "benchmarks.runtime_steps", *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (comparison,) = json.loads(done.stdout)["comparisons"]
    names = {one["name"] for one in comparison["figures"]}
    assert set(contenders) < names
    assert any(name.startswith("runtime") and name.endswith("no overlap") for name in names)
    assert 0.0 < comparison["losses_agree_to"] < 1e-5
