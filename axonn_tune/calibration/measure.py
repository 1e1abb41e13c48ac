"""One calibration: the request, the ranks that measure, and the profile written from their points."""

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

from axonn_tune.calibration.logs import profile_from_logs, read_log
from axonn_tune.calibration.plan import Backend, build_plan
from axonn_tune.calibration.profile import Calibration, calibrate
from axonn_tune.errors import TrainingFailedError, UsageError
from axonn_tune.files import write_text_atomically
from axonn_tune.launch import host
from axonn_tune.ranking.inputs import WorkloadChoices, make_workload
from axonn_tune.specs.catalog import MachineLike, ModelLike, load_machine, load_model
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.points import Plan, read_points
from axonn_tune.specs.workload import Precision

_STANDARD_ERROR = 2
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class CalibrationRequest:
    """Options of a calibration, as on the command line; None leaves one to the defaults."""

    output: str
    points: str | None = None
    name: str | None = None
    model: ModelLike = "nano"
    machine: MachineLike = "localhost"
    precision: Precision | None = None
    batch: int | None = None
    backend: Backend = "gloo"
    budget: str = "60s"
    ranks: int | None = None
    ranks_per_node: int | None = None
    resume: bool = False
    logs: tuple[str, ...] = ()
    log_ranks: int | None = None
    log_nodes: int | None = None
    plot: str | None = None

    @property
    def points_path(self) -> Path:
        """File of raw points."""
        return Path(self.points or f"{self.output.removesuffix('.yaml')}.points.jsonl")

    @property
    def profile_name(self) -> str:
        """Name of the profile."""
        return self.name or Path(self.output).stem


def job_of(request: CalibrationRequest) -> CalibrationJob:
    """How to measure; UsageError if ranks are to be started inside a world that is already started."""
    joined = host.already_started(os.environ)
    if joined and request.ranks is not None:
        raise UsageError("--ranks starts ranks on this host, but this process is one of a world already started")
    ranks = None if joined else _ranks_here(request)
    return CalibrationJob(request.points_path, ranks, request.backend, request.resume)


def plan_of(request: CalibrationRequest) -> Plan:
    """What to measure."""
    model, machine = load_model(request.model), load_machine(request.machine)
    precision: Precision = request.precision or ("fp32" if request.backend == "gloo" else "bf16")
    workload = make_workload(model.document, WorkloadChoices(batch=request.batch, precision=precision))
    joined = host.already_started(os.environ)
    return build_plan(
        model,
        machine,
        workload,
        world=world_size(os.environ) if joined else _ranks_here(request),
        backend=request.backend,
        budget_s=seconds_of(request.budget),
    )


def _ranks_here(request: CalibrationRequest) -> int:
    """Ranks to start on this host."""
    return request.ranks or len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class CalibrationProgress:
    """Progress of the ranks: points so far, seconds since they met, kind of the last point."""

    points: int
    elapsed_s: float
    what: str


@dataclass(frozen=True)
class CalibrationJob:
    """How to measure. `ranks`: how many to start here, or None where this process is one rank of a started world."""

    points: Path
    ranks: int | None
    backend: str
    resume: bool

    def command(self, plan: Path, *, progress: int) -> list[str]:
        """What to run; progress: the descriptor to report progress to."""
        started = [] if self.ranks is None else ["--ranks", str(self.ranks)]
        resumed = ["--resume"] if self.resume else []
        return [
            *(sys.executable, "-m", "axonn_tune.runtime.probes", str(plan), str(self.points)),
            *("--backend", self.backend, "--progress", str(progress), "--parent", str(os.getpid())),
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


def run_probes(job: CalibrationJob, plan: Plan, listen: Callable[[CalibrationProgress], None]) -> int:
    """Run the plan on all ranks, or on this one of them; points are in the job's file afterwards.

    Returns the exit code; where it is not 0 the ranks have printed why.
    """
    with tempfile.TemporaryDirectory(prefix="axonn-tune-") as folder:
        path = Path(folder) / "plan.json"
        path.write_text(plan.model_dump_json(by_alias=True), encoding="utf-8")
        # As many threads as in training, where a launch config sets the same.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        reading, writing = os.pipe()
        with os.fdopen(reading, encoding="utf-8") as reports:
            try:
                # Standard output is the profile's; what libraries print there goes to standard error.
                process = subprocess.Popen(
                    job.command(path, progress=writing), stdout=_STANDARD_ERROR, pass_fds=[writing], env=environment
                )
            finally:
                os.close(writing)
            code = _listen(process, reports, listen)
    return code if code >= 0 else TrainingFailedError.exit_code


def _listen(process: subprocess.Popen[bytes], reports: TextIO, listen: Callable[[CalibrationProgress], None]) -> int:
    """Listen to the end; the exit code."""
    try:
        for line in reports:
            listen(CalibrationProgress(**json.loads(line)))
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def write_profile(request: CalibrationRequest) -> Calibration:
    """Fit the points and write the profile."""
    base, measured = load_machine(request.machine).document, read_points(request.points_path)
    done = calibrate(measured, base, name=request.profile_name, ranks_per_node=request.ranks_per_node)
    return _write(done, request, f"Raw points: {request.points_path.name}")


def write_profile_from_logs(request: CalibrationRequest) -> Calibration:
    """Fit the network of a profile to logs and write it."""
    logs = [read_log(path, ranks=request.log_ranks, nodes=request.log_nodes) for path in request.logs]
    done = profile_from_logs(logs, load_machine(request.machine).document, name=request.profile_name)
    return _write(done, request, f"Logs: {', '.join(Path(path).name for path in request.logs)}")


def _write(done: Calibration, request: CalibrationRequest, origin: str) -> Calibration:
    header = [f"{done.machine.description}.", f"{origin}. Units and sources: docs/machines.md."]
    write_text_atomically(request.output, to_yaml(done.machine, header=header))
    return done
