"""From names and options to the `Problem` of a search, with the origin of its documents."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin, get_type_hints

from axonn_tune.errors import AxonnTuneError, UnknownNameError, UsageError, suggest
from axonn_tune.frameworks import registry
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework, StepOptions
from axonn_tune.grid import ALL_AXES
from axonn_tune.ranking.space import Limits, Problem, RankBy
from axonn_tune.specs.catalog import Loaded, MachineLike, ModelLike, load_machine, load_model, route_overrides
from axonn_tune.specs.document import known_keys
from axonn_tune.specs.loading import DOCUMENT_BYTES, read_text
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import OVERLAPS, Overlap, Precision, Workload

if TYPE_CHECKING:
    from axonn_tune.specs.launch import Launch


@dataclass(frozen=True)
class Inputs:
    """A problem and its documents, with path and hash."""

    problem: Problem
    model: Loaded[Model]
    machine: Loaded[Machine]


@dataclass(frozen=True)
class WorkloadChoices:
    """The user's workload options; None: default of the model or the schema."""

    batch: int | None = None
    seq: int | None = None
    precision: Precision | None = None
    shard_optimizer: bool | None = None
    split_micro_batch: bool = False
    overlaps: tuple[Overlap, ...] = ()
    no_overlaps: tuple[str, ...] = ()


@dataclass(frozen=True)
class Choices:
    """The user's options, before any document is loaded. `settings`: `--set` assignments."""

    gpus: int
    model: ModelLike
    machine: MachineLike = "perlmutter"
    workload: WorkloadChoices = WorkloadChoices()
    limits: Limits = field(default_factory=Limits)
    rank_by: RankBy | None = None
    settings: tuple[str, ...] = ()
    framework: Framework = AXONN_TUNE
    pipeline: bool = False
    tokens_total: int | None = None


def completed(order: Sequence[str], framework: Framework) -> tuple[str, ...]:
    """A rank order with the framework's axes that it leaves out after those it names.

    Tables omit axes of size 1, so a printed order gives the same grid again.
    Pipeline stages and context get their place where they are searched.
    """
    return (*order, *(axis for axis in framework.axes if axis not in (*order, "pipeline", "context")))


def load_inputs(choices: Choices) -> Inputs:
    """Load the documents and build the problem; errors as `load_model`, UsageError for a wrong setting."""
    for_step, settings = _step_settings(choices.settings)
    for_workload, others = _split_settings(settings)
    for_model, for_machine = route_overrides(others)
    model = load_model(choices.model, overrides=for_model)
    machine = load_machine(choices.machine, overrides=for_machine)
    workload = make_workload(model.document, choices.workload, settings=for_workload)
    pins, called = choices.limits.axes, choices.framework.called
    if choices.gpus % prod(pins.values()):
        shown = ", ".join(f"{called(axis)} = {pins[axis]}" for axis in ALL_AXES if axis in pins)
        raise UsageError(
            f"{choices.gpus} GPUs cannot be arranged with {shown}: {prod(pins.values())} does not divide them"
        )
    framework = choices.framework.with_step(**for_step) if for_step else choices.framework
    pipeline = choices.pipeline or (framework.ranked_by == "iteration" and "pipeline" in framework.axes)
    problem = Problem(
        model=model.document,
        machine=machine.document,
        workload=workload,
        gpus=choices.gpus,
        limits=choices.limits,
        rank_by=choices.rank_by or ("iteration" if pipeline else framework.ranked_by),
        framework=framework,
        pipeline=pipeline,
        tokens_total=choices.tokens_total,
    )
    _check_axes(problem)
    kept = choices.limits.kept_layers
    if kept and not framework.keeps_layers:
        raise UsageError(f"--kept-layers {kept}: {framework.title} reshards every layer after forward")
    if workload.split_micro_batch and "output" not in framework.step.overlaps:
        raise UsageError(f"--split-micro-batch: {framework.title} does not interleave half micro-batches")
    return Inputs(problem, model, machine)


def _check_axes(problem: Problem) -> None:
    """Refuse pinned axes and orders that the framework does not have."""
    framework, limits = problem.framework, problem.limits
    pins = {**limits.axes, "chunks": limits.chunks or 1}
    missing = [axis for axis, size in pins.items() if size > 1 and axis not in framework.columns]
    if missing:
        axis, known = missing[0], ", ".join(map(framework.called, framework.columns))
        what = "interleaved stages" if axis == "chunks" else f"axis {axis}"
        others = [name for name, one in registry().items() if axis in one.columns and one.launch]
        advice = f"; frameworks that do: {', '.join(others)}" if others else ""
        raise UsageError(
            f"{framework.option(axis)} {pins[axis]}: {framework.title} has no {what}; it has {known}{advice}"
        )
    pipeline = framework.option("pipeline")
    if pins["chunks"] > 1 and (pins.get("pipeline") == 1 or "pipeline" not in problem.axes):
        stages = f"but {pipeline} is 1" if "pipeline" in problem.axes else "which --pipeline searches"
        raise UsageError(f"{framework.option('chunks')} {limits.chunks} is for several pipeline stages, {stages}")


def _step_settings(settings: Sequence[str]) -> tuple[dict[str, object], list[str]]:
    """Assignments meant for the framework's step, as values, and all others."""
    known = {each.name: each for each in fields(StepOptions)}
    found, others = dict[str, object](), list[str]()
    for setting in settings:
        name, _, text = setting.partition("=")
        if not name.startswith("step."):
            others.append(setting)
            continue
        name = name.removeprefix("step.").strip()
        if name not in known:
            raise UsageError(
                f"--set {setting}: a step has no {name!r}{suggest(name, known)}; known: {', '.join(known)}"
            )
        found[name] = _step_value(setting, name, text.strip())
    return found, others


def _step_value(setting: str, name: str, text: str) -> object:
    """A value of the kind that the option has: true or false, names between commas, a number or a word."""
    kind, default = get_type_hints(StepOptions)[name], getattr(StepOptions(), name)
    if isinstance(default, bool):
        return _one_of(setting, text, ("true", "false")) == "true"
    if isinstance(default, tuple):
        element, names = get_args(kind)[0], [name.strip() for name in text.split(",") if name.strip()]
        return tuple(_number(setting, name) if element is float else _word(setting, name, element) for name in names)
    if isinstance(default, str):
        return _word(setting, text, kind)
    return None if text in ("null", "") else _number(setting, text)


def _word(setting: str, text: str, kind: object) -> str:
    return _one_of(setting, text, get_args(kind)) if get_origin(kind) is Literal else text


def _one_of(setting: str, text: str, known: tuple[str, ...]) -> str:
    if text not in known:
        raise UsageError(f"--set {setting}: expected {', '.join(known)}, got {text!r}")
    return text


def _number(setting: str, text: str) -> float | int:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise UsageError(f"--set {setting}: {text!r} is not a number") from None


def make_workload(model: Model, choices: WorkloadChoices, *, settings: Sequence[str] = ()) -> Workload:
    """The model's default workload with the user's choices, then `key=value` settings, on top."""
    wanted = () if "all" in choices.no_overlaps else choices.overlaps or OVERLAPS
    overlaps = tuple(name for name in OVERLAPS if name in wanted and name not in choices.no_overlaps)
    chosen: dict[str, object] = {
        "precision": choices.precision,
        "shard_optimizer_over_data": choices.shard_optimizer,
    }
    workload = Workload(
        global_batch=choices.batch or model.defaults.global_batch,
        sequence_length=choices.seq or model.defaults.sequence_length,
        overlaps=overlaps,
        split_micro_batch=choices.split_micro_batch,
    ).model_copy(update={name: value for name, value in chosen.items() if value is not None})
    if not settings:
        return workload
    # Imported here: most searches set nothing, and start-up time is theirs.
    from axonn_tune.specs.document import to_yaml
    from axonn_tune.specs.loading import parse_document

    return parse_document(to_yaml(workload), schema=Workload, source="workload", overrides=settings)


def _split_settings(settings: Sequence[str]) -> tuple[list[str], list[str]]:
    """Assignments meant for the workload, without their prefix, and all others."""
    own, prefix = set(known_keys(Workload)), "workload."
    for_workload, others = [], []
    for setting in settings:
        if setting.startswith(prefix):
            for_workload.append(setting.removeprefix(prefix))
        elif setting.partition("=")[0].strip() in own - {"schema"}:
            for_workload.append(setting)
        else:
            others.append(setting)
    return for_workload, others


def launch_inputs(path: str | Path, *, machine: MachineLike | None = None) -> tuple[Inputs, bool]:
    """The problem whose only candidate is a launch config's; also whether the machine profile has changed since.

    `machine` is a profile to use instead of the one the launch config names.
    Errors as `load_inputs` and `machine_of_launch`.
    """
    from axonn_tune.specs.launch import Launch
    from axonn_tune.specs.loading import load_file

    loaded = load_file(path, schema=Launch)
    launch = loaded.document
    profile = machine_of_launch(path, launch) if machine is None else load_machine(machine)
    limits = Limits(
        order=launch.grid.order,
        recompute=launch.recompute,
        micro_batch=launch.micro_batch,
        kept_layers=launch.kept_layers,
        axes=launch.grid.sizes,
        chunks=launch.chunks,
    )
    piped = launch.grid.pipeline > 1
    gpus = launch.grid.world
    problem = Problem(launch.model, profile.document, launch.workload, gpus=gpus, limits=limits, pipeline=piped)
    model = Loaded(launch.model, loaded.path, launch.provenance.model_sha256)
    return Inputs(problem, model, profile), profile.sha256 != launch.provenance.machine_sha256


def machine_of_launch(path: str | Path, launch: Launch) -> Loaded[Machine]:
    """The profile that a launch config names, from the catalog or the config's folder; else UsageError."""
    name = launch.predicted.machine
    try:
        return load_machine(name)
    except UnknownNameError as error:
        if (beside := _profile_beside(Path(path), name)) is not None:
            return load_machine(beside)
        raise UsageError(f"{path}: {error}; --machine FILE says where its profile is") from error


def _profile_beside(path: Path, name: str) -> Path | None:
    """The file in the same folder that is the machine profile of this name."""
    says = re.compile(rf"^name:\s*[\"']?{re.escape(name)}[\"']?\s*(#.*)?$", re.MULTILINE)
    for other in sorted(path.parent.glob("*.y*ml")):
        with contextlib.suppress(AxonnTuneError):
            text = read_text(other, limit_bytes=DOCUMENT_BYTES)
            if re.search(r"^schema:\s*[\"']?axonn-tune/machine/", text, re.MULTILINE) and says.search(text):
                return other
    return None
