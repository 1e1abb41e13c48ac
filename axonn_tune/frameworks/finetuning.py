"""Megatron-Core's layouts as what fine-tunes by it starts: recipes of Megatron-Bridge, `megatron sft` of ms-swift.

Both take the arguments of `pretrain_gpt.py` by names of their own, and have the model and its data themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from axonn_tune.frameworks.command import of_package, sections_of
from axonn_tune.frameworks.description import Argument, Command, Run
from axonn_tune.specs.tuning import Tuning, tools

RECIPES: Mapping[str, str] = {
    **{name: name.replace("-", "_") for name in ("llama3-8b", "llama3-70b", "qwen3-8b", "qwen3-32b")},
    **{name: name.replace("-", "_") for name in ("qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-next-80b-a3b")},
    **{name: name.replace("-", "_") for name in ("gpt-oss-20b", "gpt-oss-120b")},
    **{"llama3-405b": "llama31_405b", "qwen2.5-14b": "qwen25_14b", "moonlight-16b-a3b": "moonlight_16b"},
    "gemma-3-1b": "gemma3_1b",
}
"""Models of which Megatron-Bridge has recipes that fine-tune, and what these begin with (v0.6.0, recipes)."""

_OF_RECIPES: Mapping[str, Mapping[str, str]] = {
    "experts": {"model.expert_model_parallel_size": "1", "model.expert_tensor_parallel_size": "1"}
    | dict.fromkeys(("model.moe_shared_expert_overlap", "model.moe_router_force_load_balancing"), "false"),
    "parallelism": {f"model.{name}_parallel_size": "1" for name in ("pipeline_model", "context")}
    | {"model.virtual_pipeline_model_parallel_size": "null", "model.pipeline_model_parallel_layout": "null"}
    | {"model.sequence_parallel": "false"}
    | {f"{name}.use_distributed_optimizer": "false" for name in ("ddp", "optimizer")},
    "overlap": {f"ddp.overlap_{name}": "false" for name in ("grad_reduce", "param_gather")},
    "recompute": {f"model.recompute_{name}": "null" for name in ("granularity", "method", "num_layers", "modules")},
    "precision": {"optimizer.use_precision_aware_optimizer": "false", "model.cross_entropy_loss_fusion": "false"},
}
"""What recipes set one way or the other, as it is where nothing is written for it, by section."""
_KEPT = re.compile(
    r"dataset\.seq_length|model\.(num_moe_experts|\w+_dropout|expert_\w+_parallel|overlap_|delay_"
    r"|moe_(router_force|token|flex|shared_expert_overlap|permute|expert_cap))\w*|train\.\w+|validation\.\w+|logger\.\w+"
)
"""Of sections model, experts and trial what is no property of the model, which its recipe has."""


_SAMPLES = "Attention stops at the ends of samples in a pack, so it is faster than predicted; --lengths prices it."


def recipe(pretraining: Command, run: Run) -> Command:
    """A recipe of Megatron-Bridge that fine-tunes a model: `pretrain_gpt.py` has neither adapters nor samples.

    UsageError for models without one, and for adapters that its LoRA and DoRA have no keys for. Sources:
    NVIDIA-NeMo/Megatron-Bridge@51885cf1 (v0.6.0), scripts/training/run_recipe.py, recipe_metadata.py, README.md;
    src/megatron/bridge/recipes/common.py, peft/lora.py, training/config.py.
    """
    tuning, lengths, model = run.workload.tuning, run.workload.lengths, run.model.name
    if (stem := RECIPES.get(model)) is None:
        raise run.cannot(f"fine-tuning of {model}", f"Megatron-Bridge's recipes here: {', '.join(RECIPES)}")
    packed = run.micro_batch == 1 and (lengths is None or lengths.packing == "packed")
    if lengths is not None and lengths.packing == "packed" and not packed:
        raise run.cannot(f"packs in micro-batches of {run.micro_batch}", "ask for --micro-batch 1")
    if lengths is not None and lengths.packing == "padding-free":
        raise run.cannot("--packing padding-free", "ask for packed or padded")
    named = [Argument("--recipe", f"{stem}_{'peft' if tuning else 'sft'}_config")]
    named.append(Argument("--mode", tuning.mode if tuning else "sft"))
    named += [Argument("--dataset", "tulu3")] if lengths is not None and lengths.data == "tulu" else []
    sections: dict[str, list[Argument]] = {"recipe": named, "adapters": [*_peft(run, tuning)] if tuning else []}
    for section in pretraining.sections:
        filtered = section.title in ("model", "attention", "mamba", "experts", "prediction", "trial")
        own = [one for one in section.arguments if not filtered or _KEPT.match(one.name)]
        sections |= {section.title: own} if section.title != "recipe" else {}
    for title, keys in _OF_RECIPES.items():
        own = sections.setdefault(title, [])
        written = {one.name.partition("=")[0] for one in own}
        if title != "experts" or run.model.has_experts:
            own += [Argument(f"{key}={value}") for key, value in keys.items() if key not in written]
    sections["model"].append(Argument(f"dataset.enable_offline_packing={json.dumps(packed)}"))
    data = (
        "its data set is SQuAD: --dataset and dataset.* name another" if len(named) == 2 else "its data set is Tulu 3"
    )
    return replace(
        pretraining,
        fine_tunes=True,
        sections=sections_of(sections),
        needs=(
            *pretraining.needs[:-1],
            "Add checkpoint.pretrained_checkpoint=DIR, with the model as Megatron-Bridge or Hugging Face has it.",
            f"The recipe has the model, its tokenizer and the learning rate; {data}.",
        ),
        notes=(*pretraining.notes, *([_SAMPLES] if packed and lengths is None else [])),
    )


def _peft(run: Run, tuning: Tuning) -> Iterator[Argument]:
    """Keys of its adapters; UsageError for what its LoRA and DoRA have not. `peft.alpha` changes no step."""
    names = tools()[run.framework.tuner].named(tuning)
    if not tuning.adapts:
        raise run.cannot(
            "--tune head", "recipes of Megatron-Bridge train all weights or adapters: --framework fsdp does"
        )
    if tuning.tables:
        raise run.cannot("tables that train beside adapters", "leave them out, or ask for --framework fsdp")
    if tuning.dtype != "bf16":
        raise run.cannot(f"--lora-dtype {tuning.dtype}", "recipes have adapters in the model's type, bf16")
    if {*tools()[run.framework.tuner].layers(names)} != {*tuning.targets} or any("/" in one for one in tuning.targets):
        known = "linear_qkv, linear_proj, linear_fc1, linear_fc2"
        raise run.cannot("adapters of parts of fused layers", f"its recipes have LoRA of whole ones: {known}")
    yield Argument(f"peft.dim={tuning.rank}", why="the rank")
    yield Argument(f"peft.target_modules=[{','.join(names)}]")
    yield Argument(f"peft.dropout={tuning.dropout:g}")
    if tuning.collectives == "exchanged":
        yield Argument("peft.a2a_experimental=true")
    if run.model.has_experts:
        yield Argument(f"peft.share_expert_adapters={json.dumps(tuning.experts == 'shared')}")
    if tuning.experts == "each":
        yield Argument("peft.share_expert_adapters=false")


_OF_SWIFT = re.compile(
    r"(micro|global)_batch_size|\w+_parallel(_size|_layout)?|num_virtual_stages_per_pipeline_rank|use_\w+_optimizer"
    r"|account_for_\w+|overlap_\w+|recompute_\w+|moe_(token|flex|shared_expert_overlap|permute|expert_cap)\w*|train_iters"
    r"|(main_params|exp_avg|exp_avg_sq)_dtype|optimizer\w*"
)
"""Of Megatron-Core's arguments those that ms-swift has and that are no property of the model or of its data."""


def swift(pretraining: Command, run: Run) -> dict[str, Command]:
    """`megatron sft` of ms-swift, as a form; none for what that has not: DoRA, one adapter for several experts.

    Sources: modelscope/ms-swift@3602360a, docs/source_en/Megatron-SWIFT/Command-line-parameters.md,
    swift/megatron/arguments/megatron_args.py, swift/cli/_megatron.
    """
    tuning, lengths = run.workload.tuning, run.workload.lengths
    if lengths is not None and lengths.packing == "padding-free":
        return {}
    model = [Argument("--model", run.model.name, "or its id on the hub"), Argument("--torch_dtype", "bfloat16")]
    if tuning is not None:
        shared = run.model.has_experts and tuning.experts == "shared"
        if tuning.mode != "lora" or shared or tuning.collectives == "exchanged":
            return {}
        names = tuple(tools()[run.framework.tuner].named(tuning))
        model += [Argument("--tuner_type", "lora"), Argument("--lora_rank", tuning.rank)]
        model += [Argument("--lora_dropout", f"{tuning.dropout:g}"), Argument("--target_modules", names)]
    packed = lengths is None or lengths.packing == "packed"
    model += [Argument("--max_length", run.workload.sequence_length), Argument("--packing", json.dumps(packed))]
    sections: dict[str, list[Argument]] = {"model": model}
    for section in pretraining.sections:
        named = [(one.name.removeprefix("--").replace("-", "_"), one) for one in section.arguments]
        own = [
            Argument(f"--{name}", "true" if one.value is None else one.value, one.why)
            for name, one in named
            if _OF_SWIFT.fullmatch(name)
        ]
        if section.title != "model" and own:
            sections[section.title] = own
    stated = {one.name for own in sections.values() for one in own}
    off = {
        "--recompute_granularity": "none",
        "--cross_entropy_loss_fusion": "false",
        "--use_distributed_optimizer": "false",
    }
    sections["off"] = [Argument(name, value) for name, value in off.items() if name not in stated]
    command = replace(
        pretraining,
        release="ms-swift 4",
        program=("-m", "swift.cli._megatron.sft"),
        fine_tunes=True,
        sections=sections_of(sections),
        checks=(of_package("swift", "ms-swift with mcore-bridge"), of_package("megatron", "megatron-core")),
        needs=("Add --dataset and --output_dir. It is megatron sft, whose ranks this script starts.",),
        forms={},
    )
    return {"swift": command}
