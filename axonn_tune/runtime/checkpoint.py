"""Saving a run and going on with it, on the same or on any other grid.

A checkpoint holds parameters, the optimizer's moments and the number of steps done. That number is also
the position in the data, which is a function of it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from axonn_tune import __version__
from axonn_tune.errors import AxonnTuneError, EnvironmentProblem, TrainingFailedError
from axonn_tune.files import is_full
from axonn_tune.grid import AXES
from axonn_tune.runtime.folders import Folder, description
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.optimizer import AdamW
from axonn_tune.runtime.pieces import Piece, Pieces, described, pieces_of, read, write, written_here
from axonn_tune.runtime.together import Ranks
from axonn_tune.specs.launch import Launch

PARAMETERS = "parameters."
_SHOWN = 4


@dataclass(frozen=True)
class Run:
    """What a run must have in common with the checkpoint it goes on from, beside the sizes of its tensors."""

    global_batch: int
    sequence_length: int
    seed: int
    data_seed: int

    @classmethod
    def of(cls, launch: Launch) -> Run:
        """That of a launch config."""
        workload = launch.workload
        return cls(workload.global_batch, workload.sequence_length, launch.seed, launch.data.seed)


class Checkpointer:
    """Saves in a thread of its own while training goes on, one checkpoint at a time, and loads.

    All ranks must make it, and call each method, together. Errors of a save under way are raised by
    whichever call comes next: EnvironmentProblem if the disk is full; the checkpoints before stay as they are.
    """

    def __init__(self, directory: str | Path, *, keep: int, mesh: Mesh, optimizer: AdamW, run: Run) -> None:
        self._folder, self._keep = Folder(Path(directory)), keep
        self._mesh, self._optimizer, self._run = mesh, optimizer, run
        self._ranks = Ranks.of_the_world()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def save(self) -> None:
        """Copy the state to host memory, then return; the rest happens beside training."""
        self.wait()
        state = {name: [piece.staged() for piece in pieces] for name, pieces in self._state(to_write=True)}
        step, needed_bytes = self._optimizer.steps_done, sum(pieces[0].whole_bytes for _, pieces in self._state())
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
        steps = self._ranks.from_first(self._folder.recover)
        return self.load(steps[-1]) if steps else None

    def load(self, step: int) -> int:
        """Load the checkpoint of a step; TrainingFailedError if it is torn or belongs to another model or run."""
        self.wait()
        self._ranks.on_all(lambda: self._read(step))
        self._optimizer.steps_done = step
        self._optimizer.loaded()
        return step

    def close(self) -> None:
        """Wait for a save under way, and end thread and process group."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._ranks.close()

    def _state(self, *, to_write: bool = False) -> Iterator[tuple[str, list[Piece]]]:
        """Everything saved, as pieces; or what of it this rank writes."""
        buckets = self._optimizer.buckets
        chosen = written_here(buckets, self._mesh)
        for bucket in buckets:
            moments = self._optimizer.moments(bucket)
            for one in bucket.parameters:
                if not to_write or one.name in chosen:
                    yield f"{PARAMETERS}{one.name}", pieces_of(one, bucket, bucket.main)
                    yield f"first_moments.{one.name}", pieces_of(one, bucket, moments.first)
                    yield f"second_moments.{one.name}", pieces_of(one, bucket, moments.second)

    def _write(self, step: int, state: Pieces, needed_bytes: int) -> None:
        """The part beside training. Rank 0 makes, names and deletes folders."""
        try:
            begun = self._ranks.from_first(lambda: self._begin(step, needed_bytes))
            write(begun, state, self._ranks.group)
            self._ranks.from_first(lambda: self._finish(step))
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
        sizes = {axis: grid.axis_size(axis) for axis in AXES}
        said = {"version": __version__, "run": vars(self._run), "grid": sizes | {"order": list(grid.order)}}
        self._folder.finish(step, said)
        self._folder.keep(self._keep)

    def _explained(self, step: int, error: BaseException) -> AxonnTuneError:
        """A save's failure in words; that of the lowest rank, if it is from one that takes part in writing."""
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
        said = description(place)
        if said is None:
            raise TrainingFailedError(f"{str(place)!r} is no checkpoint, or a torn one")
        state = dict(self._state())
        _must_agree(f"checkpoint {str(place)!r} is of another run", list(self._run_differences(said)))
        _must_agree(f"checkpoint {str(place)!r} is of another model", list(_differences(described(place), state)))
        _read_or_fail(place, lambda: read(place, state))

    def _run_differences(self, said: dict[str, Any]) -> Iterator[str]:
        for name, here in vars(self._run).items():
            there = said.get("run", {}).get(name)
            if there != here:
                yield f"{name} is {there} there and {here} here"


def _differences(saved: dict[str, tuple[tuple[int, ...], Any]], state: Pieces) -> Iterator[str]:
    """Parameters whose sizes differ, or that only one side has; moments go with their parameters."""
    there = {name.removeprefix(PARAMETERS): size for name, (size, _) in saved.items() if name.startswith(PARAMETERS)}
    here = {name.removeprefix(PARAMETERS): one[0].size for name, one in state.items() if name.startswith(PARAMETERS)}
    for name in dict.fromkeys([*here, *there]):
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
