"""Documents that users have on disk: those of `tests/fixtures/v1`, written by version 0.1.0, are still read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.running import good, run

FIXTURES = Path(__file__).parents[1] / "fixtures"
STORED, RESULTS = FIXTURES / "v1", FIXTURES / "v2"
RANKING = "--gpus 4 --model nano --machine localhost --precision fp32 --format json"
DATA_KEYS = ("sources", "rejected", "measured", "collectives")
"""Below these keys stands what a profile or a search happens to hold, not the contract."""


def test_launch_config_is_explained() -> None:
    """Guards launch configs: complete in themselves, they are priced by any later version."""
    assert "tiny" in good(f"explain {STORED / 'launch-2-ranks.yaml'}").out


def test_profile_is_checked_and_searched_with() -> None:
    """Guards profiles of users' own machines, which nobody measures again for an upgrade, and models."""
    assert "ok" in good(f"machines check {STORED / 'profile.yaml'}").out
    options = f"--model {STORED / 'model.yaml'} --machine {STORED / 'profile.yaml'} --precision fp32 --format json"
    assert good(f"--gpus 2 {options}").document["configs"][0]["iteration_s"] > 0


def test_ranking_keeps_its_keys() -> None:
    """Guards programs that read rankings: every key of version 1 is still written."""
    stored = json.loads((STORED / "ranking-nano.json").read_text("utf-8"))
    assert set(_keys(stored)) <= set(_keys(good(RANKING).document))


def test_measurement_is_checked_against_the_baseline(tmp_path: Path) -> None:
    """Guards results of runs: 4 is a prediction that has moved since, which is another matter than an unread file."""
    measurement = RESULTS / "measurement.yaml"
    done = run(f"regress {RESULTS / 'baseline.yaml'} --measurement {measurement} --format json")
    assert done.code in (0, 4), done.err
    measured = [row for row in json.loads(done.out)["findings"] if row["gate"] == "measurements"]
    assert measured
    assert not any(row["failed"] for row in measured)
    good(f"regress {tmp_path / 'baseline.yaml'} --record --measurement {measurement} --reason kept")
    good(f"regress {tmp_path / 'baseline.yaml'} --measurement {measurement} --tolerance prediction=1000%")


@pytest.mark.parametrize(
    ("schema", "line", "renewed_by"),
    [
        ("measurement", "report {path} -o {folder}/r.html", "axonn-tune validate -o FILE"),
        ("summary", "report {path} -o {folder}/r.html", "axonn-tune run"),
        ("baseline", "regress {path}", "axonn-tune regress FILE --record"),
    ],
)
def test_older_results_name_the_command_that_writes_new_ones(
    schema: str, line: str, renewed_by: str, tmp_path: Path
) -> None:
    """Guards users with results of an earlier version: refused with what to do."""
    path = tmp_path / "old.yaml"
    path.write_text(f"schema: axonn-tune/{schema}/1\n", "utf-8")
    done = run(line.format(path=path, folder=tmp_path))
    assert done.code == 2
    assert f"`{renewed_by}` writes a new one" in " ".join(done.err.split())


def _keys(value: Any, path: str = "") -> Iterator[str]:
    """Paths of all keys, as in `configs[].terms[].op`."""
    if isinstance(value, list):
        for one in value:
            yield from _keys(one, f"{path}[]")
    elif isinstance(value, dict):
        for name, one in value.items():
            yield f"{path}.{name}"
            if name not in DATA_KEYS:
                yield from _keys(one, f"{path}.{name}")
