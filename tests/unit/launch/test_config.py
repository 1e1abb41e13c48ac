"""Launch configs: complete, true to what was priced, and readable."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from axonn_tune import __version__
from axonn_tune.errors import DocumentError
from axonn_tune.grid import Grid
from axonn_tune.launch.config import build_launch, launch_text, write_launch
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.space import Problem
from axonn_tune.specs.catalog import available
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document, parse_document
from tests.unit.launch.cases import case


@pytest.mark.parametrize("machine", available("machine"))
@pytest.mark.parametrize("model", ["nano", "nano-llama", "llama3-8b", "80b"])
def test_what_is_written_loads_back_equal(tmp_path: Path, model: str, machine: str) -> None:
    """Guards that the runtime gets what the tuner meant, to the last digit, on every machine."""
    launch = case(model, machine, grid=Grid(x=2, y=2, z=2, data=2, order=("y", "data", "z", "x"))).launch
    write_launch(tmp_path / "launch.yaml", launch)
    assert load_document(tmp_path / "launch.yaml", schema=Launch) == launch


def test_provenance_leads_back_to_the_files() -> None:
    """Guards reproducibility: hashes of the texts, the command line, the version, UTC time."""
    built = case("nano", "localhost", command="axonn-tune --model 'a b'")
    made = built.launch.provenance
    assert made.model_sha256 == hashlib.sha256(built.model.path.read_bytes()).hexdigest()
    assert made.machine_sha256 == hashlib.sha256(built.machine.path.read_bytes()).hexdigest()
    assert (made.tool, made.version, made.command) == ("axonn-tune", __version__, "axonn-tune --model 'a b'")
    assert made.created == "2024-05-06T07:08:09+00:00"


def test_names_are_safe_for_folders_and_jobs() -> None:
    """Guards job and folder names against what a model may be called."""
    built = case()
    model = built.model.document.model_copy(update={"name": "../my model; rm -rf ~"})
    loaded = type(built.model)(model, built.model.path, built.model.sha256)
    workload = built.launch.workload
    pricing = search(Problem(model, built.machine.document, workload, gpus=4)).price(0)
    launch = build_launch(pricing, model=loaded, machine=built.machine, workload=workload, command="c")
    assert launch.name == "my-model-rm--rf-4"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("micro_batch: 1 ", "micro_batch: 2 ", r"data · z · micro_batch · grad_accumulation is 2 · 2 · 2 · 12 = 96"),
        ("kept_layers: 0", "kept_layers: 9", "kept_layers is 9, but the model has 2 layers"),
        ("name: PYTHONFAULTHANDLER", "name: OMP_NUM_THREADS", "environment sets OMP_NUM_THREADS more than once"),
        ("name: PYTHONFAULTHANDLER", "name: A=b", "must match pattern .*, not 'A=b'"),
        ("order: [x,", "order: [z,", "order must name each of x, y, z, data once"),
    ],
)
def test_edits_that_contradict_each_other_are_refused(old: str, new: str, message: str) -> None:
    """Guards against a hand-edited launch config that would train something else than it says."""
    text = launch_text(case().launch)
    assert text.count(old) == 1
    with pytest.raises(DocumentError, match=message.replace("·", ".")):
        parse_document(text.replace(old, new), schema=Launch)
