"""Documents: YAML read as nodes that know their line, checked against a schema, and written back with comments.

YAML is read by the YAML 1.2 core schema. Unlike PyYAML's own loader: `25e9` is a number, `on` and `yes` are
strings, `010` is 10, `1:30` and dates are strings, a key written twice is a problem, and aliases, merge keys
and tags are refused, but in files of other tools. Sequences become tuples, because documents are frozen.

The nodes are built from parser events, not by PyYAML's composer: the composer has no limit on nesting, and its C
version crashes the interpreter on a file of 100,000 brackets.
"""

from __future__ import annotations

import json
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Self, TypeAlias, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from axonn_tune.errors import CONTROL, DocumentError, Problem, suggest
from axonn_tune.vocabulary import LARGEST_SIZE as LARGEST_SIZE

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails


LARGEST_COUNT = 2**53
"""Largest whole number that a float holds exactly."""

PositiveInt = Annotated[int, Field(gt=0, le=LARGEST_COUNT)]
Size = Annotated[int, Field(gt=0, le=LARGEST_SIZE)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveValue = Annotated[float, Field(ge=1e-9, le=1e15, allow_inf_nan=False)]
NonNegativeValue = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
"""Numbers of a machine, in the units of its document: far beyond any machine, and products of them stay finite."""
Share = Annotated[float, Field(ge=1e-9, le=1, description="A share between 0 and 1.")]


class Document(BaseModel):
    """Base of every schema: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", frozen=True, strict=True, defer_build=True)
    renewed_by: ClassVar[str] = ""
    """Command that writes a new one where a file is of an older version."""
    left_out_at_default: ClassVar[tuple[str, ...]] = ()
    """Keys that are written only where they say something: most documents have nothing to say there."""

    @classmethod
    def prepare(cls) -> None:
        """Before one is read: so are those that it holds."""
        for held in cls.held():
            held.prepare()

    @classmethod
    def held(cls) -> set[type[Document]]:
        """Documents in its fields."""
        return {one for field in cls.model_fields.values() for one in _documents_in(field.annotation)}

    @classmethod
    def from_fields_of(cls, source: object, **others: object) -> Self:
        """A document from the attributes of `source` with its fields' names; `others` take precedence."""
        shared = {name: getattr(source, name) for name in cls.model_fields if hasattr(source, name)}
        return cls.model_validate(shared | others)


D = TypeVar("D", bound=Document)


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
_YAML_TAG, _OWN_TAGS = "tag:yaml.org,2002:", frozenset({"null", "bool", "int", "float", "str", "seq", "map"})
_MERGE, _MOST_NODES = "<<", 100_000
_MERGE_MESSAGE = "merge keys (<<) are not supported; use 'extends' to build on another file"

# Unquoted scalars of the core schema: YAML 1.2.2, section 10.3.2.
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


@dataclass
class Node:
    """A value and where it was written: its file or other origin, and its line from 1, if that has lines.

    The line of a mapping's item is that of its key, of a list's item its first.
    """

    value: Scalar | dict[str, Node] | list[Node]
    source: str
    line: int | None = None

    def plain(self) -> Plain:
        """The same value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        return tuple(child.plain() for child in self.value) if isinstance(self.value, list) else self.value

    def mapping(self) -> dict[str, Node]:
        """The items of a mapping; empty for other values."""
        return self.value if isinstance(self.value, dict) else {}

    def items(self) -> list[tuple[str | int, Node]]:
        """Keys and children of a mapping, indices and items of a list; empty for other values."""
        return list(enumerate(self.value)) if isinstance(self.value, list) else list(self.mapping().items())

    def named(self) -> dict[str, Node]:
        """Items of a list by name; empty unless this is a list whose items all have different names."""
        items = self.value if isinstance(self.value, list) else []
        named = {name: item for item in items if (name := item.name()) is not None}
        return named if len(named) == len(items) else {}

    def child(self, key: str | int) -> Node | None:
        """The item under a key or index, or None."""
        if isinstance(self.value, dict):
            return self.value.get(key) if isinstance(key, str) else None
        if isinstance(self.value, list) and isinstance(key, int) and 0 <= key < len(self.value):
            return self.value[key]
        return None

    def nearest(self, location: Location) -> Node:
        """The node at a location, or its deepest existing ancestor."""
        node = self
        for key in location:
            child = node.child(key)
            if child is None:
                break
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
            siblings = node.items() if node is not None else []
            node = node.child(key) if node is not None else None
            name = node.name() if node is not None and isinstance(key, int) else None
            unique = name and sum(sibling.name() == name for _, sibling in siblings) == 1
            parts.append(name if name and unique else str(key))
        return ".".join(parts)


@dataclass(frozen=True)
class Reading:
    """The nodes of a text, and its syntax problems (location, message, line)."""

    root: Node
    problems: tuple[Problem, ...]


def read_config(text: str, *, source: str) -> Node:
    """A YAML or JSON file of another tool, with aliases, merge keys and YAML's own tags as PyYAML's safe loader has
    them; DocumentError for anything that cannot be read, with all of it."""
    reading = read_yaml(text, source=source, aliases=True)
    if reading.problems:
        raise DocumentError(source, reading.problems)
    return reading.root


def read_yaml(text: str, *, source: str, aliases: bool = False) -> Reading:
    """Read one YAML document; DocumentError if it cannot be parsed at all or is empty.

    Keys are always strings. Problems that leave the rest readable (a duplicate key, an alias, a tag) are returned, so
    that a caller can report them with its own. aliases: resolve these, merge keys and YAML's own tags.
    """
    builder = _Builder(source, events=yaml.parse(text, _Parser), aliases=aliases)
    try:
        root = builder.document()
    except yaml.YAMLError as error:
        words, line = " ".join(str(error).split()), None
        if isinstance(error, yaml.MarkedYAMLError):
            starts = f" that starts in line {error.context_mark.line + 1}:" if error.context_mark else ""
            words = " ".join(filter(None, (error.context and error.context + starts, error.problem)))
            mark = error.problem_mark or error.context_mark
            # At the end of a text the parser points one line behind the last.
            line = None if mark is None else min(mark.line + 1, len(text.splitlines()))
        raise DocumentError(source, [Problem("", f"not valid YAML: {words}", line)]) from error
    if root is None:
        raise DocumentError(source, [Problem("", "the file is empty")])
    found = tuple(Problem(root.path(location), message, line) for location, message, line in builder.found)
    return Reading(root, found)


def read_scalar(text: str) -> Scalar:
    """Value of an unquoted scalar; ValueError for a number with too many digits for Python."""
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


class _Builder:
    """Turns parser events into `Node`s and collects problems."""

    def __init__(self, source: str, *, events: Iterator[yaml.Event], aliases: bool) -> None:
        self.source = source
        self.found: list[tuple[Location, str, int]] = []
        self._events = events
        self._aliases = aliases
        self._anchors: dict[str, tuple[Node, int]] = {}
        self._nodes = 0

    def document(self) -> Node | None:
        """The only document of the stream, or None if it is empty."""
        root: Node | None = None
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    raise DocumentError(self.source, [Problem("", "more than one document (---)", _line(event))])
                first = next(self._events)
                empty = isinstance(first, yaml.ScalarEvent) and not first.value and not first.style
                root = None if empty else self._node(first, location=())
        return root

    def _node(self, event: yaml.Event, *, location: Location, line: int | None = None) -> Node:
        node, before = Node(None, self.source, line or _line(event)), self._nodes
        if isinstance(event, yaml.AliasEvent):
            node.value = self._alias(event, location)
            return node
        assert isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent))
        anchor = event.anchor
        if len(location) > _MAX_DEPTH:
            raise DocumentError(self.source, [Problem("", f"nested more than {_MAX_DEPTH} deep", _line(event))])
        if event.tag is not None and not (self._aliases and event.tag.removeprefix(_YAML_TAG) in _OWN_TAGS):
            self._report(event, location, f"tags ({event.tag}) are not supported")
        if isinstance(event, yaml.MappingStartEvent):
            node.value = self._mapping(location)
        elif isinstance(event, yaml.ScalarEvent):
            node.value = self._scalar(event, location)
        else:
            items: list[Node] = []
            node.value = items
            while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
                items.append(self._node(event, location=(*location, len(items))))
        self._nodes += 1
        if anchor is not None:
            self._anchors[anchor] = node, self._nodes - before
        return node

    def _alias(self, event: yaml.AliasEvent, location: Location) -> Scalar | dict[str, Node] | list[Node]:
        """The value of an alias; None and a problem where it has none, or none is allowed."""
        if not self._aliases:
            self._report(event, location, _ALIAS_MESSAGE)
            return None
        if event.anchor not in self._anchors:
            self._report(event, location, f"alias *{event.anchor} has no anchor before it")
            return None
        node, nodes = self._anchors[event.anchor]
        self._nodes += nodes
        if self._nodes > _MOST_NODES:
            raise DocumentError(
                self.source, [Problem("", f"more than {_MOST_NODES:,} values by aliases", _line(event))]
            )
        return node.value

    def _mapping(self, location: Location) -> dict[str, Node]:
        items, merged = dict[str, Node](), list[Node]()
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            key = self._key(event, location)
            below = location if key is None else (*location, key)
            value = self._node(next(self._events), location=below, line=_line(event))
            if key == _MERGE and isinstance(event, yaml.ScalarEvent) and not event.style:
                merged += value.value if isinstance(value.value, list) else [value]
            elif key in items:
                self._report(event, below, f"key written twice, first in line {items[key].line}")
            elif key is not None:
                items[key] = value
        for one in merged:
            if not isinstance(one.value, dict):
                self.found.append((location, "a merge key (<<) takes a mapping, or a list of mappings", one.line or 1))
                continue
            # The mapping's own keys count, then those of the first merged.
            items = {**one.value, **items}
        return items

    def _key(self, event: yaml.Event, location: Location) -> str | None:
        """The key of an event; None and a problem if it is not a valid key."""
        if not isinstance(event, yaml.ScalarEvent):
            # One level deeper, since keys may be mappings.
            self._node(event, location=(*location, "?"))
            self._report(event, location, "a key must be a word, not a list, a mapping or an alias")
        elif found := CONTROL.search(event.value):
            self._report(event, location, f"a key holds the control character {found[0]!r}")
        elif event.value == _MERGE and not event.style and not self._aliases:
            self._report(event, location, _MERGE_MESSAGE)
        else:
            return event.value
        return None

    def _scalar(self, event: yaml.ScalarEvent, location: Location) -> Scalar:
        if found := CONTROL.search(event.value):
            self._report(event, location, f"holds the control character {found[0]!r}")
            return None
        try:
            text = event.style if event.tag is None else event.tag == f"{_YAML_TAG}str"
            return event.value if text else read_scalar(event.value)
        except ValueError:
            self._report(event, location, f"{event.value[:20]}... has too many digits")
            return None

    def _report(self, event: yaml.Event, location: Location, message: str) -> None:
        self.found.append((location, message, _line(event)))


def _line(event: yaml.Event) -> int:
    """Line of an event, from 1."""
    assert event.start_mark is not None
    return event.start_mark.line + 1


_WANTED = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping (key: value lines)",
    "model_type": "must be a mapping (key: value lines)",
    "finite_number": "must be a finite number",
}


def _documents_in(annotation: object) -> Iterator[type[Document]]:
    """Documents in the annotation of a field, whatever holds them there."""
    if isinstance(annotation, type) and issubclass(annotation, Document):
        yield annotation
    for one in get_args(annotation):
        yield from _documents_in(one)


def validate(node: Node, *, schema: type[D], source: str, found: Iterable[Problem] = ()) -> D:
    """Build the document, or raise DocumentError with `found` and all other problems, by line.

    A rule across several fields of a section is only checked once each of those fields is valid.
    """
    schema.prepare()
    problems = [*found, *_repeated_names(node, root=node, source=source)]
    try:
        document = schema.model_validate(node.plain())
    except ValidationError as error:
        problems += _problems(error, root=node, schema=schema, source=source)
    if problems:
        raise DocumentError(source, sorted(problems, key=lambda problem: problem.line or 0))
    return document


def type_at(schema: type[Document], location: Location) -> object:
    """The schema's type at a location (a Document class for a section), or None."""
    found: object = schema
    for key in location:
        found = _step(found, key)
    return _bare(found)


def known_keys(section: object) -> list[str]:
    """Keys a section may have, as written in YAML; empty for other types."""
    return list(_fields(section))


def required_keys(section: object) -> list[str]:
    """Keys a section must have, as written in YAML; empty for other types."""
    return [name for name, field in _fields(section).items() if field.is_required()]


def suggest_key(key: str, known: Iterable[str]) -> str:
    """`suggest` for keys: where bits were written and the nearest key is in bytes, it says how to convert."""
    hint = suggest(key, known)
    bits = re.search(r"([GgMm])(?:bit|bps)", key)
    if bits is None or not hint.endswith("_gb_per_s'?"):
        return hint
    unit, divisor = ("Gbit", 8) if bits[1] in "Gg" else ("Mbit", 8000)
    return f"{hint} That is gigabytes a second: divide {unit} by {divisor}"


def locate(message: str, *, root: Node, location: Location, source: str) -> Problem:
    """A problem at a location, with the line if `source` wrote it, else with the file that did."""
    node = root.nearest(location)
    if node.source == source:
        return Problem(root.path(location), message, node.line)
    place = node.source if node.line is None else f"{node.source}:{node.line}"
    return Problem(root.path(location), f"{message} (from {place})")


def _fields(section: object) -> dict[str, FieldInfo]:
    if not (isinstance(section, type) and issubclass(section, Document)):
        return {}
    return {field.alias or name: field for name, field in section.model_fields.items()}


def _step(annotation: object, key: str | int) -> object:
    bare = _bare(annotation)
    if fields := _fields(bare):
        return fields[str(key)].annotation if key in fields else None
    arguments: tuple[object, ...] = get_args(bare)
    if get_origin(bare) is dict:
        return arguments[1]
    if get_origin(bare) is tuple and isinstance(key, int):
        return arguments[0] if arguments[-1] is Ellipsis else arguments[key] if key < len(arguments) else None
    return None


def _bare(annotation: object) -> object:
    """An annotation without `Annotated` and `| None`."""
    while True:
        origin = get_origin(annotation)
        if origin is Annotated:
            annotation = get_args(annotation)[0]
        elif origin in (Union, types.UnionType):
            annotation = next(part for part in get_args(annotation) if part is not type(None))
        else:
            return annotation


_MOST_PROBLEMS = 200


def first_problem(error: ValueError) -> str:
    """An error in words, or the first of a document that is built in Python."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return ": ".join(filter(None, (".".join(map(str, first["loc"])), plain_message(first))))
    return str(error)


def _problems(error: ValidationError, *, root: Node, schema: type[Document], source: str) -> Iterator[Problem]:
    found = error.errors(include_url=False)
    # "Too few items" says nothing where items are there and each has its own problem.
    parents = {detail["loc"][:depth] for detail in found for depth in range(len(detail["loc"]))}
    found = [detail for detail in found if detail["type"] != "too_short" or detail["loc"] not in parents]
    details = found[:_MOST_PROBLEMS]
    if len(found) > len(details):
        yield Problem("", f"{len(found) - len(details):,} more problems are not listed")
    missing = {tuple(detail["loc"]) for detail in details if detail["type"] == "missing"}
    misspelt: set[Location] = set()
    for detail in details:
        location = tuple(detail["loc"])
        if detail["type"] == "extra_forbidden":
            parent, key = location[:-1], str(location[-1])
            lacking = [str(other[-1]) for other in missing if other[:-1] == parent]
            hint = suggest_key(key, lacking) or suggest_key(key, known_keys(type_at(schema, parent)))
            misspelt |= {(*parent, word) for word in lacking if f"{word!r}?" in hint}
            yield locate(f"unknown key {key!r}{hint}", root=root, location=location, source=source)
    for detail in details:
        location = tuple(part for part in detail["loc"] if part != "[key]")
        if detail["type"] == "missing" and location not in misspelt:
            parent, last = location[:-1], location[-1]
            field = _fields(type_at(schema, parent)).get(str(last))
            about = f" ({field.description.rstrip('.')})" if field is not None and field.description else ""
            lacks = (
                f"item {last + 1} of this list is missing" if isinstance(last, int) else f"missing key {last!r}{about}"
            )
            yield locate(lacks, root=root, location=parent, source=source)
        elif detail["type"] not in ("missing", "extra_forbidden"):
            yield locate(plain_message(detail), root=root, location=location, source=source)


def plain_message(detail: ErrorDetails) -> str:
    """What is wrong with a value, in plain words."""
    kind, words = detail["type"], detail["msg"].replace("String should", "Input should")
    if kind == "value_error":
        return words.removeprefix("Value error, ")
    message = _WANTED.get(kind) or words.replace("Input should be", "must be").replace("Input should", "must")
    if kind in ("too_short", "too_long"):
        context = detail["ctx"]
        limit = f"at least {context['min_length']}" if kind == "too_short" else f"at most {context['max_length']}"
        return f"must have {limit} items, not {context['actual_length']}"
    message = f"{message[0].lower()}{message[1:]}, not {_shown(detail['input'])}"
    if kind == "string_type" and isinstance(detail["input"], (int, float)):
        message += " (put it in quotes)"
    if kind == "literal_error" and isinstance(detail["input"], str):
        message += suggest(detail["input"], re.findall(r"'([^']+)'", detail["ctx"]["expected"]))
    return message


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, tuple):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "empty", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _repeated_names(node: Node, *, root: Node, source: str, location: Location = ()) -> Iterator[Problem]:
    """Items of one list with the same name: nothing could address the second."""
    taken: set[str] = set()
    for key, child in node.items():
        name = child.name() if isinstance(key, int) else None
        if name in taken:
            message = f"the name {name!r} is taken by an earlier item of this list"
            yield locate(message, root=root, location=(*location, key), source=source)
        taken |= {name} if name is not None else set()
        yield from _repeated_names(child, root=root, source=source, location=(*location, key))


_WIDTH = 120
_UNQUOTED = re.compile(r"(?:[1-9][0-9]*)?[A-Za-z](?:[\w ./()+-]*[\w./()+-])?", re.ASCII)
# YAML 1.1 readers parse these words as booleans; ours does not, but other programs read the files too.
_YAML_1_1_WORDS = frozenset({"y", "n", "yes", "no", "on", "off"})
# Characters that a YAML file may hold only escaped, beyond those that JSON escapes.
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
# Characters not allowed in comments, where nothing can be escaped.
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")
# Keys that need no description.
_UNCOMMENTED = frozenset({"schema", "name", "description", "source"})


def to_yaml(document: Document, *, header: Sequence[str] = ()) -> str:
    """A document as YAML that loads back equal.

    Keys stand in schema order with their descriptions as comments; `header` lines become comments on top. Empty
    optional keys (null, empty text, empty list) are omitted; all other defaults are written, so that the file keeps its
    meaning when a default changes.
    """
    lines = [f"# {_FORBIDDEN.sub('?', line)}".rstrip() for text in header for line in text.splitlines() or [""]]
    if lines:
        lines.append("")
    lines += _written_section(document, indent=0, commented=True)
    return "\n".join(lines) + "\n"


def _given(document: Document) -> Iterator[tuple[str, object, str | None]]:
    """Key, value and description of every field to be written; `sources` last, after the numbers it explains."""
    fields = type(document).model_fields
    for name in sorted(fields, key=lambda name: name == "sources"):
        value, field = getattr(document, name), fields[name]
        if name in document.left_out_at_default and value == field.get_default():
            continue
        if field.is_required() or value not in (None, "", ()) or value != field.get_default():
            yield field.alias or name, value, field.description


def _written_section(document: Document, *, indent: int, commented: bool) -> Iterator[str]:
    for key, value, description in _given(document):
        comment = description if commented and key not in _UNCOMMENTED else None
        # An empty section would read as null.
        compact = not isinstance(value, Document) or not any(_given(value))
        yield from _entry(key, value, indent=indent, comment=comment, commented=commented, compact=compact)


def _entry(
    key: str, value: object, *, indent: int, comment: str | None, commented: bool, compact: bool
) -> Iterator[str]:
    """One key and its value, on one line if `compact` allows and it fits."""
    pad, written = " " * indent, _written_text(key)
    inline = _inline(value, room=_WIDTH - indent - len(written) - 2) if compact else None
    line = f"{pad}{written}:" if inline is None else f"{pad}{written}: {inline}"
    if comment and inline is not None and len(line) + len(comment) + 4 <= _WIDTH:
        yield f"{line}  # {comment}"
        return
    if comment:
        yield f"{pad}# {comment}"
    yield line
    if inline is None:
        yield from _block(value, indent=indent + 2, commented=commented)


def _block(value: object, *, indent: int, commented: bool) -> Iterator[str]:
    """The lines below a key: a section, a mapping, or a list whose first item alone carries comments."""
    if isinstance(value, Document):
        yield from _written_section(value, indent=indent, commented=commented)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _entry(key, item, indent=indent, comment=None, commented=False, compact=True)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _item(item, indent=indent, commented=commented and index == 0)


def _item(item: object, *, indent: int, commented: bool) -> Iterator[str]:
    pad = " " * indent
    inline = _inline(item, room=_WIDTH - indent - 2)
    if inline is not None:
        yield f"{pad}- {inline}"
        return
    lines = list(_block(item, indent=indent + 2, commented=commented))
    first = next(index for index, line in enumerate(lines) if not line.lstrip().startswith("#"))
    yield from (line[2:] for line in lines[:first])
    yield f"{pad}- {lines[first].lstrip()}"
    yield from lines[first + 1 :]


def _inline(value: object, *, room: int) -> str | None:
    """A value on one line, or None if it has to be a block: nested, or a collection wider than `room` characters."""
    if isinstance(value, Document):
        value = {key: item for key, item, _ in _given(value)}
    if isinstance(value, Mapping):
        pairs = [f"{_written_text(key)}: {_written_scalar(item)}" for key, item in value.items() if _is_scalar(item)]
        text, whole = "{" + ", ".join(pairs) + "}", len(pairs) == len(value)
    elif isinstance(value, tuple):
        parts = [_written_scalar(item) for item in value if _is_scalar(item)]
        text, whole = "[" + ", ".join(parts) + "]", len(parts) == len(value)
    else:
        return _written_scalar(value)
    return text if whole and (len(text) <= room or not value) else None


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _written_scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # Whole numbers are written without .0; schemas accept an integer for a float.
        if value.is_integer() and 0 < abs(value) < 1e15:
            return str(int(value))
        digits, exponent = repr(value).partition("e")[::2]
        # YAML 1.1 reads 1e-05 as text: it needs a point before the exponent.
        return f"{digits if '.' in digits else digits + '.0'}e{exponent}" if exponent else digits
    return str(value) if isinstance(value, int) else _written_text(str(value))


def _written_text(text: str) -> str:
    """Text as a plain scalar if every reader parses it as the same text, else in double quotes."""
    plain = _UNQUOTED.fullmatch(text) and read_scalar(text) == text and text.lower() not in _YAML_1_1_WORDS
    if plain:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)
