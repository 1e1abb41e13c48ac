"""Models and machines: listed, found and loaded by name or path."""

from __future__ import annotations

import contextlib
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeAlias

from axonn_tune.errors import AxonnTuneError, UnknownNameError, UsageError, suggest
from axonn_tune.specs.document import known_keys
from axonn_tune.specs.loading import DOCUMENT_BYTES, SUFFIXES, Kind, Loaded, available, find, hold, load_file, read_text
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Model
from axonn_tune.vocabulary import DEFAULT_MACHINE

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
    "machines_with",
    "route_overrides",
]

ModelLike: TypeAlias = str | Path | Model | Loaded[Model]
"""A model by name or path, or the model itself."""
MachineLike: TypeAlias = str | Path | Machine | Loaded[Machine]
"""A machine by name or path, or the machine itself."""


def load_model(name: ModelLike, *, overrides: Sequence[str] = ()) -> Loaded[Model]:
    """Load a model by name (`80b`, any case) or path; a loaded model is returned unchanged.

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
    path = name if isinstance(name, Path) else _find_machine(name)
    return load_file(path, schema=Machine, overrides=overrides)


def _find_machine(name: str) -> Path:
    """The file of a machine; the error of an unknown name lists profiles with an accelerator of that name."""
    try:
        return find("machine", name)
    except UnknownNameError as error:
        having = machines_with(name)
        if not having:
            raise
        listed = ", ".join(f"{profile} ({accelerator})" for profile, accelerator in having.items())
        raise UnknownNameError("machine", name, error.known, hint=f"; such an accelerator is in {listed}") from error


def machines_with(accelerator: str) -> dict[str, str]:
    """Names of machine profiles whose accelerator has every word of `accelerator` in its name, and those names."""
    words, found = re.findall(r"[a-z]*\d+[a-z]*|[a-z]{3,}", accelerator.lower()), dict[str, str]()
    for name, path in available("machine").items() if words else ():
        # Broken profiles are not suggested.
        with contextlib.suppress(AxonnTuneError):
            has = load_file(path, schema=Machine).document.accelerator.name
            if all(re.search(rf"(?<![a-z0-9]){word}(?!(?<=[0-9])[0-9])", has.lower()) for word in words):
                found[name] = has
    return found


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
            hint = suggest(first, [*model, *machine])
            own = "; ".join(
                f"a {kind} has {', '.join(key for key in keys if key not in ('schema', 'name', 'description'))}"
                for kind, keys in (("model", model), ("machine", machine))
            )
            raise UsageError(f"--set {assignment}: unknown key {first!r}{hint}; {own}")
    return routed


_ALIASES = {
    **{"deepseekv3671b": "deepseekv3", "deepseekr1": "deepseekv3", "deepseekv2236b": "deepseekv2"},
    **{"deepseekv216b": "deepseekv2lite", "gpt2xl": "gpt215b", "kimik21t": "kimik2", "glm45355b": "glm45"},
    **{"llama4scout17b16e": "llama4scout", "llama4scout17bx16e": "llama4scout"},
    "g8t8": "mixtral8x22bg8t8",
}


def plain_name(name: str) -> str:
    """Letters and digits of a model's name, small, without its publisher and what says how far it was trained."""
    plain = re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower().removeprefix("meta-"))
    # Llama 3, 3.1 and 3.3 have the same layers, as have releases of GLM-4.
    plain = re.sub(r"^(llama3|glm4)[123](?=\d{1,3}b)", r"\1", plain)
    plain = re.sub(r"(?:hf|base|instruct|v01)$", "", re.sub(r"(?:hf|base|instruct|v01)$", "", plain))
    return _ALIASES.get(plain, plain)


def spelt_name(name: str, known: Iterable[str], *, begun: bool = False) -> str | None:
    """The known name that a spelling means; begun: also one that only one of them begins with."""
    plain, names = plain_name(name), {plain_name(one): one for one in known}
    longer = [key for key in names if plain and key.startswith(plain)]
    one = plain if plain in names else longer[0] if begun and len(longer) == 1 and len(plain) > 4 else ""
    return names.get(one)


def _find_model(name: str) -> Path:
    """The file of a model; UsageError for a Hugging Face config or a folder with one."""
    try:
        path = find("model", name)
    except UnknownNameError:
        path = Path(name)
        if not _is_hugging_face(path):
            if spelt := spelt_name(name, available("model")):
                return find("model", spelt)
            raise
    if not path.exists():
        if path.suffix not in SUFFIXES and (spelt := spelt_name(name, available("model"))):
            # As on the Hugging Face hub.
            return find("model", spelt)
        # Imported here: only unknown names need it.
        from axonn_tune.specs.hugging_face import refuse_hub_name

        refuse_hub_name(name)
    if _is_hugging_face(path):
        raise UsageError(
            f"{name!r} is a Hugging Face config; make a model file of it first: "
            f"`axonn-tune models import {shlex.quote(name)} -o mymodel.yaml`"
        )
    if path.suffix in _SCRIPTS and path.exists():
        raise UsageError(
            f"{name!r} is a script or config of a run; make a model file of it first: "
            f"`axonn-tune models import {shlex.quote(name)} -o mymodel.yaml`"
        )
    return path


_SCRIPTS = (".sh", ".sbatch", ".slurm", ".toml")
"""How names of files end that start a run."""


def _is_hugging_face(path: Path) -> bool:
    if path.is_dir():
        return (path / "config.json").is_file()
    if path.suffix != ".json" or not path.is_file():
        return False
    return path.name == "config.json" or '"model_type"' in read_text(path, limit_bytes=DOCUMENT_BYTES)
