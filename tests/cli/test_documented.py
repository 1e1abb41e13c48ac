"""What documentation and help show, run: each command of README, docs and --help once, in this process."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from axonn_tune.cli.main import cli, main
from tests.cli.running import good, run
from tests.golden.golden import commands
from tests.nightly import params
from tools import outputs, reference

pytestmark = pytest.mark.usefixtures("shared_searches")
ROOT = Path(__file__).parents[2]
DOCS, FIXTURES = ROOT / "docs", ROOT / "tests" / "fixtures"
TUTORIAL = DOCS / "tutorial.md"
PAGES = [ROOT / "README.md", *sorted(page for page in DOCS.glob("*.md") if page != TUTORIAL)]
# What the tutorial takes its time for, and as little of it as shows that the command works.
SHORTER = {
    "--budget 20s": "--budget 1s",
    "--steps 25": "--steps 4",
    "--top 2 --repeats 2": "--top 1 --repeats 1 --steps 4",
}
# What the golden outputs and the pages in a browser run.
ELSEWHERE = {
    *commands().values(),
    "validate --published --html published.html",
    "accuracy --html published.html",
    "accuracy --worst 5 --html accuracy.html",
}
# Commands whose examples in --help take ranks, a lab or minutes; whose exit code judges what it reads.
ONLY_PARSED = {"calibrate", "compare", "run", "lab", "validate", "export", "report", "diagnose"}
WRITTEN_BY_THEM = {"traced", "measured.yaml", "train.sh"}

LONG_BLOCKS = (
    *("compare.md-0", "frameworks.md-1", "frameworks.md-2", "report.md-0", "report.md-1", "faq.md-3", "index.md-0"),
    *("llama3-70b.md-0", "gtp-size.md-0", "qwen3-235b-2t.md-0", "qwen3-235b-2t.md-1", "learn.md-0"),
)
LONG_EXAMPLES = (
    "--gpus 256 --model deepseek-v3 --machine dgx-h100 --framework megatron-core",
    "sweep --gpus 128 --model mixtral-8x22b --machine dgx-h100 --framework megatron-core --over ep",
    "explain --from-command run.sh --machine dgx-h100",
    "sweep --gpus 64..4096x2 --model 80b",
)
"""Blocks of pages and examples of help that take seconds, and so run nightly."""

Block = list[tuple[str, str]]
"""Lines of a console block, and what the page shows below each."""


def console_blocks(page: Path) -> list[Block]:
    """The commands of each console block of a page, in order."""
    blocks = re.findall(r"^```console\n(.*?)^```", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    parts = [re.split(r"^\$ ", block.replace("\\\n", " "), flags=re.MULTILINE)[1:] for block in blocks]
    return [[(line, output) for line, _, output in (one.partition("\n") for one in found)] for found in parts]


def new_blocks() -> Iterator[tuple[str, Block]]:
    """Blocks of all pages by name, without those whose every command is run already."""
    seen = {f"axonn-tune {line}" for line in ELSEWHERE}
    for page in PAGES:
        for number, block in enumerate(console_blocks(page)):
            lines = {line for line, _ in block}
            if not lines <= seen:
                yield f"{page.name}-{number}", block
            seen |= lines


def execute(block: Block) -> None:
    """Run the commands of a block in order in this folder; `cat` shows a file to write first."""
    for line, output in block:
        words = shlex.split(line, comments=True)[1:]
        if line.startswith("cat "):
            Path(*words).write_text(output, encoding="utf-8")
        elif line.startswith("axonn-tune"):
            finished = run("", words)
            assert finished.code == 0, f"{line}\n{finished.out}\n{finished.err}"


NEW_BLOCKS = dict(new_blocks())


@pytest.mark.parametrize("name", params(NEW_BLOCKS, LONG_BLOCKS))
def test_documented_commands_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the documentation: a block's commands run in order in one folder."""
    monkeypatch.chdir(tmp_path)
    execute(NEW_BLOCKS[name])


SHOWN = [
    pytest.param(one, id=str(one), marks=[pytest.mark.nightly] if one.slowly else [])
    for page in outputs.PAGES
    for one in outputs.shown_on(page)
]


@pytest.mark.parametrize("one", SHOWN)
def test_outputs_on_pages_are_those_of_today(one: outputs.Shown) -> None:
    """Guards figures on pages that a command printed: `python -m tools.outputs` writes them anew."""
    assert one.now() == one.shown


def test_blocks_that_show_a_command_are_all_guarded() -> None:
    """Guards against rankings on pages that nothing compares: each has the mark of its command above it."""
    for page in (one for one in outputs.PAGES if one.name != reference.PATH.name):
        text, guarded = page.read_text("utf-8"), {one.shown for one in outputs.shown_on(page)}
        blocks = re.findall(r"^```text\n.*?^```\n", text, flags=re.MULTILINE | re.DOTALL)
        assert not [block for block in blocks if "ranked by" in block and block not in guarded], page.name


@pytest.mark.nightly
def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards docs/tutorial.md from top to bottom in one folder, with less time to measure and fewer steps."""
    monkeypatch.chdir(tmp_path)
    blocks = console_blocks(TUTORIAL)
    lines = "\n".join(line for block in blocks for line, _ in block)
    assert all(words in lines for words in SHORTER)
    for block in blocks:
        for words, fewer in SHORTER.items():
            block = [(line.replace(words, fewer), output) for line, output in block]
        execute(block)
    left = {path.name for path in tmp_path.iterdir()}
    assert {"here.yaml", "launch.sbatch", "first-run", "measured.yaml", "regress.md", "predictions.xml"} <= left


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


LEAVES = list(leaves(cli))


def examples_of(path: tuple[str, ...], command: click.Command) -> list[tuple[str, ...]]:
    """Words of the examples below a command's help."""
    context = click.Context(command, info_name=" ".join(path), max_content_width=200, terminal_width=200)
    _, _, listed = command.get_help(context).partition("Example")
    found = re.findall(r"^\s+(?:srun |torchrun .*)?axonn-tune (.*)$", listed, flags=re.MULTILINE)
    return [tuple(shlex.split(line)) for line in found]


EXAMPLES = list(dict.fromkeys(one for path, command in [*LEAVES, ((), cli)] for one in examples_of(path, command)))


def commands_of(script: str) -> list[tuple[str, ...]]:
    """Every call of the tool in a shell script, whatever stands before it; variables stay as they are."""
    joined = script.replace("\\\n", " ").replace('"$axonn_tune"', "axonn-tune")
    calls = re.findall(r"(?:^|\s)axonn-tune ([a-z-].*)$", joined, flags=re.MULTILINE)
    return [tuple(shlex.split(call, comments=True)) for call in calls]


def shell_calls() -> Iterator[tuple[str, ...]]:
    """Calls of the pages' shell blocks, and of the files of docs/examples."""
    for page in (*PAGES, TUTORIAL):
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL):
            yield from commands_of(block)
    slurm = (DOCS / "examples" / "slurm-regress.sbatch").read_text("utf-8")
    yield from commands_of(slurm.replace('--gpus "$SLURM_NTASKS"', "--gpus 16"))
    workflow = yaml.safe_load((DOCS / "examples" / "github-regress.yml").read_text("utf-8"))
    for script in (step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        yield from commands_of(script)


def test_every_call_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what takes a lab, a cluster or minutes: each command exists, with each option and value of it."""
    for _, command in LEAVES:
        monkeypatch.setattr(command, "callback", lambda *arguments, **options: None)
    calls = [*shell_calls(), *EXAMPLES]
    assert len(calls) > 60
    assert not [call for call in calls if main(list(call)) != 0]
    lacking = [path for path, command in LEAVES if not examples_of(path, command)]
    assert not lacking, "help without a line to copy"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What examples of --help read."""
    folder, evidence = tmp_path_factory.mktemp("files"), FIXTURES / "evidence"
    good(f"--gpus 2 --model nano --machine localhost --precision fp32 -o {folder}/launch.yaml")
    good(f"regress {folder}/baseline.yaml --record --gpus 8 --model 5b --top 2 --reason first")
    sizes = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1376}
    config = {"model_type": "llama", **sizes, "vocab_size": 1024, "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "silu"}), encoding="utf-8")
    good(f"models import {folder}/config.json -o {folder}/mymodel.yaml")
    for name, source in {
        "slurm-1234.out": evidence / "titan.log",
        "slurm-1234.yaml": evidence / "titan.yaml",
        "all_reduce.txt": evidence / "nccl.txt",
        "steps.csv": evidence / "steps.csv",
        "run.sh": FIXTURES / "commands" / "gpt-one-line.sh",
        "pretrain.sh": FIXTURES / "commands" / "gpt-one-line.sh",
    }.items():
        shutil.copy(source, folder / name)
    for name in ("ours", "mine"):
        text = f"schema: axonn-tune/machine/1\nname: {name}\nextends: dgx-h100\n"
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "books").mkdir()
    (folder / "books" / "one.txt").write_text("Call me Ishmael.", encoding="utf-8")
    return folder


def runs(words: tuple[str, ...]) -> bool:
    """Whether an example is cheap, and needs nothing but what a test can write."""
    needed = {word.partition("=")[2] or word for word in words}
    return words[0] not in ONLY_PARSED and not needed & WRITTEN_BY_THEM and " ".join(words) not in ELSEWHERE


@pytest.mark.parametrize("words", params(filter(runs, EXAMPLES), LONG_EXAMPLES, name=" ".join))
def test_examples_of_help_run(
    words: tuple[str, ...], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards what a newcomer copies first."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    assert main(list(words)) == 0


def test_pages_have_what_is_generated() -> None:
    """Guards docs/cli.md, docs/files.md and docs/keys.md, and links to docs/examples."""
    assert isinstance(cli, click.Group)
    assert (DOCS / "cli.md").read_text("utf-8") == reference.render(cli), "run `make generate`"
    files = reference.FILES_PREAMBLE + reference.tables()
    assert (DOCS / "files.md").read_text("utf-8") == files, "run `make generate`"
    assert (DOCS / "keys.md").read_text("utf-8") == reference.keys_page(), "run `make generate`"
    pages = "".join(page.read_text("utf-8") for page in DOCS.glob("*.md"))
    assert not [path.name for path in (DOCS / "examples").iterdir() if f"(examples/{path.name})" not in pages]


def test_the_example_of_a_launch_config_is_what_its_command_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards docs/launch.md: the command that the example names writes the example, on another day or version."""
    shown = (DOCS / "launch.md").read_text("utf-8").split("```yaml\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(reference.EXAMPLE)[1:]) == 0
    assert reference.EXAMPLE in shown
    changing = re.compile(r"^  (created|version): .*\n|(?<=^# Written by axonn-tune )\S+:", flags=re.MULTILINE)
    written = changing.sub("", Path("launch.yaml").read_text("utf-8"))
    assert changing.sub("", shown) == written, "run `make generate`"
