"""Functions of local tensors, against torch's own in higher precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from axonn_tune.runtime.modules import join_heads, rotary_table, separate_heads, sums_of_rows, swiglu, swiglu_gradient


@pytest.mark.parametrize("repeats", [1, 1024, 4096])
def test_frequent_tokens_keep_their_gradient(repeats: int) -> None:
    """Guards embeddings in BF16: rounding each of 4,096 sums would lose three quarters of the gradient."""
    gradient = torch.full((repeats + 1, 8), 0.01, dtype=torch.bfloat16)
    rows = torch.zeros(repeats + 1, dtype=torch.int64)
    rows[-1] = 2
    found = sums_of_rows(gradient, rows, 4)
    exact = torch.zeros(4, 8, dtype=torch.float64).index_add_(0, rows, gradient.double())
    assert torch.allclose(found.double(), exact, rtol=2**-8)


@pytest.mark.parametrize(("kv_heads", "each", "turned"), [(4, 1, False), (4, 1, True), (2, 3, True), (2, 3, False)])
def test_joining_is_the_transpose_of_separating(kv_heads: int, each: int, turned: bool) -> None:
    """Guards the way of gradients through rotary positions and grouped heads: by autograd, to rounding."""
    batch, sequence, dim = 2, 5, 8
    turns = rotary_table(sequence, dim, torch.float64, torch.device("cpu")) if turned else ()
    qkv = torch.randn(batch * sequence, kv_heads * (each + 2) * dim, dtype=torch.float64, requires_grad=True)
    heads = separate_heads(qkv, (sequence, kv_heads, each, dim), *turns)
    gradients = [torch.randn_like(one) for one in heads]
    (expected,) = torch.autograd.grad(heads, qkv, gradients)
    assert torch.allclose(join_heads(*gradients, turns=turns), expected)


def test_gradient_of_the_gated_activation() -> None:
    """Guards the gradient written out against autograd's."""
    x = torch.randn(6, 10, dtype=torch.float64, requires_grad=True)
    gate, up = x.view(6, -1, 2).unbind(-1)
    expected = functional.silu(gate) * up
    gradient = torch.randn_like(expected)
    assert torch.allclose(swiglu(x), expected)
    assert torch.allclose(swiglu_gradient(x.detach(), gradient), torch.autograd.grad(expected, x, gradient)[0])
