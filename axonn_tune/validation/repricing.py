"""What else could have been predicted of configurations that were measured: by another profile, or the paper's rule."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from axonn_tune.cost.single import Configuration, Pricing, Term, price_configuration
from axonn_tune.grid import Grid, split_axes
from axonn_tune.specs.machine import COLLECTIVE_KINDS, Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import (
    BaselineConfiguration,
    MeasuredConfiguration,
    MeasuredTerm,
    Measurements,
    PredictedStep,
)
from axonn_tune.validation.comparison import Pair, Quality, quality

Settled: TypeAlias = MeasuredConfiguration | BaselineConfiguration
"""A configuration of which nothing is left open."""

_PASSES: dict[str, int] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
PAPER = "paper, true bytes"


def repriced(measurements: Measurements, machine: Machine) -> Measurements:
    """The same measurements with the predictions that a profile makes now."""
    found = tuple(_repriced(measurements, machine, one) for one in measurements.configurations)
    return measurements.model_copy(update={"machine": machine, "configurations": found})


def price(model: Model, machine: Machine, configuration: Settled) -> Pricing:
    """What a profile makes of a configuration now."""
    settled = Configuration(
        configuration.grid.grid(), configuration.micro_batch, configuration.recompute, configuration.kept_layers
    )
    return price_configuration(model, machine, configuration.workload, settled)


def predicted_step(priced: Pricing) -> PredictedStep:
    """A prediction without its interval, which is the profile's and not the configuration's."""
    return PredictedStep(
        step_s=priced.iteration_s,
        low_s=None,
        high_s=None,
        compute_s=priced.compute_s,
        communication_s=priced.communication_s,
        exposed_communication_s=priced.exposed_communication_s,
        memory_bytes=float(priced.memory.total_bytes),
    )


def _repriced(
    measurements: Measurements, machine: Machine, configuration: MeasuredConfiguration
) -> MeasuredConfiguration:
    priced = price(measurements.model, machine, configuration)
    by_name = {(term.op, term.axis, term.phase, term.layer, round(term.size_bytes)): term for term in priced.terms}
    terms = tuple(
        _with(term, by_name.get((term.op, term.axis, term.phase, term.layer, term.bytes)))
        for term in configuration.terms
    )
    return configuration.model_copy(update={"predicted": predicted_step(priced), "terms": terms})


def _with(measured: MeasuredTerm, priced: Term | None) -> MeasuredTerm:
    return measured.model_copy(
        update={
            "predicted_s": None if priced is None else priced.seconds,
            "predicted_exposed_s": None if priced is None else priced.exposed_s,
        }
    )


@dataclass(frozen=True)
class Network:
    """What the paper's rule knows: ranks of a node, and each collective's β inside and between nodes, bytes/s."""

    node_ranks: int
    inside: dict[str, float]
    between: dict[str, float]

    @classmethod
    def of(cls, machine: Machine, *, world: int) -> Network:
        """From a profile's innermost and outermost tier, as each collective finds them."""
        tiers = {kind: machine.tiers_of(kind) for kind in COLLECTIVE_KINDS}
        return cls(
            node_ranks=(machine.tiers[0].ranks or world) if len(machine.tiers) > 1 else world,
            inside={kind: found[0].bandwidth_bytes_per_s for kind, found in tiers.items()},
            between={kind: found[-1].bandwidth_bytes_per_s for kind, found in tiers.items()},
        )

    def bandwidth(self, op: str, *, inner: int, group: int) -> float:
        """Equation 7: β_inter / min(G_node, ∏ inner axes) for a group that spans nodes, bytes/s."""
        if inner * group <= self.node_ranks:
            return self.inside[op]
        return self.between[op] / min(self.node_ranks, inner)


def paper_communication_s(configuration: MeasuredConfiguration, network: Network) -> float:
    """arXiv 2305.13525: ring bytes over equation 7's bandwidth, no latency; bytes and calls are those really sent."""
    grid = configuration.grid.grid()
    return sum(_paper_term_s(term, grid, network) for term in configuration.terms)


def _paper_term_s(term: MeasuredTerm, grid: Grid, network: Network) -> float:
    inner = min(grid.stride(axis) for axis in split_axes(term.axis) if grid.axis_size(axis) > 1)
    sent = term.count * _PASSES[term.op] * (term.group - 1) / term.group * term.bytes
    return sent / network.bandwidth(term.op, inner=inner, group=term.group)


def paper_quality(measurements: Measurements) -> Quality:
    """How well the paper's rule predicts the communication that was measured."""
    network = Network.of(measurements.machine, world=measurements.place.ranks)
    pairs = []
    for configuration in measurements.configurations:
        measured_s = median(run.communication_s for run in configuration.runs)
        pairs.append(Pair(paper_communication_s(configuration, network), measured_s))
    return quality(PAPER, pairs)
