"""The ranks that the other tests run on: a failure comes back in words, and nobody is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runtime import tasks
from tests.runtime.pool import Pool, RankError

FAILURES: list[tuple[Callable[[int], None], str]] = [
    (tasks.fail_on, r"rank 1: Traceback(.|\n)*ValueError: the seventh tensor is crooked"),
    (tasks.die_on, r"rank 1: the process ended"),
    (tasks.hang_on, r"no answer within 2 s from rank 1"),
]


@pytest.mark.parametrize(("task", "said"), FAILURES, ids=["raises", "dies", "hangs"])
def test_failure_ends_the_pool_and_says_why(task: Callable[[int], None], said: str) -> None:
    """Guards the suite: a rank that raises, dies or hangs fails one test, with its traceback, and stops nothing."""
    pool = Pool(2)
    processes = pool.run(tasks.process_id)
    with pytest.raises(RankError, match=said):
        pool.run(task, 1, timeout_s=2.0)
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


def test_closing_leaves_no_process() -> None:
    """Guards against ranks that outlive the tests."""
    pool = Pool(2)
    processes = pool.run(tasks.process_id)
    assert len(set(processes)) == 2
    pool.close()
    assert not any(Path(f"/proc/{process}").exists() for process in processes)
