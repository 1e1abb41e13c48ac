"""Runs of Hugging Face's Trainer, of what descends from it, and of Accelerate, in the words of the tables.

Their files leave most to defaults of the tool, and state one thing in several ways: `fsdp: full_shard`, a config of
Accelerate, `fsdp_config`. `completed` adds what follows, by the names that all else reads. What each argument means is
in the tables `accelerate`, `trainer` and `llamafactory`; the tools and their tables are in `trainers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from axonn_tune.errors import DocumentError, Problem
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.keys import NOTHING, Arguments, Stated, is_off, is_on, keys_of, names_of, records, table
from axonn_tune.learning.adapters import stated_adapters, tool_defaults
from axonn_tune.specs.catalog import available, load_model
from axonn_tune.specs.hugging_face import model_from_hf_config
from axonn_tune.specs.loading import read_text
from axonn_tune.specs.model import Model, ModelDefaults
from axonn_tune.vocabulary import Packing

AUTO = Stated("auto", 0)
"""What a Trainer fills in, as it does where nothing is stated."""
NODE = 8
"""GPUs of a node where a file does not say how many."""


@dataclass
class Completed:
    """What follows from a run's arguments: further ones, what was assumed, and what is not priced."""

    pairs: dict[str, Stated] = field(default_factory=dict)
    assumed: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


BRIDGE = re.compile(r"(?m)(?:^|[\s/])run_recipe\.py\b")
"""Megatron-Bridge's program."""


def tool_of_run(text: str) -> Mapping[str, str] | None:
    """The tool whose mark is in a text of commands and pairs; None for none."""
    return next((one for one in records("trainers") if re.search(one["mark"], text, re.MULTILINE)), None)


def of_own_program(text: str) -> bool:
    """Whether a text of commands and pairs is of no tool, but of a program whose arguments may have any names."""
    return tool_of_run(text) is None and re.search(r"(?m)^program=(?!\S*pretrain_)\S", text) is not None


def by_megatron(text: str) -> str:
    """The tool that trains by Megatron-Core, as a text of commands and pairs has it; "" where none does."""
    tool = tool_of_run(text)
    return tool["title"] if tool is not None and tool["megatron"] else ""


def trainer_of(text: str) -> Mapping[str, str] | None:
    """The same of one that trains as Hugging Face's Trainer does; None for others."""
    return None if by_megatron(text) else tool_of_run(text)


def bridge_mode(recipe: str, mode: str) -> str:
    """What a recipe of Megatron-Bridge trains, as its program infers it: pretrain, sft, lora or dora.

    Source: NVIDIA-NeMo/Megatron-Bridge@067f987d, scripts/training/recipe_metadata.py, infer_recipe_mode.
    """
    inside = {"sft": "sft", "finetune": "sft", "dora": "dora", "peft": "lora", "lora": "lora"}
    found = (meant for word, meant in inside.items() if f"_{word}_" in f"_{recipe.lower()}_")
    return mode.lower() or next(found, "pretrain")


def completed(
    path: str, text: str, stated: Arguments, *, given: object, node: Stated | None
) -> tuple[list[tuple[str, Stated]], list[str]]:
    """Arguments that follow from those of a Trainer's or Accelerate's run, and what was assumed; DocumentError for
    what is not priced.

    text: commands and `name=value` lines. given: the number of GPUs that is asked for; node: stated GPUs of a node.
    """
    found = Completed()
    trainer = trainer_of(text)
    stated = {name.rpartition(".")[2]: one for name, one in stated.items() if "_config." in name} | {**stated}
    counts = {name: _count(stated, name) for name in ("num_processes", "world_size", "num_machines")}
    gpus = given if isinstance(given, int) else counts["num_processes"] or counts["world_size"]
    of_node = int(node.value) if node else None
    if counts["num_processes"] and counts["num_machines"]:
        of_node = max(1, counts["num_processes"] // counts["num_machines"])
    sharded = _kind(stated, trained=trainer is not None)
    if (tool := tool_of_run(text)) is not None:
        _add_adapters(found, tool, stated)
    if trainer is not None:
        _add_trainer(found, trainer, stated, sharded=sharded, gpus=gpus)
    if sharded is not None and sharded != "deepspeed":
        shards = _sharding(found, stated, trainer) if sharded == "fsdp" else "no_shard"
        _add_degrees(found, stated, shards, gpus=gpus, node=of_node)
    if sharded == "deepspeed":
        _add_deepspeed(found, stated, trainer)
    if trainer is not None:
        found.assumed += _said({**stated, **found.pairs}, sharded)
    if found.problems:
        raise DocumentError(path, found.problems)
    return [*found.pairs.items()], found.assumed


def _count(stated: Arguments, name: str) -> int | None:
    value = stated.get(name, NOTHING).value
    return int(value) if re.fullmatch(r"[1-9][0-9]{0,8}", value) else None


def _kind(stated: Arguments, *, trained: bool = True) -> str | None:
    """How weights are sharded: fsdp, deepspeed, or ddp; None where no argument of these tools says so.

    trained: by a Trainer, which has whole weights on each rank unless it is told otherwise.
    """

    def on(*names: str) -> bool:
        return any(name in stated and not is_off(stated[name]) for name in names)

    named = stated.get("distributed_type", NOTHING).value.lower()
    if on("deepspeed", "deepspeed_config_file", "zero_optimization.stage", "use_deepspeed") or named == "deepspeed":
        return "deepspeed"
    if named == "fsdp" or on("fsdp", "use_fsdp", "fsdp_version"):
        return "fsdp"
    whole = trained and {*names_of("trainer.model")} & stated.keys()
    return "ddp" if named in ("multi_gpu", "no") or whole else None


def _add_trainer(
    found: Completed, trainer: Mapping[str, str], stated: Arguments, *, sharded: str | None, gpus: int | None
) -> None:
    """What a tool has otherwise than others, by its line of the table, and its defaults."""
    for key in (key for name in trainer["tables"].split() for key in table(name) if not key.field and key.meanings):
        told = stated.get(key.name, NOTHING)
        if meant := key.meanings.get(told.value.lower()):
            found.pairs[key.name] = replace(told, value=meant)
    config = stated.get("deepspeed", NOTHING)
    named = (one for one in records("presets") if one["config"] == f"{trainer['title']} {config.value}")
    found.pairs |= {one["key"]: replace(config, value=one["value"]) for one in named}
    if stated.get("fsdp_version", NOTHING).value == "2":
        # FSDP2 has no reentrant checkpoints.
        whole = (key.name for name in trainer["tables"].split() for key in table(name) if key.field == _WHOLE_BLOCK)
        found.pairs |= {name: Stated("False", 0) for name in whole}
    batched = {"gradient_accumulation_steps", "train_batch_size"} & stated.keys()
    if trainer["accumulates"] and not batched and gpus is not None:
        each = gpus * (_count(stated, "per_device_train_batch_size") or 1)
        steps = max(1, -(-int(trainer["accumulates"]) // each))
        found.pairs["gradient_accumulation_steps"] = Stated(str(steps), 0)
        found.assumed.append(f"gradient_accumulation_steps is not stated: {steps}, as {trainer['title']} has it")
    unstated = not {"bf16", "fp16"} & stated.keys()
    if trainer["mixed"] == "bf16" and unstated:
        found.pairs["bf16"] = Stated("True", 0)
        found.assumed.append(f"neither bf16 nor fp16 is stated: bf16, as {trainer['title']} has it")
    if trainer["mixed"] == "type" and unstated:
        # ms-swift's mixed precision is that of the type that weights are loaded in, which models of the hub state.
        loaded = stated.get("torch_dtype", NOTHING)
        if loaded.value.lower() in ("", "auto", "none"):
            loaded = found.pairs["torch_dtype"] = Stated("bfloat16", 0)
            found.assumed.append(f"torch_dtype is not stated: bfloat16, as {trainer['title']} reads it of most models")
        name = "bf16" if loaded.value.lower() in ("bf16", "bfloat16", "torch.bfloat16") else "fp16"
        found.pairs[name] = replace(loaded, value="True")
    _add_defaults(found, trainer, stated)
    _add_recompute(found, trainer, stated)
    _add_precision(found, trainer, {**stated, **found.pairs}, sharded)


_WHOLE_BLOCK = "step.recompute_whole_block"


def _add_defaults(found: Completed, trainer: Mapping[str, str], stated: Arguments) -> None:
    """Defaults of the tool for fields that no argument states."""
    keys = {key.field: key for name in reversed(trainer["tables"].split()) for key in table(name)}
    said = []
    for key in keys.values():
        given = any(stated.get(other.name, AUTO).value.lower() != "auto" for other in keys_of(key.field))
        if key.status == "modelled" and key.default not in ("", "off") and not given and key.name not in found.pairs:
            found.pairs[key.name] = Stated(key.default, 0)
            said.append(f"{key.name} {key.default}")
    if said:
        found.assumed.append(f"not stated, so as {trainer['title']} has it: {', '.join(said)}")


def _add_recompute(found: Completed, trainer: Mapping[str, str], stated: Arguments) -> None:
    """The one switch of recompute that counts, of the Trainer and of FSDP."""
    both = {**stated, **found.pairs}
    attention = both.get("flash_attn", NOTHING).value.lower()
    keys = (key for name in trainer["tables"].split() for key in table(name) if key.field == "recompute_switch")
    if (own := next(keys, None)) is not None and own.is_opposite:
        # LLaMA-Factory's own switch counts, whatever the Trainer's is (model/model_utils/checkpointing.py).
        off = both.get(own.name, NOTHING)
        found.pairs["gradient_checkpointing"] = replace(off, value=str(not is_on(off)))
    elif is_on(stated.get("fsdp_activation_checkpointing", NOTHING)):
        found.pairs["gradient_checkpointing"] = stated["fsdp_activation_checkpointing"]
    if is_on(stated.get("use_flash_attention_2", NOTHING)):
        found.pairs["attn_implementation"] = Stated("flash_attention_2", stated["use_flash_attention_2"].line)
    if attention in _KERNELS:
        found.pairs["attn_implementation"] = Stated(_KERNELS[attention], both["flash_attn"].line)


def _add_precision(found: Completed, trainer: Mapping[str, str], stated: Arguments, sharded: str | None) -> None:
    """The types of a run whose weights stay as they are loaded: without mixed precision, and with it where neither
    Accelerate's FSDP, nor DeepSpeed, nor the tool (`upcasts`) makes FP32 ones of them."""
    loaded = stated.get("torch_dtype", NOTHING).value.removeprefix("torch.").lower()
    mixed = [name for name in ("bf16", "fp16", "pure_bf16") if is_on(stated.get(name, NOTHING))]
    if stated.get("mixed_precision", NOTHING).value.lower() in ("bf16", "fp16", "fp8"):
        mixed.append("mixed_precision")
    as_loaded = not mixed or (mixed == ["bf16"] and sharded == "ddp" and not trainer["upcasts"])
    if "pure_bf16" in mixed or (as_loaded and loaded in ("bf16", "bfloat16")):
        line = stated[mixed[0] if mixed else "torch_dtype"].line
        found.pairs |= {name: Stated("True", line) for name in ("bf16", "pure_bf16")}
        if "pure_bf16" not in mixed and stated_adapters(stated) and "lora_dtype" not in stated:
            # PEFT casts adapters up, whatever the base is.
            found.pairs["lora_dtype"] = Stated("fp32", 0)
    elif not mixed and not any(is_on(stated.get(f"{name}.enabled", NOTHING)) for name in ("bf16", "fp16")):
        whose = trainer["title"]
        found.assumed.append(
            f"neither bf16 nor fp16 is stated: in FP32, as {whose} has it; --precision bf16 prices it in BF16"
        )


_KERNELS = {"auto": "sdpa", "sdpa": "sdpa", "disabled": "eager"}
_KERNELS |= {f"fa{version}": f"flash_attention_{version}" for version in (2, 3)}
"""LLaMA-Factory's words for kernels of attention; auto leaves the choice to transformers, which takes torch's."""


def _add_adapters(found: Completed, trainer: Mapping[str, str], stated: Arguments) -> None:
    """What trains by the tool's defaults; PEFT's adapters as they are where a tool has none of its own."""
    more = [*tool_defaults(trainer, stated)]
    found.pairs |= dict(more)
    if more:
        said = ", ".join(f"{name} {one.value}" for name, one in more)
        found.assumed.append(f"not stated, so as {trainer['title']} has it: {said}")
    adapters = stated_adapters({**stated, **found.pairs})
    wide = {"", "none", "false", "0"}
    narrow = (name for name in names_of("tuning.bits") if stated.get(name, NOTHING).value.lower() not in wide)
    found.problems += [
        Problem(name, "quantized base weights train beside adapters alone", stated[name].line)
        for name in (() if adapters else narrow)
    ]
    if adapters is not None and adapters.tables:
        trained = " and ".join(adapters.tables)
        found.assumed.append(
            f"{trained} beside adapters: PEFT keeps what it was before, 2 bytes a weight, which is not priced"
        )
    patterns = (name for name in names_of("tuning.targets") if re.search(r"[\\^$*|(]", stated.get(name, NOTHING).value))
    found.problems += [
        Problem(name, "is a pattern: name the modules, as in q_proj v_proj", stated[name].line) for name in patterns
    ]
    if adapters is not None and not adapters.targets:
        whose = "Megatron-Bridge" if trainer["megatron"] else "PEFT"
        found.assumed.append(f"what is adapted is not stated: as {whose} has it")


_STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
"""Strategies of FSDP1, by their numbers from 1 (torch/distributed/fsdp/api.py)."""


def _sharding(found: Completed, stated: Arguments, trainer: Mapping[str, str] | None) -> str:
    """The strategy of FSDP, and what is not resharded or prefetched by it.

    Accelerate's default is FSDP1 (utils/dataclasses.py, fsdp_version), the Trainer's own FSDP2 (transformers 5.24.0,
    training_args.py, _process_fsdp_args).
    """
    words = stated.get("fsdp", NOTHING).value.lower()
    stated = {**stated, **found.pairs}
    own = trainer["fsdp_version"] if trainer is not None else ""
    default = "2" if words and "distributed_type" not in stated and "use_fsdp" not in stated else "1"
    version = stated.get("fsdp_version", Stated(own or default, 0)).value
    if "fsdp_version" not in stated:
        found.pairs["fsdp_version"] = Stated(version, 0)
        whose = trainer["title"] if trainer and own else "Hugging Face's Trainer" if version == "2" else "Accelerate"
        found.assumed.append(f"fsdp_version is not stated: {version}, as {whose} has it")
    told = [stated.get(name, NOTHING).value for name in ("fsdp_sharding_strategy", "fsdp_reshard_after_forward")]
    told = [words, told[1] if version == "2" else told[0] or told[1]]
    strategy = next((one for text in told if (one := _strategy(text))), "full_shard")
    if "offload" in words:
        found.pairs["fsdp_offload_params"] = Stated("True", stated["fsdp"].line)
    if strategy in ("shard_grad_op", "hybrid_shard_zero2", "no_reshard"):
        found.pairs["fsdp_reshard_after_forward"] = Stated("False", 0)
    elif version == "1":
        found.pairs["fsdp_reshard_after_forward"] = Stated("True", 0)
    policy = stated.get("fsdp_auto_wrap_policy", Stated("auto" if words else "", 0))
    if policy.value.lower() in ("", "no_wrap"):
        # One unit holds all weights from its forward to its backward pass.
        found.pairs["fsdp_reshard_after_forward"] = Stated("False", policy.line)
        found.assumed.append("fsdp_auto_wrap_policy NO_WRAP: the model is one unit, priced as all blocks kept gathered")
    if "size" in policy.value.lower():
        found.assumed.append(f"fsdp_auto_wrap_policy {policy.value}: units are priced as one a block")
    return strategy


def _strategy(text: str) -> str:
    """The strategy that a text names, by its word or its number."""
    words = [word.lstrip("_") for word in re.findall(r"[a-z0-9_]+", text.lower())]
    numbered = dict(zip("12345", _STRATEGIES, strict=True))
    found = [numbered.get(word, word) for word in words]
    return next((word for word in found if word in (*_STRATEGIES, "no_reshard")), "")


def _add_degrees(found: Completed, stated: Arguments, strategy: str, *, gpus: int | None, node: int | None) -> None:
    """Shards and replicas of a strategy: hybrid ones shard inside of a node and replicate over nodes."""
    if gpus is None or {*_DEGREES} & stated.keys():
        return
    # ms-swift's sequence parallelism has groups of its own, whose ranks hold the same samples.
    context = next((size for name in names_of("context") if (size := _count(stated, name))), 1)
    gpus, node = max(1, gpus // context), node and max(1, node // context)
    if strategy == "no_shard":
        shards = 1
    elif strategy.startswith("hybrid"):
        shards = min(node or NODE, gpus)
        if node is None and gpus > NODE:
            found.assumed.append(f"GPUs of a node are not stated: {NODE}, over which {strategy} shards")
    else:
        return
    sizes = {"shard": shards, "replicate": max(1, gpus // shards)}
    found.pairs |= {f"parallelism_config_dp_{name}_size": Stated(str(size), 0) for name, size in sizes.items()}
    if strategy != "no_shard":
        found.assumed.append(f"{strategy}: {sizes['replicate']} replicas of {shards} shards, one a node")


_DEGREES = (
    *(f"parallelism_config_{name}_size" for name in ("dp_shard", "dp_replicate", "tp", "cp")),
    *("dp_shard_size", "dp_replicate_size", "tensor_parallel_size", "context_parallel_size"),
)


def _add_deepspeed(found: Completed, stated: Arguments, trainer: Mapping[str, str] | None) -> None:
    """What a Trainer fills in for "auto", and Accelerate's stage where neither says one."""
    both = {**stated, **found.pairs}
    for name in ("bf16", "fp16"):
        filled = stated.get(f"{name}.enabled", NOTHING)
        if trainer is not None and filled.value.lower() == "auto":
            mixed = stated.get("mixed_precision", NOTHING).value.lower() == name
            found.pairs[f"{name}.enabled"] = Stated(str(mixed or is_on(both.get(name, NOTHING))), filled.line)
    stages = ("zero_optimization.stage", "zero_stage", "zero_optimization_stage")
    if not {*stages, "deepspeed_config_file"} & stated.keys() and trainer is None:
        found.pairs["zero_stage"] = Stated("2", 0)
        found.assumed.append("zero_stage is not stated: 2, as Accelerate has it")


def stated_packing(stated: Arguments, framework: Framework) -> Packing:
    """How a run batches sequences that differ in length; Trainers pad those that are neither packed nor flattened."""
    if is_off(stated.get("dataset.enable_offline_packing", Stated("True", 0))):
        return "padded"
    packed = ("neat_packing", "packing", "sample_packing", "padding_free")
    on = [name for name in packed if is_on(stated.get(name, NOTHING))]
    if on:
        return "padding-free" if on == ["padding_free"] else "packed"
    return "packed" if framework.packs_alone or "padded" not in framework.packings else "padded"


def _said(stated: Arguments, sharded: str | None) -> Iterator[str]:
    """What a Trainer's run does otherwise than it is priced."""
    apart = next((one for one in ("neat_packing", "sample_packing") if is_on(stated.get(one, NOTHING))), "")
    packed = apart or is_on(stated.get("packing", NOTHING))
    if apart:
        yield f"{apart}: without --lengths attention is priced over whole packs, so time is overestimated"
    elif not packed and stated.get("stage", NOTHING).value != "pt":
        yield "samples are not packed: without --lengths each is priced with as many tokens as the longest may have"
    accumulated = stated.get("gradient_accumulation_steps", Stated("1", 0)).value
    synced = any(is_on(stated.get(name, NOTHING)) for name in names_of("trainer.sync"))
    if sharded == "fsdp" and accumulated not in ("1", "auto") and not synced:
        # transformers 5.24.0, trainer.py: no_sync but in the last micro-batch.
        yield (
            "the Trainer keeps whole gradients until the last micro-batch, 2 bytes a weight on each GPU; they are "
            "priced as reduced in each, so time is overestimated (accelerator_config's sync_each_batch does so)"
        )


# Models by the names of the hub.


def named_model(stated: Arguments, folder: Path) -> tuple[Model, str] | None:
    """The model that a run names, and how it is known: by a config.json that lies there, or by its name; None if not.

    folder: of the file that states it.
    """
    # ms-swift's `model_name` is what a model calls itself.
    told = next((stated[one] for one in ("model", *names_of("trainer.model")) if one in stated), NOTHING)
    name = told.value.rstrip("/")
    if not name or "$" in name:
        return None
    local = folder / name
    if not Path(name).is_absolute() and ".." not in Path(name).parts and (local / "config.json").is_file():
        return model_from_hf_config(local), f"the model is that of {name}/config.json"
    if (found := checkpoint(name.lower())) is not None:
        whose = f", by the sizes of {found.source}" if re.fullmatch(r"[\w.-]+/[\w.-]+", found.source) else ""
        narrow = _NARROW.search(name.lower()) if stated_adapters(stated) else None
        # Files of other libraries than bitsandbytes say so by the model alone.
        more = f"; of its {narrow[1]} weights nothing is priced but what quantization_bit says" if narrow else ""
        return found, f"the model is {found.name}{whose}{more}"
    return None


_NARROW = re.compile(r"[-_.](awq|gptq|aqlm|bnb|nf4|int4|int8|4bit|8bit|w4a16)(?=[-_.]|$)")
"""What a release's name says of quantized weights."""
_RELEASE = r"(?:nvidia-)?{}(?:-(?:base|instruct|chat|exp|thinking|it|bf16|fp8|hf|\d{{4}}))*"
"""A model's name with what a release of it may have about it."""


def checkpoint(name: str) -> Model | None:
    """The model of a name on the hub, in small letters, by its sizes there; None for one that is not known."""
    last = name.replace("meta-", "").rpartition("/")[2].replace("_", "-")
    marks = ((f"(?:^|[-/.])(?:{row['mark']})".replace(r"\.", "[.-]"), row) for row in records("checkpoints"))
    one = next((row for mark, row in marks if re.search(mark, last)), None)
    if one is None or one["shipped"]:
        shipped = (name for name in available("model") if re.fullmatch(_RELEASE.format(re.escape(name)), last))
        name = one["shipped"] if one else next(shipped, "")
        return load_model(name).document if name else None
    sizes: dict[str, Any] = {
        key: int(one[key]) for key in ("hidden", "ffn", "layers", "heads", "kv_heads", "head_dim", "vocab")
    }
    return Model(
        schema="axonn-tune/model/1",
        **sizes,
        name=one["source"].rpartition("/")[2].lower(),
        family="llama",
        max_sequence_length=8192,
        biases=False,
        qkv_biases=one["biases"] == "qkv" or None,
        tied_embeddings=bool(one["tied"]),
        source=one["source"],
        defaults=ModelDefaults(global_batch=512, sequence_length=8192),
    )


# Files that a run names.


_CONFIGS = (
    *("job.config_file", "deepspeed_config", "deepspeed", "config_file", "config_name", "config", "fsdp_config"),
    *("deepspeed_config_file", "deepspeed_config.deepspeed_config_file", "defaults", "peft_config"),
)
"""Arguments that name a config file, of torchtitan 0.2.2, DeepSpeed, Accelerate, transformers, Hydra and NeMo-RL."""
_FOLLOWED = ("deepspeed", "deepspeed_config_file", "deepspeed_config.deepspeed_config_file", "fsdp_config")
"""Those without which a Trainer's run cannot be priced."""


def config_files(
    words: Sequence[Stated], named: Mapping[str, Stated], path: Path, *, written: bool
) -> Iterator[tuple[str, Stated, Path | None]]:
    """Config files that a file names: the argument, what it states, and where it lies; None for one that does not.

    The file that follows a program or its subcommand is one, too (`llamafactory-cli train run.yaml`). DocumentError for
    one that is needed and not there, unless the script has written files.
    """
    follows = re.compile(r"\.py$|(?:^|\.)(?:train|sft|dpo)$")
    told = [("config", word) for before, word in pairwise(words) if follows.search(before.value)]
    told += [(name, named[name]) for name in _CONFIGS if name in named]
    for name, stated in told:
        is_file = re.search(r"\.(toml|ya?ml|json)$", stated.value) is not None
        file = file_named(stated.value, path) if is_file else None
        needed = name in _FOLLOWED and "model_name_or_path" in named and (is_file or not is_on(stated))
        if file is None and needed and not is_off(stated) and not written:
            why = "does not lie beside the file or below a folder that it is in: put it there"
            wrong = f"{stated.value!r} {why}" if is_file else f"is {stated.value!r}, which is no file"
            raise DocumentError(str(path), [Problem(name, wrong, stated.line)])
        if is_file:
            yield name, stated, file


def file_named(name: str, path: Path) -> Path | None:
    """A file that another one names: beside it, or below one of the folders that it is in; None if there is none."""
    parts = Path(name).parts
    folders = [path.parent, *path.resolve().parent.parents][:_DEEPEST]
    inside = parts and not Path(name).is_absolute() and ".." not in parts
    above = len(parts) > 1 and ".." in parts and (path.parent / name).resolve()
    found = [path.parent / Path(name).name, *(folder / name for folder in folders if inside)]
    # `../../sft.yaml`, as recipes name what they build on, within the same folders.
    found += [above] if above and above.is_relative_to(folders[-1]) else []
    return next((file for file in found if file.is_file() and file.resolve() != path.resolve()), None)


_DEEPEST = 5
"""Folders above a file in which those that it names are looked for."""


# GPUs that a launcher starts ranks on, beyond its arguments.


def launched(
    words: Sequence[Stated], variables: Mapping[str, Sequence[Stated]], named: Mapping[str, Stated], path: Path
) -> Iterator[tuple[str, Stated]]:
    """GPUs of a node and nodes: of llamafactory-cli by variables, of DeepSpeed's launcher by `--include` or its file of
    hosts, of others by those that are visible."""
    hosts = named.get("hostfile")
    if hosts is not None and (file := file_named(hosts.value, path)) is not None and "num_gpus" not in named:
        slots = re.findall(r"^[^#\s]+\s+slots=(\d{1,4})", read_text(file, limit_bytes=1 << 20), re.MULTILINE)
        if len({*slots}) == 1 and "nproc_per_node" not in named:
            yield "nproc_per_node", Stated(slots[0], hosts.line)
            yield "nnodes", Stated(str(len(slots)), hosts.line)
    if (only := re.fullmatch(r"(?:localhost|[\w.-]+):([\d,]+)", named.get("include", NOTHING).value)) is not None:
        yield "nproc_per_node", Stated(str(len(only[1].split(","))), named["include"].line)
    known = {name: values[-1] for name, values in variables.items() if len(values) == 1}
    told = any(word.value.rpartition("/")[2] in ("llamafactory-cli", "lmf", "swift", "megatron") for word in words)
    for variable, name in (("NPROC_PER_NODE", "nproc_per_node"), ("NNODES", "nnodes")):
        if told and variable in known and name not in named:
            yield name, known[variable]
    visible = named.get("cuda_visible_devices") or known.get("CUDA_VISIBLE_DEVICES")
    counted = {"nproc_per_node", "num_gpus", "num_processes"} & named.keys() or (told and "NPROC_PER_NODE" in known)
    if visible is not None and not counted and re.fullmatch(r"\d+(,\d+)*", visible.value):
        yield "nproc_per_node", Stated(str(len(visible.value.split(","))), visible.line)
