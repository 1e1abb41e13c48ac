"""A headless Chromium that may not reach any network, and what it saw."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

SCREENSHOTS = Path(os.environ.get("AXONN_TUNE_SCREENSHOTS", "build/screenshots"))
DESKTOP, PHONE = (1280, 900), (390, 844)
PATIENCE_MS = 120_000
"""How long a page may take on a busy host."""
Scheme = Literal["light", "dark"]


def chromium_path() -> str:
    """Where Chromium is; the test is skipped if nowhere."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium (Debian, Ubuntu)")
    return found


@contextmanager
def browser() -> Iterator[Any]:
    """The browser."""
    from playwright.sync_api import sync_playwright

    path = chromium_path()
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


@dataclass
class Seen:
    """A page that is open, what it asked for beside its own file, and what it complained about."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Nothing left the file, and nothing went wrong in it."""
        assert self.requests == []
        assert self.complaints == []

    def drawn(self, title: str) -> Any:
        """The figure of this title, scrolled to and drawn."""
        block = self.page.locator(".block", has=self.page.locator(f":scope > h2:text-is('{title}')")).first
        block.scroll_into_view_if_needed()
        block.locator("[data-drawn=true]").first.wait_for(timeout=PATIENCE_MS)
        return block

    def draw_all(self) -> None:
        """Wait until every figure is drawn, without scrolling to it."""
        drawn = "() => [...document.querySelectorAll('.drawing > div')].every(box => box.dataset.drawn)"
        self.page.wait_for_function(drawn, timeout=PATIENCE_MS)

    def screenshot(self, name: str) -> None:
        """The whole page as build/screenshots/NAME.png."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)


@contextmanager
def opened(found: Any, path: Path, *, size: tuple[int, int] = DESKTOP, scheme: Scheme = "light") -> Iterator[Seen]:
    """A page of the file in a window of a size, with the network off."""
    width, height = size
    context = found.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, offline=True, reduced_motion="reduce"
    )
    context.set_default_timeout(PATIENCE_MS)
    seen = Seen(context.new_page())
    own = path.resolve().as_uri()
    seen.page.on(
        "request",
        lambda request: None if request.url.startswith((own, "data:", "blob:")) else seen.requests.append(request.url),
    )
    seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    seen.page.on(
        "console",
        lambda message: seen.complaints.append(message.text) if message.type in ("error", "warning") else None,
    )
    seen.page.goto(own)
    seen.page.wait_for_selector("html[data-ready=true]")
    yield seen
    context.close()
