"""`axonn-tune learn` and `diagnose`: update a profile from runs, and compare a run with its prediction."""

from __future__ import annotations

from typing import Any

import click

from axonn_tune.cli.options import (
    Count,
    added,
    command_line,
    document_option,
    format_option,
    help_option,
    html_option,
    write_html,
)

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
            help="Fact that a log or row does not state, as a column of the step CSV: tp=8. May be repeated.",
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


@click.command("learn", short_help="Update a machine profile from runs.")
@click.argument("paths", nargs=-1, required=True, metavar="EVIDENCE...")
@click.option("-o", "--output", required=True, metavar="NEW.YAML", help="Machine profile to write.")
@evidence_options
@click.option("--name", help="Name of the profile. Default: that of the file.")
@format_option(("table", "json"))
@help_option
def learn_command(*, output: str, output_format: str, **options: Any) -> None:
    """Update a machine profile from measurements (EVIDENCE), and write it with the uncertainty that is left.

    Evidence is recognised by its content: steps as CSV (as for validate --rows), training logs of Megatron-LM,
    Megatron-DeepSpeed, NeMo, torchtitan, DeepSpeed, MLPerf, Lightning or the Hugging Face Trainer, logs of
    nccl-tests, rccl-tests or OSU, profiler traces (Kineto), files of validate -o, and folders of axonn-tune
    run. What a log does not say comes from LOG.yaml beside it, or from --fact. Predictions with the new
    profile have intervals that follow from the evidence.

    \b
    Examples:
      axonn-tune learn slurm-1234.out --machine dgx-h100 -o ours.yaml
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


@click.command("diagnose", short_help="Compare a run with its prediction and explain the gap.")
@click.argument("path", metavar="LOG|TRACE|RUN")
@evidence_options
@format_option(("table", "json"))
@html_option
@help_option
def diagnose_command(*, path: str, output_format: str, html: str | None, **options: Any) -> None:
    """Compare a run with what is predicted of it, and weigh what could explain the difference.

    Reads the same evidence as learn. Settings that it does not state are those of a search, and are listed
    first. Lists explanations (slow links, flags that are not in effect, a straggler and so on) by their
    probability, with the seconds that each explains, and what would make the run faster.
    Ends with exit code 4 if the run took more or less than the 80% interval of the prediction.

    \b
    Examples:
      axonn-tune diagnose slurm-1234.out --machine ours.yaml
      axonn-tune diagnose runs/20260101-120000-nano --machine here.yaml --html diagnosis.html
      axonn-tune diagnose steps.csv --format json
    """
    from axonn_tune.api.learning import diagnose
    from axonn_tune.errors import CheckFailedError
    from axonn_tune.report.diagnosis import diagnosis_json, diagnosis_section, diagnosis_text
    from axonn_tune.report.output import json_text

    found, evidence = diagnose(path, **options)
    named: dict[str, Any] = {"machine": str(options["machine"] or evidence.machine.name), "model": options["model"]}
    left_out = [f"Left out: {words}" for words in evidence.left_out]
    named["remarks"] = [*(f"Assumed: {words}" for words in evidence.assumed), *left_out]
    if output_format == "json":
        documents = [diagnosis_json(one, **named) for one in found]
        click.echo(json_text(documents[0] if len(documents) == 1 else {"diagnoses": documents}), nl=False)
    else:
        texts = [diagnosis_text(one, **{**named, "remarks": ()}) for one in found[1:]]
        click.echo("\n".join([diagnosis_text(found[0], **named), *texts]), nl=False)
    if html:
        sections = [
            diagnosis_section(one, **named, identity=f"s{number}", source=path) for number, one in enumerate(found, 1)
        ]
        write_html(html, sections)
    if odd := [one for one in found if not one.reasonable]:
        names = ", ".join(one.name for one in odd)
        raise CheckFailedError(f"{len(odd)} of {len(found)} outside the 80% interval: {names}")
