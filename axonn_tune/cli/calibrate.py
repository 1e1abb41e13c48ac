"""`axonn-tune calibrate`: measure this machine and write its profile."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

import click

from axonn_tune.cli.options import (
    PRECISIONS,
    Count,
    SuggestingChoice,
    document_option,
    help_option,
)
from axonn_tune.errors import CONTROL

if TYPE_CHECKING:
    from axonn_tune.calibration.measure import CalibrationProgress, CalibrationRequest
    from axonn_tune.calibration.profile import Calibration


def _refuse_logs(ctx: click.Context, param: click.Parameter, log: str | None) -> None:
    """Name the command that reads logs of collectives."""
    if log is not None:
        name = shlex.quote(CONTROL.sub("?", log))
        raise click.UsageError(f"--from-logs is another command: axonn-tune learn {name} --machine NAME -o FILE")


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
@click.option("--precision", type=SuggestingChoice(PRECISIONS), help="Number format. Default: fp32, bf16 under nccl.")
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
@click.option("--plot", metavar="FILE", help="Draw points and fit into this .svg file.")
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
    from axonn_tune.report.inventory import require_svg
    from axonn_tune.report.output import progress
    from axonn_tune.units import counted

    request = CalibrationRequest(**options)
    if request.plot:
        require_svg(request.plot)
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
    """Print the result in a few lines, and draw it."""
    from axonn_tune.files import write_text_atomically
    from axonn_tune.report.inventory import calibration_lines, fit_svg

    for line in calibration_lines(calibration):
        click.echo(line)
    written = [request.output]
    if request.plot:
        write_text_atomically(request.plot, fit_svg(calibration))
        written.append(request.plot)
    click.echo(f"Wrote {' and '.join(written)}.", err=True)
