"""Whole runs, as a user starts them: two ranks equal one, a rank is killed, a signal comes and what follows."""

from __future__ import annotations

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
from axonn_tune.runtime.mesh import require_world
from axonn_tune.runtime.start import rank_environment
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.results import Summary
from axonn_tune.specs.traces import COMPUTE_LANE, communication_lane, term_name

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


def wait_for_steps(directory: Path, count: int) -> None:
    """Until so many steps are recorded."""
    end = time.monotonic() + PATIENCE_S
    while len(recorded(directory)) < count:
        assert time.monotonic() < end, "no steps"
        time.sleep(0.05)


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
    stopped = start(launch, tmp_path / "stopped")
    wait_for_steps(tmp_path / "stopped", 2)
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


def test_terms_are_timed_and_shown_beside_the_prediction(tmp_path: Path) -> None:
    """Guards predicted vs. measured: each collective has a time on each rank, and all adds up."""
    path = launch_file(tmp_path, gpus=2)
    launch = load_document(path, schema=Launch)
    shown, said = start(path, tmp_path / "run", "--trace", "2").communicate(timeout=PATIENCE_S)
    planned = {(term.op, term.layer, term.phase): (term.count, term.bytes) for term in launch.predicted.terms}
    for rank in (0, 1):
        for line in recorded(tmp_path / "run", rank):
            terms: list[dict[str, Any]] = line["terms"]
            assert {(one["op"], one["layer"], one["phase"]): (one["count"], one["bytes"]) for one in terms} == planned
            assert sum(one["exposed_s"] for one in terms) == pytest.approx(line["exposed_communication_s"])
            assert line["compute_s"] + line["exposed_communication_s"] == pytest.approx(line["step_s"])
    summary = load_document(tmp_path / "run" / "summary.json", schema=Summary)
    assert {(one.op, one.layer, one.phase): (one.count, one.bytes) for one in summary.terms} == planned
    assert all(one.seconds and one.measured_s[0] > 0 for one in summary.terms)
    measured = summary.pairs.measured
    assert measured["communication_s"] < measured["step_s"], "one tier is busy for no longer than the step"
    assert measured["compute_s"] + measured["exposed_communication_s"] == pytest.approx(measured["step_s"])
    assert "predicted vs. measured" in shown, said
    assert "reduce_scatter" in shown
    require_trace(tmp_path / "run", {term_name(op, "z", phase, layer) for op, layer, phase in planned})
    assert load_document(tmp_path / "run" / "launch.yaml", schema=Launch) == launch
    require_evidence(tmp_path / "run", times=2 + len(planned))


def require_evidence(directory: Path, *, times: int) -> None:
    """What `learn` takes from the folder: step, computation and every collective, which the profile then has."""
    evidence = read_evidence(EvidenceRequest(paths=[directory]))
    (sample,) = evidence.samples
    assert len(sample.what) == times
    assert {"step", "computation"} < set(sample.what)
    found = learn(evidence.samples, evidence.machine)
    before, after = ({row.what: abs(getattr(row, when)) for row in found.rows} for when in ("before", "after"))
    assert after["step"] < min(0.2, before["step"])


def test_another_launch_config_in_the_folder_is_kept(tmp_path: Path) -> None:
    """Guards `--directory .`: a file of the user's own is no result of an earlier run."""
    mine = tmp_path / "launch.yaml"
    mine.write_text(launch_file(tmp_path, gpus=2, steps=7).read_text("utf-8"), "utf-8")
    before = mine.read_bytes()
    code, said = ended(start(launch_file(tmp_path, gpus=1), tmp_path))
    assert (code, mine.read_bytes()) == (2, before)
    assert "another launch config: name another folder with --directory" in said


def require_trace(directory: Path, names: set[str]) -> None:
    """Two steps of rank 0 alone, whose every collective has its name on the lane of its axis."""
    assert not (directory / "trace-rank1.json").exists()
    trace = json.loads((directory / "trace-rank0.json").read_text("utf-8"))
    assert trace["otherData"]["steps"] == [3, 4]
    lanes = {one["tid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "thread_name"}
    spans = [(lanes[one["tid"]], one) for one in trace["traceEvents"] if one["ph"] == "X"]
    assert {one["name"] for lane, one in spans if lane == communication_lane("z")} <= names
    computed = [one for lane, one in spans if lane == COMPUTE_LANE]
    assert {"step 3", "block 1, backward", "head and loss"} <= {one["name"] for one in computed}
    for step in computed[:1]:
        inside = [one for one in computed if one["ts"] < step["ts"] + step["dur"]]
        assert len(inside) > 20
        assert all(one["ts"] + one["dur"] <= step["ts"] + step["dur"] + 1 for one in inside)


def test_a_rank_imports_what_it_uses(tmp_path: Path) -> None:
    """Guards the start of ranks: torch's compiler and its checkpoints would double it, and this step uses neither."""
    program = (
        "import sys; from axonn_tune.runtime.__main__ import main; code = main(sys.argv[1:])\n"
        "unused = {'torch._dynamo', 'torch.distributed.checkpoint'}; print(code, sorted(unused & set(sys.modules)))"
    )
    words = [str(launch_file(tmp_path, gpus=1, steps=1)), "--directory", str(tmp_path / "run")]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "0 []", done.stderr


def test_a_killed_pipeline_resumes_to_the_bit(tmp_path: Path) -> None:
    """Guards stages: kill -9 of one ends all, and the run goes on from its checkpoint as if nothing had happened."""
    (tmp_path / "whole").mkdir()
    code, said = ended(start(launch_file(tmp_path / "whole", gpus=2, stages=2, steps=8), tmp_path / "whole"))
    assert code == 0, said
    launch = launch_file(tmp_path, gpus=2, stages=2, steps=5000, checkpoints=True, every=2)
    process = start(launch, tmp_path / "killed")
    wait_for_steps(tmp_path / "killed", 5)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    began = time.monotonic()
    assert ended(process)[0] == 6
    assert time.monotonic() - began < 10
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


@pytest.mark.parametrize("stages", [1, 2])
def test_killed_rank_ends_all_and_is_named(tmp_path: Path, stages: int) -> None:
    """Guards the promise: kill -9 of a rank ends the run within 10 s, with exit code 6 and that rank's number."""
    process = start(launch_file(tmp_path, gpus=2, steps=5000, stages=stages), tmp_path / "run")
    wait_for_steps(tmp_path / "run", 2)
    others = ranks_of(process)
    os.kill(others[1], signal.SIGKILL)
    began = time.monotonic()
    code, said = ended(process)
    assert time.monotonic() - began < 10
    assert code == 6
    assert "Error: rank 1: its process ended without a message" in said
    assert "Traceback" not in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in others)


def test_a_killed_run_takes_agent_and_ranks_with_it(tmp_path: Path) -> None:
    """Guards hosts: after kill -9 of `axonn-tune run` itself, which cannot tell anybody, nothing trains on."""
    process = start(launch_file(tmp_path, gpus=2, steps=5000), tmp_path / "run")
    wait_for_steps(tmp_path / "run", 2)
    left = [*children(process.pid), *ranks_of(process)]
    assert len(left) == 3
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    end = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in left):
        assert time.monotonic() < end, "still training"
        time.sleep(0.05)


def test_hanging_rank_ends_all_and_is_named(tmp_path: Path) -> None:
    """Guards the promise: a rank that stands still ends the run after hang_timeout_s, by name, and is gone."""
    path = launch_file(tmp_path, gpus=2, steps=5000)
    path.write_text(path.read_text("utf-8").replace("hang_timeout_s: 60", "hang_timeout_s: 3"), encoding="utf-8")
    process = start(path, tmp_path / "run")
    wait_for_steps(tmp_path / "run", 2)
    others = ranks_of(process)
    os.kill(others[1], signal.SIGSTOP)
    began = time.monotonic()
    code, said = ended(process)
    assert time.monotonic() - began < 20
    assert code == 6
    assert "Error: rank 1 did not answer: a collective took longer than 3 s" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in others)


def test_a_signal_without_checkpoints_says_that_nothing_is_saved(tmp_path: Path) -> None:
    """Guards whoever waits for 75 to start again: without a checkpoint directory there is nothing to go on from."""
    process = start(launch_file(tmp_path, gpus=2, steps=5000), tmp_path / "run")
    wait_for_steps(tmp_path / "run", 2)
    process.send_signal(signal.SIGTERM)
    code, said = ended(process)
    assert code == 6
    assert "nothing is saved, because the launch config has no checkpoint.directory" in said


def test_wrong_world_size_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    """Guards the first check."""
    launch = load_document(launch_file(tmp_path, gpus=2), schema=Launch)
    with pytest.raises(UsageError, match="1·1·2·1 needs 2 ranks, but 3 ranks were started"):
        require_world(launch.grid.grid(), 3)


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
