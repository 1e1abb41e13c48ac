"""Whether a configuration trained as one rank alone does: losses and gradient norms, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeAlias

from axonn_tune.grid import AXES
from axonn_tune.specs.results import MeasuredConfiguration, RunTimes, Serial
from axonn_tune.specs.workload import Precision

Agreement: TypeAlias = Literal["equal", "within rounding", "wrong", "not compared"]
COMPARED_STEPS = 10
"""Rounding errors grow from step to step; these, from the first, are compared."""
_LOSS_TOLERANCE: dict[Precision, float] = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}
_NORM_TOLERANCE: dict[Precision, float] = {"fp64": 1e-8, "fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}


@dataclass(frozen=True)
class Verdict:
    """How a configuration agrees with the serial run. where: what is wrong first; difference: the largest, relative."""

    agreement: Agreement
    difference: float = 0.0
    where: str = ""

    @property
    def words(self) -> str:
        """For a person."""
        if self.agreement == "within rounding":
            return f"within rounding ({self.difference:.0e})"
        return f"wrong: {self.where}" if self.agreement == "wrong" else self.agreement


def judge(configuration: MeasuredConfiguration, serial: Serial | None) -> Verdict:
    """The worst of all runs of a configuration."""
    if serial is None:
        return Verdict("not compared")
    found = [_judge_run(run, serial, configuration.workload.precision) for run in configuration.runs]
    order: tuple[Agreement, ...] = ("equal", "within rounding", "wrong")
    return max(found, key=lambda one: (order.index(one.agreement), one.difference))


def _judge_run(run: RunTimes, serial: Serial, precision: Precision) -> Verdict:
    largest = 0.0
    for step, what, difference, tolerance in _differences(run, serial, precision):
        if not difference <= tolerance:
            return Verdict("wrong", difference, _where(step, what, difference))
        largest = max(largest, difference)
    return Verdict("within rounding", largest) if largest else Verdict("equal")


def _differences(run: RunTimes, serial: Serial, precision: Precision) -> Iterator[tuple[int, str, float, float]]:
    """Step from 1, what, relative difference and what of it is rounding, in the order a step computes them."""
    losses = zip(run.losses, serial.losses, strict=False)
    norms = zip(run.gradient_norms, serial.gradient_norms, strict=False)
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        if step > COMPARED_STEPS:
            return
        yield step, "loss", _relative(*loss), _LOSS_TOLERANCE[precision]
        yield step, "gradient norm", _relative(*norm), _NORM_TOLERANCE[precision]


def _relative(value: float, expected: float) -> float:
    return abs(value - expected) / max(abs(expected), 1e-300)


def _where(step: int, what: str, difference: float) -> str:
    part = "the forward pass" if what == "loss" else "the gradients"
    part = part if step == 1 else "the update of the weights"
    return f"{what} of step {step} is off by {difference:.1%}, so {part}"


def blame(verdicts: Sequence[tuple[MeasuredConfiguration, Verdict]]) -> str | None:
    """Which axes are split wherever training is wrong and nowhere else, in words; None if nothing is wrong."""
    wrong = [_split(one) for one, verdict in verdicts if verdict.agreement == "wrong"]
    right = [_split(one) for one, verdict in verdicts if verdict.agreement in ("equal", "within rounding")]
    if not wrong:
        return None
    for count in range(1, len(AXES) + 1):
        for axes in combinations(AXES, count):
            if all(set(axes) <= one for one in wrong) and not any(set(axes) <= one for one in right):
                return _blamed(axes, right)
    return "no axis is split in all configurations that are wrong and in none that is right"


def _blamed(axes: Sequence[str], right: Sequence[set[str]]) -> str:
    named = axes[0] if len(axes) == 1 else f"{', '.join(axes[:-1])} and {axes[-1]} together"
    if not right:
        return f"every configuration is wrong; all of them split {named}"
    return f"wrong wherever {named} {'is' if len(axes) == 1 else 'are'} split, and nowhere else"


def _split(configuration: MeasuredConfiguration) -> set[str]:
    grid = configuration.grid.grid()
    return {axis for axis in AXES if grid.axis_size(axis) > 1}
