"""A few measurements as files: what sections of predictions against measurements are made from in tests."""

from __future__ import annotations

from pathlib import Path

from axonn_tune.validation.published.accuracy import Accuracy, evaluate

STEPS = (
    "id,dataset,gpu,gpu_mem_gb,n_gpus,gpus_per_node,framework,model,layers,hidden,heads,ffn,vocab,seq,gbs,mbs,tp,pp,dp,"
    "recompute,precision,step_s\n"
)
STEP = "{id},{dataset},{gpu},80,8,8,Megatron-LM,{model},24,2048,16,8192,51200,2048,64,{mbs},{tp},1,{dp},none,bf16,{s}\n"


def step(name: str, *, measured_s: object = 1.0, tensor: int = 1, **words: object) -> str:
    """One row of 8 GPUs, and of one family unless its words say otherwise."""
    row = {"dataset": "ours", "gpu": "A100-SXM", "model": "GPT 1.3B", "mbs": 2, "tp": tensor, "dp": 8 // tensor}
    return STEP.format(id=name, **{**row, "s": measured_s, **words})


def rows(folder: Path) -> Path:
    """A file of eight steps, of them one unmeasured and one refused."""
    measured = (("s0", 1.0, 1, 2), ("s1", 2.0, 1, 1), ("s2", 0.7, 2, 2), ("s3", 0.9, 2, 4), ("s4", 1.4, 4, 4))
    steps = [step(name, measured_s=s, tensor=tensor, mbs=mbs) for name, s, tensor, mbs in measured]
    steps += [
        step("theirs", dataset="theirs", model="<b>GPT</b> & co", measured_s=0.8),
        step("unmeasured", measured_s=""),
        step("refused", gpu="Abacus"),
    ]
    path = folder / "steps.csv"
    path.write_text(STEPS + "".join(steps), encoding="utf-8")
    return path


def evaluated(folder: Path) -> Accuracy:
    """All of them, predicted."""
    return evaluate(rows(folder), listed=3)
