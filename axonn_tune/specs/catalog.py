"""The models and machines at hand: listed, found and loaded by name or path."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from axonn_tune.errors import UnknownNameError, UsageError, suggest
from axonn_tune.specs.document import known_keys
from axonn_tune.specs.loading import Kind, Loaded, available, find, hold, load_file
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model

__all__ = [
    "DEFAULT_MACHINE",
    "Kind",
    "Loaded",
    "MachineLike",
    "ModelLike",
    "available",
    "find",
    "load_machine",
    "load_model",
    "route_overrides",
]

DEFAULT_MACHINE = "perlmutter"
"""The machine that is searched for unless another is named."""

ModelLike: TypeAlias = str | Path | Model | Loaded[Model]
"""A model by name or path, or the model itself."""
MachineLike: TypeAlias = str | Path | Machine | Loaded[Machine]
"""A machine by name or path, or the machine itself."""


def load_model(name: ModelLike, *, overrides: Sequence[str] = ()) -> Loaded[Model]:
    """Load a model by name (`80b`, any case) or path; one that is loaded already is returned as it is.

    UnknownNameError if no model has that name, UsageError for an unreadable file, a Hugging Face config or
    a wrong override (`hidden=8192`), DocumentError with every problem of the document.
    """
    if isinstance(name, Model | Loaded):
        return hold(name, schema=Model, overrides=overrides)
    path = name if isinstance(name, Path) else _find_model(name)
    return load_file(path, schema=Model, overrides=overrides)


def load_machine(name: MachineLike, *, overrides: Sequence[str] = ()) -> Loaded[Machine]:
    """Load a machine by name (`perlmutter`, any case) or path; otherwise as `load_model`."""
    if isinstance(name, Machine | Loaded):
        return hold(name, schema=Machine, overrides=overrides)
    path = name if isinstance(name, Path) else find("machine", name)
    return load_file(path, schema=Machine, overrides=overrides)


def route_overrides(assignments: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split `--set` assignments into those for the model and those for the machine, by their first key.

    `model.` or `machine.` in front decides where both have the key. UsageError if neither has it.
    """
    model, machine = known_keys(Model), known_keys(Machine)
    routed: tuple[list[str], list[str]] = ([], [])
    for assignment in assignments:
        prefix, _, rest = assignment.partition(".")
        first = assignment.partition("=")[0].partition(".")[0].strip()
        if prefix in ("model", "machine") and rest:
            routed[prefix == "machine"].append(rest)
        elif first in model and first in machine:
            raise UsageError(f"--set {assignment}: {first!r} is in both: write model.{first} or machine.{first}")
        elif first in model or first in machine:
            routed[first in machine].append(assignment)
        else:
            raise UsageError(f"--set {assignment}: unknown key {first!r}{suggest(first, [*model, *machine])}")
    return routed


def _find_model(name: str) -> Path:
    """The file of a model; UsageError if it is what Hugging Face has instead, or a folder with that."""
    try:
        path = find("model", name)
    except UnknownNameError:
        path = Path(name)
        if not _is_hugging_face(path):
            raise
    if not path.exists():
        # Imported here: few names are none.
        from axonn_tune.specs.hugging_face import refuse_hub_name

        refuse_hub_name(name)
    if _is_hugging_face(path):
        raise UsageError(
            f"{name!r} is a Hugging Face config; make a model file of it first: "
            f"`axonn-tune models import {shlex.quote(name)} -o mymodel.yaml`"
        )
    return path


def _is_hugging_face(path: Path) -> bool:
    return path.name == "config.json" if path.is_file() else (path / "config.json").is_file()
