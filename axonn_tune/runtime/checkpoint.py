"""Checkpoints: saving a run, resuming it on the same or any other grid, exporting its parameters.

A checkpoint holds the parameters, the optimizer's moments and the number of steps done. The position in the data is a
function of that number.

In a folder of checkpoints, `step-N` is complete and `step-N.tmp` is being written. A checkpoint gets its name once
everything in it is on the disk; its marker, written last, lists each file with its size and checksum. A checkpoint
whose marker or files are not as they were written is damaged: it is named and never used, nor is another one in its
place unless asked for.

An export is one safetensors file of the whole model, for programs that know no grid.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from axonn_tune.errors import AxonnTuneError, EnvironmentProblem, TrainingFailedError, UsageError
from axonn_tune.files import is_full, read_regular, replacing, sync_folder
from axonn_tune.frameworks.optimizers import ADAMW
from axonn_tune.grid import AXES
from axonn_tune.runtime.adapters import adapter_places, add_product
from axonn_tune.runtime.devices import synchronize, use_device
from axonn_tune.runtime.mesh import Mesh, Result, WorldGroup, is_broken_connection, is_timeout
from axonn_tune.runtime.optimizer import ShardedOptimizer
from axonn_tune.runtime.parameters import Parameter, ParameterStore
from axonn_tune.runtime.shards import (
    METADATA_FILE,
    Shard,
    Shards,
    Stored,
    names_to_write,
    read,
    read_metadata,
    shards_of,
    whole_shard,
    write,
    write_metadata,
)
from axonn_tune.specs.launch import Launch
from axonn_tune.vocabulary import VERSION

SCHEMA = "axonn-tune/checkpoint/2"
_MARKER, _LOCK = "checkpoint.json", ".lock"
_NAME = re.compile(r"step-(0|[1-9][0-9]{0,14})")
_LEFT_OVER = ".tmp"
_CHUNK_BYTES = 1 << 24
_MARKER_BYTES = 1 << 26


class DamagedCheckpointError(TrainingFailedError):
    """A checkpoint has changed since it was written."""

    @classmethod
    def of(cls, checkpoint: Path, words: str) -> DamagedCheckpointError:
        """Names the checkpoint."""
        return cls(f"checkpoint {checkpoint.name} in {str(checkpoint.parent)!r} is damaged: {words}")


@dataclass(frozen=True)
class Marker:
    """Content of a complete checkpoint's marker; sizes in bytes, and CRC-32, by file."""

    step: int
    version: str
    run: dict[str, Any]
    sizes: dict[str, int]
    checksums: dict[str, int]


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of a run."""

    path: Path

    def lock(self) -> TextIO | None:
        """Lock the folder for as long as the file is open; UsageError if another run holds the lock.

        None on a file system without locks. EnvironmentProblem if nothing can be written there.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / _LOCK).open("a", encoding="utf-8")
        except OSError as error:
            raise EnvironmentProblem(f"cannot save checkpoints in {str(self.path)!r}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise UsageError(
                f"another run saves its checkpoints in {str(self.path)!r}: wait for its end, or give this one a "
                "checkpoint.directory of its own"
            ) from error
        except OSError:
            file.close()
            return None
        return file

    def place(self, step: int) -> Path:
        """Path of the complete checkpoint of a step."""
        return self.path / f"step-{step}"

    def named(self) -> list[int]:
        """Steps with a checkpoint, damaged ones included, ascending."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = ((_NAME.fullmatch(one.name), one) for one in self.path.iterdir())
            return sorted(int(match[1]) for match, one in found if match and one.is_dir())
        return []

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending; checksums are not verified."""
        return [step for step in self.named() if _is_complete(self.place(step))]

    def recover(self) -> list[int]:
        """As `named`, after renaming a checkpoint that is complete but for its name: its run was killed just before."""
        for left in self.path.glob(f"step-*{_LEFT_OVER}"):
            target = left.with_suffix("")
            if _NAME.fullmatch(target.name) and not target.exists() and _is_complete(left):
                left.rename(target)
        return self.named()

    def begin(self, step: int) -> Path:
        """An empty folder to write the checkpoint of a step into; removes what earlier attempts left."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.clean()
        begun = self.path / f"step-{step}{_LEFT_OVER}"
        begun.mkdir()
        return begun

    def finish(self, step: int, marker: Mapping[str, Any], checksums: Mapping[str, int]) -> None:
        """Give a written checkpoint its marker and its name; checksums: of all files."""
        begun, target = self.path / f"step-{step}{_LEFT_OVER}", self.place(step)
        sizes = {one.name: one.stat().st_size for one in sorted(begun.iterdir())}
        content = {"schema": SCHEMA, "step": step, **marker, "files": sizes, "crc32": dict(sorted(checksums.items()))}
        with (begun / _MARKER).open("w", encoding="utf-8") as file:
            file.write(_sealed(content))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(begun)
        if target.exists():
            # A run that resumed from an earlier step saves this step again.
            target.rename(self.path / f"step-{step}.old{_LEFT_OVER}")
        begun.rename(target)
        sync_folder(self.path)
        self.clean()

    def keep(self, newest: int) -> None:
        """Delete all complete checkpoints but the newest ones."""
        for step in self.steps()[:-newest]:
            # Renamed first: an interrupted deletion must not leave half a checkpoint under its name.
            self.place(step).rename(self.path / f"step-{step}.old{_LEFT_OVER}")
        self.clean()

    def clean(self) -> None:
        """Delete unfinished checkpoints."""
        self.recover()
        for left in self.path.glob(f"step-*{_LEFT_OVER}"):
            shutil.rmtree(left, ignore_errors=True)


def _sealed(content: Mapping[str, Any]) -> str:
    """A marker's text: the content, and a checksum of it."""
    checksum = zlib.crc32(json.dumps(content).encode())
    return json.dumps({**content, "checksum": checksum}, indent=2)


def _is_complete(checkpoint: Path) -> bool:
    try:
        read_marker(checkpoint)
    except DamagedCheckpointError:
        return False
    return True


def read_marker(checkpoint: Path) -> Marker:
    """The marker; DamagedCheckpointError if it is not as it was written, or a file is missing or of another size."""
    try:
        text = read_regular(checkpoint / _MARKER, limit_bytes=_MARKER_BYTES).decode()
        content = json.loads(text)
        step, version, run, sizes = (content[key] for key in ("step", "version", "run", "files"))
        marker = Marker(step, version, run, sizes, content.get("crc32", {}))
        sealed = {key: value for key, value in content.items() if key != "checksum"}
        known = (content["schema"], _sealed(sealed), marker.checksums.keys()) == (SCHEMA, text, marker.sizes.keys())
        plain = isinstance(run, dict) and all(
            Path(name).name == name and type(size) is int for name, size in marker.sizes.items()
        )
    except (OSError, AxonnTuneError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        how = "missing or unreadable" if isinstance(error, OSError | AxonnTuneError) else "broken"
        raise DamagedCheckpointError.of(checkpoint, f"{_MARKER} is {how}") from error
    if not (known and plain):
        raise DamagedCheckpointError.of(checkpoint, f"{_MARKER} is not as this version writes it, as {SCHEMA}")
    for name, size in marker.sizes.items():
        file = checkpoint / name
        if not file.is_file():
            raise DamagedCheckpointError.of(checkpoint, f"{name} is missing")
        if file.stat().st_size != size:
            raise DamagedCheckpointError.of(checkpoint, f"{name} has {file.stat().st_size:,} bytes instead of {size:,}")
    return marker


def require_whole(checkpoint: Path, *, part: int = 0, parts: int = 1) -> Marker:
    """The marker, after every `parts`th file has been read; DamagedCheckpointError if one is not as it was written."""
    marker = read_marker(checkpoint)
    for name in sorted(marker.checksums)[part::parts]:
        try:
            changed = checksum_of(checkpoint / name) != marker.checksums[name]
        except OSError as error:
            raise DamagedCheckpointError.of(checkpoint, f"{name} cannot be read: {error.strerror}") from error
        if changed:
            raise DamagedCheckpointError.of(checkpoint, f"{name} has changed since it was written")
    return marker


def checksum_of(path: Path) -> int:
    """CRC-32 of a file."""
    checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum


def _or_damaged(checkpoint: Path, reading: Callable[[], Result]) -> Result:
    """Result of reading; DamagedCheckpointError for any error in it."""
    try:
        return reading()
    except Exception as error:
        raise DamagedCheckpointError.of(checkpoint, f"it cannot be read: {error}") from error


def _with_newest_whole(
    error: DamagedCheckpointError, steps: Sequence[int], require: Callable[[int], object], advice: str
) -> DamagedCheckpointError:
    """The error with the newest intact checkpoint, and the option to resume from it."""
    for step in reversed(steps):
        with contextlib.suppress(DamagedCheckpointError):
            require(step)
            return DamagedCheckpointError(f"{error}; the newest whole one is step-{step}: {advice} step-{step}")
    return DamagedCheckpointError(f"{error}; there is no whole one beside it")


PARAMETERS, STATES = "parameters.", ("first_moments", "second_moments")
_SHOWN = 4
_UNSAID = {"optimizer": ADAMW}
"""What checkpoints of earlier versions do not say of their run."""


class Checkpointer:
    """Saves in a background thread, one checkpoint at a time, and loads. run: what a resumed run must share with it.

    All ranks must make it, and call each method, together. Errors of an unfinished save are raised by the next
    call: EnvironmentProblem if the disk is full. Earlier checkpoints stay as they are.
    """

    def __init__(
        self, directory: str | Path, *, keep: int, mesh: Mesh, optimizer: ShardedOptimizer, run: Mapping[str, int | str]
    ) -> None:
        self._folder, self._keep = CheckpointFolder(Path(directory)), keep
        self._mesh, self._optimizer, self._run = mesh, optimizer, run
        self._ranks = WorldGroup.of_the_world()
        self._lock: TextIO | None = None
        self._ranks.from_rank_0(self._take)
        self._thread = ThreadPoolExecutor(1, "checkpoint", initializer=use_device, initargs=(optimizer.device,))
        self._saving: Future[None] | None = None

    def save(self) -> None:
        """Copy the state to host memory and return; the rest happens in the background."""
        self.wait()
        state = {name: [shard.host_copy() for shard in shards] for name, shards in self._state(to_write=True)}
        synchronize(self._optimizer.device)
        self._saving = self._thread.submit(self._write, self._optimizer.steps_done, state)

    def wait(self) -> None:
        """Wait for the save in progress; raises its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def load(self, name: str | None = None) -> int | None:
        """Load the checkpoint of a name such as step-200, or the newest; its step, None if there is none at all.

        DamagedCheckpointError, with the newest whole one, if it is not as it was written; TrainingFailedError if it
        belongs to another model or run; UsageError if there is none of that name.
        """
        self.wait()
        match = _NAME.fullmatch(name or "")
        if name is not None and match is None:
            raise UsageError(f"--resume-from {name}: write the name of a checkpoint, such as step-200")
        steps = self._ranks.from_rank_0(self._folder.recover if match is None else self._folder.named)
        if match is None and not steps:
            return None
        step = steps[-1] if match is None else int(match[1])
        if step not in steps:
            there = ", ".join(f"step-{one}" for one in steps) or "none"
            raise UsageError(f"there is no checkpoint step-{step} in {str(self._folder.path)!r}, only {there}")
        try:
            self._require_whole(step)
            of_all = self._ranks.on_all(lambda: [name for name, _ in self._state()])
            self._ranks.on_all(lambda: self._read(step, {name for names in of_all for name in names}))
        except DamagedCheckpointError as error:
            others = [one for one in steps if one != step]
            raise _with_newest_whole(error, others, self._require_whole, "continue with --resume-from") from error
        self._optimizer.steps_done = step
        self._optimizer.publish(in_step=False)
        return step

    def _take(self) -> None:
        self._lock = self._folder.lock()

    def _require_whole(self, step: int) -> None:
        """Read every file once, each on one of the ranks."""
        part, parts = self._mesh.rank, self._mesh.grid.world
        self._ranks.on_all(lambda: require_whole(self._folder.place(step), part=part, parts=parts))

    def close(self) -> None:
        """Wait for an unfinished save, then end the thread and the process group."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._ranks.close()
            if self._lock is not None:
                self._lock.close()

    def _state(self, *, to_write: bool = False) -> Iterator[tuple[str, list[Shard]]]:
        """All saved state as shards; or the part of it that this rank writes."""
        buckets = self._optimizer.buckets
        chosen = names_to_write(buckets, self._mesh)
        for bucket in buckets:
            for one in bucket.parameters:
                if not to_write or one.name in chosen:
                    yield f"{PARAMETERS}{one.name}", shards_of(one, bucket, bucket.master)
                    for name, state in zip(STATES, bucket.states, strict=False):
                        yield f"{name}.{one.name}", shards_of(one, bucket, state)

    def _write(self, step: int, state: Shards) -> None:
        """The background part of a save. Rank 0 makes, names and deletes folders."""
        try:
            own_bytes = sum(shard.values.nbytes for shards in state.values() for shard in shards)
            needed_bytes = sum(self._ranks.on_all(lambda: own_bytes))
            begun = self._ranks.from_rank_0(lambda: self._begin(step, needed_bytes))
            own = [begun / f"__{self._mesh.rank}_0.distcp", *([begun / METADATA_FILE] if self._ranks.first else [])]
            stored = self._ranks.on_all(lambda: write(own[0], state))
            self._ranks.from_rank_0(lambda: write_metadata(begun, stored))
            checksums = self._ranks.on_all(lambda: {one.name: checksum_of(one) for one in own})
            self._ranks.from_rank_0(lambda: self._finish(step, dict(pair for one in checksums for pair in one.items())))
        except Exception as error:
            if self._ranks.first:
                self._folder.clean()
            where = str(self._folder.path)
            if is_broken_connection(error) and not is_timeout(error):
                # Another rank is lost: the watch names it, and the disk is not to blame.
                error.add_note(f"while saving step {step} in {where!r}")
            if isinstance(error, AxonnTuneError) or (is_broken_connection(error) and not is_timeout(error)):
                raise
            reason = "the disk, or a quota on it, is full" if is_full(error) else f"{type(error).__name__}: {error}"
            raise EnvironmentProblem(f"cannot save step {step} in {where!r}: {reason}{self._last_good()}") from error

    def _begin(self, step: int, needed_bytes: int) -> Path:
        begun = self._folder.begin(step)
        free_bytes = shutil.disk_usage(begun).free
        if free_bytes < needed_bytes:
            raise EnvironmentProblem(
                f"the checkpoint of step {step} needs {needed_bytes / 1e9:,.3g} GB, "
                f"but {str(self._folder.path)!r} has {free_bytes / 1e9:,.3g} GB free{self._last_good()}"
            )
        return begun

    def _finish(self, step: int, checksums: Mapping[str, int]) -> None:
        grid = self._mesh.grid
        sizes = {axis: size for axis, size in grid.by_axis.items() if axis in AXES or size > 1}
        marker = {"version": VERSION, "run": self._run, "grid": sizes | {"order": list(grid.order)}}
        self._folder.finish(step, marker, checksums)
        self._folder.keep(self._keep)

    def _last_good(self) -> str:
        steps = self._folder.steps()
        return f"; the last good checkpoint is that of step {steps[-1]}" if steps else "; no checkpoint was saved yet"

    def _read(self, step: int, names: Set[str]) -> None:
        """This rank's part of a checkpoint; names: of all ranks' tensors."""
        place, state = self._folder.place(step), dict(self._state())
        marker = read_marker(place)
        stored = _stored(place, marker)
        ran = ((name, marker.run.get(name, _UNSAID.get(name)), here) for name, here in self._run.items())
        runs = [f"{name} is {there} there and {here} here" for name, there, here in ran if there != here]
        _must_agree(f"checkpoint {str(place)!r} is of another run", runs)
        # Parameters whose sizes differ, or that only one side has; moments go with their parameters.
        sizes = {name: one.size for name, one in stored.items() if name.startswith(PARAMETERS)}
        own = {name: one[0].size for name, one in state.items() if name.startswith(PARAMETERS)}
        differences = [
            f"{name.removeprefix(PARAMETERS)} is {_shown(sizes.get(name))} there and {_shown(own.get(name))} here"
            for name in dict.fromkeys([*own, *(name for name in sizes if name not in names)])
            if own.get(name) != sizes.get(name)
        ]
        _must_agree(f"checkpoint {str(place)!r} is of another model", differences)
        _or_damaged(place, lambda: read(place, stored, state))


def _stored(checkpoint: Path, marker: Marker) -> Stored:
    return _or_damaged(checkpoint, lambda: read_metadata(checkpoint, marker.sizes))


def _shown(size: tuple[int, ...] | None) -> str:
    return "absent" if size is None else " × ".join(f"{length:,}" for length in size)


def _must_agree(what: str, differences: list[str]) -> None:
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise TrainingFailedError(f"{what}: {'; '.join(differences[:_SHOWN])}{more}")


TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def checkpoint_at(path: str | Path) -> Path:
    """The checkpoint of a path, or the newest in a folder of checkpoints; UsageError if there is none."""
    path = Path(path)
    if (path / _MARKER).exists() or (_NAME.fullmatch(path.name) and path.is_dir()):
        return path
    steps = CheckpointFolder(path).named()
    if not steps:
        raise UsageError(f"{str(path)!r} is neither a checkpoint nor a folder that holds one")
    return CheckpointFolder(path).place(steps[-1])


def load_frozen(path: str | Path, store: ParameterStore) -> str:
    """Fill what does not train from a checkpoint of any grid, or the newest in a folder; a text that names it.

    DamagedCheckpointError if it is not as it was written; TrainingFailedError if it is of another model.
    """
    place = checkpoint_at(path)
    grid = store.mesh.grid
    marker = require_whole(place, part=store.mesh.rank, parts=grid.world)
    stored = _stored(place, marker)
    every: list[Parameter] = [*store.matrices, *store.vectors]
    shards = {f"{PARAMETERS}{one.name}": [whole_shard(one)] for one in every if not one.trains}
    sizes = {name: one.size for name, one in stored.items()}
    _must_agree(
        f"checkpoint.base {str(place)!r} is of another model",
        [
            f"{name.removeprefix(PARAMETERS)} is {_shown(sizes.get(name))} there and {_shown(one.size)} here"
            for name, (one,) in shards.items()
            if sizes.get(name) != one.size
        ],
    )
    _or_damaged(place, lambda: read(place, stored, shards))
    return f"step {marker.step}, {zlib.crc32(json.dumps(marker.checksums, sort_keys=True).encode()):08x}"


def merged(checkpoint: Path, launch: Launch) -> Callable[[str, torch.Tensor], None]:
    """What adds a checkpoint's adapters, trained by a launch config, to a weight of the name, in place.

    UsageError if the launch config has no adapters.
    """
    if launch.model.tuning is None:
        raise UsageError("the launch config of adapters that are merged has no workload.tuning")
    stored, places = _stored(checkpoint, require_whole(checkpoint)), adapter_places(launch.model)

    def tensor(name: str) -> torch.Tensor:
        if (its := stored.get(f"{PARAMETERS}{name}")) is None:
            raise TrainingFailedError(f"checkpoint {str(checkpoint)!r} has no adapter {name}: it is of another run")
        values = torch.empty(its.size, dtype=its.dtype)
        shards = {f"{PARAMETERS}{name}": [Shard(its.size, (0, 0), values)]}
        _or_damaged(checkpoint, partial(read, checkpoint, stored, shards))
        return values

    def add(name: str, weight: torch.Tensor) -> None:
        for its, columns in places.get(name.removeprefix(PARAMETERS), ()):
            down, up = (tensor(f"{its}.{one}").to(weight.dtype) for one in ("lora_a", "lora_b"))
            add_product(weight, down, up, columns, launch.adapter_scale)

    return add


def export(
    checkpoint: Path,
    output: str | Path,
    *,
    dtype: torch.dtype | None = None,
    change: Callable[[str, torch.Tensor], None] = lambda name, values: None,
) -> int:
    """Write all parameters under this program's names, weights as `[inputs, outputs]`; the number of elements.

    change: in place, by their names.
    One tensor at a time is in memory. `dtype` None: as saved. Neither the library nor a GPU is needed:
    the format is the length of a header, the header in JSON, then the tensors one after the other.
    DamagedCheckpointError, with the newest whole one beside it, if the checkpoint is not as it was written.
    """
    try:
        marker = require_whole(checkpoint)
        stored = _stored(checkpoint, marker)
    except DamagedCheckpointError as error:
        folder = CheckpointFolder(checkpoint.parent)
        others = [step for step in folder.named() if folder.place(step) != checkpoint]
        raise _with_newest_whole(error, others, lambda step: require_whole(folder.place(step)), "export") from error
    sizes = {name: (one.size, dtype or one.dtype) for name, one in stored.items() if name.startswith(PARAMETERS)}
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt", "step": str(marker.step), "axonn_tune": str(marker.version)}
    }
    end, format_names = 0, {kind: name.upper().replace("P", "") for name, kind in TYPES.items()}
    for name, (size, kind) in sizes.items():
        begin, end = end, end + torch.Size(size).numel() * kind.itemsize
        header[name.removeprefix(PARAMETERS)] = {
            "dtype": format_names[kind],
            "shape": list(size),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    # Spaces after it bring the tensors to a multiple of eight, which lets readers map them into memory.
    text += b" " * (-len(text) % 8)
    with replacing(output) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (size, kind) in sizes.items():
            values = torch.empty(size, dtype=stored[name].dtype)
            whole = {name: [Shard(size, (0,) * len(size), values)]}
            _or_damaged(checkpoint, partial(read, checkpoint, stored, whole))
            change(name, values)
            file.write(values.to(kind).flatten().view(torch.uint8).numpy().data)
    return sum(torch.Size(size).numel() for size, _ in sizes.values())
