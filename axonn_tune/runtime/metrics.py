"""What a run reports: a file of JSON lines per rank, and one line a step for people."""

from __future__ import annotations

import json
import resource
import socket
import statistics
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TextIO

import torch

from axonn_tune import __version__
from axonn_tune.program.flops import MFU_CONVENTION, executed_flops, model_flops, step_tokens
from axonn_tune.program.step import StepProgram, build_step
from axonn_tune.runtime.ledger import step_values
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.optimizer import StepResult
from axonn_tune.specs.launch import Launch
from axonn_tune.units import flops_per_s, show_bytes, show_seconds

SCHEMA = "axonn-tune/metrics/1"
WARMUP_STEPS = 2
"""Steps at the start of each run, also of a resumed one, that no summary counts: allocation, first connections."""


@dataclass(frozen=True)
class StepMetrics:
    """One line of the file. `step` counts from 1; the loss is the mean over all ranks' tokens."""

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


@dataclass
class Metrics:
    """Writes one rank's metrics; rank 0 speaks too."""

    launch: Launch
    mesh: Mesh
    device: torch.device
    directory: Path
    steps: int
    talk: TextIO = field(default_factory=lambda: sys.stderr)
    _times_s: list[float] = field(default_factory=list)
    _seen: int = 0

    def __post_init__(self) -> None:
        self._needed = model_flops(self.launch.model, self.launch.workload)
        self._executed = float(executed_flops(*program_of(self.launch)))
        path = self.directory / f"metrics-rank{self.mesh.rank}.jsonl"
        # Line by line, so that what a killed rank had measured is there to read.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._write({"schema": SCHEMA, **self._heading()})

    def step(self, step: int, result: StepResult, *, step_s: float) -> None:
        """Record a step, counted from 1, that took `step_s`."""
        warmup = self._seen < WARMUP_STEPS
        self._seen += 1
        if not warmup:
            self._times_s.append(step_s)
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
            memory_bytes=peak_memory_bytes(self.device),
            warmup=warmup,
        )
        self._write(asdict(found))
        if self.mesh.rank == 0:
            self.say(step_line(found, steps=self.steps))

    def say(self, line: str) -> None:
        """A line for people."""
        print(line, file=self.talk, flush=True)

    def close(self) -> None:
        """Sum up what was measured after the warm-up, beside the prediction."""
        if self._times_s and self.mesh.rank == 0:
            self.say(self._summary())
        self._file.close()

    def _summary(self) -> str:
        typical_s, predicted = statistics.median(self._times_s), self.launch.predicted
        mfu, hfu = self._utilisation(typical_s)
        expected = f", predicted {show_seconds(predicted.iteration_s)}" if predicted.iteration_s is not None else ""
        return (
            f"step {show_seconds(typical_s)}{expected}; median of {len(self._times_s)}, the first {WARMUP_STEPS} left "
            f"out; MFU {mfu:.1%}, HFU {hfu:.1%} of {predicted.peak_tflops:g} TFLOP/s ({predicted.accelerator})"
        )

    def _utilisation(self, step_s: float) -> tuple[float, float]:
        """MFU of all ranks and HFU of this one, of the peak that the prediction was made with."""
        peak = flops_per_s(self.launch.predicted.peak_tflops)
        return self._needed / (step_s * self.mesh.grid.world * peak), self._executed / (step_s * peak)

    def _heading(self) -> dict[str, object]:
        """What the lines below it need to be read: who measured, and by which conventions."""
        cuda = self.device.type == "cuda"
        return {
            "tool_version": __version__,
            "torch_version": str(torch.__version__),
            "run": self.launch.name,
            "host": socket.gethostname(),
            "device": torch.cuda.get_device_name(self.device) if cuda else f"cpu, {torch.get_num_threads()} threads",
            "rank": self.mesh.rank,
            "coordinates": self.mesh.grid.coordinates(self.mesh.rank),
            "grid": self.launch.grid.model_dump(mode="json"),
            "mfu_convention": MFU_CONVENTION,
            "hfu_convention": "what this rank executes, recomputation and padding counted",
            "peak_tflops": self.launch.predicted.peak_tflops,
            "peak_of": self.launch.predicted.accelerator,
            "memory_convention": "peak of what torch allocated" if cuda else "peak resident set of the process",
            "warmup_steps": WARMUP_STEPS,
        }

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


def step_line(found: StepMetrics, *, steps: int) -> str:
    """One step for people."""
    return (
        f"step {found.step}/{steps}  loss {found.loss:.4f}  grad norm {found.gradient_norm:.3g}  "
        f"rate {found.learning_rate:.2e}  {show_seconds(found.step_s)}  {found.tokens_per_s:,.0f} tok/s  "
        f"MFU {found.mfu:.1%}  {show_bytes(found.memory_bytes)}"
    )
