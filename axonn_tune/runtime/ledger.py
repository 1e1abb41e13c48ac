"""The ledger: every collective a rank issued, and where that differs from the program.

The program lists the collectives of a step, the ledger those that were issued. They must agree on operation,
axis, phase, layer, bytes and count. If they differ, prediction and execution are not about the same thing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from axonn_tune.grid import split_axes
from axonn_tune.program.dimensions import step_values
from axonn_tune.program.operations import Phase, priced_kind
from axonn_tune.program.step import StepProgram, build_step
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.machine import CollectiveKind
from axonn_tune.specs.traces import term_name

TermName: TypeAlias = tuple[CollectiveKind, str, Phase, str]
"""Operation, axis, phase and layer, which name a collective."""


@dataclass(frozen=True)
class LedgerEntry:
    """A collective as the program describes it too; size_bytes: of the full buffer."""

    op: CollectiveKind
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


def program_of(launch: Launch) -> tuple[StepProgram, dict[str, float]]:
    """The program of one step of a launch config, and the values of its symbols."""
    values = step_values(
        launch.model,
        launch.workload,
        launch.grid.grid(),
        micro_batch=launch.micro_batch,
        kept_layers=launch.kept_layers,
    )
    return build_step(launch.model, launch.workload, recompute=launch.recompute), values


def expected(program: StepProgram, values: Mapping[str, float]) -> Counter[LedgerEntry]:
    """The program's collectives of one rank and step; none over a group of one."""
    counts: Counter[LedgerEntry] = Counter()
    for collective, count in program.collectives():
        calls, kind = round(float(count.evaluate(values))), priced_kind(collective.kind)
        if calls and prod(values[axis] for axis in split_axes(collective.axis)) > 1:
            size = round(float(collective.size_bytes.evaluate(values)))
            counts[LedgerEntry(kind, collective.axis, collective.phase, collective.layer, size)] += calls
    return counts


def compare(ledger: Ledger, program: StepProgram, values: Mapping[str, float], *, steps: int = 1) -> list[str]:
    """Each term whose calls differ from the program's, in words; empty if none does.

    program, values: as by `program_of`.
    """
    planned: dict[TermName, dict[int, int]] = {}
    issued: dict[TermName, dict[int, int]] = {}
    for entry, count in expected(program, values).items():
        planned.setdefault(entry.term, {})[entry.size_bytes] = count * steps
    for entry, count in ledger.counts.items():
        issued.setdefault(entry.term, {})[entry.size_bytes] = count
    return [
        f"{term_name(*term)}: expected {_calls(planned.get(term, {}))}, got {_calls(issued.get(term, {}))}"
        for term in [*planned, *(term for term in issued if term not in planned)]
        if planned.get(term) != issued.get(term)
    ]


def _calls(counts: Mapping[int, int]) -> str:
    """Such as "4 × 1,024 bytes and 1 × 8 bytes"."""
    return " and ".join(f"{count} × {size:,} bytes" for size, count in sorted(counts.items())) or "none"
