"""What fits and what takes less memory; where nothing fits what binds, and the smallest change with which it fits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from axonn_tune.errors import NothingFeasibleError, UsageError
from axonn_tune.frameworks import find_framework, registry
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework, Saver
from axonn_tune.grid import ALL_AXES, divisors, nearest_sizes
from axonn_tune.program.feasibility import MEMORY, MICRO_BATCH
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.fit import Fitting, fit_all, host_limit_bytes, kept_on_host, least_bytes_of
from axonn_tune.ranking.inputs import check, compared, step_setting, with_types
from axonn_tune.ranking.priced import Priced
from axonn_tune.ranking.programs import Programs, step_program
from axonn_tune.ranking.shapes import Shapes, list_shapes
from axonn_tune.ranking.space import Grids, Problem, list_grids
from axonn_tune.request import ALPHA_BETA, NO_REQUEST, Request, flag
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.units import GIB, show_bytes, show_seconds


@dataclass(frozen=True)
class Saving:
    """Savers that are taken together, and what they make of framework, workload and request."""

    savers: tuple[Saver, ...]
    framework: Framework
    workload: Workload
    request: Request

    @property
    def words(self) -> str:
        """As the command line has them."""
        return " ".join(one.words for one in self.savers)

    @property
    def titles(self) -> str:
        """What they make of a run."""
        return ", ".join(one.title for one in self.savers)

    def of(self, problem: Problem) -> Problem:
        """A problem with them."""
        return replace(problem, framework=self.framework, workload=self.workload, request=self.request)


def savings(
    framework: Framework, workload: Workload, request: Request = NO_REQUEST, *, switched_off: bool = True
) -> Iterator[Saving]:
    """Each combination of savers that can be had and is not asked for otherwise: fewer first, then in the order of the
    framework, whose later ones change a run more.

    switched_off: those of its own step, too, which a run is without.
    """
    own = (find_framework(framework.name) if framework.name in registry() else framework).step
    named = [one for one in framework.savers if one.option == "set" or getattr(request, one.option) in (None, False)]
    groups: dict[str, list[Saver | None]] = {}
    for one in named:
        if one.option != "set":
            groups.setdefault(one.option, [None]).append(one)
        elif switched_off and all(getattr(own, name) == value for name, value in [step_setting(str(one.value))]):
            groups[one.words] = [None, one]
    taken = [tuple(one for one in several if one) for several in product(*groups.values())]
    for savers in sorted(taken, key=lambda one: (len(one), [framework.savers.index(each) for each in one])):
        found = Saving((), framework, workload, request)
        with contextlib.suppress(UsageError):
            for one in sorted(savers, key=framework.savers.index):
                found = _with(found, one)
            if savers:
                yield found


def offloads(framework: Framework, workload: Workload, request: Request = NO_REQUEST) -> Iterator[Saving]:
    """The saver that takes time, alone and with each combination of the others, fewer first; none where something is on
    the host, or is asked not to be. Megatron-Core has it beside types of states of its own alone."""
    saver = framework.offload
    if saver is None or framework.step.offloads or any(one.startswith("step.offload") for one in request.set):
        return
    alone = Saving((), framework, workload, request)
    for saving in (alone, *savings(framework, workload, request, switched_off=False)):
        if saving.framework.step.precision_aware or not framework.precision_aware:
            yield _with(saving, saver)


def _with(saving: Saving, saver: Saver) -> Saving:
    """With one more; UsageError for what is had already, or what number format, framework or step cannot have."""
    framework, workload, request, value = saving.framework, saving.workload, saving.request, saver.value
    if saver.option == "set":
        framework = framework.with_step(**dict([step_setting(str(value))]))
        request = replace(request, set=(*tuple(request.set), str(value)))
    else:
        request = replace(request, **{saver.option: value})  # type: ignore[arg-type]
        if saver.option == "shard_optimizer":
            workload = workload.model_copy(update={"shard_optimizer_over_data": True})
        else:
            framework = with_types(framework, request, workload)
    if (framework, workload) == (saving.framework, saving.workload):
        raise UsageError(f"{saver.words} changes nothing")
    return Saving((*saving.savers, saver), framework, workload, request)


def fits(problem: Problem) -> bool:
    """Whether a search would have a row. Nothing is priced."""
    needed_bytes = needed_bytes_of(problem)
    return needed_bytes is not None and needed_bytes <= memory_limit_bytes(problem.machine.accelerator)


def needed_bytes_of(problem: Problem) -> float | None:
    """Memory of the leanest layout, by what the search goes by: of grids that satisfy every constraint, with the
    smallest micro-batch and the recompute set that needs least. None without a layout, and for what a command line is
    refused for.
    """
    try:
        check(problem)
    except (UsageError, NothingFeasibleError):
        return None
    shapes = leanest(grids := list_grids(problem), problem)
    if not len(shapes):
        return None
    least_bytes, _ = least_bytes_of(shapes, Programs(problem.by_dispatcher[0]), len(grids.sizes))
    return min(float(of_grid.min()) for of_grid in least_bytes)


def leanest(grids: Grids, problem: Problem) -> Shapes:
    """Shapes with the smallest micro-batch, which divides every share of the batch: memory grows with it."""
    if problem.request.micro_batch is None:
        smallest = 2 if problem.workload.split_micro_batch else 1
        problem = replace(problem, request=replace(problem.request, micro_batch=smallest))
    return list_shapes(grids, problem)


def require_any(ranked: Priced) -> None:
    """NothingFeasibleError, with binding constraint and nearest change, if a ranking is empty."""
    if not len(ranked):
        raise NothingFeasibleError(nothing_feasible(ranked))


def nothing_feasible(ranked: Priced) -> str:
    """Reason of an empty ranking, and the nearest change."""
    found, only = ranked.searched, ranked.searched.grids == 1
    if found.feasible:
        rejecting = ", ".join(found.rejected)
        none = "the only layout has no price" if only else f"none of {found.grids:,} layouts has a price"
        return f"{none} ({rejecting}); nearest change: --cost {ALPHA_BETA}"
    none = "the only layout cannot train this" if only else f"none of {found.grids:,} layouts can train this"
    return f"{none}: {nearest_change(ranked.problem)}"


def nearest_change(problem: Problem) -> str:
    """Binding constraint and nearest changes, for a problem with an empty ranking.

    What fits is found by memory alone. Where memory binds, changes have step and memory of the best layout that each
    allows: the first, savers and those that leave few layouts to search, up to three; of the same job on the same GPUs,
    or, where none of those fits, of others.
    """
    grids = list_grids(problem)
    shapes = list_shapes(grids, problem)
    memory = len(shapes) > 0
    binding = _binding_memory(problem, grids) if memory else _binding_divisibility(problem, grids)
    kinds = [*(_savers(problem) if memory else ()), *_near_sizes(problem), *([] if memory else [_batches(problem)])]
    others = _more_gpus if memory else _gpus
    kinds += [*(_smaller(problem) if memory else ()), others(problem), _without_pins(problem)]
    tried = [first for kind in kinds if (first := _first_feasible(kind))]
    if memory and not any(_same_job(problem, changed) for _, changed in tried):
        tried[:0] = [first for kind in _with_savers(problem) if (first := _first_feasible(kind))]
    if memory and not any(_same_job(problem, changed) for _, changed in tried):
        moved = ((one.words, one.of(problem)) for one in offloads(problem.framework, problem.workload, problem.request))
        tried[:0] = filter(None, [_first_feasible(moved)])
    # Other GPU counts, each with divisible batches, or without the pins that none of them suits.
    second, joint = (_without_pins, " and ") if memory else (_batches, " ")
    both = ((f"{text}{joint}{more}", twice) for text, changed in others(problem) for more, twice in second(changed))
    tried = tried or [first for first in [_first_feasible(both)] if first]
    priced, named = _by_cost(problem, tried) if memory and tried else ([], [text for text, _ in tried])
    found = [*priced, *named]
    if not found:
        return f"{binding}; no single change tried makes it fit"
    order = ", cheapest first" if len(priced) > 1 else ""
    changes = "changes that fit" if len(found) > 1 else "change that fits"
    return f"{binding}; nearest {changes}{order}: {' or '.join(found)}"


_MOST_CHANGES, _FEW = 3, 500
"""Changes that are priced where memory binds, and shapes whose best layout is found in a tenth of a second."""


def _by_cost(problem: Problem, tried: Sequence[tuple[str, Problem]]) -> tuple[list[str], list[str]]:
    """Changes with step and memory of the best layout of each, the least time of a GPU per token first, and others by
    name: those of another job, which are priced where no other change fits, and those that would take more searches."""

    own = [one for one in tried if _same_job(problem, one[1])]
    first, *others = own or tried

    def priced_soon(changed: Problem) -> bool:
        """Whether it is priced: savers, of which the one that costs least is to be named, and what is searched soon."""
        return changed.framework != problem.framework or len(list_shapes(list_grids(changed), changed)) <= _FEW

    few = [one for one in others if priced_soon(one[1])]
    named = [one[0] for one in tried if one is not first and one not in few]
    priced = []
    for text, changed in (first, *few[: _MOST_CHANGES - 1]):
        best, workload = search(changed, top=1)[0], changed.workload
        per_token = best.iteration_s * changed.gpus / (workload.global_batch * workload.sequence_length)
        priced.append((per_token, text, best))
    return [
        f"{text} ({show_seconds(best.iteration_s)} a step, {show_bytes(best.memory_bytes)})"
        for _, text, best in sorted(priced, key=lambda one: one[:2])
    ], named


_NEARBY, _WORTH_SAYING = 0.25, 0.1
"""Largest relative difference of a suggested batch, and least relative saving per sequence."""


def faster_batch(problem: Problem) -> str:
    """Suggests a batch divisible by the GPU count if it saves much time per sequence; else an empty text.

    A multiple of the GPU count suits every grid; other batches rule out most of them.
    """
    batch, gpus = problem.workload.global_batch, problem.gpus
    below = batch // gpus * gpus
    nearby = [other for other in (below, below + gpus) if 0 < abs(other - batch) <= _NEARBY * batch]
    if not nearby:
        return ""
    other = min(nearby, key=lambda each: abs(each - batch))
    step_s, other_s = _shortest_step_s(problem), _shortest_step_s(_with_workload(problem, global_batch=other))
    if other_s / other > (1.0 - _WORTH_SAYING) * step_s / batch:
        return ""
    return (
        f"A batch of {batch:,} is not divisible by {gpus:,} GPUs, which rules out most layouts: --batch {other} has a "
        f"shortest step of {show_seconds(other_s)} instead of {show_seconds(step_s)}."
    )


def _shortest_step_s(problem: Problem) -> float:
    """Shortest step of all candidates, s; infinite if none is feasible."""
    found = search(replace(problem, rank_by="iteration"), top=1)
    return found[0].iteration_s if len(found) else math.inf


def _same_job(problem: Problem, changed: Problem) -> bool:
    """Whether it is the same job on the same GPUs."""
    sizes = [(one.workload.global_batch, one.workload.sequence_length) for one in (problem, changed)]
    return sizes[0] == sizes[1] and (problem.gpus, problem.framework.name) == (changed.gpus, changed.framework.name)


def with_batch(problem: Problem) -> int | None:
    """The nearest batch with which something fits; None without one."""
    found = _first_feasible(_batches(problem))
    return found and found[1].workload.global_batch


def _first_feasible(changes: Iterator[tuple[str, Problem]]) -> tuple[str, Problem] | None:
    """The first change that makes something feasible; None if none does. Nothing is priced."""
    return next(((text, changed) for text, changed in changes if fits(changed)), None)


def _fittings(shapes: Shapes) -> Iterator[tuple[Recompute, Fitting]]:
    """Memory under each recompute set, that of whole blocks first, which mostly needs least; on all blocks where they
    are not asked for in part."""
    problem = shapes.problem
    asked = [one for one in problem.variants if not one.some or problem.request.recompute_layers]
    for one in sorted(asked, key=lambda one: one.recompute != "full"):
        yield one.recompute, fit_all(shapes, {one: step_program(problem, problem.framework.step, one)})[one]


def _binding_memory(problem: Problem, grids: Grids) -> str:
    """The leanest candidate, and its gap to the limit."""
    shapes = leanest(grids, problem)
    least: tuple[float, str] | None = None
    limit_bytes = 0.0
    for recompute, fitting in _fittings(shapes):
        row = int(np.argmin(fitting.total_bytes))
        limit_bytes = fitting.limit_bytes
        sizes = {axis: int(shapes.sizes(axis)[row]) for axis in problem.axes}
        if len(shapes.piped):
            sizes["chunks"] = int(shapes.chunks[row])
        axes = ", ".join(f"{name}={size}" for name, size in problem.framework.layout(sizes).items())
        text = f"{axes}, micro-batch {shapes.micro_batch[row]}, recompute {recompute}"
        needed = float(fitting.total_bytes[row])
        if least is None or needed < least[0]:
            least = (needed, text)
    assert least is not None, "limits always allow at least one kind of recompute"
    if math.isinf(least[0]):
        programs = Programs(problem.by_dispatcher[0]).values()
        kept = min(float(kept_on_host(shapes, program).min()) for program in programs)
        return (
            f"binding constraint: {MEMORY} of hosts: the smallest configuration keeps {kept / GIB:,.0f} GiB on the "
            f"host of a node, which has {host_limit_bytes(problem) / GIB:,.0f}"
        )
    return (
        f"binding constraint: {MEMORY}: the smallest configuration ({least[1]}) needs {least[0] / GIB:.1f} GiB, "
        f"{limit_bytes / GIB:.1f} GiB can be used"
    )


def _binding_divisibility(problem: Problem, grids: Grids) -> str:
    """The few constraints that together reject every grid, each with one grid it rejects."""
    wanted, framework = np.ones(len(grids.sizes), dtype=np.bool_), problem.framework
    for axis, size in problem.request.axes.items():
        wanted &= grids.column(axis) == size
    pins = ", ".join(f"{framework.called(axis)}={size}" for axis, size in problem.request.axes.items())
    having = f" that has {pins}" if pins else ""
    if wanted[grids.sound].any():
        return f"binding constraint: {_shape_words(problem, grids)} of any layout{having}"
    broken, sizes, total = grids.broken[wanted], grids.sizes[wanted], int(wanted.sum())
    said: list[str] = []
    while len(broken):
        counts = broken.sum(axis=0)
        worst = int(np.argmax(counts))
        check, caught = grids.constraints[worst], broken[:, worst]
        example = dict.fromkeys(ALL_AXES, 1) | dict(zip(grids.axes, sizes[caught][0].tolist(), strict=True))
        of = "" if said else f" of {total}"
        said.append(f"{int(counts[worst])}{of} {check.name} ({check.explain(example, framework)})")
        broken, sizes = broken[~caught], sizes[~caught]
    return f"binding constraint of each layout{having}: {', '.join(said)}"


def _shape_words(problem: Problem, grids: Grids) -> str:
    """The pinned micro-batch or chunks that no valid grid can have."""
    request, split, framework = problem.request, problem.workload.split_micro_batch, problem.framework
    share, asked = "the share of the batch", request.micro_batch
    if problem.parts is not None:
        stages, chunks = framework.called("pipeline"), framework.called("chunks")
        rule = f" ({framework.schedule.equal_chunks})" if framework.schedule.equal_chunks else ""
        return f"{stages}·{chunks} as {len(problem.parts)} parts and micro-batches that {stages} divides{rule}, both"
    if request.chunks not in (None, 1):
        names = f"{framework.called('pipeline')}·{framework.called('chunks')}"
        rows = grids.sound_as_asked(problem)
        fewest = request.chunks * min((size for size in grids.column("pipeline")[rows].tolist() if size > 1), default=0)
        if not fewest:
            return f"{framework.called('pipeline')} is 1"
        if fewest > problem.model.layers:
            return f"layers ({problem.model.layers}) is less than {names} = {fewest}"
        if framework.schedule.equal_chunks and problem.model.layers % fewest:
            return f"{names} does not divide layers ({problem.model.layers}), and {framework.schedule.equal_chunks},"
        return f"{framework.called('pipeline')} does not divide the micro-batches"
    if asked is None:
        return f"{MICRO_BATCH}: halves of a micro-batch, which --split-micro-batch asks for, do not divide {share}"
    halved = "does not divide" if asked % 2 == 0 or not split else "has no halves to divide"
    return f"{MICRO_BATCH}: {asked} {halved} {share}"


def _without_pins(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The problem without its pins; named last, for what follows would read as left out too."""
    request, framework = problem.request, problem.framework
    if request.pins:
        named = [framework.option(one) if one in (*request.axes, "chunks") else flag(one) for one in request.pins]
        listed = " and ".join(filter(None, (", ".join(named[:-1]), named[-1])))
        yield f"leave out {listed}", replace(problem, request=request.without_pins())


def _savers(problem: Problem) -> Iterator[Iterator[tuple[str, Problem]]]:
    """What takes less memory with the same axes: as few of the framework's savers as do, recompute sets, smaller
    micro-batches."""
    request, framework = problem.request, problem.framework
    taken = [(one.savers, one.words, one.of(problem)) for one in savings(framework, problem.workload, request)]
    fewest = next((len(savers) for savers, _, changed in taken if fits(changed)), 0)
    yield from (iter([(words, changed)]) for savers, words, changed in taken if len(savers) == fewest)
    if request.recompute is not None:
        others = (one for one in framework.recompute_sets if one not in (request.recompute, "none"))
        for one in others:
            asked = replace(request, recompute=one, recompute_layers=None)
            yield iter([(f"--recompute {one}", replace(problem, request=asked))])
    if (size := request.micro_batch or 1) > 1:
        smaller = [replace(request, micro_batch=other) for other in divisors(size)[-2::-1]]
        yield ((f"--micro-batch {one.micro_batch}", replace(problem, request=one)) for one in smaller)


def _with_savers(problem: Problem) -> Iterator[Iterator[tuple[str, Problem]]]:
    """Another change beside the fewest savers that suffice with it, where neither does alone."""
    taken = list(savings(problem.framework, problem.workload, problem.request))
    for kind in (*_savers(replace(problem, framework=replace(problem.framework, savers=()))), *_near_sizes(problem)):
        for text, changed in kind:
            yield ((f"{one.words} {text}", replace(one.of(problem), request=_joined(one, changed))) for one in taken)


def _joined(saving: Saving, changed: Problem) -> Request:
    """What a changed problem asks for, with savers."""
    own = {name: getattr(saving.request, name) for name in ("set", *(one.option for one in saving.savers))}
    return replace(changed.request, **own)


_NEAR = 4
"""Other sizes of a pinned axis that are tried."""


def _near_sizes(problem: Problem) -> Iterator[Iterator[tuple[str, Problem]]]:
    """Each pinned axis with another size, the nearest first."""
    request, framework = problem.request, problem.framework
    for axis, size in request.axes.items():
        others = nearest_sizes(problem.gpus, size)[:_NEAR]
        requests = [replace(request, **dict[str, Any]({axis: other})) for other in others]
        flags = [f"{framework.option(axis)} {other}" for other in others]
        yield iter([(name, replace(problem, request=one)) for name, one in zip(flags, requests, strict=True)])


def _smaller(problem: Problem) -> Iterator[Iterator[tuple[str, Problem]]]:
    """What else takes less memory: shorter sequences, pipeline stages, a framework that shards weights."""
    lengths = (problem.workload.sequence_length // 2**halvings for halvings in (1, 2))
    yield ((f"--seq {length}", _with_workload(problem, sequence_length=length)) for length in lengths if length)
    if "pipeline" in problem.framework.axes and not problem.pipeline:
        yield iter([("--pipeline", replace(problem, pipeline=True))])
    if problem.framework != AXONN_TUNE and not problem.request.axes:
        others = (find_framework(name) for name in _SHARDING if name != problem.framework.name)
        yield ((f"--framework {other.name}", _by_another(problem, other)) for other in others)


def _by_another(problem: Problem, framework: Framework) -> Problem:
    """The search of another framework's layouts, as it is made of them."""
    staged = problem.pipeline or framework.searches_stages
    rank_by = framework.ranked_by if problem.request.rank_by is None else problem.rank_by
    asked = replace(problem, framework=framework, pipeline=staged, rank_by=rank_by)
    return compared(asked)


_SHARDING = ("torchtitan", "deepspeed", "megatron-core")
"""Frameworks that can shard weights over data-parallel ranks."""


def _gpus(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Other GPU counts: near this one, those that fill their nodes or part of one first; then powers of two upwards."""
    gpus, per_node = problem.gpus, problem.machine.launcher.ranks_per_node
    above = max(_next_multiple(gpus + 1, 8), _next_multiple(gpus + 1, per_node))
    below = {(gpus - 1) // step * step for step in (8, per_node)} - {0}
    nearby = {*range(gpus + 1, above + 1), *below}
    nearest = sorted(nearby, key=lambda count: (count > per_node and count % per_node > 0, abs(count - gpus), count))
    for count in (*nearest, *(1 << above.bit_length() + doublings for doublings in range(12))):
        yield f"--gpus {count}", replace(problem, gpus=count)


def _more_gpus(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """More GPUs, for memory: part of a node, then whole nodes, a quarter and a half more before each doubling."""
    gpus, per_node = problem.gpus, problem.machine.launcher.ranks_per_node
    part = range(gpus + 1, per_node) if gpus < per_node else ()
    times = (quarters << doublings for doublings in range(12) for quarters in (4, 5, 6))
    whole = (_next_multiple(gpus * one // 4, per_node) for one in times)
    for count in dict.fromkeys((*part, *whole)):
        if count > gpus:
            yield f"--gpus {count}", replace(problem, gpus=count)


def _batches(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Multiples of the GPU count on either side of the batch, nearest first: those suit every grid."""
    batch = problem.workload.global_batch
    unit = problem.gpus * (problem.request.micro_batch or 1) * (2 if problem.workload.split_micro_batch else 1)
    above = _next_multiple(batch, unit)
    for option in sorted({above - unit, above, above + unit} - {0, batch}, key=lambda other: abs(other - batch)):
        yield f"--batch {option}", _with_workload(problem, global_batch=option)


def _with_workload(problem: Problem, **changed: int | bool) -> Problem:
    return replace(problem, workload=problem.workload.model_copy(update=changed))


def _next_multiple(number: int, of: int) -> int:
    """The smallest multiple of `of` that is at least `number`."""
    return -(-number // of) * of
