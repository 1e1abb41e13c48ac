"""Batches and token files."""

from __future__ import annotations

import hashlib
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
WHOLE = BatchShard(BATCH, BATCH, 1)


def written(path: Path, count: int) -> tuple[str, np.ndarray]:
    """A token file whose i-th id tells its place, and its ids."""
    tokens.write_tokens(path, [np.arange(count) % 257], vocab=257, tokenizer="counting")
    return str(path), tokens.open_tokens(path)


def source(kind: str, folder: Path, share: BatchShard, *, seed: int = 3) -> Batches:
    """Data of either kind."""
    if kind == "synthetic":
        return SyntheticTokens(500, seed, SEQUENCE, share).batch
    path = folder / f"{share.place}-{share.accumulation}-{share.micro_batch}-{seed}.bin"
    return TokenSource(*written(path, 400), seed, SEQUENCE, share).batch


def rows(batches: Batches, share: BatchShard, step: int) -> torch.Tensor:
    """Everything one rank reads in a step, tokens and targets side by side."""
    pairs = [batches(step, micro_step) for micro_step in range(share.accumulation)]
    return torch.cat([torch.cat(pair, dim=1) for pair in pairs])


@pytest.mark.parametrize("kind", ["file", "synthetic"])
def test_every_grid_sees_the_same_batch(kind: str, tmp_path: Path) -> None:
    """Guards resuming on any grid: the shares, joined by micro-batch, are the serial batch in order, whatever was read
    before.

    Another step or seed has another; targets are the tokens that follow.
    """
    for places, accumulation in ((1, 3), (2, 1), (3, 2), (6, 2), (12, 1)):
        shares = [BatchShard(BATCH, BATCH // places // accumulation, accumulation, place) for place in range(places)]
        for step in (0, 1, 7):
            parts = [rows(source(kind, tmp_path, share), share, step).chunk(accumulation) for share in shares]
            joined = [torch.cat(of_ranks) for of_ranks in zip(*parts, strict=True)]
            assert torch.equal(torch.cat(joined), rows(source(kind, tmp_path, WHOLE), WHOLE, step))
    used = source(kind, tmp_path, WHOLE)
    steps = [rows(used, WHOLE, step) for step in range(3)]
    assert torch.equal(steps[2], rows(source(kind, tmp_path, WHOLE), WHOLE, 2))
    assert not torch.equal(steps[1], steps[2])
    assert not torch.equal(steps[2], rows(source(kind, tmp_path, WHOLE, seed=4), WHOLE, 2))
    found, targets = used(2, 0)
    assert found.shape == targets.shape == (BATCH, SEQUENCE)
    assert found.dtype == targets.dtype == torch.int64
    assert torch.equal(found[:, 1:], targets[:, :-1])
    assert kind == "synthetic" or torch.equal((found[:, -1] + 1) % 257, targets[:, -1])


def test_synthetic_tokens_fill_the_vocabulary() -> None:
    """Guards that ids are in range, and unequal enough to be learnt from."""
    found, _ = SyntheticTokens(100, 0, 128, BatchShard(64, 64, 1)).batch(0, 0)
    counts = torch.bincount(found.flatten(), minlength=100)
    assert len(counts) == 100
    assert counts.min() > 0
    assert counts[0] > 10 * counts[90]


def test_each_epoch_has_every_window_once_in_its_own_order(tmp_path: Path) -> None:
    """Guards epochs, also where a step spans two of them, and the permutation of any size that they come from."""
    whole = TokenSource(*written(tmp_path / "t.bin", 400), 0, SEQUENCE, WHOLE)
    epochs = whole.window_of(np.arange(3 * whole.windows)).reshape(3, -1)
    assert np.array_equal(np.sort(epochs), np.tile(np.arange(whole.windows), (3, 1)))
    assert not np.array_equal(epochs[0], epochs[1])
    for size in (1, 2, 3, 5, 8, 100, 257, 4096, 99_991):
        assert np.array_equal(np.sort(permuted(np.arange(size), size=size, key="a")), np.arange(size))


@pytest.mark.parametrize(("vocab", "item_bytes"), [(257, 2), (1 << 16, 2), ((1 << 16) + 1, 4)])
def test_token_file_reads_back(vocab: int, item_bytes: int, tmp_path: Path) -> None:
    """Guards the format: ids, header, size."""
    ids = np.array([0, vocab - 1, 5, 256])
    header = tokens.write_tokens(tmp_path / "t.bin", [ids[:3], ids[3:]], vocab=vocab, tokenizer="née " * 100)
    assert np.array_equal(tokens.open_tokens(tmp_path / "t.bin", vocab=vocab), ids)
    content = (tmp_path / "t.bin").read_bytes()
    assert content[: tokens.HEADER_BYTES] == header.pack()
    assert len(content) == tokens.HEADER_BYTES + 4 * item_bytes
    assert (header.vocab, header.count) == (vocab, 4)
    assert hashlib.sha256(content[tokens.HEADER_BYTES :]).digest() == header.sha256


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
        (lambda raw: raw[:16] + b"\x02" + raw[17:], r"ids up to 257 .*vocabulary is 257"),
        (None, "No such file"),
    ],
)
def test_broken_token_files_are_refused(change: Callable[[bytes], bytes] | None, message: str, tmp_path: Path) -> None:
    """Guards that nothing is trained on bytes that are no tokens, and the look-up table's bounds."""
    path = tmp_path / "t.bin"
    opened = written(path, 50)
    with pytest.raises(UsageError, match="has 50 ids; sequences of 50 need at least 51"):
        TokenSource(*opened, 0, 50, WHOLE)
    path.unlink() if change is None else path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UsageError, match=message):
        tokens.open_tokens(path, vocab=257)


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
