"""Predicted time of each row's step, with its interval; or why there is none."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from axonn_tune.accuracy.cases import Case, Refusal, case_of
from axonn_tune.accuracy.intervals import bounds_s
from axonn_tune.accuracy.rows import StepRow
from axonn_tune.baselines.layout import Layout
from axonn_tune.baselines.megatron import MegatronPricer
from axonn_tune.baselines.parts import Parts
from axonn_tune.cost.prediction import Configuration, Pricing, price_configuration
from axonn_tune.grid import Grid
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.units import GIB

MEMORY_TOLERANCE = 0.1
"""A layout counts as not fitting where it is predicted to need this share more than there is."""


@dataclass(frozen=True)
class Price:
    """One layout of a row, priced."""

    layout: Layout
    step_s: float
    memory_bytes: float


@dataclass(frozen=True)
class Predicted:
    """What is predicted of a row; without a price, `why_not` says why."""

    row: StepRow
    price: Price | None = None
    low_s: float | None = None
    high_s: float | None = None
    why_not: str = ""

    @property
    def predicted_s(self) -> float | None:
        """Step time, s."""
        return None if self.price is None else self.price.step_s

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None where either is missing."""
        if self.price is None or not self.row.step_s:
            return None
        return self.price.step_s / self.row.step_s - 1.0


def predict_steps(rows: Iterable[StepRow]) -> tuple[Predicted, ...]:
    """Predictions in the order of the rows."""
    pricers = Pricers()
    return tuple(_predict(row, pricers) for row in rows)


class Pricers:
    """Prices cases; pricers are shared by rows of one model, machine, batch and software."""

    def __init__(self) -> None:
        self._known: dict[object, MegatronPricer] = {}
        self._parts: dict[object, dict[object, Parts]] = {}

    def best(self, case: Case) -> Price:
        """The fastest of a case's layouts that fits into memory, or the leanest if none does."""
        prices = [self.price(case, layout) for layout in case.layouts]
        limit = limit_bytes(case)
        fitting = [price for price in prices if price.memory_bytes <= limit]
        if fitting:
            return min(fitting, key=lambda price: price.step_s)
        return min(prices, key=lambda price: price.memory_bytes)

    def price(self, case: Case, layout: Layout) -> Price:
        """One layout: as a 4D grid if nothing but weights is split, over data-parallel ranks; else as Megatron-LM's."""
        if case.framework.sharded and layout.tensor == layout.pipeline == layout.context == 1:
            return _as_grid(case, layout)
        pricer = self._pricer(case)
        price = pricer.price(layout)
        return Price(layout, price.iteration_s, price.memory_bytes)

    def _pricer(self, case: Case) -> MegatronPricer:
        key = (case.row.gpus, case.model, case.workload, case.software, id(case.machine))
        if key not in self._known:
            self._known[key] = MegatronPricer(
                case.model,
                case.machine,
                case.workload,
                gpus=case.row.gpus,
                software=case.software,
                known=self._parts.setdefault(_of_parts(case), {}),
            )
        return self._known[key]


def _of_parts(case: Case) -> object:
    """What the durations of a micro-batch's parts depend on: not on layers and batch."""
    one_layer = case.model.model_copy(update={"layers": 1, "name": ""})
    one = case.workload.model_copy(update={"global_batch": 1})
    return case.row.gpus, str(one_layer), str(one), case.software, id(case.machine)


def limit_bytes(case: Case) -> float:
    """Memory above which a case's layout counts as not fitting, bytes."""
    return memory_limit_bytes(case.machine.accelerator) * (1.0 + MEMORY_TOLERANCE)


def _as_grid(case: Case, layout: Layout) -> Price:
    """FSDP is the grid (1, 1, G, 1)."""
    configuration = Configuration(Grid(z=layout.data), layout.micro_batch, layout.recompute, 0)
    waits: dict[str, object] = {} if case.software.data_overlap else {"overlaps": ()}
    workload = case.workload.model_copy(update=waits)
    pricing = price_configuration(case.model, case.machine, workload, configuration, kernels=case.software.kernels)
    host_s = pricing.rates.dispatch_s * _issued(pricing)
    step_s = max(pricing.iteration_s, host_s)
    return Price(layout, step_s, float(pricing.memory.total_bytes))


def _issued(pricing: Pricing) -> float:
    """Operations the host issues in a step."""
    counts = (count.evaluate(pricing.values) for step, count in pricing.program.calls())
    return float(sum(counts))


def _predict(row: StepRow, pricers: Pricers) -> Predicted:
    case = case_of(row)
    if isinstance(case, Refusal):
        return Predicted(row, why_not=case.why)
    price = pricers.best(case)
    if price.memory_bytes > limit_bytes(case):
        needed, there = price.memory_bytes / GIB, memory_limit_bytes(case.machine.accelerator) / GIB
        return Predicted(row, why_not=f"does not fit: needs {needed:.1f} GiB of {there:.1f} GiB")
    low_s, high_s = bounds_s(case, step_s=price.step_s)
    return Predicted(row, price, low_s, high_s)
