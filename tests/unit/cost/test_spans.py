"""The predicted timeline: named as the program names things, adding up to what is predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest

from axonn_tune.cost.prediction import Configuration, Pricing, price_configuration
from axonn_tune.cost.spans import HOST, LIKE_BEFORE, STEP, predicted_spans, spans_of_one
from axonn_tune.frameworks.description import FUSED
from axonn_tune.grid import Grid
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.machine import Software
from axonn_tune.specs.traces import (
    COMPUTE_LANE,
    EMBEDDING_BACKWARD,
    EMBEDDING_FORWARD,
    END,
    HEAD,
    Span,
    block_backward,
    block_forward,
    communication_lane,
    term_name,
    wait_name,
)
from axonn_tune.specs.workload import OVERLAPS, RECOMPUTES, Overlap, Recompute, Workload
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
) -> Pricing:
    """Five layers of nano on two tiers, under a host that is never late unless told otherwise."""
    model = load_model("nano", overrides=[f"layers={LAYERS}"]).document
    workload = WORKLOAD.model_copy(update={"overlaps": tuple(overlaps), "split_micro_batch": split})
    configuration = Configuration(grid, 12, recompute, kept)
    return price_configuration(model, two_tier_machine(), workload, configuration, software=software)


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


def test_waits_for_the_host_end_each_micro_batch() -> None:
    """Guards steps that the host bounds: blocks take what issuing them takes, and the timeline still adds up."""
    late = Software(dispatch_us=1000.0)
    bound, free = (priced(GRIDS[0], software=software) for software in (late, FUSED))
    waits = [span for span in predicted_spans(bound) if span.name == HOST]
    assert len(waits) == bound.accumulation
    assert took_s(waits) == pytest.approx(bound.iteration_s - free.iteration_s)
    assert max(span.end_s for span in predicted_spans(bound)) == pytest.approx(bound.iteration_s, rel=1e-12)
    assert not any(span.name == HOST for span in predicted_spans(free))


def test_parts_come_in_the_order_of_the_runtime() -> None:
    """Guards the names shared with measured traces: forward, loss, backward from the last block, end."""
    pricing = priced(Grid(1, 1, 2, 2), kept=1)
    parts = [one for one in predicted_spans(pricing) if one.lane == COMPUTE_LANE and "micro_batch" in one.details]
    one = [EMBEDDING_FORWARD, *map(block_forward, range(LAYERS)), HEAD]
    one += [*map(block_backward, reversed(range(LAYERS))), EMBEDDING_BACKWARD]
    assert [span.name for span in parts] == one * pricing.accumulation + [END]
    assert {span.details["micro_batch"] for span in parts} == set(range(1, pricing.accumulation + 1))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_lanes_hold_one_thing_at_a_time(grid: Grid) -> None:
    """Guards the picture: computation and waits fill the compute lane without overlap, collectives queue on theirs."""
    spans = predicted_spans(priced(grid))
    lanes = {span.lane for span in spans}
    for lane in lanes:
        mine = [s for s in spans[1:] if s.lane == lane and "micro_batch" not in s.details]
        mine.sort(key=lambda span: span.start_s)
        for before, after in pairwise(mine):
            assert after.start_s >= before.end_s - 1e-12 * spans[0].end_s
    inside = [s for s in spans[1:] if s.lane == COMPUTE_LANE and "micro_batch" not in s.details]
    assert took_s(inside) == pytest.approx(spans[0].end_s, rel=1e-9)


def test_without_operations_what_is_shared_with_measured_traces_stays() -> None:
    """Guards the short form: parts, waits and collectives alone."""
    pricing = priced(Grid(2, 2, 2, 2))
    full, short = predicted_spans(pricing), predicted_spans(pricing, operations=False)
    assert len(short) < len(full)
    dropped = {span.name.split(",")[0] for span in full} - {span.name.split(",")[0] for span in short}
    assert dropped == {"GEMM", "attention", "kernel"}
    assert [span for span in full if span in short] == short


def test_equal_micro_batches_can_stand_for_each_other() -> None:
    """Guards files of long steps: the last micro-batch and some others in full, the rest as one span each."""
    pricing = priced(Grid(2, 2, 2, 2))
    assert pricing.accumulation == 8
    full, short = predicted_spans(pricing), predicted_spans(pricing, alike=1)
    assert [span for span in full if span in short] == [span for span in short if span.name != LIKE_BEFORE]
    others = [span for span in short if span.name == LIKE_BEFORE]
    assert [span.details["micro_batch"] for span in others] == [2, 3, 4, 5, 6, 7]
    assert max(span.end_s for span in short) == pytest.approx(pricing.iteration_s, rel=1e-12)
    assert len(full) / 8 < spans_of_one(pricing) + 2
    assert predicted_spans(pricing, alike=7) == full


def test_a_step_of_a_thousand_million_micro_batches_has_few_spans() -> None:
    """Guards memory: what no one can look at one by one is one span, and the step ends where it should."""
    model, workload = load_model("nano").document, WORKLOAD.model_copy(update={"global_batch": 2**31 - 2**20})
    pricing = price_configuration(model, two_tier_machine(), workload, Configuration(Grid(2, 1, 1, 1), 1, "none", 0))
    assert pricing.accumulation == 2**31 - 2**20
    spans = predicted_spans(pricing, alike=1)
    assert len(spans) < 20_000
    (rest,) = (span for span in spans if "micro_batches" in span.details)
    assert rest.details["micro_batches"] == 2**31 - 2**20 - 10_002
    assert max(span.end_s for span in spans) == pytest.approx(pricing.iteration_s, rel=1e-9)
