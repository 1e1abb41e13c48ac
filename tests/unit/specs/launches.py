"""A launch document for tests, built in code because the tool writes these and nobody else."""

from __future__ import annotations

from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import (
    CollectiveTerm,
    Launch,
    LaunchGrid,
    LaunchVariable,
    Optimizer,
    Prediction,
    Provenance,
)
from axonn_tune.specs.workload import Workload


def example_launch() -> Launch:
    """A complete launch document with values that are hard to write: tiny floats, nulls, odd text."""
    terms = tuple(
        CollectiveTerm(
            op="all_gather", axis="z", phase=phase, layer="mlp.fc1", count=2, bytes=1e-05, group=2, tier="link: 1 #x",
            seconds=1.5e-7, exposed_s=0.0,
        )
        for phase in ("forward", "backward")
    )  # fmt: skip
    prediction = Prediction(
        machine="twotier", accelerator="slow", peak_tflops=1e-3, memory_limit_bytes=None,
        cost="alpha-beta", iteration_s=None, low_s=None, high_s=None, communication_s=1e-300,
        exposed_communication_s=None, compute_s=0.0, memory_bytes=5e300, tokens_per_s=None, mfu=None,
        hfu=None, terms=terms,
    )  # fmt: skip
    command = "axonn-tune --set 'description=a: \"b\" \\ #c'"
    provenance = Provenance(
        tool="axonn-tune",
        version="1",
        created="2024-01-01T00:00:00Z",
        command=command,
        model_sha256="0e1",
        machine_sha256="",
    )
    return Launch(
        schema="axonn-tune/launch/1",
        name="on",
        model=load_model("nano").document,
        workload=Workload(global_batch=48, sequence_length=64),
        grid=LaunchGrid(x=1, y=2, z=1, data=1, order=("x", "y", "z", "data")),
        micro_batch=1,
        grad_accumulation=48,
        recompute="none",
        kept_layers=0,
        optimizer=Optimizer(gradient_clip_norm=None, eps=1e-05),
        backend="gloo",
        ranks_per_node=2,
        environment=(LaunchVariable(name="OMP_NUM_THREADS", value="1", why="one thread a rank", purpose="compute"),),
        predicted=prediction,
        provenance=provenance,
    )
