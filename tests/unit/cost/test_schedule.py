"""The schedule: nothing lost, nothing early, the extrapolation holds, and overlap only ever helps."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pytest

from axonn_tune.cost.price import detail_of, price
from axonn_tune.cost.pricer import Pricer
from axonn_tune.cost.recorder import TermKey
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import FUSED
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.program.schedule import ISSUE, SYNC
from axonn_tune.program.step import Stage, blocks_in, chunks_of
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.machine import Software
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.vocabulary import OVERLAPS, CudaGraphs, Overlap
from tests.unit.cost.machines import two_tier_machine
from tests.unit.cost.oracle import SpelledOut
from tests.unit.small import small_model

WORKLOAD = Workload(global_batch=48 * 8, sequence_length=64)
GRID = Grid(2, 2, 2, 2)
MICRO_BATCH = 12

LAYOUTS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("axonn-tune", {"x": 2, "y": 2, "z": 2, "data": 2}, {}),
    ("axonn-tune", {"z": 4, "data": 2}, {"kept": 3}),
    ("axonn-tune", {"z": 4, "data": 2}, {"kept": 2, "recompute": "full"}),
    ("axonn-tune", {"z": 4, "data": 2}, {"kept": 1, "recompute": "selective"}),
    ("axonn-tune", {"x": 4, "y": 2}, {"split_micro_batch": True}),
    ("axonn-tune", {"x": 4, "data": 4}, {"overlaps": ()}),
    ("axonn-tune", {"x": 2, "data": 8}, {"shard_optimizer_over_data": True}),
    ("axonn-tune", {"data": 8}, {"layers": 1}),
    ("axonn-tune", {"y": 4, "z": 2}, {"layers": 2, "recompute": "full"}),
    ("axonn-tune", {}, {}),
    ("axonn", {"x": 2, "y": 2, "z": 2, "data": 2}, {"recompute": "full"}),
    ("megatron-axonn", {"x": 2, "z": 4, "data": 2}, {"recompute": "full"}),
    ("megatron-core", {"x": 4, "data": 4}, {"recompute": "selective"}),
    ("megatron-core", {"x": 2, "context": 2, "data": 4}, {}),
    ("megatron-core", {"x": 2, "z": 2, "data": 4}, {"overlaps": ("gather_prefetch",)}),
    ("torchtitan", {"x": 4, "z": 4}, {"recompute": "full"}),
    ("torchtitan", {"z": 8, "data": 2}, {"overlaps": ("data_parallel",)}),
    ("fsdp", {"z": 16}, {}),
    ("deepspeed", {"x": 2, "z": 4, "data": 2}, {}),
    ("megatron-2021", {"x": 4, "data": 4}, {"recompute": "full"}),
]
"""Framework, sizes of axes, and what else is asked for."""


def oracle_of(name: str, sizes: dict[str, int], *, layers: int = 3, kept: int | None = 0, **asked: Any) -> Pricer:
    """A small layout in three micro-batches, on a host that is late for some of them."""
    model = small_model(layers=layers, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=2048)
    recompute, chunks = asked.pop("recompute", "none"), asked.pop("chunks", 1)
    framework = find_framework(name).capturing(asked.pop("cuda_graphs", ()))
    times = {"dispatch_us": asked.pop("dispatch_us", 4.0), "operation_us": asked.pop("operation_us", 1.0)}
    software = Software(**times, collective_us=2.0)
    grid = Grid(**sizes, order=framework.axes)
    batch = 3 * 4 * grid.batch_shares * max(1, 2 * grid.pipeline * (grid.pipeline > 1))
    workload = Workload(global_batch=batch, sequence_length=128, **asked)
    configuration = Layout(grid, 4, recompute, kept, chunks)
    return Pricer(Job(model, two_tier_machine(), workload, framework), configuration, software)


@pytest.mark.parametrize(("name", "sizes", "asked"), LAYOUTS)
def test_a_step_is_that_of_the_oracle(name: str, sizes: dict[str, int], asked: dict[str, Any]) -> None:
    """Guards the replay: each block and micro-batch spelled out ends when it says, and waits for the same."""
    pricer = oracle_of(name, sizes, **asked)
    priced, (step_s, waits_s) = detail_of(pricer), SpelledOut(pricer).step()
    assert priced.iteration_s - priced.contended_s == pytest.approx(step_s, rel=1e-12)
    exposed_s: defaultdict[TermKey, float] = defaultdict(float)
    for term in priced.terms:
        exposed_s[term.op, term.axis, term.phase, term.layer] += term.exposed_s
    assert {key for key, wait_s in exposed_s.items() if wait_s > 0} == set(waits_s)
    assert [exposed_s[key] for key in waits_s] == pytest.approx(list(waits_s.values()), rel=1e-9)


@pytest.mark.parametrize(
    ("name", "sizes", "chunks"),
    [
        ("megatron-core", {"x": 2, "data": 2, "pipeline": 2}, 1),
        ("megatron-core", {"x": 2, "data": 2, "pipeline": 2}, 2),
        ("torchtitan", {"z": 4, "pipeline": 4}, 1),
        ("axonn-tune", {"z": 2, "data": 2, "pipeline": 2}, 2),
    ],
)
def test_passes_of_stages_are_those_of_the_oracle(name: str, sizes: dict[str, int], chunks: int) -> None:
    """Guards the replay of pipeline stages: passes of each chunk begin with idle streams, and end when it says."""
    pricer = oracle_of(name, sizes, layers=3 * chunks * sizes["pipeline"], chunks=chunks)
    schedule, stages = pricer.schedule, sizes["pipeline"]
    for kind in pricer.kinds:
        oracle = SpelledOut(pricer, kind.numbers[0])
        parts = list(chunks_of(Stage(kind.numbers[0] == 0, kind.numbers[-1] == stages - 1), kind.blocks))
        for (part, contents), found in zip(parts, kind.chunks, strict=True):
            layers = blocks_in(contents)
            ahead_s, behind_s = oracle.chunk(part, layers, 0, schedule.micro_batch)
            last_s = oracle.chunk(part, layers, 0, schedule.last_micro_batch)[1]
            host_s = found.host_s / oracle.values["A"]
            assert found.forward_s + found.backward_s == pytest.approx(ahead_s + behind_s + host_s, rel=1e-12)
            assert found.last_backward_s - found.backward_s == pytest.approx(last_s - behind_s, abs=1e-12 * last_s)


@pytest.mark.parametrize("sizes", [{"x": 2, "data": 2}, {"x": 2, "data": 2, "pipeline": 2}])
def test_cuda_graphs_take_the_wait_for_the_host_and_nothing_else(sizes: dict[str, int]) -> None:
    """Guards CUDA graphs: a captured layer is as with a host that is never late, attention alone in between; what the
    software adds to an operation is gone, too, but of the optimizer."""

    def priced(*scopes: CudaGraphs, **host: float) -> tuple[float, float, float, float, float]:
        host = {"dispatch_us": 40.0, "operation_us": 0.0} | host
        found = detail_of(oracle_of("megatron-core", sizes, layers=4, cuda_graphs=scopes, **host))
        communication_s, memory_bytes = found.communication_s, found.memory.total_bytes
        return found.iteration_s, found.compute_s, communication_s, memory_bytes, found.host_s

    never_late, late = priced(dispatch_us=0.0), priced()
    assert late[-1] > 0.0 == never_late[-1]
    assert priced("full") == priced("attn", "mlp") == priced("full_iteration") == never_late
    longer = [priced(*one, dispatch_us=0.0, operation_us=1.0)[0] for one in (("full_iteration",), ("full",), ())]
    assert never_late[0] < longer[0] < longer[1] < longer[2]
    attention, mlp = priced("attn"), priced("mlp")
    for some in (attention, mlp):
        assert never_late[0] < some[0] < late[0]
        assert 0.0 < some[-1] < late[-1]
        assert some[1] - some[-1] == pytest.approx(late[1] - late[-1], rel=1e-12)
        assert some[2:4] == late[2:4]
    if "pipeline" not in sizes:
        assert attention[0] - attention[-1] == pytest.approx(late[0] - late[-1], rel=1e-12)


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("kept", [0, 1, 2, 5])
@pytest.mark.parametrize("overlaps", [OVERLAPS, (), OVERLAPS[:1], OVERLAPS[2:4]])
def test_every_collective_of_the_program_is_scheduled_as_often_as_it_says(
    recompute: Recompute, kept: int, overlaps: tuple[Overlap, ...]
) -> None:
    """Guards the one idea: the schedule only moves the program's operations, it adds and drops none."""
    model = load_model("nano", overrides=["layers=5"]).document
    for split in (False, True):
        workload = WORKLOAD.model_copy(update={"overlaps": overlaps, "split_micro_batch": split})
        configuration = Layout(GRID, MICRO_BATCH, recompute, kept)
        pricer = Pricer(Job(model, two_tier_machine(), workload), configuration, FUSED)
        priced, oracle = detail_of(pricer), SpelledOut(pricer)
        sent: Counter[tuple[str, str, str, str]] = Counter()
        for part in oracle.parts():
            for one in (pricer.schedule.collectives[number] for code, number, _ in part if code in (SYNC, ISSUE)):
                calls = 1 if one.role == "weight" else int(float(one.calls.evaluate(priced.values)))
                sent[one.kind, one.axis, one.phase, one.layer] += calls
        expected = {(term.op, term.axis, term.phase, term.layer): 0 for term in priced.terms}
        for term in priced.terms:
            expected[term.op, term.axis, term.phase, term.layer] += term.count
        assert {key: count for key, count in sent.items() if count} == {k: c for k, c in expected.items() if c}


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("kept", [0, 3, 12])
@pytest.mark.parametrize("outer", [(10.0, 80.0), (5.0, 2.0), (200.0, 80.0), (10.0, 0.02)])
def test_extrapolated_steps_equal_unrolled_ones(recompute: Recompute, kept: int, outer: tuple[float, float]) -> None:
    """Guards the shortcut of replaying two blocks: every block replayed gives the same step."""
    model = load_model("nano", overrides=["layers=12"]).document
    machine = two_tier_machine(outer=outer)
    for grid in (GRID, Grid(1, 1, 16, 1), Grid(1, 1, 1, 16), Grid(4, 1, 2, 2, order=("z", "x", "data", "y"))):
        configuration = Layout(grid, MICRO_BATCH, recompute, kept)
        pricer = Pricer(Job(model, machine, WORKLOAD), configuration, FUSED)
        assert SpelledOut(pricer).step()[0] == pytest.approx(detail_of(pricer).iteration_s, rel=2e-3)


def test_without_overlap_a_step_is_computation_plus_communication() -> None:
    """Guards the synchronous twin: every second of communication is exposed."""
    model, machine = load_model("nano").document, two_tier_machine()
    workload = WORKLOAD.model_copy(update={"overlaps": ()})
    priced = price(Job(model, machine, workload), Layout(GRID, MICRO_BATCH, "full"))
    assert priced.iteration_s == pytest.approx(priced.compute_s + priced.communication_s)
    assert sum(term.exposed_s for term in priced.terms) == pytest.approx(priced.communication_s)


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_each_overlap_helps_or_does_nothing(overlap: Overlap, recompute: Recompute) -> None:
    """Guards each overlap by itself against the synchronous twin, and the sum of exposed times."""
    model, machine = load_model("nano").document, two_tier_machine()
    for grid in (GRID, Grid(1, 1, 8, 2), Grid(2, 8, 1, 1), Grid(1, 1, 1, 16)):
        steps = []
        for overlaps in ((), (overlap,)):
            workload = WORKLOAD.model_copy(update={"overlaps": overlaps, "split_micro_batch": True})
            priced = price(Job(model, machine, workload), Layout(grid, MICRO_BATCH, recompute), software=FUSED)
            steps.append(priced.iteration_s)
            assert sum(term.exposed_s for term in priced.terms) == pytest.approx(priced.exposed_communication_s)
        assert steps[1] <= steps[0] * (1 + 1e-12)
