"""Predicted vs. measured: errors of every configuration, axis and collective, and whether training was right.

Measurements can be compared with other predictions than those they were taken with: another profile's, or those of
the paper's rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from statistics import fmean, median
from typing import Any, Literal, TypeAlias

from axonn_tune.cost.price import Detail
from axonn_tune.cost.price import price as price_layout
from axonn_tune.grid import STAGE_AXES
from axonn_tune.job import Job, Layout
from axonn_tune.program.step import BUNDLED
from axonn_tune.specs.launch import OF_RUNS
from axonn_tune.specs.machine import COLLECTIVE_KINDS, Machine, Tier
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import (
    QUANTITIES,
    ComparedConfiguration,
    Measurements,
    Pairs,
    Run,
    Serial,
    predicted_pairs,
)
from axonn_tune.validation.quality import Quality, quality
from axonn_tune.vocabulary import Precision

Agreement: TypeAlias = Literal["equal", "within rounding", "wrong", "not compared"]
COMPARED_STEPS = 10
"""Rounding errors grow from step to step; these, from the first, are compared."""
PAPER = "paper, true bytes"
_COMPARED: tuple[tuple[str, str, dict[Precision, float]], ...] = (
    ("loss", "the forward pass", {"fp64": 1e-10, "fp32": 1e-5, "bf16": 1e-2, "fp16": 1e-2}),
    ("gradient norm", "the gradients", {"fp64": 1e-8, "fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}),
)
"""Quantities, the part of the first step that makes each, and relative differences that are rounding."""
_PASSES: dict[str, int] = {"all_reduce": 2, "send": 2}
"""Times that a ring sends a buffer, but for one rank's share, where that is not once; of the two ranks of a message,
one sends all of it."""


@dataclass(frozen=True)
class Verdict:
    """Agreement with the serial run. where: the first error; difference: the largest relative one."""

    agreement: Agreement
    difference: float = 0.0
    where: str = ""

    @property
    def words(self) -> str:
        """For a person."""
        if self.agreement == "within rounding":
            return f"within rounding ({self.difference:.0e})"
        return f"wrong: {self.where}" if self.agreement == "wrong" else self.agreement


def compare_with_serial(configuration: ComparedConfiguration, serial: Serial | None) -> Verdict:
    """The worst agreement of a configuration's runs with a single rank, in losses and gradient norms."""
    if serial is None:
        return Verdict("not compared")
    found = [_compare_run(run, serial, configuration.workload.precision) for run in configuration.runs]
    order: tuple[Agreement, ...] = ("equal", "within rounding", "wrong")
    return max(found, key=lambda one: (order.index(one.agreement), one.difference))


def _compare_run(run: Run, serial: Serial, precision: Precision) -> Verdict:
    """Losses and gradient norms in the order a step computes them."""
    largest = 0.0
    losses = zip(run.losses, serial.losses, strict=False)
    norms = zip(run.gradient_norms, serial.gradient_norms, strict=False)
    for step, both in enumerate(zip(losses, norms, strict=True), 1):
        if step > COMPARED_STEPS:
            break
        for (value, expected), (what, part, tolerances) in zip(both, _COMPARED, strict=True):
            difference = abs(value - expected) / max(abs(expected), 1e-300)
            if not difference <= tolerances[precision]:
                part = part if step == 1 else "the weight update"
                return Verdict("wrong", difference, f"{what} of step {step} differs by {difference:.1%}: {part}")
            largest = max(largest, difference)
    return Verdict("within rounding", largest) if largest else Verdict("equal")


def blame(verdicts: Sequence[tuple[ComparedConfiguration, Verdict]]) -> str | None:
    """The axes that are split in all wrong configurations and in no other, in words; None if nothing is wrong."""
    split = [({axis for axis, size in one.grid.grid().by_axis.items() if size > 1}, found) for one, found in verdicts]
    wrong = [axes for axes, verdict in split if verdict.agreement == "wrong"]
    right = [axes for axes, verdict in split if verdict.agreement in ("equal", "within rounding")]
    if not wrong:
        return None
    for count in range(1, len(STAGE_AXES) + 1):
        for axes in combinations(STAGE_AXES, count):
            if all(set(axes) <= one for one in wrong) and not any(set(axes) <= one for one in right):
                named = axes[0] if count == 1 else f"{', '.join(axes[:-1])} and {axes[-1]} together"
                if not right:
                    return f"every configuration is wrong; all of them split {named}"
                return f"wrong wherever {named} {'is' if count == 1 else 'are'} split, and nowhere else"
    return "no axis is split in all configurations that are wrong and in none that is right"


@dataclass(frozen=True)
class RunComparison:
    """A measurement file, predicted vs. measured; a configuration is known by its name."""

    measurements: Measurements

    @property
    def configurations(self) -> tuple[ComparedConfiguration, ...]:
        """Each, in the order they ran."""
        return self.measurements.configurations

    @cached_property
    def pairs(self) -> dict[str, Pairs]:
        """Each quantity of all configurations; without predicted memory where it would be compared with a process."""
        found = across({one.name: one.pairs for one in self.configurations})
        if self.measurements.place.on_cpu:
            found["memory_bytes"] = found["memory_bytes"].model_copy(update={"predicted": {}})
        return found

    @cached_property
    def qualities(self) -> dict[str, Quality]:
        """Quality of communication, exposed communication, computation and step, and of the paper's rule."""
        named = ("communication_s", "exposed_communication_s", "compute_s", "step_s")
        found = {QUANTITIES[name]: quality(self.pairs[name]) for name in named}
        machine, world = self.measurements.machine, self.measurements.place.ranks
        paper = {one.name: paper_communication_s(one, machine, world=world) for one in self.configurations}
        return {**found, PAPER: quality(self.pairs["communication_s"].model_copy(update={"predicted": paper}))}

    def shares(self, field: Literal["axis", "op"]) -> list[dict[str, Any]]:
        """Collectives over each axis, or of each kind: means per configuration that has any, s."""
        every = dict.fromkeys(getattr(term, field) for one in self.configurations for term in one.terms)
        order = {axis: place for place, axis in enumerate(STAGE_AXES)}
        names = sorted(every, key=lambda name: (order.get(name, len(STAGE_AXES)), name)) if field == "axis" else every
        return [self._share(field, name) for name in names]

    def _share(self, field: str, name: str) -> dict[str, Any]:
        """Sums over the terms of each configuration, then means over configurations that have any."""
        terms = {one.name: [term for term in one.terms if getattr(term, field) == name] for one in self.configurations}
        have = {key: own for key, own in terms.items() if own}
        times = Pairs(
            predicted={key: sum(term.seconds or 0.0 for term in own) for key, own in have.items()},
            measured={key: sum(median(term.measured_s) for term in own) for key, own in have.items()},
        )
        predicted_s, measured_s = fmean(times.predicted.values()), fmean(times.measured.values())
        return {
            "name": name,
            "configurations": len(have),
            "predicted_s": predicted_s,
            "measured_s": measured_s,
            "error": predicted_s / measured_s - 1.0 if measured_s else None,
            "mape": quality(times).mape,
            "predicted_exposed_s": fmean(sum(term.exposed_s or 0.0 for term in own) for own in have.values()),
            "measured_exposed_s": fmean(sum(median(term.measured_exposed_s) for term in own) for own in have.values()),
        }

    @cached_property
    def gains(self) -> Pairs:
        """The gain from overlap, 1 - step with overlaps / step without, of configurations that ran both ways."""
        steps = self.pairs["step_s"]
        blocking = {_but_overlaps(one): one.name for one in self.configurations if not one.workload.overlaps}
        others = {one.name: blocking.get(_but_overlaps(one)) for one in self.configurations if one.workload.overlaps}

        def gains(column: Mapping[str, float]) -> dict[str, float]:
            both = {name: other for name, other in others.items() if name in column and other in column}
            return {name: 1.0 - column[name] / column[other] for name, other in both.items() if other}

        return Pairs(predicted=gains(steps.predicted), measured=gains(steps.measured))

    @cached_property
    def verdicts(self) -> dict[str, Verdict]:
        """Whether each configuration trained as one rank alone does."""
        return {one.name: compare_with_serial(one, self.measurements.serial) for one in self.configurations}

    @cached_property
    def differs(self) -> dict[str, list[str]]:
        """Collectives of each configuration that differ from the program."""
        return {
            one.name: list(dict.fromkeys(line for run in one.runs for line in run.differs))
            for one in self.configurations
        }

    @cached_property
    def blame(self) -> str | None:
        """The axes on which training is wrong, in words; None if it is right."""
        return blame([(one, self.verdicts[one.name]) for one in self.configurations])

    @property
    def fault(self) -> str:
        """What a check that fails says of it."""
        return self.blame or "collectives of some ranks differ from the program"

    @property
    def sound(self) -> bool:
        """Whether losses and collectives of all configurations are correct."""
        wrong = any(verdict.agreement == "wrong" for verdict in self.verdicts.values())
        return not wrong and not any(self.differs.values())


def across(rows: Mapping[str, Pairs]) -> dict[str, Pairs]:
    """Pairs of rows, whose keys are quantities, as pairs of quantities, whose keys are rows."""
    return {
        quantity: Pairs(
            **{
                column: {
                    name: getattr(pairs, column)[quantity]
                    for name, pairs in rows.items()
                    if quantity in getattr(pairs, column)
                }
                for column in Pairs.model_fields
            }
        )
        for quantity in QUANTITIES
    }


def _but_overlaps(one: ComparedConfiguration) -> tuple[object, ...]:
    """Key shared by configurations that differ only in their overlaps."""
    return one.grid, one.micro_batch, one.recompute, one.recompute_layers, one.kept_layers, one.chunks, one.parts


def fastest_runs(measurements: Measurements) -> Measurements:
    """Only the run with the shortest step of each configuration: other work on a host only ever adds time."""
    found = []
    for one in measurements.configurations:
        steps_s = [run.measured["step_s"] for run in one.runs]
        at = steps_s.index(min(steps_s))
        terms = [
            term.model_copy(update={name: getattr(term, name)[at : at + 1] for name in OF_RUNS}) for term in one.terms
        ]
        found.append(one.with_runs([one.runs[at]], terms))
    return measurements.model_copy(update={"configurations": tuple(found)})


def repriced(measurements: Measurements, machine: Machine) -> Measurements:
    """The same measurements with the current predictions of a profile."""
    found = []
    for one in measurements.configurations:
        priced = price(measurements.model, machine, one)
        now = {(term.op, term.axis, term.phase, term.layer, round(term.bytes)): term for term in priced.terms}
        terms = [
            term.model_copy(
                update={name: getattr(now[term.key], name) if term.key in now else None for name in _OF_PRICE}
            )
            for term in one.terms
        ]
        columns = ("predicted", "low", "high")
        pairs = one.pairs.model_copy(update={name: getattr(priced_pairs(priced), name) for name in columns})
        found.append(one.model_copy(update={"pairs": pairs, "terms": tuple(terms)}))
    return measurements.model_copy(update={"machine": machine, "configurations": tuple(found)})


_OF_PRICE = ("seconds", "exposed_s")


def price(model: Model, machine: Machine, configuration: ComparedConfiguration) -> Detail:
    """The current prediction of a profile for a configuration."""
    return price_layout(Job(model, machine, configuration.workload), Layout.of(configuration))


def priced_pairs(priced: Detail) -> Pairs:
    """A prediction without its interval, which is the profile's and not the configuration's."""
    return predicted_pairs(
        step_s=priced.iteration_s,
        compute_s=priced.compute_s,
        communication_s=priced.communication_s,
        exposed_communication_s=priced.exposed_communication_s,
        memory_bytes=float(priced.memory_bytes),
    )


def paper_communication_s(configuration: ComparedConfiguration, machine: Machine, *, world: int) -> float:
    """arXiv 2305.13525: ring bytes over equation 7's bandwidth, no latency; bytes and calls as sent.

    Equation 7 for a group that spans nodes: β_inter / min(G_node, ∏ inner axes), with each collective's β on the
    innermost and the outermost tier.
    """
    grid, total_s = configuration.grid.grid(), 0.0
    tiers_of: dict[str, tuple[Tier, ...]] = {kind: machine.tiers_of(kind) for kind in COLLECTIVE_KINDS}
    node_ranks = (machine.tiers[0].ranks or world) if len(machine.tiers) > 1 else world
    for term in configuration.terms:
        inner = grid.group_shape(term.axis, BUNDLED.folding).levels[0][1]
        sent = term.count * _PASSES.get(term.op, 1) * (term.group - 1) / term.group * term.bytes
        tiers = tiers_of.get(term.op, tiers_of["all_gather"])
        if inner * term.group <= node_ranks:
            total_s += sent / tiers[0].bandwidth_bytes_per_s
        else:
            total_s += sent / (tiers[-1].bandwidth_bytes_per_s / min(node_ranks, inner))
    return total_s
