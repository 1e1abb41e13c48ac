"""Ranking figures against hand values, and how rows are read."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from axonn_tune.validation.published.accuracy import predict_steps
from axonn_tune.validation.published.cases import case_of, node_gb_per_s
from axonn_tune.validation.published.rows import SHIPPED, StepRow, read_steps
from axonn_tune.validation.quality import kendall, ranks, spearman
from tools.measurements import PUBLISHED

HEADER = "id,gpu,n_gpus,framework,layers,hidden,heads,ffn,vocab,seq,gbs,mbs,tp,pp,dp,precision,network,gpus_per_node\n"
ROW = "r1,{gpu},8,{framework},24,2048,16,8192,51200,2048,64,2,2,1,4,{precision},{network},8\n"


def row(tmp_path: Path, **words: str) -> StepRow:
    """One row of a file that says only what it must."""
    given = {"gpu": "A100-SXM", "framework": "Megatron-LM", "precision": "bf16", "network": ""} | words
    path = tmp_path / "rows.csv"
    path.write_text(HEADER + ROW.format(**given), encoding="utf-8")
    return read_steps(path)[0]


def test_ranks_share_ties() -> None:
    """Guards Spearman: equal values share the mean of their ranks."""
    assert ranks([3.0, 1.0, 3.0]) == [2.5, 1.0, 2.5]


def test_correlations_know_both_ends() -> None:
    """Guards signs and the undefined case."""
    assert spearman([1, 2, 3], [2, 4, 9]) == pytest.approx(1.0)
    assert kendall([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert math.isnan(spearman([1, 1], [1, 2]))


@pytest.mark.parametrize(
    ("words", "gb_per_s"),
    [
        ("800 Gbps/node IB", 100.0),
        ("NDR 400 Gb/s per GPU InfiniBand", 400.0),
        ("8x HDR 200Gb/s IB per node", 200.0),
        ("Omni-Path 100Gb x4/node", 50.0),
        ("not stated", None),
    ],
)
def test_line_rates_are_read_from_words(tmp_path: Path, words: str, gb_per_s: float | None) -> None:
    """Guards the network of a row: rates per node, per GPU and per link."""
    assert node_gb_per_s(row(tmp_path, network=words)) == gb_per_s


@pytest.mark.parametrize(
    ("words", "why"),
    [({"gpu": "Abacus 9"}, "no machine profile"), ({"precision": "fp8"}, "not modelled")],
)
def test_rows_out_of_scope_say_why(tmp_path: Path, words: dict[str, str], why: str) -> None:
    """Guards honesty: what cannot be predicted is refused in words, never guessed."""
    refused = case_of(row(tmp_path, **words))
    assert isinstance(refused, str)
    assert why in refused


def test_what_does_not_fit_is_not_timed(tmp_path: Path) -> None:
    """Guards out-of-memory rows: 1T parameters on 8 GPUs have no step time."""
    path = tmp_path / "rows.csv"
    path.write_text(HEADER + "r1,A100-SXM,8,Megatron-LM,128,25600,160,102400,51200,2048,64,1,8,1,1,bf16,,8\n", "utf-8")
    predicted = predict_steps(read_steps(path))[0]
    assert predicted.predicted_s is None
    assert predicted.why_not.startswith("does not fit")


def test_shipped_rows_name_a_known_source() -> None:
    """Guards provenance: every shipped row's source has an address."""
    import csv

    with (SHIPPED / "sources.csv").open(encoding="utf-8", newline="") as file:
        known = {record["source"] for record in csv.DictReader(file)}
    for path in (SHIPPED / "steps.csv", *(PUBLISHED / f"{name}.csv" for name in ("collectives", "gemm", "memory"))):
        with path.open(encoding="utf-8", newline="") as file:
            assert {record["source"] for record in csv.DictReader(file)} <= known
