"""What a report costs: `python -m benchmarks.report [--rows N] [--runs N]`.

A ranking of N configurations is written, and opened in headless Chromium with the network off. Printed are
the size of the file, the time to write it, and medians of: the time until the page can be used (all rows in
the table, sorted and filtered at will), and until the first figures in sight are drawn; then the time that
sorting takes. A timing says as much about the host as about the page.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.page import write_page
from axonn_tune.report.ranking_section import ranking_of, ranking_section
from axonn_tune.request import Request
from tests.browser.browser import browser, opened

_DRAWN = "document.querySelector('[data-drawn=true]')"
_SORT = """() => {
  const button = document.querySelectorAll('#s1-table th button')[7];
  const began = performance.now();
  button.click();
  document.body.offsetHeight;
  return performance.now() - began;
}"""


def write_report(path: Path, *, rows: int) -> float:
    """A report of so many of the candidates of 80b on 1,024 GPUs; returns the time to make it, s."""
    inputs = load_inputs(Request("80b", gpus=1024))
    ranked = run_search(inputs.problem, top=rows, variants=True)
    began = time.perf_counter()
    document = deepcopy(ranking_of(inputs, ranked))
    write_page(path, [ranking_section(document, identity="s1", source="benchmark")], command="benchmark")
    return time.perf_counter() - began


def times_ms(chromium: Any, path: Path) -> tuple[float, float, float]:  # noqa: ANN401 - playwright's browser
    """Until the page can be used, until the first figure is drawn, and to sort, ms."""
    with opened(chromium, path) as seen:
        ready = seen.page.evaluate("performance.timing.domContentLoadedEventEnd - performance.timing.navigationStart")
        seen.page.wait_for_function(_DRAWN)
        drawn = seen.page.evaluate("performance.now()")
        return float(ready), float(drawn), float(seen.page.evaluate(_SORT))


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        path = Path(folder) / "report.html"
        written_s = write_report(path, rows=arguments.rows)
        size_mb = path.stat().st_size / 1e6
        columns = zip(*(times_ms(chromium, path) for _ in range(arguments.runs + 1)), strict=True)
        ready, drawn, sorted_in = (statistics.median(column[1:]) for column in columns)
    print(
        f"{arguments.rows:,} configurations: {size_mb:.1f} MB, written in {written_s:.2f} s; "
        f"medians of {arguments.runs}: usable after {ready:.0f} ms, first figure after {drawn:.0f} ms, "
        f"sorted in {sorted_in:.0f} ms"
    )


if __name__ == "__main__":
    main()
