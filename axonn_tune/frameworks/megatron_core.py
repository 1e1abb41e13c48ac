"""Megatron-Core: tensor, sequence, context and interleaved pipeline parallelism, distributed optimizer, and GTP.

GTP (generalized tensor parallelism) shards weights over an axis of its own, our z: one gather a weight and pass, a
reduce-scatter of its gradient each micro-batch, every layer resharded after forward. Sources:
NVIDIA/Megatron-LM@d98e8a64 (2026-08-22) and its GTP guide, docs/api-guide/core/generalized_tensor_parallel.md; defaults
of its arguments but for those every recipe sets: sequence parallelism, distributed optimizer, overlapped gradient
reduction and parameter gather. Without overlap, a rank has one bucket (core/distributed/distributed_data_parallel.py),
which it reduces after its schedule (core/distributed/finalize_model_grads.py) and gathers after the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from axonn_tune.frameworks.command import (
    EXPANDABLE_SEGMENTS,
    LITTLE_TO_REPEAT,
    Argument,
    Command,
    Run,
    sections_of,
)
from axonn_tune.frameworks.description import (
    AS_MANY_A_CHUNK,
    ContextExchange,
    FlopCount,
    Framework,
    PipelineSchedule,
    StepOptions,
)
from axonn_tune.specs.machine import EnvironmentVariable
from axonn_tune.specs.model import Model

_STEP = StepOptions(
    sequence_parallel=True,
    repeated_kv_heads=True,
    shard_gradient_bytes=4,
    reshard="always",
    head_gathered_again=True,
    whole_rows=False,
    gather_after_recompute=True,
    master_shards=False,
    distributed_optimizer=True,
    parameter_overlap=True,
    blocking_reduction="whole",
    recompute_whole_block=True,
    selective=("attention.scores",),
    chunked_loss=False,
    loss_reductions=(1.0, 1.0, 1.0),
    fused_accumulation=True,
    vocabulary_multiple=128,
    overlaps=("gather_prefetch", "input_gradient", "weight_gradient", "data_parallel"),
)

RELEASE = "Megatron-Core 0.19.2"
_ORDER = ("x", "z", "context", "data", "pipeline")
_STAGES_INSIDE = ("x", "z", "context", "pipeline", "data")
"""Rank orders (core/parallel_state.py; 0.19.2 puts GTP's ranks right after TP's)."""
_BLACKWELL = ("B200", "B300")
CP_COMM_TYPES: Mapping[ContextExchange, str] = {"ring": "p2p", "all_gather": "all_gather", "all_to_all": "a2a"}
RECOMPUTE_MODULES = {"core_attn": ("attention.scores",), "layernorm": ("attention.norm", "mlp.norm")}
"""Layers that selective recompute repeats, by the names of --recompute-modules."""
_SETTABLE = (
    *("sequence_parallel", "pipelined_tensor", "gradient_bytes", "shard_gradient_bytes", "distributed_optimizer"),
    *("parameter_overlap", "context_exchange", "vocabulary_multiple", "dropout", "data_parallel"),
    *("selective", "fused_accumulation", "first_less", "last_less"),
)
"""Options of a step, and overlaps, that arguments below switch."""
_PRECISIONS = {"bf16": "--bf16", "fp16": "--fp16", "fp32": ""}


@dataclass(frozen=True)
class _Setting:
    """An argument of `pretrain_gpt.py`, and what it is in Megatron-Bridge: `key=value`, some of them or none."""

    argument: Argument
    bridge: tuple[str, ...] = ()

    @classmethod
    def of(cls, flag: str, value: str | int | float | None, key: str, *, why: str = "") -> _Setting:
        """A setting whose value is the same in both; a switch is `true`."""
        return cls(Argument(flag, value, why), (f"{key}={'true' if value is None else value}",))


def launch(run: Run) -> Command:
    """`pretrain_gpt.py` on mock data; UsageError for another rank order, fp64, and a step it has no arguments for.

    Flags by their sources: megatron/training/arguments.py and the config dataclasses it is made from.
    """
    run.check_step(settable=_SETTABLE, precisions=tuple(_PRECISIONS))
    settings = {title: found for title, made in _settings(run).items() if (found := tuple(made))}
    command = Command(
        release=RELEASE,
        program=("pretrain_gpt.py",),
        sections=sections_of({title: [one.argument for one in made] for title, made in settings.items()}),
        environment=tuple(_environment(run)),
        needs=(
            "Start it in a checkout of NVIDIA/Megatron-LM at core_v0.19.2, which has pretrain_gpt.py.",
            *_needs(run, unstated="--rotary-base and --norm-epsilon"),
            "For real training replace --mock-data and NullTokenizer, and add --save.",
        ),
        notes=tuple(_notes(run)),
    )
    # Its precision presets set the type of gradients, and its recipe the distributed optimizer, over what is asked.
    as_preset = run.step.distributed_optimizer and run.step.gradient_bytes != 2 and run.workload.precision == "bf16"
    return replace(command, forms={"bridge": _bridge(command, settings, run)} if as_preset else {})


def _bridge(command: Command, settings: dict[str, tuple[_Setting, ...]], run: Run) -> Command:
    """The same for Megatron-Bridge, whose plain recipe has the defaults of `pretrain_gpt.py`.

    Sources: megatron-bridge 0.6.2 (PyPI), recipes/gpt; its guide "Megatron-LM to Megatron Bridge".
    """
    recipe = Argument("--recipe", "vanilla_gpt_pretrain_config"), Argument("--dataset", "llm-pretrain-mock")
    keys = {
        title: tuple(Argument(key, why=one.argument.why) for one in made for key in one.bridge)
        for title, made in settings.items()
    }
    return replace(
        command,
        release="Megatron-Bridge 0.6.2",
        program=("scripts/training/run_recipe.py",),
        sections=sections_of({"recipe": recipe, **keys}),
        needs=(
            "Start it in a checkout of NVIDIA-NeMo/Megatron-Bridge at v0.6.2.",
            *_needs(run, unstated="model.rotary_base and model.layernorm_epsilon"),
            "For real training replace --dataset and tokenizer.tokenizer_type, and set checkpoint.save.",
        ),
    )


def _settings(run: Run) -> dict[str, Iterator[_Setting]]:
    return {
        "model": _model(run),
        "batch": _batch(run),
        "parallelism": _parallelism(run),
        "overlap": _overlap(run),
        "recompute": _recompute(run),
        "precision": _precision(run),
        "trial": _trial(),
    }


def _model(run: Run) -> Iterator[_Setting]:
    model, length = run.model, run.workload.sequence_length
    of = _Setting.of
    yield of("--num-layers", model.layers, "model.num_layers")
    yield of("--hidden-size", model.hidden, "model.hidden_size")
    yield of("--ffn-hidden-size", model.ffn, "model.ffn_hidden_size")
    yield of("--num-attention-heads", model.heads, "model.num_attention_heads")
    if model.kv_heads != model.heads:
        yield _Setting(Argument("--group-query-attention"))
        yield of("--num-query-groups", model.kv_heads, "model.num_query_groups")
    yield of("--kv-channels", model.head_dim, "model.kv_channels")
    yield of("--seq-length", length, "dataset.seq_length")
    yield _Setting(Argument("--max-position-embeddings", max(length, model.max_sequence_length)))
    yield from _kind(model)
    yield of("--vocab-size", model.vocab, "tokenizer.vocab_size")
    rows = run.step.vocabulary_multiple or 1
    yield of("--make-vocab-size-divisible-by", rows, "model.make_vocab_size_divisible_by")
    if not run.step.dropout:
        yield of("--hidden-dropout", 0.0, "model.hidden_dropout")
        yield of("--attention-dropout", 0.0, "model.attention_dropout")


def _kind(model: Model) -> Iterator[_Setting]:
    """Norm, activation and positions of the family; biases and tied tables."""
    of = _Setting.of
    yield of(
        "--position-embedding-type",
        "learned_absolute" if model.learned_positions else "rope",
        "model.position_embedding_type",
    )
    yield of("--normalization", "RMSNorm" if model.gated else "LayerNorm", "model.normalization")
    if model.gated:
        yield _Setting(Argument("--swiglu"), ("model.gated_linear_unit=true", "model.activation_func=silu"))
    if not model.biases:
        yield _Setting(Argument("--disable-bias-linear"), ("model.add_bias_linear=false",))
    if model.rotary_base is not None:
        yield of("--rotary-base", round(model.rotary_base), "model.rotary_base")
    if model.norm_epsilon is not None:
        yield of("--norm-epsilon", model.norm_epsilon, "model.layernorm_epsilon")
    if model.qkv_biases:
        yield of("--add-qkv-bias", None, "model.add_qkv_bias")
    if not model.tied_embeddings:
        untied = ("model.share_embeddings_and_output_weights=false",)
        yield _Setting(Argument("--untie-embeddings-and-output-weights"), untied)


def _batch(run: Run) -> Iterator[_Setting]:
    yield _Setting.of("--micro-batch-size", run.micro_batch, "train.micro_batch_size")
    yield _Setting.of("--global-batch-size", run.workload.global_batch, "train.global_batch_size")


def _parallelism(run: Run) -> Iterator[_Setting]:
    of, tensor, shards = _Setting.of, run.size("x"), run.size("z")
    yield of("--tensor-model-parallel-size", tensor, "model.tensor_model_parallel_size", why="TP")
    if tensor > 1 and run.step.sequence_parallel:
        yield of("--sequence-parallel", None, "model.sequence_parallel")
    if shards > 1:
        flag, key = "--tensor-parallel-num-weight-shards", "model.tensor_parallel_num_weight_shards"
        yield of(flag, tensor * shards, key, why=f"TP * GTP = {tensor} * {shards}")
    if run.size("context") > 1:
        yield of("--context-parallel-size", run.size("context"), "model.context_parallel_size", why="CP")
        yield of("--cp-comm-type", CP_COMM_TYPES[run.step.context_exchange], "model.cp_comm_type")
    yield from _pipeline(run)
    yield from _order(run)
    if run.step.distributed_optimizer:
        keys = ("ddp.use_distributed_optimizer=true", "optimizer.use_distributed_optimizer=true")
        yield _Setting(Argument("--use-distributed-optimizer"), keys)


def _pipeline(run: Run) -> Iterator[_Setting]:
    """Stages, and their chunks; layers of each part where they are not the same."""
    stages = run.size("pipeline")
    if stages == 1:
        return
    yield _Setting.of("--pipeline-model-parallel-size", stages, "model.pipeline_model_parallel_size", why="PP")
    counted = _counted(run)
    if counted is None:
        layout = _layout(run.parts)
        key = f"model.pipeline_model_parallel_layout='{layout}'"
        yield _Setting(Argument("--pipeline-model-parallel-layout", layout, "blocks of each part"), (key,))
        return
    for what in counted:
        name, why = f"account_for_{what}_in_pipeline_split", "in the place of one block"
        yield _Setting.of(f"--{name.replace('_', '-')}", None, f"model.{name}", why=why)
    if run.chunks > 1:
        key = "model.virtual_pipeline_model_parallel_size"
        yield _Setting.of("--num-virtual-stages-per-pipeline-rank", run.chunks, key, why="VPP")


def _counted(run: Run) -> tuple[str, ...] | None:
    """What takes one block's place on the first and last part, where all parts are as long then; None where none is.

    Source: core/transformer/transformer_block.py, get_num_layers_to_build.
    """
    each = max(run.parts)
    ends = {"embedding": each - run.parts[0], "loss": each - run.parts[-1]}
    if {*run.parts[1:-1], each} != {each} or max(ends.values()) > 1:
        return None
    return tuple(what for what, less in ends.items() if less)


def _layout(parts: tuple[int, ...]) -> str:
    """Blocks of each part: E is the embedding, t a block, L the LM head, and parts alike are repeated."""
    first, *middle, last = (f"t*{blocks}" for blocks in parts)
    runs = [(part, len([*same])) for part, same in groupby(middle)]
    repeated = "".join(f"({part}|)*{count}" if count > 1 else f"{part}|" for part, count in runs)
    return f"E{first}|{repeated}{last}L"


def _order(run: Run) -> Iterator[_Setting]:
    """The switch of this rank order; UsageError for one that Megatron-Core does not have.

    With stages inside data it checks the ranks of experts also where there are none (core/parallel_state.py): their
    weights must be sharded as the others are, and context has no such argument.
    """
    wide = [axis for axis in run.grid.order if run.size(axis) > 1]
    orders = [[axis for axis in order if axis in wide] for order in (_ORDER, _STAGES_INSIDE)]
    if wide == orders[0]:
        return
    if wide != orders[1]:
        has = " or ".join(dict.fromkeys(map(run.named, orders)))
        raise run.cannot(f"the rank order {run.named(wide)}", f"it has {has}")
    if "context" in wide:
        raise run.cannot("CP with pipeline stages inside DP", f"ask for --order {','.join(_ORDER)}")
    yield _Setting.of("--use-tp-pp-dp-mapping", None, "dist.use_tp_pp_dp_mapping")
    if "z" in wide:
        flag, key = "--expert-tensor-parallel-num-weight-shards", "model.expert_tensor_parallel_num_weight_shards"
        yield _Setting.of(flag, run.size("x") * run.size("z"), key, why="as the others, although there are no experts")


def _overlap(run: Run) -> Iterator[_Setting]:
    step, used = run.step, run.workload.overlaps
    if "data_parallel" in step.overlaps and "data_parallel" in used:
        yield _Setting.of("--overlap-grad-reduce", None, "ddp.overlap_grad_reduce")
        if step.distributed_optimizer and step.parameter_overlap:
            yield _Setting.of("--overlap-param-gather", None, "ddp.overlap_param_gather")
    if step.pipelined_tensor and run.size("x") > 1:
        yield _Setting.of("--tp-comm-overlap", None, "model.tp_comm_overlap")


def _recompute(run: Run) -> Iterator[_Setting]:
    if run.recompute == "none":
        return
    yield _Setting.of("--recompute-granularity", run.recompute, "model.recompute_granularity")
    if run.recompute == "full":
        yield _Setting.of("--recompute-method", "uniform", "model.recompute_method")
        yield _Setting.of("--recompute-num-layers", 1, "model.recompute_num_layers", why="every block by itself")
    else:
        named = [name for name, layers in RECOMPUTE_MODULES.items() if set(layers) <= set(run.step.selective)]
        if {layer for name in named for layer in RECOMPUTE_MODULES[name]} != set(run.step.selective):
            raise run.cannot(f"recompute of {', '.join(run.step.selective)}", "leave out --set step.selective")
        flag = Argument("--recompute-modules", tuple(named))
        yield _Setting(flag, (f"model.recompute_modules=[{','.join(named)}]",))


def _precision(run: Run) -> Iterator[_Setting]:
    precision = run.workload.precision
    if _PRECISIONS[precision]:
        yield _Setting(Argument(_PRECISIONS[precision]), (f"mixed_precision={precision}_mixed",))
    reduced = {run.step.gradient_bytes, *([run.step.shard_gradient_bytes] if run.size("z") > 1 else [])}
    if 2 in reduced and (len(reduced) > 1 or precision == "fp32"):
        what = "gradients of which some are reduced in 2 bytes" if precision != "fp32" else "BF16 gradients in fp32"
        raise run.cannot(what, "set step.gradient_bytes=2 and step.shard_gradient_bytes=2, or neither")
    if precision == "fp16" and 2 not in reduced:
        why = "gradients are accumulated and reduced in FP32"
        yield _Setting(Argument("--accumulate-allreduce-grads-in-fp32", why=why))
    if not run.step.fused_accumulation:
        yield _Setting(Argument("--no-gradient-accumulation-fusion"), ("model.gradient_accumulation_fusion=false",))
    if 2 in reduced and precision == "bf16":
        yield _Setting(Argument("--grad-reduce-in-bf16"))


def _trial() -> Iterator[_Setting]:
    """Steps on mock data, each with its time and throughput in the log."""
    of = _Setting.of
    yield _Setting(Argument("--mock-data"))
    yield of("--tokenizer-type", "NullTokenizer", "tokenizer.tokenizer_type")
    yield of("--train-iters", 50, "train.train_iters")
    yield of("--eval-iters", 0, "validation.eval_iters")
    yield of("--lr", 1e-4, "optimizer.lr")
    yield of("--log-interval", 1, "logger.log_interval")
    yield of("--log-throughput", None, "logger.log_throughput")


def _environment(run: Run) -> Iterator[EnvironmentVariable]:
    older = not any(name in run.machine.accelerator.name.upper() for name in _BLACKWELL)
    if older and max(run.size("x"), run.size("context")) > 1:
        why = "required before Blackwell where TP or CP is above 1: kernels start in the order of their launch"
        yield EnvironmentVariable(name="CUDA_DEVICE_MAX_CONNECTIONS", value="1", why=why)
    # By its older name.
    yield EXPANDABLE_SEGMENTS.model_copy(update={"name": "PYTORCH_CUDA_ALLOC_CONF"})


def _needs(run: Run, *, unstated: str) -> Iterator[str]:
    if run.size("z") > 1:
        yield "GTP needs Transformer Engine 2.19 or later."
    if run.model.norm_epsilon is None:
        yield f"Speed does not depend on {unstated}: set them as {run.model.name} has them."


def _notes(run: Run) -> Iterator[str]:
    if run.recompute == "selective" and run.step.fused_attention:
        yield LITTLE_TO_REPEAT


NAMES = {"x": "TP", "z": "GTP", "pipeline": "PP", "chunks": "VPP", "context": "CP", "data": "DP"}
"""What Megatron-LM and what is built on it call the axes; GTP is our z, so its flag of weight shards is TP times it."""

MEGATRON_CORE = Framework(
    name="megatron-core",
    title="Megatron-Core",
    axes=_ORDER,
    source="NVIDIA/Megatron-LM@d98e8a64, megatron/core",
    step=_STEP,
    schedule=PipelineSchedule(scattered=False),
    software="core",
    hopper_attention=True,
    keeps_layers=False,
    names=NAMES,
    logged=FlopCount(
        log="Megatron-Core",
        label="throughput per GPU",
        counts="the causal half of attention, and the padded vocabulary",
        source="NVIDIA/Megatron-LM@d98e8a64:megatron/training/training.py, num_floating_point_operations",
        scores=0.5,
        padded=True,
    ),
    launch=launch,
)

NEMO = replace(
    MEGATRON_CORE.with_step(gradient_bytes=2),
    name="nemo",
    title="NeMo",
    axes=("x", "context", "data", "pipeline"),
    source="defaults of NeMo's recipes: gradients reduced in BF16, --tp-comm-overlap where a row says so",
    logged=FlopCount(
        log="NeMo",
        label="TFLOPS_per_GPU",
        counts="the same as MFU",
        source="NVIDIA/NeMo@034b17b3:nemo/utils/flops_formulas.py",
    ),
    launch=None,
)

NEMO_2022 = replace(
    NEMO.with_step(fused_attention=False),
    name="nemo-2022",
    title="NeMo (2022)",
    source="NeMo before it had FlashAttention and fused layers",
    schedule=PipelineSchedule(equal_chunks=AS_MANY_A_CHUNK),
    software="megatron-2021",
    logged=None,
)

FRAMEWORKS = (MEGATRON_CORE, NEMO, NEMO_2022)
