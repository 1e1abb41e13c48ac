"""Shards of tensors, read and written through torch.distributed.checkpoint.

A shard is a 2D slice of a tensor of the whole model, padding not counted. A checkpoint holds shards that cover each
tensor. A loading rank requests its own shards, so any grid can read any other's checkpoint.

The library's metadata is a pickle. It is read without importing any class or function that it names, and checked
against the files: a checkpoint cannot run code or make other files be read.
"""

from __future__ import annotations

import bisect
import errno
import io
import math
import pickle
import pickletools
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

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

from axonn_tune.files import is_full, read_regular
from axonn_tune.grid import AXES
from axonn_tune.program.layers import COPY
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.parameters import Bucket, Parameter, Vector


@dataclass(frozen=True)
class Shard:
    """A shard of a tensor: the whole tensor's size, the shard's offset, and its values."""

    size: tuple[int, ...]
    start: tuple[int, ...]
    values: torch.Tensor

    def host_copy(self) -> Shard:
        """A copy in host memory, which training does not change; from a GPU it is complete after `synchronize`."""
        values = self.values.detach()
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        return Shard(self.size, self.start, copy.copy_(values, non_blocking=True))

    def chunk(self) -> ChunkStorageMetadata:
        """As torch.distributed.checkpoint describes it."""
        return ChunkStorageMetadata(torch.Size(self.start), self.values.size())


Shards: TypeAlias = Mapping[str, Sequence[Shard]]
"""By the tensor's name, at least one each."""


def shards_of(parameter: Parameter, bucket: Bucket, flat: torch.Tensor) -> list[Shard]:
    """Shards of a parameter in `flat`, which has the layout of the bucket's `master`; views without padded rows."""
    found = [_shard(parameter, *one) for one in bucket.slices(parameter, flat)]
    return [shard for shard in found if shard.values.numel()] or found[:1]


def _shard(parameter: Parameter, row: int, column: int, values: torch.Tensor) -> Shard:
    """A slice as a shard of the whole tensor; one of padding alone begins at the end, where it is empty."""
    if isinstance(parameter, Vector):
        return Shard((parameter.width,), (parameter.elements.start + row,), values.flatten())
    layout = parameter.layout
    row += parameter.row_range.start
    real = min(max(layout.real_rows - row, 0), len(values))
    start = min(row, layout.real_rows), parameter.column_range.start + column
    return Shard((layout.real_rows, layout.columns), start, values[:real])


def names_to_write(buckets: Sequence[Bucket], mesh: Mesh) -> set[str]:
    """Names of the parameters this rank saves: one replica saves each, balanced over ranks."""
    # Of a tied table the first pipeline stage saves its copy.
    owned = [(parameter, bucket) for bucket in buckets for parameter in bucket.parameters if bucket.layer != COPY]
    written: set[str] = set()
    # Elements that each replica saves, for every set of axes they repeat over.
    loads_of: dict[frozenset[str], list[int]] = {}
    for parameter, bucket in sorted(owned, key=lambda one: -one[0].value.numel()):
        place, copies, axes = _replica(bucket.split_axes(parameter), mesh)
        loads = loads_of.setdefault(axes, [0] * copies)
        lightest = loads.index(min(loads))
        loads[lightest] += parameter.value.numel()
        if lightest == place:
            written.add(parameter.name)
    return written


def _replica(split: frozenset[str], mesh: Mesh) -> tuple[int, int, frozenset[str]]:
    """Which replica of its elements this rank holds, of how many, and the axes over which they repeat."""
    repeated = [axis for axis in AXES if axis not in split]
    place, copies = 0, 1
    for axis in repeated:
        place = place * mesh.size(axis) + mesh.coordinate(axis)
        copies *= mesh.size(axis)
    return place, copies, frozenset(repeated)


def write(folder: Path, shards: Shards, group: dist.ProcessGroup | None) -> None:
    """Write the shards of all ranks, each by one of them; CheckpointException on all ranks if one fails.

    `group` None: this process holds everything.
    """
    planner, writer = _SavePlanner(), _Writer(folder, overwrite=False)
    if group is not None:
        save(dict(shards), storage_writer=writer, planner=planner, process_group=group)
        return
    # What `save` does; in a single process it would warn that it is one.
    planner.set_up_planner(dict(shards), writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plan, metadata = planner.create_global_plan([local])
    (final,) = writer.prepare_global_plan(plan)
    results = writer.write_data(planner.finish_plan(final), planner)
    writer.finish(metadata, [results.wait()])


def read(folder: Path, metadata: Metadata, shards: Shards) -> None:
    """Fill shards from a folder that any grid has written; each rank reads on its own."""
    reader, planner = FileSystemReader(folder), _LoadPlanner()
    planner.set_up_planner(dict(shards), metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, True)
    local = reader.prepare_local_plan(planner.create_local_plan())
    (final,) = reader.prepare_global_plan(planner.create_global_plan([local]))
    # Tensors are read with `weights_only`.
    reader.read_data(planner.finish_plan(final), planner).wait()


def saved_tensors(metadata: Metadata) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Size and type of every saved tensor."""
    found = metadata.state_dict_metadata
    return {
        name: (tuple(one.size), one.properties.dtype)
        for name, one in found.items()
        if isinstance(one, TensorStorageMetadata)
    }


METADATA_FILE = ".metadata"


def read_metadata(folder: Path, sizes: Mapping[str, int]) -> Metadata:
    """The library's description of a folder, whose files have these sizes; ValueError unless it fits them."""
    if METADATA_FILE not in sizes:
        raise ValueError(f"{METADATA_FILE} is not among the checkpoint's files")
    try:
        content = read_regular(folder / METADATA_FILE, limit_bytes=sizes[METADATA_FILE])
        _require_bounded(content)
        found = _Unpickler(io.BytesIO(content)).load().state
        tensors = {str(name): _tensor_of(record) for name, record in found["state_dict_metadata"].items()}
        places = dict(_places(found["storage_data"]))
        _require_fit(tensors, places, sizes)
    except _MisfitError as error:
        raise ValueError(f"{METADATA_FILE} {error}") from error
    except Exception as error:
        # Any error of a broken pickle.
        raise ValueError(f"{METADATA_FILE} cannot be read: {type(error).__name__}: {error}") from error
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


_MOST_NESTED = 50
"""Depth that values may have; those of the library's metadata have 13."""
_TAKING = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"})


def _require_bounded(content: bytes) -> None:
    """_MisfitError for a pickle whose values, written out without sharing, nest deeper or hold more than it has codes.

    A value that is used again counts each time: a few hundred bytes can stand for a key of 2**40 parts, which would be
    hashed. The stack of the pickle machine is followed with the size and depth of each value in place of it.
    """
    limit = 10 * len(content)
    stack, marks, memo = list[tuple[int, int]](), list[int](), list[tuple[int, int]]()
    for code, argument, _ in pickletools.genops(content):
        name, before, after = code.name, len(code.stack_before), len(code.stack_after)
        if name == "MEMOIZE" or name.endswith("PUT"):
            if name != "MEMOIZE" and argument != len(memo):
                raise _MisfitError("numbers its values out of turn")
            memo.append(stack[-1])
        elif name == "MARK":
            marks.append(len(stack))
        elif not before:
            stack += [memo[int(argument or 0)] if name.endswith("GET") else (1, 1)] * after
        else:
            start = len(stack) - before
            if pickletools.markobject in code.stack_before:
                start = marks.pop() - code.stack_before.index(pickletools.markobject)
            parts = stack[start:]
            # What takes items in lies no deeper for it.
            grows = [depth + (name not in _TAKING or number > 0) for number, (_, depth) in enumerate(parts)]
            size, depth = 1 + sum(size for size, _ in parts), max(grows, default=1)
            if size > limit or depth > _MOST_NESTED:
                raise _MisfitError("has values nested too deep, or in each other too often")
            stack[start:] = [(size, depth)] * after


class _MisfitError(Exception):
    """The library's metadata is readable and says what cannot be."""


class _Record:
    """Stands in for any object of a pickle; all that is wanted of one is its state."""

    def __init__(self, *arguments: object) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:  # noqa: ANN401 - whatever was pickled
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads the library's metadata; of what a pickle may name it knows number formats, and has records for the rest."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - the library's signature
        """A type without behaviour for a name."""
        if (module, name) == ("torch", "Size"):
            return tuple
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        if (module, name) in _NAMES or (module.startswith("pathlib") and name == "PosixPath"):
            # Of its own each time: a pickle can change the attributes of a class.
            return type(name, (_Record,), {})
        raise _MisfitError(f"names {f'{module}.{name}'[:100]}, which is not part of a checkpoint")


_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", one)
            for one in (
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
    }
)


@dataclass(frozen=True)
class _Place:
    """Position of a shard in bytes, for the library's reader."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


def _tensor_of(record: _Record) -> TensorStorageMetadata:
    state = record.state
    dtype, size = state["properties"].state[0], _lengths(state["size"])
    if not isinstance(dtype, torch.dtype):
        raise _MisfitError(f"has {reprlib.repr(dtype)} for a number format")
    chunks = [
        ChunkStorageMetadata(_lengths(one.state["offsets"]), _lengths(one.state["sizes"])) for one in state["chunks"]
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _places(records: Mapping[_Record, _Record]) -> Iterator[tuple[MetadataIndex, _Place]]:
    for index, place in records.items():
        name, offset, length = place.state["relative_path"], *_lengths((place.state["offset"], place.state["length"]))
        if place.state.get("transform_descriptors"):
            raise _MisfitError("has transformed shards, which no checkpoint here has")
        yield MetadataIndex(str(index.state["fqn"]), _lengths(index.state["offset"])), _Place(name, offset, length)


def _lengths(numbers: Sequence[int]) -> torch.Size:
    """One or two sizes or starts."""
    if len(numbers) > 2 or not all(type(one) is int and 0 <= one < 2**63 for one in numbers):
        raise _MisfitError(f"has {reprlib.repr(numbers)} for a size")
    return torch.Size(numbers)


def _require_fit(
    tensors: Mapping[str, TensorStorageMetadata], places: Mapping[MetadataIndex, _Place], sizes: Mapping[str, int]
) -> None:
    """_MisfitError unless shards cover the tensors, and each has bytes of its own in one of the files."""
    free = dict(sizes)
    for name, tensor in tensors.items():
        for chunk in tensor.chunks:
            place = places.get(MetadataIndex(name, chunk.offsets))
            needed = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
            ends = [start + length for start, length in zip(chunk.offsets, chunk.sizes, strict=True)]
            if place is None or place.relative_path not in sizes or needed > place.length:
                raise _MisfitError(f"has no bytes for a shard of {name!r}")
            free[place.relative_path] -= place.length
            beyond = place.offset + place.length > sizes[place.relative_path] or free[place.relative_path] < 0
            if beyond or any(end > whole for end, whole in zip(ends, tensor.size, strict=True)):
                raise _MisfitError(f"has a shard of {name!r} beyond the end")
        volume = sum(math.prod(chunk.sizes) for chunk in tensor.chunks)
        if volume != math.prod(tensor.size) or _overlap(tensor.chunks):
            raise _MisfitError(f"has shards of {name!r} that do not cover it")


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether two shards of a tensor, each of one or two dimensions, have an element in common."""
    ends: list[tuple[int, bool, int, int]] = []
    for chunk in chunks:
        (row, left), (rows, columns) = (1, *chunk.offsets)[-2:], (1, *chunk.sizes)[-2:]
        if rows and columns:
            # On one row, shards that end come before those that begin.
            ends += [(row, True, left, left + columns), (row + rows, False, left, left + columns)]
    # Columns of the shards that the current row crosses; none has any in common with another.
    crossed: list[tuple[int, int]] = []
    for _, begins, left, right in sorted(ends):
        place = bisect.bisect_left(crossed, (left, right))
        if not begins:
            del crossed[place]
            continue
        if any(left < end and start < right for start, end in crossed[max(place - 1, 0) : place + 1]):
            return True
        crossed.insert(place, (left, right))
    return False


class _SavePlanner(DefaultSavePlanner):
    """Plans the writing of shards, keyed by name and start; empty ones are skipped."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> plans.SavePlan:
        found = ((name, shard) for name, shards in self.state_dict.items() for shard in shards if shard.values.numel())
        self.plan = plans.SavePlan([_write_item(name, shard) for name, shard in found])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:  # noqa: ANN401 - the library's signature
        return _at(self.state_dict[index.fqn], index)


class _LoadPlanner(DefaultLoadPlanner):
    """Plans the reading of shards from whatever shards were saved."""

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
        for name, shards in self.state_dict.items():
            tensor = saved[name]
            assert isinstance(tensor, TensorStorageMetadata), f"{name} was saved as a tensor"
            chunks = [shard.chunk() for shard in shards if shard.values.numel()]
            items += create_read_items_for_chunk_list(name, tensor, chunks)
        return plans.LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return _at(self.state_dict[index.fqn], index)


class _Writer(FileSystemWriter):
    """Reports a full disk; torch, whose C++ loses the reason, reports a wrong position in the file."""

    def write_data(self, plan: plans.SavePlan, planner: plans.SavePlanner) -> Future[list[Any]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # A new exception, because one loses its context on its way to other ranks.
            if is_full(error):
                raise OSError(errno.ENOSPC, "no space left on the disk, or in the quota") from error
            raise


def _at(shards: Sequence[Shard], index: MetadataIndex) -> torch.Tensor:
    """Values of the shard that begins where an index says."""
    return next(shard.values for shard in shards if torch.Size(shard.start) == index.offset and shard.values.numel())


def _write_item(name: str, shard: Shard) -> plans.WriteItem:
    properties = TensorProperties(dtype=shard.values.dtype)
    data = plans.TensorWriteData(chunk=shard.chunk(), properties=properties, size=torch.Size(shard.size))
    return plans.WriteItem(index=MetadataIndex(name, shard.start), type=plans.WriteItemType.SHARD, tensor_data=data)
