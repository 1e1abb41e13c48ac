"""Names and values of config files, each with its line: TOML, YAML and JSON."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from axonn_tune.errors import DocumentError, Problem
from axonn_tune.frameworks.keys import Stated
from axonn_tune.specs.document import Node, read_config


def toml_pairs(text: str, path: Path) -> Iterator[tuple[str, Stated]]:
    """Every `section.key`; its line is that of the key below the section's heading."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        place = re.search(r"line (\d+)", str(error))
        raise DocumentError(str(path), [Problem("", str(error), int(place[1]) if place else None)]) from error
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if heading := re.match(r"\s*\[([\w.-]+)\]", line):
            section = f"{heading[1]}."
        elif key := re.match(r"\s*([\w-]+)\s*=", line):
            lines.setdefault(f"{section}{key[1]}", number)
    for name, value in _flat(document):
        yield name, Stated(str(value), lines.get(name, 1))


def _flat(values: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def yaml_pairs(text: str, path: Path) -> Iterator[tuple[str, Stated]]:
    """Every value of YAML or JSON by its dotted name."""
    root = read_config(text.replace("\t", "  "), source=str(path))
    if not isinstance(root.value, dict):
        raise DocumentError(str(path), [Problem("", "states no arguments: no `key: value` at the top level", 1)])
    yield from _nodes(root)


def _nodes(node: Node, before: str = "") -> Iterator[tuple[str, Stated]]:
    for key, child in node.mapping().items():
        if isinstance(child.value, dict):
            yield from _nodes(child, f"{before}{key}.")
        else:
            words = [one.plain() for one in (child.value if isinstance(child.value, list) else (child,))]
            nested = [list(one) for one in words if isinstance(one, tuple)]
            text = str(nested) if nested or child.value == [] else " ".join(map(str, words))
            yield f"{before}{key}", Stated(text, child.line or 1)
