"""What all tests share."""

from __future__ import annotations

import pytest
from hypothesis import settings

# How long an example takes says nothing on a busy host; speed is what `make bench` measures.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `pytest -n`, tests of one file run one after the other, so that what they share is made once."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.location[0]))
