"""What no launch config or script is written for, said without writing one: a search offers those that can be had."""

from __future__ import annotations

import shlex
from dataclasses import replace

from axonn_tune.cost.price import Detail
from axonn_tune.errors import UsageError
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.specs.machine import Machine, Slurm
from axonn_tune.specs.model import Model, unrun


def require_run(priced: Detail, model: Model) -> None:
    """UsageError for a layout of another framework or of a changed step, or of a model that the runtime has no part of.

    model: as its document states it.
    """
    job = priced.job
    if job.framework.software:
        raise UsageError(f"a launch config is for the bundled runtime, not for {job.framework.name}")
    own = replace(AXONN_TUNE.step, balancing_loss=job.framework.step.balancing_loss)
    if job.framework.step != (replace(own, imbalance=1.0) if forced_balance(priced, model) else own):
        raise UsageError("a launch config runs the bundled runtime's own step: leave out --set step.KEY")
    if why := unrun(model):
        raise UsageError(why)
    if 0 in (priced.parts or ()):
        raise UsageError("the bundled runtime runs a layer or more in each part of a pipeline layout")


def forced_balance(priced: Detail, model: Model) -> bool:
    """Whether experts are to get equally many tokens, whatever the router says."""
    return model.has_experts and priced.job.framework.step.imbalance == 1.0


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
