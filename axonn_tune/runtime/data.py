"""Training batches as a pure function of seed, step and place: nothing to save, and the same on every grid.

Sequences are numbered through the whole run: step s of B sequences has s·B to s·B + B − 1. Which text a
number stands for depends on the seed alone; the grid only decides which rank reads it. So a run that
resumes, on whatever grid, sees exactly what an uninterrupted one would.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from axonn_tune.errors import UsageError
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.tokens import TokenFile, open_tokens
from axonn_tune.specs.launch import Launch

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Share:
    """Which sequences of a step are this rank's.

    The step is cut over data, then z, then micro-batches, each into consecutive pieces.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    data: int = 0
    data_size: int = 1
    z: int = 0
    z_size: int = 1

    def __post_init__(self) -> None:
        sizes = (self.data_size, self.z_size, self.micro_batch, self.accumulation)
        product = int(np.prod(sizes))
        if product != self.global_batch:
            written = " · ".join(map(str, sizes))
            raise UsageError(
                f"data · z · micro_batch · grad_accumulation is {written} = {product}, "
                f"but the global batch is {self.global_batch}"
            )

    def sequences(self, step: int, micro_step: int) -> NDArray[np.int64]:
        """Numbers `[b]` of the sequences in one micro-batch of this rank."""
        assert 0 <= micro_step < self.accumulation, f"micro-step {micro_step} of {self.accumulation}"
        rank = self.data * self.z_size + self.z
        first = step * self.global_batch + (rank * self.accumulation + micro_step) * self.micro_batch
        return np.arange(first, first + self.micro_batch, dtype=np.int64)


class Batches(Protocol):
    """Where training data comes from."""

    def batch(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, `[b, S]` int64 on the CPU, of this rank's micro-batch; steps count from 0."""


@dataclass(frozen=True)
class TokenSource:
    """Windows of S + 1 tokens of a file, in another order each epoch.

    Window i holds tokens i·S to i·S + S, so each token but the first is a target once an epoch. The
    tokens after the last whole window are never seen.
    """

    tokens: TokenFile
    seed: int
    sequence: int
    share: Share

    def __post_init__(self) -> None:
        if self.windows < 1:
            raise UsageError(
                f"token file {str(self.tokens.path)!r} has {len(self.tokens.ids):,} ids; "
                f"sequences of {self.sequence:,} need at least {self.sequence + 1:,}"
            )

    @property
    def windows(self) -> int:
        """Sequences in an epoch."""
        return (len(self.tokens.ids) - 1) // self.sequence

    def batch(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, `[b, S]`."""
        starts = self.window_of(self.share.sequences(step, micro_step)) * self.sequence
        return _shifted(np.stack([self.tokens.ids[start : start + self.sequence + 1] for start in starts]))

    def window_of(self, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """The window each sequence number stands for; within an epoch, none twice."""
        epochs, places = np.divmod(sequences, self.windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            windows[here] = permuted(places[here], size=self.windows, key=f"{self.seed}:epoch:{epoch}")
        return windows


@dataclass(frozen=True)
class SyntheticTokens:
    """Tokens drawn from the seed: small ids more often than large ones, so that there is something to learn."""

    vocab: int
    seed: int
    sequence: int
    share: Share

    def batch(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, `[b, S]`; each sequence is its own stream."""
        sequences = self.share.sequences(step, micro_step).astype(np.uint64)
        (key,) = _key_words(f"{self.seed}:synthetic", 1)
        length = np.uint64(self.sequence + 1)
        counters = sequences[:, None] * length + np.arange(length, dtype=np.uint64)
        first = _mixed(counters + key)
        second = _mixed(first + _GOLDEN)
        # A uniform number of bits, then uniform bits: about log-uniform, in integers alone, so that
        # no library's rounding can make two ranks differ.
        bits = first % np.uint64(self.vocab.bit_length())
        ids = (np.uint64(1) << bits) - np.uint64(1) + (second & ((np.uint64(1) << bits) - np.uint64(1)))
        return _shifted(ids % np.uint64(self.vocab))


def share_of(launch: Launch, mesh: Mesh) -> Share:
    """Which sequences of a launch config's steps are this rank's."""
    return Share(
        global_batch=launch.workload.global_batch,
        micro_batch=launch.micro_batch,
        accumulation=launch.grad_accumulation,
        data=mesh.coordinate("data"),
        data_size=mesh.size("data"),
        z=mesh.coordinate("z"),
        z_size=mesh.size("z"),
    )


def batches(launch: Launch, mesh: Mesh) -> Batches:
    """The data a launch config asks for, as this rank sees it; UsageError if the file does not fit the model."""
    share = share_of(launch, mesh)
    sequence, seed, vocab = launch.workload.sequence_length, launch.data.seed, launch.model.vocab
    if launch.data.path is None:
        return SyntheticTokens(vocab, seed, sequence, share)
    return TokenSource(open_tokens(launch.data.path, vocab=vocab), seed, sequence, share)


def permuted(places: NDArray[np.int64], *, size: int, key: str) -> NDArray[np.int64]:
    """Where a permutation of `range(size)` sends each place; in constant memory, however large the range.

    A Feistel network permutes the smallest power of two that holds the range; results outside it are
    sent through again until they fall inside (Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains": cycle walking, here fewer than two passes on average).
    """
    bits = max(2, (size - 1).bit_length())
    words = _key_words(key, _ROUNDS)
    found = _feistel(places.astype(np.uint64), bits=bits, words=words)
    while (outside := found >= size).any():
        found[outside] = _feistel(found[outside], bits=bits, words=words)
    return found.astype(np.int64)


def _feistel(numbers: NDArray[np.uint64], *, bits: int, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of `bits`-bit numbers. Both parts change width each round, so an odd number of bits works too."""
    wide, narrow = bits - bits // 2, bits // 2
    left, right = numbers >> np.uint64(wide), numbers & np.uint64((1 << wide) - 1)
    for word in words:
        left, right = right, left ^ (_mixed(right + word) & np.uint64((1 << narrow) - 1))
        wide, narrow = narrow, wide
    assert len(words) % 2 == 0, "widths are as at the start only after an even number of rounds"
    return (left << np.uint64(wide)) | right


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function (Steele, Lea and Flood 2014); multiplication wraps."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def _key_words(text: str, count: int) -> NDArray[np.uint64]:
    """Up to eight 64-bit words from a text."""
    return np.frombuffer(hashlib.sha512(text.encode()).digest(), dtype="<u8")[:count].astype(np.uint64)


def _shifted(windows: NDArray[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows `[b, S + 1]` as tokens and the tokens that follow them."""
    whole = torch.from_numpy(windows.astype(np.int64))
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
