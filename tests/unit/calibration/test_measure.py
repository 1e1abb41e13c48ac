"""Listening to the processes that measure."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from axonn_tune.calibration.measure import CalibrationProgress, CalibrationRequest, run_probes
from axonn_tune.errors import EnvironmentProblem
from axonn_tune.launch import host
from tests.unit.calibration.synthetic import plan

TALKING = "import os, sys; print('NCCL INFO Bootstrap', flush=True); os.write(int(sys.argv[1]), sys.argv[2].encode())"


class TalkingRanks(CalibrationRequest):
    """Ranks whose libraries print to standard output."""

    def command(self, plan: Path, *, progress: int) -> list[str]:
        """What to run: one line to standard output, one of progress."""
        return [sys.executable, "-c", TALKING, str(progress), '{"points": 3, "elapsed_s": 0.5, "what": "copy"}\n']


def test_what_libraries_print_is_no_progress(capfd: pytest.CaptureFixture[str]) -> None:
    """Guards NCCL_DEBUG=INFO and MPI's banners: neither an error, nor among the results."""
    heard: list[CalibrationProgress] = []
    assert run_probes(TalkingRanks("points.yaml", ranks=1), plan(2), heard.append) == 0
    assert heard == [CalibrationProgress(3, 0.5, "copy")]
    out, err = capfd.readouterr()
    assert (out, err) == ("", "NCCL INFO Bootstrap\n")


def test_nccl_has_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards hosts with more cores than GPUs: ranks by cores would not start."""
    monkeypatch.setattr(host, "torch_devices", lambda: {"gpus": [{"name": "H100"}] * 3})
    assert CalibrationRequest("here.yaml", backend="nccl").ranks_here == 3
    assert CalibrationRequest("here.yaml", backend="nccl", ranks=2).ranks_here == 2
    assert CalibrationRequest("here.yaml").ranks_here == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("found", [None, {"gpus": []}, {"gpus": [], "error": "torch finds none here"}])
def test_nccl_without_a_gpu_is_refused(found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the message: before any rank starts, with what works instead."""
    monkeypatch.setattr(host, "torch_devices", lambda: found)
    with pytest.raises(EnvironmentProblem, match="but torch finds none here; --backend gloo measures CPUs"):
        CalibrationRequest("here.yaml", backend="nccl").ranks_here  # noqa: B018 - looking is what fails
