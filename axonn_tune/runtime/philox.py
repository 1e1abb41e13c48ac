"""Counter-based random numbers, the same on every grid: element i of a tensor comes from counter i.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", SC11) keyed by the seed and a
name. Initial weights are normals, by the inverse of their distribution function at a 53-bit uniform; dropout compares
words. Every rank computes the elements of its own shard and no others.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import torch

_WEYL = (0x9E3779B9, 0xBB67AE85)
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_LOW = 0xFFFFFFFF
_ROUNDS = 10

PhiloxKey: TypeAlias = tuple[int, int] | tuple[torch.Tensor, torch.Tensor]
"""Two 32-bit words."""


def key_of(seed: int, name: str) -> tuple[int, int]:
    """Two 32-bit key words for a named stream of a seed."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def _product(word: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a product of 32-bit words held in int64, whose bits are right where its sign is not."""
    product = word * multiplier
    return (product >> 32) & _LOW, product & _LOW


def philox(counter: torch.Tensor, key: PhiloxKey) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 32-bit words for each int64 counter, as int64."""
    first, second = counter & _LOW, (counter >> 32) & _LOW
    third, fourth = torch.zeros_like(first), torch.zeros_like(first)
    left: int | torch.Tensor = key[0]
    right: int | torch.Tensor = key[1]
    for _ in range(_ROUNDS):
        high_first, low_first = _product(first, _MULTIPLIERS[0])
        high_third, low_third = _product(third, _MULTIPLIERS[1])
        first, second, third, fourth = (
            high_third ^ second ^ left,
            low_third,
            high_first ^ fourth ^ right,
            low_first,
        )
        left, right = (left + _WEYL[0]) & _LOW, (right + _WEYL[1]) & _LOW
    return first, second


def normal(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Standard normals, float64, one per counter: from uniforms strictly between 0 and 1."""
    first, second = philox(counter, key)
    uniform = ((first >> 5).double() * 2.0**26 + (second >> 6).double() + 0.5) / 2.0**53
    normals: torch.Tensor = torch.special.ndtri(uniform)
    return normals
