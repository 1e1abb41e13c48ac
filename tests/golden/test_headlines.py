"""Did this change move a prediction? Headline figures against a recorded file.

`python -m tests.golden.test_headlines "why they moved"` records them anew, with the reason.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.space import Problem, RankBy
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.workload import Workload

GOLDEN = Path(__file__).with_name("headlines.json")
TOLERANCE = 1e-3
CASES: tuple[tuple[str, str, int, RankBy], ...] = (
    ("80b", "perlmutter", 1024, "communication"),
    ("80b", "perlmutter", 1024, "iteration"),
    ("20b", "perlmutter-80gb", 256, "iteration"),
    ("40b", "frontier", 2048, "communication"),
    ("llama3-70b", "dgx-h100", 512, "iteration"),
    ("llama3-405b", "dgx-h100", 4096, "exposed"),
    ("gpt3-175b", "dgx-b200", 256, "iteration"),
    ("nano", "localhost", 8, "communication"),
)


def headline(model: str, machine: str, gpus: int, rank_by: RankBy) -> dict[str, object]:
    """What the search answers: the first grid, and the figures people quote."""
    document = load_model(model).document
    defaults = document.defaults
    workload = Workload(global_batch=defaults.global_batch, sequence_length=defaults.sequence_length)
    ranking = search(Problem(document, load_machine(machine).document, workload, gpus, rank_by=rank_by))
    first = ranking.candidate(0)
    grid = first.configuration.grid
    return {
        "first": f"x={grid.x} y={grid.y} z={grid.z} data={grid.data} {','.join(grid.order)}",
        "micro_batch": first.configuration.micro_batch,
        "recompute": first.configuration.recompute,
        "feasible": ranking.searched.feasible,
        "communication_s": first.communication_s,
        "iteration_s": first.iteration_s,
        "memory_bytes": first.memory_bytes,
    }


def name(case: tuple[str, str, int, str]) -> str:
    """Key of a case in the file."""
    return " ".join(str(part) for part in case)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_no_headline_moves_unnoticed(case: tuple[str, str, int, RankBy]) -> None:
    """Guards users' decisions: a prediction moves by more than 0.1% only with a recorded reason."""
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert recorded["reason"]
    for key, value in headline(*case).items():
        expected = recorded["headlines"][name(case)][key]
        assert value == (pytest.approx(expected, rel=TOLERANCE) if isinstance(value, float) else expected), key


def record(reason: str) -> None:
    """Write the file anew."""
    headlines = {name(case): headline(*case) for case in CASES}
    text = json.dumps({"reason": reason, "headlines": headlines}, indent=2, ensure_ascii=False)
    GOLDEN.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(sys.argv[1])
