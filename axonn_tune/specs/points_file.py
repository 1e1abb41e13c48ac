"""The file of points: written line by line while a calibration measures, read back to go on or to fit.

JSON lines: first where and with what was measured, then one point per line, written as it comes, so that a
calibration that was cut off goes on where it stood.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, TypeVar

from pydantic import ValidationError

from axonn_tune.errors import DocumentError, EnvironmentProblem, Problem, UsageError
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.points import Point, Setting

D = TypeVar("D", Setting, Point)

_SAME = ("backend", "precision", "torch_version", "library")
"""What must be as it was for a calibration to go on."""


@dataclass(frozen=True)
class Measured:
    """A file of points."""

    setting: Setting
    points: tuple[Point, ...]


@dataclass
class PointLog:
    """Where points go as they come."""

    path: Path
    _file: TextIO | None = None

    def open(self, setting: Setting, *, resume: bool) -> tuple[Point, ...]:
        """Start the file, or go on with it; the points it has.

        UsageError if there is one that is not to go on, or that was measured elsewhere or otherwise.
        """
        found = self._existing(setting) if resume and self.path.exists() else None
        if found is None and self.path.exists():
            raise UsageError(f"{str(self.path)!r} is there already: --resume goes on with it; else remove it")
        try:
            if found is not None:
                _drop_torn_line(self.path)
            self._file = self.path.open("a", encoding="utf-8", buffering=1)
            if found is None:
                self._file.write(setting.model_dump_json(by_alias=True) + "\n")
        except OSError as error:
            raise EnvironmentProblem(f"cannot write {str(self.path)!r}: {error.strerror}") from error
        return () if found is None else found.points

    def add(self, point: Point) -> None:
        """Write one point."""
        assert self._file is not None, "opened before"
        self._file.write(point.model_dump_json() + "\n")

    def close(self) -> None:
        """Write no more."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _existing(self, setting: Setting) -> Measured:
        found = read_points(self.path)
        before, now = found.setting, setting
        different = [name for name in _SAME if getattr(before, name) != getattr(now, name)]
        if [_trained(launch) for launch in before.launches] != [_trained(launch) for launch in now.launches]:
            different.append("model or batch")
        if [place.host for place in before.ranks] != [place.host for place in now.ranks]:
            different.append(f"ranks ({len(before.ranks)} then, {len(now.ranks)} now)")
        if different:
            raise UsageError(
                f"{str(self.path)!r} was measured otherwise, so its points do not go with new ones: "
                f"{', '.join(different)}"
            )
        return found


def _trained(launch: Launch) -> tuple[object, ...]:
    """What a step is a step of, whenever its launch config was written."""
    return launch.model, launch.workload, launch.micro_batch


def read_points(path: str | Path) -> Measured:
    """Setting and points of a file; a last line that was cut off is left out.

    UsageError if it cannot be read, DocumentError with every line that is wrong.
    """
    lines = read_text(Path(path)).splitlines(keepends=True)
    if not lines:
        raise DocumentError(str(path), [Problem("", "is empty", 1)])
    problems: list[Problem] = []
    setting = next(iter(_parsed(lines[:1], Setting, 1, problems)), None)
    whole = lines[1:] if lines[-1].endswith("\n") else lines[1:-1]
    points = tuple(_parsed(whole, Point, 2, problems))
    if setting is None or problems:
        raise DocumentError(str(path), problems)
    return Measured(setting, points)


def _parsed(lines: list[str], schema: type[D], first: int, problems: list[Problem]) -> Iterator[D]:
    for number, line in enumerate(lines, first):
        try:
            yield schema.model_validate_json(line)
        except ValidationError as error:
            wrong = error.errors()[0]
            place = ".".join(map(str, wrong["loc"]))
            problems.append(Problem(place, str(wrong["msg"]), number))


def _drop_torn_line(path: Path) -> None:
    """Cut off what a killed calibration had begun to write."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
