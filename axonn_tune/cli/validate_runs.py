"""What `axonn-tune validate` does with configurations: runs them, and compares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import click

from axonn_tune.cli.options import Chosen, command_line, html_option, load, parse_order

if TYPE_CHECKING:
    from axonn_tune.api.validate import Runs
    from axonn_tune.validation.choice import Chosen as Selected
    from axonn_tune.validation.comparison import Comparison
    from axonn_tune.validation.rounds import Progress

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Wanted:
    """What to run, and how, beside the options of a search: named as their parameters."""

    launches: tuple[str, ...]
    top: int
    everything: bool
    orders: tuple[tuple[str, ...], ...]
    also_blocking: bool
    repeats: int
    steps: int
    lab: str | None
    realtime: bool
    start_with: str | None
    no_serial: bool
    runs: str | None
    output: str | None
    update: bool
    fastest: bool
    html: str | None


def _orders(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[str, ...] | None, ...]:
    return tuple(parse_order(ctx, param, value) for value in values)


_SOME, _FEW = click.IntRange(min=1), click.IntRange(min=0)
_OPTIONS: tuple[Callable[[Any], Any], ...] = (
    click.argument("launches", nargs=-1, metavar="[LAUNCH.YAML]..."),
    click.option("--top", type=_FEW, default=5, show_default=True, metavar="N", help="Run the first N; 0: all."),
    click.option("--all", "everything", is_flag=True, help="Run all of the ranking."),
    click.option(
        "--also-order",
        "orders",
        multiple=True,
        callback=_orders,
        metavar="AXES",
        help="Run each grid in this order of axes too. May be repeated.",
    ),
    click.option("--also-blocking", is_flag=True, help="Run each configuration without overlaps too."),
    click.option(
        "--repeats", type=_SOME, default=3, show_default=True, metavar="N", help="Rounds through all configurations."
    ),
    click.option(
        "--steps",
        type=click.IntRange(min=3),
        default=8,
        show_default=True,
        metavar="N",
        help="Steps of each run; the first two count for nothing.",
    ),
    click.option("--lab", metavar="NAME", help="Run on the ranks of this lab, which is up."),
    click.option("--realtime", is_flag=True, help="With --lab: before all else on this host (SCHED_RR); as root only."),
    click.option(
        "--start-with", metavar="COMMAND", help="What starts all ranks, before a rank's command: 'srun --ntasks=8'."
    ),
    click.option("--no-serial", is_flag=True, help="Do not train on one rank alone to compare losses with."),
    click.option("--runs", metavar="DIR", help="Keep the folder of each run in here."),
    click.option("-o", "--output", metavar="FILE.YAML", help="Write every time that was measured here."),
    click.option("--fastest", is_flag=True, help="Compare each configuration's fastest run, not the median of all."),
    click.option("--update", is_flag=True, help="Fold what was learnt into the machine's file, and say what changed."),
    html_option,
)


def run_options(callback: F) -> F:
    """Add the options to a command, which takes their values as one argument `wanted`."""

    @functools.wraps(callback)
    def collected(**parameters: Any) -> Any:  # noqa: ANN401
        wanted = Wanted(**{each.name: parameters.pop(each.name) for each in fields(Wanted)})
        return callback(wanted=wanted, **parameters)

    decorated: Any = collected
    for option in reversed(_OPTIONS):
        decorated = option(decorated)
    return decorated  # type: ignore[no-any-return]


def validate_runs(chosen: Chosen, wanted: Wanted, *, output_format: str) -> None:
    """Run, compare, print; CheckFailedError if something trained wrong or sent other than the program says."""
    from axonn_tune.api.validate import compared
    from axonn_tune.cli.report import require_html
    from axonn_tune.errors import CheckFailedError
    from axonn_tune.launch.host import require_torch
    from axonn_tune.report.validation import validation_json, validation_text

    require_torch()
    require_html(wanted.html)
    selected = _select(chosen, wanted)
    if wanted.update:
        _require_own(selected)
    comparison = compared(selected, _runs(wanted), listen=_say)
    if wanted.output is not None:
        click.echo(f"wrote {wanted.output}", err=True)
    render = validation_json if output_format == "json" else validation_text
    click.echo(render(comparison), nl=False)
    if wanted.html:
        _write_html(comparison, wanted.html)
    if wanted.update and comparison.sound:
        _update(comparison, selected)
    if not comparison.sound:
        raise CheckFailedError(comparison.blame or "some ranks did not send what the program says")


def _write_html(comparison: Comparison, path: str) -> None:
    """Write the report of a validation."""
    from axonn_tune.cli.report import write_html
    from axonn_tune.report.html.measured import validation_section
    from axonn_tune.report.validation import validation_document

    section = validation_section(validation_document(comparison), identity="s1", source=command_line())
    write_html(path, [section])


def _select(chosen: Chosen, wanted: Wanted) -> Selected:
    from axonn_tune.validation.choice import Selection, from_files, from_ranking

    if wanted.launches:
        refuse_search(f"{', '.join(wanted.launches)} {'says' if len(wanted.launches) == 1 else 'say'}")
        machine = chosen.machine if given("machine") else None
        return from_files(wanted.launches, machine=machine, command=command_line())
    selection = Selection(0 if wanted.everything else wanted.top, wanted.orders, wanted.also_blocking)
    return from_ranking(load(chosen), selection, command=command_line())


def given(name: str) -> bool:
    """Whether an option was given, and does not have its default."""
    from click.core import ParameterSource

    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def refuse_search(words: str) -> None:
    """click.UsageError if options of a search other than --machine were given where `words` has said all."""
    names = [each.name for each in fields(Chosen) if each.name != "machine" and given(each.name)]
    if names:
        flags = [param.opts[0] for param in click.get_current_context().command.params if param.name in names]
        raise click.UsageError(f"{words} all of it: leave out {', '.join(flags)}.")


def _runs(wanted: Wanted) -> Runs:
    """Where and how often to run."""
    from axonn_tune.api.validate import Runs

    return Runs(
        repeats=wanted.repeats,
        steps=wanted.steps,
        serial=not wanted.no_serial,
        fastest=wanted.fastest,
        lab=wanted.lab,
        realtime=wanted.realtime,
        start_with=wanted.start_with,
        folder=wanted.runs,
        output=wanted.output,
    )


def _require_own(selected: Selected) -> None:
    """UsageError unless the machine profile is a file of the user's own."""
    from axonn_tune.errors import UsageError
    from axonn_tune.specs.loading import is_shipped

    path, name = selected.machine.path, selected.machine.document.name
    if is_shipped("machine", path):
        raise UsageError(
            f"--update would write into {str(path)!r}, which comes with the tool; make one of your own first: "
            f"`axonn-tune machines show {name} > mine.yaml`"
        )


def _update(comparison: Comparison, selected: Selected) -> None:
    """Write the profile anew, and say what changed and what it brings."""
    from axonn_tune.files import write_text_atomically
    from axonn_tune.specs.document import to_yaml
    from axonn_tune.validation.comparison import Comparison
    from axonn_tune.validation.repricing import repriced
    from axonn_tune.validation.update import updated

    learnt = updated(comparison.measurements, selected.machine.document)
    write_text_atomically(selected.machine.path, to_yaml(learnt.machine, header=[f"Updated by {command_line()}"]))
    click.echo(f"\nChanged in {selected.machine.path}:", err=True)
    for change in learnt.changes:
        click.echo(f"  {change.words}", err=True)
    after = Comparison(repriced(comparison.measurements, learnt.machine))
    for what in ("communication", "step"):
        before, now = comparison.quality_of(what).mape, after.quality_of(what).mape
        click.echo(f"Mean error of {what} in these runs: {before:.1%}, now {now:.1%}", err=True)


def _say(progress: Progress) -> None:
    """One line after each run."""
    from axonn_tune.units import show_seconds

    predicted, measured = progress.launch.predicted, progress.outcome.times
    expected = "" if predicted.iteration_s is None else f", predicted {show_seconds(predicted.iteration_s)}"
    minutes, seconds = divmod(round(progress.left_s), 60)
    click.echo(
        f"[{progress.done}/{progress.of}] {progress.name}: step {show_seconds(measured.step_s)}{expected}; "
        f"{minutes}:{seconds:02d} left",
        err=True,
    )
