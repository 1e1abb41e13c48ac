"""Shards of tensors in files, in the layout of torch.distributed.checkpoint, so that its programs read them too.

A shard is a 2D slice of a tensor of the whole model, padding not counted. A checkpoint holds shards that cover each
tensor. A loading rank takes what its own shards have in common with them, so any grid can read any other's checkpoint.

Which shard lies where is a pickle of torch's classes. It is read without importing any class or function that it names,
and checked against the files: a checkpoint cannot run code or make other files be read.
"""

from __future__ import annotations

import bisect
import io
import math
import os
import pickle
import pickletools
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from axonn_tune.files import read_regular
from axonn_tune.grid import axes_of_ranks
from axonn_tune.program.inputs import COPY
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.parameters import Bucket, Parameter, Vector

Lengths: TypeAlias = tuple[int, ...]
"""One or two sizes or starts."""


@dataclass(frozen=True)
class Shard:
    """A shard of a tensor: the whole tensor's size, the shard's offset, and its values."""

    size: Lengths
    start: Lengths
    values: torch.Tensor

    def host_copy(self) -> Shard:
        """A copy in host memory, which training does not change; from a GPU it is complete after `synchronize`."""
        values = self.values.detach()
        copy = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        return Shard(self.size, self.start, copy.copy_(values, non_blocking=True))


@dataclass(frozen=True)
class StoredShard:
    """Where a shard of a tensor begins, its shape, and which bytes of which file hold it."""

    start: Lengths
    shape: Lengths
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in files: its size, number format and shards."""

    size: Lengths
    dtype: torch.dtype
    shards: tuple[StoredShard, ...]


Stored: TypeAlias = Mapping[str, StoredTensor]
"""By the tensor's name."""
Shards: TypeAlias = Mapping[str, Sequence[Shard]]
"""By the tensor's name, at least one each."""


def shards_of(parameter: Parameter, bucket: Bucket, flat: torch.Tensor) -> list[Shard]:
    """Shards of a parameter in `flat`, which has the layout of the bucket's `master`; views without padded rows."""
    found = [_shard(parameter, *one) for one in bucket.slices(parameter, flat)]
    return [shard for shard in found if shard.values.numel()] or found[:1]


def whole_shard(parameter: Parameter) -> Shard:
    """All that a rank has of a parameter that is in no bucket."""
    return _shard(parameter, 0, 0, parameter.value)


def _shard(parameter: Parameter, row: int, column: int, values: torch.Tensor) -> Shard:
    """Values from a row and a column of a rank's part of a parameter on, without padding."""
    if isinstance(parameter, Vector):
        return Shard((parameter.width,), (parameter.elements.start + row,), values.flatten())
    first, end = parameter.row_range.start + row, parameter.real_rows
    # A shard of padding alone begins at the end, where it is empty.
    start = min(first, end), parameter.column_range.start + column
    real = min(max(end - first, 0), len(values))
    return Shard((end, parameter.columns), start, values[:real])


def names_to_write(buckets: Sequence[Bucket], mesh: Mesh) -> set[str]:
    """Names of the parameters this rank saves: one replica saves each, balanced over ranks."""
    # Of a tied table the first pipeline stage saves its copy.
    owned = [(parameter, bucket) for bucket in buckets for parameter in bucket.parameters if bucket.layer != COPY]
    written: set[str] = set()
    # Elements that each replica saves, for every set of axes they repeat over.
    loads_of: dict[tuple[str, ...], list[int]] = {}
    for parameter, bucket in sorted(owned, key=lambda one: -one[0].value.numel()):
        # Which replica of the elements this rank holds, and of how many.
        split, place, copies = bucket.split_axes(parameter), 0, 1
        alike = tuple(axis for axis in axes_of_ranks(split) if axis not in split)
        for axis in alike:
            place, copies = place * mesh.size(axis) + mesh.coordinate(axis), copies * mesh.size(axis)
        loads = loads_of.setdefault(alike, [0] * copies)
        lightest = loads.index(min(loads))
        loads[lightest] += parameter.value.numel()
        if lightest == place:
            written.add(parameter.name)
    return written


def write(path: Path, shards: Shards) -> Stored:
    """Write one rank's shards into a new file, and bring it to the disk; empty shards are skipped."""
    found: dict[str, StoredTensor] = {}
    with path.open("xb") as file:
        for name, parts in shards.items():
            stored = []
            for shard in (one for one in parts if one.values.numel()):
                # Not into the file itself: torch would lose why that fails, such as a full disk.
                content = io.BytesIO()
                torch.save(shard.values, content)
                place = path.name, file.tell(), len(content.getbuffer())
                stored.append(StoredShard(shard.start, tuple(shard.values.shape), *place))
                file.write(content.getbuffer())
            found[name] = StoredTensor(parts[0].size, parts[0].values.dtype, tuple(stored))
        file.flush()
        os.fsync(file.fileno())
    return found


def write_metadata(folder: Path, of_ranks: Iterable[Stored]) -> None:
    """Write which shard lies where, of all ranks, as torch.distributed.checkpoint does."""
    from torch.distributed.checkpoint import metadata as torchs
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    tensors, places = dict[str, torchs.TensorStorageMetadata](), dict[torchs.MetadataIndex, _StorageInfo]()
    for name, tensor in (item for stored in of_ranks for item in stored.items()):
        empty = torchs.TensorStorageMetadata(torchs.TensorProperties(tensor.dtype), torch.Size(tensor.size), [])
        whole = tensors.setdefault(name, empty)
        for one in tensor.shards:
            start = torch.Size(one.start)
            whole.chunks.append(torchs.ChunkStorageMetadata(start, torch.Size(one.shape)))
            places[torchs.MetadataIndex(name, start)] = _StorageInfo(one.file, one.offset, one.length)
    with (folder / METADATA_FILE).open("xb") as file:
        pickle.dump(torchs.Metadata({**tensors}, storage_data=places), file)
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path, stored: Stored, shards: Shards) -> None:
    """Fill shards from a folder that any grid has written; each rank reads on its own."""
    for name, parts in shards.items():
        for one in stored[name].shards:
            common = [(shard, both) for shard in parts if (both := _common(shard, one)) is not None]
            if not common:
                continue
            with (folder / one.file).open("rb") as file:
                file.seek(one.offset)
                content = io.BytesIO(file.read(one.length))
            values = torch.load(content, map_location="cpu", weights_only=True)
            if (values.shape, values.dtype) != (one.shape, stored[name].dtype):
                raise ValueError(f"a shard of {name!r} is of another size or number format")
            for shard, (here, there) in common:
                shard.values[here].copy_(values[there])


def _common(shard: Shard, stored: StoredShard) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What two shards of a tensor have in common, within each; None if nothing."""
    here, there = list[slice](), list[slice]()
    for mine, length, its, its_length in zip(shard.start, shard.values.shape, stored.start, stored.shape, strict=True):
        begin, end = max(mine, its), min(mine + length, its + its_length)
        if begin >= end:
            return None
        here.append(slice(begin - mine, end - mine))
        there.append(slice(begin - its, end - its))
    return tuple(here), tuple(there)


METADATA_FILE = ".metadata"


def read_metadata(folder: Path, sizes: Mapping[str, int]) -> Stored:
    """What lies where in a folder whose files have these sizes; ValueError unless it fits them."""
    if METADATA_FILE not in sizes:
        raise ValueError(f"{METADATA_FILE} is not among the checkpoint's files")
    try:
        content = read_regular(folder / METADATA_FILE, limit_bytes=sizes[METADATA_FILE])
        _require_bounded(content)
        found = _stored(_Unpickler(io.BytesIO(content)).load().state)
        _require_fit(found, sizes)
    except _MisfitError as error:
        raise ValueError(f"{METADATA_FILE} {error}") from error
    except Exception as error:
        # Any error of a broken pickle.
        raise ValueError(f"{METADATA_FILE} cannot be read: {type(error).__name__}: {error}") from error
    return found


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


def _stored(state: Any) -> Stored:  # noqa: ANN401 - whatever was pickled
    """Tensors and their shards from the records of a pickle."""
    places: dict[tuple[str, Lengths], tuple[str, int, int]] = {}
    for index, record in state["storage_data"].items():
        place, index = record.state, index.state
        if place.get("transform_descriptors"):
            raise _MisfitError("has transformed shards, which no checkpoint here has")
        offset, length = _lengths((place["offset"], place["length"]))
        places[index["fqn"], _lengths(index["offset"])] = place["relative_path"], offset, length
    found: dict[str, StoredTensor] = {}
    for name, record in state["state_dict_metadata"].items():
        tensor, shards = record.state, list[StoredShard]()
        dtype = tensor["properties"].state[0]
        if not isinstance(dtype, torch.dtype):
            raise _MisfitError(f"has {reprlib.repr(dtype)} for a number format")
        for chunk in tensor["chunks"]:
            start, shape = _lengths(chunk.state["offsets"]), _lengths(chunk.state["sizes"])
            if (name, start) not in places:
                raise _MisfitError(f"has no bytes for a shard of {name!r}")
            shards.append(StoredShard(start, shape, *places[name, start]))
        found[str(name)] = StoredTensor(_lengths(tensor["size"]), dtype, tuple(shards))
    return found


def _lengths(numbers: Sequence[int]) -> Lengths:
    if len(numbers) > 2 or not all(type(one) is int and 0 <= one < 2**63 for one in numbers):
        raise _MisfitError(f"has {reprlib.repr(numbers)} for a size")
    return tuple(numbers)


def _require_fit(stored: Stored, sizes: Mapping[str, int]) -> None:
    """_MisfitError unless shards cover the tensors, and each has bytes of its own in one of the files."""
    free = dict(sizes)
    for name, tensor in stored.items():
        for one in tensor.shards:
            if one.file not in sizes or math.prod(one.shape) * tensor.dtype.itemsize > one.length:
                raise _MisfitError(f"has no bytes for a shard of {name!r}")
            free[one.file] -= one.length
            ends = [start + length for start, length in zip(one.start, one.shape, strict=True)]
            beyond = one.offset + one.length > sizes[one.file] or free[one.file] < 0
            if beyond or any(end > whole for end, whole in zip(ends, tensor.size, strict=True)):
                raise _MisfitError(f"has a shard of {name!r} beyond the end")
        volume = sum(math.prod(one.shape) for one in tensor.shards)
        if volume != math.prod(tensor.size) or _overlap(tensor.shards):
            raise _MisfitError(f"has shards of {name!r} that do not cover it")


def _overlap(shards: Sequence[StoredShard]) -> bool:
    """Whether two shards of a tensor, each of one or two dimensions, have an element in common."""
    ends: list[tuple[int, bool, int, int]] = []
    for one in shards:
        (row, left), (rows, columns) = (1, *one.start)[-2:], (1, *one.shape)[-2:]
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
