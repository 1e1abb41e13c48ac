"""`axonn-tune learn` as a user runs it: on rows, a training log and a log of collectives."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import axonn_tune
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.machine import Learned, Machine
from tests.cli.running import good, run

EVIDENCE = Path(__file__).parents[1] / "fixtures" / "evidence"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with evidence: a row that is slower than was published, and a log of nccl-tests."""
    monkeypatch.chdir(tmp_path)
    text = (EVIDENCE / "steps.csv").read_text("utf-8").replace(",2.8435,", ",3.6,")
    (tmp_path / "steps.csv").write_text(text, "utf-8")
    shutil.copy(EVIDENCE / "nccl.txt", tmp_path / "all_gather.txt")
    return tmp_path


def known(path: str) -> Learned:
    """What a written profile has learned."""
    found = load_document(path, schema=Machine).learned
    assert found is not None
    return found


def test_rows() -> None:
    """Guards the whole: numbers before and after, the row's error, what is silent, and a profile to search with."""
    done = good("learn steps.csv -o ours.yaml")
    assert done.out.startswith("ours, learned from steps.csv: 1 step on 8 ranks\n")
    assert "Wrote ours.yaml." in done.err
    assert re.search(r"software\.torchtitan-eager\.\w+ +\S+ +\S+ +\d+% +\d+% +steps\.csv:2, step: \+", done.out)
    assert re.search(r"steps\.csv:2 +step +8 +3\.60? s +-\d+\.\d% +-?\+?\d+\.\d%", done.out)
    assert "This evidence says little or nothing about" in done.out
    assert "Assumed: base profile grand-teton-h100" in " ".join(done.out.split())
    found = load_document("ours.yaml", schema=Machine)
    assert found.name == "ours"
    assert known("ours.yaml").evidence[0].startswith("steps.csv: 1 step on 8 ranks (sha256 ")
    searched = good(
        "--gpus 16 --model llama3-8b --machine ours.yaml --framework torchtitan-eager --top 1 --format json"
    ).document
    best = searched["configs"][0]
    assert best["low_s"] < best["iteration_s"] < best["high_s"]


def test_json_has_what_the_text_has() -> None:
    """Guards `axonn-tune/learning/2`: numbers that moved, every row with its errors, and the profile written."""
    done = good("learn steps.csv -o ours.yaml --format json")
    document, learned = done.document, {one.path: one for one in known("ours.yaml").numbers}
    assert document["schema"] == "axonn-tune/learning/2"
    assert document["numbers"]
    for number in document["numbers"]:
        assert number["value"] == learned[number["path"]].value != number["prior"]
        assert number["moved_by"].startswith("steps.csv:2, step: ")
    (row,) = document["rows"]
    assert abs(row["after"]["error"]) < abs(row["before"]["error"])
    assert set(document["silent"]) <= set(learned)
    assert any(words.startswith("base profile grand-teton-h100") for words in document["assumed"])


def test_collectives_move_the_network_alone() -> None:
    """Guards logs of nccl-tests: a collective of its own on a tier, and no number of computation."""
    done = good("learn all_gather.txt --machine dgx-h100 --name here -o ours.yaml")
    assert "here, learned from all_gather.txt: 2 collectives" in done.out
    moved = [one.path for one in known("ours.yaml").numbers if one.moved_by]
    assert moved
    assert all(path.startswith(("library.", "tiers.nvlink.", "software.")) for path in moved)
    assert "accelerator.*" in done.out.partition("says little or nothing about")[2]


def test_small_messages_do_not_spoil_large_ones(tmp_path: Path) -> None:
    """Guards weights by size: libraries scatter at 1 to 16 MiB, so these may not move what is known of 64 MiB and more.

    Small messages of two nodes take twice as long as the profile says; with one weight for all, 64 MiB went to +30%.
    """
    times_us = {1: 62.8, 4: 70.7, 16: 110.3, 64: 243.5, 256: 844.3, 1024: 3057.5}
    lines = ["# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4294967296"]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid {rank + 1} on node00{1 + rank // 8} device {rank % 8:2} [0x19] NVIDIA H200"
        for rank in range(16)
    ]
    lines += ["#       size         count      type   redop    root     time   algbw   busbw #wrong"]
    lines += [
        f"{size << 20:12} {size << 14:12} float none -1 {took:9} {(size << 20) / took / 1e3:.2f} "
        f"{(size << 20) / took / 1e3 * 15 / 16:.2f} 0"
        for size, took in times_us.items()
    ]
    (tmp_path / "all_gather.txt").write_text("\n".join([*lines, "# Out of bounds values : 0 OK", ""]), "utf-8")
    found, _ = axonn_tune.learn(["all_gather.txt"], machine="dgx-h200")
    large = [row for row in found.rows if row.what in ("64 MiB", "256 MiB", "1 GiB")]
    assert len(large) == 3
    assert all(abs(row.after) < 0.12 for row in large), large


def test_the_second_time_goes_on_from_the_first() -> None:
    """Guards learning bit by bit: what was learned is the next prior, and evidence adds up."""
    good("learn steps.csv -o once.yaml")
    good("learn all_gather.txt --machine once.yaml -o twice.yaml")
    once, twice = known("once.yaml"), known("twice.yaml")
    assert [one.partition(" (sha256")[0] for one in twice.evidence] == [
        "steps.csv: 1 step on 8 ranks",
        "all_gather.txt: 2 collectives",
    ]
    again, double = run("learn steps.csv --machine twice.yaml -o 3.yaml"), run("learn steps.csv ./steps.csv -o 3.yaml")
    assert again.code == double.code == 2
    assert "has learned from steps.csv" in again.err
    assert "is the same evidence as" in double.err
    before, after = ({one.path: one for one in found.numbers} for found in (once, twice))
    assert set(before) < set(after)
    for path, one in before.items():
        assert after[path].prior == one.prior
        assert after[path].spread <= 1.01 * one.spread
    moved = next(path for path in before if path.startswith("software.torchtitan-eager.") and before[path].moved_by)
    assert after[moved].value == pytest.approx(before[moved].value, rel=0.02)
    good("machines check twice.yaml")


def test_what_contradicts_the_rest_is_named(tmp_path: Path) -> None:
    """Guards against a wrong row: of three, the one at half the time counts little."""
    text = (tmp_path / "steps.csv").read_text("utf-8").replace(",3.6,", ",2.84,")
    header, row = text.splitlines()
    wrong = row.replace(",2.84,", ",0.9,")
    (tmp_path / "steps.csv").write_text("\n".join([header, row, row, row, wrong]) + "\n", "utf-8")
    said = " ".join(good("learn steps.csv -o ours.yaml").out.split())
    assert re.search(
        r"steps\.csv:5 \(step\) was measured \d+% below what the profile and all evidence together predict",
        said,
    )


def test_rows_that_are_not_modelled_leave_nothing_to_learn_from(tmp_path: Path) -> None:
    """Guards evidence that holds nothing: the reason is said, and no profile is written."""
    text = (tmp_path / "steps.csv").read_text("utf-8").replace(",bf16,", ",int8,")
    (tmp_path / "steps.csv").write_text(text, "utf-8")
    done = run("learn steps.csv -o x.yaml")
    assert done.code == 2
    assert "nothing to learn from" in done.err
    assert "number format 'int8' is not modelled" in done.err
    assert not (tmp_path / "x.yaml").exists()
