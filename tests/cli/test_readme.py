"""The documentation, run: README's commands work, and the lists of commands are complete."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from axonn_tune.cli.main import cli, main
from tests.cli.test_examples import commands_of, understood
from tools import reference

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
PAGES = [ROOT / "README.md", *sorted(page for page in (ROOT / "docs").glob("*.md") if page != TUTORIAL)]
# What the tutorial takes its time for, and as little of it as shows that the command works.
SHORTER = {
    "--budget 20s": "--budget 2s",
    "--steps 25": "--steps 4",
    "--top 2 --repeats 2": "--top 1 --repeats 1 --steps 4",
}


@dataclass(frozen=True)
class Command:
    """One command of a console block and what the page shows below it."""

    line: str
    output: str

    @property
    def words(self) -> list[str]:
        """The command without its name."""
        return shlex.split(self.line, comments=True)[1:]


def console_blocks(page: Path) -> list[list[Command]]:
    """The commands of each console block of a page."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [list(commands(block.replace("\\\n", " "))) for block in blocks]


def commands(block: str) -> Iterator[Command]:
    """The commands of one block, each with the lines up to the next."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        line, _, output = part.partition("\n")
        yield Command(line, output)


BLOCKS = [pytest.param(block, id=f"{page.name}-{n}") for page in PAGES for n, block in enumerate(console_blocks(page))]


def execute(block: list[Command]) -> None:
    """Run the commands of a block in order in this folder; `cat` shows a file to write first."""
    for command in block:
        if command.line.startswith("cat "):
            Path(*command.words).write_text(command.output, encoding="utf-8")
        elif command.line.startswith("axonn-tune"):
            result = CliRunner().invoke(cli, command.words)
            assert result.exit_code == 0, f"{command.line}\n{result.output}\n{result.exception!r}"


@pytest.mark.parametrize("block", BLOCKS)
def test_documented_commands_run(block: list[Command], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the documentation: a block's commands run in order in one folder."""
    monkeypatch.chdir(tmp_path)
    execute(block)


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards docs/tutorial.md from top to bottom in one folder, with less time to measure and fewer steps."""
    monkeypatch.chdir(tmp_path)
    blocks = console_blocks(TUTORIAL)
    lines = "\n".join(command.line for block in blocks for command in block)
    assert all(words in lines for words in SHORTER)
    for block in blocks:
        execute([Command(shortened(command.line), command.output) for command in block])
    left = {path.name for path in tmp_path.iterdir()}
    assert {"here.yaml", "launch.sbatch", "first-run", "measured.yaml", "regress.md", "predictions.xml"} <= left


def shortened(line: str) -> str:
    """A command of the tutorial that takes seconds."""
    for words, fewer in SHORTER.items():
        line = line.replace(words, fewer)
    return line


SHELL = [
    pytest.param(call, id=f"{page.name}: {' '.join(call)[:60]}")
    for page in (*PAGES, TUTORIAL)
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    for call in dict.fromkeys(commands_of(block))
]


@pytest.mark.parametrize("call", SHELL)
def test_shell_commands_are_understood(call: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what takes a lab, a cluster or minutes: the command exists, and so does every option of it."""
    assert understood(call, monkeypatch) == 0


def test_commands_of_shell_blocks_are_found() -> None:
    """Guards the test above: it would pass on an empty list."""
    assert len(SHELL) > 20


def test_readme_has_commands_to_run() -> None:
    """Guards the test above: it would pass on an empty list."""
    assert list(console_blocks(ROOT / "README.md"))


def test_readme_lists_every_command() -> None:
    """Guards the table of commands: each one, and none that does not exist."""
    assert isinstance(cli, click.Group)
    rows = re.findall(r"^\| `axonn-tune ([a-z]+)[^`]*` \|", (ROOT / "README.md").read_text("utf-8"), flags=re.MULTILINE)
    assert set(rows) == {name for name, command in cli.commands.items() if not command.hidden}


def test_reference_matches_the_help() -> None:
    """Guards docs/cli.md and docs/files.md, which are generated."""
    assert (ROOT / "docs" / "cli.md").read_text("utf-8") == reference.render(cli), "run `make generate`"
    files = reference.FILES_PREAMBLE + reference.tables()
    assert (ROOT / "docs" / "files.md").read_text("utf-8") == files, "run `make generate`"


def test_the_example_of_a_launch_config_is_what_its_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards docs/launch.md: the command that the example names writes the example, on another day or version."""
    shown = (ROOT / "docs" / "launch.md").read_text("utf-8").split("```yaml\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(reference.EXAMPLE)[1:]) == 0
    written = Path("launch.yaml").read_text("utf-8")
    assert reference.EXAMPLE in shown
    changing = re.compile(r"^  (created|version): .*\n|(?<=^# Written by axonn-tune )\S+:", flags=re.MULTILINE)
    assert changing.sub("", shown) == changing.sub("", written), "run `make generate`"
