"""A measured profile, used later, on the host it is of or on another."""

from __future__ import annotations

import pytest

from axonn_tune.calibration.profile import differences
from axonn_tune.specs.machine import Measurement

MEASURED = Measurement(
    created="2026-01-02",
    tool_version="0.1.0",
    torch_version="2.13.0+cpu",
    hosts=("n1", "n2"),
    device="a CPU",
    ranks=4,
    cores=2,
    network="Gloo between 2 hosts",
    samples=9,
)


@pytest.mark.parametrize(
    ("host", "cores", "torch_version", "said"),
    [
        ("n2", 2, "2.13.0", []),
        ("n2", 2, "", []),
        ("n1", 4, "2.13.0+cpu", ["measured with 2 cores, this host has 4"]),
        ("n2", 2, "2.11", ["measured with torch 2.13.0+cpu, this is torch 2.11"]),
        ("login1", 4, "2.11", []),
    ],
)
def test_differences_are_said(
    monkeypatch: pytest.MonkeyPatch, host: str, cores: int, torch_version: str, said: list[str]
) -> None:
    """Guards the warning of `machines check`: a login node may differ from the nodes that were measured."""
    monkeypatch.setattr("socket.gethostname", lambda: host)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr("axonn_tune.calibration.profile.installed", lambda name: torch_version)
    assert list(differences(MEASURED)) == said
