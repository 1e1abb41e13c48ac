"""Documents of any content: written and read they are the same, and no text brings the reader down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axonn_tune.errors import AxonnTuneError
from axonn_tune.specs.document import read_yaml, to_yaml
from axonn_tune.specs.loading import parse_document
from axonn_tune.specs.machine import Source, Tier
from axonn_tune.specs.model import Model, ModelDefaults

# A file holds any character but controls and those that UTF-8 cannot; words that look like other things come often.
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=60) | st.sampled_from(
    [
        "on",
        "null",
        "~",
        "1e5",
        "010",
        "1:30",
        "- a",
        "a: b",
        "# c",
        "{",
        "[]",
        "'",
        '"',
        " x ",
        "a\nb",
        "\t",
        "=",
        "<<",
        "80b",
    ]
)
COUNTS = st.integers(1, 2**31 - 1)
POSITIVE = st.floats(1e-9, 1e15)


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Any valid model document."""
    kv_heads = draw(st.integers(1, 64))
    return Model(
        schema="axonn-tune/model/1",
        name=draw(TEXTS),
        description=draw(st.just("") | TEXTS),
        family=draw(st.sampled_from(["gpt", "llama"])),
        layers=draw(COUNTS),
        hidden=draw(COUNTS),
        heads=kv_heads * draw(st.integers(1, 64)),
        kv_heads=kv_heads,
        head_dim=draw(COUNTS),
        ffn=draw(COUNTS),
        vocab=draw(COUNTS),
        max_sequence_length=draw(COUNTS),
        biases=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
        source=draw(TEXTS),
        defaults=ModelDefaults(global_batch=draw(COUNTS), sequence_length=draw(COUNTS)),
    )


@given(models())
def test_models_are_read_as_written(model: Model) -> None:
    """Guards writing and reading against each other, for any text and any count."""
    assert parse_document(to_yaml(model, header=[model.description]), schema=Model) == model


@given(TEXTS, POSITIVE, POSITIVE, TEXTS)
def test_numbers_and_sources_are_read_as_written(name: str, latency: float, bandwidth: float, source: str) -> None:
    """Guards floats of any size, bit for bit, and text inside one-line mappings."""
    sources = {key: Source(kind="measured", source=source) for key in ("latency_us", "bandwidth_gb_per_s")}
    tier = Tier(name=name, latency_us=latency, bandwidth_gb_per_s=bandwidth, sources=sources)
    read = read_yaml(to_yaml(tier), source="f")
    assert not read.problems
    assert Tier.model_validate(read.root.plain()) == tier


@given(
    st.text(st.characters(exclude_categories=["Cs", "Cc"]))
    | st.text(alphabet="ab:-[]{},#&*!|>'\"%@` \n\t?~0", max_size=80)
)
def test_no_text_brings_the_reader_down(text: str) -> None:
    """Guards against tracebacks: any text that is no model is a user's error."""
    with pytest.raises(AxonnTuneError) as caught:
        parse_document(text, schema=Model)
    assert caught.value.exit_code == 2
