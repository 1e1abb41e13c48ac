"""What a step time means: tokens per second, MFU, HFU, and the interval around the prediction.

MFU follows PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): three times the FLOPs of the
forward products and of full S×S attention, the masked half counted; the head counts, looking up
embeddings does not, recomputation does not. HFU counts what a rank executes, recomputation and padding
included.
"""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.cost.arithmetic import Column
from axonn_tune.specs.machine import Machine, Uncertainty
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

MFU_CONVENTION = "PaLM, appendix B: recomputation not counted, head and the masked half of attention counted"

_FORWARD_AND_BACKWARD = 3.0
"""The backward pass does twice the forward's products: one for each gradient."""


@dataclass(frozen=True)
class Performance:
    """What follows from a predicted step time; `low_s` and `high_s` bound it at 80%."""

    tokens_per_s: float
    low_s: float
    high_s: float
    mfu: float
    hfu: float


def model_flops(model: Model, workload: Workload) -> float:
    """FLOPs one step needs, all ranks: 3·(2·(L·W + V·H)·tokens + 4·S·Q·L·tokens), arXiv 2204.02311 appendix B."""
    tokens = float(step_tokens(workload))
    weights = float(model.layers * model.block_weights + model.vocab * model.hidden)
    attention = 4.0 * workload.sequence_length * model.query_width * model.layers
    return _FORWARD_AND_BACKWARD * (2.0 * weights + attention) * tokens


def step_tokens(workload: Workload) -> int:
    """Tokens in one step, all ranks."""
    return workload.global_batch * workload.sequence_length


def interval_s(compute_s: Column, exposed_s: Column, uncertainty: Uncertainty) -> tuple[Column, Column]:
    """Lower and upper bound of a step time, s: each part less and more its relative half-width."""
    return (
        compute_s * (1.0 - uncertainty.compute) + exposed_s * (1.0 - uncertainty.communication),
        compute_s * (1.0 + uncertainty.compute) + exposed_s * (1.0 + uncertainty.communication),
    )


def performance(
    model: Model,
    machine: Machine,
    workload: Workload,
    *,
    gpus: int,
    compute_s: float,
    iteration_s: float,
    executed_flops: float,
) -> Performance:
    """Performance of one candidate; `executed_flops` are those of one rank."""
    peak = machine.accelerator.peak_flops_per_s(workload.precision)
    low_s, high_s = interval_s(compute_s, max(iteration_s - compute_s, 0.0), machine.uncertainty)
    return Performance(
        tokens_per_s=step_tokens(workload) / iteration_s,
        low_s=float(low_s),
        high_s=float(high_s),
        mfu=model_flops(model, workload) / (iteration_s * gpus * peak),
        hfu=executed_flops / (iteration_s * peak),
    )
