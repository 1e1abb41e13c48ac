"""The paper's model: each equation by hand, the released script re-derived naively, and what is known of both."""

# ruff: noqa: N803, N806 - the re-derived script keeps the names of the one it checks

from __future__ import annotations

import math
from itertools import permutations, product
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.cost.paper import (
    PaperBackend,
    PaperPrices,
    PaperTerm,
    equation_7_bandwidth,
    price_paper,
)
from axonn_tune.errors import UsageError
from axonn_tune.specs.machine import Machine, PaperTable
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

GIB = 1024**3

PAPER_SIZES = {
    "5b": (24, 4096, 32),
    "10b": (32, 5120, 40),
    "20b": (32, 7168, 56),
    "40b": (38, 9216, 72),
    "60b": (56, 9216, 72),
    "80b": (42, 12288, 96),
    "160b": (84, 12288, 96),
}
BACKENDS: tuple[PaperBackend, ...] = ("paper", "paper-released", "paper-mended")
GPUS = [2**exponent for exponent in range(5, 13)]

# (product of inner axes, own size) -> GiB/s; None: every larger group
TABLES: dict[str, dict[tuple[int, int | None], float]] = {
    "perlmutter": {
        (1, 2): 76, (1, 4): 225, (1, 8): 80, (1, None): 80,
        (2, 2): 76, (2, 4): 40, (2, None): 40,
        (4, 2): 20, (4, None): 20,
        (8, None): 20,
    },
    "frontier": {
        (1, 2): 129, (1, 4): 52, (1, 8): 135, (1, None): 40,
        (2, 2): 50, (2, 4): 72, (2, None): 20,
        (4, 2): 36, (4, None): 10,
        (8, None): 5,
    },
}  # fmt: skip
NODES = {"perlmutter": (4, 80.0), "frontier": (8, 40.0)}


def paper_table(entries: dict[tuple[int, int | None], float], *, ranks_per_node: int, inter_node: float) -> PaperTable:
    """A table with made-up provenance."""
    fact = {"kind": "fact", "source": "test"}
    rows = [{"inner": inner, "group": group, "bandwidth_gib_per_s": gib} for (inner, group), gib in entries.items()]
    return PaperTable.model_validate(
        {
            "ranks_per_node": ranks_per_node,
            "inter_node_gib_per_s": inter_node,
            "table": tuple(rows),
            "sources": dict.fromkeys(("ranks_per_node", "inter_node_gib_per_s", "table"), fact),
        }
    )


def machine_with(table: PaperTable | None, *, name: str = "test") -> Machine:
    """A machine of which only the paper's section exists."""
    sections: dict[str, Any] = {"name": name, "paper": table}
    return Machine.model_construct(**sections)


def machine(name: str) -> Machine:
    """Perlmutter or Frontier as the released script has them."""
    ranks_per_node, inter_node = NODES[name]
    return machine_with(paper_table(TABLES[name], ranks_per_node=ranks_per_node, inter_node=inter_node), name=name)


def gpt(name: str, *, layers: int, hidden: int, heads: int) -> Model:
    """A GPT with ffn 4·hidden."""
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads}
    rest: dict[str, Any] = {"head_dim": hidden // heads, "ffn": 4 * hidden, "vocab": 51200, "max_sequence_length": 2048}
    flags: dict[str, Any] = {"biases": True, "tied_embeddings": True, "source": "test", "family": "gpt", "name": name}
    defaults = {"global_batch": 8192, "sequence_length": 2048}
    return Model.model_validate({"schema": "axonn-tune/model/1", "defaults": defaults} | sizes | rest | flags)


def paper_model(name: str) -> Model:
    """One of the paper's models."""
    layers, hidden, heads = PAPER_SIZES[name]
    return gpt(name, layers=layers, hidden=hidden, heads=heads)


def tiny_llama() -> Model:
    """Grouped-query attention, a gate, and heads that do not fill the hidden width: Q=12, N=20, F=24, G=48, H=16."""
    given = gpt("tiny", layers=3, hidden=16, heads=4).model_dump(by_alias=True)
    return Model.model_validate(given | {"family": "llama", "kv_heads": 2, "heads": 6, "head_dim": 2, "ffn": 24})


def batch_of(sequences: int, *, sequence_length: int = 2048) -> Workload:
    """A workload of so many sequences."""
    return Workload(global_batch=sequences, sequence_length=sequence_length)


def price(backend: PaperBackend, x: int, y: int, z: int, data: int, **given: Any) -> PaperPrices:
    """Price one grid, by default of 80b with the paper's batch on Perlmutter."""
    defaults = {"model": paper_model("80b"), "machine": machine("perlmutter"), "workload": batch_of(8192)}
    return price_paper(backend, x=x, y=y, z=z, data=data, **(defaults | given))


def term_of(prices: PaperPrices, *, layer: str, equation: int, phase: str | None = None) -> PaperTerm:
    """The one term of a layer that an equation gives."""
    found = [term for term in prices.terms if (term.layer, term.equation) == (layer, equation)]
    (only,) = [term for term in found if phase is None or term.phase == phase]
    return only


# --- a naive twin of the released script: its names, its units, one grid at a time ----------------


def naive_bandwidth(ip: int, my: int, which: str) -> float | None:
    """GiB/s of a group of `my` ranks with `ip` ranks inside, as the script's branches read."""
    if ip == 1:
        wide = {"perlmutter": 80.0, "frontier": 135.0 if my == 8 else 40.0}[which]
        return {"perlmutter": {2: 76.0, 4: 225.0}, "frontier": {2: 129.0, 4: 52.0}}[which].get(my, wide)
    if ip == 2:
        wide = {"perlmutter": 40.0, "frontier": 20.0}[which]
        return {"perlmutter": {2: 76.0, 4: 40.0}, "frontier": {2: 50.0, 4: 72.0}}[which].get(my, wide)
    if ip == 4:
        return 20.0 if which == "perlmutter" else 36.0 if my == 2 else 10.0
    return 20.0 if which == "perlmutter" else 5.0


Form = Literal["released", "mended"]


def naive_layer(
    B: int, S: int, K: int, H: int, *, G: tuple[int, int, int, int], which: str, transposed: bool, swapped: bool
) -> float:  # fmt: skip
    """Seconds of one layer of the script; `swapped` charges K·H to the input side instead of the output side."""
    Gcol, Grow, Gdepth, Gdata = G
    k, n = (K * H, H) if swapped else (H, K * H)
    data = 4 * (Gdata - 1) / Gdata * K * H**2 / (Gcol * Grow * Gdepth) * 2 / 1024**3
    depth = 1.5 * 2 * (Gdepth - 1) / Gdepth * K * H**2 / (Gcol * Grow) * 2 / 1024**3
    rows = B / Gdata / Gdepth * S
    if transposed:
        row = 2 * 2 * (Grow - 1) / Grow * (rows * n / Gcol) * 2 / 1024**3
        col = 2 * (Gcol - 1) / Gcol * (rows * k / Grow) * 2 / 1024**3
    else:
        col = 2 * 2 * (Gcol - 1) / Gcol * (rows * n / Grow) * 2 / 1024**3
        row = 2 * (Grow - 1) / Grow * (rows * k / Gcol) * 2 / 1024**3
    total, ip = 0.0, 1
    for volume, size in ((col, Gcol), (row, Grow), (depth, Gdepth), (data, Gdata)):
        if size > 1:
            bandwidth = naive_bandwidth(ip, size, which)
            assert bandwidth is not None
            total += volume / bandwidth
        ip *= size
    return total


def naive_script(name: str, *, G: tuple[int, int, int, int], B: int, which: str, form: Form) -> float:
    """Seconds of one step, G = (Gcol, Grow, Gdepth, Gdata)."""
    layers, H, _ = PAPER_SIZES[name]
    total = 0.0
    for K, transposed, swapped in ((3, False, False), (1, True, False), (4, False, False), (4, True, form == "mended")):
        total += naive_layer(B, 2048, K, H, G=G, which=which, transposed=transposed, swapped=swapped)
    return total * layers


def naive_grids(gpus: int, B: int) -> list[tuple[int, int, int, int]]:
    """(Gcol, Grow, Gdepth, Gdata) the script visits."""
    powers = [2**exponent for exponent in range(gpus.bit_length())]
    grids = []
    for Gcol, Grow, Gdepth in product(powers, repeat=3):
        Gdata = gpus // (Gcol * Grow * Gdepth)
        if Gdata and B % (Gdata * Gdepth) == 0:
            grids.append((Gcol, Grow, Gdepth, Gdata))
    return grids


@pytest.mark.parametrize("batch", [8192, 1024])
@pytest.mark.parametrize("which", ["perlmutter", "frontier"])
@pytest.mark.parametrize("name", list(PAPER_SIZES))
def test_released_and_mended_equal_a_naive_rederivation_of_the_script(name: str, which: str, batch: int) -> None:
    """Guards every volume and bandwidth of the script, to 1e-9, on 32 to 4,096 GPUs."""
    for gpus in GPUS:
        visited = naive_grids(gpus, batch)
        y, x, z, data = np.array(visited).T
        forms: tuple[tuple[PaperBackend, Form], ...] = (("paper-released", "released"), ("paper-mended", "mended"))
        for backend, form in forms:
            given: dict[str, Any] = {"model": paper_model(name), "machine": machine(which), "workload": batch_of(batch)}
            prices = price_paper(backend, x=x, y=y, z=z, data=data, **given)
            expected = [naive_script(name, G=G, B=batch, which=which, form=form) for G in visited]
            np.testing.assert_allclose(prices.communication_s, expected, rtol=1e-9, atol=0)
            assert not prices.rejected.any()


@pytest.mark.parametrize(
    ("backend", "gpus", "picked"),
    [
        ("paper-released", 1024, (1, 1, 1024, 1)),
        ("paper-released", 8192, (1, 1, 8192, 1)),
        ("paper-mended", 1024, (1, 1, 1024, 1)),
        ("paper-mended", 8192, (8, 1, 1024, 1)),
        ("paper", 8192, (8, 1, 1024, 1)),
    ],
)
def test_first_pick_for_80b(backend: PaperBackend, gpus: int, picked: tuple[int, ...]) -> None:
    """Guards two known findings: without latency z grows to 1,024, and z = 8,192 comes from the slip in fc2 on top."""
    y, x, z, data = np.array(naive_grids(gpus, 8192)).T
    given: dict[str, Any] = {"model": paper_model("80b"), "machine": machine("perlmutter"), "workload": batch_of(8192)}
    prices = price_paper(backend, x=x, y=y, z=z, data=data, **given)
    best = np.argmin(prices.communication_s)
    assert tuple(int(sizes[best]) for sizes in (x, y, z, data)) == picked


# --- the equations, by hand: k=16, n=24 and so on, 6 sequences of 8 tokens --------------------------

UNIT = machine_with(
    paper_table({(1, None): 1.0, (2, None): 1.0, (4, None): 1.0, (8, None): 1.0}, ranks_per_node=1, inter_node=2.0)
)
HAND = {"model": tiny_llama(), "machine": UNIT, "workload": batch_of(6, sequence_length=8)}


@pytest.mark.parametrize(
    ("layer", "equation", "op", "axis", "size_bytes", "elements_sent", "element_bytes"),
    [
        # qkv is 16 -> 20; x=2, y=4, z=3, data=2; a replica has 24 tokens, 8 after z
        ("attention.qkv", 1, "all_gather", "z", 2 * 16 * 20 / 8, 2 * 16 * 20 / 24, 2),
        ("attention.qkv", 2, "reduce_scatter", "z", 2 * 16 * 20 / 8, 2 / 3 * 16 * 20 / 8, 2),
        ("attention.qkv", 3, "all_reduce", "y", 2 * 24 * 20 / 6, 2 * 3 / 4 * 24 * 20 / 6, 2),
        ("attention.qkv", 4, "all_reduce", "x", 2 * 24 * 16 / 12, 2 * 1 / 2 * 24 * 16 / 12, 2),
        ("attention.qkv", 5, "all_reduce", "data", 4 * 16 * 20 / 24, 2 * 1 / 2 * 16 * 20 / 24, 4),
        # the attention output is 12 -> 16 and transposed: x and y change places
        ("attention.output", 3, "all_reduce", "x", 2 * 24 * 16 / 12, 2 * 1 / 2 * 24 * 16 / 12, 2),
        ("attention.output", 4, "all_reduce", "y", 2 * 24 * 12 / 6, 2 * 3 / 4 * 24 * 12 / 6, 2),
        # gate and up are one layer, 16 -> 48; fc2 is 24 -> 16, transposed
        ("mlp.fc1", 3, "all_reduce", "y", 2 * 24 * 48 / 6, 2 * 3 / 4 * 24 * 48 / 6, 2),
        ("mlp.fc2", 3, "all_reduce", "x", 2 * 24 * 16 / 12, 2 * 1 / 2 * 24 * 16 / 12, 2),
        ("mlp.fc2", 4, "all_reduce", "y", 2 * 24 * 24 / 6, 2 * 3 / 4 * 24 * 24 / 6, 2),
        ("mlp.fc2", 5, "all_reduce", "data", 4 * 24 * 16 / 24, 2 * 1 / 2 * 24 * 16 / 24, 4),
    ],
)
def test_equation_by_hand(
    layer: str, equation: int, op: str, axis: str, size_bytes: float, elements_sent: float, element_bytes: int
) -> None:
    """Guards equations 1 to 5 as printed: three blocks, every axis at 2 GiB/s (one rank per node, eq. 7)."""
    term = term_of(price("paper", x=2, y=4, z=3, data=2, **HAND), layer=layer, equation=equation)
    assert (term.op, term.axis, term.count) == (op, axis, 3)
    assert term.bytes[0] == pytest.approx(size_bytes, rel=1e-14)
    assert term.bandwidth_bytes_per_s[0] == 2 * GIB
    assert term.seconds[0] == pytest.approx(3 * element_bytes * elements_sent / (2 * GIB), rel=1e-14)


@pytest.mark.parametrize(
    ("inner", "group", "gib_per_s"),
    [
        (1, 2, 76), (1, 4, 225), (2, 2, 76),  # inside a node of 4: measured
        (1, 8, 80), (2, 4, 40), (4, 2, 20), (3, 4, 80 / 3), (64, 16, 20),  # spanning: β_inter / min(4, inner)
        (1, 3, math.nan),  # inside a node, not measured
    ],
)  # fmt: skip
def test_equation_7_by_hand(inner: int, group: int, gib_per_s: float) -> None:
    """Guards equation 7 and where it hands over to the table."""
    table = machine("perlmutter").paper
    assert table is not None
    found = equation_7_bandwidth(table, inner=np.array([inner]), group=np.array([group]))
    np.testing.assert_allclose(found, [gib_per_s * GIB], rtol=1e-15)


@pytest.mark.parametrize("backend", BACKENDS)
def test_missing_entry_rejects_only_the_candidates_that_need_it(backend: PaperBackend) -> None:
    """Guards `no-bandwidth-entry`: infinite time, its neighbours untouched."""
    sizes: dict[str, Any] = {
        "x": np.array([1, 3]),
        "y": np.array([1, 1]),
        "z": np.array([12, 4]),
        "data": np.array([1, 1]),
    }
    given: dict[str, Any] = {"model": paper_model("5b"), "machine": machine("perlmutter"), "workload": batch_of(12)}
    prices = price_paper(backend, **sizes, **given)
    assert prices.rejected.tolist() == [False, True]
    assert np.isinf(prices.communication_s).tolist() == [False, True]


def test_machine_without_a_paper_section_is_refused_by_name() -> None:
    """Guards the message a user meets."""
    with pytest.raises(UsageError, match="machine 'lonely' has no 'paper' section"):
        price("paper", 2, 2, 2, 2, machine=machine_with(None, name="lonely"))


# --- whatever the grid and the table ------------------------------------------------------------------

Table = dict[tuple[int, int | None], float]
TABLE_KEYS = tuple((inner, group) for inner in (1, 2, 4, 8) for group in (2, 4, 8, None))
SIZES = st.sampled_from((1, 2, 3, 4, 8, 16))


@st.composite
def spaces(draw: st.DrawFn) -> tuple[PaperBackend, Table, float, dict[str, Any]]:
    """A backend, a table for nodes of 8 ranks with its bandwidth between nodes, grids as columns with a rank order."""
    speeds = st.floats(min_value=0.01, max_value=1e4)
    rows = draw(st.lists(st.tuples(SIZES, SIZES, SIZES, SIZES), min_size=1, max_size=8))
    columns: dict[str, Any] = dict(zip(("x", "y", "z", "data"), np.array(rows, dtype=np.int64).T, strict=True))
    columns["order"] = draw(st.sampled_from(tuple(permutations(("x", "y", "z", "data")))))
    table = draw(st.dictionaries(st.sampled_from(TABLE_KEYS), speeds))
    return draw(st.sampled_from(BACKENDS)), table, draw(speeds), columns


def priced(backend: PaperBackend, table: Table, inter_node: float, columns: dict[str, Any]) -> PaperPrices:
    """A small Llama on such a machine."""
    here = machine_with(paper_table(table, ranks_per_node=8, inter_node=inter_node))
    return price_paper(backend, model=tiny_llama(), machine=here, workload=batch_of(64), **columns)


@given(spaces(), st.floats(1.0, 100.0))
def test_more_bandwidth_is_never_slower(space: tuple[PaperBackend, Table, float, dict[str, Any]], more: float) -> None:
    """Guards the direction in which bandwidth enters."""
    backend, table, inter_node, columns = space
    slow = priced(*space)
    quick = priced(backend, {key: gib * more for key, gib in table.items()}, inter_node * more, columns)
    assert (quick.communication_s <= slow.communication_s).all()
    assert (quick.rejected == slow.rejected).all()


@given(spaces())
def test_the_total_is_the_left_fold_of_the_terms(space: tuple[PaperBackend, Table, float, dict[str, Any]]) -> None:
    """Guards that the list of terms is the whole price, that rejection is a missing bandwidth, and that plain integers
    give the bits of the column."""
    prices, (backend, table, inter_node, columns) = priced(*space), space
    for row, total_s in enumerate(prices.communication_s.tolist()):
        total = 0.0
        for term in prices.terms:
            total += float(term.seconds[row])
        assert total == total_s
        missing = any(np.isnan(term.bandwidth_bytes_per_s[row]) for term in prices.terms)
        assert missing == prices.rejected[row] == np.isinf(total)
        one = {name: value if name == "order" else int(value[row]) for name, value in columns.items()}
        assert priced(backend, table, inter_node, one).communication_s.tolist() == [total_s]


@given(spaces())
def test_the_slip_only_moves_bytes_between_x_and_y(space: tuple[PaperBackend, Table, float, dict[str, Any]]) -> None:
    """Guards that mending fc2 changes nothing else: all terms but fc2's two all-reduces are identical."""
    released, mended = (priced(backend, *space[1:]) for backend in BACKENDS[1:])
    for one, other in zip(released.terms, mended.terms, strict=True):
        if one.layer != "mlp.fc2" or one.equation not in (3, 4):
            assert (one.op, one.axis, one.phase, one.layer) == (other.op, other.axis, other.phase, other.layer)
            np.testing.assert_array_equal(one.seconds, other.seconds)
