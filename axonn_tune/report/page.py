"""One HTML file: what its sections are made of, where every number comes from, and how it is written.

A page has sections; a section has blocks. They are plain JSON, the only contract between this package and
`static/*.js`. A color that starts with `--` is a variable of `style.css`, so that figures follow the theme. Template,
style, scripts, data and plotly are all inside the file.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from axonn_tune.cost.compute import ATTENTION, ELEMENT_WISE, GEMMS, OFFLOAD, OPTIMIZER, SCANS
from axonn_tune.cost.uncertainty import own_bound_s
from axonn_tune.cost.work import CONTENDED, HOST
from axonn_tune.errors import EnvironmentProblem
from axonn_tune.files import write_text_atomically
from axonn_tune.job import Job
from axonn_tune.report.output import Column, Json, json_text, known_value, seconds_cells, words
from axonn_tune.specs.document import Document
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Accelerator, Library, Machine, PaperTable, Tier, Uncertainty
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.units import counted, show_interval, show_seconds
from axonn_tune.vocabulary import VERSION

Cell: TypeAlias = str | int | float | None
SORTS = "Click a heading to sort."
MISSING = "a report needs plotly, which is not installed: pip install '.[report]' in the checkout"
_SCRIPTS = ("format.js", "table.js", "drawings.js", "figures.js", "blocks.js", "page.js")

# Colors by meaning, as variables of `style.css`, `--name` or `--name/opacity`; the same in every figure.
COMPUTATION, BUBBLE, WAIT, EXPOSED = "--compute", "--muted", "--wait", "--cost"
ACCENT, MUTED = "--accent", "--muted"
PREDICTED, MEASURED = "--predicted", "--measured"
BY_KIND = {
    GEMMS: "--compute",
    ATTENTION: "--compute-2",
    SCANS: "--compute-2/0.6",
    ELEMENT_WISE: "--compute-3",
    OPTIMIZER: "--compute-4",
    OFFLOAD: "--wait",
    CONTENDED: "--compute/0.35",
    HOST: "--compute/0.2",
}
_STRENGTH = {"all_gather": 1.0, "reduce_scatter": 0.72, "all_reduce": 0.45}
_AXES = {"x": "--axis-x", "y": "--axis-y", "z": "--axis-z", "data": "--axis-data"}


def section(
    identity: str,
    title: str,
    *,
    subtitle: str = "",
    verdict: Sequence[str] = (),
    cards: Sequence[Json] = (),
    blocks: Sequence[Json],
) -> Json:
    """One source of the report; `identity` is what links lead to.

    subtitle: what was priced or measured, in a line. verdict: the answer in sentences, the first of them large.
    """
    return {
        **{"id": identity, "title": title, "subtitle": subtitle},
        **{"verdict": list(verdict), "cards": list(cards), "blocks": list(blocks)},
    }


def subtitle(document: Json, *more: str) -> str:
    """`H100-SXM5-80GB · 512 sequences of 8,192 tokens · bf16`, and what else is said of a document of results."""
    workload = document["workload"]
    sequences = counted(workload["global_batch"], "sequence")
    of = f"{sequences} of {counted(workload['sequence_length'], 'token')}"
    more = (*more, *([workload["lengths"]["packing"]] if workload.get("lengths") else []))
    assumed = ["machine assumed, no --machine"] if document.get("machine_assumed") else []
    return " · ".join([document["machine"]["accelerator"]["name"], *assumed, of, workload["precision"], *more])


def card(label: str, value: str, *, note: str = "") -> Json:
    """One number, large."""
    return {"label": label, "value": value, "note": note}


def cards(found: Sequence[Json]) -> Json:
    """Several of them."""
    return {"kind": "cards", "cards": list(found)}


def text(sentences: Sequence[str], *, title: str = "") -> Json:
    """Sentences, one paragraph each."""
    return {"kind": "text", "title": title, "sentences": list(sentences)}


def notes(sentences: Sequence[str], *, title: str = "Notes") -> list[Json]:
    """A block of them, if there are any."""
    return [text(sentences, title=title)] if sentences else []


def facts(rows: Sequence[tuple[str, str]]) -> Json:
    """Names and values."""
    return {"kind": "facts", "rows": [list(row) for row in rows]}


def command(line: str, *, title: str) -> Json:
    """A command line to copy, or a whole file."""
    return {"kind": "command", "title": title, "line": line}


def fold(title: str, blocks: Sequence[Json]) -> Json:
    """Blocks behind a title, closed until it is clicked."""
    return {"kind": "fold", "title": title, "blocks": list(blocks)}


def bars(
    title: str, unit: str, rows: Sequence[Sequence[object]], *, note: str = "", limit: float | None = None
) -> Json:
    """A figure of a bar for each name, value, text at its end and color, and its interval's ends above and below the
    value, where rows have them.

    unit: `s`, `bytes` or another, which is shown as it is. limit: where a dashed line is.
    """
    return {"kind": "bars", "title": title, "note": note, "unit": unit, "rows": list(map(list, rows)), "limit": limit}


def stacks(
    title: str,
    rows: Sequence[Json],
    series: Mapping[str, str],
    *,
    unit: str = "s",
    note: str = "",
    axis: str | None = None,
    limit: float | None = None,
) -> Json:
    """A figure of a bar for each row, made of parts.

    rows: `name`; `parts`, values by series; `under`, those of a thin bar below it; `words` at its end unless its sum;
    `notes` on parts; of steps as `step_row`. series: colors by name, in their order. axis: its title, the unit unless
    given.
    """
    drawn = {"unit": unit, "rows": list(rows), "series": dict(series), "axis": axis, "limit": limit}
    return {"kind": "stacks", "title": title, "note": note, **drawn}


def step_row(name: str, step: Json, parts: Mapping[str, float], *, job: Job) -> Json:
    """A row of `stacks` for a configuration of the contract: its step, 80% interval, and the half that no other has."""
    row = {"name": name, "parts": dict(parts), "words": show_seconds(step["iteration_s"]), "at": step["iteration_s"]}
    if step["low_s"] is None:
        return row
    own_s = own_bound_s(job, step_s=step["iteration_s"], waiting_s=step["exposed_communication_s"] or 0.0)
    return {**row, "low": step["low_s"], "high": step["high_s"], "own": own_s}


def interval_words(config: Json) -> str:
    """`80%: 52 s to 86.6 s`; nothing for what has no interval."""
    low_s, high_s = config["low_s"], config["high_s"]
    return "" if low_s is None or high_s is None else show_interval(low_s, high_s)


def table(
    identity: str,
    title: str,
    columns: Sequence[Column],
    rows: Sequence[object],
    *,
    note: str = "",
    filters: Mapping[str, str] = MappingProxyType({}),
    opens: str = "",
    tall: bool = False,
) -> Json:
    """A table that sorts; a click opens a row in block `opens`.

    filters: labels of choices by column, above a `tall` one, beside a search box.
    """
    found = [column_json(column, [known_value(row, column.key) for row in rows]) for column in columns]
    choices = [
        {"column": key, "label": label, "options": options}
        for key, label in filters.items()
        if len(options := sorted({value for row in rows if (value := known_value(row, key)) not in (None, "")})) > 1
    ]
    return {
        "kind": "table",
        "id": identity,
        "title": title,
        "note": note,
        "rows": len(rows),
        "columns": found,
        "filters": choices,
        "opens": opens,
        "tall": tall,
    }


def column_json(column: Column, values: Sequence[Cell]) -> Json:
    """A column with its values, every digit of them; repeated words are kept once."""
    numbers = [value / column.per for value in values if isinstance(value, int | float)]
    decimals = column.decimals
    if decimals is None:
        decimals = max((len(cell.partition(".")[2]) for cell in seconds_cells(numbers)), default=0)
    ends = [f"{number:,.{decimals}f}" for number in (min(numbers), max(numbers))] if numbers else []
    label = column.label.replace("\n", " ")
    # A heading breaks at spaces, a number nowhere.
    unbreakable = [*label.split(), *ends]
    found: Json = {
        "key": column.key,
        "label": label,
        "meaning": column.meaning,
        "text": column.text,
        "hidden": column.hidden,
        "per": column.per,
        "decimals": decimals,
        "width": max(*map(len, unbreakable), column.width_ch if column.text else 0),
    }
    if not column.text:
        return {**found, "values": list(values)}
    known = list(dict.fromkeys(value for value in values if value is not None))
    places = {word: place for place, word in enumerate(known)}
    return {**found, "words": known, "values": [None if value is None else places[value] for value in values]}


def term_color(term: str) -> str:
    """The color of `all_gather over z`: of its axis, one for several; collectives differ in strength."""
    op, _, axis = term.partition(" over ")
    if not axis:
        return WAIT
    return f"{_AXES.get(axis, '--axis-several')}/{_STRENGTH.get(op, 1.0)}"


_KEYS = (
    words("key", "key", "Its key, with the unit in its name.", 26),
    words("value", "value", "Its value.", 30),
    words("meaning", "meaning", "What it is.", 70),
)
_NUMBERS = (
    words("section", "section", "Part of the machine profile.", 18),
    *_KEYS[:2],
    words("kind", "kind", "peak: datasheet; measured; fitted; assumed; fact: a count.", 9),
    words("source", "source", "Where it comes from.", 70),
    _KEYS[2],
)
_APART = frozenset({"schema", "sources", "path", "sha256"})


def machine_fold(machine: Json) -> Json:
    """Every number of a machine profile, with kind and source."""
    title = f"Machine: {machine['name']}, every number with its source"
    return fold(title, [facts(_origin_facts(machine)), table("", "", _NUMBERS, list(_machine_rows(machine)))])


def model_fold(model: Json) -> Json:
    """The model document."""
    return fold(f"Model: {model['name']}", [facts(_origin_facts(model)), _keys_table(model, Model)])


def workload_fold(workload: Json) -> Json:
    """What is trained in a step."""
    return fold("Workload", [_keys_table(workload, Workload)])


def launch_fold(launch: Launch) -> Json:
    """What a launch config says beside model and workload, and what wrote it."""
    document = launch.model_dump(mode="json", by_alias=True)
    apart = {"model", "workload", "predicted", "provenance"}
    shown = {key: value for key, value in document.items() if key not in apart}
    written = facts([("written by", launch.provenance.command)])
    return fold(f"Launch config: {launch.name}", [written, _keys_table(shown, Launch)])


def origin_fold(rows: list[tuple[str, str]]) -> Json:
    """Versions, command line, files."""
    return fold("Versions, files and command", [facts(rows)])


def _origin_facts(document: Json) -> list[tuple[str, str]]:
    known = [("description", "description"), ("path", "file"), ("sha256", "SHA-256 of it, what it extends, overrides")]
    return [(label, str(document[key])) for key, label in known if document.get(key)]


def _keys_table(document: Json, schema: type[Document]) -> Json:
    return table("", "", _KEYS, list(_document_rows(document, schema)))


def _machine_rows(machine: Json) -> Iterator[Json]:
    sections: list[tuple[str, Json, type[Document]]] = [
        ("accelerator", machine["accelerator"], Accelerator),
        *((f"tier {tier['name']}", tier, Tier) for tier in machine["tiers"]),
        ("library", machine["library"], Library),
        ("uncertainty", machine["uncertainty"], Uncertainty),
        *([("paper", machine["paper"], PaperTable)] if machine.get("paper") else []),
    ]
    for name, section, schema in sections:
        for row in _document_rows(section, schema):
            yield {"section": name, **row, **(section["sources"].get(row["key"]) or {})}
    rest = {key: value for key, value in machine.items() if key in ("launcher", "measured")}
    yield from ({"section": row["key"], **row} for row in _document_rows(rest, Machine))


def _document_rows(document: Json, schema: type[Document]) -> Iterator[Json]:
    fields = {field.alias or name: field for name, field in schema.model_fields.items()}
    for key, value in document.items():
        if key not in _APART and value is not None and key in fields:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield {"key": key, "value": shown, "meaning": fields[key].description or ""}


def origin_rows(document: Json, source: str) -> list[tuple[str, str]]:
    """What document it is, and what wrote it."""
    return [("source", source), ("schema", document["schema"]), ("axonn-tune", document["tool_version"])]


def provenance_folds(document: Json, *, source: str) -> list[Json]:
    """Where the numbers of a document of results come from."""
    precision = document.get("gemm_format", document["workload"]["precision"])
    peak = document["machine"]["accelerator"]["peak_tflops"][precision]
    rows = [
        *origin_rows(document, source),
        ("cost model", document.get("cost", "alpha-beta")),
        ("MFU and HFU", document.get("mfu_convention", "")),
        ("peak", f"{peak:g} TFLOP/s a GPU in {precision}"),
        ("assumed of the machine", "; ".join(document["machine"].get("assumed", ()))),
    ]
    return [
        machine_fold(document["machine"]),
        model_fold(document["model"]),
        workload_fold(document["workload"]),
        origin_fold([row for row in rows if row[1]]),
    ]


def write_page(path: str | Path, sections: Sequence[Json], *, command: str) -> None:
    """Write the report; EnvironmentProblem without plotly, else errors as of `write_text_atomically`."""
    write_text_atomically(path, page_text(sections, command=command))


def require_plotly() -> None:
    """EnvironmentProblem if there is no plotly: before work is done that would be lost."""
    from importlib.util import find_spec

    if find_spec("plotly") is None:
        raise EnvironmentProblem(MISSING)


def page_text(sections: Sequence[Json], *, command: str) -> str:
    """The whole file as text; EnvironmentProblem without plotly."""
    require_plotly()
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    made = datetime.now(UTC).isoformat(timespec="seconds")
    data = {"made": f"Written by axonn-tune {VERSION}, {made}", "command": command, "sections": list(sections)}
    title = sections[0]["title"] if len(sections) == 1 else f"{len(sections)} results"
    parts = {
        "TITLE": escape(f"axonn-tune: {title}"),
        "STYLE": _static_file("style.css"),
        # No HTML parser takes a part of it for the end of the element it stands in.
        "DATA": json_text(data, separators=(",", ":")).rstrip("\n").replace("<", "\\u003c"),
        # Compressed it is four times smaller, and browsers unpack it by themselves.
        "PLOTLY": base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode("ascii"),
        "SCRIPT": "\n".join(map(_static_file, _SCRIPTS)),
    }
    text = _static_file("template.html")
    for name, value in parts.items():
        before, mark, after = text.partition(f"%{name}%")
        assert mark, f"the template has no %{name}%"
        text = before + value + after
    return text


def _static_file(name: str) -> str:
    return resources.files("axonn_tune.report").joinpath("static", name).read_text(encoding="utf-8")
