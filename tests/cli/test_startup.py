"""What starting the tool imports: the price of every call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"pandas", "plotly", "scipy", "torch"}

# Runs the console script's function as the console script does, then lists what it imported.
PROBE = """
import sys
from pathlib import Path
from axonn_tune.cli.main import main
listing, sys.argv = Path(sys.argv[1]), ["axonn-tune", *sys.argv[2:]]
try:
    code = main()
except SystemExit as end:
    code = end.code
listing.write_text("\\n".join(sys.modules))
sys.exit(code)
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--gpus", "1024", "--model", "80b"], ["--gpus", "1024", "--model", "80b", "-o", "launch.yaml"]],
    ids=["help", "search", "search and write"],
)
def test_heavy_libraries_stay_unloaded(arguments: list[str], tmp_path: Path) -> None:
    """Guards start-up time: each of these costs more than the whole search."""
    listing = tmp_path / "modules.txt"
    command = [sys.executable, "-c", PROBE, str(listing), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not HEAVY & set(listing.read_text().splitlines())
