"""Process groups: the grid's own, and a refusal of worlds of another size."""

from __future__ import annotations

import graphlib
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from axonn_tune.errors import UsageError
from axonn_tune.grid import AXES, Grid
from axonn_tune.program.operations import GROUP_AXES
from axonn_tune.runtime.mesh import build_mesh
from tests.runtime import tasks
from tests.runtime.pool import Pools

GRIDS = [
    Grid(2, 1, 2, 2, order=("data", "z", "y", "x")),
    Grid(1, 2, 2, 1, order=("z", "x", "data", "y")),
    Grid(1, 2, 1, 2, order=("data", "y", "x", "z")),
]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_groups_are_those_of_the_grid(grid: Grid, pools: Pools) -> None:
    """Guards the sharing of one grid by cost model and runtime: same members, none for a group of one."""
    for rank, groups in enumerate(pools(grid.world).run(tasks.group_members, grid)):
        for axes in GROUP_AXES:
            members = list(grid.members(rank, axes))
            assert groups[axes] == (members if len(members) > 1 else None), axes


def test_axes_with_the_same_groups_share_them() -> None:
    """Guards the memory of communicators: x and y together are x alone where y is 1."""
    dist.init_process_group("fake", rank=0, world_size=8)
    try:
        mesh = build_mesh(Grid(2, 1, 2, 2))
        assert mesh.groups["xy"] is mesh.groups["x"] is not None
        assert mesh.groups["z"] is not mesh.groups["data"]
    finally:
        dist.destroy_process_group()


def test_one_rank_needs_no_group() -> None:
    """Guards training in a plain process, without torch.distributed."""
    mesh = build_mesh(Grid())
    assert mesh.rank == 0
    assert set(mesh.groups.values()) == {None}


def test_a_world_of_another_size_is_refused_with_the_arithmetic() -> None:
    """Guards the message that a wrong launch begins with."""
    with pytest.raises(UsageError, match=r"x·y·z·data = 2·1·3·1 needs 6 ranks, but 1 rank was started"):
        build_mesh(Grid(2, 1, 3, 1))


def test_groups_of_one_are_made_where_they_are_kept() -> None:
    """Guards a single GPU's look at NCCL: every axis has a communicator of its own, as in a world of many ranks."""
    dist.init_process_group("fake", rank=0, world_size=1)
    try:
        groups = build_mesh(Grid(), keep_single=True).groups
        assert {tuple(dist.get_process_group_ranks(group)) for group in groups.values()} == {(0,)}
        assert len({id(group) for group in groups.values()}) == len(GROUP_AXES)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("chunks", [1, 2])
def test_all_ranks_connect_groups_in_one_order(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards NCCL, whose ranks block while they connect a group: each group of a rank, in an order that fits all."""
    grid = Grid(2, 1, 1, 2, pipeline=4, order=(*AXES, "pipeline"))
    connected, before = list[str](), dict[str, set[str]]()
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: connected.append(group.group_name))
    for rank in range(grid.world):
        connected.clear()
        dist.init_process_group("fake", rank=rank, world_size=grid.world)
        try:
            groups = build_mesh(grid, chunks=chunks, device=torch.device("cpu")).process_groups()
            assert sorted(connected) == sorted(one.group_name for one in groups if one is not dist.group.WORLD)
        finally:
            dist.destroy_process_group()
        for one, following in pairwise(connected):
            before.setdefault(following, set()).add(one)
    graphlib.TopologicalSorter(before).prepare()


def test_groups_are_connected_over_themselves(pools: Pools) -> None:
    """Guards the call itself, on real ranks."""
    assert pools(4).run(tasks.connected, Grid(1, 1, 1, 2, pipeline=2, order=(*AXES, "pipeline"))) == [0, 0, 1, 1]
