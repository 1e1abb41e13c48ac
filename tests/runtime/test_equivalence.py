"""Training on a grid is training on one rank: the same numbers, from the collectives the program lists.

Thirty grids of 1 to 8 ranks run each time, all 89 nightly. Each trains three steps in fp64 with every overlap, and one
without. `steps.check` runs on every rank and returns what it finds wrong; the tests here only ask for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.runtime import steps
from tests.runtime.cases import Case, Training, cases, daily_cases, pipelined_cases, trainings
from tests.runtime.pool import Pools

Serial = Callable[[Training], Path]


@pytest.fixture(scope="session")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Serial:
    """Path of the serial run's record, which is made when it is first asked for, by whichever worker that is."""
    folder, known = tmp_path_factory.getbasetemp(), list(trainings())
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def path(training: Training) -> Path:
        found = folder / f"serial-{known.index(training)}.pt"
        if not found.exists():
            mine = found.with_suffix(f".{os.getpid()}")
            torch.save(steps.serial(training), mine)
            mine.replace(found)
        return found

    return path


DAILY = set(daily_cases())
# Cases of one world size share their ranks.
GROUPED = [
    pytest.param(
        *(case,),
        id=str(case),
        marks=[pytest.mark.xdist_group(f"{case.grid.world} ranks"), *([] if case in DAILY else [pytest.mark.nightly])],
    )
    for case in sorted((*cases(), *pipelined_cases()), key=lambda case: case.grid.world)
]


@pytest.mark.parametrize("case", GROUPED)
def test_grid_trains_as_one_rank_does(case: Case, pools: Pools, serial: Serial) -> None:
    """Guards the 4D algorithm: gradients, loss, norm and weights of the serial run within rounding.

    And with it that overlap changes no bit, and that what was sent is what the program says.
    """
    reports = pools(case.grid.world).run(steps.check, case, serial(case.training))
    problems = {problem: rank for rank, report in reversed(list(enumerate(reports))) for problem in report.problems}
    assert not problems, "\n".join(f"rank {rank}: {problem}" for problem, rank in problems.items())
