"""What is run on each grid: every grid once, all else chosen so that every two values of two dimensions meet."""

from __future__ import annotations

import itertools
import random
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Literal

from axonn_tune.grid import AXES, PAPER_ORDER, Grid, distinct_orders, divisors, factorizations
from axonn_tune.program.pipeline import split_layers
from axonn_tune.recompute import RECOMPUTES
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.launch import Optimizer
from axonn_tune.specs.model import LayerType, Model
from axonn_tune.specs.tuning import Tuning
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.vocabulary import PipelineOrder

WORLDS, ONLY_PIPELINES = (1, 2, 3, 4, 6, 8), (5, 7)
"""Ranks of the grids; and those that nothing but layers can be split over."""
BATCH, SEQUENCE, STEPS = 24, 16, 3
WORKLOAD = Workload(global_batch=BATCH, sequence_length=SEQUENCE, precision="fp64")
# Eight ranks on two cores wait for each other most of the time.
MOST_ACCUMULATION = {1: 3, 2: 3, 3: 3, 4: 3, 6: 2, 8: 2, 16: 2}
CANDIDATES, CHANCE, DAILY = 40, 27, 7
BIAS_RATE = 0.01
"""Of routers' biases, a step."""
ADAPTER_SCALE = 1.5
DEEP = load_model("nano-16").document
INNERMOST = "innermost"


@dataclass(frozen=True)
class Training:
    """What the serial run depends on; normed: with norms of queries and keys; by: which optimizer; targets: of adapters
    that train alone."""

    family: str
    tied: bool
    biases: bool
    kv_heads: int
    clipping: bool
    dropout: float = 0.0
    deep: bool = False
    sequence: int = SEQUENCE
    balance: float = 0.0
    normed: bool = False
    by: Literal["adamw", "sgd", "lion", "muon"] = "adamw"
    targets: tuple[str, ...] = ()

    @cached_property
    def model(self) -> Model:
        """The model document."""
        alike = {"gpt": "nano", "sigmoid": "nano-moe", "head gates": "nano-delta"}
        name = alike.get(self.family, f"nano-{self.family}")
        document = load_model(name).document
        change = {"tied_embeddings": self.tied, "biases": self.biases, "kv_heads": self.kv_heads}
        deep = {name: getattr(DEEP, name) for name in ("layers", "hidden", "head_dim", "ffn")}
        change["max_sequence_length"] = max(document.max_sequence_length, self.sequence)
        if self.family == "sigmoid":
            (moe,) = (one for one in document.layer_types.values() if one.experts is not None)
            experts = moe.experts.model_copy(
                update={"score": "sigmoid", "normalized": False, "shared_width": 0, "score_bias": True}
            )
            change["layer_types"] = document.layer_types | {"moe": moe.model_copy(update={"experts": experts})}
        if self.family == "head gates":
            full = document.layer_types["full"].model_copy(update={"output_gate": "head", "qk_norms": False})
            change["layer_types"] = document.layer_types | {"full": full}
        if self.normed:
            types = document.layer_types or {"dense": LayerType()}
            change["layer_types"] = {name: one.model_copy(update={"qk_norms": True}) for name, one in types.items()}
        return document.model_copy(update=change | (deep if self.deep else {})).tuned(self.tuning)

    @property
    def tuning(self) -> Tuning | None:
        """Adapters of a rank that nothing divides."""
        return Tuning(mode="lora", rank=5, targets=self.targets, dtype="fp32") if self.targets else None

    @property
    def optimizer(self) -> Optimizer:
        """Options under which clipping acts in every step, or never.

        The rate is low because AdamW's first steps turn rounding of a small gradient into `rate / eps` times as
        much of its weight; at 3e-4 that alone brings later gradients of some tensors to 1e-12.
        """
        rates = {"learning_rate": 3e-5, "minimum_learning_rate": 3e-6}
        rates |= {"name": self.by, "warmup_steps": 1, "decay_steps": 2}
        return Optimizer(**rates, gradient_clip_norm=0.1 if self.clipping else None)


TRAININGS = (
    Training("gpt", True, True, 24, True, 0.1),
    Training("gpt", False, True, 12, False),
    Training("gpt", True, False, 12, True),
    Training("gpt", False, False, 24, False, 0.1),
    Training("llama", True, True, 24, False),
    Training("llama", False, True, 12, True, 0.1),
    Training("llama", True, False, 12, False, 0.1),
    Training("llama", False, False, 24, True),
)
"""Every pair of values of two options, biases of tied tables among them."""
DEEP_TRAININGS = (
    Training("gpt", True, True, 24, True, 0.1, deep=True),
    Training("gpt", False, True, 12, True, deep=True),
    Training("llama", True, False, 12, True, deep=True),
    Training("llama", False, False, 24, False, 0.1, deep=True, normed=True),
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
    recompute_layers: int | None = None
    order: PipelineOrder = "1f1b"

    @property
    def workload(self) -> Workload:
        """What a step processes."""
        change: dict[str, object] = {"split_micro_batch": self.split, "shard_optimizer_over_data": self.sharded}
        change |= {"sequence_length": self.training.sequence, "tuning": self.training.tuning}
        return WORKLOAD.model_copy(update=change)

    @property
    def accumulation(self) -> int:
        """Micro-batches in a step."""
        return BATCH // (self.grid.z * self.grid.data * self.micro_batch)

    def __str__(self) -> str:
        sizes, training = "x".join(map(str, self.grid.sizes[:4])), self.training
        sizes += (
            f"x{self.grid.context}c" * (self.grid.context > 1) + f"-ep{self.grid.expert}" * training.model.has_experts
        )
        stages = f"-{self.grid.pipeline}p{self.chunks}v" + "-uneven" * bool(self.parts)
        wide = "".join(axis[0] for axis in self.grid.order if self.grid.axis_size(axis) > 1)
        tables = f"{'tied' if training.tied else 'untied'}-kv{training.kv_heads}" + "-biased" * training.biases
        some = "" if self.recompute_layers is None else f"-on{self.recompute_layers}"
        run = f"{self.accumulation}x{self.micro_batch}-{self.recompute}{some}-kept{self.kept_layers}"
        run += f"-lora{training.targets.count('*') or len(training.targets)}" * bool(training.targets)
        run += "-split" * self.split + "-sharded" * self.sharded + "-clipped" * training.clipping
        run += f"-{training.by}" * (training.by != "adamw") + f"-{self.order}" * (self.order != "1f1b")
        return f"{sizes}{stages if self.grid.pipeline > 1 else ''}-{wide or 'one'}-{training.family}-{tables}-{run}"

    def values(self) -> tuple[object, ...]:
        """What the covering looks at; of each axis, whether it is narrow, wide, or the innermost one that is wide."""
        wide = [axis for axis in self.grid.order if self.grid.axis_size(axis) > 1]
        axes = ("narrow" if axis not in wide else INNERMOST if axis == wide[0] else "wide" for axis in AXES)
        options = self.recompute, self.kept_layers, min(self.accumulation, 3), self.split, self.sharded
        stages = self.grid.pipeline, self.chunks, bool(self.parts)
        # All of the covering are AdamW's.
        return *astuple(self.training)[:-1], *options, *(stages if self.grid.pipeline > 1 else axes)

    def pairs(self) -> set[object]:
        """Every pair of values, with the dimensions they belong to."""
        kind = self.grid.pipeline > 1
        return {(kind, pair) for pair in itertools.combinations(enumerate(self.values()), 2)}


def grids() -> list[Grid]:
    """Every grid of 1, 2, 3, 4, 6 and 8 ranks, with stages or without, and one of 16 that has every axis wide."""
    plain = [Grid(*map(int, row)) for world in WORLDS for row in factorizations(world)]
    rows = [
        tuple(map(int, row)) for one in (*WORLDS, *ONLY_PIPELINES) for row in factorizations(one, axes=len(AXES) + 1)
    ]
    staged = [row for row in rows if row[-1] > 1 and not set(ONLY_PIPELINES) & set(row[:-1])]
    return [*plain, Grid(2, 2, 2, 2), *(Grid(*row[:4], pipeline=row[4], order=(*AXES, "pipeline")) for row in staged)]


def cases() -> list[Case]:
    """One case for each grid, together covering the pairs of the dimensions' values."""
    chosen, chance, covered = list[Case](), random.Random(CHANCE), set[object]()
    for grid in grids():
        candidates = [_candidate(grid, chance) for _ in range(CANDIDATES)]
        chosen.append(max(candidates, key=lambda case: len(case.pairs() - covered)))
        covered |= chosen[-1].pairs()
    return chosen


def daily(every: list[Case]) -> list[Case]:
    """Cases of 2 to 4 ranks, each of which has the most pairs of values that no earlier one has."""
    chosen = list[Case]()
    for _ in range(DAILY):
        covered = set[object]().union(*(case.pairs() for case in chosen))
        left = [case for case in every if 2 <= case.grid.world <= 4 and case not in chosen]
        chosen.append(max(left, key=lambda case: len(case.pairs() - covered)))
    return chosen


MOE_TRAININGS = (
    Training("moe", False, False, 12, True, 0.1, balance=0.1, normed=True),
    Training("sigmoid", True, False, 24, False, balance=0.01),
)
LONG_MOE_TRAININGS = tuple(replace(one, sequence=48) for one in MOE_TRAININGS)
MOE_DAILY = ((1, 2, 2, 1, 1, 2), (1, 1, 1, 2, 1, 2), (1, 1, 2, 1, 2, 2))


def expert_cases() -> dict[Case, bool]:
    """A case for every grid of up to 8 ranks, context included, with every size of its expert axis, and for some with
    stages; whether it is daily."""
    rows = [(*map(int, row), 1, 1) for world in WORLDS for row in factorizations(world)]
    rows += [(1, 1, 2, 1, 1, 2), (1, 2, 1, 2, 1, 2)]
    rows += [(*map(int, row), 1) for world in WORLDS for row in factorizations(world, axes=5) if row[-1] > 1]
    rows += [(1, 1, 2, 1, 2, 2)]
    chance, found = random.Random(CHANCE), dict[Case, bool]()
    for *sizes, context, stages in rows:
        z, data = sizes[2:]
        folds = [one for one in divisors(z * data) if z % one == 0 or (one % z == 0 and data % (one // z) == 0)]
        for expert in folds:
            share, axes = BATCH // (z * data), (*AXES, *["context"] * (context > 1))
            micro_batch = share // chance.choice([1, 2])
            trainings = MOE_TRAININGS if context == 1 else LONG_MOE_TRAININGS
            training = chance.choice(trainings)
            case = Case(
                training=training if training.kv_heads % sizes[0] == 0 else trainings[1],
                grid=Grid(
                    *sizes,
                    context=context,
                    pipeline=stages,
                    expert=expert,
                    order=(*chance.sample(axes, len(axes)), *["pipeline"] * (stages > 1)),
                ),
                micro_batch=micro_batch,
                recompute=chance.choice(("none", "selective", "full", "layernorm,mlp")),
                kept_layers=chance.choice([0, 1, 2]),
                split=micro_batch % 2 == 0 and chance.random() < 0.5,
                sharded=chance.random() < 0.5,
            )
            found[case] = (*sizes, context, expert) in MOE_DAILY and stages == 1
    return found


CONTEXT_TRAININGS = (
    Training("gpt", True, True, 24, True, 0.1, sequence=64),
    Training("llama", False, True, 12, True, 0.1, sequence=64),
    Training("llama", True, False, 24, False, sequence=96, normed=True),
)
CONTEXT_DAILY = ((1, 1, 1, 1, 3),)


def context_cases() -> dict[Case, bool]:
    """A case for every grid of up to 8 ranks with context parallelism, and for some with stages; whether it is daily.

    Sequences of 96 tokens where 64 have not as many chunks.
    """
    worlds = [one for one in WORLDS if one > 1]
    rows = [tuple(map(int, row)) for one in worlds for row in factorizations(one, axes=5)]
    rows = [(*row, 1) for row in rows if row[-1] > 1]
    chance, found = random.Random(CHANCE), dict[Case, bool]()
    staged = [(1, 1, 1, 1, 2, 2), (1, 1, 2, 1, 2, 2), (2, 1, 1, 1, 2, 2), (1, 1, 1, 2, 2, 2)]
    for *sizes, context, stages in [*rows, *staged]:
        order = list(chance.sample((*AXES, "context"), 5))
        share = BATCH // (sizes[2] * sizes[3])
        micro_batch = share // chance.choice([1, 2])
        training = CONTEXT_TRAININGS[2] if context % 3 == 0 else chance.choice(CONTEXT_TRAININGS[:2])
        case = Case(
            training=training,
            grid=Grid(*sizes, context=context, pipeline=stages, order=(*order, *["pipeline"] * (stages > 1))),
            micro_batch=micro_batch,
            recompute=chance.choice((*RECOMPUTES, "core_attn,mlp_act")),
            kept_layers=chance.choice([0, 1]),
            split=micro_batch % 2 == 0 and chance.random() < 0.5,
            sharded=chance.random() < 0.5,
        )
        found[case] = (*sizes, context) in CONTEXT_DAILY and stages == 1
    return found


DELTA_TRAININGS = (
    Training("delta", False, False, 24, True, 0.1, sequence=80),
    Training("head gates", True, False, 12, False, sequence=48),
)
DELTA_DAILY = ((2, 1, 2, 1, 1), (1, 2, 1, 2, 1), (1, 1, 1, 1, 2))


def delta_cases() -> dict[Case, bool]:
    """A case for every grid of up to 8 ranks with gated delta nets, stages included; whether it is daily.

    Sequences of 80 tokens are a chunk and a part of one.
    """
    rows = [tuple(map(int, row)) for world in WORLDS for row in factorizations(world, axes=5) if row[-1] <= 2]
    chance, found = random.Random(CHANCE), dict[Case, bool]()
    for *sizes, stages in rows:
        share = BATCH // (sizes[2] * sizes[3])
        micro_batch = share // chance.choice([1, 2])
        training = DELTA_TRAININGS[0] if sizes[0] == 8 else chance.choice(DELTA_TRAININGS)
        # Of those that are daily each has the short training, whose serial run they share.
        training = DELTA_TRAININGS[1] if (*sizes, stages) in DELTA_DAILY else training
        order = (*chance.sample(AXES, len(AXES)), *["pipeline"] * (stages > 1))
        case = Case(
            training=training,
            grid=Grid(*sizes, pipeline=stages, order=order),
            micro_batch=micro_batch,
            recompute=chance.choice(("none", "selective", "full", "core_attn,mlp")),
            kept_layers=chance.choice([0, 1]),
            split=micro_batch % 2 == 0 and chance.random() < 0.5,
            sharded=chance.random() < 0.5,
        )
        found[case] = (*sizes, stages) in DELTA_DAILY
    return found


OPTIMIZER_TRAININGS = (
    Training("llama", False, True, 12, True, 0.1, by="muon"),
    Training("gpt", True, False, 24, False, by="muon"),
    Training("llama", True, False, 12, True, deep=True, by="muon"),
    Training("moe", False, False, 12, True, balance=0.1, normed=True, by="muon"),
    Training("delta", False, False, 24, True, sequence=80, by="muon"),
    Training("llama", False, False, 12, True, by="sgd"),
    Training("llama", False, False, 24, False, by="lion"),
)


def optimizer_cases() -> dict[Case, bool]:
    """Cases of optimizers other than AdamW, whole matrices on every kind of grid; whether it is daily."""
    llama, gpt, deep, moe, delta, sgd, lion = OPTIMIZER_TRAININGS
    staged = (*AXES, "pipeline")
    rows = [
        (llama, Grid(2, 1, 2, 1), False, True),
        (gpt, Grid(1, 2, 1, 2, order=("data", "y", "z", "x")), True, False),
        (gpt, Grid(), True, False),
        (llama, Grid(2, 2, 1, 1), True, False),
        (gpt, Grid(1, 1, 3, 1), False, False),
        (llama, Grid(2, 2, 2, 1), False, False),
        (gpt, Grid(1, 2, 2, 2), True, False),
        (deep, Grid(1, 1, 2, 1, pipeline=2, order=staged), False, False),
        (deep, Grid(1, 2, 1, 2, pipeline=2, order=staged), True, False),
        (moe, Grid(1, 1, 2, 2, expert=2), True, False),
        (moe, Grid(2, 2, 1, 1, expert=1), False, False),
        (delta, Grid(2, 1, 2, 1), False, False),
        (sgd, Grid(1, 1, 2, 2), True, False),
        (lion, Grid(2, 1, 1, 2), False, False),
    ]
    return {
        Case(training, grid, BATCH // (grid.z * grid.data) // 2, "none", 0, sharded=sharded): each_time
        for training, grid, sharded, each_time in rows
    }


LORA_TRAININGS = (
    Training("llama", False, False, 12, True, 0.1, targets=("*",)),
    Training("gpt", True, True, 24, False, targets=("attention.qkv/q", "attention.qkv/v", "mlp.fc2")),
    Training("llama", True, False, 24, True, normed=True, targets=("mlp.fc1/gate", "mlp.fc1/up", "attention.output")),
    Training("llama", False, False, 24, False, targets=("mlp.fc1/up",)),
    Training("gpt", False, True, 24, True, 0.1, targets=("mlp.fc2",)),
)
LORA_DAILY = ((2, 1, 2, 1, 1), (1, 2, 1, 2, 1), (2, 2, 1, 1, 1), (1, 1, 2, 1, 2))


def lora_cases() -> dict[Case, bool]:
    """A case for every grid of up to 8 ranks where adapters train, stages included, and for some with context; whether
    it is daily."""
    rows = [(*map(int, row), 1) for world in WORLDS for row in factorizations(world, axes=5) if row[-1] <= 2]
    rows += [(2, 1, 1, 1, 1, 2), (1, 1, 2, 1, 1, 2), (1, 2, 1, 1, 2, 2)]
    chance, found = random.Random(CHANCE), dict[Case, bool]()
    for *sizes, stages, context in rows:
        micro_batch = BATCH // (sizes[2] * sizes[3]) // chance.choice([1, 2])
        training = chance.choice([one for one in LORA_TRAININGS if one.kv_heads % sizes[0] == 0])
        axes = (*AXES, *["context"] * (context > 1))
        case = Case(
            training=training,
            grid=Grid(
                *sizes,
                context=context,
                pipeline=stages,
                order=(*chance.sample(axes, len(axes)), *["pipeline"] * (stages > 1)),
            ),
            micro_batch=micro_batch,
            recompute=chance.choice((*RECOMPUTES, "mlp", "core_attn,mlp_act", "layernorm,mlp")),
            kept_layers=chance.choice([0, 1, 2]),
            split=micro_batch % 2 == 0 and chance.random() < 0.5,
            sharded=chance.random() < 0.5,
        )
        found[case] = (*sizes, stages) in LORA_DAILY and context == 1
    return found


_STAGES = Grid(1, 1, 2, 1, pipeline=2, order=(*AXES, "pipeline"))
SPLIT_DAILY = ((1, 1, 2, 1, 2), (1, 1, 1, 1, 4))


def split_cases() -> dict[Case, bool]:
    """Cases whose stages split the backward pass, on every grid of up to 8 ranks with 2 stages or more; whether it is
    daily."""
    rows = [tuple(map(int, row)) for world in WORLDS for row in factorizations(world, axes=5) if row[-1] > 1]
    chance, found = random.Random(CHANCE), dict[Case, bool]()
    for *sizes, stages in rows:
        share, chunks = BATCH // (sizes[2] * sizes[3]), chance.choice([1, 2]) if stages <= 4 else 1
        counts = [one for one in divisors(share) if stages <= one <= 8 and (chunks == 1 or one % stages == 0)]
        if not counts:
            continue
        micro_batch = share // chance.choice(counts)
        case = Case(
            training=chance.choice(DEEP_TRAININGS),
            grid=Grid(*sizes, pipeline=stages, order=(*chance.sample(AXES, len(AXES)), "pipeline")),
            micro_batch=micro_batch,
            recompute=chance.choice(("none", "selective", "full", "core_attn,mlp")),
            kept_layers=chance.choice([0, 2]),
            split=micro_batch % 2 == 0 and chance.random() < 0.5,
            sharded=chance.random() < 0.5,
            chunks=chunks,
            parts=_uneven(stages * chunks, chance) if chance.random() < 0.5 else None,
            order="zb1p",
        )
        found[case] = (*sizes, stages) in SPLIT_DAILY
    staged = {"order": (*AXES, "pipeline"), "pipeline": 2}
    for training, grid, split in (
        (MOE_TRAININGS[0], Grid(z=2, expert=2, **staged), True),
        (MOE_TRAININGS[1], Grid(x=2, data=2, expert=2, **staged), False),
        (DELTA_TRAININGS[0], Grid(y=2, **staged), True),
        (OPTIMIZER_TRAININGS[2], Grid(z=2, **staged), False),
    ):
        found[Case(training, grid, BATCH // (grid.z * grid.data) // 3, "none", 0, split=split, order="zb1p")] = False
    return found


SETS = (
    Case(TRAININGS[0], Grid(), micro_batch=8, recompute="layernorm,mlp", kept_layers=0),
    Case(TRAININGS[5], Grid(2, 1, 2, 1), micro_batch=6, recompute="mlp", kept_layers=1, split=True, recompute_layers=1),
    Case(TRAININGS[3], Grid(2, 2, 1, 1), micro_batch=12, recompute="core_attn,mlp_act", kept_layers=0),
    Case(
        TRAININGS[6], Grid(1, 2, 2, 1), micro_batch=6, recompute="full", kept_layers=1, split=True, recompute_layers=1
    ),
    Case(LORA_TRAININGS[0], Grid(2, 1, 2, 1), micro_batch=6, recompute="full", kept_layers=1, split=True),
    Case(LORA_TRAININGS[2], Grid(1, 2, 1, 1), micro_batch=12, recompute="mlp", kept_layers=0),
    Case(DEEP_TRAININGS[2], _STAGES, micro_batch=3, recompute="full", kept_layers=3, chunks=2, recompute_layers=2),
    Case(DEEP_TRAININGS[0], _STAGES, 6, "core_attn,mlp", 9, split=True, parts=(9, 7), recompute_layers=8),
    Case(DEEP_TRAININGS[1], _STAGES, 3, "selective", 1, sharded=True, chunks=2, parts=(3, 5, 4, 4), recompute_layers=4),
)
"""Recompute sets, on all blocks and on the first of each chunk, of which some are not resharded."""


def _candidate(grid: Grid, chance: random.Random) -> Case:
    """A case of a grid; stages are the outermost axis or the innermost, perhaps interleaved or of unequal depth."""
    sizes, stages = (grid.x, grid.y, grid.z, grid.data), grid.pipeline
    share, chunks, parts = BATCH // (grid.z * grid.data), 1, None
    order = list(chance.choice(distinct_orders(sizes)) if max(sizes) > 1 else PAPER_ORDER)
    counts = [count for count in divisors(share) if count <= MOST_ACCUMULATION.get(grid.world, 0)]
    if stages > 1:
        order.insert(chance.choice([0, len(order), len(order)]), "pipeline")
        counts = [count for count in divisors(share) if count <= 8]
        whole = [count for count in counts if count % stages == 0]
        if whole and stages * 2 <= DEEP.layers and chance.random() < 0.4:
            chunks, counts = 2, whole
        if chance.random() < 0.5:
            parts = _uneven(stages * chunks, chance)
    micro_batch = share // chance.choice(counts)
    trainings = DEEP_TRAININGS if stages > 1 else [one for one in TRAININGS if one.kv_heads % grid.x == 0]
    return Case(
        training=chance.choice(trainings),
        grid=Grid(*sizes, pipeline=stages, order=tuple(order)),
        micro_batch=micro_batch,
        recompute=chance.choice(RECOMPUTES),
        kept_layers=chance.choice([0, 1, 2]),
        split=micro_batch % 2 == 0 and chance.random() < 0.5,
        sharded=chance.random() < 0.5,
        chunks=chunks,
        parts=parts,
    )


def _uneven(count: int, chance: random.Random) -> tuple[int, ...] | None:
    """Sixteen layers over so many parts, not evenly; None where each has one."""
    parts = list(split_layers(DEEP.layers, parts=count))
    deep = [part for part, layers in enumerate(parts) if layers > 1]
    if not deep:
        return None
    parts[chance.choice(deep)] -= 1
    parts[chance.randrange(count)] += 1
    return tuple(parts)
