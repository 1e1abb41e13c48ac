"""Labs for tests: what a lab needs of this host, the command line as a process, and who is still there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from axonn_tune.errors import AxonnTuneError
from axonn_tune.lab.holder import RunningLab, require_lab
from axonn_tune.lab.lab import Lab
from axonn_tune.lab.shape import Shape

PATIENCE_S = 300.0
SMALL = Shape(nodes=2, ranks_per_node=2, uplink_bits_per_s=100e6, port_bits_per_s=200e6)


def can_make_labs() -> str | None:
    """Why there can be no lab here, in the tool's own words; None if there can."""
    try:
        with Lab(Shape(nodes=1, ranks_per_node=1, uplink_bits_per_s=1e8, port_bits_per_s=1e8)):
            return None
    except AxonnTuneError as error:
        return str(error)


WHY_NOT = can_make_labs()
needs_labs = pytest.mark.skipif(WHY_NOT is not None, reason=f"no lab can be made here: {WHY_NOT}")


def start(*words: str, before: Iterable[str] = ()) -> subprocess.Popen[str]:
    """`axonn-tune lab ...` as a process; before: a command that runs it."""
    command = [*before, sys.executable, "-m", "axonn_tune", "lab", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(*words: str, before: Iterable[str] = ()) -> tuple[int, str, str]:
    """The same to its end: exit code and what it wrote."""
    process = start(*words, before=before)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def target_of(link: Path) -> str:
    """Where a link leads; nowhere if it is gone, as a descriptor that has just been closed."""
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def networks_of(name: str) -> list[int]:
    """A lab's network namespaces as the kernel numbers them: the switch's, then those of its ranks."""
    lab: RunningLab = require_lab(name)
    folder = Path(f"/proc/{lab.holder}")
    descriptors = sorted(int(one.name) for one in (folder / "fd").iterdir() if "net:" in target_of(one))
    return [(folder / "ns/net").stat().st_ino, *((folder / f"fd/{one}").stat().st_ino for one in descriptors)]


def processes_in(networks: Iterable[int]) -> list[int]:
    """Processes of this host whose network namespace is one of these."""
    wanted, found = set(networks), []
    for path in Path("/proc").glob("[0-9]*/ns/net"):
        try:
            if path.stat().st_ino in wanted:
                found.append(int(path.parts[2]))
        except OSError:
            continue
    return sorted(found)


def wait_until(holds: Callable[[], bool], *, within_s: float = PATIENCE_S) -> bool:
    """Whether it comes to hold within the time."""
    end = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def whoami(rank: int) -> tuple[int, str, str]:
    """What a function in a rank sees: its argument and torchrun's variables."""
    return rank, os.environ["RANK"], os.environ["LOCAL_RANK"]


def leave(rank: int, code: int) -> None:
    """End rank 1 with a code, or by a signal if it is negative."""
    if rank == 1 and code < 0:
        os.kill(os.getpid(), -code)
    if rank == 1:
        sys.exit(code)


def unsendable() -> object:
    """Return, on rank 0, what no other process can be given."""
    return (lambda: None) if os.environ["RANK"] == "0" else None
