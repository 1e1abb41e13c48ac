"""Rows of published steps: what is known to be wrong in them, and how their vocabulary is cut."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.report.accuracy import accuracy_text
from axonn_tune.specs.catalog import load_machine
from axonn_tune.validation.published.accuracy import Accuracy, StepSummary, predict_steps
from axonn_tune.validation.published.cases import Case, case_of, differences, framework_of, node_gb_per_s
from axonn_tune.validation.published.rows import SHIPPED, Place, StepRow, read_records, read_steps
from axonn_tune.validation.quality import kendall, ranks, spearman

HEADER = "id,dataset,gpu,n_gpus,framework,layers,hidden,heads,ffn,vocab,seq,gbs,mbs,tp,recompute,precision"
VALUES = "one,{dataset},A100-SXM,8,Megatron-DeepSpeed,24,2048,16,8192,51200,1024,64,4,{tensor},full,fp16"


def read(tmp_path: Path, *, more: dict[str, str] | None = None, dataset: str = "own", tensor: int = 1) -> StepRow:
    """A row of a file with some more columns, or other values in those it has."""
    known = zip(HEADER.split(","), VALUES.format(dataset=dataset, tensor=tensor).split(","), strict=True)
    row = dict(known) | (more or {})
    lines = [",".join(row), ",".join(row.values())]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return read_steps(path)[0]


def test_known_errata_belong_to_their_data_set(tmp_path: Path) -> None:
    """Guards rows of others: only vTrain's are known not to recompute, and to have 50,257 words."""
    own, known = read(tmp_path), read(tmp_path, dataset="vtrain_single")
    assert (own.recomputes, own.vocab, own.vocabulary_multiple) == ((("full", None),), 51200, None)
    assert (known.recomputes, known.vocab, known.vocabulary_multiple) == ((("none", None),), 50257, 0)


@pytest.mark.parametrize("wrong", ["-1", "1.5"])
def test_a_wrong_multiple_is_named(tmp_path: Path, wrong: str) -> None:
    """Guards the column: the file, the line and the value."""
    with pytest.raises(DocumentError, match=f"vocab_multiple is '{wrong}'"):
        read(tmp_path, more={"vocab_multiple": wrong})


@pytest.mark.parametrize("wrong", ["0", "-5"])
def test_a_time_that_is_none_is_named(tmp_path: Path, wrong: str) -> None:
    """Guards errors of rows: a step of no time would count as off by all of it."""
    with pytest.raises(DocumentError, match=f"step_s is '{wrong}'"):
        read(tmp_path, more={"step_s": wrong})


def test_rows_without_a_time_are_listed_with_their_prediction(tmp_path: Path) -> None:
    """Guards the question most users have: what will mine take, priced as what, and how wrong may that be."""
    row = replace(read(tmp_path), framework="SomethingNew")
    said = accuracy_text(Accuracy(Path("steps.csv"), StepSummary(predict_steps([row]))))
    assert "nan" not in said
    assert "rows without a time" in said
    assert re.search(r"SomethingNew +unknown .* - +[\d.]+ +[\d.]+ to [\d.]+", said)
    assert "unknown framework, priced as the mean of all known ones: SomethingNew" in said


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("recompute", "ful", "recompute is 'ful', did you mean 'full'?"),
        ("recompute", "maybe", "recompute is 'maybe'; known: none, selective, full"),
        ("precision", "bf61", "precision is 'bf61', did you mean 'bf16'?"),
        ("seq_parallel", "ture", "seq_parallel is 'ture', did you mean 'true'?"),
        ("gated_mlp", "2", "gated_mlp is '2'; known: 1, true, yes, 0, false, no"),
        ("zero_stage", "ZeRO-3", "zero_stage is 'ZeRO-3', did you mean '3'?"),
        ("zero_stage", "shraded", "zero_stage is 'shraded', did you mean 'sharded'?"),
    ],
)
def test_words_that_mean_nothing_are_refused(tmp_path: Path, column: str, value: str, message: str) -> None:
    """Guards cells with few possible words: one that was passed over would price another layout than was measured."""
    with pytest.raises(DocumentError, match=re.escape(f"rows.csv:2: one: {message}")):
        read(tmp_path, more={"seq_parallel": "0", "gated_mlp": "0", "zero_stage": "0", column: value})


def test_silent_cells_are_open(tmp_path: Path) -> None:
    """Guards `unknown`: what a row does not say is taken as of an empty cell."""
    silent, empty = (read(tmp_path, more={"precision": word, "recompute": word}) for word in ("unknown", ""))
    first, second = predict_steps([silent, empty])
    assert first.open_words == "recompute"
    assert first.choices_s
    assert first.choices_s == second.choices_s


def test_every_wrong_column_is_named(tmp_path: Path) -> None:
    """Guards headings: unknown, misspelt, missing and doubled columns, all at once."""
    path = tmp_path / "rows.csv"
    names = HEADER.replace(",gpu,", ",gbu,")
    path.write_text(f"{names},tp,zero_stagee,kapow\n", "utf-8")
    with pytest.raises(DocumentError) as caught:
        read_steps(path)
    messages = [problem.message for problem in caught.value.problems]
    assert messages[:4] == [
        "no column 'gpu'",
        "column 'tp' is there 2 times",
        "unknown column 'gbu', did you mean 'gpu'?",
        "unknown column 'zero_stagee', did you mean 'zero_stage'?",
    ]
    assert messages[4].startswith("unknown column 'kapow'; known: id, gpu, ")
    assert {problem.line for problem in caught.value.problems} == {1}


@pytest.mark.parametrize(
    ("gpu", "per_node", "machine", "expected"),
    [
        ("A100-SXM", "4", "perlmutter", []),
        ("", "", "perlmutter", []),
        ("a cpu core", "", "localhost", ["gpu is 'a cpu core', the accelerator of localhost is 'one CPU core'"]),
        ("CPU", "", "localhost", []),
        ("B200", "72", "gb200-nvl72", ["gpu is 'B200', the accelerator of gb200-nvl72 is 'GB200-186GB'"]),
        ("GB200", "72", "gb200-nvl72", []),
        ("GB200", "4", "gb200-nvl72", []),
        (
            "H100",
            "8",
            "perlmutter",
            [
                "gpu is 'H100', the accelerator of perlmutter is 'A100-SXM4-40GB'",
                "8 GPUs a node are stated, but perlmutter is priced with its 4",
            ],
        ),
    ],
)
def test_what_a_row_says_against_a_profile(
    tmp_path: Path, gpu: str, per_node: str, machine: str, expected: list[str]
) -> None:
    """Guards warnings: another accelerator or node, and none for names that mean the same or say nothing."""
    row = replace(read(tmp_path, more={"gpus_per_node": per_node}), gpu=gpu)
    assert list(differences(row, load_machine(machine).document, framework_of(row))) == expected


@pytest.mark.parametrize(
    ("machine", "attention", "framework", "said"),
    [
        ("dgx1-v100", "FlashAttention", "megatron", "V100-SXM2-32GB, where FlashAttention and cuDNN's"),
        ("dgx1-v100", "unfused", "megatron", ""),
        ("dgx1-v100", "FlashAttention", "torchtitan", ""),
        ("dgx-a100", "FlashAttention", "megatron", ""),
    ],
)
def test_attention_that_an_accelerator_lacks_is_reported(
    tmp_path: Path, machine: str, attention: str, framework: str, said: str
) -> None:
    """Guards a stated kernel that is priced as another one: before Ampere Megatron writes all scores."""
    row = replace(read(tmp_path), gpu="", attention=attention, framework=framework)
    found = "".join(differences(row, load_machine(machine).document, framework_of(row)))
    assert (f"attention is {attention!r}" in found, said in found) == (bool(said), True)


def test_a_profile_is_taken_as_it_is(tmp_path: Path) -> None:
    """Guards --machine: nothing that a row says of memory, node or network changes the profile or its price."""
    said = {"gpus_per_node": "4", "gpu_mem_gb": "40", "network": "8x HDR 200Gb/s", "system": "Frontier"}
    plain, worded = read(tmp_path), read(tmp_path, more=said)
    machine = load_machine("dgx-h100").document
    case = case_of(worded, machine=machine)
    assert isinstance(case, Case)
    assert case.machine is machine
    first, second = predict_steps([plain, worded], machine=machine)
    assert first.predicted_s == second.predicted_s
    assert first.predicted_s != predict_steps([plain])[0].predicted_s
    assert [bool(one.warnings) for one in (first, second)] == [True, True]


def test_an_accelerator_without_a_fit_has_a_wider_interval(tmp_path: Path) -> None:
    """Guards --machine: doubt is that of the profile's accelerator, not of the one that a row names."""
    known, other = (
        predict_steps([read(tmp_path)], machine=load_machine(name).document)[0] for name in ("dgx-a100", "frontier")
    )
    assert other.high_s / other.low_s > known.high_s / known.low_s  # type: ignore[operator]


def test_a_number_format_without_a_peak_says_so(tmp_path: Path) -> None:
    """Guards --machine with a profile that states few formats: a row says why it is not predicted, others are."""
    profile = load_machine("dgx-h100").document
    chip = profile.accelerator.model_copy(update={"peak_tflops": {"bf16": 900.0}})
    machine = profile.model_copy(update={"accelerator": chip})
    rows = [read(tmp_path), replace(read(tmp_path), precision="bf16")]
    first, second = predict_steps(rows, machine=machine)
    assert str(first.why_not).startswith("precision: H100-SXM5-80GB has no fp16; it has ")
    assert second.predicted_s is not None


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
def test_line_rates_are_read_from_words(words: str, gb_per_s: float | None) -> None:
    """Guards the network of a row: rates per node, per GPU and per link."""
    assert node_gb_per_s(Place("A100", network=words, gpus_per_node=8)) == gb_per_s


def test_rows_that_cannot_be_predicted_say_why(tmp_path: Path) -> None:
    """Guards honesty: what is out of scope, or does not fit into memory, has no time but a reason."""
    large = {"layers": "128", "hidden": "25600", "heads": "160", "ffn": "102400", "tp": "8", "recompute": "none"}
    for more, why in (
        ({"gpu": "Abacus 9"}, "no machine profile has the accelerator 'Abacus 9': known are A100"),
        ({"precision": "int8"}, "number format 'int8' is not modelled: bf16, fp16, "),
        ({"precision": "fp8"}, "precision: A100-SXM4-80GB has no fp8-delayed; it has "),
        (large, "does not fit: needs "),
    ):
        (found,) = predict_steps([read(tmp_path, more=more)])
        assert found.predicted_s is None
        assert found.why_not.startswith(why)


def test_correlations_know_both_ends_and_ties() -> None:
    """Guards signs, the mean of ranks that ties share, and the undefined case."""
    assert ranks([3.0, 1.0, 3.0]) == [2.5, 1.0, 2.5]
    assert spearman([1, 2, 3], [2, 4, 9]) == pytest.approx(1.0)
    assert kendall([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert math.isnan(spearman([1, 1], [1, 2]))


def test_shipped_rows_name_a_known_source() -> None:
    """Guards provenance: every shipped row's source has an address."""
    known = {record["source"] for _, record in read_records(SHIPPED / "sources.csv", needed=("source",))}
    assert {record["source"] for _, record in read_records(SHIPPED / "steps.csv", needed=("source",))} <= known
