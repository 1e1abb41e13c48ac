"""Adapters of low rank beside linear layers that do not train: `O[M, n] += α/r · (I[M, k] · A[k, r]) · B[r, n]`.

Letters as in `axonn_tune.runtime.modules`. A is split as the rows of its layer's weight, B, which is stored as
`Bᵀ[n, r]`, as the columns, and both are whole on all ranks of z. So an adapter sends nothing: what a rank adds to its
share of the output is summed with that, and the same of the input's gradient. Ranks among which a matrix is alike have
shares of its gradient, which are summed at the end of a step (`DataBuckets.reduce_adapters`).

Source: Hu et al., arXiv 2106.09685, section 4.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from axonn_tune.runtime.parameters import Matrix, ParameterStore
from axonn_tune.specs.model import Layer, Model
from axonn_tune.specs.tuning import Tuning

UP_DEVIATION = 0.0
"""Of the elements of B at the beginning: an adapter adds nothing then."""


@dataclass(frozen=True)
class Columns:
    """Columns of a linear layer's output that an adapter adds to: slices of each of so many equal groups."""

    groups: int
    slices: tuple[slice, ...]

    @property
    def width(self) -> int:
        """Columns of a group."""
        return sum(one.stop - one.start for one in self.slices)

    def of(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Views of `[M, n]`, `[M, groups, width of a slice]` each."""
        grouped = x.view(len(x), self.groups, -1)
        return [grouped[..., one] for one in self.slices]


@dataclass
class Adapter:
    """An adapter of a linear layer, or of a part of its outputs; scale: α/r."""

    down: Matrix
    up: Matrix
    scale: float
    columns: Columns | None

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        """A, and B transposed."""
        return self.down, self.up

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        """`I · A`, this rank's share of the sum over its rows, which the backward pass needs: `[M, r]`."""
        return x @ self.down.value.to(x.dtype)

    def add_to(self, output: torch.Tensor, middle: torch.Tensor) -> None:
        """Add to `[M, n]`, in place."""
        add_product(output, middle, self.up.value.to(middle.dtype), self.columns, self.scale)

    def backward(self, x: torch.Tensor, middle: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """Add to the gradients of both matrices, from that of the layer's output `[M, n]`; the gradient of `I · A`."""
        if self.columns is not None:
            gradient = torch.cat(self.columns.of(gradient), dim=-1).view(len(gradient), -1)
        of_middle = (gradient @ self.up.value.to(gradient.dtype)).mul_(self.scale)
        _add_product(self.up.gradient, gradient, middle, self.scale)
        _add_product(self.down.gradient, x, of_middle, 1.0)
        return of_middle

    def input_gradient(self, of_middle: torch.Tensor, found: torch.Tensor | None) -> torch.Tensor:
        """Add to what others have found of the input's gradient, `[M, k]`."""
        down = self.down.value.to(of_middle.dtype).t()
        return of_middle @ down if found is None else found.addmm_(of_middle, down)


def add_product(
    output: torch.Tensor, left: torch.Tensor, up: torch.Tensor, columns: Columns | None, scale: float
) -> None:
    """Add `scale · left · upᵀ` to `[M, n]`, or to some of its columns."""
    if columns is None:
        output.addmm_(left, up.t(), alpha=scale)
        return
    found, views = (left @ up.t()).view(len(left), columns.groups, -1), columns.of(output)
    for view, part in zip(views, torch.split(found, [one.shape[-1] for one in views], dim=-1), strict=True):
        view.add_(part, alpha=scale)


def _add_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> None:
    """Add `scale · leftᵀ · right`: in the GEMM where that has one type."""
    if into.dtype == left.dtype:
        into.addmm_(left.t(), right, alpha=scale)
    else:
        into.add_(left.t() @ right, alpha=scale)


def adapters_of(
    store: ParameterStore,
    tuning: Tuning | None,
    layer: Layer | None,
    name: str,
    shape: tuple[int, int],
    axes: tuple[str, str],
    *,
    scale: float,
) -> tuple[Adapter, ...]:
    """Those of a linear layer `W[k, n]`, such as `blocks.0.mlp.fc1`, of which axes split rows and columns; none where
    the model trains whole, or of a layer that cannot have some.

    B begins at zero, and A with the deviation that PEFT's uniform numbers have: 1 / √(3·k) (huggingface/peft@5d602fdb,
    src/peft/tuners/lora/layer.py, reset_lora_parameters).
    """
    if tuning is None or layer is None:
        return ()
    (rows, columns), found = shape, list[Adapter]()
    for its, own in _named(name, layer, tuning):
        width = own.groups * own.width if own is not None else columns
        down, up = (
            store.matrix(
                f"{its}.{suffix}",
                length,
                tuning.rank,
                row_axes=(axis,),
                column_axes=(),
                real_rows=length,
                deviation=deviation,
                shard_axis="",
            )
            for suffix, length, axis, deviation in (
                ("lora_a", rows, axes[0], (3.0 * rows) ** -0.5),
                ("lora_b", width, axes[1], UP_DEVIATION),
            )
        )
        here = None if own is None else Columns(own.groups // store.mesh.size(axes[1]), own.slices)
        found.append(Adapter(down, up, scale, here))
    return tuple(found)


def _named(name: str, layer: Layer, tuning: Tuning) -> Iterator[tuple[str, Columns | None]]:
    """Names of the adapters of a linear layer, such as `blocks.0.attention.qkv.q`, with what they add to; None: all."""
    linear = name.split(".", 2)[2]
    known = dict(_parts(layer, linear))
    for part in tuning.parts(linear):
        if not part or part in known:
            yield name + f".{part}" * bool(part), known.get(part)


def adapter_places(model: Model) -> dict[str, list[tuple[str, Columns | None]]]:
    """The same of each weight of a model, by its name."""
    if (tuning := model.tuning) is None:
        return {}
    layers = enumerate(model.types[index] for index, count in model.runs for _ in range(count))
    linears = ("attention.qkv", "attention.output", "mlp.fc1", "mlp.fc2")
    names = ((f"blocks.{number}.{linear}", layer) for number, layer in layers for linear in linears)
    return {f"{name}.weight": list(_named(name, layer, tuning)) for name, layer in names}


def _parts(layer: Layer, linear: str) -> Iterator[tuple[str, Columns]]:
    """Parts of a linear layer's outputs by name, where they stand on one rank: queries with their gates, a key and a
    value of each key head; or the gate of each activation and what it multiplies."""
    if linear == "attention.qkv":
        heads, dim = layer.kv_heads, layer.head_dim
        queries = layer.heads // heads * dim
        values = queries + dim
        gates, end = values + dim, values + dim + layer.gate_width // heads
        of_gates = (slice(gates, end),) if end > gates else ()
        yield "q", Columns(heads, (slice(0, queries), *of_gates))
        yield "k", Columns(heads, (slice(queries, values),))
        yield "v", Columns(heads, (slice(values, gates),))
    elif linear == "mlp.fc1":
        for place, name in enumerate(("gate", "up") if layer.gated else ("up",)):
            yield name, Columns(layer.ffn, (slice(place, place + 1),))
