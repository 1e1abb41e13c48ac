"""Metrics of a run: JSON lines per rank, one line a step for people, TensorBoard, traces, and a summary of all ranks.

The summary compares predicted with measured times. The network time of a collective follows from the times of all ranks
of its group: an early rank waits for the late ones, and a late rank finds part of the work done. The collective's time
is from when the last rank enters it to when the last rank has its result. That needs one clock, which the processes of
one host share. Ranks of several hosts, and GPUs, have none: there the shortest time that any rank saw counts for each
call.

A message between pipeline stages counts where it is sent. A longer wait is for its sender, which is part of the bubble.
Terms are those of the stage that the prediction's are of.

On GPUs, where few steps are timed, the step's time is that of the others: see `RunMeasurements.summary`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

import torch
import torch.distributed as dist

from axonn_tune.errors import count_in
from axonn_tune.files import write_text_atomically
from axonn_tune.program.dimensions import MFU_CONVENTION, model_flops, step_tokens
from axonn_tune.runtime.clocks import StepTimes, TimedCall, step_spans
from axonn_tune.runtime.devices import peak_memory_bytes
from axonn_tune.runtime.ledger import LedgerEntry, of_router, program_of
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.optimizer import StepResult
from axonn_tune.specs.launch import CollectiveTerm, Launch
from axonn_tune.specs.results import SHORTEST, SUMMARY_NAME, PredictionTarget, Site, Summary, launch_pairs
from axonn_tune.specs.traces import TRACE_SCHEMA, Process, term_name, trace_text
from axonn_tune.units import counted, flops_per_s, show_bytes, show_seconds
from axonn_tune.vocabulary import VERSION

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Gathered = TypeVar("Gathered")
Mean = TypeVar("Mean", float, torch.Tensor)
WARMUP_STEPS = 2
"""Warm-up steps of each run, also of a resumed one: allocation, first connections."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Names the host and its running kernel, whose processes share a clock."""

ONE_CLOCK = "of each call, from when the last rank of its group entered it to when the last had its result"
SHARED = ", shared by calls in flight at once on one network level"


def shares_s(intervals_s: Sequence[tuple[float, float]], links: Sequence[Hashable]) -> list[float]:
    """Seconds of each call: every moment is divided equally among the calls in flight on its link.

    intervals_s: begin and end of each call, s; links: what each shares with others, such as a network level.
    Summed over the calls of a link it is the time in which any was in flight, as in the prediction, where
    calls of one network level follow each other.
    """
    found = [0.0] * len(intervals_s)
    for link in dict.fromkeys(links):
        calls = [call for call, its in enumerate(links) if its == link]
        moments = sorted({moment for call in calls for moment in intervals_s[call]})
        waiting = sorted(calls, key=lambda call: -intervals_s[call][0])
        flying: list[int] = []
        for begin_s, end_s in pairwise(moments):
            while waiting and intervals_s[waiting[-1]][0] <= begin_s:
                flying.append(waiting.pop())
            flying = [call for call in flying if intervals_s[call][1] > begin_s]
            for call in flying:
                found[call] += (end_s - begin_s) / len(flying)
    return found


@dataclass(frozen=True)
class RunMeasurements:
    """What all ranks of a run have measured; every rank must call each method together with the others.

    What is exchanged for it is not part of a step, so not in the ledger.
    """

    launch: Launch
    mesh: Mesh
    device: torch.device

    def summary(
        self, steps: Sequence[tuple[float, StepTimes]], untimed_s: Sequence[float], *, memory_bytes: int
    ) -> Summary:
        """The summary of a run from the last timed steps of this rank, with their durations in s.

        A collective that waits for a late rank takes longer for those that were early, which is not network time; the
        module's docstring defines what counts. untimed_s: of the last steps without timing, if any: the step's time is
        theirs, because on GPUs the timing of collectives takes hardware queues from overlap.
        """
        launch, predicted = self.launch, self.launch.predicted
        timed_s, chosen = self._middle_mean([step_s for step_s, _ in steps])
        step_s = self._middle_mean(untimed_s)[0] if untimed_s else timed_s
        clock = _BOOT_ID.read_text() if steps[0][1].host_s is not None and _BOOT_ID.exists() else ""
        one_clock = bool(clock) and len(set(self._from_all(clock))) == 1
        averaged = [steps[number][1] for number in chosen]
        terms = self._terms(averaged, one_clock=one_clock)
        # Timing lengthens only waits.
        exposed_s = max(sum(term.measured_exposed_s[0] for term in terms) - max(timed_s - step_s, 0.0), 0.0)
        idle_s = self._mean_of_stage(sum(one.exposed_s for one in averaged) / len(averaged))
        memory = self._over_ranks(torch.tensor([memory_bytes], dtype=torch.float64), dist.ReduceOp.MAX).item()
        peak = flops_per_s(predicted.peak_tflops) * self.mesh.grid.world
        measured = {
            "step_s": step_s,
            "compute_s": max(timed_s - idle_s, 0.0),
            "communication_s": sum(term.measured_s[0] for term in terms),
            "exposed_communication_s": exposed_s,
            "memory_bytes": float(memory),
        }
        return Summary(
            schema="axonn-tune/summary/2",
            name=launch.name,
            tool_version=VERSION,
            predicted_for=PredictionTarget.from_fields_of(predicted),
            ran_on=Site(
                device=device_name(self.device),
                host=socket.gethostname(),
                ranks=self.mesh.grid.world,
                backend=launch.backend,
                torch_version=str(torch.__version__),
                cores=len(os.sched_getaffinity(0)),
                host_ranks=count_in(os.environ, "LOCAL_WORLD_SIZE", str(self.mesh.grid.world)),
            ),
            timed_steps=len(steps),
            averaged_steps=len(chosen),
            untimed_steps=len(untimed_s),
            warmup_steps=WARMUP_STEPS,
            pairs=launch_pairs(launch).model_copy(update={"measured": measured}),
            memory_convention=memory_convention(self.device),
            tokens_per_s=step_tokens(launch.workload) / step_s,
            mfu=model_flops(launch.model, launch.workload) / (step_s * peak),
            seconds_convention=ONE_CLOCK + SHARED if one_clock else SHORTEST,
            terms=tuple(terms),
        )

    def _middle_mean(self, durations_s: Sequence[float]) -> tuple[float, list[int]]:
        """Mean over ranks and steps, without the fastest and the slowest quarter of these; which are left."""
        sums_s = self._over_ranks(torch.tensor(durations_s, dtype=torch.float64), dist.ReduceOp.SUM)
        means_s = sums_s / self.mesh.grid.world
        order = sorted(range(len(means_s)), key=means_s.tolist().__getitem__)
        quarter = len(order) // 4
        chosen = sorted(order[quarter : len(order) - quarter])
        return float(means_s[chosen].mean()), chosen

    def _terms(self, steps: Sequence[StepTimes], *, one_clock: bool) -> list[CollectiveTerm]:
        """The terms of a step of the predicted stage. Every rank of a stage has its calls in the same order."""
        calls = steps[0].calls
        elapsed_s = torch.tensor([[call.seconds for call in one.calls] for one in steps], dtype=torch.float64)
        exposed_s = torch.tensor([[call.exposed_s for call in one.calls] for one in steps], dtype=torch.float64)
        seconds = self._in_flight_s(steps) if one_clock else self._over_groups(elapsed_s, calls, dist.ReduceOp.MIN)
        messages = [number for number, call in enumerate(calls) if call.edge is not None]
        exposed_s[:, messages] = torch.minimum(exposed_s, seconds)[:, messages]
        # Messages that this rank is sent count where they come from.
        received = torch.tensor(
            [call.edge is not None and call.edge.sender != self.mesh.rank for call in calls], dtype=torch.bool
        )
        counted = torch.tensor([call.counted for call in calls], dtype=torch.bool)
        sent = [seconds.masked_fill(received, 0.0), elapsed_s.masked_fill(received, 0.0), exposed_s]
        means = torch.stack(sent).mean(1)
        mine, sums = list[tuple[LedgerEntry, int]](), list[torch.Tensor]()
        for entry in dict.fromkeys(call.entry for call in calls):
            its = torch.tensor([call.entry == entry for call in calls], dtype=torch.bool)
            mine.append((entry, int((its & counted & ~received).sum())))
            sums.append(means[:, its].sum(1))
        rows = self._mean_of_stage(torch.stack(sums) if sums else torch.zeros(0, 3)).tolist()
        found = list[CollectiveTerm]()
        for (entry, count), (mean_s, mean_elapsed_s, mean_exposed_s) in zip(self._of_stage(mine)[0], rows, strict=True):
            predicted, (op, axis, phase, layer) = self._predicted(entry), entry.term
            term = CollectiveTerm(
                op=op,
                axis=axis,
                phase=phase,
                layer=layer,
                count=count,
                bytes=entry.size_bytes,
                group=self.mesh.size(axis),
                tier=predicted.tier if predicted else None,
                seconds=predicted.seconds if predicted else None,
                exposed_s=predicted.exposed_s if predicted else None,
                measured_s=(mean_s,),
                measured_exposed_s=(mean_exposed_s,),
                elapsed_s=(mean_elapsed_s,),
            )
            found.append(term)
        return found

    def _predicted(self, entry: LedgerEntry) -> CollectiveTerm | None:
        """The launch config's term of the same name and size; where a router decides the size, of the same name."""
        named = [term for term in self.launch.predicted.terms if term.key[:-1] == entry.term]
        routed = entry.op == "dispatch" or of_router(entry.term)
        return next((term for term in named if routed or round(term.bytes) == entry.size_bytes), None)

    def _in_flight_s(self, steps: Sequence[StepTimes]) -> torch.Tensor:
        """Seconds of each call of each step, by the clock that all ranks share. Shape (steps, calls)."""
        calls = steps[0].calls
        host_s = torch.tensor([[one.host_s] for one in steps], dtype=torch.float64)
        began_s = [[call.began_s for call in one.calls] for one in steps]
        ended_s = [[call.began_s + call.seconds for call in one.calls] for one in steps]
        both_s = torch.tensor([began_s, ended_s], dtype=torch.float64) + host_s
        began, ended = self._over_groups(both_s, calls, dist.ReduceOp.MAX).tolist()
        links = [term.tier if (term := self._predicted(call.entry)) else call.entry.axis for call in calls]
        rows = [list(zip(*row, strict=True)) for row in zip(began, ended, strict=True)]
        return torch.tensor([shares_s(row, links) for row in rows], dtype=torch.float64)

    def _over_groups(
        self, values: torch.Tensor, calls: Sequence[TimedCall], operation: dist.ReduceOp.RedOpType
    ) -> torch.Tensor:
        """A value of each call combined over the call's own group. Shape of values: (…, calls)."""
        found = values.clone()
        for axis in dict.fromkeys(call.entry.axis for call in calls if call.edge is None):
            columns = [number for number, call in enumerate(calls) if call.edge is None and call.entry.axis == axis]
            found[..., columns] = self._over_ranks(found[..., columns], operation, self.mesh.groups[axis])
        if self.mesh.grid.pipeline == 1:
            return found
        # Of messages: what both ends saw of each, in its order on its edge.
        messages: dict[object, list[int]] = {}
        for number, call in enumerate(calls):
            if call.edge is not None:
                messages.setdefault(call.edge.name, []).append(number)
        combined = torch.maximum if operation is dist.ReduceOp.MAX else torch.minimum
        for other in self._from_all({name: found[..., its] for name, its in messages.items()}):
            for name in messages.keys() & other.keys():
                found[..., messages[name]] = combined(found[..., messages[name]], other[name])
        return found

    def _over_ranks(
        self, values: torch.Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        """Values combined over a group, or over all ranks."""
        if self.mesh.grid.world == 1:
            return values
        moved = values.to(self.device).contiguous()
        dist.all_reduce(moved, op=operation, group=group)
        return moved.cpu()

    def _from_all(self, mine: Gathered) -> list[Gathered]:
        """Values of each rank."""
        found: list[Gathered] = [mine] * self.mesh.grid.world
        if self.mesh.grid.world > 1:
            dist.all_gather_object(found, mine)
        return found

    def _of_stage(self, mine: Gathered) -> list[Gathered]:
        """Values of each rank of the predicted stage."""
        stage = self.launch.predicted.stage
        return [one for its, one in self._from_all((self.mesh.stage, mine)) if its == stage]

    def _mean_of_stage(self, mine: Mean) -> Mean:
        """Mean of a value over the ranks of the predicted stage."""
        found = self._of_stage(mine)
        return sum(found[1:], found[0]) / len(found)


def device_name(device: torch.device) -> str:
    """A device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {counted(torch.get_num_threads(), 'thread')}"


def memory_convention(device: torch.device) -> str:
    """How the memory of a rank is measured."""
    cuda = device.type == "cuda"
    return "peak of what torch allocated" if cuda else "peak resident set, less that without a model"


_FLUSH_S = 10
"""A killed run loses at most this of TensorBoard's files."""


SCHEMA = "axonn-tune/metrics/1"
WINDOW_STEPS = 32
"""Timed steps, the last ones, that the summary is made from."""

SCALARS = (
    *("loss", "gradient_norm", "learning_rate", "step_s", "tokens_per_s", "mfu", "hfu", "memory_bytes"),
    *("exposed_communication_s", "compute_s"),
)
"""Numbers of a step that TensorBoard gets too."""


@dataclass
class Metrics:
    """Writes one rank's metrics; rank 0 also prints, and writes the summary of all ranks.

    base_bytes: memory of the process before the model, by `resident_bytes`; trace_steps: how many steps after the
    warm-up this rank writes into its trace.
    """

    launch: Launch
    mesh: Mesh
    device: torch.device
    directory: Path
    steps: int
    base_bytes: int = 0
    trace_steps: int = 0
    talk: TextIO = field(default_factory=lambda: sys.stderr)
    _timed: deque[tuple[float, StepTimes]] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _untimed_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW_STEPS))
    _seen: int = 0
    _profiled: bool = False
    _traced: list[tuple[int, StepTimes]] = field(default_factory=list)
    _profiler: torch.profiler.profile | None = None
    _events: SummaryWriter | None = None

    def __post_init__(self) -> None:
        self._needed = model_flops(self.launch.model, self.launch.workload)
        self._executed = program_of(self.launch, stage=self.mesh.stage).executed_flops
        path = self.directory / f"metrics-rank{self.mesh.rank}.jsonl"
        # Line by line, so that the measurements of a killed rank can be read.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        heading = {
            "schema": SCHEMA,
            "tool_version": VERSION,
            "torch_version": str(torch.__version__),
            "run": self.launch.name,
            "host": socket.gethostname(),
            "device": device_name(self.device),
            "rank": self.mesh.rank,
            "coordinates": self.mesh.grid.coordinates(self.mesh.rank),
            "grid": self.launch.grid.model_dump(mode="json"),
            "mfu_convention": MFU_CONVENTION,
            "hfu_convention": "what this rank executes, recompute and padding counted",
            "peak_tflops": self.launch.predicted.peak_tflops,
            "peak_of": self.launch.predicted.accelerator,
            "memory_convention": memory_convention(self.device),
            "warmup_steps": WARMUP_STEPS,
        }
        self._write(heading)

    def begin_step(self) -> None:
        """A step is about to begin; with the first one of a trace torch's profiler starts on a GPU."""
        if self.trace_steps and self._seen == WARMUP_STEPS and self.device.type == "cuda":
            kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
            self._profiler = torch.profiler.profile(activities=kinds)
            self._profiler.start()

    def step(self, step: int, result: StepResult, *, step_s: float, times: StepTimes | None) -> None:
        """Record a step, counted from 1, that took `step_s`, as one line of the file; `times`: of its collectives.

        The loss is the mean over all ranks' tokens. In a step that was not timed, times of collectives are None, and
        there are no terms.
        """
        number = self._seen - WARMUP_STEPS
        self._seen += 1
        # torch's profiler delays all ranks, and the step after a trace waits for its end.
        before, self._profiled = self._profiled, bool(times and times.parts) and self.device.type == "cuda"
        if number >= 0 and times is not None and not self._profiled:
            self._timed.append((step_s, times))
        elif number >= 0 and times is None and not before:
            self._untimed_s.append(step_s)
        # MFU of all ranks and HFU of this one, of the peak that the prediction was made with.
        peak = flops_per_s(self.launch.predicted.peak_tflops) * step_s
        found: dict[str, Any] = {
            "step": step,
            **asdict(result),
            "step_s": step_s,
            "tokens_per_s": step_tokens(self.launch.workload) / step_s,
            "mfu": self._needed / (self.mesh.grid.world * peak),
            "hfu": self._executed / peak,
            "memory_bytes": self._memory_bytes(),
            "warmup": number < 0,
            "exposed_communication_s": times.exposed_s if times else None,
            "compute_s": step_s - times.exposed_s if times else None,
            "terms": times.terms() if times else [],
        }
        self._write(found)
        if self.mesh.rank == 0:
            self._write_events(found)
            self.say(step_line(found, steps=self.steps))
        if times is not None and 0 <= number < self.trace_steps:
            self._traced.append((step, times))
        if self._profiler is not None and number == self.trace_steps - 1:
            self._profiler.stop()

    def _write_events(self, found: dict[str, Any]) -> None:
        """TensorBoard's part of a step, if asked for: in the folder named, else in `tensorboard` beside the metrics.

        Collectives are `seconds/...` and `exposed/...`.
        """
        setting, step = self.launch.metrics.tensorboard, found["step"]
        if not setting:
            return
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter

            folder = setting if isinstance(setting, str) else str(self.directory / "tensorboard")
            # A resumed run continues from its checkpoint: later events of an earlier run are void.
            self._events = SummaryWriter(folder, purge_step=step, flush_secs=_FLUSH_S)
        values = {name: found[name] for name in SCALARS if found[name] is not None}
        for term in found["terms"]:
            name = term_name(term["op"], term["axis"], term["phase"], term["layer"])
            values |= {f"seconds/{name}": term["seconds"], f"exposed/{name}": term["exposed_s"]}
        for name, value in values.items():
            self._events.add_scalar(name, value, step)

    def say(self, line: str) -> None:
        """A line of text."""
        print(line, file=self.talk, flush=True)

    def close(self) -> None:
        """Write the trace, and what was measured after the warm-up against the prediction; all ranks together."""
        if self._timed:
            measured = RunMeasurements(self.launch, self.mesh, self.device)
            summary = measured.summary(self._timed, self._untimed_s, memory_bytes=self._memory_bytes())
            if self.mesh.rank == 0:
                predicted, measured_s = summary.pairs.predicted.get("step_s"), summary.pairs.measured["step_s"]
                expected = "" if predicted is None else f", predicted {show_seconds(predicted)}"
                last = summary.untimed_steps or summary.timed_steps
                self.say(
                    f"step {show_seconds(measured_s)}{expected}; mean of {last - 2 * (last // 4)} of the last "
                    f"{counted(last, 'step')}, excluding outliers and the first {WARMUP_STEPS}; "
                    f"MFU {summary.mfu:.1%} of {summary.predicted_for.accelerator}"
                )
                text = summary.model_dump_json(by_alias=True, indent=2)
                write_text_atomically(self.directory / SUMMARY_NAME, text + "\n")
        elif self.mesh.rank == 0 and 0 < self._seen <= WARMUP_STEPS:
            self.say(
                f"no step after the warm-up of {WARMUP_STEPS}: nothing to compare with the prediction, or to trace"
            )
        if self._events is not None:
            self._events.close()
        self._file.close()
        if self._traced:
            self._write_trace()

    def _write_trace(self) -> None:
        """Write `trace-rank<N>.json`, and `kernels-rank<N>.json` on a GPU."""
        rank = self.mesh.rank
        spans = [span for step, times in self._traced for span in step_spans(step, times)]
        notes = {
            "schema": TRACE_SCHEMA,
            "tool_version": VERSION,
            "run": self.launch.name,
            "host": socket.gethostname(),
            "rank": rank,
            "steps": [step for step, _ in self._traced],
        }
        text = trace_text([Process(f"measured rank {rank}", rank, spans)], notes=notes)
        write_text_atomically(self.directory / f"trace-rank{rank}.json", text)
        if self._profiler is not None:
            if len(self._traced) < self.trace_steps:
                self._profiler.stop()
            self._profiler.export_chrome_trace(str(self.directory / f"kernels-rank{rank}.json"))

    def _memory_bytes(self) -> int:
        return max(peak_memory_bytes(self.device) - self.base_bytes, 0)

    def _write(self, document: dict[str, object]) -> None:
        self._file.write(json.dumps(document, ensure_ascii=False) + "\n")


def step_line(found: dict[str, Any], *, steps: int) -> str:
    """One step as text."""
    return (
        f"step {found['step']}/{steps}  loss {found['loss']:.4f}  grad norm {found['gradient_norm']:.3g}  "
        f"rate {found['learning_rate']:.2e}  {show_seconds(found['step_s'])}  {found['tokens_per_s']:,.0f} tok/s  "
        f"MFU {found['mfu']:.1%}  {show_bytes(found['memory_bytes'])}"
    )
