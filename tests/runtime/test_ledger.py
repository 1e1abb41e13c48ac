"""The ledger's comparison with the program: silent when they agree, and by name when they do not."""

from __future__ import annotations

import pytest

from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import step_values, symbol_values
from axonn_tune.program.step import StepProgram, build_step
from axonn_tune.runtime.ledger import Ledger, LedgerEntry, RankProgram, compare
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.workload import Workload

MODEL = load_model("nano").document
WORKLOAD = Workload(global_batch=48, sequence_length=64, precision="fp32")
GRID = Grid(2, 2, 2, 2)
VALUES = step_values(MODEL, WORKLOAD, GRID, micro_batch=3, kept_layers=1)


@pytest.fixture
def program() -> StepProgram:
    """A step of nano."""
    return build_step(MODEL, WORKLOAD, recompute="none")


def follow(program: StepProgram, *, steps: int = 1) -> Ledger:
    """A ledger that says what the program says."""
    ledger = Ledger()
    for entry, count in RankProgram(program, VALUES).collectives().items():
        for _ in range(count * steps):
            ledger.record(entry)
    return ledger


def test_agreement_is_silent(program: StepProgram) -> None:
    """Guards against false alarms, over one step and over three."""
    assert compare(follow(program), RankProgram(program, VALUES)) == []
    assert compare(follow(program, steps=3), RankProgram(program, VALUES), steps=3) == []


def test_a_term_that_is_missing_is_named(program: StepProgram) -> None:
    """Guards the words of a collective that was not sent often enough."""
    ledger = follow(program)
    ledger.counts[LedgerEntry("all_reduce", "y", "forward", "mlp.fc1", 3 * 64 * 384 * 4)] -= 1
    (said,) = compare(ledger, RankProgram(program, VALUES))
    assert said == ("all_reduce over y, forward, mlp.fc1: expected 8 × 294,912 bytes, got 7 × 294,912 bytes")


def test_a_term_of_another_size_is_one_difference(program: StepProgram) -> None:
    """Guards that bytes count, and that a wrong size is not told as two wrong terms."""
    ledger = follow(program)
    right = LedgerEntry("all_reduce", "x", "forward", "mlp.fc2", 3 * 64 * 96 * 4)
    ledger.counts[LedgerEntry("all_reduce", "x", "forward", "mlp.fc2", 8)] = ledger.counts.pop(right)
    (said,) = compare(ledger, RankProgram(program, VALUES))
    assert said.endswith("expected 8 × 73,728 bytes, got 8 × 8 bytes")


def test_a_term_nobody_planned_is_named(program: StepProgram) -> None:
    """Guards against traffic that no prediction knows of."""
    ledger = follow(program)
    ledger.record(LedgerEntry("all_gather", "data", "step", "secret", 4))
    ledger.record(LedgerEntry("all_gather", "data", "step", "secret", 8))
    (said,) = compare(ledger, RankProgram(program, VALUES))
    assert said == ("all_gather over data, step, secret: expected none, got 1 × 4 bytes and 1 × 8 bytes")


def test_one_rank_sends_nothing(program: StepProgram) -> None:
    """Guards groups of one, which leave no trace."""
    alone = step_values(MODEL, WORKLOAD, Grid(), micro_batch=3, kept_layers=0)
    assert compare(Ledger(), RankProgram(program, alone)) == []


@pytest.mark.parametrize("grid", [Grid(), GRID, Grid(3, 1, 2, 1), Grid(1, 8, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["nano", "llama3-8b"])
def test_values_are_those_that_were_priced(grid: Grid, name: str) -> None:
    """Guards the contract between the halves: runtime and cost model fill in the same numbers."""
    model = load_model(name).document
    priced = symbol_values(model, WORKLOAD, grid, micro_batch=2) | {"kept": 1.0, "unkept": model.layers - 1}
    assert step_values(model, WORKLOAD, grid, micro_batch=2, kept_layers=1) == priced
