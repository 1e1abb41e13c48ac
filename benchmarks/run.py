"""What the tuner costs: `python -m benchmarks.run [--runs N] [--format table|json]`.

Whole processes are timed from outside, several times after a warm-up, and set against a bare
interpreter and one that only imports numpy: absolute times say more about the machine than about the
tool. Searches run in a process of their own, pinned to one core, and report their peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

from benchmarks.console import stdout_console

MAIN_JOB = ("--gpus", "1024", "--model", "80b")


@dataclass(frozen=True)
class Case:
    """One search: model, machine, GPU count, global batch, framework; with pipeline stages where it ranks by step."""

    model: str
    machine: str
    gpus: int
    batch: int
    framework: str = "axonn-tune"


CASES = (
    Case("80b", "perlmutter", 1024, 8192),
    Case("80b", "perlmutter", 65_536, 65_536),
    Case("80b", "perlmutter", 1_048_576, 8192),
    Case("80b", "perlmutter", 1_000_000, 1_000_000),
    Case("80b", "perlmutter", 61_440, 368_640),
    Case("80b", "perlmutter", 1024, 8192, "megatron-core"),
)


@dataclass(frozen=True)
class SearchFigures:
    """One search on one core. priced: candidates that fit and were priced to the iteration time."""

    case: Case
    grids: int
    candidates: int
    priced: int
    search_s: float
    priced_per_s: float
    peak_mb: float


def time_process(command: list[str]) -> tuple[float, float]:
    """Wall and CPU time (user and system) of a whole process, s."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall_s, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def process_figures(runs: int) -> dict[str, tuple[float, float]]:
    """Median wall and CPU times of the main job and of what it cannot do without, s: in turn, so that all meet the same
    load, after one round that is not counted."""
    python = sys.executable
    commands = {
        "python -c pass": [python, "-c", "pass"],
        "python -c 'import numpy'": [python, "-c", "import numpy"],
        "axonn-tune --help": [python, "-m", "axonn_tune", "--help"],
        "axonn-tune " + " ".join(MAIN_JOB): [python, "-m", "axonn_tune", *MAIN_JOB],
    }
    rounds = [{name: time_process(command) for name, command in commands.items()} for _ in range(runs + 1)][1:]
    wall, cpu = ({name: statistics.median(one[name][of] for one in rounds) for name in commands} for of in range(2))
    return {name: (wall[name], cpu[name]) for name in commands}


def loaded_modules() -> list[str]:
    """Which of torch, pandas and scipy the main job loads (none should be)."""
    program = (
        "import sys\n"
        "from axonn_tune.cli.main import cli\n"
        f"cli.main({list(MAIN_JOB)!r}, standalone_mode=False)\n"
        "print([name for name in ('torch', 'pandas', 'scipy') if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    found: list[str] = json.loads(done.stderr.strip().splitlines()[-1].replace("'", '"'))
    return found


def search_alone(case: Case, *, runs: int) -> SearchFigures:
    """Run one search in a fresh process on one core."""
    command = [sys.executable, "-m", "benchmarks.run", "--search", json.dumps([asdict(case), runs])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout)
    return SearchFigures(case=case, **figures)


def search_here(case: Case, *, runs: int) -> dict[str, float]:
    """Search in this process, pinned to one core; the median of several after one that warms up."""
    from axonn_tune.frameworks import find_framework
    from axonn_tune.ranking.choosing import search
    from axonn_tune.ranking.space import Problem
    from axonn_tune.specs.catalog import load_machine, load_model
    from axonn_tune.specs.workload import Workload

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    model = load_model(case.model).document
    workload = Workload(global_batch=case.batch, sequence_length=model.defaults.sequence_length)
    framework = find_framework(case.framework)
    problem = Problem(
        *(model, load_machine(case.machine).document, workload, framework),
        gpus=case.gpus,
        rank_by="iteration",
        pipeline=framework.ranked_by == "iteration",
    )
    searched = [search(problem).searched for _ in range(runs + 1)][1:]
    seconds = statistics.median(one.seconds for one in searched)
    return {
        "grids": searched[0].grids,
        "candidates": searched[0].candidates,
        "priced": searched[0].feasible,
        "search_s": seconds,
        "priced_per_s": searched[0].feasible / seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


KINDS = {"one chunk": "stages", "several chunks": "interleaved", "overlap": "overlap", "some repeat": "repeats in some"}
"""Candidates with pipeline stages whose bounds are compared, by a feature of candidates at random."""


def tightness(*, count: int = 400) -> dict[str, dict[str, float]]:
    """Median of each bound over the exact step, by kind of candidate with pipeline stages."""
    from random import Random

    from tests.property.test_bounds import held

    ratios: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    for drawn, bound in held(Random(1), count):
        for kind, feature in KINDS.items():
            if drawn.layout.pipeline > 1 and feature in drawn.features and bound.step:
                ratios[kind].setdefault(bound.name, []).append(bound.bound_s / bound.exact_s)
    return {kind: {name: statistics.median(each) for name, each in found.items()} for kind, found in ratios.items()}


def show_tightness(found: dict[str, dict[str, float]]) -> None:
    """Print how close bounds are."""
    from rich.table import Table

    names = list(dict.fromkeys(name for each in found.values() for name in each))
    table = Table("candidates", *names, title="Bounds, median share of the exact step")
    for kind, each in found.items():
        table.add_row(kind, *(f"{each[name]:.3f}" if name in each else "" for name in names))
    stdout_console().print(table)


def show(processes: dict[str, tuple[float, float]], modules: list[str], searches: list[SearchFigures]) -> None:
    """Print both tables."""
    from rich.table import Table

    console = stdout_console()
    bare = processes["python -c 'import numpy'"]
    heads = ("whole process", "wall, s", "wall over NumPy's", "CPU, s", "CPU over NumPy's")
    table = Table(*heads, title="Start-up and the main job, warm, medians")
    for name, times in processes.items():
        pairs = zip(times, bare, strict=True)
        table.add_row(name, *(cell for one, least in pairs for cell in (f"{one:.3f}", f"{one / least:.2f}")))
    console.print(table)
    console.print(f"loaded by the main job out of torch, pandas, scipy: {', '.join(modules) or 'none'}")
    table = Table(
        *(
            "framework",
            "model",
            "GPUs",
            "batch",
            "grids",
            "candidates",
            "priced",
            "search, s",
            "priced per s",
            "peak, MB",
        ),
        title="Searches on one core, from factorizing to the ranking",
    )
    for one in searches:
        table.add_row(
            one.case.framework,
            one.case.model,
            f"{one.case.gpus:,}",
            f"{one.case.batch:,}",
            f"{one.grids:,}",
            f"{one.candidates:,}",
            f"{one.priced:,}",
            f"{one.search_s:.3f}",
            f"{one.candidates / one.search_s:,.0f}",
            f"{one.priced_per_s:,.0f}",
            f"{one.peak_mb:.0f}",
        )
    console.print(table)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="counted runs of each command")
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--search", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.search:
        case, runs = json.loads(arguments.search)
        print(json.dumps(search_here(Case(**case), runs=runs)))
        return
    processes, modules = process_figures(arguments.runs), loaded_modules()
    searches = [search_alone(case, runs=arguments.runs) for case in CASES]
    if arguments.format == "json":
        figures = {"processes_s": processes, "loaded": modules, "searches": [asdict(one) for one in searches]}
        figures["bounds"] = tightness()
        print(json.dumps(figures, indent=2))
    else:
        show(processes, modules, searches)
        show_tightness(tightness())


if __name__ == "__main__":
    main()
