"""`axonn_tune.explain`, `compare` and `sweep`, and the models and machines that can be named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

from axonn_tune.api.explanation import Explanation
from axonn_tune.api.search import Format, ReportedResult, Result, by_keywords, call_text, request_of, show_options
from axonn_tune.errors import AxonnTuneError, NothingFeasibleError, UnknownNameError, UsageError
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.compare import EARLIER, Comparison, Contender
from axonn_tune.ranking.compare import compare as compare_all
from axonn_tune.ranking.inputs import Inputs, launch_inputs, load_inputs
from axonn_tune.ranking.smallest import from_smallest, smallest
from axonn_tune.ranking.sweep import Point, parse_numbers
from axonn_tune.ranking.sweep import sweep as sweep_all
from axonn_tune.report.comparison import (
    comparison_json,
    comparison_remarks,
    comparison_section,
    comparison_tables,
    short_remarks,
)
from axonn_tune.report.inventory import documents_json, documents_table
from axonn_tune.report.output import Json, Table
from axonn_tune.report.scaling import sweep_document, sweep_section, sweep_table
from axonn_tune.request import MIN, Request, options_of, parse_tokens, whole
from axonn_tune.specs.catalog import Kind, Loaded, MachineLike, ModelLike, available, load_machine, load_model
from axonn_tune.specs.document import Document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model


@by_keywords(Request)
def explain(request: Request, call: str) -> Explanation:
    """Explain one configuration of a ranking, as `axonn-tune explain` does: pin axes and the rest to choose it.

    NothingFeasibleError if the options leave none, UsageError if fewer than `pick`; others as of `axonn_tune.search`.

    >>> import axonn_tune
    >>> shown = axonn_tune.explain("80b", gpus=1024, z=64, data=16)
    >>> print(shown.words[0])
    One step of 80b trains 8,192 sequences of 2,048 tokens on 1,024 GPUs.
    """
    if request.gpus == MIN:
        found = smallest(request)
        size = found.size(found.gpus, top=request.pick)
        assert size is not None, "it fits"
        return Explanation.of(size.inputs, size.ranked, rank=request.pick)
    inputs = load_inputs(request)
    return Explanation.of(inputs, run_search(inputs.problem, top=request.pick), rank=request.pick)


def explain_launch(
    path: str | Path, *, machine: MachineLike | None = None, tokens_total: int | str | None = None
) -> Explanation:
    """Explain the configuration of a launch config, on its machine or on another.

    tokens_total: as of `axonn_tune.search`, errors too.
    """
    inputs, changed = launch_inputs(path, machine=machine)
    total = None if tokens_total is None else parse_tokens(tokens_total)
    inputs = replace(inputs, problem=replace(inputs.problem, tokens_total=total))
    # What it pins is its own, not asked for.
    return replace(
        Explanation.of(inputs, run_search(inputs.problem, top=1), rank=1, machine_changed=changed), remark=""
    )


@by_keywords(Request)
def compare(request: Request, call: str) -> CompareResult:
    """Compare the best 4D grid with other frameworks, the shortest step first, as `axonn-tune compare` does.

    Keys are the names of `framework`; FSDP has three rows: fsdp, hsdp and data-parallel. Errors as of
    `axonn_tune.search`.

    >>> import axonn_tune
    >>> found = axonn_tune.compare("20b", gpus=64)
    >>> found["megatron-core"].name, {"axonn-tune", "torchtitan"} <= {contender.key for contender in found}
    ('Megatron-Core', True)
    """
    inputs = load_inputs(request)
    return CompareResult(compare_all(inputs.problem), inputs, call)


@dataclass(frozen=True, repr=False, eq=False)
class CompareResult(ReportedResult):
    """4D and its alternatives, each at its fastest layout; iterates over them.

    call: the call, for provenance. said: sentences on the file that the run was read from.
    """

    comparison: Comparison
    inputs: Inputs
    call: str
    said: tuple[str, ...] = ()

    @property
    def baseline(self) -> Contender | None:
        """What the others are compared with: the framework that was named, or the first; None if all stand apart."""
        return self.comparison.baseline

    @property
    def remarks(self) -> list[str]:
        """Which is fastest, why some are infeasible, what overlap gains, and the paper's claims, in sentences."""
        return comparison_remarks(self.comparison)

    def to_dict(self) -> Json:
        """Everything, by the schema `axonn-tune/comparison/1`."""
        return comparison_json(self.comparison, self.inputs)

    def render(
        self,
        output_format: Format = "table",
        *,
        wide: bool = False,
        remarks: bool = True,
        verbose: bool = False,
        color: bool = False,
    ) -> str:
        """The comparison as the command line prints it; verbose: with what steps consist of, and all remarks.

        Markdown always has every column.
        """
        if output_format == "json":
            return self.to_json()
        tables = comparison_tables(self.comparison, wide=wide or output_format == "md")
        shown = [replace(table, notes=()) for table in (tables if verbose else tables[:1])]
        said = comparison_remarks(self.comparison) if verbose else short_remarks(self.comparison)
        shown[-1] = replace(shown[-1], notes=said if remarks else [])
        return "\n".join(table.render(output_format, color=color) for table in shown)

    def __iter__(self) -> Iterator[Contender]:
        return iter(self.comparison.contenders)

    def __getitem__(self, key: str) -> Contender:
        """One strategy by its key, a name of a framework, hsdp, data-parallel or yours; KeyError for another."""
        found = {contender.key: contender for contender in self.comparison.contenders}
        return found[key if key in found else EARLIER.get(key, key)]

    def __repr__(self) -> str:
        problem = self.inputs.problem
        return f"<CompareResult: {problem.model.name} on {problem.gpus:,} × {problem.machine.name}>"

    def section(self, *, source: str) -> Json:
        """This comparison as a section of a report; `source` names where it comes from."""
        return comparison_section(self.to_dict(), identity="s1", source=source)

    def __str__(self) -> str:
        return self.render()

    def _table(self) -> Table:
        return replace(comparison_tables(self.comparison)[0], notes=short_remarks(self.comparison))


@show_options
def sweep(
    model: ModelLike | Sequence[ModelLike],
    gpus: int | str | Sequence[int],
    *,
    batch: int | str | Sequence[int] | None = None,
    **options: object,
) -> SweepResult:
    """Find the best configuration at every GPU count, batch and model, as `axonn-tune sweep` does.

    model: one or several; in a text, names stand between commas. gpus, batch: a number, several, or a text
    such as `64..4096x2`; `min..` is each number of GPUs from the smallest to twice that, `min..512x2` a range from it.
    Errors as of `axonn_tune.search`; a point where nothing is feasible is no error.

    >>> import axonn_tune
    >>> found = axonn_tune.sweep("20b", gpus="64..256x2", rank_by="iteration")
    >>> [point.inputs.problem.gpus for point in found]
    [64, 128, 256]
    """
    names = [name.strip() for name in model.split(",")] if isinstance(model, str) else model
    models = list(names) if isinstance(names, Sequence) else [names]
    if not models:
        raise UsageError("model=(): name at least one")
    batches = () if batch is None else _numbers("batch", batch)
    from_least = isinstance(gpus, str) and gpus.startswith(MIN)
    counts = () if from_least else _numbers("gpus", gpus)
    given = {"model": models[0], "gpus": counts[0] if counts else MIN, **options}
    request = request_of("sweep", given, known=options_of("sweep"))
    if from_least:
        points = from_smallest(request, str(gpus), models=models, batches=batches or (request.batch,))
    else:
        points = sweep_all(request, models=models, gpus=counts, batches=batches or (request.batch,))
    call = call_text("sweep", {"model": model, "gpus": gpus, "batch": batch, **options})
    return SweepResult(points, weak=request.weak, call=call)


def _numbers(name: str, values: int | str | Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, str):
        return parse_numbers(values, option=f"--{name}")
    several = list(values) if isinstance(values, Iterable) else [values]
    if not several:
        raise UsageError(f"{name}=(): name at least one")
    return tuple(dict.fromkeys(whole(name, value) for value in several))


@dataclass(frozen=True, repr=False, eq=False)
class SweepResult(ReportedResult, Sequence[Point]):
    """The best configuration of each point, in the order asked for: models, batches, then GPU counts.

    weak: whether the batch grows with the GPUs; call: what asked for it.
    """

    points: tuple[Point, ...]
    weak: bool
    call: str

    def require_any(self) -> None:
        """NothingFeasibleError unless something is feasible at some point."""
        if not any(point.entry for point in self.points):
            raise NothingFeasibleError("nothing is feasible at any point of the sweep; each has its reason above")

    def to_dict(self) -> Json:
        """Everything, by the schema `axonn-tune/sweep/1`."""
        return sweep_document(self.points, weak=self.weak)

    def render(
        self,
        output_format: Format = "table",
        *,
        wide: bool = False,
        columns: Sequence[str] | None = None,
        verbose: bool = False,
        color: bool = False,
    ) -> str:
        """The sweep as the command line prints it; `wide`: every column; UsageError for one that does not exist."""
        # A mark stands beside the model's name.
        shortest = output_format != "csv" and "model" in (columns or ["model"])
        return self._rendered(
            output_format,
            lambda: sweep_table(self.points, names=columns or (), wide=wide, shortest=shortest, verbose=verbose),
            color=color,
        )

    def __len__(self) -> int:
        return len(self.points)

    @overload
    def __getitem__(self, position: int) -> Point: ...

    @overload
    def __getitem__(self, position: slice) -> tuple[Point, ...]: ...

    def __getitem__(self, position: int | slice) -> Point | tuple[Point, ...]:
        """A point, or several, in the order of the sweep."""
        return self.points[position]

    def __repr__(self) -> str:
        return f"<SweepResult: {len(self.points)} points, {'weak' if self.weak else 'strong'} scaling>"

    def section(self, *, source: str) -> Json:
        """This sweep as a section of a report; `source` names where it comes from."""
        return sweep_section(self.to_dict(), identity="s1", source=source)

    def _table(self) -> Table:
        return sweep_table(self.points)


D = TypeVar("D", bound=Document)


def models() -> Catalog[Model]:
    """The models that can be named, as `axonn-tune models list` lists them.

    >>> import axonn_tune
    >>> axonn_tune.models()["80b"].document.hidden
    12288
    """
    return Catalog("model", load_model)


def machines() -> Catalog[Machine]:
    """The machines that can be named, as `axonn-tune machines list` lists them.

    >>> import axonn_tune
    >>> axonn_tune.machines()["perlmutter"].document.accelerator.memory_gib
    39.4
    """
    return Catalog("machine", load_machine)


class Catalog(Result, Mapping[str, Loaded[D]], Generic[D]):
    """Documents by name, in natural order (5b before 10b); each is loaded when it is asked for."""

    def __init__(self, kind: Kind, load: Callable[[str], Loaded[D]]) -> None:
        self.kind = kind
        self._load = load
        self._paths = available(kind)
        self._loaded: dict[str, Loaded[D]] = {}

    def __getitem__(self, name: str) -> Loaded[D]:
        """The document of a name in any case; KeyError if there is none, DocumentError if its file is wrong."""
        key = name.lower()
        if key not in self._paths:
            raise KeyError(str(UnknownNameError(self.kind, name, self._paths)))
        if key not in self._loaded:
            self._loaded[key] = self._load(str(self._paths[key]))
        return self._loaded[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def broken(self) -> dict[str, AxonnTuneError]:
        """What is wrong with files that cannot be used, by name; they are left out of what is shown."""
        found: dict[str, AxonnTuneError] = {}
        for name in self:
            try:
                self[name]
            except AxonnTuneError as error:
                found[name] = error
        return found

    def to_dict(self) -> dict[str, Any]:
        """All documents with name, file and hash: what `--format json` prints."""
        return documents_json(self.kind, self._sound())

    def render(self) -> str:
        """The table that the command line prints."""
        return self._table().render("table")

    def __repr__(self) -> str:
        return f"<Catalog of {len(self)} {self.kind}s: {', '.join(self)}>"

    def _table(self) -> Table:
        return documents_table(self.kind, self._sound())

    def _sound(self) -> list[tuple[str, Loaded[D]]]:
        broken = self.broken
        return [(name, self[name]) for name in self if name not in broken]
