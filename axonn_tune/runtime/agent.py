"""Starts all ranks of a launch config on this host with torchrun: `python -m axonn_tune.runtime.agent launch.yaml`.

torchrun ends every failure with exit code 1 and a page of text; here the ranks' own exit codes and messages count. A
lab uses `exit_code_of` too, so only `main` imports torch.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from axonn_tune.errors import TrainingFailedError
from axonn_tune.processes import AGENT
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document


def exit_code_of(ended: Sequence[tuple[int, int]]) -> int:
    """That of a failed training if any rank has it, else the first that is not 0. ended: (rank, code) by time.

    A negative code is the signal that ended a rank.
    """
    said = [code for _, code in ended if code > 0]
    failed = TrainingFailedError.exit_code
    return failed if failed in said or lost_ranks(ended) else next(iter(said), 0)


def lost_ranks(ended: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(rank, signal) of ranks that a signal ended, lowest first, if no rank could report why the run ended."""
    if any(code > 0 for _, code in ended):
        return []
    return sorted((rank, -code) for rank, code in ended if code < 0)


def report_lost_ranks(ended: Sequence[tuple[int, int]]) -> None:
    """Report on standard error the ranks that could not do so themselves."""
    ranks = [f"rank {rank}: ended by {_signal_name(number)}" for rank, number in lost_ranks(ended)]
    if ranks:
        print(f"Error: {'; '.join(ranks)}", file=sys.stderr)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_INTERRUPTED = 130
_TORCHRUNS_SIGNALS = "SIGINT,SIGHUP,SIGQUIT"


def main(arguments: list[str]) -> int:
    """Run `axonn_tune.runtime` with these arguments on every rank; one exit code for all."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    launch = load_document(arguments[0], schema=Launch)
    # The ranks report their errors themselves.
    logging.disable(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ[AGENT] = str(os.getpid())
    for one in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(one, _pass_on)
    world = ["--standalone", "--local-addr", "localhost", "--nproc-per-node", str(launch.grid.world)]
    try:
        torchrun([*world, *_leave_signals(), "-m", "axonn_tune.runtime", *arguments])
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        ended = [(rank, failure.exitcode) for rank, failure in failures]
        report_lost_ranks(ended)
        return exit_code_of(ended)
    except (SignalException, KeyboardInterrupt):
        return _INTERRUPTED
    return 0


def _leave_signals() -> list[str]:
    """SIGTERM and SIGUSR2 are passed on, for the ranks to save; torchrun would kill them after 30 s."""
    from torch.distributed.run import get_args_parser

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
