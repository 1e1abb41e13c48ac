"""Files of tools that are not read, and training that is not priced, refused by name with what can be priced instead.

Adapters, frozen or quantized weights and optimizers other than Adam are those of the table `unpriced`, tools those of
the table `tools`, each with a mark in the text of its commands and pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from axonn_tune.errors import Problem
from axonn_tune.frameworks.keys import Stated, records
from axonn_tune.frameworks.names import FULL_TRAINING, unpriced
from axonn_tune.learning.recipes import command, facts_of


def refusals(
    text: str, own: Mapping[str, Stated], every: Mapping[str, Stated], gpus: Stated | None
) -> Iterator[Problem]:
    """What of a file is not priced, and what can be.

    text: a line for each command and pair; own: arguments as they are written; every: all by plain names; gpus: what a
    launcher starts.
    """
    named = [(name, stated, key) for name, stated in own.items() if (key := unpriced(name)) is not None]
    switches = [key.is_silent(stated.value) for _, stated, key in named if key.field == "switch"]
    # What an adapter is like says nothing where a switch has none.
    silent = {"detail", "frozen"} if switches and all(switches) else set()
    found = [one for one in named if not one[2].is_silent(one[1].value) and one[2].field not in silent]
    for name, stated, key in found:
        value = "" if stated.value == "True" else f" {stated.value}"
        yield Problem(f"{name}{value}", key.why, stated.line)
    tool = next((one for one in records("tools") if re.search(one["mark"], text, re.MULTILINE)), None)
    if tool is not None:
        facts = facts_of(every, gpus=gpus, tokens=tool["tokens"] == "yes")
        yield Problem("", f"{tool['subject']} are not read. {FULL_TRAINING}. {command(tool['framework'], text, facts)}")
    elif found:
        names = ", ".join(name for name, _, key in found if key.field != "switch" or not key.plain)
        full = ", ".join(f"{name} {key.default}" for name, _, key in found if key.field == "switch" and key.plain)
        changes = [f"with {full}"] * bool(full) + [f"without {names}"] * bool(names)
        yield Problem("", f"{FULL_TRAINING}: {' and '.join(changes)} the file is priced as that")
