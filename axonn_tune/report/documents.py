"""Models and machines at hand, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from axonn_tune.report.table import Heading, text_table

if TYPE_CHECKING:
    from axonn_tune.specs.catalog import Loaded
    from axonn_tune.specs.machine import Machine, Tier
    from axonn_tune.specs.model import Model

_MODEL_COLUMNS: tuple[tuple[str, Callable[[Model], str]], ...] = (
    ("parameters", lambda model: show_count(model.parameters)),
    ("family", lambda model: model.family),
    ("layers", lambda model: str(model.layers)),
    ("hidden", lambda model: str(model.hidden)),
    ("heads", lambda model: str(model.heads)),
    ("kv heads", lambda model: str(model.kv_heads)),
    ("ffn", lambda model: str(model.ffn)),
    ("vocabulary", lambda model: str(model.vocab)),
    ("batch", lambda model: str(model.defaults.global_batch)),
    ("sequence", lambda model: str(model.defaults.sequence_length)),
)
_MACHINE_COLUMNS: tuple[tuple[str, Callable[[Machine], str]], ...] = (
    ("accelerator", lambda machine: machine.accelerator.name),
    ("memory, GiB", lambda machine: f"{machine.accelerator.memory_gib:g}"),
    ("bf16, TFLOP/s", lambda machine: _number(machine.accelerator.peak_tflops.get("bf16"))),
    ("ranks/node", lambda machine: str(machine.launcher.ranks_per_node)),
    ("network, inner to outer", lambda machine: ", ".join(_tier(tier) for tier in machine.tiers)),
    ("library", lambda machine: f"{machine.library.name} {machine.library.version}"),
)


_COLUMNS: dict[str, tuple[tuple[str, Callable[[Any], str]], ...]] = {
    "model": _MODEL_COLUMNS,
    "machine": _MACHINE_COLUMNS,
}
_LEFT = {"name", "family", "accelerator", "network, inner to outer", "library"}

_MODEL_FIELDS: dict[str, Callable[[Model], object]] = {
    "parameters": lambda model: model.parameters,
    "family": lambda model: model.family,
    "layers": lambda model: model.layers,
    "hidden": lambda model: model.hidden,
    "heads": lambda model: model.heads,
    "kv_heads": lambda model: model.kv_heads,
    "ffn": lambda model: model.ffn,
    "vocab": lambda model: model.vocab,
    "global_batch": lambda model: model.defaults.global_batch,
    "sequence_length": lambda model: model.defaults.sequence_length,
}
_MACHINE_FIELDS: dict[str, Callable[[Machine], object]] = {
    "accelerator": lambda machine: machine.accelerator.name,
    "memory_gib": lambda machine: machine.accelerator.memory_gib,
    "bf16_tflop_per_s": lambda machine: machine.accelerator.peak_tflops.get("bf16"),
    "ranks_per_node": lambda machine: machine.launcher.ranks_per_node,
    "tiers": lambda machine: ", ".join(tier.name for tier in machine.tiers),
    "outermost_gb_per_s": lambda machine: machine.tiers[-1].bandwidth_gb_per_s,
    "library": lambda machine: f"{machine.library.name} {machine.library.version}",
}
_FIELDS: dict[str, dict[str, Callable[[Any], object]]] = {"model": _MODEL_FIELDS, "machine": _MACHINE_FIELDS}


def documents_table(kind: str, documents: Sequence[tuple[str, Loaded[Any]]]) -> str:
    """One row per document, under the name it is found by; as wide as it needs: no word of it is ever broken."""
    return text_table(*documents_cells(kind, documents))


def documents_cells(kind: str, documents: Sequence[tuple[str, Loaded[Any]]]) -> tuple[list[Heading], list[list[str]]]:
    """Headings and cells of that table."""
    columns = _COLUMNS[kind]
    rows = [[name, *(show(loaded.document) for _, show in columns)] for name, loaded in documents]
    return [Heading(title, left=title in _LEFT) for title in ("name", *(title for title, _ in columns))], rows


def documents_records(kind: str, documents: Sequence[tuple[str, Loaded[Any]]]) -> tuple[list[str], list[list[object]]]:
    """Names of fields, units included, and their values of each document: what data frames hold."""
    fields = _FIELDS[kind]
    rows = [[name, *(read(loaded.document) for read in fields.values())] for name, loaded in documents]
    return ["name", *fields], rows


def documents_json(kind: str, documents: Sequence[tuple[str, Loaded[Any]]]) -> dict[str, object]:
    """All documents of a kind with name, file and hash, ready for `json.dumps`."""
    entries = [{"name": name, **origin_json(loaded)} for name, loaded in documents]
    return {"schema": f"axonn-tune/{kind}-list/1", f"{kind}s": entries}


def origin_json(loaded: Loaded[Any]) -> dict[str, object]:
    """A document with the file it came from and its hash."""
    document = loaded.document.model_dump(mode="json", by_alias=True)
    parameters = getattr(loaded.document, "parameters", None)
    counted = {} if parameters is None else {"parameters": parameters}
    return {"path": str(loaded.path), "sha256": loaded.sha256, **counted, "document": document}


def origin_lines(loaded: Loaded[Any]) -> list[str]:
    """The same as comment lines for a document shown as YAML."""
    lines = [f"From {loaded.path}", f"sha256 {loaded.sha256}"]
    parameters = getattr(loaded.document, "parameters", None)
    return lines if parameters is None else [*lines, f"{parameters:,} parameters ({show_count(parameters)})"]


def show_count(count: int) -> str:
    """A count for a person: `76.8 B`, `10.9 M`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return str(count)


def _tier(tier: Tier) -> str:
    size = "" if tier.ranks is None else f" {tier.ranks} ranks"
    return f"{tier.name}{size} {tier.bandwidth_gb_per_s:g} GB/s"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:g}"
