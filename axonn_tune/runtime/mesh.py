"""Process groups: those of the grid's axes, one of all ranks for agreement outside the step, and NCCL's record."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from axonn_tune.errors import UsageError
from axonn_tune.grid import AXES, ENDS, EXPERT_GROUPS, EXPERT_STAGE_AXES, RANK_AXES, Grid, split_axes
from axonn_tune.program.operations import GROUP_AXES
from axonn_tune.program.pipeline import Kind
from axonn_tune.program.step import BUNDLED


@dataclass(frozen=True)
class Edge:
    """Activations (F) or gradients (B) from one rank to that of a neighbouring stage: the group of both, and both."""

    group: dist.ProcessGroup
    kind: Kind
    sender: int
    receiver: int

    @property
    def name(self) -> tuple[Kind, int, int]:
        """The same on both ranks."""
        return self.kind, self.sender, self.receiver


@dataclass(frozen=True)
class Mesh:
    """One rank's coordinates in the grid, and its process groups; None for a group of one, unless `keep_single`.

    sends, receives: the edges on which activations (F) and gradients (B) leave and reach this rank.
    """

    grid: Grid
    rank: int
    groups: dict[str, dist.ProcessGroup | None]
    sends: dict[Kind, Edge] = field(default_factory=dict)
    receives: dict[Kind, Edge] = field(default_factory=dict)

    @property
    def stage(self) -> int:
        """This rank's pipeline stage."""
        return self.coordinate("pipeline")

    @property
    def data_axes(self) -> str:
        """The group that holds the same shards of weights: ranks of context have other tokens, as those of data."""
        return self.replicas("data")

    def replicas(self, axis: str) -> str:
        """The group over an axis that replicates weights, and over context."""
        return f"context{axis}" if self.grid.context > 1 else axis

    def process_groups(self) -> Iterator[dist.ProcessGroup]:
        """Yield each process group once."""
        every = (*self.groups.values(), *(edge.group for edge in (*self.sends.values(), *self.receives.values())))
        yield from {id(group): group for group in every if group is not None}.values()

    def size(self, axes: str) -> int:
        """Ranks in this rank's group over `axes`."""
        return self.grid.group_shape(axes, BUNDLED.folding).size

    def coordinate(self, axis: str) -> int:
        """This rank's coordinate along an axis."""
        return place_of(self.grid, self.rank).get(axis, 0)

    def place(self, axes: str) -> int:
        """Its number in this rank's group over `axes`."""
        if axes in EXPERT_GROUPS:
            return self.coordinate(axes)
        return self.grid.members(self.rank, axes).index(self.rank)


def place_of(grid: Grid, rank: int) -> dict[str, int]:
    """Coordinates of a rank, among experts, too: these take ranks of z first, then of data, numbered as ranks are."""
    found = grid.coordinates(rank)
    z, data, inner = found["z"], found["data"], min(grid.expert, grid.z)
    outer = grid.expert // inner
    own = z % inner + inner * (data % outer)
    if grid.stride("data") < grid.stride("z"):
        own = data % outer + outer * (z % inner)
    found["expert"] = found["expert_tensorexpert"] = own
    copy, copies = data // outer, grid.data // outer
    place = found.get("context", 0)
    every = place * copies + copy if grid.stride("data") < grid.stride("context") else copy * grid.context + place
    return found | {"expert_z": z // inner, "expert_data": copy, "contextexpert_data": every}


def groups_of(grid: Grid, axes: str) -> tuple[tuple[int, ...], ...]:
    """Every group over `axes`; those of experts in the order of their coordinates, which is that of ranks."""
    if axes not in EXPERT_GROUPS:
        return tuple(grid.groups(axes))
    apart = [axis for axis in (*EXPERT_STAGE_AXES, "pipeline") if axis not in split_axes(axes)]
    found = dict[tuple[int, ...], list[tuple[int, int]]]()
    for rank in range(grid.world):
        place = place_of(grid, rank)
        found.setdefault(tuple(place.get(axis, 0) for axis in apart), []).append((place.get(axes, 0), rank))
    return tuple(tuple(rank for _, rank in sorted(members)) for members in found.values())


def require_world(grid: Grid, world: int) -> None:
    """UsageError, with the arithmetic, unless there are as many ranks as the grid has."""
    if grid.world != world:
        axes = [axis for axis in grid.by_axis if axis in AXES or (axis in RANK_AXES and grid.axis_size(axis) > 1)]
        product = "·".join(str(grid.axis_size(axis)) for axis in axes)
        ranks = "1 rank was" if world == 1 else f"{world} ranks were"
        raise UsageError(f"the grid {'·'.join(axes)} = {product} needs {grid.world} ranks, but {ranks} started")


def build_mesh(
    grid: Grid,
    *,
    chunks: int = 1,
    timeout: timedelta | None = None,
    keep_single: bool = False,
    device: torch.device | None = None,
) -> Mesh:
    """Create every process group of the grid; all ranks must call this together.

    Sets of axes with the same groups share them. chunks: of each pipeline stage. timeout: of each collective, torch's
    own unless given. keep_single: make groups of one too, so that a single rank issues every collective. device:
    connect each group as soon as it is made. NCCL would at its first use, to which all members must come in one order;
    stages of a pipeline do not, as each first asks for what another sends it.
    UsageError, with the arithmetic, if the world has another size than the grid.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    require_world(grid, world)
    rank = dist.get_rank() if dist.is_initialized() else 0
    groups: dict[str, dist.ProcessGroup | None] = {}
    made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup | None] = {}
    for axes in GROUP_AXES:
        groups[axes] = None
        size = grid.group_shape(axes, BUNDLED.folding).size
        if size == 1 and not keep_single:
            continue
        if size == world > 1:
            groups[axes] = dist.group.WORLD
            continue
        every = groups_of(grid, axes)
        if every not in made or size == 1:
            for members in every:
                group = _new_group(members, rank, timeout=timeout, device=device)
                if rank in members:
                    made[every] = group
        groups[axes] = made[every]
    mesh = Mesh(grid, rank, groups)
    if grid.pipeline > 1:
        _connect_stages(mesh, chunks=chunks, timeout=timeout, device=device)
    return mesh


def _new_group(
    members: Sequence[int], rank: int, *, timeout: timedelta | None, device: torch.device | None
) -> dist.ProcessGroup:
    """A group, connected if there is a device."""
    group: dist.ProcessGroup = dist.new_group(list(members), timeout=timeout)
    if device is not None and rank in members:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    return group


def _connect_stages(mesh: Mesh, *, chunks: int, timeout: timedelta | None, device: torch.device | None) -> None:
    """Add the group of first and last stage, and the edges between neighbours; interleaved stages form a ring.

    Each edge has a group, and so a separate stream: no message can block one of another kind or direction.
    """
    for line in mesh.grid.groups("pipeline"):
        both = _new_group((line[0], line[-1]), mesh.rank, timeout=timeout, device=device)
        if mesh.rank in (line[0], line[-1]):
            mesh.groups[ENDS] = both
        neighbours = list(zip(line, (*line[1:], line[0]), strict=True))
        for one, following in neighbours if chunks > 1 else neighbours[:-1]:
            ways: tuple[tuple[Kind, int, int], ...] = (("F", one, following), ("B", following, one))
            for kind, sender, receiver in ways:
                group = _new_group((one, following), mesh.rank, timeout=timeout, device=device)
                if mesh.rank in (sender, receiver):
                    (mesh.sends if mesh.rank == sender else mesh.receives)[kind] = Edge(group, kind, sender, receiver)


_RECORD_S = 3.0
"""How long torch may take to dump the flight recorder: it polls its pipe once a second."""


_PIPES = "axonn-tune-nccl-"


@dataclass(frozen=True)
class FlightRecorder:
    """torch's record of a rank's last NCCL collectives, which it writes to a file once something is in its pipe.

    Made before the process groups, because torch reads these variables with the first one.
    """

    environment: MutableMapping[str, str]
    rank: int

    def __post_init__(self) -> None:
        self.environment.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")
        if "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in self.environment:
            self.environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = f"{tempfile.mkdtemp(prefix=_PIPES)}/"

    def into(self, folder: Path) -> None:
        """Where files go, as `nccl-rank<N>`."""
        self.environment.setdefault("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(folder / "nccl-rank"))

    def write(self) -> None:
        """Have torch write the file, and wait for it; nothing happens where torch has made no pipe."""
        file = Path(f"{self.environment.get('TORCH_NCCL_DEBUG_INFO_TEMP_FILE', '')}{self.rank}")
        try:
            descriptor = os.open(self._pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return
        file.unlink(missing_ok=True)
        os.write(descriptor, b"1")
        os.close(descriptor)
        end_s, size = time.monotonic() + _RECORD_S, -1
        while time.monotonic() < end_s:
            before, size = size, file.stat().st_size if file.exists() else -1
            if 0 < before == size:
                return
            time.sleep(0.1)

    def close(self) -> None:
        """Remove the pipe, and the folder made for it."""
        self._pipe.unlink(missing_ok=True)
        if self._pipe.parent.name.startswith(_PIPES):
            shutil.rmtree(self._pipe.parent, ignore_errors=True)

    @property
    def _pipe(self) -> Path:
        return Path(f"{self.environment['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{self.rank}.pipe")


Result = TypeVar("Result")


@dataclass(frozen=True)
class WorldGroup:
    """A process group of all ranks, outside of steps; group None: one process.

    All ranks follow one rank's decision, and fail if one fails.
    """

    group: dist.ProcessGroup | None

    @classmethod
    def of_the_world(cls) -> WorldGroup:
        """A new group of all ranks, over Gloo whatever training uses; all must call this together."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(None)
        return cls(dist.new_group(backend="gloo"))

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.group is None or dist.get_rank() == 0

    def from_rank_0(self, function: Callable[[], Result]) -> Result:
        """What a function returns on rank 0; its error is raised on all ranks."""
        if self.group is None:
            return function()
        box: list[Result | Exception | None] = [_tried(function) if self.first else None]
        dist.broadcast_object_list(box, src=0, group=self.group)
        (answer,) = box
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]  # what rank 0 put there

    def on_all(self, function: Callable[[], Result]) -> list[Result]:
        """What a function returns on every rank, by rank; the error of the lowest rank that fails is raised on all."""
        if self.group is None:
            return [function()]
        found: list[Result | Exception | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, _tried(function), group=self.group)
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found  # type: ignore[return-value]  # what each rank put there

    def close(self) -> None:
        """Destroy the group; all ranks must call this together."""
        if self.group is not None:
            dist.destroy_process_group(self.group)


def _tried(function: Callable[[], Result]) -> Result | Exception:
    try:
        return function()
    except Exception as error:
        return error


def is_timeout(error: BaseException) -> bool:
    """Whether a collective has waited too long; torch says so only in the message."""
    return isinstance(error, RuntimeError) and "imed out" in str(error)


def is_broken_connection(error: BaseException) -> bool:
    """Whether another rank went away in a collective; Gloo says so only in the message."""
    words = ("Connection closed by peer", "Connection reset", "Broken pipe", "Socket", "gloo")
    told = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return told or isinstance(error, dist.DistBackendError | dist.DistNetworkError)
