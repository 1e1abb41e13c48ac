"""`axonn_tune.search`: a ranking as an object to look at, index, explain and write launch configs from.

Options have the names of the command line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeAlias, TypeVar, overload

from axonn_tune.cost.price import PricedLayout
from axonn_tune.errors import UsageError, suggest
from axonn_tune.files import require_own
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import AXES
from axonn_tune.job import require_full_nodes, require_run, slurm_section
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.inputs import Inputs, load_inputs
from axonn_tune.ranking.priced import Interrupted, Priced, Row, SearchCounts
from axonn_tune.ranking.space import Problem
from axonn_tune.report.output import Json, Table, json_text
from axonn_tune.report.ranking import ranking_table, with_shortest
from axonn_tune.report.remarks import ranking_remarks, short_remarks, why_first
from axonn_tune.request import ALPHA_BETA, MIN, Option, Request, options_of
from axonn_tune.vocabulary import AUTO

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Group

    from axonn_tune.api.explanation import Explanation
    from axonn_tune.cost.price import Detail
    from axonn_tune.launch.commands import LaunchFiles
    from axonn_tune.launch.scripts import Emit, ScriptKind
    from axonn_tune.report.sizes import Sizes
    from axonn_tune.specs.launch import Launch


NEEDED = ("model", "gpus")
"""Options without which nothing is searched."""

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., object])


def by_keywords(_: Callable[P, Request]) -> Callable[[Callable[[Request, str], R]], Callable[P, R]]:
    """Make a function of a request, and of the call for provenance, one of the request's options as keywords."""

    def decorated(function: Callable[[Request, str], R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **given: P.kwargs) -> R:
            stated = {**signature(Request).bind_partial(*args).arguments, **given}
            name = function.__name__
            return function(request_of(name, stated, known=options_of(name)), call_text(name, stated))

        show_options(called)
        return called

    return decorated


def show_options(function: F) -> F:
    """The function of a command with its options in signature and docstring, beside what parameters it has itself."""
    shown: Any = function
    own = [one for one in signature(function, follow_wrapped=False).parameters.values() if "VAR" not in one.kind.name]
    options = {name: one for name, one in options_of(shown.__name__).items() if name not in {one.name for one in own}}
    asked = [one for name, one in signature(Request).parameters.items() if name in options]
    asked = [one.replace(default=one.empty) if one.name in NEEDED else one for one in asked]
    shown.__signature__ = Signature(sorted([*own, *asked], key=lambda one: one.kind))
    words = "\n".join(f"    {name}: {option.words}" for name, option in options.items())
    shown.__doc__ = f"{shown.__doc__}\n    Options:\n\n{words}\n"
    return function


def request_of(
    function: str, given: Mapping[str, Any], *, known: Mapping[str, Option], needs: Sequence[str] = NEEDED
) -> Request:
    """What a call with these keywords asks for; those not known may be a framework's names.

    TypeError, as Python has it, for an option that there is not, with the nearest that there is, and for one that is
    missing; UsageError for a name of another framework, or a wrong value.
    """
    ours = {name: value for name, value in given.items() if name in known}
    if others := {name: value for name, value in given.items() if name not in known}:
        # Imported here: most searches name none, and start-up time is theirs.
        from axonn_tune.frameworks.names import SHARED, is_known, our_options, why_unpriced

        for name in others:
            if not is_known(name):
                if why := why_unpriced(name):
                    raise UsageError(f"{name}: {why}")
                near = suggest(name, (*known, *SHARED, *_names_of(ours.get("framework"))))
                raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{near}")
        ours |= our_options(others, ours)
    if missing := [name for name in needs if ours.get(name) is None]:
        raise TypeError(f"{function}() is missing {' and '.join(missing)}")
    return Request(**ours)


def _names_of(framework: str | Framework | None) -> list[str]:
    """A framework's names of its axes, as keywords."""
    found = find_framework(framework) if isinstance(framework, str) else framework
    return [found.called(axis).lower() for axis in found.columns] if found else []


def call_text(function: str, given: Mapping[str, object]) -> str:
    """The call that made a result, for provenance: `axonn_tune.search(model='80b', gpus=1024)`."""
    shown = [f"{name}={_shown(value)}" for name, value in given.items() if value is not None]
    return f"axonn_tune.{function}({', '.join(shown)})"


def _shown(value: Any) -> str:  # noqa: ANN401 - whatever was given
    """A value as it would be written; a document by its name."""
    if isinstance(value, Path):
        return repr(str(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if hasattr(value, "tolist"):
        return repr(value.tolist())
    name = getattr(getattr(value, "document", value), "name", None)
    return repr(value) if name is None else f"<{name}>"


class Result(ABC):
    """What is found: a table that notebooks show as HTML and rich fits to the console, and a JSON document."""

    @abstractmethod
    def to_dict(self) -> Json:
        """Everything, as JSON: see docs/python.md for the schema of each kind of result."""

    @abstractmethod
    def _table(self) -> Table:
        """The table as it is shown without options, and sentences below it."""

    @property
    def frame(self) -> pd.DataFrame:
        """One row for each row of the whole table; columns as in `--format csv`, with their units."""
        return self._table().frame()

    def to_json(self) -> str:
        """The same as text: what `--format json` prints."""
        return json_text(self.to_dict())

    def _rendered(self, output_format: str, table: Callable[[], Table], *, color: bool = False) -> str:
        """As the command line prints it; the table is made for formats that have one."""
        return self.to_json() if output_format == "json" else table().render(output_format, color=color)

    def __str__(self) -> str:
        return self._rendered("table", self._table)

    def __rich__(self) -> Group:
        return self._table().rich()

    def _repr_html_(self) -> str:
        return self._table().html()


class ReportedResult(Result):
    """A result that a report can be written of. call: what asked for it."""

    call: str

    @abstractmethod
    def section(self, *, source: str) -> Json:
        """This result as a section of a report; `source` names where it comes from."""

    def write_report(self, path: str | Path) -> Path:
        """Write one self-contained HTML file, as `--html` does; EnvironmentProblem without the extra [report]."""
        from axonn_tune.report.page import require_plotly, write_page

        require_plotly()
        write_page(path, [self.section(source=self.call)], command=self.call)
        return Path(path)


MOST_WITH_TERMS = 3_000
"""Configurations that are rendered as JSON at once: each is priced by itself, in 2 to 5 ms."""
_TERMS_BYTES = 15_000
"""Of one configuration in JSON, about."""

MOST_REMARKS = 4
"""Below a table, unless all are asked for."""

MOST_LISTED = 20_000
"""Rows that are rendered at once, in 0.1 ms each."""

Format: TypeAlias = Literal["table", "json", "csv", "md"]


@by_keywords(Request)
def search(request: Request, call: str) -> SearchResult:
    """Rank the grids x·y·z·data of a number of GPUs, as `axonn-tune search` does; only the first `top` have a rank.

    model, machine: a name, a path, or the document itself. cost: one cost model or several; the first ranks, and the
    others' ranks are extra columns. A framework's own names of axes are options, too: `tp=8, pp=4`.

    An empty result is not an error: it knows the rejected grids and reasons. `result` of a KeyboardInterrupt is what
    was found until then, if anything was. UsageError for a wrong value, UnknownNameError for an unknown model or
    machine, DocumentError for a wrong file.

    >>> import axonn_tune
    >>> found = axonn_tune.search("80b", 1024)
    >>> len(found), found.searched.unlisted
    (10, 185)
    >>> found.best.x, found.best.y, found.best.z, found.best.data
    (1, 1, 256, 4)
    """
    if not request.cost:
        raise UsageError("cost=(): name a cost model to rank by")
    if request.gpus == MIN:
        return _at_smallest(request, call)
    every = request.optimizer == AUTO
    inputs = load_inputs(replace(request, optimizer=None) if every else request)
    try:
        return SearchResult(inputs, _ranked(inputs.problem, top=request.top), call, every_optimizer=every)
    except Interrupted as stopped:
        # By another cost model it is no ranking yet.
        if tuple(request.cost) == (ALPHA_BETA,):
            stopped.result = SearchResult(inputs, stopped.found, call)
        raise


def _at_smallest(request: Request, call: str) -> SearchResult:
    """The ranking on the smallest number of GPUs, and what it takes there and on more."""
    # Imported here: most searches are of a given number, and start-up time is theirs.
    from axonn_tune.learning.setups import taken_of
    from axonn_tune.ranking.smallest import smallest
    from axonn_tune.report.sizes import Sizes

    found = smallest(request)
    sizes = [
        replace(one, took=taken_of(one, found.sized(one.inputs.problem.gpus))) for one in found.sizes(top=request.top)
    ]
    shown = Sizes(sizes, found.of_batch, found.without, found.offloaded, found.other_modes)
    return SearchResult(sizes[0].inputs, sizes[0].ranked, call, sizes=shown)


def _ranked(problem: Problem, *, top: int) -> Priced:
    """What the request of a problem asks for, with so many rows."""
    return run_search(problem, costs=problem.request.cost, top=top, variants=problem.request.variants)


@dataclass(frozen=True, repr=False, eq=False)
class SearchResult(ReportedResult, Sequence[PricedLayout]):
    """A ranking: a sequence of configurations, best first, displayed as a table in consoles and notebooks.

    inputs: the model, the machine and the problem that was searched. ranked: the ranking as the search made it. call:
    what asked for it, which launch configs name. sizes: of `gpus="min"`, what it takes on that number and on more.
    every_optimizer: a remark has the best layout with each optimizer.
    """

    inputs: Inputs
    ranked: Priced
    call: str
    sizes: Sizes | None = None
    every_optimizer: bool = False

    @property
    def searched(self) -> SearchCounts:
        """Numbers of grids and candidates, and of grids rejected by each constraint."""
        return self.ranked.searched

    @property
    def best(self) -> PricedLayout:
        """The first of the ranking; NothingFeasibleError, with the nearest change, if there is none."""
        self.require_any()
        return self[0]

    def require_any(self) -> None:
        """NothingFeasibleError, with the nearest change, if there is none."""
        if not len(self):
            # Imported here: most searches find something, and start-up time is theirs.
            from axonn_tune.ranking.nearest import require_any

            require_any(self.ranked)

    @property
    def _nothing_feasible(self) -> str:
        """Why an empty ranking is one, and the nearest change."""
        from axonn_tune.ranking.nearest import nothing_feasible

        return nothing_feasible(self.ranked)

    @property
    def memory_limit_bytes(self) -> float:
        """Memory limit of one GPU."""
        return memory_limit_bytes(self.inputs.problem.machine.accelerator)

    @property
    def frame(self) -> pd.DataFrame:
        """One row for each configuration, best first; columns as in `--format csv`, with their units."""
        return self._frame(self.ranked.listed())

    @property
    def rejected(self) -> pd.DataFrame:
        """One row for each rejected grid: its axes and reasons."""
        framework = self.inputs.problem.framework
        found = self._frame(self.ranked.rejected())
        return found[[*AXES, *filter(found.columns.__contains__, framework.names.values()), "rejected_because"]]

    @property
    def why(self) -> str:
        """Where the first configuration is faster than the second."""
        return why_first(self.ranked)

    @property
    def remarks(self) -> list[str]:
        """All remarks on the table as it is shown without options: what to do next, ties, rejections."""
        return self.remarks_below(verbose=True)

    def remarks_below(self, *, top: int = 0, unfold: bool = False, verbose: bool = False) -> list[str]:
        """Remarks on a table of the first `top` rows (0: all): the first few, or all; unfold: as of `render`."""
        problem, families = self.inputs.problem, self._families(top, unfold=unfold)
        hint = ""
        if len(self) and self.ranked.cost == ALPHA_BETA and problem.workload.global_batch % problem.gpus:
            # Imported here: most batches suit the GPUs, and start-up time is theirs.
            from axonn_tune.ranking.nearest import faster_batch

            hint = faster_batch(problem)
        if self.every_optimizer:
            # Imported here: most searches are with one optimizer, and start-up time is theirs.
            from axonn_tune.ranking.compare import every_optimizer

            hint = every_optimizer(problem)
        if verbose:
            return ranking_remarks(self.ranked, families, hint=hint)
        return short_remarks(self.ranked, families, hint=hint)[:MOST_REMARKS]

    def _families(self, top: int, *, unfold: bool) -> list[list[int]]:
        """Places of each row of a table of the first `top` (0: all)."""
        return [[place] for place in range(top or len(self))][: len(self)] if unfold else self.ranked.families(top)

    def explain(self, rank: int = 1) -> Explanation:
        """One configuration, term by term; UsageError if fewer are feasible, NothingFeasibleError if none is."""
        # Imported here: a search alone explains nothing, and start-up time is its.
        from axonn_tune.api.explanation import Explanation

        return Explanation.of(self.inputs, self._reaching(rank), rank=rank)

    def _reaching(self, rank: int) -> Priced:
        """The ranking down to a rank: where it has fewer rows and more are feasible, that of another search."""
        more = len(self) < rank and self.searched.unlisted
        return _ranked(self.inputs.problem, top=rank) if more else self.ranked

    def launch_config(self, *, pick: int = 1, tokens: str | Path | None = None) -> Launch:
        """The launch config of a configuration; `tokens`: a file to train on. Errors as `explain`."""
        from axonn_tune.launch.config import build_launch

        return build_launch(
            self._detail(pick),
            model=self.inputs.model,
            machine=self.inputs.machine,
            command=self.call,
            tokens=None if tokens is None else str(tokens),
        )

    def write_launch_config(
        self,
        path: str | Path,
        *,
        pick: int = 1,
        tokens: str | Path | None = None,
        emit: Emit | Sequence[Emit] | None = None,
        force: bool = True,
        approximate: bool = False,
    ) -> tuple[Path, ...]:
        """Write the launch files of a configuration; returns their paths.

        For the bundled runtime a launch config and, with `emit`, a script that starts it. For another framework the
        script with its arguments (`path` with the suffix .sh, or .sbatch where `emit` has "slurm"), and the config
        files that it reads; "bridge" and "toml" are other forms of it. force: False refuses, by a UsageError, to
        replace a file that axonn-tune has not written. approximate: True writes them although the model's network has
        something otherwise (`Model.otherwise`), which is refused else. Errors as `explain`, those of
        `axonn_tune.launch.config.write_launch`, and UsageError for what the framework cannot express.
        """
        from axonn_tune.launch.scripts import SUFFIXES, emit_kind, emit_script, script_text

        wanted: Sequence[Emit] = (emit,) if isinstance(emit, str) else emit or ()
        kind, form = emit_kind(wanted)
        if (model := self.inputs.problem.model).otherwise and not approximate:
            raise UsageError(
                f"{model.name} has {'; '.join(model.otherwise)}: what is written would train another network; "
                "--approximate writes it all the same, for its speed"
            )
        if self.inputs.problem.framework.software:
            return self._command_files(path, pick=pick, tokens=tokens, kind=kind, form=form).write(force=force)
        if form:
            raise UsageError(f"--emit {form} is for other frameworks: give --framework")
        from axonn_tune.launch.config import write_launch

        launch, machine = self.launch_config(pick=pick, tokens=tokens), self.inputs.machine.document
        if not force:
            require_own(path, kind="launch")
        if not wanted:
            write_launch(path, launch)
            return (Path(path),)
        # What refuses a script refuses it here, before anything is written.
        script_text(kind, launch=launch, machine=machine, launch_path=path)
        if not force:
            require_own(Path(path).with_suffix(SUFFIXES[kind]))
        write_launch(path, launch)
        return Path(path), Path(emit_script(kind, launch=launch, machine=machine, launch_path=path))

    def require_script(self, kind: ScriptKind, *, pick: int = 1, form: str = "") -> None:
        """UsageError where no script of this kind and form starts a configuration; none is written to find out."""
        priced, machine = self._detail(pick), self.inputs.machine.document
        if self.inputs.problem.framework.software:
            from axonn_tune.launch.commands import command_of

            command_of(priced, form=form)
        else:
            require_run(priced.job, priced, self.inputs.model.document)
        require_full_nodes(priced.grid.world, machine.launcher.ranks_per_node)
        if kind == "slurm":
            slurm_section(machine)

    def _detail(self, pick: int) -> Detail:
        """The prediction of a configuration; errors as `explain`."""
        self.require_any()
        ranked = self._reaching(pick)
        ranked.require_row(pick)
        return ranked.detail(pick - 1)

    def _command_files(
        self, path: str | Path, *, pick: int, tokens: str | Path | None, kind: ScriptKind, form: str
    ) -> LaunchFiles:
        from axonn_tune.launch.commands import emission

        problem = self.inputs.problem
        if tokens is not None:
            raise UsageError(f"--tokens is for the bundled runtime, not for {problem.framework.name}")
        return emission(self._detail(pick), path, call=self.call, kind=kind, form=form)

    def to_dict(self, *, top: int = 0, rejected: bool = False) -> Json:
        """The first `top` configurations (0: all), with every term, as the contract `axonn-tune/ranking/1`."""
        entries = self.ranked.listed(top=top, terms=True, rejected=rejected)
        # Imported here: a table needs no document.
        from axonn_tune.report.ranking_section import ranking_document

        found = ranking_document(self.inputs, self.ranked, entries)
        if self.sizes is None:
            return found
        # Imported here: most searches are of a given number, and start-up time is theirs.
        from axonn_tune.report.sizes import sizes_json

        return {**found, "smallest": sizes_json(self.sizes)}

    def to_json(self, *, top: int = 0, rejected: bool = False) -> str:
        """The same as text: what `axonn-tune --format json` prints."""
        return json_text(self.to_dict(top=top, rejected=rejected))

    def render(
        self,
        output_format: Format = "table",
        *,
        top: int = 0,
        rejected: bool = False,
        wide: bool = False,
        columns: Sequence[str] | None = None,
        unfold: bool = False,
        color: bool = False,
        terminal: int = 0,
    ) -> str:
        """The first `top` configurations (0: all) as the command line prints them; UsageError for an unknown column.

        unfold: layouts that only exchange context and micro-batch as rows of their own. color: with bars where a line
        of `terminal` characters has room for them.
        """
        count = min(top, len(self)) if top else len(self)
        if (rows := count + (self.searched.grids if rejected else 0)) > MOST_LISTED:
            raise UsageError(f"there are {rows:,} rows: up to {MOST_LISTED:,} are listed; give --top N, or no --all")
        if output_format == "json":
            if count > MOST_WITH_TERMS:
                raise UsageError(
                    f"--format json has every collective of each configuration, for {count:,} of them some "
                    f"{count * _TERMS_BYTES / 1e6:,.0f} MB: --format csv lists all of them without, or give --top N up "
                    f"to {MOST_WITH_TERMS:,}"
                )
            return self.to_json(top=top, rejected=rejected)
        if self.sizes is not None:
            # Imported here: most searches are of a given number, and start-up time is theirs.
            from axonn_tune.report.sizes import sizes_table

            return sizes_table(self.sizes, names=columns or ()).render(output_format, color=color)
        if output_format == "csv":
            return ranking_table(self.ranked, self.ranked.listed(top=top, rejected=rejected)).render("csv")
        bars = terminal if color and output_format == "table" else 0
        table = self._listing(top, rejected=rejected, unfold=unfold, names=columns or (), wide=wide, terminal=bars)
        return table.render(output_format, color=color) if table.rows else ""

    def _listing(self, top: int, *, rejected: bool = False, unfold: bool = False, **shown: Any) -> Table:  # noqa: ANN401
        """The first `top` rows (0: all) as a table, layouts that only exchange equal factors as one row."""
        families = self._families(top, unfold=unfold)
        entries: list[Row] = [*(self.ranked[family[0]] for family in families), *self.ranked.listed_below(top)]
        if rejected:
            entries += self.ranked.rejected()
        if "rank" in (shown.get("names") or ["rank"]):
            entries = list(with_shortest(self.ranked, entries))
        intervals = not {"low_s", "high_s"}.isdisjoint(shown.get("names", ()))
        return ranking_table(self.ranked, entries, intervals=intervals, **shown)

    def __len__(self) -> int:
        return len(self.ranked)

    @overload
    def __getitem__(self, position: int) -> PricedLayout: ...

    @overload
    def __getitem__(self, position: slice) -> tuple[PricedLayout, ...]: ...

    def __getitem__(self, position: int | slice) -> PricedLayout | tuple[PricedLayout, ...]:
        """The configuration at a place of the ranking, from 0, with its terms; a slice gives several."""
        places = range(len(self))[position]
        if isinstance(places, range):
            return tuple(map(self.ranked.with_terms, places))
        return self.ranked.with_terms(places)

    def __str__(self) -> str:
        return "\n".join([self.render() or self._nothing_feasible, *self.remarks_below()])

    def __repr__(self) -> str:
        problem = self.inputs.problem
        found = f"{len(self)} configurations" if len(self) else "nothing feasible"
        return f"<SearchResult: {problem.model.name} on {problem.gpus:,} × {problem.machine.name}, {found}>"

    def section(self, *, source: str) -> Json:
        """This ranking as a section of a report; `source` names where it comes from."""
        from axonn_tune.report.ranking_section import ranking_of, ranking_section

        document = ranking_of(self.inputs, self.ranked)
        if self.sizes is not None:
            from axonn_tune.report.sizes import sizes_remarks

            document["verdict"] = [*sizes_remarks(self.sizes), *document["verdict"]]
        return ranking_section(document, identity="s1", source=source)

    def _table(self) -> Table:
        table = self._listing(0)
        none = [] if len(self) else [self._nothing_feasible]
        return replace(table, notes=[*table.notes, *none, *self.remarks_below()])

    def _frame(self, entries: Sequence[Row]) -> pd.DataFrame:
        return ranking_table(self.ranked, entries).frame()
