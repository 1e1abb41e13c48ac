"""The benchmark's contenders: they must train the runtime's model, or their times say nothing.

That the ordinary module is that model, `test_equivalence` checks: it is what grids are held against.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.nightly
def test_contenders_train_the_same_model() -> None:
    """Guards `make bench`: on two ranks all contenders start, and their first losses agree."""
    options = ["--model", "nano", "--grid", "1,1,2,1", "--precision", "fp32", "--runs", "1", "--format", "json"]
    command = [sys.executable, "-m", "benchmarks.runtime_steps", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (comparison,) = json.loads(done.stdout)["comparisons"]
    names = {one["name"] for one in comparison["figures"]}
    assert {"FSDP2 2", "DTensor TP 2 + FSDP2 1", "torch pipelining, 8 micro-batches"} < names
    assert any(name.startswith("runtime") and name.endswith("no overlap") for name in names)
    assert 0.0 < comparison["losses_agree_to"] < 1e-5


@pytest.mark.nightly
def test_contenders_train_the_same_experts() -> None:
    """Guards the same of experts, which FSDP2's contender spreads over all ranks."""
    options = ["--model", "nano-moe", "--ranks", "2", "--precision", "fp32", "--runs", "1", "--format", "json"]
    command = [sys.executable, "-m", "benchmarks.runtime_steps", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (comparison,) = json.loads(done.stdout)["comparisons"]
    names = {one["name"] for one in comparison["figures"]}
    assert {"FSDP2, experts by all-to-all", "runtime 1·1·2·1, EP 2, kept"} < names
    assert 0.0 < comparison["losses_agree_to"] < 1e-5
