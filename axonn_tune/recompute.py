"""Recompute sets: which modules of a block its backward pass repeats (activation recomputation, checkpointing).

A set is a text: `none`; `full`, whole blocks; `selective`, the framework's own choice; or names of modules joined by
commas. The names are those of Megatron-Core's --recompute-modules (NVIDIA/Megatron-LM@d98e8a64,
core/transformer/transformer_config.py, recompute_modules); `mlp_act` is to a dense MLP what its `moe_act` is to
experts. Imports nothing but errors, as the options of the command line do.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from axonn_tune.errors import suggest

Recompute: TypeAlias = str
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""The sets that every framework can be asked for, from least to most recompute."""


class Module(NamedTuple):
    """Layers that a module's recompute repeats.

    whole: where it is checkpointed by itself, so that it is repeated to its last operation and its output stays saved.
    needs: what a model must have for it, in words.
    """

    layers: tuple[str, ...]
    whole: tuple[str, ...]
    needs: str = ""


_NORMS, _ACTIVATION, _MOE_ACT = ("attention.norm", "mlp.norm"), ("mlp.activation",), ("moe.activation",)
_SHARED, _MOE, _LATENT_UP = ("shared_experts",), ("moe",), ("attention.q_up", "attention.kv_up")
MODULES: dict[str, Module] = {
    "core_attn": Module(("attention.core",), ("attention.scores",)),
    "layernorm": Module(_NORMS, _NORMS),
    "mlp_act": Module(_ACTIVATION, _ACTIVATION),
    "mlp": Module(("mlp.fc1", *_ACTIVATION), ("mlp.fc1", *_ACTIVATION, "mlp.fc2")),
    "moe_act": Module(_MOE_ACT, _MOE_ACT, "experts"),
    "shared_experts": Module(_SHARED, _SHARED, "shared experts"),
    "moe": Module(_MOE, _MOE, "experts"),
    "mla_up_proj": Module(_LATENT_UP, _LATENT_UP, "multi-head latent attention"),
}
"""Modules by name, with their layers as `axonn_tune.program.layers` names them."""
NEEDS = {layer: one.needs for one in MODULES.values() for layer in one.layers if one.needs}
"""What a layer type must have for these layers, in words."""


def parse_recompute(text: str) -> Recompute:
    """A set with its modules once each, in the order of `MODULES`; ValueError, with the nearest name, for another."""
    names = [name.strip() for name in str(text).split(",")]
    if len(names) == 1 and names[0] in RECOMPUTES:
        return names[0]
    for name in names:
        if name not in MODULES:
            raise ValueError(
                f"no recompute set {name!r}{suggest(name, (*RECOMPUTES, *MODULES))}: known: {', '.join(RECOMPUTES)}, "
                f"or modules joined by commas: {', '.join(MODULES)}"
            )
    return ",".join(name for name in MODULES if name in names)


def modules_of(recompute: Recompute) -> tuple[str, ...]:
    """Modules that a set names; none of `none`, `selective` and `full`."""
    return () if recompute in RECOMPUTES else tuple(recompute.split(","))


def needed_by(recompute: Recompute) -> tuple[str, ...]:
    """What a model must have for a set, in words."""
    return tuple(needs for name in modules_of(recompute) if (needs := MODULES[name].needs))
