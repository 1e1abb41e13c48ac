"""Tensors as pieces of whole ones, read and written through torch.distributed.checkpoint.

A piece is a box of a tensor of the whole model, padding not counted. A checkpoint holds boxes that fill
each tensor; whoever reads asks for other boxes, so any grid can read what any other has written.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import planner as plans
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future

from axonn_tune.grid import AXES
from axonn_tune.runtime.files import is_full
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.parameters import Matrix, Vector


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: the whole's size, where in it the box begins, and its values."""

    size: tuple[int, ...]
    start: tuple[int, ...]
    values: torch.Tensor

    @property
    def whole_bytes(self) -> int:
        """Of the whole tensor."""
        return torch.Size(self.size).numel() * self.values.element_size()

    def staged(self) -> Piece:
        """The same with a copy of its values in host memory, which training does not change."""
        return Piece(self.size, self.start, self.values.detach().to("cpu", copy=True))

    def box(self) -> ChunkStorageMetadata:
        """As the library writes it."""
        return ChunkStorageMetadata(torch.Size(self.start), self.values.size())


def piece_of(parameter: Matrix | Vector, values: torch.Tensor) -> Piece:
    """A parameter's shard, or a tensor laid out like it, without padded rows; a view."""
    if isinstance(parameter, Vector):
        return Piece((parameter.width,), (parameter.piece.start,), values)
    layout, rows = parameter.layout, parameter.row_range
    real = min(max(layout.real_rows - rows.start, 0), len(rows))
    # A shard of padding alone begins at the end, where it is empty.
    start = min(rows.start, layout.real_rows), parameter.column_range.start
    return Piece((layout.real_rows, layout.columns), start, values[:real])


def written_here(parameters: Sequence[Matrix | Vector], mesh: Mesh) -> list[bool]:
    """Which parameters this rank saves, of those it shares with others: one rank does, and all get about as much."""
    written = [False] * len(parameters)
    # Elements dealt to each copy, for every kind of sharing.
    dealt: dict[frozenset[str], list[int]] = {}
    for number in sorted(range(len(parameters)), key=lambda one: -parameters[one].main.numel()):
        place, copies, axes = _copy(parameters[number], mesh)
        loads = dealt.setdefault(axes, [0] * copies)
        lightest = loads.index(min(loads))
        loads[lightest] += parameters[number].main.numel()
        written[number] = lightest == place
    return written


def _copy(parameter: Matrix | Vector, mesh: Mesh) -> tuple[int, int, frozenset[str]]:
    """Which copy of its shard this rank holds, of how many, and the axes over which they repeat."""
    split: set[str | None] = {parameter.axis} if isinstance(parameter, Vector) else {"z", parameter.layout.column_axis}
    if isinstance(parameter, Matrix):
        split |= set(parameter.layout.row_axes)
    repeated = [axis for axis in AXES if axis not in split]
    place, copies = 0, 1
    for axis in repeated:
        place = place * mesh.size(axis) + mesh.coordinate(axis)
        copies *= mesh.size(axis)
    return place, copies, frozenset(repeated)


def write(folder: Path, pieces: Mapping[str, Piece], group: dist.ProcessGroup | None) -> None:
    """Write the pieces of all ranks, each given by one of them; CheckpointException on all if one fails.

    `group` None: this process holds everything.
    """
    planner, writer = _SavePlanner(), _Writer(folder, overwrite=False)
    if group is not None:
        save(dict(pieces), storage_writer=writer, planner=planner, process_group=group)
        return
    # What `save` does, which in a single process would warn that it is one.
    planner.set_up_planner(dict(pieces), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    together, metadata = planner.create_global_plan([local])
    (final,) = writer.prepare_global_plan(together)
    results = writer.write_data(planner.finish_plan(final), planner)
    writer.finish(metadata, [results.wait()])


def read(folder: Path, pieces: Mapping[str, Piece]) -> None:
    """Fill pieces from a folder written by any grid; each rank reads on its own."""
    reader, planner = FileSystemReader(folder), _LoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(pieces), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    (final,) = reader.prepare_global_plan(planner.create_global_plan([local]))
    reader.read_data(planner.finish_plan(final), planner).wait()


def described(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Size and type of every tensor in a folder."""
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        name: (tuple(one.size), one.properties.dtype)
        for name, one in found.items()
        if isinstance(one, TensorStorageMetadata)
    }


class _SavePlanner(DefaultSavePlanner):
    """Plans the writing of pieces, keyed by name and start; empty ones are left out."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> plans.SavePlan:
        found = ((name, piece) for name, piece in self.state_dict.items() if piece.values.numel())
        self.plan = plans.SavePlan([_write_item(name, piece) for name, piece in found])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401 - the library's signature
        return self.state_dict[index.fqn].values


class _LoadPlanner(DefaultLoadPlanner):
    """Plans the reading of pieces out of whatever boxes were saved."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: FBT001, FBT002 - the library's signature
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> plans.LoadPlan:
        assert self.metadata is not None, "read before planning"
        saved = self.metadata.state_dict_metadata
        items: list[plans.ReadItem] = []
        for name, piece in self.state_dict.items():
            tensor = saved[name]
            assert isinstance(tensor, TensorStorageMetadata), f"{name} was saved as a tensor"
            if piece.values.numel():
                items += create_read_items_for_chunk_list(name, tensor, [piece.box()])
        return plans.LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        values: torch.Tensor = self.state_dict[index.fqn].values
        return values


class _Writer(FileSystemWriter):
    """Says that a disk is full where torch, in whose C++ the reason gets lost, tells of a wrong position."""

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> Future[list[Any]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # Raised anew: on its way to other ranks an exception loses its context.
            if is_full(error):
                raise OSError(errno.ENOSPC, "no space left on the disk, or in the quota") from error
            raise


def _write_item(name: str, piece: Piece) -> plans.WriteItem:
    properties = TensorProperties(dtype=piece.values.dtype)
    data = plans.TensorWriteData(chunk=piece.box(), properties=properties, size=torch.Size(piece.size))
    return plans.WriteItem(index=MetadataIndex(name, piece.start), type=plans.WriteItemType.SHARD, tensor_data=data)
