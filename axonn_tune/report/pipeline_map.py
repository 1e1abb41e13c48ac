"""The map of ranks and pipeline stages: where they are, their memory, and their first passes in a drawing."""

from __future__ import annotations

from axonn_tune.cost.price import Detail, StagePrediction
from axonn_tune.cost.spans import PASSES, first_passes
from axonn_tune.program.inputs import WIDE_LOGITS
from axonn_tune.report.facts import listed
from axonn_tune.report.output import Column, Json, words
from axonn_tune.units import GIB
from axonn_tune.vocabulary import FOLDED

ACTIVATIONS = "activations"
MEMORY_GROUPS = {
    "weights": "--compute",
    "gradients": "--compute-2",
    "optimizer states": "--compute-3",
    ACTIVATIONS: "--axis-z",
    "logits": "--axis-several",
    "temporaries": "--axis-x",
}
"""Groups of memory items, those of experts among them, with their colors."""
_GROUPED = {
    **dict.fromkeys(("compute weights", "quantized weights"), "weights"),
    **dict.fromkeys(("gathered weights", "gathered weights of whole blocks"), "weights"),
    **dict.fromkeys(("gradients", "unreduced weight gradients"), "gradients"),
    **dict.fromkeys(("master weights", "optimizer moments", "replicated vectors"), "optimizer states"),
    **dict.fromkeys(("logits of one chunk", "logits", WIDE_LOGITS), "logits"),
}
_STAGE = words("stage", "stage", "", 5)
MAP_COLUMNS = (
    _STAGE,
    words("nodes", "nodes", "", 8),
    words("ranks", "ranks", "", 12),
    words("layers", "layers", "By chunk.", 60),
)
MEMORY_BY_STAGE = (
    _STAGE,
    Column("in_flight", "micro-batches\nin flight", "Whose activations are alive together.", show="{:.3g}".format),
    *(Column(group, f"{group}, GiB", per=GIB, decimals=2) for group in MEMORY_GROUPS),
    Column("total", "all, GiB", per=GIB, decimals=2),
)


def stage_rows(priced: Detail) -> list[Json]:
    """Each pipeline stage, or the only one: its nodes, ranks and layers, and its memory by group, bytes."""
    grid, node = priced.grid, priced.job.machine.launcher.ranks_per_node
    stages = priced.stages or (StagePrediction(priced.job.model.layers, 0.0, 0.0, 0.0, priced.memory),)
    of_stage: list[list[int]] = [[] for _ in stages]
    if priced.stages:
        stride = grid.stride("pipeline")
        for rank in range(grid.world):
            of_stage[rank // stride % grid.pipeline].append(rank)
    rows, last = [], 0 if priced.pipeline_order in FOLDED else len(stages) - 1
    for number, one in enumerate(stages):
        ranks = of_stage[number]
        parts = [f"{first}–{first + count - 1}" if count > 1 else f"{first}" for first, count in one.parts if count]
        before = ["embedding"] if number == 0 else []
        after = ["LM head"] if number == last else []
        sums = dict.fromkeys(MEMORY_GROUPS, 0.0)
        for name, size in one.memory.items:
            other = ACTIVATIONS if name.startswith("saved ") else "temporaries"
            sums[_GROUPED.get(name.removesuffix(" of experts"), other)] += float(size)
        held = one.held if one.parts else priced.values["held"]
        rows.append(
            {
                "stage": str(number) if one.parts else None,
                "nodes": listed(sorted({rank // node for rank in ranks})),
                "ranks": listed(ranks),
                "layers": ", ".join([*before, *parts, *after]),
                "in_flight": held / max(one.blocks, 1),
                **sums,
                "total": float(one.memory.total_bytes),
            }
        )
    return rows


_DRAWN = 86
"""Characters of a drawn schedule."""
_BACKWARD = {PASSES[kind] for kind in "BI"}
_WEIGHTS = "+"
_LEGEND = (
    "A row for each stage, from left to right: a, b, …: forward pass of a micro-batch; A, B, …: its backward pass"
    "{weights}; ·: the stage waits. Where passes are shorter than a letter, one stands for several."
)
_OF_WEIGHTS = f", without weight gradients that wait: {_WEIGHTS}"


def drawn_schedule(priced: Detail) -> list[str]:
    """The first passes of each stage as letters: one for the shortest pass, less if no stage's backward pass fits."""
    _, spans = first_passes(priced)
    backward_s = min((one.end_s for one in spans if one.name in _BACKWARD and one.lane == "stage 0"), default=0.0)
    letter_s = max(min(one.end_s - one.start_s for one in spans), backward_s / _DRAWN)
    rows: dict[str, list[str]] = {}
    for one in spans:
        row = rows.setdefault(one.lane, ["·"] * _DRAWN)
        letter = chr(ord("a" if one.name == "forward" else "A") + int(str(one.details["micro_batch"])) % 26)
        letter = _WEIGHTS if one.name == PASSES["W"] else letter
        begins, ended = round(one.start_s / letter_s), round(one.end_s / letter_s)
        for place in range(begins, min(max(ended, begins + 1), _DRAWN)):
            row[place] = letter
    return [f"{lane:<10}{''.join(rows[lane]).rstrip('·')}" for lane in sorted(rows, key=lambda lane: (len(lane), lane))]


def schedule_legend(priced: Detail) -> str:
    """What its letters mean."""
    return _LEGEND.format(weights=_OF_WEIGHTS if priced.job.framework.step.splits_backward else "")
