"""How errors of published steps grow with GPUs and pipeline stages, and what printed intervals hold.

python -m tools.fit.scale            # slopes by series, the two numbers, coverage and width by source, largest sizes
python -m tools.fit.scale --write    # the same, and write the numbers: cost/uncertainty.py

A series is the rows of one publication, software, accelerator and model that differ in GPUs (weak scaling, or strong)
but neither in TP nor in PP; or that differ in pipeline stages but neither in GPUs, TP nor micro-batch. Its slope is
that of log(predicted / measured) over doublings. Rows that leave part of their layout open stand at the shortest of
their range, since a series compares rows of one choice. The series of one publication, software and accelerator count
once, by the root of the mean square of their slopes. The number is the slope that 80% of these stay below, as a
standard deviation. Rows of `SUMS`, and AxoNN's large runs, which are no rows, have no part in it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from axonn_tune.cost import uncertainty
from axonn_tune.cost.uncertainty import DEVIATIONS, LARGEST
from axonn_tune.files import write_text_atomically
from axonn_tune.validation.published.accuracy import (
    SUMS,
    PredictedRow,
    StepSummary,
    predict_steps,
    without,
)
from axonn_tune.validation.published.rows import SHIPPED, StepRow, read_records, read_steps

HELD = 0.8
"""Share of the publications whose errors grow by less."""
SPAN = 2.0
"""Least doublings of a series: over fewer, what layouts scatter by is most of a slope."""


def rows() -> tuple[PredictedRow, ...]:
    """Every shipped row."""
    return predict_steps(read_steps(SHIPPED / "steps.csv"))


def of_gpus(row: StepRow) -> tuple[object, ...]:
    """What rows of a series over GPUs share."""
    return (row.tensor, row.pipeline, row.context)


def of_stages(row: StepRow) -> tuple[object, ...]:
    """What rows of a series over pipeline stages share."""
    return (row.gpus, row.tensor, row.context, row.micro_batch)


def slopes(
    found: Sequence[PredictedRow], shared: Callable[[StepRow], tuple[object, ...]], size: Callable[[StepRow], int]
) -> Iterator[tuple[str, float, int]]:
    """Publication, software and accelerator of each series, the slope of its errors, and its rows."""
    records = read_records(SHIPPED / "steps.csv", needed=("id", "source"))
    source = {record["id"]: record["source"] for _, record in records}
    series: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    names: dict[tuple[object, ...], str] = {}
    for one in found:
        row = one.row
        step_s = one.predicted_s or min(one.choices_s, default=None)
        if step_s and row.step_s and row.dataset != SUMS:
            key = (source[row.id], row.framework, row.gpu, row.model, row.hidden, row.sequence_length, *shared(row))
            names[key] = f"{row.dataset}, {row.framework}, {row.gpu}"
            series.setdefault(key, []).append((np.log2(size(row)), np.log(step_s / row.step_s)))
    for key, points in sorted(series.items(), key=str):
        doublings, errors = np.array(points).T
        if np.ptp(doublings) >= SPAN:
            yield names[key], float(np.polyfit(doublings, errors, 1)[0]), len(points)


def per_doubling(found: Sequence[tuple[str, float, int]]) -> float:
    """The slope that `HELD` of the publications stay below, as a standard deviation."""
    groups: dict[str, list[float]] = {}
    for name, slope, _ in found:
        groups.setdefault(name, []).append(slope**2)
    return float(np.quantile([np.sqrt(np.mean(squares)) for squares in groups.values()], HELD)) / DEVIATIONS


def numbers(found: Sequence[PredictedRow]) -> tuple[float, float]:
    """Growth with each doubling of GPUs, and of pipeline stages."""
    return (
        per_doubling(list(slopes(found, of_gpus, lambda row: row.gpus))),
        per_doubling(list(slopes(found, of_stages, lambda row: row.pipeline))),
    )


def largest(found: Sequence[PredictedRow]) -> dict[str, int]:
    """The largest of each size among the rows that are scored."""
    sizes: dict[str, Callable[[StepRow], int]] = {
        "gpus": lambda row: row.gpus,
        "pipeline": lambda row: row.pipeline,
        "chunks": lambda row: row.interleave,
        "context": lambda row: row.context,
        "sequence": lambda row: row.sequence_length,
    }
    scored = [one.row for one in found if one.error is not None]
    return {name: max(map(size, scored)) for name, size in sizes.items()}


def intervals(rows: Sequence[PredictedRow]) -> Iterator[tuple[str, int, float, float]]:
    """Rows, coverage and mean width of printed intervals by source, each by a fit without the source."""
    held_out = without(rows, "source")
    apart = [one for one in held_out if one.row.dataset != SUMS]
    groups = {name: [one for one in held_out if one.row.dataset == name] for name in _sources(held_out)}
    for name, own in {**groups, f"all without {SUMS}": apart, "all": held_out}.items():
        found = StepSummary(tuple(own)).quality
        yield name, len(own), found.coverage, found.width


def _sources(found: Sequence[PredictedRow]) -> list[str]:
    return sorted({one.row.dataset for one in found})


def write(per_gpus: float, per_stages: float, sizes: dict[str, int]) -> None:
    """Write the numbers where the intervals read them."""
    path = Path(uncertainty.__file__)
    text = path.read_text(encoding="utf-8")
    pair = f"PER_DOUBLING, PER_STAGE_DOUBLING = {per_gpus:.2g}, {per_stages:.2g}"
    text = re.sub(r"(?m)^PER_DOUBLING, PER_STAGE_DOUBLING = .*$", pair, text)
    shown = ", ".join(f'"{name}": {size}' for name, size in sizes.items())
    write_text_atomically(path, re.sub(r"(?m)^(LARGEST: Mapping\[str, int\] = ).*$", rf"\g<1>{{{shown}}}", text))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="tools.fit.scale", description="How errors grow with scale.")
    parser.add_argument("--write", action="store_true", help="write the numbers into cost/uncertainty.py")
    options = parser.parse_args(arguments)
    found = rows()
    sizes = largest((*found, *predict_steps(read_steps(SHIPPED / "moe_steps.csv"))))
    for title, shared, size in (
        ("GPUs", of_gpus, lambda row: row.gpus),
        ("pipeline stages", of_stages, lambda row: row.pipeline),
    ):
        print(f"slopes over doublings of {title}")
        for name, slope, count in slopes(found, shared, size):
            print(f"  {slope:+.4f} {count:>3} rows  {name}")
    per_gpus, per_stages = numbers(found)
    print(f"per doubling: GPUs {per_gpus:.4f}, stages {per_stages:.4f}; largest: {sizes}, shipped {LARGEST}")
    for name, count, held, width in intervals(found):
        print(f"  {name:<28}{count:>6} rows  80% intervals hold {held:.1%}, mean width {width:.1%}")
    if options.write:
        write(per_gpus, per_stages, sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
