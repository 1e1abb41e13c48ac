"""Rows of published steps: what is known to be wrong in them, and how their vocabulary is cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from axonn_tune.accuracy.cases import Case, case_of
from axonn_tune.accuracy.rows import StepRow, read_steps
from axonn_tune.accuracy.steps import predict_steps
from axonn_tune.baselines.layout import CURRENT
from axonn_tune.baselines.memory import rows_of_table
from axonn_tune.errors import DocumentError

HEADER = "id,dataset,gpu,n_gpus,framework,layers,hidden,heads,ffn,vocab,seq,gbs,mbs,tp,recompute,precision"
VALUES = "one,{dataset},A100-SXM,8,Megatron-DeepSpeed,24,2048,16,8192,51200,1024,64,4,{tensor},full,fp16"


def read(tmp_path: Path, *, more: dict[str, str] | None = None, dataset: str = "own", tensor: int = 1) -> StepRow:
    """A row of a file with some more columns."""
    names, values = list(more or {}), list((more or {}).values())
    lines = [",".join([HEADER, *names]), ",".join([VALUES.format(dataset=dataset, tensor=tensor), *values])]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_steps(path)[0]


def test_known_blemishes_belong_to_their_data_set(tmp_path: Path) -> None:
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
    assert rows_of_table(case.model, tensor=tensor, software=case.software) == rows
    assert rows_of_table(case.model, tensor=tensor, software=CURRENT) % (128 * tensor) == 0


def test_an_odd_table_makes_a_slow_head(tmp_path: Path) -> None:
    """Guards what a vocabulary costs that is not padded: products at odd addresses run without matrix units."""
    padded, odd = (
        replace(read(tmp_path, more={"vocab_multiple": multiple}), vocab=50257, layers=4) for multiple in ("128", "0")
    )
    first, second = (one.predicted_s or 0.0 for one in predict_steps([padded, odd]))
    assert second > 1.1 * first
