"""What a calibration found, in a few lines."""

from __future__ import annotations

from collections.abc import Iterator

from axonn_tune.calibration.profile import Calibration
from axonn_tune.specs.machine import Machine
from axonn_tune.units import counted, show_seconds


def calibration_lines(done: Calibration) -> Iterator[str]:
    """The numbers that matter, how well they fit, and what was left out."""
    machine = done.machine
    yield f"{machine.name}: {machine.description}"
    if done.compute is not None:
        yield _compute_line(machine)
    yield from _network_lines(machine)
    yield from _fit_lines(done)


def _compute_line(machine: Machine) -> str:
    accelerator = machine.accelerator
    (precision, peak), *_ = accelerator.peak_tflops.items()
    reached = ", ".join(f"{layout} {share:.0%}" for layout, share in accelerator.matmul_efficiency.items())
    return (
        f"one rank, all busy: {peak * 1e3:.3g} GFLOP/s in {precision} (large products {reached}), copies "
        f"{accelerator.memory_bandwidth_gb_per_s:.3g} GB/s, {accelerator.kernel_launch_us:.3g} µs a kernel"
    )


def _network_lines(machine: Machine) -> Iterator[str]:
    for tier in machine.tiers:
        for kind in tier.collectives or ():
            used = tier.used_by(kind)
            yield (
                f"{tier.name}, {kind}: α {show_seconds(used.latency_s)} a hop, β {used.bandwidth_gb_per_s:.3g} GB/s, "
                f"launch {show_seconds(machine.library.launch_s)}"
            )


def _fit_lines(done: Calibration) -> Iterator[str]:
    measured, uncertainty = done.machine.measured, done.machine.uncertainty
    assert measured is not None, "calibrate sets it"
    unseen = (
        f"; collectives the fit had not seen are off by {measured.held_out_error:.1%}"
        if measured.held_out_error is not None
        else ""
    )
    computed = f", of computation within {uncertainty.compute:.0%}" if done.compute is not None else ""
    yield (
        f"{counted(measured.samples, 'point')}; 80% of collectives within {uncertainty.communication:.0%}"
        f"{computed}{unseen}"
    )
    if measured.outliers:
        yield f"outliers, of little weight in the fit: {'; '.join(measured.outliers)}"
