"""What the main job writes, and the streams it writes to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from axonn_tune.grid import AXES
from tests.cli.running import good, run


def test_pick_and_emit_write_files(tmp_path: Path) -> None:
    """Guards -o, --pick and --emit: the row asked for is written, and both files are named."""
    path = tmp_path / "launch.yaml"
    finished = good(f"--gpus 64 --model 20b -o {path} --pick 2 --emit slurm --format json")
    assert str(path) in finished.err
    assert (tmp_path / "launch.sbatch").is_file()
    second = finished.document["configs"][1]
    explained = good(f"explain {path} --format json").document["config"]
    for key in (*AXES, "order", "micro_batch", "recompute", "communication_s", "iteration_s"):
        assert explained[key] == second[key]
    assert "axonn-tune --gpus 64 --model 20b -o" in path.read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--gpus 6 --model nano --machine perlmutter --emit slurm -o {0}/launch.yaml", "do not fill nodes of 4"),
        ("--gpus 8 --model nano --machine localhost --emit slurm -o {0}/launch.yaml", "no launcher.slurm section"),
        ("--gpus 8 --model nano --machine perlmutter --emit torchrun -o {0}/launch.sh", "--emit needs a launch config"),
        ("--gpus 8 --model nano -o -", "a launch config is a file of its own"),
    ],
)
def test_a_refused_script_leaves_no_launch_config(line: str, said: str, tmp_path: Path) -> None:
    """Guards the order: nothing is written before all that can be refused is known to be right."""
    finished = run(line.format(tmp_path))
    assert finished.code == 2
    assert said in finished.err
    assert not list(tmp_path.iterdir())


def test_a_reader_that_stops_is_no_error() -> None:
    """Guards `axonn-tune ... | head`: quiet, and no failure."""
    program = "import sys; from axonn_tune.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "--gpus", "1024", "--model", "80b", "--top", "0", "--format", "csv"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        job.stdout.close()
        assert job.stderr.read() == b""
    assert job.returncode == 0


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("line", ["--gpus 8 --model 5b", "models list", "--gpus 8 --model 81b"])
def test_closed_streams_are_no_error_of_ours(closed: str, line: str) -> None:
    """Guards `>&-`: what cannot be printed is dropped, and the exit code is that of the command."""
    program = "import sys; from axonn_tune.cli.main import main; sys.exit(main())"
    command = f'"{sys.executable}" -c "{program}" {line} {closed}'
    job = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert job.returncode == (2 if "81b" in line else 0)
    assert "Internal error" not in job.stderr
    assert "Traceback" not in job.stderr
