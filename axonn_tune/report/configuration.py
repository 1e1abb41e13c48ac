"""One configuration in detail: in words, its memory against the limit, its timeline, each term and how it is priced.

`cost.spans` has every operation of a step, for traces; a page has room for what can be seen. So the timeline is drawn
as bars on lanes, a compute lane and one for the collectives of each axis: one layer as it stands among others, and
the whole step coarsely.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from axonn_tune.cost.price import CONTENDED, Detail, kind_of, price
from axonn_tune.cost.replay import Batch, Interval, Stretch
from axonn_tune.errors import AxonnTuneError, UsageError
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import ALL_AXES, Grid
from axonn_tune.job import Layout
from axonn_tune.launch.commands import emission
from axonn_tune.launch.config import build_launch, launch_text
from axonn_tune.program.operations import Collective
from axonn_tune.ranking.inputs import Inputs, make_workload
from axonn_tune.ranking.space import Problem
from axonn_tune.report import page
from axonn_tune.report.explain import (
    WORK_COLUMNS,
    gap_to_peak,
    line_sentences,
    memory_items,
    paragraphs,
    work_rows,
)
from axonn_tune.report.output import Json, axis_name, percent
from axonn_tune.report.ranking import (
    COLLECTIVE,
    TIED,
    days_interval,
    framework_of,
    is_tied,
    page_axes,
    show_days,
    term_json,
    term_row,
    with_framework,
)
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.loading import D, Loaded, is_shipped, parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.traces import COMPUTE_LANE, END, HEAD, communication_lane, term_name, wait_name
from axonn_tune.specs.workload import Workload
from axonn_tune.units import GIB, MILLI, show_bytes, show_count, show_seconds

_ADDED = frozenset({"path", "sha256"})
"""Keys that results have beside those of the documents they were made from."""
_SAME = 1e-9
"""Relative difference up to which two predictions are the same."""

SEVERAL, WAITING = "several in sequence", "waiting"
_LAYERS_BEFORE = 4
"""Collectives of so many layers may still be under way when the next one begins."""
_STEP_PARTS = 500
"""What is shorter than this part of a step is too narrow to see in a figure of the step."""
_BY_PHASE = {"forward": "--compute", HEAD: "--compute-4", "backward": "--compute-2", END: "--compute-3"}
_LANE_HEIGHT, _BASE_HEIGHT = 34, 80
_LONG = 0.6
"""Share of a figure's width from which on a bar has its words within."""


def _parsed(document: Json, schema: type[D], *, source: str) -> D:
    """A document within a document of results; DocumentError if this version cannot read it."""
    own = {key: value for key, value in document.items() if key not in _ADDED}
    return parse_document(json.dumps(own), schema=schema, source=source)


def inputs_of(document: Json, *, source: str) -> Inputs:
    """Inputs of a ranking or comparison, or of a configuration of a validation."""
    model, machine = document["model"], document["machine"]
    trained = _parsed(model, Model, source=source)
    profile = _parsed(machine, Machine, source=source)
    problem = Problem(
        model=trained,
        machine=profile,
        workload=_parsed(document["workload"], Workload, source=source),
        gpus=document["gpus"],
        rank_by=document.get("rank_by", "iteration"),
        framework=framework_of(document),
        tokens_total=next((one.get("tokens_total") for one in document.get("configs", [])), None),
    )
    return Inputs(
        problem,
        Loaded(trained, Path(model.get("path", trained.name)), model["sha256"]),
        Loaded(profile, Path(machine.get("path", profile.name)), machine["sha256"]),
    )


def explain_command(inputs: Inputs) -> list[str]:
    """The start of a command line that explains a configuration; empty if the files are not what they were."""
    try:
        now = load_model(str(inputs.model.path)), load_machine(str(inputs.machine.path))
    except AxonnTuneError:
        return []
    if (now[0].sha256, now[1].sha256) != (inputs.model.sha256, inputs.machine.sha256):
        return []
    workload, problem = inputs.problem.workload, inputs.problem
    model_name = problem.model.name if is_shipped("model", inputs.model.path) else str(inputs.model.path)
    machine_name = problem.machine.name if is_shipped("machine", inputs.machine.path) else str(inputs.machine.path)
    defaults = make_workload(problem.model, Request())
    made = {"global_batch": "--batch", "sequence_length": "--seq", "precision": "--precision"}
    changed = {key: option for key, option in made.items() if getattr(workload, key) != getattr(defaults, key)}
    options = [word for key, option in changed.items() for word in (option, str(getattr(workload, key)))]
    if workload.shard_optimizer_over_data:
        options.append("--shard-optimizer")
    if workload.split_micro_batch:
        options.append("--split-micro-batch")
    if workload.overlaps != defaults.overlaps:
        options += [word for name in workload.overlaps for word in ("--overlap", name)] or ["--no-overlap"]
    if problem.framework.name != AXONN_TUNE.name:
        options += ["--framework", problem.framework.name]
    if problem.rank_by != problem.framework.ranked_by:
        options += ["--rank-by", problem.rank_by]
    return [
        *("axonn-tune", "explain", "--gpus", str(problem.gpus), "--model", model_name, "--machine", machine_name),
        *options,
    ]


@dataclass(frozen=True)
class ConfigurationDetail:
    """A configuration of a document, as the document has it, and priced again by this version."""

    config: Json
    inputs: Inputs
    priced: Detail


def detailed(config: Json, inputs: Inputs) -> ConfigurationDetail | None:
    """Price a configuration of the contract; None if it does not say enough, as those of other cost models do not."""
    if not config["feasible"] or config["iteration_s"] is None or config["order"] is None:
        return None
    order = tuple(config["order"].split(","))
    grid = Grid(**{axis: config[axis] for axis in ALL_AXES if axis in config}, order=order)
    chunks = config.get("chunks") or 1
    settled = Layout(grid, config["micro_batch"], config["recompute"], config["kept_layers"], chunks)
    return ConfigurationDetail(config, inputs, price(inputs.problem, settled))


@dataclass(frozen=True)
class LayoutWords:
    """How a page writes layouts: in the framework's names of these axes."""

    framework: Framework
    axes: tuple[str, ...]

    @classmethod
    def of(cls, document: Json, configs: Iterable[Json]) -> LayoutWords:
        """Those of a document of results."""
        framework = framework_of(document)
        return cls(framework, tuple(page_axes(framework, configs)))

    def sizes(self, config: Mapping[str, object]) -> str:
        """`x 1 · y 1 · z 512 · data 2`, `TP 4 · GTP 1 · DP 16`."""
        return " · ".join(f"{self.framework.called(axis)} {config[axis]}" for axis in self.axes)

    def short(self, config: Json, *, launch: bool = False) -> str:
        """`#1  1×1×512×2`, `#2 ≈  1×1×256×4` where it is within model error of the first, or `launch  1×1×512×2`."""
        rank = "launch" if launch else f"#{config['rank']}{f' {TIED}' if is_tied(config) else ''}"
        return f"{rank}  {'×'.join(str(config[axis]) for axis in self.axes)}"

    def title(self, config: Json) -> str:
        """What a configuration is called above its details."""
        rank = "" if config["rank"] is None else f"#{config['rank']}: "
        batches = f"micro-batch {config['micro_batch']}, recompute {config['recompute']}"
        return f"{rank}{self.sizes(config)}, {batches}"

    def pins(self, config: Mapping[str, object]) -> list[str]:
        """Options that leave just this configuration."""
        found = [word for axis in self.axes for word in (self.framework.option(axis), str(config[axis]))]
        found += ["--order", str(config["order"])] if self.framework.permuted else []
        found += ["--micro-batch", str(config["micro_batch"]), "--recompute", str(config["recompute"])]
        return [*found, "--kept-layers", str(config["kept_layers"])]


def detail_blocks(
    found: ConfigurationDetail, *, explain: Sequence[str], layouts: LayoutWords, source: str
) -> list[Json]:
    """Everything about a configuration; `explain`: words of the command that explains it, less its own options.

    source: what launch configs and scripts say they were written by, where that command is not known.
    """
    config, priced = found.config, found.priced
    listed = config.get("terms") or [term_json(term) for term in priced.terms]
    rows = [term_row(term, layouts.framework) for term in listed]
    terms = page.table("", "", [COLLECTIVE[key] for key in _TERMS], rows)
    computed = [page.text(line_sentences(priced), title="How calls are priced")]
    blocks = [
        page.cards(config_cards(config, limit_bytes=priced.memory_limit_bytes)),
        *_changed(found),
        gap_figure(found),
        *_in_words(found),
        *timeline_figures(priced),
        memory_figure(priced),
        page.fold(f"Every collective ({len(rows)}), with fixed time, algbw and busbw", [terms, *computed]),
        page.fold("Computation", [page.table("", "", WORK_COLUMNS, work_rows(priced)[:-1])]),
    ]
    if explain:
        blocks.append(page.command(shlex.join([*explain, *layouts.pins(config)]), title="The same in the terminal"))
    return [*blocks, *launch_blocks(found, command=launch_command(explain, layouts.pins(config)) or source)]


def launch_command(explain: Sequence[str], pins: Sequence[str]) -> str:
    """The command line that writes what starts a configuration, from that which explains it; empty without one."""
    written = "run.sh" if "--framework" in explain else "launch.yaml"
    return " ".join([shlex.join([explain[0], *explain[2:]]), *pins, "-o", written]) if explain else ""


def launch_blocks(found: ConfigurationDetail, *, command: str) -> Iterator[Json]:
    """What starts a configuration, to copy: a launch config, or the script and files of another framework.

    command: what the text says it was written by. Nothing for what can only be priced.
    """
    problem, priced = found.inputs.problem, found.priced
    model, machine = found.inputs.model, found.inputs.machine
    try:
        if problem.framework.software:
            files = emission(
                priced,
                "run.sh",
                call=command,
            )
            texts = {files.script: files.text, **files.files}
        else:
            launch = build_launch(priced, model=model, machine=machine, command=command)
            texts = {Path("launch.yaml"): launch_text(launch)}
    except UsageError:
        return
    for path, text in texts.items():
        what = "Launch config" if path.suffix == ".yaml" and len(texts) == 1 else "Script"
        yield page.fold(f"{what} to copy: {path}", [page.command(text, title="")])


def explanation_section(
    document: Json, *, identity: str, source: str, subject: tuple[Inputs, Detail] | None = None
) -> Json:
    """The section of an explanation; `subject`: the inputs and layout that it explains, else that is priced again.

    ValueError for a document of a configuration without a step time, errors as of `inputs_of`.
    """
    config = document["config"]
    inputs = subject[0] if subject else inputs_of({**document, "configs": [config]}, source=source)
    found = ConfigurationDetail(config, *subject) if subject else detailed(config, inputs)
    if found is None:
        raise ValueError("no step time")
    layouts = LayoutWords.of(document, [config])
    changes = [
        page.command(change["command"], title=f"{change['words']}: {percent(change['gain'])} less time")
        for change in document.get("changes", [])
    ]
    return page.section(
        identity,
        f"{document['model']['name']} on {document['gpus']:,} × {document['machine']['name']}"
        f"{with_framework(layouts.framework)}: one configuration",
        subtitle=page.subtitle(document),
        verdict=[f"{layouts.title({**config, 'rank': None})}: {outcome(config)}"],
        blocks=[
            *detail_blocks(found, explain=explain_command(inputs), layouts=layouts, source=source),
            *page.notes([f"Assumed: {words}." for words in document.get("run", {}).get("assumed", [])]),
            *changes,
            *page.provenance_folds(document, source=source),
        ],
    )


def _in_words(found: ConfigurationDetail) -> list[Json]:
    """The step in sentences, where the document says what follows from its time."""
    config = found.config
    if config["low_s"] is None or config["mfu"] is None:
        return []
    story = [" ".join(part) for part in paragraphs(found.priced, log=False)]
    return [page.fold("The step in words", [page.text(story)])]


def outcome(config: Json) -> str:
    """`69.3 s a step (80%: 52 s to 86.6 s), MFU 46.0%, 73 GiB a GPU`, of what is known of it."""
    within = page.interval_words(config)
    found: list[tuple[str, Callable[[float], str]]] = [
        ("iteration_s", lambda step_s: f"{show_seconds(step_s)} a step{f' ({within})' if within else ''}"),
        ("mfu", lambda mfu: f"MFU {percent(mfu)}"),
        ("memory_bytes", lambda size_bytes: f"{show_bytes(size_bytes)} a GPU"),
    ]
    return ", ".join(show(config[key]) for key, show in found if config[key] is not None)


def config_cards(config: Json, *, limit_bytes: float) -> list[Json]:
    """The numbers that matter most of one configuration of the contract."""
    hfu, total = config["hfu"], show_count(config.get("tokens_total") or 0)
    hours = " to ".join(show_count(config.get(f"gpu_hours{end}") or 0) for end in ("_low", "_high"))
    days = days_interval(config)
    found: list[tuple[str, str, Callable[[float], str], str]] = [
        ("step", "iteration_s", show_seconds, page.interval_words(config)),
        ("MFU", "mfu", percent, "" if hfu is None else f"HFU {hfu:.1%}"),
        ("memory", "memory_bytes", show_bytes, f"of {show_bytes(limit_bytes)} usable"),
        ("exposed", "exposed_communication_s", show_seconds, "communication not overlapped"),
        ("communication", "communication_s", show_seconds, "all collectives, overlapped or not"),
        ("computation", "compute_s", show_seconds, "kernels of one GPU"),
        ("tokens/s", "tokens_per_s", "{:,.0f}".format, "of all GPUs"),
        (f"days, {total} tokens", "days", show_days, f"80%: {days}"),
        (f"GPU-hours, {total} tokens", "gpu_hours", show_count, f"80%: {hours}"),
    ]
    return [
        page.card(label, show(config[key]), note=note)
        for label, key, show, note in found
        if config.get(key) is not None
    ]


def _changed(found: ConfigurationDetail) -> list[Json]:
    """A warning if this version predicts another time than the document holds."""
    then_s, now_s = found.config["iteration_s"], found.priced.iteration_s
    if abs(now_s / then_s - 1.0) < _SAME:
        return []
    warning = (
        f"The source has {show_seconds(then_s)} for this step, this version predicts {show_seconds(now_s)}: "
        "timeline, memory and computation below are this version's."
    )
    return [page.text([warning])]


def gap_figure(found: ConfigurationDetail) -> Json:
    """What the step is spent on: useful FLOPs at the peak, then what stands between that and the step."""
    step_s = found.priced.iteration_s
    spent = gap_to_peak(found.priced)
    scale, unit = time_unit(step_s)
    parts = [(what, spent_s / scale, f"{show_seconds(spent_s)}, {spent_s / step_s:.1%}") for what, spent_s in spent]
    xaxis = {"title": {"text": unit}, "range": [0, 1.4 * max(value for _, value, _ in parts)]}
    note = "The bars sum to the step. The first is what the step would take at the accelerator's peak."
    return _part_bars("Gap to peak", parts, xaxis=xaxis, note=note)


def memory_figure(priced: Detail) -> Json:
    """Peak memory of one rank, largest item first, and what it may use."""
    *items, (_, total) = memory_items(priced)
    limit = priced.memory_limit_bytes
    parts = [(name, size / GIB, show_bytes(size)) for name, size in (("all", total), *items)]
    xaxis = {"title": {"text": "GiB"}, "range": [0, 1.18 * max(limit, total) / GIB]}
    line = {**page.upright(limit / GIB, {"color": page.LIMIT, "width": 2, "dash": "dash"}), "layer": "below"}
    note = f"Dashed line: usable memory, {limit / GIB:.3g} GiB; {show_bytes(max(limit - total, 0.0))} are free."
    return _part_bars("Peak memory per GPU", parts, xaxis=xaxis, shapes=[line], note=note)


def _part_bars(
    title: str, parts: Sequence[tuple[str, float, str]], *, xaxis: Json, note: str, shapes: Sequence[Json] = ()
) -> Json:
    """A bar for each part with its words at the end, or within where it is long; the first stands out."""
    names, sizes, written = zip(*parts, strict=True)
    color = [page.ACCENT, *[page.MUTED] * (len(parts) - 1)]
    places = ["inside" if size > _LONG * xaxis["range"][1] else "outside" for size in sizes]
    look = {
        "text": written,
        "textposition": places,
        "cliponaxis": False,
        "insidetextanchor": "end",
        "hoverinfo": "skip",
    }
    return page.named_bars(title, names, sizes, color=color, xaxis=xaxis, note=note, shapes=shapes, look=look)


_TERMS = (
    *("op", "axis", "phase", "layer", "seconds", "exposed_s", "count", "group", "bytes", "formula", "tier"),
    *("algorithm", "latency_s", "bandwidth_bytes_per_s", "bus_bandwidth_bytes_per_s"),
)


def timeline_figures(priced: Detail) -> list[Json]:
    """One layer forward, one backward, and the step."""
    step = step_bars(priced, finest_s=priced.iteration_s / _STEP_PARTS)
    micro_batches = priced.accumulation
    batches = f"All {micro_batches:,} micro-batches of the step" if micro_batches > 1 else "The step's only micro-batch"
    of_forward = "A block in the middle of the model, with its waits and the collectives that earlier blocks launched."
    of_step = (
        f"{batches}, then the optimizer. What is too short to see is joined with its neighbors; the paler a bar, the"
        " less of it the stream is busy."
    )
    of_backward, names = "The same block in the backward pass, recompute included.", priced.job.framework
    return [
        _lane_figure("One layer, forward", layer_bars(priced, "forward"), note=of_forward, names=names),
        _lane_figure("One layer, backward", layer_bars(priced, "backward"), note=of_backward, names=names),
        _lane_figure("The whole step", step, note=of_step, names=names, faint=True),
    ]


def _lane_figure(title: str, bars: Sequence[Bar], *, note: str, names: Framework, faint: bool = False) -> Json:
    lanes = sorted({one.lane for one in bars}, key=lambda lane: (lane != COMPUTE_LANE, lane))
    end_s = max((one.end_s for one in bars), default=0.0)
    scale, unit = time_unit(end_s)
    traces = [
        _lane_trace(
            what,
            [one for one in bars if (one.what, one.lane) == (what, lane)],
            lanes,
            scale=scale,
            faint=faint,
            names=names,
        )
        for lane, what in sorted({(one.lane, one.what) for one in bars}, key=_trace_place)
    ]
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        # There is little room beside a lane.
        "yaxis": page.named_axis(
            [over_axis(lane.removeprefix("communication "), names) for lane in lanes], below=0.5, above=0.5
        ),
    }
    height = _BASE_HEIGHT + _LANE_HEIGHT * len(lanes)
    return page.figure(title, traces, layout=layout, height=height, note=note)


def time_unit(end_s: float) -> tuple[float, str]:
    """In what a figure of times up to `end_s` has them: s of the unit, and its name."""
    return (MILLI, "ms") if end_s < 1.0 else (1.0, "s")


def _lane_trace(
    what: str, bars: Sequence[Bar], lanes: Sequence[str], *, scale: float, faint: bool, names: Framework
) -> Json:
    color = _bar_color(what, bars[0].lane)
    opacity = [round(0.25 + 0.75 * _busy_share(one), 2) for one in bars] if faint else 1.0
    return {
        **page.bar_trace(
            over_axis(what, names),
            [_short((one.end_s - one.start_s) / scale) for one in bars],
            [lanes.index(one.lane) for one in bars],
            color=color,
            text=[_bar_words(one, names) for one in bars],
        ),
        "base": [_short(one.start_s / scale) for one in bars],
        "width": 0.7,
        # What is narrower than a pixel is still seen.
        "marker": {"color": color, "opacity": opacity, "line": {"width": 0.7, "color": color}},
    }


def _bar_words(one: Bar, names: Framework) -> str:
    lasted_s = one.end_s - one.start_s
    busy = "" if _busy_share(one) > 0.99 else f", busy {_busy_share(one):.0%} of it"
    return f"{over_axis(one.name, names)}<br>{show_seconds(lasted_s)} from {show_seconds(one.start_s)}{busy}"


def _busy_share(one: Bar) -> float:
    lasted_s = one.end_s - one.start_s
    return min(one.busy_s / lasted_s, 1.0) if lasted_s else 1.0


def _short(value: float) -> float:
    """A number as exactly as a screen can show it."""
    return float(f"{value:.5g}")


def _trace_place(lane_and_what: tuple[str, str]) -> tuple[bool, str, int, str]:
    """Traces in the order of lanes and of the step."""
    lane, what = lane_and_what
    phases = list(_BY_PHASE)
    return lane != COMPUTE_LANE, lane, phases.index(what) if what in phases else len(phases), what


def over_axis(what: str, names: Framework) -> str:
    """`all_gather over z, forward, qkv` with the framework's name of the axis; what is over none as it is."""
    call, over, rest = what.partition("over ")
    axes, comma, where = rest.partition(",")
    return f"{call}{over}{names.called(axes)}{comma}{where}" if over and axes != "world" else what


def _bar_color(what: str, lane: str) -> str:
    if what == WAITING:
        return page.WAIT
    if what == SEVERAL:
        return page.MUTED if lane == COMPUTE_LANE else page.term_color("all_reduce", lane.rpartition(" ")[2])
    op, _, axis = what.partition(" over ")
    return page.term_color(op, axis) if axis else {**_BY_PHASE, **page.BY_KIND}[what]


@dataclass(frozen=True)
class Bar:
    """Something on a lane. what: what it is colored by; busy_s: how much of it the lane is in use, s."""

    lane: str
    what: str
    name: str
    start_s: float
    end_s: float
    busy_s: float

    def moved(self, by_s: float) -> Bar:
        """The same at another time."""
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)

    def within(self, start_s: float, end_s: float) -> Bar:
        """The part of it between two times; none if its end does not come after its start."""
        cut = max(self.start_s, start_s), min(self.end_s, end_s)
        return replace(self, start_s=cut[0], end_s=cut[1], busy_s=cut[1] - cut[0])


def bar(interval: Interval) -> Bar:
    """An interval of the schedule, on the lane that a trace has for it; computation by its kind."""
    operation, times = interval.operation, (interval.start_s, interval.end_s, interval.end_s - interval.start_s)
    if isinstance(operation, Collective):
        name = term_name(operation.kind, operation.axis, operation.phase, operation.layer)
        if interval.pause:
            return Bar(COMPUTE_LANE, WAITING, wait_name(name), *times)
        return Bar(
            communication_lane(operation.axis), f"{operation.kind} over {axis_name(operation.axis)}", name, *times
        )
    kind = kind_of(operation)
    return Bar(COMPUTE_LANE, kind, f"{kind}: {operation.layer}, {operation.phase}", *times)


def phase_bar(stretch: Stretch) -> Bar:
    """The computation of a part of the step as one bar: forward, head and loss, backward, or the end."""
    computed = [one for one in stretch.intervals if one.lane == COMPUTE_LANE and not one.pause]
    phase = stretch.names[0].rpartition(", ")[2]
    busy_s = sum(one.end_s - one.start_s for one in computed)
    return Bar(COMPUTE_LANE, phase, phase, stretch.start_s, stretch.end_s, busy_s)


def layer_bars(priced: Detail, phase: str) -> list[Bar]:
    """One block, forward or backward, from time 0: the kind there is most of, of the last micro-batch.

    With what earlier ones have sent, if there are earlier ones.
    """
    stretches = priced.batches[-1].stretches
    blocks = [one for one in stretches if one.names[0].startswith("block ") and one.names[0].endswith(phase)]
    chosen = max(blocks, key=lambda one: len(one.names))
    lasts_s = chosen.end_s - chosen.start_s
    before = _LAYERS_BEFORE if len(chosen.names) > 1 else 1
    shifts_s = [chosen.shifts_s(-number) for number in range(before)]
    bars = [bar(one).moved(by_s(one.lane) - chosen.start_s) for by_s in shifts_s for one in chosen.intervals]
    if len(chosen.names) > 1:
        bars = [one.within(0.0, lasts_s) for one in bars]
    return [one for one in bars if one.end_s > one.start_s]


def step_bars(priced: Detail, *, finest_s: float) -> list[Bar]:
    """The whole step; what is shorter than `finest_s`, or less than that apart, is drawn as one."""
    found: list[Bar] = []
    start_s = 0.0
    for batch in priced.batches:
        one_batch = merged(_batch_bars(batch), finest_s=finest_s)
        if batch.every_s < finest_s:
            # All of a lane is joined, however many there are.
            later_s = (batch.times - 1) * batch.every_s
            stretched = (replace(one, end_s=one.end_s + later_s, busy_s=batch.times * one.busy_s) for one in one_batch)
            found += [one.moved(start_s) for one in stretched]
        else:
            found += [one.moved(start_s + time * batch.every_s) for time in range(batch.times) for one in one_batch]
        start_s += batch.times * batch.every_s
    if priced.contended_s:
        end_s = priced.iteration_s
        found.append(Bar(COMPUTE_LANE, CONTENDED, CONTENDED, end_s - priced.contended_s, end_s, priced.contended_s))
    return merged(found, finest_s=finest_s)


def _batch_bars(batch: Batch) -> Iterator[Bar]:
    """Everything in one micro-batch: computation by its parts, and every collective."""
    for stretch in batch.stretches:
        sent = [interval for interval in stretch.intervals if interval.lane != COMPUTE_LANE]
        for time in range(len(stretch.names)):
            by_s = stretch.shifts_s(time)
            yield phase_bar(stretch).moved(by_s(COMPUTE_LANE))
            yield from (bar(interval).moved(by_s(interval.lane)) for interval in sent)


def merged(bars: Iterable[Bar], *, finest_s: float) -> list[Bar]:
    """Bars of a lane joined where they are of one kind, or too short to see, and less than `finest_s` apart."""
    found: list[Bar] = []
    for one in sorted(bars, key=lambda one: (one.lane, one.start_s)):
        if one.end_s <= one.start_s:
            continue
        before = found[-1] if found else None
        if before and before.lane == one.lane and _joins(before, one, finest_s):
            what = before.what if before.what == one.what else SEVERAL
            name = before.name if before.name == one.name else what
            busy_s = before.busy_s + one.busy_s
            found[-1] = Bar(one.lane, what, name, before.start_s, max(before.end_s, one.end_s), busy_s)
        else:
            found.append(one)
    return found


def _joins(before: Bar, one: Bar, finest_s: float) -> bool:
    """Whether two neighbours on a lane are drawn as one."""
    if one.start_s - before.end_s >= finest_s:
        return False
    short = max(one.end_s - one.start_s, before.end_s - before.start_s) < finest_s
    return short or before.what == one.what
