"""The file of points: written as they come, read after a kill, refused where it does not belong."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError, UsageError
from axonn_tune.specs.points import CopyProbe, Point, PointLog, read_points
from tests.unit.calibration.synthetic import setting

POINT = Point(probe=CopyProbe(size_bytes=64), seconds=1e-6, calls=3)


def written(path: Path, count: int = 2) -> Path:
    """A file of some points."""
    log = PointLog(path)
    assert log.open(setting(2), resume=False) == ()
    for _ in range(count):
        log.add(POINT)
    log.close()
    return path


def test_points_are_read_back(tmp_path: Path) -> None:
    """Guards the format."""
    found = read_points(written(tmp_path / "points"))
    assert found.setting == setting(2)
    assert found.points == (POINT, POINT)


def test_a_torn_last_line_is_left_out_and_written_over(tmp_path: Path) -> None:
    """Guards --resume after a kill in the middle of a line."""
    path = written(tmp_path / "points")
    path.write_text(path.read_text("utf-8")[:-9], encoding="utf-8")
    assert read_points(path).points == (POINT,)
    log = PointLog(path)
    assert log.open(setting(2), resume=True) == (POINT,)
    log.add(POINT)
    log.close()
    assert read_points(path).points == (POINT, POINT)


def test_a_line_that_is_wrong_is_named(tmp_path: Path) -> None:
    """Guards against fitting what is no measurement: line and place are in the message."""
    path = written(tmp_path / "points")
    path.write_text(path.read_text("utf-8").replace('"seconds":1e-6', '"seconds":-1', 1), encoding="utf-8")
    with pytest.raises(DocumentError, match=r"points:2: seconds: .*greater than 0"):
        read_points(path)


@pytest.mark.parametrize("text", ["", "{}\n", "nonsense\n"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    """Guards mistaken paths."""
    (tmp_path / "points").write_text(text, encoding="utf-8")
    with pytest.raises(DocumentError):
        read_points(tmp_path / "points")


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    """Guards points that took long to measure."""
    path = written(tmp_path / "points")
    with pytest.raises(UsageError, match="pass --resume to continue"):
        PointLog(path).open(setting(2), resume=False)


def test_points_measured_elsewhere_are_refused(tmp_path: Path) -> None:
    """Guards against mixing: what differs is named."""
    path = written(tmp_path / "points")
    other = setting(2).model_copy(update={"library": "Gloo of torch 3", "ranks": setting(4).ranks})
    with pytest.raises(UsageError, match=r"library, ranks \(2 then, 4 now\)"):
        PointLog(path).open(other, resume=True)
