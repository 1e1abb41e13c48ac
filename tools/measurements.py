"""Predicted vs. published collectives, GEMMs and memory: `python -m tools.measurements`.

The rows are in `tools/published`; `--collectives FILE`, `--gemm FILE` and `--memory FILE` read others, and leave out
the kinds that are not named. `--json` prints every row.

Collectives are priced by the lines of the machine's library, GEMMs as single kernels in short bursts, without sustained
efficiency. Quantities of memory are those of Korthikanti et al., arXiv 2205.05198, figures 1 and 7, and come from the
program's arrays.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Literal, TypeAlias

from axonn_tune.cost.collectives import Line, bus_bytes, collective_time_s, lines, route
from axonn_tune.cost.compute import ComputeRates, compute_rates, matmul_time_s
from axonn_tune.errors import AxonnTuneError
from axonn_tune.frameworks.megatron_lm import MEGATRON_2022
from axonn_tune.grid import Grid, GroupShape
from axonn_tune.job import Layout
from axonn_tune.program.dimensions import symbol_values
from axonn_tune.program.memory import persistent_items, saved_arrays
from axonn_tune.program.operations import PLAIN
from axonn_tune.program.pipeline import held_of_chunks, model_parts
from axonn_tune.program.step import Stage, StepProgram, build_step
from axonn_tune.report.output import Json, json_text
from axonn_tune.report.pairs import ERRORS, quality_text
from axonn_tune.specs.machine import COLLECTIVE_KINDS, CollectiveKind, MatmulLayout
from axonn_tune.specs.model import Model, ModelDefaults
from axonn_tune.specs.results import Pairs
from axonn_tune.specs.workload import ELEMENT_SIZES, Recompute, Workload
from axonn_tune.units import GIB, seconds
from axonn_tune.validation.published.cases import machine_of
from axonn_tune.validation.published.rows import Place, above_zero, count, each_record, number
from axonn_tune.validation.quality import Quality, by_group, quality, relative_error
from axonn_tune.vocabulary import Precision

Kind: TypeAlias = Literal["collectives", "gemm", "memory"]
PUBLISHED = Path(__file__).with_name("published")
"""Folder of the rows."""


@dataclass(frozen=True)
class Evaluation:
    """A measured and a predicted value, in the unit of its kind (s or bytes); `why_not` says why there is none.

    group: what its error is counted under; large: whether it counts among the large ones.
    """

    id: str
    group: str
    measured: float | None
    predicted: float | None = None
    why_not: str = ""
    large: bool = True

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None where either is missing."""
        return relative_error(self.predicted, self.measured)


def errors_by_group(evaluations: Iterable[Evaluation]) -> dict[str, Quality]:
    """Quality by group and of `all`; of the large ones only."""
    counted = {str(at): one for at, one in enumerate(evaluations) if one.large}
    pairs = Pairs(
        predicted={key: one.predicted for key, one in counted.items() if one.predicted is not None},
        measured={key: one.measured for key, one in counted.items() if one.measured is not None},
    )
    return by_group(pairs, {key: one.group for key, one in counted.items()}) | {"all": quality(pairs)}


# Collectives.

OF_COLLECTIVES = ("id", "system", "gpu", "library", "collective", "nranks", "size_bytes")
LARGE_BYTES = 1024**2
ASYMPTOTIC_BYTES = float(8 * 1024**3)
"""Size assumed for rows with a bandwidth of "large" messages."""

_KINDS: dict[str, CollectiveKind] = {kind: kind for kind in COLLECTIVE_KINDS}


def _evaluate_collective(record: Mapping[str, str], line: int) -> Evaluation:
    measured_s = _measured_s(record)
    size = _size_bytes(record)
    group = f"{record['system']}, {record['collective']}"

    def refuse(why: str) -> Evaluation:
        return Evaluation(record["id"], group, measured_s, why_not=why)

    kind = _KINDS.get(record["collective"])
    if kind is None:
        return refuse(f"{record['collective']!r} is not used by any layout here")
    library = record["library"].lower()
    if not ("nccl" in library or "rccl" in library) or "pccl" in library or "sockets" in library:
        return refuse(f"library {record['library']!r} is not modelled: NCCL and RCCL are")
    if "not representative" in record.get("notes", "").lower():
        return refuse("its own notes call it not representative of the collective alone")
    if size is None or number(record, "nranks") is None or (ranks := count(record, "nranks")) < 2:
        return refuse("no size or no ranks")
    nodes = count(record, "nodes", 1)
    # Groups that run side by side, whose ranks alternate.
    side_by_side = re.search(r"STRIDED ranks: (\d+) groups", record.get("notes", ""))
    stride = int(side_by_side[1]) if side_by_side else 1
    node_ranks = count(record, "gpus_per_node", 8) * stride if nodes > 1 else None
    place = Place(record["gpu"], record["system"], record.get("network", ""), node_ranks)
    found = _lines(kind, ranks, stride, place)
    if found is None:
        return refuse(f"no machine profile has the accelerator {record['gpu']!r}")
    predicted_s = collective_time_s(tuple((one.latency_s, one.bandwidth_bytes_per_s) for one in found), size, PLAIN)
    return Evaluation(record["id"], group, measured_s, float(predicted_s), large=size >= LARGE_BYTES)


@lru_cache(maxsize=1024)
def _lines(kind: CollectiveKind, ranks: int, stride: int, place: Place) -> tuple[Line, ...] | None:
    """The library's lines for one group at a place; None if no machine profile has its accelerator."""
    machine = machine_of(place)
    if machine is None:
        return None
    return lines(kind, route(GroupShape(((ranks, stride),)), machine.tiers, ranks * stride), machine)


def _size_bytes(record: Mapping[str, str]) -> float | None:
    size = above_zero(record, "size_bytes")
    return ASYMPTOTIC_BYTES if size is None and "large" in record["size_bytes"] else size


def _measured_s(record: Mapping[str, str]) -> float | None:
    """Time as printed, or as the printed bus bandwidth means (nccl-tests, PERFORMANCE.md)."""
    time_us, ranks, size = above_zero(record, "time_us"), above_zero(record, "nranks"), _size_bytes(record)
    if time_us is not None:
        return seconds(time_us)
    bus = above_zero(record, "busbw_GBps")
    if bus is None or ranks is None or size is None:
        return None
    return bus_bytes(record["collective"], ranks, size) / (bus * 1e9)


# GEMMs.

OF_GEMMS = ("gpu", "m", "n", "k", "latency_us")
LARGE_FLOPS = 1e10
"""GEMMs from this size on count as large: training has few smaller ones."""

_PRECISIONS: dict[str, Precision] = {"bf16": "bf16", "fp16": "fp16", "float16": "fp16", "bfloat16": "bf16"}
_LAYOUTS: dict[str, MatmulLayout] = {"NN": "NN", "NT": "NT", "TN": "TN"}


def _evaluate_gemm(record: Mapping[str, str], line: int) -> Evaluation:
    name = record.get("id") or f"line {line}"
    latency_us = above_zero(record, "latency_us")
    measured_s = None if latency_us is None else seconds(latency_us)
    group = f"{record['gpu']}, {record.get('layout', '')}".rstrip(", ")
    sizes = [above_zero(record, key) for key in ("m", "n", "k")]
    precision = _PRECISIONS.get(record.get("dtype", "bf16").lower().split("/")[0])
    if precision is None:
        return Evaluation(name, group, measured_s, why_not=f"number format {record.get('dtype')!r} is not modelled")
    rates = _burst_rates(record["gpu"], precision)
    if rates is None:
        return Evaluation(name, group, measured_s, why_not=f"no machine profile has the accelerator {record['gpu']!r}")
    if None in sizes:
        return Evaluation(name, group, measured_s, why_not="no shape")
    m, n, k = (float(size or 0.0) for size in sizes)
    batch = above_zero(record, "batch") or 1.0
    predicted_s = matmul_time_s(
        m * batch,
        n,
        k,
        flops_per_s=rates.matmul_flops_per_s[_LAYOUTS.get(record.get("layout", "")[:2], "NN")],
        element_bytes=float(ELEMENT_SIZES[precision].compute),
        rates=rates,
        arithmetic=PLAIN,
    )
    return Evaluation(name, group, measured_s, float(predicted_s), large=2.0 * batch * m * n * k >= LARGE_FLOPS)


@lru_cache(maxsize=256)
def _burst_rates(gpu: str, precision: Precision) -> ComputeRates | None:
    """Rates of a burst, without sustained efficiency."""
    machine = machine_of(Place(gpu))
    if machine is None or precision not in machine.accelerator.peak_tflops:
        return None
    return compute_rates(machine.accelerator.model_copy(update={"training_share": 1.0}), precision)


# Memory.

OF_MEMORY = ("model", "h", "a", "l", "tp", "pp", "mbs", "gbs", "quantity", "value", "unit")
SEQUENCE_LENGTH, VOCABULARY = 2048, 51200
"""Of all models of that paper."""

RELATIVE = "relative"
"""Group of rows that hold shares of something, not bytes."""


def _evaluate_memory(record: Mapping[str, str], line: int) -> Evaluation:
    name, quantity = record.get("id") or f"line {line}", record["quantity"]
    value = above_zero(record, "value")
    if (unit := record["unit"]) not in ("GiB", "%"):
        raise ValueError(f"unit is {unit!r}, neither GiB nor %")
    relative = unit == "%"
    measured = None if value is None else value / 100.0 if relative else value * GIB
    run, words = _MemoryRun(_model(record), _configuration(record), count(record, "gbs", 1)), quantity.lower()
    if "activation" in words:
        predicted = run.activations_bytes(words)
        if relative:
            predicted /= run.activations_bytes("")
    elif "optimizer" in words or "parameter" in words or "grad" in words:
        predicted = run.states_bytes()
    else:
        return Evaluation(name, quantity, measured, why_not=f"no such quantity is predicted: {quantity!r}")
    return Evaluation(name, RELATIVE if relative else words.split(",")[0], measured, predicted)


@dataclass(frozen=True)
class _MemoryRun:
    """A layout of Megatron-LM whose memory was measured."""

    model: Model
    configuration: Layout
    global_batch: int

    @property
    def _workload(self) -> Workload:
        return Workload(global_batch=self.global_batch, sequence_length=SEQUENCE_LENGTH, precision="fp16")

    def _program(self, *, sequence_parallel: bool, recompute: Recompute) -> StepProgram:
        options = replace(MEGATRON_2022.step, sequence_parallel=sequence_parallel)
        return build_step(self.model, self._workload, recompute=recompute, options=options)

    def _values(self, program: StepProgram, number: int) -> dict[str, float]:
        stages = self.configuration.grid.pipeline
        return symbol_values(
            self.model,
            self._workload,
            self.configuration.grid,
            micro_batch=self.configuration.micro_batch,
            options=program.given.options,
            stage=Stage(number == 0, number == stages - 1),
            layers=(sum(self._parts[number::stages]),),
        )

    @property
    def _parts(self) -> tuple[int, ...]:
        asked = self.configuration
        return model_parts(self.model.layers, stages=asked.grid.pipeline, chunks=asked.chunks)

    def states_bytes(self) -> float:
        """Of the mean stage: the paper divides all parameters by all GPUs."""
        program = self._program(sequence_parallel=False, recompute="none")
        items = persistent_items(program.given)
        stages = range(self.configuration.grid.pipeline)
        return fmean(
            sum(float(size.evaluate(values)) for _, size in items)
            for values in (self._values(program, stage) for stage in stages)
        )

    def activations_bytes(self, words: str) -> float:
        """Activations of the first stage, temporaries not counted; words: what is split or recomputed."""
        split = any(name in words for name in ("seq-parallel", "seq parallel", "sequence parallel"))
        recompute: Recompute = "selective" if "selective" in words else "full" if "full" in words else "none"
        program = self._program(sequence_parallel=split or "sequence-parallel" in words, recompute=recompute)
        values, grid = self._values(program, 0), self.configuration.grid
        batches = self.global_batch // (self.configuration.micro_batch * grid.data)
        weights = self._parts[:: grid.pipeline]
        held = held_of_chunks(0, stages=grid.pipeline, micro_batches=batches, weights=weights)
        blocks = float(sum(count * weight for count, weight in zip(held, weights, strict=True)))
        return blocks * sum(float(array.size_bytes.evaluate(values)) for array in saved_arrays(program.blocks[0]))


def _configuration(record: Mapping[str, str]) -> Layout:
    tensor, pipeline, chunks = (count(record, name, 1) for name in ("tp", "pp", "vpp"))
    if (layers := count(record, "l")) < pipeline * chunks:
        raise ValueError(f"l is {layers}, too few for pp · vpp, {pipeline * chunks}")
    if (gpus := count(record, "gpus", tensor * pipeline)) % (tensor * pipeline):
        raise ValueError(f"gpus is {gpus}, not divisible by tp · pp, {tensor * pipeline}")
    data, micro_batch, batch = gpus // (tensor * pipeline), count(record, "mbs", 1), count(record, "gbs", 1)
    if batch % (micro_batch * data):
        raise ValueError(f"gbs is {batch}, not divisible by mbs · gpus / (tp · pp), {micro_batch * data}")
    grid = Grid(x=tensor, data=data, pipeline=pipeline, order=("x", "y", "z", "data", "pipeline"))
    return Layout(grid, micro_batch, "none", chunks=chunks)


def _model(record: Mapping[str, str]) -> Model:
    hidden, heads, layers = (count(record, name) for name in ("h", "a", "l"))
    if hidden % heads:
        raise ValueError(f"h is {hidden}, not divisible by a, {heads}")
    return Model(
        schema="axonn-tune/model/1",
        name=record["model"],
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        vocab=VOCABULARY,
        max_sequence_length=SEQUENCE_LENGTH,
        biases=True,
        tied_embeddings=True,
        source="published row",
        defaults=ModelDefaults(global_batch=1, sequence_length=SEQUENCE_LENGTH),
    )


_READ: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, str], int], Evaluation]]] = {
    "collectives": (OF_COLLECTIVES, _evaluate_collective),
    "gemm": (OF_GEMMS, _evaluate_gemm),
    "memory": (OF_MEMORY, _evaluate_memory),
}


def evaluate_rows(path: Path, kind: Kind) -> tuple[Evaluation, ...]:
    """Every row of a file with its predicted time, or bytes; rows out of scope say why. Errors as `read_records`."""
    return each_record(path, *_READ[kind])


def shipped(kind: Kind) -> tuple[Evaluation, ...]:
    """Every row of a kind, predicted."""
    return evaluate_rows(PUBLISHED / f"{kind}.csv", kind)


_TITLES: dict[Kind, str] = {
    "collectives": "collectives of 1 MiB or more",
    "gemm": "GEMMs of 10 GFLOP or more",
    "memory": "memory",
}


def main(words: list[str] | None = None) -> int:
    """Print errors by group, and how many rows are not predicted for which reason."""
    parser = argparse.ArgumentParser(prog="python -m tools.measurements", description=__doc__)
    for kind, title in _TITLES.items():
        parser.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"CSV of {title}, instead of those kept here.")
    parser.add_argument("--json", action="store_true", help="Print every row as JSON.")
    given = parser.parse_args(words)
    named = {kind: path for kind in _TITLES if (path := getattr(given, kind)) is not None}
    paths = named or {kind: PUBLISHED / f"{kind}.csv" for kind in _TITLES}
    try:
        found = {kind: evaluate_rows(path, kind) for kind, path in paths.items()}
    except AxonnTuneError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    if given.json:
        every: Json = {kind: [{**asdict(one), "error": one.error} for one in rows] for kind, rows in found.items()}
        print(json_text(every, indent=1), end="")
        return 0
    for kind, rows in found.items():
        print(quality_text(_TITLES[kind], errors_by_group(rows), ERRORS))
        reasons = Counter(one.why_not for one in rows if one.why_not)
        print("".join(f"not predicted: {times:,} rows: {why}\n" for why, times in reasons.most_common()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
