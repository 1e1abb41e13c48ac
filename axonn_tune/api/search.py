"""`axonn_tune.search`: a ranking as an object to look at, index, explain and write launch configs from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, Unpack, overload

from axonn_tune.api.options import DEFAULT_MACHINE, Cost, Options, call_text, make_choices, parse_costs
from axonn_tune.api.shown import Result
from axonn_tune.cost.memory import memory_limit_bytes
from axonn_tune.ranking.entries import Entry
from axonn_tune.ranking.inputs import Inputs, load_inputs
from axonn_tune.ranking.results import Results, run_search

if TYPE_CHECKING:
    import pandas as pd

    from axonn_tune.api.explain import Explanation
    from axonn_tune.api.shown import Shown
    from axonn_tune.ranking.choosing import RankBy, Searched
    from axonn_tune.report.ranking_json import Json
    from axonn_tune.specs.catalog import MachineLike, ModelLike
    from axonn_tune.specs.launch import Launch

Format: TypeAlias = Literal["table", "json", "csv", "md"]
Script: TypeAlias = Literal["torchrun", "slurm"]
DEFAULT_TOP = 10
"""Rows listed unless more are asked for, as on the command line."""


def search(
    model: ModelLike,
    *,
    gpus: int,
    machine: MachineLike = DEFAULT_MACHINE,
    batch: int | None = None,
    rank_by: RankBy = "communication",
    cost: Cost | Sequence[Cost] = "alpha-beta",
    variants: bool = False,
    **options: Unpack[Options],
) -> SearchResult:
    """Rank every grid x·y·z·data of a number of GPUs, as `axonn-tune search` does.

    model, machine: a name, a path, or the document itself. batch: sequences in a step over all GPUs, the
    model's unless given. rank_by: communication, exposed or iteration. cost: one cost model or several; the
    first ranks, and the others' ranks stand beside it. variants: every candidate, not only the best of each
    grid. Other options: see `axonn_tune.api.options.Options`.

    A search that leaves nothing is no error: the result is empty, and knows what was rejected and why. UsageError
    for a wrong value, UnknownNameError for an unknown model or machine, DocumentError for a wrong file.

    >>> import axonn_tune
    >>> found = axonn_tune.search("80b", gpus=1024)
    >>> len(found)
    195
    >>> found.best.x, found.best.y, found.best.z, found.best.data
    (1, 1, 512, 2)
    """
    given = {"gpus": gpus, "machine": machine, "batch": batch, "rank_by": rank_by, "cost": cost, **options}
    choices = make_choices(model, gpus=gpus, machine=machine, batch=batch, rank_by=rank_by, options=options)
    call = call_text("search", {"model": model, **given, "variants": variants or None})
    return SearchResult.of(load_inputs(choices), costs=parse_costs(cost), variants=variants, call=call)


@dataclass(frozen=True, repr=False, eq=False)
class SearchResult(Result, Sequence[Entry]):
    """A ranking: a sequence of configurations, best first, that shows itself in consoles and notebooks.

    results: the ranking as the search made it. call: what asked for it, which launch configs name.
    """

    results: Results
    call: str

    @classmethod
    def of(
        cls, inputs: Inputs, *, costs: Sequence[str] = ("alpha-beta",), variants: bool = False, call: str
    ) -> SearchResult:
        """The ranking of what has been loaded already."""
        return cls(run_search(inputs, costs=costs, variants=variants), call)

    @property
    def inputs(self) -> Inputs:
        """The model, the machine and the problem that was searched."""
        return self.results.inputs

    @property
    def searched(self) -> Searched:
        """How many grids and candidates were looked at, and how many grids each constraint rejected."""
        return self.results.ranked.searched

    @property
    def best(self) -> Entry:
        """The first of the ranking; NothingFeasibleError, with what binds and what to change, if there is none."""
        self.results.require_any()
        return self[0]

    @property
    def memory_limit_bytes(self) -> float:
        """Memory of one GPU that a configuration may use."""
        return memory_limit_bytes(self.inputs.problem.machine.accelerator)

    @property
    def frame(self) -> pd.DataFrame:
        """One row for each configuration, best first; columns as in `--format csv`, with their units."""
        return self._frame(self.results.listed(top=0))

    @property
    def rejected(self) -> pd.DataFrame:
        """One row for each grid that cannot be used: its axes, and the reasons in words."""
        return self._frame(self.results.ranked.rejected_entries())[["x", "y", "z", "data", "rejected_because"]]

    @property
    def why(self) -> str:
        """Where the first spends less time than the second."""
        from axonn_tune.report.remarks import why_first

        return why_first(self.results)

    @property
    def remarks(self) -> list[str]:
        """What to know besides the numbers, in sentences: what was priced, why the first is first, ties, rejections."""
        from axonn_tune.report.remarks import remarks

        return remarks(self.results)

    def explain(self, rank: int = 1) -> Explanation:
        """One configuration, term by term; UsageError if fewer are ranked, NothingFeasibleError if none is."""
        from axonn_tune.api.explain import Explanation

        return Explanation.of(self.results, rank=rank)

    def launch_config(self, *, pick: int = 1, tokens: str | Path | None = None) -> Launch:
        """The launch config of a configuration; `tokens`: a file to train on. Errors as `explain`."""
        from axonn_tune.launch.config import build_launch

        self.results.require_any()
        self.results.require_row(pick)
        return build_launch(
            self.results.ranked.pricing(pick - 1),
            model=self.inputs.model,
            machine=self.inputs.machine,
            workload=self.inputs.problem.workload,
            command=self.call,
            tokens=None if tokens is None else str(tokens),
        )

    def write_launch_config(
        self, path: str | Path, *, pick: int = 1, tokens: str | Path | None = None, emit: Script | None = None
    ) -> tuple[Path, ...]:
        """Write the launch config of a configuration; `emit`: and a script that starts it. Returns what was written.

        Errors as `explain`, and those of `axonn_tune.launch.config.write_launch`.
        """
        from axonn_tune.launch.config import write_launch

        launch, machine = self.launch_config(pick=pick, tokens=tokens), self.inputs.machine.document
        if emit is None:
            write_launch(path, launch)
            return (Path(path),)
        from axonn_tune.launch.scripts import emit_script, script_text

        # What refuses a script refuses it here, before anything is written.
        script_text(emit, launch=launch, machine=machine, launch_path=path)
        write_launch(path, launch)
        return Path(path), Path(emit_script(emit, launch=launch, machine=machine, launch_path=path))

    def to_dict(self, *, top: int = DEFAULT_TOP, rejected: bool = False) -> Json:
        """The first `top` configurations (0: all), with every term, as the contract `axonn-tune/ranking/1`."""
        from axonn_tune.report.ranking_json import ranking_document

        entries = self.results.listed(top=top, terms=True, rejected=rejected)
        return ranking_document(self.results, entries, limit_bytes=self.memory_limit_bytes)

    def to_json(self, *, top: int = DEFAULT_TOP, rejected: bool = False) -> str:
        """The same as text: what `axonn-tune --format json` prints."""
        from axonn_tune.report.ranking_json import to_text

        return to_text(self.to_dict(top=top, rejected=rejected))

    def render(
        self,
        output_format: Format = "table",
        *,
        top: int = DEFAULT_TOP,
        rejected: bool = False,
        wide: bool = False,
        columns: Sequence[str] | None = None,
        color: bool = False,
    ) -> str:
        """The first `top` configurations (0: all) as the command line prints them; UsageError for an unknown column."""
        if output_format == "json":
            return self.to_json(top=top, rejected=rejected)
        from axonn_tune.report import ranking_table as tables

        entries, limit_bytes = self.results.listed(top=top, rejected=rejected), self.memory_limit_bytes
        if output_format == "csv":
            return tables.ranking_csv(self.results, entries, limit_bytes=limit_bytes)
        names = columns or tables.default_columns(self.results, entries, wide=wide)
        if not entries:
            return ""
        if output_format == "md":
            return tables.ranking_markdown(self.results, entries, names=names, limit_bytes=limit_bytes)
        return tables.ranking_table(self.results, entries, names=names, limit_bytes=limit_bytes, color=color)

    def __len__(self) -> int:
        return len(self.results.ranked)

    @overload
    def __getitem__(self, position: int) -> Entry: ...

    @overload
    def __getitem__(self, position: slice) -> tuple[Entry, ...]: ...

    def __getitem__(self, position: int | slice) -> Entry | tuple[Entry, ...]:
        """The configuration at a place of the ranking, from 0, with its terms; a slice gives several."""
        places = range(len(self))[position]
        if isinstance(places, range):
            return tuple(self.results.ranked.entry(place, terms=True) for place in places)
        return self.results.ranked.entry(places, terms=True)

    def __iter__(self) -> Iterator[Entry]:
        """Each configuration, best first, with its terms."""
        return (self[place] for place in range(len(self)))

    def __str__(self) -> str:
        return "\n".join([self.render() or self._none(), *self.remarks])

    def __repr__(self) -> str:
        problem = self.inputs.problem
        found = f"{len(self)} configurations" if len(self) else "nothing feasible"
        return f"<SearchResult: {problem.model.name} on {problem.gpus:,} × {problem.machine.name}, {found}>"

    def section(self, *, source: str) -> Json:
        """This ranking as a section of a report; `source` names where it comes from."""
        from axonn_tune.report.html.launched import ranking_of
        from axonn_tune.report.html.ranking import ranking_section

        return ranking_section(ranking_of(self.results), identity="s1", source=source)

    def _shown(self) -> Shown:
        from axonn_tune.report.ranking_table import default_columns, ranking_cells

        entries = self.results.listed(top=DEFAULT_TOP)
        names = default_columns(self.results, entries)
        cells = ranking_cells(self.results, entries, names=names, limit_bytes=self.memory_limit_bytes)
        return *cells, [*([] if len(self) else [self._none()]), *self.remarks]

    def _none(self) -> str:
        """What binds, if nothing is ranked."""
        from axonn_tune.ranking.results import nothing_feasible

        return nothing_feasible(self.inputs.problem, self.searched)

    def _frame(self, entries: Sequence[Entry]) -> pd.DataFrame:
        import pandas as pd

        from axonn_tune.report.ranking_table import ranking_records

        names, rows = ranking_records(self.results, entries, limit_bytes=self.memory_limit_bytes)
        return pd.DataFrame(rows, columns=names)
