"""Training on a grid is training on one rank: the same numbers, from the collectives the program lists.

Twelve grids of 2 to 4 ranks run each time, the others of up to 5 nightly, more ranks before a release. Each trains
three steps in fp64 with every overlap, and one without. `steps.check` runs on every rank and returns what it finds
wrong; the tests here only ask for it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.nightly import params
from tests.runtime import steps
from tests.runtime.cases import (
    CONTEXT_TRAININGS,
    DEEP_TRAININGS,
    DELTA_TRAININGS,
    INNERMOST,
    LONG_MOE_TRAININGS,
    LORA_TRAININGS,
    MOE_TRAININGS,
    OPTIMIZER_TRAININGS,
    SETS,
    TRAININGS,
    Case,
    cases,
    context_cases,
    daily,
    delta_cases,
    expert_cases,
    lora_cases,
    optimizer_cases,
    split_cases,
)
from tests.runtime.pool import Pools

Serial = Callable[[Case], Path]
EVERY = cases()
MORE = context_cases() | expert_cases() | delta_cases() | optimizer_cases() | split_cases() | lora_cases()
DAILY = {*daily(EVERY), *(case for case, each_time in MORE.items() if each_time)}
DAILY_SETS = (SETS[1],)


@pytest.fixture(scope="session")
def serial(tmp_path_factory: pytest.TempPathFactory) -> Serial:
    """Path of the serial run's record, which is made when it is first asked for, by whichever worker that is."""
    known = [*TRAININGS, *DEEP_TRAININGS, *CONTEXT_TRAININGS, *MOE_TRAININGS, *LONG_MOE_TRAININGS, *DELTA_TRAININGS]
    known += [*OPTIMIZER_TRAININGS, *LORA_TRAININGS]
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def path(case: Case) -> Path:
        # Micro-batches change nothing but which tokens a load-balancing loss counts.
        training, accumulation = case.training, case.accumulation if case.training.balance else 1
        found = folder / f"serial-{known.index(training)}-{accumulation}.pt"
        if not found.exists():
            mine = found.with_suffix(f".{os.getpid()}")
            torch.save(steps.serial(training, accumulation), mine)
            mine.replace(found)
        return found

    return path


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    """When a case trains: six ranks and more on two cores wait for each other most of the time."""
    return [] if case in DAILY else [pytest.mark.deep if case.grid.world >= 6 else pytest.mark.nightly]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=marks_of(case))
        for case in sorted([*EVERY, *MORE], key=lambda case: case.grid.world)
    ],
)
def test_grid_trains_as_one_rank_does(case: Case, pools: Pools, serial: Serial) -> None:
    """Guards the 4D algorithm: gradients, loss, norm and weights of the serial run within rounding.

    And with it that overlap changes no bit, on however slow a network, and that what was sent is what the program says.
    """
    found = pools(case.grid.world).run(steps.check, case, serial(case))
    problems = {problem: rank for rank, said in reversed(list(enumerate(found))) for problem in said}
    assert not problems, "\n".join(f"rank {rank}: {problem}" for problem, rank in problems.items())


@pytest.mark.parametrize("case", params(SETS, [str(one) for one in SETS if one not in DAILY_SETS]))
def test_recompute_sets_train_as_one_rank_does(case: Case, pools: Pools, serial: Serial) -> None:
    """Guards recompute by modules, and of the first blocks of each chunk alone, as the test above; and that the first
    step's loss and gradients are those without recompute, to the bit."""
    found = pools(case.grid.world).run(steps.check, case, serial(case))
    found = [*found, *pools(case.grid.world).run(steps.repeats_to_the_bit, case)]
    assert not [problem for said in found for problem in said]


def test_every_two_values_meet() -> None:
    """Guards the covering: of grids without stages every two values of two dimensions; of all, seven in ten daily."""
    chosen = [case for case in EVERY if case.grid.world > 1 and case.grid.pipeline == 1]
    values = [set(dimension) for dimension in zip(*(case.values() for case in chosen), strict=True)]
    assert [len(dimension) for dimension in values] == [2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 3, 3, 3, 2, 2, 3, 3, 3, 3]
    met = set().union(*(case.pairs() for case in chosen))
    for (one, first), (other, second) in itertools.combinations(enumerate(values), 2):
        for mine, theirs in itertools.product(first, second):
            assert (False, ((one, mine), (other, theirs))) in met or mine == theirs == INNERMOST
    assert len(EVERY) == 89
    assert len(met & set().union(*(case.pairs() for case in DAILY))) > 0.7 * len(met)
