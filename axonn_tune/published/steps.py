"""Predicted time of each row's step, with its interval; or why there is none.

Half-widths of intervals are in `intervals.csv`: of software that was in the fit, from fits without the row's family;
of other software and of accelerators without a measured step, from fits without the row's source.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, TypeAlias

from axonn_tune.cost.prediction import Configuration, Pricing, price_configuration
from axonn_tune.frameworks import UNKNOWN
from axonn_tune.frameworks.description import Software
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.published.cases import Case, Refusal, case_of, interleavings
from axonn_tune.published.rows import SHIPPED, StepRow, read_records
from axonn_tune.units import GIB

MEMORY_TOLERANCE = 0.1
"""A layout counts as not fitting where it is predicted to need this share more than there is."""

LeftOut: TypeAlias = Literal["family", "source"]
"""What a fit has not seen of a row: its model on its number of GPUs, or the whole publication."""

LEFT_OUT: tuple[LeftOut, ...] = ("family", "source")


@dataclass(frozen=True)
class PredictedStep:
    """What is predicted of a row; without a step time, `why_not` says why.

    plain_s: of a row that does not say whether its stages are interleaved, the step without; its step time is the
    shortest of all that are possible.
    """

    row: StepRow
    case: Case | None = None
    configuration: Configuration | None = None
    predicted_s: float | None = None
    memory_bytes: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    why_not: str = ""
    plain_s: float | None = None

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None where either is missing."""
        return None if self.predicted_s is None or not self.row.step_s else self.predicted_s / self.row.step_s - 1.0

    @property
    def plain_error(self) -> float | None:
        """Error without interleaving, of a row that does not state it; None of others."""
        return None if self.plain_s is None or not self.row.step_s else self.plain_s / self.row.step_s - 1.0

    @property
    def layout(self) -> str:
        """What is split how, as priced: `tp=8 pp=2 dp=64, interleaved 3, ...`; "" without a price."""
        if self.case is None or self.configuration is None:
            return ""
        grid, options = self.configuration.grid, self.case.framework.step
        words = [f"tp={grid.x} pp={grid.pipeline} dp={grid.data * grid.z}"]
        words += [f"cp={grid.context}"] if grid.context > 1 else []
        words += [f"interleaved {self.configuration.chunks}"] if self.configuration.chunks > 1 else []
        words += ["sequence parallel"] if options.sequence_parallel else []
        words += ["sharded weights"] if grid.z > 1 else []
        words += ["distributed optimizer"] if options.distributed_optimizer and grid.z == 1 else []
        return ", ".join(words)


def predict_steps(rows: Iterable[StepRow]) -> tuple[PredictedStep, ...]:
    """Predictions in the order of the rows."""
    return tuple(_predict(row) for row in rows)


def price_case(case: Case, configuration: Configuration, software: Software | None = None) -> Pricing:
    """One configuration of a row, by the function that prices everything."""
    return price_configuration(
        case.model, case.machine, case.workload, configuration, framework=case.framework, software=software
    )


def best_pricing(case: Case, configurations: Iterable[Configuration], software: Software | None = None) -> Pricing:
    """The fastest of some configurations that fits into memory, or the leanest if none does."""
    prices = [price_case(case, one, software) for one in configurations]
    fitting = [price for price in prices if price.memory.total_bytes <= limit_bytes(case)]
    if fitting:
        return min(fitting, key=lambda price: price.iteration_s)
    return min(prices, key=lambda price: float(price.memory.total_bytes))


def limit_bytes(case: Case) -> float:
    """Memory above which a case's configuration counts as not fitting, bytes."""
    return memory_limit_bytes(case.machine.accelerator) * (1.0 + MEMORY_TOLERANCE)


def _predict(row: StepRow) -> PredictedStep:
    case = case_of(row)
    if isinstance(case, Refusal):
        return PredictedStep(row, why_not=case.why)
    known = row.interleave_known
    price = best_pricing(case, case.configurations if known else interleavings(case))
    needed = float(price.memory.total_bytes)
    if needed > limit_bytes(case):
        there = memory_limit_bytes(case.machine.accelerator) / GIB
        return PredictedStep(row, case, why_not=f"does not fit: needs {needed / GIB:.1f} GiB of {there:.1f} GiB")
    factor, step_s = math.exp(width(case)), price.iteration_s
    plain_s = None if known else best_pricing(case, case.configurations).iteration_s
    return PredictedStep(
        row, case, price.configuration, step_s, needed, step_s / factor, step_s * factor, plain_s=plain_s
    )


def width(case: Case) -> float:
    """Half-width of the 80% interval of log(step)."""
    known = widths()
    own = known.get(case.framework.software, known[UNKNOWN]) if case.known else known[UNKNOWN]
    return own if case.known_chip else max(own, known[UNKNOWN])


@cache
def widths() -> dict[str, float]:
    """Half-widths by software."""
    records = read_records(SHIPPED / "intervals.csv", needed=("software", "width"))
    return {record["software"]: float(record["width"]) for _, record in records}


def without(predictions: Iterable[PredictedStep], left_out: LeftOut) -> tuple[PredictedStep, ...]:
    """Predictions by fits that have not seen their family or source, from `left_out.csv`: what other rows can expect.

    Intervals keep their width. Rows without such a time are left out.
    """
    times = _left_out_s(left_out)
    return tuple(
        _moved(one, times[one.row.id]) for one in predictions if one.row.id in times and one.predicted_s is not None
    )


def _moved(one: PredictedStep, step_s: float) -> PredictedStep:
    assert one.predicted_s is not None, one.row.id
    share = step_s / one.predicted_s
    low_s, high_s = (None if bound is None else share * bound for bound in (one.low_s, one.high_s))
    return replace(one, predicted_s=step_s, low_s=low_s, high_s=high_s)


@cache
def _left_out_s(left_out: LeftOut) -> dict[str, float]:
    column = f"without_{left_out}_s"
    records = read_records(SHIPPED / "left_out.csv", needed=("id", column))
    return {record["id"]: float(record[column]) for _, record in records}
