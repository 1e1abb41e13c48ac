"""The measurements that ship with the tool."""

from __future__ import annotations

from pathlib import Path

import axonn_tune.published

SHIPPED = Path(axonn_tune.published.__file__).parent
"""Folder of the data files."""
