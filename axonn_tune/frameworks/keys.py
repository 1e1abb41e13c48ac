"""Arguments of training frameworks and what each means here: tables under `arguments/`, one a framework.

An argument is `modelled`, `refused`, `ignored` (with the reason, which is printed) or `harmless`; one in no table is
unknown. `options` has answers to options of other tools that have no axis here, `presets` what config functions of
torchtitan 0.3.0 set (models/llama3/config_registry.py), `frameworks` whose programs and arguments are, `unpriced` what
is priced of no framework, `tools` files that are not read, `tokenizers` sizes of
vocabularies. Names are written with underscores and may have sections
(`zero_optimization.stage`). Scripts, config files, logs and options are read, and commands are written, by these
tables; a framework can have its table beside its description (`Framework.keys`).
"""

from __future__ import annotations

import csv
import re
from ast import literal_eval
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as field_
from functools import cache, lru_cache
from importlib.resources import files
from operator import itemgetter
from typing import Any, TypeAlias

from axonn_tune.errors import edits, nearest, suggest
from axonn_tune.frameworks import registry
from axonn_tune.vocabulary import LARGEST_SIZE

OFF = frozenset({"false", "0", "no", "off", "none", "null", "", "auto", "[]"})
"""Values that leave an argument to its framework."""
_ON = frozenset({"true", "1", "yes", "on"})


@dataclass(frozen=True)
class Stated:
    """A stated value and its line (from 1): the text of an argument, or what it means.

    file: that of the line where another file names it.
    """

    value: Any
    line: int
    file: str = ""


Arguments: TypeAlias = Mapping[str, Stated]
NOTHING = Stated("", 0)


def is_on(stated: Stated) -> bool:
    """Whether a switch is on."""
    return stated.value.lower() in _ON


def is_off(stated: Stated) -> bool:
    """Whether a switch is off."""
    return stated.value.lower() in OFF


@dataclass(frozen=True)
class Key:
    """An argument.

    also: its other names; where it is not modelled also other arguments with the same answer. `*` is any text. field:
    what it states, the first stated of a field counts: an axis or a size by our name, `step.NAME` an option of the
    step, `experts.NAME` a size of a part of layers, `gradients.NAME` what functions of this name read (`statements`);
    `NAME=VALUE`: a switch that sets this value. default: the framework's, said where it is assumed; `off`: a switch
    that is mentioned where it is on alone. plain: values that are priced, if not all are; meanings: what those written
    `WORD=MEANING` mean. why: the reason why it is ignored or refused, or where another argument decides, or what
    stands beside it where a command has it. range: what the framework takes, the first of several as the nearest: `1-`
    and `0-3` whole numbers, `0..1`, `>0` and `<0` numbers, `list` several of them, `switch` true or false, else words.
    """

    name: str
    also: tuple[str, ...]
    field: str
    default: str
    plain: frozenset[str]
    status: str
    why: str
    range: tuple[str, ...] = ()
    sets: str = ""
    meanings: Mapping[str, str] = field_(default_factory=dict)

    def read(self, text: str) -> Any:  # noqa: ANN401 - what it means
        """What a value means: a switch, a number, a word; None for one that says nothing."""
        word = text.lower().replace(",", "").replace("_", "" if text[:1].isdecimal() else "_")
        if self.range == ("switch",):
            on = word in _ON
            return (literal_eval(self.sets) if on else None) if self.sets else on is not self.is_opposite
        if any(re.fullmatch(r"\d+-\d*", one) for one in self.range):
            return int(float(word)) if re.fullmatch(r"[0-9]{1,15}(?:\.0*)?", word) else None
        if any(one[0] in "<>" for one in self.range):
            return float(word) if _fits(word, ">0") else None
        if shares := [one for one in self.range if ".." in one]:
            return text if any(_fits(word, one) for one in shares) else None
        return self.meanings.get(word) if self.meanings else text

    def write(self, value: Any) -> Any:  # noqa: ANN401 - of any field
        """The value that means this, the inverse of `read`; None where none does."""
        if self.sets:
            return True if value == literal_eval(self.sets) else None
        if isinstance(value, bool):
            return value is not self.is_opposite
        return next((word for word, one in self.meanings.items() if one == value), None if self.meanings else value)

    @property
    def is_opposite(self) -> bool:
        """Whether it is a switch of what its field is without."""
        return self.name.rpartition(".")[2].startswith(("no_", "disable_", "untie_"))

    @property
    def is_read(self) -> bool:
        """Whether it states a field that arguments are read into; the launcher's numbers are read by their names."""
        return self.field != "" and self.status != "harmless"

    def is_silent(self, value: str) -> bool:
        """Whether nothing is to be said about this value."""
        text = value.lower()
        if self.status == "harmless" or (self.status == "modelled" and not self.plain):
            return True
        # Where words mean something, "none" is one of them.
        if self.default == "True" or (text in OFF and not self.meanings):
            return (text not in OFF) == (self.default == "True")
        return all(word in self.plain | {self.default.lower()} for word in re.findall(r"[\w.+-]+", text))

    def refusal(self, value: str) -> str:
        """Why a value is refused, with the nearest one that is priced."""
        near = nearest(value.lower(), self.meanings)
        return f"{self.why}; nearest: {near}" if near else self.why

    def misfit(self, value: str, *, typed: bool = False) -> str:
        """What a value of another kind must be, with the nearest word; "" for one inside, and for none at all.

        typed: on a command line, where `null` is a value as any other.
        """
        several = "list" in self.range
        parts = re.split(r"[\s,()\[\]'\"]+", value.strip("()[]'\" ")) if several else [value.strip()]
        ranges = [one for one in self.range if one != "list"]
        unset = _UNSET[: -1 if typed else None]
        if ranges and all(part.lower() in unset or any(_fits(part, one) for one in ranges) for part in parts):
            return ""
        nothing = (value == "[]" and not several) or (typed and value.lower() == "null")
        if not ranges and not nothing:
            return ""
        words = [one for one in ranges if one[0].isalpha() and one != "switch"]
        wanted = [_in_words(one) for one in ranges if one not in words]
        return (", or ".join(filter(None, (", ".join(words), *wanted))) or "one value") + suggest(value.lower(), words)


SWITCH = Key("", (), "", "", frozenset(), "modelled", "", ("switch",))
"""What is true or false."""
_UNSET = ("", "none", "auto", "null")
_ON_OR_OFF = ("true", "false", "1", "0", "yes", "no", "on", "off")


def _fits(value: str, range_: str) -> bool:
    """Whether a value lies in one of the ranges of an argument; digits are 0 to 9."""
    if whole := re.fullmatch(r"(\d+)-(\d*)", range_):
        plain = re.fullmatch(r"([0-9]{1,15})(?:\.0*)?", value.replace(",", "").replace("_", ""))
        return plain is not None and int(whole[1]) <= int(plain[1]) <= int(whole[2] or LARGEST_SIZE)
    if range_ == "switch":
        return value.lower() in _ON_OR_OFF
    if not (bounds := re.fullmatch(r"([<>]|\d+\.\.)(\d*)", range_)):
        return value.lower() == range_
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,2})?", value.lower()):
        return False
    number, beyond = float(value), float(bounds[2] or "inf")
    if bounds[1] in "<>":
        return number < beyond if bounds[1] == "<" else number > beyond
    return float(bounds[1].rstrip(".")) <= number <= beyond and number < float("inf")


def _in_words(range_: str) -> str:
    """A range as a message has it."""
    if range_ == "switch":
        return "true or false"
    if whole := re.fullmatch(r"(\d+)-(\d*)", range_):
        return f"a whole number from {whole[1]} to {int(whole[2] or LARGEST_SIZE):,}"
    if range_[0] in "<>":
        return f"a number {'above' if range_[0] == '>' else 'below'} {range_[1:]}"
    least, between, most = range_.partition("..")
    return f"a number from {least} {f'to {most}' if most else 'up'}" if between else range_


@cache
def records(name: str) -> tuple[Mapping[str, str], ...]:
    """The lines of `arguments/NAME.csv`, or of the `keys` of a framework that has a table of its own."""
    file = files("axonn_tune.frameworks").joinpath("arguments", f"{name}.csv")
    text = file.read_text(encoding="utf-8") if file.is_file() else registry()[name].keys
    return tuple(csv.DictReader(text.splitlines()))


@cache
def table(name: str) -> tuple[Key, ...]:
    """The keys of a table."""
    return tuple(map(_key, records(name)))


def _key(record: Mapping[str, str]) -> Key:
    field, _, sets = record["field"].partition("=")
    words = dict(one.lower().partition("=")[::2] for one in record["plain"].split())
    meanings = {word: meant or word for word, meant in words.items()} if "=" in record["plain"] else {}
    found = (field, record["default"], frozenset(words), record["status"], record["why"], _range(record), sets)
    return Key(record["key"], tuple(record["also"].split()), *found, meanings)


def _range(record: Mapping[str, str]) -> tuple[str, ...]:
    """The range of an argument as a table has it: `plain` for its plain values, `switch` where its default is one."""
    stated = record.get("range") or ""
    switch = record["status"] == "modelled" and record["default"] in ("True", "False", "off")
    return tuple((record["plain"].lower() if stated == "plain" else stated).split()) or ("switch",) * switch


_TRAINERS = ("llamafactory", "axolotl", "swift", "trl", "adapters")
_CORE, _TITAN = (("megatron",), ("nemo", "megatron_deepspeed")), (("torchtitan",), ())
TABLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("megatron-core", "megatron-2022", "primus"), _CORE),
    "megatron bridge": (_CORE[0], (*_CORE[1], "adapters")),
    "megatron sft": (_CORE[0], (*_CORE[1], "swift", "adapters")),
    "megatron-axonn": (("megatron_axonn", "megatron"), ()),
    "megatron-deepspeed": (("megatron", "megatron_deepspeed"), ("deepspeed",)),
    "nemo": (("nemo",), ("megatron",)),
    **dict.fromkeys(("torchtitan", "torchtitan-eager"), _TITAN),
    "deepspeed": (("deepspeed",), ("megatron_deepspeed", "megatron", "accelerate", "trainer", *_TRAINERS)),
    "fsdp": (("accelerate",), ("deepspeed", "trainer", *_TRAINERS)),
}
"""Tables of a framework's own arguments, whose defaults hold, and of others that its files may state."""

TRANSLATED = ("torchtune", "nemo_rl", "nemo_rl_megatron", "verl", "verl_megatron", "verl_fsdp_sft")
"""Tables of tools whose arguments are read by the common names that they stand for; no other files have them. Those of
runs by Megatron-Core have its arguments, too, in sections of their own."""
TABLES |= {name: ((name,), ("megatron",) if name.endswith("_megatron") else ()) for name in TRANSLATED}

_OTHERS = ("launchers", "logs", "unpriced")
SHIPPED = (
    *("logs", "megatron_axonn", "nemo", "megatron", "megatron_deepspeed", "torchtitan", "deepspeed", "accelerate"),
    *("llamafactory", "trainer", "axolotl", "swift", "trl", "adapters", "launchers"),
)


def all_tables() -> tuple[str, ...]:
    """Every table, those of frameworks that have their own first."""
    return (*(one.name for one in registry().values() if one.keys), *SHIPPED)


def tables_of(framework: str) -> tuple[str, ...]:
    """Tables in which arguments of a framework's command line and files are looked up; all for other frameworks."""
    own, others = own_tables(framework), TABLES.get(framework, ((), ()))[1]
    return (*own, *others, *_OTHERS) if own else all_tables()


def own_tables(framework: str) -> tuple[str, ...]:
    """Tables of a framework's own arguments, whose defaults hold."""
    if framework in TABLES:
        return TABLES[framework][0]
    return (framework,) if framework in registry() and registry()[framework].keys else ()


def defaults_of(framework: str) -> Iterator[Key]:
    """Modelled arguments whose default is said where it is assumed: the first of each field."""
    keys = [key for name in own_tables(framework) for key in table(name)]
    first = {key.field: key for key in reversed(keys)}
    return (key for key in first.values() if key.status == "modelled" and key.default not in ("", "off"))


@cache
def _index(tables: tuple[str, ...]) -> tuple[dict[str, Key], dict[str, Key], re.Pattern[str]]:
    """Keys by name and by pattern, and all patterns in one."""
    keys = [key for name in tables for key in table(name)]
    named = {name: key for key in reversed(keys) for name in (key.name, *key.also)}
    patterns = {name: named[name] for name in reversed(named) if "*" in name}
    # Below a section is all of it.
    texts = (re.escape(pattern).replace(r"\.\*", r"\..*").replace(r"\*", "[^.]*") for pattern in patterns)
    return named, patterns, re.compile("|".join(f"({text})" for text in texts) or r"(?!)")


def named(name: str, tables: tuple[str, ...] = ()) -> Key | None:
    """The argument that has this name in full; without tables, of any."""
    return _index(tables or all_tables())[0].get(name)


def misplaced(name: str, value: str, tables: tuple[str, ...], tool: str) -> str:
    """Why a name lies below an argument of one value, or has a value where a tool has a section; "" for others."""

    def has_keys(section: str, where: tuple[str, ...]) -> bool:
        return any(one.startswith(f"{section}.") for one in _index(where)[0])

    sections = name.split(".")
    for end in range(1, len(sections)):
        above = named(".".join(sections[:end]), tables)
        if above is not None and above.range and not has_keys(above.name, tables):
            return f"{above.name} has one value, which is {above.misfit('{}')}"
    section = tool in TRANSLATED and find(name, tables) is None and has_keys(name, (tool,))
    return f"is {value!r:.80}, not a section of keys" if section and value.lower() not in OFF else ""


def find(name: str, tables: tuple[str, ...] = ()) -> Key | None:
    """The argument of this name: that of its longest end that a table has, and there rather by name than by pattern."""
    return lookup(name, tables or all_tables())


@lru_cache(maxsize=1 << 14)
def lookup(name: str, tables: tuple[str, ...]) -> Key | None:
    """`find` in these tables; remembered."""
    exact, patterns, every = _index(tables)
    parts = name.split(".")
    for at in range(max(0, len(parts) - 4), len(parts)):
        end = ".".join(parts[at:])
        if end in exact:
            return exact[end]
        if found := every.fullmatch(end):
            return list(patterns.values())[(found.lastindex or 1) - 1]
    return None


_MISTAKES = ((20, 3), (8, 2), (4, 1), (0, 0))
"""Typing mistakes in a name that is another one misspelt, by its least length: shorter ones are other words."""


@lru_cache(maxsize=1 << 10)
def misspelt(name: str, tables: tuple[str, ...]) -> str:
    """The argument that a name means which no table has but by a pattern, "" for none: one with typing mistakes, or the
    only one that begins with it, if it is more than a word.

    Only arguments of which something is read, or said where they are stated.
    """
    exact, _, _ = _index(tables)
    parts = name.split(".")
    ends = {len(parts) - at: ".".join(parts[at:]) for at in range(max(0, len(parts) - 4), len(parts))}
    if any({end, switched_on(end)} & exact.keys() for end in ends.values()):
        return ""
    found = []
    for one, key in exact.items():
        end = ends.get(one.count(".") + 1)
        elsewhere = find(one)
        told = key.field or key.status != "harmless" or (elsewhere and elsewhere.is_read)
        if "*" in one or end is None or not told:
            continue
        most = next(number for least, number in _MISTAKES if min(len(one), len(end)) >= least)
        if (mistakes := edits(one, end, most)) <= most:
            found.append((mistakes, -one.count("."), one))
    return min(found, default=(0, 0, ""))[2] or ("_" in name and _begun(name, tables)) or ""


def _begun(name: str, tables: tuple[str, ...]) -> str:
    """The argument that is read, and is the only one whose name begins so; "" without one."""
    exact = _index(tables)[0]
    found = [one for one in exact if one.startswith(name) and "*" not in one]
    only = len({exact[one].name for one in found}) == 1
    return found[0] if only and exact[found[0]].field else ""


ABBREVIATING = {"launchers": "its launcher", "accelerate": "Hugging Face's parser", "trainer": "Hugging Face's parser"}
"""Tables whose parsers take the start of a name for the only argument that begins so, as argparse does by default:
torchrun's, DeepSpeed's launcher's and transformers' (hf_argparser.py). Megatron-LM's, Megatron-DeepSpeed's and AxoNN's
are made with allow_abbrev=False (megatron/training/arguments.py), and tyro, torchtitan's, is so, too."""


def in_full(name: str, framework: str) -> tuple[str, str]:
    """The argument that a name without a key abbreviates, and whose parser takes it; empty where none does."""
    tables = tables_of(framework)
    if "_" not in name or "." in name or find(name, tables) is not None:
        return "", ""
    found = ((_begun(name, (one,)), parser) for one, parser in ABBREVIATING.items() if one in tables)
    return next((one for one in found if one[0]), ("", ""))


def switched_on(name: str) -> str:
    """The argument that `no_NAME` or `disable_NAME` switches off."""
    return re.sub(r"(^|\.)(no|disable)_(?=[^.]*$)", r"\1", name)


def names_of(field: str) -> tuple[str, ...]:
    """Arguments that state a field, in the order in which they count."""
    return tuple(dict.fromkeys(key.name for key in keys_of(field)))


def keys_of(field: str) -> tuple[Key, ...]:
    """The same with all that a table has of them."""
    return _by_field(all_tables()).get(field, ())


def meaning_of(field: str, stated: Arguments) -> Stated | None:
    """What the first stated argument of a field means, of switches the first that is on."""
    found = [
        (key.range == ("switch",) and not is_on(stated[key.name]), Stated(meant, stated[key.name].line))
        for key in keys_of(field)
        if key.name in stated and (meant := key.read(stated[key.name].value)) is not None
    ]
    return min(found, key=itemgetter(0), default=(False, None))[1]


def step_keys(*tables: str) -> dict[str, Key]:
    """Options of a step that arguments of these tables, or of all, state one by one, each with its first argument."""
    found = _by_field(tables or all_tables()).items()
    return {field.removeprefix("step."): keys[0] for field, keys in found if field.startswith("step.")}


@cache
def _by_field(tables: tuple[str, ...]) -> dict[str, tuple[Key, ...]]:
    found: dict[str, list[Key]] = {}
    for key in (key for name in tables for key in table(name)):
        found.setdefault(key.field, []).append(key)
    return {field: tuple(keys) for field, keys in found.items()}
