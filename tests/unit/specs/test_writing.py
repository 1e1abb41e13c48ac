"""Writing: documents that load back equal, and files that are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from axonn_tune.specs.catalog import available, load_machine, load_model
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from tests.unit.specs.launches import example_launch

MACHINE = str(Path(__file__).parent / "data" / "twotier.yaml")


@pytest.mark.parametrize("name", available("model"))
def test_shipped_models_load_back_equal(name: str) -> None:
    """Guards that what is written means what was loaded, for every shipped model."""
    model = load_model(name).document
    assert parse_document(to_yaml(model), schema=Model) == model


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


def test_units_and_header_become_comments() -> None:
    """Guards that a written profile explains itself: units per number, provenance on top."""
    lines = to_yaml(load_machine(MACHINE).document, header=["Fitted on\nWednesday", ""]).splitlines()
    assert lines[:4] == ["# Fitted on", "# Wednesday", "#", ""]
    assert "  memory_gib: 16  # Memory of one rank, GiB." in lines
    assert "    memory_gib: {kind: fact, source: invented}" in lines
    assert max(map(len, lines)) <= 120
