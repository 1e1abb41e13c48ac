"""What training logs say of saving, loading and starting again.

Megatron's timers have each save and load, `(min, max)` or the maximum alone in ms, with `--async-save` what training
waits for, and a line with the time says that a checkpoint is written (NVIDIA/Megatron-LM@d98e8a64: megatron/core/
timers.py, megatron/training/checkpointing.py). torchtitan says how long saving, or staging where it is asynchronous,
and loading took (pytorch/torchtitan@b5bcd76c, torchtitan/components/checkpointer/dcp.py). Hugging Face's Trainer names
a checkpoint; its bar has whole seconds before and after.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from statistics import median
from typing import NamedTuple

_TIMER = re.compile(r"(save|load)-checkpoint \.{3,}+: (?:\([\d.]++, )?(\d[\d.]*+)")
_FINISHED = re.compile(
    r"Finished (saving|staging|loading) the checkpoint(?: \(or staging if async is enabled\))? ?in (\d[\d.]*+) seconds"
)
_SCHEDULED, _WRITTEN = "scheduled an async checkpoint save", "successfully saved checkpoint"
_NAMED, _EVALUATES = "Saving model checkpoint to ", "Running Evaluation"
_CLOCK = re.compile(r"(?<!\d)20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d{3,6})?")
_BAR = re.compile(r"(\d{1,9})/(\d{1,9}) \[(?:(\d{1,4}):)?(\d{1,2}):(\d\d)<")
_COARSE_S = 2.0
"""Of a bar of whole seconds, a shorter wait is not known."""
_LONGEST_S = 1e6
"""Longer is no save, and no restart: the log went on days later."""


class Save(NamedTuple):
    """A save after a step: training waited `stall_s`; copied: for the copy to hosts alone; write_s: until it was
    written, None where that is not known."""

    step: int
    stall_s: float
    copied: bool
    write_s: float | None


@dataclass(frozen=True)
class Saving:
    """Saves, loads and restart of one run, s; steps: that it trained, from `first`. restart_s: from the last step of
    the run before until training went on, without loading, None if it is the first; repeated: steps trained again."""

    saves: tuple[Save, ...]
    first: int
    steps: int
    load_s: float | None = None
    restart_s: float | None = None
    repeated: int = 0

    @property
    def stall_s(self) -> float:
        """What a save takes of training."""
        return median(one.stall_s for one in self.saves)

    @property
    def interval(self) -> float:
        """Steps between saves; of one save, since the run began."""
        at = sorted({self.first - 1, *(one.step for one in self.saves)})
        apart = [after - before for before, after in pairwise(at)]
        return float(median(apart[1:] or apart)) if apart else 0.0


@dataclass
class SavingLog:
    """Collects what the lines of one run say of it. seconds: what a bar counted over a save, with the steps in it."""

    saves: list[Save] = field(default_factory=list)
    counted: list[tuple[int, int, float]] = field(default_factory=list)
    load_s: float | None = None
    steps: list[int] = field(default_factory=list)
    clocks: list[datetime] = field(default_factory=list)
    saved_at: datetime | None = None
    scheduled: bool = False
    bar: tuple[int, int, float] | None = None
    named: bool = False

    def line(self, text: str, step: int | None) -> None:
        """What a line says; step: of training, where it is one's."""
        if step is not None:
            self.steps.append(step)
            self._stamp(text)
        if "%|" in text:
            self._bars(text)
        if "heckpoint" not in text:
            self.named = self.named and _EVALUATES not in text
            return
        if (found := _TIMER.search(text)) is not None:
            self._take(found[1], _seconds(found[2]) / 1e3, copied=self.scheduled)
        elif (found := _FINISHED.search(text)) is not None:
            self._take(found[1][:4], _seconds(found[2]), copied=found[1] == "staging")
        elif _WRITTEN in text and self.scheduled and self.saves and self.saves[-1].copied:
            # Saved at the last step before it, whose line has the time as well.
            last, clock = self.saves[-1], _clock(text)
            waited = (clock - self.saved_at).total_seconds() if clock is not None and self.saved_at is not None else 0.0
            if last.write_s is None and 0.0 < waited < _LONGEST_S:
                self.saves[-1] = last._replace(write_s=max(waited, last.stall_s))
        self.scheduled = self.scheduled or _SCHEDULED in text
        self.named = self.named or _NAMED in text

    def _stamp(self, text: str) -> None:
        if (clock := _clock(text)) is not None:
            self.clocks = [*self.clocks[:1], clock]

    def _take(self, what: str, seconds: float, *, copied: bool) -> None:
        if not 0.0 < seconds < _LONGEST_S:
            return
        if what == "load":
            self.load_s = seconds
            return
        self.saved_at = self.clocks[-1] if self.clocks else None
        self.saves.append(Save(self.steps[-1] if self.steps else 0, seconds, copied, None if copied else seconds))

    def _bars(self, text: str) -> None:
        """The training's bar before and after a save; bars of evaluations have another length."""
        for done, whole, hours, minutes, seconds in _BAR.findall(text):
            at = (int(whole), int(done), int(hours or 0) * 3600.0 + int(minutes) * 60.0 + int(seconds))
            before = self.bar
            if before is not None and before[0] > at[0]:
                continue
            if before is not None and self.named and before[0] == at[0] and before[1] < at[1]:
                self.counted.append((before[1], at[1] - before[1], at[2] - before[2]))
            # A bar is drawn more than once at a step.
            self.bar, self.named = at, self.named and before is not None and before[1] == at[1]

    def found(self, step_s: float, *, before: SavingLog | None) -> Saving | None:
        """What they say; step_s: of this run; before: the run before it in the same log."""
        bars = ((at, seconds - steps * step_s) for at, steps, seconds in self.counted)
        saves = self.saves or [Save(at, stall, False, stall) for at, stall in bars if stall >= _COARSE_S]
        steps = self.steps if self.saves or self.bar is None else [1, self.bar[1]]
        if not steps or (not saves and self.load_s is None):
            return None
        # A line is of the steps since the one before, of which the first has none.
        each = min(steps[0], max(1, steps[-1] - steps[-2] if len(steps) > 1 else 1))
        first, restart_s, repeated = steps[0] - each + 1, None, 0
        if before is not None and before.clocks and self.clocks and self.load_s is not None:
            gap_s = (self.clocks[0] - before.clocks[-1]).total_seconds() - self.load_s - each * step_s
            restart_s, repeated = (gap_s, before.steps[-1] - first + 1) if 0.0 < gap_s < _LONGEST_S else (None, 0)
        return Saving(tuple(saves), first, steps[-1] - first + 1, self.load_s, restart_s, max(0, repeated))


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _clock(text: str) -> datetime | None:
    """The time that a line has."""
    found = _CLOCK.search(text)
    try:
        return None if found is None else datetime.fromisoformat(found[0].replace(",", "."))
    except ValueError:
        return None
