"""`--set key=value`: changes single values of a document from the command line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_origin

from axonn_tune.errors import DocumentError, UsageError, suggest
from axonn_tune.specs.base import Document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.validation import known_keys, suggest_key, type_at
from axonn_tune.specs.yaml_reader import Location, Node, Place, read_yaml

ORIGIN = "--set on the command line"


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


def route_overrides(assignments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split `--set` assignments into those for the model and those for the machine, by their first key.

    `model.` or `machine.` in front decides where both have the key. UsageError if neither has it.
    """
    model, machine = known_keys(Model), known_keys(Machine)
    routed: tuple[list[str], list[str]] = ([], [])
    for assignment in assignments:
        prefix, _, rest = assignment.partition(".")
        first = assignment.partition("=")[0].partition(".")[0].strip()
        if prefix in ("model", "machine") and rest:
            routed[prefix == "machine"].append(rest)
        elif first in model and first in machine:
            raise UsageError(f"--set {assignment}: {first!r} is in both: write model.{first} or machine.{first}")
        elif first in model or first in machine:
            routed[first in machine].append(assignment)
        else:
            raise UsageError(f"--set {assignment}: unknown key {first!r}{suggest(first, [*model, *machine])}")
    return routed


def _resolve(root: Node, path: str, *, schema: type[Document]) -> Location:
    """Location of a dotted path; its last key may be one that the schema knows but the file leaves out."""
    location: Location = ()
    node, rest = root, path
    while rest:
        key, rest = _next_key(node, rest)
        child = node.child(key)
        section = type_at(schema, location)
        if child is None and (rest or not _may_be_added(key, section=section)):
            raise UsageError(f"--set {path}: {_unknown(root, location, key, known_keys(section))}")
        location = (*location, key)
        node = child if child is not None else Node(None, Place(ORIGIN))
    return location


def _unknown(root: Node, location: Location, key: str | int, known: list[str]) -> str:
    """Why a key cannot be set, with the nearest one that can."""
    node = root.nearest(location)
    if key in known:
        return f"this document has no {root.path((*location, key))!r} to change a part of"
    where = f" in {root.path(location)!r}" if location else ""
    return f"no {str(key)!r}{where}{suggest_key(str(key), [*node.mapping(), *known, *_item_names(node)])}"


def _next_key(node: Node, rest: str) -> tuple[str | int, str]:
    """First key of a dotted path and what follows it; a list item's name may itself contain dots."""
    if isinstance(node.value, tuple):
        for index, item in enumerate(node.value):
            name = item.name()
            if name is not None and (rest == name or rest.startswith(name + ".")):
                return index, rest[len(name) + 1 :]
    key, _, after = rest.partition(".")
    return (int(key) if isinstance(node.value, tuple) and key.isdigit() else key), after


def _item_names(node: Node) -> list[str]:
    items: Sequence[Node] = node.value if isinstance(node.value, tuple) else ()
    return [name for item in items if (name := item.name()) is not None]


def _may_be_added(key: str | int, *, section: object) -> bool:
    return get_origin(section) is dict or key in known_keys(section)


def _value(text: str, *, assignment: str) -> Node:
    if not text.strip():
        return Node(None, Place(ORIGIN))
    try:
        reading = read_yaml(text, source=ORIGIN)
    except DocumentError as error:
        raise UsageError(f"--set {assignment}: no YAML scalar or list: {error.problems[0].message}") from error
    if reading.problems or isinstance(reading.root.value, dict):
        raise UsageError(f"--set {assignment}: the value must be a YAML scalar or list; quote text that contains ': '")
    return _placed(reading.root)


def _placed(node: Node) -> Node:
    """The same value, all of it placed on the command line, which has no lines."""
    place = Place(ORIGIN)
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
        mapping[str(key)] = _replace(mapping.get(str(key), Node(None, Place(ORIGIN))), rest, value)
    else:
        mapping.pop(str(key), None)
    return Node(mapping, node.place)


def _restate_source(root: Node, location: Location, value: Node) -> Node:
    """Make the provenance of the number at a location say that it was assumed on the command line."""
    origin = Place(ORIGIN)
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


def _is_number(node: Node) -> bool:
    return isinstance(node.value, (int, float))
