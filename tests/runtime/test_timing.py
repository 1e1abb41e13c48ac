"""Time per term: whose time it is, and what the computation stood still for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_tune.grid import Grid
from axonn_tune.runtime.clocks import DeviceClock, HostClock, StepTimes, TimedCall, Timer
from axonn_tune.runtime.communicator import CollectiveHandle
from axonn_tune.runtime.ledger import LedgerEntry
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.metrics import Metrics, shares_s
from axonn_tune.runtime.optimizer import StepResult
from axonn_tune.specs.loading import load_document
from axonn_tune.specs.results import Summary
from axonn_tune.specs.traces import Span
from axonn_tune.vocabulary import COMPUTE_LANE
from tests.runtime import tasks
from tests.runtime.pool import Pools
from tests.unit.specs.launches import example_launch

GATHER = LedgerEntry("all_gather", "z", "forward", "mlp.fc1", 4096)
REDUCE = LedgerEntry("all_reduce", "z", "step", "vectors", 64)


class ByHand(HostClock):
    """A clock that the test sets."""

    shared = False

    def mark(self) -> float:
        return 0.0

    def between_s(self, start: float, end: float) -> float:
        return end - start


def test_a_collective_behind_another_of_its_group_is_charged_from_its_turn() -> None:
    """Guards sums of seconds: time in the queue belongs to the collective that is being sent."""
    group, timer = object(), Timer(ByHand())
    timer.begin_step(0)
    calls = [timer.issue(entry, group) for entry in (GATHER, REDUCE)]  # type: ignore[arg-type]
    marks = [(3.0, 4.0, 4.0), (5.0, 4.5, 5.0)]
    for call, (done_s, halted_s, resumed_s) in zip(calls, marks, strict=True):
        assert call is not None
        call.done, call.halted, call.resumed = done_s, halted_s, resumed_s
    times = timer.end_step()
    assert times is not None
    assert [call.seconds for call in times.calls] == [3.0, 2.0]
    assert [call.exposed_s for call in times.calls] == [0.0, 0.5]
    assert times.exposed_s == 0.5


def test_gloo_on_gpus_is_not_waited_for_as_it_is_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards timed steps of stages on GPUs over Gloo, whose receives are issued before what they wait for is sent."""
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    clock, waits = DeviceClock(torch.device("cuda")), list[str]()
    monkeypatch.setattr(clock, "mark", lambda: float(len(waits)))
    work = SimpleNamespace(wait=lambda: waits.append("waited"))
    timer = Timer(clock)
    timer.begin_step(0)
    call = timer.issue(GATHER, object())  # type: ignore[arg-type]
    pending = CollectiveHandle(torch.zeros(1), work, call=call)  # type: ignore[arg-type]
    assert waits == []
    pending.wait()
    assert call is not None
    assert (call.halted, call.resumed, call.done) == (0.0, 1.0, 1.0)


def test_calls_of_one_name_and_size_are_one_term() -> None:
    """Guards the aggregates in the metrics: counts, and sums in order of the first call.

    What follows the wait counts: of Gloo's reduce-scatter the local sum, though the network is done.
    """
    calls = (TimedCall(REDUCE, 0, 1, 0, 1), TimedCall(GATHER, 1, 2, 4, 4.5), TimedCall(REDUCE, 3, 6, 5, 6.5))
    found = [(term["op"], term["count"], term["seconds"], term["exposed_s"]) for term in StepTimes(calls).terms()]
    assert found == [(REDUCE.op, 2, 4.5, 2.5), (GATHER.op, 1, 1.5, 0.5)]


def test_only_some_steps_are_timed() -> None:
    """Guards the cost on GPUs: a step between two timed ones leaves no call, and no times.

    The step after a trace is not timed: the profiler ends while it begins, and every other rank waits for it.
    """
    for traced, expected in (
        (0, [(0, False), (3, False)]),
        (3, [(-2, False), (0, True), (1, True), (2, True), (4, False)]),
    ):
        timer, timed = Timer(ByHand(), every_steps=3, traced_steps=traced), list[tuple[int, bool]]()
        for number in range(-2, 6):
            timer.begin_step(number)
            timer.part("embedding")
            called = timer.issue(GATHER, None) is not None  # type: ignore[arg-type]
            timer._calls.clear()
            timer.part("")
            times = timer.end_step()
            assert called == (times is not None)
            timed += [(number, bool(times.parts))] if times is not None else []
        assert timed == expected


def test_ends_are_right_behind_computation_and_with_a_late_rank(pools: Pools) -> None:
    """Guards the marks on real ranks: hidden means done long before it is read, and the late rank waits for nobody."""
    early, late = pools(2).run(tasks.one_late_rank)
    for hidden, _ in (early, late):
        assert hidden.done_s < hidden.halted_s
        assert hidden.exposed_s < tasks.LATE_S / 2
    assert early[1].exposed_s > tasks.LATE_S / 2
    assert min(early[1].seconds, late[1].seconds) < tasks.LATE_S / 2 < early[1].seconds


def test_calls_in_flight_at_once_share_the_time() -> None:
    """Guards the measured side of the comparison: per lane, seconds sum to the time in which any call was in flight."""
    assert shares_s([(0.0, 4.0), (2.0, 6.0), (7.0, 8.0)], ["a", "a", "a"]) == [3.0, 3.0, 1.0]
    assert shares_s([(0.0, 4.0), (2.0, 6.0), (1.0, 1.0)], ["a", "b", "a"]) == [4.0, 4.0, 0.0]
    assert shares_s([(0.0, 6.0), (0.0, 3.0), (2.0, 4.0)], ["a", "a", "a"]) == pytest.approx(
        [1 + 1 / 3 + 2.5, 1 + 1 / 3, 5 / 6]
    )
    assert shares_s([], []) == []


WAITED = StepTimes((TimedCall(GATHER, began_s=0.0, done_s=0.1, halted_s=0.0, resumed_s=0.1),))
TRACED = StepTimes(WAITED.calls, parts=(Span(COMPUTE_LANE, "head", 0.0, 1.0),))
ON_GPUS = [(None, 9.0), (None, 9.0), (TRACED, 7.0), (None, 5.0), (WAITED, 0.3), *[(None, 0.2)] * 4]
ON_CPUS = [(WAITED, step_s) for step_s in (9.0, 9.0, 0.3, 5.0, 0.3, 0.3, 0.3, 0.1, 0.3, 8.0)]


@pytest.mark.parametrize(
    ("device", "steps", "step_s", "exposed_s", "counts"),
    [("cuda", ON_GPUS, 0.2, 0.0, (1, 4)), ("cpu", ON_CPUS, 0.3, 0.1, (8, 0))],
)
def test_a_steps_time_is_that_of_untimed_steps_where_there_are_any(
    device: str,
    steps: Any,
    step_s: float,
    exposed_s: float,
    counts: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards GPUs, where timing takes streams from overlap: 0.3 s with it and 0.2 s without is a step of 0.2 s.

    Of the timed step 0.1 s was waiting, so 0.2 s are computation and nothing of an untimed one is exposed. The step
    that a trace slowed is not counted, nor the one behind it. On CPUs all are timed; warm-up and a quarter of the steps
    at each end are left out.
    """
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1)
    metrics = Metrics(example_launch(), build_mesh(Grid()), torch.device(device), tmp_path, 9)
    for times, seconds in steps:
        metrics.step(1, StepResult(1.0, 1.0, 1.0), step_s=seconds, times=times)
    metrics.close()
    found = load_document(str(tmp_path / "summary.json"), schema=Summary)
    measured = [found.pairs.measured[name] for name in ("step_s", "compute_s", "exposed_communication_s")]
    assert measured == pytest.approx([step_s, 0.2, exposed_s])
    assert (found.timed_steps, found.untimed_steps) == counts
