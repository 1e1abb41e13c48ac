"""Models of several layer types: patterns, and what a type inherits."""

from __future__ import annotations

from typing import Any

import pytest

from axonn_tune.errors import DocumentError
from axonn_tune.specs.document import to_yaml
from axonn_tune.specs.launch import Launch
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.model import Model, unrun
from axonn_tune.specs.sections import MOST_LAYERS, expand
from axonn_tune.specs.tuning import Tuning
from tests.unit.small import small_model
from tests.unit.specs.launches import example_launch

LATENT = {"query_rank": 24, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 6}
EXPERTS = {"count": 8, "per_token": 2, "width": 32, "shared_width": 48}


def typed(layers: str = "dense*2 moe*6", **changes: Any) -> Model:
    """A small Llama with a dense and an expert layer type, unless told otherwise."""
    types = {"dense": {}, "moe": {"latent": LATENT, "experts": EXPERTS}}
    return small_model(**{"family": "llama", "layers": layers, "layer_types": types} | changes)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a", "a"),
        ("a*3 b", "aaab"),
        ("(a b)*2 a", "ababa"),
        (" (a*2 b)*2  (c) ", "aabaabc"),
    ],
)
def test_a_pattern_names_each_layer_in_order(pattern: str, names: str) -> None:
    """Names, counts and groups give one type a layer."""
    assert "".join(expand(pattern)) == names


@pytest.mark.parametrize(
    "pattern", ["", "a*", "a*0", "a**2", "a,b", "((a b)*2 c)*2", "(a", "a)", "()", "1a", "a*1e9", "a(b)"]
)
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    """An error says what a pattern looks like."""
    with pytest.raises(ValueError, match="such as dense"):
        expand(pattern)


@pytest.mark.parametrize("pattern", ["a*10001", "(a b)*999999999", "a*9000 b*1001"])
def test_a_pattern_has_a_largest_number_of_layers(pattern: str) -> None:
    """A count is refused before that many names are made."""
    with pytest.raises(ValueError, match=f"at most {MOST_LAYERS:,}"):
        expand(pattern)


def test_a_model_of_one_type_is_the_flat_fields() -> None:
    """A document without layer types has one layer, without a name, with today's sizes."""
    for family in ("gpt", "llama"):
        model = small_model(family=family, kv_heads=2, biases=True)
        (layer,) = model.types
        assert (layer.name, model.runs, model.counts, model.mixed) == ("", ((0, 8),), (8,), False)
        keys = model.kv_heads * model.head_dim
        assert layer.query_width == model.heads * model.head_dim
        assert (layer.qkv_width, layer.up_width) == (layer.query_width + 2 * keys, layer.ups * model.ffn)


def test_types_and_runs_follow_the_pattern() -> None:
    """Types are in order of first use, runs in order of the layers."""
    model = typed("moe*2 (dense moe)*3")
    assert [layer.name for layer in model.types] == ["moe", "dense"]
    assert model.layers == 8
    assert model.runs == ((0, 2), (1, 1), (0, 1), (1, 1), (0, 1), (1, 1), (0, 1))
    assert model.counts == (5, 3)
    assert model.mixed
    assert model.has_experts


def test_a_type_has_the_sizes_of_the_model_where_it_says_nothing() -> None:
    """Latent attention replaces head widths, experts the MLP."""
    dense, moe = typed(kv_heads=4).types
    assert (dense.heads, dense.kv_heads, dense.head_dim, dense.ffn, dense.gated) == (8, 4, 8, 256, True)
    assert (moe.heads, moe.kv_heads, moe.head_dim, moe.value_dim, moe.ffn) == (8, 8, 12, 6, 0)
    assert moe.qkv_width == 8 * (12 + 12 + 6)
    assert moe.value_width == 48


def test_an_mtp_layer_after_experts_alone_has_attention_too() -> None:
    """Nemotron 3's: attention and experts; of a plain model the last type."""
    alone = {"attention": False, "experts": EXPERTS}
    hybrid = typed("(full moe)*4", mtp_layers=2, layer_types={"full": {"mlp": False}, "moe": alone})
    assert hybrid.mtp_types == (0, 1)
    assert [(layer.name, count) for layer, count in hybrid.by_type] == [("full", 4), ("moe", 6), ("full-mtp", 2)]
    assert hybrid.runs[-4:] == ((2, 1), (1, 1)) * 2
    assert [count for _, count in typed(mtp_layers=2).by_type] == [2, 6, 2]


def test_parts_name_what_is_not_run() -> None:
    """Guards one sentence for the runtime; a plain model, and norms of queries, have none."""
    normed = small_model(family="llama", layer_types={"dense": {"qk_norms": True}})
    for plain in (small_model(), normed):
        assert (plain.parts, unrun(plain)) == ((), None)
    types = {"local": {"window": 8, "sinks": True, "latent": LATENT}, "moe": {"experts": EXPERTS}}
    model = typed("(local moe)*4", layer_types=types, mtp_layers=1)
    assert model.parts == (
        "multi-head latent attention",
        "sliding-window attention",
        "attention sinks",
        "experts",
        "shared experts",
        "multi-token prediction",
        "layer types of different sizes",
    )
    words = "multi-head latent attention, no sliding-window attention, no attention sinks, no multi-token prediction"
    assert words in (unrun(model) or "")
    biased = model.model_copy(update={"biases": True})
    assert (unrun(biased) or "").endswith("no biases of experts")
    Model.prepare()
    delta = {"attention": False, "gdn": {"key_heads": 2, "value_heads": 4}}
    assert unrun(typed("delta*8", layer_types={"delta": delta})) is None
    alone = typed("(delta mlp)*4", layer_types={"delta": delta, "mlp": {"attention": False}})
    assert (unrun(alone) or "").endswith("has no layers that are an MLP alone")
    short = typed("short*8", layer_types={"short": {"attention": False, "shortconv": {"conv": 3}}})
    assert (unrun(short) or "").endswith("has no short convolutions")


def test_launch_configs_of_what_the_runtime_lacks_are_refused() -> None:
    """Guards a run, a validation and an edited file: latents, windows and sinks are named."""
    launch = example_launch()
    types = {"dense": {"latent": LATENT, "window": 8}}
    model = typed("dense*8", layer_types=types, head_dim=12).model_dump(by_alias=True)
    with pytest.raises(ValueError, match="runtime has no multi-head latent attention, no sliding-window attention"):
        Launch.model_validate(launch.model_dump(by_alias=True) | {"model": model})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"mode": "qlora", "base": "nf4"}, "no QLoRA, no base in nf4"),
        ({"mode": "lora", "base": "int8"}, "no base in int8"),
        ({"mode": "dora"}, "no DoRA"),
        ({"mode": "head", "tables": ("head",)}, "no LM head"),
        ({"dtype": "bf16"}, "no adapters in bf16"),
        ({"dropout": 0.1}, "no dropout of adapters"),
        ({"collectives": "gathered"}, "no collectives of adapters"),
        ({"tables": ("embedding",)}, "no tables that train beside adapters"),
        ({"input_gradients": True}, "no gradients of a first layer's input"),
    ],
)
def test_adapters_that_the_runtime_lacks_are_named(changes: dict[str, Any], words: str | None) -> None:
    """Guards what else of fine-tuning a launch config could state: refused by name."""
    tuning = Tuning.model_validate({"mode": "lora", "targets": ("*",), "dtype": "fp32"} | changes)
    said = unrun(small_model().tuned(tuning))
    assert said is None if words is None else words in (said or "")


def test_heads_of_latent_attention_are_its_own() -> None:
    """Guards numbers that nothing would read."""
    with pytest.raises(ValueError, match="kv_heads is 2, but all attention is latent, which has 4"):
        typed("dense*8", layer_types={"dense": {"latent": LATENT}}, heads=4, kv_heads=2)
    with pytest.raises(ValueError, match=r"head_dim is 7, but all attention is latent, .* nope_dim \+ rope_dim = \d+"):
        typed("dense*8", layer_types={"dense": {"latent": LATENT}}, heads=4, kv_heads=4, head_dim=7)


def test_written_models_load_again() -> None:
    """A pattern given as `layers` is kept beside the number of layers."""
    model = typed(mtp_layers=1)
    text = to_yaml(model)
    assert parse_document(text, schema=Model) == model
    assert Model.model_validate(model.model_dump(by_alias=True)) == model
    assert "layer_types" not in to_yaml(small_model())
    assert "layer_types" not in small_model().model_dump()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": "dense*2 mor*6"}, "'mor'.*did you mean 'moe'"),
        ({"layers": "dense*8"}, r"layer_types\.moe is not used"),
        ({"layers": 8}, "order of dense, moe"),
        ({"layer_types": {}}, "no layer_types"),
        ({"pattern": "dense*3 moe"}, "both patterns"),
        ({"layer_types": {"dense": {"heads": 6, "kv_heads": 4}, "moe": {}}}, r"layer_types\.dense: heads \(6\)"),
        ({"layer_types": {"dense": {}, "moe": {"experts": EXPERTS | {"per_token": 9}}}}, "per_token.*9.*8"),
        ({"layer_types": {"dense": {}, "moe": {"experts": EXPERTS | {"groups": 3}}}}, "but by 2"),
        ({"layer_types": {"dense": {}, "moe": {"mlp": False, "experts": EXPERTS}}}, "experts is given, but mlp"),
        ({"layer_types": {"dense": {}, "moe": {"attention": False, "mlp": False}}}, "empty"),
        ({"layer_types": {"dense": {}, "moe": {"latent": LATENT, "head_dim": 8}}}, "head_dim is given"),
        (
            {"layer_types": {"dense": {}, "moe": {"mamba": {"heads": 1, "head_dim": 1, "state": 1, "groups": 1}}}},
            "mamba is given, but attention is not false",
        ),
    ],
)
def test_layer_types_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    """The message names the key and the numbers."""
    with pytest.raises(ValueError, match=words):
        typed(**changes)


def test_a_pattern_of_unknown_form_is_reported_at_its_line() -> None:
    """Other problems of the document are reported with it."""
    text = to_yaml(typed()).replace("layers: 8 ", "layers: dense+moe ").replace("pattern:", "vocab: 0 #")
    with pytest.raises(DocumentError) as error:
        parse_document(text, schema=Model)
    assert "no pattern of layers" in str(error.value)
    assert "vocab" in str(error.value)
