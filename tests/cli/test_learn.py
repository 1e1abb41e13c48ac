"""`axonn-tune learn` as a user runs it: on rows, a training log and a log of collectives."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import axonn_tune
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.machine import Learned, Machine
from tests.cli.running import good, run
from tests.unit.learning.test_collective_logs import TEXT
from tests.unit.learning.test_reading import EIGHT, MODEL, rows, titan

FACTS = [f"--fact={name}={value}" for name, value in MODEL.items()]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with evidence: rows, a log of torchtitan and one of nccl-tests."""
    monkeypatch.chdir(tmp_path)
    rows(tmp_path, step_s="3.6")
    titan(tmp_path)
    (tmp_path / "all_gather.txt").write_text(EIGHT, "utf-8")
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
    assert re.search(r"software\.eager\.\w+ +\S+ +\S+ +\d+% +\d+% +steps\.csv:2, step: \+", done.out)
    assert re.search(r"steps\.csv:2 +step +8 +3\.60? s +-\d+\.\d% +-?\+?\d+\.\d%", done.out)
    assert "This evidence says little or nothing about" in done.out
    assert "Assumed: base profile dgx-h100" in " ".join(done.out.split())
    found = load_document("ours.yaml", schema=Machine)
    assert found.name == "ours"
    assert known("ours.yaml").evidence[0].startswith("steps.csv: 1 step on 8 ranks (sha256 ")
    searched = good(
        "--gpus 16 --model llama3-8b --machine ours.yaml --framework torchtitan-eager --format json"
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
    assert any(words.startswith("base profile dgx-h100") for words in document["assumed"])


def test_a_training_log() -> None:
    """Guards a log: the lines that were read, what the log did not say, and what was left out."""
    done = run("learn titan.log --machine dgx-h100 -o ours.yaml", FACTS)
    assert done.code == 0, done.err
    assert "titan.log: 1 step on 8 ranks" in done.out
    said = " ".join(done.out.split())
    assert "Assumed: titan.log:4: not compiled: the log does not say that blocks are" in said
    assert re.search(r"Left out: titan\.log:\d+: step 80 took 2\.\d+ times the median", said)
    assert "eager" in load_document("ours.yaml", schema=Machine).software


def test_collectives_move_the_network_alone() -> None:
    """Guards logs of nccl-tests: a collective of its own on a tier, and no number of computation."""
    done = good("learn all_gather.txt --machine dgx-h100 --name here -o ours.yaml")
    assert "here, learned from all_gather.txt: 2 collectives" in done.out
    moved = [one.path for one in known("ours.yaml").numbers if one.moved_by]
    assert moved
    assert all(path.startswith(("library.", "tiers.nvlink.", "software.")) for path in moved)
    assert "accelerator.*" in done.out.partition("says little or nothing about")[2]


def test_collectives_are_shown_in_the_units_of_nccl_tests() -> None:
    """Guards the table: sizes in binary units, times with theirs, and the bus bandwidth as the log has it."""
    shown = good("learn all_gather.txt --machine dgx-h100 -o ours.yaml").out
    assert re.search(r"all_gather of \d+ ranks +\d+ MiB +\d+ +[\d.]+ [mµ]s +[\d.]+ +[+-]", shown)
    assert "bytes" not in shown
    assert "busbw" in shown
    assert "busbw" not in good("learn steps.csv -o ours.yaml").out


LATE = """# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4294967296
#  Rank  0 Group  0 Pid  1 on node001 device  0 [0x19] NVIDIA H200
{others}
#       size         count      type   redop    root     time   algbw   busbw #wrong
     1048576         16384     float    none      -1     62.8   16.70   15.66      0
     4194304         65536     float    none      -1     70.7   59.29   55.58      0
    16777216        262144     float    none      -1    110.3  152.17  142.66      0
    67108864       1048576     float    none      -1    243.5  275.59  258.36      0
   268435456       4194304     float    none      -1    844.3  317.95  298.08      0
  1073741824      16777216     float    none      -1   3057.5  351.18  329.23      0
# Out of bounds values : 0 OK
"""
"""An all-gather of two nodes: small messages take twice as long as the profile says, large ones do not."""


def test_small_messages_do_not_spoil_large_ones(tmp_path: Path) -> None:
    """Guards weights by size: libraries scatter at 1 to 16 MiB, so these may not move what is known of 64 MiB and more.

    With one weight for all sizes 64 MiB went from +7% to +30%.
    """
    others = "\n".join(
        f"#  Rank {rank:2} Group  0 Pid {rank + 1} on node00{1 + rank // 8} device {rank % 8:2} [0x19] NVIDIA H200"
        for rank in range(1, 16)
    )
    (tmp_path / "all_gather.txt").write_text(LATE.format(others=others), "utf-8")
    found, _ = axonn_tune.learn(["all_gather.txt"], machine="dgx-h200")
    large = [row for row in found.rows if row.what in ("64 MiB", "256 MiB", "1 GiB")]
    assert len(large) == 3
    assert all(abs(row.after) < 0.12 for row in large), large
    assert not any(row.worse for row in large)


def test_rows_that_get_worse_are_said(tmp_path: Path) -> None:
    """Guards against silent damage: a row that others outweigh is marked, and the worst is named with both errors."""
    text = (tmp_path / "steps.csv").read_text("utf-8")
    header, row = text.splitlines()
    met = row.replace(",3.6,", ",2.84,")
    (tmp_path / "steps.csv").write_text("\n".join([header, met, row, row, row]) + "\n", "utf-8")
    said = " ".join(good("learn steps.csv -o ours.yaml").out.split())
    assert re.search(
        r"1 of 4 rows are predicted worse than before \(marked worse\), most steps\.csv:2, step: \S+% became", said
    )


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
    moved = next(path for path in before if path.startswith("software.eager.") and before[path].moved_by)
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learn all_gather.txt -o x.yaml", "name the nearest with --machine, such as aws-p5 or dgx-h100"),
        ("learn titan.log --machine dgx-h100 -o x.yaml", "titan.log:4: the log does not state layers"),
        ("learn steps.csv --fact layerz=3 -o x.yaml", "--fact layerz: no such column, did you mean 'layers'?"),
        ("learn steps.csv --machine dgx-h1000 -o x.yaml", "did you mean 'dgx-h100'"),
        ("learn steps.csv --framework nemmo -o x.yaml", "did you mean 'nemo'"),
        ("learn nothing.csv -o x.yaml", "no file 'nothing.csv'"),
        ("learn two.txt --machine dgx-h100 -o x.yaml", "2 ranks on 2 nodes, but nodes of dgx-h100 hold 8"),
        ("learn -o x.yaml", "Missing argument"),
        ("learn steps.csv", "Missing option '-o'"),
        ("calibrate --from-logs all_gather.txt -o x.yaml", "axonn-tune learn all_gather.txt --machine NAME -o FILE"),
    ],
)
def test_mistakes_are_named(line: str, message: str, tmp_path: Path) -> None:
    """Guards exit code 2, and that nothing is written."""
    (tmp_path / "two.txt").write_text(TEXT, "utf-8")
    done = run(line)
    assert done.code == 2, done.err
    assert message in " ".join(done.err.split())
    assert not (tmp_path / "x.yaml").exists()


def test_rows_that_are_not_modelled_leave_nothing_to_learn_from(tmp_path: Path) -> None:
    """Guards evidence that holds nothing: the reason is said, and no profile is written."""
    rows(tmp_path, precision="fp8")
    done = run("learn steps.csv -o x.yaml")
    assert done.code == 2
    assert "nothing to learn from" in done.err
    assert "number format 'fp8' is not modelled" in done.err
    assert not (tmp_path / "x.yaml").exists()
