"""Environments of frameworks under build/frameworks, each with the releases that its commands are written for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "frameworks"
NEWEST_PYTHON = 14
"""Of Python 3: those that are looked for."""


class SkippedError(Exception):
    """Why a framework's code does not run here."""


@dataclass(frozen=True, eq=False)
class Environment:
    """One framework's own code.

    frameworks: the descriptions whose commands it checks; forms: of each command the one that is written first, "",
    and others by name. module: its check script. python: the oldest Python 3 it takes. gib: disk that it needs, which
    is torch's with its CUDA libraries where pip has no build for CPUs. before: packages installed first, which others
    need to be built.
    """

    name: str
    frameworks: tuple[str, ...]
    packages: tuple[str, ...]
    forms: tuple[str, ...] = ("",)
    python: int = 11
    gib: int = 6
    variables: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The check script."""
        return f"tools.frameworks.{self.name.replace('-', '_')}"

    @property
    def folder(self) -> Path:
        """Where it is installed."""
        return FOLDER / self.name

    @property
    def interpreter(self) -> Path:
        """Its Python."""
        return self.folder / "bin" / "python"

    def install(self) -> None:
        """Install it unless it is there; SkippedError where Python, disk or a package is missing."""
        marker, wanted = self.folder / "installed", " ".join((*self.before, *self.packages))
        if marker.is_file() and marker.read_text(encoding="utf-8") == wanted:
            return
        python = find_python(self.python)
        FOLDER.mkdir(parents=True, exist_ok=True)
        free_gib = shutil.disk_usage(FOLDER).free / 2**30
        if free_gib < self.gib:
            raise SkippedError(f"needs {self.gib} GiB of disk; {free_gib:.1f} GiB are free")
        print(f"installing {wanted} into {self.folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._run([str(python), "-m", "venv", str(self.folder)])
        for packages in filter(None, (self.before, self.packages)):
            isolated = ("--no-build-isolation",) if self.before else ()
            self._run([str(self.interpreter), "-m", "pip", "install", "--quiet", *isolated, *packages])
        marker.write_text(wanted, encoding="utf-8")

    def _run(self, words: list[str]) -> None:
        done = subprocess.run(words, env=os.environ | self.variables, capture_output=True, text=True, check=False)
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines() or ["?"]
            raise SkippedError(f"{words[2]} failed: {said[0]}")


def find_python(oldest: int) -> Path:
    """The Python that runs this where it is new enough, else the first on PATH or under pyenv; SkippedError."""
    if sys.version_info >= (3, oldest):
        return Path(sys.executable)
    for python in _pythons(oldest):
        tried = subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True, check=False)
        if tried.returncode == 0:
            return python
    raise SkippedError(f"needs Python 3.{oldest} or later; found none on PATH or under pyenv")


def _pythons(oldest: int) -> Iterator[Path]:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for minor in range(oldest, NEWEST_PYTHON + 1):
        on_path = shutil.which(f"python3.{minor}")
        if on_path is not None:
            yield Path(on_path)
        yield from sorted(pyenv.glob(f"3.{minor}.*/bin/python"))


CPU_TORCH = "torch==2.13.0"
ENVIRONMENTS = (
    Environment("megatron-core", ("megatron-core",), (CPU_TORCH, "numpy", "megatron-core==0.19.2"), python=12),
    # Its imports need Triton, which torch for CPUs does not bring, as those of the older release do.
    Environment(
        "torchtitan", ("torchtitan", "torchtitan-eager"), (CPU_TORCH, "triton", "torchtitan==0.3.0", "torchao==0.18.0")
    ),
    Environment("torchtitan-toml", ("torchtitan",), (CPU_TORCH, "triton", "torchtitan==0.2.2"), ("toml",)),
    Environment(
        "accelerate", ("fsdp",), (CPU_TORCH, "numpy", "accelerate==1.15.0", "transformers==5.23.0"), ("", "fully-shard")
    ),
    Environment(
        "deepspeed",
        ("deepspeed",),
        ("deepspeed==0.19.8",),
        variables={"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"},
        # Its setup.py imports torch.
        before=(CPU_TORCH, "numpy", "setuptools", "wheel"),
    ),
    Environment("axonn", ("axonn", "megatron-axonn"), (CPU_TORCH, "numpy", "axonn==0.2.0")),
)
