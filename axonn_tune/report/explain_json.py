"""One configuration explained, as JSON: `axonn-tune/explain/1`."""

from __future__ import annotations

from axonn_tune import __version__
from axonn_tune.cost.breakdown import hidden_behind, hidden_s, work_by_kind
from axonn_tune.report.explain import Subject
from axonn_tune.report.explain_lines import line_sentences
from axonn_tune.report.explain_words import words
from axonn_tune.report.ranking_json import Json, entry_fields, origin, term_json

SCHEMA = "axonn-tune/explain/1"


def explain_document(subject: Subject) -> Json:
    """Everything the tables show, with every digit."""
    inputs, entry, pricing = subject.inputs, subject.entry, subject.pricing
    workload = inputs.problem.workload
    terms = [
        {
            **term_json(listed),
            "hidden_s": hidden_s(term),
            "hidden_behind": hidden_behind(term, workload) or None,
        }
        for listed, term in zip(entry.terms, pricing.terms, strict=True)
    ]
    work = work_by_kind(pricing, workload)
    return {
        "schema": SCHEMA,
        "tool_version": __version__,
        "gpus": inputs.problem.gpus,
        "model": origin(inputs.model),
        "machine": origin(inputs.machine),
        "workload": workload.model_dump(mode="json", by_alias=True),
        "cost": "alpha-beta",
        "words": words(inputs, entry, pricing),
        "config": {**entry_fields(entry, workload), "terms": terms},
        "symbols": pricing.values,
        "lines": line_sentences(inputs.problem, pricing),
        "computation": [
            {"kind": each.kind, "phase": each.phase, "seconds": each.seconds, "flops": each.flops} for each in work
        ],
        "memory": {
            "items": {name: float(size) for name, size in pricing.memory.items},
            "total_bytes": float(pricing.memory.total_bytes),
            "limit_bytes": pricing.memory_limit_bytes,
        },
    }
