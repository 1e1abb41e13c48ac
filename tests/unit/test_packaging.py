"""What an installed package holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tools.wheel import FOLDERS, ROOT, problems

STARTED = """
import sys
sys.modules["torch"] = sys.modules["plotly"] = None
import axonn_tune
from axonn_tune.cli.main import main
assert axonn_tune.__file__.startswith(sys.argv[1]), axonn_tune.__file__
sys.exit(main(["--gpus", "64", "--model", "80b", "--machine", "dgx-h100", "--emit", "slurm"]))
"""


def test_the_wheel_has_everything_and_starts_alone(tmp_path: Path) -> None:
    """Guards installs: the wheel has each module and file of data, no other, and works without torch."""
    for name in (*FOLDERS, "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copied(ROOT / name, tmp_path / name)
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert not list(problems(wheel))
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
    started = subprocess.run(
        [sys.executable, "-c", STARTED, str(tmp_path / "installed")],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        cwd=tmp_path / "installed",
        capture_output=True,
        text=True,
        check=False,
    )
    assert started.returncode == 0, started.stderr
    assert (tmp_path / "installed" / "launch.sbatch").is_file()


def test_what_a_wheel_lacks_is_named(tmp_path: Path) -> None:
    """Guards the check of a wheel: a file that lacks, one that does not belong into it, and no license."""
    wheel = tmp_path / "axonn_tune-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("tests/unit/test_packaging.py", "")
        packed.writestr("axonn_tune-0.dist-info/METADATA", "")
    found = set(problems(wheel))
    expected = ("axonn_tune/shipped_machines/dgx-h100.yaml lacks", "licenses/LICENSE lacks")
    assert {*expected, "tests/unit/test_packaging.py does not belong into it"} <= found
