"""Kinds of model, each of few layers as wide as those that are trained."""

from __future__ import annotations

from functools import cache
from typing import Any

from axonn_tune.specs.model import Model
from tests.unit.small import small_model

_SIZES: dict[str, Any] = {
    "family": "llama",
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn": 8192,
    "vocab": 32000,
    "max_sequence_length": 2048,
}
_EXPERTS = {"count": 8, "per_token": 2, "width": 1024, "shared_width": 1024}
_LATENT = {"query_rank": 512, "kv_rank": 256, "nope_dim": 64, "rope_dim": 32, "value_dim": 64}
_INDEXER = {"heads": 8, "head_dim": 64, "topk": 512}
_FOLDED = {"heads": 16, "head_dim": 256, "query_rank": 512, "groups": 4, "output_rank": 256}
_MAMBA = {"heads": 64, "head_dim": 64, "state": 128, "groups": 8}
_TYPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "moe": {"experts": _EXPERTS},
    "latent": {"latent": _LATENT},
    "compressed": {"latent": _LATENT, "experts": _EXPERTS},
    "wide": {"head_dim": 256, "kv_heads": 4, "values_are_keys": True},
    "headed": {"qk_norms": "all_heads", "value_dim": 64, "heads": 24},
    "indexed": {"latent": _LATENT, "indexer": _INDEXER},
    "reusing": {"latent": _LATENT, "indexer": _INDEXER | {"shared": True}, "experts": _EXPERTS},
    "near": {"window": 512},
    "sparse": {"window": 512, "experts": _EXPERTS},
    "heavy": {"attention": False, "compressed": _FOLDED | {"ratio": 128}, "experts": _EXPERTS},
    "chosen": {"attention": False, "compressed": _FOLDED | {"ratio": 4, "indexer": _INDEXER}},
    "mamba": {"attention": False, "mlp": False, "mamba": _MAMBA},
    "mixer": {"attention": False, "mamba": _MAMBA},
    "alone": {"attention": False, "experts": _EXPERTS},
    "seeing": {"mlp": False},
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"layers": 6},
    "uneven": {"layers": 7, "tied_embeddings": True, "biases": True, "vocab": 50257},
    "large head": {"layers": 9, "vocab": 256000},
    "wide and narrow": {"layers": "plain*2 broad*3", "vocab": 128000},
    "experts": {"layers": "moe*6"},
    "dense and experts": {"layers": "plain*2 moe*5", "vocab": 128000},
    "latent with MTP": {"layers": "latent compressed*4", "mtp_layers": 1, "kv_heads": 16, "head_dim": 96},
    "sparse attention with MTP": {
        "layers": "indexed (indexed reusing)*2",
        "mtp_layers": 1,
        "kv_heads": 16,
        "head_dim": 96,
    },
    "norms behind": {"layers": 6, "norms": "post"},
    "norms around": {"layers": "plain (headed wide moe)*2", "norms": "both"},
    "folded attention and streams": {"layers": "(heavy chosen)*3", "mtp_layers": 1, "residual_streams": 4},
    "hybrid": {"layers": "mamba*2 seeing mixer*3", "vocab": 51200},
    "hybrid with experts": {"layers": "(mamba alone)*2 seeing mixer", "vocab": 51200},
    "windows": {"layers": "(near plain)*3"},
    "windows and experts": {"layers": "(sparse moe)*2"},
}
"""Models by what is particular about them, in what they have beside common sizes."""


@cache
def model_of(kind: str, layers: str | int | None = None) -> Model:
    """One of them; layers: others than its own."""
    changes = {**_SIZES, **KINDS[kind], **({} if layers is None else {"layers": layers})}
    types = {**_TYPES, "broad": {"ffn": 24576}}
    named = {
        name: one for name, one in types.items() if isinstance(pattern := changes["layers"], str) and name in pattern
    }
    return small_model(name=kind.replace(" ", "-"), layer_types=named, **changes)
