"""A step as a story: for someone who has not seen the model behind it, in terms that an expert can check."""

from __future__ import annotations

from collections.abc import Iterator

from axonn_tune.cost.breakdown import ATTENTION, ELEMENT_WISE, MATRIX_PRODUCTS, OPTIMIZER, Work, work_by_kind
from axonn_tune.cost.prediction import Pricing
from axonn_tune.grid import Grid
from axonn_tune.ranking.entries import Entry
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.specs.machine import Accelerator, Machine
from axonn_tune.units import show_bytes, show_seconds

_RECOMPUTE = {
    "none": "Everything the backward pass needs is kept from the forward pass.",
    "selective": "The backward pass computes norms, attention and activations again instead of keeping their results.",
    "full": "The backward pass runs each block's forward pass again: only a block's input is kept.",
}
_WORTH_SAYING = 0.005
"""Share of a step below which a gain is not mentioned."""
_KERNELS = (ELEMENT_WISE, OPTIMIZER)
"""Computation without FLOPs of the model."""


def words(inputs: Inputs, entry: Entry, pricing: Pricing) -> list[str]:
    """The step as a list of sentences."""
    return [sentence for part in paragraphs(inputs, entry, pricing) for sentence in part]


def paragraphs(inputs: Inputs, entry: Entry, pricing: Pricing) -> list[list[str]]:
    """The same in paragraphs: the work, how it is arranged, what is kept, the time it takes, what limits it."""
    grid = pricing.configuration.grid
    arranged = [*_axes(grid), *_placement(grid, inputs.problem.machine)]
    found = [
        list(_work(inputs, pricing)),
        arranged,
        list(_saved(pricing)),
        list(_time(entry, pricing, inputs.problem.machine.accelerator)),
        list(_use(inputs, entry, pricing)),
        list(_limits(inputs, pricing)),
    ]
    return [part for part in found if part]


def _work(inputs: Inputs, pricing: Pricing) -> Iterator[str]:
    workload, configuration = inputs.problem.workload, pricing.configuration
    grid = configuration.grid
    shares = grid.data * grid.z
    yield (
        f"One step of {inputs.problem.model.name} trains {workload.global_batch:,} sequences of "
        f"{workload.sequence_length:,} tokens on {grid.world:,} GPUs."
    )
    yield (
        f"The batch is dealt out to data × z = {grid.data} × {grid.z} = {shares} shares of "
        f"{workload.global_batch // shares:,}; each is done in "
        f"{_count(pricing.accumulation, 'micro-batch', 'micro-batches')} of "
        f"{_count(configuration.micro_batch, 'sequence', 'sequences')}."
    )


def _axes(grid: Grid) -> Iterator[str]:
    if grid.x * grid.y > 1:
        yield (
            f"Every matrix is split over x × y = {grid.x} × {grid.y} GPUs, which then sum their results: after each "
            "product forward over one of the two axes, backward over the other."
        )
    if grid.z > 1:
        yield (
            f"Each weight is stored in {grid.z} parts along z; they are gathered before use, and gradients are "
            "reduced and dealt out again after it."
        )
    if grid.data > 1:
        yield f"{grid.data} replicas along data average their gradients once a step."


def _placement(grid: Grid, machine: Machine) -> Iterator[str]:
    """Over which networks each axis talks."""
    wide = [axis for axis in grid.order if grid.axis_size(axis) > 1]
    if not wide:
        yield "There is one GPU: nothing is sent."
        return
    numbered = f"GPUs are numbered along {', then '.join(wide)}" if len(wide) > 1 else f"All GPUs lie along {wide[0]}"
    places = [f"a group of {axis} {_place(grid, axis, machine)}" for axis in wide]
    yield f"{numbered}: {'; '.join(places)}."


def _place(grid: Grid, axis: str, machine: Machine) -> str:
    """Where the members of one group are."""
    stride, size, inner = grid.stride(axis), grid.axis_size(axis), machine.tiers[0]
    if inner.ranks is None or stride * size <= inner.ranks:
        return f"is {size} GPUs joined by {inner.name}"
    if stride >= inner.ranks:
        return f"is {size} GPUs, each in another {inner.name} domain, joined by {_outer(grid, axis, machine)}"
    together = inner.ranks // stride
    domains = -(-size // together)
    joined = _outer(grid, axis, machine)
    return f"is {size} GPUs, {together} in each of {domains} {inner.name} domains, which {joined} joins"


def _outer(grid: Grid, axis: str, machine: Machine) -> str:
    """The outermost network that a group crosses."""
    reach = grid.stride(axis) * grid.axis_size(axis)
    return next(
        (tier.name for tier in machine.tiers if tier.ranks is None or reach <= tier.ranks), machine.tiers[-1].name
    )


def _saved(pricing: Pricing) -> Iterator[str]:
    yield _RECOMPUTE[pricing.configuration.recompute]
    kept = int(pricing.memory.kept_layers)
    if kept and pricing.configuration.grid.z > 1:
        yield (
            f"The last {'layer keeps its' if kept == 1 else f'{kept} layers keep their'} gathered weights for the "
            "backward pass: there is memory left for that."
        )


def _time(entry: Entry, pricing: Pricing, accelerator: Accelerator) -> Iterator[str]:
    assert entry.low_s is not None, "explained entries are feasible"
    assert entry.high_s is not None, "explained entries are feasible"
    exposed_s, step_s = pricing.exposed_communication_s, pricing.iteration_s
    bound = "computation" if exposed_s < step_s / 2 else "communication"
    yield (
        f"The step takes {show_seconds(step_s)}, with a probability of 80% between {show_seconds(entry.low_s)} and "
        f"{show_seconds(entry.high_s)}. It is bound by {bound}: a GPU computes for {show_seconds(pricing.compute_s)} "
        f"({pricing.compute_s / step_s:.0%}) and waits for the network for {show_seconds(exposed_s)} "
        f"({exposed_s / step_s:.0%})."
    )
    if not pricing.terms:
        return
    hidden_s = max(pricing.communication_s - exposed_s, 0.0)
    yield (
        f"All collectives of a GPU together take {show_seconds(pricing.communication_s)}, of which "
        f"{show_seconds(hidden_s)} ({hidden_s / pricing.communication_s:.0%}) run while it computes"
        f"{_slowing(accelerator, pricing)}."
    )
    longest = max(pricing.terms, key=lambda term: term.exposed_s)
    if longest.exposed_s:
        yield (
            f"The longest wait is for {longest.op} over {longest.axis} of {longest.layer} ({longest.phase}): "
            f"{show_seconds(longest.exposed_s)} in all."
        )


def _use(inputs: Inputs, entry: Entry, pricing: Pricing) -> Iterator[str]:
    peak = inputs.problem.machine.accelerator.peak_tflops[inputs.problem.workload.precision]
    yield (
        f"That is {entry.tokens_per_s or 0.0:,.0f} tokens/s, {entry.mfu or 0.0:.1%} of the peak of {peak:g} TFLOP/s "
        f"without recomputation (MFU), {entry.hfu or 0.0:.1%} with it (HFU)."
    )
    yield (
        f"A GPU needs {show_bytes(float(pricing.memory.total_bytes))} of the {show_bytes(pricing.memory_limit_bytes)} "
        "that can be used."
    )


def _slowing(accelerator: Accelerator, pricing: Pricing) -> str:
    """What hidden communication costs, by which number, and how that is known."""
    if not pricing.contended_s:
        return ""
    kind = accelerator.sources["contention"].kind if "contention" in accelerator.sources else "assumed"
    factor = f"{accelerator.contention:g} of its time, {kind}: accelerator.contention"
    return f", which slows that by {show_seconds(pricing.contended_s)} ({factor})"


def _limits(inputs: Inputs, pricing: Pricing) -> Iterator[str]:
    """What stands between this step and the peak, by how much it costs."""
    problem, step_s = inputs.problem, pricing.iteration_s
    work = work_by_kind(pricing, problem.workload)
    peak = problem.machine.accelerator.peak_flops_per_s(problem.workload.precision)
    again_s = sum(each.seconds for each in work if each.phase == "recompute")
    costs = [
        (pricing.exposed_communication_s, "waiting for the network"),
        (again_s, "recomputation"),
        (_slower_s(work, peak), "matrix products and attention below the peak"),
        (pricing.contended_s, "computation slowed by communication beside it"),
        (sum(each.seconds for each in work if each.kind in _KERNELS and each.phase != "recompute"), "other kernels"),
    ]
    worth = sorted(((cost_s, what) for cost_s, what in costs if cost_s > _WORTH_SAYING * step_s), reverse=True)
    if worth:
        shares = [f"{what} {show_seconds(cost_s)} ({cost_s / step_s:.0%})" for cost_s, what in worth]
        yield f"What keeps it from the peak: {', '.join(shares)}."


def _slower_s(work: tuple[Work, ...], peak: float) -> float:
    """What products and attention, those computed again left out, take beyond their time at the peak."""
    return sum(
        each.seconds - each.flops / peak
        for each in work
        if each.kind in (MATRIX_PRODUCTS, ATTENTION) and each.phase != "recompute"
    )


def _count(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"
