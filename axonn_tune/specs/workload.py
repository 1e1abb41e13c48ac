"""The workload document: what one training step processes, and in which number formats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field, SerializerFunctionWrapHandler, model_serializer

from axonn_tune.recompute import parse_recompute
from axonn_tune.specs.document import Document, Size
from axonn_tune.specs.formats import FORMATS, NumberFormat
from axonn_tune.specs.lengths import Lengths
from axonn_tune.specs.tuning import Tuning
from axonn_tune.units import counted
from axonn_tune.vocabulary import OVERLAPS, Overlap, Precision

Recompute: TypeAlias = Annotated[str, AfterValidator(parse_recompute)]
"""A recompute set, as documents have it."""
RECOMPUTE_WORDS = "Activation recomputation (checkpointing): none, selective, full, or modules joined by commas."


@dataclass(frozen=True)
class ElementSizes:
    """Bytes per element of each kind of array, for one precision.

    compute: activations, gathered weights, weight gradients reduced over z; main: master weights,
    accumulated gradients reduced over data, Adam moments; statistics: norm and loss reductions.
    """

    compute: int
    main: int
    statistics: int


ELEMENT_SIZES: dict[Precision, ElementSizes] = {
    "bf16": ElementSizes(compute=2, main=4, statistics=4),
    "fp16": ElementSizes(compute=2, main=4, statistics=4),
    "fp32": ElementSizes(compute=4, main=4, statistics=4),
    "fp64": ElementSizes(compute=8, main=8, statistics=8),
}
ELEMENT_SIZES |= {one.name: ELEMENT_SIZES["bf16"] for one in FORMATS.values()}


class Workload(Document):
    """One training step: its batch, its sequence length, its number formats."""

    left_out_at_default: ClassVar[tuple[str, ...]] = ("lengths", "tuning")

    schema_: Literal["axonn-tune/workload/1"] = Field(
        alias="schema",
        default="axonn-tune/workload/1",
        description="Kind and version of this document: axonn-tune/workload/1.",
    )
    global_batch: Size = Field(description="Global batch size, in sequences.")
    sequence_length: Size = Field(description="Tokens in one sequence.")
    lengths: Lengths | None = Field(
        default=None,
        description="Lengths of the data set's sequences, which sequence_length cuts; without them all have that. Of "
        "packed ones global_batch counts packs.",
    )
    precision: Precision = Field(default="bf16", description="Number format of activations and gathered weights.")
    shard_optimizer_over_data: bool = Field(
        default=False, description="Shard FP32 master weights and Adam moments over the data axis (ZeRO-1)."
    )
    overlaps: tuple[Overlap, ...] = Field(
        default=OVERLAPS,
        description="Which communication overlaps with computation; the rest blocks where it is issued.",
    )
    split_micro_batch: bool = Field(
        default=False,
        description="Two-batch overlap: interleave two half micro-batches, one's all-reduce behind the other's GEMMs.",
    )
    tuning: Tuning | None = Field(default=None, description="What of the model trains; without, all of it.")

    @model_serializer(mode="wrap")
    def _plainly(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """All keys, but of a training of the whole model that of fine-tuning."""
        absent = {key for key in self.left_out_at_default if not getattr(self, key)}
        return {key: value for key, value in write(self).items() if key not in absent}

    @property
    def batch_unit(self) -> Literal["pack", "sequence"]:
        """What the batch counts."""
        return "pack" if self.lengths is not None and self.lengths.packing == "packed" else "sequence"

    @property
    def batch_words(self) -> str:
        """`512 sequences of 8,192 tokens`, with what lengths they are cut from."""
        tokens = counted(self.sequence_length, "token")
        if self.lengths is None:
            return f"{counted(self.global_batch, 'sequence')} of {tokens}"
        return f"{counted(self.global_batch, self.batch_unit)} of up to {tokens} ({self.lengths.words})"

    @property
    def format(self) -> NumberFormat | None:
        """Number format of linear layers and experts, where it is another than that of activations."""
        return FORMATS.get(self.precision)

    @property
    def base_precision(self) -> Precision:
        """Number format of activations, and of all that is no linear layer."""
        return "bf16" if self.format else self.precision

    @property
    def element_sizes(self) -> ElementSizes:
        """Bytes per element for this precision."""
        return ELEMENT_SIZES[self.precision]
