"""Ranks for the tests: one process each, kept from test to test, talking over Gloo.

The processes are forked from a server that has imported torch once and started no thread. A pool that failed, hung or
has served many grids is thrown away: Gloo groups that were left behind slow later ones down.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 240.0
GRACE_S = 2.0
"""How long the other ranks may still answer once one has failed."""
MOST_TASKS = 24
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
PRELOADED = ["pytest", "torch._dynamo", "torch.distributed", "axonn_tune.runtime.optimizer", "tests.runtime.tasks"]


class RankError(Exception):
    """A task failed on some rank, or did not end in time; holds the tracebacks."""


class Pool:
    """`world` ranks that run one task at a time."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.world, self.tasks = world, 0
        self._folder = tempfile.TemporaryDirectory()
        pairs, before = [context.Pipe() for _ in range(world)], dict(os.environ)
        os.environ.update(ONE_THREAD)
        try:
            self._processes = [
                context.Process(target=_serve, args=(rank, world, self._folder.name, there), daemon=True)
                for rank, (_, there) in enumerate(pairs)
            ]
            for process in self._processes:
                process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        self._pipes = [here for here, _ in pairs]
        for _, there in pairs:
            there.close()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(*arguments)` on every rank; the results by rank. RankError, and an end of the pool, otherwise."""
        self.tasks += 1
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(answers) < self.world and (left := deadline - time.monotonic()) > 0:
            missing = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            for pipe in wait(list(missing), left):
                assert isinstance(pipe, Connection)
                try:
                    answers[missing[pipe]] = pipe.recv()
                except EOFError:
                    answers[missing[pipe]] = False, "the process ended"
            if not all(fine for fine, _ in answers.values()):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        failed = [f"rank {rank}: {said}" for rank, (fine, said) in sorted(answers.items()) if not fine]
        silent = sorted(set(range(self.world)) - set(answers))
        if failed or silent:
            self.close(grace_s=0.0)
            raise RankError("\n".join(failed) or f"no answer within {TIMEOUT_S:.0f} s from ranks {silent}")
        return [answers[rank][1] for rank in range(self.world)]

    def close(self, *, grace_s: float = GRACE_S) -> None:
        """Let the ranks end by themselves, then make sure of it."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self._folder.cleanup()
        self.world = 0


class Pools:
    """The pool in use. One world size at a time, so that idle ranks hold no memory."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def __call__(self, world: int) -> Pool:
        """A pool of `world` ranks."""
        if self._pool is not None and (self._pool.world != world or self._pool.tasks >= MOST_TASKS):
            self.close()
        if self._pool is None:
            self._pool = Pool(world)
        return self._pool

    def close(self) -> None:
        """End the pool in use."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None


def _serve(rank: int, world: int, folder: str, pipe: Connection) -> None:
    """A rank's life: join the group, then run tasks until the pipe closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S))
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, function(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
