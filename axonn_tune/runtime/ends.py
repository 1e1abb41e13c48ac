"""One exit code out of many: how the ranks of a run have ended, as one process has to end."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from axonn_tune.errors import TrainingFailedError


def exit_code_of(ended: Sequence[tuple[int, int]]) -> int:
    """That of a failed training before any other, then the first to be said. ended: (rank, code) by time.

    A negative code is the signal that a rank was ended by; if no rank could say why, this does.
    """
    lost = sorted(rank for rank, code in ended if code < 0)
    said = [code for _, code in ended if code > 0]
    if lost and not said:
        print(f"Error: rank {', '.join(map(str, lost))}: ended by a signal", file=sys.stderr)
    failed = TrainingFailedError.exit_code
    return failed if failed in said or (lost and not said) else next(iter(said), 0)
