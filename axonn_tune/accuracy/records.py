"""Records of a CSV file, and the numbers in their cells."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from axonn_tune.errors import DocumentError, Problem, UsageError


def read_records(path: Path, *, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Records of a CSV file with their line numbers; UsageError if it
    cannot be read, DocumentError if a needed column is missing."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in needed if name not in (reader.fieldnames or ())]
            if missing:
                raise DocumentError(str(path), [Problem("", f"no column {name!r}", 1) for name in missing])
            for record in reader:
                yield reader.line_num, {name: (value or "").strip() for name, value in record.items() if name}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def number(record: Mapping[str, str], name: str) -> float | None:
    """A number, or None if the cell is empty or holds words."""
    try:
        value = float(record.get(name, ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
