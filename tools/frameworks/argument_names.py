"""Record the names of the arguments that frameworks have, from their sources: nothing of them is imported.

python -m tools.frameworks.argument_names FOLDER    # wheels and sdists of `PACKAGES`, unpacked, each in NAME-VERSION

Downloads, by `pip download --no-deps`: megatron-core==0.19.2 (for Python 3.12), torchtitan==0.3.0, torchtitan==0.2.2,
deepspeed==0.19.8, transformers==5.24.0, llamafactory==0.9.5, accelerate==1.15.0. Names are written to
tests/fixtures/arguments, one file a package; tests/unit/frameworks/test_arguments.py holds the tables of
axonn_tune/frameworks/arguments against them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.unit.frameworks.asked import ARGUMENT_NAMES


def main(words: Sequence[str]) -> int:
    """Write the names of every package; 2 where one is not there."""
    folder = Path(words[0]) if len(words) == 1 else Path()
    ARGUMENT_NAMES.mkdir(exist_ok=True)
    for package, reading in PACKAGES.items():
        if not (folder / package).is_dir():
            print(f"{folder / package} is not there: unpack it", file=sys.stderr)
            return 2
        names = sorted(set(reading(folder / package)))
        text = "\n".join([f"# {package} (PyPI)", *names, ""])
        (ARGUMENT_NAMES / f"{package}.txt").write_text(text, encoding="utf-8")
        print(f"{package}: {len(names)} names")
    return 0


def _classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Names and annotations of a data class."""
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            yield one.target.id, ast.unparse(one.annotation)


def megatron(folder: Path) -> Iterator[str]:
    """Options of `pretrain_gpt.py`, and fields of the config data classes, which Megatron-Bridge and NeMo set."""
    parser = (folder / "megatron/training/arguments.py").read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(parser)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            flags = (one.value for one in node.args if isinstance(one, ast.Constant))
            yield from (flag.lstrip("-") for flag in flags if isinstance(flag, str))
    wanted = {*re.findall(r"ArgumentGroupFactory\(\s*(\w+)", parser)}
    wanted |= {"ModelParallelConfig", "MLATransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"}
    for path in sorted((folder / "megatron").rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "dataclass" in text and any(f"class {name}" in text for name in wanted):
            for name, node in _classes(path).items():
                yield from (one for one, _ in _fields(node)) if name in wanted else ()
                yield from (flag.lstrip("-") for flag in _flags(node)) if name in wanted else ()


def _flags(node: ast.ClassDef) -> Iterator[str]:
    """Flags that a field names in its metadata."""
    for one in ast.walk(node):
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and re.fullmatch(r"--[\w-]+", one.value):
            yield one.value


_TITAN_CONFIGS = (
    *(("training", "config/configs.py", "TrainingConfig"), ("parallelism", "config/configs.py", "ParallelismConfig")),
    *(("compile", "config/configs.py", "CompileConfig"), ("comm", "config/configs.py", "CommConfig")),
    *(("debug", "config/configs.py", "DebugConfig"), ("override", "config/override.py", "OverrideConfig")),
)


def torchtitan(folder: Path) -> Iterator[str]:
    """`section.name` of 0.3.0's config classes, and those of components that a command line can set."""
    root = folder / "torchtitan"
    for section, path, name in _TITAN_CONFIGS:
        yield from (f"{section}.{field}" for field, _ in _fields(_classes(root / path)[name]))
    parts = {
        **{"trainer.py": "", "tools/profiler.py": "profiler", "components/metrics.py": "metrics"},
        **{"components/checkpointer.py": "checkpoint", "components/dataloader.py": "dataloader"},
        **{"components/optimizer.py": "optimizer", "components/loss.py": "loss", "components/validate.py": "validator"},
        **{"components/tokenizer.py": "tokenizer", "hf_datasets/text_datasets.py": "dataloader"},
        "distributed/activation_checkpoint.py": "activation_checkpoint",
        "components/quantization/float8.py": "float8",
        "components/quantization/mx.py": "mx",
        "components/lr_scheduler.py": "lr_scheduler",
    }
    for path, section in parts.items():
        if (root / path).is_file():
            for name, node in _classes(root / path).items():
                if name == "Config" or name.endswith(("Config", "AC")):
                    yield from (f"{section}.{field}".lstrip(".") for field, _ in _fields(node))


def torchtitan_toml(folder: Path) -> Iterator[str]:
    """Every `section.name` of 0.2.2's TOML."""
    classes = _classes(folder / "torchtitan/config/job_config.py")

    def below(name: str, before: str) -> Iterator[str]:
        for field, kind in _fields(classes[name]):
            if kind in classes:
                yield from below(kind, f"{before}{field}.")
            else:
                yield before + field

    yield from below("JobConfig", "")


_OF_DEEPSPEED = {
    "runtime/zero/config.py": "zero_optimization",
    "runtime/zero/offload_config.py": "zero_optimization.offload",
    "runtime/precision_config.py": "bf16",
    "profiling/config.py": "flops_profiler",
    "comm/config.py": "comms_logger",
    "monitor/config.py": "monitor",
    "runtime/swap_tensor/aio_config.py": "aio",
    "runtime/tensor_parallel/config.py": "tensor_parallel",
    "compile/config.py": "compile",
    "runtime/torch_autocast.py": "torch_autocast",
    "runtime/activation_checkpointing/config.py": "activation_checkpointing",
    "runtime/constants.py": "",
}
"""Modules with keys of the JSON, and the section of each."""


def deepspeed(folder: Path) -> Iterator[str]:
    """Keys of the JSON: fields of config models by section, and constants that name keys."""
    for path, section in _OF_DEEPSPEED.items():
        file = folder / "deepspeed" / path
        for name, node in _classes(file).items() if file.is_file() else ():
            own = "fp16" if "FP16" in name else section
            own = f"{section}_{'param' if 'Param' in name else 'optimizer'}" if section.endswith("offload") else own
            yield from (f"{own}.{field}" for field, _ in _fields(node) if "Config" in name)
        if path in ("runtime/constants.py", "runtime/activation_checkpointing/config.py"):
            for name, value in _constants(file):
                if re.fullmatch("[a-z][a-z0-9_]+", value) and not name.endswith(("_DEFAULT", "_FORMAT")):
                    yield f"{section}.{value}".lstrip(".")


def _constants(path: Path) -> Iterator[tuple[str, str]]:
    """Names of a module that are text."""
    for one in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
            yield from ((target.id, one.value.value) for target in one.targets if isinstance(target, ast.Name))


def transformers(folder: Path) -> Iterator[str]:
    """Fields of the Trainer's arguments."""
    classes = _classes(folder / "transformers/training_args.py")
    yield from (name for name, _ in _fields(classes["TrainingArguments"]))


def llamafactory(folder: Path) -> Iterator[str]:
    """Fields of LLaMA-Factory's arguments, of training alone."""
    for module in ("data_args", "finetuning_args", "model_args"):
        for node in _classes(folder / f"llamafactory/hparams/{module}.py").values():
            yield from (name for name, _ in _fields(node))


def accelerate(folder: Path) -> Iterator[str]:
    """Options of `accelerate launch`, which its configs have, too."""
    for node in ast.walk(ast.parse((folder / "accelerate/commands/launch.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            flags = (one.value for one in node.args if isinstance(one, ast.Constant))
            yield from (flag.lstrip("-") for flag in flags if isinstance(flag, str) and flag.startswith("--"))


PACKAGES: dict[str, Callable[[Path], Iterator[str]]] = {
    "megatron_core-0.19.2": megatron,
    "torchtitan-0.3.0": torchtitan,
    "torchtitan-0.2.2": torchtitan_toml,
    "deepspeed-0.19.8": deepspeed,
    "transformers-5.24.0": transformers,
    "llamafactory-0.9.5": llamafactory,
    "accelerate-1.15.0": accelerate,
}
"""Unpacked folders, and what reads the names."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
