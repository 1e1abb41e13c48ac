"""The documentation site builds without a warning, and asks for nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
ROOT = Path(__file__).parents[2]
LOADS = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built: --strict ends with an error for any warning, links and anchors that lead nowhere included."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    # The makers' notice about their other product says WARNING too.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


class Loads(HTMLParser):
    """What a page makes a browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "link" and given.get("rel") in ("canonical", "next", "prev"):
            return
        if tag in LOADS and given.get(LOADS[tag]):
            self.found.append(str(given[LOADS[tag]]))


def test_pages_fetch_nothing_from_elsewhere(site: Path) -> None:
    """Guards reading without a network: no font, script, style or picture from another host."""
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 30
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text("utf-8"))
        assert loads.found
        assert not [one for one in loads.found if re.match(r"(?:https?:)?//", one)], page.name
    styles = "".join(sheet.read_text("utf-8") for sheet in site.rglob("*.css"))
    assert not re.search(r"url\(['\"]?(?:https?:)?//", styles)


def test_every_page_is_in_the_menu(site: Path) -> None:
    """Guards the menu: pages, decisions and the changelog, each one."""
    menu = (site / "index.html").read_text("utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert f'href="{path}"' in menu, path
    assert 'href="changelog.html"' in menu


def test_equations_have_their_source(site: Path) -> None:
    """Guards the sources folded up below equations: each that is asked for is there, as it is now."""
    asked = re.findall(r"<!-- source: (\S+) -->", (ROOT / "docs" / "how-it-works.md").read_text("utf-8"))
    page = (site / "how-it-works.html").read_text("utf-8")
    assert len(asked) > 20
    for name in asked:
        assert f"<summary>{name.rpartition('.')[2]}, axonn_tune/" in page
    assert "<!-- source" not in page
    assert "TREE_BANDWIDTH_SHARE" in page
