"""Memory of stages whose backward passes are split, against one that prices every state of theirs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from axonn_tune.cost.pricer import Pricer
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.memory import Memory, memory_limit_bytes, price_memory
from axonn_tune.program.operations import PLAIN
from axonn_tune.program.schedules import Held, stage_held
from axonn_tune.program.step import as_runs, blocks_by_kind, counted_blocks, kept_by_kind
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.workload import OVERLAPS, Workload
from axonn_tune.vocabulary import FOLDED

_ORDERS = {
    "primus": ("zb1p", "zbv", "v-half", "v-min"),
    "torchtitan-eager": ("zb1p", "dualpipe-v"),
    "axonn-tune": ("zb1p",),
}
_ORDER_OF_AXES = ("x", "y", "z", "context", "data", "pipeline")


@st.composite
def _pricers(draw: st.DrawFn) -> Pricer:
    """Of a pipeline of 2 to 4 stages with any split of the layers, of one layer type or of two."""
    name = draw(st.sampled_from(sorted(_ORDERS)))
    order = draw(st.sampled_from(_ORDERS[name]))
    stages, shards = draw(st.integers(2, 4)), draw(st.sampled_from([1, 2, 8]))
    several = name == "axonn-tune" or name.startswith("torchtitan")
    chunks = 2 if order in FOLDED else draw(st.integers(2, 3)) if several else 1
    of_model = draw(st.sampled_from(["llama2-7b", "deepseek-v2-lite"] if name == "primus" else ["llama2-7b"]))
    parts = tuple(draw(st.integers(1, 4)) for _ in range(stages * chunks))
    model, layers = load_model(of_model).document, sum(parts)
    pattern = {"pattern": f"dense moe*{layers - 1}"} if model.pattern else {}
    model = model.model_copy(update={"layers": layers, **pattern})
    batches = stages * draw(st.integers(2, 4))
    without = tuple(one for one in OVERLAPS if one != "data_parallel")
    workload = Workload(
        global_batch=batches * shards, sequence_length=draw(st.sampled_from([64, 4096])), overlaps=without
    )
    gib = draw(st.sampled_from([20.0, 40.0, 192.0]))
    machine = load_machine("mi300x").document
    machine = machine.model_copy(update={"accelerator": machine.accelerator.model_copy(update={"memory_gib": gib})})
    repeated = draw(st.sampled_from(["none", "selective", "full"]))
    layout = Layout(
        Grid(z=shards, pipeline=stages, order=_ORDER_OF_AXES),
        1,
        repeated,
        draw(st.sampled_from([None, None, 0, 2])),
        chunks,
        parts,
        draw(st.sampled_from([None, 1])) if repeated == "full" else None,
    )
    return Pricer(Job(model, machine, workload, find_framework(name).with_step(pipeline_order=order)), layout)


def _counted(pricer: Pricer, number: int, held: Held) -> dict[str, Any]:
    """All symbols of a stage at one time."""
    stage, contents = pricer.stages[number]
    runs, repeated = [as_runs(one) for one in contents], float(pricer.repeated or 0.0)
    values = pricer._symbols(stage, contents)
    whole = [*zip(runs, held.whole, strict=True)]
    found = counted_blocks(pricer.program, values, whole, repeated=repeated, arithmetic=PLAIN)
    several = [(((one[0][0], 1.0),) if one else (), count) for one, count in zip(runs, held.ending, strict=True)]
    waiting, last = (
        blocks_by_kind(pricer.program, chunks, repeated=repeated, arithmetic=PLAIN)
        for chunks in ([*zip(runs, held.waiting, strict=True)], several)
    )
    kinds = [block.given.counted for block in pricer.program.blocks]
    found["held"] = sum(sum(count for _, count in one) * times for one, times in zip(runs, held.whole, strict=True))
    found |= {f"waiting{of}": waiting[f"held{of}"] - last[f"held{of}"] for of in kinds}
    found["waiting_head"] = held.waiting[-1] - held.ending[-1]
    for of in {"", *kinds}:
        found[f"held{of}"] += last[f"held{of}"] if of or len(kinds) == 1 else sum(last[f"held{one}"] for one in kinds)
    return {name: float(value) for name, value in found.items()}


def _state(pricer: Pricer, number: int, held: Held, kept: float | None) -> tuple[dict[str, Any], Memory]:
    (stage, contents), values = pricer.stages[number], _counted(pricer, number, held)
    memory = price_memory(
        pricer.program,
        values,
        limit_bytes=memory_limit_bytes(pricer.machine.accelerator),
        arithmetic=PLAIN,
        kept_layers=None if kept is None else min(float(kept), values["L"]),
        stage=stage,
        during=held.kind,
    )
    chunks = [(as_runs(one), 1.0) for one in contents]
    found = kept_by_kind(pricer.program, chunks, values, float(memory.kept_layers), arithmetic=PLAIN)
    return values | {name: float(count) for name, count in found.items()}, memory


def _of_every_state(pricer: Pricer, number: int, kept: float | None) -> tuple[dict[str, Any], Memory]:
    """The state with most memory, of all: as few layers are not resharded as fit in each."""
    (stage, contents), kept = pricer.stages[number], pricer.layout.kept_layers if kept is None else kept
    batches = int(pricer._symbols(stage, contents)["A"])
    shape = {"stages": len(pricer.stages), "chunks": len(contents), "micro_batches": batches}
    every = [one for one in stage_held(pricer.order, number, **shape) if one.kind != "F" or stage.last]
    found = [_state(pricer, number, one, kept) for one in every]
    least = min(float(memory.kept_layers) for _, memory in found)
    found = [_state(pricer, number, one, least) for one in every]
    return max(found, key=lambda one: float(one[1].total_bytes))


@settings(max_examples=20)
@given(_pricers(), st.sampled_from([None, 1.0]))
def test_no_state_of_a_stage_needs_more_memory(pricer: Pricer, kept: float | None) -> None:
    """Guards the states that are not priced: symbols, memory and each of its items are those of pricing all, to the
    bit; and of each kind of operation one is, or two that hold as much."""
    _check(pricer, kept)


@pytest.mark.nightly
@settings(max_examples=100)
@given(_pricers(), st.sampled_from([None, 1.0]))
def test_no_state_of_a_stage_needs_more_memory_in_many(pricer: Pricer, kept: float | None) -> None:
    """Guards the same with more pipelines."""
    _check(pricer, kept)


def _check(pricer: Pricer, kept: float | None) -> None:
    for number in range(len(pricer.stages)):
        values, memory = pricer.settled_stage(number, kept=kept)
        expected, most = _of_every_state(pricer, number, kept)
        assert (memory.total_bytes, memory.kept_layers, memory.held_bytes) == (
            most.total_bytes,
            most.kept_layers,
            most.held_bytes,
        )
        assert values == expected
        assert memory.items == most.items
        assert len(pricer._held(number)) <= 6
    split = pricer.split(replace(pricer.layout, parts=pricer.layout.parts[::-1]))
    for number in range(len(pricer.stages)):
        assert split.settled_stage(number)[0] == _of_every_state(split, number, None)[0]
