"""Numbers of a machine profile by their path, `tiers.network.latency_us`, and what of a profile hangs on one.

In a path, items of a list go by their name, measured groups by their size. A value is replaced by `--set`, by a file
that `extends` another, by what was learned, or by a calibration; what hangs on it is then dropped, scaled, or named.
What a user states there holds as it stands; what was measured with the value that it replaces does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from axonn_tune.grid import divisors
from axonn_tune.specs.document import Document
from axonn_tune.specs.formats import FORMATS
from axonn_tune.specs.machine import LARGEST_NODE, Learned, Machine, MeasuredBandwidth, Source, Tier
from axonn_tune.specs.workload import ELEMENT_SIZES
from axonn_tune.units import rounded
from axonn_tune.vocabulary import GemmFormat

T = TypeVar("T")


def number_at(machine: Machine, path: str) -> float:
    """The number at a path; KeyError if the profile has none there."""
    found: list[float] = []

    def look(value: float) -> float:
        found.append(value)
        return value

    _changed(machine, path, look)
    if not found:
        raise KeyError(path)
    return found[0]


def has_number(machine: Machine, path: str) -> bool:
    """Whether a profile has a number at a path."""
    try:
        number_at(machine, path)
    except (KeyError, AttributeError):
        return False
    return True


def with_numbers(machine: Machine, values: Mapping[str, float]) -> Machine:
    """The profile with other numbers at some paths; limits are not checked."""
    for path, value in values.items():
        machine = with_value(machine, path, value)
    return machine


def with_value(machine: Machine, path: str, value: Any) -> Machine:  # noqa: ANN401
    """The profile with another value at a path; limits are not checked."""
    return _changed(machine, path, lambda before: value)


def scaled(machine: Machine, factors: Mapping[str, float]) -> Machine:
    """The profile with the numbers at some paths multiplied; limits are not checked.

    Bandwidths of a tier's measured groups go with the tier's own.
    """
    for path, factor in factors.items():
        for own in (path, *_measured_groups(machine, path)):
            machine = _changed(machine, own, lambda before, factor=factor: before * factor)  # type: ignore[misc]
    return machine


def _measured_groups(machine: Machine, path: str) -> list[str]:
    """Paths of a tier's measured group bandwidths."""
    return [
        f"tiers.{tier.name}.measured.{one.group}.bandwidth_gb_per_s"
        for tier in machine.tiers
        if path == f"tiers.{tier.name}.bandwidth_gb_per_s"
        for one in {one.group: one for one in tier.measured or ()}.values()
    ]


def kind_at(section: object, path: str) -> str:
    """Kind of provenance that a profile, or a section of it, gives for the number at a path, "" where it gives none."""
    if isinstance(section, tuple):
        own = next((item for item in section if path.startswith(f"{_name(item)}.")), None)
        return kind_at(own, path[len(_name(own)) + 1 :])
    word, _, rest = path.partition(".")
    sources = getattr(section, "sources", {})
    if word in sources:
        return str(sources[word].kind)
    below = section.get(word) if isinstance(section, dict) else getattr(section, word, None)
    return kind_at(below, rest) if rest else ""


def _changed(section: T, path: str, change: Callable[[float], float]) -> T:
    """A section with what lies at a path below it changed."""
    if not path:
        return change(section)  # type: ignore[arg-type, return-value]
    if isinstance(section, tuple):
        # Names of items may hold dots.
        begins = ((item, f"{_name(item)}.") for item in section)
        return tuple(  # type: ignore[return-value]
            _changed(item, path.removeprefix(own), change) if path.startswith(own) else item for item, own in begins
        )
    word, _, rest = path.partition(".")
    if isinstance(section, dict):
        return {**section, word: _changed(section[word], rest, change)} if word in section else section  # type: ignore[return-value]
    assert isinstance(section, Document), path
    below = getattr(section, word)
    return section if below is None else section.model_copy(update={word: _changed(below, rest, change)})


def _name(item: object) -> str:
    return str(getattr(item, "name", None) or getattr(item, "group", ""))


def validated(machine: Machine) -> Machine:
    """The same profile with its limits checked, which `model_copy` does not do."""
    return Machine.model_validate(machine.model_dump(by_alias=True, exclude_unset=True))


Effect = Literal["dropped", "scaled", "kept"]
Groups = tuple[MeasuredBandwidth, ...]


@dataclass(frozen=True)
class Consequence:
    """What becomes of one value since another was replaced. path: of the value, such as `tiers.nvlink.measured`."""

    path: str
    effect: Effect
    words: str
    value: object = None


def told(consequences: Iterable[Consequence], *, kept: bool) -> list[str]:
    """Consequences in words, those of one reason in a line; kept: with what is kept though it was measured with another
    value."""
    lines: dict[tuple[str, str], dict[str, list[str]]] = {}
    for one in consequences:
        if kept or one.effect != "kept":
            section, dot, key = one.path.rpartition(".")
            lines.setdefault((one.effect, one.words), {}).setdefault(section + dot, []).append(key)
    return [
        f"{', '.join(section + ', '.join(keys) for section, keys in sections.items())} {effect}: {words}"
        for (effect, words), sections in lines.items()
    ]


OTHER_LINK = 0.5
"""Share of a level's bandwidth below which its links are taken for others: PCIe for NVLink has a tenth, while one
kind of link in good and bad order differs by less than two."""

OF_THE_VALUE = {
    "peak_tflops": (
        (
            *("matmul_efficiency", "format_efficiency", "training_share"),
            *("attention_forward_efficiency", "attention_backward_efficiency"),
        ),
        "shares of the peak, measured on an accelerator with another",
    ),
    "memory_bandwidth_gb_per_s": (("memory_efficiency",), "a share of the bandwidth, measured on another memory"),
    "memory_gib": (("reserved_memory_gib",), "reserved of another size of memory, in part in proportion to it"),
}
"""Numbers of an accelerator that were measured with another of them. They are shares of it, so that they go with it;
nothing says how they change. matmul_ramp is a share, too, too small to matter."""


D = TypeVar("D", bound=Document)


def settled(before: D, after: D, stated: Set[str]) -> tuple[D, tuple[Consequence, ...]]:
    """A profile with what hangs on its replaced values dropped or scaled, and all consequences; other documents as they
    are. stated: dotted paths of what the user has given, which stays."""
    if not (isinstance(before, Machine) and isinstance(after, Machine)):
        return after, ()
    machine: Machine = after
    found = list[Consequence]()
    for rule in RULES:
        for one in [one for one in rule(before, machine) if one.path not in stated]:
            machine = machine if one.effect == "kept" else with_consequence(machine, one)
            # A value is kept for one reason.
            found += [one] if one.effect != "kept" or one.path not in (other.path for other in found) else []
    return cast(D, machine), tuple(found)


def contradiction(document: Document) -> str:
    """Why a profile's nodes are not those of its network levels, "" where they are."""
    if not isinstance(document, Machine) or len(document.tiers) == 1:
        return ""
    per_node, (inner, *_) = document.launcher.ranks_per_node, document.tiers
    rack = inner.ranks if inner.ranks is not None and inner.ranks > LARGEST_NODE else 0
    if per_node in [tier.ranks for tier in document.tiers] or (rack and rack % per_node == 0):
        return ""
    sizes = " and ".join(f"tiers.{tier.name}.ranks {tier.ranks}" for tier in document.tiers if tier.ranks)
    near = min(divisors(rack), key=lambda ranks: abs(ranks - per_node)) if rack else inner.ranks
    return (
        f"is {per_node}, but a domain has {sizes}: scripts would start other nodes than those "
        f"that are priced. Give launcher.ranks_per_node {near}, or tiers.{inner.name}.ranks {per_node}"
    )


def with_consequence(machine: Machine, one: Consequence) -> Machine:
    """The profile with one value changed, and its provenance in a section that has some."""
    machine = with_value(machine, one.path, one.value)
    names = {f"tiers.{tier.name}": tier for tier in machine.tiers} | {"accelerator": machine.accelerator}
    for name, section in names.items():
        key, *deeper = one.path.removeprefix(f"{name}.").split(".")
        if one.path.startswith(f"{name}.") and key in section.sources:
            source, words = section.sources[key], f"{one.effect}: {one.words}"
            if not deeper:
                source = Source(kind="assumed", source=words)
            elif words not in source.source:  # others of the key have it as it is
                source = source.model_copy(update={"source": f"{source.source}; others {words}"})
            machine = with_value(machine, f"{name}.sources", {**section.sources, key: source})
    return machine


def _levels(before: Machine, after: Machine) -> Iterator[tuple[int, Tier, Tier]]:
    """Network levels that both have: place among the second's, and both."""
    known = {tier.name: tier for tier in before.tiers}
    return ((at, known[tier.name], tier) for at, tier in enumerate(after.tiers) if tier.name in known)


def _of_domains(before: Machine, after: Machine) -> Iterator[Consequence]:
    """The size of a domain: NICs come with GPUs, so that each rank keeps its share; a node that is a domain stays one,
    but for racks, which are several nodes."""
    for at, old, new in _levels(before, after):
        if old.ranks is None or new.ranks is None or old.ranks == new.ranks:
            continue
        words = f"a domain of {new.name} has {new.ranks} ranks instead of {old.ranks}"
        if at + 1 < len(after.tiers):
            outer = after.tiers[at + 1]
            bandwidth = rounded(outer.bandwidth_gb_per_s * new.ranks / old.ranks)
            said = f"from {outer.bandwidth_gb_per_s:g} to {bandwidth:g} GB/s, since {words}"
            yield Consequence(f"tiers.{outer.name}.bandwidth_gb_per_s", "scaled", said, bandwidth)
        if before.launcher.ranks_per_node == old.ranks and new.ranks <= LARGEST_NODE:
            yield Consequence("launcher.ranks_per_node", "scaled", f"to {new.ranks}, since {words}", new.ranks)


def _of_nodes(before: Machine, after: Machine) -> Iterator[Consequence]:
    """The ranks of a node: options of Slurm that ask for as many GPUs."""
    old, new, slurm = before.launcher.ranks_per_node, after.launcher.ranks_per_node, after.launcher.slurm
    if slurm is None or old == new:
        return
    asks = rf"^(--(?:gpus-per-node|gres)=(?:[\w:]+:)?){old}$"
    extra = tuple(re.sub(asks, rf"\g<1>{new}", one) for one in slurm.extra)
    if extra != slurm.extra:
        yield Consequence("launcher.slurm.extra", "scaled", f"to {new} GPUs of a node instead of {old}", extra)


def _share(machine: Machine, tier: Tier) -> float:
    """What a rank has of a level's bandwidth, GB/s."""
    inner = machine.tiers[max(machine.tiers.index(tier) - 1, 0)].ranks or 1
    return tier.bandwidth_gb_per_s / (inner if tier is not machine.tiers[0] else 1)


def _of_groups(tier: Tier, left: Groups, effect: Effect, words: str) -> Iterator[Consequence]:
    if left != (tier.measured or ()):
        yield Consequence(f"tiers.{tier.name}.measured", effect, words, left)


def _of_links(before: Machine, after: Machine) -> Iterator[Consequence]:
    """The bandwidth of a level: what some groups reach of it, reductions in its switch, and fixed times of its links.

    Small groups of a slower level reach what they did, and no more than the level: what bound them need not be what is
    slower now. Of a faster one, and between nodes, where groups share the links, they keep their share. Links with less
    than half of the bandwidth have no switch that reduces.
    """
    for at, old, new in _levels(before, after):
        ratio = _share(after, new) / _share(before, old)
        was = f"{new.name} has {new.bandwidth_gb_per_s:.4g} GB/s instead of {old.bandwidth_gb_per_s:.4g}"
        groups = new.measured or ()
        if ratio > 1.0 or (at and ratio < 1.0):
            rates = ({"bandwidth_gb_per_s": rounded(one.bandwidth_gb_per_s * ratio)} for one in groups)
            left = tuple(one.model_copy(update=rate) for one, rate in zip(groups, rates, strict=True))
            yield from _of_groups(new, left, "scaled", f"times {ratio:.3g}, since {was}")
        elif ratio < 1.0:
            left = tuple(one for one in groups if one.bandwidth_gb_per_s <= new.bandwidth_gb_per_s)
            more = f"{len(groups) - len(left)} of {len(groups)} groups that would exceed it"
            yield from _of_groups(new, left, "dropped", f"{more}, since {was}")
        if at == 0 and ratio < OTHER_LINK:
            for kind, algorithms in after.library.algorithms.items():
                others = tuple(one for one in algorithms if one != "in_switch")
                if others and others != algorithms:
                    words = f"reduction in the switch (NVLS), since {was}"
                    yield Consequence(f"library.algorithms.{kind}", "dropped", words, others)
        if not OTHER_LINK <= ratio <= 1.0 / OTHER_LINK:
            fixed = (f"tiers.{new.name}.latency_us", *(() if at else ("library.launch_us", "library.protocols")))
            yield from (Consequence(path, "kept", f"of other links: {was}") for path in fixed)


def _bits(precision: GemmFormat) -> int:
    if precision == "tf32":
        return 19
    return FORMATS[precision].bits if precision in FORMATS else 8 * ELEMENT_SIZES[precision].compute


def _of_accelerators(before: Machine, after: Machine) -> Iterator[Consequence]:
    """The peak of a format: of others as wide, and of all that are not stated where it is that of 16 bits, since they
    run on the same units at the same clock. Without tensor cores likewise. Shares are named, and all numbers of an
    accelerator that has another name."""
    old, new = before.accelerator, after.accelerator
    ratios = {name: new.peak_tflops[name] / peak for name, peak in old.peak_tflops.items() if name in new.peak_tflops}
    by_bits = {_bits(name): (name, ratio) for name, ratio in ratios.items() if ratio != 1.0}
    for key in ("peak_tflops", "vector_tflops"):
        for name, peak in (getattr(new, key) or {}).items():
            by, ratio = by_bits.get(_bits(name)) or by_bits.get(16) or (name, 1.0)
            if (getattr(old, key) or {}).get(name) == peak and ratio != 1.0:
                words = f"times {ratio:.3g}, as that of {by}"
                yield Consequence(f"accelerator.{key}.{name}", "scaled", words, rounded(peak * ratio))
    differing = {key: getattr(old, key) != getattr(new, key) for key in type(new).model_fields}
    differing |= {"peak_tflops": 16 in by_bits, "vector_tflops": bool(by_bits)}
    for key, (shares, words) in OF_THE_VALUE.items():
        for share in shares if differing[key] else ():
            if not differing[share]:
                yield Consequence(f"accelerator.{share}", "kept", words)
    if differing["name"]:
        for key in (key for key in differing if key in new.model_fields_set and key not in ("name", "sources")):
            if not differing[key] and getattr(new, key) is not None:
                yield Consequence(f"accelerator.{key}", "kept", f"that of {old.name}, where this is {new.name}")


def _of_the_paper(before: Machine, after: Machine) -> Iterator[Consequence]:
    """Any level: the paper's own table of bandwidths, which has none of the levels' numbers."""
    changed = [new.name for _, old, new in _levels(before, after) if old != new]
    if changed and after.paper is not None and after.paper == before.paper:
        yield Consequence("paper", "dropped", f"the paper's bandwidths are of another {changed[0]}")


def _of_what_was_learned(before: Machine, after: Machine) -> Iterator[Consequence]:
    """A learned number: its spread and what it has in common with others were those of the value that it had; it is as
    uncertain as before it was learned."""
    learned = after.learned
    if learned is None or learned != before.learned:
        return
    numbers = list(learned.numbers)
    for at, one in enumerate(numbers):
        if has_number(before, one.path) and has_number(after, one.path):
            value = number_at(after, one.path)
            if value != number_at(before, one.path):
                update = {"prior": value, "value": value, "spread": one.prior_spread, "moved_by": ()}
                numbers[at] = one.model_copy(update=update)
    moved = [one != was for one, was in zip(numbers, learned.numbers, strict=True)]
    if any(moved):
        rows = enumerate(learned.correlations)
        correlations = tuple(
            tuple(0.0 if moved[i] or moved[j] else own for j, own in enumerate(row)) for i, row in rows
        )
        names = ", ".join(one.path for one, is_moved in zip(numbers, moved, strict=True) if is_moved)
        update = {"numbers": tuple(numbers), "correlations": correlations}
        found: Learned = learned.model_copy(update=update)
        yield Consequence("learned", "dropped", f"the spread that was learned of {names}", found)


RULES: tuple[Callable[[Machine, Machine], Iterator[Consequence]], ...] = (
    _of_domains,
    _of_nodes,
    _of_links,
    _of_accelerators,
    _of_the_paper,
    _of_what_was_learned,
)
"""In their order: a later one sees what earlier ones changed."""
