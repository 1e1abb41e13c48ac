"""Every shipped measurement, predicted once for all of these tests."""

from __future__ import annotations

import pytest

from axonn_tune.validation.published.accuracy import Accuracy, Files, evaluate


@pytest.fixture(scope="session")
def accuracy() -> Accuracy:
    """What `validate --published` prints."""
    return evaluate(Files(), worst=5)
