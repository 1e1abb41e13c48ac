"""Environment variables: which, why, each once, and in bash as they are."""

from __future__ import annotations

import json
import subprocess

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.grid import AXES, Grid
from axonn_tune.launch.config import environment_lines, launch_environment
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.launch import LaunchVariable
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.workload import Workload
from tests.unit.launch.cases import case

WORKLOAD = Workload(global_batch=8, sequence_length=64)
TENSOR_PARALLEL = Grid(x=2)


def chosen(machine: Machine, workload: Workload = WORKLOAD, grid: Grid = TENSOR_PARALLEL) -> dict[str, LaunchVariable]:
    """The variables of a launch by name."""
    return {variable.name: variable for variable in launch_environment(machine, workload=workload, grid=grid)}


@pytest.mark.parametrize(
    ("grid", "queues"), [(TENSOR_PARALLEL, "8"), (Grid(pipeline=4, order=(*AXES, "pipeline")), "32")], ids=str
)
def test_each_stream_has_a_hardware_queue(grid: Grid, queues: str) -> None:
    """Guards messages between stages: with fewer queues than streams one that waits would hold up others."""
    found = chosen(load_machine("dgx-h100").document, grid=grid)
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"].value == queues


@pytest.mark.parametrize("name", ["A; rm -rf ~ #", "A$(rm)", "A`rm`", "A\nrm", "A\n", "A B", "1A", "é", ""])
def test_names_no_shell_takes_are_refused(name: str) -> None:
    """Guards the shell against a profile: the name is code in every framework's script, so the schema checks it."""
    listed = f"launcher:\n  environment: [{{name: {json.dumps(name)}, value: x, why: y}}]\n"
    with pytest.raises(DocumentError, match=r"(?s)launcher\.environment\..*must match pattern"):
        parse_document(f"schema: axonn-tune/machine/1\nname: m\nextends: localhost\n{listed}", schema=Machine)


def test_values_and_reasons_reach_bash_unchanged() -> None:
    """Guards quoting: whatever a value holds is the value, and a reason stays a comment."""
    value = "a b'c\"d$(touch pwned)`x`\\n\n#e*"
    odd = LaunchVariable(name="ODD", value=value, why="one\nexport ODD=two\u2028export ODD=three", purpose="site")
    launch = case().launch.model_copy(update={"environment": (odd,)})
    script = "\n".join([*environment_lines(launch.environment), 'printf "%s" "$ODD"'])
    done = subprocess.run(["bash", "-euc", script], capture_output=True, text=True, check=True, timeout=10)
    assert done.stdout == value
