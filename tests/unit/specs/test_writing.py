"""Writing: documents that load back equal, and files that are whole or not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from axonn_tune.specs.catalog import available, load_machine
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.schemas import schema_texts
from tests.unit.specs.launches import example_launch

MACHINE = str(Path(__file__).parent / "data" / "twotier.yaml")


@pytest.mark.parametrize("name", [*available("machine"), MACHINE])
def test_machines_load_back_equal(name: str) -> None:
    """The same for every machine, with its nested sections, lists and sources."""
    machine = load_machine(name).document
    assert parse_document(to_yaml(machine), schema=Machine) == machine


def test_a_launch_document_loads_back_equal() -> None:
    """Guards nulls that are not the default, tiny floats, and text that looks like something else."""
    launch = example_launch()
    text = to_yaml(launch)
    assert parse_document(text, schema=Launch) == launch
    assert "gradient_clip_norm: null" in text
    assert "deterministic: false" in text


def test_other_yaml_readers_get_the_same_text() -> None:
    """Guards text that YAML 1.1 readers would take for booleans or dates; they matter to scripts around us."""
    read = yaml.safe_load(to_yaml(example_launch()))
    assert (read["name"], read["provenance"]["created"]) == ("on", "2024-01-01T00:00:00Z")


@pytest.mark.parametrize("name", schema_texts())
def test_every_field_is_described(name: str) -> None:
    """Guards the hover help of editors and the comments of written files: no key without a description."""
    schema = json.loads(schema_texts()[name])
    for part in (schema, *schema.get("$defs", {}).values()):
        fields = part.get("properties", {}).items()
        assert not [key for key, field in fields if "description" not in field and "$ref" not in str(field)]


def test_schema_of_a_process_that_read_no_model_is_whole() -> None:
    """Guards `axonn-tune schema model`, which is first to ask for the sections of layer types."""
    printed = subprocess.run([sys.executable, "-m", "axonn_tune", "schema", "model"], capture_output=True, check=True)
    assert printed.stdout.decode() == (Path(__file__).parents[3] / "docs/schemas/model.json").read_text("utf-8")
