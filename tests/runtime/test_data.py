"""Batches and token files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from axonn_tune import files
from axonn_tune.errors import EnvironmentProblem, UsageError
from axonn_tune.runtime import tokens
from axonn_tune.runtime.tokens import Batches, BatchShard, SyntheticTokens, TokenSource, permuted

SEQUENCE, BATCH = 8, 12


def written(path: Path, count: int, *, vocab: int = 257) -> tokens.TokenFile:
    """A token file whose i-th id tells its place."""
    tokens.write_tokens(path, [np.arange(count) % vocab], vocab=vocab, tokenizer="counting")
    return tokens.open_tokens(path)


def source(kind: str, folder: Path, share: BatchShard, *, seed: int = 3) -> Batches:
    """Data of either kind."""
    if kind == "synthetic":
        return SyntheticTokens(500, seed, SEQUENCE, share).batch
    path = folder / f"{share.place}-{share.accumulation}-{share.micro_batch}-{seed}.bin"
    return TokenSource(written(path, 400), seed, SEQUENCE, share).batch


def rows(batches: Batches, share: BatchShard, step: int) -> torch.Tensor:
    """Everything one rank reads in a step, tokens and targets side by side."""
    pairs = [batches(step, micro_step) for micro_step in range(share.accumulation)]
    return torch.cat([torch.cat(pair, dim=1) for pair in pairs])


@pytest.mark.parametrize("kind", ["file", "synthetic"])
@pytest.mark.parametrize(("data", "z", "accumulation"), [(1, 1, 3), (2, 1, 1), (1, 3, 2), (2, 3, 2), (6, 2, 1)])
def test_every_grid_sees_the_same_batch(kind: str, data: int, z: int, accumulation: int, tmp_path: Path) -> None:
    """Guards resuming on another grid: the ranks' shares, joined, are the serial batch in order."""
    serial = BatchShard(BATCH, BATCH, 1)
    each = BATCH // (data * z * accumulation)
    for step in (0, 1, 7):
        parts = []
        for place in range(data * z):
            share = BatchShard(BATCH, each, accumulation, place)
            parts.append(rows(source(kind, tmp_path, share), share, step))
        assert torch.equal(torch.cat(parts), rows(source(kind, tmp_path, serial), serial, step))


@pytest.mark.parametrize("kind", ["file", "synthetic"])
def test_batches_are_pure(kind: str, tmp_path: Path) -> None:
    """Guards resuming: a batch depends on nothing read before it, and does depend on step and seed."""
    share = BatchShard(BATCH, 4, 3)
    fresh, used = source(kind, tmp_path, share), source(kind, tmp_path, share)
    for step in range(5):
        used(step, 0)
    assert all(torch.equal(a, b) for a, b in zip(fresh(5, 2), used(5, 2), strict=True))
    assert not torch.equal(used(5, 2)[0], used(6, 2)[0])
    assert not torch.equal(used(5, 2)[0], source(kind, tmp_path, share, seed=4)(5, 2)[0])


@pytest.mark.parametrize("kind", ["file", "synthetic"])
def test_targets_are_the_tokens_that_follow(kind: str, tmp_path: Path) -> None:
    """Guards the shift, the shape and the type."""
    found, targets = source(kind, tmp_path, BatchShard(BATCH, 4, 3))(2, 1)
    assert found.shape == targets.shape == (4, SEQUENCE)
    assert found.dtype == targets.dtype == torch.int64
    assert torch.equal(found[:, 1:], targets[:, :-1])
    if kind == "file":
        assert torch.equal((found[:, -1] + 1) % 257, targets[:, -1])


def test_synthetic_tokens_fill_the_vocabulary() -> None:
    """Guards that ids are in range, and unequal enough to be learnt from."""
    share = BatchShard(64, 64, 1)
    found, _ = SyntheticTokens(100, 0, 128, share).batch(0, 0)
    counts = torch.bincount(found.flatten(), minlength=100)
    assert len(counts) == 100
    assert counts.min() > 0
    assert counts[0] > 10 * counts[90]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 100, 257, 4096, 99_991])
def test_permutation_is_one(size: int) -> None:
    """Guards that no window comes twice in an epoch and none is left out."""
    found = permuted(np.arange(size), size=size, key="a")
    assert np.array_equal(np.sort(found), np.arange(size))
    if size > 10:
        assert not np.array_equal(found, permuted(np.arange(size), size=size, key="b"))


def test_each_epoch_has_every_window_once_in_its_own_order(tmp_path: Path) -> None:
    """Guards epochs, also where a step spans two of them."""
    whole = TokenSource(written(tmp_path / "t.bin", 400), 0, SEQUENCE, BatchShard(BATCH, BATCH, 1))
    epochs = whole.window_of(np.arange(3 * whole.windows)).reshape(3, -1)
    assert np.array_equal(np.sort(epochs), np.tile(np.arange(whole.windows), (3, 1)))
    assert not np.array_equal(epochs[0], epochs[1])


@pytest.mark.parametrize(("vocab", "item_bytes"), [(257, 2), (1 << 16, 2), ((1 << 16) + 1, 4)])
def test_token_file_reads_back(vocab: int, item_bytes: int, tmp_path: Path) -> None:
    """Guards the format: ids, header, size."""
    ids = np.array([0, vocab - 1, 5, 256])
    header = tokens.write_tokens(tmp_path / "t.bin", [ids[:3], ids[3:]], vocab=vocab, tokenizer="née " * 100)
    opened = tokens.open_tokens(tmp_path / "t.bin", vocab=vocab)
    assert np.array_equal(opened.ids, ids)
    assert (opened.header.vocab, opened.header.count, opened.header.sha256) == (vocab, 4, header.sha256)
    assert opened.header.tokenizer.startswith("née née")
    assert (tmp_path / "t.bin").stat().st_size == tokens.HEADER_BYTES + 4 * item_bytes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw[:-1], r"truncated: 50 ids of 2 bytes and the header are 356 bytes, but the file has 355"),
        (lambda raw: raw + b"x", "truncated"),
        (lambda raw: raw[:100], "truncated: 100 bytes, but the header alone has 256"),
        (lambda raw: b"import os" + raw[9:], "not a token file: it begins with b'import o'"),
        (lambda raw: b"", "not a token file"),
        (lambda raw: raw[:8] + b"\x09" + raw[9:], "format version 9; this program reads 1"),
        (lambda raw: raw[:12] + b"\x04" + raw[13:], "says 4 bytes an id, but 257 ids take 2"),
    ],
    ids=["short", "long", "no ids", "other file", "empty", "version", "item size"],
)
def test_broken_token_files_are_refused(change: Callable[[bytes], bytes], message: str, tmp_path: Path) -> None:
    """Guards that nothing is trained on bytes that are no tokens."""
    path = tmp_path / "t.bin"
    written(path, 50)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UsageError, match=message):
        tokens.open_tokens(path)


def test_vocabulary_and_length_must_fit(tmp_path: Path) -> None:
    """Guards the look-up table's bounds, and the numbers in the messages."""
    opened = written(tmp_path / "t.bin", 8)
    with pytest.raises(UsageError, match=r"ids up to 256 .*vocabulary is 256"):
        tokens.open_tokens(tmp_path / "t.bin", vocab=256)
    with pytest.raises(UsageError, match="has 8 ids; sequences of 8 need at least 9"):
        TokenSource(opened, 0, SEQUENCE, BatchShard(BATCH, BATCH, 1))
    with pytest.raises(UsageError, match="No such file"):
        tokens.open_tokens(tmp_path / "none.bin")


def test_nothing_is_left_of_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the old file and the folder against a tokenizer out of range and a full disk."""
    path = tmp_path / "t.bin"
    written(path, 50)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="gave id 300; its vocabulary is 257"):
        tokens.write_tokens(path, [np.array([300])], vocab=257, tokenizer="wrong")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(EnvironmentProblem, match="No space left on device"):
        written(path, 60)
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["t.bin"]
