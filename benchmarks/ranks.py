"""Ranks of a benchmark: processes forked from this one, which has imported torch, talking over Gloo on loopback.

Each contender has ranks of its own, which sleep in a pipe while another is measured: no process groups,
threads or caches of one contender are in another's processes.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

ANSWER_S = 300.0
PARENT_CHECK_S = 5.0


class Steps(Protocol):
    """One rank of a contender, ready to train."""

    def step(self, step: int) -> float:
        """Do one optimizer step; this rank's part of the loss, all parts' mean being the loss."""


@dataclass(frozen=True)
class Step:
    """One step of one rank, s: by the clock, the Python thread's CPU time, and that of all other threads (Gloo's)."""

    wall_s: float
    thread_s: float
    others_s: float
    loss: float


class RanksError(Exception):
    """A rank failed; holds its traceback."""


class Ranks:
    """The ranks of one contender. `build` runs on each, inside the process group."""

    def __init__(self, world: int, build: Callable[[], Steps], folder: Path) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, build, folder / "store", there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self._answers()

    def run(self, steps: int) -> list[Step]:
        """Do some steps; of each the longest wall time of all ranks, and means of everything else."""
        for pipe in self._pipes:
            pipe.send(steps)
        return [_together(parts) for parts in zip(*self._answers(), strict=True)]

    def close(self) -> None:
        """Let the ranks go."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()

    def _answers(self) -> list[list[Step]]:
        found = []
        for rank, pipe in enumerate(self._pipes):
            answer = pipe.recv() if pipe.poll(ANSWER_S) else f"no answer in {ANSWER_S:.0f} s"
            if isinstance(answer, str):
                self.close()
                raise RanksError(f"rank {rank}: {answer}")
            found.append(answer)
        return found


def _together(parts: Sequence[Step]) -> Step:
    return Step(
        wall_s=max(part.wall_s for part in parts),
        thread_s=statistics.mean(part.thread_s for part in parts),
        others_s=statistics.mean(part.others_s for part in parts),
        loss=statistics.mean(part.loss for part in parts),
    )


def _serve(rank: int, world: int, build: Callable[[], Steps], store: Path, pipe: Connection) -> None:
    """A rank's life: join the group, build, then train on request for as long as its parent lives."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    parent = os.getppid()
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        contender, done = build(), 0
        pipe.send([])
        while True:
            count = _request(pipe, parent)
            dist.barrier()
            pipe.send([_timed(contender, done + number) for number in range(count)])
            done += count
    except Exception:
        pipe.send(traceback.format_exc())
    os._exit(1)


def _request(pipe: Connection, parent: int) -> int:
    """How many steps to do next. A dead parent closes no pipe, whose other end later ranks have inherited."""
    while not pipe.poll(PARENT_CHECK_S):
        if os.getppid() != parent:
            os._exit(1)
    count: int = pipe.recv()
    return count


def _timed(contender: Steps, number: int) -> Step:
    wall_s, thread_s, process_s = time.perf_counter(), time.thread_time(), time.process_time()
    loss = contender.step(number)
    thread_s = time.thread_time() - thread_s
    others_s = time.process_time() - process_s - thread_s
    return Step(time.perf_counter() - wall_s, thread_s, others_s, loss)
