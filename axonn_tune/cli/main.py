"""The command line's entry point: finds the command, and maps every error to a message and an exit code."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import errno
import gc
import importlib
import io
import os
import re
import sys
from collections import UserDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from axonn_tune.cli.options import WORDS, help_option, refusing_overwrites
from axonn_tune.errors import COLORS, CONTROL, AxonnTuneError, EnvironmentProblem, UsageError
from axonn_tune.vocabulary import VERSION

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


EPILOG = """\b
Examples:
  axonn-tune --gpus 64 --model llama3-70b --machine dgx-h100 --framework megatron-core
  axonn-tune --gpus 256 --model deepseek-v3 --machine dgx-h100 --framework megatron-core
  axonn-tune --gpus min --model llama3-70b --machine dgx-h100 --framework megatron-core
  axonn-tune explain --from-command run.sh --machine dgx-h100
  axonn-tune --gpus 1024 --model 80b -o launch.yaml --emit slurm
  axonn-tune sweep --gpus 64..4096x2 --model 80b

\b
Your own model, and your own cluster from logs of training or of nccl-tests:
  axonn-tune models import config.json -o mymodel.yaml
  axonn-tune learn slurm-1234.out --machine dgx-h100 -o ours.yaml
  axonn-tune --gpus 64 --model mymodel.yaml --machine ours.yaml

\b
Without a command, axonn-tune searches: `axonn-tune search --help` lists the options.
The result goes to standard output, everything else to standard error.

\b
Exit codes:
  0    done
  1    internal error; please report it
  2    a wrong option, argument or document
  3    no layout satisfies all constraints; the message names the binding constraint
  4    a validation or regression check failed, or a lab or run is in a wrong state
  5    something is missing on this host, or the disk is full
  6    training did not finish (run, lab run)
  75   training stopped by a signal, state saved (run, lab run)
  130  interrupted
"""

_COMMANDS = {
    "Rank and explain": dict.fromkeys(("search", "explain", "compare", "sweep", "trace", "report"), "search"),
    "Run and measure": {
        "run": "run",
        "lab": "lab",
        "validate": "validate",
        "accuracy": "validate",
        "regress": "validate",
        "data": "run",
        "export": "run",
    },
    "Learn and diagnose": dict.fromkeys(("learn", "diagnose", "calibrate"), "learn"),
    "Documents and set-up": {
        "models": "documents",
        "machines": "documents",
        "schema": "documents",
        "doctor": "run",
        "completion": "main",
    },
}
"""Commands by purpose, in the order a newcomer meets them, and the module of each, imported on first use."""
_DEFAULT = "search"


class LazyCommands(UserDict[str, Any]):
    """Commands by name, from the module of each; it is imported with its first use."""

    def __getitem__(self, name: str) -> click.Command:
        if isinstance(self.data[name], str):
            module = importlib.import_module(f"axonn_tune.cli.{self.data[name]}")
            self.data[name] = refusing_overwrites(getattr(module, f"{name}_command"))
        command: click.Command = self.data[name]
        return command


class ReaderGone(Exception):
    """The reader of standard output has stopped; not an OSError, which click would map to exit code 1."""


@contextlib.contextmanager
def _reader() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise ReaderGone from error


class SearchUnlessNamed(click.Group):
    """A group that searches when it is given options but no command."""

    # The first prints the help that is asked for, the second runs the command.
    make_context = _reader()(click.Group.make_context)
    invoke = _reader()(click.Group.invoke)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put the default command before the first option that is not the group's own."""
        ctx.meta[WORDS] = list(args)
        own = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        for position, word in enumerate(args):
            if word in own:
                continue
            if word.startswith("-"):
                args = [*args[:position], _DEFAULT, *args[position:]]
            break
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands and the group's options, and the search's, which need no command."""
        found = super().shell_complete(ctx, incomplete)
        with click.Context(self.commands[_DEFAULT], parent=ctx, info_name=_DEFAULT) as search:
            known = {item.value for item in found}
            return [
                *found,
                *(item for item in search.command.shell_complete(search, incomplete) if item.value not in known),
            ]

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Commands in the order a newcomer meets them."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by purpose."""
        width = max(map(len, self.commands))
        for heading, names in _COMMANDS.items():
            with formatter.section(heading):
                records = [(name.ljust(width), self.commands[name].get_short_help_str(limit=75)) for name in names]
                formatter.write_dl(records)


COMPLETE = "_AXONN_TUNE_COMPLETE"
"""The variable by which a shell asks for completions."""
SHELLS = ("bash", "zsh", "fish")


@click.command("completion", short_help="Print a shell's completion script.")
@click.argument("shell", type=click.Choice(SHELLS))
@help_option
@click.pass_context
def completion_command(ctx: click.Context, /, *, shell: str) -> None:
    """Print the completion script of a SHELL.

    \b
    bash: eval "$(axonn-tune completion bash)" in ~/.bashrc
    zsh:  eval "$(axonn-tune completion zsh)" in ~/.zshrc
    fish: axonn-tune completion fish > ~/.config/fish/completions/axonn-tune.fish

    \b
    Example:
      axonn-tune completion bash
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None, "click knows each of SHELLS"
    click.echo(found(ctx.find_root().command, {}, "axonn-tune", COMPLETE).source())


@click.command(
    cls=SearchUnlessNamed,
    commands=LazyCommands({name: module for found in _COMMANDS.values() for name, module in found.items()}),
    epilog=EPILOG,
    no_args_is_help=True,
    subcommand_metavar="[COMMAND] [ARGS]...",
    context_settings={"max_content_width": 100},
)
@click.version_option(VERSION, prog_name="axonn-tune")
@click.option("--debug", is_flag=True, help="Show where an error came from. Also: AXONN_TUNE_DEBUG=1.")
@help_option
def cli(*, debug: bool) -> None:
    """Predict the step of every parallel layout of a transformer on N GPUs, and rank the layouts.

    It is for people who train or fine-tune large models. --framework has the layouts of Megatron-Core,
    NeMo, Primus, torchtitan, FSDP, DeepSpeed or AxoNN; -o writes the job script of the one you choose. It
    needs a model and a machine profile, no GPU. Each step has an 80% interval; `axonn-tune accuracy` holds
    predictions against published steps.

    \b
    my run, my file:    explain --from-command FILE; diagnose says whether its step is reasonable
    fine-tuning:        --tune lora, --lengths for SFT
    days and money:     --tokens-total 2T --price 2.49
    my cluster, model:  learn from logs; models import

    Scope: pretraining, SFT and LoRA, dense models and experts, BF16 to NVFP4; no DPO, RL, vision towers,
    evaluation or inference.

    Without --framework a layout is a 4D grid x * y * z * data: tensor parallelism over x and y, FSDP
    over z, replicas over data. The ranking is by communication time per step, as in AxoNN's paper, or
    by the step (--rank-by step), and -o writes a launch config for the bundled runtime.
    """
    if debug:
        os.environ["AXONN_TUNE_DEBUG"] = "1"


_OBEYED = re.compile(f"({'|'.join(map(re.escape, COLORS))})|{CONTROL.pattern}")


class _Shown(io.TextIOWrapper):
    """Standard output or error: of what a terminal would obey, only this tool's colors get there as they are.

    Names and texts of documents and logs hold anything, and get into tables, remarks and errors in many ways.
    """

    plain: TextIO
    """The same for what draws."""

    @classmethod
    def of(cls, stream: TextIO) -> _Shown:
        """A stream, which is left alone until this one is detached."""
        stream.flush()
        # As click does where a locale knows only ASCII.
        encoding = "utf-8" if codecs.lookup(stream.encoding).name == "ascii" else stream.encoding
        through = bool(getattr(stream, "write_through", False))
        shown = cls(stream.buffer, encoding, "backslashreplace", None, bool(stream.line_buffering), through)
        shown.plain = stream
        return shown

    def write(self, text: str, /) -> int:
        """Write the text with the numbers of such characters, and of those that the encoding lacks, as in JSON."""
        super().write(_OBEYED.sub(lambda found: found[1] or f"\\u{ord(found[0]):04x}", text))
        return len(text)


@contextlib.contextmanager
def _shown_streams() -> Iterator[None]:
    """Standard output and error as `_Shown`, and ready to write to where closed."""
    # Stand in for standard streams that are closed, before a file of ours gets their number.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = own = [_Shown.of(one) if hasattr(one, "buffer") else one for one in before]
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in own:
            if isinstance(stream, _Shown):
                with contextlib.suppress(OSError):
                    stream.detach()


@_shown_streams()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; every error ends in one line, not in a traceback."""
    # A command is short, and the cycles of a search are some hundred objects: looking for them takes a tenth of it, and
    # a fifth once more at exit, when all memory goes back anyway.
    gc.set_threshold(1_000_000, 50, 50)
    atexit.register(gc.freeze)
    try:
        code = cli.main(
            args=None if arguments is None else list(arguments), prog_name="axonn-tune", standalone_mode=False
        )
        sys.stdout.flush()
    except BaseException as error:
        return _reported(error)
    return code if isinstance(code, int) else 0


def _reported(error: BaseException) -> int:
    """Print the error if standard error is writable; returns the exit code."""
    if COMPLETE in os.environ and isinstance(error, KeyError | ValueError | IndexError | SystemExit):
        # As from click, whose completion ends with 1 for what no shell asks.
        if isinstance(error, SystemExit) and not error.code:
            raise error
        error = UsageError(f"{COMPLETE} is set, but it, COMP_WORDS and COMP_CWORD are not as a shell sets them")
    try:
        if os.environ.get("AXONN_TUNE_DEBUG"):
            import traceback

            traceback.print_exc()
        return _report(error)
    except OSError:
        # Standard error is full too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        if isinstance(error, AxonnTuneError | click.ClickException):
            return error.exit_code
        return EnvironmentProblem.exit_code


def _report(error: BaseException) -> int:
    """Print the error on standard error; returns the exit code."""
    if isinstance(error, click.ClickException):
        error.show()
        return error.exit_code
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt | click.Abort):
        click.echo("interrupted", err=True)
        return 130
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, ReaderGone | BrokenPipeError):
        # The reader has closed the pipe: discard buffered output, also at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    if isinstance(error, OSError):
        kind = UsageError if error.errno == errno.ENAMETOOLONG else EnvironmentProblem
        named = f" {str(error.filename)[:80]!r}" if error.filename else ""
        error = kind(f"cannot write or read{named}: {error.strerror or error}")
    if isinstance(error, AxonnTuneError):
        click.echo("\n".join([f"Error: {error}", *([error.advice] if error.advice else [])]), err=True)
        return error.exit_code
    name = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    click.echo(f"Internal error: {name}\nPlease report this, with what --debug shows.", err=True)
    return 1
