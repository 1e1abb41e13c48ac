"""Schedules that split the backward pass: steps against a simulation by events, halves of a pass against the whole one,
memory by hand, and AMD's six schedules of Llama 2."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from axonn_tune.cost import pipeline
from axonn_tune.cost.pipeline import StageTimes, pipeline_passes, pipeline_time
from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.operations import MatMul
from axonn_tune.program.schedules import schedule_orders
from axonn_tune.program.split import waiting_arrays, waits
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import FOLDED, OVERLAPS, PIPELINE_ORDERS, PipelineOrder

_SPLIT: tuple[PipelineOrder, ...] = tuple(one for one in PIPELINE_ORDERS if one != "1f1b")


def _random_times(order: PipelineOrder, rng: np.random.Generator) -> tuple[StageTimes, int]:
    """A pipeline whose stages and chunks differ, and micro-batches that it can have."""
    stages = int(rng.integers(2, 9))
    chunks = 2 if order in FOLDED else int(rng.integers(1, 4))
    batches = int(rng.integers(2 * stages, 5 * stages))
    batches = stages * -(-batches // stages) if order == "zb1p" and chunks > 1 else batches
    forward, first, second = (rng.uniform(0.1, 2.0, (stages, chunks)) for _ in range(3))
    whole = first + second * rng.uniform(0.7, 1.0)
    send = np.full(stages, rng.uniform(0.0, 0.5))
    end = rng.uniform(0.0, 1.0, stages)
    last = whole + rng.uniform(0.0, 0.5, whole.shape)
    return StageTimes(forward, whole, last, end, send, True, order, first, second), batches


@dataclass
class _Rank:
    """A rank of the simulation: what it has to do, what has arrived, when it is free."""

    left: list[tuple[str, int, int]]
    there: set[tuple[str, int, int]] = field(default_factory=set)
    busy: bool = False
    ended_s: float = 0.0


class _Events:
    """Ranks that start what they can when something ends or arrives; it knows model parts, and nothing of programs."""

    def __init__(self, times: StageTimes, batches: int) -> None:
        stages, chunks = times.shape
        self.times, self.batches, self.parts = times, batches, stages * chunks
        orders = schedule_orders(times.order, stages=stages, chunks=chunks, micro_batches=batches)
        # Where each part is, as the picture of a fold has it: down, and up again.
        path = [*range(stages), *reversed(range(stages))] if times.order in FOLDED else [*range(stages)] * chunks
        self.where = [(stage, part // stages) for part, stage in enumerate(path)]
        named = {place: part for part, place in enumerate(self.where)}
        self.ranks = [
            _Rank([(kind, named[stage, chunk], batch) for kind, chunk, batch in order])
            for stage, order in enumerate(orders)
        ]
        self.queue: list[tuple[float, int, str, int, tuple[str, int, int]]] = []
        self.number = count()

    def run(self) -> float:
        """The step, s."""
        for rank in range(len(self.ranks)):
            self._start(rank, 0.0)
        while self.queue:
            now_s, _, what, rank, action = heapq.heappop(self.queue)
            if what == "arrived":
                self.ranks[rank].there.add(action)
            else:
                self.ranks[rank].busy, self.ranks[rank].ended_s = False, now_s
                self._send(rank, action, now_s)
            self._start(rank, now_s)
        assert not any(rank.left for rank in self.ranks), "a deadlock"
        return max(rank.ended_s + end_s for rank, end_s in zip(self.ranks, self.times.end_s.tolist(), strict=True))

    def _start(self, number: int, now_s: float) -> None:
        rank = self.ranks[number]
        if rank.busy or not rank.left:
            return
        kind, part, batch = rank.left[0]
        needed = ("F", part - 1, batch) if kind == "F" else ("I", part + 1, batch)
        if kind != "W" and 0 <= needed[1] < self.parts and needed not in rank.there:
            return
        rank.left.pop(0)
        rank.busy = True
        self._at(now_s + self._takes_s(kind, part, batch), "ended", number, (kind, part, batch))

    def _takes_s(self, kind: str, part: int, batch: int) -> float:
        times, at, last = self.times, self.where[part], batch == self.batches - 1
        assert times.input_s is not None
        assert times.weight_s is not None
        more_s = float(times.last_backward_s[at] - times.backward_s[at]) if last else 0.0
        each = {"F": times.forward_s[at], "I": times.input_s[at]}
        each |= {"W": times.weight_s[at] + more_s, "B": times.backward_s[at] + more_s}
        return float(each[kind])

    def _send(self, number: int, action: tuple[str, int, int], now_s: float) -> None:
        kind, part, batch = action
        to = {"F": part + 1, "I": part - 1, "B": part - 1}.get(kind, -1)
        if 0 <= to < self.parts:
            rank = self.where[to][0]
            late_s = 0.0 if rank == number else float(self.times.send_s[number])
            self._at(now_s + late_s, "arrived", rank, ("I" if kind == "B" else kind, part, batch))

    def _at(self, time_s: float, what: str, rank: int, action: tuple[str, int, int]) -> None:
        heapq.heappush(self.queue, (time_s, next(self.number), what, rank, action))


@pytest.mark.parametrize("order", _SPLIT)
def test_step_is_that_of_a_simulation(order: PipelineOrder) -> None:
    """Forty random pipelines of each, 200 in all: the same step to 1e-9, which its stages fill, and passes in order."""
    rng = np.random.default_rng(47 + _SPLIT.index(order))
    for _ in range(40):
        times, batches = _random_times(order, rng)
        found = pipeline_time(times, micro_batches=batches)
        assert found.step_s == pytest.approx(_Events(times, batches).run(), rel=1e-9)
        parts = zip(found.busy_s, found.bubble_s, found.exposed_send_s, strict=True)
        assert [sum(each) for each in parts] == pytest.approx([found.step_s] * len(found.busy_s))
    orders = schedule_orders(order, stages=times.shape[0], chunks=times.shape[1], micro_batches=batches)
    for stage, expected in enumerate(orders):
        own = sorted((one for one in pipeline_passes(times, micro_batches=batches) if one.stage == stage), key=_start)
        assert [(one.kind, one.chunk, one.micro_batch) for one in own] == [*expected]


def test_slots_of_zb1p_are_its_order() -> None:
    """The program by slots against one that follows the order of each stage: passes to the bit, of random pipelines
    with as few micro-batches as ZB1P has and with many. The step, which jumps over equal periods, ends with them."""
    rng = np.random.default_rng(48)
    for number in range(60):
        times, batches = _random_times("zb1p", rng)
        batches = (1, 3, 12)[number % 3] * times.shape[0]
        passes = pipeline_passes(times, micro_batches=batches)
        with patch.object(pipeline, "_ordered_program", pipeline._program_of):
            followed = pipeline_passes(times, micro_batches=batches)
        assert sorted(passes) == sorted(followed)
        ended_s = np.zeros(times.shape[0])
        for one in passes:
            ended_s[one.stage] = max(ended_s[one.stage], one.end_s)
        found = pipeline_time(times, micro_batches=batches)
        assert found.step_s == pytest.approx((ended_s + times.end_s).max(), rel=1e-9)
        busy_s = times.end_s.copy()
        for one in passes:
            busy_s[one.stage] += one.end_s - one.start_s
        assert found.busy_s == pytest.approx(busy_s, rel=1e-9)


def _start(one: Any) -> float:
    return float(one.start_s)


def test_zero_bubbles_are_where_the_sources_say() -> None:
    """Of equal F, I and W: (p - 1)(F + I + W - 2 W) in ZB1P, and none but the fill in ZBV (arXiv 2401.10241)."""
    for stages, batches in ((4, 12), (8, 32)):
        for order, chunks, bubble in (("zb1p", 1, stages - 1.0), ("zbv", 2, (stages - 1.0) / 2.0)):
            one = np.full((stages, chunks), 1.0 / chunks)
            times = StageTimes(one, 2 * one, 2 * one, np.zeros(stages), np.zeros(stages), True, order, one, one)  # type: ignore[arg-type]
            assert pipeline_time(times, micro_batches=batches).step_s == pytest.approx(3.0 * batches + bubble)


def _priced(order: PipelineOrder, chunks: int = 1, *, layers: int = 16, **more: Any) -> Detail:
    """Llama 2 of 16 layers on 8 MI300X with 8 stages, as AMD-AGI/Primus@fd1eeabb runs schedules."""
    model = load_model("llama2-7b").document.model_copy(update={"layers": layers})
    without = tuple(one for one in OVERLAPS if one != "data_parallel")
    workload = Workload(global_batch=32, sequence_length=4096, overlaps=without)
    framework = find_framework("primus").with_step(pipeline_order=order)
    job = Job(model, load_machine("mi300x").document, workload, framework)
    grid = Grid(pipeline=8, order=("x", "z", "context", "data", "pipeline"))
    return price(job, replace(Layout(grid, 1, "none", chunks=chunks), **more))


def test_llama2_gains_what_amd_measured() -> None:
    """Speed over 1F1B of AMD's table within 4 points (AMD-AGI/Primus@fd1eeabb, primus_pipeline.md; 235.7 TFLOP/s at
    10,057 tokens/s are 16 layers, as in its tests/trainer/test_megatron_trainer_zero_bubble.yaml, which has a batch of
    32). V-min, whose steady state has no slack for messages, is slower than 1F1B, by less than theirs (0.885).
    """
    base = _priced("1f1b")
    measured = {("1f1b", 2): 1.091, ("zb1p", 1): 1.135, ("zbv", 2): 1.128, ("v-half", 2): 1.083}
    for (order, chunks), gain in measured.items():
        assert base.iteration_s / _priced(order, chunks).iteration_s == pytest.approx(gain, abs=0.04), order  # type: ignore[arg-type]
    assert 0.88 < base.iteration_s / _priced("v-min", 2).iteration_s < 0.96


def test_steps_are_those_that_amd_drew() -> None:
    """Three steps of one model, 8 stages and 32 micro-batches (AMD-AGI/Primus@fd1eeabb, its page's actual-perf.png):
    by the lengths of F, I and W of a chunk as they are drawn, ms, on the first stage others than on the rest, and
    messages that take nothing. I takes 1.8 times F and W 0.8 times, so patterns of equal slots have bubbles: 28% of
    a step of V-half, 41% of V-min's.
    """

    def drawn(first: tuple[float, float], other: float) -> Any:
        return np.array([first] + [(other, other)] * 7)

    forward, grads, weights = drawn((29.5, 73.3), 40.2), drawn((49.0, 74.8), 71.4), drawn((19.8, 44.1), 31.9)
    whole, none = grads + weights, np.zeros(8)
    for order, step in (("zbv", 10028), ("v-half", 12415), ("v-min", 15300)):
        times = StageTimes(forward, whole, whole, none, none, True, order, grads, weights)  # type: ignore[arg-type]
        assert pipeline_time(times, micro_batches=32).step_s == pytest.approx(step, rel=0.03), order


def test_halves_are_the_whole_pass() -> None:
    """On one rank without collectives nothing overlaps: both halves take what the whole pass does, of each stage."""
    for order in ("zb1p", "v-half"):
        times = _priced(order, 1 if order == "zb1p" else 2).times  # type: ignore[arg-type]
        assert times is not None
        assert times.input_s is not None
        assert times.weight_s is not None
        np.testing.assert_allclose(times.input_s + times.weight_s, times.backward_s, rtol=1e-12)
        assert (times.weight_s > 0.2 * times.backward_s).all()


def test_operands_wait_for_weight_gradients() -> None:
    """By hand: input and output gradient of qkv, output, up and gate in one, down, of one layer and micro-batch."""
    detail = _priced("zb1p")
    hidden, ffn, tokens = 4096, 11008, 4096
    (block,) = detail.program.blocks
    gemms = [one for one in block.backward.operations if isinstance(one, MatMul) and waits(one)]
    assert len(gemms) == 4
    values = {**detail.values, "waiting": 1.0, "waiting_head": 0.0}
    found = sum(float(size.evaluate(values)) for _, size in waiting_arrays(detail.program, last=True))
    assert found == 2.0 * tokens * (4 * hidden + 2 * hidden + (hidden + 2 * ffn) + (ffn + hidden))


def test_memory_of_stages_follows_their_schedules() -> None:
    """Of ZB1P the first stage has what 1F1B has, but for operands that stay during a block's backward pass, and later
    ones more; V-half and V-min have less than ZBV, whose first stage has both ends of the model."""
    plain, zero = _priced("1f1b"), _priced("zb1p")
    first, last = ([float(one.stages[at].memory.total_bytes) for one in (plain, zero)] for at in (0, -1))
    assert first[0] < first[1] < 1.01 * first[0]
    assert last[1] > 1.5 * last[0]
    folded = [float(_priced(one, 2).stages[4].memory.total_bytes) for one in ("zbv", "v-half", "v-min")]  # type: ignore[arg-type]
    assert folded == sorted(folded, reverse=True)
    assert folded[0] > 1.2 * folded[1]
    both = _priced("zbv", 2)
    assert max(float(one.memory.total_bytes) for one in both.stages) == float(both.stages[0].memory.total_bytes)
    assert [[start for start, _ in one.parts] for one in both.stages] == [[at, 15 - at] for at in range(8)]
