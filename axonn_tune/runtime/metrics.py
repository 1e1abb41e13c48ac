"""What a run reports: a file of JSON lines per rank, and one line a step for people."""

from __future__ import annotations

import json
import resource
import socket
import sys
from collections import deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

import torch

from axonn_tune import __version__
from axonn_tune.files import write_text_atomically
from axonn_tune.program.dimensions import step_values
from axonn_tune.program.flops import MFU_CONVENTION, executed_flops, model_flops, step_tokens
from axonn_tune.program.step import StepProgram, build_step
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.optimizer import StepResult
from axonn_tune.runtime.summary import Machine, TimedStep, summarise
from axonn_tune.runtime.tensorboard import Scalars, folder_of
from axonn_tune.runtime.timing import StepTimes
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.results import SUMMARY_NAME, Summary
from axonn_tune.units import counted, flops_per_s, show_bytes, show_seconds

SCHEMA = "axonn-tune/metrics/1"
WARMUP_STEPS = 2
"""Steps at the start of each run, also of a resumed one, that no summary counts: allocation, first connections."""
WINDOW_STEPS = 32
"""Timed steps, the last ones, that the summary is made from."""

SCALARS = (
    *("loss", "gradient_norm", "learning_rate", "step_s", "tokens_per_s", "mfu", "hfu", "memory_bytes"),
    *("exposed_communication_s", "compute_s"),
)
"""Numbers of a step that other sinks get too."""


@dataclass(frozen=True)
class StepMetrics:
    """One line of the file. `step` counts from 1; the loss is the mean over all ranks' tokens.

    What collectives took is None, and `terms` empty, in a step that was not timed.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    step_s: float
    tokens_per_s: float
    mfu: float
    hfu: float
    memory_bytes: int
    warmup: bool
    exposed_communication_s: float | None
    compute_s: float | None
    terms: list[dict[str, object]]


@dataclass
class Metrics:
    """Writes one rank's metrics; rank 0 speaks too, and writes the summary of all ranks.

    `base_bytes`: what the process held before there was a model, by `resident_bytes`.
    """

    launch: Launch
    mesh: Mesh
    device: torch.device
    directory: Path
    steps: int
    base_bytes: int = 0
    talk: TextIO = field(default_factory=lambda: sys.stderr)
    _timed: deque[TimedStep] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _seen: int = 0

    def __post_init__(self) -> None:
        self._needed = model_flops(self.launch.model, self.launch.workload)
        self._executed = float(executed_flops(*program_of(self.launch)))
        path = self.directory / f"metrics-rank{self.mesh.rank}.jsonl"
        # Line by line, so that what a killed rank had measured is there to read.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._write({"schema": SCHEMA, **self._heading()})
        wanted = folder_of(self.launch, self.directory) if self.mesh.rank == 0 else None
        self._scalars = None if wanted is None else Scalars(wanted)

    def step(self, step: int, result: StepResult, *, step_s: float, times: StepTimes | None) -> None:
        """Record a step, counted from 1, that took `step_s`; `times` of its collectives if they were taken."""
        warmup = self._seen < WARMUP_STEPS
        self._seen += 1
        if times is not None and not warmup and not self._slowed(times):
            self._timed.append(TimedStep(step_s, times))
        mfu, hfu = self._utilisation(step_s)
        found = StepMetrics(
            step=step,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            learning_rate=result.learning_rate,
            step_s=step_s,
            tokens_per_s=step_tokens(self.launch.workload) / step_s,
            mfu=mfu,
            hfu=hfu,
            memory_bytes=self._memory_bytes(),
            warmup=warmup,
            exposed_communication_s=times.exposed_s if times else None,
            compute_s=step_s - times.exposed_s if times else None,
            terms=term_rows(times) if times else [],
        )
        self._write(asdict(found))
        if self._scalars is not None:
            values = {name: value for name in SCALARS if (value := getattr(found, name)) is not None}
            self._scalars.write(step, values, times)
        if self.mesh.rank == 0:
            self.say(step_line(found, steps=self.steps))

    def _slowed(self, times: StepTimes) -> bool:
        """Whether torch's profiler recorded a rank's kernels, which all others then wait for."""
        return times.traced and self.device.type == "cuda"

    def say(self, line: str) -> None:
        """A line for people."""
        print(line, file=self.talk, flush=True)

    def close(self) -> None:
        """Sum up what was measured after the warm-up, beside the prediction; all ranks together."""
        if self._timed:
            machine = Machine(self.device, self._device_name(), self._memory_bytes(), self._convention())
            summary = summarise(self.launch, self.mesh, machine, self._timed, warmup=WARMUP_STEPS)
            if self.mesh.rank == 0:
                self.say(summary_line(summary))
                text = summary.model_dump_json(by_alias=True, indent=2)
                write_text_atomically(self.directory / SUMMARY_NAME, text + "\n")
        elif self.mesh.rank == 0 and 0 < self._seen <= WARMUP_STEPS:
            self.say(
                f"no step after the warm-up of {WARMUP_STEPS}: nothing to compare with the prediction, or to trace"
            )
        if self._scalars is not None:
            self._scalars.close()
        self._file.close()

    def _utilisation(self, step_s: float) -> tuple[float, float]:
        """MFU of all ranks and HFU of this one, of the peak that the prediction was made with."""
        peak = flops_per_s(self.launch.predicted.peak_tflops)
        return self._needed / (step_s * self.mesh.grid.world * peak), self._executed / (step_s * peak)

    def _heading(self) -> dict[str, object]:
        """What the lines below it need to be read: who measured, and by which conventions."""
        return {
            "tool_version": __version__,
            "torch_version": str(torch.__version__),
            "run": self.launch.name,
            "host": socket.gethostname(),
            "device": self._device_name(),
            "rank": self.mesh.rank,
            "coordinates": self.mesh.grid.coordinates(self.mesh.rank),
            "grid": self.launch.grid.model_dump(mode="json"),
            "mfu_convention": MFU_CONVENTION,
            "hfu_convention": "what this rank executes, recomputation and padding counted",
            "peak_tflops": self.launch.predicted.peak_tflops,
            "peak_of": self.launch.predicted.accelerator,
            "memory_convention": self._convention(),
            "warmup_steps": WARMUP_STEPS,
        }

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"cpu, {counted(torch.get_num_threads(), 'thread')}"

    def _convention(self) -> str:
        cuda = self.device.type == "cuda"
        return "peak of what torch allocated" if cuda else "peak resident set, less that without a model"

    def _memory_bytes(self) -> int:
        return max(peak_memory_bytes(self.device) - self.base_bytes, 0)

    def _write(self, document: dict[str, object]) -> None:
        self._file.write(json.dumps(document, ensure_ascii=False) + "\n")


def program_of(launch: Launch) -> tuple[StepProgram, dict[str, float]]:
    """The program of one step of a launch config, and the values of its symbols."""
    values = step_values(
        launch.model,
        launch.workload,
        launch.grid.grid(),
        micro_batch=launch.micro_batch,
        kept_layers=launch.kept_layers,
    )
    return build_step(launch.model, launch.workload, recompute=launch.recompute), values


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: what torch allocated on a GPU, the whole process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes(device: torch.device) -> int:
    """What this process holds now that `peak_memory_bytes` will count, though no model needs it."""
    if device.type == "cuda":
        return 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def step_line(found: StepMetrics, *, steps: int) -> str:
    """One step for people."""
    return (
        f"step {found.step}/{steps}  loss {found.loss:.4f}  grad norm {found.gradient_norm:.3g}  "
        f"rate {found.learning_rate:.2e}  {show_seconds(found.step_s)}  {found.tokens_per_s:,.0f} tok/s  "
        f"MFU {found.mfu:.1%}  {show_bytes(found.memory_bytes)}"
    )


def term_rows(times: StepTimes) -> list[dict[str, object]]:
    """Each collective of a step of this rank, named as the program names it; late peers are waited for in `seconds`."""
    return [
        {
            "op": term.entry.op,
            "axis": term.entry.axis,
            "phase": term.entry.phase,
            "layer": term.entry.layer,
            "count": term.count,
            "bytes": term.entry.size_bytes,
            "seconds": term.seconds,
            "exposed_s": term.exposed_s,
        }
        for term in times.terms()
    ]


def summary_line(summary: Summary) -> str:
    """A whole run for people."""
    predicted = summary.step_s.predicted
    expected = "" if predicted is None else f", predicted {show_seconds(predicted)}"
    return (
        f"step {show_seconds(summary.step_s.measured)}{expected}; mean of {summary.averaged_steps} of the last "
        f"{counted(summary.timed_steps, 'step')}, outliers and the first {summary.warmup_steps} left out; "
        f"MFU {summary.mfu:.1%} of {summary.predicted_for.accelerator}"
    )
