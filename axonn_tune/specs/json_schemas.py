"""JSON Schemas of the documents, for editors: `python -m axonn_tune.specs.json_schemas [--check]`.

Models and machines have a second schema, `*-derived.json`, for files that `extends` another and so
need not be complete.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from axonn_tune.files import write_text_atomically
from axonn_tune.specs.base import Document
from axonn_tune.specs.baseline import Baseline
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.measurements import Measurements
from axonn_tune.specs.model import Model
from axonn_tune.specs.runs import Summary
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
