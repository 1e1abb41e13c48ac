"""The machine document: accelerator, network tiers from inner to outer, collective library, launcher.

Every number has an entry in the `sources` of its section: where it comes from, and whether it is a
datasheet `peak`, a `measured` value, a `fitted` one, an `assumed` one, or a plain `fact` such as a
node's GPU count.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field, model_validator

from axonn_tune.errors import UsageError
from axonn_tune.specs.document import Document, NonNegativeValue, PositiveInt, PositiveValue, Share
from axonn_tune.units import GIB, bytes_per_s, flops_per_s, seconds
from axonn_tune.vocabulary import MOST_TIMES, GemmFormat, Precision

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
LARGEST_NODE = 16
"""Ranks of the largest NVLink domain that is a node; more are a rack."""
MEASURED_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
COLLECTIVE_KINDS = MEASURED_KINDS[:3]
"""Those that every profile has; a calibrated one has all-to-alls too."""
Algorithm = Literal["ring", "recursive", "tree", "hierarchical", "in_switch", "direct"]
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3
Factor = Annotated[float, Field(ge=LEAST_FACTOR, le=MOST_FACTOR)]
"""A number relative to another one."""
CausalShare = Annotated[float, Field(ge=1e-9, le=2)]
"""A share of work of which the causal mask leaves half."""
SoftmaxShare = Annotated[float, Field(ge=0, le=0.99)]
"""A share of a time that another part of the work overlaps."""
MatmulLayout = Literal["NN", "NT", "TN"]
Backend = Literal["nccl", "gloo"]
Nvidia = Literal["pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell", "rubin"]
Amd = Literal["cdna2", "cdna3", "cdna4"]
NVIDIA: tuple[Nvidia, ...] = get_args(Nvidia)
"""Generations in their order, by the compute capability of their data-center GPUs: 6.0, 7.0, 7.5, 8.0, 8.9, 9.0, 10.x,
and the one after it (https://developer.nvidia.com/cuda-gpus)."""


class Source(Document):
    """Where a number comes from."""

    kind: Literal["peak", "measured", "fitted", "assumed", "placeholder", "fact"] = Field(
        description="peak: datasheet; measured; fitted: to measurements; assumed; placeholder: to be replaced; "
        "fact: a count, not a rate."
    )
    source: str = Field(min_length=1, description="Document, measurement or reasoning it comes from.")


class SourcedSection(Document):
    """A section with an entry in `sources` for each number."""

    sources: dict[str, Source] = Field(description="Provenance, one entry per number of this section.")
    _unsourced: ClassVar[frozenset[str]] = frozenset({"name", "sources", "version", "algorithms"})

    @model_validator(mode="after")
    def _every_number_has_a_source(self) -> SourcedSection:
        given = {key for key in self.model_fields_set if key not in self._unsourced and getattr(self, key) is not None}
        # A written default needs no source, like an omitted one.
        defaults = {key for key in given if getattr(self, key) == type(self).model_fields[key].get_default()}
        missing = sorted(given - defaults - self.sources.keys())
        if missing:
            raise ValueError(f"no provenance in 'sources' for {', '.join(missing)}")
        unknown = sorted(self.sources.keys() - given)
        if unknown:
            raise ValueError(f"'sources' names {', '.join(unknown)}, which this section does not set")
        return self


class Accelerator(SourcedSection):
    """One GPU (or one die that the launcher sees as a GPU), or one CPU rank."""

    name: str = Field(description="Product name; by it kernels that were measured are found (`cost/kernels.csv`).")
    generation: Nvidia | Amd | None = Field(
        default=None,
        description="Its architecture, which decides on attention kernels, layouts of 8-bit GEMMs and variables of "
        "launch scripts; absent: no GPU, or Ampere or newer without what Hopper and Blackwell add.",
    )
    power_w: PositiveValue | None = Field(
        default=None, description="Power limit (TDP) of one rank, W; absent: energy is not predicted."
    )
    memory_gib: PositiveValue = Field(description="Memory of one rank, GiB.")
    reserved_memory_gib: NonNegativeValue = Field(
        description="Reserved for context, library buffers and allocator, GiB."
    )
    memory_bandwidth_gb_per_s: PositiveValue = Field(description="Peak memory bandwidth, GB/s.")
    memory_efficiency: Share = Field(
        description="Share of the peak bandwidth that element-wise kernels and a GEMM's memory accesses reach."
    )
    peak_tflops: dict[GemmFormat, PositiveValue] = Field(
        description="Dense tensor-core peak by precision, TFLOP/s; tf32: of FP32 operands that are rounded to it."
    )
    vector_tflops: dict[Precision, PositiveValue] | None = Field(
        default=None, description="Peak without tensor cores by precision, TFLOP/s; as fp32 where not given."
    )
    matmul_efficiency: dict[MatmulLayout, Share] = Field(
        description="Share of the peak that large GEMMs reach: NN forward, NT input gradient, TN weight gradient."
    )
    format_efficiency: dict[GemmFormat, Share] = Field(
        default={},
        description="Share of their own peak that large forward GEMMs reach in formats below 16 bits; absent: "
        "matmul_efficiency.",
    )
    training_share: Share = Field(
        description="Sustained efficiency: sustained over burst throughput of GEMMs and attention."
    )
    matmul_launch_us: NonNegativeValue = Field(description="Fixed time of one GEMM, µs.")
    matmul_ramp: NonNegativeValue = Field(
        default=0.0,
        description="Steps of the contraction (K) dimension to fill and drain a GEMM's pipeline.",
    )
    promoted_share: Share | None = Field(
        default=None,
        description="Rate of 8-bit GEMMs whose sums are promoted to FP32 every 128 products, over that of others; "
        "absent: tensor cores sum in FP32.",
    )
    matmul_tile: PositiveInt = Field(description="Rows and columns are rounded up to multiples of this.")
    attention_forward_efficiency: CausalShare = Field(
        description="Fused attention alone, forward: share of the peak, the causal half counted as full work, for "
        "heads of 128 and 8,192 keys."
    )
    attention_backward_efficiency: CausalShare = Field(description="The same, backward.")
    attention_forward_softmax: SoftmaxShare = Field(
        default=0.0,
        description="Share of that time, forward, that softmax takes beside tensor cores, whatever the width of heads "
        "and the number format; 0: heads of all widths reach the same share of the peak.",
    )
    attention_backward_softmax: SoftmaxShare = Field(default=0.0, description="The same, backward.")
    attention_ramp_tokens: NonNegativeValue = Field(
        default=0.0,
        description="Fused attention: keys at which a call reaches half of what long ones do, heads of 128; 0: all "
        "reach the same.",
    )
    kernel_launch_us: NonNegativeValue = Field(description="Fixed time of one element-wise kernel, µs.")
    contention: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.0,
        description="Compute slowdown from overlap: time lost over the time of the overlapped communication.",
    )

    @model_validator(mode="after")
    def _memory_is_left(self) -> Accelerator:
        if self.reserved_memory_gib >= self.memory_gib:
            reserved, memory = f"{self.reserved_memory_gib:g}", f"{self.memory_gib:g}"
            raise ValueError(f"reserved_memory_gib ({reserved}) leaves nothing of memory_gib ({memory}): must be below")
        return self

    def before(self, generation: Nvidia) -> bool:
        """Whether it is NVIDIA's of an older generation than this one."""
        return self.generation in NVIDIA[: NVIDIA.index(generation)]

    def since(self, generation: Nvidia) -> bool:
        """Whether it is NVIDIA's of this generation or a newer one."""
        return self.generation in NVIDIA[NVIDIA.index(generation) :]

    @property
    def is_amd(self) -> bool:
        """Whether it is AMD's."""
        return self.generation in get_args(Amd)

    @property
    def memory_bytes(self) -> float:
        """Memory of one rank, bytes."""
        return self.memory_gib * GIB

    def peak_flops_per_s(self, precision: GemmFormat) -> float:
        """Dense tensor-core peak, FLOP/s; UsageError if the accelerator does not state this precision."""
        if precision not in self.peak_tflops:
            raise UsageError(f"{self.name} states no peak for {precision}, only for {', '.join(self.peak_tflops)}")
        return flops_per_s(self.peak_tflops[precision])

    def reached_flops_per_s(self, precision: GemmFormat) -> float:
        """The dense peak whose matmul_efficiency large GEMMs of this precision reach, FLOP/s."""
        peak, own = self.peak_flops_per_s(precision), self.format_efficiency.get(precision)
        return peak * own / self.matmul_efficiency["NN"] if own else peak

    def vector_flops_per_s(self, precision: Precision) -> float:
        """Peak without tensor cores, FLOP/s; where neither it nor that of fp32 is stated, the lowest dense peak."""
        fp32 = self.peak_tflops.get("fp32", min(self.peak_tflops.values()))
        return flops_per_s((self.vector_tflops or {}).get(precision, fp32))


class MeasuredBandwidth(Document):
    """Bandwidth measured for one group shape, all such groups running at once."""

    stride: PositiveInt = Field(description="Ranks between neighbours of the group: product of the inner axes.")
    group: PositiveInt = Field(description="Ranks in the group.")
    bandwidth_gb_per_s: PositiveValue = Field(description="Bus bandwidth of one group, GB/s.")


class CollectiveFactors(Document):
    """Latency and bandwidth of one collective, relative to the network level's."""

    latency_factor: Annotated[float, Field(ge=0, le=MOST_FACTOR)] = Field(
        description="Latency of a hop, relative to the network level's."
    )
    bandwidth_factor: Factor = Field(description="Bandwidth, relative to the network level's.")


class Tier(SourcedSection):
    """One level of the network: what connects the domains of the tier inside it.

    The innermost tier connects single ranks; its bandwidth is what one rank sends. An outer tier
    connects whole domains of the next inner tier; its bandwidth is what one such domain sends,
    shared by everything in it.
    """

    name: str = Field(min_length=1, description="Name in --set and reports.")
    ranks: PositiveInt | None = Field(
        default=None, description="Ranks in one domain of this network level; absent: all."
    )
    latency_us: NonNegativeValue = Field(description="Latency of one hop over this network level, µs.")
    bandwidth_gb_per_s: PositiveValue = Field(description="One rank (innermost) or one inner domain (others), GB/s.")
    measured: tuple[MeasuredBandwidth, ...] | None = Field(
        default=None, description="Measured bandwidths of group shapes, used instead of the link-sharing rule."
    )
    collectives: dict[CollectiveKind, CollectiveFactors] | None = Field(
        default=None, description="Collectives whose latency and bandwidth differ from this network level's."
    )

    @property
    def latency_s(self) -> float:
        """Time of one hop without data, s."""
        return seconds(self.latency_us)

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Bandwidth, bytes/s."""
        return bytes_per_s(self.bandwidth_gb_per_s)

    def used_by(self, kind: CollectiveKind) -> Tier:
        """The tier as one collective uses it."""
        factors = (self.collectives or {}).get(kind)
        if factors is None:
            return self
        latency_us = self.latency_us * factors.latency_factor
        bandwidth = self.bandwidth_gb_per_s * factors.bandwidth_factor
        return self.model_copy(update={"latency_us": latency_us, "bandwidth_gb_per_s": bandwidth})


class Protocol(Document):
    """A protocol of the library: its latency and bandwidth relative to the network level's."""

    name: str = Field(description="The library's name for it.")
    latency_factor: Factor = Field(description="Latency, relative to the network level's.")
    bandwidth_factor: Share = Field(description="Bandwidth, relative to the network level's.")


class Library(SourcedSection):
    """The collective library: its algorithms, protocols and fixed cost of a call."""

    name: str = Field(description="NCCL, RCCL or Gloo.")
    version: str = Field(description="Version the numbers hold for.")
    launch_us: NonNegativeValue = Field(description="Fixed time of one collective call, µs.")
    algorithms: dict[CollectiveKind, Annotated[tuple[Algorithm, ...], Field(min_length=1)]] = Field(
        description="Algorithms per collective."
    )
    protocols: tuple[Protocol, ...] = Field(min_length=1, description="Protocols.")

    @model_validator(mode="after")
    def _has_each_collective(self) -> Library:
        if missing := [kind for kind in COLLECTIVE_KINDS if kind not in self.algorithms]:
            raise ValueError(f"algorithms must name {' and '.join(missing)} too")
        return self

    @property
    def launch_s(self) -> float:
        """Fixed time of one collective call, s."""
        return seconds(self.launch_us)


class Host(SourcedSection):
    """A node's host, which its ranks share: its memory, its CPUs, and the link of each rank to it."""

    memory_gib: PositiveValue | None = Field(
        default=None, description="Memory of a node, GiB; absent: what is offloaded is not held against it."
    )
    memory_bandwidth_gb_per_s: PositiveValue | None = Field(
        default=None, description="Of a node's memory, peak of all sockets, GB/s; absent: no limit."
    )
    link_gb_per_s: PositiveValue = Field(description="Copies of pinned memory between one rank and its host, GB/s.")
    adam_parameters_per_s: PositiveValue = Field(
        description="Parameters that torch's fused AdamW updates in the process of one rank, 1/s."
    )


ASSUMED_HOST = Host(
    link_gb_per_s=26.0,
    adam_parameters_per_s=0.77e9,
    sources={
        "link_gb_per_s": Source(kind="assumed", source="0.81 of PCIe of the fourth generation with 16 lanes, 32 GB/s"),
        "adam_parameters_per_s": Source(kind="assumed", source="as that of dgx-h100"),
    },
)
"""The host of a machine that does not state one."""


class Uncertainty(SourcedSection):
    """Relative half-width of the 80% interval of a prediction."""

    communication: Share = Field(description="Of communication times.")
    compute: Share = Field(
        description="Of compute times by measured or fitted rates; by assumed ones it is wider (docs/accuracy.md)."
    )


class Operation(SourcedSection):
    """What a site asks and pays for, and how often it fails: of whole trainings, not of steps."""

    price_per_gpu_hour: PositiveValue | None = Field(
        default=None, description="Price of a GPU-hour; absent: money is not predicted."
    )
    gpu_hours_between_failures: PositiveValue | None = Field(
        default=None, description="GPU-hours between two failures that end a job; absent: that of published runs."
    )
    restart_minutes: PositiveValue | None = Field(
        default=None, description="From a failure to the first step, without loading; absent: published."
    )
    storage_gb_per_s: PositiveValue | None = Field(
        default=None, description="What all ranks together write and read; absent: a published share for each GPU."
    )
    host_copy_gb_per_s: PositiveValue | None = Field(
        default=None,
        description="Asynchronous saving: what a rank copies to its host while training waits; absent: training waits "
        "until a checkpoint is written.",
    )
    host_share: PositiveValue | None = Field(
        default=None, description="Power of hosts over that of accelerators; absent: measured in training."
    )
    network_share: PositiveValue | None = Field(
        default=None, description="Power of switches over that of accelerators; absent: of a fat tree."
    )
    waiting_share: Share | None = Field(
        default=None, description="Power of an accelerator that does not compute, over its limit; absent: published."
    )
    pue: Annotated[float, Field(ge=1, le=10)] | None = Field(
        default=None, description="Power of the data center over that of its computers; absent: of large operators."
    )


class Software(Document):
    """Software numbers: overheads of a framework's kernels and host, relative to the profile."""

    gemm: Factor = Field(default=1.0, description="Time of GEMMs, relative to the profile's.")
    attention: Factor = Field(default=1.0, description="Time of attention, relative to the profile's.")
    traffic: Factor = Field(default=1.0, description="Bytes that element-wise kernels move, relative to the program's.")
    operation_us: NonNegativeValue = Field(
        default=0.0, description="Accelerator time per operation on top of the profile's launch times, µs."
    )
    collective_us: NonNegativeValue = Field(default=0.0, description="The same per collective, µs.")
    dispatch_us: NonNegativeValue = Field(default=0.0, description="Host time to issue one operation, µs.")


class Dispatching(Document):
    """How tokens reach their experts by one dispatcher on this machine."""

    call_us: NonNegativeValue = Field(description="Fixed time of a dispatch, and of a combine, µs.")
    bandwidth_share: Factor = Field(default=1.0, description="Bandwidth reached, relative to the shipped share.")


class LearnedNumber(Document):
    """One number that evidence could update."""

    path: str = Field(min_length=1, description="Path in the profile, such as tiers.network.latency_us.")
    prior: PositiveValue = Field(description="Its value before any evidence.")
    prior_spread: NonNegativeValue = Field(description="Prior standard deviation of its logarithm.")
    value: PositiveValue = Field(description="Its value now.")
    spread: NonNegativeValue = Field(description="Posterior standard deviation of its logarithm.")
    moved_by: tuple[str, ...] = Field(default=(), description="The evidence that moved it most, with its share.")


class Learned(Document):
    """What a profile has learned from runs: every number before and after, and their joint uncertainty."""

    evidence: tuple[str, ...] = Field(description="What it was learned from.")
    ranks: PositiveValue = Field(description="Ranks of the evidence, geometric mean; of several learnings the most.")
    numbers: tuple[LearnedNumber, ...] = Field(description="Every number that could have moved.")
    correlations: tuple[tuple[float, ...], ...] = Field(
        description="Of the logarithms of these numbers: row i holds those of number i with all before it."
    )
    of_layout: NonNegativeValue = Field(description="Residual standard deviation of a step's logarithm, per layout.")
    of_model: NonNegativeValue = Field(description="The same, common to all layouts of one model and number of ranks.")
    per_doubling: NonNegativeValue = Field(
        description="The same, common to all layouts, for each doubling of the ranks of the evidence."
    )


class PaperEntry(Document):
    """One entry of the paper's bandwidth table; `group: null` stands for every larger group."""

    inner: PositiveInt = Field(description="Product of the sizes of the inner axes.")
    group: PositiveInt | None = Field(description="Ranks in the group; null: every larger group.")
    bandwidth_gib_per_s: PositiveValue = Field(description="Bandwidth of one group, GiB/s.")


class PaperTable(SourcedSection):
    """Inputs of the paper's own model."""

    ranks_per_node: PositiveInt = Field(description="Ranks that share a node.")
    inter_node_gib_per_s: PositiveValue = Field(description="β_inter of equation 7.")
    table: tuple[PaperEntry, ...] = Field(
        description="Keyed by (product of inner axes, own size); larger products use the entries of the largest."
    )

    @model_validator(mode="after")
    def _no_entry_twice(self) -> PaperTable:
        keys = [(entry.inner, entry.group) for entry in self.table]
        twice = sorted(
            {f"inner {inner}, group {group or 'null'}" for inner, group in keys if keys.count((inner, group)) > 1}
        )
        if twice:
            raise ValueError(f"more than one bandwidth for {'; '.join(twice)}")
        return self


Line = Annotated[str, Field(pattern=r"^[^\p{C}\p{Zl}\p{Zp}]*$")]
SlurmName = Annotated[str, Field(pattern=r'^[^\p{C}\p{Zl}\p{Zp}"\\]*$')]
"""One line of a script; one in quotes."""


class EnvironmentVariable(Document):
    """One variable the launch scripts set."""

    name: str = Field(pattern="^[A-Za-z_][A-Za-z0-9_]*$", description="Its name.")
    value: str = Field(description="Its value, as text.")
    why: str = Field(min_length=1, description="Reason, printed as a comment in scripts.")


class Slurm(Document):
    """Slurm settings of a site besides nodes and tasks."""

    constraint: SlurmName | None = Field(default=None, description="--constraint.")
    partition: SlurmName | None = Field(default=None, description="--partition.")
    qos: SlurmName | None = Field(default=None, description="--qos.")
    account: SlurmName | None = Field(default=None, description="Absent: the script leaves a placeholder.")
    cpus_per_rank: PositiveInt = Field(description="CPU cores one rank gets.")
    gpus_per_rank: PositiveInt | None = Field(default=1, description="GPUs one rank gets; null: none are requested.")
    extra: tuple[Line, ...] = Field(default=(), description="More #SBATCH options, as written.")
    srun: tuple[Line, ...] = Field(default=(), description="More srun options, as written.")


class Launcher(Document):
    """How jobs start on this machine."""

    backend: Backend = Field(description="torch.distributed backend.")
    ranks_per_node: PositiveInt = Field(description="Ranks started on each node.")
    slurm: Slurm | None = Field(default=None, description="Slurm settings of this site; absent: no Slurm.")
    environment: tuple[EnvironmentVariable, ...] = Field(default=(), description="Variables every rank gets.")


class Measurement(Document):
    """Host and software of a measurement, to compare with those of a later use."""

    created: str = Field(description="When, ISO 8601.")
    tool_version: str = Field(description="Of axonn-tune.")
    torch_version: str | None = Field(default=None, description="Of torch; absent: read from logs.")
    hosts: tuple[str, ...] = Field(description="Host names.")
    device: str = Field(description="Device of one rank.")
    ranks: PositiveInt = Field(description="Ranks in the measurement.")
    cores: PositiveInt | None = Field(default=None, description="CPU cores of the first host that ranks could use.")
    network: str = Field(description="What the ranks communicated through.")
    samples: PositiveInt = Field(description="Points the numbers are fitted to, repeats counted.")
    held_out_error: NonNegativeValue | None = Field(default=None, description="Mean error of held-out collectives.")
    outliers: tuple[str, ...] = Field(default=(), description="Outliers, which had little influence on the fit.")


class Machine(Document):
    """A machine profile."""

    left_out_at_default: ClassVar[tuple[str, ...]] = ("operation",)

    schema_: Literal["axonn-tune/machine/1"] = Field(
        alias="schema", description="Kind and version of this document: axonn-tune/machine/1."
    )
    name: str = Field(min_length=1, description="The name it is found by: that of its file.")
    description: str = Field(default="", description="One line: what it is.")
    accelerator: Accelerator = Field(description="Accelerator of one rank.")
    tiers: tuple[Tier, ...] = Field(min_length=1, description="Network levels, from inner to outer.")
    library: Library = Field(description="The collective library.")
    host: Host | None = Field(default=None, description="A node's host, for CPU offload; absent: assumed.")
    uncertainty: Uncertainty = Field(description="Relative half-width of the 80% interval of a prediction.")
    launcher: Launcher = Field(description="How jobs start here.")
    operation: Operation = Field(
        default=Operation(sources={}),
        description="Price, failures, storage and power of a site; absent: published ones.",
    )
    paper: PaperTable | None = Field(default=None, description="For the paper's own cost models; absent: not for them.")

    software: dict[str, Software] = Field(
        default={}, description="Software numbers on this machine, by software; absent: the shipped ones."
    )
    dispatchers: dict[str, Dispatching] = Field(
        default={}, description="Numbers of token dispatchers on this machine; absent: the shipped ones."
    )
    imbalance: Annotated[float, Field(gt=1, le=MOST_TIMES)] | None = Field(
        default=None,
        description="Token imbalance of natural routing; absent: the shipped one.",
    )
    learned: Learned | None = Field(default=None, description="What was learned from runs; absent: nothing.")
    measured: Measurement | None = Field(
        default=None, description="Host and software of the measurement; absent: not measured by this tool."
    )

    def placing(self, world: int) -> Machine:
        """The machine as a job of so many ranks sees it: of racks it takes equal shares, the largest that make it up.

        Schedulers place it so (Slurm's `--segment`; yanring/Megatron-MoE-ModelZoo@e865051, scripts): 256 ranks are 4
        times 64 of the 72 of a rack, and a group of 64 does not straddle two.
        """
        rack = self.tiers[0].ranks
        if rack is None or rack <= LARGEST_NODE or world <= rack or world % rack == 0:
            return self
        share = next((count for count in range(rack, rack // 2, -1) if world % count == 0), rack)
        inner, outer, *others = self.tiers
        links = {"bandwidth_gb_per_s": outer.bandwidth_gb_per_s * share / rack}
        tiers = (inner.model_copy(update={"ranks": share}), outer.model_copy(update=links), *others)
        return self.model_copy(update={"tiers": tiers})

    def tiers_of(self, kind: CollectiveKind) -> tuple[Tier, ...]:
        """The tiers with the factors of one collective applied, if any."""
        if not any(tier.collectives for tier in self.tiers):
            return self.tiers
        return tuple(tier.used_by(kind) for tier in self.tiers)

    @model_validator(mode="after")
    def _tiers_grow(self) -> Machine:
        sizes = [tier.ranks for tier in self.tiers]
        for position, ranks in enumerate(sizes[:-1]):
            if ranks is None:
                raise ValueError(
                    f"tier {self.tiers[position].name!r} needs 'ranks': only the outermost may be unlimited"
                )
            outer = sizes[position + 1]
            if outer is not None and (outer <= ranks or outer % ranks):
                name = self.tiers[position + 1].name
                raise ValueError(f"tier {name!r} holds {outer} ranks, which is not a larger multiple of {ranks}")
        return self
