"""The baseline: predictions, and measured times if there are any, that `axonn-tune regress` compares with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from axonn_tune.specs.base import Document, NonNegativeFloat, PositiveFloat
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.measurements import Place, PredictedConfiguration
from axonn_tune.specs.model import Model


class MeasuredStep(Document):
    """What was measured of one step of one rank: medians over runs."""

    step_s: PositiveFloat = Field(description="One step, s.")
    compute_s: NonNegativeFloat = Field(description="The step without its exposed communication, s.")
    communication_s: NonNegativeFloat = Field(description="All collectives, hidden ones included, s.")
    exposed_communication_s: NonNegativeFloat = Field(description="The part no computation hides, s.")
    memory_bytes: NonNegativeFloat = Field(description="Peak of the rank that held most.")
    spread: NonNegativeFloat = Field(description="Of the step: slowest less fastest run over the median.")


class BaselineConfiguration(PredictedConfiguration):
    """One configuration as it was."""

    measured: MeasuredStep | None = Field(default=None, description="What was measured; absent: nothing.")


class Tolerances(Document):
    """Relative changes that are none yet."""

    prediction: NonNegativeFloat = Field(default=0.001, description="Of any predicted number, either way.")
    step: NonNegativeFloat = Field(default=0.1, description="Longer measured steps; the runs' spread if that is more.")
    communication: NonNegativeFloat = Field(default=0.2, description="Longer measured communication.")
    memory: NonNegativeFloat = Field(default=0.1, description="More measured memory.")


class Floors(Document):
    """Accuracy that predictions must keep, whatever it was before. null: tracked only."""

    spearman: float | None = Field(default=None, ge=-1, le=1, description="Least rank correlation of step times.")
    regret: NonNegativeFloat | None = Field(
        default=None, description="Most that the predicted best may be off the best."
    )
    step_error: NonNegativeFloat | None = Field(default=None, description="Largest mean error of step times.")
    communication_error: NonNegativeFloat | None = Field(
        default=None, description="Largest mean error of communication times."
    )


class Baseline(Document):
    """What a project expects of its predictions and of its runs."""

    schema_: Literal["axonn-tune/baseline/1"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/baseline/1."
    )
    created: str = Field(description="When it was recorded, ISO 8601.")
    tool_version: str = Field(description="Of axonn-tune.")
    reason: str = Field(default="", description="Why it was recorded.")
    place: Place | None = Field(default=None, description="Where it was measured; absent: predictions alone.")
    tolerances: Tolerances = Field(default=Tolerances(), description="Relative changes that are none yet.")
    floors: Floors = Field(default=Floors(), description="Accuracy to keep.")
    model: Model = Field(description="The whole model document.")
    machine: Machine = Field(description="The whole machine profile that was predicted for.")
    configurations: tuple[BaselineConfiguration, ...] = Field(min_length=1, description="Every configuration.")
