"""What several tests of the report look for in its data."""

from __future__ import annotations

from functools import cache

from axonn_tune.api.search import SearchResult
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.output import Json
from axonn_tune.report.ranking_section import ranking_of
from axonn_tune.request import Request


@cache
def results(*, model: str = "80b", gpus: int = 1024) -> SearchResult:
    """A search on Perlmutter."""
    inputs = load_inputs(Request(model, gpus=gpus))
    return SearchResult(inputs, run_search(inputs.problem), "a test")


@cache
def ranking() -> Json:
    """The contract's document of 80b on 1,024 GPUs, with every grid."""
    return ranking_of(results().inputs, results().ranked)
