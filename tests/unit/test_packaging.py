"""What an installed package holds."""

from __future__ import annotations

import configparser
import importlib.resources
from pathlib import Path

import pytest

from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model

ROOT = Path(__file__).parents[2]
SCHEMAS: dict[str, type[Model] | type[Machine]] = {"configs": Model, "machines": Machine}


def test_setup_lists_every_package() -> None:
    """Guards installs: a folder missing from the list in setup.cfg is missing from the wheel."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "axonn_tune").rglob("__init__.py")}
    assert listed == found | {"axonn_tune.shipped_configs", "axonn_tune.shipped_machines"}


def test_setup_ships_every_folder_of_data() -> None:
    """Guards installs: data in a folder that is no package is listed by its pattern."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options.package_data"]
    for path in (ROOT / "axonn_tune").rglob("*.csv"):
        if not (path.parent / "__init__.py").is_file():
            package = ".".join(path.parent.parent.relative_to(ROOT).parts)
            assert listed.get(package) == f"{path.parent.name}/*", path


@pytest.mark.parametrize("folder", SCHEMAS)
def test_installed_package_holds_the_profiles(folder: str) -> None:
    """Guards package data: what lies in the top-level folder is what the installed package offers."""
    installed = {file.name for file in importlib.resources.files(f"axonn_tune.shipped_{folder}").iterdir()}
    in_tree = {path.name for path in (ROOT / folder).glob("*.yaml")}
    assert in_tree, "no profiles"
    assert {name for name in installed if name.endswith(".yaml")} == in_tree
