"""Rows of published steps: what is known to be wrong in them, and how their vocabulary is cut."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.frameworks.megatron_core import MEGATRON_CORE
from axonn_tune.program.dimensions import table_rows
from axonn_tune.program.size import PLAIN
from axonn_tune.report.accuracy import steps_text
from axonn_tune.validation.published.accuracy import predict_steps, summarize_steps
from axonn_tune.validation.published.rows import Case, StepRow, case_of, read_steps

HEADER = "id,dataset,gpu,n_gpus,framework,layers,hidden,heads,ffn,vocab,seq,gbs,mbs,tp,recompute,precision"
VALUES = "one,{dataset},A100-SXM,8,Megatron-DeepSpeed,24,2048,16,8192,51200,1024,64,4,{tensor},full,fp16"


def read(tmp_path: Path, *, more: dict[str, str] | None = None, dataset: str = "own", tensor: int = 1) -> StepRow:
    """A row of a file with some more columns."""
    names, values = list(more or {}), list((more or {}).values())
    lines = [",".join([HEADER, *names]), ",".join([VALUES.format(dataset=dataset, tensor=tensor), *values])]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_steps(path)[0]


def test_known_errata_belong_to_their_data_set(tmp_path: Path) -> None:
    """Guards rows of others: only vTrain's are known not to recompute, and to have 50,257 words."""
    own, known = read(tmp_path), read(tmp_path, dataset="vtrain_single")
    assert (own.recompute, own.vocab, own.vocabulary_multiple) == ("full", 51200, None)
    assert (known.recompute, known.vocab, known.vocabulary_multiple) == ("none", 50257, 0)


@pytest.mark.parametrize("wrong", ["-1", "1.5"])
def test_a_wrong_multiple_is_named(tmp_path: Path, wrong: str) -> None:
    """Guards the column: the file, the line and the value."""
    with pytest.raises(DocumentError, match=f"vocab_multiple is '{wrong}'"):
        read(tmp_path, more={"vocab_multiple": wrong})


@pytest.mark.parametrize(
    ("multiple", "tensor", "rows"), [(128, 1, 50304), (128, 8, 51200), (0, 1, 50257), (0, 2, 50256)]
)
def test_tables_are_padded_or_cut(tmp_path: Path, multiple: int, tensor: int, rows: int) -> None:
    """Guards the head: Megatron-LM's padding, and rows cut without any."""
    row = read(tmp_path, more={"vocab_multiple": str(multiple)}, tensor=tensor)
    case = case_of(replace(row, vocab=50257))
    assert isinstance(case, Case)
    cut, padded = (
        table_rows(case.model, float(tensor), 1.0, options=framework.step, arithmetic=PLAIN)
        for framework in (case.framework, MEGATRON_CORE)
    )
    assert cut == rows
    assert float(padded) % (128 * tensor) == 0


def test_an_odd_table_makes_a_slow_head(tmp_path: Path) -> None:
    """Guards what a vocabulary costs that is not padded: products at odd addresses run without matrix units."""
    padded, odd = (
        replace(read(tmp_path, more={"vocab_multiple": multiple}), vocab=50257, layers=4) for multiple in ("128", "0")
    )
    first, second = (one.predicted_s or 0.0 for one in predict_steps([padded, odd]))
    assert second > 1.1 * first


@pytest.mark.parametrize("wrong", ["0", "-5"])
def test_a_time_that_is_none_is_named(tmp_path: Path, wrong: str) -> None:
    """Guards errors of rows: a step of no time would count as off by all of it."""
    with pytest.raises(DocumentError, match=f"step_s is '{wrong}'"):
        read(tmp_path, more={"step_s": wrong})


def test_rows_without_a_time_are_listed_with_their_prediction(tmp_path: Path) -> None:
    """Guards the question most users have: what will mine take, priced as what, and how wrong may that be."""
    row = replace(read(tmp_path), framework="SomethingNew")
    said = steps_text(summarize_steps(predict_steps([row])), {})
    assert "nan" not in said
    assert "rows without a time" in said
    assert re.search(r"SomethingNew +unknown .* - +[\d.]+ +[\d.]+ to [\d.]+", said)
    assert "unknown framework, priced as the mean of all known ones: SomethingNew" in said


def test_unknown_formats_and_accelerators_say_what_is_known(tmp_path: Path) -> None:
    """Guards refusals: nothing is guessed from words that mean nothing."""
    row = read(tmp_path)
    wrong = [replace(row, precision="bf99"), replace(row, gpu="RTX4090")]
    reasons = [one.why_not for one in predict_steps(wrong)]
    assert "bf16, fp16, fp32 and fp64" in reasons[0]
    assert "H100" in reasons[1]
