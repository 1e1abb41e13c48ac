"""What a rank computes on and how: its device, number formats, overlaps, activation recomputation.

`python -m axonn_tune.runtime.devices` prints what torch finds on this host, as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from axonn_tune.errors import EnvironmentProblem
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.workload import Recompute
from axonn_tune.units import counted, show_bytes
from axonn_tune.vocabulary import Overlap, Precision


def device_of(backend: str, *, rank: int, local_rank: int, kind: str | None = None) -> torch.device:
    """This rank's GPU under nccl, the CPU under gloo, unless `kind` says cpu or cuda; EnvironmentProblem without it.

    Under gloo ranks may share a GPU.
    """
    if (kind or ("cpu" if backend == "gloo" else "cuda")) == "cpu":
        return torch.device("cpu")
    usable = torch.cuda.is_available() and (backend == "gloo" or dist.is_nccl_available())
    found = torch.cuda.device_count() if usable else 0
    number = local_rank % found if backend == "gloo" and found else local_rank
    if number >= found:
        raise EnvironmentProblem(
            f"rank {rank} needs GPU {number} of its host for backend {backend}, but torch finds {found}; "
            "on CPUs the backend is gloo, as `backend` in a launch config or as --backend of calibrate"
        )
    device = torch.device("cuda", number)
    use_device(device)
    return device


def require_gpus(backend: str, *, ranks: int) -> None:
    """EnvironmentProblem if ranks on this host find fewer GPUs than they need, one each under nccl."""
    found = torch.cuda.device_count() if backend == "nccl" and torch.cuda.is_available() else 0
    if backend == "nccl" and found < ranks:
        raise EnvironmentProblem(
            f"{counted(ranks, 'rank')} on this host need a GPU each for backend nccl, but torch finds {found}: "
            f"{ranks - found} too few; on CPUs the backend is gloo, as `backend` in a launch config or as --backend of "
            "calibrate"
        )


def require_free_memory(device: torch.device, *, each_bytes: float, ranks: int) -> None:
    """EnvironmentProblem if the predicted memory is not free on this rank's GPU, or in the host's RAM."""
    free, what = free_bytes(device), f"GPU {device.index}" if device.type == "cuda" else "this host"
    needed = each_bytes * (1 if device.type == "cuda" else ranks)
    if needed > free:
        each = f"{show_bytes(each_bytes)} a rank" + (f" for {ranks} ranks" if needed > each_bytes else "")
        raise EnvironmentProblem(
            f"a step is predicted to need {each}, but {what} has {show_bytes(free)} free: "
            f"{show_bytes(needed - free)} too little"
        )


def free_bytes(device: torch.device) -> int:
    """Free memory of a GPU, or of the host within the limit of this process' control group."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text("ascii").splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    said = limit.read_text("ascii").strip() if limit.is_file() else "max"
    return available if said == "max" else min(available, int(said))


def use_device(device: torch.device) -> None:
    """Make a GPU this thread's own; without it a thread starts another context, on GPU 0."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device; the copy to a GPU is asynchronous."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def forget_peak(device: torch.device) -> None:
    """Reset the peak of `peak_memory_bytes` on a GPU, to exclude initialisation and compilation."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory so far: torch's allocations on a GPU, the whole process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes(device: torch.device) -> int:
    """Memory of this process before the model, which `peak_memory_bytes` will include."""
    if device.type == "cuda":
        return 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


DTYPES: dict[Precision, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    "bf16": (torch.bfloat16, torch.float32, torch.float32),
    "fp32": (torch.float32, torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64, torch.float64),
}
"""Compute, master and statistics type of each precision that the runtime supports."""


COMPILE_STATIC = partial(torch.compile, dynamic=False)


@dataclass(frozen=True)
class RuntimeSettings:
    """compute: type of activations and gathered weights; master: of stored weights and gradients; statistics: of norms
    and loss.

    recompute_layers: blocks of each chunk, from its first, that repeat the recompute set; None: all. parts: 2 splits
    each micro-batch for two-batch overlap; shard_master: master weights and moments are sharded over data; dropout:
    share of a block's outputs and of the embedding set to zero; forced_balance: every expert gets as many tokens,
    whatever the router says; balance: factor of the load-balancing loss of a token; bias_rate: how far routers' biases
    move each step; adapter_scale: of adapters' outputs; compile: elementwise work between GEMMs, attention and
    collectives becomes kernels of `compiler`, which recompiles for new shapes.
    """

    compute: torch.dtype
    master: torch.dtype
    statistics: torch.dtype
    overlaps: frozenset[Overlap]
    recompute: Recompute
    kept_layers: int
    device: torch.device
    recompute_layers: int | None = None
    parts: int = 1
    shard_master: bool = False
    dropout: float = 0.0
    compile: bool = False
    forced_balance: bool = False
    balance: float = 0.0
    bias_rate: float = 0.0
    adapter_scale: float = 1.0
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] = COMPILE_STATIC


def settings_of(launch: Launch, device: torch.device) -> RuntimeSettings:
    """Number formats, overlaps and activation recomputation of a launch config."""
    compute, master, statistics = DTYPES[launch.workload.precision]
    return RuntimeSettings(
        compute=compute,
        master=master,
        statistics=statistics,
        overlaps=frozenset(launch.workload.overlaps),
        recompute=launch.recompute,
        recompute_layers=launch.recompute_layers,
        kept_layers=launch.kept_layers,
        device=device,
        parts=2 if launch.workload.split_micro_batch else 1,
        shard_master=launch.workload.shard_optimizer_over_data,
        dropout=launch.dropout,
        compile=launch.compile,
        forced_balance=launch.force_load_balancing,
        balance=launch.load_balancing_loss / (launch.workload.global_batch * launch.workload.sequence_length),
        bias_rate=launch.router_bias_rate,
        adapter_scale=launch.adapter_scale,
    )


def torch_report() -> dict[str, Any]:
    """Versions, backends of torch.distributed, and each GPU's name and memory in bytes."""
    nccl = torch.cuda.nccl.version() if dist.is_nccl_available() else ()  # type: ignore[no-untyped-call]
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "nccl": ".".join(map(str, nccl)) or None,
        "gloo": dist.is_gloo_available(),
        "gpus": [{"name": one.name, "memory_bytes": one.total_memory} for one in gpus],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(torch_report()) + "\n")
