"""Recompute sets: which modules of a block its backward pass repeats (activation recomputation, checkpointing).

A set is a text: `none`; `full`, whole blocks; `selective`, the framework's own choice; or names of modules joined by
commas. The names are those of Megatron-Core's --recompute-modules (NVIDIA/Megatron-LM@d98e8a64,
core/transformer/transformer_config.py, recompute_modules); `mlp_act` is to a dense MLP what its `moe_act` is to
experts. Imports nothing but errors, as the options of the command line do.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeAlias

from axonn_tune.errors import suggest

Recompute: TypeAlias = str
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""The sets that every framework can be asked for, from least to most recompute."""


class Module(NamedTuple):
    """What a module's recompute repeats, in words, and what a model must have for it, or in place of that; layer types
    say which of their nodes it is (`axonn_tune.program.types`)."""

    words: str
    needs: str = ""
    or_needs: str = ""


MODULES: dict[str, Module] = {
    "core_attn": Module("core attention"),
    "layernorm": Module("norms"),
    "mlp_act": Module("activation functions"),
    "mlp": Module("the MLP"),
    "moe_act": Module("experts' activation functions", "experts"),
    "shared_experts": Module("shared experts", "shared experts"),
    "moe": Module("experts", "experts"),
    "mhc": Module("hyper-connections", "hyper-connections"),
    "mla_up_proj": Module("projections from latents", "multi-head latent attention", "compressed attention"),
    "gdn_norm_out": Module("gated norms of delta nets", "gated delta nets"),
}
"""Modules by name."""


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


def lacked_by(recompute: Recompute, parts: Collection[str]) -> tuple[str, ...]:
    """What a model with these parts lacks for a set, in words."""
    modules = [MODULES[name] for name in modules_of(recompute)]
    return tuple(one.needs for one in modules if one.needs and not {one.needs, one.or_needs} & {*parts})
