"""CPU offload: copies, Adam on the host and what hides them, by hand and against published steps."""

from __future__ import annotations

import pytest

from axonn_tune.api.search import search
from axonn_tune.cost.compute import host_rates
from axonn_tune.cost.price import Detail, price
from axonn_tune.errors import NothingFeasibleError
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.report.remarks import offload_words
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.workload import Workload

H100 = load_machine("dgx-h100").document
ORDER = ("x", "z", "context", "data", "pipeline")
STATES = ("master weights", "gradients", "compute weights", "optimizer moments")


def series(**step: object) -> Detail:
    """Qwen3-30B-A3B on 16 H100 (NVIDIA-NeMo/Megatron-Bridge@067f987d, skills/nemo-mbridge-perf-cpu-offloading)."""
    framework = find_framework("megatron-core").with_step(imbalance=1.0, **step)
    grid = Grid(x=2, pipeline=2, data=4, expert=4, order=ORDER)
    job = Job(load_model("qwen3-30b-a3b").document, H100, Workload(global_batch=8, sequence_length=4096), framework)
    return price(job, Layout(grid, 1, "none", 0))


def states_gb(found: Detail) -> float:
    """Persistent state, which is what is allocated between steps, GB."""
    return 1e-9 * sum(float(size) for name, size in found.memory.items if name.startswith(STATES))


@pytest.mark.parametrize(
    ("share", "overlap", "seconds", "memory"),
    [
        (0.5, False, 2.484, 39.6),
        (0.75, False, 3.187, 35.6),
        (1.0, False, 4.189, 32.0),
        (1.0, True, 3.877, 32.0),
    ],
)
def test_added_seconds_and_memory_of_sixteen_gpus(share: float, overlap: bool, seconds: float, memory: float) -> None:
    """Guards what an optimizer on the host adds to a step of 0.996 s, by a rate of Adam from another run, and what it
    leaves of 47.2 GB."""
    plain = series()
    moved = series(offloaded=("moments",), offloaded_states=share, offload_overlap=overlap)
    assert moved.iteration_s - plain.iteration_s == pytest.approx(seconds - 0.996, rel=0.2)
    assert states_gb(plain) == pytest.approx(47.2, rel=0.05)
    assert states_gb(moved) == pytest.approx(memory, rel=0.05)


def test_adam_on_the_host_by_hand() -> None:
    """Guards copies of 4 B each way one after the other with the update, or beside it where they overlap."""
    plain, moved, beside = (
        series(**step)
        for step in ({}, {"offloaded": ("moments",)}, {"offloaded": ("moments",), "offload_overlap": True})
    )
    items = (dict(one.memory.items) for one in (plain, moved))
    before, after = (sum(size for name, size in one.items() if "moments" in name) for one in items)
    parameters = before / 8.0
    assert after == 0.0
    update_s, copies_s = parameters / 0.77e9, 8.0 * parameters / 52e9
    on_gpu_s = 30.0 * parameters / (3350e9 * H100.accelerator.memory_efficiency)
    assert moved.iteration_s - plain.iteration_s == pytest.approx(update_s + copies_s - on_gpu_s, rel=0.01)
    assert moved.iteration_s - beside.iteration_s == pytest.approx(copies_s, rel=1e-6)


def test_ranks_share_their_host() -> None:
    """Guards the bandwidth of a host's memory over the ranks that use it at once: a slow one binds the update."""
    assert host_rates(H100, 16) == host_rates(H100, 8)
    assert host_rates(H100, 1).vectorized_per_s == pytest.approx(8 * host_rates(H100, 8).vectorized_per_s)
    slow = H100.model_copy(
        update={"host": H100.host and H100.host.model_copy(update={"memory_bandwidth_gb_per_s": 56})}
    )
    assert host_rates(slow, 8).updated_per_s == pytest.approx(7e9 / 28.0)
    assert host_rates(slow, 8).link_bytes_per_s == 7e9
    assert host_rates(H100, 8).updated_per_s == 0.77e9


@pytest.mark.parametrize(("batches", "out", "back"), [(1, 4.0, 0.0), (2, 6.0, 2.0), (8, 18.0, 14.0)])
def test_gradients_of_zero_come_back_to_be_added_to(batches: int, out: float, back: float) -> None:
    """Guards ZeRO-2's gradients of a step, bytes of an element: the last sum in FP32, those before it in BF16 there and
    back; behind a slow link that is what each step waits for."""
    host = H100.host
    assert host is not None

    def step_s(link: float) -> float:
        machine = H100.model_copy(update={"host": host.model_copy(update={"link_gb_per_s": link})})
        framework = find_framework("deepspeed").with_step(
            offloaded=("moments", "master", "gradients"), shard_gradients=True
        )
        workload = Workload(global_batch=8 * batches, sequence_length=2048)
        job = Job(load_model("llama3-8b").document, machine, workload, framework)
        return price(job, Layout(Grid(data=8, order=("x", "z", "data", "pipeline")), 1, "full", 0)).iteration_s

    blocks, tables = 32 * 218_103_808, 2 * 128_256 * 4096
    # Of blocks; new weights of all come back at the end.
    copied = blocks * max(out, back) + 2.0 * (blocks + tables)
    assert step_s(0.005) - step_s(0.01) == pytest.approx(copied / 8 / 0.01e9, rel=0.01)


def test_checkpoints_on_the_host_hide_behind_blocks() -> None:
    """Guards inputs of repeated blocks on the host: 5.5% less memory and 0.1% more time of Llama-3.2 3B on an A100
    (meta-pytorch/torchtune@bd2a0fc7, README.md); behind a link that is too slow they wait."""
    machine = load_machine("dgx-a100").document
    sizes = {"layers": 28, "hidden": 3072, "heads": 24, "ffn": 8192, "tied_embeddings": True}
    model = load_model("llama3-8b").document.model_copy(update=sizes)

    def step(link: float, **options: object) -> Detail:
        host = machine.host
        assert host is not None
        there = machine.model_copy(update={"host": host.model_copy(update={"link_gb_per_s": link})})
        framework = find_framework("fsdp").with_step(**options)
        job = Job(model, there, Workload(global_batch=2, sequence_length=4096), framework)
        return price(job, Layout(Grid(order=ORDER), 2, "full", 0))

    plain, moved, slow = step(26), step(26, offloaded=("attn_norm",)), step(0.26, offloaded=("attn_norm",))
    assert moved.iteration_s == pytest.approx(plain.iteration_s, rel=0.001)
    saved = (plain.memory_bytes - moved.memory_bytes) / 23.1e9
    assert saved == pytest.approx(0.055, abs=0.02)
    copies_s = 2 * 28 * 2 * 4096 * 3072 * 2 / 0.26e9
    assert slow.iteration_s == pytest.approx(max(copies_s, plain.iteration_s), rel=0.05)


def test_what_a_host_keeps_is_held_against_its_memory() -> None:
    """Guards 16 B an element of all ranks of a node, seconds and memory without offload, and the refusal of more than
    hosts can have."""
    moved = series(offloaded=("moments",))
    assert moved.host_bytes == pytest.approx(
        8 * 2 * sum(s for n, s in series().memory.items if "moments" in n), rel=1e-6
    )
    words = offload_words(moved)
    assert "without 937 ms and 54.3 GiB" in words
    assert words.endswith("228 GiB there of 2 TiB")
    assert not offload_words(series())
    with pytest.raises(NothingFeasibleError, match=r"on the host of each of 1 node, .*nearest that fits: 0\.3"):
        search(
            gpus=8, model="llama3-405b", machine="dgx-h100", framework="megatron-core", set=["step.offloaded=moments"]
        )
