"""Experiments of AMD's Primus: YAML with arguments of Megatron-LM or torchtitan, and scripts that start one by `EXP=`.

An experiment names a model's file and overrides what Primus has for all (AMD-AGI/Primus@fd1eeabb, primus/configs):
`${NAME:value}` is the environment's, or the value beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from axonn_tune.frameworks.keys import Stated, is_on
from axonn_tune.specs.catalog import available, load_model, spelt_name
from axonn_tune.specs.model import Model

_MODULES = ("modules.pre_trainer.", "modules.post_trainer.")
MODEL = "modules.pre_trainer.model"
"""Where an experiment names its model; one of the post-trainer is kept under the same key."""
_NAMED = (MODEL, "activation_checkpoint.mode", "peft_scheme")
"""Keys that have `none` as a word."""
ORDER = "pp_algorithm"
"""Order of passes of stages, where Primus runs them itself."""
_OWN = re.compile(
    r"(?:use_)?turbo_|enable_primus|disable_|log_avg_|\w*sink_level$|(?:training\.)?mock_data$|\w+_data_path$|modules|"
    r"auto_continue|moe_use_(?:legacy_grouped_gemm|fused_router)|no_fp8_weight_transpose_cache|pp_warmup$|"
    r"primus_turbo\.(?!enable_attention_float8|use_moe_fp8)|"
    r"stage$|hf_path$|finetune_lr$|comm_overlap_config$|packed_sequence$|sft_|enable_odc|odc_|enable_packed|use_packed|lb_mini"
)
"""Keys of Primus itself that change no price: kernels of its own, logs, data, how samples are packed."""
_RENAMED = {"precision_config": "mixed_precision", "peft": "peft_scheme"}
"""Keys of Primus's experiments by Megatron-Bridge, and the arguments that they are."""
_DEFAULTS = {
    "megatron": {"bf16": "True", "use_distributed_optimizer": "True", "sequence_parallel": "True"},
    "megatron_bridge": {"mixed_precision": "bf16_mixed", "use_distributed_optimizer": "True"},
    "torchtitan": {"activation_checkpoint.mode": "none", "compile.enable": "true", "compile.components": "model loss"},
}
"""Of modules/megatron/trainer_base.yaml and pre_trainer.yaml, models/megatron/language_model.yaml and
modules/torchtitan/pre_trainer.yaml, where Megatron-LM or torchtitan has otherwise; and of recipes that fine-tune
(NVIDIA-NeMo/Megatron-Bridge@51885cf1, recipes/common.py)."""


def experiment(pairs: Iterable[tuple[str, Stated]]) -> list[tuple[str, Stated]]:
    """Pairs of a config file, those of an experiment by the names of its framework; others as they are."""
    every = list(pairs)
    stated = dict(every)
    module = next((one for one in _MODULES if f"{one}framework" in stated), "")
    if not module:
        return every
    framework, model = stated[f"{module}framework"].value, stated.get(f"{module}model")
    found = {name: Stated(value, 0) for name, value in _DEFAULTS.get(framework, {}).items()}
    if model is not None:
        found[MODEL] = model
        if framework == "torchtitan" and re.search(r"-fp8(?:\.|$)", model.value.lower()):
            # The files of these models name the converter.
            found["model.converters"] = replace(model, value="quantize.linear.float8")
    for name, one in every:
        if name.startswith(f"{module}overrides."):
            own = name[len(module) + len("overrides.") :]
            found[_RENAMED.get(own, own) if framework == "megatron_bridge" else own] = one
    if all(name in found and is_on(found[name]) for name in ("enable_primus_turbo", "use_turbo_deepep")):
        found["moe_enable_deepep"] = found["use_turbo_deepep"]
        found["moe_token_dispatcher_type"] = Stated("flex", found["use_turbo_deepep"].line)
    if (order := _order(found)) is not None:
        found[ORDER] = order
    else:
        found.pop(ORDER, None)
    # A key without a value holds what is set for all.
    return [
        (name, one)
        for name, one in found.items()
        if name in _NAMED or not (_OWN.match(name) or one.value.lower() in ("null", "none", ""))
    ]


def _order(stated: Mapping[str, Stated]) -> Stated | None:
    """The schedule of stages of Primus' own pipeline, or of zero bubbles as Sea AI's fork has them; None for
    Megatron-LM's (primus/configs/modules/megatron/primus_pipeline.yaml, zero_bubble.yaml)."""

    def on(name: str, *, unset: bool = False) -> bool:
        return is_on(stated[name]) if name in stated else unset

    if on("patch_primus_pipeline"):
        return stated.get(ORDER, Stated("1f1b-interleaved", stated["patch_primus_pipeline"].line))
    if not on("patch_zero_bubble") or not on("enable_zero_bubble", unset=True):
        return None
    switch = stated["patch_zero_bubble"]
    if not on("zero_bubble_v_schedule"):
        return Stated("zero-bubble", switch.line)
    setup = stated.get("zero_bubble_v_schedule_mem_setup", Stated("half", switch.line))
    return Stated({"zb": "zbv-formatted"}.get(setup.value, f"v-{setup.value}"), setup.line)


def filled(one: Stated, variables: Mapping[str, Sequence[Stated]]) -> Stated:
    """A value with the environment's in place of `${NAME:value}`."""

    def value(match: re.Match[str]) -> str:
        given = variables.get(match[1])
        return given[-1].value if given else match[2]

    text = re.sub(r"\$\{([A-Z][A-Z0-9_]*):((?!-)[^{}]*)\}", value, one.value)
    return one if text == one.value else Stated(text, one.line, one.file)


def started(variables: Mapping[str, Sequence[Stated]]) -> Iterator[tuple[str, Stated]]:
    """The file of the experiment that a script starts, and its nodes and GPUs a node, eight if it does not say."""
    if "EXP" not in variables:
        return
    yield "config", variables["EXP"][-1]
    line = variables["EXP"][-1].line
    for name, argument, unset in (("NNODES", "nnodes", "1"), ("GPUS_PER_NODE", "nproc_per_node", "8")):
        yield argument, variables[name][-1] if name in variables else Stated(unset, line)


def model_of(named: Mapping[str, Stated]) -> tuple[Model, str] | None:
    """The model that an experiment names, and how it is known; None for one that is not known."""
    stated = named.get(MODEL)
    spelt = None if stated is None else spelt_name(stated.value.rpartition(".y")[0], available("model"))
    return None if spelt is None or stated is None else (load_model(spelt).document, f"the model is {spelt}")
