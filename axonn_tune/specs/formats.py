"""Number formats of linear layers below 16 bits: what an operand takes, and what quantizing it moves.

GEMMs of linear layers and of experts take both operands in the format, in all three passes; embedding, LM head, router,
attention products, norms, loss and optimizer stay in BF16. An accelerator has a format if it states its peak.

Sources: [TE] NVIDIA/TransformerEngine@d0067d0d, common/recipe/__init__.py, and its guide on low precision, also for
maxima; [MoE] arXiv 2603.07685, section 5, also for gathered_bytes. Alignments and keeps_original:
NVIDIA/Megatron-LM@d98e8a64, core/fp8_utils.py, core/fp4_utils.py and core/transformer/attention.py. with_norm: [TE],
pytorch/csrc/extensions/normalization.cpp. promotes: [TE], of delayed scaling
pytorch/module/base.py; pytorch/ao@36027d82, torchao/float8/config.py; pytorch/pytorch issue 147971.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal, get_args

from axonn_tune.vocabulary import Precision

Copies = Literal["all", "rows", "columns"]
"""What a quantization kernel writes: every copy that GEMMs take, or one, whose scales run along rows or columns."""
Fusion = Literal["none", "maximum", "whole"]
"""What a norm's kernel does of quantizing its output: nothing, its maximum, or all of it."""
GRADIENTS, PASSES = ("NT", "TN"), ("NN", "NT", "TN")
"""Layouts of the GEMMs of both gradients, and of all three passes: `MatmulLayout`."""


@dataclass(frozen=True, kw_only=True)
class NumberFormat:
    """One format.

    bits: of an element. block: elements that share a scale of scale_bytes; 0: the whole tensor, whose scale is not
    counted. passes: kernels that read an operand in BF16 for its maximum before the one that quantizes it; launches:
    kernels in all. transposes: accelerators whose GEMMs take one layout of operands alone need a second copy, others
    none; without it each operand is quantized by rows and by columns everywhere. promotes: GEMMs whose sums are
    added to FP32 every 128 products where tensor cores have fewer bits, by the software's default (split accumulator;
    no fast accumulation). rescales: a kernel after each GEMM of a gradient multiplies it by its scales. gathered_bytes:
    of an element of a primary weight, as ranks gather it. alignment: rows of a group of a grouped GEMM are padded to
    its multiples. with_norm: what norms do of it, Transformer Engine's own and cuDNN's. maxima: whether they are
    reduced over ranks that gather a tensor, before it is quantized. keeps_original: attention's output is not saved
    once more for its projection. attention: its time forward and backward in 8 bits with this format's scales, over
    that with one scale a tensor (NVIDIA/cudnn-frontend@3929da2e, benchmark/sdpa_benchmark_training, cuDNN 9.22 on GB200
    and GB300: 1.07 to 1.13 and 1.12 to 1.30).
    """

    name: Precision
    bits: int
    block: int = 0
    scale_bytes: int = 0
    passes: int = 0
    launches: int = 1
    transposes: bool = False
    promotes: tuple[str, ...] = ()
    rescales: bool = False
    gathered_bytes: float = 1.0
    alignment: int = 16
    maxima: bool = False
    with_norm: tuple[Fusion, Fusion] = ("none", "none")
    keeps_original: bool = True
    attention: tuple[float, float] = (1.0, 1.0)
    source: str

    @property
    def operand_bytes(self) -> float:
        """Bytes of an element of one copy, its share of a scale included."""
        return self.bits / 8 + (self.scale_bytes / self.block if self.block else 0.0)

    def copies(self, *, one_layout: bool) -> int:
        """Copies of an operand of several GEMMs; one_layout: the accelerator's GEMMs take any layout of operands."""
        return 1 if self.transposes and one_layout else 2

    def quantization_bytes(self, copies: int) -> float:
        """Bytes read and written to quantize an element of BF16 to so many copies."""
        return 2.0 * (1 + self.passes) + copies * self.operand_bytes

    def fused_bytes(self, *, one_layout: bool) -> float:
        """What a norm that quantizes its output writes of an element beyond the same in BF16: one copy of a scale a
        tensor, which others transpose, or all."""
        return (1 if self.transposes else self.copies(one_layout=one_layout)) * self.operand_bytes - 2.0

    def primary_bytes(self, *, one_layout: bool) -> float:
        """The same of a primary weight once a step: of one gathered in BF16, or to make the copy that was not."""
        copies = self.copies(one_layout=one_layout)
        if self.gathered_bytes > self.bits / 8 * copies:
            return self.quantization_bytes(copies)
        return 0.0 if self.gathered_bytes == self.bits / 8 * copies else 2.0 * self.operand_bytes


FORMATS: dict[str, NumberFormat] = {
    one.name: one
    for one in (
        NumberFormat(
            name="fp8-delayed",
            bits=8,
            transposes=True,
            keeps_original=False,
            with_norm=("whole", "whole"),
            promotes=GRADIENTS,
            source="[TE] DelayedScaling: one scale a tensor, from the maxima of steps before; E4M3, gradients E5M2",
        ),
        NumberFormat(
            name="fp8-current",
            bits=8,
            passes=1,
            launches=2,
            transposes=True,
            maxima=True,
            with_norm=("maximum", "none"),
            promotes=GRADIENTS,
            source="[TE] Float8CurrentScaling: one scale a tensor, whose maximum is found in a pass of its own",
        ),
        NumberFormat(
            name="fp8-rowwise",
            bits=8,
            passes=1,
            launches=2,
            promotes=GRADIENTS,
            rescales=True,
            source="pytorch/ao@36027d82, torchao/float8/README.md: one scale a row of each operand of each GEMM, whose "
            "maxima are found in a pass of their own",
        ),
        NumberFormat(
            name="fp8-blockwise",
            bits=8,
            block=128,
            scale_bytes=4,
            promotes=PASSES,
            source="[TE] Float8BlockScaling: FP32 scales, 1x128 of activations and gradients, 128x128 of weights",
        ),
        NumberFormat(
            name="mxfp8",
            bits=8,
            block=32,
            scale_bytes=1,
            launches=2,
            gathered_bytes=2.0,
            alignment=32,
            with_norm=("none", "whole"),
            attention=(1.1, 1.22),
            source="[TE] MXFP8BlockScaling: E8M0 scales, 1x32, put in the order of the GEMM by a kernel of their own",
        ),
        NumberFormat(
            name="nvfp4",
            bits=4,
            block=16,
            scale_bytes=1,
            passes=1,
            launches=2,
            alignment=128,
            maxima=True,
            source="[TE] NVFP4BlockScaling: E4M3 scales, 1x16",
        ),
        NumberFormat(
            name="mxfp4",
            bits=4,
            block=32,
            scale_bytes=1,
            alignment=32,
            source="E2M1, E8M0 scales, 1x32; one kernel transforms (Hadamard, of 16), scales and rounds: AMD's blog on "
            "MLPerf Training 6.0; Primus in Richardyu114/training_results_v6.0@eabf23a0, AMD/benchmarks/llama31_8b",
        ),
    )
}
"""By the name that `--precision` takes."""


def nearest_format(name: str, known: Sequence[str]) -> str:
    """The known precision that is most like a format: that of the nearest row above or below; else the first known."""
    order = list(FORMATS)
    rows = [one for one in known if one in FORMATS]
    return min(rows, key=lambda one: abs(order.index(one) - order.index(name))) if rows else known[0]


@cache
def quantization_shares(name: str, generation: str | None, *, engine: bool) -> Mapping[Copies, float]:
    """Bandwidth that kernels which quantize to a format reach, over that of element-wise kernels, by what they write.

    engine: those of Transformer Engine; others are torchao's. The first row of quantization.csv counts that names
    them; one without a format or a generation holds for all.
    """
    software = "transformer-engine" if engine else "torchao"
    text = files("axonn_tune.specs").joinpath("quantization.csv").read_text(encoding="utf-8")
    of_all = ("", software, name, generation)
    row = next(
        one
        for one in csv.DictReader(text.splitlines())
        if all(one[key] in of_all for key in ("software", "format", "generation"))
    )
    return {kind: float(row[kind]) for kind in get_args(Copies)}


_WORDS: tuple[tuple[str, Precision], ...] = (
    ("mxfp4", "mxfp4"),
    ("fp4", "nvfp4"),
    ("mx", "mxfp8"),
    ("block|1x128|sub-?channel|fp8[-_ ]?sc", "fp8-blockwise"),
    ("row-?wise|float8", "fp8-rowwise"),
    ("current|tensor-?wise|dynamic|fp8[-_ ]?cs", "fp8-current"),
    ("fp8|delayed", "fp8-delayed"),
)
"""Words of recipes, of Megatron-LM, Bridge, torchtitan and published rows; the first found counts."""


def format_named(words: str) -> Precision | None:
    """The format that words of a recipe in small letters name; None where they name none."""
    return next((name for pattern, name in _WORDS if re.search(pattern, words)), None)
