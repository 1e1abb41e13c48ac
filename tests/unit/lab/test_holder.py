"""Finding a lab: what is said when that fails."""

from __future__ import annotations

import os

import pytest

from axonn_tune.errors import EnvironmentProblem, UsageError
from axonn_tune.lab import holder


def test_a_lab_that_does_not_answer_is_named_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `lab status` and `lab down` while the process that holds a lab is stopped."""
    monkeypatch.setattr(holder, "_PATIENCE_S", 0.05)
    name = f"silent-{os.getpid()}"
    with holder.listen(name):
        with pytest.raises(EnvironmentProblem, match=f"process {os.getpid()}, which holds lab '{name}'"):
            holder.find(name)
        with pytest.raises(UsageError, match="is up already"):
            holder.listen(name)
    assert holder.find(name) is None
