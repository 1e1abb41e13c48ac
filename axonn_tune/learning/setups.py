"""Alternatives to a stated configuration: one change, or the best layout of a search."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import permutations
from typing import Any

from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework, registry
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.grid import AXES, RANK_AXES, Grid, distinct_orders
from axonn_tune.job import Layout
from axonn_tune.learning.evidence import Setup
from axonn_tune.learning.run import CommandRun
from axonn_tune.program.feasibility import broken_constraints
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.inputs import compares_expert_overlap
from axonn_tune.ranking.nearest import Saving, offloads, require_any, savings
from axonn_tune.ranking.priced import Priced
from axonn_tune.ranking.smallest import Size, Taken
from axonn_tune.ranking.space import Problem
from axonn_tune.recompute import RECOMPUTES, lacked_by
from axonn_tune.specs.machine import Machine
from axonn_tune.validation.published.cases import Case
from axonn_tune.vocabulary import OVERLAPS

WORTH, CHANGES = 0.01, 5
"""Least saving of a listed change, as a share of the step; largest number of listed changes."""


@dataclass(frozen=True)
class Change:
    """A change of the run: the new configuration, its step by the profile, s, and memory of a GPU.

    words: arguments of the framework, where few of them make the change. whole: another layout as a whole.
    """

    words: str
    setup: Setup
    step_s: float
    gain: float
    memory_bytes: float
    whole: bool = False


_Alternatives = Mapping[tuple[str, str], list[tuple[str, Setup]]]


def alternatives(setup: Setup) -> _Alternatives:
    """Configurations with one change from the stated one, by kind and title of the hypothesis."""
    one, framework = setup.layout, setup.framework
    needless = () if setup.workload.split_micro_batch else ("output",)
    used = tuple(name for name in setup.workload.overlaps if name in framework.step.overlaps and name not in needless)
    found: _Alternatives = {
        ("recompute", "recompute other than stated"): [
            (f"recompute {other}, not {one.recomputed}", _run_as(setup, recompute=other, recompute_layers=None))
            for other in RECOMPUTES
            if other != one.recomputed
        ],
        ("micro_batch", "micro-batch other than stated"): [
            (
                f"micro-batch {size}, not {one.micro_batch}" + (f", recompute {kind}" if kind != one.recompute else ""),
                _run_as(setup, micro_batch=size, recompute=kind),
            )
            for size in sorted({1, one.micro_batch // 2, one.micro_batch * 2} - {0, one.micro_batch})
            for kind in setup.recomputes or (one.recompute,)
        ],
        ("overlaps", "nothing is overlapped"): [("all overlaps off", _with_overlaps(setup, ()))] if used else [],
        ("overlap", "an overlap is off"): [
            (f"{name} off", _with_overlaps(setup, tuple(kept for kept in used if kept != name))) for name in used
        ],
        ("interleaving", "interleaving other than stated"): [
            (f"{framework.called('chunks')} {chunks}, not {one.chunks}", _run_as(setup, chunks=chunks, parts=None))
            for chunks in sorted({1, 2, one.chunks * 2} - {one.chunks})
            if one.grid.pipeline > 1 and framework.schedule.interleaved
        ],
        ("rank_order", "another rank order"): [
            (
                f"rank order {','.join(framework.called(axis) for axis in order if axis in framework.axes)}",
                _run_as(setup, grid=Grid(**one.grid.by_axis, order=order)),
            )
            for order in _orders(one.grid)
        ],
        ("precision", "the number format is not in effect"): [
            (f"this looks like BF16: the recipe {setup.workload.precision} is not active", _in_bf16(setup))
            for _ in ([setup.workload.format] if setup.workload.format else [])
        ],
        **_other_steps(setup),
    }
    return {kind: [one for one in several if _has_schedule(one[1])] for kind, several in found.items()}


def _has_schedule(setup: Setup) -> bool:
    """Whether its order of passes has so many chunks and micro-batches."""
    one, order = setup.layout, setup.framework.step.pipeline_order
    if order == "1f1b" or one.pipeline == 1:
        return True
    # Imported here: few runs split the backward pass, and start-up time is that of others.
    from axonn_tune.program.schedules import check_schedule

    batches = setup.workload.global_batch // (one.grid.batch_shares * one.micro_batch)
    try:
        check_schedule(order, stages=one.pipeline, chunks=one.chunks, micro_batches=batches)
    except ValueError:
        return False
    return True


def _in_bf16(setup: Setup) -> Setup:
    return replace(setup, workload=setup.workload.model_copy(update={"precision": "bf16"}))


def _other_steps(setup: Setup) -> _Alternatives:
    """Other options of the framework's step, and other kernels."""
    step, grid = setup.framework.step, setup.layout.grid
    own = setup.framework.name == AXONN_TUNE.name
    sharded = not setup.workload.shard_optimizer_over_data
    workload = setup.workload.model_copy(update={"shard_optimizer_over_data": sharded})
    # FSDP shards all or nothing.
    shards = own or any("distributed_optimizer" in str(one.value) for one in setup.framework.savers)
    counterpart = setup.framework.name.removesuffix("-eager") if setup.framework.name.endswith("-eager") else ""
    other = registry().get(counterpart or f"{setup.framework.name}-eager")
    kernels = (
        [] if other is None else [(f"{other.title}, not {setup.framework.title}", replace(setup, framework=other))]
    )
    return {
        ("kernels", "kernels compiled or not, other than stated"): kernels,
        ("attention", "fused attention on or off, other than stated"): []
        if own or setup.framework.writes_scores(setup.machine.accelerator, setup.workload.precision)
        else [_flipped(setup, "fused_attention")],
        ("sequence_parallel", "sequence parallelism other than stated"): [_flipped(setup, "sequence_parallel")]
        if grid.x > 1 and not own and not setup.model.has_experts
        else [],
        ("distributed_optimizer", "distributed optimizer other than stated"): [
            (f"shard_optimizer {'on' if sharded else 'off'}", replace(setup, workload=workload))
            if own
            else _flipped(setup, "distributed_optimizer")
        ]
        if grid.data > 1 and shards and not (step.shard_gradients and step.distributed_optimizer)
        else [],
        **(_of_experts(setup) if grid.expert > 1 else {}),
    }


def _of_experts(setup: Setup) -> _Alternatives:
    """Another dispatcher, routing as it is without or with forced load balancing, and CUDA graphs or none."""
    framework, step = setup.framework, setup.framework.step
    now = setup.dispatcher_on(setup.layout.grid)
    # Ports of a dispatcher are other software, not a flag.
    others = [name for name in find_framework(framework.name).dispatchers if name != now and "-" not in name]
    routings = {"natural": None, "forced load balancing": 1.0}
    return {
        ("dispatcher", "dispatcher other than stated"): [
            (f"dispatcher {name}, not {now}", with_step(setup, dispatcher=name)) for name in others
        ],
        ("routing", "routing other than stated"): [
            (f"routing: {name}", with_step(setup, imbalance=imbalance))
            for name, imbalance in routings.items()
            if imbalance != step.imbalance
        ],
        ("cuda_graphs", "CUDA graphs other than stated"): [
            (f"CUDA graphs: {scope or 'none'}", changed) for scope, changed in captures(setup).items()
        ],
    }


def captures(setup: Setup) -> dict[str, Setup]:
    """The run with CUDA graphs of another scope, "" for none: of experts without capacity those of attention alone,
    since shapes change from step to step (NVIDIA/Megatron-LM@d98e8a64, core/transformer/transformer_config.py)."""
    step, scopes = setup.framework.step, find_framework(setup.framework.name).cuda_graphs
    fixed = step.capacity_factor is not None
    found = [(one,) for one in scopes if (fixed or one == "attn") and one not in step.cuda_graphs]
    several = [*found, *([()] if step.cuda_graphs else [])]
    return {" ".join(one): replace(setup, framework=setup.framework.capturing(one)) for one in several}


def with_step(setup: Setup, **changes: object) -> Setup:
    """The run with other options of its framework's step."""
    return replace(setup, framework=setup.framework.with_step(**changes))


def _flipped(setup: Setup, option: str) -> tuple[str, Setup]:
    """The step with another value of a framework option."""
    value = not getattr(setup.framework.step, option)
    return f"{option} {'on' if value else 'off'}", with_step(setup, **{option: value})


def _run_as(setup: Setup, **changes: object) -> Setup:
    """The step with another configuration."""
    return replace(setup, layout=replace(setup.layout, **changes))  # type: ignore[arg-type]


def _with_overlaps(setup: Setup, names: Sequence[str]) -> Setup:
    workload = setup.workload.model_copy(update={"overlaps": tuple(one for one in OVERLAPS if one in names)})
    return replace(setup, workload=workload)


def _orders(grid: Grid) -> list[tuple[str, ...]]:
    """Other rank orders that place the ranks differently."""
    inner = [axis for axis in grid.order if axis in AXES]
    if any(grid.axis_size(axis) > 1 for axis in grid.order if axis not in (*AXES, "pipeline")):
        # For more axes there are too many orders: only the reverse is tried.
        wide = [axis for axis in grid.order if axis != "pipeline"]
        return [(*reversed(wide), *(axis for axis in grid.order if axis == "pipeline"))]
    sizes = [grid.axis_size(axis) for axis in AXES]
    outer = tuple(axis for axis in grid.order if axis not in AXES)
    now = [axis for axis in inner if grid.axis_size(axis) > 1]
    others = (order for order in distinct_orders(sizes) if [axis for axis in order if grid.axis_size(axis) > 1] != now)
    return [(*order, *outer) for order in others]


def most_bytes(stated: Setup) -> float:
    """Memory limit of alternatives, bytes: the limit, or the stated layout's memory if larger."""
    before = stated.priced
    return max(before.memory_limit_bytes, before.memory_bytes)


def possible(changed: Setup, *, within_bytes: float) -> bool:
    """Whether the framework can run this in so much memory."""
    one = changed.layout
    if broken_constraints(
        *(one.grid, changed.model, changed.workload, changed.framework),
        micro_batch=one.micro_batch,
        chunks=one.chunks,
        parts=one.parts,
    ):
        return False
    return changed.priced.memory_bytes <= within_bytes


def searched(setup: Setup, *, top: int = 1) -> Priced:
    """The search for better layouts, of which the first `top` are ranked."""
    return search(problem_of(setup), top=top)


def changes_of(setup: Setup, price: Callable[[Setup], float], *, ranking: Priced | None) -> tuple[Change, ...]:
    """Single changes of a layout, and the best layout of a search, by the steps of `price`, largest gain first: those
    that gain, or all that fit where the run does not."""
    stated_s, found, now = price(setup), [], setup.priced
    limit, fits = now.memory_limit_bytes, now.memory_bytes <= now.memory_limit_bytes
    # What a router or a recipe does is no choice of a layout.
    others = (several for (kind, _), several in alternatives(setup).items() if kind not in ("routing", "precision"))
    tried = [(words, changed) for several in others for words, changed in several]
    tried += [] if fits else _savers(setup, within_bytes=limit)
    if not (fits or any(possible(changed, within_bytes=limit) for _, changed in tried)):
        beside = _beside_savers(setup, within_bytes=limit)
        tried += beside or _on_host(setup, within_bytes=limit)
    wide = setup.workload.precision == "fp32" and "bf16" in setup.machine.accelerator.peak_tflops
    halved = _in_bf16(setup) if wide else None
    if halved:
        tried.append(("bf16, not fp32", halved))
        tried += [] if fits else [(f"bf16, {words}", changed) for words, changed in _savers(halved, within_bytes=limit)]
    if (flagged := with_own_flags(setup)) != setup:
        tried.append((_flags_changed(setup, flagged), flagged))
    best = []
    if ranking:
        fastest = ranking[0].layout
        words = f"the best layout of a search: {layout_words(fastest, flagged.framework)}"
        best.append((words, replace(flagged, framework=ranking[0].job.framework, layout=fastest)))
    stated = _arguments(setup)
    for words, changed in (*tried, *best):
        # FP32 by accident is what to change first, even where memory takes another change beside it.
        within = max(limit, now.memory_bytes) if changed is halved else limit
        if changed.framework.name == setup.framework.name and possible(changed, within_bytes=within):
            step_s, whole = price(changed), bool(best) and changed is best[0][1]
            named = words if whole else _flags(stated, _arguments(changed)) or words
            needed = changed.priced.memory_bytes
            named += "; too much memory by itself" if needed > limit else ""
            found.append(Change(named, changed, step_s, 1.0 - step_s / stated_s, needed, whole))
    # Of changes with the same arguments the first counts.
    worth = {one.words: one for one in reversed(found) if not fits or one.gain >= WORTH}
    return tuple(sorted(worth.values(), key=lambda change: -change.gain)[:CHANGES])


def _savers(setup: Setup, *, within_bytes: float) -> list[tuple[str, Setup]]:
    """What else takes less memory: recompute sets, an axis twice as long for one half as long, all replicas as shards
    where blocks are gathered, and as few of the framework's savers as do."""
    framework, one, has = setup.framework, setup.layout, {*setup.model.parts}
    others = (other for other in framework.recompute_sets if other not in (*RECOMPUTES, one.recompute))
    sets = (other for other in others if not lacked_by(other, has) and not framework.cannot_recompute(other))
    found = [(f"recompute {other}", _run_as(setup, recompute=other, recompute_layers=None)) for other in sets]
    for longer, shorter in permutations([axis for axis in framework.axes if axis in RANK_AXES], 2):
        whole = dict(one.grid.by_axis)
        most = whole[shorter] if (longer, shorter, framework.step.gather_unit) == ("z", "data", "block") else 1
        for factor in sorted(factor for factor in {2, most} if factor > 1 and whole[shorter] % factor == 0):
            sizes = whole | {longer: factor * whole[longer], shorter: whole[shorter] // factor}
            words = ", ".join(f"{framework.called(axis)} {sizes[axis]}" for axis in (longer, shorter))
            found.append((words, _run_as(setup, grid=Grid(**sizes, order=one.grid.order), parts=None)))
    several = [(len(taken.savers), taken.words, changed) for taken, changed in _saved(setup)]
    fewest = next((count for count, _, changed in several if possible(changed, within_bytes=within_bytes)), 0)
    return [*found, *((words, changed) for count, words, changed in several if count == fewest)]


def _beside_savers(setup: Setup, *, within_bytes: float) -> list[tuple[str, Setup]]:
    """Other changes beside as few of the framework's savers as do with them, where none does alone."""
    found = list[tuple[str, Setup]]()
    fewest = 0
    for taken, saved in _saved(setup):
        if found and len(taken.savers) > fewest:
            break
        fewest, others = len(taken.savers), alternatives(saved)
        sizes = (
            one for (kind, _), several in others.items() if kind in ("recompute", "micro_batch") for one in several
        )
        several = [(f"{taken.words}, {words}", one) for words, one in (*sizes, *_savers(saved, within_bytes=0.0))]
        found += [one for one in several if possible(one[1], within_bytes=within_bytes)]
    return found


def _on_host(setup: Setup, *, within_bytes: float) -> Iterator[tuple[str, Setup]]:
    """The optimizer in host memory, with as few savers as do."""
    for taken in offloads(setup.framework, setup.workload):
        changed = replace(setup, framework=taken.framework, workload=taken.workload)
        if possible(changed, within_bytes=within_bytes):
            yield taken.words, changed
            return


def _saved(setup: Setup) -> Iterator[tuple[Saving, Setup]]:
    """The run with each combination of its framework's savers, fewer first."""
    for taken in savings(setup.framework, setup.workload):
        yield taken, replace(setup, framework=taken.framework, workload=taken.workload)


_MOST_FLAGS = 8
"""Arguments that differ, up to which a change is named by them."""


def _arguments(setup: Setup, *, files: bool = False) -> dict[str, str]:
    """The framework's arguments of a run, each with its words; none where it has no command. files: and the lines of a
    YAML file that it reads."""
    # Imported here: learning from logs needs no commands.
    from axonn_tune.launch.commands import command_of

    try:
        command = command_of(setup.priced)
    except UsageError:
        return {}
    found = {one.name: " ".join(one.words) for section in command.sections for one in section.arguments}
    lines = command.files.get(".yaml", "").splitlines() if files else ()
    return found | {line.partition(":")[0]: line.partition("#")[0].strip() for line in lines}


def _flags(stated: Mapping[str, str], changed: Mapping[str, str]) -> str:
    """The arguments that make one of the other; "" for none, and for many."""
    added = [words for name, words in changed.items() if stated.get(name) != words]
    # One subcommand stands in place of another: activation-checkpoint:full of activation-checkpoint:none. So does one
    # value of a key of Megatron-Bridge: model.recompute_granularity=full of …=null.
    groups = {re.split("[:=]", name)[0] for name in changed if re.search("[:=]", name)}
    gone = [name for name in stated if name not in changed and re.split("[:=]", name)[0] not in groups]
    if not (stated and changed) or len(added) + len(gone) > _MOST_FLAGS:
        return ""
    return ", ".join(filter(None, (" ".join(added), f"without {' '.join(gone)}" if gone else "")))


_OWN_FLAGS = ("sequence_parallel", "distributed_optimizer", "shard_gradients", "parameter_overlap")
"""Options of the step that a search has as its framework's recipes do."""


def with_own_flags(setup: Setup) -> Setup:
    """The run with all overlaps, and sharded as its framework's recipes have it."""
    plain = find_framework(setup.framework.name).step
    framework = setup.framework.with_step(**{name: getattr(plain, name) for name in _OWN_FLAGS})
    return _with_overlaps(replace(setup, framework=framework), OVERLAPS)


def _flags_changed(setup: Setup, flagged: Setup) -> str:
    """What differs between a run and the same with its framework's own flags, by our names of it."""
    before, now = setup.framework.step, flagged.framework.step
    added = [name for name in now.overlaps if name in {*flagged.workload.overlaps} - {*setup.workload.overlaps}]
    changed = {name: getattr(now, name) for name in _OWN_FLAGS if getattr(now, name) != getattr(before, name)}
    words = [f"overlap {name} on" for name in added]
    words += [f"{name} {'on' if on else 'off'}" for name, on in changed.items()]
    return f"the framework's defaults: {', '.join(words)}"


def problem_of(stated: Setup) -> Problem:
    """The search for layouts of the same model, batch, framework and number of GPUs."""
    setup = with_own_flags(stated)
    if setup.framework.step.splits_backward:
        # Compared with the others that the framework has.
        setup = replace(setup, framework=setup.framework.with_step(pipeline_order="1f1b"))
    stages = setup.framework.name != AXONN_TUNE.name or setup.layout.pipeline > 1
    found = Problem(
        *(setup.model, setup.machine, setup.workload, setup.framework),
        gpus=setup.layout.grid.world,
        rank_by="iteration",
        pipeline="pipeline" in setup.framework.axes and stages,
    )
    if len(found.framework.schedule.orders) > 1:
        # Imported here: most frameworks have one order of passes, and start-up time is theirs.
        from axonn_tune.ranking.orders import compared_orders

        found = replace(found, compared_orders=compared_orders(found))
    # A run with expert overlap is compared with what goes without it, too.
    plain = replace(found, framework=found.framework.with_step(expert_overlap=False))
    return replace(plain, compares_expert_overlap=True) if compares_expert_overlap(plain) else found


def with_best_layout(run: CommandRun, machine: Machine) -> Case:
    """A run that states no layout, in the best one of a search; NothingFeasibleError where none fits."""
    gpus = run.columns["n_gpus"].value
    # Of one GPU, any batch can be split.
    case = run.with_size({"n_gpus": 1}).case(machine)
    plain = find_framework(case.framework.name)
    open_ = () if "dispatcher" in run.columns else plain.dispatchers
    framework = replace(case.framework, exchanges=plain.exchanges, dispatchers=open_)
    job = (case.model, case.machine, case.workload, framework)
    ranking = search(replace(problem_of(Setup(*job, layout=case.configurations[0])), gpus=gpus), top=1)
    require_any(ranking)
    found = ranking.detail(0)
    row = replace(case.row, gpus=gpus, interleave_known=True, unstated=())
    return replace(case, framework=found.job.framework, row=row, configurations=(found.layout,))


def layout_words(one: Layout, framework: Framework) -> str:
    """Such as `TP=2 DP=8, micro-batch 4, recompute full`, by the framework's names."""
    layout = framework.layout({**one.grid.by_axis, "chunks": one.chunks})
    words = [" ".join(f"{name}={size}" for name, size in layout.items() if size > 1) or "one GPU"]
    words += [f"micro-batch {one.micro_batch}", f"recompute {one.recomputed}"]
    split = framework.step.splits_backward and one.pipeline > 1
    words += [f"schedule {framework.step.pipeline_order}"] if split else []
    return ", ".join([*words, *([f"{one.kept_layers} layers kept gathered"] if one.kept_layers else [])])


def taken_of(size: Size, plain: Problem) -> tuple[Taken, ...]:
    """Recompute and savers of the first layout of a ranking; plain: the problem without savers."""
    found, saving, own = size.ranked.detail(0), size.taken, plain.framework.step
    framework, layout = found.job.framework, found.layout
    if saving is not None:
        framework = framework.with_step(**_changed(saving.framework.step, own))
    whole = Setup(plain.model, plain.machine, plain.workload, framework, layout=layout)
    some = "" if layout.recompute_layers is None else f" --recompute-layers {layout.recompute_layers}"
    tried = [(f"recompute {layout.recomputed}", f"--recompute {layout.recompute}{some}", whole)]
    before = [_run_as(whole, recompute="none", recompute_layers=None)] if layout.recompute != "none" else []
    for single in savings(plain.framework, plain.workload, plain.request):
        if saving is not None and len(single.savers) == 1 and single.savers[0] in saving.savers:
            changed = with_step(replace(whole, workload=single.workload), **_changed(own, single.framework.step))
            tried.append((single.savers[0].title, single.words, changed))
            before.append(whole)
    tried = tried if layout.recompute != "none" else tried[1:]
    return tuple(
        Taken(title, _flags(_arguments(bare, files=True), _arguments(changed, files=True)) or words)
        for (title, words, changed), bare in zip(tried, before, strict=True)
    )


def _changed(before: StepOptions, after: StepOptions) -> dict[str, Any]:
    """Options of a step that another one has otherwise."""
    every = ((one.name, getattr(after, one.name)) for one in fields(after))
    return {name: value for name, value in every if value != getattr(before, name)}
