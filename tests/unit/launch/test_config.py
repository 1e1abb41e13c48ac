"""Launch configs: complete, true to what was priced, readable; and their environment."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from axonn_tune import __version__
from axonn_tune.errors import DocumentError
from axonn_tune.grid import AXES, Grid
from axonn_tune.launch.config import (
    build_launch,
    environment_lines,
    launch_environment,
    launch_text,
    write_launch,
)
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.space import Problem
from axonn_tune.specs.catalog import available, load_machine
from axonn_tune.specs.launch import Launch, LaunchVariable
from axonn_tune.specs.loading import load_document, parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.workload import Workload
from tests.unit.launch.cases import case

WORKLOAD = Workload(global_batch=8, sequence_length=64)


@pytest.mark.parametrize("machine", available("machine"))
@pytest.mark.parametrize("model", ["nano-llama", "80b"])
def test_what_is_written_loads_back_equal(tmp_path: Path, model: str, machine: str) -> None:
    """Guards that the runtime gets what the tuner meant, to the last digit, on every machine."""
    launch = case(model, machine, grid=Grid(x=2, y=2, z=2, data=2, order=("y", "data", "z", "x"))).launch
    write_launch(tmp_path / "launch.yaml", launch)
    assert load_document(tmp_path / "launch.yaml", schema=Launch) == launch


def test_provenance_leads_back_to_the_files() -> None:
    """Guards reproducibility: hashes of the texts, the command line, the version, UTC time; and a name that is safe
    for folders and jobs, whatever the model is called."""
    built = case("nano", "localhost", command="axonn-tune --model 'a b'")
    made = built.launch.provenance
    for sha256, path in ((made.model_sha256, built.model.path), (made.machine_sha256, built.machine.path)):
        assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (made.tool, made.version, made.command) == ("axonn-tune", __version__, "axonn-tune --model 'a b'")
    assert made.created == "2024-05-06T07:08:09+00:00"
    model = built.model.document.model_copy(update={"name": "../my model; rm -rf ~"})
    loaded = type(built.model)(model, built.model.path, built.model.sha256)
    pricing = search(Problem(model, built.machine.document, built.launch.workload, gpus=4)).detail(0)
    assert build_launch(pricing, model=loaded, machine=built.machine, command="c").name == "my-model-rm--rf-4"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("micro_batch: 1 ", "micro_batch: 2 ", r"data · z · micro_batch · grad_accumulation is 2 · 2 · 2 · 12 = 96"),
        ("kept_layers: 0", "kept_layers: 9", "kept_layers is 9, but the model has 2 layers"),
        ("name: PYTHONFAULTHANDLER", "name: OMP_NUM_THREADS", "environment sets OMP_NUM_THREADS more than once"),
        ("name: PYTHONFAULTHANDLER", "name: A=b", "must match pattern .*, not 'A=b'"),
        ("order: [x,", "order: [z,", "order must name each of x, y, z, data once"),
        ("pipeline_order: 1f1b", "pipeline_order: zb1p", "zb1p needs 2 stages or more, and as many micro-batches"),
    ],
)
def test_edits_that_contradict_each_other_are_refused(old: str, new: str, message: str) -> None:
    """Guards against a hand-edited launch config that would train something else than it says."""
    text = launch_text(case().launch)
    assert text.count(old) == 1
    with pytest.raises(DocumentError, match=message.replace("·", ".")):
        parse_document(text.replace(old, new), schema=Launch)


@pytest.mark.parametrize(
    ("grid", "queues"), [(Grid(x=2), "8"), (Grid(pipeline=4, order=(*AXES, "pipeline")), "32")], ids=str
)
def test_each_stream_has_a_hardware_queue(grid: Grid, queues: str) -> None:
    """Guards messages between stages: with fewer queues than streams one that waits would hold up others."""
    found = launch_environment(load_machine("dgx-h100").document, workload=WORKLOAD, grid=grid)
    assert {one.name: one.value for one in found}["CUDA_DEVICE_MAX_CONNECTIONS"] == queues


@pytest.mark.parametrize("name", ["A; rm -rf ~ #", "A$(rm)", "A`rm`", "A\nrm", "A\n", "A B", "1A", "é", ""])
def test_names_no_shell_takes_are_refused(name: str) -> None:
    """Guards the shell against a profile: the name is code in every framework's script, so the schema checks it."""
    listed = f"launcher:\n  environment: [{{name: {json.dumps(name)}, value: x, why: y}}]\n"
    with pytest.raises(DocumentError, match=r"(?s)launcher\.environment\..*must match pattern"):
        parse_document(f"schema: axonn-tune/machine/1\nname: m\nextends: localhost\n{listed}", schema=Machine)


def test_values_and_reasons_reach_bash_unchanged() -> None:
    """Guards quoting: whatever a value holds is the value, and a reason stays a comment."""
    value = "a b'c\"d$(touch pwned)`x`\\n\n#e*"
    odd = LaunchVariable(name="ODD", value=value, why="one\nexport ODD=two\u2028export ODD=three", purpose="site")
    script = "\n".join([*environment_lines([odd]), 'printf "%s" "$ODD"'])
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, timeout=10)
    assert done.stdout == value


def test_every_variable_is_documented() -> None:
    """Guards the table of variables in docs/launch.md: those that are set without the machine asking."""
    page = (Path(__file__).parents[3] / "docs" / "launch.md").read_text("utf-8")
    section = page.split("## Environment\n")[1].split("\n## ")[0]
    rows = {line for line in section.splitlines() if line.startswith("| `")}
    documented = {row.replace("| both |", f"| {backend} |") for row in rows for backend in ("nccl", "gloo")}
    expected = set()
    for name in ("perlmutter", "localhost"):
        machine = load_machine(name).document
        bare = machine.model_copy(update={"launcher": machine.launcher.model_copy(update={"environment": ()})})
        for one in launch_environment(bare, workload=WORKLOAD, grid=Grid(x=2)):
            expected.add(f"| `{one.name}` | {machine.launcher.backend} | {one.purpose} | {one.why} |")
    assert documented == expected, "the rows should be:\n" + "\n".join(sorted(expected))
