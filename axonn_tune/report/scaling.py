"""A sweep over numbers of GPUs: as a table, JSON and a section of a page.

JSON follows the contract `axonn-tune/sweep/1`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from axonn_tune.frameworks.description import Framework
from axonn_tune.ranking.documents import framework_of
from axonn_tune.ranking.sweep import Point
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.report import page
from axonn_tune.report.configuration import LayoutWords
from axonn_tune.report.output import PERCENT, Column, Json, Table, count, percent, words
from axonn_tune.report.ranking import (
    COLUMNS,
    CONFIG_FIELDS,
    METRICS,
    RANKED_BY,
    SHORTEST,
    TEXT_COLUMNS,
    axis_columns,
    entry_fields,
    explained,
    machine_words,
    optimizer_words,
    origin,
    shown_axes,
    shown_rows,
    with_framework,
    without_equal_axes,
)
from axonn_tune.report.training import TRAINING, show_days, training_columns, training_fields
from axonn_tune.units import counted, show_count, show_seconds
from axonn_tune.vocabulary import VERSION

SWEEP_SCHEMA = "axonn-tune/sweep/1"

_POINT = {
    "model": words("model", "model", "What is trained.", 12),
    "gpus": count("gpus", "GPUs", "How many there are."),
    "batch": count("global_batch", "batch", "Sequences in a step."),
}
_DISPATCH = replace(
    COLUMNS["communication_s"],
    key="dispatch_s",
    label="dispatch, s",
    title=None,
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
    *("shortest_step_s", "low_s", "high_s", "tokens_per_s", "mfu", "logged_tflops_per_gpu", "memory"),
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
_MAIN_SWEEP_COLUMNS = (
    *("model", "gpus", "batch", "grid", "order", "step", "tokens_per_s", "mfu", "logged_tflops_per_gpu", "efficiency"),
)
_TOOK = words("took", "what it takes", "Options that take less memory.", 40)
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
    points: Sequence[Point],
    *,
    names: Sequence[str] = (),
    wide: bool = False,
    shortest: bool = False,
    verbose: bool = False,
) -> Table:
    """The points with these columns, all or the main ones; below are the reasons where nothing is feasible.

    verbose: and why efficiency is above 100%, where it is. shortest: below a point is also the shortest step of all,
    marked, where that of the best is longer.
    """
    problem = points[0].inputs.problem
    own = _points_json(points)
    pairs = zip(points, own, strict=True)
    shown = [row for point, one in pairs for row in (one, *(_fastest_json(point, one) if shortest else ()))]
    axes, equal, framework = shown_axes(problem), dict[str, int](), problem.framework
    if not (names or wide):
        axes, equal = without_equal_axes(framework, axes, [one["config"] for one in shown if one["config"]])
    label, rows = _sweep_rows(shown, framework, axes)
    infeasible = [row for row in rows if not row["feasible"]]
    over = points[0].over and points[0].over[0]
    reasons = [
        f"{row['model']} on {row['gpus']} GPUs, batch {row['global_batch']}"
        + (f", {over} {row['over']}: {row['reason']}" if over else f": {row['reason']}")
        for row in infeasible
    ]
    grid = replace(_SWEEP_COLUMNS["grid"], label=label)
    swept = {"over": _over_column(over), "dispatch_s": _DISPATCH, "efficiency": _OF_BEST_SIZE} if over else {}
    more = {"grid": grid, "layout": grid, "precision": COLUMNS["precision"], "took": _TOOK}
    columns = {**_SWEEP_COLUMNS, **_TRAINING, **more, **swept}
    has = {"order": problem.framework.permuted, "logged_tflops_per_gpu": problem.framework.logged is not None}
    main = [name for name in _MAIN_SWEEP_COLUMNS if has.get(name, True)]
    if over:
        several = len({point.inputs.problem.gpus for point in points}) > 1
        main = ["over" if name == "batch" else name for name in main if name != "gpus" or several]
        main[main.index("step") + 1 :] = ["dispatch_s", "memory", "tokens_per_s", "mfu", "efficiency"]
        main[-1:-1] = ["logged_tflops_per_gpu"] * has["logged_tflops_per_gpu"]
    formats = ("precision",) if any(point.inputs.problem.formats for point in points) else ()
    main[main.index("grid") + 1 : main.index("grid") + 1] = formats
    training = training_columns(problem)
    took = ["took"] * any(point.saving for point in points)
    chosen = names or (*(_SWEEP_COLUMNS if wide else main), *training, *took)
    savers = dict.fromkeys(saver for point in points if point.saving for saver in point.saving.savers)
    notes = [*([_LONGER] if len(shown) > len(points) else []), *(_above_100(rows) if verbose else []), *reasons]
    notes += [_marked_words(rows)] if training else []
    notes += ["; ".join(f"{saver.title}: {saver.words}" for saver in savers)] if savers else []
    fields = (*_CSV, *formats, *took, *(_OVER_FIELDS if over else ()), *training_fields(problem, None))
    table = Table(columns, rows, chosen, fields, notes, apart=True, title=_ranked(points))
    if names or wide:
        return table
    said = [f"{framework.called(axis)} {size}" for axis, size in equal.items()]
    if len({row["model"] for row in rows}) == 1:
        table = replace(table, names=[name for name in table.names if name != "model"])
    table = table.without_equal(("batch", "order", "precision"), said).fitted(
        ("tokens_per_s", "mfu", "order", "node_hours", "energy_mwh")
    )
    return explained(table, framework, (*axes, *equal))


def _over_column(name: str) -> Column:
    """Sizes of the axis that is swept, under its name."""
    return count("over", name, f"Size of {name}.")


def _ranked(points: Sequence[Point]) -> str:
    """What was priced, and what the configurations are the best by."""
    problem = points[0].inputs.problem
    workloads = [point.inputs.problem.workload for point in points]
    lengths = dict.fromkeys(f"{one.sequence_length:,}" for one in workloads)
    differing = workloads[0].lengths
    names = ", ".join(dict.fromkeys(point.inputs.problem.title for point in points))
    where = f"{machine_words(problem)}{with_framework(problem.framework)}"
    formats = ", ".join(problem.formats or (problem.workload.precision,))
    return (
        f"{names} on {where}, sequences of {' or '.join(lengths)} tokens"
        f"{f' ({differing.words})' if differing else ''} in {formats}{optimizer_words(problem.framework)}: the best of "
        f"each point, ranked by {RANKED_BY[problem.rank_by]}{'' if problem.framework.measured_on else NOT_MEASURED}."
    )


def _marked_words(rows: Sequence[Json]) -> str:
    """Which points cost least and take the fewest days."""
    return " ".join(
        f"{row['marked'].capitalize()}: {row['gpus']:,} GPUs, {show_days(row['days'])} days, "
        + (f"{show_count(row['gpu_hours'])} GPU-hours" if row["cost"] is None else f"cost {show_count(row['cost'])}")
        + "."
        for row in rows
        if row.get("marked")
    )


NOTABLE = 0.005
"""Share of a step that is worth a word."""
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
        {**config, **{key: point[key] for key in (*_POINT_FIELDS, *_OVER_FIELDS, "took", "marked") if key in point}}
        for config, point in zip(configs, points, strict=True)
    ]


def sweep_document(points: Sequence[Point], *, weak: bool) -> Json:
    """Everything, as `axonn-tune/sweep/1`; each model and the machine once."""
    models = {point.inputs.model.document.name: origin(point.inputs.model) for point in points}
    return {
        "schema": SWEEP_SCHEMA,
        "tool_version": VERSION,
        "scaling": "weak" if weak else "strong",
        "rank_by": points[0].inputs.problem.rank_by if points else None,
        "framework": points[0].inputs.problem.framework.name if points else None,
        "measured": bool(points and points[0].inputs.problem.framework.measured_on),
        "models": list(models.values()),
        "machine": origin(points[0].inputs.machine) if points else None,
        **({"over": points[0].over[0]} if points and points[0].over else {}),
        "points": _points_json(points),
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
        **({"took": point.saving.titles, "options": point.saving.words} if point.saving else {}),
    }


def _points_json(points: Sequence[Point]) -> list[Json]:
    """All points; with a whole training, the cheapest and the fastest are marked."""
    found = [_point_json(point) for point in points]
    if points and points[0].inputs.problem.tokens_total:
        # Imported here, as in `training_fields`.
        from axonn_tune.cost.economics import cheapest_and_fastest

        for place, mark in cheapest_and_fastest([one["config"] or {} for one in found]).items():
            found[place]["marked"] = mark
    return found


def _fastest_json(point: Point, own: Json) -> list[Json]:
    """The shortest step of all at a point as a row below its best, if that is another."""
    name = f"{own['model']} {SHORTEST}"
    return (
        [{**own, "model": name, "efficiency": None, "marked": None, "config": own["shortest_step"]}]
        if point.fastest
        else []
    )


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
    training = [COLUMNS[key] for key in TRAINING if any(row.get(key) is not None for row in feasible)]
    columns = [*_POINT.values(), *swept, _EFFICIENCY, *named, *(COLUMNS[key] for key in _OF_CONFIG), *training]
    if len(feasible) < len(rows):
        said.append(f"at {len(rows) - len(feasible)} of them nothing is feasible; the table says why")
        columns.append(_REASON)
    note = f"{scaling} scaling. {page.SORTS}"
    blocks = [
        *([_curves(lines, layouts=layouts, over=over)] if lines else []),
        *([_days_over_cost(lines, layouts=layouts)] if len(feasible) > 1 and feasible[0].get("days") else []),
        page.table(f"{identity}-table", "Every point", columns, rows, note=note, tall=tall),
        page.machine_fold(document["machine"]),
        *(page.model_fold(model) for model in document["models"]),
        page.workload_fold(points[0]["workload"]),
        page.origin_fold(page.origin_rows(document, source)),
    ]
    title = f"{names} on {document['machine']['name']}{with_framework(framework)}: {over or 'scaling'}"
    reached = _best_of(lines, over) if over else _reached(lines)
    reached += [marked] if (marked := _marked_words(rows)) else []
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


def _days_over_cost(lines: Mapping[str, Sequence[Json]], *, layouts: LayoutWords) -> Json:
    """Days of a whole training over its money, or GPU-hours without a price: what more GPUs buy."""
    paid = "gpu_hours" if any(row["cost"] is None for line in lines.values() for row in line) else "cost"
    return {
        "kind": "lines",
        "title": f"Days over {COLUMNS[paid].label}",
        "note": "A point to the lower left of another is better in both. Whiskers: the 80% interval.",
        "axis": COLUMNS[paid].label,
        "choices": ["days"],
        "metrics": [{"label": "days", "log": True}],
        "lines": [
            {
                "name": name,
                "x": [row[paid] for row in line],
                "words": [f"{name}: {row['gpus']:,} GPUs<br>{layouts.sizes(row)}" for row in line],
                "values": [[row["days"] for row in line]],
                "ideal": [[]],
                "up": [[row["days_high"] - row["days"] for row in line]],
                "down": [[row["days"] - row["days_low"] for row in line]],
            }
            for name, line in lines.items()
        ],
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
