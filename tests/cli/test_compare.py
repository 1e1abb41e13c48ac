"""`axonn-tune compare`, as a user runs it."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

from axonn_tune import __version__
from axonn_tune.cli.main import main

H100 = ("--machine", "dgx-h100")
SMALL = ("compare", "--gpus", "64", "--model", "5b", "--batch", "256")
CONTENDERS = [
    "4d",
    "hsdp",
    "fsdp",
    "torchtitan",
    "deepspeed",
    "megatron-lm",
    "megatron-axonn",
    "axonn",
    "data-parallel",
]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Standard output of a run that succeeds."""
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_the_papers_case_prints_the_papers_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the main use: prediction and measurement side by side, whatever comes out."""
    output = run(capsys, "compare", "--gpus", "1024", "--model", "80b")
    names = ("4D", "Megatron-Core", "DeepSpeed", "torchtitan", "FSDP (ZeRO-3)", "HSDP", "data parallel")
    for name in (*names, "Megatron-AxoNN", "AxoNN (easy API)", "Megatron-LM (2022)"):
        assert any(line.startswith(name) for line in output.splitlines())
    said = " ".join(output.split())
    gains = r"4D in the bundled runtime trains [\d.]+% faster than Megatron-LM \(2022\) and [\d.]+% (faster|slower)"
    assert re.search(gains, said)
    assert "is not stated where we could read it" in said
    assert "26% over Megatron-LM" in said
    assert "57% of peak, 182 PFLOP/s" in said
    assert "--recompute full" in said
    assert "Overlap: " in said


def test_20b_prints_the_papers_gain_of_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the second claim, which is about overlap."""
    said = " ".join(run(capsys, "compare", "--gpus", "256", "--model", "20b").split())
    assert "nearly 53% from overlap" in said


def test_json_holds_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the schema: contenders by step, parts that add up, inputs with their hashes."""
    found = json.loads(run(capsys, *SMALL, "--format", "json"))
    assert found["schema"] == "axonn-tune/comparison/1"
    assert [each["key"] for each in found["contenders"]] == CONTENDERS
    assert found["tool_version"] == __version__
    for kind, key in (("machine", "tiers"), ("model", "hidden")):
        assert len(found[kind]["sha256"]) == 64
        assert found[kind][key]
    best = found["contenders"][0]["prediction"]
    parts = best["compute_s"] + best["exposed_communication_s"] + best["bubble_s"]
    assert best["iteration_s"] == pytest.approx(parts)
    assert sum(part["seconds"] for part in best["traffic"]) == pytest.approx(best["communication_s"])
    assert best["low_s"] < best["iteration_s"] < best["high_s"]
    assert 0 < best["mfu"] <= best["hfu"] < 1


def test_what_separates_them_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the words: savings first, then costs, largest first, in the framework's names, summing to the difference;
    pipeline stages included."""
    found = json.loads(run(capsys, "compare", "--gpus", "64", "--model", "llama3-70b", *H100, "--format", "json"))
    first, *others = [each for each in found["contenders"] if each["feasible"]]
    assert first["separated_by"] == []
    assert any(each["prediction"]["pipeline"] > 1 for each in (first, *others))
    for each in others:
        parts = [part["share"] for part in each["separated_by"] if part["what"] != "the rest"]
        longer = each["relative_step"] - 1.0
        assert sum(part["share"] for part in each["separated_by"]) == pytest.approx(longer, abs=6e-4), each["key"]
        assert abs(longer - sum(parts)) < 0.02, "what is not named is little"
        savings, costs = [part for part in parts if part < 0], [part for part in parts if part > 0]
        assert parts == [*sorted(savings), *sorted(costs, reverse=True)]
    core = next(each for each in found["contenders"] if each["key"] == "megatron-lm")
    assert set(core["prediction"]["sizes"]) == {"TP", "GTP", "PP", "VPP", "CP", "DP"}


def test_the_step_asked_for_is_the_frameworks(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards --set step.KEY: it holds for the framework named, with ideal kernels and with its own software."""
    line = (*SMALL, "--framework", "megatron-2022", "--format", "json")
    then, changed = (
        {each["key"]: each["prediction"] for each in json.loads(run(capsys, *line, *more))["contenders"]}
        for more in ((), ("--set", "step.fused_attention=true"))
    )
    for key in ("iteration_s", "own_software_s"):
        assert changed["megatron-2022"][key] < then["megatron-2022"][key]
        assert changed["megatron-lm"][key] == then["megatron-lm"][key]


@pytest.mark.parametrize("case", [("1024", "80b"), ("512", "40b"), ("64", "5b")])
def test_the_table_fits_100_columns(case: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Guards terminals: at most nine columns and 100 characters; the rest with --wide, as standard error says."""
    gpus, model = case
    assert main(["compare", "--gpus", gpus, "--model", model]) == 0
    narrow = capsys.readouterr()
    table = narrow.out.partition("\n\n")[0].splitlines()
    assert max(map(len, table)) <= 100
    assert "--wide adds" in narrow.err
    assert main(["compare", "--gpus", gpus, "--model", model, "--wide"]) == 0
    wide = capsys.readouterr()
    assert "recompute" in wide.out.splitlines()[2]
    assert wide.err == ""
    assert len(wide.out.partition("\n\n")[0].splitlines()) == len(table)


def test_there_is_nothing_to_rank_by(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against an option without effect: 4D is compared at its fastest step."""
    assert main([*SMALL, "--rank-by", "exposed"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_a_pinned_size_is_why_others_are_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the reason of contenders that the request itself rules out."""
    output = run(capsys, *SMALL, "--framework", "fsdp", "--z", "16")
    assert "FSDP (ZeRO-3): infeasible, asked for shard = 16, not 64." in output
    assert "data parallel: infeasible, asked for shard = 16, not 1." in output


def test_csv_has_one_line_per_contender(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the table for other programs, infeasible ones included."""
    rows = list(csv.DictReader(io.StringIO(run(capsys, *SMALL, "--format", "csv"))))
    assert [row["key"] for row in rows] == CONTENDERS
    assert all(bool(row["iteration_s"]) != bool(row["infeasible"]) for row in rows)


def test_markdown_is_a_table_and_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the form for reports."""
    lines = run(capsys, *SMALL, "--format", "md").splitlines()
    assert "× perlmutter (A100-SXM4-40GB)" in lines[0]
    assert lines[3].startswith("| :--- |")
    assert len([line for line in lines if line.startswith("| ")]) == 2 + len(CONTENDERS)
    assert any(line.startswith("- Overlap: ") for line in lines)


def test_nothing_feasible_ends_in_3(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the exit code, and that the reason is told."""
    assert main(["compare", "--gpus", "4", "--model", "80b"]) == 3
    assert "Megatron-Core: needs 322.9 GiB of 35.4 GiB" in capsys.readouterr().err


@pytest.mark.parametrize("missing", [["--gpus", "8"], ["--model", "5b"]])
def test_missing_inputs_end_in_2(missing: list[str]) -> None:
    """Guards usage errors."""
    assert main(["compare", *missing]) == 2
