"""Facts of one step in sentences: whether it fits, what it trains, what bounds it, where its ranks are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from axonn_tune.cost.collectives import route
from axonn_tune.cost.price import Detail, PricedLayout
from axonn_tune.grid import EXPERT_AXES
from axonn_tune.job import Job
from axonn_tune.program.count import adapter_parameters, parameters
from axonn_tune.program.memory import room_of
from axonn_tune.recompute import MODULES
from axonn_tune.report.output import Column, Json, fields_of, words
from axonn_tune.report.ranking import entry_fields, optimizer_words
from axonn_tune.report.remarks import expert_overlap_words, format_words, logged_words, offload_words
from axonn_tune.report.training import training_words
from axonn_tune.specs.tuning import REST, tools
from axonn_tune.units import GIB, counted, show_bytes, show_seconds


class SmallestChange(NamedTuple):
    """The change with which a run fits that costs least time: arguments, memory of a GPU and step, s."""

    words: str
    memory_bytes: float
    step_s: float


def fit_line(priced: PricedLayout, change: SmallestChange | None = None) -> str:
    """`fits: 61.2 of 73.1 GiB`; of a run that does not, with the smallest change."""
    needed_bytes, limit_bytes = priced.memory_bytes, priced.memory_limit_bytes
    room = room_of(needed_bytes, limit_bytes)
    digits = 1 if abs(needed_bytes - limit_bytes) > GIB / 10 else 2
    sizes = f"{needed_bytes / GIB:.{digits}f} of {limit_bytes / GIB:.{digits}f} GiB"
    said = f"{priced.job.title}: {room}" if priced.job.workload.tuning else room
    if room != "does not fit":
        return f"{said}: {sizes}"
    if change is None:
        return f"{said}: needs {sizes}; no change tried makes it fit"
    memory = f"{change.memory_bytes / GIB:.1f} GiB"
    return f"{said}: needs {sizes}; smallest change: {change.words} ({memory}, {show_seconds(change.step_s)})"


def fit_json(priced: PricedLayout, change: SmallestChange | None = None) -> Json:
    """The same with every digit."""
    return {
        "room": room_of(priced.memory_bytes, priced.memory_limit_bytes),
        "needed_bytes": priced.memory_bytes,
        "limit_bytes": priced.memory_limit_bytes,
        "smallest_change": change and fields_of(change, change._fields),
    }


def step_words(priced: Detail) -> list[str]:
    """The step as a list of sentences: what it trains, then each fact."""
    workload = priced.job.workload
    trained = f"One step of {priced.job.title} trains {workload.batch_words} on {priced.grid.world:,} GPUs."
    facts = (f"{name}: {said}" for name, said in step_facts(priced))
    return [trained, *(said if said.endswith(".") else f"{said}." for said in facts)]


_FACTS = (
    ("trains", "trains", "{trains}"),
    ("batch", "shares", "{sequences}: {own} for each of {shares} of GPUs, in {micro_batches} of {micro_batch}"),
    ("optimizer", "optimizer", "{optimizer}"),
    ("step", "step", "{step} (80% interval: {low} to {high}), {bound}-bound"),
    ("computation", "compute", "{compute} of the step"),
    ("overlap slowdown", "contended", "{contended}, within computation: {factor}"),
    (
        "launch overhead",
        "host",
        "{host}, within computation: the GPU waits for its host to launch kernels (host-bound)",
    ),
    ("exposed communication", "exposed", "{exposed}"),
    ("pipeline bubble", "bubble", "{bubble}: {busiest}, waits for the others"),
    ("communication", "communication", "{communication} in all collectives of a GPU, {hidden} of it overlapped"),
    ("longest wait", "wait", "{wait}"),
    ("recompute", "recompute", "{recompute}"),
    ("gathered", "kept", "{kept} after forward (reshard_after_forward=False), for which memory is left"),
    ("throughput", "tokens", "{tokens} tokens/s, {own_tokens} per GPU"),
    ("padding", "pads", "{pads}"),
    (
        "MFU",
        "mfu",
        "{mfu} of {peak} TFLOP/s{in_tf32}; HFU, which counts recompute: {hfu}. Both count attention's masked half.",
    ),
    ("number format", "format", "{format}"),
    ("expert overlap", "merged", "{merged}"),
    ("offload", "offload", "{offload}"),
    ("framework's log", "log", "{log}"),
    ("log counts", "counts", "{counts}"),
    ("training", "training", "{training}"),
    ("memory", "memory", "{memory} of {limit} usable, per GPU"),
)
"""Facts about a step: name, the field without which there is none, and words with fields."""
_RECOMPUTE = {
    "none": "none: the forward pass saves all activations for the backward pass",
    "full": "full (activation checkpointing): the forward pass saves each block's input, the backward pass repeats it",
}
_SOME = "{set} (activation checkpointing): the backward pass recomputes {parts}"
_REPEATED = {
    **dict.fromkeys(("attention.norm", "mlp.norm"), "norms"),
    **dict.fromkeys(("attention.core", "attention.gate"), "core attention"),
    "attention.scores": "attention scores",
    "attention.output": "the output projection of attention",
    "mlp.up": "the MLP's up projection",
    "mlp.activation": "activation functions",
    **{name: one.words for name, one in MODULES.items()},
}
"""Layers and modules that a recompute set repeats, in words."""


_SHORT = (
    *("trains", "optimizer", "step", "longest wait", "recompute", "throughput"),
    *("offload", "framework's log", "log counts", "training"),
)
"""Facts that are told first."""


def step_facts(priced: Detail, *, short: bool = False) -> list[tuple[str, str]]:
    """The step in numbers: a name and words for each fact that there is, or for the first few."""
    job, grid, step_s, exposed_s = priced.job, priced.grid, priced.iteration_s, priced.exposed_communication_s
    workload, accelerator = job.workload, job.machine.accelerator

    def part(seconds: float, whole_s: float = step_s) -> str:
        return f"{show_seconds(seconds)} ({seconds / whole_s:.0%})" if seconds else ""

    kind = accelerator.sources["contention"].kind if "contention" in accelerator.sources else "assumed"
    longest = max(priced.awaited, key=lambda term: term.exposed_s, default=None)
    repeated = ", ".join(
        dict.fromkeys(_REPEATED.get(name, name) for name in job.framework.step.repeated(priced.recompute))
    )
    kept = int(priced.memory.kept_layers) if grid.z > 1 else 0
    each = " of each chunk" if priced.chunks > 1 else " of each stage" if grid.pipeline > 1 else ""
    fields = {
        "sequences": workload.batch_words,
        "trains": tuning_words(job),
        "optimizer": optimizer_words(job.framework).removeprefix(", optimizer "),
        "shares": counted(grid.batch_shares, "group"),
        "own": counted(workload.global_batch // grid.batch_shares, workload.batch_unit),
        "micro_batches": counted(priced.accumulation, "micro-batch"),
        "micro_batch": f"{priced.micro_batch:,}",
        "step": show_seconds(step_s),
        "low": show_seconds(priced.low_s),
        "high": show_seconds(priced.high_s),
        "bound": "communication" if exposed_s >= step_s / 2 else "host" if priced.host_s > step_s / 4 else "compute",
        "compute": part(priced.compute_s),
        "contended": part(priced.contended_s),
        "factor": f"{accelerator.contention:g} of overlapped communication ({kind}, accelerator.contention)",
        "host": part(priced.host_s),
        "exposed": part(exposed_s),
        "busiest": busiest(priced),
        "bubble": part(priced.bubble_s),
        "communication": show_seconds(priced.communication_s) if priced.terms else "",
        "hidden": part(max(priced.communication_s - exposed_s, 0.0), priced.communication_s or 1.0) or "none",
        "wait": ""
        if longest is None or not longest.exposed_s
        else f"{show_seconds(longest.exposed_s)} for {longest.op} over {job.framework.called(longest.axis)} of "
        f"{longest.layer} ({longest.phase})",
        "recompute": _RECOMPUTE.get(priced.recompute, _SOME).format(set=priced.recompute, parts=repeated)
        + (f", on the first {priced.recompute_layers} layers{each}" if priced.recompute_layers else ""),
        "kept": f"the last {counted(kept, 'layer')}" if kept > 1 else "the last layer" if kept else "",
        "tokens": f"{priced.tokens_per_s:,.0f}",
        "own_tokens": f"{priced.tokens_per_s / grid.world:,.0f}",
        "pads": pads_words(priced),
        "mfu": f"{priced.mfu:.1%}",
        "hfu": f"{priced.hfu:.1%}",
        "peak": f"{accelerator.peak_tflops[job.gemm_format]:g}",
        "in_tf32": " in TF32, to which linear layers round FP32" if job.gemm_format == "tf32" else "",
        "format": format_words(priced),
        "merged": expert_overlap_words(priced),
        "offload": offload_words(priced),
        "log": logged_words(priced).partition(": ")[0],
        "counts": _counted_words(priced),
        "training": training_words(job, entry_fields(priced)) if job.tokens_total else "",
        "memory": show_bytes(priced.memory_bytes),
        "limit": show_bytes(priced.memory_limit_bytes),
    }
    told = [(name, said.format(**fields)) for name, needed, said in _FACTS if fields[needed]]
    first = (*_SHORT, *(["batch"] if workload.lengths is not None else []))
    return [(name, said) for name, said in told if not short or name in first]


def pads_words(priced: PricedLayout) -> str:
    """Share of the tokens that are pads, and the throughput that counts them; "" where there are none."""
    if priced.job.workload.lengths is None:
        return ""
    batched, gpus = priced.batched_tokens_per_s, priced.grid.world
    share = max(0.0, 1.0 - priced.tokens_per_s / batched)
    return f"{share:.1%} of tokens, which throughput and MFU leave out: {batched / gpus:,.0f} tokens/s per GPU with it"


def tuning_words(job: Job) -> str:
    """How much of a model trains, where that is not all, by the names of the framework's tool."""
    model = job.model
    if (tuning := model.tuning) is None:
        return ""
    trained = adapter_parameters(model) if tuning.adapts else model.vocab * model.hidden
    base = "" if tuning.base == "bf16" else f", base in {tuning.base}"
    left = parameters(model.tuned(None)) - (0 if tuning.adapts else trained)
    what = "the LM head"
    if tuning.adapts:
        tool = tools()[job.framework.tuner]
        named = ("all linear layers" if REST in tool.names[name] else name for name in tool.named(tuning))
        what = f"adapters of {', '.join(named)}"
    return f"{trained / 1e6:,.1f} M parameters beside {left / 1e9:,.1f} B that do not{base}: {what}"


def _counted_words(priced: Detail) -> str:
    """What the framework's log counts."""
    job = priced.job
    if (count := job.logged) is None or not priced.logged_tflops_per_gpu:
        return ""
    as_whole = job.workload.tuning is not None and not count.frozen
    whole = ", and all weights as if they trained, without adapters" if as_whole else ""
    return f"{count.counts}{whole}"


AXIS_COLUMNS = (
    words("axis", "axis", "From the innermost of the rank order.", 12),
    Column("size", "size", "GPUs of a group.", decimals=0),
    words("ranks", "ranks of a group", "Of the group of rank 0.", 16),
    words("network", "network", "The outermost network level that a group crosses.", 12),
    words("splits", "splits", "What is split over it.", 60),
)
_SPLITS: tuple[tuple[str, Callable[[Detail], object], str], ...] = (
    ("x", lambda one: one.grid.y > 1, "weight matrices, with {y}: GEMMs' partial results are summed over one of both"),
    (
        "x",
        lambda one: one.job.framework.step.sequence_parallel,
        "weights; inputs all-gathered, outputs reduce-scattered",
    ),
    ("x", bool, "weight matrices; outputs are summed"),
    ("y", bool, "weight matrices, with {x}"),
    ("z", bool, "the batch and the storage of weights: all-gathered before use"),
    (
        "context",
        lambda one: one.job.framework.step.context_shards,
        "each sequence, and the storage of weights with {z}",
    ),
    ("context", bool, "each sequence"),
    ("pipeline", lambda one: one.chunks > 1, "layers, in {chunks} interleaved chunks a stage"),
    ("pipeline", bool, "layers"),
    (
        "data",
        lambda one: one.job.framework.step.reduce_each_micro_batch,
        "the batch; gradients averaged each micro-batch",
    ),
    ("data", bool, "the batch; gradients averaged once per step"),
    ("expert", bool, "experts of a layer, over the same ranks: tokens are dispatched to them by {dispatcher}"),
    ("expert_tensor", bool, "each expert's weight matrices"),
    ("expert_z", bool, "the storage of experts' weights: all-gathered before use"),
    ("expert_data", bool, "copies of experts; their gradients are averaged once per step"),
)
"""What an axis splits: the first of its rows whose condition holds."""


def axis_rows(priced: Detail) -> list[Json]:
    """Axes above 1, in the rank order, those of experts after them, and what they split."""
    grid, framework, tiers = priced.grid, priced.job.framework, priced.job.machine.placing(priced.grid.world).tiers
    named = {axis: framework.called(axis) for axis in grid.order} | {"chunks": f"{priced.chunks}"}
    named["dispatcher"] = priced.job.dispatcher_on(grid)
    folded = any(grid.axis_size(axis) > 1 for axis in EXPERT_AXES)
    rows = []
    for axis in (*grid.order, *((*EXPERT_AXES, "expert_data") if folded else ())):
        shape = grid.group_shape(axis, framework.step.folding)
        if shape.size == 1:
            continue
        places = (range(0, size * stride, stride) for size, stride in shape.levels)
        group = sorted(map(sum, product(*places)))
        splits = next((said for one, holds, said in _SPLITS if one == axis and holds(priced)), "")
        network = tiers[route(shape, tiers, grid.world).outermost].name
        row = {"axis": framework.called(axis), "size": len(group), "ranks": listed(group), "network": network}
        rows.append({**row, "splits": splits.format(**named)})
    return rows


def listed(ranks: Sequence[int]) -> str:
    """`0–7` for neighbours, else the first three and the last."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]:,}–{ranks[-1]:,}"
    shown = [f"{rank:,}" for rank in ranks]
    return ", ".join(shown if len(ranks) < 5 else [*shown[:3], "…", shown[-1]])


def node_words(priced: Detail) -> str:
    """What the GPUs of a node have in common: the part of each axis that is within it."""
    grid, node = priced.grid, priced.job.machine.launcher.ranks_per_node
    if grid.world == 1:
        return "One GPU, no communication."
    places = [grid.coordinates(rank) for rank in range(min(node, grid.world))]
    within = [(axis, len({place[axis] for place in places})) for axis in grid.order]
    held = " × ".join(f"{priced.job.framework.called(axis)} {count}" for axis, count in within if count > 1)
    return f"Node 0, ranks 0–{len(places) - 1}: {held}." if held else ""


def busiest(priced: Detail) -> str:
    """The stage whose computation a pipeline's parts are of."""
    return f"stage {priced.busiest}, which computes longest"
