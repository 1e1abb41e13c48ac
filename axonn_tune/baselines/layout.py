"""Megatron-LM's layouts: tensor x pipeline x data, and which of them a model, a batch and a GPU count allow.

Ranks are numbered as Megatron-LM does by default: tensor fastest, then data, pipeline outermost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    layer by layer beside computation.
    """

    fused_attention: bool = True
    dropout: bool = False
    fused_accumulation: bool = True
    tensor_overlap: bool = True
    pipeline_overlap: bool = True
    data_overlap: bool = True


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
    """One way to run a step: degrees of parallelism, and what is split, kept or computed again."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    interleave: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    @property
    def gpus(self) -> int:
        """Ranks, tensor * pipeline * data."""
        return self.tensor * self.pipeline * self.data

    @property
    def tensor_group(self) -> GroupShape:
        """Neighbouring ranks."""
        return merged_shape([(self.tensor, 1)])

    @property
    def data_group(self) -> GroupShape:
        """Ranks that hold the same weights."""
        return merged_shape([(self.data, self.tensor)])

    @property
    def embedding_group(self) -> GroupShape:
        """First and last stage, which share a tied table."""
        return merged_shape([(2 if self.pipeline > 1 else 1, self.tensor * self.data * (self.pipeline - 1))])

    def micro_batches(self, workload: Workload) -> int:
        """Micro-batches of one pipeline in a step."""
        return workload.global_batch // (self.data * self.micro_batch)

    def words(self) -> str:
        """What is split how: `tensor=8 pipeline=2 data=64, interleave 3, sequence parallel, ...`."""
        parts = [f"tensor={self.tensor} pipeline={self.pipeline} data={self.data}"]
        parts += [f"interleave {self.interleave}"] if self.interleave > 1 else []
        parts += ["sequence parallel"] if self.sequence_parallel else []
        parts += ["distributed optimizer"] if self.distributed_optimizer else []
        return ", ".join(parts)


def broken_constraints(layout: Layout, model: Model, workload: Workload) -> list[str]:
    """What Megatron-LM would refuse this layout for, each with its numbers."""
    t, p, v = layout.tensor, layout.pipeline, layout.interleave
    must_divide = [
        ("heads", model.heads, "tensor", t),
        ("kv_heads", model.kv_heads, "tensor", t),
        ("ffn", model.ffn, "tensor", t),
        ("layers", model.layers, "pipeline · interleave", p * v),
        ("global_batch", workload.global_batch, "data · micro-batch", layout.data * layout.micro_batch),
    ]
    if layout.sequence_parallel:
        must_divide.append(("sequence_length", workload.sequence_length, "tensor", t))
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
