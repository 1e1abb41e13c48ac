"""Megatron-Core: tensor, sequence, context and interleaved pipeline parallelism, distributed optimizer, and GTP.

GTP (generalized tensor parallelism) shards weights over an axis of its own, our z: one gather a weight and pass, a
reduce-scatter of its gradient each micro-batch, every layer resharded after forward. Sources:
NVIDIA/Megatron-LM@d98e8a64 (2026-08-22) and its GTP guide, docs/api-guide/core/generalized_tensor_parallel.md; defaults
of its arguments but for those every recipe sets: sequence parallelism, distributed optimizer, overlapped gradient
reduction and parameter gather. Without overlap, a rank has one bucket (core/distributed/distributed_data_parallel.py),
which it reduces after its schedule (core/distributed/finalize_model_grads.py) and gathers after the optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from axonn_tune.frameworks.command import (
    EXPANDABLE_SEGMENTS,
    LITTLE_TO_REPEAT,
    TRIAL,
    flags,
    of_checkout,
    of_package,
    sections_of,
)
from axonn_tune.frameworks.description import (
    ADAMW_ALONE,
    AS_MANY_A_CHUNK,
    OWN_SAVERS,
    Argument,
    Because,
    Check,
    Command,
    FlopCount,
    Framework,
    PipelineSchedule,
    Run,
    Saver,
    Value,
    on_host,
)
from axonn_tune.frameworks.finetuning import recipe, swift
from axonn_tune.frameworks.keys import step_keys
from axonn_tune.frameworks.megatron_layers import WRITTEN as OF_LAYERS
from axonn_tune.frameworks.megatron_layers import is_hybrid, parts
from axonn_tune.frameworks.megatron_layers import values as layer_values
from axonn_tune.frameworks.statements import ANY_ORDER, CUDNN_NORMS, DISPATCHERS, flex_backend, written
from axonn_tune.frameworks.step import FORMAT_OPTIONS, StepOptions
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.specs.machine import EnvironmentVariable
from axonn_tune.stages import layout_text
from axonn_tune.vocabulary import CUDA_GRAPHS, PACKINGS

_STEP = StepOptions(
    keeps_quantized=True,
    narrow_gathers=True,
    sequence_parallel=True,
    quantizes_in_gemm=True,
    tf32=True,
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
    loss_chunks=1,
    loss="softmax",
    loss_reductions=(1.0, 1.0, 1.0),
    fused_accumulation=True,
    compiled_activation=True,
    muon_tp_mode="blockwise",
    vocabulary_multiple=128,
    expert_replicas=("x", "z", "context", "data"),
    expert_kernels="separate",
    # Tokens of the batch and the loss (core/distributed/finalize_model_grads.py; training/training.py).
    step_reductions=2,
    overlaps=("gather_prefetch", "input_gradient", "weight_gradient", "data_parallel"),
)

_SETS = ("moe_act", "layernorm,moe_act", "mla_up_proj", "moe_act,mla_up_proj", "layernorm,moe_act,mla_up_proj")
"""Recompute sets that a search tries of models that have these modules, beside those of all."""

_RELEASE = "0.19.2"
RELEASE = f"Megatron-Core {_RELEASE}"
_ORDER = ("x", "z", "context", "data", "pipeline")
_STAGES_INSIDE = ("x", "z", "context", "pipeline", "data")
"""Rank orders (core/parallel_state.py; 0.19.2 puts GTP's ranks right after TP's)."""
_ONE_CONNECTION = EnvironmentVariable(
    name="CUDA_DEVICE_MAX_CONNECTIONS",
    value="1",
    why="required before Blackwell where TP or CP is above 1: kernels start in the order of their launch",
)
_MANY_CONNECTIONS = EnvironmentVariable(
    name="CUDA_DEVICE_MAX_CONNECTIONS",
    value="32",
    why="before Blackwell, so that dispatch runs beside computation, which TP and CP alone would rather have in order",
)
_UNREGISTERED = EnvironmentVariable(
    name="NCCL_GRAPH_REGISTER", value="0", why="required by CUDA graphs beside expandable segments"
)
_PRIORITIES = EnvironmentVariable(
    name="CUDA_GRAPHS_USE_NODE_PRIORITY", value="1", why="required from Blackwell on by CUDA graphs beside GTP"
)
_ORDERED = EnvironmentVariable(
    name=ANY_ORDER, value="0", why="attention's gradients are the same from run to run, as step.deterministic asks"
)
_CUDNN_NORMS = tuple(
    EnvironmentVariable(
        name=name, value="1", why="norms are cuDNN's, which quantize to MXFP8, as step.cudnn_norms asks"
    )
    for name in (CUDNN_NORMS, CUDNN_NORMS.replace("FWD", "BWD"))
)
_SETTABLE = (
    *("sequence_parallel", "pipelined_tensor", "gradient_bytes", "shard_gradient_bytes", "distributed_optimizer"),
    *("parameter_overlap", "context_inside", "vocabulary_multiple", "dropout", "data_parallel", "cuda_graphs"),
    *("master_bytes", "exp_avg_bytes", "exp_avg_sq_bytes", "selective", "dispatcher", "gathers_experts"),
    *("first_layers_bf16", "last_layers_bf16", "deterministic", "cudnn_norms"),
    *("offloaded", "offloaded_states", "offloaded_inputs", "offloaded_layers", "offload_overlap"),
)
"""Options of a step, and overlaps, that several arguments below switch; others have a row of the table each."""
_PRECISIONS = ("bf16", "fp16", "fp32")
FORMATS: Mapping[str, Mapping[str, Value]] = {
    "fp8-delayed": {
        **{"fp8_format": "hybrid", "fp8_recipe": "delayed"},
        **{"fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"},
    },
    "fp8-current": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "fp8-blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "nvfp4": {"fp4_format": "e2m1", "fp4_recipe": "nvfp4"},
}
"""Arguments of formats below 16 bits, by `--precision`; Transformer Engine's defaults of delayed scaling."""


_WRITTEN = {
    "model": """
        model.num_layers model.hidden_size model.ffn_hidden_size model.num_attention_heads group_query_attention
        model.num_query_groups model.kv_channels dataset.seq_length max_position_embeddings
        model.position_embedding_type model.normalization swiglu disable_bias_linear model.rotary_base norm_epsilon
        model.add_qkv_bias untie_embeddings_and_output_weights tokenizer.vocab_size
        model.make_vocab_size_divisible_by model.hidden_dropout model.attention_dropout squared_relu
    """,
    **OF_LAYERS,
    "batch": "train.micro_batch_size train.global_batch_size",
    "parallelism": """
        model.tensor_model_parallel_size model.sequence_parallel model.tensor_parallel_num_weight_shards
        model.context_parallel_size model.cp_comm_type model.hierarchical_context_parallel_sizes
        model.pipeline_model_parallel_size pipeline_model_parallel_layout model.account_for_embedding_in_pipeline_split
        model.account_for_loss_in_pipeline_split num_virtual_stages_per_pipeline_rank dist.use_tp_pp_dp_mapping
        model.expert_tensor_parallel_num_weight_shards use_distributed_optimizer
    """,
    "overlap": "ddp.overlap_grad_reduce ddp.overlap_param_gather model.tp_comm_overlap",
    "recompute": "model.recompute_granularity model.recompute_method model.recompute_num_layers recompute_modules",
    "precision": """
        bf16 fp16 accumulate_allreduce_grads_in_fp32 no_gradient_accumulation_fusion grad_reduce_in_bf16
        optimizer.use_precision_aware_optimizer optimizer.main_params_dtype optimizer.exp_avg_dtype
        optimizer.exp_avg_sq_dtype fp8_format fp8_recipe fp8_amax_history_len fp8_amax_compute_algo fp8_param_gather
        reuse_grad_buf_for_mxfp8_param_ag fp4_format fp4_recipe fp4_param_gather first_last_layers_bf16
        num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 fp8_dot_product_attention
    """,
    "offload": """
        optimizer.optimizer_cpu_offload optimizer.optimizer_offload_fraction optimizer.overlap_cpu_optimizer_d2h_h2d
        model.cpu_offloading model.cpu_offloading_num_layers model.fine_grained_activation_offloading
        model.offload_modules model.activation_offload_fraction
    """,
    "graphs": "cuda_graph_impl cuda_graph_modules no_check_for_nan_in_loss_and_grad",
    "trial": """
        mock_data tokenizer.tokenizer_type train.train_iters validation.eval_iters optimizer.lr logger.log_interval
        logger.log_throughput
    """,
}
"""Arguments by section, each by its name in Megatron-Bridge, whose last part is that of `pretrain_gpt.py`."""

_PATTERNS = ("moe_layer_freq", "window_attn_skip_freq", "no_rope_freq")
"""Arguments with a mark for each layer, which Megatron-Bridge has as lists."""

_BRIDGE: Mapping[str, tuple[str, ...]] = {
    "swiglu": ("model.gated_linear_unit=true", "model.activation_func=silu"),
    "quick_geglu": ("model.gated_linear_unit=true", "model.activation_func=quick_gelu"),
    "disable_bias_linear": ("model.add_bias_linear=false",),
    "norm_epsilon": ("model.layernorm_epsilon={}",),
    "untie_embeddings_and_output_weights": ("model.share_embeddings_and_output_weights=false",),
    "pipeline_model_parallel_layout": ("model.pipeline_model_parallel_layout='{}'",),
    "num_virtual_stages_per_pipeline_rank": ("model.virtual_pipeline_model_parallel_size={}",),
    "use_distributed_optimizer": ("ddp.use_distributed_optimizer=true", "optimizer.use_distributed_optimizer=true"),
    "bf16": ("mixed_precision=bf16_mixed",),
    "fp16": ("mixed_precision=fp16_mixed",),
    "no_gradient_accumulation_fusion": ("model.gradient_accumulation_fusion=false",),
    "hierarchical_context_parallel_sizes": ("model.hierarchical_context_parallel_sizes=[{}]",),
    "recompute_modules": ("model.recompute_modules=[{}]",),
    **{name: (f"optimizer.{name}={{}}",) for name in ("optimizer", "muon_tp_mode", "muon_num_ns_steps")},
    "num_experts": ("model.num_moe_experts={}",),
    "window_size": ("model.window_size=[{}]",),
    **{name: (f"model.{name}=[{{}}]",) for name in _PATTERNS},
}
"""What Megatron-Bridge has instead of arguments without a section, of which it does not have the others."""


def launch(run: Run) -> Command:
    """`pretrain_gpt.py` on mock data; UsageError for another rank order, fp64, and a step it has no arguments for.

    Flags by their sources: megatron/training/arguments.py and the config dataclasses it is made from.
    """
    own = {option: key.name for option, key in step_keys("megatron").items()}
    run.check_step(settable=(*_SETTABLE, *own), precisions=(*_PRECISIONS, *FORMATS), parts=parts())
    _check_optimizer(run)
    values, program = _values(run), "pretrain_mamba.py" if is_hybrid(run) else "pretrain_gpt.py"
    named = {path.rpartition(".")[2] for names in _WRITTEN.values() for path in names.split()}
    others = [name for option, name in own.items() if name not in named and run.is_changed(option)]
    titles = {**_WRITTEN, "step": " ".join(others)}
    sections = {title: tuple(flags(names, values, run.framework.name)) for title, names in titles.items()}
    older = not run.machine.accelerator.since("blackwell")
    one_connection = older and max(run.size("x"), run.size("context")) > 1
    command = Command(
        release=RELEASE,
        program=(program,),
        sections=sections_of(sections),
        environment=(
            *([_ONE_CONNECTION] if one_connection and not run.step.expert_overlap else []),
            *([_MANY_CONNECTIONS] if older and run.step.expert_overlap else []),
            # By its older name.
            EXPANDABLE_SEGMENTS.model_copy(update={"name": "PYTORCH_CUDA_ALLOC_CONF"}),
            *([_ORDERED] if run.step.deterministic else []),
            *(_CUDNN_NORMS if run.step.cudnn_norms else ()),
            *([_UNREGISTERED] if run.step.cuda_graphs else []),
            *([_PRIORITIES] if run.step.cuda_graphs and not older and _shards(run) else []),
        ),
        checks=(_checkout(program, f"NVIDIA/Megatron-LM at core_v{_RELEASE}", "megatron/core"), *_modules(run)),
        asserted=("CUDA_DEVICE_MAX_CONNECTIONS",),
        needs=(
            f"Start it in a checkout of NVIDIA/Megatron-LM at core_v0.19.2, which has {program}.",
            *_needs(run, "--rotary-base", "--norm-epsilon"),
            "For real training replace --mock-data and NullTokenizer, and add --save.",
        ),
        notes=tuple(_notes(run)),
    )
    # Its precision presets set the type of gradients, and its recipe the distributed optimizer, over what is asked;
    # CUDA graphs have other names there (0.6.0, docs/training/cuda-graphs.md), and FP8 moments none that its optimizer
    # takes (0.6.0, utils/activation_map.py; TransformerEngine@d0067d0d, pytorch/optimizers/fused_adam.py).
    as_preset = run.step.distributed_optimizer and run.step.gradient_bytes != 2 and run.workload.precision == "bf16"
    as_preset = as_preset and not run.step.cuda_graphs and 1 not in (run.step.exp_avg_bytes, run.step.exp_avg_sq_bytes)
    # Its plain recipe builds the layers of `pretrain_gpt.py` without latent attention.
    plain = all(layer.mixer is None and layer.latent is None for layer in run.model.types)
    as_preset = as_preset and not others and plain
    if run.workload.tuning is not None or run.workload.lengths is not None:
        if not as_preset:
            instead = "leave out --precision and --set, or give the layout to a recipe of your own"
            raise run.cannot("this step as a recipe of Megatron-Bridge that fine-tunes", instead)
        tuned = recipe(_bridge(command, run), run)
        return replace(tuned, forms={"bridge": tuned, **swift(command, run)})
    return replace(command, forms={"bridge": _bridge(command, run)} if as_preset else {})


def _bridge(command: Command, run: Run) -> Command:
    """The same for Megatron-Bridge, whose plain recipe has the defaults of `pretrain_gpt.py`.

    Sources: megatron-bridge 0.6.2 (PyPI), recipes/gpt; its guide "Megatron-LM to Megatron Bridge".
    """
    recipe = Argument("--recipe", "vanilla_gpt_pretrain_config"), Argument("--dataset", "mock")
    sectioned = (name for names in _WRITTEN.values() for name in names.split() if "." in name)
    forms = {name.rpartition(".")[2]: (f"{name}={{}}",) for name in sectioned} | dict(_BRIDGE)
    keys: dict[str, list[Argument]] = {}
    for section in command.sections:
        for one in section.arguments:
            value = ",".join(one.value) if isinstance(one.value, tuple) else "true" if one.value is None else one.value
            name = one.name.removeprefix("--").replace("-", "_")
            made = forms.get(name, ())
            if name in _PATTERNS:
                value = ",".join(
                    mark for mark, times in re.findall(r"\[(\d)\]\*(\d+)", str(value)) for _ in range(int(times))
                )
            keys.setdefault(section.title, []).extend(Argument(form.format(value), why=one.why) for form in made)
    return replace(
        command,
        release="Megatron-Bridge 0.6.2",
        program=("scripts/training/run_recipe.py",),
        checks=(
            _checkout("scripts/training/run_recipe.py", "NVIDIA-NeMo/Megatron-Bridge at v0.6.2", "src/megatron/bridge"),
            *_modules(run),
        ),
        sections=sections_of({"recipe": recipe, **keys}),
        needs=(
            "Start it in a checkout of NVIDIA-NeMo/Megatron-Bridge at v0.6.2.",
            *_needs(run, "model.rotary_base", "model.layernorm_epsilon"),
            "For real training replace --dataset and tokenizer.tokenizer_type, and set checkpoint.save.",
        ),
    )


def _checkout(program: str, checkout: str, module: str) -> Check:
    """The checkout of a release, which its end states; of a module that is installed, what it says of itself.

    checkout: repository and tag. module: as the path of `package_info.py`, in `src` of Megatron-Bridge.
    """
    own = rf"sed -nE 's/^(MAJOR|MINOR|PATCH) *= *([0-9]+).*/\2/p' {module}/package_info.py | paste -sd."
    name = module.removeprefix("src/").replace("/", ".")
    installed = f"inside python3 -c 'import {name} as it; print(it.__version__)'"
    return of_checkout(program, checkout, release=checkout.rpartition("v")[2], prints=(own, installed))


def _modules(run: Run) -> Iterator[Check]:
    """What the dispatcher of experts imports."""
    if run.model.has_experts and (backend := flex_backend(run)):
        yield of_package("deep_ep", _DEEP_EP[backend])


_DEEP_EP = {
    "deepep": "DeepEP (deepseek-ai/DeepEP)",
    "hybridep": "HybridEP (deepseek-ai/DeepEP, branch hybrid-ep)",
}
"""What has the module deep_ep, by the backend of the flex dispatcher (core/transformer/moe/fused_a2a.py)."""


def _values(run: Run) -> dict[str, Value]:
    """Values of arguments that are none of the run's fields, and of fields that it has arguments for in part."""
    model, step, tensor, shards = run.model, run.step, run.size("x"), run.size("z")
    grouped, reduces = model.kv_heads != model.heads, "data_parallel" in step.overlaps and run.overlaps("data_parallel")
    context, precision = run.size("context"), run.workload.precision
    return {
        **run.fields,
        "group_query_attention": grouped,
        "num_query_groups": model.kv_heads if grouped else None,
        "position_embedding_type": "learned_absolute" if model.learned_positions else "rope",
        "normalization": "RMSNorm" if model.gated else "LayerNorm",
        "quick_geglu": False,
        "rotary_base": model.rotary_base and round(model.rotary_base),
        "norm_epsilon": model.norm_epsilon,
        "add_qkv_bias": model.qkv_biases,
        "tensor_model_parallel_size": Because(tensor, "TP"),
        "z": Because(tensor * shards, f"TP * GTP = {tensor} * {shards}") if shards > 1 else None,
        "context_parallel_size": Because(context, "CP") if context > 1 else None,
        **_stages(run),
        **_order(run),
        "use_distributed_optimizer": step.distributed_optimizer,
        "overlap_grad_reduce": reduces,
        "overlap_param_gather": reduces and step.distributed_optimizer and step.parameter_overlap,
        "tp_comm_overlap": step.pipelined_tensor and tensor > 1,
        "recompute_modules": _recompute_modules(run),
        **layer_values(run),
        **written(run),
        run.workload.base_precision: precision != "fp32",
        **_format(run),
        "mock_data": True,
        "tokenizer_type": "NullTokenizer",
        **TRIAL,
        "log_throughput": True,
    }


def _recompute_modules(run: Run) -> tuple[str, ...] | None:
    """What is repeated of a block, None for nothing and all of it; UsageError for layers that are no modules."""
    if run.recompute in ("none", "full"):
        return None
    repeated = {"core_attn" if name == "attention.scores" else name for name in run.step.repeated(run.recompute)}
    if others := repeated - {*run.framework.recompute_modules}:
        raise run.cannot(f"recompute of {', '.join(sorted(others))}", "leave out --set step.selective")
    return tuple(name for name in run.framework.recompute_modules if name in repeated)


def _stages(run: Run) -> dict[str, Value]:
    """Stages, and their chunks; layers of each part where they are not the same.

    Embedding and loss can take one block's place on the first and last part, where all parts are as long then. Source:
    core/transformer/transformer_block.py, get_num_layers_to_build.
    """
    counted = dict.fromkeys(f"account_for_{what}_in_pipeline_split" for what in ("embedding", "loss"))
    if (stages := run.size("pipeline")) == 1:
        return {"pipeline": None, "chunks": None, **counted}
    each = max(run.parts)
    less = {"embedding": each - run.parts[0], "loss": each - run.parts[-1]}
    apart = run.mtp_part not in (None, len(run.parts) - 1)
    if apart or {*run.parts[1:-1], each} != {each} or max(less.values()) > 1:
        layout = layout_text(run.parts, mtp=run.model.mtp_layers, mtp_part=run.mtp_part)
        split: dict[str, Value] = {"pipeline_model_parallel_layout": Because(layout, "blocks of each part")}
    else:
        why = Because(True, "in the place of one block")
        split = {f"account_for_{what}_in_pipeline_split": why for what, blocks in less.items() if blocks}
        split["chunks"] = Because(run.chunks, "VPP") if run.chunks > 1 else None
    return {"chunks": None, "pipeline": Because(stages, "PP"), **counted, **split}


def _order(run: Run) -> dict[str, Value]:
    """The switch of this rank order; UsageError for one that Megatron-Core does not have.

    With stages inside data it checks the ranks of experts also where there are none (core/parallel_state.py): their
    weights must be sharded as the others are, and context has no such argument.
    """
    wide = [axis for axis in run.grid.order if run.size(axis) > 1]
    orders = [[axis for axis in order if axis in wide] for order in (_ORDER, _STAGES_INSIDE)]
    if wide == orders[0]:
        return {}
    if wide != orders[1]:
        has = " or ".join(dict.fromkeys(map(run.named, orders)))
        raise run.cannot(f"the rank order {run.named(wide)}", f"it has {has}")
    if "context" in wide:
        raise run.cannot("CP with pipeline stages inside DP", f"ask for --order {','.join(_ORDER)}")
    if run.model.has_experts:
        raise run.cannot("experts with pipeline stages inside DP", f"ask for --order {','.join(_ORDER)}")
    shards = Because(run.size("x") * run.size("z"), "as the others, although there are no experts")
    switch: dict[str, Value] = {"use_tp_pp_dp_mapping": True}
    return switch | {"expert_z": shards if "z" in wide else None}


def _format(run: Run) -> dict[str, Value]:
    """The format below 16 bits and its options; UsageError for those that exclude each other.

    Source: checks of megatron/training/arguments.py and core/transformer/transformer_config.py.
    """
    step, name = run.step, run.workload.precision
    if name not in FORMATS:
        return {}
    repeated = {"moe_act", "layernorm"} & {*step.repeated(run.recompute)}
    if name == "fp8-delayed" and repeated and run.recompute != "full":
        raise run.cannot("recompute of norms or experts' activation in fp8-delayed", "ask for --precision fp8-current")
    if _shards(run) and name in ("mxfp8", "nvfp4") and not step.primary_weights:
        raise run.cannot(f"GTP in {name} with weights in BF16", "ask for --set step.primary_weights=true")
    if name == "mxfp8" and step.primary_weights and not step.distributed_optimizer:
        raise run.cannot("primary weights in mxfp8 without the distributed optimizer", "leave out --set step.")
    return {
        **FORMATS[name],
        "fp8_param_gather" if name == "nvfp4" else "fp4_param_gather": None,
        "reuse_grad_buf_for_mxfp8_param_ag": step.primary_weights and name == "mxfp8",
    }


def _check_optimizer(run: Run) -> None:
    """UsageError for what Muon does in no release: 0.19.2 gathers the shards of GTP in every mode."""
    mode = run.step.muon_tp_mode
    if run.step.optimizer != "muon":
        return
    if mode in ("layer_sharded", "in_turn"):
        raise run.cannot(f"step.muon_tp_mode = {mode}", "no release has it (NVIDIA/Megatron-LM pull request 6683)")
    if _shards(run) and mode != "duplicated":
        instead = "0.19.2 gathers its shards in every mode: ask for --set step.muon_tp_mode=duplicated"
        raise run.cannot(f"GTP with step.muon_tp_mode = {mode}", instead)


def _notes(run: Run) -> Iterator[str]:
    if {"attention.scores", "core_attn"} & {*run.step.repeated(run.recompute)} and run.step.fused_attention:
        yield LITTLE_TO_REPEAT
    if run.model.has_experts and run.step.imbalance == 1.0:
        yield "Tokens are spread evenly, as priced; without --moe-router-force-load-balancing the router decides."


def _shards(run: Run) -> bool:
    """Whether weights are sharded by GTP, of experts or of the rest."""
    return max(run.size("z"), run.size("expert_z")) > 1


def _needs(run: Run, base: str, epsilon: str) -> Iterator[str]:
    """What else has to be there; base, epsilon: arguments of what a model may leave unstated."""
    if _shards(run):
        yield "GTP needs Transformer Engine 2.19 or later."
    if run.step.optimizer in ("muon", "lion"):
        yield "Its optimizer needs the package emerging-optimizers 0.2 or later."
    if run.model.has_experts and (backend := flex_backend(run)):
        port = DISPATCHERS[run.step.dispatcher].port
        yield f"Its dispatcher of experts needs {port or _DEEP_EP[backend]}, as the Python module deep_ep."
    lacks = {epsilon: run.model.norm_epsilon is None}
    lacks |= {base: run.model.rotary_base is None and not run.model.learned_positions}
    if unstated := [name for name, lacking in lacks.items() if lacking]:
        yield f"{run.model.name} does not state {' and '.join(unstated)}, on which no speed depends: add what it has."


NAMES = {
    **{
        "x": "TP",
        "z": "GTP",
        "pipeline": "PP",
        "chunks": "VPP",
        "context": "CP",
        "expert": "EP",
        "expert_tensor": "ETP",
        "expert_z": "EGTP",
    },
    **{"data": "DP", "expert_data": "EDP"},
}
"""What Megatron-LM and what is built on it call the axes; GTP is our z, so its flag of weight shards is TP times it,
and that of experts is ETP times EGTP."""

_SAVERS = (
    Saver("precision-aware optimizer", "use_precision_aware_optimizer", "fp32"),
    Saver("BF16 gradients", "grad_reduce_in_bf16", True),
    Saver("BF16 moments", "use_precision_aware_optimizer", "bf16"),
)
"""The first keeps master weights as bits that BF16 weights lack, and loses none. DeepSeek-V3 was trained with moments
in BF16 (arXiv 2412.19437, section 3.3.3); of moments in FP8, which the optimizer takes too, no such training is known.
"""

_OF_LORA = FlopCount(
    log="Megatron-Bridge",
    label="throughput per GPU",
    counts="4 FLOPs a frozen weight and token, adapters not, and all of the attention of each sample in a pack",
    source="NVIDIA-NeMo/Megatron-Bridge@067f987d:src/megatron/bridge/training/utils/flop_utils.py, transformer_flops: "
    "LoRA of Meta-Llama-3-70B on packs of SQuAD alone",
    frozen=True,
    samples=True,
)

MEGATRON_CORE = Framework(
    name="megatron-core",
    title="Megatron-Core",
    axes=_ORDER,
    source="NVIDIA/Megatron-LM@d98e8a64, megatron/core",
    measured_on="steps of NVIDIA's DGX Cloud recipes and of NVIDIA/Megatron-LM on 16 to 6,144 H100",
    step=_STEP,
    schedule=PipelineSchedule(scattered=False),
    software="core",
    hopper_attention=True,
    exchanges=("ring", "all_gather", "all_to_all", "hierarchical"),
    dispatchers=("alltoall", "deepep", "hybridep", "allgather", "deepep-uccl", "deepep-nvshmem"),
    overlaps_experts=True,
    swaps_heads=True,
    # Main sends one stream between stages (core/transformer/transformer_config.py, enable_mhc_connections). Its branch
    # dev, which has DeepSeek-V4, sends all (NVIDIA-NeMo/Megatron-Bridge@067f987d, examples/models/deepseek_v4).
    streams_in_stage=("compressed attention",),
    keeps_layers=False,
    expert_axes=("expert", "expert_tensor", "expert_z"),
    expert_software="core-experts",
    precision_aware=True,
    savers=(*OWN_SAVERS, *_SAVERS),
    offload=on_host("moments", "master"),
    packings=PACKINGS,
    packs_alone=True,
    formats=("fp8-delayed", "fp8-current", "fp8-blockwise", "mxfp8", "nvfp4", "mxfp4"),
    format_options=FORMAT_OPTIONS,
    cuda_graphs=dict.fromkeys(CUDA_GRAPHS, ()),
    optimizers=dict.fromkeys(("adamw", "sgd", "lion", "muon"), ()),
    recompute_modules=(
        *("core_attn", "layernorm", "mlp", "moe_act", "shared_experts", "moe", "mla_up_proj", "gdn_norm_out", "mhc"),
    ),
    recompute_sets=(*RECOMPUTES[:2], *_SETS, *RECOMPUTES[2:]),
    recompute_some="full",
    names=NAMES,
    tuner="megatron-bridge",
    explained={"z": "GTP: weights in shards, gathered before use as in FSDP."},
    logged=FlopCount(
        log="Megatron-Core",
        label="throughput per GPU",
        counts="half of attention, the rest being masked, where MFU counts all, and the padded vocabulary",
        source="NVIDIA/Megatron-LM@d98e8a64:megatron/training/training.py, num_floating_point_operations; windows: "
        "NVIDIA-NeMo/Megatron-Bridge@067f987d:src/megatron/bridge/training/utils/flop_utils.py",
        scores=0.5,
        windows=True,
        padded=True,
        tuned={("llama3-70b", "squad"): _OF_LORA},
    ),
    launch=launch,
)

NEMO = replace(
    # Bridge also asks all ranks for success and the largest norm (training/train.py, check_optimizer_step_success).
    MEGATRON_CORE.with_step(gradient_bytes=2, step_reductions=4),
    name="nemo",
    title="NeMo",
    axes=("x", "context", "data", "pipeline"),
    expert_axes=("expert", "expert_tensor"),
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
    NEMO.with_step(fused_attention=False, loss="copied"),
    name="nemo-2022",
    optimizers=ADAMW_ALONE,
    tuner="",
    title="NeMo (2022)",
    precision_aware=False,
    packings=(),
    savers=OWN_SAVERS,
    offload=None,
    formats=(),
    format_options=(),
    cuda_graphs={},
    source="NeMo before it had FlashAttention and fused layers",
    schedule=PipelineSchedule(equal_chunks=AS_MANY_A_CHUNK),
    software="megatron-2021",
    logged=None,
)

FRAMEWORKS = (MEGATRON_CORE, NEMO, NEMO_2022)
