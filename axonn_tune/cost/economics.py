"""What a whole training costs: days, GPU-hours, money and energy, with what failures and checkpoints take of it.

A job of n GPUs fails every M = (GPU-hours between failures) / n, at random. It saves after every τ of training, which
takes C of training's time, and after a failure is back at its last checkpoint in R, which may fail, too. Then τ takes

    M · exp(R / M) · (exp((τ + C) / M) - 1)

in the mean (Daly, Future Generation Computer Systems 22, 2006, equation 13), of which goodput is τ over that. It is
best where exp(x + C / M) · (1 - x) = 1 with x = τ / M; √(2 C M) is near it (Young, CACM 17, 1974). What is saved beside
training is of use once it is written: C is the copy to hosts, R longer by the time W of writing, and τ + C at least W.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import fmean, stdev
from typing import Any, NamedTuple

from axonn_tune.cost.price import Detail, PricedLayout
from axonn_tune.cost.uncertainty import DEVIATIONS
from axonn_tune.job import Job
from axonn_tune.program.count import adapter_parameters, parameters
from axonn_tune.program.lengths import own_tokens
from axonn_tune.program.update import update_of
from axonn_tune.specs.machine import Operation
from axonn_tune.units import bytes_per_s

_HOUR_S = 3600.0
_MINUTE_S = 60.0
_MEGA = 1e6
FAILURES = "gpu_hours_between_failures"
MEASURES = ("goodput", "gpu_hours", "node_hours", "days", "cost", "energy_mwh")
_SAVING = (
    *("failures", "checkpoint_bytes", "checkpoint_stall_s", "restart_s", "checkpoint_interval_s", "young_interval_s"),
    "power_w",
)
LEAST_GOODPUT = 1e-3
"""Of a training that ends: below, it fails again and again before it has restarted."""
ENDS = ("", "_low", "_high")
"""How names of a middle and of the ends of its 80% interval end."""


class Published(NamedTuple):
    """A number of sites that publications have, and the factor to either end of its 80% interval."""

    value: float
    factor: float


@cache
def published() -> Mapping[str, Published]:
    """What holds for sites that state nothing: of failures the geometric mean of published runs, and their spread."""
    folder = files("axonn_tune.cost")
    rows, runs = (
        csv.DictReader(folder.joinpath(name).read_text(encoding="utf-8").splitlines())
        for name in ("operation.csv", "interruptions.csv")
    )
    found = {row["number"]: Published(float(row["value"]), float(row["factor"])) for row in rows}
    apart = [math.log(float(run["gpu_hours"]) / float(run["interruptions"])) for run in runs]
    return {**found, FAILURES: Published(math.exp(fmean(apart)), math.exp(DEVIATIONS * stdev(apart)))}


@dataclass(frozen=True)
class Interruptions:
    """Failures of a job and what it does about them, s: every `failure_s` one, `restart_s` until training goes on from
    a checkpoint, `stall_s` of training's time for each, `write_s` until it is of use, beside training or not."""

    failure_s: float
    restart_s: float
    stall_s: float
    write_s: float

    def goodput(self, interval_s: float) -> float:
        """Share of time that trains, saving after every so much training."""
        back_s = self.restart_s + max(0.0, self.write_s - self.stall_s)
        grows = math.expm1(min((interval_s + self.stall_s) / self.failure_s, 100.0))
        return interval_s / self.failure_s * math.exp(-min(back_s / self.failure_s, 100.0)) / grows

    @property
    def young_s(self) -> float:
        """Young's interval."""
        return math.sqrt(2.0 * self.stall_s * self.failure_s)

    def best_s(self, *, least_s: float, most_s: float) -> float:
        """The interval that loses least, of whole steps and no more than the training: `least_s` to `most_s`."""
        stall, low, high = self.stall_s / self.failure_s, 0.0, 1.0
        for _ in range(60):
            middle = 0.5 * (low + high)
            # The logarithm of the condition, which falls; it does not overflow.
            low, high = (middle, high) if middle + stall + math.log1p(-middle) > 0.0 else (low, middle)
        least_s = max(least_s, self.write_s - self.stall_s)
        return max(min(low * self.failure_s, most_s), least_s)


def checkpoint_bytes(detail: Detail) -> float:
    """Of what trains, all ranks together: weights as computed with where master weights are others, and all states."""
    given, model = detail.memory.plan.given, detail.job.model
    tuning, update, sizes = model.tuning, update_of(given), given.elements
    trained = parameters(model) if tuning is None else adapter_parameters(model)
    if tuning is not None:
        trained += model.vocab * model.hidden * len(tuning.tables)
    copied = sizes.compute if given.sharded or sizes.compute != sizes.main else 0
    return trained * (copied + (update.master or sizes.main) + update.state_bytes)


def site_numbers(site: Operation) -> dict[str, float]:
    """What a site states, and what is published of others."""
    stated = {name: getattr(site, name, None) for name in published()}
    return {name: one.value if (own := stated[name]) is None else own for name, one in published().items()}


def interruptions(site: Operation, ranks: int, numbers: Mapping[str, float], *, saved: float) -> Interruptions:
    """Those of a job of so many ranks that saves so many bytes, by numbers of its site."""
    storage = site.storage_gb_per_s or numbers["storage_gb_per_s_per_gpu"] * ranks
    write_s = saved / bytes_per_s(storage)
    copies = site.host_copy_gb_per_s
    return Interruptions(
        failure_s=numbers[FAILURES] * _HOUR_S / ranks,
        # A checkpoint is read as fast as it is written.
        restart_s=numbers["restart_minutes"] * _MINUTE_S + write_s,
        stall_s=saved / ranks / bytes_per_s(copies) if copies else write_s,
        write_s=write_s,
    )


def power_w(entry: PricedLayout, numbers: Mapping[str, float], *, computing: float) -> float | None:
    """Power of the data center for a GPU, W: at its limit while it computes, a share of which waits, with its hosts,
    switches and cooling; None without a limit."""
    limit_w = entry.job.machine.accelerator.power_w
    if limit_w is None:
        return None
    drawn = computing + numbers["waiting_share"] * (1.0 - computing)
    return limit_w * (drawn + numbers["host_share"] + numbers["network_share"]) * numbers["pue"]


class Training(NamedTuple):
    """A whole training by one set of numbers; power_w: of a GPU and what it needs, None where it is unknown."""

    failing: Interruptions
    interval_s: float
    goodput: float
    trained_s: float
    power_w: float | None

    def measures(self, entry: PricedLayout) -> dict[str, float | None]:
        """Its costs by the names of results; money None without a price."""
        job, gpus, elapsed_s = entry.job, entry.grid.world, self.trained_s / self.goodput
        price, gpu_hours = job.machine.operation.price_per_gpu_hour, gpus * elapsed_s / _HOUR_S
        return {
            "goodput": self.goodput,
            "gpu_hours": gpu_hours,
            "node_hours": math.ceil(gpus / job.machine.launcher.ranks_per_node) * elapsed_s / _HOUR_S,
            "days": elapsed_s / (24.0 * _HOUR_S),
            "cost": None if price is None else price * gpu_hours,
            "energy_mwh": None if self.power_w is None else self.power_w * gpu_hours / _MEGA,
        }


def _training(entry: PricedLayout, numbers: Mapping[str, float], *, trained_s: float, saved: float) -> Training:
    failing = interruptions(entry.job.machine.operation, entry.grid.world, numbers, saved=saved)
    interval_s = failing.best_s(least_s=entry.iteration_s, most_s=trained_s)
    goodput = failing.goodput(interval_s)
    computing = goodput * min(1.0, entry.compute_s / entry.iteration_s)
    return Training(failing, interval_s, goodput, trained_s, power_w(entry, numbers, computing=computing))


def training_cost(job: Job, entry: PricedLayout | None, tokens: int) -> dict[str, float | None]:
    """Cost of a training run on so many tokens by the names of results, with its 80% interval; entry: None of an
    infeasible grid. The step and each number that the machine does not state are independent."""
    steps = math.ceil(tokens / own_tokens(job.workload))
    found: dict[str, float | None] = {"tokens_total": tokens, "steps": steps}
    unknown = dict.fromkeys([*(name + end for name in MEASURES for end in ENDS), *_SAVING])
    if entry is None:
        return found | unknown
    site, trained_s = job.machine.operation, steps * entry.iteration_s
    numbers, of = site_numbers(site), {"trained_s": trained_s, "saved": checkpoint_bytes(entry.detail)}
    middle, widths = _training(entry, numbers, **of), (entry.half_width, -entry.half_width)
    if middle.goodput < LEAST_GOODPUT:
        return found | unknown
    others = [middle._replace(trained_s=trained_s * math.exp(width)) for width in widths]
    others += [
        _training(entry, {**numbers, name: one.value * factor}, **of)
        for name, one in published().items()
        if getattr(site, name, None) is None
        for factor in (one.factor, 1.0 / one.factor)
    ]
    moved = [other.measures(entry) for other in others]
    for name, value in middle.measures(entry).items():
        apart = [math.log((other[name] or 0.0) / value) for other in moved] if value else []
        ends = -math.hypot(*(min(0.0, one) for one in apart)), math.hypot(*(max(0.0, one) for one in apart))
        found |= {name + end: value and value * math.exp(by) for end, by in zip(ENDS, (0.0, *ends), strict=True)}
    failing, elapsed_s = middle.failing, trained_s / middle.goodput
    saving = (elapsed_s / failing.failure_s, of["saved"], failing.stall_s, failing.restart_s)
    return found | dict(zip(_SAVING, (*saving, middle.interval_s, failing.young_s, middle.power_w), strict=True))


def cheapest_and_fastest(rows: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """What rows are, by their places: with least money, of GPU-hours without a price, and with the fewest days."""
    known = [place for place, row in enumerate(rows) if row.get("days")]
    if len(known) < 2:
        return {}
    paid = "gpu_hours" if rows[known[0]]["cost"] is None else "cost"
    cheapest, fastest = (min(known, key=lambda place: float(rows[place][by])) for by in (paid, "days"))
    both = {cheapest: "cheapest and fastest"}
    return both if cheapest == fastest else {cheapest: "cheapest", fastest: "fastest"}
