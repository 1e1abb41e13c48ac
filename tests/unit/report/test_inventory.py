"""The picture of a fit."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from axonn_tune.calibration.profile import calibrate
from axonn_tune.errors import UsageError
from axonn_tune.report.inventory import fit_svg, require_svg
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.points import PointFile
from tests.unit.calibration import synthetic

SVG = "{http://www.w3.org/2000/svg}"


def test_every_point_is_drawn() -> None:
    """Guards the picture: well-formed, one circle per measured collective, one line per group shape of each."""
    base = load_machine("localhost").document
    points = synthetic.points(4, base, noise=0.05)
    picture = ElementTree.fromstring(fit_svg(calibrate(PointFile(synthetic.setting(4), tuple(points)), base, name="x")))
    collectives = {point.probe for point in points if point.probe.what == "collective"}
    assert len(picture.findall(f".//{SVG}circle")) == len(collectives)
    shapes = {(probe.op, probe.group, probe.stride) for probe in collectives if probe.what == "collective"}
    assert len(picture.findall(f".//{SVG}polyline")) == len(shapes)


def test_other_pictures_are_refused() -> None:
    """Guards --plot before anything is measured."""
    with pytest.raises(UsageError, match=r"must end in \.svg"):
        require_svg("fit.png")
