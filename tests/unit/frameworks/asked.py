"""Commands that are written for frameworks and shown to their own code; `make frameworks` records its answers.

`cases.txt` has configurations, each pinned fully, so nothing is searched: that one fits memory does not matter, that it
breaks no constraint does. `refusals.json` has commands of cases with one thing changed, which the framework refuses.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

from axonn_tune.frameworks import find_framework, step_on
from axonn_tune.frameworks.description import Command, Run
from axonn_tune.grid import ALL_AXES, Grid
from axonn_tune.program.feasibility import broken_constraints
from axonn_tune.program.pipeline import model_parts
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.request import Request
from axonn_tune.stages import parse_layout
from axonn_tune.vocabulary import Precision

RECORDINGS = Path(__file__).parents[2] / "fixtures" / "frameworks"
ARGUMENT_NAMES = Path(__file__).parents[2] / "fixtures" / "arguments"

CAPABILITIES = {"A100": 8, "B200": 10, "H100": 9, "MI250X": 9}
"""First number of the compute capability that NVIDIA's GPUs report."""


@dataclass(frozen=True)
class Case:
    """One configuration of a framework, a line of `cases.txt`.

    options: sizes of axes, chunks, layout, micro_batch, recompute, recompute_layers, kept_layers, batch, seq, order,
    precision, dispatcher, imbalance, capacity_factor, exchange of context with the ranks inside. Without them: sizes of
    1, an even split, no recompute, all layers resharded after forward, the model's sequence length, the framework's
    rank order and exchange.
    """

    framework: str
    kind: str
    id: str
    model: str
    machine: str
    gpus: int
    options: dict[str, str]

    def number(self, name: str, default: int = 1) -> int:
        """A whole number among the options."""
        return int(self.options.get(name, default))

    def __str__(self) -> str:
        return f"{self.framework}: {self.id}"


def cases(*frameworks: str, kind: str = "case") -> list[Case]:
    """Every case, or every layout, or those of some frameworks."""
    found = []
    for line in (RECORDINGS / "cases.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            framework, which, name, model, machine, gpus, *given = line.split()
            options = dict(one.split("=") for one in given)
            found.append(Case(framework, which, name, model, machine, int(gpus), options))
    return [one for one in found if one.kind == kind and (one.framework in frameworks or not frameworks)]


def case_of(framework: str, name: str) -> Case:
    """A case by its name."""
    return next(case for case in cases(framework) if case.id == name)


def launched(run: Run) -> Command:
    """The command of a run."""
    assert run.framework.launch is not None, f"{run.framework.name} starts nothing"
    return run.framework.launch(run)


def run_of(case: Case) -> Run:
    """A case as its framework's `launch` gets it; AssertionError where it breaks one of its constraints."""
    framework, seq = find_framework(case.framework), case.number("seq", 0) or None
    asked_for = Request(
        case.model,
        gpus=case.gpus,
        machine=case.machine,
        batch=case.number("batch"),
        seq=seq,
        framework=case.framework,
        precision=cast("Precision | None", case.options.get("precision")),
    )
    problem = load_inputs(asked_for).problem
    model, workload, recompute = problem.model, problem.workload, case.options.get("recompute", "none")
    micro_batch, chunks = case.number("micro_batch"), case.number("chunks")
    sizes = {axis: case.number(axis) for axis in ALL_AXES}
    if exchange := case.options.get("exchange"):
        framework = framework.with_step(context_exchange=exchange, context_inside=case.number("inside"))
    routing = {"dispatcher": str, "imbalance": float, "capacity_factor": float}
    if stated := {name: kind(case.options[name]) for name, kind in routing.items() if name in case.options}:
        framework = framework.with_step(**stated)
    own, order = (Grid(order=axes, **sizes) for axes in (framework.axes, _order(case)))
    framework = framework.with_step(gathers_experts=sizes["expert_z"] > 1).training(model)
    broken = broken_constraints(own, model, workload, framework, micro_batch=micro_batch, chunks=chunks)
    assert not broken, f"{case}: {broken}"
    assert own.world == case.gpus, f"{case}: {own.world} ranks"
    return Run(
        framework=find_framework(case.framework),
        model=model,
        machine=problem.machine,
        workload=workload,
        grid=order,
        micro_batch=micro_batch,
        accumulation=workload.global_batch // (own.batch_shares * micro_batch),
        recompute=recompute,
        kept_layers=case.number("kept_layers", 0),
        chunks=chunks,
        parts=model_parts(model.layers, stages=own.pipeline, chunks=chunks, given=_parts(case)),
        step=step_on(framework, problem.machine, problem.workload.precision),
        recompute_layers=case.number("recompute_layers", 0) or None,
    )


def _parts(case: Case) -> tuple[int, ...] | None:
    """Layers of each model part by its layout; None without one."""
    return parse_layout(case.options["layout"]).parts if "layout" in case.options else None


def _order(case: Case) -> tuple[str, ...]:
    """Its rank order: the framework's, without one."""
    return tuple(case.options.get("order", ",".join(find_framework(case.framework).axes)).split(","))


@dataclass(frozen=True)
class Refusal:
    """A command that a framework refuses: that of a case, changed.

    theirs: what its error says. flags: new values of options, None to leave one out, "" for a switch. files: what
    stands in config files instead, by what stood there. ours: the options of a search that asks for the same, and what
    our refusal says; none where nothing can ask for it, since no command is ever written so.
    """

    framework: str
    id: str
    theirs: str
    case: str
    flags: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] | None = None
    world: int | None = None
    ours: str = ""
    says: str = ""

    def __str__(self) -> str:
        return f"{self.framework}: {self.id}"


@cache
def refusals() -> tuple[Refusal, ...]:
    """Every refusal."""
    return tuple(Refusal(**one) for one in json.loads((RECORDINGS / "refusals.json").read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Asked:
    """One command that a framework is asked about.

    kind: case, layout or refusal. run: the configuration it is written for; of a refusal, that of the command before
    the change. recorded: what a recording says of the question, words as a line. refused_for: what the framework's
    error says.
    """

    kind: str
    id: str
    run: Run
    words: tuple[str, ...]
    recorded: dict[str, Any]
    refused_for: str = ""

    @property
    def key(self) -> str:
        """A name among all that an environment is asked."""
        return f"{self.run.framework.name} {self.kind} {self.id}"

    def as_expected(self, answer: Mapping[str, Any]) -> bool:
        """Whether the framework accepts it, or refuses it for the reason it is to be refused for."""
        return answer["accepted"] if not self.refused_for else self.refused_for in answer.get("error", "")

    @property
    def request(self) -> dict[str, object]:
        """The question for a check script (tools/frameworks/answering.py)."""
        chip = self.run.machine.accelerator.name.upper()
        return {
            "key": self.key,
            **{name: shlex.split(self.recorded[name]) for name in ("starter", "program")},
            "arguments": list(self.words),
            **{name: self.recorded[name] for name in ("world", "environment", "files")},
            "layers": self.run.model.layers,
            "capability": next((number for name, number in CAPABILITIES.items() if name in chip), 0),
            "groups": "all" if self.kind == "layout" else "one",
        }


@cache
def asked(framework: str, forms: Sequence[str] = ("",)) -> list[Asked]:
    """Everything that a framework is asked; forms: as other front ends or releases take the cases."""
    return list(_asked_in(framework, forms))


def _asked_in(framework: str, forms: Sequence[str]) -> Iterator[Asked]:
    for form in forms:
        for case in cases(framework):
            first = launched(run_of(case))
            command = first.forms.get(form) if form else first
            if command is not None and (not form or command.files != first.files):
                yield _question(case, command, name=f"{case.id} as {form}" if form else case.id)
    if "" in forms:
        for case in cases(framework, kind="layout"):
            yield _question(case, launched(run_of(case)), name=case.id)
        for refusal in refusals():
            if refusal.framework == framework:
                yield _refused(refusal)


def _question(case: Case, command: Command, *, name: str) -> Asked:
    """A question about a command."""
    run, launcher = run_of(case), [word for one in command.accelerate for word in one.words]
    recorded = {
        "framework": case.framework,
        "kind": case.kind,
        "id": name,
        "world": run.grid.world,
        "starter": shlex.join(("accelerate", *launcher) if launcher else ("torchrun",)),
        "program": shlex.join(command.program),
        "words": shlex.join(command.words),
        "environment": {one.name: one.value for one in command.environment},
        "files": dict(command.files),
    }
    return Asked(case.kind, name, run, command.words, recorded)


def _refused(refusal: Refusal) -> Asked:
    case = case_of(refusal.framework, refusal.case)
    start = _question(case, launched(run_of(case)), name=refusal.id)
    words, files = start.words, dict(start.recorded["files"])
    for flag, value in refusal.flags.items():
        words = _with_flag(words, flag, value)
    for before, after in refusal.files.items():
        files = {suffix: text.replace(before, after) for suffix, text in files.items()}
    changed = {"kind": "refusal", "words": shlex.join(words), "files": files}
    recorded = {**start.recorded, **changed, "world": refusal.world or start.recorded["world"]}
    if refusal.environment is not None:
        recorded["environment"] = refusal.environment
    return replace(start, kind="refusal", words=words, recorded=recorded, refused_for=refusal.theirs)


def _with_flag(words: tuple[str, ...], flag: str, value: str | None) -> tuple[str, ...]:
    """A command line with another value of an option, or without it; what it does not have comes first."""
    new = () if value is None else (flag, value) if value else (flag,)
    if flag not in words:
        return (*new, *words)
    start = words.index(flag)
    end = start + 1
    # An option that a subcommand follows, `activation-checkpoint:full`, is a switch.
    if end < len(words) and not words[end].startswith("--") and ":" not in words[end]:
        end += 1
    return (*words[:start], *new, *words[end:])


def recording(environment: str) -> Any:
    """What was recorded of an environment's framework."""
    return json.loads((RECORDINGS / f"{environment}.json").read_text(encoding="utf-8"))
