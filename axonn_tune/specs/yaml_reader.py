"""Reads YAML as nodes that remember where they were written, by the YAML 1.2 core schema.

Against PyYAML's own loader: `25e9` is a number, `on` and `yes` are strings, `010` is 10, `1:30` and
dates are strings, a key written twice is a problem, and aliases, merge keys and tags are refused.
Sequences become tuples, because documents are frozen.

The nodes are built from parser events, not by PyYAML's composer: that one has no limit on nesting,
and its C version crashes the interpreter on a file of 100,000 brackets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import yaml

from axonn_tune.errors import DocumentError, Problem

Scalar: TypeAlias = str | int | float | bool | None
Plain: TypeAlias = "Scalar | dict[str, Plain] | tuple[Plain, ...]"
Location: TypeAlias = tuple[str | int, ...]

if TYPE_CHECKING:
    _Parser = yaml.SafeLoader
else:
    # libyaml gives the same events about ten times faster, line marks included.
    _Parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_MAX_DEPTH = 40
_ALIAS_MESSAGE = "anchors and aliases (&name, *name) are not supported; write the value out, or use 'extends'"
_MERGE_MESSAGE = "merge keys (<<) are not supported; use 'extends' to build on another file"

# Unquoted scalars of the core schema: YAML 1.2.2, section 10.3.2.
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


@dataclass(frozen=True)
class Place:
    """Where a value was written: file (or another origin), and the line counted from 1, if it has lines."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        """`file:line`, or the origin alone."""
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Node:
    """A value and where it stands: of a mapping's item the line of its key, of a sequence's item its first line."""

    value: Scalar | dict[str, Node] | tuple[Node, ...]
    place: Place

    def plain(self) -> Plain:
        """The same value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, tuple):
            return tuple(child.plain() for child in self.value)
        return self.value

    def mapping(self) -> dict[str, Node]:
        """Its items if this is a mapping, else nothing."""
        return self.value if isinstance(self.value, dict) else {}

    def child(self, key: str | int) -> Node | None:
        """The item under a key or index, or None."""
        if isinstance(self.value, dict) and isinstance(key, str):
            return self.value.get(key)
        if isinstance(self.value, tuple) and isinstance(key, int) and 0 <= key < len(self.value):
            return self.value[key]
        return None

    def nearest(self, location: Location) -> Node:
        """The node at a location, or its deepest existing ancestor."""
        node = self
        for key in location:
            child = node.child(key)
            if child is None:
                return node
            node = child
        return node

    def name(self) -> str | None:
        """The `name` of a mapping that has one: how items of lists are addressed."""
        name = self.mapping().get("name")
        return name.value if name is not None and isinstance(name.value, str) else None

    def path(self, location: Location) -> str:
        """Dotted path of a location as users write it: list items by their name where it is unique, else by index."""
        parts: list[str] = []
        node: Node | None = self
        for key in location:
            child = node.child(key) if node is not None else None
            name = child.name() if child is not None and isinstance(key, int) else None
            siblings = node.value if node is not None and isinstance(node.value, tuple) else ()
            unique = name and sum(sibling.name() == name for sibling in siblings) == 1
            parts.append(name if name and unique else str(key))
            node = child
        return ".".join(parts)


@dataclass(frozen=True)
class Reading:
    """What a text holds, and what is wrong with how it is written (location, message, line)."""

    root: Node
    problems: tuple[Problem, ...]


def read_yaml(text: str, *, source: str) -> Reading:
    """Read one YAML document; DocumentError if it cannot be parsed at all or is empty.

    Keys are always strings, whatever they look like. Problems that leave the rest readable (a key
    written twice, an alias, a tag) are returned, so that a caller can report them with its own.
    """
    builder = _Builder(source, events=yaml.parse(text, _Parser))
    try:
        root = builder.document()
    except yaml.YAMLError as error:
        raise DocumentError(source, [_syntax_problem(error, lines=len(text.splitlines()))]) from error
    if root is None:
        raise DocumentError(source, [Problem("", "the file is empty")])
    found = tuple(Problem(root.path(location), message, line) for location, message, line in builder.found)
    return Reading(root, found)


def read_scalar(text: str) -> Scalar:
    """What an unquoted scalar means; ValueError for a number beyond what Python reads."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL.fullmatch(text):
        return float(text.lower().replace(".", ""))
    return text


def _syntax_problem(error: yaml.YAMLError, *, lines: int) -> Problem:
    """What the parser says, on one line, with the place it says it about."""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        context = error.context
        if context and error.context_mark:
            context += f" that starts in line {error.context_mark.line + 1}:"
        words = " ".join(part for part in (context, error.problem) if part)
        # At the end of a text the parser points one line behind the last.
        line = None if mark is None else min(mark.line + 1, lines)
        return Problem("", f"not valid YAML: {words}", line)
    return Problem("", f"not valid YAML: {' '.join(str(error).split())}")


class _Builder:
    """Turns parser events into `Node`s and collects what is wrong."""

    def __init__(self, source: str, *, events: Iterator[yaml.Event]) -> None:
        self.source = source
        self.found: list[tuple[Location, str, int]] = []
        self._events = events

    def document(self) -> Node | None:
        """The only document of the stream, or None if it is empty."""
        root: Node | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise self._unreadable(event, "more than one document (---)")
                first = next(self._events)
                empty = isinstance(first, yaml.ScalarEvent) and not first.value and not first.style
                root = None if empty else self._node(first, location=())
        return root

    def _node(self, event: yaml.Event, *, location: Location, place: Place | None = None) -> Node:
        place = place or self._place(event)
        if not isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            self._report(event, location, _ALIAS_MESSAGE)
            return Node(None, place)
        if len(location) > _MAX_DEPTH:
            raise self._unreadable(event, f"nested more than {_MAX_DEPTH} deep")
        if event.tag is not None:
            self._report(event, location, f"tags ({event.tag}) are not supported")
        if isinstance(event, yaml.MappingStartEvent):
            return Node(self._mapping(location), place)
        if isinstance(event, yaml.ScalarEvent):
            return Node(self._scalar(event, location), place)
        return Node(tuple(self._items(location)), place)

    def _items(self, location: Location) -> Iterator[Node]:
        index = 0
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            yield self._node(event, location=(*location, index))
            index += 1

    def _mapping(self, location: Location) -> dict[str, Node]:
        items: dict[str, Node] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            place = self._place(event)
            key = self._key(event, location)
            value = self._node(next(self._events), location=location if key is None else (*location, key), place=place)
            if key is None:
                continue
            if key in items:
                self._report(event, (*location, key), f"key written twice, first in line {items[key].place.line}")
                continue
            items[key] = value
        return items

    def _key(self, event: yaml.Event, location: Location) -> str | None:
        """The key that an event holds; None, and a problem, if it cannot be one."""
        if not isinstance(event, yaml.ScalarEvent):
            self._node(event, location=location)
            self._report(event, location, "a key must be a word, not a list, a mapping or an alias")
            return None
        if event.value == "<<" and not event.style:
            self._report(event, location, _MERGE_MESSAGE)
            return None
        return event.value

    def _scalar(self, event: yaml.ScalarEvent, location: Location) -> Scalar:
        if event.style:
            return event.value
        try:
            return read_scalar(event.value)
        except ValueError:
            self._report(event, location, f"{event.value[:20]}... has too many digits")
            return None

    def _place(self, event: yaml.Event) -> Place:
        return Place(self.source, _line(event))

    def _report(self, event: yaml.Event, location: Location, message: str) -> None:
        self.found.append((location, message, _line(event)))

    def _unreadable(self, event: yaml.Event, message: str) -> DocumentError:
        return DocumentError(self.source, [Problem("", message, _line(event))])


def _line(event: yaml.Event) -> int:
    """Line of an event, from 1."""
    assert event.start_mark is not None
    return event.start_mark.line + 1
