"""Where `benchmarks.gpu_proof` measures, and what its stages find there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axonn_tune.runtime.devices import use_device


@dataclass(frozen=True)
class Row:
    """One line of a stage's table; ok: whether the check passed, None without a check."""

    what: str
    measured: float | None
    unit: str = ""
    predicted: float | None = None
    ok: bool | None = None
    note: str = ""


@dataclass(frozen=True)
class Site:
    """Where it is measured: `cuda` or `cpu`, the device's name and the machine profile that predicts it.

    compiled: also what torch.compile makes of it, which on a CPU takes minutes.
    """

    kind: str
    name: str
    machine: str
    compiled: bool

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.kind == "cuda"

    @property
    def backend(self) -> str:
        """What groups of one communicate over."""
        return "nccl" if self.cuda else "gloo"

    @property
    def modes(self) -> dict[str, bool]:
        """Values of `compile`, as the tables call them."""
        return {"eager": False} | ({"compiled": True} if self.compiled else {})

    def device(self) -> torch.device:
        """The device, made this process' own."""
        device = torch.device(self.kind, 0) if self.cuda else torch.device("cpu")
        use_device(device)
        return device
