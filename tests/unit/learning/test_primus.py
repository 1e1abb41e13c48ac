"""Experiments of Primus: YAML that overrides arguments of Megatron-LM, alone or started by a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError, UsageError
from axonn_tune.learning.run import CommandRun
from axonn_tune.learning.stated import read_run
from axonn_tune.specs.catalog import load_machine
from axonn_tune.validation.published.cases import Case

EXPERIMENT = """
exp_name: ${PRIMUS_EXP_NAME:one}
modules:
  pre_trainer:
    framework: megatron
    config: pre_trainer.yaml
    model: ${PRIMUS_MODEL:qwen3_30B_A3B}.yaml
    overrides:
      stderr_sink_level: DEBUG
      micro_batch_size: 8
      global_batch_size: 512
      seq_length: ${PRIMUS_SEQ_LENGTH:4096}
      recompute_granularity: full
      recompute_method: block
      recompute_num_layers: 5
      tensor_model_parallel_size: ${PRIMUS_TP:1}
      expert_model_parallel_size: ${PRIMUS_EP:8}
      moe_router_dtype: null
      enable_primus_turbo: true
      use_turbo_deepep: true
      turbo_deepep_num_cu: 80
      use_precision_aware_optimizer: true
      main_grads_dtype: bf16
      exp_avg_dtype: bf16
      exp_avg_sq_dtype: bf16
"""
SCRIPT = "export EXP=experiment.yaml\nexport PRIMUS_EP=16\nNNODES=2 bash ./examples/run_pretrain.sh\n"


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    (tmp_path / "experiment.yaml").write_text(EXPERIMENT, "utf-8")
    (tmp_path / "run.sh").write_text(SCRIPT, "utf-8")
    return tmp_path


def case(run: CommandRun) -> Case:
    """What the cost model sees of it on MI355X."""
    return run.case(load_machine("mi355x").document)


def test_an_experiment_is_a_run_of_megatron(folder: Path) -> None:
    """Guards the values beside names of the environment, the model by its file, Primus's own dispatcher and defaults,
    and that nothing of Primus's own is called unknown."""
    run = read_run(folder / "experiment.yaml", given={"n_gpus": "8"})
    found = case(run)
    one, step = found.configurations[0], found.framework.step
    assert (found.model.name, found.workload.sequence_length, found.workload.precision) == (
        "qwen3-30b-a3b",
        4096,
        "bf16",
    )
    assert (one.grid.expert, one.micro_batch, one.recompute, one.recompute_layers) == (8, 8, "full", 5)
    assert found.framework.dispatcher_over(8, 8) == "deepep"
    assert (step.distributed_optimizer, step.exp_avg_bytes) == (True, 2)
    assert run.unknown == ()


@pytest.mark.parametrize(
    ("keys", "order"),
    [
        ("patch_primus_pipeline: true, pp_algorithm: v-half", "v-half"),
        ("patch_primus_pipeline: true, pp_algorithm: zbv-formatted, debug_scheduler_table: true", "zbv"),
        ("patch_primus_pipeline: true", "1f1b"),
        ("patch_primus_pipeline: false, pp_algorithm: v-half", ""),
        (
            "patch_zero_bubble: true, zero_bubble_v_schedule: true, zero_bubble_v_schedule_mem_setup: min",
            "v-min",
        ),
        ("patch_zero_bubble: true, zero_bubble_v_schedule: true", "v-half"),
        ("patch_zero_bubble: true, enable_zero_bubble: false", ""),
    ],
)
def test_schedules_of_stages_are_those_of_primus(folder: Path, keys: str, order: str) -> None:
    """Guards its own pipeline and Sea AI's, of which either must be on; without, it is Megatron-LM's."""
    lines = "pipeline_model_parallel_size: 4", "num_virtual_stages_per_pipeline_rank: 2", *keys.split(", ")
    text = "".join(one for one in EXPERIMENT.splitlines(keepends=True) if "recompute" not in one)
    text = text.replace("PRIMUS_EP:8", "PRIMUS_EP:2") + "".join(f"      {one}\n" for one in lines)
    (folder / "experiment.yaml").write_text(text, "utf-8")
    run = read_run(folder / "experiment.yaml", given={"n_gpus": "8"})
    found = case(run)
    assert (found.framework.name, found.configurations[0].chunks) == ("primus" if order else "megatron-core", 2)
    assert found.framework.step.pipeline_order == (order or "1f1b")
    assert run.unknown == ()


def test_a_script_starts_an_experiment(folder: Path) -> None:
    """Guards `EXP`, nodes of eight GPUs, and the environment over the experiment's own values."""
    run = read_run(folder / "run.sh", given={})
    assert case(run).row.gpus == 16
    assert case(run).configurations[0].grid.expert == 16


@pytest.mark.parametrize(
    ("recipe", "precision"), [("fp4: e2m1", "nvfp4"), ("fp4: e2m1\n      fp4_recipe: mxfp4", "mxfp4")]
)
def test_recipes_of_four_bits(folder: Path, recipe: str, precision: str) -> None:
    """Guards MXFP4, which AMD's Megatron-LM names by its recipe."""
    text = EXPERIMENT.replace("moe_router_dtype: null", recipe)
    (folder / "experiment.yaml").write_text(text, "utf-8")
    assert read_run(folder / "experiment.yaml", given={"n_gpus": "8"}).columns["precision"].value == precision


def of_module(folder: Path, module: str, text: str) -> CommandRun:
    """The run of an experiment of one module, on 8 GPUs."""
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    (folder / "experiment.yaml").write_text(f"modules:\n  {module}:\n{lines}", "utf-8")
    return read_run(folder / "experiment.yaml", given={"n_gpus": 8})


TITAN = """
framework: torchtitan
model: {model}
overrides:
  training: {{local_batch_size: 2, seq_len: 8192, mock_data: false}}
  activation_checkpoint: {{mode: {mode}}}
  quantize: {{linear: {{float8: {{filter_fqns: [output]}}}}}}
  primus_turbo: {{enable_primus_turbo: true, use_turbo_float8_linear: true, enable_attention_float8: {narrow}}}
"""


@pytest.mark.parametrize(
    ("model", "mode", "narrow", "precision", "recompute", "words"),
    [
        ("llama3.1_8B-fp8.yaml", '"none"', "false", "fp8-rowwise", "none", ""),
        ("llama3.1_8B.yaml", "selective", "true", "bf16", "selective", "Primus-Turbo are priced in BF16"),
        ("llama3.1_8B.yaml", "null", "false", "bf16", "none", "model.converters does not name it"),
    ],
)
def test_experiments_by_torchtitan_have_what_the_files_of_their_models_have(
    tmp_path: Path, *, model: str, mode: str, narrow: str, precision: str, recompute: str, words: str
) -> None:
    """Guards the converter of models in FP8, compiled blocks, recompute where none is a word, and Primus's own keys."""
    run = of_module(tmp_path, "pre_trainer", TITAN.format(model=model, mode=mode, narrow=narrow))
    assert (run.software, run.columns["precision"].value, run.columns["recompute"].value) == (
        "torchtitan",
        precision,
        recompute,
    )
    assert words in "\n".join(run.ignored)
    assert run.unknown == ()


def test_models_of_another_size_are_not_those_that_ship(tmp_path: Path) -> None:
    """Guards a name that begins as DeepSeek-V3's and has other sizes."""
    text = TITAN.format(model="deepseek_v3_16b.yaml", mode="none", narrow="false")
    with pytest.raises(UsageError, match="does not state layers"):
        of_module(tmp_path, "pre_trainer", text)


TUNED = """
framework: megatron_bridge
model: qwen3_8b.yaml
overrides: {{tensor_model_parallel_size: 2, train_iters: 10, global_batch_size: 16, micro_batch_size: 1,
  seq_length: 2048, peft: {peft}, finetune_lr: 1.0e-4, precision_config: bf16_mixed, packed_sequence: false,
  recompute_granularity: full, recompute_method: block, recompute_num_layers: 0}}
"""


def test_experiments_that_fine_tune_are_read_by_the_names_of_megatron(tmp_path: Path) -> None:
    """Guards their module, precision, optimizer and recompute of no layers; adapters are refused by name."""
    run = of_module(tmp_path, "post_trainer", TUNED.format(peft='"none"'))
    told = [run.columns[name].value for name in ("tp", "precision", "zero_stage", "recompute")]
    assert told == [2, "bf16", "1", "none"]
    assert (run.given and run.given.name, run.unknown) == ("qwen3-8b", ())
    with pytest.raises(DocumentError, match="peft_scheme lora: adapters are stated by --tune"):
        of_module(tmp_path, "post_trainer", TUNED.format(peft="lora"))
