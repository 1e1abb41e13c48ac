"""Layer types: one file each, which says the nodes that a block of it has.

Each file with a `KIND` is one, and is found here: its nodes, what divides its sizes, what a log counts of it otherwise,
and the section of the model document that has its sizes, if that is not one of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeAlias

from axonn_tune.frameworks.description import Framework
from axonn_tune.program.constraints import Constraint
from axonn_tune.program.inputs import LayerInputs
from axonn_tune.program.nodes import Nodes
from axonn_tune.specs.model import Layer, Model, add_mixers
from axonn_tune.specs.sections import Mixer

Constraints: TypeAlias = Callable[[Model, Framework], Sequence[Constraint]]

FRONT, MIXER, ATTENTION, MLP = range(4)
"""Places in a block: in front of a decoder layer, what mixes tokens in place of attention, attention, and the MLP."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """A layer type.

    place: among the others of a block. nodes: of a block, none of one without it. constraints: what must divide its
    sizes, if a model has it; what mixes tokens has one over context if it exchanges something there. logged: elements
    that Megatron's log counts a token beyond those of its weights, of sequences so long. sizes: a section of the model
    document, of one that mixes tokens in place of attention.
    """

    place: int
    nodes: Callable[[LayerInputs], Nodes]
    constraints: Constraints = lambda *_: ()
    logged: Callable[[Layer, float], float] = lambda *_: 0.0
    sizes: type[Mixer] | None = None

    def limits(self, model: Model, framework: Framework) -> list[Constraint]:
        """Its constraints; what mixes tokens and has none over context needs all tokens of a sequence on one rank."""
        found, sizes = [*self.constraints(model, framework)], self.sizes
        if sizes is None or "context" not in framework.axes or any("context" in one.axes for one in found):
            return found
        if any(isinstance(layer.mixer, sizes) for layer in model.types):
            why = f"layers with {sizes.TITLE} need whole sequences, so no {framework.called('context')}"
            found.append(Constraint(f"{sizes.SECTION}-by-context", why, 1, ("context",), both=True))
        return found


@cache
def kinds() -> tuple[LayerKind, ...]:
    """Every layer type, in the order in which they follow one another in a block."""
    modules = [import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__)]
    found: list[LayerKind] = [module.KIND for module in modules if hasattr(module, "KIND")]
    add_mixers(kind.sizes for kind in found if kind.sizes is not None)
    return tuple(sorted(found, key=lambda kind: kind.place))
