"""What a run measured beside what was predicted, combined over all ranks once training is over."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from axonn_tune import __version__
from axonn_tune.program.flops import model_flops, step_tokens
from axonn_tune.runtime.in_flight import ONE_CLOCK, SHARED, running_system, shares_s
from axonn_tune.runtime.ledger import Entry
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.timing import StepTimes
from axonn_tune.specs.launch import Launch, PredictedTerm
from axonn_tune.specs.results import SHORTEST, PredictionTarget, Quantity, RunSite, Summary, SummaryTerm
from axonn_tune.units import flops_per_s


@dataclass(frozen=True)
class TimedStep:
    """One step of this rank, with the times of its collectives."""

    step_s: float
    times: StepTimes


@dataclass(frozen=True)
class Machine:
    """This rank's device, and how its memory is measured."""

    device: torch.device
    name: str
    memory_bytes: int
    memory_convention: str


@dataclass(frozen=True)
class TermMeans:
    """All calls of one collective: means over steps and ranks, s. seconds: what the network took, see `in_flight`."""

    entry: Entry
    count: int
    seconds: float
    elapsed_s: float
    exposed_s: float


def summarise(launch: Launch, mesh: Mesh, machine: Machine, steps: Sequence[TimedStep], *, warmup: int) -> Summary:
    """The summary of a run from the last timed `steps` of every rank; all ranks must call this together.

    A collective that waits for a late rank takes longer for those that were early, which says nothing
    about the network: `in_flight` says what counts instead.
    """
    durations_s = _mean_over_ranks(torch.tensor([one.step_s for one in steps], dtype=torch.float64), mesh, machine)
    chosen = middle_half(durations_s.tolist())
    step_s = float(durations_s[chosen].mean())
    one_clock = _share_a_clock(mesh, steps[0].times)
    terms = _term_means(launch, mesh, machine, [steps[number].times for number in chosen], one_clock=one_clock)
    exposed_s, predicted = sum(term.exposed_s for term in terms), launch.predicted
    memory = _over_ranks(
        torch.tensor([machine.memory_bytes], dtype=torch.float64), mesh, machine, dist.ReduceOp.MAX
    ).item()
    peak = flops_per_s(predicted.peak_tflops) * mesh.grid.world
    return Summary(
        schema="axonn-tune/summary/1",
        name=launch.name,
        predicted_for=PredictionTarget(
            machine=predicted.machine, accelerator=predicted.accelerator, cost=predicted.cost
        ),
        ran_on=_ran_on(launch, mesh, machine),
        timed_steps=len(steps),
        averaged_steps=len(chosen),
        warmup_steps=warmup,
        step_s=Quantity(predicted=predicted.iteration_s, measured=step_s),
        compute_s=Quantity(predicted=predicted.compute_s, measured=max(step_s - exposed_s, 0.0)),
        communication_s=Quantity(predicted=predicted.communication_s, measured=sum(term.seconds for term in terms)),
        exposed_communication_s=Quantity(predicted=predicted.exposed_communication_s, measured=exposed_s),
        memory_bytes=Quantity(predicted=predicted.memory_bytes, measured=float(memory)),
        memory_convention=machine.memory_convention,
        tokens_per_s=step_tokens(launch.workload) / step_s,
        mfu=model_flops(launch.model, launch.workload) / (step_s * peak),
        seconds_convention=ONE_CLOCK + SHARED if one_clock else SHORTEST,
        terms=tuple(_beside(launch, mesh, term) for term in terms),
    )


def middle_half(durations_s: Sequence[float]) -> list[int]:
    """Which steps took neither among the quarter of least nor among the quarter of most time."""
    order = sorted(range(len(durations_s)), key=lambda number: durations_s[number])
    quarter = len(order) // 4
    return sorted(order[quarter : len(order) - quarter])


def _share_a_clock(mesh: Mesh, step: StepTimes) -> bool:
    """Whether all ranks' times are by the clock of one host."""
    mine = running_system() if step.host_s is not None else ""
    systems: list[str] = [mine] * mesh.grid.world
    if mesh.grid.world > 1:
        dist.all_gather_object(systems, mine)
    return bool(mine) and len(set(systems)) == 1


def _term_means(
    launch: Launch, mesh: Mesh, machine: Machine, steps: Sequence[StepTimes], *, one_clock: bool
) -> list[TermMeans]:
    """The terms of a step, each call of which every rank has in the same place."""
    entries = [call.entry for call in steps[0].calls]
    elapsed_s = torch.tensor([[call.seconds for call in one.calls] for one in steps], dtype=torch.float64)
    exposed_s = torch.tensor([[call.exposed_s for call in one.calls] for one in steps], dtype=torch.float64)
    if one_clock:
        seconds = _in_flight_s(launch, mesh, machine, steps)
    else:
        seconds = _over_groups(elapsed_s, entries, mesh, machine, dist.ReduceOp.MIN)
    names = list(dict.fromkeys(entries))
    calls = [[number for number, entry in enumerate(entries) if entry == name] for name in names]
    means = torch.stack([seconds, elapsed_s, exposed_s]).mean(1)
    sums = torch.tensor([[float(row[columns].sum()) for columns in calls] for row in means], dtype=torch.float64)
    return [
        TermMeans(name, len(columns), *values)
        for name, columns, values in zip(names, calls, _mean_over_ranks(sums, mesh, machine).T.tolist(), strict=True)
    ]


def _in_flight_s(launch: Launch, mesh: Mesh, machine: Machine, steps: Sequence[StepTimes]) -> torch.Tensor:
    """Seconds of each call of each step, by the clock that all ranks share. Shape (steps, calls)."""
    entries = [call.entry for call in steps[0].calls]
    host_s = torch.tensor([[one.host_s] for one in steps], dtype=torch.float64)
    began_s = torch.tensor([[call.began_s for call in one.calls] for one in steps], dtype=torch.float64)
    ended_s = torch.tensor([[call.began_s + call.seconds for call in one.calls] for one in steps], dtype=torch.float64)
    both_s = torch.stack([began_s, ended_s]) + host_s
    began_s, ended_s = _over_groups(both_s, entries, mesh, machine, dist.ReduceOp.MAX)
    lanes = [term.tier if (term := _predicted(launch, entry)) else entry.axis for entry in entries]
    rows = [list(zip(*row, strict=True)) for row in zip(began_s.tolist(), ended_s.tolist(), strict=True)]
    return torch.tensor([shares_s(row, lanes) for row in rows], dtype=torch.float64)


def _over_groups(
    values: torch.Tensor, entries: Sequence[Entry], mesh: Mesh, machine: Machine, operation: dist.ReduceOp.RedOpType
) -> torch.Tensor:
    """A value of each call combined over the call's own group. Shape of values: (…, calls)."""
    found = values.clone()
    for axis in dict.fromkeys(entry.axis for entry in entries):
        columns = [number for number, entry in enumerate(entries) if entry.axis == axis]
        found[..., columns] = _over_ranks(found[..., columns], mesh, machine, operation, group=mesh.groups[axis])
    return found


def _over_ranks(
    values: torch.Tensor,
    mesh: Mesh,
    machine: Machine,
    operation: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Values combined over a group, or over all ranks; not part of a step, so not in the ledger."""
    if mesh.grid.world == 1:
        return values
    moved = values.to(machine.device).contiguous()
    dist.all_reduce(moved, op=operation, group=group)
    return moved.cpu()


def _mean_over_ranks(values: torch.Tensor, mesh: Mesh, machine: Machine) -> torch.Tensor:
    return _over_ranks(values, mesh, machine, dist.ReduceOp.SUM) / mesh.grid.world


def _beside(launch: Launch, mesh: Mesh, measured: TermMeans) -> SummaryTerm:
    entry, predicted = measured.entry, _predicted(launch, measured.entry)
    return SummaryTerm(
        op=entry.op,
        axis=entry.axis,
        phase=entry.phase,
        layer=entry.layer,
        count=measured.count,
        bytes=entry.size_bytes,
        group=mesh.size(entry.axis),
        tier=predicted.tier if predicted else None,
        predicted_s=predicted.seconds if predicted else None,
        measured_s=measured.seconds,
        elapsed_s=measured.elapsed_s,
        predicted_exposed_s=predicted.exposed_s if predicted else None,
        measured_exposed_s=measured.exposed_s,
    )


def _predicted(launch: Launch, entry: Entry) -> PredictedTerm | None:
    """The launch config's term of the same name and size."""
    for term in launch.predicted.terms:
        if (term.op, term.axis, term.phase, term.layer, round(term.bytes)) == (*entry.term, entry.size_bytes):
            return term
    return None


def _ran_on(launch: Launch, mesh: Mesh, machine: Machine) -> RunSite:
    return RunSite(
        device=machine.name,
        host=socket.gethostname(),
        ranks=mesh.grid.world,
        backend=launch.backend,
        torch_version=str(torch.__version__),
        tool_version=__version__,
    )
