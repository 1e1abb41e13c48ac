"""Tables of arguments against the frameworks' own lists of names, and what is said of arguments that are not priced."""

from __future__ import annotations

import re
import shlex
from ast import literal_eval
from dataclasses import fields
from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.frameworks.keys import (
    TABLES,
    Key,
    all_tables,
    defaults_of,
    find,
    keys_of,
    misspelt,
    named,
    own_tables,
    step_keys,
    switched_on,
    table,
    tables_of,
)
from axonn_tune.frameworks.statements import FIELDS
from axonn_tune.frameworks.step import StepOptions
from axonn_tune.learning.adapters import Adapters
from axonn_tune.learning.arguments import Stated, columns_of
from axonn_tune.learning.run import CommandRun
from axonn_tune.learning.stated import read_run
from axonn_tune.program.types.gdn import GatedDeltaNet
from axonn_tune.specs.catalog import load_machine
from axonn_tune.specs.sections import Experts, Indexer, LatentAttention, Mamba
from tests.unit.frameworks.asked import ARGUMENT_NAMES, Refusal, asked, case_of, refusals

RECORDED = {
    "megatron_core-0.19.2": "megatron-core",
    "torchtitan-0.3.0": "torchtitan",
    "torchtitan-0.2.2": "torchtitan",
    "deepspeed-0.19.8": "deepspeed",
    **dict.fromkeys(("transformers-5.24.0", "llamafactory-0.9.5", "accelerate-1.15.0"), "fsdp"),
}
"""Releases whose names tools/frameworks/argument_names.py recorded, and the framework whose tables have them."""

WHOLE = {"x", "y", "z", "pipeline", "chunks", "context", "batch", "micro_batch", "seq", "layers", "hidden", "heads"}
WHOLE |= {
    "head_dim",
    "ffn",
    "vocab",
    "experts",
    "expert",
    "expert_tensor",
    "experts.per_token",
    "latent.kv_rank",
    "mtp_layers",
}
"""Fields that are whole numbers."""

COSTS = re.compile(
    r"fp8|fp4|offload|recompute|checkpoint_activ|fusion|fused|overlap|cuda_graph|quantiz|compile|dtype|precision_aware|"
    r"parallel|shard|bucket|window_size|dropout|num_layers|hidden_size|vocab_size|batch_size|optimizer$"
)
"""Names that sound as if they changed time or memory."""


def names(release: str) -> list[str]:
    """Recorded names, as tables write them."""
    lines = (ARGUMENT_NAMES / f"{release}.txt").read_text("utf-8").splitlines()
    return sorted({line.replace("-", "_").lower() for line in lines if not line.startswith("#")})


@pytest.mark.parametrize("release", RECORDED)
def test_every_argument_of_a_framework_is_in_one_of_the_four_classes(release: str) -> None:
    """Guards completeness: each name that a release has is modelled, refused, ignored with a reason, or harmless; of
    formats, offload, fusions, overlap or sizes harmless for a stated reason alone; and a section's pattern does not
    hide what its arguments do: it is for what no row names.
    """
    tables, own = tables_of(RECORDED[release]), ("validation", "checkpoint", "fault_tolerance", "comm")
    assert len(names(release)) > 100
    for name in names(release):
        found = find(name, tables) or find(switched_on(name), tables)
        assert found is not None, name
        assert found.status != "harmless" or found.why or not COSTS.search(name), name
        section, _, last = name.rpartition(".")
        plain = find(last, tables)
        if section and section.split(".")[0] not in own and plain is not None and plain.status != "harmless":
            assert found.status != "harmless", name


PARTS = {
    "step": [one.name for one in fields(StepOptions)],
    **{"experts": Experts.model_fields, "latent": LatentAttention.model_fields, "mamba": Mamba.model_fields},
    "indexer": Indexer.model_fields,
    "gdn": GatedDeltaNet.model_fields,
    "tuning": [*(one.name for one in fields(Adapters)), "adapts", "linear", "dora", "sharing"],
}
"""Options of a step, sizes of layers and what of adapters is read, which rows state by their names."""


@pytest.mark.parametrize("name", all_tables())
def test_tables_are_whole(name: str) -> None:
    """Guards the tables: four answers, reasons where something is not priced, fields where it is, no catch-all."""
    for key in table(name):
        assert key.status in ("modelled", "refused", "ignored", "harmless"), key.name
        assert key.why or key.status not in ("refused", "ignored"), key.name
        assert key.field or key.status != "modelled", key.name
        assert key.why or key.status != "modelled" or not key.plain, key.name
        assert all(len(part) > 3 for part in (key.name, *key.also) if "*" in part), key.name
        assert key.range or key.field not in WHOLE or key.default in ("True", "False"), key.name
        part, _, name = key.field.partition(".")
        assert not name or name in PARTS.get(part, ()) or part in FIELDS, key.name
        assert key.range in ((), ("list",)) or (
            key.misfit("nan") and key.misfit("٣") and not key.misfit(key.default)
        ), key.name
        # Where another argument decides, that one is not passed over.
        if decides := re.match(r"of (?:experts, which )?(--[\w-]+)", key.why):
            other = find(decides[1].lstrip("-").replace("-", "_"))
            assert other is not None, key.name
            assert other.status != "harmless", key.name


def test_a_word_that_is_not_priced_is_said() -> None:
    """Guards words that mean something: one that is not priced is said, "none" of kernels, too."""
    key = find("dsa_kernel_backend", ("megatron",))
    assert key is not None
    assert [key.is_silent(word) for word in ("cudnn", "tilelang", "none")] == [True, True, False]


@pytest.mark.parametrize("option", step_keys())
def test_a_row_reads_what_it_writes(option: str) -> None:
    """Guards both directions of options that an argument states alone: a row reads each value as what wrote it."""
    for key in keys_of(f"step.{option}"):
        switch = key.range == ("switch",) and not key.sets
        values = [literal_eval(key.sets)] if key.sets else [True, False] if switch else [*key.meanings.values()] or [2]
        for value in values:
            word = str(key.write(value))
            assert not key.misfit(word), key.name
            assert key.read(word) == value, key.name


def test_defaults_are_those_of_the_first_argument_of_a_field() -> None:
    """Guards what is taken where nothing is stated: one default a field, of a framework's own tables."""
    for framework in TABLES:
        found = [key.field for key in defaults_of(framework)]
        assert len(set(found)) == len(found), framework
    core = {key.name: key.default for key in defaults_of("megatron-core")}
    assert (core["hidden_dropout"], core["bf16"], core.get("fp16")) == ("0.1", "False", None)


GPT = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 50257 "
CORE = (
    f"torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py {GPT} --micro-batch-size 1 --global-batch-size 64 --bf16 "
)
TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n{}\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
ZERO = (
    '{{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "zero_optimization": {{"stage": 3{}}}}}'
)


def stated(folder: Path, text: str, *, name: str = "run.sh", model: str | None = None, **given: str) -> CommandRun:
    """The run of a text."""
    (folder / name).write_text(text, "utf-8")
    return read_run(folder / name, given=given, model=model)


@pytest.mark.parametrize(
    ("flags", "ignored"),
    [
        ("--optimizer-cpu-offload", None),
        ("--cpu-offloading-num-layers 4", None),
        (
            "--recompute-granularity selective --recompute-modules layernorm gdp_qkv",
            "--recompute-modules layernorm gdp_qkv",
        ),
        ("--megatron-fsdp-grad-comm-dtype bf16", "--megatron-fsdp-grad-comm-dtype bf16: gradients are reduced"),
        ("--fp8-format hybrid --fp8-recipe tensorwise", None),
        ("--fp8-format hybrid --fp8-param-gather", None),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-multi-head-attention", "--fp8-multi-head-attention: inputs of"),
        ("--num-experts 8 --moe-pad-expert-input-to-capacity", "--moe-pad-expert-input-to-capacity: tokens are not"),
        ("--num-experts 8 --moe-router-topk 2 --moe-layer-freq [1]*32", None),
        ("--no-rope-fusion", "--no-rope-fusion: kernels are priced with the default fusions"),
        ("--optimizer adam", None),
        ("--num-distributed-optimizer-instances 2", "--num-distributed-optimizer-instances 2: "),
        ("--num-distributed-optimizer-instances 1", None),
        ("--recompute-granularity selective --recompute-modules core_attn layernorm mlp", None),
        ("--exp-avg-dtype fp32 --optimizer adam --mtp-num-layers 0", None),
        ("--lr 1e-4 --save x --data-path y --seed 3 --log-interval 1 --fp8-margin 0", None),
    ],
)
def test_megatron_arguments_that_are_not_priced_are_named(flags: str, ignored: str | None, tmp_path: Path) -> None:
    """Guards the rule for Megatron-LM: what changes time or memory and is not priced is said, other values are not."""
    run = stated(tmp_path, CORE + flags)
    assert run.unknown == ()
    assert len(run.ignored) == (ignored is not None)
    assert (ignored or "") in "".join(run.ignored)
    recipe = "mxfp8" if "mxfp8" in flags else "fp8-current" if "tensorwise" in flags else "fp8-delayed"
    assert run.columns["precision"].value == (recipe if "fp8-format" in flags else "bf16")


ZEROS = {"n_gpus": "16", "seq": "8192"}
OFFLOADED = ', "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "nvme", "pin_memory": true}'


def test_torchtitan_and_deepspeed_arguments_that_are_not_priced_are_named(tmp_path: Path) -> None:
    """Guards the same for float8 of torchtitan's TOML, and for ZeRO's offload, whose batch is a product."""
    text = TITAN.format('converters = ["float8"]\n[float8]\nenable_fsdp_float8_all_gather = true')
    (found,) = stated(tmp_path, text, name="run.toml", n_gpus="8").ignored
    assert found.startswith("float8.enable_fsdp_float8_all_gather True: weights are priced as gathered in BF16")
    for words, ignored in (
        (OFFLOADED, ["offload_param.device nvme"]),
        (', "offload_optimizer": {"device": "none"}', []),
    ):
        run = stated(tmp_path, ZERO.format(words), name="zero.json", model="llama3-8b", **ZEROS)
        named = [one for words in run.ignored for one in words.partition(":")[0].split(", ")]
        assert named == [f"zero_optimization.{one}" for one in ignored]
        assert run.columns["gbs"].value == 2 * 4 * 16


def test_what_no_table_has_is_listed(tmp_path: Path) -> None:
    """Guards the fifth case: a fork's own flags and a misspelled key are named; the launcher's options are not."""
    own = CORE.replace("--nnodes", "--rdzv-frob 3 --nnodes") + "--use-z-loss --tensor_model_paralell 2"
    assert stated(tmp_path, own).unknown == ("--use-z-loss", "--tensor_model_paralell")
    own = CORE + "--num-experts 8 --moe-foo 3 --fp8-foo e4m3 --expert-foo 2 --cuda-graph-foo"
    assert stated(tmp_path, own).unknown == ("--moe-foo", "--fp8-foo", "--expert-foo", "--cuda-graph-foo")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--expert-model-paralel-size 8", "--expert-model-parallel-size"),
        ("--context-paralel-size 4", "--context-parallel-size"),
        ("--num-expertz 8", "--num-experts"),
        ("--fp8-formt hybrid", "--fp8-format"),
        ("--bc16", "--bf16"),
        ("--swgilu", "--swiglu"),
        ("--tensor-modle-paralel-size 2", "--tensor-model-parallel-size"),
        ("--fp32-residual-conection", "--fp32-residual-connection"),
    ],
)
def test_misspelt_layouts_sizes_and_formats_are_refused(written: str, meant: str, tmp_path: Path) -> None:
    """Guards predictions against a layout that nobody asked for: the framework would refuse the name, too."""
    with pytest.raises(DocumentError, match=f"{written.split()[0]}: is no argument of .*: did you mean {meant}"):
        stated(tmp_path, CORE + written)


MISSPELT = {
    "run.sh": (CORE.replace("--nnodes", "--nnodbs"), "--nnodbs: .* did you mean --nnodes"),
    # Megatron-LM's parser takes no abbreviations.
    "short.sh": (
        f"{CORE} --tensor-model-paral 2",
        "--tensor-model-paral: is no argument of megatron-core: did you mean --tensor-model-parallel-size?",
    ),
    "zero.json": (
        ZERO.format("").replace('"stage"', '"stagee"'),
        "zero_optimization.stagee: .* zero_optimization.stage",
    ),
    "fsdp.yaml": (
        "fsdp_config:\n  fsdp_version: 2\n  fsdp_sharding_strategie: SHARD_GRAD_OP\n",
        "fsdp_config.fsdp_sharding_strategie: .* fsdp_sharding_strategy",
    ),
    "launch.sh": (
        "accelerate launch --use_fsdp --parallelism_config_dp_shard_size 16 --fsdp_ofload_params true train.py",
        "--fsdp_ofload_params: .* --fsdp-offload-params",
    ),
}


@pytest.mark.parametrize("name", MISSPELT)
def test_misspelt_names_of_launchers_and_below_a_pattern_are_refused(name: str, tmp_path: Path) -> None:
    """Guards arguments before the program, and those that a pattern of the tables would take without a word."""
    text, said = MISSPELT[name]
    with pytest.raises(DocumentError, match=said):
        stated(tmp_path, text, name=name, model="llama3-8b", **ZEROS, gbs="64")


@pytest.mark.parametrize("framework", ["megatron-core", "torchtitan", "deepspeed", "fsdp"])
def test_one_mistake_in_a_name_is_found_and_no_name_of_a_framework_is_one(framework: str) -> None:
    """Guards both sides of the rule: a letter missing, doubled or swapped in each modelled name; every real name."""
    tables = tables_of(framework)
    for key in (key for one in own_tables(framework) for key in table(one) if key.field and len(key.name) > 4):
        half = len(key.name) - len(key.name.rpartition(".")[2]) // 2
        left, right = key.name[:half], key.name[half:]
        for one in (left + right[1:], left + left[-1] + right, left[:-1] + right[:1] + left[-1] + right[1:]):
            assert find(one, tables) == key or misspelt(one, tables) or named(one, tables), one
    for file in (Path(__file__).parents[2] / "fixtures" / "arguments").glob(f"{framework.replace('-', '_')}*.txt"):
        for name in file.read_text("utf-8").splitlines()[1:]:
            assert not misspelt(name.replace("-", "_").lower(), tables), name


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ("--decoder-num-layers 4", "encoder-decoder models are not modelled"),
        ("--heterogeneous-layers-config-path x.json", "layers of several sizes are not modelled"),
    ],
)
def test_models_that_cannot_be_priced_are_refused(flags: str, why: str, tmp_path: Path) -> None:
    """Guards refusals: with file, line and argument."""
    with pytest.raises(DocumentError) as caught:
        stated(tmp_path, f"T=1\n{CORE}{flags}")
    assert f"run.sh:2: {flags.split()[0]}: {why}" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "argument"),
    [
        ("granularity some", "granularity some: must be full or selective"),
        ("granularity full num-layers 1", "method: recompute_granularity full needs"),
        (
            "granularity full num-layers 1 method blocks",
            "method blocks: must be block or uniform, did you mean 'block'?",
        ),
        ("granularity full method block", "num_layers: recompute_granularity full needs recompute_num_layers"),
        ("granularity selective num-layers 2", "num-layers 2: must be None"),
        ("activations num-layers 2", "num-layers 2: must be None"),
        ("granularity selective method block", "method block: recompute method is not supported"),
        ("granularity selective modules layer_norm", "modules layer_norm: there are core_attn, moe_act"),
        (
            "granularity selective modules moe_act layernorm",
            "modules moe_act layernorm: moe_act in recompute_modules is only supported",
        ),
        (
            "granularity selective modules mla_up_proj",
            "modules mla_up_proj: mla_up_proj in recompute_modules is only supported",
        ),
        (
            "granularity selective modules mlp mhc",
            "modules mlp mhc: mhc and mlp in recompute_modules cannot be used together",
        ),
    ],
)
def test_recompute_that_megatron_core_refuses_is_refused(flags: str, argument: str, tmp_path: Path) -> None:
    """Guards the checks of its arguments and configs; those of `refusals.json` were recorded from its own code."""
    words = [f"--recompute-{word}" if word in NAMES else word for word in flags.split()]
    with pytest.raises(DocumentError) as caught:
        stated(tmp_path, CORE + " ".join(words))
    assert re.search(f"run.sh:1: (--)?recompute[-_]{re.escape(argument)}", str(caught.value))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--fp8-format hybrid --fp8-recipe blokwise", "--fp8-recipe blokwise: must be .* did you mean 'blockwise'?"),
        ("--moe-flex-dispatcher-backend deepeep", "--moe-flex-dispatcher-backend deepeep: .* did you mean 'deepep'?"),
        ("--cp-comm-type p2pp", "--cp-comm-type p2pp: must be .* did you mean 'p2p'?"),
        ("--bf16 --fp16", "--fp16: fp16 and bf16 cannot be used together"),
        ("--optimizer muon --use-torch-fsdp2", "--optimizer muon: Muon and Lion do not go with torch FSDP2"),
        ("--num-experts --moe-router-topk 2", "--num-experts: has no value: it is a whole number from 0"),
        ("--overlap-moe-expert-parallel-comm", "--overlap-moe-expert-parallel-comm: .* only supported with expert"),
        (
            "--num-experts 8 --expert-model-parallel-size 8 --overlap-moe-expert-parallel-comm",
            "--overlap-moe-expert-parallel-comm: .* is allgather where it is not stated",
        ),
        ("--num-experts 8 --tensor-model-parallel-size 2", "--num-experts 8: .* trains only with sequence_parallel"),
    ],
)
def test_a_refusal_has_the_flag_as_typed_and_the_nearest_value(flags: str, said: str, tmp_path: Path) -> None:
    """Guards choices that Megatron's parser refuses, formats that exclude each other, sizes without a value."""
    with pytest.raises(DocumentError, match=f"run.sh:1: {said}"):
        stated(tmp_path, CORE + flags)


KINDS = ("--sequence-parallel 3.7", "--padded-vocab-size null", "--optimizer []", "--no-bias-gelu-fusion --swiglu qx")
KINDS += ("--attention-backend flush", "--num-query-groups []", "--recompute-granularity null", "--window-size 3.7")
KINDS += ("--disable-bias-linear -5", "--pipeline-model-parallel-layout null", "--position-embedding-type 7")
NEMO = "trainer:\n  num_nodes: 4\n  devices: 8\nmodel:\n  num_layers: 32\n  hidden_size: 4096\n  micro_batch_size: 1\n"
NEMO += "  num_attention_heads: 32\n  global_batch_size: 64\n  encoder_seq_length: 2048\n  ffn_hidden_size: 16384\n"
KIND_FILES = {
    "nemo.yaml": [
        NEMO + f"  {line}\n" for line in ("bias: qx", "num_query_groups: []", "fp16: 7", "micro_batch_size: 2")
    ],
    "zero.json": [ZERO.format(', "overlap_comm": "qx"')],
    "run.toml": [TITAN.format('[compile]\nenable = "qx"')],
}


@pytest.mark.parametrize("flags", KINDS)
def test_values_of_another_kind_are_refused(flags: str, tmp_path: Path) -> None:
    """Guards switches, numbers and words of a list; `null` and `[]` are no values on a command line."""
    value = flags.split()[-1]
    with pytest.raises(DocumentError, match=rf"(?s)run.sh.*is '{re.escape(value)}', not "):
        stated(tmp_path, CORE + flags).case(load_machine("dgx-h100").document)


@pytest.mark.parametrize("name", KIND_FILES)
def test_values_of_another_kind_in_files_are_refused(name: str, tmp_path: Path) -> None:
    """Guards the same in files, whose `null` states nothing; and keys that are written twice."""
    given = {} if name == "nemo.yaml" else ZEROS
    for text in KIND_FILES[name]:
        with pytest.raises(DocumentError, match=rf"{name}:\d+: .*(is '.*', not |key written twice)"):
            stated(tmp_path, text, name=name, model=None if "model" in text else "llama3-8b", **given)
    stated(tmp_path, NEMO + "  bias: null\n  num_query_groups: null\n", name="nemo.yaml")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--fp8-recipe blockwise", "--fp8-recipe blockwise: without --fp8-format nothing runs in FP8"),
        ("--num-query-groups 2", "--num-query-groups 2: without --group-query-attention each head has keys"),
        ("--moe-router-topk 4", "--moe-router-topk 4: without --num-experts there are no experts"),
        (
            "--num-experts 8 --moe-token-dispatcher-type alltoall --moe-flex-dispatcher-backend deepep",
            "--moe-flex-dispatcher-backend deepep: only --moe-token-dispatcher-type flex has a backend",
        ),
    ],
)
def test_what_is_idle_without_another_argument_is_named(flags: str, said: str, tmp_path: Path) -> None:
    """Guards what Megatron-Core takes without a word and does not use: named as ignored, silent with the other one."""
    assert any(one.startswith(said) for one in stated(tmp_path, CORE + flags).ignored)
    both = f"{flags} --fp8-format e4m3 --group-query-attention".replace("type alltoall", "type flex")
    both += "" if "--num-experts" in both else " --num-experts 8"
    assert not any(one.startswith(said) for one in stated(tmp_path, CORE + both).ignored)


NAMES = ("granularity", "method", "num-layers", "modules", "activations")


@pytest.mark.parametrize("refusal", [one for one in refusals() if one.id.startswith("recompute")], ids=str)
def test_recorded_refusals_of_recompute_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    """Guards the table of refusals against the framework's own code, which said no to the same command."""
    (question,) = (one for one in asked(refusal.framework) if one.id == refusal.id)
    with pytest.raises(DocumentError, match=refusal.says):
        stated(tmp_path, " ".join(["torchrun", "--nproc-per-node", "8", "pretrain_gpt.py", *question.words]))


@pytest.mark.parametrize("refusal", [one for one in refusals() if one.id.startswith(("experts", "format"))], ids=str)
def test_recorded_refusals_of_experts_and_formats_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    """Guards the same of expert rank grids, dispatchers, their overlap, and number formats."""
    (question,) = (one for one in asked(refusal.framework) if one.id == refusal.id)
    case, script = case_of(refusal.framework, refusal.case), tmp_path / "run.sh"
    program = "pretrain_gpt.py" if refusal.framework == "megatron-core" else "torchtitan.train"
    script.write_text(shlex.join(["torchrun", program, *question.words]), "utf-8")
    with pytest.raises(DocumentError, match=refusal.says):
        read_run(script, given={"n_gpus": case.gpus}).case(load_machine(case.machine).document)


def test_given_columns_hold_over_arguments() -> None:
    """Guards `columns_of`: what is given is not derived again, what follows from it is."""
    arguments = {"world_size": Stated("8", 1), "tensor_model_parallel_size": Stated("4", 1)}
    found = columns_of(arguments, {"n_gpus": Stated(64, 0)})
    assert (found["n_gpus"].value, found["dp"].value) == (64, 16)


def test_words_in_the_place_of_numbers_mean_nothing() -> None:
    """Guards values that are read before they are checked: a share or a number that is none is no internal error."""
    share, number = keys_of("tuning.dropout")[0], Key("", (), "", "", frozenset(), "modelled", "", (">0",))
    assert [share.read(text) for text in ("0.1", "oft", "2.5", "")] == ["0.1", None, None, None]
    assert [number.read(text) for text in ("1e4", "oft", "-1", "nan")] == [1e4, None, None, None]
