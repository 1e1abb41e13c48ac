"""Every field of a machine, a model, a step and a request has an effect, in the direction of its meaning.

The tables below have an entry for each field of each data class: what moves, and which way, where more is given. A
field without an entry fails, and so does one that nothing reads. Fields that describe, and move nothing, are named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

import axonn_tune
from axonn_tune.cost.economics import training_cost
from axonn_tune.cost.price import Detail, price
from axonn_tune.errors import DocumentError, UsageError
from axonn_tune.frameworks import find_framework, registry, software_on, step_on
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.grid import Grid
from axonn_tune.job import Job, Layout
from axonn_tune.launch.commands import emission
from axonn_tune.program.count import parameters
from axonn_tune.report.remarks import offload_words
from axonn_tune.request import OPTIONS
from axonn_tune.specs.catalog import available, load_machine, load_model
from axonn_tune.specs.document import Document, to_yaml
from axonn_tune.specs.loading import load_file
from axonn_tune.specs.machine import (
    CollectiveFactors,
    Dispatching,
    EnvironmentVariable,
    Learned,
    LearnedNumber,
    Machine,
    Operation,
    Software,
    Source,
)
from axonn_tune.specs.model import Model
from axonn_tune.specs.tuning import Tuning
from axonn_tune.specs.workload import Workload
from axonn_tune.vocabulary import OVERLAPS, Overlap, Precision

NUMBERS, ROUNDING = (0.5, 4.0), 1e-9
"""Factors on a number, and relative changes that are none."""


@dataclass(frozen=True)
class Probe:
    """A layout that shows what a field does."""

    model: str = "llama3-8b"
    framework: str = "megatron-core"
    axes: Mapping[str, int] = field(default_factory=lambda: {"x": 8, "data": 2})
    batch: int = 32
    seq: int = 4096
    precision: Precision = "bf16"
    micro_batch: int = 1
    recompute: str = "none"
    chunks: int = 1
    step: Mapping[str, object] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    overlaps: tuple[Overlap, ...] = OVERLAPS
    tuning: Tuning | None = None

    def priced(self, machine: Machine, model: Model | None = None, **step: object) -> Detail:
        """The layout on a machine, of a model in place of its own, with options of a step."""
        framework = find_framework(self.framework).with_step(**{**self.step, **step})
        order = tuple(axis for axis in framework.axes if axis in Grid().by_axis)
        workload = Workload(
            global_batch=self.batch,
            sequence_length=self.seq,
            precision=self.precision,
            overlaps=self.overlaps,
            tuning=self.tuning,
        )
        job = Job(model or load_model(self.model, overrides=self.sizes).document, machine, workload, framework)
        order = tuple(dict.fromkeys((*(axis for axis in job.framework.axes if axis in self.axes), *order)))
        grid = Grid(**self.axes, order=tuple(axis for axis in order if not axis.startswith("expert")))
        return price(job, Layout(grid, self.micro_batch, self.recompute, chunks=self.chunks))  # type: ignore[arg-type]


PROBES = {
    "wide": Probe(),
    "pair": Probe(axes={"x": 2, "data": 8}),
    "stages": Probe(axes={"x": 4, "pipeline": 4}),
    "experts": Probe("qwen3-30b-a3b", axes={"data": 16, "expert": 16}),
    "vocabulary": Probe("5b", "fsdp", axes={"z": 8}, seq=2048, sizes=("vocab=50257",)),
    "blockwise": Probe(precision="fp8-blockwise"),
    "heads": Probe("gpt-oss-20b"),
    "long": Probe(axes={"x": 8, "context": 2}, batch=8, seq=65536),
    "reduced": Probe("5b", "deepspeed", axes={"x": 8, "data": 2}, seq=2048),
    "offloaded": Probe(axes={"data": 16}, step={"offloaded": ("moments", "core_attn")}),
}
GENERAL = ("wide", "pair", "experts")
"""Where a field may move an output one way only."""

OUTPUTS: dict[str, Callable[[Detail], Any]] = {
    "step": lambda priced: priced.iteration_s,
    "memory": lambda priced: priced.memory_bytes,
    "limit": lambda priced: priced.memory_limit_bytes,
    "interval": lambda priced: priced.half_width,
    "executed": lambda priced: priced.hfu,
    "parameters": lambda priced: parameters(priced.job.model),
    "days": lambda priced: training_cost(priced.job, priced, 10**12)["days"],
    "energy": lambda priced: training_cost(priced.job, priced, 10**12)["energy_mwh"],
    "cost": lambda priced: training_cost(priced.job, priced, 10**12)["cost"],
    "host": offload_words,
    "script": lambda priced: emission(priced, "run", call="", kind="slurm").text,
}


@dataclass(frozen=True)
class Moves:
    """What a field moves: sign, +1 where more of it is more of the output, 0 where it is another.

    values: in place of multiples of a number; at: a path in place of the field's own; on: a profile.
    """

    output: str
    sign: int
    probe: str = "wide"
    values: tuple[str, ...] = ()
    at: str = ""
    on: str = "plain"


def longer(probe: str = "wide", **given: Any) -> Moves:
    """More of it is a longer step."""
    return Moves("step", 1, probe, **given)


def shorter(probe: str = "wide", **given: Any) -> Moves:
    """More of it is a shorter step."""
    return Moves("step", -1, probe, **given)


def other(output: str, *values: str, probe: str = "wide", **given: Any) -> Moves:
    """These values change an output."""
    return Moves(output, 0, probe, values, **given)


DESCRIBES = None
"""A name, a source, a version, or a record of what was measured or learned, which the next `learn` reads."""

MACHINE: dict[str, dict[str, Moves | None]] = {
    "Machine": {
        "schema_": DESCRIBES,
        "name": DESCRIBES,
        "description": DESCRIBES,
        "imbalance": longer("experts"),
    },
    "Source": dict.fromkeys(("kind", "source"), DESCRIBES),
    "Accelerator": {
        "name": DESCRIBES,
        "sources": DESCRIBES,
        "generation": other("step", "volta", "ampere"),
        "power_w": Moves("energy", 1),
        "memory_gib": Moves("limit", 1),
        "reserved_memory_gib": Moves("limit", -1),
        "memory_bandwidth_gb_per_s": shorter(),
        "memory_efficiency": shorter(),
        "peak_tflops": shorter(at="peak_tflops.bf16"),
        "vector_tflops": shorter("vocabulary", at="vector_tflops.bf16"),
        "matmul_efficiency": shorter(at="matmul_efficiency.NT"),
        "format_efficiency": shorter("blockwise", at="format_efficiency.fp8-blockwise"),
        "training_share": shorter(),
        "matmul_launch_us": longer(),
        "matmul_ramp": longer(),
        "promoted_share": shorter("blockwise"),
        "matmul_tile": longer("experts"),
        "attention_forward_efficiency": shorter(),
        "attention_backward_efficiency": shorter(),
        "attention_forward_softmax": other("step", "0.01", "0.9", probe="heads"),
        "attention_backward_softmax": other("step", "0.01", "0.9", probe="heads"),
        "attention_ramp_tokens": other("step", "100", "3000", probe="long"),
        "kernel_launch_us": longer(),
        "contention": longer(),
    },
    "Tier": {
        "name": DESCRIBES,
        "sources": DESCRIBES,
        "ranks": shorter(),
        "latency_us": longer(),
        "bandwidth_gb_per_s": shorter(),
        "measured": other("step", "[]", probe="pair"),
    },
    "network": {"latency_us": longer("pair"), "bandwidth_gb_per_s": shorter("pair")},
    "MeasuredBandwidth": {
        "stride": other("step", "16", probe="pair"),
        "group": other("step", "3", probe="pair"),
        "bandwidth_gb_per_s": shorter("pair"),
    },
    "CollectiveFactors": {"latency_factor": longer(), "bandwidth_factor": shorter()},
    "Protocol": {"name": DESCRIBES, "latency_factor": longer(), "bandwidth_factor": shorter()},
    "Library": {
        "name": DESCRIBES,
        "version": DESCRIBES,
        "sources": DESCRIBES,
        "launch_us": longer(),
        "algorithms": other("step", "[tree]", probe="reduced", at="algorithms.all_reduce"),
    },
    "Host": {
        "sources": DESCRIBES,
        "memory_gib": other("host", "1", probe="offloaded"),
        **dict.fromkeys(("memory_bandwidth_gb_per_s", "link_gb_per_s", "adam_parameters_per_s"), shorter("offloaded")),
    },
    "Operation": {
        "sources": DESCRIBES,
        "price_per_gpu_hour": Moves("cost", 1),
        "gpu_hours_between_failures": Moves("days", -1),
        "restart_minutes": Moves("days", 1),
        "storage_gb_per_s": Moves("days", -1),
        "host_copy_gb_per_s": Moves("days", -1),
        **dict.fromkeys(("host_share", "network_share", "waiting_share", "pue"), Moves("energy", 1)),
    },
    "Uncertainty": {
        "sources": DESCRIBES,
        "communication": Moves("interval", 1),
        "compute": Moves("interval", 1),
    },
    "Software": {
        "gemm": longer(),
        "attention": longer(),
        "traffic": longer(),
        "operation_us": longer(),
        "collective_us": longer(),
        "dispatch_us": longer(),
    },
    "Dispatching": {"call_us": longer("experts"), "bandwidth_share": shorter("experts")},
    "LearnedNumber": {
        "path": DESCRIBES,
        "prior": DESCRIBES,
        "prior_spread": DESCRIBES,
        "value": DESCRIBES,
        "moved_by": DESCRIBES,
        "spread": Moves("interval", 1, on="learned"),
    },
    "Learned": {
        "evidence": DESCRIBES,
        "ranks": Moves("interval", -1, on="learned"),
        "correlations": other("interval", "0.9", at="correlations.1.0", on="learned"),
        "of_layout": Moves("interval", 1, on="learned"),
        "of_model": Moves("interval", 1, on="learned"),
        "per_doubling": Moves("interval", 1, on="learned"),
    },
    "PaperEntry": {
        "inner": other("paper", "3", on="paper"),
        "group": other("paper", "3", on="paper"),
        "bandwidth_gib_per_s": Moves("paper", -1, on="paper"),
    },
    "PaperTable": {
        "sources": DESCRIBES,
        "ranks_per_node": other("paper", "2", on="paper"),
        "inter_node_gib_per_s": Moves("paper", -1, on="paper"),
    },
    "EnvironmentVariable": {
        "name": other("script", "OTHER"),
        "value": other("script", "another"),
        "why": other("script", "another reason"),
    },
    "Slurm": {
        "constraint": other("script", "gpu"),
        "partition": other("script", "main"),
        "qos": other("script", "high"),
        "account": other("script", "mine"),
        "cpus_per_rank": other("script", "3"),
        "gpus_per_rank": other("script", "1"),
        "extra": other("script", "[--mem=0]"),
        "srun": other("script", "[--label]"),
    },
    "Launcher": {
        "backend": other("interval", "gloo"),
        "ranks_per_node": other("refused", "4"),
    },
    "Measurement": dict.fromkeys(
        (
            *("created", "tool_version", "torch_version", "hosts", "device", "ranks", "cores", "network", "samples"),
            *("held_out_error", "outliers"),
        ),
        DESCRIBES,
    ),
}
PLACES = {
    "Machine": "",
    "MeasuredBandwidth": "tiers.nvlink.measured.0",
    "CollectiveFactors": "tiers.nvlink.collectives.all_gather",
    "Tier": "tiers.nvlink",
    "network": "tiers.network",
    "Protocol": "library.protocols.ll",
    "Software": "software.core",
    "Dispatching": "dispatchers.deepep",
    "LearnedNumber": "learned.numbers.0",
    "PaperTable": "paper",
    "PaperEntry": "paper.table.0",
    "EnvironmentVariable": "launcher.environment.0",
    "Slurm": "launcher.slurm",
}
"""Where a section is in the profiles below; others are under their own name."""
SITE: dict[str, Any] = {
    **{"price_per_gpu_hour": 2.0, "gpu_hours_between_failures": 3e4, "restart_minutes": 15.0, "storage_gb_per_s": 0.1},
    **{"host_copy_gb_per_s": 2.0, "host_share": 0.5, "network_share": 0.1, "waiting_share": 0.5, "pue": 1.2},
}
"""Of a section `operation`."""


@cache
def profile(on: str, folder: Path) -> Path:
    """A file with a profile that has every section: dgx-h100 with what calibrations and logs would add."""
    base = load_machine("perlmutter" if on == "paper" else "dgx-h100").document
    plain = CollectiveFactors(latency_factor=1.0, bandwidth_factor=1.0)
    inner = base.tiers[0]
    sources = {**inner.sources, "collectives": Source(kind="fitted", source="made up")}
    inner = inner.model_copy(update={"collectives": {"all_gather": plain}, "sources": sources})
    own = Software(gemm=1.1, attention=0.8, traffic=1.5, operation_us=2.0, collective_us=3.0, dispatch_us=20.0)
    update: dict[str, object] = {
        "tiers": (inner, *base.tiers[1:]),
        "software": {"core": own, "core-experts": own},
        "dispatchers": {"deepep": Dispatching(call_us=100.0)},
        "imbalance": 1.3,
        "operation": Operation(**SITE, sources={name: Source(kind="fact", source="made up") for name in SITE}),
        "launcher": base.launcher.model_copy(
            update={"environment": (EnvironmentVariable(name="SOME", value="1", why="a reason"),)}
        ),
    }
    if on == "learned":
        paths = ("tiers.nvlink.bandwidth_gb_per_s", "accelerator.training_share")
        numbers = (LearnedNumber(path=one, prior=1.0, prior_spread=0.3, value=1.0, spread=0.1) for one in paths)
        update["learned"] = Learned(
            evidence=("a log",),
            ranks=8.0,
            numbers=tuple(numbers),
            correlations=((), (0.5,)),
            of_layout=0.04,
            of_model=0.05,
            per_doubling=0.02,
        )
    path = folder / f"{on}.yaml"
    path.write_text(to_yaml(base if on == "paper" else base.model_copy(update=update)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where profiles are written."""
    return tmp_path_factory.mktemp("profiles")


def sections(document: type[Document]) -> Iterator[type[Document]]:
    """A document's class, and those of everything in it."""

    def within(wanted: object) -> Iterator[type[Document]]:
        if isinstance(wanted, type) and issubclass(wanted, Document):
            yield from sections(wanted)
        for one in get_args(wanted):
            yield from within(one)

    yield document
    for one in document.model_fields.values():
        yield from within(one.annotation)


def untold(document: type[Document], table: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Fields without an entry, but for those that hold sections, which have their own."""
    found = []
    for section in dict.fromkeys(sections(document)):
        own = {name for name, one in section.model_fields.items() if len([*_sections_of(one.annotation)]) == 0}
        found += [f"{section.__name__}.{name}" for name in sorted(own ^ {*table.get(section.__name__, {})})]
        for name in {*table.get(section.__name__, {})} - own:
            if name in section.model_fields:
                found.remove(f"{section.__name__}.{name}")
    return found


def _sections_of(wanted: object) -> Iterator[object]:
    if isinstance(wanted, type) and issubclass(wanted, Document):
        yield wanted
    for one in get_args(wanted):
        yield from _sections_of(one)


def rows(table: Mapping[str, Mapping[str, Moves | None]]) -> list[Any]:
    """The entries of a table as cases."""
    return [
        pytest.param(section, name, moves, id=f"{section}.{name}")
        for section, entries in table.items()
        for name, moves in entries.items()
        if moves is not None
    ]


def test_every_field_of_a_document_has_an_entry() -> None:
    """Guards new fields: what they move is said here."""
    Model.prepare()
    assert untold(Machine, MACHINE) == []
    assert untold(Model, MODEL) == []


@cache
def unchanged(probe: str, file: Path) -> Detail:
    """A probe on a profile as it is."""
    return PROBES[probe].priced(load_machine(file).document)


@cache
def paper_s(path: Path, overrides: tuple[str, ...]) -> float:
    """Communication of a layout by the paper's model, s; endless where its table has no entry."""
    machine, sizes = load_file(path, schema=Machine, overrides=overrides), {"x": 2, "y": 1, "z": 2, "data": 4}
    ranked = axonn_tune.search("5b", gpus=16, batch=64, cost="paper", machine=machine, **sizes).ranked
    return float(ranked[0].communication_s or 0.0) if len(ranked) else math.inf


@pytest.mark.parametrize(("section", "name", "moves"), rows(MACHINE))
def test_a_field_of_a_machine_moves_what_it_means(section: str, name: str, moves: Moves, folder: Path) -> None:
    """Guards what a user states: a number that is changed fourfold or halved moves its output in the direction of its
    meaning, nowhere in the other, and somewhere for sure; or it is refused."""
    path = ".".join(filter(None, (PLACES.get(section, section.lower()), moves.at or name)))
    file, moved = profile(moves.on, folder), 0
    before = load_machine(file).document
    for value, factor in changes(before, path, moves):
        try:
            after = load_machine(file, overrides=[f"{path}={value}"]).document
        except DocumentError as error:
            # A share above 1, say.
            moved += moves.output == "refused" and str(value) in str(error)
            continue
        if moves.output == "paper":
            pairs = [(paper_s(file, ()), paper_s(file, (f"{path}={value}",)))]
        else:
            others = GENERAL if moves.output == "step" and moves.sign else ()
            probes, read = (moves.probe, *others), OUTPUTS[moves.output]
            pairs = [(read(unchanged(one, file)), read(PROBES[one].priced(after))) for one in dict.fromkeys(probes)]
        moved += judged(pairs, moves.sign, factor)
    assert moved, f"{path} moves no {moves.output}"


@pytest.mark.parametrize("name", available("machine"))
def test_another_name_of_an_accelerator_moves_nothing(name: str) -> None:
    """Guards what an architecture decides: kernels, factors and scripts follow `generation`, not the product's name."""
    machine, renamed = (load_machine(name, overrides=one).document for one in ([], ["accelerator.name=Other 1"]))
    for framework in registry().values():
        for precision in get_args(Precision):
            assert step_on(framework, renamed, precision) == step_on(framework, machine, precision)
        assert software_on(framework, renamed) == software_on(framework, machine)
    for probe in ("wide", "reduced"):
        priced = [PROBES[probe].priced(one) for one in (machine, renamed)]
        assert priced[0].high_s == priced[1].high_s
        assert priced[0].outside == priced[1].outside
        scripts = [emission(one, "run", call="", kind="torchrun").text for one in priced]
        assert scripts[1].replace("Other 1", machine.accelerator.name) == scripts[0]


def judged(pairs: list[tuple[Any, Any]], sign: int, factor: float) -> bool:
    """Whether the first pair differs; AssertionError if any goes the other way."""
    for old, new in pairs if sign else ():
        assert (new - old) * sign * (factor - 1.0) >= -ROUNDING * abs(old), (factor, old, new)
    old, new = pairs[0]
    return bool(abs(new - old) > ROUNDING * abs(old) if isinstance(old, float) else old != new)


def changes(document: Document, path: str, moves: Moves) -> Iterator[tuple[object, float]]:
    """Values to give a field, with how many times its own each is."""
    if moves.values:
        yield from ((value, 1.0) for value in moves.values)
        return
    found: Any = document
    for key in path.split("."):
        if isinstance(found, tuple):
            named = {getattr(one, "name", ""): one for one in found}
            found = found[int(key)] if key.isdigit() else named[key]
        else:
            found = found[key] if isinstance(found, dict) else getattr(found, key)
    assert isinstance(found, int | float), path
    assert found, f"{path} is 0"
    for factor in NUMBERS:
        value = found * factor
        yield (max(1, round(value)), max(1, round(value)) / found) if isinstance(found, int) else (value, factor)


MODEL: dict[str, dict[str, Moves | None]] = {
    "Model": {
        "schema_": DESCRIBES,
        "name": DESCRIBES,
        "description": DESCRIBES,
        "source": DESCRIBES,
        "family": other("step", "gpt"),
        "layers": longer(),
        "pattern": other("step", "local full*23", at="layers", on="gpt-oss-20b"),
        "hidden": longer(),
        "heads": longer(),
        "kv_heads": longer(),
        "head_dim": longer(),
        "ffn": longer(),
        "vocab": longer(),
        "max_sequence_length": Moves("parameters", 1, on="5b"),
        "biases": other("parameters", "true"),
        "tied_embeddings": other("parameters", "true"),
        "rotary_base": other("script", "20000"),
        "norm_epsilon": other("script", "0.002"),
        "qkv_biases": other("script", "true"),
        "block_class": DESCRIBES,
        "approximated": DESCRIBES,
        "mtp_layers": longer(on="deepseek-v3"),
        "norms": other("step", "post", "both"),
        "residual_streams": other("step", "4"),
    },
    "ModelDefaults": {"global_batch": Moves("batch", 1), "sequence_length": Moves("tokens", 1)},
    "LayerType": {
        "attention": other("step", "false", at="layer_types.dense.attention", on="nano-moe"),
        "window": longer(at="layer_types.local.window", on="gpt-oss-20b"),
        "sinks": other("parameters", "false", at="layer_types.full.sinks", on="gpt-oss-20b"),
        "qk_norms": other("step", "true", at="layer_types.full.qk_norms", on="gpt-oss-20b"),
        "norms": other("step", "post", "both", at="layer_types.full.norms", on="gpt-oss-20b"),
        "output_gate": other("step", "element", "head", at="layer_types.full.output_gate", on="gpt-oss-20b"),
        "values_are_keys": other("step", "true", at="layer_types.full.values_are_keys", on="gpt-oss-20b"),
        "value_dim": other("step", "128", at="layer_types.full.value_dim", on="gpt-oss-20b"),
        "rotary_share": other("script", "0.25", at="layer_types.dense.rotary_share", on="nano-moe"),
        "heads": other("step", "128", at="layer_types.full.heads", on="gpt-oss-20b"),
        "kv_heads": other("step", "32", at="layer_types.full.kv_heads", on="gpt-oss-20b"),
        "head_dim": other("step", "128", at="layer_types.full.head_dim", on="gpt-oss-20b"),
        "mlp": other("step", "false", at="layer_types.dense.mlp", on="nano-moe"),
        "ffn": other("step", "3072", at="layer_types.dense.ffn", on="nano-moe"),
        "gated": other("step", "false", at="layer_types.dense.gated", on="nano-moe"),
        "in_bf16": other("step", "true", probe="blockwise", at="layer_types.dense.in_bf16", on="moonlight-16b-a3b"),
    },
    "Experts": {
        "count": Moves("memory", 1),
        "per_token": longer(),
        "width": longer(),
        "shared_width": longer(on="moonlight-16b-a3b"),
        "shared_gate": other("step", "true", on="moonlight-16b-a3b"),
        "latent_width": other("step", "512", on="moonlight-16b-a3b"),
        "clamp": other("step", "7.0"),
        "score": other("script", "sigmoid"),
        "normalized": other("script", "false"),
        "scaling": other("script", "1.5", on="moonlight-16b-a3b"),
        "score_bias": other("script", "false", on="moonlight-16b-a3b"),
        "groups": other("step", "32", on="deepseek-v3"),
        "chosen_groups": longer(on="deepseek-v3"),
    },
    "LatentAttention": {
        "query_rank": other("step", "512", on="moonlight-16b-a3b"),
        **dict.fromkeys(("kv_rank", "nope_dim", "rope_dim", "value_dim"), longer(on="moonlight-16b-a3b")),
    },
    "Indexer": {
        **dict.fromkeys(("heads", "head_dim", "topk"), longer(on="glm-5")),
        "shared": other("step", "true", on="glm-5"),
    },
    "Mamba": {
        **dict.fromkeys(("heads", "head_dim", "state", "groups", "conv"), longer(on="nemotron-3-nano-30b-a3b")),
        "chunk": other("executed", "512", on="nemotron-3-nano-30b-a3b"),
    },
    "CompressedAttention": {
        **dict.fromkeys(("heads", "head_dim", "query_rank", "output_rank", "window"), longer(on="deepseek-v4-flash")),
        "groups": other("step", "16", on="deepseek-v4-flash"),
        "ratio": other("step", "16", on="deepseek-v4-flash"),
    },
    "GatedDeltaNet": {
        **dict.fromkeys(("key_heads", "value_heads", "key_dim", "value_dim"), longer(on="qwen3.5-9b")),
        "conv": Moves("parameters", 1, on="qwen3.5-9b"),
    },
    "KimiDeltaAttention": {
        **dict.fromkeys(("heads", "head_dim"), longer(on="kimi-linear-48b-a3b")),
        "conv": Moves("parameters", 1, on="kimi-linear-48b-a3b"),
        "full_rank": other("parameters", "true", on="kimi-linear-48b-a3b"),
    },
    "ShortConvolution": {"conv": Moves("parameters", 1, on="lfm2-1.2b")},
    # No shipped model has it: tests/unit/program/test_count.py.
    "LightningAttention": dict.fromkeys(("heads", "head_dim", "chunk")),
}
OWN_PLACES = {
    "Model": "",
    "ModelDefaults": "defaults",
    "LayerType": "",
    "Experts": "layer_types.moe.experts",
    "LatentAttention": "layer_types.moe.latent",
    "Indexer": "layer_types.moe.indexer",
    "Mamba": "layer_types.mamba.mamba",
    "CompressedAttention": "layer_types.sparse.compressed",
    "GatedDeltaNet": "layer_types.delta.gdn",
    "KimiDeltaAttention": "layer_types.delta.kda",
    "ShortConvolution": "layer_types.conv.shortconv",
}
OUTPUTS |= {
    "batch": lambda priced: priced.job.model.defaults.global_batch,
    "tokens": lambda priced: priced.job.model.defaults.sequence_length,
}


@pytest.mark.parametrize(("section", "name", "moves"), rows(MODEL))
def test_a_field_of_a_model_moves_what_it_means(section: str, name: str, moves: Moves) -> None:
    """Guards sizes of models: each moves steps, memory, parameters or scripts in the direction of its meaning."""
    on = {"plain": "qwen3-30b-a3b" if section == "Experts" else "llama3-8b"}.get(moves.on, moves.on)
    path = ".".join(filter(None, (OWN_PLACES[section], moves.at or name)))
    before, machine, moved = load_model(on).document, load_machine("dgx-h100").document, False
    # Of steps that their host decides, less computation hides less.
    axes = {"data": 64, "expert": 32} if on == "deepseek-v3" else {"data": 8}
    probe = Probe(axes=axes, batch=128, seq=8192, micro_batch=2, precision=PROBES[moves.probe].precision)
    for value, factor in changes(before, path, moves):
        try:
            after = load_model(on, overrides=[f"{path}={value}"]).document
        except DocumentError:
            continue  # more groups than there are, say
        read = OUTPUTS[moves.output]
        moved |= judged([(read(probe.priced(machine, before)), read(probe.priced(machine, after)))], moves.sign, factor)
    assert moved, f"{path} of {on} moves no {moves.output}"


DENSE: dict[str, Any] = {
    "model": "llama3-8b",
    "machine": "dgx-h100",
    "framework": "megatron-core",
    "gpus": 8,
    "batch": 64,
}
PINNED: dict[str, Any] = {**DENSE, "x": 2, "y": 1, "z": 1, "context": 1, "pipeline": 1, "micro_batch": 1}
ROUTED: dict[str, Any] = {**PINNED, "model": "qwen3-30b-a3b", "gpus": 16, "x": 1, "expert": 8, "recompute": "full"}
SMALL: dict[str, Any] = {**ROUTED, "model": "nano-moe", "gpus": 8, "batch": 48, "recompute": "none"}
STAGED: dict[str, Any] = {**PINNED, "pipeline": 4, "x": 2}
UNEVEN: dict[str, Any] = {"model": "5b", "framework": "fsdp", "gpus": 24, "batch": 48, "z": 24}
SHARDED: dict[str, Any] = {"model": "5b", "machine": "perlmutter", "gpus": 8, "batch": 64, "x": 1, "y": 1, "z": 8}


@dataclass(frozen=True)
class Asks:
    """What an option changes of a search: its value, beside what it is given, and which way a step or memory goes."""

    beside: Mapping[str, Any]
    value: Any
    output: str = "all"
    sign: int = 0
    command: str = "search"

    @property
    def settings(self) -> set[str]:
        """Paths that it sets."""
        return {one.partition("=")[0] for one in (self.value if isinstance(self.value, tuple) else ())}


REQUEST: dict[str, Asks] = {
    "model": Asks({**SHARDED, "model": "5b"}, "10b", "step", 1),
    "gpus": Asks({**PINNED}, 16, "step", -1),
    "batch": Asks(PINNED, 256, "step", 1),
    "seq": Asks(PINNED, 16384, "step", 1),
    "lengths": Asks(PINNED, "180:380", "step", -1),
    "packing": Asks({**PINNED, "lengths": "180:380"}, "padded", "memory", -1),
    "precision": Asks(PINNED, "fp8-blockwise", "step", -1),
    "framework": Asks({**SHARDED, "machine": "dgx-h100"}, "fsdp"),
    "weak": Asks({"model": "nano", "gpus": "1,2", "batch": 8}, value=True, command="sweep"),
    "over": Asks({"model": "nano", "gpus": "4", "batch": 8}, "z=2..4x2", command="sweep"),
    "set": Asks(PINNED, ("machine.accelerator.peak_tflops.bf16=400",), "step", 1),
    "set of heads": Asks({**PINNED, "gpus": 16, "x": 16}, ("step.repeated_kv_heads=false",), "rows", -1),
    "set of rows": Asks(UNEVEN, ("step.whole_rows=true",), "rows", -1),
    "shard_optimizer": Asks({**SHARDED, "z": 4, "recompute": "full"}, value=True, output="memory", sign=-1),
    "grad_reduce_in_bf16": Asks(PINNED, value=True, output="memory", sign=-1),
    "optimizer": Asks(PINNED, "sgd", "memory", -1),
    "use_precision_aware_optimizer": Asks(PINNED, "bf16", "memory", -1),
    "cuda_graphs": Asks(SMALL, ("attn",)),
    "dispatcher": Asks(ROUTED, "allgather"),
    "imbalance": Asks(ROUTED, 3.0, "step", 1),
    "tune": Asks({**PINNED, "recompute": "none"}, "lora", "memory", -1),
    "lora_rank": Asks({**PINNED, "recompute": "none", "tune": "lora"}, 256, "step", 1),
    "lora_targets": Asks({**PINNED, "recompute": "none", "tune": "lora"}, "linear_qkv", "step", -1),
    "lora_dtype": Asks({**SHARDED, "framework": "fsdp", "tune": "lora", "recompute": "full"}, "bf16", "memory", -1),
    "tokens_total": Asks(PINNED, "1T"),
    "price": Asks({**PINNED, "tokens_total": "1T"}, 2.5),
    "machine": Asks(SHARDED, "dgx-h100", "step", -1),
    "x": Asks({**PINNED, "x": None, "z": 1}, 4),
    "y": Asks({**SHARDED, "y": None, "z": None}, 8),
    "z": Asks({**SHARDED, "z": None}, 4),
    "data": Asks({**PINNED, "x": None}, 4),
    "context": Asks({**PINNED, "context": None}, 2),
    "expert": Asks({**SMALL, "expert": None}, 4),
    "expert_tensor": Asks({**ROUTED, "x": 2, "expert": 4}, 2),
    "expert_z": Asks({**SMALL, "expert": 4}, 2),
    "pipeline": Asks({**PINNED, "pipeline": None}, 2),
    "chunks": Asks({**STAGED, "recompute": "full"}, 2),
    "pipeline_schedule": Asks(
        {**STAGED, "framework": "primus", "batch": 8, "chunks": 1, "pipeline_schedule": "1f1b"}, "zb1p", "step", -1
    ),
    "pipeline_layout": Asks({**STAGED, "chunks": 1}, "Et*9|t*8|t*8|t*7L"),
    "order": Asks({**SHARDED, "gpus": 16, "data": 2, "rank_by": "step"}, "data,z,x,y"),
    "recompute": Asks(PINNED, "full", "memory", -1),
    "recompute_layers": Asks({**PINNED, "recompute": "full"}, 4, "memory", 1),
    "micro_batch": Asks(PINNED, 2, "memory", 1),
    "kept_layers": Asks({**SHARDED, "data": 1}, 4, "all"),
    "overlap": Asks({**SHARDED, "rank_by": "step"}, ("data_parallel",), "step", 1),
    "no_overlap": Asks({**SHARDED, "rank_by": "step"}, "all", "step", 1),
    "expert_overlap": Asks(SMALL, value=False),
    "split_micro_batch": Asks({**SHARDED, "x": 2, "z": 4, "rank_by": "step", "micro_batch": 2}, value=True),
    "rank_by": Asks({**SHARDED, "z": None}, "step"),
    "cost": Asks(SHARDED, "paper"),
    "top": Asks({**SHARDED, "z": None, "y": None}, 2, "rows", -1),
    "variants": Asks({**SHARDED, "gpus": 4, "z": 4}, value=True),
    "same_kernels": Asks({"model": "nano", "gpus": 1, "machine": "dgx-h100"}, value=True, command="compare"),
    "pick": Asks({"model": "nano", "gpus": 2}, 2, command="explain"),
}


def test_every_option_has_an_entry() -> None:
    """Guards new options: what they change is said here."""
    assert {name.partition(" of ")[0] for name in REQUEST} == {*OPTIONS}


SLOW = ("same_kernels",)
"""Options of commands that take a second."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ()) for name in REQUEST]
)
def test_an_option_changes_what_it_means(name: str) -> None:
    """Guards options: each changes the answer, and steps and memory in the direction of its meaning."""
    asks = REQUEST[name]
    pairs = [tuple(answer(asks, {**asks.beside, **more}) for more in ({}, {name.partition(" of ")[0]: asks.value}))]
    assert judged(pairs, asks.sign, 2.0), f"{name}={asks.value} changes nothing"


def answer(asks: Asks, options: Mapping[str, Any]) -> Any:
    """What a command answers: the first layout's step or memory, or everything but the request itself."""
    given = {name: value for name, value in options.items() if value is not None}
    found = getattr(axonn_tune, asks.command)(**given)
    if asks.output == "rows":
        return len(found.ranked)
    if asks.output in ("step", "memory"):
        first = found.ranked[0]
        return first.iteration_s if asks.output == "step" else first.memory_bytes
    # Results alone, not what was asked.
    results = {"configs", "config", "points", "contenders"}
    answered = {key: value for key, value in found.to_dict().items() if key in results}
    assert any(answered.values()), options
    return answered


STEP_PROBES: dict[str, tuple[Probe, ...]] = {
    "tensor": (
        *(Probe(), Probe(recompute="selective"), Probe(axes={"x": 16}, model="llama3-8b")),
        Probe("5b", "torchtitan", axes={"z": 8}, seq=2048, recompute="selective"),
        Probe(sizes=("residual_streams=4",)),
    ),
    "sharded": tuple(
        Probe("5b", "fsdp", axes={"z": 8}, seq=2048, recompute=one, batch=batch)
        for one, batch in (("none", 32), ("full", 32), ("none", 8))
    ),
    "replicated": (Probe(axes={"data": 16}), Probe("5b", "deepspeed", axes={"z": 2, "data": 8}, seq=2048)),
    "offloaded": (PROBES["offloaded"],),
    "blocking": (Probe("5b", "fsdp", axes={"z": 4, "data": 2}, seq=2048, overlaps=()),),
    "context": (
        PROBES["long"],
        Probe(axes={"context": 16}, batch=8, seq=65536, step={"context_exchange": "hierarchical", "context_inside": 8}),
    ),
    "experts": (
        PROBES["experts"],
        Probe("gpt-oss-20b", axes={"data": 8, "expert": 8}),
        Probe("moonlight-16b-a3b", axes={"x": 2, "data": 8, "expert": 4}),
        Probe("moonlight-16b-a3b", axes={"z": 2, "data": 8}, step={"expert_replicas": ("x", "context", "data")}),
        Probe(
            "moonlight-16b-a3b",
            axes={"data": 32, "expert": 32},
            batch=256,
            # Nothing that its host would decide.
            step={"expert_overlap": True, "dispatcher": "alltoall", "cuda_graphs": ("full_iteration",)},
        ),
    ),
    "scans": (Probe("olmo-hybrid-7b", axes={"data": 16}),),
    "sparse": (Probe("glm-5", axes={"data": 16, "expert": 16}),),
    "optimizer": (
        Probe(axes={"x": 4, "data": 4}, step={"optimizer": "muon"}),
        Probe("5b", "deepspeed", axes={"data": 16}, seq=2048, step={"optimizer": "muon"}),
        Probe("5b", "axonn-tune", axes={"z": 8}, seq=2048, step={"optimizer": "muon"}),
    ),
    "adapters": (Probe("5b", "fsdp", axes={"z": 8}, seq=2048, tuning=Tuning(mode="lora", rank=64, targets=("*",))),),
    "stages": (PROBES["stages"], Probe("5b", "deepspeed", axes={"data": 2, "pipeline": 4}, seq=2048)),
    "formats": (
        *(Probe(precision=one) for one in ("fp8-current", "fp8-blockwise", "fp8-delayed")),
        *(Probe("5b", "fsdp", axes={"z": 8}, precision=one) for one in ("fp8-current", "fp8-delayed")),
        Probe(precision="fp32"),
    ),
}
VALUES: dict[str, tuple[object, ...]] = {
    "reshard": ("always", "never"),
    "gather_unit": ("block", "weight"),
    "replicated_tables": (("head",), ("embedding",)),
    "reduction": ("whole", "parameter", "buckets"),
    "context_exchange": ("all_gather", "all_to_all", "ring"),
    "expert_shards": (("z",),),
    "expert_replicas": (("data",),),
    "dispatcher": ("allgather", "deepep"),
    "expert_kernels": ("looped",),
    "scan_kernels": ("cudnn",),
    "sparse_kernels": ("tilelang",),
    "selective": (("attention.core",),),
    "loss_reductions": ((1.0,),),
    "kernels": ("eager",),
    "cuda_graphs": (("full_iteration",), ("attn",)),
    "vocabulary_multiple": (4096,),
    "overlaps": ((),),
    "engine_formats": (("fp8-current",), ()),
    "context_inside": (4,),
    "loss": ("in_place", "eager"),
    "offloaded": (("moments",),),
    "optimizer": ("adamw",),
    "muon_tp_mode": ("duplicated", "distributed"),
    "muon_form": ("gram", "standard"),
    "host_optimizer": ("deepspeed",),
    "pipeline_order": ("zb1p", "zbv"),
    "offloaded_states": (0.5,),
    "offloaded_inputs": (0.5,),
}
VALUES |= dict.fromkeys(("blocking_reduction", "staged_reduction"), VALUES["reduction"])
"""What options of a step are set to that are no numbers and no flags."""


OF_STEPS = {
    "tensor": "sequence_parallel pipelined_tensor selective selective_at_once loss_reductions loss loss_chunks "
    "loss_parallel fused_attention deterministic fused_norms fused_accumulation compiled_activation "
    "fused_hyper_connections dropout kernels "
    "cuda_graphs overlaps step_reductions vocabulary_multiple",
    "sharded": "gather_unit gather_bytes shard_gradient_bytes gather_copies gather_after_recompute prefetch_recompute "
    "prefetch_backward reshard head_gathered_again replicated_tables master_shards recompute_whole_block "
    "whole_gradient_bytes",
    "replicated": "reduction gradient_bytes reduced_bytes reduce_each_micro_batch distributed_optimizer "
    "parameter_overlap shard_gradients offloaded offloaded_layers master_bytes exp_avg_bytes exp_avg_sq_bytes",
    "offloaded": "offloaded_states offloaded_inputs host_optimizer offload_overlap",
    "scans": "scan_kernels",
    "sparse": "sparse_kernels",
    "blocking": "blocking_reduction",
    "context": "context_exchange context_inside context_shards",
    "experts": "expert_shards expert_replicas dispatcher imbalance capacity_factor expert_overlap gathers_experts "
    "delayed_weight_gradients shared_expert_overlap balancing_loss expert_kernels natural_imbalance "
    "paged_stash",
    "optimizer": "optimizer muon_tp_mode muon_num_ns_steps muon_form muon_batched muon_apart_gate muon_cut "
    "muon_gathered",
    "adapters": "replicated_adapters",
    "stages": "staged_reduction first_less last_less pipeline_order",
    "formats": "keeps_quantized one_layout primary_weights first_layers_bf16 last_layers_bf16 narrow_attention "
    "narrow_head narrow_activation cudnn_norms "
    "narrow_gathers saves_original quantizes_in_gemm fused_quantization engine_formats requantizes "
    "tf32",
    "grids": "repeated_kv_heads whole_rows",
}
"""Options of a step, by the layouts that show what they do; of grids, which a search lists, by `REQUEST`."""


def test_every_option_of_a_step_has_an_entry() -> None:
    """Guards new options of a step: where they do something is said here."""
    assert sorted(" ".join(OF_STEPS.values()).split()) == sorted(one.name for one in fields(StepOptions))
    asked = {setting for asks in REQUEST.values() for setting in asks.settings}
    assert {f"step.{name}" for name in OF_STEPS["grids"].split()} <= asked


@pytest.mark.parametrize("group", STEP_PROBES)
def test_options_of_a_step_change_some_step(group: str) -> None:
    """Guards options of a step: each changes the time or the memory of some layout."""
    machine = load_machine("dgx-h100").document
    plain = [(probe, probe.priced(machine)) for probe in STEP_PROBES[group]]
    idle = [
        name for name in OF_STEPS[group].split() if not any(changed(probe, before, name) for probe, before in plain)
    ]
    assert idle == []


def changed(probe: Probe, before: Detail, option: str) -> bool:
    """Whether an option moves the step or the memory of a layout."""
    own = getattr(before.job.framework.step, option)
    for value in VALUES.get(option, (not own,) if isinstance(own, bool) else (1, 4, 0.5)):
        if value != own:
            try:
                after = probe.priced(before.job.machine, **{option: value})
            except UsageError:
                continue  # an axis that is another's here, say
            longer = abs(after.iteration_s / before.iteration_s - 1.0) > ROUNDING
            if longer or after.memory_bytes != before.memory_bytes:
                return True
    return False
