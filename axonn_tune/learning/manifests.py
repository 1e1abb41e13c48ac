"""Manifests of Kubernetes: the commands of their containers as one script, with the pods and GPUs that they ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from axonn_tune.frameworks.keys import Stated
from axonn_tune.specs.document import Node, read_config

_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
_SHELL = re.compile(r"-[a-z]*c")
"""What bash has before the script that it is given."""


def manifest(text: str, path: Path) -> tuple[str, list[tuple[str, Stated]]] | None:
    """The script of its containers, each command at the line where it stands, and the launcher's arguments that follow
    from pods and their GPUs; None for a file that is no manifest, and for one whose containers have no command."""
    if not all(re.search(rf"(?m)^{key}:", text) for key in ("apiVersion", "kind")):
        return None
    own, lines = text.splitlines(), dict[int, str]()

    def begins(line: int) -> bool:
        """Whether a block of text begins after a line."""
        return re.search(r"[|>][-+\d]*\s*$", own[line - 1]) is not None

    asked = list[tuple[Stated | None, list[Stated]]]()
    for document in _documents(text):
        for count, pod in _pods(read_config(document, source=str(path))):
            containers = _items(pod.child("containers"))
            for container in containers:
                lines |= {at + begins(at): script for at, script in _command(container).items()}
            asked.append((count, [one for each in containers for key in _GPUS for one in _numbers(each, key)]))
    if not lines:
        return None
    of_pod = [one for _, gpus in asked for one in gpus]
    # A pod without GPUs beside others with them is no node: that of an MPI job which starts the others.
    pods = [count for count, gpus in asked if count is not None and (gpus or not of_pod)]
    script, at = "", 1
    for line in sorted(lines):
        script += "\n" * max(1, line - at) + lines[line]
        at = max(at + 1, line) + lines[line].count("\n")
    pairs = [("nproc_per_node", of_pod[0])] if of_pod else []
    if pods:
        pairs.append(("nnodes", Stated(str(sum(int(one.value) for one in pods)), pods[0].line)))
    return script, pairs


def _documents(text: str) -> Iterator[str]:
    """Each document of a file that has any, behind as many empty lines as stand before it."""
    at = 0
    for part in re.split(r"(?m)^---.*$", text):
        if re.search(r"(?m)^[^\s#]", part):
            yield "\n" * at + part
        at += part.count("\n")


def _pods(node: Node, count: Stated | None = None) -> Iterator[tuple[Stated | None, Node]]:
    """Specs of pods, each with how many there are of it: replicas of jobs, times the parallelism of each; None where
    neither is stated."""
    keys = node.mapping()
    for key in ("replicas", "parallelism") if {"template", "parallelism"} & keys.keys() else ():
        for one in _numbers(node, key):
            count = one if count is None else replace(count, value=str(int(count.value) * int(one.value)))
    if "containers" in keys:
        yield count, node
    for _, child in node.items():
        yield from _pods(child, count)


def _numbers(node: Node, key: str) -> Iterator[Stated]:
    """Whole numbers from 1 under a key of a mapping, or of its resources' limits."""
    limits = node.nearest(("resources", "limits"))
    for one in (node, limits) if limits is not node else (node,):
        found = one.mapping().get(key)
        if found is not None and re.fullmatch(r"[1-9]\d{0,6}", str(found.value)):
            yield Stated(str(found.value), found.line or 1)


def _command(container: Node) -> dict[int, str]:
    """The command of a container with the values of its environment before it, by its line."""
    words = [one for key in ("command", "args") for one in _items(container.child(key))]
    if not words:
        return {}
    after = next((at for at, one in enumerate(words, 1) if _SHELL.fullmatch(str(one.value))), 0)
    scripts = words[after : after + 1] if after else []
    text = str(scripts[0].value) if scripts else " \\\n".join(str(one.value) for one in words)
    named = [(one.child("name"), one.child("value")) for one in _items(container.child("env"))]
    known = [(name, value) for name, value in named if name is not None and value is not None]
    pairs = [f"{name.value}={value.value}" for name, value in known if re.fullmatch(r"[\w.,:/-]*", str(value.value))]
    return {(scripts or words)[0].line or 1: "".join(f"export {one}; " for one in pairs) + text}


def _items(node: Node | None) -> list[Node]:
    """Items of a list; a text by itself is one."""
    if node is None or node.value is None:
        return []
    return node.value if isinstance(node.value, list) else [node]
