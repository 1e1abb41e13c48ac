"""Each fast way beside its plain twin: torch's LayerNorm, the compiler, wide attention, split optimizer state."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
import torch.nn.functional as functional

from axonn_tune.grid import Grid
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.modules import (
    Norm,
    attention_core,
    compiled,
    exponential_sums,
    gradient_sums,
    interleave,
    normalized,
    whole_gradient,
    whole_norm,
)
from axonn_tune.runtime.parameters import ParameterStore
from tests.runtime import tasks
from tests.runtime.pool import Pools

TOKENS, HIDDEN = 24, 96
CPU = torch.device("cpu")


def settings(compute: torch.dtype, main: torch.dtype) -> RuntimeSettings:
    """Without overlap."""
    return RuntimeSettings(compute, main, main, frozenset(), "none", 0, CPU)


def norm(compute: torch.dtype, main: torch.dtype, *, native: bool) -> Norm:
    """A LayerNorm whose weight and bias are not those it begins with."""
    mesh = build_mesh(Grid())
    store, chance = ParameterStore(mesh, 0, main, CPU), torch.Generator().manual_seed(3)
    weight, bias = (store.vector(name, HIDDEN, "y", value=1.0) for name in ("weight", "bias"))
    for one in (weight, bias):
        one.value += torch.randn(HIDDEN, generator=chance).to(main)
    return Norm("norm", HIDDEN, weight, bias, Communicator(mesh, Ledger()), settings(compute, main), native=native)


@pytest.mark.parametrize(
    ("compute", "main", "most"), [(torch.float64, torch.float64, 1e-13), (torch.bfloat16, torch.float32, 0.02)], ids=str
)
def test_torchs_norm_is_the_norm_written_out(compute: torch.dtype, main: torch.dtype, most: float) -> None:
    """Guards both ways: output, gradient of the input, of weight and of bias."""
    chance = torch.Generator().manual_seed(4)
    x, gradient = (torch.randn(TOKENS, HIDDEN, generator=chance).to(compute) for _ in range(2))
    found = []
    for native in (True, False):
        one = norm(compute, main, native=native)
        _, output, statistics = one.forward(x)
        assert torch.equal(output, one.apply(x, statistics))
        assert one.bias is not None
        found.append((output, one.backward(x, statistics, gradient), one.weight.gradient, one.bias.gradient))
    for fast, plain in zip(*found, strict=True):
        assert fast.dtype == plain.dtype
        assert float((fast - plain).abs().max()) <= most * float(plain.abs().max())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of torch, at its own functions.
def test_compiled_functions_are_the_plain_ones() -> None:
    """Guards what GPUs run, here through the compiler's way for CPUs."""
    chance = torch.Generator().manual_seed(5)
    x, gradient = (torch.randn(TOKENS, HIDDEN, generator=chance).bfloat16() for _ in range(2))
    weight, bias = (torch.randn(HIDDEN, generator=chance) for _ in range(2))
    statistics = x.float().mean(-1, keepdim=True), torch.ones(TOKENS, 1)
    logits = torch.randn(TOKENS, HIDDEN, generator=chance).bfloat16()
    on = RuntimeSettings(*vars(settings(torch.bfloat16, torch.float32)).values())
    object.__setattr__(on, "compile", True)
    for function, arguments in [
        (normalized, (x, statistics[1:], weight, None)),
        (whole_norm, (x, None, weight, bias, torch.float32)),
        (whole_gradient, (x, statistics, weight, gradient, gradient)),
        (gradient_sums, (x, statistics, weight, gradient)),
        (exponential_sums, (logits, torch.float32)),
    ]:
        fast, plain = compiled(function, on)(*arguments), function(*arguments)
        for one, other in zip(
            *([each] if isinstance(each, torch.Tensor) else each for each in (fast, plain)), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)


def test_attention_in_a_wider_type_is_as_exact() -> None:
    """Guards what bf16 becomes on CPUs: nearer to fp64 than torch's own, forward and backward."""
    chance, core = torch.Generator().manual_seed(6), attention_core(settings(torch.bfloat16, torch.float32))
    inputs = [torch.randn(2, 3, 16, 8, generator=chance).bfloat16() for _ in range(3)]

    def results(run: object, kind: torch.dtype) -> list[torch.Tensor]:
        own = [one.to(kind).requires_grad_() for one in inputs]
        output = run(*own, is_causal=True)  # type: ignore[operator]
        return [output, *torch.autograd.grad(output.double().square().sum(), own)]

    exact = results(functional.scaled_dot_product_attention, torch.float64)
    wide, plain = results(core, torch.bfloat16), results(functional.scaled_dot_product_attention, torch.bfloat16)
    for one, other, truth in zip(wide, plain, exact, strict=True):
        assert one.dtype == torch.bfloat16
        assert (one - truth).abs().max() <= 1.1 * (other - truth).abs().max()


def test_split_optimizer_state_changes_no_bit(pools: Pools) -> None:
    """Guards bf16 with FP32 master weights: where state lies does not matter. Two ranks: more sum in another order."""
    found = [pools(2).run(tasks.trained_in_bf16, Grid(data=2), split)[0] for split in (False, True)]
    assert found[0]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_passes_of_different_lengths_keep_their_results() -> None:
    """Guards halves that might one day not wait equally often."""

    def waiting(times: int) -> Generator[None, None, int]:
        for _ in range(times):
            yield
        return times

    assert interleave([waiting(1), waiting(3)]) == [1, 3]
