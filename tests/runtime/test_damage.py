"""Checkpoints that are damaged, or made to do harm: each is named, none is loaded, and none runs anything."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties

from axonn_tune.errors import EnvironmentProblem, UsageError
from axonn_tune.grid import Grid
from axonn_tune.runtime.checkpoint import DamagedCheckpointError
from tests.cli.running import run
from tests.runtime import saving
from tests.runtime.pool import Pools

SERIAL = Grid()
STORED = Path(__file__).parents[1] / "fixtures" / "v1" / "checkpoint"
FILES = (".metadata", "__0_0.distcp", "checkpoint.json")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("saved")
    for step in (2, 3):
        saving.save_marked(SERIAL, folder, step)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def damage(path: Path, chance: random.Random) -> str:
    """Change a file in one of the ways in which disks, networks and people do; what was done."""
    content, ways = bytearray(path.read_bytes()), ["flip", "cut", "zero", "grow", "remove", "random", "swap"]
    how = chance.choice(ways)
    place = chance.randrange(len(content))
    if how == "flip":
        content[place] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del content[place:]
    elif how == "zero":
        content[place : place + 64] = bytes(255 - one for one in content[place : place + 64])
    elif how == "grow":
        content += b"\n"
    elif how == "random":
        content[:] = chance.randbytes(len(content))
    elif how == "swap":
        content[0], content[-1] = content[-1] ^ 1, content[0]
    path.unlink()
    if how != "remove":
        path.write_bytes(content)
    return how


@pytest.mark.parametrize("name", FILES)
def test_each_of_many_damaged_checkpoints_is_named_and_none_loaded(name: str, copied: Path, saved: Path) -> None:
    """Guards against a silent fall-back, a weight that is off, and a message that is a traceback."""
    chance = random.Random(name)
    trainee = saving.trainee(SERIAL)
    saver = trainee.checkpoints(copied)
    before = [tensor.clone() for _, tensor in trainee.tensors()]
    for _ in range(14):
        how = damage(copied / "step-3" / name, chance)
        with pytest.raises(DamagedCheckpointError, match=r"^checkpoint step-3 in .* is damaged: ") as caught:
            saver.load()
        assert name in str(caught.value), how
        assert str(caught.value).endswith("the newest whole one is step-2: continue with --resume-from step-2")
        (copied / "step-3" / name).unlink(missing_ok=True)
        shutil.copy(saved / "step-3" / name, copied / "step-3" / name)
    assert all(torch.equal(one, tensor) for one, (_, tensor) in zip(before, trainee.tensors(), strict=True))
    assert saver.load("step-2") == 2
    saver.close()


def test_all_ranks_agree_on_damage_that_one_of_them_finds(tmp_path: Path, pools: Pools) -> None:
    """Guards against ranks that wait for one that has ended."""
    grid = Grid(1, 1, 2, 1)
    for step in (2, 3):
        pools(2).run(saving.save_marked, grid, tmp_path, step)
    damage(tmp_path / "step-3" / "__1_0.distcp", random.Random(1))
    for said in pools(2).run(saving.error_of_loading, grid, tmp_path):
        assert said.startswith(f"6 checkpoint step-3 in {str(tmp_path)!r} is damaged: __1_0.distcp ")
        assert said.endswith("continue with --resume-from step-2")


def test_what_is_a_checkpoint_and_whose(copied: Path) -> None:
    """Guards --resume-from, folders of a checkpoint's name, and two runs that would delete each other's files.

    Neither a file nor one that was being written is a checkpoint. Read-only disks, which root's tests cannot have, are
    here a file in the way.
    """
    (copied / "step-9.tmp").mkdir()
    (copied / "step-8").touch()
    first, second = saving.trainee(SERIAL), saving.trainee(SERIAL)
    saver = first.checkpoints(copied)
    with pytest.raises(UsageError, match="another run saves its checkpoints in"):
        second.checkpoints(copied)
    assert saver.load() == 3
    with pytest.raises(UsageError, match=r"there is no checkpoint step-7 in .*, only step-2, step-3"):
        saver.load("step-7")
    with pytest.raises(UsageError, match=r"write the name of a checkpoint, such as step-200"):
        saver.load("../step-3")
    (copied / "step-5").mkdir()
    unreadable = r"step-5 in .* checkpoint.json is missing or unreadable; .* step-3"
    with pytest.raises(DamagedCheckpointError, match=unreadable):
        saver.load()
    for step in (2, 3):
        (copied / f"step-{step}" / "checkpoint.json").write_text("{")
    with pytest.raises(DamagedCheckpointError, match="there is no whole one beside it"):
        saver.load()
    saver.close()
    second.checkpoints(copied).close()
    with pytest.raises(EnvironmentProblem, match=r"cannot save checkpoints in .*step-8/checkpoints': Not a directory"):
        second.checkpoints(copied / "step-8" / "checkpoints")


class Harm:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What a pickle runs."""
        return os.mkdir, (str(self.path),)


def harmful(original: bytes, path: Path) -> Iterator[bytes]:
    """Pickles that do harm in an unrestricted reader: alone, before the good one, and as each part of one."""
    yield pickle.dumps(Harm(path))
    yield pickle.dumps(Harm(path), protocol=0)
    yield pickle.dumps(Harm(path))[:-1] + b"0" + original
    yield pickle.dumps({"state_dict_metadata": Harm(path)})
    yield b"cposix\nsystem\n(V" + f"mkdir {path}".encode() + b"\ntR."
    yield b"(Vmkdir " + str(path).encode() + b"\nios\nsystem\n."
    yield b"cbuiltins\neval\n(V__import__('os').mkdir('" + str(path).encode() + b"')\ntR."
    # Names that the library's own module could lead to.
    yield b"\x80\x04\x8c\x26torch.distributed.checkpoint.metadata\x8c\x09os.mkdir\x93(V" + str(path).encode() + b"\ntR."
    yield b"ctorch.serialization\nload\n(V" + str(path).encode() + b"\ntR."


def resealed(checkpoint: Path) -> None:
    """Make the marker fit its files, as whoever means harm would."""
    marker = json.loads((checkpoint / "checkpoint.json").read_text("utf-8"))
    for key in ("checksum", "crc32"):
        marker.pop(key, None)
    files = [one for one in checkpoint.iterdir() if one.name != "checkpoint.json"]
    marker["files"] = {one.name: one.stat().st_size for one in files}
    marker["crc32"] = {one.name: zlib.crc32(one.read_bytes()) for one in files}
    marker["checksum"] = zlib.crc32(json.dumps(marker).encode())
    (checkpoint / "checkpoint.json").write_text(json.dumps(marker, indent=2), encoding="utf-8")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_no_pickle_runs(name: str, copied: Path, saved: Path, tmp_path: Path) -> None:
    """Guards the promise that a checkpoint cannot run code, on resuming and on exporting, whatever its marker says."""
    shutil.rmtree(copied / "step-2")
    saver = saving.trainee(SERIAL).checkpoints(copied)
    original = (saved / "step-3" / name).read_bytes()
    for content in harmful(original, tmp_path / "harm"):
        (copied / "step-3" / name).write_bytes(content)
        resealed(copied / "step-3")
        with pytest.raises(DamagedCheckpointError, match="step-3 in"):
            saver.load()
        finished = run(f"export {copied} -o {tmp_path / 'model'}")
        assert finished.code == 6, finished.err
        assert "is damaged" in finished.err
        assert not (tmp_path / "harm").exists()
        assert not (tmp_path / "model").exists()
    (copied / "step-3" / name).write_bytes(original)
    resealed(copied / "step-3")
    assert saver.load() == 3, "what is as it was is loaded"
    saver.close()
    # So that the pickles above are known to do harm where nothing guards against it.
    pickle.loads(next(harmful(original, tmp_path / "harm")))
    assert (tmp_path / "harm").exists()


def rewritten(checkpoint: Path, change: Callable[[Any], None]) -> None:
    """Change the library's own metadata, and have all checksums fit."""
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    resealed(checkpoint)


def place(metadata: Any, **changes: Any) -> None:
    """Change where the first shard lies."""
    vars(next(iter(metadata.storage_data.values()))).update(changes)


def tensor(metadata: Any, **changes: Any) -> None:
    """Change what is said about the first tensor."""
    vars(next(iter(metadata.state_dict_metadata.values()))).update(changes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: place(found, relative_path="../../secret"), "no bytes for a shard"),
        (lambda found: place(found, relative_path=["a"]), "cannot be read"),
        (lambda found: place(found, offset=10**9), "beyond the end"),
        (lambda found: place(found, length=-5), "for a size"),
        (lambda found: place(found, transform_descriptors=["stream.zstd"]), "transformed shards"),
        (lambda found: tensor(found, size=torch.Size([10**12, 10**5])), "do not cover"),
        (lambda found: tensor(found, chunks=[]), "do not cover"),
        (lambda found: tensor(found, properties=TensorProperties(torch.int8)), "torch.int8"),
        (lambda found: found.storage_data.clear(), "no bytes for a shard"),
        (lambda found: setattr(found, "state_dict_metadata", 3), "cannot be read"),
    ],
)
def test_metadata_that_does_not_fit_its_files_is_damage(
    change: Callable[[Any], None], said: str, copied: Path, tmp_path: Path
) -> None:
    """Guards files elsewhere, and memory: nothing is read or allocated that the files do not bear out."""
    rewritten(copied / "step-3", change)
    saver = saving.trainee(SERIAL).checkpoints(copied)
    with pytest.raises(DamagedCheckpointError, match=said):
        saver.load()
    saver.close()
    assert run(f"export {copied / 'step-3'} -o {tmp_path / 'model'}").code == 6


def in_one_row(metadata: Any) -> None:
    """Make the first tensor one row of 6,000 shards, each of one element."""
    name, whole = next(iter(metadata.state_dict_metadata.items()))
    stored, shard = next(iter(metadata.storage_data.values())), whole.chunks[0]
    starts = [torch.Size([0, column]) for column in range(6000)]
    chunks = [replace(shard, offsets=start, sizes=torch.Size([1, 1])) for start in starts]
    metadata.state_dict_metadata = {name: replace(whole, size=torch.Size([1, 6000]), chunks=chunks)}
    wide = whole.properties.dtype.itemsize
    placed = {start: replace(stored, offset=wide * start[1], length=wide) for start in starts}
    metadata.storage_data = {MetadataIndex(name, start): one for start, one in placed.items()}


NESTED = b"\x80\x04}N\x85" + b"2\x86" * 40 + b"Ns."
"""A mapping whose key is a pair of pairs of pairs, 40 deep: 2**40 parts to hash."""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x80\x04Nr\x80\xd1\xf0\x08.", "numbers its values out of turn"),
        (NESTED, "nested too deep, or in each other too often"),
        (NESTED.replace(b"2\x86" * 40, b"\x85" * 2_000_000), "nested too deep"),
        (in_one_row, "it cannot be read"),
    ],
    ids=["memo", "pairs", "depth", "row"],
)
def test_small_metadata_takes_no_memory_and_no_time(
    content: bytes | Callable[[Any], None], said: str, copied: Path, tmp_path: Path
) -> None:
    """Guards against a few bytes that stand for gigabytes, hours, or a stack that overflows."""
    if isinstance(content, bytes):
        (copied / "step-3" / ".metadata").write_bytes(content)
        resealed(copied / "step-3")
    else:
        rewritten(copied / "step-3", content)
    began_s = time.process_time()
    finished = run(f"export {copied / 'step-3'} -o {tmp_path / 'model'}")
    assert finished.code == 6
    assert said in finished.err
    # Of the CPU, not of the clock; hours before.
    assert time.process_time() - began_s < 60


def test_an_export_names_the_newest_whole_checkpoint(copied: Path, tmp_path: Path) -> None:
    """Guards against exporting another step than the newest without saying so."""
    damage(copied / "step-3" / "__0_0.distcp", random.Random(3))
    for _ in range(2):
        finished = run(f"export {copied} -o {tmp_path / 'model'}")
        assert finished.code == 6
        assert "checkpoint step-3 in" in finished.err
        assert "the newest whole one is step-2" in finished.err
        (copied / "step-3" / ".metadata").write_bytes(b"no metadata")
        resealed(copied / "step-3")


def test_a_stored_checkpoint_is_still_read(tmp_path: Path) -> None:
    """Guards the format, by a checkpoint that four ranks wrote some versions ago."""
    assert run(f"export {STORED} -o {tmp_path / 'model'}").code == 0
