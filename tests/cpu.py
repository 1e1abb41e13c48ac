"""CPU seconds of each test, those of the processes that it started too, of which the slowest are listed at the end.

A guard of `make test` takes at most `MOST_S` on an idle host; one that takes `FAILS` times as long fails the run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MOST_S, FAILS, LISTED, QUICK_S = 10.0, 3, 20, 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
SPENT = "cpu_s"


def cpu_s() -> float:
    """CPU time of this process and of all that descend from it, those that have ended included, s."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system + _below(os.getpid()) / TICKS_PER_S


def _below(pid: int) -> int:
    """Clock ticks of the living descendants of a process; any of them may end meanwhile."""
    ticks, tasks = 0, Path(f"/proc/{pid}/task")
    try:
        threads = list(tasks.iterdir())
    except OSError:
        return 0
    for thread in threads:
        try:
            children = (thread / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            try:
                # From the 14th field of proc(5) on: user, system, and both of children that were waited for.
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15])) + _below(int(child))
    return ticks


class CpuSeconds:
    """Measures in workers, and tells where all is summed up; what several tests share is listed as a set-up."""

    def __init__(self) -> None:
        self._spent = Counter[tuple[str, str]]()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Measure fixtures; of shared ones whoever comes first."""
        return (yield from _measured(item))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Measure the test."""
        return (yield from _measured(item))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what was measured."""
        measured = [float(str(seconds)) for name, seconds in report.user_properties if name == SPENT]
        if report.when != "teardown" and measured:
            self._spent[report.nodeid, "" if report.when == "call" else "set-up of "] = measured[-1]

    def slow(self) -> list[str]:
        """Tests that take longer than any may."""
        return [test for (test, setup), seconds in self._spent.items() if not setup and seconds > FAILS * MOST_S]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """List the slowest, unless it was quick."""
        if (total := sum(self._spent.values())) < QUICK_S:
            return
        terminalreporter.section(f"the slowest, CPU seconds; {total:,.0f} in all")
        for (test, setup), seconds in self._spent.most_common(LISTED):
            mark = f", above the {MOST_S:g} of a guard" if seconds > MOST_S and not setup else ""
            terminalreporter.write_line(f"{seconds:8.2f}  {setup}{test[:150]}{mark}")


def _measured(item: pytest.Item) -> Iterator[None]:
    began = cpu_s()
    try:
        return (yield)
    finally:
        others = [(name, value) for name, value in item.user_properties if name != SPENT]
        item.user_properties = [*others, (SPENT, round(cpu_s() - began, 3))]
