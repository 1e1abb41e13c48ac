"""What one rank has of its host: the link to it, and Adam on its CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_tune.specs.machine import ASSUMED_HOST, Host, Machine
from axonn_tune.units import bytes_per_s

ADAM_BYTES = 28.0
"""Bytes of host memory that Adam moves for a parameter in FP32: four numbers are read, all but the gradient written."""
_VECTORIZED = 0.5
"""Share of a host's memory bandwidth that DeepSpeed's CPUAdam reaches: 2.57 s for 10 B parameters on two Xeon 8168 with
256 GB/s (0.43; arXiv 2101.06840, table 4), 0.098 s for 1 B on Grace with 500 GB/s (0.57; arXiv 2509.21271)."""
_ASSUMED_BANDWIDTH = 200.0
"""Memory bandwidth of a host that does not state it, for that: one socket with eight channels of DDR4, GB/s."""


@dataclass(frozen=True)
class HostRates:
    """link_bytes_per_s: copies of one rank each way; updated_per_s, vectorized_per_s: parameters that torch's AdamW and
    DeepSpeed's update of one rank, while all ranks of the host do."""

    link_bytes_per_s: float
    updated_per_s: float
    vectorized_per_s: float


def host_rates(machine: Machine, world: int) -> HostRates:
    """Those of a rank where all ranks of a job on its node use the host at once: they share its memory's bandwidth."""
    return _shared(machine.host or ASSUMED_HOST, min(world, machine.launcher.ranks_per_node))


def _shared(host: Host, ranks: int) -> HostRates:
    stated = host.memory_bandwidth_gb_per_s
    memory = bytes_per_s(stated or _ASSUMED_BANDWIDTH) / ranks
    link, updated = bytes_per_s(host.link_gb_per_s), host.adam_parameters_per_s
    if stated is not None:
        link, updated = min(link, memory), min(updated, memory / ADAM_BYTES)
    return HostRates(link, updated, _VECTORIZED * memory / ADAM_BYTES)


UNSHARED = _shared(ASSUMED_HOST, 1)
"""Those of a lone rank on an assumed host, where nothing is offloaded."""
