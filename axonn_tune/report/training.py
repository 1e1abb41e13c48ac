"""What a whole training takes, as columns, fields and a sentence: GPU-hours, days, money, energy, failures."""

from __future__ import annotations

from axonn_tune.cost.price import PricedLayout
from axonn_tune.job import Job
from axonn_tune.report.output import Json, percent
from axonn_tune.units import show_bytes, show_count, show_seconds

TRAINING = ("gpu_hours", "node_hours", "days", "days_interval", "cost", "energy_mwh", "goodput")
"""Columns of a whole training run."""


def training_columns(job: Job) -> tuple[str, ...]:
    """Those that have values: none without tokens, money and energy where the machine states what they are of."""
    if job.tokens_total is None:
        return ()
    stated = {"cost": job.machine.operation.price_per_gpu_hour, "energy_mwh": job.machine.accelerator.power_w}
    return tuple(name for name in TRAINING if stated.get(name, True))


def training_fields(job: Job, entry: PricedLayout | None) -> Json:
    """Cost of a training run on the given tokens, empty without them; None: of an infeasible grid."""
    if job.tokens_total is None:
        return {}
    # Imported here: most searches name no tokens, and start-up time is theirs.
    from axonn_tune.cost.economics import training_cost

    return training_cost(job, entry, job.tokens_total)


def training_words(job: Job, found: Json) -> str:
    """The same in a sentence; empty without tokens."""
    if not found.get("steps"):
        return ""
    if found["days"] is None:
        return (
            f"{show_count(job.tokens_total or 0)} tokens are {found['steps']:,} steps, which never end: the job fails "
            "again before it has restarted (machine.operation: gpu_hours_between_failures, restart_minutes, storage)."
        )
    shown = (
        ("gpu_hours", "GPU-hours", show_count),
        ("node_hours", "node-hours", show_count),
        ("days", "days", show_days),
        ("cost", f"paid at {job.machine.operation.price_per_gpu_hour or 0.0:g} a GPU-hour", show_count),
        ("energy_mwh", f"MWh at {found['power_w'] or 0.0:,.0f} W a GPU with all around it", show_count),
        ("goodput", "goodput", percent),
    )
    parts = [
        f"{show(found[name])} {words} (80%: {show(found[f'{name}_low'])} to {show(found[f'{name}_high'])})"
        for name, words, show in shown
        if found[name] is not None
    ]
    return (
        f"{show_count(job.tokens_total or 0)} tokens are {found['steps']:,} steps: {', '.join(parts)}. "
        f"Failures: {found['failures']:.3g}, each {show_seconds(found['restart_s'])} to restart and what was trained "
        f"since the last checkpoint; best saved every {show_seconds(found['checkpoint_interval_s'])}: "
        f"{show_bytes(found['checkpoint_bytes'])} in {show_seconds(found['checkpoint_stall_s'])}."
    )


def show_days(value: float) -> str:
    """Days of a training for a person."""
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


def days_interval(config: Json) -> str | None:
    """80% interval of the days of a training."""
    low, high = config.get("days_low"), config.get("days_high")
    return None if low is None or high is None else f"{show_days(low)} to {show_days(high)}"
