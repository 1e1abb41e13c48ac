"""A rank of a lab that keeps what it says to a file: a validation runs many, and has its own words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

from axonn_tune.runtime import forking


def train(launch_path: str, options: Mapping[str, Any], log: str) -> NoReturn:
    """As `forking.train`, with standard error appended to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    forking.train(launch_path, options)
