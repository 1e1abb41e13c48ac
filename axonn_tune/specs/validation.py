"""Checks nodes against a schema and says what is wrong in a user's words."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError

from axonn_tune.errors import DocumentError, Problem, suggest
from axonn_tune.specs.base import Document
from axonn_tune.specs.yaml_reader import Location, Node, Place

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

D = TypeVar("D", bound=Document)

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


def validate(node: Node, *, schema: type[D], source: str, found: Iterable[Problem] = ()) -> D:
    """Build the document, or raise DocumentError with `found` and every problem of its own, by line.

    A rule across several fields of a section is only checked once each of those fields is valid.
    """
    problems = [*found, *_repeated_names(node, source=source)]
    try:
        document = schema.model_validate(node.plain())
    except ValidationError as error:
        problems += _problems(error, root=node, schema=schema, source=source)
    if problems:
        raise DocumentError(source, sorted(problems, key=lambda problem: problem.line or 0))
    return document


def type_at(schema: type[Document], location: Location) -> object:
    """The type the schema wants at a location (a Document class for a section), or None."""
    found: object = schema
    for key in location:
        found = _step(found, key)
    return _bare(found)


def known_keys(section: object) -> list[str]:
    """Keys a section may have, as written in YAML; none if it is no section."""
    return list(_fields(section))


def required_keys(section: object) -> list[str]:
    """Keys a section must have, as written in YAML; none if it is no section."""
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
    place = root.nearest(location).place
    if place.source == source:
        return Problem(root.path(location), message, place.line)
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


def _problems(error: ValidationError, *, root: Node, schema: type[Document], source: str) -> Iterator[Problem]:
    details = _without_echoes(error.errors(include_url=False))
    missing = {tuple(detail["loc"]) for detail in details if detail["type"] == "missing"}
    misspelt: set[Location] = set()
    for detail in details:
        location = tuple(detail["loc"])
        if detail["type"] == "extra_forbidden":
            parent, key = location[:-1], str(location[-1])
            lacking = [str(other[-1]) for other in missing if other[:-1] == parent]
            hint = suggest_key(key, lacking) or suggest_key(key, known_keys(type_at(schema, parent)))
            misspelt |= {(*parent, word) for word in lacking if f"{word!r}?" in hint}
            yield locate(f"unknown key {key!r}{hint}", root=root, location=(*parent, location[-1]), source=source)
    for detail in details:
        location = tuple(part for part in detail["loc"] if part != "[key]")
        if detail["type"] == "missing" and location not in misspelt:
            yield _missing(location, root=root, schema=schema, source=source)
        elif detail["type"] not in ("missing", "extra_forbidden"):
            yield locate(_message(detail), root=root, location=location, source=source)


def _without_echoes(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Drop "too few items" where items are there and each has its own problem."""
    places = [detail["loc"] for detail in details]

    def echoes(detail: ErrorDetails) -> bool:
        own = detail["loc"]
        return detail["type"] == "too_short" and any(place != own and place[: len(own)] == own for place in places)

    return [detail for detail in details if not echoes(detail)]


def _missing(location: Location, *, root: Node, schema: type[Document], source: str) -> Problem:
    parent, key = location[:-1], location[-1]
    if isinstance(key, int):
        return locate(f"item {key + 1} of this list is missing", root=root, location=parent, source=source)
    field = _fields(type_at(schema, parent)).get(key)
    about = f" ({field.description.rstrip('.')})" if field is not None and field.description else ""
    message = f"missing key {key!r}{about}"
    return locate(message, root=root, location=parent, source=source)


def _message(detail: ErrorDetails) -> str:
    kind, words = detail["type"], detail["msg"]
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


def _repeated_names(node: Node, *, source: str) -> Iterator[Problem]:
    """Items of one list with the same name: nothing could address the second."""
    stack: list[tuple[Location, Node]] = [((), node)]
    while stack:
        location, node_here = stack.pop()
        children: Iterable[tuple[str | int, Node]] = node_here.mapping().items()
        if isinstance(node_here.value, tuple):
            children = list(enumerate(node_here.value))
            first: dict[str, Place] = {}
            for index, item in enumerate(node_here.value):
                name = item.name()
                if name is not None and first.setdefault(name, item.place) is not item.place:
                    message = f"the name {name!r} is taken by an earlier item of this list"
                    yield locate(message, root=node, location=(*location, index), source=source)
        stack.extend(((*location, key), child) for key, child in children)
