"""The source tree as data, for tests about the tree itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "axonn_tune"


@dataclass(frozen=True)
class Import:
    """One imported module, and whether importing the file imports it (outside any function)."""

    module: str
    line: int
    at_import: bool


def python_files(*folders: str) -> list[Path]:
    """All Python files below the folders of the repository that exist."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def shown(path: Path) -> str:
    """The path as seen from the repository's top."""
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def layer(module: str) -> str:
    """`axonn_tune.cost.placement` lies in layer `cost`; the package itself in ``."""
    return module.split(".")[1] if "." in module else ""


def layer_of_file(path: Path) -> str:
    """The layer a file of the package belongs to."""
    first = path.relative_to(ROOT / PACKAGE).parts[0]
    return "" if first == "__init__.py" else first.removesuffix(".py")


def imports(path: Path) -> list[Import]:
    """Every import of a file; those under `if TYPE_CHECKING` count, but not as made on import."""
    return list(_imports(parse(path), at_import=True))


def _imports(node: ast.AST, *, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from _import_from(child, at_import=at_import)
        else:
            deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _type_checking(child)
            yield from _imports(child, at_import=at_import and not deferred)


def _import_from(node: ast.ImportFrom, *, at_import: bool) -> Iterator[Import]:
    module = "." * node.level + (node.module or "")
    if module != PACKAGE:
        yield Import(module, node.lineno, at_import)
        return
    for alias in node.names:
        name = PACKAGE if alias.name.startswith("__") else f"{PACKAGE}.{alias.name}"
        yield Import(name, node.lineno, at_import)


def _type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def functions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Name, first line and length of every function of a file, decorators and docstring not counted."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            yield node.name, node.lineno, length - _docstring_length(node)


def _docstring_length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    if ast.get_docstring(node) is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1
