"""Pipeline layouts against Megatron-Core's own parser, whose answers are recorded, and hostile ones."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.stages import LONGEST, PipelineLayout, layout_text, parse_layout
from tests.unit.frameworks.asked import RECORDINGS

ENTRIES: list[dict[str, Any]] = json.loads((RECORDINGS / "layouts.json").read_text(encoding="utf-8"))["entries"]
ACCEPTED = [one for one in ENTRIES if "error" not in one["answer"]]
REFUSED = [one for one in ENTRIES if "error" in one["answer"]]

SAME = {
    "Invalid layer character": "is no layer",
    "is not a valid LayerType": "is no layer",
    "Encoder layer is not supported": "is no layer",
    "must be divisible by pipeline_model_parallel_size": "stages do not divide its",
    "The first layer must be embedding": "must begin with E",
    "The last layer must be loss": "must end with L",
    "Embedding must be specified exactly once": "E is in parts",
    "Loss must be specified exactly once": "L is in parts",
    "must match num_layers": "decoder layers; the model has",
    "must match mtp_num_layers": "MTP layers; the model has",
    "decoder layers must be placed before MTP": "a decoder layer comes after it",
    "should be always in the last": "last of a stage, can",
    "must be in the same one": "must be in one part",
}
"""Constraints in Megatron-Core's words and in ours."""


def _parsed(one: dict[str, Any]) -> PipelineLayout:
    """A layout of a recording for its run; a list as the text that Python makes of it."""
    mtp = one["mtp_layers"] or 0
    return parse_layout(str(one["layout"]), stages=one["stages"], layers=one["layers"], mtp=mtp)


@pytest.mark.parametrize("one", ACCEPTED, ids=lambda one: str(one["layout"]))
def test_parts_are_those_that_megatron_finds(one: dict[str, Any]) -> None:
    """Layers of each part, and the one with MTP layers; the text that we write says the same."""
    found, held = _parsed(one), one["answer"]["mtp"]
    place = next((part for part, count in enumerate(held) if count), None)
    assert found == PipelineLayout(tuple(one["answer"]["parts"]), sum(held), place)
    assert parse_layout(layout_text(*found)) == found


@pytest.mark.parametrize("one", REFUSED, ids=lambda one: f"{one['constraint']}: {one['layout']}")
def test_what_megatron_refuses_is_refused_for_the_same_constraint(one: dict[str, Any]) -> None:
    """The error names the text, and a valid layout near it."""
    (words,) = [ours for theirs, ours in SAME.items() if theirs in one["answer"]["error"]]
    with pytest.raises(UsageError, match="pipeline layout") as caught:
        _parsed(one)
    said = str(caught.value)
    assert words in said
    assert str(one["layout"]) in said.replace('"', "'").replace("\\", "") or "..." in said
    if "nearest valid: " in said:
        near = said.rpartition("nearest valid: ")[2]
        assert parse_layout(near, stages=one["stages"], layers=one["layers"], mtp=one["mtp_layers"] or 0)


@pytest.mark.parametrize(("layout", "words"), [("|Et|tL", "must begin with E"), ("Et|tL|", "must end with L")])
def test_the_embedding_is_in_the_first_part_and_the_loss_in_the_last(layout: str, words: str) -> None:
    """Guards what Megatron-Core's parser takes but does not build."""
    with pytest.raises(UsageError, match=words):
        parse_layout(layout)


@pytest.mark.parametrize(
    ("layout", "near"),
    [
        ("Et*3|(tt|)*29,m|L", "Et*3|(t*2|)*13t*1|(t*2|)*15|L"),
        ("Et|t|tL", "Et*30|t*30L"),
    ],
)
def test_the_nearest_layout_keeps_parts_and_proportions(layout: str, near: str) -> None:
    """Of a model with another number of layers, and of stages that do not divide the parts."""
    with pytest.raises(UsageError) as caught:
        parse_layout(layout, stages=2, layers=60, mtp=0)
    assert str(caught.value).endswith(f"nearest valid: {near}")


@pytest.mark.parametrize(
    "layout",
    [
        "Et*999999999L",
        f"Et*{'9' * 4_900}L",
        f"Et*{'0' * 4_000}99999L",
        "E(t*99|)*99L",
        "E((((t*9|)*9)*9)*9)*9L",
        "(" * LONGEST,
        "(t" * (LONGEST // 2),
        "(t)*9" * (LONGEST // 5),
        "[" * LONGEST,
        f"[{'[],' * 1_600}x]",
        "t|" * 500_000,
        "",
        "\x00",
        "Et*٣L|",
    ],
    ids=lambda text: f"{text[:12]!r} of {len(text)}",
)
def test_a_hostile_layout_is_refused_fast(layout: str) -> None:
    """Guards repeats that would fill memory, nesting, and a megabyte of text."""
    started = time.perf_counter()
    with pytest.raises(UsageError) as caught:
        parse_layout(layout, stages=2, layers=8, mtp=0)
    assert time.perf_counter() - started < 1.0
    assert len(str(caught.value)) < 2 * LONGEST


def test_texts_repeat_parts_in_a_row() -> None:
    """Guards the ends, MTP layers without a place, and parts without layers."""
    assert layout_text((1,)) == "Et*1L"
    assert layout_text((3, 2, 2, 2, 0), mtp=2) == "Et*3|(t*2|)*3mmL"
    assert layout_text((0, 4, 0, 0), mtp=1, mtp_part=2) == "E|t*4|m|L"
