"""Several searches: a sweep over GPUs, and 4D compared with other strategies; as tables, JSON and sections of a page.

JSON follows the contracts `axonn-tune/sweep/1` and `axonn-tune/comparison/1`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from axonn_tune import __version__
from axonn_tune.cost.price import ATTENTION, CONTENDED, ELEMENT_WISE, GEMMS, HOST, Detail
from axonn_tune.cost.uncertainty import own_bound_s
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.job import Job
from axonn_tune.ranking.compare import (
    BUBBLE,
    CAUSES,
    EXPOSED,
    OF_THE_CLAIM,
    OTHER_KERNELS,
    RECOMPUTE,
    REST,
    Comparison,
    Contender,
    by_axis,
    causes,
    limits,
    own_software_s,
    paper_step_flops,
    sizes_of,
)
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.ranking.sweep import Point
from axonn_tune.report import page
from axonn_tune.report.configuration import LayoutWords, inputs_of
from axonn_tune.report.output import (
    NOTHING,
    PERCENT,
    Column,
    Json,
    Table,
    count,
    fields_of,
    known_value,
    percent,
    share,
    signed_percent,
    words,
)
from axonn_tune.report.ranking import (
    COLUMNS,
    CONFIG_FIELDS,
    METRICS,
    RANKED_BY,
    SHORTEST,
    TEXT_COLUMNS,
    TRAINING,
    axis_columns,
    days_interval,
    document_head,
    entry_fields,
    framework_of,
    layout_words,
    machine_words,
    origin,
    shown_axes,
    shown_rows,
    training_fields,
    training_names,
    with_framework,
)
from axonn_tune.specs.workload import RECOMPUTES
from axonn_tune.units import TERA, counted, show_count, show_interval, show_seconds

SWEEP_SCHEMA, COMPARISON_SCHEMA = "axonn-tune/sweep/1", "axonn-tune/comparison/1"

_POINT = {
    "model": words("model", "model", "What is trained.", 12),
    "gpus": count("gpus", "GPUs", "How many there are."),
    "batch": count("global_batch", "batch", "Sequences in a step."),
}
_DISPATCH = replace(
    COLUMNS["communication_s"],
    key="dispatch_s",
    label="dispatch, s",
    title="dispatch,\ns",
    meaning="Dispatch and combine of its experts in a step, overlapped or not.",
)
_EFFICIENCY = Column(
    "efficiency",
    "efficiency, %",
    "Throughput of one GPU over that of the first feasible count.",
    per=PERCENT,
    decimals=1,
)
_OF_BEST_SIZE = replace(
    _EFFICIENCY, label="of best, %", meaning="Throughput of one GPU over that of the best size on as many GPUs."
)
_OF_BEST = (
    *("grid", "order", "micro_batch", "recompute", "communication_s", "exposed_communication_s", "iteration_s"),
    *("shortest_step_s", "low_s", "high_s", "tokens_per_s", "mfu", "memory"),
)
_ABOVE = 1.0005
"""Efficiency that is shown as more than 100%."""
_TRAINING = {name: COLUMNS[name] for name in TRAINING}
_SWEEP_COLUMNS = {
    **_POINT,
    **{"step" if name == "iteration_s" else name: TEXT_COLUMNS[name] for name in _OF_BEST},
    "efficiency": _EFFICIENCY,
}
"""Columns of a sweep by name, in the order of a wide table."""
_MAIN_SWEEP_COLUMNS = ("model", "gpus", "batch", "grid", "order", "step", "tokens_per_s", "mfu", "efficiency")
_POINT_FIELDS = ("model", "gpus", "global_batch", "feasible", "reason", "efficiency")
_OVER_FIELDS = ("over", "dispatch_s")
_CSV = (*_POINT_FIELDS, *(name for name in CONFIG_FIELDS if name not in {"rank", "feasible", "tie"}))
_OF_CONFIG = (
    *("iteration_s", "low_s", "high_s", "communication_s", "exposed_communication_s", "compute_s", "tokens_per_s"),
    *("mfu", "hfu", "memory_bytes", "micro_batch", "recompute", "kept_layers", "wide_order"),
)
_REASON = words("reason", "why nothing is feasible", "The nearest change that would help.", 60)
_MANY = 40
"""From so many points on the table scrolls in a window of its own."""
_SWEEP_METRICS = (
    ("tokens/s", "tokens_per_s", "log", 1.0),
    ("efficiency, %", "efficiency", "linear", PERCENT),
    ("step, s", "iteration_s", "log", 1.0),
    ("MFU, %", "mfu", "linear", PERCENT),
)


def sweep_table(
    points: Sequence[Point], *, names: Sequence[str] = (), wide: bool = False, shortest: bool = False
) -> Table:
    """The points with these columns, all or the main ones; below are the reasons where nothing is feasible.

    shortest: below a point is also the shortest step of all, marked, where that of the best is longer.
    """
    problem = points[0].inputs.problem
    shown = [row for point in points for row in (_point_json(point), *(_fastest_json(point) if shortest else ()))]
    label, rows = _sweep_rows(shown, problem.framework, shown_axes(problem))
    infeasible = [row for row in rows if not row["feasible"]]
    over = points[0].over and points[0].over[0]
    reasons = [
        f"{row['model']} on {row['gpus']} GPUs, batch {row['global_batch']}"
        + (f", {over} {row['over']}: {row['reason']}" if over else f": {row['reason']}")
        for row in infeasible
    ]
    grid = replace(_SWEEP_COLUMNS["grid"], label=label)
    swept = {"over": _over_column(over), "dispatch_s": _DISPATCH, "efficiency": _OF_BEST_SIZE} if over else {}
    columns = {**_SWEEP_COLUMNS, **_TRAINING, "grid": grid, "layout": grid, "precision": COLUMNS["precision"], **swept}
    main = [name for name in _MAIN_SWEEP_COLUMNS if name != "order" or problem.framework.permuted]
    if problem.rank_by != "iteration":
        main.insert(main.index("step") + 1, "shortest_step_s")
    if over:
        several = len({point.inputs.problem.gpus for point in points}) > 1
        main = ["over" if name == "batch" else name for name in main if name != "gpus" or several]
        main[main.index("step") + 1 :] = ["dispatch_s", "memory", "tokens_per_s", "mfu", "efficiency"]
    formats = ("precision",) if any(point.inputs.problem.formats for point in points) else ()
    main[main.index("grid") + 1 : main.index("grid") + 1] = formats
    training = TRAINING if problem.tokens_total else ()
    chosen = names or (*(_SWEEP_COLUMNS if wide else main), *training)
    notes = [*([_LONGER] if len(shown) > len(points) else []), *_above_100(rows), *reasons]
    fields = (*_CSV, *formats, *(_OVER_FIELDS if over else ()), *training_names(problem))
    return Table(columns, rows, chosen, fields, notes, apart=True, title=_ranked(points))


def _over_column(name: str) -> Column:
    """Sizes of the axis that is swept, under its name."""
    return count("over", name, f"Size of {name}.")


def _ranked(points: Sequence[Point]) -> str:
    """What was priced, and what the configurations are the best by."""
    problem = points[0].inputs.problem
    lengths = dict.fromkeys(f"{point.inputs.problem.workload.sequence_length:,}" for point in points)
    names = ", ".join(dict.fromkeys(point.inputs.problem.model.name for point in points))
    where = f"{machine_words(problem)}{with_framework(problem.framework)}"
    formats = ", ".join(problem.formats or (problem.workload.precision,))
    return (
        f"{names} on {where}, sequences of {' or '.join(lengths)} tokens in {formats}: the best of each point, ranked "
        f"by {RANKED_BY[problem.rank_by]}{'' if problem.framework.measured_on else NOT_MEASURED}."
    )


NOT_MEASURED = "; its software was not measured on several GPUs"
_LONGER = f"{SHORTEST} The shortest step of all, where that of the best is longer: --rank-by step ranks by it."


def _above_100(rows: Sequence[Json]) -> list[str]:
    """Why GPUs are used better than at the baseline, if they are: where that is most."""
    base: Json = {}
    above: list[tuple[Json, Json]] = []
    for row in rows:
        # The first feasible of each line is what its others are compared with.
        base = row if row["efficiency"] == 1.0 else base
        if base and (row["efficiency"] or 0.0) > _ABOVE:
            above.append((base, row))
    if not above:
        return []
    few, many = max(above, key=lambda pair: float(pair[1]["efficiency"]))
    least, named = (f"{row['gpus']:,} GPUs" for row in (few, many))
    why = _limit_of_baseline(few, many, named)
    return [f"Efficiency above 100% at {named}: the baseline, {least}, {why}."]


def _limit_of_baseline(few: Json, many: Json, named: str) -> str:
    """What keeps the baseline from what more GPUs reach: memory, exposed communication or slower kernels."""
    kinds = few["recompute"], many["recompute"]
    if {*kinds} <= {*RECOMPUTES} and RECOMPUTES.index(kinds[0]) > RECOMPUTES.index(kinds[1]):
        return f"is bound by memory and needs recompute {few['recompute']}; {named}: {many['recompute']}"
    waits = [row["exposed_communication_s"] / row["iteration_s"] for row in (few, many)]
    if waits[0] - waits[1] > NOTABLE:
        return f"has {waits[0]:.1%} of its step in exposed communication, {named} {waits[1]:.1%}"
    return f"reaches {few['hfu']:.1%} of peak (HFU), {named} {many['hfu']:.1%}"


def _sweep_rows(points: Sequence[Json], framework: Framework, axes: Sequence[str]) -> tuple[str, list[Json]]:
    """Points of the contract, each with its best configuration; the label of layouts."""
    label, configs = shown_rows([point["config"] or {} for point in points], framework, axes)
    return label, [
        {**config, **{key: point[key] for key in (*_POINT_FIELDS, *_OVER_FIELDS) if key in point}}
        for config, point in zip(configs, points, strict=True)
    ]


def sweep_document(points: Sequence[Point], *, weak: bool) -> Json:
    """Everything, as `axonn-tune/sweep/1`; each model and the machine once."""
    models = {point.inputs.model.document.name: origin(point.inputs.model) for point in points}
    return {
        "schema": SWEEP_SCHEMA,
        "tool_version": __version__,
        "scaling": "weak" if weak else "strong",
        "rank_by": points[0].inputs.problem.rank_by if points else None,
        "framework": points[0].inputs.problem.framework.name if points else None,
        "measured": bool(points and points[0].inputs.problem.framework.measured_on),
        "models": list(models.values()),
        "machine": origin(points[0].inputs.machine) if points else None,
        **({"over": points[0].over[0]} if points and points[0].over else {}),
        "points": [_point_json(point) for point in points],
    }


def _point_json(point: Point) -> Json:
    """A point with its best configuration, None where nothing is feasible."""
    problem = point.inputs.problem
    return {
        "model": problem.model.name,
        "gpus": problem.gpus,
        "global_batch": problem.workload.global_batch,
        "feasible": point.entry is not None,
        "reason": point.reason or None,
        "efficiency": point.efficiency,
        "workload": problem.workload.model_dump(mode="json", by_alias=True),
        "config": None if point.entry is None else entry_fields(point.entry),
        "shortest_step": None if point.fastest is None else entry_fields(point.fastest),
        **({"over": point.over[1], "dispatch_s": point.dispatch_s} if point.over else {}),
    }


def _fastest_json(point: Point) -> list[Json]:
    """The shortest step of all at a point as a row below its best, if that is another."""
    own = _point_json(point)
    name = f"{own['model']} {SHORTEST}"
    return [{**own, "model": name, "efficiency": None, "config": own["shortest_step"]}] if point.fastest else []


def sweep_section(document: Json, *, identity: str, source: str) -> Json:
    """The section of a sweep document."""
    points, scaling, framework = document["points"], document["scaling"].capitalize(), framework_of(document)
    names = ", ".join(model["name"] for model in document["models"])
    lengths = sorted({point["workload"]["sequence_length"] for point in points})
    own = [point["config"].get("precision") for point in points if point["config"]]
    formats = {*filter(None, own)} or {points[0]["workload"]["precision"]}
    said = [
        f"{scaling} scaling",
        document["machine"]["accelerator"]["name"],
        f"sequences of {' and '.join(f'{length:,}' for length in lengths)} tokens",
        ", ".join(sorted(formats)),
        f"the best of each of {counted(len(points), 'point')} by {METRICS[document['rank_by']]}"
        + ("" if document.get("measured", True) else NOT_MEASURED),
    ]
    layouts = LayoutWords.of(document, [point["config"] or {} for point in points])
    rows, tall = _sweep_rows(points, framework, layouts.axes)[1], len(points) > _MANY
    feasible = [row for row in rows if row["feasible"]]
    over = document.get("over")
    lines = _rows_by_line(feasible, weak=document["scaling"] == "weak", over=over is not None)
    named = axis_columns(framework, layouts.axes)
    swept = [_over_column(over), _DISPATCH] if over else []
    swept += [COLUMNS["precision"]] if any(own) else []
    columns = [*_POINT.values(), *swept, _EFFICIENCY, *named, *(COLUMNS[key] for key in _OF_CONFIG)]
    if len(feasible) < len(rows):
        said.append(f"at {len(rows) - len(feasible)} of them nothing is feasible; the table says why")
        columns.append(_REASON)
    note = f"{scaling} scaling. {page.SORTS}"
    blocks = [
        *([_curves(lines, layouts=layouts, over=over)] if lines else []),
        page.table(f"{identity}-table", "Every point", columns, rows, note=note, tall=tall),
        page.machine_fold(document["machine"]),
        *(page.model_fold(model) for model in document["models"]),
        page.workload_fold(points[0]["workload"]),
        page.origin_fold(page.origin_rows(document, source)),
    ]
    title = f"{names} on {document['machine']['name']}{with_framework(framework)}: {over or 'scaling'}"
    reached = _best_of(lines, over) if over else _reached(lines)
    return page.section(identity, title, subtitle=" · ".join(said), verdict=reached, blocks=blocks)


def _best_of(lines: Mapping[str, Sequence[Json]], over: str) -> list[str]:
    """The size of an axis with the shortest step of each line."""
    best = ((name, min(line, key=lambda row: float(row["iteration_s"]))) for name, line in lines.items())
    return [
        f"{name}: {over} {row['over']} has the shortest step, {show_seconds(row['iteration_s'])} "
        f"({page.interval_words(row)})."
        for name, row in best
    ]


def _reached(lines: Mapping[str, Sequence[Json]]) -> list[str]:
    """What each line reaches at its largest count of GPUs."""
    ends = ((name, line[0], line[-1]) for name, line in lines.items())
    return [
        f"{name}: {show_count(last['tokens_per_s'])} tokens/s on {last['gpus']:,} GPUs, "
        f"efficiency {percent(last['efficiency'])} vs. {first['gpus']:,}; step "
        f"{show_seconds(last['iteration_s'])} ({page.interval_words(last)})."
        for name, first, last in ends
    ]


def _curves(lines: Mapping[str, Sequence[Json]], *, layouts: LayoutWords, over: str | None) -> Json:
    """One line per model and batch (of weak scaling: of its first batch), and what is ideal for each."""
    rows = [row for line in lines.values() for row in line]
    metrics = [metric for metric in _SWEEP_METRICS if all(row[metric[1]] is not None for row in rows)]
    keys = [(key, per) for _, key, _, per in metrics]
    drawn = [
        {
            "name": name,
            "x": [row["over" if over else "gpus"] for row in line],
            "words": [f"{name}: {row['gpus']:,} GPUs<br>{layouts.sizes(row)}" for row in line],
            "values": [_curve_values(line, key, per, ideal=False) for key, per in keys],
            "ideal": [_curve_values(line, key, per, ideal=True) for key, per in keys],
            **dict(zip(("up", "down"), zip(*(_ends(line, key, per) for key, per in keys), strict=True), strict=True)),
        }
        for name, line in lines.items()
    ]
    note = (
        f"Dashed: every GPU as fast as at the {f'best {over}' if over else 'first feasible count'}. Whiskers: the 80% "
        "interval; most of it is common to all points, so efficiency, their ratio, has none."
    )
    return {
        "kind": "lines",
        "title": f"Steps by {over}" if over else "Scaling",
        "note": note,
        **({"axis": over} if over else {}),
        "choices": [label for label, *_ in metrics],
        "metrics": [{"label": label, "log": scale == "log"} for label, _, scale, _ in metrics],
        "lines": drawn,
    }


def _ends(line: Sequence[Json], key: str, per: float) -> tuple[list[float], list[float]]:
    """How far the 80% interval of the step takes a value up and down; not at all for efficiency."""
    up, down = [], []
    for row in line:
        value = row[key] / per
        shares = (row["iteration_s"] / row["low_s"], row["iteration_s"] / row["high_s"])
        most, least = (1.0 / shares[1], 1.0 / shares[0]) if key == "iteration_s" else shares
        up.append(0.0 if key == "efficiency" else value * (most - 1.0))
        down.append(0.0 if key == "efficiency" else value * (1.0 - least))
    return up, down


def _rows_by_line(rows: Sequence[Json], *, weak: bool, over: bool) -> dict[str, list[Json]]:
    """Rows of each line in the order of GPUs, or of sizes of the axis that is swept."""
    found: dict[str, list[Json]] = {}
    several = weak or len({row["global_batch"] for row in rows}) > 1
    for row in rows:
        per_gpu = row["global_batch"] / row["gpus"]
        batch = f"{per_gpu:g} sequences a GPU" if weak else f"batch {row['global_batch']:,}"
        name = f"{row['model']}, {batch}" if several else row["model"]
        found.setdefault(f"{name} on {row['gpus']:,} GPUs" if over else name, []).append(row)
    return {name: sorted(line, key=lambda row: int(row["over" if over else "gpus"])) for name, line in found.items()}


def _curve_values(line: Sequence[Json], key: str, per: float, *, ideal: bool) -> list[float]:
    """What a line shows; ideal: what an efficiency of 100% would make of it."""
    values = [float(row[key]) for row in line]
    if ideal:
        # A rate grows and a time shrinks by the efficiency; MFU is a rate of one GPU.
        shares = [row["efficiency"] or 1.0 for row in line]
        down = key == "iteration_s"
        values = [value * share if down else value / share for value, share in zip(values, shares, strict=True)]
    return [value / per for value in values]


PETA = 1000.0 * TERA
NOTABLE = 0.005
"""Share of a step that is worth a word."""
APART = "*"
STANDS_APART = (
    f"{APART} Not measured on several GPUs: it stands apart, as neither the best nor the baseline (docs/gpu.md)."
)
LEFT_OUT = "--wide adds gradient accumulation, HFU, the paper's count, and what long layouts leave no room for."
_STRATEGIES = {
    "strategy": words("shown_name", "strategy", "How the model is split.", 16),
    "layout": words("shown_layout", "layout", "Its best layout that fits.", 34),
    **{key: COLUMNS[key] for key in ("micro_batch", "grad_accumulation")},
    "recompute": replace(COLUMNS["recompute"], title="recom\u00adpute"),
    "memory": COLUMNS["memory_bytes"],
    "tokens_per_s_per_gpu": COLUMNS["tokens_per_s_per_gpu"],
    "mfu": share("mfu", "MFU", COLUMNS["mfu"].meaning),
    "hfu": share("hfu", "HFU", COLUMNS["hfu"].meaning),
    "paper_share": share("paper_share", "paper's\ncount"),
    "logged_tflops_per_gpu": COLUMNS["logged_tflops_per_gpu"],
    "step": COLUMNS["iteration_s"],
    "over": share("over_baseline", "vs.\nbaseline", "Its step time over that of the baseline, less 1.", signed=True),
}
"""Columns of a comparison by name; why a strategy is infeasible is in the remarks."""
_NARROW = ("strategy", "layout", "micro_batch", "recompute", "memory", "tokens_per_s_per_gpu", "mfu", "step", "over")
"""Columns shown unless all are asked for."""
_SHORT = {
    OTHER_KERNELS: "attn.,\nelem.-\nwise",
    RECOMPUTE: "recom\u00adpute",
    **{f"exposed {name}": f"ex\u00adposed\n{name}" for name in EXPOSED.values()},
    BUBBLE: "bubble",
    CONTENDED: "slow\u00addown",
    HOST: "host-\nbound",
    REST: "rest",
}
"""Headings of causes in texts, where they are others."""
_ENDLESS = Column(
    "endless_memory.iteration_s", "step, s, unlimited memory", "Of its best layout if memory did not limit."
)
_PAGE_COLUMNS = (
    *(_STRATEGIES[name] for name in ("strategy", "layout", "step")),
    *(COLUMNS[key] for key in ("low_s", "high_s")),
    *(_STRATEGIES[name] for name in ("over", "tokens_per_s_per_gpu", "mfu", "hfu", "logged_tflops_per_gpu")),
    *(_ENDLESS, _STRATEGIES["memory"]),
    *(COLUMNS[key] for key in ("micro_batch", "grad_accumulation", "recompute", *TRAINING[:3])),
)
_PAGE_STEP = (_STRATEGIES["strategy"], _STRATEGIES["step"])
_CONTENDER_FIELDS = (
    *("key", "layout", "micro_batch", "grad_accumulation", "recompute"),
    *("iteration_s", "low_s", "high_s", "compute_s", "communication_s", "exposed_communication_s", "bubble_s"),
    *("memory_bytes", "mfu", "hfu", "paper_share", "gain_of_4d", "infeasible"),
    *("framework", "relative_step", "own_software_s", "over_baseline", "tokens_per_s_per_gpu", "measured"),
)
_COLORS = {
    **{"computation": page.COMPUTATION, GEMMS: page.BY_KIND[GEMMS], OTHER_KERNELS: page.BY_KIND[ATTENTION]},
    **{RECOMPUTE: page.BY_KIND[ELEMENT_WISE], "exposed communication": page.EXPOSED},
    **{"exposed TP": "--axis-x", "exposed FSDP": "--axis-z", "exposed DP": "--axis-data", "exposed CP": page.WAIT},
    "exposed EP": "--axis-several",
    **{
        "exposed PP": f"{page.EXPOSED}/0.6",
        BUBBLE: page.BUBBLE,
        **{one: page.BY_KIND[one] for one in (CONTENDED, HOST)},
        REST: f"{page.MUTED}/0.5",
    },
}
_STEP_PARTS = {"computation": "compute_s", "exposed communication": "exposed_communication_s", BUBBLE: "bubble_s"}
"""Parts of a step in documents that have no causes."""
_VISIBLE = 1e-3
"""Share of the longest step from which on a cause is drawn."""


def comparison_tables(comparison: Comparison, *, wide: bool = False, remarks: bool = True) -> tuple[Table, Table]:
    """Each strategy at its best, and strategies by causes of their steps with remarks below; both within a line."""
    problem, base = comparison.problem, comparison.baseline
    rows = [_contender_row(_contender_json(comparison, one)) for one in comparison.contenders]
    training = TRAINING if problem.tokens_total else ()
    machine = machine_words(problem)
    kernels = "with ideal kernels for all" if comparison.same_kernels else "each with its own software"
    workload, auto = problem.workload, problem.request.precision == "auto"
    formats = "the number format of each" if auto else workload.precision
    title = (
        f"{problem.model.name} on {problem.gpus:,} × {machine}, {workload.global_batch:,} sequences of "
        f"{workload.sequence_length:,} tokens in {formats}: strategies at their best, {kernels}; baseline: "
        f"{base.name if base else NOTHING}."
    )
    names = [*(_STRATEGIES if wide else _NARROW), *training]
    fields = (*_CONTENDER_FIELDS, *(("precision",) if auto else ()), *training_names(problem))
    marked = [STANDS_APART] if any(not row["measured"] for row in rows) else []
    best = Table({**_STRATEGIES, **_TRAINING}, rows, names, fields, marked, title=title)
    decimals, used = _causes_shown(rows)

    def shown(seconds: float) -> str:
        return f"{seconds:.{decimals}f}" if abs(seconds) >= 0.5 * 10**-decimals else "0"

    columns = {
        "strategy": _STRATEGIES["strategy"],
        "step": replace(COLUMNS["iteration_s"], show=shown),
        **{name: Column(f"causes.{name}", name, title=_SHORT.get(name, name), show=shown) for name in used},
        "endless": replace(_ENDLESS, title="unlim.\nmem.", show=shown),
    }
    said = (
        "What each step consists of, in s; with pipeline stages, of the one that computes longest. unlim. mem.: the "
        "best step if memory did not limit."
    )
    notes = comparison_remarks(comparison) if remarks else []
    matrix = Table(columns, rows, list(columns), notes=notes, title=said)
    # Names of some frameworks are long.
    return (best if wide else best.fitted(("tokens_per_s_per_gpu", "mfu"))), matrix.fitted(())


def _causes_shown(rows: Sequence[Json]) -> tuple[int, list[str]]:
    """Decimals of seconds that show three digits of the shortest step, and causes that are more than 0 with them."""
    shortest_s = min((row["iteration_s"] for row in rows if row["feasible"]), default=1.0)
    decimals = max(0, 2 - math.floor(math.log10(shortest_s)))
    least_s = 0.5 * 10**-decimals
    return decimals, [one for one in CAUSES if any(abs(row["causes"].get(one) or 0.0) >= least_s for row in rows)]


def _contender_row(contender: Json) -> Json:
    """A strategy of the contract, with what is predicted of it."""
    found = contender["prediction"] or {}
    layout = found.get("layout", "infeasible")
    row = {"causes": {}, **found, **contender, "shown_layout": layout, "days_interval": days_interval(found)}
    row["shown_name"] = contender["name"] if contender.get("measured", True) else f"{contender['name']} {APART}"
    return row | ({} if contender["endless_memory"] else {"endless_memory": None})


def comparison_remarks(comparison: Comparison) -> list[str]:
    """Which is fastest, why some are infeasible, what overlap gains, and what the paper reports of this case."""
    same, base, overlap = comparison.same_layout, comparison.baseline, comparison.overlap
    lines = [
        *fastest_words(comparison),
        *(f"{one.name} stands apart: {_apart_words(comparison, one)}" for one in comparison.apart),
        *([f"4D's best layout has x = y = 1: it is {same}."] if same else []),
        *(f"{one.name}: infeasible, {one.infeasible}." for one in comparison.contenders if one.prediction is None),
    ]
    if base is not None and base.prediction is not None:
        low_s, high_s = base.prediction.low_s, base.prediction.high_s
        own = show_seconds(_own_s(comparison, base.prediction))
        lines.append(
            f"{base.name}'s 80% interval, {show_seconds(low_s)} to {show_seconds(high_s)}: ±{own} is its own and "
            "counts for model error, the rest is common to all strategies."
        )
    if overlap is not None:
        lines.append(
            f"4D's best layout takes {overlap.off_s:.3g} s with all overlaps off, {overlap.on_s:.3g} s with them on: "
            f"{signed_percent(overlap.gain)}."
        )
    return [*lines, *_claims(comparison)]


def _apart_words(comparison: Comparison, contender: Contender) -> str:
    """What is predicted of a strategy that was not measured on several GPUs, and by what it is priced."""
    found = contender.prediction
    assert found is not None, "asked before"
    said = f"a step of {show_seconds(found.iteration_s)} is predicted, and none was measured on several GPUs"
    if comparison.same_kernels or find_framework(contender.framework).software:
        return f"{said}."
    return (
        f"{said}. Its kernels are priced as its program has them, the others' by numbers fitted to measured steps: "
        "--same-kernels compares layouts alone."
    )


def fastest_words(comparison: Comparison) -> list[str]:
    """Which strategy has the shortest step, by how much before the baseline or else the next; whether that is sure.

    Nothing where all that fit stand apart.
    """
    first, *others = comparison.ranked or (None,)
    if first is None or first.prediction is None:
        return []
    fastest, step_s = first.prediction, first.prediction.iteration_s
    said = (
        f"{first.name} has the shortest step, {show_seconds(step_s)} ({show_interval(fastest.low_s, fastest.high_s)})"
    )
    base = comparison.baseline
    second = (others[0] if others else None) if base is first else base
    if second is None or second.prediction is None:
        return [f"{said}; no other strategy fits."]
    other_s = second.prediction.iteration_s
    own_s = math.hypot(_own_s(comparison, first.prediction), _own_s(comparison, second.prediction))
    error = "within model error" if other_s - step_s <= own_s else "more than model error"
    return [f"{said}, {percent(1.0 - step_s / other_s)} less than {second.name}'s {show_seconds(other_s)}: {error}."]


def _own_s(comparison: Comparison, found: Detail) -> float:
    """Half of the 80% interval of a step that no other strategy shares, s."""
    waiting_s = found.exposed_communication_s
    return own_bound_s(comparison.problem, step_s=found.iteration_s, waiting_s=waiting_s)


def _claims(comparison: Comparison) -> list[str]:
    if not comparison.claims:
        return []
    reported = "; ".join(claim.words for claim in comparison.claims)
    lines = [
        f"The paper (arXiv 2305.13525) reports, measured: {reported}. docs/paper-claims.md says what differs.",
        *_gain_of_the_paper(comparison),
    ]
    first = comparison.own.prediction
    if first is not None and (counted := _by_papers_count(first))["paper_share"] is not None:
        lines.append(
            f"By the paper's count, which includes full recompute, done or not, 4D is predicted to reach "
            f"{percent(counted['paper_share'])} of peak, {counted['paper_flops_per_s'] / PETA:.3g} PFLOP/s in all."
        )
    if comparison.problem.request.recompute is None:
        lines.append("The paper used full activation recomputation throughout: --recompute full compares the same.")
    return lines


def _gain_of_the_paper(comparison: Comparison) -> list[str]:
    """The claim over Megatron-LM as it stands on this engine, for the bundled runtime and for the paper's software."""
    steps = {one.key: one.prediction.iteration_s for one in comparison.contenders if one.prediction is not None}
    then, now = OF_THE_CLAIM[0], "megatron-core"
    if not {AXONN_TUNE.name, "megatron-axonn", then, now} <= steps.keys():
        return []
    names = ((AXONN_TUNE.name, "4D in the bundled runtime"), ("megatron-axonn", "the paper's own Megatron-AxoNN"))
    gains = [
        f"{whose} trains {_faster(steps[then] / steps[key])} than {OF_THE_CLAIM[1]} and "
        f"{_faster(steps[now] / steps[key])} than Megatron-Core"
        for key, whose in names
    ]
    kernels = "with ideal kernels for all" if comparison.same_kernels else "each with its own software"
    return [
        f"Predicted here, {kernels}: {'; '.join(gains)}.",
        "Which release and options of Megatron-LM the paper ran is not stated where we could read it. The one of 2022 "
        "is the nearest before it: attention is not fused, and gradients are all-reduced after the backward pass. "
        "Megatron-Core is today's, with fused attention, a distributed optimizer, overlapped reductions and GTP.",
    ]


def _faster(times: float) -> str:
    """`26.0% faster`, or slower, from how many times as fast."""
    return f"{percent(abs(times - 1.0))} {'faster' if times >= 1.0 else 'slower'}"


def comparison_json(comparison: Comparison, inputs: Inputs) -> Json:
    """Everything, by the schema `axonn-tune/comparison/1`; times per step and rank."""
    overlap = comparison.overlap
    return {
        **document_head(COMPARISON_SCHEMA, inputs),
        "memory_limit_bytes": comparison.limit_bytes,
        "same_kernels": comparison.same_kernels,
        "baseline": comparison.baseline.key if comparison.baseline else None,
        "contenders": [_contender_json(comparison, one) for one in comparison.contenders],
        "overlap": None if overlap is None else fields_of(overlap, ("off_s", "on_s", "gain")),
        "verdict": fastest_words(comparison),
        "remarks": comparison_remarks(comparison),
        "paper": [fields_of(claim, ("what", "value", "words")) for claim in comparison.claims],
    }


def _contender_json(comparison: Comparison, contender: Contender) -> Json:
    found, best_unlimited = contender.prediction, contender.unlimited_memory
    auto = comparison.problem.request.precision == "auto"
    return {
        **fields_of(contender, ("key", "name", "framework", "measured")),
        "relative_step": comparison.relative(contender),
        "over_baseline": comparison.over_baseline(contender),
        "feasible": found is not None,
        "infeasible": contender.infeasible or None,
        "gain_of_4d": comparison.gain(contender),
        "separated_by": [{"what": what, "share": share} for what, share in comparison.separated_by(contender)],
        "prediction": None if found is None else _prediction_json(found, auto=auto),
        "endless_memory": None if best_unlimited is None else _prediction_json(best_unlimited, auto=auto),
    }


def _by_papers_count(priced: Detail) -> Json:
    """Share of peak and FLOP/s by the paper's count of FLOPs, None where that does not describe the model."""
    job, counted = priced.job, paper_step_flops(priced.job.model, priced.job.workload)
    if counted is None:
        return {"paper_share": None, "paper_flops_per_s": None}
    peak = job.machine.accelerator.peak_flops_per_s(job.workload.precision) * priced.grid.world
    return {"paper_share": counted / (priced.iteration_s * peak), "paper_flops_per_s": counted / priced.iteration_s}


def _prediction_json(priced: Detail, *, auto: bool) -> Json:
    """One priced layout; auto: its number format is one of several."""
    sizes = sizes_of(priced)
    return {
        "layout": layout_words(sizes),
        "sizes": sizes,
        "grad_accumulation": priced.accumulation,
        "own_software_s": own_software_s(priced),
        "tokens_per_s_per_gpu": priced.tokens_per_s / priced.grid.world,
        "causes": causes(priced),
        **fields_of(priced, _PREDICTED),
        **({"precision": priced.job.workload.precision} if auto else {}),
        "traffic": [
            {"kind": axis, "seconds": seconds, "exposed_s": exposed_s}
            for axis, (seconds, exposed_s) in by_axis(priced).items()
        ],
        "limits": [{"what": what, "share": share} for what, share in limits(priced)],
        **_by_papers_count(priced),
        **training_fields(priced.job, priced),
    }


_PREDICTED = (
    *("micro_batch", "recompute", "pipeline", "chunks", "iteration_s", "low_s", "high_s", "compute_s"),
    *("communication_s", "exposed_communication_s", "bubble_s", "memory_bytes", "tokens_per_s", "mfu", "hfu"),
    "logged_tflops_per_gpu",
)


def comparison_section(document: Json, *, identity: str, source: str) -> Json:
    """The section of a comparison document."""
    contenders, job = document["contenders"], inputs_of(document, source=source).problem
    rows = [_contender_row(one) for one in contenders]
    decimals, used = _causes_shown(rows)
    columns = [one for one in _PAGE_COLUMNS if any(known_value(row, one.key) not in (None, 0.0) for row in rows)]
    causes = [*_PAGE_STEP, *(Column(f"causes.{name}", f"{name}, s", "A part of the step.") for name in used)]
    causes = [one if one.text else replace(one, decimals=decimals) for one in causes]
    kernels = "with ideal kernels for all" if document.get("same_kernels", True) else "each with its own software"
    base = document.get("baseline", "the first") or "none"
    marked = [*([STANDS_APART] if any(APART in row["shown_name"] for row in rows) else []), page.SORTS]
    return page.section(
        identity,
        f"{document['model']['name']} on {document['gpus']:,} × {document['machine']['name']}: strategies compared",
        subtitle=page.subtitle(document, f"step time, {kernels}; baseline: {base}"),
        verdict=document.get("verdict", []),
        blocks=[
            _step_bars([row for row in rows if row["feasible"]], job),
            page.table(f"{identity}-table", "Each strategy at its best", columns, rows, note=" ".join(marked)),
            page.table("", "Where the step goes", causes, [row for row in rows if row["feasible"]], note=page.SORTS),
            page.text(document.get("remarks", []), title="In words"),
            *page.provenance_folds(document, source=source),
        ],
    )


def _step_bars(contenders: Sequence[Json], job: Job) -> Json:
    """The parts of each one's step, and its interval."""
    longest_s = max(one["prediction"]["iteration_s"] for one in contenders)

    def parts(step: Json) -> dict[str, float]:
        found = step.get("causes") or {name: step[key] for name, key in _STEP_PARTS.items()}
        return {name: seconds for name, seconds in found.items() if seconds >= _VISIBLE * longest_s}

    rows = [
        page.step_row(one["shown_name"], one["prediction"], parts(one["prediction"]), job=job) for one in contenders
    ]
    note = (
        "Whiskers: the 80% interval; thick: the part that other strategies do not share. Differences within that part, "
        "of both, are within model error."
    )
    return page.stacks("Step time by strategy", rows, _COLORS, axis="s per step", note=note)
