"""Writing: documents that load back equal, and files that are whole or not there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
import yaml

from axonn_tune.errors import EnvironmentProblem, UsageError
from axonn_tune.specs.catalog import available, load_machine, load_model
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.writing import to_yaml, write_text_atomically
from tests.unit.specs.launches import example_launch

MACHINE = str(Path(__file__).parent / "data" / "twotier.yaml")


@pytest.mark.parametrize("name", available("model"))
def test_shipped_models_load_back_equal(name: str) -> None:
    """Guards that what is written means what was loaded, for every shipped model."""
    model = load_model(name).document
    assert parse_document(to_yaml(model), schema=Model) == model


@pytest.mark.parametrize("name", [*available("machine"), MACHINE])
def test_machines_load_back_equal(name: str) -> None:
    """The same for every machine, with its nested sections, lists and sources."""
    machine = load_machine(name).document
    assert parse_document(to_yaml(machine), schema=Machine) == machine


def test_a_launch_document_loads_back_equal() -> None:
    """Guards nulls that are not the default, tiny floats, and text that looks like something else."""
    launch = example_launch()
    text = to_yaml(launch)
    assert parse_document(text, schema=Launch) == launch
    assert "gradient_clip_norm: null" in text
    assert "deterministic: false" in text


def test_other_yaml_readers_get_the_same_text() -> None:
    """Guards text that YAML 1.1 readers would take for booleans or dates; they matter to scripts around us."""
    read = yaml.safe_load(to_yaml(example_launch()))
    assert (read["name"], read["provenance"]["created"]) == ("on", "2024-01-01T00:00:00Z")


def test_units_and_header_become_comments() -> None:
    """Guards that a written profile explains itself: units per number, provenance on top."""
    lines = to_yaml(load_machine(MACHINE).document, header=["Fitted on\nWednesday", ""]).splitlines()
    assert lines[:4] == ["# Fitted on", "# Wednesday", "#", ""]
    assert "  memory_gib: 16  # Memory of one rank, GiB." in lines
    assert "    memory_gib: {kind: fact, source: invented}" in lines
    assert max(map(len, lines)) <= 120


def test_comments_are_not_repeated_for_every_item() -> None:
    """Guards readable lists: only the first tier explains its keys."""
    text = to_yaml(load_machine(MACHINE).document)
    assert text.count("Time of one hop") == 1


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """Guards the plain case: new text, old permissions, nothing left beside it."""
    path = tmp_path / "f.yaml"
    write_text_atomically(path, "one\n")
    path.chmod(0o640)
    write_text_atomically(path, "zwei µ\n")
    assert path.read_text(encoding="utf-8") == "zwei µ\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """Guards links such as `latest.yaml`, which a rename would replace by a file."""
    (tmp_path / "link.yaml").symlink_to(tmp_path / "real.yaml")
    write_text_atomically(tmp_path / "link.yaml", "x")
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "real.yaml").read_text(encoding="utf-8") == "x"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Guards against half-written files: the old one stays, the temporary one goes, the message says why."""
    path = tmp_path / "f.yaml"
    path.write_text("old", encoding="utf-8")

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(EnvironmentProblem, match=os.strerror(code)) as caught:
        write_text_atomically(path, "new" * 100_000)
    assert caught.value.exit_code == 5
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Ctrl-C in the middle of a write."""

    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_text_atomically(tmp_path / "f.yaml", "x")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_devices_are_written_to_directly() -> None:
    """Guards `-o /dev/stdout`: no temporary file in /dev, and a real ENOSPC is explained."""
    write_text_atomically("/dev/null", "x")
    with pytest.raises(EnvironmentProblem, match="No space left"):
        write_text_atomically("/dev/full", "x")


def test_places_that_cannot_hold_a_file_are_explained(tmp_path: Path) -> None:
    """Guards the messages for a missing folder, a folder, a file taken for a folder, and an endless name."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    for target, words in [
        (tmp_path / "none" / "f.yaml", "there is no folder"),
        (tmp_path, "it is a folder"),
        (tmp_path / "file" / "f.yaml", "there is no folder"),
        (tmp_path / ("x" * 300), "the name is too long"),
    ]:
        with pytest.raises(UsageError, match=words):
            write_text_atomically(target, "x")


def test_a_folder_without_permission_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards exit code 5 where writing is not permitted (simulated: tests may run as root)."""

    def deny(*arguments: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", deny)
    with pytest.raises(EnvironmentProblem, match="Permission denied"):
        write_text_atomically(tmp_path / "f.yaml", "x")
