"""`axonn-tune regress`: predicted and measured times against a recorded baseline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from axonn_tune.cli.options import Chosen, command_line, load, problem_options

if TYPE_CHECKING:
    from axonn_tune.specs.results import Baseline, Floors, Tolerances
    from axonn_tune.validation.regression import Regression

_TOLERANCES = ("prediction", "step", "communication", "memory")
_FLOORS = ("spearman", "regret", "step_error", "communication_error")


@click.command("regress", short_help="Compare with a recorded baseline, for CI.")
@click.argument("baseline", metavar="BASELINE.YAML")
@problem_options(required=False)
@click.option("--measurement", metavar="FILE", help="What `validate -o` wrote; without it predictions alone.")
@click.option(
    "--tolerance", "tolerances", multiple=True, metavar="NAME=SHARE", help=f"Of {', '.join(_TOLERANCES)}: step=10%."
)
@click.option("--floor", "floors", multiple=True, metavar="NAME=VALUE", help=f"Of {', '.join(_FLOORS)}: regret=5%.")
@click.option("--record", is_flag=True, help="Write the baseline, from --measurement, or from a search's options.")
@click.option("--reason", default="", help="With --record: why.")
@click.option(
    "--top", type=click.IntRange(min=0), default=0, show_default=True, help="With --record: rows to keep; 0: all."
)
@click.option("--junit", metavar="FILE", help="Write JUnit XML here too.")
@click.option("--markdown", metavar="FILE", help="Write Markdown here too, as for GITHUB_STEP_SUMMARY.")
@click.option("--format", "output_format", type=click.Choice(["table", "json"]), default="table", show_default=True)
def regress_command(
    *,
    baseline: str,
    chosen: Chosen,
    measurement: str | None,
    tolerances: tuple[str, ...],
    floors: tuple[str, ...],
    record: bool,
    reason: str,
    top: int,
    junit: str | None,
    markdown: str | None,
    output_format: str,
) -> None:
    """Compare predictions, and measured times if there are any, with BASELINE.YAML.

    A prediction that moved by more than its tolerance fails: record the baseline anew, and say why. A
    measured step that became slower than its tolerance fails. Accuracy is tracked, and fails below its
    floor. A failure ends with exit code 4. --machine predicts for another profile than the baseline's.

    \b
    Examples:
      axonn-tune regress baseline.yaml --record --gpus 64 --model 20b --top 5 --reason first
      axonn-tune regress baseline.yaml
      axonn-tune regress baseline.yaml --measurement measured.yaml --junit regress.xml
    """
    from axonn_tune.errors import CheckFailedError
    from axonn_tune.report import regression as report

    if record:
        _record(baseline, chosen, measurement, _settings(tolerances, floors), reason=reason, top=top)
        return
    found = _check(baseline, chosen, measurement, tolerances, floors)
    click.echo(report.regression_json(found) if output_format == "json" else report.regression_text(found), nl=False)
    _write(junit, report.regression_junit(found))
    _write(markdown, report.regression_markdown(found))
    if found.failures:
        raise CheckFailedError(report.verdict(found))


def _check(
    path: str, chosen: Chosen, measurement: str | None, tolerances: tuple[str, ...], floors: tuple[str, ...]
) -> Regression:
    from axonn_tune.api.regress import regress
    from axonn_tune.cli.validate_runs import given, refuse_search
    from axonn_tune.specs.loading import load_document
    from axonn_tune.specs.results import Baseline

    refuse_search(f"{path} says")
    baseline = load_document(path, schema=Baseline)
    allowed, least = _settings(tolerances, floors, of=baseline)
    return regress(
        baseline,
        machine=chosen.machine if given("machine") else None,
        measurement=measurement,
        tolerances=allowed,
        floors=least,
    )


def _record(
    path: str,
    chosen: Chosen,
    measurement: str | None,
    limits: tuple[Tolerances, Floors],
    *,
    reason: str,
    top: int,
) -> None:
    """Write the baseline."""
    from axonn_tune.files import write_text_atomically
    from axonn_tune.specs.document import to_yaml
    from axonn_tune.specs.loading import load_document
    from axonn_tune.specs.results import Measurements
    from axonn_tune.validation.baseline import from_launches, from_measurements
    from axonn_tune.validation.choice import Selection, from_ranking

    tolerances, floors = limits
    if measurement is not None:
        measured = load_document(measurement, schema=Measurements)
        made = from_measurements(measured, reason=reason, tolerances=tolerances, floors=floors)
    else:
        found = from_ranking(load(chosen), Selection(top), command=command_line())
        made = from_launches(
            found.launches,
            found.model.document,
            found.machine.document,
            reason=reason,
            tolerances=tolerances,
            floors=floors,
        )
    write_text_atomically(path, to_yaml(made, header=[f"Recorded by {command_line()}"]))
    click.echo(f"recorded {path}: {len(made.configurations)} configurations", err=True)


def _settings(
    tolerances: tuple[str, ...], floors: tuple[str, ...], *, of: Baseline | None = None
) -> tuple[Tolerances, Floors]:
    """Those of a baseline, or the defaults, with what the command line says on top."""
    from axonn_tune.specs.results import Floors, Tolerances

    allowed, least = (Tolerances(), Floors()) if of is None else (of.tolerances, of.floors)
    return (
        allowed.model_copy(update=_values(tolerances, _TOLERANCES, option="--tolerance")),
        least.model_copy(update=_values(floors, _FLOORS, option="--floor")),
    )


def _values(words: tuple[str, ...], names: tuple[str, ...], *, option: str) -> dict[str, float]:
    """`step=10%` or `step=0.1` as numbers; UsageError for anything else."""
    from axonn_tune.errors import UsageError, suggest

    found = {}
    for word in words:
        name, _, text = word.partition("=")
        number = text.strip().removesuffix("%")
        try:
            value = float(number) / (100.0 if text.strip().endswith("%") else 1.0)
        except ValueError as error:
            raise UsageError(f"{option} {word}: write a number or a percentage, as in {names[0]}=10%") from error
        if name not in names:
            raise UsageError(f"{option} {word}: no {name!r}{suggest(name, names)}; there are {', '.join(names)}")
        found[name] = value
    return found


def _write(path: str | None, text: str) -> None:
    from axonn_tune.files import write_text_atomically

    if path is not None:
        write_text_atomically(Path(path), text)
