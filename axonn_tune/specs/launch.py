"""The launch document: everything the runtime needs to execute one configuration, self-contained."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import AfterValidator, Field, model_validator

from axonn_tune.grid import AXES, RANK_AXES, Grid, split_axes
from axonn_tune.specs.document import LARGEST_COUNT, Document, NonNegativeFloat, PositiveFloat, PositiveInt, Share, Size
from axonn_tune.specs.machine import Backend, EnvironmentVariable
from axonn_tune.specs.model import Model, unrun
from axonn_tune.specs.workload import RECOMPUTE_WORDS, Recompute, Workload

Axis = Literal["x", "y", "z", "data", "context", "pipeline"]
Purpose = Literal["overlap", "memory", "compute", "site", "debug"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
NonNegativeInt = Annotated[int, Field(ge=0, le=LARGEST_COUNT)]


class LaunchGrid(Document):
    """Axis sizes, and the axes from the fastest-varying rank outwards."""

    left_out_at_default: ClassVar[tuple[str, ...]] = ("context", "expert")

    x: Size = Field(description="Ranks that split the output of a normal layer.")
    y: Size = Field(description="Ranks that split its input.")
    z: Size = Field(description="Ranks that split the stored weights, and the batch.")
    data: Size = Field(description="Replicas, which split the batch alone.")
    context: Size = Field(default=1, description="Ranks that split each sequence.")
    expert: Size = Field(default=1, description="Ranks of z, then of data, that have experts of their own.")
    pipeline: Size = Field(default=1, description="Pipeline stages, which split the layers.")
    order: tuple[Axis, ...] = Field(
        min_length=4, max_length=6, description="Rank order: axes, fastest-varying rank first."
    )

    @model_validator(mode="after")
    def _names_each_axis_once(self) -> LaunchGrid:
        self.grid()
        return self

    def grid(self) -> Grid:
        """The same as the value that cost model and runtime work with."""
        sizes = {axis: getattr(self, axis) for axis in (*RANK_AXES, "expert")}
        return Grid(**sizes, order=self.order)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each axis by name; of stages and context only where there are several."""
        return {axis: size for axis, size in self.grid().by_axis.items() if axis in AXES or size > 1}

    @property
    def product(self) -> tuple[str, str]:
        """`x·y·z·data` and `2·1·2·2`."""
        ranked = {axis: size for axis, size in self.sizes.items() if axis in RANK_AXES}
        return "·".join(ranked), "·".join(map(str, ranked.values()))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.grid().world

    @property
    def label(self) -> str:
        """Such as `x2·y1·z2·data2 (data,x,z)`: sizes, then the axes above 1, fastest-varying rank first."""
        sizes = self.sizes
        wide = [axis for axis in self.order if sizes[axis] > 1]
        product = "·".join(f"{axis}{size}" for axis, size in sizes.items())
        return f"{product} ({','.join(wide)})" if wide else product


class LaunchVariable(EnvironmentVariable):
    """An environment variable of every rank."""

    purpose: Purpose = Field(
        description="overlap, memory, compute: the prediction assumes it; site: this machine needs it; debug: neither."
    )


class Optimizer(Document):
    """An optimizer with a warm-up and cosine schedule."""

    name: Literal["adamw", "sgd", "lion", "muon"] = Field(
        default="adamw",
        description="What updates weights. muon orthogonalizes matrices of blocks, and leaves all else to adamw.",
    )
    learning_rate: PositiveFloat = Field(default=3e-4, description="Peak, reached after the warm-up.")
    minimum_learning_rate: NonNegativeFloat = Field(default=3e-5, description="Reached at the end of the decay.")
    warmup_steps: NonNegativeInt = Field(default=100, description="Steps of linear warm-up from 0.")
    decay_steps: PositiveInt = Field(default=10_000, description="Step at which the cosine decay ends.")
    betas: tuple[Share, Share] = Field(
        default=(0.9, 0.95), description="Decay of the first and second moment of adamw; of lion's update and momentum."
    )
    momentum: Share = Field(default=0.95, description="Decay of the momentum of sgd and muon.")
    iterations: PositiveInt = Field(default=5, description="Newton-Schulz iterations of muon.")
    eps: PositiveFloat = Field(default=1e-8, description="Added to the root of the second moment.")
    weight_decay: NonNegativeFloat = Field(default=0.1, description="Decoupled, on matrices only.")
    gradient_clip_norm: PositiveFloat | None = Field(default=1.0, description="Global norm; null: no clipping.")


class Data(Document):
    """Token file and sampling."""

    path: str | None = Field(default=None, description="Token file; absent: tokens drawn from the seed.")
    seed: NonNegativeInt = Field(default=0, description="Seed of the sampling order.")


class Checkpoint(Document):
    """Where and how often state is saved; absent directory: never."""

    left_out_at_default: ClassVar[tuple[str, ...]] = ("base",)

    directory: str | None = Field(default=None, description="Folder; absent: nothing is saved.")
    every_steps: PositiveInt = Field(default=1000, description="Steps between two.")
    keep: PositiveInt = Field(default=3, description="Number of newest checkpoints that stay.")
    base: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="With workload.tuning the checkpoint, or a folder of some, whose weights stay as they are; absent: "
        "made from the seed.",
    )


class MetricSinks(Document):
    """Where metrics go in addition to the run's JSON lines."""

    tensorboard: bool | Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Event files of TensorBoard, by rank 0: true for the run's folder, or another; absent: none.",
    )


def _axes(axis: str) -> str:
    split_axes(axis)
    return axis


TermKey: TypeAlias = tuple[str, str, str, str, int]
"""Operation, axis, phase, layer and whole bytes of a collective."""


class CollectiveTerm(Document):
    """All calls of one collective in one step of one rank: as predicted (null: not), and as measured by each run."""

    op: str = Field(description="Collective: all_gather, reduce_scatter, all_reduce.")
    axis: Annotated[str, AfterValidator(_axes)] = Field(description="Grid axis, or several.")
    phase: str = Field(description="forward, recompute, backward or step.")
    layer: str = Field(description="Layer, such as mlp.fc1.")
    count: NonNegativeInt = Field(description="Calls per step and rank.")
    bytes: NonNegativeFloat = Field(description="Full (gathered or reduced) buffer of one call.")
    group: PositiveInt = Field(description="Ranks taking part.")
    tier: str | None = Field(description="Outermost network level it crosses.")
    seconds: NonNegativeFloat | None = Field(description="Time of all calls, s.")
    exposed_s: NonNegativeFloat | None = Field(description="The part that is not overlapped, s.")
    measured_s: tuple[NonNegativeFloat, ...] = Field(
        default=(), description="Measured, of each run, by the summary's seconds_convention, s."
    )
    measured_exposed_s: tuple[NonNegativeFloat, ...] = Field(
        default=(), description="Of each run: computing stood still for it, late peers waited for, mean over ranks, s."
    )
    elapsed_s: tuple[NonNegativeFloat, ...] = Field(
        default=(), description="Of each run: the mean over ranks instead, late peers waited for, s."
    )
    steps_s: tuple[tuple[NonNegativeFloat, ...], ...] = Field(
        default=(), description="Of each run, each step after the warm-up: mean over ranks, late peers waited for, s."
    )

    @property
    def key(self) -> TermKey:
        """What names it in a step."""
        return self.op, self.axis, self.phase, self.layer, round(self.bytes)


OF_RUNS = ("measured_s", "measured_exposed_s", "elapsed_s", "steps_s")
"""Fields of a collective that have an entry for each run."""


class Prediction(Document):
    """Prediction of one step."""

    machine: str = Field(description="Profile predicted for.")
    accelerator: str = Field(description="Accelerator of one rank.")
    peak_tflops: PositiveFloat = Field(description="Its peak in this precision, TFLOP/s: denominator of mfu and hfu.")
    cost: str = Field(description="Cost model: alpha-beta, paper, paper-released or paper-mended.")
    iteration_s: PositiveFloat | None = Field(description="One step, s; null where the cost model gives none.")
    low_s: NonNegativeFloat | None = Field(description="Lower end of its 80% interval, s.")
    high_s: PositiveFloat | None = Field(description="Upper end, s.")
    communication_s: NonNegativeFloat = Field(
        description="All collectives of a step and rank, overlapped ones included, s."
    )
    exposed_communication_s: NonNegativeFloat | None = Field(description="The part that is not overlapped, s.")
    compute_s: NonNegativeFloat | None = Field(description="Kernels of a step and rank, s.")
    memory_bytes: NonNegativeFloat | None = Field(description="Peak of one rank.")
    memory_limit_bytes: PositiveFloat | None = Field(description="Memory limit of one rank.")
    tokens_per_s: PositiveFloat | None = Field(description="Tokens per second, all ranks.")
    mfu: NonNegativeFloat | None = Field(description="Model FLOPs over peak; activation recomputation not counted.")
    hfu: NonNegativeFloat | None = Field(description="The same with activation recomputation and padding.")
    logged_tflops_per_gpu: PositiveFloat | None = Field(
        default=None, description="TFLOP/s of a GPU that the framework's own log prints, by its own count of FLOPs."
    )
    terms: tuple[CollectiveTerm, ...] = Field(description="Each collective's share.")
    stage: NonNegativeInt = Field(
        default=0, description="Pipeline stage with the most communication, to which the communication figures belong."
    )


class Provenance(Document):
    """Program, version and inputs that wrote this file."""

    tool: str = Field(description="Program.")
    version: str = Field(description="Its version.")
    created: str = Field(description="When, ISO 8601.")
    command: str = Field(description="Command line.")
    model_sha256: str = Field(description="Hash of the model file, what it extends, and overrides.")
    machine_sha256: str = Field(description="The same for the machine.")


class Launch(Document):
    """A launch config."""

    left_out_at_default: ClassVar[tuple[str, ...]] = (
        *("force_load_balancing", "load_balancing_loss", "router_bias_rate"),
        "lora_alpha",
    )

    schema_: Literal["axonn-tune/launch/1"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/launch/1."
    )
    name: str = Field(description="Name of the run, in folder and job names.")
    model: Model = Field(description="The whole model document.")
    workload: Workload = Field(description="The whole workload document.")
    grid: LaunchGrid = Field(description="How the ranks are arranged.")
    micro_batch: Size = Field(description="Sequences one rank processes at a time.")
    grad_accumulation: Size = Field(description="Gradient accumulation steps: micro-batches in one optimizer step.")
    recompute: Recompute = Field(description=RECOMPUTE_WORDS)
    recompute_layers: Size | None = Field(
        default=None, description="Layers of each chunk, from its first, with that recompute; absent: all of them."
    )
    kept_layers: NonNegativeInt = Field(description="Layers, from the last, that are not resharded after forward.")
    chunks: Size = Field(default=1, description="Chunks of each pipeline stage; more than 1 is interleaved.")
    pipeline_order: Literal["1f1b", "zb1p"] = Field(
        default="1f1b",
        description="Order of passes of the stages: 1F1B, or with weight gradients in what would be bubbles.",
    )
    parts: tuple[Size, ...] | None = Field(
        default=None,
        description="Layers of each model part, in the model's order: chunk c of stage s is part c·stages + s, from 0; "
        "absent: split evenly.",
    )
    steps: PositiveInt = Field(default=100, description="Optimizer steps to run.")
    seed: NonNegativeInt = Field(default=0, description="Seed of the initial weights and of dropout.")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="Dropout probability, after the embedding and both outputs of a block; its time is not predicted.",
    )
    force_load_balancing: bool = Field(
        default=False, description="Every expert gets equally many tokens, whatever the router says: for measuring."
    )
    load_balancing_loss: NonNegativeFloat = Field(
        default=0.0, description="Coefficient of the auxiliary loss that balances experts over the whole batch."
    )
    router_bias_rate: NonNegativeFloat = Field(
        default=1e-3, description="How far routers' biases move each step, towards equal numbers of tokens."
    )
    lora_alpha: PositiveFloat | None = Field(
        default=None, description="Adapters' outputs are multiplied by it over their rank; absent: twice the rank."
    )
    compile: bool = Field(
        default=False,
        description="Elementwise work between collectives by torch.compile; needs a C++ compiler or Triton.",
    )
    deterministic: bool = Field(default=False, description="Bit-identical from run to run, at some cost in speed.")
    hang_timeout_s: Annotated[float, Field(gt=0, le=1e6)] = Field(
        default=60.0, description="A collective that takes longer ends the run, s."
    )
    optimizer: Optimizer = Field(default=Optimizer(), description="How weights are updated.")
    data: Data = Field(default=Data(), description="Training data.")
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="Saving.")
    metrics: MetricSinks = Field(
        default=MetricSinks(), description="Where metrics go in addition to the run's JSON lines."
    )
    backend: Backend = Field(description="torch.distributed backend.")
    device: Literal["cpu", "cuda"] | None = Field(
        default=None,
        description="Device of the ranks; absent: one GPU each under nccl, CPUs under gloo. cuda under gloo: shared.",
    )
    ranks_per_node: Size = Field(description="Ranks started on each node.")
    environment: tuple[LaunchVariable, ...] = Field(description="Variables every rank gets, each name once.")
    predicted: Prediction = Field(description="Prediction of one step.")
    provenance: Provenance = Field(description="Program and inputs that wrote this file.")

    @model_validator(mode="after")
    def _fits_together(self) -> Launch:
        """Refuse contradictory edits, all in one message. The model is then that of which only so much trains."""
        object.__setattr__(self, "model", self.model.tuned(self.workload.tuning))
        found = [*self._batch_problems(), *self._part_problems(), *self._environment_problems()]
        if self.backend == "nccl" and self.device == "cpu":
            found.append("device is cpu, but backend nccl needs GPUs: use backend gloo")
        if self.kept_layers > self.model.layers:
            found.append(f"kept_layers is {self.kept_layers}, but the model has {self.model.layers} layers")
        if why := unrun(self.model):
            found.append(why)
        if self.model.tuning is not None and self.optimizer.name == "muon":
            found.append("optimizer.name is muon: adapters train by adamw, sgd or lion here")
        if found:
            raise ValueError("; ".join(found))
        return self

    @property
    def adapter_scale(self) -> float:
        """What adapters' outputs are multiplied by."""
        tuning = self.workload.tuning
        return 2.0 if self.lora_alpha is None or tuning is None else self.lora_alpha / tuning.rank

    def _batch_problems(self) -> list[str]:
        grid, batch = self.grid, self.workload.global_batch
        per_step = grid.data * grid.z * self.micro_batch * self.grad_accumulation
        if per_step == batch:
            return []
        product = f"{grid.data} · {grid.z} · {self.micro_batch} · {self.grad_accumulation} = {per_step}"
        return [f"data · z · micro_batch · grad_accumulation is {product}, but workload.global_batch is {batch}"]

    def _part_problems(self) -> list[str]:
        count, layers = self.grid.pipeline * self.chunks, self.model.layers
        if self.predicted.stage >= self.grid.pipeline:
            return [f"predicted.stage is {self.predicted.stage}, but grid.pipeline is {self.grid.pipeline}"]
        if self.chunks > 1 and self.grid.pipeline == 1:
            return [f"chunks is {self.chunks}, but grid.pipeline is 1: one stage has one chunk"]
        if self.chunks > 1 and self.grad_accumulation % self.grid.pipeline:
            stages = self.grid.pipeline
            return [f"chunks above 1 need grad_accumulation ({self.grad_accumulation}) divisible by {stages} stages"]
        stages, batches = self.grid.pipeline, self.grad_accumulation
        if self.pipeline_order != "1f1b" and (stages == 1 or batches < stages):
            needed = f"pipeline_order {self.pipeline_order} needs 2 stages or more, and as many micro-batches"
            return [f"{needed}: grid.pipeline is {stages}, grad_accumulation {batches}"]
        if self.pipeline_order != "1f1b" and self.workload.tuning is not None:
            return [f"pipeline_order {self.pipeline_order}: frozen weights have no gradients that wait; take 1f1b"]
        if count > layers:
            return [f"grid.pipeline · chunks is {count}, but the model has {layers} layers"]
        if self.parts is not None and (len(self.parts) != count or sum(self.parts) != layers):
            return [f"parts are {list(self.parts)}, but {count} with {layers} layers together are needed"]
        return []

    def _environment_problems(self) -> list[str]:
        names = [variable.name for variable in self.environment]
        twice = sorted({name for name in names if names.count(name) > 1})
        return [f"environment sets {name} more than once" for name in twice]
