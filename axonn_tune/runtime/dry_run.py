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
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from axonn_tune.errors import AxonnTuneError, CheckFailedError, NothingFeasibleError
from axonn_tune.program.pipeline import group_size, model_parts
from axonn_tune.runtime.context import Attended, AttentionKernel, RingAttention
from axonn_tune.runtime.devices import settings_of
from axonn_tune.runtime.ledger import Ledger, LedgerEntry, compare, program_of
from axonn_tune.runtime.mesh import Mesh, build_mesh
from axonn_tune.runtime.modules import CausalAttention, GatedAttention
from axonn_tune.runtime.parameters import Parameter
from axonn_tune.runtime.start import print_message, require_size
from axonn_tune.runtime.trainer import Trainer, require_runnable
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import load_document
from axonn_tune.units import show_bytes


class MetaBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live bytes of tensors without data; intermediate results of compiled functions are in registers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()
        self._compiled = False

    def compiler(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Stands in for `torch.compile`."""

        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any function
            self._compiled = True
            try:
                made = function(*args, **kwargs)
            finally:
                self._compiled = False
            self._count(made)
            return made

        return run

    def __torch_dispatch__(
        self,
        function: Any,  # noqa: ANN401 - torch's signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run an operation and count its allocations."""
        made = function(*args, **(kwargs or {}))
        if not self._compiled:
            self._count(made)
        return made

    def _count(self, made: Any) -> None:  # noqa: ANN401 - whatever an operation makes
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is None or storage._cdata in self._known:
                continue
            self._known.add(storage._cdata)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, key: int, size_bytes: int) -> None:
        self._known.discard(key)
        self.live -= size_bytes


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
        return _gradient_shapes(*context.saved_tensors[:3])


def _gradient_shapes(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Gradients of queries, keys and values; flash attention makes those of keys for every query, then sums them."""
    wide = keys.shape[0], queries.shape[1], *keys.shape[2:]
    expanded = [one.new_empty(wide) for one in (keys, values) if queries.shape[1] > keys.shape[1]]
    found = tuple(torch.empty_like(one) for one in (queries, keys, values))
    del expanded
    return found


def flash_shapes(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **how: bool) -> torch.Tensor:
    """Stands in for `scaled_dot_product_attention`."""
    output: torch.Tensor = FlashShapes.apply(queries, keys, values)  # type: ignore[no-untyped-call]
    return output


def ring_shapes(queries: torch.Tensor, *keys: torch.Tensor | bool) -> tuple[torch.Tensor, ...]:
    """Stands in for the kernel of attention on a part of the keys: output, and one number per row."""
    return torch.empty_like(queries), queries.new_empty(queries.shape[:-1], dtype=torch.float32)


def ring_gradient_shapes(gradient: torch.Tensor, of: Attended) -> tuple[torch.Tensor, ...]:
    """Stands in for its backward pass."""
    return _gradient_shapes(of.queries, of.keys, of.values)


def build(launch: Launch, mesh: Mesh, meter: MetaBytes) -> Trainer:
    """The trainer of a rank on the meta device: batches have a shape and no data, and all experts as many tokens."""
    meta = torch.device("meta")
    settings = replace(settings_of(launch, meta), compiler=meter.compiler, forced_balance=True)
    shape = launch.micro_batch, launch.workload.sequence_length

    def source(step: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.empty(shape, dtype=torch.int64, device=meta)
        return tokens, torch.empty_like(tokens)

    trainer = Trainer(launch, mesh, device=meta, source=source, settings=settings)
    for block in trainer.model.blocks:
        attention = block.attention.local
        attention = attention.attention if isinstance(attention, GatedAttention) else attention
        if isinstance(attention, RingAttention):
            attention.kernel = AttentionKernel(ring_shapes, ring_gradient_shapes)
            continue
        if isinstance(attention, CausalAttention):
            attention.core = flash_shapes
    return trainer


def step_ledger(trainer: Trainer, *, micro_batches: int) -> Counter[LedgerEntry]:
    """Collectives of a step of so many micro-batches."""
    trainer.ledger.counts.clear()
    trainer.launch = trainer.launch.model_copy(update={"grad_accumulation": micro_batches})
    trainer.optimizer.sums(trainer.gradients(0))
    trainer.optimizer.update_matrices(rate=0.0)
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


def dry_run(launch: Launch) -> tuple[list[str], int]:
    """Run one step of the first rank of each stage: a report, and the peak memory of the largest stage, bytes.

    CheckFailedError if the collectives differ from the program's.
    """
    require_runnable(launch)
    stages = launch.grid.pipeline
    parts = model_parts(launch.model.layers, stages=stages, chunks=launch.chunks, given=launch.parts)
    # The first stage of each kind.
    kinds = {(stage == 0, stage == stages - 1, parts[stage::stages]): stage for stage in reversed(range(stages))}
    found = [_dry_run_of(launch, stage) for stage in sorted(kinds.values())]
    lines = [line for report, _ in found for line in report]
    if launch.predicted.memory_bytes is not None:
        of = "rank 0" if stages == 1 else "the largest stage"
        lines += [f"Predicted peak of {of}: {show_bytes(launch.predicted.memory_bytes)}", ""]
    return [*lines, "They match the program, which the prediction is based on."], max(peak for _, peak in found)


def _dry_run_of(launch: Launch, stage: int) -> tuple[list[str], int]:
    """Report and peak memory, bytes, of the first rank of a stage."""
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
    if different := compare(ledger, replace(program_of(launch, stage=stage), natural=False)):
        raise CheckFailedError("\n".join([f"the collectives of rank {rank} differ from the program:", *different]))
    name = f"rank {rank} of {grid.world}" + (f" (pipeline stage {stage})" if grid.pipeline > 1 else "")
    store, vectors = trainer.model.store, trainer.model.vectors
    buckets = [bucket for bucket in store.buckets if bucket is not vectors]
    master_bytes = sum(bucket.master.nbytes for bucket in buckets)
    items = {
        "master weights": master_bytes,
        "optimizer moments": sum(state.nbytes for bucket in buckets for state in bucket.states),
        "gradients": sum(bucket.gradient.nbytes for bucket in buckets),
    }
    if vectors is not None:
        items["replicated vectors, with states"] = (2 + len(vectors.states)) * vectors.master.nbytes
    every: list[Parameter] = [*store.matrices, *store.vectors]
    if frozen := sum(one.value.nbytes for one in every if not one.trains):
        items["weights that do not train"] = frozen
    if launch.workload.shard_optimizer_over_data:
        items["compute weights"] = sum(bucket.value.nbytes for bucket in buckets)
    items["activations, gathered weights, temporaries"] = meter.peak - sum(items.values())
    items["peak of a step"] = meter.peak
    memory_of = [f"Memory of {name}:", *(f"  {item:<44}{show_bytes(size):>10}" for item, size in items.items())]
    # Largest first.
    rows = sorted(ledger.counts.items(), key=lambda row: -row[0].size_bytes * row[1])
    wide = max((8, *(len(one.axis) + 1 for one, _ in rows)))
    calls = [
        f"  {one.op:<15}{one.axis:<{wide}}{one.phase:<10}{one.layer:<18}{count:>8,} × {show_bytes(one.size_bytes):>9}"
        for one, count in rows
    ] or ["  none: every group is this rank alone"]
    sent = ["Collectives of one step and rank (full buffer of one call):", *calls]
    return [*memory_of, "", *sent, ""], meter.peak


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
        lines, peak_bytes = dry_run(launch)
        print("\n".join(lines), flush=True)
        require_memory(launch, peak_bytes)
    except AxonnTuneError as error:
        print_message(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
