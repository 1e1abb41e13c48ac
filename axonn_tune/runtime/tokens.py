"""Token files: a fixed header, then the ids of all documents one after the other, little-endian.

Each document ends with the tokenizer's end-of-text id where it has one. torch is not needed here.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from axonn_tune.errors import UsageError
from axonn_tune.files import replacing

MAGIC = b"AXNTOKEN"
VERSION = 1
# Magic, version, bytes per id, vocabulary, ids, SHA-256 of the ids, tokenizer (UTF-8, zero-padded).
_LAYOUT = struct.Struct("<8sIIQQ32s192s")
HEADER_BYTES = _LAYOUT.size
_SMALL_VOCABULARY = 1 << 16


@dataclass(frozen=True)
class Header:
    """What a token file says of itself. Ids are below `vocab`; `sha256` is that of the ids as bytes."""

    vocab: int
    count: int
    tokenizer: str
    sha256: bytes

    @property
    def item_bytes(self) -> int:
        """2 or 4 bytes an id, the fewest that hold the vocabulary."""
        return 2 if self.vocab <= _SMALL_VOCABULARY else 4

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the ids."""
        return np.dtype(f"<u{self.item_bytes}")

    def pack(self) -> bytes:
        """The header as it stands in the file."""
        # A name cut in the middle of a character would not read back.
        name = self.tokenizer.encode()[:192].decode(errors="ignore").encode()
        return _LAYOUT.pack(MAGIC, VERSION, self.item_bytes, self.vocab, self.count, self.sha256, name)


@dataclass(frozen=True)
class TokenFile:
    """A token file, memory-mapped: reading it costs what is read of it."""

    path: Path
    header: Header
    ids: NDArray[Any]


def open_tokens(path: str | Path, *, vocab: int | None = None) -> TokenFile:
    """Open a token file; UsageError with the numbers if it is none, is torn, or needs more than `vocab` ids."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            header = _read_header(path, file)
        actual = path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot read token file {str(path)!r}: {error.strerror}") from error
    expected = HEADER_BYTES + header.count * header.item_bytes
    if actual != expected:
        raise UsageError(
            f"token file {str(path)!r} is torn: {header.count:,} ids of {header.item_bytes} bytes and the header "
            f"are {expected:,} bytes, but the file has {actual:,}; write it again with `axonn-tune data`"
        )
    if vocab is not None and header.vocab > vocab:
        raise UsageError(
            f"token file {str(path)!r} has ids up to {header.vocab - 1:,} (tokenizer {header.tokenizer!r}), "
            f"but the model's vocabulary is {vocab:,}"
        )
    if header.count == 0:
        return TokenFile(path, header, np.zeros(0, header.dtype))
    ids = np.memmap(path, dtype=header.dtype, mode="r", offset=HEADER_BYTES, shape=(header.count,))
    return TokenFile(path, header, ids)


def _read_header(path: Path, file: BinaryIO) -> Header:
    raw = file.read(HEADER_BYTES)
    if raw[: len(MAGIC)] != MAGIC:
        raise UsageError(f"{str(path)!r} is no token file: it begins with {raw[:8]!r}, not {MAGIC!r}")
    if len(raw) < HEADER_BYTES:
        raise UsageError(f"token file {str(path)!r} is torn: {len(raw)} bytes, but the header alone has {HEADER_BYTES}")
    _, version, item_bytes, vocab, count, sha256, name = _LAYOUT.unpack(raw)
    if version != VERSION:
        raise UsageError(f"token file {str(path)!r} has format version {version}; this program reads {VERSION}")
    header = Header(vocab, count, name.rstrip(b"\0").decode(errors="replace"), sha256)
    if item_bytes != header.item_bytes:
        raise UsageError(
            f"token file {str(path)!r} says {item_bytes} bytes an id, but {vocab:,} ids take {header.item_bytes}"
        )
    return header


def write_tokens(path: str | Path, parts: Iterable[NDArray[Any]], *, vocab: int, tokenizer: str) -> Header:
    """Write ids, part after part, and return the header; whatever goes wrong, no torn file is left.

    UsageError if nothing comes or an id is outside the vocabulary; EnvironmentProblem on a full disk.
    """
    blank = Header(vocab, 0, tokenizer, bytes(32))
    digest, count = hashlib.sha256(), 0
    with replacing(path) as file:
        file.write(blank.pack())
        for part in parts:
            if len(part) and not 0 <= int(part.min()) <= int(part.max()) < vocab:
                raise UsageError(f"tokenizer {tokenizer!r} gave id {int(part.max()):,}; its vocabulary is {vocab:,}")
            raw = part.astype(blank.dtype).tobytes()
            digest.update(raw)
            file.write(raw)
            count += len(part)
        if count == 0:
            raise UsageError("nothing to write: the files given hold no text")
        header = Header(vocab, count, tokenizer, digest.digest())
        file.seek(0)
        file.write(header.pack())
    return header
