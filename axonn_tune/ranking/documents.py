"""Results as JSON, read back: their inputs, and configurations priced again by this version."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.grid import ALL_AXES, Grid
from axonn_tune.job import Layout
from axonn_tune.ranking.inputs import Inputs
from axonn_tune.ranking.orders import in_order
from axonn_tune.ranking.space import Problem
from axonn_tune.specs.loading import D, Loaded, parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.stages import parse_layout
from axonn_tune.vocabulary import PipelineOrder

_ADDED = frozenset({"path", "sha256", "assumed"})
"""Keys that results have beside those of the documents they were made from."""


def _parsed(document: dict[str, Any], schema: type[D], *, source: str) -> D:
    """A document within a document of results; DocumentError if this version cannot read it."""
    own = {key: value for key, value in document.items() if key not in _ADDED}
    return parse_document(json.dumps(own), schema=schema, source=source)


def framework_of(document: dict[str, Any]) -> Framework:
    """The framework of a document of results, with its step; of those that do not say, the bundled runtime."""
    changed = {name: tuple(one) if isinstance(one, list) else one for name, one in document.get("step", {}).items()}
    return find_framework(document.get("framework") or AXONN_TUNE.name).with_step(**changed)


def inputs_of(document: dict[str, Any], *, source: str) -> Inputs:
    """Inputs of a ranking or comparison, or of a configuration of a validation."""
    model, machine = document["model"], document["machine"]
    trained = _parsed(model, Model, source=source)
    profile = _parsed(machine, Machine, source=source)
    problem = Problem(
        model=trained,
        machine=profile,
        workload=_parsed(document["workload"], Workload, source=source),
        gpus=document["gpus"],
        rank_by=document.get("rank_by", "iteration"),
        framework=framework_of(document),
        tokens_total=next((one.get("tokens_total") for one in document.get("configs", [])), None),
    )
    return Inputs(
        problem,
        Loaded(trained, Path(model.get("path", trained.name)), model["sha256"]),
        Loaded(profile, Path(machine.get("path", profile.name)), machine["sha256"]),
    )


@dataclass(frozen=True)
class ConfigurationDetail:
    """A configuration of a document, as the document has it, and priced again by this version."""

    config: dict[str, Any]
    inputs: Inputs
    priced: Detail


def detailed(config: dict[str, Any], inputs: Inputs) -> ConfigurationDetail | None:
    """Price a configuration of the contract; None if it does not say enough, as those of other cost models do not."""
    if not config["feasible"] or config["iteration_s"] is None or config["order"] is None:
        return None
    order = tuple(config["order"].split(","))
    grid = Grid(**{axis: config[axis] for axis in ALL_AXES if axis in config}, order=order)
    chunks = config.get("chunks") or 1
    text = config.get("pipeline_layout")
    settled = Layout(
        *(grid, config["micro_batch"], config["recompute"], config["kept_layers"], chunks),
        parts=parse_layout(text).parts if text else None,
        recompute_layers=config.get("recompute_layers"),
    )
    problem = inputs.problem
    if exchange := config.get("context_exchange"):
        name, _, count = exchange.partition(" ")
        framework = problem.framework.with_step(context_exchange=name, context_inside=int(count or 1))
        problem = replace(problem, framework=framework)
    if config.get("expert_overlap"):
        problem = problem.with_expert_overlap
    schedule: PipelineOrder = config.get("pipeline_order") or "1f1b"
    if schedule != "1f1b":
        problem = in_order(problem, schedule)
    return ConfigurationDetail(config, inputs, price(problem, settled))
