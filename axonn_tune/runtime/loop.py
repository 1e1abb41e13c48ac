"""The training loop: steps, metrics, checkpoints, and stopping on a signal at a step all ranks agree on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from axonn_tune.runtime.checkpoint import Checkpointer
from axonn_tune.runtime.garbage import collect_after, garbage_between_steps
from axonn_tune.runtime.metrics import WARMUP_STEPS, Metrics
from axonn_tune.runtime.trace import Tracer
from axonn_tune.runtime.trainer import Trainer
from axonn_tune.runtime.watch import Watch

START_TIMEOUT_S = 600.0
"""For connecting, and for the first step, which allocates and compiles."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


@dataclass
class StepLimit:
    """What a step may take before it counts as hung: one collective more than twice the longest so far.

    The first step, which may compile for minutes, counts for nothing but the limit of the second.
    """

    hang_timeout_s: float
    _ended: int = 0
    _longest_s: float = 0.0

    def next_s(self) -> float:
        """Of the step that is about to begin."""
        return self.hang_timeout_s + 2.0 * self._longest_s if self._ended else START_TIMEOUT_S

    def note(self, step_s: float) -> None:
        """A step has ended."""
        self._longest_s = max(self._longest_s, step_s) if self._ended > 1 else step_s
        self._ended += 1


@dataclass
class Loop:
    """Runs a trainer up to a number of steps. `watch` is None for a rank alone."""

    trainer: Trainer
    metrics: Metrics
    watch: Watch | None
    checkpointer: Checkpointer | None
    every_steps: int
    after_first: Callable[[], None]
    tracer: Tracer | None = None
    _signalled: bool = False
    _stop_after: int | None = None

    def __post_init__(self) -> None:
        self._limit = StepLimit(self.trainer.launch.hang_timeout_s)

    def run(self, steps: int) -> bool:
        """Train until `steps` are done; False if a signal ended it before, with the state saved if it can be."""
        before = done = self.trainer.optimizer.steps_done
        self._note_signals()
        with garbage_between_steps():
            while done < steps:
                done = self._step(done, number=done - before)
                if done - before == 1:
                    self.after_first()
                collect_after(done - before)
                stopping = self._stops(done)
                if self.checkpointer is not None and (stopping or done % self.every_steps == 0 or done == steps):
                    self.checkpointer.save()
                if stopping:
                    break
        if self.checkpointer is not None:
            self.checkpointer.close()
        return done >= steps

    def _step(self, done: int, *, number: int) -> int:
        """One step, timed and recorded: the `number`th of this run, from 0. Returns how many are done."""
        timer, timed = self.trainer.model.communicator.timer, number - WARMUP_STEPS
        if self.tracer is not None:
            self.tracer.before_step(timed)
        if self.watch is not None:
            self.watch.begin_step(self._limit.next_s())
        timer.begin_step(timed)
        began_s = time.perf_counter()
        result = self.trainer.step(done, before_end=self._agree)
        timer.part("")
        self.trainer.synchronize()
        step_s = time.perf_counter() - began_s
        self._limit.note(step_s)
        if self.watch is not None:
            self.watch.end_step()
        times = timer.end_step()
        self.metrics.step(done + 1, result, step_s=step_s, times=times)
        if self.tracer is not None:
            self.tracer.after_step(timed, done + 1, times)
        return done + 1

    def _agree(self, step: int) -> None:
        """Pass on a signal; rank 0 has all stop after this step, which none can end before rank 0 goes on."""
        watch = self.watch
        if watch is None:
            if self._signalled:
                self._stop_after = step
            return
        if self._signalled and not watch.asked_to_stop:
            watch.ask_to_stop()
        if watch.rank == 0 and watch.asked_to_stop and watch.stop_after is None:
            watch.agree_to_stop(step)

    def _stops(self, done: int) -> bool:
        stop_after = self._stop_after if self.watch is None else self.watch.stop_after
        return stop_after is not None and done > stop_after

    def _note_signals(self) -> None:
        """Note SIGTERM and SIGUSR2 instead of dying of them; to the end, for whoever saves last."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signalled = True

        for one in STOP_SIGNALS:
            signal.signal(one, note)
