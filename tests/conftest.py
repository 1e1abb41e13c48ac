"""What all tests share."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator

import pytest
from hypothesis import settings

# How long an example takes says nothing on a busy host; speed is what `make bench` measures.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One of the modules that ask for it runs at a time: a lab's ranks come before all other processes of the host.

    A browser beside them waits for minutes.
    """
    # The workers of one run share the folder above their own.
    with (tmp_path_factory.getbasetemp().parent / "alone.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
