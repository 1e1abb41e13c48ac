"""Write docs/accuracy.md and docs/accuracy-fits.md from the shipped measurements: `python -m tools.accuracy_page`.

The fixed words of both are in accuracy_page.md and accuracy_fits.md beside this file; every table is computed here.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from axonn_tune.cost.uncertainty import (
    ASSUMED,
    DEVIATIONS,
    GENERATIONS,
    LARGEST,
    OF_LAYOUT,
    OF_LAYOUT_WITH_EXPERTS,
    PER_DOUBLING,
    PER_STAGE_DOUBLING,
)
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.others import AUTOMODEL
from axonn_tune.report.accuracy import headline
from axonn_tune.report.output import Column, markdown_table, words
from axonn_tune.specs.catalog import load_machine
from axonn_tune.validation.published.accuracy import SUMS, Accuracy, PredictedRow, StepSummary, evaluate
from axonn_tune.validation.published.cases import FRAMEWORK_WORDS
from axonn_tune.validation.published.groups import by_what, groups, is_tuned, unfit
from axonn_tune.validation.published.groups import pairs as pairs_of
from axonn_tune.validation.published.rows import known_errata
from axonn_tune.validation.quality import Quality
from tools import vtrain_sums
from tools.accuracy_figure import figure
from tools.fit import back_test
from tools.measurements import Evaluation, errors_by_group, shipped
from tools.pages import table, write_page

DOCS = Path(__file__).parents[1] / "docs"
FIGURE = DOCS / "accuracy.svg"
PAGES = {"accuracy_page.md": DOCS / "accuracy.md", "accuracy_fits.md": DOCS / "accuracy-fits.md"}


def tables() -> dict[str, str]:
    """Every table by name."""
    found = evaluate()
    collectives, gemms, memory = (shipped(kind) for kind in ("collectives", "gemm", "memory"))
    medians = [errors_by_group(rows)["all"].median for rows in (collectives, gemms)]
    single = [one for one in found.steps if one.row.dataset == vtrain_sums.DATASET]
    groups = list(vtrain_sums.groups(single))
    FIGURE.write_text(figure(found.steps), encoding="utf-8")
    return {
        "sources": _by_source(found),
        "ranking": _ranking(found),
        "goals": _goals(found, collectives, memory),
        "headline": "\n".join(f"- {sentence}" for sentence in headline(found)),
        "errata": table(
            ["source", "column", "the source says", "taken", "why"],
            [],
            [
                [one["dataset"], f"`{one['column']}`", one["source_says"] or "nothing", one["taken"], one["why"]]
                for one in known_errata()
            ],
        ),
        "layers": str(found.sums[1]),
        **_named(found),
        "open": _open(found.summary.open),
        "widths": f"±{load_machine('dgx-h100').document.uncertainty.compute:.0%}",
        "assumed": f"±{ASSUMED:.0%}",
        "own": f"±{DEVIATIONS * OF_LAYOUT:.0%}",
        "own_experts": f"±{DEVIATIONS * OF_LAYOUT_WITH_EXPERTS:.0%}",
        "per_gpus": f"{PER_DOUBLING:.1%}",
        "per_stages": f"{PER_STAGE_DOUBLING:.1%}",
        "largest": ", ".join(f"{size:,} {_SIZES[name]}" for name, size in LARGEST.items()),
        "accelerators": ", ".join(map(str.capitalize, GENERATIONS)),
        **_back_tests(),
        "worst": _worst(found.summary.worst(15)),
        "collectives": _evaluations(collectives),
        "gemms": _evaluations(gemms),
        "collectives_median": f"{medians[0]:.1%}",
        "gemms_median": f"{medians[1]:.1%}",
        "memory": _evaluations(memory),
        "share": f"{len(single) / len(found.steps):.0%}",
        "families": str(len(StepSummary(tuple(single)).families)),
        "frameworks": _frameworks(),
        "vtrain": _indented(vtrain_sums.residuals(groups) + "\n\n" + vtrain_sums.layer_times(groups)),
        "cuts": _indented(vtrain_sums.cuts(single)),
    }


def _more(found: Accuracy) -> str:
    """Rows that name their model: errors by group and source."""
    assert found.more is not None, "of the shipped rows"
    rows = []
    for name, one in groups(found.more.rows).items():
        sources = one.by_source
        over = fmean(each.mape for each in sources.values())
        for what, each in (*sources.items(), (f"**all**, mean over sources {over:.1%}", one.quality)):
            held = [f"{value:.0%}" for value in (each.coverage, each.width)]
            signed = f"{each.bias:+.1%}"
            rows.append([name, what, f"{each.rows:,}", f"{each.mape:.1%}", f"{each.median:.1%}", signed, *held])
    return table(["rows", "source"], ["rows", "mean", "median", "signed mean", "hold", "width"], rows)


def _named(found: Accuracy) -> dict[str, str]:
    """The same: how many, pairs, those that do not fit, and the worst."""
    assert found.more is not None, "of the shipped rows"
    every = found.more.rows
    pairs = [
        [what, str(one.pairs), str(one.told), "" if one.right is None else f"{one.right:.0%}", f"{one.error:.1%}"]
        for what, one in by_what(pairs_of(every)).items()
    ]
    unfitting = [[one.row.id, one.row.model, one.layout, one.misfit.removeprefix(", ")] for one in unfit(every)]
    return {
        "named": f"{len(every):,}",
        "blind": str(sum(one.row.more is not None and one.row.more.blind for one in every)),
        "more": _more(found),
        "pairs": table(
            ["what differs"], ["pairs", "beyond 5%", "faster one named", "median error of the ratio"], pairs
        ),
        "unfit": table(["row", "model", "layout", "memory"], [], unfitting),
        "worst_named": _worst(StepSummary(tuple(one for one in every if is_tuned(one))).worst(10)),
    }


def _indented(text: str) -> str:
    """As part of a list's item, where its place in the words already indents the first line."""
    return textwrap.indent(text, "  ").strip()


_SIZES = {
    "gpus": "GPUs",
    "pipeline": "pipeline stages",
    "chunks": "chunks of a stage",
    "context": "ranks of context",
    "sequence": "tokens in a sequence",
}


def _open(some: Sequence[PredictedRow]) -> str:
    """Rows that leave part of their layout open."""
    numbers = ("GPUs", "layouts that fit", "measured, s", "least, s", "most, s")
    rows = [
        [
            one.row.id,
            one.row.model,
            one.open_words,
            f"{one.row.gpus:,}",
            str(len(one.choices_s)),
            f"{one.row.step_s:.3g}",
            f"{one.choices_s[0]:.3g}",
            f"{one.choices_s[-1]:.3g}",
        ]
        for one in some
    ]
    return table(["row", "model", "open"], numbers, rows)


def _goals(found: Accuracy, collectives: Sequence[Evaluation], memory: Sequence[Evaluation]) -> str:
    """What was aimed at, by fits without a row's family, and what was reached."""
    family, apart = found.without["family"], found.apart
    assert apart is not None, "of the shipped rows"
    of_memory, of_collectives = errors_by_group(memory)["all"].mape, errors_by_group(collectives)["all"].median
    errors, held = family.quality, apart.quality.coverage
    goals = [
        ("mean error of steps without the family, at most 4.5%", f"{errors.mape:.1%}", errors.mape <= 0.045),
        ("median error, at most 2.5%", f"{errors.median:.1%}", errors.median <= 0.025),
        ("mean Spearman, at least 0.95", f"{family.spearman:.3f}", (family.spearman or 0.0) >= 0.95),
        ("mean regret, at most 2%", f"{family.regret:.1%}", (family.regret or 1.0) <= 0.02),
        ("memory, at most 1%", f"{of_memory:.1%}", of_memory <= 0.01),
        ("collectives from 1 MiB up, median at most 10%", f"{of_collectives:.1%}", of_collectives <= 0.1),
        ("80% intervals without the source hold 75 to 90%", f"{held:.0%}", 0.75 <= held <= 0.9),
    ]
    headings = [words("", "goal"), Column("", "reached"), words("", "")]
    return markdown_table(headings, [[goal, figure, "" if met else "missed"] for goal, figure, met in goals])


def _back_tests() -> dict[str, str]:
    """Tables of what is learned from few rows, as `tools.fit.back_test --write` kept it."""
    found = back_test.recorded()
    numbers = ("mean error", "over without family", "one factor", "intervals hold", "interval score")
    means = [back_test.of_all(found, learned_from=count) for count in back_test.LEARNED_FROM]
    rows = [[f"{one.learned_from}", *_back_cells(one)] for one in means]
    reached = {one.group for one in found if one.beyond > 1}
    return {
        "back_test": table(["rows learned from"], [*numbers, "regret", "regret without family"], rows),
        "back_groups": _back_groups(found),
        "beyond": _beyond(found),
        "not_beyond": "; ".join(sorted({one.group for one in found} - reached)),
    }


def _back_cells(one: back_test.Quality) -> list[str]:
    factor = "" if np.isnan(one.one_factor) else f"{one.one_factor:.1%}"
    shares = [f"{one.error:.1%}", f"{one.error / one.family:.2f}", factor, f"{one.held:.0%}", f"{one.score:.2f}"]
    return [*shares, f"{one.regret:.1%}", f"{one.regret_family:.1%}"]


def _back_groups(found: Sequence[back_test.Quality]) -> str:
    by_name: dict[str, list[back_test.Quality]] = {}
    for one in found:
        if one.beyond == 1:
            by_name.setdefault(one.group, []).append(one)
    names = [f"{count} rows" for count in back_test.LEARNED_FROM]
    rows = [
        [name, *(f"{one.error:.1%}" for one in own), f"{own[-1].held:.0%}", f"{own[-1].family:.1%}"]
        for name, own in by_name.items()
    ]
    return table(["group"], [*names, "held", "without family"], rows)


def _beyond(found: Sequence[back_test.Quality]) -> str:
    rows = [
        (
            one.group,
            f"{one.beyond} times",
            f"{one.rows:.0f}",
            f"{one.median:.1%}",
            f"{one.error:.1%}",
            f"{one.held:.0%}",
        )
        for one in found
        if one.beyond > 1
    ]
    return table(["group"], ["beyond", "rows", "median", "mean", "intervals hold"], rows)


def _by_source(found: Accuracy) -> str:
    titles = ("rows", "without source", "median", "hold", "width", "without family", "median", "p90", "as shipped")
    source, family, shipped = found.without["source"], found.without["family"], found.summary
    apart = found.apart
    assert apart is not None, "of the shipped rows"
    rows = [
        _source_cells(name, source.by_source[name], family.by_source[name], one)
        for name, one in shipped.by_source.items()
    ]
    mean = [f"{np.mean([errors.mape for errors in one.by_source.values()]):.1%}" for one in (source, family, shipped)]
    rows.append(["**mean over sources**", "", f"**{mean[0]}**", "", "", "", mean[1], "", "", mean[2]])
    held_out = apart.quality
    held = [
        f"**{held_out.mape:.1%}**",
        f"{held_out.median:.1%}",
        f"**{held_out.coverage:.0%}**",
        f"{held_out.width:.0%}",
    ]
    rows.append([f"**rows without `{SUMS}`**", f"{held_out.rows:,}", *held, "", "", "", ""])
    rows.append(_source_cells("all rows", source.quality, family.quality, shipped.quality))
    return table(["source"], titles, rows)


def _source_cells(name: str, source: Quality, family: Quality, shipped: Quality) -> list[str]:
    cells = [f"{value:.1%}" for value in (source.mape, source.median)]
    cells += [f"{value:.0%}" for value in (source.coverage, source.width)]
    cells += [f"{value:.1%}" for value in (family.mape, family.median, family.p90, shipped.mape)]
    return [name, f"{shipped.rows:,}", *cells]


def _ranking(found: Accuracy) -> str:
    names = ("families", "Spearman", "Kendall", "regret", "best in top 5")
    named = {"as shipped": found.summary, **{f"without {kind}": one for kind, one in found.without.items()}}
    rows = []
    for name, one in named.items():
        kendall = float(np.mean([family.kendall for family in one.families.values()]))
        cells = [f"{one.spearman:.3f}", f"{kendall:.3f}", f"{one.regret:.1%}", f"{one.best_in_top_5:.0%}"]
        rows.append([name, str(len(one.families)), *cells])
    return table(["fit"], names, rows)


def _frameworks() -> str:
    rows = []
    for word, name in FRAMEWORK_WORDS:
        one = AUTOMODEL if name == AUTOMODEL.name else find_framework(name)
        rows.append([word, one.title, one.software, "fused" if one.step.fused_attention else "unfused"])
    return table(["word", "framework", "software numbers", "attention"], [], rows)


def _worst(worst: Sequence[PredictedRow]) -> str:
    rows = [[one.row.id, one.row.framework, one.row.model, one.layout, f"{one.error or 0.0:+.0%}"] for one in worst]
    return table(["row", "framework", "model", "layout"], ["error"], rows)


def _evaluations(evaluated: Sequence[Evaluation]) -> str:
    rows = [
        [name, f"{one.rows:,}", f"{one.mape:.1%}", f"{one.median:.1%}", f"{one.p90:.1%}", f"{one.bias:+.1%}"]
        for name, one in errors_by_group(evaluated).items()
        if one.rows >= 5 or name == "all"
    ]
    return table(["what"], ["rows", "mean", "median", "p90", "bias"], rows)


def main() -> int:
    """Write both pages."""
    found = tables()
    for name, path in PAGES.items():
        write_page(path, Path(__file__).with_name(name), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
