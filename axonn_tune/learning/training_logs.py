"""Reads training logs: step times, layout and batch of each run, as rows of the step CSV.

Read are logs of Megatron-LM, Megatron-DeepSpeed, Megatron-Core, Megatron-Bridge, Primus, ms-swift, NeMo, torchtitan,
DeepSpeed, PyTorch Lightning (progress bar, metrics.csv), Hugging Face's Trainer (bar, summary, trainer_state.json,
all_results.json) and what descends from it (LLaMA-Factory's trainer_log.jsonl, ms-swift's logging.jsonl), torchtune,
NeMo-RL's and verl's SFT, and MLPerf. Lines are recognised by what the framework prints, so labels of srun, mpirun and
torchrun, colours and other output do not matter.
A run ends where the log begins another or states another layout or batch. Of several kinds of lines that state step
times, the first of `_KINDS` counts.

Step times are those after warm-up: the first step, and those after it that take more than 1.1 times the median of the
rest, a fifth of all at most; with three steps or fewer all count. Outliers do not count either: steps further from the
median than five standard deviations (by the median absolute deviation) and than 5%. A run whose times are not level
(half of them within 10% of the median) has no step time.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

from axonn_tune.errors import CONTROL, DocumentError, Problem
from axonn_tune.frameworks.keys import Arguments, Stated
from axonn_tune.learning.arguments import PrintedArguments, columns_of
from axonn_tune.learning.run import NEEDED, StatedRun
from axonn_tune.learning.saving import Saving, SavingLog
from axonn_tune.specs.loading import json_of, read_bytes
from axonn_tune.units import TERA, read_count, read_number
from axonn_tune.validation.published.rows import Cell

Per: TypeAlias = Literal["step", "sample", "token"]
"""What a printed time is of; `token`: seconds per token on each GPU, the inverse of tokens per second and GPU."""

LeftOut: TypeAlias = tuple[int, str]
"""A line that does not count, and why."""

WARM_UP_FACTOR, WARM_UP_SHARE, FEW_STEPS = 1.1, 0.2, 3
FEWEST_BARS = 8
"""With fewer, a progress bar says less than the time of the whole run."""
OUTLIER_DEVIATIONS, OUTLIER_SHARE = 5.0, 0.05
_DEVIATION_OF_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

_OF_MODEL = {"layers", "hidden", "heads", "ffn", "vocab"}
"""Columns that --model gives."""


@dataclass(frozen=True)
class LoggedRun(StatedRun):
    """Steps of a training log with one layout and one batch.

    lines: first and last line of its steps. times_s: seconds per `per`, after warm-up and without outliers. left_out:
    excluded lines, outliers first. assumed: assumptions, in words; taken_for: those on the software that ran. flops: of
    a GPU per `per`, by the log's own TFLOP/s times its time; 0 without. arguments: those that it prints. saved: what it
    says of checkpoints, and what the run before it in the same log does.
    """

    noun: ClassVar[str] = "log"

    times_s: tuple[float, ...]
    per: Per
    left_out: tuple[LeftOut, ...] = ()
    assumed: tuple[str, ...] = ()
    taken_for: tuple[str, ...] = ()
    flops: float = 0.0
    arguments: Arguments = field(default_factory=dict)
    saved: tuple[SavingLog, SavingLog | None] | None = None

    @property
    def saving(self) -> Saving | None:
        """Saves and restart of a completed run, None where its log has none."""
        return None if self.saved is None else self.saved[0].found(self.step_s, before=self.saved[1])

    @property
    def step_s(self) -> float:
        """Median step time, s; UsageError where the log prints a rate and does not say what one step processes."""
        if self.per == "step":
            return statistics.median(self.times_s)
        wanted = ("gbs",) if self.per == "sample" else ("gbs", "seq", "n_gpus")
        self.require(wanted, f"it prints {self.per}s per second, and a step's time needs them")
        batch, *tokens = (self.columns[name].value for name in wanted)
        return statistics.median(self.times_s) * (batch * tokens[0] / tokens[1] if tokens else float(batch))

    @property
    def spread(self) -> float:
        """Standard deviation of one step over the median, by the median absolute deviation; 0 for one step."""
        middle = statistics.median(self.times_s)
        return _deviation(self.times_s) / middle

    def completed(self, given: Mapping[str, Cell]) -> Self:
        """The same with its time among the columns of a row. `given`: columns from options or a file beside the log.

        UsageError for a contradiction, a column that neither states, and a layout that does not fill its GPUs.
        """
        run = self.with_given(given)
        missing = {*NEEDED} - run.columns.keys()
        options = [flag for flag, names in (("--model", _OF_MODEL), ("--machine", {"gpu"})) if missing & names]
        more = f", or by {' and '.join(options)}" if options else ""
        run.require(NEEDED, f"give it as --fact NAME=VALUE, in {Path(self.path).stem}.yaml beside the log{more}")
        run.check_layout()
        times = {"step_s": float(f"{run.step_s:.9g}")}
        if rate := run.flops / statistics.median(run.times_s) / TERA:
            times["tflops_per_gpu"] = float(f"{rate:.6g}")
        return replace(run, columns={**run.columns, **{name: Stated(one, 0) for name, one in times.items()}})


def read_training_log(path: Path) -> tuple[LoggedRun, ...]:
    """The runs of a log; UsageError if there is no file to read, DocumentError if it holds no step time that counts."""
    text = decoded(read_bytes(path))
    reader = _Reader(str(path))
    if text.lstrip()[:1] == "{" and '"log_history"' in text:
        reader.trainer_state(text)
    elif text.lstrip()[:1] == "{" and _RESULTS.search(text):
        reader.results(text)
    elif _is_metrics_csv(text):
        reader.metrics_csv(text)
    else:
        reader.lines(text)
    return reader.runs()


def looks_like_training_log(text: str) -> bool:
    """Whether a text, or its beginning, has lines of a log that `read_training_log` reads."""
    return _looks(text) or _is_metrics_csv(text)


def decoded(data: bytes) -> str:
    """Text of a log: UTF-8, or UTF-16 by its byte-order mark or NUL bytes, else Latin-1, which fits all bytes."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return data.decode("utf-16", errors="replace")
    if data[:4096].count(0) > len(data[:4096]) // 4:
        return data.decode("utf-16-le" if data[1:2] == b"\0" else "utf-16-be", errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


# Log lines of each framework.


@dataclass(frozen=True)
class _Reading:
    """A time that a log prints: seconds per `per`; NaN where the line states none; flops: of a GPU in it."""

    kind: str
    step: tuple[int, ...]
    line: int
    time_s: float
    per: Per = "step"
    flops: float = 0.0


@dataclass(frozen=True)
class _Kind:
    """A kind of line that states times.

    step: what numbers the step; time: what follows it, with groups `time` or `rate`, and `unit` where the line has one.
    word: of all its lines. per: what the time is of. software: who prints it, if nothing else decides. mean: not
    empty if one line is the mean of many steps.
    """

    name: str
    software: str
    word: str
    step: str
    time: str
    per: Per
    mean: str


_LINES: Iterator[dict[str, Any]] = csv.DictReader((Path(__file__).parent / "lines.csv").read_text("utf-8").splitlines())
_KINDS = tuple(_Kind(**one) for one in _LINES)
"""The most reliable first: of several kinds of lines in a run, the first counts. Every pattern is linear: it consumes
what it tries (`++`), or stops where another match could begin."""

_PRECISE = 3
"""Digits of a rate that a step's time is known by."""
_LONGEST, _DIGITS = 1 << 12, re.compile(r"(\d{40})\d++")
"""Of a line, more says nothing of a step."""
_UNITS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0}

_LOOKS = re.compile(
    r"elapsed time per iteration|train_step_timing in s|:::MLLOG|CurrSamplesPerSec=|iter time \(\w++\):"
    r"|MODEL_TFLOP/s/GPU|['\"]train_runtime['\"]|train_speed\(|\"log_history\"|\"current_steps\": \d++, \"total_steps\""
    r"|tokens_per_second_per_gpu\"?:|train/time\(s\):|policy_training: [\d.]++s|perf/time_per_step:"
)
_LOOKS_IN_ORDER = (
    ("step:", re.compile(r"^(?>.*?step:[ \t]*+\d++[ \t])(?>.*?loss:).*?[tw]ps:", re.MULTILINE)),
    ("Epoch ", re.compile(r"^(?>.*?Epoch \d++:).*?(?:it/s|s/it)", re.MULTILINE)),
    ("%|", re.compile(r"^(?>.*?%\|[^|\n]*+\| \d++/\d++ \[).*?(?:it/s|s/it)\]", re.MULTILINE)),
)
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*+[ -/]*+[@-~]|\][^\x07\x1b]*+\x07|[@-Z\\-_])")
_LABEL = re.compile(r"^\s*(?:\d+:|\[\d+,\d+\]<std(?:out|err)>:|\[(?:default|rank)\d+\]:)[ \t]?")
"""Prefix of lines under srun --label, mpirun --tag-output and torchrun."""

_BEGINS = (
    *("--- arguments ---", "using world size:", "Running with config:", "Running with configs:", "Running with args:"),
    *("Building device mesh", "-D device mesh with", "json = {", "Experiment configuration", "Task Configuration"),
    *("Starting job:", '"key": "init_start"', '"key": "cache_clear"'),
)
"""Lines that frameworks print before they train."""

_NEMO = next(kind for kind in _KINDS if kind.name == "timing")
_EPOCH = re.compile(r"Epoch (\d++):")
_BAR = re.compile(r"(?<![\d/])(\d++)/(\d++)\s*+(?:\[[\d:]++<[^,\[\]]*+,|\d:\d\d:\d\d • \S++)\s*+([\d.]++) ?(s/it|it/s)")
_NEMO_BAR = re.compile(r"(?<!\d)(\d++)/\d++ \[")
_SUMMARY = "{'train_runtime': "
_RESULTS = re.compile(r"^\s*+\"train_runtime\": ", re.MULTILINE)
"""Of all_results.json and train_results.json, a line of which has the time of the whole run."""
_ELAPSED = re.compile(
    r"\"current_steps\": (?P<done>\d++), \"total_steps\": (?P<all>\d++),(?>.*?\"elapsed_time\": \")"
    r"(?:(?P<d>\d++) days?, )?(?P<h>\d++):(?P<m>\d\d):(?P<s>\d\d)\""
)
"""LLaMA-Factory's trainer_log.jsonl: steps, and the time since the first began (hiyouga/LLaMA-Factory@ff6d4d12,
src/llamafactory/train/callbacks.py)."""
_TFLOPS = re.compile(
    r"(?:\(TFLOP/s/GPU\):|TFLOPs:|tflops:|TFLOPS_per_GPU[:=])\s*+(\d{1,5}(?:,\d{3})?(?:\.\d{1,6})?)(?![\d.])"
)
_MARKS = {
    "TFLOP/s/GPU": "tflops_per_gpu",
    "consumed tokens:": "consumed_tokens",
    "TFLOPs:": "consumed_tokens",
    "load_balancing_loss:": "load_balancing_loss",
    "memory(GiB):": "of_swift",
    "tokens/s/GPU": "of_primus",
}
"""Words of a step's line, and the argument that they stand for: Megatron-DeepSpeed prints tokens and `TFLOPs:`
(deepspeedai/Megatron-DeepSpeed@4efb479d:megatron/training.py), Megatron-Core the balance of its experts,
ms-swift memory. Primus prints a step's figures over their means, `13372.8/13364.7`."""


_HIP_MEMORY = re.compile(r"hip mem usage/free/total/usage_ratio: [\d.]+GB/[\d.]+GB/(\d+)\.")
_OF_MEMORY = {"191": "MI300X", "255": "MI325X"}
"""Whole GiB of an accelerator as Primus prints it, and the only one of AMD's that has so many."""


def _looks(text: str) -> bool:
    """Whether a text has a line that some framework prints with a step."""
    return bool(_LOOKS.search(text)) or any(word in text and one.search(text) for word, one in _LOOKS_IN_ORDER)


class _Unusable(ValueError):
    """A line states a step and no time that counts; the message says why."""


LEAST, MOST = 1e-9, 1e12
"""Of times and rates that a log prints; others are no time of a step."""


def _number(text: str) -> float:
    """A printed time or rate; _Unusable otherwise."""
    try:
        return read_number(text.replace(",", "").strip("'\""), least=LEAST, most=MOST)
    except ValueError as error:
        raise _Unusable(f"{error}, as a time or rate is") from None


def _step(text: str) -> int:
    """The number of a step; _Unusable otherwise."""
    try:
        return read_count(text)
    except ValueError as error:
        raise _Unusable(f"{error}, as a step is") from None


@dataclass
class _Segment:
    """Lines with one layout and one batch."""

    arguments: dict[str, Stated] = field(default_factory=dict)
    readings: list[_Reading] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    blocks: list[tuple[float, int, str, int]] = field(default_factory=list)
    """Ends of MLPerf's blocks: ms, samples so far (-1 if not said), key, line."""
    latest_ms: float = -math.inf
    bar_steps: int = 0
    """Steps of the longest progress bar."""
    saving: SavingLog = field(default_factory=SavingLog)


class _Reader:
    """Collects what the lines of one log state, cut into runs."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.segments = [_Segment()]
        self.problems: list[Problem] = []
        self.printed = PrintedArguments()

    @property
    def now(self) -> _Segment:
        """The run that the lines at hand belong to."""
        return self.segments[-1]

    def lines(self, text: str) -> None:
        """Every line of a log; what is printed over a line after a carriage return has its number."""
        broken = text.split("\n" if "\n" in text else "\r")
        last = len(broken) if broken[-1].strip() else 0
        for number, line in enumerate(broken, 1):
            for part in line.removesuffix("\r").split("\r"):
                # Of digits without end some are enough to refuse them, with what follows in its place.
                cut = part if len(part) <= _LONGEST else _DIGITS.sub(r"\1", part)[:_LONGEST]
                self._line(_LABEL.sub("", CONTROL.sub("", _ANSI.sub("", cut))), number, torn=number == last)

    def _line(self, text: str, number: int, *, torn: bool) -> None:
        if torn and re.search(r"[\w.,]$", text) and _looks(text):
            self.now.left_out.append((number, "the last line is truncated"))
            return
        if ":::MLL" in text:
            self._mllog(text, number)
            return
        if any(word in text for word in _BEGINS):
            self._begin()
        if "elapsed time per iteration" in text:
            marks = [name for words, name in _MARKS.items() if words in text]
            marks += ["of_core"] * bool(re.match(r"\s*\[20\d\d-\d\d-\d\d [\d:]{8}\] iteration ", text))
            for name in marks:
                self.now.arguments.setdefault(name, Stated("True", number))
            if (memory := _HIP_MEMORY.search(text)) and memory[1] in _OF_MEMORY:
                self.now.arguments.setdefault("device_name", Stated(_OF_MEMORY[memory[1]], number))
        for name, value in self.printed.sentence(text):
            self._state(name, value, number)
        # Printed after steps, other pairs are metrics or a configuration of something else.
        for name, value in () if self.now.readings else self.printed.pair(text):
            self._state(name, value, number)
        try:
            found, said = list(self._readings(text, number)), _TFLOPS.search(text)
            rate = float(said[1].replace(",", "")) * TERA if said else 0.0
            self.now.readings += [replace(one, flops=rate * one.time_s) for one in found]
            self.now.saving.line(text, found[-1].step[-1] if found else None)
        except _Unusable as error:
            self.now.left_out.append((number, str(error)))

    def _begin(self) -> None:
        if self.now.readings or self.now.blocks:
            self.segments.append(_Segment())

    def _state(self, name: str, value: str, number: int) -> None:
        """Take an argument; one that changes after steps begins another run."""
        stated = self.now.arguments.get(name)
        if self.now.readings and stated is not None and stated.value != value:
            self.segments.append(_Segment(dict(self.now.arguments)))
        if stated is None or stated.value != value:
            self.now.arguments[name] = Stated(value, number)

    def _readings(self, text: str, number: int) -> Iterator[_Reading]:
        for kind in (one for one in _KINDS if one.time and one.word in text):
            step = re.search(kind.step, text) if kind.step else None
            if kind.step and not step:
                continue
            found = re.compile(kind.time).search(text, step.end() if step else 0)
            if found is None and step and kind.word == "iteration":
                raise _Unusable(f"iteration {step[step.lastindex or 1]} states no time, or the line is truncated")
            if found is not None:
                steps = tuple(map(_step, step.groups())) if step else (number,)
                yield _Reading(kind.name, steps, number, self._time(found, number), kind.per)
        bars, before = "it/s" in text or "s/it" in text, 0
        time, epoch = (re.search(_NEMO.time, text), _EPOCH.search(text)) if bars else (None, None)
        if time and epoch and (bar := _NEMO_BAR.search(text, epoch.end())):
            yield _Reading("timing", (_step(epoch[1]), _step(bar[1])), number, self._time(time, number))
        for found in _BAR.finditer(text) if bars else ():
            rate, epoch = _number(found[3]), _EPOCH.search(text, before, found.start())
            steps, before = (_step(found[2]), *((_step(epoch[1]),) if epoch else ()), _step(found[1])), found.end()
            self.now.bar_steps = max(self.now.bar_steps, 0 if epoch else steps[0])
            yield _Reading("epoch bar" if epoch else "bar", steps, number, rate if found[4] == "s/it" else 1.0 / rate)
        if (found := _ELAPSED.search(text)) and (done := _step(found["done"])):
            days, hours, minutes, seconds = (int(found[unit] or 0) for unit in "dhms")
            elapsed_s = ((24 * days + hours) * 60 + minutes) * 60 + seconds
            yield _Reading("elapsed", (_step(found["all"]), 0, done), number, max(elapsed_s, 0.5) / done)
        if _SUMMARY in text:
            yield self._summary(dict(re.findall(r"'(\w+)': '?([^,'}]+)", text[text.index(_SUMMARY) :])), number)
        if "perf/time_per_step:" in text:
            raise _Unusable("a step of reinforcement learning generates answers, which is not priced")

    def _summary(self, values: Mapping[str, str], number: int) -> _Reading:
        """What Hugging Face's Trainer prints at the end; the bar before it says how many steps that were."""
        if count := self.now.bar_steps:
            return _Reading("summary", (count,), number, _number(values["train_runtime"]) / count)
        rates: tuple[tuple[str, Per], ...] = (
            ("train_steps_per_second", "step"),
            ("train_samples_per_second", "sample"),
        )
        for name, per in rates:
            # A rate with two or three decimals is too coarse for a slow step; a step has many samples.
            if len(re.sub(r"^[0.]+|\D", "", rate := values.get(name, "0"))) >= _PRECISE:
                return _Reading("summary", (0,), number, 1.0 / _number(rate), per)
        rate = values.get(rates[0][0], "0")
        raise _Unusable(f"{rate} steps per second is too coarse for a step's time, and no bar counts the steps")

    def _time(self, found: re.Match[str], number: int) -> float:
        """Seconds of a printed time or rate; a unit that is not known is a problem of the whole file."""
        said = found.groupdict()
        if "rate" in said:
            return 1.0 / _number(said["rate"])
        unit = (said.get("unit") or "").strip()
        scale = _UNITS.get(unit.lower())
        if scale is None:
            words = f"in {said['unit']!r}, which is no unit of time" if said["unit"] else "without its unit"
            self.problems.append(Problem("", f"states a step's time {words}; known are {', '.join(_UNITS)}", number))
        return _number(said["time"]) * (scale or math.nan)

    def _mllog(self, text: str, number: int) -> None:
        """A line of MLPerf: batch and sequence, step times as such, or blocks of samples between two clock times."""
        try:
            event = json.loads(text[text.index("{") :])
            key, value, about = str(event["key"]), event["value"], dict(event["metadata"] or {})
            time_ms = read_number(event["time_ms"])
        except (KeyError, TypeError, RecursionError, json.JSONDecodeError):
            self.now.left_out.append((number, "the MLPerf event is truncated"))
            return
        except ValueError as error:
            self.now.left_out.append((number, f"the MLPerf event: {error}"))
            return
        if key in {"init_start", "cache_clear"} and self.now.latest_ms <= time_ms:
            self._begin()
        if key in {"global_batch_size", "max_sequence_length", "gradient_accumulation_steps"}:
            self._state(key, str(value), number)
        elif key == "tracked_stats" and isinstance(value, dict) and "train_step_time" in value:
            done = about.get("samples_count", about.get("step", number))
            self._take("train_step_time", str(value["train_step_time"]), _whole(done, number), number)
        elif key in {"block_start", "block_stop"}:
            self.now.latest_ms = max(self.now.latest_ms, time_ms)
            self.now.blocks.append((time_ms, _whole(about.get("samples_count"), -1), key, number))

    def _take(self, kind: str, value: str, step: int, number: int, *, per: Per = "step") -> None:
        try:
            # Of steps with the same count of samples, as Megatron-Bridge logs them, each line is one.
            self.now.readings.append(_Reading(kind, (step, number), number, _number(value), per))
        except _Unusable as error:
            self.now.left_out.append((number, str(error)))

    def trainer_state(self, text: str) -> None:
        """trainer_state.json of Hugging Face's Trainer, whose last entry has the time of the whole run."""
        try:
            state = json_of(text)
            entry = next(one for one in reversed(state["log_history"]) if "train_runtime" in one)
            line = text[: text.rindex('"train_runtime"')].count("\n") + 1
            time = _number(str(entry["train_runtime"])) / _number(str(entry.get("step", state["global_step"])))
        except StopIteration:
            self.problems.append(Problem("log_history", "has no train_runtime: the run had not ended", 1))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            place = getattr(error, "lineno", None)
            self.problems.append(Problem("", f"is no complete trainer_state.json: {error}", place))
        else:
            self.now.readings.append(_Reading("summary", (1,), line, time))

    def results(self, text: str) -> None:
        """all_results.json and train_results.json of Hugging Face's Trainer: time and rates of the whole run."""
        try:
            values = {name: str(value) for name, value in json_of(text).items()}
            line = text[: text.index('"train_runtime"')].count("\n") + 1
            self.now.readings.append(self._summary(values, line))
        except (ValueError, AttributeError, RecursionError) as error:
            self.problems.append(Problem("", f"states no step's time: {error}", getattr(error, "lineno", 1)))

    def metrics_csv(self, text: str) -> None:
        """metrics.csv of Lightning: NeMo's column of step times, or the clock of its ThroughputMonitor."""
        table = csv.DictReader(io.StringIO(text, newline=""))
        clocks: list[tuple[int, float, int]] = []
        try:
            for row in table:
                number = table.line_num
                timing = row.get("train_step_timing in s") or ""
                if timing:
                    self._take("timing", timing, _whole(row.get("step"), number), number)
                if row.get("train/time") and row.get("train/batches"):
                    clocks.append((_whole(row["train/batches"], 0), _number(row["train/time"]), number))
        except (csv.Error, _Unusable) as error:
            self.problems.append(Problem("", str(error), table.line_num))
        for (first, start_s, _), (last, end_s, number) in pairwise(clocks):
            if last > first:
                self._take("clock", str((end_s - start_s) / (last - first)), last, number)

    def runs(self) -> tuple[LoggedRun, ...]:
        """The runs found; DocumentError with what is wrong if there is none, or a unit is not known."""
        problems = list(self.problems)
        for segment in self.segments:
            segment.readings += _block_readings(segment.blocks)
        logs = [one.saving for one in self.segments]
        found = [
            replace(run, saved=(one.saving, before))
            for one, before in zip(self.segments, (None, *logs), strict=False)
            if not problems and (run := _run(self.path, one)) is not None
        ]
        if not found and not problems:
            said = {words: line for one in reversed(self.segments) for line, words in reversed(one.left_out)}
            problems = [Problem("", words, line) for words, line in reversed(said.items())] or [
                Problem("", "holds no line that states a step's time", 1)
            ]
        if problems:
            raise DocumentError(self.path, problems)
        return tuple(found)


def _block_readings(ends: list[tuple[float, int, str, int]]) -> Iterator[_Reading]:
    """Time per sample of each block; its samples are the difference of the counts, or the count if that stays."""
    found: list[tuple[int, _Reading]] = []
    began: tuple[float, int] | None = None
    for time_ms, count, key, line in sorted(ends):
        if key == "block_start":
            # A repeated start is another rank's; a different one follows a stop that the log lost.
            began = began if began is not None and began[1] == count else (time_ms, count)
        elif began is not None:
            samples = count - began[1] if count != began[1] else count
            if began[1] >= 0 and samples > 0 and time_ms > began[0]:
                time_s = (time_ms - began[0]) / 1e3 / samples
                found.append((samples, _Reading("block", (int(time_ms),), line, time_s, "sample")))
            began = None
    # A block of another size spans lost lines.
    usual = statistics.mode(samples for samples, _ in found) if found else 0
    yield from (reading for samples, reading in found if samples == usual)


def _whole(value: object, default: int) -> int:
    try:
        return int(read_number(value))
    except ValueError:
        return default


def _is_metrics_csv(text: str) -> bool:
    names = text.lstrip("\ufeff").split("\n", 1)[0].strip().split(",")
    return "step" in names and bool({"train_step_timing in s", "train/time"} & set(names))


# From lines to runs.


def _run(path: str, segment: _Segment) -> LoggedRun | None:
    """A run of lines with one layout; None if they state no time."""
    kinds = {one.kind for one in segment.readings}
    present = [one for one in _KINDS if one.name in kinds]
    if not present:
        return None
    bars = {one.step for one in segment.readings if one.kind == "bar"}
    found = present[len(present) > 1 and present[0].name == "bar" and len(bars) < FEWEST_BARS]
    kind = found.name
    others = kinds - {kind}
    assumed = [f"step times are those of {kind!r} lines; {', '.join(sorted(others))} is not used"] if others else []
    readings, words = _steps(kind, segment)
    software, more = _software(found, kinds, segment.arguments)
    kept, outliers, wrong = _level(readings, mean=bool(found.mean))
    if wrong:
        segment.left_out.append((readings[-1].line, wrong))
        return None
    return LoggedRun(
        path=path,
        software=software,
        lines=(min(one.line for one in readings), max(one.line for one in readings)),
        columns=columns_of(segment.arguments),
        times_s=tuple(one.time_s for one in kept),
        per=readings[0].per,
        left_out=(*outliers, *segment.left_out),
        assumed=(*assumed, *words),
        taken_for=tuple(more),
        flops=statistics.median(one.flops for one in kept),
        arguments=segment.arguments,
    )


def _steps(kind: str, segment: _Segment) -> tuple[list[_Reading], list[str]]:
    """Readings of one kind in order of their steps, each step once, whichever rank printed it."""
    first: dict[tuple[int, ...], _Reading] = {}
    for one in segment.readings:
        if one.kind == kind and not math.isnan(one.time_s):
            first.setdefault(one.step, one)
    found = [first[step] for step in sorted(first)]
    if kind == "epoch bar":
        return _of_epochs(found), ["times are means from a fifth of an epoch to its end; a batch is taken for a step"]
    if kind in ("swift rate", "swift time", "elapsed"):
        if kind != "elapsed":
            found = [replace(one, step=(one.step[1], 0, one.step[0])) for one in found]
        return _of_epochs(found), ["the time is a mean from a fifth of the run to its last line"]
    if kind == "bar":
        # Evaluation and other loops have bars of their own, shorter than training's.
        largest = max(bar.step[0] for bar in found)
        words = "step times are the smoothed ones of the longest progress bar, taken for training's"
        return [bar for bar in found if bar.step[0] == largest], [words]
    if kind == "torchtune":
        return found, ["the log counts tokens with a label alone: with masked prompts a step is shorter than it says"]
    if kind == "summary":
        return found, ["the time is the mean of a whole run: warm-up, evaluation and checkpoints are in it"]
    return found, []


def _of_epochs(bars: list[_Reading]) -> list[_Reading]:
    """One time for each epoch of lines that print the mean time since it began, as Lightning's bars do.

    Their steps are how many an epoch has, its number, and how many are done.
    """
    largest = max(bar.step[0] for bar in bars)
    epochs: dict[int, list[_Reading]] = {}
    for bar in bars:
        if bar.step[0] == largest and bar.step[2]:
            epochs.setdefault(bar.step[1], []).append(bar)
    found = []
    for epoch in epochs.values():
        last = epoch[-1]
        start = next(bar for bar in epoch if bar.step[2] >= WARM_UP_SHARE * last.step[2])
        before = start.step[2] if start is not last else 0
        time = (last.step[2] * last.time_s - before * start.time_s) / (last.step[2] - before)
        if time > 0:
            found.append(replace(last, time_s=time))
    return found or bars


def _deviation(times_s: Sequence[float]) -> float:
    """Standard deviation by the median absolute deviation, s."""
    middle = statistics.median(times_s)
    return _DEVIATION_OF_MAD * statistics.median(abs(time - middle) for time in times_s)


def _level(readings: Sequence[_Reading], *, mean: bool) -> tuple[list[_Reading], list[LeftOut], str]:
    """Steps after warm-up without outliers, and these; and why they give no step time, "" where they do.

    mean: one of them may stand alone.
    """
    times, warmup = [one.time_s for one in readings], 0
    if len(times) > FEW_STEPS:
        most = max(1, int(len(times) * WARM_UP_SHARE))
        level = WARM_UP_FACTOR * statistics.median(times[most:])
        warmup = max(1, next((number for number, time in enumerate(times[:most]) if time <= level), most))
    times = times[warmup:]
    middle = statistics.median(times)
    limit = max(OUTLIER_DEVIATIONS * _deviation(times), OUTLIER_SHARE * middle)
    kept, outliers = [], []
    for one in readings[warmup:]:
        if abs(one.time_s - middle) <= limit:
            kept.append(one)
        else:
            outliers.append((one.line, f"step {one.step[-1]} took {one.time_s / middle:.2f} times the median"))
    if len(times) == 1 and not mean:
        return kept, outliers, "only one step is left, which may be one of warm-up"
    near = sum(abs(time / middle - 1.0) < WARM_UP_FACTOR - 1.0 for time in times)
    return kept, outliers, "" if 2 * near > len(times) else f"the times of {len(times)} steps are not level"


_OF_CORE = (
    (("of_swift",), "ms-swift, whose lines these are, trains by it"),
    (("of_primus",), "Primus, whose lines these are, trains by it"),
    # Megatron-LM prints both since its releases of 2023 and 2024.
    (("context_parallel_size", "of_core"), "the log has context parallelism or a time before each step"),
)
"""Arguments that only what trains by Megatron-Core prints, and how that is said."""


def _software(kind: _Kind, kinds: Set[str], arguments: Arguments) -> tuple[str, list[str]]:
    """Software that printed lines of a kind, and assumptions."""
    if kind.name == "tps":
        switches = [arguments[name] for name in ("compile", "compile.enable", "training.compile") if name in arguments]
        if any(stated.value.lower() in {"true", "compiling"} for stated in switches):
            return "torchtitan (compile)", []
        return "torchtitan (eager)", [] if switches else ["not compiled: the log does not say that blocks are"]
    if kind.name in {"iter time", "samples"}:
        stage = columns_of(arguments).get("zero_stage")
        return (f"DeepSpeed ZeRO-{stage.value}" if stage else "DeepSpeed"), []
    if "Step Time" in kinds:
        return "Megatron-Bridge", []
    if kind.software:
        return kind.software, []
    if arguments.keys() & {"zero_stage", "zero_optimization.stage", "consumed_tokens"}:
        return "Megatron-DeepSpeed", []
    engine = arguments.get("transformer_impl")
    if "tflops_per_gpu" in arguments or (engine is not None and engine.value == "transformer_engine"):
        return "Megatron-Core", ["Megatron-Core, since the log has its TFLOP/s or Transformer Engine"]
    balanced = "load_balancing_loss" in arguments
    if balanced or columns_of(arguments).get("experts", Stated(1, 0)).value > 1:
        return "Megatron-Core", ["Megatron-Core, since the log has experts"]
    if told := next((words for marks, words in _OF_CORE if {*marks} & arguments.keys()), ""):
        return "Megatron-Core", [f"Megatron-Core, since {told}"]
    return "Megatron-LM", ["Megatron-LM, since the log names neither Megatron-Core, NeMo, torchtitan nor DeepSpeed"]
