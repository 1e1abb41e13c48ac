"""docs/launch.md: every variable, no more and no less; the example and the scripts."""

from __future__ import annotations

import re
from pathlib import Path

from axonn_tune.grid import Grid
from axonn_tune.launch.config import launch_environment, launch_text
from axonn_tune.launch.scripts import SUFFIXES
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.launch import PURPOSES, Launch
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.workload import Workload

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "launch.md").read_text("utf-8")


def table(heading: str) -> list[str]:
    """Rows of the table below a heading of the page."""
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| `")]


def test_every_variable_is_documented() -> None:
    """Guards the table of variables: those that are set without the machine asking."""
    workload = Workload(global_batch=8, sequence_length=64)
    rows = []
    for name in ("perlmutter", "localhost"):
        machine = load_machine(name).document
        bare = machine.model_copy(update={"launcher": machine.launcher.model_copy(update={"environment": ()})})
        for variable in launch_environment(bare, workload=workload, grid=Grid(x=2)):
            row = f"| `{variable.name}` | {machine.launcher.backend} | {variable.purpose} | {variable.why} |"
            rows.append(row)
    documented = [re.sub(r"both", "gloo", row) for row in table("Environment")]
    documented += [re.sub(r"both", "nccl", row) for row in table("Environment") if "| both |" in row]
    assert sorted(documented) == sorted(rows), "the rows should be:\n" + "\n".join(rows)
    assert all(f"*{purpose}*" in PAGE for purpose in PURPOSES)


def test_the_example_loads() -> None:
    """Guards the excerpt: the shown lines are written by this version, line by line."""
    shown = PAGE.split("```yaml\n")[1].split("```")[0]
    launch = parse_document(shown, schema=Launch)
    assert launch_text(launch) == shown


def test_both_scripts_are_named() -> None:
    """Guards the names of the emitted files."""
    for kind, suffix in SUFFIXES.items():
        assert f"--emit {kind}" in PAGE
        assert f"`launch{suffix}`" in PAGE
