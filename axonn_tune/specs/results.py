"""Results of runs: the summary of one run, the measurements of a validation, the baseline of a check.

`axonn-tune run` writes summaries, `axonn-tune validate` measurement files, `axonn-tune regress` compares with a
baseline. Each includes the prediction of the same step.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from axonn_tune.specs.document import Document, NonNegativeFloat, PositiveFloat, PositiveInt
from axonn_tune.specs.launch import CollectiveTerm, Launch, LaunchGrid, NonNegativeInt, configuration_name
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload

SUMMARY_NAME, LAUNCH_NAME = "summary.json", "launch.yaml"
"""Files in a run's folder: its summary, and its launch config."""
LAUNCH_HEADER = "What this run trained."
"""First line of that launch config."""
SHORTEST = "of each call, the shortest time of any rank of its group"
"""The convention of times without a common clock, and of summaries that do not name theirs."""


class RunSite(Document):
    """Where the run took place."""

    device: str = Field(description="Device of rank 0.")
    host: str = Field(description="Rank 0's host.")
    ranks: PositiveInt = Field(description="Number of ranks.")
    backend: str = Field(description="torch.distributed backend.")
    torch_version: str = Field(description="Version of torch.")
    tool_version: str = Field(description="Version of axonn-tune.")
    cores: PositiveInt | None = Field(default=None, description="CPU cores that the ranks of rank 0's host share.")
    host_ranks: PositiveInt | None = Field(default=None, description="Ranks of rank 0's host.")


class PredictionTarget(Document):
    """Machine and cost model of the prediction."""

    machine: str = Field(description="Machine profile.")
    accelerator: str = Field(description="Accelerator of one rank.")
    cost: str = Field(description="Cost model.")


class Quantity(Document):
    """One quantity of a step, predicted and measured."""

    predicted: NonNegativeFloat | None = Field(description="From the launch config; null if absent there.")
    measured: NonNegativeFloat = Field(description="By the run.")


class RecordedTerm(CollectiveTerm):
    """A measured collective, in whole bytes."""

    count: PositiveInt = Field(description="Calls per step and rank.")
    bytes: PositiveInt = Field(description="Full (gathered or reduced) buffer of one call.")


class SummaryTerm(RecordedTerm):
    """A collective in the summary of one run."""

    tier: str | None = Field(description="Outermost network level it was predicted to cross.")
    predicted_s: NonNegativeFloat | None = Field(description="Predicted time of all calls, s.")
    measured_s: NonNegativeFloat = Field(description="Measured, by the summary's seconds_convention, s.")
    elapsed_s: NonNegativeFloat = Field(description="Measured: the mean over ranks instead, late peers waited for, s.")
    predicted_exposed_s: NonNegativeFloat | None = Field(description="Predicted: the part that is not overlapped, s.")
    measured_exposed_s: NonNegativeFloat = Field(
        description="Measured: computing stood still for it, late peers waited for, mean over ranks, s."
    )


class Summary(Document):
    """One run, predicted vs. measured: times of one step of one rank, means over steps and ranks.

    The fastest and the slowest quarter of the timed steps do not count.
    """

    schema_: Literal["axonn-tune/summary/1"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/summary/1."
    )
    name: str = Field(description="What ran.")
    predicted_for: PredictionTarget = Field(description="Machine and cost model of the prediction.")
    ran_on: RunSite = Field(description="What ran it.")
    timed_steps: PositiveInt = Field(description="Last steps after the warm-up with timed collectives.")
    averaged_steps: PositiveInt = Field(description="Steps among them whose times are in the means.")
    untimed_steps: NonNegativeInt = Field(
        default=0, description="Last untimed steps after the warm-up; if any, the step time is theirs."
    )
    warmup_steps: NonNegativeInt = Field(description="Steps at the start that do not count.")
    step_s: Quantity = Field(description="One step, s.")
    compute_s: Quantity = Field(description="The step without its exposed communication, s.")
    communication_s: Quantity = Field(description="All collectives, overlapped ones included, s.")
    exposed_communication_s: Quantity = Field(description="The part that is not overlapped, s.")
    memory_bytes: Quantity = Field(description="Peak of the rank with the most.")
    memory_convention: str = Field(description="Definition of measured memory.")
    tokens_per_s: PositiveFloat = Field(description="Measured tokens per second, all ranks.")
    mfu: NonNegativeFloat = Field(description="Model FLOPs over the peak that the prediction assumes, measured.")
    seconds_convention: str = Field(
        default=SHORTEST,
        description="What counts as a collective's time, so that late ranks do not.",
    )
    terms: tuple[SummaryTerm, ...] = Field(description="Each collective's share.")


def run_directory(launch: Launch) -> Path:
    """Default folder of a run: `runs/<time>-<name>`."""
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{launch.name}"


def differences_name(rank: int | str) -> str:
    """File of a rank's differences from the program, if any; `*` for all ranks'."""
    return f"differs-rank{rank}.json"


def remove_outcome(directory: Path) -> None:
    """Delete the final files of an earlier run in the same folder; metrics are appended."""
    for path in (directory / SUMMARY_NAME, *directory.glob(differences_name("*"))):
        path.unlink(missing_ok=True)


class MeasurementSite(Document):
    """Host and software of a measurement, which must match for comparisons."""

    network: str = Field(description="What the ranks communicated through.")
    host: str = Field(description="Rank 0's host.")
    processor: str = Field(description="Rank 0's CPU.")
    cores: PositiveInt = Field(description="CPU cores that the ranks of one host shared.")
    device: str = Field(description="Device of rank 0.")
    ranks: PositiveInt = Field(description="Number of ranks.")
    ranks_per_node: PositiveInt = Field(description="Ranks on each node.")
    backend: str = Field(description="torch.distributed backend.")
    torch_version: str = Field(description="Version of torch.")


class StepTotals(Document):
    """Times of one step of one rank, and its memory."""

    step_s: PositiveFloat = Field(description="One step, s.")
    compute_s: NonNegativeFloat = Field(description="The step without its exposed communication, s.")
    communication_s: NonNegativeFloat = Field(description="All collectives, overlapped ones included, s.")
    exposed_communication_s: NonNegativeFloat = Field(description="The part that is not overlapped, s.")
    memory_bytes: NonNegativeFloat = Field(description="Peak of the rank with the most.")


def measured_totals(source: object) -> dict[str, float]:
    """The measured sides of the quantities that `source` has under the names of `StepTotals`."""
    return {name: getattr(source, name).measured for name in StepTotals.model_fields}


class RunTimes(StepTotals):
    """One run of a configuration, in fresh processes: means over its middle steps."""

    began: str = Field(description="When, ISO 8601.")
    load: NonNegativeFloat = Field(description="Load of the host at the start: runnable processes.")
    steps_s: tuple[PositiveFloat, ...] = Field(description="Each step after the warm-up, mean over ranks, s.")
    losses: tuple[float, ...] = Field(description="Loss of each step, the warm-up included.")
    gradient_norms: tuple[float, ...] = Field(description="Global gradient norm of each step, the warm-up included.")
    differs: tuple[str, ...] = Field(default=(), description="Collectives that differ from the program.")


class MeasuredTerm(RecordedTerm):
    """A collective: its prediction and the measurements of all runs."""

    predicted_s: NonNegativeFloat | None = Field(description="Predicted time of all calls, s.")
    predicted_exposed_s: NonNegativeFloat | None = Field(description="Predicted: the part that is not overlapped, s.")
    measured_s: tuple[NonNegativeFloat, ...] = Field(description="Of each run, as in summary.json, s.")
    exposed_s: tuple[NonNegativeFloat, ...] = Field(description="Of each run: computing stood still for it, s.")
    steps_s: tuple[tuple[NonNegativeFloat, ...], ...] = Field(
        description="Of each run, each step after the warm-up: mean over ranks, late peers waited for, s."
    )


class PredictedStep(Document):
    """Prediction of one step of one rank."""

    step_s: PositiveFloat | None = Field(description="One step, s.")
    low_s: NonNegativeFloat | None = Field(description="Lower end of its 80% interval, s.")
    high_s: PositiveFloat | None = Field(description="Upper end, s.")
    compute_s: NonNegativeFloat | None = Field(description="Kernels, s.")
    communication_s: NonNegativeFloat = Field(description="All collectives, overlapped ones included, s.")
    exposed_communication_s: NonNegativeFloat | None = Field(description="The part that is not overlapped, s.")
    memory_bytes: NonNegativeFloat | None = Field(description="Peak of one rank.")

    @classmethod
    def of(cls, launch: Launch) -> PredictedStep:
        """What a launch config says."""
        return cls.from_fields_of(launch.predicted, step_s=launch.predicted.iteration_s)


class PredictedConfiguration(Document):
    """One configuration and its prediction."""

    grid: LaunchGrid = Field(description="How the ranks are arranged.")
    micro_batch: PositiveInt = Field(description="Sequences one rank processes at a time.")
    recompute: Recompute = Field(description="Activation recomputation (checkpointing): none, selective or full.")
    kept_layers: NonNegativeInt = Field(description="Layers that are not resharded after forward.")
    chunks: PositiveInt = Field(default=1, description="Chunks of each pipeline stage.")
    parts: tuple[PositiveInt, ...] | None = Field(default=None, description="Layers of each model part; absent: even.")
    workload: Workload = Field(description="What is trained.")
    predicted: PredictedStep = Field(description="What was predicted.")

    @property
    def name(self) -> str:
        """Its name in tables: see `configuration_name`."""
        return configuration_name(self)


class MeasuredConfiguration(PredictedConfiguration):
    """One configuration with every run."""

    runs: tuple[RunTimes, ...] = Field(min_length=1, description="Every run.")
    terms: tuple[MeasuredTerm, ...] = Field(description="Each collective.")

    @model_validator(mode="after")
    def _terms_have_every_run(self) -> MeasuredConfiguration:
        """Each term has one time for each run."""
        for term in self.terms:
            if not len(term.measured_s) == len(term.exposed_s) == len(term.steps_s) == len(self.runs):
                raise ValueError(
                    f"{term.op} over {term.axis} has {len(term.measured_s)} times, but there were {len(self.runs)} runs"
                )
        return self


class Serial(Document):
    """The same training on one rank alone, as the reference."""

    losses: tuple[float, ...] = Field(description="Loss of each step.")
    gradient_norms: tuple[float, ...] = Field(description="Global gradient norm of each step.")


class Measurements(Document):
    """Measurements of `axonn-tune validate`."""

    schema_: Literal["axonn-tune/measurement/1"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/measurement/1."
    )
    created: str = Field(description="When it was written, ISO 8601.")
    tool_version: str = Field(description="Of axonn-tune.")
    command: str = Field(description="Command line.")
    place: MeasurementSite = Field(description="Where everything ran.")
    warmup_steps: NonNegativeInt = Field(description="Warm-up steps of each run, which do not count.")
    model_sha256: str = Field(description="Hash of the model file, what it extends, and overrides.")
    machine_sha256: str = Field(description="The same for the machine.")
    model: Model = Field(description="The whole model document.")
    machine: Machine = Field(description="The whole machine profile that was predicted for.")
    serial: Serial | None = Field(default=None, description="One rank alone; absent: it did not run.")
    configurations: tuple[MeasuredConfiguration, ...] = Field(min_length=1, description="What was run.")


class MeasuredStep(StepTotals):
    """Measurement of one step of one rank: medians over runs."""

    spread: NonNegativeFloat = Field(description="Of the step: slowest less fastest run over the median.")


class BaselineConfiguration(PredictedConfiguration):
    """One configuration as it was."""

    measured: MeasuredStep | None = Field(default=None, description="What was measured; absent: nothing.")


class Tolerances(Document):
    """Relative changes within tolerance."""

    prediction: NonNegativeFloat = Field(default=0.001, description="Change of any predicted number, up or down.")
    step: NonNegativeFloat = Field(default=0.1, description="Increase of measured steps; the runs' spread if larger.")
    communication: NonNegativeFloat = Field(default=0.2, description="Longer measured communication.")
    memory: NonNegativeFloat = Field(default=0.1, description="More measured memory.")


class Floors(Document):
    """Absolute limits on accuracy. null: tracked only."""

    spearman: float | None = Field(default=None, ge=-1, le=1, description="Least rank correlation of step times.")
    regret: NonNegativeFloat | None = Field(default=None, description="Largest regret of the predicted best.")
    step_error: NonNegativeFloat | None = Field(default=None, description="Largest mean error of step times.")
    communication_error: NonNegativeFloat | None = Field(
        default=None, description="Largest mean error of communication times."
    )


class Baseline(Document):
    """Recorded predictions and measurements of a project."""

    schema_: Literal["axonn-tune/baseline/1"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/baseline/1."
    )
    created: str = Field(description="When it was recorded, ISO 8601.")
    tool_version: str = Field(description="Of axonn-tune.")
    reason: str = Field(default="", description="Why it was recorded.")
    place: MeasurementSite | None = Field(default=None, description="Where it was measured; absent: predictions alone.")
    tolerances: Tolerances = Field(default=Tolerances(), description="Relative changes within tolerance.")
    floors: Floors = Field(default=Floors(), description="Accuracy to keep.")
    model: Model = Field(description="The whole model document.")
    machine: Machine = Field(description="The whole machine profile that was predicted for.")
    configurations: tuple[BaselineConfiguration, ...] = Field(min_length=1, description="Every configuration.")
