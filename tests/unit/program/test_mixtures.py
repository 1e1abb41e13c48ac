"""Models that mix layer types: each block repeats of a recompute set what it has."""

from __future__ import annotations

import pytest

from axonn_tune import search
from axonn_tune.errors import NothingFeasibleError, UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.program.step import build_step
from axonn_tune.recompute import needed_by
from axonn_tune.specs.document import read_yaml, validate
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

TYPES = {
    "plain": "{}",
    "latent": "{latent: {query_rank: 96, kv_rank: 64, nope_dim: 32, rope_dim: 32, value_dim: 32}}",
    "bare": "{mlp: false}",
    "ffn": "{attention: false}",
    "local": "{window: 128, qk_norms: true}",
    "moe": "{experts: {count: 8, per_token: 2, width: 128, shared_width: 128}}",
    "routed": "{experts: {count: 8, per_token: 2, width: 128}, latent: "
    "{kv_rank: 64, nope_dim: 32, rope_dim: 32, value_dim: 32}}",
    "mamba": "{attention: false, mamba: {heads: 8, head_dim: 64, state: 64, groups: 8}}",
}
FRAMEWORKS = ("megatron-core", "nemo", "axonn", "torchtitan", "deepspeed", "axonn-tune")
MIXTURES = [
    *(("plain", "latent"), ("latent", "mamba", "moe"), ("routed", "bare", "ffn")),
    *(("moe", "latent", "local"), ("local",), ("mamba",)),
]


def mixture(names: tuple[str, ...]) -> Model:
    """A small model of four rounds of these layer types."""
    types = "".join(f"  {name}: {TYPES[name]}\n" for name in names)
    text = f"""schema: axonn-tune/model/1
name: mixture
family: llama
layers: ({" ".join(names)})*4
hidden: 256
heads: 8
kv_heads: 8
head_dim: 32
ffn: 512
vocab: 1024
max_sequence_length: 512
biases: false
tied_embeddings: false
layer_types:
{types}source: made up
defaults: {{global_batch: 8, sequence_length: 512}}
"""
    return validate(read_yaml(text, source="mixture").root, schema=Model, source="mixture")


@pytest.mark.parametrize("names", MIXTURES, ids="-".join)
def test_frameworks_price_mixtures(names: tuple[str, ...]) -> None:
    """Guards hybrids: whatever is recomputed, a mixture is priced, or refused in words."""
    model, priced = mixture(names), 0
    for name in FRAMEWORKS:
        modules = [one for one in find_framework(name).recompute_modules if {*needed_by(one)} <= {*model.parts}]
        for recompute in (None, ",".join(modules) or "selective"):
            try:
                found = search(model, gpus=2, machine="dgx-h100", framework=name, recompute=recompute, micro_batch=1)
            except (UsageError, NothingFeasibleError):
                continue
            assert found.best.iteration_s > 0.0
            priced += 1
    assert priced > 3


def test_a_block_repeats_what_it_has() -> None:
    """Guards sets of a hybrid: the projections up from latents are repeated in the blocks that have latents alone."""
    workload = Workload(global_batch=8, sequence_length=512)
    program = build_step(mixture(("plain", "latent")), workload, recompute="mla_up_proj")
    repeated = [
        {step.layer for step in block.backward.operations if step.phase == "recompute"} for block in program.blocks
    ]
    assert repeated == [set(), {"latent.attention.q_up", "latent.attention.kv_up"}]
