"""A ranking as a section: the table of all grids, the map, where time goes, each of the first in detail."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from axonn_tune.grid import AXES
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.report.html import provenance
from axonn_tune.report.html.blocks import Cell, Column, Filter, Json, facts, fold, section, table
from axonn_tune.report.html.configuration import (
    Detailed,
    config_cards,
    detail_blocks,
    detailed,
    pins,
    short_name,
    title,
)
from axonn_tune.report.html.inputs import explain_words, inputs_of
from axonn_tune.report.html.shares import shares_figure
from axonn_tune.report.html.space_map import map_figure, reason_name
from axonn_tune.units import GIB, counted

DETAILED = 10
"""How many configurations, from the first, are shown with timeline, memory and terms."""
MOST_ROWS = 12_000
"""More rows than this would make the file too large to send."""
FEASIBLE, TIE = "feasible", "ties with the first"
REJECTED = "rejected: "

_PERCENT = 0.01
_PINNED = (
    *(f"--{axis} {{{axis}}}" for axis in AXES),
    *("--order {whole_order}", "--micro-batch {micro_batch}", "--recompute {recompute}", "--kept-layers {kept_layers}"),
)
_WHOLE_ORDER = Column("whole_order", "order", "Every axis, as a command needs it.", text=True, hidden=True)
COLUMNS = (
    Column("rank", "rank", "Place in the ranking; none for a rejected grid.", decimals=0, width_ch=6),
    Column("x", "x", "Ranks that split the output of a layer.", decimals=0, width_ch=5),
    Column("y", "y", "Ranks that split its input.", decimals=0, width_ch=5),
    Column("z", "z", "Ranks that split the batch and the stored weights.", decimals=0, width_ch=5),
    Column("data", "data", "Replicas, which split the batch alone.", decimals=0, width_ch=5),
    Column(
        "communication_s", "commu\u00adnication, s", "All collectives of a step and rank, hidden or not.", width_ch=10
    ),
    Column("exposed_communication_s", "exposed, s", "Time of a step in which nothing is computed.", width_ch=10),
    Column("iteration_s", "step, s", "One step, from start to end.", width_ch=10),
    Column("low_s", "80% from, s", "Lower end of the 80% interval of the step.", width_ch=10),
    Column("high_s", "80% to, s", "Upper end of the 80% interval of the step.", width_ch=10),
    Column(
        "mfu", "MFU, %", "Model FLOPs over the peak; recomputation not counted.", per=_PERCENT, decimals=1, width_ch=8
    ),
    Column(
        "memory_bytes",
        "memory, GiB",
        "Peak of one GPU; for a grid that does not fit, the least it needs.",
        per=GIB,
        width_ch=10,
    ),
    Column("micro_batch", "micro\u00adbatch", "Sequences one rank processes at a time.", decimals=0, width_ch=8),
    Column("recompute", "re\u00adcompute", "What the backward pass computes again.", text=True, width_ch=10),
    Column(
        "kept_layers",
        "kept layers",
        "Layers that keep their gathered weights for the backward pass.",
        decimals=0,
        width_ch=8,
    ),
    Column("order", "order", "Axes from the fastest-varying rank outwards.", text=True, width_ch=12),
    Column("compute_s", "compute, s", "Computation of a step and rank.", width_ch=10),
    Column("tokens_per_s", "tokens/s", "Tokens of all GPUs together.", decimals=0, width_ch=12),
    Column(
        "hfu", "HFU, %", "Executed FLOPs over the peak; recomputation counted.", per=_PERCENT, decimals=1, width_ch=8
    ),
    Column("grad_accumulation", "accumu\u00adlation", "Micro-batches in a step.", decimals=0, width_ch=9),
    Column(
        "state",
        "state",
        "Feasible, tied with the first within the uncertainty, or why it is rejected.",
        text=True,
        width_ch=24,
    ),
    Column("rejected_because", "why", "Each constraint it breaks.", text=True, width_ch=60),
)


def ranking_section(document: Json, *, identity: str, source: str, picked: Json | None = None) -> Json:
    """The section of a ranking document; `picked`: a configuration of its own to show first, as of a launch config.

    `source` is what errors call the document.
    """
    inputs = inputs_of(document, source=source)
    configs = _listed(document["configs"])
    picked = picked and next((one for one in configs[:DETAILED] if pins(one) == pins(picked)), picked)
    found = _detailed(configs, inputs, picked=picked)
    names = [short_name(one.config, launch=one.config is picked) for one in found]
    opens = f"{identity}-configuration"
    shown = [one for one in found if one.config is not picked]
    pieces = [
        *([shares_figure(found, names)] if found else []),
        map_figure(document["configs"], rank_by=document["rank_by"]),
        _table(configs, document, identity=identity, opens=opens if configs else ""),
        *([_configurations(found, configs, inputs, identity=opens, picked=picked)] if found or configs else []),
        fold("What the columns mean", [facts([(_plain(column.label), column.meaning) for column in COLUMNS])]),
        *provenance_folds(document, source=source),
    ]
    first = picked or next((config for config in configs if config["feasible"]), None)
    return section(
        identity,
        f"{document['model']['name']} on {document['gpus']:,} × {document['machine']['name']}",
        lead=_lead(document, configs, shown=len(shown)),
        cards=[] if first is None else config_cards(first, limit_bytes=document["memory_limit_bytes"]),
        blocks=[piece for piece in pieces if piece is not None],
    )


def _plain(label: str) -> str:
    """A heading without the places where it may be broken."""
    return label.replace("\u00ad", "")


def _listed(configs: Sequence[Json]) -> list[Json]:
    """What fits into the page: the first of the feasible, then rejected ones."""
    feasible = [config for config in configs if config["feasible"]]
    rejected = [config for config in configs if not config["feasible"]]
    return [*feasible[:MOST_ROWS], *rejected[: max(MOST_ROWS - len(feasible), 0)]]


def _lead(document: Json, configs: Sequence[Json], *, shown: int) -> list[str]:
    """What was found in words: of the document if it has any."""
    # In the terminal another option lists rejected grids; here the table does.
    said = [line.replace("--all lists", "the table lists") for line in document.get("remarks", [])]
    if not any(config["feasible"] for config in configs):
        said.append("No grid is feasible; the table says why for each.")
    left = document.get("left_out", 0) + len(document["configs"]) - len(configs)
    if left:
        said.append(f"{counted(left, 'more row')} are left out of this page; --format csv or json has all.")
    if shown > 1:
        said.append(f"The first {shown} are shown in full: click one in the table.")
    return said


def _detailed(configs: Sequence[Json], inputs: Inputs, *, picked: Json | None) -> list[Detailed]:
    """The configuration picked, then the first of the ranking."""
    wanted = [*([picked] if picked else []), *(config for config in configs[:DETAILED] if config is not picked)]
    return [one for config in wanted if (one := detailed(config, inputs)) is not None]


def _table(configs: Sequence[Json], document: Json, *, identity: str, opens: str) -> Json:
    others = list(configs[0].get("ranks") or {}) if configs else []
    rows = [_row(config, others) for config in configs]
    columns = [
        column for column in (*COLUMNS, _WHOLE_ORDER) if any(row.get(column.key) not in (None, "") for row in rows)
    ]
    columns[1:1] = [
        Column(f"rank {name}", f"rank, {name}", f"Place by --cost {name}.", decimals=0, width_ch=9) for name in others
    ]
    sizes = [Filter(axis, axis, sorted({config[axis] for config in configs})) for axis in AXES]
    states = list(dict.fromkeys(row["state"] for row in rows))
    recomputes = sorted({config["recompute"] for config in configs if config["recompute"]})
    orders = sorted({row["order"] for row in rows if row["order"]})
    filters = [
        *sizes,
        Filter("recompute", "recompute", recomputes),
        Filter("order", "order", orders),
        Filter("state", "state", states),
    ]
    ranked_by = {"communication": "communication", "exposed": "exposed communication", "iteration": "time of a step"}
    note = f"Ranked by {ranked_by[document['rank_by']]}. Click a heading to sort, a row for its details."
    return table(f"{identity}-table", "Ranking", columns, rows, note=note, filters=filters, opens=opens, tall=True)


def _row(config: Json, others: Sequence[str]) -> Mapping[str, Cell]:
    """A row of the table: the configuration's own numbers."""
    order = [axis for axis in (config["order"] or "").split(",") if axis and config[axis] > 1]
    ranks = config.get("ranks") or {}
    return {
        **{column.key: config.get(column.key) for column in COLUMNS},
        **{f"rank {name}": ranks.get(name) for name in others},
        "order": ",".join(order) or config["order"],
        "whole_order": config["order"],
        "state": state_of(config),
        "rejected_because": "; ".join(config["rejected_because"]),
    }


def state_of(config: Json) -> str:
    """Whether a configuration can be used, in a word or two."""
    if not config["feasible"]:
        return f"{REJECTED}{reason_name(config)}"
    return TIE if config["tie"] and config["rank"] != 1 else FEASIBLE


def _configurations(
    found: Sequence[Detailed], configs: Sequence[Json], inputs: Inputs, *, identity: str, picked: Json | None
) -> Json:
    """Details that the table opens, one configuration at a time."""
    explain = explain_words(inputs)
    places = {id(config): place for place, config in enumerate(configs)}
    items = [
        {
            "row": places.get(id(one.config)),
            "title": f"The launch config: {title(one.config)}" if one.config is picked else title(one.config),
            "blocks": detail_blocks(one, explain=explain),
        }
        for one in found
    ]
    return {
        "kind": "configurations",
        "id": identity,
        "title": "One configuration",
        "items": items,
        "rowTitle": "#{rank}: " + " · ".join(f"{axis} {{{axis}}}" for axis in AXES),
        "rejectedTitle": " · ".join(f"{axis} {{{axis}}}" for axis in AXES) + ", which cannot be used",
        "elsewhere": "Timeline, memory and terms are in this page for the first of the ranking alone; the command"
        " below shows them for this one.",
        "command": " ".join([shlex.join(explain), *_PINNED]) if explain else "",
    }


def provenance_folds(document: Json, *, source: str) -> list[Json]:
    """Where the numbers of a document of results come from."""
    rows = [
        ("source", source),
        ("schema", document["schema"]),
        ("axonn-tune", document["tool_version"]),
        ("cost model", document.get("cost", "alpha-beta")),
        ("MFU and HFU", document.get("mfu_convention", "")),
        ("peak", f"{_peak(document)} TFLOP/s a GPU in {document['workload']['precision']}"),
    ]
    return [
        provenance.machine_fold(document["machine"]),
        provenance.model_fold(document["model"]),
        provenance.workload_fold(document["workload"]),
        provenance.origin_fold([row for row in rows if row[1]]),
    ]


def _peak(document: Json) -> str:
    return f"{document['machine']['accelerator']['peak_tflops'][document['workload']['precision']]:g}"
