"""One measurement beside its prediction, whatever it measures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from axonn_tune.accuracy.quality import Errors, errors_of


@dataclass(frozen=True)
class Judged:
    """A measured and a predicted value, in the unit of its kind (s or bytes); `why_not` says why there is none.

    group: what its error is counted under; large: whether it counts among the large ones.
    """

    id: str
    group: str
    measured: float | None
    predicted: float | None = None
    why_not: str = ""
    large: bool = True

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None where either is missing."""
        return None if self.predicted is None or not self.measured else self.predicted / self.measured - 1.0


def errors_by_group(judged: Iterable[Judged], *, large: bool = True) -> dict[str, Errors]:
    """Errors by group and of `all`; of the large ones only, unless told otherwise."""
    groups: dict[str, list[float]] = {}
    everything: list[float] = []
    for one in judged:
        if one.error is not None and (one.large or not large):
            groups.setdefault(one.group, []).append(one.error)
            everything.append(one.error)
    return {name: errors_of(found) for name, found in sorted(groups.items())} | {"all": errors_of(everything)}
