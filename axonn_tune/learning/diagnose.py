"""Comparison of a run with its prediction, and probabilities of explanations.

The uncertainty of the prediction is the learned covariance of a profile, or the prior spreads of `learning.learn`, plus
residual errors. Explanations are weighed by Bayes' rule: probability ∝ prior · likelihood,

    likelihood = N(log measured; log predicted, J C Jᵀ + diag(noise²)),    J = ∂ log(time) / ∂ log(number)

over all times of the run, and the step of the same run on fewer GPUs if that is given, each explanation with its own
prediction: a number of the profile that is worse by one of several factors (averaged, by how probable each is),
another configuration than was stated, or one rank that computes longer. So ordinary uncertainty of the numbers explains
ordinary gaps, without a fault.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from axonn_tune.frameworks import step_on
from axonn_tune.learning.causes import KINDS, OF_NETWORK, PRIORS, TRIED, Hypothesis, hypotheses_of
from axonn_tune.learning.evidence import WHOLE, Sample, Setup
from axonn_tune.learning.observed import BASELINE, Observed, RankTimes
from axonn_tune.learning.operation import SavingCost, saving_cost
from axonn_tune.learning.setups import WORTH, Change, changes_of, searched
from axonn_tune.program.dimensions import logged_flops, model_flops
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.specs.machine import Accelerator, Machine
from axonn_tune.units import TERA

HIGHEST_SHARE = 0.9
"""Share of the peak that no step reaches with the FLOPs that causal kernels compute: the highest MFU of
published steps is 66%."""


LIKELY, LISTED = 0.01, 6
"""Least probability and largest number of listed explanations."""

EXPLAINED, MOST = 0.1, 0.5
"""Share of the gap below which a cause explains nothing; share that remains, where no explanation fits, from which on
probabilities are not shown."""

OVERSHOOT, CERTAIN = 1.4, 0.5
"""Share of the gap above which a cause explains too much; least probability of a cause at the end of its range."""

MISFIT = 2.0
"""Residual of the best explanation, in standard deviations, above which none fits."""


@dataclass(frozen=True)
class Cause:
    """An explanation after the evidence; `explains_s`: how much longer the step is than predicted if it holds.

    extreme: its number is at the end of the range that was tried.
    """

    kind: str
    title: str
    words: str
    probability: float
    explains_s: float
    advice: str
    extreme: bool = False


@dataclass(frozen=True)
class Alternative:
    """What an assumption may be instead, in words, and the step that is then predicted, s; whether the run fits it."""

    words: str
    step_s: float
    reasonable: bool


@dataclass(frozen=True)
class Assumption:
    """A column of the run that was not stated, the cell it was taken to hold, and others that change the step."""

    column: str
    taken: str
    others: tuple[Alternative, ...] = ()


@dataclass(frozen=True)
class Baseline:
    """The same run on fewer GPUs, against its prediction with the 80% interval, s; one_node: it is within a node."""

    name: str
    gpus: int
    one_node: bool
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float

    @property
    def slow(self) -> bool:
        """Whether it, too, took more than the interval."""
        return self.measured_s > self.high_s


@dataclass(frozen=True)
class Diagnosis:
    """One run against its prediction; times of `of`, s, with the prediction's 80% interval.

    learned: the interval is the uncertainty left by the runs learned from, else the profile's half-widths. assumed:
    settings that the file does not state. healthy: probability of no fault. misfit: root mean square of the deviations
    that even the nearest explanation leaves, in standard deviations; 1 where it leaves less. causes: explanations, the
    most probable first. find_changes: makes `changes`. flops_ratio: FLOPs of a step by the log's own TFLOP/s over those
    that its framework counts for this model and batch, None if unknown; counts_recompute: whether these have recompute.
    flops_s: what useful FLOPs of the step take at the peak of its number format, so that MFU is 1, s; None if unknown.
    impossible: no run is as stated, since the step took less; it then has no causes, and `healthy` is 0. baseline: the
    same run on fewer GPUs, if given. memory_bytes, memory_limit_bytes: predicted of a GPU, and what can be used; 0
    without a step. in_fp32: the step is, where the accelerator is faster in BF16. logged_share: FLOP/s over the peak as
    the log counts those of a model of which not all trains, at the measured step; None for one that trains whole.
    saving: what its saves and its restart cost, where its log has them.
    """

    name: str
    of: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    healthy: float
    misfit: float
    causes: tuple[Cause, ...]
    find_changes: Callable[[], tuple[Change, ...]] = field(repr=False, compare=False)
    assumed: tuple[Assumption, ...] = ()
    learned: bool = False
    flops_ratio: float | None = None
    counts_recompute: bool = False
    flops_s: float | None = None
    impossible: bool = False
    baseline: Baseline | None = None
    memory_bytes: float = 0.0
    memory_limit_bytes: float = 0.0
    in_fp32: bool = False
    logged_share: float | None = None
    saving: SavingCost | None = None

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """Changes of the layout that save time, the best of a search among them, which takes place when first asked."""
        return tuple(change for change in self.find_changes() if change.gain >= WORTH)

    @property
    def network(self) -> float:
        """Probability that the network between nodes is slow, whatever makes it so."""
        return sum(cause.probability for cause in self.causes if cause.kind in OF_NETWORK)

    @property
    def reasonable(self) -> bool:
        """Whether the measurement is inside the interval, and possible."""
        return not self.impossible and self.low_s <= self.measured_s <= self.high_s

    @property
    def faster(self) -> bool:
        """Whether it took less than the interval."""
        return self.measured_s < self.low_s

    @property
    def likely(self) -> list[Cause]:
        """Causes that explain a part of the gap and not more, in its direction, and are not all too improbable; none of
        a run that most likely has no fault."""
        gap_s = self.measured_s - self.predicted_s
        most_s = OVERSHOOT * gap_s
        if (one := self.baseline) and gap_s > 0.0:
            # A model that is too slow is so for both runs: the gap is wider by what it is off by on fewer GPUs.
            most_s = max(most_s, OVERSHOOT * (self.measured_s - self.predicted_s * one.measured_s / one.predicted_s))
        told = [
            cause
            for cause in self.causes
            if EXPLAINED * gap_s**2 <= cause.explains_s * gap_s <= most_s * gap_s
            and not (cause.extreme and cause.probability < CERTAIN)
        ]
        likely = [cause for cause in told[:LISTED] if cause.probability >= LIKELY]
        healthy = self.healthy >= min([CERTAIN, *(cause.probability for cause in likely[:1])])
        return [] if self.reasonable and healthy else likely

    @property
    def unexplained(self) -> list[Cause]:
        """What the first likely cause leaves of the gap, as a row; its probability is that of none of the causes."""
        gap_s, likely = self.measured_s - self.predicted_s, self.likely
        left_s = gap_s - (likely[0].explains_s if likely else 0.0)
        if left_s * gap_s < EXPLAINED * gap_s**2 or (self.reasonable and not likely) or self.impossible:
            return []
        words = "what the first cause leaves" if likely else "no cause that was tried explains it"
        return [Cause("unexplained", "not explained", words, self.healthy, left_s, "")]

    @property
    def far_off(self) -> bool:
        """Whether no explanation fits, and the first leaves most of the gap: how probable that is says nothing."""
        most_s = MOST * abs(self.measured_s - self.predicted_s)
        far = any(abs(one.explains_s) > most_s for one in self.unexplained)
        return self.misfit > MISFIT and not self.reasonable and far


def diagnose(
    sample: Sample, machine: Machine, *, ranks: RankTimes | None = None, baseline: Sample | None = None
) -> Diagnosis:
    """Compare a run, or collectives, with the prediction, and rank explanations.

    ranks: metrics per rank, if known. baseline: a step of the same run on fewer GPUs.
    """
    baseline = None if baseline is None else baseline.narrowed(lambda same: same)
    sample = sample.narrowed(lambda same: same)
    # Ranks of several stages compute different parts of the model.
    setup = sample.setup
    staged = setup is not None and setup.layout.pipeline > 1
    observed = Observed(sample, machine, None if staged else ranks, baseline)
    flops_s, impossible = _at_peak(observed)
    hypotheses = [] if impossible else list(hypotheses_of(observed))
    causes, healthy, misfit = ((), 0.0, 1.0) if impossible else _weighed(observed, hypotheses)
    step, (least, most) = observed.total(observed.stated), observed.interval
    priced, ratios = setup.priced if setup else None, []
    if setup is not None and sample.flops:
        kinds = RECOMPUTES if "recompute" in sample.unstated else (setup.layout.recompute,)
        what = setup.framework, setup.model, setup.workload
        counts = [logged_flops(*what, grid=setup.layout.grid, recompute=kind) for kind in kinds]
        ratios = [sample.flops / count for count in counts if count]
    return Diagnosis(
        name=sample.name,
        of="step" if "step" in observed.rows else "all collectives",
        measured_s=observed.measured_s,
        predicted_s=step,
        low_s=step * least,
        high_s=step * most,
        healthy=healthy,
        misfit=misfit,
        causes=causes,
        find_changes=lambda: (
            changes_of(setup, lambda one: observed.price(observed.known, one)["step"], ranking=searched(setup))
            if setup and not impossible
            else ()
        ),
        assumed=tuple(_assumptions(observed, hypotheses)),
        learned=machine.learned is not None,
        flops_ratio=min(ratios, key=lambda ratio: abs(math.log(ratio)), default=None),
        counts_recompute=bool(sample.framework.logged and sample.framework.logged.repeated),
        flops_s=flops_s,
        impossible=impossible,
        baseline=_baseline(observed),
        memory_bytes=priced.memory_bytes if priced else 0.0,
        memory_limit_bytes=priced.memory_limit_bytes if priced else 0.0,
        logged_share=_logged_share(setup, observed.measured_s),
        saving=saving_cost(sample, machine),
        in_fp32=setup is not None and setup.workload.precision == "fp32" and _has_faster(machine.accelerator),
    )


def _logged_share(setup: Setup | None, measured_s: float) -> float | None:
    """What the log of a run prints of the peak, where not all trains."""
    if setup is None or setup.workload.tuning is None or (priced := setup.priced).logged_tflops_per_gpu is None:
        return None
    return priced.logged_tflops_per_gpu * TERA * priced.iteration_s / (measured_s * priced.job.peak_flops_per_s)


def _has_faster(accelerator: Accelerator) -> bool:
    """Whether an accelerator is faster in BF16 than in FP32."""
    peaks = accelerator.peak_tflops
    return peaks.get("bf16", 0.0) > peaks.get("fp32", 0.0)


def _baseline(observed: Observed) -> Baseline | None:
    """The smaller run, if there is one."""
    sample = observed.baseline
    if sample is None or sample.setup is None:
        return None
    predicted_s, half = observed.stated.times[BASELINE], observed.half_width_of(sample.setup)
    return Baseline(
        name=sample.name,
        gpus=sample.ranks,
        one_node=sample.ranks <= sample.setup.machine.launcher.ranks_per_node < observed.sample.ranks,
        measured_s=sample.seen["step"],
        predicted_s=predicted_s,
        low_s=predicted_s * math.exp(-half),
        high_s=predicted_s * math.exp(half),
    )


def _at_peak(observed: Observed) -> tuple[float | None, bool]:
    """What useful FLOPs of the step take at the peak, s, None without a step; whether none can take what was measured.

    MFU counts keys that kernels may skip, so by itself it may be above 1 for long sequences.
    """
    setup = observed.setup
    if setup is None or "step" not in observed.rows:
        return None, False
    peak = setup.layout.grid.world * setup.peak_flops_per_s
    flops_s, seen_s = (model_flops(setup.model, setup.workload, masked=masked) / peak for masked in (True, False))
    return flops_s, observed.measured_s < min(flops_s, seen_s / HIGHEST_SHARE)


def _assumptions(observed: Observed, hypotheses: Sequence[Hypothesis]) -> Iterator[Assumption]:
    """Settings that the file does not state, with other values that change the step."""
    (least, most), setup = observed.interval, observed.setup
    if setup is None:
        return
    one, step = setup.layout, setup.framework.step
    fused = step_on(setup.framework, setup.machine, setup.workload.precision).fused_attention
    taken = {
        "mbs": str(one.micro_batch),
        "vpp": str(one.chunks),
        "recompute": one.recompute,
        "seq_parallel": str(int(step.sequence_parallel)),
        "zero_stage": str(3 if one.z > 1 else 2 if step.shard_gradients else int(step.distributed_optimizer)),
        "attn": "flash" if fused else "unfused",
        "routing": "natural" if step.imbalance is None else "forced",
        "dispatcher": step.dispatcher,
    }
    for column in filter(taken.__contains__, observed.sample.unstated):
        others = (
            Alternative(re.sub(", not [^,]+", "", guess.words), step_s, least <= observed.measured_s / step_s <= most)
            for hypothesis in hypotheses
            if hypothesis.kind == KINDS.get(column)
            for guess in hypothesis.guesses
            if (step_s := guess.times["step"])
        )
        yield Assumption(column, taken[column], tuple(others))


def _weighed(observed: Observed, hypotheses: Sequence[Hypothesis]) -> tuple[tuple[Cause, ...], float, float]:
    """Every hypothesis with its probability, the most probable first; the probability of no fault; and the misfit.

    Where a run has many times and even the nearest guess is further off than its covariance says, all covariances are
    widened until it fits (Birge 1932), so that a misfit of the model does not select a wrong cause.
    """
    plain = Hypothesis("nothing", "", (observed.stated,))
    every = [plain, *hypotheses]
    deviations = []
    for residuals, covariance in (observed.residuals(guess) for one in every for guess in one.guesses):
        square = float(residuals @ np.linalg.solve(covariance, residuals)) / len(residuals)
        deviations.append((-len(residuals), square))
    # Of the nearest guess that knows most rows.
    left = max(1.0, min(deviations)[1])
    misfit = left if len(observed.rows) > len(WHOLE) else 1.0
    logs = [
        [observed.log_likelihood(guess, misfit=misfit) + math.log(guess.chance) for guess in one.guesses]
        for one in every
    ]
    weights = np.array(
        [
            math.log(one.weight * PRIORS[one.kind] / sum(guess.chance for guess in one.guesses))
            + float(np.logaddexp.reduce(found))
            for one, found in zip(every, logs, strict=True)
        ]
    )
    shares = np.exp(weights - np.logaddexp.reduce(weights))
    stated_s = observed.total(observed.stated)
    causes = []
    for one, share in zip(hypotheses, shares[1:], strict=True):
        # The one that fits best, however wide it is and whatever its chance.
        best = max(one.guesses, key=lambda guess: observed.fit(guess, misfit=misfit))
        explains_s = observed.total(best) - stated_s
        extreme = len(one.guesses) >= TRIED and best is one.guesses[-1]
        causes.append(Cause(one.kind, one.title, best.words, float(share), explains_s, one.advice, extreme))
    return tuple(sorted(causes, key=lambda cause: -cause.probability)), float(shares[0]), math.sqrt(left)
