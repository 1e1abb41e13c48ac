"""Logs of other benchmarks: read, refused where they are truncated, and learned from."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from axonn_tune.cost.collectives import lines, route
from axonn_tune.errors import DocumentError, UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.grid import GroupShape
from axonn_tune.learning.collective_logs import LogRow, read_log, times_of
from axonn_tune.learning.evidence import Sample, probe_samples
from axonn_tune.learning.learn import learn
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import Machine

TEXT = """# nccl-tests version 2.17.6 nccl-headers=22501 nccl-library=22501
# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
#  Rank  0 Group  0 Pid   1946 on       n1 device  0 [0000:0f:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1947 on       n2 device  0 [0000:15:00] NVIDIA H100 80GB HBM3
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
     1048576        131072     float    none      -1    35.00   29.96   14.98       0    34.00   30.84   15.42     N/A
     2097152        262144     float    none      -1    50.00   41.94   20.97       0    49.00   42.80   21.40     N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 18.0
"""
OSU = """
# OSU MPI Allgather Latency Test v7.4
# Datatype: MPI_CHAR.
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
1                       2.81              1.89              3.73          10
1048576               104.30            104.26            104.33          10
"""
DEVICES = [
    {"rank": rank, "group": 0, "pid": 7, "hostname": "n1", "device": rank, "device_hex": "0", "device_info": "H100"}
    for rank in range(8)
]
NCCL_JSON = {
    "version": 1,
    "args": ["/opt/build/all_reduce_perf", "-b", "8"],
    "nccl_version": 22501,
    "config": {"ngpus": 1, "devices": DEVICES},
    "results": [
        {"size": 1024, "count": 256, "out_of_place": {"time": 20.5, "alg_bw": 0.05}, "in_place": {"time": 20.0}},
        {"size": 2048, "count": 512, "out_of_place": None, "in_place": {"time": 20.0}},
    ],
}
RCCL_JSON = [
    {"numCycle": 0, "name": "ReduceScatter", "nodes": 2, "ranks": 16, "size": 4096, "inPlace": 0, "time": 30.0},
    {"numCycle": 0, "name": "ReduceScatter", "nodes": 2, "ranks": 16, "size": 4096, "inPlace": 1, "time": 29.0},
]


def written(folder: Path, text: str, name: str = "log.txt") -> Path:
    """A log."""
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


OLD = """# nThread 1 nGpus 2 minBytes 1048576 maxBytes 1048576 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid  12345 on     gpu01 device  0 [0x1b] NVIDIA A100-SXM4-80GB
#   Rank  1 Pid  12345 on     gpu01 device  1 [0x43] NVIDIA A100-SXM4-80GB
#
#                                               out-of-place                       in-place
#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                       (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum    42.10   24.91   24.91  0e+00    41.80   25.09   25.09  0e+00
# Out of bounds values : 0 OK
"""
RCCL = """# Collective test starting: reduce_scatter_perf
# nThread 1 nGpus 1 minBytes 8 maxBytes 8388608 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#
rccl-tests: Version develop:6405c76
# Using devices
#  Rank  0 Group  0 Pid 3252337 on    amd-1 device  0 [0000:05:00] AMD Instinct MI300X
#  Rank  1 Group  0 Pid 3252338 on    amd-1 device  1 [0000:15:00] AMD Instinct MI300X
RCCL version : 2.27.7-develop:29e1567
HIP version  : 7.0.51831
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             1     float     sum      -1     9.12    0.00    0.00      0     9.02    0.00    0.00      0
     8388608       1048576     float     sum      -1    98.50   85.16   42.58      0    97.00   86.48   43.24      0
# Collective test concluded: reduce_scatter_perf
"""
READ = {
    "all_gather.txt": (TEXT, "all_gather", 2, 2, {1048576: 35e-6, 2097152: 50e-6}, "NVIDIA H100 80GB HBM3"),
    "all_reduce.txt": (OLD, "all_reduce", 2, 1, {1048576: 42.1e-6}, "NVIDIA A100-SXM4-80GB"),
    "rccl.txt": (RCCL, "reduce_scatter", 2, 1, {8: 9.12e-6, 8388608: 98.5e-6}, "AMD Instinct MI300X"),
    "nccl.json": (json.dumps(NCCL_JSON), "all_reduce", 8, 1, {1024: 20.5e-6}, "H100"),
    "rccl.json": (json.dumps(RCCL_JSON), "reduce_scatter", 16, 2, {4096: 30e-6}, ""),
    "osu.txt": (OSU, "all_gather", 4, 2, {4: 2.81e-6, 4 * 1048576: 104.3e-6}, ""),
}
"""Files, their collective, ranks, nodes, times by size of the whole buffer, and device."""


@pytest.mark.parametrize("name", READ)
def test_logs_of_each_benchmark_are_read(name: str, tmp_path: Path) -> None:
    """Guards columns, ranks, nodes and device, OSU's sizes of one rank, and times out of place alone; --ranks is for
    logs that do not say them."""
    text, op, ranks, nodes, times, device = READ[name]
    log = read_log(written(tmp_path, text, name), ranks=4, nodes=2)
    assert {(row.op, row.ranks, row.nodes) for row in log.rows} == {(op, ranks, nodes)}
    assert {row.size_bytes: row.seconds for row in log.rows} == pytest.approx(times)
    assert log.device == device


def test_old_text_is_named_by_its_file(tmp_path: Path) -> None:
    """Guards versions that do not say which collective they measure."""
    old = TEXT.replace("# Collective test starting: all_gather_perf\n", "")
    assert read_log(written(tmp_path, old, "reduce_scatter-2.log")).rows[0].op == "reduce_scatter"
    with pytest.raises(DocumentError, match="does not say which collective"):
        read_log(written(tmp_path, old.replace("float    none", "sum      none")))


def test_columns_say_collective_and_ranks(tmp_path: Path) -> None:
    """Guards tables without heading and devices: size over count is the ranks, nothing reduced an all-gather."""
    table = "     1048576         16384     float    none      -1    35.00   29.96   28.09       0"
    log = read_log(written(tmp_path, "# nThread 1 nGpus 8\n" + table + "\n", "slurm.out"))
    assert log.rows == (LogRow("all_gather", 16, 0, 1048576, pytest.approx(35e-6)),)
    assert "16 ranks" in log.assumed[0][1]


@pytest.mark.parametrize("label", ["0: ", "[1,0]<stdout>:", "    "])
def test_labels_before_each_line_do_not_matter(label: str, tmp_path: Path) -> None:
    """Guards logs as `srun --label`, `mpirun --tag-output` and e-mails leave them."""
    labelled = "".join(f"{label}{line}\n" for line in TEXT.splitlines())
    assert read_log(written(tmp_path, labelled)) == read_log(written(tmp_path, TEXT))
    labelled = "".join(f"{label}{line}\n" for line in OSU.splitlines())
    assert read_log(written(tmp_path, labelled), ranks=4) == read_log(written(tmp_path, OSU), ranks=4)


def test_several_runs_in_one_file_keep_their_collectives(tmp_path: Path) -> None:
    """Guards a job that runs one test after the other: a row belongs to the heading above it."""
    rows = read_log(written(tmp_path, TEXT + TEXT.replace("all_gather_perf", "all_reduce_perf"))).rows
    assert [row.op for row in rows] == ["all_gather", "all_gather", "all_reduce", "all_reduce"]
    with pytest.raises(DocumentError, match="holds alltoall"):
        read_log(written(tmp_path, TEXT + TEXT.replace("all_gather_perf", "alltoall_perf")))


def test_groups_that_ran_at_once_are_refused(tmp_path: Path) -> None:
    """Guards NCCL_TESTS_SPLIT: two groups of one rank are no group of two."""
    split = TEXT.replace("Rank  1 Group  0", "Rank  1 Group  1")
    with pytest.raises(DocumentError, match=r"log.txt:2: 2 groups ran at once"):
        read_log(written(tmp_path, split))
    devices = [{**one, "group": one["rank"] % 2} for one in DEVICES]
    found = {**NCCL_JSON, "config": {"ngpus": 1, "devices": devices}}
    with pytest.raises(DocumentError, match="2 groups ran at once"):
        read_log(written(tmp_path, json.dumps(found)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT[: TEXT.index("41.94") + 2], r"log.txt:13: a row of results is truncated"),
        (TEXT.replace("(us)", "(ms)"), r"log.txt:11: the column of times is not in \(us\)"),
        (TEXT.replace("50.00   41.94", "50.00   419.4"), "log.txt:13: .*are the units mixed"),
        (TEXT[: TEXT.index("     1048576")], "holds no result"),
        (TEXT.replace("all_gather_perf", "alltoall_perf"), "holds alltoall, not an all-gather"),
        (json.dumps(NCCL_JSON)[:-30], "is not complete JSON"),
        (json.dumps({"results": []}), "is not a result of nccl-tests or rccl-tests"),
        ("hello\n", "does not say which collective"),
        (OSU, "give --ranks"),
        *(
            (TEXT.replace("14.98       0", f"14.98       {wrong}"), r":\d+: .*is not a whole number")
            for wrong in ("²", "9" * 5000)
        ),
    ],
)
def test_wrong_logs_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """Guards against fitting truncated logs and mixed units: file and line are named."""
    with pytest.raises(DocumentError, match=message):
        read_log(written(tmp_path, text))


GROUPS = ((2, 1), (4, 1), (8, 2), (16, 4))
"""Ranks and nodes."""


def made_up_logs(folder: Path, base: Machine, groups: Sequence[tuple[int, int]], **slower: float) -> list[Path]:
    """Logs of all-gathers on a machine whose network is another than that of `base`."""
    inner, outer = base.tiers
    machine = base.model_copy(update={"tiers": (inner, outer.model_copy(update={**slower, "measured": None}))})
    paths = []
    for ranks, nodes in groups:
        ways = lines("all_gather", route(GroupShape(((ranks, 1),)), machine.tiers, ranks), machine)
        records = [
            {"name": "AllGather", "nodes": nodes, "ranks": ranks, "size": size, "inPlace": 0}
            | {"time": 1e6 * min(way.latency_s + size / way.bandwidth_bytes_per_s for way in ways)}
            for size in (2**14, 2**18, 2**22, 2**26, 2**30)
        ]
        paths.append(written(folder, json.dumps(records), f"{ranks}.json"))
    return paths


def samples_of(paths: Sequence[Path], base: Machine) -> list[Sample]:
    """Evidence of logs."""
    framework = find_framework("axonn")
    read = [(path, times_of(read_log(path), base)) for path in paths]
    return [one for path, times in read for one in probe_samples(times, base, framework, name=path.name)]


def test_network_is_learnt_from_logs(tmp_path: Path) -> None:
    """Guards the profile: its collectives take the times of the logs, and what sends nothing stays as it was."""
    base = load_machine("perlmutter").document
    rate = base.tiers[1].bandwidth_gb_per_s / 1.3
    slower = {"latency_us": 1.4 * base.tiers[1].latency_us, "bandwidth_gb_per_s": rate}
    found = learn(samples_of(made_up_logs(tmp_path, base, GROUPS, **slower), base), base)
    assert max(abs(row.before) for row in found.rows) > 0.25
    assert max(abs(row.after) for row in found.rows) < 0.06
    for name in ("training_share", "memory_efficiency", "peak_tflops", "matmul_efficiency"):
        assert getattr(found.machine.accelerator, name) == getattr(base.accelerator, name)
    assert found.machine.tiers[1].used_by("all_gather").bandwidth_gb_per_s == pytest.approx(rate, rel=0.06)


def test_one_log_of_a_slow_network_leaves_links_within_nodes(tmp_path: Path) -> None:
    """Guards what a log of full nodes alone is taken to say: of two links in a row the network is the slow one."""
    base = load_machine("dgx-h200").document
    inner, outer = base.tiers
    logs = made_up_logs(tmp_path, base, ((64, 8),), bandwidth_gb_per_s=0.4 * outer.bandwidth_gb_per_s)
    found = learn(samples_of(logs, base), base).machine.tiers
    assert found[0].used_by("all_gather").bandwidth_gb_per_s == pytest.approx(inner.bandwidth_gb_per_s, rel=0.05)
    assert found[1].used_by("all_gather").bandwidth_gb_per_s == pytest.approx(0.4 * outer.bandwidth_gb_per_s, rel=0.15)


@pytest.mark.parametrize("text", [TEXT, OLD, RCCL])
def test_log_that_is_cut_off(text: str, tmp_path: Path) -> None:
    """Guards every version's way to close a run, and where one that does not close ends; its rows still count."""
    whole = read_log(written(tmp_path, text, "all_gather.txt"))
    assert whole.cut_off == ()
    rows = re.split(r"\n# (?:Out of|Collective test concl)", text)[0]
    cut = read_log(written(tmp_path, f"{rows}\n\n", "all_gather.txt"))
    assert (cut.rows, cut.cut_off) == (whole.rows, (rows.count("\n") + 1,))


def test_logs_of_other_nodes_are_refused(tmp_path: Path) -> None:
    """Guards placement: 8 ranks on 2 nodes do not fit a machine with 8 GPUs a node."""
    logs = [read_log(path) for path in made_up_logs(tmp_path, load_machine("perlmutter").document, GROUPS)]
    with pytest.raises(UsageError, match="nodes of dgx-h100 hold 8"):
        [times_of(log, load_machine("dgx-h100").document) for log in logs]
