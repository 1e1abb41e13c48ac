"""Pipeline stages through the whole engine: bubbles, messages, memory in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest

from axonn_tune.cost.compute import ComputeClock
from axonn_tune.cost.price import Detail, price
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import FUSED, Framework, PipelineSchedule
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.operations import Collective, Computation
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.workload import Recompute, Workload
from tests.unit.cost.machines import two_tier_machine
from tests.unit.small import small_model

RUNTIME, CORE, OLD = (find_framework(name) for name in ("axonn-tune", "megatron-core", "megatron-2021"))
MODEL = small_model(layers=24, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=2048, max_sequence_length=512)
ENDS = ("embedding", "position", "head", "head.norm", "loss", "optimizer", "gradient_norm")
INSTANT = two_tier_machine(nodes=False, inner=(1e-9, 1e12))


def priced(
    framework: Framework,
    *,
    machine: Machine = INSTANT,
    micro_batches: int = 8,
    chunks: int = 1,
    recompute: Recompute = "none",
    parts: tuple[int, ...] | None = None,
    micro_batch: int = 1,
    **sizes: int,
) -> Detail:
    """The model above on kernels as programs say, in so many micro-batches."""
    grid = Grid(**sizes, order=(*(axis for axis in framework.axes if axis != "pipeline"), "pipeline"))
    batch = micro_batches * micro_batch * grid.data * grid.z
    workload = Workload(global_batch=batch, sequence_length=512)
    configuration = Layout(grid, micro_batch, recompute, chunks=chunks, parts=parts)
    return price(Job(MODEL, machine, workload, framework), configuration, software=FUSED)


@pytest.fixture
def equal_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding, LM head and the end of the step cost nothing, and neither does a message's launch."""
    known = ComputeClock.call_s

    def call_s(clock: ComputeClock, step: Computation) -> object:
        return 0.0 * known(clock, step) if step.layer in ENDS else known(clock, step)

    monkeypatch.setattr(ComputeClock, "call_s", call_s)
    monkeypatch.setattr("axonn_tune.cost.pipeline.transfer_time_s", lambda *_, **__: 0.0)
    monkeypatch.setattr("axonn_tune.cost.replay.collective_time_s", lambda *_: 0.0)


@pytest.mark.usefixtures("equal_stages")
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("name", ["axonn-tune", "megatron-core"])
def test_bubble_of_equal_stages(name: str, stages: int, groups: int, chunks: int) -> None:
    """Guards the step of a pipeline: with equal stages and free messages the bubble over ideal computation is
    (p-1)/m, interleaved (p-1)/(v·m). Source: Narayanan et al., arXiv 2104.04473, section 2.2."""
    found = priced(find_framework(name), micro_batches=groups * stages, chunks=chunks, pipeline=stages)
    share = (stages - 1) / (chunks * groups * stages)
    assert found.bubble_s / found.compute_s == pytest.approx(share, rel=1e-9)
    assert found.iteration_s == pytest.approx(found.compute_s * (1 + share), rel=1e-9)
    assert [one.bubble_s for one in found.stages] == pytest.approx([found.bubble_s] * stages)


def sends(framework: Framework, **sizes: int) -> tuple[int, float]:
    """Messages of the busiest stage in a step, and bytes of one."""
    found = priced(framework, machine=two_tier_machine(), micro_batches=8, micro_batch=2, **sizes)
    (term,) = (one for one in found.terms if one.op == "send")
    return term.count, term.bytes


@pytest.mark.parametrize(
    ("data", "pipeline", "network", "senders"), [(1, 4, 0, 1), (2, 4, 1, 2), (2, 2, 0, 1), (8, 2, 1, 4), (1, 8, 1, 1)]
)
def test_messages_that_leave_a_node_are_waited_for(data: int, pipeline: int, network: int, senders: int) -> None:
    """Guards the time of a message: with stages of 2 ranks in nodes of 4 every second one leaves its node, and 2 ranks
    send it at once; where a node has the whole pipeline none does, where it is one stage or less all its ranks do."""
    machine = two_tier_machine()
    assert machine.tiers[0].ranks == 4
    found = priced(CORE, machine=machine, data=data, pipeline=pipeline)
    (term,) = (one for one in found.terms if one.op == "send")
    tier = machine.tiers[network]
    assert (term.tier, term.line.bandwidth_bytes_per_s) == (tier.name, tier.bandwidth_bytes_per_s / senders)


def test_messages_between_stages() -> None:
    """Guards bytes between stages: b·S·H elements of BF16 with tensor parallelism alone, from each rank of x; 1/x of
    it with sequence parallelism (Megatron-Core's schedules.py), or scattered over x and gathered again
    (arXiv 2104.04473, section 4.1); H_y and S/context of it are split as the residual stream is."""
    whole = 2 * 2 * 512 * 512
    alone = CORE.with_step(sequence_parallel=False)
    assert sends(alone, x=4, pipeline=2) == (8, whole)
    assert sends(CORE, x=4, pipeline=2) == (8, whole / 4)
    assert sends(OLD, x=4, pipeline=2) == (8, whole / 4)
    assert sends(RUNTIME, x=2, y=2, pipeline=2) == (8, whole / 2)
    assert sends(CORE, x=2, context=2, pipeline=2) == (8, whole / 4)
    assert sends(RUNTIME, pipeline=4)[0] == 16, "a stage in the middle sends both ways"


def test_what_is_scattered_is_gathered_again() -> None:
    """Guards the price of scattering: the message is shorter, and an all-gather over x follows."""
    machine = two_tier_machine()
    scattered, plain = (
        priced(replace(OLD, schedule=PipelineSchedule(scattered=one)), machine=machine, x=4, pipeline=2)
        for one in (True, False)
    )
    times = [next(one for one in found.terms if one.op == "send") for found in (scattered, plain)]
    assert times[0].bytes == times[1].bytes / 4
    assert times[0].seconds / times[0].count > machine.tiers[1].latency_us * 1e-6


@pytest.mark.parametrize(("stages", "micro_batches"), [(4, 16), (4, 2), (8, 8)])
def test_stages_hold_as_many_micro_batches_as_are_in_flight(stages: int, micro_batches: int) -> None:
    """Guards memory of stages: stage r of 1F1B holds the activations of p - r micro-batches, at most all of them
    (Megatron-Core's warm-up), so the first holds as much as a rank with all blocks does."""
    found = priced(CORE, micro_batches=micro_batches, pipeline=stages)
    whole = saved_bytes(priced(CORE, micro_batches=micro_batches))
    held = [sum(size for name, size in one.memory.items if name.startswith("saved")) for one in found.stages]
    expected = [min(stages - number, micro_batches) / stages * whole for number in range(stages)]
    assert held == pytest.approx(expected)
    waiting = [dict(one.memory.items)["messages between stages"] / (512 * 512 * 2) for one in found.stages]
    assert waiting == [3, *[6] * (stages - 2), 3], "three messages per neighbour, in BF16"


def saved_bytes(found: Detail) -> float:
    """Activations kept for the backward pass."""
    return float(sum(size for name, size in found.memory.items if name.startswith("saved")))


def test_tied_embeddings_meet_between_the_ends() -> None:
    """Guards the ends: the all-reduce of a tied embedding's gradient is priced over the way between first and last
    stage, once a step."""
    tied = MODEL.model_copy(update={"tied_embeddings": True})
    workload = Workload(global_batch=8, sequence_length=512)
    grid = Grid(data=2, pipeline=4, order=("x", "context", "z", "data", "pipeline"))
    found = price(Job(tied, two_tier_machine(), workload, CORE), Layout(grid, 1, "none"), software=FUSED)
    (term,) = (one for one in found.terms if one.axis == "ends")
    assert (term.op, term.count, term.group, term.bytes) == ("all_reduce", 1, 2, 4 * 512 * 512)
    assert isinstance(term.collective, Collective)
