"""Commands that are written are read as what they were written for: each case of each framework, in each form."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from axonn_tune.cost.price import price
from axonn_tune.errors import UsageError
from axonn_tune.frameworks.description import Command, Run
from axonn_tune.job import Job, Layout
from axonn_tune.learning.stated import read_run
from axonn_tune.specs.model import Model
from tests.unit.frameworks.asked import Case, case_of, cases, launched, run_of

WRITTEN = [case for case in cases() if case.framework != "axonn"]
"""All but those of the easy API, whose layout is a Python file of one's own script."""


def forms(run: Run) -> Iterator[Command]:
    """Commands that a reader takes: not FSDP's Python file, which only Python reads."""
    command = launched(run)
    yield from (one for one in (command, *command.forms.values()) if not {"_mesh.py", "_model.py"} & one.files.keys())


def script(command: Command, folder: Path) -> Path:
    """The command with its variables in a script, and its config files beside it."""
    folder.mkdir()
    words = [*command.program, *command.words]
    if command.accelerate:
        words = ["accelerate", "launch", *(word for one in command.accelerate for word in one.words), *words]
    for suffix, text in command.files.items():
        (folder / f"run{suffix}").write_text(text, "utf-8")
        words = [word.replace(f"{{file:{suffix}}}", f"run{suffix}") for word in words]
    path = folder / "run.sh"
    lines = [f"export {one.name}={shlex.quote(one.value)}" for one in command.environment]
    lines.append(shlex.join(["torchrun", *words] if not command.accelerate else words))
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def plain(model: Model) -> tuple[object, ...]:
    """Sizes of a model, and what its blocks have."""
    sizes = (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim, model.ffn, model.vocab)
    types = [replace(one, name="", qk_norms=False) for one in model.types]
    layers = [types[index] for index, count in model.runs for _ in range(count)]
    return (*sizes, model.gated, model.biases, model.tied_embeddings, model.mtp_layers, layers)


@pytest.mark.parametrize("case", WRITTEN, ids=str)
def test_what_is_written_is_read(case: Case, tmp_path: Path) -> None:
    """Guards both directions of a framework's keys: model, batch, grid, micro-batch, recompute, parts, options."""
    assert read_as_written(case, run_of(case), tmp_path) or case.framework in ("torchtitan", "fsdp")


def read_as_written(case: Case, run: Run, tmp_path: Path) -> int:
    """Commands of a run that are read; each as what it was written for, of the same price."""
    number = 0
    for number, command in enumerate(forms(run), 1):
        own = command.program == ("train.py",)
        path = script(command, tmp_path / str(number))
        given = {"n_gpus": str(case.gpus)} if not command.accelerate else {}
        read = read_run(path, given=given, model=run.model if own else None)
        found = read.case(run.machine)
        assert not read.unknown
        assert plain(found.model) == plain(run.model)
        assert found.framework.name == case.framework
        assert found.workload.global_batch == run.workload.global_batch
        assert found.workload.sequence_length == run.workload.sequence_length
        assert found.workload.precision == run.workload.precision
        settled: Layout = next(one for one in found.configurations if one.recompute == run.recompute)
        assert own or len(found.configurations) == 1
        assert settled.grid.by_axis == run.grid.by_axis
        wide = [axis for axis in settled.grid.order if run.size(axis) > 1]
        assert wide == [axis for axis in run.grid.order if run.size(axis) > 1]
        assert settled.micro_batch == run.micro_batch
        assert settled.chunks == run.chunks
        if case.framework == "deepspeed" and run.size("pipeline") > 1:
            # Said to be priced otherwise: DeepSpeed's engine of pipelines.
            continue
        # On AMD's GPUs Megatron-AxoNN is told not to accumulate inside GEMMs, which is priced as if it did.
        fused = run.framework.step.fused_accumulation or case.machine == "frontier"
        framework = found.framework.with_step(fused_accumulation=fused)
        kept = run.kept_layers if settled.kept_layers is None else settled.kept_layers
        some = run.recompute_layers
        assert settled.recompute_layers == some
        asked = Layout(run.grid, run.micro_batch, run.recompute, run.kept_layers, run.chunks, run.parts, some)
        asked_of = replace(run.framework, step=run.step, dispatchers=())
        ours = price(Job(run.model, run.machine, run.workload, asked_of), asked)
        settled = replace(settled, kept_layers=kept)
        theirs = price(Job(found.model, run.machine, found.workload, framework), settled)
        assert ours.iteration_s == pytest.approx(theirs.iteration_s, rel=1e-9)
        assert ours.memory.total_bytes == pytest.approx(theirs.memory.total_bytes, rel=1e-9)
    return number


EVERYTHING = ("moments", "master", "gradients", "weights")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("megatron-core 8b-gtp", {"master_bytes": 2, "exp_avg_bytes": 4, "offloaded": EVERYTHING[:2]}),
        *(("fsdp 8b-hsdp", {"optimizer": name}) for name in ("adamw-8bit", "sgd", "lion", "adafactor", "muon")),
        ("torchtitan 8b-fsdp", {"offloaded": EVERYTHING}),
        ("torchtitan 70b-chunks", {"offloaded": EVERYTHING}),
        ("fsdp 8b-hsdp", {"offloaded": EVERYTHING}),
        ("deepspeed 5b-zero1", {"offloaded": EVERYTHING[:2]}),
        ("deepspeed 5b-zero1", {"offloaded": EVERYTHING[:3]}),
        ("deepspeed 8b-zero3", {"offloaded": EVERYTHING[:3], "offloaded_states": 0.5}),
        ("deepspeed 8b-zero3", {"offloaded": EVERYTHING}),
        ("deepspeed 8b-tensor", {"offloaded": EVERYTHING[:2]}),
    ],
    ids=str,
)
def test_offload_and_optimizers_are_read_as_written(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Guards what frameworks keep on the host, ZeRO's stages and its share of states, and the Trainer's names of
    optimizers: the same price."""
    case = case_of(*name.split())
    run = run_of(case)
    assert read_as_written(case, replace(run, step=replace(run.step, **options)), tmp_path)


@pytest.mark.parametrize(("order", "chunks"), [("zb1p", 2), ("zb1p", 4), ("zbv", 2), ("dualpipe-v", 2)])
def test_schedules_that_split_are_read_as_written(order: str, chunks: int, tmp_path: Path) -> None:
    """Guards torch's names of schedules, and the two chunks of those that are folded: the same step and memory."""
    case = case_of("torchtitan-eager", "70b-pipeline")
    run = run_of(case)
    parts = (80 // (4 * chunks),) * 4 * chunks
    run = replace(run, recompute="none", chunks=chunks, parts=parts, step=replace(run.step, pipeline_order=order))
    assert read_as_written(case, run, tmp_path)
    for refused in (replace(run, recompute="full"), replace(run, accumulation=3)):
        with pytest.raises(UsageError, match="cannot express"):
            list(forms(refused))


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("torchtitan 8b-fsdp", {"offloaded": EVERYTHING[:2]}, "moments, master on the host; ask for step.offloaded"),
        ("fsdp 8b-hsdp", {"offloaded": ("attn_norm",)}, "attn_norm on the host"),
        ("deepspeed 5b-zero1", {"offloaded": EVERYTHING}, "with ZeRO-2; ask for step.offloaded=moments,master,grad"),
        ("deepspeed 5b-zero1", {"offloaded": EVERYTHING[:2], "offloaded_states": 0.5}, "with ZeRO-1"),
        ("deepspeed 70b-3d", {"offloaded": EVERYTHING[:3]}, "ZeRO-2 with pipeline stages"),
    ],
)
def test_offload_that_no_argument_says_is_refused(name: str, options: dict[str, Any], words: str) -> None:
    """Guards parts of a step that a framework keeps on the host only with others, or not at all."""
    run = run_of(case_of(*name.split()))
    with pytest.raises(UsageError, match=words):
        launched(replace(run, step=replace(run.step, **options)))


def test_one_rank_of_tensor_parallelism_says_nothing_of_sequence_parallelism(tmp_path: Path) -> None:
    """Guards experts with shards of weights and without tensor parallelism: scripts have no --sequence-parallel, which
    took the router's weights for gathered."""
    case = case_of("megatron-core", "deepseek-v2")
    test_what_is_written_is_read(replace(case, options=case.options | {"z": "8", "data": "4"}), tmp_path)


AWARE = {"master_bytes": 2, "exp_avg_bytes": 4, "exp_avg_sq_bytes": 4}
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("megatron-core 8b-gtp", {"cuda_graphs": ("full",)}),
    ("megatron-core 8b-gtp", {"cuda_graphs": ("attn", "mlp")}),
    ("megatron-core 70b-chunks", {"cuda_graphs": ("full_iteration",)}),
    ("megatron-core 8b-gtp", {"master_bytes": 2, "exp_avg_bytes": 4, "exp_avg_sq_bytes": 4}),
    ("megatron-core 8b-gtp", {"master_bytes": 2, "exp_avg_bytes": 2, "exp_avg_sq_bytes": 1}),
    ("megatron-core 70b-chunks", {"gradient_bytes": 2, "master_bytes": 2, "exp_avg_bytes": 2, "exp_avg_sq_bytes": 2}),
    ("megatron-core 8b-gtp", {"fused_accumulation": False}),
    ("megatron-core scout", {"primary_weights": True}),
    ("megatron-core gpt-oss", {"primary_weights": True, "first_layers_bf16": 1, "last_layers_bf16": 2}),
    ("megatron-core mixtral-tensor", {"narrow_attention": True, "first_layers_bf16": 0, "last_layers_bf16": 1}),
    ("megatron-core 70b-chunks", {"deterministic": True}),
    ("megatron-core qwen3-235b", {"expert_overlap": True, "delayed_weight_gradients": True}),
    ("megatron-core deepseek-v2", {"shared_expert_overlap": True}),
    ("megatron-core glm-5.2", {"sparse_kernels": "tilelang"}),
    ("megatron-core 70b-chunks", AWARE | {"offloaded": ("moments", "master"), "offloaded_states": 0.5}),
    ("megatron-core 70b-chunks", AWARE | {"offloaded": ("moments", "master"), "offload_overlap": True}),
    ("megatron-core 70b-chunks", {"offloaded": ("core_attn", "moe_act"), "offloaded_inputs": 0.5}),
    ("torchtitan 8b-fsdp", {"cuda_graphs": ("full_iteration",)}),
]
"""A case, and options of its step that are not its framework's."""


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_options_of_a_step_are_read_as_they_are_written(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Guards options of a step: what is written for them is read as them, whatever the form of the command."""
    run = run_of(case_of(*name.split()))
    command = launched(replace(run, step=replace(run.step, **options)))
    for number, form in enumerate((command, *command.forms.values())):
        read = read_run(script(form, tmp_path / str(number)), given={"n_gpus": str(run.grid.world)})
        found = read.case(run.machine).framework.step
        assert {option: getattr(found, option) for option in options} == options
        assert not read.unknown
        assert not [words for words in read.ignored if "graph" in words]


@pytest.mark.parametrize("name", ["8b-one-node", "8b-hsdp"])
def test_fp8_of_accelerate_is_read_as_it_is_written(name: str, tmp_path: Path) -> None:
    """Guards torchao's FP8 in Accelerate's config, also without a backend, and Transformer Engine's, which it applies
    under FSDP1 alone; MS-AMP is priced as BF16. Both are said."""
    case = case_of("fsdp", name)
    case = replace(case, options=case.options | {"precision": "fp8-current"})
    test_what_is_written_is_read(case, tmp_path)
    run = run_of(case)
    path = script(launched(replace(run, step=replace(run.step, primary_weights=True))), tmp_path / "primary")
    read = read_run(path, given={}, model=run.model)
    assert read.case(run.machine).framework.step.primary_weights
    assert not read.unknown
    assert "BF16" not in " ".join(read.ignored)
    config = path.with_suffix(".yaml")
    for old, new, precision, said in (
        ("  backend: AO", "  other: AO", "fp8-current", ""),
        ("  other: AO", "  backend: TE", "fp8-delayed", "only under FSDP1"),
        ("fsdp_version: 2", "fsdp_version: 1", "fp8-delayed", ""),
        ("backend: TE", "backend: MSAMP", "bf16", "priced as BF16"),
        ("precision: fp8", "precision: bf16", "bf16", "priced as BF16"),
    ):
        config.write_text(config.read_text("utf-8").replace(old, new), "utf-8")
        read = read_run(path, given={}, model=run.model)
        assert read.case(run.machine).workload.precision == precision
        words = " ".join(read.ignored)
        assert [one for one in ("only under FSDP1", "priced as BF16") if one in words] == ([said] if said else [])
