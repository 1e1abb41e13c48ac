"""Fit what training software makes of an accelerator, and what long training leaves of it, to published steps.

python -m benchmarks.software            # fit, print the numbers beside those shipped, and errors by source
python -m benchmarks.software --folds    # predict every family by a fit without it
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from axonn_tune.accuracy.cases import Case, Refusal, case_of
from axonn_tune.accuracy.frameworks import kernel_numbers, kernels_from
from axonn_tune.accuracy.quality import errors_of, families
from axonn_tune.accuracy.rows import StepRow, read_steps
from axonn_tune.accuracy.shipped import SHIPPED
from axonn_tune.accuracy.sites import profile_of
from axonn_tune.accuracy.steps import Predicted, Price, Pricers
from axonn_tune.cost.compute import Kernels
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import Machine
from benchmarks.fitting import Floats

SHARES = ("dgx-a100", "dgx-h100")
"""Profiles whose `training_share` is fitted; what derives from them follows."""

LINEAR_BEYOND = 0.05
PRIOR_SPREAD = 0.5
"""Standard deviation of the logarithm of a parameter about its start: it only matters where rows say little."""


@dataclass(frozen=True)
class Parameters:
    """Names of the fitted numbers, `profile:training_share` or `software:parameter`, and their shipped values."""

    names: tuple[str, ...]
    start: Floats

    def mapping(self, logs: Floats) -> dict[str, float]:
        """Values by name."""
        return dict(zip(self.names, np.exp(logs).tolist(), strict=True))


def shipped_parameters() -> Parameters:
    """All fitted numbers as they ship."""
    shares = {f"{name}:training_share": load_machine(name).document.accelerator.training_share for name in SHARES}
    fitted = {f"{software}:{key}": value for (software, key), value in kernel_numbers().items()}
    values = shares | fitted
    return Parameters(tuple(values), np.log(np.array(list(values.values()))))


@cache
def cases() -> tuple[Case, ...]:
    """Every shipped row that can be priced."""
    found = (case_of(row) for row in read_steps(SHIPPED / "steps.csv"))
    return tuple(case for case in found if not isinstance(case, Refusal))


def predicted_s(some: Sequence[Case], values: Mapping[str, float]) -> Floats:
    """Step times of cases under other numbers, s."""
    pricers, machines = Pricers(), _Machines(values)
    return np.array([pricers.best(_with(case, values, machines)).step_s for case in some])


class _Machines:
    """Machines with another training share, one object each."""

    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values
        self._known: dict[int, Machine] = {}

    def __call__(self, machine: Machine, profile: str | None) -> Machine:
        share = self._values.get(f"{profile}:training_share")
        if share is None:
            return machine
        if id(machine) not in self._known:
            accelerator = machine.accelerator.model_copy(update={"training_share": share})
            self._known[id(machine)] = machine.model_copy(update={"accelerator": accelerator})
        return self._known[id(machine)]


def _with(case: Case, values: Mapping[str, float], machines: _Machines) -> Case:
    name = case.framework.kernels
    shipped = kernels_from(name, {key: number for (one, key), number in kernel_numbers().items() if one == name})
    fitted = kernels_from(
        name, {key.split(":")[1]: value for key, value in values.items() if key.startswith(f"{name}:")}
    )
    # A row's attention may differ from its software's by a known factor.
    kernels: Kernels = replace(fitted, attention=fitted.attention * case.software.kernels.attention / shipped.attention)
    software = replace(case.software, kernels=kernels)
    return replace(case, machine=machines(case.machine, profile_of(case.row)), software=software)


def measured_s(some: Iterable[Case]) -> Floats:
    """Measured step times, s."""
    return np.array([case.row.step_s for case in some], dtype=np.float64)


def weights(some: Sequence[Case]) -> Floats:
    """A data set counts by the root of its rows: the largest neither decides alone nor counts as one of the small."""
    names = [case.row.dataset for case in some]
    raw = np.array([names.count(name) ** -0.25 for name in names])
    return np.asarray(raw * np.sqrt(len(raw) / np.sum(raw * raw)))


def fit(parameters: Parameters) -> tuple[Floats, Floats]:
    """Logarithms of the best numbers, and the derivatives of the logarithms of all predictions by them.

    Gauss-Newton steps with weights that fall as errors grow; each shorter than the last.
    """
    some, logs = cases(), parameters.start.copy()
    truth = np.log(measured_s(some))
    for length in (1.0, 0.7, 0.5):
        predicted, slopes = derivatives(logs, parameters, some)
        logs = logs + length * newton_step(logs, parameters, predicted - truth, slopes, weights(some))
    return logs, derivatives(logs, parameters, some)[1]


def newton_step(logs: Floats, parameters: Parameters, errors: Floats, slopes: Floats, share: Floats) -> Floats:
    """One step down the weighted squares of the errors, held by the prior."""
    pull = share**2 / np.sqrt(1.0 + (errors / LINEAR_BEYOND) ** 2) / LINEAR_BEYOND**2
    normal = slopes.T @ (pull[:, None] * slopes) + np.eye(len(logs)) / PRIOR_SPREAD**2
    gradient = slopes.T @ (pull * errors) + (logs - parameters.start) / PRIOR_SPREAD**2
    return np.asarray(np.clip(-np.linalg.solve(normal, gradient), -0.5, 0.5))


def derivatives(logs: Floats, parameters: Parameters, some: Sequence[Case]) -> tuple[Floats, Floats]:
    """log(predicted), and ∂ log(predicted) / ∂ log(parameter) with one row per case."""
    here = np.log(predicted_s(some, parameters.mapping(logs)))
    slopes = np.zeros((len(some), len(logs)))
    for position, name in enumerate(parameters.names):
        moved, touched = logs.copy(), [at for at, case in enumerate(some) if _touches(name, case)]
        moved[position] += 0.01
        after = np.log(predicted_s([some[at] for at in touched], parameters.mapping(moved)))
        slopes[touched, position] = (after - here[touched]) / 0.01
    return here, slopes


def _touches(name: str, case: Case) -> bool:
    """Whether a parameter plays a part in a case's price."""
    return name.split(":")[0] in {case.framework.kernels, profile_of(case.row)}


def folds(logs: Floats, slopes: Floats, parameters: Parameters, key: Callable[[StepRow], str]) -> Floats:
    """log(predicted / measured) of every case by a fit without the cases that share its key.

    One Gauss-Newton step from the common optimum, along its derivatives: leaving some rows out moves the
    numbers little enough for that.
    """
    some = cases()
    errors = np.log(predicted_s(some, parameters.mapping(logs))) - np.log(measured_s(some))
    names = np.array([key(case.row) for case in some])
    found, share = errors.copy(), weights(some)
    for name in np.unique(names):
        out = names == name
        step = newton_step(logs, parameters, errors[~out], slopes[~out], share[~out])
        found[out] = errors[out] + slopes[out] @ step
    return found


def report(errors: Floats, title: str) -> str:
    """Errors by source, and how well families are ranked."""
    some, shown = cases(), [title]
    relative = np.expm1(errors)
    for name in sorted({case.row.dataset for case in some}):
        found = errors_of(e for e, case in zip(relative, some, strict=True) if case.row.dataset == name)
        shown.append(
            f"  {name:<24}{found.rows:>6} mean {found.mape:6.1%} median {found.median:6.1%} bias {found.bias:+.1%}"
        )
    total = errors_of(relative)
    shown.append(
        f"  {'all':<24}{total.rows:>6} mean {total.mape:6.1%} median {total.median:6.1%} bias {total.bias:+.1%}"
    )
    ranked = families(ranked_pairs(errors))
    spearman, regret = (float(np.mean([getattr(one, what) for one in ranked])) for what in ("spearman", "regret"))
    top = float(np.mean([one.best_rank <= 5 for one in ranked]))
    shown.append(f"  {len(ranked)} families: Spearman {spearman:.3f} regret {regret:.1%} best in top five {top:.0%}")
    return "\n".join(shown)


def widths(errors: Floats, key: Callable[[Case], str]) -> dict[str, float]:
    """What 80% of |log(predicted / measured)| stay below, by group and of all."""
    groups: dict[str, list[float]] = {}
    for error, case in zip(np.abs(errors).tolist(), cases(), strict=True):
        groups.setdefault(key(case), []).append(error)
        groups.setdefault("all", []).append(error)
    return {name: float(np.quantile(found, 0.8)) for name, found in sorted(groups.items())}


def ranked_pairs(errors: Floats) -> list[Predicted]:
    """Cases with the predictions that these errors mean."""
    return [
        Predicted(case.row, Price(case.layouts[0], float(case.row.step_s or 0.0) * float(np.exp(error)), 0.0))
        for case, error in zip(cases(), errors, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.software", description="Fit software to published steps.")
    parser.add_argument("--folds", action="store_true", help="predict each family, source and accelerator without it")
    parser.add_argument("--as-shipped", action="store_true", help="no fit: the numbers as they ship")
    options = parser.parse_args(arguments)
    parameters = shipped_parameters()
    if options.as_shipped:
        logs, slopes = parameters.start, derivatives(parameters.start, parameters, cases())[1]
    else:
        logs, slopes = fit(parameters)
    for name, value, start in zip(parameters.names, np.exp(logs), np.exp(parameters.start), strict=True):
        print(f"{name:<34} fitted {value:9.4g}  shipped {start:9.4g}")
    errors = np.log(predicted_s(cases(), parameters.mapping(logs))) - np.log(measured_s(cases()))
    print(report(errors, "all rows in the fit"))
    if options.folds:
        kept_out: dict[str, Callable[[StepRow], str]] = {
            "family": lambda row: row.family,
            "source": lambda row: row.dataset,
            "framework": lambda row: row.framework,
        }
        for word, key in kept_out.items():
            found = folds(logs, slopes, parameters, key)
            print(report(found, f"each {word} by a fit without it"))
            widest = widths(found, lambda case: case.framework.kernels)
            print("  80% of errors stay below: " + ", ".join(f"{name} {width:.3f}" for name, width in widest.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
