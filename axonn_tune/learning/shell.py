"""The words that a bash script starts a program with: assignments, arrays and simple conditions evaluated, nothing run.

Quotes only group words: a value is the list of its words, each with its line, so `"${ARGS[@]}"`, `$ARGS` and a
command in quotes after `bash -c` are all the words they hold. References that only a shell can resolve stay as written:
variables that the script does not set, the output of commands (`$()`), arguments of the script. A script is read once
from its start to its end, and what it expands to is bounded.
"""

from __future__ import annotations

import ast
import contextlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType

from axonn_tune.errors import DocumentError, Problem
from axonn_tune.frameworks.keys import Stated

Word = tuple[Stated, ...]
"""A word of the shell; quoted text in it may hold several words."""

OUTPUT = "$()"
"""Stands for the output of a command."""

_LARGEST, _EXPANDED, _DEEPEST, _LONGEST = 1 << 18, 1 << 20, 20, 200
"""Largest script in characters, sum of its expansions in words and characters, depth of references and conditions, and
longest expression of numbers in characters."""


def read_script(text: str, *, path: str) -> Script:
    """Evaluate a script; DocumentError for a quote or bracket that is not closed, and for one that expands too far."""
    if len(text) > _LARGEST:
        raise DocumentError(path, [Problem("", f"has {len(text):,} characters, a script at most {_LARGEST:,}", 1)])
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.startswith("#SBATCH")]
    directives = tuple(Stated(word, number) for number, line in lines for word in re.split(r"\s#", line)[0].split()[1:])
    sizes = slurm_sizes(directives).items()
    script = Script(path, directives, {name: [size] for key, size in sizes for name in _VARIABLES.get(key, ())})
    _Scanner(text.replace("\r\n", "\n"), script).read()
    return script


_VARIABLES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks_per_node": ("SLURM_NTASKS_PER_NODE",),
    "gpus_per_node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
}
_COUNTS = {
    "": re.compile(r"(?:[\w-]+:)?(\d{1,9})(?:\(.*)?"),
    "gres": re.compile(r"(?:.*,)?gpu(?::[a-z][\w-]*)?(?::(\d{1,9}))?(?:[(,].*)?"),
}
_SIZES = {"N": "nodes", "n": "ntasks", "G": "gpus", "gres": "gpus_per_node"}


def slurm_sizes(words: Sequence[Stated]) -> dict[str, Stated]:
    """Nodes, tasks and GPUs (in all, of a node, of a task) that sbatch or srun is asked for, by their long names."""
    found: dict[str, Stated] = {}
    for word, following in zip(words, [*words[1:], Stated("", 0)], strict=False):
        option = re.fullmatch(r"(?:--([a-z-]+)|-([NnG])(?=$|\d))=?(.*)", word.value)
        name = (option[1] or option[2]).replace("-", "_") if option else ""
        key = _SIZES.get(name, name)
        count = _COUNTS.get(name, _COUNTS[""]).fullmatch((option and option[3]) or following.value)
        if count and key in (*_VARIABLES, "gpus", "gpus_per_task"):
            found[key] = Stated(count[1] or "1", word.line)
    if "ntasks" not in found and {"nodes", "ntasks_per_node"} <= found.keys():
        tasks = int(found["nodes"].value) * int(found["ntasks_per_node"].value)
        found["ntasks"] = Stated(str(tasks), found["nodes"].line)
    return found


def program_of(words: Sequence[Stated]) -> str:
    """The program that a command starts: the module after `-m`, or the first Python file; "" for none."""
    values = [word.value for word in words]
    file = next((value for value in values if value.endswith(".py")), "")
    return next((after for before, after in pairwise(values) if before == "-m" and "." in after), file)


# From characters to words.

_INSIDE = r"\\(?P<escaped>[\s\S]?)|(?P<output>`[^`]*`?)|(?P<opened>\$\(\(?|\$\{)|(?P<blank>\s)"
_AROUND = rf"{_INSIDE}|(?P<comment>(?<![^\s;&|(])#[^\n]*)"
_LEXEMES = {
    "": re.compile(
        rf"{_AROUND}|(?P<quote>['\"]|(?<==)\()|<<-?[ \t]*\\?[\"']?(?P<document>\w+)[\"']?|(?P<sum>\(\()"
        r"|(?P<operator>&&|\|\|?|[();&])|(?P<text><<<|>>?&?|[^\s\\`$'\"#();&|<>]+|.)"
    ),
    "(": re.compile(rf"{_AROUND}|(?P<quote>['\")])|(?P<text>[^\s\\`$'\"#)]+|.)"),
    '"': re.compile(rf"{_INSIDE}|(?P<quote>\")|(?P<text>[^\s\\`$\"]+|.)"),
    "'": re.compile(r"(?P<quote>')|(?P<blank>\s)|(?P<text>[^\s']+)"),
}
"""What is read next: outside of quotes, within an array, and within both kinds of quotes."""

_PAIRS = {"(": re.compile(r"[()]"), "{": re.compile(r"[{}]")}


def _closing(text: str, start: int) -> int:
    """Place after the bracket that closes the one at `start`; 0 without one."""
    depth = 0
    for bracket in _PAIRS[text[start]].finditer(text, start):
        depth += 1 if bracket[0] == text[start] else -1
        if depth == 0:
            return bracket.end()
    return 0


@dataclass
class _Scanner:
    """Splits a script into the words of statements. opened: quotes and arrays that are not closed, with their lines."""

    text: str
    script: Script
    at: int = 0
    line: int = 1
    link: str = ""
    opened: list[tuple[str, int]] = field(default_factory=list)
    piece: list[str] = field(default_factory=list)
    word: list[Stated] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)

    def read(self) -> None:
        """Run all statements, in order; each character is looked at once."""
        while self.at < len(self.text):
            lexeme = _LEXEMES[self.opened[-1][0] if self.opened else ""].match(self.text, self.at)
            assert lexeme is not None
            kind, self.at = str(lexeme.lastgroup), lexeme.end()
            if kind in ("blank", "operator"):
                self._separate(lexeme[0])
            elif kind == "document":
                self.marks.append(lexeme[kind])
            elif kind != "comment":
                self.piece.append(self._part(kind, lexeme[kind]))
        if self.opened:
            mark, line = self.opened[-1]
            raise self.script.refusal(f"a {'bracket' if mark == '(' else 'quote'} {mark} is not closed", line)
        self._separate("\n")

    def _part(self, kind: str, value: str) -> str:
        """What a lexeme adds to a word; an empty pair of quotes is a word, too."""
        self.line += value.count("\n")
        if kind == "quote" and self.opened and value == {"(": ")"}.get(self.opened[-1][0], self.opened[-1][0]):
            self.opened.pop()
        elif kind == "quote":
            self.opened.append((value, self.line))
        elif kind in ("opened", "sum"):
            start, skipped = self.at - len(value), value.count("$")
            self.at = _closing(self.text, start + skipped)
            if not self.at:
                raise self.script.refusal(f"a bracket {self.text[start + skipped]} is not closed", self.line)
            whole = self.text[start : self.at]
            self.line += whole.count("\n")
            if whole.startswith("${"):
                return re.sub("[\"']", "", whole)
            if (printed := _CAT.fullmatch(whole)) is not None:
                self.script.keep(Stated(printed[2], self.line - whole.count("\n") + 1))
            # Arithmetic without blanks, or the output of a command.
            if (sum_ := re.fullmatch(r"\$\(\s*expr\s+([\w\s${}*/+%\\-]+)\)", whole)) is not None:
                whole = "$((" + sum_[1].replace("\\", "") + "))"
            return "".join(whole.split()) if "((" in whole[:3] else OUTPUT
        return {"quote": "", "output": OUTPUT, "escaped": value.strip("\n")}.get(kind, value)

    def _separate(self, mark: str) -> None:
        """End a piece of a word, a word or a statement at a blank or an operator."""
        text, quoted = "".join(self.piece), bool(self.opened) and self.opened[-1][0] != "("
        if text or (self.piece and not quoted and not self.word):
            self.word.append(Stated(text, self.line))
        self.piece = []
        self.line += mark == "\n"
        if not self.opened:
            self.words += [tuple(self.word)] if self.word else []
            self.word = []
        if not self.opened and (mark == "\n" or not mark.isspace()):
            self.script.run(self.words, self.link)
            # A line may end after an operator.
            self.link = mark if self.words or mark != "\n" else self.link
            self.words = []
        if mark == "\n" and not quoted:
            for one in self.marks:
                self._document(one)
            self.marks.clear()

    def _document(self, mark: str) -> None:
        """Read a here-document up to its mark."""
        start, first, ended = self.at, self.line, False
        while not ended and self.at < len(self.text):
            before, self.line = self.at, self.line + 1
            self.at = self.text.find("\n", before) + 1 or len(self.text)
            ended = self.text[before : self.at].strip("\t\n") == mark
        self.script.keep(Stated(self.text[start : before if ended else self.at], first))


# Evaluation of words.

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(?:\(\(|\{|(?P<name>[A-Za-z_]\w*))")
_WHOLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:\[[@*]\])?\})")
_BRACED = re.compile(r"([A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?:(:?[-=])(.*)|[,^]{1,2})?", re.DOTALL)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_IDLE = ("echo", "printf", "set", "read", "cd", "mkdir", "source", ".", "trap", "ulimit", "unset", "sleep", "exit")
"""Commands that start no training."""
_STARTING = re.compile(r"(?m)(?:^|[\s/])(?:torchrun|deepspeed|srun|accelerate launch|python3? +(?:-\w+ +)*\S+)(?:\s|$)")
"""What starts a program in the text of a script that another writes."""
_CAT = re.compile(r"\$\(\s*cat\s*<<-?\s*\\?['\"]?(\w+)['\"]?[ \t]*\n(.*\n)[ \t]*\1\s*\)", re.DOTALL)
_LEADING = ("do", "{", "time", "exec", "eval")
_COMPARED = {"-eq": "==", "-ne": "!=", "-gt": ">", "-ge": ">=", "-lt": "<", "-le": "<="}


@dataclass
class _Branch:
    """An `if` or `case` that is open. unknown: line of its condition where that cannot be evaluated."""

    unknown: int = 0
    runs: bool = False
    done: bool = False
    reading: bool = False


@dataclass
class Script:
    """Content of a script, while and after it is read.

    directives: of `#SBATCH`; commands: the words of each command; documents: here-documents with the line they begin
    in; skipped: lines of conditions that were taken to be false. truth: whether the last statement succeeded, None
    where that is unknown; filling: the variable that the next here-document is read into, "" for none;
    within: whether a script that this one writes is read.
    """

    path: str
    directives: Sequence[Stated]
    variables: dict[str, list[Stated]]
    commands: list[Word] = field(default_factory=list)
    documents: list[Stated] = field(default_factory=list)
    skipped: dict[int, None] = field(default_factory=dict)
    branches: list[_Branch] = field(default_factory=list)
    truth: bool | None = True
    spent: int = 0
    filling: str = ""
    within: bool = False

    def refusal(self, words: str, line: int) -> DocumentError:
        """The error of a line."""
        return DocumentError(self.path, [Problem("", words, line)])

    def run(self, words: Sequence[Word], link: str) -> None:
        """One statement, if the branch it stands in runs. link: the operator before it."""
        while words and self._keyword(words[0][0]):
            words = words[1:]
        unknown = [branch.unknown for branch in self.branches if not branch.runs]
        reading = bool(self.branches) and self.branches[-1].reading
        if words and (reading or not unknown) and self.truth is {"&&": True, "||": False}.get(link, self.truth):
            tested = reading or words[0][0].value.startswith(("[", "((")) or words[-1][0].value == "]]"
            self.truth = self._holds(words) if tested else True
            self._command([] if tested else words)
        elif words and _ASSIGNED.match(words[-1][0].value):
            # Other statements that are left out do not affect arguments.
            lines = unknown or ([words[0][0].line] if self.truth is None else [])
            self.skipped |= dict.fromkeys(line for line in lines if line)

    def keep(self, document: Stated) -> None:
        """A here-document of a branch that runs, or may run."""
        name, self.filling = self.filling, ""
        if not all(branch.runs or branch.unknown for branch in self.branches):
            return
        found = replace(document, value=self.text(document.value, document.line))
        self.documents.append(found)
        if name:
            lines = enumerate(found.value.splitlines(), found.line)
            self.variables[name] = [Stated(word, at) for at, line in lines for word in line.rstrip("\\ ").split()]
        elif not self.within and not found.value.lstrip().startswith("{") and _STARTING.search(found.value):
            self._written(found)

    def _written(self, document: Stated) -> None:
        """Run a script that this one writes; one that cannot be read is left out."""
        branches, truth = self.branches, self.truth
        self.branches, self.within = [], True
        with contextlib.suppress(DocumentError):
            _Scanner(document.value.replace("\\$", "$"), self, line=document.line).read()
        self.branches, self.truth, self.within = branches, truth, False

    def _keyword(self, word: Stated) -> bool:
        """Open, change or close a branch; whether a word is no part of a command."""
        branch = self.branches[-1] if self.branches else None
        if word.value in ("if", "case"):
            # No branch of a case is taken.
            self.branches.append(_Branch(word.line, reading=word.value == "if"))
            if len(self.branches) > _DEEPEST:
                raise self.refusal(f"more than {_DEEPEST} conditions within each other", word.line)
        elif branch is None or word.value not in ("elif", "else", "fi", "then", "esac"):
            return word.value in _LEADING
        elif word.value in ("fi", "esac"):
            self.branches.pop()
        elif word.value == "elif":
            branch.reading, branch.runs, branch.unknown = True, False, word.line
        else:
            taken = word.value == "else" or self.truth
            branch.reading, branch.runs = False, bool(taken) and not branch.done
            branch.unknown = branch.unknown if taken is None and not branch.done else 0
            branch.done |= branch.runs
        return True

    def _holds(self, words: Sequence[Word]) -> bool | None:
        """Whether a condition is true; None for one that cannot be evaluated."""
        parts = [self.text(" ".join(one.value for one in word), word[0].line, unset="") for word in words]
        negated = parts[0] == "!"
        tested = [part for part in parts[negated:] if part not in ("[", "[[", "]", "]]")]
        holds = None
        if len(tested) == 3 and tested[1] in _COMPARED:
            tested = [f"(({tested[0]} {_COMPARED[tested[1]]} {tested[2]}))"]
        if len(tested) == 1 and tested[0].startswith("(("):
            found = arithmetic(tested[0], values=self.variables)
            holds = found != "0" if found.isdecimal() else None
        elif len(tested) == 2 and tested[0] in ("-n", "-z"):
            holds = bool(tested[1]) == (tested[0] == "-n")
        elif len(tested) == 3 and tested[1] in ("=", "==", "!="):
            holds = (tested[0] == tested[2]) == (tested[1] != "!=")
        return None if holds is None or "$" in "".join(tested) else holds != negated

    def _command(self, words: Sequence[Word]) -> None:
        """Assignments, and what follows them, if it does more than print."""
        declared = bool(words) and words[0][0].value in _DECLARING
        rest = [word for word in words[1:] if not word[0].value.startswith("-")] if declared else list(words)
        while rest and (assigned := _ASSIGNED.fullmatch(rest[0][0].value)):
            first, *others = rest.pop(0)
            name = assigned[1]
            # Lists of files grow by thousands of lines such as `FILES="$FILES more"`.
            more = name in self.variables and assigned[3] in (f"${name}", f"${{{name}}}")
            value = self.expanded(others if more else [replace(first, value=assigned[3]), *others])
            self.variables[name] = self.variables.get(name, []) if more or assigned[2] else []
            self.variables[name] += value
        if rest and rest[0][0].value == "read":
            self.filling = rest[-1][0].value
        if rest and not declared and rest[0][0].value not in _IDLE:
            found = tuple(self.expanded([part for word in rest for part in word]))
            self.commands += [found] if found else []

    def _spend(self, size: int, line: int) -> None:
        self.spent += size
        if self.spent > _EXPANDED:
            raise self.refusal(f"expands, with what is before it, to more than {_EXPANDED:,} characters", line)

    def expanded(self, parts: Sequence[Stated]) -> list[Stated]:
        """Words with all references replaced; those of an array keep their own lines."""
        found: list[Stated] = []
        for part in parts:
            whole = _WHOLE.fullmatch(part.value)
            stated = self.variables.get(whole[1] or whole[2]) if whole else None
            if stated is None:
                stated = [Stated(word, part.line) for word in self.text(part.value, part.line).split()]
            self._spend(len(stated), part.line)
            found += stated
        return found

    def text(self, text: str, line: int, *, unset: str | None = None, depth: int = 0) -> str:
        """A text with its references replaced; unset: for variables that have no value, else they stay."""
        pieces, at = [], 0
        while one := _REFERENCE.search(text, at):
            end = one.end() if one["name"] else _closing(text, one.start() + 1)
            if not end or depth > _DEEPEST:
                break
            pieces += [text[at : one.start()], self._value(text[one.start() : end], line, unset=unset, depth=depth + 1)]
            at = end
        found = "".join((*pieces, text[at:]))
        self._spend(len(found), line)
        return found

    def _value(self, reference: str, line: int, *, unset: str | None, depth: int) -> str:
        """Value of `$((...))`, `${...}` or `$name`."""
        if reference.startswith("$(("):
            return arithmetic(self.text(reference[3:-2], line, depth=depth), values=self.variables)
        braced = _BRACED.fullmatch(reference[2:-1] if reference[1] == "{" else reference[1:])
        found = self.variables.get(braced[1]) if braced else None
        stated = " ".join(word.value for word in found or ())
        if braced and braced[2] and not (stated if ":" in braced[2] else found is not None):
            value = self.text(braced[3], line, unset=unset, depth=depth)
            if braced[2].endswith("="):
                self.variables[braced[1]] = [Stated(word, line) for word in value.split()]
            return value
        if found is None:
            return reference if unset is None or braced is None or braced[1].isdecimal() else unset
        return stated.lower() if reference.endswith(",}") else stated


_SUMS: Mapping[type[ast.AST], Callable[[int, int], int]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.floordiv, ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod},
    **{ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Gt: operator.gt},
    **{ast.GtE: operator.ge, ast.Lt: operator.lt, ast.LtE: operator.le},
}


def arithmetic(expression: str, *, values: Mapping[str, Sequence[Stated]] = MappingProxyType({})) -> str:
    """Value of an expression of whole numbers, 1 or 0 of a comparison; `$((...))` of any other."""
    try:
        if len(expression) > _LONGEST:
            raise ValueError
        return str(_sum(ast.parse(expression.strip(), mode="eval").body, values))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return f"$(({expression}))"


def _sum(node: ast.expr, values: Mapping[str, Sequence[Stated]]) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        found = _SUMS[type(node.op)](_sum(node.left, values), _sum(node.right, values))
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SUMS:
        found = _SUMS[type(node.ops[0])](_sum(node.left, values), _sum(node.comparators[0], values))
    elif isinstance(node, ast.Name) and len(values.get(node.id, ())) == 1:
        found = int(values[node.id][0].value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        found = node.value
    else:
        raise ValueError
    return int(found)
