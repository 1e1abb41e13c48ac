"""Loads YAML documents: reads, lays derived files over what they extend, applies overrides, validates."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar, get_args

from axonn_tune.errors import AxonnTuneError, DocumentError, Problem, UnknownNameError, UsageError, suggest
from axonn_tune.specs.base import Document
from axonn_tune.specs.composition import idle_sources, merge, new_items, stale_sources
from axonn_tune.specs.lookup import SUFFIXES, Kind, find, is_path
from axonn_tune.specs.overrides import apply_overrides
from axonn_tune.specs.validation import locate, required_keys, type_at, validate
from axonn_tune.specs.yaml_reader import Node, Reading, read_yaml

D = TypeVar("D", bound=Document)

# Launch configs are self-contained by design, and there is no catalog of workloads.
_EXTENSIBLE: dict[str, Kind] = {"model": "model", "machine": "machine"}


@dataclass(frozen=True)
class Loaded(Generic[D]):
    """A document, the file it came from, and the SHA-256 of everything that made it.

    The hash covers the file's text, then those of the files it extends, then the overrides; without
    the latter two it is the hash of the file.
    """

    document: D
    path: Path
    sha256: str


@dataclass(frozen=True)
class _Composed:
    """A document's nodes after composition, what is wrong with how it is written, and all texts that went in."""

    root: Node
    problems: tuple[Problem, ...]
    texts: tuple[str, ...]


def load_document(path: str | Path, *, schema: type[D], overrides: Sequence[str] = ()) -> D:
    """Load one file; UsageError if it cannot be read, DocumentError with every problem found in it.

    `overrides` are `dotted.path=value` assignments, as after `--set`.
    """
    return load_file(path, schema=schema, overrides=overrides).document


def load_file(path: str | Path, *, schema: type[D], overrides: Sequence[str] = ()) -> Loaded[D]:
    """The same, with its origin."""
    path = Path(path)
    return _load(read_text(path), path=path, source=str(path), schema=schema, overrides=overrides)


def parse_document(text: str, *, schema: type[D], source: str = "<text>", overrides: Sequence[str] = ()) -> D:
    """Load a document from its text; `source` names it in errors, `extends` is relative to the working directory."""
    return _load(text, path=None, source=source, schema=schema, overrides=overrides).document


def hold(document: D | Loaded[D], *, schema: type[D], overrides: Sequence[str] = ()) -> Loaded[D]:
    """A document that is at hand already, with `overrides` applied, as if it had been loaded.

    What came from no file has its name for a path, and the hash of the text it would be written as. UsageError
    and DocumentError for a wrong override, as when loading.
    """
    if isinstance(document, Loaded) and not overrides:
        return document
    # Imported here: what comes from a file is not written.
    from axonn_tune.specs.writing import to_yaml

    held = document.document if isinstance(document, Loaded) else document
    source = str(document.path if isinstance(document, Loaded) else getattr(held, "name", kind_of(schema)))
    return _load(to_yaml(held), path=None, source=source, schema=schema, overrides=overrides)


def read_text(path: Path) -> str:
    """Text of a UTF-8 file; UsageError if there is none to read, DocumentError if it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise UsageError(f"no file {str(path)!r}{_nearest_file(path)}") from error
    except IsADirectoryError as error:
        raise UsageError(f"{str(path)!r} is a folder, not a file") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DocumentError(str(path), [Problem("", f"not UTF-8 text: {error.reason}", line)]) from error
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from error


def kind_of(schema: type[Document]) -> str:
    """What a schema describes: model, machine, workload or launch."""
    return _expected(schema).split("/")[1]


def _load(text: str, *, path: Path | None, source: str, schema: type[D], overrides: Sequence[str]) -> Loaded[D]:
    composed = _compose(text, path=path, source=source, schema=schema, chain=())
    root = composed.root
    if overrides:
        # First on its own, so that the file's problems are not taken for the overrides'.
        validate(root, schema=schema, source=source, found=composed.problems)
        root = apply_overrides(root, overrides, schema=schema)
    document = validate(root, schema=schema, source=source, found=composed.problems)
    digest = hashlib.sha256("\n".join([*composed.texts, *overrides]).encode())
    return Loaded(document, path or Path(source), digest.hexdigest())


def _compose(text: str, *, path: Path | None, source: str, schema: type[D], chain: tuple[Path, ...]) -> _Composed:
    reading = read_yaml(text, source=source)
    _check_header(reading, schema=schema, source=source)
    root = reading.root
    if kind_of(schema) not in _EXTENSIBLE or "extends" not in root.mapping():
        return _Composed(root, reading.problems, (text,))
    own = Node({key: value for key, value in root.mapping().items() if key != "extends"}, root.place)
    base_path = _base_path(root, path=path, schema=schema, source=source)
    chain = (*chain, path.resolve()) if path is not None else chain
    if base_path.resolve() in chain:
        circle = " -> ".join(link.name for link in (*chain, base_path.resolve()))
        raise _extends_error(root, f"files extend each other in a circle: {circle}", source=source)
    try:
        base_text = read_text(base_path)
    except UsageError as error:
        raise _extends_error(root, str(error), source=source) from error
    base = _compose(base_text, path=base_path, source=str(base_path), schema=schema, chain=chain)
    validate(base.root, schema=schema, source=str(base_path), found=base.problems)
    problems = [*reading.problems, *_derived_problems(base.root, own, source=source)]
    extended = str(root.mapping()["extends"].value)
    problems += _misnamed(base.root, own, extended=extended, schema=schema, source=source)
    return _Composed(merge(base.root, own), tuple(problems), (text, *base.texts))


def _derived_problems(base: Node, own: Node, *, source: str) -> list[Problem]:
    """What a derived file must say itself: its name, and where the numbers it changes come from."""
    wrong = [*stale_sources(base, own), *idle_sources(base, own)]
    found = [locate(words, root=own, location=location, source=source) for location, words in wrong]
    if "name" not in own.mapping():
        found.append(Problem("", "missing key 'name': a file that extends another needs its own", own.place.line))
    return found


def _misnamed(base: Node, own: Node, *, extended: str, schema: type[Document], source: str) -> Iterator[Problem]:
    """Items of lists that are new and lack keys: most likely meant as changes of inherited ones."""
    for location, item, known in new_items(base, own):
        wanted = type_at(schema, location)
        if isinstance(wanted, type) and any(key not in item.mapping() for key in required_keys(wanted)):
            noun = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", wanted.__name__).lower()
            hint = suggest(str(item.name()), known) or f", only {', '.join(known)}"
            message = f"{extended} has no {noun} {item.name()!r}{hint}"
            yield locate(message, root=own, location=location, source=source)


def _base_path(root: Node, *, path: Path | None, schema: type[Document], source: str) -> Path:
    """The file that `extends` means: beside the derived file first, then as the catalog has it."""
    wanted = root.mapping()["extends"].value
    if not isinstance(wanted, str) or not wanted:
        raise _extends_error(root, "must be one name or path", source=source)
    folder = path.parent if path is not None else Path()
    for candidate in [folder / wanted, *(folder / (wanted + suffix) for suffix in SUFFIXES)]:
        itself = path is not None and not is_path(wanted) and candidate.resolve() == path.resolve()
        if candidate.is_file() and not itself:
            return candidate
    if is_path(wanted):
        return folder / Path(wanted).expanduser()
    try:
        return find(_EXTENSIBLE[kind_of(schema)], wanted, besides=path)
    except UnknownNameError as error:
        raise _extends_error(root, str(error), source=source) from error


def _extends_error(root: Node, message: str, *, source: str) -> AxonnTuneError:
    return DocumentError(source, [locate(message, root=root, location=("extends",), source=source)])


def _check_header(reading: Reading, *, schema: type[Document], source: str) -> None:
    """Refuse a text that is no mapping, or says it is another kind or version of document."""
    if not isinstance(reading.root.value, dict):
        raise DocumentError(source, [Problem("", "must hold a mapping (key: value lines) at the top level", 1)])
    expected = _expected(schema)
    given = reading.root.mapping().get("schema")
    if given is not None and given.value != expected:
        problem = Problem("schema", _header_message(given, expected), given.place.line)
        raise DocumentError(source, [*reading.problems, problem])


def _header_message(given: Node, expected: str) -> str:
    kind, version = expected.split("/")[1:]
    match = re.fullmatch(r"axonn-tune/([\w-]+)/(\d+)", str(given.value))
    if match is None:
        return f"{given.value!r} is no schema; write {expected}"
    if match[1] != kind:
        return f"this is a {match[1]} document ({given.value}), where a {kind} document ({expected}) is needed"
    age = "newer" if int(match[2]) > int(version) else "older"
    return f"{given.value} is {age} than the {expected} that this version of axonn-tune reads"


def _expected(schema: type[Document]) -> str:
    return str(get_args(schema.model_fields["schema_"].annotation)[0])


def _nearest_file(path: Path) -> str:
    """A hint at a file of nearly this name, or at the missing folder."""
    if not path.parent.is_dir():
        return f": there is no folder {str(path.parent)!r}"
    names = {entry.name: entry for entry in path.parent.iterdir() if entry.is_file()}
    hint = suggest(path.name, names)
    return hint or suggest(path.name + SUFFIXES[0], names)
