"""What a run is made of: number formats, overlaps, recomputation."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axonn_tune.specs.workload import Overlap, Recompute


@dataclass(frozen=True)
class Settings:
    """compute: activations and gathered weights; main: stored weights and gradients; statistics: norms and loss.

    parts: pieces that a micro-batch runs in; split_main: main weights and moments are split over data; dropout: share
    of a block's outputs and of the embedding set to zero; compile: elementwise work by torch.compile.
    """

    compute: torch.dtype
    main: torch.dtype
    statistics: torch.dtype
    overlaps: frozenset[Overlap]
    recompute: Recompute
    kept_layers: int
    device: torch.device
    parts: int = 1
    split_main: bool = False
    dropout: float = 0.0
    compile: bool = False
