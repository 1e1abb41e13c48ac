"""Files that are no documents, or made to do harm: refused in a line, at once, without what is in them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from axonn_tune.errors import AxonnTuneError, DocumentError, UsageError, count_in
from axonn_tune.files import read_regular
from axonn_tune.specs.loading import DOCUMENT_BYTES, load_document
from axonn_tune.specs.model import Model
from axonn_tune.specs.points import read_points
from tests.cli.running import run

DERIVED = "schema: axonn-tune/model/1\nname: mine\nsource: mine\nextends: "


def error_of(path: Path) -> str:
    """What loading a model says."""
    with pytest.raises(AxonnTuneError) as caught:
        load_document(path, schema=Model)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    """Guards against reading without end, or waiting for who never writes; also through extends."""
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (Path("/dev/zero"), tmp_path / "pipe.yaml"):
        assert error_of(path) == f"{str(path)!r} is a device or a pipe, not a file"
        (tmp_path / "mine.yaml").write_text(DERIVED + str(path))
        assert error_of(tmp_path / "mine.yaml").endswith("is a device or a pipe, not a file")
    with pytest.raises(UsageError, match="a device or a pipe"):
        read_points(tmp_path / "pipe.yaml")


def test_large_files_are_refused_unread(tmp_path: Path) -> None:
    """Guards against minutes of parsing, for a document and for what it extends; a file of the limit is read."""
    (tmp_path / "large.yaml").write_text("a:\n" + "- 1\n" * (DOCUMENT_BYTES // 4))
    (tmp_path / "mine.yaml").write_text(DERIVED + "large.yaml")
    assert "has more than the 2 MiB that such a file may have" in error_of(tmp_path / "large.yaml")
    assert "extends: " in error_of(tmp_path / "mine.yaml")
    assert len(read_regular(tmp_path / "large.yaml", limit_bytes=DOCUMENT_BYTES + 3)) == DOCUMENT_BYTES + 3


def test_what_is_extended_and_no_document_is_not_shown(tmp_path: Path) -> None:
    """Guards files that only who runs the tool may read: keys, values and syntax errors of theirs stay there."""
    for number, secret in enumerate(["password: hunter2\n", "root:hunter2:1:::\n", "[hunter2", "hunter2: {a: hunter2"]):
        (tmp_path / f"secret{number}").write_text(secret)
        (tmp_path / "mine.yaml").write_text(f"{DERIVED}{tmp_path}/secret{number}")
        said = error_of(tmp_path / "mine.yaml")
        assert "is no model document: it lacks `schema: axonn-tune/model/1`" in said
        assert "hunter2" not in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("layers: 1" + "0" * 30, "layers: must be less than or equal to 2147483647, not 10"),
        ("head_dim: 2147483648", "head_dim: must be less than or equal to 2147483647"),
        ('description: "\\e[31mred"', r"description: holds the control character '\\x1b'"),
        ('description: "a\\0b"', r"description: holds the control character '\\x00'"),
        ('"\\e[31m": 1', r"a key holds the control character '\\x1b'"),
        ("? {? {? {? [" * 2000, "nested more than 40 deep"),
    ],
)
def test_values_that_no_document_has(line: str, said: str, tmp_path: Path) -> None:
    """Guards arithmetic, terminals and paths against what a text can hold."""
    (tmp_path / "mine.yaml").write_text(f"{DERIVED}nano\n{line}\n")
    assert said.replace("\\\\", "\\") in error_of(tmp_path / "mine.yaml")


def test_names_that_no_file_can_have_are_unknown_names(tmp_path: Path) -> None:
    """Guards exit code 2: such a name is the user's mistake and not the disk's."""
    for name in ("x" * 300, "x" * 300 + ".yaml", "~nobody-of-this-name/x.yaml"):
        assert run("--gpus 8 --model", [name]).code == 2
    for extended in ("x" * 300, '"a\\0b"'):
        (tmp_path / "mine.yaml").write_text(DERIVED + extended)
        assert "extends" in error_of(tmp_path / "mine.yaml")


def test_problems_are_listed_up_to_a_number(tmp_path: Path) -> None:
    """Guards against minutes of looking for the nearest keys."""
    (tmp_path / "mine.yaml").write_text(DERIVED + "nano\n" + "".join(f"k{number}: 1\n" for number in range(5000)))
    with pytest.raises(DocumentError) as caught:
        load_document(tmp_path / "mine.yaml", schema=Model)
    assert len(caught.value.problems) < 250
    assert "4,800 more problems are not listed" in str(caught.value)


@pytest.mark.parametrize("text", ["x", "", "-1", "1.5", "²", "1" * 30])
def test_variables_are_whole_numbers(text: str) -> None:
    """Guards what launchers set, or someone else."""
    with pytest.raises(UsageError, match="the variable RANK is"):
        count_in({"RANK": text}, "RANK")
    assert count_in({}, "RANK", "7") == 7
