"""A constraint that a layout must meet: what must be divisible by what, with its words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from math import prod

import numpy as np
from numpy.typing import NDArray

from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.dispatchers import find_dispatcher
from axonn_tune.grid import EXPERT_AXES
from axonn_tune.program.operations import Integers
from axonn_tune.specs.model import Model


@dataclass(frozen=True)
class Constraint:
    """`value` must be divisible by the product of some axes.

    at_least: it must only be as large; below: it must be less; or_divides: the product may also be divisible by it;
    multiple: the product must be; times: by so many times the product; where: holds where this axis is wider than 1;
    both: these axes may not all be wider than 1, for the reason `what`; of: the value is the product of these axes.
    """

    name: str
    what: str
    value: int
    axes: tuple[str, ...]
    at_least: bool = False
    below: bool = False
    or_divides: bool = False
    multiple: bool = False
    times: int = 1
    where: str = ""
    both: bool = False
    of: tuple[str, ...] = ()

    def broken(self, sizes: dict[str, Integers]) -> NDArray[np.bool_]:
        """Layouts that violate it, given columns of axis sizes."""
        if self.of:
            whole = reduce(lambda size, axis: size * sizes[axis], self.of, np.ones_like(next(iter(sizes.values()))))
            taken = reduce(lambda size, axis: size * sizes[axis], self.axes, np.ones_like(whole))
            return np.asarray((whole % taken != 0) & ((taken % whole != 0) | (not self.or_divides)))
        product = np.full_like(next(iter(sizes.values())), self.times)
        for axis in self.axes:
            product = product * sizes[axis]
        if self.both:
            together = np.ones(len(product), dtype=np.bool_)
            for axis in self.axes:
                together &= sizes[axis] > 1
            return together
        if self.at_least:
            return np.asarray(product > self.value)
        if self.below:
            return np.asarray(product <= self.value)
        wrong: NDArray[np.bool_] = (product % self.value if self.multiple else self.value % product) != 0
        if self.where:
            wrong = wrong & (sizes[self.where] > 1)
        return wrong & (product % self.value != 0) if self.or_divides else wrong

    def explain(self, sizes: dict[str, int], framework: Framework) -> str:
        """Violation of one layout, in the framework's names: `heads (96) is not divisible by TP = 5`."""
        if self.both:
            return self.what
        if self.of:
            whole = f"{self._product(framework, self.of)} = {prod(sizes[axis] for axis in self.of)}"
            taken = f"{self._product(framework)} = {prod(sizes[axis] for axis in self.axes)}"
            return f"{whole} is not divisible by {taken}"
        product = self.times * prod(sizes[axis] for axis in self.axes)
        relation = "is less than" if self.at_least else "is not divisible by"
        if self.below:
            return f"{self.what} needs {self._product(framework)} above {self.value}"
        if self.multiple:
            return f"{self._product(framework)} = {product} {relation} {self.what} ({self.value})"
        return f"{self.what} ({self.value}) {relation} {self._product(framework)} = {product}"

    def brief(self, framework: Framework) -> str:
        """The constraint broken, without numbers, after "with": `heads not divisible by TP`, `zero3 and dp`."""
        if self.both:
            names = [framework.called(axis) for axis in self.axes]
            return " and ".join(names) if len(names) > 1 else f"{names[0]} above 1"
        if self.of:
            return f"{self._product(framework, self.of)} not divisible by {self._product(framework)}"
        product, what = self._product(framework), self.what.replace("_", " ")
        if self.at_least:
            return f"fewer {what} than {product}"
        if self.below:
            return f"{self.what} and {product} = {self.value}"
        return f"{product} not divisible by {self.what}" if self.multiple else f"{what} not divisible by {product}"

    def _product(self, framework: Framework, axes: tuple[str, ...] = ()) -> str:
        names = [framework.called(axis) for axis in axes or self.axes if axis in framework.axes]
        return "·".join([str(self.times)] * (self.times > 1 and not axes) + names)


def common(model: Model, size: str) -> int:
    """What divides a size if and only if it divides that of every layer type that has it."""
    return math.gcd(*(getattr(layer, size) for layer in model.types)) or getattr(model.plain, size)


def refused_layouts(framework: Framework) -> list[Constraint]:
    """Combinations of axes that a framework refuses, and replicas and stages where what it keeps on the host does."""
    name = framework.name
    found = [Constraint(f"{name}-{'-'.join(one.axes)}", one.why, 1, one.axes, both=True) for one in framework.refused]
    if framework.step.host_optimizer == "deepspeed" and "weights" in framework.step.offloaded:
        # deepspeedai/DeepSpeed@edaa7221, runtime/zero/offload_config.py: offload_param is stage 3's.
        why = "weights on the host need ZeRO-3"
        found += [Constraint(f"offload-by-{axis}", why, 1, (axis,), both=True) for axis in ("data", "pipeline")]
    return found


def expert_constraints(model: Model, framework: Framework) -> list[Constraint]:
    """Whole experts on each rank, and ranks for all of them (NVIDIA/Megatron-LM@d98e8a64, core/parallel_state.py)."""
    if not model.has_experts:
        return []
    experts = [layer.experts for layer in model.types if layer.experts is not None]
    folding, width = framework.step.folding, math.gcd(*(one.width for one in experts))
    shared = math.gcd(*(one.shared_width for one in experts))
    over, tensor = (*folding.shards, *folding.replicas), framework.step.sequence_parallel
    whole, count = framework.step.whole_rows and not tensor, math.gcd(*(one.count for one in experts))
    over_x = ("x", "z") if whole else ("x",)
    shared_buffers = "expert overlap runs a forward and a backward pass at once, whose gathers of weights share buffers"
    overlapping = ("z", "expert_z") if framework.step.expert_overlap else ()
    # Its kernels are of several ranks (core/transformer/moe/token_dispatcher.py, MoEFlexTokenDispatcher).
    flex = framework.overlaps_experts and find_dispatcher(framework.step.dispatcher).counting == "rank"
    routed = [f"dispatcher {framework.step.dispatcher}"] * flex
    return [
        *(Constraint(f"{axis}-with-expert", shared_buffers, 1, (axis, "expert"), both=True) for axis in overlapping),
        *(Constraint("dispatcher-by-expert", name, 1, ("expert", "expert_tensor"), below=True) for name in routed),
        Constraint("experts-by-expert", "experts", count, ("expert",)),
        Constraint("expert-width-by-tensor", "expert width", width, ("expert_tensor",) if tensor else over_x),
        Constraint("ranks-by-expert", "ranks", 1, EXPERT_AXES, of=over),
        # Those of the inner axes first: all of them, or equal parts.
        *([Constraint("folding-by-expert", "ranks", 1, EXPERT_AXES, of=folding.shards, or_divides=True)] * whole),
        *([Constraint("shared-width-by-xz", "shared width", shared, over_x)] * (whole and shared > 0)),
        *([Constraint("router-by-x", "experts", count, ("x",))] * whole),
    ]
