"""What all tests share."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says nothing on a busy host; speed is what `make bench` measures.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
