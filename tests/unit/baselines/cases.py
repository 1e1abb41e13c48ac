"""A model, a machine and a workload the tests of the baselines share."""

from __future__ import annotations

from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model, ModelDefaults
from axonn_tune.specs.workload import Workload


def gpt(*, layers: int, hidden: int, heads: int) -> Model:
    """A GPT of these sizes, all else as in the papers on Megatron-LM."""
    return Model(
        schema="axonn-tune/model/1",
        name="gpt",
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=51200,
        max_sequence_length=2048,
        biases=True,
        tied_embeddings=True,
        source="test",
        defaults=ModelDefaults(global_batch=64, sequence_length=2048),
    )


GPT_22B = gpt(layers=48, hidden=6144, heads=64)
GPT_175B = gpt(layers=96, hidden=12288, heads=96)
GPT_530B = gpt(layers=105, hidden=20480, heads=128)


def machine(name: str = "perlmutter-80gb") -> Machine:
    """A shipped machine."""
    return load_machine(name).document


def model(name: str = "5b") -> Model:
    """A shipped model."""
    return load_model(name).document


def workload(global_batch: int = 64) -> Workload:
    """Sequences of 2,048 tokens in bf16."""
    return Workload(global_batch=global_batch, sequence_length=2048)
