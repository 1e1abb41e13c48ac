"""Options that several commands share, and the step from them to a problem.

A command that searches is written::

    @click.command("compare")
    @problem_options()
    def compare(*, chosen: Chosen, ...) -> None:
        inputs = load(chosen)          # Inputs: .problem, .model, .machine

Names of choices are spelled out here, so that `--help` need not import the schemas; a test compares.
"""

from __future__ import annotations

import difflib
import functools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, cast

import click

from axonn_tune.cli.documents import complete_names

if TYPE_CHECKING:
    from axonn_tune.api.options import Options
    from axonn_tune.ranking.inputs import Inputs

    BaseChoice = click.Choice[str]
else:
    BaseChoice = click.Choice

F = TypeVar("F", bound=Callable[..., Any])

COSTS = ("alpha-beta", "paper", "paper-released", "paper-mended")
RANK_BY = ("communication", "exposed", "iteration")
PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
RECOMPUTES = ("none", "selective", "full")
OVERLAPS = ("gather_prefetch", "input_gradient", "weight_gradient", "data_parallel", "output")
AXES = ("x", "y", "z", "data")
DEFAULT_MACHINE = "perlmutter"

_NOT_OPTIONS = {"gpus", "model", "machine", "batch", "rank_by", "settings"}
"""Fields of `Chosen` that the functions of the package take by themselves, or by another name."""

WORDS = "axonn_tune.words"
"""Key of the words of the command line in a context's `meta`."""


class SuggestingChoice(BaseChoice):
    """A choice that names the nearest valid value, which click does for commands and options only."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ANN401
        """Return the chosen value; the error of a wrong one ends in a suggestion."""
        begun = [choice for choice in self.choices if choice.startswith(str(value))]
        near = begun or difflib.get_close_matches(str(value), list(self.choices), n=1)
        if value in self.choices or not near:
            return str(super().convert(value, param, ctx))
        known = ", ".join(self.choices)
        self.fail(f"{value!r} is none of {known}; did you mean {near[0]!r}?", param, ctx)


def parse_order(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """A permutation of the axes, such as `y,x,z,data`, as a tuple."""
    if value is None:
        return None
    from axonn_tune.api import options
    from axonn_tune.errors import UsageError

    try:
        return options.parse_order(value)
    except UsageError as error:
        raise click.BadParameter(str(error), ctx, param) from error


@dataclass(frozen=True)
class Chosen:
    """Values of the shared options, named as their parameters."""

    gpus: int | None
    model: str | None
    machine: str
    batch: int | None
    seq: int | None
    precision: Any
    rank_by: Any
    order: tuple[str, ...] | None
    recompute: Any
    micro_batch: int | None
    kept_layers: int | None
    shard_optimizer: bool | None
    split_micro_batch: bool
    overlap: tuple[Any, ...]
    no_overlap: tuple[str, ...]
    x: int | None
    y: int | None
    z: int | None
    data: int | None
    settings: tuple[str, ...]


# Given to each command: names given through a context depend on which command ran first in a process.
help_option = click.help_option("-h", "--help")

_COUNT = click.IntRange(min=1)


def _inputs(*, required: bool, lists: bool) -> list[Callable[[F], F]]:
    """Options that say what is trained where."""
    how_many = click.option("--gpus", type=_COUNT, required=required, metavar="N", help="Number of GPUs.")
    batch = click.option(
        "--batch", type=_COUNT, metavar="N", help="Sequences in a step, over all GPUs. Default: the model's."
    )
    return [
        *([] if lists else [how_many, batch]),
        click.option(
            "--model",
            required=required,
            metavar="NAME|FILE",
            help="Model: a name from `axonn-tune models list`, or a YAML file.",
            shell_complete=complete_names("model"),
        ),
        click.option(
            "--machine",
            default=DEFAULT_MACHINE,
            show_default=True,
            metavar="NAME|FILE",
            help="Machine: a name from `axonn-tune machines list`, or a YAML file.",
            shell_complete=complete_names("machine"),
        ),
        click.option("--seq", type=_COUNT, metavar="N", help="Tokens in a sequence. Default: the model's."),
        click.option("--precision", type=SuggestingChoice(PRECISIONS), help="Number format. Default: bf16."),
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="Change one value of the model, machine or workload, as in machine.accelerator.memory_gib=80. "
            "May be repeated.",
        ),
    ]


def _limits(*, ranks: bool) -> list[Callable[[F], F]]:
    """Options that pin what would be searched; `ranks`: and the one that says what to rank by."""
    pins = [
        click.option(f"--{axis}", type=_COUNT, metavar="N", help=f"Only grids with this size of axis {axis}.")
        for axis in AXES
    ]
    rank_by = click.option(
        "--rank-by",
        type=SuggestingChoice(RANK_BY),
        default=RANK_BY[0],
        show_default=True,
        help="Time to rank by: all communication, its exposed part, or the whole step (iteration).",
    )
    return [
        *([rank_by] if ranks else []),
        *pins,
        click.option(
            "--order",
            callback=parse_order,
            metavar="AXES",
            help="Only this order of axes, fastest-varying rank first: x,y,z,data.",
        ),
        click.option("--recompute", type=SuggestingChoice(RECOMPUTES), help="Only this kind of recomputation."),
        click.option(
            "--micro-batch", type=_COUNT, metavar="N", help="Only this micro-batch, in sequences of one rank."
        ),
        click.option(
            "--kept-layers",
            type=click.IntRange(min=0),
            metavar="N",
            help="Layers that keep their gathered weights for the backward pass. Default: as many as fit.",
        ),
    ]


def _execution() -> list[Callable[[F], F]]:
    """Options that say how a step is executed."""
    return [
        click.option(
            "--shard-optimizer/--no-shard-optimizer",
            default=None,
            help="Split master weights and optimizer states over the data axis (ZeRO-1). Default: no.",
        ),
        click.option(
            "--split-micro-batch",
            is_flag=True,
            help="Run each micro-batch as two halves, one's all-reduce behind the other's work.",
        ),
        click.option(
            "--overlap",
            type=SuggestingChoice(OVERLAPS),
            metavar="NAME",
            multiple=True,
            help=f"Overlap just this, and whatever else is named so: {', '.join(OVERLAPS)}. Default: everything.",
        ),
        click.option(
            "--no-overlap",
            type=SuggestingChoice((*OVERLAPS, "all")),
            metavar="[NAME]",
            multiple=True,
            is_flag=False,
            flag_value="all",
            help="Do not overlap this; without a name, overlap nothing. May be repeated.",
        ),
    ]


def problem_options(*, required: bool = True, lists: bool = False, ranks: bool = True) -> Callable[[F], F]:
    """Add the shared options to a command, which takes their values as one argument `chosen`.

    required: --gpus and --model must be given; lists: the command has its own --gpus and --batch;
    ranks: --rank-by is among them.
    """

    def decorate(callback: F) -> F:
        @functools.wraps(callback)
        def collected(**parameters: Any) -> Any:  # noqa: ANN401
            names = [each.name for each in fields(Chosen)]
            chosen = Chosen(**{name: parameters.pop(name, None) for name in names})
            return callback(chosen=chosen, **parameters)

        decorated: Any = help_option(collected)
        for option in reversed([*_inputs(required=required, lists=lists), *_limits(ranks=ranks), *_execution()]):
            decorated = option(decorated)
        return decorated  # type: ignore[no-any-return]

    return decorate


def format_option(formats: Sequence[str] = ("table", "json", "csv", "md")) -> Callable[[F], F]:
    """`--format`, handed over as `output_format`."""
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


wide_option = click.option("--wide", is_flag=True, help="More columns in tables.")
columns_option = click.option(
    "--columns", callback=_names, metavar="NAME,...", help="Just these columns in tables; a wrong one lists all."
)
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print the result alone, no remarks.")
html_option = click.option(
    "--html", metavar="FILE", help="Also write a report here: one self-contained HTML file. Needs the extra [report]."
)
color_option = click.option(
    "--color/--no-color", default=None, help="Default: in a terminal; NO_COLOR, FORCE_COLOR and TERM=dumb hold."
)


def load(chosen: Chosen) -> Inputs:
    """Load the documents of the shared options and build the problem."""
    from axonn_tune.api.options import make_choices
    from axonn_tune.ranking.inputs import load_inputs

    return load_inputs(make_choices(**problem_of(chosen), rank_by=rank_by(chosen), options=options_of(chosen)))


class ProblemOptions(TypedDict):
    """What is trained where, as the functions of the package take it."""

    model: str
    gpus: int
    machine: str
    batch: int | None


def problem_of(chosen: Chosen) -> ProblemOptions:
    """What is trained where; click.UsageError if it is not said."""
    if chosen.gpus is None or chosen.model is None:
        missing = [name for name, value in (("--gpus", chosen.gpus), ("--model", chosen.model)) if value is None]
        raise click.UsageError(f"Missing option {' and '.join(missing)}.")
    return {"model": chosen.model, "gpus": chosen.gpus, "machine": chosen.machine, "batch": chosen.batch}


def rank_by(chosen: Chosen) -> Any:  # noqa: ANN401 - one of RANK_BY
    """What to rank by; the first of all for a command that does not ask."""
    return chosen.rank_by or RANK_BY[0]


def options_of(chosen: Chosen) -> Options:
    """The other shared options, as the functions of the package take them."""
    named = {each.name: getattr(chosen, each.name) for each in fields(Chosen) if each.name not in _NOT_OPTIONS}
    return cast("Options", named | {"set": chosen.settings})
