"""What was learned from runs, and diagnoses of runs, as text, JSON and a section, with commands for faster layouts.

Of learning: every number before and after, what it rests on, what contradicts. For a run that is only stated: its
configuration, assumptions, and faster layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from axonn_tune.cost.price import Detail, PricedLayout
from axonn_tune.learning.diagnose import CERTAIN, MISFIT, Cause, Diagnosis
from axonn_tune.learning.evidence import WHOLE, Setup
from axonn_tune.learning.learn import Learning, Row, deviations
from axonn_tune.learning.run import CommandRun
from axonn_tune.learning.setups import Change, layout_words
from axonn_tune.program.count import parameters
from axonn_tune.report import page
from axonn_tune.report.commands import FileToWrite, NamedModel, command_of, commands_of
from axonn_tune.report.explain import ExplainSection
from axonn_tune.report.output import PERCENT, Column, Json, fields_of, percent, signed_percent, text_of, words, wrapped
from axonn_tune.specs.numbers import told
from axonn_tune.specs.results import Pairs
from axonn_tune.units import GB, counted, show_bytes, show_interval, show_seconds, show_span
from axonn_tune.validation.published.rows import cell_text
from axonn_tune.validation.quality import quality
from axonn_tune.vocabulary import VERSION

if TYPE_CHECKING:
    from axonn_tune.learning.reading import Evidence
    from axonn_tune.ranking.priced import Priced

LEARNING_SCHEMA, DIAGNOSIS_SCHEMA = "axonn-tune/learning/2", "axonn-tune/diagnosis/1"
SAME_FLOPS = 1.1
"""Ratio of two counts of FLOPs of a step from which on they are of different steps."""

_CAUSES = (
    Column("probability", "how likely", show=percent),
    Column("explains_s", "explains", show=lambda seconds: f"{'-' if seconds < 0 else '+'}{show_seconds(abs(seconds))}"),
    words("what", "what it is most likely"),
)
_CHANGES = (
    Column("gain", "gain", show=percent),
    Column("step_s", "step", show=show_seconds),
    Column("memory_bytes", "memory", show=show_bytes),
    words("words", "change"),
)


def diagnosis_text(
    found: Diagnosis, *, machine: str, model: NamedModel = None, remarks: Sequence[str] = (), verbose: bool = False
) -> str:
    """Assessment, explanations of the gap, what to look at first, assumptions, and faster layouts.

    machine, model: as stated, for commands. remarks: assumptions about the evidence. verbose: all of each.
    """
    assumed = [*(words if verbose else brief(words) for words in remarks), *_assumed(found, verbose=verbose)]
    parts = [f"{found.name}\n" + "".join(f"{wrapped(words)}\n" for words in (verdict(found), *_beside(found)))]
    if rows := [*found.likely, *found.unexplained]:
        known = not found.far_off
        shown = [{**vars(one), "what": f"{one.title}: {one.words}"} for one in rows]
        parts.append(text_of(_CAUSES, [one if known else {**one, "probability": None} for one in shown]))
    notes = [*_notes(found, verbose=verbose), *_saving(found), *assumed]
    parts += ["".join(f"{wrapped(note)}\n" for note in notes)]
    if found.changes and not found.faster:
        changes = found.changes if verbose else found.changes[:1]
        faster = f"Faster than the predicted {show_seconds(found.predicted_s)}, by the profile:"
        parts.append(f"{faster}\n\n" + text_of(_CHANGES, changes))
        parts.append("".join(f"{line}\n" for line in commands_of(changes, machine=machine, model=model)))
    return "\n".join(part for part in parts if part)


def verdict(found: Diagnosis) -> str:
    """Assessment of the run in two sentences."""
    if found.impossible and found.flops_s is not None:
        return (
            f"The step took {show_seconds(found.measured_s)}, which is less than the {show_seconds(found.flops_s)} "
            f"that its FLOPs take at peak (MFU {percent(found.flops_s / found.measured_s, decimals=0)}): batch, model, "
            f"GPUs or number format are not as stated. Predicted {show_seconds(found.predicted_s)} "
            f"({show_interval(found.low_s, found.high_s)}).{_of_flops(found)}"
        )
    ratio = found.measured_s / found.predicted_s
    off = signed_percent(ratio - 1.0) if ratio < _TIMES else f"{ratio:.3g} times as long"
    said = (
        f"The {found.of} took {show_seconds(found.measured_s)}, predicted {show_seconds(found.predicted_s)} "
        f"({show_interval(found.low_s, found.high_s)}): {off}"
    )
    depends, of_flops = _depends(found), _of_flops(found)
    if found.reasonable:
        word = "reasonable as a time" if found.memory_bytes > found.memory_limit_bytes else "reasonable"
        return f"{said}, which is {word}{depends}.{of_flops}"
    if found.faster:
        wrong = "" if of_flops else " Its stated layout, batch or machine is probably wrong."
        return f"{said}, faster than predicted{depends}.{wrong}{of_flops}"
    return f"{said}, slower than predicted{depends}.{of_flops}"


def _beside(found: Diagnosis) -> Iterator[str]:
    """What memory and the same run on fewer GPUs say of it."""
    if found.in_fp32:
        yield "The run is in FP32, as predicted: unless that is meant, it is what slows it. No BF16 or FP16 is stated."
    share, needed_s = found.logged_share, found.flops_s
    if share is not None and share > 1.0 and needed_s is not None and not found.impossible:
        yield (
            f"The log's TFLOP/s are {percent(share, decimals=0)} of peak by its own rule, since it counts gradients of "
            f"weights that do not train; what is needed is {percent(needed_s / found.measured_s, decimals=0)} (MFU)."
        )
    over = found.memory_bytes - found.memory_limit_bytes
    if over > 0.0 and not found.impossible:
        yield (
            f"It ran, but by the memory model it should not fit: {show_bytes(found.memory_bytes)} predicted, "
            f"{show_bytes(found.memory_limit_bytes)} usable, {show_bytes(over)} "
            f"({percent(over / found.memory_limit_bytes, decimals=0)}) too much. Something that saves memory is not "
            "stated, such as recompute, or the memory model is off for it."
        )
    if (one := found.baseline) is None or found.impossible:
        return
    gpus = counted(one.gpus, "GPU")
    said = (
        f"On {gpus} ({one.name}) it took {show_seconds(one.measured_s)}, predicted {show_seconds(one.predicted_s)} "
        f"({show_interval(one.low_s, one.high_s)}): {signed_percent(one.measured_s / one.predicted_s - 1.0)}"
    )
    if found.reasonable or found.faster:
        yield f"{said}."
    elif one.slow:
        between = ", not the network between nodes" if one.one_node else ""
        yield f"{said}, slow as well: the cause is there with {gpus}, too{between}."
    else:
        likely = found.network >= CERTAIN
        cause = f", {percent(found.network, decimals=0)} likely the network between nodes" if likely else ""
        yield f"{said}, not slow: the cause comes with more GPUs{cause}."


def _of_flops(found: Diagnosis) -> str:
    """What the log's own FLOPs show to be wrong; "" where they agree."""
    ratio = found.flops_ratio
    if ratio is None or abs(math.log(ratio)) <= math.log(SAME_FLOPS):
        return ""
    wrong = "model, batch or recompute" if found.counts_recompute else "model or batch"
    return (
        f" The log's own TFLOP/s per GPU × step × GPUs is {ratio:.2f} times what its framework counts for the model "
        f"and batch priced here: the {wrong} is wrong."
    )


def _depends(found: Diagnosis) -> str:
    """The assumptions on which an assessment depends, and the opposite one; "" without any."""
    turned = [
        (one, [other for other in one.others if other.reasonable != found.reasonable])
        for one in found.assumed
        if any(other.reasonable != found.reasonable for other in one.others)
    ]
    if not turned:
        return ""
    cells = ", ".join(f"{one.column}={one.taken}" for one, _ in turned)
    others = " or ".join(
        f"{other.words} ({show_seconds(other.step_s)} predicted)" for _, several in turned for other in several
    )
    return f", if {cells} as assumed; {'not ' if found.reasonable else ''}reasonable with {others}"


def _assumed(found: Diagnosis, *, verbose: bool = True) -> Iterator[str]:
    """Settings that the file does not state; verbose: and the steps of others."""
    if not found.assumed:
        return
    cells = ", ".join(f"{one.column}={one.taken}" for one in found.assumed)
    others = [f"{show_seconds(other.step_s)} with {other.words}" for one in found.assumed for other in one.others]
    instead = f" Otherwise the prediction is {', '.join(others)}." if others and verbose else ""
    more = " (-v: the step with others)" if others and not verbose else ""
    fact = cells.partition(",")[0]
    yield f"Assumed: {cells}, not stated.{instead} State them as columns or options, as in --fact {fact}{more}."
    if verbose and any((one.column, one.taken) == ("routing", "forced") for one in found.assumed):
        yield (
            "Measured rows are assumed to have forced load balancing, a search natural routing: --routing natural "
            "prices it here, too."
        )


def _notes(found: Diagnosis, *, verbose: bool = True) -> Iterator[str]:
    """How sure the causes are, and what to look at: for the first cause, or for three."""
    if found.impossible:
        return
    nothing = "no fault" if found.reasonable else "none of these causes, and an error of the prediction itself"
    if not (far := found.far_off):
        yield f"Probability of {nothing}: {percent(found.healthy, decimals=0)}."
    if verbose and found.of == "step" and not found.learned:
        yield (
            "The profile has learned from no step: `axonn-tune learn` with a run that is known to be good narrows the "
            "80% interval."
        )
    if found.misfit > MISFIT:
        yield (
            f"No explanation fits well: even the best leaves {found.misfit:.1f} standard deviations, so "
            f"{'none has a probability' if far else 'the probabilities say little'}. Is the machine profile that of "
            "this machine?"
        )
    yield from dict.fromkeys(cause.advice for cause in found.likely[: 3 if verbose else 1] if cause.advice)


def _saving(found: Diagnosis) -> Iterator[str]:
    """What saves and a restart cost, and the interval that loses least."""
    if (one := found.saving) is None or found.impossible:
        return
    share, lost, least = (percent(value, decimals=1) for value in (one.share, one.lost, one.least_lost))
    interval_s = one.interval_steps * found.measured_s
    yield (
        f"Saving: training waited {show_seconds(one.stall_s)} for each of {counted(one.saves, 'checkpoint')}, one "
        f"every {counted(round(one.interval_steps), 'step')} ({show_span(interval_s)}): {share} of its time. With a "
        f"failure every {show_span(one.failure_s)}, saving and failures take {lost} in the mean; saving every "
        f"{counted(one.best_steps, 'step')} loses least, {least}."
    )
    if one.restart_s is not None:
        loading = "" if one.load_s is None else f", {show_seconds(one.load_s)} more to load"
        again = f"; {counted(one.repeated_steps, 'step')} were trained again" if one.repeated_steps else ""
        yield f"Restart: {show_span(one.restart_s)} after the last step until training went on{loading}{again}."


def diagnosis_json(found: Diagnosis, *, machine: str, model: NamedModel = None, remarks: Sequence[str] = ()) -> Json:
    """Everything, by the schema `axonn-tune/diagnosis/1`; remarks: on the evidence."""
    times = ("name", "of", "measured_s", "predicted_s", "low_s", "high_s", "healthy", "misfit", "reasonable")
    return {
        "schema": DIAGNOSIS_SCHEMA,
        "tool_version": VERSION,
        **fields_of(found, times),
        "verdict": verdict(found),
        "learned": found.learned,
        "flops_ratio": found.flops_ratio,
        "flops_s": found.flops_s,
        "impossible": found.impossible,
        "memory_bytes": found.memory_bytes,
        "memory_limit_bytes": found.memory_limit_bytes,
        "network": found.network,
        "baseline": None if found.baseline is None else asdict(found.baseline),
        "saving": None if found.saving is None else asdict(found.saving),
        "unexplained": next((asdict(one) for one in found.unexplained), None),
        "remarks": list(remarks),
        "assumed": [asdict(one) for one in found.assumed],
        "causes": [asdict(cause) for cause in found.causes],
        "changes": [_change_json(change, machine=machine, model=model) for change in found.changes],
    }


def _change_json(change: Change, *, machine: str, model: NamedModel) -> Json:
    return {
        "words": change.words,
        "layout": layout_words(change.setup.layout, change.setup.framework),
        "step_s": change.step_s,
        "gain": change.gain,
        "memory_bytes": change.memory_bytes,
        "command": command_of(change, machine=machine, model=model) or None,
    }


def diagnosis_section(
    found: Diagnosis,
    *,
    machine: str,
    identity: str,
    source: str,
    model: NamedModel = None,
    remarks: Sequence[str] = (),
) -> Json:
    """A page section: assumptions, predicted and measured step, the gap and its causes, and commands."""
    likely, interval = found.likely, show_interval(found.low_s, found.high_s)
    return page.section(
        identity,
        f"{found.name}: is it reasonable?",
        verdict=[verdict(found), *_beside(found), *_saving(found), *remarks, *_assumed(found), *_notes(found)],
        cards=[
            page.card("measured", show_seconds(found.measured_s), note=found.of),
            page.card("predicted", show_seconds(found.predicted_s), note=interval),
            page.card("useful FLOPs", show_seconds(found.flops_s), note="at peak")
            if found.impossible and found.flops_s is not None
            else page.card("no fault", percent(math.nan if found.far_off else found.healthy), note="probability"),
        ],
        blocks=[
            *_figures(found, likely),
            *(
                page.command(command, title=f"{one.words}: {percent(one.gain)} less time")
                for one in found.changes
                if (command := command_of(one, machine=machine, model=model))
            ),
            page.origin_fold([("source", source), ("schema", DIAGNOSIS_SCHEMA)]),
        ],
    )


def _figures(found: Diagnosis, likely: Sequence[Cause]) -> Iterator[Json]:
    """Predicted vs. measured; the gap and the share and probability of each explanation."""
    ends = found.high_s - found.predicted_s, found.predicted_s - found.low_s
    both = [
        ("predicted", found.predicted_s, show_seconds(found.predicted_s), page.PREDICTED, *ends),
        ("measured", found.measured_s, show_seconds(found.measured_s), page.MEASURED, 0.0, 0.0),
    ]
    yield page.bars(f"The {found.of}", "s", both)
    if not likely:
        return
    gap_s = found.measured_s - found.predicted_s
    causes = [(one.title, one.explains_s, show_seconds(one.explains_s), page.PREDICTED) for one in likely]
    gap = ("measured - predicted", gap_s, show_seconds(gap_s), page.MEASURED)
    yield page.bars("The gap, and the time of each explanation", "s", [gap, *causes])
    if found.far_off:
        return
    shares = [
        (f"{one.title}: {one.words}", one.probability / PERCENT, percent(one.probability), page.ACCENT)
        for one in likely
    ]
    yield page.bars("How likely", "%", shares)


# A run that is only stated.


@dataclass(frozen=True)
class StatedCommand:
    """Facts about a command besides its prediction.

    setup: what it runs. ranking: a search of its layouts; why_none: where it has none. machine, model: as named.
    """

    run: CommandRun
    setup: Setup
    changes: tuple[Change, ...]
    ranking: Priced
    machine: str
    model: NamedModel = None
    why_none: str = ""

    @property
    def rank(self) -> int | None:
        """Rank of its grid in the search; None if it has none there."""
        return self.ranking.ranks().get(self.ranking.sizes_of(self.setup.layout))

    @property
    def layouts(self) -> int:
        """Number of grids that are feasible."""
        return int(self.ranking.feasible.sum())

    @property
    def best_s(self) -> float | None:
        """Step of the first layout of the search, s."""
        return self.ranking[0].iteration_s if len(self.ranking) else None


def command_section(command: StatedCommand, priced: Detail, *, verbose: bool = True) -> ExplainSection:
    """The run and its assumptions."""
    run, setup, name = command.run, command.setup, Path(command.run.path).name
    model, workload, grid = setup.model, setup.workload, setup.layout.grid
    layout = layout_words(setup.layout, setup.framework)
    accumulated = counted(priced.accumulation, "gradient accumulation step")
    facts = [
        ("command", f"{name}, line {run.lines[0]}: {setup.framework.title} on {counted(grid.world, 'GPU')}"),
        ("layout", f"{layout}, {accumulated}, {workload.precision}"),
        (
            "model",
            f"{model.name}, {parameters(model) / 1e9:.3g} billion parameters: {model.layers} layers of hidden size "
            f"{model.hidden:,}, {model.heads} heads, {model.kv_heads} key and value heads, FFN {model.ffn:,}, "
            f"vocabulary {model.vocab:,}",
        ),
        *((kind, words if verbose else brief(words)) for kind, words in _taken(run)),
    ]
    return ExplainSection("The run", facts=facts)


def brief(words: str) -> str:
    """An assumption without its list, if that is long: how many things it names."""
    head, _, items = words.rpartition(": ")
    count = items.count(", ") + 1
    return f"{head}: {count} settings (-v lists them)" if head and count > _MOST_ASSUMED else words


_MOST_ASSUMED, _TIMES = 4, 10.0
"""Assumed settings that are listed; ratio of two steps from which on it is no percentage."""


def _taken(run: CommandRun) -> Iterator[tuple[str, str]]:
    """What is assumed, arguments that are not priced, and unknown ones."""
    yield from (("assumed", words) for words in run.assumed)
    yield from (("ignored", words) for words in run.ignored)
    if run.unknown:
        more = f" and {len(run.unknown) - _MOST_UNKNOWN} more" if len(run.unknown) > _MOST_UNKNOWN else ""
        yield "unknown", f"{', '.join(run.unknown[:_MOST_UNKNOWN])}{more}, taken to change nothing"


def said_of(run: CommandRun) -> Iterator[str]:
    """The same in sentences."""
    yield from (f"{kind.capitalize()}: {words}." for kind, words in _taken(run))


_MOST_UNKNOWN = 20


_SHOWN = 5e-4
"""Difference of two steps that a percentage with one decimal shows."""


def better_section(command: StatedCommand, priced: PricedLayout, *, verbose: bool = True) -> ExplainSection:
    """Rank of its layout in a search, and faster layouts, or those that fit where it does not."""
    step_s, framework = priced.iteration_s, command.setup.framework.title
    fits = priced.memory_bytes <= priced.memory_limit_bytes
    title = "Faster layouts" if fits else "Layouts that fit"
    sentences = []
    if command.best_s is None:
        sentences.append(f"A search finds no layout of {framework} that fits: {command.why_none}.")
    else:
        place = f"ranks its grid {command.rank or f'below {len(command.ranking)}'} of {command.layouts}"
        place = place if command.ranking.is_feasible(command.setup.layout) else "rejects its grid"
        gain = 1.0 - command.best_s / step_s
        more = f"{percent(abs(gain), decimals=1)} {'less' if gain > 0 else 'more'} than this run's"
        than = f"{more if abs(gain) >= _SHOWN else 'as long as this run does:'} {show_seconds(step_s)}"
        sentences.append(
            f"A search of {framework}'s layouts for this model, batch and number of GPUs {place}; the best that fits "
            f"takes {show_seconds(command.best_s)}, {than}."
        )
    if not command.changes:
        return ExplainSection(title, sentences=[*sentences, "No change is predicted to save 1% or more."])
    if len(command.changes) > 1:
        sentences.append("Each row is one change of the run, or another layout as a whole; gains do not add up.")
    return ExplainSection(
        title,
        sentences=sentences,
        columns=_CHANGES if fits else _CHANGES[1:],
        rows=[fields_of(change, ("gain", "step_s", "memory_bytes", "words")) for change in command.changes],
        commands=commands_of(
            command.changes if verbose else command.changes[:1], machine=command.machine, model=command.model
        ),
    )


def command_json(command: StatedCommand) -> Json:
    """Fields of `axonn-tune/explain/1` for a command: the run, and changes."""
    return {
        "run": {
            "path": command.run.path,
            "line": command.run.lines[0],
            "framework": command.setup.framework.name,
            "layout": layout_words(command.setup.layout, command.setup.framework),
            "stated": {name: cell_text(stated.value) for name, stated in command.run.columns.items() if stated.line},
            "assumed": list(command.run.assumed),
            "ignored": list(command.run.ignored),
            "unknown": list(command.run.unknown),
            "model_command": command.model.command if isinstance(command.model, FileToWrite) else None,
            "rank": command.rank,
            "layouts": command.layouts,
            "best_step_s": command.best_s,
        },
        "changes": [_change_json(change, machine=command.machine, model=command.model) for change in command.changes],
    }


# What was learned.

_LISTED_ROWS = 20
"""Rows of evidence listed, worst first."""

_NUMBERS = (
    words("path", "number"),
    Column("prior", "before", show="{:.4g}".format),
    Column("value", "now", show="{:.4g}".format),
    Column("prior_spread", "± before", show="{:.0%}".format),
    Column("spread", "± now", show="{:.0%}".format),
    words("moved_by", "moved most by"),
)
_ROWS = (
    words("name", "evidence"),
    words("what", ""),
    Column("ranks", "ranks", decimals=0),
    Column("after.measured", "measured", show=show_seconds),
    Column("bus_bytes_per_s", "busbw, GB/s", per=GB, decimals=1),
    Column("before.error", "predicted\nbefore", show=signed_percent),
    Column("after.error", "now", show=signed_percent),
    words("mark", ""),
)


def learning_text(learning: Learning, evidence: Evidence) -> str:
    """Numbers that moved, the evidence with its errors before and after, and what to know about both."""
    parts = [f"{learning.machine.name}, learned from {'; '.join(evidence.sources)}\n"]
    if moved := numbers_text(learning):
        parts.append(moved)
    steps = sorted(learning.rows, key=lambda row: (row.what not in WHOLE, -abs(row.after) / row.noise))
    of_bus = any(row.bus_bytes for row in steps)
    columns = [column for column in _ROWS if of_bus or column.key != "bus_bytes_per_s"]
    rows = [
        {**_row_fields(row), "mark": "contradicts" if row.contradicts else "worse" if row.worse else ""}
        for row in steps[:_LISTED_ROWS]
    ]
    parts.append(text_of(columns, rows))
    if len(steps) > _LISTED_ROWS:
        parts.append(f"and {len(steps) - _LISTED_ROWS} more rows with smaller errors\n")
    notes = list(_learning_notes(learning, evidence))
    parts += ["".join(f"{wrapped(note)}\n" for note in notes)] if notes else []
    return "\n".join(parts)


def learning_json(learning: Learning, evidence: Evidence) -> Json:
    """The same with all rows, by the schema `axonn-tune/learning/2`; before, after: pairs, and their quality."""
    assumed = [*evidence.assumed, *told(learning.consequences, kept=False)]
    return {
        "schema": LEARNING_SCHEMA,
        "tool_version": VERSION,
        "machine": learning.machine.name,
        **fields_of(evidence, ("sources", "assumed", "left_out"), assumed=[*assumed, *_unstated(evidence)]),
        "numbers": _moved(learning),
        "quality": {side: asdict(quality(pairs)) for side, pairs in _pairs(learning.rows).items()},
        "rows": [{**_row_fields(row), **fields_of(row, ("contradicts", "worse"))} for row in learning.rows],
        "operation": {name: {"value": value, "source": source} for name, value, source in learning.operation},
        "silent": list(learning.silent),
        "far": [one.path for one in learning.far],
    }


def numbers_text(learning: Learning) -> str:
    """Numbers that moved, before and after; an empty text if none did."""
    return text_of(_NUMBERS, _moved(learning))


def _moved(learning: Learning) -> list[Json]:
    learned = learning.machine.learned
    assert learned is not None, "written by learn"
    before, spreads = learning.prior.values, np.sqrt(np.diag(learning.prior.covariance)).tolist()
    return [
        {**fields_of(one, ("path", "value", "spread")), "prior": value, "prior_spread": spread, "moved_by": movers[0]}
        for one, value, spread, movers in zip(learned.numbers, before, spreads, learning.movers, strict=True)
        if movers
    ]


def _row_fields(row: Row) -> Json:
    bus_bytes_per_s = row.bus_bytes / row.measured_s if row.bus_bytes else None
    sides = {side: pairs.row("0") for side, pairs in _pairs([row]).items()}
    return {**fields_of(row, ("name", "what", "ranks")), "bus_bytes_per_s": bus_bytes_per_s, **sides}


def _pairs(rows: Sequence[Row]) -> dict[str, Pairs]:
    """Times of rows by their position, predicted before and after, s."""
    keyed = {str(at): row for at, row in enumerate(rows)}
    return {
        side: Pairs(
            predicted={key: row.measured_s * math.exp(getattr(row, side)) for key, row in keyed.items()},
            measured={key: row.measured_s for key, row in keyed.items()},
        )
        for side in ("before", "after")
    }


def _learning_notes(learning: Learning, evidence: Evidence) -> Iterator[str]:
    """What the evidence does not say, what contradicts it or the profile, and what was assumed."""
    if learning.silent:
        yield f"This evidence says little or nothing about {_listed(_silent(learning))}: they keep their spread."
    for one in learning.far:
        yield (
            f"{one.path} is now {deviations(one):.1f} standard deviations from what the profile had: check that the "
            "evidence is of this machine and software."
        )
    for row in learning.contradictions:
        off = math.expm1(-row.after)
        where = f"{abs(off):.0%} {'above' if off > 0.0 else 'below'}"
        yield (
            f"{row.name} ({row.what}) was measured {where} what the profile and all evidence together predict; it is "
            "down-weighted."
        )
    if worse := sorted((row for row in learning.rows if row.worse), key=lambda row: abs(row.before) - abs(row.after)):
        most = worse[0]
        yield (
            f"{len(worse)} of {len(learning.rows)} rows are predicted worse than before (marked worse), most "
            f"{most.name}, {most.what}: {signed_percent(math.expm1(most.before))} became "
            f"{signed_percent(math.expm1(most.after))}. Other rows outweigh them; large messages have the most weight."
        )
    for name, value, source in learning.operation:
        yield f"operation.{name} is now {value:g}: {source}."
    followed = told(learning.consequences, kept=False)
    yield from (f"Assumed: {words}" for words in (*evidence.assumed, *followed, *_unstated(evidence)))
    yield from (f"Left out: {words}" for words in evidence.left_out)


def _unstated(evidence: Evidence) -> Iterator[str]:
    """Columns that rows leave blank, once for all rows that leave the same."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for sample in evidence.samples:
        if sample.unstated:
            rows.setdefault((*sample.unstated, sample.framework.title), []).append(sample.name)
    for (*columns, title), names in rows.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"{names[0]}{more} without {', '.join(columns)}: as {title}'s recipes have it, or the fastest that fits; "
            "state them as columns or with --fact"
        )


def _silent(learning: Learning) -> list[str]:
    """Numbers the evidence says nothing about; `tiers.network.*` where that is so of all of a section."""
    learned = learning.machine.learned
    assert learned is not None, "written by learn"
    loud = [one.path for one in learned.numbers if one.path not in learning.silent]

    def section(path: str) -> str:
        words = path.split(".")
        starts = (".".join(words[:end]) + "." for end in range(1, len(words)))
        whole = next((start for start in starts if not any(one.startswith(start) for one in loud)), None)
        return path if whole is None else f"{whole}*"

    return list(dict.fromkeys(map(section, learning.silent)))


def _listed(paths: Sequence[str]) -> str:
    return ", ".join(paths[:-1]) + (f" and {paths[-1]}" if len(paths) > 1 else paths[0])
