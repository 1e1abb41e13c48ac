"""What a calibration measures, the file it writes, the processes it listens to, and the profile on another day."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from axonn_tune.calibration.measure import (
    MOST_SHAPES,
    CalibrationProgress,
    CalibrationRequest,
    build_plan,
    group_shapes,
    run_probes,
    seconds_of,
)
from axonn_tune.calibration.profile import differences
from axonn_tune.errors import DocumentError, EnvironmentProblem, UsageError
from axonn_tune.grid import AXES, Grid, distinct_orders, factorizations
from axonn_tune.launch import host
from axonn_tune.ranking.inputs import make_workload
from axonn_tune.request import Request
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.machine import Backend, Measurement
from axonn_tune.specs.points import CopyProbe, Point, PointLog, read_points
from axonn_tune.units import GIB
from tests.unit.calibration.synthetic import plan, setting

POINT = Point(probe=CopyProbe(size_bytes=64), seconds=1e-6, calls=3)


@pytest.mark.parametrize("world", [2, 6, 8, 12])
def test_shapes_are_those_of_the_grids(world: int) -> None:
    """Guards completeness: every group over one axis that some grid of the world has, no other, and not too many."""
    wanted = set()
    for sizes in factorizations(world).tolist():
        for order in distinct_orders(tuple(sizes)):
            grid = Grid(**dict(zip(AXES, sizes, strict=True)), order=order)
            wanted |= {grid.group_shape(axis).levels for axis in AXES}
    assert {((size, stride),) for size, stride in group_shapes(world)} == wanted - {()}
    many = group_shapes(1024)
    assert (len(many), many[0]) == (MOST_SHAPES, (1024, 1))
    assert (2, 1) in many


def test_essentials_hold_one_of_each_kind() -> None:
    """Guards short budgets: what is measured in any case suffices for a fit; every shard has whole elements."""
    found = plan(6)
    essential = found.probes[: found.essential]
    assert {probe.what for probe in essential} == {probe.what for probe in found.probes}
    assert {probe.layout for probe in essential if probe.what == "matmul"} == {"NN", "NT", "TN"}
    assert len({probe.size_bytes // 100 for probe in essential if probe.what == "collective"}) == 2
    assert len(set(found.probes)) == len(found.probes)
    assert all(probe.size_bytes % (4 * probe.group) == 0 for probe in found.probes if probe.what == "collective")
    assert [seconds_of(text) for text in ("20s", "5m", "1h", "90", "1.5m")] == [20.0, 300.0, 3600.0, 90.0, 90.0]
    for text in ("", "5 minutes", "0s", "-3s"):
        with pytest.raises(UsageError, match="--budget"):
            seconds_of(text)


@pytest.mark.parametrize(
    ("name", "world", "backend", "most_bytes", "most_flops"),
    [("5b", 4, "gloo", 0.5 * GIB, 2e10), ("5b", 8, "nccl", 4 * GIB, 1e13), ("llama3-405b", 16, "nccl", 8 * GIB, 1e13)],
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
        assert element * tokens * launch.model.plain.up_width <= most_bytes / 4
        assert launch.model.layers < model.document.layers
        # Steps are compiled as runs of the new profile are, whatever --machine says.
        assert (launch.backend, launch.compile) == (backend, backend == "nccl")


@pytest.mark.parametrize("tied", [True, False])
def test_tables_take_a_share_of_what_a_rank_trains(tied: bool) -> None:
    """Guards a single rank's memory and time: an untied model has a large vocabulary twice."""
    whole = load_model("llama3-405b").document.model_copy(update={"tied_embeddings": tied})
    workload = make_workload(whole, Request(precision="bf16"))
    found = build_plan(load_model(whole), load_machine("localhost"), workload, world=8, backend="nccl", budget_s=60.0)
    for launch in found.launches:
        assert launch.compile
        tables = launch.model.vocab * launch.model.hidden * (1 if tied else 2)
        assert 0.2 * 2e9 < tables <= 0.25 * 2e9


def written(path: Path) -> Path:
    """A file of two points."""
    log = PointLog(path)
    assert log.open(setting(2), resume=False) == ()
    log.add(POINT)
    log.add(POINT)
    log.close()
    return path


def test_points_are_read_back_and_resumed(tmp_path: Path) -> None:
    """Guards the format, and --resume after a kill in the middle of a line, which is written over."""
    path = written(tmp_path / "points")
    found = read_points(path)
    assert (found.setting, found.points) == (setting(2), (POINT, POINT))
    text = path.read_text("utf-8")
    transfer = '{"probe":{"what":"transfer","size_bytes":1024},"seconds":1e-3,"calls":1}'
    path.write_text(f"{text}{transfer}\n", encoding="utf-8")
    assert read_points(path).points == (POINT, POINT), "what earlier calibrations measured, too"
    path.write_text(text[:-9], encoding="utf-8")
    assert read_points(path).points == (POINT,)
    log = PointLog(path)
    assert log.open(setting(2), resume=True) == (POINT,)
    log.add(POINT)
    log.close()
    assert read_points(path).points == (POINT, POINT)
    with pytest.raises(UsageError, match="pass --resume to continue"):
        PointLog(path).open(setting(2), resume=False)
    other = setting(2).model_copy(update={"library": "Gloo of torch 3", "ranks": setting(4).ranks})
    with pytest.raises(UsageError, match=r"library, ranks \(2 then, 4 now\)"):
        PointLog(path).open(other, resume=True)


def test_files_that_are_wrong_are_refused(tmp_path: Path) -> None:
    """Guards against fitting what is no measurement: line and place are in the message."""
    path = written(tmp_path / "points")
    path.write_text(path.read_text("utf-8").replace('"seconds":1e-6', '"seconds":-1', 1), encoding="utf-8")
    with pytest.raises(DocumentError, match=r"points:2: seconds: .*greater than 0"):
        read_points(path)
    for text in ("", "{}\n", "nonsense\n"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(DocumentError):
            read_points(path)


class TalkingRanks(CalibrationRequest):
    """Ranks whose libraries print to standard output."""

    def command(self, plan: Path, *, progress: int) -> list[str]:
        """What to run: one line to standard output, one of progress."""
        talking = "import os, sys; print('NCCL INFO', flush=True); os.write(int(sys.argv[1]), sys.argv[2].encode())"
        return [sys.executable, "-c", talking, str(progress), '{"points": 3, "elapsed_s": 0.5, "what": "copy"}\n']


def test_what_libraries_print_is_no_progress(capfd: pytest.CaptureFixture[str]) -> None:
    """Guards NCCL_DEBUG=INFO and MPI's banners: neither an error, nor among the results."""
    heard: list[CalibrationProgress] = []
    assert run_probes(TalkingRanks("points.yaml", ranks=1), plan(2), heard.append) == 0
    assert heard == [CalibrationProgress(3, 0.5, "copy")]
    assert capfd.readouterr() == ("", "NCCL INFO\n")


def test_nccl_has_a_rank_for_each_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards hosts with more cores than GPUs: ranks by cores would not start; without a GPU none does."""
    monkeypatch.setattr(host, "torch_devices", lambda: {"gpus": [{"name": "H100"}] * 3})
    assert CalibrationRequest("here.yaml", backend="nccl").ranks_here == 3
    assert CalibrationRequest("here.yaml", backend="nccl", ranks=2).ranks_here == 2
    assert CalibrationRequest("here.yaml").ranks_here == len(os.sched_getaffinity(0))
    for found in (None, {"gpus": []}, {"gpus": [], "error": "torch finds none here"}):
        monkeypatch.setattr(host, "torch_devices", lambda found=found: found)
        with pytest.raises(EnvironmentProblem, match="but torch finds none here; --backend gloo measures CPUs"):
            CalibrationRequest("here.yaml", backend="nccl").ranks_here  # noqa: B018 - looking is what fails


@pytest.mark.parametrize(
    ("host_name", "cores", "torch_version", "said"),
    [
        ("n2", 2, "2.13.0", []),
        ("n2", 2, "", []),
        ("n1", 4, "2.13.0+cpu", ["measured with 2 cores, this host has 4"]),
        ("n2", 2, "2.11", ["measured with torch 2.13.0+cpu, this is torch 2.11"]),
        ("login1", 4, "2.11", []),
    ],
)
def test_differences_are_said(
    monkeypatch: pytest.MonkeyPatch, host_name: str, cores: int, torch_version: str, said: list[str]
) -> None:
    """Guards the warning of `machines check`: a login node may differ from the nodes that were measured."""
    measured = Measurement(
        created="2026-01-02",
        tool_version="0.1.0",
        torch_version="2.13.0+cpu",
        hosts=("n1", "n2"),
        device="a CPU",
        ranks=4,
        cores=2,
        network="Gloo between 2 hosts",
        samples=9,
    )
    monkeypatch.setattr("socket.gethostname", lambda: host_name)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr("axonn_tune.calibration.profile.installed", lambda name: torch_version)
    assert list(differences(measured)) == said
