"""A launch config as a section: its own configuration first, then where it stands among all grids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from axonn_tune.program.memory import memory_limit_bytes
from axonn_tune.ranking.inputs import launch_inputs
from axonn_tune.ranking.results import Results, run_search
from axonn_tune.ranking.space import Limits
from axonn_tune.report.html import provenance
from axonn_tune.report.html.blocks import Json
from axonn_tune.report.html.ranking import DETAILED, MOST_ROWS, ranking_section
from axonn_tune.report.ranking_json import entry_json, ranking_document
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document


def launch_section(file: Path, *, identity: str, machine: str | None = None) -> Json:
    """The section of a launch config.

    machine: its profile, if the one that the config names is not at hand; UsageError then, without one.
    """
    inputs, changed = launch_inputs(str(file), machine=machine)
    alone = run_search(inputs)
    launch = load_document(file, schema=Launch)
    everything = run_search(replace(inputs, problem=replace(inputs.problem, limits=Limits())))
    document = ranking_of(everything)
    picked = entry_json(alone.ranked.entry(0, terms=True), alone) if len(alone.ranked) else None
    found = ranking_section(document, identity=identity, source=str(file), picked=_placed(picked, document))
    said = [f"{launch.name}, written by: {launch.provenance.command}"]
    if changed:
        said.append("The machine profile is not the one that it was written with: times differ.")
    if picked is None:
        said.append("By this profile the launch config does not fit into memory.")
    found["lead"] = [*said, *found["lead"]]
    found["blocks"] = [*found["blocks"], provenance.launch_fold(launch)]
    return found


def _placed(picked: Json | None, document: Json) -> Json | None:
    """The launch config's configuration with the rank that its grid has among all."""
    if picked is None:
        return None
    sizes = ("x", "y", "z", "data")
    same = (one["rank"] for one in document["configs"] if all(one[axis] == picked[axis] for axis in sizes))
    return {**picked, "rank": next(same, None)}


def ranking_of(results: Results) -> Json:
    """A search as the ranking document with what fits into a page, and the terms of those shown in detail.

    `left_out`: how many more are ranked than it lists.
    """
    first = results.listed(top=DETAILED, terms=True)
    entries = (*first, *results.listed(top=MOST_ROWS, rejected=True)[len(first) :])
    limit_bytes = memory_limit_bytes(results.inputs.problem.machine.accelerator)
    document = ranking_document(results, entries, limit_bytes=limit_bytes)
    return {**document, "left_out": max(len(results.ranked) - MOST_ROWS, 0)}
