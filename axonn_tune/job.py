"""What is trained: the value that everything is priced from."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload


@dataclass(frozen=True)
class Job:
    """What is trained, on which machine, by which framework with which options of its step.

    tokens_total: tokens of the whole training run, for its cost.
    """

    model: Model
    machine: Machine
    workload: Workload
    framework: Framework = AXONN_TUNE
    tokens_total: int | None = None
