"""The words that a bash script starts a program with: assignments, arrays and simple conditions evaluated, nothing run.

Quotes only group words: a value is the list of its words, each with its line, so `"${ARGS[@]}"`, `$ARGS` and a
command in quotes after `bash -c` are all the words they hold. References that only a shell can resolve stay as written:
variables that the script does not set, the output of commands (`$()`), arguments of the script.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from axonn_tune.errors import DocumentError, Problem
from axonn_tune.learning.arguments import Stated

Word = tuple[Stated, ...]
"""A word of the shell; quoted text in it may hold several words."""

OUTPUT = "$()"
"""Stands for the output of a command."""

_LARGEST = 1 << 20
"""Largest size of a script, characters."""


@dataclass(frozen=True)
class Script:
    """Content of a script.

    commands: the words of each command; directives: of `#SBATCH`; documents: here-documents with the line they begin
    in; values: of all variables; skipped: lines of conditions that were taken to be false.
    """

    commands: tuple[tuple[Stated, ...], ...]
    directives: tuple[Stated, ...]
    documents: tuple[Stated, ...]
    values: tuple[Stated, ...]
    skipped: tuple[int, ...]


def read_script(text: str, *, path: str) -> Script:
    """Evaluate a script; DocumentError for a quote or bracket that is not closed."""
    if len(text) > _LARGEST:
        raise DocumentError(path, [Problem("", f"has {len(text):,} characters: no script", 1)])
    scanner = _Scanner(text.replace("\r\n", "\n"), path)
    statements = scanner.statements()
    directives = tuple(_directives(text))
    sizes = slurm_sizes(directives)
    shell = _Shell({name: (size,) for key, size in sizes.items() for name in _VARIABLES[key]})
    for statement in statements:
        shell.run(statement)
    documents = tuple(Stated(shell.text(one.value), one.line) for one in scanner.documents)
    values = tuple(word for words in shell.variables.values() for word in words)
    return Script(tuple(shell.commands), directives, documents, values, tuple(shell.skipped))


def _directives(text: str) -> Iterator[Stated]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#SBATCH"):
            yield from (Stated(word, number) for word in line.split(" #")[0].split()[1:])


_VARIABLES = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks_per_node": ("SLURM_NTASKS_PER_NODE",),
    "gpus_per_node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
}


def slurm_sizes(words: Sequence[Stated]) -> dict[str, Stated]:
    """Nodes, tasks and GPUs that options of sbatch or srun ask for, by their long names."""
    short = {"-N": "nodes", "-n": "ntasks"}
    found: dict[str, Stated] = {}
    for word, following in zip(words, [*words[1:], Stated("", 0)], strict=False):
        name, _, value = re.sub(r"^(-[Nn])(?=\d)", r"\1=", word.value).partition("=")
        key = short.get(name, name.lstrip("-").replace("-", "_"))
        count = re.fullmatch(r"(?:gpu:)?(?:\w+:)?(\d+)", value or following.value)
        if key in (*_VARIABLES, "gres") and name.startswith("-") and count:
            found[key if key != "gres" else "gpus_per_node"] = Stated(count[1], word.line)
    if "ntasks" not in found and {"nodes", "ntasks_per_node"} <= found.keys():
        tasks = int(found["nodes"].value) * int(found["ntasks_per_node"].value)
        found["ntasks"] = Stated(str(tasks), found["nodes"].line)
    return found


# From characters to words.


@dataclass
class _Scanner:
    """Splits a script into statements of words; `documents` has what stands between `<<END` and `END`."""

    text: str
    path: str
    at: int = 0
    line: int = 1
    quote: str = ""
    opened: list[int] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    word: list[Stated] = field(default_factory=list)
    statement: list[Word] = field(default_factory=list)
    found: list[tuple[Word, ...]] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    documents: list[Stated] = field(default_factory=list)

    def statements(self) -> list[tuple[Word, ...]]:
        """All of them, in order."""
        while self.at < len(self.text):
            self._step(self.text[self.at])
        if self.quote or self.opened:
            what = f"a quote {self.quote}" if self.quote else "a bracket ("
            raise DocumentError(self.path, [Problem("", f"{what} is not closed", self.opened[-1])])
        self._end_statement()
        return self.found

    def _step(self, char: str) -> None:
        """Read on from one character."""
        if char == "\\" and self.quote != "'":
            self._escaped()
        elif char in "'\"" and self.quote in ("", char):
            self._quoted(char)
        elif char == "`" and self.quote != "'":
            self._skip_to(self._after(self.at + 1, "`"), OUTPUT)
        elif char == "$" and self.quote != "'":
            self._dollar()
        elif char.isspace():
            self._blank(char)
        elif self.quote:
            self._take(char)
        elif char == "#" and not self.parts:
            self.at = self._after(self.at, "\n", keep=True)
        elif char in "();&|<":
            self._operator(char)
        else:
            self._take(char)

    def _take(self, text: str) -> None:
        self.parts.append(text)
        self.at += 1

    def _escaped(self) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        if following == "\n":
            self.line += 1
        else:
            self.parts.append(following)
        self.at += 2

    def _quoted(self, char: str) -> None:
        if self.quote:
            self.opened.pop()
        else:
            self.opened.append(self.line)
        self.quote = "" if self.quote else char
        # An empty pair of quotes is a word, too.
        self._take("")

    def _dollar(self) -> None:
        """A variable, arithmetic, or the output of a command."""
        if self.text.startswith("$((", self.at):
            end = self._closing(self.at + 1, "()")
            self._skip_to(end, "".join(self.text[self.at : end].split()))
        elif self.text.startswith("$(", self.at):
            self._skip_to(self._closing(self.at + 1, "()"), OUTPUT)
        elif self.text.startswith("${", self.at):
            end = self._closing(self.at + 1, "{}")
            self._skip_to(end, self.text[self.at : end])
        else:
            self._take("$")

    def _skip_to(self, end: int, instead: str) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.parts.append(instead)
        self.at = end

    def _closing(self, start: int, pair: str) -> int:
        """Place after the bracket that closes the one at `start`."""
        depth = 0
        for place in range(start, len(self.text)):
            depth += (self.text[place] == pair[0]) - (self.text[place] == pair[1])
            if depth == 0:
                return place + 1
        raise DocumentError(self.path, [Problem("", f"a bracket {pair[0]} is not closed", self.line)])

    def _after(self, start: int, mark: str, *, keep: bool = False) -> int:
        """Place after the next mark, or at it; the end of the text where there is none."""
        place = self.text.find(mark, start)
        return len(self.text) if place < 0 else place + (0 if keep else len(mark))

    def _blank(self, char: str) -> None:
        self._end_part()
        self.at += 1
        if char == "\n":
            self.line += 1
            if self.pending and not self.quote:
                self._documents()
        if not self.quote and not self.opened:
            self._end_word()
            if char == "\n":
                self._end_statement()

    def _operator(self, char: str) -> None:
        """What separates commands, begins an array, redirects."""
        before = "".join(self.parts)
        document = re.match(r"<<-?\s*\\?[\"']?(\w+)[\"']?", self.text[self.at : self.at + 80])
        if char == "(" and before.endswith("="):
            self.opened.append(self.line)
            self.at += 1
        elif self.text.startswith("((", self.at):
            end = self._closing(self.at, "()")
            self._skip_to(end, "".join(self.text[self.at : end].split()))
        elif char == ")" and self.opened:
            self.opened.pop()
            self._end_part()
            self.at += 1
        elif document and not self.text.startswith("<<<", self.at):
            self.pending.append(document[1])
            self.at += document.end()
        elif (char == "&" and before.endswith(">")) or char == "<" or self.opened:
            self._take(char)
        else:
            self._end_word()
            self._end_statement()
            self.at += 1

    def _documents(self) -> None:
        """The here-documents that begin in this line."""
        for mark in self.pending:
            end = re.compile(rf"^\t*{re.escape(mark)}$", re.MULTILINE).search(self.text, self.at)
            stop, after = (len(self.text),) * 2 if end is None else end.span()
            self.documents.append(Stated(self.text[self.at : stop], self.line))
            self.line += self.text.count("\n", self.at, after)
            self.at = after
        self.pending = []

    def _end_part(self) -> None:
        if "".join(self.parts):
            self.word.append(Stated("".join(self.parts), self.line))
        elif self.parts and not self.quote and not self.word:
            self.word.append(Stated("", self.line))
        self.parts = []

    def _end_word(self) -> None:
        self._end_part()
        if self.word:
            self.statement.append(tuple(self.word))
        self.word = []

    def _end_statement(self) -> None:
        self._end_word()
        if self.statement:
            self.found.append(tuple(self.statement))
        self.statement = []


# Evaluation of words.

_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_REFERENCE = re.compile(
    r"\$\(\((?P<sum>.*?)\)\)|\$\{(?P<braced>[^{}]*(?:\{[^{}]*\}[^{}]*)*)\}|\$(?P<name>[A-Za-z_]\w*)"
)
_BRACED = re.compile(r"([A-Za-z_]\w*|\d+)(?:\[[@*]\])?(?:(:?[-=])(.*)|[,^]{1,2})?", re.DOTALL)
_DECLARING = ("export", "declare", "local", "readonly", "typeset")
_LEADING = ("then", "else", "do", "{", "!", "time", "exec", "eval")
_TESTS: Mapping[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": lambda one, other: int(one) == int(other),
    "-ne": lambda one, other: int(one) != int(other),
    "-gt": lambda one, other: int(one) > int(other),
    "-ge": lambda one, other: int(one) >= int(other),
    "-lt": lambda one, other: int(one) < int(other),
    "-le": lambda one, other: int(one) <= int(other),
}


@dataclass
class _Branch:
    """An `if` that is open: whether its present branch runs, one has run, and the condition is being read.

    unknown: line of a condition that cannot be evaluated.
    """

    runs: bool = False
    done: bool = False
    reading: bool = True
    unknown: int = 0


@dataclass
class _Shell:
    """Variables, and the commands met."""

    variables: dict[str, Word]
    commands: list[tuple[Stated, ...]] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    branches: list[_Branch] = field(default_factory=list)

    def run(self, statement: Sequence[Word]) -> None:
        """One statement, if the branch it stands in runs."""
        words = list(statement)
        while words:
            keyword = words[0][0].value if words[0] else ""
            if keyword in ("if", "elif", "else", "fi", "then"):
                words = self._condition(keyword, words[1:])
            elif keyword in _LEADING:
                words = words[1:]
            else:
                break
        if words and all(branch.runs and not branch.reading for branch in self.branches):
            self._command(words)
        elif words and _ASSIGNED.match(words[0][0].value):
            # Other statements of a branch do not affect arguments.
            self.skipped += [branch.unknown for branch in self.branches if branch.unknown not in (0, *self.skipped)]

    def _condition(self, keyword: str, words: list[Word]) -> list[Word]:
        """Open, change or close a branch; the words that are left to run."""
        if keyword == "if":
            self.branches.append(_Branch(runs=True))
        if not self.branches:
            return words
        branch = self.branches[-1]
        if keyword == "fi":
            self.branches.pop()
        elif keyword == "then":
            branch.reading, branch.done = False, branch.done or branch.runs
        elif keyword == "else":
            branch.runs, branch.reading = not branch.done, False
        else:
            branch.reading = True
            branch.runs = not branch.done and self._holds(words, branch)
            return []
        return words

    def _holds(self, words: Sequence[Word], branch: _Branch) -> bool:
        """Whether a condition is true; one that cannot be evaluated is taken to be false, and noted."""
        parts = [self.text(" ".join(one.value for one in word), unset="") for word in words]
        tested = parts[1:-1] if parts and parts[0] in ("[", "[[") else []
        try:
            if len(tested) == 2 and tested[0] in ("-n", "-z"):
                return bool(tested[1]) == (tested[0] == "-n")
            if len(tested) == 3 and tested[1] in _TESTS and OUTPUT not in "".join(tested):
                return _TESTS[tested[1]](tested[0], tested[2])
        except ValueError:
            pass
        branch.unknown = words[0][0].line if words else 0
        return False

    def _command(self, words: Sequence[Word]) -> None:
        """Assignments, and what follows them."""
        declared = bool(words[0]) and words[0][0].value in _DECLARING
        rest = list(words[1:] if declared else words)
        while rest and (assigned := _ASSIGNED.fullmatch(rest[0][0].value)):
            first, *others = rest.pop(0)
            value = self.expanded([replace(first, value=assigned[3]), *others])
            before = self.variables.get(assigned[1], ()) if assigned[2] else ()
            self.variables[assigned[1]] = (*before, *value)
        if rest and not declared:
            found = tuple(self.expanded([part for word in rest for part in word]))
            self.commands += [found] if found else []

    def expanded(self, parts: Sequence[Stated]) -> list[Stated]:
        """Words with all references replaced; those of an array keep their own lines."""
        found: list[Stated] = []
        for part in parts:
            whole = _REFERENCE.fullmatch(part.value)
            plain = whole and re.fullmatch(r"[A-Za-z_]\w*(?:\[[@*]\])?", whole["name"] or whole["braced"] or "")
            if plain and (name := plain[0].partition("[")[0]) in self.variables:
                found += self.variables[name]
            else:
                found += [Stated(word, part.line) for word in self.text(part.value).split()]
        return found

    def text(self, text: str, *, unset: str | None = None) -> str:
        """A text with its references replaced; unset: for variables that have no value, else they stay."""
        return _REFERENCE.sub(lambda one: self._value(one, unset), text)

    def _value(self, one: re.Match[str], unset: str | None) -> str:
        if one["sum"] is not None:
            return arithmetic(self._named(self.text(one["sum"])))
        braced = None if one["braced"] is None else _BRACED.fullmatch(one["braced"])
        name = one["name"] or (braced[1] if braced else "")
        found = self.variables.get(name)
        stated = " ".join(word.value for word in found or ())
        if braced and braced[2] and not (stated if ":" in braced[2] else found is not None):
            return self.text(braced[3], unset=unset)
        if found is None or (one["braced"] is not None and braced is None):
            return one[0] if unset is None else unset
        return stated.lower() if braced and one["braced"].endswith(",") else stated

    def _named(self, expression: str) -> str:
        """An expression with names that stand without a dollar replaced."""
        values = {name: " ".join(word.value for word in words) for name, words in self.variables.items()}
        return re.sub(r"[A-Za-z_]\w*", lambda one: values.get(one[0], one[0]), expression)


_SUMS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def arithmetic(expression: str) -> str:
    """Value of an expression of whole numbers; the expression as bash has it where it is none."""
    try:
        if len(expression) > 200:
            raise ValueError
        return str(_sum(ast.parse(expression, mode="eval").body))
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return f"$(({expression}))"


def _sum(node: ast.expr) -> int:
    if isinstance(node, ast.BinOp) and type(node.op) in _SUMS:
        found = _SUMS[type(node.op)](_sum(node.left), _sum(node.right))
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        found = node.value
    else:
        raise ValueError
    if abs(found) > 2**53:
        raise ValueError
    return found
