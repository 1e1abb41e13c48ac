"""Where benchmarks print tables: on standard output, whatever it is."""

from __future__ import annotations

import os
import sys

from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 200


def stdout_console() -> Console:
    """A console on standard output: as wide as the terminal, else as $COLUMNS says, else 200; NO_COLOR is honoured."""
    if sys.stdout.isatty():
        return Console(file=sys.stdout, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() and int(columns) > 0 else WIDTH_WITHOUT_TERMINAL
    # With TERM=dumb rich ignores the width unless it is given a height too.
    return Console(file=sys.stdout, highlight=False, width=width, height=100)
