"""Searches of small spaces against every one of their candidates: the same rows, to the bit and in order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from axonn_tune.cost.price import PricedLayout
from axonn_tune.frameworks import find_framework
from axonn_tune.ranking.choosing import search
from axonn_tune.ranking.inputs import compares_expert_overlap
from axonn_tune.ranking.space import Problem
from axonn_tune.request import RankBy, Request
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.lengths import read_lengths
from axonn_tune.specs.tuning import tuning
from axonn_tune.vocabulary import AUTO, Packing
from tests.unit.ranking.exhaustive import exhaustive
from tests.unit.ranking.models import model_of
from tests.unit.small import small_problem

TOPS = (1, 10, 1000)
"""Rows that are asked for."""


@dataclass(frozen=True, kw_only=True)
class Space:
    """A small search. memory_gib: of each GPU; pins: of the request; step: options of the framework's step; quick: in
    the fast suite."""

    framework: str
    model: str
    gpus: int
    batch: int
    layers: str | int | None = None
    memory_gib: float = 80.0
    machine: str = "dgx-h100"
    pins: dict[str, Any] = field(default_factory=dict)
    step: dict[str, Any] = field(default_factory=dict)
    rank_by: RankBy = "iteration"
    length: int = 2048
    workload: dict[str, Any] = field(default_factory=dict)
    quick: bool = False

    @property
    def problem(self) -> Problem:
        """The search as a request for it is."""
        like = load_machine(self.machine).document
        accelerator = like.accelerator.model_copy(update={"memory_gib": self.memory_gib})
        problem = small_problem(
            model_of(self.model, self.layers),
            like.model_copy(update={"accelerator": accelerator}),
            find_framework(self.framework).with_step(**self.step),
            gpus=self.gpus,
            batch=self.batch,
            sequence_length=self.length,
            rank_by=self.rank_by,
            request=Request(**self.pins),
            **self.workload,
        )
        return replace(problem, compares_expert_overlap=compares_expert_overlap(problem))


NO_CONTEXT = {"context": 1, "z": 1}
_PACKINGS: dict[Packing, str] = {"padded": "deepspeed", "padding-free": "megatron-core", "packed": "megatron-core"}
SPACES = {
    # Dense: stages and chunks, even or not, tight or not, rank orders.
    "two GPUs": Space(framework="axonn-tune", model="dense", gpus=2, batch=8, memory_gib=24.0, quick=True),
    "rank orders": Space(
        framework="axonn-tune", model="dense", layers=4, gpus=8, batch=8, pins={}, machine="perlmutter", memory_gib=8.0
    ),
    "rank orders, by communication": Space(
        framework="axonn-tune",
        model="dense",
        layers=4,
        gpus=8,
        batch=8,
        machine="perlmutter",
        rank_by="communication",
        pins={},
        memory_gib=8.0,
    ),
    "chunks": Space(
        framework="megatron-core",
        model="dense",
        layers=12,
        gpus=8,
        batch=16,
        pins=NO_CONTEXT,
        memory_gib=9.5,
        quick=True,
    ),
    "uneven chunks, tight": Space(
        framework="megatron-core", model="uneven", gpus=8, batch=16, memory_gib=9.0, pins=NO_CONTEXT, quick=True
    ),
    "large head": Space(framework="megatron-core", model="large head", gpus=8, batch=32, pins={**NO_CONTEXT}),
    "large head, tight": Space(
        framework="torchtitan", model="large head", gpus=8, batch=16, memory_gib=14.0, pins=NO_CONTEXT, quick=True
    ),
    "equal chunks": Space(
        framework="megatron-2021", model="dense", layers=12, gpus=16, batch=32, memory_gib=9.0, pins={}, quick=True
    ),
    "stages without chunks": Space(
        framework="deepspeed", model="uneven", gpus=8, batch=16, memory_gib=10.0, pins={}, quick=True
    ),
    "two layer types": Space(
        framework="megatron-core",
        model="wide and narrow",
        gpus=4,
        batch=16,
        memory_gib=14.0,
        pins={**NO_CONTEXT},
        quick=True,
    ),
    "shards of weights": Space(framework="fsdp", model="dense", gpus=16, batch=64, memory_gib=10.0, quick=True),
    "layers kept": Space(
        framework="axonn-tune", model="uneven", gpus=4, batch=8, memory_gib=9.0, pins={"y": 1}, quick=True
    ),
    "some layers repeat": Space(
        framework="megatron-core",
        model="dense",
        gpus=4,
        batch=16,
        memory_gib=9.0,
        pins={"context": 1, "recompute_layers": 1},
        quick=True,
    ),
    "adapters": Space(
        framework="megatron-core",
        model="dense",
        layers=12,
        gpus=8,
        batch=16,
        memory_gib=8.0,
        pins=NO_CONTEXT,
        workload={"tuning": tuning("lora", "megatron-bridge", rank=16, targets=None, dtype=None)},
        quick=True,
    ),
    # Sequences that differ in length.
    **{
        f"{packing} lengths": Space(
            framework=framework,
            model="dense",
            layers=6,
            gpus=8,
            batch=32,
            memory_gib=9.0,
            pins=NO_CONTEXT,
            workload={"lengths": read_lengths("180:400", packing)},
            quick=True,
        )
        for packing, framework in _PACKINGS.items()
    },
    # Context parallelism and windows.
    "exchanges of context": Space(
        framework="megatron-core",
        model="dense",
        layers=4,
        gpus=8,
        batch=4,
        length=8192,
        pins={},
        memory_gib=9.5,
        quick=True,
    ),
    "windows with context": Space(
        framework="megatron-core", model="windows", gpus=4, batch=4, length=4096, pins={}, memory_gib=9.0, quick=True
    ),
    "hierarchies": Space(
        framework="nemo",
        model="dense",
        layers=4,
        gpus=16,
        batch=2,
        memory_gib=10.0,
        length=8192,
        pins={"pipeline": 1},
        quick=True,
    ),
    # Experts.
    "experts": Space(
        framework="megatron-core", model="experts", gpus=4, batch=16, memory_gib=14.0, pins={"context": 1}
    ),
    "experts with overlap": Space(
        framework="megatron-core",
        model="dense and experts",
        gpus=4,
        batch=16,
        pins=NO_CONTEXT,
        memory_gib=24.0,
    ),
    "a few with overlap": Space(
        framework="megatron-core",
        model="dense and experts",
        gpus=4,
        batch=16,
        pins={**NO_CONTEXT, "x": 1, "micro_batch": 2, "recompute": "none"},
        quick=True,
    ),
    "experts over nodes": Space(
        framework="megatron-core",
        model="experts",
        layers="moe*4",
        gpus=16,
        batch=64,
        pins={**NO_CONTEXT, "micro_batch": 1},
        memory_gib=10.0,
    ),
    "experts of another framework": Space(
        framework="torchtitan", model="dense and experts", gpus=4, batch=8, memory_gib=18.0, pins={"context": 1}
    ),
    "a few with MTP": Space(
        framework="torchtitan",
        model="latent with MTP",
        gpus=4,
        batch=4,
        memory_gib=16.0,
        pins={**NO_CONTEXT, "x": 1},
        quick=True,
    ),
    "latent with MTP": Space(
        framework="megatron-core", model="latent with MTP", gpus=4, batch=8, memory_gib=11.0, pins={**NO_CONTEXT}
    ),
    "hybrid": Space(
        framework="megatron-core", model="hybrid", gpus=8, batch=8, memory_gib=8.0, pins=NO_CONTEXT, quick=True
    ),
    "hybrid with experts": Space(
        framework="axonn-tune", model="hybrid with experts", gpus=4, batch=4, pins={"y": 1}, memory_gib=10.0
    ),
    # Number formats.
    "all formats": Space(
        framework="megatron-core",
        model="large head",
        gpus=4,
        batch=8,
        memory_gib=30.0,
        pins={**NO_CONTEXT, "precision": AUTO},
    ),
    "some formats": Space(
        framework="megatron-core",
        model="large head",
        gpus=4,
        batch=8,
        memory_gib=24.0,
        pins={**NO_CONTEXT, "precision": AUTO, "micro_batch": 1, "data": 1},
        quick=True,
    ),
    "all formats of experts": Space(
        framework="megatron-core",
        model="latent with MTP",
        gpus=4,
        batch=8,
        machine="dgx-b200",
        pins={**NO_CONTEXT, "x": 1, "micro_batch": 2, "precision": AUTO},
        memory_gib=22.0,
    ),
    "one format": Space(
        framework="torchtitan",
        model="uneven",
        gpus=8,
        batch=8,
        machine="dgx-b200",
        memory_gib=14.0,
        workload={"precision": "mxfp8"},
        quick=True,
    ),
}


def searched(problem: Problem, top: int) -> list[PricedLayout]:
    """The first rows of a search, and the best of each number format."""
    return [one for one in search(problem, top=top).listed() if isinstance(one, PricedLayout)]


def shown(row: PricedLayout) -> tuple[object, ...]:
    """What a row says of itself."""
    layout = (row.grid.by_axis, row.wide_order, row.micro_batch, row.recomputed, row.chunks)
    return (row.job.workload.precision, *layout, row.iteration_s, row.communication_s)


@pytest.mark.parametrize(
    "name", [name if one.quick else pytest.param(name, marks=pytest.mark.nightly) for name, one in SPACES.items()]
)
def test_the_rows_of_a_search_are_the_best_of_all_candidates(name: str) -> None:
    """Guards the search: nothing is dropped that would be among its rows, and rows have exact steps in exact order."""
    problem = SPACES[name].problem
    every = exhaustive(problem)
    assert len(every.candidates) > len(every.rows) > 1
    for top in TOPS:
        rows, expected = searched(problem, top), every.first(top)
        assert [shown(one)[-2:] for one in rows] == [shown(one.detail)[-2:] for one in expected], top
        for row, best in zip(rows, expected, strict=True):
            assert row.layout in every.as_good(best), (top, shown(row), shown(best.detail))
