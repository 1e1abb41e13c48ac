"""The loop on this computer, predictions vs. what really happened: `python -m tools.demo`, or `make demo`.

1. All grids of an 80b model on 1,024 GPUs are ranked, which takes no machine at all.
2. A small cluster is emulated here and calibrated. Where no network namespaces are to be had, four ranks communicate
   over loopback instead, which is CPU time and no network, so their communication is not compared.
3. All grids of a small model with experts are ranked for it; the first and the last of that ranking train on it, and
   one between them with experts on several ranks.
4. The report of these runs is one HTML file.

Everything written is in `build/demo`. Exit code 4 if a grid trained otherwise than one rank alone does or, on an
emulated cluster, if a step is not predicted within 10%.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from axonn_tune.api.search import SearchResult
from axonn_tune.cli.main import main as axonn_tune
from axonn_tune.errors import AxonnTuneError, CheckFailedError, EnvironmentProblem, TrainingFailedError
from axonn_tune.files import write_text_atomically
from axonn_tune.lab.lab import Lab
from axonn_tune.lab.shape import Shape, show_rate
from axonn_tune.launch.host import require_torch
from axonn_tune.ranking.choosing import run_search
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.report.output import progress, text_of, words, wrapped
from axonn_tune.report.page import write_page
from axonn_tune.report.pairs import MILLISECONDS, pair_columns
from axonn_tune.report.ranking_section import ranking_of, ranking_section
from axonn_tune.report.validation import validation_document, validation_section
from axonn_tune.request import Request
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.results import Measurements
from axonn_tune.units import counted, show_seconds
from axonn_tune.validation.comparison import RunComparison, fastest_runs
from axonn_tune.validation.runner import (
    LabRunner,
    ProcessRunner,
    RankRunner,
    Selection,
    ValidationPlan,
    ValidationProgress,
    plan_from_ranking,
    run_plan,
)

FOLDER = Path("build/demo")
COMMAND = "python -m tools.demo"
SHAPE = Shape(nodes=2, ranks_per_node=2, uplink_bits_per_s=50e6, port_bits_per_s=100e6)
"""Two cores carry this with ease: the links and not the cores decide how long communication takes."""
RANKS = SHAPE.world
MODEL = "nano-moe"
REQUEST = Request(MODEL, gpus=RANKS, batch=8, precision="fp32", recompute="none", rank_by="step", imbalance=1.0)
BUDGET, LOOPBACK_BUDGET = "60s", "30s"
REPEATS, STEPS = 2, 6
HOLDS_WITHIN = 0.10
"""What is promised of steps on the emulated cluster: none has a larger error."""


@dataclass(frozen=True)
class Place:
    """Where the ranks of the demo run. lab: None for loopback."""

    lab: Lab | None

    @property
    def runner(self) -> RankRunner:
        """What runs launch configs there; other work on this host waits where that may be asked for."""
        return ProcessRunner() if self.lab is None else LabRunner(self.lab, realtime=True)

    @property
    def request(self) -> Request:
        """The search. On loopback computation should prevail; it needs the same cores, so overlap gains nothing."""
        if self.lab is None:
            return replace(REQUEST, batch=48, no_overlap="all")
        return REQUEST

    def calibrate(self, profile: Path) -> None:
        """Measure the machine and write its profile; what the command prints is beside it. TrainingFailedError."""
        log = profile.with_suffix(".txt")
        for earlier in (log, profile.with_suffix(".points.jsonl")):
            earlier.unlink(missing_ok=True)
        command = self.calibration(profile)
        if self.lab is None:
            with log.open("w", encoding="utf-8") as file:
                failed = subprocess.run(command, stdout=file, check=False).returncode != 0
        else:
            quiet = ["sh", "-c", f"exec {shlex.join(command)} >> {shlex.quote(str(log))}"]
            failed = any(one.code for one in self.lab.ranks.execute(quiet, realtime=True))
        if failed:
            raise TrainingFailedError("the calibration failed, as said above")

    def calibration(self, profile: Path) -> list[str]:
        """The command that calibrates: on loopback it starts the ranks, in a lab it is one of them."""
        where = f"--ranks {RANKS}" if self.lab is None else f"--ranks-per-node {SHAPE.ranks_per_node}"
        budget = BUDGET if self.lab is not None else LOOPBACK_BUDGET
        options = f"--model {MODEL} --batch {self.request.batch} {where} --budget {budget}"
        return [sys.executable, "-m", "axonn_tune", "calibrate", *options.split(), "-o", str(profile)]


def find_place(stack: ExitStack, *, loopback: bool) -> Place:
    """The emulated cluster, up until the stack ends; or loopback, if that is wanted or nothing else is possible."""
    if loopback:
        say("Four ranks over loopback, as asked.")
        return Place(None)
    try:
        lab = stack.enter_context(Lab(SHAPE))
    except EnvironmentProblem as error:
        say(f"Four ranks over loopback, for a cluster cannot be emulated here: {error}.")
        return Place(None)
    say(
        f"An emulated cluster: {SHAPE.nodes} nodes × {SHAPE.ranks_per_node} ranks, each in a network namespace; "
        f"{show_rate(SHAPE.port_bits_per_s)} within a node, {show_rate(SHAPE.uplink_bits_per_s)} between nodes."
    )
    return Place(lab)


def rank_grids(place: Place, profile: Path) -> SearchResult:
    """All grids of the model on this machine, by their step."""
    inputs = load_inputs(replace(place.request, machine=str(profile)))
    return SearchResult(inputs, run_search(inputs.problem, top=0), COMMAND)


def best_middle_worst(results: SearchResult) -> ValidationPlan:
    """The first and the last of a ranking, and the middle one of those with experts on several ranks."""
    plan = plan_from_ranking(results.inputs, Selection(0), command=COMMAND)
    first, *between, last = plan.launches
    apart = [launch for launch in between if launch.grid.expert > 1]
    return replace(plan, launches=(first, apart[len(apart) // 2], last))


def train(plan: ValidationPlan, place: Place, folder: Path) -> RunComparison:
    """Run the plan, and one rank alone to compare losses with; every time is in the folder's measured.yaml.

    On loopback each grid's fastest run counts, for other work on the same cores only ever adds time.
    """
    shutil.rmtree(folder / "runs", ignore_errors=True)
    with progress("training") as tell:

        def listen(heard: ValidationProgress) -> None:
            tell(heard.done / heard.of, heard.name)

        def save(found: Measurements) -> None:
            header = [f"Written by {COMMAND}."]
            write_text_atomically(folder / "measured.yaml", to_yaml(found, header=header))

        runs = folder / "runs"
        found = run_plan(plan, place.runner, repeats=REPEATS, steps=STEPS, folder=runs, listen=listen, save=save)
    return RunComparison(fastest_runs(found) if place.lab is None else found)


def calibrated_sentence(results: SearchResult, seconds: float) -> str:
    """What was measured, and in how long."""
    machine = results.inputs.problem.machine
    links = ((tier.name, tier.used_by("all_reduce")) for tier in machine.tiers)
    said = (
        f"{name} {show_rate(used.bandwidth_bytes_per_s * 8)}, {show_seconds(used.latency_s)} a hop"
        for name, used in links
    )
    return f"Calibrated in {seconds:.0f} s: {', '.join(said)}; {machine.accelerator.name}."


def ranked_sentence(results: SearchResult) -> str:
    """What was ranked, and from what to what the predictions go."""
    last = len(results.ranked) - 1
    low, high = (show_seconds(results.ranked[place].iteration_s) for place in (0, last))
    return (
        f"{counted(len(results.ranked), 'grid')} of {MODEL} on {counted(RANKS, 'rank')}, steps of {low} to {high} "
        f"predicted. The first, one between and the last train, {REPEATS} times {STEPS} steps each."
    )


def compared_text(comparison: RunComparison, *, network: bool) -> str:
    """The steps, and with a network their communication, predicted and measured, in the order of the ranking."""
    shown = {"step_s": "step", **({"communication_s": "communi\u00adcation"} if network else {})}
    columns = [words("name", "grid")]
    for key, label in shown.items():
        columns += pair_columns(key, label, MILLISECONDS)
    rows = [
        {"name": one.name, **{key: comparison.pairs[key].row(one.name) for key in shown}}
        for one in comparison.configurations
    ]
    return text_of(columns, rows)


def verdicts(comparison: RunComparison, *, network: bool) -> Iterator[str]:
    """Whether the order, the steps and training are as they should be."""
    # In the order of the ranking.
    measured_s = [one.pairs.measured["step_s"] for one in comparison.configurations]
    order = "holds" if measured_s == sorted(measured_s) else "does not hold"
    worst = worst_error(comparison)
    yield f"The order {order}."
    if network:
        found = f"all within {HOLDS_WITHIN:.0%}" if abs(worst) <= HOLDS_WITHIN else f"not all within {HOLDS_WITHIN:.0%}"
        yield f"Steps: {found}, the largest error is {worst:+.1%}."
    else:
        yield f"Steps: the largest error is {worst:+.1%}. Loopback is CPU time, so communication is not compared."
    load = max(run.load for one in comparison.configurations for run in one.runs)
    cores = comparison.measurements.place.cores
    if load > RANKS + cores and not abs(worst) <= HOLDS_WITHIN:
        yield f"Other work kept {counted(cores, 'core')} busy, load {load:.0f}: on a quiet host errors are smaller."
    trained = max(comparison.verdicts.values(), key=lambda one: one.difference)
    yield f"Losses and gradient norms vs. a single rank: {trained.words}."


def worst_error(comparison: RunComparison) -> float:
    """The largest error of a step: predicted / measured - 1."""
    return comparison.qualities["step"].worst


def require_promised(comparison: RunComparison, *, network: bool) -> None:
    """CheckFailedError if training was wrong or, with a network, a step was not predicted as well as is promised."""
    if not comparison.sound:
        raise CheckFailedError(comparison.fault)
    if network and abs(worst := worst_error(comparison)) > HOLDS_WITHIN:
        raise CheckFailedError(
            f"a step was predicted {worst:+.1%} off, where {HOLDS_WITHIN:.0%} is promised: "
            "other work on this host is the usual reason, so run it again on a quiet one"
        )


def write_report(path: Path, comparison: RunComparison, results: SearchResult) -> None:
    """One page: the runs, then the ranking they were chosen from."""
    runs = validation_section(validation_document(comparison), identity="s1", source=str(path.parent / "measured.yaml"))
    ranking = ranking_section(ranking_of(results.inputs, results.ranked), identity="s2", source=COMMAND)
    write_page(path, [runs, ranking], command=COMMAND)


def say(sentence: str) -> None:
    """A sentence, wrapped."""
    print(wrapped(sentence), flush=True)


def section(title: str) -> None:
    """A heading."""
    print(f"\n{title}\n{'─' * len(title)}", flush=True)


def demo(folder: Path, *, loopback: bool) -> None:
    """All of it; CheckFailedError as of `require_promised`, other errors as they come."""
    require_torch()
    folder.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    section("1. Rank all grids of an 80b model on 1,024 GPUs")
    first = ["--gpus", "1024", "--model", "80b", "--top", "5", "-o", str(folder / "80b.yaml")]
    print(f"$ axonn-tune {shlex.join(first)}", flush=True)
    axonn_tune(first)
    section("2. Emulate a cluster here, and calibrate it")
    with ExitStack() as stack:
        place = find_place(stack, loopback=loopback)
        results, comparison = _measure(place, folder)
    section("3. Predicted vs. measured")
    print(compared_text(comparison, network=place.lab is not None))
    for sentence in verdicts(comparison, network=place.lab is not None):
        say(sentence)
    section("4. The report")
    write_report(folder / "report.html", comparison, results)
    print(
        f"Done in {time.monotonic() - began_s:.0f} s. Open in a browser:\n{(folder / 'report.html').resolve()}",
        flush=True,
    )
    require_promised(comparison, network=place.lab is not None)


def _measure(place: Place, folder: Path) -> tuple[SearchResult, RunComparison]:
    """Calibrate, rank, train."""
    began_s, profile = time.monotonic(), folder / "here.yaml"
    place.calibrate(profile)
    results = rank_grids(place, profile)
    say(calibrated_sentence(results, time.monotonic() - began_s))
    say(ranked_sentence(results))
    return results, train(best_middle_worst(results), place, folder)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER, help=f"for what is written; default: {FOLDER}")
    parser.add_argument("--loopback", action="store_true", help="even where a cluster could be emulated")
    chosen = parser.parse_args(arguments)
    try:
        demo(chosen.folder, loopback=chosen.loopback)
    except AxonnTuneError as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return os.EX_OK


if __name__ == "__main__":
    raise SystemExit(main())
