"""Files of tools that are not read: the facts that a refusal names, and the command that it offers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from axonn_tune.errors import DocumentError
from axonn_tune.frameworks.keys import records
from axonn_tune.learning.recipes import python_facts
from axonn_tune.learning.stated import read_run
from tests.cli.running import good

CASES: Mapping[str, Mapping[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[2] / "fixtures" / "trainers" / "recipes.yaml").read_text("utf-8")
)


def refusal(name: str, folder: Path) -> str:
    """What is said of a case's file."""
    path = folder / CASES[name]["file"]
    for file, text in {path.name: CASES[name]["text"], **CASES[name].get("beside", {})}.items():
        (folder / file).write_text(text, "utf-8")
    with pytest.raises(DocumentError) as caught:
        read_run(path, given={})
    return str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_names_what_was_found(name: str, tmp_path: Path) -> None:
    """Guards model, GPUs, degrees, batch and sequence of recipes and configs, and the command that states them."""
    said = refusal(name, tmp_path)
    assert "are not read" in said
    assert CASES[name]["found"] in said
    assert said.endswith(CASES[name]["command"])


@pytest.mark.parametrize("name", CASES)
def test_the_command_runs_as_it_is_printed(name: str, tmp_path: Path) -> None:
    """Guards degrees, batch and options that go together, also where something stands for what was not found."""
    good(refusal(name, tmp_path).rpartition("axonn-tune ")[2])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a.b = 2 ** 10\nc = b * 4 // 2", {"b": "1024", "c": "2048"}),
        (
            "f(x=3, y='z', flag=True)\nd = {'seq_length': 4_096}",
            {"x": "3", "y": "z", "flag": "True", "seq_length": "4096"},
        ),
        ("n = 9 ** 9 ** 9\nm = -1\nk = 1 // 0\nf = 1.5", {}),
        ("n = __import__('os').system('true')\nx = (", {}),
        ("def f(a=1):\n    t.n: int = 8 - 2", {"n": "6"}),
        ("x = " + "(" * 300 + "1" + ")" * 300, {}),
    ],
)
def test_python_is_parsed_and_not_run(text: str, found: dict[str, str]) -> None:
    """Guards constants, their products and keywords; what is no whole number, or no Python, is none."""
    assert {name: one.value for name, one in python_facts(text)} == found


@pytest.mark.parametrize("mark", [one["mark"] for one in records("tools") if r"[\s\S]*" in one["mark"]])
def test_marks_of_two_words_are_looked_for_once_a_text(mark: str) -> None:
    """Guards long programs: tried at every line, each time over the whole rest, such a mark took 20 s for one of 1,500
    lines."""
    assert "^(?=" not in mark
    assert "^(?!" not in mark
