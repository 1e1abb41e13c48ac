"""Figures of the code base's structure: `python -m tools.structure`, or `--check` to hold them against their limits.

Lines count docstrings and blank lines. Figures of the main job, `axonn-tune --gpus 1024 --model 80b`, come from one run
of it in a process of its own under `sys.setprofile`.
"""

from __future__ import annotations

import ast
import io
import json
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "axonn_tune"
SOURCES = (".js", ".css", ".html", ".sh", ".sbatch", ".in")
"""Endings of sources of the package that are no Python; CSV and argument tables are data."""
MAIN_JOB = ("--gpus", "1024", "--model", "80b")

LIMITS = {
    "lines of Python": 33_000,
    "lines of other sources": 2_000,
    "functions": 2_000,
    "lines of a function, 90th percentile": 34,
    "lines of a function, longest": 80,
    "classes": 250,
    "modules that the main job imports": 40,
    "classes that it instantiates": 55,
    "deepest stack": 26,
    "lines of tests": 13_000,
    "lines of tools and benchmarks": 8_000,
}
"""Figures with a limit, and the largest value of each."""


def structure(*, main_job: bool = True) -> dict[str, float]:
    """Every figure by name: counts, lines, characters."""
    trees = [(path.read_text(), ast.parse(path.read_text())) for path in _python(PACKAGE)]
    lengths = [length for _, tree in trees for length in _function_lengths(tree)]
    return {
        "files": len(trees),
        "lines of Python": sum(len(text.splitlines()) for text, _ in trees),
        "lines of other sources": sum(
            len(path.read_text().splitlines()) for path in PACKAGE.rglob("*") if path.suffix in SOURCES
        ),
        "functions": len(lengths),
        "lines of a function, median": float(np.median(lengths)),
        "lines of a function, 90th percentile": float(np.quantile(lengths, 0.9)),
        "lines of a function, longest": max(lengths),
        "classes": sum(isinstance(node, ast.ClassDef) for _, tree in trees for node in ast.walk(tree)),
        "x=y.x lines": sum(_copied_lines(tree) for _, tree in trees),
        "characters in a line of code, mean": round(_mean_line([text for text, _ in trees]), 2),
        "lines of tests": _lines(ROOT / "tests"),
        "lines of tools and benchmarks": _lines(ROOT / "tools") + _lines(ROOT / "benchmarks"),
        **(_of_the_main_job() if main_job else {}),
    }


def _python(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _lines(folder: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in _python(folder))


def _function_lengths(tree: ast.AST) -> Iterator[int]:
    """Lines of each function and method, from its `def`, decorators left out, to its end."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def _copied_lines(tree: ast.AST) -> int:
    """Lines that hand on a field under its own name, `x=y.x` as an argument."""
    return len(
        {
            word.value.lineno
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            for word in node.keywords
            if isinstance(word.value, ast.Attribute) and word.value.attr == word.arg
        }
    )


def _mean_line(texts: list[str]) -> float:
    """Mean length of a line that holds code: no blank line, comment or docstring; indentation counts."""
    lengths = []
    for text in texts:
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            alone = token.type == tokenize.STRING and token.line.lstrip().startswith(('"""', 'r"""'))
            if token.type in (tokenize.NAME, tokenize.NUMBER, tokenize.OP) or (
                token.type == tokenize.STRING and not alone
            ):
                code.update(range(token.start[0], token.end[0] + 1))
        lines = text.splitlines()
        lengths += [len(lines[number - 1]) for number in code]
    return float(np.mean(lengths))


_PROFILE = """
import json, os, sys
package = sys.argv.pop(1)
words, depth, deepest, functions, classes = sys.argv[1:], 0, 0, set(), set()

def watch(frame, event, _):
    global depth, deepest
    code = frame.f_code
    inside = code.co_filename.startswith(package)
    if event == "call":
        depth += inside
        deepest = max(deepest, depth)
        if inside:
            functions.add((code.co_filename, code.co_firstlineno))
        if code.co_argcount and (first := code.co_varnames[0]) in ("self", "_cls"):
            value = frame.f_locals.get(first)
            kind = value if isinstance(value, type) else type(value)
            if kind.__module__.startswith("axonn_tune"):
                classes.add((kind.__module__, kind.__qualname__))
    elif event == "return":
        depth -= inside

from axonn_tune.cli.main import main
sys.stdout = open(os.devnull, "w")
sys.setprofile(watch)
try:
    main(words)
except SystemExit:
    pass
sys.setprofile(None)
modules = [name for name in sys.modules if name.split(".")[0] == "axonn_tune"]
sys.__stdout__.write(json.dumps([len(modules), len(classes), len(functions), deepest]))
"""


def _of_the_main_job() -> dict[str, float]:
    words = [sys.executable, "-c", _PROFILE, str(PACKAGE), *MAIN_JOB]
    run = subprocess.run(words, capture_output=True, text=True, check=True)
    modules, classes, functions, deepest = json.loads(run.stdout)
    return {
        "modules that the main job imports": modules,
        "classes that it instantiates": classes,
        "functions that it calls": functions,
        "deepest stack": deepest,
    }


@click.command()
@click.option("--check", is_flag=True, help="Fail where a figure is above its limit.")
def main(check: bool) -> None:  # noqa: FBT001 - click passes options as arguments
    """Print every figure of the structure, its limit beside it."""
    over = []
    for name, value in structure().items():
        limit = LIMITS.get(name)
        click.echo(f"{name:<40}{value:>12,g}" + (f"   at most {limit:,}" if limit else ""))
        if limit is not None and value > limit:
            over.append(name)
    if check and over:
        raise click.ClickException(f"above the limit: {', '.join(over)}")


if __name__ == "__main__":
    main()
