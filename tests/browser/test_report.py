"""Three reports in a real browser: they draw, sort, filter and switch, at both widths, and nothing leaves the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.report.ranking_section import BREAKDOWN
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from axonn_tune.validation.published.rows import SHIPPED
from tests.browser.browser import DESKTOP, PHONE, Scheme, browser, opened
from tests.cli.running import good, run

LAB = Path(__file__).parents[1] / "fixtures" / "diagnose"
REPORTS = {
    "search": "--gpus 1024 --model 80b --top 0 --html {}",
    "rows": "accuracy --rows rows.csv --html {}",
    "diagnosis": f"diagnose {LAB}/lab/healthy-z2-data2 --machine {LAB}/lab.yaml --html {{}}",
}
MORE = {
    "explain": "explain --gpus 64 --model llama3-8b --machine dgx-h100 --framework torchtitan --html {}",
    "sweep": "sweep --gpus 64..4096x2 --model 20b,40b --html {}",
    "compare": "compare --gpus 1024 --model 80b --html {}",
    "published": "validate --published --html {}",
    "run": f"report {LAB}/lab/healthy-z4 -o {{}}",
}


BUTTONS_OVER_NUMBERS = """() => [...document.querySelectorAll(".js-plotly-plot")].filter((figure) => {
  const bar = figure.querySelector(".modebar-group"), plot = figure.querySelector(".plot");
  return bar && plot && bar.getBoundingClientRect().bottom > plot.getBoundingClientRect().top + 1;
}).length"""
"""Figures whose buttons reach into what is drawn."""


CUT = """() => [...document.querySelectorAll(".annotation-text")].filter((one) => {
  const figure = one.closest(".js-plotly-plot").getBoundingClientRect();
  return one.getBoundingClientRect().right > figure.right + 1;
}).map((one) => one.textContent)"""
"""Names of bars that are wider than their figure."""


@pytest.fixture(scope="module")
def chromium(alone: None) -> Iterator[Any]:
    """One browser for all tests; skipped without one."""
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def reports(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The three pages; that of published steps has every tenth of them."""
    folder = tmp_path_factory.mktemp("reports")
    found = {name: folder / f"{name}.html" for name in REPORTS}
    heading, *steps = (SHIPPED / "steps.csv").read_text("utf-8").splitlines()
    (folder / "rows.csv").write_text("\n".join([heading, *steps[::10], ""]), "utf-8")
    with chdir(folder):
        for name, line in REPORTS.items():
            good(line.format(found[name]))
    return found


def draws(chromium: Any, path: Path, size: tuple[int, int], scheme: Scheme) -> None:
    """Open a page: all figures are drawn, no error, nothing beside the page."""
    with opened(chromium, path, size=size, scheme=scheme) as seen:
        seen.draw_all()
        wide = seen.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, "the page scrolls sideways"
        over = seen.page.evaluate(BUTTONS_OVER_NUMBERS)
        assert over == 0, "buttons of a figure hide what it shows"
        assert seen.page.evaluate(CUT) == []
        seen.screenshot(f"{path.stem}-{size[0]}-{scheme}")
        seen.check()


@pytest.mark.parametrize("name", REPORTS)
def test_every_report_draws(chromium: Any, reports: dict[str, Path], name: str) -> None:
    """Guards pages on a desktop in light colors and on a phone in dark ones."""
    draws(chromium, reports[name], DESKTOP, "light")
    draws(chromium, reports[name], PHONE, "dark")


def test_long_names_of_causes_are_whole_on_a_phone(chromium: Any, tmp_path: Path) -> None:
    """Guards the names of explanations, which are sentences: in lines, above their bars."""
    page = tmp_path / "diagnosis.html"
    words = "--gpus 64 --model llama3-8b --machine dgx-h100 --framework megatron-core --batch 128 --seq 8192 --tp 2"
    assert run(f"diagnose --step 20 {words} --html {page}").code == 4
    draws(chromium, page, PHONE, "light")


@pytest.mark.nightly
@pytest.mark.parametrize("name", MORE)
def test_other_reports_draw(chromium: Any, name: str, tmp_path: Path) -> None:
    """Guards the other kinds of pages."""
    good(MORE[name].format(tmp_path / f"{name}.html"))
    draws(chromium, tmp_path / f"{name}.html", DESKTOP, "dark")
    draws(chromium, tmp_path / f"{name}.html", PHONE, "light")


def rows(page: Any, table: str = "s1-table") -> list[list[str]]:
    """Cells of the rows of a table that are in sight: of the ranking, unless another is named."""
    script = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    found: list[list[str]] = page.locator(f"#{table} tbody tr[data-row]").evaluate_all(script)
    return found


def place_of(page: Any, heading: str) -> int:
    """Which column has this heading."""
    titles = page.locator("#s1-table th").evaluate_all("heads => heads.map(head => head.textContent)")
    return next(place for place, title in enumerate(titles) if ", ".join(title.split("\n")) == heading)


def test_the_ranking_sorts_and_filters(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards the table: sorted both ways, filters that hold together, and of 286 rows only those in sight are there."""
    with opened(chromium, reports["search"]) as seen:
        table = seen.page.locator("#s1-table")
        assert [row[0] for row in rows(seen.page)[:3]] == ["1", "2", "3"]
        assert len(rows(seen.page)) < 60
        column = place_of(seen.page, "step, s")
        head = table.locator("th").nth(column)
        head.locator("button").click()
        rising = [float(row[column].replace(",", "")) for row in rows(seen.page)[:15]]
        assert rising == sorted(rising)
        head.locator("button").click()
        falling = [float(row[column].replace(",", "")) for row in rows(seen.page)[:15]]
        assert falling == sorted(falling, reverse=True)
        assert falling[0] > rising[-1]
        table.locator("select[data-column=x]").select_option("2")
        assert {row[place_of(seen.page, "x")] for row in rows(seen.page)} == {"2"}
        table.locator("select[data-column=state]").select_option("rejected: memory")
        assert {row[0] for row in rows(seen.page)} == {"–"}
        assert re.fullmatch(r"\d+ of 286 rows", table.locator(".count").inner_text())
        table.locator("input[type=search]").fill("no such thing")
        assert table.locator(".count").inner_text() == "0 of 286 rows"
        seen.check()


def test_a_row_opens_its_configuration(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards details: by mouse and keyboard, with a command for the row, and a second one beside the first."""
    with opened(chromium, reports["search"]) as seen:
        panel = seen.page.locator("#s1-configuration")
        seen.page.locator("#s1-table tr[data-row='1']").click()
        assert panel.get_by_label("configuration", exact=True).locator("option:checked").inner_text().startswith("#2: ")
        row = seen.page.locator("#s1-table tr[data-row='12']")
        row.focus()
        row.press("Enter")
        assert panel.locator("h3").inner_text().startswith("#13: ")
        line = panel.locator(".command code").first.inner_text()
        explained = json.loads(good(line.removeprefix("axonn-tune ") + " --format json").out)["config"]
        assert f"{explained['x']}" in rows(seen.page)[12][1]
        # By keyboard, since the page may still scroll to the panel, and a click would meet another row.
        seen.page.locator("#s1-table tr[data-row='0']").focus()
        seen.page.keyboard.press("Enter")
        panel.locator("select[aria-label='compare with']").select_option("2")
        block = panel.locator(".block", has=seen.page.locator("h2", has_text="Step: #1: "))
        assert " vs. #3: " in block.locator("h2").inner_text()
        block.scroll_into_view_if_needed()
        block.locator("[data-drawn=true]").wait_for()
        seen.check()


@pytest.mark.nightly
@pytest.mark.parametrize("allowed", [True, False])
def test_a_launch_config_is_copied(chromium: Any, reports: dict[str, Path], tmp_path: Path, *, allowed: bool) -> None:
    """Guards the copy button, with the clipboard and without: what is copied is a launch config that loads."""
    with opened(chromium, reports["search"]) as seen:
        seen.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        if not allowed:
            seen.page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject(); }")
        panel = seen.page.locator("#s1-configuration")
        panel.locator("summary", has_text="to copy").click()
        button = panel.locator(".command.file button")
        button.click()
        seen.page.wait_for_function("button => button.textContent === 'copied'", arg=button.element_handle())
        path = tmp_path / "launch.yaml"
        path.write_text(seen.page.evaluate("navigator.clipboard.readText()"), "utf-8")
        assert load_document(path, schema=Launch).grid.world == 1024
        seen.check()


@pytest.mark.nightly
def test_a_phone_has_the_answer_on_its_first_screen(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards the head on a phone: verdict and first bars are in sight."""
    with opened(chromium, reports["search"], size=PHONE) as seen:
        assert re.search(r" s a step \(80%: ", seen.page.locator(".verdict p").first.inner_text())
        block = seen.drawn(BREAKDOWN)
        seen.page.evaluate("window.scrollTo(0, 0)")
        bar = block.locator(".barlayer path").first.bounding_box()
        assert bar["y"] + bar["height"] < PHONE[1]


@pytest.mark.nightly
def test_figures_answer(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards figures: the theme changes them, the legend hides bars, pointing names them, sources fold out."""
    with opened(chromium, reports["search"]) as seen:
        block = seen.drawn(BREAKDOWN)
        before = block.locator("svg.main-svg text").first.evaluate("one => getComputedStyle(one).fill")
        theme = seen.page.locator("#theme")
        theme.click()
        theme.click()
        assert theme.inner_text() == "theme: dark"
        seen.page.wait_for_timeout(500)
        assert block.locator("svg.main-svg text").first.evaluate("one => getComputedStyle(one).fill") != before
        bars = block.locator(".barlayer .point")
        count = bars.count()
        entry = block.locator(".legend button", has_text="GEMMs")
        entry.click()
        seen.page.wait_for_function("button => button.ariaPressed === 'false'", arg=entry.element_handle())
        seen.page.wait_for_timeout(300)
        assert bars.count() == count - 10
        block = seen.drawn("One layer, backward")
        block.locator(".barlayer path").first.hover(force=True)
        said = block.locator(".hoverlayer .hovertext").first
        said.wait_for()
        assert " from " in (said.text_content() or "")
        fold = seen.page.locator("section.source > details", has_text="every number with its source")
        fold.locator("summary").click()
        fold.locator("table").wait_for()
        assert "NVIDIA A100 datasheet" in fold.inner_text()
        seen.check()


@pytest.mark.nightly
def test_published_rows_are_pointed_at_and_filtered(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards `accuracy --html`: points say what they are, errors are another view, rows filter."""
    with opened(chromium, reports["rows"]) as seen:
        block = seen.drawn("Predicted vs. measured")
        block.locator(".scatterlayer .point").last.hover(force=True)
        said = block.locator(".hoverlayer .hovertext").first
        said.wait_for()
        assert "80% interval: " in (said.text_content() or "")
        block.get_by_role("button", name="error", exact=True).click()
        block.locator("svg text", has_text="error, %").wait_for()
        seen.page.locator("#s1-rows select[data-column=source]").select_option("dgxc")
        shown = rows(seen.page, "s1-rows")
        assert shown
        assert all(row[0].startswith("dgxc-") for row in shown)
        seen.check()
