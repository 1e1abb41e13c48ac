"""Whether a run fits: one line, and its keys in JSON."""

from __future__ import annotations

from typing import NamedTuple

from axonn_tune.cost.price import PricedLayout
from axonn_tune.program.memory import room_of
from axonn_tune.report.output import Json, fields_of
from axonn_tune.units import GIB, show_seconds


class SmallestChange(NamedTuple):
    """The change with which a run fits that costs least time: arguments, memory of a GPU and step, s."""

    words: str
    memory_bytes: float
    step_s: float


def fit_line(priced: PricedLayout, change: SmallestChange | None = None) -> str:
    """`fits: 61.2 of 73.1 GiB`; of a run that does not, with the smallest change."""
    needed_bytes, limit_bytes = priced.memory_bytes, priced.memory_limit_bytes
    room = room_of(needed_bytes, limit_bytes)
    digits = 1 if abs(needed_bytes - limit_bytes) > GIB / 10 else 2
    sizes = f"{needed_bytes / GIB:.{digits}f} of {limit_bytes / GIB:.{digits}f} GiB"
    if room != "does not fit":
        return f"{room}: {sizes}"
    if change is None:
        return f"{room}: needs {sizes}; no change tried makes it fit"
    memory = f"{change.memory_bytes / GIB:.1f} GiB"
    return f"{room}: needs {sizes}; smallest change: {change.words} ({memory}, {show_seconds(change.step_s)})"


def fit_json(priced: PricedLayout, change: SmallestChange | None = None) -> Json:
    """The same with every digit."""
    return {
        "room": room_of(priced.memory_bytes, priced.memory_limit_bytes),
        "needed_bytes": priced.memory_bytes,
        "limit_bytes": priced.memory_limit_bytes,
        "smallest_change": change and fields_of(change, change._fields),
    }
