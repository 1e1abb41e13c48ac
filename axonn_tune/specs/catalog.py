"""The models and machines at hand: listed, found and loaded by name or path."""

from __future__ import annotations

from collections.abc import Sequence

from axonn_tune.specs.loading import Loaded, load_file
from axonn_tune.specs.lookup import Kind, available, find
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model

__all__ = ["Kind", "Loaded", "available", "find", "load_machine", "load_model"]


def load_model(name: str, *, overrides: Sequence[str] = ()) -> Loaded[Model]:
    """Load a model by name (`80b`, any case) or path.

    UnknownNameError if no model has that name, UsageError for an unreadable file or a wrong
    override (`hidden=8192`), DocumentError with every problem of the document.
    """
    return load_file(find("model", name), schema=Model, overrides=overrides)


def load_machine(name: str, *, overrides: Sequence[str] = ()) -> Loaded[Machine]:
    """Load a machine by name (`perlmutter`, any case) or path; errors as `load_model`."""
    return load_file(find("machine", name), schema=Machine, overrides=overrides)
