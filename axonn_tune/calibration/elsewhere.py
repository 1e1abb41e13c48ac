"""Whether a measured profile is used where it was measured."""

from __future__ import annotations

import importlib.metadata
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from axonn_tune.specs.machine import Measurement


@dataclass(frozen=True)
class Here:
    """What of this host a profile can be compared with; torch None where it is not installed."""

    host: str
    cores: int
    torch_version: str | None


def here() -> Here:
    """This host; torch is not imported for it."""
    try:
        torch_version: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = None
    return Here(socket.gethostname(), len(os.sched_getaffinity(0)), torch_version)


def differences(measured: Measurement, place: Here) -> Iterator[str]:
    """What is different here, in words."""
    if place.host not in measured.hosts:
        shown = ", ".join(measured.hosts[:3]) + (", …" if len(measured.hosts) > 3 else "")
        yield f"measured on {shown}, this is {place.host}"
    elif measured.cores is not None and measured.cores != place.cores:
        yield f"measured with {measured.cores} cores, here are {place.cores}"
    before, now = measured.torch_version, place.torch_version
    if before is not None and now is not None and _release(before) != _release(now):
        yield f"measured with torch {before}, here is {now}"


def _release(version: str) -> str:
    """A version without the build it is of."""
    return version.partition("+")[0]
