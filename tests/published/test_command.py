"""A published NeMo command of Llama 3.1 70B on 2,048 H100: read, predicted, and its place in a search.

Of NVIDIA's DGX Cloud benchmarks 24.11.1, whose step times are rows of steps.csv (dgxc-0026 and, of later releases,
0121 and 0190). Numbers that no row of its family fitted, llama3.1-70b on 2,048 GPUs, were fitted by

    tools.fit.software.fit([at for at, one in enumerate(cases()) if family_group(one) != "5"], start=shipped())

and those without its source are in tools/published/without_source.csv.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import pytest

import axonn_tune
from axonn_tune.api.learning import CommandExplanation
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import Machine, Software
from axonn_tune.validation.published.accuracy import left_out_s, predict_steps
from axonn_tune.validation.published.rows import SHIPPED, read_steps

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "tests" / "fixtures" / "commands" / "llama31-70b-nemo.sh"
PUBLISHED_S = {"dgxc-0026": 14.98, "dgxc-0121": 14.84, "dgxc-0190": 14.66}

WITHOUT_FAMILY = {
    "core:operation_us": 4.30293,
    "dgx-h100:contention": 0.311558,
    "dgx-h100:training_share": 0.894697,
}
"""Numbers of a fit without the family."""


def machine(numbers: Mapping[str, float]) -> Machine:
    """DGX H100 with these numbers of it and of Megatron-Core's software."""

    def of(owner: str) -> dict[str, float]:
        return {name: value for key, value in numbers.items() for own, name in [key.split(":")] if own == owner}

    shipped = load_machine("dgx-h100").document
    accelerator = shipped.accelerator.model_copy(update=of("dgx-h100"))
    return shipped.model_copy(update={"accelerator": accelerator, "software": {"core": Software(**of("core"))}})


def without_source() -> dict[str, float]:
    """Numbers of a fit without any of these benchmarks."""
    with (ROOT / "tools" / "published" / "without_source.csv").open(encoding="utf-8", newline="") as file:
        return {one["number"]: float(one["value"]) for one in csv.DictReader(file) if one["source"] == "dgxc"}


@pytest.fixture(scope="module", name="explained")
def _explained() -> CommandExplanation:
    return axonn_tune.explain_command(COMMAND, machine="dgx-h100")


def test_the_command_is_the_row(explained: CommandExplanation) -> None:
    """Guards the reader: what the command states has the price of what the row states, but for the vocabulary's."""
    rows = [row for row in read_steps(SHIPPED / "steps.csv") if row.id in PUBLISHED_S]
    for predicted in predict_steps(rows):
        assert predicted.row.step_s == PUBLISHED_S[predicted.row.id]
        assert explained.priced.layout == predicted.configuration
        assert explained.priced.iteration_s == pytest.approx(predicted.predicted_s, rel=2e-3)


def test_the_published_time_is_within_the_interval(explained: CommandExplanation) -> None:
    """Guards the prediction: within the interval shown, and within a tenth."""
    entry, step_s = explained.priced, explained.priced.iteration_s
    assert entry.low_s is not None
    assert entry.high_s is not None
    for published_s in PUBLISHED_S.values():
        assert entry.low_s < published_s < entry.high_s
        assert abs(published_s / step_s - 1.0) < 0.1


def test_the_search_has_the_published_layout(explained: CommandExplanation) -> None:
    """Guards the rank: the published layout is the second of 258 grids, 6% behind the first."""
    said = explained.stated
    assert len(said.ranking) + said.ranking.searched.unlisted == 258
    assert said.rank is not None
    assert said.rank <= 5
    assert said.best_s == pytest.approx(explained.priced.iteration_s, rel=0.06)


@pytest.mark.parametrize(
    ("numbers", "column", "error", "rank"),
    [(WITHOUT_FAMILY, "family", 0.061, 5), (None, "source", 0.17, 10)],
    ids=["without its family", "without its source"],
)
def test_fits_that_have_not_seen_it_agree(
    numbers: Mapping[str, float] | None, column: str, error: float, rank: int
) -> None:
    """Guards what other runs can expect: the step and the rank by numbers to which no such row contributed."""
    profile = machine(without_source() if numbers is None else numbers)
    found = axonn_tune.explain_command(COMMAND, machine=profile)
    held_out = left_out_s(column)["dgxc-0026"]
    assert found.priced.iteration_s == pytest.approx(held_out, rel=5e-3)
    assert abs(found.priced.iteration_s / PUBLISHED_S["dgxc-0026"] - 1.0) < error
    assert found.stated.rank is not None
    assert found.stated.rank <= rank
