"""This host: starting the ranks of a launch config on it, or joining them, and checks of the host."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, TypeAlias

from axonn_tune.errors import EnvironmentProblem, TrainingFailedError, UsageError, count_in
from axonn_tune.processes import die_with
from axonn_tune.specs.catalog import load_machine, machines_with
from axonn_tune.specs.launch import Launch
from axonn_tune.units import GIB, counted, show_bytes
from axonn_tune.vocabulary import VERSION

RANKS_PER_CORE = 4
"""Largest number of ranks per core; with more, ranks mostly wait for each other."""
_FORWARDED = (signal.SIGTERM, signal.SIGUSR2)


def require_torch() -> None:
    """EnvironmentProblem unless torch is installed; does not import it."""
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentProblem(
            "running needs torch, which is not installed: pip install '.[runtime]' in the checkout"
        )


def already_started(environment: Mapping[str, str]) -> bool:
    """Whether this process is one of several that torchrun or srun has started."""
    return "RANK" in environment or count_in(environment, "SLURM_NTASKS", "1") > 1


def leads(environment: Mapping[str, str]) -> bool:
    """Whether this process is rank 0, or starts all ranks."""
    name = "RANK" if "RANK" in environment else "SLURM_PROCID"
    return not already_started(environment) or environment.get(name) == "0"


def crowding(launch: Launch, *, cores: int) -> str | None:
    """A warning if ranks share cores; UsageError if there are too many for this host."""
    ranks = launch.grid.world
    if launch.backend != "gloo" or ranks <= cores:
        return None
    if ranks > RANKS_PER_CORE * cores:
        raise UsageError(
            f"{ranks} ranks are more than {RANKS_PER_CORE} for each of this host's {cores} cores; "
            "to start them on several hosts, write a script with `axonn-tune ... -o launch.yaml --emit torchrun|slurm`"
        )
    # Whether a profile allows for that, as one calibrated with as many ranks does, its accelerator's name tells.
    return f"{ranks} ranks share {counted(cores, 'core')}; what was predicted for is {launch.predicted.accelerator!r}"


def command_of(launch: Launch, path: Path, *, arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """What to run: this rank alone, or all ranks."""
    joins = already_started(environment) or launch.grid.world == 1
    return [sys.executable, "-m", "axonn_tune.runtime", *([] if joins else ["--all"]), str(path), *arguments]


def run_command(command: Sequence[str], launch: Launch) -> int:
    """Run it with the launch config's environment and pass signals on; its exit code. It ends with this process."""
    variables = {variable.name: variable.value for variable in launch.environment}
    # The user's own variables take precedence.
    process = subprocess.Popen(command, env=variables | os.environ, preexec_fn=partial(die_with, os.getpid()))

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    before = {one: signal.signal(one, forward) for one in _FORWARDED}
    # The terminal interrupts the whole process group; what runs decides when it has ended.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        code = process.wait()
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
    if code == -signal.SIGPIPE:
        return 0
    return code if code >= 0 else TrainingFailedError.exit_code


State: TypeAlias = Literal["ok", "missing", "differs", "noted"]
"""missing: something does not work without it; differs: it works, but not as predicted; noted: for information."""

_SOFTWARE = {
    "torch": ("run, calibrate, validate, export", "runtime"),
    "plotly": ("report and --html", "report"),
    "tensorboard": ("metrics.tensorboard", "tensorboard"),
    "tokenizers": ("data --tokenizer", ""),
    "safetensors": ("export", ""),
}
_LAUNCHERS = ("torchrun", "srun", "sbatch")
_TELLING = ("CUDA_", "FI_", "GLOO_", "HIP_", "NCCL_", "OMP_", "PYTORCH_", "RCCL_", "ROCR_", "TORCH_")
_JOB = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "AXONN_TUNE_PATH")


_PATIENCE_S = 120.0


def torch_devices() -> dict[str, Any] | None:
    """Devices that torch finds, from a separate process, since a driver may hang or crash; None without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    command = [sys.executable, "-m", "axonn_tune.runtime.devices"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True)
    except subprocess.TimeoutExpired:
        return {"gpus": [], "error": f"torch did not start within {_PATIENCE_S:g} s"}
    except subprocess.CalledProcessError as error:
        return {"gpus": [], "error": (error.stderr.strip().splitlines() or ["torch does not start"])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@dataclass(frozen=True)
class HostCheck:
    """One check of the host: heading, subject, finding, status, and note."""

    area: str
    what: str
    here: str
    state: State
    note: str = ""


def host_checks() -> Iterator[HostCheck]:
    """This host and Python."""
    area = "host"
    yield HostCheck(area, "axonn-tune", f"{VERSION}, Python {platform.python_version()}", "ok")
    yield HostCheck(area, "host", f"{socket.gethostname()}, {platform.system()} {platform.release()}", "noted")
    cores = len(os.sched_getaffinity(0))
    yield HostCheck(area, "cores", f"{cores} of {os.cpu_count()}", "noted", "that this process may use")
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield HostCheck(area, "memory", show_bytes(float(memory_bytes)), "noted")


def software_checks() -> Iterator[HostCheck]:
    """Optional libraries of some commands."""
    for name, (purpose, extra) in _SOFTWARE.items():
        version = installed(name)
        if version:
            yield HostCheck("software", name, version, "ok", f"for {purpose}")
        else:
            wanted = f"'.[{extra}]' in the checkout" if extra else name
            yield HostCheck("software", name, "not installed", "missing", f"for {purpose}: pip install {wanted}")
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    here: State = "ok" if compiler else "missing"
    yield HostCheck("software", "C++ compiler", compiler or "none", here, "for `compile: true` on CPUs")


def launcher_checks(environment: Mapping[str, str]) -> Iterator[HostCheck]:
    """Launchers, and whether a job is running."""
    for name in _LAUNCHERS:
        path = shutil.which(name)
        note = "" if path else "scripts of --emit need it where they run"
        yield HostCheck("starting jobs", name, path or "not found", "ok" if path else "noted", note)
    for name in _JOB:
        if name in environment:
            yield HostCheck("starting jobs", name, environment[name], "noted")


def network_checks() -> Iterator[HostCheck]:
    """Interfaces that are up, with their speed, and InfiniBand or RoCE ports."""
    net, infiniband = Path("/sys/class/net"), Path("/sys/class/infiniband")
    for interface in sorted(net.iterdir()) if net.is_dir() else ():
        if interface.name != "lo" and _read(interface / "operstate") in ("up", "unknown"):
            speed = _read(interface / "speed")
            known = speed.isdigit() and int(speed) > 0
            here = f"{int(speed) / 1000:g} Gbit/s" if known else "up, speed unknown"
            yield HostCheck("network", interface.name, here, "noted")
    for port in sorted(infiniband.glob("*/ports/*")):
        here = f"{_read(port / 'rate') or 'rate unknown'}, {_read(port / 'state') or 'state unknown'}"
        yield HostCheck("network", f"{port.parts[-3]} port {port.name}", here, "noted", _read(port / "link_layer"))


def variable_checks(environment: Mapping[str, str], launch: Launch | None) -> Iterator[HostCheck]:
    """Variables that affect a run, compared with those of a launch config if there is one."""
    wanted = {} if launch is None else {one.name: one for one in launch.environment}
    for name, variable in wanted.items():
        here = environment.get(name)
        if here is None:
            yield HostCheck("variables", name, "not set", "ok", f"a run sets it to {variable.value}")
        elif here == variable.value:
            yield HostCheck("variables", name, here, "ok", "as the launch config says")
        else:
            note = (
                f"the launch config says {variable.value}; what is set here wins ({variable.purpose}: {variable.why})"
            )
            yield HostCheck("variables", name, here, "differs", note)
    for name in sorted(environment):
        if name.startswith(_TELLING) and name not in wanted:
            note = "" if launch is None else "the launch config does not set it"
            yield HostCheck("variables", name, environment[name], "noted", note)


def profile_checks(gpus: Sequence[Mapping[str, Any]]) -> Iterator[HostCheck]:
    """Machine profiles with an accelerator of the name and memory, within 5%, of each kind of GPU that torch finds."""
    for name, memory_bytes in dict.fromkeys((one["name"], one["memory_bytes"]) for one in gpus):
        # Cards of the same name for PCIe are slower.
        words = " ".join(re.findall(r"\b[A-Z]+\d{2,}[A-Z]*\b|\bPCIe\b|\bNVL\b", name))
        sizes = {one: load_machine(one).document.accelerator.memory_gib for one in machines_with(words)}
        fitting = [one for one, gib in sizes.items() if abs(memory_bytes / GIB / gib - 1) <= 0.05]
        note = "the nodes and the network differ" if fitting else "`axonn-tune calibrate` writes a profile"
        here = ", ".join(fitting) or "no shipped profile"
        yield HostCheck("machine profiles", name, here, "ok" if fitting else "noted", f"for --machine; {note}")


def folder_checks() -> Iterator[HostCheck]:
    """Whether files can be written here, and those that are temporary."""
    for what, folder in (("this folder", Path.cwd()), ("temporary files", Path(tempfile.gettempdir()))):
        can = os.access(folder, os.W_OK | os.X_OK)
        yield HostCheck("rights", what, str(folder), "ok" if can else "missing", "" if can else "cannot be written")


def launch_checks(launch: Launch, *, gpus: int) -> Iterator[HostCheck]:
    """Requirements of a launch config on a host besides variables. gpus: number that torch sees here."""
    area = "launch config"
    ranks, cores = launch.ranks_per_node, len(os.sched_getaffinity(0))
    if launch.backend == "nccl":
        state: State = "ok" if gpus >= ranks else "missing"
        yield HostCheck(area, "GPUs", str(gpus), state, f"{counted(ranks, 'rank')} on each node need one each")
    else:
        state = "ok" if ranks <= cores else "differs"
        yield HostCheck(area, "cores", str(cores), state, f"{counted(ranks, 'rank')} on each node")
    if launch.data.path is not None:
        there = Path(launch.data.path).is_file()
        yield HostCheck(
            area, "data.path", launch.data.path, "ok" if there else "missing", "" if there else "no such file"
        )
    if launch.checkpoint.directory is not None:
        folder = Path(launch.checkpoint.directory)
        nearest = next(one for one in (folder, *folder.absolute().parents) if one.is_dir())
        state, note = "missing", f"cannot write {nearest}"
        if folder.exists() and not folder.is_dir():
            note = "is no folder"
        elif os.access(nearest, os.W_OK | os.X_OK):
            state, note = "ok", ""
        yield HostCheck(area, "checkpoint.directory", str(folder), state, note)
    if launch.metrics.tensorboard and not installed("tensorboard"):
        yield HostCheck(
            area, "metrics.tensorboard", "not installed", "missing", "pip install '.[tensorboard]' in the checkout"
        )


def installed(name: str) -> str:
    """Version of a library, which is not imported for it; empty if it is not there."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: Path) -> str:
    """A file of /sys; empty if it has nothing to say."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
