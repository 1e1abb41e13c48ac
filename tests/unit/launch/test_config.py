"""Launch configs: complete, true to what was priced, and readable."""

from __future__ import annotations

import errno
import hashlib
import os
from datetime import datetime
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from axonn_tune import __version__
from axonn_tune.errors import DocumentError, EnvironmentProblem, UsageError
from axonn_tune.grid import Grid
from axonn_tune.launch.config import build_launch, launch_text, write_launch
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.space import Problem
from axonn_tune.specs.catalog import available, load_machine, load_model
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document, parse_document
from axonn_tune.specs.workload import Workload
from tests.cli.running import run
from tests.unit.launch.cases import case


@pytest.mark.parametrize("machine", available("machine"))
@pytest.mark.parametrize("model", ["nano", "nano-llama", "llama3-8b", "80b"])
def test_what_is_written_loads_back_equal(tmp_path: Path, model: str, machine: str) -> None:
    """Guards that the runtime gets what the tuner meant, to the last digit, on every machine."""
    launch = case(model, machine, grid=Grid(x=2, y=2, z=2, data=2, order=("y", "data", "z", "x"))).launch
    write_launch(tmp_path / "launch.yaml", launch)
    assert load_document(tmp_path / "launch.yaml", schema=Launch) == launch


def test_the_best_of_a_search_says_what_was_priced() -> None:
    """Guards the numbers: terms, totals and the chosen configuration are those of the price."""
    model, machine = load_model("nano"), load_machine("localhost")
    workload = Workload(global_batch=48, sequence_length=64)
    ranking = search(Problem(model.document, machine.document, workload, gpus=4))
    pricing = ranking.price(0)
    launch = build_launch(pricing, model=model, machine=machine, workload=workload, command="c")
    predicted = launch.predicted
    assert launch.grid.grid() == pricing.configuration.grid
    assert (launch.micro_batch, launch.recompute) == (
        pricing.configuration.micro_batch, pricing.configuration.recompute,
    )  # fmt: skip
    assert launch.grad_accumulation == ranking.candidate(0).accumulation
    assert launch.kept_layers == ranking.candidate(0).configuration.kept_layers
    assert predicted.iteration_s == pricing.iteration_s
    assert predicted.communication_s == pytest.approx(sum(term.seconds for term in predicted.terms), rel=1e-12)
    assert [(t.op, t.axis, t.layer, t.bytes) for t in predicted.terms] == [
        (t.op, t.axis, t.layer, t.bytes) for t in pricing.terms
    ]
    assert predicted.low_s is not None
    assert predicted.high_s is not None
    assert predicted.low_s < pricing.iteration_s < predicted.high_s
    assert predicted.mfu is not None
    assert 0 < predicted.mfu < 1


def test_provenance_leads_back_to_the_files() -> None:
    """Guards reproducibility: hashes of the texts, the command line, the version, UTC time."""
    built = case("nano", "localhost", command="axonn-tune --model 'a b'")
    made = built.launch.provenance
    assert made.model_sha256 == hashlib.sha256(built.model.path.read_bytes()).hexdigest()
    assert made.machine_sha256 == hashlib.sha256(built.machine.path.read_bytes()).hexdigest()
    assert (made.tool, made.version, made.command) == ("axonn-tune", __version__, "axonn-tune --model 'a b'")
    assert made.created == "2024-05-06T07:08:09+00:00"


def test_overrides_change_the_hash() -> None:
    """Guards that a machine changed on the command line is not taken for the shipped one."""
    changed = case(overrides=["launcher.ranks_per_node=4"]).launch.provenance
    assert changed.machine_sha256 != case().launch.provenance.machine_sha256
    assert changed.model_sha256 == case().launch.provenance.model_sha256


def test_a_launch_is_dated_now_unless_told() -> None:
    """Guards the stamp: it has a zone, and it is UTC."""
    built = case()
    pricing = search(
        Problem(built.model.document, built.machine.document, built.launch.workload, gpus=2)
    ).price(0)  # fmt: skip
    launch = build_launch(
        pricing, model=built.model, machine=built.machine, workload=built.launch.workload, command="c"
    )
    stamp = datetime.fromisoformat(launch.provenance.created)
    assert stamp.utcoffset() is not None
    assert not stamp.utcoffset()


def test_the_header_says_what_this_is() -> None:
    """Guards readability: name, arithmetic, numbering, prediction, how to run, and what is not there yet."""
    launch = case("80b", "perlmutter", grid=Grid(x=4, y=2, z=8, data=16, order=("y", "x", "z", "data"))).launch
    header = [line for line in launch_text(launch).splitlines()[:8] if line.startswith("#")]
    assert header[0].startswith("# 80b-1024: one configuration of 80b on 1024 ranks of perlmutter")
    assert "x·y·z·data = 4·2·8·16 = 1024 ranks, numbered with y, then x, then z, then data varying fastest" in header[1]
    assert header[2].startswith("# Predicted: step ")
    assert "80%: " in header[2]
    assert "--emit torchrun" in header[3]
    assert "axonn_tune.runtime once per rank" in header[4]


def test_sections_stand_apart() -> None:
    """Guards readability: an empty line before each section, none inside one, and comments on the keys."""
    lines = launch_text(case().launch).splitlines()
    assert lines[lines.index("grid:") - 2 : lines.index("grid:")] == ["", "# How the ranks are arranged."]
    assert all(after[:1] != " " for before, after in pairwise(lines) if not before)
    assert "micro_batch: 1  # Sequences one rank processes at a time." in lines


def test_names_are_safe_for_folders_and_jobs() -> None:
    """Guards job and folder names against what a model may be called."""
    built = case()
    model = built.model.document.model_copy(update={"name": "../my model; rm -rf ~"})
    loaded = type(built.model)(model, built.model.path, built.model.sha256)
    workload = built.launch.workload
    pricing = search(Problem(model, built.machine.document, workload, gpus=4)).price(0)
    launch = build_launch(pricing, model=loaded, machine=built.machine, workload=workload, command="c")
    assert launch.name == "my-model-rm--rf-4"


def test_a_small_world_takes_part_of_a_node() -> None:
    """Guards `ranks_per_node`: what is started, not what the node could hold."""
    assert case("nano", "perlmutter", grid=Grid(z=2)).launch.ranks_per_node == 2


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    """Guards what -o means: the file is this command's result."""
    path = tmp_path / "launch.yaml"
    path.write_text("old", encoding="utf-8")
    write_launch(path, case().launch)
    assert load_document(path, schema=Launch) == case().launch


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against half a launch config: exit code 5 and no file, not even a temporary one."""

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(EnvironmentProblem, match="No space left") as caught:
        write_launch(tmp_path / "launch.yaml", case().launch)
    assert caught.value.exit_code == 5
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_the_users_mistake(tmp_path: Path) -> None:
    """Guards the message: which folder is missing."""
    with pytest.raises(UsageError, match="there is no folder"):
        write_launch(tmp_path / "no" / "launch.yaml", case().launch)


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


def test_contradictions_are_refused_when_built_too() -> None:
    """Guards the schema itself: no launch config exists that does not fit together."""
    with pytest.raises(ValidationError, match="global_batch"):
        Launch.model_validate(case().launch.model_dump(by_alias=True) | {"grad_accumulation": 7})


def test_other_yaml_readers_see_the_same_grid() -> None:
    """Guards the key y, which YAML 1.1 takes for true."""
    read = yaml.safe_load(launch_text(case().launch))
    assert (read["grid"]["x"], read["grid"]["y"]) == (1, 1)
    assert read["grid"]["order"] == ["x", "y", "z", "data"]


def test_steps_that_the_runtime_does_not_run_are_refused(tmp_path: Path) -> None:
    """Guards against a prediction of one step and a run of another: other frameworks, and changed options."""
    path = tmp_path / "launch.yaml"
    words = f"--gpus 2 --model nano --machine localhost -o {path}"
    for more, why in (
        ("--framework nemo", "NeMo is priced only: there is no command for it"),
        ("--set step.dropout=true", "a launch config runs the bundled runtime's own step: leave out --set step.KEY"),
    ):
        finished = run(f"{words} {more}")
        assert finished.code == 2
        assert why in finished.err
        assert not path.exists()
