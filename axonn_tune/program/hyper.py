"""Manifold-constrained hyper-connections (mHC): m residual streams, mixed to one before a branch and from it behind.

Before a branch a token's m·H elements are read and H written, behind it m·H and the branch's H read and m·H written;
the m·(m + 2) coefficients of a site come of a matrix on all streams. Kernels take what they were measured to
(`cost/kernels.csv`). Source: arXiv 2512.24880; transformers 5.23.0, models/deepseek_v4/modeling_deepseek_v4.py.
"""

from __future__ import annotations

from axonn_tune.program.inputs import PARTS, H, LayerInputs, Y
from axonn_tune.program.operations import Arrays, Measured, Phase


def mixed(
    given: LayerInputs,
    layer: str,
    phase: Phase,
    *,
    ahead: bool,
    back: bool = False,
    makes: Arrays = (),
    frees: tuple[str, ...] = (),
) -> Measured:
    """The kernel before a branch (`ahead`) or behind it, or its gradients: of all that is read, and coefficients."""
    streams = float(given.streams)
    accesses = (2.0 * streams + 1.0 if back else streams + 1.0) if ahead else 3.0 * streams + 2.0
    accesses = accesses if ahead or back else 2.0 * streams + 1.0
    elements = given.outside(given.part) * H / Y
    flops = (4.0 if back else 2.0) * coefficients(given.streams) * streams * elements * (1.0 if ahead else 0.0)
    kernel = "mhc_pre" if ahead else "mhc_post"
    work = given.element * accesses * elements
    return Measured(phase, layer, kernel, work, flops, back, calls=PARTS, makes=makes, frees=frees)


def coefficients(streams: int) -> int:
    """Of a site: one a stream before the branch, one behind it, and a matrix of streams."""
    return streams * (streams + 2)


def closing_elements(streams: int, hidden: int) -> int:
    """Elements of what makes one stream of all behind the last block."""
    return streams * streams * hidden + streams + 1 if streams > 1 else 0
