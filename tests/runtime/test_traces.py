"""Traces and TensorBoard files of a real run: two ranks of a small model, beside their prediction."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.cli.main import main
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.traces import COMPUTE_LANE, communication_lane, term_name
from tests.runtime.test_run import ended, launch_file, recorded, start

STEPS = 5


def write_sink(path: Path, value: str) -> None:
    """Have a launch config ask for TensorBoard."""
    text = path.read_text("utf-8")
    assert "\nmetrics: {}" in text
    path.write_text(text.replace("\nmetrics: {}", f"\nmetrics: {{tensorboard: {value}}}"), encoding="utf-8")


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with launch.yaml and the run's folder `run`, whose steps 3 and 4 both ranks traced."""
    folder = tmp_path_factory.mktemp("traced")
    path = launch_file(folder, gpus=2, steps=STEPS).rename(folder / "launch.yaml")
    write_sink(path, "true")
    code, said = ended(start(path, folder / "run", "--trace", "2", "--trace-all"))
    assert code == 0, said
    return folder


@pytest.fixture(scope="module")
def merged(traced: Path) -> dict[str, Any]:
    """The trace of prediction and run."""
    path = traced / "both.json"
    assert main(["trace", str(traced / "launch.yaml"), str(traced / "run"), "-o", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return found


def spans_of(merged: dict[str, Any]) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Lane and event of every span, by process."""
    events = merged["traceEvents"]
    named = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    lanes = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    spans = [one for one in events if one["ph"] == "X"]
    return {name: [(lanes[pid, one["tid"]], one) for one in spans if one["pid"] == pid] for pid, name in named.items()}


def test_prediction_and_ranks_have_the_same_lanes_and_names(traced: Path, merged: dict[str, Any]) -> None:
    """Guards the promise of the merged file: the same words for the same things, so that they can be compared."""
    found = spans_of(merged)
    assert list(found) == ["predicted", "measured rank 0", "measured rank 1"]
    terms = load_document(traced / "launch.yaml", schema=Launch).predicted.terms
    names = {communication_lane(one.axis): set[str]() for one in terms}
    for one in terms:
        names[communication_lane(one.axis)].add(term_name(one.op, one.axis, one.phase, one.layer))
    for process, spans in found.items():
        for lane, wanted in names.items():
            assert {one["name"] for its, one in spans if its == lane} == wanted, process
        assert {lane for lane, _ in spans} == {COMPUTE_LANE, *names}
    predicted = {one["name"] for lane, one in found["predicted"] if lane == COMPUTE_LANE}
    for process in ("measured rank 0", "measured rank 1"):
        measured = {one["name"] for lane, one in found[process] if lane == COMPUTE_LANE}
        assert {name for name in measured if not name.startswith("wait: ")} <= predicted
        counted = [one for lane, one in found[process] if lane != COMPUTE_LANE]
        assert len(counted) == sum(term.count for term in terms)


def test_all_begin_with_the_step(merged: dict[str, Any]) -> None:
    """Guards alignment: each process has the same one step, at 0 for the first rank and the prediction."""
    step = f"step {merged['otherData']['step']}"
    begun = {}
    for process, spans in spans_of(merged).items():
        (whole,) = [one for _, one in spans if one["name"].startswith("step ")]
        assert whole["name"] == step
        assert all(whole["ts"] - 1 <= one["ts"] <= whole["ts"] + whole["dur"] for _, one in spans)
        begun[process] = whole["ts"]
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


def test_tensorboard_reads_what_the_metrics_say(traced: Path) -> None:
    """Guards the optional sink: every step's numbers and every collective's time, by rank 0 alone."""
    pytest.importorskip("tensorboard")
    folder = traced / "run" / "tensorboard"
    assert len(list(folder.iterdir())) == 1
    done = subprocess.run([sys.executable, "-c", READER, str(folder)], capture_output=True, text=True, check=True)
    scalars: dict[str, list[tuple[int, float]]] = json.loads(done.stdout)
    lines = recorded(traced / "run")
    assert len(lines) == STEPS
    for name in ("loss", "gradient_norm", "learning_rate", "tokens_per_s", "mfu", "memory_bytes", "step_s"):
        assert [step for step, _ in scalars[name]] == [line["step"] for line in lines]
        assert [value for _, value in scalars[name]] == pytest.approx([line[name] for line in lines], rel=1e-6)
    one = lines[-1]["terms"][0]
    name = term_name(one["op"], one["axis"], one["phase"], one["layer"])
    assert scalars[f"seconds/{name}"][-1][1] == pytest.approx(one["seconds"], rel=1e-6)
    assert scalars[f"exposed/{name}"][-1][1] == pytest.approx(one["exposed_s"], rel=1e-6)


def test_without_tensorboard_a_run_says_what_to_install(tmp_path: Path) -> None:
    """Guards the missing extra: exit code 5 before anything is trained."""
    path = launch_file(tmp_path, gpus=1)
    write_sink(path, "events")
    hidden = "import sys, importlib.util as u; f = u.find_spec; "
    hidden += "u.find_spec = lambda name, *rest: None if name == 'tensorboard' else f(name, *rest); "
    hidden += "from axonn_tune.runtime.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", hidden, str(path), "--directory", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert "pip install '.[tensorboard]'" in done.stderr
    assert not recorded(tmp_path / "run")
