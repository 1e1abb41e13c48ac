"""What this host has that runs and measurements need: software, cores, network, how jobs start, variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from axonn_tune import __version__
from axonn_tune.specs.launch import Launch
from axonn_tune.units import counted, show_bytes

State: TypeAlias = Literal["ok", "missing", "differs", "noted"]
"""missing: something does not work without it; differs: it works, but not as predicted; noted: for information."""

_SOFTWARE = {
    "torch": ("run, calibrate, validate, export", "runtime"),
    "plotly": ("report and --html", "report"),
    "tensorboard": ("metrics.tensorboard", "tensorboard"),
    "tokenizers": ("data --tokenizer", ""),
    "safetensors": ("export", ""),
}
_STARTERS = ("torchrun", "srun", "sbatch")
_TELLING = ("CUDA_", "FI_", "GLOO_", "HIP_", "NCCL_", "OMP_", "PYTORCH_", "RCCL_", "ROCR_", "TORCH_")
_JOB = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "AXONN_TUNE_PATH")
_NET, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Finding:
    """One thing looked at: under which heading, what it is, what is here, whether that will do, and what follows."""

    area: str
    what: str
    here: str
    state: State
    note: str = ""


def host_findings() -> Iterator[Finding]:
    """This host and Python."""
    area = "host"
    yield Finding(area, "axonn-tune", f"{__version__}, Python {platform.python_version()}", "ok")
    yield Finding(area, "host", f"{socket.gethostname()}, {platform.system()} {platform.release()}", "noted")
    cores = len(os.sched_getaffinity(0))
    yield Finding(area, "cores", f"{cores} of {os.cpu_count()}", "noted", "that this process may use")
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding(area, "memory", show_bytes(float(memory_bytes)), "noted")


def software_findings() -> Iterator[Finding]:
    """Libraries that some commands need beside those that are always installed."""
    for name, (purpose, extra) in _SOFTWARE.items():
        version = installed(name)
        if version:
            yield Finding("software", name, version, "ok", f"for {purpose}")
        else:
            wanted = f"'axonn-tune[{extra}]'" if extra else name
            yield Finding("software", name, "not installed", "missing", f"for {purpose}: pip install {wanted}")
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    here: State = "ok" if compiler else "missing"
    yield Finding("software", "C++ compiler", compiler or "none", here, "for `compile: true` on CPUs")


def starter_findings(environment: Mapping[str, str]) -> Iterator[Finding]:
    """What starts jobs, and whether one is running."""
    for name in _STARTERS:
        path = shutil.which(name)
        note = "" if path else "scripts of --emit need it where they run"
        yield Finding("starting jobs", name, path or "not found", "ok" if path else "noted", note)
    for name in _JOB:
        if name in environment:
            yield Finding("starting jobs", name, environment[name], "noted")


def network_findings(net: Path = _NET, infiniband: Path = _INFINIBAND) -> Iterator[Finding]:
    """Interfaces that are up, with their speed, and InfiniBand or RoCE ports."""
    for interface in sorted(net.iterdir()) if net.is_dir() else ():
        if interface.name != "lo" and _read(interface / "operstate") in ("up", "unknown"):
            speed = _read(interface / "speed")
            known = speed.isdigit() and int(speed) > 0
            here = f"{int(speed) / 1000:g} Gbit/s" if known else "up, speed unknown"
            yield Finding("network", interface.name, here, "noted")
    for port in sorted(infiniband.glob("*/ports/*")):
        here = f"{_read(port / 'rate') or 'rate unknown'}, {_read(port / 'state') or 'state unknown'}"
        yield Finding("network", f"{port.parts[-3]} port {port.name}", here, "noted", _read(port / "link_layer"))


def variable_findings(environment: Mapping[str, str], launch: Launch | None) -> Iterator[Finding]:
    """Variables that change how a run goes; against those of a launch config if there is one."""
    wanted = {} if launch is None else {one.name: one for one in launch.environment}
    for name, variable in wanted.items():
        here = environment.get(name)
        if here is None:
            yield Finding("variables", name, "not set", "ok", f"a run sets it to {variable.value}")
        elif here == variable.value:
            yield Finding("variables", name, here, "ok", "as the launch config says")
        else:
            note = (
                f"the launch config says {variable.value}; what is set here wins ({variable.purpose}: {variable.why})"
            )
            yield Finding("variables", name, here, "differs", note)
    for name in sorted(environment):
        if name.startswith(_TELLING) and name not in wanted:
            note = "" if launch is None else "the launch config does not set it"
            yield Finding("variables", name, environment[name], "noted", note)


def launch_findings(launch: Launch, *, gpus: int) -> Iterator[Finding]:
    """What a launch config asks of a host beside its variables. gpus: how many torch sees here."""
    area = "launch config"
    ranks, cores = launch.ranks_per_node, len(os.sched_getaffinity(0))
    if launch.backend == "nccl":
        state: State = "ok" if gpus >= ranks else "missing"
        yield Finding(area, "GPUs", str(gpus), state, f"{counted(ranks, 'rank')} on each node need one each")
    else:
        state = "ok" if ranks <= cores else "differs"
        yield Finding(area, "cores", str(cores), state, f"{counted(ranks, 'rank')} on each node")
    if launch.data.path is not None:
        there = Path(launch.data.path).is_file()
        yield Finding(
            area, "data.path", launch.data.path, "ok" if there else "missing", "" if there else "no such file"
        )
    if launch.checkpoint.directory is not None:
        yield _folder(area, "checkpoint.directory", Path(launch.checkpoint.directory))
    if launch.metrics.tensorboard and not installed("tensorboard"):
        yield Finding(area, "metrics.tensorboard", "not installed", "missing", "pip install 'axonn-tune[tensorboard]'")


def installed(name: str) -> str:
    """Version of a library, which is not imported for it; empty if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _folder(area: str, what: str, path: Path) -> Finding:
    """Whether something can be written into a folder, or into the one it would be made in."""
    if path.exists() and not path.is_dir():
        return Finding(area, what, str(path), "missing", "is no folder")
    nearest = next(one for one in (path, *path.absolute().parents) if one.is_dir())
    allowed = os.access(nearest, os.W_OK | os.X_OK)
    return Finding(area, what, str(path), "ok" if allowed else "missing", "" if allowed else f"cannot write {nearest}")


def _read(path: Path) -> str:
    """A file of /sys; empty if it has nothing to say."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
