"""One rank of a run: `torchrun --nproc-per-node N -m axonn_tune.runtime launch.yaml`, or srun, or alone."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from axonn_tune.processes import AGENT, die_with


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
    chosen = parser.parse_args(arguments)
    if AGENT in os.environ:
        die_with(int(os.environ[AGENT]))
    from axonn_tune.runtime.rank import RunOptions, run_rank

    given = vars(chosen)
    return run_rank(given.pop("launch"), RunOptions(trace_steps=given.pop("trace"), **given))


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: it would wait for threads of torch, which wait for ranks that may be gone.
    os._exit(code)
