"""Writes documents as commented YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from axonn_tune.specs.base import Document
from axonn_tune.specs.yaml_reader import read_scalar

_WIDTH = 120
_PLAIN = re.compile(r"(?:[1-9][0-9]*)?[A-Za-z](?:[\w ./()+-]*[\w./()+-])?", re.ASCII)
# Words that readers of YAML 1.1 take for booleans; ours does not, but files get read by others too.
_YAML_1_1_WORDS = frozenset({"y", "n", "yes", "no", "on", "off"})
# Characters that a YAML file may hold only escaped, beyond those that JSON escapes.
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
# Characters that it may not hold in comments, where nothing can be escaped.
_FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufeff\ufffe\uffff]")
# Keys that say themselves what they hold.
_UNCOMMENTED = frozenset({"schema", "name", "description", "source"})


def to_yaml(document: Document, *, header: Sequence[str] = ()) -> str:
    """A document as YAML that loads back equal.

    Keys stand in schema order with their descriptions as comments; `header` lines become comments on
    top. Optional keys that hold nothing (null, empty text, empty list) are left out, all other
    defaults are written, so that the file keeps its meaning when a default changes.
    """
    lines = [f"# {_FORBIDDEN.sub('?', line)}".rstrip() for text in header for line in text.splitlines() or [""]]
    if lines:
        lines.append("")
    lines += _section(document, indent=0, commented=True)
    return "\n".join(lines) + "\n"


def _given(document: Document) -> Iterator[tuple[str, object, str | None]]:
    """Key, value and description of every field to be written; `sources` last, after the numbers it explains."""
    fields = type(document).model_fields
    for name in sorted(fields, key=lambda name: name == "sources"):
        value, field = getattr(document, name), fields[name]
        if field.is_required() or value not in (None, "", ()) or value != field.get_default():
            yield field.alias or name, value, field.description


def _section(document: Document, *, indent: int, commented: bool) -> Iterator[str]:
    for key, value, description in _given(document):
        comment = description if commented and key not in _UNCOMMENTED else None
        # A section without anything in it would read as null.
        compact = not isinstance(value, Document) or not any(_given(value))
        yield from _entry(key, value, indent=indent, comment=comment, commented=commented, compact=compact)


def _entry(
    key: str, value: object, *, indent: int, comment: str | None, commented: bool, compact: bool
) -> Iterator[str]:
    """One key and its value, on one line if `compact` allows and it fits."""
    pad, written = " " * indent, _string(key)
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
        yield from _section(value, indent=indent, commented=commented)
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
        pairs = [f"{_string(key)}: {_scalar(item)}" for key, item in value.items() if _is_scalar(item)]
        text, whole = "{" + ", ".join(pairs) + "}", len(pairs) == len(value)
    elif isinstance(value, tuple):
        parts = [_scalar(item) for item in value if _is_scalar(item)]
        text, whole = "[" + ", ".join(parts) + "]", len(parts) == len(value)
    else:
        return _scalar(value)
    return text if whole and (len(text) <= room or not value) else None


def _is_scalar(value: object) -> bool:
    return value is None or isinstance(value, (str, int, float))


def _scalar(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        # Whole numbers look better without their .0, and schemas take an integer for a float.
        if value.is_integer() and 0 < abs(value) < 1e15:
            return str(int(value))
        digits, exponent = repr(value).partition("e")[::2]
        # YAML 1.1 takes 1e-05 for text: it wants a point before the exponent.
        return f"{digits if '.' in digits else digits + '.0'}e{exponent}" if exponent else digits
    return str(value) if isinstance(value, int) else _string(str(value))


def _string(text: str) -> str:
    """Text as a plain scalar where every reader takes it for the same text, else in double quotes."""
    plain = _PLAIN.fullmatch(text) and read_scalar(text) == text and text.lower() not in _YAML_1_1_WORDS
    if plain:
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", quoted)
