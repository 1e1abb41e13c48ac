"""Schemas of the documents: JSON Schemas for editors, tables of keys for people.

`python -m axonn_tune.specs.schemas [--check]` writes docs/schemas. Models and machines have a second schema,
`*-derived.json`, for files that `extends` another and so need not be complete. The tables are docs/files.md.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from axonn_tune.files import write_text_atomically
from axonn_tune.specs.document import LARGEST_COUNT, LARGEST_SIZE, Document
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import Baseline, Measurements, Summary
from axonn_tune.specs.workload import Workload

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "schemas"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_EXTENDS = "Name or path of the document to extend; keys of this file override it."


def schema_texts() -> dict[str, str]:
    """Every schema as file name and JSON text."""
    schemas = {f"{kind}.json": _schema(document) for kind, (document, _) in DOCUMENTS.items()}
    schemas |= {f"{kind}-derived.json": _derived(schemas[f"{kind}.json"]) for kind in ("model", "machine")}
    return {name: json.dumps(schema, indent=2, ensure_ascii=False) + "\n" for name, schema in schemas.items()}


def outdated(folder: Path) -> list[str]:
    """Names of the files in a folder that differ from what the code would write, or are missing or left over."""
    wanted = schema_texts()
    there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.json")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def main(arguments: Sequence[str]) -> int:
    """Write the schemas, or with --check compare them; the exit code."""
    if "--check" in arguments:
        names = outdated(FOLDER)
        if names:
            sys.stderr.write(f"docs/schemas differs from the code in {', '.join(names)}: run `make generate`\n")
        return 1 if names else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in schema_texts().items():
        write_text_atomically(FOLDER / name, text)
    return 0


def _schema(document: type[Document]) -> dict[str, Any]:
    return {"$schema": _DIALECT, **document.model_json_schema(by_alias=True)}


def _derived(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a file that extends another: nothing is required but what says what it is.

    An entry of `sources` stays complete: it replaces the inherited one as a whole.
    """
    derived = copy.deepcopy(schema)
    for name, definition in derived["$defs"].items():
        if name != "Source":
            definition.pop("required", None)
    extends = {"type": "string", "minLength": 1, "title": "Extends", "description": _EXTENDS}
    derived["properties"] = {"extends": extends, **derived["properties"]}
    derived["required"] = ["schema", "extends", "name"]
    return derived


DOCUMENTS: dict[str, tuple[type[Document], str]] = {
    "model": (
        Model,
        "A model: one file in `configs/`, or your own. With `extends: NAME` a file holds only changed keys, and "
        "its own `name`.",
    ),
    "machine": (
        Machine,
        "A machine: one file in `machines/`, or your own. With `extends: NAME` a file holds only changed keys, its "
        "own `name`, and the source of each changed number. "
        "See [machine profiles](machines.md).",
    ),
    "workload": (
        Workload,
        "The workload of one step. It is not a separate file: the search fills it from the model's defaults and the "
        "options, `--set global_batch=512` changes it, and launch configs hold it.",
    ),
    "launch": (Launch, "One self-contained configuration, which `-o` writes and `axonn-tune run` executes. "
                       "See [launch configs](launch.md)."),
    "summary": (Summary, "Predicted vs. measured of one run: `summary.json` in the run's folder, JSON. "
                         "See [what a run measures](measuring.md)."),
    "measurement": (Measurements, "Every run of every configuration of `axonn-tune validate -o`. "
                                  "See [predicted vs. measured](validate.md)."),
    "baseline": (Baseline, "The baseline of `axonn-tune regress --record`. See [a gate for CI](regress.md)."),
}  # fmt: skip
"""Each kind of document, with what it is for."""

_Schema: TypeAlias = Mapping[str, Any]
_KINDS = {schema.__name__: kind for kind, (schema, _) in DOCUMENTS.items()}
_TEXT = {"type": "string"}
_PLAIN = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
_SIGNS = {"exclusiveMinimum": " > ", "minimum": " ≥ ", "maximum": " ≤ "}


def tables() -> str:
    """A section for each kind of document: what it is, and a table of its keys."""
    return "\n".join(_section(kind, schema, words) for kind, (schema, words) in DOCUMENTS.items())


def _section(kind: str, document: type[Document], words: str) -> str:
    schema = _schema(document)
    rows = _rows(schema, schema.get("$defs", {}), prefix="")
    head = ["| key | holds | unless given | meaning |", "|---|---|---|---|"]
    lines = [f"## {kind.capitalize()}", "", words, "", f"JSON Schema: [{kind}.json](schemas/{kind}.json).", ""]
    return "\n".join([*lines, *head, *rows, ""])


def _rows(section: _Schema, sections: Mapping[str, _Schema], *, prefix: str) -> Iterator[str]:
    """A row for every key, those of sections below their own; documents that have a table here in one row."""
    for name, field in section["properties"].items():
        # pydantic leaves out the description of a field that is the section's own.
        meaning = field.get("description") or sections[_referred(field)]["description"]
        default = "required" if name in section.get("required", ()) else _default(field["default"])
        cells = [_words(field), default, meaning]
        yield " | ".join([f"| `{prefix}{name}`", *(cell.replace("|", "\\|") for cell in cells)]) + " |"
        for below, step in _below(field, ""):
            if below not in _KINDS:
                yield from _rows(sections[below], sections, prefix=f"{prefix}{name}{step}.")


def _below(field: _Schema, step: str) -> Iterator[tuple[str, str]]:
    """Sections inside a field, with what a key has to say to reach them: `[]` for an item, `.NAME` for a value."""
    if "$ref" in field:
        yield _referred(field), step
    for part in field.get("anyOf", ()):
        yield from _below(part, step)
    if "items" in field:
        yield from _below(field["items"], f"{step}[]")
    if "additionalProperties" in field:
        yield from _below(field["additionalProperties"], f"{step}.NAME")


def _referred(field: _Schema) -> str:
    """Name of the section that a field refers to."""
    return str(field["$ref"].rpartition("/")[2])


def _words(field: _Schema) -> str:
    """What a field holds."""
    if "$ref" in field:
        kind = _KINDS.get(_referred(field))
        return f"[{kind}](#{kind})" if kind else "section"
    if "anyOf" in field:
        return " or ".join(map(_words, field["anyOf"]))
    if "const" in field or "enum" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", (field.get("const"),)))
    if field["type"] == "object":
        return f"mapping of {_words(field.get('propertyNames', _TEXT))} to {_words(field['additionalProperties'])}"
    if field["type"] == "array":
        parts = field.get("prefixItems")
        return f"list of {_words(parts[0])}" if parts else f"list of {_words(field['items'])}{_bounds(field)}"
    return _PLAIN[field["type"]] + _bounds(field)


def _bounds(field: _Schema) -> str:
    """` > 0`, ` ≥ 0`, ` ≤ 1` of a number; a list or text that must hold something says so."""
    shown = {key: sign for key, sign in _SIGNS.items() if field.get(key) not in (None, LARGEST_COUNT, LARGEST_SIZE)}
    words = [f"{sign}{field[key]:g}" for key, sign in shown.items()]
    return "".join([*words, *([", not empty"] if {"minItems", "minLength"} & field.keys() else [])])


def _default(value: object) -> str:
    """What a key holds if it is left out."""
    if value is None or value in ([], "", {}):
        return "absent"
    if isinstance(value, dict):
        return "as below"
    listed = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return f"`{listed.lower() if isinstance(value, bool) else listed}`"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
