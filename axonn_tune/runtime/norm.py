"""LayerNorm and RMSNorm of a hidden dim that is split over y, exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axonn_tune.runtime.communicate import Communicator
from axonn_tune.runtime.parameters import Vector
from axonn_tune.runtime.settings import Settings

EPSILON = 1e-5


@dataclass
class Norm:
    """LayerNorm or RMSNorm of `[M, H_y]`, exact: statistics are combined over y."""

    name: str
    width: int
    weight: Vector
    bias: Vector | None
    communicator: Communicator
    settings: Settings

    def statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean (0 for RMSNorm) and reciprocal deviation of each token, `[M, 1]`, in the statistics type."""
        wide = x.to(self.settings.statistics)
        parts = self.communicator.mesh.size("y")
        share = x.shape[-1]
        if self.bias is None:
            local = (wide * wide).sum(-1)[None]
        else:
            mean = wide.mean(-1)
            local = torch.stack([mean, ((wide - mean[:, None]) ** 2).sum(-1)])[None]
        found = self.communicator.all_gather(local, "y", "forward", self.name).wait().view(parts, -1, x.shape[0])
        if self.bias is None:
            mean, spread = torch.zeros_like(found[0, 0]), found[:, 0].sum(0)
        else:
            mean = found[:, 0].mean(0)
            spread = found[:, 1].sum(0) + share * ((found[:, 0] - mean) ** 2).sum(0)
        return mean[:, None], torch.rsqrt(spread / self.width + EPSILON)[:, None]

    def apply(self, x: torch.Tensor, statistics: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """The norm's output, from saved statistics; sends nothing."""
        mean, scale = statistics
        normal = (x.to(self.settings.statistics) - mean) * scale * self.weight.value
        if self.bias is not None:
            normal = normal + self.bias.value
        return normal.to(self.settings.compute)

    def backward(
        self, x: torch.Tensor, statistics: tuple[torch.Tensor, torch.Tensor], gradient: torch.Tensor
    ) -> torch.Tensor:
        """Gradient of the input; both sums over the hidden dim are all-reduced over y."""
        mean, scale = statistics
        normal = (x.to(self.settings.statistics) - mean) * scale
        wide = gradient.to(self.settings.statistics)
        self.weight.gradient += (wide * normal).sum(0).to(self.weight.gradient.dtype)
        if self.bias is not None:
            self.bias.gradient += wide.sum(0).to(self.bias.gradient.dtype)
        inner = wide * self.weight.value
        sums = [(inner * normal).sum(-1)] if self.bias is None else [(inner * normal).sum(-1), inner.sum(-1)]
        total = self.communicator.all_reduce(torch.stack(sums), "y", "backward", self.name).wait() / self.width
        centred = inner - normal * total[0][:, None]
        if self.bias is not None:
            centred = centred - total[1][:, None]
        return (centred * scale).to(gradient.dtype)
