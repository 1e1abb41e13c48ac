"""Guards what is said where a machine profile is not at hand, or states no peak for the precision asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

import axonn_tune
from axonn_tune.errors import UsageError
from tests.cli.running import good, run


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """A machine file `here.yaml`, whose name no profile that is shipped has."""
    path = tmp_path / "profiles" / "here.yaml"
    path.parent.mkdir()
    path.write_text("schema: axonn-tune/machine/1\nextends: localhost\nname: here\n", encoding="utf-8")
    return path


@pytest.fixture
def launch(tmp_path: Path, profile: Path) -> Path:
    """A launch config that was searched with it."""
    path = tmp_path / "launch.yaml"
    good(f"--gpus 1 --model nano --machine {profile} --precision fp32 -o {path}")
    return path


@pytest.mark.parametrize("command", ["trace", "explain", "validate"])
def test_an_unknown_profile_is_asked_for(command: str, launch: Path) -> None:
    """All commands that take a launch config say how to name its profile."""
    finished = run(f"{command} {launch}")
    assert finished.code == 2
    assert f"{launch}: no machine named 'here'" in finished.err
    assert "--machine FILE says where its profile is" in finished.err


def test_a_profile_beside_the_launch_config_is_found(launch: Path, profile: Path) -> None:
    """By its name, whatever its file is called; other documents there are passed over."""
    (launch.parent / "broken.yaml").write_text("schema: axonn-tune/machine/1\nname: [", encoding="utf-8")
    profile.rename(launch.parent / "ours.yaml")
    assert run(f"explain {launch}").code == 0
    assert not axonn_tune.explain_launch(launch).machine_changed


def test_the_file_answers(launch: Path, profile: Path) -> None:
    """The advice holds, on the command line and in Python."""
    assert run(f"explain {launch} --machine {profile}").code == 0
    with pytest.raises(UsageError, match="says where its profile is"):
        axonn_tune.explain_launch(launch)
    assert not axonn_tune.explain_launch(launch, machine=str(profile)).machine_changed


def test_a_missing_peak_names_a_precision(profile: Path) -> None:
    """What the profile does state is what to try."""
    finished = run(f"--gpus 1 --model nano --machine {profile} --precision fp16")
    assert finished.code == 2
    assert "states no fp16 peak" in finished.err
    stated = finished.err.partition("peak_tflops has ")[2].partition(")")[0].split(", ")
    advised = finished.err.partition("; try --precision ")[2].strip()
    assert advised in stated
    assert run(f"--gpus 1 --model nano --machine {profile} --precision {advised}").code == 0
