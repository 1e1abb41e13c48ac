"""What torch finds here: backends and GPUs. `python -m axonn_tune.runtime.devices` prints it as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist


def found() -> dict[str, Any]:
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
    sys.stdout.write(json.dumps(found()) + "\n")
