"""FLOPs of one training step: what the model needs (for MFU), and what a rank executes (for HFU).

MFU follows PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B): three times the FLOPs of the
forward products and of full S×S attention, the masked half counted; the head counts, looking up
embeddings does not, recomputation does not. HFU counts what a rank executes, recomputation and padding
included.
"""

from __future__ import annotations

from collections.abc import Mapping

from axonn_tune.program.operations import Attention, MatMul
from axonn_tune.program.size import Value
from axonn_tune.program.step import StepProgram
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

MFU_CONVENTION = "PaLM, appendix B: recomputation not counted, head and the masked half of attention counted"

_FORWARD_AND_BACKWARD = 3.0
"""The backward pass does twice the forward's products: one for each gradient."""


def model_flops(model: Model, workload: Workload) -> float:
    """FLOPs one step needs, all ranks: 3·(2·(L·W + V·H)·tokens + 4·S·Q·L·tokens), arXiv 2204.02311 appendix B."""
    tokens = float(step_tokens(workload))
    weights = float(model.layers * model.block_weights + model.vocab * model.hidden)
    attention = 4.0 * workload.sequence_length * model.query_width * model.layers
    return _FORWARD_AND_BACKWARD * (2.0 * weights + attention) * tokens


def step_tokens(workload: Workload) -> int:
    """Tokens in one step, all ranks."""
    return workload.global_batch * workload.sequence_length


def executed_flops(program: StepProgram, values: Mapping[str, Value]) -> Value:
    """FLOPs of matrix products and attention that one rank executes in a step, recomputation included."""
    total: Value = 0.0
    for step, count in program.calls():
        if isinstance(step, MatMul | Attention):
            total = total + count.evaluate(values) * step.flops.evaluate(values)
    return total
