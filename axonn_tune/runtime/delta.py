"""A gated delta net on one rank's heads: short convolution, the gated delta rule by chunks, gated norm.

Letters: b sequences, S tokens, k key heads of this rank with r value heads each, n chunks of C tokens; a key of width K
and a value of width V. Columns of the projection are grouped by key head: query, key, values, gates, then of each value
head β and decay. The rule is S_t = a_t·S_{t-1}·(I - β_t·k_t·k_tᵀ) + β_t·v_t·k_tᵀ, o_t = S_t·q_t (arXiv 2412.06464); a
chunk's tokens are one triangular system (the WY form of arXiv 2406.06484), and chunks follow one another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as functional

from axonn_tune.program.operations import Phase
from axonn_tune.program.types.recurrent import CHUNK
from axonn_tune.runtime.modules import TensorFunction, head_scale
from axonn_tune.runtime.parameters import Vector

SMALLEST = 1e-6
"""Added to the squares of a query and a key, as kernels of FLA do."""


@dataclass
class DeltaRule:
    """From the projections `[M, N_x]` to the gated norm's output `[M, V_x]`.

    heads, each: k and r; key, value: K and V; sequence: S; taps: of the convolution. filters: `[k, 2K + rV, taps]`;
    rates, steps: `[k, r]`, logarithms of the decay's rates and what is added to its steps; norm: `[V]`. dtype: that it
    computes in. Saves its input alone, and computes all else once more in the backward pass, by autograd.
    """

    heads: int
    each: int
    key: int
    value: int
    sequence: int
    taps: int
    filters: Vector
    rates: Vector
    steps: Vector
    norm: Vector
    dtype: torch.dtype
    chunk: int = CHUNK

    @property
    def _vectors(self) -> tuple[Vector, ...]:
        return self.filters, self.rates, self.steps, self.norm

    def __call__(self, x: torch.Tensor, phase: Phase = "forward") -> tuple[torch.Tensor, TensorFunction]:
        """Causal within each sequence."""
        return self.run(x, *(one.value for one in self._vectors)), partial(self._backward, x)

    def _backward(self, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            own = [one.detach().requires_grad_() for one in (x, *(one.value for one in self._vectors))]
            output = self.run(*own)
        found, *of_vectors = torch.autograd.grad(output, own, gradient)
        for vector, of_vector in zip(self._vectors, of_vectors, strict=True):
            vector.gradient += of_vector
        return found

    def run(
        self, x: torch.Tensor, filters: torch.Tensor, rates: torch.Tensor, steps: torch.Tensor, norm: torch.Tensor
    ) -> torch.Tensor:
        """The function itself, of its input and its vectors."""
        r, value = self.each, self.value
        grouped = x.view(-1, self.sequence, self.heads, x.shape[1] // self.heads)
        widths = [2 * self.key + r * value, r * value, r, r]
        mixed, gates, betas, decays = torch.split(grouped, widths, dim=-1)
        convolved = convolution(mixed.to(self.dtype), filters.view(self.heads, -1, self.taps))
        queries, keys, values = torch.split(convolved, [self.key, self.key, r * value], dim=-1)
        queries, keys = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + SMALLEST) for one in (queries, keys))
        queries = queries * self.key**-0.5
        decays = -rates.view(-1, r).exp() * functional.softplus(decays.to(self.dtype) + steps.view(-1, r))
        betas = betas.to(self.dtype).sigmoid()
        output = self._by_chunks(queries[..., None, :], keys[..., None, :], _by_heads(values, r), betas, decays)
        normal = output * head_scale(output, self.dtype) * norm
        gated: torch.Tensor = normal * _by_heads(functional.silu(gates.to(self.dtype)), r)
        return gated.to(x.dtype).reshape(len(x), -1)

    def _by_chunks(self, *inputs: torch.Tensor) -> torch.Tensor:
        """`[b, S, k, r, V]` from queries and keys `[b, S, k, 1, K]`, values, β and logarithms of the decay `[b, S, k,
        r]`; a last chunk that is short is filled up with tokens that change nothing."""
        length = min(self.chunk, self.sequence)
        chunks = -(-self.sequence // length)
        left = chunks * length - self.sequence

        def split(one: torch.Tensor) -> torch.Tensor:
            one = functional.pad(one, (0, 0) * (one.dim() - 2) + (0, left)) if left else one
            one = one.view(len(one), chunks, length, *one.shape[2:])
            return one.permute(0, 3, 4, 1, 2, *range(5, one.dim())).contiguous()

        output = delta_rule(*map(split, inputs))
        return output.permute(0, 3, 4, 1, 2, 5).flatten(1, 2)[:, : self.sequence]


def _by_heads(values: torch.Tensor, each: int) -> torch.Tensor:
    """`[b, S, k, rV]` as `[b, S, k, r, V]`."""
    return values.view(*values.shape[:-1], each, -1)


def convolution(x: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """SiLU of a causal convolution of each channel of `[b, S, k, G]` by its filter of `[k, G, taps]`."""
    length, taps = x.shape[1], filters.shape[-1]
    padded = functional.pad(x, (0, 0, 0, 0, taps - 1, 0))
    found = padded[:, :length] * filters[..., 0]
    for tap in range(1, taps):
        found = torch.addcmul(found, padded[:, tap : tap + length], filters[..., tap])
    return functional.silu(found)


def delta_rule(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, betas: torch.Tensor, decays: torch.Tensor
) -> torch.Tensor:
    """Outputs `[b, k, r, n, C, V]` of queries and keys `[b, k, 1, n, C, K]`, values, and of each value head and token
    β and the logarithm of its decay, `[b, k, r, n, C]`."""
    length, width = values.shape[-2:]
    since = decays.cumsum(-1)
    ahead = torch.ones(length, length, dtype=torch.bool, device=values.device).triu(1)
    apart = (since[..., :, None] - since[..., None, :]).masked_fill(ahead, -math.inf).exp()
    grown, whole = since.exp()[..., None], since[..., -1:]
    # Of the lower triangle without the diagonal, which is one.
    system = keys @ keys.mT * apart * betas[..., None]
    sides = torch.cat([values * betas[..., None], keys * (grown * betas[..., None])], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    scores, asked, kept = queries @ keys.mT * apart, queries * grown, keys * (whole - since).exp()[..., None]
    state = values.new_zeros(*values.shape[:3], keys.shape[-1], width)
    found = list[torch.Tensor]()
    del system, sides
    of_chunks = *solved.split([width, keys.shape[-1]], dim=-1), scores, asked, kept, whole.exp()[..., None]
    for written, read, within, query, key, left in zip(*(one.unbind(3) for one in of_chunks), strict=True):
        written = written - read @ state
        found.append(query @ state + within @ written)
        state = state * left + key.mT @ written
    return torch.stack(found, dim=3)
