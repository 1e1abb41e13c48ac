"""A lab from Python::

    with Lab(Shape(nodes=4, ranks_per_node=2, uplink_bits_per_s=200e6, port_bits_per_s=800e6)) as lab:
        values = lab.ranks.call("mypackage.mymodule:function", [(rank,) for rank in range(8)])

The lab ends with the `with`, and with the thread that began it, however that ends: begin it in the main
thread. `Lab.attached` uses one that `axonn-tune lab up` has started, and leaves it up.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from types import TracebackType

from axonn_tune.errors import AxonnTuneError, EnvironmentProblem, UsageError
from axonn_tune.lab.control import end, find, missing, require_name
from axonn_tune.lab.ranks import Ranks
from axonn_tune.lab.shape import Shape

_numbers = itertools.count(1)


def start(name: str, shape: Shape, *, keep: bool) -> subprocess.Popen[str]:
    """Bring up a lab; the process that holds it. keep: it outlives this process.

    UsageError if one of this name is up; EnvironmentProblem without the rights or tools.
    """
    wanted = {"name": require_name(name), "shape": shape.as_dict(), "keep": keep, "parent": os.getpid()}
    command = [sys.executable, "-m", "axonn_tune.lab.holder", json.dumps(wanted)]
    # A session of its own: Ctrl-C is for what runs in the lab.
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None, "asked for above"
    with process.stdout as stream:
        line = stream.readline()
    if not line:
        raise EnvironmentProblem(f"the lab did not come up: its process ended with {process.wait()}")
    said = json.loads(line)
    if "error" in said:
        process.wait()
        kinds: dict[str, type[AxonnTuneError]] = {"UsageError": UsageError, "EnvironmentProblem": EnvironmentProblem}
        raise kinds[said["error"]](said["message"])
    return process


class Lab:
    """An emulated cluster that is up for as long as its `with`."""

    def __init__(self, shape: Shape, *, name: str | None = None) -> None:
        self.shape = shape
        self.name = f"py-{os.getpid()}-{next(_numbers)}" if name is None else name
        self._holder: subprocess.Popen[str] | None = None
        self._attached = False
        self._ranks: Ranks | None = None

    @classmethod
    def attached(cls, name: str) -> Lab:
        """A lab that is up already; UsageError if none of this name is."""
        status = find(name)
        if status is None:
            raise UsageError(missing(name))
        lab = cls(status.shape, name=name)
        lab._attached = True
        return lab

    def __enter__(self) -> Lab:
        if not self._attached:
            self._holder = start(self.name, self.shape, keep=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        if self._holder is not None:
            status = find(self.name)
            if status is not None:
                end(status)
            self._holder.wait()
            self._holder = None

    @property
    def ranks(self) -> Ranks:
        """What runs functions and commands on the ranks; started when first asked for."""
        if self._ranks is None:
            self._ranks = Ranks(self.name, self.shape)
        return self._ranks
