"""Loading: every problem of a document at once, each with its line, path and remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError, UsageError
from axonn_tune.specs.loading import load_document, parse_document
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import MIXERS, Model

MACHINE = Path(__file__).parent / "data" / "twotier.yaml"
TEXT = MACHINE.read_text(encoding="utf-8")


def problems(text: str) -> list[str]:
    """What is wrong with a machine's text, as printed."""
    with pytest.raises(DocumentError) as caught:
        parse_document(text, schema=Machine, source="m.yaml")
    return str(caught.value).splitlines()


def line_of(text: str, words: str) -> int:
    """Line of the first occurrence, from 1."""
    return text[: text.index(words)].count("\n") + 1


def test_all_problems_are_reported_at_once() -> None:
    """Guards that a user sees everything wrong in one run, with lines, paths and near misses."""
    text = TEXT.replace("memory_gib: 16", "memory_gib: on").replace("latency_us: 2", "latencyus: 2")
    text = text.replace("bf16:", "bf17:").replace('value: "1"', "value: 010").replace("kind: fact", "kind: fect", 1)
    text = text.replace("  compute: 0.1", "  compute: 1.5\n  compute: 0.1")
    found = problems(text)
    assert found == [
        f"m.yaml:{line_of(text, 'memory_gib: on')}: accelerator.memory_gib: must be a number, not 'on'",
        f"m.yaml:{line_of(text, 'bf17')}: accelerator.peak_tflops.bf17: "
        "must be 'bf16', 'fp16', 'fp32', 'fp64', 'fp8-delayed', 'fp8-current', 'fp8-rowwise', 'fp8-blockwise', "
        "'mxfp8', 'nvfp4', 'mxfp4' or 'tf32', "
        "not 'bf17', did you mean 'bf16'?",
        f"m.yaml:{line_of(text, 'fect')}: accelerator.sources.memory_gib.kind: "
        "must be 'peak', 'measured', 'fitted', 'assumed', 'placeholder' or 'fact', not 'fect', did you mean 'fact'?",
        f"m.yaml:{line_of(text, 'latencyus')}: tiers.link.latencyus: "
        "unknown key 'latencyus', did you mean 'latency_us'?",
        f"m.yaml:{line_of(text, 'compute: 1.5')}: uncertainty.compute: must be less than or equal to 1, not 1.5",
        f"m.yaml:{line_of(text, 'compute: 0.1')}: uncertainty.compute: "
        f"key written twice, first in line {line_of(text, 'compute: 1.5')}",
        f"m.yaml:{line_of(text, 'value: 010')}: launcher.environment.OMP_NUM_THREADS.value: "
        "must be text, not 10 (put it in quotes)",
    ]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("bandwidth_gbit_per_s", "That is gigabytes a second: divide Gbit by 8"),
        ("bandwidth_mbit_per_s", "That is gigabytes a second: divide Mbit by 8000"),
        ("bandwidth_Gbps", "That is gigabytes a second: divide Gbit by 8"),
    ],
)
def test_a_key_in_bits_is_told_to_convert(key: str, words: str) -> None:
    """Guards against a hint that makes a network 8 times too fast."""
    (found,) = problems(TEXT.replace("bandwidth_gb_per_s: 12.5", f"{key}: 100"))
    assert found.endswith(f"unknown key {key!r}, did you mean 'bandwidth_gb_per_s'? {words}")


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("schema: axonn-tune/model/1", "this is a model document .* where a machine document"),
        ("schema: axonn-tune/machine/2", "newer than the axonn-tune/machine/1"),
        ("schema: axonn-tune/machine/0", "older than the axonn-tune/machine/1"),
        ("schema: machine", "'machine' is no schema; write axonn-tune/machine/1"),
        ("schema:", "None is no schema"),
    ],
)
def test_another_kind_or_version_is_explained(header: str, words: str) -> None:
    """Guards against dozens of unknown keys when the file is simply of another kind."""
    with pytest.raises(DocumentError, match=words) as caught:
        parse_document(TEXT.replace("schema: axonn-tune/machine/1", header), schema=Machine)
    assert [problem.path for problem in caught.value.problems] == ["schema"]


@pytest.mark.parametrize("value", ["1e400", ".nan", "-.inf", "1" + "0" * 400])
def test_numbers_that_are_none_are_refused(value: str) -> None:
    """Guards every formula against infinity: floats must be finite."""
    (found,) = problems(TEXT.replace("memory_gib: 16", f"memory_gib: {value}"))
    assert "accelerator.memory_gib" in found


def test_items_of_lists_have_names_of_their_own_and_problems_of_their_own() -> None:
    """Guards --set, which could not address a second item of a name; a broken item is not also one too few."""
    (twice,) = problems(TEXT.replace("name: network-1.0", "name: link"))
    assert twice.endswith("tiers.1: the name 'link' is taken by an earlier item of this list")
    found = problems(TEXT.replace("protocols:", "protocols: [{name: simple}]\n  others:", 1))
    assert not any("items" in one for one in found), found


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    """Guards the commonest slip, a misspelt file name: the nearest is named with its folder, as the user has to."""
    (tmp_path / "machine.yaml").write_text(TEXT, encoding="utf-8")
    for name in ("machin.yaml", "machine"):
        with pytest.raises(UsageError, match=rf"did you mean '{tmp_path}/machine\.yaml'"):
            load_document(tmp_path / name, schema=Machine)
    with pytest.raises(UsageError, match="there is no folder"):
        load_document(tmp_path / "nowhere" / "machine.yaml", schema=Machine)


def test_what_is_no_text_file_is_explained(tmp_path: Path) -> None:
    """Guards folders and binary files, which would end in a traceback."""
    with pytest.raises(UsageError, match="is a folder"):
        load_document(tmp_path, schema=Machine)
    (tmp_path / "latin.yaml").write_bytes(b"# one\nname: caf\xe9\n")
    with pytest.raises(DocumentError, match=r"latin\.yaml:2: not UTF-8"):
        load_document(tmp_path / "latin.yaml", schema=Machine)


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    """Guards files that were edited on Windows."""
    path = tmp_path / "m.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.replace("\n", "\r\n").encode())
    assert load_document(path, schema=Machine) == load_document(MACHINE, schema=Machine)


@pytest.mark.parametrize(
    "place", ["axonn_tune.specs.points.Plan", "axonn_tune.specs.points.Setting", "axonn_tune.specs.launch.Launch"]
)
def test_documents_of_a_process_of_its_own_know_the_sections_of_layer_types(place: str) -> None:
    """Guards ranks: a process that has loaded no layer type reads documents that hold models in others."""
    Model.prepare()
    module, _, name = place.rpartition(".")
    line = f"from {module} import {name} as one; one.prepare(); print(one.model_json_schema())"
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert len(MIXERS) > 3
    assert all(repr(section) in done.stdout for section in MIXERS)
