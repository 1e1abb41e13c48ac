"""Megatron-LM of 2020 to 2022, and the Megatron-DeepSpeed that was built on it.

Until 2021 no fused attention, no gradient accumulation inside GEMMs, nothing overlapped: Narayanan et al., arXiv
2104.04473; Smith et al., arXiv 2201.11990. In 2022 sequence parallelism, selective recompute, GEMMs that accumulate
weight gradients: Korthikanti et al., arXiv 2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from axonn_tune.frameworks.command import Argument, Run
from axonn_tune.frameworks.description import AS_MANY_A_CHUNK, FlopCount, Framework, PipelineSchedule, StepOptions
from axonn_tune.frameworks.megatron_core import NAMES

MEGATRON_2021 = Framework(
    name="megatron-2021",
    title="Megatron-LM (2021)",
    axes=("x", "data", "pipeline"),
    source="arXiv 2104.04473",
    step=StepOptions(
        reshard="always",
        whole_rows=False,
        gather_after_recompute=True,
        master_shards=False,
        reduction="whole",
        recompute_whole_block=True,
        selective=("attention.scores",),
        chunked_loss=False,
        loss_reductions=(1.0, 1.0, 1.0),
        fused_attention=False,
        dropout=True,
        vocabulary_multiple=128,
        overlaps=(),
    ),
    schedule=PipelineSchedule(overlapped_interleaved=False, equal_chunks=AS_MANY_A_CHUNK),
    software="megatron-2021",
    names=NAMES,
)

MEGATRON_2022 = replace(
    MEGATRON_2021.with_step(sequence_parallel=True, fused_accumulation=True, overlaps=("input_gradient",)),
    name="megatron-2022",
    title="Megatron-LM (2022)",
    source="arXiv 2205.05198",
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
    schedule=PipelineSchedule(interleaved=False, overlapped_interleaved=False),
    software="megatron-deepspeed",
    logged=DEEPSPEED_COUNT,
)


def model_arguments(run: Run, *, norm: str) -> Iterator[Argument]:
    """Sizes of the model, as Megatron-LM of 2023 has them, and all that was made from it; norm: what RMSNorm is called.

    Heads of keys and values, and FlashAttention, have other names in each. Source: megatron/arguments.py.
    """
    model, length = run.model, run.workload.sequence_length
    yield Argument("--num-layers", model.layers)
    yield Argument("--hidden-size", model.hidden)
    yield Argument("--ffn-hidden-size", model.ffn)
    yield Argument("--num-attention-heads", model.heads)
    yield Argument("--kv-channels", model.head_dim)
    yield Argument("--seq-length", length)
    yield Argument("--max-position-embeddings", max(length, model.max_sequence_length))
    if model.gated:
        yield Argument("--use-rotary-position-embeddings")
        yield Argument("--normalization", norm)
        yield Argument("--swiglu")
    if not model.biases:
        yield Argument("--disable-bias-linear")
    if not model.tied_embeddings:
        yield Argument("--untie-embeddings-and-output-weights")
    yield Argument("--tokenizer-type", "NullTokenizer")
    yield Argument("--vocab-size", model.vocab - 1, f"{model.vocab} with the token that this tokenizer adds")
    yield Argument("--make-vocab-size-divisible-by", run.step.vocabulary_multiple or 1)
    if not run.step.dropout:
        yield Argument("--attention-dropout", 0)
        yield Argument("--hidden-dropout", 0)


def trial_arguments() -> Iterator[Argument]:
    """A short run, every step in the log."""
    yield Argument("--train-iters", 50)
    yield Argument("--eval-iters", 0)
    yield Argument("--lr", 1e-4)
    yield Argument("--log-interval", 1)


FRAMEWORKS = (MEGATRON_2022, MEGATRON_2021, MEGATRON_DEEPSPEED)
