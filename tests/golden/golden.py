"""Golden outputs: what every command prints and writes, held against recorded text.

`make golden` shows what moved against the recording; `make golden ARGS=--write` records it anew. All commands of
`commands.txt` run in one process. Masked are seconds that a search took, dates, versions, hashes and paths, nothing
else; a bundled JavaScript library counts as a version.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from axonn_tune import __version__
from axonn_tune.cli.main import main

HERE = Path(__file__).parent
OUTPUTS = HERE / "outputs"
FIXTURES = HERE.parent / "fixtures"
CLOSE = 1e-9
"""Numbers that differ by less than this share are equal on another processor: fits use its linear algebra."""
SLOWLY = "slowly "
LARGE = 20_000
"""Characters from which on a recording is stored compressed."""
LINES = 12
"""Moved lines that are shown of each file."""


def _on_one_line(found: re.Match[str]) -> str:
    return " " + " ".join(found.group().split())


MASKS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    (re.compile(r'("seconds": )[\d.e-]+'), r"\1(seconds)"),
    (re.compile(r"\bin \d+(\.\d+)? m?s(?=[.\n])"), "in (seconds)"),
    # Where the sentence behind it breaks depends on how long the seconds are written.
    (re.compile(r"(?<=in \(seconds\)\.)( [^:\n]*\n?[^:\n]*:\s+--top\s+0\s+ranks\s+all\.)"), _on_one_line),
    (re.compile(r"^.*\d:\d\d left\r?\n", re.M), ""),
    (re.compile(r"\b\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?(Z|\+00:00)?)?"), "(date)"),
    (re.compile(r"(?<![\w.])(sha256:)?(?=[0-9a-f]*[a-f])[0-9a-f]{12,64}\b"), "(hash)"),
    (re.compile(re.escape(__version__)), "(version)"),
    # Rows that name their model have floors of their own, in tests/published.
    (re.compile(r',\n "more": \{.*', re.S), "\n}"),
    (re.compile(r"(<script[^>]* id=\"plotly\">)[^<]*"), r"\1(plotly.js)"),
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")


def commands() -> dict[str, str]:
    """The command lines, by name."""
    return {name.removeprefix(SLOWLY): words for name, words in _lines_of_commands()}


def slow(name: str) -> bool:
    """Whether an output is of a command that `make test` leaves to `make nightly`."""
    return SLOWLY + re.split(r"--|\.txt$", name)[0] in dict(_lines_of_commands())


def _lines_of_commands() -> Iterator[tuple[str, str]]:
    for line in (HERE / "commands.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, words = line.partition(": ")
            yield name, words


def masked(text: str, folder: Path) -> str:
    """The text without what differs between two equal runs."""
    for place, word in ((folder, "(folder)"), (FIXTURES, "(fixtures)"), (HERE.parents[1], "(checkout)")):
        text = text.replace(str(place), word)
    for pattern, instead in MASKS:
        text = pattern.sub(instead, text)
    return text


def outputs(only: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Name and masked text of what each command prints, with its exit code, and of each file that it writes; only: for
    a command's name, whether it is run."""
    fixtures = {name: FIXTURES / name for name in ("commands", "logs", "diagnose", "v2")}
    with (
        tempfile.TemporaryDirectory() as given,
        chdir(given),
        mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}),
    ):
        folder = Path(given).resolve()
        for name, words in commands().items():
            if not only(name):
                continue
            before = _written(folder)
            printed, said = io.StringIO(), io.StringIO()
            with redirect_stdout(printed), redirect_stderr(said):
                code = main(shlex.split(words.format_map(fixtures)))
            text = f"exit code {code}\n--- stdout\n{printed.getvalue()}--- stderr\n{said.getvalue()}"
            yield f"{name}.txt", masked(text, folder)
            for path, changed in _written(folder).items():
                if before.get(path) != changed:
                    yield f"{name}--{path.name}.txt", masked(path.read_text(encoding="utf-8"), folder)


def _written(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}


def recorded() -> dict[str, str]:
    """The recorded texts, by name."""
    return {
        path.name.removesuffix(".gz"): (
            gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text(encoding="utf-8")
        )
        for path in sorted(OUTPUTS.iterdir())
    }


def write(found: Mapping[str, str]) -> None:
    """Record the texts; what no command gives any more goes. A recording that is equal is not touched."""
    OUTPUTS.mkdir(exist_ok=True)
    before = recorded()
    for path in OUTPUTS.iterdir():
        if found.get(name := path.name.removesuffix(".gz")) != before.get(name):
            path.unlink()
    for name, text in found.items():
        if before.get(name) == text:
            continue
        if len(text) > LARGE:
            (OUTPUTS / f"{name}.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            (OUTPUTS / name).write_text(text, encoding="utf-8")


def largest_change(old: str, new: str) -> float | None:
    """Largest relative change of a number; None where other text moved too."""
    if old == new:
        return 0.0
    if NUMBER.sub("#", old) != NUMBER.sub("#", new):
        return None
    pairs = zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)
    differing = ((float(one), float(two)) for one, two in pairs if one != two)
    return max((abs(one - two) / max(abs(one), abs(two)) for one, two in differing), default=0.0)


def moved(old: str | None, new: str | None) -> list[str]:
    """What moved in one text: a first line that says how much, then some of its lines. Empty where nothing did."""
    if old == new:
        return []
    if old is None or new is None:
        return ["new" if old is None else "gone"]
    change = largest_change(old, new)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("old", "new")]
        for file, text in zip(files, (old, new), strict=True):
            file.write_text("\n".join(_lines(text)) + "\n", encoding="utf-8")
        found = subprocess.run(
            ["diff", "--speed-large-files", *files], capture_output=True, text=True, check=False
        ).stdout
    shown = [line[:200] for line in found.splitlines() if line.startswith(("<", ">"))]
    kind = "text" if change is None else f"numbers alone, by at most {change:.2g}"
    return [f"{len(shown)} lines moved: {kind}", *shown[:LINES]]


def _lines(text: str) -> list[str]:
    """Lines, those of documents without line breaks cut behind each value."""
    lines = text.splitlines()
    return text.replace(",", ",\n").splitlines() if max(map(len, lines), default=0) > LARGE else lines


if __name__ == "__main__":
    writing = "--write" in sys.argv[1:]
    chosen = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    now, held = dict(outputs(lambda name: bool(re.search(chosen, name)))), recorded() if OUTPUTS.exists() else {}
    differing = 0
    for each in sorted({*now, *(() if chosen else held)}):
        if report := moved(held.get(each), now.get(each)):
            differing += 1
            print(f"{each}: ", *report, sep="\n  ")
    print(f"{differing} of {len(now)} outputs moved")
    if writing:
        write({**(held if chosen else {}), **now})
    sys.exit(1 if differing and not writing else 0)
