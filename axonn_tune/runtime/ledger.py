"""The ledger: every collective that a rank issued, and its differences from the program.

The program lists the collectives of a step, the ledger those that were issued. They must agree on operation,
axis, phase, layer, bytes and count. If they differ, the prediction is of another step than the executed one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from axonn_tune.grid import split_axes
from axonn_tune.program.dimensions import executed_flops, symbol_values
from axonn_tune.program.operations import OpKind, Phase, as_size
from axonn_tune.program.pipeline import messages, model_parts
from axonn_tune.program.step import (
    ONLY,
    Stage,
    StepProgram,
    blocks_by_type,
    blocks_of,
    build_step,
    bundled,
    contents_of,
)
from axonn_tune.program.types.experts import FC1, FC2
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.traces import term_name

TermName: TypeAlias = tuple[OpKind, str, Phase, str]
"""Operation, axis, phase and layer, which name a collective."""


@dataclass(frozen=True)
class LedgerEntry:
    """A collective in the terms of the program; size_bytes: of the full buffer."""

    op: OpKind
    axis: str
    phase: Phase
    layer: str
    size_bytes: int

    @property
    def term(self) -> TermName:
        """The entry without its size."""
        return self.op, self.axis, self.phase, self.layer


@dataclass
class Ledger:
    """Counts of the collectives issued: of each, and of all so far."""

    counts: Counter[LedgerEntry] = field(default_factory=Counter)
    issued: int = 0

    def record(self, entry: LedgerEntry) -> None:
        """Count one call."""
        self.counts[entry] += 1
        self.issued += 1


@dataclass(frozen=True)
class RankProgram:
    """One step of a rank: the program, the values of its symbols, its pipeline stage, and messages it sends.

    natural: tokens go where a router sends them, so that sizes of what is sent of them are expected ones.
    """

    program: StepProgram
    values: Mapping[str, float]
    stage: Stage = ONLY
    messages: int = 0
    natural: bool = False

    @property
    def executed_flops(self) -> float:
        """FLOPs of a step, recompute and padding included."""
        return float(executed_flops(self.program, self.values, self.stage))

    def collectives(self, *, least: int = 2) -> Counter[LedgerEntry]:
        """Collectives and messages of a step, over groups of at least so many ranks."""
        send = self.program.send(scattered=False)
        planned = *self.program.collectives(self.stage), *([(send, as_size(self.messages))] if self.messages else [])
        counts: Counter[LedgerEntry] = Counter()
        for one, count in planned:
            calls, size = (round(float(number.evaluate(self.values))) for number in (count, one.size_bytes))
            # Experts are split over x and y here: the runtime has no such group, not even of one rank.
            if one.axis == "expert_tensor":
                continue
            if calls and size and prod(self.values[axis] for axis in split_axes(one.axis)) >= least:
                counts[LedgerEntry(one.kind, one.axis, one.phase, one.layer, size)] += calls
        return counts


def program_of(launch: Launch, *, stage: int = 0) -> RankProgram:
    """The step of a launch config as a rank of a pipeline stage has it."""
    grid, stages = launch.grid.grid(), launch.grid.pipeline
    parts = model_parts(launch.model.layers, stages=stages, chunks=launch.chunks, given=launch.parts)
    place = Stage(first=stage == 0, last=stage == stages - 1)
    chunks, some = contents_of(launch.model, parts)[stage::stages], launch.recompute_layers
    layers = blocks_by_type(launch.model, chunks)
    balanced, optimizer = launch.load_balancing_loss > 0, launch.optimizer.name
    options = bundled(compiled=launch.compile, balanced=balanced, optimizer=optimizer)
    values = symbol_values(
        *(launch.model, launch.workload, grid),
        micro_batch=launch.micro_batch,
        stage=place,
        layers=layers,
        options=options,
    )
    sent = messages(stage, stages=stages, chunks=launch.chunks, micro_batches=launch.grad_accumulation)
    program = build_step(
        launch.model,
        launch.workload,
        recompute=launch.recompute,
        options=options,
        some=some is not None,
        context=grid.context > 1,
    )
    values |= blocks_of(program, chunks, kept=launch.kept_layers, repeated=some or 0)
    natural = launch.model.has_experts and not (launch.force_load_balancing and _even(launch))
    return RankProgram(program, values, place, sent, natural)


def _even(launch: Launch) -> bool:
    """Whether forced load balancing gives each rank as many tokens of every chunk of a sequence."""
    chunks, ranks = 2 * launch.grid.context if launch.grid.context > 1 else 1, launch.grid.expert
    for layer in launch.model.types:
        if (given := layer.experts) is not None:
            copies = launch.workload.sequence_length // chunks * given.per_token
            blocks = given.count & -given.count
            if copies % given.count and (blocks % ranks or copies % ranks):
                return False
    return True


def compare(ledger: Ledger, program: RankProgram, *, steps: int = 1, least: int = 2) -> list[str]:
    """Each term whose calls differ from the program's, in words; empty if none does.

    least: ranks of the smallest groups that communicate. Of what depends on a router, only the number of calls counts.
    """
    planned: dict[TermName, dict[int, int]] = {}
    issued: dict[TermName, dict[int, int]] = {}
    for entry, count in program.collectives(least=least).items():
        planned.setdefault(entry.term, {})[entry.size_bytes] = count * steps
    for entry, count in ledger.counts.items():
        issued.setdefault(entry.term, {})[entry.size_bytes] = count
    return [
        f"{term_name(*term)}: expected {_calls(planned.get(term, {}))}, got {_calls(issued.get(term, {}))}"
        for term in [*planned, *(term for term in issued if term not in planned)]
        if planned.get(term) != issued.get(term)
        and not (program.natural and of_router(term) and _number(planned, term) == _number(issued, term))
    ]


def routed(ledger: Ledger, program: RankProgram, *, steps: int) -> list[dict[str, str | float]]:
    """Of each term whose size a router decides: calls, expected bytes of each, and those that really were sent."""
    found: dict[TermName, Counter[int]] = {}
    for entry, count in ledger.counts.items():
        if of_router(entry.term):
            found.setdefault(entry.term, Counter())[entry.size_bytes] += count
    expected = {entry.term: entry.size_bytes for entry in program.collectives()}
    rows = list[dict[str, str | float]]()
    for term, calls in found.items():
        name = dict(zip(("op", "axis", "phase", "layer"), term, strict=True))
        sent = sum(size * count for size, count in calls.items()) / calls.total()
        bytes_of = {"expected_bytes": expected.get(term, 0), "mean_bytes": sent, "most_bytes": max(calls)}
        rows.append({**name, "count": calls.total() / steps, **bytes_of})
    return rows


def _number(calls: Mapping[TermName, Mapping[int, int]], term: TermName) -> int:
    return sum(calls.get(term, {}).values())


def of_router(term: TermName) -> bool:
    """Whether the size of a collective depends on where tokens go."""
    op, _, _, layer = term
    return op in ("combine", "all_to_all") or layer.endswith((FC1, FC2))


def _calls(counts: Mapping[int, int]) -> str:
    """Such as "4 × 1,024 bytes and 1 × 8 bytes"."""
    return " and ".join(f"{count} × {size:,} bytes" for size, count in sorted(counts.items())) or "none"
