"""Communicators that make the order of things visible: one notes it, one does everything as late as it may."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from axonn_tune.runtime.communicator import CollectiveHandle, Communicator


@dataclass(frozen=True)
class Noting(Communicator):
    """Notes each collective when it is issued, and when it is first waited for."""

    events: list[tuple[str, int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def all_reduce(self, *given: Any, **more: Any) -> CollectiveHandle:
        return self._noted(super().all_reduce(*given, **more), f"all_reduce {given[1]}")

    def all_gather(self, *given: Any) -> CollectiveHandle:
        return self._noted(super().all_gather(*given), f"all_gather {given[1]}")

    def reduce_scatter(self, *given: Any) -> CollectiveHandle:
        return self._noted(super().reduce_scatter(*given), f"reduce_scatter {given[1]}")

    def pass_on(self, *given: Any, **more: Any) -> CollectiveHandle:
        return self._noted(super().pass_on(*given, **more), f"pass_on {given[1]}")

    def exchange(self, *given: Any, **more: Any) -> CollectiveHandle:
        return self._noted(super().exchange(*given, **more), f"{given[2]} expert")

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
    """Does each collective when it is waited for, and no sooner, as long as `late` is set.

    Whoever changes what is being sent, or reads a result before waiting for it, gets other numbers than from a network
    that happened to be quick: the race that overlap is prone to, found every time.
    """

    late: bool = True

    def all_reduce(self, *given: Any, **more: Any) -> CollectiveHandle:
        return self._later(lambda: super(Late, self).all_reduce(*given, **more))

    def all_gather(self, *given: Any) -> CollectiveHandle:
        return self._later(lambda: super(Late, self).all_gather(*given))

    def reduce_scatter(self, *given: Any) -> CollectiveHandle:
        return self._later(lambda: super(Late, self).reduce_scatter(*given))

    def pass_on(self, *given: Any, **more: Any) -> CollectiveHandle:
        return self._later(lambda: super(Late, self).pass_on(*given, **more))

    def exchange(self, *given: Any, **more: Any) -> CollectiveHandle:
        return self._later(lambda: super(Late, self).exchange(*given, **more))

    def _later(self, send: Callable[[], CollectiveHandle]) -> CollectiveHandle:
        return CollectiveHandle(torch.empty(0), None, lambda: send().wait()) if self.late else send()
