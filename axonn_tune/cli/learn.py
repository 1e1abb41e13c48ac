"""`axonn-tune learn`, `diagnose` and `calibrate`: profiles from runs or measured here, and runs vs. predictions."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    Count,
    SuggestingChoice,
    added,
    command_line,
    document_option,
    format_option,
    help_option,
    html_option,
    verbose_option,
    write_html,
)
from axonn_tune.vocabulary import PRECISIONS

if TYPE_CHECKING:
    from axonn_tune.calibration.measure import CalibrationProgress, CalibrationRequest
    from axonn_tune.calibration.profile import Calibration

evidence_options = added(
    [
        document_option(
            "machine",
            "Base profile. Default: that of the measurements, or the shipped one nearest to the stated accelerator.",
            default=None,
        ),
        click.option(
            "--framework",
            metavar="NAME",
            help="Framework that ran, instead of the recognised log format or a blank column.",
        ),
        document_option("model", "Model, for logs and rows that do not state it.", default=None),
        click.option(
            "--fact",
            "facts",
            multiple=True,
            metavar="COLUMN=VALUE",
            help="Fact that a log or row does not state, as a column of the step CSV: tp=8; --tp 8 is short for it. "
            "May be repeated.",
        ),
        click.option(
            "--from-command", metavar="FILE", help="Script or config that started the run, for facts the log lacks."
        ),
        click.option(
            "--ranks", type=Count(2), metavar="N", help="Ranks, for a collective log that does not state them."
        ),
        click.option("--nodes", type=Count(), metavar="N", help="Its nodes."),
        click.option(
            "--ranks-per-node", type=Count(), metavar="N", help="Gives a base profile of one network level nodes of N."
        ),
    ]
)
"""Options for facts that the evidence does not state."""


class FactCommand(click.Command):
    """A command that takes columns of the step CSV as options: `--tp 8` is `--fact tp=8`.

    Of one that has a run beside another, `--beside-tp 8` is `--beside-fact tp=8`, and so is a second `--tp 8`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse words whose unknown options are facts if they are columns."""
        from axonn_tune.validation.published.cells import ALSO
        from axonn_tune.validation.published.rows import COLUMNS, TIMES

        known, words, kept = {word for one in self.get_params(ctx) for word in one.opts}, [*args], list[str]()
        given, pairs = set[tuple[str, bool]](), "--beside-fact" in known
        while words:
            option, _, value = (word := words.pop(0)).partition("=")
            if option == "--fact":
                name, _, value = (value or (words.pop(0) if words else "")).partition("=")
            elif option.startswith("--") and (option not in known or option[2:] in TIMES):
                name = option[2:].removeprefix("beside-" if pairs else "")
            else:
                name = ""
            column = TIMES.get(name) or name.replace("-", "_")
            if not name or (option != "--fact" and column not in COLUMNS):
                kept.append(word)
                continue
            if not value and option != "--fact":
                if not words or words[0].startswith("--"):
                    raise click.BadOptionUsage(option, f"Option {option!r} requires an argument.", ctx)
                value = words.pop(0)
            if name == "tokens-per-gpu" and re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", value):
                # As logs print them: 1,786.
                value = value.replace(",", "")
            stated = ALSO.get(column, column)
            beside = pairs and (option.startswith("--beside-") or (stated, False) in given)
            if (stated, beside) in given:
                where = " of the run beside" * beside
                raise click.UsageError(f"{option} {value}: {stated} is stated twice{where}: leave out one of them", ctx)
            given.add((stated, beside))
            if option in known and option != "--fact" and not beside:
                kept += [option, value]
            else:
                kept += ["--beside-fact" if beside else "--fact", f"{column}={value}"]
        return super().parse_args(ctx, kept)


@click.command("learn", cls=FactCommand, short_help="Update a machine profile from runs.")
@click.argument("paths", nargs=-1, required=True, metavar="EVIDENCE...")
@click.option("-o", "--output", required=True, metavar="NEW.YAML", help="Machine profile to write.")
@evidence_options
@click.option("--name", help="Name of the profile. Default: that of the file.")
@format_option(("table", "json"))
@help_option
def learn_command(*, output: str, output_format: str, **options: Any) -> None:
    """Update a machine profile from measurements (EVIDENCE), and write it with the uncertainty that is left.

    Evidence is recognised by its content: steps as CSV (as for accuracy --rows), training logs of Megatron-LM,
    Megatron-DeepSpeed, NeMo, torchtitan, DeepSpeed, MLPerf, Lightning or the Hugging Face Trainer, logs of
    nccl-tests, rccl-tests or OSU, profiler traces (Kineto), files of validate -o, and folders of axonn-tune
    run. What a log does not say comes from LOG.yaml beside it, or from --fact. Predictions with the new
    profile have intervals that follow from the evidence.

    \b
    Examples:
      axonn-tune learn slurm-1234.out --from-command train.sh --machine dgx-h100 -o ours.yaml
      axonn-tune learn steps.csv all_reduce.txt --machine dgx-h100 -o ours.yaml
      axonn-tune learn measured.yaml -o here.yaml
    """
    from axonn_tune.api.learning import learn
    from axonn_tune.report.learning import learning_json, learning_text
    from axonn_tune.report.output import json_text, progress

    with progress("learning") as tell:
        found, evidence = learn(output=output, listen=tell, command=command_line(), **options)
    as_json = output_format == "json"
    click.echo(json_text(learning_json(found, evidence)) if as_json else learning_text(found, evidence), nl=False)
    click.echo(f"Wrote {output}.", err=True)


def _measured(ctx: click.Context, param: click.Parameter, text: str | None) -> float | None:
    """The time of a step, or a rate."""
    from axonn_tune.units import read_number

    try:
        return None if text is None else read_number(text, least=1e-9, most=1e9)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from None


def _log_or_seconds(ctx: click.Context, param: click.Parameter, text: str | None) -> str | float | None:
    """The time of a step, else a file."""
    return _measured(ctx, param, text) if text is not None and re.fullmatch(r"[\d.]+(e-?\d+)?", text) else text


@click.command("diagnose", cls=FactCommand, short_help="Compare a run with its prediction and explain the gap.")
@click.argument("path", metavar="[LOG|TRACE|RUN]", required=False)
@click.option(
    "--step",
    "step_s",
    callback=_measured,
    metavar="SECONDS",
    help="In place of a log: what a step took of the run of --from-command, or of --model and a layout: "
    "--gpus 256 --batch 2048 --seq 4096 --tp 8 --pp 4.",
)
@click.option(
    "--tflops",
    callback=_measured,
    metavar="TFLOP/S",
    help="The same by TFLOP/s per GPU, as the framework's log counts them.",
)
@click.option("--tokens-per-gpu", callback=_measured, metavar="TOKENS/S", help="The same by tokens/s per GPU.")
@click.option(
    "--beside",
    callback=_log_or_seconds,
    metavar="LOG|SECONDS",
    help="The same run on fewer or more GPUs, such as one node: its log, or what its step took. As predicted on one "
    "node and slow on several, it is the network; slow on both, it is not.",
)
@click.option(
    "--beside-fact",
    "beside_facts",
    multiple=True,
    metavar="COLUMN=VALUE",
    help="What differs there: n_gpus=8, gbs=8. --beside-gpus 8 is short for it, and --gpus 8 after another --gpus; "
    "--beside-step, --beside-tflops and --beside-tokens-per-gpu replace --beside. May be repeated.",
)
@click.option("--beside-command", metavar="FILE", help="Its script or config, where that is another.")
@evidence_options
@format_option(("table", "json"))
@html_option
@verbose_option
@help_option
def diagnose_command(*, path: str | None, output_format: str, html: str | None, verbose: bool, **options: Any) -> None:
    """Compare a run with what is predicted of it, and weigh what could explain the difference.

    Reads the same evidence as learn. Settings that it does not state are those of a search; -v lists them all.
    Lists explanations (slow links, flags that are not in effect, a straggler and so on) by their
    probability, with the seconds that each explains, and what would make the run faster.
    Ends with exit code 4 if the run took more or less than the 80% interval of the prediction.

    \b
    Examples:
      axonn-tune diagnose slurm-1234.out --machine ours.yaml
      axonn-tune diagnose slurm-1234.out --from-command train.sh
      axonn-tune diagnose --tflops 410 --from-command train.sh --machine dgx-h100
      axonn-tune diagnose one.log --beside four.log --from-command train.sh --gpus 8 --beside-gpus 32
      axonn-tune diagnose --step 1.3 --gpus 8 --step 4.6 --gpus 32 --from-command train.sh
      axonn-tune diagnose runs/20260101-120000-nano --machine here.yaml --html diagnosis.html
      axonn-tune diagnose steps.csv --format json
    """
    from axonn_tune.api.learning import diagnose, named_model
    from axonn_tune.errors import CheckFailedError
    from axonn_tune.report.learning import diagnosis_json, diagnosis_section, diagnosis_text
    from axonn_tune.report.output import json_text, wrapped

    found, evidence = diagnose(path, **options)
    named: dict[str, Any] = {"machine": str(options["machine"] or evidence.machine.name)}
    named["model"] = named_model(options["from_command"], options["model"])
    left_out = [f"Left out: {words}" for words in evidence.left_out]
    named["remarks"] = [*(f"Assumed: {words}" for words in evidence.assumed), *left_out]
    if output_format == "json":
        documents = [diagnosis_json(one, **named) for one in found]
        click.echo(json_text(documents[0] if len(documents) == 1 else {"diagnoses": documents}), nl=False)
    else:
        told = [{**named, "verbose": verbose}, *[{**named, "verbose": verbose, "remarks": ()}] * (len(found) - 1)]
        click.echo("\n".join(diagnosis_text(one, **how) for one, how in zip(found, told, strict=True)), nl=False)
        if not verbose:
            beside = "" if found[0].baseline else ", --beside LOG (the same on fewer GPUs)"
            click.echo(f"\n{wrapped(f'Next: -v (all assumptions and commands){beside}')}", err=True)
    if html:
        sections = [
            diagnosis_section(one, **named, identity=f"s{number}", source=path or options["model"] or "")
            for number, one in enumerate(found, 1)
        ]
        write_html(html, sections)
    if odd := [one for one in found if not one.reasonable]:
        names = ", ".join(one.name + " (impossible)" * one.impossible for one in odd)
        raise CheckFailedError(f"{len(odd)} of {len(found)} outside the 80% interval: {names}")


def _refuse_logs(ctx: click.Context, param: click.Parameter, log: str | None) -> None:
    """Name the command that reads logs of collectives."""
    if log is not None:
        raise click.UsageError(
            f"--from-logs is another command: axonn-tune learn {shlex.quote(log)} --machine NAME -o FILE"
        )


def _refuse_plot(ctx: click.Context, param: click.Parameter, file: str | None) -> None:
    """Say where what the picture of a fit showed is now."""
    if file is not None:
        raise click.UsageError("--plot draws no picture any more: --points FILE has the points, the profile the fit")


@click.command("calibrate", short_help="Measure this machine and write its profile.")
@click.option("-o", "--output", required=True, metavar="FILE.YAML", help="Machine profile to write.")
@click.option(
    "--ranks",
    type=Count(),
    metavar="N",
    help="Ranks to start on this host. Default: one per core, or per GPU for nccl; of torchrun or srun: theirs.",
)
@click.option("--budget", default="60s", show_default=True, metavar="TIME", help="Time budget: 20s, 5m, 1h.")
@document_option("model", "Model whose GEMMs, attention and step are measured.", default="nano")
@click.option(
    "--precision",
    type=SuggestingChoice(PRECISIONS),
    help="Number format. Default: fp32, bf16 under nccl.",
)
@click.option("--batch", type=Count(), metavar="N", help="Global batch size, in sequences. Default: the model's.")
@click.option("--backend", type=SuggestingChoice(("gloo", "nccl")), default="gloo", show_default=True)
@document_option("machine", "Profile for what is not measured, such as the launcher.", default="localhost")
@click.option(
    "--ranks-per-node",
    type=Count(),
    metavar="N",
    help="Consecutive ranks that share the intra-node network. Default: LOCAL_WORLD_SIZE, else by host name.",
)
@click.option("--name", help="Name of the profile. Default: that of the file.")
@click.option("--points", metavar="FILE", help="File of raw points. Default: OUTPUT.points.jsonl.")
@click.option("--resume", is_flag=True, help="Continue an interrupted calibration from its raw points.")
@click.option(
    "--from-logs",
    metavar="LOG",
    expose_value=False,
    callback=_refuse_logs,
    help="Instead: axonn-tune learn LOG --machine NAME -o FILE.",
)
@click.option("--plot", metavar="FILE", hidden=True, expose_value=False, callback=_refuse_plot)
@help_option
def calibrate_command(**options: Any) -> None:
    """Measure collectives, GEMMs and training steps on all ranks at once; write a machine profile.

    Everything goes through the runtime's own code, over every group shape that a grid of these ranks can
    have. Raw points are saved as they come. Under torchrun or srun this process is one rank of the world
    that is being started; else it starts the ranks here, which communicate through loopback: CPU time, and
    no model of a network.

    \b
    Examples:
      axonn-tune calibrate --ranks 2 --budget 20s -o here.yaml
      srun axonn-tune calibrate --backend nccl --machine dgx-h100 -o cluster.yaml
    """
    from axonn_tune.calibration.measure import CalibrationRequest, plan_of, run_probes, write_profile
    from axonn_tune.launch import host
    from axonn_tune.report.output import progress
    from axonn_tune.units import counted

    request = CalibrationRequest(**options)
    host.require_torch()
    plan, first = plan_of(request), host.leads(os.environ)
    with progress("calibrating", shown=first) as tell:
        tell(0.0, "starting ranks")

        def listen(heard: CalibrationProgress) -> None:
            tell(min(heard.elapsed_s / plan.budget_s, 1.0), f"{heard.what}, {counted(heard.points, 'point')}")

        code = run_probes(request, plan, listen)
    if code:
        raise click.exceptions.Exit(code)
    if first:
        _say(write_profile(request), request)


def _say(calibration: Calibration, request: CalibrationRequest) -> None:
    """Print the result in a few lines."""
    from axonn_tune.report.inventory import calibration_lines

    for line in calibration_lines(calibration):
        click.echo(line)
    click.echo(f"Wrote {request.output}.", err=True)
