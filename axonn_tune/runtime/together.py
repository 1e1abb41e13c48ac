"""Agreement between ranks outside the training step: what one decides all do, and where one fails all fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """All ranks, over a group of their own, so that a thread can use it beside training; None: one process."""

    group: dist.ProcessGroup | None

    @classmethod
    def of_the_world(cls) -> Ranks:
        """A new group of all ranks, over Gloo whatever training uses; all must call this together."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(None)
        return cls(dist.new_group(backend="gloo"))

    @property
    def first(self) -> bool:
        """Whether this is rank 0."""
        return self.group is None or dist.get_rank() == 0

    def from_first(self, function: Callable[[], Result]) -> Result:
        """What rank 0 gets from a function; raised everywhere if it fails."""
        if self.group is None:
            return function()
        outcome: list[Result | Exception | None] = [_tried(function) if self.first else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        (answer,) = outcome
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[return-value]  # what rank 0 put there

    def on_all(self, function: Callable[[], None]) -> None:
        """Call a function on every rank; the error of the lowest that fails is raised everywhere."""
        if self.group is None:
            return function()
        outcomes: list[Exception | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(outcomes, _tried(function), group=self.group)
        for error in outcomes:
            if error is not None:
                raise error
        return None

    def close(self) -> None:
        """Give the group back; all ranks must call this together."""
        if self.group is not None:
            dist.destroy_process_group(self.group)


def _tried(function: Callable[[], Result]) -> Result | Exception:
    try:
        return function()
    except Exception as error:
        return error
