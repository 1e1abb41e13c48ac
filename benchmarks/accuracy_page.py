"""Write docs/accuracy.md from the shipped measurements: `python -m benchmarks.accuracy_page`.

What is in the page's fixed words is in accuracy_page.md beside this file; every number is computed here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from axonn_tune.accuracy.judged import Judged, errors_by_group
from axonn_tune.accuracy.published import Files, judge
from axonn_tune.accuracy.quality import Errors, errors_of, families
from axonn_tune.accuracy.steps import Predicted
from axonn_tune.report.table import Heading, markdown_table
from benchmarks.software import Floats, cases, derivatives, folds, measured_s, ranked_pairs, shipped_parameters

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
WORDS = Path(__file__).with_name("accuracy_page.md")


def page() -> str:
    """The page: fixed words with tables where they say `{{name}}`."""
    text = WORDS.read_text(encoding="utf-8")
    for name, table in tables().items():
        text = text.replace("{{" + name + "}}", table.rstrip())
    return text


def tables() -> dict[str, str]:
    """Every table by name."""
    found = judge(Files(), worst=15)
    family, source = _kept_out()
    return {
        "sources": _by_source(family, source),
        "ranking": _ranking(found.steps, family),
        "worst": _worst(found.summary.worst),
        "collectives": _judged(found.collectives),
        "products": _judged(found.products),
        "memory": _judged(found.memory),
        "coverage": f"{found.summary.coverage:.0%}",
    }


def _kept_out() -> tuple[Floats, Floats]:
    """log(predicted / measured) by fits without the row's family, and without its source."""
    parameters = shipped_parameters()
    _, slopes = derivatives(parameters.start, parameters, cases())
    return (
        folds(parameters.start, slopes, parameters, lambda row: row.family),
        folds(parameters.start, slopes, parameters, lambda row: row.dataset),
    )


def _by_source(family: Floats, source: Floats) -> str:
    shipped = _shipped_errors()
    names = [case.row.dataset for case in cases()]
    headings = [Heading("source", left=True), *map(Heading, ("rows", "as shipped", "without family", "median", "p90"))]
    headings.append(Heading("without source"))
    rows = []
    for name in [*sorted(set(names)), "all"]:
        chosen = np.array([name in {own, "all"} for own in names])
        all_of = [errors_of(np.expm1(errors[chosen]).tolist()) for errors in (shipped, family, source)]
        rows.append(_source_cells(name, *all_of))
    return markdown_table(headings, rows)


def _source_cells(name: str, shipped: Errors, family: Errors, source: Errors) -> list[str]:
    cells = [shipped.mape, family.mape, family.median, family.p90, source.mape]
    return [name, f"{shipped.rows:,}", *(f"{value:.1%}" for value in cells)]


def _shipped_errors() -> Floats:
    from benchmarks.software import predicted_s

    parameters = shipped_parameters()
    return np.asarray(np.log(predicted_s(cases(), parameters.mapping(parameters.start)) / measured_s(cases())))


def _ranking(steps: Sequence[Predicted], family: Floats) -> str:
    headings = [
        Heading("fit", left=True),
        *map(Heading, ("families", "Spearman", "Kendall", "regret", "best in top 5")),
    ]
    rows = []
    for name, pairs in (("as shipped", list(steps)), ("without family", ranked_pairs(family))):
        found = families(pairs)
        means = [float(np.mean([getattr(one, what) for one in found])) for what in ("spearman", "kendall", "regret")]
        top = float(np.mean([one.best_rank <= 5 for one in found]))
        rows.append([name, str(len(found)), f"{means[0]:.3f}", f"{means[1]:.3f}", f"{means[2]:.1%}", f"{top:.0%}"])
    return markdown_table(headings, rows)


def _worst(worst: Sequence[Predicted]) -> str:
    headings = [*(Heading(name, left=True) for name in ("row", "framework", "model", "layout")), Heading("error")]
    return markdown_table(headings, list(_worst_cells(worst)))


def _worst_cells(worst: Sequence[Predicted]) -> Iterator[list[str]]:
    for one in worst:
        layout = one.price.layout.words() if one.price else ""
        yield [one.row.id, one.row.framework, one.row.model, layout, f"{one.error or 0.0:+.0%}"]


def _judged(judged: Sequence[Judged]) -> str:
    headings = [Heading("what", left=True), *map(Heading, ("rows", "mean", "median", "p90", "bias"))]
    rows = [
        [name, f"{one.rows:,}", f"{one.mape:.1%}", f"{one.median:.1%}", f"{one.p90:.1%}", f"{one.bias:+.1%}"]
        for name, one in errors_by_group(judged).items()
        if one.rows >= 5 or name == "all"
    ]
    return markdown_table(headings, rows)


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
