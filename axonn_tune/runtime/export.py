"""A checkpoint's parameters as one safetensors file of the whole model, for programs that know no grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from axonn_tune.errors import UsageError
from axonn_tune.files import replacing
from axonn_tune.runtime.checkpoint import PARAMETERS
from axonn_tune.runtime.folders import Folder, description
from axonn_tune.runtime.pieces import Piece, described, read

TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FORMAT_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def checkpoint_at(path: str | Path) -> Path:
    """A checkpoint given as itself, or as the folder whose newest is meant; UsageError if there is none."""
    path = Path(path)
    if description(path) is not None:
        return path
    steps = Folder(path).steps()
    if not steps:
        raise UsageError(f"{str(path)!r} is neither a whole checkpoint nor a folder that holds one")
    return Folder(path).place(steps[-1])


def export(checkpoint: Path, output: str | Path, *, dtype: torch.dtype | None = None) -> int:
    """Write all parameters under their names here, weights as `[inputs, outputs]`; returns how many elements.

    One tensor at a time is in memory. `dtype` None: as saved. Neither the library nor a GPU is needed:
    the format is the length of a header, the header in JSON, then the tensors one after the other.
    """
    said, found = description(checkpoint), described(checkpoint)
    assert said is not None, "the caller has looked"
    sizes = {name: (size, dtype or kept) for name, (size, kept) in found.items() if name.startswith(PARAMETERS)}
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "step": str(said["step"]), "axonn_tune": said["version"]}
    }
    end = 0
    for name, (size, kind) in sizes.items():
        begin, end = end, end + torch.Size(size).numel() * kind.itemsize
        header[name.removeprefix(PARAMETERS)] = {
            "dtype": _FORMAT_NAMES[kind],
            "shape": list(size),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    # Spaces after it bring the tensors to a multiple of eight, which lets readers map them into memory.
    text += b" " * (-len(text) % 8)
    with replacing(output) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (size, kind) in sizes.items():
            values = torch.empty(size, dtype=found[name][1])
            read(checkpoint, {name: [Piece(size, (0,) * len(size), values)]})
            file.write(values.to(kind).flatten().view(torch.uint8).numpy().data)
    return sum(torch.Size(size).numel() for size, _ in sizes.values())
