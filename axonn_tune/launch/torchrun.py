"""A bash script that starts a launch config with torchrun, on one node or by hand on each of several."""

from __future__ import annotations

import shlex
from pathlib import Path

from axonn_tune.launch.environment import environment_lines
from axonn_tune.launch.layout import (
    Layout,
    heading_lines,
    launch_file_lines,
    node_layout,
    software_lines,
    world_lines,
)
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine


def torchrun_script(launch: Launch, *, machine: Machine, launch_path: Path) -> str:
    """The script; it expects the launch config beside itself. UsageError if the ranks do not fill nodes."""
    layout = node_layout(launch)
    lines = [
        "#!/usr/bin/env bash",
        *heading_lines(launch, layout),
        "set -euo pipefail",
        *world_lines(launch, layout),
        "",
        *launch_file_lines(
            '$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")',
            launch_path=launch_path,
            hint="it belongs beside this script",
        ),
        *software_lines(),
        *environment_lines(launch),
        *_rendezvous_lines(layout),
        *_command_lines(launch, machine),
    ]
    return "\n".join(lines) + "\n"


def _rendezvous_lines(layout: Layout) -> list[str]:
    if layout.nodes == 1:
        return ["", "# One node: any free port will do.", "rendezvous=localhost:0"]
    return [
        "",
        f"# Run this script on each of the {layout.nodes} nodes, with HEAD_NODE the name of the same one on all.",
        "# Which of them has the first ranks is for torchrun to say.",
        'rendezvous="${HEAD_NODE:?set it to the name of one of the nodes, the same on all}:${HEAD_PORT:-29400}"',
    ]


def _command_lines(launch: Launch, machine: Machine) -> list[str]:
    options = [
        '--nnodes "$nodes"',
        '--nproc-per-node "$ranks_per_node"',
        "--rdzv-backend c10d",
        '--rdzv-endpoint "$rendezvous"',
        f"--rdzv-id {shlex.quote(launch.name)}",
        "--local-ranks-filter 0",
        "--role rank",
        "--tee 3",
        '--log-dir "$folder/logs"',
    ]
    lines = ["", "# The terminal shows the first rank of a node; logs/ holds what every rank prints."]
    if machine.library.name == "NCCL":
        lines.append("# --numa-binding, in torch from 2.9 on, keeps each rank on the cores next to its GPU.")
        options.append("--numa-binding node")
    command = ["exec torchrun", *options, '-m axonn_tune.runtime "$launch"']
    return [*lines, " \\\n  ".join(command)]
