"""Outputs of commands that pages show: `python -m tools.outputs [--check] [PAGE…]` runs each and rewrites what it gave.

A block of text below `<!-- prints: axonn-tune … -->` is what the command prints on standard output. A table below
`<!-- rows: axonn-tune … | LABEL: options | … -->` has a row for each set of options: the first of its ranking, with the
columns of `COLUMNS` whose headings the table has; below `compares:` the steps of the strategies that it names, and
those of `COMPARED`. `slowly` in front (`slowly prints:`) leaves it to `make nightly`.
"""

from __future__ import annotations

import io
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import axonn_tune
from axonn_tune.cli.main import main
from axonn_tune.cost.price import PricedLayout
from axonn_tune.files import write_text_atomically
from axonn_tune.report.output import markdown_table, words
from axonn_tune.units import GIB

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
SHOWN = re.compile(
    r"<!-- (?P<slowly>slowly )?(?P<kind>prints|rows|compares): (?P<line>[^>]*?) -->\n\n?"
    r"(?P<shown>```text\n.*?^```\n|(?:^\|[^\n]*\n)+)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Shown:
    """What a page shows of a command: where it stands, the words of the marker, and whether it takes long."""

    page: Path
    kind: str
    line: str
    shown: str
    slowly: bool

    def __str__(self) -> str:
        return f"{self.page.name}: {' '.join(self.line.split())}"

    def now(self) -> str:
        """What the command gives today, as the page has it."""
        if self.kind == "prints":
            return f"```text\n{printed(' '.join(self.line.split())).rstrip()}\n```\n"
        headings = [one.strip() for one in self.shown.splitlines()[0].strip("|").split("|")]
        return rows(self.line, headings=headings, compared=self.kind == "compares")


def printed(line: str) -> str:
    """Standard output of a command line, in lines of 100 characters."""
    out, wide = io.StringIO(), mock.patch.dict(os.environ, {"COLUMNS": "100"})
    with redirect_stdout(out), redirect_stderr(io.StringIO()), wide:
        code = main(shlex.split(line)[1:])
    assert code == 0, f"{line}: exit code {code}"
    return out.getvalue()


def _layout(best: PricedLayout) -> str:
    sizes = best.job.framework.layout({**best.grid.by_axis, "chunks": best.chunks})
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one GPU"


def _digits(seconds: float) -> str:
    return f"{seconds:.{max(0, 2 - math.floor(math.log10(seconds)))}f}"


def _interval(best: Any) -> str:  # noqa: ANN401 - with its interval
    return f"{_digits(best.low_s)} to {_digits(best.high_s)}"


COLUMNS: Mapping[str, Callable[[Any, Any], str]] = {
    "layout": lambda best, first: _layout(best),
    "recompute": lambda best, first: best.recomputed,
    "step, s": lambda best, first: _digits(best.iteration_s),
    "80% interval, s": lambda best, first: _interval(best),
    "exposed communication, s": lambda best, first: f"{best.exposed_communication_s:.2f}",
    "memory, GiB": lambda best, first: f"{best.memory_bytes / GIB:.0f}",
    "MFU": lambda best, first: f"{best.mfu:.1%}",
    "less than the first": lambda best, first: (
        "" if best is first else f"{1.0 - best.iteration_s / first.iteration_s:.1%}"
    ),
}
"""Columns of a table by heading, of the best of each row and of the first row."""


def rows(line: str, *, headings: list[str], compared: bool) -> str:
    """The table: a row for each label, with its first configuration, or with a comparison."""
    base, *labelled = (" ".join(one.split()) for one in line.split("|"))
    named = [one.partition(": ") for one in labelled]
    given = [(label, given_in(f"{base} {options}")) for label, _, options in named]
    if compared:
        both = [(label, axonn_tune.compare(**one)) for label, one in given]
        cells = [[label, *(compared_cell(name, found) for name in headings[1:])] for label, found in both]
    else:
        best = [(label, axonn_tune.explain(**one).priced) for label, one in given]
        cells = [[label, *(COLUMNS[name](one, best[0][1]) for name in headings[1:])] for label, one in best]
    return markdown_table([words("", name) for name in headings], cells)


def compared_cell(name: str, found: Any) -> str:  # noqa: ANN401 - a comparison
    """The step of a strategy, s, or a column of `COMPARED`."""
    if name in COMPARED:
        return COMPARED[name](found)
    return next(_digits(one.prediction.iteration_s) for one in found if one.name == name)


COMPARED: Mapping[str, Callable[[Any], str]] = {
    "Megatron-Core's step vs. 4D": lambda found: f"{found.comparison.gain(found['megatron-core']):+.1%}",
    "gain of overlap": lambda found: f"{found.comparison.overlap.gain:.1%}",
}


def given_in(line: str) -> dict[str, Any]:
    """Options as they are written, as keywords."""
    given: dict[str, Any] = {}
    # Of flags the value is empty.
    options = [word for one in shlex.split(line)[1:] for word in ([one, ""] if one == "--same-kernels" else [one])]
    for name, value in zip(options[::2], options[1::2], strict=True):
        key = name.removeprefix("--").replace("-", "_")
        given[key] = (
            [*given.get("set", []), value] if key == "set" else int(value) if value.isdecimal() else value or True
        )
    return given


def shown_on(page: Path) -> Iterator[Shown]:
    """What a page shows of commands, in order."""
    for one in SHOWN.finditer(page.read_text(encoding="utf-8")):
        yield Shown(page, one["kind"], one["line"], one["shown"], bool(one["slowly"]))


def rewritten(page: Path) -> str:
    """The page with what its commands give today."""
    text = page.read_text(encoding="utf-8")
    for one in shown_on(page):
        text = text.replace(one.shown, one.now())
    return text


def run(arguments: list[str]) -> int:
    """Rewrite the pages, or say which differ."""
    named = [one for one in arguments if one != "--check"]
    stale = 0
    for page in PAGES:
        if named and page.name not in named:
            continue
        text = rewritten(page)
        if text != page.read_text(encoding="utf-8"):
            stale += 1
            print(f"{page.name}: differs from what its commands print" if "--check" in arguments else f"wrote {page}")
            if "--check" not in arguments:
                write_text_atomically(page, text)
    return int(stale > 0 and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
