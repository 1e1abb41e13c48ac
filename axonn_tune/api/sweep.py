"""`axonn_tune.sweep`: how far a model scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack, overload

from axonn_tune.api.options import DEFAULT_MACHINE, Options, call_text, make_choices, whole
from axonn_tune.api.shown import Result
from axonn_tune.errors import NothingFeasibleError, UsageError
from axonn_tune.ranking.sweep import Point, parse_numbers
from axonn_tune.ranking.sweep import sweep as sweep_all

if TYPE_CHECKING:
    import pandas as pd

    from axonn_tune.api.search import Format
    from axonn_tune.api.shown import Shown
    from axonn_tune.ranking.choosing import RankBy
    from axonn_tune.report.output import Json
    from axonn_tune.specs.catalog import MachineLike, ModelLike


def sweep(
    model: ModelLike | Sequence[ModelLike],
    *,
    gpus: int | str | Sequence[int],
    machine: MachineLike = DEFAULT_MACHINE,
    batch: int | str | Sequence[int] | None = None,
    rank_by: RankBy = "communication",
    weak: bool = False,
    **options: Unpack[Options],
) -> SweepResult:
    """Find the best configuration at every GPU count, batch and model, as `axonn-tune sweep` does.

    model: one or several; in a text, names stand between commas. gpus, batch: a number, several, or a text
    such as `64..4096x2`. weak: the batch is for the first count, and grows with the others. Other parameters
    and errors as of `axonn_tune.search`; a point where nothing is feasible is no error.

    >>> import axonn_tune
    >>> found = axonn_tune.sweep("20b", gpus="64..256x2", rank_by="iteration")
    >>> [point.inputs.problem.gpus for point in found]
    [64, 128, 256]
    """
    counts, batches = _numbers("gpus", gpus), (None,) if batch is None else _numbers("batch", batch)
    models = _models(model)
    choices = make_choices(models[0], gpus=counts[0], machine=machine, rank_by=rank_by, options=options)
    given = {"model": model, "gpus": gpus, "machine": machine, "batch": batch, "rank_by": rank_by, **options}
    points = sweep_all(choices, models=models, gpus=counts, batches=batches, weak=weak)
    return SweepResult(points, weak=weak, call=call_text("sweep", {**given, "weak": weak or None}))


def _numbers(name: str, values: int | str | Sequence[int]) -> tuple[int, ...]:
    if isinstance(values, str):
        return parse_numbers(values, option=f"--{name}")
    several = list(values) if isinstance(values, Iterable) else [values]
    if not several:
        raise UsageError(f"{name}=(): name at least one")
    return tuple(dict.fromkeys(whole(name, value) for value in several))


def _models(model: ModelLike | Sequence[ModelLike]) -> list[ModelLike]:
    if isinstance(model, str):
        return [name.strip() for name in model.split(",")]
    if not isinstance(model, Sequence):
        return [model]
    if not model:
        raise UsageError("model=(): name at least one")
    return list(model)


@dataclass(frozen=True, repr=False, eq=False)
class SweepResult(Result, Sequence[Point]):
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

    @property
    def frame(self) -> pd.DataFrame:
        """One row for each point; columns as in `--format csv`, with their units."""
        import pandas as pd

        from axonn_tune.report.ranking import sweep_records

        names, rows = sweep_records(self.points)
        return pd.DataFrame(rows, columns=names)

    def to_dict(self) -> Json:
        """Everything, by the schema `axonn-tune/sweep/1`."""
        from axonn_tune.report.ranking import sweep_document

        return sweep_document(self.points, weak=self.weak)

    def to_json(self) -> str:
        """The same as text: what `axonn-tune sweep --format json` prints."""
        return self.render("json")

    def render(
        self,
        output_format: Format = "table",
        *,
        wide: bool = False,
        columns: Sequence[str] | None = None,
        color: bool = False,
    ) -> str:
        """The sweep as the command line prints it; `wide`: every column; UsageError for one that does not exist."""
        from axonn_tune.report import ranking as tables
        from axonn_tune.report.output import json_text

        if output_format == "json":
            return json_text(self.to_dict())
        if output_format == "csv":
            return tables.sweep_csv(self.points)
        names = columns or (tables.ALL_SWEEP_COLUMNS if wide else ())
        if output_format == "md":
            return tables.sweep_markdown(self.points, names=names)
        return tables.sweep_table(self.points, names=names, color=color)

    def __len__(self) -> int:
        return len(self.points)

    @overload
    def __getitem__(self, position: int) -> Point: ...

    @overload
    def __getitem__(self, position: slice) -> tuple[Point, ...]: ...

    def __getitem__(self, position: int | slice) -> Point | tuple[Point, ...]:
        """A point, or several, in the order of the sweep."""
        return self.points[position]

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        return f"<SweepResult: {len(self.points)} points, {'weak' if self.weak else 'strong'} scaling>"

    def section(self, *, source: str) -> Json:
        """This sweep as a section of a report; `source` names where it comes from."""
        from axonn_tune.report.html.scaling_sections import sweep_section

        return sweep_section(self.to_dict(), identity="s1", source=source)

    def _shown(self) -> Shown:
        from axonn_tune.report.ranking import sweep_cells

        return sweep_cells(self.points)
