"""Finds model and machine files by name or path.

A name is looked for in each folder of `$AXONN_TUNE_PATH`, then in the user's configuration folder
(`$XDG_CONFIG_HOME/axonn-tune`, by default `~/.config/axonn-tune`), then among the shipped files.
Each of these holds `configs/` for models and `machines/` for machines. The first hit wins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Literal

from axonn_tune.errors import UnknownNameError

Kind = Literal["model", "machine"]
SUFFIXES = (".yaml", ".yml")
_FOLDERS: dict[Kind, str] = {"model": "configs", "machine": "machines"}
_PACKAGES: dict[Kind, str] = {"model": "axonn_tune.shipped_configs", "machine": "axonn_tune.shipped_machines"}
"""Names by which the folders of the repository are part of the installed package."""


def available(kind: Kind) -> dict[str, Path]:
    """Every name of this kind with the file it stands for, in natural order (5b before 10b)."""
    found: dict[str, Path] = {}
    for folder in _search_path(kind):
        for path in _documents(folder):
            found.setdefault(path.stem.lower(), path)
    return dict(sorted(found.items(), key=lambda item: _natural(item[0])))


def find(kind: Kind, name: str, *, besides: Path | None = None) -> Path:
    """The file behind a name or path; UnknownNameError with the nearest name if nothing answers to it.

    A path is anything that is a file already, ends in .yaml or .yml, or contains a slash; whether it
    can be read is the loader's business. Names ignore case. `besides` is a file to look past, so that
    a user's `perlmutter.yaml` can extend the shipped `perlmutter`.
    """
    if is_path(name):
        return Path(name).expanduser()
    for folder in _search_path(kind):
        for path in _documents(folder):
            if path.stem.lower() == name.lower() and not _same(path, besides):
                return path
    raise UnknownNameError(kind, name, available(kind))


def is_path(name: str) -> bool:
    """Whether this is to be read as a path rather than looked up as a name."""
    return name.endswith(SUFFIXES) or "/" in name or os.sep in name or Path(name).is_file()


def _search_path(kind: Kind) -> Iterator[Path]:
    for root in os.environ.get("AXONN_TUNE_PATH", "").split(os.pathsep):
        if root:
            yield Path(root).expanduser() / _FOLDERS[kind]
    configuration = os.environ.get("XDG_CONFIG_HOME")
    if configuration or os.environ.get("HOME"):
        yield Path(configuration or Path.home() / ".config") / "axonn-tune" / _FOLDERS[kind]
    yield _shipped(kind)


def is_shipped(kind: Kind, path: Path) -> bool:
    """Whether a file came with the tool."""
    return _shipped(kind).resolve() in path.resolve().parents


def _shipped(kind: Kind) -> Path:
    """Folder of the shipped files: the installed package, or its source folder in a checkout."""
    try:
        return Path(str(resources.files(_PACKAGES[kind])))
    except ModuleNotFoundError:
        return Path(__file__).resolve().parents[2] / _FOLDERS[kind]


def _documents(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return []
    return [path for path in entries if path.suffix in SUFFIXES and path.is_file()]


def _same(path: Path, other: Path | None) -> bool:
    return other is not None and path.resolve() == other.resolve()


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key: numbers by value and before words."""
    parts = [part for part in re.split(r"(\d+)", name) if part]
    return [(False, int(part), "") if part.isdigit() else (True, 0, part) for part in parts]
