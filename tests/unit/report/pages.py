"""What several tests of the report look for in its data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.ranking.results import Results, run_search
from axonn_tune.report.output import Json
from axonn_tune.report.ranking_section import ranking_of
from axonn_tune.request import Request


@cache
def results(*, model: str = "80b", gpus: int = 1024) -> Results:
    """A search on Perlmutter."""
    return run_search(load_inputs(Request(model, gpus=gpus)))


@cache
def ranking() -> Json:
    """The contract's document of 80b on 1,024 GPUs, with every grid."""
    return ranking_of(results())


def blocks(section: Json, kind: str) -> Iterator[Json]:
    """Every block of a kind, also within others."""

    def below(found: list[Json]) -> Iterator[Json]:
        for block in found:
            if block["kind"] == kind:
                yield block
            yield from below(block.get("blocks", []))
            for item in block.get("items", []):
                yield from below(item["blocks"])

    return below(section["blocks"])


def titled(section: Json, kind: str, title: str) -> Json:
    """The block of a kind whose title begins so."""
    return next(block for block in blocks(section, kind) if block["title"].startswith(title))


def values(table: Json, key: str) -> list[Any]:
    """What a column holds, words as words."""
    column = next(column for column in table["columns"] if column["key"] == key)
    if not column["text"]:
        return list(column["values"])
    return [None if place is None else column["words"][place] for place in column["values"]]
