"""Megatron-LM of 2020 to 2022, and the Megatron-DeepSpeed that was built on it.

Until 2021 no fused attention, no gradient accumulation inside GEMMs, nothing overlapped: Narayanan et al., arXiv
2104.04473; Smith et al., arXiv 2201.11990. In 2022 sequence parallelism, selective recompute, GEMMs that accumulate
weight gradients: Korthikanti et al., arXiv 2205.05198.
"""

from __future__ import annotations

from dataclasses import replace

from axonn_tune.frameworks.command import TRIAL
from axonn_tune.frameworks.description import (
    AS_MANY_A_CHUNK,
    Because,
    FlopCount,
    Framework,
    PipelineSchedule,
    Run,
    Value,
)
from axonn_tune.frameworks.megatron_core import NAMES
from axonn_tune.frameworks.step import StepOptions

MEGATRON_2021 = Framework(
    name="megatron-2021",
    title="Megatron-LM (2021)",
    axes=("x", "data", "pipeline"),
    source="arXiv 2104.04473",
    measured_on="arXiv 2104.04473, table 1: 32 to 3,072 A100",
    step=StepOptions(
        reshard="always",
        whole_rows=False,
        gather_after_recompute=True,
        master_shards=False,
        reduction="whole",
        recompute_whole_block=True,
        selective=("attention.scores",),
        loss_chunks=1,
        loss="copied",
        loss_reductions=(1.0, 1.0, 1.0),
        fused_attention=False,
        dropout=True,
        vocabulary_multiple=128,
        overlaps=(),
    ),
    schedule=PipelineSchedule(overlapped_interleaved=False, equal_chunks=AS_MANY_A_CHUNK),
    software="megatron-2021",
    recompute_some="full",
    names=NAMES,
)

MEGATRON_2022 = replace(
    MEGATRON_2021.with_step(sequence_parallel=True, fused_accumulation=True, overlaps=("input_gradient",)),
    name="megatron-2022",
    title="Megatron-LM (2022)",
    source="arXiv 2205.05198",
    measured_on="arXiv 2205.05198, table 5: 8 to 512 A100",
)

DEEPSPEED_COUNT = FlopCount(
    log="Megatron-DeepSpeed",
    label="TFLOPs",
    counts="recompute, the padded vocabulary, and keys and values as 2 // (heads per KV head) · H²",
    source="deepspeedai/Megatron-DeepSpeed@4efb479d:megatron/utils.py, throughput_calculator",
    weights="whole_groups",
    padded=True,
    repeated={"full": ("blocks", "scores", "head"), "selective": ("scores",)},
)

MEGATRON_DEEPSPEED = replace(
    MEGATRON_2021.with_step(gradient_bytes=2),
    name="megatron-deepspeed",
    title="Megatron-DeepSpeed",
    source="microsoft/Megatron-DeepSpeed as vTrain ran it (arXiv 2312.12391): gradients reduced in FP16",
    measured_on="arXiv 2312.12391: 8 to 512 A100",
    schedule=PipelineSchedule(interleaved=False, overlapped_interleaved=False),
    software="megatron-deepspeed",
    logged=DEEPSPEED_COUNT,
)


MODEL = """
    num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels seq_length max_position_embeddings
    use_rotary_position_embeddings normalization swiglu disable_bias_linear untie_embeddings_and_output_weights
    tokenizer_type vocab_size make_vocab_size_divisible_by attention_dropout hidden_dropout
"""
"""Arguments of Megatron-LM of 2023 and all that was made from it, in which heads of keys and values, and FlashAttention
have other names in each. Source: megatron/arguments.py."""


def values_of(run: Run, *, norm: str) -> dict[str, Value]:
    """Values of arguments that are none of the run's fields; norm: what RMSNorm is called."""
    model, dropout = run.model, None if run.step.dropout else 0
    return {
        **run.fields,
        "use_rotary_position_embeddings": model.gated,
        "normalization": norm if model.gated else None,
        "tokenizer_type": "NullTokenizer",
        "vocab_size": Because(model.vocab - 1, f"{model.vocab} with the token that this tokenizer adds"),
        "attention_dropout": dropout,
        "hidden_dropout": dropout,
        "norm_epsilon": model.norm_epsilon,
        "pipeline": run.size("pipeline") if run.size("pipeline") > 1 else None,
        run.workload.precision: True,
        **TRIAL,
    }


FRAMEWORKS = (MEGATRON_2022, MEGATRON_2021, MEGATRON_DEEPSPEED)
