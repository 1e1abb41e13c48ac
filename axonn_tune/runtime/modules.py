"""The modules of a transformer on one rank: linear layers, norms, attention, activation, dropout.

Forward and backward are written out. Only the attention core uses autograd, on local tensors.
Letters as in `axonn_tune.program.layers`: M tokens of this rank's micro-batch, `A[M, K_y]` a tensor whose dim K is
split over axis y.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar, cast

import torch
import torch.nn.functional as functional

from axonn_tune.program.operations import Phase
from axonn_tune.runtime import philox
from axonn_tune.runtime.adapters import Adapter
from axonn_tune.runtime.communicator import Communicator, WeightGradients
from axonn_tune.runtime.devices import COMPILE_STATIC, RuntimeSettings
from axonn_tune.runtime.parameters import Matrix, Vector
from axonn_tune.specs.model import Layer, Model

TensorFunction: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Tensors: TypeAlias = tuple[torch.Tensor, ...]
Compiled = TypeVar("Compiled", bound=Callable[..., object])


def compiled(function: Compiled, settings: RuntimeSettings, *, varying: bool = False) -> Compiled:
    """The function, compiled if the settings ask for it: its elementwise operations become one kernel.

    varying: its tensors have other numbers of rows at each call, for each of which it would be compiled anew.
    """
    if not settings.compile:
        return function
    made = settings.compiler(function)
    if not varying or settings.compiler is not COMPILE_STATIC:
        return cast(Compiled, made)

    def run(*given: torch.Tensor) -> object:
        for one in given:
            torch._dynamo.maybe_mark_dynamic(one, 0)
        return made(*given)

    return cast(Compiled, run)


LocalFunction: TypeAlias = Callable[[torch.Tensor, Phase], tuple[torch.Tensor, TensorFunction]]
"""A function of one local tensor: its output, and its backward pass from the output's gradient, to be called once.

Attention that communicates says in which phase."""


@dataclass
class CausalAttention:
    """Softmax attention on this rank's heads; qkv columns are grouped by key head: queries, key, value.

    turns: cosines and sines of rotary positions, if any; core: attention of queries `[b, heads, S, head_dim]`, keys and
    values `[b, kv_heads, S, head_dim]`; separate, join: `separate_heads` and `join_heads`, perhaps compiled; norms:
    weights `[head_dim]` of RMSNorms of queries and of keys, if any.
    """

    head_dim: int
    heads: int
    kv_heads: int
    sequence: int
    turns: Tensors
    core: Callable[..., torch.Tensor]
    separate: Callable[..., Heads]
    join: Callable[..., tuple[torch.Tensor, ...]]
    norms: tuple[Vector, ...] = ()

    def heads_of(self, qkv: torch.Tensor) -> tuple[Heads, Callable[..., torch.Tensor]]:
        """Heads of `[M, N_x]`, behind which a key head may have more columns, and a function from their gradients to
        the gradient of `[M, N_x]`, which adds those of norms, too."""
        shape = self.sequence, self.kv_heads, self.heads // self.kv_heads, self.head_dim
        weights = tuple(one.value for one in self.norms)
        before = (qkv,) if self.norms else ()
        return self.separate(qkv, shape, self.turns, weights), partial(self._joined, before, weights)

    def _joined(self, before: Tensors, weights: Tensors, *gradients: torch.Tensor) -> torch.Tensor:
        found, *of_norms = self.join(*gradients, self.turns, weights, *before)
        for norm, gradient in zip(self.norms, of_norms, strict=True):
            if norm.trains:
                norm.gradient += gradient
        return found

    def __call__(self, qkv: torch.Tensor, phase: Phase = "forward") -> tuple[torch.Tensor, TensorFunction]:
        """`[M, N_x] → [M, Q_x]`, causal within each sequence."""
        heads, join = self.heads_of(qkv)
        with torch.enable_grad():
            queries, keys, values = (one.detach().requires_grad_() for one in heads)
            output = self.core(queries, keys, values, is_causal=True, enable_gqa=self.heads > self.kv_heads)
        value = output.detach().transpose(1, 2).reshape(len(qkv), -1)
        return value, partial(attention_gradient, output, (queries, keys, values), join)


Heads: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries `[b, heads, S, head_dim]`, keys and values `[b, kv_heads, S, head_dim]`, tokens outermost in memory."""


def attention_gradient(
    output: torch.Tensor, heads: Heads, join: Callable[..., torch.Tensor], gradient: torch.Tensor
) -> torch.Tensor:
    """`[M, Q_x] → [M, N_x]` by the graph of the output `[b, heads, S, head_dim]`, which is gone afterwards."""
    batch, count, sequence, dim = output.shape
    split = gradient.view(batch, sequence, count, dim).transpose(1, 2)
    return join(*torch.autograd.grad(output, heads, split))


def separate_heads(
    qkv: torch.Tensor, shape: tuple[int, int, int, int], turns: Tensors = (), weights: Tensors = ()
) -> Heads:
    """Heads of `[M, N_x]`, rotated by `rotary_table` if there is one; shape: `S, kv_heads, queries a key, head_dim`.

    weights: of RMSNorms of each query and key, before they are rotated. Copies, so that qkv can be freed; views with
    one query per key and without rotation.
    """
    sequence, kv_heads, each, dim = shape
    grouped = by_key_head(qkv.view(-1, sequence, qkv.shape[1]), kv_heads, each + 2, dim)
    queries, keys, values = grouped[..., :each, :], grouped[..., each, :], grouped[..., each + 1, :]
    if weights:
        queries, keys = (
            normalized(one, (head_scale(one, weight.dtype),), weight, None)
            for one, weight in zip((queries, keys), weights, strict=True)
        )
    if turns:
        cosine, sine = (one[:, None] for one in turns)
        queries, keys = rotate(queries, cosine[:, None], sine[:, None]), rotate(keys, cosine, sine)
    queries = queries.reshape(-1, sequence, kv_heads * each, dim)
    if turns or each > 1:
        keys, values = keys.contiguous(), values.contiguous()
    return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def by_key_head(qkv: torch.Tensor, kv_heads: int, heads: int, dim: int) -> torch.Tensor:
    """The first so many heads of each key head, `[.., N]` as `[.., kv_heads, heads, dim]`, a view."""
    grouped = qkv.view(*qkv.shape[:-1], kv_heads, -1)[..., : heads * dim]
    return grouped.view(*grouped.shape[:-1], heads, dim)


@dataclass
class GatedAttention:
    """Attention whose output is multiplied by sigmoids of gates, one an element or one a head, which are a key head's
    last columns.

    copied: gates are copied, so that the projections can be freed, which attention with norms keeps. gate, back:
    `gated` and `gate_gradients`, perhaps compiled.
    """

    attention: LocalFunction
    kv_heads: int
    width: int
    copied: bool
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    back: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def __call__(self, x: torch.Tensor, phase: Phase = "forward") -> tuple[torch.Tensor, TensorFunction]:
        """`[M, (N + gates)_x] → [M, Q_x]`."""
        output, back = self.attention(x, phase)
        gates = x.view(len(x), self.kv_heads, -1)[..., -self.width :]
        gates = gates.clone(memory_format=torch.contiguous_format) if self.copied else gates
        return self.gate(output, gates), partial(self._backward, back, output, gates)

    def _backward(
        self, back: TensorFunction, output: torch.Tensor, gates: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        of_output, of_gates = self.back(output, gates, gradient)
        of_heads = back(of_output).view(len(output), self.kv_heads, -1)
        return torch.cat([of_heads, of_gates], dim=-1).view(len(output), -1)


def attention_parts(layer: Layer, *, shares: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Columns of queries with their gates, of keys and of values, among those of one of `shares` ranks."""
    groups, each = layer.kv_heads // shares, layer.heads // layer.kv_heads * layer.head_dim
    width = each + 2 * layer.head_dim + layer.gate_width // layer.kv_heads
    columns = torch.arange(groups * width, device=device).view(groups, width)
    queries, keys, values, gates = columns.tensor_split((each, each + layer.head_dim, each + 2 * layer.head_dim), dim=1)
    return tuple(part.flatten() for part in (torch.cat([queries, gates], dim=1), keys, values))


def gated(output: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """`[M, Q]` times the sigmoids of gates `[M, kv_heads, width]`, each for as many elements."""
    return (output.view(*gates.shape, -1) * gates[..., None].sigmoid()).view(output.shape)


def gate_gradients(
    output: torch.Tensor, gates: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of output and gates."""
    share, split = gates[..., None].sigmoid(), gradient.view(*gates.shape, -1)
    of_share = (split * output.view(split.shape)).sum(-1)
    return (split * share).view(output.shape), of_share * (share * (1.0 - share))[..., 0]


def head_scale(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Reciprocal root mean square of each head `[.., head_dim]`, `[.., 1]`."""
    squares = torch.linalg.vector_norm(heads, dim=-1, keepdim=True, dtype=dtype).square()
    return torch.rsqrt(squares / heads.shape[-1] + EPSILON)


def join_heads(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    turns: Tensors = (),
    weights: Tensors = (),
    qkv: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of `separate_heads`, `[M, N_x]` and those of the norms' weights, from gradients of its heads."""
    batch, kv_heads, sequence, dim = keys.shape
    grouped = queries.transpose(1, 2).reshape(batch, sequence, kv_heads, -1, dim)
    keys, values = keys.transpose(1, 2)[..., None, :], values.transpose(1, 2)[..., None, :]
    if turns:
        cosine, sine = (one[:, None, None] for one in turns)
        grouped, keys = rotate(grouped, cosine, -sine), rotate(keys, cosine, -sine)
    of_weights = list[torch.Tensor]()
    if qkv is not None:
        each, found = grouped.shape[3], list[torch.Tensor]()
        whole = by_key_head(qkv.view(batch, sequence, -1), kv_heads, each + 2, dim)
        before = torch.split(whole, [each, 1, 1], dim=3)
        for gradient, heads, weight in zip((grouped, keys), before, weights, strict=False):
            rows = heads.reshape(-1, dim)
            scale = head_scale(rows, weight.dtype)
            of_heads, of_weight = whole_gradient(rows, (scale,), weight, gradient.reshape(-1, dim), None)
            found.append(of_heads.view(gradient.shape))
            of_weights.append(of_weight)
        grouped, keys = found
    return torch.cat([grouped, keys, values], dim=3).view(batch * sequence, -1), *of_weights


def rotary_table(
    positions: torch.Tensor, dim: int, dtype: torch.dtype, share: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of rotary positions `[S]` cosine `[S, 1, head_dim / 2]` and, for both halves, sine `[S, 2, head_dim / 2]`.

    Base 10,000 (Su et al. 2021, arXiv 2104.09864). In the type of the rotated tensor, at least FP32: lower precision
    cannot resolve late positions. share: of the pairs, the first, that are rotated; others stand still.
    """
    rotated = round(share * dim / 2)
    pairs = torch.arange(dim // 2, device=positions.device, dtype=torch.float64)
    frequency = torch.where(pairs < rotated, 10000.0 ** (-pairs / max(rotated, 1)), 0.0)
    angle = positions.to(torch.float64)[:, None] * frequency
    wide = torch.promote_types(dtype, torch.float32)
    sine = angle.sin().to(wide)
    return angle.cos().to(wide)[:, None], torch.stack([-sine, sine], dim=1)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """The halves of the last dim rotated as pairs; with `-sine` the inverse, which is the gradient."""
    pairs = x.view(*x.shape[:-1], 2, -1)
    return torch.addcmul(pairs * cosine, pairs.flip(-2), sine).to(x.dtype).flatten(-2)


def attention_on(
    layer: Model | Layer,
    settings: RuntimeSettings,
    *,
    sequence: int,
    shares: int,
    turns: Tensors = (),
    norms: tuple[Vector, ...] = (),
) -> CausalAttention:
    """Attention on the heads of one of `shares` tensor-parallel ranks, as in training, but for a gate of its output;
    turns: `rotary_positions`."""
    return CausalAttention(
        *(layer.head_dim, layer.heads // shares, layer.kv_heads // shares, sequence, turns),
        core=attention_core(settings),
        separate=compiled(separate_heads, settings),
        join=compiled(join_heads, settings),
        norms=norms,
    )


def rotary_positions(
    model: Model, settings: RuntimeSettings, positions: torch.Tensor, head_dim: int, share: float = 1.0
) -> tuple[torch.Tensor, ...]:
    """The `rotary_table` that blocks of a model share, of a rank's positions; nothing where they are learned."""
    return () if model.learned_positions else rotary_table(positions, head_dim, settings.compute, share)


def attention_core(settings: RuntimeSettings) -> Callable[..., torch.Tensor]:
    """Scaled dot-product attention in the form that a fused kernel takes; on CPUs at least in FP32."""
    narrow = settings.compute.itemsize < torch.float32.itemsize
    if settings.device.type != "cuda":
        return wide_core if narrow else repeated_core
    flash = narrow and torch.cuda.get_device_capability(settings.device) >= (8, 0)
    return functional.scaled_dot_product_attention if flash else repeated_core


def repeated_core(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, is_causal: bool, enable_gqa: bool = False
) -> torch.Tensor:
    """Each key repeated for its queries: only flash attention takes fewer keys, in 16 bits from sm80 on."""
    if enable_gqa:
        each = queries.shape[1] // keys.shape[1]
        keys, values = (one.repeat_interleave(each, dim=1) for one in (keys, values))
    return functional.scaled_dot_product_attention(queries, keys, values, is_causal=is_causal)


def wide_core(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: bool) -> torch.Tensor:
    """In FP32: the backward pass of BF16 is five times slower on CPUs."""
    return repeated_core(queries.float(), keys.float(), values.float(), **how).to(queries.dtype)


@dataclass
class Dropout:
    """Sets a share of elements to zero and scales the others up; which ones depends on their place in the run.

    key: two words that name the stream, a tensor because the compiler would make a kernel for each pair of numbers, on
    the device because copying it there would hold up the host; columns: those of the tensor's hidden dim, `width` wide,
    that this rank has. Element (token, feature) comes from counter `token · width + feature`, tokens being counted
    through the whole run: the same on every grid, when recomputed and in backward, so no mask is saved.
    """

    share: float
    key: torch.Tensor
    columns: range
    width: int
    scaled: Callable[..., torch.Tensor]

    def __call__(self, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """`[M, H_y]` of the given token numbers `[M]`; its own gradient, too, as it only scales."""
        if not self.share:
            return x
        return self.scaled(x, tokens, self.key, self.share, self.columns.start, self.width)


def dropped(
    x: torch.Tensor, tokens: torch.Tensor, key: torch.Tensor, share: float, start: int, width: int
) -> torch.Tensor:
    """Elements of `x[M, columns]` times 0 or `1 / (1 - share)`, by Philox of their counters under `key[2]`."""
    columns = torch.arange(start, start + x.shape[1], device=x.device, dtype=torch.int64)
    word, _ = philox.philox(tokens[:, None] * width + columns, (key[0], key[1]))
    keep = (word >= int(share * 2.0**32)).to(x.dtype)
    return x * keep / (1.0 - share)


@dataclass
class Activation:
    """A function of `[M, G_x]` of which only the input is saved; back: its gradient, from that and the output's."""

    run: TensorFunction
    back: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, phase: Phase) -> tuple[torch.Tensor, TensorFunction]:
        """`[M, G_x] → [M, F_x]`."""
        return self.run(x), partial(self.back, x)

    def unread(self, x: torch.Tensor) -> tuple[torch.Tensor, TensorFunction]:
        """The same where nothing needs the output."""
        return x.new_empty(0), partial(self.back, x)


def activation(settings: RuntimeSettings, *, gated: bool, varying: bool = False) -> Activation:
    """The MLP's activation `[M, G_x] → [M, F_x]`: GELU, or SiLU(gate) · up with gate and up alternating.

    Its input is all that is saved.
    """
    forward, backward = (swiglu, swiglu_gradient) if gated else (functional.gelu, gelu_gradient)
    return Activation(compiled(forward, settings, varying=varying), compiled(backward, settings, varying=varying))


def gelu_gradient(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """`gradient · (Φ(x) + x · φ(x))`."""
    return cast(torch.Tensor, torch.ops.aten.gelu_backward(gradient, x))


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """`SiLU(gate) · up` of `[M, G]` with gate and up alternating along the columns."""
    gate, up = x.view(len(x), x.shape[1] // 2, 2).unbind(-1)
    return functional.silu(gate) * up


def swiglu_gradient(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """`[M, F] → [M, G]` from the input of the forward pass."""
    gate, up = x.view(len(x), x.shape[1] // 2, 2).unbind(-1)
    of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
    return torch.stack([of_gate, gradient * functional.silu(gate)], dim=-1).view(x.shape)


Result = TypeVar("Result")

Middles: TypeAlias = dict[str, tuple[torch.Tensor, ...]]
"""What adapters of linear layers keep, by the name of the layer."""


@dataclass
class ParallelLinear:
    """`O[M, n] = Σ_output_axis I[M, k] · W[k, n]`, with an optional bias, which one rank adds to its share of the sum.

    Backward takes both halves of a split micro-batch: their weight gradients are summed.
    """

    layer: str
    output_axis: str
    input_axis: str
    weight: Matrix
    bias: Vector | None
    communicator: Communicator
    settings: RuntimeSettings
    after: Callable[[], None] | None = None
    adapters: tuple[Adapter, ...] = ()

    @property
    def needs_input(self) -> bool:
        """Whether the gradient of a matrix needs its input."""
        return self.weight.trains or bool(self.adapters)

    def forward(
        self, x: torch.Tensor, block: torch.Tensor, phase: Phase, middles: Middles | None = None
    ) -> Generator[None, None, torch.Tensor]:
        """`I[M, k] → O[M, n]`: GEMM with bias, those of adapters, all-reduce; what these keep goes to `middles`.

        Yields while the all-reduce is in flight, so that the other half can compute.
        """
        if self.bias is None or self.communicator.mesh.coordinate(self.output_axis):
            output = x @ block
        else:
            # Added as the GEMM writes, so at no cost.
            output = torch.addmm(self.bias.value.to(x.dtype), x, block)
        kept = self.middles_of(x)
        for adapter, middle in zip(self.adapters, kept, strict=True):
            adapter.add_to(output, middle)
        if middles is not None and kept:
            middles[self.layer] = kept
        del kept
        pending = self.communicator.all_reduce(output, self.output_axis, phase, self.layer)
        if "output" not in self.settings.overlaps:
            pending.wait()
        yield
        return pending.wait()

    def middles_of(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What each adapter keeps of an input."""
        return tuple(one.middle(x) for one in self.adapters)

    def adapters_backward(
        self, inputs: Sequence[torch.Tensor], output_gradients: Sequence[torch.Tensor], middles: Sequence[Middles]
    ) -> list[list[torch.Tensor]]:
        """Gradients of adapters, from those of the output; of each part, gradients of what each adapter kept of it."""
        if not self.adapters:
            return []
        found = list[list[torch.Tensor]]()
        for x, gradient, kept in zip(inputs, output_gradients, middles, strict=True):
            each = zip(self.adapters, kept.pop(self.layer), strict=True)
            found.append([adapter.backward(x, middle, gradient) for adapter, middle in each])
        return found

    def backward(
        self,
        inputs: Sequence[torch.Tensor],
        block: torch.Tensor,
        output_gradients: Sequence[torch.Tensor],
        gradients: WeightGradients,
        middles: Sequence[Middles] = (),
    ) -> list[torch.Tensor]:
        """`dI[M, k] = Σ_input_axis dO · Wᵀ` of each part, from its `I[M, k]`, if that is needed, and `dO[M, n]`.

        `dW[k, n] = Iᵀ · dO` of all parts is in flight when this returns. middles: of each part, no longer there then.
        """
        before, of_middles = [], self.adapters_backward(inputs, output_gradients, middles)
        for number, gradient in enumerate(output_gradients):
            found: torch.Tensor | None = None
            for adapter, of_middle in zip(self.adapters, of_middles[number] if of_middles else (), strict=True):
                found = adapter.input_gradient(of_middle, found)
            found = gradient @ block.t() if found is None else found.addmm_(gradient, block.t())
            pending = self.communicator.all_reduce(found, self.input_axis, "backward", self.layer)
            del found
            if "input_gradient" not in self.settings.overlaps:
                pending.wait()
            before.append(pending)
        if self.bias is not None and self.bias.trains:
            for gradient in output_gradients:
                self.bias.gradient += gradient.sum(0, dtype=self.bias.gradient.dtype)
        if self.weight.trains:
            gradients.add(self.weight, inputs, output_gradients, self.layer, self.after)
        return [pending.wait() for pending in before]


def interleave(passes: Sequence[Generator[None, None, Result]]) -> list[Result]:
    """Results of interleaved passes: each runs until it yields, then the next (two-batch overlap)."""
    results: dict[int, Result] = {}
    while len(results) < len(passes):
        for number, one in enumerate(passes):
            if number in results:
                continue
            try:
                next(one)
            except StopIteration as end:
                results[number] = end.value
    return [results[number] for number in range(len(passes))]


EPSILON = 1e-5

NormStatistics: TypeAlias = tuple[torch.Tensor, ...]
"""Mean (not of RMSNorm) and reciprocal deviation of each token, `[M, 1]`, in the statistics type."""


@dataclass
class Norm:
    """LayerNorm, or RMSNorm if it has no bias, of `[M, H_y]`: statistics are combined over y."""

    name: str
    width: int
    weight: Vector
    bias: Vector | None
    communicator: Communicator
    settings: RuntimeSettings

    def __post_init__(self) -> None:
        settings = self.settings
        self._alone = self.communicator.mesh.groups["y"] is None
        self._whole, self._whole_gradient = compiled(whole_norm, settings), compiled(whole_gradient, settings)
        self._moments, self._combined = compiled(moments, settings), compiled(combined, settings)
        self._normalized, self._centred = compiled(normalized, settings), compiled(centred, settings)
        self._gradient_sums = compiled(gradient_sums, settings)

    @property
    def _has_kernel(self) -> bool:
        """Whether torch's own LayerNorm applies: five times as fast as a dozen small kernels."""
        return self._alone and self.bias is not None and not self.settings.compile

    @property
    def _vectors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.weight.value, None if self.bias is None else self.bias.value

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, NormStatistics]:
        """The norm's input `x` (may be overwritten) plus `residual`; the output; statistics to save."""
        if self._has_kernel:
            total = x if residual is None else x.add_(residual)
            return total, *self._native(total)
        kind = self.settings.statistics
        if self._alone:
            total, output, *whole = self._whole(x, residual, *self._vectors, kind)
            return total, output, tuple(whole)
        total, local = self._moments(x, residual, kind, self.bias is not None)
        found = self.communicator.all_gather(local[None], "y", "forward", self.name).wait()
        parts = self.communicator.mesh.size("y")
        statistics = self._combined(found.view(parts, -1, x.shape[0]), x.shape[-1])
        return total, self.apply(total, statistics), statistics

    def apply(self, x: torch.Tensor, statistics: NormStatistics) -> torch.Tensor:
        """Recompute of the norm's output, without communication: from saved statistics, or by torch's kernel."""
        return self._native(x)[0] if self._has_kernel else self._normalized(x, statistics, *self._vectors)

    def backward(
        self,
        x: torch.Tensor,
        statistics: NormStatistics,
        gradient: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Gradient of the input, `residual` added; both sums over the hidden dim are all-reduced over y."""
        if self._has_kernel:
            aten = cast(Callable[..., tuple[torch.Tensor, ...]], torch.ops.aten.native_layer_norm_backward)
            found, *sums = aten(gradient, x, [self.width], *statistics, *self._in_type_of(x), [True, True, True])
            found = found if residual is None else found.add_(residual)
        elif self._alone:
            found, *sums = self._whole_gradient(x, statistics, self.weight.value, gradient, residual)
        else:
            inner, *sums = self._gradient_sums(x, statistics, self.weight.value, gradient)
            means = (self.communicator.all_reduce(inner, "y", "backward", self.name).wait() / self.width).unbind()
            found = self._centred(x, statistics, self.weight.value, gradient, means, residual)
        if self.weight.trains:
            self.weight.gradient += sums[0]
        if self.bias is not None and self.bias.trains:
            self.bias.gradient += sums[1]
        return found

    def _native(self, x: torch.Tensor) -> tuple[torch.Tensor, NormStatistics]:
        weight, bias = self._in_type_of(x)
        output, *statistics = torch.native_layer_norm(x, [self.width], weight, bias, EPSILON)
        return output, tuple(statistics)

    def _in_type_of(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        """Weight and bias as torch's kernel takes them: on GPUs in one type with its input."""
        return (one if x.is_cpu else one.to(x.dtype) for one in self._vectors if one is not None)


def row_moments(x: torch.Tensor, dtype: torch.dtype, *, with_mean: bool) -> list[torch.Tensor]:
    """Of each token on this rank's hidden features, `[M]`: mean and squares about it, or the sum of squares alone."""
    if not with_mean:
        return [torch.linalg.vector_norm(x, dim=-1, dtype=dtype).square()]
    variance, mean = torch.var_mean(x.to(dtype), dim=-1, correction=0)
    return [mean, variance * x.shape[-1]]


def moments(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    dtype: torch.dtype,
    with_mean: bool,  # noqa: FBT001 - compiled as it is
) -> tuple[torch.Tensor, torch.Tensor]:
    """`x`, with any `residual`, and its `row_moments`, `[1 or 2, M]`."""
    total = x if residual is None else x + residual
    return total, torch.stack(row_moments(total, dtype, with_mean=with_mean))


def combined(found: torch.Tensor, share: int) -> NormStatistics:
    """Statistics from the moments `[y, 1 or 2, M]` of all shares, `share` wide each (Chan et al. 1983)."""
    total, parts = found.sum(0), len(found)
    if len(total) == 1:
        return (torch.rsqrt(total[0] / (share * parts) + EPSILON)[:, None],)
    mean = total[0] / parts
    apart = (found[:, :1] - mean).square().sum(0)[0]
    return mean[:, None], torch.rsqrt(total[1] / (share * parts) + apart / parts + EPSILON)[:, None]


def standardized(x: torch.Tensor, statistics: NormStatistics) -> torch.Tensor:
    """`(x - mean) · scale`, in the statistics type."""
    *mean, scale = statistics
    return (x - mean[0]).mul_(scale) if mean else x * scale


def normalized(
    x: torch.Tensor, statistics: NormStatistics, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`(x - mean) · scale · weight + bias`, computed in the statistics type."""
    normal = standardized(x, statistics)
    return (normal.mul_(weight) if bias is None else torch.addcmul(bias, normal, weight)).to(x.dtype)


def whole_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """`x`, with any `residual`, its norm and statistics, where this rank has the whole hidden dim."""
    total = x if residual is None else x + residual
    *mean, spread = row_moments(total, dtype, with_mean=bias is not None)
    scale = torch.rsqrt(spread / x.shape[-1] + EPSILON)
    statistics = tuple(one[:, None] for one in (*mean, scale))
    return total, normalized(total, statistics, weight, bias), *statistics


def inner_sums(
    x: torch.Tensor, statistics: NormStatistics, weight: torch.Tensor, gradient: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Sums over this share of the hidden dim, one or two `[M]`; gradients of weight and, if any, bias `[H_y]`."""
    product = gradient * standardized(x, statistics)
    sums, gradients = [(product * weight).sum(-1)], [product.sum(0)]
    if len(statistics) > 1:
        sums.append((gradient * weight).sum(-1))
        gradients.append(gradient.sum(0, dtype=product.dtype))
    return sums, gradients


def gradient_sums(
    x: torch.Tensor, statistics: NormStatistics, weight: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """`inner_sums`, those to be all-reduced in one tensor `[1 or 2, M]`."""
    sums, gradients = inner_sums(x, statistics, weight, gradient)
    return torch.stack(sums), *gradients


def centred(
    x: torch.Tensor,
    statistics: NormStatistics,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    means: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """Gradient of the input from the sums over the whole hidden dim, divided by its width, plus `residual`."""
    found = torch.addcmul(gradient * weight, standardized(x, statistics), -means[0][:, None])
    if len(means) > 1:
        found.sub_(means[1][:, None])
    found.mul_(statistics[-1])
    return (found if residual is None else found.add_(residual)).to(gradient.dtype)


def whole_gradient(
    x: torch.Tensor,
    statistics: NormStatistics,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Gradients of input, weight and, if any, bias where this rank has the whole hidden dim."""
    sums, gradients = inner_sums(x, statistics, weight, gradient)
    means = [one / x.shape[-1] for one in sums]
    return centred(x, statistics, weight, gradient, means, residual), *gradients
