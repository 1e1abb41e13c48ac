"""One HTML file: what its sections are made of, where every number comes from, and how it is written.

A page has sections; a section has blocks. They are plain JSON, the only contract between this package and
`static/*.js`. A color that starts with `--` is a variable of `style.css`, so that figures follow the theme. Template,
style, scripts, data and plotly are all inside the file.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from axonn_tune import __version__
from axonn_tune.cost.price import ATTENTION, CONTENDED, ELEMENT_WISE, GEMMS, OPTIMIZER
from axonn_tune.cost.uncertainty import own_bound_s
from axonn_tune.errors import EnvironmentProblem
from axonn_tune.files import write_text_atomically
from axonn_tune.report.output import Column, Json, json_text, known_value, seconds_cells, words
from axonn_tune.specs.document import Document
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Accelerator, Library, Machine, PaperTable, Tier, Uncertainty
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.units import counted, show_interval, show_seconds

Cell: TypeAlias = str | int | float | None
SORTS = "Click a heading to sort."
OWN = "its own part"
"""What of an interval other bars do not share, in a legend."""
SAID = "%{text}<extra></extra>"
MISSING = "a report needs plotly, which is not installed: pip install '.[report]' in the checkout"
_SCRIPTS = ("format.js", "table.js", "figures.js", "blocks.js", "page.js")
LABELLED = 1.25
"""What a figure is wider than its bars, for the words beside them."""
_FAR = 100.0
"""Values so many times the smallest take no digits from it: a page lists rows far worse than those one compares."""
_DECADES_ONLY = 300.0
"""From this ratio of the ends of a logarithmic axis on, powers of ten are enough."""

# Colors by meaning, as variables of `style.css`, `--name` or `--name/opacity`; the same in every figure.
COMPUTATION, TEXT = "--compute", "--text"
ACCENT, MUTED, LIMIT, WAIT, PANEL = "--accent", "--muted", "--limit", "--wait", "--panel"
PREDICTED, MEASURED = "--predicted", "--measured"
BY_KIND = {
    GEMMS: "--compute",
    ATTENTION: "--compute-2",
    ELEMENT_WISE: "--compute-3",
    OPTIMIZER: "--compute-4",
    CONTENDED: "--compute/0.35",
}
SERIES = tuple(f"--series-{number}" for number in range(1, 9))
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
    return " · ".join([document["machine"]["accelerator"]["name"], of, workload["precision"], *more])


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


def figure(
    title: str,
    traces: Sequence[Json],
    *,
    layout: Mapping[str, Any],
    height: int,
    note: str = "",
    choices: Sequence[Json] = (),
) -> Json:
    """A plotly figure, drawn when it is seen."""
    return {
        "kind": "figure",
        "title": title,
        "note": note,
        "figure": {"data": list(traces), "layout": dict(layout)},
        "height": height,
        "choices": list(choices),
    }


def choice(label: str, traces: Mapping[int, Json], layout: Mapping[str, Any] = MappingProxyType({})) -> Json:
    """One way to look at a figure: what to change in some of its traces, by number, and in its layout."""
    return {"label": label, "traces": {str(key): value for key, value in traces.items()}, "layout": dict(layout)}


def named_axis(names: Sequence[str], *, below: float = 0.4, above: float = 0.6) -> Json:
    """A vertical axis with a row for each name, the first on top; below, above: room beyond the ends, in rows."""
    return {
        "tickvals": list(range(len(names))),
        "ticktext": list(names),
        "range": [len(names) - below, -above],
        "fixedrange": True,
    }


def upright(at: float, line: Mapping[str, Any]) -> Json:
    """A line over the whole height of a figure."""
    return {"type": "line", "xref": "x", "yref": "paper", "x0": at, "x1": at, "y0": 0, "y1": 1, "line": dict(line)}


def bar_trace(name: str, x: Sequence[float | None], y: Sequence[Any], *, color: object, **others: object) -> Json:
    """Horizontal bars; `text`, if given, is what pointing at each says."""
    said = {"textposition": "none", "hovertemplate": SAID} if "text" in others else {}
    marker = {"color": color}
    return {"type": "bar", "orientation": "h", "name": name, "x": x, "y": y, "marker": marker, **said, **others}


def named_bars(
    title: str,
    names: Sequence[str],
    values: Sequence[float],
    *,
    color: object,
    xaxis: Mapping[str, Any],
    note: str = "",
    shapes: Sequence[Json] = (),
    look: Mapping[str, Any] = MappingProxyType({}),
) -> Json:
    """A figure of horizontal bars, one for each name; look: more about the bars."""
    layout = {"showlegend": False, "xaxis": dict(xaxis), "yaxis": named_axis(names), "shapes": list(shapes)}
    trace = {**bar_trace(title, values, list(range(len(names))), color=color), **look}
    return figure(title, [trace], layout=layout, height=90 + 24 * len(names), note=note)


def point_trace(name: str, x: Sequence[Any], y: Sequence[Any], *, mode: str = "markers", **others: object) -> Json:
    """Marks, or a line through them; `text`, if given, is what pointing at each says, else nothing is said."""
    said = {"hovertemplate": SAID} if "text" in others else {"hoverinfo": "skip"}
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, **said, **others}


def line_trace(name: str, x: Sequence[Any], y: Sequence[Any], *, dash: str = "dash", **others: object) -> Json:
    """A thin line to compare with."""
    return point_trace(name, x, y, mode="lines", line={"color": MUTED, "width": 1, "dash": dash}, **others)


def error_bars(up: Sequence[float], down: Sequence[float]) -> Json:
    """Error bars of both sides; the median of two runs may round a hair beyond them."""
    both = {"array": [max(value, 0.0) for value in up], "arrayminus": [max(value, 0.0) for value in down]}
    return {"type": "data", "symmetric": False, **both}


def interval_traces(steps: Sequence[Json], y: Sequence[float], *, machine: Machine) -> list[Json]:
    """Whiskers over horizontal bars of steps: their 80% interval, and thicker the part that no other bar shares.

    steps: configurations of the contract. Below is a line in the color of the page, so that they are seen on any bar.
    """
    known = [
        (at, one, own_bound_s(machine, step_s=one["iteration_s"], waiting_s=one["exposed_communication_s"] or 0.0))
        for at, one in zip(y, steps, strict=True)
        if one["low_s"] is not None
    ]
    places, x = [at for at, _, _ in known], [one["iteration_s"] for _, one, _ in known]
    halves = [half_s for _, _, half_s in known]
    said = [f"{interval_words(one)}<br>±{show_seconds(half_s)} its own" for _, one, half_s in known]
    whole = error_bars(
        [one["high_s"] - one["iteration_s"] for _, one, _ in known],
        [one["iteration_s"] - one["low_s"] for _, one, _ in known],
    )
    own = error_bars(halves, halves)
    looks = (
        ("80% interval", whole, {"color": PANEL, "thickness": 4.6, "width": 5.5}),
        (OWN, own, {"color": PANEL, "thickness": 8, "width": 0}),
        ("80% interval", whole, {"color": TEXT, "thickness": 1.6, "width": 4}),
        (OWN, own, {"color": TEXT, "thickness": 5, "width": 0}),
    )
    found = []
    for name, ends, look in looks if known else ():
        symbol = {"symbol": "line-ew-open" if name == OWN else "line-ns-open", "size": 10, "color": TEXT}
        trace = point_trace(name, x, places, text=said, marker={**symbol, "line": {"width": 1.6}}, cliponaxis=False)
        found.append({**trace, "error_x": {**ends, **look}, "showlegend": look["color"] == TEXT})
    return found


def steps_axis(steps: Sequence[Json]) -> Json:
    """The axis of their times, with room for the times as words."""
    return {"title": {"text": "s per step"}, "range": [0, LABELLED * _reach_s(steps)]}


def _reach_s(steps: Sequence[Json]) -> float:
    """The end of the longest step, its interval included."""
    return float(max(max(one["high_s"] or 0.0, one["iteration_s"]) for one in steps))


def label_trace(steps: Sequence[Json], y: Sequence[float]) -> Json:
    """The time of each step in words, in a column at the right edge of horizontal bars."""
    at, texts = [LABELLED * _reach_s(steps)] * len(steps), [show_seconds(one["iteration_s"]) for one in steps]
    look = {"textposition": "middle left", "hoverinfo": "skip", "showlegend": False, "cliponaxis": False}
    return {"type": "scatter", "mode": "text", "x": at, "y": list(y), "text": texts, **look}


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
    decimals = _decimals(numbers) if column.decimals is None else column.decimals
    ends = [f"{number:,.{decimals}f}" for number in (min(numbers), max(numbers))] if numbers else []
    label = column.label.replace("\n", " ")
    # A heading breaks at spaces and soft hyphens, a number nowhere.
    unbreakable = [*label.replace("\u00ad", "- ").split(), *ends]
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


def _decimals(numbers: Sequence[float]) -> int:
    """As many decimals as the tables of the terminal have for the smallest and what is near it."""
    known = [abs(number) for number in numbers if number]
    if not known:
        return 0
    return len(seconds_cells([min(known), min(max(known), _FAR * min(known))])[0].partition(".")[2])


def term_color(op: str, axis: str) -> str:
    """The color of an axis, one for all groups over several; the collectives of an axis differ in strength."""
    return f"{_AXES.get(axis, '--axis-several')}/{_STRENGTH.get(op, 1.0)}"


def series_color(number: int) -> str:
    """The color of one of several lines."""
    return SERIES[number % len(SERIES)]


def round_ticks(low: float, high: float, *, unit: float = 1.0) -> list[float]:
    """1, 2 and 5 times powers of ten of `unit` between two positive values; the two themselves if there are fewer."""
    decades = range(math.floor(math.log10(low / unit)), math.ceil(math.log10(high / unit)) + 1)
    steps = (1, 2, 5) if high / low < _DECADES_ONLY else (1,)
    found = [step * 10.0**decade * unit for decade in decades for step in steps]
    shown = [value for value in found if low <= value <= high]
    return shown if len(shown) > 1 else list(dict.fromkeys([low, high]))


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
    precision = document["workload"]["precision"]
    peak = document["machine"]["accelerator"]["peak_tflops"][precision]
    rows = [
        *origin_rows(document, source),
        ("cost model", document.get("cost", "alpha-beta")),
        ("MFU and HFU", document.get("mfu_convention", "")),
        ("peak", f"{peak:g} TFLOP/s a GPU in {precision}"),
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
    data = {"made": f"Written by axonn-tune {__version__}, {made}", "command": command, "sections": list(sections)}
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
