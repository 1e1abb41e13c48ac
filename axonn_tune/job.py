"""What is trained and how it is laid out: the values that everything is priced from, and what of them starts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from axonn_tune.errors import UsageError
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import FlopCount, Framework
from axonn_tune.grid import Grid
from axonn_tune.recompute import modules_of
from axonn_tune.specs.machine import Machine, Slurm
from axonn_tune.specs.model import Model, unrun
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.vocabulary import GemmFormat, Precision

if TYPE_CHECKING:
    from axonn_tune.specs.launch import Launch
    from axonn_tune.specs.results import ComparedConfiguration


@dataclass(frozen=True, repr=False)
class Job:
    """What is trained, on which machine, by which framework with which options of its step.

    tokens_total: tokens of the whole training run, for its cost.
    """

    model: Model
    machine: Machine
    workload: Workload
    framework: Framework = AXONN_TUNE
    tokens_total: int | None = None

    def __post_init__(self) -> None:
        """Give the framework the axes of experts, if the model has them, and that its adapters and layers in BF16."""
        object.__setattr__(self, "framework", self.framework.training(self.model))
        object.__setattr__(self, "model", self.model.tuned(self.workload.tuning))
        ends = self.framework.step.first_layers_bf16, self.framework.step.last_layers_bf16
        asked = any(ends) and (self.workload.format or self.formats)
        if asked and not any(layer.in_bf16 for layer in self.model.types):
            try:
                object.__setattr__(self, "model", self.model.with_bf16_ends(*ends))
            except ValueError as error:
                raise UsageError(str(error)) from None

    def __repr__(self) -> str:
        """What and where, without the documents."""
        where = f"{self.machine.name} with {self.framework.title}"
        return f"<{type(self).__name__}: {self.model.name} on {where}>"

    @property
    def title(self) -> str:
        """What is trained: the model, or what of it."""
        return f"{tuning.words} of {self.model.name}" if (tuning := self.workload.tuning) else self.model.name

    @property
    def logged(self) -> FlopCount | None:
        """How the framework's log counts the FLOPs of the run; None if it prints none."""
        count = self.framework.logged
        return count and count.of(self.model, self.workload)

    @property
    def gemm_format(self) -> GemmFormat:
        """What GEMMs of linear layers multiply: FP32 rounded to TF32 where framework and accelerator have it."""
        precision, peaks = self.workload.precision, self.machine.accelerator.peak_tflops
        rounds = self.framework.step.tf32 and precision == "fp32" and peaks.get("tf32", 0.0) > peaks.get("fp32", 0.0)
        return "tf32" if rounds else precision

    @property
    def peak_flops_per_s(self) -> float:
        """Peak of what linear layers multiply, FLOP/s: denominator of MFU and HFU."""
        return self.machine.accelerator.peak_flops_per_s(self.gemm_format)

    def dispatcher_on(self, grid: Grid) -> str:
        """The dispatcher of a grid's experts."""
        return self.framework.dispatcher_over(grid.expert * grid.expert_tensor, self.machine.tiers[0].ranks)

    def overlaps_experts(self, layout: Layout) -> bool:
        """Whether passes of two micro-batches run beside each other, dispatch and combine behind computation: not where
        they are repeated, nor where several stages are not interleaved."""
        asked = self.framework.step.expert_overlap and layout.grid.expert > 1
        repeats = layout.recompute == "full" or "moe" in modules_of(layout.recompute)
        staged = layout.pipeline == 1 or layout.chunks > 1
        return asked and self.dispatcher_on(layout.grid) != "allgather" and staged and not repeats

    @property
    def formats(self) -> tuple[Precision, ...]:
        """Number formats that are compared, where several are."""
        return ()


@dataclass(frozen=True)
class Layout:
    """Grid with rank order, micro-batch, recompute; layers not resharded: None for as many as fit.

    chunks: of each pipeline stage; parts: blocks of each chunk, model part c·p + s at that place; None: an even split.
    mtp_part: the one with the MTP layers; None: the last.
    recompute_layers: of each chunk the first blocks, which repeat the recompute set, the others nothing; None: all.
    """

    grid: Grid
    micro_batch: int
    recompute: Recompute
    kept_layers: int | None = None
    chunks: int = 1
    parts: tuple[int, ...] | None = None
    recompute_layers: int | None = None
    mtp_part: int | None = None

    @classmethod
    def of(cls, one: Launch | ComparedConfiguration) -> Layout:
        """That of a launch config, or of a measured configuration."""
        return cls(
            *(one.grid.grid(), one.micro_batch, one.recompute, one.kept_layers),
            *(one.chunks, one.parts, one.recompute_layers),
        )

    @property
    def recomputed(self) -> str:
        """The recompute set, and how many layers of each chunk have it where not all do: `full on 3`."""
        return self.recompute if self.recompute_layers is None else f"{self.recompute} on {self.recompute_layers}"

    def size(self, axis: str) -> int:
        """Size of an axis."""
        return self.grid.axis_size(axis)

    @property
    def wide_order(self) -> tuple[str, ...]:
        """The rank order without axes of size 1."""
        return tuple(axis for axis in self.order if self.size(axis) > 1)

    @property
    def x(self) -> int:
        """Size of axis x."""
        return self.grid.x

    @property
    def y(self) -> int:
        """Size of axis y."""
        return self.grid.y

    @property
    def z(self) -> int:
        """Size of axis z."""
        return self.grid.z

    @property
    def data(self) -> int:
        """Size of axis data."""
        return self.grid.data

    @property
    def pipeline(self) -> int:
        """Pipeline stages."""
        return self.grid.pipeline

    @property
    def order(self) -> tuple[str, ...]:
        """Axes from the fastest-varying rank outwards."""
        return self.grid.order


# What no launch config or script is written for, said without writing one: a search offers those that can be had.


def require_run(job: Job, layout: Layout, model: Model) -> None:
    """UsageError for a layout of another framework or of a changed step, or of a model that the runtime has no part of.

    model: as its document states it.
    """
    if job.framework.software:
        raise UsageError(f"a launch config is for the bundled runtime, not for {job.framework.name}")
    step = job.framework.step
    own = replace(AXONN_TUNE.step, balancing_loss=step.balancing_loss, optimizer=step.optimizer)
    own = replace(own, pipeline_order=step.pipeline_order)
    if step != (replace(own, imbalance=1.0) if forced_balance(job, model) else own):
        changed = (
            ", which offloads nothing: leave out step.offloaded" if step.offloads else ": leave out --set step.KEY"
        )
        raise UsageError(f"a launch config runs the bundled runtime's own step{changed}")
    if why := unrun(model.tuned(job.workload.tuning)):
        raise UsageError(why)
    if 0 in (layout.parts or ()):
        raise UsageError("the bundled runtime runs a layer or more in each part of a pipeline layout")


def framework_of(launch: Launch) -> Framework:
    """The bundled runtime as a launch config runs it."""
    framework = AXONN_TUNE.having(*launch.grid.sizes).with_step(balancing_loss=launch.load_balancing_loss > 0)
    framework = framework.with_step(imbalance=1.0) if launch.force_load_balancing else framework
    return framework.optimizing(launch.optimizer.name).with_step(pipeline_order=launch.pipeline_order)


def forced_balance(job: Job, model: Model) -> bool:
    """Whether experts are to get equally many tokens, whatever the router says."""
    return model.has_experts and job.framework.step.imbalance == 1.0


def require_full_nodes(world: int, per_node: int) -> None:
    """UsageError if the ranks do not fill nodes: all are full, or there is one, which need not be."""
    per_node = min(world, per_node)
    if left := world % per_node:
        raise UsageError(
            f"{world} ranks do not fill nodes of {per_node}: {world} = {world // per_node} · {per_node} + {left}; take "
            f"a GPU count that fills nodes, such as {world - left} or {world - left + per_node} "
            "(another number of ranks a node is another placement than the one priced)"
        )


def slurm_section(machine: Machine) -> tuple[Slurm, list[str]]:
    """The machine's section for Slurm, and the words of its options of srun, as bash reads them.

    UsageError if it has none, or an option cannot be written.
    """
    slurm = machine.launcher.slurm
    if slurm is None:
        raise UsageError(f"machine {machine.name} has no launcher.slurm section; use --emit torchrun, or write one")
    try:
        return slurm, [shlex.quote(word) for option in slurm.srun for word in shlex.split(option)]
    except ValueError as error:
        raise UsageError(f"launcher.slurm.srun: {error} in {' '.join(slurm.srun)!r}") from error
