"""The documentation names real things."""

import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
LAYERS = "program|cost|search|specs|report|baselines"
NAMED = [
    (path.name, name)
    for path in sorted(DOCS.glob("*.md"))
    for name in dict.fromkeys(re.findall(rf"`((?:{LAYERS})\.[a-z_0-9.]+)`", path.read_text(encoding="utf-8")))
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


@pytest.mark.parametrize(("page", "name"), NAMED)
def test_functions_named_in_the_docs_exist(page: str, name: str) -> None:
    """Guards that each equation's function can be found where the docs say."""
    assert resolves(name), f"docs/{page} names {name}"


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(path: Path) -> None:
    """Guards relative links."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target
