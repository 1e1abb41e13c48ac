"""Predict the step time of AxoNN's 4D parallel training on every grid, and launch the best one.

    >>> import axonn_tune
    >>> found = axonn_tune.search("80b", gpus=1024, rank_by="iteration")
    >>> found.best.x, found.best.y, found.best.z, found.best.data
    (1, 1, 256, 4)

Everything below is imported when it is first used, so that `import axonn_tune` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING

from axonn_tune.vocabulary import VERSION

if TYPE_CHECKING:
    from axonn_tune.api.analysis import (
        Catalog,
        CompareResult,
        SweepResult,
        compare,
        explain,
        explain_launch,
        machines,
        models,
        sweep,
    )
    from axonn_tune.api.explanation import Explanation
    from axonn_tune.api.learning import compare_command, diagnose, explain_command, learn
    from axonn_tune.api.measurement import (
        CalibrateOptions,
        Runs,
        accuracy,
        calibrate,
        regress,
        run,
        validate,
        validate_launches,
        validate_rows,
    )
    from axonn_tune.api.search import SearchResult, search
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
    from axonn_tune.lab.lab import Lab
    from axonn_tune.request import Options, Request, SearchOptions
    from axonn_tune.specs.catalog import load_machine, load_model

__version__ = VERSION

# Module of each name.
_PLACES = {
    "api.analysis": "Catalog CompareResult SweepResult compare explain explain_launch machines models sweep",
    "api.explanation": "Explanation",
    "api.learning": "compare_command diagnose explain_command learn",
    "api.measurement": "CalibrateOptions Runs accuracy calibrate regress run validate validate_launches validate_rows",
    "api.search": "SearchResult search",
    "errors": "AxonnTuneError CheckFailedError DocumentError EnvironmentProblem "
    "NothingFeasibleError TrainingFailedError UnknownNameError UsageError",
    "lab.lab": "Lab",
    "request": "Options Request SearchOptions",
    "specs.catalog": "load_machine load_model",
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names.split()}

__all__ = [
    "AxonnTuneError",
    "CalibrateOptions",
    "Catalog",
    "CheckFailedError",
    "CompareResult",
    "DocumentError",
    "EnvironmentProblem",
    "Explanation",
    "Lab",
    "NothingFeasibleError",
    "Options",
    "Request",
    "Runs",
    "SearchOptions",
    "SearchResult",
    "SweepResult",
    "TrainingFailedError",
    "UnknownNameError",
    "UsageError",
    "__version__",
    "accuracy",
    "calibrate",
    "compare",
    "compare_command",
    "diagnose",
    "explain",
    "explain_command",
    "explain_launch",
    "learn",
    "load_machine",
    "load_model",
    "machines",
    "models",
    "regress",
    "run",
    "search",
    "sweep",
    "validate",
    "validate_launches",
    "validate_rows",
]


def __getattr__(name: str) -> object:
    """Import a name on first use; later it is a normal attribute."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Every name, also those not imported yet."""
    return sorted({*globals(), *__all__})
