"""Which way imports go, and which libraries are imported only where they are used."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tools import structure

ROOT = Path(__file__).parents[2]
PACKAGE = "axonn_tune"

VOCABULARY = {"vocabulary", "errors", "units", "grid", "files", "processes", "request", "recompute", "stages"}
ENGINE = VOCABULARY | {"specs", "frameworks", "program", "cost", "job"}
COMMANDS = ENGINE | {"ranking", "launch", "lab", "calibration", "validation", "learning", "report"}
# What each layer may import beside itself and the package's own version.
MAY_IMPORT: dict[str, set[str]] = {
    "": {"api", "errors", "frameworks", "lab", "request", "specs", "vocabulary"},
    "__main__": {"cli"},
    "vocabulary": set(),
    "errors": set(),
    "units": set(),
    "files": {"errors"},
    "processes": {"errors"},
    "grid": {"errors"},
    "recompute": {"errors"},
    "stages": {"errors"},
    # Of the latter two it has the names of types alone.
    "request": {"vocabulary", "errors", "recompute", "stages", "specs", "frameworks"},
    "job": VOCABULARY | {"specs", "frameworks"},
    "specs": VOCABULARY - {"request"},
    "frameworks": VOCABULARY | {"specs"},
    "program": VOCABULARY | {"specs", "frameworks"},
    "cost": VOCABULARY | {"specs", "frameworks", "program", "job"},
    "runtime": VOCABULARY | {"specs", "frameworks", "program"},
    "ranking": ENGINE,
    "launch": ENGINE | {"ranking"},
    "lab": VOCABULARY | {"specs"},
    "validation": ENGINE | {"ranking", "launch", "lab"},
    "learning": ENGINE | {"ranking", "launch", "lab", "validation"},
    "calibration": ENGINE | {"ranking", "launch", "learning"},
    "report": ENGINE | {"ranking", "launch", "calibration", "validation", "learning"},
    "api": COMMANDS,
    "cli": COMMANDS | {"api", "runtime"},
}
# Libraries that stay in some layers, and those that may not be imported while a file is.
STAYS_IN = {"pydantic": {"specs"}, "rich": {"report", "api", "cli"}, "torch": {"runtime"}, "click": {"cli"}}
ONLY_INSIDE_FUNCTIONS = {"pandas", "plotly", "scipy"}
MOST_MODULES = 76
"""Modules of the package that a search of dense 4D grids imports, but those of layer types, all of which are found."""


@dataclass(frozen=True)
class Import:
    """One import of a file of the package; at_import: outside any function, so made when the file is imported."""

    path: Path
    line: int
    module: str
    at_import: bool

    @property
    def importer(self) -> str:
        """The layer that the file belongs to."""
        first = self.path.relative_to(ROOT / PACKAGE).parts[0]
        return "" if first == "__init__.py" else first.removesuffix(".py")

    @property
    def layer(self) -> str:
        """What is imported of the package: `cost` for `axonn_tune.cost.price`; empty for the package itself."""
        return self.module.split(".")[1] if "." in self.module else ""

    @property
    def library(self) -> str:
        """`numpy` for `numpy.linalg`."""
        return self.module.split(".")[0]

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


@cache
def all_imports() -> tuple[Import, ...]:
    """Every import of the package; those under `if TYPE_CHECKING` count, but not as made on import."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    read = ((path, ast.parse(path.read_text(encoding="utf-8"))) for path in files)
    return tuple(one for path, tree in read for one in imports(path, tree, at_import=True))


def imports(path: Path, node: ast.AST, *, at_import: bool) -> Iterator[Import]:
    """The imports below a node of a file's syntax tree."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(path, child.lineno, alias.name, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            module = child.module or ""
            names = [f"{module}.{alias.name}" for alias in child.names if not alias.name.startswith("__")]
            named = names if module == PACKAGE else [name if file_of(name) else module for name in names] or [module]
            yield from (Import(path, child.lineno, name, at_import) for name in dict.fromkeys(named))
        else:
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or for_types(child)
            yield from imports(path, child, at_import=at_import and not deferred)


def file_of(module: str) -> Path | None:
    """The file of a module or package of ours; None where a name is neither."""
    place = ROOT.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def for_types(node: ast.AST) -> bool:
    """Whether this is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def test_imports_go_one_way() -> None:
    """Guards the order of layers: nothing imports a layer that lies after its own."""
    found = [one for one in all_imports() if one.library == PACKAGE]
    unknown = {one.importer for one in found} - MAY_IMPORT.keys()
    assert not unknown, "say in MAY_IMPORT what these layers may import"
    assert not [str(one) for one in found if one.layer not in MAY_IMPORT[one.importer] | {one.importer, ""}]


def test_no_module_imports_itself_through_others() -> None:
    """Guards against circles, those through names of types and imports inside functions included."""
    assert structure.circles() == []


def test_deferred_imports_say_why() -> None:
    """Guards that imports stand at the top of a module but where start-up time is saved, with a comment on whose; the
    command line and the Python functions, of which one runs, import what it needs in each."""
    silent = []
    for one in all_imports():
        if one.library != PACKAGE or one.at_import or one.importer in ("", "cli", "api"):
            continue
        before = one.path.read_text(encoding="utf-8").splitlines()[: one.line - 1]
        above = next(line.strip() for line in reversed(before) if not re.match(r" +(from|import) |\s*$", line))
        if not above.startswith(("#", "if TYPE_CHECKING", ")")):
            silent.append(str(one))
    assert not silent


def test_views_price_nothing() -> None:
    """Guards that tables, pages and the command line show what others have priced and found: they import nothing that
    prices a layout or searches."""
    priced = {"price", "Pricer", "Replay", "build_step", "search", "run_search", "rank_by_paper", "nearest_change"}
    found = [
        f"{path.relative_to(ROOT)} imports {alias.name} of {node.module}"
        for folder in ("report", "cli")
        for path in sorted((ROOT / PACKAGE / folder).glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and re.match(rf"{PACKAGE}\.(cost|ranking|program)\.", node.module or "")
        for alias in node.names
        if alias.name in priced
    ]
    assert not found


def test_libraries_stay_where_they_belong() -> None:
    """Guards docs/decisions/0002: one job per library, so that layers that do not use one work without it."""
    assert not [str(one) for one in all_imports() if one.importer not in STAYS_IN.get(one.library, {one.importer})]


def test_slow_libraries_are_imported_where_they_are_used() -> None:
    """Guards start-up time: these are imported inside the functions that use them."""
    assert not [str(one) for one in all_imports() if one.at_import and one.library in ONLY_INSIDE_FUNCTIONS]


@pytest.mark.parametrize("line", ["--help", "--gpus 1024 --model 80b", "--gpus 1024 --model 80b -o launch.yaml"])
def test_heavy_libraries_stay_unloaded(line: str, tmp_path: Path) -> None:
    """Guards start-up time: each of these costs more than the whole search, which needs no table of other names, and
    writes neither launch config nor script where none is asked for."""
    program = (
        "import sys; from axonn_tune.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: sys.stdout.write('\\nloaded: ' + ' '.join(sys.modules))"
    )
    command = [sys.executable, "-c", program, *line.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("loaded: ")[2].split())
    assert "axonn_tune.cli.main" in loaded
    assert not {"numpy.ma", "pandas", "plotly", "scipy", "torch", "axonn_tune.frameworks.names"} & loaded
    if "-o" not in line:
        others = {f"axonn_tune.frameworks.{name}" for name in ("command", "megatron_core", "torchtitan", "deepspeed")}
        written = {"jinja2", "axonn_tune.launch.config", "axonn_tune.launch.scripts", "axonn_tune.specs.launch"}
        assert not {"axonn_tune.cost.pipeline", "axonn_tune.stages", *others, *written} & loaded
        types = f"{PACKAGE}.program.types."
        own = [name for name in loaded if name.split(".")[0] == PACKAGE and not name.startswith(types)]
        assert len(own) <= MOST_MODULES


def test_nothing_looks_for_cycles_at_exit() -> None:
    """Guards the end of a command: a last search for garbage takes a fifth of the main job, for memory that goes."""
    program = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0));"
        "from axonn_tune.cli.main import main; main(['--version'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"
