"""The bundled runtime: the paper's 4D algorithm with exact norms, gathers one ahead, and a loss in chunks.

Source: `axonn_tune.runtime`, whose collectives are checked against this description's program.
"""

from __future__ import annotations

from axonn_tune.frameworks.description import Framework, PipelineSchedule, Saver
from axonn_tune.frameworks.optimizers import ADAMW
from axonn_tune.frameworks.step import KernelKind, StepOptions
from axonn_tune.recompute import MODULES
from axonn_tune.specs.machine import Software
from axonn_tune.vocabulary import LARGEST_SIZE

AXONN_TUNE = Framework(
    name="axonn-tune",
    title="axonn-tune (4D)",
    axes=("x", "y", "z", "data", "pipeline"),
    source="axonn_tune.runtime",
    step=StepOptions(
        kernels="compiled",
        expert_shards=("z",),
        expert_replicas=("data",),
        replicated_adapters=True,
        selective=("attention.core", "attention.gate", "attention.norm", "mlp.norm", "mlp.activation"),
        muon_tp_mode="in_turn",
        muon_gathered=True,
    ),
    # Of all its grids, rank orders and numbers of chunks the bounds of split passes exclude few: a search would take 20
    # times as long.
    schedule=PipelineSchedule(
        overlapped=True, scattered=False, orders=("1f1b", "zb1p"), compared=False, zb1p_chunks=(1, LARGEST_SIZE)
    ),
    permuted=True,
    hopper_attention=True,
    attention_since="",
    expert_axes=("expert",),
    asked_axes=("context",),
    recompute_modules=tuple(name for name, one in MODULES.items() if not one.needs),
    recompute_some="any",
    tuner="axonn-tune",
    savers=(Saver("sharded optimizer states (ZeRO-1)", "shard_optimizer", True, trades=True),),
    recompute_sets=("none", "selective", "layernorm,mlp", "full"),
    ranked_by="communication",
    optimizers=dict.fromkeys((ADAMW, "sgd", "lion", "muon"), ()),
)

HOST: dict[KernelKind, Software] = {"compiled": Software(dispatch_us=35.0), "eager": Software(dispatch_us=20.0)}
"""Host time to issue an operation on a GPU's stream, by kind of kernels; a compiled function checks its
guards first.

Measured: CPU time of a block's forward and backward pass on tensors too small to compute on (16 tokens, hidden 64),
over the operations that the program has of them; torch 2.13, a core of an AMD EPYC.
"""
