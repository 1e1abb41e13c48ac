"""Sections of a layer type in the model document: latent attention, its indexer, experts, and what mixes tokens; and
patterns of layer types."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from axonn_tune.specs.document import LARGEST_SIZE, Document, Size

MOST_EXPERTS = 65_536
"""Of a layer: several times those of any model."""

Score: TypeAlias = Literal["softmax", "sigmoid", "sqrtsoftplus"]
PositiveFloat = Annotated[float, Field(gt=0, le=1e15, allow_inf_nan=False)]


class LatentAttention(Document):
    """Multi-head latent attention: queries, keys and values go through latents, then to all heads (DeepSeek-V2)."""

    query_rank: Size | None = Field(default=None, description="q_lora_rank; without one queries have no latent.")
    kv_rank: Size = Field(description="kv_lora_rank, the latent of keys and values.")
    nope_dim: Size = Field(description="qk_nope_head_dim: of a head's query and key, what is not rotated.")
    rope_dim: Size = Field(description="qk_rope_head_dim: what is rotated; all heads share its key.")
    value_dim: Size = Field(description="v_head_dim.")


class Indexer(Document):
    """The indexer of sparse attention: a query attends to the tokens that it scores highest (DeepSeek-V3.2)."""

    left_out_at_default: ClassVar[tuple[str, ...]] = ("shared",)

    heads: Size = Field(description="index_n_heads.")
    head_dim: Size = Field(description="index_head_dim.")
    topk: Size = Field(description="index_topk, tokens that a query attends to.")
    shared: bool = Field(default=False, description="No indexer of its own: takes what the last one before it chose.")


class Experts(Document):
    """A mixture of experts in place of the MLP."""

    left_out_at_default: ClassVar[tuple[str, ...]] = (
        *("shared_width", "shared_gate", "groups", "chosen_groups", "normalized"),
    )

    count: Annotated[int, Field(gt=0, le=MOST_EXPERTS)] = Field(description="Routed experts, E.")
    per_token: Size = Field(description="Experts a token is sent to, K.")
    width: Size = Field(description="F of one expert.")
    shared_width: Annotated[int, Field(ge=0, le=LARGEST_SIZE)] = Field(
        default=0, description="F of all shared experts together, which see every token."
    )
    shared_gate: bool = Field(default=False, description="A gate of the shared experts' output, one number a token.")
    latent_width: Size | None = Field(default=None, description="Tokens are projected to it before dispatch.")
    clamp: PositiveFloat | None = Field(
        default=None, description="Limit of gate and linear half in front of the activation (swiglu_limit)."
    )
    score: Score = Field(default="softmax", description="What the router makes of logits.")
    normalized: bool = Field(default=True, description="Scores of a token's experts sum to one, for scripts.")
    scaling: PositiveFloat | None = Field(default=None, description="Factor of the routed output, for scripts.")
    score_bias: bool | None = Field(
        default=None, description="A bias without a gradient, added to scores for the choice alone, balances the load."
    )
    groups: Size = Field(default=1, description="Groups of experts, for node-limited routing.")
    chosen_groups: Size = Field(default=1, description="Groups a token's experts are in.")

    @model_validator(mode="after")
    def _consistent(self) -> Experts:
        if self.shared_gate and not self.shared_width:
            raise ValueError("shared_gate is true, but shared_width is 0: there is no shared expert")
        if self.count % self.groups:
            near = next(one for one in range(min(self.groups, self.count), 0, -1) if self.count % one == 0)
            raise ValueError(f"count ({self.count}) is not divisible by groups ({self.groups}), but by {near}")
        if self.chosen_groups > self.groups:
            raise ValueError(f"chosen_groups ({self.chosen_groups}) exceeds groups ({self.groups})")
        most = self.count // self.groups * self.chosen_groups
        if self.per_token > most:
            raise ValueError(f"per_token ({self.per_token}) exceeds the experts it chooses from ({most})")
        return self


def size(meaning: str, *, default: int | None = None) -> Any:  # noqa: ANN401 - of a field
    """A size of a mixer in its own file, which must be given without a default."""
    return Field(description=meaning) if default is None else Field(default=default, description=meaning)


def optional(meaning: str) -> Any:  # noqa: ANN401 - of a field
    """A part of a mixer in its own file, which it may be without."""
    return Field(default=None, description=meaning)


class Mixer(Document):
    """Sizes of what mixes tokens in place of attention, a section of a layer type.

    SECTION: its key there; WHAT: that in words; TITLE: what a model with it has, in words; WORDS: its
    sizes. NAMES: what lists of layers
    in a config.json call it, KEYS: keys of its sizes there. LETTER: of a layer of it alone in patterns of hybrids of
    Megatron-Core, VARIANT: its name there in place of attention; without both it has none. PARSED: sizes of its parser
    where none are stated.
    """

    SECTION: ClassVar[str] = ""
    WHAT: ClassVar[str] = ""
    TITLE: ClassVar[str] = ""
    WORDS: ClassVar[str] = ""
    NAMES: ClassVar[tuple[str, ...]] = ()
    KEYS: ClassVar[Mapping[str, str]] = {}
    LETTER: ClassVar[str] = ""
    VARIANT: ClassVar[str] = ""
    PARSED: ClassVar[Mapping[str, int]] = {}

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if problem := self.problem:
            raise ValueError(problem)
        return self

    @property
    def problem(self) -> str:
        """What of its sizes does not fit the others, if something does not."""
        return ""

    @property
    def words(self) -> str:
        """Its sizes, in words."""
        return self.WORDS.format(**self.model_dump()) or self.TITLE

    @property
    def pair_width(self) -> int:
        """Multiply-adds of a query with a key, all heads, of one that has some."""
        return 0

    def pairs(self, length: float) -> float:
        """Keys of a query, in the mean of a sequence."""
        return 0.0

    @property
    def predicting(self) -> Self:
        """That of a layer of multi-token prediction, where the last layer has this one."""
        return self


class Mamba(Mixer):
    """A Mamba-2 mixer: one GEMM in, a short convolution, a scan by chunks, one GEMM out (arXiv 2405.21060)."""

    SECTION: ClassVar[str] = "mamba"
    TITLE: ClassVar[str] = "Mamba-2"
    WORDS: ClassVar[str] = "Mamba-2 of {heads} heads of {head_dim}, state {state}"
    NAMES: ClassVar[tuple[str, ...]] = ("M", "mamba", "linear_attention")
    LETTER: ClassVar[str] = "M"
    PARSED: ClassVar[Mapping[str, int]] = {"head_dim": 64, "state": 128, "groups": 8}
    KEYS: ClassVar[Mapping[str, str]] = {
        "heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state": "ssm_state_size",
        "groups": "n_groups",
        "conv": "conv_kernel",
        "chunk": "chunk_size",
    }

    heads: Size = Field(description="mamba_num_heads.")
    head_dim: Size = Field(description="mamba_head_dim.")
    state: Size = Field(description="ssm_state_size, of a head.")
    groups: Size = Field(description="Groups of heads that share the state's projections.")
    conv: Size = Field(default=4, description="Length of the convolution, in tokens.")
    chunk: Size = Field(default=128, description="Tokens of a chunk of the scan.")

    @property
    def conv_width(self) -> int:
        """What is convolved: the inner width, and both projections of the state."""
        return self.heads * self.head_dim + 2 * self.groups * self.state


MOST_LAYERS = 1_000
"""Of a model: several times those of any."""

NAME = r"[A-Za-z_][\w-]{0,63}"
"""Of a layer type."""
_ITEM = re.compile(rf"\s*(?:\(([^()]*)\)|({NAME}))(?:\*(\d{{1,9}}))?(?:\s+|$)", re.ASCII)


def expand(pattern: str) -> list[str]:
    """Names of the layer types of a pattern, one a layer: `name`, `name*count` or `(name name)*count`, with spaces.

    ValueError for what is no pattern, and for more than `MOST_LAYERS` layers.
    """
    found: list[str] = []
    at = 0
    while at < len(pattern):
        item = _ITEM.match(pattern, at)
        names = [] if item is None else [item[2]] if item[1] is None else expand(item[1])
        if item is None or not names or (item[3] and not int(item[3])):
            raise ValueError(
                f"{pattern[at : at + 40]!r} is no pattern of layers, such as dense*3 moe*58 or (local full)*9"
            )
        count = int(item[3] or 1)
        if len(found) + count * len(names) > MOST_LAYERS:
            raise ValueError(f"a pattern has at most {MOST_LAYERS:,} layers, not {len(found) + count * len(names):,}")
        found += names * count
        at = item.end()
    if not found:
        raise ValueError("must be a number of layers, or a pattern such as dense*3 moe*58")
    return found


def runs_of(pattern: str) -> list[tuple[str, int]]:
    """Names of layer types of a pattern, and how many layers follow each other of each."""
    return [(name, len(list(run))) for name, run in groupby(expand(pattern))]


def pattern_of(names: Iterable[str]) -> str:
    """The pattern of layers that have these layer types, one a layer."""
    return " ".join(f"{name}*{len(list(run))}" for name, run in groupby(names))


def opened(runs: Iterable[tuple[str, int]], opening: int) -> list[tuple[str, bool, int]]:
    """Runs, of which the first `opening` layers are apart: name, whether they are among these, and their number."""
    found = list[tuple[str, bool, int]]()
    for name, count in runs:
        first = min(opening, count)
        opening -= first
        found += [(name, opens, some) for opens, some in ((True, first), (False, count - first)) if some]
    return found
