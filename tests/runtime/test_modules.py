"""Functions of local tensors, against torch's own in higher precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional

from axonn_tune.grid import Grid
from axonn_tune.runtime import modules
from axonn_tune.runtime.communicator import Communicator, WeightGathers, WeightGradients
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.modules import join_heads, rotary_table, separate_heads, sums_of_rows, swiglu, swiglu_gradient
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model


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


def head_gradient(dtype: torch.dtype, chunks: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Weight gradient of the LM head of a small model from 8,192 tokens in so many chunks, in fp64."""
    small = {"layers": 1, "hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 64}
    model = load_model("nano-llama").document.model_copy(update=small)
    wide = torch.promote_types(dtype, torch.float32)
    settings = RuntimeSettings(dtype, wide, wide, frozenset(), "none", 0, torch.device("cpu"))
    communicator = Communicator(build_mesh(Grid()), Ledger())
    head = Transformer(model, communicator, settings, sequence=64, seed=0).head
    chance = torch.Generator().manual_seed(1)
    # The same numbers in both types.
    x = torch.randn(8192, model.hidden, generator=chance).bfloat16().to(dtype)
    targets = torch.randint(0, model.vocab, (8192,), generator=chance)
    head.table.value.copy_(head.table.value.bfloat16())
    monkeypatch.setattr(modules, "loss_chunks", lambda tokens: chunks)
    gathers = WeightGathers(communicator, settings, [(head.table, "forward", "head")])
    head.forward_backward(x, targets, gathers, WeightGradients(communicator, settings), scale=1 / 8192)
    return head.table.gradient.double()


def test_chunks_of_the_loss_cost_the_heads_gradient_no_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the sum of chunks in BF16: 16 of them, 65,536 tokens, are no worse than BF16 makes the whole model's."""
    right = head_gradient(torch.float64, 1, monkeypatch)
    one, four, sixteen = (
        float((head_gradient(torch.bfloat16, chunks, monkeypatch) - right).norm() / right.norm())
        for chunks in (1, 4, 16)
    )
    assert one < four < sixteen < 0.006
    assert four < 1.3 * one
