"""torchtitan: FSDP2 or HSDP with tensor, context and pipeline parallelism; compiled by default.

Each gradient accumulation step gathers, reduce-scatters and, over data, all-reduces in FP32. Context ranks hold shards
of the weights, too. Selective recompute saves outputs of attention and of every second GEMM: it repeats those of keys
(small, not counted), of attention's output and of the MLP's half without gate, norms and activation. Eager, an RMSNorm
is a handful of FP32 kernels. Source: torchtitan 0.3.0 (PyPI), distributed/ and trainer.py; 0.2.2 for TOML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import starmap
from string import Template

from axonn_tune.frameworks.command import (
    EXPANDABLE_SEGMENTS,
    NO_QKV_BIASES,
    TRIAL_STEPS,
    WARM_UP,
    of_checkout,
    of_package,
    settings,
)
from axonn_tune.frameworks.description import (
    Argument,
    Because,
    Check,
    Command,
    FlopCount,
    Framework,
    PipelineSchedule,
    Plain,
    Refusal,
    Run,
    Section,
    Value,
)
from axonn_tune.frameworks.fsdp import ON_HOST, STEP, WHOLE_MATRICES, offloads
from axonn_tune.frameworks.optimizers import ADAMW
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.model import Model
from axonn_tune.specs.tuning import REST, tools
from axonn_tune.vocabulary import FOLDED, LARGEST_SIZE, PipelineOrder

_CONFIGS = {
    "llama3_8b": (32, 4096, 32, 8, 128, 14336, 128256, False),
    "llama3_70b": (80, 8192, 64, 8, 128, 28672, 128256, False),
}
"""Sizes of the BF16 configs that 0.3.0 has: layers, hidden, heads, kv_heads, head_dim, ffn, vocab, tied. Its 405B is
FP8."""

FLAVORS = {
    "8B": _CONFIGS["llama3_8b"],
    "70B": _CONFIGS["llama3_70b"],
    "405B": (126, 16384, 128, 8, 128, 53248, 128256, False),
}
"""Sizes of the flavors of 0.2.2."""

MIXTURES = {
    "qwen3-30b-a3b": ("qwen3", "30B-A3B", "qwen3_30b_a3b"),
    "qwen3-235b-a22b": ("qwen3", "235B-A22B", ""),
    "gpt-oss-20b": ("gpt_oss", "20b", "gpt_oss_20b"),
    "gpt-oss-120b": ("gpt_oss", "120b", "gpt_oss_120b"),
    "deepseek-v2": ("deepseek_v3", "236B", ""),
    "deepseek-v3": ("deepseek_v3", "671B", "deepseek_v3_671b"),
}
"""Models with experts that 0.3.0 has: module, flavor, and the config that has it, if there is one."""

_BACKENDS = {"alltoall": "standard", "deepep": "deepep", "hybridep": "hybridep"}
_PARTS = (
    *("experts", "shared experts", "multi-head latent attention", "sliding-window attention", "attention sinks"),
    *("layer types of different sizes", "multi-token prediction"),
)
_CONVERTERS = {
    "fp8-rowwise": (
        'Float8LinearConverter.Config(filter_fqns=["lm_head", "router.gate"], model_compile_enabled=COMPILED)',
        "Float8GroupedExpertsConverter.Config(model_compile_enabled=COMPILED)",
    ),
    "mxfp8": (
        'MXFP8LinearConverter.Config(fqns=["attention", "shared_experts", "feed_forward"], '
        "model_compile_enabled=COMPILED)",
        "MXFP8GroupedExpertsConverter.Config(model_compile_enabled=COMPILED, pad_multiple=128)",
    ),
}
"""Of linear layers and of experts, by number format; 128 is what its kernels on Blackwell need."""

_ROTARY_BASE, _NORM_EPSILON = 500_000, 1e-5
"""Of every shipped config."""

_LONGEST = 131072
"""Positions of the rotary table of every shipped config."""

_SCHEDULES: dict[PipelineOrder, str] = {
    "zb1p": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipe-v": "DualPipeV",
}
"""Orders of passes that split the backward pass, as torch names them."""

_PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}


_WRITTEN = {
    "batch": """
        training.local_batch_size training.global_batch_size training.seq_len
        parallelism.pipeline_parallel_microbatch_size
    """,
    # Every degree, since shipped configs have some of their own.
    "parallelism": """
        parallelism.data_parallel_shard_degree parallelism.data_parallel_replicate_degree
        parallelism.tensor_parallel_degree parallelism.context_parallel_degree parallelism.pipeline_parallel_degree
        parallelism.expert_parallel_degree parallelism.enable_sequence_parallel parallelism.fsdp_reshard_after_forward
        parallelism.pipeline_parallel_schedule parallelism.pipeline_parallel_first_stage_less_layers
        parallelism.pipeline_parallel_last_stage_less_layers parallelism.pipeline_parallel_layers_per_stage
    """,
    "execution": """
        training.mixed_precision_param training.mixed_precision_reduce compile.enable training.disable_cuda_graphs
        training.enable_cpu_offload
        loss.num_chunks debug.moe_force_load_balance training.steps metrics.log_freq profiler.enable_profiling
        dataloader.dataset hf_assets_path
    """,
}
"""Keys of 0.3.0's config by the section of the script."""

_OLDER = {
    "parallelism.enable_sequence_parallel": "",
    "loss.num_chunks": "",
    "training.disable_cuda_graphs": "",
    "profiler.enable_profiling": "profiling.enable_profiling",
    "dataloader.dataset": "training.dataset",
    "hf_assets_path": "model.hf_assets_path",
}
"""Where 0.2.2's TOML has a key, nowhere if empty."""


def launch(run: Run) -> Command:
    """`torchtitan.train` on its test data; UsageError for GPT-shaped models, and for what torch's schedules refuse.

    A model of other sizes than a shipped config's, or stages that no key describes, come with a module of their own.
    """
    _check(run)
    if (mixture := _mixture(run)) or run.workload.format or run.workload.tuning is not None:
        return _with_flavor(run, *(mixture or ("llama3", _dense_flavor(run), "")))
    config = _shipped(run)
    sizes = f"The sizes of {run.model.name} are in the Python file beside the script, which starts torchtitan.train."
    values = _values(run)
    written = {title: [*settings(names, values, run.framework.name)] for title, names in _WRITTEN.items()}
    sections = [Section(title, tuple(starmap(_argument, made))) for title, made in written.items()]
    # A subcommand, so it comes last.
    recompute = Section("recompute", (Argument(f"activation-checkpoint:{run.recompute}"),), last=True)
    module = (Argument("--module", "llama3" if config else "__main__"), Argument("--config", config or "own"))
    command = Command(
        release="torchtitan 0.3.0",
        program=("-m", "torchtitan.train") if config else ("{file:_model.py}",),
        sections=(Section("model", module), *sections, recompute),
        environment=(EXPANDABLE_SEGMENTS,),
        files={} if config else {"_model.py": _module(run)},
        checks=(_checkout("0.3.0"),),
        needs=(
            "Start it in a checkout of pytorch/torchtitan, release 0.3.0, whose tests/assets has tokenizer and text.",
            *([] if config else [sizes]),
            "For real training replace c4_test and its tokenizer, and add --checkpoint.enable.",
        ),
        notes=tuple(_notes(run)),
    )
    flavor = next((name for name, sizes in FLAVORS.items() if sizes == _sizes(run.model)), "")
    # 0.2.2 has no tensor parallelism without sequence parallelism, no CUDA graphs and no chunks of the loss.
    older_has = run.step.sequence_parallel and not run.step.cuda_graphs and run.step.loss_chunks == 1
    keys = [one for made in written.values() for one in made]
    older = {"toml": _older(command, run, flavor, keys)} if flavor and older_has else {}
    return replace(command, forms=older)


def _mixture(run: Run) -> tuple[str, str, str] | None:
    """Module, flavor and config of a model with experts, None for another; UsageError where 0.3.0 has none such."""
    if not run.model.has_experts:
        return None
    own = _layers(run.model)
    for name, found in MIXTURES.items():
        if _layers(load_model(name).document) == own:
            return found
    has = f"it has {', '.join(MIXTURES)}"
    raise run.cannot(f"the sizes of {run.model.name}", f"{has}: ask for one of them, or for --framework megatron-core")


def _layers(model: Model) -> tuple[object, ...]:
    """What makes the layers of a model; norms of queries and keys are told by its flavor."""
    types = [replace(one, name="", qk_norms=False, in_bf16=False, opens=False) for one in model.types]
    return model.hidden, model.vocab, tuple((types[index], count) for index, count in model.decoder_runs)


def _adapters(run: Run) -> Iterator[str]:
    """The converter that puts adapters beside linear layers and freezes the rest; UsageError for what it has not.

    Source: torchtitan 0.3.0, components/lora.py. By its default it adapts the LM head, too, which is not priced.
    """
    if (tuning := run.workload.tuning) is None:
        return
    lacks = {
        f"--lora-dtype {tuning.dtype}": tuning.dtype != "fp32",
        "dropout of adapters": tuning.dropout > 0.0,
        "tables that train beside adapters": bool(tuning.tables),
        f"a base in {tuning.base}": tuning.quantized,
        f"LoRA of {run.model.name}, which has experts": run.model.has_experts,
    }
    if missing := [what for what, lacking in lacks.items() if lacking]:
        raise run.cannot(", ".join(missing), "leave it out, or ask for --framework fsdp")
    tool = tools()[run.framework.tuner]
    own = [name for name, layers in tool.names.items() if REST not in layers and {*layers} <= {*tuning.targets}]
    yield f"LoRAConverter.Config(rank={tuning.rank}, alpha={2 * tuning.rank:.1f}, target_modules={json.dumps(own)})"


_LORA = "from torchtitan.components.lora import LoRAConverter\n"


def _dense_flavor(run: Run) -> str:
    """The flavor of llama3 with the model's sizes; UsageError without one, whose linear layers could be converted."""
    found = next((name for name, sizes in FLAVORS.items() if sizes == _sizes(run.model)), "")
    if not found:
        tuned = run.workload.tuning is not None
        what = "LoRA" if tuned else run.workload.precision
        instead = "ask for --framework fsdp" if tuned else "ask for --precision bf16"
        raise run.cannot(f"{what} of a model of other sizes than llama3's", instead)
    return found


def _with_flavor(run: Run, module: str, flavor: str, config: str) -> Command:
    """A model that 0.3.0 has, by its config, or by a module that gives it a dispatcher or a number format."""
    experts = run.model.has_experts
    backend = _BACKENDS.get(run.step.dispatcher, "")
    if experts and not backend:
        raise run.cannot(f"the dispatcher {run.step.dispatcher}", f"it has {', '.join(_BACKENDS)}")
    if experts and run.size("expert_tensor") != (run.size("x") if run.size("expert") == 1 else 1):
        raise run.cannot("experts split over tp beside ep", "leave out --etp")
    if run.size("pipeline") > 1 and _split_keys(run) is None:
        raise run.cannot(f"stages of {'-'.join(map(str, run.parts))} layers", "leave out --pipeline-layout")
    converters, adapters = _CONVERTERS.get(run.workload.precision, ())[: 1 + experts], [*_adapters(run)]
    plain = config and backend == "standard" and not (converters or adapters or run.model.mtp_layers)
    given = {"moe_comm_backend": json.dumps(backend)} if experts else {}
    given |= {"num_mtp_layers": str(run.model.mtp_layers)} if run.model.mtp_layers else {}
    given |= {"converters": f"[{', '.join((*converters, *adapters))}]"} if converters or adapters else {}
    own = Template(_FLAVORED).substitute(
        module=module,
        flavor=json.dumps(flavor),
        what="adapters" if adapters else "a dispatcher and a number format",
        lora=_LORA if adapters else "",
        given="".join(f", {name}={value}" for name, value in given.items()),
        converters="".join(f", {one.partition('.')[0]}" for one in converters).lstrip(", "),
        compiled=run.framework.software == "compiled",
    )
    if not converters:
        own = own.replace("from torchtitan.components.quantization import \n", "")
    written = {title: [*settings(names, _values(run), run.framework.name)] for title, names in _WRITTEN.items()}
    named = (Argument("--module", module), Argument("--config", config))
    own_named = (Argument("--module", "__main__"), Argument("--config", "own"))
    return Command(
        release="torchtitan 0.3.0",
        program=("-m", "torchtitan.train") if plain else ("{file:_model.py}",),
        sections=(
            Section("model", named if plain else own_named),
            *(Section(title, tuple(starmap(_argument, made))) for title, made in written.items()),
            Section("recompute", (Argument(f"activation-checkpoint:{run.recompute}"),), last=True),
        ),
        environment=(EXPANDABLE_SEGMENTS,),
        files={} if plain else {"_model.py": own},
        checks=(_checkout("0.3.0"), *_packages(converters, backend)),
        needs=(
            "Start it in a checkout of pytorch/torchtitan, release 0.3.0, whose tests/assets has tokenizer and text.",
            *(["Its converters need torchao."] if converters else []),
            *(["Its exchange of tokens needs DeepEP, as the Python module deep_ep."] if "ep" in backend else []),
            "For real training replace c4_test and its tokenizer, and add --checkpoint.enable.",
        ),
        notes=tuple(_notes(run)),
    )


def _argument(path: str, value: Plain, why: str) -> Argument:
    """A key as an argument; a switch that is off is `no-`."""
    section, _, name = path.rpartition(".")
    off = "no-" if value is False else ""
    return Argument(f"--{section}{'.' * bool(section)}{off}{name}", None if isinstance(value, bool) else value, why)


def _checkout(release: str) -> Check:
    """The checkout of a release, or that release as a package."""
    installed = "from importlib.metadata import version as v; print(v('torchtitan'))"
    prints = ("cat assets/version.txt", f'inside python3 -c "{installed}"')
    return of_checkout("torchtitan/train.py", f"pytorch/torchtitan at v{release}", release=release, prints=prints)


def _packages(converters: Sequence[str], backend: str) -> Iterator[Check]:
    """What converters and the exchange of tokens import."""
    if converters:
        yield of_package("torchao", "torchao")
    if backend in ("deepep", "hybridep"):
        yield of_package("deep_ep", f"{backend} of deepseek-ai/DeepEP")


def _older(command: Command, run: Run, flavor: str, keys: Sequence[tuple[str, Plain, str]]) -> Command:
    """The same for 0.2.2, the last release that reads TOML, with its keys as sections."""
    found: dict[str, list[str]] = {"model": ['name = "llama3"', f'flavor = "{flavor}"']}
    for path, value, _ in keys:
        section, _, name = _OLDER.get(path, path).rpartition(".")
        if name:
            found.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    if run.size("pipeline") > 1 and _split_keys(run) is None:
        parts = json.dumps(_modules(run, head="output"))
        found["parallelism"].append(f"module_fqns_per_model_part = {parts}")
    found["activation_checkpoint"] = [f'mode = "{run.recompute}"', 'selective_ac_option = "op"']
    return replace(
        command,
        release="torchtitan 0.2.2",
        program=("-m", "torchtitan.train"),
        checks=(_checkout("0.2.2"),),
        sections=(Section("config", (Argument("--job.config_file", "{file:.toml}"),)),),
        files={".toml": "\n\n".join("\n".join([f"[{section}]", *lines]) for section, lines in found.items()) + "\n"},
        needs=("Start it in a checkout of pytorch/torchtitan at v0.2.2, whose tests/assets has tokenizer and text.",),
        notes=tuple(note for note in command.notes if note != _DOCUMENTS),
    )


def _check(run: Run) -> None:
    """UsageError for what torchtitan's own checks would stop at, and for what none of its keys says."""
    settable = (
        "sequence_parallel",
        "cuda_graphs",
        "dispatcher",
        "imbalance",
        "loss_chunks",
        "offloaded",
        "pipeline_order",
    )
    run.check(settable=settable, precisions=(*_PRECISIONS, *run.framework.formats), parts=_PARTS)
    if run.workload.precision in run.framework.older_formats:
        raise run.cannot(f"{run.workload.precision} (of 0.2 and before)", "ask for --precision fp8-rowwise")
    scopes = run.step.cuda_graphs
    if scopes and (scopes != ("full_iteration",) or run.size("pipeline") > 1):
        raise run.cannot(f"CUDA graphs of {', '.join(scopes)}", "it captures full_iteration, without stages")
    model, stages, tensor, context = run.model, run.size("pipeline"), run.size("x"), run.size("context")
    if (not model.gated or model.biases) and not model.has_experts:
        what = "biases" if model.gated else "a GPT's LayerNorm, GELU and learned positions"
        raise run.cannot(what, "ask for a Llama-shaped model without biases, or for --framework megatron-core")
    if model.tied_embeddings and stages > 1:
        raise run.cannot("pipeline stages of a model with a tied embedding", "ask for --pipeline 1")
    if (run.chunks == 1 or run.step.splits_backward) and run.accumulation < stages:
        what = f"{run.step.pipeline_order} with fewer micro-batches ({run.accumulation}) than stages ({stages})"
        raise run.cannot(what, "ask for fewer stages, a smaller --micro-batch or --z, or a larger --batch")
    if run.step.splits_backward:
        _check_order(run)
    length, shards = run.workload.sequence_length, 2 * context if context > 1 else 1
    shards *= tensor if run.step.sequence_parallel else 1
    if length % shards:
        raise run.cannot(f"a sequence of {length}, which is not divisible by {shards}", "ask for another --seq")
    _resharding(run)


def _check_order(run: Run) -> None:
    """UsageError for what torch's schedules with split backward passes do not run, or repeat for each weight."""
    order, least = run.step.pipeline_order, run.size("pipeline") * (1 + (run.step.pipeline_order == "dualpipe-v"))
    if order not in _SCHEDULES or run.framework.software == "compiled":
        raise run.cannot(f"the schedule {order}", "ask for --pipeline-schedule 1f1b")
    if run.recompute != "none":
        raise run.cannot(f"{order} with recompute {run.recompute}", "ask for --recompute none")
    if run.chunks != 2 and (order in FOLDED or run.chunks < 2):
        raise run.cannot(f"{order} with {run.chunks} chunks a stage", "ask for 2")
    if run.accumulation < least:
        raise run.cannot(f"{order} with fewer micro-batches ({run.accumulation}) than {least}", "ask for more")


def _resharding(run: Run) -> str:
    """`always` or `never`, by the layers that are not resharded after forward."""
    sharded = run.size("z") * run.size("context") > 1
    # Blocks of the largest stage: layers not resharded are counted per stage.
    blocks = max(sum(run.parts[stage :: run.size("pipeline")]) for stage in range(run.size("pipeline")))
    if sharded and 0 < run.kept_layers < blocks:
        what = f"{run.kept_layers} of {blocks} layers that are not resharded after forward"
        raise run.cannot(what, f"ask for --kept-layers 0 or {blocks}")
    return "never" if sharded and run.kept_layers else "always"


def _values(run: Run) -> dict[str, Value]:
    """Values of keys that are none of the run's fields; micro-batches of a pipeline are one accumulation step."""
    micro_batch, staged = run.micro_batch, run.size("pipeline") > 1
    local = Because(micro_batch, "the micro-batch")
    if staged:
        local = Because(micro_batch * run.accumulation, f"{run.accumulation} micro-batches of {micro_batch}")
    graphs = "they exclude pipeline stages" if staged else "the runs behind the prediction had none"
    captured = bool(run.step.cuda_graphs)
    found: dict[str, Value] = {
        **run.fields,
        "replicas": run.size("data"),
        "local_batch_size": local,
        "pipeline_parallel_microbatch_size": micro_batch if staged else None,
        "enable_sequence_parallel": None if run.step.sequence_parallel else False,
        "fsdp_reshard_after_forward": _resharding(run),
        "expert_parallel_degree": run.size("expert") if run.model.has_experts else None,
        "loss.num_chunks": run.step.loss_chunks if run.step.loss_chunks > 1 else Because(1, _WHOLE_LOGITS),
        "mixed_precision_param": _PRECISIONS[run.workload.base_precision],
        "mixed_precision_reduce": "float32",
        "compile.enable": run.framework.software == "compiled",
        "enable_cpu_offload": offloads(run) or None,
        "disable_cuda_graphs": False if captured else Because(True, graphs),
        # A short run on data that a checkout has.
        **{"steps": Because(TRIAL_STEPS, WARM_UP), "log_freq": 1, "enable_profiling": False, "dataset": "c4_test"},
        "hf_assets_path": "./tests/assets/tokenizer",
    }
    plain = "Interleaved1F1B" if run.chunks > 1 else "1F1B"
    found["pipeline_parallel_schedule"] = _SCHEDULES.get(run.step.pipeline_order, plain) if staged else None
    return found | (_split_keys(run) or {} if staged else {})


def _split_keys(run: Run) -> dict[str, Value] | None:
    """Keys that give every model part as many blocks as were priced; None where no keys do.

    torchtitan counts the embedding and the LM head as some layers, splits evenly, and the first parts get one more
    (distributed/pipeline_parallel.py). Looped schedules have two parts a stage; for more, it divides by the layers of
    a part, rounded up.
    """
    count, named = len(run.parts), run.chunks > 2
    for first, last in ((0, 0), (1, 0), (0, 1), (1, 1)):
        total = run.model.layers + first + last
        each, left = divmod(total, count)
        counts = [each + (part < left) for part in range(count)]
        counts[0] -= first
        counts[-1] -= last
        longest = -(-total // count)
        reached = not named or -(-total // longest) == count
        if tuple(counts) == run.parts and max(first, last) <= each and reached:
            return {"first_less": first, "last_less": last, "layers_per_chunk": longest if named else None}
    return None


def _modules(run: Run, *, head: str) -> list[list[str]]:
    """Names of the modules of each model part."""
    found, block = list[list[str]](), 0
    for count in run.parts:
        found.append([f"layers.{number}" for number in range(block, block + count)])
        block += count
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", head]
    return found


def _sizes(model: Model) -> tuple[float, ...]:
    """What `_CONFIGS` has of a model; its rotary base and norm epsilon, too, where they are none of theirs."""
    own = (model.rotary_base or _ROTARY_BASE, model.norm_epsilon or _NORM_EPSILON)
    others = () if own == (_ROTARY_BASE, _NORM_EPSILON) else own
    sizes = (model.layers, model.hidden, model.heads, model.kv_heads, model.head_dim, model.ffn, model.vocab)
    return (*sizes, model.tied_embeddings, *others)


def _shipped(run: Run) -> str:
    """The shipped config with the model's sizes, "" where the model needs its own module."""
    if run.workload.sequence_length > _LONGEST or (run.size("pipeline") > 1 and _split_keys(run) is None):
        return ""
    return next((name for name, sizes in _CONFIGS.items() if sizes == _sizes(run.model)), "")


def _module(run: Run) -> str:
    """A module with a config function for the model's sizes; it starts torchtitan.train, which finds it as `__main__`.

    Source: torchtitan 0.3.0, models/llama3, whose modules it uses.
    """
    model = run.model
    split = _modules(run, head="lm_head") if run.size("pipeline") > 1 and _split_keys(run) is None else None
    return Template(_MODULE).substitute(
        run.fields,
        name=json.dumps(model.name),
        theta=f"{model.rotary_base or _ROTARY_BASE:.12g}",
        epsilon="" if model.norm_epsilon is None else f", eps={model.norm_epsilon:g}",
        split="None" if split is None else "[\n" + "".join(f"    {json.dumps(part)},\n" for part in split) + "]",
    )


_FLAVORED = '''"""A model of torchtitan 0.3.0 with $what of its own."""

${lora}from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.quantization import $converters
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.$module import model_registry
from torchtitan.train import main
from torchtitan.trainer import Trainer

COMPILED = $compiled


def own():
    """What --config names."""
    spec = model_registry($flavor$given)
    loss = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)
    return Trainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=loss),
        optimizer=default_adamw(lr=3e-4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
    )


if __name__ == "__main__":
    main()
'''

_MODULE = '''"""A model of its own sizes for torchtitan 0.3.0, and its blocks by pipeline stage."""

from dataclasses import replace
from functools import partial

from torch import nn
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.train import main
from torchtitan.trainer import Trainer

NAME = $name
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = $layers, $hidden, $heads, $kv_heads, $head_dim
FFN, VOCAB, TIED, POSITIONS = $ffn, $vocab, $tied, $max_position_embeddings
PARTS = $split

WEIGHTS = {"weight": partial(nn.init.trunc_normal_, std=0.02)}
ONES = {"weight": nn.init.ones_}


def norm():
    return RMSNorm.Config(normalized_shape=HIDDEN$epsilon, param_init=ONES)


def block():
    rope = ComplexRoPE.Config(dim=HEAD_DIM, max_seq_len=POSITIONS, theta=$theta)
    return Llama3TransformerBlock.Config(
        attention_norm=norm(),
        ffn_norm=norm(),
        attention=make_gqa_config(
            dim=HIDDEN,
            n_heads=HEADS,
            n_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            wqkv_param_init=WEIGHTS,
            wo_param_init=WEIGHTS,
            inner_attention=get_attention_config("flex"),
            fuse_qkv=True,
            rope=rope,
        ),
        feed_forward=make_ffn_config(dim=HIDDEN, hidden_dim=FFN, w1_param_init=WEIGHTS, w2w3_param_init=WEIGHTS),
    )


def model():
    return Llama3Model.Config(
        dim=HIDDEN,
        vocab_size=VOCAB,
        enable_weight_tying=TIED,
        tok_embeddings=Embedding.Config(num_embeddings=VOCAB, embedding_dim=HIDDEN, param_init=WEIGHTS),
        norm=norm(),
        lm_head=Linear.Config(in_features=HIDDEN, out_features=VOCAB, param_init=WEIGHTS),
        layers=[block() for _ in range(LAYERS)],
    )


def own():
    """What --config names."""
    return Trainer.Config(
        model_spec=replace(model_registry("8B"), flavor=NAME, model=model()),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=VOCAB)),
        optimizer=default_adamw(lr=3e-4),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4_test"),
        parallelism=ParallelismConfig(module_fqns_per_model_part=PARTS),
    )


if __name__ == "__main__":
    main()
'''

_WHOLE_LOGITS = "logits whole, as in 0.2; the default, 8, needs less memory"
_DOCUMENTS = "Attention stops at the ends of documents: it is faster than predicted where they are short."


def _notes(run: Run) -> Iterator[str]:
    yield _DOCUMENTS
    if run.model.qkv_biases:
        yield NO_QKV_BIASES
    if run.size("pipeline") > 1:
        yield "With stages, gradients are reduced with the last micro-batch alone; the prediction has it in each."
    if run.recompute == "selective":
        yield "Selective recompute keeps outputs of attention and of every second GEMM."


TORCHTITAN = Framework(
    name="torchtitan",
    title="torchtitan",
    axes=("x", "context", "z", "data", "pipeline"),
    source="torchtitan 0.3.0",
    measured_on="steps of pytorch/torchtitan on 8 to 128 H100",
    step=replace(
        STEP,
        sequence_parallel=True,
        saves_original=True,
        narrow_gathers=True,
        fused_quantization=True,
        shard_gradient_bytes=4,
        context_shards=True,
        context_exchange="all_gather",
        expert_shards=("x", "context", "z"),
        loss_reductions=(1.0, 1.0, 1.0),
        recompute_whole_block=True,
        selective=("attention.norm", "attention.output", "mlp.norm", "mlp.up", "mlp.activation"),
        selective_at_once=True,
        **WHOLE_MATRICES,
    ),
    optimizers={ADAMW: (), "muon": ()},
    schedule=PipelineSchedule(overlapped=True, scattered=False),
    attention_since="",
    software="compiled",
    tuner="torchtitan",
    offload=ON_HOST,
    expert_axes=("expert", "expert_tensor"),
    tensor_without_expert=True,
    dispatchers=("alltoall", "deepep", "hybridep"),
    packings=("packed",),
    formats=("fp8-rowwise", "fp8-current", "mxfp8"),
    older_formats=("fp8-current",),
    cuda_graphs={"full_iteration": (Refusal(("pipeline",), "torchtitan's CUDA graphs exclude pipeline stages"),)},
    names={
        "z": "dp_shard",
        "data": "dp_replicate",
        "x": "tp",
        "pipeline": "pp",
        "expert": "ep",
        "expert_tensor": "etp",
        "expert_z": "efsdp",
        "chunks": "vpp",
        "context": "cp",
    },
    logged=FlopCount(
        log="torchtitan",
        label="tflops",
        counts="the same as MFU, and norms as if they were weights",
        source="torchtitan 0.3.0, models/utils.py, get_dense_model_nparams_and_flops",
        weights="parameters",
    ),
    launch=launch,
)

TORCHTITAN_EAGER = replace(
    TORCHTITAN.with_step(fused_norms=False, fused_quantization=False, loss="eager"),
    name="torchtitan-eager",
    title="torchtitan (eager)",
    software="torchtitan-eager",
    # Torch refuses to split backward passes of compiled blocks.
    schedule=replace(TORCHTITAN.schedule, orders=("1f1b", *_SCHEDULES), zb1p_chunks=(2, LARGEST_SIZE), autograd=True),
)

FRAMEWORKS = (TORCHTITAN, TORCHTITAN_EAGER)
