"""`axonn-tune lab`: an emulated two-tier cluster on this host."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click

from axonn_tune.cli.options import Count, help_option, terms_option, training_options, write_or_print

_CORE_BITS_PER_S = 400e6
"""Sum of uplink rates per core above which cores, not links, are the bottleneck."""


@click.group("lab", short_help="Emulate a cluster of nodes on this Linux host.")
@help_option
def lab_command() -> None:
    """Emulate a cluster of nodes on this Linux host, to run and validate without one.

    Each rank has its own network namespace. A rank's port and a node's uplink are limited to a rate in
    each direction. Needs iproute2, and root or the right to make user namespaces. No interface, route or file
    of the host is touched; what runs in a lab reaches nothing but the lab, and all of it ends with the lab.
    """


_name_option = click.option(
    "--name", default="lab", show_default=True, help="Name of the lab; several may run at once."
)


@lab_command.command("up")
@click.option("--nodes", type=Count(), required=True, metavar="N", help="Number of nodes.")
@click.option("--ranks-per-node", type=Count(), required=True, metavar="R", help="Ranks on each node.")
@click.option("--uplink", required=True, metavar="RATE", help="Rate per node and direction: 200mbit, 1gbit.")
@click.option("--port", metavar="RATE", help="Rate per rank and direction. Default: twice the uplink's.")
@click.option("--delay", metavar="TIME", help="One-way delay between nodes: 1ms, 250us.")
@click.option("--no-verify", is_flag=True, help="Do not verify rates and round trips.")
@_name_option
@help_option
def up_command(
    *, nodes: int, ranks_per_node: int, uplink: str, port: str | None, delay: str | None, no_verify: bool, name: str
) -> None:
    """Bring up a lab, and measure its rates and round trips.

    Ends with exit code 4, and no lab, if they are not what was asked for.

    \b
    Example:
      axonn-tune lab up --nodes 2 --ranks-per-node 2 --uplink 100mbit --delay 1ms
    """
    from axonn_tune.errors import CheckFailedError
    from axonn_tune.lab.holder import end, find, start
    from axonn_tune.lab.shape import Shape, parse_delay, parse_rate, show_rate

    rate = parse_rate(uplink)
    port_rate = 2 * rate if port is None else parse_rate(port)
    shape = Shape(nodes, ranks_per_node, rate, port_rate, 0.0 if delay is None else parse_delay(delay))
    cores = len(os.sched_getaffinity(0))
    if nodes * rate > _CORE_BITS_PER_S * cores:
        click.echo(
            f"Warning: uplinks of {show_rate(nodes * rate)} together are more than {cores} cores carry; "
            "the cores will set the pace, not the links",
            err=True,
        )
    start(name, shape, keep=True)
    click.echo(f"lab {name!r} is up: {shape.words()}", err=True)
    if no_verify:
        return
    try:
        _verify(name)
    except (Exception, KeyboardInterrupt) as error:
        if (lab := find(name)) is not None:
            end(lab)
        if isinstance(error, CheckFailedError):
            raise CheckFailedError(f"{error}; the lab is down again") from None
        raise


@lab_command.command("verify")
@_name_option
@help_option
def verify_command(*, name: str) -> None:
    """Measure a lab's rates and round trips; exit code 4 if they are not what was asked for.

    \b
    Example:
      axonn-tune lab verify
    """
    _verify(name)


@lab_command.command("down")
@_name_option
@click.option("--all", "every", is_flag=True, help="All labs of this user.")
@help_option
def down_command(*, name: str, every: bool) -> None:
    """End a lab, and everything that runs in it.

    \b
    Example:
      axonn-tune lab down
    """
    from axonn_tune.lab.holder import end, names, require_lab

    for one in names() if every else [name]:
        end(require_lab(one))
        click.echo(f"lab {one!r} is down", err=True)


@lab_command.command("status")
@help_option
def status_command() -> None:
    """List the labs of this user that are up.

    \b
    Example:
      axonn-tune lab status
    """
    from axonn_tune.lab.holder import find, names

    found = [lab for lab in map(find, names()) if lab is not None]
    for one in found:
        rights = ", unprivileged" if one.unprivileged else ""
        minutes = (time.time() - one.since_s) / 60
        click.echo(f"{one.name}: {one.shape.words()}; up {minutes:.0f} min, process {one.holder}{rights}")
    if not found:
        click.echo("no lab is up", err=True)


@lab_command.command("exec", context_settings={"ignore_unknown_options": True})
@_name_option
@click.argument("place", metavar="NODE.RANK")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@help_option
def exec_command(*, name: str, place: str, command: tuple[str, ...]) -> None:
    """Run COMMAND where a rank is: `axonn-tune lab exec 0.1 -- ip addr`; exit code as the command's.

    Both numbers begin at 0. `all` instead of them runs it on every rank at once, and kills those that remain 15 s
    after the first failure; `switch` runs it where the bridges and uplinks are. RANK, WORLD_SIZE, MASTER_ADDR and so on
    are set as torchrun would.

    \b
    Example:
      axonn-tune lab exec 0.1 -- ip addr
    """
    from axonn_tune.lab.lab import Lab, execute, exit_codes
    from axonn_tune.processes import exit_code_of

    if place == "all":
        with Lab.attached(name) as lab:
            code = exit_code_of(exit_codes(lab.ranks.execute(command)))
    else:
        code = execute(name, place, command)
    if code:
        raise click.exceptions.Exit(code)


@lab_command.command("run")
@_name_option
@click.argument("launch", metavar="LAUNCH.YAML")
@training_options
@terms_option
@click.option(
    "--realtime", is_flag=True, help="Prioritize over all other processes of this host (SCHED_RR); root only."
)
@help_option
def run_command(*, name: str, launch: str, directory: str | None, terms: bool, **options: Any) -> None:
    """Train as LAUNCH.YAML says, one rank in each place of a lab that is up; otherwise as `axonn-tune run`.

    All ranks are forked from one process that has imported torch.

    \b
    Example:
      axonn-tune lab run launch.yaml --steps 10
    """
    from axonn_tune.cli.run import show_summary
    from axonn_tune.lab.lab import Lab, exit_codes, require_world, train
    from axonn_tune.launch.host import require_torch
    from axonn_tune.processes import exit_code_of
    from axonn_tune.specs.launch import Launch
    from axonn_tune.specs.loading import load_document
    from axonn_tune.specs.results import remove_outcome, run_directory

    document, path = load_document(launch, schema=Launch), Path(launch)
    folder = run_directory(document) if directory is None else Path(directory)
    require_torch()
    with Lab.attached(name) as lab:
        require_world(document, lab.shape)
        remove_outcome(folder)
        outcomes = train(lab.ranks, path, directory=folder, **options)
    show_summary(folder, all_terms=terms)
    if code := exit_code_of(exit_codes(outcomes)):
        raise click.exceptions.Exit(code)


@lab_command.command("profile")
@_name_option
@click.option("-o", "--output", metavar="FILE", help="Write the YAML here instead of to standard output.")
@help_option
def profile_command(*, name: str, output: str | None) -> None:
    """Print a machine profile of a lab that is up: rates as asked, latencies as measured.

    Good for a first ranking; the rest are the placeholders of `localhost`.

    \b
    Example:
      axonn-tune lab profile -o lab.yaml
    """
    from axonn_tune.lab.lab import Lab
    from axonn_tune.lab.links import profile, round_trip_s
    from axonn_tune.specs.document import to_yaml

    with Lab.attached(name) as lab:
        shape = lab.shape
        inside = round_trip_s(lab.ranks, (0, 1)) if shape.ranks_per_node > 1 else 0.0
        between = round_trip_s(lab.ranks, (0, shape.ranks_per_node)) if shape.nodes > 1 else 0.0
    own_name = name if output is None else Path(output).stem
    machine = profile(shape, name=own_name, rank_round_trip_s=inside, node_round_trip_s=between)
    text = to_yaml(machine, header=[f"Written by axonn-tune lab profile for lab {name!r}."])
    write_or_print(output, text, wrote=f"wrote {output}: {machine.description}")


def _verify(name: str) -> None:
    """Print a lab's links as asked and as measured; CheckFailedError if some are not as asked."""
    from axonn_tune.errors import CheckFailedError
    from axonn_tune.lab.lab import Lab
    from axonn_tune.lab.links import verify
    from axonn_tune.report.output import progress

    with Lab.attached(name) as lab, progress("verifying") as tell:
        found = verify(lab.ranks, listen=tell)
    width = max(len(one.what) for one in found)
    rows = [("", "asked", "measured", ""), *((o.what, o.asked, o.measured, "ok" if o.agrees else "off") for o in found)]
    for what, asked, measured, state in rows:
        click.echo(f"{what:{width}}  {asked:>12}  {measured:>12}  {state}".rstrip())
    wrong = [check for check in found if not check.agrees]
    if wrong:
        listed = "; ".join(f"{one.what}: asked {one.asked}, measured {one.measured}" for one in wrong)
        raise CheckFailedError(f"{len(wrong)} of {len(found)} links are not as asked ({listed})")
