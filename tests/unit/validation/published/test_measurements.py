"""Memory of Megatron-LM against the figures of Korthikanti et al. 2022, arXiv 2205.05198."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError
from tools.measurements import errors_by_group, evaluate_rows, main, shipped


def test_memory_is_as_published() -> None:
    """Guards the arrays a block saves, what each recompute drops, chunks in flight, and 18 bytes a parameter."""
    found = shipped("memory")
    assert len(found) == 20
    assert all(one.error is not None and abs(one.error) <= 0.02 for one in found)
    assert errors_by_group(found)["all"].mape <= 0.01


def test_the_tool_prints_errors_and_reasons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `python -m tools.measurements`: errors of the kinds named, refused rows by reason, wrong files by name."""
    path = tmp_path / "collectives.csv"
    head = "id,system,gpu,library,collective,nranks,nodes,gpus_per_node,size_bytes,time_us\n"
    row = "c{0},a node,A100-SXM4-80GB,NCCL,{1},8,1,8,67108864,600\n"
    path.write_text(head + row.format(0, "all_reduce") + row.format(1, "alltoall"), "utf-8")
    assert main(["--collectives", str(path)]) == 0
    said = capsys.readouterr().out
    assert "collectives of 1 MiB or more" in said
    assert "not predicted: 1 rows: 'alltoall' is not used by any layout here" in said
    assert main(["--gemm", str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"h": "0"}, "h is '0', not a whole number from 1 to 2,147,483,647"),
        ({"a": ""}, "a is '', not a whole number from 1"),
        ({"l": "1" + "0" * 30}, "is not a number from"),
        ({"h": "6145"}, "h is 6145, not divisible by a, 64"),
        ({"tp": "16"}, "gpus is 8, not divisible by tp · pp, 16"),
        ({"tp": ""}, "gbs is 4, not divisible by mbs · gpus / (tp · pp), 32"),
        ({"value": "-1"}, "value is '-1', not a number above 0"),
        ({"unit": "lb"}, "unit is 'lb', neither GiB nor %"),
    ],
)
def test_rows_that_no_run_has(cells: dict[str, str], said: str, tmp_path: Path) -> None:
    """Guards rows of one's own against divisions by zero, and against a prediction of something else."""
    row = {"model": "22B", "h": "6144", "a": "64", "l": "48", "tp": "8", "pp": "1", "gpus": "8", "mbs": "4", "gbs": "4"}
    row |= {"quantity": "activation memory", "value": "59.25", "unit": "GiB"} | cells
    path = tmp_path / "memory.csv"
    path.write_text(f"{','.join(row)}\n{','.join(row.values())}\n", "utf-8")
    with pytest.raises(DocumentError) as caught:
        evaluate_rows(path, "memory")
    assert said in str(caught.value)
