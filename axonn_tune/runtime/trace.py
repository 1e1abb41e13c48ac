"""The timeline of some steps of a rank, for Perfetto: what was computed, sent and waited for, when.

It is made of the same marks as the times per term, so it costs what they cost. On a GPU torch's profiler
records the kernels of the same steps into a file of its own.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from axonn_tune import __version__
from axonn_tune.files import write_text_atomically
from axonn_tune.runtime.ledger import Entry
from axonn_tune.runtime.timing import StepTimes
from axonn_tune.specs.traces import (
    COMPUTE_LANE,
    TRACE_SCHEMA,
    Process,
    Span,
    communication_lane,
    step_name,
    term_name,
    trace_text,
    wait_name,
)


@dataclass
class Tracer:
    """Keeps the times of the first `steps` steps after the warm-up, and writes them at the end of the run."""

    steps: int
    directory: Path
    rank: int
    run: str
    device: torch.device
    _kept: list[tuple[int, StepTimes]] = field(default_factory=list)
    _profile: torch.profiler.profile | None = None

    def before_step(self, number: int) -> None:
        """A step is about to begin, counted from 0 after the warm-up."""
        if number == 0 and self.device.type == "cuda":
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profile = torch.profiler.profile(activities=kinds)
            self._profile.start()

    def after_step(self, number: int, step: int, times: StepTimes | None) -> None:
        """It is over: it was step `step` of the run, from 1."""
        if times is not None and 0 <= number < self.steps:
            self._kept.append((step, times))
        if self._profile is not None and number == self.steps - 1:
            self._profile.stop()

    def close(self) -> None:
        """Write `trace-rank<N>.json`, and `kernels-rank<N>.json` on a GPU."""
        if not self._kept:
            return
        spans = [span for step, times in self._kept for span in step_spans(step, times)]
        text = trace_text([Process(f"measured rank {self.rank}", self.rank, spans)], notes=self._notes())
        write_text_atomically(self.directory / f"trace-rank{self.rank}.json", text)
        if self._profile is not None:
            if len(self._kept) < self.steps:
                self._profile.stop()
            self._profile.export_chrome_trace(str(self.directory / f"kernels-rank{self.rank}.json"))

    def _notes(self) -> dict[str, object]:
        return {
            "schema": TRACE_SCHEMA,
            "tool_version": __version__,
            "run": self.run,
            "host": socket.gethostname(),
            "rank": self.rank,
            "steps": [step for step, _ in self._kept],
        }


def step_spans(step: int, times: StepTimes) -> Iterator[Span]:
    """One step: its parts and its waits on the compute lane, each collective on its axis' lane."""
    end_s = max([part.end_s for part in times.parts] + [call.resumed_s for call in times.calls], default=0.0)
    at_s = times.unix_s
    yield Span(COMPUTE_LANE, step_name(step), at_s, at_s + end_s)
    for part in times.parts:
        yield Span(COMPUTE_LANE, part.name, at_s + part.start_s, at_s + part.end_s)
    for call in times.calls:
        name, details = _name(call.entry), {"bytes": call.entry.size_bytes}
        yield Span(COMPUTE_LANE, wait_name(name), at_s + call.halted_s, at_s + call.resumed_s)
        yield Span(communication_lane(call.entry.axis), name, at_s + call.began_s, at_s + call.done_s, details)


def _name(entry: Entry) -> str:
    return term_name(*entry.term)
