"""What is run on each grid: every grid once, all else chosen so that every two values of two dimensions meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from axonn_tune.grid import AXES, PAPER_ORDER, Grid, distinct_orders, divisors, factorizations
from axonn_tune.program.pipeline import split_layers
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Optimizer
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import RECOMPUTES, Recompute, Workload

WORLDS = (1, 2, 3, 4, 6, 8)
BATCH, SEQUENCE, STEPS = 24, 16, 3
WORKLOAD = Workload(global_batch=BATCH, sequence_length=SEQUENCE, precision="fp64")
# By world size: eight ranks on two cores wait for each other most of the time.
MOST_ACCUMULATION = {1: 3, 2: 3, 3: 3, 4: 3, 6: 2, 8: 2, 16: 2}
DROPOUT = 0.1
# Looked at for each place of the covering; and a beginning of the random numbers with which nothing stays uncovered.
CANDIDATES, CHANCE = 40, 35

# Tied tables, biases, kv heads: every pair of values of two of them is there.
SHAPES = ((True, True, 24), (False, True, 12), (True, False, 12), (False, False, 24))
FAMILIES = {"gpt": "nano", "llama": "nano-llama"}
DEEP = load_model("nano-16").document
ONLY_PIPELINES = (5, 7)
"""Ranks that nothing but layers can be split over."""
INNERMOST = "innermost"


@dataclass(frozen=True)
class Training:
    """What the serial run depends on."""

    family: str
    tied: bool
    biases: bool
    kv_heads: int
    clipping: bool
    dropout: float = 0.0
    deep: bool = False

    @cached_property
    def model(self) -> Model:
        """The model document."""
        document = load_model(FAMILIES[self.family]).document
        change = {"tied_embeddings": self.tied, "biases": self.biases, "kv_heads": self.kv_heads}
        deep = {name: getattr(DEEP, name) for name in ("layers", "hidden", "head_dim", "ffn")}
        return document.model_copy(update=change | (deep if self.deep else {}))

    @property
    def optimizer(self) -> Optimizer:
        """Options under which clipping acts in every step, or never.

        The rate is low because AdamW's first steps turn rounding of a small gradient into `rate / eps` times as
        much of its weight; at 3e-4 that alone brings later gradients of some tensors to 1e-12.
        """
        most = 0.1 if self.clipping else None
        rates = {"learning_rate": 3e-5, "minimum_learning_rate": 3e-6}
        return Optimizer(**rates, warmup_steps=1, decay_steps=2, gradient_clip_norm=most)


DEEP_TRAININGS = (
    Training("gpt", True, True, 24, True, DROPOUT, deep=True),
    Training("gpt", True, False, 12, False, deep=True),
    Training("gpt", False, True, 12, True, deep=True),
    Training("llama", True, False, 12, True, deep=True),
    Training("llama", False, False, 24, False, DROPOUT, deep=True),
)


@dataclass(frozen=True)
class Case:
    """One run on a grid."""

    training: Training
    grid: Grid
    micro_batch: int
    recompute: Recompute
    kept_layers: int
    split: bool = False
    sharded: bool = False
    chunks: int = 1
    parts: tuple[int, ...] | None = None

    @property
    def workload(self) -> Workload:
        """What a step processes."""
        change = {"split_micro_batch": self.split, "shard_optimizer_over_data": self.sharded}
        return WORKLOAD.model_copy(update=change)

    @property
    def accumulation(self) -> int:
        """Micro-batches in a step."""
        return BATCH // (self.grid.z * self.grid.data * self.micro_batch)

    def __str__(self) -> str:
        grid, training = self.grid, self.training
        sizes = "x".join(str(grid.axis_size(axis)) for axis in ("x", "y", "z", "data"))
        if grid.pipeline > 1:
            sizes += f"x{grid.pipeline}p" + f"{self.chunks}v" * (self.chunks > 1) + "-uneven" * bool(self.parts)
        wide = "".join(axis[0] for axis in grid.order if grid.axis_size(axis) > 1)
        tied, biased = "tied" if training.tied else "untied", "biased" if training.biases else "unbiased"
        clipped = "clipped" if training.clipping else "unclipped"
        run = f"{self.accumulation}x{self.micro_batch}-{self.recompute}-kept{self.kept_layers}"
        run += "-split" * self.split + "-sharded" * self.sharded + "-dropout" * bool(training.dropout)
        return f"{sizes}-{wide or 'one'}-{training.family}-{tied}-{biased}-kv{training.kv_heads}-{run}-{clipped}"

    def values(self) -> tuple[object, ...]:
        """What the covering looks at; of each axis, whether it is narrow, wide, or the innermost one that is wide."""
        wide = [axis for axis in self.grid.order if self.grid.axis_size(axis) > 1]
        axes = ("narrow" if axis not in wide else INNERMOST if axis == wide[0] else "wide" for axis in AXES)
        shape = (self.training.tied, self.training.biases, self.training.kv_heads)
        training = (self.training.family, shape, self.training.clipping, self.training.dropout)
        return *training, self.recompute, self.kept_layers, self.accumulation, self.split, self.sharded, *axes


def grids() -> list[Grid]:
    """Every grid of 1, 2, 3, 4, 6 and 8 ranks, and the one of 16 that has every axis wide."""
    found = [Grid(*(int(size) for size in row)) for world in WORLDS for row in factorizations(world)]
    return [*found, Grid(2, 2, 2, 2)]


def cases() -> list[Case]:
    """One case for each grid, together covering every pair of the dimensions' values."""
    chosen, chance, covered = list[Case](), random.Random(CHANCE), set[object]()
    for grid in grids():
        candidates = [_candidate(grid, chance) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda case: len(pairs(case) - covered))
        covered |= pairs(best)
        chosen.append(best)
    return chosen


def pairs(case: Case) -> set[object]:
    """Every pair of values of a case, with the dimensions they belong to."""
    return set(itertools.combinations(enumerate(case.values()), 2))


def _candidate(grid: Grid, chance: random.Random) -> Case:
    sizes = (grid.x, grid.y, grid.z, grid.data)
    share = BATCH // (grid.z * grid.data)
    shape = chance.choice([shape for shape in SHAPES if shape[2] % grid.x == 0])
    steps = chance.choice([steps for steps in divisors(share) if steps <= MOST_ACCUMULATION[grid.world]])
    dropout = chance.choice([0.0, DROPOUT])
    return Case(
        training=Training(chance.choice(list(FAMILIES)), *shape, clipping=chance.random() < 0.5, dropout=dropout),
        grid=Grid(*sizes, order=chance.choice(distinct_orders(sizes)) if grid.world > 1 else PAPER_ORDER),
        micro_batch=share // steps,
        recompute=chance.choice(RECOMPUTES),
        kept_layers=chance.choice([0, 1, 2]),
        split=share // steps % 2 == 0 and chance.random() < 0.5,
        sharded=chance.random() < 0.5,
    )


def pipelines() -> list[Grid]:
    """Every grid of these ranks with pipeline stages."""
    worlds = (*WORLDS, *ONLY_PIPELINES)
    rows = [tuple(map(int, row)) for world in worlds for row in factorizations(world, axes=len(AXES) + 1)]
    possible = [row for row in rows if row[-1] > 1 and not set(ONLY_PIPELINES) & set(row[:-1])]
    return [Grid(*row[:-1], pipeline=row[-1], order=(*AXES, "pipeline")) for row in possible]


def pipelined_cases() -> list[Case]:
    """One case for each grid with stages; together they have everything with and without interleaving."""
    chosen, chance, covered = list[Case](), random.Random(CHANCE), set[object]()
    for grid in pipelines():
        candidates = [_pipelined(grid, chance) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda case: len(_met(case) - covered))
        covered |= _met(best)
        chosen.append(best)
    return chosen


def _met(case: Case) -> set[object]:
    """Pairs of options of a case, with the shape of its pipeline."""
    values = (*case.values()[:-4], case.chunks, bool(case.parts), case.grid.pipeline)
    return set(itertools.combinations(enumerate(values), 2))


def daily_cases() -> list[Case]:
    """All cases of 1 to 4 ranks, and four of 8 that have the most pairs of values that no earlier one has."""
    every = (*cases(), *pipelined_cases())
    chosen = [case for case in every if case.grid.world <= 4]
    for _ in range(4):
        covered = set[object]().union(*(pairs(case) | _met(case) for case in chosen))
        left = [case for case in every if case.grid.world == 8 and case not in chosen]
        chosen.append(max(left, key=lambda case: len((pairs(case) | _met(case)) - covered)))
    return chosen


def _pipelined(grid: Grid, chance: random.Random) -> Case:
    """A candidate with stages, perhaps interleaved, perhaps of unequal depth; stages are the outermost axis or not."""
    chunks = chance.choice([1, 1, 2] if grid.pipeline * 2 <= DEEP.layers else [1])
    share = BATCH // (grid.z * grid.data)
    found = _candidate(Grid(grid.x, grid.y, grid.z, grid.data), chance)
    counts = [count for count in divisors(share) if count <= 8 and (chunks == 1 or count % grid.pipeline == 0)]
    chunks = chunks if counts else 1
    count = chance.choice(counts or [one for one in divisors(share) if one <= 8])
    order = list(found.grid.order)
    order.insert(chance.choice([0, len(order), len(order)]), "pipeline")
    micro_batch = share // count
    return replace(
        found,
        training=chance.choice(DEEP_TRAININGS),
        grid=Grid(grid.x, grid.y, grid.z, grid.data, pipeline=grid.pipeline, order=tuple(order)),
        micro_batch=micro_batch,
        split=micro_batch % 2 == 0 and found.split,
        chunks=chunks,
        parts=_uneven(grid.pipeline * chunks, chance) if chance.random() < 0.5 else None,
    )


def _uneven(count: int, chance: random.Random) -> tuple[int, ...] | None:
    """Sixteen layers over so many parts, not evenly; None where each has one."""
    parts = list(split_layers(DEEP.layers, parts=count))
    deep = [part for part, layers in enumerate(parts) if layers > 1]
    if not deep:
        return None
    less, more = chance.choice(deep), chance.randrange(count)
    parts[less] -= 1
    parts[more] += 1
    return tuple(parts)


def trainings() -> Iterator[Training]:
    """Each serial run that the cases are compared with, once."""
    yield from dict.fromkeys(case.training for case in (*cases(), *pipelined_cases()))
