"""Where every number comes from: the machine's with source and kind, the model, the workload, files and versions."""

from __future__ import annotations

import json
from collections.abc import Iterator

from axonn_tune.report.html.blocks import Column, Json, facts, fold, table
from axonn_tune.specs.document import Document
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Accelerator, Library, Machine, PaperTable, Tier, Uncertainty
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

_NUMBERS = (
    Column("section", "section", "Part of the machine profile.", text=True, width_ch=18),
    Column("key", "number", "Its key, with the unit in its name.", text=True, width_ch=28),
    Column("value", "value", "As the profile has it.", text=True, width_ch=30),
    Column("kind", "kind", "peak: datasheet; measured; fitted; assumed; fact: a count.", text=True, width_ch=9),
    Column("source", "source", "Where it comes from.", text=True, width_ch=70),
    Column("meaning", "meaning", "What it is.", text=True, width_ch=70),
)
_KEYS = (
    Column("key", "key", "Key of the document.", text=True, width_ch=26),
    Column("value", "value", "Its value.", text=True, width_ch=30),
    Column("meaning", "meaning", "What it is.", text=True, width_ch=70),
)
_APART = frozenset({"schema", "sources", "path", "sha256"})


def machine_fold(machine: Json) -> Json:
    """Every number of a machine profile, with kind and source."""
    return fold(
        f"Machine: {machine['name']}, every number with its source",
        [facts(_origin(machine)), table("", "", _NUMBERS, list(_machine_rows(machine)))],
    )


def model_fold(model: Json) -> Json:
    """The model document."""
    return fold(f"Model: {model['name']}", [facts(_origin(model)), table("", "", _KEYS, list(_rows(model, Model)))])


def workload_fold(workload: Json) -> Json:
    """What is trained in a step."""
    return fold("Workload", [table("", "", _KEYS, list(_rows(workload, Workload)))])


def launch_fold(launch: Launch) -> Json:
    """What a launch config says beside model and workload."""
    document = launch.model_dump(mode="json", by_alias=True)
    apart = {"model", "workload", "predicted", "provenance"}
    shown = {key: value for key, value in document.items() if key not in apart}
    return fold(f"Launch config: {launch.name}", [table("", "", _KEYS, list(_rows(shown, Launch)))])


def origin_fold(rows: list[tuple[str, str]]) -> Json:
    """Versions, command line, files."""
    return fold("Versions, files and command", [facts(rows)])


def _origin(document: Json) -> list[tuple[str, str]]:
    known = [("description", "description"), ("path", "file"), ("sha256", "SHA-256 of it, what it extends, overrides")]
    return [(label, str(document[key])) for key, label in known if document.get(key)]


def _machine_rows(machine: Json) -> Iterator[dict[str, str]]:
    sections: list[tuple[str, Json | None, type[Document]]] = [
        ("accelerator", machine["accelerator"], Accelerator),
        *((f"tier {tier['name']}", tier, Tier) for tier in machine["tiers"]),
        ("library", machine["library"], Library),
        ("uncertainty", machine["uncertainty"], Uncertainty),
        ("paper", machine.get("paper"), PaperTable),
    ]
    for name, section, schema in sections:
        if section is not None:
            yield from (_sourced(name, row, section["sources"]) for row in _rows(section, schema))
    rest = {key: value for key, value in machine.items() if key in ("launcher", "measured")}
    yield from ({"section": row["key"], **row, "kind": "", "source": ""} for row in _rows(rest, Machine))


def _sourced(section: str, row: dict[str, str], sources: Json) -> dict[str, str]:
    source = sources.get(row["key"]) or {"kind": "", "source": ""}
    return {"section": section, **row, "kind": source["kind"], "source": source["source"]}


def _rows(document: Json, schema: type[Document]) -> Iterator[dict[str, str]]:
    fields = {field.alias or name: field for name, field in schema.model_fields.items()}
    for key, value in document.items():
        if key in _APART or value is None or key not in fields:
            continue
        yield {"key": key, "value": _shown(value), "meaning": fields[key].description or ""}


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
