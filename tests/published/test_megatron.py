"""How far blocks of Megatron-LM are from published times: tracked floors, which may only get better."""

from __future__ import annotations

import pytest

from axonn_tune.cost.price import price
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.model import Model, ModelDefaults
from axonn_tune.specs.traces import block_backward, block_forward
from axonn_tune.specs.workload import Recompute, Workload

# Table 4 of arXiv 2205.05198: one block of the 22B model, forward and backward, ms.
BLOCKS: tuple[tuple[bool, Recompute, float, float], ...] = (
    (False, "none", 7.7, 11.9),
    (True, "none", 7.2, 11.8),
    (False, "full", 7.7, 19.5),
    (False, "selective", 7.7, 13.2),
    (True, "selective", 7.2, 13.1),
)
BLOCK_ERROR = 0.14

GPT_22B = Model(
    schema="axonn-tune/model/1",
    name="22b",
    family="gpt",
    layers=48,
    hidden=6144,
    heads=64,
    kv_heads=64,
    head_dim=96,
    ffn=4 * 6144,
    vocab=51200,
    max_sequence_length=2048,
    biases=True,
    tied_embeddings=True,
    source="arXiv 2205.05198",
    defaults=ModelDefaults(global_batch=4, sequence_length=2048),
)


@pytest.mark.parametrize(("split", "recompute", "forward_ms", "backward_ms"), BLOCKS)
def test_published_block_times_are_met(
    *, split: bool, recompute: Recompute, forward_ms: float, backward_ms: float
) -> None:
    """Guards the parts: a step can be right by errors that cancel, its blocks forward and backward less so."""
    priced = price(
        Job(
            GPT_22B,
            load_machine("dgx-a100").document,
            Workload(global_batch=4, sequence_length=2048, precision="fp16"),
            find_framework("megatron-2022").with_step(sequence_parallel=split),
        ),
        Layout(Grid(x=8), 4, recompute, 0),
    )
    took_ms = {
        name: (stretch.end_s - stretch.start_s) * 1e3
        for batch in priced.batches
        for stretch in batch.stretches
        for name in stretch.names
    }
    assert took_ms[block_forward(1)] == pytest.approx(forward_ms, rel=BLOCK_ERROR)
    assert took_ms[block_backward(1)] == pytest.approx(backward_ms, rel=BLOCK_ERROR)
