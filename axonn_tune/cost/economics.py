"""What a whole training run costs: steps, hours of GPUs and nodes, days."""

from __future__ import annotations

import math

from axonn_tune.cost.price import PricedLayout
from axonn_tune.job import Job
from axonn_tune.program.lengths import own_tokens

_HOUR_S = 3600.0


def training_cost(job: Job, entry: PricedLayout | None, tokens: int) -> dict[str, float | None]:
    """Cost of a training run on so many tokens, steps only, with its 80% interval, by the names of results: steps,
    GPU-hours, node-hours and days; entry: None of an infeasible grid."""
    gpus = entry.grid.world if entry else 1
    steps = math.ceil(tokens / own_tokens(job.workload))
    nodes = math.ceil(gpus / job.machine.launcher.ranks_per_node)
    per = {"gpu_hours": gpus / _HOUR_S, "node_hours": nodes / _HOUR_S, "days": 1.0 / (24.0 * _HOUR_S)}
    ends = dict.fromkeys(("", "_low", "_high"))
    if entry is not None:
        ends = {"": entry.iteration_s, "_low": entry.low_s, "_high": entry.high_s}
    found: dict[str, float | None] = {"tokens_total": tokens, "steps": steps}
    for name, a_second in per.items():
        found |= {name + end: None if time_s is None else steps * time_s * a_second for end, time_s in ends.items()}
    return found
