"""Ranks as forks of a process that has imported torch once: 0.3 s for eight, where eight programs each import it.

What forks them, `axonn_tune.lab.forker`, imports this module before the first fork, so it must start no thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from axonn_tune.runtime.rank import RunOptions, run_rank


def train(launch_path: str, options: Mapping[str, Any], log: str | None = None) -> NoReturn:
    """Be the rank that the environment names and end with its exit code, as `python -m axonn_tune.runtime` does.

    options: those of `RunOptions`, by name. log: a file that standard error is appended to.
    """
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    torch.set_num_threads(1)
    sys.exit(run_rank(launch_path, RunOptions(**options), export=True))
