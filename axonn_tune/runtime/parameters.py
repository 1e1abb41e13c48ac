"""Parameters as each rank stores them: shards of matrices and vectors, with FP32 master weights.

A matrix `W[rows, columns]` has its rows split over some axes and then over z, its columns over at
most one axis. An all-gather over z gives the weight that a GEMM needs. Vectors are split over one axis
and replicated over the others. Buckets make parameters contiguous that are reduced and updated together.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from axonn_tune.grid import split_axes
from axonn_tune.runtime import philox
from axonn_tune.runtime.mesh import Mesh

_ELEMENTS_AT_ONCE = 1 << 24
"""Initial values are drawn so many at a time: each needs about 100 bytes on its way."""


@dataclass
class Matrix:
    """One rank's shard of a matrix `W[real_rows, columns]`, with its accumulated gradient in the master type.

    name: the same on every grid; rows beyond `real_rows` are padding and stay zero; split_axes: axes over which ranks
    hold different elements; shard_axis: that of them over which the weight is gathered, "" of an adapter;
    gathered_rows: its rows then; row_range, column_range: those of the shard itself; value: the shard in the master
    type, or in the compute type if master weights are sharded over data. column_axes: axes that split columns; parts:
    columns of this shard that an optimizer takes for a matrix each; of: blocks that have it, where there are several
    kinds. trains: otherwise its gradient is empty, and its value in the compute type.
    """

    name: str
    real_rows: int
    columns: int
    split_axes: frozenset[str]
    shard_axis: str
    gathered_rows: range
    row_range: range
    column_range: range
    value: torch.Tensor
    gradient: torch.Tensor
    column_axes: tuple[str, ...] = ()
    parts: tuple[torch.Tensor, ...] = ()
    of: str = ""
    trains: bool = True

    @property
    def layer(self) -> str:
        """What the program calls the layer, in a block of its kind."""
        return re.sub(r"^blocks\.\d+\.|experts\.\d+\.|\.weight$", "", self.name)


@dataclass
class Vector:
    """A vector in the master type, split over one axis or none; elements: those that this rank has.

    rate: of a router's bias, which moves by so much a step; its gradient is how many tokens each expert got. of_heads:
    each rank of x has the gradient of its heads. trains: otherwise its gradient is empty.
    """

    name: str
    width: int
    split_axes: frozenset[str]
    elements: range
    value: torch.Tensor
    gradient: torch.Tensor
    rate: float | None = None
    of_heads: bool = False
    trains: bool = True


Parameter: TypeAlias = Matrix | Vector


@dataclass
class Bucket:
    """Parameters whose values are contiguous in memory, and so are their gradients.

    layer: what the program calls the reduction of their gradients; value, gradient: flat, padded to divide over data
    where master weights are; axes: the group that holds the same shards; own: elements that this rank's optimizer
    updates; master: these in the master type, a view of `value` unless they are split; count: steps of AdamW, on the
    device, as torch's fused kernel needs it; copies: pipeline stages that hold these parameters; rule: the optimizer
    that updates them, with its states in the layout of `master`.
    """

    layer: str
    parameters: list[Parameter]
    value: torch.Tensor
    gradient: torch.Tensor
    own: range
    master: torch.Tensor
    count: torch.Tensor
    split: bool
    axes: str
    copies: int = 1
    rule: str = ""
    states: tuple[torch.Tensor, ...] = ()

    @property
    def own_gradient(self) -> torch.Tensor:
        """Gradient of the elements that this rank's optimizer updates, a view."""
        return self.gradient[self.own.start : self.own.stop]

    def split_axes(self, parameter: Parameter) -> frozenset[str]:
        """Axes over which ranks update different elements of a parameter."""
        return parameter.split_axes | (set(split_axes(self.axes)) if self.split else set())

    def slices(self, parameter: Parameter, flat: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
        """Slices of a parameter in `flat`, which has the layout of `master`: `(first row, first column, values)`,
        views.

        A run of elements is the end of a row, whole rows, and the beginning of one; of a vector it is one column.
        At least one slice is returned, empty if need be.
        """
        begin = 0
        for other in self.parameters:
            if other is parameter:
                break
            begin += other.value.numel()
        width = parameter.value[0].numel() if parameter.value.numel() else 1
        start = max(begin, self.own.start) - begin
        stop = min(begin + parameter.value.numel(), self.own.stop) - begin
        found = []
        while start < stop:
            whole = (stop - start) // width if start % width == 0 else 0
            length = whole * width if whole else min(stop - start, width - start % width)
            offset = begin + start - self.own.start
            columns = width if whole else length
            found.append((start // width, start % width, flat[offset : offset + length].view(-1, columns)))
            start += length
        return found or [(0, 0, flat[:0].view(0, width))]


@dataclass
class ParameterStore:
    """Makes and holds the parameters of one rank, in a fixed order.

    frozen: the compute type, where only adapters train.
    """

    mesh: Mesh
    seed: int
    dtype: torch.dtype
    device: torch.device
    frozen: torch.dtype | None = None
    matrices: list[Matrix] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)

    def matrix(
        self,
        name: str,
        rows: int,
        columns: int,
        *,
        row_axes: tuple[str, ...],
        column_axes: tuple[str, ...],
        real_rows: int,
        deviation: float,
        shard_axis: str = "z",
    ) -> Matrix:
        """This rank's shard, initialised from counters: the same elements on every grid.

        rows: with padding; row_axes, column_axes: what they are split over, rows then also over `shard_axis`, z or for
        an expert what is left of it, or "" of an adapter; deviation: standard deviation of the initial values.
        """
        gathered, shards = part_of(range(rows), row_axes, self.mesh), {shard_axis} - {""}
        own = part_of(gathered, tuple(shards), self.mesh)
        across = part_of(range(columns), column_axes, self.mesh)
        trains = self.frozen is None or not shard_axis
        dtype = self.dtype if trains or self.frozen is None else self.frozen
        value = torch.zeros(len(own), len(across), dtype=dtype, device=self.device)
        real = range(own.start, max(own.start, min(own.stop, real_rows)))
        if not value.is_meta and deviation:
            key, rows_at_once = philox.key_of(self.seed, name), max(1, _ELEMENTS_AT_ONCE // len(across))
            for start in range(real.start, real.stop, rows_at_once):
                some = range(start, min(start + rows_at_once, real.stop))
                down, right = (torch.arange(one.start, one.stop, device=self.device) for one in (some, across))
                # Index of each element in the whole tensor, row by row.
                counters = down[:, None] * columns + right
                value[start - own.start : some.stop - own.start] = deviation * philox.normal(counters, key)
        split = frozenset({*shards, *row_axes, *column_axes, *(["expert"] if shards - {"z"} else [])})
        places, gradient = (gathered, own, across), torch.zeros_like(value) if trains else value.new_empty(0)
        made = Matrix(name, real_rows, columns, split, shard_axis, *places, value, gradient, column_axes, trains=trains)
        self.matrices.append(made)
        return made

    def vector(
        self,
        name: str,
        width: int,
        *axes: str,
        value: float,
        deviation: float = 0.0,
        rate: float | None = None,
        of_heads: bool = False,
    ) -> Vector:
        """This rank's shard of a vector that starts constant, or with a standard deviation about that."""
        elements = part_of(range(width), axes, self.mesh)
        values = torch.full((len(elements),), value, dtype=self.dtype, device=self.device)
        if deviation and not values.is_meta:
            counters = torch.arange(elements.start, elements.stop, device=self.device)
            values += deviation * philox.normal(counters, philox.key_of(self.seed, name))
        trains, axes_of = self.frozen is None, frozenset(axes)
        gradient = torch.zeros_like(values) if trains else values.new_empty(0)
        made = Vector(name, width, axes_of, elements, values, gradient, rate, of_heads, trains)
        self.vectors.append(made)
        return made

    def bucket(self, layer: str, parameters: Sequence[Parameter], *, compute: torch.dtype | None = None) -> Bucket:
        """Make parameters contiguous; `compute`: keep values in this type, and shard the master weights over data."""
        experts = isinstance(parameters[0], Matrix) and parameters[0].shard_axis not in ("z", "")
        axes = self.mesh.replicas("expert_data" if experts else "data")
        elements = sum(one.value.numel() for one in parameters)
        shares = self.mesh.size(axes) if compute is not None else 1
        share = -(-elements // shares)
        whole, gradient = (torch.zeros(share * shares, dtype=self.dtype, device=self.device) for _ in range(2))
        for one, part in zip(parameters, views_of(whole, parameters), strict=True):
            part.copy_(one.value)
        place = self.mesh.place(axes) if shares > 1 else 0
        own = range(place * share, (place + 1) * share)
        value, master = whole, whole
        if compute is not None:
            value, master = whole.to(compute, copy=True), whole[own.start : own.stop].clone()
        for one, part, its in zip(parameters, views_of(value, parameters), views_of(gradient, parameters), strict=True):
            one.value, one.gradient = part, its
        count = torch.zeros((), device=self.device)
        made = Bucket(layer, list(parameters), value, gradient, own, master, count, compute is not None, axes)
        self.buckets.append(made)
        return made


def views_of(flat: torch.Tensor, parameters: Sequence[Parameter]) -> list[torch.Tensor]:
    """Views of a flat tensor in the shapes of parameters, one after the other."""
    begin, found = 0, []
    for one in parameters:
        found.append(flat[begin : begin + one.value.numel()].view_as(one.value))
        begin += one.value.numel()
    return found


def part_of(whole: range, axes: tuple[str, ...], mesh: Mesh) -> range:
    """The part of a range that belongs to this rank, split over axes one after the other."""
    for axis in axes:
        size, place = mesh.size(axis), mesh.coordinate(axis)
        length = len(whole) // size
        whole = range(whole.start + place * length, whole.start + (place + 1) * length)
    return whole
