"""The peak memory of a step of rank 0 on tensors without data, against what is predicted of it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import axonn_tune
from axonn_tune.cost.price import price
from axonn_tune.errors import NothingFeasibleError
from axonn_tune.job import Layout
from axonn_tune.recompute import MODULES, RECOMPUTES
from axonn_tune.runtime.dry_run import dry_run, require_memory
from axonn_tune.specs.catalog import load_model

FIRST_RUNS = {
    "llama3-8b on 8 H100": ("llama3-8b", {"gpus": 8, "machine": "dgx-h100", "rank_by": "step"}),
    "80b on 1024 A100": ("80b", {"gpus": 1024}),
    "nano on this host, without a compiler": ("nano", {"gpus": 1, "machine": "localhost"}),
    "llama3-70b on 64 H100": ("llama3-70b", {"gpus": 64, "machine": "dgx-h100", "rank_by": "step"}),
    "20b on 64 A100": ("20b", {"gpus": 64}),
    "5b on 32 A100": ("5b", {"gpus": 32}),
    "gpt3-175b on 256 A100": ("gpt3-175b", {"gpus": 256, "machine": "dgx-a100"}),
    "80b on 1024 A100, x = 2": ("80b", {"gpus": 1024, "x": 2}),
    "80b on 1024 A100, y = 2": ("80b", {"gpus": 1024, "y": 2}),
}
"""Requests of the first minute, whose launch configs must fit on the first try; the first three run each time."""
SPLITS = [(1, 1, 8), (2, 1, 4), (1, 2, 4), (2, 2, 1), (4, 2, 1)]
DAILY = [
    *(("5b", SPLITS[0], "none", None), ("5b", SPLITS[1], "selective", None), ("5b", SPLITS[4], "full", None)),
    *(("llama3-8b", SPLITS[2], "full", None), ("llama3-8b", SPLITS[3], "none", None), ("5b", SPLITS[2], "mlp", None)),
    *(("llama3-8b", SPLITS[0], "layernorm,mlp", None), ("5b", SPLITS[1], "core_attn,mlp_act", 5)),
    *(("5b", SPLITS[1], "full", 2), ("llama3-8b", SPLITS[2], "mlp", 5)),
]
KINDS = (
    *RECOMPUTES,
    *(name for name, one in MODULES.items() if not one.needs),
    "core_attn,mlp_act",
    "core_attn,mlp",
    "layernorm,mlp",
)
WITHIN, WITHIN_SMALL = 0.03, 0.015


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=[] if number < 3 else pytest.mark.nightly) for number, one in enumerate(FIRST_RUNS)],
)
def test_a_first_run_fits_as_predicted(name: str) -> None:
    """Guards the launch configs of ordinary requests: within 3% of their predictions, under the limit.

    What they send is what the program says, or the dry run fails. Where an edited one needs more than there is, the
    error says what is missing.
    """
    model, options = FIRST_RUNS[name]
    launch = axonn_tune.search(model, **options).launch_config()
    _, peak_bytes = dry_run(launch)
    require_memory(launch, peak_bytes)
    assert peak_bytes == pytest.approx(launch.predicted.memory_bytes, rel=WITHIN)
    little = launch.predicted.model_copy(update={"memory_limit_bytes": peak_bytes - 2.0**30})
    with pytest.raises(NothingFeasibleError, match="by 1 GiB: use a smaller micro_batch"):
        require_memory(launch.model_copy(update={"predicted": little}), peak_bytes)


@pytest.mark.parametrize(
    ("model", "split", "recompute", "some"),
    [
        pytest.param(*one, marks=[] if one in DAILY else pytest.mark.nightly)
        for one in itertools.product(("5b", "llama3-8b"), SPLITS, KINDS, (None, 2, 5))
    ],
)
def test_memory_is_that_of_the_program(
    model: str, split: tuple[int, int, int], recompute: str, some: int | None
) -> None:
    """Guards the memory model: GPT and Llama with grouped heads, every recompute, on all layers or the first, split,
    layers not resharded."""
    given = dict(zip("xyz", split, strict=True), gpus=8, machine="dgx-h100", recompute=recompute, micro_batch=1)
    given |= {"kept_layers": 2 if given["z"] == 4 else 0, "set": {"model.layers": 6}}
    found = axonn_tune.search(model, **given)
    launch = found.launch_config().model_copy(update={"recompute_layers": some})
    _, peak_bytes = dry_run(launch)
    predicted = price(found.inputs.problem, Layout.of(launch))
    assert peak_bytes == pytest.approx(predicted.memory_bytes, rel=WITHIN_SMALL)


@pytest.mark.parametrize(
    ("model", "context", "z", "recompute"),
    [
        ("llama3-8b", 4, 2, "selective"),
        *(pytest.param("5b", 2, 4, one, marks=pytest.mark.nightly) for one in RECOMPUTES),
    ],
)
def test_memory_with_context_parallelism(model: str, context: int, z: int, recompute: str) -> None:
    """Guards the memory of a rank that has a part of each sequence, and what it sends."""
    given = {"z": z, "context": context, "gpus": z * context, "machine": "dgx-h100", "recompute": recompute}
    found = axonn_tune.search(model, **given, x=1, y=1, micro_batch=1, kept_layers=0, set={"model.layers": 6})
    launch = found.launch_config()
    _, peak_bytes = dry_run(launch)
    assert peak_bytes == pytest.approx(launch.predicted.memory_bytes, rel=WITHIN)


@pytest.mark.parametrize(
    ("stages", "chunks", "recompute", "some"),
    [
        *((2, 1, "full", 2), (2, 2, "full", 1)),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((2, 1, "mlp", 2), (4, 1, "full", 1))),
    ],
)
def test_memory_of_stages_that_recompute_in_some_layers(stages: int, chunks: int, recompute: str, some: int) -> None:
    """Guards what a stage holds where its first blocks repeat: those behind them have freed their activations."""
    split = {"x": 1, "y": 1, "z": 2, "data": 1, "pipeline": stages, "chunks": chunks, "gpus": 2 * stages}
    given = split | {"recompute": recompute, "micro_batch": 1, "kept_layers": 0, "set": {"model.layers": 8}}
    found = axonn_tune.search("llama3-8b", machine="dgx-h100", rank_by="step", **given)
    launch = found.launch_config().model_copy(update={"recompute_layers": some})
    _, peak_bytes = dry_run(launch)
    predicted = price(found.inputs.problem, Layout.of(launch))
    assert peak_bytes == pytest.approx(predicted.memory_bytes, rel=WITHIN)


@pytest.mark.parametrize(
    ("model", "split", "recompute"),
    [
        ("5b", (2, 1, 1, 1, 2, 2), "selective"),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (("llama3-8b", (1, 1, 2, 1, 4, 1), "none"), ("5b", (1, 1, 1, 2, 4, 1), "full"))
        ),
    ],
)
def test_memory_of_split_backward_passes(model: str, split: tuple[int, ...], recompute: str) -> None:
    """Guards operands that weight gradients keep while they wait, and what stages send."""
    x, y, z, data, stages, chunks = split
    given = {"x": x, "y": y, "z": z, "data": data, "pipeline": stages, "chunks": chunks, "recompute": recompute}
    given |= {"gpus": x * y * z * data * stages, "batch": 8 * z * data, "micro_batch": 1, "kept_layers": 0}
    given |= {"set": {"model.layers": 16}, "pipeline_schedule": "zb1p", "rank_by": "step"}
    launch = axonn_tune.search(model, machine="dgx-h100", **given).launch_config()
    assert launch.pipeline_order == "zb1p"
    _, peak_bytes = dry_run(launch)
    assert peak_bytes == pytest.approx(launch.predicted.memory_bytes, rel=WITHIN_SMALL)


@pytest.mark.parametrize(
    ("x", "y", "z", "expert", "recompute"),
    [
        (1, 2, 2, 4, "none"),
        *(pytest.param(1, 1, 8, 8, one, marks=pytest.mark.nightly) for one in RECOMPUTES),
        *(pytest.param(2, 1, 4, 2, one, marks=pytest.mark.nightly) for one in RECOMPUTES),
    ],
)
def test_memory_with_experts(x: int, y: int, z: int, expert: int, recompute: str) -> None:
    """Guards the memory of a rank's experts at forced load balancing, and what it sends, for the loss included."""
    given = {"y": y, "z": z, "expert": expert, "gpus": 8, "machine": "dgx-h100", "recompute": recompute, "batch": 16}
    given |= {"x": x, "micro_batch": 1, "kept_layers": 0, "imbalance": 1}
    given["set"] = {"model.layers": 2, "step.balancing_loss": True}
    launch = axonn_tune.search("qwen3-30b-a3b", **given).launch_config()
    assert launch.force_load_balancing
    assert launch.load_balancing_loss > 0
    _, peak_bytes = dry_run(launch)
    assert peak_bytes == pytest.approx(launch.predicted.memory_bytes, rel=WITHIN)


@pytest.mark.parametrize(
    ("model", "split", "options"),
    [
        ("5b", (2, 1, 4), {"recompute": "full"}),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in (
                ("5b", (1, 1, 8), {}),
                ("llama3-8b", (2, 2, 1), {"recompute": "full"}),
                ("llama3-8b", (1, 2, 4), {"recompute": "full"}),
                ("llama3-8b", (1, 1, 2), {"recompute": "selective", "shard_optimizer": True}),
                ("qwen3-30b-a3b", (1, 1, 8), {"recompute": "full", "expert": 8, "batch": 16, "imbalance": 1}),
            )
        ),
    ],
)
def test_memory_with_whole_matrices(model: str, split: tuple[int, int, int], options: dict[str, Any]) -> None:
    """Guards Muon's states and what its update holds, the peak where activations are few; and what it sends."""
    given = dict(zip("xyz", split, strict=True), gpus=8, machine="dgx-h100", micro_batch=1, kept_layers=0)
    launch = axonn_tune.search(model, **given, optimizer="muon", set={"model.layers": 6}, **options).launch_config()
    assert launch.optimizer.name == "muon"
    _, peak_bytes = dry_run(launch)
    assert peak_bytes == pytest.approx(launch.predicted.memory_bytes, rel=WITHIN)


DELTA = {
    "delta": {"attention": False, "gdn": {"key_heads": 16, "value_heads": 32}},
    "full": {"qk_norms": True, "output_gate": "element", "rotary_share": 0.25},
}


@pytest.mark.parametrize(
    ("x", "y", "z", "recompute"),
    [
        (2, 1, 4, "none"),
        *(pytest.param(1, 2, 4, one, marks=pytest.mark.nightly) for one in (*RECOMPUTES, "layernorm,mlp")),
        pytest.param(4, 2, 1, "full", marks=pytest.mark.nightly),
    ],
)
def test_memory_with_gated_delta_nets(x: int, y: int, z: int, recompute: str, tmp_path: Path) -> None:
    """Guards what a delta net saves, and what its backward pass holds; and what it sends."""
    sizes = load_model("nano-delta").document.model_dump(mode="json", by_alias=True, exclude_none=True)
    sizes |= {"layers": 4, "pattern": "full delta*3", "layer_types": DELTA, "hidden": 2048, "heads": 16, "kv_heads": 4}
    sizes |= {"head_dim": 128, "ffn": 6144, "vocab": 64000, "max_sequence_length": 4096}
    (path := tmp_path / "delta.yaml").write_text(json.dumps(sizes), encoding="utf-8")
    given = {"x": x, "y": y, "z": z, "gpus": 8, "machine": "dgx-h100", "recompute": recompute, "batch": 16}
    given |= {"micro_batch": 1, "kept_layers": 0, "seq_len": 4096}
    launch = axonn_tune.search(str(path), **given).launch_config()
    _, peak_bytes = dry_run(launch)
    assert peak_bytes == pytest.approx(launch.predicted.memory_bytes, rel=WITHIN)


LORA = {
    ("all-linear",): [(2, 2, 2, "none", 0), (1, 2, 4, "full", 0), (1, 1, 8, "layernorm,mlp", 2)],
    ("q_proj", "v_proj"): [(2, 1, 4, "selective", 0), (4, 2, 1, "core_attn,mlp", 0)],
    ("down_proj",): [(4, 1, 1, "none", 4), (2, 1, 2, "full", 0)],
    ("gate_proj", "up_proj"): [(1, 1, 8, "mlp", 0)],
}
LORA_DAILY = (("all-linear",), ("gate_proj", "up_proj"))


@pytest.mark.parametrize(
    ("targets", "x", "y", "z", "recompute", "kept"),
    [
        pytest.param(targets, *row, marks=[] if number < 1 and targets in LORA_DAILY else pytest.mark.nightly)
        for targets, rows in LORA.items()
        for number, row in enumerate(rows)
    ],
    ids=str,
)
def test_memory_of_adapters(targets: tuple[str, ...], x: int, y: int, z: int, recompute: str, kept: int) -> None:
    """Guards what is not there of weights that do not train, as inputs that no adapter reads; and what is sent."""
    given = {"x": x, "y": y, "z": z, "gpus": 8, "machine": "dgx-h100", "recompute": recompute, "batch": 16}
    given |= {"micro_batch": 1, "kept_layers": kept, "seq_len": 4096, "tune": "lora", "lora_targets": targets}
    launch = axonn_tune.search("llama3-8b", **given).launch_config()
    _, peak_bytes = dry_run(launch)
    assert peak_bytes == pytest.approx(launch.predicted.memory_bytes, rel=WITHIN_SMALL)
