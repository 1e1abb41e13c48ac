"""The command of a framework: one configuration as arguments, config files and environment, without a script.

A framework's `launch` writes the `Command` of a `Run`; `axonn_tune.launch` puts the script around it. What a framework
cannot express is a UsageError, what it expresses differently is a note.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from axonn_tune.frameworks.description import Argument, Because, Check, Plain, Run, Section, Value
from axonn_tune.frameworks.keys import named, tables_of
from axonn_tune.specs.machine import EnvironmentVariable
from axonn_tune.specs.model import Model
from axonn_tune.specs.tuning import tools


def settings(names: str, values: Mapping[str, Value], framework: str) -> Iterator[tuple[str, Plain, str]]:
    """Arguments of these names, in order, with values and reasons; those whose value is None are left out.

    names: with their sections, `training.seq_len`. values: by name, or by the field that the framework's table of
    arguments has for it, by which the reader takes it, too.
    """
    tables = tables_of(framework)
    for path in names.split():
        name = path if path in values else path.rpartition(".")[2]
        value = values.get(name)
        if name not in values and (key := named(name, tables)) is not None:
            value = values.get(key.field)
            value = value if isinstance(value, Because) else key.write(value)
            value = Because(value, key.why) if value is True and key.sets and key.why else value
        plain, why = value if isinstance(value, Because) else (value, "")
        if plain is not None:
            yield path, plain, why


def flags(names: str, values: Mapping[str, Value], framework: str) -> Iterator[Argument]:
    """The same as Megatron-LM's arguments, without sections: a switch is written where it is on."""
    for path, value, why in settings(names, values, framework):
        if value is not False:
            name = path.rpartition(".")[2].replace("_", "-")
            yield Argument(f"--{name}", None if value is True else value, why)


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
TRIAL_STEPS, WARM_UP = 10, "leave out the first 3, which warm up"
"""Of a first run: as many as show what a step takes, once its kernels are tuned and its memory is reserved."""
TRIAL: Mapping[str, Value] = {
    **{"train_iters": Because(TRIAL_STEPS, WARM_UP), "eval_iters": 0, "lr": 1e-4, "log_interval": 1}
}
"""A short run, every step in Megatron-LM's log."""
LITTLE_TO_REPEAT = "Selective recompute repeats core attention, which saves little where it is fused."


def of_checkout(file: str, checkout: str, *, release: str = "", prints: tuple[str, ...] = ()) -> Check:
    """A file of the framework's own checkout."""
    return Check(file, f"start this in a checkout of {checkout}", release, prints)


def of_package(module: str, package: str) -> Check:
    """A Python module of a package."""
    return Check(module, f"install {package} in this environment")


OWN_SCRIPT = Check("train.py", "it is your own script, as the comment on top says")


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


_TABLES = {"embedding": "embed_tokens", "head": "lm_head"}
"""What transformers' models of the Llama family call them."""


def peft_config(run: Run) -> dict[str, str]:
    """PEFT's file of adapters beside the script, by its suffix, where adapters are what trains.

    Source: huggingface/peft@5d602fdb, src/peft/tuners/lora/config.py, utils/save_and_load.py (adapter_config.json).
    """
    if (tuning := run.workload.tuning) is None or not tuning.adapts:
        return {}
    targets = tools()[run.framework.tuner].named(tuning)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": tuning.rank,
        "lora_alpha": 2 * tuning.rank,
        "lora_dropout": tuning.dropout,
        "target_modules": targets[0] if targets == ["all-linear"] else targets,
        "use_dora": tuning.mode == "dora",
        **({"modules_to_save": [_TABLES[one] for one in tuning.tables]} if tuning.tables else {}),
    }
    return {"_peft.json": json.dumps(config, indent=2) + "\n"}


def adapter_arguments(run: Run) -> tuple[Section, ...]:
    """What one's own script is told of adapters: PEFT's file, and by TRL's names what that does not say."""
    if (tuning := run.workload.tuning) is None or not tuning.adapts:
        return ()
    bits = {"nf4": "--load_in_4bit", "int8": "--load_in_8bit"}
    found = [Argument("--peft_config", "{file:_peft.json}")]
    found += [Argument(bits[tuning.base], "true")] if tuning.quantized else []
    found += [Argument("--lora_dtype", tuning.dtype)] if tuning.dtype != tools()[run.framework.tuner].dtype else []
    return (Section("adapters", tuple(found)),)


def tuned_script(run: Run) -> tuple[str, ...]:
    """What one's own script has to do so that only what was priced trains."""
    if (tuning := run.workload.tuning) is None:
        return ()
    if not tuning.adapts:
        return ("It sets requires_grad of the LM head alone.",)
    base = f" of a base that bitsandbytes quantized to {tuning.base}" if tuning.quantized else ""
    kept = "in FP32" if tuning.dtype == "fp32" else "in BF16 (autocast_adapter_dtype=False)"
    return (
        f"It wraps the model{base} by get_peft_model with LoraConfig of the JSON file beside the script, and keeps "
        f"adapters {kept}. lora_alpha changes no step.",
    )
