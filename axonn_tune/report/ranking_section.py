"""A ranking as a section: where time goes, the table of its rows, each of the first in detail."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence

from axonn_tune.cost.price import PricedLayout
from axonn_tune.cost.work import hidden_s, work_by_kind
from axonn_tune.grid import ALL_AXES
from axonn_tune.program.dimensions import MFU_CONVENTION
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.documents import ConfigurationDetail, detailed, inputs_of
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.ranking.priced import Priced, Row
from axonn_tune.report import page
from axonn_tune.report.commands import explain_command
from axonn_tune.report.configuration import LayoutWords, detail_blocks, launch_command, outcome, over_axis
from axonn_tune.report.explain import memory_items
from axonn_tune.report.output import Column, Json, axis_name, fields_of, unbroken, words
from axonn_tune.report.ranking import (
    COLUMNS,
    METRICS,
    SHORTEST,
    TIED,
    axis_columns,
    document_head,
    entry_fields,
    entry_json,
    priced_remark,
    rank_column,
    shown_row,
    with_framework,
)
from axonn_tune.report.remarks import ranking_remarks, ranking_verdict
from axonn_tune.units import counted

RANKING_SCHEMA = "axonn-tune/ranking/1"
_LOGGED = ("log", "label", "counts", "scores", "weights", "source")

DETAILED, _WITH_INTERVALS = 10, 100
"""How many configurations, from the first, are shown with timeline, memory and terms."""
MOST_ROWS = 12_000
"""More rows than this would make the file too large to send."""
FEASIBLE, TIE = "feasible", f"{TIED} within model error of the first"
REJECTED = "rejected: "
_HOLES = {key: f"{{{key}}}" for key in (*ALL_AXES, "chunks", "order", "micro_batch", "kept_layers")} | {
    "recompute": "{recompute_pins}"
}
"""Where a page fills in the cells of a row."""
_RECOMPUTE_PINS = words("recompute_pins", "recompute", "The recompute set, as a command needs it.", hidden=True)
PAGE_COLUMNS = tuple(
    COLUMNS[key]
    for key in (
        *("rank", "iteration_s", "communication_s", "exposed_communication_s", "low_s", "high_s", "mfu"),
        "logged_tflops_per_gpu",
        *("memory_bytes", "micro_batch", "recompute", "recompute_layers", "kept_layers", "wide_order"),
        *("compute_s", "tokens_per_s", "hfu"),
        *("gpu_hours", "node_hours", "days", "cost", "energy_mwh", "goodput"),
        *("grad_accumulation", "state", "rejected_because", "order"),
    )
)
_FILTERS = {"recompute": "recompute", "wide_order": "rank order", "state": "state"}


def ranking_section(document: Json, *, identity: str, source: str, picked: Json | None = None) -> Json:
    """The section of a ranking document; `picked`: a configuration of its own to show first, as of a launch config.

    `source` is what errors call the document.
    """
    inputs = inputs_of(document, source=source)
    configs = _listed(document["configs"])
    layouts = LayoutWords.of(document, document["configs"])
    pins = layouts.pins
    picked = picked and next((one for one in configs[:DETAILED] if pins(one) == pins(picked)), picked)
    found = _details(configs, inputs, picked=picked)
    opens = f"{identity}-configuration"
    panel = _configurations(found, configs, inputs, identity=opens, picked=picked, layouts=layouts, source=source)
    meanings = [(unbroken(column.label), column.meaning) for column in _columns(layouts) if not column.hidden]
    pieces = [
        *([shares_figure(found, picked=picked, layouts=layouts)] if found else []),
        *page.notes(_remarks(document, configs), title="How sure, and what was searched"),
        _ranking_table(configs, document, identity=identity, opens=opens if configs else "", layouts=layouts),
        *([panel] if configs or found else []),
        page.fold("What the columns mean", [page.facts(meanings)]),
        *page.provenance_folds(document, source=source),
    ]
    first = picked or next((config for config in configs if config["feasible"]), None)
    return page.section(
        identity,
        f"{document['model']['name']} on {document['gpus']:,} × {document['machine']['name']}"
        f"{with_framework(layouts.framework)}",
        subtitle=page.subtitle(document, f"ranked by {METRICS[document['rank_by']]}"),
        verdict=_verdict(document, first, layouts),
        blocks=pieces,
    )


def _verdict(document: Json, first: Json | None, layouts: LayoutWords) -> list[str]:
    """The configuration to take with its step and interval, then the sentences of the document that say why."""
    if first is None:
        return ["No layout is feasible; the table says why for each."]
    return [f"{layouts.title(first)}: {outcome(first)}", *document.get("verdict", [])]


def _columns(layouts: LayoutWords) -> list[Column]:
    """Columns of the table: the rank, the layout, the rest; with the dispatcher of experts and what overlaps it."""
    experts = [COLUMNS[key] for key in ("dispatcher", "expert_overlap")] if "expert" in layouts.axes else []
    named = axis_columns(layouts.framework, layouts.axes)
    return [PAGE_COLUMNS[0], *named, *PAGE_COLUMNS[1:], *experts, _RECOMPUTE_PINS]


def _listed(configs: Sequence[Json]) -> list[Json]:
    """What fits into the page: the first of the feasible, then rejected ones."""
    feasible = [config for config in configs if config["feasible"]]
    rejected = [config for config in configs if not config["feasible"]]
    return [*feasible[:MOST_ROWS], *rejected[: max(MOST_ROWS - len(feasible), 0)]]


def _remarks(document: Json, configs: Sequence[Json]) -> list[str]:
    """What else the document says in words, and what the page leaves out."""
    # In the terminal another option lists rejected grids; here the table does.
    rest = [line for line in document.get("remarks", []) if line not in document.get("verdict", [])]
    said = [line.replace("--all lists", "the table lists") for line in rest]
    if left := len(document["configs"]) - len(configs) + document.get("left_out", 0):
        said.append(f"{counted(left, 'more row')} are left out of this page; --format csv or json has all.")
    return said


def _details(configs: Sequence[Json], inputs: Inputs, *, picked: Json | None) -> list[ConfigurationDetail]:
    """The configuration picked, then the first of the ranking."""
    wanted = [*([picked] if picked else []), *(config for config in configs[:DETAILED] if config is not picked)]
    return [one for config in wanted if (one := detailed(config, inputs)) is not None]


def _ranking_table(configs: Sequence[Json], document: Json, *, identity: str, opens: str, layouts: LayoutWords) -> Json:
    others = [rank_column(cost) for cost in (configs[0].get("ranks") or {})] if configs else []
    rows = [
        {**shown_row(config, layouts.framework), "state": state_of(config), "recompute_pins": _recompute_pins(config)}
        for config in configs
    ]
    used = [column for column in _columns(layouts) if any(row.get(column.key) not in (None, "") for row in rows)]
    filters = {**{axis: layouts.framework.called(axis) for axis in layouts.axes}, **_FILTERS}
    note = f"Ranked by {METRICS[document['rank_by']]}. Click a heading to sort, a row for its details."
    if any(config["feasible"] and config["low_s"] is None for config in configs):
        note += f" 80% intervals: of the first {_WITH_INTERVALS}."
    columns, name = [*used[:1], *others, *used[1:]], f"{identity}-table"
    return page.table(name, "Ranking", columns, rows, note=note, filters=filters, opens=opens, tall=True)


def _recompute_pins(config: Json) -> str | None:
    """Set, with the option for its layers where only some have it, and that of expert overlap; None of what has no
    recompute."""
    recompute, some = config.get("recompute"), config.get("recompute_layers")
    named = f"{recompute} --recompute-layers {some}" if some else recompute
    return f"{named} --expert-overlap" if config.get("expert_overlap") else named


def state_of(config: Json) -> str:
    """Whether a configuration can be used, in a word or two."""
    if not config["feasible"]:
        # The constraint that it breaks: the first, if there are several.
        first = (config["rejected_because"] or ["rejected"])[0]
        return f"{REJECTED}{first.partition(':')[0]}"
    return TIE if config["tie"] and config["rank"] != 1 else FEASIBLE


def _configurations(
    found: Sequence[ConfigurationDetail],
    configs: Sequence[Json],
    inputs: Inputs,
    *,
    identity: str,
    picked: Json | None,
    layouts: LayoutWords,
    source: str,
) -> Json:
    """Details that the table opens, one configuration at a time, or two beside each other."""
    explain = explain_command(inputs)
    places = {id(config): place for place, config in enumerate(configs)}
    items = [
        {
            "row": places.get(id(one.config)),
            "title": f"{'The launch config: ' if one.config is picked else ''}{layouts.title(one.config)}",
            "short": layouts.short(one.config, launch=one.config is picked),
            "spent": spent(one),
            "blocks": detail_blocks(one, explain=explain, layouts=layouts, source=source),
        }
        for one in found
    ]
    given = [shlex.quote(text) for one in found if (text := one.config.get("pipeline_layout"))]
    pins = layouts.pins(_HOLES | {"pipeline_layout": given[0] if given else ""})
    commands = {
        "Explain it": " ".join([shlex.join(explain), *pins]),
        "Write what starts it": launch_command(explain, pins, inputs),
    }
    return {
        "kind": "configurations",
        "id": identity,
        "title": "One configuration",
        "items": items,
        "rowTitle": f"#{{rank}}: {layouts.sizes(_HOLES)}",
        "rejectedTitle": f"{layouts.sizes(_HOLES)}, infeasible",
        "elsewhere": "This page has timeline, memory, terms and launch config only for the first of the ranking; these"
        " commands have them for this one.",
        "commands": commands if explain else {},
    }


def ranking_document(
    inputs: Inputs, ranked: Priced, entries: Sequence[Row], *, marked: int = 0, known: int = 0
) -> Json:
    """The whole document; entries include terms if they were listed with them.

    marked: rows from the first on that remarks are about, 0 for all; known: those with the ends of their intervals, for
    which each is priced again, 0 for all.
    """
    problem, best = ranked.problem, ranked.fastest_elsewhere()
    logged = problem.framework.logged
    # Behind the rows of the ranking stand the first of the formats that none of them has.
    listed = min(sum(isinstance(entry, PricedLayout) for entry in entries), len(ranked))
    rows = [[place] for place in range(min(marked or listed, listed))]
    remarks = (priced_remark(ranked), *ranking_remarks(ranked, rows))
    ends = [{} if place < known or not known else {"low_s": None, "high_s": None} for place in range(len(entries))]
    return {
        **document_head(RANKING_SCHEMA, inputs),
        "cost": ranked.cost,
        "rank_by": problem.rank_by,
        "memory_limit_bytes": memory_limit_bytes(problem.machine.accelerator),
        "mfu_convention": MFU_CONVENTION,
        "logged_convention": None if logged is None else fields_of(logged, _LOGGED),
        "searched": fields_of(ranked.searched, ("grids", "candidates", "feasible", "unlisted", "rejected", "seconds")),
        **({"interrupted": True} if ranked.interrupted else {}),
        "ties_with_first": ranked.ties,
        # Without the mark of a row that documents and pages have under a key of its own.
        "verdict": [line.removeprefix(f"{SHORTEST} ") for line in ranking_verdict(ranked)],
        "remarks": [line.removeprefix(f"{SHORTEST} ") for line in remarks],
        "configs": [entry_json(entry, ranked, **own) for entry, own in zip(entries, ends, strict=True)],
        "shortest_step": None if best is None else entry_fields(best),
    }


def ranking_of(inputs: Inputs, ranked: Priced) -> Json:
    """A search as the ranking document with what fits into a page, the terms of those shown in detail, and the 80%
    intervals of the first hundred.

    `left_out`: how many more are ranked than it lists.
    """
    first = ranked.listed(top=DETAILED, terms=True)
    entries = (*first, *ranked.listed(top=MOST_ROWS, rejected=True)[len(first) :])
    found = ranking_document(inputs, ranked, entries, marked=DETAILED, known=_WITH_INTERVALS)
    return {**found, "left_out": max(len(ranked) - MOST_ROWS, 0)}


BREAKDOWN, BUBBLE = "Step time: breakdown and 80% interval", "pipeline bubble"
_OTHERS, _WORTH = "all other collectives", 0.005
"""Collectives that take less than this share of every step shown are one."""


def spent(one: ConfigurationDetail) -> list[Json]:
    """What a configuration spends of time and memory, by the same names in all, to compare it with another."""
    priced, framework = one.priced, one.inputs.problem.framework
    exposed = _term_sums(one, exposed=True).items()
    step = {**_work_sums(one), **{f"exposed {over_axis(key, framework)}": exposed_s for key, exposed_s in exposed}}
    if priced.bubble_s:
        # Terms are those of all pipeline stages, the step's wait that of one.
        step[BUBBLE] = priced.bubble_s
        step["the rest"] = priced.iteration_s - sum(step.values())
    *items, _ = memory_items(priced)
    return [
        {"title": "Step", "unit": "s", "values": step},
        {"title": "Peak memory per GPU", "unit": "bytes", "values": dict(items)},
    ]


def shares_figure(found: Sequence[ConfigurationDetail], *, picked: Json | None, layouts: LayoutWords) -> Json:
    """One pair of bars per configuration: the step with its interval above, overlapped communication below."""
    exposed, hidden = (_with_others([_term_sums(one, exposed=side) for one in found], found) for side in (True, False))
    framework, rows = layouts.framework, []
    for one, waits, overlaps in zip(found, exposed, hidden, strict=True):
        parts = _work_sums(one) | ({BUBBLE: one.priced.bubble_s} if one.priced.bubble_s else {})
        parts |= {over_axis(key, framework): seconds for key, seconds in waits.items()}
        name = layouts.short(one.config, launch=one.config is picked)
        row = page.step_row(name, one.config, parts, job=one.inputs.problem)
        rows.append({**row, "under": {over_axis(key, framework): seconds for key, seconds in overlaps.items()}})
    keys = sorted({key for one in (*exposed, *hidden) for key in one}, key=lambda key: (key.rpartition(" ")[2], key))
    colors = {**page.BY_KIND, BUBBLE: page.MUTED, **{over_axis(key, framework): page.term_color(key) for key in keys}}
    tied = f" {TIED}: within model error of #1." if any(TIED in row["name"] for row in rows) else ""
    note = (
        f"Axes of size 1 are left out of names.{tied} Upper bar: the step, which is computation, then exposed "
        "communication by collective. Whiskers: its 80% interval; the thick part is the row's own, which is what tells "
        "rows apart. Lower bar: overlapped communication, which lengthens the step only by the compute slowdown that "
        "it causes."
    )
    return page.stacks(BREAKDOWN, rows, colors, axis="s per step", note=note)


def _with_others(sums: Sequence[dict[str, float]], found: Sequence[ConfigurationDetail]) -> list[dict[str, float]]:
    """The same with what is nowhere worth a color of its own put together."""
    steps = [one.priced.iteration_s for one in found]
    pairs = [(key, seconds, step_s) for one, step_s in zip(sums, steps, strict=True) for key, seconds in one.items()]
    large = {key for key, seconds, step_s in pairs if seconds > _WORTH * step_s}
    return [_sums((key if key in large else _OTHERS, seconds) for key, seconds in one.items()) for one in sums]


def _work_sums(one: ConfigurationDetail) -> dict[str, float]:
    """Seconds by kind of computation."""
    return _sums((each.kind, each.seconds) for each in work_by_kind(one.priced))


def _term_sums(one: ConfigurationDetail, *, exposed: bool) -> dict[str, float]:
    """Seconds by collective and axis: exposed or overlapped."""
    seconds = [term.exposed_s if exposed else hidden_s(term) for term in one.priced.awaited]
    names = [f"{term.op} over {axis_name(term.axis)}" for term in one.priced.awaited]
    return {key: found_s for key, found_s in _sums(zip(names, seconds, strict=True)).items() if found_s}


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for key, seconds in pairs:
        found[key] += seconds
    return found
