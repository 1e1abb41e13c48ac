"""Optimizers by hand: what they keep, move and compute of a matrix, on which ranks, and how a step follows."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import axonn_tune as tune
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework, registry
from axonn_tune.frameworks.keys import table, tables_of
from axonn_tune.frameworks.optimizers import optimizers
from axonn_tune.frameworks.step import OptimizerOptions, StepOptions
from axonn_tune.grid import Grid
from axonn_tune.program.count import counted, parameters
from axonn_tune.program.dimensions import executed_flops, symbol_values
from axonn_tune.program.inputs import LayerInputs
from axonn_tune.program.memory import persistent_items
from axonn_tune.program.step import build_step
from axonn_tune.program.update import update_of
from axonn_tune.program.whole import Matrix, Work, _packed, _touched, gemms, matrices_of, work_of
from axonn_tune.specs.catalog import available, load_model
from axonn_tune.specs.workload import ELEMENT_SIZES, Workload
from axonn_tune.units import GIB, show_seconds
from axonn_tune.vocabulary import OPTIMIZERS

TALL = Matrix("fc1", 4096.0, 1024.0, "rows")
SQUARE = Matrix("proj", 1024.0, 1024.0, "columns")
WIDE = Matrix("fc2", 768.0, 2048.0, "columns")
LLAMA = load_model("llama3-8b").document


def flops_of(work: Work) -> float:
    """FLOPs of one matrix."""
    s, b = work.small, work.large
    return 2.0 * (work.products * s * s * b + work.squares * s**3 + work.applied * s * s * b)


def test_the_table_has_the_names_that_options_take() -> None:
    """Guards the words of `--optimizer` against the rows behind them."""
    assert tuple(optimizers()) == OPTIMIZERS


@pytest.mark.parametrize(
    ("matrix", "standard", "gram"),
    [
        # 5·(4·s²·b + 2·s³); on the Gram matrix 8·s²·b + 28·s³.
        (TALL, 5 * (4 * 1024**2 * 4096 + 2 * 1024**3), 8 * 1024**2 * 4096 + 28 * 1024**3),
        (SQUARE, 5 * 6 * 1024**3, 5 * 6 * 1024**3),
        (WIDE, 5 * (4 * 768**2 * 2048 + 2 * 768**3), 8 * 768**2 * 2048 + 28 * 768**3),
    ],
)
def test_newton_schulz_of_a_matrix_by_hand(matrix: Matrix, standard: int, gram: int) -> None:
    """Guards FLOPs of both forms of the iteration."""
    for form, flops in (("standard", standard), ("gram", gram)):
        (work,), _ = work_of(((matrix, 1),), OptimizerOptions(muon_form=form), x=1, z=1, replicas=1)
        assert flops_of(work) == flops
    assert gemms("standard", 10, square=False) == (10, 10, 10), "DeepSeek-V4's ten iterations"


@pytest.mark.parametrize(
    ("name", "states", "moved", "of_vectors"),
    [
        # Gradient, weight read and written, states read and written, each in FP32; a BF16 weight comes to it.
        ("adamw", 8.0, 28.0, 8.0),
        ("adamw-8bit", 2.03125, 16.0625, 8.0),
        ("sgd", 4.0, 20.0, 4.0),
        ("lion", 4.0, 20.0, 4.0),
        ("adafactor", 0.0, 12.0, 4.0),
        ("muon", 4.0, 20.0, 8.0),
    ],
)
def test_states_and_bytes_of_a_parameter_by_hand(name: str, states: float, moved: float, of_vectors: float) -> None:
    """Guards what optimizers keep and move; Muon moves more by kernels of its own, a matrix at a time."""
    given = LayerInputs(LLAMA, ELEMENT_SIZES["bf16"], StepOptions(optimizer=name))
    assert (update_of(given).state_bytes, update_of(given).moved_bytes) == (states, moved)
    assert update_of(given, vectors=True).state_bytes == of_vectors


def test_modes_of_shards_by_hand() -> None:
    """Guards what each of four ranks iterates on, gathers and sums, of a matrix that they split, alone and in turn."""
    options = {mode: OptimizerOptions(muon_tp_mode=mode) for mode in ("duplicated", "distributed", "blockwise")}
    found = {mode: work_of(((TALL, 8),), one, x=4, z=1, replicas=1)[0][0] for mode, one in options.items()}
    assert found["duplicated"][:5] == (1024.0, 4096.0, 4096.0 * 1024.0, 8.0, 8.0)
    assert (found["duplicated"].gathers_x, found["duplicated"].gathers_z) == (8.0, 0.0)
    # Along the rows, that x splits: the Gram matrix has the columns.
    assert (found["distributed"].small, found["distributed"].large, found["distributed"].grams_x) == (
        1024.0,
        1024.0,
        40.0,
    )
    assert (found["blockwise"].small, found["blockwise"].large, found["blockwise"].gathers_x) == (1024.0, 1024.0, 0.0)
    (wide,), _ = work_of(((WIDE, 1),), options["distributed"], x=1, z=8, replicas=1)
    assert (wide.small, wide.large, wide.grams_z) == (2048.0, 96.0, 5.0), "a cut of the short side makes the other s"
    (both,), _ = work_of(((TALL, 1),), options["distributed"], x=2, z=8, replicas=1)
    assert (both.small, both.large, both.gathers_x, both.grams_z) == (1024.0, 512.0, 1.0, 5.0)
    sharded = OptimizerOptions(muon_tp_mode="layer_sharded")
    (turn,), states = work_of(((TALL, 8),), sharded, x=4, z=1, replicas=1)
    assert (turn.owned, turn.updated, states) == (2.0, 8.0, 8 * 1024 * 1024)
    # Ten of one kind, then three of another from the third rank on, on four ranks of z; x and y gather.
    bundled = replace(sharded, muon_tp_mode="in_turn", muon_gathered=True)
    (tall, small), states = work_of(((TALL, 10), (SQUARE, 3)), bundled, x=2, y=2, z=4, replicas=5)
    assert (tall.owned, tall.turns, tall.last, tall.left, tall.gathers_x, tall.gathers_y) == (
        3.0,
        4.0,
        2.0,
        2.0,
        3.0,
        3.0,
    )
    assert (small.owned, small.turns, small.last, small.left, small.at_once) == (1.0, 0.0, 2.0, 3.0, 3.0)
    assert states == (10 * 4 + 3) * 1024**2 / (4 * 4 * 5)


def test_owners_are_packed_longest_first() -> None:
    """Guards the packing in bulk against one matrix after the other, and that no load is 4/3 of the best or more."""
    drawn = random.Random(47)
    for _ in range(60):
        kinds = [Matrix(str(k), float(drawn.randint(1, 40)), float(drawn.randint(1, 40)), "") for k in range(4)]
        counted, ranks = tuple((one, drawn.randint(0, 30)) for one in kinds), drawn.randint(1, 12)
        loads = [0.0] * ranks
        for one in sorted((one for one, count in counted for _ in range(count)), key=lambda one: -one.cost):
            loads[loads.index(min(loads))] += one.cost
        packed = _packed(counted, ranks)
        assert packed.sum(axis=1).tolist() == [count for _, count in counted]
        own = sorted(sum(one.cost * packed[k, rank] for k, one in enumerate(kinds)) for rank in range(ranks))
        assert own == pytest.approx(sorted(loads))
        least = max(sum(loads) / ranks, *(one.cost * (count > 0) for one, count in counted))
        assert own[-1] <= 4 / 3 * least * (1 + 1e-12) or own[-1] <= least + max(one.cost for one, n in counted if n)


def test_partitions_by_elements_touch_matrices_that_they_cut() -> None:
    """Guards DeepSpeed's ranks: three quarters of four equal matrices cut two of them, and a whole each cuts none."""
    counted = ((SQUARE, 4),)
    assert _touched(counted, 4).tolist() == [[1, 1, 1, 1]]
    assert _touched(counted, 3).tolist() == [[2, 2, 2]]
    assert _touched(counted, 8).tolist() == [[1] * 8]
    (work,), states = work_of(counted, OptimizerOptions(muon_cut=True), x=1, z=1, replicas=3)
    assert (work.owned, states) == (2.0, 4 * 1024**2 / 3)


def test_a_step_has_the_flops_and_states_of_all_its_matrices() -> None:
    """Guards Llama-3 8B on eight replicas: 32 layers of queries, keys, values, output, gate with up, and down; the rank
    with most has four layers, and AdamW's states of a share of the rest."""
    matrices = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    workload, grid = Workload(global_batch=64, sequence_length=4096), Grid(data=8)
    step = find_framework("megatron-core").step
    flops, held = {}, {}
    for name in ("adamw", "muon"):
        options = replace(step, optimizer=name)
        program = build_step(LLAMA, workload, recompute="none", options=options)
        values = symbol_values(LLAMA, workload, grid, micro_batch=1, options=options)
        values |= {"held": values["L"], "kept": 0.0, "unkept": values["L"]}
        flops[name] = executed_flops(program, values)
        held[name] = sum(
            size.evaluate(values) for kind, size in persistent_items(program.given) if kind in ("optimizer moments",)
        )
    each = sum(5 * (4 * min(one) ** 2 * max(one) + 2 * min(one) ** 3) for one in matrices)
    assert flops["muon"] - flops["adamw"] == 4 * each
    assert held["adamw"] - held["muon"] == pytest.approx(4 * 4 * sum(m * n for m, n in matrices))


@pytest.mark.parametrize("apart", [False, True])
def test_matrices_are_all_of_a_model(apart: bool) -> None:
    """Guards every shipped model: matrices of a block have the elements that are counted as its parameters."""
    for name in available("model"):
        model = load_model(name).document
        every = matrices_of(model, sequence_parallel=False, apart_gate=apart)
        for one, several in zip(counted(model), every, strict=True):
            plain, routed = (sum(each.elements for each in several if each.routed == own) for own in (False, True))
            assert plain == pytest.approx(one.split + one.over_x + one.over_y), name
            assert routed == one.each, name


def test_a_search_prices_whole_matrices_as_a_layout_alone() -> None:
    """Guards columns of candidates against numbers, with stages and experts; and that no pin makes the first faster."""
    asked = {"gpus": 64, "model": "mixtral-8x7b", "machine": "dgx-h100", "framework": "megatron-core"}
    found = tune.search(**asked, set=["step.optimizer=muon"], batch=256, micro_batch=1, tensor_model_parallel_size=2)
    first = found.best
    assert found.ranked.detail(0).iteration_s == first.iteration_s
    assert found.ranked.detail(1).memory_bytes == found[1].memory_bytes


def test_auto_says_each_optimizer_beside_the_default_s_ranking() -> None:
    """Guards that optimizers are compared by their best layouts and never in one ranking, and that others refuse it."""
    asked = {"gpus": 8, "model": "llama3-8b", "machine": "dgx-h100", "framework": "megatron-core", "batch": 64}
    asked |= {"tensor_model_parallel_size": 8}
    found, plain, muon = (tune.search(**asked, optimizer=one) for one in ("auto", None, "muon"))
    assert found.best == plain.best
    said = next(one for one in found.remarks if one.startswith("Best layouts by optimizer"))
    names = tuple(find_framework("megatron-core").optimizers)
    assert all(f" {name} " in said for name in names)
    assert f"muon {show_seconds(muon.best.iteration_s)}, {muon.best.memory_bytes / GIB:.1f} GiB" in said
    with pytest.raises(UsageError, match="a search compares " + ", ".join(names)):
        tune.explain(**asked, optimizer="auto")


@pytest.mark.parametrize("name", [one.name for one in registry().values() if one.launch and len(one.optimizers) > 1])
def test_an_optimizer_of_a_framework_has_a_word(name: str) -> None:
    """Guards that what is priced of a framework can be read, by a row of its own tables or of those beside them."""
    keys = [key for one in tables_of(name) for key in table(one) if key.field == "step.optimizer"]
    assert {*registry()[name].optimizers} <= {word for key in keys for word in key.meanings.values()}


@pytest.mark.parametrize(
    ("framework", "options", "words"),
    [
        ("megatron-core", {"precision": "fp16"}, "needs --precision bf16"),
        ("megatron-core", {"use_precision_aware_optimizer": "bf16"}, "is AdamW's"),
        ("megatron-core", {"set": ["step.offloaded=moments"]}, "stay on the GPU"),
        ("axonn", {}, "frameworks that do: axonn-tune, megatron-core"),
    ],
)
def test_what_muon_does_not_go_with_is_refused(framework: str, options: dict[str, Any], words: str) -> None:
    """Guards restrictions of releases, by name."""
    with pytest.raises(UsageError, match=words):
        tune.search("llama3-8b", 8, machine="dgx-h100", framework=framework, optimizer="muon", **options)


def test_states_are_in_the_type_of_16_bit_weights() -> None:
    """Guards SGD of weights in BF16, as torchtune has it, which was refused: a momentum is of 2 bytes, not of 4."""
    asked: dict[str, Any] = {"machine": "dgx-h100", "framework": "fsdp", "optimizer": "sgd", "batch": 64, "z": 8}
    asked |= {"micro_batch": 1, "recompute": "full", "kept_layers": 0}
    narrow, wide = (
        tune.search("llama3-8b", 8, set=["step.master_bytes=2", f"step.exp_avg_bytes={size}"], **asked).best
        for size in (2, 4)
    )
    share = parameters(LLAMA) / 8
    assert wide.memory_bytes - narrow.memory_bytes == pytest.approx(2 * share, rel=0.01)


def test_layouts_that_an_optimizer_excludes_are_not_ranked(tmp_path: Path) -> None:
    """Guards DeepSpeed's Muon, whose ZeRO-3 orthogonalizes in each micro-batch, and modes that no release has."""
    found = tune.search("llama3-8b", 8, machine="dgx-h100", framework="deepspeed", optimizer="muon", batch=64)
    assert {row.grid.z for row in found} == {1}
    core = tune.search(
        "llama3-8b", 8, machine="dgx-h100", framework="megatron-core", optimizer="muon", batch=64,
        x=8, set=["step.muon_tp_mode=layer_sharded"],
    )  # fmt: skip
    with pytest.raises(UsageError, match="no release has it"):
        core.write_launch_config(tmp_path / "run.yaml")
