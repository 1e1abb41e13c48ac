"""One configuration in detail: in words, its memory against the limit, its timeline, each term and how it is priced."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axonn_tune.cost.breakdown import work_by_kind
from axonn_tune.cost.prediction import Configuration, Pricing, price_configuration
from axonn_tune.grid import AXES, Grid
from axonn_tune.ranking.entries import Entry, term_entries
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.report.explain_lines import line_sentences
from axonn_tune.report.explain_words import paragraphs
from axonn_tune.report.html.blocks import Column, Json, card, cards, command, figure, fold, table, text
from axonn_tune.report.html.colors import ACCENT, LIMIT, MUTED
from axonn_tune.report.html.timeline import timeline_figures
from axonn_tune.report.ranking_json import term_json
from axonn_tune.units import GB, GIB, MICRO, TERA, show_bytes, show_seconds

_SAME = 1e-9
"""Relative difference up to which two predictions are the same."""


@dataclass(frozen=True)
class Detailed:
    """A configuration of a document, as the document has it, and priced again by this version."""

    config: Json
    inputs: Inputs
    pricing: Pricing

    @property
    def terms(self) -> list[Json]:
        """Its terms: those of the document, or as it would have them."""
        return self.config.get("terms") or [term_json(term) for term in term_entries(self.pricing)]


def detailed(config: Json, inputs: Inputs) -> Detailed | None:
    """Price a configuration of the contract; None if it does not say enough, as those of other cost models do not."""
    if not config["feasible"] or config["iteration_s"] is None or config["order"] is None:
        return None
    order = tuple(config["order"].split(","))
    grid = Grid(config["x"], config["y"], config["z"], config["data"], order=order)
    settled = Configuration(grid, config["micro_batch"], config["recompute"], config["kept_layers"])
    problem = inputs.problem
    return Detailed(config, inputs, price_configuration(problem.model, problem.machine, problem.workload, settled))


def grid_words(config: Mapping[str, object]) -> str:
    """`x 1 · y 1 · z 512 · data 2`."""
    return " · ".join(f"{axis} {config[axis]}" for axis in AXES)


def short_name(config: Mapping[str, object], *, launch: bool = False) -> str:
    """`#1  1×1×512×2`, or `launch  1×1×512×2`."""
    return f"{'launch' if launch else '#' + str(config['rank'])}  " + "×".join(str(config[axis]) for axis in AXES)


def title(config: Json) -> str:
    """What a configuration is called above its details."""
    rank = "" if config["rank"] is None else f"#{config['rank']}: "
    batches = f"micro-batch {config['micro_batch']}, recompute {config['recompute']}"
    return f"{rank}{grid_words(config)}, {batches}"


def detail_blocks(found: Detailed, *, explain: Sequence[str]) -> list[Json]:
    """Everything about a configuration; `explain`: words of the command that explains it, less its own options."""
    config, pricing = found.config, found.pricing
    computed = [text(line_sentences(found.inputs.problem, pricing), title="How a call is priced")]
    blocks = [
        cards(config_cards(config, limit_bytes=pricing.memory_limit_bytes)),
        *_changed(found),
        *_in_words(found),
        *timeline_figures(pricing),
        memory_figure(pricing),
        fold(f"Every collective ({len(found.terms)}), with α and β", [term_table(found.terms), *computed]),
        fold("Computation", [work_table(found)]),
    ]
    if explain:
        blocks.append(command(shlex.join([*explain, *pins(config)]), title="The same in the terminal"))
    return blocks


def _in_words(found: Detailed) -> list[Json]:
    """The step in sentences, where the document says what follows from its time."""
    if found.config["low_s"] is None or found.config["mfu"] is None:
        return []
    story = paragraphs(found.inputs, _entry(found.config), found.pricing)
    return [fold("The step in words", [text([" ".join(part) for part in story])])]


def config_cards(config: Json, *, limit_bytes: float | None) -> list[Json]:
    """The numbers that matter most of one configuration of the contract."""
    of = "" if limit_bytes is None else f"of {show_bytes(limit_bytes)} that can be used"
    found = [
        ("communication", _seconds(config["communication_s"]), "all collectives, hidden or not"),
        ("exposed", _seconds(config["exposed_communication_s"]), "communication that no computation hides"),
        ("computation", _seconds(config["compute_s"]), "kernels of one GPU"),
        ("step", _seconds(config["iteration_s"]), _interval(config)),
        ("MFU", "-" if config["mfu"] is None else f"{config['mfu']:.1%}", _hfu(config)),
        ("memory", "-" if config["memory_bytes"] is None else show_bytes(config["memory_bytes"]), of),
        ("tokens/s", "-" if config["tokens_per_s"] is None else f"{config['tokens_per_s']:,.0f}", "of all GPUs"),
    ]
    return [card(label, value, note=note) for label, value, note in found if value != "-"]


def _seconds(value_s: float | None) -> str:
    return "-" if value_s is None else show_seconds(value_s)


def _interval(config: Json) -> str:
    if config["low_s"] is None or config["high_s"] is None:
        return ""
    return f"80%: {show_seconds(config['low_s'])} to {show_seconds(config['high_s'])}"


def _hfu(config: Json) -> str:
    return "" if config["hfu"] is None else f"HFU {config['hfu']:.1%}"


def pins(config: Json) -> list[str]:
    """Options that leave just this configuration."""
    sizes = [word for axis in AXES for word in (f"--{axis}", str(config[axis]))]
    return [
        *sizes,
        *("--order", config["order"], "--micro-batch", str(config["micro_batch"])),
        *("--recompute", config["recompute"], "--kept-layers", str(config["kept_layers"])),
    ]


def _changed(found: Detailed) -> list[Json]:
    """A warning if this version predicts another time than the document holds."""
    then_s, now_s = found.config["iteration_s"], found.pricing.iteration_s
    if abs(now_s / then_s - 1.0) < _SAME:
        return []
    return [
        text(
            [
                f"The source has {show_seconds(then_s)} for this step, this version predicts {show_seconds(now_s)}: "
                "timeline, memory and computation below are this version's."
            ]
        )
    ]


def _entry(config: Json) -> Entry:
    """The entry of a ranking that a configuration of the contract was written from."""
    return Entry(
        sizes=(config["x"], config["y"], config["z"], config["data"]),
        rank=config["rank"],
        order=tuple(config["order"].split(",")),
        low_s=config["low_s"],
        high_s=config["high_s"],
        tokens_per_s=config["tokens_per_s"],
        mfu=config["mfu"],
        hfu=config["hfu"],
    )


def memory_figure(pricing: Pricing) -> Json:
    """What one rank holds at the peak of a step, largest first, and what it may hold."""
    items = sorted(((float(size), name) for name, size in pricing.memory.items if size), reverse=True)
    total, limit = float(pricing.memory.total_bytes), pricing.memory_limit_bytes
    shown = [(total, "all"), *items]
    trace = {
        "type": "bar",
        "orientation": "h",
        "x": [size / GIB for size, _ in shown],
        "y": list(range(len(shown))),
        "text": [show_bytes(size) for size, _ in shown],
        "textposition": ["inside", *["outside"] * len(items)],
        "insidetextanchor": "end",
        "cliponaxis": False,
        "hovertext": [f"{name}: {show_bytes(size)}, {size / limit:.1%} of what can be used" for size, name in shown],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "marker": {"color": [ACCENT, *[MUTED] * len(items)]},
    }
    layout = {
        "showlegend": False,
        "xaxis": {"title": {"text": "GiB"}, "range": [0, 1.18 * max(limit, total) / GIB]},
        "yaxis": {
            "tickvals": list(range(len(shown))),
            "ticktext": [name for _, name in shown],
            "range": [len(shown) - 0.4, -0.6],
            "fixedrange": True,
        },
        "shapes": [_limit_line(limit / GIB)],
    }
    return figure(
        "Memory of one GPU at the peak of a step",
        [trace],
        layout=layout,
        height=90 + 24 * len(shown),
        note=f"The dashed line is what can be used: {limit / GIB:.3g} GiB. {show_bytes(max(limit - total, 0.0))} are"
        " left.",
    )


def _limit_line(at: float) -> Json:
    line = {"color": LIMIT, "width": 2, "dash": "dash"}
    return {
        "type": "line",
        "xref": "x",
        "yref": "paper",
        "x0": at,
        "x1": at,
        "y0": 0,
        "y1": 1,
        "layer": "below",
        "line": line,
    }


TERM_COLUMNS = (
    Column("op", "collective", "What is sent: all_gather, reduce_scatter or all_reduce.", text=True, width_ch=14),
    Column("axis", "axis", "Axis of the grid whose ranks take part.", text=True, width_ch=7),
    Column("phase", "phase", "Part of the step.", text=True, width_ch=10),
    Column("layer", "layer", "Layer it belongs to.", text=True, width_ch=15),
    Column("seconds", "all calls, s", "Time of all calls of a step and rank: calls × (α + bytes / β).", width_ch=10),
    Column("exposed_s", "exposed, s", "The part of it in which computation stands still.", width_ch=10),
    Column("count", "calls", "Calls per step and rank.", decimals=0, width_ch=8),
    Column("group", "ranks", "Ranks that take part.", decimals=0, width_ch=7),
    Column("mib", "buffer, MiB", "Full (gathered or reduced) buffer of one call.", width_ch=11),
    Column(
        "formula",
        "buffer, formula",
        "Elements and bytes of that buffer, symbols as in explain.",
        text=True,
        width_ch=22,
    ),
    Column("tier", "network", "Outermost network tier it crosses.", text=True, width_ch=11),
    Column("algorithm", "algorithm", "What the library is predicted to choose.", text=True, width_ch=18),
    Column("alpha_us", "α, µs", "Time of a call without data.", width_ch=9),
    Column("beta", "β, GB/s", "Bytes of the buffer per second.", width_ch=9),
)


def term_table(terms: Sequence[Json]) -> Json:
    """Each collective, with how it is priced."""
    rows = [
        {
            **{name: term[name] for name in ("op", "axis", "phase", "layer", "seconds", "exposed_s", "count", "group")},
            "mib": term["bytes"] / 2**20,
            "formula": term["formula"],
            "tier": term["tier"],
            "algorithm": ", ".join(filter(None, (term["algorithm"], term["protocol"]))),
            "alpha_us": term["latency_s"] / MICRO,
            "beta": term["bandwidth_bytes_per_s"] / GB,
        }
        for term in terms
    ]
    return table("", "", TERM_COLUMNS, rows)


WORK_COLUMNS = (
    Column("kind", "computation", "What is computed.", text=True, width_ch=28),
    Column("phase", "phase", "Part of the step.", text=True, width_ch=10),
    Column("seconds", "s", "Time of a step and rank.", width_ch=10),
    Column("share", "share, %", "Of all computation.", decimals=1, width_ch=9),
    Column("rate", "TFLOP/s", "Speed reached; element-wise kernels count no FLOPs.", decimals=1, width_ch=9),
)


def work_table(found: Detailed) -> Json:
    """Computation by kind and phase."""
    pricing = found.pricing
    rows = [
        {
            "kind": each.kind,
            "phase": each.phase,
            "seconds": each.seconds,
            "share": 100.0 * each.seconds / pricing.compute_s,
            "rate": each.flops / each.seconds / TERA if each.flops else None,
        }
        for each in work_by_kind(pricing, found.inputs.problem.workload)
    ]
    return table("", "", WORK_COLUMNS, rows)
