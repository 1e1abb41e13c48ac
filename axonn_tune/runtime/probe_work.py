"""What a probe does on one rank: a function to call again and again, made once per probe.

Collectives go through the runtime's own `Communicator`, attention and steps through its own code, so that
what is measured is what training does. Every rank works at the same time, as it does in training.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from axonn_tune.grid import Grid
from axonn_tune.program.operations import GROUP_AXES
from axonn_tune.runtime.communicate import Communicator, Pending
from axonn_tune.runtime.data import batches
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.local import Local, attention_on
from axonn_tune.runtime.mesh import Mesh
from axonn_tune.runtime.trainer import DTYPES, Trainer, settings_of
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.points import (
    AttentionProbe,
    CollectiveProbe,
    CopyProbe,
    MatmulProbe,
    Plan,
    Probe,
    StepProbe,
    TransferProbe,
)

Work = Callable[[], object]

_AXIS = "y"
"""Probes of a group shape use a grid whose y is the group, and whose x is everything inside it."""


def work_of(probe: Probe, bench: Bench) -> Work:
    """The work of a probe on this rank."""
    if isinstance(probe, CollectiveProbe):
        return bench.collective(probe)
    if isinstance(probe, TransferProbe):
        return bench.transfer(probe)
    if isinstance(probe, MatmulProbe):
        return bench.matmul(probe)
    if isinstance(probe, CopyProbe):
        return bench.copy(probe)
    if isinstance(probe, AttentionProbe):
        return bench.attention(probe)
    assert isinstance(probe, StepProbe), "the last kind of probe"
    return bench.step(probe)


class Bench:
    """Makes the work of probes, with the process groups and the tensors it needs."""

    def __init__(self, plan: Plan, *, rank: int, world: int, device: torch.device) -> None:
        self._plan, self._rank, self._world, self._device = plan, rank, world, device
        self._dtype = DTYPES[plan.precision][0]
        self._communicators: dict[tuple[int, int], Communicator] = {}
        self._trainer: Trainer | None = None

    def collective(self, probe: CollectiveProbe) -> Work:
        """One call over all groups of the shape at once; all ranks must call this together."""
        communicator = self._communicator(probe.group, probe.stride)
        elements = max(probe.group, probe.size_bytes // self._dtype.itemsize)
        full = torch.zeros(elements // probe.group * probe.group, dtype=self._dtype, device=self._device)
        shard = full[: len(full) // probe.group]

        def run() -> Pending:
            if probe.op == "all_gather":
                return communicator.all_gather(shard, _AXIS, "forward", "probe")
            if probe.op == "reduce_scatter":
                return communicator.reduce_scatter(full, _AXIS, "forward", "probe")
            return communicator.all_reduce(full, _AXIS, "forward", "probe")

        return lambda: run().wait()

    def transfer(self, probe: TransferProbe) -> Work:
        """A message to the rank `stride` further on, and one from the rank as far behind."""
        elements = max(1, probe.size_bytes // self._dtype.itemsize)
        sent = torch.zeros(elements, dtype=self._dtype, device=self._device)
        received = torch.empty_like(sent)
        to, origin = (self._rank + probe.stride) % self._world, (self._rank - probe.stride) % self._world

        def run() -> None:
            both = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, origin)]
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return run

    def matmul(self, probe: MatmulProbe) -> Work:
        """The product as the runtime writes it: `x @ w`, `g @ w.t()`, `x.t() @ g`."""
        m, n, k = probe.m, probe.n, probe.k
        left = self._normal(*((k, m) if probe.layout == "TN" else (m, k)))
        right = self._normal(*((n, k) if probe.layout == "NT" else (k, n)))
        if probe.layout == "TN":
            return lambda: left.t() @ right
        if probe.layout == "NT":
            return lambda: left @ right.t()
        return lambda: left @ right

    def copy(self, probe: CopyProbe) -> Work:
        """A copy of one tensor into another."""
        source = self._normal(max(1, probe.size_bytes // self._dtype.itemsize))
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def attention(self, probe: AttentionProbe) -> Work:
        """The attention core that trains the plan's first model, with all its heads."""
        launch = self._plan.launches[0]
        model, sequence = launch.model, launch.workload.sequence_length
        attention = attention_on(model, settings_of(launch, self._device), sequence=sequence, shares=1)
        qkv = self._normal(probe.sequences * sequence, model.qkv_width)
        if not probe.backward:
            return lambda: Local.run(attention, qkv)
        gradient = self._normal(probe.sequences * sequence, model.query_width)
        return lambda: Local.run(attention, qkv).backward(gradient)

    def step(self, probe: StepProbe) -> Work:
        """One training step of this rank alone."""
        launch: Launch = self._plan.launches[probe.launch]
        alone = Mesh(Grid(), 0, dict.fromkeys(GROUP_AXES))
        source = batches(launch, alone)
        if self._trainer is None:
            self._trainer = Trainer(launch, alone, device=self._device, source=source)
        trainer = self._trainer

        def run() -> None:
            # Launch configs of one plan differ in the size of the batch alone.
            trainer.source = source
            trainer.step(0)

        return run

    def _communicator(self, group: int, stride: int) -> Communicator:
        """The groups of a shape, made once and kept: all ranks make all of them, in the same order."""
        if (group, stride) not in self._communicators:
            grid = Grid(x=stride, y=group, z=self._world // (group * stride))
            groups: dict[str, dist.ProcessGroup | None] = {_AXIS: dist.group.WORLD if group == self._world else None}
            for members in grid.groups(_AXIS) if group < self._world else ():
                made = dist.new_group(list(members))
                if self._rank in members:
                    groups[_AXIS] = made
            self._communicators[group, stride] = Communicator(Mesh(grid, self._rank, groups), Ledger())
        return self._communicators[group, stride]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._device).to(self._dtype)
