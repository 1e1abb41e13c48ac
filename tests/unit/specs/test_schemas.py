"""The JSON Schemas in docs/schemas, which editors read."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_tune.specs.document import Document
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.results import Summary
from axonn_tune.specs.workload import Workload
from tools.reference import outdated


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
