"""Runs the command line in this process, as the console script does."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from axonn_tune.cli.main import main


@dataclass(frozen=True)
class Finished:
    """Exit code, standard output, standard error."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """Standard output as strict JSON: NaN and Infinity are refused."""
        return json.loads(self.out, parse_constant=lambda name: pytest_fail(name))


def pytest_fail(name: str) -> None:
    """Refuse what JSON does not have."""
    raise AssertionError(f"{name} in JSON")


def run(line: str, words: Sequence[str] = ()) -> Finished:
    """Run `axonn-tune LINE`, whose words are split at spaces, with more words as they are."""
    # Streams of bytes, as a process has them.
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*line.split(), *words])
    return Finished(code, *(one.buffer.getvalue().decode() for one in (out, err)))


def good(line: str, words: Sequence[str] = ()) -> Finished:
    """The same for a command that has to succeed."""
    finished = run(line, words)
    assert finished.code == 0, finished.err
    return finished
