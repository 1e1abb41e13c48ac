"""Pipelines: torch's order, step times against a simulation that shares no code, bounds, chunks in flight."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from axonn_tune.cost.pipeline import Chains, StageTimes, pipeline_passes, pipeline_time
from axonn_tune.program.pipeline import held_of_chunks, split_layers, stage_order, warm_up

Action = tuple[str, int, int]
"""F or B, model part, micro-batch."""

SHAPES = [(2, 1, 2), (3, 1, 7), (8, 1, 8), (8, 1, 31), (2, 2, 2), (2, 3, 8), (4, 2, 4), (5, 4, 15), (8, 4, 32)]
"""Stages, chunks, micro-batches."""


def torch_order(stages: int, chunks: int, micro_batches: int) -> list[list[Action]]:
    """Forwards and backwards of each rank as torch's own schedule lists them.

    torch 2.13 lists the last rank's forwards of 1F1B with numbers from 1 to m; its runtime executes 0 to m-1.
    """
    dist.init_process_group("fake", rank=0, world_size=stages)
    try:
        layer, device = torch.nn.Linear(1, 1), torch.device("cpu")
        parts = [PipelineStage(layer, chunk * stages, stages * chunks, device) for chunk in range(chunks)]
        schedule = get_schedule_class("1F1B" if chunks == 1 else "Interleaved1F1B")(
            parts[0] if chunks == 1 else parts,
            n_microbatches=micro_batches,
            loss_fn=torch.nn.functional.mse_loss,
        )
        order = schedule.pipeline_order
    finally:
        dist.destroy_process_group()
    programs = [[each for action in order[rank] for each in compute_of(action)] for rank in range(stages)]
    first = min(micro_batch for kind, _, micro_batch in programs[-1] if kind == "F")
    programs[-1] = [(kind, part, number - first * (kind == "F")) for kind, part, number in programs[-1]]
    return programs


def compute_of(action: object) -> Iterator[Action]:
    """What a torch action computes, if it computes anything: idle slots and the scaling of gradients do not."""
    words = str(action)
    for letter in "FB":
        part, found, micro_batch = words.partition(letter)
        if found and part.isdigit() and micro_batch.isdigit():
            yield letter, int(part), int(micro_batch)


@dataclass
class Worker:
    """A rank of the simulation: its program, its mailbox, and whether it is at work."""

    program: deque[Action]
    mail: dict[Action, float] = field(default_factory=dict)
    at_work: bool = False
    idle_since_s: float = 0.0
    computed_s: float = 0.0
    exposed_s: float = 0.0
    messages: int = 0
    held: int = 0
    most_held: int = 0


class Simulation:
    """Ranks and messages as events in time; it knows nothing of warm-up, slots or periods."""

    def __init__(
        self,
        times: StageTimes,
        programs: list[list[Action]],
        weights: NDArray[np.int64],
        *,
        reductions_s: NDArray[np.float64] | None = None,
        inside: bool = False,
    ) -> None:
        """reductions_s: blocking reductions over data of each stage's chunks; inside: at the end of the chunk's last
        backward pass, before its result is sent, instead of one after the other when the stage has nothing else."""
        self.times, self.weights, self.inside = times, weights, inside
        self.reductions_s = np.zeros(weights.shape) if reductions_s is None else reductions_s
        self.workers = [Worker(deque(program)) for program in programs]
        self.last_micro_batch = max(micro_batch for _, _, micro_batch in programs[0])
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.count = 0

    def run(self) -> float:
        """The step's time, s."""
        for rank in range(len(self.workers)):
            self.start(rank, 0.0)
        while self.events:
            now_s, _, happen = heapq.heappop(self.events)
            happen(now_s)
        assert not any(worker.program for worker in self.workers), "a deadlock"
        for rank, worker in enumerate(self.workers):
            left_s = [] if self.inside else self.reductions_s[rank].tolist()
            for end_s in (*left_s, float(self.times.end_s[rank])):
                worker.computed_s += end_s
                worker.idle_since_s += end_s
        return max(worker.idle_since_s for worker in self.workers)

    def at(self, time_s: float, happen: Callable[[float], None]) -> None:
        """Something to happen later; what was planned first happens first."""
        self.count += 1
        heapq.heappush(self.events, (time_s, self.count, happen))

    def start(self, rank: int, now_s: float) -> None:
        """Computes the next action if the rank is idle and has the message that the action needs."""
        worker = self.workers[rank]
        if worker.at_work or not worker.program:
            return
        kind, part, micro_batch = worker.program[0]
        source = part - 1 if kind == "F" else part + 1
        if 0 <= source < self.weights.size:
            if (kind, source, micro_batch) not in worker.mail:
                return
            sent_s = worker.mail.pop((kind, source, micro_batch))
            worker.exposed_s += now_s - max(worker.idle_since_s, min(sent_s, now_s))
        action = worker.program.popleft()
        worker.at_work = True
        duration_s = self.duration_s(action, rank)
        worker.computed_s += duration_s
        self.at(now_s + duration_s, lambda later_s: self.send(action, rank, later_s))

    def send(self, action: Action, rank: int, now_s: float) -> None:
        """Passes the result on; the rank is free at once, or when the result has arrived."""
        kind, part, _ = action
        worker = self.workers[rank]
        worker.held += int(self.weights[rank, part // len(self.workers)]) * (1 if kind == "F" else -1)
        worker.most_held = max(worker.most_held, worker.held)
        target = part + 1 if kind == "F" else part - 1
        if not 0 <= target < self.weights.size:
            return self.free(rank, now_s)
        worker.messages += 1
        arrival_s = now_s + float(self.times.send_s[rank])
        if self.times.overlapped:
            self.free(rank, now_s)
        else:
            worker.exposed_s += arrival_s - now_s
            self.at(arrival_s, lambda later_s: self.free(rank, later_s))
        self.at(arrival_s, lambda later_s: self.deliver(action, target % len(self.workers), now_s, later_s))
        return None

    def free(self, rank: int, now_s: float) -> None:
        """The rank goes on."""
        self.workers[rank].at_work = False
        self.workers[rank].idle_since_s = now_s
        self.start(rank, now_s)

    def deliver(self, action: Action, rank: int, sent_s: float, now_s: float) -> None:
        """A message has come."""
        self.workers[rank].mail[action] = sent_s
        self.start(rank, now_s)

    def duration_s(self, action: Action, rank: int) -> float:
        """How long an action computes."""
        kind, part, micro_batch = action
        last = kind == "B" and micro_batch == self.last_micro_batch
        table = self.times.last_backward_s if last else self.times.forward_s if kind == "F" else self.times.backward_s
        reduced_s = self.reductions_s[rank, part // len(self.workers)] if last and self.inside else 0.0
        return float(table[rank, part // len(self.workers)] + reduced_s)


def _in_flight(stage: int, *, stages: int, micro_batches: int, weights: tuple[float, ...]) -> float:
    """Largest sum of weights over (chunk, micro-batch) pairs of a stage whose forward is done and backward is not."""
    held = held_of_chunks(stage, stages=stages, micro_batches=micro_batches, weights=weights)
    return float(sum(count * weight for count, weight in zip(held, weights, strict=True)))


def random_times(random: np.random.Generator, stages: int, chunks: int) -> StageTimes:
    """Any durations, some of them 0."""
    shape, sends = (stages, chunks), random.choice([0.0, 0.1, 1.0])
    return StageTimes(
        forward_s=random.uniform(0.2, 2.0, shape),
        backward_s=random.uniform(0.2, 4.0, shape),
        last_backward_s=random.uniform(0.2, 6.0, shape),
        end_s=random.uniform(0.0, 2.0, stages),
        send_s=sends * random.uniform(0.0, 1.0, stages),
        overlapped=bool(random.integers(2)),
    )


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), SHAPES)
def test_order_is_torchs(stages: int, chunks: int, micro_batches: int) -> None:
    """Guards the runtime: it runs torch's order, so that is what is predicted."""
    programs = torch_order(stages, chunks, micro_batches)
    for stage, program in enumerate(programs):
        order = stage_order(stage, stages=stages, chunks=chunks, micro_batches=micro_batches)
        assert program == [(kind, chunk * stages + stage, micro_batch) for kind, chunk, micro_batch in order]


@pytest.mark.parametrize("seed", range(200))
def test_step_is_that_of_an_independent_simulation(seed: int) -> None:
    """Guards every number of a step: torch's order of operations, executed event by event."""
    random = np.random.default_rng(seed)
    stages, chunks = int(random.integers(2, 9)), int(random.integers(1, 5))
    micro_batches = int(random.integers(1, 32 // stages + 1)) * stages
    if chunks == 1:
        micro_batches = int(random.integers(stages, 33))
    times, weights = random_times(random, stages, chunks), random.integers(1, 6, (stages, chunks))
    simulation = Simulation(times, torch_order(stages, chunks, micro_batches), weights)
    step_s = simulation.run()
    found = pipeline_time(times, micro_batches=micro_batches)
    workers = simulation.workers
    close = {"rel": 1e-9, "abs": 1e-9 * step_s}
    assert found.step_s == pytest.approx(step_s, rel=1e-9)
    assert found.busy_s == pytest.approx([worker.computed_s for worker in workers], rel=1e-9)
    assert found.exposed_send_s == pytest.approx([worker.exposed_s for worker in workers], **close)
    idle_s = [step_s - worker.computed_s - worker.exposed_s for worker in workers]
    assert found.bubble_s == pytest.approx(idle_s, **close)
    assert found.sends == tuple(worker.messages for worker in workers)
    assert [worker.most_held for worker in workers] == [
        _in_flight(stage, stages=stages, micro_batches=micro_batches, weights=tuple(weights[stage].tolist()))
        for stage in range(stages)
    ]


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("seed", range(100))
def test_blocking_reductions_are_those_of_the_simulation(seed: int, inside: bool) -> None:
    """Guards where gradients are reduced over data without overlap: after the schedule, as part of each stage's end, or
    in each chunk's last backward pass, which delays the stages before it."""
    random = np.random.default_rng(seed)
    stages, chunks = int(random.integers(2, 9)), int(random.integers(1, 5))
    micro_batches = int(random.integers(1, 32 // stages + 1)) * stages
    times, weights = random_times(random, stages, chunks), np.ones((stages, chunks), dtype=np.int64)
    reductions_s = random.uniform(0.0, 3.0, (stages, chunks))
    order = torch_order(stages, chunks, micro_batches)
    simulation = Simulation(times, order, weights, reductions_s=reductions_s, inside=inside)
    step_s = simulation.run()
    if inside:
        given = replace(times, last_backward_s=times.last_backward_s + reductions_s)
    else:
        given = replace(times, end_s=times.end_s + reductions_s.sum(axis=1))
    found = pipeline_time(given, micro_batches=micro_batches)
    assert found.step_s == pytest.approx(step_s, rel=1e-9)
    assert found.busy_s == pytest.approx([worker.computed_s for worker in simulation.workers], rel=1e-9)


@pytest.mark.parametrize(
    ("chunks", "micro_batches", "words"),
    [(2, 6, r"micro-batches \(6\) are not divisible by stages \(4\)"), (1, 0, "micro-batches 0: each must be")],
)
def test_shapes_that_are_no_pipeline_are_refused(chunks: int, micro_batches: int, words: str) -> None:
    """Guards against a price for what no framework runs."""
    with pytest.raises(ValueError, match=words):
        pipeline_time(random_times(np.random.default_rng(), 4, chunks), micro_batches=micro_batches)
    with pytest.raises(ValueError, match=words):
        stage_order(0, stages=4, chunks=chunks, micro_batches=micro_batches)
    with pytest.raises(ValueError, match=words):
        _in_flight(0, stages=4, micro_batches=micro_batches, weights=(1,) * chunks)


@pytest.mark.parametrize(("stages", "chunks"), [(1, 1), (1, 2), (2, 1), (4, 1), (3, 2), (8, 4)])
@pytest.mark.parametrize("rounds", [1, 2, 3, 9])
def test_in_flight_has_a_closed_form_and_the_whole_order_says_the_same(stages: int, chunks: int, rounds: int) -> None:
    """Guards memory: the peak of a shortened order is that of the whole, and equal chunks need no order."""
    micro_batches, weights = stages * rounds, tuple(range(3, 3 + chunks))
    shape = {"stages": stages, "micro_batches": micro_batches}
    # The warm-up and one more, at most all: Megatron-Core `pipeline_parallel/schedules.py`.
    warm = warm_up(np.arange(stages), stages=stages, chunks=chunks)
    columns = np.minimum(warm + 1, chunks * micro_batches)
    for stage in range(stages):
        order = stage_order(stage, chunks=chunks, **shape)
        held = accumulate(weights[chunk] * (1 if kind == "F" else -1) for kind, chunk, _ in order)
        assert _in_flight(stage, weights=weights, **shape) == max(held)
        assert _in_flight(stage, weights=(1,) * chunks, **shape) == np.asarray(columns)[stage]


@pytest.mark.parametrize("stages", [2, 3, 4, 8, 12])
@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 8])
def test_of_a_larger_micro_batch_no_less_is_in_flight(stages: int, chunks: int) -> None:
    """Guards what a search leaves out: what fits for no micro-batch fits for none that is larger, since what a stage
    holds of as many sequences never shrinks with them."""
    random = np.random.default_rng(stages * chunks)
    for layers in random.integers(stages * chunks, 100 + stages * chunks, 6).tolist():
        each, more = divmod(layers, stages * chunks)
        parts = [each + (part < more) for part in range(stages * chunks)]
        for stage in range(stages):
            weights = tuple(parts[stage::stages])
            held = [
                _in_flight(stage, stages=stages, micro_batches=stages * rounds, weights=weights) / rounds
                for rounds in (48, 24, 16, 12, 8, 6, 4, 3, 2, 1)
            ]
            assert held == sorted(held)


def test_bound_of_columns_is_that_of_each() -> None:
    """Guards the columns: durations and micro-batches of many candidates at once."""
    random = np.random.default_rng(11)
    forward_s, end_s = random.uniform(0.5, 1.5, (7, 4, 2)), random.uniform(0.0, 1.0, (7, 4))
    micro_batches = 4 * np.arange(1, 8)
    columns = forward_s, 2 * forward_s, 3 * forward_s, end_s, 0.1 * end_s
    bounds_s = Chains.of(StageTimes(*columns), micro_batches).step_s
    rows = zip(*columns, micro_batches, strict=True)
    each_s = [Chains.of(StageTimes(*times), int(m)).step_s for *times, m in rows]
    assert np.asarray(bounds_s).tolist() == pytest.approx(each_s, rel=1e-12)


@pytest.mark.parametrize(
    ("layers", "options", "counts"),
    [
        (8, {"parts": 4}, (2, 2, 2, 2)),
        (9, {"parts": 4}, (2, 3, 2, 2)),
        (11, {"parts": 4}, (3, 3, 3, 2)),
        (7, {"parts": 1, "first_less": 1, "last_less": 1}, (7,)),
        (30, {"parts": 4, "first_less": 1, "last_less": 1}, (7, 8, 8, 7)),
        (32, {"parts": 4, "first_less": 1, "last_less": 1}, (7, 9, 9, 7)),
        (31, {"parts": 8, "first_less": 1}, (3, 4, 4, 4, 4, 4, 4, 4)),
        (30, {"parts": 4, "first": 6, "last": 8}, (6, 8, 8, 8)),
        (30, {"parts": 4, "last": 6}, (8, 8, 8, 6)),
        (126, {"parts": 16, "first": 7, "last": 7}, (7, *[8] * 14, 7)),
    ],
)
def test_layers_are_split_evenly(layers: int, options: dict[str, int], counts: tuple[int, ...]) -> None:
    """Guards the stages: remainders go to the middle, where neither embedding nor LM head is."""
    assert split_layers(layers, **options) == counts


@pytest.mark.parametrize(
    ("layers", "options"),
    [
        (4, {"parts": 0}),
        (4, {"parts": 2, "first": 5}),
        (4, {"parts": 2, "first": 1, "last": 1}),
        (2, {"parts": 4, "first_less": 3}),
    ],
)
def test_splits_that_lose_layers_are_refused(layers: int, options: dict[str, int]) -> None:
    """Guards against stages without some of the layers, or with fewer than none."""
    with pytest.raises(ValueError, match=f"cannot split {layers} layers over {options['parts']} parts"):
        split_layers(layers, **options)


@pytest.mark.parametrize(("stages", "chunks", "micro_batches"), SHAPES)
def test_drawn_passes_are_in_order_and_end_with_the_step(stages: int, chunks: int, micro_batches: int) -> None:
    """Guards the drawn schedule: the passes of each stage's order, one after another, up to the end of the step."""
    times = replace(random_times(np.random.default_rng(stages), stages, chunks), overlapped=True)
    passes = pipeline_passes(times, micro_batches=micro_batches)
    ends_s = []
    for stage in range(stages):
        own = sorted((one for one in passes if one.stage == stage), key=lambda one: one.start_s)
        order = stage_order(stage, stages=stages, chunks=chunks, micro_batches=micro_batches)
        assert [(one.kind, one.chunk, one.micro_batch) for one in own] == list(order)
        assert all(two.start_s >= one.end_s - 1e-12 for one, two in pairwise(own))
        ends_s.append(own[-1].end_s + float(times.end_s[stage]))
    assert max(ends_s) == pytest.approx(pipeline_time(times, micro_batches=micro_batches).step_s, rel=1e-9)
