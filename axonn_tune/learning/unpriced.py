"""Files of tools that are not read, and training that is not priced, refused by name with what can be priced instead.

Adapters, frozen or quantized weights and optimizers other than Adam are those of the table `unpriced`, tools those of
the table `tools`, each with a mark in the text of its commands and pairs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from axonn_tune.errors import Problem
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.keys import Arguments, Stated, records
from axonn_tune.frameworks.names import FULL_TRAINING, unpriced
from axonn_tune.learning.arguments import columns_of
from axonn_tune.specs.catalog import available


def refusals(text: str, own: Mapping[str, Stated], arguments: Arguments, gpus: Stated | None) -> Iterator[Problem]:
    """What of a file is not priced, and what can be.

    text: a line for each command and pair; own: arguments as they are written; arguments: those that are recognised.
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
        command = _command(tool["framework"], text, arguments, gpus)
        yield Problem("", f"{tool['subject']} are not read. {FULL_TRAINING}, as options state it: {command}")
    elif found:
        names = ", ".join(name for name, _, key in found if key.field != "switch" or not key.plain)
        full = ", ".join(f"{name} {key.default}" for name, _, key in found if key.field == "switch" and key.plain)
        changes = [f"with {full}"] * bool(full) + [f"without {names}"] * bool(names)
        yield Problem("", f"{FULL_TRAINING}: {' and '.join(changes)} the file is priced as that")


_AXES = {"tp": "x", "pp": "pipeline", "vpp": "chunks", "cp": "context", "ep": "expert", "etp": "expert_tensor"}


def _command(framework: str, text: str, arguments: Arguments, gpus: Stated | None) -> str:
    """The command that predicts the full training of what a file states; capitals stand for what it does not."""
    columns = {name: stated.value for name, stated in columns_of(arguments).items() if isinstance(stated.value, int)}
    found = find_framework(framework)
    size = gpus.value if gpus is not None else columns.get("n_gpus", "N")
    words = [f"--gpus {size}", f"--model {_model(text)}", "--machine NAME"]
    words += [f"--framework {framework}", f"--batch {columns.get('gbs', 'N')}", f"--seq {columns.get('seq', 'N')}"]
    words += [f"--micro-batch {columns['mbs']}"] if "mbs" in columns else []
    axes = {axis: columns[name] for name, axis in _AXES.items() if name in columns}
    words += [
        f"{found.option(axis)} {count}" for axis, count in axes.items() if axis in (*found.expert_columns, "chunks")
    ]
    return " ".join(["axonn-tune explain", *words])


def _model(text: str) -> str:
    """The shipped model that a word of the text names, in full or as a part; `NAME|FILE` without one."""
    plain = [re.sub(r"[._-]", "", word) for word in re.split(r"[^a-z0-9._-]+", text.lower())]
    known = {re.sub(r"[^a-z0-9]", "", name): name for name in sorted(available("model"), key=len)}
    found = [name for key, name in known.items() if len(key) > 5 and any(key in word for word in plain)]
    return found[-1] if found else "NAME|FILE"
