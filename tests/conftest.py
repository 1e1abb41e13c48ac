"""What all tests share."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings

from tests import searches

# How long an example takes says nothing on a busy host; speed is what `make bench` measures.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
SEARCHES = "AXONN_TUNE_TESTED_SEARCHES"


def pytest_configure(config: pytest.Config) -> None:
    """A folder for searches that tests share, which workers find by its name in the environment."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = TemporaryDirectory(prefix="axonn-tune-searches-")
        os.environ[SEARCHES] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One of the modules that ask for it runs at a time: a lab's ranks come before all other processes of the host.

    A browser beside them waits for minutes.
    """
    # The workers of one run share the folder above their own.
    with (tmp_path_factory.getbasetemp().parent / "alone.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def shared_searches() -> Iterator[None]:
    """Equal searches of the modules that ask for this are made once, whichever test and worker asks first."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(searches, "folder", Path(os.environ[SEARCHES]))
        yield
