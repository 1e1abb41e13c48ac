"""One calibration from what was wanted to the profile written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from axonn_tune.calibration.from_logs import profile_from_logs
from axonn_tune.calibration.logs import read_log
from axonn_tune.calibration.measuring import Job, seconds_of, world_size
from axonn_tune.calibration.plan import Backend, build_plan
from axonn_tune.calibration.profile import Calibration, calibrate
from axonn_tune.errors import UsageError
from axonn_tune.files import write_text_atomically
from axonn_tune.launch import host
from axonn_tune.ranking.inputs import WorkloadChoices, make_workload
from axonn_tune.specs.catalog import MachineLike, ModelLike, load_machine, load_model
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.points import Plan, read_points
from axonn_tune.specs.workload import Precision


@dataclass(frozen=True)
class Wanted:
    """What a calibration is asked for, as on the command line; None leaves it to the defaults."""

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


def job_of(wanted: Wanted) -> Job:
    """How to measure; UsageError if ranks are to be started inside a world."""
    joined = host.already_started(os.environ)
    if joined and wanted.ranks is not None:
        raise UsageError("--ranks starts ranks on this host, but this process is one of a world already started")
    return Job(wanted.points_path, None if joined else _started(wanted), wanted.backend, wanted.resume)


def plan_of(wanted: Wanted) -> Plan:
    """What to measure."""
    model, machine = load_model(wanted.model), load_machine(wanted.machine)
    precision: Precision = wanted.precision or ("fp32" if wanted.backend == "gloo" else "bf16")
    workload = make_workload(model.document, WorkloadChoices(batch=wanted.batch, precision=precision))
    joined = host.already_started(os.environ)
    return build_plan(
        model,
        machine,
        workload,
        world=world_size(os.environ) if joined else _started(wanted),
        backend=wanted.backend,
        budget_s=seconds_of(wanted.budget),
    )


def _started(wanted: Wanted) -> int:
    return wanted.ranks or len(os.sched_getaffinity(0))


def finish(wanted: Wanted) -> Calibration:
    """Fit the points and write the profile."""
    base, measured = load_machine(wanted.machine).document, read_points(wanted.points_path)
    done = calibrate(measured, base, name=wanted.profile_name, ranks_per_node=wanted.ranks_per_node)
    return _written(done, wanted, f"Raw points: {wanted.points_path.name}")


def finish_logs(wanted: Wanted) -> Calibration:
    """Fit the network of a profile to logs and write it."""
    logs = [read_log(path, ranks=wanted.log_ranks, nodes=wanted.log_nodes) for path in wanted.logs]
    done = profile_from_logs(logs, load_machine(wanted.machine).document, name=wanted.profile_name)
    return _written(done, wanted, f"Logs: {', '.join(Path(path).name for path in wanted.logs)}")


def _written(done: Calibration, wanted: Wanted, origin: str) -> Calibration:
    header = [f"{done.machine.description}.", f"{origin}. Units and sources: docs/machines.md."]
    write_text_atomically(wanted.output, to_yaml(done.machine, header=header))
    return done
