"""Write docs/report.png: the top of a report as a browser shows it (python -m tools.report_picture).

Needs Chromium (`make chromium`) and playwright, of the extra [dev].
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_tune.cli.main import main as run_command_line

if TYPE_CHECKING:
    from playwright.sync_api import FloatRect, Page

SEARCH = ("--gpus", "64", "--model", "llama3-70b", "--machine", "dgx-h100", "--format", "json")
PICTURE = Path(__file__).parents[1] / "docs" / "report.png"
WIDTH, HEIGHT, MARGIN = 1200, 1600, 14
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def write_picture(path: Path = PICTURE) -> None:
    """Search, open the report in a browser, and photograph it down to the end of its first figure.

    Raises SystemExit without a browser, or if the search fails.
    """
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        sys.exit(f"no browser here: looked for {', '.join(BROWSERS)}")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report = Path(folder) / "report.html"
        if code := run_command_line([*SEARCH, "-o", str(Path(folder) / "launch.yaml"), "--html", str(report)]):
            sys.exit(code)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(report.as_uri())
        page.locator(".drawing > [data-drawn=true]").first.wait_for(timeout=30_000)
        page.screenshot(path=path, clip=top_of(page))
        browser.close()


def top_of(page: Page) -> FloatRect:
    """The rectangle from the title to the end of the first figure, px."""
    title, figure = page.locator("h1").first.bounding_box(), page.locator(".block").first.bounding_box()
    assert title is not None, "every report has a title"
    assert figure is not None, "and a figure"
    top = title["y"] - MARGIN
    return {"x": 0, "y": top, "width": WIDTH, "height": figure["y"] + figure["height"] + MARGIN - top}


if __name__ == "__main__":
    write_picture()
