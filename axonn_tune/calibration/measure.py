"""One calibration: request, plan, measuring ranks, and the profile from their points."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from axonn_tune.calibration.profile import Calibration, calibrate
from axonn_tune.cost.price import price
from axonn_tune.errors import EnvironmentProblem, TrainingFailedError, UsageError, count_in
from axonn_tune.files import write_text_atomically
from axonn_tune.grid import Grid, divisors
from axonn_tune.job import Job, Layout
from axonn_tune.launch import host
from axonn_tune.launch.config import build_launch, compiles
from axonn_tune.program.count import counted
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.operations import MatMul
from axonn_tune.program.step import build_step
from axonn_tune.ranking.inputs import make_workload
from axonn_tune.ranking.space import sound_sizes
from axonn_tune.request import Request
from axonn_tune.specs.catalog import MachineLike, ModelLike, load_machine, load_model
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import Loaded
from axonn_tune.specs.machine import MEASURED_KINDS, Backend, Machine, MatmulLayout
from axonn_tune.specs.model import Model
from axonn_tune.specs.points import (
    AttentionProbe,
    CollectiveProbe,
    CopyProbe,
    MatmulProbe,
    Plan,
    Probe,
    StepProbe,
    read_points,
)
from axonn_tune.specs.workload import ELEMENT_SIZES, Workload
from axonn_tune.vocabulary import Precision

_STANDARD_ERROR = 2
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class CalibrationRequest:
    """Options of a calibration, as on the command line; None leaves one to the defaults."""

    output: str
    points: str | None = None
    name: str | None = None
    model: ModelLike = "nano"
    machine: MachineLike = "localhost"
    precision: Precision | None = None
    batch: int | None = None
    backend: Backend = "gloo"
    budget: str = "60s"
    ranks: int | None = None
    ranks_per_node: int | None = None
    resume: bool = False

    @property
    def points_path(self) -> Path:
        """File of raw points."""
        return Path(self.points or f"{self.output.removesuffix('.yaml')}.points.jsonl")

    @cached_property
    def ranks_here(self) -> int | None:
        """Ranks to start on this host, one for each GPU or core; None where this process is one of a started world.

        UsageError if ranks are to be started inside such a world, EnvironmentProblem without a GPU for nccl.
        """
        if not host.already_started(os.environ):
            if self.ranks or self.backend == "gloo":
                return self.ranks or len(os.sched_getaffinity(0))
            found = host.torch_devices() or {}
            if not found.get("gpus"):
                reason = found.get("error", "torch finds none here")
                raise EnvironmentProblem(f"--backend nccl measures GPUs, but {reason}; --backend gloo measures CPUs")
            return len(found["gpus"])
        if self.ranks is not None:
            raise UsageError("--ranks starts ranks on this host, but this process is one of a world already started")
        return None

    def command(self, plan: Path, *, progress: int) -> list[str]:
        """What measures; progress: the descriptor to report progress to."""
        ranks = self.ranks_here
        return [
            *(sys.executable, "-m", "axonn_tune.runtime.probes", str(plan), str(self.points_path)),
            *("--backend", self.backend, "--progress", str(progress), "--parent", str(os.getpid())),
            *([] if ranks is None else ["--ranks", str(ranks)]),
            *(["--resume"] if self.resume else []),
        ]


def plan_of(request: CalibrationRequest) -> Plan:
    """What to measure; UsageError if ranks are to be started inside a world that is already started."""
    model, machine = load_model(request.model), load_machine(request.machine)
    precision: Precision = request.precision or ("fp32" if request.backend == "gloo" else "bf16")
    workload = make_workload(model.document, Request(batch=request.batch, precision=precision))
    size = "WORLD_SIZE"
    return build_plan(
        model,
        machine,
        workload,
        world=request.ranks_here or count_in(os.environ, size if os.environ.get(size) else "SLURM_NTASKS", "1"),
        backend=request.backend,
        budget_s=seconds_of(request.budget),
    )


@dataclass(frozen=True)
class CalibrationProgress:
    """Progress of the ranks: points so far, seconds since they met, kind of the last point."""

    points: int
    elapsed_s: float
    what: str


def seconds_of(text: str) -> float:
    """`20s`, `5m`, `1h` or `90` as seconds; UsageError otherwise."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None or float(found[1]) <= 0.0:
        raise UsageError(f"--budget {text}: write a time such as 20s, 5m or 1h")
    return float(found[1]) * _UNITS_S[found[2] or "s"]


def run_probes(request: CalibrationRequest, plan: Plan, listen: Callable[[CalibrationProgress], None]) -> int:
    """Run the plan on all ranks, or on this one of them; points are in the request's file afterwards.

    Returns the exit code; where it is not 0 the ranks have printed why.
    """
    with tempfile.TemporaryDirectory(prefix="axonn-tune-") as folder:
        path = Path(folder) / "plan.json"
        path.write_text(plan.model_dump_json(by_alias=True), encoding="utf-8")
        # As many threads as in training, where a launch config sets the same.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        reading, writing = os.pipe()
        with os.fdopen(reading, encoding="utf-8") as reports:
            try:
                # Standard output is the profile's; what libraries print there goes to standard error.
                process = subprocess.Popen(
                    request.command(path, progress=writing), stdout=_STANDARD_ERROR, pass_fds=[writing], env=environment
                )
            finally:
                os.close(writing)
            try:
                for line in reports:
                    listen(CalibrationProgress(**json.loads(line)))
                code = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
    return code if code >= 0 else TrainingFailedError.exit_code


def write_profile(request: CalibrationRequest) -> Calibration:
    """Fit the points and write the profile."""
    base, measured = load_machine(request.machine).document, read_points(request.points_path)
    done = calibrate(
        measured, base, name=request.name or Path(request.output).stem, ranks_per_node=request.ranks_per_node
    )
    origin = f"Raw points: {request.points_path.name}"
    header = [f"{done.machine.description}.", f"{origin}. Units and sources: docs/machines.md."]
    write_text_atomically(request.output, to_yaml(done.machine, header=header))
    return done


# The plan.

MOST_SHAPES = 16
"""Group shapes measured at most: each needs process groups of its own."""
MOST_MATMULS = 7
"""GEMMs measured per layout."""

KIB, MIB = 1024, 1024**2
_SIZES: dict[Backend, tuple[int, ...]] = {
    "gloo": (2 * KIB, 1 * MIB, 64 * KIB, 256 * KIB, 16 * KIB, 4 * MIB, 512 * KIB, 8 * KIB, 16 * MIB),
    "nccl": (8 * KIB, 64 * MIB, 1 * MIB, 8 * MIB, 256 * KIB, 512 * MIB, 32 * KIB, 2 * MIB, 192 * MIB),
}
"""Message sizes, most important first."""
_ESSENTIAL_SIZES = 2
_MOST_PARAMETERS: dict[Backend, int] = {"gloo": 50_000_000, "nccl": 2_000_000_000}
"""Of the model that a single rank trains, as far as fewer layers and a smaller vocabulary can make it."""
_TABLES_SHARE = 4
"""A vocabulary takes at most one in so many of these parameters."""
_MOST_FLOPS: dict[Backend, float] = {"gloo": 2e10, "nccl": 1e13}
"""Of one GEMM: a fraction of a second, for every probe is run several times."""
_MOST_BYTES: dict[Backend, int] = {"gloo": 128 * MIB, "nccl": 1024 * MIB}
"""Of one activation: GEMMs hold two of them, attention and steps about ten."""
_STEP_SHARE = 4
"""A step, which keeps the activations of many layers, has one in so many of the tokens that GEMMs may have."""
_COPIES: dict[Backend, tuple[int, ...]] = {"gloo": (256 * KIB, 32 * MIB), "nccl": (16 * MIB, 512 * MIB)}


def group_shapes(world: int) -> list[tuple[int, int]]:
    """`(size, stride)` of every group over one axis that a grid of this world can have, most important first.

    The whole world, then neighbours, then ranks as far apart as can be, then what lies between.
    """
    shapes = [(size, stride) for size in divisors(world)[1:] for stride in divisors(world // size)]

    def priority(shape: tuple[int, int]) -> tuple[int, int, int]:
        size, stride = shape
        place = 0 if size == world else 1 if stride == 1 else 2 if size * stride == world else 3
        return place, -size, stride

    return sorted(shapes, key=priority)[:MOST_SHAPES]


def build_plan(
    model: Loaded[Model], machine: Loaded[Machine], workload: Workload, *, world: int, backend: Backend, budget_s: float
) -> Plan:
    """What to measure; `machine` says how ranks start, its numbers are ignored."""
    most_tokens = _most_tokens(model.document, workload, backend)
    short = _shortened(workload, most_tokens)
    # Sequences of one rank's step: its share of the batch, at most so many tokens, and a quarter of that.
    share = max(1, min(short.global_batch // world, most_tokens // _STEP_SHARE // short.sequence_length))
    launches = tuple(
        _single_rank(model, machine, short, batch=batch, backend=backend)
        for batch in dict.fromkeys((share, max(1, share // 4)))
    )
    steps = [StepProbe(launch=number) for number in range(len(launches))]
    sequences = launches[0].micro_batch
    passes = (False, True) if any(layer.attention for layer in model.document.types) else ()
    attention = [AttentionProbe(backward=backward, sequences=sequences) for backward in passes]
    copies = [CopyProbe(size_bytes=size) for size in _COPIES[backend]]
    element, sizes = ELEMENT_SIZES[workload.precision].compute, _SIZES[backend]
    gemms = matmuls(model.document, workload, world, backend=backend)
    essential: list[Probe] = [
        *(gemm for found in gemms.values() for gemm in {found[0]: None, found[-1]: None}),
        *attention,
        *copies,
        *steps,
        *_messages(world, sizes[:_ESSENTIAL_SIZES], element),
    ]
    others: list[Probe] = [
        *(gemm for found in gemms.values() for gemm in found[1:-1]),
        *_messages(world, sizes[_ESSENTIAL_SIZES:], element),
    ]
    return Plan(
        budget_s=budget_s,
        backend=backend,
        precision=workload.precision,
        launches=launches,
        probes=(*essential, *others),
        essential=len(essential),
    )


def _most_tokens(model: Model, workload: Workload, backend: Backend) -> int:
    """Tokens of one GEMM at most, limited by the FLOPs and memory of a rank.

    A power of two. Training splits larger batches into micro-batches, whose size is not known before the search.
    """
    widest = max(model.plain.qkv_width, model.plain.up_width, model.hidden)
    element = ELEMENT_SIZES[workload.precision].compute
    most = min(_MOST_FLOPS[backend] / (2.0 * model.hidden * widest), _MOST_BYTES[backend] / (element * widest))
    return 1 << max(0, int(most).bit_length() - 1)


def _shortened(workload: Workload, most_tokens: int) -> Workload:
    """With sequences no longer than that."""
    return workload.model_copy(update={"sequence_length": min(workload.sequence_length, most_tokens)})


def matmuls(model: Model, workload: Workload, world: int, *, backend: Backend) -> dict[MatmulLayout, list[MatmulProbe]]:
    """GEMMs of training on grids of this world, smallest first, some of each layout.

    With micro-batches that a rank can process at once, and without GEMMs that are too large even so.
    """
    most_tokens = _most_tokens(model, workload, backend)
    workload = _shortened(workload, most_tokens)
    found: dict[MatmulLayout, set[tuple[int, int, int]]] = {"NN": set(), "NT": set(), "TN": set()}
    program = build_step(model, workload, recompute="none")
    for row in sound_sizes(world, model, workload).tolist():
        grid = Grid(*row)
        batch = min(workload.global_batch // (grid.data * grid.z), most_tokens // workload.sequence_length)
        values = symbol_values(model, workload, grid, micro_batch=batch)
        for step, _ in program.calls():
            if isinstance(step, MatMul):
                m, n, k = (round(float(size.evaluate(values))) for size in (step.m, step.n, step.k))
                found[step.layout].add((m, n, k))
    return {
        layout: [MatmulProbe(layout=layout, m=m, n=n, k=k) for m, n, k in _chosen(found[layout], backend)]
        for layout in found
    }


def _chosen(shapes: Iterable[tuple[int, int, int]], backend: Backend) -> list[tuple[int, int, int]]:
    """GEMMs within the time limit of a probe, at least the smallest: evenly spread, the ends included."""
    ordered = sorted(shapes, key=lambda one: (one[0] * one[1] * one[2], one))
    ordered = [(m, n, k) for m, n, k in ordered if 2.0 * m * n * k <= _MOST_FLOPS[backend]] or ordered[:1]
    if len(ordered) <= MOST_MATMULS:
        return ordered
    return [ordered[round(place * (len(ordered) - 1) / (MOST_MATMULS - 1))] for place in range(MOST_MATMULS)]


def _messages(world: int, sizes: Sequence[int], element: int) -> list[Probe]:
    """Every collective over every group shape, in these sizes."""
    return [
        CollectiveProbe(op=op, group=group, stride=stride, size_bytes=_whole(size, group * element))
        for size in sizes
        for group, stride in group_shapes(world)
        for op in MEASURED_KINDS
    ]


def _whole(size_bytes: int, multiple: int) -> int:
    """Rounded up, so that every rank's shard has as many whole elements."""
    return -(-size_bytes // multiple) * multiple


def _single_rank(
    model: Loaded[Model], machine: Loaded[Machine], workload: Workload, *, batch: int, backend: Backend
) -> Launch:
    """A training step of a single rank with this many sequences.

    A model that it cannot hold has a smaller vocabulary and fewer layers.
    """
    small = workload.model_copy(update={"global_batch": batch})
    whole, most = model.document, _MOST_PARAMETERS[backend]
    tables = 1 if whole.tied_embeddings else 2
    vocab = min(whole.vocab, most // _TABLES_SHARE // (tables * whole.hidden))
    layers = (most - tables * vocab * whole.hidden) // counted(whole)[0].weights
    # Of several layer types all are kept.
    layers = whole.layers if whole.pattern else max(1, min(whole.layers, layers))
    cut = whole.model_copy(update={"vocab": vocab, "layers": layers})
    pricing = price(Job(cut, machine.document, small), Layout(Grid(), batch, "none"))
    loaded = Loaded(cut, model.path, model.sha256)
    launch = build_launch(pricing, model=loaded, machine=machine, command="axonn-tune calibrate")
    # The profile that is written has this backend, whatever the base has, and runs then compile as it says.
    return launch.model_copy(update={"backend": backend, "compile": compiles(backend)})
