"""The inputs that a document of results was made from, from the document itself."""

from __future__ import annotations

import json
from pathlib import Path

from axonn_tune.errors import AxonnTuneError
from axonn_tune.ranking.choosing import Problem
from axonn_tune.ranking.inputs import Inputs, WorkloadChoices, make_workload
from axonn_tune.report.html.blocks import Json
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.loading import D, Loaded, is_shipped, parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

_ADDED = frozenset({"path", "sha256"})


def parsed(document: Json, schema: type[D], *, source: str) -> D:
    """A document within a document of results; DocumentError if this version cannot read it."""
    own = {key: value for key, value in document.items() if key not in _ADDED}
    return parse_document(json.dumps(own), schema=schema, source=source)


def inputs_of(document: Json, *, source: str, model: Json | None = None, workload: Json | None = None) -> Inputs:
    """Inputs of a ranking or comparison, or of one point of a sweep, which has `model` and `workload` of its own."""
    model, workload = model or document["model"], workload or document["workload"]
    machine = document["machine"]
    trained = parsed(model, Model, source=source)
    profile = parsed(machine, Machine, source=source)
    problem = Problem(
        model=trained,
        machine=profile,
        workload=parsed(workload, Workload, source=source),
        gpus=document["gpus"],
        rank_by=document.get("rank_by", "iteration"),
    )
    return Inputs(
        problem,
        Loaded(trained, Path(model.get("path", trained.name)), model["sha256"]),
        Loaded(profile, Path(machine.get("path", profile.name)), machine["sha256"]),
    )


def explain_words(inputs: Inputs) -> list[str]:
    """The start of a command line that explains a configuration; empty if the files are not what they were."""
    try:
        now = load_model(str(inputs.model.path)), load_machine(str(inputs.machine.path))
    except AxonnTuneError:
        return []
    if (now[0].sha256, now[1].sha256) != (inputs.model.sha256, inputs.machine.sha256):
        return []
    workload, problem = inputs.problem.workload, inputs.problem
    model_name = problem.model.name if is_shipped("model", inputs.model.path) else str(inputs.model.path)
    machine_name = problem.machine.name if is_shipped("machine", inputs.machine.path) else str(inputs.machine.path)
    defaults = make_workload(problem.model, WorkloadChoices())
    made = {"global_batch": "--batch", "sequence_length": "--seq", "precision": "--precision"}
    changed = {key: option for key, option in made.items() if getattr(workload, key) != getattr(defaults, key)}
    options = [word for key, option in changed.items() for word in (option, str(getattr(workload, key)))]
    if workload.shard_optimizer_over_data:
        options.append("--shard-optimizer")
    if workload.split_micro_batch:
        options.append("--split-micro-batch")
    if workload.overlaps != defaults.overlaps:
        options += [word for name in workload.overlaps for word in ("--overlap", name)] or ["--no-overlap"]
    if problem.rank_by != "communication":
        options += ["--rank-by", problem.rank_by]
    return [
        *("axonn-tune", "explain", "--gpus", str(problem.gpus), "--model", model_name, "--machine", machine_name),
        *options,
    ]
