"""Bytes and time of dispatch against numbers computed by hand."""

import math
from dataclasses import replace

import pytest

from axonn_tune.cost import collectives
from axonn_tune.cost.collectives import copies_leaving, distinct_destinations, lines, route
from axonn_tune.cost.price import Detail, price
from axonn_tune.errors import UnknownNameError
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.dispatchers import default_dispatcher, find_dispatcher
from axonn_tune.grid import Grid, GroupShape
from axonn_tune.job import Job, Layout
from axonn_tune.program.feasibility import broken_constraints
from axonn_tune.program.operations import Collective, MatMul, Routing
from axonn_tune.report.collective_costs import line_sentences
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.workload import Workload
from tests.unit.cost.test_experts import MEGATRON, model_of

V3 = Routing(256, 8)
LIMITED = Routing(256, 8, groups=8, chosen=4)
MACHINE = load_machine("dgx-h100").document


def test_two_of_four_experts_on_two_ranks() -> None:
    """Both on one rank: 1 of 6 pairs for each rank, so 2·(1 − 1/6)."""
    assert distinct_destinations(2, Routing(4, 2)) == pytest.approx(5 / 3)


def test_one_group_of_two() -> None:
    """Both experts in the chosen group of two: one node of two, and both of its ranks."""
    routing = Routing(4, 2, groups=2, chosen=1)
    assert [distinct_destinations(n, routing) for n in (1, 2, 4)] == pytest.approx([1, 1, 2])


def test_nodes_of_deepseek_v3() -> None:
    """With and without routing groups.

    Four nodes hold 2 of 8 groups each: none, one or both are chosen in 15, 40 and 15 of 70 cases, and the 8 experts
    then miss them with 1, C(96, 8)/C(128, 8) = 0.0926 and 0.0031: 4·(1 − 0.2679).
    """
    assert [distinct_destinations(n, V3) for n in (2, 4, 8)] == pytest.approx([1.99, 3.61, 5.29], abs=0.006)
    assert [distinct_destinations(n, LIMITED) for n in (2, 4, 8)] == pytest.approx([1.926, 2.928, 3.629], abs=0.001)


def test_what_does_not_divide_is_spread() -> None:
    """Experts over three domains: each of 8 misses one with 2/3. Six of 48 and 8 groups: as if without groups."""
    assert distinct_destinations(3, V3) == pytest.approx(3 * (1 - (2 / 3) ** 8))
    assert distinct_destinations(6, Routing(48, 2, 8, 4)) == distinct_destinations(6, Routing(48, 2))


def test_slowest_level_and_the_fixed_time_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks on two nodes of two, one expert a rank, K = 2, tokens of 60 bytes.

    All-to-all: 1.5·60 bytes leave a rank at 100, 1·60 of them the node, whose link of 20 has two senders: 1 + 60/10.
    Distinct ranks are 2, nodes 5/3: 1·60 bytes leave a rank, 5/6·60 = 50 the node: 2 + 50/10.
    """
    copies = replace(find_dispatcher("alltoall"), reached_node=1.0, reached_network=1.0, dispatch_s=1.0, combine_s=2.0)
    nodes = [(2, 100e-9), (None, 20e-9)]
    tiers = tuple(
        tier.model_copy(update={"ranks": ranks, "bandwidth_gb_per_s": bandwidth, "measured": None})
        for tier, (ranks, bandwidth) in zip(MACHINE.tiers, nodes, strict=True)
    )
    machine, routing = MACHINE.model_copy(update={"tiers": tiers}), Routing(4, 2)
    path = route(GroupShape(((4, 1),)), tiers, 4)
    assert [copies_leaving(n, copies, routing) for n in (4, 2)] == pytest.approx([1.5, 1.0])
    distinct = replace(copies, counting="rank")
    assert [copies_leaving(n, distinct, routing) for n in (4, 2)] == pytest.approx([1.5, 5 / 6])
    for dispatcher, kind, size, seconds in ((copies, "dispatch", 120, 7.0), (distinct, "combine", 60, 7.0)):
        monkeypatch.setattr(collectives, "profiled_dispatcher", lambda *_, one=dispatcher: one)
        (line,) = lines((kind, routing), path, machine)
        assert line.latency_s + size / line.bandwidth_bytes_per_s == pytest.approx(seconds)


def _priced(dispatcher: str, tensor: int = 1) -> Detail:
    """Two layers of experts, 2 of 8, width 4096."""
    framework = find_framework("megatron-core").with_step(dispatcher=dispatcher, imbalance=1.0)
    job = Job(model_of("moe*2"), MACHINE, Workload(global_batch=64, sequence_length=2048), framework)
    grid = Grid(x=tensor, data=16 // tensor, expert=4, expert_tensor=tensor, order=MEGATRON)
    return price(job, Layout(grid, 1, "none", 0))


def test_explanations_say_what_a_dispatcher_sends() -> None:
    """Its copies, and the groups of all collectives of experts."""
    said = "\n".join(line_sentences(_priced("deepep", tensor=2)))
    assert "dispatch over EP, deepep: each token once a rank and node, 2 of 8 experts" in said
    assert "all_gather over ETP" in said


def _sent(dispatcher: str, tensor: int = 1) -> dict[tuple[str, str, str, str], float]:
    """Bytes of each collective of a layer of experts, by op, axis, phase and layer."""
    terms = _priced(dispatcher, tensor).terms
    return {
        (one.op, one.axis, one.phase, one.layer): one.bytes
        for one in terms
        if isinstance(one.collective, Collective) and one.layer.startswith("moe.") and "shared" not in one.layer
    }


def test_bytes_of_each_dispatcher() -> None:
    """T = 2048 tokens a rank, K = 2, H = 4096, BF16 (arXiv 2603.07685, section 2; Megatron-LM, token_dispatcher.py).

    alltoall: T·K·H·2 there and back in both passes, T·K·4 of probabilities beside a dispatch, counts of 8 experts
    from 4 ranks. DeepEP: each token once. allgather: all tokens of 4 ranks, their map (1 byte) and probabilities (4) by
    expert; combined in FP32.
    """
    token, tokens = 4096 * 2, 2048
    both = {("forward", "dispatch"), ("forward", "combine"), ("backward", "dispatch"), ("backward", "combine")}
    for name, size in (("alltoall", 2 * tokens * token), ("deepep", tokens * token)):
        found = _sent(name)
        moved = {(phase, op): bytes_ for (op, _, phase, _), bytes_ in found.items() if op in ("dispatch", "combine")}
        assert moved == dict.fromkeys(both, size)
        others = {(op, phase): size for (op, _, phase, layer), size in found.items() if layer == "moe.probabilities"}
        probabilities = {("all_to_all", phase): tokens * 2 * 4.0 for phase in ("forward", "backward")}
        assert others == ({**probabilities, ("all_gather", "forward"): 8 * 8 * 4.0} if name == "alltoall" else {})
    found = _sent("allgather")
    every, axis = 4 * tokens, "expert_tensorexpert"
    assert found["all_gather", axis, "forward", "moe.dispatch"] == every * token
    assert found["reduce_scatter", axis, "backward", "moe.dispatch"] == every * token
    assert found["reduce_scatter", axis, "forward", "moe.combine"] == every * token * 2
    assert found["all_gather", axis, "forward", "moe.probabilities"] == every * 8 * 5.0


def test_expert_tensor_parallelism_gathers_what_arrived() -> None:
    """Two ranks split each expert: T·K·2·H·2 bytes after a dispatch of half the tokens, which x splits, and back."""
    found, size = _sent("alltoall", tensor=2), 2048 // 2 * 2 * 2 * 4096 * 2
    for phase in ("forward", "backward"):
        assert (
            found["all_gather", "expert_tensor", phase, "moe.dispatch" if phase == "forward" else "moe.combine"] == size
        )
    assert found["reduce_scatter", "expert_tensor", "forward", "moe.combine"] == size


NATURAL_OF_4 = 1.0 + 0.4 * math.sqrt(math.log(4) / math.log(8) * 32768 / 8192) * (
    1.0 + 1.28 * math.sqrt(2.0 * math.log(4) / (4 * 2)) / (2.0 * math.log(4))
)
"""Of 4 ranks with 2,048 tokens each; at the step's end 4 such groups wait for the fullest, after 4 micro-batches of 2
layers."""


@pytest.mark.parametrize(
    ("ranks", "given", "imbalance", "fullest"),
    [
        (4, {}, NATURAL_OF_4, NATURAL_OF_4 * 1.47),
        (1, {}, 1.0, 1.0),
        (4, {"imbalance": 1.0}, 1.0, 1.0),
        (4, {"capacity_factor": 1.0}, 1.0, 1.0),
        (4, {"capacity_factor": 2.0}, NATURAL_OF_4, 2.0),
        (4, {"imbalance": 1.2}, 1.2, 1.2 * 1.47),
        (2, {"imbalance": 3.0}, 2.0, 2.0),
    ],
)
def test_token_imbalance(ranks: int, given: dict[str, float], imbalance: float, fullest: float) -> None:
    """Natural routing has a factor on GEMMs and bytes, memory its upper end: no more than all tokens, or a capacity.

    16 ranks of 2048 tokens, 2 of 8 experts: FC1 has 2·2048·ranks/8 rows of an expert, times the factor.
    """
    framework = find_framework("megatron-core").with_step(dispatcher="alltoall", **given)
    job = Job(model_of("moe*2"), MACHINE, Workload(global_batch=64, sequence_length=2048), framework)
    found = price(job, Layout(Grid(data=16, expert=ranks, order=MEGATRON), 1, "none", 0))
    rows = next(
        float(step.m.evaluate(found.values))
        for step, _ in found.program.calls()
        if isinstance(step, MatMul) and (step.layer, step.phase) == ("moe.fc1", "forward")
    )
    assert rows == pytest.approx(2 * 2048 * ranks / 8 * imbalance)
    kept = {array.name: array.size_bytes for step, _ in found.program.calls() for array in step.makes}
    assert float(kept["dispatched tokens"].evaluate(found.values)) == pytest.approx(2 * 2048 * 4096 * 2 * fullest)


def test_intervals_hold_the_spread_of_natural_routing() -> None:
    """A step of natural routing is less certain than one with forced load balancing; without EP they are one."""
    core, workload = find_framework("megatron-core"), Workload(global_batch=64, sequence_length=2048)

    def width(ranks: int, framework: Framework) -> float:
        layout = Layout(Grid(data=16, expert=ranks, order=MEGATRON), 1, "none", 0)
        return price(Job(model_of("moe*2"), MACHINE, workload, framework), layout).half_width

    forced = core.with_step(imbalance=1.0)
    assert width(8, core) > width(8, forced) + 5e-4
    assert width(1, core) == width(1, forced)


def test_a_stated_imbalance_is_never_taken_for_natural_routing() -> None:
    """Guards 1.4, which natural routing has over 8 ranks: over others a step is that of 1.4, and grows with it."""
    workload, layout = (
        Workload(global_batch=64, sequence_length=2048),
        Layout(Grid(data=16, expert=16, order=MEGATRON), 1, "none", 0),
    )

    def step_s(imbalance: float | None) -> float:
        framework = find_framework("megatron-core").with_step(imbalance=imbalance)
        return price(Job(model_of("moe*2"), MACHINE, workload, framework), layout).iteration_s

    below, stated, above = map(step_s, (1.3999, 1.4, 1.4001))
    assert below < stated < above < below * 1.001
    assert step_s(None) not in (below, stated, above)


@pytest.mark.parametrize(
    ("ranks", "domain", "name"),
    [
        (8, 8, "alltoall"),
        (16, 8, "deepep"),
        (8, 4, "deepep"),
        (64, 72, "hybridep"),
        (1, 72, "alltoall"),
        (4, None, "alltoall"),
    ],
)
def test_default_dispatcher(ranks: int, domain: int | None, name: str) -> None:
    """All-to-all over up to 8 ranks of a node, DeepEP beyond, HybridEP in a rack; what there is none of, the first."""
    assert default_dispatcher(("alltoall", "deepep", "hybridep"), ranks=ranks, domain=domain) == name
    assert default_dispatcher(("alltoall",), ranks=ranks, domain=domain) == "alltoall"


def test_experts_on_every_rank_are_permuted_once_by_all_gathers() -> None:
    """A search compares what each dispatcher does to rows that stay; kernels of several ranks are refused on one."""
    core, workload = find_framework("megatron-core"), Workload(global_batch=64, sequence_length=2048)
    grid = Grid(data=16, order=MEGATRON)

    def step_s(name: str) -> float:
        job = Job(model_of("moe*2"), MACHINE, workload, core.with_step(dispatcher=name))
        return price(job, Layout(grid, 1, "none", 0)).iteration_s

    assert core.compared_dispatchers(1, 1, 8) == ("alltoall", "allgather")
    assert core.compared_dispatchers(1, 2, 72) == ("hybridep", "alltoall", "allgather")
    assert core.compared_dispatchers(2, 1, 8) == ("alltoall",)
    assert step_s("allgather") < step_s("alltoall")
    flex = core.training(model_of("moe*2")).with_step(dispatcher="deepep")
    broken = broken_constraints(grid, model_of("moe*2"), workload, flex, micro_batch=1)
    assert broken == ["dispatcher deepep needs EP·ETP above 1"]
    split = Grid(data=8, x=2, expert_tensor=2, order=MEGATRON)
    assert broken_constraints(split, model_of("moe*2"), workload, flex, micro_batch=1) == []


def test_a_group_in_a_rack_does_not_straddle_two() -> None:
    """256 GPUs of racks of 72 are four times 64, with 64 of 72 network links; 144 are two whole racks."""
    rack = load_machine("gb200-nvl72").document
    share = rack.placing(256)
    assert [tier.ranks for tier in share.tiers] == [64, None]
    assert share.tiers[1].bandwidth_gb_per_s == pytest.approx(rack.tiers[1].bandwidth_gb_per_s * 64 / 72)
    assert rack.placing(144) is rack
    assert MACHINE.placing(12) is MACHINE


def test_unknown_dispatcher_names_the_nearest() -> None:
    """A slip of the keyboard is answered with what was meant."""
    with pytest.raises(UnknownNameError, match="hybridep"):
        find_dispatcher("hybriddep")
