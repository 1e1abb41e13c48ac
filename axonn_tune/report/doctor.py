"""What `axonn-tune doctor` has found, as text and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from axonn_tune import __version__
from axonn_tune.launch.host import HostCheck, State
from axonn_tune.report.ranking_json import to_text
from axonn_tune.report.table import Heading, text_table

SCHEMA = "axonn-tune/doctor/1"
_SHOWN: dict[State, str] = {"ok": "ok", "missing": "missing", "differs": "differs", "noted": ""}
_HEADINGS = tuple(Heading(title, left=True) for title in ("what", "here", "state", "note"))


def doctor_text(findings: Sequence[HostCheck]) -> str:
    """One table under each heading, all with the same columns."""
    rows: list[list[str]] = []
    for number, finding in enumerate(findings):
        if number == 0 or finding.area != findings[number - 1].area:
            rows += [["", "", "", ""], [finding.area.upper(), "", "", ""]]
        rows.append([finding.what, finding.here, _SHOWN[finding.state], finding.note])
    return text_table(_HEADINGS, rows)


def doctor_json(findings: Sequence[HostCheck]) -> str:
    """The same by the schema `axonn-tune/doctor/1`."""
    document = {"schema": SCHEMA, "tool_version": __version__, "findings": [asdict(one) for one in findings]}
    return to_text(document)
