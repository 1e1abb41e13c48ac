"""Inputs that nobody means well with: no exit code 1, no traceback, nothing that takes seconds or gigabytes.

Each input is drawn from its number alone, so a failure is repeated by that number. `make test` draws `COUNT`,
`make nightly` `NIGHTLY`, `make deep` `DEEP`; other numbers: `AXONN_TUNE_FUZZ=100 AXONN_TUNE_FUZZ_FROM=1234`,
and with `-s` what they took.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import click
import pytest
from yaml import safe_load

from axonn_tune.cli.main import cli
from axonn_tune.errors import UsageError
from axonn_tune.launch.host import already_started
from axonn_tune.runtime.start import rank_environment
from axonn_tune.specs.catalog import find
from axonn_tune.validation.published.rows import COLUMNS
from tests.cli.running import Finished, good, run

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
COMMANDS, EVIDENCE, LOGS, STORED = (FIXTURES / name for name in ("commands", "evidence", "logs", "v1"))
RUN = FIXTURES / "diagnose" / "lab"
TRAINERS = FIXTURES / "trainers" / "cases.yaml"
PUBLISHED = ROOT / "axonn_tune" / "validation" / "published"
COUNT, FIRST = int(os.environ.get("AXONN_TUNE_FUZZ", "48")), int(os.environ.get("AXONN_TUNE_FUZZ_FROM", "0"))
NIGHTLY, DEEP, BLOCK, LIMIT_S, LIMIT_KIB = 608, 2000, 16, 10, 1 << 20
BLOCKS = [
    *range(FIRST, FIRST + COUNT, BLOCK),
    *(pytest.param(block, marks=pytest.mark.nightly) for block in range(COUNT, NIGHTLY, BLOCK)),
    *(pytest.param(block, marks=pytest.mark.deep) for block in range(NIGHTLY, DEEP, BLOCK)),
]
CODES = {0, 2, 3, 4, 5, 6}

PLAIN = "0 -1 1 2 3 7 8 64 1.5 1e5 1e308 -1e308 1e-308 1e400 .inf -.inf .nan nan inf true null ~ '' [] {} on x é"
ODD = "2147483647 2147483648 9007199254740993 /dev/zero /etc/shadow ../../x .. / *a << | % \u202e"
WORDS = [
    *(*PLAIN.split(), *ODD.split()),
    *("[1, 2]", "{a: 1}", '"\\0"', '"\\e[31m"', "&a 1", "!!python/object:os.system 1", "y" * 300),
    *("1" + "0" * 30, "-" + "9" * 40, "0x" + "f" * 30, "9" * 5000),
]
PLACES = "a.yaml config.json link circle . .. /dev/full /dev/null /proc/kmsg no/x new"
VARIABLES = (
    "AXONN_TUNE_PATH XDG_CONFIG_HOME HOME COLUMNS LINES TERM NO_COLOR FORCE_COLOR LANG RANK WORLD_SIZE LOCAL_RANK "
    "SLURM_PROCID SLURM_NTASKS SLURM_LOCALID MASTER_PORT COMP_WORDS COMP_CWORD _AXONN_TUNE_COMPLETE AXONN_TUNE_DEBUG"
)


def words_of(chance: random.Random) -> str:
    """A value that is out of place, or just another one."""
    return chance.choice(WORDS) if chance.random() < 0.8 else str(chance.randrange(10 ** chance.randrange(1, 20)))


def changed_lines(text: str, chance: random.Random) -> str:
    """The text with some values, lines or characters changed."""
    lines = text.splitlines()
    for _ in range(chance.choice([1, 1, 1, 2, 3, 8])):
        number, how = chance.randrange(len(lines)), chance.randrange(8)
        if how < 4:
            # Numbers and words after a colon or a comma, or between spaces.
            parts = re.split(r"((?:[:,\[] ?|\s+))", lines[number])
            parts[chance.randrange(0, len(parts), 2)] = words_of(chance)
            lines[number] = "".join(parts)
        elif how == 4:
            del lines[number]
        elif how == 5:
            lines.insert(number, lines[chance.randrange(len(lines))])
        elif how == 6:
            lines[number] = lines[number][: chance.randrange(len(lines[number]) + 1)]
        else:
            place = chance.randrange(len(lines[number]) + 1)
            lines[number] = (
                lines[number][:place] + chr(chance.choice([0, 7, 27, 34, 58, 91, 123, 0xFFFF])) + lines[number][place:]
            )
        lines = lines or [""]
    return "\n".join(lines) + "\n" * chance.randrange(2)


def broken(content: bytes, chance: random.Random) -> bytes:
    """The text changed line by line, or its bytes."""
    how = chance.randrange(12)
    if how == 0:
        return chance.randbytes(chance.randrange(2000))
    if how == 1:
        return content[: chance.randrange(len(content))]
    if how == 2:
        return bytes(one ^ (chance.randrange(256) if chance.random() < 0.01 else 0) for one in content)
    if how == 3:
        deep = [b"[" * 5000, b"a: " * 60, b"- " * 5000, b"{" * 9000]
        return chance.choice([b"", b"\n", *deep, b"\xff\xfe\x00", b"null"])
    return changed_lines(content.decode(), chance).encode("utf-8", "surrogatepass")


def of_model(folder: Path, chance: random.Random) -> list[str]:
    """A model file, searched with or looked at."""
    text = find("model", chance.choice(["nano", "5b", "llama3-8b"])).read_bytes()
    if chance.random() < 0.3:
        text = b"schema: axonn-tune/model/1\nname: m\nsource: s\nextends: nano\nlayers: 3\nhidden: 64\nheads: 4\n"
    (folder / "m.yaml").write_bytes(broken(text, chance))
    return chance.choice(
        [["--gpus", "8", "--model", "m.yaml"], ["models", "show", "m.yaml"], ["models", "check", "m.yaml"]]
    )


def of_machine(folder: Path, chance: random.Random) -> list[str]:
    """A machine profile."""
    text = find("machine", chance.choice(["perlmutter", "dgx-h100", "frontier", "localhost"])).read_bytes()
    if chance.random() < 0.3:
        text = (STORED / "profile.yaml").read_bytes()
    (folder / "p.yaml").write_bytes(broken(text, chance))
    search = ["--gpus", "8", "--model", "5b", "--machine", "p.yaml", "--rank-by", "iteration"]
    return chance.choice([search, ["machines", "show", "p.yaml"], ["machines", "check", "p.yaml"]])


def of_launch(folder: Path, chance: random.Random) -> list[str]:
    """A launch config, explained, traced or reported."""
    (folder / "l.yaml").write_bytes(broken((STORED / "launch-2-ranks.yaml").read_bytes(), chance))
    return chance.choice(
        [["explain", "l.yaml"], ["trace", "l.yaml", "-o", "t.json"], ["report", "l.yaml", "-o", "r.html"]]
    )


def of_rows(folder: Path, chance: random.Random) -> list[str]:
    """Measured steps."""
    head, *rows = (PUBLISHED / "steps.csv").read_text("utf-8").splitlines()
    text = "\n".join([head, *chance.sample(rows, min(len(rows), 3))])
    (folder / "r.csv").write_bytes(broken(text.encode(), chance))
    return ["accuracy", "--rows", "r.csv"]


def of_results(folder: Path, chance: random.Random) -> list[str]:
    """Results that other commands have written."""
    name = chance.choice(["baseline.yaml", "measurement.yaml", "ranking-nano.json"])
    (folder / name).write_bytes(
        broken((STORED.with_name("v1" if name == "ranking-nano.json" else "v2") / name).read_bytes(), chance)
    )
    return ["regress", name] if name == "baseline.yaml" else ["report", name, "-o", "r.html"]


def of_log(folder: Path, chance: random.Random) -> list[str]:
    """A log of another benchmark, or of training in any format, learned from or diagnosed."""
    files = (path for place in (EVIDENCE, LOGS) for path in place.rglob("*") if path.is_file())
    logs = sorted(path for path in files if path.suffix not in (".py", ".pyc", ".md"))
    (folder / "a.log").write_bytes(broken(chance.choice(logs).read_bytes(), chance))
    sizes = ["--ranks", "8", "--nodes", "2"] if chance.random() < 0.5 else []
    return [*evidence("a.log", chance), *sizes]


def evidence(path: str, chance: random.Random) -> list[str]:
    """A command that reads evidence, with facts that may be none."""
    command = chance.choice([["learn", path, "-o", "learned.yaml"], ["diagnose", path]])
    facts = [f"{chance.choice(COLUMNS)}={words_of(chance)}" for _ in range(chance.choice([0, 0, 1, 2]))]
    stated = [word for fact in facts for word in ("--fact", fact)]
    return [*command, "--machine", "dgx-h100", "--model", "llama3-8b", *stated]


def of_trace(folder: Path, chance: random.Random) -> list[str]:
    """A trace of a profiler, packed or not."""
    content = broken((EVIDENCE / "trace.json").read_bytes(), chance)
    packed = chance.random() < 0.3
    content = gzip.compress(content) if packed else content
    (folder / "t.json").write_bytes(content[: chance.randrange(len(content) + 1)] if chance.random() < 0.1 else content)
    return evidence("t.json", chance)


def of_command(folder: Path, chance: random.Random) -> list[str]:
    """The script or config file of another framework, with what else it needs beside it."""
    files = [path for path in sorted(COMMANDS.iterdir()) if path.suffix != ".md"]
    for path in files:
        (folder / path.name).write_bytes(path.read_bytes())
    path = chance.choice(files)
    (folder / path.name).write_bytes(broken(path.read_bytes(), chance))
    sizes = ["--gpus", "64"] if chance.random() < 0.5 else []
    command = chance.choice([["explain", "--from-command"], ["compare", "--from-command"], ["models", "import"]])
    return [*command, path.name, *(["--machine", "dgx-h100", *sizes] if command[0] != "models" else [])]


def of_run(folder: Path, chance: random.Random) -> list[str]:
    """The folder of a run, one of whose files is broken."""
    shutil.copytree(chance.choice(sorted(RUN.iterdir())), folder / "run")
    path = chance.choice(sorted(path for path in (folder / "run").rglob("*") if path.is_file()))
    path.write_bytes(broken(path.read_bytes(), chance))
    reading = [["report", "run", "-o", "r.html"], ["diagnose", "run"], ["learn", "run", "-o", "l.yaml"]]
    return chance.choice([*reading, ["explain", "run/launch.yaml"], ["trace", "run/launch.yaml", "run"]])


def of_text(folder: Path, chance: random.Random) -> list[str]:
    """Text for tokens, and whatever may be given for it."""
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_bytes(chance.randbytes(chance.randrange(5000)))
    (folder / "text" / "loop.txt").symlink_to(chance.choice(["a.txt", "/dev/zero", "loop.txt", "/proc/kmsg", ".."]))
    options = [["--include", words_of(chance).replace("\0", "")], ["--vocab", "300"], ["--tokenizer", "text/a.txt"], []]
    return ["data", chance.choice(["text", "text/loop.txt", ".", ".."]), *chance.choice(options), "-o", "t.bin"]


def of_checkpoint(folder: Path, chance: random.Random) -> list[str]:
    """A checkpoint, one of whose files is broken; its marker fits what is there, or not."""
    from tests.runtime.test_damage import resealed

    shutil.copytree(STORED / "checkpoint" / "step-3", folder / "c")
    path = chance.choice(sorted((folder / "c").iterdir()))
    content = path.read_bytes()
    for _ in range(chance.choice([1, 2, 20])):
        content = content or b"N."
        place = chance.randrange(len(content))
        odd = chance.choice([b"2\x86", b"r\xff\xff\xff\x0f", b"h\x00h\x00\x86"]) * 40
        random_ones = chance.randbytes(chance.randrange(4)) + content[place + chance.randrange(4) :]
        ends = [random_ones, content[chance.randrange(len(content)) :], odd + content[place:]]
        content = content[:place] + chance.choice(ends)
    path.write_bytes(content)
    if chance.random() < 0.9:
        with suppress(ValueError, AttributeError, TypeError):
            resealed(folder / "c")
    return ["export", "c", "-o", "m.safetensors"]


def of_outputs(folder: Path, chance: random.Random) -> list[str]:
    """Outputs over whatever lies there."""
    (folder / "a.yaml").write_text("schema: axonn-tune/model/1\nname: a\nsource: s\nextends: nano\n")
    (folder / "config.json").write_bytes(b"{}")
    (folder / "link").symlink_to("a.yaml")
    (folder / "circle").symlink_to("circle")
    target = chance.choice([*PLACES.split(), "x" * 300, "-", ""])
    search = ["--gpus", "8", "--model", "a.yaml", "--machine", "dgx-h100"]
    frameworks = ["deepspeed", "megatron-core", "fsdp", "axonn-tune"]
    commands = [
        [*search, "--framework", chance.choice(frameworks), "-o", target],
        [*search, "--emit", chance.choice(["slurm", "torchrun", "toml"]), "-o", target],
        [*search, "--html", target],
        ["explain", *search, "--trace", target],
        ["schema", "model", "-o", target],
        ["models", "import", "config.json", "-o", target],
        ["regress", target, "--record", *search, "--reason", "r"],
    ]
    return [*chance.choice(commands), *(["--force"] if chance.random() < 0.3 else [])]


def of_config(folder: Path, chance: random.Random) -> list[str]:
    """A config of Hugging Face."""
    values = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    values |= {"intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 64, "hidden_act": "silu"}
    (folder / "config.json").write_bytes(broken(json.dumps(values, indent=1).encode(), chance))
    return ["models", "import", "config.json"]


# Those that would train, measure or make a network, that of all published rows; and those of the shell.
LEFT_OUT = {"run", "lab", "calibrate", "validate", "accuracy", "doctor", "completion", "data"}


def of_options(folder: Path, chance: random.Random) -> list[str]:
    """A command with options that it has, and values that they may not have."""
    with click.Context(cli) as context:
        name = chance.choice([one for one in cli.list_commands(context) if one not in LEFT_OUT] + ["search"] * 5)
        command = cli.get_command(context, name)
    assert command is not None
    options = [one for one in command.params if isinstance(one, click.Option)]
    words = [name, *(["--gpus", "8", "--model", "nano"] if any(one.name == "gpus" for one in options) else [])]
    for option in chance.sample(options, min(len(options), chance.randrange(1, 5))):
        words.append(chance.choice([*option.opts, *option.secondary_opts]))
        choices = getattr(option.type, "choices", ())
        if not option.is_flag:
            words.append(chance.choice(choices) if choices and chance.random() < 0.6 else words_of(chance))
    if chance.random() < 0.4:
        assignment = (
            f"{chance.choice(['model.layers', 'workload.global_batch', 'machine.tiers.0', 'step.x', 'machine'])}"
        )
        words += ["--set", f"{assignment}={words_of(chance)}"]
    return [word.replace("\0", "") for word in words if word not in ("-h", "--help")]


TUNED = {
    "--model": "llama3-8b nano-moe nano-delta lfm2-1.2b moonlight-16b-a3b nemotron-3-nano-30b-a3b",
    "--framework": "megatron-core megatron-core nemo fsdp fsdp torchtitan deepspeed",
    "--tune": "lora lora qlora dora head full",
    "--lora-rank": "1 64 100000",
    "--lora-targets": "q_proj all-linear in_proj,out_proj linear_qkv linear_kv_up_proj wq , [] *",
    "--lora-dtype": "bf16 fp32",
    "--lengths": "squad 180:400 1:1 100000:200000 400:180 lengths.txt /dev/zero .",
    "--packing": "packed padding-free padded",
    "--optimizer": "adamw adamw-8bit sgd lion adafactor muon auto",
    "--seq": "1 4096",
    "--batch": "1 64",
    "--x": "1 4",
    "--pipeline": "2",
    "--expert": "1 8",
    "--recompute": "none full mlp moe",
}
"""Options of fine-tuning, and what goes with them or does not."""
SET = """tuning.mode=head tuning.mode=dora tuning.base=bf16 tuning.tables=[embedding] tuning.targets=[]
tuning.targets=['*'] tuning.collectives=exchanged tuning.dropout=1 tuning.x=1 tuning=[]
lengths.mean=5 lengths.quantiles=[1] lengths=~"""


def of_tuned(folder: Path, chance: random.Random) -> list[str]:
    """Fine-tuning, lengths and optimizers, each option alone valid more often than not."""
    (folder / "lengths.txt").write_bytes(broken(b"12\n900\n7\n" * 20, chance))
    words = [chance.choice(["search", "search", "explain", "compare", "sweep"])]
    words += ["--gpus", "8" if words[0] in ("compare", "sweep") else chance.choice(["8", "16", "min"])]
    for option, values in TUNED.items():
        if option in ("--model", "--framework", "--tune") or chance.random() < 0.12:
            words += [
                option,
                words_of(chance).replace("\0", "") if chance.random() < 0.05 else chance.choice(values.split()),
            ]
    settings = chance.sample(SET.split(), chance.choice([0, 0, 0, 1, 2]))
    return [*words, "--machine", "dgx-h100", *(word for one in settings for word in ("--set", f"workload.{one}"))]


def of_trainer(folder: Path, chance: random.Random) -> list[str]:
    """A file of a trainer with adapters or without, and what lies beside it, if it does."""
    case = chance.choice([one for tool in safe_load(TRAINERS.read_text("utf-8")).values() for one in tool])
    files = list(case["files"].items())
    for name, text in files[: 1 if chance.random() < 0.1 else None]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    name, text = chance.choice(files)
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(broken(text.encode(), chance))
    sizes = ["--gpus", chance.choice(["8", "3", "1"])] if chance.random() < 0.6 else []
    model = ["--model", "llama3-8b"] if chance.random() < 0.8 else []
    command = chance.choice(["explain", "compare"])
    return [command, "--from-command", files[0][0], "--machine", "dgx-h100", *sizes, *model]


def of_environment(folder: Path, chance: random.Random) -> list[str]:
    """Variables that the tool, or a library of its, reads."""
    for name in chance.sample(VARIABLES.split(), 6):
        value = chance.choice([words_of(chance), "bash_complete", "zsh_complete", "x", "", "4"])
        os.environ[name] = value.replace("\0", "") if name != "AXONN_TUNE_DEBUG" else ""
    for reading in (rank_environment, already_started):
        with suppress(UsageError):
            reading(os.environ)
    return chance.choice([["--gpus", "8", "--model", "nano", "--machine", "localhost"], ["models", "list"], ["--help"]])


KINDS: list[Callable[[Path, random.Random], list[str]]] = [
    *(of_model, of_machine, of_launch, of_rows, of_results, of_log, of_config, of_options, of_options, of_environment),
    *(of_log, of_trace, of_command, of_command, of_run, of_text, of_checkpoint, of_outputs),
    *(of_tuned, of_trainer),
]


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Ends what takes longer, where it is."""

    def late(number: int, frame: FrameType | None) -> None:
        raise SystemExit(f"still running after {seconds} s of the CPU, or 120 s")

    numbers = (signal.SIGPROF, signal.SIGALRM)
    before = [signal.signal(number, late) for number in numbers]
    # Of the CPU, since others use it too; and of the clock, for what waits for ever.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(120)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.fixture(scope="module")
def _loaded() -> None:
    """What most inputs load, so that not each block has to."""
    good("compare --gpus 8 --model nano --machine dgx-h100")


@pytest.mark.usefixtures("_loaded")
@pytest.mark.parametrize("block", BLOCKS)
def test_hostile_inputs_end_in_a_message(block: int, tmp_path: Path) -> None:
    """Guards all that reads what others wrote: files, rows, logs, options and variables."""
    said = tmp_path / "said"
    # A process of its own, whose peak of memory above what it begins with bounds each input's.
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    began_kib = pages * os.sysconf("SC_PAGE_SIZE") >> 10
    child = os.fork()
    if child == 0:
        with suppress(BaseException):
            said.write_text(outcome(range(block, block + BLOCK), tmp_path), "utf-8", "backslashreplace")
        os._exit(0)
    _, status, usage = os.wait4(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    wrong, ends = json.loads(said.read_text("utf-8"))
    most_kib = usage.ru_maxrss - began_kib
    print(f"\nfuzz {ends['codes']} {ends['slowest'][0]:.2f} s {most_kib >> 10} MiB {ends['slowest'][1]}")
    assert not wrong, "\n".join(wrong)
    assert most_kib < LIMIT_KIB


def outcome(numbers: range, folder: Path) -> str:
    """Run some inputs; what was wrong, their exit codes, and the one that took longest, as JSON."""
    wrong: list[str] = []
    codes, slowest = Counter[int](), (0.0, "")
    for number in numbers:
        (folder / str(number)).mkdir()
        os.chdir(folder / str(number))
        began_s = time.process_time()
        words, finished = ended(number, folder / str(number))
        said = f"input {number}: {' '.join(words)[:300]!r}: exit code {finished.code}"
        slowest = max(slowest, (time.process_time() - began_s, said))
        codes[finished.code] += 1
        silent = finished.code != 0 and not finished.err.strip()
        if finished.code not in CODES or "Traceback" in finished.err or _RAW.search(finished.err) or silent:
            wrong.append(f"{said}\n{finished.err[-1500:]}")
    return json.dumps([wrong, {"codes": codes, "slowest": slowest}])


_RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What terminals obey."""


def ended(number: int, folder: Path) -> tuple[list[str], Finished]:
    """Run an input; how it ended."""
    before = dict(os.environ)
    try:
        words = KINDS[number % len(KINDS)](folder, random.Random(number))
        with limited(LIMIT_S):
            return words, run("", words)
    except SystemExit as error:
        return words, Finished(1 if error.code else 0, "", f"SystemExit: {error}")
    finally:
        os.environ.clear()
        os.environ.update(before)
