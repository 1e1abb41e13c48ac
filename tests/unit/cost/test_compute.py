"""Rates of GEMMs, and what communication beside it costs computation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from axonn_tune.cost.compute import (
    ComputeClock,
    ComputeRates,
    attention_time_s,
    compute_rates,
    contended_s,
    rate_of_matmul,
)
from axonn_tune.cost.price import price
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.grid import ALL_AXES, Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.block import backward, block_nodes, forward
from axonn_tune.program.dimensions import dimensions
from axonn_tune.program.inputs import LayerInputs
from axonn_tune.program.operations import ONCE, PLAIN, Attention, Kernel, Phase, Size, Value, captured_layers
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.formats import FORMATS
from axonn_tune.specs.machine import Machine, Software
from axonn_tune.specs.workload import ELEMENT_SIZES, Workload


def a100(**changed: object) -> Machine:
    """A shipped machine, with other numbers of its accelerator."""
    machine = load_machine("dgx-a100").document
    return machine.model_copy(update={"accelerator": machine.accelerator.model_copy(update=changed)})


def rate(alignment: int, *, batched: bool = False) -> float:
    """Rate of forward products in fp16, FLOP/s."""
    rates = compute_rates(a100(training_share=1.0).accelerator, "fp16")
    return rate_of_matmul("NN", element_bytes=2.0, alignment=alignment, batched=batched, rates=rates)


def test_rows_at_odd_addresses_run_without_matrix_units() -> None:
    """Guards both ends: the matrix peak at 16 bytes, the vector peak at single elements, of A100's datasheet."""
    share = a100().accelerator.matmul_efficiency["NN"]
    assert rate(16) == pytest.approx(312e12 * share)
    assert rate(2) == pytest.approx(78e12 * share)
    assert rate(2, batched=True) == rate(8, batched=True) == pytest.approx(19.5e12 * share)
    assert rate(16, batched=True) == rate(16)


def test_a_profile_may_state_one_precision_alone() -> None:
    """Guards profiles of one's own: rates exist without a peak of fp32, which only unaligned products need."""
    accelerator = a100(peak_tflops={"bf16": 312.0}, vector_tflops=None).accelerator
    rates = compute_rates(accelerator, "bf16")
    assert rates.vector_flops_per_s == rates.vector_fp32_flops_per_s == rates.matmul_flops_per_s


def test_contention_is_a_share_of_what_is_hidden() -> None:
    """Guards the equation: of 8 s communication 6 are hidden behind 10; of 40 s no more than is computed."""
    assert float(contended_s(8.0, 10.0, 12.0, contention=0.5)) == pytest.approx(3.0)
    assert float(contended_s(40.0, 10.0, 12.0, contention=0.5)) == pytest.approx(5.0)
    assert float(contended_s(2.0, 10.0, 12.0, contention=0.5)) == 0.0
    assert contended_s(8.0, 10.0, 12.0, contention=0.0) == 0.0
    columns = contended_s(np.array([8.0, 40.0]), np.array([10.0, 10.0]), np.array([12.0, 12.0]), contention=0.5)
    assert np.asarray(columns).tolist() == pytest.approx([3.0, 5.0])


@pytest.mark.parametrize("contention", [0.0, 0.3, 1.0])
def test_a_step_is_longer_by_what_it_loses(contention: float) -> None:
    """Guards the step: contention adds to computation and step alike, and exposes nothing."""
    model, workload = load_model("5b").document, Workload(global_batch=64, sequence_length=2048)
    grid = Layout(Grid(z=8), 1, "none")
    alone, slowed = (price(Job(model, a100(contention=share), workload), grid) for share in (0.0, contention))
    hidden_s = alone.communication_s - alone.exposed_communication_s
    assert hidden_s > 0.0
    assert slowed.contended_s == pytest.approx(contention * hidden_s)
    assert slowed.iteration_s == pytest.approx(alone.iteration_s + slowed.contended_s)
    assert slowed.compute_s == pytest.approx(alone.compute_s + slowed.contended_s)
    assert slowed.exposed_communication_s == pytest.approx(alone.exposed_communication_s)


def attention(*, backward: bool = False, narrow: bool = False, width: float = 128.0) -> Attention:
    """A call of it."""
    return Attention("forward", "core", ONCE, ONCE, backward, narrow, width)


def taken(step: Attention, keys: Value, rates: ComputeRates) -> Value:
    """Of 1e13 FLOPs, without the launch."""
    return attention_time_s(step, 1e13, keys, rates) - rates.kernel_launch_s


def test_attention_of_few_keys_is_slower_than_of_many() -> None:
    """Guards rates by keys, n / (n + ramp) in both directions from 8,192, in columns to the same bits."""
    rates = compute_rates(load_machine("dgx-h100").document.accelerator, "bf16")
    ramp, step = rates.attention[1].ramp, attention(backward=True)
    of_reference = taken(step, 8192.0, rates)
    assert of_reference == pytest.approx(1e13 / rates.attention[1].flops_per_s)
    for keys in (512.0, 16384.0, 1e12):
        assert taken(step, keys, rates) / of_reference == pytest.approx((1 + ramp / keys) / (1 + ramp / 8192))
    several = np.array([512.0, 16384.0, 131072.0])
    found = np.array([taken(step, float(one), rates) for one in several])
    assert np.array_equal(taken(step, several, rates), found)


def test_attention_of_a_machine_without_softmax_or_ramp_reaches_one_share() -> None:
    """Guards what a profile that states efficiencies alone means: the same for all widths and keys; half in 8 bits."""
    flat = compute_rates(a100().accelerator, "bf16")
    once = taken(attention(), 8192.0, flat)
    for width, keys in ((64.0, 512.0), (256.0, 131072.0)):
        assert taken(attention(width=width), keys, flat) == pytest.approx(once)
    assert taken(attention(narrow=True), 8192.0, flat) == pytest.approx(once / 2.0)


def test_one_order_of_sums_costs_backward_alone() -> None:
    """Guards `step.deterministic`: an eighth more of attention's backward pass, as cuDNN's 10 to 15%; none forward."""
    plain, ordered = (one_layer(deterministic=one) for one in (False, True))
    assert len(plain) == len(ordered) == 2
    assert ordered["forward"] == plain["forward"]
    assert ordered["backward"] == pytest.approx(1.125 * plain["backward"], rel=1e-3)


def one_layer(*, deterministic: bool) -> dict[str, float]:
    """Seconds of attention's calls in a block of llama3-8b, by pass."""
    options = StepOptions(deterministic=deterministic)
    nodes = block_nodes(LayerInputs(load_model("llama3-8b").document, ELEMENT_SIZES["bf16"], options))
    values = dict.fromkeys(("x", "y", "z", "data", "b", "parts", "context"), 1.0) | {"S": 8192.0, "Q": 4096.0}
    clock = ComputeClock(compute_rates(load_machine("dgx-h100").document.accelerator, "bf16"), 2.0, values, PLAIN)
    program = [*forward(nodes), *backward(nodes, recompute="none")]
    return {one.phase: float(clock.call_s(one)) for one in program if isinstance(one, Attention)}


def test_a_ring_cuts_attention_into_calls_whose_results_are_merged() -> None:
    """Guards context parallelism around a ring: 1 + 0.75 (p - 1) calls a query, each but the first with an addition of
    outputs, and backward of gradients of queries, keys and values; an all-to-all has one call."""
    model = load_model("llama3-8b").document
    axes = dict.fromkeys((*ALL_AXES, "b"), 1.0) | {"context": 4.0}
    workload = Workload(global_batch=1, sequence_length=8192)
    values = dimensions(model, workload, axes, chunks=1.0, arithmetic=PLAIN) | {"parts": 1.0}
    found = {}
    for exchange in ("all_to_all", "ring"):
        given = LayerInputs(model, ELEMENT_SIZES["bf16"], StepOptions(context_exchange=exchange), context=True)
        nodes = block_nodes(given)
        steps = [*forward(nodes), *backward(nodes, recompute="none")]
        keys = {one.keys.evaluate(values) for one in steps if isinstance(one, Attention)}
        kernels = [one for one in steps if isinstance(one, Kernel) and one.layer == "attention.core"]
        moved = sum(one.size_bytes.evaluate(values) * one.calls.evaluate(values) for one in kernels)
        found[exchange] = keys, moved
    assert found["all_to_all"][0] == {8192.0}
    assert found["ring"][0] == {8192.0 / 3.25}
    merged = 2.0 * 3.0 * 2.25 * 8192 / 4 * (model.hidden + (model.heads + 2 * model.kv_heads) * model.head_dim)
    assert found["ring"][1] - found["all_to_all"][1] == pytest.approx(merged)


def test_backward_in_8_bits_does_not_skip_what_a_window_leaves_out() -> None:
    """Guards keys of GPT-OSS's windows of 128: all that precede a token only backward in 8 bits."""
    model = load_model("gpt-oss-20b").document
    local = next(layer for layer in model.types if layer.window)
    workload = Workload(global_batch=1, sequence_length=4096)
    values = dimensions(model, workload, dict.fromkeys((*ALL_AXES, "b"), 1.0), chunks=1.0, arithmetic=PLAIN)
    for narrow in (False, True):
        options = StepOptions(narrow_attention=narrow)
        given = LayerInputs(
            model, ELEMENT_SIZES["bf16"], options, layer=local, of=f".{local.name}", format=FORMATS["fp8-current"]
        )
        nodes = block_nodes(given)
        steps = [*forward(nodes), *backward(nodes, recompute="none")]
        keys = {one.phase: one.keys.evaluate(values) for one in steps if isinstance(one, Attention)}
        window = 128 * (2 * 4096 - 128) / 4096
        assert keys == {"forward": window, "backward": 4096 if narrow else window}


def test_softmax_takes_its_time_whatever_the_width_of_heads() -> None:
    """Guards the time of a score: by tensor cores of wide heads, by softmax of narrow ones and in 8 bits."""
    rates = compute_rates(load_machine("gb200-nvl72").document.accelerator, "bf16")
    share = rates.attention[0].softmax
    rates = replace(rates, attention=(replace(rates.attention[0], ramp=0.0), rates.attention[1]))

    def of_a_score(*, width: float = 128.0, narrow: bool = False) -> float:
        return float(taken(attention(width=width, narrow=narrow), 8192.0, rates)) * width / 128.0

    once = of_a_score()
    assert of_a_score(width=1.0) == pytest.approx(once * share, rel=1e-6)
    assert of_a_score(narrow=True) == of_a_score(width=64.0) > once * max(0.5, share)
    assert of_a_score(width=1024.0) == pytest.approx(8 * once * (1 - share**4) ** 0.25, rel=1e-3)


def test_what_cuda_graphs_capture_has_no_time_per_operation() -> None:
    """Guards scopes of CUDA graphs: layers that they capture launch at the accelerator's own time, others do not."""
    accelerator = load_machine("gb200-nvl72").document.accelerator
    software = Software(operation_us=40.0)
    rates = compute_rates(accelerator, "bf16", software, cuda_graphs=("attn", "moe_router"))
    clock = ComputeClock(rates, 2.0, {}, PLAIN)

    def launch_us(layer: str, phase: Phase = "forward") -> float:
        return 1e6 * float(clock.call_s(Kernel(phase, layer, Size(1e-9))))

    for layer in ("attention.norm", "global.attention.core", "moe.router", "mlp.norm", "moe.shared_activation"):
        assert launch_us(layer) == pytest.approx(accelerator.kernel_launch_us)
    for layer in ("moe.activation", "mlp.activation", "moe.dispatch", "loss"):
        assert launch_us(layer) == pytest.approx(accelerator.kernel_launch_us + 40.0)
    assert launch_us("optimizer", "step") == pytest.approx(accelerator.kernel_launch_us + 40.0)
    every = replace(rates, captured=captured_layers(("full_iteration",)))
    clock = ComputeClock(every, 2.0, {}, PLAIN)
    assert launch_us("loss") == pytest.approx(accelerator.kernel_launch_us)
    assert launch_us("optimizer", "step") == pytest.approx(accelerator.kernel_launch_us + 40.0)
