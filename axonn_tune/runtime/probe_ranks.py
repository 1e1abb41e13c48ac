"""Starts a calibration: `python -m axonn_tune.runtime.probe_ranks --ranks N PLAN POINTS`, or joins one.

What is printed is for people; progress goes, as one JSON document a line, to a descriptor of its own, for
libraries print to standard output as they like.

Under torchrun, srun, or whatever else sets RANK and WORLD_SIZE, this process is one rank, and only rank 0
needs the plan. Otherwise it imports torch once and forks the ranks, which takes a tenth of the time
that starting each from nothing would.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from axonn_tune.errors import AxonnTuneError, EnvironmentProblem, TrainingFailedError
from axonn_tune.processes import die_with
from axonn_tune.runtime.launching import (
    Place,
    device_of,
    end_process,
    is_broken_connection,
    is_timeout,
    place_of,
    say_why,
)
from axonn_tune.runtime.probe import probe_world
from axonn_tune.specs.points import Plan, PointLog

_TIMEOUT = timedelta(seconds=120)
"""A collective that takes longer means that a rank is lost."""
_INTERRUPTED = 130


@dataclass(frozen=True)
class Job:
    """What every rank is told. `plan`, `points` and `progress`, a descriptor, are rank 0's alone."""

    plan: Path
    points: Path
    backend: str
    resume: bool
    progress: int | None = None


def main(arguments: list[str] | None = None) -> int:
    """Measure; the exit code of all ranks started, or of the one joined in."""
    parser = argparse.ArgumentParser(prog="python -m axonn_tune.runtime.probe_ranks", description=__doc__)
    parser.add_argument("plan", type=Path, help="what to measure, as JSON; read by rank 0")
    parser.add_argument("points", type=Path, help="file that rank 0 writes points to")
    parser.add_argument("--ranks", type=int, metavar="N", help="start this many here; absent: join as the rank it is")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--resume", action="store_true", help="go on with a file of points")
    parser.add_argument("--progress", type=int, metavar="FD", help="file descriptor that rank 0 tells its progress")
    parser.add_argument("--parent", type=int, metavar="PID", help="end with this process, which started this one")
    chosen = parser.parse_args(arguments)
    if chosen.parent is not None:
        die_with(chosen.parent)
    job = Job(chosen.plan, chosen.points, chosen.backend, chosen.resume, chosen.progress)
    if chosen.ranks is not None:
        return start(chosen.ranks, job)
    place = place_of(os.environ)
    method = f"tcp://{place.address}:{place.port}" if "TORCHELASTIC_RUN_ID" not in os.environ else "env://"
    return rank_main(place, job, method=method)


def start(ranks: int, job: Job) -> int:
    """Fork the ranks, which talk through loopback, and wait; the first exit code that is not 0 ends them all."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # The optimizer would import it in every rank, seconds of work each.
    importlib.import_module("torch._dynamo")
    starter = os.getpid()
    with tempfile.TemporaryDirectory(prefix="axonn-tune-") as folder:
        children: dict[int, int] = {}
        for rank in range(ranks):
            child = os.fork()
            if not child:
                die_with(starter)
                end_process(rank_main(Place(rank, ranks, rank), job, method=f"file://{folder}/meeting"))
            children[child] = rank
        try:
            return _outcome(children)
        except KeyboardInterrupt:
            # The terminal has interrupted the ranks too; those that are left end with this process.
            return _INTERRUPTED


def _outcome(children: dict[int, int]) -> int:
    """Wait for all; once one fails, end the others, and say which it was if it could not itself."""
    failed = 0
    while children:
        child, status = os.wait()
        rank, code = children.pop(child), os.waitstatus_to_exitcode(status)
        if code and not failed:
            failed = code if code > 0 else TrainingFailedError.exit_code
            if code < 0:
                say_why(f"rank {rank} was ended by {signal.Signals(-code).name} while it measured")
            for other in children:
                os.kill(other, signal.SIGKILL)
    return failed


def rank_main(place: Place, job: Job, *, method: str) -> int:
    """One rank's calibration; the exit code. `method`: where ranks meet, as `init_process_group` takes it."""
    first = place.rank == 0
    try:
        device = device_of(job.backend, place)
        if place.world > 1:
            dist.init_process_group(
                job.backend, init_method=method, rank=place.rank, world_size=place.world, timeout=_TIMEOUT
            )
        plan = Plan.model_validate_json(job.plan.read_bytes()) if first else None
        log = PointLog(job.points) if first else None
        probe_world(plan, log, device=device, resume=job.resume, progress=partial(_tell, job.progress))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except AxonnTuneError as error:
        if first:
            say_why(str(error))
        return error.exit_code
    except Exception as error:
        return _broken(place.rank, error)
    return 0


def _broken(rank: int, error: Exception) -> int:
    """An error nobody foresaw, or a connection that another rank's end has broken."""
    if is_timeout(error) or is_broken_connection(error):
        if rank == 0:
            say_why("another rank was lost while it measured; the points so far are saved, --resume goes on")
        return TrainingFailedError.exit_code
    print(f"rank {rank}:\n{''.join(traceback.format_exception(error))}", file=sys.stderr)
    return EnvironmentProblem.exit_code if isinstance(error, OSError) else TrainingFailedError.exit_code


def _tell(descriptor: int | None, points: int, elapsed_s: float, what: str) -> None:
    """One line of JSON for whoever shows progress."""
    if descriptor is not None:
        said = json.dumps({"points": points, "elapsed_s": round(elapsed_s, 2), "what": what})
        os.write(descriptor, f"{said}\n".encode())


if __name__ == "__main__":
    end_process(main())
