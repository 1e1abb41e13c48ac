"""`axonn_tune.validate`: run configurations, and compare with the predictions."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from axonn_tune.api.options import DEFAULT_MACHINE, Options, call_text, make_choices, whole
from axonn_tune.errors import UsageError
from axonn_tune.files import write_text_atomically
from axonn_tune.lab.lab import Lab
from axonn_tune.launch.host import require_torch
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.results import Measurements
from axonn_tune.validation.choice import Chosen, Selection, from_files, from_ranking
from axonn_tune.validation.comparison import Comparison, fastest_runs
from axonn_tune.validation.places import LabRanks, Ranks, StartedRanks
from axonn_tune.validation.rounds import Extent, Progress, measure

if TYPE_CHECKING:
    from axonn_tune.ranking.choosing import RankBy
    from axonn_tune.specs.catalog import MachineLike, ModelLike


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Where and how often to run, as the options of `axonn-tune validate`.

    repeats: rounds through all configurations. steps: of each run; the first two count for nothing. serial: train
    on one rank alone too, to compare losses with. fastest: compare each configuration's fastest run, not the median.
    lab: run on the ranks of this lab, which is up. realtime: with a lab, before all else on this host; as root
    only. start_with: what starts all ranks elsewhere, `"srun --ntasks=8"`. folder: keep the folder of each
    run in here. output: write every time that was measured here.
    """

    repeats: int = 3
    steps: int = 8
    serial: bool = True
    fastest: bool = False
    lab: str | None = None
    realtime: bool = False
    start_with: str | None = None
    folder: str | Path | None = None
    output: str | Path | None = None


_DEFAULT_RUNS = Runs()


def validate(
    model: ModelLike,
    *,
    gpus: int,
    machine: MachineLike = DEFAULT_MACHINE,
    batch: int | None = None,
    rank_by: RankBy = "communication",
    top: int = 5,
    runs: Runs = _DEFAULT_RUNS,
    **options: Unpack[Options],
) -> Comparison:
    """Run the first `top` (0: all) of a ranking, and compare what was measured with what was predicted.

    Other parameters as of `axonn_tune.search`. What trained wrong, or sent other than the program says, is in
    `.blame`, and `.sound` is False. Needs torch; TrainingFailedError if a run fails.
    """
    inputs = load_inputs(make_choices(model, gpus=gpus, machine=machine, batch=batch, rank_by=rank_by, options=options))
    given = {"model": model, "gpus": gpus, "machine": machine, "batch": batch, "rank_by": rank_by, **options}
    selection = Selection(whole("top", top, least=0))
    return compared(from_ranking(inputs, selection, command=call_text("validate", given)), runs)


def validate_launches(
    launches: Sequence[str | Path], *, machine: str | Path | None = None, runs: Runs = _DEFAULT_RUNS
) -> Comparison:
    """Run launch configs, on the profile they name or on `machine`, and compare. Otherwise as `validate`."""
    paths = [str(path) for path in launches]
    if not paths:
        raise UsageError("launches=(): name at least one launch config")
    call = call_text("validate_launches", {"launches": paths, "machine": machine})
    named = None if machine is None else str(machine)
    return compared(from_files(paths, machine=named, command=call), runs)


def compared(chosen: Chosen, runs: Runs, *, listen: Callable[[Progress], None] = lambda progress: None) -> Comparison:
    """Run what was chosen, and compare; errors as `validate`. listen: called after each run."""
    require_torch()
    extent = Extent(whole("repeats", runs.repeats), whole("steps", runs.steps, least=3), alone=runs.serial)
    with ranks_of(runs) as ranks, _folder(runs.folder) as folder:
        measured = measure(chosen, ranks, extent, folder=folder, listen=listen, save=_saved_to(runs.output))
    return Comparison(fastest_runs(measured) if runs.fastest else measured)


@contextmanager
def ranks_of(runs: Runs) -> Iterator[Ranks]:
    """The ranks to run on; UsageError if they are named twice."""
    if runs.lab is None:
        if runs.realtime:
            raise UsageError("--realtime is for the ranks of a lab: give --lab too")
        yield StartedRanks(tuple(shlex.split(runs.start_with or "")))
        return
    if runs.start_with is not None:
        raise UsageError("--lab and --start-with both say where the ranks are")
    with Lab.attached(runs.lab) as lab:
        yield LabRanks(lab, realtime=runs.realtime)


@contextmanager
def _folder(kept: str | Path | None) -> Iterator[Path]:
    """Where runs leave their folders."""
    if kept is not None:
        yield Path(kept)
        return
    with tempfile.TemporaryDirectory(prefix="axonn-tune-") as folder:
        yield Path(folder)


def _saved_to(output: str | Path | None) -> Callable[[Measurements], None]:
    """Writes what was measured, after each round, so that a validation that is cut off leaves whole rounds."""

    def save(found: Measurements) -> None:
        if output is not None:
            write_text_atomically(output, to_yaml(found, header=[f"Written by {found.command}"]))

    return save
