"""Fit what training software makes of an accelerator, and what long training leaves of it, to published steps.

python -m tools.fit.software               # fit; the numbers beside those shipped, and errors by source
python -m tools.fit.software --write       # the same, and ship them: software.csv, machine profiles
python -m tools.fit.left_out               # predict families and sources by fits without them
"""

from __future__ import annotations

import argparse
import csv
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from axonn_tune.cost.compute import compute_rates
from axonn_tune.files import replacing
from axonn_tune.frameworks import UNKNOWN, all_numbers, software_on
from axonn_tune.learning.posterior import Bounds, newton_step
from axonn_tune.specs.catalog import available, load_machine
from axonn_tune.specs.machine import Software
from axonn_tune.units import seconds
from axonn_tune.validation.published.accuracy import PredictedRow, StepSummary, predict_steps
from axonn_tune.validation.published.cases import Case, profile_of
from axonn_tune.validation.published.rows import SHIPPED, read_steps
from tools.fit.fitting import LINEAR_BEYOND, Floats
from tools.fit.published_steps import PublishedSteps, Setting

ROOT = Path(__file__).parents[2]
SOFTWARE = ROOT / "axonn_tune" / "frameworks" / "software.csv"
MACHINES = ROOT / "machines"
OF_PROFILES = {
    "dgx-a100": ("training_share", "contention"),
    "dgx-h100": ("training_share", "contention"),
    "gb200-nvl72": ("training_share",),
}
"""Numbers of accelerators that are fitted, by the profile of their rows."""

STATED_BY = {"gb200-nvl72": "dgx-b200"}
"""Profiles that state these numbers for others."""

EXPECTED: dict[str, tuple[float, float]] = {
    "training_share": (0.85, 0.1),
    "gemm": (1.0, 0.1),
    "attention": (1.2, 0.3),
    "traffic": (1.5, 0.4),
    "operation_us": (10.0, 1.0),
    "collective_us": (20.0, 1.0),
    "dispatch_us": (100.0, 0.5),
    "contention": (0.13, 0.5),
}
"""What each number is expected to be before any row is seen, and the standard deviation of its logarithm.

Where rows say little, a number stays there; so does that of software whose rows were left out. Rough values: kernels
as fast as bursts, fused but for a half; launches of some 10 µs, 100 µs of Python an operation; contention as in
Galvatron (arXiv 2211.13878), which slows both sides by 1.126.
"""

LEAST = {"gemm": 0.83, "traffic": 1.0}
"""GEMMs of 0.83 on A100 are 283 TFLOP/s with the share that was fitted, 4% above the best published long run
(271 TFLOP/s, mamf-finder, github.com/stas00/ml-engineering, compute/accelerator) and 91% of the datasheet's peak. No
software moves fewer bytes than fused kernels.
"""

STEPS, SETTLED, STEP, LONGEST = 30, 0.005, 0.01, 0.5
"""A fit ends after so many steps, or when no number moves by more than this share; then the share of slopes, and the
longest step of a logarithm."""

SLOPES_HOLD = 0.1
"""Slopes are worked out again when a number has moved by more than this share since."""


@dataclass(frozen=True)
class Parameters:
    """The fitted numbers: `profile:number` or `software:parameter`."""

    names: tuple[str, ...]

    @property
    def expected(self) -> Floats:
        """Logarithms before any row is seen."""
        return np.log([EXPECTED[_kind(name)][0] for name in self.names])

    @property
    def least(self) -> Floats:
        """Logarithms they may not fall below."""
        return np.log([LEAST.get(_kind(name), 1e-9) for name in self.names])

    @property
    def spread(self) -> Floats:
        """Standard deviations of those logarithms."""
        return np.array([EXPECTED[_kind(name)][1] for name in self.names])

    def mapping(self, logs: Floats) -> dict[str, float]:
        """Values by name, with the numbers that are not fitted."""
        fitted = dict(zip(self.names, np.exp(logs).tolist(), strict=True))
        return {f"{software}:{key}": value for (software, key), value in all_numbers().items()} | fitted


def _kind(name: str) -> str:
    return name.split(":")[1]


@cache
def parameters() -> Parameters:
    """What is fitted: numbers of accelerators, and those that software.csv calls so."""
    own = [f"{name}:{number}" for name, numbers in OF_PROFILES.items() for number in numbers]
    return Parameters((*own, *(f"{one['software']}:{one['parameter']}" for one in _records() if _fitted(one))))


def shipped() -> Floats:
    """Logarithms of the numbers as they ship."""
    known = {f"{software}:{key}": value for (software, key), value in all_numbers().items()}
    for name, numbers in OF_PROFILES.items():
        accelerator = load_machine(name).document.accelerator
        known |= {f"{name}:{number}": getattr(accelerator, number) for number in numbers}
    return np.log([known[name] for name in parameters().names])


@cache
def cases() -> tuple[Case, ...]:
    """Every shipped row that is scored, with its one configuration: rows that leave a choice would fit the choice."""
    found = predict_steps(read_steps(SHIPPED / "steps.csv"))
    return tuple(
        replace(one.case, configurations=(one.configuration,))
        for one in found
        if one.case is not None and one.configuration is not None and one.error is not None
    )


@cache
def steps() -> PublishedSteps:
    """Every case, laid out."""
    return PublishedSteps(cases())


@cache
def touching() -> tuple[tuple[int, ...], ...]:
    """Of every case, which of the fitted numbers play a part in its price."""
    return tuple(tuple(at for at, name in enumerate(parameters().names) if touches(name, case)) for case in cases())


def predicted_s(logs: Floats) -> Floats:
    """Step times of all cases under other numbers, s."""
    numbers = Numbers(logs)
    return steps().step_s([[numbers(case)] for case in cases()])[:, 0]


class Numbers:
    """Settings of cases under some numbers, one of which may be moved."""

    def __init__(self, logs: Floats) -> None:
        self._logs = logs
        self._values: dict[int | None, dict[str, float]] = {}
        self._known: dict[object, Setting] = {}

    def __call__(self, case: Case, moved: int | None = None) -> Setting:
        """Those of a case; moved: the number of which a slope is wanted."""
        key = id(case.machine), case.workload.precision, case.framework.software, case.framework.hopper_attention, moved
        if key not in self._known:
            self._known[key] = _setting(case, self._moved(moved))
        return self._known[key]

    def _moved(self, number: int | None) -> dict[str, float]:
        if number not in self._values:
            logs = self._logs.copy()
            if number is not None:
                logs[number] += STEP
            self._values[number] = parameters().mapping(logs)
        return self._values[number]


def _setting(case: Case, values: Mapping[str, float]) -> Setting:
    """Numbers of a case's software and accelerator from all numbers."""
    profile, name = profile_of(case.row), case.framework.software
    own = {number: values[f"{profile}:{number}"] for number in OF_PROFILES.get(profile or "", ())}
    fitted = Software(**{_kind(key): value for key, value in values.items() if key.startswith(f"{name}:")})
    software = software_on(case.framework, case.machine, fitted)
    precision = case.workload.precision
    in_gemm = case.framework.step.in_format(precision).quantizes_in_gemm
    accelerator = case.machine.accelerator.model_copy(update=own)
    rates = compute_rates(accelerator, precision, software, quantizes_in_gemm=in_gemm)
    return Setting(rates, seconds(software.collective_us))


def measured_s(some: Iterable[Case]) -> Floats:
    """Measured step times, s."""
    return np.array([case.row.step_s for case in some], dtype=np.float64)


def weights(some: Sequence[Case]) -> Floats:
    """A data set counts by the root of its rows: the largest neither decides alone nor counts as one of the small."""
    names = [case.row.dataset for case in some]
    raw = np.array([names.count(name) ** -0.25 for name in names])
    return np.asarray(raw * np.sqrt(len(raw) / np.sum(raw * raw)))


def fit(kept: Sequence[int], *, start: Floats | None = None) -> Floats:
    """Logarithms of the numbers that bring predictions nearest to the measured steps of the cases at `kept`.

    Gauss-Newton from `start`, or from what is expected, with weights that fall as errors grow, until no number
    moves by more than `SETTLED`. Numbers that no such case touches are as expected.
    """
    rows = list(kept)
    some = [cases()[at] for at in rows]
    truth, share = np.log(measured_s(some)), weights(some)
    seen = np.zeros(len(parameters().names), dtype=bool)
    seen[sorted({number for at in rows for number in touching()[at]})] = True
    logs = np.where(seen, parameters().expected if start is None else start, parameters().expected)
    moved = np.full(len(logs), np.inf)
    for _ in range(STEPS):
        if np.max(np.abs(moved)) > SLOPES_HOLD:
            predicted, slopes = derivatives(logs)
            moved = np.zeros(len(logs))
        else:
            predicted = np.log(predicted_s(logs))
        step = weighted_step(logs, predicted[rows] - truth, slopes[rows], share)
        logs, moved = logs + step, moved + step
        if np.max(np.abs(step)) < SETTLED:
            break
    return logs


def weighted_step(logs: Floats, errors: Floats, slopes: Floats, share: Floats) -> Floats:
    """One step down the weighted squares of the errors, held by what is expected."""
    known = parameters()
    pull = share**2 / np.sqrt(1.0 + (errors / LINEAR_BEYOND) ** 2) / LINEAR_BEYOND**2
    normal = slopes.T @ (pull[:, None] * slopes) + np.diag(known.spread**-2.0)
    gradient = slopes.T @ (pull * errors) + (logs - known.expected) / known.spread**2
    bounds = Bounds(known.least, np.full(len(logs), np.inf))
    return newton_step(logs, gradient, normal, bounds=bounds, longest=LONGEST)


def derivatives(logs: Floats) -> tuple[Floats, Floats]:
    """log(predicted) of all cases, and ∂ log(predicted) / ∂ log(number) with one row per case."""
    return _derivatives(tuple(logs.tolist()))


@cache
def _derivatives(known: tuple[float, ...]) -> tuple[Floats, Floats]:
    """The same; fits that start at the same numbers share it."""
    logs = np.array(known)
    numbers, most = Numbers(logs), max(map(len, touching()))
    moves = [(None, *own, *[None] * (most - len(own))) for own in touching()]
    found = np.log(
        steps().step_s([[numbers(case, at) for at in own] for case, own in zip(cases(), moves, strict=True)])
    )
    slopes = np.zeros((len(moves), len(logs)))
    for row, own in enumerate(touching()):
        slopes[row, list(own)] = (found[row, 1 : 1 + len(own)] - found[row, 0]) / STEP
    return found[:, 0], slopes


def touches(name: str, case: Case) -> bool:
    """Whether a number plays a part in a case's price."""
    return name.split(":")[0] in {case.framework.software, profile_of(case.row)}


def report(errors: Floats, title: str) -> str:
    """Errors by source, and how well families are ranked, from log(predicted / measured) of all cases."""
    shown, summary = [title], StepSummary(tuple(ranked_pairs(errors)))
    for name, found in {**summary.by_source, "all": summary.quality}.items():
        shown.append(
            f"  {name:<24}{found.rows:>6} mean {found.mape:6.1%} median {found.median:6.1%} bias {found.bias:+.1%}"
        )
    shown.append(
        f"  {len(summary.families)} families: Spearman {summary.spearman:.3f} regret {summary.regret:.1%} "
        f"best in top five {summary.best_in_top_5:.0%}"
    )
    return "\n".join(shown)


def ranked_pairs(errors: Floats) -> list[PredictedRow]:
    """Cases with the predictions that these errors mean."""
    return [
        PredictedRow(case.row, case, predicted_s=float(case.row.step_s or 0.0) * float(np.exp(error)))
        for case, error in zip(cases(), errors, strict=True)
    ]


def _records() -> list[dict[str, str]]:
    with SOFTWARE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _fitted(record: Mapping[str, str]) -> bool:
    return record["kind"] == "fitted"


def write(logs: Floats) -> None:
    """Ship fitted numbers with three digits: software.csv, and those of accelerators in machine profiles.

    Numbers that no row touches stay as they are: they were fitted to other rows. Software nobody has seen gets the
    geometric mean of all that were fitted.
    """
    touched = {parameters().names[at] for own in touching() for at in own}
    values = {name: f"{value:.3g}" for name, value in parameters().mapping(logs).items() if name in touched}
    write_records(SOFTWARE, _records_with(values))
    for name, numbers in OF_PROFILES.items():
        own = {number: values[key] for number in numbers if (key := f"{name}:{number}") in values}
        _state(STATED_BY.get(name, name), own)
    for name in available("machine"):
        _state(name, _copies(name))


def _copies(name: str) -> dict[str, str]:
    """Numbers that a profile states to be as another's, and what they are there."""
    accelerator, found = load_machine(name).document.accelerator, {}
    for number in ("training_share", "contention"):
        said = re.match(r"as (dgx-\w+)", accelerator.sources[number].source) if number in accelerator.sources else None
        if said:
            found[number] = f"{getattr(load_machine(said[1]).document.accelerator, number):.3g}"
    return found


def _state(profile: str, numbers: Mapping[str, str]) -> None:
    """Write numbers into a machine profile, everything else as it is; those it has from another are not in it."""
    path = MACHINES / f"{profile}.yaml"
    text = path.read_text(encoding="utf-8")
    for number, value in numbers.items():
        text = re.sub(rf"(?m)^(  {number}: )[\d.]+$", rf"\g<1>{value}", text)
    with replacing(path) as file:
        file.write(text.encode())


def write_records(path: Path, records: Sequence[Mapping[str, str]]) -> None:
    """Write a CSV file, columns as in the first record."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    with replacing(path) as file:
        file.write(text.getvalue().encode())


def _records_with(values: Mapping[str, str]) -> list[dict[str, str]]:
    """Records of software.csv with fitted values, those that are as other software's, and of unknown software as the
    mean of what was fitted."""
    known = {f"{one['software']}:{one['parameter']}": one["value"] for one in _records()} | dict(values)
    records = [one | {"value": known[f"{one['software']}:{one['parameter']}"]} for one in _records()]
    for record in records:
        if said := re.fullmatch(r"as ([\w-]+)", record["source"]):
            record["value"] = known[f"{said[1]}:{record['parameter']}"]
        if record["software"] == UNKNOWN:
            alike = [float(value) for name, value in values.items() if _kind(name) == record["parameter"]]
            record["value"] = f"{float(np.exp(np.mean(np.log(alike)))):.3g}"
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools.fit.software", description="Fit software to published steps.")
    parser.add_argument("--write", action="store_true", help="write the numbers into software.csv and machine profiles")
    options = parser.parse_args(arguments)
    logs = fit(range(len(cases())))
    for name, value, start in zip(parameters().names, np.exp(logs), np.exp(shipped()), strict=True):
        print(f"{name:<34} fitted {value:9.4g}  shipped {start:9.4g}")
    print(report(np.log(predicted_s(logs) / measured_s(cases())), "all rows in the fit"))
    if options.write:
        write(logs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
