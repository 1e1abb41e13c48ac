"""Layer types: one file each, which says the nodes that a block of it has.

Each file with a `KIND` is one, and is found here: its nodes, what divides its sizes, what a log counts of it otherwise,
and the section of the model document that has its sizes, if that is not one of its own.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from axonn_tune.specs.model import add_mixers

if TYPE_CHECKING:
    from axonn_tune.program.kinds import LayerKind


@cache
def kinds() -> tuple[LayerKind, ...]:
    """Every layer type, in the order in which they follow one another in a block."""
    modules = [import_module(f"{__name__}.{one.name}") for one in iter_modules(__path__)]
    found: list[LayerKind] = [module.KIND for module in modules if hasattr(module, "KIND")]
    add_mixers(kind.sizes for kind in found if kind.sizes is not None)
    return tuple(sorted(found, key=lambda kind: kind.place))
