"""Schemas of the documents: JSON Schemas for editors, tables of keys for people.

`python -m axonn_tune.specs.schemas [--check]` writes docs/schemas. Models and machines have a second schema,
`*-derived.json`, for files that `extends` another and so need not be complete. The tables are docs/files.md.
"""

from __future__ import annotations

import copy
import json
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic.fields import FieldInfo

from axonn_tune.files import write_text_atomically
from axonn_tune.specs.document import Document
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import Baseline, Measurements, Summary
from axonn_tune.specs.workload import Workload

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "schemas"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_EXTENDS = "Name or path of the document to build on; what this file says is laid over it."


def schema_texts() -> dict[str, str]:
    """Every schema as file name and JSON text."""
    complete: dict[str, type[Document]] = {
        "model": Model,
        "machine": Machine,
        "workload": Workload,
        "launch": Launch,
        "summary": Summary,
        "measurement": Measurements,
        "baseline": Baseline,
    }
    schemas = {f"{kind}.json": _schema(document) for kind, document in complete.items()}
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


_PLAIN: dict[object, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    type(None): "null",
}

DOCUMENTS: dict[str, tuple[type[Document], str]] = {
    "model": (
        Model,
        "What is trained: one file in `configs/`, or your own. With `extends: NAME` a file says only what differs, and "
        "its own `name`.",
    ),
    "machine": (
        Machine,
        "What it is trained on: one file in `machines/`, or your own. With `extends: NAME` a file says only what "
        "differs, its own `name`, and where each changed number comes from. "
        "[Machine profiles](machines.md) explains it.",
    ),
    "workload": (
        Workload,
        "What one step processes. It is not a file of its own: the search fills it from the model's defaults and the "
        "options, `--set global_batch=512` changes it, and launch configs hold it.",
    ),
    "launch": (Launch, "One configuration, complete in itself: what `-o` writes and `axonn-tune run` takes. "
                       "[Launch configs](launch.md) explains it."),
    "summary": (Summary, "Predicted vs. measured of one run: `summary.json` in the run's folder, JSON. "
                         "[What a run measures](measuring.md) explains it."),
    "measurement": (Measurements, "What `axonn-tune validate -o` writes: every run of every configuration. "
                                  "[Predicted against measured](validate.md) explains it."),
    "baseline": (Baseline, "What `axonn-tune regress --record` writes. [A gate for CI](regress.md) explains it."),
}  # fmt: skip
"""Each kind of document, with what it is for."""


def tables() -> str:
    """A section for each kind of document: what it is, and a table of its keys."""
    return "\n".join(_section(kind, schema, words) for kind, (schema, words) in DOCUMENTS.items())


def _section(kind: str, schema: type[Document], words: str) -> str:
    seen = frozenset(other for name, (other, _) in DOCUMENTS.items() if name != kind)
    rows = list(_rows(schema, prefix="", elsewhere=seen))
    head = ["| key | holds | unless given | meaning |", "|---|---|---|---|"]
    lines = [f"## {kind.capitalize()}", "", words, "", f"JSON Schema: [{kind}.json](schemas/{kind}.json).", ""]
    return "\n".join([*lines, *head, *rows, ""])


def _rows(schema: type[Document], *, prefix: str, elsewhere: frozenset[type[Document]]) -> Iterator[str]:
    """A row for every key, those of sections below their own; documents that have a section here in one row."""
    for name, field in schema.model_fields.items():
        key = prefix + (field.alias or name)
        found = list(_sections(field.annotation, ""))
        holds = _holds(field, elsewhere).replace("|", "\\|")
        yield f"| `{key}` | {holds} | {_default(field)} | {(field.description or '').replace('|', chr(92) + '|')} |"
        for section, step in found:
            if section not in elsewhere:
                yield from _rows(section, prefix=f"{key}{step}.", elsewhere=elsewhere)


def _sections(annotation: object, step: str) -> Iterator[tuple[type[Document], str]]:
    """Documents inside a type, with what a key has to say to reach them: `[]` for an item, `.NAME` for a value."""
    if isinstance(annotation, type) and issubclass(annotation, Document):
        yield annotation, step
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is tuple:
        yield from _sections(inner[0], f"{step}[]")
    elif origin is dict:
        yield from _sections(inner[1], f"{step}.NAME")
    elif origin in (Union, types.UnionType):
        for part in inner:
            yield from _sections(part, step)
    elif origin is Annotated:
        yield from _sections(inner[0], step)


def _holds(field: FieldInfo, elsewhere: frozenset[type[Document]]) -> str:
    return _words(field.annotation, elsewhere) + _bounds(field.metadata)


def _words(annotation: Any, elsewhere: frozenset[type[Document]]) -> str:  # noqa: ANN401 - any type
    """A type in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        metadata = [part for item in inner[1:] for part in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _words(inner[0], elsewhere) + _bounds(metadata)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin is tuple:
        several = inner[-1] is Ellipsis or len(set(inner)) == 1
        parts = inner[:1] if several else inner
        return f"list of {', '.join(_words(part, elsewhere) for part in parts)}"
    if origin is dict:
        return f"mapping of {_words(inner[0], elsewhere)} to {_words(inner[1], elsewhere)}"
    if origin in (Union, types.UnionType):
        return " or ".join(_words(part, elsewhere) for part in inner)
    if isinstance(annotation, type) and issubclass(annotation, Document):
        kind = next((name for name, (schema, _) in DOCUMENTS.items() if schema is annotation), "")
        return f"[{kind}](#{kind})" if annotation in elsewhere else "section"
    return _PLAIN[annotation]


def _bounds(metadata: Sequence[object]) -> str:
    """` > 0`, ` from 0`, ` to 1` of a number; a list or text that must hold something says so."""
    words = []
    for one in metadata:
        if isinstance(one, Gt):
            words.append(f" > {one.gt}")
        elif isinstance(one, Ge):
            words.append(f" ≥ {one.ge}")
        elif isinstance(one, Le):
            words.append(f" ≤ {one.le}")
        elif isinstance(one, MinLen):
            words.append(", not empty")
    return "".join(words)


def _default(field: FieldInfo) -> str:
    """What a key holds if it is left out."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), "", {}):
        return "absent"
    if isinstance(value, Document):
        return "as below"
    listed = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return f"`{listed.lower() if isinstance(value, bool) else listed}`"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
