"""The models and machines at hand: listed, found and loaded by name or path."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from axonn_tune.errors import UnknownNameError, UsageError
from axonn_tune.specs.loading import Loaded, load_file
from axonn_tune.specs.lookup import Kind, available, find
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model

__all__ = ["Kind", "Loaded", "available", "find", "load_machine", "load_model"]


def load_model(name: str, *, overrides: Sequence[str] = ()) -> Loaded[Model]:
    """Load a model by name (`80b`, any case) or path.

    UnknownNameError if no model has that name, UsageError for an unreadable file, a Hugging Face config or
    a wrong override (`hidden=8192`), DocumentError with every problem of the document.
    """
    return load_file(_find_model(name), schema=Model, overrides=overrides)


def load_machine(name: str, *, overrides: Sequence[str] = ()) -> Loaded[Machine]:
    """Load a machine by name (`perlmutter`, any case) or path; errors as `load_model`."""
    return load_file(find("machine", name), schema=Machine, overrides=overrides)


def _find_model(name: str) -> Path:
    """The file of a model; UsageError if it is what Hugging Face has instead, or a folder with that."""
    try:
        path = find("model", name)
    except UnknownNameError:
        path = Path(name)
        if not _is_hugging_face(path):
            raise
    if _is_hugging_face(path):
        raise UsageError(
            f"{name!r} is a Hugging Face config; make a model file of it first: "
            f"`axonn-tune models import {shlex.quote(name)} -o mymodel.yaml`"
        )
    return path


def _is_hugging_face(path: Path) -> bool:
    return path.name == "config.json" if path.is_file() else (path / "config.json").is_file()
