"""Training data: text to token ids, token files, and batches of them.

A token file is a fixed header, then the ids of all documents one after the other, little-endian. Each document ends
with the tokenizer's end-of-text id where it has one.

Batches are a pure function of seed, step and coordinate: nothing to save, and the same on every grid. Sequences are
numbered through the whole run: step s of B sequences has s·B to s·B + B − 1. The text of a number depends only on the
seed; the grid only decides which rank reads it. So a run that resumes on any grid reads the same data as an
uninterrupted one.

Only batches need torch, which they import when they are made.
"""

from __future__ import annotations

import codecs
import hashlib
import importlib
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.errors import EnvironmentProblem, UsageError
from axonn_tune.files import open_regular, replacing
from axonn_tune.specs.launch import Launch

if TYPE_CHECKING:
    import torch

    from axonn_tune.runtime.mesh import Mesh

MAGIC = b"AXNTOKEN"
VERSION = 1
# Magic, version, bytes per id, vocabulary, ids, SHA-256 of the ids, tokenizer (UTF-8, zero-padded).
_LAYOUT = struct.Struct("<8sIIQQ32s192s")
HEADER_BYTES = _LAYOUT.size
_SMALL_VOCABULARY = 1 << 16


@dataclass(frozen=True)
class TokenHeader:
    """A token file's header. Ids are below `vocab`; `sha256` is that of the ids as bytes."""

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


def open_tokens(path: str | Path, *, vocab: int | None = None) -> NDArray[Any]:
    """Ids of a token file, mapped into memory.

    UsageError with the numbers if it is none, is truncated, or needs more than `vocab` ids.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"token file {str(path)!r} is not a file")
        with open_regular(path) as file:
            header = _read_header(path, file)
        actual = path.stat().st_size
    except OSError as error:
        raise UsageError(f"cannot read token file {str(path)!r}: {error.strerror}") from error
    expected = HEADER_BYTES + header.count * header.item_bytes
    if actual != expected:
        raise UsageError(
            f"token file {str(path)!r} is truncated: {header.count:,} ids of {header.item_bytes} bytes and the header "
            f"are {expected:,} bytes, but the file has {actual:,}; write it again with `axonn-tune data`"
        )
    if vocab is not None and header.vocab > vocab:
        raise UsageError(
            f"token file {str(path)!r} has ids up to {header.vocab - 1:,} (tokenizer {header.tokenizer!r}), "
            f"but the model's vocabulary is {vocab:,}"
        )
    if header.count == 0:
        return np.zeros(0, header.dtype)
    return np.memmap(path, dtype=header.dtype, mode="r", offset=HEADER_BYTES, shape=(header.count,))


def _read_header(path: Path, file: BinaryIO) -> TokenHeader:
    raw = file.read(HEADER_BYTES)
    if raw[: len(MAGIC)] != MAGIC:
        raise UsageError(f"{str(path)!r} is not a token file: it begins with {raw[:8]!r}, not {MAGIC!r}")
    if len(raw) < HEADER_BYTES:
        raise UsageError(
            f"token file {str(path)!r} is truncated: {len(raw)} bytes, but the header alone has {HEADER_BYTES}"
        )
    _, version, item_bytes, vocab, count, sha256, name = _LAYOUT.unpack(raw)
    if version != VERSION:
        raise UsageError(f"token file {str(path)!r} has format version {version}; this program reads {VERSION}")
    header = TokenHeader(vocab, count, name.rstrip(b"\0").decode(errors="replace"), sha256)
    if item_bytes != header.item_bytes:
        raise UsageError(
            f"token file {str(path)!r} says {item_bytes} bytes an id, but {vocab:,} ids take {header.item_bytes}"
        )
    return header


def write_tokens(path: str | Path, parts: Iterable[NDArray[Any]], *, vocab: int, tokenizer: str) -> TokenHeader:
    """Write ids, part after part, and return the header; whatever goes wrong, no truncated file is left.

    UsageError if nothing comes or an id is outside the vocabulary; EnvironmentProblem on a full disk.
    """
    blank = TokenHeader(vocab, 0, tokenizer, bytes(32))
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
        header = TokenHeader(vocab, count, tokenizer, digest.digest())
        file.seek(0)
        file.write(header.pack())
    return header


TEXT_PATTERNS = ("*.txt", "*.md", "*.rst", "*.py")
# Installed packages and caches below a folder of sources.
_FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
_CHUNK_BYTES = 1 << 20
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


@dataclass(frozen=True)
class Tokenizer:
    """Turns documents into ids below `vocab`; `end_of_text` ends each, where the tokenizer has such an id.

    name: in a token file; encode: ids of a document that comes in chunks ending anywhere.
    """

    name: str
    vocab: int
    end_of_text: int | None
    encode: Callable[[Iterable[bytes]], Iterator[NDArray[Any]]]


BYTES = Tokenizer("bytes", 257, 256, lambda chunks: (np.frombuffer(chunk, dtype=np.uint8) for chunk in chunks))
"""Every byte is its own id, and 256 is the end of a text. Nothing needs to be downloaded."""


def tokenizer_named(name: str) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json.

    UsageError if the file cannot be used; EnvironmentProblem if the library is not installed.
    """
    if name == "bytes":
        return BYTES
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"tokenizer {name!r} is neither `bytes` nor a file")
    open_regular(path).close()
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise EnvironmentProblem(
            f"tokenizer {name!r} needs a library that is not installed: pip install tokenizers"
        ) from error
    try:
        model = library.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises plain Exception.
        raise UsageError(f"tokenizer {name!r} cannot be used: {error}") from error
    ends = (model.token_to_id(word) for word in _END_OF_TEXT)
    vocab = 1 + max(model.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(chunks: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        # Whole lines, about a mebibyte at a time: no tokenizer in use merges across a line's end. What is not UTF-8
        # becomes the replacement character.
        decoder, rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
        for chunk in itertools.chain(chunks, [b""]):
            text = rest + decoder.decode(chunk, final=not chunk)
            end = text.rfind("\n") + 1 if chunk else len(text)
            rest = text[end:]
            if end:
                yield np.asarray(model.encode(text[:end], add_special_tokens=False).ids, dtype=np.int64)

    return Tokenizer(path.name, vocab, next((end for end in ends if end is not None), None), encode)


def text_files(paths: Iterable[str | Path], *, patterns: Iterable[str] = TEXT_PATTERNS) -> list[Path]:
    """Files as given, and those below folders that match a pattern, sorted; UsageError if there are none.

    Below a folder, hidden files and folders and installed packages are skipped.
    """
    given, patterns = [Path(path) for path in paths], tuple(patterns)
    special = [str(path) for path in given if path.exists() and not (path.is_file() or path.is_dir())]
    if special:
        raise UsageError(f"a device or a pipe, not a file: {', '.join(special)}")
    missing = [str(path) for path in given if not path.exists()]
    if missing:
        raise UsageError(f"no such file or folder: {', '.join(missing)}")
    found: list[Path] = []
    for path in given:
        if not path.is_dir():
            found.append(path)
            continue
        try:
            matching = {one for pattern in patterns for one in path.rglob(pattern) if one.is_file()}
        except (NotImplementedError, ValueError) as error:
            raise UsageError(f"--include {' '.join(patterns)}: a pattern of names below a folder is needed") from error
        parts = {one: one.relative_to(path).parts for one in matching}
        found += sorted(one for one in parts if not any(part[0] == "." or part in _FOREIGN for part in parts[one]))
    if not found:
        raise UsageError(f"no file matches {' '.join(patterns)} in {', '.join(map(str, given))}")
    return list(dict.fromkeys(found))


def encoded(
    files: Iterable[Path], tokenizer: Tokenizer, *, on_read: Callable[[int], None] = lambda size: None
) -> Iterator[NDArray[Any]]:
    """Ids of all files, each closed by the end-of-text id; `on_read` hears how many bytes were read."""
    for path in files:
        yield from tokenizer.encode(_chunks(path, on_read))
        if tokenizer.end_of_text is not None:
            yield np.array([tokenizer.end_of_text])


def _chunks(path: Path, on_read: Callable[[int], None]) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            while chunk := file.read(_CHUNK_BYTES):
                on_read(len(chunk))
                yield chunk
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from error


_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class BatchShard:
    """Which sequences of a step are this rank's: of each micro-batch the `place`th of as many parts as there are ranks
    over data and z.

    The step is split over micro-batches, then data, then z, each into consecutive parts: all grids with as many
    micro-batches have the same ones.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    place: int = 0

    def sequences(self, step: int, micro_step: int) -> NDArray[np.int64]:
        """Numbers `[b]` of the sequences in one micro-batch of this rank."""
        assert 0 <= micro_step < self.accumulation, f"micro-step {micro_step} of {self.accumulation}"
        first = step * self.global_batch + micro_step * (self.global_batch // self.accumulation)
        first += self.place * self.micro_batch
        return np.arange(first, first + self.micro_batch, dtype=np.int64)


Batches: TypeAlias = "Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]"
"""Tokens and targets, `[b, S]` int64 on the CPU, of a step's micro-batch of this rank; both count from 0."""


@dataclass(frozen=True)
class TokenSource:
    """Windows of S + 1 tokens of a file, in another order each epoch.

    Window i holds tokens i·S to i·S + S, so each token but the first is a target once an epoch. The
    tokens after the last whole window are never seen.
    """

    path: str
    ids: NDArray[Any]
    seed: int
    sequence: int
    share: BatchShard

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise UsageError(
                f"token file {self.path!r} has {len(self.ids):,} ids; "
                f"sequences of {self.sequence:,} need at least {self.sequence + 1:,}"
            )

    @property
    def windows(self) -> int:
        """Sequences in an epoch."""
        return (len(self.ids) - 1) // self.sequence

    def batch(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, `[b, S]`."""
        starts = self.window_of(self.share.sequences(step, micro_step)) * self.sequence
        return _shifted(np.stack([self.ids[start : start + self.sequence + 1] for start in starts]))

    def window_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window each sequence number stands for; within an epoch, none twice."""
        epochs, places = np.divmod(sequences, self.windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permuted(places[here], size=self.windows, key=f"{self.seed}:epoch:{epoch}")
        return windows


@dataclass(frozen=True)
class SyntheticTokens:
    """Tokens drawn from the seed: small ids more often than large ones, so that there is something to learn."""

    vocab: int
    seed: int
    sequence: int
    share: BatchShard

    def batch(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, `[b, S]`; each sequence is its own stream."""
        sequences = self.share.sequences(step, micro_step).astype(np.uint64)
        (key,) = _key_words(f"{self.seed}:synthetic", 1)
        length = np.uint64(self.sequence + 1)
        counters = sequences[:, None] * length + np.arange(length, dtype=np.uint64)
        first = _mixed(counters + key)
        second = _mixed(first + _GOLDEN)
        # A uniform number of bits, then uniform bits: about log-uniform, in integers alone, so that
        # no library's rounding can make two ranks differ.
        bits = first % np.uint64(self.vocab.bit_length())
        ids = (np.uint64(1) << bits) - np.uint64(1) + (second & ((np.uint64(1) << bits) - np.uint64(1)))
        return _shifted(ids % np.uint64(self.vocab))


def batch_shard(launch: Launch, mesh: Mesh) -> BatchShard:
    """Which sequences of a launch config's steps are this rank's."""
    place = mesh.coordinate("data") * mesh.size("z") + mesh.coordinate("z")
    return BatchShard(launch.workload.global_batch, launch.micro_batch, launch.grad_accumulation, place)


def batches(launch: Launch, mesh: Mesh) -> Batches:
    """The data a launch config asks for, as this rank sees it; UsageError if the file does not fit the model."""
    share = batch_shard(launch, mesh)
    sequence, seed, vocab = launch.workload.sequence_length, launch.data.seed, launch.model.vocab
    if launch.data.path is None:
        return SyntheticTokens(vocab, seed, sequence, share).batch
    path = launch.data.path
    return TokenSource(path, open_tokens(path, vocab=vocab), seed, sequence, share).batch


def permuted(places: NDArray[np.int64], *, size: int, key: str) -> NDArray[np.int64]:
    """A permutation of `range(size)`, evaluated at some places; in constant memory, however large the range.

    A Feistel network permutes the smallest power of two that holds the range; results outside it are
    sent through again until they fall inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains": cycle walking, here fewer than two passes on average).
    """
    bits = max(2, (size - 1).bit_length())
    words = _key_words(key, _ROUNDS)
    found = _feistel(places.astype(np.uint64), bits=bits, words=words)
    while (outside := found >= size).any():
        found[outside] = _feistel(found[outside], bits=bits, words=words)
    return found.astype(np.int64)


def _feistel(numbers: NDArray[np.uint64], *, bits: int, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of `bits`-bit numbers. Both parts change width each round, so an odd number of bits works too."""
    wide, narrow = bits - bits // 2, bits // 2
    left, right = numbers >> np.uint64(wide), numbers & np.uint64((1 << wide) - 1)
    for word in words:
        left, right = right, left ^ (_mixed(right + word) & np.uint64((1 << narrow) - 1))
        wide, narrow = narrow, wide
    assert len(words) % 2 == 0, "widths are as at the start only after an even number of rounds"
    return (left << np.uint64(wide)) | right


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood 2014); multiplication wraps."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _key_words(text: str, count: int) -> NDArray[np.uint64]:
    """Up to eight 64-bit words from a text."""
    return np.frombuffer(hashlib.sha512(text.encode()).digest(), dtype="<u8")[:count].astype(np.uint64)


def _shifted(windows: NDArray[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows `[b, S + 1]` as tokens and the tokens that follow them."""
    import torch

    whole = torch.from_numpy(windows.astype(np.int64))
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
