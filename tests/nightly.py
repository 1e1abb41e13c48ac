"""What is left to `make nightly`: whole tests by `@pytest.mark.nightly`, some parameters of one by `params`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest


def params(values: Iterable[Any], nightly: Collection[str], *, name: Callable[[Any], str] = str) -> list[Any]:
    """Parameters of a test, by name; those of `nightly`, each of which has to be among them, are run there alone."""
    named = [(name(value), value) for value in values]
    assert set(nightly) <= {own for own, _ in named}, set(nightly) - {own for own, _ in named}
    return [pytest.param(value, id=own, marks=pytest.mark.nightly if own in nightly else []) for own, value in named]
