"""`axonn_tune.search`: a ranking as an object to look at, index, explain and write launch configs from.

Options have the names of the command line.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, cast, get_args, overload

from axonn_tune.cost.price import PricedLayout
from axonn_tune.errors import UsageError, suggest
from axonn_tune.files import require_own
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import ALL_AXES
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.choosing import RANK_BY, run_search
from axonn_tune.ranking.inputs import Choices, Inputs, WorkloadChoices, completed, load_inputs
from axonn_tune.ranking.nearest import faster_batch
from axonn_tune.ranking.priced import Priced, SearchCounts
from axonn_tune.ranking.space import Limits, RankBy
from axonn_tune.report.output import Json, Table, json_text
from axonn_tune.report.ranking import Row, ranking_document, ranking_remarks, ranking_table, why_first, with_shortest
from axonn_tune.specs.catalog import DEFAULT_MACHINE, MachineLike, ModelLike
from axonn_tune.specs.document import LARGEST_SIZE
from axonn_tune.specs.workload import ELEMENT_SIZES, OVERLAPS, RECOMPUTES, Overlap, Precision, Recompute

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Group

    from axonn_tune.api.analysis import Explanation
    from axonn_tune.cost.price import Detail
    from axonn_tune.launch.commands import LaunchFiles
    from axonn_tune.launch.scripts import Emit, ScriptKind
    from axonn_tune.specs.launch import Launch


Cost: TypeAlias = Literal["alpha-beta", "paper", "paper-released", "paper-mended"]
COSTS: tuple[Cost, ...] = get_args(Cost)
_MOST_TOKENS = 1e18
Settings: TypeAlias = Mapping[str, object] | Sequence[str]
"""Changed values by their dotted keys, `{"machine.accelerator.memory_gib": 80}`, or as `KEY=VALUE` texts."""


class SearchOptions(TypedDict, total=False):
    """Options of every function that searches; each may be left out, or be None.

    seq: tokens in a sequence, of the model unless given. precision: number format, bf16 unless given.
    order: only this rank order, the fastest-varying axis first, `"x,y,z,data"` or a sequence.
    recompute, micro_batch, kept_layers, x, y, z, data, context, chunks: only candidates with this.
    framework: whose layouts are ranked, by name; the bundled runtime unless given. Its own names of axes are options,
    too: `tp=8, pp=4`, `dp_shard=16`, `tensor_model_parallel_size=8`. pipeline: True to search pipeline stages, too, or
    only this many.
    shard_optimizer: shard FP32 master weights and optimizer states over the data axis (ZeRO-1).
    split_micro_batch: two-batch overlap. overlap: overlap just these; no_overlap: all
    but these, `"all"` or True for none. set: changed values of the model, machine or workload. tokens_total: of the
    whole training, a number or a text such as `"1.5T"`; each configuration then has its GPU-hours, node-hours and days.
    """

    seq: int | None
    precision: Precision | None
    order: str | Sequence[str] | None
    recompute: Recompute | None
    micro_batch: int | None
    kept_layers: int | None
    shard_optimizer: bool | None
    split_micro_batch: bool | None
    overlap: Overlap | Sequence[Overlap] | None
    no_overlap: str | Sequence[str] | bool | None
    x: int | None
    y: int | None
    z: int | None
    data: int | None
    context: int | None
    framework: str | None
    pipeline: int | bool | None
    chunks: int | None
    set: Settings | None
    tokens_total: int | str | None


Options = SearchOptions
"""Its earlier name, kept for those who import it."""


def make_choices(
    model: ModelLike,
    *,
    gpus: int,
    machine: MachineLike = DEFAULT_MACHINE,
    batch: int | None = None,
    rank_by: RankBy | Literal["step"] | None = None,
    **options: Unpack[SearchOptions],
) -> Choices:
    """The validated options; UsageError for an invalid value, TypeError for an unknown option."""
    ours = by_our_names({**options, "batch": batch})
    options, batch = cast(SearchOptions, ours), ours.pop("batch")
    overlap, no_overlap = options.get("overlap"), options.get("no_overlap")
    name, pipeline = options.get("framework"), options.get("pipeline")
    framework = AXONN_TUNE if name is None else find_framework(name)
    if isinstance(no_overlap, bool):
        no_overlap = "all" if no_overlap else None
    return Choices(
        gpus=whole("gpus", gpus),
        model=model,
        machine=machine,
        workload=WorkloadChoices(
            batch=None if batch is None else whole("batch", batch),
            seq=_whole_or_none("seq", options.get("seq")),
            precision=_one_of("precision", options.get("precision"), tuple(ELEMENT_SIZES)),
            shard_optimizer=options.get("shard_optimizer"),
            split_micro_batch=bool(options.get("split_micro_batch")),
            overlaps=tuple(_one_of("overlap", name, OVERLAPS) for name in _several(overlap)),
            no_overlaps=tuple(_one_of("no_overlap", name, (*OVERLAPS, "all")) for name in _several(no_overlap)),
        ),
        limits=_limits(options, framework),
        rank_by="iteration" if rank_by == "step" else _one_of("rank_by", rank_by, (*RANK_BY, "step")),
        framework=framework,
        pipeline=bool(pipeline),
        settings=assignments(options.get("set")),
        tokens_total=parse_tokens(options.get("tokens_total")),
    )


_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([KMBT]?)", flags=re.IGNORECASE)


def parse_tokens(tokens: int | str | None) -> int | None:
    """Tokens of a whole training: a number, or a text such as `300B`, `1.5T` or `1.5e12`; UsageError for another."""
    if tokens is None:
        return None
    match = _TOKENS.fullmatch(str(tokens).replace(",", "").replace("_", "").strip())
    scale = 10.0 ** (3 * " KMBT".index(match[2].upper() or " ")) if match else 0.0
    count = float(match[1]) * scale if match else 0.0
    if not 1.0 <= count <= _MOST_TOKENS:
        raise UsageError(f"--tokens-total {tokens}: give a number of tokens such as 300B, 1.5T or 1.5e12")
    return round(count)


def by_our_names(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with those by a framework's names under ours.

    TypeError, as Python has it, for an option that there is not, with the nearest that there is; UsageError for a name
    of another framework.
    """
    known = {*SearchOptions.__annotations__, "batch"}
    others = {name: value for name, value in options.items() if name in known}
    given = {name: value for name, value in options.items() if name not in known}
    if not given:
        return others
    # Imported here: most searches name none, and start-up time is theirs.
    from axonn_tune.frameworks.names import is_known, our_options

    for name in given:
        if not is_known(name):
            raise TypeError(f"unexpected keyword argument {name!r}{suggest(name, known)}")
    return others | our_options(given, others)


def assignments(settings: Settings | None) -> tuple[str, ...]:
    """Changed values as the `KEY=VALUE` texts of `--set`; a text value is read as YAML, as it is there."""
    if settings is None:
        return ()
    if isinstance(settings, Mapping):
        return tuple(f"{key}={_as_yaml(value)}" for key, value in settings.items())
    if isinstance(settings, str):
        raise UsageError(f"set={settings!r}: give a mapping, {{'machine.accelerator.memory_gib': 80}}, or a list")
    return tuple(settings)


def parse_order(order: str | Sequence[str], framework: Framework = AXONN_TUNE) -> tuple[str, ...]:
    """A rank order by our names or the framework's, `y,x,z,data`, `TP,CP,DP` or a sequence; axes left out come last.

    UsageError if it is none.
    """
    names = [name.strip() for name in (order.split(",") if isinstance(order, str) else order)]
    axes = tuple(name if name in ALL_AXES else framework.axis(name) for name in names)
    if len(set(axes)) != len(axes) or not set(axes) <= set(framework.axes) or not axes:
        given, known = ",".join(names), list(map(framework.called, framework.axes))
        example, there = ",".join(known) if framework.names else "x,y,z,data", ", ".join(known)
        raise UsageError(f"rank order {given!r} must name axes once each, as in {example}: there are {there}")
    return completed(cast(tuple[str, ...], axes), framework)


def whole(name: str, value: int, *, least: int = 1) -> int:
    """A whole number that is large enough; UsageError for anything else. NumPy's integers are taken."""
    try:
        number = value.__index__()
    except AttributeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= LARGEST_SIZE:
        raise UsageError(f"{name}={value!r}: must be a whole number from {least} to {LARGEST_SIZE:,}")
    return number


def call_text(function: str, given: Mapping[str, object]) -> str:
    """The call that made a result, for provenance: `axonn_tune.search('80b', gpus=1024)`; defaults left out."""
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


def _limits(options: SearchOptions, framework: Framework) -> Limits:
    given: Mapping[str, Any] = options
    order, kept = options.get("order"), options.get("kept_layers")
    sizes = {axis: given.get(axis) for axis in ALL_AXES}
    if isinstance(sizes["pipeline"], bool):
        # Stages are searched, and not pinned.
        del sizes["pipeline"]
    return Limits(
        order=None if order is None else parse_order(order, framework),
        recompute=_one_of("recompute", options.get("recompute"), RECOMPUTES),
        micro_batch=_whole_or_none("micro_batch", options.get("micro_batch")),
        kept_layers=None if kept is None else whole("kept_layers", kept, least=0),
        axes={axis: whole(axis, size) for axis, size in sizes.items() if size is not None},
        chunks=_whole_or_none("chunks", options.get("chunks")),
    )


def _whole_or_none(name: str, value: int | None) -> int | None:
    return None if value is None else whole(name, value)


def _one_of(name: str, value: Any, known: Sequence[Any]) -> Any:  # noqa: ANN401 - a text of a Literal or None
    """The value, if it is None or one of those known."""
    if value is None or value in known:
        return value
    raise UsageError(f"{name}={value!r}{suggest(str(value), known)}: known: {', '.join(known)}")


def _several(values: str | Sequence[str] | None) -> Sequence[str]:
    """One value, several or none as a sequence."""
    if values is None:
        return ()
    return (values,) if isinstance(values, str) else values


def _as_yaml(value: object) -> str:
    """A value as YAML has it; text as it is."""
    if value is None or isinstance(value, str):
        return value or ""
    plain: Callable[[Any], Any] = lambda other: other.item()  # noqa: E731 - NumPy's scalars
    return json.dumps(value, default=plain, ensure_ascii=False)


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

MOST_LISTED = 20_000
"""Rows that are rendered at once, in 0.1 ms each."""

Format: TypeAlias = Literal["table", "json", "csv", "md"]
DEFAULT_TOP = 10
"""Rows listed unless more are asked for, as on the command line."""


def search(
    model: ModelLike,
    *,
    gpus: int,
    machine: MachineLike = DEFAULT_MACHINE,
    batch: int | None = None,
    rank_by: RankBy | Literal["step"] | None = None,
    cost: Cost | Sequence[Cost] = "alpha-beta",
    variants: bool = False,
    **options: Unpack[SearchOptions],
) -> SearchResult:
    """Rank every grid x·y·z·data of a number of GPUs, as `axonn-tune search` does.

    model, machine: a name, a path, or the document itself. batch: global batch size in sequences, the
    model's unless given. rank_by: communication (the default), exposed or step. cost: one cost model or several; the
    first ranks, and the others' ranks are extra columns. variants: every candidate, not only the best of each
    grid. Other options: see `axonn_tune.SearchOptions`.

    An empty result is not an error: it knows the rejected grids and reasons. UsageError
    for a wrong value, UnknownNameError for an unknown model or machine, DocumentError for a wrong file.

    >>> import axonn_tune
    >>> found = axonn_tune.search("80b", gpus=1024)
    >>> len(found)
    195
    >>> found.best.x, found.best.y, found.best.z, found.best.data
    (1, 1, 256, 4)
    """
    given = {"gpus": gpus, "machine": machine, "batch": batch, "rank_by": rank_by, "cost": cost, **options}
    choices = make_choices(model, gpus=gpus, machine=machine, batch=batch, rank_by=rank_by, **options)
    call = call_text("search", {"model": model, **given, "variants": variants or None})
    costs = tuple(_one_of("cost", name, COSTS) for name in _several(cost))
    if not costs:
        raise UsageError("cost=(): name a cost model to rank by")
    inputs = load_inputs(choices)
    return SearchResult(inputs, run_search(inputs.problem, costs=costs, variants=variants), call)


@dataclass(frozen=True, repr=False, eq=False)
class SearchResult(ReportedResult, Sequence[PricedLayout]):
    """A ranking: a sequence of configurations, best first, displayed as a table in consoles and notebooks.

    inputs: the model, the machine and the problem that was searched. ranked: the ranking as the search made it. call:
    what asked for it, which launch configs name.
    """

    inputs: Inputs
    ranked: Priced
    call: str

    @property
    def searched(self) -> SearchCounts:
        """Numbers of grids and candidates, and of grids rejected by each constraint."""
        return self.ranked.searched

    @property
    def best(self) -> PricedLayout:
        """The first of the ranking; NothingFeasibleError, with the nearest change, if there is none."""
        self.ranked.require_any()
        return self[0]

    @property
    def memory_limit_bytes(self) -> float:
        """Memory limit of one GPU."""
        return memory_limit_bytes(self.inputs.problem.machine.accelerator)

    @property
    def frame(self) -> pd.DataFrame:
        """One row for each configuration, best first; columns as in `--format csv`, with their units."""
        return self._frame(self.ranked.listed(top=0))

    @property
    def rejected(self) -> pd.DataFrame:
        """One row for each rejected grid: its axes and reasons."""
        return self._frame(self.ranked.rejected())[["x", "y", "z", "data", "rejected_because"]]

    @property
    def why(self) -> str:
        """Where the first configuration is faster than the second."""
        return why_first(self.ranked)

    @property
    def remarks(self) -> list[str]:
        """Remarks: why #1 beats #2, ties, rejections."""
        problem = self.inputs.problem
        hint = faster_batch(problem) if len(self) and self.ranked.cost == COSTS[0] else ""
        return [*([hint] if hint else []), *ranking_remarks(self.ranked)]

    def explain(self, rank: int = 1) -> Explanation:
        """One configuration, term by term; UsageError if fewer are ranked, NothingFeasibleError if none is."""
        from axonn_tune.api.analysis import Explanation

        return Explanation.of(self.inputs, self.ranked, rank=rank)

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
    ) -> tuple[Path, ...]:
        """Write the launch files of a configuration; returns their paths.

        For the bundled runtime a launch config and, with `emit`, a script that starts it. For another framework the
        script with its arguments (`path` with the suffix .sh, or .sbatch where `emit` has "slurm"), and the config
        files that it reads; "bridge" and "toml" are other forms of it. force: False refuses, by a UsageError, to
        replace a file that axonn-tune has not written. Errors as `explain`, those of
        `axonn_tune.launch.config.write_launch`, and UsageError for what the framework cannot express.
        """
        from axonn_tune.launch.scripts import SUFFIXES, emit_kind, emit_script, script_text

        kind, form = emit_kind(_several(emit))
        if self.inputs.problem.framework.software:
            return self._command_files(path, pick=pick, tokens=tokens, kind=kind, form=form).write(force=force)
        if form:
            raise UsageError(f"--emit {form} is for other frameworks: give --framework")
        from axonn_tune.launch.config import write_launch

        launch, machine = self.launch_config(pick=pick, tokens=tokens), self.inputs.machine.document
        if not force:
            require_own(path, kind="launch")
        if not _several(emit):
            write_launch(path, launch)
            return (Path(path),)
        # What refuses a script refuses it here, before anything is written.
        script_text(kind, launch=launch, machine=machine, launch_path=path)
        if not force:
            require_own(Path(path).with_suffix(SUFFIXES[kind]))
        write_launch(path, launch)
        return Path(path), Path(emit_script(kind, launch=launch, machine=machine, launch_path=path))

    def _detail(self, pick: int) -> Detail:
        """The prediction of a configuration; errors as `explain`."""
        self.ranked.require_any()
        self.ranked.require_row(pick)
        return self.ranked.detail(pick - 1)

    def _command_files(
        self, path: str | Path, *, pick: int, tokens: str | Path | None, kind: ScriptKind, form: str
    ) -> LaunchFiles:
        from axonn_tune.launch.commands import emission

        problem = self.inputs.problem
        if tokens is not None:
            raise UsageError(f"--tokens is for the bundled runtime, not for {problem.framework.name}")
        return emission(self._detail(pick), path, call=self.call, kind=kind, form=form)

    def to_dict(self, *, top: int = DEFAULT_TOP, rejected: bool = False) -> Json:
        """The first `top` configurations (0: all), with every term, as the contract `axonn-tune/ranking/1`."""
        entries = self.ranked.listed(top=top, terms=True, rejected=rejected)
        return ranking_document(self.inputs, self.ranked, entries)

    def to_json(self, *, top: int = DEFAULT_TOP, rejected: bool = False) -> str:
        """The same as text: what `axonn-tune --format json` prints."""
        return json_text(self.to_dict(top=top, rejected=rejected))

    def render(
        self,
        output_format: Format = "table",
        *,
        top: int = DEFAULT_TOP,
        rejected: bool = False,
        wide: bool = False,
        columns: Sequence[str] | None = None,
        color: bool = False,
        terminal: int = 0,
    ) -> str:
        """The first `top` configurations (0: all) as the command line prints them; UsageError for an unknown column.

        color: with bars where a line of `terminal` characters has room for them.
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
        entries = self.ranked.listed(top=top, rejected=rejected)
        if output_format != "csv" and "rank" in (columns or ["rank"]):
            entries = with_shortest(self.ranked, entries)
        bars = terminal if color and output_format == "table" else 0
        table = ranking_table(self.ranked, entries, names=columns or (), wide=wide, terminal=bars)
        return table.render(output_format, color=color) if entries or output_format == "csv" else ""

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
        return "\n".join([self.render() or self.ranked.nothing_feasible(), *self.remarks])

    def __repr__(self) -> str:
        problem = self.inputs.problem
        found = f"{len(self)} configurations" if len(self) else "nothing feasible"
        return f"<SearchResult: {problem.model.name} on {problem.gpus:,} × {problem.machine.name}, {found}>"

    def section(self, *, source: str) -> Json:
        """This ranking as a section of a report; `source` names where it comes from."""
        from axonn_tune.report.ranking_section import ranking_of, ranking_section

        return ranking_section(ranking_of(self.inputs, self.ranked), identity="s1", source=source)

    def _table(self) -> Table:
        table = ranking_table(self.ranked, with_shortest(self.ranked, self.ranked.listed(top=DEFAULT_TOP)))
        return replace(table, notes=[*([] if len(self) else [self.ranked.nothing_feasible()]), *self.remarks])

    def _frame(self, entries: Sequence[Row]) -> pd.DataFrame:
        return ranking_table(self.ranked, entries).frame()
