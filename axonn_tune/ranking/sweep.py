"""The best configuration over a range of GPU counts, batches, models or sizes of one axis: strong and weak scaling."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from axonn_tune.cost.price import PricedLayout
from axonn_tune.errors import UsageError, suggest
from axonn_tune.grid import divisors
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.inputs import Inputs, load_inputs
from axonn_tune.ranking.nearest import Saving, nearest_change
from axonn_tune.request import Request
from axonn_tune.specs.catalog import ModelLike
from axonn_tune.vocabulary import LARGEST_SIZE

_NUMBER = re.compile(r"[0-9]{1,10}")
_RANGE = re.compile(r"(N)\.\.(N)(?:x(N)|\+(N))?".replace("N", _NUMBER.pattern))
_MOST_VALUES = 10_000


@dataclass(frozen=True)
class Point:
    """One point of a sweep: its inputs, its best layout (None: nothing is feasible, for `reason`).

    fastest: the candidate with the shortest step of all, if another criterion has a notably longer one first.
    efficiency: tokens/s of one GPU, relative to the first feasible point of the same model and batch, or to the best
    size. saving: savers that it takes, where these are tried. over: the framework's name of the axis that is swept, and
    its size here; dispatch_s: dispatch and combine of the best in a step, None without experts.
    """

    inputs: Inputs
    entry: PricedLayout | None
    reason: str
    efficiency: float | None = None
    fastest: PricedLayout | None = None
    over: tuple[str, int] | None = None
    dispatch_s: float | None = None
    saving: Saving | None = None


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
    """The best layout at every point: models, then batches, then GPU counts, then sizes of an axis.

    A batch of None is the model's. With weak scaling a batch belongs to the first GPU count and grows with
    the others; UsageError if it would not stay whole.
    """
    points: list[Point] = []
    for model in models:
        for batch in batches:
            base: PricedLayout | None = None
            for count in gpus:
                asked = replace(request, model=model, batch=batch, gpus=count)
                weak = gpus[0] if request.weak else count
                found = [_point(_at(sized, base=weak), over=named) for named, sized in _over(asked)]
                fits = [point.entry for point in found if point.entry]
                base = max(fits, key=per_gpu, default=None) if request.over else base or next(iter(fits), None)
                for point in found:
                    share = per_gpu(point.entry) / per_gpu(base) if point.entry and base else None
                    points.append(replace(point, efficiency=share))
    return tuple(points)


def _over(request: Request) -> Iterator[tuple[tuple[str, int] | None, Request]]:
    """The request with each size of the axis that is swept, and that size by its name; without such an axis as it is.

    UsageError where the framework has no such axis, or sizes are missing of another than that of experts.
    """
    over = request.over
    if over is None:
        yield None, request
        return
    problem = load_inputs(request).problem
    name, given, sizes = over.partition("=")
    framework, experts = problem.framework, [each.experts for each in problem.model.types if each.experts]
    axis = framework.axis(name.strip())
    if axis is None or axis not in framework.axes:
        known = [framework.called(one).lower() for one in framework.axes]
        words = f"--over {over}: {framework.title} has no such axis for {problem.model.name}"
        raise UsageError(f"{words}{suggest(name, known)}; it has {', '.join(known)}")
    called = framework.called(axis)
    if axis in request.axes:
        raise UsageError(f"--over {over}: {framework.option(axis)} pins it")
    if not given and axis != "expert":
        raise UsageError(f"--over {over}: write its sizes, as in {name}=1..8x2")
    several = parse_numbers(sizes, option=f"--over {name}") if given else divisors(experts[0].count)
    for size in (size for size in several if given or size <= problem.gpus):
        yield (called, size), replace(request, **dict[str, Any]({axis: size}))


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


def _point(inputs: Inputs, *, over: tuple[str, int] | None = None) -> Point:
    found = run_search(inputs.problem, top=1)
    if len(found):
        terms = found.detail(0).terms if over and inputs.problem.model.has_experts else ()
        sent = [term.seconds for term in terms if term.collective.routing is not None]
        dispatch_s = sum(sent) if terms else None
        fastest = found.fastest_elsewhere()
        return Point(inputs, found[0], "", fastest=fastest, over=over, dispatch_s=dispatch_s)
    return Point(inputs, None, nearest_change(inputs.problem), over=over)


def per_gpu(entry: PricedLayout) -> float:
    """Throughput of one GPU, tokens/s."""
    return entry.tokens_per_s / entry.grid.world
