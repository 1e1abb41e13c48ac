"""Equations of a pipelined step: Narayanan et al., arXiv 2104.04473, section 2.2."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineTime:
    """A step of the slowest stage: working, and waiting for the others."""

    busy_s: float
    bubble_s: float


def bubble_share(*, stages: int, micro_batches: int, interleave: int = 1) -> float:
    """Bubble over ideal time with equal stages: `(p-1)/(v·m)` (section 2.2.2)."""
    return (stages - 1) / (interleave * micro_batches)


def pipeline_time(stages_s: tuple[float, ...], *, micro_batches: int, interleave: int = 1) -> PipelineTime:
    """1F1B over stages that take `stages_s` for one micro-batch, forward and backward.

    The slowest is busy `m·max(stages)`; it waits while the pipeline fills and drains, `1/v` of one
    micro-batch on each of the others. With equal stages the bubble is `bubble_share` of the rest.
    """
    slowest_s = max(stages_s)
    return PipelineTime(busy_s=micro_batches * slowest_s, bubble_s=(sum(stages_s) - slowest_s) / interleave)


def chain_exposed_s(sent_s: float, *, behind_s: float, links: int) -> float:
    """Exposed part of `links` equal collectives, each of `sent_s`, issued one per `behind_s` of computation, s.

    The last one starts with nothing left to hide behind: `c + (n-1)·max(0, c-a)`.
    """
    return sent_s + (links - 1) * max(0.0, sent_s - behind_s)
