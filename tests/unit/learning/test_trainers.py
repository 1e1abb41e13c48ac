"""Files of Accelerate, LLaMA-Factory and Hugging Face's Trainer: layout, batch, model and step that they state."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from axonn_tune.api.learning import EvidenceOptions, diagnose, learn
from axonn_tune.errors import AxonnTuneError, DocumentError
from axonn_tune.frameworks.keys import TRANSLATED, Key, find, table, tables_of
from axonn_tune.grid import Grid
from axonn_tune.job import Layout
from axonn_tune.learning.run import CommandRun
from axonn_tune.learning.stated import read_run
from axonn_tune.learning.translated import file_words
from axonn_tune.program.count import adapter_parameters
from axonn_tune.specs.catalog import load_machine

CASES = Path(__file__).parents[2] / "fixtures" / "trainers"
KINDS: Mapping[str, list[dict[str, Any]]] = {
    f"{prefix}{kind}": rows
    for name, prefix in (("cases", ""), ("public", "public-"))
    for kind, rows in yaml.safe_load((CASES / f"{name}.yaml").read_text("utf-8")).items()
}
ROWS = [pytest.param(one, id=f"{kind}-{at}") for kind, rows in KINDS.items() for at, one in enumerate(rows, 1)]
H100 = load_machine("dgx-h100").document


def read(folder: Path, one: Mapping[str, Any]) -> CommandRun:
    """The run of the first of a case's files."""
    for name, text in one["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    given = {name: str(value) for name, value in one.get("given", {}).items()}
    model = given.pop("model", None)
    return read_run(folder / next(iter(one["files"])), given=given, model=model)


def priced(run: CommandRun) -> dict[str, object]:
    """What the cost model gets."""
    case = run.case(H100)
    layout, step, model = case.configurations[0], case.framework.step, case.model
    grid, tuning = layout.grid, case.workload.tuning
    adapters = (
        {"collectives": tuning.collectives, "targets": len(tuning.targets), "adapter_type": tuning.dtype}
        if tuning
        else {}
    )
    return {
        **adapters,
        **({"tuned_dropout": tuning.dropout, "tables": [*tuning.tables], "base": tuning.base} if tuning else {}),
        **{
            "tensor": grid.x,
            "stages": grid.pipeline,
            "context": grid.context,
            "experts": grid.expert,
            "dropout": step.dropout,
        },
        "sequence_parallel": step.sequence_parallel,
        **{"framework": run.software, "gpus": grid.world, "shard": grid.z, "replicate": grid.data},
        **{"zero": 3 if grid.z > 1 else 2 if step.shard_gradients else int(step.distributed_optimizer)},
        **{"micro_batch": layout.micro_batch, "batch": case.workload.global_batch, "recompute": layout.recompute},
        "trains": case.title.partition(" of ")[0],
        "log": case.framework.logged and case.framework.logged.log,
        **{"sequence": case.workload.sequence_length, "precision": case.workload.precision},
        **{"kept": layout.kept_layers, "layers": model.layers, "vocab": model.vocab, "kv_heads": model.kv_heads},
        **{"tied": model.tied_embeddings, "offloaded": [*step.offloaded], "loss": step.loss, "kernels": step.kernels},
        **{name: getattr(step, name) for name in ("prefetch_backward", "reduce_each_micro_batch")},
        **{
            name: getattr(step, name)
            for name in ("master_bytes", "exp_avg_bytes", "whole_gradient_bytes", "loss_chunks")
        },
    }


@pytest.mark.parametrize("one", ROWS)
def test_files_are_read_as_their_tool_reads_them(one: Mapping[str, Any], tmp_path: Path) -> None:
    """Guards GPUs, shards and replicas, ZeRO's stage, batch, recompute, types and model, and refusals with the key."""
    if "refused" in one:
        with pytest.raises(AxonnTuneError) as caught:
            read(tmp_path, one).case(H100)
        assert one["refused"] in str(caught.value)
        return
    run = read(tmp_path, one)
    found, said = priced(run), "\n".join((*run.assumed, *run.ignored))
    assert {key: found[key] for key in one["priced"]} == one["priced"]
    assert [words for words in one.get("says", ()) if words not in said] == [], said
    assert run.unknown == ()


def fields(module: str, name: str) -> Iterator[tuple[str, str]]:
    """Fields of a data class with their defaults as they are written; the test is skipped without its package."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module} is not installed")
    found = importlib.util.find_spec(module.partition(".")[0])
    assert found is not None
    assert found.origin is not None
    tree = ast.parse(Path(found.origin).parent.joinpath(*module.split(".")[1:]).with_suffix(".py").read_text("utf-8"))
    classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    for node in (one for made in classes for one in made.body if isinstance(one, ast.AnnAssign)):
        default = node.value
        if isinstance(default, ast.Call):
            default = next((word.value for word in default.keywords if word.arg == "default"), None)
        if isinstance(node.target, ast.Name):
            yield node.target.id, "" if default is None else ast.unparse(default).strip("'\"")


BASES = {
    "llamafactory": "model_name_or_path: Qwen/Qwen2.5-7B\nfinetuning_type: full",
    "axolotl": "base_model: Qwen/Qwen2.5-7B",
    "torchtune": "model._component_: torchtune.models.llama3_1.llama3_1_8b\nbatch_size: 1\ndtype: bf16",
    "nemo_rl": "policy.model_name: Qwen/Qwen2.5-7B\npolicy.dtensor_cfg.enabled: true",
    "nemo_rl_megatron": "policy.model_name: Qwen/Qwen2.5-7B\npolicy.megatron_cfg.enabled: true",
    "verl": "model.path: Qwen/Qwen2.5-7B\nengine.strategy: fsdp",
    "verl_fsdp_sft": "model.partial_pretrain: Qwen/Qwen2.5-7B",
    "verl_megatron": "model.path: Qwen/Qwen2.5-7B\nengine.strategy: megatron",
}
"""The least file of each tool, to which the keys of its table are added."""


def whole_file(tool: str, folder: Path, values: Mapping[str, str]) -> CommandRun:
    """The run of a tool's file that states these keys, and one that no table has."""
    base = yaml.safe_load(BASES[tool])
    lines = {**values, **base, "quite_another_key": "1"}
    path = folder / "a.yaml"
    path.write_text("\n".join(f"{name}: {json.dumps(value)}" for name, value in lines.items()), "utf-8")
    return read_run(path, given={"n_gpus": "8", "seq": "2048"})


def own_keys(tool: str) -> list[Key]:
    """Keys that a file can state by themselves: no pattern, no section, not of another length."""
    return [key for key in table(tool) if "*" not in key.name and key.field != "seq"]


@pytest.mark.parametrize("tool", BASES)
def test_no_key_of_a_tool_vanishes_in_silence(tool: str, tmp_path: Path) -> None:
    """Guards the tables of tools: each key at its default is known, each that is not priced is named where it is set,
    and one that no table has is said to change nothing."""
    at_defaults = {key.name: key.default for key in own_keys(tool) if key.default not in ("", "off")}
    assert whole_file(tool, tmp_path, at_defaults).unknown == ("quite_another_key",)
    for key in own_keys(tool):
        value = "False" if key.default == "True" else "True" if "switch" in key.range else "7"
        if key.status == "ignored":
            said = whole_file(tool, tmp_path, {key.name: value}).ignored
            assert any(key.name in words for words in said), key.name
        elif key.status == "refused" and not key.is_silent("7"):
            with pytest.raises(AxonnTuneError, match=re.escape(key.name)):
                whole_file(tool, tmp_path, {key.name: "7"})


@pytest.mark.parametrize("tool", TRANSLATED)
def test_keys_of_a_tool_stand_for_arguments_that_are_known(tool: str) -> None:
    """Guards the tables of tools with names of their own: each field is an argument, and takes what the key means."""
    for key in table(tool):
        other = find(key.field, () if tool.endswith("_megatron") else tables_of("fsdp"))
        assert other is not None or not key.field, key.name
        meant = [*key.meanings.values(), *([key.default] if key.default and not key.meanings else [])]
        assert [one for one in meant if other is not None and other.misfit(one)] == [], key.name


TOOLS = [
    ("transformers.training_args", ("TrainingArguments",), ("trainer", "accelerate", "unpriced")),
    ("llamafactory.hparams.finetuning_args", ("FinetuningArguments",), ("llamafactory", "trainer", "unpriced")),
    ("llamafactory.hparams.model_args", ("BaseModelArguments",), ("llamafactory", "trainer", "unpriced")),
    ("llamafactory.hparams.data_args", ("DataArguments",), ("llamafactory", "trainer")),
    ("accelerate.utils.dataclasses", ("FullyShardedDataParallelPlugin",), ("accelerate",)),
]


@pytest.mark.parametrize(("module", "classes", "tables"), TOOLS)
def test_every_argument_of_the_tools_has_an_answer_and_its_default(
    module: str, classes: tuple[str, ...], tables: tuple[str, ...]
) -> None:
    """Guards tables against the tools' own data classes: each field is in one, with the default that is assumed."""
    before = "fsdp_" * (tables == ("accelerate",))
    found = dict(one for name in classes for one in fields(module, name))
    lacking = [name for name in found if find(f"{before}{name}", (*tables, "deepspeed")) is None]
    assert lacking == [] or lacking == ["deepspeed"]
    if before:
        return
    defaults = {key.name: key.default for key in table(tables[0]) if key.default not in ("", "off")}
    wrong = {
        name: (found[name], default)
        for name, default in defaults.items()
        if name in found and not _same(found[name], default)
    }
    assert wrong == {}


OF_TABLES = ("adapters", "trainer", "accelerate", "deepspeed", "launchers", "unpriced")
RECORDED = {
    **{name: tables_of(name) for name in ("verl", "verl_megatron", "verl_fsdp_sft", "nemo_rl")},
    **{name: (name, *OF_TABLES) for name in ("axolotl", "swift", "trl")},
}
"""Tools whose names and defaults `defaults/` has, at the commit in its first line, with the tables that answer them."""


@pytest.mark.parametrize("tool", RECORDED)
def test_every_key_that_a_tool_has_is_answered_with_its_default(tool: str) -> None:
    """Guards tables against the tools' own configs and data classes: no key without an answer, no other default."""
    lines = (CASES / "defaults" / f"{tool}.txt").read_text("utf-8").splitlines()
    theirs = dict(line.partition(" ")[::2] for line in lines if not line.startswith("#"))
    assert len(theirs) > 50
    assert [name for name in theirs if find(name, RECORDED[tool]) is None] == []
    also = {"nemo_rl": ["nemo_rl", "nemo_rl_megatron"]}.get(tool, [tool])
    ours = {key.name: key.default for name in also for key in table(name) if key.status != "harmless"}
    said = {name: default for name, default in ours.items() if default not in ("", "off") and theirs.get(name)}
    assert {name: (theirs[name], one) for name, one in said.items() if not _same(theirs[name], one)} == {}
    assert said


def _same(theirs: str, ours: str) -> bool:
    """Whether two texts are one default; None leaves a switch off, and words may belong to an enumeration."""
    theirs, ours = (text.rpartition(".")[2].lower() if not text[:1].isdecimal() else text for text in (theirs, ours))
    off = ("none", "false", "0", "0.0", "")
    return theirs == ours or (theirs in off and ours in off) or float_or(theirs) == float_or(ours)


def float_or(text: str) -> object:
    """A number, or the text."""
    try:
        return float(text)
    except ValueError:
        return text


R8, LINEAR = 8, ("q", "k", "v", "o", "gate", "up", "down")
BY_DEFAULT = {
    "LLaMA-Factory": ("a.yaml", "model_name_or_path: x\nstage: sft\ncutoff_len: 2048\nbf16: true\n", R8, LINEAR),
    "ms-swift": ("a.sh", "NPROC_PER_NODE=8 swift sft --model x --max_length 2048 --torch_dtype bfloat16", R8, LINEAR),
    "TRL": ("a.sh", "torchrun --nproc_per_node 8 sft.py --use_peft --max_length 2048 --bf16", 16, ("q", "v")),
    "axolotl": ("a.yaml", "base_model: x\nadapter: lora\nlora_r: 32\nlora_target_linear: true\n", 32, LINEAR),
}


@pytest.mark.parametrize("tool", BY_DEFAULT)
@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "qwen3-32b"])
def test_adapters_by_the_defaults_of_a_tool_have_their_parameters(tool: str, name: str, tmp_path: Path) -> None:
    """Guards rank and targets of each tool that a file leaves open, as r(i + o) of each matrix."""
    file, text, rank, targets = BY_DEFAULT[tool]
    (tmp_path / file).write_text(text, "utf-8")
    case = read_run(tmp_path / file, given={"n_gpus": "8", "seq": "2048", "gbs": "64"}, model=name).case(H100)
    one = case.model
    q, kv = one.heads * one.head_dim, one.kv_heads * one.head_dim
    both = {"q": one.hidden + q, "k": one.hidden + kv, "v": one.hidden + kv, "o": one.hidden + q}
    both |= dict.fromkeys(("gate", "up", "down"), one.hidden + one.ffn)
    found = adapter_parameters(one.tuned(case.workload.tuning))
    assert found == rank * one.layers * sum(both[target] for target in targets)


AS_KEYS = {
    "llamafactory": (
        "llamafactory adapters trainer",
        "per_device_train_batch_size: 4, gradient_accumulation_steps: 2, disable_gradient_checkpointing: true, "
        "without FSDP or ZeRO-3",
    ),
    "axolotl": (
        "axolotl adapters trainer",
        "micro_batch_size: 4, gradient_accumulation_steps: 2, dp_shard_size: 1, dp_replicate_size: 8, "
        "gradient_checkpointing: false",
    ),
    "verl": (
        "verl",
        "data.micro_batch_size_per_gpu: 4, engine.fsdp_size: 1, model.enable_gradient_checkpointing: false",
    ),
    "verl_megatron": ("verl_megatron", ""),
}


@pytest.mark.parametrize("tool", AS_KEYS)
def test_a_layout_is_said_in_keys_of_the_tools_file(tool: str) -> None:
    """Guards what to try next in the words of a file, and that nothing is said of what it has no keys for."""
    tables, said = AS_KEYS[tool]
    before = Layout(Grid(z=8), 1, "full")
    after = Layout(Grid(data=8), 4, "none")
    if tool != "verl_megatron":
        assert sorted(file_words(tables.split(), before, after, batch=64).split(", ")) == sorted(said.split(", "))
    stages = Grid(pipeline=2, data=4, order=("x", "y", "z", "data", "pipeline"))
    staged = Layout(stages, 1, "full", chunks=2)
    assert file_words(("verl_megatron",), Layout(Grid(data=8), 1, "full"), staged, batch=64) == (
        "engine.pipeline_model_parallel_size: 2, engine.virtual_pipeline_model_parallel_size: 2"
    )
    assert file_words(tables.split(), before, Layout(Grid(z=8), 1, "full", recompute_layers=3), batch=64) == ""
    if "megatron" not in tool:
        assert file_words(tables.split(), before, staged, batch=64) == ""


RUNS = {
    "LLaMA-Factory": (
        (
            "run.yaml",
            "model_name_or_path: meta-llama/Llama-3.2-1B\nstage: sft\nfinetuning_type: lora\n"
            "cutoff_len: 2048\nbf16: true",
        ),
        [
            f'{{"current_steps": {at}, "total_steps": 90, "loss": 1.2, "elapsed_time": "0:0{at // 10}:00"}}'
            for at in (10, 20, 30, 40)
        ],
        "disable_gradient_checkpointing: true",
    ),
    "ms-swift": (
        ("run.sh", "NPROC_PER_NODE=8 swift sft --model LLM-Research/Llama-3.2-1B --max_length 2048"),
        [f"{{'loss': 1.2, 'global_step/max_steps': '{at}/90', 'train_speed(s/it)': 6.0}}" for at in (10, 20, 30)],
        "gradient_checkpointing: false",
    ),
    "torchtune": (
        (
            "run.yaml",
            "{model: {_component_: torchtune.models.llama3_2.llama3_2_1b}, tokenizer: {max_seq_len: 2048}, "
            "batch_size: 1, gradient_accumulation_steps: 2, dtype: bf16, enable_activation_checkpointing: true}",
        ),
        [f"Step {at} | loss:1.2 lr:1e-05 tokens_per_second_per_gpu:{4096 / 6.0} " for at in range(1, 9)],
        "enable_activation_checkpointing: false",
    ),
    "NeMo-RL": (
        (
            "run.yaml",
            "{policy: {model_name: meta-llama/Llama-3.2-1B, max_total_sequence_length: 2048, dtensor_cfg: "
            "{enabled: true, activation_checkpointing: true}}, cluster: {gpus_per_node: 8, num_nodes: 1}}",
        ),
        ["  • policy_training: 6.00s (90.1%)"] * 8,
        "policy.dtensor_cfg.activation_checkpointing: false",
    ),
    "verl": (
        (
            "run.sh",
            "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer "
            "model.partial_pretrain=meta-llama/Llama-3.2-1B data.max_length=2048 data.train_batch_size=32",
        ),
        [f"step:{at} - train/loss:1.2 - train/lr(1e-3):0.01 - train/time(s):6.0" for at in range(1, 9)],
        "model.enable_gradient_checkpointing: false",
    ),
}


@pytest.mark.parametrize("tool", RUNS)
def test_a_log_is_set_beside_what_is_predicted_of_its_file(tool: str, tmp_path: Path) -> None:
    """Guards `diagnose LOG --from-command FILE` and `learn` of each tool: the step, and what to try in its keys."""
    (name, text), lines, keys = RUNS[tool]
    script, log = tmp_path / name, tmp_path / "out.log"
    script.write_text(text, "utf-8")
    log.write_text("\n".join(lines) + "\n", "utf-8")
    options: EvidenceOptions = {"from_command": script, "machine": "dgx-h100", "facts": {"n_gpus": 8}}
    (found,), _ = diagnose(log, **options)
    assert found.measured_s == pytest.approx(6.0)
    assert found.predicted_s < 3.0
    assert any(f"in {name}: " in one.words and keys in one.words for one in found.changes), found.changes
    learned, _ = learn([log], **options)
    assert learned.machine.learned is not None


@pytest.mark.parametrize(("more", "experts"), [("", "each"), (" --peft.share_expert_adapters true", "shared")])
def test_experts_of_ms_swifts_megatron_have_an_adapter_each(more: str, experts: str, tmp_path: Path) -> None:
    """Guards the row of `megatron sft` that says so, and that a file may say otherwise."""
    text = "NPROC_PER_NODE=8 megatron sft --model x --tuner_type lora --target_modules all-linear --lora_rank 8"
    (tmp_path / "a.sh").write_text(f"{text} --expert_model_parallel_size 8 --max_length 2048{more}", "utf-8")
    tuning = read_run(tmp_path / "a.sh", given={}, model="qwen3-30b-a3b").case(H100).workload.tuning
    assert tuning is not None
    assert tuning.experts == experts


TORCHTUNE = (
    "{model: {_component_: torchtune.models.llama3_2.llama3_2_1b}, tokenizer: {max_seq_len: 2048}, batch_size: 4, "
    "dtype: bf16, optimizer: {_component_: torch.optim.AdamW, fused: true}}"
)


@pytest.mark.parametrize(
    ("word", "step"),
    [
        ("model=torchtune.models.llama3_2.llama3_2_3b", {"optimizer": "adamw"}),
        ("optimizer=torch.optim.SGD", {"optimizer": "sgd"}),
        ("loss=torchtune.modules.loss.CEWithChunkedOutputLoss", {"loss": "softmax"}),
    ],
)
def test_short_words_of_a_command_of_torchtune_replace_components(
    word: str, step: dict[str, object], tmp_path: Path
) -> None:
    """Guards `optimizer=torch.optim.SGD` on its command line, which was read and not priced: as the full name is."""
    (tmp_path / "a.yaml").write_text(TORCHTUNE, "utf-8")
    section, _, component = word.partition("=")
    found = []
    for name in (section, f"{section}._component_"):
        command = f"tune run --nproc_per_node 4 full_finetune_distributed --config a.yaml {name}={component}"
        (tmp_path / "a.sh").write_text(command, "utf-8")
        found.append(read_run(tmp_path / "a.sh", given={}).case(H100))
    short, full = found
    assert short.framework.step == full.framework.step
    assert short.model == full.model
    assert {name: getattr(short.framework.step, name) for name in step} == step
    assert short.model.hidden == (3072 if "3b" in word else 2048)


def test_a_component_of_torchtune_that_is_not_priced_is_refused_on_its_command_line(tmp_path: Path) -> None:
    """Guards the short word of an optimizer that has no row."""
    (tmp_path / "a.yaml").write_text(TORCHTUNE, "utf-8")
    command = "tune run full_finetune_single_device --config a.yaml optimizer=torch.optim.Adagrad"
    (tmp_path / "a.sh").write_text(command, "utf-8")
    with pytest.raises(DocumentError, match=r"_component_: is not priced: known are torch\.optim\.AdamW and SGD"):
        read_run(tmp_path / "a.sh", given={})
