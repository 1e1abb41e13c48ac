"""Environment variables: which, why, each once, and in bash as they are."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.grid import AXES, Grid
from axonn_tune.launch.config import environment_lines, launch_environment
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.launch import LaunchVariable
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.machine import EnvironmentVariable, Machine
from axonn_tune.specs.workload import Workload
from tests.unit.launch.cases import case

WORKLOAD = Workload(global_batch=8, sequence_length=64)
TENSOR_PARALLEL = Grid(x=2)


def with_environment(machine: str, variables: Sequence[EnvironmentVariable]) -> Machine:
    """A shipped machine with just these variables of its own."""
    document = load_machine(machine).document
    launcher = document.launcher.model_copy(update={"environment": tuple(variables)})
    return document.model_copy(update={"launcher": launcher})


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


def test_what_overlap_needs_is_set_only_with_overlap() -> None:
    """Guards against advice without a reason: nothing hidden, nothing to set for it."""
    machine = with_environment("perlmutter", [])
    without = WORKLOAD.model_copy(update={"overlaps": ()})
    assert "overlap" in {variable.purpose for variable in chosen(machine).values()}
    assert "overlap" not in {variable.purpose for variable in chosen(machine, without).values()}


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
