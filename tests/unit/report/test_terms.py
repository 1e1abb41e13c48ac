"""Predicted beside measured: what the table says, and what it must not hide."""

from __future__ import annotations

from typing import Any

from axonn_tune.report.terms import groups_of, other_hardware, ratio, summary_text
from axonn_tune.specs.results import PredictionTarget, Quantity, RunSite, Summary, SummaryTerm


def term(layer: str, **given: Any) -> SummaryTerm:
    """A term of 2 calls, predicted to take 1 ms and measured as 2."""
    chosen: dict[str, Any] = {
        "op": "all_gather", "axis": "z", "phase": "forward", "count": 2, "bytes": 4096, "group": 4, "tier": "loopback",
        "predicted_s": 0.001, "measured_s": 0.002, "elapsed_s": 0.003,
        "predicted_exposed_s": 0.0, "measured_exposed_s": 0.0005,
    }  # fmt: skip
    return SummaryTerm(layer=layer, **(chosen | given))


def summary(*terms: SummaryTerm, accelerator: str = "one CPU core", device: str = "cpu, 1 thread") -> Summary:
    """A run of four ranks."""
    return Summary(
        schema="axonn-tune/summary/1",
        name="nano-4",
        predicted_for=PredictionTarget(machine="somewhere", accelerator=accelerator, cost="alpha-beta"),
        ran_on=RunSite(device=device, host="here", ranks=4, backend="gloo", torch_version="2", tool_version="1"),
        timed_steps=10,
        averaged_steps=6,
        warmup_steps=2,
        step_s=Quantity(predicted=0.2, measured=0.3),
        compute_s=Quantity(predicted=0.19, measured=0.25),
        communication_s=Quantity(predicted=0.05, measured=0.1),
        exposed_communication_s=Quantity(predicted=None, measured=0.05),
        memory_bytes=Quantity(predicted=1e6, measured=2e6),
        memory_convention="counted",
        seconds_convention="as seen",
        tokens_per_s=1000.0,
        mfu=0.1,
        terms=terms,
    )


def test_one_row_for_each_kind_and_axis_or_for_each_collective() -> None:
    """Guards the sums that people read, and the way to see behind them."""
    terms = (term("mlp.fc1"), term("mlp.fc2", phase="backward"), term("mlp.fc1", axis="x", measured_s=0.1))
    few = groups_of(terms, all_terms=False)
    assert [(group.axis, group.count, group.predicted_s, group.measured_s) for group in few] == [
        ("x", 2, 0.001, 0.1),
        ("z", 4, 0.002, 0.004),
    ]
    assert len(groups_of(terms, all_terms=True)) == 3


def test_a_sum_that_lacks_a_prediction_has_none() -> None:
    """Guards launch configs that were edited: part of a sum would look like a good prediction of all of it."""
    (group,) = groups_of((term("mlp.fc1"), term("mlp.fc2", predicted_s=None)), all_terms=False)
    assert group.predicted_s is None
    assert ratio(group.measured_s, group.predicted_s) == "-"
    said = summary_text(summary(term("mlp.fc2", predicted_s=None)), all_terms=False)
    assert "edited" in said


def test_the_table_fits_a_terminal() -> None:
    """Guards 100 columns, with the longest names there are."""
    wide = term("mlp.fc1", op="reduce_scatter", axis="xyzdata", group=16384, count=99_999, measured_s=99.9)
    said = summary_text(summary(wide, term("mlp.fc2")), all_terms=False)
    assert max(map(len, said.splitlines())) <= 100
    assert "measured /" in said


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
