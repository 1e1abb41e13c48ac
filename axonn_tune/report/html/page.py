"""One HTML file from sections: template, style, scripts, data and plotly, all inside it."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path

from axonn_tune import __version__
from axonn_tune.errors import EnvironmentProblem
from axonn_tune.files import write_text_atomically
from axonn_tune.report.html.blocks import Json
from axonn_tune.report.ranking_json import to_text

_SCRIPTS = ("format.js", "table.js", "figures.js", "blocks.js", "page.js")
MISSING = "a report is drawn by plotly, which is not here: pip install 'axonn-tune[report]'"


def write_page(path: str | Path, sections: Sequence[Json], *, command: str, created: datetime | None = None) -> None:
    """Write the report; EnvironmentProblem without plotly, else errors as of `write_text_atomically`."""
    write_text_atomically(path, page_text(sections, command=command, created=created))


def require_plotly() -> None:
    """EnvironmentProblem if there is no plotly: before work is done that would be lost."""
    from importlib.util import find_spec

    if find_spec("plotly") is None:
        raise EnvironmentProblem(MISSING)


def page_text(sections: Sequence[Json], *, command: str, created: datetime | None = None) -> str:
    """The whole file as text; `created` is now unless given."""
    made = (created or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds")
    data = {
        "made": f"Written by axonn-tune {__version__}, {made}",
        "command": command,
        "sections": list(sections),
    }
    title = sections[0]["title"] if len(sections) == 1 else f"{len(sections)} results"
    parts = {
        "TITLE": escape(f"axonn-tune: {title}"),
        "STYLE": _static("style.css"),
        "DATA": _in_script(to_text(data)),
        "PLOTLY": base64.b64encode(_plotly()).decode("ascii"),
        "SCRIPT": "\n".join(map(_static, _SCRIPTS)),
    }
    text = _static("template.html")
    for name, value in parts.items():
        before, mark, after = text.partition(f"%{name}%")
        assert mark, f"the template has no %{name}%"
        text = before + value + after
    return text


def _plotly() -> bytes:
    """plotly's own script, compressed: four times smaller, and browsers unpack it by themselves."""
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]
    except ImportError as error:
        raise EnvironmentProblem(MISSING) from error
    return gzip.compress(get_plotlyjs().encode(), mtime=0)


def _in_script(text: str) -> str:
    """JSON that no HTML parser takes for the end of the element it stands in."""
    return json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def _static(name: str) -> str:
    return resources.files("axonn_tune.report.html").joinpath("static", name).read_text(encoding="utf-8")
