"""Pipeline layouts: which layers each model part has, read from and written as Megatron-Core's texts.

Megatron-Core's `--pipeline-model-parallel-layout` has a letter for each layer: E the embedding, t a decoder layer, m an
MTP layer, L the LM head with its loss. `|` ends a part; chunk c of stage s is part c·p + s of p stages. `x*n` repeats a
letter or `|`, `(...)*n` a group; commas mean nothing. Config files may have a list of lists of names instead. Grammar
and constraints: NVIDIA/Megatron-LM@d98e8a64, core/transformer/pipeline_parallel_layer_layout.py (`parse_str_to_list`,
`validate_layer_layout`). Imports nothing but errors, as the options of the command line do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from axonn_tune.errors import UsageError, suggest

LONGEST = 5_000
"""Longest layout, in characters, as given and with repeats written out; that of 126 layers in 64 parts has some 200."""
_SHOWN = 80
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
_REPEATS = (r"\(([^)]+)\)\*([0-9]+)", r"(.)\*([0-9]+)")
"""Repeats of groups, then of letters, each written out once from left to right: groups hold no groups."""


class PipelineLayout(NamedTuple):
    """Decoder layers of each model part, MTP layers, and the part that has them all; None without any."""

    parts: tuple[int, ...]
    mtp: int = 0
    mtp_part: int | None = None


def layout_text(parts: Sequence[int], mtp: int = 0, mtp_part: int | None = None) -> str:
    """The text of a layout, `Et*3|(t*2|)*2t*2L`; MTP layers in the last part unless another is given."""
    texts = [f"t*{count}" if count else "" for count in parts]
    if mtp:
        texts[len(texts) - 1 if mtp_part is None else mtp_part] += "m" * mtp
    texts[0] = f"E{texts[0]}"
    texts[-1] += "L"
    runs = [(text, len([*same])) for text, same in groupby(texts[1:-1])]
    inner = "".join(f"({text}|)*{count}" if count > 1 else f"{text}|" for text, count in runs)
    return f"{texts[0]}|{inner}{texts[-1]}" if len(texts) > 1 else texts[0]


def parse_layout(
    layout: str, *, stages: int | None = None, layers: int | None = None, mtp: int | None = None
) -> PipelineLayout:
    """What a layout says; UsageError with the place and the nearest valid layout for what Megatron-Core refuses.

    stages, layers, mtp: of the run and its model; None: not known, so what depends on them is not checked.
    """
    rows = _rows(layout)
    wrong = next((words for broken, words in _constraints(rows, stages, layers, mtp) if broken), "")
    if wrong:
        raise _error(layout, f"{wrong}; nearest valid: {_nearest(rows, stages, layers, mtp)}")
    held = [row.count("m") for row in rows]
    place = next((part for part, count in enumerate(held) if count), None)
    return PipelineLayout(tuple(row.count("t") for row in rows), sum(held), place)


def _error(layout: str, words: str) -> UsageError:
    return UsageError(f"pipeline layout {_short(layout)!r}: {words}")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _rows(layout: str) -> list[str]:
    """Letters of each part; UsageError for other names in a list, and for what is too long."""
    if len(layout) > LONGEST:
        raise _error(layout, f"has {len(layout):,} characters; up to {LONGEST:,} are read")
    if layout.startswith("["):
        return _listed(layout)
    text = layout.replace(",", "")
    for pattern in _REPEATS:
        length = len(text)
        for one in re.finditer(pattern, text):
            length += len(one[1]) * (int(one[2]) if len(one[2]) <= len(str(LONGEST)) else LONGEST)
            if length > LONGEST:
                raise _error(layout, f"{_short(one[0])!r} is more than {LONGEST:,} characters when written out")
        text = re.sub(pattern, lambda one: one[1] * int(one[2]), text)
    return text.split("|")


def _listed(layout: str) -> list[str]:
    """Letters of each part of a list of lists of names, `[[embedding, decoder], [loss]]`."""
    names = re.sub(r"[\s\"']", "", layout)
    if not re.fullmatch(r"\[\[[^][]*\](,\[[^][]*\])*,?\]", names):
        raise _error(layout, "is no list with a list of layers for each part, [[embedding, decoder], [loss]]")
    rows = [row.lower().strip(",").split(",") for row in re.findall(r"\[([^][]*)\]", names)]
    for part, name in ((part, name) for part, row in enumerate(rows, 1) for name in row if name):
        if name not in _LETTERS:
            known = ", ".join(_LETTERS)
            raise _error(layout, f"{name!r} in part {part} is no layer{suggest(name, _LETTERS)}; known: {known}")
    return ["".join(_LETTERS[name] for name in row if name) for row in rows]


def _constraints(
    rows: Sequence[str], stages: int | None, layers: int | None, mtp: int | None
) -> Iterator[tuple[bool, str]]:
    """Megatron-Core's constraints in its order: whether each is broken, and where.

    Stricter in one: it takes empty parts before E and after L, but builds the embedding on the first and the loss on
    the last part whatever the layout says (training/training.py, pre_process).
    """
    for part, row in enumerate(rows, 1):
        other = next((letter for letter in row if letter not in _LETTERS.values()), "")
        known = ", ".join(f"{letter} {name}" for name, letter in _LETTERS.items())
        yield other != "", f"{other!r} in part {part} is no layer: {known}, as in Et*4|t*4L"
    yield len(rows) % (stages or 1) > 0, f"{stages} stages do not divide its {len(rows)} parts"
    yield not rows[0].startswith("E"), f"part 1 is {_short(rows[0])!r}: it must begin with E, the embedding"
    yield not rows[-1].endswith("L"), f"part {len(rows)} is {_short(rows[-1])!r}: it must end with L, the loss"
    for letter in "EL":
        found = [part for part, row in enumerate(rows, 1) for each in row if each == letter]
        yield len(found) > 1, f"{letter} is in parts {found}, where one is needed"
    decoders = sum(row.count("t") for row in rows)
    yield decoders != (decoders if layers is None else layers), f"has {decoders} decoder layers; the model has {layers}"
    held = [part for part, row in enumerate(rows) for each in row if each == "m"]
    yield len(held) != (len(held) if mtp is None else mtp), f"has {len(held)} MTP layers; the model has {mtp}"
    if held:
        first, last = held[0], len(rows) - (stages or len(rows))
        late = "t" in "".join(rows).partition("m")[2]
        yield late, f"part {first + 1} has an MTP layer, and a decoder layer comes after it"
        yield first < last, f"part {first + 1} has an MTP layer; parts {last + 1} to {len(rows)}, last of a stage, can"
        yield first != held[-1], f"parts {first + 1} and {held[-1] + 1} have MTP layers, which must be in one part"


def _nearest(rows: Sequence[str], stages: int | None, layers: int | None, mtp: int | None) -> str:
    """The text of as many parts, or as stages divide, with as many layers as the model has, in the same proportions."""
    parts, least = [row.lower().count("t") for row in rows], len(rows) // (stages or 1) * (stages or 1)
    if least < len(rows) or not sum(parts):
        possible = [count for count in (least, least + (stages or 1)) if count]
        parts = [1] * min(possible, key=lambda count: abs(count - len(rows)))
    total = sum(parts) if layers is None else layers
    ends = [round(total * end / sum(parts)) for end in accumulate(parts, initial=0)]
    held = sum(row.count("m") for row in rows) if mtp is None else mtp
    return layout_text([end - start for start, end in pairwise(ends)], mtp=held)
