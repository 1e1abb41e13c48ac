"""The house's own rules: which way imports go, how large pieces get, which names are used."""

from __future__ import annotations

import configparser
import importlib.resources
import re
from pathlib import Path

import pytest

from axonn_tune import __version__, errors
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from tests.unit import house

VOCABULARY = {"errors", "units", "grid", "files", "processes"}
# What each layer may import beside itself and the package's own version.
MAY_IMPORT: dict[str, set[str]] = {
    "": {"api", "errors", "lab", "specs"},
    "__main__": {"cli"},
    "errors": set(),
    "units": set(),
    "files": {"errors"},
    "processes": set(),
    "grid": {"errors", "units"},
    "specs": VOCABULARY,
    "program": VOCABULARY | {"specs"},
    "cost": VOCABULARY | {"specs", "program"},
    "runtime": VOCABULARY | {"specs", "program"},
    "ranking": VOCABULARY | {"specs", "program", "cost"},
    "launch": VOCABULARY | {"specs", "program", "cost", "ranking"},
    "baselines": VOCABULARY | {"specs", "program", "cost", "ranking"},
    "lab": VOCABULARY | {"specs"},
    "published": set(),
    "accuracy": VOCABULARY | {"specs", "program", "cost", "baselines", "published"},
    "calibration": VOCABULARY | {"specs", "program", "cost", "ranking", "launch"},
    "validation": VOCABULARY | {"specs", "program", "cost", "ranking", "launch", "lab", "accuracy", "calibration"},
    "report": VOCABULARY
    | {"specs", "program", "cost", "ranking", "launch", "baselines", "accuracy", "calibration", "validation"},
    "api": VOCABULARY
    | {
        "specs",
        "program",
        "cost",
        "ranking",
        "launch",
        "baselines",
        "accuracy",
        "calibration",
        "validation",
        "report",
        "lab",
    },
    "cli": VOCABULARY
    | {
        "api",
        "specs",
        "program",
        "cost",
        "ranking",
        "launch",
        "baselines",
        "accuracy",
        "calibration",
        "validation",
        "report",
        "runtime",
        "lab",
    },
}
# Libraries that stay in some layers, and those that may not be imported while a file is.
STAYS_IN = {"pydantic": {"specs"}, "rich": {"report", "api", "cli"}, "torch": {"runtime"}, "click": {"cli"}}
ONLY_INSIDE_FUNCTIONS = {"pandas", "plotly", "scipy"}

LONGEST_FUNCTION = 40
LONGEST_FILE = 600

PACKAGE_FILES = house.python_files(house.PACKAGE)
ALL_FILES = house.python_files(house.PACKAGE, "benchmarks", "tests", "tools")
PROFILES = sorted([*(house.ROOT / "configs").glob("*.yaml"), *(house.ROOT / "machines").glob("*.yaml")])
SCHEMAS: dict[str, type[Model] | type[Machine]] = {"configs": Model, "machines": Machine}


def text_files() -> list[Path]:
    """Everything people read: code, profiles, documentation."""
    names = (house.PACKAGE, "benchmarks", "configs", "docs", "machines", "tests", "tools")
    folders = [house.ROOT / name for name in names]
    below = (path for folder in folders for path in folder.rglob("*"))
    return [*house.ROOT.glob("*.md"), *(path for path in below if path.suffix in {".py", ".md", ".yaml", ".json"})]


def each(files: list[Path]) -> pytest.MarkDecorator:
    """Run a test once per file."""
    return pytest.mark.parametrize("path", files, ids=house.shown)


@each(PACKAGE_FILES)
def test_imports_go_one_way(path: Path) -> None:
    """Guards the order of layers: nothing imports a layer that lies after its own."""
    own = house.layer_of_file(path)
    assert own in MAY_IMPORT, f"say in MAY_IMPORT what the layer {own!r} may import"
    wrong = [
        f"line {found.line}: {own} imports {found.module}"
        for found in house.imports(path)
        if found.module.split(".")[0] == house.PACKAGE and house.layer(found.module) not in MAY_IMPORT[own] | {own, ""}
    ]
    assert not wrong


@each(PACKAGE_FILES)
def test_imports_are_absolute(path: Path) -> None:
    """Guards the test above, which reads absolute imports only."""
    assert not [found for found in house.imports(path) if found.module.startswith(".")]


@each(PACKAGE_FILES)
def test_libraries_stay_where_they_belong(path: Path) -> None:
    """Guards start-up time and docs/decisions/0002: one job per library, slow ones imported when used."""
    own = house.layer_of_file(path)
    for found in house.imports(path):
        library = found.module.split(".")[0]
        assert own in STAYS_IN.get(library, {own}), f"line {found.line}: {library} belongs to {STAYS_IN[library]}"
        slow = library in ONLY_INSIDE_FUNCTIONS and found.at_import
        assert not slow, f"line {found.line}: import {library} inside the function that uses it"


@each(ALL_FILES)
def test_pieces_are_small(path: Path) -> None:
    """Guards readability: functions and files of a size one can hold in mind."""
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{lines} lines"
    long = [(name, line, length) for name, line, length in house.functions(path) if length > LONGEST_FUNCTION]
    assert not long, "functions as (name, line, length)"


def test_only_one_page_uses_the_other_axis_names() -> None:
    """Guards the vocabulary: x, y, z and data everywhere, other names in one table of the docs."""
    other_name = re.compile("G_" + "intra_")
    using = {house.shown(path) for path in text_files() if other_name.search(path.read_text("utf-8"))}
    assert using == {"docs/names.md"}


def test_setup_lists_every_package() -> None:
    """Guards installs: a folder missing from the list in setup.cfg is missing from the wheel."""
    setup = configparser.ConfigParser()
    setup.read(house.ROOT / "setup.cfg")
    listed = set(setup["options"]["packages"].split())
    found = {house.shown(path.parent).replace("/", ".") for path in PACKAGE_FILES if path.name == "__init__.py"}
    assert listed == found | {"axonn_tune.shipped_configs", "axonn_tune.shipped_machines"}


@pytest.mark.parametrize("folder", ["configs", "machines"])
def test_installed_package_holds_the_profiles(folder: str) -> None:
    """Guards package data: what lies in the top-level folder is what the installed package offers."""
    installed = {file.name for file in importlib.resources.files(f"axonn_tune.shipped_{folder}").iterdir()}
    in_tree = {path.name for path in (house.ROOT / folder).glob("*.yaml")}
    assert in_tree, "no profiles"
    assert {name for name in installed if name.endswith(".yaml")} == in_tree


@each(PROFILES)
def test_profile_is_valid_and_named_as_its_file(path: Path) -> None:
    """Guards the shipped profiles: each loads, and the name it is asked for is the one it answers with."""
    assert load_document(path, schema=SCHEMAS[path.parent.name]).name == path.stem


def test_readme_lists_every_exit_code() -> None:
    """Guards the documentation of exit codes: every error of the tree ends in one the README explains."""
    readme = (house.ROOT / "README.md").read_text("utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", readme, flags=re.MULTILINE)}
    tree = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {kind.exit_code for kind in tree if issubclass(kind, errors.AxonnTuneError)} <= documented


def test_changelog_knows_this_version() -> None:
    """Guards releases: the version in the package has a section, or lies ahead under Unreleased."""
    assert __version__ in (house.ROOT / "CHANGELOG.md").read_text("utf-8")
