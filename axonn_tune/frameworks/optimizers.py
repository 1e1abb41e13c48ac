"""Optimizers: what each keeps of a parameter, and what it does to a matrix as a whole."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

ADAMW = "adamw"
"""The default, which also takes what an optimizer of whole matrices does not."""


@dataclass(frozen=True)
class Whole:
    """What an optimizer does to each matrix beside GEMMs, by kernels of its own.

    update_bytes: that kernels of the update read and write of a parameter in FP32; around_bytes: those around the
    Newton-Schulz iteration, of an element of what it iterates on.
    """

    update_bytes: float
    update_kernels: int
    around_bytes: float
    around_kernels: int


@dataclass(frozen=True)
class Optimizer:
    """A row of optimizers.csv.

    states, vectors: bytes of each state of a matrix's element and of a vector's, None: as master weights have them.
    scales_bytes: a parameter, of scales of narrow states. whole: of one that updates matrices of blocks as wholes,
    where vectors, embedding and LM head are AdamW's.
    """

    name: str
    title: str
    states: tuple[int | None, ...]
    scales_bytes: float
    vectors: tuple[int | None, ...]
    whole: Whole | None


@cache
def optimizers() -> Mapping[str, Optimizer]:
    """Every optimizer by its name; sources stand beside the numbers."""
    text = files("axonn_tune.frameworks").joinpath("optimizers.csv").read_text(encoding="utf-8")
    return {one["optimizer"]: _optimizer(one) for one in csv.DictReader(text.splitlines())}


def _optimizer(row: Mapping[str, str]) -> Optimizer:
    whole = None
    if row["whole"]:
        update, around = (float(row[f"{part}_bytes"]) for part in ("update", "around"))
        whole = Whole(update, int(row["update_kernels"]), around, int(row["around_kernels"]))
    states, vectors = (
        tuple(None if word == "master" else int(word) for word in row[column].split())
        for column in ("states", "vectors")
    )
    return Optimizer(row["optimizer"], row["title"], states, float(row["scales_bytes"]), vectors, whole)
