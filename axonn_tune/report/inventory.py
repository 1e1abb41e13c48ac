"""What is at hand: tables and JSON of models and machines, what this environment can do, what a calibration found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from axonn_tune.program.count import active_parameters, parameters
from axonn_tune.report.output import Column, Json, Table, fields_of, json_text, text_table, words
from axonn_tune.specs.model import Model
from axonn_tune.specs.numbers import told
from axonn_tune.units import counted, show_seconds
from axonn_tune.vocabulary import VERSION

if TYPE_CHECKING:
    from axonn_tune.calibration.profile import Calibration
    from axonn_tune.launch.host import HostCheck, State
    from axonn_tune.specs.catalog import Loaded
    from axonn_tune.specs.machine import Machine, Tier

DOCTOR_SCHEMA = "axonn-tune/doctor/1"


_NAME = words("name", "name")
_SIZES, _DEFAULTS = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab"), ("global_batch", "sequence_length")
_LABELS = {"kv_heads": "kv heads", "vocab": "vocabulary", "global_batch": "batch", "sequence_length": "sequence"}
_MODEL_COLUMNS = (
    *(
        Column(key, label, show=lambda parameters: show_count(parameters))
        for key, label in (("parameters", "parameters"), ("active_parameters", "active"))
    ),
    words("family", "family"),
    *(Column(key, _LABELS.get(key, key), show=str) for key in (*_SIZES, *_DEFAULTS)),
    words("pattern", "layer types"),
)
_MACHINE_COLUMNS = (
    words("accelerator", "accelerator"),
    Column("memory_gib", "memory, GiB", show="{:g}".format),
    Column("bf16_tflop_per_s", "bf16, TFLOP/s", show="{:g}".format),
    Column("ranks_per_node", "ranks/node", show=str),
    words("network", "network, one way, from inner to outer"),
    words("library", "library"),
)
_MACHINE_FIELDS = ("accelerator", "memory_gib", "bf16_tflop_per_s", "ranks_per_node", "tiers", "outermost_gb_per_s")


def documents_table(kind: str, documents: Sequence[tuple[str, Loaded[Any]]]) -> Table:
    """One row per document, under the name it is found by; as wide as it needs: no word of it is ever broken."""
    columns, read = (_MODEL_COLUMNS, _model_row) if kind == "model" else (_MACHINE_COLUMNS, _machine_row)
    fields = [column.key for column in columns] if kind == "model" else (*_MACHINE_FIELDS, "library")
    rows = [{"name": name, **read(loaded.document)} for name, loaded in documents]
    named = {column.key: column for column in (_NAME, *columns)}
    return Table(named, rows, list(named), ("name", *fields))


def _model_row(model: Model) -> Json:
    named = {"pattern": model.pattern or "".join(model.layer_types)}
    return {**_counts(model), **fields_of(model, ("family", *_SIZES)), **fields_of(model.defaults, _DEFAULTS), **named}


def _counts(model: Model) -> Json:
    return {"parameters": parameters(model), "active_parameters": active_parameters(model)}


def _machine_row(machine: Machine) -> Json:
    return {
        "accelerator": machine.accelerator.name,
        "memory_gib": machine.accelerator.memory_gib,
        "bf16_tflop_per_s": machine.accelerator.peak_tflops.get("bf16"),
        "ranks_per_node": machine.launcher.ranks_per_node,
        "network": ", ".join(_tiers(machine.tiers)),
        "tiers": ", ".join(tier.name for tier in machine.tiers),
        "outermost_gb_per_s": machine.tiers[-1].bandwidth_gb_per_s,
        "library": f"{machine.library.name} {machine.library.version}",
    }


def documents_json(kind: str, documents: Sequence[tuple[str, Loaded[Any]]]) -> Json:
    """All documents of a kind with name, file and hash, ready for `json.dumps`."""
    entries = [{"name": name, **origin_json(loaded)} for name, loaded in documents]
    return {"schema": f"axonn-tune/{kind}-list/1", f"{kind}s": entries}


def origin_json(loaded: Loaded[Any]) -> Json:
    """A document with the file it came from and its hash."""
    document = loaded.document.model_dump(mode="json", by_alias=True)
    size = _counts(loaded.document) if isinstance(loaded.document, Model) else {}
    if size and size["active_parameters"] == size["parameters"]:
        del size["active_parameters"]
    return {"path": str(loaded.path), "sha256": loaded.sha256, **size, "document": document}


def origin_lines(loaded: Loaded[Any]) -> list[str]:
    """The same as comment lines for a document shown as YAML."""
    followed = (f"Assumed: {words}." for words in told(loaded.consequences, kept=False))
    lines = [f"From {loaded.path}", f"sha256 {loaded.sha256}", *followed]
    return [*lines, *_model_lines(loaded.document)] if isinstance(loaded.document, Model) else lines


def _model_lines(model: Model) -> Iterator[str]:
    """Parameters, and what each layer type is."""
    total, active = parameters(model), active_parameters(model)
    met = f", {active:,} of a token ({show_count(active)})" if active != total else ""
    yield f"{total:,} parameters ({show_count(total)}){met}"
    for layer, count in model.by_type if model.layer_types else ():
        yield f"{counted(count, 'layer')} {layer.name}: {layer.words}"
    if model.mtp_layers:
        each = " and ".join(model.types[at].name or "the others" for at in model.mtp_types)
        yield f"{counted(model.mtp_layers, 'layer')} of multi-token prediction, each like {each}"


def show_count(count: int) -> str:
    """A count for a person: `76.8 B`, `10.9 M`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= 0.9995 * limit:
            return f"{count / limit:.3g} {unit}"
    return str(count)


def _tiers(tiers: Sequence[Tier]) -> Iterator[str]:
    """Each network level with its bandwidth, and of how many GPUs that is."""
    for number, tier in enumerate(tiers):
        size = "" if tier.ranks is None else f" {tier.ranks} ranks"
        whose = f"{tiers[number - 1].ranks} GPUs" if number else "GPU"
        yield f"{tier.name}{size} {tier.bandwidth_gb_per_s:g} GB/s per {whose}"


_STATES: dict[State, str] = {"ok": "ok", "missing": "missing", "differs": "differs", "noted": ""}
_FINDING = tuple(words(title, title) for title in ("what", "here", "state", "note"))


def doctor_text(findings: Sequence[HostCheck]) -> str:
    """One table under each heading, all with the same columns."""
    rows: list[list[str]] = []
    for number, finding in enumerate(findings):
        if number == 0 or finding.area != findings[number - 1].area:
            rows += [["", "", "", ""], [finding.area.upper(), "", "", ""]]
        rows.append([finding.what, finding.here, _STATES[finding.state], finding.note])
    return text_table(_FINDING, rows)


def doctor_json(findings: Sequence[HostCheck]) -> str:
    """The same by the schema `axonn-tune/doctor/1`."""
    document = {"schema": DOCTOR_SCHEMA, "tool_version": VERSION, "findings": [asdict(one) for one in findings]}
    return json_text(document)


def calibration_lines(done: Calibration) -> Iterator[str]:
    """The numbers that matter, how well they fit, and which points are outliers."""
    machine, accelerator = done.machine, done.machine.accelerator
    yield f"{machine.name}: {machine.description}"
    (precision, peak), *_ = accelerator.peak_tflops.items()
    reached = ", ".join(f"{layout} {share:.0%}" for layout, share in accelerator.matmul_efficiency.items())
    yield (
        f"sustained per rank, all ranks busy: {peak * 1e3:.3g} GFLOP/s in {precision} (large GEMMs {reached}), copies "
        f"{accelerator.memory_bandwidth_gb_per_s:.3g} GB/s, {accelerator.kernel_launch_us:.3g} µs a kernel launch"
    )
    for tier in machine.tiers:
        for kind in tier.collectives or ():
            used = tier.used_by(kind)
            yield (
                f"{tier.name}, {kind}: α {show_seconds(used.latency_s)} a hop, β {used.bandwidth_gb_per_s:.3g} GB/s, "
                f"launch {show_seconds(machine.library.launch_s)}"
            )
    yield from _fit_lines(done)


def _fit_lines(done: Calibration) -> Iterator[str]:
    measured, uncertainty = done.machine.measured, done.machine.uncertainty
    assert measured is not None, "calibrate sets it"
    held_out = (
        f"; error on held-out collectives {measured.held_out_error:.1%}" if measured.held_out_error is not None else ""
    )
    yield (
        f"{counted(measured.samples, 'point')}; 80% of collectives within {uncertainty.communication:.0%}, "
        f"of computation within {uncertainty.compute:.0%}{held_out}"
    )
    if measured.outliers:
        yield f"outliers, down-weighted in the fit: {'; '.join(measured.outliers)}"
