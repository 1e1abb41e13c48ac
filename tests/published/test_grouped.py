"""Grouped GEMMs of experts against the rates that SimuMax measured of Transformer Engine's on its B200."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from axonn_tune.cost.compute import ComputeClock, compute_rates
from axonn_tune.program.operations import PLAIN, MatMul, Size
from axonn_tune.specs.catalog import load_machine
from axonn_tune.validation.published.rows import SHIPPED

SHARES: dict[tuple[int, int, int, int], tuple[float, float, float, float | None]] = {
    (256, 128, 4096, 7168): (0.208, 0.226, 0.0775, 0.1416),
    (256, 128, 7168, 2048): (0.178, 0.151, 0.0801, 0.1414),
    (160, 154, 3072, 5120): (0.200, 0.195, 0.0937, 0.1486),
    (160, 154, 5120, 1536): (0.116, 0.123, 0.0828, 0.1228),
    (128, 256, 4096, 7168): (0.271, 0.333, 0.1473, 0.2190),
    (128, 256, 7168, 2048): (0.303, 0.233, 0.1409, 0.2182),
    (80, 308, 3072, 5120): (0.387, 0.304, 0.1616, 0.2433),
    (80, 308, 5120, 1536): (0.235, 0.250, 0.1780, 0.2447),
    (64, 512, 4096, 7168): (0.367, 0.405, 0.2192, None),
    (64, 512, 7168, 2048): (0.427, 0.294, 0.2145, None),
    (40, 616, 3072, 5120): (0.462, 0.321, 0.2579, 0.3430),
    (40, 616, 5120, 1536): (0.326, 0.281, 0.2723, None),
    (32, 1024, 4096, 7168): (0.457, 0.435, 0.2888, None),
    (32, 1024, 7168, 2048): (0.384, 0.430, 0.2744, None),
    (20, 1232, 3072, 5120): (0.513, 0.422, 0.3276, None),
    (20, 1232, 5120, 1536): (0.397, 0.389, 0.3198, None),
}
"""By groups, rows, n and k: shares of 2,250 TFLOP/s that the forward pass reaches, gradients of inputs, and those of
weights that are added to sums in FP32 and in BF16 (MooreThreads/SimuMax@e691807, configs/system/
b200_bf16_ceperm.json)."""


def test_grouped_gemms_take_the_published_time() -> None:
    """Guards experts of few rows, whose weights are read and whose gradients are added: a tenth in the median."""
    accelerator = load_machine(SHIPPED / "machines" / "simumax-b200.yaml").document.accelerator
    # A burst.
    accelerator = accelerator.model_copy(update={"training_share": 1.0})
    rates = compute_rates(accelerator, "bf16")
    clock, errors = ComputeClock(rates, 2.0, {}, PLAIN), list[float]()
    for (groups, rows, n, k), shares in SHARES.items():
        m, wide, deep = (Size(float(size)) for size in (rows, n, k))
        forward = MatMul("forward", "experts", m, wide, deep, "NN", groups=Size(float(groups)))
        back = MatMul("backward", "experts", m, deep, wide, "NT", groups=Size(float(groups)))
        weights = MatMul("backward", "experts", deep, wide, m, "TN", groups=Size(float(groups)), added_bytes=4)
        for step, share in zip((forward, back, weights, replace(weights, added_bytes=2)), shares, strict=True):
            if share is not None:
                measured_s = 2.0 * groups * rows * n * k / (2250e12 * share)
                errors.append(float(clock.call_s(step)) / measured_s - 1.0)
    print(f"{len(errors)} calls, median {median(map(abs, errors)):.1%}, {min(errors):+.1%} to {max(errors):+.1%}")
    print(" ".join(f"{one:+.0%}" for one in errors))
    assert median(map(abs, errors)) <= 0.1
