"""Memory of Megatron-LM against the figures of Korthikanti et al. 2022, arXiv 2205.05198."""

from __future__ import annotations

import pytest

from axonn_tune.baselines.layout import KORTHIKANTI_2022, Layout
from axonn_tune.baselines.memory import blocks_in_flight, kept_per_block, stage_parameters, states, total_bytes
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import ELEMENT_SIZES, Recompute
from axonn_tune.units import GIB
from tests.unit.baselines.cases import GPT_22B, GPT_175B, GPT_530B

SIZES = ELEMENT_SIZES["fp16"]


def activations_gib(model: Model, layout: Layout) -> float:
    """Activations of the first stage, its pipeline full."""
    kept = kept_per_block(model, SIZES, layout, software=KORTHIKANTI_2022, sequence_length=2048)
    return blocks_in_flight(model, layout, micro_batches=10**6) * kept / GIB


def layout_22b(recompute: Recompute = "none", *, split: bool = False) -> Layout:
    """How figure 1 runs the 22B model."""
    return Layout(tensor=8, micro_batch=4, recompute=recompute, sequence_parallel=split)


# Figures 1 and 7, read off by the authors of Calculon (its validation.py).
@pytest.mark.parametrize(
    ("model", "layout", "published_gib"),
    [
        (GPT_22B, layout_22b(), 59.25),
        (GPT_22B, layout_22b(split=True), 0.6684 * 59.25),
        (GPT_22B, layout_22b("selective"), 0.4942 * 59.25),
        (GPT_22B, layout_22b("selective", split=True), 9.56),
        (GPT_22B, layout_22b("full"), 0.0764 * 59.25),
        (GPT_175B, Layout(8, 8, 1, 1, interleave=3), 66.84),
        (GPT_175B, Layout(8, 8, 1, 1, interleave=3, recompute="selective", sequence_parallel=True), 12.35),
        (GPT_530B, Layout(8, 35, 1, 1, interleave=3), 114.02),
    ],
)
def test_activations_are_as_published(model: Model, layout: Layout, published_gib: float) -> None:
    """Guards the activation terms, what each recomputation saves, and the interleaved pipeline's factor."""
    assert activations_gib(model, layout) == pytest.approx(published_gib, rel=0.02)


@pytest.mark.parametrize(("model", "pipeline", "published_gib"), [(GPT_22B, 1, 45.56), (GPT_530B, 35, 31.64)])
def test_states_are_as_published(model: Model, pipeline: int, published_gib: float) -> None:
    """Guards the 18 bytes a parameter; the figure leaves out the tables, of which these stages hold one."""
    parameters = stage_parameters(model, Layout(8, pipeline), software=KORTHIKANTI_2022, stage=0)
    table = 2048 * model.hidden + model.vocab * model.hidden / 8
    assert total_bytes(states(SIZES, Layout(), parameters=parameters - table)) / GIB == pytest.approx(
        published_gib, rel=0.02
    )


def test_distributed_optimizer_splits_twelve_of_eighteen_bytes() -> None:
    """Guards ZeRO-1 by a hand value: 6 + 12/d bytes a parameter."""
    assert total_bytes(states(SIZES, Layout(data=4, distributed_optimizer=True), parameters=1.0)) == 9.0


def test_a_short_step_fills_no_pipeline() -> None:
    """Guards small batches: two micro-batches of a quarter of the blocks each."""
    assert blocks_in_flight(GPT_22B, Layout(1, 4), micro_batches=2) == 24
