"""`axonn-tune validate`, `accuracy` and `regress`: predictions vs. runs, vs. published steps, and vs. a baseline."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    AxisOrder,
    Count,
    SearchCommand,
    command_line,
    format_option,
    given,
    html_option,
    load,
    refuse_search,
    search_options,
    write_html,
)

if TYPE_CHECKING:
    from axonn_tune.validation.comparison import RunComparison
    from axonn_tune.validation.runner import ValidationPlan, ValidationProgress

_TOLERANCES = ("prediction", "step", "communication", "memory")
_FLOORS = ("spearman", "regret", "step_error", "communication_error")
_FILE = click.Path(path_type=Path)
_COUNT, _COUNT_OR_ALL = Count(), Count(0)
_ELSEWHERE = ("collectives", "gemm", "memory")
"""Kinds of published rows that are no steps: developers' own check, `python -m tools.measurements`."""

_RUNS = (
    *("top", "everything", "orders", "also_blocking", "repeats", "steps", "lab", "realtime", "start_with", "serial"),
    *("folder", "fastest", "update"),
)
_BASELINE = ("measurement", "record", "reason", "top", "tolerances", "floors")


@click.command(
    "validate",
    cls=SearchCommand,
    own={"Runs": _RUNS},
    short_help="Run configurations, and compare with the predictions.",
)
@click.argument("launches", nargs=-1, metavar="[LAUNCH.YAML]...")
@click.option("--top", type=_COUNT_OR_ALL, default=5, show_default=True, metavar="N", help="Run the first N; 0: all.")
@click.option("--all", "everything", is_flag=True, help="Run all of the ranking.")
@click.option(
    "--also-order",
    "orders",
    multiple=True,
    type=AxisOrder(),
    metavar="AXES",
    help="Run each grid in this rank order too. May be repeated.",
)
@click.option("--also-blocking", is_flag=True, help="Run each configuration without overlaps too.")
@click.option(
    "--repeats", type=_COUNT, default=3, show_default=True, metavar="N", help="Rounds through all configurations."
)
@click.option(
    "--steps",
    type=Count(3),
    default=8,
    show_default=True,
    metavar="N",
    help="Steps of each run; the first two do not count.",
)
@click.option("--lab", metavar="NAME", help="Run on the ranks of this running lab.")
@click.option("--realtime", is_flag=True, help="With --lab: prioritize over all other processes (SCHED_RR); root only.")
@click.option("--start-with", metavar="COMMAND", help="Launcher of all ranks: 'srun --ntasks=8'.")
@click.option(
    "--no-serial",
    "serial",
    is_flag=True,
    callback=lambda ctx, param, value: not value,
    help="Do not train on one rank alone as the reference for losses.",
)
@click.option("--runs", "folder", metavar="DIR", help="Keep the folder of each run in this folder.")
@click.option("-o", "--output", metavar="FILE.YAML", help="Write the measurement file here.")
@click.option("--fastest", is_flag=True, help="Compare each configuration's fastest run, not the median of all.")
@click.option("--update", is_flag=True, help="Update the machine's file from the measurements, and list the changes.")
@html_option
@search_options(required=False)
@format_option(("table", "json"))
@click.option("--published", is_flag=True, hidden=True)
@click.option("--rows", type=_FILE, hidden=True)
@click.option("--worst", type=Count(0), default=20, hidden=True)
@click.option("--collectives", hidden=True)
@click.option("--gemm", hidden=True)
@click.option("--memory", hidden=True)
def validate_command(
    *,
    launches: tuple[str, ...],
    top: int,
    everything: bool,
    orders: tuple[tuple[str, ...], ...],
    also_blocking: bool,
    update: bool,
    html: str | None,
    output_format: str,
    published: bool,
    rows: Path | None,
    worst: int,
    **options: Any,
) -> None:
    """Compare predicted with measured times of runs.

    Runs the best configurations of a ranking, or LAUNCH configs, in turn and repeatedly, each time in
    fresh processes, and compares what was measured with what was predicted: each configuration, axis and
    collective, computation, exposed communication and step. Losses and gradient norms must be those of
    one rank alone, and every collective one the program has; else the exit code is 4.

    Steps that others measured, and your own in a file, are compared by `axonn-tune accuracy`.

    \b
    Examples:
      axonn-tune validate --gpus 2 --model nano --machine here.yaml --precision fp32 --top 3
      axonn-tune validate launch.yaml --lab lab -o measured.yaml
    """
    from axonn_tune.api.measurement import Runs, compared
    from axonn_tune.errors import CheckFailedError, UsageError
    from axonn_tune.launch.host import require_torch
    from axonn_tune.report.output import json_text
    from axonn_tune.report.validation import validation_document, validation_section, validation_text
    from axonn_tune.specs.loading import is_shipped
    from axonn_tune.validation.runner import Selection, plan_from_files, plan_from_ranking

    if moved := [name for name in _ELSEWHERE if options.pop(name) is not None]:
        raise click.UsageError(f"--{moved[0]} is in the checkout now: python -m tools.measurements --{moved[0]} FILE")
    if published or rows:
        click.echo(f"This is now `axonn-tune accuracy{' --rows FILE' if rows else ''}`.", err=True)
        of_runs = ("launches", "top", "everything", "orders", "also_blocking", "update", *options)
        refuse_search("The measurements say", dict.fromkeys(of_runs))
        _accuracy(rows, options["machine"] if given("machine") else None, worst, html, output_format)
        return
    runs = Runs(**{each.name: options.pop(each.name) for each in fields(Runs)})
    require_torch()
    if launches:
        refuse_search(f"{', '.join(launches)} {'says' if len(launches) == 1 else 'say'}", options)
        machine = options["machine"] if given("machine") else None
        selected = plan_from_files(launches, machine=machine, command=command_line())
    else:
        selection = Selection(0 if everything else top, orders, also_blocking)
        selected = plan_from_ranking(load(options), selection, command=command_line())
    path, name = selected.machine.path, selected.machine.document.name
    if update and is_shipped("machine", path):
        raise UsageError(
            f"--update would write into {str(path)!r}, which comes with the tool; make one of your own first: "
            f"`axonn-tune machines show {name} > mine.yaml`"
        )

    comparison = compared(selected, runs, listen=_say)
    if runs.output is not None:
        click.echo(f"wrote {runs.output}", err=True)
    document = validation_document(comparison)
    click.echo(json_text(document, indent=1) if output_format == "json" else validation_text(comparison), nl=False)
    if html:
        write_html(html, [validation_section(document, identity="s1", source=command_line())])
    if update and comparison.sound:
        _update(comparison, selected)
    if not comparison.sound:
        raise CheckFailedError(comparison.fault)


@click.command("accuracy", short_help="Compare predictions with published steps, or with steps of your own.")
@click.option("--rows", type=_FILE, metavar="FILE", help="Your own steps, CSV, instead of the shipped ones.")
@click.option("--machine", metavar="NAME|FILE", help="Price every row of --rows on this profile, as it is.")
@click.option("--worst", type=Count(0), default=20, show_default=True, metavar="N", help="Worst rows to list.")
@html_option
@format_option(("table", "json"))
def accuracy_command(
    *, rows: Path | None, machine: str | None, worst: int, html: str | None, output_format: str
) -> None:
    """Predict the training steps that others published, and list the error of each.

    A row is the search with its layout pinned; one that leaves part of its layout open has a range, and no error.
    The first lines say what fits without the source reach, over sources and without vtrain_single. With --html every
    row is drawn, and can be sorted and filtered.

    With --rows, steps of your own: docs/accuracy.md lists the columns. Each row is priced on the shipped profile
    nearest to its words, or all on that of --machine.

    \b
    Examples:
      axonn-tune accuracy --worst 5 --html accuracy.html
      axonn-tune accuracy --rows steps.csv --machine mine.yaml
    """
    _accuracy(rows, machine, worst, html, output_format)


def _accuracy(rows: Path | None, machine: str | None, worst: int, html: str | None, output_format: str) -> None:
    """Predict and print."""
    from axonn_tune.api.measurement import accuracy
    from axonn_tune.report.accuracy import accuracy_document, accuracy_section, accuracy_text
    from axonn_tune.report.output import json_text

    found = accuracy(rows, machine=machine, worst=worst)
    text = json_text(accuracy_document(found), indent=1) if output_format == "json" else accuracy_text(found)
    if html is not None:
        write_html(html, [accuracy_section(found, command=command_line())])
    click.echo(text, nl=False)


def _update(comparison: RunComparison, selected: ValidationPlan) -> None:
    """Update the profile by `learn` on the runs; print the changes and errors before and after."""
    from axonn_tune.files import write_text_atomically
    from axonn_tune.learning.learn import learn
    from axonn_tune.learning.reading import measured_evidence
    from axonn_tune.report.learning import numbers_text
    from axonn_tune.specs.document import to_yaml
    from axonn_tune.validation.comparison import RunComparison, repriced

    samples, words = measured_evidence(comparison.measurements, selected.machine.document)
    learnt = learn(samples, selected.machine.document, evidence=[words])
    write_text_atomically(selected.machine.path, to_yaml(learnt.machine, header=[f"Updated by {command_line()}"]))
    changed = numbers_text(learnt) or "nothing: the runs are as predicted\n"
    click.echo(f"\nChanged in {selected.machine.path}:\n{changed}", err=True)
    after = RunComparison(repriced(comparison.measurements, learnt.machine))
    for what in ("communication", "step"):
        before, now = comparison.qualities[what].mape, after.qualities[what].mape
        click.echo(f"Mean error of {what} in these runs: {before:.1%}, now {now:.1%}", err=True)


def _say(progress: ValidationProgress) -> None:
    """One line after each run."""
    from axonn_tune.units import show_seconds

    predicted, measured = progress.launch.predicted, progress.outcome.run.measured
    expected = "" if predicted.iteration_s is None else f", predicted {show_seconds(predicted.iteration_s)}"
    minutes, seconds = divmod(round(progress.left_s), 60)
    click.echo(
        f"[{progress.done}/{progress.of}] {progress.name}: step {show_seconds(measured['step_s'])}{expected}; "
        f"{minutes}:{seconds:02d} left",
        err=True,
    )


@click.command(
    "regress",
    cls=SearchCommand,
    own={"Baseline": _BASELINE},
    short_help="Compare with a recorded baseline, for CI.",
)
@click.argument("baseline", metavar="BASELINE.YAML")
@search_options(required=False)
@click.option(
    "--measurement", metavar="FILE", help="Measurement file of `validate -o`. Default: check predictions only."
)
@click.option(
    "--tolerance", "tolerances", multiple=True, metavar="NAME=SHARE", help=f"Of {', '.join(_TOLERANCES)}: step=10%."
)
@click.option("--floor", "floors", multiple=True, metavar="NAME=VALUE", help=f"Of {', '.join(_FLOORS)}: regret=5%.")
@click.option("--record", is_flag=True, help="Write the baseline, from --measurement, or from a search's options.")
@click.option("--reason", default="", help="With --record: why.")
@click.option("--top", type=Count(0), default=0, show_default=True, help="With --record: rows to keep; 0: all.")
@click.option("--junit", metavar="FILE", help="Write JUnit XML here too.")
@click.option("--markdown", metavar="FILE", help="Write Markdown here too, as for GITHUB_STEP_SUMMARY.")
@format_option(("table", "json"))
def regress_command(
    *,
    baseline: str,
    measurement: str | None,
    tolerances: tuple[str, ...],
    floors: tuple[str, ...],
    record: bool,
    reason: str,
    top: int,
    junit: str | None,
    markdown: str | None,
    output_format: str,
    **options: Any,
) -> None:
    """Compare predictions, and measured times if there are any, with BASELINE.YAML.

    A prediction that moved by more than its tolerance fails: record a new baseline with a reason. A
    measured step that became slower than its tolerance fails. Accuracy is tracked, and fails below its
    floor. A failure ends with exit code 4. --machine predicts for another profile than the baseline's.

    \b
    Examples:
      axonn-tune regress baseline.yaml --record --gpus 64 --model 20b --top 5 --reason first
      axonn-tune regress baseline.yaml
      axonn-tune regress baseline.yaml --measurement measured.yaml --junit regress.xml
    """
    from axonn_tune.api.measurement import regress
    from axonn_tune.errors import CheckFailedError
    from axonn_tune.files import write_text_atomically
    from axonn_tune.report import validation as report
    from axonn_tune.specs.document import to_yaml
    from axonn_tune.specs.loading import load_document
    from axonn_tune.specs.results import Baseline, Floors, Measurements, Tolerances
    from axonn_tune.validation.regression import baseline_of
    from axonn_tune.validation.runner import Selection, plan_from_ranking

    allowed, least = Tolerances(), Floors()
    if not record:
        refuse_search(f"{baseline} says", options)
        recorded = load_document(baseline, schema=Baseline)
        allowed, least = recorded.tolerances, recorded.floors
    allowed = allowed.model_copy(update=_values(tolerances, _TOLERANCES, option="--tolerance"))
    least = least.model_copy(update=_values(floors, _FLOORS, option="--floor"))
    if record:
        measured = None if measurement is None else load_document(measurement, schema=Measurements)
        source = measured or plan_from_ranking(load(options), Selection(top), command=command_line())
        made = baseline_of(source, reason=reason, tolerances=allowed, floors=least)
        write_text_atomically(baseline, to_yaml(made, header=[f"Recorded by {command_line()}"]))
        click.echo(f"recorded {baseline}: {len(made.configurations)} configurations", err=True)
        return
    machine = options["machine"] if given("machine") else None
    found = regress(recorded, machine=machine, measurement=measurement, tolerances=allowed, floors=least)
    click.echo(report.regression_json(found) if output_format == "json" else report.regression_text(found), nl=False)
    for path, text in ((junit, report.regression_junit(found)), (markdown, report.regression_markdown(found))):
        if path is not None:
            write_text_atomically(path, text)
    if found.failures:
        raise CheckFailedError(report.verdict(found))


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
