"""Pins of random rows of a search: what is found with them is no faster than the first row, and no slower than the row
that they were taken from. Forty pins each: `python -m tests.unit.ranking.pins [MODEL...]`."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from axonn_tune.cost.price import PricedLayout
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.ranking.priced import Priced
from axonn_tune.ranking.space import Problem
from axonn_tune.request import Request

ROWS = 40
"""Rows from which pins are taken: as many have exact steps."""
PINS = 40
SEARCHES: dict[str, dict[str, Any]] = {
    "llama3-70b": {"gpus": 64},
    "llama3-8b": {"gpus": 32, "seq": 32768, "batch": 64},
    "80b": {"gpus": 64, "framework": "axonn-tune", "machine": "perlmutter-80gb", "rank_by": "iteration"},
    "mixtral-8x7b": {"gpus": 32},
    "qwen3-235b-a22b": {"gpus": 64},
    "gpt-oss-120b": {"gpus": 64},
    "nemotron-3-nano-30b-a3b": {"gpus": 32},
    "deepseek-v3": {"gpus": 256},
}
SMALL: dict[str, dict[str, Any]] = {
    "llama3-8b": {"gpus": 8, "batch": 16},
    "gpt-oss-20b": {"gpus": 8, "batch": 8},
}


@dataclass(frozen=True)
class Pinned:
    """A search with pins of a row, `like`, of one without, whose first row is `first`; found: its own first row."""

    pins: dict[str, Any]
    first: PricedLayout
    like: PricedLayout
    found: PricedLayout | None

    @property
    def wrong(self) -> str:
        """What is wrong with it, "" where nothing is."""
        if self.found is None:
            return f"{self.pins}: nothing found, #{self.like.rank} is there"
        step_s, first_s, like_s = self.found.iteration_s, self.first.iteration_s, self.like.iteration_s
        if step_s < first_s:
            return f"{self.pins}: {step_s!r} s, {1.0 - step_s / first_s:.4%} faster than the first row"
        if step_s > like_s:
            return f"{self.pins}: {step_s!r} s, {step_s / like_s - 1.0:.4%} slower than #{self.like.rank}"
        return ""


def asked(model: str, options: dict[str, Any], **pins: Any) -> Problem:
    """A search of it."""
    given = {"framework": "megatron-core", "machine": "dgx-h100", **options, **pins}
    return load_inputs(Request(model, **given)).problem


def searched(problem: Problem, top: int) -> Priced:
    """A search with so many exact rows."""
    return search(problem, top=top)


def pins_of(draw: random.Random, row: PricedLayout) -> dict[str, Any]:
    """From one to all axes of a row, and often its micro-batch, chunks, dispatcher, expert overlap or recompute."""
    axes = [axis for axis in row.axes if axis in row.job.framework.columns]
    pins: dict[str, Any] = {axis: row.size(axis) for axis in draw.sample(axes, draw.randint(1, len(axes)))}
    if draw.random() < 0.4:
        pins["micro_batch"] = row.micro_batch
    if draw.random() < 0.4 and "chunks" in row.job.framework.columns and (pins.get("pipeline", 2) > 1):
        pins["chunks"] = row.chunks
    for name in ("dispatcher", "expert_overlap"):
        if draw.random() < 0.2 and getattr(row, name):
            pins[name] = getattr(row, name)
    if draw.random() < 0.4:
        pins["recompute"] = row.recompute
        if row.recompute_layers is not None:
            pins["recompute_layers"] = row.recompute_layers
    return pins


def pinned(model: str, options: dict[str, Any], *, count: int, rows: int = ROWS) -> Iterator[Pinned]:
    """Searches with pins of random rows, the same ones each time."""
    ranked, draw = searched(asked(model, options), rows), random.Random(model)
    for _ in range(count):
        like = ranked[draw.randrange(min(rows, len(ranked)))]
        pins = pins_of(draw, like)
        found = searched(asked(model, options, **pins), 1)
        yield Pinned(pins, ranked[0], like, found[0] if len(found) else None)


def main(names: list[str]) -> int:
    """A line for each model, and one for each pin that is wrong."""
    failed = 0
    for name in names or SEARCHES:
        began, every = time.process_time(), list(pinned(name, SEARCHES[name], count=PINS))
        wrong = [one.wrong for one in every if one.wrong]
        exact = sum(one.found is not None and one.found.iteration_s == one.like.iteration_s for one in every)
        cpu_s = time.process_time() - began
        print(f"{name}: {len(every)} pins, {len(wrong)} wrong, {exact} find their row, {cpu_s:.0f} s", flush=True)
        print(*(f"  {one}" for one in wrong), sep="\n", end="\n" if wrong else "", flush=True)
        failed += len(wrong)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
