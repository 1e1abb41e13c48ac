"""One configuration explained: what a step consists of, in words, and every number behind it in tables."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import get_args

from axonn_tune.cost.breakdown import Work, hidden_behind, hidden_s, work_by_kind
from axonn_tune.cost.prediction import Pricing, Term
from axonn_tune.program.operations import Phase
from axonn_tune.ranking.entries import Entry
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.report.explain_lines import line_sentences
from axonn_tune.report.explain_words import paragraphs
from axonn_tune.report.table import Heading, markdown_table, seconds_cells, text_table
from axonn_tune.units import GIB, show_bytes, show_seconds

_GB, _TERA = 1e9, 1e12
_WIDTH = 100
_PHASES = (*get_args(Phase), "")
"""What has no phase comes last."""


@dataclass(frozen=True)
class Subject:
    """A configuration to explain: its inputs, its entry in the ranking, and all that is predicted of it."""

    inputs: Inputs
    entry: Entry
    pricing: Pricing


@dataclass(frozen=True)
class Section:
    """A part of the explanation: paragraphs, then sentences, a table and notes; each may be empty."""

    title: str
    paragraphs: Sequence[Sequence[str]] = ()
    sentences: Sequence[str] = ()
    headings: Sequence[Heading] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = field(default=())


def sections(subject: Subject) -> list[Section]:
    """The whole explanation."""
    return [
        Section("The step in words", paragraphs=paragraphs(subject.inputs, subject.entry, subject.pricing)),
        _sent(subject),
        _costs(subject),
        Section("How a call is priced", sentences=line_sentences(subject.inputs.problem, subject.pricing)),
        _computation(subject),
        _memory(subject),
    ]


def explain_text(subject: Subject) -> str:
    """The explanation as plain text."""
    parts = []
    for section in sections(subject):
        table = text_table(section.headings, section.rows) if section.rows else ""
        story = "\n\n".join(
            textwrap.fill(" ".join(part), width=_WIDTH, break_on_hyphens=False) for part in section.paragraphs
        )
        lines = [
            section.title,
            "-" * len(section.title),
            *([story] if story else []),
            *map(_wrapped, section.sentences),
        ]
        parts.append(
            "\n".join([*lines, *([table.rstrip("\n")] if table else []), *map(_wrapped, section.notes)]) + "\n"
        )
    return "\n".join(parts)


def _wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, width=_WIDTH, subsequent_indent="  ", break_long_words=False)


def explain_markdown(subject: Subject) -> str:
    """The explanation as Markdown."""
    parts = []
    for section in sections(subject):
        table = markdown_table(section.headings, section.rows) if section.rows else ""
        listed = "\n".join(f"- {sentence}" for sentence in section.sentences)
        story = [" ".join(part) for part in section.paragraphs]
        blocks = [f"## {section.title}", *story, listed, table.rstrip("\n"), *section.notes]
        parts.append("\n\n".join(block for block in blocks if block) + "\n")
    return "\n".join(parts)


def _sent(subject: Subject) -> Section:
    """What every collective sends."""
    headings = [
        Heading("no."), Heading("phase", left=True), Heading("layer", left=True), Heading("collective", left=True),
        Heading("axis", left=True), Heading("ranks"), Heading("full buffer,\nbytes", left=True), Heading("one\ncall"),
        Heading("calls"),
    ]  # fmt: skip
    rows = [
        [
            str(number),
            term.phase,
            term.layer,
            term.op,
            term.axis,
            str(term.group),
            str(term.collective.size_bytes),
            show_bytes(term.size_bytes),
            str(term.count),
        ]
        for number, term in enumerate(subject.pricing.terms, start=1)
    ]
    note = f"Letters: {_letters(subject.pricing)}."
    return Section("What one rank sends in a step", headings=headings, rows=rows, notes=[note])


_MEANINGS = {
    "H": "hidden",
    "Q": "heads·head_dim",
    "N": "width of q, k and v",
    "F": "ffn",
    "G": "width of the first MLP product",
    "S": "sequence length",
    "b": "micro-batch",
    "C": "chunks of the loss",
    "V": "padded vocabulary",
    "P": "padded positions",
    "parts": "halves of a micro-batch",
    "block_bucket": "elements of one block's gradient",
    "table_bucket": "elements of a table's gradient",
    "position_bucket": "elements of the position table's gradient",
    "vectors": "elements of replicated vectors",
}


def _letters(pricing: Pricing) -> str:
    """Meaning and value of every letter the formulas use."""
    used = {name for term in pricing.terms for name, _ in term.collective.size_bytes.powers}
    return ", ".join(f"{name} = {pricing.values[name]:,.0f} ({_MEANINGS[name]})" for name in _MEANINGS if name in used)


def _costs(subject: Subject) -> Section:
    """What every collective costs."""
    terms, workload = subject.pricing.terms, subject.inputs.problem.workload
    headings = [
        Heading("no."), Heading("collective", left=True), Heading("network", left=True),
        Heading("algorithm", left=True), Heading("α,\nµs"), Heading("β,\nGB/s"), Heading("all calls,\ns"),
        Heading("exposed,\ns"), Heading("hidden behind", left=True),
    ]  # fmt: skip
    total = seconds_cells([*(term.seconds for term in terms), subject.pricing.communication_s])
    exposed = seconds_cells([*(term.exposed_s for term in terms), subject.pricing.exposed_communication_s])
    rows = [
        [
            str(number),
            f"{term.op} {term.axis}",
            term.tier,
            f"{term.line.algorithm}, {term.line.protocol}",
            f"{term.line.latency_s * 1e6:,.1f}",
            f"{term.line.bandwidth_bytes_per_s / _GB:,.2f}",
            total[number - 1],
            exposed[number - 1],
            _behind(term, hidden_behind(term, workload)),
        ]
        for number, term in enumerate(terms, start=1)
    ]
    rows.append(["", "all", "", "", "", "", total[-1], exposed[-1], ""])
    return Section(
        "What that costs",
        headings=headings,
        rows=rows,
        notes=[
            "One call takes α + bytes/β. Exposed: computation stands still for it; collectives queue on a network,"
            " so one can also pay for another."
        ],
    )


def _behind(term: Term, behind: str) -> str:
    if not behind:
        return "nothing: needed at once"
    hidden = hidden_s(term)
    if hidden < 0.01 * term.seconds:
        return "nothing left"
    return behind if term.exposed_s == 0.0 else f"{behind}, in part"


def _computation(subject: Subject) -> Section:
    pricing, problem = subject.pricing, subject.inputs.problem
    work = sorted(work_by_kind(pricing, problem.workload), key=lambda each: _PHASES.index(each.phase))
    peak = problem.machine.accelerator.peak_flops_per_s(problem.workload.precision)
    headings = [
        Heading("computation", left=True), Heading("phase", left=True), Heading("s"), Heading("share,\n%"),
        Heading("TFLOP/s"), Heading("of peak,\n%"),
    ]  # fmt: skip
    times = seconds_cells([*(each.seconds for each in work), pricing.compute_s])
    rows = [
        [each.kind, each.phase, time, f"{100 * each.seconds / pricing.compute_s:.1f}", *_rate(each, peak)]
        for each, time in zip(work, times[:-1], strict=True)
    ]
    rows.append(["all", "", times[-1], "100.0", *_rate(Work("", "", pricing.compute_s, pricing.executed_flops), peak)])
    return Section("What one rank computes in a step", headings=headings, rows=rows)


def _rate(work: Work, peak: float) -> list[str]:
    """Speed in TFLOP/s and as a share of the peak."""
    if not work.flops:
        return ["-", "-"]
    return [f"{work.flops / work.seconds / _TERA:.1f}", f"{100 * work.flops / work.seconds / peak:.1f}"]


def _memory(subject: Subject) -> Section:
    """Memory at the peak of a step, largest item first."""
    memory, limit_bytes = subject.pricing.memory, subject.pricing.memory_limit_bytes
    items = sorted(((float(size), name) for name, size in memory.items), reverse=True)
    total = float(memory.total_bytes)
    headings = [Heading("memory of one rank", left=True), Heading("GiB"), Heading("of what\ncan be used, %")]
    shown = [*((name, size) for size, name in items if size), ("all", total), ("can be used", limit_bytes)]
    rows = [[name, f"{size / GIB:.2f}", f"{100 * size / limit_bytes:.1f}"] for name, size in shown]
    return Section("What one rank holds at the peak", headings=headings, rows=rows)


def explain_title(subject: Subject) -> str:
    """One line that says what is explained."""
    problem, entry = subject.inputs.problem, subject.entry
    grid = " × ".join(str(size) for size in entry.sizes)
    step = "" if entry.iteration_s is None else f", {show_seconds(entry.iteration_s)} a step"
    return f"{problem.model.name} on {problem.gpus} × {problem.machine.name}: grid x × y × z × data = {grid}{step}"
