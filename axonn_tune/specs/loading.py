"""Loads documents: finds files by name, lays derived ones over what they extend, applies overrides, validates.

A name is looked for in each folder of `$AXONN_TUNE_PATH`, then in the user's configuration folder
(`$XDG_CONFIG_HOME/axonn-tune`, by default `~/.config/axonn-tune`), then among the shipped files.
Each of these holds `configs/` for models and `machines/` for machines. The first hit wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from axonn_tune.errors import AxonnTuneError, DocumentError, Problem, UnknownNameError, UsageError, suggest
from axonn_tune.files import read_regular
from axonn_tune.specs.document import (
    Document,
    Location,
    Node,
    Position,
    Reading,
    known_keys,
    locate,
    read_yaml,
    required_keys,
    suggest_key,
    to_yaml,
    type_at,
    validate,
)
from axonn_tune.units import json_int

Kind = Literal["model", "machine"]
SUFFIXES = (".yaml", ".yml")
_FOLDERS: dict[Kind, str] = {"model": "configs", "machine": "machines"}
_PACKAGES: dict[Kind, str] = {"model": "axonn_tune.shipped_configs", "machine": "axonn_tune.shipped_machines"}
"""Names of the repository's folders inside the installed package."""
ORIGIN = "--set on the command line"
"""Source of overrides in their provenance."""

DOCUMENT_BYTES, DATA_BYTES = 2 << 20, 256 << 20
"""Size limits of a YAML document and of a file of measurements, about ten times the largest the tool writes."""

D = TypeVar("D", bound=Document)

# Launch configs are self-contained by design, and there is no catalog of workloads.
_EXTENSIBLE: dict[str, Kind] = {"model": "model", "machine": "machine"}


def available(kind: Kind) -> dict[str, Path]:
    """Every name of this kind with the file it stands for, in natural order (5b before 10b)."""
    found: dict[str, Path] = {}
    for folder in _search_path(kind):
        for path in _documents(folder):
            found.setdefault(path.stem.lower(), path)
    return dict(sorted(found.items(), key=lambda item: _natural(item[0])))


def find(kind: Kind, name: str, *, besides: Path | None = None) -> Path:
    """The file of a name or path; UnknownNameError with the nearest name if there is none.

    A path is anything that is a file already, ends in .yaml or .yml, or contains a slash; whether it
    can be read is the loader's business. Names ignore case. `besides` is a file to look past, so that
    a user's `perlmutter.yaml` can extend the shipped `perlmutter`.
    """
    if is_path(name):
        return _expanded(name)
    passed = None if besides is None else besides.resolve()
    for folder in _search_path(kind):
        for path in _documents(folder):
            if path.stem.lower() == name.lower() and path.resolve() != passed:
                return path
    raise UnknownNameError(kind, name, available(kind))


def is_path(name: str) -> bool:
    """Whether this is a path, not a name."""
    return name.endswith(SUFFIXES) or "/" in name or os.sep in name or _is_file(Path(name))


def _expanded(path: str) -> Path:
    """The path with a leading ~ expanded; unchanged if there is no such home folder."""
    with contextlib.suppress(RuntimeError):
        return Path(path).expanduser()
    return Path(path)


def _is_file(path: Path) -> bool:
    """Whether the file exists; False for an invalid file name."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _search_path(kind: Kind) -> Iterator[Path]:
    for root in os.environ.get("AXONN_TUNE_PATH", "").split(os.pathsep):
        if root:
            yield _expanded(root) / _FOLDERS[kind]
    configuration = os.environ.get("XDG_CONFIG_HOME")
    if configuration or os.environ.get("HOME"):
        yield Path(configuration or _expanded("~/.config")) / "axonn-tune" / _FOLDERS[kind]
    yield _shipped(kind)


def is_shipped(kind: Kind, path: Path) -> bool:
    """Whether a file ships with the tool."""
    return _shipped(kind).resolve() in path.resolve().parents


def _shipped(kind: Kind) -> Path:
    """Folder of the shipped files: the installed package, or its source folder in a checkout."""
    try:
        return Path(str(resources.files(_PACKAGES[kind])))
    except ModuleNotFoundError:
        return Path(__file__).resolve().parents[2] / _FOLDERS[kind]


def _documents(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    return [path for path in entries if path.suffix in SUFFIXES and path.is_file()]


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key: numbers by value and before words."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return [(False, int(part), "") if part.isdecimal() else (True, 0, part) for part in parts]


@dataclass(frozen=True)
class Loaded(Generic[D]):
    """A document, its file, and the SHA-256 of its inputs.

    The hash covers the file's text, then those of the files it extends, then the overrides; without
    the latter two it is the hash of the file.
    """

    document: D
    path: Path
    sha256: str


@dataclass(frozen=True)
class _Composition:
    """A document's nodes after composition, its syntax problems, and all input texts."""

    root: Node
    problems: tuple[Problem, ...]
    texts: tuple[str, ...]


def load_document(path: str | Path, *, schema: type[D]) -> D:
    """Load one file; UsageError if it cannot be read, DocumentError with every problem found in it."""
    return load_file(path, schema=schema).document


def load_file(path: str | Path, *, schema: type[D], overrides: Sequence[str] = ()) -> Loaded[D]:
    """The same, with its origin. `overrides` are `dotted.path=value` assignments, as after `--set`."""
    path = Path(path)
    text = read_text(path, limit_bytes=DOCUMENT_BYTES)
    return _load(text, path=path, source=str(path), schema=schema, overrides=overrides)


def parse_document(text: str, *, schema: type[D], source: str = "<text>", overrides: Sequence[str] = ()) -> D:
    """Load a document from its text; `source` names it in errors, `extends` is relative to the working directory."""
    return _load(text, path=None, source=source, schema=schema, overrides=overrides).document


def hold(document: D | Loaded[D], *, schema: type[D], overrides: Sequence[str] = ()) -> Loaded[D]:
    """An existing document with `overrides` applied, as if it had been loaded.

    A document without a file has its name as path, and the hash of its text as written. UsageError
    and DocumentError for a wrong override, as when loading.
    """
    if isinstance(document, Loaded) and not overrides:
        return document
    held = document.document if isinstance(document, Loaded) else document
    source = str(document.path if isinstance(document, Loaded) else getattr(held, "name", kind_of(schema)))
    return _load(to_yaml(held), path=None, source=source, schema=schema, overrides=overrides)


def read_text(path: Path, *, limit_bytes: int = DATA_BYTES) -> str:
    """Text of a UTF-8 file; UsageError if it is unreadable or too large, DocumentError if it is not UTF-8."""
    try:
        return read_bytes(path, limit_bytes=limit_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise DocumentError(str(path), [Problem("", f"not UTF-8 text: {error.reason}", line)]) from error


def read_bytes(path: Path, *, limit_bytes: int = DATA_BYTES) -> bytes:
    """Content of a file; UsageError if it is unreadable or too large."""
    try:
        return read_regular(path, limit_bytes=limit_bytes)
    except FileNotFoundError as error:
        raise UsageError(f"no file {str(path)!r}{_nearest_file(path)}") from error
    except OSError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error.strerror}") from error


MOST_VALUES = 4 << 20
"""Of a JSON document that is parsed whole: each takes up to 100 bytes of memory, and two of text."""


def json_of(text: str) -> Any:  # noqa: ANN401
    """The value of a JSON text; ValueError, RecursionError for what is none, or has more than `MOST_VALUES` values."""
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")
    return json.loads(text, parse_int=json_int)


def kind_of(schema: type[Document]) -> str:
    """What a schema describes: model, machine, workload or launch."""
    return _expected(schema).split("/")[1]


def _load(text: str, *, path: Path | None, source: str, schema: type[D], overrides: Sequence[str]) -> Loaded[D]:
    composed = _compose(text, path=path, source=source, schema=schema, chain=())
    root = composed.root
    if overrides:
        # Validated without overrides first, so that the file's problems are not attributed to them.
        validate(root, schema=schema, source=source, found=composed.problems)
        root = apply_overrides(root, overrides, schema=schema)
    document = validate(root, schema=schema, source=source, found=composed.problems)
    digest = hashlib.sha256("\n".join([*composed.texts, *overrides]).encode())
    return Loaded(document, path or Path(source), digest.hexdigest())


def _compose(text: str, *, path: Path | None, source: str, schema: type[D], chain: tuple[Path, ...]) -> _Composition:
    reading = read_yaml(text, source=source)
    _check_header(reading, schema=schema, source=source)
    root = reading.root
    if kind_of(schema) not in _EXTENSIBLE or "extends" not in root.mapping():
        return _Composition(root, reading.problems, (text,))
    keys = {key: value for key, value in root.mapping().items() if key != "extends"}
    # What the base is described as holds for the base alone.
    described = {"description": Node(f"extends {root.mapping()['extends'].value}", root.mapping()["extends"].place)}
    own = Node(described | keys, root.place)
    base_path = _base_path(root, path=path, schema=schema, source=source)
    chain = (*chain, path.resolve()) if path is not None else chain
    if base_path.resolve() in chain:
        circle = " -> ".join(link.name for link in (*chain, base_path.resolve()))
        raise _extends_error(root, f"files extend each other in a circle: {circle}", source=source)
    try:
        base_text = read_text(base_path, limit_bytes=DOCUMENT_BYTES)
        # The message does not quote the file, which may be no document at all.
        if not re.search(r"^schema:\s*[\"']?axonn-tune/", base_text, re.MULTILINE):
            wanted = _expected(schema)
            raise UsageError(f"{str(base_path)!r} is no {kind_of(schema)} document: it lacks `schema: {wanted}`")
    except UsageError as error:
        raise _extends_error(root, str(error), source=source) from error
    base = _compose(base_text, path=base_path, source=str(base_path), schema=schema, chain=chain)
    validate(base.root, schema=schema, source=str(base_path), found=base.problems)
    wrong = [*stale_sources(base.root, own), *idle_sources(base.root, own)]
    found = (locate(words, root=own, location=location, source=source) for location, words in wrong)
    problems = [*reading.problems, *found]
    if "name" not in own.mapping():
        missing = "missing key 'name': a file that extends another needs its own"
        problems.append(Problem("", missing, own.place.line))
    extended = str(root.mapping()["extends"].value)
    problems += _misnamed(base.root, own, extended=extended, schema=schema, source=source)
    return _Composition(merge(base.root, own), tuple(problems), (text, *base.texts))


def _misnamed(base: Node, own: Node, *, extended: str, schema: type[Document], source: str) -> Iterator[Problem]:
    """New list items that lack keys: probably meant as changes of inherited items."""
    for location, item, known in new_items(base, own):
        wanted = type_at(schema, location)
        if isinstance(wanted, type) and any(key not in item.mapping() for key in required_keys(wanted)):
            noun = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", wanted.__name__).lower()
            hint = suggest(str(item.name()), known) or f", only {', '.join(known)}"
            message = f"{extended} has no {noun} {item.name()!r}{hint}"
            yield locate(message, root=own, location=location, source=source)


def _base_path(root: Node, *, path: Path | None, schema: type[Document], source: str) -> Path:
    """The file of `extends`: in the folder of the derived file, else from the catalog."""
    wanted = root.mapping()["extends"].value
    if not isinstance(wanted, str) or not wanted:
        raise _extends_error(root, "must be one name or path", source=source)
    folder = path.parent if path is not None else Path()
    for candidate in [folder / wanted, *(folder / (wanted + suffix) for suffix in SUFFIXES)]:
        itself = path is not None and not is_path(wanted) and candidate.resolve() == path.resolve()
        if _is_file(candidate) and not itself:
            return candidate
    if is_path(wanted):
        return folder / _expanded(wanted)
    try:
        return find(_EXTENSIBLE[kind_of(schema)], wanted, besides=path)
    except UnknownNameError as error:
        raise _extends_error(root, str(error), source=source) from error


def _extends_error(root: Node, message: str, *, source: str) -> AxonnTuneError:
    return DocumentError(source, [locate(message, root=root, location=("extends",), source=source)])


def _check_header(reading: Reading, *, schema: type[Document], source: str) -> None:
    """Refuse a text that is not a mapping, or has another kind or version of document."""
    if not isinstance(reading.root.value, dict):
        raise DocumentError(source, [Problem("", "must hold a mapping (key: value lines) at the top level", 1)])
    expected = _expected(schema)
    given = reading.root.mapping().get("schema")
    if given is not None and given.value != expected:
        message = _header_message(given, expected, schema.renewed_by)
        problem = Problem("schema", message, given.place.line)
        raise DocumentError(source, [*reading.problems, problem])


def _header_message(given: Node, expected: str, renewed_by: str) -> str:
    kind, version = expected.split("/")[1:]
    match = re.fullmatch(r"axonn-tune/([\w-]+)/([0-9]{1,9})", str(given.value))
    if match is None:
        return f"{given.value!r} is no schema; write {expected}"
    if match[1] != kind:
        return f"this is a {match[1]} document ({given.value}), where a {kind} document ({expected}) is needed"
    newer = int(match[2]) > int(version)
    writes = f"; `{renewed_by}` writes a new one" if renewed_by and not newer else ""
    return (
        f"{given.value} is {'newer' if newer else 'older'} than the {expected} that this version of axonn-tune "
        f"reads{writes}"
    )


def _expected(schema: type[Document]) -> str:
    return str(get_args(schema.model_fields["schema_"].annotation)[0])


def _nearest_file(path: Path) -> str:
    """A hint at a file of a similar name, or at the missing folder."""
    if not path.parent.is_dir():
        return f": there is no folder {str(path.parent)!r}"
    names = {entry.name: entry for entry in path.parent.iterdir() if entry.is_file()}
    hint = suggest(path.name, names)
    return hint or suggest(path.name + SUFFIXES[0], names)


def merge(base: Node, own: Node) -> Node:
    """Lay `own` over `base`.

    Mappings merge key by key. Lists whose items all have a name merge by name, new names after the
    old ones; other lists, and everything else, are replaced. A key set to null takes the
    `sources` entry of the number it removes with it.
    """
    if isinstance(base.value, dict) and isinstance(own.value, dict):
        return Node(_merge_mappings(base.value, own.value), own.place)
    names = _names(base), _names(own)
    if names[0] and names[1]:
        items = dict(names[0])
        for name, item in names[1].items():
            items[name] = merge(items[name], item) if name in items else item
        return Node(tuple(items.values()), own.place)
    return own


def _merge_mappings(base: dict[str, Node], own: dict[str, Node]) -> dict[str, Node]:
    merged = dict(base)
    for key, value in own.items():
        merged[key] = merge(base[key], value) if key in base else value
    if "sources" in merged:
        removed = {key for key, value in own.items() if value.value is None}
        merged["sources"] = _merge_sources(merged["sources"], own.get("sources"), removed=removed)
    return merged


def _merge_sources(merged: Node, own: Node | None, *, removed: set[str]) -> Node:
    """Provenance after merging: entries are replaced as a whole, since an old kind need not fit a new source."""
    restated = own.mapping() if own is not None else {}
    entries = {key: restated.get(key, value) for key, value in merged.mapping().items() if key not in removed}
    return Node(entries, merged.place)


def _names(node: Node) -> dict[str, Node]:
    """Items of a list by name; empty unless this is a list whose items all have different names."""
    if not isinstance(node.value, tuple):
        return {}
    named = {name: item for item in node.value if (name := item.name()) is not None}
    return named if len(named) == len(node.value) else {}


def stale_sources(base: Node, own: Node) -> Iterator[tuple[Location, str]]:
    """Numbers that `own` changes while it leaves the provenance that `base` gives for them in place.

    Yields the location in `own` and what to add. A machine's sections keep provenance per number in
    `sources`, a model keeps one `source` for its sizes.
    """
    for location, before, after in _counterparts(base, own):
        inherited, given = before.mapping(), after.mapping()
        sourced, restated = (keys["sources"].mapping() if "sources" in keys else {} for keys in (inherited, given))
        for key, value in given.items():
            if key not in inherited or key == "sources" or not _changes(inherited[key], value):
                continue
            if key in sourced and key not in restated:
                yield (
                    (*location, key),
                    f"changes a number without its provenance: add sources.{key} beside it",
                )
            elif _is_number(inherited[key]) and "source" in inherited and "source" not in given:
                yield (*location, key), "changes a number without its provenance: add 'source' to this file"


def idle_sources(base: Node, own: Node) -> Iterator[tuple[Location, str]]:
    """Provenance in `own` of inherited numbers: locations in `own`, and messages."""
    for location, before, after in _counterparts(base, own):
        restated = after.mapping().get("sources")
        for key in restated.mapping() if restated is not None else ():
            if key in before.mapping() and key not in after.mapping():
                yield (*location, "sources", key), f"has a source but no value here: write {key!r} in this section too"


def new_items(base: Node, own: Node) -> Iterator[tuple[Location, Node, list[str]]]:
    """Items whose names `base` does not have in the same list: location in `own`, the item, the names there are."""
    for location, before, after in _counterparts(base, own):
        known = _names(before)
        if known and _names(after) and isinstance(after.value, tuple):
            for index, item in enumerate(after.value):
                if item.name() not in known:
                    yield (*location, index), item, list(known)


def _counterparts(base: Node, own: Node, *, location: Location = ()) -> Iterator[tuple[Location, Node, Node]]:
    """Every node of `own` that overrides one of `base`: its location, the base node, itself."""
    yield location, base, own
    children: list[tuple[str | int, Node | None, Node]]
    if isinstance(own.value, tuple):
        inherited = _names(base)
        children = [(index, inherited.get(item.name() or ""), item) for index, item in enumerate(own.value)]
    else:
        children = [(key, base.child(key), value) for key, value in own.mapping().items()]
    for key, before, after in children:
        if before is not None:
            yield from _counterparts(before, after, location=(*location, key))


def _changes(base: Node, own: Node) -> bool:
    return own.value is not None and merge(base, own).plain() != base.plain()


def _is_number(node: Node) -> bool:
    return isinstance(node.value, (int, float))


def apply_overrides(root: Node, assignments: Iterable[str], *, schema: type[Document]) -> Node:
    """Apply `path=value` assignments in order; UsageError for a path the document does not have.

    Values are read as YAML scalars or lists. Items of lists are addressed by their name or index:
    `tiers.slingshot.bandwidth_gb_per_s=20`. The provenance of a changed number becomes an
    assumption made on the command line.
    """
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise UsageError(f"--set needs KEY=VALUE, not {assignment!r}")
        location = _resolve(root, path.strip(), schema=schema)
        value = _value(text, assignment=assignment)
        root = _replace(root, location, value)
        root = _restate_source(root, location, value)
    return root


def _resolve(root: Node, path: str, *, schema: type[Document]) -> Location:
    """Location of a dotted path; its last key may be in the schema but not in the file."""
    location: Location = ()
    node, rest = root, path
    while rest:
        key, rest = _next_key(node, rest)
        child = node.child(key)
        section = type_at(schema, location)
        if child is None and (rest or not (get_origin(section) is dict or key in known_keys(section))):
            raise UsageError(f"--set {path}: {_unknown(root, location, key, known_keys(section))}")
        location = (*location, key)
        node = child if child is not None else Node(None, Position(ORIGIN))
    return location


def _unknown(root: Node, location: Location, key: str | int, known: list[str]) -> str:
    """Error text for a key that cannot be set, with the nearest valid key."""
    node = root.nearest(location)
    if key in known:
        return f"this document has no {root.path((*location, key))!r} to change a part of"
    where = f" in {root.path(location)!r}" if location else ""
    items: Sequence[Node] = node.value if isinstance(node.value, tuple) else ()
    named = [name for item in items if (name := item.name()) is not None]
    there = list(dict.fromkeys([*node.mapping(), *known, *named]))
    keys = [name for name in there if name not in ("schema", "sources")]
    listed = f"; there {'is' if len(keys) == 1 else 'are'} {', '.join(keys)}" if keys else ""
    deeper = [found for child in keys for found in _paths(node.child(child), (child,)) if str(key) in found[-1]]
    below = [".".join(path) for path in deeper[:4] if len(path) > 1]
    hint = suggest_key(str(key), there) or (f", did you mean {' or '.join(below)}?" if below else "")
    return f"no {str(key)!r}{where}{hint}{listed}"


def _paths(node: Node | None, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths of the values below a node, by keys and names of items, without their provenance."""
    children = {} if node is None else {**node.mapping(), **_names(node)}
    if not children:
        yield path
    for key, child in children.items():
        if key not in ("sources", "name"):
            yield from _paths(child, (*path, key))


def _next_key(node: Node, rest: str) -> tuple[str | int, str]:
    """First key of a dotted path and what follows it; a list item's name may itself contain dots."""
    if isinstance(node.value, tuple):
        for index, item in enumerate(node.value):
            name = item.name()
            if name is not None and (rest == name or rest.startswith(name + ".")):
                return index, rest[len(name) + 1 :]
    key, _, after = rest.partition(".")
    return (int(key) if isinstance(node.value, tuple) and key.isdigit() else key), after


def _value(text: str, *, assignment: str) -> Node:
    if not text.strip():
        return Node(None, Position(ORIGIN))
    try:
        reading = read_yaml(text, source=ORIGIN)
    except DocumentError as error:
        raise UsageError(f"--set {assignment}: no YAML scalar or list: {error.problems[0].message}") from error
    if reading.problems or isinstance(reading.root.value, dict):
        raise UsageError(f"--set {assignment}: the value must be a YAML scalar or list; quote text that contains ': '")
    return _placed(reading.root)


def _placed(node: Node) -> Node:
    """The same value with the command line, which has no lines, as its position."""
    place = Position(ORIGIN)
    if isinstance(node.value, tuple):
        return Node(tuple(_placed(item) for item in node.value), place)
    if isinstance(node.value, dict):
        return Node({key: _placed(item) for key, item in node.value.items()}, place)
    return Node(node.value, place)


def _replace(node: Node, location: Location, value: Node | None) -> Node:
    """The same tree with another value at a location; None removes the key there."""
    if not location:
        return value if value is not None else node
    key, rest = location[0], location[1:]
    if isinstance(node.value, tuple) and isinstance(key, int):
        items = list(node.value)
        items[key] = _replace(items[key], rest, value)
        return Node(tuple(items), node.place)
    mapping = dict(node.mapping())
    if rest or value is not None:
        mapping[str(key)] = _replace(mapping.get(str(key), Node(None, Position(ORIGIN))), rest, value)
    else:
        mapping.pop(str(key), None)
    return Node(mapping, node.place)


def _restate_source(root: Node, location: Location, value: Node) -> Node:
    """Set the provenance of the number at a location to an assumption on the command line."""
    origin = Position(ORIGIN)
    for depth in range(len(location) - 1, -1, -1):
        section, key = root.nearest(location[:depth]).mapping(), str(location[depth])
        if "sources" in section and key != "sources":
            listed = key in section["sources"].mapping()
            if value.value is None and depth == len(location) - 1:
                return _replace(root, (*location[:depth], "sources", key), None)
            if listed or _is_number(value):
                entry = Node({"kind": Node("assumed", origin), "source": Node(ORIGIN, origin)}, origin)
                return _replace(root, (*location[:depth], "sources", key), entry)
            return root
    given = root.mapping().get("source")
    if given is not None and len(location) == 1 and _is_number(value):
        return _replace(root, ("source",), Node(f"{given.value}; {location[0]}: {ORIGIN}", origin))
    return root
