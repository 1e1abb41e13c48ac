"""Maps a row of measured steps to the cost model: machine, software, model and configurations."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from axonn_tune.errors import UsageError
from axonn_tune.frameworks import UNKNOWN, find_framework, registry
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.others import AUTOMODEL
from axonn_tune.frameworks.step import OFFLOAD_MODULES
from axonn_tune.grid import RANK_AXES, Grid, divisors
from axonn_tune.job import Job, Layout
from axonn_tune.program.dimensions import logged_flops, step_tokens
from axonn_tune.program.feasibility import broken_constraints
from axonn_tune.ranking.space import Problem
from axonn_tune.request import Request
from axonn_tune.specs.catalog import available, load_machine
from axonn_tune.specs.formats import format_named
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model, ModelDefaults
from axonn_tune.specs.tuning import Tuning, tuning
from axonn_tune.specs.workload import Workload
from axonn_tune.stages import parse_layout
from axonn_tune.units import TERA
from axonn_tune.validation.published.cells import Named
from axonn_tune.validation.published.rows import SHIPPED, SILENT, Place, StepRow, nearest_word
from axonn_tune.vocabulary import CUDA_GRAPHS, PRECISIONS, Precision


@dataclass(frozen=True, kw_only=True)
class Case(Job):
    """A row as the cost model sees it; `configurations`: several where the row does not state something."""

    row: StepRow
    configurations: tuple[Layout, ...]

    @property
    def problem(self) -> Problem:
        """The search with everything pinned that the row states."""
        row, grid = self.row, self.configurations[0].grid
        recompute, some = row.recomputes[0] if len(row.recomputes) == 1 else (None, None)
        axes: dict[str, Any] = {axis: grid.axis_size(axis) for axis in self.framework.axes}
        request = Request(
            self.model,
            gpus=row.gpus,
            order=tuple(axis for axis in grid.order if axis in self.framework.axes),
            recompute=recompute,
            recompute_layers=some,
            micro_batch=row.micro_batch,
            chunks=row.interleave if row.interleave_known else None,
            **axes,
        )
        stages = "pipeline" in self.framework.axes
        job = (self.model, self.machine, self.workload, self.framework)
        return Problem(*job, gpus=row.gpus, request=request, rank_by="iteration", pipeline=stages)


# The machine of a row: the nearest shipped profile, with the row's memory, node and network.


_SYSTEMS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("perlmutter", "perlmutter", ("a100",)),
    ("frontier", "frontier", ("mi250",)),
    ("alps", "alps", ("gh200", "h100")),
    ("p5", "aws-p5", ("h100",)),
    ("p6-b300", "aws-p6-b300", ("b300",)),
    ("efa", "aws-p6-b300", ("b300",)),
    ("grand-teton", "grand-teton-h100", ("h100",)),
    ("grand teton", "grand-teton-h100", ("h100",)),
    ("dgx-2", "dgx2-v100", ("v100",)),
)
"""Word in a system's name, the profile it means, and the accelerators that system has."""

ACCELERATORS: tuple[tuple[str, str], ...] = (
    ("mi250", "frontier"),
    ("gh200", "alps"),
    ("gb200", "gb200-nvl72"),
    ("gb300", "gb300-nvl72"),
    ("b200", "dgx-b200"),
    ("b300", "dgx-b300"),
    ("h200", "dgx-h200"),
    ("h100", "dgx-h100"),
    ("h800", "h800"),
    ("a100", "dgx-a100"),
    ("a800", "a800"),
    ("v100", "dgx1-v100"),
    ("mi300x", "mi300x"),
    ("mi325x", "mi325x"),
    ("mi350x", "mi350x"),
    ("mi355x", "mi355x"),
)
"""Word in an accelerator's name, and the profile it means; the first found counts."""

_OWN_NETWORK = {"perlmutter", "frontier", "alps"}
"""Profiles of one machine, whose network was measured: rows do not change it."""

NODE = 8
"""Ranks up to which expert parallelism that does not say so dispatches by all-to-alls."""

LARGEST_NODE = 16
"""An innermost domain of more ranks is a rack."""

LINE_RATE_SHARE = 0.9
"""Of a network's line rate, what collectives reach (DGX A100, H100 and B200: 0.89 to 0.95)."""


def accelerators_named(text: str) -> dict[str, str]:
    """Accelerators that a text names by a word of its own, and the profile of each."""
    found = re.findall(
        r"(?<![a-z0-9])(?:" + "|".join(word for word, _ in ACCELERATORS) + r")(?![a-z0-9])", text.lower()
    )
    profiles = dict(ACCELERATORS)
    return {word: profiles[word] for word in found}


def differences(row: StepRow, machine: Machine, framework: Framework) -> tuple[str, ...]:
    """Differences between a row's machine and the profile it is priced on, in words, and attention that it lacks."""
    found, names = [], (row.gpu.lower(), machine.accelerator.name.lower())
    words = [next((word for word, _ in ACCELERATORS if word in name), "") for name in names]
    same = words[0] == words[1] if any(words) else names[0] in names[1] or names[1] in names[0]
    if names[0] not in SILENT and not same:
        found.append(f"gpu is {row.gpu!r}, the accelerator of {machine.name} is {machine.accelerator.name!r}")
    node, domain = machine.launcher.ranks_per_node, machine.tiers[0].ranks or 0
    # Nodes of a rack that is one domain may have any number.
    if domain <= LARGEST_NODE and row.gpus_per_node not in (None, node, domain):
        found.append(f"{row.gpus_per_node} GPUs a node are stated, but {machine.name} is priced with its {node}")
    why = framework.writes_scores(machine.accelerator, _precision(row.precision, framework) or "bf16")
    if why and _states_fused(row):
        found.append(f"attention is {row.attention!r}, but {framework.title} writes all scores {why}: priced so")
    return tuple(found)


_MEASURED = {("MooreThreads/SimuMax", "b200"): "simumax-b200"}
"""Profile in `machines/` here, of kernels that a publication measured on its own system, by source and accelerator."""


def _own_profile(place: Place) -> Path | None:
    """The file of the profile that a row's publication measured of its own system."""
    if not isinstance(place, StepRow):
        return None
    found = (
        name for (source, chip), name in _MEASURED.items() if source == place.dataset and chip in place.gpu.lower()
    )
    return next((SHIPPED / "machines" / f"{name}.yaml" for name in found), None)


def profile_of(place: Place) -> str | None:
    """Name of the profile nearest to a place's machine, or None if no shipped one has its accelerator."""
    system, gpu = place.system.lower(), place.gpu.lower()
    for word, profile, chips in _SYSTEMS:
        if word in system and any(chip in gpu for chip in chips):
            return profile
    # The name of a profile means it.
    own = next((name for name in (system, gpu) if name in available("machine")), None)
    return own or next((profile for word, profile in ACCELERATORS if word in gpu), None)


def machine_of(place: Place) -> Machine | None:
    """The profile of a place, adjusted; None if no shipped one has its accelerator."""
    name = _own_profile(place) or profile_of(place)
    if name is None:
        return None
    return _adjusted(name, place.gpu_memory_gb, place.gpus_per_node, node_gb_per_s(place))


def node_gb_per_s(place: Place) -> float | None:
    """Line rate of one node from the words of the place's network, GB/s; None if they do not say.

    Read: `800 Gbps/node`, `400 Gb/s per GPU`, `8x HDR 200Gb/s`, `Omni-Path 100Gb x4/node`.
    """
    words = place.network
    per_node = re.search(r"(\d+)\s*Gb(?:ps|/s|it/s)?\s*/\s*node", words)
    if per_node:
        return float(per_node[1]) / 8.0
    several = re.search(r"(\d+)\s*x\s*[A-Za-z ]*(\d{2,4})\s*Gb", words) or re.search(
        r"(\d+)\s*x\s+(?=(HDR|NDR|EDR))", words
    )
    if several:
        rate = {"HDR": 200.0, "NDR": 400.0, "EDR": 100.0}.get(several[2]) or float(several[2])
        return float(several[1]) * rate / 8.0
    reverse = re.search(r"(\d{2,4})\s*Gb\S*\s*x\s*(\d+)\s*/\s*node", words)
    if reverse:
        return float(reverse[1]) * float(reverse[2]) / 8.0
    each = re.search(r"(\d+)\s*Gb(?:ps|/s|it/s)\s*(?:per|/)\s*GPU", words)
    if each and place.gpus_per_node:
        return float(each[1]) * place.gpus_per_node / 8.0
    return None


@lru_cache(maxsize=256)
def _adjusted(name: str | Path, memory_gb: float | None, per_node: int | None, line_gb_per_s: float | None) -> Machine:
    profile = load_machine(name).document
    accelerator = profile.accelerator
    if memory_gb is not None and abs(memory_gb / accelerator.memory_gib - 1.0) > 0.1:
        accelerator = accelerator.model_copy(update={"memory_gib": memory_gb * 0.989})
    tiers = list(profile.tiers)
    if len(tiers) > 1:
        domain = tiers[0].ranks
        # A rack that is one domain stays one.
        if per_node is not None and domain is not None and domain <= LARGEST_NODE:
            tiers[0] = tiers[0].model_copy(update={"ranks": per_node})
        if line_gb_per_s is not None and name not in _OWN_NETWORK:
            # What a rack is in one domain has as many nodes' links.
            nodes = (tiers[0].ranks or 1) / per_node if per_node and (tiers[0].ranks or 0) > LARGEST_NODE else 1.0
            update = {"bandwidth_gb_per_s": LINE_RATE_SHARE * line_gb_per_s * nodes}
            tiers[-1] = tiers[-1].model_copy(update=update)
    return profile.model_copy(update={"accelerator": accelerator, "tiers": tuple(tiers)})


# Its software.

FRAMEWORK_WORDS: tuple[tuple[str, str], ...] = (
    ("automodel", "automodel"),
    ("bridge", "nemo"),
    ("mlperf", "nemo"),
    ("primus", "megatron-core"),
    ("bigscience", "megatron-2021"),
    ("megatron-deepspeed", "megatron-deepspeed"),
    ("zero-3", "deepspeed-2021"),
    ("ptd-p", "megatron-2021"),
    ("scatter-gather", "megatron-2021"),
    ("nemo", "nemo"),
    ("megatron-core", "megatron-core"),
    ("megascale", "megascale"),
    ("meta internal", "meta-4d"),
    ("megatron", "megatron-2022"),
    ("torchtitan", "torchtitan"),
    ("fsdp", "fsdp"),
    ("maxtext", "xla"),
    ("paxml", "xla"),
    ("jax", "xla"),
    ("xla", "xla"),
)
"""Word in the name of a row's software, and the framework it means; the first found counts."""

_TOLD_PARTS = ("nemo", "megatron-core")
"""Frameworks that take the layers of each part, and need them where layers do not divide evenly."""

_WITH_BIASES = ("megatron-2021", "megatron-2022", "megatron-deepspeed", "deepspeed-2021", "megascale")
"""Frameworks whose GPT layers have biases, as their published models do."""


def _software_of(row: StepRow) -> Framework:
    """The framework that a row's words mean, as it is."""
    words = row.framework.lower()
    found = registry().get(row.framework)
    if found is None:
        name = next((known for word, known in FRAMEWORK_WORDS if word in words), UNKNOWN)
        said = f"{row.framework} {row.overlap} {row.notes}".lower()
        if name == "torchtitan" and row.more is None and ("compile" not in said or "eager" in row.overlap.lower()):
            name = "torchtitan-eager"
        if (
            name == "nemo"
            and row.attention.lower() in {"", "nan"}
            and any(chip in row.gpu.lower() for chip in ("a100", "v100"))
        ):
            # Unstated, the software on these is NeMo before FlashAttention and fused layers.
            name = "nemo-2022"
        found = AUTOMODEL if name == AUTOMODEL.name else find_framework(name)
    if found.name == "nemo" and row.more is not None and row.more.sharded:
        # Megatron-FSDP, which recipes of Megatron-Bridge turn on by themselves.
        found = replace(found, axes=find_framework("megatron-core").axes)
    if found.name == "torchtitan" and row.more is not None and "eager" in row.notes:
        return find_framework("torchtitan-eager")
    return replace(found, logged=find_framework("megatron-core").logged) if "bridge" in words else found


def _states_fused(row: StepRow) -> bool:
    attention = row.attention.lower()
    return any(word in attention for word in ("flash", "sdpa", "cudnn")) and "no flash" not in attention


def framework_of(row: StepRow) -> Framework:
    """The framework of a row, with the row's attention, overlap, ZeRO and compilation."""
    return with_stated(_software_of(row), row)


def with_stated(software: Framework, row: StepRow) -> Framework:
    """A framework with attention, overlap, ZeRO, sequence parallelism and CUDA graphs of a step."""
    found = _with_words(software, row, {} if row.more is None else _further(row, row.more, software))
    captured = _graphs(row, row.more, found) if row.more is not None else ()
    scopes = tuple(one for one in CUDA_GRAPHS if one in captured and one in found.cuda_graphs)
    return found.capturing(scopes) if scopes else found


def _graphs(row: StepRow, more: Named, software: Framework) -> tuple[str, ...]:
    """Scopes of CUDA graphs, as stated, else as all recipes for the system have them."""
    profile = profile_of(row) or ""
    if not more.open_graphs or not profile:
        return more.cuda_graphs
    if more.mlperf and load_machine(profile).document.accelerator.generation == "blackwell":
        # Of MLPerf Training 5.0 to 6.0 (mlcommons/training_results_v5.1@441d65f4, NVIDIA/benchmarks).
        return ("full_iteration",)
    experts = more.model is not None and more.model.has_experts and software.expert_software
    # NVIDIA-NeMo/Megatron-Bridge@067f987d, perf_recipes.
    return ("attn", "moe_router", "mamba") if experts and "nvl72" in profile else more.cuda_graphs


def _with_words(found: Framework, row: StepRow, further: Mapping[str, object]) -> Framework:
    """The same without CUDA graphs; further: options over its words."""
    changes = dict[str, object]()
    if row.attention.lower() not in {"", "nan"}:
        changes["fused_attention"] = _states_fused(row)
    if row.vocabulary_multiple is not None:
        changes["vocabulary_multiple"] = row.vocabulary_multiple
    if "tp-comm-overlap" in row.overlap.lower():
        changes["pipelined_tensor"] = True
    changes |= further
    if not _sharded(found, row) and "zero_stage" not in row.unstated:
        changes |= {"distributed_optimizer": row.zero >= 1, "shard_gradients": row.zero >= 2}
    if row.tensor > 1 and row.sequence_parallel is not None:
        # With one rank it has no effect.
        changes["sequence_parallel"] = row.sequence_parallel
    wanted = {name: value for name, value in changes.items() if getattr(found.step, name) != value}
    # It is of one run: nothing of it is searched that is not open.
    return replace(found.with_step(**wanted) if wanted else found, exchanges=(), dispatchers=())


def _further(row: StepRow, more: Named, framework: Framework) -> dict[str, object]:
    """Options of a step that only rows with experts, formats or context state; unstated ones as in their recipes."""
    changes = dict[str, object]()
    if more.model is not None and more.model.has_experts:
        rack = more.expert > 1 and "nvl72" in (profile_of(row) or "")
        near = "hybridep" if rack else "alltoall" if more.expert <= NODE else "deepep"
        changes["dispatcher"] = more.dispatcher or near
        changes["expert_overlap"] = bool(more.expert_overlap)
        changes["delayed_weight_gradients"] = bool(more.expert_overlap) and more.delayed
        # Benchmarks force the balance of tokens, or have them dropped, unless they say otherwise.
        changes["imbalance"] = None if more.routing == "natural" else 1.0
    if row.context > 1 and more.model and any(layer.window for layer in more.model.types):
        # Rings know no window.
        changes["context_exchange"] = "all_to_all"
    if more.async_tp is not None:
        changes["pipelined_tensor"] = more.async_tp
    if more.sharded and "z" in framework.axes and framework.step.gather_unit != "block":
        # Megatron-FSDP gathers and reduces whole blocks, and experts over their own ranks (core/distributed/fsdp).
        changes |= {"gather_unit": "block", "reduce_each_micro_batch": True}
        changes |= {"expert_shards": ("x", "z", "context"), "expert_replicas": ("data",)}
        changes |= {"gather_after_recompute": False, "shard_gradient_bytes": framework.step.gradient_bytes or 4}
    words = re.findall(r"\w+", more.offload)
    states = ("moments", "master") if {"optimizer", "states"} & {*words} else ()
    if offloaded := (*states, *(name for name in OFFLOAD_MODULES if name in words)):
        changes["offloaded"] = offloaded
    if more.loss:
        changes["loss"] = more.loss
    # Configs of MLPerf gather weights in FP8 (`FP8_PARAM_GATHER`), and not in FP4.
    narrow = more.mlperf and "fp8" in row.precision if more.quantized_weights is None else more.quantized_weights
    if narrow and "primary_weights" in framework.format_options and re.search("fp[48]", row.precision):
        changes["primary_weights"] = True
    if more.gradient_bytes is not None:
        changes["gradient_bytes"] = more.gradient_bytes
    if more.state_bytes in (6, 8):
        changes |= {"master_bytes": more.state_bytes - 4, "exp_avg_bytes": 2, "exp_avg_sq_bytes": 2}
    return {**changes, **more.step}


def nearest_framework(words: str) -> str:
    """`, did you mean 'nemo'?` for software that is not known, or an empty string."""
    return nearest_word(words, [word for word, _ in FRAMEWORK_WORDS])


def _sharded(framework: Framework, row: StepRow) -> bool:
    """Whether weights are split over the ranks that share the batch: FSDP, ZeRO-3."""
    asked = row.zero == 3 or (row.more is not None and row.more.sharded)
    return "z" in framework.axes and (framework.step.gather_unit == "block" or asked)


# Its model, workload and configurations.


def case_of(row: StepRow, *, machine: Machine | None = None) -> Case | str:
    """Map a row; the reason in words where something in it is out of scope or impossible.

    machine: price it on this profile as it is, whatever the row says of its machine.
    """
    if row.more is not None and row.more.lacking:
        return row.more.lacking
    priced_on = machine_of(row) if machine is None else machine
    if priced_on is None:
        known = ", ".join(sorted({word.upper() for word, _ in ACCELERATORS}))
        return f"no machine profile has the accelerator {row.gpu!r}: known are {known}"
    framework = framework_of(row)
    try:
        return laid_out(row, model_of(row, framework), priced_on, framework, _experts_of(row, framework))
    except UsageError as error:
        # A layout of its stages that is none.
        return str(error)


def laid_out(
    row: StepRow, model: Model, machine: Machine, framework: Framework, experts: Sequence[Mapping[str, int]]
) -> Case | str:
    """Every layout that a row may mean, or why there is none; experts: sizes of their axes that it may mean."""
    precision, known = _precision(row.precision, framework), machine.accelerator.peak_tflops
    if precision is None:
        return f"number format {row.precision!r} is not modelled: {', '.join(PRECISIONS)} are"
    if precision not in known:
        return f"precision: {machine.accelerator.name} has no {precision}; it has {', '.join(known)}"
    workload = Workload(global_batch=row.global_batch, sequence_length=row.sequence_length, precision=precision)
    if row.more is not None and row.more.lengths is not None:
        workload = workload.model_copy(update={"lengths": row.more.lengths})
    if row.more is not None and row.more.adapters:
        workload = workload.model_copy(update={"tuning": _adapters(row.more.adapters, framework)})
    case = Case(model, machine, workload, framework, row=row, configurations=())
    ranks = row.tensor * row.y * row.pipeline * row.context * row.data
    if ranks != row.gpus:
        tensor = f"tensor {row.tensor}" + (f" x {row.y}" if row.y > 1 else "")
        parts = f"{tensor} x pipeline {row.pipeline} x context {row.context} x data {row.data}"
        return f"{parts} = {ranks}, not {row.gpus} GPUs"
    if unable := [one for one in [framework.cannot_recompute(kind) for kind, _ in row.recomputes] if one]:
        return unable[0]
    found = []
    for one in _open(row, case, experts):
        per_rank = row.global_batch // (one.grid.data * one.grid.z)
        # Every micro-batch that is allowed where the row leaves it open.
        batches = divisors(per_rank) if row.micro_batch is None and per_rank else (row.micro_batch or 1,)
        found += [each for each in (replace(one, micro_batch=size) for size in batches) if not wrong(case, each)]
    if not found:
        return "; ".join(wrong(case, next(_open(row, case, experts)))) or "no layout satisfies the constraints"
    return replace(case, configurations=tuple(found))


def _adapters(words: str, framework: Framework) -> Tuning | None:
    """What trains, `lora r16 dropout 0.1 a2a linear_qkv,linear_proj`; UsageError where the framework has none such."""
    found = re.fullmatch(r"(\w+) r(\d+)(?: dropout ([\d.]+))?( a2a)?(?: ([\w,-]+))?", words)
    if found is None or not framework.tuner:
        raise UsageError(f"adapters are {words!r}, which {framework.title} has not")
    mode: Any = found[1]
    return tuning(
        mode,
        framework.tuner,
        rank=int(found[2]),
        targets=found[5] and found[5].split(","),
        dtype=None,
        dropout=float(found[3] or 0.0),
        exchanged=found[4] is not None,
    )


def _precision(words: str, framework: Framework) -> Precision | None:
    text = words.lower()
    if "int8" in text:
        return None
    if "fp8" in text or "fp4" in text:
        named = format_named(text)
        if named == "fp8-delayed" and "delayed" not in text and framework.formats and named not in framework.formats:
            return framework.formats[0]
        return named
    if "fp16" in text or "half" in text or "mixed" in text:
        return "bf16" if text.startswith("bf16") else "fp16"
    if text in SILENT:
        return "bf16"
    found: dict[str, Precision] = {"bf16": "bf16", "bfloat16": "bf16", "fp64": "fp64", "fp32": "fp32"}
    return next((precision for word, precision in found.items() if word in text), None)


def model_of(row: StepRow, framework: Framework) -> Model:
    """The model of a row; unstated properties, such as biases, as usual for its kind."""
    if row.more is not None and row.more.model is not None:
        return row.more.model
    return Model(
        schema="axonn-tune/model/1",
        **{name: getattr(row, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")},
        name=row.model or "model",
        family="llama" if row.gated else "gpt",
        head_dim=row.head_dim or max(1, row.hidden // row.heads),
        max_sequence_length=row.sequence_length,
        biases=framework.name in _WITH_BIASES and not row.gated if row.biases is None else row.biases,
        tied_embeddings=not row.gated if row.tied is None else row.tied,
        source="published row",
        defaults=ModelDefaults(global_batch=row.global_batch, sequence_length=row.sequence_length),
    )


def measured_s(case: Case) -> float | None:
    """The measured step: as stated, else by tokens, by the FLOPs that the framework's log counts, or by MFU of its peak
    in BF16, or of that the source names."""
    row, more = case.row, case.row.more
    if row.step_s is not None or more is None:
        return row.step_s
    peak = more.mfu_of or TERA * case.machine.accelerator.peak_tflops["bf16"]
    rate = TERA * row.tflops_per_gpu if row.tflops_per_gpu is not None else more.mfu and more.mfu * peak
    return step_at(case, case.configurations[0], tokens=more.tokens_per_s_per_gpu, flops=rate)


def step_at(case: Case, layout: Layout, *, tokens: float | None = None, flops: float | None = None) -> float | None:
    """The step, s, in which a GPU has so many tokens a second, else so many FLOP/s as the framework's log counts them;
    None where it counts none."""
    if tokens is not None:
        return step_tokens(case.workload) / (tokens * case.row.gpus)
    counted = logged_flops(case.framework, case.model, case.workload, grid=layout.grid, recompute=layout.recompute)
    return counted / (flops * case.row.gpus) if counted and flops else None


def wrong(case: Case, one: Layout) -> list[str]:
    """Constraints that a layout breaks."""
    job = case.model, case.workload, case.framework
    return broken_constraints(one.grid, *job, micro_batch=one.micro_batch, chunks=one.chunks, parts=one.parts)


def interleavings(case: Case) -> Iterator[Layout]:
    """Configurations of a row that does not say whether its stages are interleaved, with each that is possible."""
    for found in case.configurations:
        for chunks in divisors(max(1, case.model.layers // found.grid.pipeline)):
            candidate = replace(found, chunks=chunks)
            if not wrong(case, candidate):
                yield candidate


def _experts_of(row: StepRow, framework: Framework) -> Sequence[Mapping[str, int]]:
    """Sizes of experts' axes that a row may mean."""
    more = row.more
    if more is None or more.model is None or not more.model.has_experts:
        return ({},)
    # Without a word of how FSDP has experts, every number of ranks.
    sizes = divisors(row.tensor * row.context * row.data) if more.open_expert else (more.expert,)
    return [{"expert": size, "expert_tensor": _expert_tensor(row, framework)} for size in sizes]


def _open(row: StepRow, case: Case, experts: Sequence[Mapping[str, int]]) -> Iterator[Layout]:
    """The row's degrees, with each kind of recompute, and of experts' ranks, that it may mean."""
    more, framework = row.more or Named(), case.framework
    shards = more.shards if more.shards and row.data % more.shards == 0 else row.data
    z = row.z or (shards if _sharded(framework, row) else 1)
    order = row.order or tuple(axis for axis in framework.axes if axis in RANK_AXES)
    degrees = {"x": row.tensor, "y": row.y, "z": z, "context": row.context, "pipeline": row.pipeline}
    order = (*order, *(axis for axis in RANK_AXES if axis not in order))
    grids = [Grid(**degrees, data=row.data // z, order=order, **one) for one in experts]
    parts, mtp_part = row.parts or None, None
    if more.layout:
        parts, _, mtp_part = parse_layout(more.layout, stages=row.pipeline, layers=case.model.layers)
    elif row.more is not None and row.interleave_known and framework.name in _TOLD_PARTS:
        parts = _told_parts(row, case.model.layers, more.model.mtp_layers if more.model else 0)
    kept = None if framework.step.reshard == "fit" else 0
    for recompute, some in row.recomputes:
        chunks = len(parts) // row.pipeline if parts else row.interleave
        for grid in grids:
            yield Layout(grid, row.micro_batch or 1, recompute, kept, chunks, parts, some, mtp_part)


def _told_parts(row: StepRow, layers: int, predicting: int) -> tuple[int, ...] | None:
    """Layers of each part where they do not divide evenly, so that the run was given them; None where they do.

    Parts are alike but the ends, the last with fewer for the loss and each MTP layer, as recipes have it
    (NVIDIA-NeMo/Megatron-Bridge@067f987d, perf_recipes: DeepSeek-V3's `Et|(tt|)*30mL`; embedding and loss account for
    a layer of Llama-3 405B).
    """
    count = row.pipeline * row.interleave
    if count == 1 or layers % count == 0:
        return None
    each = -(-(layers + predicting + 1) // count)
    last = each - predicting - 1
    first = layers - each * (count - 2) - last
    return None if min(first, last) < 0 else (first, *(each,) * (count - 2), last)


def _expert_tensor(row: StepRow, framework: Framework) -> int:
    """ETP: as stated, else 1 in recipes of Megatron-Bridge and TP in Megatron-Core (core/parallel_state.py)."""
    stated = None if row.more is None else row.more.expert_tensor
    if stated is None and framework.name == "nemo":
        return 1
    if stated is not None or framework.tensor_without_expert or row.more is None:
        return stated or (row.tensor if row.more is not None and row.more.expert == 1 else 1)
    return row.tensor
