"""Numbers of a machine profile by their path: `tiers.network.latency_us`, `software.core.gemm`.

Items of a list go by their name, measured groups by their size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from axonn_tune.specs.document import Document
from axonn_tune.specs.machine import Machine

T = TypeVar("T")


def number_at(machine: Machine, path: str) -> float:
    """The number at a path; KeyError if the profile has none there."""
    found: list[float] = []

    def look(value: float) -> float:
        found.append(value)
        return value

    _changed(machine, path, look)
    if not found:
        raise KeyError(path)
    return found[0]


def has_number(machine: Machine, path: str) -> bool:
    """Whether a profile has a number at a path."""
    try:
        number_at(machine, path)
    except (KeyError, AttributeError):
        return False
    return True


def with_numbers(machine: Machine, values: Mapping[str, float]) -> Machine:
    """The profile with other numbers at some paths; limits are not checked."""
    for path, value in values.items():
        machine = with_value(machine, path, value)
    return machine


def with_value(machine: Machine, path: str, value: Any) -> Machine:  # noqa: ANN401
    """The profile with another value at a path; limits are not checked."""
    return _changed(machine, path, lambda before: value)


def scaled(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The profile with the numbers at some paths multiplied; limits are not checked.

    Bandwidths of a tier's measured groups go with the tier's own.
    """
    for path, factor in factors.items():
        for own in (path, *_measured_groups(machine, path)):
            machine = _changed(machine, own, lambda before, factor=factor: before * factor)  # type: ignore[misc]
    return machine


def _measured_groups(machine: Machine, path: str) -> list[str]:
    """Paths of a tier's measured group bandwidths."""
    return [
        f"tiers.{tier.name}.measured.{one.group}.bandwidth_gb_per_s"
        for tier in machine.tiers
        if path == f"tiers.{tier.name}.bandwidth_gb_per_s"
        for one in {one.group: one for one in tier.measured or ()}.values()
    ]


def kind_at(section: object, path: str) -> str:
    """Kind of provenance that a profile, or a section of it, gives for the number at a path, "" where it gives none."""
    if isinstance(section, tuple):
        own = next((item for item in section if path.startswith(f"{_name(item)}.")), None)
        return kind_at(own, path[len(_name(own)) + 1 :])
    word, _, rest = path.partition(".")
    sources = getattr(section, "sources", {})
    if word in sources:
        return str(sources[word].kind)
    below = section.get(word) if isinstance(section, dict) else getattr(section, word, None)
    return kind_at(below, rest) if rest else ""


def _changed(section: T, path: str, change: Callable[[float], float]) -> T:
    """A section with what lies at a path below it changed."""
    if not path:
        return change(section)  # type: ignore[arg-type, return-value]
    if isinstance(section, tuple):
        # Names of items may hold dots.
        begins = ((item, f"{_name(item)}.") for item in section)
        return tuple(  # type: ignore[return-value]
            _changed(item, path.removeprefix(own), change) if path.startswith(own) else item for item, own in begins
        )
    word, _, rest = path.partition(".")
    if isinstance(section, dict):
        return {**section, word: _changed(section[word], rest, change)} if word in section else section  # type: ignore[return-value]
    assert isinstance(section, Document), path
    below = getattr(section, word)
    return section if below is None else section.model_copy(update={word: _changed(below, rest, change)})


def _name(item: object) -> str:
    return str(getattr(item, "name", None) or getattr(item, "group", ""))


def validated(machine: Machine) -> Machine:
    """The same profile with its limits checked, which `model_copy` does not do."""
    return Machine.model_validate(machine.model_dump(by_alias=True, exclude_unset=True))
