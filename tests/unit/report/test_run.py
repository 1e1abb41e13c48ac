"""A run, predicted and measured: what the table says and must not hide, and both in one trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.cost.spans import predicted_spans
from axonn_tune.errors import UsageError
from axonn_tune.ranking.inputs import Choices, load_inputs
from axonn_tune.ranking.results import run_search
from axonn_tune.ranking.space import Limits
from axonn_tune.report.explain import PricedConfiguration
from axonn_tune.report.run import (
    choose_step,
    groups_of,
    merged_trace,
    other_hardware,
    run_section,
    summary_text,
    trace_remarks,
)
from axonn_tune.specs.launch import CollectiveTerm
from axonn_tune.specs.results import QUANTITIES, Pairs, PredictionTarget, Site, Summary
from axonn_tune.specs.traces import COMPUTE_LANE, MeasuredTrace, Span, step_name


def term(layer: str, **given: Any) -> CollectiveTerm:
    """A term of 2 calls, predicted to take 1 ms and measured as 2."""
    chosen: dict[str, Any] = {
        "op": "all_gather", "axis": "z", "phase": "forward", "count": 2, "bytes": 4096, "group": 4, "tier": "loopback",
        "seconds": 0.001, "exposed_s": 0.0,
        "measured_s": (0.002,), "measured_exposed_s": (0.0005,), "elapsed_s": (0.003,),
    }  # fmt: skip
    return CollectiveTerm(layer=layer, **(chosen | given))


def summary(*terms: CollectiveTerm, accelerator: str = "one CPU core", device: str = "cpu, 1 thread") -> Summary:
    """A run of four ranks."""
    return Summary(
        schema="axonn-tune/summary/2",
        name="nano-4",
        tool_version="1",
        predicted_for=PredictionTarget(machine="somewhere", accelerator=accelerator, cost="alpha-beta"),
        ran_on=Site(device=device, host="here", cores=4, ranks=4, backend="gloo", torch_version="2"),
        timed_steps=10,
        averaged_steps=6,
        warmup_steps=2,
        pairs=Pairs(
            predicted={"step_s": 0.2, "compute_s": 0.19, "communication_s": 0.05, "memory_bytes": 1e6},
            measured=dict(zip(QUANTITIES, (0.3, 0.25, 0.1, 0.05, 2e6), strict=True)),
        ),
        memory_convention="counted",
        seconds_convention="as seen",
        tokens_per_s=1000.0,
        mfu=0.1,
        terms=terms,
    )


def test_one_row_for_each_kind_and_axis_or_for_each_collective() -> None:
    """Guards the sums that people read, and the way to see behind them."""
    found = summary(term("mlp.fc1"), term("mlp.fc2", phase="backward"), term("mlp.fc1", axis="x", measured_s=(0.1,)))
    few = groups_of(found, all_terms=False)
    assert [(one["axis"], one["count"], one["predicted_s"], one["measured_s"]) for one in few] == [
        ("x", 2, 0.001, 0.1),
        ("z", 4, 0.002, 0.004),
    ]
    assert len(groups_of(found, all_terms=True)) == 3


def test_a_sum_that_lacks_a_prediction_has_none() -> None:
    """Guards launch configs that were edited: part of a sum would look like a good prediction of all of it."""
    found = summary(term("mlp.fc1"), term("mlp.fc2", seconds=None))
    (group,) = groups_of(found, all_terms=False)
    assert (group["predicted_s"], group["ratio"]) == (None, "-")
    assert "edited" in summary_text(found, all_terms=False)


def test_the_table_fits_a_terminal() -> None:
    """Guards 100 columns, with the longest names there are."""
    wide = term("mlp.fc1", op="reduce_scatter", axis="xyzdata", group=16384, count=99_999, measured_s=(99.9,))
    said = summary_text(summary(wide, term("mlp.fc2")), all_terms=False)
    assert max(map(len, said.splitlines())) <= 100
    assert "measured /" in said


def test_memory_is_compared_on_gpus_alone() -> None:
    """Guards against a ratio of a process' whole resident set to the tensors of a model."""

    def memory(found: Summary) -> list[str]:
        said = summary_text(found, all_terms=False)
        return next(line.split() for line in said.splitlines() if line.startswith("memory"))

    gpu = summary(accelerator="A100-SXM4-40GB", device="NVIDIA A100-SXM4-40GB")
    assert memory(gpu) == ["memory", "977", "KiB", "1.91", "MiB", "2"]
    assert memory(summary()) == ["memory", "-", "1.91", "MiB", "-"]
    assert "it is not compared" in summary_text(summary(), all_terms=False)
    (card,) = (one for one in run_section(summary(), identity="s1", source="here")["cards"] if one["label"] == "memory")
    assert card["note"] == "not compared"


def test_other_hardware_is_said() -> None:
    """Guards against reading a comparison of two machines as the error of a prediction."""
    for predicted, ran, same in (
        ("one CPU core", "cpu, 1 thread", True),
        ("A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", True),
        ("H100-SXM5-80GB", "NVIDIA H100 80GB HBM3", True),
        ("A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", False),
        ("A100-SXM4-40GB", "cpu, 1 thread", False),
        ("one CPU core", "NVIDIA H100 80GB HBM3", False),
    ):
        found = summary(accelerator=predicted, device=ran)
        assert (other_hardware(found) is None) == same
        assert ("Warning" in summary_text(found, all_terms=False)) != same


@pytest.fixture(scope="module")
def prediction() -> PricedConfiguration:
    """nano on two ranks."""
    inputs = load_inputs(Choices(gpus=2, model="nano", machine="localhost", limits=Limits(axes={"z": 2})))
    ranked = run_search(inputs).ranked
    return PricedConfiguration(inputs, ranked.entry(0, terms=False), ranked.pricing(0))


def measured(
    prediction: PricedConfiguration, *, rank: int, late_s: float, host: str = "here", folder: str = "run"
) -> MeasuredTrace:
    """A run just as predicted, begun late, whose steps 3 to 5 take 1, 3 and 2 times as long."""
    spans = []
    for step, slower in ((3, 1.0), (4, 3.0), (5, 2.0)):
        for span in predicted_spans(prediction.pricing, operations=False):
            name = step_name(step) if span.name == "step" else span.name
            start_s = 1000.0 * step + late_s
            spans.append(Span(span.lane, name, start_s + slower * span.start_s, start_s + slower * span.end_s))
    path = Path(folder) / f"trace-rank{rank}.json"
    return MeasuredTrace(path, "nano", rank, host, (3, 4, 5), tuple(spans))


def events(text: str) -> dict[str, list[dict[str, Any]]]:
    """Spans by process."""
    found = json.loads(text)["traceEvents"]
    names = {one["pid"]: one["args"]["name"] for one in found if one["name"] == "process_name"}
    return {name: [one for one in found if one["ph"] == "X" and one["pid"] == pid] for pid, name in names.items()}


def test_one_process_each_with_the_same_lanes_and_names(prediction: PricedConfiguration) -> None:
    """Guards the merged file: predicted first, then the ranks; all starts at the start of the step."""
    traces = [measured(prediction, rank=rank, late_s=0.25 * rank) for rank in (0, 1)]
    text = merged_trace(prediction, choose_step(traces, step=None))
    found = events(text)
    assert list(found) == ["predicted", "measured rank 0", "measured rank 1"]
    steps = {name: next(one for one in mine if one["name"] == "step 5") for name, mine in found.items()}
    assert [one["ts"] for one in steps.values()] == pytest.approx([0.0, 0.0, 0.25e6])
    assert steps["measured rank 0"]["dur"] == pytest.approx(2e6 * prediction.pricing.iteration_s, rel=1e-3)
    shown = {one["name"] for one in found["measured rank 0"]}
    assert shown <= {one["name"] for one in found["predicted"]}
    notes = json.loads(text)["otherData"]
    assert notes["step"] == 5
    assert [one["rank"] for one in notes["measured"]] == [0, 1]
    assert notes["predicted"]["model_sha256"] == prediction.inputs.model.sha256


def test_steps_that_are_not_there_are_refused(prediction: PricedConfiguration) -> None:
    """Guards --step, and traces of different steps."""
    trace = measured(prediction, rank=0, late_s=0.0)
    with pytest.raises(UsageError, match="does not have step 9; it has 3, 4, 5"):
        choose_step([trace], step=9)
    other = MeasuredTrace(trace.path, "nano", 1, "here", (8,), (Span(COMPUTE_LANE, step_name(8), 0.0, 1.0),))
    with pytest.raises(UsageError, match="no step in common: rank 0 has 3, 4, 5; rank 1 has 8"):
        choose_step([trace, other], step=None)


def test_remarks_say_what_only_one_side_has(prediction: PricedConfiguration) -> None:
    """Guards against laying a run beside the prediction of another config."""
    trace = measured(prediction, rank=0, late_s=0.0)
    said = trace_remarks(prediction, choose_step([trace], step=3))
    assert len(said) == 1
    assert said[0].startswith("Step 3 took")
    strange = Span("communication over q", "all_gather over q, forward, mlp.fc9", 3000.0, 3000.001)
    found = MeasuredTrace(trace.path, "nano", 0, "here", (3,), (*trace.spans, strange))
    said = trace_remarks(prediction, choose_step([found], step=3))
    assert "1 collective only measured, such as all_gather over q" in said[1]


def test_runs_are_told_apart_and_begin_together(prediction: PricedConfiguration) -> None:
    """Guards several folders and hosts: a run an hour later, or a clock that is off, does not put a rank hours away."""
    traces = [measured(prediction, rank=0, late_s=late_s, folder=name) for name, late_s in (("a", 0.0), ("b", 3600.0))]
    elsewhere = measured(prediction, rank=1, late_s=300.0, host="there", folder="b")
    found = choose_step([*traces, elsewhere], step=4)
    assert found.process_names == ["measured rank 0, a", "measured rank 0, b", "measured rank 1, b"]
    assert {mine[0]["ts"] for mine in events(merged_trace(prediction, found)).values()} == {0.0}
