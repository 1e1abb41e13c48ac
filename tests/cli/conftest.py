"""Commands in this process that ask for the same search share it."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _shared(shared_searches: None) -> None:
    pass
