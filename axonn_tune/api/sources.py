"""What a report is made from: launch configs, results as JSON, measurements, run folders, told apart by `schema`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from axonn_tune.errors import DocumentError, Problem, UsageError, suggest
from axonn_tune.grid import AXES
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.inputs import launch_inputs
from axonn_tune.report import page
from axonn_tune.report.comparison import comparison_section
from axonn_tune.report.configuration import explanation_section
from axonn_tune.report.output import Json
from axonn_tune.report.ranking import entry_json
from axonn_tune.report.ranking_section import ranking_of, ranking_section
from axonn_tune.report.run import run_section
from axonn_tune.report.scaling import sweep_section
from axonn_tune.report.validation import validation_document, validation_section
from axonn_tune.specs.document import read_yaml
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document, load_file, read_text
from axonn_tune.specs.results import SUMMARY_NAME, Measurements, Summary
from axonn_tune.validation.comparison import RunComparison


def read_section(path: str, *, number: int, machine: str | None = None) -> Json:
    """The section of one source, the `number`th of the report.

    machine: profile of launch configs, instead of the one they name. UsageError for what no report is
    made from, and for what cannot be read; DocumentError with every problem of the document.
    """
    file = Path(path)
    if file.is_dir():
        file = file / SUMMARY_NAME
        if not file.is_file():
            raise UsageError(f"{path!r} is not the folder of a finished run: it has no {SUMMARY_NAME}")
    document, schema = _peek(read_text(file), source=str(file))
    kind = schema.removeprefix("axonn-tune/").partition("/")[0]
    if kind == "launch":
        return launch_section(file, identity=f"s{number}", machine=machine)
    if kind not in _KINDS:
        known = ("launch", *_KINDS)
        what = f"a {kind} document{suggest(kind, known)}" if kind else "not a document with a schema"
        raise UsageError(f"{str(file)!r} is {what}; a report is made from: {', '.join(known)}")
    return _KINDS[kind](document, file, f"s{number}")


def _peek(text: str, *, source: str) -> tuple[Json, str]:
    """The document, if it is JSON, and its schema."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        given = read_yaml(text, source=source).root.mapping().get("schema")
        return {}, "" if given is None else str(given.value)
    return (document, str(document.get("schema", ""))) if isinstance(document, dict) else ({}, "")


def launch_section(file: Path, *, identity: str, machine: str | None = None) -> Json:
    """The section of a launch config.

    machine: its profile, if the one that the config names is not at hand; UsageError then, without one.
    """
    inputs, changed = launch_inputs(str(file), machine=machine)
    alone = run_search(inputs.problem, top=1)
    launch = load_document(file, schema=Launch)
    unpinned = inputs.problem.request.without_pins()
    everything = replace(inputs, problem=replace(inputs.problem, request=unpinned))
    document = ranking_of(everything, run_search(everything.problem))
    picked = entry_json(alone.detail(0), alone) if len(alone) else None
    if picked is not None:
        # The rank that its grid has among all.
        same = (one["rank"] for one in document["configs"] if all(one[axis] == picked[axis] for axis in AXES))
        picked["rank"] = next(same, None)
    found = ranking_section(document, identity=identity, source=str(file), picked=picked)
    found["subtitle"] = f"{launch.name} · {found['subtitle']}"
    if changed:
        found["verdict"].append("The machine profile differs from the one it was written with, and so do times.")
    if picked is None:
        found["verdict"].append("By this profile the launch config does not fit in memory.")
    found["blocks"] = [*found["blocks"], page.launch_fold(launch)]
    return found


def _measurement(_: Json, file: Path, identity: str) -> Json:
    measured = load_file(file, schema=Measurements).document
    return validation_section(validation_document(RunComparison(measured)), identity=identity, source=str(file))


def _summary(_: Json, file: Path, identity: str) -> Json:
    return run_section(load_file(file, schema=Summary).document, identity=identity, source=str(file))


def _result(section: Callable[..., Json]) -> Callable[[Json, Path, str], Json]:
    """What makes a section of results: they have no schema, so what is wrong in them shows when they are read."""

    def made(document: Json, file: Path, identity: str) -> Json:
        try:
            return section(document, identity=identity, source=str(file))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            what = f"has no {error}" if isinstance(error, KeyError) else f"is not as expected ({error})"
            problem = Problem("", f"a part of it {what}: made by another version, or edited")
            raise DocumentError(str(file), [problem]) from error

    return made


_KINDS: dict[str, Callable[[Json, Path, str], Json]] = {
    "ranking": _result(ranking_section),
    "explain": _result(explanation_section),
    "sweep": _result(sweep_section),
    "comparison": _result(comparison_section),
    "validation": _result(validation_section),
    "measurement": _measurement,
    "summary": _summary,
}
