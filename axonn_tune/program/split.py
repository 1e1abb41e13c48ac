"""Backward passes in two halves: which operations wait as weight gradients, and what they keep until then.

Weight gradients of linear layers and of grouped experts wait, with what adds or reduces them; attention, norms and
activations have none that could. Each keeps both operands: the layer's input and its output's gradient, which all else
frees once the input's gradient is there. Source: AMD-AGI/Primus@fd1eeabb,
primus/backends/megatron/core/extensions/zbpp_gemm.py, and torch/distributed/pipelining/_backward.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from axonn_tune.program.operations import Array, Collective, Kernel, MatMul, Operation, Size, symbol
from axonn_tune.program.step import Section, StepProgram

OPERANDS = "saved operands of weight gradients"


def waits(step: Operation) -> bool:
    """Whether an operation is one of weight gradients."""
    if isinstance(step, MatMul):
        return step.layout == "TN"
    return getattr(step, "role", "") == "weight_gradient" if isinstance(step, Collective) else is_sum(step)


def is_sum(step: Operation) -> bool:
    """Whether an operation adds a weight gradient to those of micro-batches before."""
    return isinstance(step, Kernel) and step.accumulates


@lru_cache(maxsize=256)
def without_weight_gradients(program: StepProgram) -> StepProgram:
    """The program of all that does not wait."""

    def rest(section: Section) -> Section:
        return replace(section, operations=tuple(step for step in section.operations if not waits(step)))

    blocks = tuple(replace(one, backward=rest(one.backward)) for one in program.blocks)
    return replace(program, blocks=blocks, head=rest(program.head) if head_waits(program) else program.head)


def head_waits(program: StepProgram) -> bool:
    """Whether the LM head's weight gradient waits: not in the bundled runtime, whose loss goes in chunks of its own
    number, each of which adds to it."""
    return program.given.options.loss_chunks > 0


def kept_bytes(operations: Iterable[Operation], element: float) -> list[Size]:
    """Operands of the weight gradients of some operations; element: bytes of one."""
    return [size for step in operations if waits(step) for size in _operands(step, element)]


def _operands(step: Operation, element: float) -> list[Size]:
    if not isinstance(step, MatMul):
        return []
    return [element * operand * step.calls * step.groups for operand in (step.m * step.k, step.n * step.k)]


def without_frees(operations: Sequence[Operation], saved: Iterable[Array], element: float) -> Iterator[Operation]:
    """Operations of a backward pass whose weight gradients wait, with both operands of each staying where they are.

    saved: arrays that are there before. An operand that its weight gradient does not free is known by its size alone:
    in place of the next array of that size to be freed, as much stays; or at the end, as of an output gradient that the
    block before goes on with.
    """
    sizes, left, count = {array.name: array.size_bytes for array in saved}, list[Size](), 0
    for number, step in enumerate(operations):
        sizes |= {array.name: array.size_bytes for array in step.makes}
        freed = [sizes[name] for name in step.frees if name in sizes]
        if waits(step):
            operands = _operands(step, element)
            for size in freed[: len(operands)]:
                operands.remove(size if size in operands else operands[-1])
            left += operands
            stay = list[Size]()
        else:
            yield step
            stay = [size for size in freed if size in left]
            stay = [size for at, size in enumerate(stay) if stay[:at].count(size) < left.count(size)]
            for size in stay:
                left.remove(size)
        stay += left if number == len(operations) - 1 else []
        if stay:
            made = tuple(Array(f"operand {count + one}", OPERANDS, size) for one, size in enumerate(stay))
            count += len(made)
            yield replace(step, makes=made, frees=())


def waiting_arrays(program: StepProgram, *, last: bool) -> tuple[tuple[str, Size], ...]:
    """What weight gradients of a stage keep while they wait (`step.held_by_chunk`); last: it has the LM head."""
    element = float(program.given.element)
    found = [
        symbol(f"waiting{block.given.counted}") * size
        for block in program.blocks
        for size in kept_bytes(block.backward.operations, element)
    ]
    found += (
        [symbol("waiting_head") * size for size in kept_bytes(program.head.operations, element)]
        if last and head_waits(program)
        else []
    )
    return tuple((OPERANDS, size) for size in found)
