"""What a rank sees to before it joins a world."""

from __future__ import annotations

import os
import re
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from axonn_tune.errors import EnvironmentProblem
from axonn_tune.runtime import devices
from axonn_tune.runtime.devices import device_of
from axonn_tune.runtime.mesh import FlightRecorder
from axonn_tune.runtime.start import RunOptions, require_descriptors, run_rank, use_interfaces

Limits = tuple[int, int]
FIXTURES = Path(__file__).parents[1] / "fixtures" / "v1"


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


@pytest.mark.parametrize(
    ("nccl", "gloo", "backend", "used"),
    [
        ("hsn", None, "nccl", "hsn0"),
        ("=hsn1", None, "gloo", "hsn1"),
        ("=hsn", None, "nccl", EnvironmentProblem),
        ("ib,hsn", None, "nccl", "hsn0"),
        ("ib", None, "nccl", EnvironmentProblem),
        ("ib", None, "gloo", None),
        ("^lo,docker", None, "nccl", None),
        ("", None, "nccl", None),
        ("hsn", "hsn1", "nccl", "hsn1"),
        ("hsn", "hsn", "gloo", EnvironmentProblem),
    ],
)
def test_gloo_takes_the_interface_of_nccl(
    nccl: str, gloo: str | None, backend: str, used: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards checkpoints on clusters whose management network does not lead from node to node.

    Prefixes, whole names and exclusions are as NCCL and Gloo read them; interfaces that a host lacks are named.
    """
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "hsn0"), (3, "hsn1")])
    environment = {"NCCL_SOCKET_IFNAME": nccl} | ({"GLOO_SOCKET_IFNAME": gloo} if gloo else {})
    if used is EnvironmentProblem:
        with pytest.raises(used, match="no such network interface, only lo, hsn0"):
            use_interfaces(environment, backend)
        return
    use_interfaces(environment, backend)
    assert environment.get("GLOO_SOCKET_IFNAME") == used


def launch(folder: Path, *lines: str) -> Path:
    """A stored launch config of two ranks, with some lines instead of those that begin alike."""
    text = (FIXTURES / "launch-2-ranks.yaml").read_text("utf-8")
    for line in lines:
        key = line.partition(":")[0]
        text, count = re.subn(rf"(?m)^{key}:.*$", line, text)
        assert count == 1, key
    (folder / "launch.yaml").write_text(text, encoding="utf-8")
    return folder / "launch.yaml"


WORLD = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
WORLD |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29999"}
GLOO = "backend: gloo"


@pytest.mark.parametrize(
    ("lines", "environment", "faked", "code", "said"),
    [
        ([GLOO], {"WORLD_SIZE": "3"}, "", 2, "needs 2 ranks, but 3 ranks were started"),
        (["backend: nccl"], {}, "gpus", 5, "2 ranks on this host need a GPU each for backend nccl, but torch finds 1"),
        ([GLOO], {}, "memory", 5, "MiB a rank for 2 ranks, but this host has 1 MiB free: "),
        ([GLOO], {}, "descriptors", 5, "2 ranks need 264 open files each, but the hard limit here is 100"),
        ([GLOO], {"GLOO_SOCKET_IFNAME": "hsn0"}, "", 5, "GLOO_SOCKET_IFNAME is 'hsn0', but this host has no such"),
        ([GLOO, "micro_batch: 2000000000"], {}, "", 2, "data · z · micro_batch · grad_accumulation is"),
        ([GLOO, "  layers: 2001"], {}, "", 3, "2,001 layers and micro-batches of 256 tokens: a rank is built for at"),
        ([GLOO, "  vocab: 2147483647"], {}, "", 3, "gradients and moments of a rank need 768 GiB or more"),
        ([GLOO], {"RANK": "x"}, "", 2, "the variable RANK is 'x', where a whole number is needed"),
        ([GLOO], {"RANK": "2"}, "", 2, "RANK is 2, but WORLD_SIZE is 2: ranks are numbered from 0"),
    ],
)
def test_a_run_fails_before_any_rank_joins_another(
    lines: list[str],
    environment: dict[str, str],
    faked: str,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards a cluster's hours: what is short is a line with its numbers, and no process group is made for it."""
    for name, value in (WORLD | environment).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("joined"))
    if faked == "gpus":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    if faked == "memory":
        monkeypatch.setattr(devices, "free_bytes", lambda device: 1 << 20)
    if faked == "descriptors":
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 100))
    assert run_rank(str(launch(tmp_path, *lines)), RunOptions(directory=tmp_path / "run")) == code
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1, "one line"
    assert not (tmp_path / "run").exists()


def test_one_rank_of_a_host_speaks_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards a page of the same message, and none: the others end later, since torchrun ends all with the first."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for name, value in (WORLD | {"RANK": "1", "LOCAL_RANK": "1", "GLOO_SOCKET_IFNAME": "hsn0"}).items():
        monkeypatch.setenv(name, value)
    assert run_rank(str(launch(tmp_path, GLOO)), RunOptions()) == 5
    assert run_rank(str(tmp_path / "missing.yaml"), RunOptions()) == 2
    assert capsys.readouterr().err == ""
    assert min(waited) > 10
    assert len(waited) == 2


@pytest.mark.parametrize(
    ("backend", "kind", "local_rank", "device"),
    [
        ("gloo", None, 3, "cpu"),
        ("gloo", "cuda", 3, "cuda:1"),
        ("nccl", None, 1, "cuda:1"),
        ("nccl", "cuda", 0, "cuda:0"),
    ],
)
def test_ranks_over_gloo_may_share_a_gpu(
    backend: str, kind: str | None, local_rank: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards two ranks on one GPU, which NCCL refuses: Gloo carries tensors of GPUs if the launch config says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    assert str(device_of(backend, rank=local_rank, local_rank=local_rank, kind=kind)) == device
    monkeypatch.undo()
    if device != "cpu":
        said = f"rank 9 needs GPU {0 if backend == 'gloo' else 1} of its host for backend {backend}, but torch finds 0"
        with pytest.raises(EnvironmentProblem, match=said):
            device_of(backend, rank=9, local_rank=0 if backend == "gloo" else 1, kind=kind)


def test_the_flight_recorder_is_written_before_a_rank_ends(tmp_path: Path) -> None:
    """Guards what NCCL knows about a hang: torch, here its part of the pipe, writes it before the process exits."""
    environment = {"TORCH_NCCL_DEBUG_INFO_PIPE_FILE": f"{tmp_path}/record-"}
    recorder = FlightRecorder(environment, rank=3)
    recorder.into(tmp_path)
    os.mkfifo(tmp_path / "record-3.pipe")
    pipe = os.open(tmp_path / "record-3.pipe", os.O_RDONLY | os.O_NONBLOCK)

    def torch_writes() -> None:
        while not os.read(pipe, 8):
            time.sleep(0.01)
        Path(environment["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] + "3").write_bytes(b"collectives")

    thread = threading.Thread(target=torch_writes, daemon=True)
    thread.start()
    recorder.write()
    assert (tmp_path / "nccl-rank3").read_bytes() == b"collectives"
    assert environment["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "2000"
    os.close(pipe)
    environment.clear()
    recorder = FlightRecorder(environment, rank=0)
    folder = Path(environment["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"])
    assert folder.is_dir()
    recorder.close()
    assert not folder.exists(), "it would stay of each rank and run"
