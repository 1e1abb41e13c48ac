"""Which configurations to run: launch configs as given, or those of a ranking."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from axonn_tune.cost.prediction import Configuration, Pricing, price_configuration
from axonn_tune.errors import UsageError
from axonn_tune.grid import Grid
from axonn_tune.launch.config import build_launch
from axonn_tune.ranking.inputs import Inputs, machine_of_launch
from axonn_tune.ranking.results import run_search
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.launch import Launch, configuration_name
from axonn_tune.specs.loading import Loaded, load_file
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload


@dataclass(frozen=True)
class Chosen:
    """What is to be run: launch configs of one model, predicted for one machine, most promising first."""

    launches: tuple[Launch, ...]
    model: Loaded[Model]
    machine: Loaded[Machine]
    command: str


@dataclass(frozen=True)
class Selection:
    """Which of a ranking: the first `top` grids (0: all), each in its best order and in these orders too.

    also_blocking: each without overlaps too.
    """

    top: int
    orders: tuple[tuple[str, ...], ...] = ()
    also_blocking: bool = False


def from_ranking(inputs: Inputs, selection: Selection, *, command: str) -> Chosen:
    """The configurations of a ranking; NothingFeasibleError if there is none."""
    results = run_search(inputs)
    results.require_any()
    count = len(results.ranked) if selection.top == 0 else min(selection.top, len(results.ranked))
    best = [results.ranked.pricing(place).configuration for place in range(count)]
    workload = inputs.problem.workload
    workloads = [workload, workload.model_copy(update={"overlaps": ()})] if selection.also_blocking else [workload]
    launches = [
        launch_of(configuration, inputs.model, inputs.machine, one, command=command)
        for configuration in _in_orders(best, selection.orders)
        for one in workloads
    ]
    return Chosen(tuple(launches), inputs.model, inputs.machine, command)


def from_files(paths: Sequence[str], *, machine: str | None, command: str) -> Chosen:
    """The configurations of launch configs, predicted anew for the profile they name, or for `machine`.

    UsageError if they are of different models or machines.
    """
    loaded = [load_file(path, schema=Launch) for path in paths]
    documents = [one.document for one in loaded]
    first = documents[0]
    for path, document in zip(paths, documents, strict=True):
        if document.model != first.model:
            raise UsageError(f"{path} trains another model than {paths[0]}: validate them one after the other")
        if machine is None and document.predicted.machine != first.predicted.machine:
            raise UsageError(f"{path} was predicted for another machine than {paths[0]}; --machine chooses one")
    profile = machine_of_launch(paths[0], first) if machine is None else load_machine(machine)
    model = Loaded(first.model, Path(paths[0]), first.provenance.model_sha256)
    launches = tuple(predicted_anew(document, model, profile, command=command) for document in documents)
    _require_different(paths, launches)
    return Chosen(launches, model, profile, command)


def name_of(launch: Launch) -> str:
    """What tables call a launch config."""
    return configuration_name(
        launch.grid, micro_batch=launch.micro_batch, recompute=launch.recompute, workload=launch.workload
    )


def _require_different(paths: Sequence[str], launches: Sequence[Launch]) -> None:
    """UsageError if two have one name: comparisons go by names."""
    known: dict[str, str] = {}
    for path, launch in zip(paths, launches, strict=True):
        name = name_of(launch)
        if name in known:
            raise UsageError(f"{path} is the configuration of {known[name]} again: {name}")
        known[name] = path


def predicted_anew(launch: Launch, model: Loaded[Model], machine: Loaded[Machine], *, command: str) -> Launch:
    """A launch config with the prediction that a profile makes of it now; all else as it was."""
    grid = launch.grid
    configuration = Configuration(grid.grid(), launch.micro_batch, launch.recompute, launch.kept_layers)
    now = launch_of(configuration, model, machine, launch.workload, command=command)
    return launch.model_copy(update={"predicted": now.predicted})


def launch_of(
    configuration: Configuration, model: Loaded[Model], machine: Loaded[Machine], workload: Workload, *, command: str
) -> Launch:
    """A launch config, priced."""
    priced: Pricing = price_configuration(model.document, machine.document, workload, configuration)
    return build_launch(priced, model=model, machine=machine, workload=workload, command=command)


def serial(chosen: Chosen) -> Launch:
    """The same training on one rank alone, in micro-batches as the first configuration has them."""
    first = chosen.launches[0]
    configuration = Configuration(Grid(), first.micro_batch, "none")
    return launch_of(configuration, chosen.model, chosen.machine, first.workload, command=chosen.command)


def _in_orders(best: Iterable[Configuration], orders: Sequence[tuple[str, ...]]) -> Iterator[Configuration]:
    """Each configuration in its own order, then in the others that lay it out otherwise."""
    for configuration in best:
        grid = configuration.grid
        known = {_canonical(grid)}
        yield configuration
        for order in orders:
            other = replace(grid, order=order)
            if _canonical(other) not in known:
                known.add(_canonical(other))
                yield replace(configuration, grid=other)


def _canonical(grid: Grid) -> tuple[str, ...]:
    """The order of the axes above 1."""
    return tuple(axis for axis in grid.order if grid.axis_size(axis) > 1)
