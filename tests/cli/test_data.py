"""`axonn-tune data`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from axonn_tune.runtime.tokens import open_tokens
from tests.cli.running import good, run


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder of texts, with files that do not count."""
    folder = tmp_path / "texts"
    for name, content in {
        "b.txt": "two",
        "a.py": "one",
        "deep/c.md": "né",
        "image.png": "no",
        ".hidden/d.txt": "no",
        "site-packages/e.py": "no",
        "__pycache__/f.py": "no",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")
    return folder


def ids_of(path: Path) -> list[int]:
    """All ids of a token file."""
    return [int(one) for one in open_tokens(path).ids]


def test_bytes_of_a_folder(texts: Path, tmp_path: Path) -> None:
    """Guards order, marks after each file, what is left out, and what is printed."""
    out = tmp_path / "tokens.bin"
    finished = good(f"data {texts} -o {out} --vocab 257")
    assert ids_of(out) == [*b"one", 256, *b"two", 256, *"né".encode(), 256]
    assert finished.out == f"wrote {out}: 12 tokens from 0.0 MB of text, vocabulary 257 (bytes)\n"
    assert finished.err == ""


def test_files_given_count_whatever_their_name(texts: Path, tmp_path: Path) -> None:
    """Guards --include, files named outright, and that none is read twice."""
    good(f"data {texts / 'image.png'} {texts} {texts / 'b.txt'} --include *.txt -o {tmp_path / 't.bin'}")
    assert ids_of(tmp_path / "t.bin") == [*b"no", 256, *b"two", 256]


@dataclass
class Words:
    """What is used of a tokenizer of the library `tokenizers`; an id is the length of a word."""

    def encode(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        """As the library's."""
        assert not add_special_tokens
        return SimpleNamespace(ids=[len(word) for word in text.split()])

    def token_to_id(self, word: str) -> int | None:
        """As the library's."""
        return 9 if word == "</s>" else None

    def get_vocab(self, *, with_added_tokens: bool) -> dict[str, int]:
        """As the library's."""
        return {"a": 0, "</s>": 9}


def library(model: Any) -> SimpleNamespace:
    """A stand-in for the library: any file gives `model`, `torn.json` fails."""

    def from_file(path: str) -> Any:
        if path.endswith("torn.json"):
            raise Exception("EOF while parsing")
        return model

    return SimpleNamespace(Tokenizer=SimpleNamespace(from_file=from_file))


def test_hugging_face_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards whole lines across chunks, text that is no UTF-8, the end mark, and errors of the file."""
    monkeypatch.setitem(sys.modules, "tokenizers", library(Words()))
    for name in ("tokenizer.json", "torn.json"):
        (tmp_path / name).touch()
    text = tmp_path / "text.txt"
    text.write_bytes(b"ab \xff\n" + 200_000 * "née née\n".encode())
    good(f"data {text} -o {tmp_path / 't.bin'} --tokenizer {tmp_path / 'tokenizer.json'}")
    opened = open_tokens(tmp_path / "t.bin")
    assert opened.header.tokenizer == "tokenizer.json"
    assert np.array_equal(opened.ids, [2, 1, *(400_000 * [3]), 9])
    finished = run(f"data {text} -o {tmp_path / 't.bin'} --tokenizer {tmp_path / 'torn.json'}")
    assert finished.code == 2
    assert "EOF while parsing" in finished.err


def test_hugging_face_tokenizer_without_its_library(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the hint to the library to install."""
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").touch()
    finished = run(f"data {texts} -o {tmp_path / 't.bin'} --tokenizer {tmp_path / 'tokenizer.json'}")
    assert finished.code == 5
    assert "pip install tokenizers" in finished.err


def test_torch_is_not_needed(texts: Path, tmp_path: Path) -> None:
    """Guards that tokenizing works where only the tuner is installed."""
    code = (
        "import sys; sys.modules['torch'] = None; from axonn_tune.cli.main import main; "
        f"sys.exit(main(['data', '--python-stdlib', '--include', 'this.py', '-o', {str(tmp_path / 't.bin')!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "MB of text" in done.stdout
