"""Command lines that the tool prints for a layout of a model: each is written here, and runs as it is printed.

Pages, explanations and diagnoses take the options of the run from `run_words` and those of the layout from
`layout_pins`. What `--set` cannot say is left to a model's file; where there is none, no command is printed.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from axonn_tune.errors import AxonnTuneError, UsageError
from axonn_tune.frameworks import registry, step_changes
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job
from axonn_tune.ranking.inputs import Inputs, make_workload
from axonn_tune.request import Request, flag
from axonn_tune.specs.catalog import available, load_machine, load_model
from axonn_tune.specs.document import Document
from axonn_tune.specs.loading import is_shipped
from axonn_tune.specs.model import Model
from axonn_tune.specs.tuning import tools
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import OVERLAPS

if TYPE_CHECKING:
    from axonn_tune.learning.evidence import Setup
    from axonn_tune.learning.setups import Change


@dataclass(frozen=True)
class FileToWrite:
    """A model's file that is not there yet, what it will hold, and the command that writes it."""

    path: str
    model: Model
    command: str


NamedModel: TypeAlias = str | FileToWrite | None
"""A model's name or file, or one to be written; None: the nearest that ships."""

_DESCRIPTIVE = {"schema_", "name", "description", "family", "source", "defaults", "approximated"}
"""Fields of a model that no price depends on, and its family, which selects a similar model."""


def step_words(framework: Framework) -> list[str]:
    """The same as `--set` takes them, but for what `--egtp` turns on and `--pipeline-schedule` names."""
    own = ("gathers_experts", "pipeline_order")
    changed = {name: value for name, value in step_changes(framework).items() if name not in own}
    return [word for name in changed for word in ("--set", f"step.{name}={_setting_word(changed[name])}")]


def _setting_word(value: object) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return {True: "true", False: "false", None: "null"}[value] if isinstance(value, bool | None) else str(value)


def layout_pins(framework: Framework, axes: Iterable[str], config: Mapping[str, object]) -> list[str]:
    """Options that leave just this layout, by its fields in a document; those without a value have none."""
    named = {framework.option(axis): config[axis] for axis in axes}
    order = {"order": config["order"]} if framework.permuted else {}
    kept = ("micro_batch", "recompute", "recompute_layers", "pipeline_layout", "kept_layers")
    named |= {flag(name): value for name, value in (order | {name: config.get(name) for name in kept}).items()}
    found = [word for name, value in named.items() if value not in (None, "") for word in (name, str(value))]
    found += ["--expert-overlap"] if config.get("expert_overlap") else []
    schedule = config.get("pipeline_order")
    return [*found, *(["--pipeline-schedule", str(schedule)] if schedule else [])]


def run_words(
    job: Job,
    *,
    gpus: int,
    model: Sequence[str],
    machine: str,
    defaults: Workload | None = None,
    grid: Grid | None = None,
) -> list[str]:
    """Options that state a run but for its layout; model: words after `--model`; defaults: what needs no words; grid:
    the only one that is searched."""
    workload, framework = job.workload, job.framework
    found = ["--gpus", str(gpus), "--model", *model, "--machine", machine]
    if framework.name != AXONN_TUNE.name:
        found += ["--framework", framework.name]
    for option, key in (("--batch", "global_batch"), ("--seq", "sequence_length"), ("--precision", "precision")):
        if defaults is None or getattr(workload, key) != getattr(defaults, key):
            found += [option, str(getattr(workload, key))]
    if workload.lengths is not None:
        found += ["--lengths", workload.lengths.data, "--packing", workload.lengths.packing]
    found += [word for name in OVERLAPS if name not in workload.overlaps for word in ("--no-overlap", name)]
    if workload.tuning is not None and framework.tuner:
        found += tools()[framework.tuner].words(workload.tuning)
    found += ["--split-micro-batch"] if workload.split_micro_batch else []
    found += ["--shard-optimizer"] if workload.shard_optimizer_over_data else []
    return [*found, *step_words(framework), *_only_words(job, gpus, grid)]


def _only_words(job: Job, gpus: int, grid: Grid | None) -> Iterator[str]:
    """An exchange or a dispatcher that is the framework's own and the only one of a run, where a search compares it."""
    framework, domain = job.framework, job.machine.tiers[0].ranks
    plain = registry().get(framework.name, framework)
    sizes = ((1, 1), (gpus, 1)) if grid is None else ((grid.expert, grid.expert_tensor),)
    tried = {name for each in sizes for name in plain.compared_dispatchers(*each, domain)}
    others = job.model.has_experts and tried - {plain.step.dispatcher}
    wide = "context" in framework.axes if grid is None else grid.context > 1
    for name, compared in (
        ("dispatcher", others and plain.dispatchers and not framework.dispatchers),
        ("context_exchange", wide and plain.exchanges and not framework.exchanges),
    ):
        value = getattr(framework.step, name)
        if compared and value == getattr(plain.step, name):
            yield from ("--set", f"step.{name}={value}")


def explain_command(inputs: Inputs) -> list[str]:
    """The start of a command line that explains a configuration; empty if the files are not what they were."""
    try:
        now = load_model(str(inputs.model.path)), load_machine(str(inputs.machine.path))
    except AxonnTuneError:
        return []
    if (now[0].sha256, now[1].sha256) != (inputs.model.sha256, inputs.machine.sha256):
        return []
    problem = inputs.problem
    model_name = problem.model.name if is_shipped("model", inputs.model.path) else str(inputs.model.path)
    machine_name = problem.machine.name if is_shipped("machine", inputs.machine.path) else str(inputs.machine.path)
    defaults = make_workload(problem.model, Request())
    ranked = [] if problem.rank_by == problem.framework.ranked_by else ["--rank-by", problem.rank_by]
    words = run_words(problem, gpus=problem.gpus, model=[model_name], machine=machine_name, defaults=defaults)
    return ["axonn-tune", "explain", *words, *ranked]


def command_of(change: Change, *, machine: str, model: NamedModel = None) -> str:
    """The command that writes the launch files of a change, or explains it if there are none; "" if none says it."""
    # Imported here: few reports have commands.
    from axonn_tune.launch.commands import command_of as started

    setup = change.setup
    if not (words := pins(setup, machine=machine, model=model)):
        return ""
    written = [*words, *approximate(setup.model), "-o"]
    if setup.framework.name == AXONN_TUNE.name:
        return shlex.join(["axonn-tune", *written, "launch.yaml"])
    try:
        started(setup.priced)
    except UsageError:
        return shlex.join(["axonn-tune", "explain", *words])
    return shlex.join(["axonn-tune", *written, "run.sh"])


def approximate(model: Model) -> list[str]:
    """The option without which no script is written of a model that is another network."""
    return ["--approximate"] if model.otherwise else []


def commands_of(changes: Sequence[Change], *, machine: str, model: NamedModel = None) -> list[str]:
    """Those of changes, each once, after the one that writes the file of their model."""
    found = dict.fromkeys(filter(None, (command_of(change, machine=machine, model=model) for change in changes)))
    return [*([model.command] if found and isinstance(model, FileToWrite) else []), *found]


def pins(setup: Setup, *, machine: str, model: NamedModel = None) -> list[str]:
    """Options that pin this step configuration; none if its model has no words."""
    one, framework = setup.layout, setup.framework
    if not (named := _model_words(setup, model)):
        return []
    axes = {axis: size for axis, size in one.grid.by_axis.items() if axis in framework.axes}
    # Where a search may cut stages into chunks, one chunk is stated, too.
    axes |= {"chunks": one.chunks} if one.chunks > 1 or (one.pipeline > 1 and framework.schedule.interleaved) else {}
    order = ",".join(axis for axis in one.grid.order if axis in framework.axes and axis != "pipeline")
    chosen = len(framework.schedule.orders) > 1 and (framework.schedule.compared or framework.step.splits_backward)
    own = {"order": order, "pipeline_layout": _split_word(setup)}
    own |= {"pipeline_order": framework.step.pipeline_order if one.pipeline > 1 and chosen else None}
    pinned = layout_pins(framework, axes, {**vars(one), **axes, **own})
    # A search with overlap of dispatch has layouts that cannot have it, too: asked for alone, they are refused.
    step = framework.step
    if (step.expert_overlap or step.delayed_weight_gradients) and not setup.overlaps_experts(one):
        setup = replace(setup, framework=framework.with_step(expert_overlap=False, delayed_weight_gradients=False))
    elif framework.overlaps_experts and not step.expert_overlap and setup.model.has_experts:
        merged = replace(setup, framework=framework.with_step(expert_overlap=True))
        pinned += ["--no-expert-overlap"] if merged.overlaps_experts(one) else []
    return [*run_words(setup, gpus=one.grid.world, model=named, machine=machine, grid=one.grid), *pinned]


def _split_word(setup: Setup) -> str | None:
    """The layers of each part, where there are stages and a search has other splits than the framework's own."""
    one, schedule = setup.layout, setup.framework.schedule
    searched = one.pipeline > 1 and schedule.layouts and schedule.uneven and not schedule.equal_chunks
    if one.parts is None and not searched:
        return None
    # Imported here: most layouts have no stages, and start-up time is theirs.
    from axonn_tune.cost.pipeline import parts_of
    from axonn_tune.stages import layout_text

    parts = parts_of(setup, one.pipeline, one.chunks, one.parts)
    return layout_text(parts, mtp=setup.model.mtp_layers, mtp_part=one.mtp_part)


def _model_words(setup: Setup, named: NamedModel) -> list[str]:
    """The stated model, or the nearest shipped one, with its differences; none if no words say them."""
    found, model = dict[str, list[str]](), setup.model
    stated, content = (named.path, named.model) if isinstance(named, FileToWrite) else (named, None)
    for name in [stated] if stated else available("model"):
        try:
            # With the layers in BF16 that this step gives any model.
            other = replace(setup, model=content or load_model(name).document).model
        except UsageError:
            continue
        if stated or (other.gated == model.gated and other.mixed == model.mixed):
            changed = list(_changed(model, other))
            if None not in changed:
                found[name] = [word for word in changed if word]
    if not found:
        return []
    name = min(found, key=lambda one: (len(found[one]), one != model.name))
    return [name, *(word for change in found[name] for word in ("--set", change))]


_OF_SCRIPTS = ("rotary_base", "norm_epsilon", "qkv_biases")


def _changed(model: Model, other: Model) -> Iterator[str | None]:
    """Fields in which a model differs from another, as `--set` takes them; None for one that it cannot say."""
    for name in Model.model_fields:
        # Only a table of learned positions has a length that is priced; what only scripts have may not be stated.
        idle = name in _DESCRIPTIVE or (name == "max_sequence_length" and not model.learned_positions)
        if not idle and not (name in _OF_SCRIPTS and getattr(model, name) is None):
            yield from _settings(name, getattr(model, name), getattr(other, name))


def _settings(path: str, value: object, other: object) -> Iterator[str | None]:
    """Assignments that make one value of another, key by key where both have the same; `--set` takes no mapping."""
    mine, its = (
        {name: getattr(one, name) for name in type(one).model_fields} if isinstance(one, Document) else one
        for one in (value, other)
    )
    if value == other:
        return
    if not isinstance(mine, Mapping):
        yield f"{path}={_setting_word(value)}"
    elif isinstance(its, Mapping) and mine.keys() == its.keys():
        for key in mine:
            yield from _settings(f"{path}.{key}", mine[key], its[key])
    else:
        yield None
