"""Loads documents: finds files by name, lays derived ones over what they extend, applies overrides, validates.

A name is looked for in each folder of `$AXONN_TUNE_PATH`, then in the user's configuration folder
(`$XDG_CONFIG_HOME/axonn-tune`, by default `~/.config/axonn-tune`), then among the shipped files.
Each of these holds `configs/` for models and `machines/` for machines. The first hit wins.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin

from axonn_tune.errors import DocumentError, Problem, UnknownNameError, UsageError, nearest, suggest
from axonn_tune.files import read_regular
from axonn_tune.specs.document import (
    Document,
    Location,
    Node,
    known_keys,
    locate,
    read_yaml,
    required_keys,
    suggest_key,
    to_yaml,
    type_at,
    validate,
)
from axonn_tune.specs.numbers import Consequence, contradiction, settled
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


@cache
def _shipped(kind: Kind) -> Path:
    """Folder of the shipped files: the installed package, or its source folder in a checkout."""
    # Found without an import of importlib.resources, which takes as long as reading a document.
    found = importlib.util.find_spec(_PACKAGES[kind])
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) if places else Path(__file__).resolve().parents[2] / _FOLDERS[kind]


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
    the latter two it is the hash of the file. consequences: what of the values that were replaced was not stated.
    """

    document: D
    path: Path
    sha256: str
    consequences: tuple[Consequence, ...] = ()


def load_document(path: str | Path, *, schema: type[D]) -> D:
    """Load one file; UsageError if it cannot be read, DocumentError with every problem found in it."""
    return load_file(path, schema=schema).document


def load_file(path: str | Path, *, schema: type[D], overrides: Sequence[str] = ()) -> Loaded[D]:
    """The same, with its origin. `overrides` are `dotted.path=value` assignments, as after `--set`."""
    path, kind = Path(path), _EXTENSIBLE.get(kind_of(schema))
    # What ships stays as it is, and a run's model is compared with all of it.
    read: Any = _read_once if kind is not None and path.parent == _shipped(kind) else _read
    found: Loaded[D] = read(path, schema, tuple(overrides))
    return found


def _read(path: Path, schema: type[D], overrides: Sequence[str]) -> Loaded[D]:
    text = read_text(path, limit_bytes=DOCUMENT_BYTES)
    return _load(text, path=path, source=str(path), schema=schema, overrides=overrides)


_read_once = lru_cache(maxsize=256)(_read)


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
    found = _load(to_yaml(held), path=None, source=source, schema=schema, overrides=overrides)
    before = document.consequences if isinstance(document, Loaded) else ()
    return replace(found, consequences=(*before, *found.consequences))


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
    root, held, texts = _compose(text, path=path, source=source, schema=schema, chain=())
    # Only now, so that the file's problems are not attributed to overrides.
    if overrides:
        stated = apply_overrides(root, overrides, schema=schema)
        document, found = settled(held.document, validate(root, schema=schema, source=source), stated)
        held = replace(held, document=document, consequences=(*held.consequences, *found))
    if why := contradiction(held.document):
        place = ("launcher", "ranks_per_node")
        raise DocumentError(source, [locate(why, root=root, location=place, source=source)])
    digest = hashlib.sha256("\n".join([*texts, *overrides]).encode())
    return replace(held, sha256=digest.hexdigest())


def _compose(
    text: str, *, path: Path | None, source: str, schema: type[D], chain: tuple[Path, ...]
) -> tuple[Node, Loaded[D], list[str]]:
    """A document's nodes laid over those of what it extends, the document, and all input texts."""
    reading = read_yaml(text, source=source)
    own, problems = reading.root, [*reading.problems]
    if not isinstance(own.value, dict):
        raise DocumentError(source, [Problem("", "must hold a mapping (key: value lines) at the top level", 1)])
    given, expected = own.value.get("schema"), _expected(schema)
    if given is not None and given.value != expected:
        message = _header_message(given, expected, schema.renewed_by)
        raise DocumentError(source, [*problems, Problem("schema", message, given.line)])
    at = path or Path(source)
    if kind_of(schema) not in _EXTENSIBLE or "extends" not in own.value:
        return own, Loaded(validate(own, schema=schema, source=source, found=problems), at, ""), [text]

    def refused(message: str) -> DocumentError:
        return DocumentError(source, [locate(message, root=own, location=("extends",), source=source)])

    wanted = own.value["extends"].value
    if not isinstance(wanted, str) or not wanted:
        raise refused("must be one name or path")
    chain = (*chain, path.resolve()) if path is not None else chain
    try:
        base_path = _base_path(wanted, path=path, kind=_EXTENSIBLE[kind_of(schema)])
        if base_path.resolve() in chain:
            circle = " -> ".join(link.name for link in (*chain, base_path.resolve()))
            raise UsageError(f"files extend each other in a circle: {circle}")
        base_text = read_text(base_path, limit_bytes=DOCUMENT_BYTES)
        # The message does not quote the file, which may be no document at all.
        if not re.search(r"^schema:\s*[\"']?axonn-tune/", base_text, re.MULTILINE):
            raise UsageError(f"{str(base_path)!r} is no {kind_of(schema)} document: it lacks `schema: {expected}`")
    except (UsageError, UnknownNameError) as error:
        raise refused(str(error)) from error
    base, before, texts = _compose(base_text, path=base_path, source=str(base_path), schema=schema, chain=chain)
    wrong = _inheritance_problems(base, own, extended=wanted, schema=schema)
    problems += [locate(words, root=own, location=location, source=source) for location, words in wrong]
    if "name" not in own.value:
        problems.append(Problem("", "missing key 'name': a file that extends another needs its own", own.line))
    # What the base is described as holds for the base alone.
    extends = own.value.pop("extends")
    own.value = {"description": Node(f"extends {wanted}", extends.source, extends.line), **own.value}
    root, stated = merge(base, own), {".".join(found) for found in _paths(own, ())}
    merged = validate(root, schema=schema, source=source, found=problems)
    document, found = settled(before.document, merged, stated)
    # A shipped profile has what it has on purpose.
    found = () if path is not None and is_shipped("machine", path) else (*before.consequences, *found)
    root = root if document == merged else read_yaml(to_yaml(document), source=source).root
    return root, Loaded(document, at, "", found), [text, *texts]


def _base_path(wanted: str, *, path: Path | None, kind: Kind) -> Path:
    """The file of `extends`: in the folder of the derived file, else from the catalog; UnknownNameError else."""
    folder = path.parent if path is not None else Path()
    for candidate in [folder / wanted, *(folder / (wanted + suffix) for suffix in SUFFIXES)]:
        itself = path is not None and not is_path(wanted) and candidate.resolve() == path.resolve()
        if _is_file(candidate) and not itself:
            return candidate
    return folder / _expanded(wanted) if is_path(wanted) else find(kind, wanted, besides=path)


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
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()]
    near = nearest(path.name, names) or nearest(path.name + SUFFIXES[0], names)
    return "" if near is None else f", did you mean {str(path.parent / near)!r}?"


def merge(base: Node, own: Node) -> Node:
    """Lay `own` over `base`.

    Mappings merge key by key. Lists whose items all have a name merge by name, new names after the
    old ones; other lists, and everything else, are replaced. A key set to null takes the
    `sources` entry of the number it removes with it.
    """
    if isinstance(base.value, dict) and isinstance(own.value, dict):
        merged, given = dict(base.value), own.value
        for key, value in given.items():
            merged[key] = merge(merged[key], value) if key in merged else value
        if "sources" in merged:
            restated = given["sources"].mapping() if "sources" in given else {}
            removed = {key for key, value in given.items() if value.value is None}
            # Entries are replaced as a whole, since an old kind need not fit a new source.
            entries = {key: restated.get(key, entry) for key, entry in merged["sources"].mapping().items()}
            kept = {key: entry for key, entry in entries.items() if key not in removed}
            merged["sources"] = Node(kept, merged["sources"].source, merged["sources"].line)
        return Node(merged, own.source, own.line)
    before, after = base.named(), own.named()
    if before and after:
        changed = {name: merge(before[name], item) if name in before else item for name, item in after.items()}
        return Node([*(before | changed).values()], own.source, own.line)
    return own


def _inheritance_problems(
    base: Node, own: Node, *, extended: str, schema: type[Document], location: Location = ()
) -> Iterator[tuple[Location, str]]:
    """What is wrong with `own` as an overlay of `base`: locations in `own`, and messages.

    Numbers that it changes under the base's provenance (a machine's sections keep provenance per number in `sources`,
    a model one `source` for its sizes), provenance of numbers that it leaves, and new items of lists that lack keys,
    which were probably meant as changes of inherited ones.
    """
    inherited, given = base.mapping(), own.mapping()
    sourced, restated = (keys["sources"].mapping() if "sources" in keys else {} for keys in (inherited, given))
    for idle in restated:
        if idle in inherited and idle not in given:
            yield (*location, "sources", idle), f"has a source but no value here: write {idle!r} in this section too"
    names = base.named()
    for key, after in own.items():
        before = names.get(after.name() or "") if isinstance(key, int) else inherited.get(key)
        if before is None:
            wanted = type_at(schema, (*location, key)) if isinstance(key, int) and names and own.named() else None
            if isinstance(wanted, type) and any(lacking not in after.mapping() for lacking in required_keys(wanted)):
                noun = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", wanted.__name__).lower()
                hint = suggest(str(after.name()), names) or f", only {', '.join(names)}"
                yield (*location, key), f"{extended} has no {noun} {after.name()!r}{hint}"
            continue
        changes = after.value is not None and merge(before, after).plain() != before.plain()
        if isinstance(key, str) and key != "sources" and changes:
            if key in sourced and key not in restated:
                yield (*location, key), f"changes a number without its provenance: add sources.{key} beside it"
            elif _is_number(before) and "source" in inherited and "source" not in given:
                yield (*location, key), "changes a number without its provenance: add 'source' to this file"
        below = (*location, key)
        yield from _inheritance_problems(before, after, extended=extended, schema=schema, location=below)


def _is_number(node: Node) -> bool:
    return isinstance(node.value, (int, float))


def apply_overrides(root: Node, assignments: Iterable[str], *, schema: type[Document]) -> set[str]:
    """Apply `path=value` assignments in order to a valid document, and return the paths, items of lists by name;
    UsageError for a path that it does not have.

    Values are read as YAML scalars or lists. Items of lists are addressed by their name or index:
    `tiers.slingshot.bandwidth_gb_per_s=20`. The provenance of a changed number becomes an
    assumption made on the command line.
    """
    stated = set[str]()
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise UsageError(f"--set needs KEY=VALUE, not {assignment!r}")
        location = _resolve(root, path.strip(), schema=schema)
        value, section, key = _value(text, assignment=assignment), root.nearest(location[:-1]), location[-1]
        if isinstance(section.value, list) and isinstance(key, int):
            section.value[key] = value
        else:
            section.value = section.mapping() | {str(key): value}
        _restate_source(root, location, value)
        stated.add(root.path(location))
    return stated


def _resolve(root: Node, path: str, *, schema: type[Document]) -> Location:
    """Location of a dotted path; its last key may be in the schema but not in the file."""
    location: Location = ()
    node, rest = root, path
    while rest:
        key, rest = _next_key(node, rest)
        child = node.child(key)
        section = type_at(schema, location)
        if child is None and rest and isinstance(_default(section, key), Document):
            # A section that is there by its default, with no number of its own yet.
            child = Node({"sources": Node({}, ORIGIN)}, ORIGIN)
            node.value = node.mapping() | {str(key): child}
        if child is None and (rest or not (get_origin(section) is dict or key in known_keys(section))):
            raise UsageError(f"--set {path}: {_unknown(root, location, key, known_keys(section))}")
        location = (*location, key)
        node = child if child is not None else Node(None, ORIGIN)
    return location


def _default(section: object, key: str | int) -> object:
    """What a document has under a key that its file leaves out."""
    of = section.model_fields if isinstance(section, type) and issubclass(section, Document) else {}
    return of[str(key)].default if str(key) in of else None


def _unknown(root: Node, location: Location, key: str | int, known: list[str]) -> str:
    """Error text for a key that cannot be set, with the nearest valid key."""
    node = root.nearest(location)
    if key in known:
        return f"this document has no {root.path((*location, key))!r} to change a part of"
    where = f" in {root.path(location)!r}" if location else ""
    named = [name for number, item in node.items() if isinstance(number, int) and (name := item.name()) is not None]
    there = list(dict.fromkeys([*node.mapping(), *known, *named]))
    keys = [name for name in there if name not in ("schema", "sources")]
    listed = f"; there {'is' if len(keys) == 1 else 'are'} {', '.join(keys)}" if keys else ""
    paths = [found for child in keys for found in _paths(node.child(child), (child,))]
    # A part of the document, such as a network level by its name, or values whose names have the key in them.
    parts = [found[: found.index(str(key)) + 1] for found in paths if str(key) in found[1:-1]]
    deeper = list(dict.fromkeys(parts)) or [found for found in paths if str(key) in found[-1]]
    below = [".".join(path) for path in deeper[:4] if len(path) > 1]
    hint = suggest_key(str(key), there) or (f", did you mean {' or '.join(below)}?" if below else "")
    return f"no {str(key)!r}{where}{hint}{listed}"


def _paths(node: Node | None, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Paths of the values below a node, by keys and names of items, without their provenance."""
    children = {} if node is None else {**node.mapping(), **node.named()}
    if not children:
        yield path
    for key, child in children.items():
        if key not in ("sources", "name"):
            yield from _paths(child, (*path, key))


def _next_key(node: Node, rest: str) -> tuple[str | int, str]:
    """First key of a dotted path and what follows it; a list item's name may itself contain dots."""
    key, _, after = rest.partition(".")
    if not isinstance(node.value, list):
        return key, after
    for index, item in enumerate(node.value):
        name = item.name()
        if name is not None and (rest == name or rest.startswith(name + ".")):
            return index, rest[len(name) + 1 :]
    return (int(key) if key.isdigit() else key), after


def _value(text: str, *, assignment: str) -> Node:
    """What is assigned; its place is the command line, which has no lines."""
    if not text.strip():
        return Node(None, ORIGIN)
    try:
        reading = read_yaml(text, source=ORIGIN)
    except DocumentError as error:
        raise UsageError(f"--set {assignment}: no YAML scalar or list: {error.problems[0].message}") from error
    if reading.problems or isinstance(reading.root.value, dict):
        raise UsageError(f"--set {assignment}: the value must be a YAML scalar or list; quote text that contains ': '")
    nodes = [reading.root]
    for node in nodes:
        node.line = None
        nodes += [child for _, child in node.items()]
    return reading.root


def _restate_source(root: Node, location: Location, value: Node) -> None:
    """Set the provenance of the number at a location to an assumption on the command line."""
    for depth in range(len(location) - 1, -1, -1):
        section, key = root.nearest(location[:depth]).mapping(), str(location[depth])
        if "sources" in section and key != "sources":
            sources = section["sources"].mapping()
            if value.value is None and depth == len(location) - 1:
                sources.pop(key, None)
            elif key in sources or _is_number(value):
                sources[key] = Node({"kind": Node("assumed", ORIGIN), "source": Node(ORIGIN, ORIGIN)}, ORIGIN)
            return
    given = root.mapping().get("source")
    if given is not None and len(location) == 1 and _is_number(value):
        root.mapping()["source"] = Node(f"{given.value}; {location[0]}: {ORIGIN}", ORIGIN)
