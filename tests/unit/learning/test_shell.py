"""What a bash script starts a program with: words, variables, arrays, conditions; nothing is run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.learning.arguments import Stated, named_values
from axonn_tune.learning.shell import Script, read_script, slurm_sizes


def script(text: str) -> Script:
    """A script's text."""
    return read_script(text, path="run.sh")


def started(text: str) -> str:
    """The words of the last command."""
    return " ".join(word.value for word in script(text).commands[-1])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A=4\nrun --tp $A --pp ${A}", "run --tp 4 --pp 4"),
        ("run --tp ${A:-8} --pp ${B-2} --cp ${C:=1}", "run --tp 8 --pp 2 --cp 1"),
        ("A=\nrun ${A:-8} ${A-2}", "run 8"),
        ("run $((2**9)) $((__import__('os').x)) $(())", "run $((2**9)) $((__import__('os').x)) $(())"),
        ("run --a\necho $CMD\nprintf '%s' $C", "run --a"),
        (': "${A:=4 5}" ${B:=$A}\nrun $A ${B}', "run 4 5 4 5"),
        ("N=4; G=8\nrun $((N*G)) $(( ($N + 1) % 3 )) $((N / 0))", "run 32 2 $((N/0))"),
        (
            'ARGS=(--a 1\n  # nothing\n  --b 2 # two\n)\nARGS+=(--c)\nrun ${ARGS[@]} "${ARGS[*]}"',
            "run" + 2 * " --a 1 --b 2 --c",
        ),
        ('ARGS="\n --a 1 \\\n --b 2\n"\nrun $ARGS', "run --a 1 --b 2"),
        ("ARGS=--a\nARGS+=' --b'\nrun $ARGS", "run --a --b"),
        ("run --a \\\n  --b  # c", "run --a --b"),
        ("A=1 B=2 run $A$B", "run 12"),
        ("export A=1\ndeclare -r X\nrun ${A}x", "run 1x"),
        ("declare -a ARGS=(\n  --a 1\n  --b=2\n)\nlocal -r C=3\nrun ${ARGS[@]} $C", "run --a 1 --b=2 3"),
        ("run --name 'it is $A' \"$A\"", "run --name it is $A $A"),
        ("A=BF16\nrun ${A,,}", "run bf16"),
        ("run `hostname` $(cat <(echo a)) --b", "run $() $() --b"),
        ("run a#b --c", "run a#b --c"),
        ("run --log 2>&1", "run --log 2>&1"),
        ('A=\'x\'\nCMD="run $A --b"\nbash -c "RANK=\\$SLURM_PROCID $CMD"', "bash -c RANK=$SLURM_PROCID run x --b"),
        ("cat <<END > f\n'it's {$A}\nEND\nrun --a", "run --a"),
        ("exec run --a", "run --a"),
    ],
)
def test_words_are_those_of_bash(text: str, words: str) -> None:
    """Guards expansion: what the script sets is in place, what only a shell knows stays."""
    assert started(text) == words


@pytest.mark.parametrize(
    ("condition", "value"),
    [
        ('[ "$M" = 70b ]', "then"),
        ('[ "$M" = 8b ]', "else"),
        ("[[ $N -ge 4 ]]", "then"),
        ("[[ $N -lt 4 ]]", "else"),
        ('[ -n "$M" ]', "then"),
        ('[ -z "$M" ]', "else"),
        ('[ -z "$UNSET" ]', "then"),
        ("[ $M -eq 4 ]", "else"),
        ("[ -f file ]", "else"),
        ("((N == 4))", "then"),
        ("(( N > 4))", "else"),
        ("! [ $N -gt 4 ]", "then"),
        ('[ "$N" = 1 ] || [[ "$M" == 70b ]]', "then"),
        ("[[ $N -eq 4 && $M = 8b ]]", "else"),
        ('[ "${3:-"MOCK"}" = MOCK ] || [ -f file ]', "then"),
        ('[ "$1" = x ]', "else"),
    ],
)
def test_branches_are_taken_by_their_condition(condition: str, value: str) -> None:
    """Guards if and else: texts and numbers are compared; what cannot be evaluated is false."""
    text = f"M=70b N=4\nif {condition}; then\n  A=then\nelse A=else; fi\nrun $A"
    assert started(text) == f"run {value}"


@pytest.mark.parametrize(
    ("text", "words", "skipped"),
    [
        ("A=1\n[ -z $B ] && A=2\nrun $A", "run 2", []),
        ("A=1\n[[ 2 -gt 3 ]] && A=2 || A=3\nrun $A", "run 3", []),
        ("A=1\nmkdir x || A=2\nrun $A", "run 1", []),
        ("A=1\n[ -d x ] && A=2\nrun $A", "run 1", [2]),
        ("if [ -f x ]; then\n  echo no\nfi\nrun", "run", []),
        ("A=1\ncase $M in\n  7b|8b) A=2 ;;\n  *) A=3 ;;\nesac\nrun $A", "run 1", [2]),
        ("A=1\nif [ $1 = x ]\nthen\n A=2\nelif [ $1 = y ]\nthen A=3\nfi\nrun $A", "run 1", [2, 5]),
    ],
)
def test_what_follows_an_operator_runs_by_what_is_before_it(text: str, words: str, skipped: list[int]) -> None:
    """Guards && and ||; what depends on something unknown is left out, and its line is named."""
    found = script(text)
    assert (" ".join(word.value for word in found.commands[-1]), list(found.skipped)) == (words, skipped)


def test_of_several_branches_one_runs() -> None:
    """Guards elif, and an if within another."""
    chain = "if [ $A = 1 ]; then B=1\nelif [ $A = 2 ]; then\n if [ 1 = 1 ]; then B=2; fi\n"
    chain += "elif [ $A = 2 ]; then B=3\nfi\nrun $B"
    assert started(f"A=2\n{chain}") == "run 2"
    assert started(f"A=3\n{chain}") == "run $B"


def test_words_have_the_lines_they_are_written_in() -> None:
    """Guards errors that name a line: those of an array are where the array is."""
    found = script("A=1\n\nARGS=(\n  --tp 4\n  --pp $A\n)\nrun \\\n  --last ${ARGS[@]}").commands[-1]
    assert found[:2] == (Stated("run", 7), Stated("--last", 8))
    assert found[2:5] == (Stated("--tp", 4), Stated("4", 4), Stated("--pp", 5))


def test_what_slurm_is_asked_for_is_set() -> None:
    """Guards directives and the variables that Slurm makes of them."""
    text = "#!/bin/bash\n#SBATCH --nodes=4 --ntasks-per-node 8 # all\n#SBATCH --gres=gpu:h100:8\n"
    text += "run $SLURM_NNODES $SLURM_NTASKS $SLURM_GPUS_PER_NODE ${SLURM_JOB_NUM_NODES:-1}"
    assert started(text) == "run 4 32 8 4"
    assert slurm_sizes([Stated("-N", 1), Stated("2", 1), Stated("-n16", 1)]).keys() == {"nodes", "ntasks"}


def test_here_documents_are_kept_with_their_variables() -> None:
    """Guards config files that a script writes."""
    (found,) = script("Z=3\ncat <<'EOF' > f.json\n{\"stage\": $Z}\nEOF\nrun").documents
    assert found == Stated('{"stage": 3}\n', 3)


def test_here_documents_are_words_where_they_are_read_and_commands_where_they_are_scripts() -> None:
    """Guards launchers that write what they start: by `read`, by `cat` into a variable, and into a file."""
    found = script("read -r -d '' ARGS <<EOF\n--tp 4 \\\n--pp 2\nEOF\nrun $ARGS").commands[-1]
    assert found == (Stated("run", 5), Stated("--tp", 2), Stated("4", 2), Stated("--pp", 3), Stated("2", 3))
    worker = "N=4\nW=$(cat <<- EOM\n  [ $X ] ;\n  torchrun a.py --rank \\$R \\\n   --tp $N\nEOM\n)"
    assert started(worker) == "torchrun a.py --rank $R --tp 4"
    assert started("cat > w.sh <<'EOF'\npython -u b.py --tp 4\nEOF\n") == "python -u b.py --tp 4"
    assert started("cat > notes <<'EOF'\npython a.py it's\nEOF\n") == "cat > notes"
    assert started("set -euo pipefail\nrun") == "run"


@pytest.mark.parametrize(
    ("text", "line"), [('run\nrun "a\nb', 2), ("A=(\n1 2\n", 1), ("run ${A", 1), ("run $(a", 1), ("x" * (1 << 21), 1)]
)
def test_what_no_shell_reads_is_refused_with_its_line(text: str, line: int) -> None:
    """Guards quotes and brackets that are not closed, and files that are no scripts."""
    with pytest.raises(DocumentError, match=f"^run.sh:{line}: "):
        script(text)


HOSTILE = {
    "doubled": ("a=xxxxxxxxxxxxxxxx\n" + "a=$a$a\n" * 26, "run.sh:17: expands, with what is before it, to more than"),
    "array": ("A=(x)\n" + "A=(${A[@]} ${A[@]})\n" * 26, "to more than 1,048,576 characters"),
    "added": ("A=(x)\n" + "A+=(${A[@]})\n" * 26, "to more than 1,048,576 characters"),
    "semicolons": ("A=(" + 250_000 * ";" + ")", ""),
    "sums": (80_000 * "$((", "run.sh:1: a bracket ( is not closed"),
    "quoted sums": ("a='" + 80_000 * "$((" + "'\nrun $a", ""),
    "nested": ("a='" + 30_000 * "${A:-" + 30_000 * "}" + "'", "to more than 1,048,576 characters"),
    "assignments": ("a0=1\n" + "".join(f"a{one}=$((a{one - 1} + 1))\n" for one in range(1, 12_000)), ""),
    "long list": ('T="0 x"\n' + 'T="${T} 1 /data"\n' * 12_000 + "run $T", ""),
    "documents": ("".join(f"cat <<a{one}\na{one}\n" for one in range(13_000)), ""),
    "conditions": ("if [ -f x ]; then\na=1\n" * 9_000, "run.sh:41: more than 20 conditions within each other"),
    "long": ("a0=1\n" * 60_000, "run.sh:1: has 300,000 characters, a script at most 262,144"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_scripts_are_read_in_bounds_or_refused(name: str, tmp_path: Path) -> None:
    """Guards 2 seconds of CPU and 1 GiB for what doubles, nests or repeats: read, or refused with its line."""
    text, refusal = HOSTILE[name]
    (tmp_path / "run.sh").write_text(text, "utf-8")
    done = subprocess.run([sys.executable, "-c", _BOUNDED], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, refusal in done.stdout, done.stderr) == (2 if refusal else 0, True, ""), done.stdout


_BOUNDED = """
import pathlib, resource, sys
from axonn_tune.errors import DocumentError
from axonn_tune.learning.shell import read_script
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    read_script(pathlib.Path("run.sh").read_text(), path="run.sh")
except DocumentError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.parametrize("end", ["2>&1 | tee log", "> log", '"$@"', '"$@" 2>&1', "&> log"])
def test_what_follows_a_switch_in_real_scripts_is_no_value(end: str) -> None:
    """Guards switches at the end of a command: redirections and passed-on arguments do not become their values."""
    script = read_script(
        f"TP=${{1:-2}}\npython pretrain_gpt.py --tensor-model-parallel-size $TP --bf16 {end}\n", path="run.sh"
    )
    found = dict(named_values(script.commands[0]))
    assert (found["--bf16"].value, found["--tensor-model-parallel-size"].value) == ("True", "2")
