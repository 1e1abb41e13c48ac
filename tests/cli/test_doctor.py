"""`doctor` and `schema` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from axonn_tune.cli.documents import KINDS
from axonn_tune.launch.host import network_checks, variable_checks
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.schemas import schema_texts
from tests.cli.running import good, run


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks on CPUs."""
    path = tmp_path_factory.mktemp("doctor") / "launch.yaml"
    good(f"--gpus 2 --model nano --machine localhost --precision fp32 -o {path}")
    return path


def changed(path: Path, folder: Path, **changes: Any) -> Path:
    """A launch config with other values in it."""
    document = yaml.safe_load(path.read_text("utf-8")) | changes
    target = folder / "changed.yaml"
    target.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return target


def test_everything_is_looked_at(launch: Path) -> None:
    """Guards the areas, as JSON and as text, and that what can run here is not refused."""
    document = good(f"doctor {launch} --format json").document
    assert document["schema"] == "axonn-tune/doctor/1"
    areas = {one["area"] for one in document["findings"]}
    assert {"host", "software", "torch", "starting jobs", "rights", "variables", "launch config"} <= areas
    states = {one["what"]: one["state"] for one in document["findings"]}
    assert states["torch"] == states["backend gloo"] == "ok"
    shown = good("doctor").out
    assert "\nSOFTWARE\n" in shown
    assert max(map(len, shown.splitlines())) <= 120


def test_what_a_launch_config_lacks_here_ends_with_5(launch: Path, tmp_path: Path) -> None:
    """Guards the exit code: a missing token file and a folder that cannot be."""
    path = changed(launch, tmp_path, data={"path": str(tmp_path / "none.bin")})
    finished = run(f"doctor {path}")
    assert finished.code == 5
    assert "cannot run here: data.path (no such file)" in finished.err
    path = changed(launch, tmp_path, backend="nccl")
    assert "2 ranks on each node need one each" in run(f"doctor {path}").err


def test_variables_are_set_against_those_of_the_launch_config(launch: Path) -> None:
    """Guards variables: not set is well, equal is well, another value is told with what the config says."""
    document = load_document(launch, schema=Launch)
    name, value = document.environment[0].name, document.environment[0].value
    for here, state in ((None, "ok"), (value, "ok"), ("17", "differs")):
        environment = {"HOME": "/root", "NCCL_ALGO": "Ring"} | ({} if here is None else {name: here})
        found = {one.what: one for one in variable_checks(environment, document)}
        assert found[name].state == state
        assert found["NCCL_ALGO"].note == "the launch config does not set it"
        assert "HOME" not in found


def test_interfaces_are_read_as_linux_has_them(tmp_path: Path) -> None:
    """Guards /sys: speeds in Mbit/s, those without one, those that are down, InfiniBand's ports."""
    for name, state, speed in (
        ("lo", "unknown", ""),
        ("eth0", "up", "25000"),
        ("wlan0", "down", ""),
        ("veth1", "up", "-1"),
    ):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "operstate").write_text(f"{state}\n")
        (tmp_path / "net" / name / "speed").write_text(f"{speed}\n")
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for name, text in (("rate", "200 Gb/sec (4X HDR)"), ("state", "4: ACTIVE"), ("link_layer", "InfiniBand")):
        (port / name).write_text(text + "\n")
    found = [(one.what, one.here) for one in network_checks(tmp_path / "net", tmp_path / "infiniband")]
    assert found == [
        ("eth0", "25 Gbit/s"),
        ("veth1", "up, speed unknown"),
        ("mlx5_0 port 1", "200 Gb/sec (4X HDR), 4: ACTIVE"),
    ]
    assert not list(network_checks(tmp_path / "none", tmp_path / "none"))


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_are_printed(kind: str) -> None:
    """Guards the list of kinds against the schemas there are, and what is printed against docs/schemas."""
    text = good(f"schema {kind}").out
    assert json.loads(text)["$schema"]
    assert text == (Path(__file__).parents[2] / "docs" / "schemas" / f"{kind}.json").read_text("utf-8")
    assert {f"{one}.json" for one in KINDS} == set(schema_texts())
