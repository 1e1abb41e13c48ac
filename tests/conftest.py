"""What all tests share."""

from __future__ import annotations

import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from tests import searches
from tests.cpu import CpuSeconds

# How long an example takes says nothing on a busy host; speed is what `make bench` measures.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
SEARCHES = "AXONN_TUNE_TESTED_SEARCHES"
DAILY = "not nightly and not deep"

SPREAD = {
    "tests/runtime/test_equivalence.py": 12,
    "tests/runtime/test_dry_run.py": 6,
    "tests/runtime/test_kernels.py": 4,
    "tests/cli/test_fuzz.py": 4,
    "tests/unit/test_api.py": 4,
}
"""Files of which so many parts may each run in a worker of its own; all others run whole in one, for their fixtures.
These take longest and come first, so that no worker is left with one at the end."""


class Scheduling(LoadFileScheduling):  # type: ignore[misc] # xdist has no types
    """Workers take files, or parts of those that take long."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return f"{file}-{crc32(nodeid.encode()) % SPREAD.get(file, 1)}"


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling | None:
    """Our scheduling in place of files whole."""
    return Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_configure(config: pytest.Config) -> None:
    """A folder for searches that tests share, which workers find by its name in the environment; and lines as wide as
    a pipe's, in whatever terminal."""
    gc.disable()
    os.environ["COLUMNS"] = "100"
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = TemporaryDirectory(prefix="axonn-tune-searches-")
        os.environ[SEARCHES] = folder.name
        config.add_cleanup(folder.cleanup)
    config.pluginmanager.register(CpuSeconds(), "cpu-seconds")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first."""
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in SPREAD)


def pytest_collection_finish(session: pytest.Session) -> None:
    """No search for cycles goes through what was collected, which stays; those of tests are as rare as in a command."""
    gc.freeze()
    gc.set_threshold(1_000_000, 50, 50)
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail `make test` by a guard that takes far too long."""
    cpu = session.config.pluginmanager.get_plugin("cpu-seconds")
    if exitstatus == 0 and session.config.option.markexpr == DAILY and cpu.slow():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
