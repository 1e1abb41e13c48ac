"""The documentation names real things."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from axonn_tune import __version__, errors

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LAYERS = "|".join(path.name for path in (ROOT / "axonn_tune").iterdir() if (path / "__init__.py").exists())
# In a sentence, or where the site puts a function's source.
QUOTED = re.compile(rf"`((?:{LAYERS})\.[a-z_0-9.]+[a-z_0-9])`|^<!-- source: (\S+) -->$", flags=re.MULTILINE)
# Names of files look the same.
FILE = re.compile(r"\.(?:html|json|md|sbatch|sh|svg|xml|yaml)$")
NAMED = [
    (path.name, name)
    for path in sorted(DOCS.glob("*.md"))
    for name in dict.fromkeys(one or other for one, other in QUOTED.findall(path.read_text(encoding="utf-8")))
    if not FILE.search(name)
]


def resolves(name: str) -> bool:
    """Whether `cost.collectives.ring` is a module of the package or something in one."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(["axonn_tune", *parts[:cut]]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[cut:]:
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False


def test_functions_named_in_the_docs_exist() -> None:
    """Guards that each equation's function can be found where the docs say."""
    assert not [f"docs/{page} names {name}" for page, name in NAMED if not resolves(name)]


def test_equations_stand_beside_their_functions() -> None:
    """Guards docs/how-it-works.md: every collective algorithm, roofline and paper equation names its function."""
    named = {name for page, name in NAMED if page == "how-it-works.md"}
    for module in ("collectives", "compute"):
        functions = vars(importlib.import_module(f"axonn_tune.cost.{module}"))
        timed = {name for name in functions if name.endswith("_time_s")}
        assert {f"cost.{module}.{name}" for name in timed} <= named
    algorithms = importlib.import_module("axonn_tune.cost.collectives")._ALGORITHMS
    assert {f"cost.collectives.{name}" for name in algorithms} <= named
    paper = [found for found in vars(importlib.import_module("axonn_tune.cost.paper")).values() if callable(found)]
    equations = [found for found in paper if re.search(r"2305\.13525,? equation \d", found.__doc__ or "")]
    assert len(equations) >= 6
    assert {f"{found.__module__}.{found.__name__}".removeprefix("axonn_tune.") for found in equations} <= named


def figures(page: str) -> set[str]:
    """Every percentage of a page, but for those in what a command prints."""
    words = re.sub(r"^```.*?^```", "", (DOCS / page).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return set(re.findall(r"\d+(?:\.\d+)?%", words))


@pytest.mark.parametrize("page", ["faq.md", "index.md", "../README.md"])
def test_figures_are_those_of_the_pages_they_come_from(page: str) -> None:
    """Guards the questions and both front pages: a figure that changes where it is measured changes there too."""
    pages = ("accuracy.md", "accuracy-fits.md", "validate.md", "validate-figures.md", "compare.md", "paper-claims.md")
    known = set[str]().union(*map(figures, pages))
    assert figures(page) - known - {"80%"} == set()


def test_links_between_pages_lead_somewhere() -> None:
    """Guards relative links."""
    links = [
        (path, target)
        for path in sorted(DOCS.rglob("*.md"))
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
        if "://" not in target
    ]
    assert not [f"{path.name}: {target}" for path, target in links if not (path.parent / target).exists()]


def test_files_that_contributors_are_sent_to_exist() -> None:
    """Guards CONTRIBUTING.md: each file and folder that it names with its path."""
    named = re.findall(r"`([\w.*-]+/[\w./*-]*)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(named) > 40
    assert not [one for one in named if "NAME" not in one and not list(ROOT.glob(one.rstrip("/")))]


def test_every_exit_code_is_explained() -> None:
    """Guards the documentation of exit codes: every error of the tree ends in one that troubleshooting explains."""
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, flags=re.MULTILINE)}
    tree = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert {kind.exit_code for kind in tree if issubclass(kind, errors.AxonnTuneError)} <= documented


def test_changelog_knows_this_version() -> None:
    """Guards releases: the version in the package has a section, or lies ahead under Unreleased."""
    assert __version__ in (ROOT / "CHANGELOG.md").read_text("utf-8")


def spoken() -> str:
    """Every text of the package's code, with … for what is filled in."""
    texts = []
    for path in sorted((ROOT / "axonn_tune").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(" ".join(node.value.split()))
    return "\n".join(texts)


def test_messages_that_are_explained_exist() -> None:
    """Guards docs/troubleshooting.md: each message, between what differs, stands in the code as it is shown."""
    page, said = (DOCS / "troubleshooting.md").read_text("utf-8"), spoken()
    messages = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(messages) > 30
    pieces = [(message, piece.strip()) for message in messages for piece in message.split("…")]
    assert not [(message, piece) for message, piece in pieces if len(piece) > 3 and piece not in said]
