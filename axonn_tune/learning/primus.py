"""Experiments of AMD's Primus: YAML with arguments of Megatron-LM or torchtitan, and scripts that start one by `EXP=`.

An experiment names a model's file and overrides what Primus has for all (AMD-AGI/Primus@fd1eeabb, primus/configs):
`${NAME:value}` is the environment's, or the value beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from axonn_tune.frameworks.keys import Stated, is_on
from axonn_tune.specs.catalog import available, load_model, spelt_name
from axonn_tune.specs.model import Model

_MODULE = "modules.pre_trainer."
MODEL = "modules.pre_trainer.model"
"""Where an experiment names its model."""
ORDER = "pp_algorithm"
"""Order of passes of stages, where Primus runs them itself."""
_OWN = re.compile(
    r"(?:use_)?turbo_|enable_primus|disable_|log_avg_|\w+_sink_level$|mock_data$|\w+_data_path$|modules|"
    r"auto_continue|moe_use_(?:legacy_grouped_gemm|fused_router)"
)
"""Keys of Primus itself that change no price: kernels of its own, logs, data."""
_DEFAULTS = {
    "megatron": {"bf16": "True", "use_distributed_optimizer": "True", "sequence_parallel": "True"},
}
"""Of modules/megatron/trainer_base.yaml and pre_trainer.yaml and models/megatron/language_model.yaml, where Megatron-LM
has otherwise."""


def experiment(pairs: Iterable[tuple[str, Stated]]) -> list[tuple[str, Stated]]:
    """Pairs of a config file, those of an experiment by the names of its framework; others as they are."""
    every = list(pairs)
    stated = dict(every)
    framework = stated.get(f"{_MODULE}framework")
    if framework is None:
        return every
    found = {name: Stated(value, 0) for name, value in _DEFAULTS.get(framework.value, {}).items()}
    if MODEL in stated:
        found[MODEL] = stated[MODEL]
    for name, one in every:
        if name.startswith(f"{_MODULE}overrides."):
            found[name[len(_MODULE) + len("overrides.") :]] = one
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
        if name == MODEL or not (_OWN.match(name) or one.value.lower() in ("null", "none", ""))
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
