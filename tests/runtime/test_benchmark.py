"""The benchmark's contenders: they must train the runtime's model, or their times say nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from axonn_tune.grid import Grid
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.tokens import batches
from axonn_tune.runtime.trainer import Trainer
from benchmarks.contenders import CPU, Job, Ours
from benchmarks.reference_model import Reference, runtime_name

TOLERANCE = 1e-12
"""Largest deviation in fp64, relative to the largest element of a tensor."""


@pytest.mark.parametrize(
    ("model", "kv_heads", "biases"), [("nano", 24, True), ("nano-llama", 24, False), ("nano-llama", 8, True)]
)
def test_reference_is_the_runtimes_model(model: str, kv_heads: int, biases: bool) -> None:
    """Guards the comparison: loss and every gradient of the ordinary module are the runtime's, from its weights."""
    job = Job(model, "fp64", global_batch=4, sequence=16, world=1)
    changed = job.model.model_copy(update={"kv_heads": kv_heads, "biases": biases})
    launch = Ours(Grid()).launch(job).model_copy(update={"model": changed})
    trainer = Trainer(launch, build_mesh(Grid()), device=CPU, source=batches(launch, build_mesh(Grid())))
    mine = {one.name: one for one in (*trainer.model.store.matrices, *trainer.model.store.vectors)}
    reference = Reference(changed).double()
    reference.load({name: one.value for name, one in mine.items()})
    loss = reference(*trainer.source(0, 0))
    loss.backward()
    assert abs(loss.item() - trainer.gradients(0).item()) < TOLERANCE * loss.item()
    norm = max(float(one.gradient.abs().max()) for one in mine.values())
    seen = set()
    for name, parameter in reference.named_parameters():
        # The module stores weights of blocks output first.
        right = mine[runtime_name(name)].gradient
        assert parameter.grad is not None, name
        found = parameter.grad.t() if name.startswith("blocks.") and right.dim() == 2 else parameter.grad
        torch.testing.assert_close(found, right, rtol=0.0, atol=TOLERANCE * norm, msg=name)
        seen.add(runtime_name(name))
    assert seen == set(mine), "each parameter has its counterpart"


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
