"""What the paper and its convention say, for printing beside what is predicted."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload


def paper_step_flops(model: Model, workload: Workload) -> float | None:
    """FLOPs of a step with full recomputation: `96·B·s·l·h²·(1 + s/(6h) + V/(16·l·h))`, arXiv 2104.04473, equation 3.

    It counts full recomputation whether or not it is done, and the masked half of attention. None
    for models of another shape than a GPT with an MLP of 4h, which it does not describe.
    """
    h, length, layers = float(model.hidden), float(workload.sequence_length), float(model.layers)
    if model.gated or model.ffn != 4 * model.hidden or model.qkv_width != 3 * model.hidden:
        return None
    products = 96.0 * workload.global_batch * length * layers * h * h
    return products * (1.0 + length / (6.0 * h) + model.vocab / (16.0 * layers * h))


@dataclass(frozen=True)
class Claim:
    """One result of arXiv 2305.13525; `value` as a share."""

    what: str
    value: float
    words: str


def claims(model: Model, *, machine_name: str, gpus: int) -> tuple[Claim, ...]:
    """What arXiv 2305.13525 states of this model on this many GPUs of Perlmutter; of other machines nothing."""
    if not machine_name.startswith("perlmutter"):
        return ()
    if model.name == "80b" and gpus == 1024:
        return (
            Claim("gain over Megatron-LM", 0.26, "26% over Megatron-LM"),
            Claim("share of peak", 0.57, "57% of peak, 182 PFLOP/s in all"),
        )
    if model.name == "20b":
        return (Claim("gain of overlap", 0.53, "nearly 53% from overlap, on a 20B model"),)
    return ()
