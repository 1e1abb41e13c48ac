"""Figures of the code base's structure: `python -m tools.structure`, or `--check` to hold them against those committed.

Those in `COMMITTED` may only fall: who makes one smaller lowers it there, and a commit that raises one says why. Lines
count docstrings and blank lines.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "axonn_tune"
LONGEST_FUNCTION, LONGEST_MODULE = 80, 700

LINES = "lines of Python"
IN_CIRCLES = "modules in circles of imports"
LONG_FUNCTIONS = f"functions over {LONGEST_FUNCTION} lines"
LONG_MODULES = f"lines of modules beyond their {LONGEST_MODULE}th"
COMMITTED = {LINES: 71_454, IN_CIRCLES: 0, LONG_FUNCTIONS: 0, LONG_MODULES: 0}
"""Figures that may only fall."""


def structure() -> dict[str, float]:
    """Every figure by name."""
    trees, sizes, functions = _trees(), _sizes(), _function_lengths()
    lengths = list(functions.values())
    return {
        LINES: sum(sizes.values()),
        IN_CIRCLES: sum(map(len, circles())),
        LONG_FUNCTIONS: len(_longer(functions, LONGEST_FUNCTION)),
        LONG_MODULES: sum(max(size - LONGEST_MODULE, 0) for size in sizes.values()),
        "modules": len(trees),
        "functions": len(lengths),
        "lines of a function, median": float(np.median(lengths)),
        "lines of a function, 90th percentile": float(np.quantile(lengths, 0.9)),
        "classes": sum(isinstance(node, ast.ClassDef) for tree in trees.values() for node in _statements(tree)),
        "lines of tests": _lines(ROOT / "tests"),
        "lines of tools and benchmarks": _lines(ROOT / "tools") + _lines(ROOT / "benchmarks"),
    }


def _longer(lines: Mapping[str, int], most: int) -> list[str]:
    """What has more lines than that, the longest first."""
    found = sorted(((count, name) for name, count in lines.items() if count > most), reverse=True)
    return [f"{name} ({count:,} lines)" for count, name in found]


def circles() -> list[list[str]]:
    """Groups of modules each of which imports every other by some way; imports in functions and for types count."""
    trees = _trees()
    leads = {name: _imported(tree, trees) - {name} for name, tree in trees.items()}
    reached = {name: _reached(name, leads) for name in leads}
    groups = (
        tuple(other for other in leads if other in reached[name] and name in reached[other])
        for name in leads
        if name in reached[name]
    )
    return [list(group) for group in dict.fromkeys(groups)]


@cache
def _texts() -> dict[str, str]:
    """The package's modules by name, `axonn_tune.cost.price`."""
    paths = sorted(PACKAGE.rglob("*.py"))
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths)
    return {name: path.read_text("utf-8") for name, path in zip(names, paths, strict=True)}


@cache
def _trees() -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in _texts().items()}


def _sizes() -> dict[str, int]:
    return {name: len(text.splitlines()) for name, text in _texts().items()}


@cache
def _statements(tree: ast.Module) -> list[ast.AST]:
    """All nodes but expressions, which are most of a tree and hold no statement."""
    found, left = list[ast.AST](), list[ast.AST]([tree])
    while left:
        inside = [node for node in ast.iter_child_nodes(left.pop()) if not isinstance(node, ast.expr)]
        found += inside
        left += inside
    return found


def _imported(tree: ast.Module, known: Collection[str]) -> set[str]:
    """Modules of the package that a module imports, wherever it does; its version is none."""
    found = set[str]()
    for node in _statements(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names if not alias.name.startswith("__")}
            found |= {name if name in known else str(node.module) for name in names}
    return found & set(known)


def _reached(start: str, leads: Mapping[str, set[str]]) -> set[str]:
    """Modules that a module leads to; itself only by way of others."""
    found, left = set[str](), [start]
    while left:
        new = leads[left.pop()] - found
        found |= new
        left += new
    return found


def _function_lengths() -> dict[str, int]:
    """Lines of each function and method, from its `def`, decorators left out, to its end."""
    return {
        f"{module}:{node.lineno} {node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for module, tree in _trees().items()
        for node in _statements(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _lines(folder: Path) -> int:
    return sum(len(path.read_text("utf-8").splitlines()) for path in folder.rglob("*.py"))


def moved(found: Mapping[str, float]) -> list[str]:
    """What is to be said of figures that are not those committed: those above it first."""
    above = [f"{name}: {found[name]:,g}, above {most:,}" for name, most in COMMITTED.items() if found[name] > most]
    below = [
        f"{name}: {found[name]:,g} of {most:,}; lower it in tools/structure.py"
        for name, most in COMMITTED.items()
        if found[name] < most
    ]
    return [*above, *below]


@click.command()
@click.option("--check", is_flag=True, help="Say only what is not as committed; fail where a figure is above it.")
def main(check: bool) -> None:  # noqa: FBT001 - click passes options as arguments
    """Print every figure of the structure, its limit beside it."""
    # Syntax trees are millions of objects that all stay: garbage collection would take most of the time.
    gc.disable()
    found = structure()
    gc.freeze()
    if check:
        for line in moved(found):
            click.echo(line, err=True)
        if any(found[name] > most for name, most in COMMITTED.items()):
            raise click.ClickException("the structure grew: make it smaller, or raise the figure and say why")
        return
    for name, value in found.items():
        most = COMMITTED.get(name)
        click.echo(f"{name:<40}{value:>12,g}" + ("" if most is None else f"   at most {most:,}"))
    for title, listed in (
        (LONG_FUNCTIONS, _longer(_function_lengths(), LONGEST_FUNCTION)),
        (LONG_MODULES, _longer(_sizes(), LONGEST_MODULE)),
        (IN_CIRCLES, map(", ".join, circles())),
    ):
        click.echo("\n".join((f"\n{title}:", *(f"  {one}" for one in listed))))


if __name__ == "__main__":
    main()
