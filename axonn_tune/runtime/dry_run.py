"""One rank of a launch config without memory or network: `python -m axonn_tune.runtime.dry_run launch.yaml`.

Tensors are on torch's meta device, which knows shapes only, and collectives go to a fake process group, which returns
at once. So the first rank of every pipeline stage of any world can run one step on this host, which gives its peak
memory and compares its collectives with the program's. Stages with equal layers, embedding and LM head run once: the
first of them has the most micro-batches in flight.
"""

from __future__ import annotations

import signal
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axonn_tune.errors import AxonnTuneError, CheckFailedError, NothingFeasibleError
from axonn_tune.program.pipeline import group_size, model_parts
from axonn_tune.runtime.ledger import Ledger, LedgerEntry, compare, program_of
from axonn_tune.runtime.mesh import Mesh, build_mesh
from axonn_tune.runtime.modules import CausalAttention
from axonn_tune.runtime.rank import print_message
from axonn_tune.runtime.settings import require_size, settings_of
from axonn_tune.runtime.trainer import Trainer, require_runnable
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from axonn_tune.units import show_bytes


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel: its operator or compiled function, and the bytes it reads and writes."""

    name: str
    size_bytes: int


class MetaBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes, and bytes that kernels move, of tensors without data.

    A kernel reads each of its inputs once and writes its outputs; of a broadcast tensor the elements that exist count,
    of a look-up those it finds. Views and allocations launch none; GEMMs, attention and collectives are not counted.
    Uncompiled, each operator is one. A compiled function is two at most: one for all outputs that need sums over the
    rows of a matrix, one for the others. Intermediate results are in registers; an input of both is read twice.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self.launched: list[KernelLaunch] = []
        self._known: set[int] = set()
        self._fused: Fusion | None = None

    def compiler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Stands in for `torch.compile`."""

        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any function
            self._fused = fusion = Fusion()
            try:
                made = function(*args, **kwargs)
            finally:
                self._fused = None
            self._count_all(made)
            self.launched += fusion.kernels(function.__name__, _tensors(made))
            return made

        return run

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401 - torch's signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation and count its allocations and moved bytes."""
        made = function(*args, **(kwargs or {}))
        operator = Operator.of(function, args, kwargs or {}, made)
        if self._fused is not None:
            self._fused.note(operator)
            return made
        self._count_all(made)
        if operator.is_kernel:
            self.launched.append(KernelLaunch(str(function), operator.size_bytes))
        return made

    def _count_all(self, made: Any) -> None:  # noqa: ANN401 - whatever an operation makes
        for tensor in _tensors(made):
            self._count(tensor.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self.live -= size_bytes


Region: TypeAlias = tuple[int, int, int]
"""Memory that a tensor refers to: storage, first element, and bytes of the elements that exist."""

_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_GEMMS = ("mm", "addmm", "addmm_", "bmm", "baddbmm")
_OVERWRITES = ("copy_", "zero_", "fill_")
_LOOK_UPS = ("gather", "index", "index_select", "embedding")
_SUMS = ("sum", "mean", "amax", "var_mean", "linalg_vector_norm")


def _tensors(tree: Any) -> list[torch.Tensor]:  # noqa: ANN401 - of any structure
    return [one for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _region(tensor: torch.Tensor) -> Region:
    elements = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset()), elements * tensor.element_size()


@dataclass
class Operator:
    """One call of an operator; sums_rows: it adds up the rows of a matrix, so needs all tokens at once."""

    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    written: list[torch.Tensor]
    sums_rows: bool

    @classmethod
    def of(cls, function: Any, args: Any, kwargs: Any, made: Any) -> Operator:  # noqa: ANN401 - as dispatched
        """From a dispatched call: which arguments it reads, and what it writes."""
        schema, name = function._schema, str(function._schema.name)
        name = name.removeprefix("aten::")
        given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
        changed = [one.name for one in schema.arguments if one.alias_info is not None and one.alias_info.is_write]
        unread = changed if name in _OVERWRITES or schema.overload_name.endswith("out") else []
        inputs = _tensors([value for key, value in given.items() if key not in unread])
        if name in _LOOK_UPS:
            inputs = [*_tensors(made), *inputs[1:]]
        outputs = _tensors(made)
        if name == "index_put_":
            inputs, written = inputs[1:], _tensors(args[2])
        elif changed:
            written = _tensors([given[key] for key in changed])
        else:
            read = {one.untyped_storage()._cdata for one in inputs}
            written = [one for one in outputs if name in _LOOK_UPS or one.untyped_storage()._cdata not in read]
        dims = given.get("dim") or ()
        sums_rows = (
            name in _SUMS and 0 in (dims if isinstance(dims, list | tuple) else (dims,)) and inputs[0].dim() == 2
        )
        return cls(name, inputs, outputs, written, sums_rows=sums_rows)

    @property
    def is_kernel(self) -> bool:
        """Whether it moves anything, and is not priced as a GEMM or a collective."""
        return bool(self.written) and "::" not in self.name and self.name not in _ALLOCATIONS + _GEMMS

    @property
    def size_bytes(self) -> int:
        """Bytes it reads and writes."""
        return sum(size for *_, size in {*map(_region, self.inputs)}) + sum(_region(one)[2] for one in self.written)


class Fusion:
    """Follows what each tensor of a compiled function is computed from."""

    def __init__(self) -> None:
        self._sources: dict[int, tuple[set[Region], bool]] = {}
        self._changed: dict[int, torch.Tensor] = {}
        self._alive: list[torch.Tensor] = []

    def note(self, operator: Operator) -> None:
        """An operator ran: its outputs come from what its inputs come from, and from those sums over rows."""
        found, summed = set[Region](), operator.sums_rows
        for one in operator.inputs if operator.name not in _ALLOCATIONS else ():
            regions, late = self._sources.get(id(one), ({_region(one)}, False))
            found, summed = found | regions, summed or late
        viewed = not operator.written
        for one in operator.outputs:
            if viewed and not any(id(read) in self._sources for read in operator.inputs):
                continue  # A view of an argument reads what it shows, no more.
            self._sources[id(one)] = found, summed
            self._alive.append(one)
        for one in operator.written:
            self._changed[id(one)] = one

    def kernels(self, name: str, results: list[torch.Tensor]) -> Iterator[KernelLaunch]:
        """One of the outputs that need sums over rows, one of the others."""
        made = {id(one) for one in self._alive}
        outputs = {_region(one): one for one in results if id(one) in made}
        outputs |= {_region(one): one for one in self._changed.values() if self._given(one)}
        for late in (False, True):
            kept = [one for one in outputs.values() if self._sources[id(one)][1] == late]
            read = set[Region]().union(*(self._sources[id(one)][0] for one in kept))
            if kept:
                yield KernelLaunch(name, sum(size for *_, size in read) + sum(_region(one)[2] for one in kept))

    def _given(self, tensor: torch.Tensor) -> bool:
        """Whether a changed tensor is an argument, not one the function has made."""
        return (tensor.untyped_storage()._cdata) in {
            key for regions, _ in self._sources.values() for key, *_ in regions
        }


class FlashShapes(torch.autograd.Function):
    """Saved tensors of flash attention: inputs, outputs, one number per row. On the meta device torch saves S × S."""

    @staticmethod
    def forward(context: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        """`[b, heads, S, head_dim]` of each to outputs of the same shape."""
        output, rows = torch.empty_like(queries), queries.new_empty(queries.shape[:-1], dtype=torch.float32)
        context.save_for_backward(queries, keys, values, output, rows)
        return output

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        """Gradients of queries, keys and values."""
        queries, keys, values = context.saved_tensors[:3]
        # Flash attention makes gradients of keys for every query, then sums them.
        expanded = [torch.empty_like(queries) for _ in range(2)] if keys.shape[1] < queries.shape[1] else []
        found = tuple(torch.empty_like(one) for one in (queries, keys, values))
        del expanded
        return found


def flash_shapes(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: bool) -> torch.Tensor:
    """Stands in for `scaled_dot_product_attention`."""
    output: torch.Tensor = FlashShapes.apply(queries, keys, values)  # type: ignore[no-untyped-call]
    return output


class NoTokens:
    """Batches with a shape and no data."""

    def __init__(self, launch: Launch) -> None:
        self._shape = (launch.micro_batch, launch.workload.sequence_length)

    def batch(self, step: int, micro_step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, `[b, S]`."""
        return torch.empty(self._shape, dtype=torch.int64, device="meta"), torch.empty(
            self._shape, dtype=torch.int64, device="meta"
        )


def build(launch: Launch, mesh: Mesh, meter: MetaBytes) -> Trainer:
    """The trainer of a rank, on the meta device."""
    meta = torch.device("meta")
    settings = replace(settings_of(launch, meta), compiler=meter.compiler)
    trainer = Trainer(launch, mesh, device=meta, source=NoTokens(launch), settings=settings)
    for block in trainer.model.blocks:
        attention = block.attention.local
        assert isinstance(attention, CausalAttention), "what the branch is named after"
        attention.core = flash_shapes
    return trainer


class KernelClock:
    """Counts kernels instead of seconds, so that a timer's parts list their kernels."""

    def __init__(self, meter: MetaBytes) -> None:
        self._meter = meter

    def mark(self) -> int:
        """Kernels so far."""
        return len(self._meter.launched)

    def mark_end(self, work: dist.Work, group: dist.ProcessGroup, note: Callable[[int], None]) -> None:
        """A collective has ended as soon as it is issued."""
        note(self.mark())

    def between_s(self, start: int, end: int) -> float:
        """Kernels from one mark to another."""
        return float(end - start)


def kernels_of_step(launch: Launch, mesh: Mesh) -> dict[str, list[KernelLaunch]]:
    """Kernels of rank 0 in a step of one micro-batch, by part of the computation."""
    with warnings.catch_warnings(), MetaBytes() as meter:
        warnings.simplefilter("ignore")
        trainer = build(launch, mesh, meter)
        timer = trainer.model.communicator.timer
        timer.clock, timer.traced_steps = KernelClock(meter), 1
        meter.launched.clear()
        timer.begin_step(0)
        step_ledger(trainer, micro_batches=1)
        timer.part("")
        times = timer.end_step()
    assert times is not None, "the step was timed"
    return {part.name: meter.launched[round(part.start_s) : round(part.end_s)] for part in times.parts}


def step_ledger(trainer: Trainer, *, micro_batches: int) -> Counter[LedgerEntry]:
    """Collectives of a step of so many micro-batches."""
    trainer.ledger.counts.clear()
    trainer.launch = trainer.launch.model_copy(update={"grad_accumulation": micro_batches})
    trainer.optimizer.sums(trainer.gradients(0))
    trainer.optimizer.publish()
    return Counter(trainer.ledger.counts)


def whole_ledger(trainer: Trainer) -> Ledger:
    """The same for the launch config's micro-batches, by running few: the number of calls is affine in them.

    It runs as many as are ever in flight, plus one group.
    """
    count, stages = trainer.launch.grad_accumulation, trainer.mesh.grid.pipeline
    group = group_size(stages, trainer.launch.chunks)
    few = 2 * stages
    if count <= few + group:
        return Ledger(step_ledger(trainer, micro_batches=count))
    fewer, more = (step_ledger(trainer, micro_batches=one) for one in (few, few + group))
    left = (count - few - group) // group
    return Ledger(Counter({entry: more[entry] + left * (more[entry] - fewer[entry]) for entry in more}))


def memory_lines(launch: Launch, trainer: Trainer, *, peak_bytes: int) -> list[str]:
    """Peak memory of a rank, item by item."""
    vectors = trainer.model.vectors
    buckets = [bucket for bucket in trainer.model.store.buckets if bucket is not vectors]
    master_bytes = sum(bucket.master.nbytes for bucket in buckets)
    items = {
        "master weights": master_bytes,
        "optimizer moments": 2 * master_bytes,
        "gradients": sum(bucket.gradient.nbytes for bucket in buckets),
        "replicated vectors, all four": 4 * vectors.master.nbytes,
    }
    if launch.workload.shard_optimizer_over_data:
        items["compute weights"] = sum(bucket.value.nbytes for bucket in buckets)
    items["activations, gathered weights, temporaries"] = peak_bytes - sum(items.values())
    lines = [f"  {name:<44}{show_bytes(size):>10}" for name, size in items.items()]
    lines.append(f"  {'peak of a step':<44}{show_bytes(peak_bytes):>10}")
    return lines


def ledger_lines(ledger: Ledger) -> list[str]:
    """Collectives of a rank, largest first."""
    rows = sorted(ledger.counts.items(), key=lambda row: -row[0].size_bytes * row[1])
    if not rows:
        return ["  none: every group is this rank alone"]
    return [
        f"  {one.op:<15}{one.axis:<8}{one.phase:<10}{one.layer:<18}{count:>8,} × {show_bytes(one.size_bytes):>9}"
        for one, count in rows
    ]


@dataclass(frozen=True)
class DryRun:
    """Report of a dry run, and the peak memory of the largest stage, bytes."""

    lines: list[str]
    peak_bytes: int


def dry_run(launch: Launch) -> DryRun:
    """Run one step of the first rank of each stage; CheckFailedError if its collectives differ from the program's."""
    require_runnable(launch)
    found = [_dry_run_of(launch, stage) for stage in _different_stages(launch)]
    largest = max(found, key=lambda one: one.peak_bytes)
    lines = [line for one in found for line in one.lines]
    if launch.predicted.memory_bytes is not None:
        of = "rank 0" if launch.grid.pipeline == 1 else "the largest stage"
        lines += [f"Predicted peak of {of}: {show_bytes(launch.predicted.memory_bytes)}", ""]
    return DryRun([*lines, "They match the program, which the prediction is based on."], largest.peak_bytes)


def _different_stages(launch: Launch) -> list[int]:
    """The first stage of each kind."""
    stages = launch.grid.pipeline
    parts = model_parts(launch.model.layers, stages=stages, chunks=launch.chunks, given=launch.parts)
    kinds = {(stage == 0, stage == stages - 1, parts[stage::stages]): stage for stage in reversed(range(stages))}
    return sorted(kinds.values())


def _dry_run_of(launch: Launch, stage: int) -> DryRun:
    grid = launch.grid.grid()
    rank = grid.rank({"pipeline": stage}) if grid.pipeline > 1 else 0
    if grid.world > 1:
        dist.init_process_group("fake", rank=rank, world_size=grid.world)
    try:
        with warnings.catch_warnings(), MetaBytes() as meter:
            warnings.simplefilter("ignore")
            trainer = build(launch, build_mesh(grid, chunks=launch.chunks), meter)
            ledger = whole_ledger(trainer)
    finally:
        if grid.world > 1:
            dist.destroy_process_group()
    if different := compare(ledger, program_of(launch, stage=stage)):
        raise CheckFailedError("\n".join([f"the collectives of rank {rank} differ from the program:", *different]))
    name = f"rank {rank} of {grid.world}" + (f" (pipeline stage {stage})" if grid.pipeline > 1 else "")
    memory_of = [f"Memory of {name}:", *memory_lines(launch, trainer, peak_bytes=meter.peak)]
    sent = ["Collectives of one step and rank (full buffer of one call):", *ledger_lines(ledger)]
    return DryRun([*memory_of, "", *sent, ""], meter.peak)


def require_memory(launch: Launch, peak_bytes: int) -> None:
    """NothingFeasibleError, with the numbers, if a step needs more than a rank of the launch config's machine has."""
    limit_bytes = launch.predicted.memory_limit_bytes
    if limit_bytes is not None and peak_bytes > limit_bytes:
        accelerator, needed, usable = launch.predicted.accelerator, show_bytes(peak_bytes), show_bytes(limit_bytes)
        of = "rank 0" if launch.grid.pipeline == 1 else "a stage"
        raise NothingFeasibleError(
            f"peak memory of {of} is {needed}, above the {usable} usable on {accelerator} by "
            f"{show_bytes(peak_bytes - limit_bytes)}: use a smaller micro_batch, fewer kept_layers, or recompute: full"
        )


def main(arguments: list[str]) -> int:
    """Print the report; the exit code."""
    # A reader such as `head` may close the pipe early.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        launch = load_document(arguments[0], schema=Launch)
        require_size(launch)
        found = dry_run(launch)
        print("\n".join(found.lines), flush=True)
        require_memory(launch, found.peak_bytes)
    except AxonnTuneError as error:
        print_message(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
