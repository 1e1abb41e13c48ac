"""Communicators that make the order of things visible: one notes it, one does everything as late as it may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from axonn_tune.program.operations import Phase
from axonn_tune.runtime.communicator import CollectiveHandle, Communicator

Event = tuple[str, int]
"""`("issue" or "wait", number of the collective)`."""


@dataclass(frozen=True)
class Noting(Communicator):
    """Notes when each collective is issued and when it is first waited for."""

    events: list[Event] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def all_reduce(
        self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str, *, largest: bool = False
    ) -> CollectiveHandle:
        return self._noted(super().all_reduce(tensor, axis, phase, layer, largest=largest), f"all_reduce {axis}")

    def all_gather(self, shard: torch.Tensor, axis: str, phase: Phase, layer: str) -> CollectiveHandle:
        return self._noted(super().all_gather(shard, axis, phase, layer), f"all_gather {axis}")

    def reduce_scatter(self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str) -> CollectiveHandle:
        return self._noted(super().reduce_scatter(tensor, axis, phase, layer), f"reduce_scatter {axis}")

    def _noted(self, pending: CollectiveHandle, name: str) -> CollectiveHandle:
        number = len(self.names)
        self.names.append(name)
        self.events.append(("issue", number))

        def finish() -> torch.Tensor:
            self.events.append(("wait", number))
            return pending.wait()

        return CollectiveHandle(torch.empty(0), None, finish)

    def left_open(self) -> set[str]:
        """Collectives with something else between their issue and their wait."""
        pairs = zip(self.events, [*self.events[1:], ("end", -1)], strict=True)
        return {self.names[number] for (kind, number), after in pairs if kind == "issue" and after != ("wait", number)}


@dataclass(frozen=True)
class Late(Communicator):
    """Does each collective when it is waited for, and no sooner.

    Whoever changes what is being sent, or reads a result before waiting for it, gets other numbers than
    from a network that happened to be quick: the race that overlap is prone to, found every time.
    """

    def all_reduce(
        self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str, *, largest: bool = False
    ) -> CollectiveHandle:
        return self._later(lambda: super(Late, self).all_reduce(tensor, axis, phase, layer, largest=largest))

    def all_gather(self, shard: torch.Tensor, axis: str, phase: Phase, layer: str) -> CollectiveHandle:
        return self._later(lambda: super(Late, self).all_gather(shard, axis, phase, layer))

    def reduce_scatter(self, tensor: torch.Tensor, axis: str, phase: Phase, layer: str) -> CollectiveHandle:
        return self._later(lambda: super(Late, self).reduce_scatter(tensor, axis, phase, layer))

    @staticmethod
    def _later(send: Callable[[], CollectiveHandle]) -> CollectiveHandle:
        return CollectiveHandle(torch.empty(0), None, lambda: send().wait())
