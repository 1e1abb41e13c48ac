"""Attention where ranks of `context` share a sequence: keys and values go around a ring, beside attention.

A sequence is cut into 2·context chunks, of which rank r has chunk r and chunk 2·context - 1 - r, one behind the other.
So with each rank's keys and values a rank has half of its scores to compute, except with its own, of which the causal
half: the later of its chunks sees all that others have of either end, or all of its chunks see the earlier one of
theirs. Softmax over all keys comes from the log-sum-exps of each part (arXiv 2310.01889). The backward pass sends keys
and values around again, and behind them their gradients, which arrive where the keys are from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from axonn_tune.program.context import CORE
from axonn_tune.program.operations import Phase
from axonn_tune.runtime.communicator import CollectiveHandle, Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.modules import CausalAttention, TensorFunction, Tensors


def own_positions(mesh: Mesh, sequence: int, device: torch.device) -> torch.Tensor:
    """Positions in the whole sequence of the tokens that this rank has of each, `[S / context]`, ascending."""
    chunks, place = 2 * mesh.grid.context, mesh.coordinate("context")
    whole = torch.arange(sequence, device=device)
    if chunks == 2:
        return whole
    each = whole.view(chunks, -1)
    return torch.cat([each[place], each[chunks - 1 - place]])


class Attended(NamedTuple):
    """Queries `[b, heads, Q, head_dim]`, and some of their keys and values `[b, kv_heads, K, head_dim]`.

    output, sums: over all keys, the latter the log-sum-exp of each query's scores `[b, heads, Q]`.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    causal: bool
    output: torch.Tensor
    sums: torch.Tensor


class AttentionKernel(NamedTuple):
    """Attention of queries on some keys and values, causal or not.

    forward: output, and log-sum-exp of each query's scores `[b, heads, Q]`. backward: gradients of queries, keys and
    values, from the output's.
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Tensors]
    backward: Callable[[torch.Tensor, Attended], Tensors]


def kernel_on(settings: RuntimeSettings) -> AttentionKernel:
    """Flash attention, on CPUs at least in FP32; on GPUs in types that it does not take, GEMMs and a softmax."""
    if settings.device.type != "cuda":
        return AttentionKernel(_cpu_forward, _cpu_backward)
    flash = settings.compute.itemsize < torch.float32.itemsize
    return AttentionKernel(_flash_forward, _flash_backward) if flash else AttentionKernel(plain, plain_gradients)


def _repeated(queries: torch.Tensor, *keys: torch.Tensor) -> Tensors:
    """Keys and values once for each of their queries, all in FP32 at least."""
    wide = torch.promote_types(queries.dtype, torch.float32)
    each = queries.shape[1] // keys[0].shape[1]
    return tuple(one.to(wide) if each == 1 else one.to(wide).repeat_interleave(each, dim=1) for one in keys)


def _of_keys(gradient: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Sum of gradients over the queries of each key."""
    if gradient.shape[1] == keys.shape[1]:
        return gradient
    return gradient.view(len(gradient), keys.shape[1], -1, *gradient.shape[2:]).sum(2)


def _cpu_forward(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> Tensors:  # noqa: FBT001
    repeated = _repeated(queries, keys, values)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found: Tensors = kernel(queries.to(repeated[0].dtype), *repeated, 0.0, causal)
    return found


def _cpu_backward(gradient: torch.Tensor, of: Attended) -> Tensors:
    repeated = _repeated(of.queries, of.keys, of.values)
    gradient, queries, output = (one.to(repeated[0].dtype) for one in (gradient, of.queries, of.output))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_queries, *of_keys = kernel(gradient, queries, *repeated, output, of.sums, 0.0, of.causal)
    return of_queries, *(_of_keys(one, of.keys) for one in of_keys)


def _flash_forward(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> Tensors:  # noqa: FBT001
    output, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, causal)
    return output, sums


def _flash_backward(gradient: torch.Tensor, of: Attended) -> Tensors:
    lengths = of.queries.shape[2], of.keys.shape[2]
    # Neither sequences of several lengths nor dropout, so that no counters are needed.
    none, unused = of.queries.new_empty(0, dtype=torch.int32), of.queries.new_empty(2, dtype=torch.uint64)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    heads = gradient, of.queries, of.keys, of.values, of.output, of.sums.contiguous()
    found: Tensors = kernel(*heads, none, none, *lengths, 0.0, of.causal, unused, unused[:0])
    return found


def plain(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> Tensors:  # noqa: FBT001
    """`AttentionKernel.forward` by GEMMs and a softmax."""
    keys, values = _repeated(queries, keys, values)
    scores = _scores(queries, keys, causal=causal)
    sums = scores.logsumexp(-1)
    return torch.exp(scores - sums[..., None]) @ values, sums


def plain_gradients(gradient: torch.Tensor, of: Attended) -> Tensors:
    """`AttentionKernel.backward` of `plain`."""
    wide, values = _repeated(of.queries, of.keys, of.values)
    shares = torch.exp(_scores(of.queries, wide, causal=of.causal) - of.sums[..., None])
    inner = gradient @ values.transpose(-1, -2) - (gradient * of.output).sum(-1, keepdim=True)
    of_scores = shares * inner / math.sqrt(of.queries.shape[-1])
    of_keys = of_scores.transpose(-1, -2) @ of.queries, shares.transpose(-1, -2) @ gradient
    return of_scores @ wide, *(_of_keys(one, of.keys) for one in of_keys)


def _scores(queries: torch.Tensor, keys: torch.Tensor, *, causal: bool) -> torch.Tensor:
    found = queries @ keys.transpose(-1, -2) / math.sqrt(queries.shape[-1])
    mask = torch.ones(found.shape[-2:], dtype=torch.bool, device=found.device).triu(1)
    return found.masked_fill(mask, -math.inf) if causal else found


EVERY = slice(None)


class Seen(NamedTuple):
    """What this rank's queries see of the keys of one rank: which of them, which of these, and whether causally."""

    queries: slice
    keys: slice
    causal: bool


@dataclass
class RingAttention:
    """`CausalAttention` of which this rank has the queries `[b, heads, S / context, head_dim]` of its own tokens.

    local: separates and joins the heads of these tokens. overlaps: each send goes on beside attention. name: in the
    program.
    """

    local: CausalAttention
    communicator: Communicator
    kernel: AttentionKernel
    overlaps: bool
    statistics: torch.dtype
    name: str = CORE

    def __call__(self, qkv: torch.Tensor, phase: Phase = "forward") -> tuple[torch.Tensor, TensorFunction]:
        """`[M, N_x] → [M, Q_x]`, causal within each sequence."""
        (queries, *own), join = self.local.heads_of(qkv)
        block = torch.stack(own)
        output, sums = self._forward(queries, block, phase)
        value = output.transpose(1, 2).reshape(len(qkv), -1)
        return value, partial(self._backward, queries, block, output, sums, join)

    def _seen(self, number: int) -> Seen:
        """Of the keys of the rank so many places before this one."""
        place, half = self.communicator.mesh.coordinate("context"), self.local.sequence // 2
        if number == 0:
            return Seen(EVERY, EVERY, causal=True)
        if number <= place:
            return Seen(EVERY, slice(half), causal=False)
        return Seen(slice(half, None), EVERY, causal=False)

    def _send(self, tensor: torch.Tensor, phase: Phase, *, first: bool) -> CollectiveHandle:
        """A tensor to the next rank; keys and values, and backward their gradients, are one call of the program."""
        whole = tensor.nbytes * self.communicator.mesh.size("context") * (2 if phase == "backward" else 1)
        pending = self.communicator.pass_on(tensor, "context", phase, self.name, whole_bytes=whole, first=first)
        if not self.overlaps:
            pending.wait()
        return pending

    def _forward(self, queries: torch.Tensor, block: torch.Tensor, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of each query over all keys."""
        count = self.communicator.mesh.size("context")
        total = whole = queries  # Replaced by the first, which has all queries.
        for number in range(count):
            pending = self._send(block, phase, first=number == 0) if number < count - 1 else None
            seen = self._seen(number)
            keys, values = block[:, :, :, seen.keys]
            part, sums = self.kernel.forward(queries[:, :, seen.queries], keys, values, seen.causal)
            if number == 0:
                total, whole = part.to(self.statistics), sums
            else:
                rows = total[:, :, seen.queries]
                before = whole[:, :, seen.queries]
                after = torch.logaddexp(before, sums)
                rows.mul_((before - after).exp_()[..., None]).add_(part * (sums - after).exp_()[..., None])
                before.copy_(after)
            if pending is not None:
                block = pending.wait()
        return total.to(queries.dtype), whole

    def _backward(
        self,
        queries: torch.Tensor,
        block: torch.Tensor,
        output: torch.Tensor,
        sums: torch.Tensor,
        join: Callable[..., torch.Tensor],
        gradient: torch.Tensor,
    ) -> torch.Tensor:
        """`[M, Q_x] → [M, N_x]`, by `join` from gradients of heads.

        Gradients of keys begin at the rank behind theirs, take in each rank's share on their way and end at home.
        """
        count, split = self.communicator.mesh.size("context"), gradient.view(output.transpose(1, 2).shape)
        split = split.transpose(1, 2)
        of_queries, own, arriving = torch.zeros_like(queries, dtype=self.statistics), list[torch.Tensor](), None
        for number in range(count):
            pending = self._send(block, "backward", first=number == 0) if number < count - 1 else None
            seen = self._seen(number)
            grads, asked, made, its = (one[:, :, seen.queries] for one in (split, queries, output, sums))
            keys, values = block[:, :, :, seen.keys]
            of_rows, *of_keys = self.kernel.backward(grads, Attended(asked, keys, values, seen.causal, made, its))
            of_queries[:, :, seen.queries] += of_rows
            if number == 0:
                own = of_keys
            else:
                share = torch.zeros_like(block) if arriving is None else arriving.wait()
                for mine, found in zip(share, of_keys, strict=True):
                    mine[:, :, seen.keys] += found
                arriving = self._send(share, "backward", first=False)
            if pending is not None:
                block = pending.wait()
        assert arriving is not None, "several ranks share a sequence"
        both = (one + mine for one, mine in zip(arriving.wait(), own, strict=True))
        return join(*(one.to(queries.dtype) for one in (of_queries, *both)))
