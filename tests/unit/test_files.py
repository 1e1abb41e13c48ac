"""Files that are either whole or not there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from axonn_tune.errors import EnvironmentProblem
from axonn_tune.files import write_text_atomically


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """Guards the plain case: new text, old permissions, nothing left beside it."""
    path = tmp_path / "f.yaml"
    write_text_atomically(path, "one\n")
    path.chmod(0o640)
    write_text_atomically(path, "zwei µ\n")
    assert path.read_text(encoding="utf-8") == "zwei µ\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    """Guards links such as `latest.yaml`, which a rename would replace by a file."""
    (tmp_path / "link.yaml").symlink_to(tmp_path / "real.yaml")
    write_text_atomically(tmp_path / "link.yaml", "x")
    assert (tmp_path / "link.yaml").is_symlink()
    assert (tmp_path / "real.yaml").read_text(encoding="utf-8") == "x"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Guards against half-written files: the old one stays, the temporary one goes, the message says why."""
    path = tmp_path / "f.yaml"
    path.write_text("old", encoding="utf-8")

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(EnvironmentProblem, match=os.strerror(code)) as caught:
        write_text_atomically(path, "new" * 100_000)
    assert caught.value.exit_code == 5
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_devices_are_written_to_directly() -> None:
    """Guards `-o /dev/stdout`: no temporary file in /dev, and a real ENOSPC is explained."""
    write_text_atomically("/dev/null", "x")
    with pytest.raises(EnvironmentProblem, match="No space left"):
        write_text_atomically("/dev/full", "x")
