"""What logs say of a site's storage and restarts, and what saving and starting again cost a run.

Bytes of a checkpoint are those of the program; the log has how long training waited for them, and where it says when
they were written, how long that took. Both are of the size of the job that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from axonn_tune.cost.economics import checkpoint_bytes, interruptions, site_numbers
from axonn_tune.learning.evidence import Sample
from axonn_tune.learning.saving import Saving
from axonn_tune.specs.machine import Machine, Operation, Source
from axonn_tune.units import GB, counted, rounded, show_bytes

_MINUTE_S = 60.0


def with_operation(machine: Machine, samples: Sequence[Sample]) -> Machine:
    """A profile with what the logs of these samples say of its site: medians, each with its source; others stay."""
    rates: dict[str, list[float]] = {"storage_gb_per_s": [], "host_copy_gb_per_s": [], "restart_minutes": []}
    of: dict[str, dict[str, None]] = {name: {} for name in rates}
    for sample in samples:
        if sample.run is None or (saving := sample.run.saving) is None:
            continue
        setup = sample.narrowed(lambda same: same).setup
        saved = checkpoint_bytes(setup.priced) if setup is not None and saving.saves else 0.0
        found = {
            "storage_gb_per_s": [saved / GB / one.write_s for one in saving.saves if one.write_s],
            "host_copy_gb_per_s": [saved / GB / sample.ranks / one.stall_s for one in saving.saves if one.copied],
            "restart_minutes": [] if saving.restart_s is None else [saving.restart_s / _MINUTE_S],
        }
        for name, values in found.items():
            if values and values[0] > 0.0:
                rates[name] += values
                what = "restart" if name == "restart_minutes" else "save"
                size = f" of {show_bytes(saved)}" if what == "save" else ""
                of[name][f"{counted(len(values), what)}{size} with {counted(sample.ranks, 'GPU')} in {sample.name}"] = (
                    None
                )
    learned = {name: rounded(median(values)) for name, values in rates.items() if values}
    if not learned:
        return machine
    sources = {name: Source(kind="measured", source="; ".join(of[name])) for name in learned}
    before = machine.operation
    update = {**learned, "sources": {**before.sources, **sources}}
    return machine.model_copy(update={"operation": before.model_copy(update=update)})


@dataclass(frozen=True)
class SavingCost:
    """What saves and the restart of a run cost, by its log; shares of time.

    saves: how many, each of which training waits `stall_s` for, every `interval_steps`: `share` of the time of the run.
    lost, least_lost: what saving and failures take together in the mean, with a failure every `failure_s`, by that
    interval and by `best_steps`, which loses least.
    restart_s, load_s: as the log has them. repeated_steps: trained again.
    """

    saves: int
    stall_s: float
    interval_steps: float
    share: float
    failure_s: float
    lost: float
    best_steps: int
    least_lost: float
    restart_s: float | None
    load_s: float | None
    repeated_steps: int


def saving_cost(sample: Sample, machine: Machine) -> SavingCost | None:
    """Those of a run whose log has saves; None of others."""
    saving: Saving | None = None if sample.run is None else sample.run.saving
    setup, step_s = sample.setup, sample.seen.get("step")
    if saving is None or not saving.saves or setup is None or step_s is None:
        return None
    site: Operation = with_operation(machine, [sample]).operation
    failing = interruptions(site, sample.ranks, site_numbers(site), saved=checkpoint_bytes(setup.priced))
    stall_s, interval = saving.stall_s, max(saving.interval, 1.0)
    failing = replace(failing, stall_s=stall_s, write_s=max(failing.write_s, stall_s))
    trained_s, waited_s = saving.steps * step_s, sum(one.stall_s for one in saving.saves)
    best = max(1, round(failing.best_s(least_s=step_s, most_s=failing.failure_s) / step_s))
    return SavingCost(
        saves=len(saving.saves),
        stall_s=stall_s,
        interval_steps=interval,
        share=waited_s / (trained_s + waited_s),
        failure_s=failing.failure_s,
        lost=1.0 - failing.goodput(interval * step_s),
        best_steps=best,
        least_lost=1.0 - failing.goodput(best * step_s),
        restart_s=saving.restart_s,
        load_s=saving.load_s,
        repeated_steps=saving.repeated,
    )
