"""Reports opened in a real browser: they draw, sort, filter and switch, and nothing leaves the file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.report.ranking_section import BREAKDOWN
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from tests.browser.browser import DESKTOP, PHONE, Scheme, browser, opened
from tests.cli.running import good

pytestmark = pytest.mark.slow

VIEWS: list[tuple[str, tuple[int, int], Scheme]] = [
    ("desktop-light", DESKTOP, "light"),
    ("desktop-dark", DESKTOP, "dark"),
    ("phone-light", PHONE, "light"),
    ("phone-dark", PHONE, "dark"),
]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all tests; skipped without one."""
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def reports(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of every kind: a search, an explanation, a sweep, …; what ran here, and one run's folder."""
    folder = tmp_path_factory.mktemp("reports")
    found = {
        name: folder / f"{name}.html"
        for name in ("search", "explain", "sweep", "compare", "launch", "published", "validated", "run")
    }
    good(f"--gpus 1024 --model 80b -o {folder}/launch.yaml --html {found['search']}")
    good(f"explain --gpus 64 --model llama3-8b --machine dgx-h100 --framework torchtitan --html {found['explain']}")
    good(f"sweep --gpus 64..4096x2 --model 20b,40b --html {found['sweep']}")
    good(f"compare --gpus 1024 --model 80b --html {found['compare']}")
    good(f"report {folder}/launch.yaml -o {found['launch']}")
    good(f"accuracy --html {found['published']}")
    local = "--gpus 2 --model nano --machine localhost --precision fp32 --batch 8"
    good(f"validate {local} --top 3 --repeats 2 --steps 4 --runs {folder}/runs --html {found['validated']}")
    run = next(path.parent for path in sorted((folder / "runs").rglob("summary.json")))
    good(f"report {run} -o {found['run']}")
    return found


SEEN = [(name, *view) for name in ("search", "sweep", "validated") for view in VIEWS]
SEEN += [
    (name, *view) for name in ("compare", "explain", "launch", "published", "run") for view in (VIEWS[0], VIEWS[3])
]


@pytest.mark.parametrize(("name", "view", "size", "scheme"), SEEN)
def test_every_report_draws(
    chromium: Any, reports: dict[str, Path], name: str, view: str, size: tuple[int, int], scheme: Scheme
) -> None:
    """Guards each kind of report at both widths and in both themes: all figures, no error, nothing beside the page."""
    with opened(chromium, reports[name], size=size, scheme=scheme) as seen:
        seen.draw_all()
        assert seen.page.locator(".drawing .waiting").count() == 0
        wide = seen.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, "the page scrolls sideways"
        seen.screenshot(f"{name}-{view}")
        seen.check()


def rows(page: Any, table: str = "s1-table") -> list[list[str]]:
    """Cells of the rows of a table that are in sight: of the ranking, unless another is named."""
    script = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    found: list[list[str]] = page.locator(f"#{table} tbody tr[data-row]").evaluate_all(script)
    return found


def place_of(page: Any, heading: str) -> int:
    """Which column has this heading."""
    titles = page.locator("#s1-table th").evaluate_all("heads => heads.map(head => head.textContent)")
    return next(place for place, title in enumerate(titles) if title.replace("\u00ad", "") == heading)


def test_the_ranking_sorts(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards sorting both ways, and that grids without a number come last."""
    with opened(chromium, reports["search"]) as seen:
        table = seen.page.locator("#s1-table")
        assert [row[0] for row in rows(seen.page)[:3]] == ["1", "2", "3"]
        column = place_of(seen.page, "step, s")
        head = table.locator("th").nth(column)
        head.locator("button").click()
        rising = [float(row[column].replace(",", "")) for row in rows(seen.page)[:15]]
        assert rising == sorted(rising)
        assert head.get_attribute("aria-sort") == "ascending"
        head.locator("button").click()
        falling = [float(row[column].replace(",", "")) for row in rows(seen.page)[:15]]
        assert falling == sorted(falling, reverse=True)
        assert falling[0] > rising[-1]
        seen.check()


def test_the_ranking_filters(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards filters and search: they hold together, and say how many rows are left."""
    with opened(chromium, reports["search"]) as seen:
        table = seen.page.locator("#s1-table")
        table.locator("select[data-column=x]").select_option("2")
        found = rows(seen.page)
        assert found
        assert {row[place_of(seen.page, "x")] for row in found} == {"2"}
        table.locator("select[data-column=state]").select_option("rejected: memory")
        assert {row[0] for row in rows(seen.page)} == {"–"}
        shown = table.locator(".count").inner_text()
        assert re.fullmatch(r"\d+ of 286 rows", shown)
        table.locator("input[type=search]").fill("no such thing")
        assert rows(seen.page) == []
        assert table.locator(".count").inner_text() == "0 of 286 rows"
        table.locator("input[type=search]").fill("")
        table.locator("select[data-column=state]").select_option("")
        assert {row[place_of(seen.page, "x")] for row in rows(seen.page)} == {"2"}
        seen.check()


def test_a_long_table_is_a_window(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards speed: of 286 rows those in sight are elements, and scrolling brings the others."""
    with opened(chromium, reports["search"]) as seen:
        assert len(rows(seen.page)) < 60
        seen.page.locator("#s1-table .scroller").evaluate("box => { box.scrollTop = box.scrollHeight; }")
        seen.page.wait_for_function("document.querySelector('#s1-table tr[data-row=\"285\"]')")
        assert len(rows(seen.page)) < 60
        seen.check()


def test_a_row_opens_its_configuration(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards details: in full for the first, in short with a command for the others, by mouse and keyboard."""
    with opened(chromium, reports["search"]) as seen:
        seen.page.locator("#s1-table tr[data-row='1']").click()
        panel = seen.page.locator("#s1-configuration")
        assert panel.get_by_label("configuration", exact=True).locator("option:checked").inner_text().startswith("#2: ")
        assert "chosen" in (seen.page.locator("#s1-table tr[data-row='1']").get_attribute("class") or "")
        row = seen.page.locator("#s1-table tr[data-row='12']")
        row.focus()
        row.press("Enter")
        assert panel.locator("h3").inner_text().startswith("#13: ")
        line = panel.locator(".command code").first.inner_text()
        assert "axonn-tune explain --gpus 1024 --model 80b" in line
        words = line.removeprefix("axonn-tune ") + " --format json"
        explained = json.loads(good(words).out)["config"]
        assert f"{explained['x']}" in rows(seen.page)[12][1]
        assert panel.locator(".command code").nth(1).inner_text().endswith(" -o launch.yaml")
        seen.check()


def test_two_configurations_stand_beside_each_other(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards the choice of a second one: its parts, which sum to the difference, as bars and as a table."""
    with opened(chromium, reports["search"]) as seen:
        panel = seen.page.locator("#s1-configuration")
        panel.locator("select[aria-label='compare with']").select_option("2")
        block = panel.locator(".block", has=seen.page.locator("h2", has_text="Step: #1 "))
        assert " vs. #3 " in block.locator("h2").inner_text()
        block.scroll_into_view_if_needed()
        block.locator("[data-drawn=true]").wait_for()
        panel.locator("summary", has_text="The same as a table").first.click()
        listed_parts = panel.locator("table").first.locator("tbody tr[data-row]")
        listed_parts.first.wait_for()
        cells = listed_parts.evaluate_all("rows => rows.map(row => [...row.cells].map(cell => cell.textContent))")
        (_, own, other, more), *parts = cells
        listed = {row[0]: row[place_of(seen.page, "step, s")] for row in rows(seen.page)}
        assert [float(own), float(other)] == pytest.approx([float(listed["1"]), float(listed["3"])], abs=0.06)
        assert float(more) == pytest.approx(sum(float(part[3]) for part in parts), abs=0.01)
        panel.locator("select[aria-label='compare with']").select_option("")
        assert panel.locator("h2", has_text=" vs. ").count() == 0
        seen.check()


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


def test_a_phone_has_the_answer_on_its_first_screen(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards the head on a phone: verdict and first bars are in sight."""
    with opened(chromium, reports["search"], size=PHONE) as seen:
        assert re.search(r" s a step \(80%: ", seen.page.locator(".verdict p").first.inner_text())
        block = seen.drawn(BREAKDOWN)
        seen.page.evaluate("window.scrollTo(0, 0)")
        bar = block.locator(".barlayer path").first.bounding_box()
        assert bar["y"] + bar["height"] < PHONE[1]
        seen.check()


def test_words_fold_out(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards provenance: one click shows each number of the machine with its source."""
    with opened(chromium, reports["search"]) as seen:
        fold = seen.page.locator("section.source > details", has_text="every number with its source")
        assert fold.locator("table").count() == 0
        fold.locator("summary").click()
        fold.locator("table").wait_for()
        assert "NVIDIA A100 datasheet" in fold.inner_text()
        seen.check()


def test_the_theme_changes_all(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards the switch of the theme, which figures follow."""
    with opened(chromium, reports["search"]) as seen:
        block = seen.drawn(BREAKDOWN)
        texts = "svg.main-svg text"
        before = block.locator(texts).first.evaluate("one => getComputedStyle(one).fill")
        theme = seen.page.locator("#theme")
        theme.click()
        theme.click()
        assert theme.inner_text() == "theme: dark"
        seen.page.wait_for_timeout(500)
        assert block.locator(texts).first.evaluate("one => getComputedStyle(one).fill") != before
        seen.check()


def test_the_legend_hides(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards the legend: a click hides what it stands for, a second one shows it again."""
    with opened(chromium, reports["search"]) as seen:
        block = seen.drawn(BREAKDOWN)
        bars = block.locator(".barlayer .point")
        before = bars.count()
        entry = block.locator(".legend button", has_text="GEMMs")
        entry.click()
        seen.page.wait_for_function("button => button.ariaPressed === 'false'", arg=entry.element_handle())
        seen.page.wait_for_timeout(300)
        assert bars.count() == before - 10
        entry.click()
        seen.page.wait_for_timeout(300)
        assert bars.count() == before
        seen.check()


def test_hovering_says_what_a_bar_is(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards the timeline: pointing at a bar names the operation and its time."""
    with opened(chromium, reports["search"]) as seen:
        block = seen.drawn("One layer, backward")
        bar = block.locator(".barlayer path").first
        bar.hover(force=True)
        said = block.locator(".hoverlayer .hovertext").first
        said.wait_for()
        assert " from " in (said.text_content() or "")
        seen.check()


def test_published_rows_are_pointed_at_and_filtered(chromium: Any, reports: dict[str, Path]) -> None:
    """Guards `accuracy --html`: points say what they are, errors are another view, rows filter."""
    with opened(chromium, reports["published"]) as seen:
        block = seen.drawn("Predicted vs. measured")
        block.locator(".scatterlayer .point").last.hover(force=True)
        said = block.locator(".hoverlayer .hovertext").first
        said.wait_for()
        assert "80% interval: " in (said.text_content() or "")
        block.get_by_role("button", name="error", exact=True).click()
        block.locator("svg text", has_text="error, %").wait_for()
        families = rows(seen.page, "s1-families")
        regrets = [float(row[2]) for row in families]
        assert regrets == sorted(regrets, reverse=True)
        seen.page.locator("#s1-rows select[data-column=source]").select_option("dgxc")
        shown = rows(seen.page, "s1-rows")
        assert shown
        assert all(row[0].startswith("dgxc-") for row in shown)
        seen.check()
