"""Pairs of rows that differ in one thing, groups, and memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from axonn_tune.report.accuracy import accuracy_document, accuracy_text
from axonn_tune.validation.published.accuracy import Accuracy, StepSummary, predict_steps
from axonn_tune.validation.published.groups import groups, memory, pairs
from tests.unit.validation.published.test_cells import read


def test_rows_in_groups_and_pairs(tmp_path: Path) -> None:
    """Guards what is compared: one thing differs, or nothing is; rows of unnamed GPUs count for their ratio alone."""
    first = read(
        tmp_path,
        id="first",
        memory_gib="60",
        model="qwen3-30b-a3b",
        gpus="64",
        tp="1",
        pp="1",
        vp="",
        ep="8",
        recompute="full",
    )
    others = {"second": {"micro_batch": 2}, "third": {"micro_batch": 2, "precision": "fp8 blockwise"}}
    times = {"second": 18.0, "third": 12.0}
    rows = [first, *(replace(first, id=name, step_s=times[name], **more) for name, more in others.items())]
    assert first.more is not None
    rows.append(replace(rows[-1], id="fourth", step_s=6.0, more=replace(first.more, ratios_only="slower")))
    predicted = (20.0, 19.0, 13.0, 13.0)
    steps = tuple(replace(one, predicted_s=time) for one, time in zip(predict_steps(rows), predicted, strict=True))
    found = {(one.what, one.first.row.id, one.second.row.id): one for one in pairs(steps)}
    assert {*found} == {
        ("micro-batch", "first", "second"),
        ("format", "second", "third"),
        ("format", "second", "fourth"),
    }
    assert found["format", "second", "third"].measured == 12.0 / 18.0
    assert found["format", "second", "third"].right
    assert (
        replace(found["format", "second", "third"], second=replace(steps[1], row=replace(rows[1], step_s=17.9))).right
        is None
    )
    named = groups(steps)
    assert {name: one.quality.rows for name, one in named.items()} == {"experts, BF16": 2, "formats": 1}
    assert [one.row.id for one, _ in memory(steps)] == [row.id for row in rows]
    kept = replace(first, id="kept", more=replace(first.more, memory_kind="reserved"))
    reserved = replace(steps[0], row=kept)
    assert reserved.counted_bytes == pytest.approx((steps[0].memory_bytes or 0.0) / 0.95)
    document = accuracy_document(Accuracy(Path("x.csv"), StepSummary(steps), more=StepSummary(steps)))
    assert [one["first"] for one in document["more"]["pairs"]] == ["first", "second", "second"]
    assert "pairs that differ in one thing" in accuracy_text(
        Accuracy(Path("x.csv"), StepSummary(steps), more=StepSummary(steps))
    )
    untuned = replace(steps[0], row=replace(first, more=replace(first.more, functional=True)))
    assert list(groups((untuned,))) == ["functional"]
    text = accuracy_text(Accuracy(Path("x.csv"), StepSummary(steps[:1]), more=StepSummary((untuned, *steps[1:]))))
    worst = text.partition("worst rows that name their model")[2].partition("\n\n")[0]
    assert "second" in worst
    assert "first" not in worst
