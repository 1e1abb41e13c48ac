"""Checkpoints: saving a run, resuming it on the same or any other grid, exporting its parameters.

A checkpoint holds the parameters, the optimizer's moments and the number of steps done. That number is also the
position in the data, which is a function of it.

In a folder of checkpoints, `step-N` is complete and `step-N.tmp` is being written. A checkpoint gets its name once
everything in it is on the disk; its marker, written last, lists each file with its size. A checkpoint that lacks the
marker, or a file, or part of one, is truncated and never used.

An export is one safetensors file of the whole model, for programs that know no grid.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from axonn_tune import __version__
from axonn_tune.errors import AxonnTuneError, EnvironmentProblem, TrainingFailedError, UsageError
from axonn_tune.files import is_full, replacing, sync_folder
from axonn_tune.grid import AXES
from axonn_tune.runtime.devices import synchronize, use_device
from axonn_tune.runtime.mesh import Mesh, WorldGroup
from axonn_tune.runtime.optimizer import AdamW
from axonn_tune.runtime.shards import Shard, Shards, names_to_write, read, saved_tensors, shards_of, write
from axonn_tune.specs.launch import Launch

SCHEMA = "axonn-tune/checkpoint/1"
_MARKER = "checkpoint.json"
_NAME = re.compile(r"step-(\d+)")
_LEFT_OVER = ".tmp"


@dataclass(frozen=True)
class CheckpointFolder:
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
        return sorted(step for step, one in numbered if read_marker(one) is not None)

    def recover(self) -> list[int]:
        """The same, after renaming a checkpoint that is complete but for its name: its run was killed just before."""
        for left in self.path.glob(f"step-*{_LEFT_OVER}"):
            target = left.with_suffix("")
            if _NAME.fullmatch(target.name) and not target.exists() and read_marker(left) is not None:
                left.rename(target)
        return self.steps()

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into; removes what earlier attempts left."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.clean()
        begun = self.path / f"step-{step}{_LEFT_OVER}"
        begun.mkdir()
        return begun

    def finish(self, step: int, marker: Mapping[str, Any]) -> None:
        """Give a written checkpoint its marker and its name."""
        begun, target = self.path / f"step-{step}{_LEFT_OVER}", self.place(step)
        sizes = {one.name: one.stat().st_size for one in sorted(begun.iterdir())}
        with (begun / _MARKER).open("w", encoding="utf-8") as file:
            json.dump({"schema": SCHEMA, "step": step, **marker, "files": sizes}, file, indent=2)
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
        """Delete all complete checkpoints but the newest ones."""
        for step in self.steps()[:-newest]:
            # Renamed first: a deletion cut short must not leave half a checkpoint under its name.
            self.place(step).rename(self.path / f"step-{step}.old{_LEFT_OVER}")
        self.clean()

    def clean(self) -> None:
        """Delete what was begun and not finished."""
        self.recover()
        for left in self.path.glob(f"step-*{_LEFT_OVER}"):
            shutil.rmtree(left, ignore_errors=True)


def read_marker(checkpoint: Path) -> dict[str, Any] | None:
    """The marker's content; None if the checkpoint is truncated, or of a schema that this version does not know."""
    try:
        marker = json.loads((checkpoint / _MARKER).read_text(encoding="utf-8"))
        whole = all((checkpoint / name).stat().st_size == size for name, size in marker["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return marker if whole and marker.get("schema") == SCHEMA else None


PARAMETERS = "parameters."
_SHOWN = 4


@dataclass(frozen=True)
class RunIdentity:
    """What a run must have in common with the checkpoint it resumes from, beside the sizes of its tensors."""

    global_batch: int
    sequence_length: int
    seed: int
    data_seed: int

    @classmethod
    def of(cls, launch: Launch) -> RunIdentity:
        """That of a launch config."""
        workload = launch.workload
        return cls(workload.global_batch, workload.sequence_length, launch.seed, launch.data.seed)


class Checkpointer:
    """Saves in a thread of its own beside training, one checkpoint at a time, and loads.

    All ranks must make it, and call each method, together. Errors of an unfinished save are raised by the next
    call: EnvironmentProblem if the disk is full. Earlier checkpoints stay as they are.
    """

    def __init__(self, directory: str | Path, *, keep: int, mesh: Mesh, optimizer: AdamW, run: RunIdentity) -> None:
        self._folder, self._keep = CheckpointFolder(Path(directory)), keep
        self._mesh, self._optimizer, self._run = mesh, optimizer, run
        self._ranks = WorldGroup.of_the_world()
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=use_device, initargs=(optimizer.device,))
        self._saving: Future[None] | None = None

    def save(self) -> None:
        """Copy the state to host memory, then return; the rest happens beside training."""
        self.wait()
        state = {name: [shard.host_copy() for shard in shards] for name, shards in self._state(to_write=True)}
        synchronize(self._optimizer.device)
        step, needed_bytes = self._optimizer.steps_done, sum(shards[0].whole_bytes for _, shards in self._state())
        self._saving = self._thread.submit(self._write, step, state, needed_bytes)

    def wait(self) -> None:
        """Return once nothing is being saved; raises what went wrong."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def load_latest(self) -> int | None:
        """Load the newest checkpoint that is whole and return its step; None if there is none.

        TrainingFailedError if it belongs to another model or run.
        """
        self.wait()
        steps = self._ranks.from_rank_0(self._folder.recover)
        return self.load(steps[-1]) if steps else None

    def load(self, step: int) -> int:
        """Load the checkpoint of a step; TrainingFailedError if it is truncated or of another model or run."""
        self.wait()
        self._ranks.on_all(lambda: self._read(step))
        self._optimizer.steps_done = step
        self._optimizer.loaded()
        return step

    def close(self) -> None:
        """Wait for an unfinished save, then end the thread and the process group."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._ranks.close()

    def _state(self, *, to_write: bool = False) -> Iterator[tuple[str, list[Shard]]]:
        """All saved state as shards; or the part of it that this rank writes."""
        buckets = self._optimizer.buckets
        chosen = names_to_write(buckets, self._mesh)
        for bucket in buckets:
            moments = self._optimizer.moments(bucket)
            for one in bucket.parameters:
                if not to_write or one.name in chosen:
                    yield f"{PARAMETERS}{one.name}", shards_of(one, bucket, bucket.master)
                    yield f"first_moments.{one.name}", shards_of(one, bucket, moments.first)
                    yield f"second_moments.{one.name}", shards_of(one, bucket, moments.second)

    def _write(self, step: int, state: Shards, needed_bytes: int) -> None:
        """The part beside training. Rank 0 makes, names and deletes folders."""
        try:
            begun = self._ranks.from_rank_0(lambda: self._begin(step, needed_bytes))
            write(begun, state, self._ranks.group)
            self._ranks.from_rank_0(lambda: self._finish(step))
        except (Exception, CheckpointException) as error:
            if self._ranks.first:
                self._folder.clean()
            raise self._explained(step, error) from error

    def _begin(self, step: int, needed_bytes: int) -> Path:
        begun = self._folder.begin(step)
        free_bytes = shutil.disk_usage(begun).free
        if free_bytes < needed_bytes:
            raise EnvironmentProblem(
                f"the checkpoint of step {step} needs {needed_bytes / 1e9:,.3g} GB, "
                f"but {str(self._folder.path)!r} has {free_bytes / 1e9:,.3g} GB free{self._last_good()}"
            )
        return begun

    def _finish(self, step: int) -> None:
        grid = self._mesh.grid
        sizes = {axis: size for axis, size in grid.by_axis.items() if axis in AXES or size > 1}
        marker = {"version": __version__, "run": vars(self._run), "grid": sizes | {"order": list(grid.order)}}
        self._folder.finish(step, marker)
        self._folder.keep(self._keep)

    def _explained(self, step: int, error: BaseException) -> AxonnTuneError:
        """A save's failure in words; that of the lowest rank, if several failed in writing."""
        if isinstance(error, CheckpointException) and error.failures:
            error = error.failures[min(error.failures)][0]
        if isinstance(error, AxonnTuneError):
            return error
        reason = "the disk, or a quota on it, is full" if is_full(error) else f"{type(error).__name__}: {error}"
        where = str(self._folder.path)
        return EnvironmentProblem(f"cannot save step {step} in {where!r}: {reason}{self._last_good()}")

    def _last_good(self) -> str:
        steps = self._folder.steps()
        return f"; the last good checkpoint is that of step {steps[-1]}" if steps else "; no checkpoint was saved yet"

    def _read(self, step: int) -> None:
        place = self._folder.place(step)
        marker = read_marker(place)
        if marker is None:
            raise TrainingFailedError(f"{str(place)!r} is not a checkpoint, or is truncated")
        state = dict(self._state())
        _must_agree(f"checkpoint {str(place)!r} is of another run", list(self._run_differences(marker)))
        differences = list(_differences(saved_tensors(place), state, whole=self._mesh.grid.pipeline == 1))
        _must_agree(f"checkpoint {str(place)!r} is of another model", differences)
        _read_or_fail(place, lambda: read(place, state))

    def _run_differences(self, marker: dict[str, Any]) -> Iterator[str]:
        for name, here in vars(self._run).items():
            there = marker.get("run", {}).get(name)
            if there != here:
                yield f"{name} is {there} there and {here} here"


def _differences(saved: dict[str, tuple[tuple[int, ...], Any]], state: Shards, *, whole: bool) -> Iterator[str]:
    """Parameters whose sizes differ, or that only one side has; moments go with their parameters.

    whole: the state is the whole model's, not a pipeline stage's.
    """
    there = {name.removeprefix(PARAMETERS): size for name, (size, _) in saved.items() if name.startswith(PARAMETERS)}
    here = {name.removeprefix(PARAMETERS): one[0].size for name, one in state.items() if name.startswith(PARAMETERS)}
    for name in dict.fromkeys([*here, *there] if whole else here):
        if here.get(name) != there.get(name):
            yield f"{name} is {_shown(there.get(name))} there and {_shown(here.get(name))} here"


def _shown(size: tuple[int, ...] | None) -> str:
    return "absent" if size is None else " × ".join(f"{length:,}" for length in size)


def _must_agree(what: str, differences: list[str]) -> None:
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise TrainingFailedError(f"{what}: {'; '.join(differences[:_SHOWN])}{more}")


def _read_or_fail(place: Path, reading: Callable[[], None]) -> None:
    try:
        reading()
    except Exception as error:
        # Sizes are right, or it would not have come this far: bytes have changed, or cannot be read.
        raise TrainingFailedError(f"checkpoint {str(place)!r} cannot be read: {error}") from error


TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_FORMAT_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def checkpoint_at(path: str | Path) -> Path:
    """The checkpoint of a path, or the newest in a folder of checkpoints; UsageError if there is none."""
    path = Path(path)
    if read_marker(path) is not None:
        return path
    steps = CheckpointFolder(path).steps()
    if not steps:
        raise UsageError(f"{str(path)!r} is neither a complete checkpoint nor a folder that holds one")
    return CheckpointFolder(path).place(steps[-1])


def export(checkpoint: Path, output: str | Path, *, dtype: torch.dtype | None = None) -> int:
    """Write all parameters under this program's names, weights as `[inputs, outputs]`; the number of elements.

    One tensor at a time is in memory. `dtype` None: as saved. Neither the library nor a GPU is needed:
    the format is the length of a header, the header in JSON, then the tensors one after the other.
    """
    marker, found = read_marker(checkpoint), saved_tensors(checkpoint)
    assert marker is not None, "the caller has checked"
    sizes = {name: (size, dtype or kept) for name, (size, kept) in found.items() if name.startswith(PARAMETERS)}
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "step": str(marker["step"]), "axonn_tune": marker["version"]}
    }
    end = 0
    for name, (size, kind) in sizes.items():
        begin, end = end, end + torch.Size(size).numel() * kind.itemsize
        header[name.removeprefix(PARAMETERS)] = {
            "dtype": _FORMAT_NAMES[kind],
            "shape": list(size),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    # Spaces after it bring the tensors to a multiple of eight, which lets readers map them into memory.
    text += b" " * (-len(text) % 8)
    with replacing(output) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (size, kind) in sizes.items():
            values = torch.empty(size, dtype=found[name][1])
            read(checkpoint, {name: [Shard(size, (0,) * len(size), values)]})
            file.write(values.to(kind).flatten().view(torch.uint8).numpy().data)
    return sum(torch.Size(size).numel() for size, _ in sizes.values())
