"""`axonn-tune validate` with launch configs, and `axonn-tune regress`: one rank for real, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from axonn_tune.specs.catalog import find
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.results import Measurements
from tests.cli.running import good, run

SEARCH = "--gpus 1 --model nano --batch 2 --precision fp32"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two configurations of one rank, run once, and folded into a profile."""
    folder = tmp_path_factory.mktemp("measured")
    shutil.copy(find("machine", "localhost"), folder / "mine.yaml")
    path = folder / "measured.yaml"
    launches = []
    for micro_batch in (1, 2):
        launches.append(str(folder / f"{micro_batch}.yaml"))
        good(f"{SEARCH} --machine {folder}/mine.yaml --micro-batch {micro_batch} -q -o {launches[-1]}")
    options = f"--machine {folder}/mine.yaml --repeats 2 --steps 4 --update -o {path}"
    done = good(f"validate {' '.join(launches)} {options}")
    (folder / "out.txt").write_text(done.out, "utf-8")
    (folder / "err.txt").write_text(done.err, "utf-8")
    return path


@pytest.mark.nightly
def test_two_runs_of_two_configurations(measured: Path) -> None:
    """Guards the whole of it on one rank: raw times of every run, equal losses, progress, the update."""
    found = load_document(measured, schema=Measurements)
    assert [len(one.runs) for one in found.configurations] == [2, 2]
    assert all(len(run.steps_s) == 2 and len(run.losses) == 4 for one in found.configurations for run in one.runs)
    assert [one.micro_batch for one in found.configurations] == [1, 2]
    out, err = ((measured.parent / name).read_text("utf-8") for name in ("out.txt", "err.txt"))
    assert "Every rank sent the expected collectives" in out
    assert "wrong" not in out
    assert "[4/4] x1·y1·z1·data1" in err
    assert "0:00 left" in err
    assert "accelerator." in err.partition("Changed in")[2]
    assert "Mean error of step in these runs:" in err
    profile = load_document(measured.parent / "mine.yaml", schema=Machine)
    assert profile.learned is not None
    assert profile.learned.evidence == (f"validate of {found.created[:10]}: 2 configurations on 1 rank",)


@pytest.mark.nightly
def test_record_and_check(measured: Path, tmp_path: Path) -> None:
    """Guards regress from end to end: recorded, passes; with no error allowed, fails with 4 and says where."""
    base = tmp_path / "base.yaml"
    good(f"regress {base} --record --measurement {measured} --reason first")
    done = good(f"regress {base} --measurement {measured} --junit {tmp_path}/j.xml --markdown {tmp_path}/m.md")
    assert "none beyond tolerance" in done.out
    assert (tmp_path / "j.xml").read_text("utf-8").count("<testsuite ") == 3
    assert "## axonn-tune regress" in (tmp_path / "m.md").read_text("utf-8")
    failed = run(f"regress {base} --floor step_error=0%")
    assert failed.code == 4
    assert "FAIL" in failed.out
    assert "1 of 4 accuracy" in failed.err
