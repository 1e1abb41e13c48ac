"""Options by the names of training frameworks: `tp`, `dp_shard`, `tensor_model_parallel_size`.

`Framework.names` has the short names of a framework's axes. Here are the long ones, which are options of the
framework's own command line, and names of batch and sequence that frameworks share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework, registry
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.specs.document import LARGEST_SIZE

SHARED = {
    "mbs": "micro_batch",
    "micro_batch_size": "micro_batch",
    "gbs": "batch",
    "global_batch_size": "batch",
    "seq_len": "seq",
    "seq_length": "seq",
}
"""Common names of options that are not axes, and ours."""

WEIGHT_SHARDS = "tensor_parallel_num_weight_shards"
"""Megatron-Core's option of GTP, whose value is TP times GTP."""

LONG = {
    "tensor_model_parallel_size": "TP",
    WEIGHT_SHARDS: "GTP",
    "pipeline_model_parallel_size": "PP",
    "num_virtual_stages_per_pipeline_rank": "VPP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "data_parallel_size": "DP",
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp",
    "data_parallel_shard_degree": "dp_shard",
    "data_parallel_replicate_degree": "dp_replicate",
    "row_tensor_model_parallel_size": "row",
    "column_tensor_model_parallel_size": "column",
    "depth_tensor_model_parallel_size": "depth",
}
"""Options of a framework's command line that set an axis, and its short name there."""


_NODES = "nodes are not counted: --gpus N is the number of GPUs of all nodes, and the machine says how many a node has"
_PER_NODE = "GPUs of a node belong to the machine: --set machine.launcher.ranks_per_node=N"
_GPUS = "the number of GPUs is --gpus N"
_ZERO = (
    "ZeRO-1 is --shard-optimizer, ZeRO-3 (FSDP) is axis z: --z N; --framework deepspeed ranks DeepSpeed's layouts, "
    "which --zero3 N and --dp N pin"
)
_EXPERTS = "mixtures of experts are not modelled"
_SEQUENCE = "sequence parallelism is part of a framework's step: --framework megatron-core has it"
_RECOMPUTE = "activation recomputation is --recompute selective or --recompute full"
_MODEL = "sizes of the model are changed by --set, such as --set model.hidden=8192, or stand in a file that extends one"
ADVICE = {
    "fsdp": "sharded weights (FSDP, ZeRO-3) are axis z: --z N; --framework fsdp ranks PyTorch's layouts, --framework "
    "torchtitan torchtitan's",
    **dict.fromkeys(("zero", "zero_stage", "stage", "zero1", "zero2"), _ZERO),
    **dict.fromkeys(("nodes", "nnodes", "num_nodes", "n_nodes"), _NODES),
    **dict.fromkeys(("gpus_per_node", "nproc_per_node", "ntasks_per_node", "ranks_per_node"), _PER_NODE),
    **dict.fromkeys(("num_gpus", "n_gpus", "ngpus", "world_size", "world", "ranks"), _GPUS),
    **dict.fromkeys(("ep", "expert_model_parallel_size", "expert_parallel_degree", "num_experts"), _EXPERTS),
    **dict.fromkeys(("sp", "sequence_parallel"), _SEQUENCE),
    **dict.fromkeys(("hidden_size", "num_layers", "num_attention_heads", "ffn_hidden_size", "vocab_size"), _MODEL),
    **{name: f"the number format is --precision {name}" for name in ("bf16", "fp16", "fp32")},
    "dtype": "the number format is --precision bf16, fp16 or fp32",
    "fp8": "fp8 is not modelled; --precision takes bf16, fp16, fp32 and fp64",
    **dict.fromkeys(("grid", "mesh", "layout"), "each axis has an option: --x N --y N --z N --data N"),
    **dict.fromkeys(("recompute_activations", "recompute_granularity", "activation_checkpoint.mode"), _RECOMPUTE),
    "local_batch_size": "torchtitan's local batch is the micro-batch of a layout without stages: --micro-batch N",
    **dict.fromkeys(("model.name", "model.flavor"), "the model is --model NAME, such as llama3-70b"),
    "job.config_file": "explain and compare read a config file by --from-command FILE",
}
"""Answers to options of other tools that have no axis here."""


def is_known(name: str) -> bool:
    """Whether some framework has an option of this name; underscores for hyphens."""
    return name in SHARED or bool(_owners(name))


def our_options(given: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Options by the names of the framework asked for, under our names: `{"tp": 8}` is `{"x": 8}`.

    given: options that are none of ours, values as numbers or as text; others: those that are, `framework` among them.
    UsageError for a name of another framework, with what it is called in this one, for one option by two names, and
    for text that is no size.
    """
    asked = others.get("framework")
    framework, found = AXONN_TUNE if asked is None else find_framework(asked), dict[str, Any]()
    called: dict[str, str] = {}
    for name, value in given.items():
        ours = SHARED.get(name) or _axis(framework, name)
        if ours is None:
            raise UsageError(_elsewhere(name, value, framework, asked=asked is not None))
        if ours in called or others.get(ours) is not None:
            other = called.get(ours, ours)
            raise UsageError(f"{option(name)} and {option(other)} are two names of one option: give one")
        called[ours] = name
        found[ours] = value if name in SHARED else _size(name, value)
    if called.get("z") == WEIGHT_SHARDS:
        found["z"] = _gtp(found["z"], found.get("x", others.get("x")))
    return found


def option(name: str) -> str:
    """A name as the command line has it."""
    return f"--{name.replace('_', '-')}"


def _axis(framework: Framework, name: str) -> str | None:
    """The axis, or `chunks`, that a framework calls so in its own words."""
    short = LONG.get(name, name)
    known = framework.names.values() if name in LONG else map(str.lower, framework.names.values())
    return framework.axis(short) if short in known else None


def _owners(name: str) -> list[Framework]:
    """Frameworks that call one and the same axis so, one for each set of names, the set that most have first."""
    alike: dict[tuple[str, ...], list[Framework]] = {}
    for one in registry().values():
        if _axis(one, name):
            alike.setdefault(tuple(one.names.values()), []).append(one)
    found = [several[0] for several in sorted(alike.values(), key=len, reverse=True)]
    return [one for one in found if _axis(one, name) == _axis(found[0], name)]


def _elsewhere(name: str, value: object, framework: Framework, *, asked: bool) -> str:
    """Error text for a name of other frameworks, with this one's name."""
    owners = _owners(name)
    axis = _axis(owners[0], name) or ""
    titles = [f"{one.title}'s" for one in owners]
    whose = " and ".join(filter(None, (", ".join(titles[:-1]), titles[-1])))
    what, elsewhere = "chunks a stage" if axis == "chunks" else f"axis {axis}", f"--framework {owners[0].name}"
    if axis not in framework.columns:
        has = ", ".join(map(framework.called, framework.columns))
        advice = "" if asked else f"; give {elsewhere}"
        return f"{option(name)} is {whose} name of {what}, which {framework.title} does not have; it has {has}{advice}"
    if framework.names:
        here = f"what {framework.title} calls {framework.called(axis)}"
        return f"{option(name)} is {whose} name of {here}: {framework.option(axis)} N"
    return f"{option(name)} is {whose} name of {what}: {framework.option(axis)} {value or 'N'}, or {elsewhere}"


def _size(name: str, value: Any) -> Any:  # noqa: ANN401 - a number, or text of one
    """A size as a number; what is no text is left to those who take it."""
    if isinstance(value, str) and not (value.isascii() and value.isdecimal() and 0 < int(value[:12]) <= LARGEST_SIZE):
        raise UsageError(f"{option(name)} needs a whole number from 1 to {LARGEST_SIZE:,}, got {value!r}")
    return int(value) if isinstance(value, str) else value


def _gtp(shards: int, tensor: object) -> int:
    """GTP of so many weight shards."""
    if tensor is None:
        raise UsageError(f"{option(WEIGHT_SHARDS)} {shards} is TP times GTP: give --tp too, or --gtp N instead")
    size = _size("tp", tensor)
    if shards % size:
        raise UsageError(f"{option(WEIGHT_SHARDS)} {shards} is TP times GTP, and not divisible by TP = {size}")
    return int(shards // size)
