"""Starts the processes that measure, and listens to them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from axonn_tune.errors import TrainingFailedError, UsageError
from axonn_tune.specs.points import Plan

_STANDARD_ERROR = 2
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Progress:
    """Where a measurement stands: points so far, seconds since ranks met, kind of the last point."""

    points: int
    elapsed_s: float
    what: str


@dataclass(frozen=True)
class Job:
    """How to measure. `ranks`: how many to start here, or None to join a world as the rank this process is."""

    points: Path
    ranks: int | None
    backend: str
    resume: bool

    def command(self, plan: Path, *, progress: int) -> list[str]:
        """What to run; progress: the descriptor to tell it to."""
        started = [] if self.ranks is None else ["--ranks", str(self.ranks)]
        resumed = ["--resume"] if self.resume else []
        module = "axonn_tune.runtime.probes"
        return [
            sys.executable,
            "-m",
            module,
            str(plan),
            str(self.points),
            "--backend",
            self.backend,
            "--progress",
            str(progress),
            "--parent",
            str(os.getpid()),
            *started,
            *resumed,
        ]


def seconds_of(text: str) -> float:
    """`20s`, `5m`, `1h` or `90` as seconds; UsageError otherwise."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or float(found[1]) <= 0.0:
        raise UsageError(f"--budget {text}: write a time such as 20s, 5m or 1h")
    return float(found[1]) * _UNITS_S[found[2] or "s"]


def world_size(environment: Mapping[str, str]) -> int:
    """Ranks of the world this process is one of."""
    return int(environment.get("WORLD_SIZE") or environment.get("SLURM_NTASKS") or 1)


def measure(job: Job, plan: Plan, listen: Callable[[Progress], None]) -> int:
    """Run the plan on all ranks, or on this one of them; points are in the job's file afterwards.

    The exit code; where it is not 0 the ranks have said why.
    """
    with tempfile.TemporaryDirectory(prefix="axonn-tune-") as folder:
        path = Path(folder) / "plan.json"
        path.write_text(plan.model_dump_json(by_alias=True), encoding="utf-8")
        # As many threads as in training, where a launch config sets the same.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        reading, writing = os.pipe()
        with os.fdopen(reading, encoding="utf-8") as told:
            try:
                # Standard output is the profile's; what libraries print there is for whoever reads of errors.
                process = subprocess.Popen(
                    job.command(path, progress=writing), stdout=_STANDARD_ERROR, pass_fds=[writing], env=environment
                )
            finally:
                os.close(writing)
            code = _heard(process, told, listen)
    return code if code >= 0 else TrainingFailedError.exit_code


def _heard(process: subprocess.Popen[bytes], told: TextIO, listen: Callable[[Progress], None]) -> int:
    """Listen to the end; the exit code."""
    try:
        for line in told:
            listen(Progress(**json.loads(line)))
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
