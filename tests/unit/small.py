"""Models, workloads and spaces that are small enough to price every candidate of, one at a time."""

from __future__ import annotations

from typing import Any

from axonn_tune.frameworks.description import Framework
from axonn_tune.program.block import block_nodes
from axonn_tune.program.inputs import LayerInputs, Linear
from axonn_tune.ranking.space import Problem
from axonn_tune.request import NO_REQUEST, RankBy, Request
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload


def small_model(**changes: Any) -> Model:
    """A GPT of 8 blocks, hidden 64, 8 heads of 8, vocabulary 512, unless told otherwise."""
    sizes = {
        "schema": "axonn-tune/model/1",
        "name": "small",
        "family": "gpt",
        "layers": 8,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 8,
        "ffn": 256,
        "vocab": 512,
        "max_sequence_length": 128,
        "biases": False,
        "tied_embeddings": False,
        "source": "made up",
        "defaults": {"global_batch": 16, "sequence_length": 128},
    }
    return Model.model_validate(sizes | changes)


def small_problem(
    model: Model,
    machine: Machine,
    framework: Framework,
    *,
    gpus: int,
    batch: int = 16,
    sequence_length: int = 128,
    rank_by: RankBy = "iteration",
    request: Request = NO_REQUEST,
    **workload: Any,
) -> Problem:
    """A search with pipeline stages wherever the framework has them."""
    return Problem(
        model=model,
        machine=machine,
        workload=Workload(global_batch=batch, sequence_length=sequence_length, **workload),
        gpus=gpus,
        request=request,
        rank_by=rank_by,
        framework=framework,
        pipeline="pipeline" in framework.axes,
    )


def linear_of(given: LayerInputs, layer: str) -> Linear:
    """A linear layer of a block, by its name."""
    return next(one for one in block_nodes(given).linears if one.layer == layer)
