"""Training frameworks as descriptions, which the program, the search and the cost model read."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from importlib.resources import files
from pkgutil import iter_modules
from typing import Any

from axonn_tune.errors import UnknownNameError
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE, HOST
from axonn_tune.frameworks.description import FUSED, Framework
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.specs.machine import Machine, Software
from axonn_tune.vocabulary import Precision

UNKNOWN = "unknown"
"""Software without rows in the fit: the geometric mean of all fitted sets."""

FLASH_ATTENTION_2 = 1.9
"""Time of attention of FlashAttention-2 over that of kernels made for Hopper, cuDNN's and FlashAttention-3, there: 1.4
by dgx-h100's numbers at 2,048 keys (arXiv 2407.08608, figure 5, heads of 128, causal FLOPs: 298 TFLOP/s forward, 239
backward, from 291 without mask), 2.3 of ever more, where FlashAttention-2 hardly gains; between them at 8,192."""
FLASH_ATTENTION_2_CK, AOTRITON = 1.9, 3.9
"""The same on CDNA 4 over AITER, which Transformer Engine calls: of FlashAttention-2 (Composable Kernel), and of
torch's own attention (AOTriton). MI355X, causal FLOPs, 8,192 keys, heads of 128: AITER 1,205 TFLOP/s forward and 1,034
backward, Composable Kernel 866 and 489, torch 705 and 224 (HazyResearch/HipKittens@f09e9685, analysis/attn: AITER's
backward pass with as many heads of keys as of queries, the others with 64 and 8)."""

SOFTWARE_SPREADS = {
    "gemm": 0.06,
    "attention": 0.18,
    "traffic": 0.18,
    "operation_us": 0.6,
    "collective_us": 0.6,
    "dispatch_us": 0.4,
}
"""Standard deviations of logarithms of software numbers: 0.6 times those from which the fit of the shipped numbers
starts (tools/fit/software.py), since software of one name differs less between clusters than software of any name."""
OF_ONE_NAME = 0.6

_FIRST = ("axonn", "megatron_core", "torchtitan", "fsdp", "deepspeed", "megatron_lm", "others")
"""Modules in the order in which their frameworks are listed; each other module with `FRAMEWORKS` comes after them."""


@cache
def registry() -> dict[str, Framework]:
    """Every framework by the name `--framework` takes."""
    # Imported here: a search for the bundled runtime needs its own description alone.
    names = dict.fromkeys((*_FIRST, *(one.name for one in iter_modules(__path__))))
    modules = [import_module(f"{__name__}.{name}") for name in names]
    described = (one for module in modules for one in getattr(module, "FRAMEWORKS", ()))
    return {one.name: one for one in (AXONN_TUNE, *described)}


def find_framework(name: str) -> Framework:
    """The framework of a name; UnknownNameError with the nearest."""
    if name == AXONN_TUNE.name:
        return AXONN_TUNE
    known = registry()
    if name not in known:
        raise UnknownNameError("framework", name, known)
    return known[name]


def register(framework: Framework) -> None:
    """Register a framework by its name, replacing one of the same name."""
    registry()[framework.name] = framework


def step_on(framework: Framework, machine: Machine, precision: Precision) -> StepOptions:
    """A framework's options on a machine: the bundled runtime compiles its kernels under NCCL alone.

    From Blackwell on GEMMs of 8-bit operands take them in any layout (NVIDIA/TransformerEngine, guide on performance of
    low precision), on AMD's not (ROCm/TransformerEngine@07f3c6a5, pytorch/utils.py). A profile may have a token
    imbalance of natural routing.
    Before Ampere and in FP32 attention writes all scores, but for frameworks with torch's own.
    """
    step = framework.step
    if framework.writes_scores(machine.accelerator, precision):
        step = replace(step, fused_attention=False)
    if framework.formats and machine.accelerator.since("blackwell"):
        step = replace(step, one_layout=True)
    if machine.imbalance is not None and step.imbalance is None:
        step = replace(step, natural_imbalance=machine.imbalance)
    return replace(step, kernels="eager") if step.kernels != "ideal" and machine.launcher.backend == "gloo" else step


def step_changes(framework: Framework) -> dict[str, Any]:
    """Options of the step that are not the framework's own."""
    own = framework.name == AXONN_TUNE.name
    step, plain = framework.step, (AXONN_TUNE if own else registry().get(framework.name, framework)).step
    every = ((one.name, getattr(step, one.name)) for one in fields(step))
    return {name: value for name, value in every if value != getattr(plain, name)}


def software_key(framework: Framework) -> str:
    """The name under which a profile has its own numbers of a framework's software."""
    return framework.software or framework.name


def is_fitted(framework: Framework, machine: Machine) -> bool:
    """Whether its software numbers were fitted to steps of it, or are the profile's own."""
    return framework.software != UNKNOWN or software_key(framework) in machine.software


def software_on(framework: Framework, machine: Machine, numbers: Software | None = None) -> Software:
    """A framework's software numbers on a machine: the profile's own, else those that ship.

    numbers: in place of either.
    """
    software = base_software(framework, machine) if numbers is None else numbers
    slower = 1.0 if framework.hopper_attention else _attention_factor(framework, machine)
    return software.model_copy(update={"attention": software.attention * slower}) if slower != 1.0 else software


def _attention_factor(framework: Framework, machine: Machine) -> float:
    """Time of attention of a framework without the kernels made for an accelerator, over that with them."""
    if machine.accelerator.generation == "cdna4":
        return FLASH_ATTENTION_2_CK if framework.attention_since else AOTRITON
    return FLASH_ATTENTION_2 if machine.accelerator.generation == "hopper" else 1.0


def base_software(framework: Framework, machine: Machine) -> Software:
    """The same with the attention kernels made for the accelerator, whichever the framework has.

    The bundled runtime's kernels are those of its program; dispatch time counts on GPUs only.
    """
    own = machine.software.get(software_key(framework))
    if own is not None:
        return own
    if framework.software:
        return _software_numbers(framework.software)
    on_gpu = machine.launcher.backend == "nccl"
    return HOST.get(framework.step.kernels, FUSED) if on_gpu else FUSED


@cache
def _software_numbers(name: str) -> Software:
    found = {key: value for (software, key), value in all_numbers().items() if software == name}
    assert found, f"no numbers of {name}"
    return Software(**found)


@cache
def all_numbers() -> Mapping[tuple[str, str], float]:
    """Every number of software.csv by software and parameter; their sources stand beside them."""
    text = files("axonn_tune.frameworks").joinpath("software.csv").read_text(encoding="utf-8")
    return {(one["software"], one["parameter"]): float(one["value"]) for one in csv.DictReader(text.splitlines())}
