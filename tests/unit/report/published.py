"""A few measurements as files: what sections of predictions against measurements are made from in tests."""

from __future__ import annotations

STEPS = (
    "id,dataset,gpu,gpu_mem_gb,n_gpus,gpus_per_node,framework,model,layers,hidden,heads,ffn,vocab,seq,gbs,mbs,tp,pp,dp,"
    "recompute,precision,step_s\n"
)
STEP = "{id},{dataset},{gpu},80,8,8,Megatron-LM,{model},24,2048,16,8192,51200,2048,64,{mbs},{tp},1,{dp},none,bf16,{s}\n"


def step(name: str, *, measured_s: object = 1.0, tensor: int = 1, **words: object) -> str:
    """One row of 8 GPUs, and of one family unless its words say otherwise."""
    row = {"dataset": "ours", "gpu": "A100-SXM", "model": "GPT 1.3B", "mbs": 2, "tp": tensor, "dp": 8 // tensor}
    return STEP.format(id=name, **{**row, "s": measured_s, **words})
