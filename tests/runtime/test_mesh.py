"""Process groups: shared where axes have the same, a refusal of worlds of another size, and one order of connecting."""

from __future__ import annotations

import graphlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from axonn_tune.errors import UsageError
from axonn_tune.grid import AXES, Grid
from axonn_tune.program.operations import GROUP_AXES
from axonn_tune.runtime.mesh import build_mesh


@contextmanager
def world(size: int, rank: int = 0) -> Iterator[None]:
    """Be a rank of a world that does not exist."""
    dist.init_process_group("fake", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_groups_are_made_once_or_where_they_are_kept() -> None:
    """Guards the memory of communicators, x and y being x alone where y is 1; and a single GPU's look at NCCL."""
    with world(8):
        mesh = build_mesh(Grid(2, 1, 2, 2))
        assert mesh.groups["xy"] is mesh.groups["x"] is not None
        assert mesh.groups["z"] is not mesh.groups["data"]
    with world(1):
        groups = build_mesh(Grid(), keep_single=True).groups
        assert {tuple(dist.get_process_group_ranks(group)) for group in groups.values()} == {(0,)}
        assert len({id(group) for group in groups.values()}) == len(GROUP_AXES)
    with pytest.raises(UsageError, match=r"x·y·z·data = 2·1·3·1 needs 6 ranks, but 1 rank was started"):
        build_mesh(Grid(2, 1, 3, 1))


@pytest.mark.parametrize("chunks", [1, 2])
def test_all_ranks_connect_groups_in_one_order(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards NCCL, whose ranks block while they connect a group: each group of a rank, in an order that fits all."""
    grid = Grid(2, 1, 1, 2, pipeline=4, order=(*AXES, "pipeline"))
    connected, before = list[str](), dict[str, set[str]]()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: connected.append(group.group_name))
    for rank in range(grid.world):
        connected.clear()
        with world(grid.world, rank):
            groups = build_mesh(grid, chunks=chunks, device=torch.device("cpu")).process_groups()
            assert sorted(connected) == sorted(one.group_name for one in groups if one is not dist.group.WORLD)
        for one, following in pairwise(connected):
            before.setdefault(following, set()).add(one)
    graphlib.TopologicalSorter(before).prepare()
