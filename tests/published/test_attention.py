"""Attention as the cost model prices it against measured kernels: by machine, head width, pass, format and keys."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from axonn_tune.cost.compute import attention_time_s, compute_rates
from axonn_tune.frameworks import base_software, find_framework, software_on
from axonn_tune.program.operations import ONCE, Attention
from axonn_tune.specs.catalog import load_machine
from axonn_tune.units import TERA
from axonn_tune.vocabulary import Precision

KEYS = 4096.0, 8192.0, 16384.0
"""Keys of a query in the tables' three columns; of a window of 128 twice as many as it sees."""
WIDTHS = {"64": (64, 64), "128": (128, 128), "192/128": (192, 128), "256": (256, 256)}
"""Widths of queries' and of values' heads."""

Pair = tuple[float, float] | None
MEASURED: dict[tuple[str, Precision, str], tuple[Pair, Pair, Pair]] = {
    ("gb200-nvl72", "bf16", "128"): ((1408, 1148), (1574, 1332), (1708, 1328)),
    ("gb200-nvl72", "fp8-current", "128"): ((1805, 1178), (2047, 1454), (2154, 1632)),
    ("gb200-nvl72", "fp8-current", "64"): ((0, 794), None, None),
    ("gb200-nvl72", "mxfp8", "128"): ((1685, 1054), (1902, 1287), (1999, 1436)),
    ("gb200-nvl72", "bf16", "192/128"): ((1406, 1057), (1585, 1193), (1678, 1134)),
    ("gb200-nvl72", "fp8-current", "192/128"): ((2095, 1692), (2397, 1959), (2486, 1968)),
    ("gb200-nvl72", "mxfp8", "192/128"): ((1925, 1364), None, None),
    ("gb200-nvl72", "bf16", "256"): ((1441, 0), (1708, 0), (1804, 0)),
    ("gb300-nvl72", "bf16", "128"): ((1703, 1248), (1856, 1435), (1915, 1507)),
    ("gb300-nvl72", "fp8-current", "128"): ((2532, 1396), (2897, 1781), (3054, 2035)),
    ("gb300-nvl72", "fp8-current", "64"): ((0, 928), None, None),
    ("gb300-nvl72", "mxfp8", "128"): ((2272, 1143), (2570, 1404), (2727, 1563)),
    ("gb300-nvl72", "bf16", "192/128"): ((1590, 1143), (1825, 1291), (1967, 1302)),
    ("gb300-nvl72", "fp8-current", "192/128"): ((2788, 1982), (3128, 2310), (3305, 2459)),
    ("gb300-nvl72", "mxfp8", "192/128"): ((2517, 1522), None, None),
    ("gb300-nvl72", "bf16", "256"): ((1743, 0), (1965, 0), (2063, 0)),
    ("dgx-h200", "bf16", "128"): ((591, 474), (643, 541), (673, 579)),
    ("dgx-h200", "bf16", "192/128"): (None, (643, 442), None),
    ("dgx-h100", "bf16", "192/128"): ((553, 422), None, (638, 523)),
    ("dgx-h200", "fp8-current", "128"): (None, (945, 541), None),
    ("mi355x", "bf16", "128"): (None, (1278, 1052), None),
    ("mi355x", "bf16", "192/128"): (None, (1298, 0), None),
    ("dgx-b200", "bf16", "128"): (None, (1418, 1208), None),
}
"""TFLOP/s of causal FLOPs, forward and backward (0: not measured), with 4,096, 8,192 and 16,384 keys: cuDNN 9.22, on
H200 9.19 (NVIDIA/cudnn-frontend@3929da2e, benchmark/sdpa_benchmark_training); on H100 arXiv 2603.07685, table 9; on
B200 FlashAttention-4 (Dao-AILab/flash-attention, PR 2280); on MI355X AITER (ROCm/aiter, PR 3390 and PR 815).
Heads of 64 in 8 bits: with a window of 128, of which backward skips nothing."""

WINDOW = {"gb200-nvl72": (161, 182), "gb300-nvl72": (167, 191), "dgx-h200": (47, 41)}
"""The same of the scores in a window of 128 keys, heads of 64, two sequences of 4,096 tokens, BF16 (same source)."""

RELATIVE = {
    ("dgx-h100", "64", "dgx-h100", "128"): (0.76, 0.80, 0.78),
    ("dgx-b200", "64", "dgx-b200", "128"): (0.64, 0.66, 0.68),
    ("gb200-nvl72", "64", "gb200-nvl72", "128"): (0.62, 0.62, 0.69),
    ("dgx-b300", "64", "dgx-b300", "128"): (0.68, 0.69, 0.76),
    ("gb300-nvl72", "64", "gb300-nvl72", "128"): (0.64, 0.67, 0.68),
    ("gb200-nvl72", "128", "dgx-b200", "128"): (1.11, 1.15, 1.09),
    ("gb300-nvl72", "128", "dgx-b300", "128"): (1.12, 1.12, 1.24),
    ("dgx-b300", "128", "dgx-b200", "128"): (1.19, 1.22, 1.14),
    ("dgx-b300", "64", "dgx-b200", "64"): (1.27, 1.27, 1.27),
}
"""Rates forward over those of other heads or machines, by keys: TensorRT-LLM 1.3.0rc20
(ai-dynamo/aiconfigurator@095f58a5), whose kernels are not those of training."""


ON_CDNA4: dict[str, tuple[tuple[float, float], ...]] = {
    "torchtitan": ((499, 143), (705, 224), (789, 259)),
    "megatron-axonn": ((813, 472), (866, 489), (889, 541)),
}
"""TFLOP/s on MI355X of torch's own attention and of Composable Kernel's, by keys as above, causal, BF16, heads of 128,
64 and 8 of them (HazyResearch/HipKittens@f09e9685, analysis/attn)."""


def rate(machine: str, precision: Precision, width: str, keys: float, *, backward: bool) -> float:
    """TFLOP/s of causal FLOPs of a call alone, as benchmarks repeat it, so long that its launch does not count."""
    (queries, values), gemms = WIDTHS[width], (3, 2) if backward else (1, 1)
    mean = (gemms[0] * queries + gemms[1] * values) / sum(gemms)
    accelerator = load_machine(machine).document.accelerator.model_copy(update={"training_share": 1.0})
    rates = compute_rates(accelerator, precision)
    step = Attention("forward", "core", ONCE, ONCE, backward, precision != "bf16", mean)
    flops = 1e18
    return flops / 2.0 / float(attention_time_s(step, flops, keys, rates)) / TERA


def errors() -> dict[str, float]:
    """Predicted over measured rates, less 1."""
    table = [
        (machine, precision, width, keys, pair)
        for (machine, precision, width), row in MEASURED.items()
        for keys, pair in zip(KEYS, row, strict=True)
        if pair
    ]
    table += [(machine, "bf16", "64", 256.0, pair) for machine, pair in WINDOW.items()]
    return {
        f"{machine} {precision} {width} {keys:g} {'backward' if backward else 'forward'}": rate(
            machine, precision, width, keys, backward=bool(backward)
        )
        / pair[backward]
        - 1.0
        for machine, precision, width, keys, pair in table
        for backward in (0, 1)
        if pair[backward]
    }


def test_attention_is_as_fast_as_its_measured_kernels() -> None:
    """Guards rates of attention against the tables: median 8%, worst 25%."""
    found = {name: abs(error) for name, error in errors().items()}
    assert len(found) == 97
    assert median(found.values()) < 0.08
    assert max(found.values()) < 0.25, sorted(found.items(), key=lambda one: -one[1])[:5]


@pytest.mark.parametrize("machine", ["gb200", "gb300", "dgx-h"])
def test_no_machine_is_met_at_the_expense_of_another(machine: str) -> None:
    """Guards each machine's own median and mean of rates of attention."""
    found = [error for name, error in errors().items() if name.startswith(machine)]
    assert median(abs(error) for error in found) < 0.08
    assert abs(sum(found) / len(found)) < 0.05


@pytest.mark.parametrize("pair", RELATIVE)
def test_heads_and_machines_differ_as_other_kernels_do(pair: tuple[str, str, str, str]) -> None:
    """Guards ratios of head widths and of machines, of kernels that none of the numbers is taken from but Hopper's."""
    machine, width, other, others = pair
    for keys, measured in zip(KEYS, RELATIVE[pair], strict=True):
        found = rate(machine, "bf16", width, keys, backward=False) / rate(other, "bf16", others, keys, backward=False)
        assert found == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize("name", ON_CDNA4)
def test_attention_without_aiter_takes_longer_on_cdna_4(name: str) -> None:
    """Guards frameworks that do not call AITER: both passes of torch's attention and of Composable Kernel's take what
    they were measured to take, relative to AITER."""
    machine, framework = load_machine("mi355x").document, find_framework(name)
    slower = software_on(framework, machine).attention / base_software(framework, machine).attention
    for keys, (forward, backward) in zip(KEYS, ON_CDNA4[name], strict=True):
        own = [rate("mi355x", "bf16", "128", keys, backward=back) for back in (False, True)]
        priced, measured = slower * (1.0 / own[0] + 2.5 / own[1]), 1.0 / forward + 2.5 / backward
        assert priced == pytest.approx(measured, rel=0.25)
    assert software_on(find_framework("megatron-core"), machine) == base_software(
        find_framework("megatron-core"), machine
    )


@pytest.mark.parametrize(("machine", "longer"), [("mi355x", 1052 / 763), ("dgx-b200", 1.0)])
def test_heads_of_unequal_widths_take_longer_backward_on_cdna_4(machine: str, longer: float) -> None:
    """Guards MLA's backward pass, which AITER has with sums in FP32 alone; forward there is no difference."""
    accelerator = load_machine(machine).document.accelerator
    rates = compute_rates(accelerator.model_copy(update={"kernel_launch_us": 0.0}), "bf16")
    alike, apart = (Attention("backward", "core", ONCE, ONCE, True, unequal=one) for one in (False, True))
    ratio = attention_time_s(apart, 1e18, 8192.0, rates) / attention_time_s(alike, 1e18, 8192.0, rates)
    assert ratio == pytest.approx(longer)
    assert attention_time_s(replace(apart, backward=False), 1e18, 8192.0, rates) == attention_time_s(
        replace(alike, backward=False), 1e18, 8192.0, rates
    )
