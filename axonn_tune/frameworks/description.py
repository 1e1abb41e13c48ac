"""Description of a training framework as a value: axes, constraints, a step's options, schedule, software.

A framework is data: the program reads its `StepOptions`, the search reads axes and schedule, the cost model reads the
software's numbers; what starts a `Run` of it is a `Command`. This module prices nothing, and other modules do not
depend on a framework's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, NamedTuple, TypeAlias

from axonn_tune.errors import UsageError
from axonn_tune.frameworks.dispatchers import default_dispatcher
from axonn_tune.frameworks.optimizers import ADAMW
from axonn_tune.frameworks.step import ContextExchange, ExpertOptions, FormatOptions, StepOptions
from axonn_tune.grid import ALL_AXES, AXES, RANK_AXES, WORLD, Grid, split_axes
from axonn_tune.recompute import RECOMPUTES, modules_of
from axonn_tune.specs.machine import LARGEST_NODE, Accelerator, EnvironmentVariable, Machine, Software
from axonn_tune.specs.model import MIXERS, UNWRITTEN, Model
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.vocabulary import CudaGraphs, Overlap, Packing, PipelineOrder, Precision


@dataclass(frozen=True)
class PipelineSchedule:
    """Pipeline schedule of a framework.

    interleaved: several chunks a stage are possible. overlapped: sends overlap with computation, of plain 1F1B and of
    interleaved stages. uneven: stages may differ in layers. equal_chunks: the rule by which all chunks of interleaved
    stages have as many layers; empty where they may differ. layouts: the layers of each part can be told. scattered:
    each rank of x sends its share of an activation, which the receiver gathers. orders: of passes; compared: by a
    search that asks for none; zb1p_chunks: how many `zb1p` has, from and to. autograd: torch's autograd splits backward
    passes, so that the first part's waits as a whole, and what is recomputed is so for each of its halves.
    """

    interleaved: bool = True
    overlapped: bool = False
    overlapped_interleaved: bool = True
    uneven: bool = True
    equal_chunks: str = ""
    layouts: bool = True
    scattered: bool = True
    orders: tuple[PipelineOrder, ...] = ("1f1b",)
    compared: bool = True
    zb1p_chunks: tuple[int, int] = (1, 1)
    autograd: bool = False

    @property
    def free(self) -> bool:
        """Whether stages and chunks can have any number of layers."""
        return self.layouts and self.uneven and not self.equal_chunks


AS_MANY_A_CHUNK = "--num-layers-per-virtual-pipeline-stage gives each chunk as many layers"
"""Rule of Megatron-LM before Megatron-Core had layouts (NVIDIA/Megatron-LM@v3.0, megatron/arguments.py)."""


ADAMW_ALONE: Mapping[str, tuple[Refusal, ...]] = {ADAMW: ()}
"""Optimizers of a framework that has no choice."""


@dataclass(frozen=True)
class FlopCount:
    """How a framework's log counts the FLOPs of a step, for the TFLOP/s of a GPU that it prints.

    log: whose; label: what stands beside the number there; counts: what it counts, where MFU counts otherwise.
    weights: of a block its GEMMs (`gemms`), those of the square GPT block, 12·H² (`square`), those with H² each for
    queries and output and 2 // (heads per KV head) · H² for keys and values (`whole_groups`), or all `parameters` but
    the token embedding; of experts those of a token, and the router only as parameters. scores: counted share of
    attention's S×S scores; windows: in windows those of a causal one. padded: the vocabulary is the padded one.
    repeated: parts counted a fourth time (blocks, scores, head), by kind of recompute. where: axes of which one must be
    above 1, as the program that prints it is not started otherwise; none: always. frozen: of weights that do not train
    no gradient is counted, so 4 FLOPs each; of adapters nothing. samples: attention is that of each sample in a pack.
    tuned: how it counts LoRA of a model on a data set, by both names, where that is otherwise.
    """

    log: str
    label: str
    counts: str
    source: str = field(compare=False)
    weights: Literal["gemms", "square", "whole_groups", "parameters"] = "gemms"
    scores: float = 1.0
    windows: bool = False
    padded: bool = False
    repeated: Mapping[Recompute, tuple[str, ...]] = field(default_factory=dict)
    where: tuple[str, ...] = ()
    frozen: bool = False
    samples: bool = False
    tuned: Mapping[tuple[str, str], FlopCount] = field(default_factory=dict)

    def of(self, model: Model, workload: Workload) -> FlopCount:
        """The rule that holds for a run."""
        tuning, lengths = workload.tuning, workload.lengths
        if tuning is None or lengths is None or tuning.mode != "lora" or lengths.packing != "packed":
            return self
        return self.tuned.get((model.name, lengths.data), self)


class Saver(NamedTuple):
    """An option that takes less memory of a GPU.

    title: what it makes of a run. option, value: of a search, which asks for it; `set` is of a framework's own step,
    for a run that is without it. trades: it takes more of some layouts.
    """

    title: str
    option: str
    value: str | bool
    trades: bool = False

    @property
    def words(self) -> str:
        """As the command line has it."""
        name = f"--{self.option.replace('_', '-')}"
        return name if self.value is True else f"{name} {self.value}"


OWN_SAVERS = (
    Saver("sequence parallelism", "set", "step.sequence_parallel=true"),
    Saver("distributed optimizer", "set", "step.distributed_optimizer=true"),
)
"""Of frameworks whose steps have them."""


def on_host(*states: str) -> Saver:
    """What is in the memory of the host, which takes time."""
    return Saver("optimizer in host memory", "set", f"step.offloaded={','.join(states)}")


FUSED = Software()
"""Kernels as well fused as the programs say, and a host that is never late."""


@dataclass(frozen=True)
class Framework:
    """A training framework.

    name: what `--framework` takes. measured_on: where steps of it on several GPUs were measured, and by whom; "" where
    none was: its predictions are compared with nothing then, and stand apart. axes: those it has, in the rank order
    from the inside that it starts with; permuted: the search may reorder the paper's four. ranked_by: default ranking
    criterion; where that is communication, pipeline stages are searched on demand. software: whose numbers in the file
    of fitted numbers it uses, "" for ideal kernels; the half-widths of its intervals go by the same name.
    hopper_attention: attention uses what Hopper adds, and AITER on CDNA 4. attention_since: before this generation of
    NVIDIA's, and above 16 bits, it writes all scores, since FlashAttention 2 and cuDNN's attention need both
    (Dao-AILab/flash-attention, README; NVIDIA/TransformerEngine,
    pytorch/attention/dot_product_attention/utils.py); "" where torch's own kernel runs anywhere. refused: combinations
    it cannot run. expert_axes: of experts, those it has; expert_software: whose numbers it uses for models
    with them; tensor_without_expert: x splits experts where there is no expert parallelism, and only there.
    keeps_layers: layers can be told not to reshard after forward, all of them or some. recompute_modules: those that a
    recompute set can name; recompute_some: whether a set can be on the first layers of each chunk alone: no, whole
    blocks, or any set. formats: number formats below 16 bits that it is priced in; older_formats: those of them that
    only releases before the one of its commands have; format_options: step options of theirs that it can be told.
    asked_axes: axes that it has on demand alone. precision_aware: it reduces gradients in BF16 on demand, and keeps
    optimizer states in types of their own. savers: options that take less memory, from what changes a run least to what
    changes most; offload: the one that takes time for it. cuda_graphs: scopes that it captures, its default first, each
    with the layouts that it then cannot run. exchanges: of context parallelism, those that a search compares; without
    any, that of its step alone. dispatchers: those it has, of which each layout takes its default; without any, it has
    that of its step alone. overlaps_experts: it can run passes of two micro-batches, or shared experts, beside dispatch
    and
    combine. swaps_heads: context parallelism around recurrences swaps tokens for heads; else there is none.
    streams_in_stage: hyper-connections are in one stage, but for models with these parts, which another branch trains.
    names: its names of axes and `chunks`, in the order of its columns; an axis without a name has ours. As options they
    are written in lower case, with hyphens (`--dp-shard`). explained: what an axis does whose name is not widely
    known. tuner: the tool of `specs/tuning.yaml` by which it trains adapters alone; "" where it trains models whole.
    logged: how its log counts FLOPs; None if it prints none.
    launch: the command of a configuration; None if it is priced only. keys: its table of arguments as CSV, if it is
    none of those under `arguments/`.
    """

    name: str
    title: str
    axes: tuple[str, ...]
    source: str
    measured_on: str = ""
    step: StepOptions = field(default_factory=StepOptions)
    schedule: PipelineSchedule = PipelineSchedule()
    software: str = ""
    permuted: bool = False
    ranked_by: Literal["communication", "iteration"] = "iteration"
    hopper_attention: bool = False
    attention_since: Literal["", "ampere"] = "ampere"
    exchanges: tuple[ContextExchange, ...] = ()
    dispatchers: tuple[str, ...] = ()
    overlaps_experts: bool = False
    swaps_heads: bool = False
    streams_in_stage: tuple[str, ...] | None = None
    refused: tuple[Refusal, ...] = ()
    keeps_layers: bool = True
    expert_axes: tuple[str, ...] = ()
    expert_software: str = ""
    asked_axes: tuple[str, ...] = ()
    tensor_without_expert: bool = False
    recompute_modules: tuple[str, ...] = ()
    recompute_some: Literal["no", "full", "any"] = "no"
    recompute_sets: tuple[Recompute, ...] = RECOMPUTES
    searches_some: bool = True
    precision_aware: bool = False
    savers: tuple[Saver, ...] = OWN_SAVERS
    offload: Saver | None = None
    formats: tuple[Precision, ...] = ()
    older_formats: tuple[Precision, ...] = ()
    format_options: tuple[str, ...] = ()
    packings: tuple[Packing, ...] = ()
    packs_alone: bool = False
    cuda_graphs: Mapping[CudaGraphs, tuple[Refusal, ...]] = field(default_factory=dict, compare=False)
    optimizers: Mapping[str, tuple[Refusal, ...]] = field(default_factory=lambda: ADAMW_ALONE, compare=False)
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    explained: Mapping[str, str] = field(default_factory=dict, compare=False)
    tuner: str = ""
    logged: FlopCount | None = field(default=None, compare=False)
    launch: Callable[[Run], Command] | None = field(default=None, compare=False)
    keys: str = field(default="", compare=False)

    def writes_scores(self, accelerator: Accelerator, precision: Precision) -> str:
        """Why its attention has no kernel without scores on an accelerator or in a precision; "" where it has one."""
        if self.attention_since and precision in ("fp32", "fp64"):
            return f"in {precision}, where FlashAttention and cuDNN's attention take 16 bits or fewer"
        if self.attention_since and accelerator.before(self.attention_since):
            since = self.attention_since.capitalize()
            return f"on {accelerator.name}, where FlashAttention and cuDNN's attention need {since} or newer"
        return ""

    def with_step(self, **changes: object) -> Framework:
        """The same framework with other step options; an exchange or dispatcher that is named is the only one."""
        exchanges = () if "context_exchange" in changes else self.exchanges
        dispatchers = () if "dispatcher" in changes else self.dispatchers
        step = replace(self.step, **changes)  # type: ignore[arg-type]
        return replace(self, step=step, exchanges=exchanges, dispatchers=dispatchers)

    @property
    def searches_stages(self) -> bool:
        """Whether a search has pipeline stages without being asked for them."""
        return self.ranked_by == "iteration" and "pipeline" in self.axes

    def dispatcher_over(self, ranks: int, domain: int | None) -> str:
        """The dispatcher of experts over so many ranks: the one asked for, or the default on a machine whose innermost
        domain has so many ranks."""
        return default_dispatcher(self.dispatchers, ranks=ranks, domain=domain) or self.step.dispatcher

    def compared_dispatchers(self, ranks: int, tensor: int, domain: int | None) -> tuple[str, ...]:
        """What a search compares for experts over so many ranks, each split over `tensor`: the default or the one asked
        for. Where each rank has all experts and sends no token, an all-gather permutes them once, an all-to-all twice;
        and if they are split, one that counts ranks sends no counts and probabilities beside them."""
        names = [self.dispatcher_over(ranks * tensor, domain)]
        if ranks == 1 and "allgather" in self.dispatchers:
            names += ["alltoall", "allgather", *([self.dispatcher_over(LARGEST_NODE + 1, domain)] * (tensor > 1))]
        return tuple(dict.fromkeys(names))

    def training(self, model: Model) -> Framework:
        """The same framework with the axes of experts, if a model has them and it does, and its software for them."""
        had = (axis for axis in self.expert_axes if axis != "expert_z" or self.step.gathers_experts)
        added = tuple(axis for axis in had if axis not in self.axes) if model.has_experts else ()
        return (
            replace(self, axes=(*self.axes, *added), software=self.expert_software or self.software) if added else self
        )

    def having(self, *axes: str) -> Framework:
        """The same framework with those of these axes that it has on demand."""
        added = tuple(axis for axis in axes if axis in self.asked_axes and axis not in self.axes)
        return replace(self, axes=(*self.axes, *added)) if added else self

    def capturing(self, scopes: tuple[CudaGraphs, ...]) -> Framework:
        """The same framework with these scopes in CUDA graphs, and without what that excludes."""
        excluded = (refusal for scope in scopes for refusal in self.cuda_graphs[scope])
        return replace(self.with_step(cuda_graphs=scopes), refused=(*self.refused, *excluded))

    def optimizing(self, optimizer: str) -> Framework:
        """The same framework with one of its optimizers, without what that excludes; types of states are AdamW's."""
        refused, typed = (*self.refused, *self.optimizers[optimizer]), "use_precision_aware_optimizer"
        savers = tuple(one for one in self.savers if optimizer == ADAMW or one.option != typed)
        return replace(self.with_step(optimizer=optimizer), refused=refused, savers=savers)

    def cannot_recompute(self, recompute: Recompute, layers: int | None = None) -> str:
        """Why it cannot recompute a set, or not on the first so many layers of each chunk alone; "" where it can."""
        missing = [name for name in modules_of(recompute) if name not in self.recompute_modules]
        if missing:
            known = ", ".join((*RECOMPUTES, *self.recompute_modules))
            return f"{self.title} cannot recompute {missing[0]}; it has {known}"
        if layers is None or recompute == "none" or self.recompute_some == "any":
            return ""
        if self.recompute_some == "full":
            why = "recomputes modules on all layers, and only whole layers (full) on the first of each chunk"
            return "" if recompute == "full" else f"{self.title} {why}"
        return f"{self.title} recomputes on all layers, not on the first of each chunk"

    @property
    def columns(self) -> tuple[str, ...]:
        """Its axes, and `chunks` where its stages can be interleaved, as tables have them from left to right."""
        had = {*self.axes, *(["chunks"] if "pipeline" in self.axes and self.schedule.interleaved else [])}
        return tuple(axis for axis in dict.fromkeys((*self.names, *ALL_AXES, "chunks")) if axis in had)

    @property
    def expert_columns(self) -> tuple[str, ...]:
        """Its columns with a model with experts."""
        return replace(self, axes=tuple(dict.fromkeys((*self.axes, *self.expert_axes)))).columns

    def searched_axes(self, *, pipeline: bool) -> tuple[str, ...]:
        """Axes of a search, in the order of `ALL_AXES`: the paper's four, and its own, with pipeline stages or not."""
        has = {*AXES, *self.axes} - (set() if pipeline else {"pipeline"})
        return tuple(axis for axis in ALL_AXES if axis in has)

    def called(self, axes: str) -> str:
        """Its name of an axis, of `chunks`, or of the axes of a group, `TP·CP`; ours where it has none."""
        if axes == WORLD:
            return "world"
        if not self.names or axes == "chunks":
            return self.names.get(axes, axes)
        of_group = split_axes(axes)
        had = [axis for axis in of_group if axis in self.axes]
        return "·".join(self.names.get(axis, axis) for axis in had or of_group) + "".join(axes.partition("[")[1:])

    def option(self, axis: str) -> str:
        """The option that pins an axis or `chunks` by its name: `--tp`."""
        return f"--{self.called(axis).lower().replace('_', '-')}"

    def axis(self, name: str) -> str | None:
        """The axis, or `chunks`, of this name in any case; None if there is none."""
        return {self.called(axis).lower(): axis for axis in self.expert_columns}.get(name.lower())

    def layout(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of axes and `chunks` by its names of them, in the order of its columns."""
        return {self.called(axis): sizes[axis] for axis in self.columns if axis in sizes}


@dataclass(frozen=True)
class Refusal:
    """Layouts a framework cannot run: those where each of some axes is above 1; `why` in its own terms."""

    axes: tuple[str, ...]
    why: str = field(compare=False)


Plain: TypeAlias = str | int | float | tuple[str, ...] | None


class Because(NamedTuple):
    """Value of an argument, and the reason that stands beside it."""

    value: Plain
    why: str


Value: TypeAlias = Plain | Because

_OVERLAPPED = {
    "gather_prefetch": "z",
    "weight_gradient": "z",
    "input_gradient": "x",
    "data_parallel": "data",
    "output": "y",
}
"""Axis whose collectives an overlap is about: where it is 1, the overlap changes nothing."""


@dataclass(frozen=True)
class Run:
    """One configuration for a framework.

    framework: as it is described. parts: blocks of each model part, chunk c of stage s at c·pipeline + s, as they were
    priced. step: the framework's options on this machine, as they were priced. mtp_part: the part with the MTP layers;
    None: the last.
    """

    framework: Framework
    model: Model
    machine: Machine
    workload: Workload
    grid: Grid
    micro_batch: int
    accumulation: int
    recompute: Recompute
    kept_layers: int
    chunks: int
    parts: tuple[int, ...]
    step: StepOptions
    mtp_part: int | None = None
    recompute_layers: int | None = None

    @property
    def fields(self) -> dict[str, Value]:
        """What it states, by the fields of the tables of arguments (`frameworks.keys`)."""
        model, full, some = self.model, self.recompute == "full", self.recompute_layers
        sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")
        return {
            **{axis: self.size(axis) for axis in RANK_AXES},
            **{name: getattr(model, name) for name in sizes},
            "chunks": self.chunks,
            "seq": self.workload.sequence_length,
            "batch": self.workload.global_batch,
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "gated_mlp": model.gated,
            "biases": model.biases,
            "tied": model.tied_embeddings,
            "max_position_embeddings": max(self.workload.sequence_length, model.max_sequence_length),
            "vocab_multiple": self.step.vocabulary_multiple or 1,
            "seq_parallel": self.step.sequence_parallel and self.size("x") > 1,
            "recompute": {"none": None, "full": "full"}.get(self.recompute, "selective"),
            "recompute_method": ("uniform" if some is None else "block") if full else None,
            "recompute_layers": Because(some or 1, "of each chunk" if some else "every block by itself")
            if full
            else None,
            **{
                f"step.{one.name}": getattr(self.step, one.name)
                for one in fields(self.step)
                if self.has_option(one.name)
            },
        }

    def has_option(self, name: str) -> bool:
        """Whether an option of the step is one of this run: those of formats and of experts alone may be none."""
        has = ((FormatOptions, self.workload.format is not None), (ExpertOptions, self.model.has_experts))
        return all(present or name not in vars(group) for group, present in has)

    def is_changed(self, option: str) -> bool:
        """Whether an option of the step is not the framework's own."""
        return bool(getattr(self.step, option) != getattr(self.framework.step, option))

    def overlaps(self, *names: Overlap) -> bool:
        """Whether one of these overlaps is on."""
        return any(name in self.workload.overlaps for name in names)

    def size(self, axis: str) -> int:
        """Size of an axis."""
        return self.grid.axis_size(axis)

    @property
    def even(self) -> bool:
        """Whether every model part has as many blocks."""
        return len(set(self.parts)) == 1

    def cannot(self, what: str, instead: str = "") -> UsageError:
        """The error of a configuration that the framework has no arguments for, with what to ask for instead."""
        return UsageError(f"{self.framework.title} cannot express {what}{f'; {instead}' if instead else ''}")

    def check(
        self, *, settable: tuple[str, ...] = (), precisions: tuple[str, ...], parts: Collection[str] = ()
    ) -> None:
        """UsageError for what no argument expresses: another rank order than the framework's, and as `check_step`."""
        wide = [axis for axis in self.grid.order if self.size(axis) > 1]
        own = [axis for axis in self.framework.axes if axis in wide]
        if wide != own:
            raise self.cannot(f"the rank order {self.named(wide)}", f"it has {self.named(own)}")
        self.check_step(settable=settable, precisions=precisions, parts=parts)

    def named(self, order: Iterable[str]) -> str:
        """A rank order by the framework's names."""
        return ",".join(self.framework.names.get(axis, axis) for axis in order)

    def check_step(
        self, *, settable: tuple[str, ...] = (), precisions: tuple[str, ...], parts: Collection[str] = ()
    ) -> None:
        """UsageError for another step or number format than the framework's, and overlaps that are switched off.

        settable: options of its step, and overlaps, that it has arguments for. parts: those of `Model.parts`.
        """
        workload, own = self.workload, self.framework.step
        if lacking := [part for part in self.model.parts if part not in {*parts, *UNWRITTEN}]:
            nowhere = {one.TITLE for one in MIXERS.values() if not (one.LETTER or one.VARIANT)} & {*lacking}
            instead = "no framework does" if nowhere else "--framework megatron-core does"
            raise self.cannot(f"{', '.join(lacking)} of {self.model.name}", instead)
        if workload.precision not in precisions:
            raise self.cannot(f"--precision {workload.precision}", f"it has {', '.join(precisions)}")
        if workload.split_micro_batch:
            raise self.cannot("a split micro-batch", "leave out --split-micro-batch")
        if workload.shard_optimizer_over_data and not own.distributed_optimizer and self.size("data") > 1:
            raise self.cannot("ZeRO-1", "leave out --shard-optimizer")
        for overlap in own.overlaps:
            if overlap not in (*workload.overlaps, *settable) and self.size(_OVERLAPPED[overlap]) > 1:
                raise self.cannot(f"--no-overlap {overlap}", "leave it out")
        # These are the machine's: under Gloo every framework's kernels are eager.
        skipped = {"kernels", "one_layout", "natural_imbalance", *settable}
        if self.framework.writes_scores(self.machine.accelerator, workload.precision):
            skipped.add("fused_attention")
        for name in (option.name for option in fields(own)):
            if name not in skipped and getattr(self.step, name) != getattr(own, name):
                said = {"optimizer": "--optimizer"}.get(name, f"--set step.{name}")
                raise self.cannot(f"{said.removeprefix('--set ')} = {getattr(self.step, name)}", f"leave out {said}")


@dataclass(frozen=True)
class Argument:
    """One argument: `name value`, with several values or a switch; `why`, where the name does not say it."""

    name: str
    value: str | int | float | tuple[str, ...] | None = None
    why: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The words of a command line."""
        values = self.value if isinstance(self.value, tuple) else () if self.value is None else (str(self.value),)
        return self.name, *values


@dataclass(frozen=True)
class Section:
    """Arguments that belong together; `title` is one lower-case word, such as model or parallelism.

    last: nothing may follow them, such as a subcommand.
    """

    title: str
    arguments: tuple[Argument, ...]
    last: bool = False


@dataclass(frozen=True)
class Check:
    """What a script looks for before a rank starts.

    there: a file, or a Python module. how: what to do where it is not there, or has another release. release: that
    which the arguments are for, "" for any; prints: bash that prints the one that is there.
    """

    there: str
    how: str
    release: str = ""
    prints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """The command of a run.

    program: the words after `torchrun ...`, `("-m", "torchtitan.train")` or `("pretrain_gpt.py",)`. release: the
    release of the framework that the arguments are for. needs: sentences on what must be there. files: config files
    beside the script, text by suffix; `{file:SUFFIX}` in a word of the program, in the value of an argument or of the
    launcher stands for the path of one. accelerate: arguments of `accelerate launch`, if it starts the ranks and not
    torchrun. checks: what must be there before a rank starts. asserted: variables whose CUDA names the program looks
    for on ROCm, too. fine_tunes: it makes batches of samples by itself. notes: differences of the framework from the
    request. forms: the same run for another front end or an older release, by its name in `--emit`.
    """

    release: str
    program: tuple[str, ...]
    sections: tuple[Section, ...] = ()
    environment: tuple[EnvironmentVariable, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    accelerate: tuple[Argument, ...] = ()
    checks: tuple[Check, ...] = ()
    asserted: tuple[str, ...] = ()
    fine_tunes: bool = False
    forms: Mapping[str, Command] = field(default_factory=dict)

    @property
    def words(self) -> tuple[str, ...]:
        """Every argument of the program, as words."""
        return tuple(word for section in self.sections for one in section.arguments for word in one.words)
