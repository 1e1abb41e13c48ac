"""What an installed package holds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
STARTED = """
import sys
sys.modules["torch"] = sys.modules["plotly"] = None
import axonn_tune
from axonn_tune.cli.main import main
assert axonn_tune.__file__.startswith(sys.argv[1]), axonn_tune.__file__
sys.exit(main(["--gpus", "64", "--model", "80b", "--machine", "dgx-h100", "--emit", "slurm"]))
"""


def test_the_wheel_has_everything_and_starts_alone(tmp_path: Path) -> None:
    """Guards installs: each module and each file of data is in the wheel, profiles too, and it works without torch."""
    folders = ("axonn_tune", "configs", "machines")
    for name in (*folders, "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        copied = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copied(ROOT / name, tmp_path / name)
    code = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    command = [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "installed")
        names = set(packed.namelist())
    shipped = {"configs": "axonn_tune/shipped_configs", "machines": "axonn_tune/shipped_machines"}
    for folder in folders:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                assert f"{shipped.get(folder, folder)}/{path.relative_to(ROOT / folder)}" in names
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
