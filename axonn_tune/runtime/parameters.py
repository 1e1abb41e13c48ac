"""Parameters as each rank stores them: rectangles of matrices, pieces of vectors, in the main type.

A matrix `W[rows, columns]` has its rows split over some axes and then over z, its columns over at
most one axis. Gathering over z gives the block a product needs. Vectors are split over one axis and
repeated on the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from axonn_tune.runtime import initial
from axonn_tune.runtime.mesh import Mesh


@dataclass(frozen=True)
class Layout:
    """How a matrix lies on the grid.

    real_rows: rows beyond it are padding and stay zero; deviation: of the initial normal values.
    """

    name: str
    rows: int
    columns: int
    row_axes: tuple[str, ...]
    column_axis: str | None
    real_rows: int
    deviation: float


@dataclass
class Matrix:
    """One rank's shard of a matrix, in the main type, with its accumulated gradient.

    gathered_rows: rows of the block gathered over z; row_range, column_range: those of the shard itself.
    """

    layout: Layout
    gathered_rows: range
    row_range: range
    column_range: range
    main: torch.Tensor
    gradient: torch.Tensor


@dataclass
class Vector:
    """A vector, split over one axis."""

    name: str
    width: int
    axis: str
    piece: range
    main: torch.Tensor
    gradient: torch.Tensor


@dataclass
class Store:
    """Makes and holds the parameters of one rank, in a fixed order."""

    mesh: Mesh
    seed: int
    dtype: torch.dtype
    device: torch.device
    matrices: list[Matrix] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)

    def matrix(self, layout: Layout) -> Matrix:
        """This rank's shard, initialised from counters: the same elements on every grid."""
        gathered = _part(range(layout.rows), layout.row_axes, self.mesh)
        rows = _part(gathered, ("z",), self.mesh)
        columns = _part(range(layout.columns), (layout.column_axis,) if layout.column_axis else (), self.mesh)
        main = torch.zeros(len(rows), len(columns), dtype=self.dtype, device=self.device)
        real = range(rows.start, max(rows.start, min(rows.stop, layout.real_rows)))
        if len(real) and not main.is_meta:
            key = initial.key_of(self.seed, layout.name)
            counters = initial.counters(real, columns, width=layout.columns, device=self.device)
            main[: len(real)] = (layout.deviation * initial.normal(counters, key)).to(self.dtype)
        made = Matrix(layout, gathered, rows, columns, main, torch.zeros_like(main))
        self.matrices.append(made)
        return made

    def vector(self, name: str, width: int, axis: str, *, value: float) -> Vector:
        """This rank's piece of a vector that starts constant."""
        piece = _part(range(width), (axis,), self.mesh)
        main = torch.full((len(piece),), value, dtype=self.dtype, device=self.device)
        made = Vector(name, width, axis, piece, main, torch.zeros_like(main))
        self.vectors.append(made)
        return made


def _part(whole: range, axes: tuple[str, ...], mesh: Mesh) -> range:
    """The part of a range that belongs to this rank, split over axes one after the other."""
    for axis in axes:
        size, place = mesh.grid.axis_size(axis), mesh.coordinate(axis)
        length = len(whole) // size
        whole = range(whole.start + place * length, whole.start + (place + 1) * length)
    return whole
