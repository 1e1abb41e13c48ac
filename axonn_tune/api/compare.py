"""`axonn_tune.compare`: is 4D worth it on this model and machine?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Unpack

from axonn_tune.api.options import DEFAULT_MACHINE, Options, call_text, make_choices
from axonn_tune.api.shown import Result
from axonn_tune.baselines.comparison import Comparison, Contender
from axonn_tune.baselines.comparison import compare as compare_all
from axonn_tune.ranking.inputs import Inputs, load_inputs

if TYPE_CHECKING:
    import pandas as pd

    from axonn_tune.api.search import Format
    from axonn_tune.api.shown import Shown
    from axonn_tune.report.output import Json
    from axonn_tune.specs.catalog import MachineLike, ModelLike


def compare(
    model: ModelLike,
    *,
    gpus: int,
    machine: MachineLike = DEFAULT_MACHINE,
    batch: int | None = None,
    **options: Unpack[Options],
) -> CompareResult:
    """Set the best 4D grid against Megatron-LM, FSDP (ZeRO-3), HSDP and data parallelism, as `axonn-tune compare` does.

    Parameters and errors as of `axonn_tune.search`.

    >>> import axonn_tune
    >>> [contender.key for contender in axonn_tune.compare("20b", gpus=64)]
    ['4d', 'megatron-lm', 'fsdp', 'hsdp', 'data-parallel']
    """
    inputs = load_inputs(make_choices(model, gpus=gpus, machine=machine, batch=batch, options=options))
    given = {"model": model, "gpus": gpus, "machine": machine, "batch": batch, **options}
    return CompareResult(compare_all(inputs.problem), inputs, call_text("compare", given))


@dataclass(frozen=True, repr=False, eq=False)
class CompareResult(Result):
    """4D and its alternatives, each at its fastest layout; iterates over them. call: what asked for it."""

    comparison: Comparison
    inputs: Inputs
    call: str

    @property
    def frame(self) -> pd.DataFrame:
        """One row for each way to train; columns as in `--format csv`, with their units."""
        import pandas as pd

        from axonn_tune.report.compare import comparison_records

        names, rows = comparison_records(self.comparison)
        return pd.DataFrame(rows, columns=list(names))

    @property
    def remarks(self) -> list[str]:
        """What limits each, what overlap gains, and what the paper reports of this case, in sentences."""
        from axonn_tune.report.compare import comparison_remarks

        return comparison_remarks(self.comparison)

    def to_dict(self) -> Json:
        """Everything, by the schema `axonn-tune/comparison/1`."""
        from axonn_tune.report.compare import comparison_json

        return comparison_json(self.comparison, self.inputs)

    def to_json(self) -> str:
        """The same as text: what `axonn-tune compare --format json` prints."""
        return self.render("json")

    def render(self, output_format: Format = "table", *, wide: bool = False, color: bool = False) -> str:
        """The comparison as the command line prints it."""
        from axonn_tune.report.compare import render

        return render(self.comparison, self.inputs, output_format=output_format, wide=wide, color=color)

    def __iter__(self) -> Iterator[Contender]:
        return iter(self.comparison.contenders)

    def __getitem__(self, key: str) -> Contender:
        """One way to train by its key: 4d, megatron-lm, fsdp, hsdp or data-parallel; KeyError for another."""
        return {contender.key: contender for contender in self.comparison.contenders}[key]  # type: ignore[index]

    def __str__(self) -> str:
        return self.render()

    def __repr__(self) -> str:
        problem = self.inputs.problem
        return f"<CompareResult: {problem.model.name} on {problem.gpus:,} × {problem.machine.name}>"

    def section(self, *, source: str) -> Json:
        """This comparison as a section of a report; `source` names where it comes from."""
        from axonn_tune.report.html.scaling_sections import comparison_section

        return comparison_section(self.to_dict(), identity="s1", source=source)

    def _shown(self) -> Shown:
        from axonn_tune.report.compare import comparison_cells

        return *comparison_cells(self.comparison), self.remarks
