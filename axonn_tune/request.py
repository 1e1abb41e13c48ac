"""What is asked of a search: every option once, with its type, bounds, help, group and other names.

The command line makes its options of the fields of `Request`, the Python functions take them as keywords, and the
search reads their values: a new option is one field. Imports nothing but errors and names, so that `--help` is fast.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from axonn_tune.errors import UsageError, suggest
from axonn_tune.recompute import MODULES, RECOMPUTES, Recompute, parse_recompute
from axonn_tune.vocabulary import (
    ADAPTER_TYPES,
    AUTO,
    CUDA_GRAPHS,
    DEFAULT_MACHINE,
    DISPATCHERS,
    LARGEST_SIZE,
    MOMENT_BYTES,
    MOST_TIMES,
    OPTIMIZERS,
    OVERLAPS,
    PACKINGS,
    PIPELINE_ORDERS,
    PRECISIONS,
    TUNES,
    AdapterType,
    CudaGraphs,
    Moments,
    Overlap,
    Packing,
    PipelineOrder,
    Precision,
    Tune,
)

if TYPE_CHECKING:
    from axonn_tune.frameworks.description import Framework
    from axonn_tune.specs.catalog import MachineLike, ModelLike

RankBy: TypeAlias = Literal["communication", "exposed", "iteration"]
Cost: TypeAlias = Literal["alpha-beta", "paper", "paper-released", "paper-mended"]
COSTS: tuple[Cost, ...] = get_args(Cost)
ALPHA_BETA: Cost = "alpha-beta"
"""Our own cost model."""
MIN: Literal["min"] = "min"
"""In place of a number of GPUs: the smallest on which the model trains."""
Settings: TypeAlias = Mapping[str, object] | Sequence[str]
"""Changed values by their dotted keys, `{"machine.accelerator.memory_gib": 80}`, or as `KEY=VALUE` texts."""

DEFAULT_TOP = 10
"""Rows of a ranking that are listed, with exact steps, unless more are asked for."""
SEARCHING = ("search", "explain", "sweep", "compare", "validate", "regress")
"""Commands that search."""
_RANKING = tuple(name for name in SEARCHING if name != "compare")
_MOST_TOKENS = 1e18
Kind: TypeAlias = Literal["count", "choice", "flag", "switch", "name", "text"]


@dataclass(frozen=True, kw_only=True)
class Option:
    """How one option is written, checked and explained.

    kind: count, a whole number from `least`; choice, one of `choices`; flag, given or not; switch, yes, no or neither;
    name, of a document or framework; text. several: may be repeated. alone: its value if it is given without one.
    read: makes a value of what was given. also: frameworks' names. beside: states a fact that a command file may leave
    out, so that it goes with --from-command. commands: those that have it.
    """

    group: str
    words: str
    kind: Kind
    default: Any = None
    shown: str | None = None
    choices: tuple[str, ...] = ()
    least: int = 1
    several: bool = False
    alone: str | bool | None = None
    read: Callable[[Any], Any] | None = None
    also: tuple[str, ...] = ()
    beside: bool = False
    commands: tuple[str, ...] = SEARCHING

    def checked(self, name: str, value: Any) -> Any:  # noqa: ANN401 - whatever was given
        """The value as a search takes it; UsageError for one that it cannot be, with the nearest that it can."""
        if isinstance(value, bool) and self.alone is not None:
            value = self.alone if value else None
        if value is None or value is self.default:
            return self.default
        if self.several and self.choices:
            known = self.choices if self.alone is None else (*self.choices, self.alone)
            return tuple(_chosen(name, one, known) for one in ((value,) if isinstance(value, str) else value))
        if self.read is not None:
            return self.read(value)
        if self.kind == "count" and value is not self.alone and value not in self.choices:
            return whole(name, value, least=self.least)
        return _chosen(name, value, self.choices) if self.choices else value


def _chosen(name: str, value: Any, known: Sequence[Any]) -> Any:  # noqa: ANN401 - a text of a Literal
    if value in known:
        return value
    raise UsageError(f"{name}={value!r}{suggest(str(value), known)}: known: {', '.join(known)}")


def flag(name: str) -> str:
    """An option as the command line has it: `--micro-batch`."""
    return f"--{name.replace('_', '-')}"


def whole(name: str, value: int, *, least: int = 1) -> int:
    """A whole number that is large enough; UsageError for anything else. NumPy's integers are taken."""
    try:
        number = value.__index__()
    except AttributeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number <= LARGEST_SIZE:
        raise UsageError(f"{name}={value!r}: must be a whole number from {least} to {LARGEST_SIZE:,}")
    return number


_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([KMBT]?)", flags=re.IGNORECASE)


def parse_tokens(tokens: int | str) -> int:
    """Tokens of a whole training: a number, or a text such as `300B`, `1.5T` or `1.5e12`; UsageError for another."""
    match = _TOKENS.fullmatch(str(tokens).replace(",", "").replace("_", "").strip())
    scale = 10.0 ** (3 * " KMBT".index(match[2].upper() or " ")) if match else 0.0
    count = float(match[1]) * scale if match else 0.0
    if not 1.0 <= count <= _MOST_TOKENS:
        raise UsageError(f"--tokens-total {tokens}: give a number of tokens such as 300B, 1.5T or 1.5e12")
    return round(count)


def _assignments(settings: Settings) -> tuple[str, ...]:
    """Changed values as the `KEY=VALUE` texts of `--set`; a text value is read as YAML, as it is there."""
    if isinstance(settings, str):
        raise UsageError(f"set={settings!r}: give a mapping, {{'machine.accelerator.memory_gib': 80}}, or a list")
    if not isinstance(settings, Mapping):
        return tuple(settings)

    def as_yaml(value: object) -> str:
        if value is None or isinstance(value, str):
            return value or ""
        # NumPy's scalars are none of JSON's.
        return json.dumps(value, default=lambda other: other.item(), ensure_ascii=False)

    return tuple(f"{key}={as_yaml(value)}" for key, value in settings.items())


def _layout(text: str) -> str:
    """The text of a pipeline layout; UsageError for what is none, whatever the model."""
    # Imported here: most calls have no layout of stages, and start-up time is theirs.
    from axonn_tune.stages import parse_layout

    parse_layout(text)
    return text


def _number(text: float | str, option: str, *, least: float, most: float) -> float:
    """A number of an option; UsageError for what is none or out of range, with the nearest."""
    try:
        number = float(text) if str(text).isascii() else math.nan
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        near = least if number < least or math.isnan(number) else most
        raise UsageError(f"{option} {text}: must be a number from {least:g} to {most:g}; nearest valid: {near:g}")
    return number


def _imbalance(text: float | str) -> float:
    """A token imbalance of 1 or more."""
    return _number(text, "--imbalance", least=1.0, most=MOST_TIMES)


def _price(text: float | str) -> float:
    """A price of a GPU-hour."""
    return _number(text, "--price", least=0.001, most=1e6)


def _names(option: str, given: object) -> tuple[str, ...]:
    """Names joined by commas, or in a sequence."""
    names = given.split(",") if isinstance(given, str) else given
    found = [name.strip() for name in names if isinstance(name, str)] if isinstance(names, Sequence) else []
    if not isinstance(names, Sequence) or len(found) < len(names):
        raise UsageError(f"{option}={given!r:.40}: give names, as 'a,b' or ['a', 'b']")
    return tuple(found)


def _recompute(recompute: str) -> Recompute:
    try:
        return parse_recompute(recompute)
    except ValueError as error:
        raise UsageError(f"--recompute {recompute}: {error}") from None


_WORKLOAD, _HARDWARE, _CONSTRAINTS, _OVERLAP, _RANK = "Workload", "Hardware", "Constraints", "Overlap", "Ranking"
GROUPS = (_WORKLOAD, _HARDWARE, _CONSTRAINTS, _OVERLAP, _RANK)
"""Headings of the help of commands that search, in this order."""


def _option(group: str, words: str, kind: Kind, **settings: Any) -> Any:  # noqa: ANN401 - a field
    option = Option(group=group, words=words, kind=kind, **settings)
    return field(default=option.default, metadata={"option": option})


def _count(group: str, words: str, **settings: Any) -> Any:  # noqa: ANN401 - a field
    return _option(group, words, "count", **{"shown": "N", **settings})


def _axis(name: str) -> Any:  # noqa: ANN401 - a field
    return _count(_CONSTRAINTS, f"Only grids with this size of axis {name}.")


@dataclass(frozen=True)
class Request:
    """Options of everything that searches; each may be left out, or be None. Values are checked when it is made.

    A framework's own names of axes are keywords of the functions, too: `tp=8, pp=4`, `dp_shard=16`,
    `tensor_model_parallel_size=8`. no_overlap: "all" or True for none. pipeline: True to search stages, too.
    UsageError for a value that an option cannot have.
    """

    model: ModelLike | None = _option(
        _WORKLOAD,
        "Model: a name from `axonn-tune models list`, or a YAML file.",
        "name",
        shown="NAME|FILE",
        beside=True,
    )
    gpus: int | Literal["min"] | None = _count(
        _HARDWARE,
        "Number of GPUs; min, of search, explain and sweep: the smallest on which the model trains, in whole nodes or "
        "part of one.",
        beside=True,
        choices=(MIN,),
        shown="N|min",
    )
    _: KW_ONLY
    batch: int | None = _count(
        _WORKLOAD,
        "Global batch size, in sequences. Default: the model's.",
        also=("gbs", "global_batch_size"),
        beside=True,
    )
    seq: int | None = _count(
        _WORKLOAD, "Tokens in a sequence. Default: the model's.", also=("seq_len", "seq_length"), beside=True
    )
    lengths: str | Sequence[int] | None = _option(
        _WORKLOAD,
        "Lengths of the sequences of a data set, which --seq cuts: squad, tulu, their mean and 90th percentile "
        "(180:400), or a file of lengths, one a line or a JSON list. Default: all have --seq tokens.",
        "text",
        shown="DATA",
        beside=True,
    )
    packing: Packing | None = _option(
        _WORKLOAD,
        "How a batch holds sequences that differ in length: packed (THD: packs filled to --seq, which --batch counts), "
        "padding-free (those of a micro-batch flattened), padded (to the longest of a micro-batch). Default: "
        "packed.",
        "choice",
        choices=PACKINGS,
        beside=True,
    )
    precision: Precision | Literal["auto"] | None = _option(
        _WORKLOAD,
        "Number format; below 16 bits that of linear layers and experts, beside BF16. auto: bf16 and each that "
        "framework and accelerator have, in one ranking. Default: bf16.",
        "choice",
        choices=(*PRECISIONS, AUTO),
        beside=True,
    )
    framework: str | Framework | None = _option(
        _WORKLOAD,
        "Framework whose layouts are ranked, such as megatron-core, torchtitan, fsdp, deepspeed, axonn. Its "
        "own names pin axes too: --tp 8 --pp 4, --dp-shard 16. Default: axonn-tune, the bundled runtime.",
        "name",
        shown="NAME",
        beside=True,
    )
    weak: bool = _option(
        _WORKLOAD,
        "Weak scaling: the batch is for the first count, and grows with the others.",
        "flag",
        default=False,
        commands=("sweep",),
    )
    over: str | None = _option(
        _CONSTRAINTS,
        "Sizes of an axis too, by the framework's name: ep for all that divide the experts, or tp=1..8x2.",
        "text",
        shown="AXIS[=LIST]",
        commands=("sweep",),
    )
    set: Settings = _option(
        _WORKLOAD,
        "Change one value of the model, machine or workload, as in machine.accelerator.memory_gib=80, or of the "
        "framework's step, as in step.sequence_parallel=false. May be repeated.",
        "text",
        default=(),
        shown="KEY=VALUE",
        several=True,
        read=_assignments,
        beside=True,
    )
    shard_optimizer: bool | None = _option(
        _WORKLOAD,
        "Shard FP32 master weights and optimizer states over the data axis (ZeRO-1). Default: no.",
        "switch",
    )
    grad_reduce_in_bf16: bool = _option(
        _WORKLOAD,
        "Accumulate and reduce gradients in BF16. Default: as the framework does.",
        "flag",
        default=False,
    )
    optimizer: str | None = _option(
        _WORKLOAD,
        f"Optimizer: {', '.join(OPTIMIZERS)}. Default: the framework's, adamw. auto: a search with that says step "
        "and memory of the best layout with each that the framework has.",
        "choice",
        shown="NAME|auto",
        choices=(*OPTIMIZERS, AUTO),
        beside=True,
    )
    use_precision_aware_optimizer: Moments | None = _option(
        _WORKLOAD,
        "Optimizer that keeps moments in this type, FP32 if none is named, and of master weights only the bits that "
        f"BF16 weights lack: {', '.join(MOMENT_BYTES)}.",
        "choice",
        shown="[TYPE]",
        choices=tuple(MOMENT_BYTES),
        alone="fp32",
    )
    cuda_graphs: CudaGraphs | Sequence[CudaGraphs | Literal["all"]] = _option(
        _WORKLOAD,
        "Capture this in CUDA graphs, so that the host launches none of it; without a scope, all that the framework "
        f"captures. May be repeated: {', '.join(CUDA_GRAPHS)}. Default: none.",
        "choice",
        default=(),
        shown="[SCOPE]",
        choices=CUDA_GRAPHS,
        several=True,
        alone="all",
    )
    dispatcher: str | None = _option(
        _WORKLOAD,
        f"How tokens reach their experts: {', '.join(DISPATCHERS)}. Default: auto: alltoall over up to 8 ranks "
        "of a node, hybridep in an NVLink domain of a rack, else deepep, of those that the framework has; with EP 1 "
        "a search compares.",
        "choice",
        shown="NAME|auto",
        choices=("auto", *DISPATCHERS),
        beside=True,
    )
    imbalance: float | str | None = _option(
        _WORKLOAD,
        "Tokens of the rank with most over the mean; 1: forced load balancing. Default: that of natural routing, by EP "
        "and tokens of a micro-batch, whose spread is in the interval; memory must hold more.",
        "text",
        shown="F",
        read=_imbalance,
        beside=True,
    )
    tune: Tune | None = _option(
        _WORKLOAD,
        "What trains: full, all of the model; lora, qlora (base in 4 bits), dora: adapters beside it; head: the LM "
        "head alone. Default: full.",
        "choice",
        choices=TUNES,
        beside=True,
    )
    lora_rank: int | None = _count(_WORKLOAD, "Rank of adapters. Default: the framework's tool's.", beside=True)
    lora_targets: str | Sequence[str] | None = _option(
        _WORKLOAD,
        "Linear layers with adapters, by the tool's names: q_proj,v_proj or linear_qkv,linear_proj. Default: the "
        "tool's.",
        "text",
        shown="NAMES",
        read=partial(_names, "lora_targets"),
        beside=True,
    )
    lora_dtype: AdapterType | None = _option(
        _WORKLOAD, "Type of adapters. Default: the tool's.", "choice", choices=ADAPTER_TYPES, beside=True
    )
    tokens_total: int | str | None = _option(
        _WORKLOAD,
        "Tokens of the whole training, such as 1.5T: adds days, GPU-hours, money and energy, with what failures and "
        "checkpoints take of them, and their 80% interval.",
        "text",
        shown="N",
        read=parse_tokens,
        beside=True,
        commands=("search", "explain", "sweep", "compare"),
    )
    price: float | str | None = _option(
        _HARDWARE,
        "Price of a GPU-hour, for the cost with --tokens-total. Default: the machine's, if it states one.",
        "text",
        shown="F",
        read=_price,
        beside=True,
        commands=("search", "explain", "sweep", "compare"),
    )
    machine: MachineLike | None = _option(
        _HARDWARE,
        f"Machine: a name from `axonn-tune machines list`, or a YAML file. Default: {DEFAULT_MACHINE}.",
        "name",
        shown="NAME|FILE",
        beside=True,
    )
    x: int | None = _axis("x")
    y: int | None = _axis("y")
    z: int | None = _axis("z")
    data: int | None = _axis("data")
    context: int | None = _axis("context")
    expert: int | None = _axis("expert")
    expert_tensor: int | None = _axis("expert_tensor")
    expert_z: int | None = _axis("expert_z")
    pipeline: int | bool | None = _count(
        _CONSTRAINTS,
        "Search pipeline stages too, or only N stages. Default for other frameworks; N = 1: no stages.",
        shown="[N]",
        alone=True,
    )
    chunks: int | None = _count(_CONSTRAINTS, "Only this number of chunks per pipeline stage (interleaving).")
    pipeline_layout: str | None = _option(
        _CONSTRAINTS,
        "Only this layout of layers over model parts, as Megatron-Core writes it: 'Et*3|(tt|)*29L'; chunk c of "
        "stage s is part c * stages + s.",
        "text",
        shown="LAYOUT",
        read=_layout,
        also=("pipeline_model_parallel_layout",),
    )
    pipeline_schedule: PipelineOrder | None = _option(
        _CONSTRAINTS,
        f"Only this order of passes of pipeline stages: {', '.join(PIPELINE_ORDERS)}; all but the first, which is "
        "also interleaved, split the backward pass. Default: a search compares those that the framework has; with the "
        "bundled runtime it has 1f1b alone.",
        "choice",
        shown="NAME",
        choices=PIPELINE_ORDERS,
        beside=True,
    )
    order: str | Sequence[str] | None = _option(
        _CONSTRAINTS,
        "Only this rank order, fastest-varying axis first: x,y,z,data. Axes left out, as in tables those of "
        "size 1, come last.",
        "text",
        shown="AXES",
        read=partial(_names, "order"),
    )
    recompute: Recompute | None = _option(
        _CONSTRAINTS,
        "Only this activation recomputation (checkpointing): none, full, selective for the framework's own choice, or "
        f"modules joined by commas: {', '.join(MODULES)}.",
        "text",
        shown="SET",
        choices=RECOMPUTES,
        read=_recompute,
    )
    recompute_layers: int | None = _count(
        _CONSTRAINTS,
        "Recompute in the first N layers of each chunk of a pipeline stage. Default: in as few as memory needs; with "
        "--recompute in all.",
    )
    micro_batch: int | None = _count(
        _CONSTRAINTS,
        "Only this micro-batch, in sequences of one rank.",
        also=("mbs", "micro_batch_size"),
        beside=True,
    )
    kept_layers: int | None = _count(
        _CONSTRAINTS, "Layers not resharded after forward. Default: as many as fit.", least=0
    )
    overlap: Overlap | Sequence[Overlap] = _option(
        _OVERLAP,
        f"Overlap only this; may be repeated: {', '.join(OVERLAPS)}. Default: everything.",
        "choice",
        default=(),
        shown="NAME",
        choices=OVERLAPS,
        several=True,
    )
    no_overlap: str | Sequence[str] | bool = _option(
        _OVERLAP,
        "Do not overlap this; without a name, no overlap at all. May be repeated.",
        "choice",
        default=(),
        shown="[NAME]",
        choices=OVERLAPS,
        several=True,
        alone="all",
    )
    expert_overlap: bool | None = _option(
        _OVERLAP,
        "Run a forward beside a backward pass of another micro-batch, dispatch and combine of each behind computation "
        "of the other, where EP is above 1 and stages are interleaved or there is one. Default: a search compares "
        "both.",
        "switch",
        beside=True,
    )
    split_micro_batch: bool = _option(
        _OVERLAP,
        "Two-batch overlap: interleave two half micro-batches, one's all-reduce behind the other's GEMMs.",
        "flag",
        default=False,
    )
    rank_by: RankBy | Literal["step"] | None = _option(
        _RANK,
        "Time to rank by: all communication, exposed communication, or the whole step (iteration is another word "
        "for it). Default: communication; with --pipeline and for other frameworks, step.",
        "choice",
        choices=("communication", "exposed", "step", "iteration"),
        commands=_RANKING,
    )
    cost: Cost | Sequence[Cost] = _option(
        _RANK,
        "Cost model to rank by. May be repeated: the first ranks, the others' ranks are extra columns.",
        "choice",
        default=(ALPHA_BETA,),
        choices=COSTS,
        several=True,
        commands=("search",),
    )
    top: int = _count(_RANK, "Layouts to rank and list; 0: all.", least=0, default=DEFAULT_TOP, commands=("search",))
    variants: bool = _option(
        _RANK, "List every candidate, not only the best of each layout.", "flag", default=False, commands=("search",)
    )
    same_kernels: bool = _option(
        _RANK,
        "Ideal kernels for all, which compares layouts and schedules. Default: each framework's own software numbers.",
        "flag",
        default=False,
        beside=True,
        commands=("compare",),
    )
    pick: int = _count(_RANK, "Row of the ranking to explain.", default=1, shown=None, commands=("explain",))

    def __post_init__(self) -> None:
        """Check each value, and take it as a search does."""
        for name, option in OPTIONS.items():
            object.__setattr__(self, name, option.checked(name, getattr(self, name)))

    @property
    def pins(self) -> dict[str, Any]:
        """What restricts the layouts, by option."""
        found = {name: getattr(self, name) for name, option in OPTIONS.items() if option.group == _CONSTRAINTS}
        return {name: value for name, value in found.items() if value is not None and value is not True}

    @property
    def axes(self) -> dict[str, int]:
        """Pinned sizes of axes."""
        return {name: size for name, size in self.pins.items() if name in _AXES}

    @property
    def graphed_layers(self) -> bool:
        """Whether CUDA graphs capture layer by layer."""
        return bool({*self.cuda_graphs} - {"full_iteration"})

    def without_pins(self, *kept: str) -> Request:
        """The same without restrictions of the layouts but those kept."""
        return replace(self, **dict[str, Any](dict.fromkeys(self.pins.keys() - {*kept})))


OPTIONS: dict[str, Option] = {one.name: one.metadata["option"] for one in fields(Request)}
"""Every option by its name."""
_AXES = ("x", "y", "z", "data", "context", "pipeline", "expert", "expert_tensor", "expert_z")


def options_of(command: str) -> dict[str, Option]:
    """The options that a command has."""
    return {name: option for name, option in OPTIONS.items() if command in option.commands}


NO_REQUEST = Request()
"""Nothing is pinned."""
BESIDE_COMMAND = {name: option for name, option in OPTIONS.items() if option.beside}
"""Options that state what a command file may not, and so go with it."""
SearchOptions = Options = Request
"""Earlier names, kept for those who import them."""
