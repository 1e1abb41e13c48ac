"""Merges a document that says `extends` over the document it builds on."""

from __future__ import annotations

from collections.abc import Iterator

from axonn_tune.specs.yaml_reader import Location, Node


def merge(base: Node, own: Node) -> Node:
    """Lay `own` over `base`.

    Mappings merge key by key. Lists whose items all have a name merge by name, new names after the
    old ones; other lists, and everything else, are replaced. A key set to null takes the
    `sources` entry of the number it removes with it.
    """
    if isinstance(base.value, dict) and isinstance(own.value, dict):
        return Node(_merge_mappings(base.value, own.value), own.place)
    names = _names(base), _names(own)
    if names[0] and names[1]:
        items = dict(names[0])
        for name, item in names[1].items():
            items[name] = merge(items[name], item) if name in items else item
        return Node(tuple(items.values()), own.place)
    return own


def _merge_mappings(base: dict[str, Node], own: dict[str, Node]) -> dict[str, Node]:
    merged = dict(base)
    for key, value in own.items():
        merged[key] = merge(base[key], value) if key in base else value
    if "sources" in merged:
        removed = {key for key, value in own.items() if value.value is None}
        merged["sources"] = _merge_sources(merged["sources"], own.get("sources"), removed=removed)
    return merged


def _merge_sources(merged: Node, own: Node | None, *, removed: set[str]) -> Node:
    """Provenance after merging: entries are taken whole, since the kind of an old one need not fit a new source."""
    restated = own.mapping() if own is not None else {}
    entries = {key: restated.get(key, value) for key, value in merged.mapping().items() if key not in removed}
    return Node(entries, merged.place)


def _names(node: Node) -> dict[str, Node]:
    """Items of a list by name; empty unless this is a list whose items all have different names."""
    if not isinstance(node.value, tuple):
        return {}
    named = {name: item for item in node.value if (name := item.name()) is not None}
    return named if len(named) == len(node.value) else {}


def stale_sources(base: Node, own: Node, *, location: Location = ()) -> Iterator[tuple[Location, str]]:
    """Numbers that `own` changes while it leaves the provenance that `base` gives for them in place.

    Yields the location in `own` and what to add. A machine's sections keep provenance per number in
    `sources`, a model keeps one `source` for its sizes.
    """
    if _names(base) and isinstance(own.value, tuple):
        inherited = _names(base)
        for index, item in enumerate(own.value):
            if (name := item.name()) in inherited:
                yield from stale_sources(inherited[name], item, location=(*location, index))
        return
    before, after = base.mapping(), own.mapping()
    sourced = before["sources"].mapping().keys() if "sources" in before else set()
    restated = after["sources"].mapping().keys() if "sources" in after else set()
    for key, value in after.items():
        if key not in before or key == "sources" or not _changes(before[key], value):
            continue
        if key in sourced:
            if key not in restated:
                yield (*location, key), f"changes a number without its provenance: add sources.{key} beside it"
        elif _is_number(before[key]) and "source" in before and "source" not in after:
            yield (*location, key), "changes a number without its provenance: add 'source' to this file"
        else:
            yield from stale_sources(before[key], value, location=(*location, key))


def idle_sources(base: Node, own: Node) -> Iterator[tuple[Location, str]]:
    """Provenance that `own` gives for numbers it inherits: locations in `own`, and what is wrong."""
    for location, before, after in _counterparts(base, own):
        restated = after.mapping().get("sources")
        for key in restated.mapping() if restated is not None else ():
            if key in before.mapping() and key not in after.mapping():
                yield (*location, "sources", key), f"has a source but no value here: write {key!r} in this section too"


def new_items(base: Node, own: Node) -> Iterator[tuple[Location, Node, list[str]]]:
    """Items whose names `base` does not have in the same list: location in `own`, the item, the names there are."""
    for location, before, after in _counterparts(base, own):
        known = _names(before)
        if known and _names(after) and isinstance(after.value, tuple):
            for index, item in enumerate(after.value):
                if item.name() not in known:
                    yield (*location, index), item, list(known)


def _counterparts(base: Node, own: Node, *, location: Location = ()) -> Iterator[tuple[Location, Node, Node]]:
    """Every node of `own` that is laid over one of `base`: its location, the one below, itself."""
    yield location, base, own
    children: list[tuple[str | int, Node | None, Node]]
    if isinstance(own.value, tuple):
        inherited = _names(base)
        children = [(index, inherited.get(item.name() or ""), item) for index, item in enumerate(own.value)]
    else:
        children = [(key, base.child(key), value) for key, value in own.mapping().items()]
    for key, before, after in children:
        if before is not None:
            yield from _counterparts(before, after, location=(*location, key))


def _changes(base: Node, own: Node) -> bool:
    return own.value is not None and merge(base, own).plain() != base.plain()


def _is_number(node: Node) -> bool:
    return isinstance(node.value, (int, float))
