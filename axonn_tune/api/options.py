"""Options that several functions share, named as those of the command line, and the step from them to a search."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from axonn_tune.errors import UsageError, suggest
from axonn_tune.grid import AXES
from axonn_tune.ranking.choosing import RANK_BY, RankBy
from axonn_tune.ranking.inputs import Choices, WorkloadChoices
from axonn_tune.ranking.space import Limits
from axonn_tune.specs.workload import ELEMENT_SIZES, OVERLAPS, RECOMPUTES, Overlap, Precision, Recompute

if TYPE_CHECKING:
    from axonn_tune.specs.catalog import MachineLike, ModelLike

DEFAULT_MACHINE = "perlmutter"
Cost: TypeAlias = Literal["alpha-beta", "paper", "paper-released", "paper-mended"]
COSTS: tuple[Cost, ...] = ("alpha-beta", "paper", "paper-released", "paper-mended")
Settings: TypeAlias = Mapping[str, object] | Sequence[str]
"""Changed values by their dotted keys, `{"machine.accelerator.memory_gib": 80}`, or as `KEY=VALUE` texts."""


class Options(TypedDict, total=False):
    """Options of every function that searches; each may be left out, or be None.

    seq: tokens in a sequence, of the model unless given. precision: number format, bf16 unless given.
    order: only this order of axes, the fastest-varying rank first, `"x,y,z,data"` or a sequence.
    recompute, micro_batch, kept_layers, x, y, z, data: only candidates with this.
    shard_optimizer: split master weights and optimizer states over the data axis (ZeRO-1).
    split_micro_batch: run each micro-batch as two halves. overlap: overlap just these; no_overlap: all
    but these, `"all"` or True for none. set: changed values of the model, machine or workload.
    """

    seq: int | None
    precision: Precision | None
    order: str | Sequence[str] | None
    recompute: Recompute | None
    micro_batch: int | None
    kept_layers: int | None
    shard_optimizer: bool | None
    split_micro_batch: bool | None
    overlap: Overlap | Sequence[Overlap] | None
    no_overlap: str | Sequence[str] | bool | None
    x: int | None
    y: int | None
    z: int | None
    data: int | None
    set: Settings | None


def make_choices(
    model: ModelLike,
    *,
    gpus: int,
    machine: MachineLike = DEFAULT_MACHINE,
    batch: int | None = None,
    rank_by: RankBy = "communication",
    options: Options,
) -> Choices:
    """What the options ask for; UsageError for a value that cannot be, TypeError for an option there is not."""
    check_names(options)
    overlap, no_overlap = options.get("overlap"), options.get("no_overlap")
    if isinstance(no_overlap, bool):
        no_overlap = "all" if no_overlap else None
    return Choices(
        gpus=whole("gpus", gpus),
        model=model,
        machine=machine,
        workload=WorkloadChoices(
            batch=None if batch is None else whole("batch", batch),
            seq=_whole_or_none("seq", options.get("seq")),
            precision=_one_of("precision", options.get("precision"), tuple(ELEMENT_SIZES)),
            shard_optimizer=options.get("shard_optimizer"),
            split_micro_batch=bool(options.get("split_micro_batch")),
            overlaps=tuple(_one_of("overlap", name, OVERLAPS) for name in _several(overlap)),
            no_overlaps=tuple(_one_of("no_overlap", name, (*OVERLAPS, "all")) for name in _several(no_overlap)),
        ),
        limits=_limits(options),
        rank_by=_one_of("rank_by", rank_by, RANK_BY),
        settings=assignments(options.get("set")),
    )


def check_names(options: Mapping[str, object]) -> None:
    """TypeError, as Python has it, for an option that there is not; with the nearest that there is."""
    known = Options.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"unexpected keyword argument {name!r}{suggest(name, known)}")


def assignments(settings: Settings | None) -> tuple[str, ...]:
    """Changed values as the `KEY=VALUE` texts of `--set`; a text value is read as YAML, as it is there."""
    if settings is None:
        return ()
    if isinstance(settings, Mapping):
        return tuple(f"{key}={_as_yaml(value)}" for key, value in settings.items())
    if isinstance(settings, str):
        raise UsageError(f"set={settings!r}: give a mapping, {{'machine.accelerator.memory_gib': 80}}, or a list")
    return tuple(settings)


def parse_order(order: str | Sequence[str]) -> tuple[str, ...]:
    """A permutation of the axes, given as `y,x,z,data` or as a sequence; UsageError if it is none."""
    axes = tuple(axis.strip() for axis in (order.split(",") if isinstance(order, str) else order))
    if sorted(axes) != sorted(AXES):
        given = order if isinstance(order, str) else ",".join(order)
        raise UsageError(f"{given!r} must name each of x, y, z and data once, as in x,y,z,data")
    return axes


def parse_costs(cost: Cost | Sequence[Cost]) -> tuple[Cost, ...]:
    """One or several cost models; UsageError for one there is not."""
    found = tuple(_one_of("cost", name, COSTS) for name in _several(cost))
    if not found:
        raise UsageError("cost=(): name a cost model to rank by")
    return found


def whole(name: str, value: int, *, least: int = 1) -> int:
    """A whole number that is large enough; UsageError for anything else. NumPy's integers are taken."""
    try:
        number = value.__index__()
    except AttributeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise UsageError(f"{name}={value!r}: must be a whole number from {least}")
    return number


def call_text(function: str, given: Mapping[str, object]) -> str:
    """The call that made a result, for provenance: `axonn_tune.search('80b', gpus=1024)`; defaults left out."""
    shown = [f"{name}={_shown(value)}" for name, value in given.items() if value is not None]
    return f"axonn_tune.{function}({', '.join(shown)})"


def _shown(value: Any) -> str:  # noqa: ANN401 - whatever was given
    """A value as it would be written; a document by its name."""
    if isinstance(value, Path):
        return repr(str(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if hasattr(value, "tolist"):
        return repr(value.tolist())
    name = getattr(getattr(value, "document", value), "name", None)
    return repr(value) if name is None else f"<{name}>"


def _limits(options: Options) -> Limits:
    order = options.get("order")
    sizes: dict[str, int | None] = {
        "x": options.get("x"), "y": options.get("y"), "z": options.get("z"), "data": options.get("data")
    }  # fmt: skip
    kept = options.get("kept_layers")
    return Limits(
        order=None if order is None else parse_order(order),
        recompute=_one_of("recompute", options.get("recompute"), RECOMPUTES),
        micro_batch=_whole_or_none("micro_batch", options.get("micro_batch")),
        kept_layers=None if kept is None else whole("kept_layers", kept, least=0),
        axes={axis: whole(axis, size) for axis, size in sizes.items() if size is not None},
    )


def _whole_or_none(name: str, value: int | None) -> int | None:
    return None if value is None else whole(name, value)


def _one_of(name: str, value: Any, known: Sequence[Any]) -> Any:  # noqa: ANN401 - a text of a Literal or None
    """The value, if it is None or one of those known."""
    if value is None or value in known:
        return value
    raise UsageError(f"{name}={value!r}{suggest(str(value), known)}: known: {', '.join(known)}")


def _several(values: str | Sequence[str] | None) -> Sequence[str]:
    """One value, several or none as a sequence."""
    if values is None:
        return ()
    return (values,) if isinstance(values, str) else values


def _as_yaml(value: object) -> str:
    """A value as YAML has it; text as it is."""
    if value is None or isinstance(value, str):
        return value or ""
    plain: Callable[[Any], Any] = lambda other: other.item()  # noqa: E731 - NumPy's scalars
    return json.dumps(value, default=plain, ensure_ascii=False)
