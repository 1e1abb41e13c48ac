"""Published layouts asked as a user would give the same second and interval as `axonn-tune accuracy`, all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import axonn_tune
from axonn_tune.cost.pricer import Pricer
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.job import Layout
from axonn_tune.learning.stated import read_run
from axonn_tune.specs.document import to_yaml
from axonn_tune.stages import layout_text
from axonn_tune.validation.published.accuracy import Accuracy, PredictedRow, best_pricing, choices_of
from axonn_tune.validation.published.cases import Case
from tests.cli.running import good

NAMED = {
    "torchtitan-0008": 2.9231,
    "torchtitan-0040": 24.7492,
    "papers_megatron-0076": 38.24,
    "papers_megatron-0010": 102.63,
    "bigscience_a100-0059": 125.52,
    "dgxc-0003": 9.09,
}
"""Llama-3-8B on 128 H100, 70B on 64 A100, GPT-3 175B on 1,024 A100, 1,008B on 3,072, BLOOM on 384, and GPT-3 175B on
512 H100, with their measured steps, s."""


def scored(found: Accuracy) -> Iterator[tuple[PredictedRow, Case, float]]:
    """Rows with one layout that fits, their cases and predicted steps, s."""
    for one in found.steps:
        if one.case is not None and one.predicted_s is not None:
            yield one, one.case, one.predicted_s


def pins(found: PredictedRow, framework: str = "") -> dict[str, Any]:
    """Options of a search that pin a row's layout, and its model; framework: other than the row's."""
    case, one = found.case, found.configuration
    assert case is not None
    assert one is not None
    asked = find_framework(framework or case.framework.name)
    sizes = {axis: one.grid.axis_size(axis) for axis in asked.axes}
    changed = {f"step.{name}": value for name, value in _changes(asked.step, case.framework.step)}
    return {
        "model": case.model,
        "gpus": one.grid.world,
        "machine": case.machine,
        "framework": asked.name,
        "batch": case.workload.global_batch,
        "precision": case.workload.precision,
        "micro_batch": one.micro_batch,
        "recompute": one.recompute,
        "rank_by": "step",
        "set": changed or None,
        **sizes,
        **({"chunks": one.chunks} if "pipeline" in asked.axes else {}),
        **({"pipeline_layout": layout_text(Pricer(case, one).parts)} if _is_split(asked, one) else {}),
    }


def _is_split(framework: Framework, one: Layout) -> bool:
    """Whether a search would split the layers otherwise, unless the row's own split is pinned."""
    schedule = framework.schedule
    return one.pipeline > 1 and schedule.layouts and schedule.uneven and not schedule.equal_chunks


def _words(found: PredictedRow, folder: Path) -> str:
    """The command that explains a row's configuration."""
    asked = pins(found)
    for name in ("model", "machine"):
        (folder / f"{name}.yaml").write_text(to_yaml(asked[name]), "utf-8")
        asked[name] = folder / f"{name}.yaml"
    changed, _ = asked.pop("set") or {}, asked.pop("rank_by")
    words = [f"--{name.replace('_', '-')} {value}" for name, value in asked.items()]
    return " ".join(
        ["explain --format json", *words, *(f"--set {name}={_text(each)}" for name, each in changed.items())]
    )


def _changes(known: StepOptions, step: StepOptions) -> list[tuple[str, object]]:
    """Options in which a row's step differs from its framework's."""
    names = (each.name for each in fields(StepOptions))
    return [(name, getattr(step, name)) for name in names if getattr(step, name) != getattr(known, name)]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_the_command_says_the_same_second(accuracy: Accuracy, tmp_path: Path) -> None:
    """Guards the command line: `explain` with a published layout pinned says what `axonn-tune accuracy` says."""
    known = {one.row.id: one for one, _, _ in scored(accuracy) if one.row.id in NAMED}
    assert {name: one.row.step_s for name, one in known.items()} == NAMED
    for name, one in known.items():
        (tmp_path / name).mkdir()
        config = good(_words(one, tmp_path / name)).document["config"]
        assert config["iteration_s"] == pytest.approx(one.predicted_s, rel=1e-9), name
        assert (config["low_s"], config["high_s"]) == pytest.approx((one.low_s, one.high_s), rel=1e-9), name


PARTS = 3
"""Of the scored rows, so that workers share them."""


@pytest.mark.parametrize("part", range(PARTS))
def test_a_search_with_pins_says_the_same_second(part: int, accuracy: Accuracy) -> None:
    """Guards that there is one path: for every scored row `search` and `explain` with pins say the same second."""
    for one, _, step_s in islice(scored(accuracy), part, None, PARTS):
        found = axonn_tune.explain(**pins(one))
        assert found.priced.iteration_s == pytest.approx(step_s, rel=1e-9), one.row.id
        assert (found.priced.low_s, found.priced.high_s) == pytest.approx((one.low_s, one.high_s), rel=1e-9), one.row.id


WRITTEN = {"fsdp": 151, "megatron-core": 64, "torchtitan": 4, "torchtitan-eager": 9}
"""Rows by the framework whose command is written for them. Of Megatron-Core's, 59 are NeMo's, whose step it has with
options set; the other five leave some of their layout open, of which the fastest is taken."""


def written(accuracy: Accuracy) -> Iterator[tuple[str, PredictedRow]]:
    """Rows that fit, with the framework that a command is written for, of those that have one."""
    for one in accuracy.steps:
        name = {"nemo": "megatron-core"}.get(one.case.framework.name, one.case.framework.name) if one.case else ""
        if one.case is not None and one.fits and find_framework(name).launch is not None:
            yield name, one


def test_rows_of_each_framework_with_a_command_are_counted(accuracy: Accuracy) -> None:
    """Guards the next test: no row is left out."""
    assert Counter(name for name, _ in written(accuracy)) == WRITTEN


@pytest.mark.parametrize("framework", WRITTEN)
def test_what_is_written_for_a_row_is_read_as_the_same_second(
    framework: str, accuracy: Accuracy, tmp_path: Path
) -> None:
    """Guards writing and reading of commands, for every row that fits of each framework that has one here."""
    mine = [one for name, one in written(accuracy) if name == framework]
    for number, one in enumerate(mine):
        assert one.case is not None, "asked before"
        # NeMo's loop reduces more at the end of a step than Megatron-Core's, which its rows are written for.
        own = one.case.framework.with_step(step_reductions=find_framework(framework).step.step_reductions)
        case = replace(one.case, framework=own)
        layout = choices_of(case)[0][0].layout if one.predicted_s is None else one.configuration
        assert layout is not None
        settled, step_s = replace(one, case=case, configuration=layout), best_pricing(case, (layout,)).iteration_s
        found = axonn_tune.search(**pins(settled, framework=framework))
        path, *_ = found.write_launch_config(tmp_path / f"{one.row.id}.sh")
        run = read_run(path, given={}, model=one.case.model).case(one.case.machine)
        assert best_pricing(run, run.configurations).iteration_s == pytest.approx(step_s, rel=1e-9), one.row.id
        if not number:
            explained = axonn_tune.explain_command(path, machine=one.case.machine, model=one.case.model)
            assert explained.priced.iteration_s == pytest.approx(step_s, rel=1e-9), one.row.id


def test_an_open_row_has_a_range_and_no_error(accuracy: Accuracy) -> None:
    """Guards rows that leave part of their layout open: they are listed apart, and score nothing at their best."""
    assert accuracy.summary.open
    for one in accuracy.summary.open:
        assert one.error is None
        assert len(one.choices_s) > 1
        assert "open" in one.why_not
    assert accuracy.summary.predicted + len(accuracy.summary.open) + len(accuracy.summary.not_predicted) == len(
        accuracy.steps
    )


def test_most_rows_are_near_what_was_measured(accuracy: Accuracy) -> None:
    """Guards what a user may expect of such an answer: three quarters within 15%."""
    errors = [abs(one.error) for one in accuracy.steps if one.error is not None]
    assert sum(error <= 0.15 for error in errors) >= 0.75 * len(errors)
