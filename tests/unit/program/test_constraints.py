"""Which layouts a framework refuses, one at a time and as columns."""

from __future__ import annotations

import numpy as np
import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.program.feasibility import broken_constraints, constraints
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.workload import Workload
from tests.unit.small import small_model

CORE = find_framework("megatron-core")


@pytest.mark.parametrize(
    ("length", "context", "why"),
    [
        (128, 4, None),
        (36, 4, "sequence_length (36) is not divisible by 2·CP = 8"),
        (35, 1, None),
        (128, 3, "sequence_length (128) is not divisible by 2·CP = 6"),
    ],
)
def test_context_takes_a_block_from_either_end(length: int, context: int, why: str | None) -> None:
    """Guards the balanced split of causal attention: twice as many blocks as ranks, but any length on one rank."""
    workload = Workload(global_batch=8, sequence_length=length)
    found = broken_constraints(Grid(context=context, order=CORE.axes), small_model(), workload, CORE, micro_batch=1)
    assert (why in found) if why else not found
    one = next(one for one in constraints(small_model(), workload, CORE) if one.name == "sequence-by-context")
    assert one.broken({"context": np.array([context])}).tolist() == [why is not None]


def test_streams_are_in_one_stage_of_megatron_core() -> None:
    """Guards hyper-connections, which Megatron-Core's main branch has without stages, and its branch with compressed
    attention, or another framework, with them."""
    workload, streams = Workload(global_batch=8, sequence_length=128), small_model(residual_streams=4)
    why = "hyper-connections in Megatron-Core are in one stage, so no PP"
    for framework, model, said in (
        (CORE, streams, [why]),
        (CORE, small_model(), []),
        (CORE, load_model("deepseek-v4-flash").document, []),
        (find_framework("axonn-tune"), streams, []),
    ):
        grid = Grid(pipeline=2, order=framework.axes)
        assert broken_constraints(grid, model, workload, framework, micro_batch=1) == said


def test_an_axis_that_a_framework_lacks_is_all_that_is_said() -> None:
    """Guards rows of another framework: constraints of an axis without a name said nothing to a reader."""
    framework, model = find_framework("megatron-2022"), load_model("nano-moe").document
    grid, workload = Grid(data=8, expert=8, order=framework.axes), Workload(global_batch=64, sequence_length=64)
    assert broken_constraints(grid, model, workload, framework, micro_batch=1) == ["megatron-2022 has no axis expert"]
