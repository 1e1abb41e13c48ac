"""Is 4D worth it? The best 4D grid and the best layout of each framework, by the step in its own software.

The search of grids ranks every framework's layouts with the numbers of its software, or with ideal kernels for all
(`same_kernels`), so that layouts and schedules are compared, not releases. HSDP and data parallelism are FSDP's layouts
with replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from axonn_tune.cost.compute import GEMMS
from axonn_tune.cost.price import Detail, price
from axonn_tune.cost.work import CONTENDED, HOST, separated, step_parts, waiting
from axonn_tune.errors import NothingFeasibleError, UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.optimizers import optimizers
from axonn_tune.grid import RANK_AXES, Grid, split_axes
from axonn_tune.job import Layout
from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.inputs import compared, load_inputs, unbatched, unpriced_experts, untuned
from axonn_tune.ranking.nearest import nearest_change
from axonn_tune.ranking.priced import TELL, Priced
from axonn_tune.ranking.space import Problem
from axonn_tune.specs.model import Model
from axonn_tune.specs.tuning import tools
from axonn_tune.specs.workload import Workload
from axonn_tune.units import GIB, show_seconds
from axonn_tune.vocabulary import OVERLAPS, Overlap

UNLIMITED_MEMORY_GIB = 1e6
WORTH_NAMING = 0.01
"""Shares of a step below this are not named as a limit."""
WORTH_SEPARATING = 0.005
"""Differences below this share of the shortest step are summed as the rest."""
UNSEEN = 0.0005
"""Shares that are shown as 0."""
GAIN = "gain over Megatron-LM"

GridFilter = Callable[[Grid], bool]
"""Whether a grid belongs to a strategy."""

STRATEGIES: tuple[tuple[str, str, str, GridFilter], ...] = (
    ("axonn-tune", "4D", AXONN_TUNE.name, lambda grid: True),
    ("megatron-core", "Megatron-Core", "megatron-core", lambda grid: True),
    ("torchtitan", "torchtitan", "torchtitan", lambda grid: True),
    ("deepspeed", "DeepSpeed", "deepspeed", lambda grid: True),
    ("fsdp", "FSDP (ZeRO-3)", "fsdp", lambda grid: grid.data == 1 and grid.z > 1),
    ("hsdp", "HSDP", "fsdp", lambda grid: grid.z > 1 and grid.data > 1),
    ("data-parallel", "data parallel", "fsdp", lambda grid: grid.z == 1),
    ("megatron-axonn", "Megatron-AxoNN", "megatron-axonn", lambda grid: True),
    ("axonn", "AxoNN (easy API)", "axonn", lambda grid: True),
)
"""Key, display name, framework, and filter of its grids; the key is the framework's name where it has one row."""
EARLIER = {"4d": AXONN_TUNE.name, "megatron-lm": "megatron-core"}
"""Earlier keys, and those of today."""
YOURS = "yours"
"""Key of a run that is compared with the best layouts."""

OF_THE_CLAIM = ("megatron-2022", "Megatron-LM (2022)", "megatron-2022", lambda grid: True)
"""The description nearest to the Megatron-LM of the paper's comparison, whose release it does not state."""


def sizes_of(priced: Detail) -> dict[str, int]:
    """Sizes of the axes and chunks of a stage, by the framework's names of them."""
    return priced.job.framework.layout({**priced.grid.by_axis, "chunks": priced.chunks})


def by_axis(priced: Detail) -> dict[str, tuple[float, float]]:
    """Communication of a step by axis: all of it, and what is exposed on the stage that computes longest, s."""
    found = {term.axis: (0.0, 0.0) for term in (*priced.terms, *priced.awaited)}
    for term in priced.terms:
        found[term.axis] = found[term.axis][0] + term.seconds, 0.0
    for term in priced.awaited:
        found[term.axis] = found[term.axis][0], found[term.axis][1] + term.exposed_s
    return found


EXPOSED = {
    **{"x": "TP", "y": "TP", "z": "FSDP", "data": "DP", "context": "CP", "pipeline": "PP"},
    **{"expert": "EP", "expert_tensor": "EP", "expert_z": "FSDP"},
}
"""What splits over an axis is called, whatever the framework: the first of several that a collective is over counts."""
OTHER_KERNELS, RECOMPUTE, BUBBLE, REST = "attention and element-wise", "recompute", "pipeline bubble", "the rest"
CAUSES = (
    *(GEMMS, OTHER_KERNELS, RECOMPUTE),
    *(f"exposed {name}" for name in dict.fromkeys(EXPOSED.values())),
    *(BUBBLE, CONTENDED, HOST, REST),
)
"""Causes of a step's time that all frameworks share."""


def causes(priced: Detail) -> dict[str, float]:
    """Seconds of a step by cause, which add up to it; with stages, of the one with the most computation."""
    has = {f"exposed {EXPOSED['expert']}": priced.job.model.has_experts, HOST: priced.host_s > 0.0}
    sums = dict.fromkeys((name for name in CAUSES if has.get(name, True)), 0.0)
    named = {**{one: one for one in (GEMMS, CONTENDED, HOST)}, "recompute": RECOMPUTE, "bubble": BUBBLE}
    for key, (_, spent_s) in step_parts(priced).items():
        over = str(key).removeprefix("over ")
        axis = next((one for one in EXPOSED if one in split_axes(over)), "data") if over != key else ""
        sums[f"exposed {EXPOSED[axis]}" if axis else named.get(str(key), OTHER_KERNELS)] += spent_s
    sums[REST] = priced.iteration_s - sum(sums.values())
    return sums


def limits(priced: Detail) -> tuple[tuple[str, float], ...]:
    """Overhead beyond useful compute, as shares of the step, largest first."""
    step_s = priced.iteration_s
    shares = [(waiting(axis, priced), exposed_s / step_s) for axis, (_, exposed_s) in by_axis(priced).items()]
    shares.append(("pipeline bubble", priced.bubble_s / step_s))
    shares.extend(((CONTENDED, priced.contended_s / step_s), (HOST, priced.host_s / step_s)))
    shares.append(("recompute", step_parts(priced).get("recompute", ("", 0.0))[1] / step_s))
    worth = [(what, share) for what, share in shares if share >= WORTH_NAMING]
    return tuple(sorted(worth, key=lambda limit: -limit[1]))


@dataclass(frozen=True)
class Contender:
    """One strategy: its best layout that fits, or why none does; and its best with unlimited memory.

    measured: its framework's steps were measured on several GPUs, if there are several; else it stands apart.
    """

    key: str
    name: str
    framework: str
    prediction: Detail | None
    infeasible: str = ""
    unlimited_memory: Detail | None = None
    measured: bool = True


@dataclass(frozen=True)
class OverlapGain:
    """The best 4D configuration with all overlaps off, and with those of the workload on (all, if it has none)."""

    off_s: float
    on_s: float

    @property
    def gain(self) -> float:
        """Relative speed-up from overlap."""
        return self.off_s / self.on_s - 1.0


@dataclass(frozen=True)
class Claim:
    """One result of arXiv 2305.13525; `value` as a share."""

    what: str
    value: float
    words: str


@dataclass(frozen=True)
class Comparison:
    """All contenders, the shortest step first and those not measured on several GPUs last, which stand apart: none of
    them is the baseline or the best. The gain of overlap in 4D; what the paper claims of this case.
    """

    problem: Problem
    limit_bytes: float
    contenders: tuple[Contender, ...]
    overlap: OverlapGain | None
    claims: tuple[Claim, ...]

    @property
    def own(self) -> Contender:
        """4D."""
        return next(each for each in self.contenders if each.key == AXONN_TUNE.name)

    @property
    def same_kernels(self) -> bool:
        """Whether all have ideal kernels."""
        return self.problem.request.same_kernels

    @property
    def ranked(self) -> tuple[Contender, ...]:
        """Those that fit and do not stand apart, the shortest step first."""
        return tuple(each for each in self.contenders if each.prediction and each.measured)

    @property
    def apart(self) -> tuple[Contender, ...]:
        """Those that fit and were not measured on several GPUs."""
        return tuple(each for each in self.contenders if each.prediction and not each.measured)

    @property
    def baseline(self) -> Contender | None:
        """What the others are compared with: the run in question, else the framework that was named, else the first.

        None if all that fit stand apart.
        """
        named = self.problem.framework.name if self.problem.request.framework is not None else ""
        asked = (each for key in (YOURS, named) for each in self.ranked if each.key == key)
        return next(asked, next(iter(self.ranked), None))

    def over_baseline(self, contender: Contender) -> float | None:
        """Step time over that of the baseline, less 1; None for what stands apart."""
        return _over(contender, self.baseline)

    def gain(self, contender: Contender) -> float | None:
        """Relative speed-up of 4D over another contender; None if either does not fit."""
        mine, other = self.own.prediction, contender.prediction
        return None if mine is None or other is None else other.iteration_s / mine.iteration_s - 1.0

    def relative(self, contender: Contender) -> float | None:
        """Step time over the shortest; None for what stands apart."""
        over = _over(contender, next(iter(self.ranked), None))
        return None if over is None else 1.0 + over

    def separated_by(self, contender: Contender) -> tuple[tuple[str, float], ...]:
        """Parts of the difference between a contender's step and the first's, as shares of the first's step.

        Savings first, then costs, each the largest first; then the rest.
        """
        first = next((each.prediction for each in self.ranked), None)
        other = contender.prediction
        if first is None or other is None:
            return ()
        step_s = first.iteration_s
        found = separated(
            step_parts(first),
            step_parts(other),
            longer_s=other.iteration_s - step_s,
            worth_s=WORTH_SEPARATING * step_s,
            unseen_s=UNSEEN * step_s,
        )
        return tuple((words, more_s / step_s) for words, more_s in found)

    @property
    def same_layout(self) -> str:
        """Name of the strategy whose kind of layout 4D's best is: HSDP, FSDP or data parallelism; empty for none."""
        mine = self.own.prediction
        if mine is None:
            return ""
        grid = mine.grid
        if grid.x * grid.y * grid.pipeline * grid.expert > 1 or grid.world == 1:
            return ""
        return next(
            name for key, name, _, wanted in STRATEGIES if key in ("fsdp", "hsdp", "data-parallel") and wanted(grid)
        )


def compare(problem: Problem, *, of_run: Problem | None = None) -> Comparison:
    """Find the best layout of each strategy by step time; NothingFeasibleError if none of any kind fits.

    Axes, rank order and layers not resharded are pinned only for 4D; recompute and micro-batch for all. of_run: the
    search for a run's own framework, with its step.
    """
    stated = claims(problem.model, machine_name=problem.machine.name, gpus=problem.gpus)
    strategies = [*STRATEGIES, *([OF_THE_CLAIM] if any(one.what == GAIN for one in stated) else [])]
    if all(problem.framework.name != name for _, _, name, _ in strategies):
        own = problem.framework
        strategies.append((own.name, own.title, own.name, lambda grid: True))
    rankings: dict[str, tuple[Priced, Priced]] = {}
    contenders = []
    for key, name, framework, wanted in strategies:
        asked = _problem_of(problem, find_framework(framework))
        if of_run and of_run.framework.name == framework and not problem.request.same_kernels:
            asked = of_run
        if asked.workload.format and asked.workload.precision not in asked.framework.formats:
            why = f"priced in {', '.join(('bf16', *asked.framework.formats))} only"
        else:
            why = "experts are not priced for it" if unpriced_experts(asked.framework, asked.model) else ""
            why = why or untuned(asked.framework, asked.workload.tuning)
            why = why or unbatched(asked.framework, asked.workload.lengths)
            optimizer = problem.framework.step.optimizer
            if asked.framework.step.optimizer != optimizer:
                why = why or f"has no {optimizers()[optimizer].title}"
        measured = problem.gpus == 1 or bool(asked.framework.measured_on)
        if why:
            contenders.append(Contender(key, name, asked.framework.name, None, infeasible=why, measured=measured))
            continue
        if framework not in rankings:
            accelerator = asked.machine.accelerator.model_copy(update={"memory_gib": UNLIMITED_MEMORY_GIB})
            unlimited = replace(asked, machine=asked.machine.model_copy(update={"accelerator": accelerator}))
            top = 0 if sum(other == framework for _, _, other, _ in strategies) > 1 else 1
            searched = partial(search, top=top, tell=TELL.get())
            rankings[framework] = searched(asked), searched(unlimited)
        ranking, roomy = rankings[framework]
        best = _first(ranking, wanted)
        why = "" if best is not None else _why_not(ranking, wanted)
        if best is not None and asked.formats:
            name = f"{name} in {best.job.workload.precision}"
        found = Contender(key, name, framework, best, why, unlimited_memory=_first(roomy, wanted), measured=measured)
        contenders.append(found)
    if all(contender.prediction is None for contender in contenders):
        raise NothingFeasibleError("; ".join(f"{each.name}: {each.infeasible}" for each in contenders))
    full = rankings[AXONN_TUNE.name][0] if AXONN_TUNE.name in rankings else ()
    return Comparison(
        problem=problem,
        limit_bytes=memory_limit_bytes(problem.machine.accelerator),
        contenders=tuple(sorted(contenders, key=_place)),
        overlap=_overlap_gain(full) if full else None,
        claims=stated,
    )


def with_layout(
    found: Comparison, layout: Layout, framework: Framework, *, workload: Workload, name: str
) -> Comparison:
    """A comparison with one layout more, key `yours`, priced as the others are; workload: with its overlaps."""
    asked = replace(_problem_of(found.problem, framework), workload=workload)
    own = Contender(YOURS, f"yours ({name})", framework.name, price(asked, layout))
    return replace(found, contenders=tuple(sorted((*found.contenders, own), key=_place)))


def _place(contender: Contender) -> tuple[bool, float]:
    found = contender.prediction
    return not contender.measured, float("inf") if found is None else found.iteration_s


def _over(contender: Contender, base: Contender | None) -> float | None:
    """Step time over that of a base, less 1; None for what does not fit or stands apart."""
    if base is None or base.prediction is None or contender.prediction is None or not contender.measured:
        return None
    return contender.prediction.iteration_s / base.prediction.iteration_s - 1.0


def _problem_of(problem: Problem, framework: Framework) -> Problem:
    """The problem of one framework, if asked for with ideal kernels; of the one named, with the step asked for."""
    own = framework.name == problem.framework.name
    framework = problem.framework if own else framework
    request = problem.request if own else problem.request.without_pins("recompute", "micro_batch")
    optimizer = problem.framework.step.optimizer
    if optimizer in framework.optimizers and optimizer != framework.step.optimizer:
        framework = framework.optimizing(optimizer)
    if problem.request.imbalance is not None:
        framework = framework.with_step(imbalance=problem.request.imbalance)
    if problem.request.same_kernels:
        ideal = framework.with_step(kernels="ideal")
        framework = replace(ideal, software="", expert_software="", hopper_attention=True)
    tuning = problem.workload.tuning
    if tuning is not None and framework.tuner:
        # The same adapters, as its tool keeps and sends them.
        tuning = tools()[framework.tuner].keeping(tuning)
    split = problem.workload.split_micro_batch and "output" in framework.step.overlaps
    asked = replace(
        problem,
        workload=problem.workload.model_copy(update={"split_micro_batch": split, "tuning": tuning}),
        framework=framework,
        request=request,
        rank_by="iteration",
        pipeline=problem.pipeline if own else framework.searches_stages,
    )
    return compared(asked)


def _first(ranking: Priced, wanted: GridFilter) -> Detail | None:
    return next((one.detail for one in ranking.rows if wanted(one.grid)), None)


def _why_not(ranking: Priced, wanted: GridFilter) -> str:
    """What rejects the grids of a strategy: what the leanest needs, or the nearest change."""
    refused = [grid for grid in ranking.rejected() if wanted(Grid(**grid.sizes, order=RANK_AXES))]
    nearest = min(refused, key=lambda grid: (len(grid.reasons), grid.needed_bytes or float("inf")), default=None)
    fewest = [why for _, why in nearest.reasons] if nearest else []
    return ", ".join(fewest) or nearest_change(ranking.problem)


def own_software_s(priced: Detail) -> float:
    """Step of a layout with the framework's own software numbers, s."""
    own, shipped = priced.job.framework, find_framework(priced.job.framework.name).training(priced.job.model)
    kernels, attention = shipped.step.kernels, shipped.hopper_attention
    framework = replace(own.with_step(kernels=kernels), software=shipped.software, hopper_attention=attention)
    return price(replace(priced.job, framework=framework), priced).iteration_s


def _overlap_gain(ranking: Priced) -> OverlapGain:
    """Price the best configuration without overlaps, and with the workload's overlaps (or all)."""
    problem, best = ranking[0].job, ranking[0].layout

    def step_s(overlaps: tuple[Overlap, ...]) -> float:
        workload = problem.workload.model_copy(update={"overlaps": overlaps})
        return price(replace(problem, workload=workload), best).iteration_s

    return OverlapGain(off_s=step_s(()), on_s=step_s(problem.workload.overlaps or OVERLAPS))


def paper_step_flops(model: Model, workload: Workload) -> float | None:
    """FLOPs of a step with full recompute: `96·B·s·l·h²·(1 + s/(6h) + V/(16·l·h))`, arXiv 2104.04473, equation 3.

    It counts full recompute whether or not it is done, and the masked half of attention. None
    for models of another shape than a GPT with an MLP of 4h, which it does not describe.
    """
    h, length, layers = float(model.hidden), float(workload.sequence_length), float(model.layers)
    if model.gated or model.ffn != 4 * model.hidden or model.plain.qkv_width != 3 * model.hidden:
        return None
    gemms = 96.0 * workload.global_batch * length * layers * h * h
    return gemms * (1.0 + length / (6.0 * h) + model.vocab / (16.0 * layers * h))


def claims(model: Model, *, machine_name: str, gpus: int) -> tuple[Claim, ...]:
    """Claims of arXiv 2305.13525 for this model and GPU count on Perlmutter; empty for other machines."""
    if not machine_name.startswith("perlmutter"):
        return ()
    if model.name == "80b" and gpus == 1024:
        return (
            Claim(GAIN, 0.26, "26% over Megatron-LM"),
            Claim("share of peak", 0.57, "57% of peak, 182 PFLOP/s in all"),
        )
    if model.name == "20b":
        return (Claim("gain of overlap", 0.53, "nearly 53% from overlap, on a 20B model"),)
    return ()


def every_optimizer(problem: Problem) -> str:
    """Step and memory of the best layout with each optimizer of the framework, which are searched apart."""
    said = list[str]()
    for name in problem.framework.optimizers:
        try:
            found = search(load_inputs(replace(problem.request, optimizer=name)).problem, top=1)
        except UsageError as refused:
            said.append(str(refused).removeprefix("--optimizer "))
            continue
        best = (
            f"{show_seconds(found[0].iteration_s)}, {found[0].memory_bytes / GIB:.1f} GiB"
            if len(found)
            else "nothing fits"
        )
        said.append(f"{name} {best}")
    return f"Best layouts by optimizer, of which --optimizer NAME ranks one's: {'; '.join(said)}."
