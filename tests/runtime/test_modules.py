"""Functions of local tensors, against torch's own in higher precision; each fast way beside the plain one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as functional

from axonn_tune.grid import Grid
from axonn_tune.runtime import modules, tables
from axonn_tune.runtime.communicator import Communicator, WeightGathers, WeightGradients
from axonn_tune.runtime.devices import COMPILE_STATIC, RuntimeSettings
from axonn_tune.runtime.experts import ExpertFunctions, balanced
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.modules import Dropout, Norm, activation, attention_core, compiled
from axonn_tune.runtime.parameters import ParameterStore
from axonn_tune.runtime.philox import key_of
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model
from tests.runtime import tasks
from tests.runtime.pool import Pools

TOKENS, HIDDEN, SHARE = 24, 96, 0.25
CPU = torch.device("cpu")
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


def settings(compute: torch.dtype, *, compiler: Compiler | None = None) -> RuntimeSettings:
    """Without overlap; all else than the compute type at least FP32."""
    wide, compiles = torch.promote_types(compute, torch.float32), compiler is not None
    kinds = compute, wide, wide
    return RuntimeSettings(*kinds, frozenset(), "none", 0, CPU, compile=compiles, compiler=compiler or COMPILE_STATIC)


@pytest.mark.parametrize("repeats", [1, 4096])
def test_frequent_tokens_keep_their_gradient(repeats: int) -> None:
    """Guards embeddings in BF16: rounding each of 4,096 sums would lose three quarters of the gradient."""
    gradient = torch.full((repeats + 1, 8), 0.01, dtype=torch.bfloat16)
    rows = torch.zeros(repeats + 1, dtype=torch.int64)
    rows[-1] = 2
    found = tables.sums_of_rows(gradient, rows, 4)
    exact = torch.zeros(4, 8, dtype=torch.float64).index_add_(0, rows, gradient.double())
    assert torch.allclose(found.double(), exact, rtol=2**-8)


def test_chunks_of_the_loss_cost_the_heads_gradient_no_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the sum of chunks in BF16: 16 of them, 65,536 tokens, are no worse than BF16 makes the whole model's."""
    small = {"layers": 1, "hidden": 64, "heads": 8, "kv_heads": 8, "ffn": 64}
    model, chance = load_model("nano-llama").document.model_copy(update=small), torch.Generator().manual_seed(1)
    # The same numbers in both types.
    x = torch.randn(8192, model.hidden, generator=chance).bfloat16()
    targets = torch.randint(0, model.vocab, (8192,), generator=chance)

    def gradient(dtype: torch.dtype, chunks: int) -> torch.Tensor:
        communicator, on = Communicator(build_mesh(Grid()), Ledger()), settings(dtype)
        head = Transformer(model, communicator, on, sequence=64, seed=0).head
        assert head is not None
        head.table.value.copy_(head.table.value.bfloat16())
        monkeypatch.setattr(tables, "loss_chunks", lambda tokens: chunks)
        gathers = WeightGathers(communicator, on, [(head.table, "forward", "head")])
        head.forward_backward(x.to(dtype), targets, gathers, WeightGradients(communicator, on), scale=1 / 8192)
        return head.table.gradient.double()

    right = gradient(torch.float64, 1)
    one, four, sixteen = (
        float((gradient(torch.bfloat16, chunks) - right).norm() / right.norm()) for chunks in (1, 4, 16)
    )
    assert one < four < sixteen < 0.006
    assert four < 1.3 * one


@pytest.mark.parametrize(("compute", "most"), [(torch.float64, 1e-13), (torch.bfloat16, 0.02)], ids=str)
def test_torchs_norm_is_the_norm_written_out(compute: torch.dtype, most: float) -> None:
    """Guards both ways: output, gradient of the input, of weight and of bias. Compiled, it is written out."""
    chance, found = torch.Generator().manual_seed(4), []
    x, gradient = (torch.randn(TOKENS, HIDDEN, generator=chance).to(compute) for _ in range(2))
    offsets = [torch.randn(HIDDEN, generator=chance) for _ in range(2)]
    for compiler in (None, lambda function: function):
        on, mesh = settings(compute, compiler=compiler), build_mesh(Grid())
        store = ParameterStore(mesh, 0, on.master, CPU)
        weight, bias = (store.vector(name, HIDDEN, "y", value=1.0) for name in ("weight", "bias"))
        for vector, offset in zip((weight, bias), offsets, strict=True):
            vector.value += offset.to(on.master)
        norm = Norm("norm", HIDDEN, weight, bias, Communicator(mesh, Ledger()), on)
        _, output, statistics = norm.forward(x)
        assert torch.equal(output, norm.apply(x, statistics))
        found.append((output, norm.backward(x, statistics, gradient), weight.gradient, bias.gradient))
    for fast, plain in zip(*found, strict=True):
        assert fast.dtype == plain.dtype
        assert float((fast - plain).abs().max()) <= most * float(plain.abs().max())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Of torch, at its own functions.
def test_compiled_functions_are_the_plain_ones() -> None:
    """Guards what GPUs run, here through the compiler's way for CPUs."""
    chance = torch.Generator().manual_seed(5)
    x, gradient, logits = (torch.randn(TOKENS, HIDDEN, generator=chance).bfloat16() for _ in range(3))
    weight, bias = (torch.randn(HIDDEN, generator=chance) for _ in range(2))
    statistics = x.float().mean(-1, keepdim=True), torch.ones(TOKENS, 1)
    for function, arguments in [
        (modules.normalized, (x, statistics[1:], weight, None)),
        (modules.whole_norm, (x, None, weight, bias, torch.float32)),
        (modules.whole_gradient, (x, statistics, weight, gradient, gradient)),
        (modules.gradient_sums, (x, statistics, weight, gradient)),
        (tables.exponential_sums, (logits, torch.float32)),
    ]:
        fast = compiled(function, settings(torch.bfloat16, compiler=COMPILE_STATIC))(*arguments)
        torch.testing.assert_close(fast, function(*arguments), rtol=1e-2, atol=1e-4)


def test_attention_in_a_wider_type_is_as_exact() -> None:
    """Guards what bf16 becomes on CPUs: nearer to fp64 than torch's own, forward and backward."""
    chance, core = torch.Generator().manual_seed(6), attention_core(settings(torch.bfloat16))
    inputs = [torch.randn(2, 3, 16, 8, generator=chance).bfloat16() for _ in range(3)]

    def results(run: Callable[..., torch.Tensor], kind: torch.dtype) -> list[torch.Tensor]:
        own = [one.to(kind).requires_grad_() for one in inputs]
        output = run(*own, is_causal=True)
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


def test_dropout_drops_a_share_and_keeps_the_mean() -> None:
    """Guards share and scale: a quarter is gone, the others are four thirds; another layer or later tokens by chance.

    That it is the same on every grid, `test_equivalence` checks.
    """

    def kept(name: str, tokens: range) -> torch.Tensor:
        dropout = Dropout(SHARE, torch.tensor(key_of(0, f"dropout.{name}")), range(HIDDEN), HIDDEN, modules.dropped)
        return dropout(torch.ones(len(tokens), HIDDEN, dtype=torch.float64), torch.arange(tokens.start, tokens.stop))

    first = kept("embedding", range(4096))
    assert set(first.unique().tolist()) == {0.0, 1 / (1 - SHARE)}
    deviation = (SHARE * (1 - SHARE) / first.numel()) ** 0.5
    assert float((first == 0).double().mean()) == pytest.approx(SHARE, abs=5 * deviation)
    alike = SHARE**2 + (1 - SHARE) ** 2
    for other in (kept("blocks.0.mlp.fc2", range(4096)), kept("embedding", range(4096, 8192))):
        assert float(((first == 0) == (other == 0)).double().mean()) == pytest.approx(alike, abs=0.01)


def test_forced_load_balancing_gives_ranks_as_many_tokens() -> None:
    """Guards measured layouts: of any eight tokens in a row each of 2, 4 and 8 ranks gets as many, of a token's experts
    none twice, and of a whole turn each expert has as many."""
    (given,) = (layer.experts for layer in load_model("nano-moe").document.types if layer.experts is not None)
    found = balanced(torch.arange(96), given)
    for ranks in (2, 4, 8):
        held = found.view(12, -1) // (given.count // ranks)
        assert {tuple(torch.bincount(chunk).tolist()) for chunk in held} == {(16 // ranks,) * ranks}
    assert (found[:, 0] != found[:, 1]).all()
    assert set(torch.bincount(found.flatten()).tolist()) == {96 * 2 // given.count}


def test_rows_of_experts_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards steps under natural routing, which sends a rank other numbers of rows each time: eight compilations of a
    function, and torch runs it operator by operator from then on."""
    built: list[torch.fx.GraphModule] = []

    def build(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        built.append(graph)
        return graph.forward

    compiler = partial(torch.compile, dynamic=False, backend=build)
    monkeypatch.setattr(modules, "COMPILE_STATIC", compiler)
    given = settings(torch.bfloat16, compiler=compiler)
    local, functions = activation(given, gated=True, varying=True), ExpertFunctions.of(given, varying=True)
    for rows in (100, 117, 256, 33):
        up, probabilities = torch.randn(rows, 16, dtype=torch.bfloat16), torch.rand(rows)
        active, backward = local(up, "forward")
        right = modules.swiglu(up)
        assert torch.equal(active, right)
        weighted = functions.scaled(active, probabilities)
        shares, gradient = functions.scaled_gradient(weighted, active, probabilities)
        assert torch.equal(gradient, (weighted * probabilities[:, None]).to(torch.bfloat16))
        assert shares.shape == (rows,)
        assert torch.equal(backward(gradient), modules.swiglu_gradient(up, gradient))
        assert len(built) == 4


def test_a_rank_that_no_token_reaches_computes_nothing() -> None:
    """Guards natural routing at its worst: experts of a rank may get no row at all, and the step goes on."""
    given = settings(torch.float32)
    local, functions = activation(given, gated=True), ExpertFunctions.of(given, varying=True)
    active, backward = local(torch.empty(0, 16), "forward")
    weighted = functions.scaled(active, torch.empty(0))
    shares, gradient = functions.scaled_gradient(weighted, active, torch.empty(0))
    assert (active.shape, shares.shape, backward(gradient).shape) == ((0, 8), (0,), (0, 16))
