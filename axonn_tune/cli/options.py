"""Options that several commands share, and helpers that use them.

A command that searches is written::

    @click.command("compare", cls=SearchCommand)
    @search_options()
    def compare_command(*, wide: bool, **options: Any) -> None:
        found = axonn_tune.api.analysis.compare(**options)

`search_options` makes the command's options of the fields of `Request`; they have the names of the package functions'
keywords, so that a command passes them on unchanged.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from axonn_tune.errors import nearest
from axonn_tune.request import BESIDE_COMMAND, GROUPS, OPTIONS, Option, Request, flag, options_of
from axonn_tune.vocabulary import LARGEST_SIZE

if TYPE_CHECKING:
    from axonn_tune.api.search import ReportedResult
    from axonn_tune.ranking.inputs import Inputs
    from axonn_tune.report.output import Json
    from axonn_tune.specs.catalog import Kind
    from axonn_tune.specs.model import Model

    BaseChoice = click.Choice[str]
    BaseOrder = click.ParamType[tuple[str, ...]]
else:
    BaseChoice = click.Choice
    BaseOrder = click.ParamType

F = TypeVar("F", bound=Callable[..., Any])

WORDS = "axonn_tune.words"
"""Key of the words of the command line in a context's `meta`."""


class Count(click.IntRange):
    """A whole number from `lowest` to the largest size that documents may hold.

    alone: what stands for the option without a number, which is True. words: what may stand in its place.
    """

    def __init__(self, lowest: int = 1, *, alone: str = "", words: Sequence[str] = ()) -> None:
        super().__init__(min=lowest)
        self._alone, self._words = alone, words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number."""
        if self._alone and value == self._alone:
            return True
        if value in self._words:
            return value
        if self._words and not any(one.isdigit() for one in str(value)):
            self.fail(f"{value!r} is no whole number and not {' or '.join(self._words)}.", param, ctx)
        if not str(value).isascii():
            self.fail(f"{value!r} is not a valid integer: digits are 0 to 9.", param, ctx)
        number = super().convert(value, param, ctx)
        if number > LARGEST_SIZE:
            self.fail(f"{value} is more than {LARGEST_SIZE:,}.", param, ctx)
        return number


class SuggestingChoice(BaseChoice):
    """A choice that names the nearest valid value, which click does for commands and options only."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the chosen value; the error of an invalid one suggests the nearest."""
        begun = (choice for choice in self.choices if choice.startswith(str(value)))
        near = next(begun, None) or nearest(str(value), self.choices)
        if value in self.choices or near is None:
            return str(super().convert(value, param, ctx))
        known = ", ".join(self.choices)
        self.fail(f"{value!r} is none of {known}; did you mean {near!r}?", param, ctx)


class AxisOrder(BaseOrder):
    """A permutation of the axes, such as `y,x,z,data`, as a tuple."""

    name = "axes"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """The axes; the error of an invalid text lists the valid ones."""
        from axonn_tune.errors import UsageError
        from axonn_tune.ranking.inputs import parse_order

        try:
            return parse_order(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


_MORE = {
    "from_command": "Workload",
    "with_rejected": "Ranking",
    "unfold": "Ranking",
    "top": "Ranking",
    "pick": "Ranking",
}
"""Headings of options that commands have beside those of a request; the rest is output."""


class SearchCommand(click.Command):
    """A command that searches: its help is grouped, and options may have the frameworks' names.

    own: the command's own groups, before the others, with the names of their options.
    """

    def __init__(self, *arguments: Any, own: Mapping[str, Sequence[str]] | None = None, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._own = own or {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write options by subject, in the order of a request, --help last."""
        headings = {name: option.group for name, option in OPTIONS.items()} | _MORE
        headings |= {name: heading for heading, names in self._own.items() for name in names}
        known = [*headings, *(str(param.name) for param in self.get_params(ctx) if param.name not in headings)]
        groups: dict[str, list[tuple[str, str]]] = {heading: [] for heading in (*self._own, *GROUPS, "Output")}
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        for one in sorted(options, key=lambda one: (one.name == "help", known.index(str(one.name)))):
            if record := one.get_help_record(ctx):
                groups[headings.get(str(one.name), "Output")].append(record)
        for heading, records in groups.items():
            if heading == "Constraints" and records:
                with formatter.section("Constraints by the names of a framework, each with a size"):
                    formatter.write_dl(_names_of_axes())
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Replace the framework's names by ours."""
        known = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        if any(word.startswith("--") and word.partition("=")[0] not in known for word in args):
            args = _by_our_names(args, known)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            axes = dict.fromkeys(name for _, names in _names_of_axes() for name in names.split())
            begun = [name for name in axes if error.option_name.startswith(f"{name}-")]
            near = begun or filter(None, [nearest(error.option_name, axes)])
            possibilities = [*near, *(error.possibilities or ())]
            raise click.NoSuchOption(error.option_name, possibilities=possibilities, ctx=ctx) from None


def _names_of_axes() -> list[tuple[str, str]]:
    """Frameworks that call their axes alike, and the options that pin these, those whose commands are written first."""
    from axonn_tune.frameworks import UNKNOWN, registry

    alike: dict[str, list[str]] = {}
    for one in sorted(registry().values(), key=lambda one: (one.launch is None, "axonn" in one.name)):
        if one.names and one.name != UNKNOWN:
            alike.setdefault(" ".join(map(one.option, one.expert_columns)), []).append(one.name)
    return [(", ".join(names), flags) for flags, names in alike.items()]


def _by_our_names(args: Sequence[str], known: Collection[str]) -> list[str]:
    """The words with frameworks' option names replaced by ours; click handles unknown ones."""
    from axonn_tune.errors import UsageError
    from axonn_tune.frameworks.names import ADVICE, SHARED, is_known, our_options, why_unpriced

    kept: list[str] = []
    given, others = dict[str, str](), dict[str, str]()
    places = iter(range(len(args)))
    for place in places:
        said, has_value, value = args[place].partition("=")
        dotted = said.removeprefix("--").replace("-", "_")
        # torchtitan has sections before its names.
        section, _, plain = dotted.rpartition(".")
        name = plain if section in ("", "training", "parallelism") and dotted not in ADVICE else dotted
        value = value if has_value else " ".join(args[place + 1 : place + 2])
        if said in known:
            others[name] = value
        elif said.startswith("--") and is_known(name):
            given[name] = value
            _ = has_value or next(places, None)
            continue
        elif said.startswith("--") and (why := ADVICE.get(name) or why_unpriced(dotted)):
            raise UsageError(f"there is no option {said}: {why}")
        kept.append(args[place])
    pins = [flag(name) for name in given if name not in SHARED]
    if pins and (path := others.get("from_command")):
        raise click.UsageError(f"{path} says all of it: leave out {', '.join(pins)}.")
    return [*(f"{flag(name)}={value}" for name, value in our_options(given, others).items()), *kept]


def complete_names(kind: Kind | Literal["framework"]) -> Callable[[click.Context, click.Parameter, str], list[str]]:
    """Shell completion for the names of a kind."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
        from axonn_tune.frameworks import registry
        from axonn_tune.specs.catalog import available

        names = registry() if kind == "framework" else available(kind)
        return [name for name in names if name.startswith(incomplete.lower())]

    return complete


# Set on each command: names set through a context depend on which command ran first in a process.
help_option = click.help_option("-h", "--help")


def document_option(kind: Kind, words: str, **settings: Any) -> Callable[[F], F]:
    """`--model` or `--machine`, by name or file; `words`: help text, `settings`: for click."""
    return click.option(
        f"--{kind}",
        metavar="NAME|FILE",
        help=words,
        shell_complete=complete_names(kind),
        show_default="default" in settings,
        **settings,
    )


def set_option(words: str) -> Callable[[F], F]:
    """`--set`; `words` say what it changes."""
    return click.option("--set", multiple=True, metavar="KEY=VALUE", help=f"{words} May be repeated.")


def added(options: Sequence[Callable[[F], F]]) -> Callable[[F], F]:
    """Add options to a command, in this order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def search_options(*, required: bool = True, without: Sequence[str] = ()) -> Callable[[F], F]:
    """Add to `NAME_command` the options of a request that the command NAME has, and --help.

    required: --gpus and --model must be given; without: options that the command words itself.
    """

    def decorate(command: F) -> F:
        asked = options_of(command.__name__.removesuffix("_command"))
        made = [
            click_option(name, option, required=required and name in ("gpus", "model"))
            for name, option in asked.items()
            if name not in without
        ]
        return added([*made, help_option])(command)

    return decorate


def click_option(name: str, option: Option, *, required: bool = False) -> Callable[[F], F]:
    """An option of a request as one of a command."""
    settings: dict[str, Any] = {"help": option.words, "metavar": option.shown, "multiple": option.several}
    if option.default:
        settings |= {"default": option.default, "show_default": True}
    if option.alone is not None:
        settings |= {"is_flag": False, "flag_value": _ANY if option.alone is True else option.alone}
    if option.kind == "count":
        settings["type"] = Count(option.least, alone=_ANY if option.alone else "", words=option.choices)
    elif option.kind == "choice":
        known = dict.fromkeys((*option.choices, *([str(option.alone)] if option.alone else [])))
        settings["type"] = SuggestingChoice(tuple(known))
    elif option.kind == "name":
        settings["shell_complete"] = complete_names(name)  # type: ignore[arg-type]
    elif option.kind == "flag":
        settings["is_flag"] = True
    elif option.choices:
        settings["shell_complete"] = lambda ctx, param, begun: [one for one in option.choices if one.startswith(begun)]
    if option.kind == "switch":
        return click.option(f"{flag(name)}/{flag('no_' + name)}", default=None, **settings)
    return click.option(flag(name), required=required, **settings)


_ANY = "any"
"""Stands for an option without the number that it can have."""


def format_option(formats: Sequence[str] = ("table", "json", "csv", "md")) -> Callable[[F], F]:
    """`--format`, passed on as `output_format`."""
    return click.option(
        "--format",
        "output_format",
        type=SuggestingChoice(formats),
        default=formats[0],
        show_default=True,
        help="How to print the result.",
    )


def command_line() -> str:
    """The command line being run, for provenance."""
    words = click.get_current_context().meta.get(WORDS, [])
    return shlex.join(["axonn-tune", *words])


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names between commas."""
    return tuple(name.strip() for name in (value or "").split(",") if name.strip())


def _drawable(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """The path of a report; EnvironmentProblem before any work if it cannot be drawn."""
    if value is not None:
        from axonn_tune.report.page import require_plotly

        require_plotly()
    return value


def _colored(ctx: click.Context, param: click.Parameter, value: bool | None) -> bool:
    """Whether to color output, by option or terminal."""
    from axonn_tune.report.output import use_color

    return use_color(wanted=value)


training_options = added(
    [
        click.option("--steps", type=Count(), metavar="N", help="Train up to this step. Default: the config's."),
        click.option("--resume", is_flag=True, help="Fail if there is no checkpoint to resume from."),
        click.option(
            "--resume-from",
            metavar="NAME",
            help="Resume from this checkpoint, such as step-200, instead of the newest.",
        ),
        click.option("--directory", metavar="DIR", help="Folder for metrics. Default: runs/<time>-<name>."),
    ]
)
"""Options of commands that train as a launch config says."""
terms_option = click.option(
    "--terms", is_flag=True, help="In the final table, one row for each collective of each layer."
)
wide_option = click.option("--wide", is_flag=True, help="More columns in tables.")
columns_option = click.option(
    "--columns", callback=_names, metavar="NAME,...", help="Only these columns in tables; an unknown name lists all."
)
verbose_option = click.option("-v", "--verbose", is_flag=True, help="Print all remarks and tables.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only the result, no remarks.")
html_option = click.option(
    "--html",
    callback=_drawable,
    metavar="FILE",
    help="Also write a report here: one self-contained HTML file. Needs the extra [report].",
)
color_option = click.option(
    "--color/--no-color",
    default=None,
    callback=_colored,
    help="Default: in a terminal; NO_COLOR, FORCE_COLOR and TERM=dumb are respected.",
)


def given(name: str) -> bool:
    """Whether an option was given, and does not have its default."""
    from click.core import ParameterSource

    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def require_problem(options: Mapping[str, Any]) -> None:
    """click.UsageError unless --gpus and --model are given."""
    missing = [f"--{name}" for name in ("gpus", "model") if options[name] is None]
    if missing:
        raise click.UsageError(f"Missing option{'s' * (len(missing) > 1)} {' and '.join(missing)}.")


def refuse_search(words: str, options: Mapping[str, Any], *, allowed: Sequence[str] = ("machine",)) -> None:
    """click.UsageError if options of a search other than those allowed were given where `words` has said all."""
    names = [name for name in options if name not in allowed and given(name)]
    if names:
        flags = [
            param.opts[0] if isinstance(param, click.Option) else param.human_readable_name.strip("[].")
            for param in click.get_current_context().command.params
            if param.name in names
        ]
        raise click.UsageError(f"{words} all of it: leave out {', '.join(flags)}.")


def beside_command(path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a search that were given beside a command; click.UsageError for those that pin its layout."""
    refuse_search(f"{path} says", options, allowed=tuple(BESIDE_COMMAND))
    return {name: options[name] for name in BESIDE_COMMAND if given(name)}


_WRITTEN = ("output", "html", "trace", "plot", "points", "junit", "markdown", "baseline")
"""Options that name a file to write."""
_PASSED_ON = ("command", "start_with", "set")
"""Parameters whose control characters are their own."""
_NO_FILES = ("name", "kind", "reason", "framework", "fact", *_PASSED_ON)
"""Parameters that name no file."""
_LEARNS = ("learn", "calibrate")
"""Commands whose output may take the place of the machine's profile: it holds what that held."""
_DOCUMENTS = dict.fromkeys((*_LEARNS, "profile"), "machine")
_DOCUMENTS |= {"import": "model", "validate": "measurement", "regress": "baseline"}
"""Kind of document that a command writes as its --output or baseline; other commands and options write none."""
_LATER = (("search", "output"), ("calibrate", "points"))
"""Outputs that are looked at when they are written: launch files, by their text; raw points, which are continued."""


def refusing_overwrites(command: click.Command) -> click.Command:
    """The command, or those of a group, refusing to write over what it reads and what this tool has not written.

    Commands that write get --force, which allows the latter.
    """
    for one in command.commands.values() if isinstance(command, click.Group) else ():
        refusing_overwrites(one)
    if any(param.name in _WRITTEN for param in command.params):
        words = "Replace files that axonn-tune has not written."
        command.params.insert(-1, click.Option(["--force"], is_flag=True, help=words))
    run = command.callback

    def callback(*args: Any, force: bool = False, **options: Any) -> Any:
        from axonn_tune.files import require_own

        context = click.get_current_context()
        require_separate_files({param: context.params.get(param.name or "") for param in context.command.params})
        for path, kind in () if force else _outputs(context):
            require_own(path, kind=kind)
        return run(*args, **options) if run is not None else None

    command.callback = callback
    return command


def _outputs(context: click.Context) -> Iterator[tuple[str, str]]:
    """Files that a command will write, and the kind of document of each."""
    name = context.command.name or ""
    for param in context.command.params:
        path, is_main = context.params.get(param.name or ""), param.name in ("output", "baseline")
        if _is_written(param) and isinstance(path, str) and path not in ("", "-") and (name, param.name) not in _LATER:
            yield path, _DOCUMENTS.get(name, "") if is_main else ""


def require_separate_files(values: Mapping[click.Parameter, Any]) -> None:
    """click.UsageError if two options would write one file, or one would write over what another reads, or into it.

    Also for a name that holds what a terminal obeys, since messages show it, or bytes that are no text.
    """
    seen: dict[Path, click.Parameter] = {}
    for param, path in _named_files(values):
        other = seen.setdefault(Path(os.path.realpath(path)), param)
        writes = [_is_written(one) for one in (other, param)]
        if other is not param and (all(writes) or (any(writes) and Path(path).is_file())):
            names = " and ".join(_shown(one) for one in (other, param))
            raise click.UsageError(f"{names} are the same file, {path}: give each its own.")
    for written, param in seen.items():
        for folder in written.parents if _is_written(param) else ():
            if isinstance(reader := seen.get(folder), click.Argument):
                raise click.UsageError(f"{_shown(param)} is in the folder {folder}, which {_shown(reader)} reads.")


def _named_files(values: Mapping[click.Parameter, Any]) -> Iterator[tuple[click.Parameter, str]]:
    """What parameters name, where it may be a file, and the files of facts beside logs."""
    from axonn_tune.errors import CONTROL

    command = click.get_current_context().command.name
    for param, value in values.items():
        for path in value if isinstance(value, tuple) else (value,):
            if not isinstance(path, str) or path in ("", "-") or (param.name == "machine" and command in _LEARNS):
                continue
            if param.name not in _PASSED_ON and (odd := CONTROL.search(path)):
                what = "the control character" if odd[0] < "\ud800" else "no text in this locale: the byte"
                raise click.UsageError(f"{_shown(param)} holds {what} {odd[0]!r}.")
            if param.name not in _NO_FILES:
                config = os.path.join(path, "config.json")  # noqa: PTH118 - a name that may be no path
                yield param, config if command == "import" and Path(config).is_file() else path
                if command in ("learn", "diagnose") and isinstance(param, click.Argument) and Path(path).name:
                    yield param, str(Path(path).with_suffix(".yaml"))


def _is_written(param: click.Parameter) -> bool:
    """Whether a parameter names a file to write; a baseline is written with --record only."""
    recorded = click.get_current_context().params.get("record")
    return param.name in _WRITTEN and (param.name != "baseline" or bool(recorded))


def _shown(param: click.Parameter) -> str:
    """An option by its long name, an argument as the usage has it."""
    return (
        max(param.opts, key=len) if isinstance(param, click.Option) else param.make_metavar(click.get_current_context())
    )


def load(options: Mapping[str, Any]) -> Inputs:
    """Load the documents that the options of a search name, and build the problem."""
    from axonn_tune.ranking.inputs import load_inputs

    require_problem(options)
    return load_inputs(Request(**options))


def say_assumed(*searched: Inputs) -> None:
    """Print what follows from replaced values of the machine, and the batch and sequence length of imported models, on
    standard error."""
    from axonn_tune.report.output import wrapped
    from axonn_tune.specs.numbers import told

    for words in told(searched[0].machine.consequences, kept=False):
        click.echo(wrapped(f"Assumed: {words}."), err=True)
    for one in searched:
        model, workload = one.model.document, one.problem.workload
        own = model.defaults.sequence_length
        if given("seq") and not given("batch") and workload.sequence_length != own:
            kept = (
                f"--seq {workload.sequence_length:,} without --batch keeps {workload.global_batch:,} sequences: "
                f"{workload.global_batch * workload.sequence_length / 1e6:,.3g} million tokens a step, "
                f"{workload.sequence_length / own:.3g} times the model's default."
            )
            click.echo(wrapped(kept), err=True)
        if taken := guessed_words(model, batch=workload.global_batch, length=workload.sequence_length):
            click.echo(wrapped(f"Assumed when the model was imported: {taken}."), err=True)


def guessed_words(model: Model, *, batch: int, length: int) -> str:
    """Batch and sequence length as an import assumed them, where no option states them; "" if it assumed none."""
    options = (
        ("batch", "batch", f"a batch of {batch:,} sequences (--batch)"),
        ("seq", "sequence length", f"{length:,} of up to {model.max_sequence_length:,} tokens in a sequence (--seq)"),
    )
    guessed = model.source.partition("assumed:")[2]
    return " and ".join(words for option, name, words in options if name in guessed and not given(option))


def write_or_print(output: str | None, text: str, *, wrote: str | None) -> None:
    """Write a result to a file and report `wrote`; without a path, or for `-`, print it."""
    from axonn_tune.files import write_text_atomically

    if output in (None, "-"):
        click.echo(text, nl=False)
        return
    write_text_atomically(str(output), text)
    if wrote is not None:
        click.echo(wrote, err=True)


def show(found: ReportedResult, text: str, *, html: str | None, quiet: bool = False) -> None:
    """Print a result, and write its report if one is wanted."""
    click.echo(text, nl=False, color=True)
    if html:
        write_html(html, [found.section(source=command_line())], quiet=quiet)


def write_html(path: str, sections: list[Json], *, quiet: bool = False) -> None:
    """Write the report and say so."""
    from axonn_tune.report.page import write_page

    write_page(path, sections, command=command_line())
    if not quiet:
        click.echo(f"Wrote the report as {path}.", err=True)
