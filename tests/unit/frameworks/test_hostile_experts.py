"""Impossible experts, dispatchers and number formats: each refused with its name and what is valid, fast."""

from __future__ import annotations

import pytest

from tests.cli.running import run

CORE = "--framework megatron-core --gpus 64 --machine dgx-h100 --batch 256 --top 1"
MIXTRAL, DENSE = f"{CORE} --model mixtral-8x7b", f"{CORE} --model llama3-8b"
COUNT, EACH = "--set model.layer_types.moe.experts.count", "--set model.layer_types.moe.experts.per_token"

REFUSED: list[tuple[str, str, str]] = [
    *((MIXTRAL, f"--ep {size}", "not divisible by EP") for size in (3, 5, 6, 7, 16, 64, 128, 4096)),
    *((MIXTRAL, f"--ep {size}", "whole number") for size in ("0", "-1", "1.5", "x", "nan", "1e9", str(2**31))),
    *((MIXTRAL, f"--etp {size}", "whole number") for size in ("0", "-8", "2.0", "inf", "''")),
    *((MIXTRAL, f"--ep 8 --etp {size}", "ETP") for size in (3, 5, 16, 64, 100)),
    *((MIXTRAL, f"--ep 8 --egtp {size}", "EGTP") for size in (3, 16, 64)),
    (f"{MIXTRAL} --ep 8 --etp 2", "--expert-tensor-parallel-num-weight-shards 3", "not divisible by ETP = 2"),
    (f"{MIXTRAL} --ep 8", "--expert-tensor-parallel-num-weight-shards 2", "give --etp too, or --egtp N instead"),
    *((MIXTRAL, f"--tp 8 --ep 8 --etp {size}", "ETP") for size in (16, 32)),
    *(
        (DENSE, option, "has no experts")
        for option in ("--ep 2", "--etp 2", "--egtp 2", "--ep 8 --etp 2", "--imbalance 2")
    ),
    *((MIXTRAL, f"--imbalance {value}", "nearest valid") for value in ("0", "-1", "nan", "1e9", "inf", "x", "0.99")),
    *((MIXTRAL, f"--set step.imbalance={value}", "") for value in ("0", "-3", "1e9", "x", "[]")),
    *((MIXTRAL, f"--set step.capacity_factor={value}", "") for value in ("0", "-1", "1e9", "x", "{}")),
    *(
        (MIXTRAL, f"--dispatcher {name}", "deepep-nvshmem")
        for name in ("deep", "flex", "nccl", "ALLTOALL", "deepep_uccl", "-")
    ),
    *((MIXTRAL, f"--set step.dispatcher={name}", "dispatcher") for name in ("flex", "none", "3")),
    *((MIXTRAL, f"{EACH}={count}", "per_token") for count in (9, 0, -1, 1000, "x", 2.5)),
    *((MIXTRAL, f"{COUNT}={count}", "count") for count in (0, -8, 65_537, "x", 1.5, 10**20)),
    *((MIXTRAL, f"--set model.layer_types.moe.experts.groups={count}", "groups") for count in (3, 16, 0, -1)),
    *((MIXTRAL, f"--set model.layer_types.moe.experts.width={size}", "width") for size in (0, -1, "x")),
    *((DENSE, f"--precision {name}", "") for name in ("mxfp8", "nvfp4", "fp8", "fp4", "int8", "e4m3", "fp8-delayd")),
    *(
        (f"{DENSE} --precision bf16", f"--set step.{name}", "--precision")
        for name in (*("primary_weights=true", "first_layers_bf16=1", "last_layers_bf16=2", "narrow_attention=true"),)
    ),
    *(
        (f"{DENSE} --precision fp8-delayed", f"--set step.{name}_layers_bf16=1", "delayed")
        for name in ("first", "last")
    ),
    (f"{DENSE} --precision fp8-current", "--set step.first_layers_bf16=40", "layers in BF16"),
    *((DENSE, f"--recompute {name}", "has no") for name in ("moe_act", "moe", "shared_experts", "mla_up_proj")),
    (MIXTRAL, "--recompute shared_experts", "has no shared experts"),
    (MIXTRAL, "--recompute moe_acts", "moe_act"),
    (MIXTRAL, "--expert-overlap --recompute full", "full"),
    (MIXTRAL, "--expert-overlap --ep 4 --egtp 2", "excludes GTP and EGTP above 1"),
    (MIXTRAL, "--expert-overlap --recompute moe", "moe"),
    (MIXTRAL, "--expert-overlap --dispatcher allgather", "all-gathers"),
    (MIXTRAL, "--set step.delayed_weight_gradients=true", "--expert-overlap"),
    (DENSE, "--expert-overlap", "experts"),
    *(
        (f"{CORE} --model mixtral-8x7b".replace("megatron-core", name), "", "experts are not priced")
        for name in (*("deepspeed", "axonn", "megatron-2022", "megatron-deepspeed"),)
    ),
    *((DENSE.replace("megatron-core", name), "--precision mxfp8", "") for name in ("fsdp", "deepspeed", "axonn")),
]
"""A command, what is wrong in it, and what the error says."""


@pytest.mark.parametrize(("command", "wrong", "said"), REFUSED, ids=[f"{one} {two}"[40:] for one, two, _ in REFUSED])
def test_impossible_experts_and_formats_are_refused(command: str, wrong: str, said: str) -> None:
    """Guards exit codes: 2 for what cannot be asked, 3 where nothing fits, with an error and no traceback."""
    finished = run(f"{command} {wrong}")
    assert finished.code in (2, 3), finished.out
    assert said in " ".join(finished.err.split())
    assert finished.err.startswith(("Error", "Usage"))
