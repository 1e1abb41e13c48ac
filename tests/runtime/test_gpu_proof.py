"""`make gpu` where there is no GPU: every stage that can runs, what is there is kept, the page says what it is of."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_proof
from benchmarks.gpu_kernels import kernels
from benchmarks.gpu_stages import ATTENTION, COLLECTIVES, ELEMENT_WISE, GEMMS, OPTIMIZER, OTHER, STAGES, kernel_kind

POSSIBLE = [stage for stage in STAGES if not stage.cuda_only]


@pytest.mark.nightly
def test_each_stage_is_as_it_must_be_on_cpu_tensors(tmp_path: Path) -> None:
    """Guards the script until a GPU runs it: no stage fails, each measures something, what can be wrong is right."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu_proof",
        "--folder",
        str(tmp_path),
        "--page",
        str(tmp_path / "gpu.md"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "no GPU here" in done.stderr
    text = (tmp_path / "gpu.md").read_text("utf-8")
    assert "**No GPU has run it yet.**" in text
    for stage in POSSIBLE:
        found = json.loads((tmp_path / f"{stage.name}.json").read_text("utf-8"))
        assert found["error"] == ""
        assert found["rows"]
        assert [row["what"] for row in found["rows"] if row["ok"] is False] == []
        assert f"## {stage.title}" in text


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_kernels_are_measured_first_and_missing_libraries_are_named(tmp_path: Path) -> None:
    """Guards the first minutes on a borrowed GPU: each kernel is called, or its row says which library is not there."""
    assert STAGES[0].name == "kernels"
    assert STAGES[0].limit_s <= 300.0
    site = gpu_proof.Site("cpu", "CPU", "localhost", compiled=False)
    rows = list(kernels(site, tmp_path / "kernels"))
    without = [row for row in rows if row.measured is None]
    assert all("is not installed" in row.note or "torch flex_attention" in row.what for row in without)
    with (tmp_path / "kernels.csv").open(encoding="utf-8", newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows) - len(without)
    measured = {(one["kernel"], one["source"].split(",")[0].removeprefix("make gpu: "), one["pass"]) for one in written}
    assert {
        ("FP8 cast, current scaling", "torch compiled", "both"),
        ("FP8 cast, delayed scaling", "torch compiled", "both"),
        ("FP8 cast, blockwise scaling", "torch compiled", "both"),
        ("clamps and cat of clamped SwiGLU", "torch eager", "backward"),
        ("clamped SwiGLU", "torch eager", "backward"),
        ("windowed attention", "torch flex_attention", "forward"),
        ("cross-entropy", "torch eager", "backward"),
    } <= measured
    shipped = files("axonn_tune.cost").joinpath("kernels.csv").read_text(encoding="utf-8").splitlines()[0]
    assert ",".join(written[0]) == shipped, "a row can be copied into the package's data"


def document(stage: Any, site: gpu_proof.Site) -> dict[str, Any]:
    """What a stage may have found."""
    return {"stage": stage.name, "site": vars(site), "torch": "2.13.0", "seconds": 1.0, "error": "", "rows": []}


@pytest.mark.parametrize(
    ("changes", "again", "measured"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"error": "ended with code -9 after 600 s"}, False, True),
        ({"site": {"kind": "cuda", "name": "NVIDIA H100", "machine": "dgx-h100", "compiled": True}}, False, True),
    ],
    ids=["whole", "again", "failed", "other device"],
)
def test_what_is_there_is_not_measured_again(
    changes: dict[str, Any], again: bool, measured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the minutes on a borrowed GPU: a run that was cut off goes on where it was."""
    site, stage = gpu_proof.Site("cpu", "CPU", "localhost", compiled=False), STAGES[0]
    (tmp_path / f"{stage.name}.json").write_text(json.dumps(document(stage, site) | changes), encoding="utf-8")
    asked: list[str] = []
    monkeypatch.setattr(gpu_proof, "measure", lambda one, *rest: asked.append(one.name) or document(one, site))
    assert [one["error"] for one in gpu_proof.run([stage], site, tmp_path, again=again)] == [""]
    assert asked == [stage.name] * measured


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_stage_that_ends_without_a_document_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the page against a stage that crashes or takes too long: it says so, and the next one runs."""
    monkeypatch.setattr(gpu_proof, "_write", lambda *given: sys.exit(7))
    site = gpu_proof.Site("cpu", "CPU", "localhost", compiled=False)
    found = gpu_proof.measure(STAGES[0], site, tmp_path, 60.0)
    assert found["error"].startswith("ended with code 7")
    assert "Failed: ended with code 7" in gpu_proof.page(site, [found], [])


def test_kernels_and_profiles_are_those_of_the_gpu() -> None:
    """Guards the comparison with the priced sections, and the predicted side: never another GPU's numbers."""
    kernels = {
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long)": COLLECTIVES,
        "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>": ATTENTION,
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": ATTENTION,
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT": GEMMS,
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>": GEMMS,
        "void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor>": OPTIMIZER,
        "Memcpy HtoD (Pinned -> Device)": OTHER,
        "triton_per_fused_add_mul_native_layer_norm_backward_3": ELEMENT_WISE,
        "void at::native::vectorized_elementwise_kernel<4, GeluBackwardCUDAKernelImpl>": ELEMENT_WISE,
        "aten::addmm": GEMMS,
    }
    assert {kernel: kernel_kind(kernel) for kernel in kernels} == kernels
    machines = {"NVIDIA H100 80GB HBM3": "dgx-h100", "NVIDIA A100-SXM4-40GB": "perlmutter", "Tesla T4": None}
    machines |= {"NVIDIA A100-SXM4-80GB": "dgx-a100", "AMD Instinct MI250X": "frontier"}
    assert {gpu: gpu_proof.machine_with(gpu) for gpu in machines} == machines
