"""Orders of the passes of pipeline stages: which of them a problem can have, and which a search compares."""

from __future__ import annotations

from dataclasses import replace

from axonn_tune.errors import UsageError
from axonn_tune.frameworks import registry
from axonn_tune.ranking.space import Problem
from axonn_tune.vocabulary import FOLDED, PipelineOrder


def check_order(problem: Problem) -> None:
    """UsageError for an order of passes that the framework lacks, or that does not go with what is asked."""
    order = problem.framework.step.pipeline_order
    if why := without_order(problem, order):
        raise UsageError(f"--pipeline-schedule {order}: {why}")


def without_order(problem: Problem, order: PipelineOrder) -> str:
    """Why layouts of a problem cannot have an order that splits the backward pass; "" where they can.

    Torch repeats what is recomputed for each half, and for each group of weights again (torch/utils/checkpoint.py keeps
    it by graph task; torch/distributed/pipelining/_backward.py, stage_backward_weight, starts one for each). What
    computes both gradients in one kernel or one node has no halves: compiled blocks, which torch refuses
    (schedules.py, _check_torch_compile_compatibility), and linear layers in FP8 or FP4, which Primus does
    (AMD-AGI/Primus@fd1eeabb, primus/backends/megatron/core/extensions/primus_turbo.py, _use_split_wgrad_op).
    """
    framework, request, model, step = problem.framework, problem.request, problem.model, problem.framework.step
    schedule, tuning, chunks = framework.schedule, problem.workload.tuning, request.chunks
    if order not in schedule.orders:
        others = ", ".join(name for name, one in registry().items() if order in one.schedule.orders)
        compiled = ", which compiles blocks, and torch refuses that" if framework.software == "compiled" else ""
        return f"{framework.title} has {', '.join(schedule.orders)}{compiled}; frameworks that do: {others}"
    recomputes = request.recompute not in (None, "none") or request.recompute_layers is not None
    least, most = (2, 2) if order in FOLDED else schedule.zb1p_chunks
    has = ("1 chunk" if most == 1 else f"{least} chunks") + (" or more" if most > least else "")
    rules = (
        (not problem.pipeline or request.axes.get("pipeline") == 1, "is for several pipeline stages"),
        (chunks is not None and not least <= chunks <= most, f"has {has} a stage in {framework.title}, not {chunks}"),
        (schedule.autograd and recomputes, "repeats what is recomputed for each weight: ask for --recompute none"),
        (bool(problem.workload.format or problem.formats), "needs --precision bf16 or fp16: FP8 has no halves"),
        (tuning is not None and tuning.adapts, "gains nothing where weights are frozen, which have no gradients"),
        (model.mtp_layers > 0, f"is not priced with multi-token prediction, which {model.name} has"),
        (step.expert_overlap or step.delayed_weight_gradients, "excludes overlap of dispatch and combine"),
        (step.pipelined_tensor, "excludes step.pipelined_tensor"),
        (step.offloads, "is not priced with offload"),
        (bool(step.cuda_graphs), "excludes CUDA graphs"),
    )
    return next((why for broken, why in rules if broken), "")


def compared_orders(problem: Problem) -> tuple[PipelineOrder, ...]:
    """Orders that a search of stages compares with 1F1B, by steps, where nobody says which or asks for each layout."""
    framework = problem.framework
    asked = problem.request.pipeline_schedule is not None or framework.step.splits_backward
    if asked or problem.rank_by != "iteration" or not framework.schedule.compared:
        return ()
    return tuple(one for one in framework.schedule.orders if one != "1f1b" and not without_order(problem, one))


def in_order(problem: Problem, order: PipelineOrder) -> Problem:
    """The problem with an order that splits the backward pass; where torch splits it nothing is recomputed."""
    framework = problem.framework.with_step(pipeline_order=order)
    request, bare = problem.request, framework.schedule.autograd and problem.request.recompute is None
    request = replace(request, recompute="none") if bare else request
    request = replace(request, chunks=2) if order in FOLDED and request.chunks is None else request
    return replace(problem, framework=framework, request=request, compared_orders=())
