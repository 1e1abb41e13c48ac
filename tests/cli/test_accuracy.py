"""`axonn-tune accuracy` with rows of a file, its report, and the earlier words for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from axonn_tune import accuracy
from tests.cli.running import good, run

STEPS = (
    "id,dataset,gpu,gpu_mem_gb,n_gpus,gpus_per_node,framework,model,layers,hidden,heads,ffn,vocab,seq,gbs,mbs,tp,pp,dp,"
    "recompute,precision,step_s\n"
)


def step(name: str, *, gpu: str = "A100-SXM") -> str:
    """One row of 8 GPUs."""
    return f"{name},ours,{gpu},80,8,8,Megatron-LM,GPT 1.3B,24,2048,16,8192,51200,2048,64,2,1,1,8,none,bf16,1.0\n"


def test_without_plotly_nothing_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the extra: exit code 5 with what to install, before any row is read."""
    monkeypatch.setitem(sys.modules, "plotly", None)
    done = run(f"accuracy --rows {tmp_path}/none.csv --html {tmp_path}/r.html")
    assert done.code == 5
    assert "pip install '.[report]'" in done.err


def test_rows_on_a_profile_of_ones_own(tmp_path: Path) -> None:
    """Guards --machine: every row on that profile, warnings by id in the text, in JSON, and from Python alike."""
    profile, rows, report = tmp_path / "mine.yaml", tmp_path / "rows.csv", tmp_path / "r.html"
    profile.write_text(good("machines show dgx-h100").out.replace("name: dgx-h100", "name: mine"), "utf-8")
    rows.write_text(STEPS + step("one") + step("two", gpu="H100") + step("three", gpu="Abacus"), "utf-8")
    line = f"accuracy --rows {rows} --machine {profile}"
    said = good(f"{line} --html {report}").out
    assert said.startswith(f"steps priced on mine, {profile}\n")
    warning = "gpu is 'A100-SXM', the accelerator of mine is 'H100-SXM5-80GB'"
    assert [text for text in said.splitlines() if text.startswith("warning: ")] == [
        f"warning: one: {warning}",
        f"warning: three: {warning.replace('A100-SXM', 'Abacus')}",
    ]
    document = good(f"{line} --format json").document
    found = accuracy(rows, machine=profile)
    assert document["machine"] == "mine"
    assert [row["warnings"] for row in document["rows"]] == [list(one.warnings) for one in found.steps]
    assert len({row["predicted_s"] for row in document["rows"]}) == 1
    assert [row["predicted_s"] for row in document["rows"]] == [one.predicted_s for one in found.steps]
    assert "all on mine; 2 say that they ran elsewhere" in report.read_text("utf-8")


def test_a_misspelt_framework_is_named_with_the_nearest(tmp_path: Path) -> None:
    """Guards rows of unknown software: priced, with the nearest known word, as text and as JSON."""
    rows = tmp_path / "rows.csv"
    rows.write_text(STEPS + step("one").replace("Megatron-LM", "Megatorn-LM"), "utf-8")
    words = "unknown framework, priced as the mean of all known ones: Megatorn-LM, did you mean 'megatron'?"
    done = good(f"accuracy --rows {rows}")
    assert words in done.out.splitlines()
    earlier = good(f"validate --rows {rows}")
    assert (earlier.out, earlier.err) == (done.out, "This is now `axonn-tune accuracy --rows FILE`.\n")
    (row,) = good(f"accuracy --rows {rows} --format json").document["rows"]
    assert row["warnings"] == [words]
    assert row["predicted_s"] > 0.0
