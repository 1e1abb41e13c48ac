"""Files of tools that name everything by themselves: torchtune, NeMo-RL and verl's SFT.

Each has a table whose `field` is the argument of Accelerate, of Hugging Face's Trainer or of the launcher that means
the same (`policy.train_micro_batch_size` is `per_device_train_batch_size`), with the tool's default. What all their
files have alike, such as FSDP's version, stands in the table `presets`. Once translated, a run is read as any
Trainer's; one with tensor or context parallelism, which the framework `fsdp` has no axes for, as torchtitan's. Runs by
Megatron-Core have a table of its arguments, and sections in which all others go by their own names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from axonn_tune.frameworks.keys import NOTHING, TRANSLATED, Arguments, Key, Stated, find, is_off, is_on, records, table
from axonn_tune.frameworks.statements import TORCHTUNE_LOSS
from axonn_tune.job import Layout

_WITH_AXES = "torchtitan-eager"
_AXES = ("parallelism_config_tp_size", "parallelism_config_cp_size")
_MEGATRON = "_megatron"
"""Ends names of tables of runs by Megatron-Core."""
_UNSET = ("", "none", "null")
_COMPONENTS = ("model._component_", "optimizer._component_", TORCHTUNE_LOSS)
_SECTIONS = ("policy.megatron_cfg.", "engine.override_", "optim.")
"""Where these have Megatron-Core's arguments by their own names."""


@dataclass
class Translated:
    """A run in the words of common tables: its arguments, what was assumed, and what is off with its section.

    kept: arguments that no common table has, and that the step is read from.
    """

    table: str
    title: str
    pairs: dict[str, Stated]
    kept: dict[str, Stated] = field(default_factory=dict)
    off: frozenset[str] = frozenset()
    said: list[str] = field(default_factory=list)

    @property
    def software(self) -> str:
        """The framework whose step it has."""
        if self.table.endswith(_MEGATRON):
            return "megatron-core"
        alone = all(self.pairs.get(name, NOTHING).value in ("", "1") for name in _AXES)
        return "fsdp" if alone else _WITH_AXES


def translated_tool(text: str) -> tuple[str, str] | None:
    """Table and title of the tool whose mark is in a text of commands and pairs; None for other files."""
    rows = (one for one in records("trainers") if one["translated"])
    found = next((one for one in rows if re.search(one["mark"], text, re.MULTILINE)), None)
    return None if found is None else (found["translated"], found["title"])


def translated(text: str, named: Arguments) -> Translated | None:
    """The run of a file of these tools; None for other files. named: all its arguments by their plain names."""
    if (tool := translated_tool(text)) is None:
        return None
    every = {name: _referred(one, named) for name, one in {**named, **components(tool[0], named)}.items()}
    sections = tuple(
        name.removesuffix("enabled") for name, one in every.items() if name.endswith(".enabled") and is_off(one)
    )
    off = frozenset(
        name for name in every if name.startswith(sections) and name.removesuffix("enabled") not in sections
    )
    found = Translated(*tool, pairs=_launched(every, text), off=off)
    stated = {name: one for name, one in every.items() if name not in off}
    told = {key.name: one for name, one in stated.items() if (key := find(name, (found.table,)))}
    for key in table(found.table):
        if key.name in told and key.status != "harmless":
            _add(found, key, told[key.name])
        elif key.default and key.field and key.field not in found.pairs and key.status != "harmless":
            _add(found, key, Stated(key.default, 0))
            if key.status == "modelled" and key.field:
                found.said.append(f"{key.name} {key.default}")
    found.said = [f"not stated, so as {found.title} has it: {', '.join(found.said)}"] if found.said else []
    found.pairs = {**dict(_own_names(found.table, stated)), **found.pairs}
    found.pairs |= dict(_TOOLS[found.table](found, told))
    found.kept = {TORCHTUNE_LOSS: told[TORCHTUNE_LOSS]} if TORCHTUNE_LOSS in told else {}
    found.said += [f"{name.rstrip('.')} is off" for name in sections if any(one.startswith(name) for one in off)]
    for one in records("presets"):
        if one["config"] == found.table:
            found.pairs.setdefault(one["key"], Stated(one["value"], 0))
    if found.software == _WITH_AXES:
        switch = found.pairs["gradient_checkpointing"]
        found.pairs["activation_checkpoint.mode"] = replace(switch, value="full" if is_on(switch) else "none")
        found.said.append(f"tensor and context parallelism of {found.title} are priced as torchtitan has them")
    return found


def components(table: str, named: Arguments) -> Arguments:
    """What short words of torchtune stand for: `optimizer=torch.optim.SGD` on its command line replaces the component
    of that section in the file. Source: pytorch/torchtune@04e22829, config/_utils.py, _merge_yaml_and_cli_args.
    """
    if table != "torchtune":
        return {}
    short = {one: one.rpartition(".")[0] for one in _COMPONENTS}
    return {name: named[section] for name, section in short.items() if section in named}


def _own_names(table: str, stated: Arguments) -> Iterator[tuple[str, Stated]]:
    """What sections of Megatron-Core's arguments have by their own names, and no row of the table."""
    for name, one in stated.items() if table.endswith(_MEGATRON) else ():
        key = find(name, ("megatron",)) if name.startswith(_SECTIONS) and find(name, (table,)) is None else None
        if key is not None and key.is_read and one.value.lower() not in _UNSET:
            yield name.rpartition(".")[2], one


def _referred(one: Stated, named: Arguments) -> Stated:
    """A value with that of the argument which it refers to, as OmegaConf has it: `${policy.model_name}`."""
    for _ in range(4):
        if (name := re.fullmatch(r"\$\{([\w.]+)\}", one.value)) is None or name[1].lower() not in named:
            break
        one = Stated(named[name[1].lower()].value, one.line, one.file)
    return one


def _launched(named: Arguments, text: str) -> dict[str, Stated]:
    """What the launcher is told; a recipe of torchtune may be one of a single device."""
    alone = {"nproc_per_node": Stated("1", 0)} if "finetune_single_device" in text else {}
    return alone | {name: one for name, one in named.items() if find(name, ("launchers",)) and "." not in name}


def _add(found: Translated, key: Key, stated: Stated) -> None:
    """An argument under its common name, with the value that means the same there."""
    if not key.field or stated.value.lower() in _UNSET:
        return
    value = key.meanings.get(stated.value.lower()) if key.meanings else stated.value
    if value is not None:
        # Ranks that a launcher starts count, whatever the file says.
        found.pairs.setdefault(key.field, Stated(value, stated.line, stated.file))


def _torchtune(found: Translated, told: Mapping[str, Stated]) -> Iterator[tuple[str, Stated]]:
    """What a model's builder says: `lora_llama3_1_8b`, `qlora_llama3_8b`; adapters by PEFT's names of modules."""
    builder = told.get("model._component_", NOTHING)
    kind = re.match(r"(q?lora|dora)_", builder.value.rpartition(".")[2])
    name = builder.value.rpartition(".")[2].removeprefix(kind[0] if kind else "")
    # Sizes below 2 billion, then versions: qwen2_5_0_5b, llama3_1_8b.
    name = re.sub(r"(?<=\d)_(?=\d[_-])", ".", re.sub(r"_([01])_([567])b", r"-\1.\2b", name))
    yield "model_name_or_path", Stated(name, builder.line)
    yield "bf16", found.pairs.get("pure_bf16", NOTHING)
    if kind:
        yield "use_peft", Stated("True", builder.line)
        modules = told.get("model.lora_attn_modules", Stated("q_proj v_proj", builder.line))
        words = re.findall(r"\w+", modules.value.replace("output_proj", "o_proj"))
        more = ["gate_proj", "up_proj", "down_proj"] if is_on(told.get("model.apply_lora_to_mlp", NOTHING)) else []
        yield "lora_target", Stated(" ".join([*words, *more]), modules.line)
    if kind and kind[1] == "qlora":
        yield "load_in_4bit", Stated("True", builder.line)


def _nemo_rl(found: Translated, told: Mapping[str, Stated]) -> Iterator[tuple[str, Stated]]:
    """A micro-batch of packs has so many tokens; adapters of all linear layers unless modules are named."""
    if is_on(told.get("policy.sequence_packing.enabled", NOTHING)):
        yield from _by_tokens(found, told.get("policy.sequence_packing.train_mb_tokens", NOTHING))
    if is_on(told.get("policy.dtensor_cfg.lora_cfg.enabled", NOTHING)):
        every = told.get("policy.dtensor_cfg.lora_cfg.match_all_linear", Stated("True", 0))
        if is_on(every):
            yield "lora_target_linear", every


def _nemo_rl_megatron(found: Translated, told: Mapping[str, Stated]) -> Iterator[tuple[str, Stated]]:
    """Recompute of every layer, or of modules, as nemo_rl/models/megatron/setup.py has it (NVIDIA-NeMo/RL@7ea279ab)."""
    switch = told.get("policy.megatron_cfg.activation_checkpointing", NOTHING)
    kind = told.get("policy.megatron_cfg.recompute_granularity", replace(switch, value="full"))
    if is_on(switch):
        yield "recompute_granularity", kind
        modules = told.get("policy.megatron_cfg.recompute_modules", NOTHING)
        if kind.value == "full":
            yield from (
                ("recompute_method", replace(kind, value="uniform")),
                ("recompute_num_layers", replace(kind, value="1")),
            )
        elif modules.value.lower() not in _UNSET:
            yield "recompute_modules", modules
    if is_on(told.get("policy.sequence_packing.enabled", NOTHING)):
        yield from _by_tokens(found, told.get("policy.sequence_packing.train_mb_tokens", NOTHING))


def _verl(found: Translated, told: Mapping[str, Stated]) -> Iterator[tuple[str, Stated]]:
    """A dynamic batch fills a micro-batch with tokens."""
    if is_on(told.get("data.use_dynamic_bsz", Stated("True", 0))):
        yield from _by_tokens(found, told.get("data.max_token_len_per_gpu", Stated("8192", 0)))
    yield from _verl_fsdp_sft(found, told)


def _verl_fsdp_sft(found: Translated, told: Mapping[str, Stated]) -> Iterator[tuple[str, Stated]]:
    """A rank of adapters from 1 says that they train."""
    del told
    rank = found.pairs.get("lora_rank", NOTHING)
    if rank.value not in ("", "0"):
        yield "use_peft", Stated("True", rank.line)
    else:
        found.pairs.pop("lora_rank", None)
        found.pairs.pop("lora_target", None)


def _by_tokens(found: Translated, tokens: Stated) -> Iterator[tuple[str, Stated]]:
    """The micro-batch of so many tokens, in sequences of the stated length, at least one."""
    megatron = found.table.endswith(_MEGATRON)
    length = found.pairs.get("seq_length" if megatron else "max_length", NOTHING).value
    if re.fullmatch(r"[1-9]\d{0,9}", tokens.value) and re.fullmatch(r"[1-9]\d{0,9}", length):
        each = max(1, int(tokens.value) // int(length))
        found.said.append(f"a micro-batch of {int(tokens.value):,} tokens is priced as {each} of {int(length):,}")
        yield "micro_batch_size" if megatron else "per_device_train_batch_size", Stated(str(each), tokens.line)


_TOOLS = {"torchtune": _torchtune, "nemo_rl": _nemo_rl, "verl": _verl}
_TOOLS |= {"nemo_rl_megatron": _nemo_rl_megatron, "verl_megatron": _verl, "verl_fsdp_sft": _verl_fsdp_sft}
assert {*_TOOLS} == {*TRANSLATED}, "a table a tool"


# The way back: what of a tool's file makes one layout of another.


def file_words(tables: Sequence[str], before: Layout, after: Layout, *, batch: int) -> str:
    """Keys of a tool's file that make one layout of another, `micro_batch_size: 4`; "" for a layout that it cannot say.

    tables: of the tool; batch: sequences of a step.
    """
    keys = _keys_of(tables)
    was, now = _values_of(before, batch), _values_of(after, batch)
    changed = {field: value for field, value in now.items() if value != was[field]}
    if changed.keys() - keys.keys() - _FOLLOW:
        return ""
    found = [f"{key.name}: {_as_key(key, value)}" for field, value in changed.items() if (key := keys.get(field))]
    if "z" in changed and "z" not in keys:
        found.append(f"{'without' if now['z'] == 1 else 'with'} FSDP or ZeRO-3")
    return ", ".join(found)


_FOLLOW = {"z", "replicas", "accumulation", "recompute", "recompute_switch"}
"""What follows from other keys, or is said in words, where a tool has no key of it."""


def _keys_of(tables: Sequence[str]) -> dict[str, Key]:
    """The first key of each field that a tool's tables state, by what common tables call it."""
    found = dict[str, Key]()
    for name in tables:
        for key in (one for one in table(name) if one.status == "modelled" and one.field):
            other = find(key.field) if name in TRANSLATED else key
            found.setdefault(other.field if other is not None else key.field, key)
    if "batch" not in found:
        found["accumulation"] = next(key for key in table("accelerate") if key.field == "accumulation")
    return found


def _values_of(one: Layout, batch: int) -> dict[str, int | str]:
    """What a layout is by the fields of tables."""
    grid, found = one.grid, dict[str, int | str]()
    found |= {"micro_batch": one.micro_batch, "accumulation": batch // (one.micro_batch * grid.data * grid.z)}
    found |= {"x": grid.x, "context": grid.context, "pipeline": grid.pipeline, "z": grid.z, "replicas": grid.data}
    found |= {
        "chunks": one.chunks,
        "expert": grid.expert,
        "expert_tensor": grid.expert_tensor,
        "kept": one.kept_layers or 0,
    }
    # Of some modules or blocks, or of stages that differ, no key of these tools says anything.
    whole = one.recompute in ("none", "full") and one.recompute_layers is None and one.parts is None
    some = "" if whole else f"{one.recompute} {one.recompute_layers} {one.parts}"
    return found | {"recompute_switch": one.recompute, "recompute": one.recompute, "some": some}


def _as_key(key: Key, value: int | str) -> str:
    """A value as a key of a file has it."""
    if key.field in ("recompute_switch", "gradient_checkpointing"):
        return str((value != "none") is not key.is_opposite).lower()
    return "null" if value == "none" else str(value)
