"""Whole runs, as a user starts them: two ranks equal one, a rank is killed, a signal comes and what follows."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.cli.main import main
from axonn_tune.errors import UsageError
from axonn_tune.learning.learn import learn
from axonn_tune.learning.reading import EvidenceRequest, read_evidence
from axonn_tune.runtime.start import RunOptions, rank_environment, run_rank
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.results import Summary
from axonn_tune.specs.traces import communication_lane, term_name
from axonn_tune.vocabulary import COMPUTE_LANE

STEPS, PATIENCE_S = 6, 90.0


def launch_file(
    folder: Path, *, gpus: int, checkpoints: bool = False, steps: int = STEPS, stages: int = 1, every: int = 1000
) -> Path:
    """A launch config of nano in fp64, small enough for a few steps a second."""
    path = folder / f"launch-{gpus}.yaml"
    chosen = ["--gpus", str(gpus), "--model", "nano", "--machine", "localhost", "--precision", "fp64", "--batch", "4"]
    axes = ["--x", "1", "--y", "1", "--z", str(gpus // stages), "--data", "1"]
    axes += ["--pipeline", str(stages)] if stages > 1 else []
    assert main([*chosen, *axes, "--micro-batch", "1", "-q", "-o", str(path)]) == 0
    text = path.read_text("utf-8").replace("\nsteps: 100", f"\nsteps: {steps}")
    if checkpoints:
        text = text.replace("\ncheckpoint:", f"\ncheckpoint:\n  directory: {folder / 'checkpoints'}")
        text = text.replace("every_steps: 1000", f"every_steps: {every}")
    path.write_text(text, encoding="utf-8")
    return path


def start(launch: Path, directory: Path, *options: str) -> subprocess.Popen[str]:
    """`axonn-tune run`, as a process."""
    command = [sys.executable, "-m", "axonn_tune", "run", str(launch), "--directory", str(directory), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Exit code and what it said."""
    _, said = process.communicate(timeout=PATIENCE_S)
    return process.returncode, said


def recorded(directory: Path, rank: int = 0) -> list[dict[str, Any]]:
    """The steps in a rank's metrics."""
    path = directory / f"metrics-rank{rank}.jsonl"
    if not path.exists():
        return []
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    return [line for line in lines if "step" in line]


def training(launch: Path, directory: Path, *, steps: int = 2) -> subprocess.Popen[str]:
    """`axonn-tune run`, once it has recorded so many steps."""
    process, end = start(launch, directory), time.monotonic() + PATIENCE_S
    while len(recorded(directory)) < steps:
        assert time.monotonic() < end, "no steps"
        time.sleep(0.05)
    return process


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the ranks: children of the agent, which is the child of `run`."""
    (agent,) = children(process.pid)
    return children(agent)


def children(pid: int) -> list[int]:
    """Process ids of a process' children, oldest first."""
    return sorted(int(one) for path in Path(f"/proc/{pid}/task").glob("*/children") for one in path.read_text().split())


def test_stopped_and_resumed_run_of_two_ranks_equals_one_of_one(tmp_path: Path) -> None:
    """Guards the loop: USR2 saves and ends with 75, the next run goes on, and all steps are those of a serial run."""
    alone = start(launch_file(tmp_path, gpus=1), tmp_path / "alone")
    assert ended(alone)[0] == 0
    launch = launch_file(tmp_path, gpus=2, checkpoints=True, steps=500)
    stopped = training(launch, tmp_path / "stopped")
    stopped.send_signal(signal.SIGUSR2)
    code, said = ended(stopped)
    assert code == 75, said
    assert "state is saved" in said
    done = recorded(tmp_path / "stopped")
    assert len(recorded(tmp_path / "stopped", rank=1)) == len(done)
    text = launch.read_text("utf-8").replace("\nsteps: 500", f"\nsteps: {len(done) + 2}")
    launch.write_text(text, encoding="utf-8")
    code, said = ended(start(launch, tmp_path / "resumed"))
    assert code == 0, said
    both = [*done, *recorded(tmp_path / "resumed")]
    assert [line["step"] for line in both] == list(range(1, len(done) + 3))
    for found, wanted in zip(both, recorded(tmp_path / "alone"), strict=False):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-10)
        assert found["gradient_norm"] == pytest.approx(wanted["gradient_norm"], rel=1e-8)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with launch.yaml and the folder `run` of two ranks that traced two steps; and what the run printed."""
    folder = tmp_path_factory.mktemp("traced")
    path = launch_file(folder, gpus=2).rename(folder / "launch.yaml")
    text = path.read_text("utf-8")
    assert "\nmetrics: {}" in text
    path.write_text(text.replace("\nmetrics: {}", "\nmetrics: {tensorboard: true}"), encoding="utf-8")
    process = start(path, folder / "run", "--trace", "2", "--trace-all")
    shown, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    return folder, shown


@pytest.mark.nightly
def test_terms_are_timed_and_shown_beside_the_prediction(traced: tuple[Path, str]) -> None:
    """Guards predicted vs. measured: each collective has a time on each rank, and all adds up; `learn` reads it all."""
    folder, shown = traced[0] / "run", traced[1]
    launch = load_document(traced[0] / "launch.yaml", schema=Launch)
    planned = {(term.op, term.layer, term.phase): (term.count, term.bytes) for term in launch.predicted.terms}
    for rank in (0, 1):
        for line in recorded(folder, rank):
            terms: list[dict[str, Any]] = line["terms"]
            assert {(one["op"], one["layer"], one["phase"]): (one["count"], one["bytes"]) for one in terms} == planned
            assert sum(one["exposed_s"] for one in terms) == pytest.approx(line["exposed_communication_s"])
            assert line["compute_s"] + line["exposed_communication_s"] == pytest.approx(line["step_s"])
    summary = load_document(folder / "summary.json", schema=Summary)
    assert {(one.op, one.layer, one.phase): (one.count, one.bytes) for one in summary.terms} == planned
    assert all(one.seconds and one.measured_s[0] > 0 for one in summary.terms)
    measured = summary.pairs.measured
    assert measured["communication_s"] < measured["step_s"], "one tier is busy for no longer than the step"
    assert measured["compute_s"] + measured["exposed_communication_s"] == pytest.approx(measured["step_s"])
    assert "predicted vs. measured" in shown
    assert "reduce_scatter" in shown
    assert load_document(folder / "launch.yaml", schema=Launch) == launch
    evidence = read_evidence(EvidenceRequest(paths=[folder]))
    (sample,) = evidence.samples
    assert len(sample.what) == 2 + len(planned)
    assert {"step", "computation"} < set(sample.what)
    found = learn(evidence.samples, evidence.machine)
    before, after = ({row.what: abs(getattr(row, when)) for row in found.rows} for when in ("before", "after"))
    assert after["step"] < min(0.2, before["step"])


def test_prediction_and_ranks_have_the_same_lanes_and_names(traced: tuple[Path, str]) -> None:
    """Guards the merged trace: the same words for the same things, and all begin with the same one step.

    It is at 0 for the first rank and the prediction.
    """
    path = traced[0] / "both.json"
    assert main(["trace", str(traced[0] / "launch.yaml"), str(traced[0] / "run"), "-o", str(path)]) == 0
    merged = json.loads(path.read_text("utf-8"))
    events = merged["traceEvents"]
    processes = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert list(processes.values()) == ["predicted", "measured rank 0", "measured rank 1"]
    lanes = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    terms = load_document(traced[0] / "launch.yaml", schema=Launch).predicted.terms
    names = {communication_lane(one.axis): set[str]() for one in terms}
    for one in terms:
        names[communication_lane(one.axis)].add(term_name(one.op, one.axis, one.phase, one.layer))
    computed, begun = dict[str, set[str]](), dict[str, float]()
    for number, process in processes.items():
        spans = [(lanes[number, one["tid"]], one) for one in events if one["ph"] == "X" and one["pid"] == number]
        assert {lane for lane, _ in spans} == {COMPUTE_LANE, *names}
        for lane, wanted in names.items():
            assert {one["name"] for its, one in spans if its == lane} == wanted, process
        counted = [one for lane, one in spans if lane != COMPUTE_LANE]
        assert process == "predicted" or len(counted) == sum(term.count for term in terms)
        computed[process] = {one["name"] for lane, one in spans if lane == COMPUTE_LANE}
        (whole,) = [one for _, one in spans if one["name"].startswith("step ")]
        assert whole["name"] == f"step {merged['otherData']['step']}"
        assert all(whole["ts"] - 1 <= one["ts"] <= whole["ts"] + whole["dur"] for _, one in spans)
        begun[process] = whole["ts"]
    for process, found in computed.items():
        assert {name for name in found if not name.startswith("wait: ")} <= computed["predicted"], process
    assert begun["predicted"] == 0.0
    assert min(begun["measured rank 0"], begun["measured rank 1"]) == pytest.approx(0.0, abs=1.0)
    assert max(begun.values()) < 1e6


READER = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
print(json.dumps({tag: [[one.step, one.value] for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}))
"""


def test_tensorboard_reads_what_the_metrics_say(traced: tuple[Path, str]) -> None:
    """Guards the optional sink: every step's numbers and every collective's time, by rank 0 alone."""
    pytest.importorskip("tensorboard")
    folder = traced[0] / "run" / "tensorboard"
    assert len(list(folder.iterdir())) == 1
    done = subprocess.run([sys.executable, "-c", READER, str(folder)], capture_output=True, text=True, check=True)
    scalars: dict[str, list[tuple[int, float]]] = json.loads(done.stdout)
    lines = recorded(traced[0] / "run")
    assert len(lines) == STEPS
    for name in ("loss", "gradient_norm", "learning_rate", "tokens_per_s", "mfu", "memory_bytes", "step_s"):
        assert [step for step, _ in scalars[name]] == [line["step"] for line in lines]
        assert [value for _, value in scalars[name]] == pytest.approx([line[name] for line in lines], rel=1e-6)
    one = lines[-1]["terms"][0]
    name = term_name(one["op"], one["axis"], one["phase"], one["layer"])
    assert scalars[f"seconds/{name}"][-1][1] == pytest.approx(one["seconds"], rel=1e-6)
    assert scalars[f"exposed/{name}"][-1][1] == pytest.approx(one["exposed_s"], rel=1e-6)


def test_a_run_that_cannot_begin_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a launch config of the user's own in the folder, which is kept, and TensorBoard where it is missing."""
    mine = tmp_path / "launch.yaml"
    path = launch_file(tmp_path, gpus=1)
    mine.write_text(launch_file(tmp_path, gpus=2, steps=7).read_text("utf-8"), "utf-8")
    before = mine.read_bytes()
    assert run_rank(str(path), RunOptions(directory=tmp_path)) == 2
    assert mine.read_bytes() == before
    assert "another launch config: name another folder with --directory" in capsys.readouterr().err
    path.write_text(path.read_text("utf-8").replace("\nmetrics: {}", "\nmetrics: {tensorboard: events}"), "utf-8")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_rank(str(path), RunOptions(directory=tmp_path / "run")) == 5
    assert "pip install '.[tensorboard]'" in capsys.readouterr().err
    assert not recorded(tmp_path / "run")


def test_a_rank_imports_what_it_uses(tmp_path: Path) -> None:
    """Guards the start of ranks: torch's compiler and its checkpoints would double it, and this step uses neither."""
    program = (
        "import sys; from axonn_tune.runtime.__main__ import main; code = main(sys.argv[1:])\n"
        "unused = {'torch._dynamo', 'torch.distributed.checkpoint'}; print(code, sorted(unused & set(sys.modules)))"
    )
    words = [str(launch_file(tmp_path, gpus=1, steps=1)), "--directory", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


@pytest.mark.nightly
def test_a_killed_pipeline_resumes_to_the_bit(tmp_path: Path) -> None:
    """Guards stages: kill -9 of one ends all, and the run goes on from its checkpoint as if nothing had happened."""
    (tmp_path / "whole").mkdir()
    code, said = ended(start(launch_file(tmp_path / "whole", gpus=2, stages=2, steps=8), tmp_path / "whole"))
    assert code == 0, said
    launch = launch_file(tmp_path, gpus=2, stages=2, steps=5000, checkpoints=True, every=2)
    process = training(launch, tmp_path / "killed", steps=5)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    assert ended(process)[0] == 6
    launch.write_text(launch.read_text("utf-8").replace("steps: 5000", "steps: 8"), encoding="utf-8")
    shutil.rmtree(tmp_path / "killed")
    for newer in (tmp_path / "checkpoints").glob("step-*"):
        if newer.name not in ("step-2", "step-4"):
            shutil.rmtree(newer)
    code, said = ended(start(launch, tmp_path / "resumed"))
    assert code == 0, said
    wanted = {line["step"]: (line["loss"], line["gradient_norm"]) for line in recorded(tmp_path / "whole")}
    resumed = {line["step"]: (line["loss"], line["gradient_norm"]) for line in recorded(tmp_path / "resumed")}
    assert resumed == {step: wanted[step] for step in resumed}
    assert set(resumed) >= {5, 6, 7, 8}


@pytest.mark.parametrize(
    ("number", "stages", "code", "within_s", "said"),
    [
        (signal.SIGKILL, 1, 6, 10, "Error: rank 1: its process ended without a message"),
        pytest.param(*(signal.SIGKILL, 2, 6, 10, "Error: rank 1: its process ended"), marks=pytest.mark.nightly),
        (signal.SIGSTOP, 1, 6, 20, "Error: rank 1 did not answer: a collective took longer than 3 s"),
    ],
)
def test_a_killed_or_hanging_rank_ends_all_and_is_named(
    number: signal.Signals, stages: int, code: int, within_s: float, said: str, tmp_path: Path
) -> None:
    """Guards the promise: a rank that is killed or stands still ends the run, with its number and exit code 6.

    Within 10 s after kill -9, and after hang_timeout_s where it stands still; no process stays.
    """
    path = launch_file(tmp_path, gpus=2, steps=5000, stages=stages)
    path.write_text(path.read_text("utf-8").replace("hang_timeout_s: 60", "hang_timeout_s: 3"), encoding="utf-8")
    process = training(path, tmp_path / "run")
    others = ranks_of(process)
    os.kill(others[1], number)
    began = time.monotonic()
    found, shown = ended(process)
    assert time.monotonic() - began < within_s
    assert found == code
    assert said in shown
    assert "Traceback" not in shown
    assert not any(Path(f"/proc/{pid}").exists() for pid in others)


def test_a_killed_run_takes_agent_and_ranks_with_it(tmp_path: Path) -> None:
    """Guards hosts: after kill -9 of `axonn-tune run` itself, which cannot tell anybody, nothing trains on."""
    process = training(launch_file(tmp_path, gpus=2, steps=5000), tmp_path / "run")
    left = [*children(process.pid), *ranks_of(process)]
    assert len(left) == 3
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    end = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() < end, "still training"
        time.sleep(0.05)


@pytest.mark.nightly
def test_a_signal_without_checkpoints_says_that_nothing_is_saved(tmp_path: Path) -> None:
    """Guards whoever waits for 75 to start again: without a checkpoint directory there is nothing to go on from."""
    process = training(launch_file(tmp_path, gpus=2, steps=5000), tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == 6
    assert "nothing is saved, because the launch config has no checkpoint.directory" in said


def test_place_is_torchruns_then_slurms_then_alone() -> None:
    """Guards joining a world."""
    master = {"MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **master}
    slurm = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1", **master}
    assert rank_environment({**slurm, **torchrun}).rank == 3
    assert rank_environment(slurm).rank == 5
    assert rank_environment({}).world == 1
    with pytest.raises(UsageError, match="MASTER_PORT must be too"):
        rank_environment({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "here"})
