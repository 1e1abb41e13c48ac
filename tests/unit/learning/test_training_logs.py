"""Training logs: rebuilt from what frameworks print, with figures of public runs; damaged ones; real ones of the CPU.

Each builder writes lines from the format string in a framework's source, which its docstring cites; the figures of
`CASES` are those of a public page or paper. Around the public step time, the lines have a slow first step, one that is
slow midway, and a spread of 0.4%.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from axonn_tune.errors import AxonnTuneError, DocumentError, UsageError
from axonn_tune.learning.training_logs import (
    LoggedRun,
    decoded,
    looks_like_training_log,
    read_training_log,
)
from axonn_tune.validation.published.rows import cell_text

LOGS = Path(__file__).parents[2] / "fixtures" / "logs"
STEPS = 14
SLOW = 9
"""The step that is an outlier."""


def times(step_s: float) -> list[tuple[int, float]]:
    """Fourteen steps whose median after warm-up is `step_s`."""
    spread = [step_s * (1.0 + 0.002 * (number * 3 % 5 - 2)) for number in range(STEPS)]
    spread[0], spread[1], spread[SLOW - 1] = 6.0 * step_s, 1.4 * step_s, 2.5 * step_s
    return list(enumerate(spread, 1))


def dotted(width: int = 48, **arguments: object) -> list[str]:
    """An argument dump: `_print_args` of megatron/training/arguments.py, NVIDIA/Megatron-LM@001b00c2."""
    ends = ["------------------------ arguments ------------------------", "-------------------- end of arguments ---"]
    lines = [f"  {name} {'.' * (width - len(name))} {value}" for name, value in arguments.items()]
    return [ends[0], *lines, ends[1]]


def megatron(step_s: float, batch: int, *, unit: str = "ms", tflops: float = 0.0, **arguments: object) -> list[str]:
    """`training_log` of megatron/training/training.py, NVIDIA/Megatron-LM@001b00c2, and of Megatron-DeepSpeed.

    The latter is megatron/training.py of bigscience-workshop/Megatron-DeepSpeed@d1713bed, which prints seconds.
    """
    lines = dotted(**arguments)
    for number, time in times(step_s):
        shown = f"{time * 1e3:.1f}" if unit == "ms" else f"{time:.2f}"
        line = f" iteration {number:8d}/{500:8d} | consumed samples: {number * batch:12d} |"
        line += f" elapsed time per iteration ({unit}): {shown} |"
        line += f" throughput per GPU (TFLOP/s/GPU): {tflops * step_s / time:.1f} |" if tflops else ""
        line += f" learning rate: {1e-5 * number:.3E} | global batch size: {batch:5d} | lm loss: {9.0 / number:.6E} |"
        lines.append(line + " number of skipped iterations:   0 | number of nan iterations:   0 |")
    return lines


def bridge(step_s: float, batch: int, **arguments: object) -> list[str]:
    """`training_log` of megatron/bridge/training/utils/train_utils.py, megatron-bridge 0.3.1, and a YAML dump."""
    lines = ["------- Task Configuration -------", "model:"]
    lines += [f"  {name}: {value}" for name, value in arguments.items()]
    for (_, time), line in zip(times(step_s), megatron(step_s, batch)[2:], strict=True):
        lines += [f"Step Time : {time:.2f}s GPU utilization: 512.3MODEL_TFLOP/s/GPU", f" [2025-07-01 10:00:00]{line}"]
    return lines


def nemo_2(step_s: float, batch: int) -> list[str]:
    """`ProgressPrinter.format_string` of nemo/lightning/pytorch/callbacks/progress_printer.py, NVIDIA/NeMo@01f7dbc5."""
    return [
        f"Training epoch 0, iteration {number}/{100} | lr: {3e-6 * number:.4} | global_batch_size: {batch}"
        f" | global_step: {number} | reduced_train_loss: {11.0 / number:.4} | train_step_timing in s: {time:.4}"
        for number, time in times(step_s)
    ]


def nemo_1(step_s: float, batch: int, **arguments: object) -> list[str]:
    """A tqdm bar with `train_step_timing in s` of nemo/utils/exp_manager.py (nemo_toolkit 3.0.0) and Hydra's YAML."""
    lines = ["[NeMo I 2023-08-01 10:00:00 training:30] ************** Experiment configuration ***********"]
    lines += ["model:", *(f"  {name}: {value}" for name, value in arguments.items())]
    bars = [
        f"Epoch 0: :  {number}%|▏         | {number}/100 [00:{number:02d}<01:10,  {time:.2f}s/it, v_num=0,"
        f" reduced_train_loss=10.90, global_step={number - 1:.1f}, consumed_samples={number * batch:.1f},"
        f" train_step_timing in s={time:.3g}]"
        for number, time in times(step_s)
    ]
    return [*lines, "\r".join(bars)]


def torchtitan(rate: float, sizes: dict[str, int], *, word: str = "tps", **said: str) -> list[str]:
    """`MetricsProcessor.log` of torchtitan/components/metrics.py, pytorch/torchtitan@00fbaafa, and what comes before.

    Mesh: `ParallelDims.build_mesh`, distributed/parallel_dims.py of torchtitan 0.3.0; colours as tools/utils.Color.
    """
    axes = ", ".join(f"{axis}={sizes.get(axis, 1)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"))
    head = "[rank0]:[titan] 2024-12-26 10:00:00,000 - root - INFO - "
    lines = [f"{head}{words}" for words in said.values()]
    lines += [f"{head}CUDA capacity: NVIDIA H100 with 95.00GiB memory"]
    lines += [f"{head}Building device mesh with parallelism: {axes}"]
    lines += [
        f"{head}Trainer is initialized with local batch size {sizes['local']}, global batch size {sizes['gbs']}, "
        f"gradient accumulation steps 1, sequence length {sizes['seq']}, total steps 1000 (warmup 200)"
    ]
    for number, factor in times(1.0):
        step = 1 if number == 1 else (number - 1) * 10
        lines.append(
            f"{head}\x1b[31mstep: {step:2}  \x1b[32mloss: {12.0 / number:7.4f}  \x1b[38;2;180;60;0mgrad_norm:  1.2345"
            f"  \x1b[36mmemory: 82.40GiB(86.70%)  \x1b[34m{word}: {round(rate / factor):,}  \x1b[36mtflops: 300.12"
            f"  \x1b[35mmfu: 33.00%\x1b[39m"
        )
    return lines


def deepspeed_config(batch: int, stage: int, micro: int) -> list[str]:
    """`print_user_config` of deepspeed/runtime/config.py, deepspeed 0.19.8."""
    config = {"bf16": {"enabled": True}, "train_batch_size": batch, "train_micro_batch_size_per_gpu": micro}
    text = json.dumps({**config, "zero_optimization": {"stage": stage}}, sort_keys=True, indent=4)
    return f"[2024-05-01 10:00:00,000] [INFO] [config.py:989:print_user_config]   json = {text}".split("\n")


def pipe(step_s: float, batch: int, stage: int = 0) -> list[str]:
    """`PipelineEngine.train_batch` of deepspeed/runtime/pipe/engine.py, deepspeed 0.19.8."""
    return [
        *deepspeed_config(batch, stage, 8),
        *(
            f"steps: {number * 10} loss: {9.0 / number:0.4f} "
            f"iter time (s): {time:0.3f} samples/sec: {batch / time:0.3f}"
            for number, time in times(step_s)
        ),
    ]


def samples(step_s: float, batch: int, stage: int = 3) -> list[str]:
    """`ThroughputTimer.stop` of deepspeed/utils/timer.py, deepspeed 0.19.8."""
    head = "[2024-05-01 10:00:00,000] [INFO] [timer.py:264:stop] "
    return [
        *deepspeed_config(batch, stage, 1),
        *(
            f"{head}epoch=0/micro_step={number * 40}/global_step={number * 10}, "
            f"RunningAvgSamplesPerSec={batch / step_s}, CurrSamplesPerSec={batch / time}, "
            f"MemAllocated=12.3GB, MaxMemAllocated=45.6GB"
            for number, time in times(step_s)
        ),
    ]


def event(time_s: float, key: str, value: object, kind: str = "POINT_IN_TIME", **about: object) -> str:
    """`_encode_log` of mlperf_logging/mllog/mllog.py, mlperf-logging 4.1.68."""
    metadata = {"file": "/workspace/llm/custom_callbacks.py", "lineno": 277, **about}
    words = {"namespace": "", "time_ms": int(time_s * 1e3), "event_type": kind, "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**words, "metadata": metadata})


def mlperf_blocks(step_s: float, batch: int, each: int = 48) -> list[str]:
    """Blocks of `each` steps with the samples seen so far, as MLPerf's rules ask for (block_start, block_stop)."""
    lines, now, seen = [event(0.0, "cache_clear", True), event(1.0, "global_batch_size", batch)], 10.0, 0
    for _, time in times(step_s):
        lines.append(event(now, "block_start", None, "INTERVAL_START", samples_count=seen))
        now, seen = now + time * each, seen + each * batch
        lines.append(event(now, "tracked_stats", {"throughput": batch / time}, step=seen))
        lines.append(event(now, "block_stop", None, "INTERVAL_END", samples_count=seen))
        now += 20.0  # evaluation
    return lines


def mlperf_steps(step_s: float, batch: int) -> list[str]:
    """`train_step_time` of tracked_stats, as MLPerf 5.x submissions of NVIDIA and Google log it."""
    lines = [event(0.0, "cache_clear", True), event(1.0, "global_batch_size", batch)]
    for number, time in times(step_s):
        lines.append(event(10.0 * number, "tracked_stats", {"train_step_time": time}, samples_count=number * batch))
    return lines


def trainer(runtime_s: float, steps: int, *, bars: bool = True) -> list[str]:
    """`Trainer.log` and `speed_metrics` of transformers 4 (trainer.py, trainer_utils.py), and tqdm's bar at the end."""
    rates = f"'train_samples_per_second': {512 / runtime_s:.3f}, 'train_steps_per_second': {steps / runtime_s:.3f}"
    bar = (
        [f"100%|██████████| {steps}/{steps} [00:{int(runtime_s)}<00:00,  {steps / runtime_s:.2f}it/s]"] if bars else []
    )
    loss = "{'loss': 2.345, 'learning_rate': 1e-05, 'epoch': 0.5}"
    return [loss, *bar, f"{{'train_runtime': {runtime_s}, {rates}, 'train_loss': 2.3, 'epoch': 1.0}}"]


def epoch_bars(step_s: float, total: int = 100) -> list[str]:
    """Lightning's tqdm bar (callbacks/progress/tqdm_progress.py, lightning 2.6.6), whose rate is the epoch's mean."""
    bars, elapsed = [], 5.0 * step_s
    for number in range(1, total + 1):
        elapsed += step_s
        mean = elapsed / number
        rate = f"{mean:5.2f}s/it" if mean > 1 else f"{1 / mean:5.2f}it/s"
        bars.append(
            f"Epoch 0: {number:3d}%|██        | {number}/{total} [00:10<01:00, {rate}, v_num=0, train_loss=0.3]"
        )
    return ["\r".join(bars)]


@dataclass
class Case:
    """A log, the public step time it was made from, and columns that it must yield."""

    name: str
    lines: list[str]
    step_s: float
    software: str
    columns: dict[str, str] = field(default_factory=dict)
    tolerance: float = 0.005
    given: dict[str, str] = field(default_factory=dict)


def bloom(step_s: float, pipeline: int, micro: int) -> Case:
    """Runs of BigScience's chronicles (prequel) on Jean Zay's A100.

    https://github.com/bigscience-workshop/bigscience/blob/9e64edec2ad1/train/tr11-176B-ml/chronicles-prequel.md
    """
    data = 384 // (8 * pipeline)
    layout = {"tensor_model_parallel_size": 8, "pipeline_model_parallel_size": pipeline, "data_parallel_size": data}
    shape = {"num_layers": 84, "hidden_size": 13312, "ffn_hidden_size": 53248, "num_attention_heads": 64}
    more = {"world_size": 384, "micro_batch_size": micro, "seq_length": 2048, "zero_stage": 1, "bf16": "True"}
    lines = megatron(step_s, 2048, unit="s", checkpoint_activations="True", **layout, **shape, **more)
    lines.insert(0, " > padded vocab (size: 250680) with 200 dummy tokens (new size: 250880)")
    columns = {"tp": "8", "pp": str(pipeline), "dp": str(data), "mbs": str(micro), "layers": "84", "heads": "64"}
    columns |= {"n_gpus": "384", "gbs": "2048", "recompute": "full", "zero_stage": "1", "vocab": "250680"}
    return Case(
        f"bloom-{pipeline}-{micro}", [f"[default7]:{line}" for line in lines], step_s, "Megatron-DeepSpeed", columns
    )


def megatron_2021(gpus: int, tensor: int, pipeline: int, batch: int, step_s: float) -> Case:
    """Table 1 of Narayanan et al. 2021, https://arxiv.org/abs/2104.04473."""
    data = gpus // (tensor * pipeline)
    words = f"using world size: {gpus}, data-parallel-size: {data}, tensor-model-parallel size: {tensor}, "
    lines = [
        f"{words}pipeline-model-parallel size: {pipeline} ",
        *megatron(step_s, batch, fp16="True", use_flash_attn="False"),
    ]
    columns = {"tp": str(tensor), "pp": str(pipeline), "dp": str(data), "n_gpus": str(gpus), "precision": "fp16"}
    columns |= {"gbs": str(batch), "attn": "no flash attention"}
    return Case(f"megatron-2021-{gpus}", lines, step_s, "Megatron-LM", columns)


def megatron_core(gpus: int, tensor: int, pipeline: int, batch: int, step_s: float) -> Case:
    """Table of July 2024, https://github.com/NVIDIA/Megatron-LM/blob/main/images/model_table.png."""
    layout = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": pipeline,
        "context_parallel_size": 1,
    }
    more = {"world_size": gpus, "sequence_parallel": tensor > 1, "use_distributed_optimizer": "True", "bf16": "True"}
    overlap = {"overlap_grad_reduce": "True", "overlap_param_gather": "True", "tp_comm_overlap": "True"}
    others = {"transformer_impl": "transformer_engine", "recompute_granularity": "None", "swiglu": "False"}
    chunks = {"virtual_pipeline_model_parallel_size": "None", "group_query_attention": "False", "num_query_groups": 1}
    arguments = {**layout, **more, **overlap, **others, **chunks, "num_attention_heads": 80}
    columns = {"tp": str(tensor), "pp": str(pipeline), "vpp": "1", "zero_stage": "1", "kv_heads": "80", "cp": "1"}
    columns |= {
        "recompute": "none",
        "gated_mlp": "0",
        "seq_parallel": str(int(tensor > 1)),
        "attn": "FlashAttention/TE",
    }
    columns |= {"overlap": "overlap-grad-reduce + overlap-param-gather + tp-comm-overlap", "precision": "bf16"}
    lines = megatron(step_s, batch, tflops=400.0, **arguments)
    return Case(f"megatron-core-{gpus}", lines, step_s, "Megatron-Core", columns)


NEMO_TABLE = "https://docs.nvidia.com/nemo-framework/user-guide/24.12/nemotoolkit/performance/performance_summary.html"
"""Tokens per second and GPU at FP8 on H100; a step is gbs x sequence / (rate x GPUs)."""

CASES = [
    # Step times are printed by the chronicles themselves.
    bloom(125.52, 12, 4),
    # 96 B s l h^2 (1 + s/6h + V/16lh) / (n X), equation 3 of the paper, with V = 51,200, s = 2,048 and X of table 1:
    # 96 x 512 x 2048 x 36 x 4096^2 x (1 + 2048/24576 + 51200/2359296) / (128 x 135e12) = 3.889 s.
    megatron_2021(128, 4, 1, 512, 3.889),
    # Step times are printed by the table.
    megatron_core(1536, 8, 4, 768, 3.648),
    # NEMO_TABLE, GPT3-175B on 512: 2048 x 2048 / (825 x 512) = 9.930 s.
    Case("bridge-175b", bridge(9.930, 2048, tensor_model_parallel_size=4), 9.930, "Megatron-Bridge", {"tp": "4"}),
    # Step times of https://github.com/NVIDIA/dgxc-benchmarking/tree/v24.11.1 (GPT3-175B, Llama 3.1 8B).
    Case("nemo-175b-512", nemo_2(9.09, 1024), 9.09, "NeMo", {"gbs": "1024"}),
    # Step times of the README (23.08), section 7.1.2, https://github.com/NVIDIA/NeMo-Framework-Launcher: GPT3-5B.
    Case("nemo-1-16", nemo_1(52.55, 2048, precision="bf16"), 52.55, "NeMo", {"precision": "bf16"}),
    Case("nemo-1-32", nemo_1(25.93, 2048, micro_batch_size=4), 25.93, "NeMo", {"mbs": "4"}),
    Case("nemo-1-64", nemo_1(13.41, 2048, global_batch_size=2048), 13.41, "NeMo", {"gbs": "2048"}),
    # https://github.com/pytorch/torchtitan/blob/31a17bfd/benchmarks/llama3_h100_202412_torchtitan.md, table 1:
    # 16 x 8192 / (5762 x 8) = 2.8435 s.
    Case(
        "titan-8b-eager",
        torchtitan(5762, {"dp_shard": 8, "local": 2, "gbs": 16, "seq": 8192}),
        2.8435,
        "torchtitan (eager)",
        {"dp": "8", "tp": "1", "n_gpus": "8", "mbs": "2", "seq": "8192", "gpu": "NVIDIA H100", "zero_stage": "3"},
    ),
    # Table 4: 512 x 8192 / (829 x 256) = 19.764 s.
    Case(
        "titan-70b",
        torchtitan(
            829,
            {"dp_shard": 32, "tp": 8, "local": 16, "gbs": 512, "seq": 8192},
            ac="Applied full activation checkpointing to the model",
            float8="Float8 tensorwise scaled training active",
            compiling="Compiling each TransformerBlock with torch.compile",
        ),
        19.764,
        "torchtitan (compile)",
        {"dp": "32", "tp": "8", "n_gpus": "256", "recompute": "full"},
    ),
    # Table 5: 256 x 8192 / (100 x 512) = 40.96 s. Rates are printed as whole numbers, so 1% is what they can say.
    Case(
        "titan-405b",
        torchtitan(100, {"pp": 8, "dp_shard": 8, "tp": 8, "local": 32, "gbs": 256, "seq": 8192}),
        40.96,
        "torchtitan (eager)",
        {"pp": "8", "n_gpus": "512"},
        tolerance=0.01,
    ),
    # Measured by vTrain's authors, https://github.com/VIA-Research/vTrain/blob/f8dda8473a48/data/ground_truth_multi.csv.
    Case("pipe-1", pipe(3.5665, 512), 3.5665, "DeepSpeed ZeRO-0", {"gbs": "512", "mbs": "8", "precision": "bf16"}),
    # ZeRO-3 of table 2 of https://arxiv.org/abs/2104.04473.
    Case("zero3-175b", samples(66.746, 1536), 66.746, "DeepSpeed ZeRO-3", {"gbs": "1536", "zero_stage": "3"}),
    # GPT-3 of https://github.com/mlcommons/training_results_v3.1 (NVIDIA, eos-dfw_n1344): 5,154,997 tokens/s of
    # batches of 2688 x 2048: 1.0679 s.
    Case("mlperf-gpt3", mlperf_blocks(1.0679, 2688), 1.0679, "MLPerf submission", {"gbs": "2688"}),
    # NEMO_TABLE, LLAMA3-8B on 8: 128 x 8192 / (12273 x 8) = 10.680 s.
    Case("mlperf-8b", mlperf_steps(10.680, 128), 10.680, "MLPerf submission", {"gbs": "128"}),
    # https://huggingface.co/docs/transformers/v4.20.1/en/perf_train_gpu_one: 512 samples in batches of 4, 128 steps:
    # 57.82 s / 128 = 0.45172 s; fp16 27.46 s / 128 = 0.21453 s.
    Case("trainer", trainer(57.82, 128), 0.45172, "Hugging Face Trainer"),
    Case("trainer-fp16", trainer(27.46, 128, bars=False), 0.21453, "Hugging Face Trainer"),
    # The same step times as Lightning would print them, with three or four digits of the mean.
    Case("lightning", epoch_bars(0.45172), 0.45172, "PyTorch Lightning", tolerance=0.01),
    Case("lightning-slow", epoch_bars(3.5665), 3.5665, "PyTorch Lightning", tolerance=0.01),
]
BLOOM, OLD, CORE = CASES[:3]
NEMO, TITAN = (next(case for case in CASES if case.name == name) for name in ("nemo-175b-512", "titan-8b-eager"))


def written(folder: Path, lines: list[str], encoding: str = "utf-8", ends: str = "\n") -> Path:
    """Write lines as a log."""
    path = folder / "train.log"
    path.write_bytes((ends.join(lines) + ends).encode(encoding))
    return path


def only(folder: Path, lines: list[str]) -> LoggedRun:
    """The one run of a log."""
    (run,) = read_training_log(written(folder, lines))
    return run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_step_time_and_the_layout_of_a_public_run_are_read(case: Case, tmp_path: Path) -> None:
    """The median after warm-up is the public figure, and every column states what the log prints."""
    run = only(tmp_path, case.lines)
    assert run.step_s == pytest.approx(case.step_s, rel=case.tolerance)
    assert run.software == case.software
    assert {name: cell_text(run.columns[name].value) for name in case.columns} == case.columns
    assert looks_like_training_log("\n".join(case.lines))
    if len(run.times_s) > 1:
        ((_, words),) = run.left_out
        assert "2.50 times" in words or "2.4" in words or "2.51" in words
        assert len(run.times_s) == 11, "two of fourteen are warm-up"
        assert run.spread < 0.01


FULL = {"gpu": "H100-SXM", "layers": "92", "hidden": "10240", "heads": "80", "ffn": "40960", "vocab": "131072"}


def test_a_contradiction_names_file_line_and_both_values(tmp_path: Path) -> None:
    """What is given may repeat what the log states, and not differ from it."""
    run = only(tmp_path, CORE.lines)
    with pytest.raises(UsageError, match=r"train\.log:2: the log states tp 8, but 4 is given"):
        run.record(FULL | {"tp": "4", "seq": "4096"})
    assert run.record(FULL | {"tp": "8.0", "seq": "4096"})["tp"] == 8


def test_missing_columns_are_named(tmp_path: Path) -> None:
    """Nothing is guessed: what neither log nor options state is asked for."""
    with pytest.raises(UsageError, match="does not state gpu, layers, hidden"):
        only(tmp_path, CORE.lines).record({})


def test_a_layout_that_does_not_fill_its_gpus_is_refused(tmp_path: Path) -> None:
    """Degrees that do not multiply to the GPUs are a damaged dump."""
    lines = [line.replace(".. 1536", ".. 1540") for line in CORE.lines]
    with pytest.raises(UsageError, match="tp 8 x pp 4 x cp 1 = 32 ranks, but n_gpus is 1540"):
        only(tmp_path, lines).record(FULL | {"seq": "4096"})


def test_expert_parallelism_of_a_log_is_said(tmp_path: Path) -> None:
    """Guards a log that shows experts without stating how many; one rank of them shows none."""
    for ranks in (1, 8):
        (*assumed,) = only(tmp_path, [*dotted(expert_model_parallel_size=ranks), *CORE.lines[1:]]).assumed
        said = "the log has expert_model_parallel_size 8 (line 2)"
        assert sum(said in words for words in assumed) == (ranks == 8)


@pytest.mark.parametrize("mark", [" consumed tokens: 4096 |", " TFLOPs: 61.20 |"])
def test_megatron_deepspeed_is_known_by_its_lines(mark: str, tmp_path: Path) -> None:
    """Guards the name: Megatron-LM prints neither tokens nor `TFLOPs:`, whose FLOPs count."""
    run = only(tmp_path, [line + mark if "elapsed" in line else line for line in megatron(2.0, 64, world_size=8)])
    assert run.software == "Megatron-DeepSpeed"
    assert run.flops == pytest.approx(61.2e12 * 2.0 if "TFLOPs" in mark else 0.0, rel=0.01)


def test_rates_need_what_a_step_processes(tmp_path: Path) -> None:
    """Tokens per second and GPU say nothing without batch, sequence and GPUs: refused until they are given."""
    run = only(tmp_path, [line for line in TITAN.lines if "step:" in line])
    with pytest.raises(UsageError, match=r"does not state gbs, seq, n_gpus: it prints tokens"):
        _ = run.step_s
    given = run.with_given({"gbs": "16", "seq": "8192", "n_gpus": "8"})
    assert given.step_s == pytest.approx(2.8435, rel=0.005)


@pytest.mark.parametrize(("name", "step_s"), [("trainer.log", 0.0342), ("lightning.log", 0.00657)])
def test_real_logs_of_the_cpu(name: str, step_s: float) -> None:
    """Logs of tests/fixtures/logs/make_logs.py; the time is near the run's own mean, which includes its start."""
    (run,) = read_training_log(LOGS / name)
    assert run.step_s == pytest.approx(step_s, rel=0.01)


def test_the_files_that_trainer_and_lightning_write() -> None:
    """trainer_state.json: 1.4955 s for 40 steps; metrics.csv: a clock every 5 steps, as the bar shows it."""
    assert only_of("trainer_state.json").step_s == pytest.approx(1.4955 / 40)
    assert only_of("metrics.csv").step_s == pytest.approx(only_of("lightning.log").step_s, rel=0.02)
    assert all(looks_like_training_log((LOGS / name).read_text()) for name in ("trainer_state.json", "metrics.csv"))


def only_of(name: str) -> LoggedRun:
    """The one run of a shipped log."""
    (run,) = read_training_log(LOGS / name)
    return run


def test_a_run_is_cut_where_the_batch_changes(tmp_path: Path) -> None:
    """A batch ramp-up gives one run for each batch, with the layout of both."""
    small, large = megatron(2.0, 64, tensor_model_parallel_size=2), megatron(4.0, 128)[2:]
    later = [re.sub(r"iteration +(\d+)", lambda found: f"iteration {int(found[1]) + 14:8d}", line) for line in large]
    first, second = read_training_log(written(tmp_path, [*small, *later]))
    assert (first.step_s, second.step_s) == pytest.approx((2.0, 4.0), rel=0.005)
    assert [run.columns["gbs"].value for run in (first, second)] == [64, 128]
    assert second.columns["tp"] == first.columns["tp"]


def test_runs_after_each_other_do_not_share_arguments(tmp_path: Path) -> None:
    """A second run in a file has what its own lines say."""
    first, second = read_training_log(written(tmp_path, [*BLOOM.lines, *TITAN.lines]))
    assert (first.software, second.software) == ("Megatron-DeepSpeed", "torchtitan (eager)")
    assert "layers" not in second.columns
    assert second.step_s == pytest.approx(TITAN.step_s, rel=0.005)


@pytest.mark.parametrize("value", ["nan", "inf", "0.0", "-3.0"])
def test_times_that_are_none_are_named(value: str, tmp_path: Path) -> None:
    """NaN, infinite, 0 and negative times do not count and are not passed over in silence."""
    lines = [re.sub(r"\(ms\): [\d.]+", f"(ms): {value}", line) if "  5/" in line else line for line in OLD.lines]
    run = only(tmp_path, lines)
    assert value in run.left_out[-1][1]
    assert len(run.left_out) == 2, "beside the outlier"
    assert run.step_s == pytest.approx(3.889, rel=0.005)


def test_units_are_read_or_refused(tmp_path: Path) -> None:
    """Milliseconds called seconds are seconds; a unit that is none, or none at all, is refused with its line."""
    seconds = [line.replace("(ms)", "(s)") for line in OLD.lines]
    assert only(tmp_path, seconds).step_s == pytest.approx(3889.0, rel=0.005)
    for unit in ("(hours)", ""):
        with pytest.raises(DocumentError, match=r"train\.log:6: .*unit"):
            read_training_log(written(tmp_path, [line.replace("(ms)", unit) for line in OLD.lines]))


def test_a_truncated_last_line_is_named(tmp_path: Path) -> None:
    """A number that ends a file without its newline may lack digits."""
    path = written(tmp_path, NEMO.lines)
    path.write_bytes(path.read_bytes()[:-3])
    (run,) = read_training_log(path)
    assert run.left_out[-1] == (14, "the last line is truncated")
    assert run.step_s == pytest.approx(9.09, rel=0.005)


@pytest.mark.parametrize("text", ["", "\0\1\2" * 100, "name,value\n1,2\n", "loss 3.2\nloss 3.1\n", '{"log_history": ['])
def test_what_is_no_log_is_refused(text: str, tmp_path: Path) -> None:
    """Empty, binary and other files end in a DocumentError."""
    path = tmp_path / "train.log"
    path.write_text(text)
    with pytest.raises(DocumentError):
        read_training_log(path)


def test_text_of_each_encoding() -> None:
    """Byte-order marks, UTF-16 without one, and bytes that are no UTF-8."""
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "latin-1"):
        assert decoded(f"step time {'é' * 3}\n".encode(encoding)) == "step time ééé\n"


# Damaged logs.


def noisy(lines: list[str], draw: random.Random) -> list[str]:
    """Other output between lines, and words that are missing."""
    noise = ["NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P", "WARNING: something took 3.2 s", "", "step 3 done: 12"]
    words = [line.split(" ") for line in lines]
    for one in (one for one in words if draw.random() < 0.1):
        del one[draw.randrange(len(one))]
    return [" ".join(part) for one in words for part in ([draw.choice(noise)], one)]


TIME = r"((?:\(m?s\)|in s|tps|CurrSamplesPerSec|train_runtime'|train_step_time\")[:=]\s*)[\d.,]+(?=[^\d])"
MUTATIONS: dict[str, Callable[[list[str], random.Random], list[str]]] = {
    "noisy": noisy,
    "truncated": lambda lines, draw: [line[: draw.choice((4096, 4096, 30))] for line in lines],
    "dropped": lambda lines, draw: [line for line in lines if draw.random() > 0.15],
    "shuffled": lambda lines, draw: draw.sample(lines, len(lines)),
    "not a number": lambda lines, draw: [
        re.sub(TIME, r"\1NaN ", line) if draw.random() < 0.2 else line for line in lines
    ],
    "other unit": lambda lines, draw: [re.sub(r"\((?:ms|s)\)|(?<=timing )in s", "(ticks)", line) for line in lines],
    "labelled": lambda lines, draw: [draw.choice(("0: ", "[1,0]<stdout>:", "[default0]:")) + line for line in lines],
}


def test_damaged_logs_are_refused_or_read_right(tmp_path: Path) -> None:
    """Of 200 damaged logs none ends in a traceback, none is read more than 1% wrong, and most are read."""
    read, wrong, draw = 0, [], random.Random(20)
    for _ in range(200):
        case, names = draw.choice(CASES), draw.sample(sorted(MUTATIONS), draw.choice((1, 1, 2)))
        lines = case.lines
        for name in names:
            lines = MUTATIONS[name](lines, draw)
        encoding = draw.choice(("utf-8", "utf-8-sig", "utf-16", "utf-16-le"))
        try:
            runs = read_training_log(written(tmp_path, lines, encoding, draw.choice(("\n", "\r\n"))))
            found = [run.step_s for run in runs]
        except AxonnTuneError:
            continue
        read += 1
        if not all(abs(step_s / case.step_s - 1.0) < max(0.01, 2 * case.tolerance) for step_s in found):
            wrong.append((case.name, names, found, case.step_s))
    assert not wrong
    assert read > 80
