"""`axonn_tune.calibrate`: measure this machine and write its profile."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from axonn_tune.calibration import session
from axonn_tune.calibration.measuring import Progress, measure
from axonn_tune.errors import error_of
from axonn_tune.launch import host

if TYPE_CHECKING:
    from axonn_tune.calibration.profile import Calibration
    from axonn_tune.specs.catalog import MachineLike, ModelLike
    from axonn_tune.specs.workload import Precision


class CalibrateOptions(TypedDict, total=False):
    """Options of a calibration, as of `axonn-tune calibrate`; each may be left out.

    machine: profile that says what is not measured, localhost unless given. points: file of raw points.
    ranks_per_node: consecutive ranks that share the inner network tier. resume: go on with the raw points.
    """

    machine: MachineLike
    precision: Precision
    batch: int
    backend: Literal["gloo", "nccl"]
    ranks_per_node: int
    name: str
    points: str
    resume: bool


def calibrate(
    output: str | Path,
    *,
    ranks: int | None = None,
    budget: str = "60s",
    model: ModelLike = "nano",
    listen: Callable[[Progress], None] | None = None,
    **options: Unpack[CalibrateOptions],
) -> Calibration | None:
    """Measure collectives, products and steps on all ranks at once, and write a machine profile, with its fits.

    ranks: how many to start here, one per core unless given; under torchrun or srun this process is one of those
    that are started, and all but the first get None. budget: time to measure in, as in `20s`. model: whose
    products and step are measured. listen: called as points come in. Needs torch. EnvironmentProblem
    without it; TrainingFailedError if a rank fails.
    """
    host.require_torch()
    wanted = session.Wanted(output=str(output), ranks=ranks, budget=budget, model=model, **options)
    code = measure(session.job_of(wanted), session.plan_of(wanted), listen or (lambda progress: None))
    if code:
        raise error_of(code)(f"the ranks that measure ended with exit code {code}")
    return session.finish(wanted) if host.leads(os.environ) else None


def calibrate_from_logs(
    output: str | Path,
    logs: Sequence[str | Path],
    *,
    machine: MachineLike,
    name: str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
) -> Calibration:
    """Fit the network of a profile to logs of nccl-tests, rccl-tests or OSU collectives, and write it.

    ranks, nodes: of a log that does not say it. UsageError for a log that holds nothing that can be read.
    """
    return session.finish_logs(
        session.Wanted(
            output=str(output),
            machine=machine,
            name=name,
            logs=tuple(str(log) for log in logs),
            log_ranks=ranks,
            log_nodes=nodes,
        )
    )
