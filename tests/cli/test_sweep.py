"""`sweep` as a user meets it."""

from __future__ import annotations

import csv
import io

import pytest

from axonn_tune.errors import UsageError
from axonn_tune.ranking.sweep import parse_numbers
from tests.cli.running import good, run


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("64", (64,)),
        ("64,128, 256", (64, 128, 256)),
        ("64..512x2", (64, 128, 256, 512)),
        ("64..500", (64, 128, 256)),
        ("8..32+8", (8, 16, 24, 32)),
        ("3,3..9x3,3", (3, 9)),
    ],
)
def test_numbers(text: str, numbers: tuple[int, ...]) -> None:
    """Guards lists and ranges."""
    assert parse_numbers(text, option="--gpus") == numbers


@pytest.mark.parametrize("text", ["", "0", "-4", "a", "8..4", "8..16x1", "8..16+0", "8..", "1..99999999+1", "1.5"])
def test_no_numbers(text: str) -> None:
    """Guards against endless and empty ranges."""
    with pytest.raises(UsageError, match="--gpus"):
        parse_numbers(text, option="--gpus")


def test_strong_scaling() -> None:
    """Guards the points: the best of each search, efficiency relative to the first of each model."""
    found = good("sweep --gpus 64..256x2 --model 5b,20b --format json").document
    assert found["schema"] == "axonn-tune/sweep/1"
    assert [(point["model"], point["gpus"]) for point in found["points"]] == [
        (model, gpus) for model in ("5b", "20b") for gpus in (64, 128, 256)
    ]
    for first, point in zip([*[found["points"][0]] * 3, *[found["points"][3]] * 3], found["points"], strict=True):
        assert point["global_batch"] == 8192
        per_gpu = [each["config"]["tokens_per_s"] / each["gpus"] for each in (point, first)]
        assert point["efficiency"] == per_gpu[0] / per_gpu[1]
    best = good("--gpus 128 --model 20b --top 1 --format json").document["configs"][0]
    config = found["points"][4]["config"]
    assert config == {key: best[key] for key in config}


def test_efficiency_above_100_is_explained_where_it_occurs() -> None:
    """Guards the reason: memory of the baseline, by the recompute that it needs; nothing where no point is above."""
    line = "sweep --model llama3-405b --machine gb200-nvl72 --rank-by step --gpus"
    above = " ".join(good(f"{line} 128,256").out.split())
    points = good(f"{line} 128,256 --format json").document["points"]
    assert points[1]["efficiency"] > 1.0
    base, more = (point["config"]["recompute"] for point in points)
    assert base != more
    assert (
        f"the baseline, 128 GPUs, is bound by memory and needs recompute {base}, where 256 GPUs have {more}." in above
    )
    assert "Efficiency above" not in good("sweep --gpus 64,128 --model 20b").out


def test_weak_scaling() -> None:
    """Guards --weak: the batch grows with the GPUs."""
    points = good("sweep --gpus 16,32,64 --model 5b --batch 256 --weak --format json").document["points"]
    assert [point["global_batch"] for point in points] == [256, 512, 1024]


def test_points_that_do_not_fit_are_shown() -> None:
    """Guards sweeps across the limit: what does not fit has its reason, the rest its numbers."""
    finished = good("sweep --gpus 2,64 --model 20b")
    assert "20b on 2 GPUs, batch 8192: binding constraint: memory" in finished.out
    rows = list(csv.DictReader(io.StringIO(good("sweep --gpus 2,64 --model 20b --format csv").out)))
    assert [row["feasible"] for row in rows] == ["false", "true"]
    assert rows[0]["iteration_s"] == ""
    assert float(rows[1]["efficiency"]) == 1.0


def test_batches_and_formats() -> None:
    """Guards --batch lists and the Markdown table."""
    head, _, *lines = good("sweep --gpus 64 --batch 512,1024 --model 20b --format md").out.splitlines()
    assert head.startswith("20b on perlmutter (A100-SXM4-40GB)")
    assert lines[0].startswith("| model | GPUs | batch |")
    rows = [line.split("|")[1:4] for line in lines[2:] if line.startswith("| 20b")]
    assert [batch.strip() for model, _, batch in rows if not model.strip().endswith("*")] == ["512", "1,024"]


def test_nothing_anywhere() -> None:
    """Guards exit code 3: no point feasible, all reasons printed."""
    finished = run("sweep --gpus 1,2 --model 640b")
    assert finished.code == 3
    assert finished.out.count("binding constraint") == 2


def test_columns_of_a_sweep_are_chosen() -> None:
    """Guards --columns and --wide: those named in their order, all of them, and the nearest of a wrong one."""
    line = "sweep --gpus 8,16 --model 5b"
    chosen = good(f"{line} --columns gpus,memory,step").out.splitlines()
    assert [row.split()[0] for row in chosen[4:]] == ["8", "16"]
    assert all(len(row.split()) == 3 for row in chosen[4:])
    assert chosen[0].startswith(
        "5b on perlmutter (A100-SXM4-40GB), sequences of 2,048 tokens in bf16: the best of each"
    )
    assert "ranked by communication per step" in " ".join(" ".join(chosen[:2]).split())
    assert "\n      grid\n" in good(f"{line} --columns layout").out
    assert len(good(f"{line} --wide").out.splitlines()[3]) > len(good(line).out.splitlines()[3])
    refused = run(f"{line} --columns gpu")
    assert refused.code == 2
    assert "no column 'gpu', did you mean 'gpus'?" in refused.err
