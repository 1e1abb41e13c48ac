"""A machine profile whose network is fitted to logs of other benchmarks; everything else is another profile's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from datetime import UTC, datetime

from axonn_tune import __version__
from axonn_tune.calibration.communication import CommunicationFit, fit_communication
from axonn_tune.calibration.logs import Log, LogRow
from axonn_tune.calibration.profile import Calibration, communication_uncertainty, fitted_tier, rounded
from axonn_tune.calibration.words import probe_words
from axonn_tune.errors import UsageError
from axonn_tune.specs.machine import COLLECTIVE_KINDS, Library, Machine, Measurement, Protocol, Source
from axonn_tune.specs.points import CollectiveProbe, Probe

_LEAST_POINTS = 4


def profile_from_logs(logs: Sequence[Log], base: Machine, *, name: str) -> Calibration:
    """Refit the tiers that the logs cross as their outermost; UsageError if they fit no tier of `base`."""
    rows = [row for log in logs for row in log.rows]
    measured = _times(rows, base)
    if len(measured) < _LEAST_POINTS:
        raise UsageError(f"{len(measured)} different sizes and groups are too few to fit; give more logs")
    outline = base.model_copy(update={"library": _library(base, logs)})
    fit = fit_communication(measured, outline, world=None)
    source = Source(kind="fitted", source=f"{logs[0].library}, {len(rows)} results of logs")
    crossed = {_outermost(row, base) for row in rows}
    tiers = tuple(
        fitted_tier(tier, number, fit, source) if number in crossed else tier for number, tier in enumerate(base.tiers)
    )
    library = outline.library.model_copy(
        update={"launch_us": rounded(fit.launch_s * 1e6), "sources": outline.library.sources | {"launch_us": source}}
    )
    uncertainty = base.uncertainty.model_copy(
        update={
            "communication": communication_uncertainty(fit),
            "sources": base.uncertainty.sources | {"communication": source},
        }
    )
    document = base.model_copy(
        update={
            "name": name,
            "description": f"{base.name} with its network fitted to logs of {logs[0].library}",
            "tiers": tiers,
            "library": library,
            "uncertainty": uncertainty,
            "paper": None,
            "measured": _measurement(logs, rows, base, fit),
        }
    )
    machine = Machine.model_validate(document.model_dump(by_alias=True, exclude_unset=True))
    return Calibration(machine, fit, None, measured)


def _times(rows: Sequence[LogRow], base: Machine) -> dict[Probe, float]:
    """Median time of each collective, group and size."""
    samples: dict[Probe, list[float]] = {}
    for row in rows:
        _outermost(row, base)
        if row.ranks > 1 and row.size_bytes > 0:
            probe = CollectiveProbe(op=row.op, group=row.ranks, stride=1, size_bytes=row.size_bytes)
            samples.setdefault(probe, []).append(row.seconds)
    return {probe: statistics.median(found) for probe, found in samples.items()}


def _outermost(row: LogRow, base: Machine) -> int:
    """The outermost tier that a run crosses; UsageError unless its nodes are filled as the profile's are."""
    inner = base.tiers[0].ranks
    if row.nodes > 1 and inner is not None and row.ranks != row.nodes * inner:
        raise UsageError(
            f"a log has {row.ranks} ranks on {row.nodes} nodes, but nodes of {base.name} hold {inner}: "
            "give the profile of that machine as --machine"
        )
    sizes = [tier.ranks for tier in base.tiers]
    return next((number for number, ranks in enumerate(sizes) if ranks is None or row.ranks <= ranks), len(sizes) - 1)


def _library(base: Machine, logs: Sequence[Log]) -> Library:
    """One line of a ring per collective, which is what the fit is of."""
    return base.library.model_copy(
        update={
            "name": logs[0].library.split()[0],
            "version": logs[0].library,
            "algorithms": dict.fromkeys(COLLECTIVE_KINDS, ("ring",)),
            "protocols": (Protocol(name="fitted", latency_factor=1.0, bandwidth_factor=1.0),),
            "sources": {
                "launch_us": Source(kind="fitted", source="to be fitted"),
                "protocols": Source(kind="fitted", source="one line for all sizes"),
            },
        }
    )


def _measurement(logs: Sequence[Log], rows: Sequence[LogRow], base: Machine, fit: CommunicationFit) -> Measurement:
    return Measurement(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=__version__,
        hosts=tuple(dict.fromkeys(host for log in logs for host in log.hosts)),
        device=next((log.device for log in logs if log.device), base.accelerator.name),
        ranks=max(row.ranks for row in rows),
        network=f"logs of {logs[0].library}",
        samples=len(rows),
        held_out_error=fit.held_out_error,
        outliers=tuple(probe_words(probe) for probe in fit.outliers),
    )
