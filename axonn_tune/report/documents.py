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


def models_table(models: Sequence[tuple[str, Loaded[Model]]]) -> str:
    """One row per model, under the name it is found by."""
    return _table([title for title, _ in _MODEL_COLUMNS], _rows(models, _MODEL_COLUMNS), left={"family"})


def machines_table(machines: Sequence[tuple[str, Loaded[Machine]]]) -> str:
    """One row per machine, under the name it is found by."""
    titles = [title for title, _ in _MACHINE_COLUMNS]
    return _table(titles, _rows(machines, _MACHINE_COLUMNS), left={"accelerator", titles[4], "library"})


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


def _rows(documents: Sequence[tuple[str, Loaded[Any]]], columns: Sequence[tuple[str, Any]]) -> list[list[str]]:
    return [[name, *(show(loaded.document) for _, show in columns)] for name, loaded in documents]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, left: set[str]) -> str:
    """Plain aligned text, as wide as it needs: no word of it is ever broken."""
    headings = [Heading("name", left=True), *(Heading(title, left=title in left) for title in titles)]
    return text_table(headings, rows)


def _tier(tier: Tier) -> str:
    size = "" if tier.ranks is None else f" {tier.ranks} ranks"
    return f"{tier.name}{size} {tier.bandwidth_gb_per_s:g} GB/s"


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:g}"
