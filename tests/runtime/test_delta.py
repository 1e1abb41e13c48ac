"""The gated delta rule by chunks, against the recurrence token by token."""

from __future__ import annotations

import pytest
import torch

from axonn_tune.grid import Grid
from axonn_tune.runtime.communicator import Communicator
from axonn_tune.runtime.devices import RuntimeSettings
from axonn_tune.runtime.ledger import Ledger
from axonn_tune.runtime.mesh import build_mesh
from axonn_tune.runtime.transformer import Transformer
from axonn_tune.specs.catalog import load_model
from axonn_tune.specs.model import Model
from benchmarks.reference_model import Reference, runtime_name


def small(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Model:
    """A gated delta net alone in a block."""
    document = load_model("nano-delta").document.model_dump(mode="json", by_alias=True, exclude_none=True)
    sizes = {"key_heads": key_heads, "value_heads": value_heads, "key_dim": key_dim, "value_dim": value_dim, "conv": 3}
    types = {"delta": {"attention": False, "gdn": sizes}}
    document.pop("pattern")
    change = {"layers": "delta", "layer_types": types, "hidden": 48, "ffn": 96, "vocab": 61}
    return Model.model_validate(document | change | {"max_sequence_length": 200})


@pytest.mark.parametrize(
    ("length", "heads", "dtype", "most"),
    [
        (1, (1, 1, 8, 8), torch.float64, 1e-12),
        (64, (2, 2, 8, 4), torch.float64, 1e-12),
        (150, (2, 6, 4, 6), torch.float64, 1e-12),
        (192, (3, 3, 8, 8), torch.bfloat16, 0.03),
    ],
    ids=str,
)
def test_chunks_are_the_recurrence(
    length: int, heads: tuple[int, int, int, int], dtype: torch.dtype, most: float
) -> None:
    """Guards outputs and all gradients, of whole chunks, a part of one, one token, and several value heads a key."""
    wide = torch.promote_types(dtype, torch.float32)
    settings = RuntimeSettings(dtype, wide, wide, frozenset(), "none", 0, torch.device("cpu"))
    runs = Transformer(small(*heads), Communicator(build_mesh(Grid()), Ledger()), settings, sequence=length, seed=1)
    weights = {one.name: one.value.double() for one in (*runs.store.matrices, *runs.store.vectors)}
    reference = Reference(runs.model).double()
    reference.load(weights)
    rule, serial = runs.blocks[0].attention.local, reference.blocks[0].gdn
    chance = torch.Generator().manual_seed(2)
    given = serial.given
    x = torch.randn(2 * length, given.projected, generator=chance).to(dtype)
    gradient = torch.randn(2 * length, given.values, generator=chance).to(dtype)
    output, back = rule(x, "forward")
    found = {"output": output, "input": back(gradient)} | {one.name: one.gradient for one in runs.store.vectors}
    own = x.double().view(2, length, -1).requires_grad_()
    expected = serial.mix(own)
    expected.backward(gradient.double().view(expected.shape))
    truth = {"output": expected, "input": own.grad}
    truth |= {f"blocks.0.{runtime_name(f'gdn.{name}')}": one.grad for name, one in serial.named_parameters()}
    for name in ("output", "input", *(f"blocks.0.gdn.{one}" for one in ("filters", "rates", "steps", "gated.weight"))):
        right = truth[name].detach().reshape(found[name].shape)
        assert float((found[name] - right).abs().max()) <= most * float(right.abs().max()), name
