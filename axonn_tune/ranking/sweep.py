"""The best configuration over a range of GPU counts, batches or models: strong and weak scaling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from axonn_tune.errors import UsageError
from axonn_tune.ranking.entries import Entry
from axonn_tune.ranking.inputs import Inputs, load_inputs
from axonn_tune.ranking.results import run_search
from axonn_tune.request import LARGEST_SIZE, Request
from axonn_tune.specs.catalog import ModelLike

_NUMBER = re.compile(r"[0-9]{1,10}")
_RANGE = re.compile(r"(N)\.\.(N)(?:x(N)|\+(N))?".replace("N", _NUMBER.pattern))
_MOST_VALUES = 10_000


@dataclass(frozen=True)
class Point:
    """One point of a sweep: its inputs, its best entry (None: nothing is feasible, for `reason`).

    fastest: the candidate with the shortest step of all, if another criterion has a notably longer one first.
    efficiency: tokens/s of one GPU, relative to the first feasible point of the same model and batch.
    """

    inputs: Inputs
    entry: Entry | None
    reason: str
    efficiency: float | None
    fastest: Entry | None = None


def parse_numbers(text: str, *, option: str) -> tuple[int, ...]:
    """Numbers given as a list (`64,128`), a range by a factor (`64..4096x2`) or by a step (`64..128+16`).

    Parts may be mixed; UsageError for anything else, for 0, and for a descending range.
    """
    found: list[int] = []
    for part in text.split(","):
        found += _part(part.strip(), option=option)
    return tuple(dict.fromkeys(found))


def _part(part: str, *, option: str) -> Iterator[int]:
    match = _RANGE.fullmatch(part)
    if _NUMBER.fullmatch(part) and 0 < int(part) <= LARGEST_SIZE:
        yield int(part)
        return
    if match is None:
        raise UsageError(f"{option}: {part!r} is no positive number and no range such as 64..4096x2 or 64..128+16")
    first, last, factor, step = (int(group) if group else None for group in match.groups())
    if first is None or last is None or not 1 <= first <= last <= LARGEST_SIZE or factor in (0, 1) or step == 0:
        raise UsageError(f"{option}: the range {part!r} is empty or has no end")
    number, count = first, 0
    while number <= last:
        yield number
        count += 1
        if count > _MOST_VALUES:
            raise UsageError(f"{option}: the range {part!r} has more than {_MOST_VALUES} values")
        number = number + step if step is not None else number * (factor or 2)


def sweep(
    request: Request, *, models: Sequence[ModelLike], gpus: Sequence[int], batches: Sequence[int | None]
) -> tuple[Point, ...]:
    """The best entry at every point: models, then batches, then GPU counts.

    A batch of None is the model's. With weak scaling a batch belongs to the first GPU count and grows with
    the others; UsageError if it would not stay whole.
    """
    points: list[Point] = []
    for model in models:
        for batch in batches:
            first: Point | None = None
            for count in gpus:
                asked = replace(request, model=model, batch=batch, gpus=count)
                point = _point(_at(asked, base=gpus[0] if request.weak else count))
                first = first or (point if point.entry else None)
                points.append(replace(point, efficiency=_efficiency(point, first)))
    return tuple(points)


def _at(request: Request, *, base: int) -> Inputs:
    """Inputs of one point; `base`: GPU count that the batch belongs to, for weak scaling."""
    inputs = load_inputs(request)
    workload, gpus = inputs.problem.workload, inputs.problem.gpus
    if workload.global_batch * gpus % base:
        raise UsageError(
            f"--weak: a batch of {workload.global_batch} on {base} GPUs is no whole number of sequences on {gpus}"
        )
    scaled = workload.model_copy(update={"global_batch": workload.global_batch * gpus // base})
    return replace(inputs, problem=replace(inputs.problem, workload=scaled))


def _point(inputs: Inputs) -> Point:
    results = run_search(inputs)
    if len(results.ranked):
        return Point(inputs, results.ranked.entry(0, terms=False), "", None, results.fastest_elsewhere())
    # Imported here: most sweeps find something everywhere.
    from axonn_tune.ranking.nearest import nearest_change

    return Point(inputs, None, nearest_change(inputs.problem), None)


def _efficiency(point: Point, first: Point | None) -> float | None:
    """Throughput of one GPU over that at the first point."""
    own, reference = _tokens_per_gpu(point), _tokens_per_gpu(first)
    return None if own is None or reference is None else own / reference


def _tokens_per_gpu(point: Point | None) -> float | None:
    if point is None or point.entry is None or point.entry.tokens_per_s is None:
        return None
    return point.entry.tokens_per_s / point.inputs.problem.gpus
