"""Writes the script that starts a launch config, beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypeAlias

from axonn_tune.errors import EnvironmentProblem, UsageError
from axonn_tune.files import write_text_atomically
from axonn_tune.launch.slurm import slurm_script
from axonn_tune.launch.torchrun import torchrun_script
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine

ScriptKind: TypeAlias = Literal["torchrun", "slurm"]
SUFFIXES: dict[ScriptKind, str] = {"torchrun": ".sh", "slurm": ".sbatch"}


def script_text(kind: ScriptKind, *, launch: Launch, machine: Machine, launch_path: str | Path) -> str:
    """The script as text; UsageError as `torchrun_script` and `slurm_script`, or as `emit_script` for the path."""
    if not _is_file_of_its_own(Path(launch_path), suffix=SUFFIXES[kind]):
        raise UsageError(f"--emit needs a launch config in a file to write a script beside, not {str(launch_path)!r}")
    write: Callable[..., str] = {"torchrun": torchrun_script, "slurm": slurm_script}[kind]
    return write(launch, machine=machine, launch_path=Path(launch_path))


def emit_script(kind: ScriptKind, *, launch: Launch, machine: Machine, launch_path: str | Path) -> Path:
    """Write the script beside the launch config, executable, in place of an older one; its path.

    `launch.yaml` gets `launch.sh` (torchrun) or `launch.sbatch` (slurm). UsageError as `script_text`,
    or if the launch config is no file in a folder; EnvironmentProblem if the disk is full. On any
    failure what was there stays.
    """
    path = Path(launch_path)
    text = script_text(kind, launch=launch, machine=machine, launch_path=path)
    target = path.with_name(path.stem + SUFFIXES[kind])
    write_text_atomically(target, text)
    try:
        # Whoever may read it may run it.
        mode = target.stat().st_mode
        target.chmod(mode | (mode & 0o444) >> 2)
    except OSError as error:
        raise EnvironmentProblem(f"cannot make {str(target)!r} executable: {error.strerror}") from error
    return target


def _is_file_of_its_own(path: Path, *, suffix: str) -> bool:
    """Whether a launch config at `path` is, or will be, a file that the script does not replace."""
    # /dev/stdout counts as a file when output goes to one.
    device = path.absolute().parts[1:2] in (("dev",), ("proc",))
    return bool(path.name) and path.suffix != suffix and not device and (path.is_file() or not path.exists())
