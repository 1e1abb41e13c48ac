"""Predict every published step by fits that have not seen its family, and by fits that have not seen its source.

python -m tools.fit.left_out    # fits 18 times; writes left_out.csv and without_source.csv
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from axonn_tune.validation.published.cases import Case
from axonn_tune.validation.published.rows import SHIPPED
from tools.fit.fitting import Floats
from tools.fit.rows import PUBLISHED
from tools.fit.software import (
    cases,
    derivatives,
    fit,
    measured_s,
    parameters,
    predicted_s,
    report,
    shipped,
    write_records,
)

WITHOUT_SOURCE = PUBLISHED / "without_source.csv"
"""Numbers of fits without a source."""

FAMILY_GROUPS = 10
"""Families are left out in so many groups, as they come: one of all rows would need a fit for each family."""


def family_group(case: Case) -> str:
    """Group with which a row's family is left out."""
    families = sorted({one.row.family for one in cases()})
    return str(families.index(case.row.family) % FAMILY_GROUPS)


def source(case: Case) -> str:
    """Publication with which a row is left out."""
    return case.row.dataset


def fits_without(key: Callable[[Case], str], start: Floats) -> dict[str, Floats]:
    """Logarithms of the numbers of a fit without the cases of each key, from `start`; those without a case are as
    expected."""
    keys = [key(case) for case in cases()]
    names = sorted(set(keys))
    # Before processes are forked, which then need it no more.
    derivatives(start)
    kept = [[at for at, own in enumerate(keys) if own != name] for name in names]
    with ProcessPoolExecutor() as pool:
        return dict(zip(names, pool.map(_fit, kept, [start] * len(names)), strict=True))


def left_out_s(key: Callable[[Case], str], fits: Mapping[str, Floats]) -> Floats:
    """Step times of all cases, each by the fit without those that share its key, s."""
    keys, found = np.array([key(case) for case in cases()]), np.zeros(len(cases()))
    for name, logs in fits.items():
        found[keys == name] = predicted_s(logs)[keys == name]
    return found


def _fit(kept: Sequence[int], start: Floats) -> Floats:
    return fit(kept, start=start)


def write(family_s: Floats, source_s: Floats) -> None:
    """Ship predictions of left-out rows."""
    write_records(
        SHIPPED / "left_out.csv",
        [
            {"id": case.row.id, "without_family_s": f"{one:.6g}", "without_source_s": f"{other:.6g}"}
            for case, one, other in zip(cases(), family_s, source_s, strict=True)
        ],
    )


def write_numbers(without_source: Mapping[str, Floats]) -> None:
    """Keep all numbers of the fits without a source, for tools.fit.back_test."""
    records = [
        {"source": name, "number": number, "value": f"{value:.6g}"}
        for name, logs in without_source.items()
        for number, value in sorted(parameters().mapping(logs).items())
    ]
    write_records(WITHOUT_SOURCE, records)


def main() -> int:
    """Run the command; returns the exit code."""
    some = cases()
    truth, start = measured_s(some), fit(range(len(some)), start=shipped())
    family_s = left_out_s(family_group, fits_without(family_group, start))
    without_source = fits_without(source, start)
    source_s = left_out_s(source, without_source)
    print(report(np.log(family_s / truth), "each family by a fit without it"))
    print(report(np.log(source_s / truth), "each source by a fit without it"))
    write(family_s, source_s)
    write_numbers(without_source)
    return 0


if __name__ == "__main__":
    sys.exit(main())
