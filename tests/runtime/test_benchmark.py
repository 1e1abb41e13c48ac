"""The benchmark's contenders: they must train the runtime's model, or their times say nothing.

That the ordinary module is that model, `test_equivalence` checks: it is what grids are held against.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

DENSE = (
    *("FSDP2 2", "DTensor TP 2 + FSDP2 1", "torch pipelining, 1F1B, 8 micro-batches"),
    "torch pipelining, ZBVZeroBubble of 2 parts a rank, 8 micro-batches",
)
EXPERTS = "FSDP2, experts by all-to-all", "runtime 1·1·2·1, EP 2, kept"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("options", "contenders"),
    [
        (("--model", "nano", "--grid", "1,1,2,1"), DENSE),
        (("--model", "nano-moe", "--ranks", "2"), EXPERTS),
    ],
    ids=["dense", "experts"],
)
def test_contenders_train_the_same_model(options: tuple[str, ...], contenders: tuple[str, ...]) -> None:
    """Guards `make bench`: on two ranks all contenders start, and their first losses agree."""
    asked = [*options, "--precision", "fp32", "--runs", "1", "--format", "json"]
    command = [sys.executable, "-m", "benchmarks.runtime_steps", *asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (comparison,) = json.loads(done.stdout)["comparisons"]
    names = {one["name"] for one in comparison["figures"]}
    assert set(contenders) < names
    assert any(name.startswith("runtime") and name.endswith("no overlap") for name in names)
    assert 0.0 < comparison["losses_agree_to"] < 1e-5
