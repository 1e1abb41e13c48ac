"""Options by the names of training frameworks: `tp`, `dp_shard`, `tensor_model_parallel_size`.

`Framework.names` has the short names of a framework's axes; the long ones, which are options of the framework's own
command line, are those of its table of arguments (`frameworks.keys`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from axonn_tune.errors import UsageError
from axonn_tune.frameworks import find_framework, registry
from axonn_tune.frameworks.axonn_tune import AXONN_TUNE
from axonn_tune.frameworks.description import Framework
from axonn_tune.frameworks.keys import Key, find, keys_of, table
from axonn_tune.request import OPTIONS, flag
from axonn_tune.vocabulary import LARGEST_SIZE

SHARED = {name: ours for ours, option in OPTIONS.items() for name in option.also}
"""Common names of options that are not axes, and ours."""

WEIGHT_SHARDS = {
    "z": ("tensor_parallel_num_weight_shards", "x"),
    "expert_z": ("expert_tensor_parallel_num_weight_shards", "expert_tensor"),
}
"""Megatron-Core's options of GTP and of EGTP, whose value is that of another axis times it."""

ADVICE = {name: key.why for key in table("options") for name in (key.name, *key.also)}
"""Answers to options of other tools that have no axis here."""

OPTIMIZER = "optimizer"
"""Field of the table `unpriced` whose arguments name one."""

PRICED = "axonn-tune prices training of all weights in 16 or 32 bits, LoRA, QLoRA and DoRA"


def unpriced(written: str) -> Key | None:
    """The key of an argument, column or option that no framework is priced with; dashes count as underscores."""
    return find(written.lstrip("-+").replace("-", "_").lower(), ("unpriced",))


def has_optimizer(written: str, value: str) -> bool:
    """Whether an argument names an optimizer that some framework is priced with, by the row of that one."""
    name = written.lstrip("-+").replace("-", "_").lower()
    keys = keys_of("step.optimizer")
    return any(
        key.is_silent(value) for key in keys if f".{name}".endswith(tuple(f".{one}" for one in (key.name, *key.also)))
    )


def has_adapters(written: str, value: str) -> bool:
    """Whether an argument of a Trainer states what adapters are like, or that they train, and is priced."""
    key = find(written.lstrip("-+").replace("-", "_").lower(), ("adapters",))
    return key is not None and (key.status != "refused" or key.is_silent(value))


def why_unpriced(written: str) -> str:
    """Why an option, column or fact is not priced, and what is; "" for any other name."""
    if (key := unpriced(written)) is None:
        return ""
    return f"{'the optimizer ' * key.why.startswith('is ')}{key.why}. {PRICED}: leave it out"


def _long() -> Mapping[str, str]:
    """Options of a framework's command line that set an axis, and its short name there."""
    return _long_of(tuple(one.name for one in registry().values() if one.keys))


@cache
def _long_of(own: tuple[str, ...]) -> Mapping[str, str]:
    """The same; own: frameworks that have a table of their own."""
    owners = {"megatron": "megatron-core", "torchtitan": "torchtitan", "megatron_axonn": "megatron-axonn"}
    owners |= {name: name for name in own}
    short = {name: find_framework(owner).names for name, owner in owners.items()}
    every = (
        (key, short[name], {"replicas": "data"}.get(key.field, key.field)) for name in owners for key in table(name)
    )
    return {key.name: names[axis] for key, names, axis in every if axis in names}


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
            raise UsageError(f"{flag(name)} and {flag(other)} are two names of one option: give one")
        called[ours] = name
        found[ours] = value if name in SHARED else _size(name, value)
    for axis, (option, split) in WEIGHT_SHARDS.items():
        if called.get(axis) != option:
            continue
        first, second = framework.called(split), framework.called(axis)
        shards, tensor = found[axis], _size(first.lower(), found.get(split, others.get(split)))
        product = f"{flag(option)} {shards} is {first} times {second}"
        if tensor is None:
            raise UsageError(f"{product}: give {framework.option(split)} too, or {framework.option(axis)} N instead")
        if shards % tensor:
            raise UsageError(f"{product}, and not divisible by {first} = {tensor}")
        found[axis] = shards // tensor
    return found


def _axis(framework: Framework, name: str) -> str | None:
    """The axis, or `chunks`, that a framework calls so in its own words."""
    short = _long().get(name, name)
    known = framework.names.values() if name in _long() else map(str.lower, framework.names.values())
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
    if axis not in (*framework.columns, *framework.expert_axes):
        has = ", ".join(map(framework.called, framework.columns))
        advice = "" if asked else f"; give {elsewhere}"
        return f"{flag(name)} is {whose} name of {what}, which {framework.title} does not have; it has {has}{advice}"
    if framework.names:
        here = f"what {framework.title} calls {framework.called(axis)}"
        return f"{flag(name)} is {whose} name of {here}: {framework.option(axis)} N"
    return f"{flag(name)} is {whose} name of {what}: {framework.option(axis)} {value or 'N'}, or {elsewhere}"


def _size(name: str, value: Any) -> Any:  # noqa: ANN401 - a number, or text of one
    """A size as a number; what is no text is left to those who take it."""
    if isinstance(value, str) and not (value.isascii() and value.isdecimal() and 0 < int(value[:12]) <= LARGEST_SIZE):
        raise UsageError(f"{flag(name)} needs a whole number from 1 to {LARGEST_SIZE:,}, got {value!r}")
    return int(value) if isinstance(value, str) else value
