"""The picture of predicted over measured steps in the documentation."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from axonn_tune.validation.published.accuracy import PredictedRow
from tests.unit.report.published import evaluated
from tools.accuracy_figure import BOTTOM, LEFT, RIGHT, TOP, figure

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> tuple[PredictedRow, ...]:
    """A few, of two sources; one of them not measured, one not predicted."""
    return evaluated(tmp_path_factory.mktemp("rows")).steps


def test_every_step_is_a_dot_in_its_place(steps: tuple[PredictedRow, ...]) -> None:
    """Guards places and colours: powers of ten around all times are the edges; a source is a path."""
    root = ElementTree.fromstring(figure(steps))
    paths = root.findall(f"{SVG}path")
    known = [one for one in steps if one.error is not None]
    times = [math.log10(value) for one in known for value in (one.row.step_s or 0.0, one.predicted_s or 0.0)]
    low, high = math.floor(min(times)), math.ceil(max(times))
    expected = {
        (
            round(LEFT + (math.log10(one.row.step_s or 0.0) - low) / (high - low) * (RIGHT - LEFT)),
            round(BOTTOM - (math.log10(one.predicted_s or 0.0) - low) / (high - low) * (BOTTOM - TOP)),
        )
        for one in known
    }
    dots = [re.findall(r"M(\d+) (\d+)h0", path.attrib["d"]) for path in paths]
    assert {(int(x), int(y)) for found in dots for x, y in found} == expected
    assert [len(found) for found in dots] == [5, 1]
    assert len({path.attrib["stroke"] for path in paths}) == 2
    words = [text.text for text in root.findall(f"{SVG}text")]
    assert "ours, 5" in words
    assert "theirs, 1" in words
