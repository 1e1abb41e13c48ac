"""The one place rich consoles are made, and how a command that takes long says how long it still will.

On a terminal that is a bar on standard error; anywhere else, as in a Slurm log, a plain line now and then.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 200
SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_BARS = 30.0, 0.1

Tell: TypeAlias = Callable[[float, str], None]
"""Takes the share that is done, 0 to 1, and a few words on what is being done now."""


def stdout_console() -> Console:
    """A console on standard output: as wide as the terminal, else as $COLUMNS says, else 200; NO_COLOR is honoured."""
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(file=sys.stdout, highlight=False)
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdigit() and int(columns) > 0 else WIDTH_WITHOUT_TERMINAL
    # With TERM=dumb rich ignores the width unless it is given a height too.
    return Console(file=sys.stdout, highlight=False, width=width, height=100)


@contextmanager
def progress(what: str, *, shown: bool = True, clock: Callable[[], float] = time.monotonic) -> Iterator[Tell]:
    """Something that takes long; tell the function given how far it is. `shown=False`: nothing is said."""
    if not shown:
        yield lambda share, words: None
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _bar(what, clock) as tell:
            yield tell
    else:
        yield _lines(what, clock)


def left_words(elapsed_s: float, share: float) -> str:
    """Time left as 1:05 or 2:00:00, if it goes on as it did; empty before anything is done."""
    if share <= 0.0:
        return ""
    left_s = round(elapsed_s * (1.0 - min(share, 1.0)) / share)
    minutes, seconds = divmod(left_s, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d} left" if hours else f"{minutes}:{seconds:02d} left"


def _lines(what: str, clock: Callable[[], float]) -> Tell:
    """A line when half a minute has gone by since the last."""
    began_s = said_s = clock()

    def tell(share: float, words: str) -> None:
        nonlocal said_s
        now_s = clock()
        if now_s - said_s >= SECONDS_BETWEEN_LINES:
            said_s = now_s
            parts = [f"{share:.0%}", words, left_words(now_s - began_s, share)]
            print(f"{what}: {', '.join(part for part in parts if part)}", file=sys.stderr, flush=True)

    return tell


@contextmanager
def _bar(what: str, clock: Callable[[], float]) -> Iterator[Tell]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[left]}"))
    # No thread that draws: a process that has one may not enter a lab's namespaces.
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task, began_s = bar.add_task(what, total=1.0, left=""), clock()
        drawn_s = began_s - SECONDS_BETWEEN_BARS

        def tell(share: float, words: str) -> None:
            nonlocal drawn_s
            now_s = clock()
            if now_s - drawn_s >= SECONDS_BETWEEN_BARS:
                drawn_s, left = now_s, left_words(now_s - began_s, share)
                description = f"{what}: {words}" if words else what
                bar.update(task, completed=min(share, 1.0), description=description, left=left, refresh=True)

        yield tell
