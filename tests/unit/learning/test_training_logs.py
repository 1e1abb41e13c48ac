"""Training logs: public runs as their frameworks print them, damaged ones, and real ones of the CPU."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from axonn_tune.errors import AxonnTuneError, DocumentError, UsageError
from axonn_tune.learning.reading import EvidenceRequest, read_evidence
from axonn_tune.learning.training_logs import LoggedRun, decoded, looks_like_training_log, read_training_log
from axonn_tune.validation.published.rows import cell_text

LOGS = Path(__file__).parents[2] / "fixtures" / "logs"
PUBLIC = LOGS / "public"
EXPECTED: Mapping[str, Mapping[str, Any]] = yaml.safe_load((PUBLIC / "expected.yaml").read_text("utf-8"))


def lines_of(name: str) -> list[str]:
    """Lines of a public run's log."""
    return (PUBLIC / f"{name}.log").read_bytes().decode().removesuffix("\n").split("\n")


OLD, CORE, NEMO, TITAN = map(lines_of, ("megatron-2021-128", "megatron-core-1536", "nemo-175b-512", "titan-8b-eager"))


def written(folder: Path, lines: list[str], encoding: str = "utf-8", ends: str = "\n") -> Path:
    """Write lines as a log."""
    path = folder / "train.log"
    path.write_bytes((ends.join(lines) + ends).encode(encoding))
    return path


def only(folder: Path, lines: list[str]) -> LoggedRun:
    """The one run of a log."""
    (run,) = read_training_log(written(folder, lines))
    return run


@pytest.mark.parametrize("name", EXPECTED)
def test_the_step_time_and_the_layout_of_a_public_run_are_read(name: str, tmp_path: Path) -> None:
    """The median after warm-up is the public figure, and every column states what the log prints."""
    expected, lines = EXPECTED[name], lines_of(name)
    run, columns = only(tmp_path, lines), expected.get("columns", {})
    assert run.step_s == pytest.approx(expected["step_s"], rel=expected.get("tolerance", 0.005))
    assert run.software == expected["software"]
    assert {column: cell_text(run.columns[column].value) for column in columns} == columns
    assert looks_like_training_log("\n".join(lines))
    if len(run.times_s) > 1:
        ((_, words),) = run.left_out
        assert re.search(r"2\.(4\d|50|51) times", words)
        assert len(run.times_s) == 11, "two of fourteen are warm-up"
        assert run.spread < 0.01


def test_the_list_names_every_log() -> None:
    """Guards the list of sources."""
    assert {path.stem for path in PUBLIC.glob("*.log")} == set(EXPECTED)


FULL = {"gpu": "H100-SXM", "layers": "92", "hidden": "10240", "heads": "80", "ffn": "40960", "vocab": "131072"}


def test_a_contradiction_names_file_line_and_both_values(tmp_path: Path) -> None:
    """What is given may repeat what the log states, and not differ from it."""
    run = only(tmp_path, CORE)
    with pytest.raises(UsageError, match=r"train\.log:2: the log states tp 8, but 4 is given"):
        run.completed(FULL | {"tp": "4", "seq": "4096"})
    assert run.completed(FULL | {"tp": "8.0", "seq": "4096"}).columns["tp"].value == 8


def test_missing_columns_are_named(tmp_path: Path) -> None:
    """Nothing is guessed: what neither log nor options state is asked for."""
    with pytest.raises(UsageError, match="does not state gpu, layers, hidden"):
        only(tmp_path, CORE).completed({})


def test_a_layout_that_does_not_fill_its_gpus_is_refused(tmp_path: Path) -> None:
    """Degrees that do not multiply to the GPUs are a damaged dump."""
    lines = [line.replace(".. 1536", ".. 1540") for line in CORE]
    with pytest.raises(UsageError, match="tp 8 x pp 4 x cp 1 = 32 ranks, but n_gpus is 1540"):
        only(tmp_path, lines).completed(FULL | {"seq": "4096"})


def test_expert_parallelism_of_a_log_is_said(tmp_path: Path) -> None:
    """Guards a log that shows experts without stating how many; one rank of them shows none."""
    for ranks in (1, 8):
        path = written(tmp_path, [f"  expert_model_parallel_size {25 * '.'} {ranks}", *CORE])
        (*assumed,) = read_evidence(EvidenceRequest(paths=[path], facts={**FULL, "seq": "4096"})).assumed
        said = "the log has expert_model_parallel_size 8 (line 1)"
        assert sum(said in words for words in assumed) == (ranks == 8)


@pytest.mark.parametrize("mark", [" consumed tokens: 4096 |", " TFLOPs: 61.20 |"])
def test_megatron_deepspeed_is_known_by_its_lines(mark: str, tmp_path: Path) -> None:
    """Guards the name: Megatron-LM prints neither tokens nor `TFLOPs:`, whose FLOPs count."""
    run = only(tmp_path, [line + mark if "elapsed" in line else line for line in OLD])
    assert run.software == "Megatron-DeepSpeed"
    assert run.flops == pytest.approx(61.2e12 * 3.889 if "TFLOPs" in mark else 0.0, rel=0.01)


STEP = "iteration {} / 500 | consumed samples: {} | elapsed time per iteration (ms): {}| "
LATER = "global batch size: 64 | lm loss: 1.2E+00 | number of nan iterations: 0 |"


@pytest.mark.parametrize(
    ("time", "more", "software", "tflops"),
    [
        ("5012.5/5100.3 ", "throughput per GPU (TFLOP/s/GPU): 410.2/401.9 | ", "Megatron-Core", 410.2),
        ("5012.5 / 5100.3 ", "tokens per GPU (tokens/s/GPU): 9801.4/9807.3 | ", "Megatron-Core", 0.0),
        ("5012.5 ", "memory(GiB): 58.54 | elapsed time: 10m 7s | ", "Megatron-Core", 0.0),
        ("5012.5 ", "load_balancing_loss: 1.268389E+00 | ", "Megatron-Core", 0.0),
        ("5012.5 ", "z_loss: 4.7E+00 | load_balancing_loss: 1.25E+00 | ", "Megatron-Core", 0.0),
        ("5012.5 ", "", "Megatron-LM", 0.0),
    ],
)
def test_lines_of_what_descends_from_megatron_are_read(
    time: str, more: str, software: str, tflops: float, tmp_path: Path
) -> None:
    """Guards figures over their means, as Primus prints them, and whose lines are: experts are Megatron-Core's."""
    run = only(tmp_path, [f"[rank-7/8] {STEP.format(step, step * 64, time)}{more}{LATER}" for step in range(1, 6)])
    assert run.step_s == pytest.approx(5.0125)
    assert run.columns["gbs"].value == 64
    assert run.software == software
    assert run.flops == pytest.approx(tflops * 1e12 * 5.0125)


@pytest.mark.parametrize(("total", "gpu"), [("191.98", "MI300X"), ("255.98", "MI325X"), ("287.98", "")])
def test_memory_that_primus_prints_says_which_accelerator_it_is(total: str, gpu: str, tmp_path: Path) -> None:
    """Guards accelerators that differ by their memory alone; of two with as much none is said."""
    memory = f"hip mem usage/free/total/usage_ratio: 150.10GB/41.10GB/{total}GB/60.09% | tokens/s/GPU: 9801.4/9807.3 | "
    run = only(
        tmp_path, [f"[rank-7/8] {STEP.format(step, step * 64, '5012.5 ')}{memory}{LATER}" for step in range(1, 6)]
    )
    assert (run.columns["gpu"].value if "gpu" in run.columns else "") == gpu


@pytest.mark.parametrize(
    ("before", "head"),
    [
        ("[2025-03-01 10:00:00] ", ""),
        (
            "",
            "using world size: 64, data-parallel size: 16, context-parallel size: 1, hierarchical context-parallel "
            "sizes: Nonetensor-model-parallel size: 2, pipeline-model-parallel size: 2",
        ),
    ],
)
def test_logs_of_later_releases_without_throughput_are_megatron_cores(before: str, head: str, tmp_path: Path) -> None:
    """Guards lines with their time, and sizes of a head whose separator Megatron-LM lost."""
    run = only(tmp_path, [head, *(f"{before}{STEP.format(step, step, 5012.5)}{LATER}" for step in range(1, 6))])
    assert run.software == "Megatron-Core"
    assert {name: run.columns[name].value for name in ("tp", "pp") if head} == ({"tp": 2, "pp": 2} if head else {})


TWICE = [(at, 9.0 if at < 3 else 4.0) for at in range(1, 12)]
"""Steps with their seconds: two of warm-up."""
OF_TOOLS: dict[str, tuple[list[str], float]] = {
    "ms-swift, rate": (
        [
            f"{{'loss': 1.2, 'global_step/max_steps': '{done}/90', 'memory(GiB)': 58.5, 'train_speed(iter/s)': {rate}}}"
            for done, rate in ((5, 0.125), (10, 0.16666667), (50, 0.22727273))
        ],
        # 220 s for 50 steps, of which 60 s for the first 10.
        160 / 40,
    ),
    "ms-swift, logging.jsonl": (
        [
            f'{{"loss": 1.2, "global_step/max_steps": "{done}/90", "elapsed_time": "9s", "train_speed(s/it)": {mean}}}'
            for done, mean in ((5, 8.0), (10, 6.0), (50, 4.4))
        ],
        160 / 40,
    ),
    "megatron sft": ([str({"iteration": "20/90", "elapsed_time": "1m 20s", "train_speed(s/it)": 4.0})], 4.0),
    "LLaMA-Factory, trainer_log.jsonl": (
        [
            f'{{"current_steps": {done}, "total_steps": 90, "loss": 1.2, "lr": 1e-05, "epoch": 0.1, "percentage": 1.0, '
            f'"elapsed_time": "{clock}", "remaining_time": "2 days, 0:10:00", "throughput": 812.5}}'
            for done, clock in ((0, "0:00:00"), (10, "0:01:00"), (50, "1 day, 0:03:40"), (50, "1 day, 0:08:00"))
        ],
        (86400 + 160) / 40,
    ),
    "verl": ([f"step:{at} - train/loss:1.2 - train/lr(1e-3):0.01 - train/time(s):{one}" for at, one in TWICE], 4.0),
    "NeMo-RL": (
        [
            line
            for at, one in TWICE
            for line in (
                f"{'=' * 25} Step {at}/90 {'=' * 25}",
                f"  • Total step time: {one + 0.5:.2f}s",
                f"  • policy_training: {one:.2f}s (89.1%)",
                "  • data_processing: 0.40s (8.9%)",
            )
        ],
        4.0,
    ),
    "a bar": ([f" {at}%|# | {at}/90 [00:{4 * at:02d}<05:50,  {one:.2f}s/it]" for at, one in TWICE], 4.0),
    "all_results.json": (
        ['{"epoch": 3.0,', '"train_runtime": 900.5,', '"train_steps_per_second": 0.125, "train_loss": 1.1}'],
        8.0,
    ),
}


@pytest.mark.parametrize("tool", OF_TOOLS)
def test_logs_of_tools_that_people_tune_with_are_read(tool: str, tmp_path: Path) -> None:
    """Guards lines of each tool, means since a run began without its start, and that they are known by them."""
    lines, step_s = OF_TOOLS[tool]
    assert looks_like_training_log("\n".join(lines))
    assert only(tmp_path, lines).step_s == pytest.approx(step_s, rel=2e-4)


def test_rates_of_tokens_and_samples_take_their_batch(tmp_path: Path) -> None:
    """Guards torchtune's tokens per second and GPU in both formats, and a summary that is too coarse for steps."""
    given = {"gbs": "16", "seq": "2048", "n_gpus": "8"}
    plain = [f"Step {at} | loss:1.2 lr:2e-05 tokens_per_second_per_gpu:{4096 / one} " for at, one in TWICE]
    json = [f'{{"step": {at}, "loss": 1.2, "tokens_per_second_per_gpu": {4096 / one}}}' for at, one in TWICE]
    summary = [
        "{'train_runtime': '900.5', 'train_samples_per_second': '4.00', 'train_steps_per_second': '0.2', 'epoch': '1'}"
    ]
    for lines in (plain, json, summary):
        assert only(tmp_path, lines).with_given(given).step_s == pytest.approx(4.0)


def test_steps_of_reinforcement_learning_are_refused_once(tmp_path: Path) -> None:
    """Guards verl's PPO: most of its step is no training, and one line says so, not one a step."""
    with pytest.raises(DocumentError) as caught:
        only(tmp_path, [f"step:{at} - timing_s/update_actor:12.1 - perf/time_per_step:55.2" for at in (1, 2, 3)])
    assert str(caught.value).count("generates answers") == 1


def test_a_config_beside_its_log_is_no_list_of_columns(tmp_path: Path) -> None:
    """Guards run.jsonl with the run.yaml that started it: its steps, and the layout that the config states."""
    log, config = tmp_path / "run.jsonl", tmp_path / "run.yaml"
    log.write_text("\n".join(OF_TOOLS["LLaMA-Factory, trainer_log.jsonl"][0]) + "\n", "utf-8")
    config.write_text("model_name_or_path: Qwen/Qwen2.5-7B\nstage: sft\ncutoff_len: 2048\nbf16: true\n", "utf-8")
    request = EvidenceRequest(paths=[log], machine="dgx-h100", from_command=config, facts={"n_gpus": "8"})
    (sample,) = read_evidence(request).samples
    assert sample.ranks == 8
    with pytest.raises(UsageError, match=r"no column 'model_name_or_path'.*--from-command"):
        read_evidence(EvidenceRequest(paths=[log], machine="dgx-h100", facts={"n_gpus": "8"}))


def test_rates_need_what_a_step_processes(tmp_path: Path) -> None:
    """Tokens per second and GPU say nothing without batch, sequence and GPUs: refused until they are given."""
    run = only(tmp_path, [line for line in TITAN if "step:" in line])
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
    large = [re.sub("size:   512", "size:  1024", line) for line in OLD if "elapsed" in line]
    later = [re.sub(r"iteration +(\d+)", lambda found: f"iteration {int(found[1]) + 14:8d}", line) for line in large]
    first, second = read_training_log(written(tmp_path, [*OLD, *later]))
    assert (first.step_s, second.step_s) == pytest.approx((3.889, 3.889), rel=0.005)
    assert [run.columns["gbs"].value for run in (first, second)] == [512, 1024]
    assert second.columns["tp"] == first.columns["tp"]


def test_runs_after_each_other_do_not_share_arguments(tmp_path: Path) -> None:
    """A second run in a file has what its own lines say."""
    first, second = read_training_log(written(tmp_path, [*lines_of("bloom-12-4"), *TITAN]))
    assert (first.software, second.software) == ("Megatron-DeepSpeed", "torchtitan (eager)")
    assert "layers" not in second.columns
    assert second.step_s == pytest.approx(2.8435, rel=0.005)


@pytest.mark.parametrize("value", ["nan", "inf", "0.0", "-3.0"])
def test_times_that_are_none_are_named(value: str, tmp_path: Path) -> None:
    """NaN, infinite, 0 and negative times do not count and are not passed over in silence."""
    lines = [re.sub(r"\(ms\): [\d.]+", f"(ms): {value}", line) if "  5/" in line else line for line in OLD]
    run = only(tmp_path, lines)
    assert value in run.left_out[-1][1]
    assert len(run.left_out) == 2, "beside the outlier"
    assert run.step_s == pytest.approx(3.889, rel=0.005)


def test_units_are_read_or_refused(tmp_path: Path) -> None:
    """Milliseconds called seconds are seconds; a unit that is none, or none at all, is refused with its line."""
    seconds = [line.replace("(ms)", "(s)") for line in OLD]
    assert only(tmp_path, seconds).step_s == pytest.approx(3889.0, rel=0.005)
    for unit in ("(hours)", ""):
        with pytest.raises(DocumentError, match=r"train\.log:6: .*unit"):
            read_training_log(written(tmp_path, [line.replace("(ms)", unit) for line in OLD]))


def test_a_truncated_last_line_is_named(tmp_path: Path) -> None:
    """A number that ends a file without its newline may lack digits."""
    path = written(tmp_path, NEMO)
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
        public, names = draw.choice(list(EXPECTED)), draw.sample(sorted(MUTATIONS), draw.choice((1, 1, 2)))
        lines, expected = lines_of(public), EXPECTED[public]
        for name in names:
            lines = MUTATIONS[name](lines, draw)
        encoding = draw.choice(("utf-8", "utf-8-sig", "utf-16", "utf-16-le"))
        try:
            runs = read_training_log(written(tmp_path, lines, encoding, draw.choice(("\n", "\r\n"))))
            found = [run.step_s for run in runs]
        except AxonnTuneError:
            continue
        read += 1
        limit = max(0.01, 2 * expected.get("tolerance", 0.005))
        if not all(abs(step_s / expected["step_s"] - 1.0) < limit for step_s in found):
            wrong.append((public, names, found))
    assert not wrong
    assert read > 80
