"""Launch configs for tests, built as the command line builds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from axonn_tune.cost.price import price
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.launch.config import build_launch
from axonn_tune.specs.catalog import Loaded, load_machine, load_model
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import Overlap

CREATED = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)


@dataclass(frozen=True)
class Case:
    """A launch config and what it was built from."""

    launch: Launch
    model: Loaded[Model]
    machine: Loaded[Machine]


def case(
    model: str = "nano",
    machine: str = "localhost",
    *,
    grid: Grid = Grid(x=1, y=1, z=2, data=2),  # noqa: B008  # frozen
    overlaps: Sequence[Overlap] = ("gather_prefetch",),
    overrides: Sequence[str] = (),
    command: str = "axonn-tune --gpus 4",
) -> Case:
    """The launch config of one grid; `overrides` change the machine."""
    loaded_model, loaded_machine = load_model(model), load_machine(machine, overrides=overrides)
    defaults = loaded_model.document.defaults
    workload = Workload(
        global_batch=defaults.global_batch, sequence_length=defaults.sequence_length, overlaps=tuple(overlaps)
    )
    pricing = price(
        Job(loaded_model.document, loaded_machine.document, workload), Layout(grid, 1, "full", kept_layers=0)
    )
    launch = build_launch(pricing, model=loaded_model, machine=loaded_machine, command=command, created=CREATED)
    return Case(launch, loaded_model, loaded_machine)
