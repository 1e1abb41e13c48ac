"""Plan, points and point file of a calibration.

The file is JSON lines: first host and software, then one point per line, written when measured, so that an interrupted
calibration can resume.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TextIO, TypeAlias, TypeVar

from pydantic import Field, ValidationError

from axonn_tune.errors import DocumentError, EnvironmentProblem, Problem, UsageError
from axonn_tune.specs.document import Document, PositiveFloat, PositiveInt, plain_message
from axonn_tune.specs.launch import Launch, NonNegativeInt
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.machine import Backend, CollectiveKind, MatmulLayout
from axonn_tune.vocabulary import Precision

LOOPBACK = "loopback: CPU time, not a network"
"""The network of ranks that share one host's network stack."""


class CollectiveProbe(Document):
    """One collective over all groups of a shape at once, through the runtime's own calls."""

    what: Literal["collective"] = "collective"
    op: CollectiveKind = Field(description="Which.")
    group: PositiveInt = Field(description="Ranks in each group.")
    stride: PositiveInt = Field(description="Ranks between neighbours of a group: product of the inner axes.")
    size_bytes: PositiveInt = Field(description="Full (gathered or reduced) buffer of one call.")


class MatmulProbe(Document):
    """A GEMM `O[m, n] = A[m, k] · B[k, n]` on every rank at once."""

    what: Literal["matmul"] = "matmul"
    layout: MatmulLayout = Field(description="NN forward, NT input gradient, TN weight gradient.")
    m: PositiveInt = Field(description="Rows of the output.")
    n: PositiveInt = Field(description="Columns of the output.")
    k: PositiveInt = Field(description="Contraction (K) dimension.")


class CopyProbe(Document):
    """A copy in memory on every rank at once."""

    what: Literal["copy"] = "copy"
    size_bytes: PositiveInt = Field(description="Bytes copied; each is read and written once.")


class AttentionProbe(Document):
    """The attention core of the model on every rank at once."""

    what: Literal["attention"] = "attention"
    backward: bool = Field(description="With its gradient.")
    sequences: PositiveInt = Field(description="Sequences.")


class StepProbe(Document):
    """A whole training step of a rank alone, every rank training its own model at once."""

    what: Literal["step"] = "step"
    launch: NonNegativeInt = Field(description="Which of the plan's launch configs.")


Probe: TypeAlias = Annotated[
    CollectiveProbe | MatmulProbe | CopyProbe | AttentionProbe | StepProbe,
    Field(discriminator="what"),
]


class Plan(Document):
    """Probes, most important first; the list repeats while time is left."""

    budget_s: PositiveFloat = Field(description="Time budget.")
    backend: Backend = Field(description="torch.distributed backend.")
    precision: Precision = Field(description="Number format of messages and computation.")
    launches: tuple[Launch, ...] = Field(min_length=1, description="Steps of one rank that probes refer to.")
    probes: tuple[Probe, ...] = Field(min_length=1, description="What to measure.")
    essential: NonNegativeInt = Field(
        description="Number of first probes that are measured even if the budget is exceeded."
    )


class RankPlace(Document):
    """Where one rank ran."""

    host: str = Field(description="Host name.")
    network: str = Field(description="Network namespace, as the kernel names it; empty if it has no name.")
    device: str = Field(description="What it computed on.")
    threads: PositiveInt = Field(description="Threads it computed with.")
    node_ranks: PositiveInt | None = Field(
        default=None, description="Ranks on its node, as LOCAL_WORLD_SIZE says; null if nothing said it."
    )


class Setting(Document):
    """Host and software of a file of points."""

    renewed_by: ClassVar[str] = "axonn-tune calibrate"
    schema_: Literal["axonn-tune/points/2"] = Field(
        alias="schema", default="axonn-tune/points/2", description="Kind and version of this document."
    )
    created: str = Field(description="When it began, ISO 8601.")
    tool_version: str = Field(description="Of axonn-tune.")
    torch_version: str = Field(description="Of torch.")
    library: str = Field(description="The collective library, with its version.")
    backend: Backend = Field(description="torch.distributed backend.")
    precision: Precision = Field(description="Number format of messages and computation.")
    cores: PositiveInt = Field(description="CPU cores the first rank may run on.")
    memory_bytes: PositiveInt = Field(description="Memory of the first rank's host, or of its GPU.")
    ranks: tuple[RankPlace, ...] = Field(min_length=1, description="Every rank's place.")
    launches: tuple[Launch, ...] = Field(min_length=1, description="Steps of one rank that points refer to.")


class Point(Document):
    """One sample: the mean over consecutive calls, of the slowest rank for collectives."""

    probe: Probe = Field(description="What was measured.")
    seconds: PositiveFloat = Field(description="Time of one call, s.")
    calls: PositiveInt = Field(description="Calls in the sample.")


D = TypeVar("D", Setting, Point)

_SAME = ("backend", "precision", "torch_version", "library")
"""Settings that must match for a calibration to resume."""


@dataclass(frozen=True)
class PointFile:
    """A file of points."""

    setting: Setting
    points: tuple[Point, ...]


@dataclass
class PointLog:
    """Writes points as they are measured."""

    path: Path
    _file: TextIO | None = None

    def open(self, setting: Setting, *, resume: bool) -> tuple[Point, ...]:
        """Start the file, or resume it; its existing points.

        UsageError if it exists without --resume, or has other settings.
        """
        found = self._existing(setting) if resume and self.path.exists() else None
        if found is None and self.path.exists():
            raise UsageError(f"{str(self.path)!r} already exists; pass --resume to continue, or remove it")
        try:
            if found is not None:
                data = self.path.read_bytes()
                # A killed calibration may have left a part of a line.
                if data and not data.endswith(b"\n"):
                    os.truncate(self.path, data.rfind(b"\n") + 1)
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

    def _existing(self, setting: Setting) -> PointFile:
        found = read_points(self.path)
        before, now = found.setting, setting
        different = [name for name in _SAME if getattr(before, name) != getattr(now, name)]
        # A launch config without its provenance, to compare steps by.
        trained = [[(one.model, one.workload, one.micro_batch) for one in of.launches] for of in (before, now)]
        if trained[0] != trained[1]:
            different.append("model or batch")
        if [place.host for place in before.ranks] != [place.host for place in now.ranks]:
            different.append(f"ranks ({len(before.ranks)} then, {len(now.ranks)} now)")
        if different:
            raise UsageError(
                f"{str(self.path)!r} has other settings, so its points cannot be continued: {', '.join(different)}"
            )
        return found


def read_points(path: str | Path) -> PointFile:
    """Setting and points of a file; a truncated last line is ignored.

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
    return PointFile(setting, points)


def _parsed(lines: list[str], schema: type[D], first: int, problems: list[Problem]) -> Iterator[D]:
    schema.prepare()
    for number, line in enumerate(lines, first):
        try:
            yield schema.model_validate_json(line)
        except ValidationError as error:
            wrong = error.errors()[0]
            if wrong["type"] == "union_tag_invalid" and wrong["ctx"]["tag"] == "transfer":
                continue  # What earlier calibrations measured beside the rest, and none uses.
            place = ".".join(map(str, wrong["loc"]))
            renewed = f"; `{schema.renewed_by}` writes a new file" if place == "schema" else ""
            problems.append(Problem(place, f"{plain_message(wrong)}{renewed}", number))
