"""The launch document: everything the runtime needs to execute one configuration, self-contained."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from axonn_tune.specs.base import Document, NonNegativeFloat, PositiveFloat, PositiveInt, Share
from axonn_tune.specs.machine import EnvironmentVariable
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload

LAUNCH_SCHEMA = "axonn-tune/launch/1"

Axis = Literal["x", "y", "z", "data"]
NonNegativeInt = Annotated[int, Field(ge=0)]


class LaunchGrid(Document):
    """Axis sizes, and the axes from the fastest-varying rank outwards."""

    x: PositiveInt
    y: PositiveInt
    z: PositiveInt
    data: PositiveInt
    order: Annotated[tuple[Axis, ...], Field(min_length=4, max_length=4)]


class Optimizer(Document):
    """AdamW with a warm-up and cosine schedule."""

    name: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = 3e-4
    minimum_learning_rate: NonNegativeFloat = 3e-5
    warmup_steps: NonNegativeInt = 100
    decay_steps: PositiveInt = 10_000
    betas: tuple[Share, Share] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    gradient_clip_norm: PositiveFloat | None = 1.0


class Data(Document):
    """Token file and sampling."""

    path: str | None = Field(default=None, description="Token file; absent: tokens drawn from the seed.")
    seed: NonNegativeInt = 0


class Checkpoint(Document):
    """Where and how often state is saved; absent directory: never."""

    directory: str | None = None
    every_steps: PositiveInt = 1000
    keep: PositiveInt = 3


class PredictedTerm(Document):
    """One predicted collective, all calls of one step and rank together."""

    op: str
    axis: str
    phase: str
    layer: str
    count: NonNegativeInt
    bytes: NonNegativeFloat
    group: PositiveInt
    tier: str
    seconds: NonNegativeFloat
    exposed_s: NonNegativeFloat


class Prediction(Document):
    """What the tuner expects of one step."""

    machine: str
    cost: str
    iteration_s: PositiveFloat | None
    low_s: PositiveFloat | None
    high_s: PositiveFloat | None
    communication_s: NonNegativeFloat
    exposed_communication_s: NonNegativeFloat | None
    compute_s: NonNegativeFloat | None
    memory_bytes: NonNegativeFloat | None
    mfu: NonNegativeFloat | None
    hfu: NonNegativeFloat | None
    terms: tuple[PredictedTerm, ...]


class Provenance(Document):
    """What wrote this file, from what."""

    tool: str
    version: str
    created: str
    command: str
    model_sha256: str
    machine_sha256: str


class Launch(Document):
    """A launch config."""

    schema_: Literal["axonn-tune/launch/1"] = Field(alias="schema")
    name: str
    model: Model
    workload: Workload
    grid: LaunchGrid
    micro_batch: PositiveInt = Field(description="Sequences one rank processes at a time.")
    grad_accumulation: PositiveInt
    recompute: Recompute
    kept_layers: NonNegativeInt = Field(description="Layers, from the last, that keep gathered weights for backward.")
    steps: PositiveInt = 100
    seed: NonNegativeInt = Field(default=0, description="Seed of the initial weights and of dropout.")
    deterministic: bool = False
    hang_timeout_s: PositiveFloat = 60.0
    optimizer: Optimizer = Optimizer()
    data: Data = Data()
    checkpoint: Checkpoint = Checkpoint()
    backend: Literal["nccl", "gloo"]
    ranks_per_node: PositiveInt
    environment: tuple[EnvironmentVariable, ...]
    predicted: Prediction
    provenance: Provenance
