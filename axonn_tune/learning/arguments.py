"""A run from a framework's arguments, of a command line or a log, by the columns of the step CSV.

An argument is a name of Megatron-LM, Megatron-Bridge, NeMo, DeepSpeed, torchtitan or Hugging Face, written with
underscores, prefixed by its section (`zero_optimization.stage`), with the line that states it. `columns_of` maps them
to what they mean, by column of a row of measured steps (`validation/published/steps.csv`): numbers, flags and tuples as
such, which `step_row` takes beside cells of text. `StatedRun` combines them with the user's options.
"""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from axonn_tune.errors import Problem, UsageError, suggest
from axonn_tune.frameworks.keys import (
    Arguments,
    Stated,
    find,
    is_off,
    is_on,
    meaning_of,
    named,
    names_of,
    records,
    table,
)
from axonn_tune.recompute import MODULES
from axonn_tune.specs.formats import format_named
from axonn_tune.stages import parse_layout

_COLUMNS = {"gpus": "n_gpus", "x": "tp", "pipeline": "pp", "chunks": "vpp", "context": "cp", "data": "dp"}
_COLUMNS |= {"batch": "gbs", "micro_batch": "mbs", "expert": "ep", "expert_tensor": "etp", "expert_z": "expert_shards"}
"""Columns of fields of arguments (`frameworks.keys`) that have another name there."""
_SIZES = ("seq", "layers", "hidden", "heads", "head_dim", "ffn", "vocab", "vocab_multiple", "experts")
_WHOLE = (*_COLUMNS, "y", "z", *_SIZES)
"""Fields that are whole numbers.

DeepSpeed's world size is that of the ranks that share a batch (runtime/config.py uses the data-parallel world size with
model parallelism). `experts` is no column of the CSV, nor are degrees of experts.
"""

_ON_OR_OFF = ("True", "False", "off")
_OF_MEGATRON = (*table("megatron"), *table("megatron_axonn"))
SWITCHES = frozenset(key.name for key in _OF_MEGATRON if key.default in _ON_OR_OFF)
"""Arguments that take no value on a command line of Megatron-LM."""

_LONGEST_NAME = 200


def known_name(name: str, section: str = "") -> str:
    """Our name of an argument that states a field, from its name and its section; empty if there is none."""
    plain, inside = (words.strip().lstrip("-+").replace("-", "_").lower() for words in (name, section))
    if len(plain) > _LONGEST_NAME:
        return ""
    key = named(f"{inside}.{plain}") or find(plain)
    return key.name if key and key.is_read else ""


def plain_value(value: str) -> str:
    """A printed value without quotes, the comma of JSON, and a comment."""
    return value.split(" #")[0].strip().rstrip(",").strip("\"' ")


_SEVERAL = ("recompute_modules", "cuda_graph_modules", "offload_modules", "fsdp", "lora_target")
"""Arguments that take several words, as those of adapters do."""
_OPTION = re.compile(r"(--?[A-Za-z][\w.-]*|\+{0,2}[A-Za-z][\w.]*(?==))(?:=(.*))?", re.DOTALL)
_SUBCOMMAND = re.compile(r"([A-Za-z][\w-]*):([A-Za-z][\w-]*)")


_REDIRECTION = re.compile(r"(?:\d*|&)(?:>>?|<)(.*)", re.DOTALL)
_PASSED_ON = re.compile(r"\$(?:[@*]|\{[@*][^}]*\})")


def _is_detail(name: str) -> bool:
    key = find(name.lstrip("-+").replace("-", "_").lower(), ("unpriced",))
    return key is not None and key.field == "detail"


def is_choice(word: Stated) -> bool:
    """Whether it has the form in which torchtitan chooses among the configs of a section."""
    return _SUBCOMMAND.fullmatch(word.value) is not None


def named_values(words: Iterable[Stated]) -> Iterator[tuple[str, Stated]]:
    """Every argument of a command line with its first value, or all so far where it takes several; a switch is `True`.

    Read are `--name value`, `--name=value`, `--switch`, `section.name=value`, and torchtitan's `--section.no-switch`
    and `activation-checkpoint:full`.
    """
    waiting: list[Stated] = []
    several: tuple[str, Stated] | None = None
    target = False
    for word in words:
        # `2>&1`, `> file` and the like are no arguments; `"$@"` is empty unless asked for.
        redirection, is_target = _REDIRECTION.fullmatch(word.value), target
        target = redirection is not None and not redirection[1]
        if redirection or is_target or _PASSED_ON.fullmatch(word.value):
            continue
        option, chosen = _OPTION.fullmatch(word.value), _SUBCOMMAND.fullmatch(word.value)
        negated = option and re.fullmatch(r"(--[\w.-]+\.)no[-_](\w[\w-]*)", option[1])
        if option or chosen:
            yield from ((name.value, Stated("True", name.line)) for name in waiting)
            waiting, several = [] if option is None or option[2] is not None or negated else [word], None
        if negated:
            yield negated[1] + negated[2], Stated("False", word.line)
        elif chosen:
            yield f"{chosen[1]}.mode", Stated(chosen[2].replace("-", "_"), word.line)
        elif option and option[2] is not None:
            yield option[1], Stated(plain_value(option[2]), word.line)
        elif not option and (waiting or several):
            name, before = several or (waiting[0].value, Stated("", waiting[0].line))
            found = Stated(f"{before.value} {plain_value(word.value)}".strip(), before.line)
            yield name, found
            waiting, several = [], (name, found) if known_name(name) in _SEVERAL or _is_detail(name) else None
    yield from ((name.value, Stated("True", name.line)) for name in waiting)


_DEEPSPEED = re.compile(r":print\]\s+([a-z]\w*) +\.* *(.*)$")
_DUMPED = re.compile(r"(?:^|\s)([a-z]\w*) \.{2,} ?(.*)$")
_JSON = re.compile(r'"(\w+)":\s*(.*)$')
_YAML = re.compile(r"\s*(?:- )?([A-Za-z_]\w*):(?:\s+(.*))?$")
_MESH = re.compile(
    r"Building (?:device mesh with parallelism: (.*)|\d-D device mesh with (\[[^\]]*+\]), (\[[\d, ]*+\]))"
)

_SAID = tuple(
    (one["word"], re.compile(one["pattern"]), one["arguments"].split())
    for one in csv.DictReader((Path(__file__).parent / "sentences.csv").read_text("utf-8").splitlines())
)
"""Other log lines: a word to search first, the pattern, and the arguments of its groups."""

_MESH_NAMES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "dp": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
}


@dataclass
class PrintedArguments:
    """Reads the arguments that a log prints line by line: sentences, dotted lists, JSON and YAML with its sections."""

    _section: str = field(default="", init=False)

    def sentence(self, text: str) -> Iterator[tuple[str, str]]:
        """Names and values of what a sentence of a framework states."""
        for word, pattern, names in _SAID:
            found = pattern.search(text) if word in text else None
            yield from zip(names, found.groups() if found else (), strict=False)
        mesh = _MESH.search(text) if "device mesh" in text else None
        yield from _mesh(mesh) if mesh else ()

    def pair(self, text: str) -> Iterator[tuple[str, str]]:
        """Name and value of the argument that a line of a list states."""
        for mark, pattern, section in ((":print]", _DEEPSPEED, "deepspeed"), (" ..", _DUMPED, "")):
            found = pattern.search(text) if mark in text else None
            if found:
                yield from _known(found[1], found[2], section)
                return
        found = (_JSON.search(text) if '"' in text else None) or _YAML.match(text)
        if found and plain_value(found[2] or "") in {"", "{"}:
            self._section = found[1]
        elif found:
            yield from _known(found[1], found[2], self._section)


def _known(name: str, value: str, section: str) -> Iterator[tuple[str, str]]:
    known = known_name(name, section) or (name if name in _OF_EXPERTS else "")
    if known:
        yield known, plain_value(value)


def _mesh(found: re.Match[str]) -> Iterator[tuple[str, str]]:
    """Degrees of torchtitan's mesh; an axis that is not named has one rank."""
    if found[1] is not None:
        sizes = dict(re.findall(r"(\w+)=(\d+)", found[1]))
    else:
        sizes = dict(zip(re.findall(r"'(\w+)'", found[2]), re.findall(r"\d+", found[3]), strict=False))
    plain = {"dp_shard": "1"} if "dp" not in sizes else {}
    for axis, size in ({"pp": "1", "dp_replicate": "1", "cp": "1", "tp": "1"} | plain | sizes).items():
        if axis in _MESH_NAMES:
            yield _MESH_NAMES[axis], size


def columns_of(arguments: Arguments, given: Mapping[str, Stated] | None = None) -> dict[str, Stated]:
    """Columns of a row of measured steps from the arguments; columns that they do not state are omitted.

    given: columns that hold whatever the arguments state.
    """
    fixed = given or {}
    found: dict[str, Stated] = {**fixed}
    for field_ in _WHOLE:
        column, number = _COLUMNS.get(field_, field_), stated_count(arguments, *names_of(field_))
        if number is not None and column not in fixed:
            found[column] = number
    hybrid = arguments.get("hybrid_layer_pattern")
    if hybrid is not None and not is_off(hybrid) and "layers" not in fixed:
        # It replaces the number of layers.
        found["layers"] = Stated(len(re.sub(r"\||/.*", "", hybrid.value)), hybrid.line)
    if (mapping := _true(arguments, "use_tp_pp_dp_mapping")) and "order" not in fixed:
        found["order"] = Stated(("x", "z", "context", "pipeline", "data"), mapping.line)
    if {"model.name", "model.flavor"} <= arguments.keys() and "model" not in fixed:
        name, flavor = arguments["model.name"], arguments["model.flavor"]
        found["model"] = Stated(f"{name.value} {flavor.value}", name.line)
    for column, reading in _WORDS.items():
        stated = reading(arguments)
        if stated is not None and column not in fixed:
            found[column] = stated
    _add_shards(arguments, found, fixed="mbs" in fixed)
    _add_ranks(arguments, found)
    _add_batch(arguments, found, fixed="mbs" in fixed)
    _add_chunks(arguments, found)
    _add_parts(arguments, found)
    return found


def stated_count(arguments: Arguments, *names: str) -> Stated | None:
    """The first of these that is a whole number from 1 up; not `None`, -1, `auto` or words."""
    for name in names:
        stated = arguments.get(name)
        value = stated.value.replace(",", "").replace("_", "") if stated else ""
        if stated is not None and re.fullmatch(r"[0-9]{1,15}(?:\.0*)?", value) and float(value) >= 1:
            return Stated(int(float(value)), stated.line)
    return None


_OF_EXPERTS = ("expert_model_parallel_size", "expert_parallel_degree")
EXPERT_COLUMNS = ("experts", "ep", "etp", "expert_shards", "dispatcher", "routing")
"""Columns that a row has only if it names its model."""


def experts_proof(arguments: Arguments) -> str:
    """What shows that a model has experts where their number is not stated, with its line; "" if nothing does."""
    for name in _OF_EXPERTS:
        size = stated_count(arguments, name)
        if size is not None and size.value != 1:
            return f"{name} {size.value} (line {size.line})"
    balanced = arguments.get("load_balancing_loss")
    return f"load_balancing_loss (line {balanced.line})" if balanced else ""


_ONE = Stated(1, 0)


def _product(found: dict[str, Stated], column: str, *factors: Stated | None) -> None:
    """A column that is the product of others, where all are known and it is not stated itself."""
    stated = [factor for factor in factors if factor is not None]
    if column not in found and len(stated) == len(factors):
        found[column] = Stated(math.prod(factor.value for factor in stated), stated[0].line)


def _add_shards(arguments: Arguments, found: dict[str, Stated], *, fixed: bool) -> None:
    """Ranks over which a weight is sharded, from Megatron's arguments, which may include tensor parallelism.

    fixed: the micro-batch is given.
    """
    weights = stated_count(arguments, "tensor_parallel_num_weight_shards")
    depth = stated_count(arguments, "depth_tensor_model_parallel_size")
    if weights is not None:
        shards, rest = divmod(weights.value, found.get("tp", _ONE).value)
        found["z"] = Stated(weights.value / found["tp"].value if rest else shards, weights.line)
    if (depth or weights) and "dp" in found and isinstance(found["z"].value, int):
        # Their data parallelism counts replicas.
        found["dp"] = Stated(found["dp"].value * found["z"].value, found["dp"].line)
    if depth and not fixed and "mbs" in found and found["mbs"].value % depth.value == 0:
        # Megatron-AxoNN's micro-batch is that of all ranks of depth.
        found["mbs"] = Stated(found["mbs"].value // depth.value, found["mbs"].line)


MODEL_AXES = ("tp", "y", "pp", "cp")


def _add_ranks(arguments: Arguments, found: dict[str, Stated]) -> None:
    _product(found, "n_gpus", stated_count(arguments, "num_nodes"), stated_count(arguments, "devices"))
    replicas = stated_count(arguments, "data_parallel_replicate_degree", "parallelism_config_dp_replicate_size")
    if "data_parallel_shard_degree" in arguments or "parallelism_config_dp_shard_size" in arguments:
        _product(found, "dp", found.get("z"), replicas or _ONE)
    if "tp" not in found:
        # Without the tensor-parallel size, the number of GPUs of a replica is unknown.
        return
    model = [found.get(axis, _ONE) for axis in MODEL_AXES]
    _product(found, "n_gpus", found.get("dp"), *model)
    ranks = math.prod(size.value for size in model)
    if "dp" not in found and "n_gpus" in found and found["n_gpus"].value % ranks == 0:
        found["dp"] = Stated(found["n_gpus"].value // ranks, found["n_gpus"].line)
    if replicas and "z" not in found and "dp" in found and found["dp"].value % replicas.value == 0:
        found["z"] = Stated(found["dp"].value // replicas.value, replicas.line)


def _add_batch(arguments: Arguments, found: dict[str, Stated], *, fixed: bool) -> None:
    """The global batch; fixed: the micro-batch is given."""
    steps = stated_count(arguments, "gradient_accumulation_steps")
    _product(found, "gbs", found.get("mbs"), found.get("dp"), steps)
    if "global_batch_size" in arguments:
        # torchtitan's -1 means no accumulation.
        _product(found, "gbs", stated_count(arguments, "local_batch_size"), found.get("dp"))
    if "local_batch_size" in arguments and not fixed and found.get("pp", _ONE).value != 1:
        # Its local batch is split into micro-batches where there are pipeline stages.
        found.pop("mbs", None)
        many, local = (
            stated_count(arguments, f"{name}") for name in ("pipeline_parallel_microbatches", "local_batch_size")
        )
        if many and local:
            # Older releases state their number in place of their size.
            found["mbs"] = Stated(max(1, local.value // many.value), many.line)
        _product(found, "mbs", stated_count(arguments, "pipeline_parallel_microbatch_size"))


def _add_chunks(arguments: Arguments, found: dict[str, Stated]) -> None:
    each = stated_count(arguments, "num_layers_per_virtual_pipeline_stage", "pipeline_parallel_layers_per_stage")
    looped = arguments.get("pipeline_parallel_schedule")
    if each and "vpp" not in found and {"layers", "pp"} <= found.keys():
        counted = [_true(arguments, f"account_for_{what}_in_pipeline_split") for what in ("embedding", "loss")]
        layers = found["layers"].value + sum(one is not None for one in counted) + sum(_less(arguments))
        found["vpp"] = Stated(max(1, -(-layers // each.value) // found["pp"].value), each.line)
    elif looped is not None and "vpp" not in found and found.get("pp", _ONE).value != 1:
        # Of torchtitan's looped and folded schedules a stage has two chunks unless its layers are given.
        found["vpp"] = Stated(2 if re.match("Interleaved|Looped|ZBV|DualPipe", looped.value) else 1, looped.line)
    elif "vpp" not in found and (silent := _first(arguments, *names_of("chunks"))) is not None:
        found["vpp"] = Stated(1, silent.line)


# Layers of each stage, where they differ.


def _add_parts(arguments: Arguments, found: dict[str, Stated]) -> None:
    """Layers of each model part: of a layout, of lists of modules, or where first and last part differ."""
    names = ("pipeline_model_parallel_layout", "module_fqns_per_model_part", "hybrid_layer_pattern")
    layout, modules, hybrid = map(arguments.get, names)
    stages, parts, line = found.get("pp", _ONE).value, list[int](), 0
    if layout is not None and not is_off(layout):
        # As it is written: a row, which knows the layers, takes it or refuses it.
        found["parts"], line = layout, layout.line
        with contextlib.suppress(UsageError):
            parts = [*parse_layout(layout.value).parts]
    elif hybrid is not None and "|" in hybrid.value:
        parts, line = [len(part) for part in hybrid.value.partition("/")[0].split("|")], hybrid.line
    elif modules is not None and not is_off(modules):
        rows, line = re.findall(r"\[([^][]*)\]", modules.value), modules.line
        parts = [len(re.findall(r"\blayers\.\d", row)) for row in rows]
    if parts and len(parts) % stages == 0:
        found["vpp"] = Stated(len(parts) // stages, line)
    if not line and "layers" in found and stages > 1:
        chunks, layers = found.get("vpp", _ONE).value, found["layers"].value
        counted = [_true(arguments, f"account_for_{what}_in_pipeline_split") for what in ("embedding", "loss")]
        if stages * chunks <= layers + sum(one is not None for one in counted):
            parts, line = _uneven_ends(arguments, layers, stages=stages, chunks=chunks)
            if ends := [arguments[name].line for name in _LESS if name in arguments]:
                # torchtitan counts embedding and LM head as some layers of the first and last part.
                less, line = _less(arguments), max(ends)
                each, left = divmod(layers + sum(less), stages * chunks)
                parts = [each + (part < left) for part in range(stages * chunks)]
                parts[0] -= less[0]
                parts[-1] -= less[1]
    whole = len(parts) % stages == 0 and sum(parts) == found.get("layers", _ONE).value
    if whole and len(set(parts)) == 1:
        found.pop("parts", None)
    elif parts:
        found.setdefault("parts", Stated(tuple(parts), line))


def _uneven_ends(arguments: Arguments, layers: int, *, stages: int, chunks: int) -> tuple[list[int], int]:
    """Blocks of each part by the layers of the first and last stage, or with embedding and loss in place of one."""
    ends = [stated_count(arguments, f"decoder_{end}_pipeline_num_layers") for end in ("first", "last")]
    counted = [_true(arguments, f"account_for_{what}_in_pipeline_split") for what in ("embedding", "loss")]
    if (method := arguments.get("pp_partition_method")) is not None and "embedding" in method.value:
        # DeepSpeed's partition counts the embedding where it is used first and last.
        counted = [method, method]
    stated = [one for one in (*ends, *counted) if one is not None]
    if not stated:
        return [], 0
    given = [0 if end is None else end.value for end in ends]
    inner = stages - sum(size > 0 for size in given)
    each = (layers - sum(given) + sum(one is not None for one in counted)) // max(1, inner)
    sizes = [given[0] or each, *[each] * (stages - 2), given[1] or each]
    parts = [size // chunks for _ in range(chunks) for size in sizes]
    parts[0] -= counted[0] is not None
    parts[-1] -= counted[1] is not None
    return parts, stated[0].line


def _first(arguments: Arguments, *names: str) -> Stated | None:
    return next((arguments[name] for name in names if name in arguments), None)


def _true(arguments: Arguments, *names: str) -> Stated | None:
    """The first of these switches that is on."""
    return next((arguments[name] for name in names if name in arguments and is_on(arguments[name])), None)


def _kv_heads(arguments: Arguments) -> Stated | None:
    grouped = arguments.get("group_query_attention")
    if grouped is not None and not is_on(grouped):
        return stated_count(arguments, "num_attention_heads")
    return stated_count(arguments, "num_query_groups", "num_key_value_heads")


def _gated(arguments: Arguments) -> Stated | None:
    if activation := _first(arguments, "activation", "hidden_act"):
        return Stated(bool(re.search("glu|silu|swish", activation.value.lower())), activation.line)
    switches = ("swiglu", "gated_linear_unit", "quick_geglu")
    stated = _true(arguments, *switches) or _first(arguments, *switches)
    return None if stated is None else Stated(is_on(stated), stated.line)


_GRANULARITY = ("recompute_granularity", "activations_checkpoint_granularity", "activation_checkpoint.mode")
_METHODS = ("recompute_method", "activations_checkpoint_method")
_CHECKPOINTED = ("checkpoint_activations", "gradient_checkpointing", "activations_checkpoint_method")


def _no_layers(arguments: Arguments) -> bool:
    """Whether full recompute is of the first 0 layers of each chunk."""
    terms = {"granularity": "full", "method": "block", "num_layers": "0"}
    return all((one := arguments.get(f"recompute_{name}")) and one.value == value for name, value in terms.items())


def _recompute(arguments: Arguments) -> Stated | None:
    """Recompute set: `full on 3` where it is on so many layers of each chunk alone, `full every 2` on every other."""
    some, method = stated_count(arguments, "recompute_num_layers"), _first(arguments, *_METHODS)
    full = f"full on {some.value}" if some and method and method.value == "block" else "full"
    kind, switch = _first(arguments, *_GRANULARITY), _first(arguments, *_CHECKPOINTED, "fsdp_activation_checkpointing")
    if kind is not None and not is_off(kind):
        words = {
            "full": "none" if _no_layers(arguments) else full,
            "selective": _selective(arguments),
            "memory_budget": "selective",
        }
        return Stated(words.get(kind.value.lower(), kind.value.lower()), kind.line)
    if _true(arguments, "recompute_activations"):
        return Stated(_selective(arguments), arguments["recompute_activations"].line)
    if switch is not None and not is_off(switch):
        return Stated(full, switch.line)
    silent = kind or switch
    return None if silent is None else Stated("none", silent.line)


def _selective(arguments: Arguments) -> str:
    """What selective recompute repeats: the framework's own choice, the stated modules, or every nth layer."""
    if (every := _first(arguments, "activation_checkpoint.selective_ac_option")) and every.value.isdecimal():
        return f"full every {every.value}" if int(every.value) > 1 else "full"
    modules = _first(arguments, "recompute_modules")
    words = re.findall(r"\w+", modules.value) if modules else ["core_attn"]
    return "selective" if words == ["core_attn"] else ",".join(name for name in MODULES if name in words) or "none"


_PRECISIONS = (
    ("bf16", ("bf16", "bf16.enabled", "bfloat16_enabled")),
    ("fp16", ("fp16", "fp16.enabled", "fp16_enabled")),
)
_NAMED = {"bf16": "bf16", "bfloat16": "bf16", "no": "fp32"}
_NAMED |= {word: f"fp{size}" for size in (16, 32) for word in (f"fp{size}", f"f{size}", str(size))}


def _below_16_bits(arguments: Arguments) -> Stated | None:
    """The number format that a recipe names, or is by default."""
    mixed, backend = (arguments.get(name, Stated("", 0)) for name in ("mixed_precision", "fp8_config.backend"))
    if mixed.value.lower() == "fp8":
        # Accelerate has torchao with a scale a tensor, also where no backend is stated, or Transformer Engine.
        scaled = "mxfp8" if _true(arguments, "fp8_config.use_mxfp8_block_scaling") else "fp8-delayed"
        formats = {"": "fp8-current", "ao": "fp8-current", "te": scaled}
        return Stated(formats.get(backend.value.lower(), "bf16"), mixed.line)
    for name, also, default in (
        ("fp4_format", "fp4_recipe", "nvfp4"),
        ("fp8_format", "fp8_recipe", "delayed"),
        ("float8", "float8.recipe_name", "rowwise"),
        ("enable_float8_linear", "float8.recipe_name", "tensorwise"),
        ("converters", "converters", ""),
        ("mixed_precision", "mixed_precision", ""),
        ("precision", "precision", ""),
    ):
        stated = arguments.get(name)
        if stated is None or is_off(stated):
            continue
        words = arguments.get(also, stated).value.lower()
        if found := format_named(words) or format_named(default):
            return Stated(found, stated.line)
    return None


def _precision(arguments: Arguments) -> Stated | None:
    if narrow := _below_16_bits(arguments):
        return narrow
    for precision, names in _PRECISIONS:
        if stated := _true(arguments, *names):
            return Stated(precision, stated.line)
    words = _first(arguments, "precision", "mixed_precision_param", "mixed_precision")
    if words is not None:
        found = re.search(r"bf16|bfloat16|fp?16|fp?32", words.value.lower())
        named = _NAMED.get(found[0] if found else words.value.lower().split("-")[0])
        return Stated(named, words.line) if named else None
    stated = _first(arguments, "bf16", "bf16.enabled", "fp16", "fp16.enabled")
    return None if stated is None else Stated("fp32", stated.line)


_STRATEGIES = {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"}


def _zero(arguments: Arguments) -> Stated | None:
    stage = _first(arguments, "zero_optimization.stage", "zero_stage", "zero_optimization_stage")
    if stage is not None and stage.value[:1] in {"0", "1", "2", "3"}:
        return Stated(stage.value[:1], stage.line)
    fsdp = _true(arguments, "use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp")
    if fsdp is not None:
        strategy = arguments.get("data_parallel_sharding_strategy", Stated("optim_grads_params", fsdp.line))
        torch = _true(arguments, "use_torch_fsdp2")
        return Stated("3" if torch else _STRATEGIES.get(strategy.value, strategy.value), strategy.line)
    shard = _first(arguments, "data_parallel_shard_degree", "parallelism_config_dp_shard_size")
    if shard is not None:
        # -1: the remaining ranks.
        return Stated("0" if shard.value == "1" else "3", shard.line)
    optimizer = arguments.get("optim.name")
    if optimizer is not None and "use_distributed_optimizer" not in arguments:
        return Stated(str(int("distributed" in optimizer.value)), optimizer.line)
    switch = arguments.get("use_distributed_optimizer")
    return None if switch is None else Stated(str(int(is_on(switch))), switch.line)


_ATTENTION = {
    **{"flash": "FlashAttention", "flash_attention_2": "FlashAttention", "fused": "cuDNN fused attention"},
    **{"sdpa": "SDPA", **dict.fromkeys(("unfused", "local", "eager", "math"), "unfused")},
}


def _attention(arguments: Arguments) -> Stated | None:
    backend = _first(arguments, "attention_backend", "attn_implementation")
    if backend and (kind := _ATTENTION.get(backend.value.lower().rsplit(".", maxsplit=1)[-1])):
        return Stated(kind, backend.line)
    if flash := _true(arguments, "use_flash_attn", "use_flash_attention"):
        return Stated("FlashAttention", flash.line)
    if layers := arguments.get("attention_config"):
        return Stated("FlashAttention" if "flash" in layers.value.lower() else "no flash attention", layers.line)
    engine, off = arguments.get("transformer_impl"), _first(arguments, "use_flash_attn", "use_flash_attention")
    if engine is not None:
        # Megatron-Core's own layers write all scores (core/transformer/dot_product_attention.py).
        own = engine.value == "local"
        return Stated("unfused" if own else "FlashAttention/TE", engine.line)
    return None if off is None else Stated("no flash attention", off.line)


def _overlap(arguments: Arguments) -> Stated | None:
    own = ("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap")
    names = {name: name.replace("_", "-") for name in own} | {"enable_async_tensor_parallel": "tp-comm-overlap"}
    stated = [arguments[name] for name in names if name in arguments]
    words = [word for name, word in names.items() if name in arguments and is_on(arguments[name])]
    return Stated(" + ".join(dict.fromkeys(words)) or "none", stated[0].line) if stated else None


_WORDS: dict[str, Callable[[Arguments], Stated | None]] = {
    "kv_heads": _kv_heads,
    "gated_mlp": _gated,
    **{name: partial(meaning_of, name) for name in ("seq_parallel", "biases", "tied")},
    "recompute": _recompute,
    "precision": _precision,
    "zero_stage": _zero,
    "attn": _attention,
    "overlap": _overlap,
    "gpu": lambda arguments: arguments.get("device_name"),
}
"""Readers of columns that are not plain numbers."""


_LESS = tuple(f"pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))


def _less(arguments: Arguments) -> list[int]:
    """Layers that torchtitan counts the embedding and the LM head as."""
    words = [arguments[name].value if name in arguments else "" for name in _LESS]
    return [int(value) if re.fullmatch(r"\d{1,9}", value) else 0 for value in words]


_TERM = re.compile(r"(!?)([\w.]+)(?:(!?=)(\S+))?")


def beside_others(kind: str, framework: str, arguments: Arguments, written: Mapping[str, str]) -> Iterator[Problem]:
    """Arguments that a framework refuses, or that are idle, beside others, by the table KIND: the reason, at its line.

    A row holds where each of its terms does: `name` is on, `!name` is not, `name=a|b` has one of these words,
    `name!=a|b` another one, to which the nearest is added. written: arguments as the file has them.
    """
    if switch := _true(arguments, "recompute_activations"):
        arguments = {**arguments, "recompute_granularity": Stated("selective", switch.line)}
    if _no_layers(arguments):
        arguments = {name: one for name, one in arguments.items() if not name.startswith("recompute_")}
    for one in _holding(kind, framework, arguments):
        terms = [found for found in map(_TERM.fullmatch, one["when"].split()) if found]
        line = next(arguments[found[2]].line for found in terms if found[2] in arguments)
        name, value = one["argument"], arguments.get(one["argument"], Stated("True", 0)).value
        choices = next((found[4].split("|") for found in terms if found[3] == "!=" and found[2] == name), [])
        near = (suggest(word, choices) for word in re.findall(r"\w+", value.lower()) if word not in choices)
        typed = f"{written.get(name, name)}{'' if value == 'True' else f' {value}'}"
        yield Problem(typed, one["why"] + (next(filter(None, near), "") if choices else ""), line)


def idle_names(framework: str, arguments: Arguments) -> set[str]:
    """Arguments that are idle beside others."""
    return {one["argument"] for one in _holding("idle", framework, arguments)}


def _holding(kind: str, framework: str, arguments: Arguments) -> Iterator[Mapping[str, str]]:
    """Rows of the table KIND that hold."""
    for one in records(kind):
        if framework not in one["frameworks"].split():
            continue
        if all(_holds(term, arguments, one["argument"]) for term in one["when"].split()):
            yield one


def _holds(term: str, arguments: Arguments, argument: str) -> bool:
    """Whether a term of an argument's row does; another argument that is not stated may have its default."""
    found = _TERM.fullmatch(term)
    assert found is not None, "the table is ours"
    stated = arguments.get(found[2])
    if stated is None and found[3] == "!=" and found[2] != argument:
        key = named(found[2])
        stated = Stated(key.default, 0) if key and key.default else None
    if found[3] is None or stated is None or is_off(stated):
        return (stated is not None and not is_off(stated)) == (not found[1]) and found[3] is None
    told = [re.fullmatch(found[4], word) is not None for word in re.findall(r"\w+", stated.value.lower())]
    return not all(told) if found[3] == "!=" else any(told)
