"""Listening to the processes that measure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from axonn_tune.calibration.measure import CalibrationProgress, CalibrationRequest, run_probes
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
