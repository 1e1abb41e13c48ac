"""The metrics of a run as TensorBoard reads them, written by rank 0; the JSON lines stay the complete record."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_tune.errors import EnvironmentProblem
from axonn_tune.runtime.timing import StepTimes
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.traces import term_name

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"
_FLUSH_S = 10
"""A run that is killed loses no more than this."""


def require_tensorboard(launch: Launch) -> None:
    """EnvironmentProblem if a launch config wants TensorBoard's files and what writes them is not installed."""
    if launch.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise EnvironmentProblem(
            "metrics.tensorboard needs TensorBoard, which is not installed: pip install 'axonn-tune[tensorboard]', "
            "or take it out of the launch config"
        )


def folder_of(launch: Launch, run: Path) -> Path | None:
    """Where event files go: as the launch config says, `tensorboard` in the run's folder for true; None: nowhere."""
    wanted = launch.metrics.tensorboard
    if isinstance(wanted, str):
        return Path(wanted)
    return run / FOLDER if wanted else None


@dataclass
class Scalars:
    """Writes scalars of each step into a folder of event files, begun with the first step."""

    folder: Path
    _writer: SummaryWriter | None = None

    def write(self, step: int, values: dict[str, float], times: StepTimes | None) -> None:
        """Values by name at a step, from 1, and the time of each collective, as `seconds/...` and `exposed/...`."""
        writer = self._opened(step)
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        for term in times.terms() if times is not None else ():
            name = term_name(*term.entry.term)
            writer.add_scalar(f"seconds/{name}", term.seconds, step)
            writer.add_scalar(f"exposed/{name}", term.exposed_s, step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()

    def _opened(self, step: int) -> SummaryWriter:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A resumed run goes on from its checkpoint: what an earlier one had written beyond that is void.
            self._writer = SummaryWriter(str(self.folder), purge_step=step, flush_secs=_FLUSH_S)
        return self._writer
