"""The bundled runtime: the paper's 4D algorithm with exact norms, gathers one ahead, and a loss in chunks.

Source: `axonn_tune.runtime`, whose collectives are held against this description's program.
"""

from __future__ import annotations

from axonn_tune.frameworks.description import Framework, PipelineSchedule, StepOptions

AXONN_TUNE = Framework(
    name="axonn-tune",
    title="axonn-tune (4D)",
    axes=("x", "y", "z", "data", "pipeline"),
    source="axonn_tune.runtime",
    step=StepOptions(),
    schedule=PipelineSchedule(overlapped=True, scattered=False),
    permuted=True,
    ranked_by="communication",
)
