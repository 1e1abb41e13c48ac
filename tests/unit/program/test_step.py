"""The program of one step, against counts and bytes worked out by hand."""

import pytest

from axonn_tune.frameworks.megatron_core import MEGATRON_CORE
from axonn_tune.grid import Grid
from axonn_tune.program.dimensions import loss_chunks, symbol_values
from axonn_tune.program.operations import kernel_set
from axonn_tune.program.step import build_step
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload

GRID = Grid(2, 4, 8, 2)
LAYERS, HIDDEN = 2, 192
NANO = Workload(global_batch=48 * 16, sequence_length=64)


def volumes(
    model: Model, workload: Workload, grid: Grid, *, recompute: Recompute, kept: float = 0.0, micro_batch: int = 4
) -> dict[tuple[str, str, str, str], tuple[float, float]]:
    """(count, bytes of one call) of every collective by (op, axis, phase, layer)."""
    values = symbol_values(model, workload, grid, micro_batch=micro_batch)
    values |= {"kept": kept, "unkept": model.layers - kept}
    return {
        (one.kind, one.axis, one.phase, one.layer): (
            float(count.evaluate(values)),
            float(one.size_bytes.evaluate(values)),
        )
        for one, count in build_step(model, workload, recompute=recompute).collectives()
    }


@pytest.fixture
def nano() -> Model:
    """The small GPT."""
    return load_model("nano").document


def test_each_weight_is_gathered_twice_a_micro_batch(nano: Model) -> None:
    """Guards the contract on gathers: forward, and once more for (recompute and) backward."""
    accumulation = NANO.global_batch / (8 * 2 * 4)
    for recompute in RECOMPUTES:
        found = volumes(nano, NANO, GRID, recompute=recompute)
        again = "recompute" if recompute == "full" else "backward"
        for layer, elements in {
            "attention.qkv": HIDDEN * 3 * HIDDEN,
            "attention.output": HIDDEN * HIDDEN,
            "mlp.fc1": HIDDEN * 4 * HIDDEN,
            "mlp.fc2": HIDDEN * 4 * HIDDEN,
        }.items():
            expected = (LAYERS * accumulation, 2 * elements / (2 * 4))
            assert found["all_gather", "z", "forward", layer] == expected
            assert found["all_gather", "z", again, layer] == expected
            assert found["reduce_scatter", "z", "backward", layer] == expected


def test_kept_layers_are_gathered_once(nano: Model) -> None:
    """Guards `kept_layers`: a kept layer's weights are not gathered for the backward pass."""
    found = volumes(nano, NANO, GRID, recompute="full", kept=1.0)
    assert found["all_gather", "z", "recompute", "mlp.fc1"][0] == 1 * NANO.global_batch / 64
    assert found["all_gather", "z", "forward", "mlp.fc1"][0] == 2 * NANO.global_batch / 64
    assert found["all_reduce", "y", "recompute", "mlp.fc1"][0] == 2 * NANO.global_batch / 64


def test_all_reduces_follow_the_layouts(nano: Model) -> None:
    """Guards axes and bytes: normal layers reduce O over y and dI over x, transposed ones the other way."""
    found = volumes(nano, NANO, GRID, recompute="none")
    tokens = 4 * 64
    assert found["all_reduce", "y", "forward", "attention.qkv"][1] == 2 * tokens * 3 * HIDDEN / 2
    assert found["all_reduce", "x", "backward", "attention.qkv"][1] == 2 * tokens * HIDDEN / 4
    assert found["all_reduce", "x", "forward", "mlp.fc2"][1] == 2 * tokens * HIDDEN / 4
    assert found["all_reduce", "y", "backward", "mlp.fc2"][1] == 2 * tokens * 4 * HIDDEN / 2
    assert found["all_gather", "y", "forward", "mlp.norm"][1] == 2 * 4 * tokens * 4
    assert found["all_reduce", "y", "backward", "mlp.norm"][1] == 2 * 4 * tokens


def test_full_recompute_skips_what_backward_does_not_need(nano: Model) -> None:
    """Guards the recompute phase: no output of fc2, no norm statistics."""
    found = volumes(nano, NANO, GRID, recompute="full")
    recomputed = {key for key in found if key[2] == "recompute" and key[0] == "all_reduce"}
    assert {layer for _, _, _, layer in recomputed} == {"attention.qkv", "attention.output", "mlp.fc1"}
    assert not [key for key in found if key[2] == "recompute" and key[1] == "y" and key[0] == "all_gather"]
    assert not [key for key in volumes(nano, NANO, GRID, recompute="selective") if key[2] == "recompute"]


def test_a_repeated_mlp_holds_what_it_gathers(nano: Model) -> None:
    """Guards the set `mlp`: fc1 is gathered and its output reduced once more, before fc2 is gathered for its gradients;
    where modules are checkpointed by themselves fc2 is repeated, too, and all is gathered again (Megatron-Core)."""
    found = volumes(nano, NANO, GRID, recompute="mlp")
    gathered = {(phase, layer) for kind, axis, phase, layer in found if (kind, axis) == ("all_gather", "z")}
    assert {("recompute", "mlp.fc1"), ("backward", "mlp.fc2")} <= gathered
    assert not {("backward", "mlp.fc1"), ("recompute", "mlp.fc2")} & gathered
    assert {key for key in found if key[0] == "all_reduce" and key[2] == "recompute"} == {
        ("all_reduce", "y", "recompute", "mlp.fc1")
    }
    program = build_step(nano, NANO, recompute="mlp", options=MEGATRON_CORE.step)
    linear = [
        (one.phase, one.layer) for one in program.blocks[0].backward.operations if getattr(one, "role", "") == "weight"
    ]
    assert linear[:4] == [
        (phase, f"mlp.fc{n}") for phase, n in (("recompute", 1), ("recompute", 2), ("backward", 2), ("backward", 1))
    ]


def test_data_gradients_go_once_a_step_in_main_precision(nano: Model) -> None:
    """Guards the data axis: one bucket a block with 4-byte gradients; sharded state scatters and gathers."""
    elements = HIDDEN * 12 * HIDDEN / (2 * 4 * 8)
    plain = volumes(nano, NANO, GRID, recompute="none")
    assert plain["all_reduce", "data", "backward", "block"] == (LAYERS, 4 * elements)
    sharded = NANO.model_copy(update={"shard_optimizer_over_data": True})
    found = volumes(nano, sharded, GRID, recompute="none")
    assert found["reduce_scatter", "data", "backward", "block"] == (LAYERS, 4 * elements)
    assert found["all_gather", "data", "step", "block"] == (LAYERS, 2 * elements)


def test_loss_never_holds_more_than_a_chunk_of_logits(nano: Model) -> None:
    """Guards the chunks of the loss: few, equal, small enough."""
    assert loss_chunks(64) == 1
    assert loss_chunks(8192) == 2
    assert loss_chunks(3 * 4099) == 4099
    long = NANO.model_copy(update={"global_batch": 48 * 512})
    found = volumes(nano, long, Grid(2, 4, 2, 2), recompute="none", micro_batch=192)
    chunks = 192 * 64 / 4096
    assert found["all_reduce", "xy", "forward", "loss.sums"] == (chunks * long.global_batch / (4 * 192), 8 * 4096)


def test_splitting_the_micro_batch_halves_messages_not_bytes(nano: Model) -> None:
    """Guards the split: activations in two halves, weights still gathered once."""
    split = NANO.model_copy(update={"split_micro_batch": True})
    whole, halves = (volumes(nano, one, GRID, recompute="none") for one in (NANO, split))
    count, size = whole["all_reduce", "y", "forward", "mlp.fc1"]
    assert halves["all_reduce", "y", "forward", "mlp.fc1"] == (2 * count, size / 2)
    assert halves["all_gather", "z", "forward", "mlp.fc1"] == whole["all_gather", "z", "forward", "mlp.fc1"]


def test_llama_has_one_norm_statistic_and_no_positions() -> None:
    """Guards the family switch: RMSNorm sends one number a token, rotary positions send nothing."""
    llama = load_model("nano-llama").document
    found = volumes(llama, NANO, GRID, recompute="none")
    assert found["all_gather", "y", "forward", "mlp.norm"][1] == 1 * 4 * 4 * 64 * 4
    assert not [key for key in found if key[3] == "position"]
    assert found["all_gather", "z", "forward", "mlp.fc1"][1] == 2 * llama.hidden * 2 * llama.ffn / 8


def test_unfused_rms_norms_go_step_by_step() -> None:
    """Guards frameworks without fused norms: six kernels forward and twelve backward for one, in FP32; a LayerNorm is
    one kernel anywhere."""
    stepwise = kernel_set("ideal", rms=True, gated=True, fused_norms=False)
    assert [one.kernels for one in (*stepwise.norm, *stepwise.again, *stepwise.back)] == [6, 6, 6, 6, 12, 12]
    for rms, fused in ((True, True), (False, False)):
        whole = kernel_set("ideal", rms=rms, gated=True, fused_norms=fused)
        assert [one.kernels for one in (*whole.norm, *whole.again, *whole.back)] == [1] * 6
