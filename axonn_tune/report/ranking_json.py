"""The ranking as JSON: the contract `axonn-tune/ranking/1`. Keys may be added, never renamed."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from axonn_tune import __version__
from axonn_tune.grid import AXES
from axonn_tune.program.dimensions import MFU_CONVENTION
from axonn_tune.ranking.entries import Entry, TermEntry
from axonn_tune.ranking.results import Results
from axonn_tune.report.remarks import remarks
from axonn_tune.specs.catalog import Loaded
from axonn_tune.specs.workload import Workload

SCHEMA = "axonn-tune/ranking/1"
Json: TypeAlias = dict[str, Any]


def ranking_document(results: Results, entries: Sequence[Entry], *, limit_bytes: float) -> Json:
    """The whole document; entries carry their terms if they were listed with them."""
    problem, searched = results.inputs.problem, results.ranked.searched
    return {
        "schema": SCHEMA,
        "tool_version": __version__,
        "gpus": problem.gpus,
        "model": origin(results.inputs.model),
        "machine": origin(results.inputs.machine),
        "workload": problem.workload.model_dump(mode="json", by_alias=True),
        "cost": results.ranked.cost,
        "rank_by": problem.rank_by,
        "memory_limit_bytes": limit_bytes,
        "mfu_convention": MFU_CONVENTION,
        "searched": {
            "grids": searched.grids,
            "candidates": searched.candidates,
            "feasible": searched.feasible,
            "rejected": searched.rejected,
            "seconds": searched.seconds,
        },
        "ties_with_first": results.ranked.ties,
        "remarks": remarks(results),
        "configs": [entry_json(entry, results) for entry in entries],
    }


def to_text(document: Json) -> str:
    """JSON text with every digit; a number that is not finite becomes null, which JSON has instead."""
    try:
        return json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"
    except ValueError:
        return json.dumps(_finite(document), ensure_ascii=False, allow_nan=False) + "\n"


def origin(loaded: Loaded[Any]) -> Json:
    """A document with all its keys, and the file and hash it came from."""
    return {
        **loaded.document.model_dump(mode="json", by_alias=True),
        "path": str(loaded.path),
        "sha256": loaded.sha256,
    }


def entry_json(entry: Entry, results: Results) -> Json:
    """One config of the contract."""
    found = entry_fields(entry, results.inputs.problem.workload)
    if results.others:
        found["ranks"] = {cost: ranks.get(entry.sizes) for cost, ranks in results.others.items()}
    return {**found, "terms": [term_json(term) for term in entry.terms]}


def entry_fields(entry: Entry, workload: Workload) -> Json:
    """One config of the contract, without its terms."""
    return {
        "rank": entry.rank,
        **dict(zip(AXES, entry.sizes, strict=True)),
        "order": None if entry.order is None else ",".join(entry.order),
        "feasible": entry.feasible,
        "rejected_because": list(entry.rejected_because),
        "micro_batch": entry.micro_batch,
        "grad_accumulation": entry.accumulation,
        "recompute": entry.recompute,
        "kept_layers": entry.kept_layers,
        "overlap": list(workload.overlaps),
        "communication_s": entry.communication_s,
        "exposed_communication_s": entry.exposed_communication_s,
        "compute_s": entry.compute_s,
        "iteration_s": entry.iteration_s,
        "memory_bytes": None if entry.memory_bytes is None else int(entry.memory_bytes),
        "tokens_per_s": entry.tokens_per_s,
        "low_s": entry.low_s,
        "high_s": entry.high_s,
        "mfu": entry.mfu,
        "hfu": entry.hfu,
        "tie": entry.tie,
    }


def term_json(term: TermEntry) -> Json:
    """One term of the contract, and how it was priced."""
    return {
        "op": term.op,
        "axis": term.axis,
        "phase": term.phase,
        "layer": term.layer,
        "count": term.count,
        "bytes": int(term.bytes),
        "group": term.group,
        "tier": term.tier,
        "seconds": term.seconds,
        "exposed_s": term.exposed_s,
        "formula": term.formula,
        "algorithm": term.algorithm,
        "protocol": term.protocol,
        "latency_s": term.latency_s,
        "bandwidth_bytes_per_s": term.bandwidth_bytes_per_s,
    }


def _finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
