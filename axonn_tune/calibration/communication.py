"""α and β of each collective and tier, fitted to measured collectives over groups of a machine's shapes.

The cost model's own formulas give the factors: a collective's time is launch + Σ hops_t·α_t + bytes·c_t/β_t,
where t in the last term is the tier that is tightest; which one that is follows from the fit, so it is
done again until it stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from axonn_tune.calibration.least_squares import Row, Solution, solve
from axonn_tune.cost.collectives import lines, route
from axonn_tune.grid import GroupShape
from axonn_tune.specs.machine import Machine, Tier
from axonn_tune.specs.points import CollectiveProbe, Probe, TransferProbe, collective_or_message

TRANSFER = "transfer"
"""Beside the collectives, what else is sent: plain messages."""
LAUNCH = "launch_s"
_ROUNDS = 8
_NO_LATENCY_US, _ENDLESS_GB_PER_S = 0.0, 1e15
_HELD_OUT = 4
"""Every fourth probe is left out to check the fit of the others, among which its shape and size occur again."""


@dataclass(frozen=True)
class CommunicationFit:
    """Launch, α and β in SI units by `(transport, tier)`; errors of predicted / measured - 1 by probe."""

    launch_s: float
    latency_s: Mapping[tuple[str, int], float]
    bandwidth_bytes_per_s: Mapping[tuple[str, int], float]
    errors: Mapping[Probe, float]
    outliers: tuple[Probe, ...]
    held_out_errors: tuple[float, ...] = ()

    @property
    def held_out_error(self) -> float | None:
        """Mean of what was held out, None without any."""
        errors = [abs(error) for error in self.held_out_errors]
        return float(f"{sum(errors) / len(errors):.4g}") if errors else None


def fit_communication(measured: Mapping[Probe, float], machine: Machine, *, world: int | None) -> CommunicationFit:
    """Fit all transports and tiers at once; `machine` gives tiers and algorithms, its rates are of no account.

    world: ranks that took part, or None where each group was a world of its own. The fit of three quarters
    is judged by the last quarter before all are fitted.
    """
    probes: list[Probe] = [probe for probe in measured if collective_or_message(probe)]
    kept, left_out = _split(probes)
    held_out: tuple[float, ...] = ()
    if left_out:
        part = _fit(kept, measured, machine, world)
        held_out = tuple(part.predict(probe) / measured[probe] - 1.0 for probe in left_out if part.knows(probe))
    whole = _fit(probes, measured, machine, world)
    errors: dict[Probe, float] = dict(zip(probes, whole.solution.errors, strict=True))
    latency, bandwidth = whole.rates(measured)
    return CommunicationFit(
        whole.solution.values[LAUNCH],
        latency,
        bandwidth,
        errors,
        tuple(probes[row] for row in whole.solution.outliers),
        held_out,
    )


def _split(probes: Sequence[Probe]) -> tuple[list[Probe], list[Probe]]:
    """Probes to fit, and every fourth to check with."""
    left_out = list(probes[2::_HELD_OUT])
    chosen = set(left_out)
    return [probe for probe in probes if probe not in chosen], left_out


@dataclass(frozen=True)
class _Shares:
    """What a probe's time is made of: α by tier, and time per 1/β by tier, of which the largest counts."""

    transport: str
    hops: dict[int, float]
    loads: dict[int, float]

    def row(self, tight: int) -> Row:
        """Factors of the unknowns, with `tight` the tier whose bandwidth counts."""
        found = {LAUNCH: 1.0, _beta(self.transport, tight): self.loads[tight]}
        return found | {_alpha(self.transport, tier): count for tier, count in self.hops.items() if count}


@dataclass(frozen=True)
class _Fitted:
    """A solution with what predicts from it."""

    shares: Mapping[Probe, _Shares]
    solution: Solution

    def knows(self, probe: Probe) -> bool:
        """Whether the transport and the tiers of a probe were among those fitted."""
        shares = self.shares[probe]
        return all(name in self.solution.values for tier in shares.loads for name in shares.row(tier))

    def tight(self, probe: Probe) -> int:
        """The tier whose bandwidth counts."""
        shares = self.shares[probe]
        values = self.solution.values
        return max(shares.loads, key=lambda tier: shares.loads[tier] * values.get(_beta(shares.transport, tier), 0.0))

    def predict(self, probe: Probe) -> float:
        """Time of a call, s."""
        row = self.shares[probe].row(self.tight(probe))
        return sum(self.solution.values[name] * factor for name, factor in row.items())

    def rates(
        self, measured: Mapping[Probe, float]
    ) -> tuple[dict[tuple[str, int], float], dict[tuple[str, int], float]]:
        """α and β by transport and tier, for those that were measured.

        Where another tier is always tighter, or noise hides that bytes take time, β is the largest that any
        single point shows.
        """
        latency: dict[tuple[str, int], float] = {}
        bandwidth: dict[tuple[str, int], float] = {}
        values = self.solution.values
        for probe, shares in self.shares.items():
            for tier, load in shares.loads.items():
                key = (shares.transport, tier)
                latency[key] = values.get(_alpha(*key), 0.0)
                fitted = values.get(_beta(*key), 0.0)
                bandwidth[key] = 1.0 / fitted if fitted else max(bandwidth.get(key, 0.0), load / measured[probe])
        return latency, bandwidth


def _fit(chosen: Sequence[Probe], measured: Mapping[Probe, float], machine: Machine, world: int | None) -> _Fitted:
    """Fit some probes, until the tightest tiers stay the same."""
    shares = {
        probe: _shares(probe, machine, world or _size(probe)) for probe in measured if collective_or_message(probe)
    }
    times = [measured[probe] for probe in chosen]
    tight = {probe: max(shares[probe].loads) for probe in chosen}
    for _ in range(_ROUNDS):
        fitted = _Fitted(shares, solve([shares[probe].row(tight[probe]) for probe in chosen], times))
        now = {probe: fitted.tight(probe) for probe in chosen}
        if now == tight:
            break
        tight = now
    return fitted


def _size(probe: Probe) -> int:
    assert isinstance(probe, CollectiveProbe), "only collectives have a world of their own"
    return probe.group


def _shares(probe: Probe, machine: Machine, world: int) -> _Shares:
    """Factors of every α and 1/β, by asking the cost model with one of them at a time."""
    if isinstance(probe, TransferProbe):
        return _transfer_shares(probe, machine.tiers, world)
    assert isinstance(probe, CollectiveProbe), "the other kind of probe that sends"
    shape = GroupShape(((probe.group, probe.stride),))
    hops, loads = {}, {}
    for number in range(route(shape, machine.tiers, world).outermost + 1):
        slow = machine.model_copy(update={"tiers": _only(machine.tiers, number)})
        line = lines(probe.op, route(shape, slow.tiers, world), slow)[0]
        hops[number] = line.latency_s - slow.library.launch_s
        loads[number] = probe.size_bytes / line.bandwidth_bytes_per_s
    return _Shares(probe.op, hops, loads)


def _transfer_shares(probe: TransferProbe, tiers: Sequence[Tier], world: int) -> _Shares:
    """A message to a rank `stride` further on: one hop; a domain sends what leaves it."""
    hops, loads = {0: 1.0}, {0: float(probe.size_bytes)}
    for number in range(1, len(tiers)):
        domain = tiers[number - 1].ranks or world
        if domain < world:
            hops = {number: 1.0}
            loads[number] = float(probe.size_bytes) * min(probe.stride, domain)
    return _Shares(TRANSFER, hops, loads)


def _only(tiers: Sequence[Tier], number: int) -> tuple[Tier, ...]:
    """Tiers that cost nothing but one: 1 s a hop, 1 byte/s."""
    return tuple(
        tier.model_copy(
            update={
                "latency_us": 1e6 if position == number else _NO_LATENCY_US,
                "bandwidth_gb_per_s": 1e-9 if position == number else _ENDLESS_GB_PER_S,
                "measured": None,
                "collectives": None,
            }
        )
        for position, tier in enumerate(tiers)
    )


def _alpha(transport: str, tier: int) -> str:
    return f"alpha:{transport}:{tier}"


def _beta(transport: str, tier: int) -> str:
    return f"beta:{transport}:{tier}"
