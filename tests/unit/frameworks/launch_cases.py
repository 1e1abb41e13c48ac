"""Configurations whose commands are checked: by their structure here, by each framework's own parser elsewhere.

Each is pinned fully, so nothing is searched: that it fits memory does not matter, that it breaks no constraint does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from axonn_tune.frameworks import find_framework, step_on
from axonn_tune.frameworks.command import Command, Run
from axonn_tune.grid import ALL_AXES, Grid
from axonn_tune.program.constraints import broken_constraints
from axonn_tune.program.pipeline import model_parts
from axonn_tune.ranking.inputs import load_inputs
from axonn_tune.ranking.space import Problem
from axonn_tune.request import Request
from axonn_tune.specs.workload import RECOMPUTES


@dataclass(frozen=True)
class Case:
    """One configuration of a framework.

    options: sizes of axes, chunks, micro_batch, recompute, kept_layers, batch, seq. Without them: sizes of 1, no
    recompute, all layers resharded after forward, the model's sequence length.
    """

    framework: str
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


CASES = {
    "megatron-core": """
        8b-gtp llama3-8b dgx-h100 64 z=8 data=8 batch=512
        8b-context llama3-8b dgx-h100 16 x=2 context=2 data=4 recompute=selective batch=64 seq=16384
        70b-chunks llama3-70b dgx-h100 64 x=8 pipeline=4 data=2 chunks=5 recompute=full batch=128
        70b-tensor-gtp llama3-70b dgx-h100 512 x=4 z=8 data=16 recompute=selective batch=512
        70b-all llama3-70b dgx-h100 256 x=4 z=2 context=2 data=4 pipeline=4 micro_batch=2 batch=512
        405b-uneven llama3-405b gb200-nvl72 2048 x=8 pipeline=16 data=16 recompute=full batch=2048
        405b-uneven-chunks llama3-405b dgx-h100 1024 x=8 pipeline=16 data=8 chunks=4 recompute=selective batch=256
        405b-gtp-chunks llama3-405b gb200-nvl72 576 x=4 z=4 pipeline=18 data=2 chunks=7 batch=288
        405b-long llama3-405b dgx-h100 896 x=8 context=4 pipeline=14 data=2 recompute=selective batch=128 seq=32768
        gpt3-chunks gpt3-175b perlmutter-80gb 1024 x=8 pipeline=16 data=8 chunks=3 recompute=full batch=1536
        20b-gtp 20b perlmutter-80gb 128 x=4 z=8 data=4 micro_batch=2 batch=512
    """,
    "torchtitan": """
        8b-fsdp llama3-8b dgx-h100 8 z=8 recompute=selective batch=64
        8b-hsdp llama3-8b dgx-h100 64 z=8 data=8 micro_batch=2 batch=512
        8b-context llama3-8b dgx-h100 32 x=2 context=4 z=4 recompute=full batch=32 seq=32768
        8b-kept llama3-8b dgx-h100 32 x=2 z=16 recompute=full kept_layers=32 batch=256 seq=4096
        70b-tensor llama3-70b dgx-h100 64 x=8 z=8 recompute=full batch=64
        70b-pipeline llama3-70b dgx-h100 128 x=8 z=2 data=2 pipeline=4 recompute=full batch=128
        70b-chunks llama3-70b dgx-h100 256 x=4 z=16 pipeline=4 chunks=5 micro_batch=2 kept_layers=20 batch=512
        70b-all llama3-70b gb200-nvl72 128 x=4 context=2 z=4 data=2 pipeline=2 chunks=2 recompute=selective batch=64
        70b-odd-chunks llama3-70b dgx-h100 112 x=8 pipeline=14 chunks=3 recompute=full batch=28
        405b-uneven llama3-405b dgx-h100 1024 x=8 z=8 pipeline=16 recompute=full batch=256
        405b-chunks llama3-405b gb200-nvl72 1008 x=8 z=9 pipeline=14 chunks=3 recompute=full batch=252
        405b-long llama3-405b gb200-nvl72 1024 x=8 context=16 z=8 recompute=full batch=128 seq=131072
    """,
    "torchtitan-eager": """
        8b-fsdp llama3-8b dgx-h100 16 z=16 recompute=selective batch=64
        70b-pipeline llama3-70b dgx-h100 128 x=4 z=4 data=2 pipeline=4 recompute=full batch=128
    """,
    "fsdp": """
        5b-one-node 5b perlmutter-80gb 4 z=4 micro_batch=4 batch=64
        5b-hsdp 5b perlmutter-80gb 64 z=4 data=16 micro_batch=8 recompute=full batch=1024
        8b-one-node llama3-8b dgx-h100 8 z=8 recompute=full batch=64
        8b-hsdp llama3-8b dgx-h100 64 z=8 data=8 recompute=full batch=512
        8b-replicas llama3-8b gb200-nvl72 16 data=16 batch=64
        8b-kept llama3-8b dgx-h100 32 z=32 micro_batch=2 recompute=full kept_layers=32 batch=128 seq=4096
        8b-some-kept llama3-8b dgx-h100 32 z=16 data=2 recompute=full kept_layers=12 batch=128
        70b-fsdp llama3-70b dgx-h100 64 z=64 recompute=full batch=64
        70b-hsdp llama3-70b gb200-nvl72 256 z=64 data=4 micro_batch=2 recompute=full batch=512
        70b-short llama3-70b dgx-h100 512 z=128 data=4 kept_layers=3 batch=512 seq=2048
    """,
    "deepspeed": """
        5b-zero1 5b perlmutter-80gb 16 data=16 micro_batch=4 recompute=full batch=512
        5b-zero3 5b perlmutter-80gb 64 z=64 micro_batch=2 batch=512
        8b-zero3 llama3-8b dgx-h100 16 z=16 recompute=full batch=128
        8b-tensor llama3-8b dgx-h100 16 x=2 data=8 recompute=selective batch=64
        8b-tensor-zero3 llama3-8b dgx-h100 32 x=4 z=8 micro_batch=2 batch=64 seq=4096
        70b-zero3 llama3-70b dgx-h100 128 z=128 recompute=full batch=512
        70b-3d llama3-70b dgx-h100 128 x=8 data=2 pipeline=8 recompute=full batch=256
        70b-pipeline llama3-70b gb200-nvl72 40 pipeline=10 data=4 micro_batch=2 recompute=full batch=320
        70b-tensor-zero3 llama3-70b gb200-nvl72 256 x=4 z=64 recompute=full batch=256
        405b-uneven llama3-405b dgx-h100 256 x=8 data=2 pipeline=16 recompute=full batch=256
        gpt3-3d gpt3-175b perlmutter-80gb 384 x=4 data=4 pipeline=24 recompute=full batch=1536
    """,
    "axonn": """
        5b-one-node 5b perlmutter-80gb 4 z=4 micro_batch=4 batch=64
        5b-depth 5b perlmutter-80gb 64 z=16 data=4 micro_batch=2 recompute=full batch=1024
        5b-data 5b perlmutter-80gb 16 z=2 data=8 recompute=selective batch=512
        5b-replicas 5b gb200-nvl72 32 data=32 recompute=full batch=512
        20b-depth 20b perlmutter-80gb 256 z=16 data=16 recompute=full batch=1024 seq=512
        20b-wide 20b dgx-h100 128 z=128 recompute=full batch=512
        20b-hybrid 20b frontier 512 z=64 data=8 micro_batch=2 recompute=full batch=4096
        8b-depth llama3-8b dgx-h100 64 z=8 data=8 recompute=full batch=512
        8b-long llama3-8b dgx-h100 32 z=32 recompute=full batch=64 seq=16384
        8b-short llama3-8b gb200-nvl72 72 z=8 data=9 micro_batch=4 batch=288 seq=2048
    """,
    "megatron-axonn": """
        5b-depth 5b perlmutter-80gb 64 z=16 data=4 micro_batch=2 recompute=full batch=1024
        5b-4d 5b perlmutter-80gb 64 x=2 y=2 z=4 data=4 recompute=full kept_layers=24 batch=512
        5b-some-kept 5b perlmutter-80gb 128 x=4 z=8 data=4 micro_batch=2 kept_layers=7 batch=1024
        20b-4d 20b perlmutter-80gb 512 x=2 y=4 z=8 data=8 recompute=full batch=8192
        20b-columns 20b frontier 256 y=8 z=4 data=8 micro_batch=2 recompute=full batch=4096
        20b-pipeline 20b perlmutter-80gb 256 x=2 y=2 z=2 data=4 pipeline=8 recompute=full batch=1024
        80b-chunks 80b perlmutter-80gb 768 x=4 z=4 data=8 pipeline=6 chunks=7 recompute=selective batch=1536
        80b-4d 80b perlmutter-80gb 1024 x=4 y=2 z=16 data=8 recompute=full batch=8192
        8b-depth llama3-8b dgx-h100 64 x=2 z=8 data=4 batch=256
        70b-all llama3-70b dgx-h100 256 x=4 y=2 z=4 data=2 pipeline=4 micro_batch=2 kept_layers=20 batch=512
    """,
}
"""By framework, a line each: name, model, machine, GPUs, and the options of a `Case`."""


def cases(*frameworks: str) -> list[Case]:
    """Every case, or those of some frameworks."""
    wanted = frameworks or tuple(CASES)
    return [_case_of(name, line) for name in wanted for line in CASES[name].strip().splitlines()]


def _case_of(framework: str, line: str) -> Case:
    name, model, machine, gpus, *options = line.split()
    return Case(framework, name, model, machine, int(gpus), dict(one.split("=") for one in options))


def command_of(case: Case) -> Command:
    """The command of a case; AssertionError where the framework could not run it."""
    launch: Callable[[Run], Command] | None = find_framework(case.framework).launch
    assert launch is not None, f"{case.framework} starts nothing"
    return launch(run_of(case))


def run_of(case: Case) -> Run:
    """A case as its framework's `launch` gets it; AssertionError where it breaks one of its constraints."""
    framework, problem = find_framework(case.framework), _problem_of(case)
    grid, micro_batch, chunks = _grid_of(case), case.number("micro_batch"), case.number("chunks")
    model, workload = problem.model, problem.workload
    broken = broken_constraints(grid, model, workload, framework, micro_batch=micro_batch, chunks=chunks)
    assert not broken, f"{case}: {broken}"
    assert grid.world == case.gpus, f"{case}: {grid.world} ranks"
    recompute = case.options.get("recompute", "none")
    assert recompute in RECOMPUTES
    return Run(
        framework=framework,
        model=model,
        machine=problem.machine,
        workload=workload,
        grid=grid,
        micro_batch=micro_batch,
        accumulation=workload.global_batch // (grid.batch_shares * micro_batch),
        recompute=recompute,
        kept_layers=case.number("kept_layers", 0),
        chunks=chunks,
        parts=model_parts(model.layers, stages=grid.pipeline, chunks=chunks),
        step=step_on(framework, problem.machine),
    )


def _problem_of(case: Case) -> Problem:
    batch, seq = case.number("batch"), case.number("seq", 0) or None
    request = Request(case.model, gpus=case.gpus, machine=case.machine, batch=batch, seq=seq, framework=case.framework)
    return load_inputs(request).problem


def _grid_of(case: Case) -> Grid:
    """Its grid, in the framework's rank order; axes that the framework lacks are of size 1."""
    axes = find_framework(case.framework).axes
    return Grid(order=axes, **{axis: case.number(axis) for axis in ALL_AXES})


def to_json(case: Case) -> dict[str, object]:
    """A case's command, for validators that run in an environment of their own."""
    command = command_of(case)
    return {
        "id": case.id,
        "framework": case.framework,
        "world": case.gpus,
        "release": command.release,
        "starter": "accelerate" if command.accelerate else "torchrun",
        "program": list(command.program),
        "arguments": list(command.words),
        "environment": {one.name: one.value for one in command.environment},
        "files": dict(command.files),
    }
