"""The launch config of one candidate: everything the runtime needs, environment and prediction included."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from axonn_tune.cost.price import Detail
from axonn_tune.files import write_text_atomically
from axonn_tune.grid import AXES, Grid
from axonn_tune.job import forced_balance, require_run
from axonn_tune.request import ALPHA_BETA
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.launch import (
    PURPOSES,
    CollectiveTerm,
    Data,
    Launch,
    LaunchGrid,
    LaunchVariable,
    Optimizer,
    Prediction,
    Provenance,
    Purpose,
)
from axonn_tune.specs.loading import Loaded
from axonn_tune.specs.machine import Backend, EnvironmentVariable, Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload
from axonn_tune.units import show_bytes, show_interval, show_seconds
from axonn_tune.vocabulary import VERSION

LOAD_BALANCING = 1e-3
"""Coefficient of the load-balancing loss, where it is asked for: that of Qwen3 (`router_aux_loss_coef`)."""


def build_launch(
    priced: Detail,
    *,
    model: Loaded[Model],
    machine: Loaded[Machine],
    command: str,
    created: datetime | None = None,
    tokens: str | None = None,
) -> Launch:
    """The launch config of a priced candidate; `created` is now unless given, `tokens` a file to train on.

    model, machine: of its job, as loaded. Errors as `require_run`.
    """
    require_run(priced.job, priced, model.document)
    job, grid, launcher = priced.job, priced.grid, machine.document.launcher
    return Launch.from_fields_of(
        priced,
        schema="axonn-tune/launch/1",
        name=run_name(model.document.name, grid.world),
        model=model.document,
        workload=job.workload,
        grid=LaunchGrid.from_fields_of(
            grid, order=tuple(axis for axis in grid.order if axis in AXES or grid.axis_size(axis) > 1)
        ),
        grad_accumulation=priced.accumulation,
        kept_layers=int(priced.memory.kept_layers),
        force_load_balancing=forced_balance(priced.job, model.document),
        load_balancing_loss=LOAD_BALANCING if job.framework.step.balancing_loss else 0.0,
        compile=compiles(launcher.backend),
        backend=launcher.backend,
        ranks_per_node=min(launcher.ranks_per_node, grid.world),
        optimizer=Optimizer.model_validate({"name": job.framework.step.optimizer}),
        pipeline_order=job.framework.step.pipeline_order,
        data=Data(path=tokens),
        environment=launch_environment(machine.document, workload=job.workload, grid=grid),
        predicted=predict(priced),
        provenance=Provenance(
            tool="axonn-tune",
            version=VERSION,
            created=(created or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="seconds"),
            command=command,
            model_sha256=model.sha256,
            machine_sha256=machine.sha256,
        ),
    )


def compiles(backend: Backend) -> bool:
    """Default of `compile` for a backend: GPUs have Triton, CPUs may lack a compiler."""
    return backend == "nccl"


def launch_text(launch: Launch) -> str:
    """A launch config as commented YAML that loads back equal, with an empty line around each top-level section."""
    lines, made = list[str](), launch.provenance
    header = [
        f"{launch.name}: one configuration of {launch.model.name} on {count_ranks(launch.grid.world)} of "
        f"{launch.predicted.machine}, complete in itself.",
        f"Grid: {grid_line(launch)}.",
        f"Predicted: {prediction_line(launch.predicted)}.",
        *([_CONSTANTS] if launch.model.norm_epsilon or launch.model.rotary_base else []),
        "Run it with the script that `axonn-tune ... --emit torchrun` or `--emit slurm` writes beside it. It starts",
        "axonn_tune.runtime once per rank, which needs torch: the extra [runtime].",
        f"Written by {made.tool} {made.version}: {made.command}",
    ]
    for line in to_yaml(launch, header=header).splitlines():
        previous = lines[-1] if lines else ""
        after_section = previous.startswith(" ") and not line.startswith(" ")
        before_section = line.startswith("#") and previous[:1].isalpha()
        lines += ["", line] if after_section or before_section else [line]
    return "\n".join(lines) + "\n"


def write_launch(path: str | Path, launch: Launch) -> None:
    """Write a launch config and replace an existing file, which stays unchanged on any failure.

    UsageError for a missing folder, EnvironmentProblem for a full disk or missing permission.
    """
    write_text_atomically(path, launch_text(launch))


def prediction_line(predicted: Prediction) -> str:
    """Prediction of one step, in one line."""
    sent = predicted.communication_s > 0
    parts = [f"{show_seconds(predicted.communication_s)} of collectives" if sent else "no collectives"]
    if predicted.iteration_s is not None:
        low_s, high_s = predicted.low_s, predicted.high_s
        interval = "" if low_s is None or high_s is None else f" ({show_interval(low_s, high_s)})"
        parts.insert(0, f"step {show_seconds(predicted.iteration_s)}{interval}")
    if sent and predicted.exposed_communication_s is not None:
        parts[-1] += f" ({show_seconds(predicted.exposed_communication_s)} exposed)"
    if predicted.memory_bytes is not None:
        limit = predicted.memory_limit_bytes
        of = f" of {show_bytes(limit)}" if limit is not None else ""
        parts.append(f"{show_bytes(predicted.memory_bytes)}{of} a rank")
    if predicted.mfu is not None:
        parts.append(f"MFU {predicted.mfu:.1%}")
    if predicted.logged_tflops_per_gpu is not None:
        parts.append(f"{predicted.logged_tflops_per_gpu:,.0f} TFLOP/s per GPU in its log")
    return ", ".join(parts)


def grid_line(launch: Launch) -> str:
    """The grid with its product, and the numbering of ranks."""
    grid = launch.grid
    axes, sizes = grid.product
    product = f"{axes} = {sizes} = {count_ranks(grid.world)}"
    wide = [axis for axis in grid.order if grid.grid().axis_size(axis) > 1]
    return product + (f", numbered with {', then '.join(wide)} varying fastest" if wide else "")


def count_ranks(count: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} rank" if count == 1 else f"{count} ranks"


_CONSTANTS = (
    "The runtime's own rotary base is 10,000 and its norm epsilon 1e-05; it has no biases of queries, keys and values "
    "alone. Speed does not depend on them."
)


def run_name(model: str, world: int) -> str:
    """Model and ranks, in characters that are safe for folders, jobs and shells."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model).strip('-.') or 'model'}-{world}"


def predict(priced: Detail) -> Prediction:
    """Prediction of a step of a priced layout."""
    machine = priced.job.machine
    return Prediction.from_fields_of(
        priced,
        machine=machine.name,
        accelerator=machine.accelerator.name,
        peak_tflops=machine.accelerator.peak_tflops[priced.job.gemm_format],
        cost=ALPHA_BETA,
        terms=tuple(map(CollectiveTerm.from_fields_of, priced.terms)),
    )


_HEADINGS: dict[Purpose, str] = {
    "overlap": "For overlapped communication, which the predicted step time assumes.",
    "memory": "For memory, most of which the prediction assumes to be usable.",
    "compute": "For computation, on the cores that the prediction assumes for each rank.",
    "site": "From the machine profile.",
    "debug": "For debugging. Training does not need them.",
}

_MOST_WORKERS = 8
_VARIABLES: dict[str, tuple[Purpose, str]] = {
    "OMP_NUM_THREADS": ("compute", "one thread per core of a rank, so that the ranks of a node do not share cores"),
    "CUDA_DEVICE_MAX_CONNECTIONS": (
        "overlap",
        "hardware queues: with 1, kernels issued after a waiting collective wait with it",
    ),
    "TORCH_NCCL_HIGH_PRIORITY": ("overlap", "collectives get the next free SMs before GEMMs do"),
    "PYTORCH_ALLOC_CONF": ("memory", "less memory lost to fragmentation"),
    "TORCHINDUCTOR_COMPILE_THREADS": (
        "compute",
        "compile processes per rank: torch's default is up to 32, times the ranks of a node",
    ),
    "NCCL_DEBUG": ("debug", "logs link failures and version conflicts"),
    "TORCHINDUCTOR_DETERMINISTIC": (
        "compute",
        "no autotuning by timing: different kernels per rank would make the vectors that x or y replicates diverge",
    ),
    "PYTHONFAULTHANDLER": ("debug", "a rank that crashes prints its traceback"),
}
"""Variables that the runtime needs: purpose and reason of each."""


def launch_environment(machine: Machine, *, workload: Workload, grid: Grid) -> tuple[LaunchVariable, ...]:
    """Environment of every rank: variables for overlap, memory and debugging, and those of the machine profile.

    The machine's value and reason take precedence.
    """
    slurm, values = machine.launcher.slurm, dict[str, str]()
    if machine.launcher.backend == "gloo":
        values["OMP_NUM_THREADS"] = str(slurm.cpus_per_rank if slurm else 1)
    else:
        if workload.overlaps:
            # Stages add streams for messages.
            values["CUDA_DEVICE_MAX_CONNECTIONS"] = "8" if grid.pipeline == 1 else "32"
            values["TORCH_NCCL_HIGH_PRIORITY"] = "1"
        values["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        workers = min(slurm.cpus_per_rank, _MOST_WORKERS) if slurm else _MOST_WORKERS
        values["TORCHINDUCTOR_COMPILE_THREADS"] = str(workers)
        values["NCCL_DEBUG"] = "WARN"
        if grid.x * grid.y > 1:
            values["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    values["PYTHONFAULTHANDLER"] = "1"
    found = {}
    for name, value in values.items():
        purpose, why = _VARIABLES[name]
        found[name] = LaunchVariable(name=name, value=value, why=why, purpose=purpose)
    for variable in machine.launcher.environment:
        purpose = found[variable.name].purpose if variable.name in found else "site"
        found[variable.name] = LaunchVariable(
            name=variable.name, value=variable.value, why=variable.why, purpose=purpose
        )
    return tuple(sorted(found.values(), key=lambda variable: PURPOSES.index(variable.purpose)))


def environment_lines(environment: Sequence[LaunchVariable]) -> list[str]:
    """The block of a script that sets the variables, grouped by purpose, one comment each."""
    lines: list[str] = []
    for purpose in PURPOSES:
        lines += variable_lines(_HEADINGS[purpose], [one for one in environment if one.purpose == purpose])
    return lines


def variable_lines(heading: str, variables: Sequence[EnvironmentVariable]) -> list[str]:
    """Lines of a script that set variables under a heading, one comment each; none without variables."""
    lines = ["", comment(heading)] if variables else []
    for variable in variables:
        lines += [comment(variable.why), f"export {variable.name}={shlex.quote(variable.value)}"]
    return lines


def comment(text: str) -> str:
    """Text as one comment line, whatever line breaks and control characters it holds."""
    words = "".join(letter if letter.isprintable() else " " for letter in text).split()
    return " ".join(["#", *words])
