"""Did this change move an output? Every command and format against its recording, in one process.

That of `axonn-tune accuracy` is compared where its rows are predicted anyway, in tests/published.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.golden.golden import CLOSE, commands, largest_change, moved, outputs, recorded

ELSEWHERE = "accuracy"
HELD = {name: text for name, text in recorded().items() if name != f"{ELSEWHERE}.txt"}


@pytest.fixture(scope="module")
def found(shared_searches: None) -> Mapping[str, str]:
    """What the commands print and write now."""
    return dict(outputs(f"^(?!{ELSEWHERE}$)"))


@pytest.mark.parametrize("name", sorted(HELD))
def test_no_output_moves_unnoticed(name: str, found: Mapping[str, str]) -> None:
    """Guards what users and programs read: an output moves only with its recording, which the changelog explains."""
    assert name in found, "no command writes it: `make golden ARGS=--write`"
    change = largest_change(HELD[name], found[name])
    assert change is not None, "\n".join(moved(HELD[name], found[name]))
    assert change <= CLOSE, "\n".join(moved(HELD[name], found[name]))


def test_every_output_is_recorded(found: Mapping[str, str]) -> None:
    """Guards against a new command line that is compared with nothing, and against a recording of an internal error."""
    assert set(found) == set(HELD)
    assert len(commands()) >= 40
    assert not [name for name, text in HELD.items() if text.startswith("exit code 1\n")]
