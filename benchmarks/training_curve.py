"""Train on Python's own library text, serially and on grids of four ranks, and draw the losses.

python -m benchmarks.training_curve            # trains, writes docs/training.svg, prints the table of docs/training.md
python -m benchmarks.training_curve --redraw   # only from what build/training holds of the last time
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from axonn_tune.files import write_text_atomically
from axonn_tune.grid import Grid
from axonn_tune.launch.config import write_launch
from axonn_tune.specs.launch import Data, Optimizer
from axonn_tune.specs.workload import Workload
from benchmarks.console import stdout_console
from benchmarks.curve_figure import Curve, figure
from benchmarks.launches import pinned_launch

MODEL = "nano"
WORKLOAD = Workload(global_batch=24, sequence_length=64, precision="fp32")
STEPS = 240
OPTIMIZER = Optimizer(learning_rate=2e-3, minimum_learning_rate=2e-4, warmup_steps=20, decay_steps=STEPS)
GRIDS = (Grid(), Grid(x=2, z=2), Grid(y=2, z=2), Grid(x=2, data=2))
FIGURE = Path("docs/training.svg")


@dataclass(frozen=True)
class Run:
    """One training run: what it is called, and the mean loss of each step."""

    name: str
    losses: list[float]
    step_s: list[float]


def name_of(grid: Grid) -> str:
    """Such as `serial`, or `x 2 · z 2`."""
    wide = [f"{axis} {grid.axis_size(axis)}" for axis in ("x", "y", "z", "data") if grid.axis_size(axis) > 1]
    return " · ".join(wide) or "serial"


def folder_of(grid: Grid, folder: Path) -> Path:
    """Where a grid's run lies."""
    return folder / (name_of(grid).replace(" ", "").replace("·", "-"))


def train(grid: Grid, folder: Path, tokens: Path) -> None:
    """Run one grid's launch config, as a user would."""
    run = folder_of(grid, folder)
    run.mkdir(parents=True, exist_ok=True)
    launch = pinned_launch(MODEL, grid, WORKLOAD, kept=True, optimizer=OPTIMIZER, command="benchmarks.training_curve")
    update = {"steps": STEPS, "seed": 1, "data": Data(path=str(tokens), seed=1)}
    write_launch(run / "launch.yaml", launch.model_copy(update=update))
    for old in run.glob("metrics-rank*.jsonl"):
        old.unlink()
    call("run", str(run / "launch.yaml"), "--directory", str(run))


def call(*arguments: str) -> None:
    """Run axonn-tune; its words go to a terminal's standard error."""
    subprocess.run([sys.executable, "-m", "axonn_tune", *arguments], check=True, stdout=sys.stderr)


def read(grid: Grid, folder: Path) -> Run:
    """A finished run's losses, from the first rank's metrics."""
    lines = (folder_of(grid, folder) / "metrics-rank0.jsonl").read_text("utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    return Run(name_of(grid), [step["loss"] for step in steps], [step["step_s"] for step in steps])


def table(runs: list[Run]) -> str:
    """Rows of the table in docs/training.md."""
    serial, rows = runs[0], ["| grid | first loss | last loss | mean of the last 20 | largest difference to serial |"]
    rows.append("|---|---|---|---|---|")
    for run in runs:
        last = sum(run.losses[-20:]) / 20
        apart = max(abs(mine - theirs) for mine, theirs in zip(run.losses, serial.losses, strict=True))
        shown = "" if run is serial else f"{apart:.1e}"
        rows.append(f"| {run.name} | {run.losses[0]:.4f} | {run.losses[-1]:.4f} | {last:.4f} | {shown} |")
    return "\n".join(rows)


def main() -> None:
    """Train, draw, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redraw", action="store_true", help="train nothing")
    parser.add_argument("--folder", type=Path, default=Path("build/training"))
    parser.add_argument("--figure", type=Path, default=FIGURE)
    chosen = parser.parse_args()
    if not chosen.redraw:
        chosen.folder.mkdir(parents=True, exist_ok=True)
        tokens = chosen.folder / "stdlib.bin"
        call("data", "--python-stdlib", "--output", str(tokens))
        for grid in GRIDS:
            train(grid, chosen.folder, tokens)
    runs = [read(grid, chosen.folder) for grid in GRIDS]
    write_text_atomically(chosen.figure, figure([Curve(run.name, run.losses) for run in runs]))
    tokens_seen = STEPS * WORKLOAD.global_batch * WORKLOAD.sequence_length
    console = stdout_console()
    console.print(f"{STEPS} steps, {tokens_seen:,} tokens each run", markup=False)
    console.print(table(runs), markup=False)


if __name__ == "__main__":
    main()
