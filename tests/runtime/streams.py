"""A step on simulated CUDA streams: what may run at the same time, and the accesses that nothing orders.

Every operator is a kernel on the stream that is current, every collective one on its process group's stream. Vector
clocks say which kernels have ended before another begins: a stream runs in order, a collective starts after what its
issuing stream was given so far, and `Work.wait` makes the waiting stream wait for its end. Two accesses to one storage,
at least one of them a write, must be ordered; and memory that Python frees goes back to the compute stream at once, so
everything that used it must have ended before what that stream is given next.

Nothing is sent: results are zeros. Several ranks run one after the other; of them the order of issues counts.
"""

from __future__ import annotations

import graphlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axonn_tune.grid import Grid
from axonn_tune.program.pipeline import model_parts
from axonn_tune.runtime import communicator as communication
from axonn_tune.runtime.clocks import HostClock, Timer
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.optimizer import ShardedOptimizer
from axonn_tune.runtime.trainer import PipelineStage
from axonn_tune.runtime.transformer import MicroBatch, Transformer
from axonn_tune.specs.launch import Optimizer
from axonn_tune.specs.model import Model

COMPUTE = "compute"
Moment = tuple[str, int]
"""A kernel: its stream, and which one there."""
Place = tuple[str, int]
"""A collective as its group sees it: the group, and the how many-th there."""


@dataclass(frozen=True)
class Event:
    """A collective is issued, and does `what`; or the compute stream begins to wait for it."""

    place: Place
    what: str | None = None


@dataclass
class Access:
    """The last write of a storage, and the last read since on each stream."""

    write: Moment | None = None
    reads: dict[str, int] = field(default_factory=dict)


@dataclass
class Streams:
    """Streams of one rank; hazards: unordered accesses in words, counted; events: its collectives, in order."""

    current: str = COMPUTE
    kernels: int = 0
    hazards: Counter[str] = field(default_factory=Counter)
    events: list[Event] = field(default_factory=list)
    _clocks: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    _accesses: dict[int, Access] = field(default_factory=dict)

    def kernel(self, stream: str, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """A kernel is given to a stream."""
        self.kernels += 1
        self._clocks[stream][stream] += 1
        moment = (stream, self._clocks[stream][stream])
        read, written = ([self._access(one) for one in some] for some in (reads, writes))
        for access in read:
            self._require(access.write, stream, f"{name} reads what is being written")
        for access in written:
            self._require(access.write, stream, f"{name} writes what is being written")
            for reader in access.reads.items():
                self._require(reader, stream, f"{name} writes what is being read")
        for access in read:
            access.reads[stream] = moment[1]
        for access in written:
            access.write, access.reads = moment, {}

    def clock(self, stream: str) -> Counter[str]:
        """How far each stream has come for sure once this one has come where it is."""
        return Counter(self._clocks[stream])

    def wait(self, stream: str, clock: Counter[str]) -> None:
        """A stream waits until the others have come so far."""
        self._clocks[stream] |= clock

    def _require(self, before: Moment | None, stream: str, hazard: str) -> None:
        if before is not None and before[0] != stream and self._clocks[stream][before[0]] < before[1]:
            self.hazards[f"{hazard} on {before[0].split()[0]}"] += 1

    def _access(self, tensor: torch.Tensor) -> Access:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._accesses:
            self._accesses[key] = Access()
            weakref.finalize(storage, self._freed, key)
        return self._accesses[key]

    def _freed(self, key: int) -> None:
        access = self._accesses.pop(key)
        for used in [*([access.write] if access.write else []), *access.reads.items()]:
            self._require(used, COMPUTE, "memory is freed while it is used")


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives each operator to the current stream: its schema says what it reads and writes. Views are no kernels."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.streams = streams

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        schema, given = function._schema, {**(kwargs or {})}
        if any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns):
            return made
        given |= dict(zip((one.name for one in schema.arguments), args, strict=False))
        changed = {one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write}
        reads = [one for name, value in given.items() if name not in changed for one in tensors(value)]
        writes = [one for name in changed & given.keys() for one in tensors(given[name])]
        if not changed and "empty" not in schema.name:
            writes = tensors(made)
        self.streams.kernel(self.streams.current, schema.name, reads, writes)
        return made


def tensors(value: Any) -> list[torch.Tensor]:
    """All tensors of a value."""
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


class Work:
    """A collective in flight. As NCCL's does, it holds its tensors until anybody waits for it."""

    def __init__(self, streams: Streams, stream: str, place: Place, held: list[torch.Tensor]) -> None:
        self._streams, self._end, self._held, self._place = streams, streams.clock(stream), held, place

    def wait(self) -> None:
        if self._streams.current == COMPUTE:
            self._streams.events.append(Event(self._place))
        self._streams.wait(self._streams.current, self._end)
        self._held = []

    def is_completed(self) -> bool:
        return False


@dataclass
class FakeNccl:
    """What the communicator calls instead of torch.distributed."""

    streams: Streams
    _counts: Counter[str] = field(default_factory=Counter)

    def all_reduce(self, tensor: torch.Tensor, *, group: Any, **rest: Any) -> Work:
        return self._issue("all_reduce", [tensor], [tensor], group)

    def all_gather_single(self, result: torch.Tensor, shard: torch.Tensor, *, group: Any, **rest: Any) -> Work:
        return self._issue("all_gather", [shard], [result], group)

    def reduce_scatter_single(self, result: torch.Tensor, tensor: torch.Tensor, *, group: Any, **rest: Any) -> Work:
        return self._issue("reduce_scatter", [tensor], [result], group)

    def all_to_all_single(
        self, result: torch.Tensor, tensor: torch.Tensor, *sizes: Any, group: Any, **rest: Any
    ) -> Work:
        return self._issue("all_to_all", [tensor], [result], group)

    def broadcast(self, tensor: torch.Tensor, src: int, *, group: Any, **rest: Any) -> Work:
        sends = dist.get_rank() == src
        return self._issue(f"broadcast from {src}", [tensor] * sends, [tensor] * (not sends), group)

    def _issue(self, name: str, reads: list[torch.Tensor], writes: list[torch.Tensor], group: Any) -> Work:
        streams, first = self.streams, (reads or writes)[0]
        place = (group.group_name, self._counts[group.group_name])
        self._counts[group.group_name] += 1
        streams.events.append(Event(place, f"{name} of {first.numel()} {first.dtype}"))
        for result in writes if name != "all_reduce" else ():
            # No operator, so no kernel: the write is the collective's.
            result.untyped_storage().copy_(torch.UntypedStorage(result.untyped_storage().nbytes()).fill_(0))
        stream = f"nccl {group.group_name}"
        streams.wait(stream, streams.clock(streams.current))
        streams.kernel(stream, name.split()[0], reads, writes)
        return Work(streams, stream, place, [*reads, *writes])

    def namespace(self) -> SimpleNamespace:
        names = "all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast"
        calls = {name: getattr(self, name) for name in names}
        return SimpleNamespace(**calls, ReduceOp=dist.ReduceOp, get_backend=lambda group: "nccl")


@dataclass
class ObserverClock(HostClock):
    """The clock of timed steps on a GPU: a stream for each group waits for its collectives' ends."""

    streams: Streams
    shared = False

    def mark(self) -> float:
        return 0.0

    def mark_end(self, work: Any, group: dist.ProcessGroup, note: Callable[[float], None]) -> None:
        before, self.streams.current = self.streams.current, f"observer {id(group)}"
        work.wait()
        self.streams.current = before
        note(0.0)

    def between_s(self, start: float, end: float) -> float:
        return end - start


@dataclass(frozen=True)
class Run:
    """Options of a simulated run; chunks: of each pipeline stage."""

    model: Model
    settings: RuntimeSettings
    micro_batches: int
    timed: bool
    chunks: int = 1


SEQUENCE = 8


def run(grid: Grid, rank: int, options: Run, *, steps: int = 2) -> Streams:
    """Some steps of one rank of a world that does not exist, two: buffers of the first are used again in the second."""
    dist.init_process_group("fake", rank=rank, world_size=grid.world)
    real, streams = communication.dist, Streams()
    try:
        communication.dist = FakeNccl(streams).namespace()  # type: ignore[assignment]
        with Kernels(streams):
            timer = Timer(ObserverClock(streams) if options.timed else None)
            communicator = Communicator(build_mesh(grid, chunks=options.chunks), Ledger(), timer)
            parts = model_parts(options.model.layers, stages=grid.pipeline, chunks=options.chunks)
            model = Transformer(options.model, communicator, options.settings, sequence=SEQUENCE, seed=0, parts=parts)
            optimizer = ShardedOptimizer(model.store, communicator, Optimizer())
            tokens = torch.zeros(options.settings.parts, SEQUENCE, dtype=torch.int64)
            stage = PipelineStage(model, options.settings.parts, 0.01)
            for step in range(steps):
                timer.begin_step(step)
                optimizer.step(stage.gradients(lambda number: MicroBatch(tokens, tokens), count=options.micro_batches))
                timer.end_step()
            return streams
    finally:
        communication.dist = real
        dist.destroy_process_group()


def disorder(ranks: dict[int, list[Event]], *, by_issue: bool) -> list[str]:
    """Where ranks issue collectives in orders that do not fit: NCCL would hang, or mix up the data.

    The n-th collective that a group's members issue on it must be the same; and no two collectives may each wait for
    the other. One waits for all that was issued before it on its rank (by_issue: streams may share hardware), or only
    for what the compute stream had waited for.
    """
    wrong, calls = [], dict[Place, str]()
    before: dict[object, set[object]] = defaultdict(set)
    for rank, events in ranks.items():
        reached: object = (rank, 0)
        for number, event in enumerate(events):
            if event.what is None:
                before[rank, number] |= {reached, event.place}
                reached = (rank, number)
                continue
            if calls.setdefault(event.place, event.what) != event.what:
                wrong.append(f"rank {rank} issues {event.what} where another issues {calls[event.place]}")
            group, count = event.place
            before[event.place] |= {reached, *([(group, count - 1)] if count else [])}
            if by_issue:
                reached = event.place
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError as error:
        circle = [calls[one] for one in error.args[1][1:] if one in calls]
        wrong.append(f"{len(circle)} collectives wait for each other: {', '.join(circle)}")
    return wrong
