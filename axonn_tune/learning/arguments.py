"""Columns of the step CSV from a framework's arguments, as a command line gives them or a log prints them.

An argument is a name of Megatron-LM, Megatron-Bridge, NeMo, DeepSpeed, torchtitan or Hugging Face, written with
underscores, with the section it stands in before it (`zero_optimization.stage`), and the line that states it.
`columns_of` says what they mean for a row of measured steps (`validation/published/steps.csv`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stated:
    """What a file says, and in which line (from 1)."""

    value: str
    line: int


Arguments = Mapping[str, Stated]

_COUNTS: dict[str, tuple[str, ...]] = {
    "n_gpus": ("world_size",),
    "tp": ("tensor_model_parallel_size", "tensor_parallel_degree", "model_parallel_size"),
    "pp": ("pipeline_model_parallel_size", "pipeline_parallel_degree"),
    "vpp": ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"),
    "cp": ("context_parallel_size", "context_parallel_degree"),
    "dp": ("data_parallel_size", "deepspeed.world_size"),
    "gbs": ("global_batch_size", "train_batch_size"),
    "mbs": ("micro_batch_size", "train_micro_batch_size_per_gpu", "local_batch_size"),
    "seq": ("seq_length", "seq_len", "encoder_seq_length", "max_sequence_length"),
    "layers": ("num_layers", "num_hidden_layers", "encoder_num_layers", "n_layers"),
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads", "n_heads"),
    "ffn": ("ffn_hidden_size", "intermediate_size"),
    "vocab": ("padded_from_vocab_size", "vocab_size", "padded_vocab_size"),
    "vocab_multiple": ("make_vocab_size_divisible_by",),
    "experts": ("num_experts", "num_moe_experts"),
}
"""Columns that are whole numbers, and the arguments that state them; the first stated counts.

DeepSpeed's world size is that of the ranks that share a batch (runtime/config.py takes the data-parallel world
size where it is told of model parallelism). `experts` is no column of the CSV: a record with more than one is refused.
"""

_OTHERS = {
    *(
        "pipeline_parallel_microbatch_size",
        "devices",
        "num_nodes",
        "gradient_accumulation_steps",
        "data_parallel_replicate_degree",
    ),
    *("data_parallel_shard_degree", "num_layers_per_virtual_pipeline_stage", "group_query_attention"),
    *("num_query_groups", "num_key_value_heads", "swiglu", "gated_linear_unit", "activation", "hidden_act"),
    *("sequence_parallel", "recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("checkpoint_activations", "gradient_checkpointing", "activation_checkpoint.mode"),
    *("activations_checkpoint_granularity", "activations_checkpoint_method", "activation_checkpointing"),
    *("bf16", "fp16", "bf16.enabled", "fp16.enabled", "fp8", "fp8_format", "precision", "mixed_precision_param"),
    *("bfloat16_enabled", "fp16_enabled", "float8"),
    *("use_distributed_optimizer", "zero_stage", "zero_optimization_stage", "zero_optimization.stage"),
    *("use_torch_fsdp2", "use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy", "optim.name"),
    *("use_flash_attn", "use_flash_attention", "attention_backend", "transformer_impl", "attn_implementation"),
    *("overlap_grad_reduce", "overlap_param_gather", "tp_comm_overlap", "ub_tp_comm_overlap"),
    *("compile", "compile.enable", "training.compile", "model.flavor", "model.name", "device_name"),
}

NAMES = frozenset({name for names in _COUNTS.values() for name in names} | _OTHERS)
"""Every argument that means something here."""

_TRUE, _FALSE = {"true", "1", "yes", "on"}, {"false", "0", "no", "off", "none", "null", ""}


def known_name(name: str, section: str = "") -> str:
    """The name under which an argument is kept, from its name and the section it stands in; empty if unknown."""
    plain = name.strip().lstrip("-+").replace("-", "_").lower()
    parts = [*section.replace("-", "_").lower().split("."), *plain.split(".")]
    within = ".".join(parts[-2:])
    return next((known for known in (within, parts[-1]) if known in NAMES), "")


def plain_value(value: str) -> str:
    """A printed value without quotes, the comma of JSON, and a comment."""
    return value.split(" #")[0].strip().rstrip(",").strip("\"' ")


def arguments_of(words: Iterable[Stated]) -> dict[str, Stated]:
    """Arguments of a command line: `--name value`, `--name=value`, `--switch`, `section.name=value`."""
    found: dict[str, Stated] = {}
    waiting = ""
    for word in words:
        named = re.fullmatch(r"(--?[A-Za-z][\w.-]*|\+{0,2}[A-Za-z][\w.]*(?==))(?:=(.*))?", word.value, re.DOTALL)
        if named:
            waiting = "" if named[2] is not None else known_name(named[1])
            if known_name(named[1]):
                value = "True" if named[2] is None else plain_value(named[2])
                found[known_name(named[1])] = Stated(value, word.line)
        elif waiting:
            found[waiting] = Stated(plain_value(word.value), word.line)
            waiting = ""
    return found


_DEEPSPEED = re.compile(r":print\]\s+([a-z]\w*) +\.* *(.*)$")
_DUMPED = re.compile(r"(?:^|\s)([a-z]\w*) \.{2,} ?(.*)$")
_JSON = re.compile(r'"(\w+)":\s*(.*)$')
_YAML = re.compile(r"\s*(?:- )?([A-Za-z_]\w*):(?:\s+(.*))?$")
_MESH = re.compile(r"Building (?:device mesh with parallelism: (.*)|\d-D device mesh with (\[.*?\]), (\[[\d, ]*\]))")

_SAID: tuple[tuple[str, re.Pattern[str], tuple[str, ...]], ...] = (
    ("world size", re.compile(r"using world size: (\d+)"), ("world_size",)),
    ("world size", re.compile(r"(?<![\w-])data-parallel[- ]size: (\d+)"), ("data_parallel_size",)),
    ("world size", re.compile(r"(?<![\w-])context-parallel size: (\d+)"), ("context_parallel_size",)),
    ("world size", re.compile(r"(?<![\w-])tensor-model-parallel size: (\d+)"), ("tensor_model_parallel_size",)),
    ("world size", re.compile(r"(?<![\w-])pipeline-model-parallel size: (\d+)"), ("pipeline_model_parallel_size",)),
    ("padded vocab", re.compile(r"padded vocab \(size: (\d+)\)"), ("padded_from_vocab_size",)),
    ("global batch size", re.compile(r"\| global batch size:\s+(\d+) \|"), ("global_batch_size",)),
    ("global_batch_size", re.compile(r"\| global_batch_size: (\d+)(?= |$)"), ("global_batch_size",)),
    (
        "batch size",
        re.compile(r"local batch size:? (\d+), global batch size:? (\d+),"),
        ("local_batch_size", "global_batch_size"),
    ),
    ("sequence length", re.compile(r"sequence length:? (\d+),"), ("seq_len",)),
    ("capacity", re.compile(r"capacity: (.+?) with [\d.]+GiB memory"), ("device_name",)),
    (
        "checkpointing",
        re.compile(r"Applied (full|selective)\w* activation checkpointing", re.I),
        ("activation_checkpoint.mode",),
    ),
    ("TransformerBlock", re.compile(r"(Compiling) each TransformerBlock"), ("compile",)),
    ("Float8", re.compile(r"(Float8) (?:\w+ )?training active"), ("float8",)),
    ("total parameters", re.compile(r"Model (\S+) (\S+) size: "), ("model.name", "model.flavor")),
)
"""Other sentences of logs: a word to look for first, what to match, and the arguments that its groups state."""

_MESH_NAMES = {
    "pp": "pipeline_parallel_degree",
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "dp": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
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
    known = known_name(name, section)
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


def columns_of(arguments: Arguments) -> dict[str, Stated]:
    """What the arguments say of a row of measured steps; columns they are silent about are left out."""
    found: dict[str, Stated] = {}
    for column, names in _COUNTS.items():
        number = next((one for name in names if (one := _count(arguments, name)) is not None), None)
        if number is not None:
            found[column] = number
    for column, reading in _WORDS.items():
        stated = reading(arguments)
        if stated is not None:
            found[column] = stated
    _add_products(arguments, found)
    return found


def _count(arguments: Arguments, name: str) -> Stated | None:
    """A whole number from 1 up; None where the value is `None`, -1, `auto` or words."""
    stated = arguments.get(name)
    value = stated.value.replace(",", "").replace("_", "") if stated else ""
    if stated is None or not re.fullmatch(r"\d{1,15}(?:\.0*)?", value) or float(value) < 1:
        return None
    return Stated(str(int(float(value))), stated.line)


def _add_products(arguments: Arguments, found: dict[str, Stated]) -> None:
    """Columns that follow from others by definition."""

    def product(column: str, *factors: Stated | None) -> None:
        stated = [factor for factor in factors if factor is not None]
        if column not in found and len(stated) == len(factors):
            value = 1
            for factor in stated:
                value *= int(factor.value)
            found[column] = Stated(str(value), stated[0].line)

    one = Stated("1", 0)
    product("n_gpus", _count(arguments, "num_nodes"), _count(arguments, "devices"))
    shard = _count(arguments, "data_parallel_shard_degree")
    product("dp", shard, _count(arguments, "data_parallel_replicate_degree") or one)
    if "tp" in found:
        # A log that is silent about tensor parallelism does not say how many GPUs its replicas have.
        product("n_gpus", found.get("dp"), *(found.get(axis, one) for axis in ("tp", "pp", "cp")))
    steps = _count(arguments, "gradient_accumulation_steps")
    product("gbs", found.get("mbs"), found.get("dp"), steps)
    if "global_batch_size" in arguments:
        # torchtitan's -1 means no accumulation.
        product("gbs", _count(arguments, "local_batch_size"), found.get("dp"))
    if "local_batch_size" in arguments and found.get("pp", one).value != "1":
        # Its local batch is split into micro-batches where there are pipeline stages.
        found.pop("mbs", None)
        product("mbs", _count(arguments, "pipeline_parallel_microbatch_size"))
    each = _count(arguments, "num_layers_per_virtual_pipeline_stage")
    if each and "vpp" not in found and {"layers", "pp"} <= found.keys():
        chunks = int(found["layers"].value) // (int(found["pp"].value) * int(each.value))
        found["vpp"] = Stated(str(max(1, chunks)), each.line)
    elif "vpp" not in found and (silent := _first(arguments, *_COUNTS["vpp"])) is not None:
        found["vpp"] = Stated("1", silent.line)


def _first(arguments: Arguments, *names: str) -> Stated | None:
    return next((arguments[name] for name in names if name in arguments), None)


def _true(arguments: Arguments, *names: str) -> Stated | None:
    """The first of these switches that is on."""
    return next((arguments[name] for name in names if name in arguments and _on(arguments[name])), None)


def _on(stated: Stated) -> bool:
    return stated.value.lower() in _TRUE


def _off(stated: Stated) -> bool:
    return stated.value.lower() in _FALSE


def _switch(*names: str) -> Callable[[Arguments], Stated | None]:
    """Reads a column that is 1 or 0."""

    def reading(arguments: Arguments) -> Stated | None:
        stated = _true(arguments, *names) or _first(arguments, *names)
        return None if stated is None else Stated(str(int(_on(stated))), stated.line)

    return reading


def _kv_heads(arguments: Arguments) -> Stated | None:
    grouped = arguments.get("group_query_attention")
    if grouped is not None and not _on(grouped):
        return _count(arguments, "num_attention_heads")
    return _count(arguments, "num_query_groups") or _count(arguments, "num_key_value_heads")


def _gated(arguments: Arguments) -> Stated | None:
    activation = _first(arguments, "activation", "hidden_act")
    if activation is not None:
        return Stated(str(int(bool(re.search("glu|silu|swish", activation.value.lower())))), activation.line)
    return _switch("swiglu", "gated_linear_unit")(arguments)


def _recompute(arguments: Arguments) -> Stated | None:
    """Which activations are recomputed; words that mean neither kind where only some layers are."""
    some, method = _count(arguments, "recompute_num_layers"), _first(arguments, "recompute_method")
    kind = _first(
        arguments, "recompute_granularity", "activations_checkpoint_granularity", "activation_checkpoint.mode"
    )
    if kind is not None and not _off(kind):
        partial = kind.value == "full" and method is not None and method.value == "block" and some is not None
        words = f"only {some.value} layers of each stage" if partial and some is not None else kind.value.lower()
        return Stated(words, kind.line)
    switch = _first(arguments, "checkpoint_activations", "gradient_checkpointing", "activations_checkpoint_method")
    if switch is not None and not _off(switch):
        return Stated("full", switch.line)
    silent = kind or switch
    return None if silent is None else Stated("none", silent.line)


_PRECISIONS = (
    ("fp8", ("fp8", "fp8_format", "float8")),
    ("bf16", ("bf16", "bf16.enabled", "bfloat16_enabled")),
    ("fp16", ("fp16", "fp16.enabled", "fp16_enabled")),
)


def _precision(arguments: Arguments) -> Stated | None:
    for precision, names in _PRECISIONS:
        stated = next((arguments[name] for name in names if name in arguments and not _off(arguments[name])), None)
        if stated is not None and (precision == "fp8" or _on(stated)):
            return Stated(precision, stated.line)
    words = _first(arguments, "precision", "mixed_precision_param")
    if words is not None:
        found = re.search(r"bf16|bfloat16|fp?16|fp?32|fp8", words.value.lower())
        named = {"bfloat16": "bf16", "16": "fp16", "f16": "fp16", "32": "fp32", "f32": "fp32"}
        short = (
            found[0] if found else {"16": "fp16", "32": "fp32", "16-mixed": "fp16", "32-true": "fp32"}.get(words.value)
        )
        return None if short is None else Stated(named.get(short, short), words.line)
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
    shard = _count(arguments, "data_parallel_shard_degree")
    if shard is not None:
        return Stated("3" if int(shard.value) > 1 else "0", shard.line)
    optimizer = arguments.get("optim.name")
    if optimizer is not None and "use_distributed_optimizer" not in arguments:
        return Stated(str(int("distributed" in optimizer.value)), optimizer.line)
    return _switch("use_distributed_optimizer")(arguments)


def _attention(arguments: Arguments) -> Stated | None:
    backend = _first(arguments, "attention_backend", "attn_implementation")
    if backend is not None:
        words = backend.value.lower().rsplit(".", maxsplit=1)[-1]
        kinds = {"flash": "FlashAttention", "flash_attention_2": "FlashAttention", "fused": "cuDNN fused attention"}
        kinds |= {"sdpa": "SDPA", "unfused": "unfused", "local": "unfused", "eager": "unfused"}
        if words in kinds:
            return Stated(kinds[words], backend.line)
    flash = _true(arguments, "use_flash_attn", "use_flash_attention")
    if flash is not None:
        return Stated("FlashAttention", flash.line)
    engine = arguments.get("transformer_impl")
    if engine is not None and engine.value == "transformer_engine":
        return Stated("FlashAttention/TE", engine.line)
    off = _first(arguments, "use_flash_attn", "use_flash_attention")
    return None if off is None else Stated("no flash attention", off.line)


def _overlap(arguments: Arguments) -> Stated | None:
    names = {
        "overlap_grad_reduce": "overlap-grad-reduce",
        "overlap_param_gather": "overlap-param-gather",
        "tp_comm_overlap": "tp-comm-overlap",
        "ub_tp_comm_overlap": "tp-comm-overlap",
    }
    stated = [arguments[name] for name in names if name in arguments]
    if not stated:
        return None
    words = [word for name, word in names.items() if name in arguments and _on(arguments[name])]
    return Stated(" + ".join(dict.fromkeys(words)) or "none", stated[0].line)


def _model(arguments: Arguments) -> Stated | None:
    name, flavor = arguments.get("model.name"), arguments.get("model.flavor")
    return None if name is None or flavor is None else Stated(f"{name.value} {flavor.value}", name.line)


_WORDS: dict[str, Callable[[Arguments], Stated | None]] = {
    "kv_heads": _kv_heads,
    "gated_mlp": _gated,
    "seq_parallel": _switch("sequence_parallel"),
    "recompute": _recompute,
    "precision": _precision,
    "zero_stage": _zero,
    "attn": _attention,
    "overlap": _overlap,
    "model": _model,
    "gpu": lambda arguments: arguments.get("device_name"),
}
"""Columns that need more than a number, and what reads each."""
