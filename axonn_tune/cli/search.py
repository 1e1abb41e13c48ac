"""`axonn-tune search` (also what `axonn-tune` does without a command), `explain`, `sweep` and `compare`.

Also `report`, results as one HTML file, and `trace`, steps as one file for Perfetto.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    Count,
    SearchCommand,
    SuggestingChoice,
    beside_command,
    color_option,
    columns_option,
    command_line,
    document_option,
    format_option,
    given,
    help_option,
    html_option,
    quiet_option,
    refuse_search,
    require_problem,
    say_assumed,
    search_options,
    show,
    verbose_option,
    wide_option,
    write_html,
    write_or_print,
)
from axonn_tune.errors import AxonnTuneError
from axonn_tune.request import MIN

if TYPE_CHECKING:
    from axonn_tune.api.explanation import ExplainFormat, Explanation
    from axonn_tune.api.search import Format, SearchResult
    from axonn_tune.launch.scripts import Emit, ScriptKind


@click.command("search", cls=SearchCommand, short_help="Rank every layout of a number of GPUs.")
@search_options()
@click.option(
    "--all",
    "with_rejected",
    is_flag=True,
    help="List all layouts unless --top says how many, and rejected layouts, with the reasons.",
)
@click.option(
    "--unfold",
    is_flag=True,
    help="List layouts that only exchange context parallelism and micro-batch as rows of their own.",
)
@format_option()
@wide_option
@columns_option
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Write the launch config, or another framework's command, of the first row or of --pick. "
    "Default with --emit: launch.yaml, run.sh or run.sbatch.",
)
@click.option("--pick", type=Count(), metavar="N", default=1, show_default=True, help="Row that -o writes.")
@click.option(
    "--approximate",
    is_flag=True,
    help="Write it although the model's network has something otherwise, such as norms in other places: same speed, "
    "another network.",
)
@click.option("--tokens", metavar="FILE", help="Token file of `axonn-tune data` for the launch config.")
@click.option(
    "--emit",
    type=SuggestingChoice(("torchrun", "slurm", "bridge", "toml", "fully-shard", "swift")),
    multiple=True,
    help="Job script to write: torchrun (bash) or slurm (sbatch). For other frameworks also another form: bridge "
    "(Megatron-Bridge), toml (torchtitan 0.2.2), fully-shard (FSDP without Accelerate), swift (megatron sft of "
    "ms-swift).",
)
@html_option
@verbose_option
@quiet_option
@color_option
def search_command(
    *,
    with_rejected: bool,
    unfold: bool,
    output_format: Format,
    wide: bool,
    columns: tuple[str, ...],
    output: str | None,
    pick: int,
    tokens: str | None,
    approximate: bool,
    emit: tuple[Emit, ...],
    html: str | None,
    verbose: bool,
    quiet: bool,
    color: bool,
    **options: Any,
) -> None:
    """Rank every layout of a number of GPUs.

    With --framework they are ranked by step time, 4D grids without it by communication time;
    --rank-by asks for another.

    The ranking goes to standard output; which rows to benchmark, the interval of the first and what is assumed
    go to standard error, with -v also why the first beats the second and what was rejected.

    \b
    Examples:
      axonn-tune --gpus 64 --model llama3-70b --machine dgx-h100 --framework megatron-core
      axonn-tune --gpus 64 --model 20b --rank-by iteration --wide
      axonn-tune --gpus 64 --model 20b --columns rank,grid,step,mfu --top 5
      axonn-tune --gpus 64 --model 20b -o launch.yaml --emit slurm
    """
    from axonn_tune.report.output import terminal_width, wrapped
    from axonn_tune.report.remarks import INTERRUPTED

    if emit and output is None:
        script = "run.sbatch" if "slurm" in emit else "run.sh"
        output = "launch.yaml" if options["framework"] in (None, "axonn-tune") else script
    _check_output(output, pick=pick, tokens=tokens, approximate=approximate)
    if options["gpus"] == MIN and (with_rejected or unfold):
        extra = "--all" if with_rejected else "--unfold"
        raise click.UsageError(f"--gpus min lists numbers of GPUs: leave out {extra}.")
    named = {"html": html, "tokens": tokens, **{name: options[name] for name in ("model", "machine")}}
    if output:
        _keep_apart(output, named, framework=options["framework"])
    top = options["top"] if given("top") or not with_rejected else 0
    found = _searched({**options, "top": top and max(top, pick)})
    interrupted = found.ranked.interrupted
    if not interrupted:
        found.ranked.require_row(pick)
    _require_written(found, emit=emit, pick=pick)
    shown = found.render(
        output_format,
        top=top,
        rejected=with_rejected,
        wide=wide,
        columns=columns,
        unfold=unfold,
        color=color,
        terminal=terminal_width(),
    )
    show(found, shown, html=html, quiet=quiet)
    found.require_any()
    if output_format in ("table", "md") and not quiet:
        remarks = [] if found.sizes else found.remarks_below(top=top, unfold=unfold, verbose=verbose)
        click.echo("\n".join(["", *map(wrapped, remarks)]), err=True)
        say_assumed(found.inputs)
        if not (output or interrupted or given("cost")):
            click.echo(wrapped(_next(found, verbose=verbose)), err=True)
    elif interrupted:
        click.echo(INTERRUPTED, err=True)
    if interrupted:
        click.get_current_context().exit(130)
    if output:
        made: dict[str, Any] = {"pick": pick, "tokens": tokens, "emit": emit, "approximate": approximate}
        _write(found, output=output, quiet=quiet, **made)


def _require_written(found: SearchResult, *, emit: tuple[Emit, ...], pick: int) -> None:
    """Refuse a script that the framework cannot express, before a table that would be for nothing."""
    if emit and len(found.ranked) and not found.ranked.interrupted and found.inputs.problem.framework.software:
        from axonn_tune.launch.scripts import emit_kind

        kind, form = emit_kind(emit)
        found.require_script(kind, pick=pick, form=form)


def _searched(options: dict[str, Any]) -> SearchResult:
    """The search, or what it had found when it was interrupted."""
    from axonn_tune.api.search import search
    from axonn_tune.report.output import search_progress

    try:
        with search_progress():
            return search(**options)
    except KeyboardInterrupt as stopped:
        found: SearchResult | None = getattr(stopped, "result", None)
        if found is None:
            raise
        return found


def _next(found: SearchResult, *, verbose: bool) -> str:
    """What users do after a search, by the word to add to this command line."""
    kind: ScriptKind = "slurm" if found.inputs.problem.machine.launcher.slurm else "torchrun"
    other = "sweep --gpus min.. (every number up to twice as many)" if found.sizes else "compare (other frameworks)"
    able = ["explain (where the time goes)", other]
    with contextlib.suppress(AxonnTuneError):
        found.require_script(kind)
        approximate = " --approximate" * bool(found.inputs.problem.model.otherwise)
        able.append(f"--emit {kind}{approximate} (a script)")
    return f"Next: {', '.join([*able, *([] if verbose or found.sizes else ['-v (more)'])])}"


def _check_output(output: str | None, *, pick: int, tokens: str | None, approximate: bool) -> None:
    """Refuse --pick and --emit without -o, and -o to standard output, which has the ranking."""
    if output is None and (tokens or pick != 1 or approximate):
        option = "--tokens" if tokens else "--approximate" if approximate else "--pick"
        raise click.UsageError(f"{option} says what to write: give -o FILE too.")
    if output in ("", "-"):
        raise click.UsageError("-o - : a launch config is a file of its own, and the ranking is on standard output.")


def _keep_apart(output: str, named: Mapping[str, str | None], *, framework: str | None) -> None:
    """Refuse files of other options that what is written would replace.

    That is the launch config, scripts and a framework's config files, which all have the stem of the output.
    """
    suffixes = _WRITTEN if framework in (None, "axonn-tune") else (*_WRITTEN, ".yaml", ".json", ".toml", ".py")
    path = Path(output)
    beside = [path.with_name(path.stem + suffix) for suffix in suffixes] if path.name else []
    written = {os.path.realpath(one) for one in (path, *beside)}
    for option, other in named.items():
        if other and os.path.realpath(other) in written and (option == "html" or Path(other).is_file()):
            raise click.UsageError(f"-o {output} would replace --{option} {other}: give each its own name.")


_WRITTEN = (".sh", ".sbatch")
"""Suffixes of scripts."""


def _write(found: SearchResult, *, output: str, quiet: bool, pick: int, emit: tuple[Emit, ...], **made: Any) -> None:
    """Write the launch config of a row, and the script that starts it."""
    from axonn_tune.report.output import wrapped

    path, *others = replace(found, call=command_line()).write_launch_config(
        output, pick=pick, emit=emit, force=given("force"), **made
    )
    if otherwise := (model := found.inputs.problem.model).otherwise:
        words = f"Warning: what was written trains another network than {model.name}, which has {'; '.join(otherwise)}."
        click.echo(words, err=True)
    beside = "what it reads" if found.inputs.problem.framework.software else "the script that starts it"
    written = [f"#{pick} as {path}", *([f"{beside} as {' and '.join(map(str, others))}"] if others else [])]
    if not quiet:
        click.echo(f"Wrote {' and '.join(written)}.", err=True)
        if emit and not found.inputs.problem.framework.software:
            runtime = "It starts the bundled runtime. --framework NAME writes the script of that framework."
            click.echo(wrapped(runtime), err=True)


@click.command("explain", cls=SearchCommand, short_help="Explain one configuration, term by term.")
@click.argument("launch", required=False, metavar="[LAUNCH]")
@search_options(required=False)
@click.option(
    "--from-command",
    metavar="FILE",
    help="Explain the run that a script or config file starts (Megatron-LM, NeMo, torchtitan, DeepSpeed, "
    "Accelerate, LLaMA-Factory, axolotl, ms-swift, TRL, torchtune, NeMo-RL, verl, Hugging Face's Trainer).",
)
@click.option("--trace", metavar="FILE", help="Also write the predicted step as a trace for Perfetto.")
@click.option(
    "--terms", is_flag=True, help="In tables, one row for each collective and GEMM of each layer, with its formula."
)
@format_option(("table", "json", "md"))
@html_option
@verbose_option
def explain_command(
    *,
    launch: str | None,
    from_command: str | None,
    trace: str | None,
    terms: bool,
    output_format: ExplainFormat,
    html: str | None,
    verbose: bool,
    **options: Any,
) -> None:
    """Explain one configuration: what a step is spent on; with -v every collective, kernel and item of memory.

    The configuration is that of a LAUNCH config, or the best that the options leave (--pick N: the
    Nth): pin axes, order and the rest to explain one in particular. With --from-command it is that of a run
    you have: the assumptions made, the cost of the step, and better layouts. Options then state what the
    file does not, such as --gpus.

    \b
    Examples:
      axonn-tune explain --gpus 1024 --model 80b
      axonn-tune explain --gpus 64 --model 20b --x 2 --z 8 --trace step.json
      axonn-tune explain launch.yaml
      axonn-tune explain --from-command run.sh --machine dgx-h100
    """
    from axonn_tune.api.analysis import explain
    from axonn_tune.report.output import search_progress, wrapped

    if trace == "-":
        raise click.UsageError("--trace -: standard output has the explanation.")
    found: Explanation
    if from_command:
        from axonn_tune.api.learning import explain_command as explain_stated

        if launch or given("pick"):
            raise click.UsageError(f"--from-command {from_command}: leave out {launch or '--pick'}.")
        found = explain_stated(from_command, **beside_command(from_command, options))
    elif launch:
        if Path(launch).suffix in (".sh", ".sbatch", ".slurm", ".toml"):
            raise click.UsageError(
                f"{launch} is not a launch config: pass scripts and configs with --from-command {launch}."
            )
        refuse_search(f"{launch} says", options, allowed=("machine", "tokens_total"))
        machine = options["machine"] if given("machine") else None
        found = explain_launch_said(launch, machine=machine, tokens_total=options["tokens_total"])
    else:
        require_problem(options)
        with search_progress():
            found = explain(**options)
    if trace:
        write_trace(trace, found.trace().text, quiet=False)
    click.echo(found.render(output_format, terms=terms, verbose=verbose), nl=False)
    if html:
        write_html(html, [found.section(source=command_line())])
    if not (launch or from_command):
        say_assumed(found.inputs)
    if output_format == "table" and not (verbose or terms):
        more = "-v (layout, collectives, kernels, memory), --terms (every layer), --trace FILE"
        click.echo(f"\n{wrapped(f'Next: {more}')}", err=True)


def explain_launch_said(path: str, *, machine: str | None, tokens_total: str | None = None) -> Explanation:
    """The configuration of a launch config; says so if the machine profile has changed since."""
    from axonn_tune.api.analysis import explain_launch

    found = explain_launch(path, machine=machine, tokens_total=tokens_total)
    if found.machine_changed:
        click.echo(f"The machine profile is not the one that {path} was written with: times differ.", err=True)
    return found


@click.command("sweep", cls=SearchCommand, short_help="Find the best at many GPU counts, batches and models.")
@click.option("--gpus", required=True, metavar="LIST", help="GPU counts: 64,128 or 64..4096x2 or 64..128+16.")
@click.option("--batch", metavar="LIST", help="Global batch sizes, in the same way. Default: the model's.")
@search_options(without=("gpus", "batch"))
@format_option()
@wide_option
@columns_option
@html_option
@verbose_option
@color_option
def sweep_command(
    *,
    output_format: Format,
    wide: bool,
    columns: tuple[str, ...],
    html: str | None,
    verbose: bool,
    color: bool,
    **options: Any,
) -> None:
    """Find the best configuration at every GPU count, batch and model (--model 20b,40b).

    Efficiency is the throughput of one GPU relative to the first feasible count of the same model and batch; with
    --over it is relative to the best size.

    \b
    Examples:
      axonn-tune sweep --gpus 64..1024x2 --model 20b
      axonn-tune sweep --gpus 64,128 --model 10b,20b --weak --batch 1024
      axonn-tune sweep --gpus 128 --model mixtral-8x22b --machine dgx-h100 --framework megatron-core --over ep
    """
    from axonn_tune.api.analysis import sweep
    from axonn_tune.report.output import search_progress

    with search_progress():
        found = sweep(**options)
    text = found.render(output_format, wide=wide, columns=columns, verbose=verbose, color=color)
    show(found, text, html=html)
    # The first point of each model: a batch given for it holds there.
    say_assumed(*reversed({point.inputs.model.sha256: point.inputs for point in reversed(found.points)}.values()))
    found.require_any()


@click.command("compare", cls=SearchCommand, short_help="Compare with the best layouts of other frameworks.")
@search_options(required=False)
@click.option(
    "--from-command",
    metavar="FILE",
    help="Compare for the run that a script or config file starts, and with its own layout.",
)
@format_option()
@click.option("--wide", is_flag=True, help="Print all columns.")
@html_option
@verbose_option
@quiet_option
@color_option
def compare_command(
    *,
    from_command: str | None,
    output_format: Format,
    wide: bool,
    html: str | None,
    verbose: bool,
    quiet: bool,
    color: bool,
    **options: Any,
) -> None:
    """Compare the best 4D grid with the best layouts of other frameworks, by the time of a step.

    Megatron-Core, torchtitan, DeepSpeed, FSDP (ZeRO-3), HSDP, data parallelism, Megatron-AxoNN and AxoNN each run their
    fastest layout that fits into memory, by the numbers of their own software, or on kernels of one quality
    (--same-kernels). With -v a second table has what each step is spent on. --framework names the
    baseline, and adds it if it is another; else the first is it. Software that was not measured on several GPUs, such
    as the bundled runtime, stands apart, as neither the best nor the baseline. --recompute, --micro-batch, --imbalance
    and --no-overlap hold for all; axes, rank order and --kept-layers for 4D, or for the framework named. The paper's
    measurements used full activation recomputation: --recompute full.

    \b
    Examples:
      axonn-tune compare --gpus 64 --model 20b
      axonn-tune compare --gpus 64 --model 20b --recompute full --wide
      axonn-tune compare --from-command run.sh --machine dgx-h100
    """
    from axonn_tune.api.analysis import compare
    from axonn_tune.report.learning import brief
    from axonn_tune.report.output import search_progress, wrapped

    if from_command:
        from axonn_tune.api.learning import compare_command as compare_stated

        found = compare_stated(from_command, **beside_command(from_command, options))
    else:
        require_problem(options)
        with search_progress():
            found = compare(**options)
    text = found.render(output_format, wide=wide, remarks=not quiet, verbose=verbose, color=color)
    show(found, text, html=html, quiet=quiet)
    if quiet:
        return
    if not from_command:
        say_assumed(found.inputs)
    for words in found.said:
        click.echo(wrapped(words if verbose else brief(words)), err=True)
    if output_format == "table":
        more = "" if verbose else ", -v (more)"
        layouts, where = "search --framework NAME (its layouts, a script)", "explain --framework NAME (the time)"
        click.echo(wrapped(f"Next: {layouts}, {where}{more}"), err=True)


@click.command("report", short_help="Write results as one HTML file.")
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option("-o", "--output", required=True, metavar="FILE.HTML", help="Write the report here.")
@document_option("machine", "Machine profile of launch configs, instead of the one they name.")
@quiet_option
@help_option
def report_command(*, sources: tuple[str, ...], output: str, machine: str | None, quiet: bool) -> None:
    """Write results as one self-contained HTML file, to be read in any browser, without a network.

    SOURCE is a launch config; a ranking, explanation, sweep, comparison or validation as --format json prints
    it; a measurement file, as `validate -o` writes it; or the folder of a finished run. Several become
    sections of one report. Each is recognised by its schema. The same is written by --html of search,
    explain, compare, sweep and validate. It needs plotly: pip install '.[report]' in a checkout.

    \b
    Example:
      axonn-tune --gpus 1024 --model 80b -o launch.yaml
      axonn-tune report launch.yaml -o report.html
    """
    from axonn_tune.api.sources import read_section
    from axonn_tune.report.page import require_plotly

    require_plotly()
    sections = [read_section(source, number=number, machine=machine) for number, source in enumerate(sources, start=1)]
    write_html(output, sections, quiet=quiet)


@click.command("trace", short_help="Predicted and measured steps in one file for Perfetto.")
@click.argument("launch", metavar="LAUNCH.YAML")
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("-o", "--output", metavar="FILE", help="Write the trace here. Default: standard output.")
@click.option("--step", type=Count(), metavar="N", help="Measured step. Default: of median duration.")
@document_option("machine", "Predict for this machine. Default: the one that the launch config names.")
@quiet_option
@help_option
def trace_command(
    *, launch: str, runs: tuple[str, ...], output: str | None, step: int | None, machine: str | None, quiet: bool
) -> None:
    """Write the predicted step of LAUNCH.YAML, and measured steps of it, as one trace.

    Each RUN is the folder of a run that was started with --trace, or one of its files trace-rank<N>.json.
    Predicted and measured processes have the same tracks, and the same names for parts of the step
    and for collectives; they are aligned where the step starts. Open the file in https://ui.perfetto.dev.

    \b
    Examples:
      axonn-tune trace launch.yaml -o predicted.json
      axonn-tune run launch.yaml --steps 6 --trace 2 --trace-all --directory traced
      axonn-tune trace launch.yaml traced -o both.json
    """
    if step is not None and not runs:
        raise click.UsageError("--step is of a measured run: name its folder too.")
    trace = explain_launch_said(launch, machine=machine).trace(runs, step=step)
    write_trace(output, trace.text, quiet=quiet)
    if not quiet:
        click.echo("\n".join(trace.remarks), err=True)


def write_trace(output: str | None, text: str, *, quiet: bool) -> None:
    """Write to a file or to standard output."""
    said = None if quiet else f"Wrote {output}; open it in https://ui.perfetto.dev."
    write_or_print(output, text, wrote=said)
