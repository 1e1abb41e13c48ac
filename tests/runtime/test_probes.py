"""What a calibration measures is what trains."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as functional

from axonn_tune.calibration.measure import build_plan
from axonn_tune.ranking.inputs import make_workload
from axonn_tune.request import Request
from axonn_tune.runtime import probes
from axonn_tune.runtime.mesh import WorldGroup
from axonn_tune.runtime.probes import Bench, Prober
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.points import AttentionProbe, StepProbe

WORLD = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29999"}


def test_attention_is_measured_in_the_format_it_trains_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `--precision bf16` on CPUs: steps and probes of one fit go through the same core, which is in fp32."""
    model, machine = load_model("nano-llama"), load_machine("localhost")
    workload = make_workload(model.document, Request(batch=1, precision="bf16"))
    plan = build_plan(model, machine, workload, world=1, backend="gloo", budget_s=1.0)
    bench, plain = Bench(plan, rank=0, world=1, device=torch.device("cpu")), functional.scaled_dot_product_attention
    formats: list[torch.dtype] = []

    def core(queries: torch.Tensor, *rest: torch.Tensor, **how: bool) -> torch.Tensor:
        formats.append(queries.dtype)
        return plain(queries, *rest, **how)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", core)
    bench.step(StepProbe(launch=0))()
    in_training = set(formats)
    formats.clear()
    bench.attention(AttentionProbe(backward=True, sequences=1))()
    assert set(formats) == in_training


class Device:
    """A GPU's queue: the host issues a call in 1 ms, which runs for 0.1 ms once what was issued before has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_s = self.free_s = 0.0
        monkeypatch.setattr(probes.time, "perf_counter", lambda: self.host_s)
        monkeypatch.setattr(probes, "synchronize", self.synchronize)

    def work(self) -> None:
        self.host_s += 1e-3
        self.free_s = max(self.free_s, self.host_s) + 1e-4

    def ahead(self, seconds: float) -> None:
        self.free_s = max(self.free_s, self.host_s) + seconds

    def synchronize(self, device: torch.device) -> None:
        self.host_s = max(self.host_s, self.free_s)

    def mark(self) -> float:
        return max(self.free_s, self.host_s)

    def mark_end(self, work: object, group: object, note: object) -> None:
        raise AssertionError("no collective is timed alone")

    def between_s(self, start: float, end: float) -> float:
        return end - start


@pytest.mark.parametrize("together", [True, False], ids=["together", "alone"])
def test_a_gpus_calls_are_timed_without_the_hosts_rate_of_issue(
    together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards small collectives and GEMMs on GPUs: 0.1 ms on the device, although the host takes 1 ms to issue one."""
    device = Device(monkeypatch)
    bench = Bench.__new__(Bench)
    prober = Prober(bench, WorldGroup(None), torch.device("cpu"), device, device.ahead)
    seconds, calls = prober._counted(device.work, 50) if together else prober._timed(device.work, 0.01)
    assert seconds == pytest.approx(1e-4)
    assert calls >= 50


@pytest.mark.parametrize(
    ("environment", "options", "code", "said"),
    [
        ({"RANK": "1"}, [], 2, "RANK is set, so WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT must be too"),
        (WORLD, ["--backend", "nccl"], 5, "rank 1 needs GPU 1 of its host for backend nccl, but torch finds 0"),
    ],
)
def test_what_ends_a_rank_before_it_joins_others_is_a_line(
    environment: dict[str, str],
    options: list[str],
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards against a traceback, and against silence: the first to end takes the others with it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert probes.main([str(tmp_path / "plan.json"), str(tmp_path / "points.jsonl"), *options]) == code
    found = capsys.readouterr().err
    assert said in found
    assert found.count("\n") == 1
