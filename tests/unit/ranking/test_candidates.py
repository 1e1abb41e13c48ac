"""Candidates at random are of all kinds, and each is one of a search."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from axonn_tune.ranking.shapes import list_shapes
from axonn_tune.ranking.space import list_grids
from tests.unit.ranking.candidates import random_candidates
from tests.unit.ranking.models import KINDS

FEATURES = (
    *("one stage", "stages", "interleaved", "uneven", "by time", "repeats", "repeats in some", "kept", "context"),
    *("experts exchanged", "overlap", "MTP", "layer types", "narrow"),
)


def test_candidates_at_random_are_of_all_kinds() -> None:
    """Guards what bounds are held against: nothing that moves a step is missing, each candidate fits into memory as its
    columns say, and pins of it list its shape alone."""
    drawn = list(random_candidates(Random(1), 150))
    counts = Counter(feature for one in drawn for feature in one.features)
    assert min(counts[feature] for feature in FEATURES) >= 4, counts
    assert len({one.problem.model.name for one in drawn}) == len(KINDS)
    assert len({one.problem.framework.name for one in drawn}) >= 6
    for one in drawn:
        needed = one.fitting.total_bytes[one.row]
        assert one.detail.memory_bytes <= one.fitting.limit_bytes
        assert one.layout.parts is not None or one.detail.memory_bytes == pytest.approx(needed, rel=1e-12)
        shapes = list_shapes(list_grids(one.pinned), one.pinned)
        assert np.array_equal((shapes.micro_batch, shapes.chunks), [[one.layout.micro_batch], [one.layout.chunks]])
