"""Traces of torch.profiler, by hand: the forms of GPUs, and what is wrong in them.

Events are as pytorch/kineto writes them (libkineto/src/output_json.cpp at acf03f80): times in µs; a kernel names the
operator that launched it by `External id`, directly or through the `correlation` of the call of the runtime; NCCL's
kernels carry what `record_param_comms` recorded.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.errors import DocumentError, UsageError
from axonn_tune.learning import traces
from axonn_tune.learning.traces import read_trace
from axonn_tune.specs.points import CollectiveProbe, MatmulProbe, Probe

Json = dict[str, Any]


def event(category: str, name: str, ts: float, dur: float, *, tid: object = 7, **args: object) -> Json:
    """Something that lasted; `_` in names of arguments stands for a space."""
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": named}


def matmul(name: str, number: int, ts: float, dims: list[list[int]], strides: list[list[int]]) -> Json:
    """An operator with recorded shapes."""
    return event("cpu_op", name, ts, 5.0, tid=1, External_id=number, Input_Dims=dims, Input_Strides=strides)


NORMAL = [[512, 1], [256, 1]]
SAID: Json = {"In_msg_nelems": 1024, "Out_msg_nelems": 4096, "Group_size": 4, "dtype": "BFloat16"}
EVENTS = [
    event("user_annotation", "ProfilerStep#3", 0.0, 1000.0, tid=1),
    event("gpu_user_annotation", "ProfilerStep#3", 10.0, 900.0),
    event("user_annotation", "ProfilerStep#4", 1000.0, 1100.0, tid=1),
    matmul("aten::mm", 11, 10.0, [[128, 512], [512, 256]], NORMAL),
    matmul("aten::addmm", 12, 20.0, [[256], [128, 512], [512, 256], [], []], [[1], [512, 1], [1, 512], [], []]),
    matmul("aten::mm", 13, 30.0, [[512, 128], [128, 256]], [[1, 512], [256, 1]]),
    event("cuda_runtime", "cudaLaunchKernel", 12.0, 2.0, tid=1, External_id=11, correlation=901),
    event("kernel", "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NNT", 100.0, 50.0, correlation=901),
    event("kernel", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_tn", 150.0, 40.0, External_id=12, correlation=902),
    event("kernel", "void cublasLt::splitKreduce_kernel<32, 16>(...)", 190.0, 10.0, External_id=12, correlation=903),
    event("kernel", "void cutlass::Kernel2<cutlass_80_tensorop_bf16>(Params)", 200.0, 60.0, External_id=13),
    event("kernel", "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>(...)", 300.0, 30.0, External_id=14),
    event("kernel", "void at::native::vectorized_elementwise_kernel<4, GeluFunctor>(...)", 330.0, 20.0, External_id=15),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 350.0, 5.0),
    event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 120.0, 100.0, tid=20,
          External_id=21, **SAID, Process_Group_Ranks="[0, 2, 4, 6]"),
    event("cpu_op", "record_param_comms", 50.0, 3.0, tid=1, External_id=22, Collective_name="_reduce_scatter_base",
          In_msg_nelems=4096, Out_msg_nelems=1024, Group_size=64, dtype="Float",
          Process_Group_Ranks="[0, 1, 2, 3, ...]", Global_rank_start=0, Global_rank_stride=1),
    event("kernel", "ncclDevKernel_ReduceScatter_Sum_f32_RING_SIMPLE(...)", 320.0, 80.0, tid=20, External_id=22),
    event("kernel", "ncclKernel_SendRecv(ncclWorkElem)", 500.0, 10.0, tid=20, External_id=23),
    event("gpu_user_annotation", "nccl:_all_gather_base", 119.0, 101.0, tid=20, External_id=21),
    {"ph": "M", "name": "process_name", "ts": 0.0, "pid": 0, "tid": 0, "args": {"name": "python"}},
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 3000.0},
]  # fmt: skip
DOCUMENT = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 64, "pg_count": 3},
    "traceEvents": EVENTS,
}


def read(folder: Path, document: object = DOCUMENT) -> Mapping[Probe, float]:
    """What a file of this content holds."""
    path = folder / "trace.json"
    path.write_text(json.dumps(document), "utf-8")
    return read_trace(path)


GEMMS = {
    MatmulProbe(layout="NN", m=128, n=256, k=512): pytest.approx(50e-6),
    MatmulProbe(layout="NT", m=128, n=256, k=512): pytest.approx(50e-6),
    MatmulProbe(layout="TN", m=512, n=256, k=128): pytest.approx(60e-6),
}


def test_a_trace_of_a_gpu(tmp_path: Path) -> None:
    """Guards what is read: GEMMs by their kernels, collectives by NCCL's, those that no layout uses left out."""
    assert read(tmp_path) == GEMMS | {
        CollectiveProbe(op="all_gather", group=4, stride=2, size_bytes=8192): pytest.approx(100e-6),
        CollectiveProbe(op="reduce_scatter", group=64, stride=1, size_bytes=16384): pytest.approx(80e-6),
    }


def test_probes_are_medians_of_what_a_calibration_measures(tmp_path: Path) -> None:
    """Guards what is learnt from: same shapes together, their median; what has no size, group or layout left out."""
    more = [
        event("kernel", "ncclDevKernel_AllGather_RING_LL", 600.0, dur, **SAID, Process_Group_Ranks="[1, 3, 5, 7]")
        for dur in (20.0, 30.0)
    ]
    uneven = event(
        "kernel", "ncclDevKernel_AllReduce_Sum_f32_TREE_LL", 700.0, 9.0, **SAID, Process_Group_Ranks=[0, 1, 4, 5]
    )
    assert read(tmp_path, {**DOCUMENT, "traceEvents": [*EVENTS, *more, uneven]}) == GEMMS | {
        CollectiveProbe(op="all_gather", group=4, stride=2, size_bytes=8192): pytest.approx(30e-6),
        CollectiveProbe(op="reduce_scatter", group=64, stride=1, size_bytes=16384): pytest.approx(80e-6),
    }


def test_spans_stand_in_for_kernels_of_other_names(tmp_path: Path) -> None:
    """Guards traces whose collectives run in kernels with other names: NCCL's spans on the GPU have their times."""
    span = event("gpu_user_annotation", "nccl:_all_gather_base", 119.0, 101.0, **SAID, Process_Group_Ranks="[0, 2]")
    span["args"] |= {"Group size": 2}
    kernels = [one for one in EVENTS if not str(one["name"]).startswith("nccl") or one["cat"] != "kernel"]
    assert read(tmp_path, {**DOCUMENT, "traceEvents": [*kernels, span]}) == GEMMS | {
        CollectiveProbe(op="all_gather", group=2, stride=2, size_bytes=8192): pytest.approx(101e-6)
    }


def test_records_of_gloo_are_the_collectives_of_cpus(tmp_path: Path) -> None:
    """Guards traces of CPUs: a GEMM's time is its operator's, and the group of a collective is the only one."""
    inputs = {"Input_Dims": [[16], []], "Input_type": ["c10::Half", "c10::Half"]}
    events = [
        matmul("aten::mm", 1, 10.0, [[128, 512], [512, 256]], NORMAL),
        event("user_annotation", "gloo:all_reduce", 80.0, 50.0, tid=9, **inputs),
    ]
    one = {"pg_name": "0", "ranks": [0, 1]}
    gemm = {MatmulProbe(layout="NN", m=128, n=256, k=512): pytest.approx(5e-6)}
    call = {CollectiveProbe(op="all_reduce", group=2, stride=1, size_bytes=34): pytest.approx(50e-6)}
    assert read(tmp_path, {"traceEvents": events, "distributedInfo": {"pg_config": [one]}}) == gemm | call
    assert read(tmp_path, {"traceEvents": events, "distributedInfo": {"pg_config": [one, one]}}) == gemm
    assert read(tmp_path, {"traceEvents": events}) == gemm


def test_a_packed_trace_is_the_same(tmp_path: Path) -> None:
    """Guards .gz, as torch.profiler writes by that suffix."""
    plain = read(tmp_path)
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress((tmp_path / "trace.json").read_bytes()))
    assert read_trace(path) == plain
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DocumentError, match=r"trace\.json\.gz: truncated gzip"):
        read_trace(path)
    path.write_bytes(b"\x1f\x8b" + b"nonsense" * 9)
    with pytest.raises(DocumentError, match="damaged gzip"):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused_scaled_dot_product_attention_all_reduce_3", "other"),
        ("triton_tem_fused_mm_4", "gemm"),
        ("void flashinfer::trtllm_mnnvl_allreduce::twoshotAllreduceKernel<4>(...)", "collective"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", "other"),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>", "other"),
        ("Cijk_Ailk_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64", "gemm"),
        ("void at::native::unrolled_elementwise_kernel<direct_copy_kernel_cuda>", "other"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>", "other"),
        ("at::native::amp_update_scale_cuda_kernel", "other"),
    ],
)
def test_kinds_of_kernels(tmp_path: Path, name: str, kind: str) -> None:
    """Guards names of libraries: fused kernels are named by all that they fuse, and CUTLASS makes attention, too."""
    ranks = {"Collective_name": "allreduce", "Process_Group_Ranks": "[0, 2, 4, 6]"}
    events = [
        matmul("aten::mm", 11, 0.0, [[128, 512], [512, 256]], NORMAL),
        event("kernel", name, 0.0, 5.0, External_id=11, **SAID, **ranks),
    ]
    assert [probe.what for probe in read(tmp_path, {"traceEvents": events})] == (
        [] if kind == "other" else ["collective"] if kind == "collective" else ["matmul"]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ts": float("nan")}, "traceEvents.3.ts: "),
        ({"ts": 10**400}, "traceEvents.3.ts: "),
        ({"ts": "soon"}, "traceEvents.3.ts: "),
        ({"dur": -1.0}, "traceEvents.3.dur: "),
        ({"name": None}, "traceEvents.3.name: "),
        ({"args": [1]}, "traceEvents.3.args: "),
        ({"args": {"External id": [1]}}, "traceEvents.3.args.External id: "),
        ({"args": {"External id": 11, "Input Dims": [[128, "x"], [512, 256]]}}, "traceEvents.3.args.Input Dims: "),
    ],
)
def test_what_is_wrong_has_a_place(tmp_path: Path, change: Json, message: str) -> None:
    """Guards errors: the file, the event and its field."""
    events: list[Json] = copy.deepcopy(EVENTS)
    events[3] |= change
    with pytest.raises(DocumentError) as caught:
        read(tmp_path, {**DOCUMENT, "traceEvents": events})
    assert str(caught.value).startswith(f"{tmp_path}/trace.json: {message}")


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "traceEvents: no list of events"),
        ({"traceEvents": {}}, "traceEvents: no list of events"),
        ({"traceEvents": [3]}, "traceEvents.0: an event is needed"),
        ({"traceEvents": [], "distributedInfo": 3}, "distributedInfo: "),
        ({"traceEvents": [], "distributedInfo": {"pg_config": 3}}, "distributedInfo.pg_config: "),
    ],
)
def test_other_documents_are_refused(tmp_path: Path, document: object, message: str) -> None:
    """Guards JSON that is no trace."""
    with pytest.raises(DocumentError) as caught:
        read(tmp_path, document)
    assert f"trace.json: {message}" in str(caught.value)


def test_what_is_no_file_or_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: neither a pipe nor a long file is read, nor one that is long once unpacked."""
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path / "pipe", "device or a pipe"), (tmp_path, "folder"), (tmp_path / "no", "no file")):
        with pytest.raises(UsageError, match=words):
            read_trace(path)
    monkeypatch.setattr(traces, "TRACE_BYTES", 1 << 20)
    (tmp_path / "long.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(UsageError, match="more than the 1 MiB"):
        read_trace(tmp_path / "long.json")
    (tmp_path / "long.gz").write_bytes(gzip.compress(b" " * ((1 << 20) + 1)))
    with pytest.raises(UsageError, match="unpacks to more than the 1 MiB"):
        read_trace(tmp_path / "long.gz")
