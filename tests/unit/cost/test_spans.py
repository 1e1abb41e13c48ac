"""The predicted timeline: named as the program names things, adding up to what is predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest

from axonn_tune.cost.price import Detail, price
from axonn_tune.cost.spans import STEP, predicted_spans
from axonn_tune.frameworks.description import FUSED
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.machine import Software
from axonn_tune.specs.traces import Span, communication_lane, term_name, wait_name
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.vocabulary import COMPUTE_LANE, OVERLAPS, Overlap
from tests.unit.cost.machines import two_tier_machine

WORKLOAD = Workload(global_batch=48 * 8, sequence_length=64)
GRIDS = (Grid(2, 2, 2, 2), Grid(1, 1, 16, 1), Grid(4, 1, 2, 2, order=("z", "x", "data", "y")), Grid(1, 1, 1, 16))
LAYERS = 5


def priced(
    grid: Grid,
    *,
    recompute: Recompute = "full",
    kept: int = 0,
    overlaps: Sequence[Overlap] = OVERLAPS,
    split: bool = False,
    software: Software = FUSED,
) -> Detail:
    """Five layers of nano on two tiers, under a host that is never late unless told otherwise."""
    model = load_model("nano", overrides=[f"layers={LAYERS}"]).document
    workload = WORKLOAD.model_copy(update={"overlaps": tuple(overlaps), "split_micro_batch": split})
    configuration = Layout(grid, 12, recompute, kept)
    return price(Job(model, two_tier_machine(), workload), configuration, software=software)


def took_s(spans: Sequence[Span]) -> float:
    """Sum of durations."""
    return sum(span.end_s - span.start_s for span in spans)


def by_name(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """Spans that share a name."""
    found = defaultdict(list)
    for span in spans:
        found[span.name].append(span)
    return dict(found)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("kept", [0, 2, LAYERS])
def test_spans_are_the_terms_and_add_up_to_them(grid: Grid, recompute: Recompute, kept: int) -> None:
    """Guards the timeline against the prediction: each term on its axis' lane, its seconds and its exposed time."""
    pricing = priced(grid, recompute=recompute, kept=kept)
    spans = predicted_spans(pricing)
    for axis in ("x", "y", "z", "data", "xy", "xyzdata"):
        terms = {term_name(one.op, one.axis, one.phase, one.layer): one for one in pricing.terms if one.axis == axis}
        found = by_name([span for span in spans if span.lane == communication_lane(axis)])
        assert found.keys() == terms.keys()
        for name, term in terms.items():
            assert took_s(found[name]) == pytest.approx(term.seconds, rel=1e-9)
            assert {span.details["bytes"] for span in found[name]} == {round(term.bytes)}
            assert sum(int(str(span.details.get("calls", 1))) for span in found[name]) == term.count
    waits = by_name([span for span in spans if span.lane == COMPUTE_LANE])
    for term in pricing.terms:
        name = wait_name(term_name(term.op, term.axis, term.phase, term.layer))
        assert took_s(waits.get(name, [])) == pytest.approx(term.exposed_s, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("overlaps", [OVERLAPS, (), OVERLAPS[2:4]])
@pytest.mark.parametrize("split", [False, True])
def test_the_step_ends_where_it_is_predicted_to(grid: Grid, overlaps: tuple[Overlap, ...], split: bool) -> None:
    """Guards the extrapolated parts: all begin where the one before ended, and the last ends with the step."""
    pricing = priced(grid, overlaps=overlaps, split=split)
    spans = predicted_spans(pricing)
    assert spans[0] == Span(COMPUTE_LANE, STEP, 0.0, pricing.iteration_s)
    assert max(span.end_s for span in spans) == pytest.approx(pricing.iteration_s, rel=1e-12)
    parts = [span for span in spans[1:] if "micro_batch" in span.details]
    assert parts[0].start_s == 0.0
    assert parts[-1].end_s == pytest.approx(pricing.iteration_s, rel=1e-12)
    for before, after in pairwise(parts):
        assert after.start_s == pytest.approx(before.end_s, rel=1e-9)


def test_a_step_of_a_thousand_million_micro_batches_has_few_spans() -> None:
    """Guards memory: what no one can look at one by one is one span, and the step ends where it should."""
    model, workload = load_model("nano").document, WORKLOAD.model_copy(update={"global_batch": 2**31 - 2**20})
    pricing = price(Job(model, two_tier_machine(), workload), Layout(Grid(2, 1, 1, 1), 1, "none", 0))
    assert pricing.accumulation == 2**31 - 2**20
    spans = predicted_spans(pricing, alike=1)
    assert len(spans) < 20_000
    (rest,) = (span for span in spans if "micro_batches" in span.details)
    assert rest.details["micro_batches"] == 2**31 - 2**20 - 10_002
    assert max(span.end_s for span in spans) == pytest.approx(pricing.iteration_s, rel=1e-9)
