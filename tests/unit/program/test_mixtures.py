"""Models that mix layer types: each block repeats of a recompute set what it has."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from axonn_tune import search
from axonn_tune.errors import NothingFeasibleError, UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.program.step import build_step
from axonn_tune.recompute import RECOMPUTES, lacked_by
from axonn_tune.specs.document import read_yaml, validate
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import Precision

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
    "delta": "{attention: false, gdn: {key_heads: 8, value_heads: 16, key_dim: 32, value_dim: 32}}",
    "kda": "{attention: false, kda: {heads: 8, head_dim: 32}}",
    "conv": "{attention: false, shortconv: {}}",
    "lightning": "{attention: false, lightning: {heads: 8, head_dim: 32}}",
    "indexed": "{latent: {query_rank: 96, kv_rank: 64, nope_dim: 32, rope_dim: 32, value_dim: 32}, "
    "indexer: {heads: 4, head_dim: 32, topk: 128}}",
    "behind": "{norms: both, qk_norms: all_heads}",
    "beside": "{norms: parallel}",
    "folded": "{attention: false, compressed: {heads: 8, head_dim: 64, query_rank: 96, groups: 2, output_rank: 64, "
    "ratio: 4, indexer: {heads: 4, head_dim: 32, topk: 64}}}",
    "gated": "{output_gate: element, experts: {count: 8, per_token: 2, width: 128, shared_width: 128, "
    "shared_gate: true}}",
}
FRAMEWORKS = ("megatron-core", "nemo", "axonn", "torchtitan", "deepspeed", "axonn-tune")
NO_EXPERTS = ("axonn", "deepspeed")


def mixture(names: tuple[str, ...]) -> Model:
    """A small model of four rounds of these layer types."""
    types = "".join(f"  {name}: {TYPES[name]}\n" for name in names)
    head_dim = 64 if all("latent" in TYPES[name] or "attention: false" in TYPES[name] for name in names) else 32
    text = f"""schema: axonn-tune/model/1
name: mixture
family: llama
layers: ({" ".join(names)})*4
hidden: 256
heads: 8
kv_heads: 8
head_dim: {head_dim}
ffn: 512
vocab: 1024
max_sequence_length: 512
biases: false
tied_embeddings: false
{"residual_streams: 2" if "folded" in names else ""}
layer_types:
{types}source: made up
defaults: {{global_batch: 8, sequence_length: 512}}
"""
    return validate(read_yaml(text, source="mixture").root, schema=Model, source="mixture")


Case = tuple[tuple[str, ...], Precision, str]
"""Layer types of a model, a number format, and what is recomputed."""


def cases(framework: str) -> list[Case]:
    """Every pair and triple of layer types, in BF16 and two narrower formats, with nothing recomputed, a framework's
    own choice, whole blocks, and every module that the model has."""
    found = find_framework(framework)
    formats: tuple[Precision, ...] = ("bf16", *found.formats[:2])
    mixed = [names for count in (2, 3) for names in combinations(TYPES, count)]
    return [(names, one, kind) for names in mixed for one in formats for kind in (*RECOMPUTES, "modules")]


def priced(framework: str, listed: list[Case]) -> int:
    """How many of them have a price; others are refused in words, and nothing else happens."""
    found, modules = 0, find_framework(framework).recompute_modules
    for names, precision, kind in listed:
        model = mixture(names)
        had = ",".join(one for one in modules if not lacked_by(one, model.parts))
        pins: dict[str, Any] = {"recompute": had or "none" if kind == "modules" else kind, "micro_batch": 1}
        machine = "dgx-b200" if precision in ("mxfp8", "nvfp4") else "dgx-h100"
        try:
            best = search(model, gpus=2, machine=machine, framework=framework, precision=precision, **pins).best
        except (UsageError, NothingFeasibleError):
            continue
        assert best.iteration_s > 0.0
        found += 1
    return found


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_frameworks_price_mixtures(framework: str) -> None:
    """Guards hybrids, on a sample: whatever a model mixes and recomputes, it is priced, or refused in words."""
    listed = cases(framework)
    assert priced(framework, listed[:: len(listed) // 8]) >= (0 if framework in NO_EXPERTS else 6)


@pytest.mark.deep
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_frameworks_price_all_mixtures(framework: str) -> None:
    """The same of all pairs and triples: 4,032 searches, of which those of experts are refused where there are none."""
    listed = cases(framework)
    least = 0.2 if framework in NO_EXPERTS else 0.5
    assert priced(framework, listed) >= least * len(listed)


def test_a_block_repeats_what_it_has() -> None:
    """Guards sets of a hybrid: the projections up from latents are repeated in the blocks that have latents alone."""
    workload = Workload(global_batch=8, sequence_length=512)
    program = build_step(mixture(("plain", "latent")), workload, recompute="mla_up_proj")
    repeated = [
        {step.layer for step in block.backward.operations if step.phase == "recompute"} for block in program.blocks
    ]
    assert repeated == [set(), {"latent.attention.q_up", "latent.attention.kv_up"}]
