"""Results of runs: the summary of one run, the measurements of a validation, the baseline of a check.

`axonn-tune run` writes summaries, `axonn-tune validate` measurement files, `axonn-tune regress` compares with a
baseline. All hold `Pairs`: predicted and measured values of the same step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from axonn_tune.specs.document import Document, NonNegativeFloat, PositiveFloat, PositiveInt
from axonn_tune.specs.launch import CollectiveTerm, Launch, LaunchGrid, NonNegativeInt
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import RECOMPUTE_WORDS, Recompute, Workload

SUMMARY_NAME, LAUNCH_NAME = "summary.json", "launch.yaml"
"""Files in a run's folder: its summary, and its launch config."""
LAUNCH_HEADER = "What this run trained."
"""First line of that launch config."""
SHORTEST = "of each call, the shortest time of any rank of its group"
"""The convention of times without a common clock, and of summaries that do not name theirs."""

Values: TypeAlias = dict[str, Annotated[float, Field(allow_inf_nan=False)]]


class Pairs(Document):
    """Predicted vs. measured values: a column each, with an entry for every key of which it is known.

    Keys are quantities of one step, or rows of one quantity: configurations, axes, published steps.
    """

    predicted: Values = Field(default={}, description="Predicted.")
    low: Values = Field(default={}, description="Lower end of the 80% interval of the prediction.")
    high: Values = Field(default={}, description="Upper end.")
    measured: Values = Field(default={}, description="Measured; of several runs the median.")
    spread: Values = Field(default={}, description="Of several runs: (largest - smallest) / median.")

    @property
    def errors(self) -> dict[str, float]:
        """predicted / measured - 1 of every key that has both; none where 0 was measured."""
        both = {key: value for key, value in self.measured.items() if value and key in self.predicted}
        return {key: self.predicted[key] / value - 1.0 for key, value in both.items()}

    def only(self, keys: Iterable[str]) -> Pairs:
        """The same columns with these keys, in their order."""
        listed = list(keys)
        return Pairs(**{name: {key: column[key] for key in listed if key in column} for name, column in self})

    def row(self, key: str) -> dict[str, float | None]:
        """All columns of a key, with its error; None where one is not known."""
        found = {name: column.get(key) for name, column in self}
        both = found["predicted"] is not None and found["measured"]
        return {**found, "error": found["predicted"] / found["measured"] - 1.0 if both else None}


QUANTITIES = {
    "step_s": "step",
    "compute_s": "computation",
    "communication_s": "communication",
    "exposed_communication_s": "exposed communication",
    "memory_bytes": "memory",
}
"""Of one step of one rank, in words: the whole; without its exposed communication; all collectives, overlapped ones
included; those that are not overlapped; the peak of the rank with the most."""


def _of_step(pairs: Pairs) -> Pairs:
    """Refuse other quantities, negative values, and measurements that lack a quantity."""
    for name, column in pairs:
        for key, value in column.items():
            if key not in QUANTITIES:
                raise ValueError(f"{name} has {key!r}, which is none of {', '.join(QUANTITIES)}")
            if value < 0.0 or (key == "step_s" and name != "spread" and not value):
                raise ValueError(f"{name}.{key} is {value:g}, not above 0")
    if pairs.measured and (missing := [name for name in QUANTITIES if name not in pairs.measured]):
        raise ValueError(f"measured lacks {', '.join(missing)}")
    return pairs


StepPairs: TypeAlias = Annotated[Pairs, AfterValidator(_of_step)]
"""Predicted vs. measured quantities of one step of one rank."""


def predicted_pairs(**values: float | None) -> Pairs:
    """Predicted quantities of a step, with `low_s` and `high_s`, the ends of its interval; None is left out."""
    known = {name: value for name, value in values.items() if value is not None}
    low, high = ({"step_s": known.pop(name)} if name in known else {} for name in ("low_s", "high_s"))
    return Pairs(predicted=known, low=low, high=high)


def launch_pairs(launch: Launch) -> Pairs:
    """What a launch config predicts."""
    predicted = launch.predicted
    named = {"step_s": "iteration_s", "low_s": "low_s", "high_s": "high_s"}
    return predicted_pairs(**{name: getattr(predicted, named.get(name, name)) for name in {**QUANTITIES, **named}})


class Site(Document):
    """Host and software of a measurement, which must match for comparisons."""

    network: str = Field(default="", description="What the ranks communicated through.")
    host: str = Field(description="Rank 0's host.")
    processor: str = Field(default="", description="Rank 0's CPU.")
    cores: PositiveInt = Field(description="CPU cores that the ranks of one host shared.")
    device: str = Field(description="Device of rank 0.")
    ranks: PositiveInt = Field(description="Number of ranks.")
    ranks_per_node: PositiveInt | None = Field(default=None, description="Ranks on each node.")
    host_ranks: PositiveInt | None = Field(default=None, description="Ranks of rank 0's host.")
    backend: str = Field(description="torch.distributed backend.")
    torch_version: str = Field(description="Version of torch.")

    @property
    def on_cpu(self) -> bool:
        """Whether memory is a process' resident set, with the buffers of Python and Gloo that no prediction has."""
        return self.device.startswith("cpu")


class PredictionTarget(Document):
    """Machine and cost model of the prediction."""

    machine: str = Field(description="Machine profile.")
    accelerator: str = Field(description="Accelerator of one rank.")
    cost: str = Field(description="Cost model.")


class Summary(Document):
    """One run, predicted vs. measured: quantities of one step of one rank, means over steps and ranks.

    The fastest and the slowest quarter of the timed steps do not count.
    """

    renewed_by: ClassVar[str] = "axonn-tune run"
    schema_: Literal["axonn-tune/summary/2"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/summary/2."
    )
    name: str = Field(description="What ran.")
    tool_version: str = Field(description="Of axonn-tune.")
    predicted_for: PredictionTarget = Field(description="Machine and cost model of the prediction.")
    ran_on: Site = Field(description="What ran it.")
    timed_steps: PositiveInt = Field(description="Last steps after the warm-up with timed collectives.")
    averaged_steps: PositiveInt = Field(description="Steps among them whose times are in the means.")
    untimed_steps: NonNegativeInt = Field(
        default=0, description="Last untimed steps after the warm-up; if any, the step time is theirs."
    )
    warmup_steps: NonNegativeInt = Field(description="Steps at the start that do not count.")
    pairs: StepPairs = Field(description="Predicted vs. measured, s and bytes; the prediction is the launch config's.")
    memory_convention: str = Field(description="Definition of measured memory.")
    tokens_per_s: PositiveFloat = Field(description="Measured tokens per second, all ranks.")
    mfu: NonNegativeFloat = Field(description="Model FLOPs over the peak that the prediction assumes, measured.")
    seconds_convention: str = Field(
        default=SHORTEST,
        description="What counts as a collective's time, so that late ranks do not.",
    )
    terms: tuple[CollectiveTerm, ...] = Field(description="Each collective's share.")

    @model_validator(mode="after")
    def _is_measured(self) -> Summary:
        if not self.pairs.measured:
            raise ValueError("pairs has nothing measured")
        _require_times(self.terms, 1)
        return self


def _require_times(terms: Iterable[CollectiveTerm], runs: int) -> None:
    """ValueError unless each collective has one time for each run."""
    for term in terms:
        if not len(term.measured_s) == len(term.measured_exposed_s) == runs:
            raise ValueError(f"{term.op} over {term.axis} has {len(term.measured_s)} times, but there were {runs} runs")


def run_directory(launch: Launch) -> Path:
    """Default folder of a run: `runs/<time>-<name>`."""
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{launch.name}"


def differences_name(rank: int | str) -> str:
    """File of a rank's differences from the program, if any; `*` for all ranks'."""
    return f"differs-rank{rank}.json"


def routed_name(rank: int | str) -> str:
    """File of what a rank's router really sent, beside what was expected; `*` for all ranks'."""
    return f"routed-rank{rank}.json"


def remove_outcome(directory: Path) -> None:
    """Delete the final files of an earlier run in the same folder; metrics are appended."""
    for path in (directory / SUMMARY_NAME, *directory.glob(differences_name("*")), *directory.glob(routed_name("*"))):
        path.unlink(missing_ok=True)


class Run(Document):
    """One run of a configuration, in fresh processes: means over its middle steps."""

    began: str = Field(description="When, ISO 8601.")
    load: NonNegativeFloat = Field(description="Load of the host at the start: runnable processes.")
    measured: dict[str, NonNegativeFloat] = Field(description="Quantities of one step of one rank.")
    steps_s: tuple[PositiveFloat, ...] = Field(description="Each step after the warm-up, mean over ranks, s.")
    losses: tuple[float, ...] = Field(description="Loss of each step, the warm-up included.")
    gradient_norms: tuple[float, ...] = Field(description="Global gradient norm of each step, the warm-up included.")
    differs: tuple[str, ...] = Field(default=(), description="Collectives that differ from the program.")


class ComparedConfiguration(Document):
    """One configuration, predicted vs. measured; a baseline keeps no single runs and collectives."""

    grid: LaunchGrid = Field(description="How the ranks are arranged.")
    micro_batch: PositiveInt = Field(description="Sequences one rank processes at a time.")
    recompute: Recompute = Field(description=RECOMPUTE_WORDS)
    recompute_layers: PositiveInt | None = Field(
        default=None, description="Layers of each chunk, from its first, with that recompute; absent: all of them."
    )
    kept_layers: NonNegativeInt = Field(description="Layers that are not resharded after forward.")
    chunks: PositiveInt = Field(default=1, description="Chunks of each pipeline stage.")
    parts: tuple[PositiveInt, ...] | None = Field(default=None, description="Layers of each model part; absent: even.")
    workload: Workload = Field(description="What is trained.")
    pairs: StepPairs = Field(description="Predicted vs. measured, s and bytes: medians over the runs.")
    runs: tuple[Run, ...] = Field(default=(), description="Every run.")
    terms: tuple[CollectiveTerm, ...] = Field(default=(), description="Each collective.")

    @property
    def name(self) -> str:
        """Its name in tables: see `configuration_name`."""
        return configuration_name(self)

    @model_validator(mode="after")
    def _has_all_of_each_run(self) -> ComparedConfiguration:
        for run in self.runs:
            if missing := [name for name in QUANTITIES if name not in run.measured]:
                raise ValueError(f"the run of {run.began} lacks {', '.join(missing)}")
        _require_times(self.terms, len(self.runs))
        return self

    def with_runs(self, runs: Sequence[Run], terms: Sequence[CollectiveTerm]) -> ComparedConfiguration:
        """The same prediction beside these runs: their median, and their spread over it."""
        values = {name: [run.measured[name] for run in runs] for name in QUANTITIES}
        measured = {name: median(found) for name, found in values.items()}
        ranges = {name: (max(found) - min(found)) / (measured[name] or 1.0) for name, found in values.items()}
        spread = ranges if len(runs) > 1 else {}
        pairs = self.pairs.model_copy(update={"measured": measured, "spread": spread})
        return self.model_copy(update={"pairs": pairs, "runs": tuple(runs), "terms": tuple(terms)})


def configuration_name(one: Launch | ComparedConfiguration) -> str:
    """Such as `x2·y1·z2·data2 (data,x,z) b4`: grid, rank order, micro-batch, then what differs from the ordinary."""
    words = [f"{one.grid.label} b{one.micro_batch}"]
    words += [f"{one.chunks} chunks"] * (one.chunks > 1)
    words += ["parts " + "-".join(map(str, one.parts))] if one.parts else []
    words += [one.recompute] * (one.recompute != "none")
    words += [f"on {one.recompute_layers} layers"] if one.recompute_layers else []
    return " ".join([*words, *["no overlap"] * (not one.workload.overlaps)])


class Serial(Document):
    """The same training on one rank alone, as the reference."""

    losses: tuple[float, ...] = Field(description="Loss of each step.")
    gradient_norms: tuple[float, ...] = Field(description="Global gradient norm of each step.")


class Measurements(Document):
    """Measurements of `axonn-tune validate`."""

    renewed_by: ClassVar[str] = "axonn-tune validate -o FILE"
    schema_: Literal["axonn-tune/measurement/2"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/measurement/2."
    )
    created: str = Field(description="When it was written, ISO 8601.")
    tool_version: str = Field(description="Of axonn-tune.")
    command: str = Field(description="Command line.")
    place: Site = Field(description="Where everything ran.")
    warmup_steps: NonNegativeInt = Field(description="Warm-up steps of each run, which do not count.")
    model_sha256: str = Field(description="Hash of the model file, what it extends, and overrides.")
    machine_sha256: str = Field(description="The same for the machine.")
    model: Model = Field(description="The whole model document.")
    machine: Machine = Field(description="The whole machine profile that was predicted for.")
    serial: Serial | None = Field(default=None, description="One rank alone; absent: it did not run.")
    configurations: tuple[ComparedConfiguration, ...] = Field(min_length=1, description="What was run.")

    @model_validator(mode="after")
    def _are_measured(self) -> Measurements:
        for one in self.configurations:
            if not one.runs or not one.pairs.measured:
                raise ValueError(f"{one.name} has no runs")
        return self


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

    renewed_by: ClassVar[str] = "axonn-tune regress FILE --record"
    schema_: Literal["axonn-tune/baseline/2"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/baseline/2."
    )
    created: str = Field(description="When it was recorded, ISO 8601.")
    tool_version: str = Field(description="Of axonn-tune.")
    reason: str = Field(default="", description="Why it was recorded.")
    place: Site | None = Field(default=None, description="Where it was measured; absent: predictions alone.")
    tolerances: Tolerances = Field(default=Tolerances(), description="Relative changes within tolerance.")
    floors: Floors = Field(default=Floors(), description="Accuracy to keep.")
    model: Model = Field(description="The whole model document.")
    machine: Machine = Field(description="The whole machine profile that was predicted for.")
    configurations: tuple[ComparedConfiguration, ...] = Field(min_length=1, description="Every configuration.")
