"""Every command's help ends in examples, and they work: the cheap ones are run, all others at least understood.

The files of docs/examples are held to the same.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml

from axonn_tune.cli.main import cli, main
from tests.cli.running import good
from tests.unit.learning.test_reading import EIGHT, MODEL, rows
from tests.unit.learning.test_training_logs import torchtitan

ROOT = Path(__file__).parents[2]
FILES = ROOT / "docs" / "examples"
# What takes minutes, ranks, a lab, plotly, or a file that one of those writes; whose exit code judges what it read.
ONLY_PARSED = {"calibrate", "run", "lab", "validate", "export", "report", "diagnose"}
WRITTEN_BY_THEM = {"traced", "measured.yaml"}
HUGGING_FACE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 1376,
    "vocab_size": 1024,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class Example:
    """One line of examples, without the tool's name and what starts it; `where` it stands."""

    where: str
    words: tuple[str, ...]

    @property
    def runs(self) -> bool:
        """Whether it is cheap, and needs nothing but what a test can write."""
        needed = {word.partition("=")[2] or word for word in self.words}
        return self.words[0] not in ONLY_PARSED and not needed & WRITTEN_BY_THEM


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command that does something, with the words that lead to it."""
    if not isinstance(command, click.Group):
        yield path, command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        child = command.get_command(context, name)
        assert child is not None
        if not child.hidden:
            yield from leaves(child, (*path, name))


def examples_in(text: str, where: str) -> list[Example]:
    """The lines of a help text below `Example` or `Examples`."""
    _, _, listed = text.partition("Example")
    found = re.findall(r"^\s+(?:srun |torchrun .*)?axonn-tune (.*)$", listed, flags=re.MULTILINE)
    return [Example(where, tuple(shlex.split(line))) for line in found]


def help_of(path: tuple[str, ...], command: click.Command) -> str:
    """What --help prints, not wrapped."""
    return command.get_help(click.Context(command, info_name=" ".join(path), max_content_width=200, terminal_width=200))


LEAVES = list(leaves(cli))
EXAMPLES = [one for path, command in LEAVES for one in examples_in(help_of(path, command), " ".join(path))]
EXAMPLES += examples_in(help_of((), cli), "axonn-tune")


def commands_of(script: str) -> list[tuple[str, ...]]:
    """Every call of the tool in a shell script, whatever stands before it; variables stay as they are."""
    joined = script.replace("\\\n", " ").replace('"$axonn_tune"', "axonn-tune")
    calls = re.findall(r"(?:^|\s)axonn-tune ([a-z-].*)$", joined, flags=re.MULTILINE)
    return [tuple(shlex.split(call, comments=True)) for call in calls]


def understood(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of a command line whose command does nothing: 2 if it does not exist or an option is wrong."""
    for _, command in LEAVES:
        monkeypatch.setattr(command, "callback", lambda *arguments, **options: None)
    return main(list(words))


OURS = "schema: axonn-tune/machine/1\nname: ours\nextends: dgx-h100\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What examples read."""
    folder = tmp_path_factory.mktemp("files")
    good(f"--gpus 2 --model nano --machine localhost --precision fp32 -o {folder}/launch.yaml")
    good(f"regress {folder}/baseline.yaml --record --gpus 8 --model 5b --top 2 --reason first")
    (folder / "config.json").write_text(json.dumps(HUGGING_FACE), encoding="utf-8")
    good(f"models import {folder}/config.json -o {folder}/mymodel.yaml")
    wide = torchtitan(5762, {"dp_shard": 8, "local": 2, "gbs": 16, "seq": 8192})
    (folder / "slurm-1234.out").write_text("\n".join(wide), encoding="utf-8")
    (folder / "slurm-1234.yaml").write_text("".join(f"{name}: {size}\n" for name, size in MODEL.items()), "utf-8")
    (folder / "all_reduce.txt").write_text(EIGHT, encoding="utf-8")
    rows(folder)
    for name in ("run.sh", "pretrain.sh"):
        shutil.copy(ROOT / "tests" / "fixtures" / "commands" / "gpt-one-line.sh", folder / name)
    (folder / "ours.yaml").write_text(OURS, encoding="utf-8")
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("Call me Ishmael.", encoding="utf-8")
    return folder


@pytest.mark.parametrize(("path", "command"), LEAVES, ids=[" ".join(path) for path, _ in LEAVES])
def test_every_command_has_an_example_of_itself(path: tuple[str, ...], command: click.Command) -> None:
    """Guards `--help`: a command line to copy, of this very command."""
    found = examples_in(help_of(path, command), " ".join(path))
    own = [one for one in found if one.words[: len(path)] == path or (path == ("search",) and one.words[0] == "--gpus")]
    assert own


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda one: f"{one.where}: {' '.join(one.words)[:50]}")
def test_examples_are_understood(example: Example, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards names of commands and options, and values of choices, also of what cannot be run here."""
    assert understood(example.words, monkeypatch) == 0


@pytest.mark.parametrize(
    "example", [one for one in EXAMPLES if one.runs], ids=lambda one: f"{one.where}: {' '.join(one.words)[:50]}"
)
def test_examples_run(example: Example, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what a newcomer copies first."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert main(list(example.words)) == 0


def test_commands_of_the_workflow_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards docs/examples/github-regress.yml: YAML that reads, command lines that are understood, no package index."""
    workflow = yaml.safe_load((FILES / "github-regress.yml").read_text("utf-8"))
    assert workflow["env"]["AXONN_TUNE"].startswith("git+https://")
    scripts = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    assert all("@ $AXONN_TUNE" in script for script in scripts if "pip install" in script)
    calls = [call for script in scripts for call in commands_of(script)]
    assert {call[0] for call in calls} == {"regress", "lab", "validate"}
    for call in calls:
        assert understood(call, monkeypatch) == 0, call
    (inner,) = [call[call.index("axonn-tune") + 1 :] for call in calls if "axonn-tune" in call]
    assert inner[0] == "calibrate"
    assert understood(inner, monkeypatch) == 0
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_commands_of_the_batch_script_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards docs/examples/slurm-regress.sbatch: a script that bash reads, and command lines that are understood."""
    path = FILES / "slurm-regress.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    calls = commands_of(path.read_text("utf-8").replace('--gpus "$SLURM_NTASKS"', "--gpus 16"))
    assert [call[0] for call in calls] == ["validate", "regress", "regress"]
    for call in calls:
        assert understood(call, monkeypatch) == 0, call


@pytest.mark.parametrize("path", sorted(FILES.iterdir()), ids=lambda path: path.name)
def test_examples_are_documented(path: Path) -> None:
    """Guards that nobody misses them: a page links to each."""
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert f"(examples/{path.name})" in pages
