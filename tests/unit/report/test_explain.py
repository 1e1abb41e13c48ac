"""Where an explanation counts memory of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from axonn_tune.cost.price import Detail
from axonn_tune.grid import ALL_AXES
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.compare import compare
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.explain import MEMORY_GROUPS, gap_to_peak, sections, stage_rows
from axonn_tune.request import Request


def _explained(precision: str | None = None) -> Detail:
    """Mixtral 8x7B on two nodes of 8: TP 2, DP 8; experts by ETP 2, EP 4, and two replicas."""
    axes = {"x": 2, "z": 1, "context": 1, "pipeline": 1, "expert": 4, "expert_tensor": 2}
    request = Request("mixtral-8x7b", gpus=16, machine="dgx-h200", framework="megatron-core", micro_batch=1, **axes)
    return run_search(load_inputs(replace(request, precision=precision)).problem).detail(0)


@pytest.mark.parametrize("precision", [None, "fp8-current"])
def test_memory_of_experts_is_with_that_of_other_weights(precision: str | None) -> None:
    """Experts of a rank are 8/4/2 of 3·4096·14336 in each of 32 layers: their FP32 gradients are no temporaries."""
    priced = _explained(precision)
    (row,) = stage_rows(priced)
    elements = 32 * 3 * 4096 * 14336
    assert elements * 4 < row["gradients"] < elements * 5
    assert row["weights"] > elements * (2 if precision is None else 3)
    # Master weights and two moments in FP32, over two expert replicas.
    assert elements * 6 < row["optimizer states"] < elements * 7
    assert sum(row[group] for group in MEMORY_GROUPS) == pytest.approx(row["total"])
    assert row["temporaries"] < elements


def test_letters_of_formulas_are_explained() -> None:
    """Guards `imbalance`, 1.4 by default, and buckets of experts and of layer types: none stands unexplained."""
    priced = _explained()
    letters = next(section for section in sections(priced, terms=True) if "per rank" in section.title).notes[0]
    used = {name for term in priced.terms for name, _ in term.collective.size_bytes.powers}
    assert {"imbalance", "expert_bucket"} <= used
    assert all(f"{name} = " in letters for name in used - {*ALL_AXES})
    assert "imbalance = 1.4 (" in letters
    assert any(what.startswith("token imbalance") for what, _ in gap_to_peak(priced))


def test_a_comparison_has_only_strategies_whose_experts_are_priced() -> None:
    """Guards DeepSpeed and AxoNN, which have no experts: no step is made up for them."""
    request = Request("nano-moe", gpus=8, machine="dgx-h100", batch=64)
    found = {one.framework: one for one in compare(load_inputs(request).problem).contenders}
    assert found["megatron-core"].prediction is not None
    for name in ("deepspeed", "axonn", "megatron-axonn"):
        assert found[name].prediction is None
        assert found[name].infeasible == "experts are not priced for it"
