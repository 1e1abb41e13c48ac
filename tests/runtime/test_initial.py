"""Initial values: the generator by its published answers, and the same weights whatever the grid."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from axonn_tune.grid import Grid
from axonn_tune.runtime import philox
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.parameters import Matrix, ParameterStore

GRIDS = [
    Grid(2, 2, 2, 2),
    Grid(3, 2, 1, 1),
    Grid(1, 2, 3, 1, order=("z", "y", "x", "data")),
    Grid(4, 1, 2, 1, order=("data", "z", "x", "y")),
]
ROWS, COLUMNS = 48, 24
LAYOUTS: dict[str, dict[str, Any]] = {
    "normal": {"row_axes": ("y",), "column_axes": ("x",), "real_rows": 48, "deviation": 0.02},
    "transposed": {"row_axes": ("x",), "column_axes": ("y",), "real_rows": 48, "deviation": 0.5},
    "table": {"row_axes": ("x", "y"), "column_axes": (), "real_rows": 41, "deviation": 0.02},
    "short table": {"row_axes": ("x", "y"), "column_axes": (), "real_rows": 7, "deviation": 0.02},
}


def store(grid: Grid, rank: int, *, device: str = "cpu", dtype: torch.dtype = torch.float64) -> ParameterStore:
    """An empty store of one rank; storing sends nothing, so no rank needs to run."""
    return ParameterStore(Mesh(grid, rank, {}), seed=5, dtype=dtype, device=torch.device(device))


def shard(grid: Grid, rank: int, name: str) -> Matrix:
    """A matrix as one rank holds it."""
    return store(grid, rank).matrix(name, ROWS, COLUMNS, **LAYOUTS[name])


@pytest.mark.parametrize("counter", [0, 1, 12345, 2**31, 2**32 - 1, 2**32, 3 * 2**40 + 7])
@pytest.mark.parametrize("key", [(0, 0), philox.key_of(7, "embedding"), philox.key_of(7, "blocks.1.mlp.fc1.weight")])
def test_philox_is_the_one_of_the_paper(counter: int, key: tuple[int, int]) -> None:
    """Guards 32-bit products held in signed 64-bit integers, and the answer published with Random123 (kat_vectors)."""
    first, second = philox.philox(torch.tensor([counter]), key)
    assert (int(first), int(second)) == plain_philox(counter, key)
    assert counter or key != (0, 0) or (int(first), int(second)) == (0x6627E8D5, 0xE169C58D)


def plain_philox(counter: int, key: tuple[int, int]) -> tuple[int, int]:
    """Philox4x32-10 in Python's integers."""
    low = 2**32 - 1
    words, (left, right) = [counter & low, counter >> 32, 0, 0], key
    for _ in range(10):
        one, two = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [two >> 32 ^ words[1] ^ left, two & low, one >> 32 ^ words[3] ^ right, one & low]
        left, right = (left + 0x9E3779B9) & low, (right + 0xBB67AE85) & low
    return words[0], words[1]


def test_normal_values_are_normal() -> None:
    """Guards the inverse distribution function: mean, deviation and tails of 100,000 values."""
    values = philox.normal(torch.arange(100_000), philox.key_of(0, "w"))
    assert abs(values.mean()) < 4 / math.sqrt(100_000)
    assert abs(values.std() - 1) < 0.01
    assert abs((values.abs() > 1.959964).double().mean() - 0.05) < 0.003
    assert torch.isfinite(values).all()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_shards_of_any_grid_make_the_same_matrix(grid: Grid, name: str) -> None:
    """Guards equal initial weights: every rank's shard is its rectangle of what one rank alone would hold.

    Padding is zero, and no other value is.
    """
    whole, held = shard(Grid(), 0, name).value, torch.zeros(ROWS, COLUMNS)
    assert torch.equal(whole.all(dim=1), torch.arange(ROWS) < LAYOUTS[name]["real_rows"])
    for rank in range(grid.world):
        mine = shard(grid, rank, name)
        rows, columns = slice(mine.row_range.start, mine.row_range.stop), mine.column_range
        assert torch.equal(mine.value, whole[rows, columns.start : columns.stop])
        held[rows, columns.start : columns.stop] += 1
    copies = grid.world * len(mine.row_range) * len(mine.column_range) // (ROWS * COLUMNS)
    assert (held == copies).all(), "the shards cover the matrix, each element as often as any other"


def test_names_and_seeds_make_other_values() -> None:
    """Guards against two parameters that begin alike."""
    first, second = (shard(Grid(), 0, name).value / LAYOUTS[name]["deviation"] for name in ("normal", "transposed"))
    assert not torch.isclose(first, second).any()
    other = ParameterStore(Mesh(Grid(), 0, {}), seed=6, dtype=torch.float64, device=torch.device("cpu"))
    assert not torch.isclose(other.matrix("normal", ROWS, COLUMNS, **LAYOUTS["normal"]).value / 0.02, first).any()


def test_meta_device_holds_no_values() -> None:
    """Guards checks of models no host could hold: shapes without a counter being made."""
    huge = LAYOUTS["normal"] | {"real_rows": 2**20}
    made = store(Grid(1, 1, 2, 1), 0, device="meta").matrix("huge", 2**20, 2**20, **huge)
    assert made.value.is_meta
    assert made.value.shape == (2**19, 2**20)
