"""A folder of checkpoints: `step-N` is complete, `step-N.tmp` is being written.

A checkpoint has its name only once everything in it is on the disk; its marker, written last, lists each
file with its size. What lacks the marker, or a file, or part of one, is torn and never used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonn_tune.files import sync_folder

SCHEMA = "axonn-tune/checkpoint/1"
_MARKER = "checkpoint.json"
_NAME = re.compile(r"step-(\d+)")
_LEFT_OVER = ".tmp"


@dataclass(frozen=True)
class Folder:
    """The checkpoints of a run."""

    path: Path

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step lies once it is complete."""
        return self.path / f"step-{step}"

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        if not self.path.is_dir():
            return []
        numbered = ((int(match[1]), one) for one in self.path.iterdir() if (match := _NAME.fullmatch(one.name)))
        return sorted(step for step, one in numbered if description(one) is not None)

    def recover(self) -> list[int]:
        """The same, once a checkpoint that is complete but for its name has it: its run was killed just before."""
        for left in self.path.glob(f"step-*{_LEFT_OVER}"):
            target = left.with_suffix("")
            if _NAME.fullmatch(target.name) and not target.exists() and description(left) is not None:
                left.rename(target)
        return self.steps()

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into; removes what earlier attempts left."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.clean()
        begun = self.path / f"step-{step}{_LEFT_OVER}"
        begun.mkdir()
        return begun

    def finish(self, step: int, said: Mapping[str, Any]) -> None:
        """Give a written checkpoint its marker and its name."""
        begun, target = self.path / f"step-{step}{_LEFT_OVER}", self.place(step)
        sizes = {one.name: one.stat().st_size for one in sorted(begun.iterdir())}
        with (begun / _MARKER).open("w", encoding="utf-8") as file:
            json.dump({"schema": SCHEMA, "step": step, **said, "files": sizes}, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(begun)
        if target.exists():
            # A run that resumed from an earlier step has come here again.
            target.rename(self.path / f"step-{step}.old{_LEFT_OVER}")
        begun.rename(target)
        sync_folder(self.path)
        self.clean()

    def keep(self, newest: int) -> None:
        """Delete all complete checkpoints but some."""
        for step in self.steps()[:-newest]:
            # Renamed first: a deletion cut short must not leave half a checkpoint under its name.
            self.place(step).rename(self.path / f"step-{step}.old{_LEFT_OVER}")
        self.clean()

    def clean(self) -> None:
        """Delete what was begun and not finished."""
        self.recover()
        for left in self.path.glob(f"step-*{_LEFT_OVER}"):
            shutil.rmtree(left, ignore_errors=True)


def description(checkpoint: Path) -> dict[str, Any] | None:
    """What the marker says; None if the checkpoint is torn, or of a kind that this version does not know."""
    try:
        said = json.loads((checkpoint / _MARKER).read_text(encoding="utf-8"))
        whole = all((checkpoint / name).stat().st_size == size for name, size in said["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return said if whole and said.get("schema") == SCHEMA else None
