"""Predict the step time of AxoNN's 4D parallel training on every grid, and launch the best one.

    >>> import axonn_tune
    >>> found = axonn_tune.search("80b", gpus=1024, rank_by="iteration")
    >>> found.best.x, found.best.y, found.best.z, found.best.data
    (1, 1, 64, 16)

Everything below is imported when it is first used, so that `import axonn_tune` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from axonn_tune.api.compare import CompareResult, compare
    from axonn_tune.api.explain import Explanation, explain, explain_launch
    from axonn_tune.api.search import SearchResult, search
    from axonn_tune.api.sweep import SweepResult, sweep
    from axonn_tune.errors import (
        AxonnTuneError,
        CheckFailedError,
        DocumentError,
        EnvironmentProblem,
        NothingFeasibleError,
        TrainingFailedError,
        UnknownNameError,
        UsageError,
    )
    from axonn_tune.specs.catalog import load_machine, load_model

__version__ = "0.1.0"

_PLACES = {
    "api.compare": ("CompareResult", "compare"),
    "api.explain": ("Explanation", "explain", "explain_launch"),
    "api.search": ("SearchResult", "search"),
    "api.sweep": ("SweepResult", "sweep"),
    "errors": (
        "AxonnTuneError",
        "CheckFailedError",
        "DocumentError",
        "EnvironmentProblem",
        "NothingFeasibleError",
        "TrainingFailedError",
        "UnknownNameError",
        "UsageError",
    ),
    "specs.catalog": ("load_machine", "load_model"),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "AxonnTuneError",
    "CheckFailedError",
    "CompareResult",
    "DocumentError",
    "EnvironmentProblem",
    "Explanation",
    "NothingFeasibleError",
    "SearchResult",
    "SweepResult",
    "TrainingFailedError",
    "UnknownNameError",
    "UsageError",
    "__version__",
    "compare",
    "explain",
    "explain_launch",
    "load_machine",
    "load_model",
    "search",
    "sweep",
]


def __getattr__(name: str) -> object:
    """Import what a name stands for; from then on it is an attribute like any other."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Every name, also those not imported yet."""
    return sorted({*globals(), *__all__})
