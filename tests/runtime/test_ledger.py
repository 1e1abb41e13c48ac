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
    """Guards against false alarms, over one step, over three, and on one rank, whose groups leave no trace."""
    assert compare(follow(program), RankProgram(program, VALUES)) == []
    assert compare(follow(program, steps=3), RankProgram(program, VALUES), steps=3) == []
    alone = step_values(MODEL, WORKLOAD, Grid(), micro_batch=3, kept_layers=0)
    assert compare(Ledger(), RankProgram(program, alone)) == []


def test_each_term_that_differs_is_one_line(program: StepProgram) -> None:
    """Guards the words: a call that is missing, one of another size, and two that nobody planned."""
    ledger = follow(program)
    ledger.counts[LedgerEntry("all_reduce", "y", "forward", "mlp.fc1", 3 * 64 * 384 * 4)] -= 1
    right = LedgerEntry("all_reduce", "x", "forward", "mlp.fc2", 3 * 64 * 96 * 4)
    ledger.counts[LedgerEntry("all_reduce", "x", "forward", "mlp.fc2", 8)] = ledger.counts.pop(right)
    ledger.record(LedgerEntry("all_gather", "data", "step", "secret", 4))
    ledger.record(LedgerEntry("all_gather", "data", "step", "secret", 8))
    assert set(compare(ledger, RankProgram(program, VALUES))) == {
        "all_reduce over y, forward, mlp.fc1: expected 8 × 294,912 bytes, got 7 × 294,912 bytes",
        "all_reduce over x, forward, mlp.fc2: expected 8 × 73,728 bytes, got 8 × 8 bytes",
        "all_gather over data, step, secret: expected none, got 1 × 4 bytes and 1 × 8 bytes",
    }


@pytest.mark.parametrize("grid", [Grid(), GRID, Grid(3, 1, 2, 1), Grid(1, 8, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["nano", "llama3-8b"])
def test_values_are_those_that_were_priced(grid: Grid, name: str) -> None:
    """Guards the contract between the halves: runtime and cost model fill in the same numbers."""
    model = load_model(name).document
    priced = symbol_values(model, WORKLOAD, grid, micro_batch=2) | {"kept": 1.0, "unkept": model.layers - 1}
    assert step_values(model, WORKLOAD, grid, micro_batch=2, kept_layers=1) == priced
