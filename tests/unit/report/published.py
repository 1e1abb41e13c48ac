"""A few measurements as files: what sections of predictions against measurements are made from in tests."""

from __future__ import annotations

from pathlib import Path

from axonn_tune.validation.published.accuracy import Accuracy, Files, evaluate

STEPS = (
    "id,dataset,gpu,gpu_mem_gb,n_gpus,gpus_per_node,framework,model,layers,hidden,heads,ffn,vocab,seq,gbs,mbs,tp,pp,dp,"
    "recompute,precision,step_s\n"
)
STEP = "{id},{dataset},{gpu},80,8,8,Megatron-LM,{model},24,2048,16,8192,51200,2048,64,{mbs},{tp},1,{dp},none,bf16,{s}\n"
COLLECTIVES = "id,system,gpu,library,collective,nranks,nodes,gpus_per_node,size_bytes,time_us\n"
COLLECTIVE = "{id},a node,A100-SXM4-80GB,NCCL,{kind},8,1,8,{size},{us}\n"
GEMM = "id,gpu,dtype,m,n,k,batch,layout,latency_us\n"
MEMORY = "id,model,h,a,l,tp,pp,vpp,gpus,mbs,gbs,quantity,value,unit\n"


def step(name: str, *, measured_s: object = 1.0, tensor: int = 1, **words: object) -> str:
    """One row of 8 GPUs, and of one family unless its words say otherwise."""
    row = {"dataset": "ours", "gpu": "A100-SXM", "model": "GPT 1.3B", "mbs": 2, "tp": tensor, "dp": 8 // tensor}
    return STEP.format(id=name, **{**row, "s": measured_s, **words})


def files(folder: Path) -> Files:
    """Eight steps, of them one unmeasured and one refused; three collectives, a product, two memory rows."""
    measured = (("s0", 1.0, 1, 2), ("s1", 2.0, 1, 1), ("s2", 0.7, 2, 2), ("s3", 0.9, 2, 4), ("s4", 1.4, 4, 4))
    steps = [step(name, measured_s=s, tensor=tensor, mbs=mbs) for name, s, tensor, mbs in measured]
    steps += [
        step("theirs", dataset="theirs", model="<b>GPT</b> & co", measured_s=0.8),
        step("unmeasured", measured_s=""),
        step("refused", gpu="Abacus"),
    ]
    large, small = 2**26, 2**10
    collectives = [
        COLLECTIVE.format(id="c0", kind="all_reduce", size=large, us=600),
        COLLECTIVE.format(id="c1", kind="all_gather", size=small, us=30),
        COLLECTIVE.format(id="c2", kind="alltoall", size=large, us=900),
    ]
    layer = "22B,6144,64,48,8,1,1,8,4,4"
    texts = {
        "steps": STEPS + "".join(steps),
        "collectives": COLLECTIVES + "".join(collectives),
        "gemm": GEMM + "g0,A100-SXM4-80GB,bf16,4096,4096,4096,1,NN,600\n",
        "memory": MEMORY
        + f'm0,{layer},"activation memory, tensor parallel only",59.25,GiB\n'
        + f'm1,{layer},"activation memory, tensor + sequence parallel",60,%\n',
    }
    for name, text in texts.items():
        (folder / f"{name}.csv").write_text(text, encoding="utf-8")
    return Files(**{name: folder / f"{name}.csv" for name in texts})


def evaluated(folder: Path) -> tuple[Accuracy, Files]:
    """All of them, predicted."""
    found = files(folder)
    return evaluate(found, worst=3), found
