"""One configuration in detail: its map, its timeline, memory against the limit, each term and how it is priced.

`cost.spans` has every operation of a step, for traces; a page has room for what can be seen, as bars on lanes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from axonn_tune.cost.compute import ATTENTION, ELEMENT_WISE, GEMMS, OFFLOAD, SCANS
from axonn_tune.cost.price import Detail
from axonn_tune.cost.spans import SEVERAL, block_spans, busy_s, first_passes, step_spans
from axonn_tune.cost.work import CONTENDED
from axonn_tune.errors import UsageError
from axonn_tune.frameworks.description import Framework
from axonn_tune.launch.commands import emission
from axonn_tune.launch.config import build_launch, launch_text
from axonn_tune.ranking.documents import ConfigurationDetail, detailed, framework_of, inputs_of
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.report import page
from axonn_tune.report.collective_costs import line_sentences
from axonn_tune.report.commands import approximate, explain_command, layout_pins
from axonn_tune.report.explain import MEMORY_COLUMNS, WORK_COLUMNS, gap_to_peak, memory_rows, work_rows
from axonn_tune.report.facts import AXIS_COLUMNS, axis_rows, node_words, step_facts
from axonn_tune.report.output import Json, percent
from axonn_tune.report.pipeline_map import ACTIVATIONS, MAP_COLUMNS, MEMORY_GROUPS, stage_rows
from axonn_tune.report.ranking import COLLECTIVE, OUTSIDE, TIED, is_tied, page_axes, term_json, term_row, with_framework
from axonn_tune.report.training import days_interval, show_days
from axonn_tune.specs.traces import Span
from axonn_tune.units import counted, show_bytes, show_count, show_seconds
from axonn_tune.vocabulary import COMPUTE_LANE, END, HEAD

_SAME = 1e-9
"""Relative difference up to which two predictions are the same."""

_STEP_PARTS = 500
"""What is shorter than this part of a step is too narrow to see in a figure of the step."""
_TOLD = (("micro_batch", "micro-batch"), ("chunk", "chunk"))
"""What pointing at a bar also says."""
_WAITING, _IN_TURN = "waiting", "forward and backward in turn"
_KINDS = {
    "GEMM": (GEMMS, page.BY_KIND[GEMMS]),
    "attention": (ATTENTION, page.BY_KIND[ATTENTION]),
    "scan": (SCANS, page.BY_KIND[SCANS]),
    "kernel": (ELEMENT_WISE, page.BY_KIND[ELEMENT_WISE]),
    "host": (OFFLOAD, page.BY_KIND[OFFLOAD]),
    "forward": ("forward", "--accent"),
    HEAD: (HEAD, "--compute-4"),
    "backward": ("backward", "--compute-2"),
    "input gradients": ("input gradients", "--compute-2"),
    "weight gradients": ("weight gradients", "--compute-3"),
    END: (END, "--axis-data"),
}
"""What parts and operations are called in figures, and their colors, in the order of the step."""
_ORDER = (*(what for what, _ in _KINDS.values()), _IN_TURN, _WAITING)


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
        """`z 512 · data 2`, `TP 4 · EP 8 · DP 16`: sizes other than 1, which may be placeholders."""
        wide = [axis for axis in self.axes if config.get(axis, 1) != 1]
        return " · ".join(f"{self.framework.called(axis)} {config[axis]}" for axis in wide) or "1 GPU"

    def short(self, config: Json, *, launch: bool = False) -> str:
        """`#1: TP 8 · PP 4`, `#2 ≈°: TP 4 · PP 8` with the marks of a table, or `launch: TP 8 · PP 4`."""
        marks = TIED * is_tied(config) + OUTSIDE * bool(config.get("outside_evidence"))
        rank = "launch" if launch else f"#{config['rank']} {marks}".rstrip() if config["rank"] else config["precision"]
        return f"{rank}: {self.sizes(config)}"

    def title(self, config: Json) -> str:
        """What a configuration is called above its details."""
        rank = "" if config["rank"] is None else f"#{config['rank']}: "
        some = f" on {config['recompute_layers']}" if config.get("recompute_layers") else ""
        batches = f"micro-batch {config['micro_batch']}, recompute {config['recompute']}{some}"
        dispatcher = f", dispatcher {config['dispatcher']}" if config.get("dispatcher") else ""
        overlap = ", EP overlap" * bool(config.get("expert_overlap"))
        order = f", {order}" if (order := config.get("pipeline_order")) not in (None, "1f1b") else ""
        return f"{rank}{self.sizes(config)}, {batches}{dispatcher}{overlap}{order}"

    def pins(self, config: Mapping[str, object]) -> list[str]:
        """Options that leave just this configuration."""
        return layout_pins(self.framework, self.axes, config)


def detail_blocks(
    found: ConfigurationDetail, *, explain: Sequence[str], layouts: LayoutWords, source: str
) -> list[Json]:
    """Everything about a configuration; `explain`: words of the command that explains it, less its own options.

    source: what launch configs and scripts say they were written by, where that command is not known.
    """
    config, priced = found.config, found.priced
    listed = config.get("terms") or [term_json(term) for term in priced.terms]
    rows = [term_row(term, layouts.framework) for term in listed]
    terms, stages = page.table("", "", [COLLECTIVE[key] for key in _TERMS], rows), stage_rows(priced)
    computed = [page.text(line_sentences(priced), title="How calls are priced")]
    # The document says what follows from its time, as those of validations do not.
    told = config["low_s"] is not None and config["mfu"] is not None
    blocks = [
        page.cards(config_cards(config, limit_bytes=priced.memory_limit_bytes)),
        *_changed(found),
        gap_figure(found),
        page.table("", "Layout", AXIS_COLUMNS, axis_rows(priced), note=node_words(priced)),
        *([page.table("", "Stages", MAP_COLUMNS, stages)] if priced.stages else []),
        *([page.fold("The step in numbers", [page.facts(step_facts(priced))])] if told else []),
        *timeline_figures(priced),
        memory_figure(priced, stages),
        page.fold("Memory by item", [page.table("", "", MEMORY_COLUMNS, memory_rows(priced))]),
        page.fold(f"Every collective ({len(rows)}), with fixed time, algbw and busbw", [terms, *computed]),
        page.fold("Computation", [page.table("", "", WORK_COLUMNS, work_rows(priced)[:-1])]),
    ]
    if explain:
        blocks.append(page.command(shlex.join([*explain, *layouts.pins(config)]), title="The same in the terminal"))
    written = launch_command(explain, [*map(shlex.quote, layouts.pins(config))], found.inputs)
    return [*blocks, *launch_blocks(found, command=written or source)]


def launch_command(explain: Sequence[str], pins: Sequence[str], inputs: Inputs) -> str:
    """The command line that writes what starts a configuration, from that which explains it; empty without one."""
    written = "run.sh" if "--framework" in explain else "launch.yaml"
    pinned = [*pins, *approximate(inputs.problem.model), "-o", written]
    return " ".join([shlex.join([explain[0], *explain[2:]]), *pinned]) if explain else ""


def launch_blocks(found: ConfigurationDetail, *, command: str) -> Iterator[Json]:
    """What starts a configuration, to copy: a launch config, or the script and files of another framework.

    command: what the text says it was written by. Nothing for what can only be priced, and for another network.
    """
    problem, priced = found.inputs.problem, found.priced
    if problem.model.otherwise:
        return
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
        if change["command"]
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
    days, ends = days_interval(config), ("_low", "_high")
    hours, cost, energy = (
        f"80%: {' to '.join(show_count(config.get(name + end) or 0) for end in ends)}"
        for name in ("gpu_hours", "cost", "energy_mwh")
    )
    found: list[tuple[str, str, Callable[[float], str], str]] = [
        ("step", "iteration_s", show_seconds, page.interval_words(config)),
        ("MFU", "mfu", percent, "" if hfu is None else f"HFU {hfu:.1%}"),
        ("memory", "memory_bytes", show_bytes, f"of {show_bytes(limit_bytes)} usable"),
        ("exposed", "exposed_communication_s", show_seconds, "communication not overlapped"),
        ("communication", "communication_s", show_seconds, "all collectives, overlapped or not"),
        ("computation", "compute_s", show_seconds, "kernels of one GPU"),
        ("tokens/s", "tokens_per_s", "{:,.0f}".format, "of all GPUs"),
        (f"days, {total} tokens", "days", show_days, f"80%: {days}"),
        (f"GPU-hours, {total} tokens", "gpu_hours", show_count, hours),
        ("cost", "cost", show_count, cost),
        ("energy, MWh", "energy_mwh", show_count, energy),
        ("goodput", "goodput", percent, "share of time that trains"),
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
    step_s, spent = found.priced.iteration_s, gap_to_peak(found.priced)
    colors = (page.ACCENT, *[page.MUTED] * (len(spent) - 1))
    rows = [
        (what, spent_s, f"{show_seconds(spent_s)}, {spent_s / step_s:.1%}", color)
        for (what, spent_s), color in zip(spent, colors, strict=True)
    ]
    note = "The bars sum to the step. The first is what the step would take at the accelerator's peak."
    return page.bars("Gap to peak", "s", rows, note=note)


_TERMS = (
    *("op", "axis", "phase", "layer", "seconds", "exposed_s", "count", "group", "bytes", "formula", "tier"),
    *("algorithm", "latency_s", "bandwidth_bytes_per_s", "bus_bandwidth_bytes_per_s"),
)


def memory_figure(priced: Detail, stages: Sequence[Json]) -> Json:
    """Peak memory of a rank of each stage by what it holds, and what it may use. stages: `stage_rows`."""
    limit = priced.memory_limit_bytes
    rows = [
        {
            "name": "GPU" if row["stage"] is None else f"stage {row['stage']}",
            "parts": {group: row[group] for group in MEMORY_GROUPS if row[group]},
            "notes": {ACTIVATIONS: f"{row['in_flight']:.3g} micro-batches in flight"},
        }
        for row in stages
    ]
    free = show_bytes(max(limit - priced.memory_bytes, 0.0))
    note = f"Dashed line: usable memory, {show_bytes(limit)}; {free} are free."
    return page.stacks("Peak memory per GPU", rows, MEMORY_GROUPS, unit="bytes", note=note, limit=limit)


def timeline_figures(priced: Detail) -> Iterator[Json]:
    """One layer forward, one backward, and the step; of a pipeline its first passes, too."""
    names = priced.job.framework
    recomputed = "" if priced.recompute == "none" else ", recompute included"
    for phase, more in (("forward", ""), ("backward", recomputed)):
        note = f"A block in the middle of the model, in a typical micro-batch{more}."
        yield _lanes(f"One layer, {phase}", block_spans(priced, phase), note=note, names=names)
    missing = f" {show_seconds(priced.contended_s)} of {CONTENDED} are not drawn: their place is not predicted."
    slowed = missing if priced.contended_s else ""
    micro_batches = counted(priced.accumulation, "micro-batch")
    finest_s = priced.iteration_s / _STEP_PARTS
    if priced.times is None:
        note = f"{micro_batches}, then the optimizer. The paler a bar, the less of it the stream is busy.{slowed}"
        yield _lanes("The whole step", step_spans(priced, finest_s=finest_s), note=note, names=names)
        return
    count, first = first_passes(priced)
    note = f"Until the first {count} of {micro_batches} are done, by stage. Gaps: the stage waits for others."
    yield {**_lanes("Pipeline schedule", first, note=note, names=names), "numbered": True}
    note = "Gaps: the pipeline bubble. Passes that are too short to see are joined."
    yield _lanes("The whole step", step_spans(priced, finest_s=finest_s), note=f"{note}{slowed}", names=names)


def _lanes(title: str, spans: Sequence[Span], *, note: str, names: Framework) -> Json:
    """Spans as bars, a row for each track, computation first; colors by what they are."""
    # Computation first; stages by their numbers.
    lanes = sorted({one.lane for one in spans}, key=lambda lane: (lane != COMPUTE_LANE, len(lane), lane))
    looks = {(one.lane, one.name): _look(one) for one in spans}
    places = {what: place for place, what in enumerate(_ORDER)}
    ordered = sorted(set(looks.values()), key=lambda look: (places.get(look[0], len(places)), look))
    bars = [
        [
            lanes.index(one.lane),
            over_axis(looks[one.lane, one.name][0], names),
            # As exactly as a screen can show it.
            float(f"{one.start_s:.5g}"),
            float(f"{one.end_s:.5g}"),
            over_axis(one.name, names)
            + "".join(f", {word} {one.details[key]}" for key, word in _TOLD if key in one.details),
            round(min(busy_s(one) / (one.end_s - one.start_s), 1.0), 2),
            one.details.get("micro_batch", ""),
        ]
        for one in spans
        if one.end_s > one.start_s
    ]
    # There is little room beside a lane.
    shown = [over_axis(lane.removeprefix("communication "), names) for lane in lanes]
    colors = {over_axis(what, names): color for what, color in ordered}
    return {"kind": "lanes", "title": title, "note": note, "lanes": shown, "bars": bars, "colors": colors}


def _look(span: Span) -> tuple[str, str]:
    """What a span is colored by, and its color."""
    what = span.name.partition(", ")[0]
    if what.startswith("wait"):
        return _WAITING, page.WAIT
    if what == SEVERAL:
        if span.lane.startswith("stage "):
            return _IN_TURN, page.BY_KIND[GEMMS]
        axis = span.lane.rpartition(" ")[2]
        return (
            (f"several over {axis}", page.term_color(f"all_reduce over {axis}"))
            if axis != span.lane
            else (what, page.MUTED)
        )
    return (what, page.term_color(what)) if " over " in what else _KINDS.get(what, (what, page.MUTED))


def over_axis(what: str, names: Framework) -> str:
    """`all_gather over z, forward, qkv` with the framework's name of the axis; what is over none as it is."""
    call, over, rest = what.partition("over ")
    axes, comma, where = rest.partition(",")
    return f"{call}{over}{names.called(axes)}{comma}{where}" if over and axes != "world" else what
