"""`explain` as a user meets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from axonn_tune.report.output import axis_name
from tests.cli.running import good, run

CASE = "--gpus 64 --model 20b --x 2 --y 2 --z 4"


@pytest.fixture(scope="module")
def document() -> Any:
    """A configuration that uses every axis."""
    return good(f"explain {CASE} --format json").document


def test_tables_hold_every_term(document: Any) -> None:
    """Guards completeness: each term is in both tables, the totals are the configuration's."""
    out = good(f"explain {CASE} --terms").out
    sent, _, costs = out.partition("Collectives per rank and step")[2].partition("Collective costs")
    for number, term in enumerate(document["config"]["terms"], start=1):
        row = next(line.split() for line in sent.splitlines() if line.split()[:1] == [str(number)])
        assert row[1:5] == [term["phase"], term["layer"], term["op"], axis_name(term["axis"])]
        assert term["formula"] in row
        assert any(line.split()[:2] == [str(number), term["op"]] for line in costs.splitlines())


@pytest.mark.parametrize("title", ["Gap to peak", "The step in words", "Collectives per rank and step"])
def test_sections(title: str) -> None:
    """Guards the parts of the explanation, as text and as Markdown; how each call is priced comes with --terms."""
    text = good(f"explain {CASE}").out
    assert f"\n{title}\n---" in text
    assert f"\n## {title}\n" in good(f"explain {CASE} --format md").out
    assert "How calls are priced" not in text
    assert "\nHow calls are priced\n---" in good(f"explain {CASE} --terms").out


def test_collectives_are_aggregated(document: Any) -> None:
    """Guards the table of collectives: one row for each kind and axis, with the calls of all its terms."""
    rows = good(f"explain {CASE}").out.partition("Collectives per rank and step")[2].partition("Exposed:")[0]
    calls: dict[tuple[str, str], int] = {}
    for term in document["config"]["terms"]:
        key = term["op"], axis_name(term["axis"])
        calls[key] = calls.get(key, 0) + term["count"]
    shown = {tuple(line.split()[:2]): line.split()[3] for line in rows.splitlines() if line[:4] in ("all_", "redu")}
    assert shown == {key: f"{count:,}" for key, count in calls.items()}


def test_the_gap_to_peak_sums_to_the_step(document: Any) -> None:
    """Guards the bars: useful FLOPs at the peak and what comes on top are the step; slowdown is named as part of it."""
    gap = document["gap_to_peak"]
    assert gap[0]["what"] == "useful FLOPs at peak (MFU)"
    config = document["config"]
    assert gap[0]["seconds"] == pytest.approx(config["mfu"] * config["iteration_s"], rel=1e-9)
    assert [part["seconds"] for part in gap[1:]] == sorted((part["seconds"] for part in gap[1:]), reverse=True)
    assert sum(part["seconds"] for part in gap) == pytest.approx(document["config"]["iteration_s"], rel=1e-9)
    assert "are compute slowdown from overlap" in " ".join(document["words"])


def test_sends_have_a_fixed_time_and_a_bandwidth() -> None:
    """Guards sends: launch and one latency, the node's bandwidth over its 8 ranks, by hand; and names of axes."""
    line = "explain --gpus 64 --model llama3-8b --machine dgx-h100 --framework megatron-core --tp 2 --pp 8 --terms"
    text = " ".join(good(line).out.split())
    config = good(f"{line} --format json").document["config"]
    send = next(term for term in config["terms"] if term["op"] == "send")
    assert send["latency_s"] == pytest.approx(5.1e-6 + 22e-6, rel=1e-6)
    assert send["bandwidth_bytes_per_s"] == pytest.approx(380e9 / 8, rel=1e-9)
    assert send["bus_bandwidth_bytes_per_s"] == send["bandwidth_bytes_per_s"]
    assert "bandwidth 380 GB/s: fixed = 27.1 µs, algbw = 47.5 GB/s." in text
    assert "2·H·S·b/TP" in text
    assert "TP·y" not in text


def test_replicated_attention_has_its_name() -> None:
    """Guards the gap to peak: over y ranks, all but one of the y shares of attention are overhead."""
    gaps = {}
    for y in (1, 4):
        document = good(f"explain --gpus 64 --model 20b --machine dgx-h100 --x 2 --y {y} --format json").document
        gaps[y] = {part["what"]: part["seconds"] for part in document["gap_to_peak"]}
    assert "attention replicated over y" not in gaps[1]
    # 3 · 4·S·Q FLOPs a token and layer of 32 layers, Q = 7,168, for each of y = 4 ranks and not one of them.
    useful = 3 * 4 * 2048 * 7168 * 32 * 8192 * 2048 / 64 / 989e12
    assert gaps[4]["attention replicated over y"] == pytest.approx(3 * useful, rel=1e-3)


def test_json_adds_up(document: Any) -> None:
    """Guards the numbers: terms, computation and memory each sum to the total that the search gave."""
    config = document["config"]
    assert document["schema"] == "axonn-tune/explain/1"
    assert sum(term["seconds"] for term in config["terms"]) == pytest.approx(config["communication_s"], rel=1e-12)
    exposed = sum(term["exposed_s"] for term in config["terms"])
    assert exposed == pytest.approx(config["exposed_communication_s"], rel=1e-6)
    assert sum(work["seconds"] for work in document["computation"]) == pytest.approx(config["compute_s"], rel=1e-9)
    assert sum(document["memory"]["items"].values()) == pytest.approx(config["memory_bytes"], rel=1e-9)
    for term in config["terms"]:
        priced = term["count"] * (term["latency_s"] + term["bytes"] / term["bandwidth_bytes_per_s"])
        assert term["seconds"] == pytest.approx(priced, rel=1e-9)
        assert term["hidden_s"] == max(term["seconds"] - term["exposed_s"], 0.0)


def test_overlaps_decide_what_hides_what() -> None:
    """Guards `overlapped with`: with an overlap off, its collectives are overlapped with nothing."""
    on, off = (
        good(f"explain {CASE} {extra} --format json").document["config"]["terms"]
        for extra in ("", "--no-overlap gather_prefetch")
    )
    gathers = [[term for term in terms if term["op"] == "all_gather" and term["axis"] == "z"] for terms in (on, off)]
    assert all(term["hidden_behind"] == "preceding layer's GEMMs" for term in gathers[0])
    assert all(term["hidden_behind"] is None for term in gathers[1])


def test_pick_explains_that_row() -> None:
    """Guards --pick: row N of the same search."""
    third = good("--gpus 64 --model 20b --top 3 --format json").document["configs"][2]
    config = good("explain --gpus 64 --model 20b --pick 3 --format json").document["config"]
    assert {key: config[key] for key in third if key != "terms"} == {key: third[key] for key in third if key != "terms"}


def test_launch_configs_are_explained_alone(tmp_path: Path) -> None:
    """Guards `explain launch.yaml`: it says everything, so other options are refused, not ignored."""
    path = tmp_path / "launch.yaml"
    good(f"--gpus 64 --model 20b --set machine.tiers.slingshot.bandwidth_gb_per_s=20 -o {path}")
    finished = run(f"explain {path}")
    assert finished.code == 0
    assert "machine profile is not the one" in finished.err
    refused = run(f"explain {path} --batch 64 --x 2")
    assert refused.code == 2
    assert "leave out --batch, --x" in refused.err


def test_one_gpu_sends_nothing() -> None:
    """Guards the smallest case: no collective, and a sentence that says so."""
    finished = good("explain --gpus 1 --model nano --machine dgx-a100")
    assert "no communication" in finished.out
    assert good("explain --gpus 1 --model nano --machine dgx-a100 --format json").document["config"]["terms"] == []
