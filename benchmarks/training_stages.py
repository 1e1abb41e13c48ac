"""What long training leaves of an accelerator's speed: fitted on published FSDP steps, grid (1, 1, GPUs, 1).

Bursts of single kernels say how fast a matrix product can be; hours of training are slower. The share
that remains belongs to the accelerator. How many bytes element-wise kernels move, and how fast
attention is, belongs to the software of the rows (PyTorch without fusion, Triton attention): both are
fitted beside it and left there.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from axonn_tune.cost.arithmetic import COLUMNS
from axonn_tune.cost.compute import ComputeRates, compute_rates
from axonn_tune.cost.durations import Clock, compute_s
from axonn_tune.cost.single import Configuration, Pricing, price_configuration
from axonn_tune.grid import Grid
from axonn_tune.program.size import Value
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload
from benchmarks.fitting import NUISANCE, Floats, Stage
from benchmarks.rows import BF16_BYTES, PUBLISHED

KERNEL_TRAFFIC = NUISANCE + "kernel_traffic"
"""Bytes that element-wise kernels move, over what fused ones would."""

ATTENTION_TIME = NUISANCE + "attention_time"
"""Time of attention over the profile's."""


@dataclass(frozen=True)
class TrainingRow:
    """One published step of FSDP training of a GPT without biases; `step_s` measured."""

    gpu: str
    model: Model
    workload: Workload
    gpus: int
    micro_batch: int
    recompute: Recompute
    step_s: float


@cache
def training_rows() -> tuple[TrainingRow, ...]:
    """Every row of fsdp_steps.csv."""
    with (PUBLISHED / "fsdp_steps.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_row(record) for record in csv.DictReader(file))


def _row(record: Mapping[str, str]) -> TrainingRow:
    sizes = {
        name: int(record[name]) for name in ("layers", "hidden", "heads", "vocab", "sequence_length", "global_batch")
    }
    model = Model.model_validate(
        {
            "schema": "axonn-tune/model/1",
            "name": record["model"],
            "family": "gpt",
            **{name: sizes[name] for name in ("layers", "hidden", "heads", "vocab")},
            "kv_heads": sizes["heads"],
            "head_dim": sizes["hidden"] // sizes["heads"],
            "ffn": 4 * sizes["hidden"],
            "max_sequence_length": sizes["sequence_length"],
            "biases": False,
            "tied_embeddings": True,
            "source": record["source"],
            "defaults": {name: sizes[name] for name in ("global_batch", "sequence_length")},
        }
    )
    workload = Workload(global_batch=sizes["global_batch"], sequence_length=sizes["sequence_length"])
    recompute: Recompute = "full" if record["recompute"] == "full" else "none"
    counts = {name: int(record[name]) for name in ("gpus", "micro_batch")}
    return TrainingRow(record["gpu"], model, workload, recompute=recompute, step_s=float(record["step_s"]), **counts)


def price(row: TrainingRow, machine: Machine) -> Pricing:
    """What the profile predicts for a row, nothing kept."""
    configuration = Configuration(Grid(z=row.gpus), row.micro_batch, row.recompute, kept_layers=0)
    return price_configuration(row.model, machine, row.workload, configuration)


def training_stages() -> tuple[Stage, ...]:
    """One fit per accelerator that has rows."""
    return tuple(_stage(machine, gpu) for machine, gpu in (("dgx-a100", "A100"), ("dgx-h100", "H100")))


def _stage(machine: str, gpu: str) -> Stage:
    """Fit the computation; the little communication these steps expose stays as the profile has it."""
    groups = [
        tuple(row for row in training_rows() if (row.gpu, row.recompute) == (gpu, recompute))
        for recompute in ("none", "full")
    ]
    priced = [[price(row, load_machine(machine).document) for row in rows] for rows in groups]
    exposed = [np.array([one.exposed_communication_s for one in found]) for found in priced]
    columns = [_columns(found) for found in priced]

    def predict(profile: Machine, values: Mapping[str, float]) -> Floats:
        times = []
        rates = _software(compute_rates(profile.accelerator, "bf16"), values)
        for found, symbols, waits in zip(priced, columns, exposed, strict=True):
            clock = Clock(rates, BF16_BYTES, symbols, COLUMNS)
            times.append(np.asarray(compute_s(found[0].program, clock)) + waits)
        return np.concatenate(times)

    measured = np.array([row.step_s for rows in groups for row in rows])
    parameters = {"accelerator.training_share": 0.9, KERNEL_TRAFFIC: 2.0, ATTENTION_TIME: 1.5}
    large = np.ones(len(measured), dtype=np.bool_)
    return Stage(machine, "training steps", parameters, predict, measured, large, {"accelerator.training_share": 1.0})


def _software(rates: ComputeRates, values: Mapping[str, float]) -> ComputeRates:
    """The rates, as the software of the rows uses them."""
    slower = values[ATTENTION_TIME]
    return replace(
        rates,
        memory_bytes_per_s=rates.memory_bytes_per_s / values[KERNEL_TRAFFIC],
        attention_forward_flops_per_s=rates.attention_forward_flops_per_s / slower,
        attention_backward_flops_per_s=rates.attention_backward_flops_per_s / slower,
    )


def _columns(priced: list[Pricing]) -> dict[str, Value]:
    """Symbols of several rows as columns; programs of one kind differ in nothing else."""
    return {name: np.array([one.values[name] for one in priced]) for name in priced[0].values}
