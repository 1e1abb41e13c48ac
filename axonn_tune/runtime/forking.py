"""Ranks as forks of a process that has imported torch once: 0.3 s for eight of them, where eight programs take 12 s.

What forks, `axonn_tune.lab.forker`, imports this module before the first fork; it must start no thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import torch

# What the first training step would import, in every rank.
import torch._dynamo

from axonn_tune.errors import AxonnTuneError
from axonn_tune.runtime.launching import Options, Rank, place_of, say_why
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document


def train(launch_path: str, options: Mapping[str, Any]) -> NoReturn:
    """Be the rank that the environment names and end with its exit code, as `python -m axonn_tune.runtime` does.

    options: those of `Options`, by name.
    """
    torch.set_num_threads(1)
    try:
        place = place_of(os.environ)
        launch = load_document(launch_path, schema=Launch)
    except AxonnTuneError as error:
        if os.environ.get("RANK", "0") == "0":
            say_why(str(error))
        sys.exit(error.exit_code)
    for variable in launch.environment:
        os.environ.setdefault(variable.name, variable.value)
    sys.exit(Rank(launch, Options(**options), place).run())
