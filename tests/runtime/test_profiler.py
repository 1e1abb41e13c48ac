"""Traces that torch.profiler writes here, read back: a rank alone, and two that communicate over Gloo."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from axonn_tune.learning.traces import read_trace
from axonn_tune.specs.points import CollectiveProbe, MatmulProbe
from tests.runtime.pool import Pool

STEPS, OPERATIONS = 3, ("all_reduce", "all_gather", "reduce_scatter")


def traced(folder: str) -> str:
    """Train nothing for some steps, on one rank or all; the trace's file."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    path = f"{folder}/{world}-{dist.get_rank() if world > 1 else 0}.json.gz"
    plan, kinds = schedule(wait=0, warmup=1, active=STEPS, repeat=1), [ProfilerActivity.CPU]
    with profile(activities=kinds, record_shapes=True, schedule=plan) as profiler:
        profiler.on_trace_ready = lambda done: done.export_chrome_trace(path)
        for _ in range(STEPS + 1):
            compute()
            if world > 1:
                full, shard = torch.ones(1024 * world), torch.ones(1024)
                dist.all_reduce(full)
                dist.all_gather_into_tensor(full, shard)
                dist.reduce_scatter_tensor(shard, full)
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


def test_traces_are_read(tmp_path: Path) -> None:
    """Guards torch.profiler's own output: shapes, layouts and times of GEMMs, but of none of a batch; collectives.

    Of these kind (Gloo records a reduce-scatter as an all-reduce), full buffer, group and time.
    """
    expected = {("NN", 64, 48, 32), ("NT", 64, 32, 48), ("TN", 32, 48, 64)}
    # Ranks of its own: in those that other tests have used, torch may record no collectives.
    with closing(Pool(2)) as pool:
        two = pool.run(traced, str(tmp_path))
    for world, paths in ((1, [traced(str(tmp_path))]), (2, two)):
        for path in paths:
            found = read_trace(Path(path))
            gemms = [probe for probe in found if isinstance(probe, MatmulProbe)]
            assert {(one.layout, one.m, one.n, one.k) for one in gemms} == expected
            assert all(0.0 < seconds < 10.0 for seconds in found.values())
            sent = [CollectiveProbe(op=op, group=2, stride=1, size_bytes=8192) for op in OPERATIONS if world > 1]
            assert [one for one in found if not isinstance(one, MatmulProbe)] == sent
