"""Elements of a model as sums over nodes, by hand."""

from __future__ import annotations

import pytest

from axonn_tune.program.count import active_parameters, counted, parameters
from tests.unit.small import small_model
from tests.unit.specs.test_layer_types import typed


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_dense_block_by_hand(family: str) -> None:
    """Guards matrices, norms and biases of attention and MLP, and what is outside of blocks."""
    model = small_model(family=family, kv_heads=2, biases=True)
    (one,), norm, ups = counted(model), 1 if family == "llama" else 2, 2 if family == "llama" else 1
    hidden, heads = model.hidden, (model.heads + 2 * model.kv_heads) * model.head_dim
    wide = model.heads * model.head_dim
    assert one.weights == one.active_weights == hidden * (heads + wide + (ups + 1) * model.ffn)
    assert one.vectors_of(0) == 2 * norm * hidden + heads + ups * model.ffn + 2 * hidden
    tables = model.vocab * (1 if model.tied_embeddings else 2)
    tables += model.max_sequence_length if family == "gpt" else 0
    assert parameters(model) == 8 * (one.weights + one.vectors_of(0)) + (tables + norm) * hidden
    assert active_parameters(model) == parameters(model)


def test_weights_of_latent_attention_and_experts_by_hand() -> None:
    """Each matrix once: down and up projections, output, router, routed and shared experts."""
    moe = counted(typed())[1]
    attention = 64 * 24 + 24 * 8 * 12 + 64 * (16 + 4) + 16 * 8 * (8 + 6) + 8 * 6 * 64
    one = 3 * 64 * 32
    assert moe.weights == attention + 64 * 8 + 3 * 64 * 48 + 8 * one
    assert moe.active_weights == moe.weights - 6 * one


def test_a_mamba_layer_by_hand() -> None:
    """Two GEMMs; a convolution, three vectors of heads and two norms besides; no attention and no MLP."""
    mixer = {"heads": 4, "head_dim": 16, "state": 8, "groups": 2}
    types = {"mamba": {"attention": False, "mlp": False, "mamba": mixer}, "dense": {"attention": False}}
    model = typed("(mamba dense)*4", layer_types=types)
    (mamba, dense), (first, second) = counted(model), model.types
    assert mamba.weights == mamba.active_weights == 64 * (2 * 64 + 2 * 2 * 8 + 4) + 64 * 64
    assert mamba.vectors_of(0) == 64 + (64 + 2 * 2 * 8) * 5 + 3 * 4 + 64
    assert (first.qkv_width, first.value_width, first.ffn, second.query_width) == (0, 0, 0, 0)
    assert dense.weights == 3 * 64 * 256
    assert first.parts == ("Mamba-2", "layers without attention", "layers without MLP")


def test_gated_delta_nets_and_gates_by_hand() -> None:
    """Queries, keys, values, gate, β and decay in one GEMM; filters, two numbers of each head, one norm of all heads; a
    gate of attention is as wide as its queries, one of shared experts as the hidden state."""
    mixer = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 16, "conv": 3}
    moe = {"count": 4, "per_token": 2, "width": 32, "shared_width": 48, "shared_gate": True}
    types = {"delta": {"attention": False, "gdn": mixer}, "full": {"output_gate": "element", "experts": moe}}
    model = typed("(delta full)*4", layer_types=types)
    (delta, full), layer = counted(model), model.types[1]
    keys, values = 2 * 8, 4 * 16
    assert delta.weights == 64 * (2 * keys + 2 * values + 2 * 4) + values * 64 + 3 * 64 * 256
    assert delta.vectors_of(0) == (2 * keys + values) * 3 + 2 * 4 + 16 + 2 * 64
    attention = 64 * (layer.qkv_width + layer.query_width) + layer.query_width * 64
    assert full.weights == attention + 64 * 4 + 3 * 64 * 48 + 4 * 3 * 64 * 32
    assert full.vectors_of(0) == 2 * 64 + 64
    assert {"gated delta nets", "output gates of attention"} <= {*model.parts}


@pytest.mark.parametrize("full_rank", [False, True])
def test_kimi_delta_attention_by_hand(full_rank: bool) -> None:
    """Five matrices of heads, or four and one of a rank as wide as a head; the decay's is always of that rank."""
    kda = {"heads": 4, "head_dim": 16, "conv": 3, "full_rank": full_rank}
    model = typed("delta*4", layer_types={"delta": {"attention": False, "mlp": False, "kda": kda}})
    (delta,), low = counted(model), 64 * 16 + 16 * 64
    assert delta.weights == 64 * (3 * 64 + 4) + low + (64 * 64 if full_rank else low) + 64 * 64
    assert delta.vectors_of(0) == 3 * 64 * 3 + 64 + 4 + 16 + 64


def test_short_convolutions_by_hand() -> None:
    """Two GEMMs, of three and of one hidden dims, and a filter a channel; lightning attention has two, and a norm."""
    types = {"lightning": {"attention": False, "mlp": False, "lightning": {"heads": 4, "head_dim": 8}}}
    (lightning,) = counted(typed("lightning*4", layer_types=types))
    assert (lightning.weights, lightning.vectors_of(0)) == (5 * 64 * 32, 32 + 64)
    model = typed("conv*4", layer_types={"conv": {"attention": False, "mlp": False, "shortconv": {"conv": 5}}})
    (conv,) = counted(model)
    assert (conv.weights, conv.vectors_of(0)) == (4 * 64 * 64, 5 * 64 + 64)


def test_mtp_layers_add_a_layer_and_a_projection() -> None:
    """Each has the weights of the last type, a projection from twice the hidden size, and three norms."""
    without, model = typed(), typed(mtp_layers=2)
    last, predicting = counted(without)[-1], counted(model)[-1]
    assert model.types[-1].predicts
    assert predicting.weights == last.weights + 2 * 64 * 64
    assert parameters(model) - parameters(without) == 2 * (last.weights + last.vectors_of(8) + 2 * 64 * 64 + 3 * 64)
    assert model.mixed
