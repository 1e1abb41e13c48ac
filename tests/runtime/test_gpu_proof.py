"""`make gpu` where there is no GPU: every stage that can runs, what is there is kept, the page says what it is of."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_proof
from benchmarks.gpu_stages import (
    ATTENTION,
    COLLECTIVES,
    ELEMENT_WISE,
    GEMMS,
    OPTIMIZER,
    OTHER,
    STAGES,
    Row,
    Site,
    Stage,
    kernel_kind,
    run_stage,
)

POSSIBLE = [stage for stage in STAGES if not stage.cuda_only]


@pytest.fixture(scope="module")
def proved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all documents and the page."""
    folder = tmp_path_factory.mktemp("gpu-proof")
    command = [sys.executable, "-m", "benchmarks.gpu_proof", "--folder", str(folder), "--page", str(folder / "gpu.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "no GPU here" in done.stderr
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("stage", POSSIBLE, ids=lambda stage: stage.name)
def test_each_stage_is_as_it_must_be_on_cpu_tensors(stage: Any, proved: Path) -> None:
    """Guards the script until a GPU runs it: no stage fails, each measures something, what can be wrong is right."""
    found = json.loads((proved / f"{stage.name}.json").read_text("utf-8"))
    assert found["error"] == ""
    assert found["rows"]
    assert [row["what"] for row in found["rows"] if row["ok"] is False] == []
    assert f"## {stage.title}" in (proved / "gpu.md").read_text("utf-8")


@pytest.mark.nightly
def test_the_page_says_that_no_gpu_has_run_it(proved: Path) -> None:
    """Guards against CPU times taken for a GPU's."""
    text = (proved / "gpu.md").read_text("utf-8")
    assert "**No GPU has run it yet.**" in text
    assert "`speed-alike`, `timing-1`, `timing-32`" in text


def document(stage: Any, site: gpu_proof.Site) -> dict[str, Any]:
    """What a stage may have found."""
    return {"stage": stage.name, "site": vars(site), "seconds": 1.0, "error": "", "rows": []}


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


def test_a_stage_that_is_measured_again_finds_nothing_of_the_first_time(tmp_path: Path) -> None:
    """Guards `--again`: a run would resume from the checkpoints of the last, and a calibration refuse to start."""

    def measure(site: Site, folder: Path) -> Iterator[Row]:
        (folder / "checkpoint").touch(exist_ok=False)
        yield Row("made", 1.0, ok=True)

    site, stage = Site("cpu", "CPU", "localhost", compiled=False), Stage("any", "Any", measure)
    for _ in range(2):
        found = run_stage(stage, site, tmp_path / "any")
        assert (found["error"], len(found["rows"])) == ("", 1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_stage_that_ends_without_a_document_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the page against a stage that crashes or takes too long: it says so, and the next one runs."""
    monkeypatch.setattr(gpu_proof, "_write", lambda *given: sys.exit(7))
    site = gpu_proof.Site("cpu", "CPU", "localhost", compiled=False)
    found = gpu_proof.measure(STAGES[0], site, tmp_path)
    assert found["error"].startswith("ended with code 7")
    assert "Failed: ended with code 7" in gpu_proof.page(site, [found], [])


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long)", COLLECTIVES),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>", ATTENTION),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", ATTENTION),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", GEMMS),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32", GEMMS),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>", GEMMS),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<4>, FusedAdamMathFunctor>", OPTIMIZER),
        ("Memcpy HtoD (Pinned -> Device)", OTHER),
        ("triton_per_fused_add_mul_native_layer_norm_backward_3", ELEMENT_WISE),
        ("void at::native::vectorized_elementwise_kernel<4, GeluBackwardCUDAKernelImpl>", ELEMENT_WISE),
        ("aten::addmm", GEMMS),
    ],
)
def test_kernels_fall_into_their_classes(kernel: str, kind: str) -> None:
    """Guards the comparison with the priced sections."""
    assert kernel_kind(kernel) == kind


@pytest.mark.parametrize(
    ("gpu", "machine"),
    [
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA A100-SXM4-40GB", "perlmutter"),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA H200", "dgx-h200"),
        ("AMD Instinct MI250X", "frontier"),
        ("Tesla T4", None),
    ],
)
def test_the_profile_is_of_the_gpu_here(gpu: str, machine: str | None) -> None:
    """Guards the predicted side: never another GPU's numbers."""
    assert gpu_proof.machine_with(gpu) == machine
