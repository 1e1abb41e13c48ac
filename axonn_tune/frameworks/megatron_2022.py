"""Megatron-LM of 2022: sequence parallelism, selective recompute, GEMMs that accumulate weight gradients.

Source: Korthikanti et al., arXiv 2205.05198.
"""

from __future__ import annotations

from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.megatron_2021 import MEGATRON_2021
from axonn_tune.frameworks.megatron_core import NAMES

_STEP = MEGATRON_2021.with_step(sequence_parallel=True, fused_accumulation=True, overlaps=("input_gradient",)).step

MEGATRON_2022 = Framework(
    name="megatron-2022",
    title="Megatron-LM (2022)",
    axes=("x", "data", "pipeline"),
    source="arXiv 2205.05198",
    step=_STEP,
    schedule=MEGATRON_2021.schedule,
    software="megatron-2021",
    names=NAMES,
)

FRAMEWORKS = (MEGATRON_2022,)
