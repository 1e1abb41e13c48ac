"""JSON Schemas of the documents, for editors.

Models and machines have a second schema, `*-derived.json`, for files that `extends` another and so need not be
complete.
"""

from __future__ import annotations

import copy
import json
from typing import Any

from axonn_tune.specs.document import Document
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import Baseline, Measurements, Summary
from axonn_tune.specs.workload import Workload

DOCUMENTS: dict[str, type[Document]] = {
    "model": Model,
    "machine": Machine,
    "workload": Workload,
    "launch": Launch,
    "summary": Summary,
    "measurement": Measurements,
    "baseline": Baseline,
}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_EXTENDS = "Name or path of the document to extend; keys of this file override it."


def schema_texts() -> dict[str, str]:
    """Every schema as file name and JSON text."""
    schemas = {f"{kind}.json": schema_of(document) for kind, document in DOCUMENTS.items()}
    schemas |= {f"{kind}-derived.json": _derived(schemas[f"{kind}.json"]) for kind in ("model", "machine")}
    return {name: json.dumps(schema, indent=2, ensure_ascii=False) + "\n" for name, schema in schemas.items()}


def schema_of(document: type[Document]) -> dict[str, Any]:
    """The JSON Schema of a class of documents, with the sections of every layer type."""
    Model.prepare()
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
