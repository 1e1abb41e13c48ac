"""Texts of recompute sets."""

from __future__ import annotations

import pytest

import axonn_tune
from axonn_tune.errors import UsageError
from axonn_tune.frameworks import registry
from axonn_tune.recompute import MODULES, parse_recompute
from axonn_tune.request import Request


@pytest.mark.parametrize(
    ("text", "found"),
    [("none", "none"), (" full", "full"), ("mlp, layernorm,mlp", "layernorm,mlp"), ("core_attn", "core_attn")],
)
def test_a_set_has_one_text(text: str, found: str) -> None:
    """Guards keys of tables and caches: modules once each, in one order."""
    assert parse_recompute(text) == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("selectiv", "'selectiv', did you mean 'selective'?"),
        ("mlp,core_atn", "'core_atn', did you mean 'core_attn'?"),
        ("mlp,full", "no recompute set 'full'"),
        ("", "no recompute set ''"),
    ],
)
def test_other_texts_are_refused(text: str, said: str) -> None:
    """Guards the option and documents: the wrong name, and the nearest that there is."""
    with pytest.raises(UsageError, match="--recompute") as error:
        Request(recompute=text)
    assert said in str(error.value)
    assert "modules joined by commas" in str(error.value)


def test_frameworks_name_modules_that_there_are() -> None:
    """Guards descriptions of frameworks against a word that is in no table."""
    for framework in registry().values():
        assert {*framework.recompute_modules} <= {*MODULES}


def test_a_set_on_given_layers_is_searched() -> None:
    """Guards both pins together, as a launch config's: every row has that set on those layers, and explains itself."""
    found = axonn_tune.search("llama3-8b", gpus=16, machine="dgx-h100", recompute="layernorm,mlp", recompute_layers=3)
    assert {one.recomputed for one in found} == {"layernorm,mlp on 3"}
    assert found.launch_config().recompute_layers == 3
