"""Logs, traces and tables made to be slow, large or out of range: refused with a line, in time and memory that grow by
their length."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.learning.traces import read_trace
from axonn_tune.learning.training_logs import looks_like_training_log, read_training_log

DIGITS = "9" * 5000


@pytest.mark.parametrize(
    "words",
    ["step: 1 loss: ", "tps:", "elapsed time per iteration (", "Epoch 1: 1/1 [1<1 ", "capacity: with 1", "-", "\x1b]"],
)
def test_long_lines_are_read_once(tmp_path: Path, words: str) -> None:
    """Guards linear patterns: 300 lines of 8 KiB, which quadratic ones read for minutes."""
    text = "\n".join([(words * 8192)[:8191]] * 300)
    looks_like_training_log(text)
    path = tmp_path / "run.log"
    path.write_text(text, "utf-8")
    with pytest.raises(DocumentError, match="no line that states"):
        read_training_log(path)


@pytest.mark.parametrize(
    "line",
    [
        f" iteration {DIGITS}/ 9 | elapsed time per iteration (ms): 100.0 |",
        f"Training epoch {DIGITS}, iteration 1/100 | train_step_timing in s: 1.2 |",
        f"step: {DIGITS}  loss: 1.0 tps: 1,000 tflops: 1.0 mfu: 1%",
        f"steps: {DIGITS} loss: 1.0 iter time (s): 1.0 samples/sec: 1.0",
        f"global_step={DIGITS}, RunningAvgSamplesPerSec=1, CurrSamplesPerSec=1.0,",
        f"Step Time : {DIGITS}s GPU utilization: 1.0MODEL_TFLOP/s/GPU",
        f"{DIGITS}/{DIGITS} [00:10<00:10, 1.2s/it]",
        "{'train_runtime': 1.0, 'train_steps_per_second': 1e-320}",
        ':::MLLOG {"key": "block_start", "value": 1, "time_ms": 1e400, "metadata": {}}',
    ],
)
def test_steps_and_times_have_bounds(tmp_path: Path, line: str) -> None:
    """Guards exit code 2 with line and value, in every format."""
    path = tmp_path / "run.log"
    path.write_text(line + "\n", "utf-8")
    with pytest.raises(DocumentError, match=r"run\.log:\d+: "):
        read_training_log(path)


def test_a_packed_trace_of_nothing_is_refused(tmp_path: Path) -> None:
    """Guards memory: events are read one by one, and one longer than a window is none."""
    for name, text in (("events", b"[],"), ("nested", b'{"a":[' + b"[]," * 3_000_000 + b"[]]},")):
        path = tmp_path / f"{name}.json.gz"
        path.write_bytes(gzip.compress(b'{"traceEvents":[' + text * 2 + b"[]]}"))
        with pytest.raises(DocumentError, match=r"an event is needed|a value of more than"):
            read_trace(path)
