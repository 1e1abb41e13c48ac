"""LayerNorm and RMSNorm of a hidden dim that is split over y, exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from axonn_tune.runtime.communicate import Communicator
from axonn_tune.runtime.local import compiled
from axonn_tune.runtime.parameters import Vector
from axonn_tune.runtime.settings import Settings

EPSILON = 1e-5

Statistics = tuple[torch.Tensor, torch.Tensor]
"""Mean (0 for RMSNorm) and reciprocal deviation of each token, `[M, 1]`, in the statistics type."""


@dataclass
class Norm:
    """LayerNorm, or RMSNorm if it has no bias, of `[M, H_y]`: statistics are combined over y.

    native: torch's own kernel does it where one rank of a CPU holds the whole hidden dim.
    """

    name: str
    width: int
    weight: Vector
    bias: Vector | None
    communicator: Communicator
    settings: Settings
    native: bool = True

    def __post_init__(self) -> None:
        settings = self.settings
        self._moments, self._combined = compiled(moments, settings), compiled(combined, settings)
        self._normalized, self._centred = compiled(normalized, settings), compiled(centred, settings)
        self._gradient_sums = compiled(gradient_sums, settings)

    @property
    def _whole_on_cpu(self) -> bool:
        """Whether torch's own kernel can do it: five times as fast as a dozen small ones. GPUs have `compile`."""
        alone, on_cpu = self.communicator.mesh.size("y") == 1, self.settings.device.type == "cpu"
        return self.native and alone and on_cpu and self.bias is not None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Statistics]:
        """The norm's output and the statistics to save."""
        if self._whole_on_cpu:
            return self._native(x)
        local = self._moments(x, self.settings.statistics, self.bias is not None)[None]
        found = self.communicator.all_gather(local, "y", "forward", self.name).wait()
        parts = self.communicator.mesh.size("y")
        statistics = self._combined(found.view(parts, -1, x.shape[0]), x.shape[-1], self.width)
        return self.apply(x, statistics), statistics

    def apply(self, x: torch.Tensor, statistics: Statistics) -> torch.Tensor:
        """The norm's output once more; sends nothing. From saved statistics, or, where torch's kernel does it, anew."""
        if self._whole_on_cpu:
            return self._native(x)[0]
        bias = None if self.bias is None else self.bias.value
        return self._normalized(x, *statistics, self.weight.value, bias, self.settings.compute)

    def _native(self, x: torch.Tensor) -> tuple[torch.Tensor, Statistics]:
        assert self.bias is not None, "LayerNorm has one"
        output, *statistics = torch.native_layer_norm(x, [self.width], self.weight.value, self.bias.value, EPSILON)
        return output, (statistics[0], statistics[1])

    def backward(self, x: torch.Tensor, statistics: Statistics, gradient: torch.Tensor) -> torch.Tensor:
        """Gradient of the input; both sums over the hidden dim are all-reduced over y."""
        if self._whole_on_cpu:
            return self._native_backward(x, statistics, gradient)
        weight, with_mean = self.weight.value, self.bias is not None
        sums, for_weight, for_bias = self._gradient_sums(x, *statistics, weight, gradient, with_mean)
        pending = self.communicator.all_reduce(sums, "y", "backward", self.name)
        self.weight.gradient += for_weight
        if self.bias is not None:
            self.bias.gradient += for_bias
        return self._centred(x, *statistics, weight, gradient, pending.wait() / self.width)

    def _native_backward(self, x: torch.Tensor, statistics: Statistics, gradient: torch.Tensor) -> torch.Tensor:
        assert self.bias is not None, "LayerNorm has one"
        found, for_weight, for_bias = torch.ops.aten.native_layer_norm_backward(
            gradient, x, [self.width], *statistics, self.weight.value, self.bias.value, [True, True, True]
        )
        self.weight.gradient += for_weight
        self.bias.gradient += for_bias
        result: torch.Tensor = found
        return result


def moments(x: torch.Tensor, dtype: torch.dtype, with_mean: bool) -> torch.Tensor:  # noqa: FBT001 - compiled as it is
    """Of each token's share of the hidden dim: mean and squares about it `[2, M]`, or sum of squares `[1, M]`."""
    wide = x.to(dtype)
    if not with_mean:
        return (wide * wide).sum(-1)[None]
    mean = wide.mean(-1)
    return torch.stack([mean, ((wide - mean[:, None]) ** 2).sum(-1)])


def combined(found: torch.Tensor, share: int, width: int) -> Statistics:
    """Statistics from the moments `[y, 1 or 2, M]` of all shares, `share` wide each (Chan et al. 1983)."""
    if found.shape[1] == 1:
        mean, spread = torch.zeros_like(found[0, 0]), found[:, 0].sum(0)
    else:
        mean = found[:, 0].mean(0)
        spread = found[:, 1].sum(0) + share * ((found[:, 0] - mean) ** 2).sum(0)
    return mean[:, None], torch.rsqrt(spread / width + EPSILON)[:, None]


def normalized(
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`(x - mean) · scale · weight + bias`, computed in the statistics type."""
    normal = (x.to(mean.dtype) - mean) * scale * weight
    return (normal if bias is None else normal + bias).to(dtype)


def gradient_sums(
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    with_mean: bool,  # noqa: FBT001 - compiled as it is
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over this share of the hidden dim `[1 or 2, M]`, and the gradients of weight and bias `[H_y]`."""
    normal, wide = (x.to(mean.dtype) - mean) * scale, gradient.to(mean.dtype)
    inner = wide * weight
    sums = [(inner * normal).sum(-1), inner.sum(-1)] if with_mean else [(inner * normal).sum(-1)]
    return torch.stack(sums), (wide * normal).sum(0), wide.sum(0)


def centred(
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    means: torch.Tensor,
) -> torch.Tensor:
    """Gradient of the input from the sums over the whole hidden dim, divided by its width, `[1 or 2, M]`."""
    normal = (x.to(mean.dtype) - mean) * scale
    found = gradient.to(mean.dtype) * weight - normal * means[0][:, None]
    if len(means) > 1:
        found = found - means[1][:, None]
    return (found * scale).to(gradient.dtype)
