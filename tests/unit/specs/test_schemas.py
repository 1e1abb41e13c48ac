"""The JSON Schemas in docs/schemas, which editors read."""

from __future__ import annotations

import shutil
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner

from axonn_tune.specs.document import Document
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import Summary
from axonn_tune.specs.workload import Workload
from tools.reference import main, outdated


def sections(document: type[Document]) -> set[type[Document]]:
    """A document class and all that its fields are made of."""
    found: set[type[Document]] = set()
    queue: list[object] = [document]
    while queue:
        kind = queue.pop()
        if isinstance(kind, type) and issubclass(kind, Document) and kind not in found:
            found.add(kind)
            queue += [field.annotation for field in kind.model_fields.values()]
        queue += getattr(kind, "__args__", ())
    return found


def test_the_files_match_the_code() -> None:
    """Guards docs/schemas against schema changes that were not written out (`make generate`)."""
    assert outdated(Path(__file__).parents[3] / "docs" / "schemas") == []


def test_differences_are_found(tmp_path: Path) -> None:
    """Guards the check itself: changed, missing and left-over files fail it, and writing mends it."""
    docs = tmp_path / "docs"
    shutil.copytree(Path(__file__).parents[3] / "docs" / "schemas", docs / "schemas")
    shutil.copy(Path(__file__).parents[3] / "docs" / "launch.md", docs)
    (docs / "schemas" / "model.json").write_text("{}", encoding="utf-8")
    (docs / "schemas" / "launch.json").unlink()
    (docs / "schemas" / "old.json").write_text("{}", encoding="utf-8")
    with chdir(tmp_path):
        checked = CliRunner().invoke(main, ["--check"])
        assert (checked.exit_code, CliRunner().invoke(main).exit_code) == (1, 0)
        assert CliRunner().invoke(main, ["--check"]).exit_code == 0
    for name in ("model.json", "launch.json", "old.json"):
        assert f"docs/schemas/{name}" in checked.stderr
    assert outdated(docs / "schemas") == []


@pytest.mark.parametrize("document", [Model, Machine, Workload, Launch, Summary])
def test_every_field_is_described(document: type[Document]) -> None:
    """Guards the hover help of editors and the comments of written files: no key without a description."""
    missing = {
        f"{section.__name__}.{name}"
        for section in sections(document)
        for name, field in section.model_fields.items()
        if not field.description
    }
    assert not missing
