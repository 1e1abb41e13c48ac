"""Megatron's tensor parallelism is x with y = 1, FSDP and GTP are z: no special code, the same program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import FUSED, Framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.workload import Recompute, Workload

MACHINE = load_machine("dgx-h100").document
RUNTIME, CORE = find_framework("axonn-tune"), find_framework("megatron-core")
PAIRS = {
    "Megatron-Core's step": (replace(RUNTIME, step=CORE.step, schedule=CORE.schedule), CORE),
    "the runtime's step": (RUNTIME, replace(CORE, step=RUNTIME.step, schedule=RUNTIME.schedule)),
}


def priced(framework: Framework, recompute: Recompute, **sizes: int) -> Detail:
    """One configuration of GPT-3 175B, in the framework's own rank order, on kernels of one quality."""
    model = load_model("gpt3-175b").document
    workload = Workload(global_batch=64, sequence_length=2048)
    configuration = Layout(Grid(**sizes, order=framework.axes), 2, recompute)
    return price(Job(model, MACHINE, workload, framework), configuration, software=FUSED)


def called(priced: Detail) -> list[Any]:
    """Calls of its program, without those of context parallelism, which frameworks do otherwise: collectives, and
    kernels that merge the parts of a ring."""
    every = priced.program.calls()
    return [one for one in every if getattr(one[0], "axis", "") != "context" and "merged" not in dict(one[1].powers)]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize(
    "sizes", [{"x": 8, "data": 2}, {"x": 4, "z": 4, "data": 2}, {"x": 8, "data": 2, "pipeline": 4}, {"z": 16}]
)
def test_x_is_tensor_parallelism_and_z_is_gtp(pair: str, recompute: Recompute, sizes: dict[str, int]) -> None:
    """Guards the claim of one engine: with the same step options, (x=T, y=1) of the 4D algorithm and tensor T of
    Megatron-Core are the same operations, term by term, and cost the same; so are z and GTP, and stages.
    """
    one, other = (priced(framework, recompute, **sizes) for framework in PAIRS[pair])
    assert called(one) == called(other)
    assert one.terms
    bare, exposed_s = zip(
        *(
            ([replace(term, exposed_s=0.0) for term in each.terms], [term.exposed_s for term in each.terms])
            for each in (one, other)
        ),
        strict=True,
    )
    assert bare[0] == bare[1]
    assert exposed_s[0] == pytest.approx(exposed_s[1], rel=1e-9, abs=1e-12)
    assert one.memory == other.memory
    steps = [(each.iteration_s, each.compute_s, each.bubble_s) for each in (one, other)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-12)


def test_descriptions_ask_for_no_names() -> None:
    """Guards the engine against special cases: a framework under another name is priced the same."""
    renamed = replace(CORE, name="somebody's", title="Somebody's", source="")
    one, other = (priced(framework, "selective", x=4, z=2, data=2, pipeline=2) for framework in (CORE, renamed))
    assert (one.iteration_s, one.terms, one.memory) == (other.iteration_s, other.terms, other.memory)
