"""Did this change move an output? Every command and format against its recording, in one process: those that search
little each time, the others nightly.

That of `axonn-tune accuracy` is compared where its rows are predicted anyway, in tests/published.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.golden.golden import CLOSE, commands, largest_change, moved, outputs, recorded, slow

ELSEWHERE = "accuracy"
HELD = {name: text for name, text in recorded().items() if name != f"{ELSEWHERE}.txt"}


@pytest.fixture(scope="module")
def found(shared_searches: None) -> Mapping[str, str]:
    """What the commands print and write now."""
    return dict(outputs(lambda name: name != ELSEWHERE and not slow(name)))


@pytest.fixture(scope="module")
def found_slowly(shared_searches: None) -> Mapping[str, str]:
    """The same of those that search long."""
    return dict(outputs(slow))


@pytest.mark.parametrize("name", [name for name in sorted(HELD) if not slow(name)])
def test_no_output_moves_unnoticed(name: str, found: Mapping[str, str]) -> None:
    """Guards what users and programs read: an output moves only with its recording, which the changelog explains."""
    check(name, found)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in sorted(HELD) if slow(name)])
def test_no_output_of_long_searches_moves_unnoticed(name: str, found_slowly: Mapping[str, str]) -> None:
    """Guards the same where a search takes long."""
    check(name, found_slowly)


def check(name: str, found: Mapping[str, str]) -> None:
    """One output is as recorded."""
    assert name in found, "no command writes it: `make golden ARGS=--write`"
    change = largest_change(HELD[name], found[name])
    assert change is not None, "\n".join(moved(HELD[name], found[name]))
    assert change <= CLOSE, "\n".join(moved(HELD[name], found[name]))


def test_every_output_is_recorded(found: Mapping[str, str]) -> None:
    """Guards against a new command line that is compared with nothing, and against a recording of an internal error."""
    assert set(found) == {name for name in HELD if not slow(name)}
    assert sum(not slow(name) for name in commands()) >= 40
    assert not [name for name, text in HELD.items() if text.startswith("exit code 1\n")]
