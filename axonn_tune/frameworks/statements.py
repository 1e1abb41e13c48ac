"""What arguments state together of a run's step, both ways: `get` writes arguments, `set` reads them.

A row of a table of arguments whose field is an option of the step (`step.loss_chunks`) needs no more than that row:
`Key.read` and `Key.write` are each other's inverse, and `changes` and `Run.fields` apply them. What several arguments
state together, or what an argument states only beside others, is an entry of `FIELDS` here, whose name is the first
part of their fields (`gradients.reduced`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from axonn_tune.frameworks.description import Because, Run, Value
from axonn_tune.frameworks.keys import (
    NOTHING,
    OFF,
    Arguments,
    Stated,
    is_off,
    is_on,
    meaning_of,
    names_of,
    own_tables,
    step_keys,
)
from axonn_tune.frameworks.step import OFFLOAD_MODULES
from axonn_tune.vocabulary import CUDA_GRAPHS, MOMENT_BYTES, Overlap

Changes = Iterable[tuple[str, object]]
"""Options of a step with their values."""


class Field(NamedTuple):
    """Arguments that are written and read together.

    get: their values in a run; UsageError for what they cannot express. set: options of a step that they state.
    """

    get: Callable[[Run], Mapping[str, Value]]
    set: Callable[[Run, Arguments], Changes]


def written(run: Run) -> dict[str, Value]:
    """Values of all arguments of `FIELDS`."""
    return {name: value for field in FIELDS.values() for name, value in field.get(run).items()}


def changes(run: Run, stated: Arguments) -> dict[str, object]:
    """Options of the step that arguments state and that the run does not have yet.

    Options of formats and of experts count where the run has these.
    """
    found: dict[str, object] = {}
    for option in filter(run.has_option, step_keys()):
        if (value := meaning_of(f"step.{option}", stated)) is not None:
            found[option] = value.value
    for field in FIELDS.values():
        found.update(field.set(run, stated))
    if "shared experts" not in run.model.parts:
        # There is nothing to overlap (NVIDIA/Megatron-LM@d98e8a64, core/transformer/transformer_config.py).
        found.pop("shared_expert_overlap", None)
    return {name: value for name, value in found.items() if getattr(run.step, name) != value}


# Gradients and optimizer states.


def _gradients(run: Run) -> Mapping[str, Value]:
    """Number formats of gradients; UsageError where only some are reduced in 2 bytes."""
    precision = run.workload.base_precision
    reduced = {run.step.gradient_bytes, *([run.step.shard_gradient_bytes] if run.size("z") > 1 else [])}
    if 2 in reduced and (len(reduced) > 1 or precision == "fp32"):
        what = "gradients of which some are reduced in 2 bytes" if precision != "fp32" else "BF16 gradients in fp32"
        raise run.cannot(what, "set step.gradient_bytes=2 and step.shard_gradient_bytes=2, or neither")
    why = "gradients are accumulated and reduced in FP32"
    return {
        _ACCUMULATED: Because(True, why) if precision == "fp16" and 2 not in reduced else None,
        "grad_reduce_in_bf16": 2 in reduced and precision == "bf16",
    }


def _set_gradients(run: Run, stated: Arguments) -> Changes:
    """Megatron-LM accumulates gradients of FP16 in FP16 unless it is told otherwise; those of BF16 in FP32."""
    name, precision = run.framework.name, run.workload.precision
    if name == "deepspeed" and precision == "bf16" and run.size("pipeline") > 1:
        # Its BF16 optimizer, which pipelines have, accumulates gradients in FP32.
        yield "gradient_bytes", 4
    in_bf16 = (
        is_on(stated.get("grad_reduce_in_bf16", NOTHING)) or stated.get("main_grads_dtype", NOTHING).value == "bf16"
    )
    halves = "megatron" in own_tables(name) and name != "megatron-deepspeed"
    halves = halves and precision == "fp16" and not is_on(stated.get(_ACCUMULATED, NOTHING))
    if in_bf16 or halves or stated.get("grad_reduce_in_fp32", NOTHING).value.lower() == "false":
        yield from (("gradient_bytes", 2), ("shard_gradient_bytes", 2))


_ACCUMULATED = "accumulate_allreduce_grads_in_fp32"


def _optimizer(run: Run) -> Mapping[str, Value]:
    """Types of optimizer states; UsageError where the precision-aware optimizer is not to be had.

    BF16's master weights are remainders beside their weights, which no argument changes (core/optimizer/
    optimizer_config.py, store_param_remainders; checks of __post_init__ and of core/optimizer/__init__.py).
    """
    step, precision = run.step, run.workload.base_precision
    if not step.precision_aware:
        return {}
    if not step.distributed_optimizer or precision == "fp32" or (precision == "bf16" and step.master_bytes != 2):
        instead = "ask for --use-precision-aware-optimizer in bf16 or fp16, with ZeRO-1"
        raise run.cannot("these types of optimizer states", instead)
    names = {size: name for name, size in MOMENT_BYTES.items()}
    return {
        "use_precision_aware_optimizer": True,
        "main_params_dtype": "fp16" if precision == "fp16" and step.master_bytes == 2 else None,
        "exp_avg_dtype": names[step.exp_avg_bytes or 4],
        "exp_avg_sq_dtype": names[step.exp_avg_sq_bytes or 4],
    }


def _set_optimizer(run: Run, stated: Arguments) -> Changes:
    """Bytes of optimizer states; BF16 weights are the upper half of FP32."""
    if not is_on(stated.get("use_precision_aware_optimizer", NOTHING)):
        return
    for option in ("master_bytes", "exp_avg_bytes", "exp_avg_sq_bytes"):
        name = option.replace("_bytes", "_dtype").replace("master", "main_params")
        size = _BYTES.get(stated.get(name, NOTHING).value.removeprefix("torch."), 4)
        remainders = run.workload.precision == "bf16" and not is_off(stated.get("store_param_remainders", ON))
        yield option, 2 if option == "master_bytes" and remainders else size


_BYTES = {**MOMENT_BYTES, "float16": 2, "bfloat16": 2, "uint8": 1}
ON = Stated("True", 0)


def _offload(run: Run) -> Mapping[str, Value]:
    """What is kept on the host; UsageError for what Megatron-LM's command line does not take.

    Its optimizer goes there with a precision-aware one alone (NVIDIA/Megatron-LM@d98e8a64, training/arguments.py).
    """
    step, states = run.step, ("moments", "master")
    if not step.offloads:
        return {}
    modules = tuple(name for name in step.offloaded if name in OFFLOAD_MODULES)
    own = tuple(name for name in step.offloaded if name not in modules)
    if own and not (step.precision_aware and {*own} == {*states}):
        instead = "ask for --use-precision-aware-optimizer with step.offloaded=moments,master"
        raise run.cannot(f"{', '.join(own)} on the host", instead)
    layers = round(step.offloaded_layers * run.model.layers)
    if layers and (modules or run.recompute != "none" or run.size("pipeline") > 1):
        raise run.cannot("layers on the host beside modules, recompute or stages", "leave out step.offloaded_layers")
    return {
        "optimizer_cpu_offload": bool(own),
        "optimizer_offload_fraction": step.offloaded_states if own else None,
        "overlap_cpu_optimizer_d2h_h2d": bool(own) and step.offload_overlap,
        "cpu_offloading": layers > 0,
        "cpu_offloading_num_layers": layers or None,
        "fine_grained_activation_offloading": bool(modules),
        "offload_modules": modules or None,
        "activation_offload_fraction": step.offloaded_inputs if modules and step.offloaded_inputs < 1.0 else None,
    }


def _set_offload(run: Run, stated: Arguments) -> Changes:
    """What is kept on the host.

    Megatron's optimizer copies gradients each step, and leaves the distributed optimizer's FP32 weights on the GPU but
    with a precision-aware one (NVIDIA/Megatron-LM@d98e8a64, core/optimizer/distrib_optimizer.py). ZeRO-2 and 3 gather
    gradients on the host, ZeRO-1 does not before the step's end (deepspeedai/DeepSpeed@edaa7221,
    runtime/zero/stage_1_and_2.py, copy_grads_in_partition, and stage3.py, grad_partitions_flat_buffer); FSDP does.
    """

    def on(what: str) -> bool:
        return any(name in stated and not is_off(stated[name]) for name in names_of(f"offload.{what}"))

    every, states, hybrid = on("all"), on("optimizer"), "optimizer_cpu_offload" in stated
    found = {
        "moments": every or states,
        "master": every or (states and (not hybrid or is_on(stated.get("use_precision_aware_optimizer", NOTHING)))),
        "gradients": every or (states and not hybrid and (run.step.shard_gradients or run.size("z") > 1)),
        "weights": every or on("weights"),
    }
    modules = stated.get("offload_modules", NOTHING).value if on("inputs") else ""
    modules = modules.replace("fused_group_mlp", "expert_fc1 moe_act")
    # ZeRO's moves what full recompute saves.
    modules += " attn_norm" * (on("checkpoints") and run.recompute == "full")
    found |= {name: True for name in OFFLOAD_MODULES if name in re.findall(r"\w+", modules)}
    yield "offloaded", tuple(name for name, kept in found.items() if kept)
    if states:
        yield "host_optimizer", "torch" if hybrid else "deepspeed"
    yield "offload_overlap", states and on("overlap")
    # The command line's default is 1, that of the classes which NeMo's recipes fill is 0.
    own = 0.0 if hybrid and run.framework.name.startswith("nemo") else 1.0
    for option, share, default in (
        ("offloaded_states", "share", own),
        ("offloaded_inputs", "inputs_share", 1.0),
        ("offloaded_layers", "layers", 0.0),
    ):
        whole = run.model.layers if option == "offloaded_layers" else 1
        # In its range, which a table has, or left to the framework.
        names = [name for name in names_of(f"offload.{share}") if name in stated]
        words = [stated[name].value.replace(",", "").replace("_", "") for name in names]
        number = next((float(one) for one in words if re.search(r"\d", one)), default)
        yield option, min(number / whole, 1.0)


# Kernels, CUDA graphs, the loss.


def _graphs(run: Run) -> Mapping[str, Value]:
    """What CUDA graphs capture; UsageError for whole blocks that are repeated inside graphs of layers.

    Source: core/transformer/transformer_config.py, cuda_graph_impl, cuda_graph_modules, and checks of __post_init__.
    """
    scopes = run.step.cuda_graphs
    if not scopes or "full_iteration" in scopes:
        checks = Because(True, "required: the check waits for the GPU") if scopes else False
        return {"cuda_graph_impl": "full_iteration" if scopes else None, "no_check_for_nan_in_loss_and_grad": checks}
    if run.recompute == "full":
        raise run.cannot("full recompute inside CUDA graphs of layers", "ask for --cuda-graphs full_iteration")
    return {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": None if "full" in scopes else scopes}


def _set_graphs(run: Run, stated: Arguments) -> Changes:
    """Scopes: of Megatron-LM whole layers unless it names modules, of torchtitan all."""
    impl, off = stated.get("cuda_graph_impl", NOTHING).value.lower(), stated.get("disable_cuda_graphs")
    words = re.findall(r"\w+", stated.get("cuda_graph_modules", NOTHING).value)
    if off or impl == "full_iteration":
        yield "cuda_graphs", () if off and is_on(off) else ("full_iteration",)
    elif impl in OFF and not is_on(stated.get("enable_cuda_graph", NOTHING)):
        yield "cuda_graphs", ()
    else:
        yield "cuda_graphs", tuple(scope for scope in CUDA_GRAPHS if scope in words) if words else ("full",)


def _dropout(run: Run) -> Mapping[str, Value]:
    return dict.fromkeys(_DROPOUTS, None if run.step.dropout else 0.0)


def _set_kernels(run: Run, stated: Arguments) -> Changes:
    """Dropout; TF32, which Megatron-LM's own layers do not have, and models of transformers on demand; the order of
    sums."""
    if "hidden_dropout" in stated:
        texts = [stated.get(name, NOTHING).value for name in _DROPOUTS]
        yield "dropout", any(not re.fullmatch(r"0*(\.0*)?", text) for text in texts)
    own_layers = stated.get("transformer_impl", NOTHING).value == "local"
    yield "tf32", (run.step.tf32 and not own_layers) or is_on(stated.get("tf32", NOTHING))
    if "overlap_param_gather" in stated and run.step.distributed_optimizer:
        yield "parameter_overlap", is_on(stated["overlap_param_gather"])
    if is_on(stated.get("deterministic_mode", NOTHING)) or stated.get(ANY_ORDER.lower(), NOTHING).value == "0":
        yield "deterministic", True
    if run.workload.format and stated.get(CUDNN_NORMS.lower(), NOTHING).value == "1":
        yield "cudnn_norms", True


def _set_loss(run: Run, stated: Arguments) -> Changes:
    """The loss, and the kernels of what runs operator by operator with it."""
    compiled = stated.get("compile.components", Stated("loss", 0)).value
    # Models of transformers run operator by operator, their loss among them, unless something fuses them.
    chunked = ("use_liger_kernel", "enable_liger_kernel", *names_of("trainer.chunked_loss"))
    # axolotl's plugin has it on by itself (axolotl-ai-cloud/axolotl@067b021c, integrations/cut_cross_entropy/args.py).
    liger = any(is_on(stated.get(name, NOTHING)) for name in chunked)
    liger = liger or "cut_cross_entropy" in stated.get("plugins", NOTHING).value.lower()
    of_trainer = run.framework.tuner == "peft" and {*names_of("trainer.model")} & stated.keys()
    transformers = ("model_name_or_path" in stated or of_trainer) and not liger
    if of_trainer and not liger and not _fused(stated):
        yield "kernels", "eager"
    if liger:
        # linkedin/Liger-Kernel, ops/fused_linear_cross_entropy.py: logits of a chunk take what the hidden state does.
        yield "loss_chunks", -(-run.model.vocab // run.model.hidden)
    if transformers or (run.framework.name == "torchtitan" and "loss" not in compiled):
        yield "loss", "eager"
    if re.search(r"(chunkedoutput|linearcrossentropy)loss$", stated.get(TORCHTUNE_LOSS, NOTHING).value.lower()):
        # FP32 logits are of one chunk in eight, but autograd keeps log-probabilities of each chunk, or its BF16 logits
        # where the loss is compiled (meta-pytorch/torchtune@bd2a0fc7, modules/loss, compute_cross_entropy).
        yield "loss", "in_place" if is_on(stated.get("torch_compile", NOTHING)) else "softmax"
    if "tuner_type" in stated and is_on(stated.get("cross_entropy_loss_fusion", NOTHING)):
        # ms-swift's releases have Megatron-Core's before its compiled steps were apart: each of those that write in
        # place and sum makes FP32 logits anew (NVIDIA/Megatron-LM@0cb4a9c8, core/fusions/fused_cross_entropy.py).
        yield "loss", "copied"
    if stated.get("cross_entropy_fusion_impl", NOTHING).value.lower() == "te" and (
        is_on(stated.get("cross_entropy_loss_fusion", Stated(str(run.framework.name == "nemo"), 0)))
    ):
        yield "loss", "in_place"


def _fused(stated: Arguments) -> bool:
    """Whether a Trainer's run has fused kernels of a block: those of Liger or unsloth, or of torch's compiler."""
    names = (name for field in ("trainer.liger", "trainer.fused", "trainer.compile") for name in names_of(field))
    values = (stated.get(name, NOTHING) for name in names)
    return any(is_on(one) or "liger" in one.value.lower() for one in values)


ANY_ORDER = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
"""Transformer Engine's variable, 0 of which is deterministic."""
CUDNN_NORMS = "NVTE_NORM_FWD_USE_CUDNN"
"""Transformer Engine's variable, 1 of which has cuDNN's norms."""
VARIABLES = (ANY_ORDER, CUDNN_NORMS)
TORCHTUNE_LOSS = "loss._component_"
"""torchtune's argument of the loss."""
_DROPOUTS = ("hidden_dropout", "attention_dropout")


# Hugging Face's Trainer.


def _set_trainer(run: Run, stated: Arguments) -> Changes:
    """Whether FSDP1 gathers ahead in the backward pass; gradients, and weights in BF16 alone, of a Trainer.

    Accelerate's default is NO_PREFETCH, and BACKWARD_POST issues the gather after the block's computation
    (accelerate 1.15.0, utils/dataclasses.py); FSDP2 always gathers ahead. The Trainer reduces in the last micro-batch
    alone, and keeps whole gradients until then: FP32 of DDP, in the compute type of FSDP (transformers 5.24.0,
    trainer.py, no_sync; torch/distributed/fsdp, set_requires_gradient_sync).
    """
    prefetch = stated.get("fsdp_backward_prefetch", NOTHING).value.lower()
    first = stated.get("fsdp_version", NOTHING).value == "1"
    if first and run.framework.name == "fsdp":
        yield "prefetch_backward", prefetch in ("backward_pre", "1")
    if (
        run.framework.name == "fsdp"
        and "model_name_or_path" in stated
        and not any(is_on(stated.get(name, NOTHING)) for name in names_of("trainer.sync"))
    ):
        sharded, replicas = run.size("z") > 1, run.size("z") * run.size("data")
        several = run.workload.global_batch > run.micro_batch * replicas
        yield "reduce_each_micro_batch", False
        yield from [("whole_gradient_bytes", 2 * several)] if sharded else [("reduced_bytes", None)]
    if is_on(stated.get("pure_bf16", NOTHING)):
        yield from (("gradient_bytes", 2), ("master_bytes", 2), ("exp_avg_bytes", 2), ("exp_avg_sq_bytes", 2))


# Context parallelism, experts, number formats.


def _context(run: Run) -> Mapping[str, Value]:
    """The exchange, and ranks of the groups of all-to-alls and of the rings across them, whose product is CP."""
    count, context = run.step.context_inside, run.size("context")
    if context == 1:
        return {"cp_comm_type": None}
    if run.step.context_exchange != "hierarchical":
        return {}
    inside = Because((str(count), str(context // count)), "a2a inside, p2p across")
    return {"hierarchical_context_parallel_sizes": inside}


def _set_context(run: Run, stated: Arguments) -> Changes:
    if inner := re.search(r"\d+", stated.get("hierarchical_context_parallel_sizes", NOTHING).value):
        yield "context_inside", int(inner[0])


class Backend(NamedTuple):
    """What makes a dispatcher: its type, and the backend of `flex`; port: a library that takes the backend's place."""

    kind: str
    backend: str | None = None
    port: str = ""


DISPATCHERS = {
    "allgather": Backend("allgather"),
    "alltoall": Backend("alltoall"),
    "deepep": Backend("flex", "deepep"),
    "hybridep": Backend("flex", "hybridep"),
    "deepep-uccl": Backend("flex", "deepep", "UCCL's DeepEP"),
    "deepep-nvshmem": Backend("flex", "deepep", "DeepEP over NVSHMEM"),
}
"""By the name of a dispatcher here."""


def flex_backend(run: Run) -> str:
    """The backend of its flex dispatcher, "" without.

    Megatron refuses it for a rank that has all experts, which exchanges nothing by any dispatcher.
    """
    alone = run.size("expert") * run.size("expert_tensor") == 1
    return "" if alone else DISPATCHERS[run.step.dispatcher].backend or ""


def _dispatcher(run: Run) -> Mapping[str, Value]:
    """How tokens reach experts, and what runs beside that."""
    if not run.model.has_experts:
        return {}
    found, alone = DISPATCHERS[run.step.dispatcher], run.size("expert") == 1
    if not flex_backend(run) and found.kind == "flex":
        found = DISPATCHERS["alltoall"]
    unmerged = {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False}
    return {
        "moe_token_dispatcher_type": found.kind,
        "moe_flex_dispatcher_backend": found.backend,
        **(unmerged if alone or not run.step.expert_overlap else {}),
    }


def _set_dispatcher(run: Run, stated: Arguments) -> Changes:
    """The backend alone says it outside of Megatron's own arguments."""
    kind, backend = (stated.get(f"moe_{name}", NOTHING).value for name in ("token_dispatcher_type", _BACKEND))
    if not run.model.has_experts:
        return
    if is_on(stated.get("moe_enable_deepep", NOTHING)) or kind == "flex":
        yield "dispatcher", backend if backend in DISPATCHERS else "deepep"
    elif backend and run.framework.name != "megatron-core":
        yield "dispatcher", backend if backend in DISPATCHERS else "alltoall"
    elif kind:
        yield "dispatcher", kind if kind in DISPATCHERS else "alltoall"
    elif "num_experts" in stated:
        yield "dispatcher", "allgather"


_BACKEND = "flex_dispatcher_backend"


def _ends(run: Run) -> Mapping[str, Value]:
    """Layers at either end that stay in BF16."""
    ends = run.step.first_layers_bf16, run.step.last_layers_bf16
    if not run.workload.format or not any(ends):
        return {}
    return {"first_last_layers_bf16": True, **dict(zip(_ENDS, ends, strict=True))}


def _set_ends(run: Run, stated: Arguments) -> Changes:
    if run.workload.format and is_on(stated.get("first_last_layers_bf16", NOTHING)):
        for option, name in zip(("first_layers_bf16", "last_layers_bf16"), _ENDS, strict=True):
            count = stated.get(name, Stated("1", 0)).value
            yield option, int(count) if re.fullmatch(r"\d{1,4}", count) else 1


_ENDS = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")

FIELDS = {
    "gradients": Field(_gradients, _set_gradients),
    "optimizer": Field(_optimizer, _set_optimizer),
    "offload": Field(_offload, _set_offload),
    "graphs": Field(_graphs, _set_graphs),
    "kernels": Field(_dropout, _set_kernels),
    "loss": Field(lambda run: {}, _set_loss),
    "trainer": Field(lambda run: {}, _set_trainer),
    "context": Field(_context, _set_context),
    "dispatcher": Field(_dispatcher, _set_dispatcher),
    "ends": Field(_ends, _set_ends),
}
"""What has no inverse argument by argument, by the first part of the fields of its rows."""


# What is no option of a step: overlaps that are switched off, and layers that are not resharded.

_OVERLAPS: Mapping[Overlap, tuple[str, ...]] = {
    "data_parallel": ("overlap_grad_reduce", "overlap_comm"),
    "gather_prefetch": ("overlap_axonn_comm", "overlap_axonn_all_gather", "stage3_prefetch_bucket_size"),
    "weight_gradient": ("overlap_axonn_comm", "overlap_axonn_reduce_scatter", "overlap_comm"),
    "input_gradient": ("overlap_axonn_comm",),
}
"""Overlaps, and the arguments that each requires."""


def switched_off(stated: Arguments) -> Iterator[Overlap]:
    """Overlaps that arguments switch off; "auto", as the Trainer of transformers fills it in, is a size above 0."""
    off = {name for name, one in stated.items() if is_off(one) and one.value.lower() != "auto"}
    return (name for name, flags in _OVERLAPS.items() if off & {*flags})


def kept_layers(run: Run, stated: Arguments) -> int | None:
    """Layers that are not resharded after forward: all of FSDP's, or as many as Megatron-AxoNN caches; None: unstated.

    torchtitan's own policy reshards nothing where there are pipeline stages.
    """
    policy = stated.get("fsdp_reshard_after_forward", NOTHING).value.lower()
    unset = policy in ("", "default") and run.framework.name.startswith("torchtitan") and run.size("pipeline") > 1
    if unset or policy in ("never", "false"):
        return run.model.layers
    cached = stated.get("num_layers_for_caching_weights_in_depth_tensor_parallel_all_gather", NOTHING).value
    return int(cached) if cached.isdecimal() else None
