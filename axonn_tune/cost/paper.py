"""The paper's own communication model (arXiv 2305.13525, equations 1 to 7), as published, as released, as mended.

Three backends price the same five collectives of every linear layer of a transformer block:

==================  ===================  ==========  ====================================  ============
backend             bandwidths           recompute   layer shapes                          default order
==================  ===================  ==========  ====================================  ============
``paper``           equation 7, table    no          true                                  x, y, z, data
                    inside a node
``paper-released``  table, every group   full        fc2 with k and n swapped, as the      y, x, z, data
                                                     authors' script has it
``paper-mended``    table, every group   full        true                                  y, x, z, data
==================  ===================  ==========  ====================================  ============

The script writes a layer's widths as H and K·H, K = 3, 1, 4, 4. Here they are the model's own: the
same for the paper's models, and the natural reading for others. Everything the script leaves out is
left out: latency, embedding and LM head, memory, compute, overlap, divisibility. Elements have 2 bytes
and gradients reduced over data 4 whatever the workload's precision; one step is one pass over the
batch (no gradient accumulation).

Legend: M tokens of one data-parallel replica, K and N a layer's input and output width, G_i the size
of axis i, β_i the bandwidth of its groups. Subscripts name the axes a dim is split over. A transposed
layer is the same with x and y exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from axonn_tune.errors import UsageError
from axonn_tune.grid import AXES, PAPER_ORDER
from axonn_tune.program.operations import Floats, Integers
from axonn_tune.specs.machine import CollectiveKind, Machine, PaperTable
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.units import GIB

PaperBackend = Literal["paper", "paper-released", "paper-mended"]
Phase = Literal["forward", "recompute", "backward"]
Sizes: TypeAlias = Integers | int

RELEASED_ORDER = ("y", "x", "z", "data")
NO_BANDWIDTH_ENTRY = "no-bandwidth-entry"
"""Why a candidate is rejected: the machine's table has no bandwidth for one of its groups."""

ELEMENT_BYTES = 2.0
DATA_GRADIENT_BYTES = 4.0


def table_bandwidth(table: PaperTable, *, inner: Integers, group: Integers) -> Floats:
    """Look bandwidths (bytes/s) up by (product of inner axes, own size); nan, which callers reject, without an entry.

    An exact entry wins; else the entry with `group: null`, for groups larger than every size listed
    for that inner product. Inner products beyond the largest listed use the largest.
    """
    largest_inner = max((entry.inner for entry in table.table), default=0)
    largest_group = max((entry.group or 0 for entry in table.table), default=0)
    cells = np.full((largest_inner + 1, largest_group + 2), np.nan)
    for entry in sorted(table.table, key=lambda entry: entry.group is not None):
        bandwidth_bytes_per_s = entry.bandwidth_gib_per_s * GIB
        if entry.group is None:
            listed = max((other.group or 0 for other in table.table if other.inner == entry.inner), default=0)
            cells[entry.inner, listed + 1 :] = bandwidth_bytes_per_s
        else:
            cells[entry.inner, entry.group] = bandwidth_bytes_per_s
    return cells[np.minimum(inner, largest_inner), np.minimum(group, largest_group + 1)]


def equation_7_bandwidth(table: PaperTable, *, inner: Integers, group: Integers) -> Floats:
    """Bandwidth of an axis, arXiv 2305.13525 equation 7: β_i = β_inter / min(G_node, ∏_{j<i} G_j), bytes/s.

    For groups that span nodes. A group inside a node (inner · own ≤ G_node) takes its entry of the
    measured table, nan if there is none.
    """
    spanning_bytes_per_s = table.inter_node_gib_per_s * GIB / np.minimum(table.ranks_per_node, inner)
    inside = table_bandwidth(table, inner=inner, group=group)
    return np.where(inner * group <= table.ranks_per_node, inside, spanning_bytes_per_s)


@dataclass(frozen=True)
class PaperTerm:
    """One collective of one layer of every block: a column entry per candidate, where it is an array.

    count: calls per step and rank; bytes: full (gathered or reduced) buffer of one call;
    bandwidth_bytes_per_s: infinite for a group of one, nan where the table has no entry;
    seconds: all calls together, infinite where the table has no entry.
    """

    equation: int
    op: CollectiveKind
    axis: str
    phase: Phase
    layer: str
    count: int
    bytes: Floats
    group: Integers
    bandwidth_bytes_per_s: Floats
    seconds: Floats


@dataclass(frozen=True)
class PaperPrices:
    """Communication time of one step per candidate: the left fold of its terms' seconds.

    communication_s is infinite where `rejected`, always for the reason `NO_BANDWIDTH_ENTRY`.
    """

    communication_s: Floats
    rejected: NDArray[np.bool_]
    terms: tuple[PaperTerm, ...]


@dataclass(frozen=True)
class PaperLayer:
    """A linear layer O[M, N] = I[M, K] · W[K, N]; `transposed` exchanges the roles of x and y."""

    name: str
    k: int
    n: int
    transposed: bool

    @property
    def output_axis(self) -> str:
        """Axis the forward all-reduce of O runs over."""
        return "x" if self.transposed else "y"

    @property
    def input_axis(self) -> str:
        """Axis the backward all-reduce of dI runs over."""
        return "y" if self.transposed else "x"


@dataclass(frozen=True)
class PaperGrids:
    """Candidate grids of one model and workload, as columns, with the bandwidth of every axis."""

    blocks: int
    tokens: int
    group: Mapping[str, Integers]
    bandwidth_bytes_per_s: Mapping[str, Floats]

    @property
    def split_of_weights(self) -> Integers:
        """Gx·Gy: shards of a gathered weight W[K_y, N_x]."""
        return self.group["x"] * self.group["y"]

    @property
    def replica_tokens(self) -> Floats:
        """M: tokens of one data-parallel replica."""
        return self.tokens / self.group["data"]

    def term(
        self, layer: PaperLayer, *, equation: int, op: CollectiveKind, axis: str, phase: Phase, buffer_bytes: Floats
    ) -> PaperTerm:
        """Price a ring: every rank sends (G−1)/G of the buffer, twice for an all-reduce."""
        group, bandwidth_bytes_per_s = self.group[axis], self.bandwidth_bytes_per_s[axis]
        passes = 2 if op == "all_reduce" else 1
        seconds = self.blocks * passes * ((group - 1) / group) * buffer_bytes / bandwidth_bytes_per_s
        return PaperTerm(
            equation=equation,
            op=op,
            axis=axis,
            phase=phase,
            layer=layer.name,
            count=self.blocks,
            bytes=buffer_bytes,
            group=group,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            seconds=np.where(np.isnan(bandwidth_bytes_per_s), np.inf, seconds),
        )


def gather_weight(layer: PaperLayer, *, grids: PaperGrids, phase: Phase = "forward") -> PaperTerm:
    """All-gather of W over z, arXiv 2305.13525 equation 1: (1/β_z)·(Gz−1)·kn/(Gx·Gy·Gz).

    `W[K_yz, N_x] -> W[K_y, N_x]`
    """
    buffer_bytes = ELEMENT_BYTES * layer.k * layer.n / grids.split_of_weights
    return grids.term(layer, equation=1, op="all_gather", axis="z", phase=phase, buffer_bytes=buffer_bytes)


def scatter_weight_gradient(layer: PaperLayer, *, grids: PaperGrids) -> PaperTerm:
    """Reduce-scatter of dW over z, arXiv 2305.13525 equation 2: (1/β_z)·((Gz−1)/Gz)·kn/(Gx·Gy).

    `dW[K_yz, N_x] = Σ_z dŴ[K_y, N_x]`
    """
    buffer_bytes = ELEMENT_BYTES * layer.k * layer.n / grids.split_of_weights
    return grids.term(layer, equation=2, op="reduce_scatter", axis="z", phase="backward", buffer_bytes=buffer_bytes)


def reduce_output(layer: PaperLayer, *, grids: PaperGrids, phase: Phase = "forward") -> PaperTerm:
    """All-reduce of O over y, arXiv 2305.13525 equation 3: (2/β_y)·((Gy−1)/Gy)·mn/(Gz·Gx).

    `O[M_z, N_x] = Σ_y I[M_z, K_y] · W[K_y, N_x]`
    """
    kept_split = grids.group["z"] * grids.group[layer.input_axis]
    buffer_bytes = ELEMENT_BYTES * grids.replica_tokens * layer.n / kept_split
    axis = layer.output_axis
    return grids.term(layer, equation=3, op="all_reduce", axis=axis, phase=phase, buffer_bytes=buffer_bytes)


def reduce_input_gradient(layer: PaperLayer, *, grids: PaperGrids) -> PaperTerm:
    """All-reduce of dI over x, arXiv 2305.13525 equation 4: (2/β_x)·((Gx−1)/Gx)·mk/(Gz·Gy).

    `dI[M_z, K_y] = Σ_x dO[M_z, N_x] · Wᵀ[N_x, K_y]`
    """
    kept_split = grids.group["z"] * grids.group[layer.output_axis]
    buffer_bytes = ELEMENT_BYTES * grids.replica_tokens * layer.k / kept_split
    axis = layer.input_axis
    return grids.term(layer, equation=4, op="all_reduce", axis=axis, phase="backward", buffer_bytes=buffer_bytes)


def reduce_weight_gradient(layer: PaperLayer, *, grids: PaperGrids) -> PaperTerm:
    """All-reduce of dW over data, arXiv 2305.13525 equation 5: (2/β_data)·((Gdata−1)/Gdata)·kn/(Gx·Gy·Gz).

    `dW[K_yz, N_x] = Σ_data dW[K_yz, N_x]`, in 4-byte elements.
    """
    split = grids.split_of_weights * grids.group["z"]
    buffer_bytes = DATA_GRADIENT_BYTES * layer.k * layer.n / split
    return grids.term(layer, equation=5, op="all_reduce", axis="data", phase="backward", buffer_bytes=buffer_bytes)


def layer_terms(layer: PaperLayer, *, grids: PaperGrids, recompute: bool) -> tuple[PaperTerm, ...]:
    """Terms of one layer in every block, arXiv 2305.13525 equation 6: the sum of equations 1 to 5.

    Full recompute runs the forward collectives a second time, as the released script counts them.
    """
    phases: tuple[Phase, ...] = ("forward", "recompute") if recompute else ("forward",)
    forward = (
        equation(layer, grids=grids, phase=phase) for phase in phases for equation in (gather_weight, reduce_output)
    )
    backward = (reduce_input_gradient, scatter_weight_gradient, reduce_weight_gradient)
    return (*forward, *(equation(layer, grids=grids) for equation in backward))


def block_layers(model: Model) -> tuple[PaperLayer, ...]:
    """The four linear layers of a block; qkv and gate with up are one layer each."""
    layer = model.plain
    return (
        PaperLayer("attention.qkv", k=model.hidden, n=layer.qkv_width, transposed=False),
        PaperLayer("attention.output", k=layer.query_width, n=model.hidden, transposed=True),
        PaperLayer("mlp.fc1", k=model.hidden, n=layer.up_width, transposed=False),
        PaperLayer("mlp.fc2", k=model.ffn, n=model.hidden, transposed=True),
    )


def price_paper(  # noqa: PLR0913 - a candidate is four sizes and an order
    backend: PaperBackend,
    *,
    model: Model,
    machine: Machine,
    workload: Workload,
    x: Sizes,
    y: Sizes,
    z: Sizes,
    data: Sizes,
    order: tuple[str, ...] | None = None,
) -> PaperPrices:
    """Price the communication of one step on each candidate grid; one candidate is four plain integers.

    `order` names the axes from the fastest-varying rank outwards, for all candidates; without it each
    backend takes its own. Raises UsageError for a machine without a `paper` section, ValueError for an
    order that is no permutation of the axes.
    """
    columns = np.broadcast_arrays(*(np.atleast_1d(np.asarray(size, dtype=np.int64)) for size in (x, y, z, data)))
    group = dict(zip(AXES, columns, strict=True))
    grids = PaperGrids(
        blocks=model.layers,
        tokens=workload.global_batch * workload.sequence_length,
        group=group,
        bandwidth_bytes_per_s=_bandwidths(backend, machine=machine, group=group, order=order),
    )
    layers = block_layers(model)
    if backend == "paper-released":
        # The script exchanges the input and output widths of fc2.
        *others, fc2 = layers
        layers = (*others, replace(fc2, k=fc2.n, n=fc2.k))
    terms = tuple(term for layer in layers for term in layer_terms(layer, grids=grids, recompute=backend != "paper"))
    communication_s = np.zeros(len(columns[0]))
    for term in terms:
        communication_s = communication_s + term.seconds
    return PaperPrices(communication_s=communication_s, rejected=np.isinf(communication_s), terms=terms)


def _bandwidths(
    backend: PaperBackend, *, machine: Machine, group: Mapping[str, Integers], order: tuple[str, ...] | None
) -> dict[str, Floats]:
    """Bandwidth of every axis, bytes/s, by the rank order and the rule of a backend: infinite for groups of one."""
    if machine.paper is None:
        dropped = "; it is dropped where a network level is changed"
        raise UsageError(f"machine {machine.name!r} has no 'paper' section, which the {backend!r} cost needs{dropped}")
    inner_first = order or (PAPER_ORDER if backend == "paper" else RELEASED_ORDER)
    if sorted(inner_first) != sorted(AXES):
        raise ValueError(f"order must name each of {', '.join(AXES)} once, not {', '.join(inner_first)}")
    rule = equation_7_bandwidth if backend == "paper" else table_bandwidth
    inner, found = np.ones_like(group[inner_first[0]]), {}
    for axis in inner_first:
        found[axis] = np.where(group[axis] == 1, np.inf, rule(machine.paper, inner=inner, group=group[axis]))
        inner = inner * group[axis]
    return found
