"""What a run is made of: number formats, overlaps, recomputation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axonn_tune.specs.workload import Overlap, Recompute


@dataclass(frozen=True)
class Settings:
    """compute: activations and gathered weights; main: stored weights and gradients; statistics: norms and loss."""

    compute: torch.dtype
    main: torch.dtype
    statistics: torch.dtype
    overlaps: frozenset[Overlap]
    recompute: Recompute
    kept_layers: int
    device: torch.device
