"""What a collective takes on the network, from what every rank of its group saw.

A rank that is early waits for the late ones, and one that is late finds part of the work done: neither
saw what the collective takes. From when the last rank asked for it to when the last rank had it, all
took part. That needs one clock, which the processes of one host share. Ranks of several hosts, and
GPUs, have none here: of each call the shortest time that any rank saw must do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

ONE_CLOCK = "of each call, from when the last rank of its group asked for it to when the last had it"
SHARED = ", shared by calls in flight at once on one tier"


def running_system() -> str:
    """Names the host and its running kernel, whose processes share a clock; empty where the kernel does not say."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def shares_s(intervals_s: Sequence[tuple[float, float]], lanes: Sequence[Hashable]) -> list[float]:
    """Seconds of each call: every moment is divided equally among the calls in flight on its lane.

    intervals_s: begin and end of each call, s; lanes: what each shares with others, such as a tier.
    Summed over the calls of a lane it is the time in which any was in flight, as in the prediction, where
    calls of one tier follow each other and each has it to itself.
    """
    found = [0.0] * len(intervals_s)
    for lane in dict.fromkeys(lanes):
        calls = [call for call, its in enumerate(lanes) if its == lane]
        moments = sorted({moment for call in calls for moment in intervals_s[call]})
        waiting = sorted(calls, key=lambda call: -intervals_s[call][0])
        flying: list[int] = []
        for begin_s, end_s in pairwise(moments):
            while waiting and intervals_s[waiting[-1]][0] <= begin_s:
                flying.append(waiting.pop())
            flying = [call for call in flying if intervals_s[call][1] > begin_s]
            for call in flying:
                found[call] += (end_s - begin_s) / len(flying)
    return found
