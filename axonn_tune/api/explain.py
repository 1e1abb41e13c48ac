"""`axonn_tune.explain`: one configuration, every term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, Unpack

from axonn_tune.api.options import DEFAULT_MACHINE, Options, make_choices
from axonn_tune.files import write_text_atomically
from axonn_tune.ranking.inputs import Inputs, launch_inputs, load_inputs
from axonn_tune.ranking.results import Results, run_search

if TYPE_CHECKING:
    from axonn_tune.cost.single import Pricing
    from axonn_tune.ranking.choosing import RankBy
    from axonn_tune.ranking.entries import Entry
    from axonn_tune.report.explain import Subject
    from axonn_tune.report.ranking_json import Json
    from axonn_tune.specs.catalog import MachineLike, ModelLike

Format: TypeAlias = Literal["table", "json", "md"]


def explain(
    model: ModelLike,
    *,
    gpus: int,
    machine: MachineLike = DEFAULT_MACHINE,
    batch: int | None = None,
    rank_by: RankBy = "communication",
    pick: int = 1,
    **options: Unpack[Options],
) -> Explanation:
    """Explain one configuration of a ranking, as `axonn-tune explain` does: pin axes and the rest to choose it.

    Parameters as of `axonn_tune.search`; pick: which of those the options leave. NothingFeasibleError if they
    leave none, UsageError if fewer than `pick`.

    >>> import axonn_tune
    >>> shown = axonn_tune.explain("80b", gpus=1024, z=64, data=16)
    >>> print(shown.words[0])
    One step of 80b trains 8,192 sequences of 2,048 tokens on 1,024 GPUs.
    """
    choices = make_choices(model, gpus=gpus, machine=machine, batch=batch, rank_by=rank_by, options=options)
    return Explanation.of(run_search(load_inputs(choices)), rank=pick)


def explain_launch(path: str | Path, *, machine: MachineLike | None = None) -> Explanation:
    """Explain the configuration of a launch config, on its machine or on another. Errors as `axonn_tune.search`."""
    inputs, changed = launch_inputs(path, machine=machine)
    return Explanation.of(run_search(inputs), rank=1, machine_changed=changed)


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
    """One configuration and everything that is predicted of it.

    machine_changed: it is a launch config's, whose machine profile is not the one explained with.
    """

    subject: Subject
    machine_changed: bool = False

    @classmethod
    def of(cls, results: Results, *, rank: int, machine_changed: bool = False) -> Explanation:
        """Of a configuration of a ranking; NothingFeasibleError if there is none, UsageError if fewer than `rank`."""
        from axonn_tune.report.explain import Subject

        results.require_any()
        results.require_row(rank)
        ranked = results.ranked
        subject = Subject(results.inputs, ranked.entry(rank - 1, terms=True), ranked.pricing(rank - 1))
        return cls(subject, machine_changed)

    @property
    def inputs(self) -> Inputs:
        """The model, the machine and the problem."""
        return self.subject.inputs

    @property
    def entry(self) -> Entry:
        """The configuration as the ranking lists it."""
        return self.subject.entry

    @property
    def pricing(self) -> Pricing:
        """Every term, the computation and the memory."""
        return self.subject.pricing

    @property
    def words(self) -> list[str]:
        """What a step consists of, in sentences."""
        from axonn_tune.report.explain_words import words

        return words(self.inputs, self.entry, self.pricing)

    def to_dict(self) -> Json:
        """Everything, by the schema `axonn-tune/explain/1`."""
        from axonn_tune.report.explain_json import explain_document

        return explain_document(self.subject)

    def to_json(self) -> str:
        """The same as text: what `axonn-tune explain --format json` prints."""
        from axonn_tune.report.ranking_json import to_text

        return to_text(self.to_dict())

    def render(self, output_format: Format = "table") -> str:
        """The explanation as the command line prints it."""
        if output_format == "json":
            return self.to_json()
        from axonn_tune.report.explain import explain_markdown, explain_text, explain_title

        if output_format == "md":
            return f"# {explain_title(self.subject)}\n\n{explain_markdown(self.subject)}"
        return f"{explain_title(self.subject)}\n\n{explain_text(self.subject)}"

    def trace(self, runs: Sequence[str | Path] = (), *, step: int | None = None) -> StepTrace:
        """The predicted step as a trace for Perfetto, with measured ones beside it, as `axonn-tune trace` writes it.

        runs: folders of runs that wrote traces, or single files of them; step: which of theirs, that of median
        duration unless given. UsageError if there is none of that number in all of them.
        """
        from axonn_tune.report.trace import Prediction, choose_step, merged_trace, trace_remarks
        from axonn_tune.specs.traces import find_traces, read_trace

        traces = [read_trace(path) for run in runs for path in find_traces(run)]
        measured = choose_step(traces, step=step) if traces else None
        prediction = Prediction(self.inputs, self.pricing)
        return StepTrace(merged_trace(prediction, measured), tuple(trace_remarks(prediction, measured)))

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        from axonn_tune.report.explain import explain_title

        return f"<Explanation: {explain_title(self.subject)}>"

    def _repr_markdown_(self) -> str:
        return self.render("md")
