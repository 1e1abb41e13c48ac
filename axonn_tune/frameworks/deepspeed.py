"""DeepSpeed ZeRO: stage 1 over data, stage 3 as sharded weights, with Megatron-style tensor parallelism.

ZeRO-3 gathers parameter by parameter, ahead by elements in the recorded order, and reduce-scatters gradients in every
micro-batch. Source: deepspeed 0.19.8 (PyPI), runtime/zero. Stage 3 has no replicas: z is all ranks that share data.
Pipeline stages reduce over data after the last instruction of their schedule, in buckets that hold a stage
(runtime/pipe/schedule.py, TrainSchedule; deepspeedai/DeepSpeed@83fd8f87).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from axonn_tune.frameworks.command import (
    EXPANDABLE_SEGMENTS,
    LITTLE_TO_REPEAT,
    NO_MOCK_DATA,
    NO_QKV_BIASES,
    OWN_SCRIPT,
    TRIAL,
    adapter_arguments,
    flags,
    of_checkout,
    of_package,
    own_recompute,
    peft_config,
    sections_of,
    sizes_words,
    tuned_script,
)
from axonn_tune.frameworks.description import (
    Argument,
    Command,
    Framework,
    PipelineSchedule,
    Refusal,
    Run,
    Section,
    Value,
    on_host,
)
from axonn_tune.frameworks.keys import step_keys
from axonn_tune.frameworks.megatron_lm import DEEPSPEED_COUNT, MEGATRON_2021, MODEL, values_of
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.vocabulary import PACKINGS

_STEP = StepOptions(
    reshard="always",
    whole_rows=False,
    gather_after_recompute=True,
    master_shards=False,
    gradient_bytes=2,
    distributed_optimizer=True,
    staged_reduction="whole",
    recompute_whole_block=True,
    selective=("attention.scores",),
    loss_chunks=1,
    loss="copied",
    loss_reductions=(1.0, 1.0, 1.0),
    vocabulary_multiple=128,
    muon_form="gram",
    muon_apart_gate=True,
    muon_cut=True,
    host_optimizer="deepspeed",
    overlaps=("gather_prefetch", "weight_gradient", "data_parallel"),
)

_SETTABLE = (
    *("gather_prefetch", "weight_gradient", "data_parallel", "gradient_bytes", "shard_gradients", "optimizer"),
    *("offloaded", "offloaded_states"),
)
_LARGEST = 10**15
"""Elements that no model has."""


def launch(run: Run) -> Command:
    """One's own script, which torchrun starts as DeepSpeed's launcher would, with DeepSpeed's JSON.

    With tensor parallelism or stages Megatron-DeepSpeed's `pretrain_gpt.py`. UsageError for some layers that are not
    resharded after forward, stages of other sizes than DeepSpeed's, FP32 and another rank order.
    """
    run.check(settable=_SETTABLE, precisions=("bf16", "fp16"))
    if _stage(run) == 2 and run.size("pipeline") > 1:
        named = "step.shard_gradients" if run.step.shard_gradients else "gradients of step.offloaded"
        raise run.cannot("ZeRO-2 with pipeline stages", f"its pipeline module has ZeRO-1: leave out {named}")
    config = json.dumps(_config(run), indent=2) + "\n"
    if run.size("x") * run.size("pipeline") > 1:
        return _megatron(run, config)
    batch = Argument("--seq_length", run.workload.sequence_length)
    return Command(
        release="DeepSpeed 0.19.8",
        program=("train.py",),
        sections=(Section("batch", (batch,)), *adapter_arguments(run), Section("deepspeed", _SWITCHES)),
        environment=(EXPANDABLE_SEGMENTS,),
        files={".json": config, **peft_config(run)},
        checks=(OWN_SCRIPT, _PACKAGE),
        needs=(
            f"train.py is your own: it builds {sizes_words(run.model)}, adds "
            "deepspeed.add_config_arguments to its parser and hands the arguments to deepspeed.initialize.",
            own_recompute(run),
            *tuned_script(run),
        ),
    )


_PACKAGE = of_package("deepspeed", "deepspeed 0.19.8")


def _megatron(run: Run, config: str) -> Command:
    """Megatron-DeepSpeed, whose layers are the ones that were priced. Source: deepspeedai/Megatron-DeepSpeed."""
    if run.recompute_layers is not None:
        raise run.cannot("recompute of some layers with tp or pp", "leave out --recompute-layers")
    values = _values(run)
    sections = {title: flags(names, values, "megatron-deepspeed") for title, names in _WRITTEN.items()}
    sections["deepspeed"] = iter(_SWITCHES)
    return Command(
        release="DeepSpeed 0.19.8 with Megatron-DeepSpeed",
        program=("pretrain_gpt.py",),
        sections=sections_of(sections),
        environment=(EXPANDABLE_SEGMENTS,),
        files={".json": config},
        checks=(of_checkout("pretrain_gpt.py", "deepspeedai/Megatron-DeepSpeed"), _PACKAGE),
        needs=(
            "Start it in a checkout of deepspeedai/Megatron-DeepSpeed, which has pretrain_gpt.py.",
            NO_MOCK_DATA,
        ),
        notes=tuple(_notes(run)),
    )


def _config(run: Run) -> dict[str, object]:
    """The JSON; batch sizes that agree, and numbers of the formats that were priced."""
    kind = run.workload.precision
    gradients = kind if run.step.gradient_bytes == 2 else "fp32"
    return {
        "train_batch_size": run.workload.global_batch,
        "train_micro_batch_size_per_gpu": run.micro_batch,
        "gradient_accumulation_steps": run.accumulation,
        kind: {"enabled": True},
        "communication_data_type": gradients,
        "data_types": {"grad_accum_dtype": gradients},
        "zero_optimization": _zero(run),
        **_optimizer(run),
        "gradient_clipping": 1.0,
        "steps_per_print": 1,
    }


def _optimizer(run: Run) -> dict[str, object]:
    """The section of an optimizer that one's own script does not make; UsageError beside Megatron-DeepSpeed's."""
    if not run.is_changed("optimizer"):
        return {}
    if run.size("x") * run.size("pipeline") > 1:
        raise run.cannot(
            f"--optimizer {run.step.optimizer} with tp or pp", "Megatron-DeepSpeed makes its own: leave it out"
        )
    word = step_keys("deepspeed")["optimizer"].write(run.step.optimizer)
    return {"optimizer": {"type": {"sgd": "SGD"}.get(word, word.capitalize()), "params": {"lr": 3e-4}}}


def _stage(run: Run) -> int:
    """ZeRO's stage; gradients on the host are of those that split them, weights there of stage 3, also of one rank."""
    if run.size("z") > 1 or ("weights" in run.step.offloaded and run.size("data") == 1):
        return 3
    return 2 if run.step.shard_gradients or "gradients" in run.step.offloaded else 1


def _offloaded(run: Run) -> dict[str, object]:
    """What stages keep on the host; UsageError for what none does. Source: runtime/zero/offload_config.py."""
    step, stage = run.step, _stage(run)
    if not step.offloads:
        return {}
    states = ("moments", "master", *(("gradients",) if stage > 1 else ()))
    if {*step.offloaded} - {"weights"} != {*states} or ("weights" in step.offloaded and stage < 3):
        said = ", ".join(step.offloaded) or "layers"
        raise run.cannot(f"{said} on the host with ZeRO-{stage}", f"ask for step.offloaded={','.join(states)}")
    if step.offloaded_states < 1.0 and stage < 3:
        raise run.cannot(f"a share of states on the host with ZeRO-{stage}", "leave out step.offloaded_states")
    found: dict[str, object] = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    if step.offloaded_states < 1.0:
        found["offload_optimizer"] = {"device": "cpu", "pin_memory": True, "ratio": step.offloaded_states}
    return found | ({"offload_param": {"device": "cpu", "pin_memory": True}} if "weights" in step.offloaded else {})


def _zero(run: Run) -> dict[str, object]:
    """Buckets of the default sizes, overlapped; what stage 3 keeps gathered. Source: runtime/zero/config.py."""
    used = run.workload.overlaps
    overlapped = ("weight_gradient" if run.size("z") > 1 else "data_parallel") in used
    found: dict[str, object] = {
        "stage": _stage(run),
        # The pipeline's engine has none.
        "overlap_comm": overlapped and run.size("pipeline") == 1,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500_000_000,
        "allgather_bucket_size": 500_000_000,
        **_offloaded(run),
    }
    if _stage(run) < 3:
        return found
    if run.kept_layers not in (0, run.model.layers):
        what = f"{run.kept_layers} of {run.model.layers} layers that are not resharded after forward"
        raise run.cannot(what, f"ask for --kept-layers 0 or {run.model.layers}")
    return found | {
        "stage3_prefetch_bucket_size": 50_000_000 if "gather_prefetch" in used else 0,
        "stage3_max_live_parameters": _LARGEST if run.kept_layers else 1_000_000_000,
        # 0: every weight is gathered again where it is used again, as was priced.
        "stage3_max_reuse_distance": _LARGEST if run.kept_layers else 0,
    }


_SWITCHES = Argument("--deepspeed"), Argument("--deepspeed_config", "{file:.json}")
_WRITTEN = {
    "model": f"""
        {MODEL} num_key_value_heads use_flash_attn_v2 rotary_position_embeddings_theta layernorm_epsilon
        no_query_key_layer_scaling
    """,
    "batch": "micro_batch_size global_batch_size",
    "parallelism": """
        tensor_model_parallel_size pipeline_model_parallel_size no_pipeline_parallel zero_stage cpu_optimizer
    """,
    "recompute": "checkpoint_activations deepspeed_activation_checkpointing recompute_granularity",
    "precision": "bf16 fp16",
    "deepspeed": "",
    "trial": " ".join(TRIAL),
}
"""Arguments of Megatron-DeepSpeed by section."""


def _values(run: Run) -> dict[str, Value]:
    """Values of arguments; UsageError for other stages than those of DeepSpeed, which splits blocks evenly itself."""
    model, stages, full = run.model, run.size("pipeline"), run.recompute == "full"
    most = -(-model.layers // stages)
    if stages > 1 and max(run.parts) > most:
        raise run.cannot(f"a stage of {max(run.parts)} blocks", f"each has {most} at most: leave the split to it")
    return {
        **values_of(run, norm="rmsnorm"),
        "num_key_value_heads": model.kv_heads if model.kv_heads != model.heads else None,
        "use_flash_attn_v2": run.step.fused_attention,
        "rotary_position_embeddings_theta": model.rotary_base and round(model.rotary_base),
        "layernorm_epsilon": model.norm_epsilon,
        "no_query_key_layer_scaling": True,
        "no_pipeline_parallel": stages == 1,
        "zero_stage": _stage(run),
        "cpu_optimizer": run.step.offloads,
        "checkpoint_activations": full,
        "deepspeed_activation_checkpointing": full,
        "recompute_granularity": "selective" if run.recompute == "selective" else None,
    }


def _notes(run: Run) -> Iterator[str]:
    if run.model.qkv_biases:
        yield NO_QKV_BIASES
    if run.size("pipeline") > 1:
        yield "Stages exclude overlap_comm: gradients are reduced after the last backward pass, not behind it."
    if not run.even:
        yield f"DeepSpeed splits the {run.model.layers} blocks itself: the first stages get one more."
    if run.recompute == "selective" and run.step.fused_attention:
        yield LITTLE_TO_REPEAT
    if run.size("pipeline") == 1:
        yield (
            f'A transformers model of your own can take AutoTP instead: "tensor_parallel": {{"autotp_size": '
            f"{run.size('x')}}} in the JSON. It was not priced."
        )


DEEPSPEED = Framework(
    name="deepspeed",
    title="DeepSpeed ZeRO",
    axes=("x", "z", "data", "pipeline"),
    source="deepspeed 0.19.8, runtime/zero",
    measured_on="arXiv 2104.04473, table 2: ZeRO-3 on 640 to 2,240 A100",
    step=_STEP,
    schedule=PipelineSchedule(interleaved=False, uneven=True, layouts=False),
    attention_since="",
    software="unknown",
    recompute_some="full",
    packings=PACKINGS,
    searches_some=False,
    tuner="peft",
    offload=on_host("moments", "master", "gradients"),
    optimizers={
        **dict.fromkeys(("adamw", "sgd", "lion"), ()),
        # runtime/zero/stage3.py; deepspeedai/DeepSpeed issue 8443.
        "muon": (
            Refusal(("z",), "DeepSpeed's Muon with ZeRO-3 orthogonalizes in every micro-batch, which is not priced"),
            Refusal(("x",), "DeepSpeed's Muon knows whole matrices alone"),
        ),
    },
    refused=(
        Refusal(("z", "data"), "ZeRO-3 shards over all data-parallel ranks: stage 3 has no replicas"),
        Refusal(("z", "pipeline"), "DeepSpeed's pipeline module excludes ZeRO-3"),
    ),
    names={"x": "tp", "z": "zero3", "data": "dp", "pipeline": "pp"},
    # One's own script, without tensor parallelism and stages, prints samples a second alone.
    logged=replace(DEEPSPEED_COUNT, where=("x", "pipeline")),
    launch=launch,
)

DEEPSPEED_2021 = replace(
    MEGATRON_2021,
    name="deepspeed-2021",
    title="Megatron-LM with ZeRO-3 (2021)",
    axes=("x", "z"),
    source="arXiv 2104.04473, section 5.2: DeepSpeed 0.3 with ZeRO-3, whose overlap_comm is off unless asked for",
    names={},
)

FRAMEWORKS = (DEEPSPEED, DEEPSPEED_2021)
