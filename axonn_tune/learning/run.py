"""A run as a file states it, and that of a command or config file as the cost model takes it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from axonn_tune.errors import DocumentError, Problem, UsageError
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.description import Run
from axonn_tune.frameworks.dispatchers import find_dispatcher
from axonn_tune.frameworks.keys import NOTHING, Arguments, Stated, find, is_on, names_of, own_tables
from axonn_tune.frameworks.statements import changes, kept_layers, switched_off
from axonn_tune.grid import Grid, nearest_sizes
from axonn_tune.job import Layout
from axonn_tune.learning.adapters import stated_adapters
from axonn_tune.learning.arguments import EXPERT_COLUMNS, MODEL_AXES
from axonn_tune.learning.layer_types import with_layer_types
from axonn_tune.learning.saving import Saving
from axonn_tune.program.count import parameters
from axonn_tune.program.feasibility import broken_constraints, shared_start
from axonn_tune.ranking.inputs import unpriced_experts
from axonn_tune.specs.catalog import available
from axonn_tune.specs.document import LARGEST_SIZE, first_problem
from axonn_tune.specs.loading import DOCUMENT_BYTES, load_document, read_text
from axonn_tune.specs.machine import Machine
from axonn_tune.specs.model import Layer, Model
from axonn_tune.validation.published.cases import Case, accelerators_named, differences, laid_out, model_of, with_stated
from axonn_tune.validation.published.cells import named as named_words
from axonn_tune.validation.published.cells import names_model
from axonn_tune.validation.published.rows import (
    COUNTS,
    OPTIONS,
    SILENT,
    TIMES,
    Cell,
    StepRow,
    cell_text,
    meaning,
    odd_words,
    recomputes_of,
    row_of,
    zero_of,
)

NEEDED = ("gpu", "n_gpus", "layers", "hidden", "heads", "ffn", "vocab", "seq", "gbs")
"""Required columns of the step CSV besides id and software."""

_RANKS = {"n_gpus", "tp", "y", "pp", "vpp", "cp", "dp", "z", "gbs", "mbs", "seq"}
_OF_MODEL = {"layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "gated_mlp"}
COMPARED = _RANKS | _OF_MODEL | {"ep", "etp"} | {"seq_parallel", "zero_stage", "recompute", "precision"}
"""Columns in which a file and the user's options must agree; the rest are words."""


@dataclass(frozen=True)
class StatedRun:
    """A run as a file states it. software: name of its software in the step CSV. lines: position of each column."""

    noun: ClassVar[str] = "file"

    path: str
    software: str
    lines: tuple[int, int]
    columns: Mapping[str, Stated]

    def require(self, wanted: Sequence[str], why: str) -> None:
        """UsageError for columns that are not known."""
        missing = [name for name in wanted if name not in self.columns]
        if missing:
            raise UsageError(f"{self.path}:{self.lines[0]}: the {self.noun} does not state {', '.join(missing)}: {why}")

    def with_given(self, given: Mapping[str, Cell]) -> Self:
        """The same with additional columns; UsageError where the file states another value."""
        columns = dict(self.columns)
        for name, value in given.items():
            stated = columns.get(name)
            if stated is None or name not in COMPARED | {"gpu"}:
                columns[name] = Stated(meaning(name, value), 0)
            elif not is_same(stated.value, value, name):
                place = f"{self.path}:{stated.line or self.lines[0]}"
                said = f"states {name} {cell_text(stated.value)}, but {cell_text(value)} is given"
                raise UsageError(f"{place}: the {self.noun} {said}")
        return replace(self, columns=columns)

    def check_layout(self) -> None:
        """UsageError for a layout that does not fill its GPUs."""
        sizes = {name: self.columns[name] for name in (*MODEL_AXES, "dp") if name in self.columns}
        ranks, gpus = math.prod(size.value for size in sizes.values()), self.columns["n_gpus"]
        if gpus.value % ranks or ("dp" in sizes and ranks != gpus.value):
            words = " x ".join(f"{name} {size.value}" for name, size in sizes.items())
            place = f"{self.path}:{gpus.line or self.lines[0]}"
            raise UsageError(f"{place}: {words} = {ranks} ranks, but n_gpus is {gpus.value}")


def is_same(stated: Cell, given: Cell, name: str) -> bool:
    """Whether two values of a column mean the same; of accelerators, whether they share the name of a chip."""
    if name == "gpu":
        chips = [set(re.findall(r"[a-z]+\d+", str(words).lower())) for words in (stated, given)]
        return not all(chips) or bool(chips[0] & chips[1])
    pair = [meaning(name, one) for one in (stated, given)]
    return pair[0] == pair[1] or str(pair[0]).lower() == str(pair[1]).lower()


@dataclass(frozen=True)
class CommandRun(StatedRun):
    """The run of a command or config file, completed by the user's options.

    software: name of the framework. arguments: with the framework's defaults. assumed: assumptions for what is not
    stated. ignored: arguments that are not priced, with the reason. unknown: those that no table has. given: the user's
    model. tables: those of the tool whose file it is, where it is not the framework's own. saving: what its log says of
    checkpoints.
    """

    arguments: Arguments = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    given: Model | None = None
    tables: tuple[str, ...] = ()
    saving: Saving | None = None

    def of_log(self, log: StatedRun, arguments: Arguments) -> Self:
        """The same run as a log has it: with its columns, and its arguments over those of the file."""
        said = {name: replace(one, line=0) for name, one in self.arguments.items()}
        # What no framework takes says nothing of the run.
        arguments = {
            name: one for name, one in arguments.items() if not (key := find(name)) or not key.misfit(one.value)
        }
        return replace(self, path=log.path, lines=log.lines, columns=log.columns, arguments={**said, **arguments})

    def with_size(self, given: Mapping[str, Cell]) -> Self:
        """The same run on other GPUs, or with other columns: replicas, and shards over all of them, follow."""
        whole = self.columns.get("dp", NOTHING).value == self.columns.get("z", NOTHING).value
        gone = {"n_gpus", "dp", *(["z"] if whole else ()), *TIMES.values()}
        kept = {name: one for name, one in self.columns.items() if name not in gone}
        return replace(self, columns=kept | {name: Stated(meaning(name, one), 0) for name, one in given.items()})

    def model(self) -> Model:
        """The model: the user's, a shipped one with the same sizes, or one from the stated sizes."""
        if self.given is not None:
            return self.given
        made = model_of(self.row(dp=1, z=1, parts=""), find_framework(self.software))
        try:
            made = with_layer_types(made, self.arguments)
        except ValueError as error:
            raise self._wrong(first_problem(error)) from None
        billions = float(f"{parameters(made) / 1e9:.3g}")
        name = f"{'llama' if made.gated else 'gpt'}-{billions:g}b"
        return shipped_model(made) or made.model_copy(update={"name": name, "source": f"arguments of {self.path}"})

    def case(self, machine: Machine) -> Case:
        """The run for the cost model; DocumentError with the line of an impossible value."""
        sizes = {name: self.columns[name].value for name in ("gbs", "mbs", "dp") if name in self.columns}
        share = sizes.get("mbs", 1) * sizes.get("dp", 1)
        if sizes["gbs"] % share:
            split = f"micro-batch {sizes.get('mbs', 1)} x data parallel {sizes.get('dp', 1)} = {share}"
            raise self._wrong(f"gbs: the global batch, {sizes['gbs']}, is not divisible by {split}")
        row = self.row(gpu=machine.accelerator.name)
        found = laid_out(row, self.model(), machine, with_stated(find_framework(self.software), row), ({},))
        if isinstance(found, str):
            lacks = "has no axis context" in found and self.software in ("fsdp", "deepspeed")
            raise self._wrong(found + "; nearest that has: --framework torchtitan" * lacks)
        self._check_stages(found)
        optioned = _with_options(found, self.arguments)
        if self.tables:
            # Its own log has no TFLOP/s, or counts them otherwise (NVIDIA-NeMo/RL, utils/flops_tracker.py).
            optioned = replace(optioned, framework=replace(optioned.framework, logged=None))
        if optioned.framework.step.splits_backward:
            self._check_order(optioned)
        return self._with_experts(self._with_adapters(optioned))

    def _with_adapters(self, case: Case) -> Case:
        """The case with what trains; DocumentError with the line of a target that its tool does not know."""
        if (adapters := stated_adapters(self.arguments)) is None:
            return case
        try:
            tuning = adapters.of(case.framework)
        except UsageError as error:
            key = next((name for name in names_of("tuning.targets") if name in self.arguments), "")
            line = self.arguments.get(key, NOTHING).line or self.lines[0]
            words = str(error).removeprefix("--lora-targets ")
            raise DocumentError(self.path, [Problem(key, words, line)]) from None
        return replace(case, workload=case.workload.model_copy(update={"tuning": tuning}))

    def row(self, **instead: object) -> StepRow:
        """What columns mean, some instead of others; DocumentError for what is no size or word, or does not divide."""
        stated = {name: one.value for name, one in self.columns.items() if str(one.value).lower() not in SILENT}
        words: dict[str, Any] = {"n_gpus": 1, "gbs": 1, "seq": 1, "gpu": "", **stated, **instead}
        for name, value in ((name, words[name]) for name in COUNTS if name in words):
            if not isinstance(value, int) or not 1 <= value <= LARGEST_SIZE:
                raise self._wrong(f"{name} is {cell_text(value)!r}, not a whole number from 1 to {LARGEST_SIZE:,}")
        if odd := [*odd_words(words)]:
            raise self._wrong("; ".join(odd))
        texts = {name: cell_text(one) for name, one in words.items() if name not in EXPERT_COLUMNS}
        words["id"] = f"{Path(self.path).name}:{self.lines[0]}-{self.lines[1]}"
        words.setdefault("framework", self.software)
        words["zero_stage"] = zero_of(texts.get("zero_stage", ""))
        words["recompute"] = recomputes_of(texts.get("recompute", ""))
        try:
            row = row_of(words, line=self.lines[0], more=named_words(texts)[1] if names_model(texts) else None)
        except ValueError as error:
            counted = [name for name in self.arguments if name.startswith("account_for_")]
            uneven = f"; pp x vpp must divide the layers and what {' and '.join(counted)} counts as one"
            raise self._wrong(f"{error}{uneven if counted and 'parts hold' in str(error) else ''}") from None
        known = "vpp" not in self.columns or "vpp" in stated
        return replace(row, interleave_known=known, unstated=tuple(name for name in OPTIONS if name not in stated))

    def elsewhere(self, case: Case) -> Iterator[str]:
        """Where it says another machine than the one that it is priced on: GPUs of a node, an accelerator."""
        yield from differences(case.row, case.machine, case.framework)
        path, priced = Path(self.path), accelerators_named(case.machine.accelerator.name)
        named = accelerators_named(read_text(path, limit_bytes=DOCUMENT_BYTES) if path.is_file() else "")
        stated = self.arguments.get("moe_shared_expert_overlap", NOTHING)
        if is_on(stated) and "shared experts" not in case.model.parts:
            yield f"moe_shared_expert_overlap: {case.model.name} has no shared experts, so it changes nothing"
        if len(named) == 1 and not {*named} & {*priced}:
            ((word, profile),) = named.items()
            yield f"the file names {word.upper()}, and {case.machine.name} is priced: --machine {profile} has it"

    def kernel(self, case: Case) -> Iterator[str]:
        """The kernel of attention that is taken where none is stated, but for frameworks that have one anywhere."""
        if "attn" not in self.columns and case.framework.attention_since and case.framework.step.fused_attention:
            why = case.framework.writes_scores(case.machine.accelerator, case.workload.precision)
            taken = f"one that writes all scores {why}" if why else "FlashAttention or cuDNN's"
            yield f"attention's kernel is not stated: {taken}"

    def _check_order(self, case: Case) -> None:
        """DocumentError for a schedule that does not have so many chunks or micro-batches."""
        # Imported here: few runs split the backward pass, and start-up time is that of others.
        from axonn_tune.program.schedules import check_schedule

        one, order = case.configurations[0], case.framework.step.pipeline_order
        batches = case.workload.global_batch // (one.grid.batch_shares * one.micro_batch)
        try:
            check_schedule(order, stages=one.pipeline, chunks=one.chunks, micro_batches=batches)
        except ValueError as error:
            raise self._wrong(f"pp: {error}") from None

    def _check_stages(self, case: Case) -> None:
        """DocumentError for layers that do not divide where Megatron-LM needs equal parts."""
        layers, parts = case.model.layers, case.row.pipeline * case.row.interleave
        equal = {"megatron", "megatron_axonn", "nemo"} & {*own_tables(self.software)}
        if parts > 1 and layers % parts and not case.row.parts and equal and self.software != "megatron-deepspeed":
            near = [size for size in (layers // parts * parts, -(-layers // parts) * parts) if size]
            words = (
                f"layers: {layers} are not divisible by pp {case.row.pipeline} x vpp {case.row.interleave} = {parts}"
            )
            uneven = "--pipeline-model-parallel-layout or --decoder-first-pipeline-num-layers with other stages"
            other = f", or {uneven if self.path != '--fact' else '--parts, the layers of each stage between blanks'}"
            raise self._wrong(f"{words}; nearest: {' or '.join(map(str, near))}{other}")
        one = case.configurations[0]
        if one.pipeline > 1 and (why := shared_start(case.model, one.parts or (layers // parts,) * parts)):
            raise self._wrong(f"pp: {why}")

    def _with_experts(self, case: Case) -> Case:
        """The case with the degrees of experts; DocumentError where they are impossible."""
        ep, etp, shards = (self.columns.get(name) for name in ("ep", "etp", "expert_shards"))
        if not case.model.has_experts:
            wide = next((one for one in (ep, etp) if one is not None and one.value > 1 and one.line), None)
            if wide is ep and ep is not None:
                raise self._wrong(f"ep: is {ep.value}, but the model has no experts")
            return case
        framework, expert = case.framework.training(case.model), 1 if ep is None else ep.value
        if why := unpriced_experts(framework, case.model):
            raise UsageError(f"{self.path}: {why}")

        def folded(one: Layout) -> Layout:
            # Megatron-Core splits experts as it splits the rest; torchtitan where there is no expert parallelism.
            alone = framework.tensor_without_expert and expert > 1
            tensor = one.grid.x if etp is None and not alone else 1 if etp is None else etp.value
            each, rest = divmod(shards.value if shards else tensor, tensor)
            if rest:
                name, near = "expert_tensor_parallel_num_weight_shards", tensor * max(each, 1)
                raise self._wrong(f"{name}: is ETP times EGTP, and not divisible by ETP = {tensor}; nearest: {near}")
            sizes = {**one.grid.by_axis, "expert": expert, "expert_tensor": tensor, "expert_z": each}
            return replace(one, grid=Grid(**sizes, order=one.grid.order))

        layouts = tuple(map(folded, case.configurations))
        one = layouts[0]
        framework = framework.with_step(gathers_experts=one.grid.axis_size("expert_z") > 1).training(case.model)

        def wrong(grid: Grid) -> list[str]:
            job = case.model, case.workload, framework
            return broken_constraints(grid, *job, micro_batch=one.micro_batch, chunks=one.chunks, parts=one.parts)

        if broken := wrong(one.grid):
            near = (
                f"; nearest that fits: {framework.called(axis)} = {size}"
                for axis in ("expert_z", *("expert_tensor", "expert")[:: -1 if etp else 1])
                for size in nearest_sizes(one.grid.world, one.grid.axis_size(axis))
                if not wrong(Grid(**{**one.grid.by_axis, axis: size}, order=one.grid.order))
            )
            tensor = one.grid.expert_tensor
            taken = f"; ETP is not stated: TP, {tensor}, is taken" if tensor > 1 and etp is None else ""
            raise self._wrong(f"{'ep: ' * (ep is not None)}{'; '.join(broken)}{taken}{next(near, '')}")
        named = {name: str(self.columns.get(name, NOTHING).value) for name in ("dispatcher", "routing")}
        if named["dispatcher"]:
            framework = framework.with_step(dispatcher=find_dispatcher(named["dispatcher"]).name)
        if named["routing"]:
            framework = framework.with_step(imbalance=None if named["routing"] == "natural" else 1.0)
        return replace(case, framework=replace(framework, dispatchers=()), configurations=layouts)

    def _wrong(self, words: str) -> DocumentError:
        """The error of a value, with the line of the first column that it names."""
        other = {"global_batch": "gbs", "pipeline": "pp", "context": "cp", "x": "tp", "tensor": "tp"}
        named = [other.get(word, word) for word in re.findall(r"[a-z_]+", words)]
        known = ((name, one) for name in named for one in (self.columns, self.arguments))
        line = next((one[name].line for name, one in known if name in one and one[name].line), 0)
        return DocumentError(self.path, [Problem("", words, line or self.lines[0] or None)])


def _with_options(case: Case, stated: Arguments) -> Case:
    """The case with what arguments state that rows do not have: options of the step, overlaps, layers resharded."""
    one = case.configurations[0]
    job = (case.framework, case.model, case.machine, case.workload)
    run = Run(*job, one.grid, one.micro_batch, 1, one.recompute, 0, one.chunks, (), case.framework.step)
    found, off, kept = changes(run, stated), {*switched_off(stated)}, kept_layers(run, stated)
    overlaps = {"overlaps": tuple(one for one in case.workload.overlaps if one not in off)}
    return replace(
        case,
        framework=case.framework.with_step(**found) if found else case.framework,
        workload=case.workload.model_copy(update=overlaps),
        configurations=tuple(one if kept is None else replace(one, kept_layers=kept) for one in case.configurations),
    )


_OPTIONS = {"n_gpus": "--gpus", "gbs": "--batch", "seq": "--seq", "mbs": "--micro-batch", "precision": "--precision"}
"""Options that give columns."""


def replaced(stated: Mapping[str, Stated], facts: Mapping[str, Cell]) -> Iterator[str]:
    """A line for each option that holds in place of what the file states, and one for the model."""
    model: list[str] = []
    for name, value in facts.items():
        other = stated.get(name)
        if other is None or name not in COMPARED or is_same(other.value, value, name):
            continue
        if name in _OPTIONS:
            yield f"{_OPTIONS[name]} {value} holds in place of the file's {name} {other.value} (line {other.line})"
        else:
            model.append(f"{name} {cell_text(other.value)}")
    if model:
        yield f"--model holds in place of the file's {', '.join(model)}"


def model_columns(model: Model) -> dict[str, Cell]:
    """Columns of a model's document."""
    sizes = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
    flags = {"gated_mlp": model.gated, "biases": model.biases, "tied": model.tied_embeddings}
    return {"model": model.name, **{name: getattr(model, name) for name in sizes}, **flags}


def shipped_model(model: Model) -> Model | None:
    """The model that ships with the same sizes."""
    own = model_columns(model) | {"model": ""}, _layers(model), model.mtp_layers
    others = (load_document(path, schema=Model) for path in available("model").values())
    return next(
        (one for one in others if (model_columns(one) | {"model": ""}, _layers(one), one.mtp_layers) == own), None
    )


def _layers(model: Model) -> list[Layer]:
    """Every layer, without the name of its type and norms of queries and keys, which no cost depends on."""
    types = [replace(one, name="", qk_norms=False) for one in model.types]
    return [types[index] for index, count in model.decoder_runs for _ in range(count)]
