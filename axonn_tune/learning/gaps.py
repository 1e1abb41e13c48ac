"""Columns that a run needs and does not state, each with its value and the assumption in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from axonn_tune.frameworks.keys import NOTHING, Arguments, Stated, is_on, records
from axonn_tune.learning.run import CommandRun
from axonn_tune.validation.published.rows import Cell

_OF_GPT2 = 50_257
_TOKENIZERS = "tokenizer(?!_type)|vocab_file|merge_file"
"""Arguments that name a tokenizer; its class says nothing of its size."""
_VOCABULARY = 128_256
"""The vocabulary, Llama 3's, where no tokenizer of the table `tokenizers` is named."""


def _value(named: Arguments, name: str) -> str:
    """The value of an argument, "" without one."""
    return str(named.get(name, NOTHING).value)


def other_parts(columns: Mapping[str, Stated], named: Arguments) -> str:
    """Norm and positions that are not those of the family that the MLP makes it, "" where they are."""
    gated = columns.get("gated_mlp", Stated(False, 0)).value
    stated = " ".join(_value(named, name) for name in ("normalization", "position_embedding_type")).lower().strip()
    if not gated and re.search("rmsnorm|rope|alibi", stated):
        return f"{stated} beside an MLP without gate are priced as LayerNorm and learned positions"
    if gated and re.search("layernorm|learned|alibi", stated):
        return f"{stated} beside a gated MLP are priced as RMSNorm and rotary positions"
    return ""


_Gap = tuple[str, Cell, str]
"""A column, its value, and both in words."""


def model_gaps(columns: Mapping[str, Stated], named: Arguments) -> Iterator[_Gap]:
    """Columns of the model."""
    if "heads" in columns and "kv_heads" not in columns and is_on(named.get("group_query_attention", NOTHING)):
        yield "kv_heads", 1, "the number of query groups is not stated: 1, as Megatron-LM has it"
    if "hidden" in columns and "ffn" not in columns:
        hidden = columns["hidden"].value
        gated = columns.get("gated_mlp", Stated(False, 0)).value
        ffn = hidden * 8 // 3 // 64 * 64 if gated else 4 * hidden
        share = "8/3" if gated else "4"
        yield (
            "ffn",
            ffn,
            f"the FFN's width is not stated: {ffn:,}, {share} of the hidden size (--set model.ffn=N)",
        )
    if "layers" in columns and "vocab" not in columns:
        gated = columns.get("gated_mlp", Stated(False, 0)).value
        told = [one.value for name, one in named.items() if re.search(_TOKENIZERS, name)]
        # A file of merges is that of GPT-2's tokenizer, whatever it is called.
        told += ["GPT-2, which has a merge file"] if "merge_file" in named and not gated else []
        # The class of a tokenizer says its size where no other is named.
        kind = f"type:{_value(named, 'tokenizer_type')}"
        told += [kind] if not told or not any(re.search(r"[a-z]", one.lower()) for one in told) else []
        sizes = (
            (int(one["vocabulary"]), one["whose"])
            for name in told
            for one in records("tokenizers")
            # GPT-2's class reads any file of merges.
            if re.search(one["mark"].lower(), name.lower()) and not (gated and int(one["vocabulary"]) == _OF_GPT2)
        )
        known = next(sizes, None)
        vocab, whose = known or (_VOCABULARY, "Llama 3, since no known tokenizer is named")
        yield "vocab", vocab, f"the vocabulary is not stated: {vocab:,}, as of {whose} (--set model.vocab=N)"


def layout_gaps(columns: Mapping[str, Stated], run: CommandRun) -> Iterator[_Gap]:
    """Columns of the layout."""
    sizes = {name: stated.value for name, stated in columns.items() if isinstance(stated.value, int)}
    if "gbs" not in sizes and {"mbs", "dp"} <= sizes.keys():
        batch = sizes["mbs"] * sizes["dp"]
        yield "gbs", batch, f"the global batch is not stated: {batch:,}, micro-batch times data parallel"
    every = re.match(r"full every (\d+)", columns.get("recompute", NOTHING).value)
    if every and "layers" in sizes:
        # torchtitan 0.2.2, distributed/activation_checkpoint.py, _apply_layer_sac.
        each = sizes["layers"] // (sizes.get("pp", 1) * sizes.get("vpp", 1))
        some = each // int(every[1])
        words = f"one layer in {every[1]} is recomputed: priced as the first {some} of {each} of each chunk"
        yield "recompute", f"full on {some}" if some else "none", words
    stated = {name: one.value for name, one in run.columns.items()}
    staged = stated.get("pp", 1) != 1 and stated.get("precision") == "bf16"
    if run.software == "deepspeed" and staged and stated.get("zero_stage", "0") == "0":
        # deepspeed 0.19.8, runtime/engine.py.
        yield "zero_stage", "1", "DeepSpeed's BF16 optimizer of pipelines shards optimizer states over data: ZeRO-1"
