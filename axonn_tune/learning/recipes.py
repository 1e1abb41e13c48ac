"""Files that are refused, by name, with what can be priced instead: other tools' files and recipes, unpriced training.

Adapters, frozen or quantized weights and optimizers other than Adam are those of the table `unpriced`, tools those of
the table `tools`, each with a mark in the text of its commands and pairs.

A recipe is parsed, never run: constants and their products, keywords and assignments to attributes are its facts, by
the names of the table `facts`. The command has what was found; 8 GPUs a node, dgx-h100 and llama3-8b stand for the
rest, and it runs as it is printed.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping

from axonn_tune.errors import Problem
from axonn_tune.frameworks import find_framework
from axonn_tune.frameworks.keys import NOTHING, Stated, find, is_off, records
from axonn_tune.frameworks.names import OPTIMIZER, PRICED, has_adapters, has_optimizer, unpriced
from axonn_tune.learning.shell import arithmetic
from axonn_tune.learning.trainers import BRIDGE, NODE, by_megatron, checkpoint, trainer_of
from axonn_tune.specs.catalog import available, load_model
from axonn_tune.specs.model import Model

_LARGEST = 1 << 40
_PREFERENCES = re.compile(r"(?m)^(?:[^#\n]*[\s/_-])?((?:dpo|grpo|kto|ppo|orpo|rloo|cpo|reward_modeling)\.py)\b")
"""Programs that train beside another model, as TRL's examples are called."""
_OF_OTHERS = re.compile(r"(?:^|\.)(?:rollout|ref|critic|reward\w*|generation|teacher)\.")
"""Sections of what generates, or of models beside the one that is trained."""
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")


def tool_of(text: str) -> Mapping[str, str] | None:
    """The tool that is not read whose mark is in a text of commands and pairs; None for none."""
    return next((one for one in records("tools") if re.search(one["mark"], text, re.MULTILINE)), None)


def refusals(
    text: str, own: Mapping[str, Stated], every: Mapping[str, Stated], gpus: Stated | None
) -> Iterator[Problem]:
    """What of a file is not priced, and what can be.

    text: a line for each command and pair; own: arguments as they are written; every: all by plain names; gpus: what a
    launcher starts.
    """
    # What a framework's table prices, it judges by itself.
    megatron, trainer = by_megatron(text) != "", trainer_of(text)
    adapts = trainer is not None or megatron or BRIDGE.search(text) is not None
    tool = tool_of(text)
    adapts = adapts or bool(tool and tool["instead"])
    # PEFT has a file of its own, which scripts name.
    adapts = adapts or bool({"peft_config", "peft_type"} & every.keys())
    tables = ("swift", "adapters") if megatron else tuple(trainer["tables"].split()) if trainer else ()
    named = [
        (name, stated, one)
        for name, stated in own.items()
        if (one := unpriced(name))
        and not (one.field == OPTIMIZER and has_optimizer(name, stated.value))
        and not (adapts and has_adapters(name, stated.value))
        and not (
            tables
            and (key := find(_plain(name), tables))
            and (key.status == "harmless" or (key.status == "refused" and key.is_silent(stated.value)))
        )
    ]
    switches = [key.is_silent(stated.value) for _, stated, key in named if key.field == "switch"]
    # What an adapter is like says nothing where a switch has none.
    silent = {"detail", "frozen"} if switches and all(switches) else set()
    found = [one for one in named if not one[2].is_silent(one[1].value) and one[2].field not in silent]
    for name, stated, key in found:
        value = "" if stated.value == "True" else f" {stated.value}"
        own_key = find(_plain(name), tables) if tables else None
        refusing = own_key if own_key is not None and own_key.status == "refused" else key
        yield Problem(f"{name}{value}", refusing.refusal(stated.value), stated.line, stated.file)
    if (program := _PREFERENCES.search(text)) and (beside := find("ref_model")):
        yield Problem(program[1], beside.why)
    if tool is not None:
        # Numbers of several functions are those of no run.
        several = text.count("Trainer.Config(") > 1
        facts = {} if several else _facts_of(every, gpus=gpus, tokens=tool["tokens"] == "yes")
        text = "" if several else text
        instead = f": {tool['instead']}" if tool["instead"] else ""
        why = f"{tool['subject']} are not read{instead}. {PRICED}"
        yield Problem("", f"{why}. {_command(tool['framework'], text, facts)}")
    elif found:
        names = ", ".join(name for name, _, key in found if key.field != "switch" or not key.plain)
        full = ", ".join(f"{name} {key.default}" for name, _, key in found if key.field == "switch" and key.plain)
        changes = [f"with {full}"] * bool(full) + [f"without {names}"] * bool(names)
        yield Problem("", f"{PRICED}: {' and '.join(changes)} the file is priced")


def as_options(text: str, every: Mapping[str, Stated], gpus: Stated | None) -> str:
    """What is found in a file that starts one's own program, and the command that states it; "" for nothing."""
    facts = _facts_of(every, gpus=gpus, tokens=False)
    return f". {_command('fsdp', text, facts)}" if len(facts) > 1 else ""


def _plain(written: str) -> str:
    return written.lstrip("-+").replace("-", "_").lower()


def python_facts(text: str) -> list[tuple[str, Stated]]:
    """Names with whole numbers, texts and switches that a Python program assigns or passes, in its order; nothing of
    one that is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    known, found = dict[str, int](), list[tuple[str, Stated]]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            taken = zip(reversed(node.args.args), reversed(node.args.defaults), strict=False)
            known = {one.arg.lower(): n for one, value in taken if (n := _number(value, known)) is not None} | known
        for name, value in _pairs(node):
            last = name.rpartition(".")[2].lower()
            if isinstance(value, ast.Constant) and isinstance(value.value, bool | str):
                found.append((last, Stated(str(value.value)[:200], value.lineno)))
            elif (number := _number(value, known)) is not None:
                known.setdefault(last, number)
                found.append((last, Stated(str(number), value.lineno)))
    return sorted(found, key=lambda one: one[1].line)


def _pairs(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names and what they are given in a statement, a call or a dictionary."""
    if isinstance(node, ast.Assign):
        yield from ((ast.unparse(target), node.value) for target in node.targets if not isinstance(target, ast.Tuple))
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        yield ast.unparse(node.target), node.value
    elif isinstance(node, ast.Call):
        yield from ((one.arg, one.value) for one in node.keywords if one.arg)
    elif isinstance(node, ast.Dict):
        keys = zip(node.keys, node.values, strict=True)
        yield from ((str(key.value), value) for key, value in keys if isinstance(key, ast.Constant))


def _number(node: ast.expr, known: Mapping[str, int]) -> int | None:
    """A whole number: a constant, a name that has one, or a product, power, quotient or sum of these."""
    if isinstance(node, ast.Constant):
        return node.value if type(node.value) is int and abs(node.value) <= _LARGEST else None
    if isinstance(node, ast.Name | ast.Attribute):
        name = (node.id if isinstance(node, ast.Name) else node.attr).lower()
        # A sequence is called so wherever it stands.
        return known.get(name, known.get("sequence_length") if name.endswith("sequence_length") else None)
    if not isinstance(node, ast.BinOp):
        return None
    left, right = (_number(one, known) for one in (node.left, node.right))
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Pow):
        return left**right if 0 <= left <= 1 << 20 and 0 <= right <= 40 and left**right <= _LARGEST else None
    signs = {ast.Mult: "*", ast.Add: "+", ast.Sub: "-", ast.FloorDiv: "//", ast.Div: "//"}
    found = arithmetic(f"{left}{signs.get(type(node.op), '?')}({right})")
    return int(found) if re.fullmatch(r"-?\d{1,13}", found) and int(found) <= _LARGEST else None


def _numbers(named: Mapping[str, Stated]) -> dict[str, str]:
    """Whole numbers by the last part of their names, without sections that are off or of another model."""
    off = tuple(name[: -len("enabled")] for name, one in named.items() if name.endswith(".enabled") and is_off(one))
    plain: dict[str, str] = {}
    for name, stated in named.items():
        number = stated.value.replace("_", "")
        if re.fullmatch(r"[1-9]\d{0,12}", number) and not _OF_OTHERS.search(name) and not name.startswith(off):
            plain.setdefault(name.rpartition(".")[2], number)
    return plain


def _facts_of(named: Mapping[str, Stated], *, gpus: Stated | None, tokens: bool) -> dict[str, int]:
    """Numbers of a file by our names of them.

    named: arguments by plain names; gpus: what a launcher starts; tokens: batches are counted in tokens.
    """
    plain = _numbers(named)
    found: dict[str, int] = {}
    for one in records("facts"):
        if value := next((plain[name] for name in one["names"].split() if name in plain), None):
            found[one["fact"]] = int(value)
    if gpus is not None:
        found["gpus"] = int(gpus.value)
    elif "gpus" not in found and "nodes" in found:
        found["gpus"] = found["nodes"] * found.get("gpus_per_node", NODE)
    if "gpus" not in found and "shards" in found:
        found["gpus"] = math.prod(found.get(axis, 1) for axis in ("shards", "replicas", "x", "context", "pipeline"))
    if "max_prompt_length" in plain and "max_response_length" in plain:
        found["seq"] = int(plain["max_prompt_length"]) + int(plain["max_response_length"])
    if "ppo_mini_batch_size" in plain:
        # verl counts prompts, each with so many answers (workers/fsdp_workers.py).
        answers = named.get("actor_rollout_ref.rollout.n", NOTHING).value
        each = int(answers) if re.fullmatch(r"[1-9]\d{0,4}", answers) else 1
        found["batch"] = int(plain["ppo_mini_batch_size"]) * each
    if tokens and "seq" in found:
        counted = [name for name in ("batch", "micro_batch") if found.get(name, 0) >= found["seq"]]
        found |= {name: found[name] // found["seq"] for name in counted}
    return found


def model_named(text: str) -> Model | None:
    """The model that a word of a text names: a shipped one, in full or as a part, or one of the hub; None for none."""
    # NeMo 2 writes Llama31Config70B, torchtune llama3_1/70B_full.
    written = re.sub(r"([a-z])(\d)(\d?)config_?(\d+x?\d*b)", r"\1-\2.\3-\4", text.lower())
    written = re.sub(r"(llama\d|qwen\d|gemma\d?|mistral|phi\d)(?:_(\d))?/(\d+b)_", r"\1.\2-\3 ", written)
    written = re.sub(r"--model_name[ =](\w+) --model_size[ =](\w+)", r"\1_\2", written.replace(".-", "-"))
    written = re.sub(r"\bllama3([1-3])_(\d+b)", r"llama-3.\1-\2", written)
    words = re.split(r"[^a-z0-9._-]+", written)
    plain = [re.sub(r"[._-]", "", word) for word in words]
    known = {re.sub(r"[^a-z0-9]", "", name): name for name in sorted(available("model"), key=len)}
    found = [name for key, name in known.items() if len(key) > 5 and any(key in word for word in plain)]
    if found:
        return load_model(found[-1]).document
    return next((one for word in dict.fromkeys(words) if len(word) > 5 and (one := checkpoint(word))), None)


_NAMES = {"x": "TP", "pipeline": "PP", "chunks": "VPP", "context": "CP", "expert": "EP", "expert_tensor": "ETP"}
_NAMES |= {"data": "DP", "replicas": "replicas"}


def _command(framework: str, text: str, facts: Mapping[str, int]) -> str:
    """What was found, and the command that predicts the full training of it, with what stands for the rest."""
    axes = {axis: facts[axis] for axis in _NAMES if facts.get(axis, 0) > 0}
    found = find_framework(framework)
    if any(size > 1 and axis not in (*found.expert_columns, "data", "replicas") for axis, size in axes.items()):
        # What shards by FSDP alone has no such axes.
        found = find_framework("torchtitan")
    model, stands = _model_words(text, facts)
    if not found.expert_axes and stands in available("model") and load_model(stands).document.has_experts:
        found = find_framework("fsdp")
    gpus, batch, micro = _sizes(facts, axes)
    said = [f"model {stands}" if stands else "", f"{gpus} GPUs" if "gpus" in facts or "data" in axes else ""]
    said += [f"{_NAMES[axis]} {size}" for axis, size in axes.items()]
    said += [f"{words} {facts[name]:,}" for name, words in _WORDS.items() if name in facts]
    words = [f"--gpus {gpus}", model, "--machine dgx-h100", f"--framework {found.name}"]
    words += [f"--batch {batch}"] if batch else []
    words += [f"--seq {facts['seq']}"] if "seq" in facts else []
    words += [f"--micro-batch {micro}"] if micro else []
    had = (*found.expert_columns, "chunks") if "expert" in axes else found.columns
    options = {**axes, "data": axes.get("replicas", 0)} if found.step.gather_unit == "block" else {**axes, "data": 0}
    if found.name == "megatron-core" and axes:
        # What Megatron's arguments do not state is 1.
        staged = {"chunks": 1} if axes.get("pipeline", 1) > 1 else {}
        options = {"x": 1, "z": 1, "pipeline": 1, "context": 1, **staged, **options}
    words += [f"{found.option(axis)} {size}" for axis, size in options.items() if axis in had and size]
    open_ = [] if stands else ["the model (llama3-8b)"]
    open_ += [] if "gpus" in facts or "data" in axes else [f"GPUs ({gpus})"]
    rest = ", ".join([*open_, "the machine (dgx-h100)"])
    return (
        f"found: {', '.join(filter(None, said)) or 'nothing'}; not found, so something stands for it: {rest}. "
        f"As options state it: {' '.join(['axonn-tune explain', *words])}"
    )


_WORDS = {"batch": "batch", "seq": "sequence", "micro_batch": "micro-batch", "accumulation": "accumulation steps"}


def _model_words(text: str, facts: Mapping[str, int]) -> tuple[str, str]:
    """The options of the model, and its name or sizes in words; "" where nothing names it."""
    if (model := model_named(text)) is not None and model.name in available("model"):
        return f"--model {model.name}", model.name
    sizes = {name: facts[name] for name in _SIZES if name in facts}
    if model is not None:
        sizes = {name: getattr(model, name) for name in _SIZES}
        more = f" --set model.tied_embeddings={str(model.tied_embeddings).lower()}"
    elif {"layers", "hidden", "heads"} <= sizes.keys():
        sizes = {"kv_heads": sizes["heads"], "head_dim": max(1, sizes["hidden"] // sizes["heads"]), **sizes}
        more = " --set model.tied_embeddings=true" if re.search(r"tie_word_embeddings=true", text.lower()) else ""
    else:
        return "--model llama3-8b", ""
    words = " ".join(f"--set model.{name}={size}" for name, size in sizes.items())
    named = model.name if model else f"of {sizes['layers']} layers, hidden {sizes['hidden']:,}"
    return f"--model llama3-8b {words}{more}", named


def _sizes(facts: Mapping[str, int], axes: Mapping[str, int]) -> tuple[int, int | None, int | None]:
    """GPUs, batch and micro-batch that go with the degrees: as stated where they do."""
    stage = math.lcm(axes.get("x", 1) * axes.get("context", 1), axes.get("expert", 1) * axes.get("expert_tensor", 1))
    least = axes.get("pipeline", 1) * stage * axes.get("replicas", 1)
    if "data" in axes:
        least = axes["data"] * axes.get("x", 1) * axes.get("context", 1) * axes.get("pipeline", 1)
    least *= NODE if "replicas" in axes else 1
    nodes = math.lcm(least, NODE)
    gpus = facts.get("gpus", least if "data" in axes else nodes)
    shares = max(1, gpus // (axes.get("x", 1) * axes.get("context", 1) * axes.get("pipeline", 1)))
    micro, batch = facts.get("micro_batch"), facts.get("batch")
    if batch is None and micro is not None:
        batch = shares * micro * facts.get("accumulation", 1)
    if batch is not None and batch % shares:
        batch = None
    if micro is not None and (batch is None or batch % (shares * micro)):
        micro = None
    return gpus, batch, micro
