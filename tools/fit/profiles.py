"""Fit the machine profiles to the published measurements, and compare with the numbers in the profiles.

python -m tools.fit.profiles            # table of every fitted number, with errors of the profile as written
python -m tools.fit.profiles --check    # the same; exit code 1 if a number marked `fitted` is not the fit's
python -m tools.fit.profiles --machine perlmutter
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.numbers import kind_at
from tools.fit.fitting import NUISANCE, Fit, run
from tools.fit.stages import stages

ROUNDING = 0.02
"""A profile's number may differ from the fit by this share: two to three digits are written."""


def fits(machine: str | None = None) -> Iterator[Fit]:
    """Every fit, or those of one machine."""
    return (run(stage) for stage in stages() if machine in (None, stage.machine))


def differences(fit: Fit) -> list[str]:
    """Numbers marked `fitted` that are not the fit's, in words."""
    profile = load_machine(fit.stage.machine).document
    found = []
    for path, written in fit.written.items():
        fitted = fit.values[path]
        if kind_at(profile, path) == "fitted" and abs(written / fitted - 1) > ROUNDING:
            found.append(f"{fit.stage.machine}: {path} is {written:.4g} in the profile, {fitted:.4g} by the fit")
    return found


def table(found: Sequence[Fit]) -> str:
    """One block per fit: its numbers, then the errors of the profile as written."""
    return "\n".join(line for fit in found for line in _block(fit))


def _block(fit: Fit) -> Iterator[str]:
    stage = fit.stage
    profile = load_machine(stage.machine).document
    yield f"{stage.machine}: {stage.name}"
    yield f"  {'parameter':<46} {'fitted':>9} {'profile':>9}  kind"
    for path, fitted in fit.values.items():
        known = not path.startswith(NUISANCE)
        shown, kind = (f"{fit.written[path]:.4g}", kind_at(profile, path)) if known else ("-", "-")
        yield f"  {path:<46} {fitted:>9.4g} {shown:>9}  {kind}"
    for label, large in (("all rows", False), ("large rows", True)):
        count = int(stage.large.sum()) if large else len(stage.measured_s)
        if count:
            shares = " ".join(f"{fit.quantile(share, large=large):>7.1%}" for share in (0.5, 0.8, 0.9))
            yield f"  |error| of the profile, {label:<10} {count:>5} rows   median, p80, p90: {shares}"
    if fit.outliers:
        yield f"  {fit.outliers} rows are off by more than a factor of e"
    yield ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools.fit.profiles", description="Fit machine profiles to published times.")
    parser.add_argument("--machine", help="one machine only")
    parser.add_argument("--check", action="store_true", help="fail if a number marked fitted is not the fit's")
    options = parser.parse_args(arguments)
    found = list(fits(options.machine))
    print(table(found))
    print("Large: collectives from 1 MiB, GEMMs from 50 GFLOP.")
    wrong = [line for fit in found for line in differences(fit)]
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
