"""What a rank sees to before it joins a world."""

from __future__ import annotations

import resource
import socket

import pytest

from axonn_tune.errors import EnvironmentProblem
from axonn_tune.runtime.rank import require_descriptors, use_interface

Limits = tuple[int, int]


@pytest.mark.parametrize(
    ("limits", "world", "raised"),
    [((1024, 524288), 1024, (524288, 524288)), ((1024, 524288), 8, None), ((65536, 65536), 1024, None)],
)
def test_the_limit_of_open_files_is_raised(
    limits: Limits, world: int, raised: Limits | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards worlds of some hundred ranks under the usual soft limit of 1,024: it becomes the hard limit."""
    found: list[Limits] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: found.append(new))
    require_descriptors(world)
    assert found == ([raised] if raised else [])


def test_too_few_open_files_are_an_error_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against ranks that find out one by one, with EMFILE, minutes later."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 4096))
    with pytest.raises(EnvironmentProblem, match=r"1024 ranks need 4,352 open files each, but the hard limit .* 4,096"):
        require_descriptors(1024)


@pytest.mark.parametrize(
    ("told", "before", "after"),
    [
        ("hsn", None, "hsn0"),
        ("=hsn1", None, "hsn1"),
        ("=hsn", None, None),
        ("ib,hsn", None, "hsn0"),
        ("^lo,docker", None, None),
        ("", None, None),
        ("hsn", "eth0", "eth0"),
    ],
)
def test_gloo_takes_the_interface_of_nccl(
    told: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards checkpoints on clusters whose management network does not lead from node to node."""
    interfaces = [(1, "lo"), (2, "eth0"), (3, "hsn0"), (4, "hsn1")]
    monkeypatch.setattr(socket, "if_nameindex", lambda: interfaces)
    environment = {"NCCL_SOCKET_IFNAME": told} | ({"GLOO_SOCKET_IFNAME": before} if before else {})
    use_interface(environment)
    assert environment.get("GLOO_SOCKET_IFNAME") == after
