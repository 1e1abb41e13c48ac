"""Launch configs of one grid on this host, for benchmarks that choose the grid themselves."""

from __future__ import annotations

from axonn_tune.cost.price import price
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.launch.config import build_launch
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.launch import Launch, Optimizer
from axonn_tune.specs.workload import Workload


def pinned_launch(
    model_name: str,
    grid: Grid,
    workload: Workload,
    *,
    kept: bool,
    optimizer: Optimizer,
    command: str,
    micro_batches: int = 1,
    chunks: int = 1,
) -> Launch:
    """Nothing recomputed; kept: all layers keep their gathered weights, or none does."""
    model, machine = load_model(model_name), load_machine("localhost")
    micro_batch = workload.global_batch // (grid.z * grid.data * micro_batches)
    kept_layers = model.document.layers if kept else 0
    layout = Layout(grid, micro_batch, "none", kept_layers=kept_layers, chunks=chunks)
    pricing = price(Job(model.document, machine.document, workload), layout)
    launch = build_launch(pricing, model=model, machine=machine, command=command)
    return launch.model_copy(update={"optimizer": optimizer, "kept_layers": kept_layers})
