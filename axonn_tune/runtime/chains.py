"""Collectives that outlive the layer that starts them: weight gathers ahead of it, gradient reductions behind it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from axonn_tune.program.operations import Phase
from axonn_tune.runtime.communicate import Communicator, Pending
from axonn_tune.runtime.parameters import Matrix
from axonn_tune.runtime.settings import Settings


class Gathers:
    """The gather chain of one micro-batch: `(matrix, phase, layer)` in order; taking one issues the next."""

    def __init__(self, communicator: Communicator, settings: Settings, chain: list[tuple[Matrix, Phase, str]]) -> None:
        self._communicator = communicator
        self._settings = settings
        self._chain = chain
        self._prefetch = "gather_prefetch" in settings.overlaps
        self._issued = self._issue(chain[0]) if self._prefetch and chain else None

    def take(self, matrix: Matrix) -> torch.Tensor:
        """The gathered block of the next weight in the chain, which must be `matrix`."""
        expected, *rest = self._chain
        assert expected[0] is matrix, f"the chain has {expected[0].layout.name} next, not {matrix.layout.name}"
        pending = self._issued if self._issued is not None else self._issue(expected)
        block = pending.wait()
        self._chain = rest
        self._issued = self._issue(rest[0]) if self._prefetch and rest else None
        return block

    def _issue(self, link: tuple[Matrix, Phase, str]) -> Pending:
        matrix, phase, layer = link
        return self._communicator.all_gather(matrix.value.to(self._settings.compute), "z", phase, layer)


class Gradients:
    """Weight gradients under way: each reduce-scatter is finished one layer later."""

    def __init__(self, communicator: Communicator, settings: Settings) -> None:
        self._communicator = communicator
        self._deferred = "weight_gradient" in settings.overlaps
        self._pending: tuple[Matrix, Pending, Callable[[], None] | None] | None = None

    def reduce(
        self, matrix: Matrix, gradient: torch.Tensor, layer: str, after: Callable[[], None] | None = None
    ) -> None:
        """Reduce-scatter a block's gradient over z and add it to the shard; `after` runs once it is added."""
        self.finish()
        self._pending = (matrix, self._communicator.reduce_scatter(gradient, "z", "backward", layer), after)
        if not self._deferred:
            self.finish()

    def finish(self) -> None:
        """Add what is under way."""
        if self._pending is not None:
            matrix, pending, after = self._pending
            self._pending = None
            matrix.gradient += pending.wait()
            if after is not None:
                after()
