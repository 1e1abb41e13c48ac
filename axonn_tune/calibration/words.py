"""What a probe measures, in words."""

from __future__ import annotations

from axonn_tune.specs.points import (
    AttentionProbe,
    CollectiveProbe,
    CopyProbe,
    MatmulProbe,
    Probe,
    StepProbe,
    TransferProbe,
)
from axonn_tune.units import show_bytes


def probe_words(probe: Probe) -> str:
    """Such as `all_gather of 1 MiB over 4 ranks, stride 2`."""
    if isinstance(probe, CollectiveProbe):
        return f"{probe.op} of {show_bytes(probe.size_bytes)} over {probe.group} ranks, stride {probe.stride}"
    if isinstance(probe, TransferProbe):
        return f"message of {show_bytes(probe.size_bytes)} to the rank {probe.stride} further on"
    if isinstance(probe, MatmulProbe):
        return f"product {probe.layout} of {probe.m} x {probe.n} x {probe.k}"
    if isinstance(probe, CopyProbe):
        return f"copy of {show_bytes(probe.size_bytes)}"
    if isinstance(probe, AttentionProbe):
        return f"attention {'forward and backward' if probe.backward else 'forward'} of {probe.sequences} sequences"
    assert isinstance(probe, StepProbe), "the last kind of probe"
    return f"training step {probe.launch + 1} of a rank alone"
