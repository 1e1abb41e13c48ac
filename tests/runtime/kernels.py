"""Kernels of rank 0 in a step on tensors without data, and the bytes that they move."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from axonn_tune.runtime.clocks import HostClock
from axonn_tune.runtime.dry_run import MetaBytes, build, step_ledger
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.specs.launch import Launch


class KernelMeter(MetaBytes):
    """Counts bytes that kernels move: `launched`, one entry each.

    A kernel reads each of its inputs once and writes its outputs; of a broadcast tensor the elements that exist count,
    of a look-up those it finds. Views and allocations launch none; GEMMs, attention and collectives are not counted.
    Uncompiled, each operator is one. A compiled function is two at most: one for all outputs that need sums over the
    rows of a matrix, one for the others. Intermediate results are in registers; an input of both is read twice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[int] = []
        self._fused: Fusion | None = None

    def compiler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Stands in for `torch.compile`."""
        counted = super().compiler(function)

        def run(*args: Any, **kwargs: Any) -> Any:
            self._fused = fusion = Fusion()
            try:
                made = counted(*args, **kwargs)
            finally:
                self._fused = None
            self.launched += fusion.kernels(_tensors(made))
            return made

        return run

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count its moved bytes, too."""
        made = super().__torch_dispatch__(function, types, args, kwargs)
        operator = Operator.of(function, args, kwargs or {}, made)
        if self._fused is not None:
            self._fused.note(operator)
        elif operator.is_kernel:
            self.launched.append(operator.size_bytes)
        return made


Region: TypeAlias = tuple[int, int, int]
"""Memory that a tensor refers to: storage, first element, and bytes of the elements that exist."""

_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_GEMMS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "linalg_solve_triangular")
_OVERWRITES = ("copy_", "zero_", "fill_")
_LOOK_UPS = ("gather", "index", "index_select", "embedding")
_SUMS = ("sum", "mean", "amax", "var_mean", "linalg_vector_norm")


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _region(tensor: torch.Tensor) -> Region:
    elements = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), elements * tensor.element_size()


@dataclass
class Operator:
    """One call of an operator; sums_rows: it adds up the rows of a matrix, so needs all tokens at once."""

    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    written: list[torch.Tensor]
    sums_rows: bool

    @classmethod
    def of(cls, function: Any, args: Any, kwargs: Any, made: Any) -> Operator:
        """From a dispatched call: which arguments it reads, and what it writes."""
        schema, name = function._schema, str(function._schema.name)
        name = name.removeprefix("aten::")
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        changed = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        unread = changed if name in _OVERWRITES or schema.overload_name.endswith("out") else []
        inputs = _tensors([value for key, value in given.items() if key not in unread])
        if name in _LOOK_UPS:
            inputs = [*_tensors(made), *inputs[1:]]
        outputs = _tensors(made)
        if name == "index_put_":
            inputs, written = inputs[1:], _tensors(args[2])
        elif changed:
            written = _tensors([given[key] for key in changed])
        else:
            read = {one.untyped_storage()._cdata for one in inputs}
            written = [one for one in outputs if name in _LOOK_UPS or one.untyped_storage()._cdata not in read]
        dims = given.get("dim") or ()
        sums_rows = (
            name in _SUMS and 0 in (dims if isinstance(dims, list | tuple) else (dims,)) and inputs[0].dim() == 2
        )
        return cls(name, inputs, outputs, written, sums_rows=sums_rows)

    @property
    def is_kernel(self) -> bool:
        """Whether it moves anything, and is not priced as a GEMM or a collective."""
        return bool(self.written) and "::" not in self.name and self.name not in _ALLOCATIONS + _GEMMS

    @property
    def size_bytes(self) -> int:
        """Bytes it reads and writes."""
        return sum(size for *_, size in {*map(_region, self.inputs)}) + sum(_region(one)[2] for one in self.written)


class Fusion:
    """Follows what each tensor of a compiled function is computed from."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[set[Region], bool]] = {}
        self._changed: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []

    def note(self, operator: Operator) -> None:
        """An operator ran: its outputs come from what its inputs come from, and from those sums over rows."""
        found, summed = set[Region](), operator.sums_rows
        for one in operator.inputs if operator.name not in _ALLOCATIONS else ():
            regions, late = self._sources.get(id(one), ({_region(one)}, False))
            found, summed = found | regions, summed or late
        viewed = not operator.written
        for one in operator.outputs:
            if viewed and not any(id(read) in self._sources for read in operator.inputs):
                continue  # A view of an argument reads what it shows, no more.
            self._sources[id(one)] = found, summed
            self._alive.append(one)
        # What a look-up finds is read from memory, but written nowhere.
        for one in operator.written if operator.name not in _LOOK_UPS else ():
            self._changed[id(one)] = one

    def kernels(self, results: list[torch.Tensor]) -> Iterator[int]:
        """Bytes of one of the outputs that need sums over rows, one of the others."""
        made = {id(one) for one in self._alive}
        outputs = {_region(one): one for one in results if id(one) in made}
        # A changed tensor that is an argument, not one that the function has made.
        given = {key for regions, _ in self._sources.values() for key, *_ in regions}
        changed = (one for one in self._changed.values() if one.untyped_storage()._cdata in given)
        outputs |= {_region(one): one for one in changed}
        for late in (False, True):
            kept = [one for one in outputs.values() if self._sources[id(one)][1] == late]
            read = set[Region]().union(*(self._sources[id(one)][0] for one in kept))
            if kept:
                yield sum(size for *_, size in read) + sum(_region(one)[2] for one in kept)


class KernelClock(HostClock):
    """Counts kernels instead of seconds, so that a timer's parts list their kernels."""

    shared = False

    def __init__(self, meter: KernelMeter) -> None:
        self._meter = meter

    def mark(self) -> int:
        """Kernels so far."""
        return len(self._meter.launched)

    def mark_end(self, work: dist.Work, group: dist.ProcessGroup, note: Callable[[int], None]) -> None:
        """A collective has ended as soon as it is issued."""
        note(self.mark())

    def between_s(self, start: int, end: int) -> float:
        """Kernels from one mark to another."""
        return float(end - start)


def kernels_of_step(launch: Launch, mesh: Mesh) -> dict[str, list[int]]:
    """Bytes of the kernels of rank 0 in a step of one micro-batch, by part of the computation."""
    with warnings.catch_warnings(), KernelMeter() as meter:
        warnings.simplefilter("ignore")
        trainer = build(launch, mesh, meter)
        timer = trainer.model.communicator.timer
        timer.clock, timer.traced_steps = KernelClock(meter), 1
        meter.launched.clear()
        timer.begin_step(0)
        step_ledger(trainer, micro_batches=1)
        timer.part("")
        times = timer.end_step()
    assert times is not None, "the step was timed"
    return {part.name: meter.launched[round(part.start_s) : round(part.end_s)] for part in times.parts}
