"""CPU seconds of tests: processes that a test started come and go while they are counted."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.cpu import TICKS_PER_S, _below, cpu_s


def test_processes_that_run_are_counted_and_those_that_ended_are_not_missed() -> None:
    """Guards the count of descendants: an ended one, whose files are gone, has none, and ends no run."""
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(1, flush=True)\ninput()"
    before = cpu_s()
    with subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "1\n"
        assert _below(os.getpid()) / TICKS_PER_S >= 0.25
        assert cpu_s() - before >= 0.25
        started.communicate("\n")
    assert _below(started.pid) == 0
