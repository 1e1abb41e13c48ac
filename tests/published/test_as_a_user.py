"""Published layouts asked as a user would, in the commands' words, give the same second as `validate --published`."""

from __future__ import annotations

import random
from dataclasses import fields
from pathlib import Path

import pytest

from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import StepOptions
from axonn_tune.specs.document import to_yaml
from axonn_tune.validation.published.accuracy import PredictedRow, predict_steps
from axonn_tune.validation.published.cases import Case, case_of
from axonn_tune.validation.published.rows import SHIPPED, StepRow, read_steps
from tests.cli.running import good

NAMED = {
    "torchtitan-0008": 2.9231,
    "torchtitan-0040": 24.7492,
    "papers_megatron-0076": 38.24,
    "papers_megatron-0077": 12.08,
    "papers_megatron-0078": 6.49,
    "dgxc-0003": 9.09,
}
"""Llama-3-8B on 128 H100, 70B on 64 A100, GPT-3 175B on 1,024 A100, Llama-3-405B on 8,192 and 16,384 H100, and GPT-3
175B on 512 H100, with their measured steps, s."""

DRAWN, SEED = 20, 6


def _rows() -> list[StepRow]:
    rows = list(read_steps(SHIPPED / "steps.csv"))
    others = [row for row in rows if row.id not in NAMED and row.vocabulary_multiple is None]
    return [row for row in rows if row.id in NAMED] + random.Random(SEED).sample(others, DRAWN)


@pytest.fixture(scope="module", name="predicted")
def _predicted() -> tuple[PredictedRow, ...]:
    return predict_steps(_rows())


def _words(found: PredictedRow, folder: Path) -> str:
    """The command that explains a row's configuration."""
    case, chosen = found.case, found.configuration
    assert isinstance(case, Case)
    assert chosen is not None
    model, machine = folder / "model.yaml", folder / "machine.yaml"
    model.write_text(to_yaml(case.model), encoding="utf-8")
    machine.write_text(to_yaml(case.machine), encoding="utf-8")
    grid, asked = chosen.grid, find_framework(case.framework.name)
    axes = [axis for axis in asked.axes if axis != "pipeline"]
    piped = "pipeline" in asked.axes
    return " ".join(
        [
            f"explain --format json --gpus {grid.world} --model {model} --machine {machine}",
            f"--framework {asked.name} --batch {case.workload.global_batch} --precision {case.workload.precision}",
            *(f"--{axis} {grid.axis_size(axis)}" for axis in axes),
            *([f"--pipeline {grid.pipeline} --chunks {chosen.chunks}"] if piped else []),
            f"--micro-batch {chosen.micro_batch} --recompute {chosen.recompute}",
            *(f"--set step.{name}={_text(value)}" for name, value in _changes(asked.step, case.framework.step)),
        ]
    )


def _changes(known: StepOptions, step: StepOptions) -> list[tuple[str, object]]:
    """Options in which a row's step differs from its framework's."""
    names = (each.name for each in fields(StepOptions))
    return [(name, getattr(step, name)) for name in names if getattr(step, name) != getattr(known, name)]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def test_explain_says_the_same_second(predicted: tuple[PredictedRow, ...], tmp_path: Path) -> None:
    """Guards that there is one engine: `explain` with the published layout pinned, and `validate`, agree to 1e-9."""
    for number, found in enumerate(predicted):
        if found.predicted_s is None:
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        document = good(_words(found, folder)).document
        step_s = document["config"]["iteration_s"] if "config" in document else document["iteration_s"]
        assert step_s == pytest.approx(found.predicted_s, rel=1e-9), found.row.id


def test_most_rows_are_near_what_was_measured(predicted: tuple[PredictedRow, ...]) -> None:
    """Guards what a user may expect of such an answer: three quarters within 15%, and no named row is refused."""
    known = {found.row.id: found for found in predicted if found.row.id in NAMED}
    assert set(known) == set(NAMED)
    assert all(found.predicted_s is not None for found in known.values())
    errors = [abs(found.error) for found in predicted if found.error is not None]
    assert sum(error <= 0.15 for error in errors) >= 0.75 * len(errors)


def test_rows_are_those_named() -> None:
    """Guards that the ids above still are the steps they are said to be."""
    measured = {row.id: row.step_s for row in _rows() if row.id in NAMED}
    assert measured == NAMED
    assert all(isinstance(case_of(row), Case) for row in _rows())
