"""Traces that torch.profiler writes here, read back: a rank alone, and two that communicate over Gloo."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from axonn_tune.learning.traces import read_trace
from axonn_tune.specs.points import CollectiveProbe, MatmulProbe, Probe
from tests.runtime.pool import Pools

STEPS = 3


def traced(folder: str) -> str:
    """Train nothing for some steps, on one rank or all; the trace's file."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    path = f"{folder}/rank{dist.get_rank() if world > 1 else 0}.json.gz"
    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=1)
    with profile(
        activities=[ProfilerActivity.CPU],
        record_shapes=True,
        schedule=plan,
        on_trace_ready=lambda done: done.export_chrome_trace(path),
    ) as profiler:
        for _ in range(STEPS + 1):
            compute()
            if world > 1:
                communicate(world)
            profiler.step()
    return path


def compute() -> None:
    """A GEMM of each layout, one with a bias, three at once, attention and a kernel that is none of these."""
    inputs, weight, gradient = torch.randn(64, 32), torch.randn(32, 48), torch.randn(64, 48)
    outputs = inputs @ weight
    torch.addmm(torch.randn(48), inputs, weight)
    _ = gradient @ weight.t(), inputs.t() @ gradient, torch.bmm(inputs.expand(3, -1, -1), weight.expand(3, -1, -1))
    heads = torch.randn(1, 2, 16, 8)
    torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    torch.nn.functional.gelu(outputs)


def communicate(world: int) -> None:
    """One collective of each kind."""
    full, shard = torch.ones(1024 * world), torch.ones(1024)
    dist.all_reduce(full)
    dist.all_gather_into_tensor(full, shard)
    dist.reduce_scatter_tensor(shard, full)


def check_compute(found: Mapping[Probe, float]) -> None:
    """What every trace of `compute` has to hold; GEMMs of a batch are none that a calibration measures."""
    gemms = [probe for probe in found if isinstance(probe, MatmulProbe)]
    assert {(one.layout, one.m, one.n, one.k) for one in gemms} == {
        ("NN", 64, 48, 32),
        ("NT", 64, 32, 48),
        ("TN", 32, 48, 64),
    }
    assert all(0.0 < seconds < 10.0 for seconds in found.values())


def test_a_rank_alone(tmp_path: Path) -> None:
    """Guards torch.profiler's own output on CPUs: shapes, layouts and times of GEMMs."""
    found = read_trace(Path(traced(str(tmp_path))))
    check_compute(found)
    assert len(found) == 3, "no collective"


@pytest.mark.parametrize("world", [2])
def test_ranks_over_gloo(pools: Pools, tmp_path: Path, world: int) -> None:
    """Guards collectives: kind (Gloo records a reduce-scatter as an all-reduce), full buffer, group and time."""
    for path in pools(world).run(traced, str(tmp_path)):
        found = read_trace(Path(path))
        check_compute(found)
        assert [one for one in found if isinstance(one, CollectiveProbe)] == [
            CollectiveProbe(op=op, group=world, stride=1, size_bytes=4 * 1024 * world)
            for op in ("all_reduce", "all_gather", "reduce_scatter")
        ]
