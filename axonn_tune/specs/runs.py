"""A run's folder: its name, and the summary of what was measured beside what was predicted."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from axonn_tune.specs.base import Document, NonNegativeFloat, PositiveFloat, PositiveInt
from axonn_tune.specs.launch import Launch, NonNegativeInt

SUMMARY_NAME = "summary.json"
SHORTEST = "of each call, the shortest time of any rank of its group"
"""The convention of times without a common clock, and of summaries that do not name theirs."""


class Ran(Document):
    """Where the run took place."""

    device: str = Field(description="What rank 0 computed with.")
    host: str = Field(description="Rank 0's host.")
    ranks: PositiveInt = Field(description="Number of ranks.")
    backend: str = Field(description="torch.distributed backend.")
    torch_version: str = Field(description="Version of torch.")
    tool_version: str = Field(description="Version of axonn-tune.")


class PredictedFor(Document):
    """What the prediction was made for, and how."""

    machine: str = Field(description="Machine profile.")
    accelerator: str = Field(description="What one rank computes with.")
    cost: str = Field(description="Cost model.")


class Quantity(Document):
    """One number of a step, both ways."""

    predicted: NonNegativeFloat | None = Field(description="By the launch config; null where it says nothing.")
    measured: NonNegativeFloat = Field(description="By the run.")


class SummaryTerm(Document):
    """All calls of one collective in one step of one rank."""

    op: str = Field(description="Collective: all_gather, reduce_scatter, all_reduce.")
    axis: str = Field(description="Grid axis, or several.")
    phase: str = Field(description="forward, recompute, backward or step.")
    layer: str = Field(description="Layer, such as mlp.fc1.")
    count: PositiveInt = Field(description="Calls per step and rank.")
    bytes: PositiveInt = Field(description="Full (gathered or reduced) buffer of one call.")
    group: PositiveInt = Field(description="Ranks taking part.")
    tier: str | None = Field(description="Outermost network tier it was predicted to cross.")
    predicted_s: NonNegativeFloat | None = Field(description="Predicted time of all calls, s.")
    measured_s: NonNegativeFloat = Field(description="Measured, by the summary's seconds_convention, s.")
    elapsed_s: NonNegativeFloat = Field(description="Measured: the mean over ranks instead, late peers waited for, s.")
    predicted_exposed_s: NonNegativeFloat | None = Field(description="Predicted: the part no computation hides, s.")
    measured_exposed_s: NonNegativeFloat = Field(
        description="Measured: computing stood still for it, late peers waited for, mean over ranks, s."
    )


class Summary(Document):
    """One run, predicted beside measured: times of one step of one rank, means over steps and ranks.

    Of the timed steps the quarter that took least and the quarter that took most are left out.
    """

    schema_: Literal["axonn-tune/summary/1"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/summary/1."
    )
    name: str = Field(description="What ran.")
    predicted_for: PredictedFor = Field(description="What the prediction is about.")
    ran_on: Ran = Field(description="What ran it.")
    timed_steps: PositiveInt = Field(description="Steps after the warm-up whose collectives were timed, the last ones.")
    averaged_steps: PositiveInt = Field(description="Steps among them whose times are in the means.")
    warmup_steps: NonNegativeInt = Field(description="Steps at the start that count for nothing.")
    step_s: Quantity = Field(description="One step, s.")
    compute_s: Quantity = Field(description="The step without its exposed communication, s.")
    communication_s: Quantity = Field(description="All collectives, hidden ones included, s.")
    exposed_communication_s: Quantity = Field(description="The part no computation hides, s.")
    memory_bytes: Quantity = Field(description="Peak of the rank that held most.")
    memory_convention: str = Field(description="What was measured as memory.")
    tokens_per_s: PositiveFloat = Field(description="Tokens of all ranks together, per second, measured.")
    mfu: NonNegativeFloat = Field(description="Model FLOPs over the peak that the prediction assumes, measured.")
    seconds_convention: str = Field(
        default=SHORTEST,
        description="What counts as a collective's time, so that late ranks do not.",
    )
    terms: tuple[SummaryTerm, ...] = Field(description="Each collective's share.")


def run_directory(launch: Launch) -> Path:
    """Where a run of a launch config goes unless told otherwise: `runs/<time>-<name>`."""
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{launch.name}"


def differences_name(rank: int | str) -> str:
    """File of what a rank has sent that the program does not have, if anything; `*` for all ranks'."""
    return f"differs-rank{rank}.json"


def remove_outcome(directory: Path) -> None:
    """Delete what a run leaves at its end, before another one in the same folder; metrics are gone on with."""
    for path in (directory / SUMMARY_NAME, *directory.glob(differences_name("*"))):
        path.unlink(missing_ok=True)
