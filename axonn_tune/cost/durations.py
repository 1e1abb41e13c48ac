"""Time of each computation of a program, for one candidate or for a column of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from axonn_tune.cost import compute
from axonn_tune.cost.arithmetic import Arithmetic, Column
from axonn_tune.cost.compute import ComputeRates
from axonn_tune.program.operations import Attention, Computation, Kernel, MatMul
from axonn_tune.program.size import Value
from axonn_tune.program.step import StepProgram


@dataclass(frozen=True)
class Clock:
    """What turns a computation into seconds: rates, element size, the values of the symbols."""

    rates: ComputeRates
    element_bytes: float
    values: Mapping[str, Value]
    arithmetic: Arithmetic

    def call_s(self, step: Computation) -> Column:
        """Time of one call, s; a kernel without bytes is not launched."""
        if isinstance(step, MatMul):
            m, n, k = (size.evaluate(self.values) for size in (step.m, step.n, step.k))
            return compute.matmul_time_s(
                m,
                n,
                k,
                flops_per_s=self._rate(step),
                element_bytes=self.element_bytes,
                rates=self.rates,
                arithmetic=self.arithmetic,
            )
        if isinstance(step, Attention):
            price = compute.attention_backward_time_s if step.backward else compute.attention_forward_time_s
            return price(step.flops.evaluate(self.values), self.rates)
        if step.size_bytes.coefficient == 0.0:
            return 0.0
        price_kernel = compute.kernel_time_s if step.phase == "step" else compute.unfused_kernel_time_s
        return price_kernel(step.size_bytes.evaluate(self.values), self.rates)

    def _rate(self, step: MatMul) -> float:
        return compute.rate_of_matmul(
            step.layout,
            element_bytes=self.element_bytes,
            alignment=step.alignment,
            batched=step.batched,
            rates=self.rates,
        )

    def run_s(self, step: Computation) -> Column:
        """Time a schedule spends on a computation where it stands: its calls in a row, s."""
        if isinstance(step, Kernel) and step.prepares_gather:
            return self.call_s(step)
        return step.calls.evaluate(self.values) * self.call_s(step)


def compute_s(program: StepProgram, clock: Clock) -> Column:
    """All computation of one step and rank, s: the left fold over the program."""
    total: Column = 0.0
    for step, count in program.calls():
        if isinstance(step, MatMul | Attention | Kernel):
            total = total + count.evaluate(clock.values) * clock.call_s(step)
    return total
