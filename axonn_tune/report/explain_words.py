"""A step in sentences, for someone who has not seen the model behind it."""

from __future__ import annotations

from collections.abc import Iterator

from axonn_tune.cost.single import Pricing
from axonn_tune.grid import Grid
from axonn_tune.ranking.entries import Entry
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.specs.machine import Machine
from axonn_tune.units import show_bytes, show_seconds

_RECOMPUTE = {
    "none": "Everything the backward pass needs is kept from the forward pass.",
    "selective": "The backward pass computes norms, attention and activations again instead of keeping their results.",
    "full": "The backward pass runs each block's forward pass again: only a block's input is kept.",
}


def words(inputs: Inputs, entry: Entry, pricing: Pricing) -> list[str]:
    """The step as a list of sentences."""
    grid = pricing.configuration.grid
    return [
        *_work(inputs, pricing),
        *_axes(grid),
        _placement(grid, inputs.problem.machine),
        *_saved(pricing),
        *_time(inputs, entry, pricing),
    ]


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


def _placement(grid: Grid, machine: Machine) -> str:
    """Which axes stay inside the innermost network tier."""
    wide = [axis for axis in grid.order if grid.axis_size(axis) > 1]
    if not wide:
        return "There is one GPU: nothing is sent."
    inner = machine.tiers[0]
    reach = {axis: grid.stride(axis) * grid.axis_size(axis) for axis in wide}
    inside = [axis for axis in wide if inner.ranks is None or reach[axis] <= inner.ranks]
    stays = f"; {' and '.join(inside)} stays inside {inner.name}" if inside else ""
    return f"Neighbouring GPUs belong to axis {wide[0]} first (order {', '.join(wide)}){stays}."


def _saved(pricing: Pricing) -> Iterator[str]:
    yield _RECOMPUTE[pricing.configuration.recompute]
    kept = int(pricing.memory.kept_layers)
    if kept and pricing.configuration.grid.z > 1:
        yield (
            f"The last {'layer keeps its' if kept == 1 else f'{kept} layers keep their'} gathered weights for the "
            "backward pass: there is memory left for that."
        )


def _time(inputs: Inputs, entry: Entry, pricing: Pricing) -> Iterator[str]:
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
    yield (
        f"All collectives of a GPU together take {show_seconds(pricing.communication_s)}; computation hides what is "
        "not waited for."
    )
    longest = max(pricing.terms, key=lambda term: term.exposed_s, default=None)
    if longest is not None and longest.exposed_s:
        yield (
            f"The longest wait is for {longest.op} over {longest.axis} of {longest.layer} ({longest.phase}): "
            f"{show_seconds(longest.exposed_s)} in all."
        )
    yield from _use(inputs, entry, pricing)


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


def _count(number: int, one: str, more: str) -> str:
    return f"{number:,} {one if number == 1 else more}"
