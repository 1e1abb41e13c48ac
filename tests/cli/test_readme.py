"""The documentation, run: README's commands work, and the lists of commands are complete."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from axonn_tune.cli import reference
from axonn_tune.cli.main import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def console_blocks(page: Path) -> Iterator[list[list[str]]]:
    """The axonn-tune commands of each console block of a page, each split into words."""
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL):
        joined = block.replace("\\\n", " ")
        lines = [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ axonn-tune")]
        if lines:
            yield [shlex.split(line, comments=True)[1:] for line in lines]


BLOCKS = [pytest.param(block, id=f"{page.name}-{n}") for page in PAGES for n, block in enumerate(console_blocks(page))]


@pytest.mark.parametrize("block", BLOCKS)
def test_documented_commands_run(block: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the documentation: the commands of a block run in order, in one folder, and all succeed."""
    monkeypatch.chdir(tmp_path)
    for arguments in block:
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == 0, f"axonn-tune {shlex.join(arguments)}\n{result.output}{result.exception!r}"


def test_readme_has_commands_to_run() -> None:
    """Guards the test above: it would pass on an empty list."""
    assert list(console_blocks(ROOT / "README.md"))


def test_readme_lists_every_command() -> None:
    """Guards the table of commands: each one, and none that does not exist."""
    assert isinstance(cli, click.Group)
    rows = re.findall(r"^\| `axonn-tune ([a-z]+)[^`]*` \|", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    assert set(rows) == {name for name, command in cli.commands.items() if not command.hidden}


def test_reference_matches_the_help() -> None:
    """Guards docs/cli.md, which is generated."""
    assert (ROOT / "docs" / "cli.md").read_text("utf-8") == reference.render(cli), "run `make docs`"
