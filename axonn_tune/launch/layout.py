"""How the ranks of a launch fall on nodes, and the lines both scripts share."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from axonn_tune.errors import UsageError
from axonn_tune.launch.config import count_ranks, grid_line, prediction_line
from axonn_tune.launch.environment import comment
from axonn_tune.specs.launch import Launch


@dataclass(frozen=True)
class Layout:
    """Nodes, and the ranks on each: all full, or one that need not be."""

    nodes: int
    ranks_per_node: int


def node_layout(launch: Launch) -> Layout:
    """Nodes for a launch; UsageError with the arithmetic if the last node would not be full.

    A world smaller than a node takes part of one.
    """
    world, per_node = launch.grid.world, launch.ranks_per_node
    if world <= per_node:
        return Layout(nodes=1, ranks_per_node=world)
    if world % per_node == 0:
        return Layout(nodes=world // per_node, ranks_per_node=per_node)
    below = world // per_node * per_node
    raise UsageError(
        f"{world} ranks do not fill nodes of {per_node}: {world} = {world // per_node} · {per_node} + "
        f"{world % per_node}; take a GPU count that fills nodes, such as {below} or {below + per_node} "
        f"(fewer ranks on each node would lie otherwise than what was priced)"
    )


def heading_lines(launch: Launch, layout: Layout) -> list[str]:
    """Comments on top of a script: what runs, where each rank is, what to expect, who wrote it."""
    grid, made = launch.grid, launch.provenance
    last = layout.ranks_per_node - 1
    inner = next((axis for axis in grid.order if grid.grid().axis_size(axis) > 1), None)
    placed = f"Ranks of a node are consecutive, 0 to {last} on the first: neighbours along {inner} are nearest."
    return [
        comment(f"Runs {launch.name}: {launch.model.name} on {count_ranks(grid.world)} of {launch.predicted.machine}."),
        comment(f"{grid_line(launch)}."),
        *([comment(placed)] if last else []),
        comment(f"Predicted: {prediction_line(launch)}."),
        comment(f"Written by {made.tool} {made.version}; starts axonn_tune.runtime once per rank."),
    ]


def world_lines(launch: Launch, layout: Layout) -> list[str]:
    """The world size, checked by the script, so that an edit of one number is noticed."""
    grid = launch.grid
    sizes = f"{grid.x} * {grid.y} * {grid.z} * {grid.data}"
    return [
        "",
        f"# nodes · ranks_per_node = x · y · z · data: "
        f"{layout.nodes} · {layout.ranks_per_node} = {sizes.replace('*', '·')} = {grid.world}",
        f"nodes={layout.nodes}",
        f"ranks_per_node={layout.ranks_per_node}",
        f"world=$(({sizes}))",
        "if ((nodes * ranks_per_node != world)); then",
        '  echo "$nodes nodes of $ranks_per_node ranks are $((nodes * ranks_per_node)) ranks,'
        ' but the grid has $world" >&2',
        "  exit 2",
        "fi",
    ]


def launch_file_lines(folder: str, *, launch_path: Path, hint: str) -> list[str]:
    """The launch config in `folder` (a bash expression), and a check that it is there."""
    return [
        f"folder={folder}",
        f'launch="$folder"/{shlex.quote(launch_path.name)}',
        "if [[ ! -f $launch ]]; then",
        f'  echo "there is no file $launch: {hint}" >&2',
        "  exit 2",
        "fi",
    ]


def software_lines() -> list[str]:
    """Where a user puts what no profile knows."""
    return ["", "# Load modules and activate your Python environment here, unless they are already."]
