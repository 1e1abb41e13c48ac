"""Text to ids: bytes as they are, or a Hugging Face tokenizer from its JSON file."""

from __future__ import annotations

import codecs
import importlib
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from axonn_tune.errors import EnvironmentProblem, UsageError

TEXT_PATTERNS = ("*.txt", "*.md", "*.rst", "*.py")
# Other people's packages and caches that may lie below a folder of sources.
_FOREIGN = frozenset({"site-packages", "dist-packages", "__pycache__"})
_CHUNK_BYTES = 1 << 20
_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")


class Tokenizer(Protocol):
    """Turns one document into ids; `end_of_text` closes a document, where the tokenizer has such an id."""

    @property
    def name(self) -> str:
        """What the token file names it."""

    @property
    def vocab(self) -> int:
        """Ids are below it."""

    @property
    def end_of_text(self) -> int | None:
        """Id written after each document."""

    def encode(self, chunks: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """Ids of a document that comes in chunks ending anywhere."""


@dataclass(frozen=True)
class Bytes:
    """Every byte is its own id, and 256 is the end of a text. Nothing needs to be downloaded."""

    name: str = "bytes"
    vocab: int = 257
    end_of_text: int | None = 256

    def encode(self, chunks: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """Bytes as numbers."""
        return (np.frombuffer(chunk, dtype=np.uint8) for chunk in chunks)


@dataclass(frozen=True)
class HuggingFace:
    """A tokenizer of the `tokenizers` library. What is no UTF-8 becomes the replacement character."""

    name: str
    vocab: int
    end_of_text: int | None
    model: Any

    def encode(self, chunks: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """Ids of whole lines, about a mebibyte at a time: no tokenizer in use merges across a line's end."""
        for text in _whole_lines(chunks):
            yield np.asarray(self.model.encode(text, add_special_tokens=False).ids, dtype=np.int64)


def _whole_lines(chunks: Iterable[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    rest = ""
    for chunk in chunks:
        lines, newline, rest = (rest + decoder.decode(chunk)).rpartition("\n")
        if newline:
            yield lines + newline
    rest += decoder.decode(b"", final=True)
    if rest:
        yield rest


def tokenizer_named(name: str) -> Tokenizer:
    """`bytes`, or the path of a tokenizer.json.

    UsageError if the file cannot be used; EnvironmentProblem if the library is not installed.
    """
    if name == "bytes":
        return Bytes()
    path = Path(name)
    if not path.is_file():
        raise UsageError(f"tokenizer {name!r} is neither `bytes` nor a file")
    try:
        library = importlib.import_module("tokenizers")
    except ImportError as error:
        raise EnvironmentProblem(
            f"tokenizer {name!r} needs a library that is not installed: pip install tokenizers"
        ) from error
    try:
        model = library.Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises bare Exception.
        raise UsageError(f"tokenizer {name!r} cannot be used: {error}") from error
    ends = (model.token_to_id(word) for word in _END_OF_TEXT)
    vocab = 1 + max(model.get_vocab(with_added_tokens=True).values(), default=-1)
    return HuggingFace(path.name, vocab, next((end for end in ends if end is not None), None), model)


def text_files(paths: Iterable[str | Path], *, patterns: Iterable[str] = TEXT_PATTERNS) -> list[Path]:
    """Files as given, and those below folders that match a pattern, sorted; UsageError if there are none.

    Left out below a folder: hidden files and folders, and packages installed there.
    """
    given, patterns = [Path(path) for path in paths], tuple(patterns)
    missing = [str(path) for path in given if not path.exists()]
    if missing:
        raise UsageError(f"no such file or folder: {', '.join(missing)}")
    found: list[Path] = []
    for path in given:
        found += _below(path, patterns) if path.is_dir() else [path]
    if not found:
        raise UsageError(f"no file matches {' '.join(patterns)} in {', '.join(map(str, given))}")
    return list(dict.fromkeys(found))


def _below(folder: Path, patterns: tuple[str, ...]) -> list[Path]:
    matching = {path for pattern in patterns for path in folder.rglob(pattern) if path.is_file()}
    return sorted(path for path in matching if _is_own(path.relative_to(folder)))


def _is_own(path: Path) -> bool:
    return not any(part.startswith(".") or part in _FOREIGN for part in path.parts)


def standard_library() -> Path:
    """Where the source of Python's standard library lies: text that every installation has."""
    return Path(sysconfig.get_path("stdlib"))


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
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                on_read(len(chunk))
                yield chunk
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from error
