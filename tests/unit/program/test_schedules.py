"""Orders of pipeline stages with split backward passes: every pass once, none before what it needs, as much in memory
as their sources say."""

from __future__ import annotations

from itertools import product

import pytest

from axonn_tune.program.pipeline import Operation
from axonn_tune.program.schedules import Held, held_at_most, part_of, schedule_orders, stage_held, undominated
from axonn_tune.vocabulary import FOLDED, PIPELINE_ORDERS, PipelineOrder

_SHAPES = [(2, 4), (3, 7), (4, 8), (6, 12), (8, 32)]


def _chunks(schedule: PipelineOrder) -> tuple[int, ...]:
    return (2,) if schedule in FOLDED else (1, 2, 3)


@pytest.mark.parametrize("schedule", PIPELINE_ORDERS)
def test_every_pass_is_done_once_after_what_it_needs(schedule: PipelineOrder) -> None:
    """Stages follow their orders and wait for others: all are done, each micro-batch forward, back, and its weights."""
    for (stages, batches), chunks in product(_SHAPES, _chunks(schedule)):
        if chunks > 1 and schedule not in FOLDED and batches % stages:
            continue
        left = [list(one) for one in schedule_orders(schedule, stages=stages, chunks=chunks, micro_batches=batches)]
        done, last = set[tuple[str, int, int]](), chunks * stages - 1
        moved = True
        while moved:
            moved = False
            for stage, order in enumerate(left):
                while order:
                    kind, chunk, batch = order[0]
                    part = part_of(schedule, stage, chunk, stages=stages)
                    needed = {
                        "F": [("F", part - 1)] if part else [],
                        "W": [("I", part)],
                    }.get(kind, [("F", part), *([("I", part + 1)] if part < last else [])])
                    if any((*one, batch) not in done for one in needed):
                        break
                    for each in {"B": "IW"}.get(kind, kind):
                        assert (each, part, batch) not in done
                        done.add((each, part, batch))
                    order.pop(0)
                    moved = True
        assert not any(left), "a stage waits for ever"
        assert len(done) == 3 * (last + 1) * batches or schedule == "1f1b"


def test_first_operations_are_those_of_the_sources() -> None:
    """A stage of each, as torch.distributed.pipelining 2.13 and AMD-AGI/Primus@fd1eeabb list it for 4 stages and 8
    micro-batches: chunk and micro-batch behind the kind."""
    starts = {
        "zb1p": (1, 1, "F00 F01 F02 I00 F03 I01 W00 F04 I02 W01"),
        "zbv": (2, 1, "F00 F01 F02 F03 F04 F10 F05 F11 I10 W10 F12 I11"),
        "dualpipe-v": (2, 1, "F00 F01 F02 F03 F04 F10 F05 F11 I10 W10 F12 I11 W11 F13 F06 B12"),
        "v-half": (2, 1, "F00 F01 F02 F03 F10 F11 I10 W10 F12 I11"),
        "v-min": (2, 1, "F00 F01 F10 F11 I10 W10 F02 I11 W11 I00"),
    }
    for schedule, (chunks, stage, expected) in starts.items():
        order = schedule_orders(schedule, stages=4, chunks=chunks, micro_batches=8)[stage]
        found = " ".join(f"{kind}{chunk}{batch}" for kind, chunk, batch in order[: expected.count(" ") + 1])
        assert found == expected, schedule


def test_memory_is_that_of_the_sources() -> None:
    """Activations of whole stages on the first one, what waits for W counted whole: p in ZB1P and ZBV, about a half and
    a third of that in V-half and V-min (arXiv 2405.15362)."""
    for stages in (4, 8, 12):
        most = dict[str, float]()
        for schedule in ("zb1p", "zbv", "v-half", "v-min"):
            chunks = 1 if schedule == "zb1p" else 2
            order = schedule_orders(schedule, stages=stages, chunks=chunks, micro_batches=4 * stages)[0]
            held = held_at_most(order, chunks=chunks)
            most[schedule] = max(sum(one.whole) + sum(one.waiting) for one in held) / chunks
        assert (most["zb1p"], most["zbv"]) == (stages, stages)
        assert stages / 2 <= most["v-half"] <= stages / 2 + 2
        assert stages / 3 <= most["v-min"] <= stages / 3 + 2


def test_more_micro_batches_hold_no_more() -> None:
    """What ZB1P holds is told from as many micro-batches as its warm-up and two rounds: the same states as of all, of
    every stage, whatever their number."""
    for stages, chunks, rounds in product((2, 3, 4, 7), (1, 2, 3, 5), (1, 2, 3, 4, 7, 11)):
        batches = stages * rounds if chunks > 1 else stages + rounds - 1
        shape = {"stages": stages, "chunks": chunks, "micro_batches": batches}
        for stage, order in enumerate(schedule_orders("zb1p", **shape)):
            assert stage_held("zb1p", stage, **shape) == held_at_most(order, chunks=chunks), (stage, shape)


def test_a_shape_that_a_schedule_lacks_is_refused() -> None:
    """By name, with what it has."""
    for schedule, stages, chunks, batches, words in (
        ("zbv", 4, 1, 8, "2 chunks"),
        ("dualpipe-v", 4, 2, 7, "8 micro-batches"),
        ("zb1p", 4, 1, 3, "4 micro-batches"),
        ("zb1p", 4, 2, 6, "not divisible"),
    ):
        with pytest.raises(ValueError, match=words):
            schedule_orders(schedule, stages=stages, chunks=chunks, micro_batches=batches)


def test_whole_backward_passes_leave_nothing_waiting() -> None:
    """1F1B by the same function: as many chunks as its warm-up."""
    order = schedule_orders("1f1b", stages=4, chunks=1, micro_batches=8)[0]
    assert order[:4] == tuple(Operation("F", 0, batch) for batch in range(4))
    forward, backward = held_at_most(order, chunks=1)
    assert [(one.kind, one.whole, one.waiting) for one in (forward, backward)] == [("F", (4,), (0,)), ("B", (4,), (0,))]


def test_backward_passes_hold_most_in_their_first_or_last_block() -> None:
    """ZB1P on the last of 4 stages: 1 micro-batch whole and 3 waiting as an I begins, 4 waiting but for a block as it
    ends; the LM head comes before that."""
    order = schedule_orders("zb1p", stages=4, chunks=1, micro_batches=8)[3]
    held = {(one.kind, one.whole, one.waiting, one.ending) for one in held_at_most(order, chunks=1)}
    assert held == {("F", (1,), (3,), (0,)), ("I", (1,), (3,), (0,)), ("I", (0,), (4,), (1,))}


def test_what_lies_between_two_states_is_not_listed() -> None:
    """Of micro-batches of which each waits in the place of one that is whole, the first and the last state alone."""
    several = [Held("I", (4 - waiting,), (waiting,), (0,)) for waiting in range(4)]
    assert undominated(several) == (several[3], several[0])
    bent = Held("I", (3,), (2,), (0,))
    assert set(undominated([*several, bent])) == {several[0], bent, several[3]}
