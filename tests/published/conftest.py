"""Every shipped measurement, predicted once for all of these tests."""

from __future__ import annotations

import pytest

from axonn_tune.validation.published.accuracy import Accuracy, evaluate


@pytest.fixture(scope="session")
def accuracy() -> Accuracy:
    """What `axonn-tune accuracy` prints."""
    return evaluate()
