"""What the check scripts share: requests on standard input, answers on standard output, worlds without processes.

A check script runs in the environment of its framework, where axonn-tune is not installed. A request has a key, the
ranks of its world, the words of the command, environment and config files. `groups` says whose rank groups are wanted:
of one rank, or of all.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, TypeAlias

Groups: TypeAlias = dict[str, list[int]]
Answer: TypeAlias = dict[str, Any]

REASON = 240
"""Characters of a refusal that are kept."""


@dataclass(frozen=True)
class Request:
    """One command to check.

    starter: what starts the program, with its arguments. layers: of the model. capability: compute capability of the
    GPUs, its first number. groups: `one` or `all`.
    """

    key: str
    world: int
    starter: tuple[str, ...]
    program: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    layers: int
    capability: int
    groups: str

    def words(self, folder: Path) -> list[str]:
        """The arguments with the paths of its config files, which lie in a folder."""
        return [self.resolved(word, folder) for word in self.arguments]

    def resolved(self, word: str, folder: Path) -> str:
        """A word with the paths of config files."""
        for suffix in self.files:
            word = word.replace(f"{{file:{suffix}}}", str(folder / f"config{suffix}"))
        return word

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Request:
        """A request of its JSON; what else that holds is not for the check."""
        known = {name: fields[name] for name in cls.__dataclass_fields__}
        return cls(**known | {name: tuple(fields[name]) for name in ("starter", "program", "arguments")})


@dataclass(frozen=True)
class Check:
    """A framework's own code as two functions.

    accept: what the framework makes of a command: sizes by name, raising (or leaving with SystemExit) what it refuses.
    groups: rank groups of one rank, for sizes that `accept` gave.
    """

    package: str
    accept: Callable[[Request, Path], Answer]
    groups: Callable[[Request, Answer, int, Path], Groups]


def main(check: Check) -> None:
    """Answer every request on standard input, in the last line of standard output: frameworks print, too."""
    warnings.simplefilter("ignore")
    sys.argv = [check.package]
    requests = [Request.of(one) for one in json.load(sys.stdin)]
    answers = [_answer(check, one) for one in requests]
    packages = {name: version(name) for name in (check.package, "torch")}
    json.dump({"python": python_version(), "packages": packages, "answers": answers}, sys.stdout)


def _answer(check: Check, request: Request) -> Answer:
    before = dict(os.environ)
    os.environ |= {"WORLD_SIZE": str(request.world), "RANK": "0", "LOCAL_RANK": "0", **request.environment}
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryDirectory() as folder:
        for suffix, text in request.files.items():
            Path(folder, f"config{suffix}").write_text(text, encoding="utf-8")
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                sizes = check.accept(request, Path(folder))
                ranks = range(request.world) if request.groups == "all" else (request.world // 3,)
                groups = [check.groups(request, sizes, rank, Path(folder)) for rank in ranks]
        except (Exception, SystemExit) as refused:
            return {"key": request.key, "accepted": False, "error": _reason(refused, said).replace(f"{folder}/", "")}
        finally:
            os.environ.clear()
            os.environ.update(before)
    return {"key": request.key, "accepted": True, "sizes": sizes, "groups": _by_name(groups)}


def _reason(refused: BaseException, said: Any) -> str:
    """The error in one line; of a program that left, the last error it printed."""
    text = f"{type(refused).__name__}: {refused}"
    if isinstance(refused, SystemExit):
        said.seek(0)
        text = f"exit {refused.code}: {said.read().rpartition('error:')[2]}"
    line = " ".join(word for word in text.split() if set(word) - set("│╭╮╰╯─-"))
    return line if len(line) <= REASON else f"{line[: REASON - 3]}..."


def _by_name(groups: list[Groups]) -> dict[str, list[list[int]]]:
    """Every group of several ranks once, by the name of its axis."""
    found: dict[str, list[list[int]]] = {}
    for one in groups:
        for name, ranks in one.items():
            known = found.setdefault(name, []) if len(ranks) > 1 else [ranks]
            if ranks not in known:
                known.append(ranks)
    return found


@contextlib.contextmanager
def fake_world(world: int, *, rank: int = 0) -> Iterator[None]:
    """torch.distributed as one rank of a world sees it; its collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
