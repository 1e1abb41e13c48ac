"""What the runtime's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.runtime.pool import Pools


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Guards the machine: torch keeps to one thread here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Ranks by world size."""
    found = Pools()
    yield found
    found.close()
