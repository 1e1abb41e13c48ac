"""What blocks add to the end of a step of pipeline stages, where an update takes long: least seconds, for bounds.

An update of elements takes a multiple of them, beside what it takes of none. Of whole matrices the rank with most cost
has no less than the mean of those that share them, and no less time than that cost by the kind that takes least time
for its cost. Both add up over the blocks of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

import numpy as np

from axonn_tune.cost.columns import ColumnPricer
from axonn_tune.frameworks.optimizers import optimizers
from axonn_tune.program.inputs import suffixes
from axonn_tune.program.operations import Computation, Floats, Value
from axonn_tune.program.step import MIDDLE
from axonn_tune.ranking.shapes import Shapes

_COUNTS = ("owned.", "updated.")
"""Symbols of how many whole matrices of a kind the rank with most has."""


def block_updates_s(shapes: Shapes, pricer: ColumnPricer) -> Floats:
    """Least seconds that a block of each layer type adds to the end of a step, `[shapes, types]`; 0 without stages, and
    where an update is one of elements on the GPU, which takes little."""
    model, options, piped = shapes.problem.model, pricer.program.given.options, shapes.piped
    found, whole = np.zeros((len(shapes), len(model.types))), optimizers()[options.optimizer].whole
    if not len(piped) or not (options.offloads or whole):
        return found
    kinds, every = range(len(model.types)), np.arange(len(piped))

    def values(of_type: int, count: float) -> dict[str, Value]:
        blocks = tuple(np.full(len(piped), count if kind == of_type else 0.0) for kind in kinds)
        several = shapes.stage_values(MIDDLE, blocks, every)
        return {name: 0.0 * value if name.startswith(_COUNTS) else value for name, value in several.items()}

    def end_s(values: Mapping[str, Value]) -> Floats:
        clock = pricer.clock(values)
        spent = [clock.run_s(one) for one in pricer.program.end.operations if isinstance(one, Computation)]
        return np.broadcast_to(np.asarray(sum(spent)), len(piped))

    once = [values(one, 1.0) for one in kinds]
    nothing_s = [end_s(one) for one in once]
    for one in kinds:
        found[piped, one] = np.maximum(end_s(values(one, 2.0)) - nothing_s[one], 0.0)
    if whole is None or options.muon_batched:
        return found
    # Imported here: most searches are of AdamW, and start-up time is theirs.
    from axonn_tune.program.whole import matrices_of

    several = matrices_of(model, sequence_parallel=options.sequence_parallel, apart_gate=options.muon_apart_gate)
    turns = options.muon_tp_mode in ("layer_sharded", "in_turn")
    named = [
        [(f"{at}{of}", matrix) for at, matrix in enumerate(each)]
        for of, each in zip(suffixes(model), several, strict=True)
    ]
    for routed in (False, True):
        keys = [(key, one) for key, one in chain.from_iterable(named) if one.routed == routed]
        alone = [{**once[0], f"owned.{key}": 1.0, f"updated.{key}": float(not turns)} for key, _ in keys]
        rates = [(end_s(own) - nothing_s[0]) / one.cost for own, (_, one) in zip(alone, keys, strict=True)]
        for kind, each in enumerate(named) if rates else ():
            cost = sum(once[kind][f"mean.{key}"] * one.cost for key, one in each if one.routed == routed)
            found[piped, kind] += np.minimum.reduce(rates) * cost
    return found
