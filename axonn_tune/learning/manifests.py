"""Manifests of Kubernetes: the commands of their containers as one script, with the pods and GPUs that they ask for."""

from __future__ import annotations

import re
from collections.abc import Iterator
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

    pods, of_pod = list[Stated](), list[Stated]()
    for document in _documents(text):
        for node in _mappings(read_config(document, source=str(path))):
            for container in _containers(node):
                lines |= {at + begins(at): script for at, script in _command(container).items()}
                of_pod += [one for key in _GPUS for one in _numbers(container, key)]
            found = [*_numbers(node, "replicas"), *_numbers(node, "parallelism")]
            pods += found if "template" in node.mapping() or "parallelism" in node.mapping() else []
    if not lines:
        return None
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


def _mappings(node: Node) -> Iterator[Node]:
    """All mappings of a document."""
    if isinstance(node.value, dict):
        yield node
    for _, child in node.items():
        yield from _mappings(child)


def _containers(node: Node) -> Iterator[Node]:
    found = node.child("containers")
    yield from (one for _, one in found.items()) if found is not None else ()


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
