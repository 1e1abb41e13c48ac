"""Rates of GEMMs, and what communication beside it costs computation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from axonn_tune.cost.compute import ComputeClock, attention_time_s, compute_rates, contended_s, rate_of_matmul
from axonn_tune.cost.price import price
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.operations import COLUMNS, PLAIN, Kernel, Phase, Size, captured_layers
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.machine import Machine, Software
from axonn_tune.specs.workload import Workload


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


def test_attention_of_long_sequences_comes_nearer_to_what_its_kernels_do() -> None:
    """Guards rates by keys: as stated up to 8,192, then n / (n + ramp), in columns to the same bits.

    Between 4,096 and 16,384 tokens arXiv 2603.07685 (table 9) has 638 over 553 TFLOP/s forward and 523 over 422
    backward on Hopper, so 1.19 together; the reference lies between them.
    """
    rates = compute_rates(load_machine("dgx-h100").document.accelerator, "bf16")

    def taken(keys: float) -> float:
        flops, numbers = 1e13, PLAIN
        return (
            float(attention_time_s(flops, rates, backward=True, keys=keys, arithmetic=numbers)) - rates.kernel_launch_s
        )

    assert taken(512.0) == taken(8192.0)
    assert taken(8192.0) / taken(16384.0) == pytest.approx((1 + 1300 / 8192) / (1 + 1300 / 16384))
    assert taken(8192.0) / taken(1e12) == pytest.approx(1 + 1300 / 8192)
    keys = np.array([512.0, 16384.0, 131072.0])
    columns = attention_time_s(1e13, rates, backward=True, keys=keys, arithmetic=COLUMNS) - rates.kernel_launch_s
    assert [*columns] == [taken(one) for one in keys]
    flat = compute_rates(a100().accelerator, "bf16")
    assert flat.attention_ramp == 0
    assert attention_time_s(1e13, flat, backward=False, keys=131072.0, arithmetic=PLAIN) == attention_time_s(
        1e13, flat, backward=False, keys=512.0, arithmetic=PLAIN
    )


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
