"""One exit code out of many: how the ranks of a run have ended, as one process has to end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from axonn_tune.errors import TrainingFailedError


def exit_code_of(ended: Sequence[tuple[int, int]]) -> int:
    """That of a failed training before any other, then the first to be said. ended: (rank, code) by time.

    A negative code is the signal that a rank was ended by.
    """
    said = [code for _, code in ended if code > 0]
    failed = TrainingFailedError.exit_code
    return failed if failed in said or lost(ended) else next(iter(said), 0)


def lost(ended: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranks that a signal ended, lowest first, with its number, if no rank could say why the run ended."""
    if any(code > 0 for _, code in ended):
        return []
    return sorted((rank, -code) for rank, code in ended if code < 0)


def say_if_lost(ended: Sequence[tuple[int, int]]) -> None:
    """Say it for the ranks that could not, on standard error."""
    ranks = [f"rank {rank}: ended by {_signal_name(number)}" for rank, number in lost(ended)]
    if ranks:
        print(f"Error: {'; '.join(ranks)}", file=sys.stderr)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
