"""What a calibration measures is what trains."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from axonn_tune.calibration.measure import build_plan
from axonn_tune.ranking.inputs import WorkloadChoices, make_workload
from axonn_tune.runtime.probes import Bench
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.points import AttentionProbe, StepProbe


def test_attention_is_measured_in_the_format_it_trains_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `--precision bf16` on CPUs: steps and probes of one fit go through the same core, which is in fp32."""
    model, machine = load_model("nano-llama"), load_machine("localhost")
    workload = make_workload(model.document, WorkloadChoices(batch=1, precision="bf16"))
    plan = build_plan(model, machine, workload, world=1, backend="gloo", budget_s=1.0)
    bench, plain = Bench(plan, rank=0, world=1, device=torch.device("cpu")), functional.scaled_dot_product_attention
    formats: list[torch.dtype] = []

    def core(queries: torch.Tensor, *rest: torch.Tensor, **how: bool) -> torch.Tensor:
        formats.append(queries.dtype)
        return plain(queries, *rest, **how)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", core)
    bench.step(StepProbe(launch=0))()
    in_training = set(formats)
    formats.clear()
    bench.attention(AttentionProbe(backward=True, sequences=1))()
    assert set(formats) == in_training
