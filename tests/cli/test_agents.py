"""docs/agents.md: every command in it, run, has the JSON keys that stand below it; its exit codes are the tool's."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from axonn_tune.cli.main import EPILOG
from tests.cli.running import run

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
PAGE = (ROOT / "docs" / "agents.md").read_text("utf-8")
SECTION = re.compile(r"^```sh\n(axonn-tune [^\n]*)\n```\n\n((?:^\|[^\n]*\n)+)", flags=re.MULTILINE)


def keys_of(table: str) -> list[str]:
    """The keys in the first column of a table."""
    return [key for line in table.splitlines()[2:] for key in re.findall(r"`([^`]+)`", line.split("|")[1])]


PROMISED = {line: keys_of(table) for line, table in SECTION.findall(PAGE)}


def has(document: Any, path: str) -> bool:
    """Whether a path such as `configs[].low_s` leads somewhere: in some entry of each list that has entries."""
    for part in path.split("."):
        name, _, listed = part.partition("[")
        found = [one[name] for one in (document if isinstance(document, list) else [document]) if name in (one or {})]
        if not found:
            return False
        document = [entry for one in found for entry in one] if listed else found
        if listed and not document:
            return path.startswith("causes[]")
    return True


@pytest.mark.parametrize("line", PROMISED)
def test_commands_for_agents_have_the_keys_named(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what an agent parses: the command ends in 0, and each key of its table is in its JSON."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(FIXTURES / "commands" / "gpt-one-line.sh", "pretrain.sh")
    for suffix, name in ((".out", "titan.log"), (".yaml", "titan.yaml")):
        shutil.copy(FIXTURES / "evidence" / name, f"slurm-1234{suffix}")
    finished = run("", shlex.split(line)[1:])
    assert finished.code == 0, finished.err
    document, keys = json.loads(finished.out), PROMISED[line]
    assert keys
    assert not [key for key in keys if not has(document, key)]


def test_the_skill_file_is_one() -> None:
    """Guards the head by which agents find it, its exit codes, and that every command has a table of keys."""
    head = yaml.safe_load(PAGE.split("---")[1])
    assert head["name"] == "axonn-tune"
    assert len(head["description"]) < 1024
    codes = re.findall(r"^\| (\d+) \|", PAGE, flags=re.MULTILINE)
    assert codes == re.findall(r"^  (\d+) ", EPILOG, flags=re.MULTILINE)
    assert len(PROMISED) == len(re.findall(r"^axonn-tune ", PAGE, flags=re.MULTILINE))
