"""Step times of the runtime, of FSDP2 and of DTensor tensor parallelism + FSDP2, side by side on this host.

python -m benchmarks.runtime_steps                        # 4 and 2 ranks, fp32 and bf16
python -m benchmarks.runtime_steps --ranks 4 --precision fp32 --runs 9

First every grid of the runtime is measured, then the best of them against the others, in turn, round by
round. Times are medians; a ratio is the median over rounds of the ratio within a round, so that a busy
spell of the host falls on all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch._dynamo  # so that no forked rank has to: torch's AdamW asks for it

from axonn_tune.grid import AXES, Grid, factorizations
from axonn_tune.specs.catalog import load_model
from benchmarks.console import stdout_console
from benchmarks.contenders import Contender, ExpertPeer, Job, Ours, Peer, PipelinePeer, initial_weights
from benchmarks.ranks import Ranks, Step

WARM_UP_STEPS = 3
"""Not timed; their losses are compared."""
STEPS_A_ROUND = 3
SEARCH_ROUNDS = 2
AGREEMENT = {"fp32": 1e-5, "bf16": 2e-2}
"""Largest relative difference of the first losses; more means that contenders train different models."""


@dataclass(frozen=True)
class Figures:
    """One contender; seconds a step. ratio: to the first contender; rank_cpu: of a rank, Python's thread and Gloo's."""

    name: str
    step_s: float
    fastest_round_s: float
    slowest_round_s: float
    ratio: float
    thread_cpu_s: float
    gloo_cpu_s: float


@dataclass(frozen=True)
class Comparison:
    """One job's figures; the runtime on its best grid comes first."""

    job: Job
    search: list[Figures]
    figures: list[Figures]
    losses_agree_to: float


def grids(world: int) -> list[Grid]:
    """Every grid of a world."""
    return [Grid(int(x), int(y), int(z), int(data)) for x, y, z, data in factorizations(world)]


def candidates(job: Job) -> list[Ours]:
    """The runtime on every grid; where weights are split over z, gathered once a step and twice.

    Experts are whole on every rank of z and data, or each has its share of them.
    """
    every = grids(job.world)
    if job.model.has_experts:
        folded = (one for one in grids(job.world) if one.z * one.data > 1)
        every += [Grid(one.x, one.y, one.z, one.data, expert=one.z * one.data) for one in folded]
    return [Ours(grid, kept=kept) for grid in every for kept in (True, False) if kept or grid.z > 1]


def peers(world: int) -> list[Contender]:
    """What the runtime is held against."""
    found: list[Contender] = [Peer(world), Peer(world, keep=True), Peer(1, replicate=world)]
    for tensor in range(2, world + 1):
        if world % tensor == 0:
            found.append(Peer(world // tensor, tensor=tensor))
    return found


def same_layouts(world: int) -> list[Contender]:
    """The runtime laid out as FSDP2, and as tensor parallelism with FSDP2."""
    return [Ours(Grid(z=world)), Ours(Grid(z=world), kept=False), Ours(Grid(x=2, z=world // 2))]


def pipelines(job: Job) -> list[Contender]:
    """A stage on each rank, of the runtime and of torch, where each has layers and a micro-batch: backward passes whole
    or split, one part of the model a rank or two."""
    if job.world > min(job.model.layers, job.global_batch):
        return []
    grid, count = Grid(pipeline=job.world, order=("pipeline", *AXES)), job.global_batch
    found: list[Contender] = [Ours(grid, micro_batches=count), PipelinePeer(count)]
    found += [Ours(grid, micro_batches=count, order="zb1p"), PipelinePeer(count, "InterleavedZeroBubble")]
    if 2 * job.world <= job.model.layers and count % job.world == 0:
        found += [Ours(grid, micro_batches=count, chunks=2), PipelinePeer(count, "Interleaved1F1B", 2)]
        found += [Ours(grid, micro_batches=count, chunks=2, order="zb1p")]
        found += [PipelinePeer(count, one, 2) for one in ("InterleavedZeroBubble", "ZBVZeroBubble")]
    return found


def measure(
    job: Job, contenders: Sequence[Contender], weights: Mapping[str, torch.Tensor], *, rounds: int
) -> tuple[list[Figures], float]:
    """Figures of contenders that take turns, and how far apart their first losses are."""
    with ExitStack() as stack:
        ranks = [_start(job, one, weights, stack) for one in contenders]
        first = [[step.loss for step in one.run(WARM_UP_STEPS)] for one in ranks]
        timed: list[list[list[Step]]] = [[] for _ in ranks]
        for number in range(rounds):
            # Another begins each round, so that none always follows the same.
            for turn in range(len(ranks)):
                place = (turn + number) % len(ranks)
                timed[place].append(ranks[place].run(STEPS_A_ROUND))
    found = [_figures(one.name, mine, timed[0]) for one, mine in zip(contenders, timed, strict=True)]
    return found, max(max(_apart(first[0], losses)) for losses in first)


def _start(job: Job, contender: Contender, weights: Mapping[str, torch.Tensor], stack: ExitStack) -> Ranks:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    ranks = Ranks(job.world, lambda: contender.build(job, weights), folder)
    stack.callback(ranks.close)
    return ranks


def _apart(first: Sequence[float], second: Sequence[float]) -> Iterator[float]:
    return (abs(mine - theirs) / theirs for mine, theirs in zip(second, first, strict=True))


def _figures(name: str, rounds: list[list[Step]], base: list[list[Step]]) -> Figures:
    medians, base_medians = (
        [statistics.median(step.wall_s for step in one) for one in all_] for all_ in (rounds, base)
    )
    steps = [step for one in rounds for step in one]
    return Figures(
        name=name,
        step_s=statistics.median(step.wall_s for step in steps),
        fastest_round_s=min(medians),
        slowest_round_s=max(medians),
        ratio=statistics.median(mine / theirs for mine, theirs in zip(medians, base_medians, strict=True)),
        thread_cpu_s=statistics.median(step.thread_s for step in steps),
        gloo_cpu_s=statistics.median(step.others_s for step in steps),
    )


def compare(job: Job, *, rounds: int, grid: Grid | None = None, stages: bool = False) -> Comparison:
    """Find the runtime's best grid unless given, then measure it, without overlap too, against everything else; stages:
    against pipelines alone."""
    weights = initial_weights(job)
    search: list[Figures] = []
    best = Ours(grid or Grid(data=job.world))
    if grid is None and not stages:
        every = candidates(job)
        search, _ = measure(job, every, weights, rounds=SEARCH_ROUNDS)
        best = every[min(range(len(every)), key=lambda number: search[number].step_s)]
    chosen: list[Contender] = [best, best.without_overlap()]
    if stages:
        chosen = [best, *pipelines(job)]
    elif job.model.has_experts:
        same = Ours(Grid(z=job.world, expert=job.world))
        chosen += [*([same] if same != best else []), ExpertPeer()]
        chosen += [ExpertPeer(deepspeed=True)] if find_spec("deepspeed") else []
    else:
        chosen += [one for one in same_layouts(job.world) if one != best]
        chosen += [*peers(job.world), *pipelines(job)]
    figures, apart = measure(job, chosen, weights, rounds=rounds)
    return Comparison(job, search, figures, apart)


def show(found: Comparison) -> None:
    """Print one job's table."""
    from rich.table import Table

    console, job = stdout_console(), found.job
    title = f"{job.model_name}, {job.precision}, {job.world} ranks, {job.global_batch} sequences of {job.sequence}"
    names = ("", "step, s", "rounds, s", "ratio", "Python CPU, s", "Gloo CPU, s")
    table = Table(*names, title=title)
    for one in found.figures:
        spread = f"{one.fastest_round_s:.3f} to {one.slowest_round_s:.3f}"
        cpu = f"{one.thread_cpu_s:.3f}", f"{one.gloo_cpu_s:.3f}"
        table.add_row(one.name, f"{one.step_s:.3f}", spread, f"{one.ratio:.2f}", *cpu)
    console.print(table)
    if found.search:
        order = sorted(found.search, key=lambda one: one.step_s)
        said = ", ".join(f"{one.name.removeprefix('runtime ')} {one.step_s:.3f}" for one in order)
        console.print(f"Every grid of the runtime, step, s: {said}.", markup=False)
    console.print(f"Losses of the first {WARM_UP_STEPS} steps agree to {found.losses_agree_to:.1e}, relatively.\n")


def host() -> str:
    """Where this was measured, and how busy it was."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    versions = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{cores} cores, load average {load:.1f} at the start, {versions}"


def _grid(text: str) -> Grid:
    x, y, z, data = (int(size) for size in text.split(","))
    return Grid(x, y, z, data)


def main() -> int:
    """Run the benchmark; 1 if contenders train different models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7, help=f"rounds of {STEPS_A_ROUND} steps of each contender")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--ranks", type=int, action="append", help="may be repeated; default: 4 and 2")
    parser.add_argument("--precision", choices=tuple(AGREEMENT), action="append", help="default: both")
    parser.add_argument("--grid", type=_grid, metavar="X,Y,Z,DATA", help="the runtime's; default: measure all first")
    parser.add_argument("--stages", action="store_true", help="schedules of pipeline stages alone")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--seq", type=int, help="tokens in a sequence; default: the model's")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    sequence = chosen.seq or load_model(chosen.model).document.defaults.sequence_length
    where, found = host(), []
    for world in [chosen.grid.world] if chosen.grid else chosen.ranks or (4, 2):
        for precision in chosen.precision or tuple(AGREEMENT):
            job = Job(chosen.model, precision, chosen.batch, sequence, world)
            found.append(compare(job, rounds=chosen.runs, grid=chosen.grid, stages=chosen.stages))
            if chosen.format == "table":
                show(found[-1])
    if chosen.format == "json":
        print(json.dumps({"host": where, "comparisons": [asdict(one) for one in found]}, indent=2))
    else:
        stdout_console().print(where)
    return int(any(one.losses_agree_to > AGREEMENT[one.job.precision] for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
