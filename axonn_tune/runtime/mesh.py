"""The grid as process groups: one per group of axes that a rank belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from axonn_tune.errors import UsageError
from axonn_tune.grid import AXES, Grid
from axonn_tune.program.operations import GROUP_AXES


@dataclass(frozen=True)
class Mesh:
    """One rank's place in the grid, and its process groups; None where the group is the rank alone."""

    grid: Grid
    rank: int
    groups: dict[str, dist.ProcessGroup | None]

    def size(self, axes: str) -> int:
        """Ranks in this rank's group over `axes`."""
        return self.grid.group_shape(axes).size

    def coordinate(self, axis: str) -> int:
        """This rank's place along an axis."""
        return self.grid.coordinates(self.rank)[axis]


def build_mesh(grid: Grid) -> Mesh:
    """Create every process group of the grid; all ranks must call this together.

    UsageError, with the arithmetic, if the world has another size than the grid.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != grid.world:
        product = "·".join(str(grid.axis_size(axis)) for axis in AXES)
        raise UsageError(f"the grid x·y·z·data = {product} needs {grid.world} ranks, but the world has {world}")
    rank = dist.get_rank() if dist.is_initialized() else 0
    groups: dict[str, dist.ProcessGroup | None] = {}
    for axes in GROUP_AXES:
        groups[axes] = None
        if grid.group_shape(axes).size == 1:
            continue
        if grid.group_shape(axes).size == world:
            groups[axes] = dist.group.WORLD
            continue
        for members in grid.groups(axes):
            group = dist.new_group(list(members))
            if rank in members:
                groups[axes] = group
    return Mesh(grid, rank, groups)
