"""The machine of a row: the nearest shipped profile, with what the row says of memory, node and network."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Protocol

from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import Machine, Tier


class Site(Protocol):
    """What a row says of the machine it ran on; None where it does not say."""

    @property
    def system(self) -> str:
        """The cluster, in words."""

    @property
    def gpu(self) -> str:
        """The accelerator."""

    @property
    def network(self) -> str:
        """What joins the nodes, in words."""

    @property
    def gpu_memory_gb(self) -> float | None:
        """Memory of one accelerator, GB."""

    @property
    def gpus_per_node(self) -> int | None:
        """Accelerators in one node."""


_SYSTEMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("perlmutter", "perlmutter", ("a100",)),
    ("frontier", "frontier", ("mi250",)),
    ("alps", "alps", ("gh200", "h100")),
    ("p5.48", "aws-p5", ("h100",)),
    ("dgx-2", "dgx2-v100", ("v100",)),
)
"""Word in a system's name, the profile it means, and the accelerators that system has."""

ACCELERATORS: tuple[tuple[str, str], ...] = (
    ("mi250", "frontier"),
    ("gh200", "alps"),
    ("gb200", "gb200-nvl72"),
    ("gb300", "gb300-nvl72"),
    ("b200", "dgx-b200"),
    ("b300", "dgx-b300"),
    ("h200", "dgx-h200"),
    ("h100", "dgx-h100"),
    ("h800", "dgx-h100"),
    ("a100", "dgx-a100"),
    ("a800", "dgx-a100"),
    ("v100", "dgx1-v100"),
)
"""Word in an accelerator's name, and the profile it means; the first found counts."""

_OWN_NETWORK = {"perlmutter", "frontier", "alps"}
"""Profiles of one machine, whose network was measured: what a row says of it adds nothing."""

LARGEST_NODE = 16
"""An innermost domain of more ranks is a rack."""

LINE_RATE_SHARE = 0.9
"""Of a network's line rate, what collectives reach (DGX A100, H100 and B200: 0.89 to 0.95)."""


def profile_of(row: Site) -> str | None:
    """Name of the profile nearest to a row's machine, or None if no shipped one has its accelerator."""
    system, gpu = row.system.lower(), row.gpu.lower()
    for word, profile, chips in _SYSTEMS:
        if word in system and any(chip in gpu for chip in chips):
            return profile
    return next((profile for word, profile in ACCELERATORS if word in gpu), None)


def machine_of(row: Site) -> Machine | None:
    """The profile of a row, adjusted; None if no shipped one has its accelerator."""
    name = profile_of(row)
    if name is None:
        return None
    return _adjusted(name, row.gpu_memory_gb, row.gpus_per_node, node_gb_per_s(row))


def node_gb_per_s(row: Site) -> float | None:
    """Line rate of one node from the words of the row's network, GB/s; None if they do not say.

    Read: `800 Gbps/node`, `400 Gb/s per GPU`, `8x HDR 200Gb/s`, `Omni-Path 100Gb x4/node`.
    """
    words = row.network
    per_node = re.search(r"(\d+)\s*Gb(?:ps|/s|it/s)?\s*/\s*node", words)
    if per_node:
        return float(per_node[1]) / 8.0
    several = re.search(r"(\d+)\s*x\s*[A-Za-z ]*(\d{2,4})\s*Gb", words) or re.search(
        r"(\d+)\s*x\s+(?=(HDR|NDR|EDR))", words
    )
    if several:
        rate = {"HDR": 200.0, "NDR": 400.0, "EDR": 100.0}.get(several[2]) or float(several[2])
        return float(several[1]) * rate / 8.0
    reverse = re.search(r"(\d{2,4})\s*Gb\S*\s*x\s*(\d+)\s*/\s*node", words)
    if reverse:
        return float(reverse[1]) * float(reverse[2]) / 8.0
    each = re.search(r"(\d+)\s*Gb(?:ps|/s|it/s)\s*(?:per|/)\s*GPU", words)
    if each and row.gpus_per_node:
        return float(each[1]) * row.gpus_per_node / 8.0
    return None


@lru_cache(maxsize=256)
def _adjusted(name: str, memory_gb: float | None, per_node: int | None, line_gb_per_s: float | None) -> Machine:
    profile = load_machine(name).document
    accelerator = profile.accelerator
    if memory_gb is not None and abs(memory_gb / accelerator.memory_gib - 1.0) > 0.1:
        accelerator = accelerator.model_copy(update={"memory_gib": memory_gb * 0.989})
    tiers = list(profile.tiers)
    if len(tiers) > 1:
        tiers[0] = _of_node(tiers[0], per_node)
        if line_gb_per_s is not None and name not in _OWN_NETWORK:
            # What a rack is in one domain has as many nodes' links.
            nodes = (tiers[0].ranks or 1) / per_node if per_node and (tiers[0].ranks or 0) > LARGEST_NODE else 1.0
            update = {"bandwidth_gb_per_s": LINE_RATE_SHARE * line_gb_per_s * nodes}
            tiers[-1] = tiers[-1].model_copy(update=update)
    return profile.model_copy(update={"accelerator": accelerator, "tiers": tuple(tiers)})


def _of_node(tier: Tier, per_node: int | None) -> Tier:
    """The innermost tier with as many ranks as the row's nodes have; a rack that is one domain stays one."""
    if per_node is None or tier.ranks is None or per_node == tier.ranks or tier.ranks > LARGEST_NODE:
        return tier
    return tier.model_copy(update={"ranks": per_node})
