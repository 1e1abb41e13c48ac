"""Lengths of the sequences of a data set, as fine-tuning has them, and how a batch holds them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from axonn_tune.errors import UsageError, suggest
from axonn_tune.files import read_regular
from axonn_tune.specs.document import LARGEST_SIZE, Document, PositiveFloat, Size
from axonn_tune.vocabulary import Packing

QUANTILES = 1024
"""Of a data set, in the middles of as many equal shares."""
_DEVIATIONS_OF_P90 = 1.2815515655446004
MOST_OVER_MEAN = math.exp(_DEVIATIONS_OF_P90**2 / 2.0)
"""Largest 90th percentile of a log-normal distribution over its mean."""
SEQUENCES = 100_000
"""Sequences of a data set that nobody counted, of which one is the longest."""
_FILE_BYTES = 64 * 2**20


class Lengths(Document):
    """Lengths of a data set's sequences before they are cut at the workload's sequence length, in tokens."""

    left_out_at_default: ClassVar[tuple[str, ...]] = ("sequences", "quantiles", "longest")

    data: Annotated[str, Field(min_length=1, max_length=4096)] = Field(description="The data set: a name, or a file.")
    packing: Packing = Field(
        default="packed",
        description="How a batch holds them: packed (THD: packs filled to the sequence length, attention within each "
        "sequence), padding-free (those of a micro-batch flattened), padded (to the longest of a micro-batch).",
    )
    mean: PositiveFloat = Field(description="Mean length.")
    p90: PositiveFloat = Field(description="90th percentile; with the mean, of a log-normal distribution.")
    sequences: Size = Field(default=SEQUENCES, description="Sequences of the data set.")
    quantiles: tuple[Size, ...] = Field(default=(), description="Lengths of equal shares, of data that was counted.")
    longest: Size | None = Field(default=None, description="The longest, of data that was counted.")

    @model_validator(mode="after")
    def _has_shape(self) -> Self:
        if not self.quantiles and (why := unlikely(self.mean, self.p90)):
            raise ValueError(why)
        return self

    @property
    def words(self) -> str:
        """`squad, packed`, with the mean and the 90th percentile."""
        shape = f"mean {self.mean:,.0f}, p90 {self.p90:,.0f}"
        return f"{shape}, {self.packing}" if ":" in self.data else f"{self.data}: {shape}, {self.packing}"

    def values(self, cut: int) -> tuple[float, ...]:
        """Lengths of equal shares of the sequences, ascending, cut at a length."""
        whole = self.quantiles or _log_normal(self.mean, self.p90)
        return tuple(min(max(1.0, float(one)), float(cut)) for one in whole)

    def most(self, cut: int) -> float:
        """The longest sequence, cut at a length."""
        longest = self.longest or _quantile(self.mean, self.p90, 1.0 - 1.0 / (1.0 + self.sequences))
        return min(float(longest), float(cut))


def unlikely(mean: float, p90: float) -> str:
    """Why no log-normal distribution has this mean and 90th percentile; "" where one has."""
    most = MOST_OVER_MEAN * mean
    if 1.0 <= mean <= p90 <= most:
        return ""
    return (
        f"a 90th percentile of {p90:g} with a mean of {mean:g}: of a log-normal distribution it is 1 to "
        f"{MOST_OVER_MEAN:.2f} times the mean, which is 1 or more; nearest valid: {max(1.0, mean):g}:"
        f"{min(max(p90, mean, 1.0), math.floor(max(most, 1.0))):g}"
    )


def _quantile(mean: float, p90: float, share: float) -> float:
    """Of a log-normal distribution: from p90 = exp(μ + 1.28 σ) and mean = exp(μ + σ²/2)."""
    # Imported here: only data sets by two numbers need it, and start-up time is others'.
    from statistics import NormalDist

    spread = _DEVIATIONS_OF_P90 - math.sqrt(max(0.0, _DEVIATIONS_OF_P90**2 - 2.0 * math.log(p90 / mean)))
    return mean * math.exp(spread * NormalDist().inv_cdf(share) - spread**2 / 2.0)


@lru_cache(maxsize=64)
def _log_normal(mean: float, p90: float) -> tuple[float, ...]:
    return tuple(float(round(_quantile(mean, p90, (one + 0.5) / QUANTILES))) for one in range(QUANTILES))


PRESETS: dict[str, dict[str, Any]] = {
    # Mean: 384 over the speed-up of 2.2 that packing SQuAD 1.1 to 384 tokens can give (arXiv 2107.02027, figure 1).
    # p90: that Megatron-Bridge's published TFLOP/s of LoRA, which count ΣL² of packs of it, are met
    # (NVIDIA-NeMo/Megatron-Bridge@067f987d, docs/performance-summary-archive.md: 278.1 to 279.1 GFLOP a token).
    "squad": {"mean": 174.0, "p90": 268.0, "sequences": 87_599},
    # Mean: 21.55 sequences in packs of 8,192 tokens that are 99.73% full (NVIDIA-NeMo/Megatron-Bridge@067f987d,
    # examples/model_verification_cards/moonlight-16b-a3b/card.yaml); p90 assumed, with σ = 1 of the logarithm.
    "tulu": {"mean": 379.0, "p90": 830.0, "sequences": 939_343},
}
"""Data sets by name."""


def read_lengths(asked: str | Sequence[int], packing: Packing | None) -> Lengths:
    """Lengths by a preset's name, as `mean:p90`, of a file of lengths, or as a list; UsageError for what is none."""
    return _read(asked).model_copy(update={} if packing is None else {"packing": packing})


def _read(asked: str | Sequence[int]) -> Lengths:
    if not isinstance(asked, str):
        if not isinstance(asked, Sequence):
            raise UsageError(f"lengths={asked!r:.40}: give a name, 'mean:p90', a file or a list of lengths")
        return _counted(asked, "a list")
    if asked in PRESETS:
        return Lengths(data=asked, **PRESETS[asked])
    if two := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?):([0-9]{1,9}(?:\.[0-9]+)?)", asked):
        mean, p90 = float(two[1]), float(two[2])
        if why := unlikely(mean, p90):
            raise UsageError(f"--lengths {asked}: {why}")
        return Lengths(data=asked, mean=mean, p90=p90)
    if not Path(asked).is_file():
        known = ", ".join((*PRESETS, "MEAN:P90", "FILE"))
        raise UsageError(f"--lengths {asked}: no such file or data set{suggest(asked, PRESETS)}; known: {known}")
    return _counted(_of_file(Path(asked)), asked)


def _of_file(path: Path) -> Sequence[object]:
    """Lengths in a file: a JSON list, or one a line."""
    try:
        text = read_regular(path, limit_bytes=_FILE_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--lengths {path}: cannot be read: {error}") from None
    if not text.lstrip().startswith("["):
        lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
        return [_whole(line, f"{path}:{number}") for number, line in lines if line]
    try:
        found: list[object] = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--lengths {path}: {error}") from None
    return found


def _whole(text: object, place: str) -> int:
    number = int(text) if isinstance(text, str) and re.fullmatch(r"[0-9]{1,10}", text) else text
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= LARGEST_SIZE:
        raise UsageError(f"--lengths {place}: {text!r:.40} is not a whole number of tokens from 1 to {LARGEST_SIZE:,}")
    return number


def _counted(lengths: Sequence[object], data: str) -> Lengths:
    """A data set whose lengths are all known."""
    ascending = sorted(_whole(one, f"{data}, item {number}") for number, one in enumerate(lengths, 1))
    if not ascending:
        raise UsageError(f"--lengths {data}: it has no lengths")
    count = len(ascending)
    shares = tuple(ascending[(2 * one + 1) * count // (2 * QUANTILES)] for one in range(QUANTILES))
    return Lengths(
        data=data,
        mean=sum(ascending) / count,
        p90=float(ascending[min(count - 1, count * 9 // 10)]),
        sequences=count,
        quantiles=shares,
        longest=ascending[-1],
    )
