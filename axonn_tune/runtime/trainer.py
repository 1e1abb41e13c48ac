"""Training on one rank: the step, and the loop with metrics, checkpoints and a stop that all ranks agree on.

The micro-batches of a step go through the rank's pipeline stage in the order of 1F1B, plain or interleaved, or in one
that splits the backward pass: then weight gradients of linear layers and experts wait, those of embedding and LM head
do not. A rank without pipeline stages is the only one of its pipeline: each forward pass is followed by its backward
pass.

Sends overlap with computation and delay only the receiver. The receive of the next message of each kind is posted as
soon as the one before has arrived, so that it overlaps too. A stage that is two messages ahead of its neighbour waits
until the first is received, which bounds their memory and cannot deadlock in these orders.

Python's garbage collector is off during training: it would run on each rank at another time, while all others wait in
their next collective. It runs between two steps, on all ranks after the same ones.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

import torch

from axonn_tune.errors import EnvironmentProblem, UsageError
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.program.count import adapted
from axonn_tune.program.feasibility import broken_constraints
from axonn_tune.program.pipeline import Kind, model_parts
from axonn_tune.program.schedules import schedule_orders
from axonn_tune.runtime.checkpoint import Checkpointer
from axonn_tune.runtime.communicator import CollectiveHandle, Communicator, WaitingGradients
from axonn_tune.runtime.devices import DTYPES, RuntimeSettings, forget_peak, settings_of, synchronize, to_device
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.metrics import WARMUP_STEPS, Metrics
from axonn_tune.runtime.optimizer import ShardedOptimizer, StepResult
from axonn_tune.runtime.tokens import Batches, batch_shard
from axonn_tune.runtime.transformer import ChunkContext, MicroBatch, Transformer
from axonn_tune.runtime.watch import Watch
from axonn_tune.specs.launch import Launch
from axonn_tune.vocabulary import PipelineOrder


def require_runnable(launch: Launch) -> None:
    """UsageError with everything in a launch config that this runtime cannot execute; EnvironmentProblem without
    TensorBoard, if it is asked for."""
    if launch.metrics.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise EnvironmentProblem(
            "metrics.tensorboard needs TensorBoard, which is not installed: pip install '.[tensorboard]' in the "
            "checkout, or take it out of the launch config"
        )
    workload, model, grid = launch.workload, launch.model, launch.grid.grid()
    found = []
    if workload.split_micro_batch and launch.micro_batch % 2:
        found.append(f"workload.split_micro_batch: micro_batch ({launch.micro_batch}) is not divisible by 2")
    if workload.precision not in DTYPES:
        found.append(
            f"workload.precision: {workload.precision} needs loss scaling, which this runtime does not have; "
            f"{', '.join(DTYPES)} run"
        )
    if model.learned_positions and workload.sequence_length > model.max_sequence_length:
        found.append(
            f"workload.sequence_length ({workload.sequence_length}) is more than "
            f"model.max_sequence_length ({model.max_sequence_length})"
        )
    if launch.checkpoint.base is not None and workload.tuning is None:
        found.append("checkpoint.base: is for workload.tuning, without which all weights train")
    if workload.tuning is not None and not adapted(model):
        found.append(f"workload.tuning.targets: {model.name} has no linear layer of these names")
    framework = AXONN_TUNE.training(model).having(*launch.grid.sizes)
    broken = broken_constraints(grid, model, workload, framework, micro_batch=launch.micro_batch)
    found += [f"grid: {line}" for line in broken]
    if found:
        raise UsageError("this launch config cannot run:\n" + "\n".join(f"  {line}" for line in found))


@dataclass
class Inbox:
    """Messages of one kind to this stage; `make_buffer`: an empty `[M, H_y]`; `left`: those not yet asked for."""

    communicator: Communicator
    kind: Kind
    make_buffer: Callable[[], torch.Tensor]
    left: int
    _next: CollectiveHandle | None = None

    def __post_init__(self) -> None:
        self._ask()

    def take(self) -> torch.Tensor:
        """The next message."""
        assert self._next is not None, "asked for as often as expected"
        message = self._next.wait()
        self._ask()
        return message

    def _ask(self) -> None:
        self._next = self.communicator.receive(self.make_buffer(), self.kind) if self.left else None
        self.left -= 1


MOST_SENT = 2
"""Messages of one kind in flight at once."""


@dataclass
class Outbox:
    """Messages from this stage."""

    communicator: Communicator
    _sent: dict[Kind, deque[CollectiveHandle]] = field(default_factory=dict)

    def send(self, message: torch.Tensor, kind: Kind) -> None:
        """Send; what earlier ones have held goes when they have been received."""
        sent = self._sent.setdefault(kind, deque())
        sent.append(self.communicator.send(message, kind))
        while sent and (sent[0].done or len(sent) > MOST_SENT):
            sent.popleft().wait()

    def finish(self) -> None:
        """Wait until all have been received."""
        for sent in self._sent.values():
            while sent:
                sent.popleft().wait()


@dataclass
class PipelineStage:
    """Runs steps of a model; micro_batch: sequences of one; scale: of the loss; order: of its passes."""

    model: Transformer
    micro_batch: int
    scale: float
    order: PipelineOrder = "1f1b"

    def gradients(self, batch: Callable[[int], MicroBatch], *, count: int) -> torch.Tensor:
        """Forward and backward of all micro-batches of a step, with complete gradients; this rank's loss.

        batch: a micro-batch by its number.
        """
        model, mesh = self.model, self.model.communicator.mesh
        stages, chunks = mesh.grid.pipeline, len(model.chunks)
        order = schedule_orders(self.order, stages=stages, chunks=chunks, micro_batches=count)[mesh.stage]
        expected = Counter(_message(kind) for kind, chunk, _ in order if self._receives(kind, chunk))
        tokens, settings = self.micro_batch * len(model.places), model.settings
        shape = tokens, model.model.hidden // mesh.size("y")
        buffer = partial(torch.empty, shape, dtype=settings.compute, device=settings.device)
        inboxes = {kind: Inbox(model.communicator, kind, buffer, left) for kind, left in expected.items()}
        outbox = Outbox(model.communicator)
        loss = torch.zeros((), dtype=torch.float64, device=model.settings.device)
        contexts: dict[tuple[int, int], ChunkContext] = {}
        waiting: dict[tuple[int, int], WaitingGradients] = {}
        for kind, chunk, number in order:
            last = number == count - 1
            if kind == "W":
                model.weight_gradients(waiting.pop((chunk, number)), last=last)
                continue
            received = inboxes[_message(kind)].take() if self._receives(kind, chunk) else None
            if kind == "F":
                result, contexts[chunk, number] = model.forward(
                    chunk, batch(number), received, scale=self.scale, last=last
                )
                if model.ends(chunk):
                    loss += result
                else:
                    outbox.send(result, kind)
                del result
            else:
                gradients = None
                if kind == "I":
                    gradients = waiting[chunk, number] = WaitingGradients(model.communicator, settings)
                context = contexts.pop((chunk, number))
                gradient = model.backward(chunk, context, received, last=last, gradients=gradients)
                del context
                if gradient is not None:
                    outbox.send(gradient, "B")
                del gradient
            del received
        outbox.finish()
        model.finish_gradients()
        return loss

    def _receives(self, kind: Kind, chunk: int) -> bool:
        """Whether an operation needs a message."""
        return kind != "W" and not (self.model.begins(chunk) if kind == "F" else self.model.ends(chunk))


def _message(kind: Kind) -> Kind:
    """What an operation sends and receives: activations or gradients."""
    return "F" if kind == "F" else "B"


class Trainer:
    """One rank's model, optimizer and data; settings: those of the launch config unless given."""

    def __init__(
        self,
        launch: Launch,
        mesh: Mesh,
        *,
        device: torch.device,
        source: Batches,
        settings: RuntimeSettings | None = None,
    ) -> None:
        self.launch, self.mesh, self.device, self.source = launch, mesh, device, source
        self.ledger = Ledger()
        communicator = Communicator(mesh, self.ledger)
        sequence = launch.workload.sequence_length
        settings = settings or settings_of(launch, device)
        stages, chunks = mesh.grid.pipeline, launch.chunks
        parts = model_parts(launch.model.layers, stages=stages, chunks=chunks, given=launch.parts)
        self.model = Transformer(launch.model, communicator, settings, sequence=sequence, seed=launch.seed, parts=parts)
        self.optimizer = ShardedOptimizer(self.model.store, communicator, launch.optimizer, compute=settings.compute)
        self._share = batch_shard(launch, mesh)
        scale = 1.0 / (launch.workload.global_batch * sequence)
        self._stage = PipelineStage(self.model, launch.micro_batch, scale, launch.pipeline_order)

    def gradients(self, step: int) -> torch.Tensor:
        """Forward and backward of all micro-batches of a step, counted from 0; this rank's loss."""
        return self._stage.gradients(partial(self._micro_batch, step), count=self.launch.grad_accumulation)

    def _micro_batch(self, step: int, number: int) -> MicroBatch:
        tokens, targets = (to_device(part, self.device) for part in self.source(step, number))
        if not self.launch.dropout:
            return MicroBatch(tokens, targets)
        sequences = torch.from_numpy(self._share.sequences(step, number))
        return MicroBatch(tokens, targets, to_device(sequences, self.device))

    def step(self, step: int, *, before_end: Callable[[int], None] = lambda step: None) -> StepResult:
        """One optimizer step; `before_end` runs before the collective that every rank needs to end it."""
        loss = self.gradients(step)
        before_end(step)
        return self.optimizer.step(loss)


COLLECT_EVERY_STEPS = 50
"""How often Python's garbage is collected."""


@contextlib.contextmanager
def garbage_between_steps() -> Iterator[None]:
    """Switch the garbage collector off; on again at the end, if it was on."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if before:
            gc.enable()


def collect_after(steps: int) -> None:
    """Collect garbage, if it is due, after so many steps of this run.

    After the first step the surviving objects are frozen: model, optimizer and modules need no further passes.
    """
    if steps == 1:
        gc.collect()
        gc.freeze()
    elif steps % COLLECT_EVERY_STEPS == 0:
        gc.collect()


START_TIMEOUT_S = 600.0
"""For connecting, and for the first step, which allocates and compiles."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR2)


@dataclass
class StepLimit:
    """How long a step may take before it counts as hung: `hang_timeout_s` plus twice the longest so far.

    The first step, which may compile for minutes, counts only for the limit of the second.
    """

    hang_timeout_s: float
    _ended: int = 0
    _longest_s: float = 0.0

    def next_s(self) -> float:
        """Limit of the step that is about to begin."""
        return self.hang_timeout_s + 2.0 * self._longest_s if self._ended else START_TIMEOUT_S

    def note(self, step_s: float) -> None:
        """A step has ended."""
        self._longest_s = max(self._longest_s, step_s) if self._ended > 1 else step_s
        self._ended += 1


@dataclass
class TrainingLoop:
    """Runs a trainer up to a number of steps. `watch` is None for a rank alone."""

    trainer: Trainer
    metrics: Metrics
    watch: Watch | None
    checkpointer: Checkpointer | None
    after_first: Callable[[], None]
    _signalled: bool = False
    _stop_after: int | None = None

    def __post_init__(self) -> None:
        self._limit = StepLimit(self.trainer.launch.hang_timeout_s)

    def run(self, steps: int) -> bool:
        """Train until `steps` are done; False if a signal ended it earlier, with the state saved if possible."""
        before = done = self.trainer.optimizer.steps_done
        every_steps = self.trainer.launch.checkpoint.every_steps
        for one in STOP_SIGNALS:
            # Until the process ends, as another rank may save last.
            signal.signal(one, self._note_signal)
        with garbage_between_steps():
            while done < steps:
                done = self._step(done, number=done - before)
                if done - before == 1:
                    self.after_first()
                collect_after(done - before)
                stop_after = self._stop_after if self.watch is None else self.watch.stop_after
                stopping = stop_after is not None and done > stop_after
                if self.checkpointer is not None and (stopping or done % every_steps == 0 or done == steps):
                    self.checkpointer.save()
                if stopping:
                    break
        if self.checkpointer is not None:
            self.checkpointer.close()
        return done >= steps

    def _step(self, done: int, *, number: int) -> int:
        """One step, timed and recorded: the `number`th of this run, from 0. Returns how many are done."""
        timer, timed = self.trainer.model.communicator.timer, number - WARMUP_STEPS
        self.metrics.begin_step()
        if self.watch is not None:
            self.watch.begin_step(self._limit.next_s())
        timer.begin_step(timed)
        began_s = time.perf_counter()
        result = self.trainer.step(done, before_end=self._agree)
        timer.part("")
        synchronize(self.trainer.device)
        step_s = time.perf_counter() - began_s
        self._limit.note(step_s)
        if timed == -1:
            forget_peak(self.trainer.device)
        if self.watch is not None:
            self.watch.end_step()
        self.metrics.step(done + 1, result, step_s=step_s, times=timer.end_step())
        return done + 1

    def _agree(self, step: int) -> None:
        """Have all ranks stop after this step if one of them got a signal."""
        if self.watch is not None:
            self.watch.agree_to_stop(step, signalled=self._signalled)
        elif self._signalled:
            self._stop_after = step

    def _note_signal(self, number: int, frame: FrameType | None) -> None:
        """Note SIGTERM or SIGUSR2 instead of ending."""
        self._signalled = True
