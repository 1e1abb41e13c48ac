"""Every error a user can meet, as one tree; each carries the exit code the command line ends with.

::

    AxonnTuneError            1  (never raised itself)
    ├── UsageError            2  an option or argument is wrong
    ├── DocumentError         2  a YAML document is wrong: all problems at once, with file and line
    ├── UnknownNameError      2  no such model or machine, with the nearest valid names
    ├── NothingFeasibleError  3  no configuration satisfies the constraints
    ├── CheckFailedError      4  a validation or regression check failed
    ├── EnvironmentProblem    5  something this needs is missing here, or the disk is full
    └── TrainingFailedError   6  a rank was lost, a hang, a non-finite loss, an unusable checkpoint
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BOLD, GREEN, BLUE, YELLOW, RESET = COLORS = ("\x1b[1m", "\x1b[1;32m", "\x1b[34m", "\x1b[33m", "\x1b[0m")
"""What this tool tells terminals."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tabs and line breaks, those that turn the direction of what follows, and halves of characters:
terminals obey them, no text needs them."""


class AxonnTuneError(Exception):
    """Base of all errors meant for a user; `exit_code` is what the process ends with.

    advice: what to do about it, for whoever stands at the command line.
    """

    exit_code = 1
    advice = ""


class UsageError(AxonnTuneError):
    """An option or argument cannot be used as given."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One thing wrong in a document: where (line from 1, or None; dotted path) and what.

    file: where it is in another file that the document names; "" for the document itself.
    """

    path: str
    message: str
    line: int | None = None
    file: str = ""


class DocumentError(AxonnTuneError):
    """A document is wrong; `problems` lists everything found, not only the first."""

    exit_code = 2

    def __init__(self, source: str, problems: Iterable[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__("\n".join(self._lines()))

    def _lines(self) -> Iterable[str]:
        for problem in self.problems:
            source = problem.file or self.source
            place = source if problem.line is None else f"{source}:{problem.line}"
            yield f"{place}: {problem.path}: {problem.message}" if problem.path else f"{place}: {problem.message}"


_ADVICE = {
    "machine": (
        "Profiles of your own: `axonn-tune calibrate -o mine.yaml` measures the machine it runs on (under srun or\n"
        "torchrun a cluster); `axonn-tune learn LOG -o mine.yaml` takes one from logs of runs or of nccl-tests. Or\n"
        "write one that says what differs from the nearest: extends: dgx-h100, as docs/machines.md shows. Then give\n"
        "--machine mine.yaml."
    ),
    "model": (
        "Models of your own: `axonn-tune models import config.json -o mine.yaml` takes a Hugging Face config, or the\n"
        "script of a run with Megatron-LM or torchtitan.\n"
        "Or write a file that says what differs from the nearest: extends: 20b. Then give --model mine.yaml."
    ),
}


class UnknownNameError(AxonnTuneError):
    """An unknown model or machine name; the message has the nearest valid ones.

    hint: text instead of the nearest name.
    """

    exit_code = 2

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        self.kind, self.name, self.known = kind, name, sorted(known)
        self.advice = _ADVICE.get(kind, "")
        super().__init__(f"no {kind} named {name!r}{hint or suggest(name, self.known)}; known: {', '.join(self.known)}")


class NothingFeasibleError(AxonnTuneError):
    """No configuration satisfies every constraint; the message names the binding one."""

    exit_code = 3


class CheckFailedError(AxonnTuneError):
    """A validation or regression check did not hold."""

    exit_code = 4


class EnvironmentProblem(AxonnTuneError):
    """This machine lacks something the command needs, or a file could not be written."""

    exit_code = 5


class TrainingFailedError(AxonnTuneError):
    """A training run ended without finishing its steps."""

    exit_code = 6


def error_of(exit_code: int) -> type[AxonnTuneError]:
    """The kind of error that a process of this tool ended with; TrainingFailedError for what no other kind has."""
    kinds = (UsageError, NothingFeasibleError, CheckFailedError, EnvironmentProblem)
    return next((kind for kind in kinds if kind.exit_code == exit_code), TrainingFailedError)


def count_in(environment: Mapping[str, str], name: str, default: str = "") -> int:
    """The whole number in a variable; UsageError for other values."""
    text = environment.get(name, default)
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"the variable {name} is {text!r}, where a whole number is needed")
    return int(text)


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known word with which a word shares most letters, its first one among equals; cutoff: their least share."""
    # Imported here: only words that are not known need it, and start-up time is everyone's.
    import difflib

    def alike(one: str) -> tuple[float, bool]:
        return difflib.SequenceMatcher(None, one, word).ratio(), one[:1] == word[:1]

    return max(difflib.get_close_matches(word, list(known), cutoff=cutoff), key=alike, default=None)


def edits(one: str, other: str, most: int) -> int:
    """Fewest typing mistakes between two words: a letter too many, missing or wrong, or two swapped.

    most: as many as are counted; a number above it for words with more.
    """
    if abs(len(one) - len(other)) > most:
        return most + 1
    pairs = enumerate(zip(one, other, strict=False))
    same = next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
    left, right = one[same:], other[same:]
    if not left or not right:
        return len(left) + len(right)
    if most == 0:
        return 1
    rests = [(left[1:], right[1:]), (left[1:], right), (left, right[1:])]
    if left[:2] == right[1::-1]:
        rests.append((left[2:], right[2:]))
    return 1 + min(edits(*rest, most - 1) for rest in rests)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return `", did you mean 'x'?"` for the nearest known word, or an empty string."""
    near = nearest(word, known)
    return "" if near is None else f", did you mean {near!r}?"
