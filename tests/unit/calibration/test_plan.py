"""What a calibration measures."""

from __future__ import annotations

import pytest

from axonn_tune.calibration.measure import MOST_SHAPES, build_plan, group_shapes, seconds_of
from axonn_tune.errors import UsageError
from axonn_tune.grid import AXES, Grid, distinct_orders, factorizations
from axonn_tune.ranking.inputs import make_workload
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.machine import Backend
from axonn_tune.units import GIB
from tests.unit.calibration.synthetic import plan


@pytest.mark.parametrize("world", [2, 4, 6, 8, 12])
def test_shapes_are_those_of_the_grids(world: int) -> None:
    """Guards completeness: every group over one axis that some grid of the world has, and no other."""
    wanted = set()
    for sizes in factorizations(world).tolist():
        for order in distinct_orders(tuple(sizes)):
            grid = Grid(**dict(zip(AXES, sizes, strict=True)), order=order)
            wanted |= {grid.group_shape(axis).levels for axis in AXES}
    assert {((size, stride),) for size, stride in group_shapes(world)} == wanted - {()}


def test_many_shapes_are_cut() -> None:
    """Guards the number of process groups; the world and neighbours stay."""
    shapes = group_shapes(1024)
    assert len(shapes) == MOST_SHAPES
    assert shapes[0] == (1024, 1)
    assert (2, 1) in shapes


def test_essentials_hold_one_of_each_kind() -> None:
    """Guards short budgets: what is measured in any case suffices for a fit."""
    found = plan(4)
    essential = found.probes[: found.essential]
    assert {probe.what for probe in essential} == {probe.what for probe in found.probes}
    assert {probe.layout for probe in essential if probe.what == "matmul"} == {"NN", "NT", "TN"}
    assert len({probe.size_bytes for probe in essential if probe.what == "collective"}) == 2
    assert len(set(found.probes)) == len(found.probes)


def test_shards_are_whole_elements() -> None:
    """Guards worlds of three: a buffer divides by its group."""
    for probe in plan(6).probes:
        if probe.what == "collective":
            assert probe.size_bytes % (4 * probe.group) == 0


def test_times_are_read() -> None:
    """Guards --budget."""
    assert [seconds_of(text) for text in ("20s", "5m", "1h", "90", "1.5m")] == [20.0, 300.0, 3600.0, 90.0, 90.0]
    for text in ("", "5 minutes", "0s", "-3s"):
        with pytest.raises(UsageError, match="--budget"):
            seconds_of(text)


@pytest.mark.parametrize(
    ("name", "world", "backend", "most_bytes", "most_flops"),
    [
        ("5b", 4, "gloo", 0.5 * GIB, 2e10),
        ("5b", 8, "nccl", 4 * GIB, 1e13),
        ("llama3-405b", 16, "nccl", 8 * GIB, 1e13),
    ],
)
def test_large_models_are_measured_in_pieces_that_fit(
    name: str, world: int, backend: Backend, most_bytes: float, most_flops: float
) -> None:
    """Guards `calibrate --model` with models for clusters: a rank's whole batch at once fits into no memory."""
    model, machine = load_model(name), load_machine("localhost" if backend == "gloo" else "dgx-h100")
    workload = make_workload(model.document, Request(precision="fp32" if backend == "gloo" else "bf16"))
    found = build_plan(model, machine, workload, world=world, backend=backend, budget_s=60.0)
    element = 4 if backend == "gloo" else 2
    for probe in found.probes:
        if probe.what == "matmul":
            m, n, k = probe.m, probe.n, probe.k
            assert element * (m * n + m * k + n * k) <= most_bytes
            assert 2.0 * m * n * k <= most_flops
    for launch in found.launches:
        tokens = launch.micro_batch * launch.workload.sequence_length
        assert element * tokens * launch.model.up_width <= most_bytes / 4
        assert launch.model.layers < model.document.layers


@pytest.mark.parametrize("tied", [True, False])
def test_tables_take_a_share_of_what_a_rank_trains(tied: bool) -> None:
    """Guards a single rank's memory and time: an untied model has a large vocabulary twice."""
    whole = load_model("llama3-405b").document.model_copy(update={"tied_embeddings": tied})
    workload = make_workload(whole, Request(precision="bf16"))
    found = build_plan(load_model(whole), load_machine("dgx-h100"), workload, world=8, backend="nccl", budget_s=60.0)
    for launch in found.launches:
        tables = launch.model.vocab * launch.model.hidden * (1 if tied else 2)
        assert 0.2 * 2e9 < tables <= 0.25 * 2e9


@pytest.mark.parametrize("machine", ["localhost", "dgx-h100"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_steps_are_compiled_as_runs_of_the_new_profile_are(machine: str, backend: Backend) -> None:
    """Guards `--backend nccl --machine localhost`: it fitted eager steps, and runs then compiled."""
    model = load_model("nano")
    workload = make_workload(model.document, Request(precision="fp32"))
    found = build_plan(model, load_machine(machine), workload, world=2, backend=backend, budget_s=1.0)
    assert {(launch.backend, launch.compile) for launch in found.launches} == {(backend, backend == "nccl")}
