"""What a calibration measures, and what it has measured: the plan, the setting, and points."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from axonn_tune.specs.base import Document, PositiveFloat, PositiveInt
from axonn_tune.specs.launch import Launch, NonNegativeInt
from axonn_tune.specs.machine import CollectiveKind, MatmulLayout
from axonn_tune.specs.workload import Precision


class CollectiveProbe(Document):
    """One collective over all groups of a shape at once, through the runtime's own calls."""

    what: Literal["collective"] = "collective"
    op: CollectiveKind = Field(description="Which.")
    group: PositiveInt = Field(description="Ranks in each group.")
    stride: PositiveInt = Field(description="Ranks between neighbours of a group: product of the inner axes.")
    size_bytes: PositiveInt = Field(description="Full (gathered or reduced) buffer of one call.")


class TransferProbe(Document):
    """One message to the rank `stride` further on, every rank sending and receiving at once."""

    what: Literal["transfer"] = "transfer"
    stride: PositiveInt = Field(description="How much further on.")
    size_bytes: PositiveInt = Field(description="The message.")


class MatmulProbe(Document):
    """A product `O[m, n] = A[m, k] · B[k, n]` on every rank at once."""

    what: Literal["matmul"] = "matmul"
    layout: MatmulLayout = Field(description="NN forward, NT input gradient, TN weight gradient.")
    m: PositiveInt = Field(description="Rows of the output.")
    n: PositiveInt = Field(description="Columns of the output.")
    k: PositiveInt = Field(description="What is summed over.")


class CopyProbe(Document):
    """A copy in memory on every rank at once."""

    what: Literal["copy"] = "copy"
    size_bytes: PositiveInt = Field(description="Bytes copied: as many are read, and as many written.")


class AttentionProbe(Document):
    """The attention core of the model on every rank at once."""

    what: Literal["attention"] = "attention"
    backward: bool = Field(description="With its gradient.")
    sequences: PositiveInt = Field(description="Sequences.")


class StepProbe(Document):
    """A whole training step of a rank alone, every rank training its own model at once."""

    what: Literal["step"] = "step"
    launch: NonNegativeInt = Field(description="Which of the plan's launch configs.")


Probe: TypeAlias = Annotated[
    CollectiveProbe | TransferProbe | MatmulProbe | CopyProbe | AttentionProbe | StepProbe,
    Field(discriminator="what"),
]


def collective_or_message(probe: Probe) -> bool:
    """Whether ranks take part in one call; else each makes its own."""
    return isinstance(probe, CollectiveProbe | TransferProbe)


class Plan(Document):
    """What to measure, most wanted first; the whole list is gone through again and again while time is left."""

    budget_s: PositiveFloat = Field(description="Time to measure in.")
    backend: Literal["gloo", "nccl"] = Field(description="torch.distributed backend.")
    precision: Precision = Field(description="Number format of what is sent and computed.")
    launches: tuple[Launch, ...] = Field(min_length=1, description="Steps of one rank that probes refer to.")
    probes: tuple[Probe, ...] = Field(min_length=1, description="What to measure.")
    essential: NonNegativeInt = Field(description="So many, from the first, are measured even if the time is over.")


class RankPlace(Document):
    """Where one rank ran."""

    host: str = Field(description="Host name.")
    network: str = Field(description="Network namespace, as the kernel names it; empty if it has no name.")
    device: str = Field(description="What it computed on.")
    threads: PositiveInt = Field(description="Threads it computed with.")
    node_ranks: PositiveInt | None = Field(
        default=None, description="Ranks on its node, as LOCAL_WORLD_SIZE says; null if nothing said it."
    )


class Setting(Document):
    """Where and with what a file of points was measured."""

    schema_: Literal["axonn-tune/points/1"] = Field(
        alias="schema", default="axonn-tune/points/1", description="Kind and version of this document."
    )
    created: str = Field(description="When it began, ISO 8601.")
    tool_version: str = Field(description="Of axonn-tune.")
    torch_version: str = Field(description="Of torch.")
    library: str = Field(description="The collective library, with its version.")
    backend: Literal["gloo", "nccl"] = Field(description="torch.distributed backend.")
    precision: Precision = Field(description="Number format of what was sent and computed.")
    cores: PositiveInt = Field(description="CPU cores the first rank may run on.")
    memory_bytes: PositiveInt = Field(description="Memory of the first rank's host, or of its GPU.")
    ranks: tuple[RankPlace, ...] = Field(min_length=1, description="Every rank's place.")
    launches: tuple[Launch, ...] = Field(min_length=1, description="Steps of one rank that points refer to.")


class Point(Document):
    """One sample: the mean over some calls in a row, of the slowest rank for what ranks do together."""

    probe: Probe = Field(description="What was measured.")
    seconds: PositiveFloat = Field(description="Time of one call, s.")
    calls: PositiveInt = Field(description="Calls in the sample.")
