"""What the site has beyond the pages: sources of the functions they name, the changelog, every decision."""

from __future__ import annotations

import inspect
import pkgutil
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
SOURCE = re.compile(r"^<!-- source: (\S+) -->$", flags=re.MULTILINE)
DECISIONS = "decisions"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every decision below the page that says what they are."""
    pages = sorted((Path(config.docs_dir) / DECISIONS).glob("[0-9]*.md"))
    listed: list[Any] = [{"About": f"{DECISIONS}/index.md"}, *(f"{DECISIONS}/{page.name}" for page in pages)]
    config.nav = [_with_decisions(entry, listed) for entry in config.nav or []]
    return config


def _with_decisions(entry: Any, listed: list[Any]) -> Any:  # noqa: ANN401 - an entry of the menu, as YAML has it
    """An entry of the menu, with a list for the page of decisions wherever in it that is."""
    if not isinstance(entry, dict):
        return entry
    ((title, below),) = entry.items()
    if title == "Decisions":
        return {title: listed}
    return {title: [_with_decisions(one, listed) for one in below] if isinstance(below, list) else below}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the changelog, whose links are those of the repository's top."""
    text = (ROOT / "CHANGELOG.md").read_text("utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the source of a function where a page asks for it."""
    return SOURCE.sub(lambda found: folded_source(found[1]), markdown)


def folded_source(name: str) -> str:
    """The source of a function of the package, `cost.collectives.ring`, as a block that is folded up."""
    function = pkgutil.resolve_name(f"axonn_tune.{name}")
    code = textwrap.indent(inspect.getsource(inspect.unwrap(function)), "    ")
    path = f"{function.__module__.replace('.', '/')}.py"
    return f'\n??? quote "{name.rpartition(".")[2]}, {path}"\n\n    ```python\n{code}    ```\n'
