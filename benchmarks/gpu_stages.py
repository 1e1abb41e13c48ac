"""Stages of `benchmarks.gpu_proof`: each measures one thing on this device, and returns rows for its page.

A stage is a function of the site and a folder of its own. It runs in a process of its own, forked before anything has
touched the GPU, so it may fork ranks itself as long as it has not touched it either.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.process import BaseProcess
from operator import eq
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from axonn_tune.cost.compute import ATTENTION, ELEMENT_WISE, GEMMS, OPTIMIZER
from axonn_tune.cost.price import Detail, price
from axonn_tune.cost.work import work_by_kind
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.grid import RANK_AXES, STAGE_AXES, Grid
from axonn_tune.job import Job as PricedJob
from axonn_tune.job import Layout
from axonn_tune.launch.config import build_launch, launch_text
from axonn_tune.program.dimensions import model_flops
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.runtime.clocks import DeviceClock, HostClock
from axonn_tune.runtime.devices import forget_peak, settings_of, synchronize
from axonn_tune.runtime.dry_run import MetaBytes, dry_run
from axonn_tune.runtime.ledger import compare, program_of
from axonn_tune.runtime.mesh import Mesh, build_mesh
from axonn_tune.runtime.parameters import Parameter
from axonn_tune.runtime.start import train
from axonn_tune.runtime.tables import sums_of_rows
from axonn_tune.runtime.tokens import batches
from axonn_tune.runtime.trainer import Trainer
from axonn_tune.specs.catalog import load_machine, load_model
from axonn_tune.specs.launch import Checkpoint, Launch
from axonn_tune.specs.model import Model
from axonn_tune.specs.tuning import Tuning
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.units import counted
from axonn_tune.vocabulary import Precision
from benchmarks.gpu_kernels import kernels
from benchmarks.gpu_matmuls import attention, grouped, matmuls, quantization
from benchmarks.gpu_site import Row, Site
from benchmarks.reference_model import Reference

SMALL = (("nano", 64), ("nano-llama", 64), ("nano-moe", 64), ("nano-delta", 64))
"""Models, and tokens of a sequence, that a CPU trains in a moment."""
LORA = Tuning(mode="lora", targets=("*",), dtype="fp32")
BALANCED = replace(AXONN_TUNE, step=replace(AXONN_TUNE.step, imbalance=1.0))
"""With forced load balancing: which experts tokens go to does not depend on rounding, nor what is priced on data."""
LIMITS: dict[Precision, float] = {"fp32": 1e-4, "bf16": 3e-2}
"""Largest distance of loss and of gradients from fp64, relative."""
MOST_ROWS_ERROR = 0.01
"""Of a sum of 4,096 equal rows in bf16, whose elements have 8 bits."""
OTHER = "copies and others"
COLLECTIVES = "collectives"


@dataclass(frozen=True)
class Job:
    """What is trained: a model, with so many tokens in a sequence and sequences in a micro-batch."""

    model: Model
    sequence: int
    sequences: int

    def launch(
        self,
        site: Site,
        precision: Precision,
        recompute: Recompute = "none",
        *,
        compiled: bool = False,
        grid: Grid | None = None,
        micro_batches: int = 1,
    ) -> tuple[Launch, Detail]:
        """Its launch config and what is predicted for it, on one rank unless a grid is given."""
        machine, model, grid = load_machine(site.machine), load_model(self.model), grid or Grid()
        workload = Workload(
            global_batch=self.sequences * micro_batches * grid.z * grid.data,
            sequence_length=self.sequence,
            precision=precision,
            tuning=self.model.tuning,
        )
        layout = Layout(grid, self.sequences, recompute, kept_layers=0)
        framework = BALANCED if self.model.has_experts else AXONN_TUNE
        pricing = price(PricedJob(self.model, machine.document, workload, framework), layout)
        launch = build_launch(pricing, model=model, machine=machine, command="make gpu")
        changes = {"compile": compiled, "backend": site.backend, "ranks_per_node": 1}
        return launch.model_copy(update=changes), pricing


def small_jobs(micro_batch: int = 2) -> list[Job]:
    """Models that train in a moment anywhere, and one of which adapters do."""
    models = [(load_model(name).document, sequence) for name, sequence in SMALL]
    tuned = models[1][0].model_copy(update={"name": "nano-llama-lora"}).tuned(LORA)
    return [Job(model, sequence, micro_batch) for model, sequence in (*models, (tuned, models[1][1]))]


def jobs(site: Site) -> list[Job]:
    """On a GPU GPT 1.3B (GPT-3 XL, Brown et al. 2020, table 2.1), Llama 3.2 1B and half of its layers with 16 experts;
    else the small ones."""
    if not site.cuda:
        return small_jobs()
    shape = {"hidden": 2048, "ffn": 8192}
    gpt = {"name": "gpt-1.3b", "layers": 24, "heads": 16, "kv_heads": 16, "head_dim": 128}
    llama = {"name": "llama3-1b", "layers": 16, "heads": 32, "kv_heads": 8, "head_dim": 64, "tied_embeddings": True}
    one = load_model("llama3-8b").document.model_copy(update=shape | llama)
    experts = {"experts": {"count": 16, "per_token": 2, "width": 2048}}
    moe = {"name": "llama3-moe", "layers": "moe*8", "layer_types": {"moe": experts}}
    return [
        Job(load_model("gpt3-175b").document.model_copy(update=shape | gpt), 2048, 8),
        Job(one, 4096, 4),
        Job(Model.model_validate(one.model_dump(mode="json", by_alias=True, exclude_none=True) | moe), 4096, 4),
    ]


def trainer_of(launch: Launch, device: torch.device, mesh: Mesh | None = None, *, overlap: bool = True) -> Trainer:
    """Trains a launch config in this process."""
    mesh = mesh or build_mesh(launch.grid.grid())
    settings = settings_of(launch, device)
    settings = settings if overlap else replace(settings, overlaps=frozenset())
    return Trainer(launch, mesh, device=device, source=batches(launch, mesh), settings=settings)


def gradients_of(trainer: Trainer) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the first step, in fp64 on the host."""
    loss = float(trainer.gradients(0))
    parameters: list[Parameter] = [*trainer.model.store.matrices, *trainer.model.store.vectors]
    return loss, {one.name: one.gradient.double().cpu() for one in parameters}


def far(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Distance of all gradients together, relative."""
    apart = sum(float((found[name] - its).square().sum()) for name, its in right.items())
    return math.sqrt(apart / sum(float(its.square().sum()) for its in right.values()))


def correctness(site: Site, folder: Path) -> Iterator[Row]:
    """Losses and gradients against fp64 on the CPU, and the gradient of an embedding against fp64."""
    yield _doctor()
    device, cpu = site.device(), torch.device("cpu")
    for job in small_jobs():
        right_loss, right = gradients_of(trainer_of(job.launch(site, "fp64")[0], cpu))
        for precision, most in LIMITS.items():
            for mode, compiled in site.modes.items():
                for recompute in RECOMPUTES:
                    launch, _ = job.launch(site, precision, recompute, compiled=compiled)
                    loss, found = gradients_of(trainer_of(launch, device))
                    apart = max(abs(loss / right_loss - 1.0), far(found, right))
                    name = f"{job.model.name}, {precision}, {mode}, recompute {recompute}"
                    yield Row(name, apart, "relative", ok=apart < most, note=f"loss and gradients, at most {most:g}")
    yield _embedding(device)


def _doctor() -> Row:
    """How much of what the tool can use is missing here."""
    command = [sys.executable, "-m", "axonn_tune", "doctor", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    missing = [one["what"] for one in json.loads(done.stdout)["findings"] if one["state"] == "missing"]
    return Row("axonn-tune doctor: missing", len(missing), "", note=", ".join(missing), ok=done.returncode == 0)


def _embedding(device: torch.device) -> Row:
    """4,096 equal rows in bf16 into one: rounding each sum would lose most of it."""
    rows = torch.full((4096, 64), 0.01, dtype=torch.bfloat16, device=device)
    total = sums_of_rows(rows, torch.zeros(4096, dtype=torch.int64, device=device), 8)[0].double()
    error = float((total / (4096 * rows[0].double()) - 1.0).abs().max())
    return Row("embedding gradient, 4,096 equal tokens in bf16", error, "relative", ok=error < MOST_ROWS_ERROR)


@contextmanager
def alone(site: Site, folder: Path) -> Iterator[torch.device]:
    """A world of one rank whose collectives go through the backend."""
    device = site.device()
    (folder / "meeting").unlink(missing_ok=True)
    meeting = f"file://{(folder / 'meeting').absolute()}"
    dist.init_process_group(site.backend, init_method=meeting, rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def groups_of_one(site: Site, folder: Path) -> Iterator[Row]:
    """Every collective through the backend, over groups of one: those of the program, and overlap changes no bit."""
    with alone(site, folder) as device:
        for job in small_jobs():
            for recompute in RECOMPUTES:
                launch, _ = job.launch(site, "bf16", recompute, micro_batches=2)
                twins = [_trained(launch, device, overlap=overlap) for overlap in (True, False)]
                differing = sum(len(compare(one.ledger, program_of(launch), steps=2, least=1)) for one in twins)
                issued = sum(twins[0].ledger.counts.values())
                name = f"{job.model.name}, recompute {recompute}"
                yield Row(
                    f"{name}: collectives unlike the program", differing, "", ok=not differing, note=f"of {issued}"
                )
                apart = max(float((a - b).abs().max()) for a, b in zip(*map(_values, twins), strict=True))
                yield Row(f"{name}: overlap on less off", apart, "", ok=apart == 0.0, note="weights after two steps")


def _trained(launch: Launch, device: torch.device, *, overlap: bool) -> Trainer:
    trainer = trainer_of(launch, device, build_mesh(Grid(), keep_single=True), overlap=overlap)
    for step in range(2):
        trainer.step(step)
    return trainer


def _values(trainer: Trainer) -> list[torch.Tensor]:
    return [bucket.value for bucket in trainer.model.store.buckets]


def memory(site: Site, folder: Path) -> Iterator[Row]:
    """Peak memory of a step: predicted, dry-run, and what the device says."""
    device = site.device()
    for job in jobs(site):
        for recompute in RECOMPUTES:
            launch, pricing = job.launch(site, "bf16", recompute, compiled=site.compiled)
            predicted, name = float(pricing.memory.total_bytes), f"{job.model.name}, recompute {recompute}"
            yield Row(f"{name}: dry run", dry_run(launch)[1], "B", predicted)
            for what, found in _held(launch, device).items():
                yield Row(f"{name}: {what}", found, "B", predicted)


def _held(launch: Launch, device: torch.device) -> dict[str, float]:
    """Most memory in steps after the second: allocated, reserved, and the GPU's own count; tensors alone on a CPU."""
    if device.type != "cuda":
        with MetaBytes() as live:
            trainer = trainer_of(launch, device)
            trainer.step(0)
            live.peak = live.live
            trainer.step(1)
        return {"tensors": live.peak}
    free_before = torch.cuda.mem_get_info(device)[0]
    trainer = trainer_of(launch, device)
    for step in range(4):
        trainer.step(step)
        synchronize(device)
        if step == 1:
            forget_peak(device)
    found = {
        "allocated": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "driver": free_before - torch.cuda.mem_get_info(device)[0],
    }
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return {name: float(size) for name, size in found.items()}


WARM_UP, STEPS = 3, 10
"""Steps not counted, and counted."""


def step_seconds(step: Callable[[int], object], device: torch.device, *, steps: int = STEPS) -> float:
    """Median time of a step after the warm-up."""
    found = []
    for number in range(WARM_UP + steps):
        synchronize(device)
        began_s = time.perf_counter()
        step(number)
        synchronize(device)
        found.append(time.perf_counter() - began_s)
    return statistics.median(found[WARM_UP:])


def _speed_rows(name: str, job: Job, launch: Launch, step_s: float, pricing: Detail) -> Iterator[Row]:
    flops, peak = model_flops(job.model, launch.workload), launch.predicted.peak_tflops * 1e12
    yield Row(f"{name}: step", step_s, "s", pricing.iteration_s)
    yield Row(f"{name}: MFU", flops / step_s / peak, "share", flops / pricing.iteration_s / peak)


def speed(site: Site, folder: Path) -> Iterator[Row]:
    """Step time and MFU, and the time of kernels by class against the priced sections."""
    device = site.device()
    for job in jobs(site):
        for mode, compiled in site.modes.items():
            launch, pricing = job.launch(site, "bf16", compiled=compiled)
            trainer, name = trainer_of(launch, device), f"{job.model.name}, {mode}"
            yield from _speed_rows(name, job, launch, step_seconds(trainer.step, device), pricing)
            priced = dict[str, float]()
            for work in work_by_kind(pricing):
                priced[work.kind] = priced.get(work.kind, 0.0) + work.seconds
            for kind, seconds in kernel_seconds(trainer, device, folder / f"{name}.json").items():
                yield Row(f"{name}: {kind}", seconds, "s", priced.get(kind))
            del trainer
            gc.collect()


KINDS = (
    (COLLECTIVES, r"nccl|c10d|gloo"),
    (ATTENTION, r"flash|fmha|attention|sdpa"),
    (OPTIMIZER, r"adam|multi_tensor|foreach|norm_kernel|lpnorm"),
    (GEMMS, r"gemm|cutlass|nvjet|cublas|xmma|::(add)?mm|::bmm|::baddbmm"),
    (OTHER, r"memcpy|memset|::copy_|::to|::zero_|::fill_|::clone"),
)
"""Classes of kernels (on a CPU: of operators) by their names, the first that fits; all others are element-wise."""


def kernel_kind(name: str) -> str:
    """The class of a kernel or operator."""
    return next((kind for kind, names in KINDS if re.search(names, name, re.IGNORECASE)), ELEMENT_WISE)


def kernel_seconds(trainer: Trainer, device: torch.device, path: Path) -> dict[str, float]:
    """Time of the kernels of one step by class, from torch's profiler; on a CPU of operators, without those inside.

    path: where each kernel is written, with its time and number of calls, the longest first.
    """
    cuda = device.type == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=kinds) as found:
        trainer.step(WARM_UP + STEPS)
        synchronize(device)
    every = list[tuple[float, int, str, str]]()
    sums = dict.fromkeys((GEMMS, ATTENTION, ELEMENT_WISE, OPTIMIZER, COLLECTIVES, OTHER), 0.0)
    for event in found.key_averages():
        if cuda and not str(event.device_type).endswith("CUDA"):
            continue
        seconds = (event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6
        every.append((seconds, event.count, kernel_kind(event.key), event.key))
        sums[kernel_kind(event.key)] += seconds
    path.write_text(json.dumps(sorted(every, reverse=True), indent=1), encoding="utf-8")
    return sums


def plain(site: Site, folder: Path) -> Iterator[Row]:
    """The same models as ordinary PyTorch modules: autocast, SDPA, fused AdamW, and torch.compile of the whole."""
    device = site.device()
    for job in jobs(site):
        launch, pricing = job.launch(site, "bf16")
        step = _plain_step(job, launch, device, compiled=site.compiled)
        name = f"{job.model.name}, PyTorch {'compiled' if site.compiled else 'eager'}"
        yield from _speed_rows(name, job, launch, step_seconds(step, device), pricing)
        del step
        gc.collect()


def _plain_step(job: Job, launch: Launch, device: torch.device, *, compiled: bool) -> Callable[[int], object]:
    with device:
        module = Reference(job.model)
    options = launch.optimizer
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.learning_rate, betas=options.betas, fused=True)
    source = batches(launch, build_mesh(Grid()))
    loss_of = torch.compile(module) if compiled else module

    def step(number: int) -> None:
        tokens, targets = (part.to(device) for part in source(number, 0))
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), options.gradient_clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed_steps(site: Site, folder: Path) -> Iterator[Row]:
    """Steps whose collectives are timed against steps without; hardware queues are as this process was given them."""
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")
    with alone(site, folder) as device:
        for job in jobs(site):
            launch, _ = job.launch(site, "bf16", compiled=site.compiled)
            trainer, name = trainer_of(launch, device, build_mesh(Grid(), keep_single=True)), job.model.name
            untimed_s = step_seconds(trainer.step, device)
            timed_s, exposed_s = _timed(trainer, device)
            yield Row(f"{name}, {queues} queues: step without timing", untimed_s, "s")
            yield Row(f"{name}, {queues} queues: step with timing", timed_s, "s")
            yield Row(f"{name}, {queues} queues: waiting for collectives, timed", exposed_s, "s")
            del trainer
            gc.collect()


def _timed(trainer: Trainer, device: torch.device) -> tuple[float, float]:
    """Medians of a step whose collectives are timed, and of how long its computation waits for them."""
    timer, exposed_s = trainer.model.communicator.timer, list[float]()
    timer.start(device)

    def step(number: int) -> None:
        timer.begin_step(0)
        trainer.step(number)
        synchronize(device)
        times = timer.end_step()
        assert times is not None, "step 0 is timed"
        exposed_s.append(times.exposed_s)

    return step_seconds(step, device), statistics.median(exposed_s[WARM_UP:])


def calibration(site: Site, folder: Path) -> Iterator[Row]:
    """Rates that `calibrate` fits here against those of the profile, and the GPU's clock against the host's."""
    output, name = folder / "here.yaml", jobs(site)[0].model
    model = folder / "model.yaml"
    model.write_text(json.dumps(name.model_dump(mode="json", by_alias=True)), encoding="utf-8")
    command = [
        *(sys.executable, "-m", "axonn_tune", "calibrate", "--ranks", "1", "--backend", site.backend),
        *("--machine", site.machine, "--model", str(model), "--budget", "60s" if site.cuda else "2s"),
        *("-o", str(output)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    yield Row(
        "axonn-tune calibrate: exit code", done.returncode, "", 0, ok=not done.returncode, note=_last(done.stderr)
    )
    if not done.returncode:
        shipped, fitted = (load_machine(one).document.accelerator for one in (site.machine, output))
        for key in ("memory_efficiency", "attention_forward_efficiency", "attention_backward_efficiency"):
            yield Row(key, getattr(fitted, key), "share", getattr(shipped, key), note=f"{site.machine}'s as predicted")
        for layout, share in shipped.matmul_efficiency.items():
            yield Row(f"matmul_efficiency {layout}", fitted.matmul_efficiency[layout], "share", share)
    device = site.device()
    yield _clocks(device)
    if not done.returncode:
        own = replace(site, machine=str(output))
        for job in jobs(site):
            launch, pricing = job.launch(own, "bf16" if site.cuda else "fp32", compiled=site.compiled)
            step_s = step_seconds(trainer_of(launch, device).step, device)
            yield Row(f"{job.model.name}, by the fitted profile: step", step_s, "s", pricing.iteration_s)
            gc.collect()


def _clocks(device: torch.device) -> Row:
    """GEMMs one after the other, by the clock that times collectives and by the host's."""
    clock: HostClock = DeviceClock(device) if device.type == "cuda" else HostClock()
    width = 4096 if device.type == "cuda" else 512
    left = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    left @ left
    synchronize(device)
    began_s, start = time.perf_counter(), clock.mark()
    for _ in range(100):
        left @ left
    end = clock.mark()
    synchronize(device)
    host_s = time.perf_counter() - began_s
    note = "as predicted: by the clock of timed steps"
    return Row(f"100 GEMMs of {width:,}³ by the host's clock", host_s, "s", clock.between_s(start, end), note=note)


RUN_LIMIT_S = 60.0
"""How long ranks may run; where they are after half of it is in their logs."""
Answer = tuple[int, str]
"""Exit code, and what was said on standard error."""


def run_ranks(launch: Launch, folder: Path, *, steps: int | None = None, stop_after: int | None = None) -> list[Answer]:
    """Run all ranks of a launch config here, as `axonn-tune run` does; stop_after: a signal once so many are done."""
    folder.mkdir(parents=True, exist_ok=True)
    path, world = folder / "launch.yaml", launch.grid.world
    path.write_text(launch_text(launch), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(world)}
    context = multiprocessing.get_context("fork")
    started: list[BaseProcess] = []
    for rank in range(world):
        own = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
        options = {"steps": steps, "directory": folder}
        started.append(context.Process(target=_be_rank, args=(str(path), options, own, str(folder / f"{rank}.log"))))
        started[-1].start()
    if stop_after is not None:
        while len(losses(folder)) < stop_after and started[0].is_alive():
            time.sleep(0.01)
        for one in started:
            os.kill(one.pid or 0, signal.SIGUSR2)
    ends_s = time.monotonic() + RUN_LIMIT_S
    for one in started:
        one.join(max(0.0, ends_s - time.monotonic()))
    for one in started:
        if one.is_alive():
            one.kill()
            one.join()
    return [(one.exitcode or 0, (folder / f"{rank}.log").read_text("utf-8")) for rank, one in enumerate(started)]


def _be_rank(path: str, options: dict[str, Any], environment: dict[str, str], log: str) -> None:
    os.environ.update(environment)
    with Path(f"{log}.stack").open("w") as stack:
        faulthandler.dump_traceback_later(RUN_LIMIT_S / 2, file=stack)
        train(path, options, log)


def losses(folder: Path) -> list[float]:
    """Loss of each step that is recorded."""
    metrics = folder / "metrics-rank0.jsonl"
    lines = metrics.read_text("utf-8").splitlines() if metrics.exists() else []
    return [found["loss"] for line in lines if "loss" in (found := json.loads(line))]


def two_ranks(site: Site, folder: Path) -> Iterator[Row]:
    """Two ranks whose tensors are on this one device, over Gloo, against one rank."""
    site = replace(site, compiled=False)
    for job in small_jobs():
        alone_launch, _ = replace(job, sequences=4).launch(site, "fp32")
        run_ranks(_on(alone_launch, site), folder / job.model.name, steps=3)
        right = losses(folder / job.model.name)
        whole = any(layer.mixer for layer in job.model.types)
        axes = [axis for axis in STAGE_AXES if axis != "context" or not whole]
        for axis in (*axes, *(("expert",) if job.model.has_experts else ())):
            sizes = {"data": 2, "expert": 2} if axis == "expert" else {axis: 2}
            grid = Grid(order=RANK_AXES, **sizes)
            launch, _ = replace(job, sequences=4 // grid.z // grid.data).launch(site, "fp32", grid=grid)
            its = folder / f"{job.model.name}-{axis}"
            answers, found = run_ranks(_on(launch, site), its, steps=3), losses(its)
            apart = max((abs(a / b - 1.0) for a, b in zip(found, right, strict=False)), default=math.inf)
            fine = apart < LIMITS["fp32"] and all(code == 0 for code, _ in answers) and len(found) == len(right) == 3
            name = f"{job.model.name}, {', '.join(f'{one} 2' for one in sizes)}: losses against one rank"
            yield Row(name, apart, "relative", ok=fine, note="" if fine else _last(answers[0][1]))


def _on(launch: Launch, site: Site) -> Launch:
    """Over Gloo, with tensors on the site's device."""
    return launch.model_copy(update={"backend": "gloo", "device": site.kind, "environment": ()})


def _last(said: str) -> str:
    """The last line of a log."""
    return (said.strip().splitlines() or [""])[-1][:200]


def runs(site: Site, folder: Path) -> Iterator[Row]:
    """Whole runs: deterministic twice, stopped by a signal and resumed, and out of memory."""
    launch, _ = small_jobs()[0].launch(site, "bf16", compiled=site.compiled)
    launch = launch.model_copy(update={"steps": 6, "deterministic": True, "environment": ()})
    answers = [run_ranks(launch, folder / name)[0] for name in ("first", "second")]
    first, second = losses(folder / "first"), losses(folder / "second")
    same = len(first) == 6 and first == second
    twice = sum(map(eq, first, second))
    yield Row("deterministic, twice: steps of the same loss", twice, "", 6, ok=same, note=_note(answers))
    saved = launch.model_copy(
        update={"checkpoint": Checkpoint(directory=str(folder / "checkpoints"), every_steps=2), "steps": 10_000}
    )
    code, said = run_ranks(saved, folder / "stopped", stop_after=3)[0]
    yield Row("stopped by SIGUSR2: exit code", code, "", 75, ok=code == 75, note="" if code == 75 else _last(said))
    done = len(losses(folder / "stopped"))
    code, said = run_ranks(saved, folder / "resumed", steps=done + 2)[0]
    whole = run_ranks(launch, folder / "whole", steps=done + 2)[0]
    resumed, right = losses(folder / "resumed"), losses(folder / "whole")[done:]
    yield Row(
        *("resumed: steps of the same loss as without a stop", sum(map(eq, resumed, right)), "", 2),
        ok=len(resumed) == 2 and resumed == right,
        note=_note([(code, said), whole]),
    )
    if site.cuda:
        yield _out_of_memory(site, folder)


def _note(answers: Sequence[Answer]) -> str:
    return "; ".join(f"exit code {code}: {_last(said)}" for code, said in answers if code)


def _out_of_memory(site: Site, folder: Path) -> Row:
    """A micro-batch that no GPU holds."""
    launch, _ = replace(jobs(site)[0], sequences=4096).launch(site, "bf16")
    # Its prediction would end it before it starts.
    unknown = launch.predicted.model_copy(update={"memory_bytes": None})
    changes = {"environment": (), "predicted": unknown}
    code, said = run_ranks(launch.model_copy(update=changes), folder / "too-large", steps=1)[0]
    told = [line for line in said.splitlines() if line.startswith("Error") and "out of memory" in line]
    return Row("out of memory: exit code", code, "", 4, ok=code == 4 and bool(told), note=_last("".join(told)))


Measure = Callable[[Site, Path], Iterator[Row]]


@dataclass(frozen=True)
class Stage:
    """One stage: title and words for the page; environment: of its process; cuda_only: says nothing on a CPU; limit_s:
    at which it is ended, with the rows that it has, if before all stages' limit."""

    name: str
    title: str
    measure: Measure
    environment: tuple[tuple[str, str], ...] = ()
    cuda_only: bool = False
    limit_s: float = math.inf


def speed_alike(site: Site, folder: Path) -> Iterator[Row]:
    """The same with kernels that no timing picks: the variable for it is read before a stage is forked."""
    torch._inductor.config.deterministic = True
    yield from speed(site, folder)


STAGES = (
    Stage("kernels", "Kernels that no source has", kernels, limit_s=300.0),
    Stage("correctness", "Losses and gradients", correctness),
    Stage("groups", "Groups of one", groups_of_one),
    Stage("memory", "Peak memory", memory),
    Stage("speed", "Step time and kernels", speed),
    Stage(
        *("speed-alike", "Step time with kernels that no timing picks", speed_alike),
        cuda_only=True,
    ),
    Stage("matmuls", "GEMMs in each number format", matmuls, cuda_only=True),
    Stage("quantization", "Quantization", quantization, cuda_only=True),
    Stage("grouped", "GEMMs of experts", grouped, cuda_only=True),
    Stage("attention", "Attention", attention, cuda_only=True),
    Stage("plain", "The same models in plain PyTorch", plain),
    *(
        Stage(
            *(f"timing-{queues}", f"Timed and untimed steps, {counted(queues, 'hardware queue')}", timed_steps),
            environment=(("CUDA_DEVICE_MAX_CONNECTIONS", str(queues)),),
            cuda_only=queues != 8,
        )
        for queues in (8, 1, 32)
    ),
    Stage("calibration", "Calibration", calibration),
    Stage("two-ranks", "Two ranks on one device", two_ranks),
    Stage("runs", "Whole runs", runs),
)


def run_stage(stage: Stage, site: Site, folder: Path) -> Iterator[dict[str, Any]]:
    """What a stage has found after each row, as its JSON document, the whole last; a failure is recorded with it."""
    os.environ.update(stage.environment)
    # Checkpoints and metrics of an earlier time would be gone on with.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began_s, rows = time.monotonic(), list[dict[str, Any]]()

    def document(error: str) -> dict[str, Any]:
        passed_s = time.monotonic() - began_s
        known = {"stage": stage.name, "site": asdict(site), "torch": str(torch.__version__)}
        return {**known, "seconds": passed_s, "error": error, "rows": rows}

    try:
        for row in stage.measure(site, folder):
            rows.append(asdict(row))
            yield document(f"cut off after {counted(len(rows), 'row')}")
    except Exception as problem:
        yield document(f"{type(problem).__name__}: {problem}")
        return
    yield document("")
