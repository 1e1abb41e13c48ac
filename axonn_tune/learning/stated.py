"""The run of a command or config file as one setup, with recorded assumptions for everything not stated.

Read are bash scripts and argument lists for Megatron-LM and what descends from it (Megatron-Core, NeMo,
Megatron-Bridge, Megatron-DeepSpeed, Megatron-AxoNN) and for torchtitan, torchtitan's TOML, DeepSpeed's JSON, YAML of
NeMo, experiments of Primus, and what Accelerate, LLaMA-Factory and Hugging Face's Trainer read (`learning.trainers`).
Config files that a script names are read from its folder. `learning.arguments` maps arguments; unstated ones take the
framework's default.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from axonn_tune.errors import CONTROL, DocumentError, Problem, UsageError
from axonn_tune.frameworks import find_framework, registry
from axonn_tune.frameworks.finetuning import RECIPES
from axonn_tune.frameworks.keys import (
    NOTHING,
    OFF,
    SHIPPED,
    SWITCH,
    TRANSLATED,
    Arguments,
    Stated,
    defaults_of,
    find,
    in_full,
    misplaced,
    misspelt,
    named,
    names_of,
    own_tables,
    records,
    switched_on,
    table,
    tables_of,
)
from axonn_tune.frameworks.statements import VARIABLES
from axonn_tune.frameworks.torchtitan import FLAVORS, MIXTURES
from axonn_tune.learning.arguments import (
    SWITCHES,
    beside_others,
    columns_of,
    idle_names,
    is_choice,
    known_name,
    named_values,
)
from axonn_tune.learning.gaps import layout_gaps, model_gaps, other_parts
from axonn_tune.learning.manifests import manifest
from axonn_tune.learning.pairs import toml_pairs, yaml_pairs
from axonn_tune.learning.primus import MODEL, ORDER, experiment, filled, model_of, started
from axonn_tune.learning.recipes import as_options, model_named, python_facts, refusals, tool_of
from axonn_tune.learning.run import NEEDED, CommandRun, model_columns, replaced
from axonn_tune.learning.shell import OUTPUT, Script, program_of, read_script, slurm_sizes
from axonn_tune.learning.trainers import (
    BRIDGE,
    bridge_mode,
    by_megatron,
    completed,
    config_files,
    launched,
    named_model,
    of_own_program,
    tool_of_run,
)
from axonn_tune.learning.translated import Translated, components, translated, translated_tool
from axonn_tune.specs.catalog import ModelLike, load_model
from axonn_tune.specs.formats import FORMATS
from axonn_tune.specs.loading import DOCUMENT_BYTES, read_text
from axonn_tune.specs.model import Model
from axonn_tune.validation.published.rows import Cell, meaning


@dataclass(frozen=True)
class _Source:
    """Statements of a file.

    arguments: recognised ones; named: all, by their names; own: those of the program and of config files, as they are
    written; words: of the command.
    """

    path: Path
    arguments: dict[str, Stated]
    named: dict[str, Stated] = field(default_factory=dict)
    own: dict[str, Stated] = field(default_factory=dict)
    words: tuple[Stated, ...] = ()
    directives: tuple[Stated, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Its command, a line `program=FILE` for what that starts, and a line `name=value` for each argument."""
        words = " ".join(word.value for word in self.words)
        pairs = (f"{name}={stated.value}" for name, stated in self.own.items())
        return "\n".join([words, f"program={program_of(self.words)}", *pairs])

    def name(self, name: str) -> str:
        """The value of an argument of this plain name, "" without one."""
        return str(self.named.get(name, Stated("", 0)).value)

    def count(self, *names: str) -> Stated | None:
        """The first of these that is a whole number from 1."""
        stated = (self.named.get(name) for name in names)
        return next((one for one in stated if one and re.fullmatch(r"[1-9]\d{0,9}", one.value)), None)

    def without(self, names: Collection[str]) -> _Source:
        """The same without these arguments as they are written."""
        return replace(self, own={name: stated for name, stated in self.own.items() if name not in names})

    def in_full(self, framework: str) -> _Source:
        """The same with the full names of arguments that a command abbreviates, where its parser takes that."""
        own, full_names, remarks = dict[str, Stated](), list[tuple[str, Stated]](), list[str]()
        for written, stated in self.own.items():
            name, parser = in_full(_plain(written), framework) if written.startswith("--") else ("", "")
            full = f"--{name.replace('_', '-') if '-' in written[2:] else name}" if name else written
            own[full] = stated
            if name:
                remarks.append(f"{self.path.name}:{stated.line}: {written} is {full} in short, as {parser} takes it")
                full_names.append((full, stated))
        found = _of_pairs(self.path, full_names)
        named, arguments = {**self.named, **found.named}, {**self.arguments, **found.arguments}
        return replace(self, named=named, arguments=arguments, own=own, remarks=(*self.remarks, *remarks))

    def elsewhere(self) -> _Source:
        """The same with its file beside each value, as those of a file that another names."""

        def placed(stated: Mapping[str, Stated]) -> dict[str, Stated]:
            return {name: replace(one, file=one.file or str(self.path)) for name, one in stated.items()}

        return replace(self, arguments=placed(self.arguments), named=placed(self.named), own=placed(self.own))

    def filled(self, variables: Mapping[str, Sequence[Stated]]) -> _Source:
        """The same with values of the environment, or those beside their names."""
        every = (self.arguments, self.named, self.own)
        arguments, named, own = ({name: filled(one, variables) for name, one in each.items()} for each in every)
        return replace(self, arguments=arguments, named=named, own=own)

    def over(self, other: _Source) -> _Source:
        """The same on top of what another file states."""
        return replace(
            self,
            arguments={**other.arguments, **self.arguments},
            named={**other.named, **self.named},
            own={**other.own, **self.own},
            remarks=(*other.remarks, *self.remarks),
        )


# Files.


def _read(path: Path, *, named_by: tuple[Path, ...] = ()) -> _Source:
    """Kind of a file by its suffix or its first characters; named_by: files that name it, one through the other."""
    text = read_text(path, limit_bytes=DOCUMENT_BYTES)
    if path.suffix == ".toml":
        return _priced(_of_pairs(path, toml_pairs(text, path)))
    if (found := manifest(text, path) if path.suffix in (".yaml", ".yml") else None) is not None:
        return _read_script(*found, path, named_by)
    if path.suffix in (".yaml", ".yml", ".json") or text.lstrip().startswith("{"):
        source = _priced(_of_pairs(path, experiment(yaml_pairs(text, path))))
        for config in _configs(source, (), (*named_by, path)):
            source = source.over(config)
        return source if named_by else source.filled({})
    if path.suffix == ".py":
        return _priced(_of_pairs(path, python_facts(text)), text)
    return _read_script(text, [], path, named_by)


def _read_script(text: str, asked: list[tuple[str, Stated]], path: Path, named_by: tuple[Path, ...]) -> _Source:
    """A script, with the files that it names. asked: arguments of a launcher, where its command does not say them."""
    script = read_script(CONTROL.sub("", text), path=str(path))
    source = _of_script(script, path)
    beside = [(name, one) for name, one in asked if "$" in source.named.get(name, Stated("$", 0)).value]
    beside += [*launched(source.words, script.variables, source.named, path), *started(script.variables)]
    source = replace(source, named={**source.named, **_of_pairs(path, beside).named})
    commands = "\n".join(" ".join(word.value for word in command) for command in script.commands)
    if tool_of(f"{commands}\n{source.text}") is not None:
        for _, _, file in config_files(source.words, source.named, path, written=True):
            if file is not None and file.suffix != ".toml":
                written = _of_pairs(file, yaml_pairs(read_text(file, limit_bytes=DOCUMENT_BYTES), file))
                source = source.over(written.elsewhere())
    source = _priced(source, commands)
    for config in _configs(source, script.documents, (*named_by, path)):
        source = source.over(config)
    return source.filled(script.variables)


def _priced(source: _Source, text: str = "") -> _Source:
    """The same; DocumentError for a file of a tool that is not read, and for training that is not priced.

    text: of its commands.
    """
    text += f"\n{source.text}"
    # What its own table prices, it judges by itself.
    own = {} if translated_tool(text) is not None else source.own
    if found := [*refusals(text, own, source.named, _gpus(source)[0])]:
        raise DocumentError(str(source.path), found)
    return source


def _in_common_words(source: _Source) -> tuple[_Source, Translated | None]:
    """The same with arguments under common names, if it is of a tool that has its own ones."""
    if (found := translated(source.text, source.named)) is None:
        return source, None
    pairs = _of_pairs(source.path, found.pairs.items())
    own = {name: one for name, one in source.own.items() if _plain(name) not in found.off}
    own |= components(found.table, source.named)
    arguments = {**pairs.arguments, **found.kept}
    return replace(source, arguments=arguments, named=pairs.named, own=own), found


def _of_pairs(path: Path, pairs: Iterable[tuple[str, Stated]]) -> _Source:
    every = list(pairs)
    named = [(_plain(name), stated) for name, stated in every]
    known = {known: stated for name, stated in named if (known := known_name(name))}
    return _Source(path, known, dict(named), dict(every))


_PROGRAM = re.compile(
    r"(?:^|/)(?:pretrain_\w+\.py|megatron_\w+_pretraining\.py|run_recipe\.py|train\.py|run_train\.sh)$"
    r"|^torchtitan[\w.]*$|^megatron$|(?:^|/)(?:llamafactory-cli|lmf|swift|axolotl|trl|tune)$"
    r"|^swift\.cli\._megatron\.(?:sft|pt)$|(?:^|/)(?:torchrun|deepspeed|accelerate|srun|mpirun|mpiexec)$"
)


def _of_script(script: Script, path: Path) -> _Source:
    """The command with the most recognised arguments, or all words if no known program is started."""
    program = re.compile(rf"{_PROGRAM.pattern}|\.py$")
    started = [command for command in script.commands if any(program.search(word.value) for word in command)]
    # A variable's only word is no choice of a section: expandable_segments:True.
    given = (words for words in script.variables.values() if len(words) > 1 or not any(map(is_choice, words)))
    all_words = tuple(word for words in (*given, *script.commands) for word in words)
    words = max(started, key=_telling) if started else ()
    if not _telling(words):
        words = (*all_words, *words)
    kept, unset = list[Stated](), list[Stated]()
    for word in words:
        # A variable without a value, where a switch takes none, is empty.
        switch = kept and kept[-1].value.startswith("--") and known_name(kept[-1].value) in SWITCHES
        (unset if switch and re.fullmatch(r"\$(\w+|\{\w+(\[[@*]\])?\})", word.value) else kept).append(word)
    remarks = [f"{path.name}:{line}: this condition cannot be evaluated: taken to be false" for line in script.skipped]
    remarks += [f"{path.name}:{word.line}: {word.value} is not set in the file: taken to be empty" for word in unset]
    pairs = [(name, script.variables[name][-1]) for name in VARIABLES if script.variables.get(name)]
    stated = _of_pairs(path, [*pairs, *named_values(kept)])
    ends = [at for at, word in enumerate(kept, 1) if re.search(r"\.(py|sh)$|^torchtitan[\w.]*$", word.value)]
    # Those before the program are its launcher's, where one is started.
    parts = [kept[ends[0] if ends else 0 :], *([kept[: ends[0] - 1]] if ends and started else [])]
    passed = (one for part in reversed(parts) for one in named_values(part))
    own = {name: value for name, value in passed if name.startswith(("-", "+")) or "." in name}
    return replace(stated, own=own, words=tuple(kept), directives=tuple(script.directives), remarks=tuple(remarks))


def _plain(name: str) -> str:
    """A name without dashes before it; -N and -n are two."""
    bare = name.lstrip("-+").replace("-", "_")
    return bare if len(bare) == 1 else bare.lower()


def _telling(words: Sequence[Stated]) -> int:
    """Number of recognised arguments of a command."""
    return sum(known_name(name) != "" for name, _ in named_values(words))


def _configs(source: _Source, documents: Sequence[Stated], files: tuple[Path, ...]) -> Iterator[_Source]:
    """Config files that a file names, beside it or below a folder that it is in, and DeepSpeed's if a script writes
    it; DocumentError for one without which nothing can be priced and that is not there, and for one that names itself.

    files: the file, after those that name it.
    """
    path = files[-1]
    asked = any(re.match(r"-[\w.-]*(deepspeed|config)|deepspeed$", word.value) for word in source.words)
    for document in documents:
        if asked and document.value.lstrip().startswith("{"):
            found = _of_pairs(path, yaml_pairs(document.value, path))
            moved = {name: replace(one, line=one.line + document.line - 1) for name, one in found.arguments.items()}
            yield replace(found, arguments=moved)
    for name, stated, file in config_files(source.words, source.named, path, written=bool(documents)):
        if file is None and not documents:
            remark = f"{path.name}:{stated.line}: {stated.value} does not lie beside it, and is not read"
            yield _Source(path, {}, remarks=(remark,))
        if file is None:
            continue
        if file in files:
            raise DocumentError(str(path), [Problem(name, f"{file} names itself through other files", stated.line)])
        found = replace(_read(file, named_by=files), words=(), directives=())
        # Its keys are those of a section where an argument holds it.
        inside = [(f"{name}.{key}", one) for key, one in found.own.items()] if name == "fsdp_config" else []
        yield (_of_pairs(file, inside) if inside else found).elsewhere()


# Frameworks and defaults of their arguments.

_FLAVORS = {flavor.lower(): f"llama3-{flavor.lower()}" for flavor in FLAVORS}
_FLAVORS |= {flavor.lower(): name for name, (_, flavor, _) in MIXTURES.items()}
_CONFIGS_OF = {config: flavor.lower() for _, flavor, config in MIXTURES.values() if config}
_FAMILIES = {"", "llama3", *(module for module, _, _ in MIXTURES.values())}
"""torchtitan's flavors that ship as models, configs that have them, and the families whose they are."""


def _software(source: _Source) -> tuple[str, int]:
    """Name of the framework, and the line that names it; UsageError without one."""
    programs = {found[0].rsplit("/", 1)[-1]: word for word in source.words if (found := _PROGRAM.search(word.value))}

    def told(*names: str) -> Stated | None:
        found = (one[name] for name in names for one in (source.arguments, source.named) if name in one)
        return next((one for one in found if one.value.lower() not in ("", "none", "null")), None)

    def any_told(alternatives: str) -> Stated | None:
        """The first of names between blanks, or of `a+b` where each is stated."""
        several = ([told(name) for name in names.split("+")] for names in alternatives.split())
        return next((one[0] for one in several if all(one)), None)

    def started(part: str) -> Stated | None:
        return next((word for name, word in programs.items() if part in name), None)

    for framework in registry().values():
        own = (key.name for key in table(framework.name) if not named(key.name, SHIPPED)) if framework.keys else ()
        if word := told(*own):
            return framework.name, word.line
    for one in records("frameworks"):
        if word := next(filter(None, map(started, one["started"].split())), None) or any_told(one["states"]):
            return _exactly(one["kind"], source), word.line
    tools = "Megatron-LM, NeMo, torchtitan, DeepSpeed, accelerate or a Trainer"
    near = as_options(source.text, source.named, _gpus(source)[0]) if program_of(source.words) else ""
    raise UsageError(f"{str(source.path)!r} states no arguments of {tools}{near}")


def _exactly(kind: str, source: _Source) -> str:
    """Which framework of a kind it is."""
    stated = source.arguments
    if kind == "torchtitan":
        switches = [
            stated[name].value.lower() for name in ("compile", "compile.enable", "training.compile") if name in stated
        ]
        switches = switches or [_preset(source).get("compile.enable", "").lower()]
        return kind if "true" in switches else "torchtitan-eager"
    if kind == "bridge":
        # The plain recipe has the defaults of pretrain_gpt.py, and those that fine-tune reduce gradients in FP32.
        tunes = _bridge_mode(source) != "pretrain"
        return "megatron-core" if tunes or "vanilla" in source.name("recipe") else "nemo"
    if kind != "megatron":
        return kind
    if "zero_stage" in stated or "pipe_parallel_size" in source.named:
        return "deepspeed"
    if {"deepspeed", "deepspeed_config"} & source.named.keys():
        return "megatron-deepspeed"
    if ORDER in source.named:
        return "primus"
    old = {"ddp_impl", "use_legacy_models", "checkpoint_activations"} & source.named.keys()
    return "megatron-2022" if old else "megatron-core"


_SWIFT = "megatron sft"
"""Of the tables of arguments, and of the presets that stand for its defaults."""


def _is_swift(source: _Source) -> bool:
    """Whether it is a command of ms-swift that trains by Megatron-Core."""
    return by_megatron(" ".join(word.value for word in source.words)) == "ms-swift"


def _bridge_mode(source: _Source) -> str:
    """What a recipe of Megatron-Bridge trains, "" where none is started."""
    recipe = source.name("recipe")
    return bridge_mode(recipe, source.name("mode")) if recipe and BRIDGE.search(source.text) else ""


def _adapting(source: _Source) -> Iterator[tuple[str, Stated]]:
    """What a recipe of Megatron-Bridge that fine-tunes says by its name or mode: adapters, and its precision, which is
    that of all of them (NVIDIA-NeMo/Megatron-Bridge@51885cf1, recipes/common.py)."""
    if (mode := _bridge_mode(source)) in ("lora", "dora"):
        yield "peft_scheme", Stated(mode, 0)
    if mode not in ("", "pretrain") and "mixed_precision" not in source.named:
        yield "mixed_precision", Stated("bf16_mixed", 0)


def _tool(source: _Source) -> str:
    """The tables of a tool that trains by Megatron-Core with arguments of its own, "" for none."""
    tunes = _bridge_mode(source) in ("sft", "lora", "dora")
    return "megatron bridge" if tunes else _SWIFT if _is_swift(source) else ""


def _preset(source: _Source) -> Mapping[str, str]:
    """What the function of torchtitan 0.3.0 sets that a command names; all have the loss in as many chunks. And what
    ms-swift has otherwise than Megatron-Core (docs, Megatron-SWIFT's Command-line-parameters)."""
    config = _SWIFT if _is_swift(source) else source.name("config").lower()
    chunks = {"loss.num_chunks": "8"} if source.name("module") and config else {}
    return chunks | {one["key"]: one["value"] for one in records("presets") if one["config"] == config}


def _gpus(source: _Source) -> tuple[Stated | None, Stated | None]:
    """GPUs that the launcher starts ranks on, or that the job asks for, and those of a node; tasks without GPUs do not
    tell."""
    words = [word.value for word in source.words]
    starts = next((at for at, word in enumerate(words) if word.endswith((".py", "torchrun", "python", "-m"))), None)
    slurm = slurm_sizes(source.directives) | (slurm_sizes(source.words[:starts]) if "srun" in words else {})
    per_node, nodes = (source.count(*names) for names in (("nproc_per_node", "num_gpus"), ("nnodes", "num_nodes")))
    alone = not {"nnodes", "num_nodes", "hostfile"} & source.named.keys()
    if per_node is not None:
        slurm |= {"gpus_per_node": per_node} | ({"nodes": nodes} if nodes else {})
        slurm = ({"nodes": Stated("1", per_node.line)} if alone else {}) | slurm
    elif found := source.count("np") or (source.count("n") if {"mpirun", "mpiexec"} & {*words} else slurm.get("gpus")):
        return found, slurm.get("gpus_per_node")
    for many, each in (("nodes", "gpus_per_node"), ("ntasks", "gpus_per_task")):
        if {many, each} <= slurm.keys():
            every = Stated(str(int(slurm[many].value) * int(slurm[each].value)), slurm[each].line)
            return every, slurm.get("gpus_per_node")
    return None, slurm.get("gpus_per_node")


# The run.

OF_RUN = tuple(name for name in NEEDED if name != "gpu")
OF_MODEL = ("layers", "hidden", "heads", "ffn", "vocab")
"""Columns that a run must have, and those of a model alone."""


def read_run(
    path: str | Path,
    *,
    given: Mapping[str, Cell],
    model: ModelLike | None = None,
    framework: str | None = None,
    needed: Sequence[str] = OF_RUN,
) -> CommandRun:
    """The run of a file; UsageError or DocumentError, with file and line, for missing or wrong values.

    given: columns that it does not state. model, framework: used where it does not name them. needed: required columns.
    """
    source, common = _in_common_words(_read(Path(path)))
    told = framework or (common.software if common else "")
    name, line = (find_framework(told).name, 1) if told else _software(source)
    source = source.in_full(name)
    named = _named(source) if model is None else None
    document = named[0] if named else _model_given(source, model)
    facts = {name: meaning(name, value) for name, value in given.items()}
    facts = {**(model_columns(document) if document else {}), **facts}
    gpus, of_node = _gpus(source)
    stated = ({"world_size": gpus} if gpus else {}) | _known(source, facts, needed)
    more, said = completed(str(path), source.text, source.named | stated, given=facts.get("n_gpus"), node=of_node)
    stated |= _of_pairs(Path(path), [*more, *_adapting(source)]).arguments
    implied = _implied(source, name, stated, facts)
    arguments = {**{one: Stated(value, 0) for one, value in implied.items()}, **stated}
    columns = columns_of(arguments, {column: Stated(value, 0) for column, value in facts.items()})
    columns = {**_of_node(of_node), **columns}
    narrow, formats = columns.get("precision", NOTHING).value, find_framework(name).formats
    wider = narrow in FORMATS and narrow not in formats and "precision" not in facts
    if wider:
        columns["precision"] = replace(columns["precision"], value="bf16")
    # Recipes of Megatron-Bridge group experts.
    grouped = {"moe_grouped_gemm": Stated("True", 0)} if _bridge_mode(source) else {}
    every, written = {**grouped, **source.named, **arguments}, {_plain(one): one for one in source.own}
    if refused := [*beside_others("refused", name, every, written)]:
        raise DocumentError(str(path), refused)
    idle = _unconverted(source, arguments) if "torchtitan" in own_tables(name) else {}
    tables = common.table if common else _tool(source) or name
    ignored, unknown = _unpriced(source.without({*idle, MODEL}), tables, {} if common else implied, facts)
    if wider and not any("BF16" in words for words in ignored):
        ignored = (*ignored, f"{narrow}: priced as BF16, so time is overestimated, and memory may be")
    ignored += tuple(f"{one.path}: {one.message}" for one in beside_others("idle", name, every, written))
    ignored += tuple(
        f"{kind} is configured, but model.converters does not name it: priced without, as it runs"
        for kind in dict.fromkeys(idle.values())
    )
    said = [*replaced(columns_of(stated), facts), *said, *([named[1]] if named else [])]
    flavor, of_titan = _flavor(source)
    if document is not None and of_titan is not None and document.name != _FLAVORS.get(flavor, document.name):
        said.append(f"--model {document.name} holds in place of the file's {of_titan.value} (line {of_titan.line})")
    said += [*(common.said if common else ()), *source.remarks]
    run = CommandRun(str(path), name, (line, line), columns, arguments, tuple(said), ignored, unknown, document)
    settled = replace(_settled(run, source, implied), tables=_tables(source, common))
    _require(settled, source, needed)
    return settled


def _of_node(stated: Stated | None) -> dict[str, Stated]:
    """The column of GPUs a node, where they are stated."""
    return {} if stated is None else {"gpus_per_node": Stated(int(stated.value), stated.line)}


def _tables(source: _Source, common: Translated | None) -> tuple[str, ...]:
    """Those of the tool whose file it is; none of a framework's own."""
    tool = tool_of_run(source.text)
    return (common.table,) if common else tuple(tool["tables"].split()) if tool else ()


def _named(source: _Source) -> tuple[Model, str] | None:
    """The model that a file names, and how it is known."""
    if (found := named_model(source.arguments, source.path.parent) or model_of(source.named)) is not None:
        return found
    if _bridge_mode(source) not in ("", "pretrain"):
        stem = re.sub("_(peft|sft|finetune|lora|dora)_.*", "", source.name("recipe"))
        own = next((name for name, one in RECIPES.items() if one == stem), "")
        of_recipe = load_model(own).document if own else model_named(stem)
        rest = "what else it sets by itself is not read: state its layout as overrides"
        return (of_recipe, f"the model is {of_recipe.name}, as --recipe is called; {rest}") if of_recipe else None
    loaded = model_named(source.name("load")) if _is_swift(source) else None
    return (loaded, f"the model is {loaded.name}, as --load is called") if loaded else None


def _require(settled: CommandRun, source: _Source, needed: Sequence[str]) -> None:
    """UsageError for columns that are missing, and for a layout that does not fill its GPUs."""
    # A batch that follows from the number of GPUs is not asked for beside it.
    follows = "n_gpus" not in settled.columns and "mbs" in settled.columns
    missing = [name for name in needed if name not in settled.columns and not (name == "gbs" and follows)]
    options = {"n_gpus": "--gpus N", "gbs": "--batch N", "seq": "--seq N"}
    unset = [f"--{name} is {source.name(name)}" for name in ("nnodes", "nproc_per_node") if "$" in source.name(name)]
    if (named := source.arguments.get("model_name_or_path")) and {*missing} & {*OF_MODEL}:
        unset.append(f"the sizes of {named.value} are not known: `axonn-tune models import` its config.json")
        if re.search(r"(?i)(?<![a-z])(vl|vision|omni|llava|internvl|pixtral)(?![a-z])", named.value):
            unset[-1] += ", without its vision tower, which is not priced"
    added = ", ".join(dict.fromkeys(options.get(name, "--model NAME|FILE") for name in missing))
    settled.require(missing, f"add {added}" + (f" ({', '.join(unset)})" if unset else ""))
    if "n_gpus" in needed:
        settled.check_layout()


def _unconverted(source: _Source, arguments: Arguments) -> dict[str, str]:
    """Keys of torchtitan's tables of formats that none of its converters turns on, with the format."""
    found = ((name, re.match(r"-*(?:quantize\.(?:linear|grouped_mm)\.)?(float8|mx)\.", name)) for name in source.own)
    named = arguments.get("converters", NOTHING).value
    switched = "enable_float8_linear" in arguments
    return {name: kind[1] for name, kind in found if kind and kind[1] not in named and not switched}


def _unpriced(
    source: _Source, framework: str, implied: Mapping[str, str], facts: Mapping[str, Cell]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Arguments that are not priced, with the reason, and those that no table has.

    DocumentError for refused ones, and for sizes that are no numbers and not given either.
    """
    tables, refused = tables_of(framework), list[Problem]()
    ignored: dict[str, list[str]] = {}
    unknown: list[str] = []
    own_program = framework in ("deepspeed", "fsdp") and of_own_program(source.text)
    for written, stated in {**{name: Stated(value, 0) for name, value in implied.items()}, **source.own}.items():
        name, value = _plain(written), stated.value
        key, typed = find(name, tables), written.startswith("-")
        wanted = key.misfit(value, typed=typed) if key else ""
        if key is None and (key := find(switched_on(name), tables)) is not None:
            wanted = SWITCH.misfit(value, typed=typed) if key.status == "modelled" else ""
            value = str(value.lower() in OFF)
        # A pattern takes whatever begins so; what none has may be an argument of one's own program.
        open_ = not (typed and own_program) if key is None else "*" in "".join((key.name, *key.also))
        meant = misspelt(name, tables) if open_ else ""
        if why := misplaced(name, value, tables, framework):
            refused.append(Problem(written, why, stated.line, stated.file))
        elif meant:
            meant = f"--{meant.replace('_', '-')}" if written.startswith("--") else meant
            why = f"is no argument of {framework}: did you mean {meant}?"
            refused.append(Problem(written, why, stated.line, stated.file))
        elif key is None:
            # What another framework's table has may have been read all the same.
            unknown += [] if known_name(name) and framework not in TRANSLATED else [written]
        elif key.status == "refused" and not key.is_silent(value):
            refused.append(Problem(written, key.refusal(value), stated.line, stated.file))
        elif wanted and (key.status == "modelled" or key.range):
            given = "$" in value or columns_of({key.name: Stated("1", 0)}).keys() & facts.keys()
            bare = written.startswith("-") and value == "True"
            why = f"has no value: it is {wanted}" if bare else f"is {stated.value!r:.80}, not {wanted}"
            refused += [] if given else [Problem(written, why, stated.line, stated.file)]
        elif not key.is_silent(value):
            switch = written.startswith("-") and stated.value == "True"
            ignored.setdefault(key.why, []).append(written if switch else f"{written} {stated.value}")
    if refused:
        raise DocumentError(str(source.path), refused)
    return tuple(f"{', '.join(several)}: {why}" for why, several in ignored.items()), tuple(unknown)


def _known(source: _Source, facts: Mapping[str, Cell], needed: Sequence[str]) -> dict[str, Stated]:
    """Arguments whose values a file states or that are given; DocumentError for those that only a shell knows."""
    found, problems = dict(source.arguments), []
    for name, stated in source.arguments.items():
        # The model may be given in its place.
        if "$" in stated.value and name != "model_name_or_path":
            del found[name]
            columns = columns_of({name: Stated("1", 0)}).keys()
            if not columns & facts.keys() and (needed == OF_RUN or columns & set(needed)):
                why = (
                    "what a command prints"
                    if OUTPUT in stated.value
                    else f"{stated.value}, which the file does not set"
                )
                problems.append(Problem(name, f"is {why}: write its value in place of it", stated.line, stated.file))
    if problems:
        raise DocumentError(str(source.path), problems)
    return found


_OF_DEEPSPEED = ("zero_stage", "overlap_gradients", "overlap_parameters", "gradients.reduced")
"""Fields that DeepSpeed's own config states for Megatron-DeepSpeed."""


def _implied(source: _Source, framework: str, stated: Arguments, facts: Mapping[str, Cell]) -> dict[str, str]:
    """Arguments that are neither stated nor given, as the framework or its config function has them."""
    # Megatron-Bridge has no switch for it.
    grouped = "kv_heads" in facts or source.name("recipe")
    preset = _preset(source)
    keys = {key.field: key for key in defaults_of(framework)}
    # Megatron-DeepSpeed and GPT-NeoX have Megatron-LM's model.
    megatron = "pipe_parallel_size" in source.named or any("pretrain_" in word.value for word in source.words)
    if framework == "deepspeed" and megatron:
        keys |= {key.field: key for key in defaults_of("megatron-deepspeed") if key.field not in _OF_DEEPSPEED}
    found = {key.name: key.default for key in keys.values() if not set(names_of(key.field)) & stated.keys()}
    if framework == "deepspeed":
        # As runtime/zero/config.py has it.
        found["overlap_comm"] = str(columns_of(stated).get("zero_stage", NOTHING).value == "3")
    if megatron and framework in ("deepspeed", "megatron-deepspeed") and not set(names_of("flash")) & stated.keys():
        # Megatron-DeepSpeed's and GPT-NeoX's attention writes all scores unless it is told otherwise.
        found["use_flash_attn"] = "False"
    if set(names_of("batch")) & stated.keys() or "gbs" in facts:
        found.pop("gradient_accumulation_steps", None)
    if framework.endswith("-eager"):
        found.pop("compile.components", None)
    every = {**found, **preset}
    # What another one leaves without effect is nothing that is assumed.
    idle = idle_names(framework, {**{name: Stated(value, 0) for name, value in every.items()}, **stated})
    return {
        name: value
        for name, value in every.items()
        if name not in {*stated, *idle}
        and not columns_of({name: Stated("1", 0)}).keys() & facts.keys()
        and not (name == "group_query_attention" and grouped)
    }


def _model_given(source: _Source, model: ModelLike | None) -> Model | None:
    """The model that is given, or that of a flavor of torchtitan; UsageError for a flavor without sizes."""
    if model is not None:
        return load_model(model).document
    flavor, stated = _flavor(source)
    if flavor in _FLAVORS and source.name("model.name") in _FAMILIES:
        return load_model(_FLAVORS[flavor]).document
    if stated is not None:
        known = ", ".join(sorted(_FLAVORS))
        raise UsageError(
            f"{source.path}:{stated.line}: the sizes of {stated.value} are not known, only those of {known}: "
            "give them with --model NAME|FILE"
        )
    return None


def _flavor(source: _Source) -> tuple[str, Stated | None]:
    """The flavor of torchtitan in small letters, "" for none, and where it is stated."""
    config = source.name("config").lower()
    function = re.fullmatch(r"llama3_(\d+b)(?:_\w+)?", config)
    stated = source.arguments.get("model.flavor") or (source.named.get("config") if source.name("module") else None)
    named = function[1] if function else _CONFIGS_OF.get(config, stated.value.lower() if stated else "")
    return named, stated


def _settled(run: CommandRun, source: _Source, implied: Mapping[str, str]) -> CommandRun:
    """The run with missing columns completed, and the assumptions in words."""
    columns, said = dict(run.columns), [*run.assumed]
    if columns.get("pp", Stated(1, 0)).value == 1:
        implied = {name: value for name, value in implied.items() if not name.startswith("pipeline_parallel_")}
    if implied:
        flag = "--" if "megatron" in own_tables(run.software) and not source.name("recipe") else ""
        shown = (f"{flag}{name.replace('_', '-') if flag else name} {value}" for name, value in sorted(implied.items()))
        said.append(f"not stated, so as {find_framework(run.software).title} has it: {', '.join(shown)}")
    if (
        run.software in ("megatron-axonn", "megatron-deepspeed", "deepspeed")
        and source.name("tokenizer_type") == "NullTokenizer"
        and "vocab" in columns
    ):
        # Their NullTokenizer adds a token.
        columns["vocab"] = replace(columns["vocab"], value=columns["vocab"].value + 1)
    said = [*_in_fp32(columns, run, implied), *said]
    for column, value, words in (*model_gaps(columns, source.named), *layout_gaps(columns, run)):
        columns[column] = Stated(value, columns[column].line if column in columns else 0)
        said.append(words)
    # Megatron-LM's method `uniform` repeats so many layers in one go.
    groups, method = (run.arguments.get(f"recompute_{what}", NOTHING).value for what in ("num_layers", "method"))
    several = method == "uniform" and re.fullmatch(r"[2-9]|[1-9]\d{1,8}", groups)
    if several and columns.get("recompute", NOTHING).value == "full":
        said.append(f"recompute of {groups} layers at once is priced as of each by itself, which has other memory")
    if run.given is None and (others := other_parts(columns, source.named)):
        said.append(others)
    if "mbs" not in columns:
        said.append("the micro-batch is not stated: the fastest that fits")
    if "recompute" not in columns:
        said.append("recompute is not stated: the kind that fits and is fastest")
    return replace(run, columns=columns, assumed=tuple(said))


def _in_fp32(columns: dict[str, Stated], run: CommandRun, implied: Mapping[str, str]) -> Iterator[str]:
    """What is said of a run that no argument takes out of FP32; one that its trainer fills in is in BF16."""
    stated, names = columns.get("precision", NOTHING), ("bf16", "bf16.enabled")
    filled = [one for one in names if run.arguments.get(one, NOTHING).value.lower() == "auto"]
    if stated.value == "fp32" and filled:
        columns["precision"] = replace(stated, value="bf16")
        yield f"{filled[0]} is auto, which its trainer fills in: priced in BF16 (--precision)"
    elif stated.value == "fp32" and {*names} & implied.keys():
        yield "the run is in FP32: no BF16 or FP16 is stated; --precision bf16 prices the same run in BF16"
