"""Memory of Megatron-LM against the figures of Korthikanti et al. 2022, arXiv 2205.05198."""

from __future__ import annotations

from axonn_tune.validation.published.measurements import errors_by_group, evaluate_memory
from axonn_tune.validation.published.rows import SHIPPED


def test_memory_is_as_published() -> None:
    """Guards the arrays a block saves, what each recompute drops, chunks in flight, and 18 bytes a parameter."""
    found = evaluate_memory(SHIPPED / "memory.csv")
    assert len(found) == 20
    assert all(one.error is not None and abs(one.error) <= 0.02 for one in found)
    assert errors_by_group(found)["all"].mape <= 0.01
