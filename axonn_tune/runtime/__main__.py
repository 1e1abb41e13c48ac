"""One rank of a run: `torchrun --nproc-per-node N -m axonn_tune.runtime launch.yaml`, or srun, or alone.

With --all, every rank of it, as forks of this process.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from axonn_tune.processes import end_process


def main(arguments: list[str] | None = None) -> int:
    """Run this process's rank; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m axonn_tune.runtime", description=__doc__)
    parser.add_argument("launch", help="launch config, as written by `axonn-tune -o`")
    parser.add_argument("--steps", type=_count, metavar="N", help="train up to this step instead of the config's")
    parser.add_argument("--resume", action="store_true", help="fail if there is no checkpoint to resume from")
    parser.add_argument("--resume-from", metavar="NAME", help="resume from this checkpoint, such as step-200")
    parser.add_argument("--directory", type=Path, metavar="DIR", help="for metrics; default: runs/<time>-<model>")
    parser.add_argument("--trace", type=_count, metavar="N", default=0, help="trace N steps after the warm-up")
    parser.add_argument("--trace-all", action="store_true", help="on every rank, not only the first")
    parser.add_argument("--all", action="store_true", help="start all ranks here")
    given = vars(parser.parse_args(arguments))
    run_all = given.pop("all")
    if run_all:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Imported here: torch reads the number of threads as it is loaded.
    from axonn_tune.runtime.start import RunOptions, run_all_ranks, run_rank

    run = run_all_ranks if run_all else run_rank
    return run(given.pop("launch"), RunOptions(trace_steps=given.pop("trace"), **given))


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    # Not sys.exit: it would wait for threads of torch, which wait for ranks that may be gone.
    end_process(main())
