"""Properties of the paper's model that hold for any grid and any table."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.cost.paper import PaperBackend, PaperPrices, price_paper
from axonn_tune.specs.machine import Machine, PaperTable
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

MODEL = Model.model_validate(
    {
        "schema": "axonn-tune/model/1",
        "name": "small",
        "family": "llama",
        "layers": 5,
        "hidden": 768,
        "heads": 12,
        "kv_heads": 4,
        "head_dim": 48,
        "ffn": 2048,
        "vocab": 32000,
        "max_sequence_length": 1024,
        "biases": False,
        "tied_embeddings": False,
        "source": "test",
        "defaults": {"global_batch": 64, "sequence_length": 1024},
    }
)
WORKLOAD = Workload(global_batch=64, sequence_length=1024)
FACT = {"kind": "fact", "source": "test"}

Grid = tuple[int, int, int, int]
BACKENDS: tuple[PaperBackend, ...] = ("paper", "paper-released", "paper-mended")
KEYS = tuple((inner, group) for inner in (1, 2, 4, 8) for group in (2, 4, 8, None))

backends = st.sampled_from(BACKENDS)
orders = st.sampled_from(tuple(permutations(("x", "y", "z", "data"))))
sizes = st.sampled_from((1, 2, 3, 4, 8, 16))
grids = st.lists(st.tuples(sizes, sizes, sizes, sizes), min_size=1, max_size=8)
speeds = st.floats(min_value=0.01, max_value=1e4)
tables = st.dictionaries(st.sampled_from(KEYS), speeds)


def machine(table: dict[tuple[int, int | None], float], *, inter_node: float) -> Machine:
    """A machine of nodes of 8 ranks, of which only the paper's section exists."""
    rows = tuple({"inner": inner, "group": group, "bandwidth_gib_per_s": gib} for (inner, group), gib in table.items())
    section = {"ranks_per_node": 8, "inter_node_gib_per_s": inter_node, "table": rows}
    section["sources"] = dict.fromkeys(("ranks_per_node", "inter_node_gib_per_s", "table"), FACT)
    sections: dict[str, Any] = {"name": "test", "paper": PaperTable.model_validate(section)}
    return Machine.model_construct(**sections)


def price(backend: PaperBackend, *, machine: Machine, grids: list[Grid], order: tuple[str, ...]) -> PaperPrices:
    """Price the grids as columns."""
    x, y, z, data = np.array(grids, dtype=np.int64).T
    return price_paper(backend, model=MODEL, machine=machine, workload=WORKLOAD, x=x, y=y, z=z, data=data, order=order)


@given(backend=backends, table=tables, inter_node=speeds, grids=grids, order=orders, faster=st.floats(1.0, 100.0))
def test_more_bandwidth_is_never_slower(
    backend: PaperBackend, table: dict[tuple[int, int | None], float], inter_node: float,
    grids: list[Grid], order: tuple[str, ...], faster: float,
) -> None:  # fmt: skip
    """Guards the direction in which bandwidth enters, term by term and in total."""
    slow = price(backend, machine=machine(table, inter_node=inter_node), grids=grids, order=order)
    sped_up = {key: gib * faster for key, gib in table.items()}
    quick = price(backend, machine=machine(sped_up, inter_node=inter_node * faster), grids=grids, order=order)
    assert (quick.communication_s <= slow.communication_s).all()
    assert (quick.rejected == slow.rejected).all()


@given(backend=backends, table=tables, inter_node=speeds, grids=grids, order=orders)
def test_the_total_is_the_left_fold_of_the_terms(
    backend: PaperBackend, table: dict[tuple[int, int | None], float], inter_node: float,
    grids: list[Grid], order: tuple[str, ...],
) -> None:  # fmt: skip
    """Guards that the list of terms is the whole price, to the bit, and that rejection is a missing bandwidth."""
    prices = price(backend, machine=machine(table, inter_node=inter_node), grids=grids, order=order)
    for row in range(len(grids)):
        total = 0.0
        for term in prices.terms:
            total += float(term.seconds[row])
        assert total == prices.communication_s[row]
        missing = any(np.isnan(term.bandwidth_bytes_per_s[row]) for term in prices.terms)
        assert missing == prices.rejected[row] == np.isinf(total)


@given(backend=backends, table=tables, inter_node=speeds, grids=grids, order=orders)
def test_a_candidate_alone_costs_what_it_costs_among_others(
    backend: PaperBackend, table: dict[tuple[int, int | None], float], inter_node: float,
    grids: list[Grid], order: tuple[str, ...],
) -> None:  # fmt: skip
    """Guards the one-candidate form: plain integers give the bits of the column."""
    here = machine(table, inter_node=inter_node)
    together = price(backend, machine=here, grids=grids, order=order)
    for row, (x, y, z, data) in enumerate(grids):
        alone = price_paper(
            backend, model=MODEL, machine=here, workload=WORKLOAD, x=x, y=y, z=z, data=data, order=order
        )
        assert alone.communication_s.tolist() == [together.communication_s[row]]


@given(table=tables, inter_node=speeds, grids=grids, order=orders)
def test_the_slip_only_moves_bytes_between_x_and_y(
    table: dict[tuple[int, int | None], float], inter_node: float, grids: list[Grid], order: tuple[str, ...]
) -> None:
    """Guards that mending fc2 changes nothing else: all terms but fc2's two all-reduces are identical."""
    here = machine(table, inter_node=inter_node)
    released, mended = (
        price(backend, machine=here, grids=grids, order=order) for backend in ("paper-released", "paper-mended")
    )
    for one, other in zip(released.terms, mended.terms, strict=True):
        if one.layer != "mlp.fc2" or one.equation not in (3, 4):
            assert (one.op, one.axis, one.phase, one.layer) == (other.op, other.axis, other.phase, other.layer)
            np.testing.assert_array_equal(one.seconds, other.seconds)
