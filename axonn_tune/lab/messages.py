"""What a lab's user and its forker say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """One run: a function as `module:name` with each rank's arguments, or a command."""

    each: list[tuple[Any, ...]]
    function: str | None = None
    command: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    path: tuple[str, ...] = ()
    realtime: bool = False
    timeout_s: float | None = None


@dataclass(frozen=True)
class Outcome:
    """How one rank ended. code: negative for a signal; place: 0 for the first rank to end; error: what it raised."""

    rank: int
    code: int
    place: int
    value: Any = None
    error: str | None = None
