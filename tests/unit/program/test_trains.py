"""A linear layer that does not train: what goes of a step, by its terms and bytes, and that nothing else does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.program import block, count, step
from axonn_tune.program.dimensions import model_flops, symbol_values
from axonn_tune.program.memory import memory_plan, price_memory
from axonn_tune.program.nodes import Branches, Gemm
from axonn_tune.program.operations import PLAIN, Collective, Kernel
from axonn_tune.program.step import FIRST, ONLY, Stage, build_step
from axonn_tune.program.types.experts import Grouped
from axonn_tune.recompute import MODULES
from axonn_tune.specs.workload import Workload
from tests.unit.program.test_mixtures import mixture

LAYERS, TOKENS, GRID = 4, 8 * 512, Grid(x=2, z=2, data=2)
WEIGHT = 2 * 512 * 256
"""Elements of the MLP's gated GEMM in, which does not train."""

Freeze = Callable[[str], None]


@pytest.fixture
def freeze(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Take the gradient of a layer's weight from every layer type."""
    every = block.kinds()

    def forget() -> None:
        count.counted.cache_clear()
        step._passes.cache_clear()

    def frozen(layer: str) -> None:
        def nodes(of: Any, given: Any) -> Any:
            listed = of.nodes(given)
            for one in listed:
                branches = one.branches if isinstance(one, Branches) else (((one,),),)
                for node in (node for branch in branches for part in branch for node in part):
                    if node.layer == layer and isinstance(node, Gemm | Grouped):
                        object.__setattr__(node, "trains", False)
            return listed

        forget()
        own = tuple(replace(kind, nodes=partial(nodes, kind)) for kind in every)
        monkeypatch.setattr(block, "kinds", lambda: own)

    yield frozen
    monkeypatch.undo()
    forget()


class Built:
    """A step with its terms in numbers, and its memory by item."""

    def __init__(
        self,
        framework: str,
        *,
        names: tuple[str, ...] = ("plain",),
        precision: Any = "bf16",
        recompute: str = "none",
        stage: Stage = ONLY,
    ) -> None:
        self.model, own = mixture(names), find_framework(framework)
        self.workload = Workload(global_batch=8, sequence_length=512, precision=precision)
        program = build_step(self.model, self.workload, recompute=recompute, options=own.step)
        options = own.step.in_format(precision)
        values = symbol_values(self.model, self.workload, GRID, micro_batch=1, options=options, stage=stage)
        for of in {kind.given.counted for kind in program.blocks} | {""}:
            blocks = values.get(f"L{of}", LAYERS)
            values |= {f"L{of}": blocks, f"kept{of}": 0.0, f"unkept{of}": blocks, f"held{of}": 2.0}
        self.terms = Counter[tuple[str, ...]]()
        for one, calls in program.calls(stage):
            size = one.flops if not isinstance(one, Collective | Kernel) else one.size_bytes
            kind = getattr(one, "layout", getattr(one, "axis", ""))
            words = (type(one).__name__, kind, getattr(one, "role", ""), one.phase, one.layer)
            self.terms[words] += int(size.evaluate(values) * calls.evaluate(values))
        memory = price_memory(program, values, limit_bytes=1e12, arithmetic=PLAIN, stage=stage)
        self.persistent = Counter[str]()
        for name, size in memory_plan(program, stage).persistent:
            self.persistent[name] += int(size.evaluate(values))
        self.total_bytes = memory.total_bytes
        self.flops = model_flops(self.model, self.workload)


DATA = ("Collective", "data", "data", "backward", "block")
NORM, UPDATE = (("Kernel", "", "", "step", name) for name in ("gradient_norm", "optimizer"))
GEMM, GATHER = ("MatMul", "TN", "", "backward", "mlp.fc1"), ("Collective", "x", "input_gather", "backward", "mlp.fc1")
NEW = ("Collective", "data", "parameters", "forward", "block")
SHARD = WEIGHT // 4
MICRO = LAYERS * 2
"""Blocks times micro-batches."""


@pytest.mark.parametrize(
    ("framework", "terms", "persistent"),
    [
        pytest.param(
            "megatron-core",
            {
                GEMM: 2 * WEIGHT * TOKENS * LAYERS // 8,
                GATHER: 2 * 512 * 256 * MICRO,
                ("Collective", "z", "weight_gradient", "backward", "mlp.fc1"): 4 * WEIGHT // 2 * MICRO,
                DATA: 4 * SHARD * LAYERS,
                NEW: 2 * SHARD * LAYERS,
                NORM: 4 * SHARD * LAYERS // 2,
                UPDATE: 30 * SHARD * LAYERS // 2,
            },
            {"master weights": 2, "optimizer moments": 4, "gradients": 4},
            id="ZeRO-1",
        ),
        pytest.param(
            "torchtitan",
            {
                GEMM: 2 * WEIGHT * TOKENS * LAYERS // 8,
                GATHER: 2 * 512 * 256 * MICRO,
                ("Collective", "z", "weight_gradient", "backward", "block"): 4 * WEIGHT // 2 * MICRO,
                ("Kernel", "", "", "backward", "block"): 12 * SHARD * MICRO,
                DATA: 4 * SHARD * MICRO,
                NORM: 4 * SHARD * LAYERS,
                UPDATE: 28 * SHARD * LAYERS,
            },
            {"optimizer moments": 8, "gradients": 4},
            id="FSDP2",
        ),
        pytest.param(
            "axonn-tune",
            {
                GEMM: 2 * WEIGHT * TOKENS * LAYERS // 8,
                ("Collective", "z", "weight_gradient", "backward", "mlp.fc1"): 2 * WEIGHT // 2 * MICRO,
                ("Kernel", "", "", "backward", "mlp.fc1"): 10 * SHARD * MICRO,
                DATA: 4 * SHARD * LAYERS,
                NORM: 4 * SHARD * LAYERS,
                UPDATE: 28 * SHARD * LAYERS,
            },
            {"optimizer moments": 8, "gradients": 4},
            id="all-reduce",
        ),
    ],
)
def test_only_what_is_for_a_gradient_goes(
    freeze: Freeze, framework: str, terms: dict[tuple[str, ...], int], persistent: dict[str, int]
) -> None:
    """Guards gradient, reduction, bucket, states and FLOPs of a weight that does not train, in bytes by hand; weights
    are gathered as before, and no other term or item moves. persistent: bytes of an element."""
    before = Built(framework)
    freeze("mlp.fc1")
    after = Built(framework)
    assert {name: size for name, size in (before.terms - after.terms).items() if size} == terms
    assert not after.terms - before.terms
    held = {name: size * SHARD * LAYERS for name, size in persistent.items()}
    assert dict(before.persistent - after.persistent) == held
    assert not after.persistent - before.persistent
    assert before.flops - after.flops == 2 * WEIGHT * TOKENS * LAYERS
    assert count.parameters(before.model) == count.parameters(after.model)


def test_an_operand_of_one_gemm_has_one_copy(freeze: Freeze) -> None:
    """Guards formats: without a weight gradient the output's gradient is quantized by rows alone; weights as before."""
    before = Built("megatron-core", precision="fp8-current")
    freeze("mlp.fc1")
    after = Built("megatron-core", precision="fp8-current")
    gone = {words[:1] + words[3:] for words in before.terms - after.terms}
    assert ("Kernel", "backward", "mlp.fc1") in gone
    assert ("Kernel", "forward", "mlp.fc1") in gone
    quantized = "Kernel", "", "", "backward", "mlp.fc1"
    rows = 512 * 512  # Tokens by outputs on a rank, of each a byte more for a copy by columns.
    assert before.terms[quantized] - after.terms[quantized] == rows * MICRO


def test_stages_hold_their_own(freeze: Freeze) -> None:
    """Guards stages of a pipeline: the first has its bucket and states of what trains alone."""
    before = Built("megatron-core", stage=FIRST)
    freeze("mlp.fc1")
    after = Built("megatron-core", stage=FIRST)
    assert before.terms[DATA] - after.terms[DATA] == 4 * SHARD * LAYERS
    assert before.persistent["gradients"] - after.persistent["gradients"] == 4 * SHARD * LAYERS


def test_experts_that_do_not_train(freeze: Freeze) -> None:
    """Guards grouped GEMMs: their bucket, their states and the tokens that only a weight gradient needs."""
    before = Built("megatron-core", names=("moe",))
    freeze("moe.fc1")
    after = Built("megatron-core", names=("moe",))
    bucket = "Collective", "expert_data", "data", "backward", "experts"
    assert after.terms[bucket] * 3 == before.terms[bucket]
    assert after.persistent["gradients of experts"] * 3 == before.persistent["gradients of experts"]
    assert after.persistent["compute weights of experts"] == before.persistent["compute weights of experts"]
    assert ("MatMul", "TN", "", "backward", "moe.fc1") not in after.terms
    assert after.total_bytes < before.total_bytes


@pytest.mark.parametrize("layer", ["mlp.fc1", "mlp.fc2", "attention.qkv", "attention.q_down", "moe.fc1", "mamba.in"])
def test_every_set_repeats_what_still_is_needed(freeze: Freeze, layer: str) -> None:
    """Guards lifetimes: an input that no gradient needs is not saved, but where something is repeated from it."""
    names = ("plain", "latent", "moe", "mamba")
    freeze(layer)
    for framework in ("megatron-core", "torchtitan", "axonn-tune"):
        for recompute in ("none", "selective", "full", "mlp", "mlp_act", ",".join(MODULES)):
            assert Built(framework, names=names, recompute=recompute).total_bytes > 0
    if layer == "mlp.fc1":
        saved, again = (Built("megatron-core", recompute=one).total_bytes for one in ("none", "mlp"))
        assert again < saved


def test_matrices_that_all_train_are_one_count() -> None:
    """Guards both counts of a model that trains whole: they are one."""
    assert [one.trained for one in count.counted(mixture(("plain", "moe")))] == [None, None]
