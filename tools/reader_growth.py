"""How readers of evidence and scripts grow with their input: CPU time of one, of one ten times as long, the ratio.

    python -m tools.reader_growth [PART OF A NAME]

Every log format, collectives, traces, scripts and tables, and long lines without a step. A ratio above 12 ends with
exit code 1: a reader that is linear has 10, and less where opening it takes a part.
Python's garbage collector is off while it is timed: its passes visit all objects, whoever made them.
"""

from __future__ import annotations

import gc
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from axonn_tune.errors import AxonnTuneError
from axonn_tune.frameworks.keys import lookup
from axonn_tune.learning.collective_logs import read_log
from axonn_tune.learning.shell import read_script
from axonn_tune.learning.traces import read_trace
from axonn_tune.learning.training_logs import looks_like_training_log, read_training_log
from axonn_tune.specs.loading import read_text
from axonn_tune.validation.published.rows import SHIPPED, read_steps

FACTOR, MOST = 10, 12.0
LEAST_S, REPEATS = 0.05, 3
"""CPU time that the shorter input takes at least, s: fewer say nothing; times of which the least counts."""

_MLPERF = (
    ':::MLLOG {{"key": "tracked_stats", "value": {{"train_step_time": 1.5}}, "time_ms": {n}, '
    '"metadata": {{"step": {n}}}}}'
)
_LOGS = {
    "Megatron-Core": " iteration {n:8d}/ 900000 | elapsed time per iteration (ms): 1234.5 |"
    " throughput per GPU (TFLOP/s/GPU): 412.3 | global batch size:   512 | lm loss: 1.0E+00 |",
    "Megatron-DeepSpeed": " iteration {n:8d}/ 900000 | consumed tokens: {n} | elapsed time per iteration (s): 12.5 |"
    " TFLOPs: 61.2 | loss scale: 1.0 |",
    "arguments": "  hidden_size_{n} ................................ {n}",
    "NeMo 2": "Training epoch 0, iteration {n}/900000 | lr: 3e-6 | global_batch_size: 64 | train_step_timing in s: 1.5",
    "NeMo 1": "Epoch 0: :  1%|2 | {n}/900000 [00:01<01:10,  1.50s/it, v_num=0, train_step_timing in s=1.5]",
    "Megatron-Bridge": "Step Time : 1.50s GPU utilization: 512.3MODEL_TFLOP/s/GPU",
    "torchtitan": "step: {n}  loss: 1.0000  memory: 82.40GiB(86.70%)  tps: 5,000  tflops: 300.12  mfu: 33.00%",
    "DeepSpeed pipeline": "steps: {n} loss: 1.0000 iter time (s): 1.500 samples/sec: 10.000",
    "DeepSpeed": "epoch=0/micro_step={n}/global_step={n}, RunningAvgSamplesPerSec=10.0, CurrSamplesPerSec=10.0, Mem",
    "MLPerf": _MLPERF,
    "Lightning": "Epoch {n}: 100%|2 | 99/99 [00:10<01:00,  1.50s/it, v_num=0, train_loss=0.3]",
    "Hugging Face": "  1%|2  | {n}/900000 [00:10<01:00,  1.50s/it]",
    "other output": "[rank0]: step: 1 loss: 2.5, and a line of something else with number {n}",
    "lines of 8 KiB": "step: 1 loss: elapsed time per iteration (" * 200,
}
_NCCL_HEAD = """# Collective test starting: all_gather_perf
# nThread 1 nGpus 1
# Using devices
#  Rank  0 Group  0 Pid   1946 on       n1 device  0 [0000:0f:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1947 on       n2 device  0 [0000:15:00] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
"""
_NCCL_ROW = "1048576 131072 float none -1 35.00 29.96 14.98 0 34.00 30.84 15.42 0\n"
_OSU = "# OSU MPI Allgather Latency Test v7.4\n# Datatype: MPI_CHAR.\n# Size       Avg Latency(us)\n"


@dataclass(frozen=True)
class Reader:
    """An input of `lines` lines under a name, and what reads it."""

    name: str
    file: str
    text: Callable[[int], str]
    read: Callable[[Path], object]
    lines: int = 2000


def _rows(head: str, row: str) -> Callable[[int], str]:
    return lambda lines: head + "".join(row.format(n=n, size=n * 1024, count=n * 128) for n in range(1, lines + 1))


def _log(path: Path) -> object:
    looks_like_training_log(read_text(path))
    return read_training_log(path)


def _shell(path: Path) -> object:
    return read_script(read_text(path), path=str(path))


def _nccl_json(lines: int) -> str:
    devices = [{"rank": n, "hostname": "n1", "device": n, "device_info": "H100"} for n in range(8)]
    results = [{"size": n * 1024, "count": n * 256, "out_of_place": {"time": 20.5}} for n in range(1, lines + 1)]
    return json.dumps({"args": ["all_reduce_perf"], "config": {"ngpus": 1, "devices": devices}, "results": results})


def _trace(lines: int) -> str:
    events = []
    for n in range(lines):
        shared = {"ph": "X", "pid": 0, "ts": 10.0 * n, "dur": 5.0}
        shapes = {"Input Dims": [[128, 512], [512, 256]], "Input Strides": [[512, 1], [256, 1]]}
        events.append({**shared, "cat": "cpu_op", "name": "aten::mm", "tid": 1, "args": {"External id": n, **shapes}})
        kernel = {"cat": "kernel", "name": "nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NNT", "tid": 7}
        events.append({**shared, **kernel, "args": {"External id": n}})
        said = {"In msg nelems": 1024, "Out msg nelems": 4096, "Group size": 4, "dtype": "BFloat16"}
        nccl = {"cat": "kernel", "name": "ncclDevKernel_AllGather_RING_LL", "tid": 20}
        events.append({**shared, **nccl, "args": {**said, "Process Group Ranks": "[0, 2, 4, 6]"}})
    return json.dumps({"deviceProperties": [{"id": 0, "name": "H100"}], "traceEvents": events})


def _packed(path: Path) -> object:
    path.with_suffix(".json.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    return read_trace(path.with_suffix(".json.gz"))


def _script(row: str, head: str = "") -> Callable[[int], str]:
    return lambda lines: head + _rows("", row)(lines) + "\npython pretrain_gpt.py --num-layers 8 $ARGS\n"


def _steps(lines: int) -> str:
    head, *rows = (SHIPPED / "steps.csv").read_text("utf-8").splitlines()
    return "\n".join([head, *(rows[n % 100] for n in range(lines))]) + "\n"


def readers() -> list[Reader]:
    """All of them."""
    shell = {
        "script, variables": 'A{n}="$B --x{n} {n}"\n',
        "script, one command": "  --argument-{n} {n} \\\n",
        "script, arrays": 'ARGS+=(--x{n} "$A{n}")\n',
        "script, conditions": 'if [ "$A" = {n} ]; then B={n}; fi\n',
    }
    head = "epoch,step,train_step_timing in s\n"
    return [
        *(
            Reader(f"log, {name}", "run.log", _rows("", row + "\n"), _log, 100 if len(row) > 1024 else 2000)
            for name, row in _LOGS.items()
        ),
        Reader("log, metrics.csv", "metrics.csv", _rows(head, "0,{n},1.5\n"), _log),
        Reader("log, one line of bars", "run.log", _rows("", "Epoch 0: 1%| {n}/900 [00:10<01:00, 1.5s/it]\r"), _log),
        Reader("collectives, nccl-tests", "all_gather.txt", _rows(_NCCL_HEAD, _NCCL_ROW), read_log),
        Reader("collectives, no heading", "all_gather.txt", _rows("# nThread 1 nGpus 8\n", _NCCL_ROW), read_log),
        Reader("collectives, JSON", "all_reduce.json", _nccl_json, read_log),
        Reader(
            "collectives, OSU", "osu.txt", _rows(_OSU, "{size} 100.0\n"), lambda path: read_log(path, ranks=8, nodes=1)
        ),
        Reader("trace", "trace.json", _trace, read_trace),
        Reader("trace, packed", "trace.json", _trace, _packed),
        *(Reader(name, "run.sh", _script(row), _shell, 500) for name, row in shell.items()),
        Reader("table of steps", "steps.csv", _steps, read_steps, 500),
    ]


def cpu_s(reader: Reader, folder: Path, lines: int) -> tuple[float, str]:
    """Least CPU time of reading so many lines, s, and how it ended."""
    path, ended, found = folder / reader.file, "read", []
    path.write_text(reader.text(lines), "utf-8")
    for _ in range(REPEATS):
        lookup.cache_clear()
        gc.collect()
        gc.disable()
        start_s = time.process_time()
        try:
            reader.read(path)
        except AxonnTuneError as error:
            ended = str(error).splitlines()[0].removeprefix(str(path))[:40]
        found.append(time.process_time() - start_s)
        gc.enable()
    return min(found), ended


def main() -> int:
    """Print a row for each reader."""
    worst = 0.0
    print(f"{'reader':26}{'lines':>8}{'CPU, s':>9}{'x 10, s':>9}{'ratio':>7}  ended")
    with tempfile.TemporaryDirectory() as folder:
        for reader in readers():
            if sys.argv[1:] and sys.argv[1] not in reader.name:
                continue
            lines, (short_s, _) = reader.lines, cpu_s(reader, Path(folder), reader.lines)
            while short_s < LEAST_S and lines < FACTOR * reader.lines and "script" not in reader.name:
                lines *= 2
                short_s, _ = cpu_s(reader, Path(folder), lines)
            long_s, ended = cpu_s(reader, Path(folder), FACTOR * lines)
            worst = max(worst, long_s / short_s)
            print(f"{reader.name:26}{lines:8,}{short_s:9.3f}{long_s:9.3f}{long_s / short_s:7.1f}  {ended}", flush=True)
    print(f"largest ratio {worst:.1f}, at most {MOST:g}")
    return int(worst > MOST)


if __name__ == "__main__":
    sys.exit(main())
