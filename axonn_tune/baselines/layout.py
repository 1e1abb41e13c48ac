"""Megatron-LM's layouts: tensor x pipeline x data, and which of them a model, a batch and a GPU count allow.

Ranks are numbered as Megatron-LM does by default: tensor fastest, then data, pipeline outermost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from axonn_tune.cost.compute import FUSED, Kernels
from axonn_tune.grid import GroupShape, divisors, merged_shape
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import RECOMPUTES, Recompute, Workload


@dataclass(frozen=True)
class Software:
    """What a release of Megatron-LM does to hide or to save work.

    fused_attention: FlashAttention, otherwise products, softmax and dropout that write all scores;
    dropout: its masks are kept and its kernels run;
    fused_accumulation: weight gradients are added inside their product; tensor_overlap: backward
    collectives of column-parallel layers run beside their products; pipeline_overlap: interleaved
    stages send beside computation; data_overlap: gradients are reduced (and new weights gathered)
    layer by layer beside computation; gradient_bytes: of one accumulated gradient, those of a main weight
    if None; vocabulary_multiple: rows of the table on each rank are padded to a multiple of it; with 0 they
    are not padded, and rows that do not divide are dropped; kernels: how far it fuses, how fast its host issues work.
    """

    fused_attention: bool = True
    dropout: bool = False
    fused_accumulation: bool = True
    tensor_overlap: bool = True
    pipeline_overlap: bool = True
    data_overlap: bool = True
    gradient_bytes: int | None = None
    vocabulary_multiple: int = 128
    kernels: Kernels = FUSED


CURRENT = Software()
"""Megatron-LM since 2023, with the kernels the 4D program is priced with: it is the layouts that are compared."""

WAITING = Software(tensor_overlap=False, pipeline_overlap=False, data_overlap=False)
"""The same with every overlap switched off."""

KORTHIKANTI_2022 = Software(fused_attention=False, dropout=True, pipeline_overlap=False, data_overlap=False)
"""As measured in arXiv 2205.05198."""

NARAYANAN_2021 = Software(
    fused_attention=False,
    dropout=True,
    fused_accumulation=False,
    tensor_overlap=False,
    pipeline_overlap=False,
    data_overlap=False,
)
"""As measured in arXiv 2104.04473."""


@dataclass(frozen=True)
class Layout:
    """One way to run a step: degrees of parallelism, and what is split, kept or computed again.

    distributed_optimizer, sharded_gradients, sharded_weights: ZeRO 1, 2 and 3 over the data-parallel ranks.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    interleave: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    context: int = 1
    sharded_gradients: bool = False
    sharded_weights: bool = False

    @property
    def gpus(self) -> int:
        """Ranks, tensor * context * data * pipeline."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def tensor_group(self) -> GroupShape:
        """Neighbouring ranks."""
        return merged_shape([(self.tensor, 1)])

    @property
    def data_group(self) -> GroupShape:
        """Ranks that hold the same weights."""
        return merged_shape([(self.data * self.context, self.tensor)])

    @property
    def embedding_group(self) -> GroupShape:
        """First and last stage, which share a tied table."""
        inside = self.tensor * self.context * self.data
        return merged_shape([(2 if self.pipeline > 1 else 1, inside * (self.pipeline - 1))])

    @property
    def context_group(self) -> GroupShape:
        """Ranks that share the sequences of a micro-batch."""
        return merged_shape([(self.context, self.tensor)])

    def blocks_of_stages(self, layers: int) -> tuple[int, ...]:
        """Blocks of each stage; those left over go to stages between the first and the last, which hold tables."""
        each, left = divmod(layers, self.pipeline)
        between = [*range(1, self.pipeline - 1), 0, self.pipeline - 1]
        more = set(between[:left])
        return tuple(each + (stage in more) for stage in range(self.pipeline))

    def micro_batches(self, workload: Workload) -> int:
        """Micro-batches of one pipeline in a step."""
        return workload.global_batch // (self.data * self.micro_batch)

    def words(self) -> str:
        """What is split how: `tensor=8 pipeline=2 data=64, interleave 3, sequence parallel, ...`."""
        parts = [f"tensor={self.tensor} pipeline={self.pipeline} data={self.data}"]
        parts += [f"context {self.context}"] if self.context > 1 else []
        parts += [f"interleave {self.interleave}"] if self.interleave > 1 else []
        parts += ["sequence parallel"] if self.sequence_parallel else []
        parts += ["sharded weights"] if self.sharded_weights else []
        parts += ["distributed optimizer"] if self.distributed_optimizer and not self.sharded_weights else []
        return ", ".join(parts)


def broken_constraints(layout: Layout, model: Model, workload: Workload, *, uneven_stages: bool = False) -> list[str]:
    """What Megatron-LM would refuse this layout for, each with its numbers; newer releases allow uneven stages."""
    t, p, v = layout.tensor, layout.pipeline, layout.interleave
    must_divide = [
        ("heads", model.heads, "tensor", t),
        ("kv_heads", model.kv_heads, "tensor", t),
        ("ffn", model.ffn, "tensor", t),
        ("global_batch", workload.global_batch, "data · micro-batch", layout.data * layout.micro_batch),
    ]
    if not uneven_stages:
        must_divide.insert(3, ("layers", model.layers, "pipeline · interleave", p * v))
    if layout.sequence_parallel or layout.context > 1:
        must_divide.append(("sequence_length", workload.sequence_length, "tensor · context", t * layout.context))
    if v > 1:
        must_divide.append(("micro-batches of an interleaved pipeline", layout.micro_batches(workload), "pipeline", p))
    found = [f"{what} ({value}) is no multiple of {of} = {by}" for what, value, of, by in must_divide if value % by]
    return [*found, "interleaving needs more than one stage"] if v > 1 and p == 1 else found


def list_layouts(gpus: int, model: Model, workload: Workload) -> Iterator[Layout]:
    """Every layout Megatron-LM accepts, sequence parallel wherever there is tensor parallelism.

    The distributed optimizer is on wherever there is data parallelism: it costs no traffic and saves memory.
    """
    for tensor in divisors(gpus):
        for pipeline in divisors(gpus // tensor):
            data = gpus // tensor // pipeline
            split = Layout(tensor, pipeline, data, sequence_parallel=tensor > 1, distributed_optimizer=data > 1)
            if broken_constraints(split, model, workload):
                continue
            for variant in _variants(split, model, workload):
                if not broken_constraints(variant, model, workload):
                    yield variant


def _variants(split: Layout, model: Model, workload: Workload) -> Iterator[Layout]:
    """A split with every micro-batch, interleaving and recomputation."""
    interleavings = divisors(model.layers // split.pipeline) if split.pipeline > 1 else (1,)
    for micro_batch in divisors(workload.global_batch // split.data):
        for interleave in interleavings:
            for recompute in RECOMPUTES:
                yield Layout(
                    split.tensor,
                    split.pipeline,
                    split.data,
                    micro_batch,
                    interleave,
                    recompute,
                    split.sequence_parallel,
                    split.distributed_optimizer,
                )
