"""How many GPUs at least: the smallest number on which a model trains, and what it takes there and on more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from math import prod
from operator import itemgetter
from typing import NamedTuple

from axonn_tune.errors import NothingFeasibleError, UsageError
from axonn_tune.grid import RANK_AXES
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.inputs import Inputs, load_inputs
from axonn_tune.ranking.nearest import Saving, fits, nearest_change, needed_bytes_of, offloads, savings, with_batch
from axonn_tune.ranking.priced import Priced
from axonn_tune.ranking.space import Problem
from axonn_tune.ranking.sweep import Point, parse_numbers, per_gpu
from axonn_tune.request import MIN, Request
from axonn_tune.specs.catalog import ModelLike
from axonn_tune.specs.tuning import tools
from axonn_tune.vocabulary import Tune

MOST_GPUS = 2048
"""GPUs up to which whole nodes are tried."""
_ADAPTING: tuple[Tune, ...] = ("lora", "qlora")


class Offloaded(NamedTuple):
    """Fewer GPUs with the optimizer in host memory, by the first layout there.

    added_s: what a step takes more than the same layout with everything on GPUs that had the memory. arguments: of a
    search.
    """

    gpus: int
    title: str
    arguments: str
    iteration_s: float
    added_s: float
    memory_bytes: float
    host_bytes: float


class Taken(NamedTuple):
    """What a layout takes to fit, and the framework's arguments that ask for it; without any, those of a search."""

    title: str
    arguments: str


@dataclass(frozen=True)
class Size:
    """A number of GPUs with the ranking there: without savers where it fits without, else with all, which is fastest.

    taken: those it has; needed: as few as do; None: none. took: what its first layout takes, where that is asked for.
    """

    inputs: Inputs
    ranked: Priced
    taken: Saving | None
    needed: Saving | None
    took: tuple[Taken, ...] = ()


@dataclass(frozen=True)
class Smallest:
    """The smallest number of GPUs on which a model trains, over all combinations of savers.

    of_batch: smaller ones that the batch alone rules out, each with the nearest batch with which it fits.
    """

    inputs: Inputs
    gpus: int
    of_batch: tuple[tuple[int, int], ...]
    _known: dict[tuple[int, int], bool] = field(default_factory=dict, compare=False)

    @cached_property
    def _ladder(self) -> tuple[Saving | None, ...]:
        return (None, *_savings(self.inputs.problem))

    def sized(self, gpus: int, saving: Saving | None = None) -> Problem:
        """The problem on a number of GPUs, with savers."""
        problem = replace(self.inputs.problem, gpus=gpus)
        return problem if saving is None else saving.of(problem)

    def size(self, gpus: int, *, top: int = 1) -> Size | None:
        """A number of GPUs with a ranking of `top` rows; None where nothing fits.

        Fewer bytes take less time to move, so of savings that fit the one with all savers is fastest.
        """
        needed = next((place for place in range(len(self._ladder)) if self._fits(gpus, place)), None)
        if needed is None:
            return None
        taken, request = self._ladder[-1] if needed else None, self.inputs.problem.request
        inputs = replace(self.inputs, problem=self.sized(gpus, taken))
        ranked = run_search(inputs.problem, costs=request.cost, top=top, variants=request.variants)
        return Size(inputs, ranked, taken, self._ladder[needed])

    def _fits(self, gpus: int, place: int) -> bool:
        """Whether a number fits with a combination of savers, by its place."""
        if (gpus, place) not in self._known:
            self._known[gpus, place] = fits(self.sized(gpus, self._ladder[place]))
        return self._known[gpus, place]

    def sizes(self, *, top: int = 1) -> Iterator[Size]:
        """The smallest number, with a ranking of `top` rows, and the next power of two of GPUs or nodes that fits."""
        first = self.size(self.gpus, top=top)
        assert first is not None, "it fits"
        yield first
        per_node = self.inputs.problem.machine.launcher.ranks_per_node
        for gpus in counts(self.inputs.problem, least=self.gpus + 1):
            unit = per_node if gpus % per_node == 0 else 1
            if (gpus // unit).bit_count() == 1 and (found := self.size(gpus)):
                yield found
                return

    @cached_property
    def offloaded(self) -> Offloaded | None:
        """The smallest number with the optimizer in host memory, as few savers as do beside it; None where that is no
        smaller."""
        problem = self.inputs.problem
        ladder = list(offloads(problem.framework, problem.workload, problem.request))
        for gpus in takewhile(self.gpus.__gt__, counts(problem) if ladder else ()):
            if not fits(self.sized(gpus, ladder[-1])):
                continue
            saving = next(one for one in ladder if fits(self.sized(gpus, one)))
            found = run_search(self.sized(gpus, saving), costs=problem.request.cost, top=1).detail(0)
            plain = found.without_offload
            assert plain is not None, "something is on the host"
            return Offloaded(
                *(gpus, saving.titles, saving.words, found.iteration_s, found.iteration_s - plain.iteration_s),
                *(found.memory_bytes, found.host_bytes),
            )
        return None

    @cached_property
    def other_modes(self) -> Mapping[Tune, int]:
        """Where only adapters train, the smallest numbers of other modes that the framework has, by their words."""
        request, tuner = self.inputs.problem.request, self.inputs.problem.framework.tuner
        stated = any(one.startswith("workload.tuning") for one in request.set)
        if request.tune not in (*_ADAPTING, "dora") or stated or not tuner:
            return {}
        whole = replace(request, tune=None, lora_rank=None, lora_targets=None, lora_dtype=None)
        modes = (mode for mode in _ADAPTING if mode in tools()[tuner].modes and mode != request.tune)
        asked: dict[Tune, Request] = {mode: replace(request, tune=mode) for mode in modes}
        found = dict[Tune, int]()
        for mode, other in (asked | {"full": whole}).items():
            with suppress(NothingFeasibleError):
                found[mode] = smallest(other).gpus
        return found

    @cached_property
    def without(self) -> int | None:
        """The smallest number without savers, None where none does."""
        return next((gpus for gpus in counts(self.inputs.problem, least=self.gpus) if self._fits(gpus, 0)), None)


def smallest(request: Request) -> Smallest:
    """The smallest number of GPUs, below a node and in whole nodes; what fits is found by memory alone.

    NothingFeasibleError if nothing up to `MOST_GPUS` does.
    """
    # Loaded for as many as the pinned axes have, since others divide by them.
    inputs = load_inputs(replace(request, gpus=_pinned(request)))
    problem = inputs.problem
    limit_bytes, without_layout = memory_limit_bytes(problem.machine.accelerator), list[Problem]()
    # One of these fits where any does: all savers, and none where one takes more of some layouts.
    lean = _savings(problem)[-1:]
    leanest = [one.of(problem) for one in lean]
    if not lean or any(one.trades for one in lean[0].savers):
        leanest.append(problem)
    last = problem
    for gpus in counts(problem):
        several = [replace(one, gpus=gpus) for one in leanest]
        needed = [one for one in map(needed_bytes_of, several) if one is not None]
        if min(needed, default=limit_bytes + 1.0) <= limit_bytes:
            # The nearest below first, as memory rules out the others.
            tried = ((one.gpus, with_batch(one)) for one in reversed(without_layout))
            of_batch = tuple((fewer, batch) for fewer, batch in takewhile(itemgetter(1), tried) if batch)
            return Smallest(inputs, gpus, of_batch[::-1])
        if needed:
            last = several[0]
        else:
            without_layout.append(several[0])
    raise NothingFeasibleError(
        f"no number of GPUs up to {MOST_GPUS:,} can train this; on {last.gpus:,}, {nearest_change(last)}"
    )


def from_smallest(
    request: Request, asked: str, *, models: Sequence[ModelLike], batches: Sequence[int | None]
) -> tuple[Point, ...]:
    """Points of a sweep from the smallest number of each model and batch on: `min..` to twice that, in whole nodes or
    parts of one; `min..512x2` or `min..64+8` as ranges are.

    UsageError for another text, and where an axis is swept too or the batch grows.
    """
    if request.over or request.weak:
        raise UsageError(f"--gpus {asked}: leave out {'--over' if request.over else '--weak'}")
    points = list[Point]()
    for model in models:
        for batch in batches:
            found = smallest(replace(request, model=model, batch=batch))
            last, whole = asked.removeprefix(MIN), counts(found.inputs.problem, least=found.gpus)
            if last in ("", ".."):
                several = [gpus for gpus in whole if gpus <= (2 if last else 1) * found.gpus]
            else:
                several = list(parse_numbers(f"{found.gpus}{last}", option="--gpus"))
            sizes = [size for gpus in several if (size := found.size(gpus))]
            base = per_gpu(sizes[0].ranked[0])
            points += [
                Point(
                    *(one.inputs, one.ranked[0], ""),
                    efficiency=per_gpu(one.ranked[0]) / base,
                    fastest=one.ranked.fastest_elsewhere(),
                    saving=one.taken,
                )
                for one in sizes
            ]
    return tuple(points)


def counts(problem: Problem, *, least: int = 1) -> Iterator[int]:
    """Numbers of GPUs from the least on that pinned axes divide: parts of a node, then whole nodes."""
    per_node, pinned = problem.machine.launcher.ranks_per_node, _pinned(problem.request)
    every = range(pinned, max(MOST_GPUS, pinned) + 1, pinned)
    return (gpus for gpus in every if gpus >= least and (gpus < per_node or gpus % per_node == 0))


def _pinned(request: Request) -> int:
    """GPUs of the pinned axes."""
    return prod(size for axis, size in request.axes.items() if axis in RANK_AXES)


def _savings(problem: Problem) -> list[Saving]:
    """Combinations of savers, the leanest last; what is switched off by the request stays off."""
    return list(savings(problem.framework, problem.workload, problem.request, switched_off=False))
