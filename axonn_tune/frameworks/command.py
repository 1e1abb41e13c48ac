"""The command of a framework: one configuration as arguments, config files and environment, without a script.

A framework's `launch` writes the `Command` of a `Run`; `axonn_tune.launch` puts the script around it. What a framework
cannot express is a UsageError, what it expresses differently is a note.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, TypeAlias

from axonn_tune.errors import UsageError
from axonn_tune.frameworks.description import Framework, StepOptions
from axonn_tune.frameworks.keys import named, tables_of
from axonn_tune.grid import RANK_AXES, Grid
from axonn_tune.specs.machine import EnvironmentVariable, Machine
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Recompute, Workload
from axonn_tune.vocabulary import Overlap

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
            "fused_accumulation": self.step.fused_accumulation,
            "recompute": {"none": None, "full": "full"}.get(self.recompute, "selective"),
            "recompute_method": ("uniform" if some is None else "block") if full else None,
            "recompute_layers": Because(some or 1, "of each chunk" if some else "every block by itself")
            if full
            else None,
        }

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
        if lacking := [part for part in self.model.parts if part not in parts]:
            raise self.cannot(f"{', '.join(lacking)} of {self.model.name}", "--framework megatron-core does")
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
        skipped = {"kernels", "one_layout", *settable}
        if self.framework.writes_scores(self.machine.accelerator, workload.precision):
            skipped.add("fused_attention")
        for name in (option.name for option in fields(own)):
            if name not in skipped and getattr(self.step, name) != getattr(own, name):
                raise self.cannot(f"step.{name} = {getattr(self.step, name)}", f"leave out --set step.{name}")


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


def settings(names: str, values: Mapping[str, Value], framework: str) -> Iterator[tuple[str, Plain, str]]:
    """Arguments of these names, in order, with values and reasons; those whose value is None are left out.

    names: with their sections, `training.seq_len`. values: by name, or by the field that the framework's table of
    arguments has for it, by which the reader takes it, too. A switch `no_...`, `disable_...` or `untie_...` is the
    opposite of its field.
    """
    tables = tables_of(framework)
    for path in names.split():
        name = path if path in values else path.rpartition(".")[2]
        value = values.get(name)
        if name not in values and (key := named(name, tables)) is not None:
            value = values.get(key.field)
            value = not value if name.startswith(("no_", "disable_", "untie_")) else value
        plain, why = value if isinstance(value, Because) else (value, "")
        if plain is not None:
            yield path, plain, why


def flags(names: str, values: Mapping[str, Value], framework: str) -> Iterator[Argument]:
    """The same as Megatron-LM's arguments, without sections: a switch is written where it is on."""
    for path, value, why in settings(names, values, framework):
        if value is not False:
            name = path.rpartition(".")[2].replace("_", "-")
            yield Argument(f"--{name}", None if value is True else value, why)


@dataclass(frozen=True)
class Section:
    """Arguments that belong together; `title` is one lower-case word, such as model or parallelism.

    last: nothing may follow them, such as a subcommand.
    """

    title: str
    arguments: tuple[Argument, ...]
    last: bool = False


def sections_of(arguments: Mapping[str, Iterable[Argument]]) -> tuple[Section, ...]:
    """Arguments by subject, without subjects that have none."""
    return tuple(Section(title, found) for title, made in arguments.items() if (found := tuple(made)))


def sizes_words(model: Model) -> str:
    """`a model of NAME's sizes`, for one's own script, with what the model states although no cost depends on it."""
    stated = (
        ("rotary base", model.rotary_base),
        ("norm epsilon", model.norm_epsilon),
        ("biases of queries, keys and values", model.qkv_biases),
    )
    found = [name if value is True else f"{name} {value:g}" for name, value in stated if value]
    return f"a model of {model.name}'s sizes" + (f" with {', '.join(found)}" if found else "")


EXPANDABLE_SEGMENTS = EnvironmentVariable(
    name="PYTORCH_ALLOC_CONF", value="expandable_segments:True", why="less memory lost to fragmentation"
)
NO_MOCK_DATA = "It has no mock data: add --data-path with the prefix of a dataset that tools/preprocess_data.py made."
NO_QKV_BIASES = "It has no biases of queries, keys and values alone, which the model has; they hardly change the speed."
TRIAL: Mapping[str, Value] = {"train_iters": 50, "eval_iters": 0, "lr": 1e-4, "log_interval": 1}
"""A short run, every step in Megatron-LM's log."""
LITTLE_TO_REPEAT = "Selective recompute repeats core attention, which saves little where it is fused."


def own_recompute(run: Run) -> str:
    """Activation checkpointing that the user's own script has to do."""
    if run.recompute == "full" and run.recompute_layers is not None:
        return f"It checkpoints the first {run.recompute_layers} blocks{' of each stage' * (run.size('pipeline') > 1)}."
    notes = {
        "none": "Its blocks are not checkpointed.",
        "selective": "It checkpoints the core of attention alone.",
        "full": "It checkpoints every block.",
    }
    return notes[run.recompute]


@dataclass(frozen=True)
class Command:
    """The command of a run.

    program: the words after `torchrun ...`, `("-m", "torchtitan.train")` or `("pretrain_gpt.py",)`. release: the
    release of the framework that the arguments are for. needs: sentences on what must be there. files: config files
    beside the script, text by suffix; `{file:SUFFIX}` in a word of the program, in the value of an argument or of the
    launcher stands for the path of one. accelerate: arguments of `accelerate launch`, if it starts the ranks and not
    torchrun. notes: differences of the framework from the request. forms: the same run for another front end or an
    older release, by its name in `--emit`.
    """

    release: str
    program: tuple[str, ...]
    sections: tuple[Section, ...] = ()
    environment: tuple[EnvironmentVariable, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    accelerate: tuple[Argument, ...] = ()
    forms: Mapping[str, Command] = field(default_factory=dict)

    @property
    def words(self) -> tuple[str, ...]:
        """Every argument of the program, as words."""
        return tuple(word for section in self.sections for one in section.arguments for word in one.words)
