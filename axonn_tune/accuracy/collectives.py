"""Predicted times of published collectives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from axonn_tune.accuracy.judged import Judged
from axonn_tune.accuracy.records import number, read_records
from axonn_tune.accuracy.sites import machine_of
from axonn_tune.cost.collectives import Line, collective_time_s, lines, route
from axonn_tune.grid import GroupShape
from axonn_tune.program.size import PLAIN
from axonn_tune.specs.machine import COLLECTIVE_KINDS, CollectiveKind, Machine

NEEDED = ("id", "system", "gpu", "library", "collective", "nranks", "size_bytes")
LARGE_BYTES = 1024**2
ASYMPTOTIC_BYTES = float(8 * 1024**3)
"""What is taken for rows that print a bandwidth of "large" messages."""

_KINDS: dict[str, CollectiveKind] = {kind: kind for kind in COLLECTIVE_KINDS}


@dataclass(frozen=True)
class Place:
    """Where a collective ran: what `sites` needs to know."""

    system: str
    gpu: str
    network: str
    gpus_per_node: int | None
    gpu_memory_gb: float | None = None


def judge_collectives(path: Path) -> tuple[Judged, ...]:
    """Every row of a file with its predicted time; rows out of scope say why. Errors as `read_records`."""
    return tuple(_judge(record) for _, record in read_records(path, needed=NEEDED))


def _judge(record: Mapping[str, str]) -> Judged:
    measured_s = _measured_s(record)
    size = _size_bytes(record)
    group = f"{record['system']}, {record['collective']}"

    def refuse(why: str) -> Judged:
        return Judged(record["id"], group, measured_s, why_not=why)

    kind = _KINDS.get(record["collective"])
    if kind is None:
        return refuse(f"{record['collective']!r} is not used by any layout here")
    library = record["library"].lower()
    if not ("nccl" in library or "rccl" in library) or "pccl" in library or "sockets" in library:
        return refuse(f"library {record['library']!r} is not modelled: NCCL and RCCL are")
    if "not representative" in record.get("notes", "").lower():
        return refuse("its own notes call it not representative of the collective alone")
    ranks = number(record, "nranks")
    if size is None or ranks is None or ranks < 2:
        return refuse("no size or no ranks")
    nodes = int(number(record, "nodes") or 1)
    machine = _machine(record, nodes)
    if machine is None:
        return refuse(f"no machine profile has the accelerator {record['gpu']!r}")
    found = _lines(kind, int(ranks), _stride(record), nodes, machine)
    predicted_s = collective_time_s(tuple((one.latency_s, one.bandwidth_bytes_per_s) for one in found), size, PLAIN)
    return Judged(record["id"], group, measured_s, float(predicted_s), large=size >= LARGE_BYTES)


def _lines(kind: CollectiveKind, ranks: int, stride: int, nodes: int, machine: Machine) -> tuple[Line, ...]:
    key = (kind, ranks, stride, nodes, id(machine))
    if key not in _KNOWN:
        path = route(GroupShape(((ranks, stride),)), machine.tiers, ranks * stride)
        _KNOWN[key] = lines(kind, path, machine), machine
    return _KNOWN[key][0]


_KNOWN: dict[object, tuple[tuple[Line, ...], Machine]] = {}


def _machine(record: Mapping[str, str], nodes: int) -> Machine | None:
    per_node = int(number(record, "gpus_per_node") or 8) * _stride(record)
    return _machine_at(record["system"], record["gpu"], record.get("network", ""), per_node if nodes > 1 else None)


@lru_cache(maxsize=1024)
def _machine_at(system: str, gpu: str, network: str, per_node: int | None) -> Machine | None:
    return machine_of(Place(system, gpu, network, per_node))


def _stride(record: Mapping[str, str]) -> int:
    """Groups that run side by side, whose ranks alternate."""
    found = re.search(r"STRIDED ranks: (\d+) groups", record.get("notes", ""))
    return int(found[1]) if found else 1


def _size_bytes(record: Mapping[str, str]) -> float | None:
    size = number(record, "size_bytes")
    return ASYMPTOTIC_BYTES if size is None and "large" in record["size_bytes"] else size


def _measured_s(record: Mapping[str, str]) -> float | None:
    """Time as printed, or as the printed bus bandwidth means (nccl-tests, PERFORMANCE.md)."""
    time_us, ranks, size = number(record, "time_us"), number(record, "nranks"), _size_bytes(record)
    if time_us is not None:
        return time_us * 1e-6
    bus = number(record, "busbw_GBps")
    if bus is None or ranks is None or size is None:
        return None
    passes = 2.0 if record["collective"] == "all_reduce" else 1.0
    return passes * (ranks - 1.0) / ranks * size / (bus * 1e9)
