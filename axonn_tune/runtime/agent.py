"""Starts all ranks of a launch config on this host with torchrun, and ends as they do.

torchrun itself answers every failure with exit code 1 and a page of text; here the ranks' own codes and
words count.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import get_args_parser
from torch.distributed.run import main as torchrun

from axonn_tune.runtime.ends import exit_code_of, say_if_lost
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document

_INTERRUPTED = 130
_TORCHRUNS_SIGNALS = "SIGINT,SIGHUP,SIGQUIT"


def main(arguments: list[str]) -> int:
    """Run `axonn_tune.runtime` with these arguments on every rank; the exit code that tells most."""
    launch = load_document(arguments[0], schema=Launch)
    # What the ranks say is enough.
    logging.disable(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for one in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(one, _pass_on)
    world = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", str(launch.grid.world)]
    try:
        torchrun([*world, *_leave_signals(), "-m", "axonn_tune.runtime", *arguments])
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        ended = [(rank, failure.exitcode) for rank, failure in failures]
        say_if_lost(ended)
        return exit_code_of(ended)
    except (SignalException, KeyboardInterrupt):
        return _INTERRUPTED
    return 0


def _leave_signals() -> list[str]:
    """SIGTERM and SIGUSR2 are passed on, for the ranks to save; torchrun would kill them after 30 s."""
    # Newer versions have an option and overwrite the variable, older ones have the variable alone.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = _TORCHRUNS_SIGNALS
    known = vars(get_args_parser().parse_args(["script"]))
    return ["--signals-to-handle", _TORCHRUNS_SIGNALS] if "signals_to_handle" in known else []


def _pass_on(number: int, frame: FrameType | None) -> None:
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            os.kill(int(child), signal.SIGUSR2)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
