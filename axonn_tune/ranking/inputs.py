"""From a request to the `Problem` of a search, with the origin of its documents."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from axonn_tune.errors import AxonnTuneError, NothingFeasibleError, UnknownNameError, UsageError, suggest
from axonn_tune.frameworks import find_framework, registry, step_changes
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.dispatchers import find_dispatcher
from axonn_tune.frameworks.optimizers import ADAMW, optimizers
from axonn_tune.frameworks.step import FORMAT_OPTIONS, HOST_BYTES, StepOptions
from axonn_tune.grid import EXPERT_AXES, RANK_AXES, nearest_sizes
from axonn_tune.job import framework_of
from axonn_tune.program.count import adapted, adapter_parameters, parameters
from axonn_tune.program.feasibility import shared_start
from axonn_tune.ranking.space import Problem
from axonn_tune.recompute import lacked_by, modules_of
from axonn_tune.request import MIN, Request, flag
from axonn_tune.specs.catalog import Loaded, MachineLike, load_machine, load_model, route_overrides
from axonn_tune.specs.document import known_keys
from axonn_tune.specs.loading import DOCUMENT_BYTES, read_text
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model, unrun
from axonn_tune.specs.tuning import Tuning, tools, tuning
from axonn_tune.specs.workload import Workload
from axonn_tune.units import GIB, counted
from axonn_tune.vocabulary import AUTO, DEFAULT_MACHINE, MOMENT_BYTES, OVERLAPS, CudaGraphs, Precision

if TYPE_CHECKING:
    # Imported here: a search reads no launch config, and start-up time is its.
    from axonn_tune.specs.launch import Launch
    from axonn_tune.specs.lengths import Lengths


@dataclass(frozen=True)
class Inputs:
    """A problem and its documents, with path and hash."""

    problem: Problem
    model: Loaded[Model] = field(repr=False)
    machine: Loaded[Machine] = field(repr=False)


def load_inputs(request: Request) -> Inputs:
    """Load the documents and build the problem; errors as `load_model`, UsageError for what does not go together."""
    gpus = request.gpus
    if request.model is None or gpus is None:
        raise UsageError("a search needs a model and a number of GPUs")
    if gpus == MIN:
        raise UsageError("--gpus min: search, explain and sweep find the smallest number; give this a number of GPUs")
    settings = _by_subject(tuple(request.set))
    for_model, for_machine = route_overrides(settings[""])
    model = load_model(request.model, overrides=for_model)
    priced = [] if request.price is None else [f"operation.price_per_gpu_hour={request.price}"]
    where = DEFAULT_MACHINE if request.machine is None else request.machine
    machine = load_machine(where, overrides=[*for_machine, *priced])
    for one in machine.document.dispatchers:
        find_dispatcher(one)  # refuses an unknown name
    named = AXONN_TUNE if request.framework is None else request.framework
    framework = find_framework(named) if isinstance(named, str) else named
    trains = _tuning(framework, request)
    workload = make_workload(model.document, request, tuning=trains, settings=settings["workload"])
    framework = _with_settings(framework, settings["step"], model.document, machine.document, workload.precision)
    framework = _optimizing(framework, request.optimizer or framework.step.optimizer)
    if request.shard_optimizer is False and framework.step.distributed_optimizer:
        framework = _without_sharded_optimizer(framework)
    if request.grad_reduce_in_bf16 or request.use_precision_aware_optimizer:
        framework = with_types(framework, request, workload)
    if request.cuda_graphs:
        scopes = _captured(framework, request)
        request, framework = replace(request, cuda_graphs=scopes), framework.capturing(scopes)
    framework = _with_experts(framework, request, model.document)
    if request.context is not None and request.context > 1:
        framework = framework.having("context")
        if framework.name == AXONN_TUNE.name and (why := unrun(model.document)):
            raise UsageError(why)
    if request.order is not None:
        request = replace(request, order=parse_order(request.order, framework))
    assert not isinstance(request.tokens_total, str), "a request reads it"
    staged = bool(request.pipeline) or request.pipeline_layout is not None
    pipeline = staged or framework.searches_stages
    rank_by = "iteration" if request.rank_by == "step" else request.rank_by
    problem = _in_order(
        Problem(
            model=model.document,
            machine=machine.document,
            workload=workload,
            gpus=gpus,
            framework=framework,
            request=request,
            rank_by=rank_by or ("iteration" if pipeline else framework.ranked_by),
            pipeline=pipeline,
            tokens_total=request.tokens_total,
            machine_assumed=request.machine is None,
        )
    )
    check(problem)
    return Inputs(compared(problem), model, machine)


def compared(problem: Problem) -> Problem:
    """A problem with what its search compares where nobody says which."""
    problem = replace(problem, compares_expert_overlap=compares_expert_overlap(problem), compared_orders=())
    if len(problem.framework.schedule.orders) == 1 or not problem.pipeline:
        return problem
    # Imported here: most searches have no pipeline stages or one order of passes, and start-up time is theirs.
    from axonn_tune.ranking.orders import compared_orders

    return replace(problem, compared_orders=compared_orders(problem))


def _in_order(problem: Problem) -> Problem:
    """The problem with the order of passes of stages that its request or its step names; UsageError without it."""
    asked = problem.request.pipeline_schedule or problem.framework.step.pipeline_order
    if asked == "1f1b":
        return problem
    # Imported here: most searches name no order of passes, and start-up time is theirs.
    from axonn_tune.ranking.orders import check_order, in_order

    found = in_order(problem, asked)
    check_order(found)
    return found


def parse_order(order: str | Sequence[str], framework: Framework = AXONN_TUNE) -> tuple[str, ...]:
    """A rank order by our names or the framework's, `y,x,z,data`, `TP,CP,DP` or a sequence; axes left out come last.

    Tables omit axes of size 1, so a printed order gives the same grid again. Pipeline stages and context get their
    place where they are searched. UsageError if it is none.
    """
    names = [name.strip() for name in (order.split(",") if isinstance(order, str) else order)]
    axes = [name if name in RANK_AXES else framework.axis(name) or "" for name in names]
    if len(set(axes)) != len(axes) or not set(axes) <= set(framework.axes) or not axes:
        given, known = ",".join(names), list(map(framework.called, framework.axes))
        example, there = ",".join(known) if framework.names else "x,y,z,data", ", ".join(known)
        raise UsageError(f"rank order {given!r} must name axes once each, as in {example}: there are {there}")
    return (*axes, *(axis for axis in framework.axes if axis not in (*axes, "pipeline", "context")))


def check(problem: Problem) -> None:
    """UsageError for what the framework does not have, and for pins that do not divide the GPUs."""
    framework, request = problem.framework, problem.request
    numbered = {axis: size for axis, size in request.axes.items() if axis in RANK_AXES}
    if problem.gpus % (product := prod(numbered.values())):
        shown = ", ".join(f"{framework.called(axis)} = {size}" for axis, size in numbered.items())
        near = (
            f"; nearest that does: {framework.option(axis)} {other}"
            for axis, size in numbered.items()
            for other in nearest_sizes(problem.gpus, size)
            if problem.gpus % (product // size * other) == 0
        )
        words = f"{problem.gpus} GPUs cannot be arranged with {shown}: {product} does not divide them"
        raise UsageError(words + next(near, ""))
    _check_price(request)
    _check_layout(problem)
    _check_formats(problem)
    _check_optimizer(problem)
    _check_host(problem)
    _check_tuning(problem)
    check_lengths(problem)
    check_expert_overlap(problem)
    pins = {**request.axes, "chunks": request.chunks or 1}
    _check_axes(problem, pins)
    if pins["chunks"] > 1 and (pins.get("pipeline") == 1 or "pipeline" not in problem.axes):
        stages = f"but {framework.option('pipeline')} is 1" if problem.pipeline else "which --pipeline searches"
        raise UsageError(f"{framework.option('chunks')} {request.chunks} is for several pipeline stages, {stages}")
    _check_kept(problem)
    chunks = 1 if problem.parts is not None else request.axes.get("pipeline", 1) * (request.chunks or 1)
    if request.recompute_layers and request.recompute_layers > (most := -(-problem.model.layers // chunks)):
        has = f"{problem.model.name} has {problem.model.layers} layers" + (f" in {chunks} chunks" * (chunks > 1))
        raise UsageError(f"--recompute-layers {request.recompute_layers}: {has}; nearest valid: {most}")
    if request.recompute_layers and request.recompute == "none":
        raise UsageError(f"--recompute-layers {request.recompute_layers}: --recompute none recomputes nothing")
    if lacking := lacked_by(request.recompute or "none", problem.model.parts):
        raise UsageError(f"--recompute {request.recompute}: {problem.model.name} has no {min(lacking)}")
    if why := framework.cannot_recompute(request.recompute or "none"):
        raise UsageError(f"--recompute {request.recompute}: {why}")
    if request.recompute_layers and (why := framework.cannot_recompute(request.recompute or "full", 1)):
        raise UsageError(f"--recompute-layers {request.recompute_layers}: {why}")
    if problem.workload.split_micro_batch and "output" not in framework.step.overlaps:
        raise UsageError(f"--split-micro-batch: {framework.title} does not interleave half micro-batches")


def _check_price(request: Request) -> None:
    """UsageError for a price of nothing, or two."""
    if request.price is None:
        return
    if request.tokens_total is None:
        raise UsageError(f"--price {request.price:g} is for the cost of a whole training: give --tokens-total, too")
    other = next((one for one in request.set if one.startswith("machine.operation.price_per_gpu_hour=")), None)
    if other is not None:
        raise UsageError(f"--price {request.price:g} and --set {other:.80} both say a price: leave out one of them")


def _check_kept(problem: Problem) -> None:
    """Refuse layers that are not resharded where the framework reshards all, or gathers none."""
    framework, request = problem.framework, problem.request
    if request.kept_layers and not framework.keeps_layers:
        raise UsageError(f"--kept-layers {request.kept_layers}: {framework.title} reshards every layer after forward")
    # Others round master weights for each pass, be they in shards or not.
    if request.kept_layers and not framework.step.master_shards and 1 in (request.axes.get("z"), problem.gpus):
        whole = f"{framework.called('z')} 1 gathers no weights; nearest valid: --kept-layers 0"
        raise UsageError(f"--kept-layers {request.kept_layers}: {whole}")


def _check_formats(problem: Problem) -> None:
    """Refuse options of number formats that the framework has not, or that are of no use without a format."""
    framework, plain = problem.framework, StepOptions()
    for name in FORMAT_OPTIONS:
        value = getattr(framework.step, name)
        if value == getattr(plain, name):
            continue
        if name not in framework.format_options:
            others = ", ".join(one.name for one in registry().values() if name in one.format_options)
            raise UsageError(
                f"step.{name} = {value}: {framework.title} has no such option; frameworks that do: {others}"
            )
        if problem.workload.format is None and not problem.formats:
            raise UsageError(f"step.{name} = {value} needs a --precision of {', '.join(framework.formats)}")
        if problem.workload.precision in framework.step.engine_formats:
            raise UsageError(
                f"step.{name} = {value}: Transformer Engine's weights are gathered in BF16; try fp8-current"
            )
        if name.endswith("_bf16") and problem.workload.precision == "fp8-delayed":
            raise UsageError(f"step.{name} = {value}: delayed scaling has no layers in BF16; try fp8-current")


def _optimizing(framework: Framework, optimizer: str) -> Framework:
    """A framework with an optimizer; UsageError if it has no such."""
    if optimizer == AUTO:
        raise UsageError(
            f"--optimizer auto: a search compares {', '.join(framework.optimizers)}; give one of them here"
        )
    if optimizer not in framework.optimizers:
        others = ", ".join(name for name, one in registry().items() if optimizer in one.optimizers)
        raise UsageError(
            f"--optimizer {optimizer}: {framework.title} has {', '.join(framework.optimizers)}; "
            f"frameworks that do: {others}"
        )
    return framework.optimizing(optimizer)


def _check_optimizer(problem: Problem) -> None:
    """Refuse types of states and numbers that an optimizer does not go with.

    Source: NVIDIA/Megatron-LM@d98e8a64, megatron/core/optimizer/__init__.py (_get_megatron_emerging_optimizer), checks
    of optimizer_config.py.
    """
    step, asked = problem.framework.step, f"--optimizer {problem.framework.step.optimizer}"
    if step.optimizer == ADAMW:
        return
    whole = optimizers()[step.optimizer].whole is not None
    moved = {"moments", "master"} & {*step.offloaded}
    # Where torch has the weights in 16 bits, its optimizers have their states in the same.
    typed = problem.framework.precision_aware and step.precision_aware
    for refused, why in (
        (typed, "the precision-aware optimizer is AdamW's; leave out its types of states"),
        (whole and problem.workload.precision == "fp16", "needs --precision bf16: FP16 is refused"),
        (whole and bool(moved), "its states stay on the GPU; leave out step.offloaded"),
    ):
        if refused:
            raise UsageError(f"{asked}: {why}")


def _check_tuning(problem: Problem) -> None:
    """Refuse adapters of layers of which the model has none, and a mode that the framework does not have."""
    tuning, model, tuner = problem.workload.tuning, problem.model, problem.framework.tuner
    if tuning is not None and (why := untuned(problem.framework, tuning)):
        name = "base" if "base" in why else "mode"
        raise UsageError(f"workload.tuning.{name}={getattr(tuning, name)}: {problem.framework.title} {why}")
    if tuning is None or not tuning.adapts or not tuner or adapted(model):
        return
    tool = tools()[tuner]
    targets = {name: tuning.model_copy(update={"targets": layers}) for name, layers in tool.names.items()}
    having = ", ".join(name for name, one in targets.items() if adapted(model.tuned(one)))
    named, set_to = ",".join(tool.named(tuning)), ",".join(tuning.targets)
    asked = f"--lora-targets {named}" if named else f"workload.tuning.targets=[{set_to:.80}]"
    raise UsageError(f"{asked}: {model.name} has no such layer; it has {having}")


def _check_host(problem: Problem) -> None:
    """Refuse what no layout can keep on hosts that state their memory: FP32 weights, gradients and moments of Adam."""
    step, host, model = problem.framework.step, problem.machine.host, problem.model
    if "moments" not in step.offloaded or host is None or host.memory_gib is None:
        return
    nodes = -(-problem.gpus // problem.machine.launcher.ranks_per_node)
    trained = adapter_parameters(model) if model.tuning else parameters(model)
    needed_gib = HOST_BYTES * step.offloaded_states * trained / nodes / GIB
    if needed_gib > host.memory_gib:
        most = step.offloaded_states * host.memory_gib / needed_gib
        raise NothingFeasibleError(
            f"step.offloaded_states={step.offloaded_states:g}: {needed_gib:,.0f} GiB on the host of each of "
            f"{counted(nodes, 'node')}, which has {host.memory_gib:,.0f}; nearest that fits: {int(100 * most) / 100:g}"
        )


def unpriced_experts(framework: Framework, model: Model) -> str:
    """Why a framework's layouts of a model with experts are not priced, "" where they are."""
    if not model.has_experts or any(framework.step.folding):
        return ""
    having = [name for name, one in registry().items() if any(one.step.folding)]
    return f"{model.name}: experts are not priced for {framework.title}; they are for {', '.join(having)}"


def _check_axes(problem: Problem, pins: dict[str, int]) -> None:
    """Refuse axes that the framework does not have, and experts where it or the model has none."""
    framework, experts = problem.framework, problem.model.has_experts
    if why := unpriced_experts(framework, problem.model):
        raise UsageError(why)
    missing = [axis for axis, size in pins.items() if size > 1 and axis not in framework.columns]
    if not missing:
        return
    axis, known = missing[0], ", ".join(map(framework.called, framework.columns))
    if axis in EXPERT_AXES and not experts:
        raise UsageError(f"{framework.option(axis)} {pins[axis]}: {problem.model.name} has no experts")
    what = "interleaved stages" if axis == "chunks" else f"axis {axis}"
    others = [name for name, one in registry().items() if axis in one.columns and one.launch]
    advice = f"; frameworks that do: {', '.join(others)}" if others else ""
    raise UsageError(f"{framework.option(axis)} {pins[axis]}: {framework.title} has no {what}; it has {known}{advice}")


def _without_sharded_optimizer(framework: Framework) -> Framework:
    """A framework with optimizer states on every rank of data; UsageError if it has no choice."""
    if not framework.precision_aware:
        raise UsageError(f"--no-shard-optimizer: {framework.title} always shards optimizer states")
    return framework.with_step(distributed_optimizer=False, parameter_overlap=False)


def with_types(framework: Framework, request: Request, workload: Workload) -> Framework:
    """The framework with the types of gradients and optimizer states that are asked for; UsageError if it has none."""
    moments, half = request.use_precision_aware_optimizer, workload.element_sizes.compute == 2
    asked = "--use-precision-aware-optimizer" if moments else "--grad-reduce-in-bf16"
    if not framework.precision_aware:
        others = ", ".join(name for name, one in registry().items() if one.precision_aware)
        raise UsageError(f"{asked}: {framework.title} has no such option; frameworks that do: {others}")
    if not half or (moments and not framework.step.distributed_optimizer):
        raise UsageError(f"{asked} needs {'step.distributed_optimizer' if half else '--precision bf16 or fp16'}")
    if request.grad_reduce_in_bf16:
        framework = framework.with_step(gradient_bytes=2, shard_gradient_bytes=2)
    if not moments:
        return framework
    size, master = MOMENT_BYTES[moments], 2 if workload.base_precision == "bf16" else None
    return framework.with_step(master_bytes=master, exp_avg_bytes=size, exp_avg_sq_bytes=size)


def compares_expert_overlap(problem: Problem) -> bool:
    """Whether the search compares layouts with expert overlap: by steps, where they can have it and nobody says
    whether."""
    step, asked = problem.framework.step, problem.request.expert_overlap
    given = asked is not None or step.expert_overlap or step.shared_expert_overlap
    if given or problem.rank_by != "iteration":
        return False
    try:
        check_expert_overlap(problem.with_expert_overlap)
    except UsageError:
        return False
    return True


def check_expert_overlap(problem: Problem) -> None:
    """UsageError where nothing can run beside dispatch and combine as it is asked for, as Megatron-Core checks it.

    Source: NVIDIA/Megatron-LM@d98e8a64, megatron/core/transformer/transformer_config.py, 3002 to 3100; of EGTP
    docs/api-guide/core/generalized_tensor_parallel.md, sections 3.1 and 3.4.
    """
    step, request, model = problem.framework.step, problem.request, problem.model
    shared, delayed = step.shared_expert_overlap, step.delayed_weight_gradients
    if not (step.expert_overlap or shared or delayed):
        return
    alone = "--set step.shared_expert_overlap" if shared else "--set step.delayed_weight_gradients"
    asked = "--expert-overlap" if step.expert_overlap else alone
    others = ", ".join(name for name, one in registry().items() if one.overlaps_experts)
    repeats, pins = request.recompute or "none", request.axes
    stages, scopes = pins.get("pipeline", 1), {*request.cuda_graphs} & {"mlp", "full"}
    rules = (
        (not model.has_experts, f"{model.name} has no experts"),
        (not problem.framework.overlaps_experts, f"{problem.framework.title} has no such overlap; it is in {others}"),
        (delayed and not step.expert_overlap, "needs --expert-overlap"),
        (step.dispatcher == "allgather", "all-gathers cannot overlap; alltoall, deepep and hybridep can"),
        (shared and step.expert_overlap, "step.shared_expert_overlap excludes it"),
        (shared and "shared experts" not in model.parts, f"{model.name} has no shared experts"),
        (shared and "shared_experts" in modules_of(repeats), "excludes recompute of shared_experts"),
    )
    tuning = problem.workload.tuning
    merged = (
        (tuning is not None and not tuning.adapts, "needs gradients through blocks, where --tune head has none"),
        (pins.get("expert", 2) == 1, "needs EP above 1"),
        (
            max(pins.get("z", 1), pins.get("expert_z", 1)) > 1,
            "excludes GTP and EGTP above 1, whose forward and backward gathers share their buffers",
        ),
        (
            stages > 1 and (request.chunks == 1 or step.most_parts(len(model.starts)) < 2 * stages),
            "needs interleaved stages (VPP above 1) where there are several"
            + (f"; {model.name} has {model.layers} layers for {stages}" if request.chunks != 1 else ""),
        ),
        (problem.workload.element_sizes.compute > 2, "needs --precision bf16 or fp16"),
        (repeats == "full" or "moe" in modules_of(repeats), f"excludes --recompute {repeats}"),
        (model.mtp_layers > 1, f"excludes more than 1 MTP layer, of which {model.name} has {model.mtp_layers}"),
        (bool(scopes), f"excludes CUDA graphs of {', '.join(sorted(scopes))}"),
    )
    for broken, why in (*rules, *(merged if step.expert_overlap else ())):
        if broken:
            raise UsageError(f"{asked}: {why}")


def _with_experts(framework: Framework, request: Request, model: Model) -> Framework:
    """The framework with what is asked of experts; UsageError if it or the model has no such thing."""
    name, imbalance = None if request.dispatcher == "auto" else request.dispatcher, request.imbalance
    if request.expert_overlap is not None:
        framework = framework.with_step(expert_overlap=request.expert_overlap)
    if request.expert_z is not None and "expert_z" in framework.expert_axes:
        framework = framework.with_step(gathers_experts=True)
    for option, value in (("--dispatcher", name), ("--imbalance", imbalance)):
        if value is not None and not model.has_experts:
            raise UsageError(f"{option} {value}: {model.name} has no experts")
    if imbalance is not None:
        framework = framework.with_step(imbalance=imbalance)
    if name is None:
        return framework
    known = framework.dispatchers or (framework.step.dispatcher,)
    if "expert" not in framework.expert_axes:
        raise UsageError(f"--dispatcher {name}: {framework.title} has no expert parallelism")
    if name not in known:
        raise UsageError(f"--dispatcher {name}: {framework.title} has {', '.join(known)}{suggest(name, known)}")
    return framework.with_step(dispatcher=name)


def _captured(framework: Framework, request: Request) -> tuple[CudaGraphs, ...]:
    """Scopes of CUDA graphs, the framework's default for all; UsageError for one that it does not capture."""
    known = tuple(framework.cuda_graphs)
    if not known:
        raise UsageError(f"--cuda-graphs: {framework.title} has no CUDA graphs")
    if missing := [scope for scope in request.cuda_graphs if scope not in (*known, "all")]:
        raise UsageError(f"--cuda-graphs {missing[0]}: {framework.title} captures {', '.join(known)}")
    scopes = known[:1] if "all" in request.cuda_graphs else tuple(one for one in known if one in request.cuda_graphs)
    if request.recompute == "full" and replace(request, cuda_graphs=scopes).graphed_layers:
        raise UsageError(f"--recompute full: CUDA graphs of {', '.join(scopes)} exclude it; full_iteration does not")
    return scopes


def _check_layout(problem: Problem) -> None:
    """Refuse a pipeline layout that the framework or other pins rule out."""
    if (parts := problem.parts) is None:
        return
    framework, request = problem.framework, problem.request
    if "pipeline" not in framework.axes:
        raise UsageError(f"--pipeline-layout: {framework.title} has no pipeline stages")
    chunks, stages = request.chunks, request.axes.get("pipeline")
    if chunks is not None and len(parts) != chunks * (stages or len(parts) // chunks):
        pins = [f"{framework.option(name)} {size}" for name, size in (("pipeline", stages), ("chunks", chunks)) if size]
        asked = f"--pipeline-layout {request.pipeline_layout!r} has {len(parts)} parts"
        raise UsageError(f"{asked}, which {' and '.join(pins)} do not make")
    if why := shared_start(problem.model, parts):
        raise UsageError(f"--pipeline-layout {request.pipeline_layout!r}: {why}")


def _by_subject(settings: Sequence[str]) -> dict[str, list[str]]:
    """Assignments of `--set` for the framework's step, those for the workload without their prefix, and all others."""
    found: dict[str, list[str]] = {"step": [], "workload": [], "": []}
    own = {*known_keys(Workload)} - {"schema"}
    for setting in settings:
        subject, _, rest = setting.partition(".")
        if subject == "step":
            found["step"].append(setting)
        elif subject == "workload" and rest:
            found["workload"].append(rest)
        else:
            found["workload" if setting.partition("=")[0].strip() in own else ""].append(setting)
    return found


def _with_settings(
    framework: Framework, settings: Sequence[str], model: Model, machine: Machine, precision: Precision
) -> Framework:
    """The framework with options of its step; UsageError for those that the model or the machine cannot have."""
    step = dict(map(step_setting, settings))
    if idle := [name for name in step if name in _OF_EXPERTS and not model.has_experts]:
        raise UsageError(f"--set step.{idle[0]}: {model.name} has no experts")
    given = step_changes(framework).get("fused_attention")
    if (given or step.get("fused_attention")) and (why := framework.writes_scores(machine.accelerator, precision)):
        asked = "a framework with fused_attention=True" if given else "--set step.fused_attention=true"
        raise UsageError(f"{asked}: {framework.title} writes all scores {why}")
    return framework.with_step(**step) if step else framework


def step_setting(setting: str) -> tuple[str, object]:
    """An option of a step and its value, of the kind that it has: true or false, names between commas, a number or a
    word; UsageError for another."""
    name, text = (part.strip() for part in setting.removeprefix("step.").partition("=")[::2])
    kinds = get_type_hints(StepOptions)
    if name not in kinds:
        raise UsageError(
            f"--set {setting:.80}: a step has no {name!r:.40}{suggest(name, kinds)}; known: {', '.join(kinds)}"
        )
    kind, default = kinds[name], getattr(StepOptions(), name)
    if isinstance(default, tuple):
        element, words = get_args(kind)[0], [word.strip() for word in text.split(",")]
        return name, tuple(_step_value(setting, word, element) for word in words if word)
    if type(None) in get_args(kind):
        kind = get_args(kind)[0]
        if text in ("null", ""):
            return name, None
    return name, _step_value(setting, text, kind)


_OF_EXPERTS = (
    *("dispatcher", "imbalance", "capacity_factor", "balancing_loss", "gathers_experts", "expert_shards"),
    *("expert_replicas", "expert_kernels"),
)
"""Options of a step without effect where there are no experts; `check_expert_overlap` has the others."""


def _step_value(setting: str, text: str, kind: object) -> object:
    """One value of a kind: bool, str, a number, or a Literal."""
    known = ("true", "false") if kind is bool else get_args(kind)
    if known and text not in known:
        raise UsageError(f"--set {setting:.80}: expected {', '.join(known)}, got {text!r:.40}")
    if known or kind is str:
        return text == "true" if kind is bool else text
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    try:
        return float(text if text.isascii() else "")
    except ValueError:
        raise UsageError(f"--set {setting:.80}: {text!r:.40} is not a number") from None


def _tuning(framework: Framework, request: Request) -> Tuning | None:
    """What trains, if that is not all; UsageError where the framework trains models whole alone."""
    mode, options = request.tune, {name: getattr(request, name) for name in ("lora_rank", "lora_targets", "lora_dtype")}
    if given := [name for name, value in options.items() if value and mode not in ("lora", "qlora", "dora")]:
        value = options[given[0]]
        said = ",".join(value) if isinstance(value, tuple) else value
        raise UsageError(f"{flag(given[0])} {said} needs --tune lora, qlora or dora")
    if mode in (None, "full"):
        return None
    having = tools()[framework.tuner].modes if framework.tuner else ()
    if mode not in having:
        others = ", ".join(name for name, one in registry().items() if one.tuner and mode in tools()[one.tuner].modes)
        own = f"has {', '.join(('full', *having))}" if having else "trains models whole"
        raise UsageError(f"--tune {mode}: {framework.title} {own}; frameworks with {mode}: {others}")
    rank, targets, dtype = options.values()
    return tuning(mode, framework.tuner, rank=rank, targets=targets, dtype=dtype)


def untuned(framework: Framework, tuning: Tuning | None) -> str:
    """Why a framework does not train just that of a model, "" where it does."""
    if tuning is None or not framework.tuner:
        return "" if tuning is None else "trains models whole"
    modes = tools()[framework.tuner].modes
    if tuning.quantized and "qlora" not in modes:
        having = ", ".join(
            name for name, one in registry().items() if one.tuner and "qlora" in tools()[one.tuner].modes
        )
        return f"has no quantized base; {having} have one"
    return "" if tuning.mode in modes else f"has no {tuning.mode}"


def make_workload(
    model: Model, request: Request, *, tuning: Tuning | None = None, settings: Sequence[str] = ()
) -> Workload:
    """The model's default workload with what was asked, then `key=value` settings, on top."""
    off = request.no_overlap if isinstance(request.no_overlap, tuple) else ()
    wanted = () if "all" in off else request.overlap or OVERLAPS
    precision = None if request.precision == AUTO else request.precision
    chosen = {"precision": precision, "shard_optimizer_over_data": request.shard_optimizer}
    workload = Workload(
        global_batch=request.batch or model.defaults.global_batch,
        sequence_length=request.seq or model.defaults.sequence_length,
        overlaps=tuple(name for name in OVERLAPS if name in wanted and name not in off),
        split_micro_batch=request.split_micro_batch,
        tuning=tuning,
        lengths=_lengths(request),
    ).model_copy(update={name: value for name, value in chosen.items() if value is not None})
    if not settings:
        return workload
    # Imported here: most searches set nothing, and start-up time is theirs.
    from axonn_tune.specs.document import to_yaml
    from axonn_tune.specs.loading import parse_document

    return parse_document(to_yaml(workload), schema=Workload, source="workload", overrides=settings)


def _lengths(request: Request) -> Lengths | None:
    """Lengths of sequences, if they are asked for; UsageError for packing without them."""
    if request.lengths is None:
        if request.packing is not None:
            raise UsageError(f"--packing {request.packing} needs --lengths: without, all sequences have --seq tokens")
        return None
    # Imported here: most searches have sequences of one length, and start-up time is theirs.
    from axonn_tune.specs.lengths import read_lengths

    return read_lengths(request.lengths, request.packing)


def unbatched(framework: Framework, lengths: Lengths | None) -> str:
    """Why a framework does not batch sequences so, "" where it does."""
    return "" if lengths is None or lengths.packing in framework.packings else f"has no {lengths.packing} batches"


def check_lengths(problem: Problem) -> None:
    """UsageError for lengths that the framework does not batch so."""
    lengths, framework, request = problem.workload.lengths, problem.framework, problem.request
    if lengths is None:
        return
    if unbatched(framework, lengths):
        others = ", ".join(name for name, one in registry().items() if lengths.packing in one.packings)
        known = f"it has {', '.join(framework.packings)}; " if framework.packings else ""
        asked = f"--lengths {lengths.data} --packing {lengths.packing}"
        raise UsageError(f"{asked}: {framework.title} has no such batches; {known}frameworks that do: {others}")
    if not framework.step.fused_attention and lengths.packing != "padded":
        raise UsageError(f"--packing {lengths.packing}: attention that writes all scores takes padded batches alone")
    alone = lengths.packing == "packed" and framework.packs_alone
    if alone and request.micro_batch not in (None, 1):
        raise UsageError(
            f"--micro-batch {request.micro_batch}: {framework.title} takes one pack a micro-batch; nearest valid: 1"
        )


_PINNED = ("recompute", "recompute_layers", "micro_batch", "kept_layers", "chunks")


def launch_inputs(path: str | Path, *, machine: MachineLike | None = None) -> tuple[Inputs, bool]:
    """The problem whose only candidate is a launch config's; also whether the machine profile has changed since.

    `machine` is a profile to use instead of the one the launch config names.
    Errors as `load_inputs` and `machine_of_launch`.
    """
    # Imported here: a search reads no launch config, and start-up time is its.
    from axonn_tune.specs.launch import Launch
    from axonn_tune.specs.loading import load_file
    from axonn_tune.stages import layout_text

    loaded = load_file(path, schema=Launch)
    launch, grid = loaded.document, loaded.document.grid
    profile = machine_of_launch(path, launch) if machine is None else load_machine(machine)
    pins: dict[str, Any] = {name: getattr(launch, name) for name in _PINNED} | grid.sizes
    pins |= {"pipeline_layout": layout_text(launch.parts)} if launch.parts else {}
    request = Request(launch.model, gpus=grid.world, order=grid.order, **pins)
    job, piped = (launch.model, profile.document, launch.workload), grid.pipeline > 1
    problem = Problem(*job, framework_of(launch), gpus=grid.world, request=request, pipeline=piped)
    model = Loaded(launch.model, loaded.path, launch.provenance.model_sha256)
    return Inputs(problem, model, profile), profile.sha256 != launch.provenance.machine_sha256


def machine_of_launch(path: str | Path, launch: Launch) -> Loaded[Machine]:
    """The profile that a launch config names, from the catalog or the config's folder; else UsageError."""
    name = launch.predicted.machine
    try:
        return load_machine(name)
    except UnknownNameError as error:
        if (beside := _profile_beside(Path(path), name)) is not None:
            return load_machine(beside)
        raise UsageError(f"{path}: {error}; --machine FILE says where its profile is") from error


def _profile_beside(path: Path, name: str) -> Path | None:
    """The file in the same folder that is the machine profile of this name."""
    says = re.compile(rf"^name:\s*[\"']?{re.escape(name)}[\"']?\s*(#.*)?$", re.MULTILINE)
    for other in sorted(path.parent.glob("*.y*ml")):
        with contextlib.suppress(AxonnTuneError):
            text = read_text(other, limit_bytes=DOCUMENT_BYTES)
            if re.search(r"^schema:\s*[\"']?axonn-tune/machine/", text, re.MULTILINE) and says.search(text):
                return other
    return None
