"""`axonn_tune.explain`'s result: one configuration and its prediction, in sentences, tables, JSON and as a trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from axonn_tune.cost.price import Detail
from axonn_tune.files import write_text_atomically
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.ranking.nearest import require_any
from axonn_tune.ranking.priced import Priced
from axonn_tune.report.explain import (
    ExplainSection,
    explain_document,
    explain_markdown,
    explain_text,
    explain_title,
    sections,
)
from axonn_tune.report.facts import SmallestChange, fit_json, fit_line, step_words
from axonn_tune.report.output import Json, json_text, wrapped
from axonn_tune.report.remarks import kept_remark, merged_remark
from axonn_tune.report.run import choose_step, merged_trace, trace_remarks
from axonn_tune.specs.traces import find_traces, read_trace

ExplainFormat: TypeAlias = Literal["table", "json", "md"]


@dataclass(frozen=True)
class StepTrace:
    """A trace as Perfetto and Chrome read it, and what to know about it, in sentences."""

    text: str = field(repr=False)
    remarks: tuple[str, ...]

    def write(self, path: str | Path) -> Path:
        """Write it; errors as `axonn_tune.files.write_text_atomically`."""
        write_text_atomically(path, self.text)
        return Path(path)


@dataclass(frozen=True, repr=False, eq=False)
class Explanation:
    """One configuration and its prediction.

    machine_changed: it is a launch config's, whose machine profile is not the one explained with.
    remark: on the layout, if it is that of a search.
    """

    inputs: Inputs
    priced: Detail
    machine_changed: bool = False
    remark: str = ""

    @classmethod
    def of(cls, inputs: Inputs, ranked: Priced, *, rank: int, machine_changed: bool = False) -> Explanation:
        """Of a configuration of a ranking; NothingFeasibleError if there is none, UsageError if fewer than `rank`."""
        require_any(ranked)
        ranked.require_row(rank)
        remark = " ".join(filter(None, (kept_remark(ranked, [rank - 1]), merged_remark(ranked, rank - 1))))
        return cls(inputs, ranked.detail(rank - 1), machine_changed, remark)

    @property
    def entry(self) -> Detail:
        """The configuration with its prediction, as `priced`."""
        return self.priced

    pricing = entry

    @property
    def words(self) -> list[str]:
        """The step in sentences."""
        return step_words(self.priced)

    @property
    def fit(self) -> str:
        """Whether it fits, in a line: `fits: 61.2 of 73.1 GiB`."""
        return fit_line(self.priced, self.smallest_change)

    @property
    def smallest_change(self) -> SmallestChange | None:
        """Of a run that does not fit; layouts of a search do."""
        return None

    def to_dict(self) -> Json:
        """Everything, by the schema `axonn-tune/explain/1`."""
        return {**explain_document(self.inputs, self.priced), "fit": fit_json(self.priced, self.smallest_change)}

    def to_json(self) -> str:
        """The same as text: what `axonn-tune explain --format json` prints."""
        return json_text(self.to_dict())

    def render(self, output_format: ExplainFormat = "table", *, terms: bool = False, verbose: bool = False) -> str:
        """The explanation as the command line prints it; verbose: with all numbers, terms: of every layer."""
        if output_format == "json":
            return self.to_json()
        parts = self.sections(terms=terms, verbose=verbose)
        if output_format == "md":
            return f"# {self._title}\n\n{self.fit}\n\n{explain_markdown(parts)}"
        return f"{wrapped(self.fit)}\n{wrapped(self._title)}\n\n{explain_text(parts)}"

    def sections(self, *, terms: bool = False, verbose: bool = False) -> list[ExplainSection]:
        """What it consists of; verbose: with all numbers, terms: of every layer."""
        return sections(self.priced, terms=terms, verbose=verbose, remark=self.remark)

    @property
    def _title(self) -> str:
        return explain_title(self.inputs.problem, self.priced)

    def section(self, *, source: str) -> Json:
        """This explanation as a section of a report; `source` names where it comes from."""
        from axonn_tune.report.configuration import explanation_section

        return explanation_section(self.to_dict(), identity="s1", source=source, subject=(self.inputs, self.priced))

    def trace(self, runs: Sequence[str | Path] = (), *, step: int | None = None) -> StepTrace:
        """The predicted step as a trace for Perfetto, with measured ones, as `axonn-tune trace` writes it.

        runs: folders of runs that wrote traces, or single files of them; step: which of theirs, that of median
        duration unless given. UsageError if there is none of that number in all of them.
        """
        traces = [read_trace(path) for run in runs for path in find_traces(run)]
        measured = choose_step(traces, step=step) if traces else None
        return StepTrace(merged_trace(self.inputs, self.priced, measured), tuple(trace_remarks(self.priced, measured)))

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"<Explanation: {self._title}>"

    def _repr_markdown_(self) -> str:
        return self.render("md")
