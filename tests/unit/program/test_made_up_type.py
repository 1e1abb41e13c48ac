"""A layer type in one file: read, checked, counted, priced, refused and described without a line elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from axonn_tune import search
from axonn_tune.errors import DocumentError, NothingFeasibleError, UsageError
from axonn_tune.frameworks import find_framework, registry
from axonn_tune.grid import Grid
from axonn_tune.program import count, step, types
from axonn_tune.program.block import block_nodes
from axonn_tune.program.feasibility import broken_constraints
from axonn_tune.recompute import MODULES
from axonn_tune.specs import model as documents
from axonn_tune.specs.document import read_yaml, validate
from axonn_tune.specs.hugging_face import model_from_hf_config
from axonn_tune.specs.model import Model
from axonn_tune.specs.workload import Workload

FOLDER = str(Path(__file__).parents[2] / "fixtures" / "layer_types")
TEXT = """schema: axonn-tune/model/1
name: made-up
family: llama
layers: (xconv plain)*4
hidden: 256
heads: 8
kv_heads: 8
head_dim: 32
ffn: 512
vocab: 1024
max_sequence_length: 512
biases: false
tied_embeddings: false
layer_types:
  plain: {}
  xconv: {attention: false, xconv: {channels: 384, length: 3}}
source: made up
defaults: {global_batch: 8, sequence_length: 512}
"""


@pytest.fixture
def found() -> Iterator[None]:
    """The file among those of layer types."""

    def forget() -> None:
        for cached in (types.kinds, count.counted, step._passes):
            cached.cache_clear()

    types.__path__.append(FOLDER)
    forget()
    types.kinds()
    yield
    types.__path__.remove(FOLDER)
    forget()
    del documents.MIXERS["xconv"], documents.LayerType.__pydantic_fields__["xconv"]
    documents.rebuild_models()


def made_up(text: str = TEXT) -> Model:
    """A model whose every other layer is of that type."""
    return validate(read_yaml(text, source="made-up").root, schema=Model, source="made-up")


@pytest.mark.usefixtures("found")
def test_its_sizes_are_read_and_counted() -> None:
    """Guards the document, with words and refusals, and elements by hand."""
    model = made_up()
    layer = model.types[0]
    assert layer.words == "x-conv of 384 channels, length 3; MLP of 512"
    assert "x-conv" in model.parts
    of_type = count.counted(model)[0]
    assert of_type.weights == 2 * 256 * 384 + 3 * 256 * 512
    assert of_type.vectors_of(0) == 2 * 256 + 384 * 3
    for text, said in (
        (TEXT.replace("channels: 384, ", ""), "channels"),
        (TEXT.replace("channels: 384", "chanels: 384"), "channels"),
        (TEXT.replace("attention: false, xconv", "xconv"), "xconv is given, but attention is not false"),
    ):
        with pytest.raises(DocumentError, match=said):
            made_up(text)


@pytest.mark.usefixtures("found")
def test_it_is_priced_by_every_framework_or_refused() -> None:
    """Guards forward, backward, recompute, memory and constraints; no framework writes what it has no arguments for."""
    model, priced = made_up(), 0
    for name in registry():
        for recompute in ("none", "layernorm", "full"):
            try:
                best = search(
                    model, gpus=2, machine="dgx-h100", framework=name, recompute=recompute, micro_batch=1
                ).best
            except (UsageError, NothingFeasibleError):
                continue
            assert best.iteration_s > 0.0
            priced += 1
    assert priced > 20
    nodes = block_nodes(step.LayerInputs(model, count.ELEMENT_SIZES["bf16"], layer=model.types[0]))
    assert [node.layer for node in nodes.forward[:5]] == [
        f"xconv.{one}" for one in ("norm", "in", "conv", "out", "out")
    ]
    assert {*nodes.forward[0].alone} & {*MODULES} == {"layernorm"}
    both = made_up(TEXT.replace("xconv: {attention: false,", "xconv: {norms: both, attention: false,"))
    nodes = block_nodes(step.LayerInputs(both, count.ELEMENT_SIZES["bf16"], layer=both.types[0]))
    assert nodes.forward[4].layer == "xconv.post_norm", "a norm behind it, too"
    with pytest.raises(UsageError, match="has no x-conv"):
        search(model, gpus=2, machine="dgx-h100", framework="axonn-tune").launch_config()
    grid, workload = Grid(x=8, data=2), Workload(global_batch=8, sequence_length=512)
    odd = made_up(TEXT.replace("channels: 384", "channels: 388"))
    said = broken_constraints(grid, odd, workload, find_framework("megatron-core"), micro_batch=1)
    assert said == ["x-conv channels (388) is not divisible by TP = 8"]
    grid = Grid(context=2, data=2, order=("context", "data"))
    said = broken_constraints(grid, model, workload, find_framework("megatron-core"), micro_batch=1)
    assert said == ["layers with x-conv need whole sequences, so no CP"], "not for free, if it says nothing of it"


@pytest.mark.usefixtures("found")
def test_a_config_that_lists_it_is_imported(tmp_path: Path) -> None:
    """Guards names and keys of config.json."""
    config = {
        **{"model_type": "nemotron_h", "hidden_size": 256, "num_hidden_layers": 4, "hybrid_override_pattern": "XX*-"},
        **{"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32, "intermediate_size": 512},
        **{"vocab_size": 1024, "max_position_embeddings": 512, "xconv_channels": 384, "xconv_kernel": 3},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = model_from_hf_config(tmp_path)
    assert model.types[0].words == "x-conv of 384 channels, length 3"
